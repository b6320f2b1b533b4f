"""Every text architecture of the installed Transformers becomes a tiny model that trains and generates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from oslo_engine.errors import PlanError
from oslo_engine.tiny.architectures import TASKS, architectures, class_names, tasks_of
from oslo_engine.tiny.batches import make_batch, make_inputs, pad_token, training_shapes
from oslo_engine.tiny.fill import fill
from oslo_engine.tiny.sizes import Sizes
from oslo_engine.tiny.subject import Subject, find_subject

MOST_PARAMETERS = 2_000_000

# What cannot be built or run from token ids alone, and why.
IMPOSSIBLE = {
    "gemma3n": "its vision tower is a wrapper of the package timm",
    "gemma4_assistant": "its class refuses its own default config",
    "gemma4_unified_assistant": "the number of layers that share keys and values is not made small yet",
    "voxtral_realtime": "needs sound of the length of its text",
}
# What has a generate that does not continue a text.
NO_TEXT = {
    "musicgen": "its generate stops with an error on this padded text, unsplit too",
    "musicgen_melody": "its generate stops with an error on this padded text, unsplit too",
}
# One of each kind: fused and split projections, grouped and latent attention, experts, states, hybrids, encoders, composites.
SAMPLE = [
    ("causal", "falcon"),
    ("causal", "bert"),
    ("causal", "bart"),
    ("causal", "deepseek_v3"),
    ("causal", "qwen3_next"),
    ("causal", "mamba2"),
    ("causal", "jamba"),
    ("causal", "gemma3"),
    ("causal", "qwen3_5"),
    ("masked", "deberta-v2"),
    ("masked", "mbart"),
    ("seq2seq", "t5gemma"),
    ("seq2seq", "qwen2_audio"),
]


def listed(pairs: list[tuple[str, str]]) -> list[Any]:
    return [
        pytest.param(task, kind, marks=pytest.mark.xfail(strict=True, reason=IMPOSSIBLE[kind]))
        if kind in IMPOSSIBLE
        else (task, kind)
        for task, kind in pairs
    ]


def tiny(task: str, model_type: str, sizes: Sizes | None = None) -> Subject:
    return find_subject(model_type, task).shrunk(sizes or Sizes(), num_blocks=2)


def built(subject: Subject) -> PreTrainedModel:
    model = subject.build(lambda cls, config: cls._from_config(config))
    fill(model, 0)
    return model


def check_training(model: PreTrainedModel) -> None:
    assert sum(parameter.numel() for parameter in model.parameters()) < MOST_PARAMETERS
    batch = make_batch(model.config, training_shapes(pp=2, micro_batch_size=2)[0], micro_batch_size=2, seed=0, model=model)
    loss = model.train()(**batch).loss
    assert loss.isfinite()
    loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert sum(bool(gradient.any()) for gradient in gradients.values()) > 0.8 * len(gradients)


def check_generation(model: PreTrainedModel) -> None:
    ids, mask = make_inputs(model.config, 4, 9, torch.Generator().manual_seed(0))
    model.generation_config = GenerationConfig(
        pad_token_id=pad_token(model.config),
        bos_token_id=getattr(model.config, "bos_token_id", None),
        decoder_start_token_id=getattr(model.config, "decoder_start_token_id", None),
    )
    made = model.eval().generate(ids, attention_mask=mask, do_sample=False, min_new_tokens=4, max_new_tokens=4)
    assert made.shape == (4, 5 if model.config.is_encoder_decoder else 13)


@pytest.mark.parametrize(("task", "model_type"), SAMPLE)
def test_sample_trains_and_generates(task: str, model_type: str) -> None:
    model = built(tiny(task, model_type))
    check_training(model)
    if model.can_generate():
        check_generation(model)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "model_type"), listed(architectures()))
def test_every_architecture_trains(task: str, model_type: str) -> None:
    check_training(built(tiny(task, model_type)))


@pytest.mark.slow
@pytest.mark.parametrize(("task", "model_type"), [pair for pair in architectures() if pair[1] not in IMPOSSIBLE])
def test_every_architecture_that_can_generates(task: str, model_type: str, request: pytest.FixtureRequest) -> None:
    if model_type in NO_TEXT:
        request.applymarker(pytest.mark.xfail(strict=True, reason=NO_TEXT[model_type]))
    model = built(tiny(task, model_type))
    if not model.can_generate():
        pytest.skip("this class does not generate")
    check_generation(model)


def test_there_are_as_many_architectures_as_transformers_maps() -> None:
    pairs = architectures()
    assert len(pairs) == len(set(pairs)) > 250
    assert {task for task, _ in pairs} == set(TASKS)
    assert tasks_of("bart") == ("causal", "masked", "seq2seq")
    assert class_names("causal", "bart") == ("BartForCausalLM",)
    assert class_names("masked", "llama") == ()


@pytest.mark.parametrize(
    ("task", "model_type"), [("causal", "qwen3"), ("causal", "mixtral"), ("causal", "gemma3"), ("causal", "jamba")]
)
def test_sizes_can_be_asked_for(task: str, model_type: str) -> None:
    config = tiny(task, model_type, Sizes(heads=9, kv_heads=3, vocab=97, layers=4)).config.get_text_config()
    got = (config.num_attention_heads, config.num_key_value_heads, config.vocab_size, config.num_hidden_layers)
    assert got == (9, 3, 97, 4)


def test_latent_attention_has_no_kv_heads_of_its_own() -> None:
    with pytest.raises(PlanError, match="no size for kv_heads"):
        tiny("causal", "deepseek_v3", Sizes(kv_heads=2))


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [
        ("qwen3_next", {"linear_attention", "full_attention"}),
        ("llama4_text", {"chunked_attention", "full_attention"}),
        ("zamba2", {"linear_attention", "hybrid"}),
    ],
)
def test_every_kind_of_layer_stays(model_type: str, kinds: set[str]) -> None:
    assert set(tiny("causal", model_type).config.layer_types) == kinds


def test_dense_and_expert_layers_stay_mixed() -> None:
    model = tiny("causal", "deepseek_v3").build(lambda cls, config: cls._from_config(config))
    has_experts = [any("experts" in name for name, _ in layer.named_modules()) for layer in model.model.layers]
    assert len(set(has_experts)) == 2
