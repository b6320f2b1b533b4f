"""``parallelize`` on an architecture that no policy serves."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel

import oslo_engine as oslo
from oslo_engine.errors import PolicyError
from oslo_engine.tiny.fill import fill

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "custom_architecture" / "modeling.py"


def modeling() -> Any:
    """The example's module, importable by its name as a user's own would be."""
    if "heron_modeling" not in sys.modules:
        spec = importlib.util.spec_from_file_location("heron_modeling", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["heron_modeling"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["heron_modeling"])
    return sys.modules["heron_modeling"]


def small() -> Any:
    module = modeling()
    config = module.HeronConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=44)
    model = module.HeronForCausalLM(config)
    fill(model, 1)
    return model


def difference_and_cut() -> tuple[float, list[str], list[str]]:
    ids = torch.randint(0, 61, (3, 9), generator=torch.Generator().manual_seed(0))
    wanted = small()(input_ids=ids, labels=ids).loss.detach()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = oslo.parallelize(small(), tp=2)
    got = model(input_ids=ids, labels=ids).loss.detach()
    cut = [tensor.name for tensor in model._oslo.plan.parameters if tensor.shard is not None]
    return float((got - wanted).abs() / wanted), cut, [str(one.message) for one in told if "derived" in str(one.message)]


def test_one_is_derived_with_a_warning(rank_pool) -> None:
    for difference, cut, told in rank_pool(2).run(difference_and_cut):
        assert difference < 1e-6
        assert {
            "blocks.0.attention.qkv.weight",
            "blocks.1.attention.slopes",
            "blocks.0.mlp.down.weight",
            "embed.weight",
        } <= set(cut)
        assert len(told) == 1
        assert "verify MODEL --policy heron.yaml --tp 2" in told[0]


class Blockless(PreTrainedModel):
    config_class = PreTrainedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.only = torch.nn.Linear(4, 4)


def refusal() -> str:
    model = Blockless(PreTrainedConfig())
    fill(model, 0)
    try:
        oslo.parallelize(model, tp=2)
    except PolicyError as error:
        return str(error)
    return ""


def test_where_none_can_be_derived_all_ranks_say_so(rank_pool) -> None:
    for message in rank_pool(2).run(refusal):
        assert "none could be derived" in message
        assert "policy=PATH" in message


@pytest.fixture(autouse=True)
def _no_leftovers() -> Any:
    yield
    sys.modules.pop("heron_modeling", None)
