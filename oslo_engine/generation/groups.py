"""Decoding a batch in groups of rows: while one pipeline stage computes for one group, the next does for another.

Rows do not know of each other in ``generate``, so groups give the tokens of the whole batch. What would look at all rows at
once, or keeps something on the model between two tokens, stays together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin

from oslo_engine.errors import UnsupportedError
from oslo_engine.generation.agreement import Agreement
from oslo_engine.pipeline.autocast import AutocastState
from oslo_engine.pipeline.turns import Turns
from oslo_engine.rewrite.state import ParallelState

_OF_ROWS = ("inputs", "input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
# Where halving the rows of a step saves a quarter of its time: a Linear of 1024 x 4096 in fp32 on one core takes 1.1 ms for one
# row, 2.8 for 8, 3.8 for 16, 5.2 for 32, 8.0 for 64.
_LEAST_ROWS = 16
_PLAIN = (bool, int, float, str, type(None), list, tuple)


def number_of_groups(
    model: Any,
    state: ParallelState,
    agreement: Agreement,
    given: Mapping[str, Any],
    asked: Callable[[str], Any],
    wish: int | None,
) -> int:
    """Into how many groups the rows of this ``generate`` are dealt; the same on every rank.

    Args:
        wish: what the caller asked for; None for the default: one for each stage, but none of fewer than 16 rows (beams count),
            and one only where something speaks against more. A group of few rows takes nearly as long as all of them, since
            reading the weights is what takes the time. A single row is one group, whatever was asked for.

    Raises:
        UnsupportedError: more than one was asked for, where that would change the result or is not possible.
    """
    check_groups(wish, pipeline=state.program is not None)
    rows = _rows(given)
    most = min(rows, min(state.plan.topology.pp, rows * (asked("num_beams") or 1) // _LEAST_ROWS) if wish is None else wish)
    if state.program is None or most <= 1:
        return 1
    against = _against(model, state, agreement, given, asked)
    if against is None and wish is None and asked("do_sample"):
        against = "sampling would draw in another order than the unsplit model"
    if against is None:
        return most
    if wish is not None:
        raise UnsupportedError("this cannot be decoded in groups of rows", got=against, hint="leave decode_groups out")
    return 1


def check_groups(wish: int | None, *, pipeline: bool) -> None:
    """Raises:
    UnsupportedError: it is no number of groups; or more than one was asked for without a pipeline.
    """
    if wish is None:
        return
    if isinstance(wish, bool) or not isinstance(wish, int) or wish < 1:
        raise UnsupportedError("the number of groups must be a positive integer", got=repr(wish))
    if wish > 1 and not pipeline:
        raise UnsupportedError(
            "only a pipeline decodes in groups of rows",
            got=f"decode_groups={wish}",
            hint="leave decode_groups out; without pp there are no stages that could compute for different groups",
        )


def _against(
    model: Any, state: ParallelState, agreement: Agreement, given: Mapping[str, Any], asked: Callable[[str], Any]
) -> str | None:
    """Why the rows must stay together; None if they need not."""
    rows = _rows(given)
    tensors = {name for name, value in given.items() if isinstance(value, Tensor)}
    others = [name for name, value in given.items() if name not in tensors and not isinstance(value, _PLAIN)]
    others = [name for name in others if name != "generation_config"]
    rope = {str(getattr(module, "rope_type", "")) for module in model.modules()}
    kept = state.program.flows.kept_in_modules
    reasons = {
        "a stage for each rank is needed": state.plan.num_stages != state.plan.topology.pp,
        "processors, criteria or a streamer of the caller's": agreement.own_processors or agreement.own_stops,
        "assisted generation": agreement.assisted,
        "more is returned than tokens": bool(asked("return_dict_in_generate")),
        "a cache that the model keeps": asked("cache_implementation") is not None,
        f"arguments other than plain ones: {others}": bool(others),
        "tensors that are not one row each": not all(_is_of_rows(name, given[name], rows) for name in tensors),
        "a generate of the model's own": has_own_generate(model),
        "position embeddings that follow the longest text": any("dynamic" in one or "longrope" in one for one in rope),
        "positions kept on the model": any(hasattr(module, "rope_deltas") for module in model.modules()),
        f"a state kept in the model's modules: {kept}": kept is not None,
        "experts that change how they compute": state.mesh.device.type != "cpu"
        and "grouped_mm" in model.get_experts_implementation().values(),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def has_own_generate(model: Any) -> bool:
    """Whether the model's class does more around the decoding than Transformers' ``generate`` does for all."""
    classes = [base for base in type(model).__mro__ if "generate" in vars(base)]
    return next(base for base in classes if not base.__module__.startswith("oslo_engine")) is not GenerationMixin


def _rows(given: Mapping[str, Any]) -> int:
    return next((given[name].shape[0] for name in _OF_ROWS if isinstance(given.get(name), Tensor) and given[name].ndim), 1)


def _is_of_rows(name: str, tensor: Tensor, rows: int) -> bool:
    return name in _OF_ROWS and tensor.ndim > 0 and tensor.shape[0] == rows


def generate_in_groups(
    state: ParallelState, original: Callable[..., Any], given: Mapping[str, Any], num_groups: int, fill: int
) -> Tensor:
    """Args:
        original: ``generate`` of the model's class, bound.
        fill: what rows are filled up with behind their end.

    Returns:
        [rows, length of the longest], as ``generate`` returns it for all rows.

    Communication: that of ``num_groups`` generates.
    """
    pieces = {name: value.tensor_split(num_groups) for name, value in given.items() if isinstance(value, Tensor)}
    autocast = AutocastState.capture(state.mesh.device)

    def job(group: int) -> Any:
        mine = {name: pieces[name][group] if name in pieces else value for name, value in given.items()}
        with autocast.applied():
            return original(**mine)

    runtime, pp = state.program.runtime, state.plan.topology.pp
    runtime.turns, runtime.links.bounded = Turns(pp - state.mesh.pp.rank, pp), False
    try:
        found = runtime.turns.run_all([lambda group=group: job(group) for group in range(num_groups)])
    finally:
        runtime.turns, runtime.links.bounded = None, True
    longest = max(piece.shape[1] for piece in found)
    return torch.cat([torch.nn.functional.pad(piece, (0, longest - piece.shape[1]), value=fill) for piece in found])


def fill_token(asked: Callable[[str], Any]) -> int:
    """What ``generate`` fills finished rows up with."""
    pad, ends = asked("pad_token_id"), asked("eos_token_id")
    first = None if ends is None else int(ends[0]) if isinstance(ends, (list, tuple, Tensor)) and len(ends) else int(ends)
    if (asked("num_beams") or 1) > 1:
        return -1 if first is None else int(pad or first)
    return int(pad) if pad is not None else first or 0
