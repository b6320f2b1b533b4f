"""Loading any checkpoint at any layout gives every rank exactly the slices of what Transformers would load."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
    MixtralForCausalLM,
    PreTrainedModel,
    T5ForConditionalGeneration,
)
from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming

import small_models
from oslo_engine.checkpoint import names
from oslo_engine.checkpoint.initialize import initialize_missing
from oslo_engine.checkpoint.load import LoadReport, load_weights
from oslo_engine.checkpoint.place import find
from oslo_engine.checkpoint.source import TensorSource, open_source
from oslo_engine.errors import CheckpointError, UnsupportedError
from oslo_engine.plan.plan import Plan
from oslo_engine.shards import deal_evenly, packed_shard
from split_models import CPU, LAYOUTS, MODELS, VOCAB, differences, plan_of, rank_model, whole_model, write_split

NOTHING = LoadReport()


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def edited(folder: Path, change: Any) -> Path:
    """A checkpoint in one file, its tensors changed."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()  # it may be mapped
    save_file(change(tensors), path)
    return folder


def load_ranks(
    cls: Any, config: Any, plan: Plan, source: TensorSource, whole: PreTrainedModel, **options: Any
) -> list[LoadReport]:
    """Load every rank and compare all it holds with ``whole``."""
    reports = []
    for rank in range(plan.topology.world_size):
        model, mesh = rank_model(cls, config, plan, rank, options.get("dtype"))
        reports.append(load_weights(model, plan, mesh.at, source, CPU, **options))
        assert differences(model, whole, plan, mesh) == [], f"rank {rank} of {plan.topology}"
    return reports


def check(cls: Any, config: Any, tp: int, pp: int, folder: Path, whole: PreTrainedModel, **options: Any) -> LoadReport:
    reports = load_ranks(cls, config, plan_of(cls, config, tp, pp), open_source(folder), whole, **options)
    assert all(report == reports[0] for report in reports)
    return reports[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_merged_checkpoint_loads_at_every_layout(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    whole = whole_model(name, dtype=dtype)
    saved(whole, tmp_path)
    for tp, pp in LAYOUTS[name]:
        assert check(*MODELS[name](), tp, pp, tmp_path, whole, dtype=dtype) == NOTHING


@pytest.mark.parametrize("serialization", ["safetensors", "torch"])
@pytest.mark.parametrize("name", MODELS)
def test_a_split_checkpoint_loads_at_every_other_layout(tmp_path: Path, name: str, serialization: Any) -> None:
    whole = whole_model(name, dtype=torch.bfloat16)
    write_split(whole, plan_of(*MODELS[name](), 2, 2), tmp_path, serialization)
    for tp, pp in LAYOUTS[name]:
        assert check(*MODELS[name](), tp, pp, tmp_path, whole, dtype=torch.bfloat16) == NOTHING


def test_replicated_kv_heads_and_uneven_stages_can_be_the_source(tmp_path: Path) -> None:
    whole = whole_model("llama_two_kv")
    write_split(whole, plan_of(*MODELS["llama_two_kv"](), 4, 3), tmp_path)
    for tp, pp in [(1, 1), (2, 2), (3, 1), (4, 4)]:
        assert check(*MODELS["llama_two_kv"](), tp, pp, tmp_path, whole) == NOTHING


def test_untied_embeddings_stay_apart(tmp_path: Path) -> None:
    whole = whole_model("gpt2", tie_word_embeddings=False)
    assert not torch.equal(whole.lm_head.weight, whole.transformer.wte.weight)
    saved(whole, tmp_path / "merged")
    config = whole.config
    write_split(whole, plan_of(GPT2LMHeadModel, config, 2, 2), tmp_path / "split")
    for folder in (tmp_path / "merged", tmp_path / "split"):
        assert check(GPT2LMHeadModel, config, 3, 1, folder, whole) == NOTHING


# -- names


def test_the_base_model_prefix_may_be_missing_or_too_much(tmp_path: Path) -> None:
    whole = whole_model("gpt2")
    saved(whole.transformer, tmp_path / "base")  # as the files on the hub
    saved(whole, tmp_path / "full")
    write_split(whole, plan_of(GPT2LMHeadModel, whole.config, 2, 1), tmp_path / "split")
    assert "wte.weight" in load_file(tmp_path / "base" / "model.safetensors")
    assert check(GPT2LMHeadModel, whole.config, 2, 2, tmp_path / "base", whole) == NOTHING
    for folder in ("full", "split"):
        assert check(GPT2Model, whole.config, 2, 2, tmp_path / folder, whole.transformer) == NOTHING


def with_old_names(tensors: dict[str, Any]) -> dict[str, Any]:
    renamed = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, old in renamed.items():
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    return tensors


def test_old_names_of_layer_norms_are_understood(tmp_path: Path) -> None:
    whole = whole_model("bert")
    folder = edited(saved(whole, tmp_path), with_old_names)
    assert any("gamma" in name for name in open_source(folder).names())
    assert check(*MODELS["bert"](), 2, 2, folder, whole) == NOTHING


def test_what_was_renamed_is_remembered_for_saving(tmp_path: Path) -> None:
    whole = whole_model("bert")
    cls, config = MODELS["bert"]()
    folder = edited(saved(whole, tmp_path), with_old_names)
    plan = plan_of(cls, config, 1, 1)
    model, mesh = rank_model(cls, config, plan, 0)
    load_weights(model, plan, mesh.at, open_source(folder), CPU)
    right = BertForMaskedLM.from_pretrained(folder)
    assert [str(entry) for entry in model._weight_conversions] == [str(entry) for entry in right._weight_conversions]


def test_the_names_in_a_split_checkpoint_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' renamings are made for names on the hub; some would change a name that is right."""
    whole = whole_model("bert")
    write_split(whole, plan_of(*MODELS["bert"](), 2, 1), tmp_path)
    wrong = [WeightRenaming("self.query", "self.key")]
    monkeypatch.setattr(names, "get_model_conversion_mapping", lambda model: copy.deepcopy(wrong))
    assert check(*MODELS["bert"](), 1, 2, tmp_path, whole) == NOTHING


def test_any_name_of_a_tied_parameter_serves(tmp_path: Path) -> None:
    whole = whole_model("t5")
    for number, name in enumerate(("lm_head.weight", "decoder.embed_tokens.weight", "encoder.embed_tokens.weight")):
        folder = edited(
            saved(whole, tmp_path / str(number)),
            lambda tensors, name=name: {key.replace("shared.weight", name): tensor for key, tensor in tensors.items()},
        )
        assert "shared.weight" not in open_source(folder).names()
        assert check(*MODELS["t5"](), 2, 2, folder, whole) == NOTHING


def test_all_names_of_a_tied_parameter_may_be_there_with_one_value(tmp_path: Path) -> None:
    whole = whole_model("gpt2")
    torch.save(whole.state_dict(), tmp_path / "pytorch_model.bin")
    assert check(*MODELS["gpt2"](), 2, 2, tmp_path, whole) == NOTHING
    (tmp_path / "pytorch_model.bin").unlink()
    save_file({name: tensor.clone() for name, tensor in whole.state_dict().items()}, tmp_path / "model.safetensors")
    assert check(*MODELS["gpt2"](), 2, 2, tmp_path, whole) == NOTHING


def test_tied_names_with_different_values_are_an_error(tmp_path: Path) -> None:
    whole = whole_model("gpt2")
    other = torch.zeros(VOCAB, 24)
    folder = edited(saved(whole, tmp_path), lambda tensors: tensors | {"lm_head.weight": other})
    with pytest.raises(CheckpointError, match="different values") as error:
        check(*MODELS["gpt2"](), 2, 1, folder, whole)
    assert "tie_word_embeddings=False" in str(error.value.hint)


# -- conversions


def mixtral_checkpoint(folder: Path) -> tuple[PreTrainedModel, Path]:
    cls, config, _ = small_models.mixtral()
    torch.manual_seed(0)
    whole = cls(config)
    saved(whole, folder)
    assert any(
        "experts.3.w1" in name for name in open_source(folder).names()
    )  # one tensor an expert on disk, one a layer in memory
    return whole, folder


def test_experts_are_put_together_as_transformers_does(tmp_path: Path) -> None:
    whole, folder = mixtral_checkpoint(tmp_path)
    plan = plan_of(MixtralForCausalLM, whole.config, 1, 1)
    [report] = load_ranks(MixtralForCausalLM, whole.config, plan, open_source(folder), whole)
    assert report == NOTHING


def test_experts_can_be_cut_in_any_dimension(tmp_path: Path) -> None:
    whole, folder = mixtral_checkpoint(tmp_path)
    plan = plan_of(MixtralForCausalLM, whole.config, 1, 1)
    for dim in range(3):
        sizes = {tensor.name: tensor.shape[dim] for tensor in plan.tensors if "experts" in tensor.name}
        shards = {name: packed_shard(dim, [(deal_evenly(size, 2), 1)]) for name, size in sizes.items()}
        tensors = tuple(replace(tensor, shard=shards.get(tensor.name)) for tensor in plan.tensors)
        cut = replace(plan, tensors=tensors, topology=replace(plan.topology, tp=2))
        reports = load_ranks(MixtralForCausalLM, whole.config, cut, open_source(folder), whole)
        assert reports == [NOTHING, NOTHING]


def test_a_checkpoint_that_lacks_an_expert_is_an_error(tmp_path: Path) -> None:
    whole, folder = mixtral_checkpoint(tmp_path)
    edited(
        folder, lambda tensors: {name: t for name, t in tensors.items() if "layers.1.block_sparse_moe.experts.2.w1" not in name}
    )
    with pytest.raises(CheckpointError, match="conversion of these weights fails"):
        check(MixtralForCausalLM, whole.config, 1, 1, folder, whole)


def test_one_tensor_can_become_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Transformers splits a fused q|k|v."""
    cls, config = MODELS["llama"]()
    config.num_key_value_heads = 9
    torch.manual_seed(0)
    whole = cls(config)

    def fuse(tensors: dict[str, Any]) -> dict[str, Any]:
        for layer in range(4):
            parts = [tensors.pop(f"model.layers.{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
            tensors[f"model.layers.{layer}.self_attn.qkv.weight"] = torch.cat(parts)
        return tensors

    folder = edited(saved(whole, tmp_path), fuse)
    converter = [WeightConverter("self_attn.qkv", [f"self_attn.{part}_proj" for part in "qkv"], [Chunk(dim=0)])]
    monkeypatch.setattr(names, "get_model_conversion_mapping", lambda model: copy.deepcopy(converter))
    assert check(cls, config, 3, 2, folder, whole) == NOTHING


# -- what is missing, too much, or of another shape


def masked_for_classification(folder: Path) -> Any:
    whole = whole_model("bert")
    saved(whole, folder)
    config = copy.deepcopy(whole.config)
    config.num_labels = 3
    return config


def test_the_report_is_that_of_transformers(tmp_path: Path) -> None:
    config = masked_for_classification(tmp_path)
    _, info = BertForSequenceClassification.from_pretrained(tmp_path, config=config, output_loading_info=True)
    plan = plan_of(BertForSequenceClassification, config, 2, 2)
    for rank in range(4):
        model, mesh = rank_model(BertForSequenceClassification, config, plan, rank)
        report = load_weights(model, plan, mesh.at, open_source(tmp_path), CPU)
        assert set(report.missing) == set(report.uninitialized) == info["missing_keys"]
        assert set(report.unexpected) == info["unexpected_keys"]
        left = [tensor.name for tensor in plan.held_by(mesh.at.pp_rank) if find(model, tensor).is_meta]
        assert left == [name for name in report.uninitialized if mesh.at.pp_rank in plan.holders(plan.tensor(name))]
    assert info["missing_keys"]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2), (4, 1)])
def test_a_new_head_is_initialised_as_transformers_would(tmp_path: Path, tp: int, pp: int) -> None:
    config = masked_for_classification(tmp_path)
    torch.manual_seed(11)
    right = BertForSequenceClassification.from_pretrained(tmp_path, config=config)
    after = torch.get_rng_state()
    plan = plan_of(BertForSequenceClassification, config, tp, pp)
    for rank in range(tp * pp):
        model, mesh = rank_model(BertForSequenceClassification, config, plan, rank)
        torch.manual_seed(11)
        report = load_weights(model, plan, mesh.at, open_source(tmp_path), CPU)
        initialize_missing(BertForSequenceClassification, config, plan, mesh.at, model, report.uninitialized, CPU)
        assert differences(model, right, plan, mesh) == []
        assert torch.equal(torch.get_rng_state(), after)


def test_a_missing_vocabulary_is_initialised_once_for_all_its_names(tmp_path: Path) -> None:
    whole = whole_model("gpt2")
    folder = edited(
        saved(whole, tmp_path), lambda tensors: {n: t for n, t in tensors.items() if "wte" not in n and "h.1.ln" not in n}
    )
    torch.manual_seed(11)
    right = GPT2LMHeadModel.from_pretrained(folder)
    after = torch.get_rng_state()
    plan = plan_of(GPT2LMHeadModel, whole.config, 2, 2)
    for rank in range(4):
        model, mesh = rank_model(GPT2LMHeadModel, whole.config, plan, rank)
        torch.manual_seed(11)
        report = load_weights(model, plan, mesh.at, open_source(folder), CPU)
        initialize_missing(GPT2LMHeadModel, whole.config, plan, mesh.at, model, report.uninitialized, CPU)
        assert "transformer.wte.weight" in report.missing
        assert differences(model, right, plan, mesh) == []
        assert torch.equal(torch.get_rng_state(), after)


class HeadFirst(PreTrainedModel):
    """Its tied parameter has the name of the copy first."""

    config_class = BertConfig
    _tied_weights_keys = {"head.weight": "embed.weight"}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.head = torch.nn.Linear(6, 8, bias=False)
        self.embed = torch.nn.Embedding(8, 6)
        self.other = torch.nn.Linear(2, 2)
        self.post_init()


def test_a_tie_may_be_named_after_the_copy(tmp_path: Path) -> None:
    folder = edited(saved(HeadFirst(BertConfig()), tmp_path), lambda tensors: {"other.bias": tensors["other.bias"]})
    torch.manual_seed(11)
    right = HeadFirst.from_pretrained(folder)
    assert right.head.weight is right.embed.weight
    plan = plan_of(HeadFirst, BertConfig(), 1, 1)
    assert plan.tensor("embed.weight").name == "head.weight"
    model, mesh = rank_model(HeadFirst, BertConfig(), plan, 0)
    torch.manual_seed(11)
    report = load_weights(model, plan, mesh.at, open_source(folder), CPU)
    initialize_missing(HeadFirst, BertConfig(), plan, mesh.at, model, report.uninitialized, CPU)
    assert differences(model, right, plan, mesh) == []


def test_another_shape_is_an_error_or_initialised_anew(tmp_path: Path) -> None:
    whole = whole_model("gpt2")
    folder = edited(saved(whole, tmp_path), lambda tensors: tensors | {"transformer.ln_f.weight": torch.ones(7)})
    plan = plan_of(GPT2LMHeadModel, whole.config, 2, 2)
    for rank in range(4):
        model, mesh = rank_model(GPT2LMHeadModel, whole.config, plan, rank)
        with pytest.raises(CheckpointError, match="other shapes") as error:
            load_weights(model, plan, mesh.at, open_source(folder), CPU)
        assert (error.value.where, error.value.got) == ("transformer.ln_f.weight", (7,))
        report = load_weights(model, plan, mesh.at, open_source(folder), CPU, ignore_mismatched_sizes=True)
        assert report.mismatched == (("transformer.ln_f.weight", (7,), (24,)),)
        assert (report.missing, report.uninitialized) == ((), ("transformer.ln_f.weight",))


def test_tensors_too_many_are_reported_unless_the_model_expects_them(tmp_path: Path) -> None:
    whole = whole_model("gpt2")
    old_buffer = {"transformer.h.0.attn.bias": torch.ones(1)}
    folder = edited(saved(whole, tmp_path), lambda tensors: tensors | old_buffer | {"transformer.extra": torch.ones(1)})
    assert check(GPT2LMHeadModel, whole.config, 2, 2, folder, whole) == LoadReport(unexpected=("transformer.extra",))


def test_quantized_checkpoints_are_refused() -> None:
    cls, config = MODELS["llama"]()
    plan = plan_of(cls, config, 1, 1)
    model, mesh = rank_model(cls, config, plan, 0)
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UnsupportedError, match="quantized"):
        load_weights(model, plan, mesh.at, None, CPU)  # type: ignore[arg-type]


# -- types, devices, memory


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_types_are_those_that_transformers_chooses(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = whole_model("t5")
    saved(whole, tmp_path)
    right = T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype)
    types = {parameter.dtype for parameter in right.parameters()}
    assert types == ({torch.float16, torch.float32} if dtype == torch.float16 else {dtype})
    assert check(T5ForConditionalGeneration, whole.config, 2, 2, tmp_path, right, dtype=dtype) == NOTHING


def test_a_rank_reads_its_slices_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = whole_model("llama", dtype=torch.float32)
    saved(whole, tmp_path)
    cls, config = MODELS["llama"]()
    plan = plan_of(cls, config, 3, 2)
    num_bytes = 0
    real = os.preadv

    def count(fd: int, buffers: Any, offset: int) -> int:
        nonlocal num_bytes
        num_bytes += sum(len(buffer) for buffer in buffers)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", count)
    for rank in range(6):
        model, mesh = rank_model(cls, config, plan, rank)
        num_bytes = 0
        load_weights(model, plan, mesh.at, open_source(tmp_path), CPU)
        cut_in_columns = [t for t in plan.held_by(mesh.at.pp_rank) if t.shard is not None and t.shard.dim == 1]
        whole_rows = sum(4 * t.shape[0] * (t.shape[1] - t.local_shape(mesh.at.tp_rank)[1]) for t in cut_in_columns)
        assert num_bytes == 4 * plan.numel_on(mesh.at) + whole_rows  # short runs of columns are read by whole rows
        assert num_bytes < 4 * sum(parameter.numel() for parameter in whole.parameters()) / 2


def test_requires_grad_and_attributes_of_parameters_survive(tmp_path: Path) -> None:
    whole = whole_model("gpt2")
    saved(whole, tmp_path)
    plan = plan_of(GPT2LMHeadModel, whole.config, 2, 1)
    model, mesh = rank_model(GPT2LMHeadModel, whole.config, plan, 0)
    model.transformer.ln_f.weight.requires_grad_(False)
    model.transformer.ln_f.bias.mark = "mine"
    load_weights(model, plan, mesh.at, open_source(tmp_path), CPU)
    assert not model.transformer.ln_f.weight.requires_grad
    assert model.transformer.ln_f.bias.requires_grad
    assert model.transformer.ln_f.bias.mark == "mine"
    assert model.lm_head.weight is model.transformer.wte.weight
