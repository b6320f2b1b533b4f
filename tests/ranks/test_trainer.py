"""Transformers' Trainer on a split model: the curves, norms, metrics and predictions of the unsplit one."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import oslo_engine as oslo
from oslo_engine.comm.counter import CollectiveCounter
from oslo_engine.errors import UnsupportedError
from trainer_runs import Texts, as_launched, collate, curve, reference_trainer, split_trainer, trainer_of
from training_runs import Recipe, optimizer_for, unsplit


def trained(folder: Path, tp: int, pp: int, more: dict[str, Any]) -> dict[str, Any]:
    trainer = split_trainer(folder, tp, pp, **more)
    trainer.train()
    metrics = trainer.evaluate()
    predicted = trainer.predict(trainer.eval_dataset)
    trainer.save_model(str(folder / "merged"))
    return {
        "loss": curve(trainer),
        "norm": curve(trainer, "grad_norm"),
        "eval": metrics["eval_loss"],
        "predictions": predicted.predictions,
    }


SLOW = pytest.mark.slow
SETTINGS = [(2, 2, 1), (2, 1, 2), *(pytest.param(*more, marks=SLOW) for more in [(2, 1, 1), (1, 2, 1), (1, 2, 2), (2, 2, 2)])]


@pytest.mark.parametrize(("tp", "pp", "accumulation"), SETTINGS)
def test_it_trains_evaluates_and_predicts_as_on_one_process(
    rank_pool: Any, tmp_path: Path, tp: int, pp: int, accumulation: int
) -> None:
    rows, more = 8 // accumulation, {"gradient_accumulation_steps": accumulation}
    theirs = {**more, "per_device_train_batch_size": rows * tp * pp // 4}
    reference = reference_trainer(tmp_path / "one", **more, per_device_train_batch_size=rows)
    reference.train()
    wanted = reference.predict(reference.eval_dataset)
    for found in rank_pool(4).run(trained, tmp_path, tp, pp, theirs):
        assert found["loss"] == pytest.approx(curve(reference), rel=1e-4)
        assert found["norm"] == pytest.approx(curve(reference, "grad_norm"), rel=1e-4)
        assert found["predictions"].shape == wanted.predictions.shape
        real = wanted.label_ids != -100  # copies pad their own part of a batch
        torch.testing.assert_close(found["predictions"][real], wanted.predictions[real], rtol=1e-3, atol=1e-4)
    merged = oslo.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for name, value in merged.named_parameters():
        torch.testing.assert_close(value, reference.model.get_parameter(name), rtol=1e-3, atol=1e-5, msg=name)


def interrupted(folder: Path, tp: int, pp: int) -> list[float]:
    """Three steps, saved each, the best of them kept; the losses of the three steps that would have followed."""
    best = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True, "metric_for_best_model": "loss"}
    trainer = split_trainer(folder / "run", tp, pp, save_strategy="steps", save_steps=3, save_total_limit=2, **best)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-3")  # other texts are not learnt
    assert trainer.evaluate()["eval_loss"] == pytest.approx(curve(trainer, "eval_loss")[0], rel=1e-6)
    return curve(trainer)[3:]


def resumed(folder: Path, tp: int, pp: int, copies: int) -> list[float]:
    trainer = split_trainer(folder / f"again {tp} {pp}", tp, pp, save_strategy="no", per_device_train_batch_size=8 // copies)
    trainer.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-3"))
    assert trainer.state.global_step == 6
    return curve(trainer)[3:]


@pytest.mark.parametrize(("tp", "pp"), [pytest.param(2, 2, marks=SLOW), (2, 1)])
def test_an_interrupted_training_goes_on_also_at_another_layout(rank_pool: Any, tmp_path: Path, tp: int, pp: int) -> None:
    reference = reference_trainer(tmp_path / "one")
    reference.train()
    wanted = curve(reference)[3:]
    assert rank_pool(4).run(interrupted, tmp_path, tp, pp)[0] == pytest.approx(wanted, rel=1e-4)
    for ranks, other in [(4, (tp, pp)), (4, (1, 2)), (2, (2, 1))]:
        copies = ranks // (other[0] * other[1])
        for losses in rank_pool(ranks).run(resumed, tmp_path, *other, copies):
            assert losses == pytest.approx(wanted, rel=1e-4)


def translated(folder: Path, tp: int, pp: int) -> tuple[list[float], Any, float]:
    trainer = split_trainer(folder, tp, pp, "t5", generate=True)
    trainer.train()
    predicted = trainer.predict(trainer.eval_dataset)
    return curve(trainer), predicted.predictions, predicted.metrics["test_loss"]


@pytest.mark.parametrize(("tp", "pp"), [pytest.param(2, 1, marks=SLOW), (2, 2)])
def test_seq2seq_trainer_predicts_with_generate(rank_pool: Any, tmp_path: Path, tp: int, pp: int) -> None:
    reference = reference_trainer(tmp_path, "t5", generate=True)
    reference.train()
    wanted = reference.predict(reference.eval_dataset)
    for losses, tokens, loss in rank_pool(4).run(translated, tmp_path, tp, pp):
        assert losses == pytest.approx(curve(reference), rel=1e-4)
        # Copies fill the last batch with rows of the first; Transformers' own Seq2SeqTrainer leaves them in as well.
        assert (tokens[: len(wanted.predictions)] == wanted.predictions).all()
        if tp * pp == 4:  # copies take means over other batches
            assert loss == pytest.approx(wanted.metrics["test_loss"], rel=1e-4)


def of_labels(reduction: str, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction=reduction, ignore_index=-100)
    return 3 * loss / (num_items_in_batch if reduction == "sum" and num_items_in_batch is not None else 1)


OUTSIDE = {
    "sum": functools.partial(of_labels, "sum"),
    "mean": functools.partial(of_labels, "mean"),
    "of logits": lambda outputs, labels, num_items_in_batch: outputs.logits.square().mean(),
    "of what it has not": lambda outputs, labels, num_items_in_batch: outputs.rewards.sum(),
}


def from_outside(folder: Path, kind: str, more: dict[str, Any]) -> list[float] | str:
    trainer = split_trainer(folder, 1, 2, **more)
    trainer.compute_loss_func = OUTSIDE[kind]
    try:
        trainer.train()
    except UnsupportedError as error:
        return str(error)
    return curve(trainer)


@pytest.mark.parametrize("kind", ["sum", "mean"])
def test_a_loss_from_outside_of_the_model_gives_the_curve_of_the_unsplit_one(rank_pool: Any, tmp_path: Path, kind: str) -> None:
    more = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    reference = reference_trainer(tmp_path, **more)
    reference.compute_loss_func = OUTSIDE[kind]
    reference.train()
    for losses in rank_pool(2).run(from_outside, tmp_path, kind, more):
        assert losses == pytest.approx(curve(reference), rel=1e-4)


@pytest.mark.parametrize("kind", ["of logits", "of what it has not"])
def test_a_loss_that_micro_batches_do_not_add_up_to_is_refused(rank_pool: Any, tmp_path: Path, kind: str) -> None:
    for message in rank_pool(2).run(from_outside, tmp_path, kind, {}):
        assert "cannot be put together from micro-batches" in message


def own_loss(folder: Path) -> str:
    trainer = split_trainer(folder, 1, 2)
    trainer.__class__ = type(
        "Own", (type(trainer),), {"compute_loss": lambda self, model, inputs, **_: model(**inputs).loss * 3}
    )
    with pytest.raises(UnsupportedError) as refused:
        trainer.train()
    return str(refused.value)


def test_a_trainer_with_a_compute_loss_of_its_own_is_refused_in_a_pipeline(rank_pool: Any, tmp_path: Path) -> None:
    for message in rank_pool(2).run(own_loss, tmp_path):
        assert "compute_loss" in message
        assert "Own" in message


def smoothed(folder: Path, name: str, tp: int, pp: int, more: dict[str, Any]) -> tuple[list[float], list[float], float]:
    trainer = split_trainer(folder, tp, pp, name, label_smoothing_factor=0.1, **more)
    trainer.data_collator = for_decoder if name == "t5" else collate
    trainer.train()
    return curve(trainer), curve(trainer, "grad_norm"), trainer.evaluate()["eval_loss"]


def for_decoder(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """As Transformers' collator makes them, since the model that makes them of labels gets none."""
    batch = collate(rows)
    return {**batch, "decoder_input_ids": batch["labels"].clamp(min=0).roll(1, -1)}


@pytest.mark.parametrize(
    ("name", "tp", "pp", "accumulation"),
    [
        ("gpt2", 2, 1, 1),
        ("gpt2", 1, 2, 2),
        pytest.param("gpt2", 2, 2, 1, marks=SLOW),
        pytest.param("t5", 1, 2, 1, marks=SLOW),
        pytest.param("bert", 1, 2, 1, marks=SLOW),
    ],
)
def test_label_smoothing_of_the_trainer_gives_the_curve_of_the_unsplit_model(
    rank_pool: Any, tmp_path: Path, name: str, tp: int, pp: int, accumulation: int
) -> None:
    more = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 8 // accumulation}
    reference = reference_trainer(tmp_path, name, label_smoothing_factor=0.1, **more)
    reference.data_collator = for_decoder if name == "t5" else collate
    reference.train()
    evaluated = reference.evaluate()["eval_loss"]
    for losses, norms, loss in rank_pool(tp * pp).run(smoothed, tmp_path, name, tp, pp, more):
        assert losses == pytest.approx(curve(reference), rel=1e-4)
        assert norms == pytest.approx(curve(reference, "grad_norm"), rel=1e-4)
        assert loss == pytest.approx(evaluated, rel=1e-4)


def accelerated(folder: Path) -> tuple[list[float], list[float], int]:
    """A loop as people write it for Accelerate, stopped and gone on with."""
    as_launched()
    found = []
    for run in range(2):
        model, _ = unsplit(Recipe())
        oslo.parallelize(model, tp=2)
        accelerator = oslo.Accelerator(cpu=True)
        loader = DataLoader(Texts(fixed=6), batch_size=4, collate_fn=collate)
        prepared, optimizer, loader = accelerator.prepare(model, optimizer_for(model.parameters()), loader)
        if run == 1:
            accelerator.load_state(folder)
        losses = []
        for step, batch in enumerate(loader):
            if (step < 2) == (run == 0):
                loss = prepared(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(accelerator.gather(loss.detach()).mean()))
        if run == 0:
            accelerator.save_state(folder)
        found.append(losses)
    return found[0], found[1], accelerator.num_processes


def test_a_loop_of_accelerate(rank_pool: Any, tmp_path: Path) -> None:
    model, _ = unsplit(Recipe())
    optimizer = optimizer_for(model.parameters())
    losses = []
    for batch in DataLoader(Texts(fixed=6), batch_size=8, collate_fn=collate):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for first, second, processes in rank_pool(4).run(accelerated, tmp_path):
        assert processes == 2
        assert first + second == pytest.approx(losses, rel=1e-5)


def without_a_launcher(folder: Path) -> str:
    from accelerate.state import PartialState

    as_launched()
    model, _ = unsplit(Recipe())
    oslo.parallelize(model, tp=2)
    PartialState._reset_state()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name)
    with pytest.raises(UnsupportedError) as refused:
        trainer_of(oslo, model, folder, 1)
    return str(refused.value)


def test_arguments_that_do_not_know_of_the_other_processes_are_refused(rank_pool: Any, tmp_path: Path) -> None:
    for message in rank_pool(2).run(without_a_launcher, tmp_path):
        assert "expected: 2 processes" in message
        assert "got: 1" in message


class Operations(TorchDispatchMode):
    """Counts what is computed."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def cost_of_generation(model: Any) -> dict[str, Any]:
    """What eight tokens cost in operations and collectives, and what could make them cost more."""
    prompt = torch.tensor([[5, 6, 7]])
    model.generate(prompt, max_new_tokens=2, do_sample=False)  # a first call looks at the model
    with CollectiveCounter() as communicated, Operations() as computed:
        model.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    return {
        "operations": computed.count,
        "collectives": communicated.calls,
        "hooks": sum(
            len(hooks)
            for module in model.modules()
            for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        ),
        "use_cache": (model.config.use_cache, model.generation_config.use_cache),
        "dtypes": {parameter.dtype for parameter in model.parameters()},
        "attributes": sorted(name for module in model.modules() for name in vars(module)),
    }


def costs(folder: Path, tp: int, pp: int, checkpointing: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    trainer = split_trainer(folder, tp, pp, gradient_checkpointing=checkpointing)
    model = trainer.model
    before = cost_of_generation(model.eval())
    trainer.train()
    trainer.evaluate()
    if checkpointing:
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()  # a hook that Transformers leaves on an unsplit model too
    return before, cost_of_generation(model.eval())


@pytest.mark.parametrize(("tp", "pp", "checkpointing"), [(2, 1, False), pytest.param(1, 2, True, marks=SLOW)])
def test_generation_costs_what_it_did_before_training(
    rank_pool: Any, tmp_path: Path, tp: int, pp: int, checkpointing: bool
) -> None:
    for before, after in rank_pool(2).run(costs, tmp_path, tp, pp, checkpointing):
        assert before["operations"] > 100
        for name, value in before.items():
            if name != "attributes":
                assert after[name] == value, name
        left = set(after["attributes"]) - set(before["attributes"])
        assert not {name for name in left if "forward" in name}, left
