"""torch.compile of the blocks of a split model: the same numbers, and where graphs break."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oslo_engine as oslo
from training_runs import Recipe, batches, unsplit

# For the first block; the others find its graphs. Two regions, each with a place where the random stream changes before it and
# one behind it; dynamo counts a place once for every frame that is around it.
BREAKS_OF_A_BLOCK = 16


def compiled(recipe: Recipe, backend: str) -> tuple[float, float, float, dict[str, int], dict[str, int], int]:
    """Loss in evaluation, loss and gradient norm in training, breaks of graphs in both, and how many became machine code."""
    import torch._dynamo as dynamo

    model, blocks = unsplit(recipe)
    oslo.parallelize(model, tp=recipe.tp, pp=recipe.pp)
    dynamo.reset()
    for name in blocks:
        model.get_submodule(name).compile(backend=backend)
    dynamo.utils.counters.clear()
    (batch,) = batches(recipe, 0)
    with torch.no_grad():
        evaluated = model.eval()(**batch).loss.item()
    in_evaluation, loss = dict(dynamo.utils.counters["graph_break"]), 0.0
    dynamo.utils.counters.clear()
    model.train()
    for micro in model(**batch) if recipe.pp > 1 else [model(**batch)]:
        micro.loss.backward()
        loss += micro.loss.item()
    norm = float(oslo.clip_grad_norm_(model, 1.0))
    in_training = dict(dynamo.utils.counters["graph_break"])
    made = dynamo.utils.counters["inductor"]
    num_made = made["fxgraph_cache_miss"] + made["fxgraph_cache_hit"]
    dynamo.reset()
    return evaluated, loss, norm, in_evaluation, in_training, num_made


@pytest.mark.parametrize(
    "recipe",
    [Recipe("llama", tp=2), Recipe("gpt2", pp=2), pytest.param(Recipe("gpt2", tp=2), marks=pytest.mark.slow)],
    ids=str,
)
def test_compiled_blocks_compute_the_same_and_break_where_random_streams_change(rank_pool: Any, recipe: Recipe) -> None:
    model, _ = unsplit(recipe)
    loss = model(**batches(recipe, 0)[0]).loss
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    for evaluated, ours, our_norm, in_evaluation, in_training, _ in rank_pool(2).run(compiled, recipe, "aot_eager"):
        assert [evaluated, ours] == pytest.approx([float(loss.detach())] * 2, rel=1e-5)
        assert our_norm == pytest.approx(norm, rel=1e-4)
        assert in_evaluation == {}
        assert all("RandomStreams" in reason for reason in in_training)
        assert sum(in_training.values()) == (BREAKS_OF_A_BLOCK if recipe.tp > 1 else 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("recipe", [Recipe("llama", tp=2), Recipe("gpt2", pp=2)], ids=str)
def test_blocks_compiled_to_machine_code_compute_the_same(rank_pool: Any, recipe: Recipe) -> None:
    model, _ = unsplit(recipe)
    loss = model(**batches(recipe, 0)[0]).loss
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    for evaluated, ours, our_norm, _, _, num_made in rank_pool(2).run(compiled, recipe, "inductor", timeout_s=800):
        assert num_made > 0
        assert [evaluated, ours] == pytest.approx([float(loss.detach())] * 2, rel=1e-5)
        assert our_norm == pytest.approx(norm, rel=1e-4)
