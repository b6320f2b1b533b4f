"""Trying a region without other processes: each rank's part of a module, run alone, must bring the right features to the row.

The rank's tensors are cut and its attributes set as the real plan says. What needs the other ranks is taken from the run of the
whole: statistics of norms, and the sums behind rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from oslo_engine.derive.calls import Call, Stop, argument_names, forget_graph, observed, repeat, repeat_with
from oslo_engine.derive.specimen import Specimen
from oslo_engine.errors import OsloError, PlanError
from oslo_engine.plan.names import Faults, Names
from oslo_engine.plan.plan import ArgumentPlan, RegionPlan
from oslo_engine.plan.regions import match_region
from oslo_engine.policy.schema import Policy, Region, Unit
from oslo_engine.rewrite.regions import update_features
from oslo_engine.shards import Shard, Span

_TOLERANCE = 1e-4  # parts of models compute in float32
_NAME = "trial"


@dataclass(frozen=True)
class Local:
    """An argument of the scope of which each rank has its own part already."""

    name: str
    unit: str
    dim: int


@dataclass
class Truth:
    """A block as it is, and every call in it of a run of the whole; names are within the model."""

    specimen: Specimen
    block: str
    calls: dict[str, Call] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.specimen.use(0)
        block = self.specimen.block(self.block)
        modules = {f"{self.block}.{name}" if name else self.block: module for name, module in block.named_modules()}
        with observed(modules) as calls:
            repeat_with(block, *self.specimen.runs[0][self.block].flowing(block))
        forget_graph(block)
        self.calls = calls


def match_one(
    truth: Truth, region: Region, units: Mapping[str, Unit], tp: int, *, by_expert: bool = False
) -> tuple[list[RegionPlan], dict[str, Shard]]:
    """The plans of a region in one block.

    Raises:
        OsloError: it does not fit.
    """
    model = truth.specimen.model
    policy = Policy(name=_NAME, models=(_NAME,), stacks={_NAME: "*"}, units=dict(units), regions={_NAME: region})
    shards: dict[str, Shard] = {}

    def claim(parameter: str, shard: Shard, where: str) -> None:
        shards[parameter] = shard

    faults = Faults()
    plans = match_region(Names(model), policy, _NAME, [truth.block], tp, by_expert=by_expert, claim=claim, faults=faults)
    faults.raise_any(lambda: _NAME)
    return plans, shards


def why_not(truth: Truth, region: Region, units: Mapping[str, Unit], tp: int, local: Sequence[Local] = ()) -> str | None:
    """What is wrong with a region where ``tp`` ranks share it; None if it is right, or refused for more than two ranks."""
    try:
        plans, shards = match_one(truth, region, units, tp)
    except PlanError as error:  # fewer items than ranks are refused, not wrong
        return error.what if tp == 2 else None
    except OsloError as error:
        return error.what
    for plan in plans:
        if not all(row in truth.calls for row in plan.rows):
            continue
        for rank in range(tp):
            wrong = _Rank(truth, plan, shards, rank, local, region, units, tp).wrong()
            if wrong is not None:
                return wrong
    return None


def give_attributes(plan: RegionPlan, rank: int, module_of: Callable[[str], nn.Module]) -> None:
    """Set a rank's attributes in a copy of a part of the model; a config among them becomes the module's own."""
    for module_name, path, values in plan.attributes:
        *parents, last = path.split(".")
        owner: Any = module_of(module_name)
        for parent in parents:
            setattr(owner, parent, copy.copy(getattr(owner, parent)))
            owner = getattr(owner, parent)
        value = values[rank]
        setattr(owner, last, type(getattr(owner, last))(value) if isinstance(value, tuple) else value)


class _Rank:
    """One rank's copy of the part of a model in which a region lies."""

    def __init__(
        self,
        truth: Truth,
        plan: RegionPlan,
        shards: Mapping[str, Shard],
        rank: int,
        local: Sequence[Local],
        region: Region,
        units: Mapping[str, Unit],
        tp: int,
    ) -> None:
        self.truth, self.plan, self.rank = truth, plan, rank
        self.top = self._top(plan, shards)
        prefix = f"{self.top}." if self.top else ""
        self.module = copy.deepcopy(truth.specimen.model.get_submodule(self.top))
        self.shards = {name: shard for name, shard in shards.items() if name.startswith(prefix)}
        self.local = local
        self.problem: str | None = None
        self.seen: set[str] = set()
        self._arguments = [*plan.arguments, *self._local_arguments(region, units, tp)]

    def _top(self, plan: RegionPlan, shards: Mapping[str, Shard]) -> str:
        names = [*plan.columns, *plan.rows, *plan.inner, *([plan.scope] if plan.enter == "scope" else [])]
        top = names[0]
        while top and not (top in self.truth.calls and all(name == top or name.startswith(f"{top}.") for name in names)):
            top = top.rpartition(".")[0]
        return top or self.truth.block

    def _local_arguments(self, region: Region, units: Mapping[str, Unit], tp: int) -> list[ArgumentPlan]:
        """Those that the ranks have their parts of already are cut like the others; only here they come whole."""
        if not self.local:
            return []
        arguments = {one.name: {"unit": one.unit, "dim": one.dim} for one in self.local}
        both = region.model_copy(
            update={"arguments": type(region)(**{**region.model_dump(), "arguments": arguments}).arguments}
        )
        plans, _ = match_one(self.truth, both, units, tp)
        return list(next(plan for plan in plans if plan.scope == self.plan.scope).arguments)

    def wrong(self) -> str | None:
        try:
            self._cut()
            hooks = self._watch()
        except (RuntimeError, AttributeError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        try:
            with torch.no_grad():
                repeat(self.module, self.truth.calls[self.top])
        except Exception as error:  # whatever the model raises on a part of its sizes
            return self.problem or f"{type(error).__name__}: {error}"
        finally:
            for hook in hooks:
                hook.remove()
        missed = set(self.plan.rows) - self.seen
        return self.problem or (f"{', '.join(sorted(missed))} not reached" if missed else None)

    def _inside(self, name: str) -> nn.Module:
        return self.module.get_submodule(name[len(self.top) :].lstrip("."))

    def _cut(self) -> None:
        for name, shard in self.shards.items():
            path, _, leaf = name.rpartition(".")
            owner = self._inside(path)
            if leaf in owner._parameters:
                owner._parameters[leaf] = nn.Parameter(shard.apply(owner._parameters[leaf].detach(), self.rank))  # type: ignore[union-attr]
            else:
                owner._buffers[leaf] = shard.apply(owner._buffers[leaf], self.rank)  # type: ignore[arg-type]
        give_attributes(self.plan, self.rank, self._inside)
        for name in (*self.plan.columns, *self.plan.rows, *self.plan.inner):
            update_features(self._inside(name))

    def _watch(self) -> list[Any]:
        hooks = []
        if self._arguments:
            hooks.append(self._inside(self.plan.scope).register_forward_pre_hook(self._take, with_kwargs=True))
        for name in (norm.module for norm in self.plan.norms):
            module = self._inside(name)
            hooks.append(
                module.register_forward_pre_hook(self._comparing(name, self._features_of_norm(name)), with_kwargs=True)
            )
            hooks.append(module.register_forward_hook(self._sliced_truth(name)))
            module.forward = lambda x, *args, **kwargs: x  # type: ignore[method-assign]
        for name in self.plan.inner:
            hooks += self._watch_row(name, end=False)
        for name in self.plan.rows:
            hooks += self._watch_row(name, end=True)
        return hooks

    def _features_of_norm(self, name: str) -> tuple[Span, ...]:
        return next(shard for full, shard in self.shards.items() if full.rpartition(".")[0] == name).spans[self.rank]

    def _watch_row(self, name: str, *, end: bool) -> list[Any]:
        module = self._inside(name)
        compare = self._comparing(name, self.shards[f"{name}.weight"].spans[self.rank])

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if name in self.seen:
                return
            compare(module, args, kwargs)
            self.seen.add(name)
            if end and self.seen.issuperset(self.plan.rows):
                raise Stop

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            return self.truth.calls[name].output

        return [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]

    def _comparing(self, name: str, spans: tuple[Span, ...]) -> Callable[..., None]:
        def compare(module: nn.Module, args: Any, kwargs: Any) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            call = self.truth.calls[name]
            whole = call.args[0] if call.args else next(iter(call.kwargs.values()))
            expected = _features(whole, spans)
            if x.shape != expected.shape:
                self.problem = f"{name} gets {tuple(x.shape)} instead of {tuple(expected.shape)}"
                raise Stop
            if not bool((x - expected).abs().max() <= _TOLERANCE * whole.abs().max()):
                self.problem = f"{name} gets other numbers"
                raise Stop

        return compare

    def _sliced_truth(self, name: str) -> Callable[..., Any]:
        def after(module: nn.Module, args: Any, output: Any) -> Any:
            return _features(self.truth.calls[name].output, self._features_of_norm(name))

        return after

    def _take(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        names = argument_names(module)
        plans = {plan.name: plan for plan in self._arguments}

        def taken(name: str, value: Any) -> Any:
            plan = plans.get(name)
            if plan is None or not isinstance(value, Tensor) or value.shape[plan.dim] == 1:
                return value
            dim = plan.dim % value.ndim
            items = value.unflatten(dim, (-1, plan.size))
            return torch.cat([items.narrow(dim + 1, a, b - a) for a, b in plan.spans[self.rank]], dim + 1).flatten(dim, dim + 1)

        given = tuple(taken(names[at] if at < len(names) else str(at), x) for at, x in enumerate(args))
        return given, {key: taken(key, x) for key, x in kwargs.items()}


def _features(whole: Tensor, spans: tuple[Span, ...]) -> Tensor:
    return torch.cat([whole[..., start:stop] for start, stop in spans], -1)
