"""Summing what autograd hands out, without ever writing to it."""

from __future__ import annotations

import torch

from oslo_engine.pipeline.accumulate import GradientBuffer


def test_gradients_are_added_up_by_index_and_none_adds_nothing() -> None:
    buffer = GradientBuffer(3)
    for value in (1.0, 2.0, 4.0):
        buffer.add_all([torch.full((2,), value), None, torch.tensor(value) if value == 2 else None])
    first, second, third = buffer.take()
    assert first.tolist() == [7.0, 7.0]
    assert second is None
    assert third.item() == 2.0


def test_shared_and_expanded_gradients_are_never_written_to() -> None:
    """``autograd.grad`` gives one tensor to both operands of an addition, and an expanded zero to a mean's input."""
    a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    buffer = GradientBuffer(2)
    given = []
    for _ in range(3):
        gradients = torch.autograd.grad((a + b).sum(), [a, b])
        given.append([gradient.clone() for gradient in gradients])
        buffer.add_all(gradients)
        given[-1] = (gradients, given[-1])
    first, second = buffer.take()
    assert first.tolist() == second.tolist() == [3.0] * 3
    for gradients, copies in given:
        assert all(torch.equal(gradient, copied) for gradient, copied in zip(gradients, copies, strict=True))


def test_sums_are_in_memory_of_their_own() -> None:
    shared = torch.ones(()).expand(3)
    buffer = GradientBuffer(2)
    buffer.add_all([shared, shared])
    first, second = buffer.take()
    first.add_(1)
    assert second.tolist() == [1.0] * 3
    assert shared.tolist() == [1.0] * 3
    assert first.is_contiguous()


def test_buffer_is_empty_after_taking() -> None:
    buffer = GradientBuffer(1)
    buffer.add(0, torch.ones(1))
    buffer.take()
    assert buffer.take() == [None]
