"""Matching policies to models: shards on real architectures, and every misfit is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import small_models
import toy_regions
from oslo_engine.errors import OsloError, PlanError, PolicyError
from oslo_engine.plan.match import Match, match_policy
from oslo_engine.policy.registry import find_policy
from oslo_engine.policy.schema import Policy
from oslo_engine.rewrite.planning import plan_model
from oslo_engine.topology import Topology


def on_meta(name: str, **more: Any) -> Any:
    cls, config, _ = getattr(small_models, name)(**more)
    with torch.device("meta"):
        return cls(config)


def matched(name: str, tp: int, **more: Any) -> Match:
    model = on_meta(name, **more)
    return match_policy(model, find_policy(None, model.config.model_type), tp)


def changed(model: Any, **changes: Any) -> Policy:
    """The installed policy of a model with some of its regions' entries replaced, as a YAML file would."""
    policy = find_policy(None, model.config.model_type)
    content = policy.model_dump()
    for path, value in changes.items():
        *parents, last = path.split("__")
        target = content
        for parent in parents:
            target = target[parent]
        target[last] = value
    return Policy(**content).model_copy(update={"origin": "test.yaml"})


def test_packed_attention_is_cut_head_by_head_in_each_part() -> None:
    shard = matched("gpt2", 2).shards["transformer.h.1.attn.c_attn.weight"]
    assert (shard.dim, shard.size) == (1, 96)
    assert shard.spans == (((0, 16), (32, 48), (64, 80)), ((16, 32), (48, 64), (80, 96)))


def test_grouped_heads_keep_their_kv_head() -> None:
    found = matched("llama", 4)
    assert found.shards["model.layers.0.self_attn.q_proj.weight"].spans[3] == ((24, 32),)
    assert found.shards["model.layers.0.self_attn.k_proj.weight"].spans == (((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),))
    region = next(region for region in found.regions if region.scope == "model.layers.0.self_attn")
    assert region.attributes == (("model.layers.0.self_attn", "num_key_value_groups", (1, 1, 1, 1)),)


def test_every_position_bias_table_is_cut_by_head() -> None:
    shards = matched("t5", 2).shards
    tables = [name for name in shards if "relative_attention_bias" in name]
    assert len(tables) == 2
    assert all(shards[name].dim == 1 and shards[name].spans == (((0, 2),), ((2, 4),)) for name in tables)


def test_a_vocabulary_may_be_cut_unevenly() -> None:
    found = matched("gpt2", 4)
    assert dict(found.heads)["lm_head"] == (24, 24, 24, 24)
    model = on_meta("gpt2")
    model.config.vocab_size = 95
    with torch.device("meta"):
        model = type(model)(model.config)
    assert dict(match_policy(model, find_policy(None, "gpt2"), 4).heads)["lm_head"] == (24, 24, 24, 23)


def test_nothing_is_cut_without_tensor_parallelism() -> None:
    found = matched("llama", 1)
    assert not found.shards
    assert not found.regions
    assert found.stacks["decoder"] == tuple(f"model.layers.{layer}" for layer in range(4))


def test_a_model_without_a_head_matches_too() -> None:
    from transformers import GPT2Model

    _, config, _ = small_models.gpt2()
    with torch.device("meta"):
        found = match_policy(GPT2Model(config), find_policy(None, "gpt2"), 2)
    assert found.stacks["decoder"][0] == "h.0"
    assert dict(found.embeddings) == {"wte": (48, 48)}
    assert not found.heads


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stacks": {"decoder": "blocks.*"}}, "no stack of the policy is in this model"),
        ({"regions__mlp__at": "ffn"}, "region 'mlp' matches no module"),
        ({"regions__mlp__columns": {"c_fc": "feature", "gate": "feature"}}, "rule 'gate' matches nothing"),
        ({"regions__mlp": {"at": "mlp", "columns": {"c_fc": "feature"}, "rows": {"x": "feature"}}}, "lacks rows"),
        ({"regions": {}}, r"says nothing about 4 parameters(?s:.*)attn.c_attn.weight(?s:.*)mlp.c_proj.weight"),
        ({"replicate": {"wpe": "small", "wte": "cut"}}, "rule 'wte' matches no uncut parameter"),
        ({"regions__attention__columns": {"c_attn": ("head * 100", "head")}}, "no multiple of the number of items"),
        ({"regions__attention__columns": {"c_attn": ("feature", "head")}}, "beside features the other parts need a width"),
        ({"regions__mlp__columns": {"act": "feature"}}, "only Linear and Conv1D modules"),
        ({"regions__mlp__columns": {"c_fc": "experts"}}, "unknown unit 'experts'"),
        ({"regions__attention__columns": {"c_attn": ("head",) * 5}}, "no multiple of the number of items"),
        ({"regions__attention__set": {"heads": "head"}}, "no such attribute"),
        ({"regions__attention__set": {"num_heads": "head * width"}}, "unknown name 'width'"),
        ({"units": {"head": {"count": "heads"}}}, "the unit 'head' has no count here: unknown name 'heads'"),
        ({"regions__mlp__columns": {"c_fc": "head"}}, "must be dealt out alike"),
        ({"regions__mlp__scope": "inner"}, "the scope is no module"),
        ({"vocabulary__heads": ()}, r"says nothing about 1 parameters(?s:.*)lm_head.weight"),
        ({"regions__again": {"at": "mlp", "columns": {"c_fc": "feature"}, "rows": {"c_proj": "feature"}}}, "cut by two rules"),
    ],
)
def test_a_policy_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    model = on_meta("gpt2")
    with pytest.raises(PolicyError, match=message):
        match_policy(model, changed(model, **changes), 2)


def test_all_faults_of_a_policy_are_told_at_once() -> None:
    model = on_meta("gpt2")
    wrong = changed(
        model,
        regions__mlp__columns={"c_fc": "feature", "gate": "feature"},
        units={"head": {"count": "heads"}},
        vocabulary__heads=(),
    )
    with pytest.raises(
        PolicyError, match=r"(?s)faults in the policy.*unknown name 'heads'.*'gate' matches nothing.*says nothing about"
    ):
        match_policy(model, wrong, 2)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"regions__mlp__rows": {"c_prj": "feature"}}, r"'c_prj' matches nothing.*c_fc, c_proj, act.*did you mean 'c_proj'"),
        ({"regions__mlp__cut": {"c_fc.bais": "feature"}}, r"'c_fc.bais' matches nothing.*c_fc.weight, c_fc.bias"),
        ({"regions__attention__set": {"num_head": "head"}}, r"a number of GPT2Attention: .*did you mean 'num_heads'"),
        ({"vocabulary__heads": ("lm_haed",)}, r"'lm_haed' of the vocabulary matches nothing.*expected: lm_head"),
        ({"replicate": {"wpe": "small", "wpee": "no"}}, r"'wpee' matches no uncut parameter.*transformer.h.\*.ln_1.weight"),
        ({"regions__attention__columns": {"c_attn": ("head * 16",) * 4}}, r"do not add up.*256 \(.*dimension 1 of .*: 96"),
    ],
)
def test_what_matches_nothing_is_told_with_what_is_there(changes: dict[str, Any], told: str) -> None:
    model = on_meta("gpt2")
    with pytest.raises(PolicyError, match=f"(?s){told}"):
        match_policy(model, changed(model, **changes), 2)


def test_a_fault_in_every_block_is_told_once_and_hides_no_other() -> None:
    model = on_meta("gpt2")
    wrong = changed(
        model,
        regions__mlp__columns={"c_fc": "feature", "gate": "feature"},
        regions__mlp__rows={"c_prj": "feature"},
        vocabulary__heads=("lm_haed",),
    )
    with pytest.raises(PolicyError) as error:
        match_policy(model, wrong, 2)
    told = [line for line in str(error.value).splitlines() if line.startswith("- ")]
    assert [line.partition(" in ")[0] for line in told] == [
        "- region 'mlp' lacks rows",
        "- rule 'gate' matches nothing",
        "- rule 'c_prj' matches nothing",
        "- rule 'lm_haed' of the vocabulary matches nothing",
        "- the policy says nothing about 1 parameters",
    ]


def test_a_rule_that_may_match_nothing_is_let_be() -> None:
    model = on_meta("gpt2")
    found = match_policy(model, changed(model, regions__mlp__columns={"c_fc": "feature", "maybe gate": "feature"}), 2)
    assert "transformer.h.0.mlp.c_fc.weight" in found.shards


def test_what_is_replicated_on_purpose_is_known_with_its_reason() -> None:
    assert matched("gpt2", 2).replicated == {
        "transformer.wpe.weight": "small",
    }


def test_a_tied_parameter_cut_under_one_name_only_is_refused() -> None:
    model = on_meta("gpt2")
    with pytest.raises(PlanError, match=r"(?s)tied parameters must be cut alike.*not cut: transformer.wte.weight"):
        match_policy(model, changed(model, vocabulary__embeddings=(), replicate={"wpe": "small", "wte": "a mistake"}), 2)


def test_more_ranks_than_heads_are_refused_with_the_number() -> None:
    with pytest.raises(PlanError, match=r"(?s)num_attention_heads.*at least 5.*use tp <= 4"):
        matched("gpt2", 5)


def toy(block: str, tmp_path: Any, old: str = "", new: str = "") -> Any:
    """A toy model with its policy, in which a text was replaced."""
    path = toy_regions.write_policy(block, tmp_path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new) if old else text)
    return toy_regions.ToyModel(toy_regions.ToyConfig(block=block)), find_policy(path, "toy")


def test_a_region_stands_only_where_the_module_has_what_it_needs(tmp_path: Any) -> None:
    for word in ("needs: gate", "when: {num_heads: 4}", "when: {repeats: 2}"):
        block = "NormOfShared" if "repeats" in word else "EnterAtColumns"
        model, policy = toy(block, tmp_path, "at: core", f"at: core\n    {word}")
        assert match_policy(model, policy, 2).regions
    for word in ("needs: other", "when: {num_heads: 5}"):
        model, policy = toy("EnterAtColumns", tmp_path, "at: core", f"at: core\n    {word}")
        with pytest.raises(PolicyError, match="region 'only' matches no module"):
            match_policy(model, policy, 2)


def test_whole_experts_are_dealt_where_that_is_asked_for(tmp_path: Any) -> None:
    model, policy = toy("Mixture", tmp_path)
    found = match_policy(model, policy, 2, expert_split="expert")
    assert found.shards["layers.0.core.experts.up"].spans == (((0, 2),), ((2, 4),))
    assert found.regions[0].experts.spans == ((0, 2), (2, 4))
    assert match_policy(model, policy, 2).shards["layers.0.core.experts.up"].dim == 2


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        ("refuse: {num_heads: because}", {}, r"(?s)a model with num_heads cannot be cut.*because"),
        ("not_with: {torch: its kernels}", {}, r"(?s)cannot be cut while torch is installed.*its kernels"),
        ("", {"sequence_parallel": True}, r"(?s)not known to work with sequence parallelism.*sequence_parallel: true"),
        ("", {"expert_split": "both"}, r"(?s)no such split of experts.*inner or expert.*'both'"),
    ],
)
def test_what_a_policy_does_not_allow_is_refused(tmp_path: Any, words: str, options: dict[str, Any], message: str) -> None:
    model, policy = toy("InnerRow", tmp_path, "models: [toy]", f"models: [toy]\n{words}")
    with pytest.raises(OsloError, match=message):
        plan_model(model, policy, Topology(tp=2), **options)
    if words:
        plan_model(model, policy, Topology(tp=1))  # only tensor parallelism is refused


def test_a_model_whose_rows_influence_one_another_is_refused_in_a_pipeline(tmp_path: Any) -> None:
    model, policy = toy("InnerRow", tmp_path, "models: [toy]", "models: [toy]\nwhole_batch: they do")
    with pytest.raises(OsloError, match=r"(?s)does not compute the same in micro-batches.*they do"):
        plan_model(model, policy, Topology(pp=2), rank_of_stage=(0, 1))
    assert plan_model(model, policy, Topology(tp=2)).plan.regions


def test_a_fused_weight_with_parts_of_other_widths_is_cut_part_by_part(tmp_path: Any) -> None:
    model, policy = toy("PackedGroups", tmp_path)
    shard = match_policy(model, policy, 4).shards["layers.0.core.into.weight"]
    # 4 heads of 6, 2 groups of 3, 4 heads of 1; four ranks: groups are shared by two.
    assert shard.spans[1] == ((6, 12), (24, 27), (31, 32))
    assert shard.spans[2] == ((12, 18), (27, 30), (32, 33))
