"""What calling a parallelized model does: one split forward, or a batch through the pipeline."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from oslo_engine.comm.collectives import all_reduce_together
from oslo_engine.comm.same_batch import BatchComparison
from oslo_engine.errors import BatchError, UnsupportedError
from oslo_engine.rewrite.state import ParallelState, parallel_state


def run_forward(model: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward of a parallelized model.

    Args:
        original: the forward of its class, unbound.

    Returns:
        Without a pipeline what ``original`` returns; with one a ``PipelineLoop`` where gradients are wanted, else the outputs
        of the whole batch on every rank.
    """
    state = parallel_state(model)
    if state.switch.current is not None or state.mesh.model.size == 1:
        return _run(model, original, args, kwargs)
    if state.program is not None and torch.is_grad_enabled():
        return _run(model, original, args, kwargs)  # a loop, which numbers its batch itself
    with state.mesh.calls.call("a forward" if torch.is_grad_enabled() else "a forward without gradients"):
        return _run(model, original, args, kwargs)


def _run(model: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    state = parallel_state(model)
    if state.switch.current is not None or state.mesh.model.size == 1:
        return original(model, *args, **kwargs)
    if state.mesh.tp.size > 1 and _wants_attentions(model, original, args, kwargs):
        raise UnsupportedError(
            "attention weights would be those of this rank's heads only",
            got="output_attentions=True",
            hint="leave it off, or use tp=1",
        )
    batch = _by_name(original, args, kwargs)
    if state.program is not None and torch.is_grad_enabled():
        return state.program.forward(batch)
    comparison = _compared(state, batch)
    if state.program is not None:
        output = state.program.forward(batch)
    elif model.training:
        state.streams.next_step()
        with state.streams.batch():
            output = original(model, *args, **kwargs)
    else:
        output = original(model, *args, **kwargs)
    if comparison is not None:
        comparison.finish()
    return output


def _compared(state: ParallelState, batch: dict[str, Any]) -> BatchComparison | None:
    """Batches are compared in training, and where a loss is computed; not where tokens are generated, one at a time."""
    wanted = torch.is_grad_enabled() or any("label" in name for name, value in batch.items() if value is not None)
    return state.compare(batch) if wanted else None


def _wants_attentions(model: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # Asked at every forward: arguments are only matched with names where several came without.
    asked = (_by_name(original, args, kwargs) if len(args) > 1 else kwargs).get("output_attentions")
    return bool(getattr(model.config, "output_attentions", False) if asked is None else asked)


def train_step(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """See ``ParallelMethods.train_step``."""
    state = parallel_state(model)
    if state.program is not None:
        loss: Tensor = state.program.train_step(batch)
    else:
        whole = model(**batch).loss
        if whole is None:
            raise BatchError(
                "a batch without labels cannot be trained on", got=", ".join(sorted(batch)), hint="pass labels=..."
            )
        whole.backward()
        loss = whole.detach()
    if state.mesh.dp.size > 1:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        with torch.no_grad():
            all_reduce_together(gradients, state.mesh.dp.group)
            torch._foreach_div_(gradients, float(state.mesh.dp.size))
    return loss


def _by_name(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(_names(original), args, strict=False)), **kwargs} if args else kwargs


@functools.cache
def _names(original: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(original).parameters)[1:]
