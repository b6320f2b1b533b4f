"""Putting the finished files of a data set in place, so that an ``.idx`` that is there always opens onto its ``.bin``."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from oslo_engine.data.format import bin_path, idx_path


def manifest_path(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.manifest.json")


def put_in_place(prefix: Path, tokens: Path, index: Path, manifest: Path | None = None) -> None:
    """Rename finished files to ``prefix``: first the old index goes, last the new one comes.

    Killed in between, it can be called again: a file that is no longer there has been put in place. The files must lie on
    the same file system as ``prefix``.
    """
    if index.exists():
        if tokens.exists():
            idx_path(prefix).unlink(missing_ok=True)
            sync(prefix.parent)
            os.replace(tokens, bin_path(prefix))
        if manifest is None:
            manifest_path(prefix).unlink(missing_ok=True)
        elif manifest.exists():
            os.replace(manifest, manifest_path(prefix))
        sync(prefix.parent)
        os.replace(index, idx_path(prefix))
    sync(prefix.parent)


def write_manifest(path: Path, content: dict[str, Any], files: dict[str, Path]) -> None:
    """Write what is to be known about a data set, with the sizes and checksums of its files, and see it to the disk."""
    sums = {end: {"bytes": file.stat().st_size, "sha256": sha256(file)} for end, file in files.items()}
    path.write_text(json.dumps(content | {"files": sums}, indent=2) + "\n", encoding="utf-8")
    sync(path)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Make sure that a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
