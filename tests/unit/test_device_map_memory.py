"""The maps that are made: what they take a model to need is what a step needs, and longer texts need more devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import small_models
from oslo_engine import PlanError
from oslo_engine.footprint.live_bytes import LiveBytes
from oslo_engine.footprint.workload import Workload
from oslo_engine.placement.activations import measure_activations
from oslo_engine.placement.assignment import parts_of
from oslo_engine.placement.balance import balanced_map
from oslo_engine.placement.made_map import make_map, resident_bytes
from oslo_engine.placement.stacks import find_stacks

ROWS, LENGTH, TARGET = 4, 48, 24
WORK = Workload(rows=ROWS, length=LENGTH, target_length=TARGET)


def small(name: str) -> Any:
    cls, config, _ = small_models.SMALL[name]()
    return cls(config).train()


def batch_of(name: str) -> dict[str, torch.Tensor]:
    ids, labels = torch.randint(3, small_models.VOCAB, (ROWS, LENGTH)), torch.randint(3, small_models.VOCAB, (ROWS, TARGET))
    if name == "t5":
        return {"input_ids": ids, "labels": labels, "decoder_input_ids": labels.clone()}
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_activations_of_all_blocks_together_are_those_of_a_real_step(name: str) -> None:
    model, batch = small(name), batch_of(name)
    found = measure_activations(model, find_stacks(model), WORK)
    assert set(found.of_block) == {block for stack in find_stacks(model) for block in stack.blocks}
    assert min(found.of_block.values()) > 0
    live = LiveBytes()
    live.leave_out([*model.parameters(), *model.buffers(), *batch.values()])
    with live:
        live.begin(("forward", ""))
        loss = model(**batch, use_cache=False).loss
        live.end()
    assert sum(found.of_block.values()) == pytest.approx(live.segments[0].kept, rel=0.1)
    assert live.segments[0].peak <= 1.1 * (sum(found.of_block.values()) + found.passing)
    del loss


def test_recomputing_keeps_less_and_a_cache_counts_in_inference() -> None:
    model = small("llama")
    stacks = find_stacks(model)
    kept = measure_activations(model, stacks, WORK).of_block
    recomputed = measure_activations(model, stacks, dataclasses.replace(WORK, checkpointing=True)).of_block
    block = stacks[0].blocks[1]
    assert recomputed[block] < kept[block] / 4
    served = measure_activations(model, stacks, dataclasses.replace(WORK, task="inference")).of_block
    config = model.config
    head = config.hidden_size // config.num_attention_heads
    assert served[block] >= 2 * ROWS * LENGTH * config.num_key_value_heads * head * 4, "keys and values"
    assert served[block] < kept[block]


def test_longer_texts_need_more_devices() -> None:
    model = small("llama")
    stacks = find_stacks(model)
    devices = [torch.device("cpu"), torch.device("meta"), torch.device("cuda", 0), torch.device("cuda", 1)]
    numbers = []
    for length in (16, 512):
        work = dataclasses.replace(WORK, length=length)
        activations = measure_activations(model, stacks, work)
        whole = sum(resident_bytes(model, part, work) for part in parts_of(model, stacks))
        sizes = dict.fromkeys(devices, 1.1 * whole)

        def cost(part: Any) -> float:
            return resident_bytes(model, part, work) + activations.of_block.get(part.path, 0)  # noqa: B023

        try:
            numbers.append(len(set(balanced_map(model, stacks, sizes, cost, fewest=True).values())))
        except PlanError:
            numbers.append(len(devices) + 1)
    assert numbers[0] < numbers[1]


def test_device_without_room_for_one_block_is_refused() -> None:
    model = small("gpt2")
    work = dataclasses.replace(WORK, length=4096)
    with pytest.raises(PlanError, match=r"on each device for a moment\n.*GiB too little"):
        make_map(model, find_stacks(model), "auto", {"cpu": "1MiB"}, work)
