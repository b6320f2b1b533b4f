"""What the children of the tests of preparations do and use; they import it by name."""

from __future__ import annotations

import os
import pathlib
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from oslo_engine.data import draft
from oslo_engine.data.preprocess import DatasetPreprocessor
from oslo_engine.errors import DataError

# Where what is on the disk changes, or is seen to be there.
STEPS = ((os, "fsync"), (os, "replace"), (pathlib.Path, "unlink"), (shutil, "rmtree"))


def prepare(folder: Path, name: str = "out", workers: int = 0, **options: Any) -> None:
    draft._COMMIT_SECONDS = 0.0  # note every unit
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made = DatasetPreprocessor(tokenizer, append_eod=True, eod_token_id=0, workers=workers, chunk_size=3000, fast=False)
    made.preprocess(folder / "a.jsonl", folder / name, **options)


def prepare_and_tell(folder: Path, workers: int, started: Any) -> None:
    os.setpgid(0, 0)
    started.set()
    prepare(folder, workers=workers)


def prepare_and_die(folder: Path, step: int, overwrite: bool) -> None:
    """Ends at once, as if killed, before the given step; the steps are numbered as they come."""
    count = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **options: Any) -> Any:
            nonlocal count
            if count == step:
                os._exit(9)
            count += 1
            return real(*args, **options)

        return act

    for owner, name in STEPS:
        setattr(owner, name, counted(getattr(owner, name)))
    prepare(folder, overwrite=overwrite)


def prepare_with_little_room(folder: Path, told: Any) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        prepare(folder)
    except DataError as error:
        told.send(str(error))
    else:
        told.send("")


class Letters:
    """A tokenizer of another library."""

    name_or_path, eos_token_id = "letters", 1

    def get_vocab(self) -> dict[str, int]:
        return {chr(code): code for code in range(256)}

    def __len__(self) -> int:
        return 256

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(letter) for letter in text]
