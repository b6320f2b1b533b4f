"""The picture of a batch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from oslo_engine.errors import MissingDependencyError
from oslo_engine.pipeline.orders import ActionKind
from oslo_engine.pipeline.timeline import Event, draw_timeline

F, B, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT
EVENTS = [
    [Event(F, 0, 0, 10.0, 10.5), Event(F, 0, 1, 10.5, 11.0), Event(B, 0, 0, 12.0, 13.0)],
    [Event(F, 1, 0, 10.5, 11.0), Event(W, 1, 0, 11.0, 12.0)],
]


def test_one_row_per_rank_one_labelled_box_per_computation_and_an_axis_in_ms() -> None:
    (axes,) = draw_timeline(EVENTS).axes
    boxes = [(box.get_x(), box.get_y() + box.get_height() / 2, box.get_width()) for box in axes.patches]
    expected = [(0, 0, 500), (500, 0, 500), (2000, 0, 1000), (500, 1, 500), (1000, 1, 1000)]
    assert [pytest.approx(box) for box in boxes] == expected
    assert [text.get_text() for text in axes.texts] == ["0", "1", "0", "0", "0"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert axes.get_xlabel() == "ms"
    low, high = axes.get_ylim()
    assert low > high, "rank 0 is on top"


def test_boxes_without_room_have_no_label() -> None:
    narrow = Event(B, 1, 5, 12.0, 12.01)
    (axes,) = draw_timeline([EVENTS[0], [*EVENTS[1], narrow]]).axes
    assert len(axes.patches) == 6
    assert "5" not in [text.get_text() for text in axes.texts]


def test_kinds_of_computation_differ_in_colour_and_stand_in_the_legend() -> None:
    (axes,) = draw_timeline(EVENTS).axes
    colours = [box.get_facecolor() for box in axes.patches]
    assert colours[0] == colours[1] == colours[3]
    assert len(set(colours)) == 3
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["forward", "backward", "backward of weights"]


def test_picture_is_saved_in_the_format_of_the_suffix(tmp_path: Path) -> None:
    draw_timeline(EVENTS, tmp_path / "timeline.png")
    draw_timeline([[], []], tmp_path / "empty.svg")
    assert (tmp_path / "timeline.png").read_bytes()[:4] == b"\x89PNG"
    assert b"<svg" in (tmp_path / "empty.svg").read_bytes()


def test_missing_matplotlib_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'oslo-engine\[plot\]'"):
        draw_timeline(EVENTS)
