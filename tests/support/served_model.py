"""``oslo-engine serve`` as a process of its own, and a small model with a tokenizer to serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import oslo_engine

TEXT = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs, and then some more: 0123456789."
CHAT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def save_small_model(folder: Path) -> Any:
    """A model with 300 tokens that are bytes and more, and 128 positions."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", chat_template=CHAT)
    fast.save_pretrained(folder)
    config = GPT2Config(
        vocab_size=len(fast),
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = GPT2LMHeadModel(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.3, generator=generator)
    model.save_pretrained(folder)
    return model.eval()


class Served:
    """url: of the server. lines: what it has logged so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.lines, self.url = process, [], ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                self.lines.append(json.loads(line))
            except ValueError:
                self.lines.append({"event": line})

    def wait_until_listening(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            for line in list(self.lines):
                if line["event"] == "listening":
                    self.url = f"http://127.0.0.1:{line['port']}"
                    return
            time.sleep(0.05)
        raise AssertionError(f"the server did not start: {self.lines}")


@contextmanager
def served(model: Path, *options: str, timeout_s: float = 100) -> Iterator[Served]:
    code = "from oslo_engine.cli.main import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(Path(oslo_engine.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", str(model), "--port", "0", *options],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    server = Served(process)
    try:
        server.wait_until_listening(timeout_s)
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
