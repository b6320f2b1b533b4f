"""Small corpora and tokenizers for the tests of data sets."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOD = "<|endoftext|>"
_WORDS = [
    *("the", "a", "of", "and", "to", "in", "is", "that", "it's", "they're", "we'll", "data", "model", "token"),
    *("1", "23", "4567", "don't", "CamelCase", "snake_case", "https://example.org/x?y=1&z=2", "(brackets)", "--", "!?"),
    *("naïve", "café", "你好", "世界", "Привет", "😀", "👩\u200d👩\u200d👧", "\u00a0", "\u3000", "\u200b", "x\u0301"),
]


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of every kind: empty, short, long, with odd spaces and many scripts."""
    chance = random.Random(seed)
    found = []
    for number in range(count):
        words = chance.choices(_WORDS, k=chance.choice((0, 1, 5, 40, 300)))
        text = "".join(word + chance.choice((" ", " ", " ", "  ", "\n", "\t", " \n\n", "")) for word in words)
        found.append(f"{text}{EOD}" if number % 17 == 3 else text)
    return found


def byte_level_bpe(vocab_size: int = 600, **options: Any) -> Tokenizer:
    """A tokenizer of the kind most models have; ``options`` of ByteLevel."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(200, seed=1), trainer)
    return tokenizer


def write_jsonl(path: Path, documents: list[Any], key: str = "text") -> Path:
    lines = [json.dumps({"id": number, key: text}, ensure_ascii=number % 2 == 0) for number, text in enumerate(documents)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def expected_ids(tokenizer: Tokenizer, documents: list[Any], eod: int | None = 0) -> list[list[int]]:
    """What a plain loop over the tokenizer makes of each document."""
    found = []
    for document in documents:
        sequences = [document] if isinstance(document, str) else document
        ids = [token for text in sequences for token in tokenizer.encode(text, add_special_tokens=False).ids]
        found.append([*ids, eod] if ids and eod is not None else ids)
    return found
