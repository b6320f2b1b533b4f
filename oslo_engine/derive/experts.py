"""Mixtures of experts in weights of three dimensions, [experts, ., .]: which dimension is the inner one, and how it lies.

All ways are tried in which the weights could be cut inside. The right one is that with which the outputs of the ranks' parts,
each run alone, add up to the output of the whole. Whole experts on each rank are tried in the same way.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from oslo_engine.derive.calls import Call, named_arguments, repeat_with, tensors_of
from oslo_engine.derive.numbers import attributes_of, names_of
from oslo_engine.derive.trial import Truth, give_attributes, match_one
from oslo_engine.errors import OsloError, PlanError
from oslo_engine.plan.plan import RegionPlan
from oslo_engine.plan.units import FEATURE
from oslo_engine.policy.schema import Cut, Experts, Region, Unit
from oslo_engine.shards import Shard

_TOLERANCE = 1e-4
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
INNER, EXPERT = "inner", "expert"


@dataclass(frozen=True)
class Weights:
    """Parameters of one module, by name within it, that hold experts; scope: its name within the block."""

    scope: str
    count: int
    parameters: Mapping[str, tuple[int, ...]]


def find_weights(block: nn.Module, calls: Mapping[str, Call]) -> list[Weights]:
    """Modules that hold, or whose children hold, several weights [experts, ., .] of one number of experts."""
    holders: dict[str, dict[str, tuple[int, ...]]] = {}
    for path, module in block.named_modules():
        if not isinstance(module, _CONVOLUTIONS):
            for leaf, parameter in module._parameters.items():
                if parameter is not None and parameter.ndim == 3 and parameter.shape[0] > 1:
                    holders.setdefault(path, {})[leaf] = tuple(parameter.shape)
    found: dict[str, dict[str, tuple[int, ...]]] = {path: dict(own) for path, own in holders.items() if len(own) > 1}
    for path, own in holders.items():
        if path not in found:
            parent, _, name = path.rpartition(".")
            found.setdefault(parent, {}).update({f"{name}.{leaf}": shape for leaf, shape in own.items()})
    return [
        Weights(scope, counts.pop(), parameters)
        for scope, parameters in found.items()
        if scope in calls and len(parameters) > 1 and len(counts := {shape[0] for shape in parameters.values()}) == 1
    ]


def why_not_sum(truth: Truth, region: Region, units: Mapping[str, Unit], tp: int, *, by_expert: bool = False) -> str | None:
    """What is wrong with a region whose scope's outputs are added up; None if it is right."""
    try:
        plans, shards = match_one(truth, region, units, tp, by_expert=by_expert)
    except PlanError as error:  # fewer experts than ranks are refused, not wrong
        return error.what if tp == 2 else None
    except OsloError as error:
        return error.what
    for plan in plans:
        if plan.scope not in truth.calls:
            continue
        call = truth.calls[plan.scope]
        try:
            parts = [_part(truth, plan, shards, rank, tp) for rank in range(tp)]
        except Exception as error:  # whatever the model raises on a part of its sizes
            return f"{type(error).__name__}: {error}"
        whole = tensors_of(call.output)[0]
        if any(part.shape != whole.shape for part in parts):
            return f"{plan.scope} returns {tuple(parts[0].shape)} instead of {tuple(whole.shape)}"
        if not bool((sum(parts) - whole).abs().max() <= _TOLERANCE * whole.abs().max()):
            return f"the ranks' outputs of {plan.scope} do not add up to the whole's"
    return None


def _part(truth: Truth, plan: RegionPlan, shards: Mapping[str, Shard], rank: int, tp: int) -> Tensor:
    module = copy.deepcopy(truth.specimen.model.get_submodule(plan.scope))
    inside = {name[len(plan.scope) + 1 :]: shard for name, shard in shards.items() if name.startswith(f"{plan.scope}.")}
    for name, shard in inside.items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        owner._parameters[leaf] = nn.Parameter(shard.apply(owner._parameters[leaf].detach(), rank))  # type: ignore[union-attr]
    give_attributes(plan, rank, lambda name: module.get_submodule(name[len(plan.scope) :].lstrip(".")))
    with torch.no_grad():
        for name in plan.once:
            module.get_parameter(name[len(plan.scope) + 1 :]).div_(tp)
        args, kwargs = truth.calls[plan.scope].fresh()
        if plan.experts is not None:
            args, kwargs = _routed(module, plan, rank, args, kwargs)
            try:
                return tensors_of(repeat_with(module, args, kwargs))[0]
            except (RuntimeError, IndexError):
                args, kwargs = _as_usual(module, args, kwargs)
        return tensors_of(repeat_with(module, args, kwargs))[0]


def _as_usual(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """In the usual way of running experts, which knows no float64: those that run one after another in Python know no number
    past the last one."""
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        if hasattr(config, "_experts_implementation"):
            part.config = copy.copy(config)
            vars(part)["config"]._experts_implementation = "grouped_mm"
    module.float()

    def single(x: Any) -> Any:
        return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x

    return pytree.tree_map(single, (args, kwargs))


def _routed(module: nn.Module, plan: RegionPlan, rank: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The routing as the engine gives it to a rank: experts of other ranks are one past its last, and weigh nothing."""
    assert plan.experts is not None
    named = named_arguments(module, args, kwargs)
    start, stop = plan.experts.spans[rank]
    index = named[plan.experts.index]
    elsewhere = (index < start) | (index >= stop)
    named[plan.experts.index] = (index - start).masked_fill(elsewhere, stop - start)
    named[plan.experts.weights] = named[plan.experts.weights].masked_fill(elsewhere, 0)
    names = list(named)[: len(args)]
    return tuple(named.pop(name) for name in names), named


def flowing(module: nn.Module, call: Call) -> tuple[str, ...]:
    """The arguments whose gradients the ranks' parts add up to, () for just the first."""
    given = named_arguments(module, call.args, call.kwargs)
    flows = tuple(name for name in given if name in call.differentiable and isinstance(given[name], Tensor))
    return () if flows == tuple(given)[:1] else flows


class ExpertSearch:
    """Looks for the region of one module with experts."""

    def __init__(self, truths: Sequence[tuple[Truth, bool]], weights: Weights) -> None:
        self.truths, self.weights = truths, weights
        first = truths[0][0]
        self.model = first.specimen.model
        self.module = first.specimen.block(first.block).get_submodule(weights.scope)
        self.call = first.calls[f"{first.block}.{weights.scope}" if weights.scope else first.block]

    def run(self) -> tuple[Region, dict[str, Unit]] | str:
        why = "no way to cut the experts' weights was found"
        for size, cuts in self._ways():
            for once in self._subsets(self._left(cuts)):
                for named, values in self._values(size):
                    region, units = self._region(size, cuts, once, named, values)
                    if self._right(region, units):
                        return self._with_experts(region, units), units
        return why

    # -- ways to cut

    def _ways(self) -> Iterator[tuple[int, dict[str, tuple[int, list[str]]]]]:
        """(number of inner features, parameter -> dimension and parts)."""
        shapes = self.weights.parameters
        sizes = {size // part for shape in shapes.values() for size in shape[1:] for part in (1, 2) if size % part == 0}
        for size in sorted(sizes, reverse=True):
            ways = [list(self._ways_of(shape, size)) for shape in shapes.values()]
            for picked in itertools.product(*ways):
                if any(len(parts) == 1 and parts[0] == FEATURE for _, parts in picked):
                    yield size, dict(zip(shapes, picked, strict=True))

    def _ways_of(self, shape: Sequence[int], size: int) -> Iterator[tuple[int, list[str]]]:
        for dim in range(1, len(shape)):
            if shape[dim] == size:
                yield dim, [FEATURE]
            if shape[dim] == 2 * size:
                yield dim, [FEATURE, FEATURE]
                yield dim, [f"{FEATURE} * 2"]

    def _left(self, cuts: Mapping[str, tuple[int, list[str]]]) -> list[str]:
        """Vectors of the module and one for each expert, which may be added to the output by every rank."""
        own = [name for name, parameter in self.module.named_parameters() if name not in cuts and parameter.ndim <= 2]
        return [name for name in own if name.rpartition(".")[2] != "weight"]

    def _subsets(self, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
        for number in range(len(names) + 1):
            yield from itertools.combinations(names, number)

    def _cut_beside(self, cuts: Mapping[str, tuple[int, list[str]]], once: Sequence[str]) -> dict[str, tuple[int, list[str]]]:
        """Biases of what is cut: [experts, as many as its weight has in the dimension that is cut]."""
        found = dict(cuts)
        for name, parameter in self.module.named_parameters():
            if name in cuts or name in once or parameter.ndim != 2 or parameter.shape[0] != self.weights.count:
                continue
            for weight, (dim, parts) in cuts.items():
                if self.weights.parameters[weight][dim] == parameter.shape[1] and name.startswith(weight.rpartition(".")[0]):
                    found[name] = (1, parts)
                    break
        return found

    def _values(self, size: int) -> Iterator[tuple[bool, dict[str, str]]]:
        """(whether the unit has a name, attributes): none first, then those that are as large as what is cut."""
        yield False, {}
        options = {
            name: INNER if value == size else f"2 * {INNER}"
            for name, value in attributes_of(self.module)
            if value in (size, 2 * size)
        }
        for number in range(1, min(len(options), 3) + 1):
            for names in itertools.combinations(options, number):
                yield True, {name: options[name] for name in names}

    def _region(
        self, size: int, cuts: Mapping[str, tuple[int, list[str]]], once: Sequence[str], named: bool, values: Mapping[str, str]
    ) -> tuple[Region, dict[str, Unit]]:
        def said(parts: list[str]) -> list[str]:
            return [part.replace(FEATURE, INNER) for part in parts] if named else parts

        beside = self._cut_beside(cuts, once)
        region = Region(
            at=self.weights.scope,
            leave="scope",
            inputs=self._inputs(),
            cut={name: Cut(unit=tuple(said(parts)), dim=dim) for name, (dim, parts) in beside.items()},
            once=tuple(once),
            set={name: (value,) for name, value in values.items()},
        )
        names = names_of(self.model, [self.module], size) if named else []
        return region, {INNER: Unit(count=names[0] if names else str(size))} if named else {}

    def _inputs(self) -> tuple[str, ...]:
        return flowing(self.module, self.call)

    def _right(self, region: Region, units: Mapping[str, Unit], *, by_expert: bool = False) -> bool:
        return all(
            why_not_sum(truth, region, units, tp, by_expert=by_expert) is None for truth, _ in self.truths for tp in (2, 3)
        )

    # -- whole experts

    def _with_experts(self, region: Region, units: Mapping[str, Unit]) -> Region:
        """The region with whole experts as another way, where that is right too."""
        given = named_arguments(self.module, self.call.args, self.call.kwargs)
        indices = [name for name, x in given.items() if isinstance(x, Tensor) and not x.is_floating_point()]
        parameters = [name for name, parameter in self.module.named_parameters() if parameter.shape[0] == self.weights.count]
        counts = names_of(self.model, [self.module], self.weights.count)
        for index in indices:
            for weights, x in given.items():
                if not isinstance(x, Tensor) or not x.is_floating_point() or x.shape != given[index].shape:
                    continue
                for values in self._values_by_expert():
                    experts = Experts(
                        count=counts[0] if counts else str(self.weights.count),
                        parameters=tuple(parameters),
                        index=index,
                        weights=weights,
                        set=values,
                    )
                    both = region.model_copy(update={"experts": experts})
                    if self._right(both, units, by_expert=True):
                        return both
        return region

    def _values_by_expert(self) -> Iterator[dict[str, tuple[str, ...]]]:
        """Attributes that count experts, and switches to turn on."""
        counts = [name for name, value in attributes_of(self.module) if value == self.weights.count]
        switches = [name for name, value in vars(self.module).items() if value is False and name != "training"]
        for switch in [None, *switches]:
            for names in self._subsets(counts[:3]):
                yield {**dict.fromkeys(names, (EXPERT,)), **({switch: ("1",)} if switch else {})}
