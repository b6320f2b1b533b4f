"""Preparations that are killed, and disks that are full: what is there is the old data set or none, and the rest is made up."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from corpora import byte_level_bpe, texts, write_jsonl
from oslo_engine import DataError, DatasetPreprocessor, IndexedDataset
from oslo_engine.data import draft
from oslo_engine.data.encoding import UnitEncoder
from oslo_engine.data.operations import verify_files
from preparing import prepare, prepare_and_die, prepare_and_tell

ENDS = (".bin", ".idx")


@pytest.fixture(scope="module")
def context() -> Any:
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["preparing"])
    return found


def corpus(folder: Path, count: int, seed: int = 5) -> Path:
    byte_level_bpe().save(str(folder / "tokenizer.json"))
    write_jsonl(folder / "a.jsonl", texts(count, seed))
    return folder


def files(folder: Path, name: str = "out") -> list[bytes]:
    return [(folder / f"{name}{end}").read_bytes() for end in ENDS]


def opens_if_there(folder: Path, *allowed: list[bytes]) -> None:
    """An index that is there opens onto all of its data, and is one of these."""
    if (folder / "out.idx").exists():
        data = IndexedDataset(folder / "out")
        assert sum(len(data.document(at)) for at in range(data.num_documents)) == data.num_tokens
        assert files(folder) in allowed


def test_killed_before_any_step_it_is_made_up_for(tmp_path: Path, context: Any) -> None:
    """Every sync, rename and removal, one after another, in place of an old data set of other content."""
    corpus(tmp_path, 8, seed=9)
    prepare(tmp_path)
    old = files(tmp_path)
    corpus(tmp_path, 12)
    prepare(tmp_path, "whole")
    expected = files(tmp_path, "whole")
    names = sorted(path.name for path in tmp_path.iterdir())
    for step in range(1000):
        process = context.Process(target=prepare_and_die, args=(tmp_path, step, True))
        process.start()
        process.join()
        opens_if_there(tmp_path, old, expected)
        if process.exitcode == 0:
            break
        assert process.exitcode == 9
        prepare(tmp_path, overwrite=True)
        assert files(tmp_path) == expected
        verify_files(tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == names
        for end, content in zip(ENDS, old, strict=True):
            (tmp_path / f"out{end}").write_bytes(content)
    assert step > 20, "the steps were not counted"


def kill_at_random(folder: Path, context: Any, kills: int, workers: int) -> None:
    """Kill, go on, kill, ... ; a preparation that was finished begins anew."""
    begun = time.perf_counter()
    prepare(folder, "whole", workers)
    longest = time.perf_counter() - begun
    expected, chance, killed = files(folder, "whole"), random.Random(0), 0
    while killed < kills:
        started = context.Event()
        process = context.Process(target=prepare_and_tell, args=(folder, workers, started))
        process.start()
        assert started.wait(60)
        time.sleep(chance.random() * longest)
        process.kill()
        process.join()
        assert workers_end(process.pid)
        opens_if_there(folder, expected)
        if process.exitcode == -signal.SIGKILL:
            killed += 1
        if (folder / "out.idx").exists():
            for end in (".idx", ".bin", ".manifest.json"):
                (folder / f"out{end}").unlink()
    prepare(folder)
    assert files(folder) == expected
    assert not (folder / ".out.preparing").exists()


def workers_end(group: int) -> bool:
    """Whether all processes of a group are gone, or dead and only not collected, within a few seconds."""
    for _ in range(200):
        if not any(is_alive_in(group, entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
            return True
        time.sleep(0.05)
    return False


def is_alive_in(group: int, entry: Path) -> bool:
    try:
        state, _, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
    except OSError:
        return False
    return int(its_group) == group and state != "Z"


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_at_a_few_moments_it_goes_on(tmp_path: Path, context: Any, workers: int) -> None:
    kill_at_random(corpus(tmp_path, 400), context, kills=4, workers=workers)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [0, 2])
def test_killed_at_thirty_moments_it_goes_on(tmp_path: Path, context: Any, workers: int) -> None:
    kill_at_random(corpus(tmp_path, 2000), context, kills=30, workers=workers)


def test_what_was_done_is_not_done_again(tmp_path: Path, context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus(tmp_path, 60)
    prepare(tmp_path, "whole")
    process = context.Process(target=prepare_and_die, args=(tmp_path, 42, False))
    process.start()
    process.join()
    assert process.exitcode == 9
    encoded: list[Any] = []
    encode = UnitEncoder.encode
    monkeypatch.setattr(UnitEncoder, "encode", lambda encoder, unit: encoded.append(unit) or encode(encoder, unit))
    prepare(tmp_path)
    assert 0 < len(encoded) < (tmp_path / "a.jsonl").stat().st_size // 3000
    assert files(tmp_path) == files(tmp_path, "whole")


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: write_jsonl(folder / "a.jsonl", texts(61)),
        lambda folder: os.utime(folder / "a.jsonl", (1, 1)),
        lambda folder: byte_level_bpe(500).save(str(folder / "tokenizer.json")),
    ],
    ids=["content", "time", "tokenizer"],
)
def test_other_sources_or_settings_are_begun_anew(tmp_path: Path, context: Any, change: Any) -> None:
    corpus(tmp_path, 60)
    process = context.Process(target=prepare_and_die, args=(tmp_path, 42, False))
    process.start()
    process.join()
    assert (tmp_path / ".out.preparing").exists()
    change(tmp_path)
    prepare(tmp_path, "whole")
    prepare(tmp_path)
    assert files(tmp_path) == files(tmp_path, "whole")


def test_an_iterable_goes_on_if_it_gives_the_same_again(tmp_path: Path) -> None:
    documents, made = texts(60), DatasetPreprocessor(byte_level_bpe(), workers=0, chunk_size=1000)

    def broken(items: list[str]) -> Any:
        yield from items[:40]
        raise KeyError("the source")

    made.preprocess(documents, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft, "_COMMIT_SECONDS", 0)
        with pytest.raises(KeyError):
            made.preprocess(broken(documents), tmp_path / "out")
        with pytest.raises(DataError, match="not those of the call"):
            made.preprocess((text for text in texts(60, seed=2)), tmp_path / "out")
        with pytest.raises(DataError, match="fewer documents"):
            made.preprocess((text for text in documents[:2]), tmp_path / "out")
    made.preprocess((text for text in documents), tmp_path / "out")
    assert files(tmp_path) == files(tmp_path, "whole")


def prepare_with_little_room(folder: Path, told: Any) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        prepare(folder)
    except DataError as error:
        told.send(str(error))
    else:
        told.send("")


def test_a_full_disk_is_an_error_and_with_more_room_it_goes_on(tmp_path: Path, context: Any) -> None:
    corpus(tmp_path, 400)
    prepare(tmp_path, "whole")
    ours, theirs = context.Pipe()
    process = context.Process(target=prepare_with_little_room, args=(tmp_path, theirs))
    process.start()
    assert ours.poll(60)
    told = ours.recv()
    process.join()
    assert "could not be written" in told
    assert "File too large" in told
    assert not (tmp_path / "out.idx").exists()
    prepare(tmp_path)
    assert files(tmp_path) == files(tmp_path, "whole")
