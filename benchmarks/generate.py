"""Greedy decoding beside its peers, on one machine: python -m benchmarks.generate

Systems: one process; oslo_engine at tp=2; at pp=2 with the batch as one group and as two; Transformers' own tp_plan at 2. Every
rank is a process with one thread; the systems run in turn, so that a busy machine hits all of them alike.

Figures, per decoded step of the whole batch, the largest over ranks:
  cpu ms     CPU milliseconds of one rank
  of half    the same as a ratio to half of one process's: 1.00 is a perfect split
  KiB        bytes that one rank hands to collectives and sends, and how many of them
  wall ms    only where nothing else runs
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.tensor_parallel import ENVIRONMENT, SHAPES, save_model

Generate = Callable[..., Any]


@dataclass
class Figures:
    """What one rank measured. cpu_ms, wall_ms: per step. calls: kind to (number, bytes) per step. tokens: of the first row."""

    cpu_ms: list[float] = field(default_factory=list)
    wall_ms: list[float] = field(default_factory=list)
    calls: dict[str, tuple[float, float]] = field(default_factory=dict)
    tokens: tuple[int, ...] = ()


def one_process(cls: Any, folder: str) -> Generate:
    return cls.from_pretrained(folder).eval().generate


def oslo(tp: int, pp: int, **settings: Any) -> Callable[[Any, str], Generate]:
    def load(cls: Any, folder: str) -> Generate:
        import oslo_engine

        ours = getattr(oslo_engine, cls.__name__)
        model = ours.from_pretrained_with_parallel(folder, tensor_parallel_size=tp, pipeline_parallel_size=pp)
        return lambda *args, **kwargs: model.generate(*args, **settings, **kwargs)

    return load


def transformers_tp(cls: Any, folder: str) -> Generate:
    from transformers.distributed import DistributedConfig

    return cls.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2)).eval().generate


SYSTEMS: dict[str, tuple[int, Callable[[Any, str], Generate]]] = {
    "one process": (1, one_process),
    "oslo_engine tp=2": (2, oslo(2, 1)),
    "oslo_engine pp=2, one group": (2, oslo(1, 2, decode_groups=1)),
    "oslo_engine pp=2, two groups": (2, oslo(1, 2, decode_groups=2)),
    "transformers tp_plan": (2, transformers_tp),
}


def run_rank(rank: int, system: str, folder: str, store: str, options: argparse.Namespace, results: Any) -> None:
    try:
        results.put((rank, measure(rank, system, folder, store, options)))
    except BaseException:
        results.put((rank, traceback.format_exc()))


def measure(rank: int, system: str, folder: str, store: str, options: argparse.Namespace) -> Figures:
    world, load = SYSTEMS[system]
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = str(world)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    import torch
    import torch.distributed as dist
    import transformers

    from oslo_engine.comm.counter import CollectiveCounter

    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    generate = load(getattr(transformers, SHAPES[options.shape][1]), folder)
    vocabulary = SHAPES[options.shape][2]["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (options.rows, options.prompt), generator=generator)

    def decode(new: int) -> Any:
        # An end that never comes; a least length would be a logits processor.
        return generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=vocabulary)

    figures = Figures()
    decode(2)
    for _ in range(options.repeats):
        if world > 1:
            dist.barrier()
        spent = []
        for new in (1, 1 + options.new):  # the difference is decoding without the prompt
            wall, cpu = time.perf_counter(), time.process_time()
            output = decode(new)
            spent.append((time.process_time() - cpu, time.perf_counter() - wall))
        figures.cpu_ms.append((spent[1][0] - spent[0][0]) / options.new * 1000)
        figures.wall_ms.append((spent[1][1] - spent[0][1]) / options.new * 1000)
    figures.tokens = tuple(output[0].tolist())
    if world > 1 and "two groups" not in system:  # the counter sees one thread
        with CollectiveCounter() as first:
            decode(2)
        with CollectiveCounter() as second:
            decode(6)
        for kind, (number, size) in second.calls.items():
            before = first.calls.get(kind, [0, 0])
            figures.calls[kind] = ((number - before[0]) / 4, (size - before[1]) / 4)
    return figures


def run_system(system: str, folder: str, options: argparse.Namespace) -> list[Figures] | str:
    """The figures of all ranks, or what went wrong."""
    world = SYSTEMS[system][0]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as place:
        arguments = (system, folder, f"{place}/store", options, results)
        processes = [context.Process(target=run_rank, args=(rank, *arguments), daemon=True) for rank in range(world)]
        for process in processes:
            process.start()
        try:
            found = dict(results.get(timeout=options.timeout) for _ in range(world))
        except Exception:
            return f"no answer within {options.timeout} s"
        finally:
            for process in processes:
                process.join(2)
                process.kill()
    failed = next((value for value in found.values() if isinstance(value, str)), None)
    return failed or [found[rank] for rank in range(world)]


def show(rows: list[dict[str, Any]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in ("system", "cpu ms", "of half", "wall ms", "KiB", "calls", "same tokens"):
        table.add_column(column, justify="left" if column in ("system", "calls") else "right")
    for row in rows:
        table.add_row(
            row["system"], f"{row['cpu_ms']:.1f}", f"{row['of_half']:.2f}", f"{row['wall_ms']:.1f}", f"{row['kib']:.1f}",
            ", ".join(f"{number:g} {kind}" for kind, number in row["calls"].items()), str(row["same_tokens"]),
        )  # fmt: skip
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-207m")
    for name, value in (("rows", 8), ("prompt", 16), ("new", 16), ("repeats", 3), ("timeout", 600)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="append the figures to this file, one JSON object a line")
    options = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        save_model(options.shape, folder)
        for system in SYSTEMS:
            ranks = run_system(system, folder, options)
            if isinstance(ranks, str):
                print(f"{system} failed:\n{ranks}")
                continue
            slowest = max(ranks, key=lambda rank: statistics.median(rank.cpu_ms))
            cpu_ms = statistics.median(slowest.cpu_ms)
            half = rows[0]["cpu_ms"] / 2 if rows else cpu_ms / 2
            rows.append(
                {
                    "system": system,
                    "cpu_ms": cpu_ms,
                    "of_half": cpu_ms / half,
                    "wall_ms": min(ranks[0].wall_ms),
                    "kib": sum(size for _, size in slowest.calls.values()) / 1024,
                    "calls": {kind: number for kind, (number, _) in slowest.calls.items()},
                    "tokens": ranks[0].tokens,
                    "same_tokens": not rows or ranks[0].tokens == rows[0]["tokens"],
                }
            )
    show(rows, f"{options.shape}, {options.rows} rows, prompt {options.prompt}, {options.new} steps, fp32, one thread a rank")
    if options.json:
        with options.json.open("a") as file:
            for row in rows:
                kept = {name: value for name, value in row.items() if name != "tokens"}
                about = {"when": datetime.now(UTC).isoformat(timespec="seconds"), "shape": options.shape, "rows": options.rows}
                file.write(json.dumps(about | kept) + "\n")


if __name__ == "__main__":
    main()
