"""Rows of the ranks become one table, one verdict and one exit code."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

import oslo_engine.verify  # noqa: F401  # the module, which the name below is replaced in
from oslo_engine.cli.main import main
from oslo_engine.errors import PlanError
from oslo_engine.verify.report import Report, Row, judge, merge_rows, not_applicable

PASSED, FAILED = judge("loss", 1e-7, 1e-5), judge("loss", 1e-3, 1e-5, "wte")


def report(*rows: Row, errors: dict[int, str] | None = None) -> Report:
    return Report("SomeModel (some)", {"tp": 2, "pp": 1}, rows, 1.25, errors or {})


@pytest.mark.parametrize(("figure", "verdict"), [(1e-5, "pass"), (1.1e-5, "fail"), (math.inf, "fail"), (math.nan, "fail")])
def test_figure_passes_up_to_the_limit(figure: float, verdict: str) -> None:
    assert judge("loss", figure, 1e-5).verdict == verdict


def test_report_is_ok_only_if_all_that_applies_was_run_and_passed() -> None:
    assert report(PASSED, not_applicable("generation", "none")).ok
    assert not report(PASSED, FAILED).ok
    assert not report(PASSED, Row("norm", "not run")).ok
    assert not report(PASSED, errors={1: "died"}).ok


def test_report_in_which_nothing_was_checked_is_not_ok() -> None:
    assert not report().ok
    assert not report(not_applicable("generation", "none")).ok


def test_one_failing_rank_makes_a_row_fail_and_is_named() -> None:
    merged = merge_rows("loss", {0: PASSED, 1: FAILED, 2: judge("loss", 1e-4, 1e-5)}, 3)
    assert (merged.verdict, merged.figure, merged.detail) == ("fail", 1e-3, "wte, rank 1")


def test_no_number_is_worse_than_any() -> None:
    merged = merge_rows("loss", {0: FAILED, 1: judge("loss", math.nan, 1e-5)}, 2)
    assert merged.detail == "rank 1"


def test_largest_figure_of_the_ranks_is_shown() -> None:
    assert merge_rows("loss", {0: PASSED, 1: judge("loss", 3e-6, 1e-5)}, 2).figure == 3e-6


def test_rank_that_sent_nothing_makes_a_row_not_run() -> None:
    assert merge_rows("loss", {0: PASSED}, 2).verdict == "not run"
    assert merge_rows("loss", {}, 2).verdict == "not run"
    assert merge_rows("loss", {1: FAILED}, 2).verdict == "fail"


def test_row_applies_if_it_does_on_one_rank() -> None:
    nothing_here = not_applicable("loss", "this stage has none")
    assert merge_rows("loss", {0: nothing_here, 1: PASSED}, 2) == PASSED
    assert merge_rows("loss", {0: nothing_here, 1: nothing_here}, 2) == nothing_here


def test_json_holds_everything_and_no_infinity() -> None:
    content = json.loads(report(PASSED, judge("norm", math.inf, 1.0), errors={3: "died"}).to_json())
    assert content["ok"] is False
    assert content["rows"][0] == {"name": "loss", "verdict": "pass", "figure": 1e-7, "limit": 1e-5, "detail": ""}
    assert content["rows"][1]["figure"] == "inf"
    assert content["errors"] == {"3": "died"}
    assert content["settings"] == {"tp": 2, "pp": 1}


def test_printed_report_has_figures_verdicts_errors_and_one_line_of_summary() -> None:
    text = str(
        report(PASSED, FAILED, not_applicable("beams", "no generation"), errors={0: "ValueError: x", 1: "ValueError: x"})
    )
    assert "1.0e-07" in text
    assert "1.0e-05" in text
    assert "no generation" in text
    assert "rank 0, 1: ValueError: x" in text
    assert text.splitlines()[-1] == "FAIL  SomeModel (some)  tp=2 pp=1: 1 passed, 1 failed, 1 not applicable in 1.2 s"


def run_command(monkeypatch: pytest.MonkeyPatch, result: Report | Exception, *options: str) -> tuple[int, str]:
    def verify(model: str, **settings: object) -> Report:
        if isinstance(result, Exception):
            raise result
        return result

    import sys

    monkeypatch.setattr(sys.modules["oslo_engine.verify"], "verify", verify)
    ran = CliRunner().invoke(main, ["verify", "some", *options])
    return ran.exit_code, ran.output


def test_exit_code_says_pass_or_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_command(monkeypatch, report(PASSED))[0] == 0
    code, output = run_command(monkeypatch, report(FAILED))
    assert code == 1
    assert "FAIL" in output


def test_bad_input_is_exit_code_2_and_our_message_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = run_command(monkeypatch, PlanError("too few heads", got="3"))
    assert (code, output) == (2, "error: too few heads\n  got: 3\n")


def test_json_file_is_written_also_for_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run_command(monkeypatch, report(FAILED), "--json", str(tmp_path / "report.json"))[0] == 1
    assert json.loads((tmp_path / "report.json").read_text())["ok"] is False


def test_json_file_in_no_folder_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, output = run_command(monkeypatch, AssertionError("was run"), "--json", str(tmp_path / "none" / "report.json"))
    assert code == 2
    assert "cannot be written" in output
