"""What planning predicts is what a real step holds and sends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import small_models
from oslo_engine import parallelize
from oslo_engine.comm.counter import CollectiveCounter
from oslo_engine.footprint.workload import Workload
from oslo_engine.planning.candidates import Candidate
from oslo_engine.planning.estimate import Estimate, estimate
from oslo_engine.planning.model_plans import ModelPlans
from oslo_engine.planning.question import Cluster, Question
from oslo_engine.tiny.subject import Subject
from rank_pool import RankPool

LENGTH, TARGET = 16, 8
LAYOUTS = {
    "gpt2 tp=2": ("gpt2", Candidate(2, 1, 1, rows=2, micro_batches=1)),
    "llama tp=2, sequence parallel": ("llama", Candidate(2, 1, 1, rows=2, micro_batches=1, sequence_parallel=True)),
    "llama pp=2": ("llama", Candidate(1, 2, 1, "1f1b", 2, 3)),
    "gpt2 pp=2 zero-bubble-v": ("gpt2", Candidate(1, 2, 1, "zero-bubble-v", 1, 4)),
    "t5 pp=2": ("t5", Candidate(1, 2, 1, "1f1b", 1, 4)),
    "gpt2 dp=2": ("gpt2", Candidate(1, 1, 2, rows=2, micro_batches=1)),
    "t5 tp=2 pp=2": ("t5", Candidate(2, 2, 1, "1f1b", 1, 4)),
    "gpt2 tp=3, which does not divide its heads": ("gpt2", Candidate(3, 1, 1, rows=1, micro_batches=1)),
    "gpt2 tp=2 dp=2": ("gpt2", Candidate(2, 1, 2, rows=1, micro_batches=1)),
    "t5 pp=2 dp=2": ("t5", Candidate(1, 2, 2, "1f1b", 1, 2)),
    "llama tp=2 pp=2 interleaved": ("llama", Candidate(2, 2, 1, "interleaved", 1, 4)),
}


def predict(name: str, candidate: Candidate, optimizer: str = "adamw") -> Estimate:
    cls, config, _ = small_models.SMALL[name]()
    plans = ModelPlans(Subject(cls.__module__, cls.__name__, config), torch.float32)
    work = Workload("train", 1, LENGTH, TARGET, optimizer)
    question = Question(Cluster(candidate.gpus, 1 << 40), work, candidate.rows * candidate.micro_batches * candidate.dp)
    return estimate(plans, question, candidate)


def batch_of(name: str, rows: int, vocab: int = small_models.VOCAB) -> dict[str, Any]:
    ids = torch.randint(3, vocab, (rows, LENGTH))
    if name != "t5":
        return {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
    labels = torch.randint(3, vocab, (rows, TARGET))
    return {"input_ids": ids, "decoder_input_ids": labels.clone(), "labels": labels, "use_cache": False}


def held_and_sent(name: str, candidate: Candidate) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Of this rank: bytes by kind after some steps, and the collectives of one more step."""
    torch.manual_seed(0)
    cls, config, _ = small_models.SMALL[name]()
    model = parallelize(
        cls(config).train(),
        tp=candidate.tp,
        pp=candidate.pp,
        schedule=candidate.schedule,
        micro_batch_size=candidate.rows,
        sequence_parallel=candidate.sequence_parallel,
    )
    optimizer = torch.optim.AdamW(model.gpu_parameters())
    batch = batch_of(name, candidate.rows * candidate.micro_batches)
    for _ in range(2):  # the optimizer makes its states in the first step
        with CollectiveCounter() as count:
            model.train_step(batch)
        optimizer.step()
    states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    return {
        "weights": _bytes(model.parameters()),
        "buffers": _bytes(model.buffers()),
        "gradients": _bytes(parameter.grad for parameter in model.parameters()),
        "optimizer": _bytes(states),
    }, count.calls


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize(("name", "candidate"), LAYOUTS.values(), ids=list(LAYOUTS))
def test_predicted_bytes_and_messages_are_those_of_a_real_step(
    rank_pool: Callable[[int], RankPool], name: str, candidate: Candidate
) -> None:
    predicted = predict(name, candidate)
    real = rank_pool(candidate.gpus).run(held_and_sent, name, candidate)
    for rank in predicted.ranks:
        held, sent = real[rank.pp_rank * candidate.dp * candidate.tp]  # of the ranks that share a stage the first
        assert dataclasses.asdict(rank.resident) == held
        by_kind: dict[str, list[int]] = {}
        for (_, kind), messages in rank.messages.items():
            calls, size = by_kind.get(kind, [0, 0])
            by_kind[kind] = [calls + messages.calls, size + messages.bytes]
        assert by_kind == sent
