"""The class methods: loaded from any form, initialised, resized, each rank has exactly the unsplit model's slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import oslo_engine as oslo
import small_models
from oslo_engine.errors import CheckpointError, DeploymentError, UnsupportedError
from oslo_engine.rewrite.state import parallel_state

NAMES = ["gpt2", "llama", "bert", "t5"]


def class_and_config(name: str) -> tuple[Any, Any]:
    cls, config, _ = getattr(small_models, name)()
    return cls, config


def ours(cls: Any) -> Any:
    return getattr(oslo, cls.__name__)


def saved(name: str, folder: Path) -> Path:
    cls, config = class_and_config(name)
    torch.manual_seed(3)
    cls(config).save_pretrained(folder)
    return folder


def assert_slices(model: Any, whole: Any) -> int:
    """Every parameter and buffer of this rank is, bit for bit, its slice of the unsplit model's."""
    state = parallel_state(model)
    expected = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, value in named:
        tensor = state.plan.tensor(name)
        want = expected[tensor.name]
        want = want if tensor.shard is None else tensor.shard.apply(want, state.mesh.at.tp_rank)
        assert not value.is_meta, name
        assert torch.equal(value, want), name
    return len(named)


def load(name: str, folder: Path, tp: int, pp: int, **options: Any) -> int:
    cls, _ = class_and_config(name)
    model = ours(cls).from_pretrained_with_parallel(folder, tensor_parallel_size=tp, pipeline_parallel_size=pp, **options)
    assert isinstance(model, cls)
    assert not model.training
    return assert_slices(model, cls.from_pretrained(folder))


@pytest.mark.parametrize("name", NAMES)
def test_loading_gives_each_rank_its_slice(rank_pool, tmp_path: Path, name: str) -> None:
    saved(name, tmp_path)
    for tp, pp in ((2, 1), (1, 2)):
        assert min(rank_pool(2).run(load, name, tmp_path, tp, pp)) > 0


def initialize(name: str, tp: int, pp: int) -> None:
    cls, config = class_and_config(name)
    model = ours(cls).from_config_with_parallel(config, tensor_parallel_size=tp, pipeline_parallel_size=pp, seed=11)
    torch.manual_seed(11)
    assert_slices(model, cls._from_config(config))
    # Without a seed: from torch's own random state on rank 0, whatever the others' is.
    torch.manual_seed(4 if dist.get_rank() == 0 else 99)
    model = ours(cls).from_config_with_parallel(config, tensor_parallel_size=tp, pipeline_parallel_size=pp)
    torch.manual_seed(4)
    assert_slices(model, cls._from_config(config))


@pytest.mark.parametrize("name", NAMES)
def test_random_weights_are_those_of_the_unsplit_model(rank_pool, name: str) -> None:
    for tp, pp in ((2, 1), (1, 2)):
        rank_pool(2).run(initialize, name, tp, pp)


def resize(name: str, folder: Path, size: int) -> int:
    cls, _ = class_and_config(name)
    torch.manual_seed(7)
    model = ours(cls).from_pretrained_with_parallel(folder, tensor_parallel_size=2, resize_token_embeddings=size)
    torch.manual_seed(7)
    whole = cls.from_pretrained(folder)
    whole.resize_token_embeddings(size)
    assert_slices(model, whole)
    return model.config.vocab_size


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_a_resized_vocabulary_is_what_transformers_makes_of_it(rank_pool, tmp_path: Path, name: str) -> None:
    saved(name, tmp_path)
    for size in (small_models.VOCAB + 7, small_models.VOCAB - 9):
        assert rank_pool(2).run(resize, name, tmp_path, size) == [size, size]


def options(folder: Path) -> dict[str, Any]:
    auto = oslo.AutoModelForCausalLM.from_pretrained_with_parallel(
        folder, tensor_parallel_size=2, dtype="bfloat16", micro_batch_size=3, pad_token_id=5, attn_implementation="eager"
    )
    _, info = oslo.GPT2LMHeadModel.from_pretrained_with_parallel(folder, tensor_parallel_size=2, output_loading_info=True)
    errors = []
    for arguments, error in (
        ({"device_map": "auto"}, UnsupportedError),
        ({"deployment": True}, DeploymentError),
        ({"no_such_option": 1}, TypeError),
    ):
        with pytest.raises(error) as caught:
            oslo.GPT2LMHeadModel.from_pretrained_with_parallel(folder, tensor_parallel_size=2, **arguments)
        errors.append(str(caught.value))
    with pytest.raises(CheckpointError):
        oslo.GPT2LMHeadModel.from_pretrained_with_parallel(folder / "split", tensor_parallel_size=2, config=auto.config)
    return {
        "class": type(auto).__name__,
        "dtype": auto.dtype,
        "pad": auto.config.pad_token_id,
        "attention": auto.config._attn_implementation,
        "micro": parallel_state(auto).micro_batch_size,
        "info": info["missing_keys"],
        "errors": errors,
    }


def test_keyword_arguments_pass_through_or_are_refused(rank_pool, tmp_path: Path) -> None:
    saved("gpt2", tmp_path)
    (tmp_path / "split").mkdir()
    first, second = rank_pool(2).run(options, tmp_path)
    assert first == second
    assert first["class"] == "GPT2LMHeadModel"
    assert first["dtype"] == torch.bfloat16
    assert (first["pad"], first["attention"], first["micro"]) == (5, "eager", 3)
    assert first["info"] == set()
    assert "device_map" in first["errors"][0]
    assert "no_such_option" in first["errors"][2]


def save_and_reload(name: str, folder: Path) -> None:
    cls, config = class_and_config(name)
    torch.manual_seed(5)
    whole = cls(config)
    model = oslo.parallelize(whole, tp=2, pp=1)
    model.save_pretrained_with_parallel(folder / "split")
    model.save_pretrained_with_parallel(folder / "merged", save_with_merging=True)
    torch.manual_seed(5)
    original = cls(config)
    for form in ("split", "merged"):
        assert_slices(ours(cls).from_pretrained_with_parallel(folder / form, pipeline_parallel_size=2), original)
    merged = cls.from_pretrained(folder / "merged")
    for name, value in merged.state_dict().items():
        assert torch.equal(value, original.state_dict()[name]), name


@pytest.mark.parametrize("name", NAMES)
def test_saved_split_or_merged_it_loads_at_another_layout(rank_pool, tmp_path: Path, name: str) -> None:
    rank_pool(2).run(save_and_reload, name, tmp_path)


def on_meta(name: str) -> bool:
    cls, config = class_and_config(name)
    with torch.device("meta"):
        model = cls(config)
    model = oslo.parallelize(model, tp=2)
    state = parallel_state(model)
    for parameter_name, parameter in model.named_parameters():
        assert tuple(parameter.shape) == state.plan.tensor(parameter_name).local_shape(state.mesh.at.tp_rank)
    return all(parameter.is_meta for parameter in model.parameters())


def test_a_model_on_meta_is_split_without_being_materialised(rank_pool) -> None:
    assert all(rank_pool(2).run(on_meta, "llama"))


def save_split(folder: Path) -> None:
    cls, config = class_and_config("gpt2")
    torch.manual_seed(5)
    oslo.parallelize(cls(config), tp=2).save_pretrained_with_parallel(folder)


def load_and_fail(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        oslo.GPT2LMHeadModel.from_pretrained_with_parallel(folder, tensor_parallel_size=2)
    dist.barrier()
    return str(caught.value)


def test_one_altered_byte_of_one_file_is_an_error_on_every_rank(rank_pool, tmp_path: Path) -> None:
    folder = tmp_path / "split"
    rank_pool(2).run(save_split, folder)
    file = folder / "model_tp=1_pp=0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for message in rank_pool(2).run(load_and_fail, folder):
        assert file.name in message


def fail_on_one_rank(folder: Path) -> str:
    import oslo_engine.construct as construct

    original = construct.load_weights

    def damaged(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            raise CheckpointError("a disk error", where="this rank only")
        return original(*args, **kwargs)

    construct.load_weights = damaged  # type: ignore[assignment]
    try:
        return load_and_fail(folder)
    finally:
        construct.load_weights = original  # type: ignore[assignment]


def test_a_fault_on_one_rank_while_loading_is_raised_on_all(rank_pool, tmp_path: Path) -> None:
    saved("gpt2", tmp_path)
    for message in rank_pool(2).run(fail_on_one_rank, tmp_path):
        assert "a disk error" in message
