"""What people combine with a device map: each computes what the plain model computes, or is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import oslo_engine as oslo
import pretend_devices
from oslo_engine import UnsupportedError, deparallelize, parallelize
from placed_models import DEVICES, spread, text_model, train
from rank_pool import RankPool

TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def pretend() -> Iterator[RankPool]:
    pool = RankPool(1)
    yield pool
    pool.kill()


def plain() -> tuple[Any, dict[str, Any]]:
    pretend_devices.install()
    model, batch, _ = text_model("causal", "llama")
    return model, batch


def placed(model: Any, *devices: str) -> Any:
    """A copy; on two pretend devices by default."""
    model = copy.deepcopy(model)
    return parallelize(model, device_map=spread(model, devices or DEVICES["2"]))


def assert_same(model: Any, whole: Any, batch: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    """Loss and every gradient."""
    whole = copy.deepcopy(whole).train(model.training)
    expected, found = train(whole, batch).loss, train(model, batch).loss
    assert float((found.detach().cpu() - expected.detach()).abs()) <= tolerance * float(expected.detach())
    largest = max(float(parameter.grad.abs().max()) for parameter in whole.parameters())
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert float((one.grad.cpu() - other.grad).abs().max()) <= tolerance * largest


def check_checkpointing(reentrant: bool) -> None:
    whole, batch = plain()
    model = placed(whole).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert_same(model, whole, batch)


def check_copies_and_pickles() -> None:
    whole, batch = plain()
    assert_same(copy.deepcopy(placed(whole)), whole, batch)
    for own_class in (False, True):
        model = copy.deepcopy(whole)
        if own_class:
            model.__class__ = oslo.LlamaForCausalLM
        before = type(model)
        model = parallelize(model, device_map=spread(model, ("cpu",)))
        again = pickle.loads(pickle.dumps(model))
        assert again.device_map == model.device_map
        assert type(again) is type(model)
        assert_same(again, whole, batch)
        deparallelize(again)
        assert type(again) is before
        assert model.model_parallel, "the copy was lifted, not this one"


def check_compile() -> None:
    whole, batch = plain()
    for early in (False, True):
        model = copy.deepcopy(whole) if early else placed(whole, "cpu")
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
        assert_same(parallelize(model, device_map=spread(model, ("cpu",))) if early else model, whole, batch)
    assert_same(torch.compile(placed(whole, "cpu"), backend="eager"), whole, batch)


def check_autocast() -> None:
    whole, batch = plain()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        found, expected = placed(whole, "cpu")(**batch), whole(**batch)
    assert found.logits.dtype == torch.bfloat16
    assert torch.equal(found.logits, expected.logits)


def check_fusion() -> None:
    whole, batch = plain()
    model = placed(whole, "cpu")
    model.fuse()
    assert model.fusion_report.counts["rms_norm"] > 0
    assert_same(model, whole, batch, 1e-5)
    model.unfuse()
    assert_same(deparallelize(model), whole, batch)
    model = copy.deepcopy(whole)
    model.__class__ = oslo.LlamaForCausalLM
    model.fuse().parallelize(spread(model, ("cpu",)))
    assert_same(model, whole, batch, 1e-5)
    model = placed(whole)  # where no kernel serves a device, the model's own code does
    model.fuse()
    assert_same(model, whole, batch, 1e-5)


def check_moves() -> None:
    whole, batch = plain()
    moves: list[Callable[[Any], Any]] = [
        lambda model: model.to("sim:0"),
        lambda model: model.cpu(),
        lambda model: model.to(torch.device("sim", 1), torch.float16),
        lambda model: torch.nn.ModuleList([model]).to("sim:0"),
        lambda model: model.to_empty(device="sim:0"),
    ]
    model = placed(whole)
    for move in moves:
        with pytest.raises(UnsupportedError, match="would undo its device map"):
            move(model)
    assert_same(model, whole, batch)
    assert {parameter.dtype for parameter in model.half().parameters()} == {torch.float16}


def check_adapters() -> None:
    from peft import LoraConfig, get_peft_model

    whole, batch = plain()
    expected = float(whole(**batch).loss.detach())
    config = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=True)
    after = get_peft_model(placed(whole), config)
    before = get_peft_model(copy.deepcopy(whole), config)
    parallelize(before.base_model.model, device_map=spread(before.base_model.model, DEVICES["2"]))
    for model in (after, before):
        assert float(train(model, batch).loss.detach()) == pytest.approx(expected, rel=TOLERANCE)
        adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        assert {str(parameter.device) for parameter in adapters} == {"sim:0", "sim:1"}
        assert all(parameter.grad is not None for parameter in adapters)


def check_outputs() -> None:
    whole, batch = plain()
    model = placed(whole)
    output = model(**batch, output_hidden_states=True)
    assert {str(value.device) for value in output.hidden_states} == {"sim:0", "sim:1"}
    assert str(output.logits.device) == "sim:1"
    loss, *_ = model(**batch, return_dict=False)
    assert loss.device.type == "cpu"
    assert torch.equal(loss, output.loss)
    embedded = model.get_input_embeddings()(batch["input_ids"].to("sim:0"))
    rest = {name: value for name, value in batch.items() if name != "input_ids"}
    assert torch.equal(model(inputs_embeds=embedded, **rest).loss.cpu(), output.loss)


def data_parallel(rank_rows: int) -> list[float]:
    """Norms of the gradients under DistributedDataParallel, each rank with its own rows."""
    import torch.distributed as dist

    model, batch, _ = text_model("causal", "llama")
    wrapped = torch.nn.parallel.DistributedDataParallel(placed(model, "cpu"), device_ids=None)
    start = dist.get_rank() * rank_rows
    output = wrapped(**{name: value[start : start + rank_rows] for name, value in batch.items()})
    output.loss.backward()
    return [float(parameter.grad.norm()) for parameter in wrapped.parameters()]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations(pretend: RankPool, reentrant: bool) -> None:
    pretend.run(check_checkpointing, reentrant)


@pytest.mark.parametrize(
    "check",
    [check_copies_and_pickles, check_autocast, check_fusion, check_moves, check_outputs],
    ids=lambda check: check.__name__,
)
def test_placed_model_combines_with(pretend: RankPool, check: Callable[[], None]) -> None:
    pretend.run(check)


@pytest.mark.slow
def test_blocks_compiled_before_and_after(pretend: RankPool) -> None:
    pretend.run(check_compile, timeout_s=300)


def test_adapters_before_and_after(pretend: RankPool) -> None:
    pytest.importorskip("peft", reason="the test is about it")
    pretend.run(check_adapters)


def test_data_parallel_copies_of_a_placed_model(rank_pool: Callable[[int], RankPool]) -> None:
    model, batch, _ = text_model("causal", "llama")
    losses = [model(**{name: value[rank : rank + 1] for name, value in batch.items()}).loss for rank in range(2)]
    (sum(losses) / 2).backward()
    expected = [float(parameter.grad.norm()) for parameter in model.parameters()]
    for found in rank_pool(2).run(data_parallel, 1):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-7)
