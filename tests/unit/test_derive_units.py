"""What can be dealt out of a block, seen from gradients alone: blocks written here, one for each layout that models have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oslo_engine.derive.calls import observed
from oslo_engine.derive.dependencies import Dependences
from oslo_engine.derive.probe import Source
from oslo_engine.derive.specimen import Kind, Specimen
from oslo_engine.derive.units import Layout, Part, find_layout
from oslo_engine.tiny.fill import fill

HIDDEN, HEADS, WIDTH = 24, 6, 4
UNIT, GROUP, ALL = (Part(level, WIDTH) for level in ("unit", "group", "all"))


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """[batch, heads, length, width] each; fewer heads of k and v are shared."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / WIDTH**0.5
    scores = scores if bias is None else scores + bias
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, WIDTH)).transpose(1, 2)


class Block(nn.Module):
    """A residual block around attention whose projections ``split`` divides; ``packed`` features come out of one layer."""

    packed = 3 * HEADS * WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, self.packed)
        self.out = nn.Linear(HEADS * WIDTH, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 10), nn.Linear(10, HIDDEN)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x + self.out(self.attend(self.qkv(self.norm(x)), bias))
        return x + self.down(torch.nn.functional.gelu(self.up(x)))

    def attend(self, x: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError


class Concatenated(Block):
    def attend(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return attend(*map(heads, x.chunk(3, -1)), bias)


class InterleavedByHead(Block):
    def attend(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return attend(*x.unflatten(-1, (HEADS, 3 * WIDTH)).transpose(1, 2).chunk(3, -1), bias)


class OneKeyForAll(Block):
    packed = (HEADS + 2) * WIDTH

    def attend(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return attend(*map(heads, x.split([HEADS * WIDTH, WIDTH, WIDTH], -1)), bias)


class ThreeGroups(Block):
    packed = (HEADS + 6) * WIDTH

    def attend(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return attend(*map(heads, x.split([HEADS * WIDTH, 3 * WIDTH, 3 * WIDTH], -1)), bias)


class PackedByGroup(Block):
    packed = (HEADS + 6) * WIDTH

    def attend(self, x: Tensor, bias: Tensor | None) -> Tensor:
        group = x.unflatten(-1, (3, 4 * WIDTH))
        q, k, v = group.split([2 * WIDTH, WIDTH, WIDTH], -1)
        return attend(heads(q.flatten(2)), k.transpose(1, 2), v.transpose(1, 2), bias)


class InThreeBlocks(Block):
    def attend(self, x: Tensor, bias: Tensor | None) -> Tensor:
        parts = x.unflatten(-1, (3, 3, 2 * WIDTH))
        return attend(*(heads(parts[..., at, :].flatten(2)) for at in range(3)), bias)


class GatedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HEADS * WIDTH))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x = x * torch.sigmoid(gate)
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Gated(Block):
    packed = 4 * HEADS * WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.gated = GatedNorm()

    def attend(self, x: Tensor, bias: Tensor | None) -> Tensor:
        *qkv, gate = x.chunk(4, -1)
        return self.gated(attend(*map(heads, qkv), bias), gate)


def specimen(block: nn.Module, *more: Any) -> Specimen:
    """Two runs of a block alone, with other weights and lengths."""
    model = nn.ModuleDict({"block": block}).double()
    runs = []
    for seed, length in enumerate((5, 7)):
        fill(model, seed)  # type: ignore[arg-type]
        x = torch.randn(2, length, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        with observed({"block": block}) as calls:
            block(x, *(make(length) for make in more))
        runs.append(calls)
    return Specimen(model, (), (Kind(("block",)),), (0, 1), tuple(runs))  # type: ignore[arg-type]


def layouts(block: nn.Module, *more: Any) -> dict[str, Layout | str]:
    return {found.row: find_layout(found) for found in Dependences(specimen(block, *more), "block").find()}


def cut(layout: Layout | str, name: str) -> Any:
    assert isinstance(layout, Layout), layout
    return next((one.dim, one.parts) for one in layout.cuts if one.name == name)


@pytest.mark.parametrize(
    ("block", "parts", "groups"),
    [
        (Concatenated, (UNIT, UNIT, UNIT), 0),
        (InterleavedByHead, (Part("unit", 3 * WIDTH),), 0),
        (OneKeyForAll, (UNIT, Part("all", 2 * WIDTH)), 1),
        (ThreeGroups, (UNIT, GROUP, GROUP), 3),
        (Gated, (UNIT, UNIT, UNIT, UNIT), 0),
    ],
)
def test_heads_and_their_layout_in_a_packed_weight(block: type[Block], parts: tuple[Part, ...], groups: int) -> None:
    found = layouts(block())["out"]
    assert cut(found, "qkv.weight") == (0, parts)
    assert isinstance(found, Layout)
    assert (found.levels.count, found.levels.width, found.levels.groups) == (HEADS, WIDTH, groups)


def test_heads_packed_with_their_group_are_dealt_in_groups() -> None:
    found = layouts(PackedByGroup())["out"]
    assert cut(found, "qkv.weight") == (0, (Part("unit", 4 * WIDTH),))
    assert isinstance(found, Layout)
    assert (found.levels.count, found.levels.width) == (3, 2 * WIDTH)


def test_blocks_of_heads() -> None:
    found = layouts(InThreeBlocks())["out"]
    assert cut(found, "qkv.weight") == (0, (UNIT, UNIT, UNIT))
    assert isinstance(found, Layout)
    assert found.levels.blocks == 3


def test_features_of_a_plain_mlp_and_no_row_behind_a_residual() -> None:
    found = layouts(Concatenated())
    assert set(found) == {"out", "down"}
    assert cut(found["down"], "up.weight") == (0, (Part("unit", 1),))


def test_a_norm_over_all_heads_hides_nothing_and_its_weight_is_cut() -> None:
    assert cut(layouts(Gated())["out"], "gated.weight") == (0, (UNIT,))


def test_a_bias_by_head_among_the_arguments() -> None:
    def by_head(length: int) -> Tensor:
        return torch.randn(1, HEADS, length, length, dtype=torch.float64)

    found = layouts(Concatenated(), by_head)["out"]
    assert cut(found, ":bias") == (1, (Part("unit", 1),))


def test_a_mask_for_all_heads_is_no_bias_by_head() -> None:
    found = layouts(Concatenated(), lambda length: torch.zeros(1, 1, length, length, dtype=torch.float64))["out"]
    assert isinstance(found, Layout)
    assert all(one.kind != "argument" or one.name != ":bias" for one in found.cuts)


class Mixing(Concatenated):
    """Heads that are mixed before the output: nothing can be dealt."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.ones(HEADS * WIDTH, HEADS * WIDTH))

    def attend(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return super().attend(x, bias) @ self.mix


def test_mixed_heads_are_no_units() -> None:
    found = layouts(Mixing()).get("out", "")
    assert isinstance(found, str) or all(one.name != "qkv.weight" for one in found.cuts)


class OneRunOnly(Concatenated):
    """A feature that uses one entry more for short texts only or for long ones only."""

    def __init__(self, *, long: bool) -> None:
        super().__init__()
        self.long = long

    def attend(self, x: Tensor, bias: Tensor | None) -> Tensor:
        found = super().attend(x, bias)
        more = torch.zeros_like(found)
        if (x.shape[1] > 5) == self.long:
            more[..., 9] = x[..., 0]
        return found + more


def from_gradients(made: Specimen, row: str, parameter: str) -> Tensor:
    """[features, rows of the parameter]: one gradient of the whole block for each feature and run."""
    found = None
    for number in range(2):
        block = made.use(number)["block"] and made.block("block")
        entered: list[Tensor] = []
        hook = block.get_submodule(row).register_forward_pre_hook(lambda _, args, into=entered: into.append(args[0]))
        block(*made.runs[number]["block"].fresh()[0])
        hook.remove()
        weight, x = block.get_parameter(parameter), entered[0]
        grads = [torch.autograd.grad(x[..., at].sum(), weight, retain_graph=True)[0] for at in range(x.shape[-1])]
        used = torch.stack(grads).abs().amax(2) > 0
        found = used if found is None else found | used
    assert found is not None
    return found


@pytest.mark.parametrize("row", ["out", "down"])
@pytest.mark.parametrize("block", [Concatenated(), ThreeGroups(), OneRunOnly(long=False), OneRunOnly(long=True)])
def test_entries_are_those_that_the_gradient_of_each_feature_reaches_in_any_run(block: Block, row: str) -> None:
    made = specimen(block)
    found = next(one for one in Dependences(made, "block").find() if one.row == row)
    for parameter in ("qkv.weight", "out.weight", "up.weight")[: 1 if row == "out" else 3]:
        (table,) = found.uses[Source("parameter", parameter, 0)]
        assert torch.equal(table, from_gradients(made, row, parameter)), parameter


def test_nothing_comes_through_an_end_nor_from_its_weight() -> None:
    found = next(one for one in Dependences(specimen(Concatenated()), "block").find(ends={"out"}) if one.row == "down")
    assert {source.name for source in found.uses if source.kind == "parameter"} == {"up.weight", "up.bias"}
