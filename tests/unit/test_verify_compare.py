"""A wrong number must be noticed, a rounded one not."""

from __future__ import annotations

import math

import pytest
import torch

from oslo_engine.verify.compare import LIMITS, bits_that_differ, gradient_errors, relative_error
from oslo_engine.verify.settings import DTYPES

LIMIT = LIMITS["float32"]


def test_one_wrong_entry_among_many_is_noticed() -> None:
    wanted = torch.randn(50, 40)
    got = wanted.clone()
    got[17, 3] += 1e-3
    assert relative_error(wanted.clone(), wanted) == 0
    assert relative_error(got, wanted) == pytest.approx(1e-3 / wanted.abs().max().item(), rel=1e-2)
    assert relative_error(got, wanted) > LIMIT.logits


def test_rounding_passes() -> None:
    wanted = torch.randn(1000)
    assert 0 < relative_error(wanted * (1 + 1e-7), wanted) < LIMIT.logits


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_is_infinitely_wrong(bad: float) -> None:
    assert relative_error(torch.tensor([1.0, bad]), torch.ones(2)) == math.inf


def test_other_shape_is_infinitely_wrong() -> None:
    assert relative_error(torch.ones(2, 3), torch.ones(3, 2)) == math.inf


def test_something_instead_of_zeros_is_infinitely_wrong() -> None:
    assert relative_error(torch.tensor([0.0, 1e-9]), torch.zeros(2)) == math.inf
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0


def test_worst_gradient_is_named() -> None:
    good, wanted = torch.ones(3), torch.ones(3)
    worst = gradient_errors([("a", good, wanted), ("b", good * 1.5, wanted), ("c", good * 1.1, wanted)], 1.0, LIMIT)
    assert (worst.name, worst.value) == ("b", pytest.approx(0.5))


def test_gradient_that_is_small_beside_others_is_not_measured_by_its_own_rounding() -> None:
    noise = torch.tensor([1e-8])
    assert gradient_errors([("key.bias", -noise, noise)], 1.0, LIMIT).value < LIMIT.gradients
    assert gradient_errors([("key.bias", torch.tensor([1e-3]), noise)], 1.0, LIMIT).value > LIMIT.gradients


def test_small_gradient_that_is_half_as_large_is_noticed() -> None:
    wanted = torch.full((4,), 1e-3)
    assert gradient_errors([("w", wanted / 2, wanted)], 1.0, LIMIT).value == pytest.approx(0.5)


@pytest.mark.parametrize(("got", "wanted"), [(None, torch.ones(2)), (torch.ones(2), None), (torch.ones(3), torch.ones(2))])
def test_missing_gradient_counts_as_zero(got: torch.Tensor | None, wanted: torch.Tensor | None) -> None:
    assert gradient_errors([("w", got, wanted)], 1.0, LIMIT).value >= 1


def test_gradient_missing_on_both_sides_is_right() -> None:
    assert gradient_errors([("w", None, None)], 1.0, LIMIT).value == 0


def test_gradient_that_is_no_number_is_infinitely_wrong() -> None:
    assert gradient_errors([("w", torch.tensor([math.nan]), torch.ones(1))], 1.0, LIMIT).value == math.inf


def test_in_sixteen_bits_one_flipped_entry_passes_and_a_forgotten_sum_does_not() -> None:
    limit = LIMITS["bfloat16"]
    wanted = torch.ones(400)
    flipped = wanted.clone()
    flipped[0] = 0
    assert gradient_errors([("w", flipped, wanted)], 1.0, limit).value < limit.gradients
    assert gradient_errors([("w", wanted / 2, wanted)], 1.0, limit).value > limit.gradients


def test_every_format_has_limits_that_a_wrong_model_exceeds() -> None:
    assert set(LIMITS) == set(DTYPES)
    for limits in LIMITS.values():
        assert max(limits.logits, limits.loss) <= 0.05
        assert limits.gradients < 0.5  # what one of two ranks makes of a sum


def test_bits_are_compared_one_by_one() -> None:
    wanted = torch.tensor([1.0, -0.0, 3.0])
    assert bits_that_differ(wanted.clone(), wanted) == 0
    assert bits_that_differ(torch.tensor([1.0, 0.0, 3.0 + 2**-21]), wanted) == 2
    assert bits_that_differ(torch.tensor([math.nan]), torch.tensor([math.nan])) == 0


def test_wider_type_with_the_same_values_is_the_same_and_a_narrower_one_is_not() -> None:
    half = torch.tensor([1.0, 0.1], dtype=torch.bfloat16)
    assert bits_that_differ(half.float(), half) == 0
    assert bits_that_differ(half, half.float()) == 2
    assert bits_that_differ(torch.ones(2, 2), torch.ones(4)) == 4
    assert bits_that_differ(torch.empty(0), torch.empty(0)) == 0
