"""What the children of the tests of killed preparations do; they import it by name."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from oslo_engine.data import draft
from oslo_engine.data.preprocess import DatasetPreprocessor

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
