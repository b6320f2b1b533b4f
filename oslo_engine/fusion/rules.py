"""What may be taken into a recipe: one rule for each name of a torch function.

A rule gets the scope and the function's arguments, and answers with a result or with ``NotImplemented``: then the function runs
on values, as the model's author wrote it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oslo_engine.fusion.deferred import Activated, Biased, Deferred, Scores, Shares, Summed, is_plain, recipe_of, value_of
from oslo_engine.fusion.rotation import Negated, Swapped, rotation, second_half_of, turn_by

if TYPE_CHECKING:
    from oslo_engine.fusion.scope import Fusing

Rule = Callable[..., Any]


def autocasting(x: Tensor) -> bool:
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def _operand(x: Any) -> Any:
    """The other side of an operation, as a value."""
    return value_of(x)


# ------------------------------------------------------------------ residual


def add(scope: Fusing, a: Any, b: Any, *, alpha: Any = 1) -> Any:
    if alpha != 1:
        return NotImplemented
    if (pair := rotation(a, b)) is not None:
        return scope.emit("rotary", "", pair.turn, lambda: value_of(a) + value_of(b))
    for x, other in ((a, b), (b, a)):
        if (scores := _scores(scope, x)) is not None:
            return _add_to_scores(scope, scores, x, other)
    for x, other in ((a, b), (b, a)):
        if (recipe := recipe_of(x, Biased)) is not None:
            return _join(scope, recipe, x, _operand(other))
    return NotImplemented


def _join(scope: Fusing, recipe: Biased, x: Deferred, residual: Any) -> Any:
    if not is_plain(residual) or residual.shape != x.shape or not residual.is_floating_point():
        return NotImplemented
    if recipe.bias is None and not recipe.p:
        return scope.defer(Summed(recipe.x, residual, recipe.source))
    return scope.emit("bias_dropout_residual", recipe.source, lambda: recipe.join(residual), lambda: residual + value_of(x))


def dropout(scope: Fusing, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    recipe = recipe_of(x, Biased)
    if recipe is None or recipe.p or inplace:
        return NotImplemented
    if not training or p == 0:
        return x
    from oslo_engine.kernels.philox import draw_seed

    # Drawn where the model drops, from the stream that is current there; the mask itself may be computed later.
    return scope.defer(replace(recipe, p=p, seed=draw_seed(recipe.x.device)))


# ------------------------------------------------------------------ activations and gates


def activate(scope: Fusing, x: Any, form: str, source: str, original: Any, composed: bool = False) -> Any:
    """Not a torch function: what an activation module does with its input."""
    recipe = recipe_of(x, Biased)
    if recipe is not None and not recipe.p:
        return scope.activated(Activated(recipe.x, recipe.bias, form, recipe.source, original, composed))
    x = value_of(x)
    if not is_plain(x) or x.dim() == 0:
        return original(x)
    return scope.activated(Activated(x, None, form, source, original, composed))


def gelu(scope: Fusing, x: Any, *, approximate: str = "none") -> Any:
    form = {"none": "erf", "tanh": "tanh"}.get(approximate)
    if form is None or recipe_of(x, Biased) is None:
        return NotImplemented
    return activate(scope, x, form, "", lambda y: F.gelu(y, approximate=approximate))


def silu(scope: Fusing, x: Any, inplace: bool = False) -> Any:
    if inplace or not (is_plain(x) and x.dim()):
        return NotImplemented
    return activate(scope, x, "silu", "", F.silu)


def mul(scope: Fusing, a: Any, b: Any) -> Any:
    for x, other in ((a, b), (b, a)):
        if (recipe := recipe_of(x, Activated)) is not None:
            return _gate(scope, recipe, x, _operand(other))
    if scope.rotates and (turned := turn_by(a, b)) is not None:
        return scope.defer(turned)
    for x, other in ((a, b), (b, a)):
        if isinstance(other, (int, float)) and (scores := _scores(scope, x)) is not None:
            return _scale(scope, scores, other)
    return NotImplemented


def _gate(scope: Fusing, recipe: Activated, x: Deferred, up: Any) -> Any:
    if not is_plain(up) or up.shape != x.shape or up.dtype != x.dtype:
        return NotImplemented
    return scope.emit("glu", recipe.source, lambda: recipe.gate(up), lambda: value_of(x) * up)


# ------------------------------------------------------------------ attention scores


def _scores(scope: Fusing, x: Any) -> Scores | None:
    if not scope.attends:
        return None
    if (recipe := recipe_of(x, Scores)) is not None:
        found: Scores = recipe
        return found
    return Scores(x, x.dtype) if is_plain(x) and x.dim() == 4 and x.is_floating_point() else None


def _scale(scope: Fusing, scores: Scores, by: float) -> Any:
    if scores.bias is not None or (scores.capped and scores.softcap != 1.0):
        return NotImplemented
    return scope.defer(replace(scores, softcap=float(by)) if scores.capped else replace(scores, scale=scores.scale * by))


def div(scope: Fusing, x: Any, by: Any, *, rounding_mode: Any = None) -> Any:
    if rounding_mode is not None or not isinstance(by, (int, float)) or by == 0:
        return NotImplemented
    scores = _scores(scope, x)
    return NotImplemented if scores is None or scores.capped else _scale(scope, scores, 1 / by)


def tanh(scope: Fusing, x: Any) -> Any:
    scores = recipe_of(x, Scores)
    return (
        NotImplemented
        if scores is None or scores.capped or scores.bias is not None
        else scope.defer(replace(scores, capped=True))
    )


def _add_to_scores(scope: Fusing, scores: Scores, x: Any, other: Any) -> Any:
    bias = _operand(other)
    fits = is_plain(bias) and bias.dim() == 4 and bias.is_floating_point() and bias is not x
    fits = fits and all(size in (1, whole) for size, whole in zip(bias.shape, scores.shape, strict=True))
    if not fits or bias.shape[-1] != scores.shape[-1]:
        return NotImplemented
    dtype = torch.promote_types(scores.dtype, bias.dtype)
    return scope.defer(replace(scores, bias=bias if scores.bias is None else scores.bias + bias, dtype=dtype))


def masked_fill(scope: Fusing, x: Any, mask: Any, value: Any) -> Any:
    """The fill value drowns the score, so it may be added: in fp32 anything below 1e30 leaves it as it is."""
    scores = recipe_of(x, Scores)
    if scores is None or not is_plain(mask) or mask.dtype != torch.bool or mask.dim() != 4:
        return NotImplemented
    value = float(value)
    if value > -1e30 and value > torch.finfo(scores.dtype).min:
        return NotImplemented
    zeros = torch.zeros((), dtype=scores.dtype, device=mask.device)
    return _add_to_scores(scope, scores, x, torch.where(mask, value, zeros))


def softmax(scope: Fusing, x: Any, dim: Any = None, *rest: Any, dtype: Any = None, _stacklevel: int = 3) -> Any:
    scores = recipe_of(x, Scores)
    dtype = next((each for each in rest if isinstance(each, torch.dtype)), dtype)
    if scores is None or dim not in (-1, 3):
        return NotImplemented
    if dtype is None:
        dtype = torch.float32 if autocasting(scores.x) else scores.dtype
    if dtype == scores.x.dtype:
        return scope.emit("scale_mask_softmax", "", scores.softmax, lambda: torch.softmax(value_of(x), -1, dtype=dtype))
    if torch.promote_types(dtype, scores.x.dtype) != dtype:
        return NotImplemented
    return scope.defer(Shares(scores, dtype))


def to(scope: Fusing, x: Any, *args: Any, **kwargs: Any) -> Any:
    """``to``, ``type``, ``type_as``, ``float``: of shares back to the scores' type, of scores to a wider one."""
    wanted = _wanted_dtype(x, args, kwargs)
    if wanted is None:
        return NotImplemented
    if (shares := recipe_of(x, Shares)) is not None and wanted == shares.scores.x.dtype:
        plain = lambda: torch.softmax(shares.scores.compute(False), -1, dtype=shares.dtype).to(wanted)  # noqa: E731
        return scope.emit("scale_mask_softmax", "", shares.scores.softmax, plain)
    if (scores := recipe_of(x, Scores)) is not None and torch.promote_types(wanted, scores.dtype) == wanted:
        return scope.defer(replace(scores, dtype=wanted))
    return NotImplemented


def as_float(scope: Fusing, x: Any) -> Any:
    return to(scope, x, torch.float32)


def _wanted_dtype(x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    given = [*args, *kwargs.values()]
    if not isinstance(x, Deferred) or len(given) != 1:
        return None
    return given[0] if isinstance(given[0], torch.dtype) else given[0].dtype if isinstance(given[0], Tensor) else None


# ------------------------------------------------------------------ rotary embedding


def neg(scope: Fusing, x: Any) -> Any:
    return scope.defer(Negated(x)) if scope.rotates and is_plain(x) and x.dim() == 4 and x._is_view() else NotImplemented


def cat(scope: Fusing, parts: Any, dim: int = 0) -> Any:
    """``cat((-x2, x1))`` of the halves of one tensor."""
    if len(parts) != 2 or dim not in (-1, 3) or (negated := recipe_of(parts[0], Negated)) is None:
        return NotImplemented
    first, second = parts[1], negated.x
    if not is_plain(first) or not second_half_of(first, second):
        return NotImplemented
    return scope.defer(Swapped(first, second))


# ------------------------------------------------------------------ loss


def cross_entropy(
    scope: Fusing,
    logits: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    classes = is_plain(target) and target.dtype in (torch.int64, torch.int32)
    fits = classes and is_plain(logits) and logits.dim() == 2 and (weight, size_average, reduce) == (None, None, None)
    if not scope.loses or not fits:
        return NotImplemented
    from oslo_engine.kernels.cross_entropy import cross_entropy as kernel

    rest = (ignore_index, label_smoothing, reduction)
    plain = lambda: F.cross_entropy(  # noqa: E731
        logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )
    return scope.emit("cross_entropy", "", lambda: kernel(logits, target, *rest), plain)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("add", "__add__", "__radd__"), add),
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "multiply"), mul),
    **dict.fromkeys(("div", "__truediv__", "true_divide"), div),
    **dict.fromkeys(("to", "type", "type_as"), to),
    **dict.fromkeys(("neg", "__neg__", "negative"), neg),
    **dict.fromkeys(("cat", "concat"), cat),
    "float": as_float,
    "dropout": dropout,
    "gelu": gelu,
    "silu": silu,
    "tanh": tanh,
    "masked_fill": masked_fill,
    "softmax": softmax,
    "cross_entropy": cross_entropy,
}
