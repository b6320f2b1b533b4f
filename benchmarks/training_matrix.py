"""Every way of training a split model beside one process: python -m benchmarks.training_matrix

Each run trains a small model for 20 steps inside one of the usual wrappers and is compared with the unsplit model in one
process: same weights, same data, fp32 unless it says otherwise. Results are kept after every run, so that an interrupted sweep
goes on where it was; ``--again`` runs everything anew. Written: benchmarks/results/training_matrix.json and .md.

Figures, the largest over ranks:
  loss, norm  relative difference of a step's loss and gradient norm, the largest of all steps
  weight      difference of a weight after the last step
  cpu s       CPU seconds of a rank for all steps, and of the one process
  MiB         bytes that a rank puts into collectives and messages in one step, as far as they are started in the Python thread
  activations the most KiB alive at one time of a forward and backward beside weights and gradients (DDP rows)
  optimizer   bytes that a rank keeps in its optimizer (DeepSpeed's flat partitions are not counted by parameter)

A difference is judged by the larger of a fixed limit and what rounding alone does to these 20 steps. In fp32 that is the
distance of the one process from itself in fp64. In bf16 it is the largest distance between any two trainings in one process
whose linear layers add up in other orders: over weights and over rows in 1, 2 or 3 pieces. It grows from step to step, most in
a mixture of experts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SUPPORT = ROOT / "tests" / "support"  # the runs are those of the tests
RESULTS = ROOT / "benchmarks" / "results" / "training_matrix.json"
TABLE = RESULTS.with_suffix(".md")
STEPS = 20
MODELS = ("gpt2", "llama", "bert", "t5", "mixtral")
LAYOUTS = ({"tp": 2, "dp": 2}, {"pp": 2, "dp": 2}, {"tp": 2, "pp": 2})
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
ORDERS = (1, 2, 3)  # pieces of weights and of rows in which linear layers add up
LARGEST = {"loss": 1e-5, "norm": 1e-4, "weight": 1e-4}


def recipes() -> list[Any]:
    from training_runs import Recipe

    def at(model: str, **more: Any) -> Any:
        return Recipe(model, **{"steps": STEPS, **more})

    found = [
        at(model, wrapper=wrapper, **layout)
        for model in MODELS
        for layout in LAYOUTS
        for wrapper in ("ddp", "fsdp2", "zero0", "zero1")
    ]
    found += [at(model, wrapper=wrapper, tp=2, dp=2) for model in MODELS for wrapper in ("zero2", "zero3")]
    for model in ("gpt2", "llama"):
        found += [at(model, pp=2, dp=2, schedule=name) for name in ("gpipe", "interleaved", "zero-bubble", "zero-bubble-v")]
        for layout in LAYOUTS:
            found += [at(model, accumulation=2, **layout), at(model, checkpointing=True, **layout)]
            found += [at(model, autocast="bfloat16", **layout)]
        found += [at(model, tp=2, dp=2, sequence_parallel=True), at(model, tp=2, pp=2, sequence_parallel=True)]
    found += [at(model, lora=True, **layout) for model in MODELS for layout in LAYOUTS]
    return found


def name_of(recipe: Any) -> str:
    told = {"model": "gpt2", "tp": 1, "pp": 1, "dp": 1, "steps": STEPS}
    from training_runs import Recipe

    usual = asdict(Recipe()) | {"steps": STEPS}
    chosen = {key: value for key, value in asdict(recipe).items() if value != usual[key] and key not in told}
    sizes = " x ".join(f"{axis}{getattr(recipe, axis)}" for axis in ("tp", "pp", "dp") if getattr(recipe, axis) > 1)
    words = {
        key: key if value is True else f"{key} {value}" if key == "accumulation" else value for key, value in chosen.items()
    }
    extra = ", ".join(word for key, word in words.items() if key != "wrapper")
    return f"{recipe.model} | {sizes} | {recipe.wrapper}" + (f", {extra}" if extra else "")


def run(recipe: Any, references: dict[Any, Any], pool: Any) -> dict[str, Any]:
    from training_runs import Recipe, differences, distance, spread, train_rank, train_unsplit

    key = (recipe.model, recipe.accumulation, recipe.autocast, recipe.lora)
    if key not in references:
        alone = Recipe(
            recipe.model, steps=recipe.steps, accumulation=recipe.accumulation, autocast=recipe.autocast, lora=recipe.lora
        )
        one = train_unsplit(alone)
        if recipe.autocast:
            rounding = spread([train_unsplit(alone, pieces=pieces) for pieces in product(ORDERS, ORDERS)])
        else:
            rounding = distance(one, train_unsplit(replace(alone, dtype="float64")))
        references[key] = one, rounding
    reference, rounding = references[key]
    try:
        ranks = pool.run(train_rank, recipe, count=True, timeout_s=300)
    except AssertionError as error:
        return {"status": "fail", "reason": str(error)[-600:]}
    found: dict[str, Any] = differences(recipe, reference, ranks)
    passed = all(found[name] <= max(limit, rounding[name]) for name, limit in LARGEST.items())
    return {
        "status": "pass" if passed else "fail",
        **found,
        "rounding": rounding,
        "activation_kib": max(rank.activation_bytes for rank in ranks) / 2**10,
        "cpu_s": max(rank.cpu_s for rank in ranks),
        "cpu_s_of_one": reference.cpu_s,
        "mib": max(sum(size for _, size in rank.collectives.values()) for rank in ranks) / 2**20,
        "optimizer_bytes": max(rank.optimizer_bytes for rank in ranks),
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = [
        "# Training a split model beside one process",
        "",
        f"`python -m benchmarks.training_matrix`: {STEPS} steps of AdamW, clipping at 0.5, 4 blocks x 32 features, CPU,",
        "gloo. Differences are the largest over ranks and steps. In brackets: how far the one process is in fp32 from",
        "itself in fp64, and in bfloat16 from itself with linear layers that add up in another order; where that is more",
        "than 1e-5, 1e-4, 1e-4 it is the limit.",
        "Activations: the most that is alive at one time of a forward and backward, beside weights and gradients.",
        "",
        "| model | layout | how | loss | norm | weight | CPU s (one process) | MiB a step | activations KiB | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        if "loss" not in row:
            lines.append(f"| {name} | | | | | | | {row['status']} |")
            continue
        differences = " | ".join(
            f"{row[kind]:.0e} ({row['rounding'][kind]:.0e})" if row[kind] else "-" for kind in ("loss", "norm", "weight")
        )
        activations = f"{row['activation_kib']:.0f}" if row["activation_kib"] else "-"
        figures = f"{row['cpu_s']:.1f} ({row['cpu_s_of_one']:.1f}) | {row['mib']:.2f} | {activations}"
        lines.append(f"| {name} | {differences} | {figures} | {row['status']} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="run everything anew")
    parser.add_argument("--only", default="", help="runs whose name holds this text")
    arguments = parser.parse_args()
    os.environ |= ENVIRONMENT
    sys.path.insert(0, str(SUPPORT))
    import torch

    from rank_pool import RankPool

    torch.set_num_threads(1)
    known = {} if arguments.again or not RESULTS.exists() else json.loads(RESULTS.read_text())["results"]
    results: dict[str, dict[str, Any]] = {}
    references: dict[Any, Any] = {}
    pools: dict[int, Any] = {}
    try:
        for recipe in recipes():
            name = name_of(recipe)
            if name in known:
                results[name] = known[name]
            elif arguments.only in name:
                pool = pools.setdefault(recipe.ranks, RankPool(recipe.ranks))
                results[name] = run(recipe, references, pool)
                print(name, results[name], flush=True)
                _write(results, known)
    finally:
        for pool in pools.values():
            pool.kill()
    _write(results, known)


def _write(results: dict[str, dict[str, Any]], known: dict[str, dict[str, Any]]) -> None:
    import torch
    import transformers

    every = {name_of(recipe): None for recipe in recipes()}
    merged = {name: results.get(name, known.get(name)) for name in every if name in results or name in known}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}
    RESULTS.write_text(json.dumps({"versions": versions, "results": merged}, indent=1) + "\n")
    TABLE.write_text(table(merged))


if __name__ == "__main__":
    main()
