"""``layout.json``: written, read back, and refused when it is damaged."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oslo_engine.checkpoint.checksums import FileRecord
from oslo_engine.checkpoint.layout import Layout, layout_of, read_layout
from oslo_engine.errors import CheckpointError
from split_models import LAYOUTS, MODELS, plan_of


def layout(name: str, tp: int, pp: int) -> Layout:
    plan = plan_of(*MODELS[name](), tp, pp)
    made = layout_of(plan, {tensor.name: torch.bfloat16 for tensor in plan.tensors}, "safetensors")
    return replace(made, files={file: FileRecord(10, "00") for file in made.file_names()})


@pytest.mark.parametrize("name", MODELS)
def test_a_layout_survives_the_file(tmp_path: Path, name: str) -> None:
    for tp, pp in LAYOUTS[name]:
        written = layout(name, tp, pp)
        written = replace(written, tensors=(replace(written.tensors[0], merged_name="other"), *written.tensors[1:]))
        written.write(tmp_path / "layout.json")
        assert read_layout(tmp_path / "layout.json") == written


def test_every_entry_is_stored_once() -> None:
    made = layout("llama_two_kv", 4, 2)
    named = {tensor.name: tensor for tensor in made.tensors}
    assert named["model.layers.0.self_attn.q_proj.weight"].tp_ranks_stored() == (0, 1, 2, 3)
    assert named["model.layers.0.self_attn.k_proj.weight"].tp_ranks_stored() == (
        0,
        2,
    )  # ranks 1 and 3 hold the same heads again
    assert named["model.norm.weight"].tp_ranks_stored() == (0,)
    tied = {tensor.name: tensor for tensor in layout("gpt2", 2, 2).tensors}["transformer.wte.weight"]
    assert tied.pp_ranks == (0, 1)
    files = [(tp, pp) for pp in range(2) for tp in range(2) if tied in layout("gpt2", 2, 2).stored_in(tp, pp)]
    assert files == [(0, 0), (1, 0)]


def test_no_position_of_a_buffer_that_is_not_saved_is_written() -> None:
    assert not [tensor.name for tensor in layout("llama", 1, 1).tensors if "inv_freq" in tensor.name]


def first(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Change an entry of the first tensor that is cut."""
    return lambda data: next(tensor for tensor in data["tensors"] if "spans" in tensor).__setitem__(key, value)


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another format": lambda data: data.__setitem__("format", "something"),
    "a later version": lambda data: data.__setitem__("version", 2),
    "a version that is no number": lambda data: data.__setitem__("version", True),
    "no tp": lambda data: data.pop("tp"),
    "tp 0": lambda data: data.__setitem__("tp", 0),
    "another tp": lambda data: data.__setitem__("tp", 3),
    "unknown serialization": lambda data: data.__setitem__("serialization", "pickle"),
    "a file too few": lambda data: data["files"].pop("model_tp=0_pp=0.safetensors"),
    "a file elsewhere": lambda data: data["files"].__setitem__("../evil.safetensors", {"size_bytes": 1, "sha256": ""}),
    "a file without a size": lambda data: data["files"]["model_tp=0_pp=0.safetensors"].pop("size_bytes"),
    "no tensors": lambda data: data.pop("tensors"),
    "a name twice": lambda data: data["tensors"].append(data["tensors"][0]),
    "no name": lambda data: data["tensors"][0].pop("name"),
    "a name that is none of its aliases": lambda data: data["tensors"][0].__setitem__("aliases", ["x"]),
    "unknown type": lambda data: data["tensors"][0].__setitem__("dtype", "float99"),
    "a type that is a function": lambda data: data["tensors"][0].__setitem__("dtype", "load"),
    "a negative size": first("shape", [-1, 3]),
    "a dim too many": first("dim", 7),
    "a gap in the spans": first("spans", [[[0, 60]], [[66, 131]]]),
    "spans that overlap": first("spans", [[[0, 70]], [[66, 131]]]),
    "spans that end too early": first("spans", [[[0, 66]], [[66, 130]]]),
    "spans of one rank only": first("spans", [[[0, 131]]]),
    "a stage that is not there": first("pp_ranks", [5]),
    "no stage": first("pp_ranks", []),
    "endless stages": lambda data: data.__setitem__("pp", 10**30),
    "a stage that is no number": first("pp_ranks", [True]),
    "a span that ends nowhere": first("spans", [[[0, 66]], [[66, math.inf]]]),
    "a span that ends in a text": first("spans", [[[0, 66]], [[66, "131"]]]),
    "an alias that is no name": lambda data: data["tensors"][0]["aliases"].__setitem__(1, 3),
    "an endless file": lambda data: data["files"]["model_tp=0_pp=0.safetensors"].__setitem__("size_bytes", math.inf),
    "a checksum that is no text": lambda data: data["files"]["model_tp=0_pp=0.safetensors"].__setitem__("xxh3_128", 7),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_layout_is_an_error_that_names_the_file(tmp_path: Path, damage: Callable[[dict[str, Any]], Any]) -> None:
    layout("gpt2", 2, 2).write(tmp_path / "layout.json")
    path = tmp_path / "layout.json"
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(CheckpointError) as error:
        read_layout(path)
    assert error.value.where == str(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"tp": 2}', 10000 * "["])
def test_something_else_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "layout.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"layout\.json"):
        read_layout(tmp_path / "layout.json")
