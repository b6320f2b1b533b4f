"""An optimizer that would train a split model wrongly says so on every rank before it changes anything."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import oslo_engine as oslo
import small_models
from trainer_runs import as_launched, split_trainer
from training_runs import Recipe, batches, unsplit

MAKERS: dict[str, Any] = {
    "torch's Adafactor": torch.optim.Adafactor,
    "Transformers' Adafactor": transformers.Adafactor,
    "Muon": lambda parameters: torch.optim.Muon([each for each in parameters if each.ndim == 2]),
    "LBFGS": torch.optim.LBFGS,
}


def backward(model: Any, step: int = 0) -> None:
    model.zero_grad()
    model.train_step(batches(Recipe(rows=4), step)[0])


def step_with(name: str, tp: int, pp: int) -> tuple[str, bool]:
    """What the first step says, and whether it has changed a weight."""
    model, _ = unsplit(Recipe())
    oslo.parallelize(model, tp=tp, pp=pp)
    backward(model)
    optimizer = MAKERS[name](model.gpu_parameters())
    before = copy.deepcopy([parameter.detach() for parameter in model.parameters()])
    said = ""
    try:
        optimizer.step(lambda: torch.zeros(()))
    except oslo.UnsupportedError as error:
        said = str(error)
    return said, not all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("name", list(MAKERS))
def test_an_optimizer_that_looks_at_whole_matrices_is_refused_with_tensor_parallelism(rank_pool: Any, name: str) -> None:
    for said, changed in rank_pool(2).run(step_with, name, 2, 1):
        assert "does not work entry by entry" in said
        assert "AdamW" in said
        assert not changed


@pytest.mark.parametrize(("name", "refused"), [("LBFGS", True), ("torch's Adafactor", False)])
def test_a_pipeline_refuses_an_optimizer_only_if_it_joins_parameters(rank_pool: Any, name: str, refused: bool) -> None:
    for said, changed in rank_pool(2).run(step_with, name, 1, 2):
        assert ("does not work entry by entry" in said) == refused
        assert changed != refused


def step_of_earlier_optimizer(tp: int, pp: int, replace: bool) -> tuple[str, float]:
    """What an optimizer from before says, and how much its step changed."""
    model, _ = unsplit(Recipe())
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    oslo.parallelize(model, tp=tp, pp=pp)
    if replace:
        optimizer.param_groups[0]["params"] = list(model.gpu_parameters())
    before = copy.deepcopy([parameter.detach() for parameter in model.parameters()])
    backward(model)
    try:
        optimizer.step()
    except oslo.UnsupportedError as error:
        return str(error), 0.0
    changed = zip(before, model.parameters(), strict=True)
    return "", float(sum((old - new).abs().sum() for old, new in changed))


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_an_optimizer_built_before_parallelize_says_so(rank_pool: Any, tp: int, pp: int) -> None:
    for said, _ in rank_pool(2).run(step_of_earlier_optimizer, tp, pp, False):
        assert "built before parallelize" in said
        assert "gpu_parameters()" in said
    for said, changed in rank_pool(2).run(step_of_earlier_optimizer, tp, pp, True):
        assert not said
        assert changed > 0


def test_a_model_that_is_not_split_keeps_the_optimizer_built_before(rank_pool: Any) -> None:
    for said, changed in rank_pool(2).run(step_of_earlier_optimizer, 1, 1, False):
        assert not said
        assert changed > 0


def parameters_of_another_model() -> bool:
    """A weight that a whole model shares with one that is split afterwards goes on being trained there."""
    one, _ = unsplit(Recipe())
    shared = nn.Linear(2, 2)
    shared.weight = one.transformer.wte.weight
    oslo.parallelize(one, tp=2)
    optimizer = torch.optim.SGD(shared.parameters(), lr=0.1)
    shared.weight.sum().backward()
    before = shared.weight.detach().clone()
    optimizer.step()
    return not torch.equal(before, shared.weight)


def test_a_parameter_that_is_used_elsewhere_goes_on(rank_pool: Any) -> None:
    assert all(rank_pool(2).run(parameters_of_another_model))


def clipped_training(clip: str, tp: int, pp: int, tied: bool = True) -> list[str]:
    """What each of four steps says."""
    cls, config, _ = small_models.gpt2()
    torch.manual_seed(0)
    config.tie_word_embeddings = tied
    model = cls(config)
    oslo.parallelize(model, tp=tp, pp=pp)
    optimizer = torch.optim.SGD(model.gpu_parameters(), lr=0.01)
    said = []
    for step in range(4):
        backward(model, step)
        if clip == "torch":
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        elif clip == "oslo":
            oslo.clip_grad_norm_(model, 0.01)
        try:
            optimizer.step()
            said.append("")
        except oslo.GradientError as error:
            said.append(str(error))
            break
    return said


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_clipping_by_each_ranks_own_norm_is_found_in_the_second_step(rank_pool: Any, tp: int, pp: int) -> None:
    for said in rank_pool(tp * pp).run(clipped_training, "torch", tp, pp):
        assert said[0] == ""
        assert "oslo.clip_grad_norm_(model, max_norm)" in said[1]
    for clip in ("oslo", "none"):
        assert rank_pool(tp * pp).run(clipped_training, clip, tp, pp) == [[""] * 4] * (tp * pp)


def test_stages_that_share_nothing_find_it_by_their_equal_norms(rank_pool: Any) -> None:
    for said in rank_pool(2).run(clipped_training, "torch", 1, 2, False):
        assert said[0] == ""
        assert "each stage was clipped by itself" in said[1]
        assert "oslo.clip_grad_norm_(model, max_norm)" in said[1]
    for clip in ("oslo", "none"):
        assert rank_pool(2).run(clipped_training, clip, 1, 2, False) == [[""] * 4] * 2


def step_on_some_ranks_only() -> int:
    """A rank that skips its first step, as torch's own GradScaler may, or has no optimizer at all, leaves nobody waiting."""
    model, _ = unsplit(Recipe())
    oslo.parallelize(model, tp=2)
    optimizer = torch.optim.SGD(model.gpu_parameters(), lr=0.0)
    taken = 0
    for step in range(4):
        backward(model, step)
        if step or dist.get_rank():
            optimizer.step()
            taken += 1
    return taken


def test_ranks_that_step_apart_do_not_wait_for_each_other(rank_pool: Any) -> None:
    assert rank_pool(2).run(step_on_some_ranks_only) == [3, 4]


class NeedsMore(torch.optim.SGD):
    def __init__(self, params: Any, more: int) -> None:
        super().__init__(params, lr=0.1)


def warned() -> list[int]:
    model, _ = unsplit(Recipe())
    oslo.parallelize(model, tp=2)
    optimizer = NeedsMore(model.gpu_parameters(), 3)
    counts = []
    for step in range(2):
        backward(model, step)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        counts.append(sum("could not find out whether NeedsMore" in str(each.message) for each in caught))
    return counts


def test_an_optimizer_that_cannot_be_tried_is_warned_of_once(rank_pool: Any) -> None:
    assert rank_pool(2).run(warned) == [[1, 0]] * 2


def refused_by_trainer(folder: Any) -> str:
    trainer = split_trainer(folder, 2, 1, optim="adafactor")
    try:
        trainer.create_optimizer()
    except oslo.UnsupportedError as error:
        return str(error)
    return ""


def test_trainer_says_so_when_it_makes_its_optimizer(rank_pool: Any, tmp_path: Any) -> None:
    for said in rank_pool(2).run(refused_by_trainer, tmp_path):
        assert "Adafactor does not work entry by entry" in said


def refused_by_accelerate(kind: str) -> str:
    as_launched()
    model, _ = unsplit(Recipe())
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    oslo.parallelize(model, tp=2)
    optimizer = early if kind == "early" else torch.optim.Adafactor(model.gpu_parameters())
    try:
        oslo.Accelerator(cpu=True).prepare(model, optimizer)
    except oslo.UnsupportedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("kind", "words"), [("early", "built before parallelize"), ("whole", "does not work entry by entry")])
def test_accelerate_says_so_when_it_is_given_the_optimizer(rank_pool: Any, kind: str, words: str) -> None:
    assert all(words in said for said in rank_pool(2).run(refused_by_accelerate, kind))
