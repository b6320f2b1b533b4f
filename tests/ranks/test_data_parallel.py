"""Copies of a split model train as one model on the whole batch: DistributedDataParallel and FSDP2 on the dp axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import oslo_engine as oslo
from oslo_engine.errors import PipelineError, UnsupportedError
from oslo_engine.rewrite.state import parallel_state
from training_runs import Recipe, batches, differences, train_rank, train_unsplit, unsplit

RUNS = [
    Recipe(tp=2, dp=2, wrapper="ddp", accumulation=2),
    Recipe(pp=2, dp=2, wrapper="ddp", accumulation=2),
    Recipe("qwen3", tp=2, dp=2, wrapper="fsdp2", accumulation=2),  # q and k norms: gradients summed over tp
    Recipe(pp=2, dp=2, wrapper="fsdp2", accumulation=2),
]
SLOW_RUNS = [
    Recipe("t5", pp=2, dp=2, wrapper="ddp", schedule="gpipe"),
    Recipe("t5", pp=2, dp=2, wrapper="fsdp2"),
    Recipe("llama", tp=2, dp=2, wrapper="fsdp2", checkpointing=True),
    Recipe("llama", pp=2, dp=2, wrapper="fsdp2", schedule="interleaved", checkpointing=True),
    Recipe("llama", tp=2, pp=2, dp=2, wrapper="ddp", sequence_parallel=True),
    Recipe("t5", tp=2, pp=2, dp=2, wrapper="fsdp2"),
]


@pytest.mark.parametrize("recipe", [*RUNS, *(pytest.param(run, marks=pytest.mark.slow) for run in SLOW_RUNS)], ids=str)
def test_losses_norms_and_weights_are_those_of_one_process(rank_pool: Any, recipe: Recipe) -> None:
    found = differences(recipe, train_unsplit(recipe), rank_pool(recipe.ranks).run(train_rank, recipe, timeout_s=200))
    assert found["loss"] < 1e-5
    assert found["norm"] < 1e-5
    assert found["weight"] < 1e-5


def reductions(tp: int, pp: int) -> tuple[list[int], int]:
    """Gradients that DDP has reduced in each of two steps of two micro-batches or more, and how many there are."""
    model, _ = unsplit(Recipe())
    oslo.parallelize(model, tp=tp, pp=pp)
    wrapped = DistributedDataParallel(model.gpu_modules(), process_group=model.mpu.get_data_parallel_group())
    reduced: list[int] = []

    def note(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations, and does not know texts
        reduced[-1] += len(bucket.gradients())
        work = dist.all_reduce(bucket.buffer(), group=model.mpu.get_data_parallel_group(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    wrapped.register_comm_hook(None, note)
    for step in range(2):
        reduced.append(0)
        (batch,) = batches(Recipe(rows=4), step)
        for micro in wrapped(**batch) if pp > 1 else [wrapped(**batch)]:
            micro.loss.backward()
    return reduced, len(list(model.parameters()))


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_gradients_are_reduced_once_a_step_and_not_for_every_micro_batch(rank_pool: Any, tp: int, pp: int) -> None:
    for reduced, parameters in rank_pool(4).run(reductions, tp, pp):
        assert reduced == [parameters, parameters]


def uneven() -> list[float]:
    """Two copies; the second has one batch less, and in ``join`` it stands in for the rest."""
    model, _ = unsplit(Recipe())
    oslo.parallelize(model, tp=2)
    wrapped = DistributedDataParallel(model.gpu_modules(), process_group=model.mpu.get_data_parallel_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copy, losses = model.mpu.get_data_parallel_rank(), []
    with Join([wrapped], divide_by_initial_world_size=False):
        for step in range(3 - copy):
            (batch,) = batches(Recipe(rows=4), 2 * step + copy)
            loss = wrapped(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    (probe,) = batches(Recipe(rows=4), 9)
    with torch.no_grad():
        return [*losses, model(**probe).loss.item()]


def test_copies_with_uneven_numbers_of_batches_join(rank_pool: Any) -> None:
    model, _ = unsplit(Recipe())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted: list[list[float]] = [[], []]
    for step in range(3):
        both = [batches(Recipe(rows=4), 2 * step + copy)[0] for copy in range(1 if step == 2 else 2)]
        losses = [model(**batch).loss for batch in both]
        (sum(losses) / len(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for copy, loss in enumerate(losses):
            wanted[copy].append(loss.item())
    probe = model(**batches(Recipe(rows=4), 9)[0]).loss.item()
    for rank, losses in enumerate(rank_pool(4).run(uneven)):
        assert losses == pytest.approx([*wanted[rank // 2], probe], rel=1e-5)


def refusals_of_fsdp() -> list[str]:
    from torch.distributed.fsdp import fully_shard

    (batch,), found = batches(Recipe(rows=4), 0), []
    zero_bubble, _ = unsplit(Recipe())
    oslo.parallelize(zero_bubble, pp=2, schedule="zero-bubble")
    fully_shard(zero_bubble, mesh=parallel_state(zero_bubble).mesh.device_mesh["dp"])
    with pytest.raises(UnsupportedError) as refused:
        zero_bubble(**batch)
    found.append(str(refused.value))
    model, _ = unsplit(Recipe())
    oslo.parallelize(model, pp=2)
    fully_shard(model, mesh=parallel_state(model).mesh.device_mesh["dp"])
    for micro in model(**batch):
        micro.loss.backward()
        break
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(PipelineError) as failed:
        model(**batch)
    return [*found, str(failed.value)]


@pytest.mark.filterwarnings("ignore:the micro-batch loop was left")
def test_what_fsdp_cannot_do_in_a_pipeline_is_refused(rank_pool: Any) -> None:
    for zero_bubble, failed in rank_pool(2).run(refusals_of_fsdp):
        assert "zero-bubble" in zero_bubble
        assert "go on from a checkpoint" in failed
