"""PEFT around a split model."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def split_model_in(model: nn.Module) -> PreTrainedModel | None:
    """The parallelized model in a wrapper such as DistributedDataParallel or PEFT's; None if there is none."""
    seen: nn.Module | None = model
    while seen is not None and "_oslo" not in seen.__dict__:
        inner = next((getattr(seen, name, None) for name in ("module", "base_model", "model") if name in seen._modules), None)
        seen = inner if isinstance(inner, nn.Module) else None
    assert seen is None or isinstance(seen, PreTrainedModel)
    return seen
