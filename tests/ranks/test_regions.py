"""Everything a policy can say about a region, run on ranks: outputs and gradients are the unsplit model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import oslo_engine as oslo
import toy_regions
from oslo_engine.errors import OsloError
from oslo_engine.rewrite.state import parallel_state
from oslo_engine.tiny.fill import fill
from rank_pool import RankFailure
from toy_regions import BLOCKS, ToyConfig, ToyModel, write_policy


def build(block: str) -> Any:
    model = ToyModel(ToyConfig(block=block)).double()
    fill(model, 3)
    return model


def worst_errors(block: str, policy: str, tp: int, expert_split: str) -> tuple[float, dict[str, float]]:
    """Largest relative errors of the output, and of the gradient of each parameter that one has."""
    whole = build(block)
    split = oslo.parallelize(build(block), tp=tp, policy=policy, expert_split=expert_split)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, toy_regions.VOCAB, (3, 5), generator=generator)
    direction = torch.randn(3, 5, toy_regions.HIDDEN, generator=generator, dtype=torch.float64)
    outputs = []
    for model in (whole, split):
        outputs.append(model(ids))
        (outputs[-1] * direction).sum().backward()
    state = parallel_state(split)
    ours = dict(split.named_parameters())
    errors = {}
    for name, parameter in whole.named_parameters():
        if parameter.grad is None:  # slopes that this block does not use
            assert ours[name].grad is None
            continue
        tensor = state.plan.tensor(name)
        wanted = parameter.grad if tensor.shard is None else tensor.shard.apply(parameter.grad, state.mesh.at.tp_rank)
        got = ours[name].grad
        errors[name] = float((got - wanted).abs().max() / parameter.grad.abs().max())
    return float((outputs[1] - outputs[0]).abs().max() / outputs[0].abs().max()), errors


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize(("block", "expert_split"), [*((block, "inner") for block in BLOCKS), ("Mixture", "expert")])
def test_outputs_and_gradients_equal_the_unsplit_ones(
    rank_pool, tmp_path: Path, block: str, expert_split: str, tp: int
) -> None:
    policy = write_policy(block, tmp_path)
    for output, gradients in rank_pool(tp).run(worst_errors, block, str(policy), tp, expert_split):
        assert output < 1e-12
        assert {name: error for name, error in gradients.items() if error > 1e-11} == {}


@pytest.mark.parametrize(
    ("block", "old", "new"),
    [
        ("EnterAtColumns", "    sum: [scale]", ""),
        ("EnterAtColumns", "enter: columns", "inputs: [x]"),
        ("WholeNorm", "norms: {first: head,", "cut: {first.weight: head}\n    norms: {"),
        ("PackedGroups", ", within: group", ""),
        ("InnerRow", "inner: {select: feature}", "sum: [select.weight]"),
        ("HeadsInBlocks", "blocks: 2", "blocks: 1"),
        ("BiasArgument", "repeated: true", "repeated: false"),
        ("Mixture", "once: [down_bias]", ""),
        ("Mixture", "unit: feature * 2", "unit: [feature, feature]"),
        ("Mixture", "inputs: [x, weights]", "inputs: [x]"),
    ],
)
def test_each_word_matters(rank_pool, tmp_path: Path, block: str, old: str, new: str) -> None:
    """Without it, or with a wrong one, the numbers are others, or the model is refused."""
    policy = write_policy(block, tmp_path)
    text = policy.read_text()
    assert old in text
    policy.write_text(text.replace(old, new))
    results: list[tuple[float, dict[str, float]]] = []
    clear = False
    try:
        results = rank_pool(2).run(worst_errors, block, str(policy), 2, "inner")
    except RankFailure as refused:
        clear = any(word in str(refused) for word in ("PlanError", "PolicyError", "shape", "size"))
    wrong = any(output > 1e-6 or max(gradients.values()) > 1e-6 for output, gradients in results)
    assert wrong or clear


def first_argument_error(policy: str) -> str:
    try:
        oslo.parallelize(build("InnerRow"), tp=2, policy=policy)
    except OsloError as error:
        return str(error)
    return ""


def test_an_argument_that_the_scope_does_not_take_is_refused(rank_pool, tmp_path: Path) -> None:
    policy = write_policy("InnerRow", tmp_path)
    policy.write_text(policy.read_text().replace("    rows:", "    inputs: [hidden]\n    rows:"))
    for message in rank_pool(2).run(first_argument_error, str(policy)):
        assert "has no argument 'hidden'" in message
