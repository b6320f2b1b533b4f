"""What can be done with one rank's slice of the logits, alone: shapes, indices, arithmetic, refusals.

There is no process group here, so anything that tried to communicate would raise.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from oslo_engine.comm.collectives import Axis
from oslo_engine.errors import ShardedLogitsError
from oslo_engine.layers.vocab_shard import VocabLayout, VocabShard

SIZES = (44, 44, 43)
VOCABULARY = sum(SIZES)
RANK = 1
VOCAB = VocabLayout(Axis("tp", size=3, rank=RANK), SIZES)


@pytest.fixture
def whole() -> Tensor:
    return torch.randn(2, 5, VOCABULARY, dtype=torch.float64, requires_grad=True)


def shard_of(whole: Tensor, vocab: VocabLayout = VOCAB) -> VocabShard:
    return VocabShard.wrap(vocab.narrow(whole), vocab)


def slice_of(whole: Tensor, shard: VocabShard) -> Tensor:
    """What a shard of this layout must hold of a whole result."""
    return shard.vocab.narrow(whole)


MASK = torch.tensor([[True, False, True, True, False], [False, True, False, False, True]])
ROWS, COLUMNS = torch.tensor([0, 1, 1]), torch.tensor([4, 0, 2])
LOCAL: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(-1, VOCABULARY),
    "view with -1 for the vocabulary": lambda x: x.view(10, -1),
    "view of a size": lambda x: x.view(torch.Size([10, VOCABULARY])),
    "view_as": lambda x: x.view_as(torch.empty(5, 2, VOCABULARY)),
    "reshape": lambda x: x.reshape(5, 2, VOCABULARY),
    "reshape in front of a transposed vocabulary": lambda x: x.transpose(1, 2).reshape(1, 2, VOCABULARY, 5),
    "flatten": lambda x: x.flatten(0, 1),
    "transpose": lambda x: x.transpose(1, 2),
    "transpose twice": lambda x: x.transpose(0, 2).transpose(0, 1),
    "mT": lambda x: x.mT,
    "permute": lambda x: x.permute(2, 0, 1),
    "movedim": lambda x: torch.movedim(x, -1, 0),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "unsqueeze behind": lambda x: x.unsqueeze(-1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "select": lambda x: x.select(1, 3),
    "narrow": lambda x: x.narrow(1, 1, 3),
    "index_select": lambda x: x.index_select(1, ROWS),
    "split": lambda x: x.split(2, dim=1)[1],
    "chunk": lambda x: x.chunk(2, dim=1)[0],
    "unbind": lambda x: x.unbind(1)[2],
    "iteration": lambda x: list(x)[1],
    "cat": lambda x: torch.cat([x, x * 2], dim=1),
    "stack": lambda x: torch.stack([x, x * 2], dim=1),
    "stack behind": lambda x: torch.stack([x, x * 2], dim=-1),
    "last position": lambda x: x[:, -1],
    "all but the last": lambda x: x[..., :-1, :].contiguous(),
    "new dimensions": lambda x: x[None, :, :, None],
    "mask": lambda x: x[MASK],
    "index tensors": lambda x: x[ROWS, COLUMNS],
    "index list": lambda x: x[[0, 1]],
    "first entries": lambda x: x[..., :60],
    "entries of other ranks only": lambda x: x[..., :20],
    "all entries": lambda x: x[:, :, :],
    "middle entries": lambda x: x[:, 1:3, 50:100],
    "all but the last entry": lambda x: x[..., :-1],
    "entries of a transposed vocabulary": lambda x: x.transpose(1, 2)[:, :60],
    "softcap": lambda x: torch.tanh(x / 30.0) * 30.0,
    "number first": lambda x: 1 - 2 / (3 + x * x),
    "row scale": lambda x: x * torch.linspace(1, 2, 5, dtype=x.dtype)[:, None],
    "vocabulary scale": lambda x: x * torch.linspace(1, 2, VOCABULARY, dtype=x.dtype),
    "vocabulary bias first": lambda x: torch.linspace(1, 2, VOCABULARY, dtype=x.dtype) + x,
    "scale for a transposed vocabulary": lambda x: x.transpose(1, 2) * torch.linspace(1, 2, VOCABULARY, dtype=x.dtype)[:, None],
    "masked_fill": lambda x: x.masked_fill(MASK[..., None], -1e4),
    "masked_fill by entry": lambda x: x.masked_fill(torch.arange(VOCABULARY) > 70, -1e4),
    "where": lambda x: torch.where(MASK[..., None], x, 0.0),
    "where shards": lambda x: torch.where(x > 0, x, x * 0.1),
    "clamp": lambda x: x.clamp(min=-1, max=1),
    "double": lambda x: x.float().double(),
    "to dtype": lambda x: x.to(torch.float32),
    "to like": lambda x: x.to(torch.empty(1, dtype=torch.float32)),
    "to device": lambda x: x.to("cpu"),
    "type_as": lambda x: x.type_as(torch.empty(1, dtype=torch.float32)),
    "clone": lambda x: x.clone(),
    "sum over positions": lambda x: x.sum(1),
    "mean over positions, kept": lambda x: x.mean((0, 1), keepdim=True),
    "mean behind a transposed vocabulary": lambda x: x.transpose(1, 2).mean(-1),
}


@pytest.mark.parametrize("name", LOCAL)
def test_operation_gives_the_slice_of_the_whole_result_and_its_gradient(name, whole):
    expected, got = LOCAL[name](whole), LOCAL[name](shard_of(whole))
    assert isinstance(got, VocabShard)
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert torch.allclose(got.to_local(), slice_of(expected, got), rtol=1e-12, atol=1e-15)
    weight = torch.randn_like(expected)
    (of_whole,) = torch.autograd.grad((slice_of(expected, got) * slice_of(weight, got)).sum(), whole, retain_graph=True)
    (of_shard,) = torch.autograd.grad((got.to_local() * slice_of(weight, got)).sum(), whole)
    assert torch.allclose(of_shard, of_whole, rtol=1e-12, atol=0)


def set_entries(x: Tensor) -> None:
    x[:, :, [0, 50, 51, -1]] = -9.0


def set_one_entry(x: Tensor) -> None:
    x[..., 50] = 3.0


def set_slice(x: Tensor) -> None:
    x[:, 1:, 40:60] = 7.0


def set_positions(x: Tensor) -> None:
    x[MASK] = 0.0


def scale_in_place(x: Tensor) -> None:
    x *= 3


def fill_in_place(x: Tensor) -> None:
    x.masked_fill_(MASK[..., None], 2.0)


IN_PLACE = [set_entries, set_one_entry, set_slice, set_positions, scale_in_place, fill_in_place]


@pytest.mark.parametrize("change", IN_PLACE)
def test_in_place_change_and_its_gradient(change, whole):
    expected, got = whole * 2, shard_of(whole) * 2
    change(expected)
    change(got)
    assert torch.equal(got.to_local(), VOCAB.narrow(expected))
    (of_whole,) = torch.autograd.grad(VOCAB.narrow(expected).square().sum(), whole)
    (of_shard,) = torch.autograd.grad(got.to_local().square().sum(), whole)
    assert torch.equal(of_shard, of_whole)


@pytest.mark.parametrize("change", IN_PLACE)
def test_in_place_change_that_a_view_would_have_to_see_is_refused(change, whole):
    shard = shard_of(whole) * 2
    view = shard.view(2, 5, VOCABULARY)
    for tensor in (view, shard):
        with pytest.raises(ShardedLogitsError, match="in place"):
            change(tensor)


REFUSED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "topk": (lambda x: x.topk(3), "topk"),
    "sort": (lambda x: x.sort(), "sort"),
    "cumsum": (lambda x: x.cumsum(-1), "cumsum"),
    "matmul": (lambda x: x @ torch.ones(VOCABULARY, 2, dtype=x.dtype), "matmul"),
    "dropout": (lambda x: F.dropout(x, 0.1), "dropout"),
    "one entry": (lambda x: x[..., 7], "__getitem__"),
    "chosen entries": (lambda x: x[:, :, [1, 2]], "__getitem__"),
    "every other entry": (lambda x: x[..., ::2], "__getitem__"),
    "mask of everything": (lambda x: x[torch.ones(2, 5, VOCABULARY, dtype=torch.bool)], "__getitem__"),
    "flatten all": (lambda x: x.flatten(), "flatten"),
    "view that mixes": (lambda x: x.view(2, -1), "view"),
    "view as another dtype": (lambda x: x.view(torch.int64), "view"),
    "split of the vocabulary": (lambda x: x.split(50, dim=-1), "split"),
    "chunk of the vocabulary": (lambda x: x.chunk(2, dim=-1), "chunk"),
    "select of the vocabulary": (lambda x: x.select(-1, 5), "select"),
    "narrow of the vocabulary": (lambda x: x.narrow(-1, 0, 44), "narrow"),
    "index_select of the vocabulary": (lambda x: x.index_select(-1, torch.arange(VOCABULARY)), "index_select"),
    "unbind of the vocabulary": (lambda x: x.unbind(-1), "unbind"),
    "cat of the vocabulary": (lambda x: torch.cat([x, x], -1), "cat"),
    "cat with whole logits": (lambda x: torch.cat([x, torch.zeros(2, 5, VOCABULARY, dtype=x.dtype)]), "cat"),
    "vocabulary of another size": (lambda x: x + torch.zeros(VOCABULARY - 1, dtype=x.dtype), "add"),
    "slice-sized operand": (lambda x: x * torch.ones(SIZES[RANK], dtype=x.dtype), "mul"),
    "another cut": (lambda x: x + x[..., :100].transpose(1, 2)[:, :5], "add"),
    "in place on a whole tensor": (lambda x: torch.zeros(2, 5, VOCABULARY, dtype=x.dtype).add_(x), "add_"),
    "tensor written": (lambda x: x.__setitem__((slice(None), 0), torch.zeros(VOCABULARY)), "__setitem__"),
    "item": (lambda x: x.item(), "item"),
    "tolist": (lambda x: x.tolist(), "tolist"),
    "numpy": (lambda x: x.detach().numpy(), "numpy"),
    "truth": (lambda x: bool(x), "__bool__"),
    "storage": (lambda x: x.data_ptr(), "data_ptr"),
    "max of everything": (lambda x: x.max(), "max"),
    "softmax over positions": (lambda x: x.softmax(1), "softmax"),
    "argmax over positions": (lambda x: x.argmax(0), "argmax"),
    "gather over positions": (lambda x: x.gather(1, torch.zeros(2, 1, VOCABULARY, dtype=torch.long)), "gather"),
    "setting data": (lambda x: setattr(x, "data", torch.zeros(1)), ".data="),
    "pickle": (lambda x: pickle.dumps(x), "pickle"),
    "another device": (lambda x: x.to("meta"), "to"),
    "class weights": (
        lambda x: F.cross_entropy(x.view(-1, VOCABULARY), torch.zeros(10, dtype=torch.long), weight=torch.ones(VOCABULARY)),
        "cross_entropy",
    ),
    "probabilities as targets": (
        lambda x: F.cross_entropy(x.view(-1, VOCABULARY), torch.rand(10, VOCABULARY)),
        "cross_entropy",
    ),
    "shard as target": (lambda x: F.cross_entropy(torch.rand(10, VOCABULARY), x.view(-1, VOCABULARY)), "cross_entropy"),
    "classes that are not the vocabulary": (lambda x: F.cross_entropy(x, torch.zeros(2, VOCABULARY).long()), "cross_entropy"),
    "kl_div": (lambda x: F.kl_div(x, torch.rand(2, 5, VOCABULARY)), "kl_div"),
    "aten": (lambda x: torch.ops.aten.topk.default(x, 3), "aten.topk.default"),
    "aten with options": (lambda x: torch.ops.aten.add.Tensor(x, x, alpha=2), "aten.add.Tensor"),
    "aten with another shape": (lambda x: torch.ops.aten.add.Tensor(x, x.detach()[:1]), "aten.add.Tensor"),
    "aten view": (lambda x: torch.ops.aten.view.default(x.detach(), [-1]), "aten.view.default"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_names_operation_place_and_way_out(name, whole):
    operation, shown = REFUSED[name]
    with pytest.raises(ShardedLogitsError) as caught:
        operation(shard_of(whole))
    error = caught.value
    assert error.what.startswith(f"`{shown}` ")
    assert f"entries 44:88 of {VOCABULARY} on tp rank 1 of 3" in error.got
    assert "oslo.gather_logits(outputs)" in error.hint


def test_refusal_points_at_the_line_that_asked(whole):
    shard = shard_of(whole)
    with pytest.raises(ShardedLogitsError) as caught:
        shard.topk(3)
    own_line = caught.traceback[0].lineno + 1
    assert caught.value.where == f"{__file__}:{own_line}"


def test_refusal_inside_torch_points_at_the_caller_of_torch(whole):
    shard = shard_of(whole)
    with pytest.raises(ShardedLogitsError) as caught:
        torch.nn.KLDivLoss()(shard, torch.zeros(2, 5, VOCABULARY))
    assert caught.value.where == f"{__file__}:{caught.traceback[0].lineno + 1}"


def test_metadata_is_that_of_the_whole(whole):
    shard = shard_of(whole)
    assert (shard.shape, shard.size(-1), shard.dim(), shard.numel()) == (whole.shape, VOCABULARY, 3, whole.numel())
    assert (shard.dtype, shard.device, shard.requires_grad) == (whole.dtype, whole.device, True)
    assert len(shard) == 2
    assert torch.is_tensor(shard)
    assert not shard.detach().requires_grad
    assert not shard.data.requires_grad
    with torch.no_grad():
        assert not (shard * 2).requires_grad


def test_printing_says_which_slice_it_is(whole):
    shard = shard_of(whole)
    for text in (repr(shard), str(shard), f"{shard}"):
        assert f"shape=[2, 5, {VOCABULARY}]" in text
        assert "44:88 of 131 on tp rank 1 of 3" in text


def test_deepcopy_of_a_leaf_and_refusal_of_another(whole):
    leaf = shard_of(whole).detach().requires_grad_()
    copied = copy.deepcopy(leaf)
    assert copied is not leaf
    assert copied.requires_grad
    assert torch.equal(copied.to_local(), leaf.to_local())
    assert copied._local.data_ptr() != leaf._local.data_ptr()
    with pytest.raises(RuntimeError, match="detach"):
        copy.deepcopy(shard_of(whole))


def test_widening_half_precision_makes_no_copy(whole):
    shard = shard_of(whole.detach().bfloat16())
    wide = shard.float()
    assert wide.dtype == torch.float32
    assert wide._local.data_ptr() == shard._local.data_ptr()
    view = wide.view(-1, VOCABULARY)[:3]
    assert view.dtype == torch.float32
    assert view._local.untyped_storage().data_ptr() == shard._local.untyped_storage().data_ptr()
    assert torch.equal((view * 3).to_local(), shard.to_local().float().view(-1, SIZES[RANK])[:3] * 3)


def test_gradient_of_a_widened_shard_has_the_dtype_of_the_memory():
    leaf = torch.randn(2, SIZES[RANK], dtype=torch.bfloat16, requires_grad=True)
    shard = VocabShard.wrap(leaf, VOCAB)
    (shard.float() * 3).to_local().sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(leaf, 3))


def test_hooks_retained_gradients_and_autograd_grad_see_shards(whole):
    shard, seen = shard_of(whole) * 2, []
    shard.retain_grad()
    shard.register_hook(seen.append)
    loss = (shard * 3).to_local().sum() + shard.to_local().sum()
    loss.backward(retain_graph=True)
    (asked,) = torch.autograd.grad(loss, shard)
    for gradient, times in ((seen[0], 1), (asked, 1), (shard.grad, 2)):  # torch too adds what is asked for to what is retained
        assert isinstance(gradient, VocabShard)
        assert torch.equal(gradient.to_local(), torch.full_like(shard._local, 4 * times))
    assert torch.equal(whole.grad, F.pad(torch.full_like(shard._local, 8), (44, 43)))


def test_leaf_shard_accumulates_gradients(whole):
    leaf, seen = shard_of(whole).detach().requires_grad_(), []
    leaf.register_hook(seen.append)
    for _ in range(3):
        (leaf * 2).to_local().sum().backward()
    assert torch.equal(leaf.grad.to_local(), torch.full_like(leaf._local, 6))
    for gradient in seen:  # what a hook keeps is not what is added up
        assert torch.equal(gradient.to_local(), torch.full_like(leaf._local, 2))


def test_backward_with_a_whole_gradient_takes_the_slice(whole):
    gradient = torch.randn(2, 5, VOCABULARY, dtype=torch.float64)
    shard = shard_of(whole) * 2
    torch.autograd.backward([shard, shard.to_local().sum()], [gradient, None])  # it is added to a sharded one
    expected = torch.zeros_like(gradient)
    VOCAB.narrow(expected).copy_(2 * VOCAB.narrow(gradient) + 2)
    assert torch.allclose(whole.grad, expected, rtol=1e-12)
    whole.grad = None
    (shard_of(whole) * 2).backward(gradient)
    assert torch.allclose(whole.grad, expected - 2 * (expected != 0), rtol=1e-12, atol=1e-12)


class _Through(torch.autograd.Function):
    """As DDP passes outputs through a function of its own."""

    @staticmethod
    def forward(ctx, *tensors):
        return tensors

    @staticmethod
    def backward(ctx, *gradients):
        return tuple(2 * gradient for gradient in gradients)


def test_a_users_autograd_function_is_part_of_the_graph(whole):
    (shard,) = _Through.apply(shard_of(whole))
    assert isinstance(shard, VocabShard)
    shard.to_local().sum().backward()
    assert torch.equal(whole.grad, F.pad(torch.full_like(shard._local, 2), (44, 43)))


@pytest.mark.parametrize("rank", range(3))
def test_layout_locates_each_id_on_one_rank(rank):
    vocab = VocabLayout(Axis("tp", size=3, rank=rank), SIZES)
    rows, inside = vocab.locate(torch.arange(VOCABULARY))
    assert torch.equal(inside.nonzero().flatten(), torch.arange(vocab.start, vocab.stop))
    assert torch.equal(rows[inside], torch.arange(vocab.length))
    assert not rows[~inside].any()


@pytest.mark.parametrize(("start", "stop"), [(0, 131), (0, 60), (50, 100), (0, 10), (90, 131), (44, 88), (131, 131)])
def test_layout_of_a_slice_is_the_overlap_with_each_rank(start, stop):
    cut = VOCAB.cut(start, stop)
    owner = torch.arange(3).repeat_interleave(torch.tensor(SIZES))[start:stop]
    assert cut.sizes == tuple(int((owner == rank).sum()) for rank in range(3))
