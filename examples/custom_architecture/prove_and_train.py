"""A model of your own, split: prove it, then train it.

python prove_and_train.py                                    # proves that the policy is right
torchrun --nproc-per-node=4 prove_and_train.py               # trains it, tp=2 and pp=2
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from modeling import HeronConfig, HeronForCausalLM

import oslo_engine as oslo

POLICY = Path(__file__).parent / "heron.yaml"


def prove() -> int:
    report = oslo.verify(HeronForCausalLM(HeronConfig()), tp=2, pp=2, policy=POLICY)
    print(report)
    return 0 if report.ok else 1


def train(steps: int = 20) -> None:
    torch.manual_seed(0)
    model = oslo.parallelize(HeronForCausalLM(HeronConfig()), tp=2, pp=2, policy=POLICY, micro_batch_size=4)
    optimizer = torch.optim.AdamW(model.gpu_parameters(), lr=1e-3)
    text = torch.randint(0, 1000, (16, 1)) + torch.arange(24)  # count upwards from anywhere
    batch = {"input_ids": text % 1000, "labels": text % 1000}
    for step in range(steps):
        loss = model.train_step(batch)
        optimizer.step()
        optimizer.zero_grad()
        if model.mpu.get_tensor_parallel_rank() == model.mpu.get_pipeline_parallel_rank() == 0:
            print(f"step {step}: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        sys.exit(prove())
