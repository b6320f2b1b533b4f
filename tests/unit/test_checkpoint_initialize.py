"""Random initialisation, slice by slice, equals that of the unsplit model bit for bit."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, PreTrainedModel

from oslo_engine.checkpoint import initialize, shadow
from oslo_engine.checkpoint.initialize import initialize_like_unsplit
from oslo_engine.checkpoint.place import Slice
from oslo_engine.checkpoint.shadow import ShadowExecution
from oslo_engine.errors import UnsupportedError
from oslo_engine.plan.plan import Plan
from oslo_engine.shards import deal_evenly, packed_shard
from split_models import CPU, MODELS, differences, plan_of, rank_model


def build_whole(cls: Any, config: Any, dtype: torch.dtype | None) -> PreTrainedModel:
    torch.manual_seed(5)
    return cls._from_config(copy.deepcopy(config), **({} if dtype is None else {"dtype": dtype}))


def check(cls: Any, config: Any, plan: Plan, dtype: torch.dtype | None = None) -> None:
    whole = build_whole(cls, config, dtype)
    after = torch.get_rng_state()
    for rank in range(plan.topology.world_size):
        model, mesh = rank_model(cls, config, plan, rank, dtype)
        torch.manual_seed(5)
        initialize_like_unsplit(cls, config, plan, mesh.at, model, CPU, dtype)
        assert differences(model, whole, plan, mesh) == [], f"rank {rank}"
        assert torch.equal(torch.get_rng_state(), after), "the random state must be what it would be"


@pytest.fixture(params=[0, shadow.OPEN_BYTES], ids=["one tensor at a time", "small ones whole"])
def open_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(initialize, "ShadowExecution", lambda: ShadowExecution(request.param))
    return request.param


@pytest.mark.usefixtures("open_bytes")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (3, 1)])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_slices_equal_those_of_the_unsplit_model(name: str, tp: int, pp: int, dtype: torch.dtype | None) -> None:
    cls, config = MODELS[name]()
    check(cls, config, plan_of(cls, config, tp, pp), dtype)


def test_untied_and_replicated_tensors_are_right_too() -> None:
    for cls, config, tp in [(*MODELS["gpt2"](tie_word_embeddings=False), 2), (*MODELS["llama_two_kv"](), 4)]:
        check(cls, config, plan_of(cls, config, tp, 2))


def test_another_seed_gives_another_model() -> None:
    cls, config = MODELS["gpt2"]()
    plan = plan_of(cls, config, 2, 1)
    whole = build_whole(cls, config, None)
    model, mesh = rank_model(cls, config, plan, 0)
    torch.manual_seed(6)
    initialize_like_unsplit(cls, config, plan, mesh.at, model, CPU)
    assert "transformer.h.0.attn.c_attn.weight" in differences(model, whole, plan, mesh)


def test_the_config_is_left_as_it_was() -> None:
    cls, config = MODELS["bert"]()
    before = config.to_dict()
    plan = plan_of(cls, config, 2, 1)
    model, mesh = rank_model(cls, config, plan, 0)
    initialize_like_unsplit(cls, config, plan, mesh.at, model, CPU, torch.bfloat16)
    assert config.to_dict() == before


# -- constructors and initialisers that do unusual things


class Odd(PreTrainedModel):
    """What it does with ``self.weights`` is a parameter of the class."""

    config_class = BertConfig
    construct: Callable[[Any], None] = staticmethod(lambda model: None)
    initialise: Callable[[Any], None] = staticmethod(lambda model: None)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.first = nn.Linear(6, 4)
        self.second = nn.Embedding(8, 6, padding_idx=3)
        self.third = nn.Parameter(torch.randn(4, 6) * 3)
        self.square = nn.Parameter(torch.randn(4, 4))
        self.norm = nn.LayerNorm(6)
        self.register_buffer("noise", torch.randn(4))
        type(self).construct(self)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            type(self).initialise(self)


def odd(construct: Any = None, initialise: Any = None) -> type[Odd]:
    given = {"construct": construct, "initialise": initialise}
    return type("Odd", (Odd,), {name: staticmethod(function) for name, function in given.items() if function is not None})


def odd_plan(cls: type[Odd]) -> Plan:
    """Every parameter cut in its last dimension, some held by one stage only."""
    plan = plan_of(cls, BertConfig(), 1, 1)
    tensors = []
    for number, tensor in enumerate(plan.tensors):
        shard = None if tensor.is_buffer else packed_shard(len(tensor.shape) - 1, [(deal_evenly(tensor.shape[-1], 2), 1)])
        tensors.append(dataclasses.replace(tensor, shard=shard, stages=(number % 2,)))
    return dataclasses.replace(
        plan,
        tensors=tuple(tensors),
        topology=dataclasses.replace(plan.topology, tp=2, pp=2),
        num_stages=1,
        rank_of_stage=(0, 1),
    )


def scale_in_place(model: Any) -> None:
    model.first.weight.data.mul_(2).add_(1)


def fill_a_part(model: Any) -> None:
    with torch.no_grad():
        model.third.data[0].uniform_(3, 4)
        model.second.weight[2:5] = 7
        model.third[:, 1] = torch.arange(4.0)


def draw_again(model: Any) -> None:
    nn.init.orthogonal_(model.third)
    nn.init.trunc_normal_(model.first.weight, std=0.5, a=-0.3, b=0.9)
    nn.init.kaiming_uniform_(model.second.weight)
    nn.init.sparse_(model.third, 0.5)


def replace_data(model: Any) -> None:
    model.first.bias.data = nn.functional.pad(model.first.bias.data, (0, 0))
    model.third.data = torch.exp(model.third.data)


def copy_between(model: Any) -> None:
    with torch.no_grad():
        model.first.weight.copy_(model.third * 2)
        model.norm.weight.copy_(torch.linspace(0, 1, 6, device=model.norm.weight.device))


def replace_parameter(model: Any) -> None:
    model.first = nn.Linear(6, 4)
    model.third = nn.Parameter(model.third.detach().clone() + 1)


ODD = (scale_in_place, fill_a_part, draw_again, replace_data, copy_between, replace_parameter)


@pytest.mark.parametrize(
    ("what", "when"),
    [(what, when) for what in ODD for when in ("construct", "initialise") if (what, when) != (replace_parameter, "initialise")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_unusual_constructors_and_initialisers_are_followed(what: Any, when: str) -> None:
    cls = odd(**{when: what})
    check(cls, BertConfig(), odd_plan(cls))


def copy_from_other_ranks(model: Any) -> None:
    with torch.no_grad():
        model.third.uniform_()  # so that the bias is not the last that was used
        model.norm.weight.copy_(model.norm.bias)


def norm_of_result(model: Any) -> None:
    with torch.no_grad():
        model.first.bias.copy_((model.third * 2).norm().expand(4))


def softmax(model: Any) -> None:
    model.third.data = torch.softmax(model.third.data, -1)


def transpose_part(model: Any) -> None:
    with torch.no_grad():
        model.third[:, :4] = model.third[:, :4].t().clone()


def transpose_square(model: Any) -> None:
    model.square.data = model.square.data.t().clone()


def shift(model: Any) -> None:
    model.third.data = nn.functional.pad(model.third.data, (1, 0))[:, :6]


FOLLOWED = (scale_in_place, fill_a_part, draw_again, replace_data, copy_between)
REFUSED = (copy_from_other_ranks, norm_of_result, softmax, transpose_part, transpose_square, shift)


@pytest.mark.parametrize("when", ["construct", "initialise"])
@pytest.mark.parametrize("what", FOLLOWED + REFUSED, ids=lambda function: function.__name__)
def test_with_one_tensor_at_a_time_the_result_is_right_or_refused(
    monkeypatch: pytest.MonkeyPatch, what: Any, when: str
) -> None:
    cls = odd(**{when: what})
    check(cls, BertConfig(), odd_plan(cls))  # with room for several, all are followed
    monkeypatch.setattr(initialize, "ShadowExecution", lambda: ShadowExecution(0))
    if what in FOLLOWED:
        check(cls, BertConfig(), odd_plan(cls))
        return
    with pytest.raises(UnsupportedError, match="whole parameter"):
        check(cls, BertConfig(), odd_plan(cls))


def normalise(model: Any) -> None:
    with torch.no_grad():
        model.first.weight.div_(model.first.weight.norm())


def test_computing_with_a_whole_parameter_that_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = odd(initialise=normalise)
    check(cls, BertConfig(), odd_plan(cls))  # small: still there
    monkeypatch.setattr(initialize, "ShadowExecution", lambda: ShadowExecution(0))
    with pytest.raises(UnsupportedError, match="whole parameter"):
        check(cls, BertConfig(), odd_plan(cls))


def test_a_buffer_gets_no_values_of_a_parameter_that_is_gone() -> None:
    mode = ShadowExecution(0)
    gone, last = (mode.adopt(nn.Parameter(torch.ones(4)), wanted=False) for _ in range(2))
    buffer = torch.zeros(4)
    with mode, torch.no_grad():
        buffer.copy_(last)
    assert torch.equal(buffer, torch.ones(4))
    with pytest.raises(UnsupportedError, match="whole parameter"), mode, torch.no_grad():
        buffer.copy_(gone)


def swallow(model: Any) -> None:
    with suppress(NotImplementedError):
        normalise(model)


def test_a_refusal_that_the_model_swallows_is_raised_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialize, "ShadowExecution", lambda: ShadowExecution(0))
    cls = odd(initialise=swallow)
    with pytest.raises(UnsupportedError, match="whole parameter"):
        check(cls, BertConfig(), odd_plan(cls))


def test_a_constructor_that_is_another_each_time_is_refused() -> None:
    def extras(numbers: list[int]) -> Any:
        """A constructor that makes so many more parameters each time; the last number goes on."""

        def more(model: Any) -> None:
            for number in range(numbers.pop(0) if len(numbers) > 1 else numbers[0]):
                setattr(model, f"extra{number}", nn.Parameter(torch.ones(2)))

        return more

    # The constructor is called for the plan, for the whole model, for the rank's model, and twice to initialise that.
    for numbers in ([0, 0, 0, 1], [0, 0, 0, 0, 1], [1, 1, 1, 1, 0]):
        cls = odd(construct=extras(numbers))
        with pytest.raises(UnsupportedError, match="second time"):
            check(cls, BertConfig(), odd_plan(cls))


# -- memory


def test_slices_and_about_one_whole_tensor_exist_at_a_time() -> None:
    kept = Slice(packed_shard(0, [(deal_evenly(64, 4), 1)]), 1)
    mode = ShadowExecution(0)
    layers = [mode.adopt(nn.Parameter(torch.empty(64, 100)), wanted=number % 2 == 0, keep=kept) for number in range(50)]
    with mode, torch.no_grad():
        for layer in layers:
            layer.normal_()
    whole = [value for _, value in mode._values.values() if value.flat is not None]
    slices = [value.kept for _, value in mode._values.values() if value.kept is not None]
    assert len(whole) <= 1
    assert len(slices) == 25
    assert {tuple(part.shape) for part in slices} == {(16, 100)}
    assert all(part.untyped_storage().nbytes() == 16 * 100 * 4 for part in slices)


def test_results_that_nobody_holds_are_freed() -> None:
    mode = ShadowExecution(0)
    parameter = mode.adopt(nn.Parameter(torch.ones(100)), wanted=True)
    with mode, torch.no_grad():
        for _ in range(20):
            parameter.add_(parameter * 2 - parameter)
    assert len(mode._values) <= 4
