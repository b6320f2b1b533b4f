"""Where an op runs, in which precision it computes, and how it refuses what it cannot do.

One op, two implementations: Triton programs (folder ``gpu``) and formulas in torch (the *reference*, in the op's own file).
Both compute in fp32 whatever the inputs hold, and round once, when they store.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from oslo_engine.errors import OsloError

_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class KernelInputError(OsloError, ValueError):
    """Shapes or settings that a kernel cannot take."""


def require(condition: bool, what: str, *, where: str, expected: Any = None, got: Any = None) -> None:
    """Raise KernelInputError unless ``condition`` holds; ``where`` is the kernel."""
    if not condition:
        raise KernelInputError(what, where=f"kernel {where}", expected=expected, got=got)


def runs_triton(x: Tensor) -> bool:
    """Whether the Triton programs serve this input.

    They do on GPUs, and on the CPU when Triton's interpreter is switched on (which is decided when triton is imported). They
    know no fp64: that, and every other device, is the reference's.
    """
    if x.dtype not in _TRITON_DTYPES:
        return False
    return x.is_cuda or (x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


def widen(x: Tensor) -> Tensor:
    """The tensor in the precision that references compute in: fp32, or fp64 where the input is fp64."""
    return x if x.dtype == torch.float64 else x.float()


def rows_of(x: Tensor) -> Tensor:
    """[.., N] -> [M, N] with elements of a row side by side: a view where there is one, else a copy."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] <= 1 else rows.contiguous()
