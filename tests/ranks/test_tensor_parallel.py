"""What a tensor-parallel step communicates, exactly, and what stands on each rank."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import oslo_engine as oslo
import small_models
from oslo_engine.comm.counter import CollectiveCounter
from oslo_engine.errors import BatchError, PlanError, TopologyError
from oslo_engine.rewrite.state import parallel_state

ROWS, LENGTH = 2, 16


def build(name: str, *, layers: int | None = None, **options: Any) -> Any:
    cls, config, _ = getattr(small_models, name)()
    if layers is not None:
        config.num_hidden_layers = layers
    torch.manual_seed(0)
    return oslo.parallelize(cls(config), **options)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, small_models.VOCAB, (ROWS, LENGTH))
    return {"input_ids": ids, "labels": ids}


def count_step(layers: int, sequence_parallel: bool) -> dict[str, list[list[int]]]:
    model = build("llama", layers=layers, tp=2, sequence_parallel=sequence_parallel)
    with CollectiveCounter() as count:
        model(**batch(), use_cache=False).loss.backward()
    return count.calls


def test_a_llama_step_makes_four_all_reduces_a_layer_and_three_for_the_loss(rank_pool) -> None:
    layers = 12
    for calls in rank_pool(2).run(count_step, layers, False):
        assert list(calls) == ["allreduce"]
        number, sent_bytes = calls["allreduce"]
        hidden = ROWS * LENGTH * small_models.HIDDEN * 4
        positions = ROWS * LENGTH * 4
        # 2 forward and 2 backward a layer, the embedding's output, the head's input; the loss: maximum, sum of exponents,
        # target. And one in which the ranks compare their batches, by three numbers each.
        assert number == 4 * layers + 2 + 3 + 1
        sent_bytes -= 2 * 3 * 8
        assert abs(sent_bytes - (50 * hidden + 3 * positions)) <= 3 * ROWS * 4  # the last position has no target


def test_sequence_parallelism_gathers_and_scatters_instead(rank_pool) -> None:
    layers = 2
    for calls in rank_pool(2).run(count_step, layers, True):
        # Forward: 2 regions a layer enter by a gather, leave by a scatter; backward the reverse; the stack's two ends gather.
        assert calls["allgather"][0] == 4 * layers + 2
        assert calls["reduce_scatter"][0] == 4 * layers
        # Norms see only their rank's tokens: two weights a layer are summed; embedding, head, loss and comparison are as ever.
        assert calls["allreduce"][0] == 2 * layers + 2 + 3 + 1


def evaluate_logits() -> tuple[torch.Size, list[str]]:
    model = build("llama", tp=2).eval()
    with torch.no_grad(), CollectiveCounter() as count:
        logits = model(input_ids=batch()["input_ids"], use_cache=False).logits
    return logits.shape, list(count.calls)


def test_logits_are_whole_without_gradients(rank_pool) -> None:
    for shape, calls in rank_pool(2).run(evaluate_logits):
        assert shape == (ROWS, LENGTH, small_models.VOCAB)
        assert calls == ["allreduce", "allgather"]


def parameter_bytes(name: str, tp: int) -> tuple[int, int]:
    model = build(name, tp=tp)
    plan, at = parallel_state(model).plan, parallel_state(model).mesh.at
    return sum(p.numel() for p in model.parameters()), plan.numel_on(at)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_each_rank_holds_its_slice_and_no_more(rank_pool, name: str) -> None:
    cls, config, _ = getattr(small_models, name)()
    whole = sum(p.numel() for p in cls(config).parameters())
    for held, planned in rank_pool(2).run(parameter_bytes, name, 2):
        assert held == planned
        assert held < 0.62 * whole  # norms, positions and biases of row layers are replicated


def refusals() -> list[str]:
    found = []
    for options, error in (
        ({"tp": 3}, TopologyError),
        ({"tp": 2, "pp": 2}, TopologyError),
        ({"tp": 2, "policy": "nonsense"}, oslo.PolicyError),
        ({"tp": 2, "micro_batch_size": 0}, BatchError),
        ({"pp": 2, "schedule": "fastest"}, PlanError),
    ):
        try:
            build("gpt2", **options)
        except error as caught:
            found.append(str(caught))
    model = build("gpt2", tp=2)
    for call in (
        lambda: oslo.parallelize(model, tp=2),
        lambda: model.save_pretrained("anywhere"),
        lambda: model.resize_token_embeddings(7),
    ):
        try:
            call()
        except oslo.OsloError as caught:
            found.append(str(caught))
    dist.barrier()
    return found


def test_bad_input_raises_the_same_on_every_rank(rank_pool) -> None:
    first, second = rank_pool(2).run(refusals)
    assert first == second
    assert len(first) == 8
    assert "tp=3, pp=1, world size=2" in first[0]
    assert "no such policy" in first[2]
    assert "parallelized already" in first[5]
    assert "save_with_merging=True" in first[6]
    assert "resize_token_embeddings=N" in first[7]


def odd_length() -> str:
    model = build("llama", tp=2, sequence_parallel=True)
    ids = torch.randint(3, small_models.VOCAB, (ROWS, 15))
    with pytest.raises(BatchError) as error:
        model(input_ids=ids, labels=ids)
    return str(error.value)


def test_sequence_parallelism_refuses_a_length_that_does_not_divide(rank_pool) -> None:
    for message in rank_pool(2).run(odd_length):
        assert "a multiple of 2" in message
        assert "15" in message


def threads_of_models() -> list[int]:
    counts = []
    for _ in range(3):
        build("gpt2", tp=2).mpu.get_data_parallel_group()
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


def test_models_of_one_layout_share_their_process_groups(rank_pool) -> None:
    """Every gloo group has a thread that never sleeps for long."""
    for counts in rank_pool(2).run(threads_of_models):
        assert counts[0] == counts[1] == counts[2]
