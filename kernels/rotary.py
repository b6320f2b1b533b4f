"""Rotary position embedding: pairs of features, turned by an angle that grows with the position.

    a' = a cos - b sin          half-split:   a = x[i], b = x[i + R / 2]
    b' = b cos + a sin          interleaved:  a = x[2 i], b = x[2 i + 1]

for i < R / 2; the features from R on are left as they are. Turning back is turning by the opposite angle, which is also the
gradient.

Source: Su et al. (arXiv 2104.09864); half-split: GPT-NeoX (arXiv 2204.06745).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_engine.errors import UnsupportedError
from oslo_engine.kernels.dispatch import require, runs_triton, widen


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Turn queries or keys.

    Args:
        x: [.., D]; fp32, bf16, fp16 (or fp64, by the reference); any strides.
        cos, sin: [.., R / 2], the same shape, R <= D, that broadcasts over x's leading dimensions: [B, 1, S, R / 2] for x of
            [B, heads, S, D]. Any strides and floating dtype. Models whose tables hold each angle twice pass half of them, as a
            view: ``cos[..., : R // 2]`` half-split, ``cos[..., ::2]`` interleaved.

    Returns:
        [.., D] of x's dtype, contiguous.

    Raises:
        UnsupportedError: cos or sin require gradients.

    Saved for backward: cos and sin.
    """
    return torch.ops.oslo_engine.rotary(x, cos, sin, interleaved, False)


def reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    """[.., D] -> [.., D]."""
    width = cos.shape[-1]
    wide, cos, sin = widen(x), widen(cos), widen(sin)
    sin = -sin if inverse else sin
    turned, rest = wide[..., : 2 * width], x[..., 2 * width :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :width], turned[..., width:])
    pairs = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def _check(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    fits = x.dim() > 0 and x.is_floating_point()
    require(fits, "x must be [.., D] of floats", where="rotary", got=f"{x.dtype} {tuple(x.shape)}")
    require(cos.shape == sin.shape, "cos and sin differ", where="rotary", expected=tuple(cos.shape), got=tuple(sin.shape))
    leading = cos.shape[:-1]
    fits = 0 < cos.dim() <= x.dim() and 2 * cos.shape[-1] <= x.shape[-1]
    fits = fits and all(size in (1, whole) for size, whole in zip(reversed(leading), reversed(x.shape[:-1]), strict=False))
    wanted = f"[.., at most {x.shape[-1] // 2}] over {tuple(x.shape[:-1])}"
    require(fits, "cos does not fit x", where="rotary", expected=wanted, got=tuple(cos.shape))


@torch.library.custom_op("oslo_engine::rotary", mutates_args=())
def _rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    _check(x, cos, sin)
    if runs_triton(x):
        from oslo_engine.kernels.gpu import rotary as gpu

        return gpu.forward(x, cos, sin, interleaved, inverse)
    return reference(x, cos, sin, interleaved, inverse)


@_rotary.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    _check(x, cos, sin)
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.interleaved, ctx.inverse = inputs
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        raise UnsupportedError("the rotary kernel has no gradient of cos and sin", hint="compute them under torch.no_grad()")
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx = torch.ops.oslo_engine.rotary(dy, *ctx.saved_tensors, ctx.interleaved, not ctx.inverse)
    return dx, None, None, None, None


_rotary.register_autograd(_backward, setup_context=_setup)
