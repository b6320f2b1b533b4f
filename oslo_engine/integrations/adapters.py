"""LoRA on a module that tensor parallelism has cut: how the two halves of an adapter lie on the tp ranks.

    y = W x + scale * B (A x)        A: [r, in], the lower half        B: [out, r], the upper half

    column     B is cut as the rows of W are. A is whole; each rank has a part of its gradient, so that is summed.
    row        A is cut as the columns of W are, and its r results are summed over the ranks. B is whole.
    embedding  A is cut by vocabulary, and what is looked up is summed. B is whole.
    head       B is cut by vocabulary: it is a vocabulary-parallel head behind A.
    whole      nothing is cut or summed.

``place_adapter`` makes that of a layer of PEFT whose halves are there; the layer's own forward then computes it. What a rank
holds is said by ``TensorPlan``s, as for every other parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from oslo_engine.errors import UnsupportedError
from oslo_engine.layers.partial import sum_gradient
from oslo_engine.layers.region import ColumnEntry, Entry, InnerLinear, RowLayer, inner_row_parallel, row_parallel
from oslo_engine.layers.specialize import specialize
from oslo_engine.layers.vocabulary import VocabParallelEmbedding, VocabParallelHead, vocab_parallel_head
from oslo_engine.plan.plan import TensorPlan
from oslo_engine.rewrite.state import ParallelState
from oslo_engine.rewrite.switch import switch_around
from oslo_engine.shards import Shard

LOWER, UPPER = ("lora_A", "lora_embedding_A"), ("lora_B", "lora_embedding_B")


class Kind(Enum):
    """What a module is to an adapter around it.

    INNER: a row layer inside a region, whose whole output each rank uses for a share. SCOPE_ROW: one whose output is summed
    later, at its region. PARTIAL: whole, inside a region, with each rank having a part of its gradient.
    """

    WHOLE = "whole"
    PARTIAL = "partial"
    COLUMN = "column"
    ROW = "row"
    INNER = "inner row"
    SCOPE_ROW = "row that is summed at its region"
    EMBEDDING = "embedding"
    HEAD = "head"


_LOWER_CUT = (Kind.ROW, Kind.INNER, Kind.SCOPE_ROW, Kind.EMBEDDING)
_UPPER_CUT = (Kind.COLUMN, Kind.HEAD)
_LOWER_SUMMED = (Kind.COLUMN, Kind.PARTIAL)
_UPPER_SUMMED = (Kind.PARTIAL, Kind.INNER, Kind.SCOPE_ROW)


def kind_of(base: nn.Module, weight: TensorPlan, state: ParallelState) -> Kind:
    """
    Raises:
        UnsupportedError: an adapter around this module would not compute what it does around the whole one.
    """
    if state.plan.topology.tp == 1:
        return Kind.WHOLE
    if any(isinstance(hook, Entry) for hook in base._forward_pre_hooks.values()) or any(
        name in region.once for region in state.plan.regions for name in weight.aliases
    ):
        raise UnsupportedError(
            "an adapter on a module of which each rank adds a share is not supported under tensor parallelism",
            where=weight.name,
            hint="leave it out of target_modules, or use tp=1",
        )
    if isinstance(base, VocabParallelEmbedding):
        return Kind.EMBEDDING
    if isinstance(base, VocabParallelHead):
        return Kind.HEAD
    if weight.shard is None:
        return Kind.PARTIAL if weight.partial else Kind.WHOLE
    if isinstance(base, InnerLinear):
        return Kind.INNER
    if isinstance(base, RowLayer):
        return Kind.ROW
    return Kind.COLUMN if weight.shard.dim == _out_dim(base) else Kind.SCOPE_ROW


def parts_of(layer: nn.Module, adapter: str) -> Iterator[tuple[str, nn.Module, str]]:
    """(name within the layer, module, attribute) of the parameters of one adapter, those that other stages hold included."""
    for path, module in layer.named_modules():
        words = path.split(".") if path else []
        if words[:1] == ["base_layer"]:
            continue
        own = [leaf for leaf, parameter in module._parameters.items() if parameter is not None]  # a bias may be None
        for leaf in (*own, *module.__dict__.get("_oslo_elsewhere", ())):
            if [*words, leaf][1:2] == [adapter]:
                yield ".".join([*words, leaf]), module, leaf


def place_adapter(
    layer: Any, adapter: str, path: str, weight: TensorPlan, state: ParallelState, values: Mapping[str, Tensor]
) -> tuple[TensorPlan, ...]:
    """Give an adapter's parameters what this rank holds of them, and put the communication in.

    Args:
        layer: of PEFT, around the base module.
        path: its name in the model.
        weight: of the base module.
        values: of all parameters, whole, by their names within the layer.

    Returns:
        What each rank holds.

    Communication: none here; backward of a column layer one all-reduce of A's size, forward of a row layer one of r features
    for each token, both on tp.
    """
    base, at = layer.get_base_layer(), state.mesh.at
    kind = kind_of(base, weight, state)
    _check(layer, adapter, path, kind, state)
    tensors = []
    held = base._parameters.get("weight") is not None
    for name, module, leaf in list(parts_of(layer, adapter)):
        value = values[name]
        tensor = _tensor_plan(f"{path}.{name}", name, value, kind, weight, state)
        tensors.append(tensor)
        if held:
            local = value.detach() if tensor.shard is None else tensor.shard.apply(value.detach(), at.tp_rank)
            _set(module, leaf, local)
        else:
            _remove(module, leaf, tensor.local_shape(at.tp_rank))
    _communicate(layer, adapter, path, kind, state, {tensor.name.removeprefix(f"{path}."): tensor for tensor in tensors})
    return tuple(tensors)


def stand_around(layer: Any) -> None:
    """Do once what the base module does before its own forward: a layer around it reads the same input."""
    if "_oslo_stands" in layer.__dict__:
        return
    layer.__dict__["_oslo_stands"] = True
    base = layer.get_base_layer()
    for hook in base._forward_pre_hooks.values():
        if isinstance(hook, ColumnEntry):
            layer.register_forward_pre_hook(hook)
    if isinstance(base, VocabParallelEmbedding):
        specialize(layer, _CutLookup)
    switch_around(layer, base)


def _check(layer: Any, adapter: str, path: str, kind: Kind, state: ParallelState) -> None:
    drops = not isinstance(layer.lora_dropout[adapter], nn.Identity)
    reason = None
    if kind is Kind.SCOPE_ROW and layer.lora_bias[adapter]:
        reason = "lora_bias=True on a row layer that is summed at its region: the bias would be added by every rank"
    elif drops and kind is Kind.PARTIAL:
        reason = "lora_dropout on a layer that is whole inside a tensor-parallel region"
    elif drops and state.plan.sequence_parallel and kind is Kind.COLUMN:
        reason = "lora_dropout under sequence parallelism"
    if reason is not None:
        raise UnsupportedError(f"not supported: {reason}", where=path, hint="leave the setting out, or the layer")


def _out_dim(base: nn.Module) -> int:
    return 1 if isinstance(base, Conv1D) else 0


def _tensor_plan(full: str, name: str, value: Tensor, kind: Kind, weight: TensorPlan, state: ParallelState) -> TensorPlan:
    half, cut = name.split(".")[0], weight.shard
    shard, summed = None, False
    if half in LOWER:
        summed = kind in _LOWER_SUMMED
        if kind in _LOWER_CUT and cut is not None:
            shard = Shard(1, cut.size, cut.spans)
    elif half in UPPER:
        summed = kind in _UPPER_SUMMED or (kind is Kind.ROW and state.plan.sequence_parallel)
        if kind in _UPPER_CUT and cut is not None:
            shard = Shard(0, cut.size, cut.spans)
    dtype = str(value.dtype).removeprefix("torch.")
    return TensorPlan(full, (full,), tuple(value.shape), dtype, shard, weight.stages, summed)


def _set(module: nn.Module, leaf: str, local: Tensor) -> None:
    parameter: Any = module._parameters[leaf]
    if parameter.is_meta and not local.is_meta:
        module._parameters[leaf] = nn.Parameter(local, requires_grad=parameter.requires_grad)
    else:  # in place: an optimizer may have it already
        parameter.data = local.to(parameter.device, parameter.dtype)


def _remove(module: nn.Module, leaf: str, shape: tuple[int, ...]) -> None:
    """Leave a meta tensor behind, as for all that other stages hold."""
    parameter = module._parameters.pop(leaf, None)
    if parameter is not None:
        module.__dict__[leaf] = torch.empty(shape, dtype=parameter.dtype, device="meta")
        module.__dict__.setdefault("_oslo_elsewhere", []).append(leaf)


def _communicate(
    layer: Any, adapter: str, path: str, kind: Kind, state: ParallelState, tensors: Mapping[str, TensorPlan]
) -> None:
    tp, streams, parallel_sequence = state.mesh.tp, state.streams, state.plan.sequence_parallel
    if kind is Kind.ROW:
        row_parallel(layer.lora_A[adapter], tp, streams, sequence_parallel=parallel_sequence)
    elif kind is Kind.INNER:
        inner_row_parallel(layer.lora_A[adapter], tp)
    elif kind is Kind.HEAD and "weight" in layer.lora_B[adapter]._parameters:
        vocab_parallel_head(layer.lora_B[adapter], tp, layer.get_base_layer().vocab.sizes)
    dropout = layer.lora_dropout[adapter]
    if not isinstance(dropout, nn.Identity) and kind in (Kind.COLUMN, Kind.ROW):
        # The input of a column layer is the same on every rank; around a row layer each rank has other features.
        stream = partial(streams.alike, path) if kind is Kind.COLUMN else partial(streams.block, per_rank=True)
        specialize(dropout, _Masks, _oslo_stream=stream)
    for name, module, leaf in parts_of(layer, adapter):
        tensor = tensors[name]
        overlap = tensor.shard if tensor.shard is not None and tensor.shard.overlaps else None
        if (tensor.partial or overlap is not None) and leaf in module._parameters:
            sum_gradient(module, leaf, tp, overlap)


class _CutLookup:
    """PEFT's embedding layer around a vocabulary-parallel embedding: A is looked up as the embedding itself is."""

    def _embed(self, input: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
        found: Tensor = self.get_base_layer().look_up(input, weight)  # type: ignore[attr-defined]
        return found


class _Masks:
    """Dropout before A, whose mask belongs to another random stream than the one that is drawn from where it stands."""

    _oslo_stream: Callable[[], AbstractContextManager[None]]
    training: bool

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        with self._oslo_stream():
            dropped: Tensor = super().forward(x)  # type: ignore[misc]
        return dropped
