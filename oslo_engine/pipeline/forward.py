"""What calling a parallelized model does: one split forward, or a batch through the pipeline."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from oslo_engine.comm.collectives import all_reduce_together
from oslo_engine.comm.fingerprint import fingerprint, fingerprints_of_ranks
from oslo_engine.errors import BatchError, UnsupportedError
from oslo_engine.rewrite.state import ParallelState, parallel_state

_BATCHES_COMPARED = 2


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
    outermost = state.switch.current is None
    if outermost and state.mesh.tp.size > 1 and torch.is_grad_enabled() and state.batches_compared < _BATCHES_COMPARED:
        _check_same_batch(state, _by_name(original, model, args, kwargs))
    if outermost and state.mesh.tp.size > 1 and _wants_attentions(model, original, args, kwargs):
        raise UnsupportedError(
            "attention weights would be those of this rank's heads only",
            got="output_attentions=True",
            hint="leave it off, or use tp=1",
        )
    if state.program is not None and outermost:
        return state.program.forward(_by_name(original, model, args, kwargs))
    if state.program is None and model.training and state.mesh.model.size > 1:
        state.streams.next_step()
        with state.streams.batch():
            return original(model, *args, **kwargs)
    return original(model, *args, **kwargs)


def _wants_attentions(model: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # Asked at every forward: arguments are only matched with names where several came without.
    asked = (_by_name(original, model, args, kwargs) if len(args) > 1 else kwargs).get("output_attentions")
    return bool(getattr(model.config, "output_attentions", False) if asked is None else asked)


def _check_same_batch(state: ParallelState, batch: dict[str, Any]) -> None:
    """A sampler over the wrong number of ranks shows in the first batches.

    Raises:
        BatchError: the tensor-parallel ranks have different batches, on every one of them.

    Communication: one all-gather of 8 bytes on tp.
    """
    state.batches_compared += 1
    found = fingerprints_of_ranks(fingerprint(sorted(batch.items())), state.mesh.tp.group, state.mesh.device)
    if len(set(found)) > 1:
        raise BatchError(
            "tensor-parallel ranks were given different batches",
            expected="the same batch on every rank that holds a part of one copy of the model",
            got=f"fingerprints by tp rank {found}",
            hint="give samplers num_replicas=model.mpu.get_data_parallel_world_size(), rank=model.mpu.get_data_parallel_rank()",
        )


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


def _by_name(original: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    if not args:
        return kwargs
    names = list(inspect.signature(original).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}
