"""What travels between tensor-parallel ranks at each step of ``generate``: choices, and logits only where they are needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import oslo_engine as oslo
import small_models
from deployed_model import varied_model
from oslo_engine.comm.collectives import Axis
from oslo_engine.comm.counter import CollectiveCounter
from oslo_engine.errors import PipelineError
from oslo_engine.generation.heads import Heads
from oslo_engine.layers.vocabulary import vocab_parallel_head

NEW = 6


def prompts() -> Tensor:
    return torch.randint(3, small_models.VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))


def calls_per_step(name: str, tp: int, pp: int, **settings: Any) -> dict[str, list[float]]:
    """Kind of a collective: how many of them at each step of 2 rows, and how many bytes of them this rank hands in."""
    model = oslo.parallelize(varied_model(name), tp=tp, pp=pp).eval()
    counts = []
    for new in (4, 9):
        torch.manual_seed(0)
        more = {"max_new_tokens": new, "min_new_tokens": None, "pad_token_id": 0, "eos_token_id": None, **settings}
        with CollectiveCounter() as counter:
            model.generate(prompts(), **more)
        counts.append(counter.calls)
    fewer, more = counts
    return {kind: [(n - fewer[kind][0]) / 5, (size - fewer[kind][1]) / 5] for kind, (n, size) in more.items() if kind in fewer}


def test_logits_stay_where_they_are_computed_in_plain_greedy_decoding(rank_pool) -> None:
    """Two numbers for each of two rows, and two that say whether all is as it was."""
    for per_step in rank_pool(2).run(calls_per_step, "llama", 2, 1, do_sample=False):
        assert per_step["allgather"] == [1, 3 * 2 * 8]
        assert per_step["allreduce"][0] == 2 * small_models.LAYERS + 1
        assert per_step.get("broadcast", [0, 0]) == [0, 0]
        assert per_step.get("gather", [0, 0]) == [0, 0]


@pytest.mark.parametrize("settings", [{"do_sample": True}, {"do_sample": False, "repetition_penalty": 1.2}])
def test_logits_travel_to_the_rank_that_chooses_only(rank_pool, settings: dict[str, Any]) -> None:
    longest = (small_models.VOCAB + 1) // 2
    for per_step in rank_pool(2).run(calls_per_step, "llama", 2, 1, **settings):
        assert per_step["gather"] == [1, 2 * longest * 4]  # from the chooser to itself it is no traffic
        assert per_step["broadcast"] == [1, 2 * 8]
        assert "allgather" not in per_step


def changes_logits(pp: int) -> dict[str, Any]:
    """A model that does something to the logits behind its head: from the start, and from the fourth forward on."""
    told = {}
    for title, first in {"always": 0, "later": 3}.items():
        model, calls = oslo.parallelize(varied_model("gpt2"), tp=2, pp=pp).eval(), [0]

        def behind(module: Any, args: Any, logits: Tensor, first: int = first, calls: list[int] = calls) -> Tensor:
            calls[0] += 1
            return logits if calls[0] <= first else logits.log_softmax(-1)

        model.lm_head.register_forward_hook(behind)
        try:
            told[title] = model.generate(prompts(), max_new_tokens=NEW, pad_token_id=0, do_sample=False)
        except PipelineError as error:
            told[title] = str(error)
    return told


@pytest.mark.parametrize("pp", [1, 2])
def test_logits_that_are_not_the_head_s_are_gathered_to_choose(rank_pool, pp: int) -> None:
    wanted = varied_model("gpt2").generate(prompts(), max_new_tokens=NEW, pad_token_id=0, do_sample=False)
    for told in rank_pool(2 * pp).run(changes_logits, pp):
        assert torch.equal(told["always"], wanted)
        assert "are not now" in told["later"]


SCORES = {
    "the first of equal ones": [[1.0, 7.0, 3.0, 7.0, 7.0]],
    "in either slice": [[0.0, 1.0, 2.0, 3.0, 2.5], [5.0, 1.0, 2.0, 3.0, 2.5], [-9.0, -9.0, -8.0, -9.0, -7.0]],
    "infinite": [[float("-inf")] * 5, [1.0, 2.0, 3.0, float("inf"), float("inf")]],
    "not a number": [[1.0, 2.0, 9.0, float("nan"), 3.0], [float("nan"), 2.0, 9.0, 1.0, 3.0]],
}


def choices_from_slices() -> dict[str, list[int]]:
    axis = Axis("tp", 2, dist.get_rank(), dist.group.WORLD)
    head: Any = vocab_parallel_head(nn.Linear(4, 3 if axis.rank == 0 else 2, bias=False), axis, (3, 2))
    heads = Heads(nn.Sequential(head), axis, computes=True)
    heads.put_logits("nowhere")
    found = {}
    for title, scores in SCORES.items():
        own = torch.zeros(len(scores), 5)
        head.vocab.narrow(own).copy_(head.vocab.narrow(torch.tensor(scores)))
        head.last_rows = head.vocab.narrow(own).clone()
        found[title] = heads.choose(own).flatten().tolist()
    return found


def test_the_largest_of_slices_is_the_largest_of_all(rank_pool) -> None:
    for found in rank_pool(2).run(choices_from_slices):
        assert found == {title: torch.tensor(scores).argmax(-1).tolist() for title, scores in SCORES.items()}
