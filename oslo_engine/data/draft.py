"""A data set on its way: what is done survives a kill, and nothing has the final name before all of it is there.

The hidden folder ``.NAME.preparing`` beside the target holds the tokens, the lengths of sequences, the counts of documents,
and a journal. Each line of the journal, a checksum before it, says how far all of them reached when they were on the disk, with
checksums of theirs; whatever lies behind that is cut off when the work goes on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from oslo_engine.data.format import write_index
from oslo_engine.data.place import put_in_place, sync, write_manifest
from oslo_engine.data.units import Problem, Result
from oslo_engine.errors import DataError

logger = logging.getLogger(__name__)

_FILES = ("tokens", "lengths", "counts")
_COMMIT_SECONDS = 2.0
_SHOWN_PROBLEMS = 10
_CHUNK_BYTES = 1 << 22


@dataclass
class Progress:
    """How far a preparation is.

    Attributes:
        source_bytes: read of the sources.
        text_bytes: of the documents, in UTF-8.
        digest: of the units that came from a source without a file.
        checksums: CRC-32 of the tokens, lengths and counts.
    """

    units: int = 0
    tokens: int = 0
    sequences: int = 0
    documents: int = 0
    source_bytes: int = 0
    text_bytes: int = 0
    skipped: int = 0
    problems: list[Problem] = field(default_factory=list)
    digest: str = ""
    checksums: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_FILES, 0))


class Draft:
    """Opens the folder, with what is left there of the same work.

    Args:
        settings: what the files depend on; work that was begun with other settings is not gone on with.
        resume: false to begin anew in any case.

    Raises:
        DataError: another process works on the same data set, or the place cannot be written.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any], settings: dict[str, Any], resume: bool = True) -> None:
        self.prefix, self._dtype = prefix, dtype
        self.folder = prefix.with_name(f".{prefix.name}.preparing")
        self.progress = Progress()
        self.finished = False
        self._files: dict[str, IO[bytes]] = {}
        with self._disk_errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._journal: IO[bytes] = open(self.folder / "journal", "a+b")  # noqa: SIM115 - until closed
            self._lock()
            notes = self._notes_of(settings) if resume else []
            if notes and notes[-1].get("finished"):
                self._put_in_place()
                return
            for name in _FILES:
                self._files[name] = open(self.folder / name, "ab")  # noqa: SIM115 - until closed
            self._resume(notes, settings)
        self._last_commit = time.monotonic()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError("another process is preparing this data set", where=str(self.prefix)) from None
        except OSError:
            logger.debug("%s: no locks on this file system", self.folder)

    def _notes_of(self, settings: dict[str, Any]) -> list[dict[str, Any]]:
        """The whole lines of the journal if they are of this work; what a kill left of one is cut off."""
        self._journal.seek(0)
        lines = self._journal.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            self._journal.truncate(sum(len(line) for line in lines[:-1]))
            lines.pop()
        sums, texts = [line[:8] for line in lines], [line[9:] for line in lines]
        if sums != [_sum_of(text) for text in texts]:
            logger.warning("%s: its journal is damaged, and all is done anew", self.folder)
            return []
        notes: list[dict[str, Any]] = [json.loads(text) for text in texts]
        if notes and notes[0]["settings"] != json.loads(json.dumps(settings)):
            logger.warning("%s: begun with other settings or sources, and cleared away", self.folder)
            return []
        return notes

    def _resume(self, notes: list[dict[str, Any]], settings: dict[str, Any]) -> None:
        """Go on from the last line of the journal, or clear everything."""
        if len(notes) > 1:
            state = notes[-1]
            self.progress = Progress(**state | {"problems": [Problem(**each) for each in state["problems"]]})
            if any(self._checksum(name) != known for name, known in self.progress.checksums.items()):
                logger.warning("%s: a part of it was lost or altered, and all is done anew", self.folder)
                self.progress, notes = Progress(), []
            else:
                logger.warning("%s: going on after %d documents", self.folder, self.progress.documents)
        for name, file in self._files.items():
            file.truncate(self._sizes()[name])
        if not notes:
            self._journal.truncate(0)
            self._note({"settings": settings})

    def _sizes(self) -> dict[str, int]:
        done = self.progress
        return {"tokens": done.tokens * self._dtype.itemsize, "lengths": done.sequences * 4, "counts": done.documents * 4}

    def _checksum(self, name: str) -> int | None:
        """Of what must be there of a file; None if it is not."""
        left, found = self._sizes()[name], 0
        with open(self.folder / name, "rb") as file:
            while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
                found, left = zlib.crc32(chunk, found), left - len(chunk)
        return None if left else found

    def append(self, result: Result) -> None:
        done = self.progress
        with self._disk_errors():
            for name, content in (("tokens", result.tokens), ("lengths", result.lengths), ("counts", result.counts)):
                self._files[name].write(content)
                done.checksums[name] = zlib.crc32(content, done.checksums[name])
        done.tokens += len(result.tokens) // self._dtype.itemsize
        done.sequences += len(result.lengths) // 4
        done.documents += len(result.counts) // 4
        done.text_bytes += result.text_bytes
        done.skipped += len(result.problems)
        done.problems += result.problems[: _SHOWN_PROBLEMS - len(done.problems)]

    def end_unit(self, source_bytes: int, digest: str) -> None:
        """All results of a unit are there; from time to time they are seen to the disk and noted."""
        self.progress.units += 1
        self.progress.source_bytes += source_bytes
        self.progress.digest = digest
        if time.monotonic() - self._last_commit > _COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        with self._disk_errors():
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
            self._note(asdict(self.progress))
        self._last_commit = time.monotonic()

    def _note(self, entry: dict[str, Any]) -> None:
        text = json.dumps(entry).encode() + b"\n"
        self._journal.write(_sum_of(text) + b" " + text)
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def finish(self, manifest: dict[str, Any]) -> None:
        """Write the index, and the manifest with sizes and checksums; give the files their names, and remove the folder."""
        self.commit()
        with self._disk_errors():
            lengths = self._mapped("lengths", self.progress.sequences)
            counts = self._mapped("counts", self.progress.documents)
            documents = np.zeros(len(counts) + 1, np.int64)
            np.cumsum(counts, out=documents[1:])
            tokens, index, notes = (self.folder / name for name in ("tokens", "index", "manifest"))
            write_index(index, self._dtype, lengths, documents)
            write_manifest(notes, manifest, {".bin": tokens, ".idx": index})
            sync(self.folder)
            self._note({"finished": True})
            self._put_in_place()

    def _put_in_place(self) -> None:
        put_in_place(self.prefix, *(self.folder / name for name in ("tokens", "index", "manifest")))
        self.finished = True
        shutil.rmtree(self.folder)
        self.close()

    def _mapped(self, name: str, count: int) -> Any:
        return np.memmap(self.folder / name, dtype="<i4", mode="r") if count else np.empty(0, "<i4")

    def close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # a full disk: what is noted is on it
                file.close()
        self._journal.close()

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                "a data set could not be written",
                where=str(self.prefix),
                got=error.strerror,
                hint="what is done is kept: make room, and the same call goes on",
            ) from None


def _sum_of(text: bytes) -> bytes:
    return f"{zlib.crc32(text):08x}".encode()
