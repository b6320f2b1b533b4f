"""Fusing on real ranks: after splitting, before it, the same masks where they must be, and tokens with n-grams blocked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oslo_engine as oslo
import small_models
from oslo_engine.errors import FusionTargetError
from oslo_engine.tiny.fill import fill

BLOCKED = {"max_new_tokens": 16, "do_sample": False, "no_repeat_ngram_size": 2, "pad_token_id": 0, "eos_token_id": None}


def whole(name: str, dropout: float = 0.0) -> Any:
    cls, config, _ = getattr(small_models, name)()
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, dropout)
    model = getattr(oslo, cls.__name__)._from_config(config, attn_implementation="eager")
    fill(model, 3)
    return model


def inputs() -> torch.Tensor:
    return torch.randint(3, small_models.VOCAB, (2, 6), generator=torch.Generator().manual_seed(2))


def counts(tp: int, pp: int, how: str) -> dict[str, int]:
    model = whole("gpt2")
    if how == "before":
        model.fuse(["mlp", "norm"])
    model = oslo.parallelize(model, tp=tp, pp=pp, fuse=["mlp", "norm"] if how == "argument" else None)
    if how == "after":
        assert model.fuse(["mlp", "norm"]) is model
    return model.fusion_report.counts


@pytest.mark.parametrize("how", ["before", "argument", "after"])
def test_a_rank_fuses_what_its_stage_runs(rank_pool, how: str) -> None:
    layers = small_models.LAYERS
    everywhere = {"bias_gelu": layers, "bias_dropout_residual": 2 * layers, "layer_norm": 2 * layers + 1}
    assert rank_pool(2).run(counts, 2, 1, how) == [everywhere] * 2
    by_stage = rank_pool(2).run(counts, 1, 2, how)
    assert {name: sum(each[name] for each in by_stage) for name in everywhere} == everywhere
    assert all(each["bias_gelu"] == layers // 2 for each in by_stage)


def loss_of_each_rank(recompute: bool) -> tuple[float, float, str]:
    model = oslo.parallelize(whole("gpt2", dropout=0.2).train(), tp=2, fuse=True, seed=7)
    if recompute:
        model.gradient_checkpointing_enable()
    outputs = []
    model.transformer.h[-1].register_forward_hook(lambda module, args, output: outputs.append(output))
    loss = model(input_ids=inputs(), labels=inputs(), use_cache=False).loss
    loss.backward()
    output = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    return float(loss), float(oslo.clip_grad_norm_(model, 1.0)), str(output.double().sum().item())


def test_masks_of_shared_activations_are_the_same_on_all_ranks_and_when_recomputed(rank_pool) -> None:
    first, second = rank_pool(2).run(loss_of_each_rank, False)
    assert first == second
    again, _ = rank_pool(2).run(loss_of_each_rank, True)
    assert again[0] == first[0]
    assert again[1] == pytest.approx(first[1], rel=1e-5)


def refused() -> str:
    with pytest.raises(FusionTargetError) as raised:
        oslo.parallelize(whole("gpt2"), tp=2, fuse="atention")
    return str(raised.value)


def test_a_wrong_target_is_refused_on_every_rank_before_anything_is_split(rank_pool) -> None:
    assert all("mlp, attention, norm, loss" in told for told in rank_pool(2).run(refused))


def tokens(name: str, tp: int, pp: int, beams: int) -> list[list[int]]:
    model = oslo.parallelize(whole(name).eval(), tp=tp, pp=pp, fuse=True)
    found: list[list[int]] = model.generate(inputs(), **BLOCKED, num_beams=beams, fused_no_repeat_ngram_blocking=True).tolist()
    return found


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize(("name", "beams"), [("gpt2", 1), ("gpt2", 3), ("t5", 1), ("llama", 1), ("bart", 1)])
def test_blocked_n_grams_of_split_and_fused_models_are_those_of_the_unsplit_one(
    rank_pool, name: str, beams: int, tp: int, pp: int
) -> None:
    wanted = whole(name).eval().generate(inputs(), **BLOCKED, num_beams=beams).tolist()
    assert rank_pool(2).run(tokens, name, tp, pp, beams) == [wanted] * 2
