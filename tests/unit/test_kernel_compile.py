"""Compiled for four GPUs that need not be there: nothing spills, all can be launched, memory is read 128 bits at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import kernel_compile

ALIGNED = {4096, 16384}
# Of one program, in bytes: what every GPU of the target gives without being asked.
MOST_SHARED = {"sm_80": 48 << 10, "sm_90": 48 << 10, "sm_100": 48 << 10, "gfx942": 64 << 10}
# For all threads of a program, and for one.
REGISTER_FILE = {"sm_80": 65536, "sm_90": 65536, "sm_100": 65536, "gfx942": 4 * 512 * 64}
MOST_REGISTERS = {"sm_80": 255, "sm_90": 255, "sm_100": 255, "gfx942": 256}
pytestmark = pytest.mark.timeout(400)  # seconds of processor: 30; it may be shared
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def compiled() -> Iterator[dict[str, list[dict[str, Any]]]]:
    """The programs of each target, compiled in a process of its own, all at once."""
    if find_spec("triton") is None:
        pytest.skip("needs triton, for its compiler")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    running = {
        target: subprocess.Popen(
            [sys.executable, str(Path(kernel_compile.__file__)), target],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for target in kernel_compile.TARGETS
    }
    try:
        found = {}
        for target, process in running.items():
            output, errors = process.communicate(timeout=380)
            assert process.returncode == 0, f"{target}: {errors[-3000:]}"
            found[target] = [json.loads(line) for line in output.splitlines()]
        yield found
    finally:
        for process in running.values():
            process.kill()


@pytest.mark.parametrize("target", kernel_compile.TARGETS)
def test_every_program_compiles_without_spilling_and_can_be_launched(compiled: Any, target: str) -> None:
    programs = compiled[target]
    assert len({each["program"] for each in programs}) >= 17
    for each in programs:
        assert each["stack"] == 0, each
        assert 0 < each["registers"] <= MOST_REGISTERS[target], each
        assert each["registers"] * each["threads"] <= REGISTER_FILE[target], each
        assert each["shared"] <= MOST_SHARED[target], each


@pytest.mark.parametrize("target", kernel_compile.TARGETS)
def test_rows_whose_length_allows_it_are_read_and_written_128_bits_at_a_time(compiled: Any, target: str) -> None:
    aligned = [each for each in compiled[target] if each["length"] in ALIGNED and each["row_tensors"]]
    assert len(aligned) > 30
    narrow = [each for each in aligned if each["wide_accesses"] < each["row_tensors"]]
    assert not narrow
    odd = [each for each in compiled[target] if each["length"] == 129 and each["row_tensors"]]
    wide = [each for each in odd if each["wide_accesses"] >= each["row_tensors"]]  # sums in fp32, which are aligned
    assert len(wide) < len(odd) / 2
