"""Gated linear units: SwiGLU, GeGLU and their kin.

    y = activation(gate) * up

Source: Shazeer (arXiv 2002.05202); the activations are in ``oslo_engine.kernels.activation``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_engine.kernels.activation import FORMS, activation, slope
from oslo_engine.kernels.dispatch import require, runs_triton, widen


def glu(gate: Tensor, up: Tensor, form: str) -> Tensor:
    """Activate the gate and multiply.

    Args:
        gate, up: [.., N], the same shape and dtype; fp32, bf16, fp16 (or fp64, by the reference). The halves of one projection
            (``chunk`` views) are read where they lie.
        form: activation: "silu", "erf", "tanh" or "quick".

    Returns:
        [.., N], contiguous. The activation is not rounded before it is multiplied.

    Saved for backward: gate and up.
    """
    return torch.ops.oslo_engine.glu(gate, up, form)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up; see ``glu``."""
    return glu(gate, up, "silu")


def geglu(gate: Tensor, up: Tensor, form: str = "erf") -> Tensor:
    """gelu(gate) * up; see ``glu``."""
    return glu(gate, up, form)


def reference(gate: Tensor, up: Tensor, form: str) -> Tensor:
    """[.., N], [.., N] -> [.., N]."""
    return (activation(widen(gate), form) * widen(up)).to(gate.dtype).contiguous()


def reference_backward(dy: Tensor, gate: Tensor, up: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """dgate = dy * up * activation'(gate);  dup = dy * activation(gate)."""
    wide, wide_gate = widen(dy), widen(gate)
    dgate, dup = wide * widen(up) * slope(wide_gate, form), wide * activation(wide_gate, form)
    return dgate.to(gate.dtype).contiguous(), dup.to(gate.dtype).contiguous()


def _check(gate: Tensor, up: Tensor, form: str) -> None:
    fits = gate.dim() > 0 and gate.is_floating_point()
    require(fits, "gate must be [.., N] of floats", where="glu", got=f"{gate.dtype} {tuple(gate.shape)}")
    require(form in FORMS, "no such activation", where="glu", expected=FORMS, got=form)
    same = gate.shape == up.shape and gate.dtype == up.dtype
    wanted, found = f"{gate.dtype} {tuple(gate.shape)}", f"{up.dtype} {tuple(up.shape)}"
    require(same, "gate and up differ", where="glu", expected=wanted, got=found)


@torch.library.custom_op("oslo_engine::glu", mutates_args=())
def _glu(gate: Tensor, up: Tensor, form: str) -> Tensor:
    _check(gate, up, form)
    if runs_triton(gate):
        from oslo_engine.kernels.gpu import glu as gpu

        return gpu.forward(gate, up, form)
    return reference(gate, up, form)


@_glu.register_fake
def _(gate: Tensor, up: Tensor, form: str) -> Tensor:
    _check(gate, up, form)
    return gate.new_empty(gate.shape)


@torch.library.custom_op("oslo_engine::glu_backward", mutates_args=())
def _glu_backward(dy: Tensor, gate: Tensor, up: Tensor, form: str) -> tuple[Tensor, Tensor]:
    if runs_triton(gate):
        from oslo_engine.kernels.gpu import glu as gpu

        return gpu.backward(dy, gate, up, form)
    return reference_backward(dy, gate, up, form)


@_glu_backward.register_fake
def _(dy: Tensor, gate: Tensor, up: Tensor, form: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.form = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return *torch.ops.oslo_engine.glu_backward(dy, *ctx.saved_tensors, ctx.form), None


_glu.register_autograd(_backward, setup_context=_setup)
