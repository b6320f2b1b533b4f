"""What a device map costs, beside accelerate's dispatch: python -m benchmarks.device_map

CPU time, with all parts on the CPU: small random models, where hooks weigh most. One process, one thread; a round calls every
system once, in turn. Figures: the lower quartile of CPU seconds of a call, which other work on the machine disturbs less than
the median, and those as a ratio to the plain model's.
    forward, generate     plain = 1
    hooks and copies      the same on two pretend devices (tests/support/pretend_devices.py: their kernels run on the CPU),
                          where plain is the model on one of them
    Trainer.evaluate      of a T5, CPU seconds a sample
Copies between devices in one forward and in a generation of some tokens, on two and on four pretend devices, counted.
"""

from __future__ import annotations

import argparse
import copy
import csv
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SUPPORT = ROOT / "tests" / "support"  # the pretend devices are those of the tests
MODELS = {"gpt2": "causal", "llama": "causal", "t5": "seq2seq"}
SYSTEMS = ("plain", "oslo_engine", "accelerate")
NEW_TOKENS = 8
Act = Callable[[], Any]
Row = dict[str, Any]


def placed(model: Any, system: str, devices: tuple[str, ...]) -> Any:
    """A copy of a model, its blocks dealt to the devices, in order."""
    from oslo_engine import parallelize
    from placed_models import spread

    ours = parallelize(copy.deepcopy(model), device_map=spread(model, devices))
    if system == "oslo_engine":
        return ours
    if system == "plain":
        one = copy.deepcopy(model).to(devices[0])
        one.tie_weights()
        return one
    from accelerate import dispatch_model

    by_path = {path: str(device) for path, device in ours.device_map.items()}
    other = dispatch_model(copy.deepcopy(model), device_map=by_path, force_hooks=True)
    other.tie_weights()
    return other


def acts(model: Any, batch: dict[str, Any], inputs: dict[str, Any], device: str) -> dict[str, Act]:
    import torch

    given = {name: value.to(device) for name, value in inputs.items()}

    @torch.no_grad()
    def forward() -> Any:
        return model(**batch)

    def generate() -> Any:
        return model.generate(**given, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)

    return {"forward": forward, "generate": generate}


def in_turn(systems: dict[str, Act], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of every round; who begins changes."""
    for act in systems.values():
        act()
    names, found = list(systems), {name: [] for name in systems}  # type: dict[str, list[float]]
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = time.process_time()
            systems[name]()
            found[name].append(time.process_time() - start)
    return found


def lower_quartile(values: list[float]) -> float:
    return sorted(values)[len(values) // 4]


def ratios(what: str, model: str, times: dict[str, list[float]]) -> list[Row]:
    rows = [
        {
            "what": what,
            "model": model,
            "system": name,
            "CPU ms": 1e3 * lower_quartile(own),
            "of plain": lower_quartile(own) / lower_quartile(times["plain"]),
        }
        for name, own in times.items()
    ]
    for row in rows:
        print("  ".join(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()), flush=True)
    return rows


def measure_time(rounds: int) -> list[Row]:
    from placed_models import text_model

    rows = []
    for devices, label, slower in (
        (("cpu",), "", {"forward": 10, "generate": 1}),
        (("sim:0", "sim:1"), "hooks and copies: ", None),
    ):
        for name, task in MODELS.items():
            model, batch, inputs = text_model(task, name)
            assert inputs is not None
            by_system = {}
            for system in SYSTEMS:
                own = {key: value.to(devices[0]) for key, value in batch.items()}
                by_system[system] = acts(placed(model, system, devices), own, inputs, devices[0])
            for what in ("forward", "generate"):
                acts_here = {system: by_system[system][what] for system in SYSTEMS}
                times = in_turn(acts_here, rounds * {"forward": 5, "generate": 1}[what] // slower)
                rows += ratios(label + what, name, times)
    return rows


def measure_trainer(rounds: int) -> list[Row]:
    import torch
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    from placed_models import text_model

    model, _, _ = text_model("seq2seq", "t5")
    ids = torch.randint(3, 60, (32, 9), generator=torch.Generator().manual_seed(0))
    samples = [{"input_ids": each, "attention_mask": torch.ones_like(each), "labels": each[:5].clone()} for each in ids]
    with tempfile.TemporaryDirectory() as folder:
        arguments = Seq2SeqTrainingArguments(
            folder,
            per_device_eval_batch_size=8,
            report_to=[],
            predict_with_generate=True,
            generation_max_length=8,
            use_cpu=True,
        )
        arguments.disable_tqdm = True
        trainers = {
            system: Seq2SeqTrainer(model=placed(model, system, ("cpu",)), args=arguments, eval_dataset=samples)
            for system in SYSTEMS
        }
        times = in_turn({system: trainer.evaluate for system, trainer in trainers.items()}, rounds)
    return ratios("Trainer.evaluate", "t5", {system: [each / len(samples) for each in own] for system, own in times.items()})


def measure_copies() -> list[Row]:
    from placed_models import DEVICES, text_model
    from pretend_devices import count_copies

    rows = []
    for number in ("2", "4"):
        for name, task in MODELS.items():
            model, batch, inputs = text_model(task, name)
            assert inputs is not None
            for system in SYSTEMS[1:]:
                for what, act in acts(placed(model, system, DEVICES[number]), batch, inputs, DEVICES[number][0]).items():
                    act()
                    with count_copies() as copies:
                        act()
                    rows.append({"what": f"{what}, {number} devices", "model": name, "system": system, **copies})
    return rows


def draw(path: Path, times: list[Row], copies: list[Row]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (time_axes, copy_axes) = plt.subplots(1, 2, figsize=(15, 5))
    for axes, rows, figure_of in ((time_axes, times, "of plain"), (copy_axes, copies, "between")):
        places = list(dict.fromkeys((row["what"], row["model"]) for row in rows))
        for shift, (system, colour) in ((-0.2, ("oslo_engine", "#2471a3")), (0.2, ("accelerate", "#e59866"))):
            own = {(row["what"], row["model"]): row[figure_of] for row in rows if row["system"] == system}
            axes.barh(
                [at + shift for at in range(len(places))], [own[place] for place in places], 0.4, label=system, color=colour
            )
        axes.set_yticks(range(len(places)), [f"{what}\n{model}" for what, model in places], fontsize=7)
        axes.invert_yaxis()
        axes.legend(loc="upper right")
    time_axes.axvline(1.05, color="red", linestyle="--", linewidth=1)
    time_axes.axvline(1, color="gray", linestyle=":", linewidth=1)
    time_axes.set_xlim(left=0.8)
    time_axes.set(title="CPU time, plain model = 1 (dashed: 1.05)")
    copy_axes.set(title="Copies between devices")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def write_csv(path: Path, rows: list[Row]) -> None:
    where = {"cpus": os.cpu_count(), "machine": platform.machine(), "load": f"{os.getloadavg()[0]:.1f}"}
    titles = list(dict.fromkeys(title for row in rows for title in row))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*titles, *where], restval="")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()} | where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    sys.path.insert(0, str(SUPPORT))
    import torch

    torch.set_num_threads(1)
    import pretend_devices

    trainer = measure_trainer(options.rounds)  # before torch has an accelerator, which the trainer would prefer
    pretend_devices.install()
    times = [*trainer, *measure_time(options.rounds)]
    copies = measure_copies()
    for row in copies:
        print("  ".join(map(str, row.values())))
    options.results.mkdir(parents=True, exist_ok=True)
    write_csv(options.results / "device_map.csv", [*times, *copies])
    draw(options.results / "device_map.png", times, copies)


if __name__ == "__main__":
    main()
