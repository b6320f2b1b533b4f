"""A deployed model under load: python -m benchmarks.serving

The same requests, from 1, 8 and 32 callers at once, to oslo_engine at tp=2, and one after the other to a model in this process.
Every request is a prompt of its own length; every answer has the same number of new tokens.

Figures:
  tokens/s             of all callers together, by the wall: only where nothing else runs
  tokens/cpu s         by the CPU seconds of all workers
  ms, ms of 95 %       from the request to its answer: median, and what 95 of 100 stay below
  first ms             to the first token
  no-op ms             a call that does nothing, median
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.tensor_parallel import ENVIRONMENT, SHAPES, save_model


def cpu_seconds(pids: tuple[int, ...]) -> float:
    """User and system time of processes so far."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def load(ask: Callable[[Any], float], prompts: list[Any], callers: int) -> tuple[float, list[float], list[float]]:
    """Seconds in all; seconds of each request, and to its first token. Callers take the next prompt when they are ready."""
    waiting, lock = list(prompts), threading.Lock()
    seconds: list[float] = []
    first: list[float] = []

    def caller() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                prompt = waiting.pop()
            start = time.perf_counter()
            to_first = ask(prompt)
            with lock:
                seconds.append(time.perf_counter() - start)
                first.append(to_first)

    threads = [threading.Thread(target=caller) for _ in range(callers)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start, seconds, first


def row(name: str, callers: int, new: int, told: tuple[float, list[float], list[float]], cpu_s: float) -> dict[str, Any]:
    in_all, seconds, first = told
    ordered = sorted(seconds)
    return {
        "system": name,
        "callers": callers,
        "tokens_s": len(seconds) * new / in_all,
        "tokens_cpu_s": len(seconds) * new / cpu_s,
        "ms": statistics.median(seconds) * 1000,
        "ms_95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))] * 1000,
        "first_ms": statistics.median(first) * 1000,
    }


def in_this_process(model: Any, prompts: list[Any], settings: dict[str, Any]) -> dict[str, Any]:
    def ask(prompt: Any) -> float:
        start = time.perf_counter()
        model.generate(prompt, **settings)
        return time.perf_counter() - start

    ask(prompts[0])
    cpu = time.process_time()
    told = load(ask, prompts, 1)
    return row("in this process", 1, settings["max_new_tokens"], told, time.process_time() - cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-207m")
    for name, value in (("requests", 64), ("new", 16), ("tp", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--callers", default="1,8,32")
    parser.add_argument("--json", type=Path, help="append the figures to this file, one JSON object a line")
    options = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import torch
    import transformers

    import oslo_engine

    torch.set_num_threads(1)
    class_name, vocabulary = SHAPES[options.shape][1], SHAPES[options.shape][2]["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, vocabulary, (1, 8 + at % 9), generator=generator) for at in range(options.requests)]
    settings = {"max_new_tokens": options.new, "min_new_tokens": options.new, "do_sample": False, "pad_token_id": 0}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        save_model(options.shape, folder)
        few = prompts[: max(8, options.requests // 8)]
        rows.append(in_this_process(getattr(transformers, class_name).from_pretrained(folder).eval(), few, settings))
        deployment = oslo_engine.Deployment(threads_per_worker=1)
        with getattr(oslo_engine, class_name).from_pretrained_with_parallel(
            folder, tensor_parallel_size=options.tp, deployment=deployment
        ) as model:

            def ask(prompt: Any) -> float:
                start, first = time.perf_counter(), 0.0
                for _ in model.stream(prompt, **settings):
                    first = first or time.perf_counter() - start
                return first

            ask(prompts[0])
            for callers in map(int, options.callers.split(",")):
                some = prompts if callers > 1 else few
                before = cpu_seconds(model.health().pids)
                told = load(ask, some, callers)
                spent = cpu_seconds(model.health().pids) - before
                rows.append(row(f"deployed, tp={options.tp}", callers, options.new, told, spent))
            no_op = []
            for _ in range(200):
                start = time.perf_counter()
                model.call("num_parameters")
                no_op.append(time.perf_counter() - start)
    show(rows, f"{options.shape}, {options.new} new tokens a request, fp32; no-op {statistics.median(no_op) * 1000:.2f} ms")
    if options.json:
        with options.json.open("a") as file:
            for one in rows:
                about = {"when": datetime.now(UTC).isoformat(timespec="seconds"), "shape": options.shape}
                file.write(json.dumps(about | one) + "\n")


def show(rows: list[dict[str, Any]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in ("system", "callers", "tokens/s", "tokens/cpu s", "ms", "ms of 95 %", "first ms"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for one in rows:
        figures = (one[name] for name in ("tokens_s", "tokens_cpu_s", "ms", "ms_95", "first_ms"))
        table.add_row(one["system"], str(one["callers"]), *(f"{figure:.1f}" for figure in figures))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
