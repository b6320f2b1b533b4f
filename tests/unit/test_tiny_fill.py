"""Weights in which every mistake shows."""

from __future__ import annotations

import pytest
import torch

from oslo_engine.tiny.fill import fill, values
from oslo_engine.tiny.sizes import Sizes
from oslo_engine.tiny.subject import find_subject


def filled(name: str, seed: int = 0) -> torch.nn.Module:
    subject = find_subject(name).shrunk(Sizes(), num_blocks=2)
    model = subject.load_class()._from_config(subject.config)
    fill(model, seed)
    return model


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "bert", "t5"])
def test_no_entry_is_zero_or_one_and_none_are_alike(name: str) -> None:
    for parameter_name, parameter in filled(name).named_parameters():
        entries = parameter.detach().flatten()
        assert not ((entries == 0) | (entries == 1)).any(), parameter_name
        assert len(entries.unique()) > 0.99 * len(entries), parameter_name


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_biases_and_norms_are_far_from_their_usual_values(name: str) -> None:
    vectors = {key: value for key, value in filled(name).named_parameters() if value.ndim == 1}
    assert {"bias", "weight"} <= {key.rpartition(".")[2] for key in vectors}
    for key, vector in vectors.items():
        assert vector.detach().abs().mean() > 0.1, key
        assert (vector.detach() - 1).abs().min() > 0.05, key


def test_parameters_of_equal_shape_differ() -> None:
    model = dict(filled("llama").named_parameters())
    first, second = (model[f"model.layers.{layer}.mlp.gate_proj.weight"] for layer in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(first, model["model.layers.0.mlp.up_proj.weight"])


def test_same_name_and_seed_give_the_same_values_whatever_was_drawn_before() -> None:
    torch.manual_seed(1)
    first = values("h.0.weight", (5, 7), 3)
    torch.manual_seed(2)
    assert torch.equal(first, values("h.0.weight", (5, 7), 3))
    assert not torch.equal(first, values("h.0.weight", (5, 7), 4))


def test_values_in_sixteen_bits_are_not_zero_or_one_either() -> None:
    for shape in ((64, 64), (4096,)):
        rounded = values("norm.weight", shape, 0).to(torch.bfloat16)
        assert not ((rounded == 0) | (rounded == 1)).any()


def test_matrices_keep_the_size_of_activations() -> None:
    for width in (16, 1024):
        out = torch.ones(width).sqrt() @ values("w", (width, width), 0).T
        assert 0.1 < out.std() < 3
