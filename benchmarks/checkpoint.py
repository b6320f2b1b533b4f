"""How fast checkpoints are converted, in how much memory, and what loading reads: python -m benchmarks.checkpoint

A random model of about 1 GB is split at tp=2 pp=2, that is resharded to tp=4 pp=1, and that is merged. Each conversion runs in
a process of its own, after a small model went the same way, so that imports do not count. In every round it is timed in turn
with two others that write as many bytes on the same disk: ``cp``, and ``cp`` with ``sha256sum`` of the source and of the copy,
as who wants to be as sure as after a conversion must do: it compares the checksums of a split checkpoint and keeps new ones.
All read from the page cache, write a new file, and end with fsync. Before each, a file of the same size is written and deleted:
on virtual machines memory that was not used for a while is slow at first, and whoever comes first would pay for all.

Figures: the median over rounds of seconds and of CPU seconds; speed of ``cp`` = 1; peak resident memory above the start.

Loading: bytes read (preadv, counted) for one rank at tp=2 from the whole checkpoint, as a ratio to the bytes of its slices, for
cuts along rows, along columns, and for what is not cut; and peak resident memory above the start for all of its slices.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MIB = 1 << 20
LARGE = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
SMALL = LARGE | {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
# name -> (from, to, tp and pp; None: merged)
CONVERSIONS: dict[str, tuple[str, str, tuple[int, int] | None]] = {
    "split: whole to tp=2 pp=2": ("whole", "2x2", (2, 2)),
    "reshard: tp=2 pp=2 to tp=4": ("2x2", "4x1", (4, 1)),
    "merge: tp=4 to whole": ("4x1", "merged", None),
}


def write_model(folder: Path, sizes: dict[str, int]) -> None:
    """A checkpoint of random bits, tensor by tensor."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from oslo_engine.checkpoint.safetensors_io import TensorSpec, write_safetensors

    config = LlamaConfig(**sizes, dtype="bfloat16", architectures=["LlamaForCausalLM"])  # type: ignore[arg-type]
    config.save_pretrained(folder)
    with torch.device("meta"):
        state = LlamaForCausalLM(config).state_dict()
    specs = {name: TensorSpec(torch.bfloat16, tuple(tensor.shape)) for name, tensor in state.items()}

    def random(name: str) -> torch.Tensor:
        return torch.randint(-(2**15), 2**15, specs[name].shape, dtype=torch.int16).view(torch.bfloat16)

    write_safetensors(folder / "model.safetensors", specs, random)


# -- in a process of its own


def convert(root: Path, name: str, size: str = "large") -> None:
    from oslo_engine.checkpoint.merge import merge
    from oslo_engine.checkpoint.reshard import reshard

    source, target, layout = CONVERSIONS[name]
    if layout is None:
        merge(root / size / source, root / size / target, overwrite=True)
    else:
        reshard(root / size / source, root / size / target, tp=layout[0], pp=layout[1], overwrite=True)


def measure_conversion(root: Path, name: str, rounds: int) -> dict[str, Any]:
    for each in CONVERSIONS:
        convert(root, each, "small")
    _forget_peak()
    start, folder = _peak(), root / "large" / CONVERSIONS[name][0]
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    target = root / "large" / CONVERSIONS[name][1]
    found: dict[str, list[tuple[float, float]]] = {"own": [], "cp": [], "cp + sha256sum": []}
    for _ in range(rounds):
        found["cp"].append(_timed(root, num_bytes, root / "copy", lambda: _copy(folder, root / "copy")))
        found["own"].append(_timed(root, num_bytes, target, lambda: convert(root, name)))
        found["cp + sha256sum"].append(_timed(root, num_bytes, root / "copy", lambda: _copy(folder, root / "copy", check=True)))
    shutil.rmtree(root / "copy")
    medians = {who: statistics.median(seconds for seconds, _ in times) for who, times in found.items()}
    return {
        "what": name,
        "MiB": num_bytes / MIB,
        "seconds": medians["own"],
        "cp seconds": medians["cp"],
        "cp + sha256sum seconds": medians["cp + sha256sum"],
        "CPU seconds": statistics.median(cpu for _, cpu in found["own"]),
        "cp CPU seconds": statistics.median(cpu for _, cpu in found["cp"]),
        "of cp's speed": medians["cp"] / medians["own"],
        "of cp + sha256sum's speed": medians["cp + sha256sum"] / medians["own"],
        "peak MiB above the start": (_peak() - start) / MIB,
        "largest tensor MiB": LARGE["vocab_size"] * LARGE["hidden_size"] * 2 / MIB,
        "rounds": rounds,
    }


def _timed(root: Path, num_bytes: int, target: Path, act: Callable[[], None]) -> tuple[float, float]:
    """Seconds and CPU seconds, of child processes too."""
    shutil.rmtree(target, ignore_errors=True)
    with open(root / "warm", "wb", buffering=0) as file:
        block = bytes(8 * MIB)
        for _ in range(num_bytes // len(block) + 32):
            file.write(block)
    (root / "warm").unlink()
    os.sync()
    cpu, start = _cpu(), time.perf_counter()
    act()
    return time.perf_counter() - start, _cpu() - cpu


def _copy(source: Path, target: Path, *, check: bool = False) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)
    for path in target.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    if check:
        for folder in (source, target):
            subprocess.run(["sha256sum", *folder.iterdir()], check=True, stdout=subprocess.DEVNULL)


def _cpu() -> float:
    return sum(os.times()[:4])


def _peak() -> int:
    """The most resident memory since ``_forget_peak``, or since the process began."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def measure_loading(root: Path, tp: int) -> list[dict[str, Any]]:
    """Of the first rank."""
    from oslo_engine.checkpoint.folder import model_of
    from oslo_engine.checkpoint.source import open_source
    from oslo_engine.checkpoint.verify import verify_folder
    from oslo_engine.policy.registry import find_policy
    from oslo_engine.rewrite.planning import plan_model
    from oslo_engine.topology import Topology

    verify_folder(root / "small" / "whole")
    folder = root / "large" / "whole"
    source = open_source(folder)
    model = model_of(folder, source)
    plan = plan_model(model, find_policy(None, model.config.model_type), Topology(tp=tp)).plan
    num_read, real = 0, os.preadv

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        nonlocal num_read
        got = real(descriptor, buffers, offset)
        num_read += got
        return got

    os.preadv = counted  # type: ignore[assignment]
    _forget_peak()
    start, held = _peak(), []
    of: dict[str, list[int]] = {"rows": [0, 0], "columns": [0, 0], "not cut": [0, 0]}
    for tensor in plan.tensors:
        if tensor.persistent:
            before = num_read
            shard = tensor.shard
            held.append(source.read(tensor.name, *(() if shard is None else (shard.dim, shard.spans[0]))))
            of_kind = of["not cut" if shard is None else "columns" if shard.dim else "rows"]
            of_kind[0] += held[-1].nbytes
            of_kind[1] += num_read - before
    os.preadv = real
    of["all"] = [sum(each[at] for each in of.values()) for at in (0, 1)]
    peak = (_peak() - start) / MIB
    return [
        {
            "what": f"load at tp={tp}, {kind}",
            "slice MiB": size / MIB,
            "read MiB": read / MIB,
            "read of slice": read / size,
            "peak MiB above the start": peak if kind == "all" else "",
        }
        for kind, (size, read) in of.items()
    ]


# -- what is shown


def table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for title in rows[0]:
        shown.add_column(title)
    for row in rows:
        shown.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(shown)


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    where = {"cpus": os.cpu_count(), "machine": platform.machine(), "load": f"{os.getloadavg()[0]:.1f}"}
    titles = list(dict.fromkeys(title for row in rows for title in row))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*titles, *where], restval="")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()} | where)


def draw(path: Path, conversions: list[dict[str, Any]], loading: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (speed, memory, read) = plt.subplots(1, 3, figsize=(15, 4))
    names = [row["what"].partition(":")[0] for row in conversions]
    positions = range(len(names))
    for shift, who in ((-0.27, "cp seconds"), (0, "seconds"), (0.27, "cp + sha256sum seconds")):
        label = "this" if who == "seconds" else who.removesuffix(" seconds")
        speed.bar([at + shift for at in positions], [row[who] for row in conversions], 0.25, label=label)
    speed.set(title=f"Seconds for {conversions[0]['MiB']:.0f} MiB, fsync included", ylabel="s")
    speed.legend(loc="upper center", ncols=2, fontsize="small")
    memory.bar(positions, [row["peak MiB above the start"] for row in conversions], 0.5)
    limit = conversions[0]["largest tensor MiB"]
    memory.axhline(limit, color="gray", linestyle=":", label="largest tensor")
    memory.axhline(limit + 64, color="red", linestyle="--", label="largest tensor + 64 MiB")
    memory.set(title="Peak memory above the start", ylabel="MiB")
    memory.legend(loc="upper center", ncols=2, fontsize="small")
    for axes in (speed, memory):
        axes.set_xticks(positions, names)
        axes.set_ylim(top=1.25 * axes.get_ylim()[1])  # room for the legend
    kinds = [row["what"].rpartition(", ")[2] for row in loading]
    read.bar(kinds, [row["read of slice"] for row in loading], 0.5)
    read.axhline(1, color="gray", linestyle=":")
    read.set(title="Loading at tp=2: bytes read / bytes of slices")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def in_own_process(*arguments: str) -> Any:
    command = [sys.executable, "-m", "benchmarks.checkpoint", *arguments]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)
    return json.loads(ran.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="where to write some 5 GB for the time being; by default a temporary folder"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "ROOT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if options.child:
        what, root = options.child[0], Path(options.child[1])
        found = measure_loading(root, 2) if what == "load" else measure_conversion(root, what, options.rounds)
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        root = Path(name)
        for size, sizes in (("small", SMALL), ("large", LARGE)):
            write_model(root / size / "whole", sizes)
        conversions = [in_own_process("--rounds", str(options.rounds), "--child", what, name) for what in CONVERSIONS]
        same = (root / "large" / "merged" / "model.safetensors").read_bytes() == (
            root / "large" / "whole" / "model.safetensors"
        ).read_bytes()
        loading = in_own_process("--child", "load", name)
    table(conversions)
    table(loading)
    print(f"merged file equals the first: {same}")
    options.results.mkdir(parents=True, exist_ok=True)
    write_csv(options.results / "checkpoint.csv", [*conversions, *loading])
    draw(options.results / "checkpoint.png", conversions, loading)
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    main()
