"""Every committed policy, matched with a tiny model of every architecture that it serves."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from oslo_engine.errors import UnsupportedError
from oslo_engine.plan.names import names_part
from oslo_engine.plan.plan import Plan
from oslo_engine.policy.registry import policies_by_model_type
from oslo_engine.tiny.architectures import architectures, tasks_of
from oslo_engine.tiny.sizes import Sizes
from oslo_engine.tiny.subject import find_subject
from oslo_engine.verify.planned import plan_of

# One task for each model type: the others differ in the head.
SERVED = sorted((kind, tasks_of(kind)[0]) for kind in policies_by_model_type() if tasks_of(kind))
# How Transformers says what we say by the dimension of a weight [out, in]. What it cuts only to gather it again (linear
# attention) is cut here so that it need not be, in either dimension.
DIMS = {"colwise": (0,), "packed_colwise": (0,), "rowwise": (1,), "packed_rowwise": (1,), "colwise_gather_output": (0, 1)}


@cache
def small(kind: str, task: str) -> Any:
    return find_subject(kind, task).shrunk(Sizes(), num_blocks=4)


@cache
def planned(kind: str, task: str) -> Plan:
    try:
        return plan_of(small(kind, task), policies_by_model_type()[kind], tp=2, pp=1)
    except UnsupportedError as error:
        if isinstance(error.__cause__, ImportError):
            pytest.skip(f"needs a package: {error.__cause__}")
        raise


@pytest.mark.parametrize(("kind", "task"), SERVED)
def test_every_policy_fits_what_it_serves(kind: str, task: str) -> None:
    plan = planned(kind, task)
    cut = [tensor for tensor in plan.parameters if tensor.shard is not None]
    assert cut or plan.replicated, "the policy says nothing"
    for tensor in cut:
        held = [span for spans in tensor.shard.spans for span in spans]
        assert {at for start, stop in held for at in range(start, stop)} == set(range(tensor.shard.size)), tensor.name
    assert all(reason for _, reason in plan.replicated)


@pytest.mark.parametrize(("kind", "task"), SERVED)
def test_what_transformers_would_cut_and_we_hold_whole_has_a_reason(kind: str, task: str) -> None:
    plan, subject = planned(kind, task), small(kind, task)
    config = subject.config.get_text_config()
    rules = {**(getattr(config, "base_model_tp_plan", None) or {}), **(getattr(subject.load_class(), "_tp_plan", None) or {})}
    reasons = dict(plan.replicated)
    for pattern, style in rules.items():
        for tensor in plan.parameters:
            path, _, leaf = tensor.name.rpartition(".")
            if style not in DIMS or leaf != "weight" or len(tensor.shape) != 2 or not names_part(pattern, path):
                continue
            if tensor.shard is None:
                assert reasons.get(tensor.name), f"{tensor.name}: {style} there, whole here"
            else:
                assert tensor.shard.dim in DIMS[style], f"{tensor.name}: {style} there, dimension {tensor.shard.dim} here"


def test_nearly_all_architectures_are_served() -> None:
    kinds = {kind for _, kind in architectures()}
    assert len(kinds & set(policies_by_model_type())) >= 0.95 * len(kinds)
