"""Orders of the pipeline schedules: golden lists, and what must hold for every one of them."""

from __future__ import annotations

import json
from collections import Counter, deque
from pathlib import Path

import pytest

from oslo_engine.errors import BatchError, PlanError, UnsupportedError
from oslo_engine.pipeline import orders as orders_module
from oslo_engine.pipeline.orders import (
    SCHEDULES,
    Action,
    ActionKind,
    Orders,
    first_backwards,
    forward_orders,
    next_forward,
    num_stages,
    rank_of_stage,
    schedule_orders,
)

GOLDEN = json.loads((Path(__file__).parent / "golden" / "orders.json").read_text())
SENDS = (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)
RECEIVES = (ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD)
BACKWARDS = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)


def usable_sizes() -> list[tuple[str, int, int]]:
    sizes = []
    for schedule in SCHEDULES:
        for pp in (2, 3, 4):
            for num_micro_batches in range(pp, 9):
                try:
                    schedule_orders(schedule, pp, num_micro_batches)
                except BatchError:
                    continue
                sizes.append((schedule, pp, num_micro_batches))
    return sizes


every_order = pytest.mark.parametrize(("schedule", "pp", "num_micro_batches"), usable_sizes())


def peer_of(action: Action, orders: Orders) -> int:
    """The rank at the other end of a send or a receive."""
    step = {
        ActionKind.SEND_FORWARD: 1,
        ActionKind.RECEIVE_FORWARD: -1,
        ActionKind.SEND_BACKWARD: -1,
        ActionKind.RECEIVE_BACKWARD: 1,
    }
    return orders.rank_of_stage[action.stage + step[action.kind]]


def message_of(action: Action) -> tuple[str, int, int]:
    """The same for a send and its receive: direction, stage that receives, micro-batch."""
    if action.kind in (ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD):
        return "forward", action.stage + (action.kind is ActionKind.SEND_FORWARD), action.micro
    return "backward", action.stage - (action.kind is ActionKind.SEND_BACKWARD), action.micro


def between(orders: Orders, rank: int, peer: int) -> list[tuple[str, tuple[str, int, int]]]:
    """What a rank exchanges with a peer, in its order: ("send" or "receive", message)."""
    return [
        ("send" if action.kind in SENDS else "receive", message_of(action))
        for action in orders.actions[rank]
        if action.kind in SENDS + RECEIVES and peer_of(action, orders) == peer
    ]


def simulate(orders: Orders, *, user_loop: bool) -> None:
    """Run all lists with sends that wait for their receives; raise AssertionError on a deadlock or a missing input.

    With ``user_loop`` a rank waits, before its first backward of a micro-batch, for the loss that the last stage sends.
    """
    waiting = [deque(actions) for actions in orders.actions]
    done: set[tuple[int, ActionKind, int]] = set()
    last = orders.num_stages - 1

    def is_ready(rank: int, action: Action) -> bool:
        if action.kind is ActionKind.FORWARD:
            return action.stage == 0 or arrived(rank, "forward", action.stage, action.micro)
        if action.kind in BACKWARDS:
            if user_loop and (last, ActionKind.FORWARD, action.micro) not in done:
                return False
            own = (action.stage, ActionKind.FORWARD, action.micro) in done
            return own and (action.stage == last or arrived(rank, "backward", action.stage + 1, action.micro))
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            return (action.stage, ActionKind.BACKWARD_INPUT, action.micro) in done
        if action.kind in SENDS:  # meets its receive, which must be the next thing the peer does
            peer = peer_of(action, orders)
            meeting = waiting[peer][0] if waiting[peer] else None
            return meeting is not None and meeting.kind in RECEIVES and message_of(meeting) == message_of(action)
        return False  # receives are taken by their sends

    def arrived(rank: int, direction: str, stage: int, micro: int) -> bool:
        source = stage - 1 if direction == "forward" else stage
        if orders.rank_of_stage[source] == rank:
            kinds = (ActionKind.FORWARD,) if direction == "forward" else BACKWARDS
            return any((source, kind, micro) in done for kind in kinds)
        receive = (stage, ActionKind.RECEIVE_FORWARD) if direction == "forward" else (stage - 1, ActionKind.RECEIVE_BACKWARD)
        return (*receive, micro) in done

    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(waiting):
            while actions and is_ready(rank, actions[0]):
                action = actions.popleft()
                done.add((action.stage, action.kind, action.micro))
                if action.kind in SENDS:
                    received = waiting[peer_of(action, orders)].popleft()
                    done.add((received.stage, received.kind, received.micro))
                progress = True
    assert not any(waiting), f"stuck before {[str(actions[0]) if actions else None for actions in waiting]}"


def test_golden_orders() -> None:
    found = {
        f"{schedule} pp={pp} m={m}": [" ".join(map(str, actions)) for actions in schedule_orders(schedule, pp, m).actions]
        for schedule in SCHEDULES
        for pp, m in ((2, 4), (4, 8))
    }
    assert found == GOLDEN


@every_order
def test_every_stage_and_micro_batch_is_computed_exactly_once(schedule: str, pp: int, num_micro_batches: int) -> None:
    orders = schedule_orders(schedule, pp, num_micro_batches)
    found = Counter(
        (rank, action.stage, action.micro, "B" if action.kind in BACKWARDS else str(action.kind))
        for rank, actions in enumerate(orders.actions)
        for action in actions
        if action.kind not in SENDS + RECEIVES
    )
    kinds = "FBW" if schedule.startswith("zero-bubble") else "FB"
    places = [(rank, stage) for stage, rank in enumerate(orders.rank_of_stage)]
    assert found == Counter((*place, m, kind) for place in places for m in range(num_micro_batches) for kind in kinds)
    assert any(a.kind is ActionKind.BACKWARD_WEIGHT for a in orders.actions[0]) == schedule.startswith("zero-bubble")


@every_order
def test_sends_and_receives_match_in_order_between_every_two_ranks(schedule: str, pp: int, num_micro_batches: int) -> None:
    orders = schedule_orders(schedule, pp, num_micro_batches)
    mirrored = {"send": "receive", "receive": "send"}
    for rank in range(pp):
        for peer in range(pp):
            assert between(orders, rank, peer) == [(mirrored[what], message) for what, message in between(orders, peer, rank)]
        assert not between(orders, rank, rank)
    crossing = sum(a != b for a, b in zip(orders.rank_of_stage, orders.rank_of_stage[1:], strict=False))
    sends = sum(action.kind in SENDS for actions in orders.actions for action in actions)
    assert sends == 2 * crossing * num_micro_batches


@pytest.mark.parametrize("user_loop", [False, True])
@every_order
def test_no_deadlock_even_if_sends_wait_for_their_receives(
    schedule: str, pp: int, num_micro_batches: int, user_loop: bool
) -> None:
    simulate(schedule_orders(schedule, pp, num_micro_batches), user_loop=user_loop)


@every_order
def test_first_backwards_come_in_the_order_of_the_micro_batches(schedule: str, pp: int, num_micro_batches: int) -> None:
    """What the micro-batch loop relies on: nothing is left to run forward after the last one's first backward."""
    for actions in schedule_orders(schedule, pp, num_micro_batches).actions:
        starts = [first_backwards(actions)[micro] for micro in range(num_micro_batches)]
        assert starts == sorted(starts)
        for micro, at in enumerate(starts):
            assert actions[at].micro == micro
            assert actions[at].kind in BACKWARDS
            assert not any(action.kind in BACKWARDS and action.micro == micro for action in actions[:at])
        assert next_forward(actions, starts[-1]) == len(actions)


@every_order
def test_losses_leave_the_last_stage_in_the_order_of_the_micro_batches(schedule: str, pp: int, num_micro_batches: int) -> None:
    orders = schedule_orders(schedule, pp, num_micro_batches)
    last = orders.num_stages - 1
    actions = orders.actions[orders.rank_of_stage[last]]
    assert [a.micro for a in actions if a.stage == last and a.kind is ActionKind.FORWARD] == list(range(num_micro_batches))


def test_1f1b_starts_backward_as_early_as_possible() -> None:
    """The last rank alternates from the start, the first runs pp forwards ahead: not more activations than that are alive."""
    orders = schedule_orders("1f1b", 4, 8)
    compute = [[str(a) for a in actions if a.kind not in SENDS + RECEIVES] for actions in orders.actions]
    assert compute[3][:4] == ["3F0", "3B0", "3F1", "3B1"]
    assert compute[0][:6] == ["0F0", "0F1", "0F2", "0F3", "0B0", "0F4"]
    for rank, actions in enumerate(compute):
        alive = [sum("F" in a for a in actions[:at]) - sum("B" in a for a in actions[:at]) for at in range(len(actions) + 1)]
        assert max(alive) == 4 - rank


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_forward_orders_take_any_number_of_micro_batches(schedule: str, pp: int, num_micro_batches: int) -> None:
    orders = forward_orders(schedule, pp, num_micro_batches)
    simulate(orders, user_loop=False)
    found = Counter((a.stage, a.micro) for actions in orders.actions for a in actions if a.kind is ActionKind.FORWARD)
    assert found == Counter((stage, micro) for stage in range(num_stages(schedule, pp)) for micro in range(num_micro_batches))
    assert not any(action.kind in BACKWARDS for actions in orders.actions for action in actions)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_forward_orders_keep_every_rank_busy(schedule: str) -> None:
    """In ticks of one forward: as many as one rank has forwards, and the time the first micro-batch takes to come around."""
    pp, num_micro_batches = 4, 12
    orders = forward_orders(schedule, pp, num_micro_batches)
    ticks: dict[tuple[int, int], int] = {}
    clocks = [0] * pp
    waiting = [deque(a for a in actions if a.kind is ActionKind.FORWARD) for actions in orders.actions]
    while any(waiting):
        for rank, actions in enumerate(waiting):
            while actions and (actions[0].stage == 0 or (actions[0].stage - 1, actions[0].micro) in ticks):
                action = actions.popleft()
                clocks[rank] = max(clocks[rank], ticks.get((action.stage - 1, action.micro), 0)) + 1
                ticks[action.stage, action.micro] = clocks[rank]
    stages = num_stages(schedule, pp)
    assert max(clocks) <= num_micro_batches * stages // pp + stages - 1


def test_stages_lie_on_the_ranks_that_torch_gives_them() -> None:
    from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

    for pp in (2, 3, 4):
        assert rank_of_stage("1f1b", pp) == tuple(range(pp))
        for schedule, style in (("interleaved", "loop"), ("zero-bubble", "loop"), ("zero-bubble-v", "v")):
            mapping = generate_stage_to_rank_mapping(pp, 2 * pp, style)
            assert rank_of_stage(schedule, pp) == tuple(mapping[stage] for stage in range(2 * pp))


def test_orders_are_computed_once() -> None:
    assert schedule_orders("1f1b", 2, 4) is schedule_orders("1f1b", 2, 4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fewer_micro_batches_than_stages_are_refused(schedule: str) -> None:
    with pytest.raises(BatchError, match=r"at least as many micro-batches") as caught:
        schedule_orders(schedule, 4, 3)
    assert caught.value.expected == ">= 4 micro-batches"
    assert caught.value.got == "3"


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
def test_number_that_does_not_fill_its_rounds_is_refused_and_usable_ones_are_named(schedule: str) -> None:
    with pytest.raises(BatchError) as caught:
        schedule_orders(schedule, 4, 9)
    assert caught.value.expected == "one of 4, 5, 6, 7, 8, 10, 12, 15, 16"
    for number in (4, 5, 6, 7, 8, 10, 12, 15, 16):
        schedule_orders(schedule, 4, number)
    for number in (9, 11, 13, 14):
        with pytest.raises(BatchError):
            schedule_orders(schedule, 4, number)


def test_unknown_schedule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PlanError, match="gpipe, 1f1b, interleaved, zero-bubble, zero-bubble-v"):
        schedule_orders("2f2b", 2, 2)


@pytest.mark.parametrize("missing", ["_add_send_recv", "_Action", "ScheduleInterleaved1F1B"])
def test_torch_that_moved_its_schedules_gives_one_clear_error(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    from torch.distributed.pipelining import schedules

    monkeypatch.delattr(schedules, missing)
    schedule: str = "interleaved" if missing.startswith("Schedule") else "gpipe"
    with pytest.raises(UnsupportedError, match=r"(?s)where: torch \d.*" + missing):
        orders_module.schedule_orders.__wrapped__(schedule, 2, 4)
