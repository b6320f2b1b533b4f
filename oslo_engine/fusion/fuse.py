"""``fuse``: let kernels compute what they can of a model, and say what was done and what was not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from oslo_engine.fusion.check import differs
from oslo_engine.fusion.classify import NormKind, activation_form, is_activation_like, is_norm_like, norm_kind
from oslo_engine.fusion.probe import Evidence, Firing, is_linear, probe
from oslo_engine.fusion.report import FusionReport, Place
from oslo_engine.fusion.scope import Activation, BiasApart, DropLater, FusedLoss, Norm, Scope
from oslo_engine.fusion.targets import Targets, parse_targets
from oslo_engine.kernels.activation import GELUS
from oslo_engine.layers.region import RowLayer
from oslo_engine.layers.specialize import original_class
from oslo_engine.rewrite.apply import Change, restore_modules, specialize_modules
from oslo_engine.rewrite.skeleton import skeleton

_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_SUMS = {"add_layer_norm": "layer_norm", "add_rms_norm": "rms_norm"}


@dataclass
class Fusion:
    """Attached to a fused model as ``model._oslo_fusion``.

    report: what was done. targets: as they were given. changed: names of the modules that were given another behaviour.
    """

    report: FusionReport
    targets: Any
    changed: list[str] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> Fusion:
        return Fusion(self.report, self.targets, list(self.changed))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(None), ()  # a pickled model is the plain one


def fuse(model: PreTrainedModel, targets: Any = None) -> FusionReport:
    """Fuse a model in place; a fused one is fused anew.

    Args:
        model: any, split or not. Its parameters, names and classes stay what they are.
        targets: see ``parse_targets``.

    Returns:
        What was replaced and what was left.

    Raises:
        FusionTargetError: a target that the model does not have.

    Communication: none; every rank of a split model must do it.
    """
    wanted = parse_targets(model, targets)
    unfuse(model)
    fusion = _Fuser(model, wanted)
    report = fusion.run()
    specialize_modules(model, fusion.changes)
    if fusion.loss is not None:
        model.__dict__["_loss_function"] = fusion.loss
    model.__dict__["_oslo_fusion"] = Fusion(report, targets, [change.name for change in fusion.changes])
    return report


def unfuse(model: PreTrainedModel) -> None:
    """Take back what ``fuse`` did; a model that is not fused is left as it is."""
    fusion: Fusion | None = model.__dict__.pop("_oslo_fusion", None)
    if fusion is None:
        return
    restore_modules(model, fusion.changed, (Scope, BiasApart, DropLater, Activation, Norm), "_oslo_fused_")
    loss = model.__dict__.get("_loss_function")
    if isinstance(loss, FusedLoss):
        del model.__dict__["_loss_function"]
        if loss.was_set:
            model.__dict__["_loss_function"] = loss.original


def fusion_report(model: PreTrainedModel) -> FusionReport | None:
    fusion: Fusion | None = model.__dict__.get("_oslo_fusion")
    return None if fusion is None else fusion.report


class _Fuser:
    """One call of ``fuse``: looks at everything, changes nothing."""

    def __init__(self, model: PreTrainedModel, targets: Targets) -> None:
        self.model, self.targets = model, targets
        self.modules = dict(model.named_modules())
        self.changes: list[Change] = []
        self.places: list[Place] = []
        self.loss: FusedLoss | None = None
        self._verdicts: dict[tuple[Any, ...], str] = {}
        self._inside = self._names_inside()

    def run(self) -> FusionReport:
        norms = self._norms()
        activations = self._activations()
        scopes = self._scopes()
        self._evidence = evidence = probe(self._whole(), scopes, norms, activations)
        here = [firing for firing in evidence.firings if self._is_here(firing)]
        kept = [firing for firing in here if self._judged(firing)]
        self._put_norms(norms, kept)
        self._put_sources(kept, activations)
        self._put_scopes(kept)
        self._put_loss(kept, evidence)
        self._say_what_is_left(evidence, activations)
        return FusionReport(original_class(self.model).__name__, self.targets.asked, tuple(dict.fromkeys(self.places)))

    # ------------------------------------------------------------------ what there is

    def _whole(self) -> PreTrainedModel:
        split = "_oslo" in self.model.__dict__ and self.model.__dict__["_oslo"].plan.topology.world_size > 1
        whole = None
        if not split:
            with contextlib.suppress(RuntimeError):  # some keep activations of their last forward, which cannot be copied
                whole = skeleton(self.model)
        if whole is None:
            whole = skeleton(type(self.model), self.model.config)
        for name, module in whole.named_modules():
            for key, buffer in module._buffers.items():
                real = self.modules[name]._buffers.get(key) if name in self.modules else None
                if buffer is not None and real is not None and real.shape == buffer.shape and not real.is_meta:
                    module._buffers[key] = real.detach().cpu().to(buffer.dtype)
        return whole

    def _names_inside(self) -> set[str]:
        """All modules in instances of the classes that were asked for."""
        roots = [name for name, module in self.modules.items() if isinstance(module, self.targets.classes)]
        return {name for name in self.modules for root in roots if name == root or name.startswith(f"{root}.")}

    def _allows(self, kernel: str, module: str) -> bool:
        return kernel in self.targets.kernels or module in self._inside

    def _norms(self) -> dict[str, NormKind]:
        found = {}
        for name, module in self.modules.items():
            if not is_norm_like(module) or not self._allows("rms_norm", name):
                continue
            kind, why_not = norm_kind(module)
            if kind is not None:
                found[name] = kind
            elif "Norm" in type(module).__name__ and "elsewhere" not in why_not:
                self.places.append(Place(name, "layer_norm", why_not))
        return found

    def _activations(self) -> dict[str, tuple[str, bool]]:
        found: dict[str, tuple[str, bool]] = {}
        known: dict[Any, tuple[str | None, bool]] = {}
        for name, module in self.modules.items():
            if is_activation_like(module):
                key = (type(module), tuple((k, str(v)) for k, v in vars(module).items() if not k.startswith("_")))
                if key not in known:
                    known[key] = activation_form(module)
                form, composed = known[key]
                if form is not None:
                    found[name] = form, composed
        return found

    def _scopes(self) -> list[str]:
        """Blocks; outside of them what holds linear layers."""
        lists = [name for name, module in self.modules.items() if isinstance(module, nn.ModuleList)]
        blocks = _outermost(f"{name}.{child}" for name in lists for child, _ in self.modules[name].named_children())
        above = {".".join(block.split(".")[:depth]) for block in blocks for depth in range(block.count(".") + 1)}
        holders = [
            name
            for name, module in self.modules.items()
            if name and name not in above and any(map(_is_linear_or_row, module.children()))
        ]
        return [*blocks, *(name for name in _outermost(holders) if not _lies_in(name, blocks))]

    def _is_here(self, firing: Firing) -> bool:
        """Whether this rank computes it: a pipeline's other stages have no weights here."""
        module = self.modules.get(firing.source or firing.module)
        return module is not None and not any(parameter.is_meta for parameter in _own_tensors(module))

    # ------------------------------------------------------------------ what is done

    def _judged(self, firing: Firing) -> bool:
        """Whether the kernel may be put there; the place is noted with the reason where not."""
        kernel, where = firing.kernel, firing.source or firing.module
        if kernel in ("layer_norm", "rms_norm") or not self._allows(kernel, where):
            return False
        if kernel in _SUMS:
            return True
        why_not = self._why_no_source(firing) or self._compared(firing) or self._beside_another(firing)
        self.places.append(Place(where, kernel, why_not))
        return not why_not

    def _beside_another(self, firing: Firing) -> str:
        """What no module of its own makes wait is let wait for a scope as a whole, so one that is wrong there spoils all."""
        if firing.source or not firing.scope:
            return ""
        beside = (other for other in self._evidence.firings if (other.kernel, other.scope) == (firing.kernel, firing.scope))
        return next((f"{other.module} lies in the same block: {why}" for other in beside if (why := self._compared(other))), "")

    def _why_no_source(self, firing: Firing) -> str:
        module = self.modules.get(firing.source)
        if module is None or not hasattr(module, "weight"):
            return ""
        known = _is_linear_or_row(module)
        return "" if known else f"the linear layer has a forward of its own ({original_class(module).__name__})"

    def _compared(self, firing: Firing) -> str:
        if firing.kernel == "rotary" and firing.module in self._evidence.odd_rotations:
            return "the halves are turned by different angles"
        module: Any = self.modules.get(firing.source)
        weight = getattr(module, "weight", None)
        first = next((each for each in self.model.parameters() if each.is_floating_point() and not each.is_meta), None)
        like = weight if weight is not None else first
        if like is None or like.is_meta:
            return ""
        bias = getattr(module, "bias", None)
        size = bias.numel() if bias is not None else 24
        key = (firing.kernel, size, firing.form or "tanh", bias is not None, like.dtype, like.device)
        if key not in self._verdicts:
            forms = [firing.form] if firing.form else ["silu", *GELUS] if firing.kernel == "glu" else ["tanh"]
            reasons = [
                differs(firing.kernel, size=size, form=form, with_bias=bias is not None, dtype=like.dtype, device=like.device)
                for form in forms
            ]
            self._verdicts[key] = next(filter(None, reasons), "")
        return self._verdicts[key]

    def _put_norms(self, norms: dict[str, NormKind], kept: list[Firing]) -> None:
        sums = {firing.module: firing for firing in kept if firing.kernel in _SUMS}
        for name, kind in norms.items():
            fields = {"source": name, "kind": kind.kind, "eps": kind.eps, "shift": kind.shift}
            self._change(name, Norm, fields)
            self.places.append(Place(name, f"add_{kind.kind}" if name in sums else kind.kind))

    def _put_sources(self, kept: list[Firing], activations: dict[str, tuple[str, bool]]) -> None:
        for name in dict.fromkeys(firing.source for firing in kept if firing.source):
            module = self.modules[name]
            if _is_linear_or_row(module):
                self._change(name, BiasApart, {"source": name})
            elif type(module) is nn.Dropout:
                self._change(name, DropLater, {"source": name})
        scopes = {firing.scope for firing in kept if firing.kernel in ("bias_gelu", "glu")}
        for name, (form, composed) in activations.items():
            if name in self.modules and any(_lies_in(name, [scope]) for scope in scopes):
                self._change(name, Activation, {"source": name, "form": form, "composed": composed})

    def _put_scopes(self, kept: list[Firing]) -> None:
        for scope in dict.fromkeys(firing.scope for firing in kept if firing.scope):
            kernels = {firing.kernel for firing in kept if firing.scope == scope}
            kinds = {"attends": "scale_mask_softmax", "gates": "glu", "rotates": "rotary"}
            allowed = {kind: kernel in kernels for kind, kernel in kinds.items()}
            self._change(scope, Scope, {"kinds": allowed})

    def _put_loss(self, kept: list[Firing], evidence: Evidence) -> None:
        if "cross_entropy" not in self.targets.kernels:
            return
        split = "_oslo" in self.model.__dict__ and self.model.__dict__["_oslo"].plan.topology.tp > 1
        if split:
            self.places.append(Place("", "cross_entropy", "computed on slices of the vocabulary already"))
        elif any(firing.kernel == "cross_entropy" for firing in kept):
            self.loss = FusedLoss(self.model.loss_function, was_set="_loss_function" in self.model.__dict__)
        elif not evidence.fault:
            self.places.append(Place("", "cross_entropy", "the model's forward computes its loss itself, or has none"))

    def _say_what_is_left(self, evidence: Evidence, activations: dict[str, tuple[str, bool]]) -> None:
        if evidence.fault:
            self.places.append(Place("", "bias_dropout_residual", f"could not be recorded: {evidence.fault}"))
        for name, function in evidence.attention.items():
            if self._allows("scale_mask_softmax", name):
                self.places.append(Place(name, "scale_mask_softmax", f"{function} is one kernel already"))
        for name, module in self.modules.items():
            known = type(module).__module__ not in _ACTIVATIONS or name in activations
            if not known and self._allows("bias_gelu", name):
                self.places.append(Place(name, "bias_gelu", f"no kernel for {type(module).__name__}"))

    def _change(self, name: str, mixin: type, fields: dict[str, Any]) -> None:
        if not any(change.name == name and change.mixin is mixin for change in self.changes):
            self.changes.append(Change(name, mixin, {f"_oslo_fused_{key}": value for key, value in fields.items()}))


def _is_linear_or_row(module: nn.Module) -> bool:
    return is_linear(module) or (isinstance(module, RowLayer) and type(module).forward is RowLayer.forward)


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from (value for value in (*module.parameters(), *vars(module).values()) if isinstance(value, torch.Tensor))


def _outermost(names: Any) -> list[str]:
    found: list[str] = []
    for name in sorted(set(names), key=lambda name: name.count(".")):
        if not _lies_in(name, found):
            found.append(name)
    return found


def _lies_in(name: str, others: list[str]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in others)
