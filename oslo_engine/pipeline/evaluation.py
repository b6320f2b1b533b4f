"""Forward without gradients: a batch goes through the stages, and every rank gets the outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from transformers.cache_utils import Cache

from oslo_engine.comm.collectives import Axis
from oslo_engine.errors import UnsupportedError
from oslo_engine.pipeline.micro_batch import MicroBatch, split_batch, weigh_by_labels
from oslo_engine.rewrite.cache_calls import find_cache

if TYPE_CHECKING:
    from oslo_engine.pipeline.model_program import ModelProgram


def evaluate(program: ModelProgram, module: nn.Module, kwargs: Mapping[str, Any]) -> Any:
    """Run the model, or a part of it that generate calls by itself (the encoder), over all stages.

    The batch is cut into micro-batches; with a cache it goes as one, since a cache holds the rows of one batch.

    Args:
        kwargs: of the module's forward, the same on every rank.

    While ``generate`` runs without a Transformers cache (models that keep a state of their own), each step computes the whole
    text again.

    Returns:
        What ``module`` returns for the whole batch, on every rank; its cache is the rank's own. While ``generate`` runs, the
        logits are zeros except where the next token is chosen.

    Raises:
        UnsupportedError: a cache is wanted but none is given; or a second, of a class whose state is not all in it.

    Communication: values between stages; the outputs from the last stage's rank to the other pp ranks.
    """
    given = {name: value for name, value in kwargs.items() if value is not None}
    given = program.with_own_cache(module, given)
    cache = find_cache(given)
    if cache is None and program.decoding and given.get("use_cache") and (name := program.cache_argument) is not None:
        # A second run beside that of ``generate`` (guidance), which it lets the model make a cache for.
        if (kept := program.flows.kept_in_modules) is not None:
            raise UnsupportedError(
                "this class keeps a state in its modules: in a pipeline nothing else can run between the tokens of a generate",
                where=f"{type(program.model).__name__}, {kept}",
                got="a second run beside it (guidance, or a call of the model in a logits processor)",
                hint="pass use_cache=False: every step then computes the whole text anew",
            )
        cache = given[name] = program.new_cache()
    if cache is None:
        if given.get("use_cache") and not program.decoding:
            raise UnsupportedError(
                "a pipeline cannot return a cache that it was not given",
                got="use_cache=True without a cache",
                hint="pass a cache (DynamicCache(config=model.config)), or let model.generate make it",
            )
        if "use_cache" in given or module is program.model:
            given["use_cache"] = False
    micros = _micro_batches(program, given, whole=cache is not None)
    if any("label" in name for name in given):
        if given.get("num_items_in_batch") is not None:
            program.check_loss()
        micros = weigh_by_labels(micros, shift_labels=program.shifts_labels, divides_by_count=program.divides_by_count)
    program.runtime.refuse_open_loop()
    outputs = program.runtime.evaluate(program.prepared(micros, module, given))
    merged = None if outputs is None else _merge(outputs, micros)
    axis, source = program.runtime.links.axis, program.state.plan.rank_of_stage[-1]
    only_ids_travel = (
        program.decoding and not program.whole_outputs and module is program.model
    )  # the encoder's output is needed by every decoder stage
    known = (program.outputs_described, _form(given, module)) if only_ids_travel else None
    return _share(
        merged,
        axis,
        source,
        cache,
        known,
        keep_tensors=not only_ids_travel,
        writable=program.writes_logits,
        device=program.runtime.device,
    )


def _form(given: Mapping[str, Any], module: nn.Module) -> tuple[Any, ...]:
    """Equal for calls whose outputs differ in nothing but numbers: only texts so far and their masks grow from call to call."""
    new = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")
    shapes = tuple((name, tuple(value.shape)) for name in new if isinstance(value := given.get(name), Tensor))
    plain = tuple((name, value) for name, value in sorted(given.items()) if isinstance(value, (bool, int, float, str)))
    return id(module), tuple(sorted(given)), shapes, plain


def _micro_batches(program: ModelProgram, given: Mapping[str, Any], *, whole: bool) -> list[MicroBatch]:
    rows = _rows(given)
    micros = split_batch(
        {name: v for name, v in given.items() if not isinstance(v, Cache)}, rows if whole else program.state.micro_batch_size
    )
    if whole:
        only = micros[0]
        return [MicroBatch(only.index, dict(given), only.weight, only.signature)]
    return micros


def _merge(outputs: Sequence[Any], micros: Sequence[MicroBatch]) -> Any:
    """One output for the whole batch: rows one after another, losses weighted by their share."""
    if len(outputs) == 1:
        return outputs[0]
    weights = None
    flat = [pytree.tree_flatten(output, is_leaf=lambda leaf: isinstance(leaf, Cache)) for output in outputs]
    merged = []
    for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
        first = leaves[0]
        if not isinstance(first, Tensor):
            merged.append(first)
        elif first.ndim:
            merged.append(torch.cat(leaves, _dim_of_rows(leaves, micros)))
        else:
            weights = weights or [micro.weight for micro in micros]
            # A micro-batch without labels weighs 0, and its loss is no number.
            merged.append(sum(leaf * weight for leaf, weight in zip(leaves, weights, strict=True) if weight))
    return pytree.tree_unflatten(merged, flat[0][1])


def _dim_of_rows(leaves: Sequence[Tensor], micros: Sequence[MicroBatch]) -> int:
    """The dimension along which the outputs of micro-batches follow one another: the first that has as many entries as rows."""
    rows = [_rows(micro.kwargs) for micro in micros]
    for dim in range(leaves[0].ndim):
        if [leaf.shape[dim] for leaf in leaves] == rows:
            return dim
    return 0  # [rows * something, ...], such as the router's logits of all tokens


def _rows(kwargs: Mapping[str, Any]) -> int:
    leaves = pytree.tree_leaves(dict(kwargs))
    return max((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), default=1)


@dataclass(frozen=True)
class _Described:
    """A tensor of an output, for ranks that do not have it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _OwnCache:
    """Stands for the cache in an output that travels: every rank has its own."""


def _placeholder(tensor: _Described, device: torch.device, *, writable: bool) -> Tensor:
    return torch.zeros(tensor.shape if writable else (), dtype=tensor.dtype, device=device).expand(tensor.shape)


def _share(
    output: Any,
    axis: Axis,
    source: int,
    cache: Cache | None,
    known: tuple[dict[Any, Any], Any] | None,
    *,
    keep_tensors: bool,
    writable: bool,
    device: torch.device,
) -> Any:
    """Give every pp rank the output that the source has.

    Args:
        known: descriptions of outputs by the form of the call, and this call's: the same form is described only once.
    """
    is_cache = lambda leaf: isinstance(leaf, Cache)  # noqa: E731
    box: list[Any] = [None if known is None else known[0].get(known[1])]
    is_new = box[0] is None
    tensors: list[Tensor] = []
    if axis.rank == source:
        leaves, structure = pytree.tree_flatten(output, is_leaf=is_cache)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        described = [
            _Described(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else _OwnCache() if is_cache(leaf) else leaf
            for leaf in leaves
        ]
        box = [pytree.tree_unflatten(described, structure)]
    if is_new:
        dist.broadcast_object_list(
            box, group=axis.group, group_src=source, device=torch.device("cpu") if device.type == "cpu" else device
        )
    if known is not None:
        known[0][known[1]] = box[0]
    leaves, structure = pytree.tree_flatten(box[0])
    received = iter(tensors)
    filled: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, _OwnCache):
            filled.append(cache)
        elif not isinstance(leaf, _Described):
            filled.append(leaf)
        elif keep_tensors:
            tensor = (
                next(received).contiguous() if axis.rank == source else torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
            )
            dist.broadcast(tensor, group=axis.group, group_src=source)
            filled.append(tensor)
        else:
            filled.append(next(received) if axis.rank == source else _placeholder(leaf, device, writable=writable))
    return pytree.tree_unflatten(filled, structure)
