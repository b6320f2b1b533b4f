"""Going through the layouts of a cluster, and looking for the smallest cluster that suffices."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from oslo_engine.errors import OsloError
from oslo_engine.planning.candidates import Candidate, candidates
from oslo_engine.planning.estimate import Estimate, estimate
from oslo_engine.planning.model_plans import ModelPlans
from oslo_engine.planning.question import Question

_MOST_GPUS = 1 << 16


def search(plans: ModelPlans, question: Question) -> tuple[list[Estimate], list[Estimate], dict[str, int]]:
    """(layouts that fit, fastest first; those that do not, by what they lack; why others could not be planned)."""
    fitting: list[Estimate] = []
    others: list[Estimate] = []
    refused: Counter[str] = Counter()
    for candidate in _candidates(plans, question):
        try:
            found = estimate(plans, question, candidate)
        except OsloError as error:
            refused[error.what] += 1
            continue
        (fitting if found.memory <= question.cluster.memory else others).append(found)
    fitting.sort(key=lambda found: found.seconds)
    others.sort(key=lambda found: found.memory)
    return fitting, others, dict(refused)


def least_gpus(plans: ModelPlans, question: Question) -> tuple[int, Estimate] | None:
    """The smallest number of GPUs on which one copy fits, one row at a time, and how; ZeRO's help from more copies left out.

    Batches are taken as large as the pipeline needs.
    """
    for gpus in _sizes(question.cluster.node_size):
        asked = replace(question, cluster=replace(question.cluster, gpus=gpus), batch=gpus)
        found = [each for each in _one_copy(plans, asked) if each.memory <= question.cluster.memory]
        if found:
            return gpus, min(found, key=lambda each: each.seconds)
        if gpus > plans.num_blocks * question.cluster.node_size:
            return None
    return None


def _one_copy(plans: ModelPlans, question: Question) -> list[Estimate]:
    found = []
    for candidate in _candidates(plans, question):
        if candidate.dp == 1 and candidate.rows == 1:
            try:
                found.append(estimate(plans, question, candidate))
            except OsloError:
                continue
    return found


def _candidates(plans: ModelPlans, question: Question) -> list[Candidate]:
    allowed = plans.policy is not None and plans.policy.sequence_parallel
    return list(candidates(question, plans.num_blocks, sequence_parallel=allowed))


def _sizes(node_size: int) -> list[int]:
    """1, 2, 3, ... within a node, then whole nodes."""
    within = list(range(1, node_size + 1))
    return within + [nodes * node_size for nodes in range(2, _MOST_GPUS // node_size + 1)]
