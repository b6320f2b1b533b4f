"""Real models in a pipeline: what crosses the cuts, what stands where, and data parallelism around it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn.parallel import DistributedDataParallel

import oslo_engine as oslo
import small_models
from oslo_engine.errors import BatchError, PipelineError, PlanError, UnsupportedError
from oslo_engine.rewrite.state import parallel_state

LENGTH = 10


def unsplit(name: str) -> Any:
    cls, config, _ = getattr(small_models, name)()
    for option in [option for option in vars(config) if "drop" in option]:
        setattr(config, option, 0.0)
    torch.manual_seed(0)
    return cls(config).train()


def batch(rows: int = 4, *, seed: int = 1, length: int = LENGTH) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, small_models.VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, : length // 2] = -100
    return {"input_ids": ids, "labels": labels}


def traffic(name: str, schedule: str) -> dict[tuple[str, int], tuple[int, int]]:
    model = oslo.parallelize(unsplit(name), pp=2, schedule=schedule)
    model.train_step(batch())  # headers cross once
    links = parallel_state(model).program.runtime.links
    links.traffic.clear()
    model.train_step(batch(seed=2))
    return {key: (count.messages, count.bytes) for key, count in links.traffic.items()}


def test_only_hidden_states_cross_the_cut_of_a_decoder(rank_pool) -> None:
    first, last = rank_pool(2).run(traffic, "gpt2", "1f1b")
    hidden_bytes = LENGTH * small_models.HIDDEN * 4  # of one row, which is a micro-batch
    assert first["forward", 1] == (4, 4 * hidden_bytes)
    assert last["backward", 0] == (4, 4 * hidden_bytes)
    assert ("backward", 1) not in first
    assert ("forward", 0) not in last


def test_the_position_biases_and_the_encoders_output_cross_in_the_decoder(rank_pool) -> None:
    """T5, cut inside the decoder: hidden states, encoder output, self and cross attention's position bias."""
    first, _ = rank_pool(2).run(traffic, "t5", "1f1b")
    messages, sent_bytes = first["forward", 1]
    hidden = LENGTH * small_models.HIDDEN
    bias = small_models.HEADS * LENGTH * LENGTH
    assert (messages, sent_bytes) == (4 * 4, 4 * 4 * (2 * hidden + 2 * bias))


def placement() -> dict[str, Any]:
    model = oslo.parallelize(unsplit("gpt2"), pp=2)
    body = model.transformer
    return {
        "held": sorted({name.split(".weight")[0].split(".bias")[0] for name, _ in model.named_parameters()}),
        "blocks on meta": [all(p.is_meta for p in _tensors(block)) for block in body.h],
        "wpe": body.wpe.weight.is_meta,
        "ln_f": body.ln_f.weight.is_meta,
        "head": model.lm_head.weight.is_meta,
    }


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [
        value
        for part in module.modules()
        for value in (*part._parameters.values(), vars(part).get("weight"))
        if value is not None
    ]


def test_what_a_stage_does_not_need_is_on_meta_and_no_parameter(rank_pool) -> None:
    first, last = rank_pool(2).run(placement)
    assert first["blocks on meta"] == [False, False, True, True]
    assert last["blocks on meta"] == [True, True, False, False]
    assert (first["wpe"], first["ln_f"], first["head"]) == (False, True, False)  # the head is tied to the embedding
    assert (last["wpe"], last["ln_f"], last["head"]) == (True, False, False)
    assert not any(name.startswith(("transformer.h.2", "transformer.h.3", "transformer.ln_f")) for name in first["held"])


def data_parallel(tp: int, pp: int) -> tuple[dict[str, torch.Tensor], float]:
    """Two copies of the model, each on half of the batch, under DDP as the user writes it."""
    model = oslo.parallelize(unsplit("gpt2"), tp=tp, pp=pp)
    wrapped = DistributedDataParallel(model.gpu_modules(), process_group=model.mpu.get_data_parallel_group())
    rank, size = model.mpu.get_data_parallel_rank(), model.mpu.get_data_parallel_world_size()
    rows = batch(8, seed=5)
    rows["labels"] = rows["input_ids"]
    mine = {name: value.chunk(size)[rank] for name, value in rows.items()}
    optimizer = torch.optim.SGD(model.gpu_parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        if pp > 1:
            for micro in wrapped(**mine):
                micro.loss.backward()
        else:
            wrapped(**mine).loss.backward()
        norm = oslo.clip_grad_norm_(wrapped, 0.5)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, norm.item()


def asked(rows: int) -> dict[str, torch.Tensor]:
    """Questions that have been looked up already, so that the embedding of encoder and decoder takes no part."""
    generator = torch.Generator().manual_seed(2)
    names = ("inputs_embeds", "decoder_inputs_embeds")
    texts = {name: torch.randn(rows, LENGTH, small_models.HIDDEN, generator=generator) for name in names}
    return {**texts, **{f"{name}_positions": torch.arange(rows) % LENGTH for name in ("start", "end")}}


def t5_for_questions() -> Any:
    _, config, _ = small_models.t5()
    config.dropout_rate = 0.0
    torch.manual_seed(0)
    return transformers.T5ForQuestionAnswering(config).train()


def without_gradient() -> tuple[list[str], list[int], bool]:
    """The parameters that a step leaves alone, the stages that hold them, and whether they changed all the same."""
    model = oslo.parallelize(t5_for_questions(), pp=4)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.train_step(asked(4))
    optimizer.step()
    unused = {name: parameter for name, parameter in model.named_parameters() if parameter.grad is None}
    plan = parallel_state(model).plan
    same = all(torch.equal(before[name], parameter) for name, parameter in unused.items())
    return [plan.tensor(name).name for name in unused], list(plan.holders(plan.tensor("shared.weight"))), same


def test_a_shared_parameter_that_no_stage_uses_has_no_gradient_as_in_the_unsplit_model(rank_pool) -> None:
    reference = t5_for_questions()
    reference(**asked(4)).loss.backward()
    assert [name for name, parameter in reference.named_parameters() if parameter.grad is None] == ["shared.weight"]
    found = rank_pool(4).run(without_gradient)
    assert all(same for _, _, same in found)
    assert len(found[0][1]) == 2  # one of the encoder, one of the decoder
    for rank, (names, holders, _) in enumerate(found):
        assert names == (["shared.weight"] if rank in holders else [])


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_data_parallel_copies_train_as_one_model_on_the_whole_batch(rank_pool, tp: int, pp: int) -> None:
    reference = unsplit("gpt2")
    rows = batch(8, seed=5)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        reference(input_ids=rows["input_ids"], labels=rows["input_ids"]).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
    from oslo_engine.policy.registry import find_policy
    from oslo_engine.rewrite.planning import plan_model
    from oslo_engine.topology import Topology

    plan = plan_model(reference, find_policy(None, "gpt2"), Topology(tp=tp)).plan
    whole = dict(reference.named_parameters())
    for rank, (parameters, split_norm) in enumerate(rank_pool(4).run(data_parallel, tp, pp)):
        assert split_norm == pytest.approx(norm.item(), rel=1e-5)
        for name, value in parameters.items():
            tensor = plan.tensor(name)
            expected = whole[tensor.name]
            expected = expected if tensor.shard is None else tensor.shard.apply(expected, rank % tp)
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6, msg=name)


def misuse() -> list[str]:
    model = oslo.parallelize(unsplit("gpt2"), pp=2)
    found = []

    def expect(error: type[Exception], action: Any) -> None:
        with pytest.raises(error) as caught:
            action()
        found.append(str(caught.value))

    def forget() -> None:
        for _ in model(**batch()):
            pass

    expect(PipelineError, forget)
    expect(PipelineError, lambda: list(model(**batch())))
    expect(PipelineError, lambda: model(**batch()).loss)
    expect(BatchError, lambda: model(input_ids=batch()["input_ids"]))
    expect(BatchError, lambda: model.train_step(batch(rows=1)))
    expect(BatchError, lambda: model(input_ids=torch.ones(4, 3, dtype=torch.long), labels=torch.ones(3, 3, dtype=torch.long)))
    expect(UnsupportedError, lambda: model.train_step({**batch(), "output_hidden_states": True}))
    expect(PlanError, lambda: oslo.parallelize(model, pp=2))
    expect(BatchError, lambda: model.set_micro_batch_size(0))
    with torch.no_grad():
        expect(UnsupportedError, lambda: model(input_ids=batch()["input_ids"], use_cache=True))
    loss = model.train_step(batch())
    found.append(f"{loss.item():.6f}")
    dist.barrier()
    return found


def test_every_misuse_raises_the_same_everywhere_and_the_next_batch_is_right(rank_pool) -> None:
    first, last = rank_pool(2).run(misuse)
    assert first == last
    reference = unsplit("gpt2")
    assert float(first[-1]) == pytest.approx(reference(**batch()).loss.item(), rel=1e-5)
    assert "no_grad" in first[3]


def changing_batches() -> list[float]:
    model = oslo.parallelize(unsplit("llama"), pp=2, micro_batch_size=2)
    losses = []
    for rows, length in ((4, 6), (5, 11), (4, 6), (7, 3)):  # the last micro-batch is smaller, shapes come back
        losses.append(sum(_backward(micro.loss) for micro in model(**batch(rows, length=length))))
        with torch.no_grad():
            losses.append(model(**batch(rows, length=length)).loss.item())
    model.set_micro_batch_size(1)
    losses.append(model.train_step(batch(4)).item())
    return losses


def _backward(loss: torch.Tensor) -> float:
    loss.backward()
    return loss.item()


def test_shapes_and_micro_batch_size_may_change_from_step_to_step(rank_pool) -> None:
    reference = unsplit("llama")
    expected = [reference(**batch(rows, length=length)).loss.item() for rows, length in ((4, 6), (5, 11), (4, 6), (7, 3))]
    for losses in rank_pool(2).run(changing_batches):
        assert losses[0:8:2] == pytest.approx(expected, rel=1e-5)
        assert losses[1:8:2] == pytest.approx(expected, rel=1e-5)
        assert losses[8] == pytest.approx(reference(**batch(4)).loss.item(), rel=1e-5)


def evaluated(tp: int, pp: int, context: Any) -> tuple[list[float], list[list[int]], float]:
    """Losses of batches that were made inside of a context, generated tokens, and the loss of training afterwards."""
    model = oslo.parallelize(unsplit("gpt2"), tp=tp, pp=pp, micro_batch_size=2).eval()
    with context():
        losses = [model(**batch(length=length)).loss.item() for length in (LENGTH, 7)]
        tokens = model.generate(batch(2)["input_ids"].clone(), max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()
    return losses, tokens, model.train().train_step(batch()).item()


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_inference_mode_is_like_no_grad(rank_pool, tp: int, pp: int) -> None:
    reference = unsplit("gpt2").eval()
    expected = [reference(**batch(length=length)).loss.item() for length in (LENGTH, 7)]
    tokens = reference.generate(batch(2)["input_ids"], max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()
    for losses, generated, loss in rank_pool(tp * pp).run(evaluated, tp, pp, torch.inference_mode):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert generated == tokens
        assert loss == pytest.approx(expected[0], rel=1e-5)


def checkpointed(kind: str) -> str:
    model = oslo.parallelize(unsplit("gpt2"), pp=2, micro_batch_size=2)
    if kind == "transformers":
        model.gradient_checkpointing_enable({"use_reentrant": True})
    else:
        wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: module in list(model.transformer.h)
        )
    try:
        model(**batch())
    except UnsupportedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["transformers", "torch"])
def test_reentrant_checkpointing_is_refused_before_anything_runs(rank_pool, kind: str) -> None:
    for said in rank_pool(2).run(checkpointed, kind):
        assert '"use_reentrant": False' in said


def two_kinds_of_labels(micro_batch_size: int) -> str:
    config = transformers.BertConfig(
        vocab_size=83,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    model = oslo.parallelize(transformers.BertForPreTraining(config), pp=2, micro_batch_size=micro_batch_size)
    given = batch()
    try:
        model(**given, next_sentence_label=torch.tensor([0, 1, 0, 1]))
    except BatchError as error:
        return str(error)
    return ""


def test_labels_of_two_kinds_that_are_spread_differently_lead_to_another_layout(rank_pool) -> None:
    for said in rank_pool(2).run(two_kinds_of_labels, 2):
        assert "several kinds of labels" in said
        assert "hint: use pp=1" in said
