from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from oslo_engine.rewrite.meta_weights import MAX_REAL_NUMEL, MetaWeights, without_weights

W = torch.empty(6, 4, device="meta")
X = torch.arange(8.0).view(2, 4)


@pytest.fixture
def weights() -> MetaWeights:
    return MetaWeights()


def test_real_values_are_computed(weights: MetaWeights) -> None:
    with weights:
        result = X.cumsum(1)
        assert result.sum().item() == X.cumsum(1).sum().item()
    assert not result.is_meta


def test_parameters_alone_stay_on_meta(weights: MetaWeights) -> None:
    with weights:
        result = W.t().exp()[1:]
    assert result.is_meta
    assert result.shape == (3, 6)


def test_a_real_value_and_a_parameter_give_zeros_of_the_right_shape(weights: MetaWeights) -> None:
    with weights:
        result = nn.functional.linear(X, W)
    assert torch.equal(result, torch.zeros(2, 6))


def test_a_result_as_large_as_a_weight_stays_on_meta(weights: MetaWeights) -> None:
    experts = torch.empty(4, MAX_REAL_NUMEL // 2, device="meta")
    with weights:
        assert experts[torch.tensor([0, 1, 2])].is_meta
        assert not experts[torch.tensor([0, 1])].is_meta


def test_a_real_value_is_left_alone_by_a_write_of_unknown_values(weights: MetaWeights) -> None:
    value, out = torch.ones(2, 6), torch.ones(2, 6)
    with weights:
        assert value.add_(W[:1, :1]) is value
        assert torch.ops.aten.add_.Tensor(value, W[:1, :1]) is value
        torch.add(value, W[:1, :1], out=out)
    assert torch.equal(value, torch.ones(2, 6))
    assert torch.equal(out, torch.ones(2, 6))


def test_a_write_into_a_parameter_is_possible(weights: MetaWeights) -> None:
    parameter = torch.empty(2, 4, device="meta")
    with weights:
        assert parameter.copy_(X) is parameter


def test_a_scalar_read_from_meta_is_zero_and_every_read_is_counted(weights: MetaWeights) -> None:
    with weights:
        assert W[0, 0].item() == 0.0
        assert bool(X.sum() > 1)
        torch.equal(X, X)
        X.sum()
    assert weights.num_reads == 3


def test_draws_of_random_numbers_are_counted(weights: MetaWeights) -> None:
    with weights:
        nn.functional.dropout(X, 0.5, training=True)
        nn.functional.dropout(X, 0.5, training=False)
        torch.rand(2)
    assert weights.num_draws == 2


def test_rows_chosen_by_a_real_mask_are_counted(weights: MetaWeights) -> None:
    experts = torch.empty(3, MAX_REAL_NUMEL, device="meta")
    with weights:
        assert W[torch.tensor([True, False, True, False, False, True])].shape == (3, 4)
        assert experts[torch.tensor([True, False, True])].shape == (2, MAX_REAL_NUMEL)


def test_everything_is_on_one_device(weights: MetaWeights) -> None:
    with weights:
        assert X.to(W.device) is X
        assert not torch.zeros(3, device=W.device).is_meta
        assert W.to(X.device).is_meta
        assert X.to(W.device, torch.float64).dtype is torch.float64


def test_operations_without_a_meta_kernel_run_on_zeros(weights: MetaWeights) -> None:
    with weights:
        assert W.nonzero().shape == (0, 2)
    huge = torch.empty(MAX_REAL_NUMEL + 1, device="meta")
    with weights, pytest.raises(RuntimeError, match="needs the values of a weight"):
        huge.nonzero()


def test_a_grouped_product_has_the_shape_of_rows_and_features(weights: MetaWeights) -> None:
    experts, rows = torch.empty(2, 6, 10, device="meta"), torch.zeros(8, 6)  # sizes that the meta kernel refuses
    with weights:
        assert torch._grouped_mm(rows, experts, offs=torch.tensor([4, 8], dtype=torch.int32)).shape == (8, 10)


def test_an_observer_sees_what_went_in_and_came_out(weights: MetaWeights) -> None:
    seen: list[tuple[list[Tensor], list[Tensor]]] = []
    weights.observe = lambda inputs, outputs: seen.append((inputs, outputs))
    with weights:
        result = X + W[0]
    ((row_in, row_out), (inputs, outputs)) = seen
    assert row_in[0] is W
    assert inputs[0] is X
    assert row_out[0].shape == inputs[1].shape == (4,)
    assert outputs[0] is result


# ---------------------------------------------------------------- running a model


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("positions", torch.arange(3))
        self.register_buffer("same", self.positions)
        self.register_buffer("large", torch.empty(MAX_REAL_NUMEL + 1))
        self.seen: list[object] = []
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.seen = [self.positions, self.same, self.large, torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
        self.positions = self.positions + 1
        self.training = False
        return self.linear(x) + torch.rand(4)


def build() -> Model:
    with torch.device("meta"):
        return Model()


def test_small_buffers_stand_in_as_zeros_or_ones_and_shared_ones_stay_shared() -> None:
    model = build()
    with without_weights(model):
        model(torch.ones(2, 4))
        positions, same, large, *_ = model.seen
    assert torch.equal(positions, torch.ones(3, dtype=torch.long)), "models divide by whole numbers"
    assert positions is same
    assert large is model.large


def test_nothing_of_a_run_stays_behind() -> None:
    model = build()
    before = {key: dict(value) if isinstance(value, dict) else value for key, value in model.__dict__.items()}
    random_state = torch.get_rng_state()
    with torch.inference_mode(), without_weights(model):
        model(torch.ones(2, 4))
        grad, inference = model.seen[3:]
    assert (grad, inference) == (False, False)
    assert {key: dict(value) if isinstance(value, dict) else value for key, value in model.__dict__.items()} == before
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.is_grad_enabled()


def test_a_default_device_of_the_caller_does_not_matter() -> None:
    model = build()
    with torch.device("meta"), without_weights(model):
        assert not torch.zeros(2).is_meta
