"""Policies derived for architectures that have one: the same tensors in the same slices, without looking at it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oslo_engine.checkpoint.skeleton import meta_model
from oslo_engine.cli.main import main
from oslo_engine.derive import Derived, derive
from oslo_engine.derive.specimen import observe
from oslo_engine.derive.trial import Truth, why_not
from oslo_engine.plan.match import match_policy
from oslo_engine.policy.loader import load_policy
from oslo_engine.policy.registry import find_policy
from oslo_engine.policy.schema import Region, Unit
from oslo_engine.tiny.sizes import Sizes
from oslo_engine.tiny.subject import find_subject


@cache
def derived(model_type: str) -> Derived:
    return derive(find_subject(model_type))


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "bert", "t5"])
def test_the_same_slices_as_the_written_policy(model_type: str) -> None:
    found = derived(model_type)
    assert found.notes == ()
    model = find_subject(model_type).shrunk(Sizes(), num_blocks=4).build(meta_model)
    ours = match_policy(model, found.policy, 2)
    written = match_policy(model, find_policy(None, model_type), 2)
    assert ours.stacks == written.stacks
    assert ours.shards == written.shards
    assert dict(ours.heads) == dict(written.heads)
    assert dict(ours.embeddings) == dict(written.embeddings)


def test_numbers_are_named_and_attributes_follow_their_units() -> None:
    region = derived("llama").policy.regions["self_attn"]
    assert region.columns == {"q_proj": ("q",), "k_proj": ("kv",), "v_proj": ("kv",)}
    assert region.set == {"num_key_value_groups": ("q / kv",)}
    units = derived("llama").policy.units
    assert (units["q"].count, units["q"].per, units["kv"].count) == ("num_attention_heads", "kv", "num_key_value_heads")
    assert derived("gpt2").policy.regions["attn"].set == {"split_size": ("head * head_dim",)}


@pytest.mark.parametrize(
    ("columns", "problem"),
    [(["head", "head", "head"], None), (["head"], "other numbers")],
    ids=["one after another", "each head together"],
)
def test_a_wrong_layout_of_the_right_sizes_brings_other_numbers_to_the_row(columns: list[str], problem: str | None) -> None:
    small = find_subject("gpt2").shrunk(Sizes(), num_blocks=4)
    region = Region(at="attn", columns={"c_attn": columns}, rows={"c_proj": ["head"]}, set={"split_size": ["head * head_dim"]})
    wrong = why_not(Truth(observe(small), "transformer.h.0"), region, {"head": Unit(count="num_heads")}, 2)
    assert wrong is None if problem is None else problem in str(wrong)


def test_where_activations_enter() -> None:
    """The norm and the residual of these MLPs lie in the block itself, behind the row."""
    assert derived("llama").policy.regions["mlp"].enter == "scope"
    assert derived("bert").policy.regions["output"].enter == "columns"
    assert derived("bert").policy.regions["self"].scope == "self"
    assert derived("t5").policy.regions["EncDecAttention"].inputs == ("hidden_states", "key_value_states")


@pytest.mark.parametrize(
    ("model_type", "label", "enter", "inputs", "summed"),
    [
        ("gpt_neox_japanese", "attention", "columns", (), ()),
        ("t5gemma2", "self_attn", "columns", (), ("q_norm.weight", "k_norm.weight")),
        ("encoder-decoder", "self_2", "scope", ("hidden_states", "encoder_hidden_states"), ()),
    ],
    ids=["a bias that the last block adds behind the row", "an argument of the decoder's blocks", "one name for two arguments"],
)
def test_activations_enter_where_gradients_are_whole_in_all_kinds_of_blocks(
    model_type: str, label: str, enter: str, inputs: tuple[str, ...], summed: tuple[str, ...]
) -> None:
    region = derived(model_type).policy.regions[label]
    assert (region.enter, region.inputs, region.sum) == (enter, inputs, summed)


def test_a_table_that_only_some_blocks_have_may_be_missing() -> None:
    cut = derived("t5").policy.regions["SelfAttention"].cut
    assert list(cut) == ["maybe relative_attention_bias.weight"]
    assert cut["maybe relative_attention_bias.weight"].dim == 1


def test_experts_are_cut_inside_and_can_be_dealt_whole() -> None:
    region = derived("mixtral").policy.regions["experts"]
    assert region.leave == "scope"
    assert region.inputs == ("hidden_states", "top_k_weights")
    assert region.cut["gate_up_proj"].unit == ("feature", "feature")
    assert (region.cut["gate_up_proj"].dim, region.cut["down_proj"].dim) == (1, 2)
    assert region.experts is not None
    assert region.experts.set == {"num_experts": ("expert",)}


def test_interleaved_and_transposed_experts_with_a_bias_that_is_added_once() -> None:
    region = derived("gpt_oss").policy.regions["experts"]
    assert region.cut["gate_up_proj"].unit == ("feature * 2",)
    assert (region.cut["gate_up_proj"].dim, region.cut["down_proj"].dim) == (2, 1)
    assert region.once == ("down_proj_bias",)


def test_an_inner_row_of_a_state_space_block() -> None:
    region = derived("mamba").policy.regions["mixer"]
    assert set(region.inner) == {"x_proj"}
    assert set(region.columns) == {"in_proj", "dt_proj"}
    assert {"A_log", "D", "conv1d.weight", "conv1d.bias"} <= set(region.cut)


@pytest.mark.parametrize("model_type", ["t5", "gpt_oss", "mamba"])
def test_the_text_is_the_policy(model_type: str, tmp_path: Path) -> None:
    file = tmp_path / f"{model_type}.yaml"
    file.write_text(derived(model_type).yaml)
    read = load_policy(file, lambda name: tmp_path / name)
    assert read.model_dump() == derived(model_type).policy.model_dump()


def test_the_command_writes_a_file(tmp_path: Path) -> None:
    file = tmp_path / "llama.yaml"
    ran = CliRunner().invoke(main, ["policy", "derive", "llama", "--output", str(file)])
    assert ran.exit_code == 0, ran.output
    assert "Tensor parallelism divides 100% of the weights in blocks" in " ".join(ran.output.split())
    assert file.read_text() == derived("llama").yaml


def test_the_command_refuses_what_is_no_language_model() -> None:
    ran = CliRunner().invoke(main, ["policy", "derive", "vit"])
    assert ran.exit_code == 2
    assert ran.output.startswith("error: ")
