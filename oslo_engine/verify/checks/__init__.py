"""The checks, in the order in which they run."""

from __future__ import annotations

from oslo_engine.verify.checks.check import Check
from oslo_engine.verify.checks.checkpoints import checkpoint_check
from oslo_engine.verify.checks.dropout import dropout_check
from oslo_engine.verify.checks.evaluation import evaluation_check, placement_check
from oslo_engine.verify.checks.generation import generation_check
from oslo_engine.verify.checks.training import optimizer_check, training_check
from oslo_engine.verify.trial import Trial


def checks_of(trial: Trial) -> list[Check]:
    return [
        placement_check(trial),
        evaluation_check(trial),
        training_check(trial),
        optimizer_check(trial),
        dropout_check(trial),
        generation_check(trial),
        checkpoint_check(trial),
    ]
