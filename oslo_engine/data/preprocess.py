"""From texts to a data set in Megatron's format."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from oslo_engine.data.draft import Draft, Progress
from oslo_engine.data.encoding import EncodingPlan
from oslo_engine.data.fast_bpe import FastPathDiffersError, fast_path_obstacle
from oslo_engine.data.format import dtype_for, idx_path, prefix_of
from oslo_engine.data.indexed import IndexedDataset
from oslo_engine.data.lines import line_number
from oslo_engine.data.place import manifest_path
from oslo_engine.data.readers import check_implementation
from oslo_engine.data.sources import File, JsonLines, find_files, is_table, iterable_units, table_units
from oslo_engine.data.tokenizing import tokenizer_data
from oslo_engine.data.units import Problem, TextRange, Unit, chained_digest
from oslo_engine.data.workers import encode_units
from oslo_engine.errors import DataError

logger = logging.getLogger(__name__)

FORMAT = 1  # of the manifest and the draft
ProgressReport = Callable[[Progress, int | None], None]


class DatasetPreprocessor:
    """Tokenizes texts and writes ``NAME.bin``, ``NAME.idx`` and ``NAME.manifest.json``.

        preprocessor = DatasetPreprocessor(tokenizer, append_eod=True)
        preprocessor.preprocess(preprocessor.open_jsonl("wiki.jsonl.gz"), save_file_name="wiki")

    The files do not depend on the number of workers. A call that was killed goes on where it was when it is made again.

    Args:
        tokenizer: of Transformers, or of the ``tokenizers`` library.
        chunk_size: bytes of text that are one piece of work for a worker.
        binarization_impl: how the data set that ``preprocess`` returns is read: ``mmap``, ``lazy`` or ``cached``.
        append_eod: end each document that is not empty with ``eod_token_id``.
        eod_token_id: by default what the tokenizer says ends a text.
        workers: processes that tokenize; 0: this one. By default as many as there are cores for this process.
        on_error: ``stop``: a record that is no document ends the call with an error that says where it is; ``skip``: it is left
            out and counted.
        fast: encode with tiktoken where it is shown to give the same ids, see docs/data.md.

    Raises:
        DataError: an argument is wrong.
    """

    def __init__(
        self,
        tokenizer: Any,
        chunk_size: int = 1 << 21,
        binarization_impl: str = "mmap",
        append_eod: bool = False,
        eod_token_id: int | None = None,
        *,
        workers: int | None = None,
        on_error: str = "stop",
        fast: bool = True,
    ) -> None:
        self.tokenizer = tokenizer_data(tokenizer)
        self.binarization_impl = check_implementation(binarization_impl)
        if chunk_size < 1:
            raise DataError("chunk_size must be positive", got=chunk_size)
        if on_error not in ("stop", "skip"):
            raise DataError("no such way to deal with bad records", expected="stop or skip", got=repr(on_error))
        self.chunk_size, self.on_error = chunk_size, on_error
        self.workers = len(os.sched_getaffinity(0)) if workers is None else workers
        if self.workers < 0:
            raise DataError("there cannot be fewer than no workers", got=workers)
        self.eod = self._eod(append_eod, eod_token_id)
        self.fast = fast

    def _eod(self, append: bool, token_id: int | None) -> int | None:
        if not append:
            if token_id is not None:
                raise DataError(
                    "eod_token_id is given, but documents are not ended with it",
                    got=f"eod_token_id={token_id}",
                    hint="append_eod=True, --append-eod",
                )
            return None
        found = self.tokenizer.eos_token_id if token_id is None else token_id
        if found is None:
            raise DataError("append_eod needs a token", where=self.tokenizer.name, hint="give eod_token_id")
        size = self.tokenizer.vocab_size
        if not 0 <= found < size:
            raise DataError("eod_token_id is not in the vocabulary", expected=f"0 to {size - 1}", got=found)
        return found

    @staticmethod
    def open_jsonl(path: str | os.PathLike[str], json_key: str = "text") -> JsonLines:
        """The texts of a file with a JSON object on each line; also of many, by a folder or wildcards."""
        return JsonLines(path, json_key)

    def preprocess(
        self,
        iterable: Any,
        save_file_name: str | os.PathLike[str],
        log_interval: int = 100_000,
        *,
        json_key: str = "text",
        file_format: str | None = None,
        overwrite: bool = False,
        resume: bool = True,
        report: ProgressReport | None = None,
    ) -> IndexedDataset:
        """Write the data set, and open it.

        Args:
            iterable: texts (or lists of texts: a document of several sequences); or what ``open_jsonl`` returned; or a path, or
                a list of ``Path`` objects, of files, folders or wildcards: ``.txt`` (each line is a document), ``.jsonl`` and
                ``.parquet``, the first two also with ``.gz`` or ``.zst``; or a data set of Hugging Face datasets.
            save_file_name: common name of the files.
            log_interval: documents after which a line is logged.
            json_key: of the text in a JSON object, or the column of a table.
            file_format: ``txt``, ``jsonl`` or ``parquet``, where names do not say it.
            overwrite: replace a data set that is there.
            resume: go on with what an earlier call left; it must be the same call, on the same sources.
            report: called after each piece of work with the progress and the bytes of all sources, if that is known.

        Raises:
            DataError: a source is bad, or the data set is there and is another one.
        """
        prefix = prefix_of(save_file_name)
        source = _Source(iterable, json_key, file_format, self.chunk_size)
        settings = self._settings(source)
        if idx_path(prefix).exists() and not overwrite:
            return self._existing(prefix, settings, source)
        fast = self.fast and self._fast_path_is_open()
        try:
            self._run(prefix, source, settings, fast, log_interval, resume, report)
        except FastPathDiffersError as difference:
            logger.warning("tiktoken gave other ids for %r: all is done anew without it", str(difference))
            if not source.can_begin_again:
                raise DataError(
                    "tiktoken gave other ids than the tokenizer, and the documents cannot be read a second time",
                    hint="fast=False",
                ) from None
            self._run(prefix, source, settings, False, log_interval, False, report)
        return IndexedDataset(prefix, self.binarization_impl)

    def _settings(self, source: _Source) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "tokenizer_sha256": self.tokenizer.digest,
            "vocab_size": self.tokenizer.vocab_size,
            "eod_token_id": self.eod,
            "chunk_size": self.chunk_size,
            "sources": source.identity(),
        }

    def _existing(self, prefix: Path, settings: dict[str, Any], source: _Source) -> IndexedDataset:
        """What a call that was made again after it had ended returns."""
        found = read_manifest(prefix)
        if found is None or not source.files or found["settings"] != json.loads(json.dumps(settings)):
            raise DataError(
                "there is a data set of that name"
                + (", made of something else or in another way" if source.files else ", perhaps of other documents"),
                where=str(idx_path(prefix)),
                hint="choose another name, or replace it: overwrite=True, --overwrite",
            )
        logger.warning("%s: made of the same sources in the same way already", prefix)
        shutil.rmtree(prefix.with_name(f".{prefix.name}.preparing"), ignore_errors=True)
        return IndexedDataset(prefix, self.binarization_impl)

    def _fast_path_is_open(self) -> bool:
        obstacle = fast_path_obstacle(self.tokenizer)
        logger.info("fast path: %s", obstacle or "used")
        return obstacle is None

    def _run(
        self,
        prefix: Path,
        source: _Source,
        settings: dict[str, Any],
        fast: bool,
        log_interval: int,
        resume: bool,
        report: ProgressReport | None,
    ) -> None:
        dtype = dtype_for(self.tokenizer.vocab_size)
        draft = Draft(prefix, dtype, settings, resume)
        try:
            if draft.finished:
                return
            plan = EncodingPlan(self.tokenizer, dtype.str, self.eod, fast)
            done, total, logged = draft.progress, source.num_bytes(), 0
            digests: deque[str] = deque()  # of the units that are being worked on
            units = _skipping(source.units(), done, digests)
            for unit, result in encode_units(units, plan, self.workers):
                if result.problems and self.on_error == "stop":
                    raise _bad_record(result.problems[0])
                draft.append(result)
                if result.last:
                    draft.end_unit(unit.num_bytes, digests.popleft())
                    if report is not None:
                        report(done, total)
                    if done.documents // log_interval > logged:
                        logged = done.documents // log_interval
                        logger.info("%d documents, %d tokens", done.documents, done.tokens)
            draft.finish(self._manifest(settings, fast, done))
        finally:
            draft.close()

    def _manifest(self, settings: dict[str, Any], fast: bool, done: Progress) -> dict[str, Any]:
        if done.skipped:
            logger.warning("%d records were left out; the first: %s", done.skipped, _place_of(done.problems[0]))
        counts = {name: getattr(done, name) for name in ("documents", "sequences", "tokens", "text_bytes", "skipped")}
        return {
            "settings": settings,
            "tokenizer": self.tokenizer.name,
            "dtype": dtype_for(self.tokenizer.vocab_size).name,
            "fast_path": fast,
            "counts": counts,
            "left_out": [asdict(problem) | {"where": _place_of(problem)} for problem in done.problems],
        }


class _Source:
    """What is to be read, of whatever kind."""

    def __init__(self, given: Any, key: str, file_format: str | None, chunk_size: int) -> None:
        self._given, self._key, self._chunk_size = given, key, chunk_size
        self.files: list[File] = []
        if isinstance(given, JsonLines):
            self.files = find_files([given.path], given.json_key, file_format or _format_of_json_lines(given.path))
        elif isinstance(given, (str, os.PathLike)):
            self.files = find_files([given], key, file_format)
        elif isinstance(given, (list, tuple)) and given and all(isinstance(each, os.PathLike) for each in given):
            self.files = find_files(given, key, file_format)
        elif hasattr(given, "keys") and not is_table(given):
            raise DataError(
                "this is several data sets", expected="one of them", got=f"keys {', '.join(map(str, given.keys()))}"
            )
        elif not isinstance(given, Iterable):
            raise DataError("there is nothing to iterate over", expected="texts, or paths", got=type(given).__name__)

    @property
    def can_begin_again(self) -> bool:
        return bool(self.files) or not isinstance(self._given, Iterator)

    def identity(self) -> Any:
        return [file.identity() for file in self.files] if self.files else type(self._given).__name__

    def num_bytes(self) -> int | None:
        plain = self.files and all(file.kind != "parquet" for file in self.files)
        return sum(file.path.stat().st_size for file in self.files) if plain else None

    def units(self) -> Iterator[Unit]:
        if self.files:
            return (unit for file in self.files for unit in file.units(self._chunk_size))
        if is_table(self._given):
            return table_units(self._given, self._key, self._chunk_size)
        return iterable_units(self._given, self._chunk_size)


def _format_of_json_lines(path: str | os.PathLike[str]) -> str | None:
    """Whatever its name, one file that is opened as JSON lines has them; of a folder, those that say so."""
    return "jsonl" if Path(path).is_file() else None


def _skipping(units: Iterator[Unit], done: Progress, digests: deque[str]) -> Iterator[Unit]:
    """The units that are still to be done; those before must be the same as when they were done."""
    digest, skip, expected = "", done.units, done.digest
    number = 0
    for number, unit in enumerate(units, 1):
        if not isinstance(unit, TextRange):
            digest = chained_digest(digest, unit)
        if number == skip and digest != expected:
            raise DataError(
                "the documents are not those of the call that was interrupted",
                expected="the same documents in the same order",
                hint="begin anew: resume=False, --no-resume",
            )
        if number > skip:
            digests.append(digest)
            yield unit
    if number < skip:
        raise DataError("there are fewer documents than when the call was interrupted", hint="begin anew: resume=False")


def read_manifest(prefix: Path) -> dict[str, Any] | None:
    """What is written about a data set beside it; None if nothing is, as with Megatron's.

    Raises:
        DataError: it cannot be read.
    """
    path = manifest_path(prefix)
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError("cannot read the manifest of a data set", where=str(path), got=error) from None
    return found


def _bad_record(problem: Problem) -> DataError:
    return DataError(
        f"a record is no document: {problem.complaint}",
        where=_place_of(problem),
        hint="mend it, or leave such records out: on_error='skip', --on-error skip",
    )


def _place_of(problem: Problem) -> str:
    if problem.place == "byte":
        return f"{problem.path}:{line_number(problem.path, problem.position)}"
    return f"{problem.path}:{problem.position}" if problem.place == "line" else f"{problem.path}, item {problem.position}"
