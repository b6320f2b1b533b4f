"""Pre-train GPT-2 in a plain loop, with tensor, pipeline and data parallelism.

    torchrun --nproc-per-node=8 examples/pretrain_gpt2.py --tp 2 --pp 2

Text: the sources of the Python that runs this, read as bytes. ``--model FOLDER`` goes on with a model and tokenizer of yours.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, GPT2Config, GPT2LMHeadModel

import oslo_engine as oslo

LENGTH = 128


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a folder; by default a small model that knows nothing")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", default="gpt2-output")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model) if options.model else ByT5Tokenizer()
    torch.manual_seed(0)  # the same weights on every rank
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model)
    else:
        sizes = {"n_positions": LENGTH, "n_embd": 192, "n_layer": 4, "n_head": 6}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes))
    model = oslo.parallelize(model, tp=options.tp, pp=options.pp, micro_batch_size=4).train()

    mpu = model.mpu
    copies = {"num_replicas": mpu.get_data_parallel_world_size(), "rank": mpu.get_data_parallel_rank()}
    rows = read_text(tokenizer)
    loader = DataLoader(rows, batch_size=16, sampler=DistributedSampler(rows, **copies), drop_last=True)
    ddp = DistributedDataParallel(model.gpu_modules(), process_group=mpu.get_data_parallel_group())
    optimizer = torch.optim.AdamW(model.gpu_parameters(), lr=1e-3)
    for step, batch in zip(range(options.steps), loader, strict=False):
        batch, total = batch.to(model.device), 0.0
        output = ddp(input_ids=batch, labels=batch)
        for micro in output if options.pp > 1 else [output]:
            micro.loss.backward()
            total += micro.loss.item()
        oslo.clip_grad_norm_(ddp, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if torch.distributed.get_rank() == 0:
            print(f"step {step}: loss {total:.4f}", flush=True)
    model.save_pretrained_with_parallel(options.output, save_with_merging=True)


def read_text(tokenizer) -> list[torch.Tensor]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    return list(torch.tensor(tokenizer(text).input_ids).split(LENGTH)[:-1])


if __name__ == "__main__":
    main()
