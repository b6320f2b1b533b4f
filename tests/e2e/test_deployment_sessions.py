"""Deployed models in the places where people start them: an interactive session, a server that forks, Flask's reloader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import oslo_engine as oslo
from deployed_model import varied_model
from oslo_engine.errors import DeploymentError

LOAD = """
import os, sys, torch
import oslo_engine as oslo
ids = torch.ones(1, 4, dtype=torch.int64)
settings = dict(max_new_tokens=4, pad_token_id=0, do_sample=False)
model = oslo.GPT2LMHeadModel.from_pretrained_with_parallel(os.environ["FOLDER"], tensor_parallel_size=2, deployment=True)
print("tokens", model.generate(ids, **settings).tolist())
"""


@pytest.fixture(scope="module")
def unsplit() -> Any:
    return varied_model()


@pytest.fixture(scope="module")
def folder(unsplit: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("gpt2")
    unsplit.save_pretrained(target)
    return target


pytestmark = pytest.mark.timeout(180)


def run(
    folder: Path, *arguments: str, stdin: str | None = None, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    whole = {**os.environ, "PYTHONPATH": str(Path(oslo.__file__).parent.parent), "FOLDER": str(folder), **environment}
    return subprocess.run(
        [sys.executable, *arguments], input=stdin, env=whole, cwd=cwd, capture_output=True, text=True, timeout=170, check=True
    )


def tokens_of_unsplit(unsplit: Any) -> str:
    import torch

    ids = torch.ones(1, 4, dtype=torch.int64)
    return f"tokens {unsplit.generate(ids, max_new_tokens=4, pad_token_id=0, do_sample=False).tolist()}"


def test_a_session_with_a_running_event_loop(folder: Path, unsplit: Any) -> None:
    """Python's own asynchronous prompt: as in a notebook the main module has no file, and statements come one by one."""
    session = f"""{LOAD}
import asyncio
answer = await asyncio.to_thread(model.generate, ids, **settings)
print("tokens", answer.tolist())
from transformers import StoppingCriteria
class Mine(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.ones(1, dtype=torch.bool)

try:
    model.generate(ids, stopping_criteria=[Mine()], **settings)
except Exception as error:
    print("refused", "must be defined in a module" in str(error))

model.close()
print("closed", model.health().state)
"""
    out = run(folder, "-m", "asyncio", stdin=session).stdout
    assert out.count(tokens_of_unsplit(unsplit)) == 2, out
    assert "refused True" in out
    assert "closed closed" in out


def test_what_lies_in_the_current_folder_is_not_taken_for_a_library(folder: Path, unsplit: Any, tmp_path: Path) -> None:
    script, elsewhere = tmp_path / "script" / "run.py", tmp_path / "elsewhere"
    script.parent.mkdir()
    elsewhere.mkdir()
    script.write_text(f"{LOAD}\nmodel.close()")
    (elsewhere / "transformers.py").write_text("raise RuntimeError('not the library')")
    assert tokens_of_unsplit(unsplit) in run(folder, str(script), cwd=elsewhere).stdout


FORKING = f"""{LOAD}
sys.stdout.flush()
child = os.fork()
if child == 0:
    try:
        model.generate(ids, **settings)
    except oslo.DeploymentError as error:
        print("child", "--preload" in str(error), flush=True)
    try:
        model.health()
    except oslo.DeploymentError as error:
        print("health", "--preload" in str(error), flush=True)
    sys.exit(0)  # with all that is done at the end of a process
assert os.waitpid(child, 0)[1] == 0
print("restarts", model.health().restarts)
print("tokens", model.generate(ids, **settings).tolist())
"""


def test_a_server_that_forks_after_loading_is_told_and_harms_nothing(folder: Path, unsplit: Any) -> None:
    out = run(folder, "-", stdin=FORKING).stdout
    assert "child True" in out
    assert "health True" in out
    assert "restarts 0" in out
    assert out.count(tokens_of_unsplit(unsplit)) == 2, out


def test_flask_s_reloader_is_told_of(folder: Path) -> None:
    assert "use_reloader=False" in run(folder, "-", stdin=LOAD, WERKZEUG_RUN_MAIN="true").stderr


def test_a_class_of_the_script_is_refused_before_anything_starts(folder: Path) -> None:
    script = """
import os
import oslo_engine as oslo
from transformers import GPT2LMHeadModel
class Mine(GPT2LMHeadModel):
    pass
from oslo_engine.methods import with_parallel_methods
try:
    with_parallel_methods(Mine).from_pretrained_with_parallel(os.environ["FOLDER"], deployment=True)
except oslo.DeploymentError as error:
    print(error)
"""
    assert "move it from the script to a module" in run(folder, "-", stdin=script).stdout


def test_a_process_that_is_one_of_several_ranks_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(DeploymentError, match="starts its own workers"):
        oslo.GPT2LMHeadModel.from_pretrained_with_parallel(folder, deployment=True)
