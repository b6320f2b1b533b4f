"""Matching a policy's words to the modules of one model. Everything that does not fit is an error with file:line."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from oslo_engine.errors import PlanError, PolicyError
from oslo_engine.plan.expressions import evaluate
from oslo_engine.plan.plan import RegionPlan
from oslo_engine.policy.schema import Policy, Region
from oslo_engine.shards import Deal, Shard, deal_evenly, deal_groups, packed_shard

FEATURE = "feature"


@dataclass
class Match:
    """What a policy found in a model: names of modules, and the shard of every parameter that is cut."""

    stacks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    regions: list[RegionPlan] = field(default_factory=list)
    embeddings: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    heads: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    shards: dict[str, Shard] = field(default_factory=dict)
    claimed_by: dict[str, str] = field(default_factory=dict)


def match_policy(model: PreTrainedModel, policy: Policy, tp: int) -> Match:
    """Find what the policy names in the model and work out the shards for ``tp`` ranks.

    Args:
        model: on ``meta`` or real; only names, shapes, config and attributes are read.

    Raises:
        PolicyError: a rule matches nothing, sizes contradict each other, a parameter is claimed twice.
        PlanError: heads or features cannot be dealt to tp ranks.
    """
    return _Matcher(model, policy, tp).run()


class _Matcher:
    def __init__(self, model: PreTrainedModel, policy: Policy, tp: int) -> None:
        self.model, self.policy, self.tp = model, policy, tp
        self.modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        prefix = model.base_model_prefix
        self.base = f"{prefix}." if prefix and prefix in self.modules else ""
        self.found = Match()
        self.matched: set[tuple[str, ...]] = set()

    def run(self) -> Match:
        for stack, pattern in self.policy.stacks.items():
            blocks = self._expand(self.base + pattern) or self._expand(pattern)
            if blocks:
                self.found.stacks[stack] = blocks
        if not self.found.stacks:
            raise PolicyError(
                "no stack of the policy is in this model",
                where=self.policy.where("stacks"),
                expected=", ".join(self.policy.stacks.values()),
                got=f"{type(self.model).__name__} with {', '.join(name for name, _ in self.model.named_children())}",
            )
        if self.tp > 1:
            self.deals = self._deal_units()
            for name, region in self.policy.regions.items():
                self._match_region(name, region)
            self._match_vocabulary()
            self._check_ties()
        return self.found

    # -- names

    def _expand(self, pattern: str) -> tuple[str, ...]:
        """Module names that fit a pattern whose ``*`` stays within one name."""
        if "*" not in pattern:
            return (pattern,) if pattern in self.modules else ()
        parts = pattern.split(".")
        return tuple(
            name
            for name in self.modules
            if len(split := name.split(".")) == len(parts) and all(map(fnmatch.fnmatchcase, split, parts))
        )

    def _resolve(self, name: str) -> str | None:
        return next((full for full in (self.base + name, name) if full in self.modules), None)

    # -- units

    def _deal_units(self) -> dict[str, Deal]:
        units, deals = self.policy.units, {}
        shared = {unit.per for unit in units.values() if unit.per}
        for name, unit in units.items():
            if unit.per is not None:
                if unit.per not in units:
                    raise PolicyError(
                        f"unknown unit {unit.per!r}", where=self.policy.where("units", name), expected=", ".join(units)
                    )
                what = f"{unit.count} of {type(self.model).__name__}"
                deals[name], deals[unit.per] = deal_groups(self._count(name), self._count(unit.per), self.tp, what=what)
            elif name not in shared:
                deals[name] = deal_evenly(self._count(name), self.tp, what=f"{unit.count} of {type(self.model).__name__}")
        return deals

    def _count(self, unit: str) -> int:
        attribute = self.policy.units[unit].count
        value = getattr(self.model.config, attribute, None)
        if not isinstance(value, int):
            raise PolicyError(
                f"the config has no whole number {attribute!r}",
                where=self.policy.where("units", unit),
                got=f"{type(self.model.config).__name__}.{attribute} = {value!r}",
            )
        return value

    def _deal(self, unit: str, size: int, where: str) -> Deal:
        if unit == FEATURE:
            return deal_evenly(size, self.tp, what="features")
        if unit not in self.deals:
            raise PolicyError(f"unknown unit {unit!r}", where=where, expected=", ".join([*self.deals, FEATURE]))
        return self.deals[unit]

    # -- regions

    def _match_region(self, name: str, region: Region) -> None:
        anchors = [
            anchor
            for blocks in self.found.stacks.values()
            for block in blocks
            for anchor in (self._expand(f"{block}.{region.at}") if region.at else (block,))
        ]
        if not anchors and not region.optional:
            raise PolicyError(
                f"region {name!r} matches no module",
                where=self.policy.where("regions", name, "at"),
                expected=f"{region.at!r} inside the blocks",
                got=", ".join(child for child, _ in self.modules[next(iter(self.found.stacks.values()))[0]].named_children()),
            )
        for anchor in anchors:
            self._match_anchor(name, region, anchor)
        if anchors:
            self._check_all_matched(name, region)

    def _match_anchor(self, name: str, region: Region, anchor: str) -> None:
        def inside(pattern: str) -> tuple[str, ...]:
            return self._expand(f"{anchor}.{pattern}" if pattern else anchor)

        columns: list[str] = []
        rows: list[str] = []
        features: dict[str, int] = {}
        for pattern, units in region.columns.items():
            where = self.policy.where("regions", name, "columns", pattern)
            for module_name in inside(pattern):
                self.matched.add((name, "columns", pattern))
                columns.append(module_name)
                features[module_name] = self._cut_columns(module_name, units, where)
        for pattern, unit in region.rows.items():
            where = self.policy.where("regions", name, "rows", pattern)
            for module_name in inside(pattern):
                self.matched.add((name, "rows", pattern))
                rows.append(module_name)
                features[module_name] = self._cut_rows(module_name, unit, where)
        uneven = {size for size in features.values() if size}
        if len(uneven) > 1 or (uneven and 0 in features.values()):
            raise PolicyError(
                "the columns and rows of a region must be dealt out alike: the same number of features, or heads throughout",
                where=self.policy.where("regions", name),
                got=", ".join(f"{module}: {f'{size} features' if size else 'heads'}" for module, size in features.items()),
            )
        if not columns or not rows:
            raise PolicyError(
                f"region {name!r} lacks {'columns' if not columns else 'rows'} in {anchor}",
                where=self.policy.where("regions", name, "rows" if columns else "columns"),
                expected=", ".join(region.rows if columns else region.columns),
                got=", ".join(child for child, _ in self.modules[anchor].named_children()),
            )
        for pattern, cut in region.cut.items():
            path, _, leaf = pattern.rpartition(".")
            for module_name in inside(path):
                parameter = getattr(self.modules[module_name], leaf, None)
                if parameter is not None:
                    self.matched.add((name, "cut", pattern))
                    where = self.policy.where("regions", name, "cut", pattern)
                    self._claim(f"{module_name}.{leaf}", self._shard(parameter.shape, cut.dim, (cut.unit,), where), where)
        scope = f"{anchor}.{region.scope}" if region.scope else anchor
        if scope not in self.modules:
            raise PolicyError("the scope is no module", where=self.policy.where("regions", name, "scope"), got=scope)
        self.found.regions.append(
            RegionPlan(name, scope, region.inputs, tuple(columns), tuple(rows), tuple(self._attributes(name, region, anchor)))
        )

    def _cut_columns(self, module_name: str, units: tuple[str, ...], where: str) -> int:
        module = self.modules[module_name]
        out_dim = self._linear_dims(module, module_name, where)[1]
        shard = self._shard(_shape(module), out_dim, units, where)
        self._claim(f"{module_name}.weight", shard, where)
        if module.bias is not None:
            self._claim(f"{module_name}.bias", Shard(0, shard.size, shard.spans), where)
        return shard.size // len(units) if FEATURE in units else 0

    def _cut_rows(self, module_name: str, unit: str, where: str) -> int:
        module = self.modules[module_name]
        in_dim = self._linear_dims(module, module_name, where)[0]
        shard = self._shard(_shape(module), in_dim, (unit,), where)
        self._claim(f"{module_name}.weight", shard, where)
        return shard.size if unit == FEATURE else 0

    def _linear_dims(self, module: nn.Module, module_name: str, where: str) -> tuple[int, int]:
        """Dimensions of the weight that are input and output features."""
        if isinstance(module, Conv1D):
            return 0, 1
        if isinstance(module, nn.Linear):
            return 1, 0
        raise PolicyError(
            "only Linear and Conv1D modules can be cut by columns or rows",
            where=where,
            got=f"{module_name}: {type(module).__name__}",
        )

    def _shard(self, shape: tuple[int, ...], dim: int, units: tuple[str, ...], where: str) -> Shard:
        """The shard of a dimension in which the units' entries lie one after another, every item equally wide."""
        size = shape[dim]
        deals = [self._deal(unit, size // len(units), where) for unit in units]
        items = sum(deal.count for deal in deals)
        if size % items:
            raise PolicyError(
                "the size is no multiple of the number of items",
                where=where,
                expected=f"a multiple of {items} ({' + '.join(units)})",
                got=f"dimension {dim} of {tuple(shape)}",
            )
        return packed_shard(dim, [(deal, size // items) for deal in deals])

    def _attributes(self, name: str, region: Region, anchor: str) -> list[tuple[str, str, tuple[int, ...]]]:
        found = []
        for path, expression in region.set.items():
            where = self.policy.where("regions", name, "set", path)
            module_path, _, attribute = path.rpartition(".")
            module_name = f"{anchor}.{module_path}" if module_path else anchor
            module = self.modules.get(module_name)
            if module is None or not hasattr(module, attribute):
                raise PolicyError("no such attribute", where=where, got=f"{module_name}.{attribute}")
            values = tuple(evaluate(expression, self._lookup(module, rank), where=where) for rank in range(self.tp))
            found.append((module_name, attribute, values))
        return found

    def _lookup(self, module: nn.Module, rank: int) -> Any:
        def lookup(name: str) -> int:
            if name in self.deals:
                return self.deals[name].local(rank)
            for owner in (module, self.model.config):
                value = getattr(owner, name, None)
                if isinstance(value, int):
                    return value
            raise KeyError(name)

        return lookup

    def _check_all_matched(self, name: str, region: Region) -> None:
        kinds: dict[str, Mapping[str, Any]] = {"columns": region.columns, "rows": region.rows, "cut": region.cut}
        for kind, rules in kinds.items():
            for pattern in rules:
                if (name, kind, pattern) not in self.matched:
                    raise PolicyError(
                        f"rule {pattern!r} matches nothing in any block",
                        where=self.policy.where("regions", name, kind, pattern),
                    )

    # -- vocabulary

    def _match_vocabulary(self) -> None:
        vocabulary = self.policy.vocabulary
        for kind, names, found in (
            ("embeddings", vocabulary.embeddings, self.found.embeddings),
            ("heads", vocabulary.heads, self.found.heads),
        ):
            for name in names:
                module_name = self._resolve(name)
                if module_name is not None:
                    where = self.policy.where("vocabulary", kind)
                    found.append((module_name, self._cut_vocabulary(module_name, where)))
        for name in vocabulary.parameters:
            path, _, leaf = name.rpartition(".")
            module_name = self._resolve(path) if path else ""
            if module_name is not None and getattr(self.modules[module_name], leaf, None) is not None:
                full = f"{module_name}.{leaf}".lstrip(".")
                where = self.policy.where("vocabulary", "parameters")
                self._claim(full, self._vocabulary_shard(self.model.get_parameter(full).shape[0]), where)
        output = self.model.get_output_embeddings()
        if output is not None and not any(self.modules[name] is output for name, _ in self.found.heads):
            raise PolicyError(
                "the model's output head is not in the policy",
                where=self.policy.where("vocabulary", "heads"),
                expected=next(name for name, module in self.modules.items() if module is output),
                got=", ".join(vocabulary.heads) or "no heads",
            )

    def _cut_vocabulary(self, module_name: str, where: str) -> tuple[int, ...]:
        module = self.modules[module_name]
        if not isinstance(module, (nn.Embedding, nn.Linear)):
            raise PolicyError(
                "only Embedding and Linear modules hold a vocabulary",
                where=where,
                got=f"{module_name}: {type(module).__name__}",
            )
        shard = self._vocabulary_shard(module.weight.shape[0])
        self._claim(f"{module_name}.weight", shard, where)
        if getattr(module, "bias", None) is not None:
            self._claim(f"{module_name}.bias", shard, where)
        return shard.sizes

    def _vocabulary_shard(self, size: int) -> Shard:
        return packed_shard(0, [(deal_evenly(size, self.tp, what="tokens in the vocabulary"), 1)])

    # -- claims

    def _claim(self, parameter: str, shard: Shard, where: str) -> None:
        if parameter in self.found.shards:
            raise PolicyError(
                "a parameter is cut by two rules",
                where=where,
                got=parameter,
                expected=f"only {self.found.claimed_by[parameter]}",
            )
        self.found.shards[parameter] = shard
        self.found.claimed_by[parameter] = where

    def _check_ties(self) -> None:
        """Every name of a tied parameter must be cut, and alike: an uncut holder would compute with a slice."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        for group in names.values():
            shards = {self.found.shards.get(name) for name in group}
            if len(shards) > 1:
                uncut = [name for name in group if name not in self.found.shards]
                raise PlanError(
                    "tied parameters must be cut alike",
                    where=", ".join(group),
                    got=f"not cut: {', '.join(uncut)}" if uncut else "cut in different ways",
                    hint="name every module that holds the parameter in the policy",
                )


def _shape(module: nn.Module) -> tuple[int, ...]:
    return tuple(module.get_parameter("weight").shape)
