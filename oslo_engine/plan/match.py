"""Matching a policy's words to the modules of one model. Everything that does not fit is an error with file:line."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel

from oslo_engine.errors import PlanError, PolicyError
from oslo_engine.plan.names import Faults, Names, names_part, split_optional, told_short, without_numbers
from oslo_engine.plan.plan import RegionPlan
from oslo_engine.plan.regions import match_region
from oslo_engine.policy.schema import Policy
from oslo_engine.shards import Shard, deal_evenly, packed_shard

Rows = tuple[str, tuple[int, ...]]


@dataclass
class Match:
    """What a policy found in a model: names of modules, and the shard of every parameter that is cut.

    replicated: parameter -> why every tp rank holds it whole.
    """

    stacks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    regions: list[RegionPlan] = field(default_factory=list)
    embeddings: list[Rows] = field(default_factory=list)
    heads: list[Rows] = field(default_factory=list)
    shards: dict[str, Shard] = field(default_factory=dict)
    claimed_by: dict[str, str] = field(default_factory=dict)
    replicated: dict[str, str] = field(default_factory=dict)

    def claim(self, parameter: str, shard: Shard, where: str) -> None:
        if parameter in self.shards:
            raise PolicyError(
                "a parameter is cut by two rules", where=where, got=parameter, expected=f"only {self.claimed_by[parameter]}"
            )
        self.shards[parameter], self.claimed_by[parameter] = shard, where


def match_policy(model: PreTrainedModel, policy: Policy, tp: int, *, expert_split: str = "inner") -> Match:
    """Find what the policy names in the model and work out the shards for ``tp`` ranks.

    Args:
        model: on ``meta`` or real; only names, shapes, config and attributes are read.
        expert_split: "inner" cuts every expert, "expert" deals whole experts out where the policy says how.

    Raises:
        PolicyError: rules that match nothing, sizes that contradict each other, parameters claimed twice or not at all; all
            faults in one message.
        PlanError: heads or features cannot be dealt to tp ranks.
    """
    return _Matcher(model, policy, tp, expert_split).run()


class _Matcher:
    def __init__(self, model: PreTrainedModel, policy: Policy, tp: int, expert_split: str) -> None:
        self.model, self.policy, self.tp, self.expert_split = model, policy, tp, expert_split
        self.names, self.found, self.faults = Names(model), Match(), Faults()
        self.unmatched: list[tuple[str, str]] = []  # of the vocabulary: heads that only some classes have

    def run(self) -> Match:
        self._match_stacks()
        if self.tp > 1:
            blocks = self._blocks()
            for name in self.policy.regions:
                self.found.regions += match_region(
                    self.names,
                    self.policy,
                    name,
                    blocks,
                    self.tp,
                    by_expert=self.expert_split == "expert",
                    claim=self.found.claim,
                    faults=self.faults,
                )
            self._match_vocabulary()
            self._match_replicated()
            self.faults.raise_any(lambda: f"{type(self.model).__name__}")
            self._check_ties()
        return self.found

    def _match_stacks(self) -> None:
        for stack, pattern in self.policy.stacks.items():
            if blocks := self.names.from_base(pattern):
                self.found.stacks[stack] = blocks
        if not self.found.stacks:
            raise PolicyError(
                "no stack of the policy is in this model",
                where=self.policy.where("stacks"),
                expected=", ".join(self.policy.stacks.values()),
                got=f"{type(self.model).__name__} with {', '.join(name for name, _ in self.model.named_children())}",
            )

    # -- vocabulary

    def _match_vocabulary(self) -> None:
        vocabulary = self.policy.vocabulary
        for kind, patterns, found in (
            ("embeddings", vocabulary.embeddings, self.found.embeddings),
            ("heads", vocabulary.heads, self.found.heads),
        ):
            where = self.policy.where("vocabulary", kind)
            for pattern in patterns:
                with self.faults.collect():
                    there = self.names.from_base(pattern)
                    found += [(name, self._cut_vocabulary(name, where)) for name in there]
                    if not there:
                        self.unmatched.append((pattern, where))
        for pattern in vocabulary.parameters:
            where = self.policy.where("vocabulary", "parameters")
            for full in self.names.parameters(self.names.base + pattern) or self.names.parameters(pattern):
                with self.faults.collect():
                    self.found.claim(full, self._vocabulary_shard(self.model.get_parameter(full).shape[0]), where)

    def _cut_vocabulary(self, module_name: str, where: str) -> tuple[int, ...]:
        module = self.names.modules[module_name]
        if not isinstance(module, (nn.Embedding, nn.Linear)):
            raise PolicyError(
                "only Embedding and Linear modules hold a vocabulary",
                where=where,
                got=f"{module_name}: {type(module).__name__}",
            )
        shard = self._vocabulary_shard(module.weight.shape[0])
        self.found.claim(f"{module_name}.weight", shard, where)
        if getattr(module, "bias", None) is not None:
            self.found.claim(f"{module_name}.bias", shard, where)
        return shard.sizes

    def _vocabulary_shard(self, size: int) -> Shard:
        return packed_shard(0, [(deal_evenly(size, self.tp, what="tokens in the vocabulary"), 1)])

    # -- what is left

    def _match_replicated(self) -> None:
        """Every matrix of the blocks and of the vocabulary is cut, or held whole on purpose."""
        rules = {split_optional(pattern)[0]: pattern for pattern in self.policy.replicate}
        in_regions = {name for region in self.found.regions for name in (*region.once, *region.summed)}
        watched = tuple(f"{name}." for name in (*self._blocks(), *self._vocabulary_modules()))
        failed = tuple(f"{place}." for place in self.faults.places)
        used = set()
        forgotten: dict[str, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if name in self.found.shards or name in in_regions:
                continue
            rule = next((rule for rule in rules if names_part(rule, name)), None)
            if rule is not None:
                used.add(rule)
                self.found.replicated[name] = self.policy.replicate[rules[rule]]
            elif parameter.ndim > 1 and name.startswith(watched) and not name.startswith(failed):
                forgotten.setdefault(without_numbers(name), []).append(name)
        for rule, pattern in rules.items():
            if rule not in used and not split_optional(pattern)[1]:
                where = self.policy.where("replicate", pattern)
                uncut = [name for name, _ in self.model.named_parameters() if name not in self.found.shards]
                self.faults.add(
                    PolicyError(
                        f"rule {pattern!r} matches no uncut parameter",
                        where=where,
                        expected=f"part of the name of one: {told_short(list(dict.fromkeys(map(without_numbers, uncut))))}",
                    )
                )
        if forgotten:
            self._tell_unmatched_vocabulary([names[0] for names in forgotten.values()])
            self.faults.add(
                PolicyError(
                    f"the policy says nothing about {len(forgotten)} parameters",
                    where=self.policy.origin,
                    got=", ".join(
                        f"{names[0]} {tuple(self.model.get_parameter(names[0]).shape)}" for names in forgotten.values()
                    ),
                    hint="cut them in a region, or say under `replicate` why each rank holds them whole",
                )
            )

    def _tell_unmatched_vocabulary(self, forgotten: list[str]) -> None:
        """A module of the vocabulary was not named: rules that matched nothing may have meant it."""
        modules = [name for name in self._vocabulary_modules() if f"{name}.weight" in forgotten]
        for pattern, where in self.unmatched if modules else ():
            self.faults.add(
                PolicyError(f"rule {pattern!r} of the vocabulary matches nothing", where=where, expected=" or ".join(modules))
            )

    def _blocks(self) -> list[str]:
        return [block for stack in self.found.stacks.values() for block in stack]

    def _vocabulary_modules(self) -> list[str]:
        """Names of the input embeddings and the output head, where the model says what they are."""
        modules = []
        with suppress(NotImplementedError):  # where a model has none of its own
            modules.append(self.model.get_input_embeddings())
        modules.append(self.model.get_output_embeddings())
        return [name for name, module in self.names.modules.items() if any(module is each for each in modules)]

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
