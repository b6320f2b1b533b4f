"""What a forward leaves on the device of each block until the backward, or in its cache: measured on fake tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from oslo_engine.errors import OsloError
from oslo_engine.footprint.profile import OUTSIDE, StepProfile, StepProfiler
from oslo_engine.footprint.workload import Workload
from oslo_engine.placement.stacks import Stack
from oslo_engine.rewrite.planning import plan_model
from oslo_engine.rewrite.skeleton import skeleton
from oslo_engine.topology import Topology


@dataclass(frozen=True)
class Activations:
    """Bytes of one step.

    of_block: what each block keeps; what lies between two counts to the second, what lies behind the last to that.
    passing: the most that any block needs for a moment besides; every device must have room for it.
    """

    of_block: dict[str, int] = field(default_factory=dict)
    passing: int = 0


def measure_activations(model: PreTrainedModel, stacks: Sequence[Stack], workload: Workload) -> Activations:
    """Run a step of a copy that has no weights.

    Returns:
        Zeros for a model that does not run on text alone.
    """
    try:
        twin = skeleton(model, dtype=model.dtype)
        plan = plan_model(twin, None, Topology()).plan
        plan = dataclasses.replace(plan, stacks=tuple((stack.name, stack.blocks) for stack in stacks))
        return _by_block(StepProfiler(twin, plan).profile(workload))
    except OsloError:
        return Activations()


def _by_block(profile: StepProfile) -> Activations:
    kept: dict[str, int] = {}
    waiting, last = 0, ""
    for segment in profile.forward:
        path = segment.label[1]
        waiting += segment.kept
        if path != OUTSIDE:
            kept[path], waiting, last = kept.get(path, 0) + waiting, 0, path
    if last:
        kept[last] += waiting
    # What a segment needs for a moment, above what it leaves (forward) or has freed (backward).
    passing = [segment.peak - max(0, segment.kept) for segment in (*profile.forward, *profile.backward)]
    return Activations(kept, max(0, *passing))
