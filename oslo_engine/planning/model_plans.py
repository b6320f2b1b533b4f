"""The plans of one model for many layouts: it is built, matched and recorded once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from oslo_engine.errors import OsloError, PolicyError, UnsupportedError
from oslo_engine.footprint.profile import StepProfile, StepProfiler
from oslo_engine.footprint.resident import Held, held_by_ranks
from oslo_engine.footprint.shorten import Shortened, shorten
from oslo_engine.footprint.workload import Workload
from oslo_engine.pipeline.orders import rank_of_stage
from oslo_engine.plan.plan import Plan
from oslo_engine.plan.survey import Prepared, prepare
from oslo_engine.planning.stage_costs import BlockCosts, with_rows
from oslo_engine.policy.registry import find_policy, policies_by_model_type
from oslo_engine.policy.schema import Policy
from oslo_engine.rewrite.flows import FlowBook
from oslo_engine.rewrite.planning import plan_model
from oslo_engine.rewrite.skeleton import skeleton
from oslo_engine.tiny.subject import Subject
from oslo_engine.topology import Topology

Carried = tuple[tuple[tuple[str, tuple[Any, ...]], ...], ...]


@dataclass(frozen=True)
class Laid:
    """A plan, and of every stage the values that it receives, as (block, place in its output)."""

    plan: Plan
    carried: Carried = ((),)
    _held: dict[str, tuple[Held, ...]] = field(default_factory=dict, repr=False, compare=False)

    def held(self, workload: Workload) -> tuple[Held, ...]:
        """What every pp rank holds, counted once for each kind of optimizer."""
        key = workload.optimizer if workload.trains else ""
        if key not in self._held:
            self._held[key] = held_by_ranks(self.plan, workload)
        return self._held[key]


class ModelPlans:
    """Makes the plans that ``parallelize`` would run.

    Args:
        subject: the model, by class and config.
        dtype: of its parameters.
        policy: None for the installed one; where there is none the model can only be copied or placed, not split.
    """

    def __init__(self, subject: Subject, dtype: torch.dtype, policy: Policy | str | Path | None = None) -> None:
        self.subject, self.dtype = subject, dtype
        model_type = subject.config.model_type
        known = policy is not None or model_type in policies_by_model_type()
        self.policy = find_policy(policy, model_type) if known else None
        self._laid: dict[Any, Laid | OsloError] = {}
        self._prepared: dict[int, Prepared] = {}
        self._profilers: dict[tuple[int, bool], StepProfiler] = {}
        self._profiles: dict[Any, StepProfile] = {}
        self._costs: dict[Any, BlockCosts] = {}

    @cached_property
    def model(self) -> PreTrainedModel:
        """On meta."""
        model: PreTrainedModel = self.subject.build(lambda cls, config: skeleton(cls, config, dtype=self.dtype))
        return model

    @cached_property
    def _flows(self) -> FlowBook:
        return FlowBook(self.model, self.lay(1, 1).plan.blocks)

    @cached_property
    def _short(self) -> Shortened:
        return shorten(skeleton(self.model, dtype=self.dtype), self.lay(1, 1).plan.blocks)

    @property
    def num_blocks(self) -> int:
        return len(self.lay(1, 1).plan.blocks)

    def lay(self, tp: int, pp: int, schedule: str = "1f1b") -> Laid:
        """The plan of a layout without data-parallel copies. Sequence parallelism does not change what it is asked for here.

        Raises:
            PolicyError, PlanError, UnsupportedError: the model cannot be split this way.
        """
        # Schedules that put the stages on the same ranks have the same plan but for its name.
        stages = rank_of_stage(schedule, pp) if pp > 1 else (0,)
        if (tp, stages) not in self._laid:
            try:
                self._laid[tp, stages] = self._make(tp, pp, schedule, stages)
            except OsloError as error:
                self._laid[tp, stages] = error
        found = self._laid[tp, stages]
        if isinstance(found, OsloError):
            raise found
        return found

    def costs(self, tp: int, workload: Workload, *, sequence_parallel: bool = False) -> BlockCosts:
        """What the blocks of tp rank 0 cost in a micro-batch.

        Raises:
            UnsupportedError: the model cannot be run on fake tensors.
            PolicyError, PlanError: it cannot be split this way.
        """
        key = (tp, workload, sequence_parallel)
        if key not in self._costs:
            profile = self._profile(tp, workload.with_rows(1), sequence_parallel)
            if workload.rows > 1:
                profile = with_rows(profile, self._profile(tp, workload.with_rows(2), sequence_parallel), workload.rows)
            self._costs[key] = BlockCosts(profile, self._short.stands_for)
        return self._costs[key]

    def _profile(self, tp: int, workload: Workload, sequence_parallel: bool) -> StepProfile:
        key = (tp, workload, sequence_parallel)
        if key not in self._profiles:
            self._profiles[key] = self._profiler(tp, sequence_parallel).profile(workload)
        return self._profiles[key]

    def _profiler(self, tp: int, sequence_parallel: bool) -> StepProfiler:
        key = (tp, sequence_parallel)
        if key not in self._profilers:
            short = skeleton(self._short.model, dtype=self.dtype)
            plan = plan_model(short, self.policy, Topology(tp=tp), sequence_parallel=sequence_parallel)
            self._profilers[key] = StepProfiler(short, plan.plan)
        return self._profilers[key]

    def _prepared_for(self, tp: int) -> Prepared:
        if tp not in self._prepared:
            survey = next((known.survey for known in self._prepared.values()), None)
            self._prepared[tp] = prepare(self.model, self.policy, tp, survey=survey)
        return self._prepared[tp]

    def _make(self, tp: int, pp: int, schedule: str, stages: tuple[int, ...]) -> Laid:
        if self.policy is None and tp * pp > 1:
            raise PolicyError(
                "no policy says how this model splits",
                got=self.subject.config.model_type,
                hint="oslo-engine policy derive MODEL --output FILE; then pass policy=FILE",
            )
        layout = plan_model(
            self.model,
            self.policy,
            Topology(tp=tp, pp=pp),
            schedule=schedule,
            rank_of_stage=stages,
            flows=self._flows if pp > 1 else None,
            prepared=self._prepared_for(tp),
        )
        if layout.flows is None:
            return Laid(layout.plan)
        flow = layout.flows.training_flow()
        if any(value.written for values in flow.carried for value in values):
            raise UnsupportedError(
                "blocks of this model hand values on through their arguments; what that costs in a pipeline is not planned",
                where=type(self.model).__name__,
            )
        return Laid(layout.plan, tuple(tuple((flow.calls[v.call].block, v.path) for v in values) for values in flow.carried))
