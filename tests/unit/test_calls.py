"""From the numbers of calls it can be told whether ranks have lost one another."""

from __future__ import annotations

import pytest

from oslo_engine.comm.calls import Calls, Standing, gone_apart, left_behind


def calls(rank: int = 0) -> Calls:
    return Calls("here", rank, (0, 1), (0, 1))


def test_a_call_inside_of_another_one_is_a_part_of_it() -> None:
    mine = calls()
    with mine.call("generate"):
        with mine.call("a forward"):
            assert (mine.standing.number, mine.standing.kind) == (1, "generate")
        assert mine.is_open
    assert (mine.standing.number, mine.standing.kind, mine.standing.state) == (1, "generate", "done")


def test_an_error_is_told_at_once_and_goes_on() -> None:
    mine, told = calls(), []
    mine.tell = lambda: told.append(mine.standing)
    with pytest.raises(ValueError, match="no"), mine.call("a forward"):
        raise ValueError("no")
    assert [(each.number, each.state, each.cause) for each in told] == [(1, "failed", "ValueError: no")]
    assert mine.has_failed(1)


def test_after_an_error_the_next_call_waits_for_the_others_to_have_failed() -> None:
    mine, waited = calls(), []
    mine.wait_until_failed_everywhere = lambda: waited.append(mine.standing.number)
    with mine.call("a forward"):
        pass
    with pytest.raises(ValueError, match="no"), mine.call("a forward"):
        raise ValueError("no")
    assert waited == []
    with mine.call("a forward"):
        pass
    assert waited == [2]


def test_a_pipeline_that_failed_begins_with_the_same_number_again() -> None:
    mine = Calls("here", 0, (0,), (0, 1))
    for _ in range(2):
        with mine.call("a forward"):
            pass
        before = mine.standing
        with pytest.raises(ValueError, match="no"), mine.call("saving"):
            raise ValueError("no")
        assert (mine.standing.number, mine.standing.trail) == (before.number, before.trail)
        assert not mine.is_open


FAILED = Standing(2, "a forward", "failed", "ValueError: no")


@pytest.mark.parametrize(
    ("number", "state", "lost"),
    [(1, "done", False), (2, "inside", True), (2, "outside", False), (2, "done", True), (3, "inside", True)],
)
def test_who_is_in_or_behind_a_call_that_failed_on_another_rank_only_is_left_behind(
    number: int, state: str, lost: bool
) -> None:
    mine = calls()
    mine.standing = Standing(number, "a forward", state)  # type: ignore[arg-type]
    found = left_behind(mine, 1, FAILED)
    assert (found is not None) == lost
    assert found is None or "rank 1, in a forward: ValueError: no" in found


def test_who_failed_as_well_is_not_left_behind() -> None:
    mine = calls()
    mine.begin("a forward")
    mine.begin("a forward")
    mine.fail("ValueError: no")
    assert left_behind(mine, 1, FAILED) is None
    mine.begin("a forward")
    assert left_behind(mine, 1, FAILED) is None


def test_a_broken_connection_is_not_told_as_a_cause() -> None:
    mine = calls()

    def stop() -> None:
        try:
            raise RuntimeError("gloo: Connection closed by peer")
        except RuntimeError as error:
            raise RuntimeError("a pipeline stopped") from error

    with pytest.raises(RuntimeError), mine.call("a forward"):
        stop()
    assert (mine.standing.state, mine.standing.cause) == ("failed", "")


def test_an_error_that_came_from_another_rank_leaves_nobody_behind() -> None:
    mine = calls()
    mine.standing = Standing(2, "a forward", "inside")
    assert left_behind(mine, 1, Standing(2, "a forward", "failed", "")) is None


def test_ranks_in_different_calls_of_one_number_have_gone_apart() -> None:
    mine, same, other = calls(), calls(1), calls(1)
    for each in (mine, same, other):
        for _ in range(3):
            with each.call("a forward"):
                pass
    mine.begin("a forward")
    assert gone_apart(mine, 1, other.standing) is None  # not as far yet
    same.begin("a forward")
    assert gone_apart(mine, 1, same.standing) is None
    other.begin("saving")
    assert "rank 0 is in a forward while rank 1 is in saving" in (gone_apart(mine, 1, other.standing) or "")
    for each in (mine, other):
        each.end()
        each.begin("a forward")
    assert gone_apart(mine, 1, other.standing) is not None  # also behind it
