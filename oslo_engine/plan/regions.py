"""Matching one region of a policy to the places of a model where it stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn
from transformers.pytorch_utils import Conv1D

from oslo_engine.errors import PolicyError
from oslo_engine.plan.names import Faults, Names, split_optional
from oslo_engine.plan.plan import ArgumentPlan, ExpertsPlan, NormPlan, RegionPlan
from oslo_engine.plan.units import FEATURE, Units
from oslo_engine.plan.unmatched import no_attribute, unmatched_rules
from oslo_engine.policy.schema import Experts, Policy, Unit
from oslo_engine.shards import Shard, packed_shard

EXPERT = "expert"


class Claim(Protocol):
    def __call__(self, parameter: str, shard: Shard, where: str) -> None:
        """Say that a parameter or buffer is cut."""


def match_region(
    names: Names, policy: Policy, name: str, blocks: list[str], tp: int, *, by_expert: bool, claim: Claim, faults: Faults
) -> list[RegionPlan]:
    """Find a region in every block.

    Args:
        by_expert: whether whole experts are dealt out where the region says how.
        claim: is told every cut parameter.
        faults: collects what is wrong with the policy.

    Raises:
        PlanError: items or features cannot be dealt to tp ranks.
    """
    region = policy.regions[name]
    anchors = [anchor for block in blocks for anchor in (names.expand(f"{block}.{region.at}") if region.at else (block,))]
    matched: set[tuple[str, str]] = set()
    found = []
    for anchor in anchors:
        with faults.collect(anchor):
            place = _Place(names, policy, name, anchor, tp, claim, matched)
            plan = place.deal_experts(region.experts) if by_expert and region.experts else place.match()
            found += [plan] if plan is not None else []
    if not found and not region.optional and not faults.found:
        faults.add(
            PolicyError(
                f"region {name!r} matches no module",
                where=policy.where("regions", name, "at"),
                expected=f"{region.at or 'its columns and rows'!r} inside the blocks",
                got=names.children(anchors[0] if anchors else blocks[0]),
            )
        )
    if matched and not (by_expert and region.experts):
        faults.found += unmatched_rules(names, policy, name, anchors, matched, whole=bool(found))
    return found


class _Place:
    """A region at one module, the anchor."""

    def __init__(
        self, names: Names, policy: Policy, name: str, anchor: str, tp: int, claim: Claim, matched: set[tuple[str, str]]
    ) -> None:
        self.names, self.policy, self.name, self.anchor, self.tp = names, policy, name, anchor, tp
        self.claim, self.matched = claim, matched
        self.region = policy.regions[name]
        wheres = {unit: policy.where("units", unit) for unit in policy.units}
        wheres |= {unit: policy.where("regions", name, "units", unit) for unit in self.region.units}
        self.units = Units(names.model, names.modules[anchor], {**policy.units, **self.region.units}, tp, wheres)

    def match(self) -> RegionPlan | None:
        """The region here; None if nothing of it is here."""
        region = self.region
        if not all(self.units.has(attribute, value) for attribute, value in region.when.items()):
            return None
        if region.needs and not self.names.expand(f"{self.anchor}.{region.needs}"):
            return None
        columns, rows = self._modules("columns", region.columns), self._modules("rows", region.rows)
        inner, norms = self._modules("inner", region.inner), self._modules("norms", region.norms)
        norms = {name: rule for name, rule in norms.items() if not split_optional(rule)[1] or self._is_norm(name)}
        cut = {full: pattern for pattern in region.cut for full in self._parameters("cut", pattern)}
        if not (columns or rows or cut):
            return None
        if not (columns or cut) or not (rows or region.leave == "scope"):
            missing = "rows" if columns or cut else "columns"
            raise PolicyError(
                f"region {self.name!r} lacks {missing} in {self.anchor}",
                where=self._where(missing),
                expected=", ".join(getattr(region, missing)),
                got=self.names.children(self.anchor),
            )
        features: dict[str, int] = {}
        for module, pattern in columns.items():
            features[module] = self._cut_columns(module, region.columns[pattern], self._where("columns", pattern))
        for module, pattern in rows.items():
            features[module] = self._cut_rows(module, region.rows[pattern], self._where("rows", pattern))
        for module, pattern in inner.items():
            self._cut_rows(module, region.inner[pattern], self._where("inner", pattern))
        self._check_dealt_alike(features)
        for full, pattern in cut.items():
            rule, where = region.cut[pattern], self._where("cut", pattern)
            self.claim(full, self.units.shard(self._shape(full), rule.dim, rule.unit, where), where)
        return RegionPlan(
            name=self.name,
            scope=self._scope(),
            inputs=region.inputs,
            columns=tuple(columns),
            rows=tuple(rows),
            attributes=tuple(self._attributes(region.set, "set")),
            enter=region.enter,
            leave=region.leave,
            inner=tuple(inner),
            norms=tuple(self._cut_norm(module, pattern) for module, pattern in norms.items()),
            arguments=tuple(self._argument(argument) for argument in region.arguments),
            summed=tuple(full for pattern in region.sum for full in self._parameters("sum", pattern)),
            once=tuple(full for pattern in region.once for full in self._parameters("once", pattern)),
        )

    def deal_experts(self, experts: Experts) -> RegionPlan | None:
        """The region with whole experts on each rank."""
        where = self._where("experts")
        parameters = [full for pattern in experts.parameters for full in self.names.parameters(f"{self.anchor}.{pattern}")]
        if not parameters:
            return None
        self.units.units = {**self.units.units, EXPERT: Unit(count=experts.count)}
        self.units.wheres = {**self.units.wheres, EXPERT: where}
        for full in parameters:
            self.claim(full, self.units.shard(self._shape(full), 0, (EXPERT,), where), where)
        spans = tuple(span for (span,) in self.units.deal(EXPERT, where).spans)
        return RegionPlan(
            name=self.name,
            scope=self._scope(),
            inputs=self.region.inputs,
            columns=(),
            rows=(),
            attributes=tuple(self._attributes(experts.set, "experts")),
            leave="scope",
            experts=ExpertsPlan(experts.index, experts.weights, spans),
        )

    # -- what is there

    def _where(self, *path: str) -> str:
        return self.policy.where("regions", self.name, *path)

    def _modules(self, kind: str, rules: Mapping[str, Any]) -> dict[str, str]:
        """Modules that the patterns of one kind match, with the pattern."""
        found = {}
        for pattern in rules:
            path, _ = split_optional(pattern)
            for module in self.names.expand(f"{self.anchor}.{path}" if path else self.anchor):
                found[module] = pattern
                self.matched.add((kind, pattern))
        return found

    def _parameters(self, kind: str, pattern: str) -> tuple[str, ...]:
        found = self.names.parameters(f"{self.anchor}.{split_optional(pattern)[0]}")
        if found:
            self.matched.add((kind, pattern))
        return found

    def _shape(self, full: str) -> tuple[int, ...]:
        path, _, leaf = full.rpartition(".")
        return tuple(getattr(self.names.modules[path], leaf).shape)

    def _is_norm(self, module_name: str) -> bool:
        return not isinstance(self.names.modules[module_name], nn.Identity)

    def _scope(self) -> str:
        scope = f"{self.anchor}.{self.region.scope}" if self.region.scope else self.anchor
        if scope not in self.names.modules:
            raise PolicyError("the scope is no module", where=self._where("scope"), got=scope)
        return scope

    # -- what is cut

    def _cut_columns(self, module_name: str, parts: tuple[str, ...], where: str) -> int:
        """Cut the output features; the number of those dealt singly, 0 if there are none."""
        module = self.names.modules[module_name]
        out_dim = _out_dim(module, module_name, where)
        shard = self.units.shard(self._shape(f"{module_name}.weight"), out_dim, parts, where)
        self.claim(f"{module_name}.weight", shard, where)
        if module.bias is not None:
            self.claim(f"{module_name}.bias", Shard(0, shard.size, shard.spans), where)
        return shard.size // len(parts) if _singly(parts) else 0

    def _cut_rows(self, module_name: str, parts: tuple[str, ...], where: str) -> int:
        module = self.names.modules[module_name]
        in_dim = 1 - _out_dim(module, module_name, where)
        shard = self.units.shard(self._shape(f"{module_name}.weight"), in_dim, parts, where)
        self.claim(f"{module_name}.weight", shard, where)
        return shard.size if _singly(parts) else 0

    def _cut_norm(self, module_name: str, pattern: str) -> NormPlan:
        where, rule = self._where("norms", pattern), self.region.norms[pattern]
        tensors = [full for leaf in ("weight", "bias") for full in self.names.parameters(f"{module_name}.{leaf}")]
        for full in tensors:
            shard = self.units.shard(self._shape(full), 0, rule.unit, where)
            self.claim(full, shard, where)
        if not tensors:
            shard = self._shard_of_sizes(rule.unit, where)
        holders = _holders(shard) if shard.overlaps else ()
        if rule.within is None:
            return NormPlan(module_name, shard.size, 1, ((0, 1),) * self.tp, holders)
        deal = self.units.deal(rule.within, where)
        return NormPlan(module_name, shard.size // deal.count, deal.count, tuple(span for (span,) in deal.spans), holders)

    def _shard_of_sizes(self, parts: tuple[str, ...], where: str) -> Shard:
        """The features of a norm without weights."""
        named = [self.units.part(part, where) for part in parts]
        if any(width is None for _, width in named):
            raise PolicyError("a norm without weights needs `unit * width`", where=where, got=", ".join(parts))
        return packed_shard(0, [(self.units.deal(unit, where), width or 1) for unit, width in named])

    def _argument(self, name: str) -> ArgumentPlan:
        argument, where = self.region.arguments[name], self._where("arguments", name)
        unit, width = self.units.part(argument.unit, where)
        shard = packed_shard(0, [(self.units.deal(unit, where), width or 1)])
        return ArgumentPlan(name, argument.dim, shard.size, shard.spans, argument.repeated)

    def _attributes(self, rules: Mapping[str, tuple[str, ...]], kind: str) -> list[tuple[str, str, tuple[Any, ...]]]:
        found = []
        for pattern, expressions in rules.items():
            path, may_lack = split_optional(pattern)
            where = self._where(kind, pattern)
            owners = self._owners(path)
            if not owners and not may_lack:
                raise no_attribute(self.names.modules[self.anchor], f"{self.anchor}.{path}", path, where)
            for module_name, attribute in owners:
                module = self.names.modules[module_name]
                values = [
                    tuple(self.units.value(expression, rank, where, module) for expression in expressions)
                    for rank in range(self.tp)
                ]
                single = len(expressions) == 1 and not isinstance(_attribute(module, attribute), (list, tuple))
                found.append((module_name, attribute, tuple(value[0] if single else value for value in values)))
        return found

    def _owners(self, path: str) -> list[tuple[str, str]]:
        """(module, attribute) that a path means: the longest part of it that names modules, then attributes."""
        words = path.split(".")
        for end in range(len(words) - 1, -1, -1):
            modules = self.names.expand(".".join([self.anchor, *words[:end]]))
            attribute = ".".join(words[end:])
            found = [(module, attribute) for module in modules if _attribute(self.names.modules[module], attribute) is not None]
            if found:
                return found
        return []

    def _check_dealt_alike(self, features: Mapping[str, int]) -> None:
        sizes = {size for size in features.values() if size}
        if len(sizes) > 1 or (sizes and 0 in features.values()):
            raise PolicyError(
                "the columns and rows of a region must be dealt out alike: the same number of features, or heads throughout",
                where=self._where(),
                got=", ".join(f"{module}: {f'{size} features' if size else 'heads'}" for module, size in features.items()),
            )


def _holders(shard: Shard) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For each rank, (entries, ranks that hold them) of its spans."""
    counts = Counter(span for spans in shard.spans for span in spans)
    return tuple(tuple((span[1] - span[0], counts[span]) for span in spans) for spans in shard.spans)


def _singly(parts: tuple[str, ...]) -> bool:
    """Whether all parts are dealt by single features."""
    return set(parts) == {FEATURE}


def _attribute(module: nn.Module, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def _out_dim(module: nn.Module, module_name: str, where: str) -> int:
    """The dimension of the weight that is output features; the other one is input features."""
    if isinstance(module, Conv1D):
        return 1
    if isinstance(module, nn.Linear):
        return 0
    raise PolicyError(
        "only Linear and Conv1D modules can be cut by columns or rows",
        where=where,
        got=f"{module_name}: {type(module).__name__}",
    )
