"""Messages between pipeline ranks: every dtype and shape, headers, losses, outcomes, and how many sends may wait."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from oslo_engine.comm.p2p import Outcome, PipelineLinks, TensorMeta
from oslo_engine.errors import PipelineError

CPU = torch.device("cpu")
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def link(timeout_s: float = 20) -> PipelineLinks:
    return PipelineLinks.create([list(range(dist.get_world_size()))], timedelta(seconds=timeout_s))


def samples() -> list[torch.Tensor]:
    """Every dtype; scalars, empty, transposed and expanded tensors."""
    values = torch.tensor([[0.0, 1.0, -2.0], [3.5, 0.25, 7.0]])
    return [
        *(values.clone().to(dtype) for dtype in DTYPES),
        torch.tensor(3),
        torch.empty(0, 4),
        values.t(),
        torch.tensor(True).expand(3, 2),
    ]


def exchange() -> None:
    """Rank 0 sends the samples, announced by a header, and rank 1 sends back what it got."""
    links, tensors = link(), samples()
    peer, mark = 1 - dist.get_rank(), (4, 1, 2)
    if dist.get_rank() == 0:
        tensors[0].requires_grad_()
        links.send_header([TensorMeta.of(tensor) for tensor in tensors], mark, peer)
        links.send("forward", tensors, peer)
        returned = links.receive("backward", [TensorMeta.of(tensor) for tensor in tensors], peer, CPU).wait()
        links.wait_for_sends()
        for tensor, back in zip(tensors, returned, strict=True):
            assert back.is_contiguous()
            assert back.dtype == tensor.dtype
            assert torch.equal(back.view(-1).view(torch.uint8), tensor.detach().contiguous().view(-1).view(torch.uint8))
    else:
        metas = links.receive_header(mark, peer)
        assert metas == tuple(TensorMeta(tuple(t.shape), t.dtype, index == 0) for index, t in enumerate(tensors))
        links.send("backward", links.receive("forward", metas, peer, CPU).wait(), peer)
        links.wait_for_sends()


def test_tensors_of_every_dtype_and_layout_arrive_as_they_are(rank_pool) -> None:
    rank_pool(2).run(exchange)


def announce_nothing() -> None:
    links = link()
    if dist.get_rank() == 0:
        links.send_header(None, (1,), 1)
        links.send_header([], (2,), 1)
        links.wait_for_sends()
    else:
        assert links.receive_header((1,), 0) is None
        assert links.receive_header((2,), 0) == ()


def test_header_can_say_that_nothing_comes(rank_pool) -> None:
    rank_pool(2).run(announce_nothing)


def tell_losses() -> list[str]:
    links = link()
    losses = [torch.tensor(0.1, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    found = []
    for index, loss in enumerate([*losses, None, torch.tensor(float("nan"))]):
        if dist.get_rank() == 2:
            links.send_loss(loss, (7, index))
        else:
            found.append(str(links.receive_loss((7, index), 2)))
    links.wait_for_sends()
    return found


def test_losses_reach_all_other_ranks_with_their_dtype(rank_pool) -> None:
    first, second, last = rank_pool(3).run(tell_losses)
    assert first == second
    assert first == [
        "tensor(0.1000)",
        "tensor(0.1000, dtype=torch.float64)",
        "tensor(0.1001, dtype=torch.bfloat16)",
        "None",
        "tensor(nan)",
    ]
    assert last == []


def agree() -> list[Outcome]:
    links, rank = link(), dist.get_rank()
    return [
        links.agree(1, rank, None),
        links.agree(2, -7, "rank 1 is tired" if rank == 1 else None),
        links.agree(3, 0, f"rank {rank} too"),
    ]


def test_all_ranks_learn_of_the_problems_of_each(rank_pool) -> None:
    for outcomes in rank_pool(3).run(agree):
        assert outcomes == [
            Outcome({}, (0, 1, 2)),
            Outcome({1: "rank 1 is tired"}, (-7, -7, -7)),
            Outcome({rank: f"rank {rank} too" for rank in range(3)}, (0, 0, 0)),
        ]


def send_to_a_slow_receiver() -> int:
    """How many sends are unfinished at most."""
    links, most = link(), 0
    for _ in range(40):
        if dist.get_rank() == 0:
            links.send("forward", [torch.ones(1000), torch.ones(10)], 1)
            most = max(most, len(links._pending["forward", 1]))
        else:
            time.sleep(0.002)
            metas = [TensorMeta((1000,), torch.float32, False), TensorMeta((10,), torch.float32, False)]
            links.receive("forward", metas, 0, CPU).wait()
    links.wait_for_sends()
    assert not any(links._pending.values())
    return most


def test_sends_to_a_slow_receiver_do_not_pile_up(rank_pool) -> None:
    most, _ = rank_pool(2).run(send_to_a_slow_receiver)
    assert most == 2 * 2 * 2  # twice as many times two tensors as there are ranks


def expect_another_mark() -> str | None:
    links = link(timeout_s=2)
    if dist.get_rank() == 0:
        links.send_header([], (1, 0, 0), 1)
        links.wait_for_sends()
        return None
    with pytest.raises(PipelineError, match="not in the same batch") as caught:
        links.receive_header((2, 0, 0), 0)
    with pytest.raises(PipelineError, match="not in the same batch"):
        links.receive_header((1, 0, 0), 0)  # nothing can be trusted any more
    return str(caught.value)


def test_message_of_another_batch_is_refused_and_so_is_everything_after_it(rank_pool) -> None:
    _, message = rank_pool(2).run(expect_another_mark)
    assert "(2, 0, 0)" in message
    assert "got: (1, 0, 0)" in message


def several_pipelines() -> tuple[int, int]:
    """Ranks 0 and 2 in one, 1 and 3 in the other."""
    links = PipelineLinks.create([[0, 2], [1, 3]], timedelta(seconds=20))
    if links.axis.rank == 0:
        links.send("forward", [torch.tensor(dist.get_rank())], 1)
        links.wait_for_sends()
        return links.axis.rank, -1
    (value,) = links.receive("forward", [TensorMeta((), torch.int64, False)], 0, CPU).wait()
    return links.axis.rank, int(value)


def test_peers_are_ranks_of_the_own_pipeline(rank_pool) -> None:
    assert rank_pool(4).run(several_pipelines) == [(0, -1), (0, -1), (1, 0), (1, 1)]


def wait_longer_than_the_timeout() -> None:
    links = link(timeout_s=0.5)
    if dist.get_rank() == 0:
        start_s = time.monotonic()
        with pytest.raises(PipelineError, match="does not answer") as caught:
            links.receive("forward", [TensorMeta((1,), torch.float32, False)], 1, CPU).wait()
        assert time.monotonic() - start_s < 5, "the timeout of the default group would be 30 minutes"
        assert "pp rank 0, receiving values from pp rank 1" in str(caught.value)
    dist.barrier()


def test_waiting_ends_at_the_timeout_that_was_given(rank_pool) -> None:
    rank_pool(2).run(wait_longer_than_the_timeout)
