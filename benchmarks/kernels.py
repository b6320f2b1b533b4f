"""Kernels beside plain torch, torch.compile and Liger: python -m benchmarks.kernels

For each kernel, shape and type: milliseconds forward and backward (median of several rounds), the bandwidth that follows from
the bytes that must move, its share of what a copy of the same size reaches on this GPU, and the error against fp64. A provider
that is not installed, or does not take an input, is left out with the reason.

Rows are appended to benchmarks/results/kernels.csv with date, GPU and versions; the picture is drawn beside it. On a CPU the
times say nothing (Triton's interpreter, if TRITON_INTERPRET=1): only that the script runs and the errors are right.
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_cases import CASES, Case, row_elements

RESULTS = Path(__file__).parent / "results" / "kernels.csv"
SHAPES = [(8192, 4096), (4096, 8192), (8192, 1024), (16384, 2048)]
SMALL = [(8, 64)]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROUNDS = 5
_SECONDS_A_ROUND = 0.02


@dataclass(frozen=True)
class Row:
    """One line of the table. copy_share: 1.0 is the bandwidth of a copy. error: relative to the largest value, of fp64."""

    date: str
    gpu: str
    torch: str
    triton: str
    transformers: str
    kernel: str
    provider: str
    direction: str
    shape: str
    dtype: str
    ms: float
    gb_per_s: float
    copy_share: float
    error: float
    peak_mib: float
    note: str = ""


def here() -> dict[str, str]:
    """What a figure depends on."""

    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "none"

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu {platform.machine()}"
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    return {"date": date, "gpu": name, **{package: of(package) for package in ("torch", "triton", "transformers")}}


def measure(function: Callable[[], Any], device: torch.device, *, rounds: int = ROUNDS, warm: int = 3) -> float:
    """Milliseconds of one call: the median of rounds, each of as many calls as fill a fiftieth of a second."""
    for _ in range(warm):
        function()
    once = _timed(function, 1, device)
    calls = max(1, min(200, int(1000 * _SECONDS_A_ROUND / max(once, 1e-3)))) if device.type == "cuda" else 1
    return statistics.median(_timed(function, calls, device) for _ in range(rounds))


def _timed(function: Callable[[], Any], calls: int, device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return 1000 * (time.perf_counter() - start) / calls
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    for _ in range(calls):
        function()
    after.record()
    torch.cuda.synchronize()
    return float(before.elapsed_time(after)) / calls


def copy_bandwidth(elements: int, dtype: torch.dtype, device: torch.device) -> float:
    """GB/s of a copy, read and written bytes together."""
    source = torch.empty(elements, dtype=dtype, device=device)
    target = torch.empty_like(source)
    ms = measure(lambda: target.copy_(source), device)
    return 2 * elements * source.element_size() / ms / 1e6


def providers(case: Case, *, compiled: bool) -> dict[str, Callable[..., Any] | str]:
    """Functions by name; for what cannot be had the reason."""
    found: dict[str, Callable[..., Any] | str] = {"oslo": case.ours, "eager": case.eager}
    if compiled:
        import torch._functorch.config as functorch

        functorch.donated_buffer = False  # a backward is timed many times on one graph
        found["compile"] = torch.compile(case.eager, dynamic=False)
    if case.liger is not None:
        name, call = case.liger
        try:
            from liger_kernel.transformers import functional

            function = getattr(functional, name)
            found["liger"] = lambda *inputs: call(function, *inputs)
        except (ImportError, AttributeError) as error:
            found["liger"] = f"{type(error).__name__}: {error}"
    return found


def leaves(inputs: Iterable[Any]) -> list[Tensor]:
    return [each for each in inputs if isinstance(each, Tensor) and each.requires_grad]


def results_and_gradients(function: Callable[..., Any], inputs: tuple[Any, ...]) -> list[Tensor]:
    y = function(*inputs)
    wanted = leaves(inputs)
    return [y.detach(), *(torch.autograd.grad(y, wanted, gradient_like(y)) if wanted else ())]


def gradient_like(y: Tensor) -> Tensor:
    generator = torch.Generator(y.device).manual_seed(3)
    return torch.randn(y.shape, generator=generator, device=y.device).to(y.dtype)


def error_of(function: Callable[..., Any], case: Case, inputs: tuple[Any, ...]) -> float:
    """Largest error of the result and of all gradients, each relative to its largest number. Of fp64, on rounded inputs."""
    if not case.exact:
        return float("nan")
    wide = tuple(
        each.detach().double().requires_grad_(each.requires_grad)
        if isinstance(each, Tensor) and each.is_floating_point()
        else each
        for each in inputs
    )
    got, wanted = results_and_gradients(function, inputs), results_and_gradients(case.eager, wide)
    errors = []
    for a, b in zip(got, wanted, strict=True):
        finite = b.isfinite()
        if not torch.equal(a.isfinite(), finite):
            return float("inf")
        size = b[finite].abs().max() if bool(finite.any()) else torch.ones(())
        off = (a.double() - b)[finite].abs().max() if bool(finite.any()) else torch.zeros(())
        errors.append(float(off / size.clamp_min(1e-30)))
    return max(errors)


def run_case(
    case: Case, rows: int, length: int, dtype_name: str, device: torch.device, *, compiled: bool, copy: float
) -> list[Row]:
    """All providers of one case."""
    dtype, told = DTYPES[dtype_name], here()
    inputs = case.make(rows, length, dtype, device)
    shape = "x".join(map(str, inputs[0].shape))
    found = []
    for provider, function in providers(case, compiled=compiled).items():

        def row(direction: str, ms: float, moved: float, error: float, peak: float, note: str = "") -> Row:
            speed = moved * row_elements(case, inputs) * inputs[0].element_size() / ms / 1e6 if ms == ms else float("nan")
            names = {"kernel": case.name, "provider": provider, "direction": direction, "shape": shape, "dtype": dtype_name}  # noqa: B023
            return Row(**told, **names, ms=ms, gb_per_s=speed, copy_share=speed / copy, error=error, peak_mib=peak, note=note)

        if isinstance(function, str):
            found.append(row("forward", float("nan"), 0, float("nan"), float("nan"), function))
            continue
        try:
            error = error_of(function, case, inputs)
            ms, peak = _with_peak(lambda: function(*inputs), device)  # noqa: B023
            found.append(row("forward", ms, case.moved[0], error, peak))
            if leaves(inputs):
                y = function(*inputs)
                gradient = gradient_like(y)
                ms, peak = _with_peak(lambda: torch.autograd.grad(y, leaves(inputs), gradient, retain_graph=True), device)  # noqa: B023
                found.append(row("backward", ms, case.moved[1], error, peak))
        except Exception as problem:  # one provider that fails must not end the others
            found.append(
                row("forward", float("nan"), 0, float("nan"), float("nan"), f"{type(problem).__name__}: {problem}"[:200])
            )
    return found


def _with_peak(function: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Milliseconds, and MiB above what was allocated before."""
    ms = measure(function, device)
    if device.type != "cuda":
        return ms, float("nan")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return ms, (torch.cuda.max_memory_allocated() - before) / 2**20


def append(rows: list[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.is_file()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        if new:
            writer.writeheader()
        writer.writerows(
            {key: f"{value:.5g}" if isinstance(value, float) else value for key, value in asdict(row).items()} for row in rows
        )


def draw(rows: list[Row], path: Path) -> None:
    """Bars: share of the copy bandwidth, one group for each kernel and direction, of the first shape and type."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    first: dict[str, str] = {}
    for row in rows:
        first.setdefault(row.kernel, f"{row.shape} {row.dtype}")
    shown = [row for row in rows if f"{row.shape} {row.dtype}" == first[row.kernel] and row.ms == row.ms]
    groups = list(dict.fromkeys(f"{row.kernel}\n{row.direction}" for row in shown))
    names = list(dict.fromkeys(row.provider for row in shown))
    figure, axes = plt.subplots(figsize=(max(6.0, 0.8 * len(groups)), 4.5))
    for position, name in enumerate(names):
        bars = {f"{row.kernel}\n{row.direction}": row.copy_share for row in shown if row.provider == name}
        places = [groups.index(group) + (position - len(names) / 2 + 0.5) * 0.8 / len(names) for group in bars]
        axes.bar(places, list(bars.values()), 0.8 / len(names), label=name)
    axes.set_xticks(range(len(groups)), groups, fontsize=6, rotation=60)
    axes.axhline(1.0, color="black", linewidth=0.5)
    axes.set_ylabel("share of copy bandwidth")
    axes.set_title(f"{rows[0].gpu}, torch {rows[0].torch}, triton {rows[0].triton}, {rows[0].date}", fontsize=8)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def show(rows: list[Row]) -> None:
    for row in rows:
        speed = f"{row.ms:9.3f} ms {row.gb_per_s:8.0f} GB/s {row.copy_share:5.2f} of copy  error {row.error:.1e}"
        print(f"{row.kernel:22} {row.direction:8} {row.shape:16} {row.dtype} {row.provider:8} {row.note or speed}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="kernels; by default all")
    parser.add_argument("--dtypes", default="bf16", help="comma-separated: bf16, fp16, fp32")
    parser.add_argument("--small", action="store_true", help="one tiny shape, to try the script where there is no GPU")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="CSV that rows are appended to; the picture lies beside it"
    )
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[Row] = []
    for dtype_name in options.dtypes.split(","):
        for number, length in SMALL if options.small else SHAPES:
            copy = copy_bandwidth(number * length, DTYPES[dtype_name], device)
            for case in CASES:
                if not options.only or case.name in options.only:
                    done = run_case(case, number, length, dtype_name, device, compiled=not options.no_compile, copy=copy)
                    show(done)
                    rows += done
    append(rows, options.output)
    draw(rows, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
