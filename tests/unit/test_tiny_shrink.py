"""The tiny config: small, still the same architecture, and what was asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BertConfig, Gemma3TextConfig, GPT2Config, Lfm2Config, LlamaConfig, Phi3Config, Qwen3Config, T5Config

from oslo_engine.errors import PlanError
from oslo_engine.tiny.kinds import Kinds
from oslo_engine.tiny.names import HEADS, INNER, POSITIONS, VOCAB
from oslo_engine.tiny.shrink import shrink
from oslo_engine.tiny.sizes import Sizes
from oslo_engine.tiny.subject import find_subject
from oslo_engine.tiny.written import written_model_types, written_sizes
from oslo_engine.verify.settings import Settings

NAMES = [
    "gpt2",
    "llama",
    "qwen3",
    "bert",
    "roberta",
    "t5",
    "gemma3_text",
    "mixtral",
    "bart",
    "opt",
    "gpt_neox",
    "phi3",
    "bloom",
]


def tiny(config: Any, sizes: Sizes | None = None, **options: Any) -> Any:
    return shrink(config, sizes or Sizes(), **options)


@pytest.mark.parametrize("name", NAMES)
def test_model_of_the_tiny_config_is_small_and_runs(name: str) -> None:
    subject = find_subject(name).shrunk(Sizes(), num_blocks=3)
    model = subject.load_class()._from_config(subject.config).eval()
    assert sum(parameter.numel() for parameter in model.parameters()) < 400_000
    ids = torch.arange(18).reshape(2, 9) + 40
    labels = {"labels": ids} if subject.config.is_encoder_decoder else {}
    assert model(input_ids=ids, **labels).logits.shape == (2, 9, VOCAB)


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_are_in_the_vocabulary(name: str) -> None:
    config = find_subject(name).shrunk(Sizes(), num_blocks=2).config
    tokens = {key: value for key, value in config.to_dict().items() if key.endswith("_token_id") and value is not None}
    assert all(0 <= token < VOCAB for token in tokens.values()), tokens


def test_tokens_that_were_one_stay_one_and_different_ones_differ() -> None:
    config = tiny(GPT2Config(bos_token_id=50256, eos_token_id=50256, pad_token_id=50000))
    assert config.bos_token_id == config.eos_token_id != config.pad_token_id


@pytest.mark.parametrize("name", NAMES)
def test_dropout_is_off_unless_asked_for(name: str) -> None:
    subject = find_subject(name)
    for probability in (0.0, 0.25):
        given = subject.shrunk(Sizes(), num_blocks=2, dropout=probability).config.to_dict()
        found = {
            value for key, value in given.items() if "drop" in key and "layerdrop" not in key and type(value) in (int, float)
        }
        assert found == {probability}


def test_dropout_asked_of_a_config_without_any_is_refused() -> None:
    class Without(LlamaConfig):
        def to_dict(self) -> dict[str, Any]:
            return {name: value for name, value in super().to_dict().items() if "drop" not in name}

    with pytest.raises(PlanError, match="no dropout"):
        tiny(Without(), dropout=0.1)


def test_sizes_are_what_was_asked_for() -> None:
    config = tiny(LlamaConfig(), Sizes(heads=9, kv_heads=3, vocab=97, layers=5, tied=True))
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size, config.num_hidden_layers) == (
        9,
        3,
        97,
        5,
    )
    assert config.hidden_size == 9 * config.head_dim
    assert config.tie_word_embeddings is True
    assert config.intermediate_size == INNER


def test_original_config_is_left_alone() -> None:
    config = Qwen3Config()
    before = config.to_dict()
    tiny(config, Sizes(heads=6, kv_heads=2, layers=3))
    assert config.to_dict() == before


@pytest.mark.parametrize(("old", "heads", "expected"), [(32, None, HEADS), (8, None, 2), (1, None, 1), (8, 9, 3), (4, 5, 1)])
def test_kv_heads_keep_their_kind(old: int, heads: int | None, expected: int) -> None:
    """As many as heads, some that divide them, or one."""
    config = tiny(LlamaConfig(num_attention_heads=32, num_key_value_heads=old), Sizes(heads=heads))
    assert config.num_key_value_heads == expected


def test_mere_model_type_gets_grouped_heads() -> None:
    assert find_subject("llama").shrunk(Sizes(), num_blocks=2).config.num_key_value_heads == 2
    assert find_subject(LlamaConfig()).shrunk(Sizes(), num_blocks=2).config.num_key_value_heads == HEADS


def test_head_size_that_is_not_hidden_by_heads_stays_so() -> None:
    config = tiny(Gemma3TextConfig())
    assert config.head_dim * config.num_attention_heads != config.hidden_size


def test_every_kind_of_layer_is_kept() -> None:
    config = tiny(Gemma3TextConfig(), num_blocks=3)
    assert config.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    assert config.sliding_window < 8


def test_factors_of_rotary_frequencies_are_as_many_as_frequencies() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    rope["original_max_position_embeddings"] = 4096
    config = tiny(Phi3Config(rope_parameters=rope, max_position_embeddings=131072))
    assert len(config.rope_parameters["long_factor"]) == config.hidden_size // config.num_attention_heads // 2
    assert config.rope_parameters["original_max_position_embeddings"] < POSITIONS


def test_settings_that_are_no_sizes_stay() -> None:
    old = T5Config(feed_forward_proj="gated-gelu", tie_word_embeddings=False)  # this class makes other settings of that
    new = tiny(old)
    assert (new.is_gated_act, new.dense_act_fn, new.scale_decoder_outputs) == (True, "gelu_new", False)
    assert tiny(BertConfig(hidden_act="relu", layer_norm_eps=1e-3)).layer_norm_eps == 1e-3


def test_encoder_decoder_has_a_token_to_start_with() -> None:
    assert tiny(T5Config()).decoder_start_token_id == 0


@pytest.mark.parametrize(
    ("tp", "pp", "schedule", "blocks"), [(1, 1, "1f1b", 2), (4, 1, "1f1b", 4), (2, 2, "1f1b", 3), (1, 2, "interleaved", 5)]
)
def test_there_are_blocks_for_all_stages(tp: int, pp: int, schedule: str, blocks: int) -> None:
    assert Settings(tp=tp, pp=pp, schedule=schedule).num_blocks == blocks
    assert tiny(GPT2Config(), num_blocks=blocks).n_layer == blocks
    assert tiny(T5Config(), num_blocks=5).num_layers == 3  # of each stack


def test_full_size_changes_only_what_was_asked_for() -> None:
    config = tiny(LlamaConfig(), Sizes(full=True, layers=3, vocab=1000))
    assert (config.hidden_size, config.intermediate_size, config.num_attention_heads) == (4096, 11008, 32)
    assert (config.num_hidden_layers, config.vocab_size) == (3, 1000)


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({"heads": 0}, "positive"),
        ({"layers": -1}, "positive"),
        ({"vocab": True}, "positive"),
        ({"heads": 4, "kv_heads": 3}, "multiple"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        Sizes(**sizes)


def test_size_that_the_config_does_not_have_is_refused() -> None:
    with pytest.raises(PlanError, match="no size for kv_heads"):
        tiny(GPT2Config(), Sizes(kv_heads=2))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"tp": 0}, "tp size"),
        ({"pp": 2, "schedule": "zigzag"}, "no such pipeline schedule"),
        ({"schedule": "gpipe"}, "there is one"),
        ({"sequence_parallel": True}, "there is one"),
        ({"micro_batch_size": 0}, "micro-batch size"),
        ({"dtype": "int8"}, "number format"),
        ({"dropout": 1.0}, "between 0 and 1"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Settings(**settings)


def test_written_sizes_are_of_model_types_that_there_are() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    written = written_model_types()
    assert written
    assert set(written) <= set(CONFIG_MAPPING_NAMES)
    assert all(written_sizes(model_type) for model_type in written)


def test_written_expressions_follow_what_was_asked_for() -> None:
    config = find_subject("esmc").shrunk(Sizes(heads=6), num_blocks=2).config
    assert config.num_key_value_heads == config.num_attention_heads == 6


def test_written_kinds_of_layers_are_for_mere_model_types() -> None:
    config = Lfm2Config(num_hidden_layers=3, layer_types=["full_attention"] * 3)
    assert set(tiny(config).layer_types) == {"full_attention"}
    assert set(find_subject("lfm2").shrunk(Sizes(), num_blocks=2).config.layer_types) == {"conv", "full_attention"}


def test_lists_of_layer_numbers_keep_both_kinds() -> None:
    kinds = Kinds({"moe_layers": [2, 5], "rates": [1, 1, 1, 1, 1, 1]}, 6, {})
    assert (kinds.count, kinds.lists(2)) == (2, {"moe_layers": [1], "rates": [1, 1]})


def test_layers_that_differ_in_any_list_are_of_different_kinds() -> None:
    kinds = Kinds({"layer_types": ["a", "a", "b", "b"], "mlp_layer_types": ["x", "y", "y", "y"]}, 4, {})
    assert kinds.count == 3
    assert kinds.lists(3) == {"layer_types": ["a", "a", "b"], "mlp_layer_types": ["x", "y", "y"]}
    assert kinds.overrides({"02": "two", 3: "three"}, 3) == [(2, "two")]


def test_full_size_keeps_latent_heads_and_lists() -> None:
    config = tiny(Gemma3TextConfig(num_hidden_layers=12), Sizes(full=True, layers=2))
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert config.hidden_size == Gemma3TextConfig().hidden_size


def test_dropout_reaches_the_parts_of_a_composite_config() -> None:
    config = find_subject("gemma3", "causal").shrunk(Sizes(), num_blocks=2, dropout=0.25).config
    assert config.text_config.attention_dropout == 0.25
