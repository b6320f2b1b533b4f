"""The user's loop over micro-batches: what it hands out, wrappers around it, and every way of using it wrongly."""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from oslo_engine.errors import BatchError, OsloError, PipelineError
from oslo_engine.pipeline.loop import PipelineLoop
from oslo_engine.pipeline.orders import SCHEDULES
from toy_pipeline import Toy, ToyPipeline, assert_equal_gradients, batch_of, reference, toy, toy_pipeline

BATCH = batch_of(8, 4)  # four micro-batches, the last one without labels


def assert_next_batch_is_right(pipe: ToyPipeline, whole: Toy) -> None:
    for interface in ("loop_step", "train_step"):
        batch = batch_of(12, 3, seed=5)
        loss = getattr(pipe, interface)(batch)
        expected_loss, expected = reference(whole, batch)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-9, atol=0)
        assert_equal_gradients(pipe.gradients(), expected)


# What the loop hands out


def look_at_micro_batches(schedule: str) -> None:
    pipe = toy_pipeline(schedule)
    whole = toy(pipe.program.num_stages)
    num_labels = (BATCH["labels"] != -100).sum().item()
    for index, micro in enumerate(pipe(**BATCH)):
        rows = {name: tensor[2 * index : 2 * index + 2] for name, tensor in BATCH.items()}
        expected = whole(**rows)
        share = (rows["labels"] != -100).sum().item() / num_labels
        assert micro.index == index
        assert micro.loss.requires_grad
        torch.testing.assert_close(micro.loss.detach(), torch.nan_to_num(expected.loss.detach()) * share, rtol=1e-9, atol=0)
        assert (micro.outputs is not None) == pipe.runtime.has_last_stage
        if micro.outputs is not None:
            torch.testing.assert_close(micro.outputs.logits, expected.logits.detach(), rtol=1e-9, atol=1e-12)
            assert not micro.outputs.logits.requires_grad
        assert all(parameter.grad is None for parameter in pipe.parameters())  # until the last one
        micro.loss.backward()
    assert index == 3
    assert share == 0, "the last micro-batch has no label"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_micro_batch_has_its_real_weighted_loss_before_its_backward(rank_pool, schedule: str) -> None:
    rank_pool(2).run(look_at_micro_batches, schedule)


def scale_losses(schedule: str) -> None:
    pipe = toy_pipeline(schedule)
    whole = toy(pipe.program.num_stages)
    batch = batch_of(12, 4)
    micros = pipe.split(batch)
    scaled = sum(whole(**micro.kwargs).loss * micro.weight * (micro.index + 2) for micro in micros if micro.weight)
    expected = dict(zip(dict(whole.named_parameters()), torch.autograd.grad(scaled, list(whole.parameters())), strict=True))
    for micro in pipe(**batch):
        (micro.loss * (micro.index + 2)).backward()  # each has its own
    assert_equal_gradients(pipe.gradients(), expected)

    _, expected = reference(whole, BATCH)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.0)
    for micro in pipe(**BATCH):
        scaler.scale(micro.loss).backward()
    scaler.unscale_(optimizer)
    assert_equal_gradients(pipe.gradients(), expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_scaled_losses_scale_the_gradients(rank_pool, schedule: str) -> None:
    rank_pool(2).run(scale_losses, schedule)


def capture_autocast(schedule: str) -> None:
    """Under autocast at the call, not at the loop; and the other way round."""
    pipe = toy_pipeline(schedule, dtype=torch.float32)
    whole = toy(pipe.program.num_stages, dtype=torch.float32)
    for at_call, at_loop in ((True, False), (False, True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=at_call):
            loop = pipe(**BATCH)
        whole.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=at_loop):
            for micro in loop:
                micro.loss.backward()
        for micro in pipe.split(BATCH):
            with torch.autocast("cpu", torch.bfloat16, enabled=at_call):
                loss = whole(**micro.kwargs).loss
            (loss * micro.weight if micro.weight else loss.nan_to_num() * 0).backward()
        for name, gradient in pipe.gradients().items():
            expected = dict(whole.named_parameters())[name].grad
            # Sums in another order; with bfloat16 a wrong setting differs in the third digit.
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6, msg=f"{name} is wrong, autocast {at_call}")


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_autocast_is_that_of_the_call(rank_pool, schedule: str) -> None:
    rank_pool(2).run(capture_autocast, schedule)


def rebuild_the_output() -> None:
    """As DDP (pytree) and Accelerate (mapping) do with a model's output."""
    pipe, whole = toy_pipeline("1f1b"), toy(2)
    for rebuild in (
        partial(pytree.tree_map_only, Tensor, torch.clone),
        lambda loop: type(loop)({name: value * 1 if isinstance(value, Tensor) else value for name, value in loop.items()}),
    ):
        loop = pipe(**BATCH)
        assert [leaf.requires_grad for leaf in pytree.tree_leaves(loop)] == [True], "the anchor is its one leaf"
        rebuilt = rebuild(loop)
        assert isinstance(rebuilt, PipelineLoop)
        assert len(rebuilt) == 4
        for micro in rebuilt:
            micro.loss.backward()
        assert_equal_gradients(pipe.gradients(), reference(whole, BATCH)[1])


def test_wrappers_may_rebuild_the_output_around_its_one_tensor(rank_pool) -> None:
    rank_pool(2).run(rebuild_the_output)


def release_memory() -> None:
    pipe = toy_pipeline("zero-bubble")
    gc.collect()
    gc.disable()
    try:
        batch = {name: tensor.clone() for name, tensor in BATCH.items()}
        refs = [weakref.ref(tensor) for tensor in batch.values()]
        seen = []
        run = pipe.program.run

        def watched(*args: Any) -> Any:
            result = run(*args)
            seen.extend(weakref.ref(value) for value in (result if isinstance(result, tuple) else [result.logits]))
            return result

        pipe.program.run = watched  # type: ignore[method-assign]
        for micro in pipe(**batch):
            micro.loss.backward()
        del micro, batch
        pipe.train_step({name: tensor.clone() for name, tensor in BATCH.items()})
        assert len(seen) > 20
        assert all(ref() is None for ref in refs + seen)
    finally:
        gc.enable()


def test_batch_and_activations_are_freed_without_the_garbage_collector(rank_pool) -> None:
    rank_pool(2).run(release_memory)


def abandon_before_it_starts() -> None:
    """A forward whose output is not used costs nothing and disturbs nothing."""
    pipe, whole = toy_pipeline("1f1b"), toy(2)
    pipe(**BATCH)
    iter(pipe(**BATCH))
    assert_next_batch_is_right(pipe, whole)


def test_loop_that_is_never_entered_disturbs_nothing(rank_pool) -> None:
    rank_pool(2).run(abandon_before_it_starts)


# Data parallelism


def train_data_parallel(ddp_settings: dict[str, Any]) -> None:
    pp, rank = 2, dist.get_rank()
    pipe = toy_pipeline("1f1b", pp=pp)
    groups = [dist.new_group([stage, stage + pp]) for stage in range(pp)]
    wrapped = DistributedDataParallel(pipe, process_group=groups[rank % pp], **ddp_settings)
    hooks: Counter[int] = Counter()
    for index, parameter in enumerate(pipe.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: hooks.update([index]))
    whole = toy(pp)
    batches = [batch_of(rows, 4, seed=rows) for rows in (8, 11)]  # by dp rank: other numbers of micro-batches too
    expected = [reference(whole, batch)[1] for batch in batches]
    for step in range(1, 4):
        for micro in wrapped(**batches[rank // pp]):
            micro.loss.backward()
        mean = {name: (gradient + expected[1][name]) / 2 for name, gradient in expected[0].items()}
        assert_equal_gradients(pipe.gradients(), mean)
        assert set(hooks.values()) == {step}, "every hook fires once a batch"


def leave_data_parallel() -> None:
    """Both copies of the model leave their loops; the reducer must not be left half done."""
    pp, rank = 2, dist.get_rank()
    pipe, whole = toy_pipeline("1f1b", pp=pp), toy(pp)
    groups = [dist.new_group([stage, stage + pp]) for stage in range(pp)]
    wrapped = DistributedDataParallel(pipe, process_group=groups[rank % pp])
    expected = reference(whole, BATCH)[1]

    def leave() -> None:
        for micro in wrapped(**BATCH):
            micro.loss.backward()
            if micro.index == 1:
                break

    for _ in range(2):
        with pytest.warns(UserWarning, match="left after 2 of 4"):
            leave()
        with torch.no_grad():
            wrapped(**BATCH)
        for micro in wrapped(**BATCH):
            micro.loss.backward()
        assert_equal_gradients(pipe.gradients(), expected)


def test_leaving_the_loop_under_data_parallelism_leaves_the_next_batch_right(rank_pool) -> None:
    rank_pool(4).run(leave_data_parallel)


@pytest.mark.parametrize(
    "ddp_settings", [{}, {"static_graph": True}, {"find_unused_parameters": True}, {"bucket_cap_mb": 0.0001}], ids=str
)
def test_gradients_are_averaged_over_data_parallel_ranks_once_a_batch(rank_pool, ddp_settings: dict[str, Any]) -> None:
    rank_pool(4).run(train_data_parallel, ddp_settings)


# Misuse. Every case runs on all ranks; each must end in the same error, and the next batch must be right.


def forget_a_backward(pipe: ToyPipeline) -> None:
    for micro in pipe(**BATCH):
        if micro.index != 1:
            micro.loss.backward()


def forget_the_last_backward(pipe: ToyPipeline) -> None:
    for micro in pipe(**BATCH):
        if micro.index != 3:
            micro.loss.backward()


def collect_all_first(pipe: ToyPipeline) -> None:
    for micro in list(pipe(**BATCH)):
        micro.loss.backward()


def double_a_backward(pipe: ToyPipeline) -> None:
    for micro in pipe(**BATCH):
        micro.loss.backward(retain_graph=True)
        if micro.index == 2:
            micro.loss.backward()


def double_the_last_backward(pipe: ToyPipeline) -> None:
    for micro in pipe(**BATCH):
        micro.loss.backward()
    micro.loss.backward()


def backward_of_an_earlier_micro_batch(pipe: ToyPipeline) -> None:
    earlier = None
    for micro in pipe(**BATCH):
        (earlier or micro).loss.backward()
        earlier = earlier or micro


def backward_of_another_loop(pipe: ToyPipeline) -> None:
    for old in pipe(**BATCH):
        old.loss.backward()
    pipe.gradients()
    for micro in pipe(**BATCH):
        (old if micro.index == 1 else micro).loss.backward()


def evaluate_inside(pipe: ToyPipeline) -> None:
    for micro in pipe(**BATCH):
        micro.loss.backward()
        with torch.no_grad():
            pipe(**BATCH)


def call_again_inside(pipe: ToyPipeline) -> None:
    for micro in pipe(**BATCH):
        pipe(**BATCH)
        micro.loss.backward()


def train_step_inside(pipe: ToyPipeline) -> None:
    for micro in pipe(**BATCH):
        micro.loss.backward()
        pipe.train_step(BATCH)


def iterate_twice(pipe: ToyPipeline) -> None:
    loop = pipe(**BATCH)
    for micro in loop:
        micro.loss.backward()
    pipe.gradients()
    for micro in loop:
        micro.loss.backward()


def iterate_twice_at_once(pipe: ToyPipeline) -> None:
    loop = pipe(**BATCH)
    for first, _ in zip(loop, loop, strict=True):
        first.loss.backward()


def keep_the_iterator_and_call_again(pipe: ToyPipeline) -> None:
    iterator = iter(pipe(**BATCH))
    next(iterator).loss.backward()
    pipe(**BATCH)


def go_on_after_an_error_was_swallowed(pipe: ToyPipeline) -> None:
    for micro in pipe(**BATCH):
        if micro.index == 3:
            with pytest.raises(PipelineError), torch.no_grad():
                pipe(**BATCH)
        else:
            micro.loss.backward()


def backward_after_leaving(pipe: ToyPipeline) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the micro-batch loop was left")
        micro = next(iter(pipe(**BATCH)))
    micro.loss.backward()


def too_few_micro_batches(pipe: ToyPipeline) -> None:
    pipe(**{name: tensor[:2] for name, tensor in BATCH.items()})


def rows_that_differ(pipe: ToyPipeline) -> None:
    pipe(input_ids=BATCH["input_ids"], labels=BATCH["labels"][1:])


def ask_for_one_loss(pipe: ToyPipeline) -> None:
    pipe(**BATCH).loss.backward()


def ask_for_one_loss_by_key(pipe: ToyPipeline) -> None:
    pipe(**BATCH)["loss"].backward()


MISUSES: dict[Callable[[ToyPipeline], None], str] = {
    forget_a_backward: "micro-batch 1 was left without a backward",
    forget_the_last_backward: "micro-batch 3 was left without a backward",
    collect_all_first: "micro-batch 0 was left without a backward",
    double_a_backward: "backward of micro-batch 2 was called twice",
    double_the_last_backward: "backward of micro-batch 3 was called twice",
    backward_of_an_earlier_micro_batch: "backward of micro-batch 0 was called twice",
    backward_of_another_loop: "backward of micro-batch 3 was called twice",
    evaluate_inside: "the model was called while a micro-batch loop is open",
    call_again_inside: "the model was called while a micro-batch loop is open",
    train_step_inside: "the model was called while a micro-batch loop is open",
    iterate_twice: "a pipeline batch was iterated twice",
    iterate_twice_at_once: "a pipeline batch was iterated twice",
    keep_the_iterator_and_call_again: "the model was called while a micro-batch loop is open",
    go_on_after_an_error_was_swallowed: "the micro-batch loop goes on after its batch was left",
    backward_after_leaving: "backward of micro-batch 0 after its batch was left",
    too_few_micro_batches: "at least as many micro-batches as there are pipeline stages",
    rows_that_differ: "the tensors of a batch have different numbers of rows",
    ask_for_one_loss: "under pipeline parallelism a training forward returns micro-batches",
    ask_for_one_loss_by_key: "under pipeline parallelism a training forward returns micro-batches",
}


def misuse(schedule: str) -> dict[str, str]:
    pipe = toy_pipeline(schedule)
    whole = toy(pipe.program.num_stages)
    messages = {}
    for case, expected in MISUSES.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the micro-batch loop was left")  # where the error comes out of the user's body
            with pytest.raises(OsloError, match=expected) as caught:
                case(pipe)
        assert isinstance(caught.value, PipelineError | BatchError)
        assert caught.value.hint
        messages[case.__name__] = str(caught.value)
        finished = case in (double_the_last_backward,)
        assert all((gradient is None) != finished for gradient in pipe.gradients().values()), case.__name__
        assert_next_batch_is_right(pipe, whole)
    return messages


@pytest.mark.parametrize(("schedule", "pp"), [*((schedule, 2) for schedule in SCHEDULES), ("1f1b", 4)])
def test_every_misuse_is_one_error_on_all_ranks_and_the_next_batch_is_right(rank_pool, schedule: str, pp: int) -> None:
    first, *others = rank_pool(pp).run(misuse, schedule)
    assert len(first) == len(MISUSES)
    assert all(messages == first for messages in others)


def leave_early(schedule: str, at: int, after_backward: bool, how: str) -> None:
    pipe = toy_pipeline(schedule)
    whole = toy(pipe.program.num_stages)

    def loop() -> None:
        for micro in pipe(**BATCH):
            if after_backward or micro.index != at:
                micro.loss.backward()
            if micro.index == at:
                if how == "break":
                    break
                raise KeyError("in the user's body")

    done = at + 1 if after_backward else at
    raises = pytest.raises(KeyError, match="in the user's body") if how == "exception" else nullcontext()
    with pytest.warns(UserWarning, match=rf"left after {done} of 4 backwards") as caught, raises:
        loop()
    assert [warning.filename for warning in caught] == [__file__], "the warning points to the user's loop"
    assert all(gradient is None for gradient in pipe.gradients().values())
    assert_next_batch_is_right(pipe, whole)


@pytest.mark.parametrize("how", ["break", "exception"])
@pytest.mark.parametrize(("at", "after_backward"), [(0, False), (0, True), (2, True), (3, False)])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble-v"])
def test_leaving_the_loop_warns_discards_the_batch_and_the_next_is_right(
    rank_pool, schedule: str, at: int, after_backward: bool, how: str
) -> None:
    rank_pool(2).run(leave_early, schedule, at, after_backward, how)


def break_after_the_last_backward() -> None:
    pipe, whole = toy_pipeline("1f1b"), toy(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for micro in pipe(**BATCH):
            micro.loss.backward()
            if micro.index == 3:
                break
    assert_equal_gradients(pipe.gradients(), reference(whole, BATCH)[1])
    assert_next_batch_is_right(pipe, whole)


def test_leaving_the_loop_after_the_last_backward_is_fine(rank_pool) -> None:
    rank_pool(2).run(break_after_the_last_backward)


# One rank alone


def leave_on_one_rank(schedule: str, alone: int, how: str) -> str:
    """The others go on, and learn of it at the end of the batch."""
    pipe = toy_pipeline(schedule)
    whole = toy(pipe.program.num_stages)

    def loop() -> None:
        for micro in pipe(**BATCH):
            if dist.get_rank() == alone and micro.index == 1:
                if how == "exception":
                    raise KeyError("only here")
                if how == "break":
                    break
                continue  # without a backward
            micro.loss.backward()

    start_s = time.monotonic()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the micro-batch loop was left")
        if how == "break" and dist.get_rank() == alone:
            loop()  # raises nothing
            message = ""
        else:
            with pytest.raises((PipelineError, KeyError)) as caught:
                loop()
            message = str(caught.value)
    assert time.monotonic() - start_s < 10
    assert all(gradient is None for gradient in pipe.gradients().values())
    assert_next_batch_is_right(pipe, whole)
    return message


@pytest.mark.parametrize("how", ["exception", "break", "no backward"])
@pytest.mark.parametrize(("schedule", "pp", "alone"), [("1f1b", 4, 0), ("1f1b", 4, 2), ("1f1b", 4, 3), ("zero-bubble-v", 2, 1)])
def test_rank_that_leaves_alone_fails_the_batch_on_all_and_the_next_is_right(
    rank_pool, schedule: str, pp: int, alone: int, how: str
) -> None:
    messages = rank_pool(pp).run(leave_on_one_rank, schedule, alone, how)
    for rank, message in enumerate(messages):
        if rank != alone:
            assert "another rank of the pipeline stopped in the middle of this batch" in message
            assert f"pp rank {alone}" in message
            assert "left" in message


def differ_in_the_batch(interface: str, lengths: tuple[int, int]) -> str:
    """What a sampler does that shares data among all ranks instead of the data-parallel ones."""
    pipe, whole = toy_pipeline("1f1b"), toy(2)
    rank = dist.get_rank()
    with pytest.raises((BatchError, ValueError, RuntimeError)) as caught:
        getattr(pipe, interface)(batch_of(8, lengths[rank], seed=rank))
    assert all(gradient is None for gradient in pipe.gradients().values())
    assert_next_batch_is_right(pipe, whole)
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


@pytest.mark.parametrize("lengths", [(4, 4), (4, 5)], ids=str)
@pytest.mark.parametrize("interface", ["train_step", "loop_step"])
def test_different_batches_on_the_ranks_of_a_pipeline_are_noticed(rank_pool, interface: str, lengths: tuple[int, int]) -> None:
    first, second = rank_pool(2).run(differ_in_the_batch, interface, lengths)
    assert "the ranks of a pipeline were given different batches" in first
    assert "get_data_parallel_rank" in first
    assert "given different batches" in second


def differ_in_the_number_of_micro_batches() -> str:
    pipe = toy_pipeline("1f1b", timeout_s=2)
    with pytest.raises(PipelineError) as caught:
        pipe.loop_step(batch_of(8 if dist.get_rank() == 0 else 6, 4))
    return str(caught.value)


def test_different_numbers_of_micro_batches_are_noticed_at_the_first_message(rank_pool) -> None:
    first, second = rank_pool(2).run(differ_in_the_number_of_micro_batches)
    assert "not in the same batch" in second
    assert "does not answer" in first


def differ_in_the_number_of_batches() -> str:
    """Rank 1 leaves out a batch: what it runs then is not what the other waits for."""
    pipe = toy_pipeline("1f1b", timeout_s=3)
    if dist.get_rank() == 1:
        pipe.runtime._num_batches += 1
    with pytest.raises(PipelineError) as caught:
        pipe.train_step(BATCH)
    return str(caught.value)


def test_ranks_in_different_batches_notice(rank_pool) -> None:
    messages = rank_pool(2).run(differ_in_the_number_of_batches)
    assert any("not in the same batch" in message for message in messages)
