"""LoRA on a model that is split over ranks: fine-tune it on text, save the adapter as PEFT would, and a merged model.

    torchrun --nproc-per-node=4 examples/finetune_lora.py --tp 2 --pp 2 [--model FOLDER] [--text FILE ...]

Without a model a small random one is trained; without text, on the sources of the Python that runs this.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import oslo_engine as oslo

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="folder of a causal language model with its tokenizer")
parser.add_argument("--text", type=Path, nargs="+", default=sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40])
parser.add_argument("--output", type=Path, default=Path("lora-output"))
parser.add_argument("--tp", type=int, default=2)
parser.add_argument("--pp", type=int, default=2)
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--rows", type=int, default=8)
parser.add_argument("--length", type=int, default=128)
options = parser.parse_args()

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
torch.manual_seed(0)
if options.model:
    model = AutoModelForCausalLM.from_pretrained(options.model)
    encode = AutoTokenizer.from_pretrained(options.model).encode
else:
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, num_key_value_heads=2, **small))
    encode = lambda text: list(text.encode())  # noqa: E731  # bytes are tokens
tokens = torch.tensor(encode("\n".join(path.read_text(encoding="utf-8", errors="replace") for path in options.text)))

model = oslo.parallelize(model, tp=options.tp, pp=options.pp, micro_batch_size=max(options.rows // 4, 1))
config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM")
adapted = get_peft_model(model, config).train()
optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-3)

copies, copy = model.mpu.get_data_parallel_world_size(), model.mpu.get_data_parallel_rank()
random = torch.Generator().manual_seed(0)
for step in range(options.steps):
    starts = torch.randint(len(tokens) - options.length, (options.rows * copies,), generator=random).chunk(copies)[copy]
    batch = torch.stack([tokens[start : start + options.length] for start in starts])
    loss = model.train_step({"input_ids": batch, "labels": batch})  # or: for micro in adapted(...): micro.loss.backward()
    oslo.clip_grad_norm_(adapted, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and (step % 10 == 0 or step == options.steps - 1):
        print(f"step {step}: loss {loss.item():.4f}", flush=True)

adapted.save_pretrained_with_parallel(options.output / "adapter")  # peft: PeftModel.from_pretrained(model, folder)
adapted.merge_and_unload().save_pretrained_with_parallel(options.output / "merged", save_with_merging=True)
dist.destroy_process_group()
