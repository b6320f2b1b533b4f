"""Mixed precision, scaling, losses and activation checkpointing give a split model the numbers of the unsplit one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

import oslo_engine as oslo
import small_models
from oslo_engine.rewrite.state import parallel_state
from training_runs import Recipe, batches, differences, train_rank, train_unsplit, unsplit


def overflow(tp: int, pp: int, bad_rank: int) -> tuple[list[float], list[bool]]:
    """Scales after each of three steps, and whether each step changed this rank's weights; one rank overflows in the second."""
    model, _ = unsplit(Recipe())
    oslo.parallelize(model, tp=tp, pp=pp)
    optimizer = torch.optim.SGD(model.gpu_parameters(), lr=0.1)
    scaler = oslo.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scales, changed = [], []
    for step in range(3):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        (batch,) = batches(Recipe(rows=4), step)
        for micro in model(**batch) if pp > 1 else [model(**batch)]:
            scaler.scale(micro.loss).backward()
        if step == 1 and torch.distributed.get_rank() == bad_rank:
            next(model.gpu_parameters()).grad[0] = float("inf")
        scaler.unscale_(optimizer)
        oslo.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        changed.append(any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
    return scales, changed


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_an_overflow_on_one_rank_skips_the_step_on_all(rank_pool: Any, tp: int, pp: int) -> None:
    for scales, changed in rank_pool(2).run(overflow, tp, pp, 1):
        assert scales == [16.0, 8.0, 16.0]
        assert changed == [True, False, True]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_under_autocast_it_differs_from_one_process_no_more_than_rounding(rank_pool: Any, dtype: str) -> None:
    exact = train_unsplit(Recipe())
    recipe = Recipe(tp=2, pp=2, wrapper="none", autocast=dtype)
    reference = train_unsplit(recipe)
    spread = max(abs(a - b) / b for a, b in zip(reference.losses, exact.losses, strict=True))
    found = differences(recipe, reference, rank_pool(4).run(train_rank, recipe))
    assert 0 < found["loss"] < 2 * spread


EXACTLY = [Recipe("mixtral", tp=2), Recipe("mixtral", pp=2), Recipe("mixtral", tp=2, pp=2)]


@pytest.mark.parametrize("recipe", [*EXACTLY[:2], pytest.param(EXACTLY[2], marks=pytest.mark.slow)], ids=str)
def test_experts_differ_by_rounding_alone(rank_pool: Any, recipe: Recipe) -> None:
    """In single precision a mixture's norms part by 1e-4 in twenty steps; in double precision they must not."""
    recipe = replace(recipe, wrapper="none", dtype="float64", steps=8)
    found = differences(recipe, train_unsplit(recipe), rank_pool(recipe.ranks).run(train_rank, recipe))
    assert found["loss"] < 1e-6  # Transformers takes logits to single precision for it
    assert found["norm"] < 1e-6  # told in single precision
    assert found["weight"] < 1e-7


def normalised_by_tokens(pp: int) -> list[float]:
    """Two batches of one step with different numbers of labels, as Trainer gives them; and label smoothing."""
    from transformers.trainer_pt_utils import LabelSmoother

    model, _ = unsplit(Recipe())
    oslo.parallelize(model, tp=2, pp=pp, micro_batch_size=2)
    return losses_by_tokens(model, pp) + ([smoothed(model, LabelSmoother(0.2))] if pp == 1 else [])


def losses_by_tokens(model: Any, pp: int) -> list[float]:
    parts = uneven_batches()
    count = torch.tensor(sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts))
    losses = []
    for part in parts:
        output = model(**part, num_items_in_batch=count)
        found = [micro.loss for micro in _backwards(output)] if pp > 1 else list(_backwards([output]))
        losses.append(sum((loss if isinstance(loss, torch.Tensor) else loss.loss).item() for loss in found))
    return [*losses, float(oslo.clip_grad_norm_(model, 1e9)) if "_oslo" in vars(model) else _norm(model)]


def _backwards(outputs: Any) -> Any:
    for output in outputs:
        output.loss.backward()
        yield output


def _norm(model: Any) -> float:
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))


def uneven_batches() -> list[dict[str, torch.Tensor]]:
    parts = batches(Recipe(accumulation=2), 0)
    for number, part in enumerate(parts):
        part["labels"] = part["labels"].clone()
        part["labels"][number, : 3 + 4 * number] = -100
    return parts


def smoothed(model: Any, smoother: Any) -> float:
    part = uneven_batches()[0]
    labels = part.pop("labels")
    output = model(**part)
    return smoother(output, labels, shift_labels=True).item()


@pytest.mark.parametrize("pp", [1, 2])
def test_losses_are_normalised_by_the_tokens_of_the_step_and_smoothed(rank_pool: Any, pp: int) -> None:
    from transformers.trainer_pt_utils import LabelSmoother

    model, _ = unsplit(Recipe())
    wanted = losses_by_tokens(model, 1) + ([smoothed(model, LabelSmoother(0.2))] if pp == 1 else [])
    for losses in rank_pool(2 * pp).run(normalised_by_tokens, pp):
        assert losses == pytest.approx(wanted, rel=1e-5)


def gradients_with_dropout(pp: int, checkpointing: str) -> dict[str, torch.Tensor]:
    cls, config, blocks = small_models.gpt2()
    torch.manual_seed(0)
    model = cls(config).train()
    oslo.parallelize(model, tp=2, pp=pp, seed=3)
    if checkpointing == "blocks":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif checkpointing == "attention":
        attention = [model.get_submodule(name).attn for name in blocks]
        apply_activation_checkpointing(model, check_fn=lambda module: module in attention)
    (batch,) = batches(Recipe(rows=4), 0)
    model.train_step(batch)
    plan = parallel_state(model).plan
    return {plan.tensor(name).name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", ["blocks", "attention"])
@pytest.mark.parametrize("pp", [1, 2])
def test_activation_checkpointing_draws_the_same_dropout_masks(rank_pool: Any, pp: int, checkpointing: str) -> None:
    pool = rank_pool(2 * pp)
    wanted = pool.run(gradients_with_dropout, pp, "")
    for gradients, right in zip(pool.run(gradients_with_dropout, pp, checkpointing), wanted, strict=True):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, right[name], rtol=1e-5, atol=1e-7, msg=name)


def not_finite(tp: int, pp: int, bad_rank: int) -> tuple[str, bool]:
    """What clipping says when one rank has a gradient that is no number, and whether it left the gradients as they were."""
    model, _ = unsplit(Recipe())
    oslo.parallelize(model, tp=tp, pp=pp)
    model.train_step(batches(Recipe(rows=4), 0)[0])
    if torch.distributed.get_rank() == bad_rank:
        name = next(name for name, _ in model.named_parameters() if name.endswith("mlp.c_fc.weight"))
        model.get_parameter(name).grad[0, 0] = float("nan")
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with pytest.raises(oslo.GradientError) as raised:
        oslo.clip_grad_norm_(model, 0.1, error_if_nonfinite=True)
    same = all(torch.equal(old.nan_to_num(), p.grad.nan_to_num()) for old, p in zip(before, model.parameters(), strict=True))
    return str(raised.value), same


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_clipping_says_on_every_rank_which_one_has_a_gradient_that_is_not_finite(rank_pool: Any, tp: int, pp: int) -> None:
    for message, same in rank_pool(2).run(not_finite, tp, pp, 1):
        assert f"rank 1: transformer.h.{2 * (pp - 1)}.mlp.c_fc.weight" in message
        assert "rank 0" not in message
        assert same
