"""Plans of whole layouts, as golden files, and the facts that must hold for any of them.

After a wanted change: ``python tests/unit/test_plan.py`` writes the golden files anew; read the difference.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import small_models
from oslo_engine.pipeline.orders import rank_of_stage
from oslo_engine.plan.plan import Plan
from oslo_engine.policy.registry import find_policy
from oslo_engine.rewrite.planning import plan_model
from oslo_engine.topology import Topology

GOLDEN = Path(__file__).parent / "golden" / "plans"
LAYOUTS = [("gpt2", 2, 2, "1f1b"), ("llama", 4, 1, "1f1b"), ("bert", 2, 2, "interleaved"), ("t5", 2, 4, "1f1b")]


def plan_of(name: str, tp: int, pp: int, schedule: str = "1f1b", **more: Any) -> Plan:
    cls, config, _ = getattr(small_models, name)()
    with torch.device("meta"):
        model = cls(config)
    stages = rank_of_stage(schedule, pp) if pp > 1 else (0,)
    policy = find_policy(None, config.model_type)
    return plan_model(model, policy, Topology(tp=tp, pp=pp), schedule=schedule, rank_of_stage=stages, **more).plan


def as_text(plan: Plan) -> str:
    """JSON with one tensor, region or call a line."""
    content = plan.to_dict()
    lines = []
    for key, value in content.items():
        if isinstance(value, tuple) and value and isinstance(value[0], (dict, tuple)):
            entries = ",\n".join(f"  {json.dumps(entry)}" for entry in value)
            lines.append(f'"{key}": [\n{entries}\n]')
        else:
            lines.append(f'"{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


@pytest.mark.parametrize(("name", "tp", "pp", "schedule"), LAYOUTS)
def test_plans_are_what_they_were(name: str, tp: int, pp: int, schedule: str) -> None:
    golden = (GOLDEN / f"{name}-tp{tp}-pp{pp}-{schedule}.json").read_text()
    assert as_text(plan_of(name, tp, pp, schedule)) == golden
    json.loads(golden)


@pytest.mark.parametrize(("name", "tp", "pp", "schedule"), LAYOUTS)
def test_every_tensor_has_a_holder_and_every_entry_an_owner(name: str, tp: int, pp: int, schedule: str) -> None:
    plan = plan_of(name, tp, pp, schedule)
    for tensor in plan.tensors:
        assert plan.holders(tensor), tensor.name
        if tensor.shard is not None:
            owned = torch.zeros(tensor.shard.size, dtype=torch.int64)
            for spans in tensor.shard.spans:
                for start, stop in spans:
                    owned[start:stop] += 1
            assert owned.min() >= 1, tensor.name


def test_stages_hold_their_blocks_and_what_they_read_outside_them() -> None:
    plan = plan_of("gpt2", 1, 2)
    stages = {tensor.name: tensor.stages for tensor in plan.tensors}
    assert stages["transformer.wte.weight"] == (0, 1)  # tied to the head
    assert stages["transformer.wpe.weight"] == (0,)
    assert stages["transformer.ln_f.weight"] == (1,)
    first = {call.block for call in plan.calls if call.stage == 0}
    assert {stages[f"{block}.mlp.c_fc.weight"] for block in first} == {(0,)}


def test_an_encoders_final_norm_is_held_by_the_decoders_stages() -> None:
    plan = plan_of("t5", 1, 4)
    decoder = tuple(sorted({call.stage for call in plan.calls if call.block.startswith("decoder")}))
    assert plan.tensor("encoder.final_layer_norm.weight").stages == decoder
    assert plan.tensor("decoder.final_layer_norm.weight").stages == (3,)


def test_norms_inside_a_region_have_partial_gradients() -> None:
    plan = plan_of("qwen3", 2, 1)
    partial = {tensor.name for tensor in plan.tensors if tensor.partial}
    assert partial == {f"model.layers.{layer}.self_attn.{norm}.weight" for layer in range(4) for norm in ("q_norm", "k_norm")}


def test_sequence_parallelism_makes_all_uncut_parameters_of_blocks_partial() -> None:
    plan = plan_of("gpt2", 2, 1, sequence_parallel=True)
    partial = {tensor.name.split(".", 3)[-1] for tensor in plan.tensors if tensor.partial}
    assert partial == {"ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias", "attn.c_proj.bias", "mlp.c_proj.bias"}


def test_each_rank_of_a_split_holds_its_share() -> None:
    whole = plan_of("llama", 1, 1)
    total = whole.numel_on(Topology().coordinate(0))
    plan = plan_of("llama", 2, 2)
    counts = [plan.numel_on(plan.topology.coordinate(rank)) for rank in range(4)]
    assert sum(counts) < total * 1.02
    assert max(counts) < total * 0.35


LARGE = """
import sys, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from oslo_engine.pipeline.orders import rank_of_stage
from oslo_engine.policy.registry import find_policy
from oslo_engine.rewrite.planning import plan_model
from oslo_engine.topology import Topology

hidden, inner, layers, heads, pp = map(int, sys.argv[1:])
config = LlamaConfig(vocab_size=128256, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
                     num_attention_heads=heads, num_key_value_heads=8, max_position_embeddings=8192)
start = time.process_time()
with torch.device("meta"):
    model = LlamaForCausalLM(config)
layout = plan_model(model, find_policy(None, "llama"), Topology(tp=8, pp=pp), rank_of_stage=rank_of_stage("1f1b", pp))
peak_kib = int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])  # ru_maxrss knows the parent's
print(time.process_time() - start, peak_kib / 2**20,
      sum(layout.plan.numel_on(layout.plan.topology.coordinate(rank)) for rank in range(8 * pp)) / 1e9)
"""


@pytest.mark.parametrize(
    ("sizes", "expected"), [((8192, 28672, 80, 64, 8), 70.5537), ((16384, 53248, 126, 128, 16), 405.8534)], ids=["70b", "405b"]
)
def test_a_large_model_is_recorded_and_planned_in_seconds_without_its_weights(sizes: tuple[int, ...], expected: float) -> None:
    command = [sys.executable, "-W", "ignore", "-c", LARGE, *map(str, sizes)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    cpu_s, peak_gib, billions = map(float, run.stdout.split()[-3:])
    assert cpu_s < 5
    assert peak_gib < 1.5
    assert expected <= billions < expected * 1.01  # norms and the rotary table stand on several ranks


def write_golden_files() -> None:
    for name, tp, pp, schedule in LAYOUTS:
        (GOLDEN / f"{name}-tp{tp}-pp{pp}-{schedule}.json").write_text(as_text(plan_of(name, tp, pp, schedule)))


if __name__ == "__main__":
    write_golden_files()
