"""``oslo-engine plan``: its verdicts, its exit codes, its JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oslo_engine.cli.main import main

GPT2 = ["plan", "gpt2", "--seq", "64", "--checkpointing"]


def test_layouts_that_fit_are_listed_and_written(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = CliRunner().invoke(main, [*GPT2, "--gpus", "2", "--memory", "4GiB", "--json", str(file)])
    assert done.exit_code == 0
    assert "It fits on 2 x 4 GiB" in done.output
    found = json.loads(file.read_text())
    assert found["parameters"] == 124_439_808
    assert {(each["layout"]["tp"], each["layout"]["pp"], each["layout"]["dp"]) for each in found["fitting"]} >= {
        (2, 1, 1),
        (1, 1, 2),
    }
    assert all(each["memory"] <= 4 << 30 for each in found["fitting"])


def test_model_that_does_not_fit_says_by_how_much_and_what_would_do() -> None:
    done = CliRunner().invoke(main, [*GPT2, "--gpus", "1", "--memory", "700MiB", "--dtype", "bfloat16"])
    assert done.exit_code == 1
    assert "It does not fit on 1 x 700 MiB" in done.output
    assert "The least number of such GPUs is 2" in done.output


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--gpus", "0", "--memory", "4GiB"], "gpus must be a positive whole number"),
        (["--gpus", "1", "--memory=-4GiB"], "no size of memory"),
        (["--gpus", "1", "--memory", "4GiB", "--task", "rest"], "no such task"),
        (["--gpus", "1", "--memory", "4GiB", "--optimizer", "newton"], "no such optimizer"),
        (["--gpus", "1", "--memory", "4GiB", "--dtype", "int8"], "no such dtype"),
        (["--gpus", "1", "--memory", "4GiB", "--tflops", "0"], "tflops must be positive"),
        (["--gpus", "1", "--memory", "4GiB", "--json", "/no/folder/plan.json"], "cannot be written there"),
    ],
)
def test_bad_input_ends_with_our_message_and_2(options: list[str], complaint: str) -> None:
    done = CliRunner().invoke(main, ["plan", "gpt2", *options])
    assert done.exit_code == 2
    assert complaint in done.output


def test_picture_is_drawn_and_another_format_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need it")
    options = [*GPT2, "--gpus", "2", "--memory", "4GiB", "--batch", "8"]
    assert CliRunner().invoke(main, [*options, "--picture", str(tmp_path / "plan.png")]).exit_code == 0
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"
    done = CliRunner().invoke(main, [*options, "--picture", str(tmp_path / "plan.txt")])
    assert done.exit_code == 2
    assert "no such format" in done.output


def test_picture_has_the_memory_of_layouts_and_ranks_and_the_pipeline() -> None:
    pytest.importorskip("matplotlib", reason="pictures need it")
    from oslo_engine import plan
    from oslo_engine.planning.picture import draw_report

    report = plan("gpt2", gpus=2, memory="2GiB", batch=8, length=32, checkpointing=True)
    report = dataclasses.replace(report, fitting=tuple(each for each in report.fitting if each.candidate.pp == 2))
    assert report.best is not None
    layouts, ranks, pipeline = draw_report(report).axes
    widths = sum(box.get_width() for box in layouts.patches[:: len(layouts.get_yticks())])
    assert widths == pytest.approx(report.best.memory / (1 << 20))
    assert [label.get_text() for label in ranks.get_yticklabels()] == ["pp rank 0", "pp rank 1"]
    assert len(pipeline.patches) >= 2 * 2 * 2, "a forward and a backward of every micro-batch on each rank"
