"""The benchmarks that want a GPU, at small size in Triton's interpreter: what they compute is right, what they write whole."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, for its interpreter")


def run(*arguments: object) -> str:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return ran.stdout


@needs_triton
def test_a_kernel_is_measured_and_its_errors_written_down(tmp_path: Path) -> None:
    table = tmp_path / "kernels.csv"
    run("benchmarks.kernels", "swiglu", "--small", "--no-compile", "--output", table)
    run("benchmarks.kernels", "no_repeat_ngram", "--small", "--no-compile", "--output", table)
    rows = list(csv.DictReader(table.open()))
    ours = [row for row in rows if row["provider"] == "oslo"]
    assert [(row["kernel"], row["direction"]) for row in ours] == [
        ("swiglu", "forward"),
        ("swiglu", "backward"),
        ("no_repeat_ngram", "forward"),
    ]
    assert all(float(row["error"]) < 1e-2 and float(row["ms"]) > 0 for row in ours)
    assert all(row["date"] and row["gpu"] and row["torch"] and row["triton"] and row["transformers"] for row in rows)
    assert table.with_suffix(".png").stat().st_size > 5000


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_check_for_a_gpu_finds_nothing_wrong_here(tmp_path: Path) -> None:
    told = run("benchmarks.gpu_check", "--small", "--budget", 500, "--output", tmp_path)
    assert "0 wrong, 0 left out" in told
    rows = list(csv.DictReader((tmp_path / "models.csv").open()))
    assert {row["model"] for row in rows} == {"gpt2", "llama"}
    assert {row["provider"] for row in rows} == {"eager", "eager fused", "sdpa", "sdpa fused"}
    assert "generate, n-grams by kernel" in {row["what"] for row in rows}
    assert (tmp_path / "kernels.png").is_file()
