"""What the ranks of one model must have in common, and that they notice where they have not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

import oslo_engine as oslo
import small_models
from oslo_engine.errors import BatchError, OsloError, PlanError, UnsupportedError
from oslo_engine.rewrite.gradients import gradient_norm
from oslo_engine.rewrite.state import parallel_state
from oslo_engine.tiny.fill import fill


def whole(name: str = "gpt2") -> Any:
    cls, config, _ = getattr(small_models, name)()
    model = cls(config)
    fill(model, 5)
    return model


def batch(rows: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, small_models.VOCAB, (rows, 7), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def gradients_of_loaded(name: str, folder: str, tp: int, pp: int) -> tuple[float, float, float]:
    """(loss difference, norm difference, largest gradient error) of a model that was loaded split, after one step."""
    reference = whole(name).eval()
    reference(**batch()).loss.backward()
    ours = getattr(oslo, type(reference).__name__)
    model = ours.from_pretrained_with_parallel(folder, tensor_parallel_size=tp, pipeline_parallel_size=pp)
    loss = model.train_step(batch())
    state = parallel_state(model)
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    floor = 1e-3 * max(float(grad.abs().max()) for grad in wanted.values() if grad is not None)  # key biases have none
    largest = 0.0
    for name, parameter in model.named_parameters():
        tensor = state.plan.tensor(name)
        whole_grad = wanted[tensor.name]
        expected = whole_grad if tensor.shard is None else tensor.shard.apply(whole_grad, state.mesh.at.tp_rank)
        largest = max(largest, float((parameter.grad - expected).abs().max()) / max(float(whole_grad.abs().max()), floor))
    norm = torch.nn.utils.get_total_norm([grad for grad in wanted.values() if grad is not None])
    return float(loss - reference(**batch()).loss.detach()), float(gradient_norm(model) - norm), largest


@pytest.mark.parametrize(("name", "tp", "pp"), [("gpt2", 1, 2), ("gpt2", 1, 4), ("bert", 1, 2), ("t5", 2, 2)])
def test_a_loaded_model_trains_like_the_unsplit_one(rank_pool, tmp_path: Path, name: str, tp: int, pp: int) -> None:
    """Loading puts new parameters in place; ties and norms outside the blocks must be summed over the stages all the same."""
    whole(name).save_pretrained(tmp_path)
    for loss, norm, gradient in rank_pool(tp * pp).run(gradients_of_loaded, name, str(tmp_path), tp, pp):
        assert abs(loss) < 1e-5
        assert abs(norm) < 1e-4
        assert gradient < 1e-4


def gradients_of_initialised() -> float:
    cls, config, _ = small_models.gpt2()
    torch.manual_seed(3)
    reference = cls._from_config(config).eval()
    reference(**batch()).loss.backward()
    model = oslo.GPT2LMHeadModel.from_config_with_parallel(config, pipeline_parallel_size=2, seed=3).eval()
    model.train_step(batch())
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in reference.parameters()])
    return float(gradient_norm(model) / norm) - 1


def test_an_initialised_model_trains_like_the_unsplit_one(rank_pool) -> None:
    for difference in rank_pool(2).run(gradients_of_initialised):
        assert abs(difference) < 1e-5


def parallelize_different_weights() -> str:
    torch.manual_seed(torch.distributed.get_rank())
    cls, config, _ = small_models.gpt2()
    try:
        oslo.parallelize(cls(config), tp=2)
    except PlanError as error:
        return str(error)
    return ""


def test_models_with_different_weights_are_refused_on_all_ranks(rank_pool) -> None:
    for message in rank_pool(2).run(parallelize_different_weights):
        assert "different weights" in message
        assert "torch.manual_seed" in message


def changed(change: str) -> dict[str, torch.Tensor]:
    """The batch of the last rank, which all others have otherwise."""
    found = {name: value.clone() for name, value in batch(rows=32).items()}
    if change == "one label":
        found["labels"][17, 4] += 1
    elif change == "other rows":
        found = {name: value[:31] for name, value in found.items()}
    elif change == "another order":
        found = {name: value.roll(1, 0) for name, value in found.items()}
    return found


def train_on_different_batches(change: str, tp: int, pp: int, by: str) -> tuple[list[str], float]:
    """What a rank is told of the fourth batch; the loss of the fifth."""
    last = torch.distributed.get_rank() == tp * pp - 1
    model = oslo.parallelize(whole(), tp=tp, pp=pp, micro_batch_size=16).eval()
    messages = []
    for number in range(4):
        given = changed(change if last and number == 3 else "nothing")
        try:
            if by == "evaluation":
                with torch.no_grad():
                    model(**given)
            else:
                model.train_step(given)
        except BatchError as error:
            messages.append(str(error))
    with torch.no_grad():
        return messages, float(model(**changed("nothing")).loss)


@pytest.mark.parametrize(
    ("change", "tp", "pp", "by"),
    [
        ("one label", 2, 1, "training"),
        ("another order", 2, 1, "training"),
        ("other rows", 2, 1, "training"),
        ("one label", 2, 2, "training"),
        ("other rows", 2, 2, "training"),
        ("another order", 1, 2, "training"),
        ("one label", 2, 1, "evaluation"),
        ("one label", 1, 2, "evaluation"),
    ],
)
def test_different_batches_in_one_step_are_refused_on_all_ranks_and_the_next_is_right(
    rank_pool, change: str, tp: int, pp: int, by: str
) -> None:
    wanted = whole().eval()(**changed("nothing")).loss.item()
    for (message,), loss in rank_pool(tp * pp).run(train_on_different_batches, change, tp, pp, by):
        assert "different batches" in message
        assert "batch 4 of" in message
        assert ("other shapes" if change == "other rows" else "other values") in message
        kind = "pp rank" if tp == 1 and by == "training" else "rank"  # a pipeline alone compares where its batch ends
        alone, others = (last := str(tp * pp - 1)), ", ".join(map(str, range(tp * pp - 1)))
        if tp * pp == 2:
            alone, others = "0", last  # two ranks cannot tell who is wrong
        assert f"on {kind} {alone} than on {kind} {others}" in message
        assert "num_replicas=model.mpu" in message
        assert loss == pytest.approx(wanted, rel=1e-5)


def scores_error(tp: int, pp: int, beams: int, sample: bool) -> tuple[float, int]:
    options = {"max_new_tokens": 4, "num_beams": beams, "do_sample": sample, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    ids = batch(rows=2)["input_ids"]
    model = oslo.parallelize(whole(), tp=tp, pp=pp).eval()
    got = model.generate(ids, **options)
    if sample:  # other tokens than an unsplit model's: the scores are those of the tokens that were drawn
        full = whole().eval()(got.sequences).logits[:, ids.shape[1] - 1 : -1]
        wanted = tuple(full.unbind(1))
    else:
        plain = whole().eval().generate(ids, **options)
        assert torch.equal(plain.sequences, got.sequences)
        wanted = plain.scores
    worst, fewest = 0.0, small_models.VOCAB
    for ours, theirs in zip(got.scores, wanted, strict=True):
        kept = ours.isfinite()  # sampling looks at the best 50 only
        worst = max(worst, float((ours - theirs)[kept].abs().max().detach()))
        fewest = min(fewest, int(kept.sum(-1).min()))
    return worst, fewest


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize(("beams", "sample"), [(1, False), (2, False), (1, True)])
def test_scores_are_those_of_the_unsplit_model(rank_pool, tp: int, pp: int, beams: int, sample: bool) -> None:
    for worst, fewest in rank_pool(tp * pp).run(scores_error, tp, pp, beams, sample):
        assert worst < 1e-4
        assert fewest == (50 if sample else small_models.VOCAB)


def refused_generation(tp: int, pp: int, option: str, value: Any) -> list[str]:
    model = oslo.parallelize(whole(), tp=tp, pp=pp).eval()
    told = []
    try:
        model.generate(batch()["input_ids"], max_new_tokens=2, pad_token_id=0, return_dict_in_generate=True, **{option: value})
    except OsloError as error:
        told.append(f"{type(error).__name__}: {error}")
    plain = whole().eval().generate(batch()["input_ids"], max_new_tokens=2, pad_token_id=0)
    again = model.generate(batch()["input_ids"], max_new_tokens=2, pad_token_id=0)
    return [*told, "the next is right" if torch.equal(plain, again) else "the next is wrong"]


@pytest.mark.parametrize(("tp", "pp", "option", "value"), [(2, 1, "use_mtp", True), (1, 2, "assistant_early_exit", 1)])
def test_what_ranks_cannot_agree_on_is_refused(rank_pool, tp: int, pp: int, option: str, value: Any) -> None:
    for refused, after in rank_pool(2).run(refused_generation, tp, pp, option, value):
        assert refused.startswith(UnsupportedError.__name__)
        assert option in refused
        assert after == "the next is right"


def test_a_model_alone_may_do_all_of_it() -> None:
    model = oslo.parallelize(GPT2LMHeadModel(small_models.gpt2()[1])).eval()
    out = model.generate(
        batch()["input_ids"], max_new_tokens=2, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    assert len(out.logits) == 2
