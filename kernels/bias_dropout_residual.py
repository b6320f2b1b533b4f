"""Dropout of a sum with a bias, added to the residual stream.

    y = residual + (x + bias) * kept / (1 - p)

Which elements are kept is a function of a seed and the element's place: element (row, col) of [.., N], rows counted over all
leading dimensions, has word col % 4 of Philox at counter offset + row * ceil(N / 4) + col // 4, and is kept where that is at
least int(p * 2^32). So the mask does not depend on strides, tiles or device; backward computes it again from the seed.

Source: Philox as in ``oslo_engine.kernels.philox``; fused dropout that redraws its mask: Tillet, Triton tutorial 4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_engine.kernels.dispatch import require, runs_triton, widen
from oslo_engine.kernels.philox import draw_seed, random_bits


def bias_dropout_residual(
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    p: float = 0.5,
    training: bool = True,
    seed: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """Add the bias, drop, scale, add the residual.

    Args:
        x: [.., N]; fp32, bf16, fp16 (or fp64, by the reference); any strides.
        bias: [N], of any of these dtypes, or None.
        residual: shape of x, or None. Its dtype may differ: the result has the wider one.
        p: share that is dropped, 0 to 1.
        training: nothing is dropped otherwise.
        seed: [], int64, on x's device, so that a CUDA graph can be replayed with others; by default drawn from the device's
            ambient generator, which the random streams of a split model have seeded.
        offset: of the counter; calls with one seed and counters that do not overlap draw independent masks.

    Returns:
        [.., N], contiguous. Nothing is rounded before the sum is stored.

    Saved for backward: the seed.
    """
    p = p if training else 0.0
    if seed is None and 0 < p < 1:
        seed = draw_seed(x.device)
    return torch.ops.oslo_engine.bias_dropout_residual(x, bias, residual, seed, p, offset)


def kept(shape: torch.Size, seed: Tensor, p: float, offset: int) -> Tensor:
    """The mask of 0 < p < 1, [.., N] bool."""
    rows, groups = shape[:-1].numel(), -(-shape[-1] // 4)
    counter = offset + torch.arange(rows * groups, dtype=torch.int64, device=seed.device)
    bits = random_bits(seed, counter).view(rows, 4 * groups)[:, : shape[-1]]
    return (bits >= int(p * 2**32)).view(shape)


def reference(x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, p: float, offset: int) -> Tensor:
    """[.., N] -> [.., N]."""
    y = widen(x) if bias is None else widen(x) + widen(bias)
    y = _dropped(y, seed, p, offset)
    y = y if residual is None else y + widen(residual)
    return y.to(_result_dtype(x, residual), copy=True).contiguous()


def reference_backward(dy: Tensor, seed: Tensor | None, p: float, offset: int, want_bias: bool) -> tuple[Tensor, Tensor]:
    """dx = dy * kept / (1 - p), and its sum over all rows."""
    dx = _dropped(widen(dy), seed, p, offset)
    dbias = dx.reshape(dy.shape[:-1].numel(), dy.shape[-1]).sum(0) if want_bias else dx.new_empty(0)
    return dx.to(dy.dtype, copy=True).contiguous(), dbias


def _dropped(x: Tensor, seed: Tensor | None, p: float, offset: int) -> Tensor:
    if seed is None or p in (0, 1):
        return x if p == 0 else torch.zeros_like(x)
    return torch.where(kept(x.shape, seed, p, offset), x / (1 - p), 0)


def _result_dtype(x: Tensor, residual: Tensor | None) -> torch.dtype:
    return x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)


def _check(x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, p: float) -> None:
    name = "bias_dropout_residual"
    fits = x.dim() > 0 and x.is_floating_point()
    require(fits, "x must be [.., N] of floats", where=name, got=f"{x.dtype} {tuple(x.shape)}")
    require(0 <= p <= 1, "p is a share", where=name, expected="0 to 1", got=p)
    if bias is not None:
        fits = bias.shape == x.shape[-1:]
        require(fits, "bias does not fit x", where=name, expected=tuple(x.shape[-1:]), got=tuple(bias.shape))
    if residual is not None:
        fits = residual.shape == x.shape
        require(fits, "residual does not fit x", where=name, expected=tuple(x.shape), got=tuple(residual.shape))
    if 0 < p < 1:
        require(seed is not None, "no seed to drop with", where=name)
    if seed is not None:
        fits = seed.dim() == 0 and seed.dtype == torch.int64
        fits = fits and seed.device == x.device
        wanted, found = f"one int64 on {x.device}", f"{seed.dtype} {tuple(seed.shape)} on {seed.device}"
        require(fits, "seed does not fit", where=name, expected=wanted, got=found)


@torch.library.custom_op("oslo_engine::bias_dropout_residual", mutates_args=())
def _bias_dropout_residual(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, p: float, offset: int
) -> Tensor:
    _check(x, bias, residual, seed, p)
    if runs_triton(x) and (residual is None or runs_triton(residual)):
        from oslo_engine.kernels.gpu import bias_dropout_residual as gpu

        return gpu.forward(x, bias, residual, seed, p, offset)
    return reference(x, bias, residual, seed, p, offset)


@_bias_dropout_residual.register_fake
def _(x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, p: float, offset: int) -> Tensor:
    _check(x, bias, residual, seed, p)
    return x.new_empty(x.shape, dtype=_result_dtype(x, residual))


@torch.library.custom_op("oslo_engine::bias_dropout_residual_backward", mutates_args=())
def _bias_dropout_residual_backward(
    dy: Tensor, seed: Tensor | None, p: float, offset: int, want_bias: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x in the gradient's dtype, of the bias in fp32 (empty unless wanted)."""
    if runs_triton(dy):
        from oslo_engine.kernels.gpu import bias_dropout_residual as gpu

        return gpu.backward(dy, seed, p, offset, want_bias)
    return reference_backward(dy, seed, p, offset, want_bias)


@_bias_dropout_residual_backward.register_fake
def _(dy: Tensor, seed: Tensor | None, p: float, offset: int, want_bias: bool) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(dy.dtype, torch.float32)
    return dy.new_empty(dy.shape), dy.new_empty(dy.shape[-1] if want_bias else 0, dtype=dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, residual, seed, ctx.p, ctx.offset = inputs
    ctx.save_for_backward(seed)
    ctx.dtypes = [None if each is None else each.dtype for each in (x, bias, residual)]


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (seed,) = ctx.saved_tensors
    want_x, want_bias, want_residual, *_ = ctx.needs_input_grad
    grads: list[Tensor | None] = [None, None, dy.to(ctx.dtypes[2]) if want_residual else None]
    if want_x or want_bias:
        backward = torch.ops.oslo_engine.bias_dropout_residual_backward
        dx, dbias = backward(dy, seed, ctx.p, ctx.offset, want_bias)
        grads[:2] = dx.to(ctx.dtypes[0]), dbias.to(ctx.dtypes[1]) if want_bias else None
    return *grads, None, None, None


_bias_dropout_residual.register_autograd(_backward, setup_context=_setup)
