"""A stage that skips blocks must leave every cache as long as the blocks would have left it."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from oslo_engine.checkpoint.skeleton import meta_model
from oslo_engine.pipeline.ghost_cache import feed_ghosts
from oslo_engine.plan.plan import Plan
from oslo_engine.policy.registry import find_policy
from oslo_engine.rewrite.cache_calls import Ghost, watched
from oslo_engine.rewrite.flows import small_inputs
from oslo_engine.rewrite.record import record
from oslo_engine.tiny.sizes import Sizes
from oslo_engine.tiny.subject import find_subject
from oslo_engine.verify.planned import plan_of

# One for each way in which a block may treat a cache.
WRITES = {
    "two layers a block": ("causal", "longcat_flash"),
    "another layer at each call": ("causal", "hrm_text"),
    "layers that share what others wrote": ("causal", "gemma3n_text"),
    "several streams in the hidden states, rows not first": ("causal", "gemma3n_text"),
    "several streams in the hidden states, along the tokens": ("causal", "prophetnet"),
    "an index beside keys and values": ("causal", "minimax_m3_vl_text"),
    "a window": ("causal", "gemma3_text"),
    "a state of linear attention": ("causal", "qwen3_next"),
    "self and cross attention": ("seq2seq", "t5"),
}


def layers_of(cache: Any) -> list[Any]:
    if isinstance(cache, EncoderDecoderCache):
        return [*layers_of(cache.self_attention_cache), *layers_of(cache.cross_attention_cache)]
    return list(cache.layers)


def lengths(cache: Cache) -> list[tuple[int, int]]:
    """(rows, tokens) of the keys in every layer."""
    keys = [getattr(layer, "keys", None) for layer in layers_of(cache)]
    return [(0, 0) if key is None or key.ndim < 3 else (key.shape[0], key.shape[-2]) for key in keys]


class Hidden(nn.Module):
    """Notes the first argument of every call of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def note(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        self.seen.append(torch.zeros(tensors[0].shape))


def empty_cache(model: Any) -> Cache:
    config = model.config.get_text_config(decoder=True)
    made = DynamicCache(config=config)
    return EncoderDecoderCache(made, DynamicCache(config=config)) if model.config.is_encoder_decoder else made


def planned(task: str, kind: str) -> tuple[Any, Plan]:
    subject = find_subject(kind, task).shrunk(Sizes(), num_blocks=4, dropout=0.0)
    plan = plan_of(subject, find_policy(None, kind), tp=1, pp=1)
    return subject, plan


@pytest.mark.parametrize(("task", "kind"), WRITES.values(), ids=WRITES)
def test_ghosts_leave_the_lengths_that_blocks_leave(task: str, kind: str) -> None:
    subject, plan = planned(task, kind)
    model = subject.build(lambda cls, config, **options: cls._from_config(config, **options)).eval()
    rows, length = 3, 13
    ids = torch.randint(10, 50, (rows, length))
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :7]
    real, hidden = empty_cache(model), Hidden()
    blocks = dict.fromkeys(plan.blocks)
    for name in blocks:
        model.get_submodule(name).register_forward_pre_hook(hidden.note, with_kwargs=True)
    with torch.no_grad():
        model(**inputs, **{cache_name(model): real}, use_cache=True)

    twin = subject.build(meta_model).eval()
    small = small_inputs(twin, {**inputs, cache_name(model): real})
    recording = record(twin, list(blocks), small)
    ghosts = empty_cache(model)
    for call, given in zip(recording.calls, hidden.seen, strict=True):
        feed_ghosts(call.cached, given, ghosts)
    cross = len(layers_of(ghosts)) // 2 if isinstance(ghosts, EncoderDecoderCache) else None
    assert any(length for _, length in lengths(real))
    assert lengths(ghosts)[:cross] == lengths(real)[:cross]


def cache_name(model: Any) -> str:
    import inspect

    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def test_what_holds_a_ghost_costs_a_number_a_token() -> None:
    hidden = torch.zeros(2, 8, 64)
    ghost = Ghost.of(torch.zeros(2, 16, 8, 4), -2, hidden)
    assert ghost.shape(torch.zeros(3, 100, 64)) == (3, 1, 100, 1)


def test_streams_along_the_tokens_count_once() -> None:
    ghost = Ghost.of(torch.zeros(2, 16, 8, 4), -2, torch.zeros(2, 24, 64))
    assert ghost.tokens == Fraction(1, 3)
    assert ghost.shape(torch.zeros(5, 9, 64)) == (5, 1, 3, 1)


def test_rows_are_found_where_they_are() -> None:
    ghost = Ghost.of(torch.zeros(2, 16, 8, 4), -2, torch.zeros(4, 2, 8, 64))
    assert ghost.shape(torch.zeros(4, 5, 9, 64)) == (5, 1, 9, 1)


def test_only_the_outermost_call_is_seen_and_the_cache_is_left_as_it_was() -> None:
    cache = DynamicCache()
    before = set(vars(cache))
    hidden = torch.zeros(2, 8, 4)
    with watched({"args": (hidden,), "kwargs": {"cache": cache}}) as calls:
        cache.update(torch.zeros(2, 2, 8, 2), torch.zeros(2, 2, 8, 2), 1)
    assert [(call.method, call.layer, dict(call.arguments)["layer_idx"]) for call in calls] == [("update", None, 1)]
    assert set(vars(cache)) == before
    cache.update(torch.zeros(2, 2, 8, 2), torch.zeros(2, 2, 8, 2), 1)
    assert len(calls) == 1


def test_a_cross_attention_cache_is_filled_once() -> None:
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    hidden = torch.zeros(2, 3, 4)
    with watched((hidden, cache)) as calls:
        cache.cross_attention_cache.update(torch.zeros(2, 2, 8, 2), torch.zeros(2, 2, 8, 2), 0)
    ghosts = EncoderDecoderCache(DynamicCache(), DynamicCache())
    for _ in range(2):
        feed_ghosts(calls, hidden, ghosts)
    assert ghosts.is_updated[0]
    assert ghosts.cross_attention_cache.get_seq_length(0) == 8
