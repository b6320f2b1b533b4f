from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from oslo_engine.errors import PlanError, UnsupportedError
from oslo_engine.rewrite.record import record
from oslo_engine.rewrite.skeleton import example_inputs, skeleton
from small_models import SMALL

GENERATES = ["gpt2", "llama", "qwen3", "bloom", "gemma3", "gemma4", "mixtral", "mamba", "t5", "bart"]


def small(name: str, **config: Any) -> Any:
    cls, built, _ = SMALL[name](**config)
    return skeleton(cls, built).eval()


# ---------------------------------------------------------------- models without weights


@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_skeleton_has_the_names_shapes_and_ties_of_the_model(name: str) -> None:
    cls, config, _ = SMALL[name]()
    model, real = skeleton(cls, config), cls(config)
    tensors = [*model.parameters(), *model.buffers()]
    assert all(tensor.is_meta and tensor.dtype in (torch.float32, torch.int64) for tensor in tensors)
    assert {key: value.shape for key, value in model.state_dict().items()} == {k: v.shape for k, v in real.state_dict().items()}
    for built, by_hand in (
        (model.named_parameters(remove_duplicate=False), real.named_parameters(remove_duplicate=False)),
        (model.named_parameters(), real.named_parameters()),
    ):
        assert [key for key, _ in built] == [key for key, _ in by_hand]


def test_tied_parameters_are_one_object() -> None:
    tied, untied = small("gpt2"), small("gpt2", tie_word_embeddings=False)
    assert tied.lm_head.weight is tied.transformer.wte.weight
    assert untied.lm_head.weight is not untied.transformer.wte.weight


def test_the_callers_config_is_left_alone() -> None:
    cls, config, _ = SMALL["llama"]()
    config.dtype, config._attn_implementation = torch.bfloat16, "flash_attention_2"
    before = copy.deepcopy(config.to_dict())
    model = skeleton(cls, config)
    assert config.to_dict() == before
    assert config._attn_implementation == "flash_attention_2"
    assert model.config._attn_implementation == "eager"
    assert model.dtype is torch.float32


def test_a_model_is_copied_with_what_was_changed_in_it() -> None:
    cls, config, blocks = SMALL["gpt2"]()
    real = cls(config).to(torch.bfloat16)
    real.resize_token_embeddings(200)
    real.transformer.ln_f = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))
    real.transformer.h[0].requires_grad_(False)
    real.transformer.h[1].attn.register_buffer("extra", torch.ones(3, dtype=torch.int32))
    model = skeleton(real)
    assert [name for name, _ in model.named_modules()] == [name for name, _ in real.named_modules()]
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.lm_head.weight.shape == (200, 32)
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}
    assert [tensor.requires_grad for tensor in model.parameters()] == [tensor.requires_grad for tensor in real.parameters()]
    assert model.transformer.h[1].attn.extra.dtype is torch.int32
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert not any(tensor.is_meta for tensor in real.parameters())
    assert model.training is real.training
    recording = record(model, blocks, example_inputs(model, "forward"))
    assert any(span.module == "transformer.ln_f.0" for span in recording.spans)


def test_gradient_checkpointing_is_switched_off_in_the_copy_only() -> None:
    cls, config, _ = SMALL["llama"]()
    real = cls(config)
    real.model.layers[0].gradient_checkpointing = True
    assert not skeleton(real).model.layers[0].gradient_checkpointing
    assert real.model.layers[0].gradient_checkpointing


def test_attention_that_needs_a_device_is_replaced_in_the_copy_only() -> None:
    cls, config, _ = SMALL["llama"]()
    real = cls(config)
    real.config._attn_implementation = "flash_attention_2"
    assert skeleton(real).config._attn_implementation == "eager"
    assert real.config._attn_implementation == "flash_attention_2"


def test_a_class_needs_a_config_and_a_model_brings_its_own() -> None:
    cls, config, _ = SMALL["gpt2"]()
    with pytest.raises(PlanError, match=r"a config is needed(?s:.*)GPT2LMHeadModel"):
        skeleton(cls)
    with pytest.raises(PlanError, match="copied with its own config"):
        skeleton(cls(config), copy.deepcopy(config))


# ---------------------------------------------------------------- inputs


def shapes(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        key: tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__ for key, value in inputs.items()
    }


@pytest.mark.parametrize(
    ("name", "mode", "expected"),
    [
        ("llama", "train", {"input_ids": (2, 8), "attention_mask": (2, 8), "use_cache": "bool", "labels": (2, 8)}),
        ("llama", "forward", {"input_ids": (2, 8), "attention_mask": (2, 8), "use_cache": "bool"}),
        ("llama", "decode", {"input_ids": (2, 1), "attention_mask": (2, 9), "use_cache": "bool", "cache": "DynamicCache"}),
        ("bert", "train", {"input_ids": (2, 8), "attention_mask": (2, 8), "labels": (2, 8)}),
        (
            "t5",
            "train",
            {"input_ids": (2, 8), "attention_mask": (2, 8), "decoder_input_ids": (2, 6), "use_cache": "bool", "labels": (2, 6)},
        ),
    ],
)
def test_inputs_of_a_mode(name: str, mode: Any, expected: dict[str, Any]) -> None:
    inputs = shapes(example_inputs(small(name), mode))
    # Transformers before 5.24 calls the cache past_key_values
    assert {("cache" if key == "past_key_values" else key): value for key, value in inputs.items()} == expected


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_generation_passes_the_encoders_output(mode: Any) -> None:
    inputs = example_inputs(small("t5"), mode)
    assert "input_ids" not in inputs
    assert inputs["encoder_outputs"].last_hidden_state.shape == (2, 8, 32)
    assert inputs["decoder_input_ids"].shape == ((2, 6) if mode == "prefill" else (2, 1))
    assert inputs["use_cache"] is True


@pytest.mark.parametrize("name", GENERATES)
def test_decoding_continues_a_filled_cache(name: str) -> None:
    model = small(name)
    inputs = example_inputs(model, "decode")
    (cache,) = (value for value in inputs.values() if hasattr(value, "reorder_cache"))
    if name != "mamba":
        assert cache.get_seq_length() == (6 if model.config.is_encoder_decoder else 8)
    assert len(cache.layers if hasattr(cache, "layers") else cache.self_attention_cache.layers) == 4


@pytest.mark.parametrize(
    ("cls_name", "expected"),
    [
        ("BertForTokenClassification", (2, 8)),
        ("BertForSequenceClassification", (2,)),
        ("GPT2ForSequenceClassification", (2,)),
        ("LlamaForCausalLM", (2, 8)),
        ("BertModel", None),
    ],
)
@pytest.mark.parametrize("num_labels", [1, 3])
def test_labels_have_the_shape_that_the_head_takes(cls_name: str, expected: tuple[int, ...] | None, num_labels: int) -> None:
    import transformers

    cls = getattr(transformers, cls_name)
    _, config, _ = SMALL[cls_name.partition("For")[0].removesuffix("Model").lower()]()
    config.num_labels, config.pad_token_id = num_labels, 0
    inputs = example_inputs(skeleton(cls, config), "train")
    assert (tuple(inputs["labels"].shape) if "labels" in inputs else None) == expected


def test_labels_may_be_a_value_per_row_and_class() -> None:
    import transformers

    _, config, _ = SMALL["bert"]()
    config.num_labels, config.problem_type = 3, "multi_label_classification"
    labels = example_inputs(skeleton(transformers.BertForSequenceClassification, config), "train")["labels"]
    assert (labels.shape, labels.dtype) == ((2, 3), torch.float32)


def test_inputs_that_are_no_tokens_have_the_type_of_the_model() -> None:
    import transformers

    _, config, _ = SMALL["bert"]()
    config.num_labels, config.problem_type = 3, "multi_label_classification"
    model = skeleton(transformers.BertForSequenceClassification, config, dtype=torch.float64)
    assert example_inputs(model, "train")["labels"].dtype is torch.float64
    sizes = {"d_model": 24, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32, "vocab_size": 83}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(**sizes, **layers, **tokens)
    model = skeleton(transformers.WhisperForConditionalGeneration, config, dtype=torch.float64)
    assert example_inputs(model, "train")["input_features"].dtype is torch.float64


def test_trying_labels_warns_of_nothing() -> None:
    import transformers

    _, config, _ = SMALL["bert"]()
    config.num_labels = 1
    model = skeleton(transformers.BertForSequenceClassification, config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        example_inputs(model, "train")
    assert caught == []


def test_use_cache_is_passed_where_the_forward_takes_it_unnamed() -> None:
    import transformers

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.GraniteMoeConfig(**sizes, num_key_value_heads=2)
    inputs = example_inputs(skeleton(transformers.GraniteMoeForCausalLM, config), "decode")
    assert inputs["use_cache"] is True
    assert any(hasattr(value, "get_seq_length") for value in inputs.values())


def test_tokens_are_ordinary_ones_and_the_first_row_is_padded_on_the_left() -> None:
    model = small("t5", bos_token_id=50)
    inputs = example_inputs(model, "forward")
    assert inputs["input_ids"].max() < model.config.vocab_size
    assert 50 not in inputs["input_ids"]
    assert inputs["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8]
    assert inputs["input_ids"][0, :2].tolist() == [model.config.pad_token_id] * 2
    assert inputs["input_ids"][:, -1].tolist() == [model.config.eos_token_id] * 2
    special = {model.config.pad_token_id, model.config.eos_token_id}
    assert not special & set(inputs["input_ids"][1, :-1].tolist())


def test_the_encoder_can_be_asked_for_by_name() -> None:
    assert set(example_inputs(small("t5"), "forward", root="encoder")) == {"input_ids", "attention_mask", "use_cache"}


def test_the_callers_default_device_does_not_matter() -> None:
    model = small("llama")
    with torch.device("meta"):
        assert not example_inputs(model, "train")["labels"].is_meta


def test_making_inputs_leaves_the_model_as_it_was() -> None:
    model = small("bart")
    before = [dict(module.__dict__) for module in model.modules()]
    for mode in ("train", "forward", "prefill", "decode"):
        example_inputs(model, mode)
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_what_cannot_be_made_is_said() -> None:
    import transformers

    with pytest.raises(UnsupportedError, match=r"keeps no cache(?s:.*)BertForMaskedLM"):
        example_inputs(small("bert"), "decode")
    config = SMALL["bert"]()[1]
    with pytest.raises(UnsupportedError, match=r"keeps no cache(?s:.*)got: outputs logits"):
        example_inputs(skeleton(transformers.BertLMHeadModel, config), "decode")
    with pytest.raises(PlanError, match=r"unknown mode(?s:.*)expected: train, forward, prefill, decode\n  got: 'eval'"):
        example_inputs(small("bert"), "eval")  # type: ignore[arg-type]
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)
    with pytest.raises(UnsupportedError, match=r"models that read text(?s:.*)pixel_values"):
        example_inputs(skeleton(transformers.ViTModel, config), "forward")
