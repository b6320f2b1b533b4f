"""Reading device maps: every form, and every fault. On the CPU alone, which two kinds of names stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import small_models
from oslo_engine import OsloError, PlanError, UnsupportedError, clip_grad_norm_, deparallelize, parallelize
from oslo_engine.placement.assignment import assign, parts_of
from oslo_engine.placement.balance import balanced_map
from oslo_engine.placement.device_map import Faults, read_device_map
from oslo_engine.placement.hooks import Copies, WriteThrough
from oslo_engine.placement.stacks import find_stacks

CPU, META = torch.device("cpu"), torch.device("meta")


def small(name: str) -> Any:
    cls, config, _ = small_models.SMALL[name]()
    return cls(config)


def faults_of(name: str, device_map: Any) -> list[str]:
    model, faults = small(name), Faults()
    read_device_map(model, device_map, find_stacks(model), faults)
    return faults.found


@pytest.mark.parametrize(
    ("device_map", "complaint"),
    [
        ({"cpu": [0, 1, 2]}, "blocks of transformer.h without a device: 3"),
        ({"cpu": [0, 1, 2, 3, 4]}, "transformer.h has blocks 0 to 3, not 4"),
        ({"cpu": [0, 1, 2, 3, -1]}, "not -1"),
        ({"cpu": [0, 1, 2, True]}, "not True"),
        ({"cpu": [0, 1, 2, 3, 1]}, "transformer.h.1 is named twice"),
        ({"cpu": []}, "device 'cpu' has no block"),
        ({"h": {}}, "transformer.h is given no device"),
        ({"disk": [0, 1, 2, 3]}, "there is no such device: 'disk'"),
        ({"meta": [0, 1, 2, 3]}, "there is no such device: 'meta'"),
        ({-1: [0, 1, 2, 3]}, "there is no such device: -1"),
        ({"cpu": 3}, "the model has no module 'cpu'"),
        ({"encoder": {"cpu": [0, 1, 2, 3]}}, "no list of blocks called 'encoder'; the model has: transformer.h"),
        ({"h": {"cpu": [0, 1, 2, 3]}, "transformer.hh.0": "cpu"}, "did you mean transformer.h"),
        ({"h": {"cpu": "0123"}}, "needs a list of numbers"),
        ({}, "must be a dict that names at least one device"),
        ([0, 1], "must be a dict"),
    ],
)
def test_fault_of_a_map_is_told(device_map: Any, complaint: str) -> None:
    assert complaint in "; ".join(faults_of("gpt2", device_map))


def test_all_faults_are_told_at_once_and_nothing_has_changed() -> None:
    model = small("gpt2")
    names, before = sorted(vars(model)), type(model)
    with pytest.raises(PlanError) as caught:
        parallelize(model, device_map={"cpu": [0, 9], "disk": [1], "cuda:99": [2]})
    assert all(word in str(caught.value) for word in ("4 faults", "not 9", "'disk'", "'cuda:99'", "without a device: 3"))
    assert (sorted(vars(model)), type(model)) == (names, before)


def test_block_on_two_devices_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oslo_engine.placement.device_map.find_device", torch.device)  # which refuses meta
    for device_map in ({"cpu": [0, 1, 2], "meta": [2, 3]}, {"h": {"cpu": [0, 1, 2]}, "transformer.h.2": "meta", "": "meta"}):
        assert faults_of("gpt2", device_map) == ["transformer.h.2 is placed twice: on cpu and meta"]


@pytest.mark.parametrize(
    ("device_map", "complaints"),
    [
        (
            {"encoder": {"cpu": [0, 1, 2, 3]}, "decoder": {"cpu": [0, 1, 2, 3]}},
            ["no list of blocks called 'encoder'; the model has: transformer.h", "'decoder'", "without a device: 0, 1, 2, 3"],
        ),
        ({"cpu": list(range(6))}, ["transformer.h has blocks 0 to 3, not 4", "not 5"]),
        ({"cpu": [0, 1]}, ["blocks of transformer.h without a device: 2, 3"]),
        (
            {
                "model.embed_tokens": "cpu",
                **{f"model.layers.{n}": "cpu" for n in range(4)},
                "model.norm": "cpu",
                "lm_head": "cpu",
            },
            [
                "no module 'model.embed_tokens'",
                "no module 'model.layers.3'",
                "no module 'model.norm'",
                "without a device: 0, 1, 2",
            ],
        ),
    ],
    ids=["encoder and decoder", "longer", "shorter", "other names"],
)
def test_map_for_another_model_is_refused_with_what_this_one_has(device_map: Any, complaints: list[str]) -> None:
    model = small("gpt2")
    with pytest.raises(PlanError) as caught:
        parallelize(model, device_map=device_map)
    assert [complaint for complaint in complaints if complaint not in str(caught.value)] == []
    assert "does not fit the model" in str(caught.value)
    assert "GPT2LMHeadModel" in str(caught.value)
    assert "hf_device_map" not in vars(model)


def test_what_is_for_split_models_says_so_of_a_placed_one() -> None:
    model: Any = parallelize(small("gpt2"), device_map={"": "cpu"})
    ids = torch.arange(3, 11).view(2, 4)
    for use in (lambda: model.train_step({"input_ids": ids, "labels": ids}), lambda: clip_grad_norm_(model, 1.0)):
        with pytest.raises(PlanError, match=r"(?s)split over processes, and this model has a device map.*loss\.backward\(\)"):
            use()


def test_numbers_alone_need_lists_of_one_length() -> None:
    model, faults = small("t5"), Faults()
    model.decoder.block = model.decoder.block[:3]
    read_device_map(model, {"cpu": [0, 1, 2]}, find_stacks(model), faults)
    assert "encoder.block (4), decoder.block (3)" in faults.found[0]


def test_list_is_called_by_a_part_of_its_path_that_no_other_has() -> None:
    assert faults_of("bart", {"encoder": {"cpu": [0, 1, 2, 3]}, "decoder.layers": {"cpu": range(4)}}) == []
    assert "names several lists" in faults_of("bart", {"layers": {"cpu": [0, 1, 2, 3]}})[0]


@pytest.mark.parametrize(
    "device_map", [{"": "cpu"}, {"cpu": [3, 1, 0, 2]}, {"transformer": "cpu", "lm_head": "cpu"}, {"h": {"cpu": [0, 1, 2, 3]}}]
)
def test_placed_and_lifted_model_is_the_same(device_map: Any) -> None:
    model = small("gpt2").eval()
    ids = torch.arange(3, 11).view(2, 4)
    before, names = model(ids, labels=ids), sorted(vars(model))
    placed: Any = parallelize(model, device_map=device_map)
    assert placed is model
    assert placed.model_parallel
    assert set(placed.device_map.values()) == {CPU}
    assert torch.equal(placed(ids, labels=ids).loss, before.loss)
    assert type(deparallelize(placed)) is type(small("gpt2"))
    assert sorted(vars(model)) == names
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_placed_model_is_not_moved_but_may_change_its_dtype() -> None:
    model: Any = parallelize(small("gpt2"), device_map={"": "cpu"})
    for move in (lambda: model.to("meta"), lambda: torch.nn.Sequential(model).to("meta")):
        with pytest.raises(UnsupportedError, match="undo its device map"):
            move()
    assert model.to(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"device_map": {"": "cpu"}, "tp": 2}, "no splitting over ranks"),
        ({"device_map": "evenly"}, "no such device map"),
        ({"device_map": {"": "cpu"}, "max_memory": {"cpu": 1}}, "maps that are made here"),
        ({"max_memory": {"cpu": 1}}, "belong to a device map"),
        ({"device_map": "balanced", "max_memory": {"cpu": "-3GiB"}}, "no size of memory"),
        ({"device_map": "balanced", "max_memory": {"cpu": 0}}, "no size of memory"),
        ({"device_map": "balanced", "max_memory": {}}, "no device to place the model on"),
        ({"device_map": "auto", "max_memory": {"cpu": "10KiB"}}, "does not fit"),
    ],
)
def test_setting_that_makes_no_sense_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(OsloError, match=complaint):
        parallelize(small("gpt2"), **options)


def test_model_that_does_not_fit_says_by_how_much() -> None:
    with pytest.raises(PlanError, match=r"cpu: 0\.00977 MiB: .* MiB too little"):
        parallelize(small("gpt2"), device_map="auto", max_memory={"cpu": "10KiB"})


def test_tied_head_stays_with_its_embedding() -> None:
    model, faults = small("gpt2"), Faults()
    stacks = find_stacks(model)
    placed = {"transformer.wte": CPU, "lm_head": META, **dict.fromkeys(stacks[0].blocks, CPU)}
    assign(model, parts_of(model, stacks), placed, faults)
    assert "transformer.wte on cpu, lm_head on meta" in faults.found[0]


def test_device_with_embeddings_and_head_gets_fewer_blocks() -> None:
    model = small("gpt2")
    stacks = find_stacks(model)

    def cost(part: Any) -> float:
        return 1.0 if part.is_block else 1.0 if part.path == "transformer.wte" else 0.0

    found = balanced_map(model, stacks, {CPU: 3.0, META: 3.0}, cost)
    assert [found[block] for block in stacks[0].blocks] == [CPU, CPU, META, META]
    heavy = balanced_map(model, stacks, {CPU: 4.0, META: 4.0}, lambda part: 3 * cost(part) if not part.is_block else 1.0)
    assert [found[block] for block in stacks[0].blocks].count(CPU) > [heavy[block] for block in stacks[0].blocks].count(CPU)


def test_value_is_copied_once_to_a_device_until_it_changes() -> None:
    copies, value = Copies(), torch.ones(3)
    first = copies.on(META, (value, [value]))
    assert first[0] is first[1][0]
    assert copies.on(CPU, (value,))[0] is value
    value.add_(1)
    assert copies.on(META, value) is not first[0]
    with torch.no_grad():
        assert copies.on(META, value) is not copies.on(META, value.view(-1))


def test_copy_made_without_gradients_serves_none_that_needs_them() -> None:
    copies, value = Copies(), torch.ones(3, requires_grad=True) * 1
    with torch.no_grad():
        without = copies.on(META, value)
    assert not without.requires_grad
    assert copies.on(META, value).requires_grad


def test_moved_dict_hands_on_what_is_written_into_it() -> None:
    shared = {"kept": torch.ones(2)}
    moved = Copies().on(META, shared)
    assert isinstance(moved, WriteThrough)
    moved["new"] = 1
    moved.update(more=2)
    assert shared["new"] == 1
    assert shared["more"] == 2
    assert shared["kept"].device == CPU
