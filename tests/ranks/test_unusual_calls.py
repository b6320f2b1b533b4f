"""What few ask of a split model: it computes what the unsplit model does, or says on every rank that it cannot."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import oslo_engine as oslo
from oslo_engine.errors import OsloError
from split_models import VOCAB, whole_model

QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def batch(rows: int = 4) -> dict[str, Any]:
    ids = torch.randint(1, VOCAB, (rows, 11), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 3:] = -100
    labels[2, 5:8] = -100
    return {"input_ids": ids, "labels": labels}


# -- losses


def shifted(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()


def mean(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    return F.cross_entropy(*shifted(logits, labels), label_smoothing=0.1)


def total(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    return F.cross_entropy(*shifted(logits, labels), reduction="sum") / 50


def mean_of_rows(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    rows = zip(logits, labels, strict=True)
    return torch.stack([F.cross_entropy(*shifted(one[None], wanted[None])) for one, wanted in rows]).mean()


def with_term_over_all_positions(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    return F.cross_entropy(*shifted(logits, labels)) + 0.1 * logits.logsumexp(-1).square().mean()


NO_MEANS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function for function in (total, mean_of_rows, with_term_over_all_positions)
}


def loss_by(name: str, way: str) -> float | str:
    model: Any = oslo.parallelize(whole_model("llama_two_kv"), pp=2, micro_batch_size=1).train()
    model.loss_function = {**NO_MEANS, "mean": mean}[name]
    try:
        if way == "train_step":
            return float(model.train_step(batch()))
        losses = []
        for micro in model(**batch()):
            micro.loss.backward()
            losses.append(float(micro.loss.detach()))
        return sum(losses)
    except OsloError as error:
        return error.what


@pytest.mark.parametrize("way", ["loop", "train_step"])
@pytest.mark.parametrize("name", NO_MEANS)
def test_a_loss_that_micro_batches_do_not_add_up_to_is_refused_on_every_rank(rank_pool: Any, name: str, way: str) -> None:
    for told in rank_pool(2).run(loss_by, name, way):
        assert "no mean over its labels" in str(told)


def test_another_mean_over_labels_is_the_unsplit_model_s(rank_pool: Any) -> None:
    whole: Any = whole_model("llama_two_kv").train()
    whole.loss_function = mean
    wanted = float(whole(**batch()).loss.detach())
    assert rank_pool(2).run(loss_by, "mean", "loop") == pytest.approx([wanted] * 2, rel=1e-5)


def loss_ignoring(index: int) -> float:
    model: Any = oslo.parallelize(whole_model("llama_two_kv"), tp=1, pp=2, micro_batch_size=1).train()
    return float(model.train_step({**ignoring(index), "ignore_index": index}))


def ignoring(index: int) -> dict[str, Any]:
    given = batch()
    given["labels"][given["labels"] == -100] = index
    return given


def test_labels_to_ignore_may_have_another_number(rank_pool: Any) -> None:
    whole: Any = whole_model("llama_two_kv").train()
    wanted = float(whole(**ignoring(7), ignore_index=7).loss.detach())
    assert rank_pool(2).run(loss_ignoring, 7) == pytest.approx([wanted] * 2, rel=1e-5)


# -- generation and outputs


def guided(tp: int, pp: int) -> list[list[int]]:
    model: Any = oslo.parallelize(whole_model("llama_two_kv"), tp=tp, pp=pp).eval()
    return model.generate(batch()["input_ids"], max_new_tokens=6, do_sample=False, guidance_scale=1.8).tolist()


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 2), (2, 1)])
def test_guidance_runs_the_model_twice_with_a_cache_for_each(rank_pool: Any, tp: int, pp: int) -> None:
    whole: Any = whole_model("llama_two_kv")
    wanted = whole.generate(batch()["input_ids"], max_new_tokens=6, do_sample=False, guidance_scale=1.8).tolist()
    assert rank_pool(tp * pp).run(guided, tp, pp) == [wanted] * (tp * pp)


def complaint_about(tp: int, pp: int, what: str) -> str:
    model: Any = oslo.parallelize(whole_model("gpt2", **QUIET), tp=tp, pp=pp, micro_batch_size=1)
    given = batch()
    try:
        if what == "attentions":
            model.eval()(**given, output_attentions=True)
        elif what == "attentions by config":
            model.set_attn_implementation("eager")
            model.config.output_attentions = True
            model.eval()(**given)
        else:
            given["position_ids"] = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]).expand(4, -1)
            model.train().train_step(given)
    except OsloError as error:
        return error.what
    return ""


@pytest.mark.parametrize(
    ("tp", "pp", "what", "told"),
    [
        (2, 1, "attentions", "of this rank's heads only"),
        (2, 1, "attentions by config", "of this rank's heads only"),
        (1, 2, "packed texts", "another thing with a cache"),
    ],
)
def test_what_would_mean_another_thing_is_refused(rank_pool: Any, tp: int, pp: int, what: str, told: str) -> None:
    for complaint in rank_pool(2).run(complaint_about, tp, pp, what):
        assert told in complaint


# -- pickle


def pickle_it(tp: int, pp: int) -> str:
    model = oslo.parallelize(whole_model("llama_two_kv"), tp=tp, pp=pp)
    try:
        pickle.dumps(model)
    except OsloError as error:
        return str(error)
    return "pickled"


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_a_split_model_is_not_pickled(rank_pool, tp: int, pp: int) -> None:
    for told in rank_pool(2).run(pickle_it, tp, pp):
        assert "a split model cannot be pickled" in told
