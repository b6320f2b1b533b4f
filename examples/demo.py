"""The main job, small: GPT-2 trained on real text over 4 processes, beside the same model in one process.

    torchrun --nproc-per-node=4 examples/demo.py            (or: make demo)

Text: the source code of the Python that runs this. Two tensor-parallel ranks times two pipeline stages train with
micro-batches; a fifth process trains the unsplit model from the same seed on the same batches. Written to ``demo-output/``:
both loss curves, the timeline of one pipelined batch, a split checkpoint, and a merged one that plain transformers loads and
continues a text with.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging as transformers_logging

import oslo_engine as oslo

SEED = 0
ROWS, LENGTH = 16, 128  # of a batch
MICRO_BATCH = 4
LEARNING_RATE, WARMUP = 1e-3, 10
PROMPT = "def __init__(self"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--one-process", action="store_true", help="train the unsplit model (started by the demo itself)")
    options = parser.parse_args()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    if options.one_process:
        train_unsplit(options.output, options.steps)
    else:
        train_split(options.output, options.steps)


def train_split(output: Path, steps: int) -> None:
    dist.init_process_group("nccl" if torch.cuda.device_count() >= 4 else "gloo")
    first = dist.get_rank() == 0
    unsplit = None
    if first:
        prepare_text(output)
        unsplit = subprocess.Popen([sys.executable, __file__, "--one-process", "--output", output, "--steps", str(steps)])
    dist.barrier()

    torch.manual_seed(SEED)
    model = oslo.parallelize(GPT2LMHeadModel(config_for(output)), tp=2, pp=2, micro_batch_size=MICRO_BATCH)
    optimizer, schedule = optimizer_for(model.gpu_parameters())
    losses = []
    model.train()
    with progress_bar(disable=not first) as bar:
        task = bar.add_task("tp=2 pp=2", total=steps, loss=float("nan"))
        for batch in batches(output, steps):
            optimizer.zero_grad()
            loss = 0.0
            for micro in model(input_ids=batch, labels=batch):
                micro.loss.backward()
                loss += micro.loss.item()
            oslo.clip_grad_norm_(model, 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss)
            bar.update(task, advance=1, loss=loss)

    draw_timeline(model, next(batches(output, 1)), output / "timeline.png")
    model.save_pretrained_with_parallel(output / "split")
    model.save_pretrained_with_parallel(output / "merged", save_with_merging=True)
    if first:
        report(losses, unsplit, output)
    dist.destroy_process_group()


def train_unsplit(output: Path, steps: int) -> None:
    torch.manual_seed(SEED)
    model = GPT2LMHeadModel(config_for(output))
    optimizer, schedule = optimizer_for(model.parameters())
    losses = []
    model.train()
    for batch in batches(output, steps):
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    (output / "one-process.json").write_text(json.dumps(losses))


def prepare_text(output: Path) -> None:
    """Train a byte-level BPE on the standard library's sources and encode them."""
    output.mkdir(parents=True, exist_ok=True)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(file) for file in files], vocab_size=4096, min_frequency=2, show_progress=False)
    tokenizer.save_model(str(output))
    text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    tokens = torch.tensor(tokenizer.encode(text).ids)
    torch.save(tokens, output / "tokens.pt")
    print(
        f"text: {len(files)} files, {len(text) / 2**20:.1f} MiB; {len(tokens):,} tokens of {tokenizer.get_vocab_size():,} kinds"
    )


def config_for(output: Path) -> GPT2Config:
    vocabulary = len(json.loads((output / "vocab.json").read_text()))
    # No dropout: two runs draw other masks, and their losses are to be compared.
    return GPT2Config(
        vocab_size=vocabulary, n_positions=LENGTH, n_embd=192, n_layer=4, n_head=6, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


def optimizer_for(parameters):
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP, total_iters=WARMUP)


def batches(output: Path, steps: int):
    tokens = torch.load(output / "tokens.pt")
    random = torch.Generator().manual_seed(SEED)
    for _ in range(steps):
        starts = torch.randint(0, len(tokens) - LENGTH, (ROWS,), generator=random)
        yield torch.stack([tokens[start : start + LENGTH] for start in starts])


def progress_bar(disable: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}"), disable=disable)


def draw_timeline(model, batch: torch.Tensor, path: Path) -> None:
    """Record one pipelined batch and draw what every stage computed when."""
    with oslo.record_timeline(model) as timeline:
        model.train_step({"input_ids": batch, "labels": batch})
    timeline.draw(path)


def report(losses: list[float], unsplit: subprocess.Popen, output: Path) -> None:
    start = time.perf_counter()
    if unsplit.wait() != 0:
        raise SystemExit("the one-process run failed")
    alone = json.loads((output / "one-process.json").read_text())
    print(f"waited {time.perf_counter() - start:.0f} s for the one-process run")
    difference = max(abs(ours - theirs) for ours, theirs in zip(losses, alone, strict=True))
    print(f"loss in 4 processes: {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(f"loss in 1 process:   {alone[0]:.4f} -> {alone[-1]:.4f}")
    print(f"largest difference over {len(losses)} steps: {difference:.2e}")
    draw_losses(losses, alone, difference, output / "loss.png")

    tokenizer = ByteLevelBPETokenizer(str(output / "vocab.json"), str(output / "merges.txt"))
    merged = GPT2LMHeadModel.from_pretrained(output / "merged")
    ids = torch.tensor([tokenizer.encode(PROMPT).ids])
    written = merged.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)
    print(f"the merged model, loaded by transformers, continues {PROMPT!r}:\n{tokenizer.decode(written[0].tolist())}")
    print(f"pictures and checkpoints: {output}/")
    if difference > 1e-3:
        raise SystemExit("the split model's losses are not the unsplit model's")


def draw_losses(losses: list[float], alone: list[float], difference: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(alone, label="one process", linewidth=4, color="#c9d6e8")
    axes.plot(losses, label="tp=2, pp=2 (4 processes)", linewidth=1.2, color="#1f4e8c")
    axes.set(xlabel="step", ylabel="loss", title=f"GPT-2 on Python's own sources; largest difference {difference:.1e}")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
