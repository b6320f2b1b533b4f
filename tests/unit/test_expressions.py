"""The arithmetic of a policy's ``set``."""

from __future__ import annotations

import pytest

from oslo_engine.errors import PolicyError
from oslo_engine.plan.expressions import evaluate

NAMES = {"q": 6, "kv": 2, "head_dim": 16}


@pytest.mark.parametrize(
    ("expression", "value"),
    [("q", 6), ("q / kv", 3), ("q * head_dim", 96), ("q*head_dim + kv", 98), ("q - 1", 5), ("128", 128)],
)
def test_values(expression: str, value: int) -> None:
    assert evaluate(expression, NAMES.__getitem__, where="f:1") == value


@pytest.mark.parametrize(
    ("expression", "message"), [("q / 4", "6 / 4"), ("q * heads", "unknown name 'heads'"), ("q / 0", "does not divide")]
)
def test_mistakes_name_file_and_line(expression: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message) as error:
        evaluate(expression, NAMES.__getitem__, where="file.yaml:7")
    assert "file.yaml:7" in str(error.value)
