"""Gradient scaling for fp16, agreed on by all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.amp
import torch.distributed as dist
from torch import Tensor


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for a model of which every rank holds a part.

    Each rank sees overflows of its own gradients only. With torch's own scaler the others would step, and their scales would
    part for ever; here an overflow on any rank skips the step on all of them.

    Arguments are those of ``torch.amp.GradScaler``.

    Communication: one all-reduce of a scalar over all ranks for each optimizer and step. Every rank must call ``step`` or
        ``unscale_``.
    """

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = super()._unscale_grads_(optimizer, *args, **kwargs)
        if dist.is_initialized() and dist.get_world_size() > 1:
            device = torch.device(self._device, torch.cuda.current_device()) if self._device == "cuda" else torch.device("cpu")
            anywhere = found.setdefault(device, torch.zeros((), device=device))  # a rank may have no gradient at all
            for value in found.values():
                anywhere.copy_(torch.maximum(anywhere, value.to(device)))
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
        return found
