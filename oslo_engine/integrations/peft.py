"""PEFT around a split model."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from oslo_engine.errors import UnsupportedError


def refuse_adapters(model: nn.Module, where: str) -> None:
    """Raises UnsupportedError where PEFT has put adapters into a model.

    An adapter of a tensor-parallel layer reads or writes features of which each rank has a part, and one that nobody has cut
    would be trained on the gradients of one rank's part.
    """
    if "peft_config" in model.__dict__:
        raise UnsupportedError(
            "adapters in a model that is split by tensor parallelism are not supported",
            where=where,
            got=", ".join(str(name) for name in model.__dict__["peft_config"]),
            hint="add them after parallelize(pp=...), with tp=1; or train without them",
        )


def split_model_in(model: nn.Module) -> PreTrainedModel | None:
    """The parallelized model in a wrapper such as DistributedDataParallel or PEFT's; None if there is none."""
    seen: nn.Module | None = model
    while seen is not None and "_oslo" not in seen.__dict__:
        inner = next((getattr(seen, name, None) for name in ("module", "base_model", "model") if name in seen._modules), None)
        seen = inner if isinstance(inner, nn.Module) else None
    assert seen is None or isinstance(seen, PreTrainedModel)
    return seen
