"""Train Llama under DeepSpeed: ZeRO divides the optimizer over copies of a model that is itself split.

    deepspeed --num_gpus 4 examples/deepspeed_zero.py --tp 2            (or torchrun; or accelerate launch)

Text: the sources of the Python that runs this, read as bytes. Without a GPU set DS_ACCELERATOR=cpu.
"""

import argparse
import sysconfig
from pathlib import Path

import deepspeed
import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

import oslo_engine as oslo

LENGTH = 128


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--stage", type=int, default=1, help="of ZeRO: 0 or 1, with --pp 1 up to 3")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", default="deepspeed-output")
    parser.add_argument("--local_rank", help="deepspeed passes it; the environment says the same")
    options = parser.parse_args()

    tokenizer = ByT5Tokenizer()
    torch.manual_seed(0)  # the same weights on every rank
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **sizes))
    model = oslo.parallelize(model, tp=options.tp, pp=options.pp, micro_batch_size=4)

    mpu, rows = model.mpu, read_text(tokenizer)
    copies = {"num_replicas": mpu.get_data_parallel_world_size(), "rank": mpu.get_data_parallel_rank()}
    engine, *_ = deepspeed.initialize(
        model=model.gpu_modules(),
        model_parameters=model.gpu_parameters(),
        optimizer=torch.optim.AdamW(model.gpu_parameters(), lr=1e-3),
        mpu=mpu,
        config={
            "train_micro_batch_size_per_gpu": 16,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": options.stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    loader = DataLoader(rows, batch_size=16, sampler=DistributedSampler(rows, **copies), drop_last=True)
    for step, batch in zip(range(options.steps), loader, strict=False):
        batch, total = batch.to(engine.device), 0.0
        output = engine(input_ids=batch, labels=batch)
        for micro in output if options.pp > 1 else [output]:
            engine.backward(micro.loss)
            total += micro.loss.item()
        engine.step()
        if engine.global_rank == 0:
            print(f"step {step}: loss {total:.4f}", flush=True)
    engine.save_checkpoint(options.output)  # to go on with, at this layout
    model.save_pretrained_with_parallel(f"{options.output}/model", save_with_merging=True)


def read_text(tokenizer) -> list[torch.Tensor]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    return list(torch.tensor(tokenizer(text).input_ids).split(LENGTH)[:-1])


if __name__ == "__main__":
    main()
