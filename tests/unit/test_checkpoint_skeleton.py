"""Models without weights: cheap, tied, and with true buffers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from oslo_engine.checkpoint.skeleton import materialize_buffers, meta_model, transformers_class
from oslo_engine.errors import UnsupportedError
from split_models import CPU, MODELS


def peak_resident_bytes() -> int:
    return (
        int(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")).split()[1])
        << 10
    )


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_on_meta_and_buffers_are_those_of_the_real_model(name: str) -> None:
    cls, config = MODELS[name]()
    model, right = meta_model(cls, config, torch.bfloat16), cls._from_config(config, dtype=torch.bfloat16)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert [(n, p.shape, p.dtype) for n, p in model.named_parameters()] == [
        (n, p.shape, p.dtype) for n, p in right.named_parameters()
    ]
    buffers = dict(model.named_buffers())
    assert buffers.keys() == dict(right.named_buffers()).keys()
    assert all(torch.equal(buffers[name], buffer) for name, buffer in right.named_buffers())
    assert len(list(model.named_parameters(remove_duplicate=False))) == len(
        list(right.named_parameters(remove_duplicate=False))
    )


class Noisy(BertForMaskedLM):
    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.register_buffer("noise", torch.randn(3))


def test_the_random_state_is_left_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    meta_model(Noisy, MODELS["bert"]()[1])
    assert torch.equal(torch.get_rng_state(), before)


def test_buffers_are_real_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        model = meta_model(*MODELS["llama"]())
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_seventy_billion_parameters_take_no_memory() -> None:
    config = LlamaConfig(
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
        vocab_size=128256,
    )
    meta_model(*MODELS["llama"]())
    before, start = peak_resident_bytes(), time.process_time()
    model = meta_model(LlamaForCausalLM, config, torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) > 70e9
    assert time.process_time() - start < 2
    assert peak_resident_bytes() - before < 100 << 20


def test_buffers_of_a_model_on_meta_get_their_values() -> None:
    for cls, config in (MODELS["llama"](), MODELS["bert"](), MODELS["t5"]()):
        with torch.device("meta"):
            model = cls(config)
        right = cls(config)
        materialize_buffers(model, CPU)
        found = dict(model.named_buffers())
        assert all(torch.equal(found[name], buffer) for name, buffer in right.named_buffers())
        assert all(parameter.is_meta for parameter in model.parameters())


def test_buffers_that_are_real_keep_their_values() -> None:
    cls, config = MODELS["llama"]()
    model = meta_model(cls, config)
    model.model.rotary_emb.inv_freq.fill_(3)
    materialize_buffers(model, CPU)
    assert model.model.rotary_emb.inv_freq.unique().tolist() == [3]


def test_plain_tensors_on_meta_are_replaced_too() -> None:
    class Scaled(BertForMaskedLM):
        def __init__(self, config: BertConfig) -> None:
            super().__init__(config)
            self.scale = torch.arange(3.0)

    config = MODELS["bert"]()[1]
    with torch.device("meta"):
        model = Scaled(config)
    assert model.scale.is_meta
    materialize_buffers(model, CPU)
    assert torch.equal(model.scale, torch.arange(3.0))


def test_a_buffer_that_no_constructor_makes_is_an_error() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=10))
        model.transformer.register_buffer("mine", torch.ones(3))
    with pytest.raises(UnsupportedError, match="buffer") as error:
        materialize_buffers(model, CPU)
    assert error.value.where == "transformer.mine"


def test_the_transformers_class_is_found_under_ours() -> None:
    ours = type("GPT2LMHeadModel", (GPT2LMHeadModel,), {"__module__": "oslo_engine.api"})
    assert transformers_class(ours) is GPT2LMHeadModel
    assert transformers_class(GPT2LMHeadModel) is GPT2LMHeadModel
