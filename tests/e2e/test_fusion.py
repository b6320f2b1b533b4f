"""Fusion together with everything else: ``verify`` with it, the command, and every architecture of Transformers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import oslo_engine as oslo
from oslo_engine.cli.main import main
from oslo_engine.fusion.fuse import fuse
from oslo_engine.tiny.architectures import architectures
from oslo_engine.tiny.batches import Shape, make_batch
from oslo_engine.tiny.fill import fill
from oslo_engine.tiny.sizes import Sizes
from oslo_engine.tiny.subject import find_subject

BOTH = {"tp": 2, "pp": 2}
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", BOTH),
    ("t5", BOTH),
    ("bert", BOTH),
    ("gpt2", {**BOTH, "dropout": 0.1}),
    ("t5", {**BOTH, "dropout": 0.1}),
    ("bart", {"tp": 2, "dropout": 0.1}),
    ("gpt2", {**BOTH, "sequence_parallel": True}),
    ("llama", {**BOTH, "gradient_checkpointing": True}),
    ("gpt2", {"pp": 2, "schedule": "zero-bubble"}),
    ("gpt2", {"tp": 2, "dtype": "bfloat16"}),
    ("mixtral", {"tp": 2}),
]


def test_gpt2_is_fused_and_split_both_ways_at_once() -> None:
    report = oslo.verify("gpt2", **BOTH, fuse=True)
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=[f"{name}-{settings}" for name, settings in SETTINGS])
def test_fused_and_split(name: str, settings: dict[str, Any]) -> None:
    report = oslo.verify(name, **settings, fuse=True)
    assert report.ok, str(report)


def test_the_command_says_what_is_fused_and_why_something_is_not() -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(main, ["fuse", *arguments])

    ran = run("gpt2", "--explain", "--attention", "sdpa")
    assert ran.exit_code == 0, ran.output
    assert re.search(r"bias \+ GELU +2 +transformer\.h\.\*\.mlp\.c_fc", ran.output)
    assert "scaled_dot_product_attention is one kernel already" in ran.output
    assert "left" in ran.output.splitlines()[-1]
    short = run("gpt2", "--target", "norm")
    assert short.exit_code == 0
    assert "LayerNorm" in short.output
    assert "GELU" not in short.output
    wrong = run("gpt2", "--target", "norms")
    assert wrong.exit_code == 2
    assert "mlp, attention, norm, loss" in wrong.output


# ------------------------------------------------------------------ every architecture

# At least so many of a hundred architectures that run must have something fused.
SHARE = 90
_fused: dict[str, bool] = {}


def build(task: str, kind: str) -> Any:
    try:
        subject = find_subject(kind, task).shrunk(Sizes(), num_blocks=2)
    except oslo.UnsupportedError as error:
        pytest.skip(str(error).replace("\n", " "))
    for options in ({"attn_implementation": "eager"}, {}):
        try:
            model = subject.build(lambda cls, config, options=options: cls._from_config(config, **options))
            break
        except oslo.UnsupportedError as error:
            if not options:
                pytest.skip(str(error).replace("\n", " "))
    fill(model, 0)
    return model.train()


def step(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any, dict[str, torch.Tensor]]:
    model.zero_grad()
    torch.manual_seed(3)
    output = model(**batch)
    logits = output.logits if "logits" in output else output[1]
    loss = output.loss if output.get("loss") is not None else logits.float().square().mean()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach().clone(), loss.detach().clone(), gradients


@pytest.mark.slow
@pytest.mark.parametrize(("task", "kind"), list(architectures()), ids=lambda value: value)
def test_every_architecture_is_equal_before_and_after(task: str, kind: str) -> None:
    model = build(task, kind)
    batch = make_batch(model.config, Shape(2, 11, 7), micro_batch_size=2, seed=0, model=model)
    try:
        logits, loss, gradients = step(model, batch)
    except Exception as error:
        pytest.skip(f"does not run on text alone: {error}")
    report = fuse(model)
    _fused[f"{task}/{kind}"] = bool(report.replaced)
    fused_logits, fused_loss, fused_gradients = step(model, batch)
    scale = logits.abs().max()
    assert (fused_logits - logits).abs().max() <= 1e-5 * scale
    assert (fused_loss - loss).abs() <= 1e-5 * loss.abs()
    assert fused_gradients.keys() == gradients.keys()
    largest = max(float(each.abs().max()) for each in gradients.values())
    for name, gradient in gradients.items():
        size = max(float(gradient.abs().max()), 1e-3 * largest)  # some are zero but for rounding
        assert (fused_gradients[name] - gradient).abs().max() <= 1e-4 * size, name


@pytest.mark.slow
def test_nearly_every_architecture_has_something_fused() -> None:
    if len(_fused) < 100:
        pytest.skip("the test above has not been run")
    without = [name for name, fused in _fused.items() if not fused]
    assert 100 * len(without) <= (100 - SHARE) * len(_fused), without
