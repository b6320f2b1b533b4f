"""Where documents come from: files of several kinds, tables, any iterable; and how each is divided into units."""

from __future__ import annotations

import glob
import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oslo_engine.data.compressed import COMPRESSIONS, line_blocks
from oslo_engine.data.units import DocumentBlock, TextRange, Unit
from oslo_engine.errors import DataError, MissingDependencyError

KINDS = {".txt": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_ROWS = 256  # of a table that are read at once


@dataclass(frozen=True)
class File:
    """A file of documents.

    Attributes:
        kind: ``txt`` (each line is a document), ``jsonl`` (a JSON object on each line) or ``parquet``.
        key: of the text in an object, or the column.
    """

    path: Path
    kind: str
    key: str

    @property
    def compression(self) -> str | None:
        return self.path.suffix if self.path.suffix in COMPRESSIONS else None

    @property
    def json_key(self) -> str | None:
        return self.key if self.kind == "jsonl" else None

    def units(self, chunk_size: int) -> Iterator[Unit]:
        if self.kind == "parquet":
            return _parquet_units(self, chunk_size)
        if self.compression:
            return line_blocks(self.path, self.compression, self.json_key, chunk_size)
        size = self.path.stat().st_size
        starts = range(0, size, chunk_size)
        return (TextRange(str(self.path), start, min(start + chunk_size, size), self.json_key) for start in starts)

    def identity(self) -> list[Any]:
        """What changes when the file does."""
        found = self.path.stat()
        return [str(self.path), self.kind, self.key, found.st_size, found.st_mtime_ns]


@dataclass(frozen=True)
class JsonLines:
    """What ``DatasetPreprocessor.open_jsonl`` returns: the texts of a file with a JSON object on each line."""

    path: str | os.PathLike[str]
    json_key: str = "text"


def find_files(places: Iterable[str | os.PathLike[str]], key: str, kind: str | None = None) -> list[File]:
    """The files at these paths, in these folders (at any depth) and behind these wildcards; each place's in order of names.

    Hidden files and folders in a folder are left out, as by wildcards.

    Args:
        key: of the text in a JSON object, or column of a table.
        kind: of all files, instead of what their names say.

    Raises:
        DataError: a place has none, or a file's kind is not known.
    """
    if kind is not None and kind not in KINDS.values():
        raise DataError("no such kind of file", expected=", ".join(sorted(set(KINDS.values()))), got=kind)
    found = [file for place in places for file in _files_at(place, key, kind)]
    if not found:
        raise DataError("there is nothing to read", expected="at least one file")
    return found


def _files_at(place: str | os.PathLike[str], key: str, kind: str | None) -> list[File]:
    path = Path(place)
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if file.is_file() and _kind_of(file) and not _hidden(file, path))
        files = [File(file, kind or str(_kind_of(file)), key) for file in inside]
    elif path.exists():
        of_name = kind or _kind_of(path)
        if of_name is None:
            raise DataError(
                "it is not clear what kind of file this is",
                where=str(path),
                expected=f"a name that ends in {', '.join(KINDS)}, with or without {', '.join(COMPRESSIONS)}",
                hint="say it: --format txt, jsonl or parquet",
            )
        files = [File(path, of_name, key)]
    else:
        inside = sorted(Path(name) for name in glob.glob(str(place), recursive=True) if Path(name).is_file())
        files = [file for name in inside for file in _files_at(name, key, kind)]
    if not files:
        raise DataError("there is no such file, and no file of a known kind in it", where=str(place))
    return files


def _hidden(file: Path, folder: Path) -> bool:
    return any(name.startswith(".") for name in file.relative_to(folder).parts)


def _kind_of(path: Path) -> str | None:
    return KINDS.get((path.with_suffix("") if path.suffix in COMPRESSIONS else path).suffix)


def _parquet_units(file: File, chunk_size: int) -> Iterator[Unit]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingDependencyError("parquet files need pyarrow", hint="pip install 'oslo-engine[data]'") from None
    try:
        with parquet.ParquetFile(file.path) as table:
            if file.key not in table.schema_arrow.names:
                raise DataError(
                    "a table has no such column",
                    where=str(file.path),
                    expected=f"one of {', '.join(table.schema_arrow.names)}",
                    got=file.key,
                )
            batches = table.iter_batches(batch_size=_ROWS, columns=[file.key])
            rows = (item for batch in batches for item in batch.column(0).to_pylist())
            yield from document_blocks(rows, chunk_size, str(file.path))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError("cannot read a table", where=str(file.path), got=error) from None


def is_table(source: Any) -> bool:
    """Whether it is a data set of Hugging Face datasets, read at once or streamed."""
    return hasattr(source, "features") and hasattr(source, "column_names") and hasattr(source, "iter")


def table_units(table: Any, key: str, chunk_size: int) -> Iterator[Unit]:
    names = table.column_names
    if names is not None and key not in names:
        raise DataError(
            "a data set has no such column", expected=f"one of {', '.join(names)}", got=key, hint="json_key= names it"
        )
    chosen = table.select_columns([key]) if names is not None else table
    rows = (item for batch in chosen.iter(batch_size=_ROWS) for item in batch[key])
    return document_blocks(rows, chunk_size, type(table).__name__)


def iterable_units(items: Iterable[Any], chunk_size: int) -> Iterator[Unit]:
    """Of documents that are given one by one; a file that was opened as text gives its lines, without their ends."""
    where = str(getattr(items, "name", "")) or type(items).__name__
    if isinstance(items, io.TextIOBase):
        items = (line.removesuffix("\n") for line in items)
    return document_blocks(items, chunk_size, where)


def document_blocks(items: Iterable[Any], chunk_size: int, where: str) -> Iterator[Unit]:
    """Documents in blocks of about ``chunk_size`` characters."""
    block: list[Any] = []
    first = size = 0
    source = iter(items)
    while True:
        try:
            item = next(source)
        except StopIteration:
            break
        except UnicodeDecodeError as error:
            raise DataError("a text is not valid UTF-8", where=f"{where}, item {first + len(block)}", got=error) from None
        block.append(item)
        size += _size(item)
        if size >= chunk_size or len(block) >= chunk_size:
            yield DocumentBlock(where, first, block, size)
            first, block, size = first + len(block), [], 0
    if block:
        yield DocumentBlock(where, first, block, size)


def _size(item: Any) -> int:
    texts = item if isinstance(item, (list, tuple)) else (item,)
    return sum(len(text) if isinstance(text, str) else 1 for text in texts)
