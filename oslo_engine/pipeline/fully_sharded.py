"""Gradients of a pipeline whose parameters FSDP2 (``fully_shard``) has divided over the dp axis.

FSDP2 gathers a module's parameters for its forward and backward and scatters their gradients in hooks of the autograd engine,
so ``torch.autograd.grad`` with respect to the divided parameters finds nothing. A stage's backward is therefore a real
``backward()``. The gradients that it leaves are set aside until the batch is complete, as those of any other pipeline are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oslo_engine.errors import PipelineError, UnsupportedError


def divided_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The trainable parameters of a model, as its optimizer knows them.

    Between a forward and its backward FSDP2 shows the gathered ones in their place; those are given back.
    """
    for module in _fsdp_modules(model):
        module.reshard()
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _fsdp_modules(model: nn.Module) -> list[Any]:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # who uses it has imported it
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def fully_sharded(model: nn.Module, *, schedule: str) -> FullyShardedGradients | None:
    """What runs the backwards of a model that FSDP2 has divided; None for any other.

    Raises:
        UnsupportedError: the schedule computes weight gradients apart, which FSDP2's hooks do not see.
        PipelineError: an earlier batch has failed, and FSDP2 still holds gradients of it.
    """
    if not _fsdp_modules(model):
        return None
    if schedule.startswith("zero-bubble"):
        raise UnsupportedError(
            "a zero-bubble schedule computes the gradients of weights apart, where FSDP2 does not see them",
            got=f'schedule="{schedule}" with fully_shard',
            hint='use schedule="1f1b" or "interleaved", or DistributedDataParallel',
        )
    if model.__dict__.get("_oslo_failed_under_fsdp"):
        raise PipelineError(
            "an earlier batch has failed, and FSDP2 may hold some of its gradients",
            hint="go on from a checkpoint; without FSDP2 the gradients of a failed batch are discarded",
        )
    return FullyShardedGradients(model)


class FullyShardedGradients:
    """The backwards of one batch, and what they leave in ``parameter.grad``."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[Any] = []
        self._before: list[tuple[nn.Parameter, Tensor | None]] = []

    def begin(self) -> None:
        """Set aside the gradients of earlier batches."""
        self._modules = _fsdp_modules(self._model)
        self._before = [(parameter, parameter.grad) for parameter in divided_parameters(self._model)]
        for parameter, _ in self._before:
            parameter.grad = None

    def backward(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], wanted: Sequence[Tensor], *, last: bool
    ) -> list[Tensor | None]:
        """Run a stage's backward.

        Args:
            wanted: leaves whose gradients go to the stage before.
            last: whether it is the stage's last of this batch: only then are gradients communicated.

        Returns:
            The gradients of ``wanted``.

        Communication: FSDP2's, over dp.
        """
        for module in self._modules:
            module.set_requires_gradient_sync(last, recurse=False)
            module.set_reshard_after_backward(last, recurse=False)
            module.set_is_last_backward(last)
        torch.autograd.backward(outputs, gradients)
        found = [value.grad for value in wanted]
        for value in wanted:
            value.grad = None
        return found

    def take(self) -> list[Tensor | None]:
        """The gradients of this batch, one per parameter; ``parameter.grad`` is again what it was before it."""
        found = [parameter.grad for parameter, _ in self._before]
        self._restore()
        return found

    def deliver(self, gradients: Sequence[Tensor | None]) -> None:
        """Add a batch's gradients to ``parameter.grad``; no hook waits for them there."""
        for (parameter, _), gradient in zip(self._before, gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def discard(self) -> None:
        """The batch has failed."""
        divided_parameters(self._model)  # so that the model shows those again; a root that is kept gathered does not
        for parameter in self._model.parameters():
            parameter.grad = None
        self._restore()
        self._model.__dict__["_oslo_failed_under_fsdp"] = True

    def _restore(self) -> None:
        for parameter, gradient in self._before:
            parameter.grad = gradient
