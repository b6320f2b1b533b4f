"""Ranks of a split model in one process: models on meta as ``parallelize`` leaves them, and split checkpoints."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from oslo_engine.checkpoint.atomic import MANIFEST
from oslo_engine.checkpoint.checksums import record_of
from oslo_engine.checkpoint.layout import Layout, Serialization, layout_of
from oslo_engine.checkpoint.merged_names import with_merged_names
from oslo_engine.checkpoint.place import find
from oslo_engine.checkpoint.policy_hash import hash_of_policy
from oslo_engine.checkpoint.safetensors_io import write_order, write_safetensors
from oslo_engine.checkpoint.save import write_config
from oslo_engine.checkpoint.skeleton import meta_model
from oslo_engine.comm.collectives import Axis
from oslo_engine.comm.mesh import Mesh
from oslo_engine.comm.random import RandomStreams
from oslo_engine.plan.plan import Plan, TensorPlan
from oslo_engine.policy.registry import find_policy
from oslo_engine.rewrite.apply import apply_plan
from oslo_engine.rewrite.planning import plan_model
from oslo_engine.topology import Topology

CPU = torch.device("cpu")
VOCAB = 131  # a prime: no tp divides it


def gpt2(**more: Any) -> Any:
    """Packed q|k|v in a Conv1D, tied embeddings, a scaled initialisation of some weights."""
    return GPT2LMHeadModel, GPT2Config(vocab_size=VOCAB, n_embd=24, n_layer=4, n_head=4, n_positions=32, **more)


def llama(**more: Any) -> Any:
    """9 query heads in 3 groups: uneven at tp=2."""
    sizes = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 50}
    return LlamaForCausalLM, LlamaConfig(vocab_size=VOCAB, num_hidden_layers=4, **sizes, **more)


def llama_two_kv(**more: Any) -> Any:
    """2 KV heads: replicated at tp=4."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 50}
    return LlamaForCausalLM, LlamaConfig(vocab_size=VOCAB, num_hidden_layers=4, **sizes, **more)


def bert(**more: Any) -> Any:
    """A tied bias besides the tied embeddings."""
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 50, "num_hidden_layers": 4}
    return BertForMaskedLM, BertConfig(vocab_size=VOCAB, **sizes, **more)


def t5(**more: Any) -> Any:
    """Two stacks, a relative position bias cut in its second dimension, four names for one embedding."""
    sizes = {"d_model": 24, "num_heads": 4, "d_kv": 6, "d_ff": 50, "num_layers": 2}
    return T5ForConditionalGeneration, T5Config(vocab_size=VOCAB, decoder_start_token_id=0, **sizes, **more)


MODELS = {build.__name__: build for build in (gpt2, llama, llama_two_kv, bert, t5)}
# (tp, pp) that each of them can be split at.
LAYOUTS = {name: [(1, 1), (2, 2), (4, 1), (1, 2), (3, 1)] for name in MODELS} | {"llama": [(1, 1), (2, 2), (1, 2), (3, 1)]}


def whole_model(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any) -> PreTrainedModel:
    """A model in which every entry of every parameter is another number."""
    cls, config = MODELS[name](**more)
    model = cls._from_config(config, dtype=dtype)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model.eval()


_PLANS: dict[Any, Plan] = {}


def plan_of(cls: Any, config: Any, tp: int, pp: int) -> Plan:
    key = (cls, config.to_json_string(use_diff=False), tp, pp)
    if key not in _PLANS:
        _PLANS[key] = _plan(cls, config, tp, pp)
    return _PLANS[key]


def _plan(cls: Any, config: Any, tp: int, pp: int) -> Plan:
    policy = None if tp * pp == 1 else find_policy(None, config.model_type)
    with torch.device("meta"):
        model = cls(copy.deepcopy(config))
    return plan_model(model, policy, Topology(tp=tp, pp=pp), rank_of_stage=tuple(range(pp))).plan


def rank_model(cls: Any, config: Any, plan: Plan, rank: int, dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, Mesh]:
    """One rank's rewritten model, parameters on meta; nothing can be communicated."""
    topology, at = plan.topology, plan.topology.coordinate(rank)
    axes = {axis: Axis(axis, topology.size(axis), at.on(axis)) for axis in ("tp", "pp", "dp")}
    mesh = Mesh(topology, at, **axes, model=Axis("model", topology.tp * topology.pp, rank), device=CPU)
    streams = RandomStreams(0, dp_rank=0, tp_rank=at.tp_rank, device=CPU)
    model = meta_model(cls, copy.deepcopy(config), dtype)
    apply_plan(model, plan, mesh, streams, parallel_class=type(model))
    return model, mesh


def local_slice(whole: PreTrainedModel, tensor: TensorPlan, tp_rank: int) -> Tensor:
    value = (whole.get_buffer(tensor.name) if tensor.is_buffer else whole.get_parameter(tensor.name)).detach()
    return value if tensor.shard is None else tensor.shard.apply(value, tp_rank)


def differences(model: PreTrainedModel, whole: PreTrainedModel, plan: Plan, mesh: Mesh) -> list[str]:
    """The tensors of a rank that are not, bit for bit, the slices of the whole model's; everything it holds is compared."""
    found = []
    for tensor in plan.held_by(mesh.at.pp_rank):
        mine, right = find(model, tensor), local_slice(whole, tensor, mesh.at.tp_rank)
        if mine.is_meta or mine.dtype != right.dtype or not torch.equal(mine, right):
            found.append(tensor.name)
    return found


def write_split(
    whole: PreTrainedModel, plan: Plan, folder: Path, serialization: Serialization = "safetensors", *, with_config: bool = True
) -> Layout:
    """The split checkpoint that the ranks of ``plan`` would save of a whole model."""
    folder.mkdir(parents=True, exist_ok=True)
    named = dict(whole.named_parameters(remove_duplicate=False)) | dict(whole.named_buffers(remove_duplicate=False))
    dtypes = {tensor.name: named[tensor.name].dtype for tensor in plan.tensors}
    policy = None if plan.topology.tp == plan.topology.pp == 1 else find_policy(None, whole.config.model_type)
    layout = layout_of(plan, dtypes, serialization, policy_hash=hash_of_policy(policy))
    files = {}
    for pp_rank in range(layout.pp):
        for tp_rank in range(layout.tp):
            stored = layout.stored_in(tp_rank, pp_rank)
            path = folder / layout.file_name(tp_rank, pp_rank)
            values = {t.name: local_slice(whole, plan.tensor(t.name), tp_rank).contiguous() for t in stored}
            if serialization == "torch":
                order = write_order({t.name: t.local_spec(tp_rank) for t in stored})
                torch.save({name: values[name] for name in order}, path)
                files[path.name] = record_of(path)
            else:
                files[path.name] = write_safetensors(path, {t.name: t.local_spec(tp_rank) for t in stored}, values.__getitem__)
    layout = with_merged_names(replace(layout, files=files), whole)
    if with_config:
        write_config(whole, folder)
    layout = layout.with_configs(folder)
    layout.write(folder / MANIFEST)
    return layout
