"""Compile for a GPU that is not there what the kernels' launchers would launch on it; one JSON line for each program.

    python tests/support/kernel_compile.py sm_90

The launchers run on CPU tensors with ``launch`` replaced, so that tiles, warps and constants are the real ones; arguments are
specialised as Triton's launcher does it (divisible by 16, equal to 1). Registers and stack of NVIDIA's programs are read from
the machine code by cuobjdump. For AMD's there is no such tool in the wheel: they are what the compiler states in the metadata
of the assembly, and "stack" is the private segment together with all spilled registers.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "sm_100": ("cuda", 100, 32), "gfx942": ("hip", "gfx942", 64)}
ROWS = 64
LENGTHS = (4096, 129, 16384)  # whole rows, odd ones, rows in pieces
_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


class Launch(NamedTuple):
    program: Any
    arguments: tuple[Any, ...]
    warps: int
    constants: dict[str, Any]
    length: int


def launches(lanes: int) -> list[Launch]:
    """Every program, with every setting that changes its code."""
    from oslo_engine.kernels.gpu import launch as layout

    layout.LANES = lanes
    layout.num_programs = lambda like, num_tiles: min(num_tiles, 528)
    names = (
        "layer_norm",
        "rms_norm",
        "bias_gelu",
        "glu",
        "cross_entropy",
        "rotary",
        "scale_mask_softmax",
        "bias_dropout_residual",
        "no_repeat_ngram",
    )
    modules = {name: import_module(f"oslo_engine.kernels.gpu.{name}") for name in names}
    found: list[Launch] = []
    length = 0

    def record(program: Any, grid: Any, like: Tensor, *arguments: Any, warps: int = 4, **constants: Any) -> None:
        found.append(Launch(program, arguments, warps, constants, length))

    for module in modules.values():
        module.launch = record
    for length in LENGTHS:
        _launch_rows(modules, length)
    length = 128
    _launch_others(modules)
    seen = {(launch.program.__name__, launch.warps, repr(launch.constants), _signature(launch)): launch for launch in found}
    return list(seen.values())


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype)


def _launch_rows(modules: dict[str, Any], length: int) -> None:
    x, weight = _empty(ROWS, length), _empty(length)
    number = _empty(ROWS, dtype=torch.float32)
    for residual in (None, x):
        modules["layer_norm"].forward(x, residual, weight, weight, 1e-5)
        modules["rms_norm"].forward(x, residual, weight, 1e-5, 0.0)
    modules["layer_norm"].backward(x, x, x, weight, number, number, True)
    modules["rms_norm"].backward(x, x, x, weight, number, 0.0, True)
    for form in ("erf", "tanh", "quick") if length == LENGTHS[0] else ("tanh",):
        modules["bias_gelu"].forward(x, weight, form)
        modules["bias_gelu"].backward(x, x, weight, form, True)
    modules["glu"].forward(x, x, "silu")
    modules["glu"].backward(x, x, x, "silu")
    target = _empty(ROWS, dtype=torch.int64)
    modules["cross_entropy"].forward(x, target, 0)
    modules["cross_entropy"].backward(number, number, number, x, target, number, 0)
    softmax, scores = modules["scale_mask_softmax"], _empty(2, 4, 8, length)
    mask = _empty(2, 1, 8, length, dtype=torch.bool)
    softmax.forward(scores, mask, _empty(1, 4, 8, length), _empty(4), _empty(4), 0.5, True, 2.0)
    softmax.forward(scores, None, _empty(2, 1, 8, length), None, None, 0.5, False, 0.0)
    softmax.forward(scores, None, None, None, None, 0.5, True, 0.0)
    softmax.backward(scores, scores, scores, 0.5, 2.0, [1, 4, 8, length], True)
    seed = torch.zeros((), dtype=torch.int64)
    for p in (0.0, 0.1):
        modules["bias_dropout_residual"].forward(x, weight, x, seed, p, 0)
    modules["bias_dropout_residual"].backward(x, seed, 0.1, 0, True)


def _launch_others(modules: dict[str, Any]) -> None:
    for features, angles in ((128, 64), (80, 40), (20, 3)):
        for interleaved in (False, True):
            table = _empty(2, 1, 8, angles)
            modules["rotary"].forward(_empty(2, 4, 8, features), table, table, interleaved, False)
    for size in (1, 3):
        scores, ids = _empty(2, 100, dtype=torch.float32), _empty(2, 50, dtype=torch.int64)
        modules["no_repeat_ngram"].forward(scores, ids, size, float("-inf"))


def _signature(launch: Launch) -> str:
    return repr(_specialized(launch))


def _specialized(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], Any]]:
    """Types, constants and divisibility of the arguments."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    divisible: dict[tuple[int], Any] = {}
    for position, name in enumerate(launch.program.arg_names):
        value = launch.constants[name] if name in launch.constants else launch.arguments[position]
        if name in launch.constants or value is None or (type(value) is int and value == 1):
            types[name], constants[name] = "constexpr", value
        elif isinstance(value, Tensor):
            types[name] = _POINTERS[value.dtype]
            divisible[(position,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            types[name] = "fp32"
        else:
            types[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                divisible[(position,)] = [["tt.divisibility", 16]]
    return types, constants, divisible


def compile_all(target: str) -> Iterator[dict[str, Any]]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend, architecture, lanes = TARGETS[target]
    for launch in launches(lanes):
        compiled: Any = triton.compile(
            ASTSource(launch.program, *_specialized(launch)),
            target=GPUTarget(backend, architecture, lanes),
            options={"num_warps": launch.warps},
        )
        rows = [value for value in launch.arguments if isinstance(value, Tensor) and value.dtype == torch.bfloat16]
        measure = _measure_nvidia if backend == "cuda" else _measure_amd
        yield {
            "program": launch.program.__name__,
            "constants": repr(launch.constants),
            "length": launch.length,
            "threads": launch.warps * lanes,
            "row_tensors": sum(value.numel() == ROWS * launch.length for value in rows),
            "shared": compiled.metadata.shared,
            **measure(compiled),
        }


def _measure_nvidia(compiled: Any) -> dict[str, Any]:
    import triton

    cuobjdump = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        told = subprocess.run([cuobjdump, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    match = re.search(r"REG:(\d+) STACK:(\d+)", told.stdout + told.stderr)
    assert match is not None, told.stdout + told.stderr
    accesses = re.findall(r"(?:ld|st)\.global[.\w:]*?(?:\.v(\d))?\.[bfu](\d+)", compiled.asm["ptx"])
    wide = sum(int(bits) * int(number or 1) == 128 for number, bits in accesses)
    return {"registers": int(match[1]), "stack": int(match[2]), "wide_accesses": wide}


def _measure_amd(compiled: Any) -> dict[str, Any]:
    assembly = compiled.asm["amdgcn"]

    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s*(\d+)", assembly).group(1))  # type: ignore[union-attr]

    return {
        "registers": number("vgpr_count"),
        "stack": number("private_segment_fixed_size") + number("vgpr_spill_count") + number("sgpr_spill_count"),
        "wide_accesses": len(re.findall(r"(?:global|buffer)_(?:load|store)_dwordx4", assembly)),
    }


if __name__ == "__main__":
    for result in compile_all(sys.argv[1]):
        print(json.dumps(result), flush=True)
