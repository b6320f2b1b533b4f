"""Activations predicted without data are those of a real step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import small_models
from oslo_engine.errors import UnsupportedError
from oslo_engine.footprint import profile
from oslo_engine.footprint.live_bytes import LiveBytes
from oslo_engine.footprint.profile import StepProfiler
from oslo_engine.footprint.workload import Workload
from oslo_engine.planning.candidates import Candidate
from oslo_engine.planning.estimate import estimate
from oslo_engine.planning.model_plans import ModelPlans
from oslo_engine.planning.question import Cluster, Question
from oslo_engine.policy.registry import find_policy
from oslo_engine.rewrite.planning import plan_model
from oslo_engine.rewrite.skeleton import skeleton
from oslo_engine.tiny.subject import Subject
from oslo_engine.topology import Topology

LENGTH, TARGET, ROWS = 48, 24, 4
TOLERANCE = 0.10


def built(name: str) -> tuple[Any, Any]:
    cls, config, _ = small_models.SMALL[name]()
    if name == "t5":
        config.num_layers, config.num_decoder_layers = 6, 5
    else:
        config.num_hidden_layers = 7
    return cls, config


def predicted_bytes(name: str, *, checkpointing: bool) -> int:
    cls, config = built(name)
    plans = ModelPlans(Subject(cls.__module__, cls.__name__, config), torch.float32)
    question = Question(Cluster(1, 1 << 40), Workload("train", 1, LENGTH, TARGET), ROWS)
    return estimate(plans, question, Candidate(1, 1, 1, rows=ROWS, checkpointing=checkpointing)).fullest.activations


def measured_bytes(name: str, *, checkpointing: bool) -> int:
    """The most bytes that are alive in a step besides weights, gradients and batch."""
    cls, config = built(name)
    model = cls(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids, labels = torch.randint(3, small_models.VOCAB, (ROWS, LENGTH)), torch.randint(3, small_models.VOCAB, (ROWS, TARGET))
    batch = {"input_ids": ids, "labels": labels, "decoder_input_ids": labels.clone()}
    if name != "t5":
        batch = {"input_ids": ids, "labels": ids.clone()}
    model(**batch, use_cache=False).loss.backward()
    live = LiveBytes()
    live.leave_out([*model.parameters(), *(each.grad for each in model.parameters()), *model.buffers(), *batch.values()])
    with live:
        live.begin(("step", ""))
        model(**batch, use_cache=False).loss.backward()
        live.end()
    return live.most


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_predicted_activations_are_within_a_tenth_of_the_measured(name: str, checkpointing: bool) -> None:
    predicted = predicted_bytes(name, checkpointing=checkpointing)
    measured = measured_bytes(name, checkpointing=checkpointing)
    assert abs(predicted - measured) < TOLERANCE * measured


def profiler(name: str) -> StepProfiler:
    model = skeleton(*built(name))
    return StepProfiler(model, plan_model(model, find_policy(None, model.config.model_type), Topology(tp=2)).plan)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_a_step_is_the_same_whatever_was_profiled_before_it(name: str) -> None:
    of_rows = [Workload("train", rows, LENGTH, TARGET) for rows in (1, 2)]
    asked = [*of_rows, replace(of_rows[1], checkpointing=True), Workload("inference", 1, LENGTH, TARGET), *of_rows]
    together = profiler(name)
    for workload in asked:
        assert together.profile(workload) == profiler(name).profile(workload), workload


def test_a_step_that_fails_leaves_the_next_one_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    together, recomputed = profiler("llama"), Workload("train", 1, LENGTH, TARGET, checkpointing=True)
    with monkeypatch.context() as patched:
        patched.setattr(profile, "text_batch", lambda model, workload: {})
        with pytest.raises(UnsupportedError, match="cannot be measured on fake tensors"):
            together.profile(recomputed)
    kept = replace(recomputed, checkpointing=False)
    assert together.profile(kept) == profiler("llama").profile(kept)
