"""Folders that parents share with their workers: kept while the parent lives, removed by others when it is gone."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import oslo_engine
from oslo_engine.deploy.folder import SharedFolder, clear_left_behind

MAKES_ONE = """
import os, signal
from oslo_engine.deploy.folder import SharedFolder
folder = SharedFolder()
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_stays_while_its_parent_lives(temporary: Path) -> None:
    folder = SharedFolder()
    clear_left_behind()
    assert folder.path.is_dir()
    folder.remove()
    assert not folder.path.exists()
    folder.remove()  # does nothing


def test_the_folder_of_a_killed_parent_is_removed(temporary: Path) -> None:
    environment = {"TMPDIR": str(temporary), "PYTHONPATH": str(Path(oslo_engine.__file__).parent.parent)}
    told = subprocess.run([sys.executable, "-c", MAKES_ONE], capture_output=True, text=True, env=environment, timeout=60)
    path = Path(told.stdout.strip())
    assert path.parent == temporary, told.stderr
    (path / "store").touch()
    assert path.is_dir()
    clear_left_behind()
    assert not path.exists()


def test_what_was_not_made_here_stays(temporary: Path) -> None:
    (temporary / "oslo-deploy-other").mkdir()
    target = temporary / "target"
    target.mkdir()
    (target / "parent").touch()
    (temporary / "oslo-deploy-link").symlink_to(target)
    clear_left_behind()
    assert (temporary / "oslo-deploy-other").is_dir()
    assert (target / "parent").exists()
