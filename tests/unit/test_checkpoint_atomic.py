"""A save replaces a checkpoint in one step, whenever it is killed, and whatever the file system can do."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oslo_engine.checkpoint import atomic
from oslo_engine.checkpoint.atomic import abandoned_on_error, begin, commit, recover, staging_folder
from oslo_engine.checkpoint.source import open_source
from oslo_engine.errors import CheckpointError

OLD = {
    "layout.json": "old",
    "model_tp=0_pp=0.safetensors": "old 0",
    "model_tp=1_pp=0.safetensors": "old 1",
    "config.json": "old c",
}
NEW = {"layout.json": "new", "model_tp=0_pp=0.safetensors": "new 0", "config.json": "new c"}
FOREIGN = {"tokenizer.json": "t", "README.md": "r", "runs/log": "l"}
STEPS = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync")


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def read(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def checkpoint_in(folder: Path) -> dict[str, str]:
    return {name: text for name, text in read(folder).items() if name not in FOREIGN and not name.startswith(".")}


def save(target: Path, files: dict[str, str] = NEW) -> None:
    staging = begin(target)
    write(staging, files)
    commit(staging, target)


def cannot_exchange(first: Path, second: Path) -> None:
    raise OSError(errno.EINVAL, "not on this file system")


@pytest.fixture(params=["exchanged", "one by one", "inside the target", "across file systems"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the files get into place."""
    if request.param != "exchanged":
        monkeypatch.setattr(atomic, "_exchange", cannot_exchange)
    if request.param == "inside the target":
        monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "target")
    if request.param == "across file systems":
        real = os.replace

        def replace(source: Any, destination: Any) -> None:
            if Path(source).parent != Path(destination).parent:
                raise OSError(errno.EXDEV, "another file system")
            real(source, destination)

        monkeypatch.setattr(os, "replace", replace)
    return request.param


def test_a_first_save_makes_the_folder_and_its_parents(tmp_path: Path, way: str) -> None:
    save(tmp_path / "a" / "target")
    assert read(tmp_path / "a" / "target") == NEW
    assert os.listdir(tmp_path / "a") == ["target"]


def test_a_save_replaces_the_checkpoint_and_keeps_what_is_not_part_of_it(tmp_path: Path, way: str) -> None:
    write(tmp_path / "target", OLD | FOREIGN)
    save(tmp_path / "target")
    assert read(tmp_path / "target") == NEW | FOREIGN
    assert os.listdir(tmp_path) == ["target"]


def test_files_of_the_other_form_are_replaced_too(tmp_path: Path, way: str) -> None:
    merged = {
        "model-00001-of-00002.safetensors": "m",
        "model-00002-of-00002.safetensors": "m",
        "model.safetensors.index.json": "i",
    }
    write(tmp_path / "target", merged | FOREIGN)
    save(tmp_path / "target")
    assert read(tmp_path / "target") == NEW | FOREIGN
    save(tmp_path / "target", merged | {"config.json": "c"})
    assert read(tmp_path / "target") == merged | {"config.json": "c"} | FOREIGN


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    write(tmp_path / "real", OLD | FOREIGN)
    (tmp_path / "target").symlink_to(tmp_path / "real")
    save(tmp_path / "target")
    assert (tmp_path / "target").is_symlink()
    assert read(tmp_path / "real") == NEW | FOREIGN


def test_who_stands_in_the_folder_stays_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "target", OLD | FOREIGN)
    monkeypatch.chdir(tmp_path / "target")
    save(Path("."))
    assert read(Path(".")) == read(tmp_path / "target") == NEW | FOREIGN
    assert os.path.samefile(".", tmp_path / "target")
    assert os.listdir(tmp_path) == ["target"]


def test_a_new_folder_lets_in_whom_the_old_one_did(tmp_path: Path, way: str) -> None:
    write(tmp_path / "target", OLD)
    (tmp_path / "target").chmod(0o2750)
    before = (tmp_path / "target").stat()
    save(tmp_path / "target")
    after = (tmp_path / "target").stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)


def test_a_folder_that_is_not_to_be_written_to_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "target", OLD)
    monkeypatch.setattr(os, "access", lambda path, mode: (Path(path).name, mode) != ("target", os.W_OK))
    with pytest.raises(CheckpointError, match="not to be written to"):
        save(tmp_path / "target")
    assert read(tmp_path / "target") == OLD
    assert os.listdir(tmp_path) == ["target"]


def test_a_folder_in_which_something_is_mounted_stays_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    write(target, OLD | FOREIGN)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "runs")
    before = target.stat().st_ino
    save(target)
    assert target.stat().st_ino == before
    assert read(target) == NEW | FOREIGN


def test_files_that_cannot_be_moved_are_told_and_moved_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    write(target, OLD | FOREIGN)
    real = os.rename

    def held(source: Path, destination: Path) -> None:
        if Path(source).name == "README.md":
            raise OSError(errno.EPERM, "Operation not permitted", str(source))
        real(source, destination)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", held)
        with pytest.raises(CheckpointError, match="in place") as error, abandoned_on_error(target):
            save(target)
        assert str(staging_folder(target)) in str(error.value.hint)
        with pytest.raises(CheckpointError, match=r"README\.md"):
            begin(target)
    assert checkpoint_in(target) == NEW
    recover(target)
    assert read(target) == NEW | FOREIGN


# -- two saves at once


class Other:
    """Another process, which begins a save and ends it when it is told."""

    def __init__(self, target: Path) -> None:
        begun, self._go = os.pipe(), os.pipe()
        self._child = os.fork()
        if self._child == 0:
            lose_locks()
            os.close(self._go[1])  # so that it ends with its parent
            staging = begin(target)
            write(staging, NEW)
            os.write(begun[1], b"1")
            os.read(self._go[0], 1)
            commit(staging, target)
            os._exit(0)
        os.read(begun[0], 1)

    def end(self) -> None:
        os.write(self._go[1], b"1")
        assert os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1]) == 0


def test_a_second_save_into_a_folder_is_refused_while_the_first_one_lives(tmp_path: Path, way: str) -> None:
    target = tmp_path / "target"
    write(target, OLD)
    other = Other(target)
    with pytest.raises(CheckpointError, match="another save into this folder is running"), abandoned_on_error(target):
        begin(target)
    other.end()
    assert read(target) == NEW
    save(target, OLD)
    assert read(target) == OLD


def test_without_locks_only_who_began_last_puts_its_files_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(atomic.fcntl, "flock", no_locks)
    target = tmp_path / "target"
    staging = begin(target)
    other = Other(target)
    with pytest.raises(CheckpointError, match="begun meanwhile"), abandoned_on_error(target):
        commit(staging, target)
    assert not target.exists()
    other.end()
    assert read(target) == NEW


def test_a_file_in_the_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    with pytest.raises(CheckpointError, match="is a file"):
        begin(tmp_path / "target")
    assert (tmp_path / "target").read_text() == "precious"


def test_a_place_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/target"):
        begin(tmp_path / "file" / "target")


# -- killed saves


class Killed(BaseException):
    """Nothing in the code under test catches it."""


def killed_before(step: int, action: Callable[[], None], die: Callable[[], None], *, once: bool = False) -> bool:
    """Run ``action`` until just before its ``step``-th change to the file system; whether it got that far.

    ``once``: later changes succeed, as after an error; otherwise there are none, as after a kill.
    """
    left = step

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                left -= once
                die()
            left -= 1
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in STEPS:
            patch.setattr(os, name, dying(getattr(os, name)))
        patch.setattr(atomic, "_exchange", dying(atomic._exchange))
        try:
            action()
        except Killed:
            lose_locks()
            return True
    return False


def raise_killed() -> None:
    raise Killed


def lose_locks() -> None:
    """As the end of a process does."""
    for staging in list(atomic._ours):
        atomic._let_go(staging)


def test_a_process_that_is_gone_leaves_no_lock_and_no_half_checkpoint(tmp_path: Path) -> None:
    target = tmp_path / "target"
    write(target, OLD | FOREIGN)
    for step in (2, 12):  # while it writes, and after the exchange
        child = os.fork()
        if child == 0:
            killed_before(step, lambda: save(target), lambda: os._exit(9))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        assert checkpoint_in(target) == (OLD if step == 2 else NEW)
    save(target)
    assert read(target) == NEW | FOREIGN


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that it wrote; only a machine that loses power does."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.usefixtures("quick")
def test_a_save_killed_at_any_step_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path, way: str) -> None:
    seen = set()
    step = 0
    while True:
        folder = tmp_path / str(step)
        target = folder / "target"
        write(target, OLD | FOREIGN)
        died = killed_before(step, lambda target=target: save(target), raise_killed)
        if way == "exchanged":  # any reader finds it whole
            assert checkpoint_in(target) in (OLD, NEW), f"step {step}"
        elif checkpoint_in(target) != OLD:  # one that is not whole is not loaded, and what reads it finishes it
            assert "layout.json" not in checkpoint_in(target) or checkpoint_in(target) == NEW, f"step {step}"
        recover(target)
        found = checkpoint_in(target)
        assert found in (OLD, NEW), f"step {step}"
        seen.add(found["layout.json"])
        assert FOREIGN.items() <= read(target).items(), f"step {step}"
        save(target, NEW | {"config.json": "later"})
        assert read(target) == NEW | {"config.json": "later"} | FOREIGN, f"step {step}"
        assert os.listdir(folder) == ["target"], f"step {step}"
        step += 1
        if not died:
            break
    assert step > 10
    assert seen == {"old", "new"}


@pytest.mark.usefixtures("quick")
def test_a_recovery_killed_at_any_step_can_be_repeated(tmp_path: Path, way: str) -> None:
    for first in range(4, 100, 3):
        target = tmp_path / str(first) / "target"
        write(target, OLD | FOREIGN)
        if not killed_before(first, lambda target=target: save(target), raise_killed):
            break
        for second in range(100):
            if not killed_before(second, lambda target=target: recover(target), raise_killed):
                break
        assert checkpoint_in(target) in (OLD, NEW)
        assert FOREIGN.items() <= read(target).items()


@pytest.mark.usefixtures("quick")
def test_a_save_that_fails_clears_up_unless_its_files_are_being_put_in_place(tmp_path: Path, way: str) -> None:
    for step in range(100):
        target = tmp_path / str(step) / "target"
        write(target, OLD | FOREIGN)

        def failing(target: Path = target) -> None:
            with abandoned_on_error(target):
                save(target)

        if not killed_before(step, failing, raise_killed, once=True):
            break
        if checkpoint_in(target) == OLD and not (staging_folder(target) / atomic.MOVING).exists():
            assert os.listdir(target.parent) == ["target"]
            assert read(target) == OLD | FOREIGN
        recover(target)
        assert checkpoint_in(target) in (OLD, NEW)
        assert FOREIGN.items() <= read(target).items()


def test_a_first_save_that_was_killed_leaves_nothing_that_loads(tmp_path: Path) -> None:
    staging = begin(tmp_path / "target")
    write(staging, NEW)
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        open_source(tmp_path / "target")
    lose_locks()
    assert begin(tmp_path / "target") == staging
    assert read(staging) == {}


def test_recovery_waits_for_a_save_that_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    write(target, OLD | FOREIGN)
    exchanged, go_on = threading.Event(), threading.Event()
    real = atomic._take_over
    taken: list[str] = []

    def slow(old: Path, target: Path) -> None:
        if not exchanged.is_set():
            exchanged.set()
            go_on.wait(10)
        taken.append(threading.current_thread().name)
        real(old, target)

    monkeypatch.setattr(atomic, "_take_over", slow)
    saver = threading.Thread(target=save, args=(target,), name="saver")
    saver.start()
    exchanged.wait(10)
    reader = threading.Thread(target=recover, args=(target,), name="reader")
    reader.start()
    reader.join(0.2)
    assert reader.is_alive()
    assert checkpoint_in(target) == NEW
    go_on.set()
    saver.join(10)
    reader.join(10)
    assert taken == ["saver"]
    assert read(target) == NEW | FOREIGN


def test_the_hidden_folder_lies_beside_the_target_on_the_same_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert staging_folder(tmp_path / "target") == tmp_path / ".target.saving"
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    assert staging_folder(tmp_path / "target") == tmp_path / "target" / ".saving"
