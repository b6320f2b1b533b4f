"""What ``verify`` takes for a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModel, BertConfig, BertLMHeadModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, ViTConfig

import oslo_engine
from oslo_engine.errors import UnsupportedError
from oslo_engine.tiny.sizes import Sizes
from oslo_engine.tiny.subject import Subject, find_subject


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("gpt2", "GPT2LMHeadModel"),
        ("llama", "LlamaForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
        ("bert", "BertForMaskedLM"),
        ("roberta", "RobertaForMaskedLM"),
        ("t5", "T5ForConditionalGeneration"),
        ("bart", "BartForConditionalGeneration"),
    ],
)
def test_model_type_gives_its_language_model(name: str, cls: str) -> None:
    subject = find_subject(name)
    assert (subject.name, subject.by_name, subject.config.model_type) == (cls, True, name)
    assert subject.load_class().__name__ == cls


def test_folder_gives_the_class_that_its_config_names(tmp_path: Path) -> None:
    BertConfig(architectures=["BertLMHeadModel"], is_decoder=True, hidden_size=60).save_pretrained(tmp_path)
    subject = find_subject(tmp_path)
    assert (subject.name, subject.config.hidden_size, subject.by_name) == ("BertLMHeadModel", 60, False)


def test_named_class_without_a_language_model_s_head_is_passed_over(tmp_path: Path) -> None:
    BertConfig(architectures=["BertForSequenceClassification"]).save_pretrained(tmp_path)
    assert find_subject(str(tmp_path)).name == "BertForMaskedLM"


def test_decoder_config_gives_the_causal_model() -> None:
    assert find_subject(BertConfig(is_decoder=True)).name == "BertLMHeadModel"


@pytest.mark.parametrize("cls", [GPT2LMHeadModel, oslo_engine.GPT2LMHeadModel])
def test_model_gives_its_class_and_a_copy_of_its_config(cls: type) -> None:
    with torch.device("meta"):
        model = cls(GPT2Config(n_layer=1))
    subject = find_subject(model)
    assert subject.load_class() is GPT2LMHeadModel
    assert subject.config.n_layer == 1
    assert subject.config is not model.config


def test_model_of_another_head_keeps_its_class() -> None:
    with torch.device("meta"):
        assert find_subject(BertLMHeadModel(BertConfig(num_hidden_layers=1, is_decoder=True))).name == "BertLMHeadModel"


def test_class_is_named_by_its_module() -> None:
    subject = find_subject("transformers.models.gpt2.modeling_gpt2:GPT2LMHeadModel")
    assert subject.load_class() is GPT2LMHeadModel
    assert subject.config.model_type == "gpt2"


def test_class_that_ranks_cannot_import_is_refused() -> None:
    class Local(GPT2LMHeadModel):
        pass

    with torch.device("meta"):
        model = Local(GPT2Config(n_layer=1))
    with pytest.raises(UnsupportedError, match="cannot import"):
        find_subject(model)


def test_model_without_a_head_is_refused() -> None:
    with torch.device("meta"):
        model = AutoModel.from_config(GPT2Config(n_layer=1))
    with pytest.raises(UnsupportedError, match="with a head"):
        find_subject(model)


@pytest.mark.parametrize("config", [ViTConfig()])
def test_config_of_no_language_model_is_refused(config: object) -> None:
    with pytest.raises(UnsupportedError, match="with a head"):
        find_subject(config)


@pytest.mark.parametrize(
    ("task", "cls"),
    [
        ("causal", "BartForCausalLM"),
        ("masked", "BartForConditionalGeneration"),
        ("seq2seq", "BartForConditionalGeneration"),
    ],
)
def test_task_chooses_among_the_language_models_of_one_type(task: str, cls: str) -> None:
    assert find_subject("bart", task).name == cls


def test_task_goes_before_the_class_that_the_config_names() -> None:
    config = BertConfig(architectures=["BertForMaskedLM"])
    assert find_subject(config).name == "BertForMaskedLM"
    assert find_subject(config, "causal").name == "BertLMHeadModel"


def test_causal_model_of_an_encoder_s_type_sees_no_later_tokens() -> None:
    config = BertConfig()
    assert find_subject(config, "causal").config.is_decoder
    assert not config.is_decoder
    assert not find_subject(BertConfig(is_decoder=True), "masked").config.is_decoder


def test_class_made_of_the_text_part_gets_that_part() -> None:
    assert find_subject("qwen3_5", "causal").config.model_type == "qwen3_5_text"
    assert find_subject("gemma3", "causal").config.model_type == "gemma3"  # its class takes the whole


@pytest.mark.parametrize(
    ("name", "task", "complaint"),
    [("llama", "masked", "no masked language model"), ("t5", "causal", "seq2seq"), ("bert", "tagging", "no such task")],
)
def test_task_that_the_architecture_does_not_have_is_refused(name: str, task: str, complaint: str) -> None:
    with pytest.raises(UnsupportedError, match=complaint):
        find_subject(name, task)


def test_task_of_a_model_must_be_its_own() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=1))
    assert find_subject(model, "causal").name == "GPT2LMHeadModel"
    with pytest.raises(UnsupportedError, match="that of its class"):
        find_subject(model, "masked")


def test_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnsupportedError, match=r"no such model[\s\S]*did you mean .*llama"):
        find_subject("lama")


def test_nothing_in_particular_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="nothing that can be planned or verified"):
        find_subject(3)


def test_constructor_that_fails_is_refused_with_its_reason() -> None:
    def construct(cls: type, config: object) -> None:
        raise ZeroDivisionError("no heads")

    with pytest.raises(UnsupportedError, match="ZeroDivisionError: no heads"):
        Subject("transformers", "LlamaForCausalLM", LlamaConfig()).build(construct)


def test_shrinking_leaves_the_subject_alone() -> None:
    subject = find_subject("gpt2")
    assert subject.shrunk(Sizes(), num_blocks=2).config.n_layer == 2
    assert subject.config.n_layer == 12
