"""Where a model's values would wait and be taken in: its skeleton runs once, and every kernel that would run is written down.

The skeleton (no weights, two short rows of text) is the whole model also where the real one is split, so every rank finds the
same places. In it all linear layers, dropouts and activations make their results wait; only where a kernel took one in will the
real module do so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from oslo_engine.errors import OsloError
from oslo_engine.fusion.classify import NormKind
from oslo_engine.fusion.deferred import Activated, Biased, Deferred, Recipe, Shares
from oslo_engine.fusion.rotation import Rotation
from oslo_engine.fusion.scope import Activation, BiasApart, DropLater, FusedLoss, Fusing, Norm, Scope, current
from oslo_engine.layers.specialize import keeps_forward, original_class, specialize
from oslo_engine.rewrite.meta_weights import without_weights
from oslo_engine.rewrite.skeleton import Mode, example_inputs

MODES: tuple[Mode, ...] = ("train", "forward")
# What is one kernel already, and computes no scores that another could take in.
ATTENTION_KERNELS = ("scaled_dot_product_attention", "flex_attention", "multi_head_attention_forward")


@dataclass(frozen=True)
class Firing:
    """A kernel that would run.

    Attributes:
        kernel: its name.
        source: the module whose result was waiting; empty for one that no module made.
        module: in whose forward it happens.
        scope: the scope that it happens in; empty where it needs none.
        form: of an activation.
    """

    kernel: str
    source: str
    module: str
    scope: str
    form: str = ""


@dataclass
class Evidence:
    """firings: in the order seen, each once. attention: modules that call a kernel of torch's own. odd_rotations: modules in
    whose rotary embedding the halves meet different angles. fault: why nothing ran."""

    firings: dict[Firing, None] = field(default_factory=dict)
    attention: dict[str, str] = field(default_factory=dict)
    odd_rotations: set[str] = field(default_factory=set)
    fault: str = ""


class _Probing(Fusing):
    def __init__(self, evidence: Evidence, scope: str) -> None:
        super().__init__(attends=True, gates=True, rotates=True, loses=True)
        self.evidence, self.scope = evidence, scope

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := getattr(func, "__name__", "")) in ATTENTION_KERNELS:
            self.evidence.attention.setdefault(_innermost(), name)
        return super().__torch_function__(func, types, args, kwargs)

    def defer(self, recipe: Recipe) -> Deferred:
        return Deferred(recipe, self._notice)

    def activated(self, recipe: Activated) -> Tensor:
        return self.defer(recipe)

    def emit(self, kernel: str, source: str, fused: Callable[[], Any], plain: Callable[[], Any]) -> Any:
        owner = getattr(fused, "__self__", None)
        if isinstance(owner, Rotation) and not owner.repeats:
            self.evidence.odd_rotations.add(_innermost())
        self._fires(kernel, source)
        seen, self.evidence = self.evidence, Evidence()  # what the original computes on the way is taken in here
        try:
            return plain()
        finally:
            self.evidence = seen

    def _notice(self, recipe: Any) -> None:
        """A value that nothing took in."""
        if isinstance(recipe, Activated) and recipe.worthwhile:
            self._fires("bias_gelu", recipe.source, recipe.form)
        elif isinstance(recipe, Biased) and recipe.p and recipe.bias is not None:
            self._fires("bias_dropout_residual", recipe.source)
        elif isinstance(recipe, Shares):
            self._fires("scale_mask_softmax", "")

    def _fires(self, kernel: str, source: str, form: str = "") -> None:
        self.evidence.firings.setdefault(Firing(kernel, source, _innermost(), self.scope, form))


class _ProbedScope(Scope):
    _oslo_fused_evidence: Evidence
    _oslo_fused_name: str

    def _make_scope(self) -> Fusing:
        return _Probing(self._oslo_fused_evidence, self._oslo_fused_name)


class _ProbedNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if current() is not None else super(Norm, self).forward(x)  # type: ignore[misc, no-any-return]


class _ProbedLoss(FusedLoss):
    def __init__(self, original: Callable[..., Any], evidence: Evidence) -> None:
        super().__init__(original)
        self.evidence = evidence

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Probing(self.evidence, ""):
            return self.original(*args, **kwargs)


_calls: list[str] = []


def _innermost() -> str:
    return _calls[-1] if _calls else ""


@contextlib.contextmanager
def _names_of_calls(model: nn.Module) -> Iterator[None]:
    """Know which module's forward is running."""
    names = {id(module): name for name, module in model.named_modules()}
    hooks = nn.modules.module

    def enter(module: nn.Module, args: Any) -> None:
        _calls.append(names.get(id(module), _innermost()))

    def leave(*_: Any) -> None:
        _calls.pop()

    handles = hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        _calls.clear()
        for handle in handles:
            handle.remove()


def probe(
    whole: PreTrainedModel,
    scopes: list[str],
    norms: Mapping[str, NormKind],
    activations: Mapping[str, tuple[str, bool]],
) -> Evidence:
    """Run a skeleton and see what would be fused.

    Args:
        whole: the unsplit model's skeleton, with real buffers, where rotary embeddings keep their frequencies; used up.
        scopes: names of the modules in whose forwards values may wait.
        norms, activations: modules that are one, by name: its kind; its form and whether it is composed.

    Returns:
        The evidence. Where the model's code cannot be run without its weights, as far as it ran.
    """
    evidence = Evidence()
    batches: dict[Mode, dict[str, Any]] = {}
    try:
        batches = {mode: example_inputs(whole, mode) for mode in MODES}
    except OsloError as error:
        evidence.fault = error.what
    for name, module in list(whole.named_modules()):
        if name in norms:
            kind = norms[name]
            fields = {"kind": kind.kind, "eps": kind.eps, "shift": kind.shift}
            specialize(
                module, _ProbedNorm, _oslo_fused_source=name, **{f"_oslo_fused_{key}": value for key, value in fields.items()}
            )
        elif name in activations:
            form, composed = activations[name]
            specialize(module, Activation, _oslo_fused_source=name, _oslo_fused_form=form, _oslo_fused_composed=composed)
        elif is_linear(module):
            specialize(module, BiasApart, _oslo_fused_source=name)
        elif type(module) is nn.Dropout:
            specialize(module, DropLater, _oslo_fused_source=name)
    for name in scopes:
        specialize(
            whole.get_submodule(name), _ProbedScope, _oslo_fused_kinds={}, _oslo_fused_evidence=evidence, _oslo_fused_name=name
        )
    whole.__dict__["_loss_function"] = _ProbedLoss(whole.loss_function, evidence)
    for mode, inputs in batches.items():
        try:
            whole.train(mode == "train")
            with _names_of_calls(whole), without_weights(whole), torch.no_grad():
                whole(**inputs)
        except Exception as error:  # whatever the model's own code raises where it cannot run like this
            evidence.fault = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return evidence


def is_linear(module: nn.Module) -> bool:
    own: Any = original_class(module)
    return own.forward in (nn.Linear.forward, Conv1D.forward) and keeps_forward(module)
