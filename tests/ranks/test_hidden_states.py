"""Hidden states that a split model returns are those of the unsplit one, whichever stage computed them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import oslo_engine as oslo
from oslo_engine.errors import OsloError, UnsupportedError
from oslo_engine.tiny.architectures import architectures
from oslo_engine.tiny.batches import Shape, make_batch
from oslo_engine.tiny.fill import fill
from oslo_engine.tiny.sizes import Sizes
from oslo_engine.tiny.subject import find_subject

CAUSAL, MASKED, SEQ2SEQ = "causal", "masked", "seq2seq"
USUAL = [
    (CAUSAL, "gpt2"),
    (CAUSAL, "llama"),
    (CAUSAL, "gemma2"),
    (CAUSAL, "falcon"),
    (CAUSAL, "mixtral"),
    (MASKED, "bert"),
    (SEQ2SEQ, "t5"),
    (SEQ2SEQ, "bart"),
]


def compared(task: str, kind: str, **layout: Any) -> dict[str, Any]:
    """Largest error of each tuple of hidden states, as a share of the largest value; or why there is none."""
    try:
        subject = find_subject(kind, task).shrunk(Sizes(), num_blocks=3)
        plain = subject.build(lambda cls, config: cls._from_config(config))
    except UnsupportedError as error:
        return {"cannot be built": str(error)}
    fill(plain, 0)
    plain.eval()
    given = make_batch(plain.config, Shape(3, 11, 7), micro_batch_size=2, seed=0, model=plain)
    batch: dict[str, Any] = {name: value for name, value in given.items() if name != "labels"}
    if plain.config.is_encoder_decoder:
        batch["decoder_input_ids"] = batch["input_ids"].flip(1)
    batch["use_cache"] = False  # as in a pipeline that is given no cache: some models mask otherwise with one
    try:
        wanted = tuples_of(plain, batch)
    except ValueError as error:
        return {"does not run on text alone": str(error)}
    if not wanted:
        return {"returns none": kind}
    try:
        split = oslo.parallelize(copy.deepcopy(plain), micro_batch_size=2, **layout).eval()
    except OsloError as error:
        return {"cannot be split": str(error)}
    try:
        got = tuples_of(split, batch)
    except UnsupportedError as error:
        return {"refused": str(error)}
    assert got.keys() == wanted.keys()
    return {name: largest_error(got[name], wanted[name]) for name in wanted}


def tuples_of(model: Any, batch: dict[str, Any]) -> dict[str, tuple[Tensor, ...]]:
    with torch.no_grad():
        output = model(**batch, output_hidden_states=True)
    return {name: value for name, value in output.items() if name.endswith("hidden_states") and isinstance(value, tuple)}


def largest_error(got: tuple[Tensor | None, ...], wanted: tuple[Tensor | None, ...]) -> float:
    assert [state is None for state in got] == [state is None for state in wanted]
    pairs = [(ours, theirs) for ours, theirs in zip(got, wanted, strict=True) if ours is not None and theirs is not None]
    return max((float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs), default=0.0)


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 2), (1, 3)])
def test_they_are_gathered_from_all_stages(rank_pool, tp: int, pp: int) -> None:
    for task, kind in USUAL:
        for errors in rank_pool(tp * pp).run(compared, task, kind, tp=tp, pp=pp):
            assert all(isinstance(error, float) and error < 1e-5 for error in errors.values()), (kind, errors)


def test_they_are_whole_where_ranks_share_the_sequence(rank_pool) -> None:
    for errors in rank_pool(2).run(compared, CAUSAL, "llama", tp=2, sequence_parallel=True):
        assert all(isinstance(error, float) and error < 1e-5 for error in errors.values()), errors


@pytest.mark.slow
@pytest.mark.parametrize(("task", "kind"), list(architectures()), ids=lambda value: value)
def test_every_architecture(rank_pool, task: str, kind: str) -> None:
    """A clear refusal is fine, a wrong number is not."""
    for found in rank_pool(2).run(compared, task, kind, pp=2):
        if not any(isinstance(value, str) for value in found.values()):
            assert max(found.values()) < 1e-5, found
        else:
            print(found)
