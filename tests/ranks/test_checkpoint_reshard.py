"""What one process makes of a checkpoint, beside what ranks write and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from transformers import AutoModelForCausalLM

import oslo_engine as oslo
from oslo_engine.checkpoint.reshard import reshard
from oslo_engine.checkpoint.source import open_source
from oslo_engine.errors import CheckpointError
from split_models import whole_model


def load_and_save(source: Path, folder: Path, tp: int, pp: int, as_bin: bool) -> list[str]:
    model = oslo.AutoModelForCausalLM.from_pretrained_with_parallel(source, tensor_parallel_size=tp, pipeline_parallel_size=pp)
    model.save_pretrained_with_parallel(folder, **({"save_function": torch.save} if as_bin else {}))
    return [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("as_bin", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("form", ["whole", "split"])
def test_the_files_are_those_that_the_ranks_write(rank_pool: Any, tmp_path: Path, form: str, as_bin: bool) -> None:
    whole_model("llama_two_kv", dtype=torch.bfloat16).save_pretrained(tmp_path / "whole")
    if form == "split":
        reshard(tmp_path / "whole", tmp_path / "split", tp=3, pp=1)
    rank_pool(4).run(load_and_save, tmp_path / form, tmp_path / "ranks", 2, 2, as_bin)
    reshard(tmp_path / form, tmp_path / "own", tp=2, pp=2, serialization="torch" if as_bin else "safetensors")
    files = sorted(path.name for path in (tmp_path / "ranks").iterdir() if "tp=" in path.name or path.name == "layout.json")
    assert len(files) == 5
    for name in files:
        assert (tmp_path / "own" / name).read_bytes() == (tmp_path / "ranks" / name).read_bytes(), name


def logits(folder: Path, tp: int, pp: int) -> torch.Tensor:
    model = oslo.AutoModelForCausalLM.from_pretrained_with_parallel(folder, tensor_parallel_size=tp, pipeline_parallel_size=pp)
    ids = torch.arange(12).reshape(2, 6)
    return oslo.gather_logits(model(ids).logits)


def test_ranks_load_what_one_process_wrote(rank_pool: Any, tmp_path: Path) -> None:
    whole_model("llama_two_kv").save_pretrained(tmp_path / "whole")
    reshard(tmp_path / "whole", tmp_path / "a", tp=4, pp=1)
    reshard(tmp_path / "a", tmp_path / "b", tp=2, pp=1)
    right = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")(torch.arange(12).reshape(2, 6)).logits
    for found in rank_pool(2).run(logits, tmp_path / "b", 2, 1):
        assert torch.allclose(found, right, atol=1e-4)


def save_cut(folder: Path) -> None:
    """Each tensor cut over a mesh of 2 x 2 in another way."""
    mesh = init_device_mesh("cpu", (2, 2))
    state = {
        name: distribute_tensor(tensor, mesh, placements) if tensor.ndim else tensor
        for (name, tensor), placements in zip(some_tensors().items(), PLACEMENTS, strict=True)
    }
    dcp.save({"model": state}, checkpoint_id=str(folder))
    dist.barrier()


PLACEMENTS = [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(2), Replicate()), (Shard(0), Shard(0)), ()]


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "grid": torch.randn(7, 5),
        "rows": torch.randn(5, 4).to(torch.bfloat16),
        "deep": torch.randn(2, 3, 5),
        "small": torch.randn(3),  # of which one rank has nothing
        "scalar": torch.tensor(4.5),
    }


def test_a_folder_that_four_ranks_wrote_with_torch_is_read(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(4).run(save_cut, tmp_path / "a")
    assert len(list((tmp_path / "a").glob("*.distcp"))) == 4
    source = open_source(tmp_path / "a")
    for name, tensor in some_tensors().items():
        assert torch.equal(source.read(name), tensor), name
        for dim, size in enumerate(tensor.shape):
            read = source.read(name, dim, [(size // 2, size), (0, 1)])
            assert torch.equal(
                read, torch.cat([tensor.narrow(dim, size // 2, size - size // 2), tensor.narrow(dim, 0, 1)], dim)
            )
    (tmp_path / "a" / "__3_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="__3_0"):
        open_source(tmp_path / "a")
