"""Tensor parallelism beside its peers, on one machine: python -m benchmarks.tensor_parallel

Systems: one process; oslo_engine at tp=2, with and without sequence parallelism; Transformers' own tp_plan at 2; DeepSpeed
AutoTP at 2. Every rank is a process with one thread. All systems run in the same session, in turn (A B C A B C ...), so that a
busy machine hits all of them alike.

Figures, of a training step (forward, loss, backward; no optimizer), the largest over ranks:
  cpu s      CPU seconds of one rank, all its threads: the cost of the step, however many other things run
  of half    the same as a ratio to half of one process's: 1.00 is a perfect split
  MiB        bytes that one rank puts into collectives, and how many there are
  peak MiB   resident memory above what the imports take, while loading and in a step
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-207m": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "vocab_size": 32000,
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "max_position_embeddings": 1024,
        },
    ),
    "llama-tiny": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
        },
    ),
}
RANKS = 2
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "DS_ACCELERATOR": "cpu",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
Step = Callable[[Any], float]


@dataclass
class Figures:
    """What one rank measured in one round."""

    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    loss: float = float("nan")
    peak_loading_mib: float = float("nan")
    peak_step_mib: float = float("nan")
    collectives: dict[str, list[int]] = field(default_factory=dict)


# -- the systems: each loads the checkpoint and gives a function that makes one step


def one_process(cls: Any, folder: str) -> Step:
    return plain_step(cls.from_pretrained(folder))


def oslo(cls: Any, folder: str, **options: Any) -> Step:
    import oslo_engine

    ours = getattr(oslo_engine, cls.__name__)
    return plain_step(ours.from_pretrained_with_parallel(folder, tensor_parallel_size=RANKS, **options))


def oslo_sequence_parallel(cls: Any, folder: str) -> Step:
    return oslo(cls, folder, sequence_parallel=True)


def transformers_tp(cls: Any, folder: str) -> Step:
    from transformers.distributed import DistributedConfig

    return plain_step(cls.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=RANKS)))


def deepspeed_autotp(cls: Any, folder: str) -> Step:
    import deepspeed
    import torch

    model = cls.from_pretrained(folder)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 0},
        "tensor_parallel": {"autotp_size": RANKS},
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters(), optimizer=optimizer)
    engine.train()

    def step(ids: Any) -> float:
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        for parameter in engine.module.parameters():
            parameter.grad = None
        return loss.item()

    return step


def plain_step(model: Any) -> Step:
    model.train()

    def step(ids: Any) -> float:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return loss.item()

    return step


SYSTEMS: dict[str, tuple[int, Callable[..., Step]]] = {
    "one process": (1, one_process),
    "oslo_engine": (RANKS, oslo),
    "oslo_engine, sequence parallel": (RANKS, oslo_sequence_parallel),
    "transformers tp_plan": (RANKS, transformers_tp),
    "DeepSpeed AutoTP": (RANKS, deepspeed_autotp),
}


# -- one rank


class PeakResident:
    """Highest resident memory of this process over a ``with`` block, in MiB above ``base``; sampled every 5 ms."""

    def __init__(self, base: float) -> None:
        self.base, self.peak, self._stop = base, 0.0, threading.Event()

    def __enter__(self) -> PeakResident:
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, resident_mib() - self.base)


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def run_rank(
    rank: int, system: str, shape: str, folder: str, store: str, options: argparse.Namespace, count: bool, results: Any
) -> None:
    try:
        results.put((rank, measure(rank, system, shape, folder, store, options, count)))
    except BaseException:
        results.put((rank, traceback.format_exc()))


def measure(rank: int, system: str, shape: str, folder: str, store: str, options: argparse.Namespace, count: bool) -> Figures:
    world, set_up = SYSTEMS[system]
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), LOCAL_SIZE=str(world)
    )
    import torch
    import torch.distributed as dist
    import transformers

    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    if "DeepSpeed" in system:
        import deepspeed  # noqa: F401  (its import is not the step's memory)
    cls = getattr(transformers, SHAPES[shape][1])  # imports the modelling file
    base, figures = resident_mib(), Figures()
    with PeakResident(base) as peak:
        step = set_up(cls, folder)
    figures.peak_loading_mib = peak.peak
    ids = torch.randint(
        3, SHAPES[shape][2]["vocab_size"], (options.batch, options.seq), generator=torch.Generator().manual_seed(0)
    )
    with PeakResident(base) as peak:
        step(ids[:, :16].contiguous())
        step(ids)
        for _ in range(options.steps):
            if world > 1:
                dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            figures.loss = step(ids)
            if world > 1:
                dist.barrier()
            figures.cpu_s.append(time.process_time() - cpu)
            figures.wall_s.append(time.perf_counter() - wall)
    figures.peak_step_mib = peak.peak
    if count and world > 1:
        from oslo_engine.comm.counter import CollectiveCounter

        with CollectiveCounter() as counter:
            step(ids)
        figures.collectives = counter.calls
    return figures


# -- all systems


def run_system(system: str, shape: str, folder: str, options: argparse.Namespace, count: bool) -> list[Figures] | str:
    """The figures of all ranks, or what went wrong."""
    world = SYSTEMS[system][0]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as place:
        arguments = (system, shape, folder, f"{place}/store", options, count, results)
        processes = [context.Process(target=run_rank, args=(rank, *arguments), daemon=True) for rank in range(world)]
        for process in processes:
            process.start()
        found: dict[int, Figures | str] = {}
        try:
            while len(found) < world:
                rank, value = results.get(timeout=options.timeout)
                found[rank] = value
                if isinstance(value, str):
                    return value
        except Exception:
            return f"no answer within {options.timeout} s"
        finally:
            for process in processes:
                process.join(2)
                process.kill()
    return [value for _, value in sorted(found.items()) if isinstance(value, Figures)]


def save_model(shape: str, folder: str) -> None:
    import torch
    import transformers

    config_name, class_name, settings = SHAPES[shape]
    torch.manual_seed(0)
    getattr(transformers, class_name)(getattr(transformers, config_name)(**settings)).save_pretrained(folder)


def summarize(system: str, rounds: list[list[Figures]], half_cpu_s: float) -> dict[str, Any]:
    """Medians over steps and rounds of the slowest rank."""
    cpu_s = statistics.median(
        max(rank.cpu_s[step] for rank in ranks) for ranks in rounds for step in range(len(ranks[0].cpu_s))
    )
    calls = rounds[0][0].collectives
    return {
        "system": system,
        "cpu_s": cpu_s,
        "of_half": cpu_s / half_cpu_s if half_cpu_s else float("nan"),
        "wall_s": statistics.median(wall for ranks in rounds for wall in ranks[0].wall_s),
        "collectives": {kind: number for kind, (number, _) in calls.items()},
        "mib": sum(size for _, size in calls.values()) / 2**20,
        "peak_loading_mib": max(rank.peak_loading_mib for ranks in rounds for rank in ranks),
        "peak_step_mib": max(rank.peak_step_mib for ranks in rounds for rank in ranks),
        "loss": rounds[0][0].loss,
    }


def show(rows: list[dict[str, Any]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in ("system", "cpu s", "of half", "MiB", "collectives", "peak loading", "peak step", "loss"):
        table.add_column(column, justify="left" if column in ("system", "collectives") else "right")
    for row in rows:
        if "error" in row:
            table.add_row(row["system"], "failed", *[""] * 6)
            continue
        calls = ", ".join(f"{number} {kind}" for kind, number in row["collectives"].items())
        table.add_row(
            row["system"], f"{row['cpu_s']:.2f}", f"{row['of_half']:.3f}", f"{row['mib']:.1f}", calls,
            f"{row['peak_loading_mib']:.0f}", f"{row['peak_step_mib']:.0f}", f"{row['loss']:.5f}",
        )  # fmt: skip
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-207m")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="comma-separated prefixes")
    for name, value in (("batch", 4), ("seq", 256), ("steps", 2), ("rounds", 3), ("timeout", 600)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="append the figures to this file, one JSON object a line")
    options = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    prefixes = (
        [prefix.strip() for prefix in options.systems.split(",")] if options.systems != ",".join(SYSTEMS) else list(SYSTEMS)
    )
    chosen = [system for system in SYSTEMS if any(system.startswith(prefix) for prefix in prefixes)]
    measured: dict[str, list[list[Figures]]] = {system: [] for system in chosen}
    errors: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        builder = multiprocessing.get_context("spawn").Process(target=save_model, args=(options.shape, folder))
        builder.start()
        builder.join()
        for round_number in range(options.rounds):
            for system in chosen:
                if system in errors:
                    continue
                result = run_system(system, options.shape, folder, options, count=round_number == 0)
                if isinstance(result, str):
                    errors[system] = result
                    print(f"{system} failed:\n{result}", file=sys.stderr)
                else:
                    measured[system].append(result)
                    print(f"round {round_number + 1}  {system}: {[round(cpu, 2) for cpu in result[0].cpu_s]} CPU s", flush=True)
    alone = measured.get("one process")
    half = summarize("one process", alone, 0)["cpu_s"] / 2 if alone else 0.0
    rows = [
        {"system": system, "error": errors[system]} if system in errors else summarize(system, rounds, half)
        for system, rounds in measured.items()
    ]
    show(rows, f"{options.shape}, batch {options.batch} x {options.seq}, fp32, one thread a rank, tp={RANKS}")
    if options.json:
        import torch
        import transformers

        where = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": platform.machine(), "cpus": os.cpu_count()}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        raw = {system: [[asdict(rank) for rank in ranks] for ranks in rounds] for system, rounds in measured.items()}
        with options.json.open("a") as file:
            file.write(json.dumps({**where, **versions, "settings": settings, "rows": rows, "raw": raw}) + "\n")


if __name__ == "__main__":
    main()
