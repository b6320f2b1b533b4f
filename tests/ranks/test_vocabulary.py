"""Embedding and head cut by vocabulary, alone and inside Transformers models, on real ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from oslo_engine.comm.collectives import Axis
from oslo_engine.comm.counter import CollectiveCounter
from oslo_engine.errors import PlanError
from oslo_engine.layers.vocab_shard import VocabShard, gather_logits
from oslo_engine.layers.vocabulary import vocab_parallel_embedding, vocab_parallel_head
from split_vocab import assert_close, layout_of, slice_sizes, split_vocabulary, tp_axis

VOCABULARY, HIDDEN = 131, 8
IDS = torch.tensor([[0, 1, 43, 44, 65], [66, 87, 88, 130, 0], [5, 5, 130, 7, 66]])


class RichEmbedding(nn.Embedding):
    """Normalises, scales and has a vector of its own for one token: each is done by some model's embedding."""

    special_token = 87

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.norm = nn.LayerNorm(self.embedding_dim, dtype=self.weight.dtype)
        self.special = nn.Parameter(torch.ones(self.embedding_dim, dtype=self.weight.dtype))
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, input: Tensor) -> Tensor:
        output = self.norm(super().forward(input)) * 3.5
        output[input == self.special_token] = self.special
        return output


class RichHead(nn.Linear):
    """Scales all logits by one number, and each by its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = nn.Parameter(torch.full((), 0.7, dtype=self.weight.dtype))
        self.scales = nn.Parameter(torch.linspace(0.5, 1.5, self.out_features, dtype=self.weight.dtype))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale * self.scales.to(self.weight.dtype)


class OwnLookup(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.embedding(input, self.weight)


class OwnProduct(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.T


def cut(module: nn.Module, axis: Axis) -> nn.Module:
    """A copy with this rank's rows, not yet parallel."""
    module, vocab = copy.deepcopy(module), layout_of(VOCABULARY, axis)
    for name in ("weight", "bias"):
        if getattr(module, name, None) is not None:
            setattr(module, name, nn.Parameter(getattr(module, name).detach()[vocab.start : vocab.stop].clone()))
    return module


def check_embedding(padding: int | None, kind: str) -> None:
    axis = tp_axis()
    torch.manual_seed(1)
    cls = {"plain": nn.Embedding, "rich": RichEmbedding}[kind]
    whole = cls(VOCABULARY, HIDDEN, padding_idx=padding, dtype=torch.float64)
    nn.init.normal_(whole.weight)  # the padding row too: its value counts, its gradient does not
    local = cut(whole, axis)
    split = vocab_parallel_embedding(local, axis, slice_sizes(VOCABULARY, axis.size))
    assert split is local
    expected = whole(IDS)
    with CollectiveCounter() as count:
        got = split(IDS)
    assert count.calls == {"allreduce": [1, expected.numel() * 8]}
    assert_close(got, expected, 1e-12)
    weight = torch.linspace(0.5, 2, expected.numel(), dtype=torch.float64).view_as(expected)
    (expected * weight).sum().backward()
    (got * weight).sum().backward()
    vocab = layout_of(VOCABULARY, axis)
    assert_close(split.weight.grad, whole.weight.grad[vocab.start : vocab.stop], 1e-12, "rows")
    if kind == "rich":
        for name in ("norm.weight", "norm.bias", "special"):
            assert_close(split.get_parameter(name).grad, whole.get_parameter(name).grad, 1e-12, name)
    assert split.padding_idx == padding
    if padding is not None and vocab.start <= padding < vocab.stop:
        assert not split.weight.grad[padding - vocab.start].any()


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("kind", ["plain", "rich"])
@pytest.mark.parametrize("padding", [None, 0, 66, 130])
def test_embedding_and_its_gradient_equal_the_whole_table(rank_pool, tp, kind, padding):
    rank_pool(tp).run(check_embedding, padding, kind)


def check_out_of_range_ids() -> None:
    axis = tp_axis()
    split = vocab_parallel_embedding(cut(nn.Embedding(VOCABULARY, HIDDEN), axis), axis, slice_sizes(VOCABULARY, axis.size))
    for wrong in (VOCABULARY, -1):
        ids = IDS.clone()
        ids[1, 2] = wrong
        with pytest.raises(IndexError, match=f"token id {wrong} is out of range for a vocabulary of {VOCABULARY}"):
            split(ids)
    assert split(IDS[:, :0]).shape == (3, 0, HIDDEN)


def test_ids_outside_the_vocabulary_raise_on_every_rank(rank_pool):
    rank_pool(2).run(check_out_of_range_ids)


def check_head(kind: str, bias: bool) -> None:
    axis = tp_axis()
    torch.manual_seed(1)
    cls = {"plain": nn.Linear, "rich": RichHead}[kind]
    whole = cls(HIDDEN, VOCABULARY, bias=bias, dtype=torch.float64)
    local = cut(whole, axis)
    split = vocab_parallel_head(local, axis, slice_sizes(VOCABULARY, axis.size))
    assert split is local
    hidden = torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    labels = torch.tensor([[0, 130, 65], [66, -100, 44]])
    inputs = [hidden.clone().requires_grad_() for _ in range(2)]
    with CollectiveCounter() as forward:
        logits = split(inputs[1])
    assert isinstance(logits, VocabShard)
    assert forward.calls == {}
    losses = [nn.functional.cross_entropy(x.view(-1, VOCABULARY), labels.view(-1)) for x in (whole(inputs[0]), logits)]
    assert_close(losses[1], losses[0], 1e-12)
    losses[0].backward()
    with CollectiveCounter() as backward:
        losses[1].backward()
    num_scales = VOCABULARY + 1 if kind == "rich" else 0
    assert backward.calls["allreduce"] == [1 + 2 * (kind == "rich"), (hidden.numel() + num_scales) * 8]
    assert_close(inputs[1].grad, inputs[0].grad, 1e-12, "hidden states")
    vocab = layout_of(VOCABULARY, axis)
    for name, parameter in split.named_parameters():
        expected = dict(whole.named_parameters())[name].grad
        assert_close(parameter.grad, expected if "scale" in name else expected[vocab.start : vocab.stop], 1e-12, name)
    with torch.no_grad(), CollectiveCounter() as count:
        gathered = split(hidden)
    assert type(gathered) is Tensor
    assert_close(gathered, whole(hidden), 1e-12)
    assert count.calls == {"allgather": [1, 2 * 3 * max(vocab.sizes) * 8]}
    with torch.inference_mode():
        assert type(split(hidden)) is Tensor


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["plain", "rich"])
def test_head_gives_a_slice_with_gradients_and_whole_logits_without(rank_pool, tp, kind, bias):
    rank_pool(tp).run(check_head, kind, bias)


def check_identity() -> None:
    axis = tp_axis()
    sizes = slice_sizes(VOCABULARY, axis.size)
    embeddings = [cut(RichEmbedding(VOCABULARY, HIDDEN, padding_idx=66), axis) for _ in range(2)]
    head = cut(nn.Linear(HIDDEN, VOCABULARY), axis)
    keys = list(embeddings[0].state_dict())
    for embedding in embeddings:
        vocab_parallel_embedding(embedding, axis, sizes)
    vocab_parallel_head(head, axis, sizes)
    assert isinstance(embeddings[0], RichEmbedding)
    assert type(embeddings[0]) is type(embeddings[1])
    assert (type(embeddings[0]).__name__, type(embeddings[0]).__module__) == ("RichEmbedding", RichEmbedding.__module__)
    assert list(embeddings[0].state_dict()) == keys
    assert embeddings[0].weight.shape[0] == sizes[axis.rank]
    assert (embeddings[0].num_embeddings, head.out_features) == (VOCABULARY, VOCABULARY)
    assert f"rows {sum(sizes[: axis.rank])}:" in repr(embeddings[0])
    assert repr(head).startswith(f"Linear(in_features={HIDDEN}, out_features={VOCABULARY}, bias=True, rows ")
    copied = copy.deepcopy(embeddings[0])
    assert torch.equal(copied(IDS), embeddings[0](IDS))
    assert copied.weight is not embeddings[0].weight
    assert isinstance(copy.deepcopy(head)(torch.randn(1, HIDDEN)), VocabShard)
    with pytest.raises(PlanError, match="already"):
        vocab_parallel_head(head, axis, sizes)


def test_module_keeps_its_identity(rank_pool):
    rank_pool(2).run(check_identity)


def test_an_axis_of_one_rank_changes_nothing():
    embedding, head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
    assert vocab_parallel_embedding(embedding, Axis("tp"), (VOCABULARY,)) is embedding
    assert vocab_parallel_head(head, Axis("tp"), (VOCABULARY,)) is head
    assert (type(embedding), type(head)) == (nn.Embedding, nn.Linear)


@pytest.mark.parametrize(
    ("module", "sizes", "message"),
    [
        (nn.Linear(HIDDEN, VOCABULARY), (66, 65), "weight must hold this rank's rows"),
        (nn.Linear(HIDDEN, 66), (66, 33, 32), "every tp rank needs a slice"),
        (nn.Linear(HIDDEN, 131), (131, 0), "every tp rank needs a slice"),
    ],
)
def test_a_head_that_does_not_hold_its_slice_is_refused(module, sizes, message):
    with pytest.raises(PlanError, match=message):
        vocab_parallel_head(module, Axis("tp", size=2, rank=0), sizes)


@pytest.mark.parametrize(
    ("make_parallel", "module"),
    [
        (vocab_parallel_embedding, OwnLookup(66, HIDDEN)),
        (vocab_parallel_head, OwnProduct(HIDDEN, 66)),
        (vocab_parallel_head, nn.Conv1d(HIDDEN, 66, 1)),
    ],
)
def test_a_class_that_does_the_lookup_or_the_product_itself_is_refused(make_parallel, module):
    with pytest.raises(PlanError, match=type(module).__name__):
        make_parallel(module, Axis("tp", size=2, rank=0), (66, 65))


@pytest.mark.parametrize("setting", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_an_embedding_that_looks_at_other_rows_is_refused(setting):
    with pytest.raises(PlanError, match=next(iter(setting))):
        vocab_parallel_embedding(nn.Embedding(66, HIDDEN, **setting), Axis("tp", size=2, rank=0), (66, 65))


def tiny_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    return GPT2LMHeadModel(config)


def tiny_t5(tied: bool = True) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, tie_word_embeddings=tied)
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)


def untied_t5() -> nn.Module:
    return tiny_t5(tied=False)


def tiny_bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, pad_token_id=0, **sizes))


def tiny_gemma3() -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    return Gemma3ForCausalLM(
        Gemma3TextConfig(vocab_size=VOCABULARY, intermediate_size=24, final_logit_softcapping=5.0, **sizes)
    )


def check_model(build: Callable[[], nn.Module], num_items: int | None) -> None:
    """Only the vocabulary is cut; everything else is computed alike on every rank, so its gradients must be whole."""
    axis = tp_axis()
    torch.manual_seed(2)
    whole = build().eval()
    for parameter in whole.parameters():  # biases start as zero, padding rows too
        nn.init.normal_(parameter, std=0.1)
    split = copy.deepcopy(whole)
    vocab = split_vocabulary(split, axis)
    labels = IDS.clone()
    labels[:, :1] = labels[1, -2:] = -100
    batch = {"input_ids": IDS, "attention_mask": (labels != -100).long(), "labels": labels}
    batch |= {} if num_items is None else {"num_items_in_batch": num_items}
    expected, got = whole(**batch), split(**batch)
    assert_close(got.loss, expected.loss, 1e-5, "loss")
    assert isinstance(got.logits, VocabShard)
    assert_close(gather_logits(got).logits, expected.logits, 1e-5, "logits")
    expected.loss.backward()
    got.loss.backward()
    of_whole = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for name, parameter in split.named_parameters():
        is_cut = parameter.shape != of_whole[name].shape
        wanted = of_whole[name][vocab.start : vocab.stop] if is_cut else of_whole[name]
        floor = 1e-6 * max(float(gradient.abs().max()) for gradient in of_whole.values())  # key biases have none: noise
        assert_close(torch.where(wanted.abs() > floor, parameter.grad, wanted), wanted, 1e-4, name)
    with torch.no_grad():
        assert_close(split(**batch).logits, whole(**batch).logits, 1e-5, "logits without gradients")
        assert not whole.can_generate() or _same_tokens(split, whole)


def _same_tokens(split: nn.Module, whole: nn.Module) -> bool:
    tokens = [model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0) for model in (split, whole)]
    return torch.equal(*tokens)


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("build", [tiny_gpt2, tiny_t5, untied_t5, tiny_bert, tiny_gemma3])
def test_model_with_a_cut_vocabulary_equals_the_whole_model(rank_pool, tp, build):
    rank_pool(tp).run(check_model, build, None)


def test_num_items_in_batch_reaches_the_loss(rank_pool):
    rank_pool(2).run(check_model, tiny_gpt2, 31)


def check_collectives() -> None:
    axis = tp_axis()
    split = tiny_gpt2()
    split_vocabulary(split, axis)
    hidden_bytes, row_bytes = IDS.numel() * 16 * 4, IDS.numel() * 4
    with CollectiveCounter() as forward:
        loss = split(input_ids=IDS, labels=IDS).loss
    assert forward.calls == {"allreduce": [1 + 3, hidden_bytes + 3 * row_bytes]}
    with CollectiveCounter() as backward:
        loss.backward()
    assert backward.calls == {"allreduce": [1, hidden_bytes]}
    with torch.no_grad(), CollectiveCounter() as count:
        split(input_ids=IDS)
    assert count.calls["allgather"] == [1, IDS.numel() * 66 * 4]


def test_collectives_of_a_training_step(rank_pool):
    rank_pool(2).run(check_collectives)


def check_compiled() -> None:
    axis = tp_axis()
    torch.manual_seed(2)
    whole = tiny_gpt2().eval()
    split = copy.deepcopy(whole)
    split_vocabulary(split, axis)
    compiled = torch.compile(split, backend="eager")
    expected = whole(input_ids=IDS, labels=IDS).loss
    expected.backward()
    outputs = compiled(input_ids=IDS, labels=IDS)
    outputs.loss.backward()
    assert isinstance(outputs.logits, VocabShard)
    assert_close(outputs.loss, expected, 1e-5)
    assert_close(split.transformer.wpe.weight.grad, whole.transformer.wpe.weight.grad, 1e-4)
    with torch.no_grad():
        assert_close(compiled(input_ids=IDS).logits, whole(input_ids=IDS).logits, 1e-5)


@pytest.mark.slow
def test_compiled_model_equals_the_whole_model(rank_pool):
    rank_pool(2).run(check_compiled, timeout_s=110)


def check_checkpointed_head() -> None:
    """Recomputing the head and the loss gives the same gradients."""
    from torch.utils.checkpoint import checkpoint

    axis = tp_axis()
    torch.manual_seed(1)
    head = cut(nn.Linear(HIDDEN, VOCABULARY), axis)
    vocab_parallel_head(head, axis, slice_sizes(VOCABULARY, axis.size))
    hidden = torch.randn(IDS.numel(), HIDDEN, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(head(x).float(), IDS.view(-1))

    expected = torch.autograd.grad(loss(hidden), [hidden, head.weight])
    got = torch.autograd.grad(checkpoint(loss, hidden, use_reentrant=False), [hidden, head.weight])
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


def test_head_and_loss_can_be_recomputed(rank_pool):
    rank_pool(2).run(check_checkpointed_head)


def check_ddp() -> None:
    """DDP looks for the parameters that an output depends on: without the loss among the outputs, through the logits."""
    from torch.nn.parallel import DistributedDataParallel

    axis = tp_axis()
    torch.manual_seed(1)
    head = cut(nn.Linear(HIDDEN, VOCABULARY), axis)
    vocab_parallel_head(head, axis, slice_sizes(VOCABULARY, axis.size))
    group = [torch.distributed.new_group([rank]) for rank in range(axis.size)][axis.rank]
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        wrapped = DistributedDataParallel(head, process_group=group, **options)
        hidden = torch.randn(IDS.numel(), HIDDEN)
        torch.distributed.broadcast(hidden, 0)
        for _ in range(2):
            head.zero_grad()
            nn.functional.cross_entropy(wrapped(hidden), IDS.view(-1)).backward()
            of_wrapped = head.weight.grad.clone()
            head.zero_grad()
            nn.functional.cross_entropy(head(hidden), IDS.view(-1)).backward()
            assert_close(of_wrapped, head.weight.grad, 1e-6, str(options))


def test_ddp_finds_the_parameters_behind_sharded_logits(rank_pool):
    rank_pool(2).run(check_ddp)
