"""What ``parallelize`` says to what is no model of Transformers."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import oslo_engine as oslo


@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"device_map": "balanced"}, {"auto": True}])
@pytest.mark.parametrize(("model", "kind"), [(nn.Linear(3, 3), "Linear"), ("gpt2", "str"), (nn.DataParallel, "type")])
def test_what_is_no_model_of_transformers_is_refused_with_a_sentence(model: Any, kind: str, options: dict[str, Any]) -> None:
    with pytest.raises(oslo.PlanError, match=rf"(?s)takes models of Transformers.*got: .*{kind}"):
        oslo.parallelize(model, **options)


@pytest.mark.parametrize(("model", "said"), [(nn.Linear(3, 3), "names no model"), ("vit", "language models with a head")])
def test_plan_does_not_speak_of_another_tool(model: Any, said: str) -> None:
    with pytest.raises(oslo.UnsupportedError, match=said) as found:
        oslo.plan(model, gpus=2, memory="1GiB")
    assert "verif" not in str(found.value)
