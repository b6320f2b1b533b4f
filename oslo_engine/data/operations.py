"""What can be done with data sets that are there: check them, join them, divide them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oslo_engine.data.builder import IndexedDatasetBuilder
from oslo_engine.data.format import bin_path, idx_path, prefix_of
from oslo_engine.data.indexed import IndexedDataset
from oslo_engine.data.place import sha256
from oslo_engine.data.preprocess import read_manifest
from oslo_engine.data.tokenizing import TokenizerData
from oslo_engine.errors import DataError

_COUNTS = ("documents", "sequences", "tokens")
_TOKENS = 1 << 22  # that are looked at once


@dataclass(frozen=True)
class Facts:
    """What is known of a data set.

    Attributes:
        longest: document, in tokens.
        largest_token: looked up in all of them; None without tokens.
    """

    dtype: str
    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    longest: int
    largest_token: int | None
    bytes: int


def facts_of(name: str | os.PathLike[str]) -> Facts:
    data = IndexedDataset(name)
    lengths = np.diff(data.document_bounds)
    starts = range(0, data.num_tokens, _TOKENS)
    largest = max((int(data.read(start, min(start + _TOKENS, data.num_tokens)).max()) for start in starts), default=None)
    return Facts(
        dtype=data.index.dtype.name,
        documents=data.num_documents,
        empty_documents=int(np.count_nonzero(lengths == 0)),
        sequences=len(data),
        tokens=data.num_tokens,
        longest=int(lengths.max(initial=0)),
        largest_token=largest,
        bytes=bin_path(data.prefix).stat().st_size,
    )


def verify_files(name: str | os.PathLike[str]) -> str:
    """Check the files against each other and against the manifest.

    Returns:
        What was checked, in a sentence.

    Raises:
        DataError: a file is missing, cut short or altered, or a token is not in the vocabulary.
    """
    prefix = prefix_of(name)
    facts, manifest = facts_of(prefix), read_manifest(prefix)
    if manifest is None:
        return f"{facts.documents} documents, {facts.tokens} tokens; no manifest to compare them with"
    for end, expected in manifest["files"].items():
        path = bin_path(prefix) if end == ".bin" else idx_path(prefix)
        found = sha256(path)
        if found != expected["sha256"]:
            raise DataError("a file was altered", where=str(path), expected=f"sha256 {expected['sha256']}", got=found)
    counts = {field: getattr(facts, field) for field in _COUNTS}
    noted = {field: manifest["counts"][field] for field in counts}
    if counts != noted:
        raise DataError("a data set does not have what its manifest says", where=str(prefix), expected=noted, got=counts)
    size = manifest["settings"]["vocab_size"]
    if facts.largest_token is not None and facts.largest_token >= size:
        raise DataError("a token is not in the vocabulary", where=str(prefix), expected=f"< {size}", got=facts.largest_token)
    return f"{facts.documents} documents, {facts.tokens} tokens; checksums, counts and vocabulary as in the manifest"


def merge_files(sources: Sequence[str | os.PathLike[str]], target: str | os.PathLike[str], overwrite: bool = False) -> None:
    """Write the documents of several data sets, one after another, into one.

    Raises:
        DataError: they have tokens of different types or tokenizers, or the target is there.
    """
    if not sources:
        raise DataError("there is nothing to merge", expected="at least one data set")
    prefixes = [prefix_of(source) for source in sources]
    _free(prefix_of(target), overwrite)
    manifests = [read_manifest(prefix) for prefix in prefixes]
    tokenizers = {manifest["settings"]["tokenizer_sha256"] for manifest in manifests if manifest is not None}
    if len(tokenizers) > 1:
        raise DataError("data sets of different tokenizers cannot be merged", where=", ".join(map(str, prefixes)))
    with IndexedDatasetBuilder(target, dtype=IndexedDataset(prefixes[0]).index.dtype) as builder:
        for prefix in prefixes:
            builder.add_index(prefix)
        known = [manifest for manifest in manifests if manifest is not None]
        if len(known) == len(prefixes):
            builder.note(_derived(known, prefixes, {name: sum(each["counts"][name] for each in known) for name in _COUNTS}))


def split_files(source: str | os.PathLike[str], parts: dict[str, float], overwrite: bool = False) -> dict[str, int]:
    """Write consecutive shares of the documents into data sets of their own.

    Args:
        parts: name of each new data set, and its share; the shares add up to 1. A part has the documents that
            ``DatasetForCausalLM`` takes for the same weights.

    Returns:
        The number of documents in each.

    Raises:
        DataError: the shares are wrong, or a target is there.
    """
    if not parts or any(share <= 0 for share in parts.values()) or abs(sum(parts.values()) - 1) > 1e-9:
        raise DataError("shares must be positive and add up to 1", got=parts)
    for name in parts:
        _free(prefix_of(name), overwrite)
    data = IndexedDataset(source)
    edges = np.round(np.cumsum([0.0, *parts.values()]), 12) * data.num_documents
    counts = {}
    for name, first, stop in zip(parts, edges, edges[1:], strict=False):
        counts[name] = _copy(data, name, round(float(first)), round(float(stop)))
    return counts


def _copy(data: IndexedDataset, name: str, first: int, stop: int) -> int:
    sequences, lengths = data.index.documents, data.index.lengths
    with IndexedDatasetBuilder(name, dtype=data.index.dtype) as builder:
        for document in range(first, stop):
            of_document = slice(int(sequences[document]), int(sequences[document + 1]))
            builder.add_document(data.document(document), lengths[of_document].tolist())
        manifest = read_manifest(data.prefix)
        if manifest is not None:
            num_tokens = int(data.document_bounds[stop] - data.document_bounds[first])
            counts = (stop - first, int(sequences[stop] - sequences[first]), num_tokens)
            builder.note(_derived([manifest], [data.prefix], dict(zip(_COUNTS, counts, strict=True))))
    return stop - first


def _derived(manifests: list[dict[str, Any]], sources: list[Path], counts: dict[str, int]) -> dict[str, Any]:
    """The manifest of a data set that was made of others."""
    settings = manifests[0]["settings"] | {"sources": [[str(source)] for source in sources]}
    skipped = {"skipped": sum(manifest["counts"]["skipped"] for manifest in manifests)}
    left_out = [each for manifest in manifests for each in manifest["left_out"]]
    return manifests[0] | {"settings": settings, "counts": counts | skipped, "left_out": left_out}


def _free(prefix: Path, overwrite: bool) -> None:
    if idx_path(prefix).exists() and not overwrite:
        raise DataError("there is a data set of that name", where=str(prefix), hint="overwrite=True, --overwrite")


def decoded(tokenizer: TokenizerData, tokens: Any) -> str:
    """The text of some tokens."""
    if tokenizer.is_json:
        from tokenizers import Tokenizer

        return str(Tokenizer.from_str(tokenizer.content.decode()).decode(list(map(int, tokens)), skip_special_tokens=False))
    return str(pickle.loads(tokenizer.content).decode(list(map(int, tokens))))
