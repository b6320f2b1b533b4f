"""The example that fine-tunes with LoRA, at small size: what it writes is what plain PEFT and transformers read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.timeout(240)
def test_the_example_trains_and_writes_what_peft_and_transformers_read(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text((ROOT / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["--tp", "2", "--pp", "1", "--steps", "11", "--length", "32", "--text", str(text), "--output", str(tmp_path)]
    done = subprocess.run(
        [*torchrun, str(ROOT / "examples" / "finetune_lora.py"), *options], capture_output=True, text=True, timeout=220
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", done.stdout)]
    assert losses[-1] < losses[0]

    torch.manual_seed(0)
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    base = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, num_key_value_heads=2, **small))
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ids = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-5)
