"""What is kept of a file, and what is found when it is compared."""

import hashlib
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from oslo_engine.checkpoint import checksums
from oslo_engine.checkpoint.checksums import READ_BYTES, FileRecord, check_unaltered, record_of
from oslo_engine.checkpoint.merge import merge
from oslo_engine.checkpoint.reshard import reshard
from oslo_engine.errors import CheckpointError
from split_models import MODELS, plan_of, whole_model, write_split

OF_NOTHING = "99aa06d3014798d86001c324468d497f"  # XXH3 of 128 bits, seed 0, by xxHash's specification
OF_ABC = "06b05ab6733a618578af5f94892f3950"  # of "abc", as `xxhsum -H2` prints it


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(bytes(range(251)) * (2 * READ_BYTES // 251) + b"a rest")
    return tmp_path / "file"


def complaint(path: Path, record: FileRecord, *, thorough: bool = False) -> CheckpointError:
    with pytest.raises(CheckpointError) as error:
        check_unaltered(path, record, "a file", thorough=thorough)
    assert error.value.where == str(path)
    return error.value


def test_the_checksums_are_those_that_others_compute(tmp_path: Path, path: Path) -> None:
    for content, expected in ((b"", OF_NOTHING), (b"abc", OF_ABC)):
        (tmp_path / "known").write_bytes(content)
        record = record_of(tmp_path / "known")
        assert record == FileRecord(len(content), hashlib.sha256(content).hexdigest(), expected)
    content = path.read_bytes()
    assert record_of(path).sha256 == hashlib.sha256(content).hexdigest()
    assert record_of(path).size_bytes == len(content)


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("at", [0, READ_BYTES - 1, READ_BYTES, -1])
def test_one_byte_that_was_altered_is_found(path: Path, at: int, thorough: bool) -> None:
    record = record_of(path)
    check_unaltered(path, record, "a file", thorough=thorough)
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    error = complaint(path, record, thorough=thorough)
    assert error.what == "a file was altered after it was saved"
    assert error.expected == f"xxh3_128 {record.xxh3_128}"


def test_another_size_and_no_file_are_found(path: Path) -> None:
    record = record_of(path)
    path.write_bytes(path.read_bytes() + b"\0")
    assert complaint(path, record).expected == f"size_bytes {record.size_bytes}"
    path.unlink()
    assert complaint(path, record).what == "a file is missing"


def test_a_record_from_before_the_fast_checksum_is_compared_with_the_other_one(path: Path) -> None:
    entry = asdict(record_of(path))
    del entry["xxh3_128"]
    record = FileRecord.from_json(entry)
    check_unaltered(path, record, "a file")
    assert complaint(path, replace(record, sha256="0" * 64)).expected == f"sha256 {'0' * 64}"


def test_only_a_thorough_comparison_computes_the_slow_checksum(path: Path) -> None:
    record = replace(record_of(path), sha256="0" * 64)
    check_unaltered(path, record, "a file")
    assert complaint(path, record, thorough=True).expected == f"sha256 {'0' * 64}"


def test_a_conversion_computes_the_slow_checksum_only_to_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what it reads never, nor of files for Transformers, which have no manifest."""
    write_split(whole_model("gpt2"), plan_of(*MODELS["gpt2"](), 2, 2), tmp_path / "split")
    num_hashed = 0

    class Counting:
        def __init__(self) -> None:
            self._real = hashlib.sha256()

        def update(self, data: memoryview) -> None:
            nonlocal num_hashed
            num_hashed += len(data)
            self._real.update(data)

        def hexdigest(self) -> str:
            return self._real.hexdigest()

    monkeypatch.setitem(checksums.ALGORITHMS, "sha256", Counting)
    merge(tmp_path / "split", tmp_path / "merged")
    assert num_hashed == 0
    for serialization in ("safetensors", "torch"):
        num_hashed, folder = 0, tmp_path / serialization
        reshard(tmp_path / "split", folder, tp=4, serialization=serialization)
        kept = [*folder.glob("*_tp=*"), *folder.glob("*config.json")]
        assert num_hashed == sum(path.stat().st_size for path in kept) > 0
