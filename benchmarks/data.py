"""How fast text is tokenized and windows are read: python -m benchmarks.data CORPUS.jsonl TOKENIZER.json

CORPUS has a JSON object with ``text`` on each line; 50 MB or more of real text give figures that mean something. TOKENIZER is a
byte-level BPE (``--train 16384`` trains one on the corpus and saves it there).

Preprocessing, in megabytes of text per CPU second of all processes, startup included, all ways in turn in every round:
``tokenizers`` alone (``encode_batch_fast`` of all lines, nothing written), a pool as Megatron-LM's script has it
(``json.loads`` and ``encode`` for each line in two workers, the builder of Megatron-Core in the parent), ``datasets.map``, and
this, with two workers, on the general and on the fast path. The files of the two paths and of the pool are compared.

Windows of 2048 tokens at random, per CPU second: contiguous, shuffled documents, and Megatron-Core's GPTDataset (which shuffles
documents too), in turn in every round, all of the same files.

Figures: the median over rounds, and that of the ratio to ``tokenizers`` alone or to GPTDataset in the same round. What is not
installed is left out.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import logging
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
WORKERS = 2
WINDOW = 2048


def cpu_seconds() -> float:
    """Of this process and of all children that have ended."""
    return sum(os.times()[:4])


def train(corpus: Path, path: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    with open(corpus, encoding="utf-8") as file:
        tokenizer.train_from_iterator(
            (json.loads(line)["text"] for number, line in enumerate(file) if number % 4 == 0), trainer
        )
    tokenizer.save(str(path))


# -- the ways to preprocess; each leaves files NAME.bin and NAME.idx, or none


def with_tokenizers_alone(corpus: Path, tokenizer: Path) -> Callable[[], None]:
    """In a process of its own, as the others have them: in one that holds much else it is a third slower."""

    def run() -> None:
        process = multiprocessing.get_context("spawn").Process(target=_encode_all, args=(corpus, tokenizer))
        process.start()
        process.join()

    return run


def _encode_all(corpus: Path, tokenizer: Path) -> None:
    _load(tokenizer)
    with open(corpus, encoding="utf-8") as file:
        while lines := list(itertools.islice(file, 64)):
            _TOKENIZER.encode_batch_fast([json.loads(line)["text"] for line in lines], add_special_tokens=False)


_TOKENIZER: Any = None


def _load(tokenizer: Path) -> None:
    from tokenizers import Tokenizer

    global _TOKENIZER
    _TOKENIZER = Tokenizer.from_file(str(tokenizer))


def _encode_line(line: str) -> list[int]:
    ids: list[int] = _TOKENIZER.encode(json.loads(line)["text"], add_special_tokens=False).ids
    return [*ids, 0] if ids else ids


def with_a_pool(corpus: Path, tokenizer: Path, name: Path) -> Callable[[], None]:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    def run() -> None:
        context = multiprocessing.get_context("spawn")
        builder = IndexedDatasetBuilder(f"{name}.bin", dtype=np.uint16)
        with context.Pool(WORKERS, _load, (tokenizer,)) as pool, open(corpus, encoding="utf-8") as file:
            for ids in pool.imap(_encode_line, file, 32):
                builder.add_document(ids, [len(ids)] if ids else [])
            pool.close()
            pool.join()
        builder.finalize(f"{name}.idx")

    return run


def _encode_rows(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
    return {"ids": [encoding.ids for encoding in _TOKENIZER.encode_batch(rows["text"], add_special_tokens=False)]}


def with_datasets_map(corpus: Path, tokenizer: Path, folder: Path) -> Callable[[], None]:
    import datasets

    datasets.disable_progress_bars()
    _load(tokenizer)
    table = datasets.load_dataset("json", data_files=str(corpus), split="train", cache_dir=str(folder))
    return lambda: table.map(_encode_rows, batched=True, remove_columns=table.column_names, load_from_cache_file=False)


def with_this(corpus: Path, tokenizer: Path, name: Path, fast: bool) -> Callable[[], None]:
    from oslo_engine import DatasetPreprocessor
    from oslo_engine.data.tokenizing import load_tokenizer

    made = DatasetPreprocessor(load_tokenizer(str(tokenizer)), append_eod=True, eod_token_id=0, workers=WORKERS, fast=fast)
    return lambda: made.preprocess(made.open_jsonl(corpus), name, overwrite=True) and None


# -- windows


def windows_of_this(name: Path, arrangement: str) -> Any:
    from oslo_engine import DatasetForCausalLM

    return DatasetForCausalLM(name, WINDOW, arrangement=arrangement)


def windows_of_megatron(name: Path, folder: Path) -> Any:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    class Tokenizer:
        vocab_size, eod, pad, unique_identifiers = 65536, 0, -1, {"name": "benchmark"}

    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=WINDOW,
        split="1,0,0",
        path_to_cache=str(folder),
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        blend=([str(name)], None),
    )
    low = GPTDataset.build_low_level_dataset(str(name), config)
    return GPTDataset(low, str(name), np.arange(len(low), dtype=np.int32), None, Split.train, config)


def windows_per_second(data: Any, count: int = 10_000) -> float:
    picked = np.random.default_rng(0).integers(0, len(data), count).tolist()
    for number in picked[:200]:
        data[number]
    begun = time.process_time()
    for number in picked:
        data[number]
    return count / (time.process_time() - begun)


# -- what is shown


def measure(corpus: Path, tokenizer: Path, rounds: int, folder: Path) -> list[dict[str, Any]]:
    with open(corpus, encoding="utf-8") as file:
        sizes = [len(json.loads(line)["text"].encode()) for line in file]
    size = sum(sizes) / 1e6
    ways: dict[str, Callable[[], Callable[[], None]]] = {
        "tokenizers alone": lambda: with_tokenizers_alone(corpus, tokenizer),
        "pool, as Megatron-LM": lambda: with_a_pool(corpus, tokenizer, folder / "pool"),
        "datasets.map": lambda: with_datasets_map(corpus, tokenizer, folder),
        "this, general path": lambda: with_this(corpus, tokenizer, folder / "general", fast=False),
        "this, fast path": lambda: with_this(corpus, tokenizer, folder / "fast", fast=True),
    }
    speeds = in_turn(ways, rounds, lambda run: size / timed(run))
    readers: dict[str, Callable[[], Any]] = {
        "this, contiguous": lambda: windows_of_this(folder / "fast", "contiguous"),
        "this, shuffled documents": lambda: windows_of_this(folder / "fast", "shuffled"),
        "Megatron-Core GPTDataset": lambda: windows_of_megatron(folder / "fast", folder / "cache"),
    }
    rates = in_turn(readers, rounds, windows_per_second)
    same = {(folder / f"{name}.bin").read_bytes() for name in ("general", "fast", "pool") if (folder / f"{name}.bin").exists()}
    if len(same) != 1:
        raise SystemExit("the files differ")
    print(f"{size:.1f} MB of text in {len(sizes)} documents; all files are the same bytes")
    base = speeds.get("tokenizers alone", [1.0])
    return [
        {
            "what": name,
            "unit": unit,
            "median": statistics.median(found),
            "ratio": ratio(found, first),
            "rounds": len(found),
        }
        for unit, of_unit, first in (
            ("MB per CPU second", speeds, base),
            ("windows per CPU second", rates, rates.get("Megatron-Core GPTDataset", [])),
        )
        for name, found in of_unit.items()
    ]


def ratio(found: list[float], first: list[float]) -> float:
    """The median of the ratios of each round."""
    return statistics.median(one / other for one, other in zip(found, first, strict=True)) if first else float("nan")


def in_turn(ways: dict[str, Callable[[], Any]], rounds: int, figure: Callable[[Any], float]) -> dict[str, list[float]]:
    made = {}
    for name, make in ways.items():
        try:
            made[name] = make()
        except ImportError as error:
            print(f"left out: {name}: {error}")
    found: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds):
        for name, each in made.items():
            found[name].append(figure(each))
            print(f"{name}: {found[name][-1]:.3g}", flush=True)
    return found


def timed(run: Callable[[], None]) -> float:
    begun = cpu_seconds()
    run()
    return cpu_seconds() - begun


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(13, 3.6))
    for axis, unit in zip(axes, ("MB per CPU second", "windows per CPU second"), strict=True):
        of_unit = [row for row in rows if row["unit"] == unit][::-1]
        bars = axis.barh([row["what"] for row in of_unit], [row["median"] for row in of_unit])
        axis.bar_label(bars, fmt="%.3g", padding=3)
        axis.set(title=unit)
        axis.margins(x=0.15)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    where = {"cpus": os.cpu_count(), "machine": platform.machine(), "load": f"{os.getloadavg()[0]:.1f}"}
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*rows[0], *where])
        writer.writeheader()
        for row in rows:
            writer.writerow({key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()} | where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--train", type=int, metavar="SIZE", help="train the tokenizer first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if options.train:
        train(options.corpus, options.tokenizer, options.train)
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options.corpus, options.tokenizer, options.rounds, Path(folder))
    for row in rows:
        print(f"{row['what']:28} {row['median']:10.4g} {row['unit']:24} {row['ratio']:.2f}")
    options.results.mkdir(parents=True, exist_ok=True)
    write_csv(options.results / "data.csv", rows)
    draw(options.results / "data.png", rows)


if __name__ == "__main__":
    main()
