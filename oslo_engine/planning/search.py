"""Going through the layouts of a cluster, and looking for the smallest cluster that suffices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice

from oslo_engine.errors import OsloError
from oslo_engine.planning.candidates import Candidate, candidates
from oslo_engine.planning.estimate import Estimate, estimate, fewest_bytes, resident_bytes
from oslo_engine.planning.model_plans import ModelPlans
from oslo_engine.planning.question import Question

_NEAREST = 5  # layouts that do not fit and are worked out all the same, to say what they lack


def search(plans: ModelPlans, question: Question) -> tuple[list[Estimate], list[Estimate], dict[str, int]]:
    """(layouts that fit, fastest first; the nearest of those that do not; why others could not be planned)."""
    fitting: list[Estimate] = []
    lacking: list[Estimate] = []
    too_large: list[tuple[int, Candidate]] = []
    refused: Counter[str] = Counter()
    failed: dict[Candidate, list[Candidate]] = {}  # by layout, what of it did not fit
    for candidate in _candidates(plans, question):
        try:
            held = fewest_bytes(plans, question, candidate)
            if held <= question.cluster.memory:
                held = resident_bytes(plans, question, candidate)
            if held > question.cluster.memory:
                too_large.append((held, candidate))
                continue
            smaller = failed.setdefault(replace(candidate, rows=1, micro_batches=1, zero=0, checkpointing=False), [])
            if any(_takes_more(candidate, each) for each in smaller):
                continue
            found = estimate(plans, question, candidate)
            if found.memory > question.cluster.memory:
                smaller.append(candidate)
        except OsloError as error:
            refused[error.what] += 1
            continue
        (fitting if found.memory <= question.cluster.memory else lacking).append(found)
    if not fitting and not lacking:
        nearest = sorted(too_large, key=lambda pair: (pair[0], pair[1].rows, not pair[1].checkpointing))
        lacking = list(islice(_possible(plans, question, (candidate for _, candidate in nearest)), _NEAREST))
    fitting.sort(key=lambda found: found.seconds)
    lacking.sort(key=lambda found: found.memory)
    return fitting, lacking[:_NEAREST], dict(refused)


def _takes_more(candidate: Candidate, other: Candidate) -> bool:
    """Whether, of one layout, it takes no less than the other: as many rows, no more divided, no more recomputed."""
    return candidate.rows >= other.rows and candidate.zero <= other.zero and candidate.checkpointing <= other.checkpointing


def _possible(plans: ModelPlans, question: Question, some: Iterable[Candidate]) -> Iterator[Estimate]:
    for candidate in some:
        with suppress(OsloError):
            yield estimate(plans, question, candidate)


def least_gpus(plans: ModelPlans, question: Question) -> tuple[int, Estimate] | None:
    """The smallest number of GPUs on which one copy fits with as few rows as its pipeline takes, and a layout there.

    Above one node, tp fills nodes. More copies could share an optimizer through ZeRO; that is left out.
    """
    whole = plans.lay(1, 1).held(question.workload)[0].resident.total
    for gpus in _sizes(question.cluster.node_size, plans.num_blocks):
        if whole > gpus * question.cluster.memory:  # what every rank holds besides only adds to it
            continue
        asked = replace(question, cluster=replace(question.cluster, gpus=gpus), batch=gpus)
        if question.checkpointing is None:
            asked = replace(asked, checkpointing=True)
        found = [each for each in map(partial(_try, plans, asked), _one_copy(plans, asked)) if each is not None]
        if found:
            return gpus, min(found, key=lambda each: each.seconds)
    return None


def _one_copy(plans: ModelPlans, question: Question) -> Iterator[Candidate]:
    for candidate in _candidates(plans, question):
        fills_nodes = candidate.tp == question.cluster.node_size or question.cluster.gpus <= question.cluster.node_size
        if fills_nodes and (candidate.dp, candidate.rows, candidate.schedule) == (1, 1, "1f1b"):
            yield candidate


def _try(plans: ModelPlans, question: Question, candidate: Candidate) -> Estimate | None:
    """None: it does not fit, or cannot run."""
    try:
        if max(count(plans, question, candidate) for count in (fewest_bytes, resident_bytes)) > question.cluster.memory:
            return None
        found = estimate(plans, question, candidate)
    except OsloError:
        return None
    return found if found.memory <= question.cluster.memory else None


def _candidates(plans: ModelPlans, question: Question) -> Iterator[Candidate]:
    allowed = plans.policy is not None and plans.policy.sequence_parallel
    return candidates(question, plans.num_blocks, sequence_parallel=allowed)


def _sizes(node_size: int, num_blocks: int) -> Iterator[int]:
    """1, 2, 3, ... within a node, then whole nodes."""
    yield from range(1, node_size + 1)
    yield from range(2 * node_size, num_blocks * node_size + 1, node_size)
