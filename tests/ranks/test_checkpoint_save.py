"""Saving from several ranks: what stands in the folder afterwards, and that no rank waits for ever when one fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import oslo_engine as oslo
from oslo_engine.checkpoint import save
from oslo_engine.checkpoint.agree import together
from oslo_engine.checkpoint.layout import read_layout
from oslo_engine.checkpoint.save import save_merged, save_split
from oslo_engine.checkpoint.source import open_source, verify_source
from oslo_engine.errors import CheckpointError, UnsupportedError
from oslo_engine.rewrite.state import parallel_state
from rank_pool import RankFailure
from split_models import MODELS, differences, plan_of, whole_model, write_split


def split(name: str, tp: int, pp: int, **options: Any) -> Any:
    return oslo.parallelize(whole_model(name), tp=tp, pp=pp, **options)


def save_job(folder: Path, name: str, tp: int, pp: int, merged: bool, options: dict[str, Any], **settings: Any) -> list[str]:
    (save_merged if merged else save_split)(split(name, tp, pp, **options), folder, **settings)
    return sorted(os.listdir(folder))


def same(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> None:
    source, whole = open_source(folder), whole_model(name).to(dtype)
    verify_source(source)
    for key, parameter in whole.named_parameters(remove_duplicate=key_is_unique(folder)):
        assert torch.equal(source.read(key), parameter), key


def key_is_unique(folder: Path) -> bool:
    """A split checkpoint answers to every name of a tied parameter, a merged one has one of them."""
    return not (folder / "layout.json").exists()


@pytest.mark.parametrize(
    ("name", "tp", "pp"), [("gpt2", 2, 2), ("llama_two_kv", 4, 1), ("llama", 2, 2), ("t5", 2, 2), ("bert", 1, 2)]
)
def test_the_ranks_write_one_split_checkpoint(rank_pool: Any, tmp_path: Path, name: str, tp: int, pp: int) -> None:
    listings = rank_pool(tp * pp).run(save_job, tmp_path / "a", name, tp, pp, False, {})
    assert all("layout.json" in listing for listing in listings), "it is complete when the call returns, on every rank"
    same(tmp_path / "a", name)
    right = write_split(whole_model(name), plan_of(*MODELS[name](), tp, pp), tmp_path / "right")
    assert read_layout(tmp_path / "a" / "layout.json") == right
    for file in right.files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "right" / file).read_bytes()
    assert os.listdir(tmp_path / "a") != []
    assert sorted(os.listdir(tmp_path)) == ["a", "right"]


@pytest.mark.parametrize("settings", [{"safe_serialization": False}, {"save_function": torch.save}], ids=str)
def test_the_files_can_be_those_of_torch_save(rank_pool: Any, tmp_path: Path, settings: Any) -> None:
    rank_pool(4).run(save_job, tmp_path / "a", "gpt2", 2, 2, False, {}, **settings)
    files = [f"pytorch_model_tp={tp}_pp={pp}.bin" for tp in range(2) for pp in range(2)]
    assert sorted(os.listdir(tmp_path / "a")) == sorted([*files, "config.json", "generation_config.json", "layout.json"])
    same(tmp_path / "a", "gpt2")
    state = torch.load(tmp_path / "a" / "pytorch_model_tp=1_pp=0.bin", weights_only=True)
    assert state["transformer.wte.weight"].shape == (65, 24)


def test_of_a_view_only_the_view_is_written(tmp_path: Path) -> None:
    model = oslo.parallelize(whole_model("gpt2"))
    save_split(model, tmp_path / "own", save_function=torch.save)
    weight = model.transformer.ln_f.weight
    weight.data = torch.cat([weight.detach(), torch.zeros(100_000)])[: weight.numel()]
    save_split(model, tmp_path / "view", save_function=torch.save)
    own, view = (path / "pytorch_model_tp=0_pp=0.bin" for path in (tmp_path / "own", tmp_path / "view"))
    assert own.stat().st_size == view.stat().st_size


@pytest.mark.parametrize(("name", "tp", "pp"), [("gpt2", 2, 2), ("t5", 2, 2), ("bert", 2, 1)])
@pytest.mark.parametrize("size", ["50GB", "30KB"])
def test_a_merged_checkpoint_is_that_of_save_pretrained(
    rank_pool: Any, tmp_path: Path, name: str, tp: int, pp: int, size: str
) -> None:
    rank_pool(tp * pp).run(save_job, tmp_path / "a", name, tp, pp, True, {}, max_shard_size=size)
    whole = whole_model(name)
    whole.save_pretrained(tmp_path / "right", max_shard_size=size)
    assert sorted(os.listdir(tmp_path / "a")) == sorted(os.listdir(tmp_path / "right"))
    for path in (tmp_path / "right").iterdir():
        mine = tmp_path / "a" / path.name
        if path.suffix == ".safetensors":
            tensors, right = load_file(mine), load_file(path)
            assert tensors.keys() == right.keys()
            assert all(torch.equal(tensors[key], right[key]) for key in right)
        else:
            assert mine.read_text() == path.read_text(), path.name
    loaded = type(whole).from_pretrained(tmp_path / "a")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), whole.parameters(), strict=True))


def load_and_save(source: Path, target: Path, tp: int, pp: int) -> list[str]:
    """Load a checkpoint at another layout and save it again; what the rank holds that is not the whole model's."""
    model = oslo.AutoModelForCausalLM.from_pretrained_with_parallel(source, tensor_parallel_size=tp, pipeline_parallel_size=pp)
    model.save_pretrained_with_parallel(target)
    state = parallel_state(model)
    return differences(model, whole_model("llama_two_kv"), state.plan, state.mesh)


def test_saved_at_one_layout_it_loads_at_any_other_and_back(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(4).run(save_job, tmp_path / "2x2", "llama_two_kv", 2, 2, False, {})
    folder = tmp_path / "2x2"
    for tp, pp in [(4, 1), (1, 2), (3, 1), (2, 2)]:
        target = tmp_path / f"{tp}x{pp} again"
        assert rank_pool(tp * pp).run(load_and_save, folder, target, tp, pp) == [[]] * (tp * pp)
        folder = target
    for path in (tmp_path / "2x2").glob("*.safetensors"):
        assert path.read_bytes() == (folder / path.name).read_bytes()


def test_one_process_saves_too(tmp_path: Path) -> None:
    model = oslo.parallelize(whole_model("gpt2"))
    save_split(model, tmp_path / "split")
    same(tmp_path / "split", "gpt2")
    save_merged(model, tmp_path / "merged")
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged").lm_head.weight, whole_model("gpt2").lm_head.weight
    )


def save_where_copies_cannot_write(folder: Path) -> None:
    model = split("llama", 2, 1)
    with pytest.MonkeyPatch.context() as patch:
        if parallel_state(model).mesh.at.dp_rank > 0:
            patch.setattr(save, "write_safetensors", lambda *args: disk_full())
        save_split(model, folder)


def test_virtual_stages_and_data_parallel_copies_are_saved_once(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(save_job, tmp_path / "a", "gpt2", 1, 2, False, {"schedule": "interleaved"})
    same(tmp_path / "a", "gpt2")
    rank_pool(4).run(save_where_copies_cannot_write, tmp_path / "b")
    assert sorted(path.name for path in (tmp_path / "b").glob("*.safetensors")) == [
        f"model_tp={tp}_pp=0.safetensors" for tp in (0, 1)
    ]
    same(tmp_path / "b", "llama")


def in_bfloat16(folder: Path) -> None:
    save_merged(split("gpt2", 2, 1).bfloat16(), folder / "merged")
    save_split(split("gpt2", 2, 1).bfloat16(), folder / "split")


def test_the_present_types_are_saved(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(in_bfloat16, tmp_path)
    for form in ("merged", "split"):
        same(tmp_path / form, "gpt2", torch.bfloat16)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype == torch.bfloat16


def without_config(folder: Path) -> None:
    save_split(split("gpt2", 2, 1), folder, save_config=False)


def test_the_config_can_be_left_out(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(without_config, tmp_path / "a")
    assert not list((tmp_path / "a").glob("*config.json"))


def divided(folder: Path) -> None:
    model = split("gpt2", 1, 1)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    assert {type(parameter).__name__ for parameter in model.parameters()} == {"DTensor"}
    save_split(model, folder)


def test_what_fsdp_has_divided_is_gathered(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(divided, tmp_path / "a")
    same(tmp_path / "a", "gpt2")


# -- over a former checkpoint, and when something fails


def former(folder: Path) -> None:
    write_split(whole_model("gpt2", seed=9), plan_of(*MODELS["gpt2"](), 1, 1), folder)
    (folder / "tokenizer.json").write_text("t")


def is_former(folder: Path) -> bool:
    assert (folder / "tokenizer.json").read_text() == "t"
    source = open_source(folder)
    verify_source(source)
    return torch.equal(source.read("transformer.wte.weight"), whole_model("gpt2", seed=9).transformer.wte.weight)


@pytest.mark.parametrize("merged", [False, True])
def test_a_former_checkpoint_is_replaced_and_other_files_stay(rank_pool: Any, tmp_path: Path, merged: bool) -> None:
    former(tmp_path / "a")
    rank_pool(4).run(save_job, tmp_path / "a", "gpt2", 2, 2, merged, {})
    same(tmp_path / "a", "gpt2")
    assert (tmp_path / "a" / "tokenizer.json").read_text() == "t"
    assert (tmp_path / "a" / "model_tp=0_pp=0.safetensors").exists() != merged
    assert os.listdir(tmp_path) == ["a"]


def save_with(folder: Path, merged: bool, bad_rank: int, what: str, act: Callable[[], None]) -> str:
    """Save while ``what`` of the module does something else on one rank; the error that came of it."""
    model = split("gpt2", 2, 2)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == bad_rank:
            patch.setattr(save, what, lambda *args, **kwargs: act())
        try:
            (save_merged if merged else save_split)(model, folder)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "saved"


def disk_full() -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(
    ("bad_rank", "what"), [(0, "begin"), (3, "write_safetensors"), (2, "find"), (0, "commit"), (0, "write_config")]
)
def test_an_error_on_one_rank_is_an_error_on_all(
    rank_pool: Any, tmp_path: Path, merged: bool, bad_rank: int, what: str
) -> None:
    former(tmp_path / "a")
    errors = rank_pool(4).run(save_with, tmp_path / "a", merged, bad_rank, what, disk_full)
    for rank, error in enumerate(errors):
        assert error.startswith("CheckpointError: saving the model failed")
        assert "No space left" in error
        assert (f"rank {bad_rank}" in error) == (rank != bad_rank)
    assert is_former(tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"], "what was written is cleared away"
    assert rank_pool(4).run(save_with, tmp_path / "a", merged, -1, what, disk_full) == ["saved"] * 4
    same(tmp_path / "a", "gpt2")
    assert os.listdir(tmp_path) == ["a"]


def die() -> None:
    os._exit(9)


@pytest.mark.parametrize(
    ("merged", "bad_rank", "what"), [(False, 3, "write_safetensors"), (False, 0, "commit"), (True, 0, "Merged")]
)
def test_a_killed_save_leaves_the_former_checkpoint(
    rank_pool: Any, tmp_path: Path, merged: bool, bad_rank: int, what: str
) -> None:
    former(tmp_path / "a")
    with pytest.raises(RankFailure):
        rank_pool(4).run(save_with, tmp_path / "a", merged, bad_rank, what, die)
    assert is_former(tmp_path / "a")
    assert rank_pool(4).run(save_with, tmp_path / "a", merged, -1, what, die) == ["saved"] * 4
    same(tmp_path / "a", "gpt2")
    assert os.listdir(tmp_path) == ["a"]


def test_contradicting_settings_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = oslo.parallelize(whole_model("gpt2"))
    with pytest.raises(UnsupportedError, match="save_function"):
        save_split(model, tmp_path / "a", save_function=torch.save, safe_serialization=True)
    assert os.listdir(tmp_path) == []


def with_a_new_parameter(folder: Path) -> str:
    model = split("gpt2", 2, 1)
    if dist.get_rank() == 1:
        model.transformer.h[0].extra = torch.nn.Parameter(torch.ones(2))
    try:
        save_split(model, folder)
    except UnsupportedError as error:
        return str(error)
    return "saved"


def test_parameters_that_the_plan_does_not_know_are_not_lost_silently(rank_pool: Any, tmp_path: Path) -> None:
    for message in rank_pool(2).run(with_a_new_parameter, tmp_path / "a"):
        assert "transformer.h.0.extra" in message


def altered(folder: Path) -> str:
    try:
        verify_source(open_source(folder))
    except CheckpointError as error:
        return str(error)
    return "good"


def test_an_altered_file_is_found_by_one_rank_and_an_error_on_all(rank_pool: Any, tmp_path: Path) -> None:
    write_split(whole_model("gpt2"), plan_of(*MODELS["gpt2"](), 2, 2), tmp_path)
    assert rank_pool(4).run(altered, tmp_path) == ["good"] * 4
    path = tmp_path / "model_tp=1_pp=1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert all(path.name in message and "altered" in message for message in rank_pool(4).run(altered, tmp_path))


def rank_two_fails() -> Any:
    def action() -> int:
        if dist.get_rank() == 2:
            raise CheckpointError("what", where="where", expected=3, got="got", hint="hint")
        return dist.get_rank()

    try:
        return together(action, what="trying")
    except CheckpointError as error:
        return (error.what, error.where, error.expected, error.got, error.hint)


def test_our_own_errors_keep_their_five_parts(rank_pool: Any) -> None:
    other = ("what", "rank 2: where", "3", "got", "hint")
    assert rank_pool(4).run(rank_two_fails) == [other, other, ("what", "where", 3, "got", "hint"), other]
    assert rank_pool(2).run(rank_two_fails) == [[0, 1]] * 2
