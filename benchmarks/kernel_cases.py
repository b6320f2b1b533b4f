"""What the kernel benchmarks measure: for each kernel its inputs, the same in plain torch and in Liger, and the bytes.

Bytes are the least that any implementation must move. Forward: every input read once, every output written once; backward: the
gradient and what it depends on read once, every gradient written once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """One kernel at one use.

    Attributes:
        name: of the kernel.
        make: (rows, length, dtype, device) -> inputs; those that require gradients get one.
        ours, eager: functions of the inputs.
        moved: (elements of a row tensor read and written forward, backward), in row tensors.
        liger: name of a function of ``liger_kernel.transformers.functional`` and how to call it; None where there is none.
        exact: whether the result can be compared with fp64 (not where numbers are drawn).
    """

    name: str
    make: Callable[[int, int, torch.dtype, torch.device], tuple[Any, ...]]
    ours: Function
    eager: Function
    moved: tuple[float, float]
    liger: tuple[str, Callable[..., Any]] | None = None
    exact: bool = True


def random(*shape: int, dtype: torch.dtype, device: torch.device, grad: bool = True) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_(grad)


def _rows(count: int, *, weights: int = 0) -> Callable[[int, int, torch.dtype, torch.device], tuple[Any, ...]]:
    def make(rows: int, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        big = (random(rows, length, dtype=dtype, device=device) for _ in range(count))
        return (*big, *(random(length, dtype=dtype, device=device) for _ in range(weights)))

    return make


def _kernel(module: str, name: str, **fixed: Any) -> Function:
    from importlib import import_module

    def call(*inputs: Any) -> Tensor:
        result = getattr(import_module(f"oslo_engine.kernels.{module}"), name)(*inputs, **fixed)
        return result[0] + result[1] if isinstance(result, tuple) else result

    return call


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As Llama has it."""
    wide = x.float() if x.dtype != torch.float64 else x
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    h = x + residual
    return _rms_norm(h, weight) + h


def _scores(rows: int, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Square scores of 8 heads, as many as there are elements, and a causal mask with some padding."""
    side = max(8, min(length, int(sqrt(rows * length / 8))) // 8 * 8)
    mask = torch.ones(side, side, device=device, dtype=torch.bool).tril()[None, None].clone()
    mask[..., : side // 8] &= torch.eye(side, device=device, dtype=torch.bool)[:, : side // 8]
    bias = torch.zeros(1, 1, side, side, device=device, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    return random(1, 8, side, side, dtype=dtype, device=device), bias


def _turned(rows: int, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Queries [1, heads, S, 128] of as many elements, and cos and sin as models keep them."""
    features = 128 if length >= 128 else length // 2 * 2
    heads = max(1, length // features)
    angles = random(1, 1, rows, features // 2, dtype=torch.float32, device=device, grad=False)
    angles = torch.cat((angles, angles), -1)
    x = random(1, rows, heads, features, dtype=dtype, device=device).detach().transpose(1, 2).requires_grad_()
    return x, angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def _rotate_fused(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return _kernel("rotary", "rotary")(x, cos[..., :half], sin[..., :half])


def _logits(rows: int, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    target = torch.arange(rows, device=device) * 7 % length
    target[::5] = -100
    return random(rows, length, dtype=dtype, device=device), target


def _generated(rows: int, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Scores of a vocabulary of ``length``, after 512 tokens of few different ones."""
    ids = torch.randint(0, 32, (min(rows, 64), 512), device=device, generator=torch.Generator(device).manual_seed(1))
    return random(ids.shape[0], length, dtype=dtype, device=device, grad=False), ids


def _ban(scores: Tensor, ids: Tensor) -> Tensor:
    """Transformers' own processor, which is vectorised."""
    from transformers import NoRepeatNGramLogitsProcessor

    result: Tensor = NoRepeatNGramLogitsProcessor(3)(ids, scores.clone())
    return result


def _dropped(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return residual + F.dropout(x + bias, 0.1, training=True)


def _bias_residual(rows: int, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    x, residual, bias = _rows(2, weights=1)(rows, length, dtype, device)
    return x, bias, residual


CASES = [
    Case(
        "layer_norm",
        _rows(1, weights=2),
        _kernel("layer_norm", "layer_norm"),
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
        (2, 3),
        ("liger_layer_norm", lambda f, x, w, b: f(x, w, b, 1e-5)),
    ),
    Case(
        "rms_norm",
        _rows(1, weights=1),
        _kernel("rms_norm", "rms_norm"),
        _rms_norm,
        (2, 3),
        ("liger_rms_norm", lambda f, x, w: f(x, w, 1e-6)),
    ),
    Case("add_rms_norm", _rows(2, weights=1), _kernel("rms_norm", "add_rms_norm"), _add_rms_norm, (7, 4)),
    Case(
        "bias_gelu",
        _rows(1, weights=1),
        _kernel("bias_gelu", "bias_gelu", form="tanh"),
        lambda x, b: F.gelu(x + b, approximate="tanh"),
        (2, 3),
    ),
    Case(
        "swiglu",
        _rows(2),
        _kernel("glu", "swiglu"),
        lambda gate, up: F.silu(gate) * up,
        (3, 5),
        ("liger_swiglu", lambda f, gate, up: f(gate, up)),
    ),
    Case(
        "geglu",
        _rows(2),
        _kernel("glu", "geglu", form="tanh"),
        lambda gate, up: F.gelu(gate, approximate="tanh") * up,
        (3, 5),
        ("liger_geglu", lambda f, gate, up: f(gate, up)),
    ),
    Case(
        "bias_dropout_residual",
        _bias_residual,
        _kernel("bias_dropout_residual", "bias_dropout_residual", p=0.1),
        _dropped,
        (3, 2),
        exact=False,
    ),
    Case(
        "bias_residual",
        _bias_residual,
        _kernel("bias_dropout_residual", "bias_dropout_residual", p=0.0),
        lambda x, b, residual: residual + (x + b),
        (3, 2),
    ),
    Case(
        "scale_mask_softmax",
        _scores,
        lambda x, bias: _kernel("scale_mask_softmax", "scale_mask_softmax", scale=0.125)(x, None, bias),
        lambda x, bias: torch.softmax(x * 0.125 + bias, -1, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype),
        (2.125, 3),
    ),
    Case("rotary", _turned, _rotate_fused, _rotate, (2, 2)),
    Case(
        "cross_entropy",
        _logits,
        _kernel("cross_entropy", "cross_entropy"),
        lambda x, target: F.cross_entropy(x.to(torch.promote_types(x.dtype, torch.float32)), target),
        (1, 2),
        ("liger_cross_entropy", lambda f, x, target: f(x.clone(), target)),
    ),
    Case("no_repeat_ngram", _generated, lambda x, ids: _kernel("no_repeat_ngram", "no_repeat_ngram")(x, ids, 3), _ban, (2, 0)),
]


def row_elements(case: Case, inputs: tuple[Any, ...]) -> int:
    """Elements of the tensor that counts."""
    return int(inputs[0].numel())
