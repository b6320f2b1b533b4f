"""In which order a model calls its parts: found by calling a copy of it that has no weights."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from oslo_engine.rewrite.meta_weights import without_weights
from oslo_engine.rewrite.skeleton import example_inputs, skeleton


def call_order(model: PreTrainedModel, paths: Collection[str]) -> dict[str, int]:
    """When each of these modules is first called, as a position.

    Returns:
        By path; empty for a model that does not run on text alone. What is not called has no entry.
    """
    first: dict[str, int] = {}

    def note(path: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            first.setdefault(path, len(first))

        return hook

    try:
        twin = skeleton(model).train()
        inputs = example_inputs(twin, "train")
        for path in paths:
            twin.get_submodule(path).register_forward_pre_hook(note(path))
        with without_weights(twin), torch.no_grad():
            twin(**inputs)
    except Exception:  # whatever a model's own code raises that wants sound or pictures: then registration must do
        return {}
    return first
