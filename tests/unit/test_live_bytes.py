"""Counting live bytes, against sums made by hand."""

from __future__ import annotations

import torch

from oslo_engine.footprint.live_bytes import LiveBytes


def test_what_is_freed_counts_no_more_and_the_most_is_remembered() -> None:
    live = LiveBytes()
    with live:
        live.begin(("first", ""))
        kept = torch.zeros(100)
        passing = torch.zeros(1000)
        del passing
        live.begin(("second", ""))
        view = kept.view(10, 10)  # the same storage
        more = view + 1
        live.note_collective("allreduce", 8)
        live.end()
    first, second = live.segments
    assert (first.kept, first.peak) == (400, 4400)
    assert (second.kept, second.peak, second.traffic) == (400, 400, {"allreduce": (1, 8)})
    assert live.most == 4400
    del view, more


def test_what_was_there_before_is_left_out() -> None:
    weight, live = torch.zeros(50), LiveBytes()
    live.leave_out([weight])
    with live:
        live.begin(("only", ""))
        weight.mul_(2)
        weight.t()
        live.end()
    assert (live.segments[0].kept, live.segments[0].peak) == (0, 0)


def test_what_is_left_out_is_forgotten_when_it_is_gone() -> None:
    """Its address may be that of the next tensor."""
    live = LiveBytes()
    for _ in range(20):
        batch = torch.zeros(64)
        live.leave_out([batch])
        del batch
    with live:
        live.begin(("only", ""))
        kept = [torch.zeros(64) for _ in range(20)]
        live.end()
    assert live.segments[0].kept == 20 * 4 * 64
    del kept
