"""When workers count as hanging."""

from __future__ import annotations

from oslo_engine.deploy.pulse import Pulse
from oslo_engine.deploy.settings import Deployment
from oslo_engine.deploy.watch import Judge, Verdict

SETTINGS = Deployment(silence_timeout_s=3, stall_timeout_s=6)


def verdicts(*looks: tuple[list[Pulse], bool], passed_s: float = 1.0, num_ranks: int = 2) -> list[Verdict | None]:
    judge = Judge(num_ranks, SETTINGS)
    return [judge.look(pulses, busy, passed_s) for pulses, busy in looks]


def living(beats: int, *progress: tuple[int, int]) -> list[Pulse]:
    return [Pulse(beats, *one) for one in progress]


def test_a_pulse_that_stands_still_is_a_hang_though_nothing_runs() -> None:
    told = verdicts(*(([Pulse(at), Pulse(5)], False) for at in range(1, 6)))
    assert told == [None, None, None, Verdict(1, 3.0), Verdict(1, 3.0)]


def test_workers_that_do_not_go_on_hang_only_where_calls_run() -> None:
    assert verdicts(*((living(at, (7, 7), (7, 7)), False) for at in range(1, 12))) == [None] * 11
    told = verdicts(*((living(at, (7, 7), (7, 7)), True) for at in range(1, 9)))
    assert told == [*[None] * 6, *[Verdict(None, 6.0)] * 2]


def test_one_worker_that_computes_or_communicates_is_enough() -> None:
    assert verdicts(*((living(at, (7, 7), (7, at)), True) for at in range(1, 20))) == [None] * 19
    assert verdicts(*((living(at, (at, 7), (7, 7)), True) for at in range(1, 20))) == [None] * 19


def test_the_time_of_a_call_counts_from_its_start() -> None:
    looks = [(living(at, (7, 7), (7, 7)), at > 5) for at in range(1, 11)]
    assert verdicts(*looks) == [None] * 10


def test_one_worker_alone_waits_for_nobody() -> None:
    assert verdicts(*((living(at, (7, 7)), True) for at in range(1, 20)), num_ranks=1) == [None] * 19


def test_the_time_in_which_the_machine_slept_does_not_count() -> None:
    still = [Pulse(1), Pulse(1)]
    assert verdicts((still, False), (still, False), passed_s=3600.0) == [None, None]
