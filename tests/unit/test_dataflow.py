from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oslo_engine.errors import PlanError
from oslo_engine.rewrite.dataflow import Call, DataFlow, SharedRandom, analyze
from oslo_engine.rewrite.record import Recording, record
from oslo_engine.rewrite.skeleton import example_inputs, skeleton
from oslo_engine.rewrite.values import Value
from small_models import SMALL
from stage_executor import run_stages


def recording_of(name: str, mode: str = "train", inputs: dict[str, Any] | None = None, **config: Any) -> Recording:
    cls, built, blocks = SMALL[name](**config)
    model = skeleton(cls, built).train(mode == "train")
    return record(model, blocks, {**example_inputs(model, mode), **(inputs or {})})


def flow_of(name: str, num_stages: int = 2, mode: str = "train", **config: Any) -> DataFlow:
    """Block calls divided evenly over the stages."""
    recording = recording_of(name, mode, **config)
    num_calls = len(recording.calls)
    return analyze(recording, [number * num_stages // num_calls for number in range(num_calls)], num_stages)


# ---------------------------------------------------------------- what crosses a cut, read off the models' code

# Blocks that take the hidden states and return them.
PLAIN = ["gpt2", "llama", "qwen3", "bert", "roberta", "albert", "gemma3", "mixtral", "mamba"]


@pytest.mark.parametrize("mode", ["train", "forward"])
@pytest.mark.parametrize("name", PLAIN)
def test_only_hidden_states_cross_a_cut_of_a_plain_stack(name: str, mode: str) -> None:
    flow = flow_of(name, 4, mode)
    assert flow.carried == ((), (Value(0, ()),), (Value(1, ()),), (Value(2, ()),))


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "bloom", "gemma3", "mixtral", "mamba"])
def test_only_hidden_states_cross_a_cut_while_generating(name: str, mode: str) -> None:
    carried = flow_of(name, 4, mode).carried
    assert [[value.call for value in values] for values in carried] == [[], [0], [1], [2]]


def test_every_stage_makes_the_alibi_of_its_own() -> None:
    # a block returns (hidden states, attention weights); alibi comes from the mask
    assert flow_of("bloom").carried[1] == (Value(1, (0,)),)


def test_the_encoder_of_t5_hands_on_hidden_states_and_the_position_bias_of_its_first_block() -> None:
    # 8 calls, 4 stages: the second stage has encoder blocks 2 and 3
    assert flow_of("t5", 4).carried[1] == (Value(0, (1,)), Value(1, (0,)))


def test_the_decoder_of_t5_gets_the_encoder_and_later_also_both_position_biases() -> None:
    carried = flow_of("t5", 4).carried
    encoder, self_bias, cross_bias = Value(3, (0,)), Value(4, (1,)), Value(4, (2,))
    assert carried[2] == (encoder,), "the third stage begins with the decoder; the position bias of the encoder is done with"
    assert carried[3] == (encoder, self_bias, cross_bias, Value(5, (0,)))


def test_eight_stages_of_t5() -> None:
    recording = recording_of("t5")
    carried = analyze(recording, [0, 1, 2, 3, 4, 5, 6, 7], 8).carried
    assert all(Value(0, (1,)) in carried[stage] for stage in (1, 2, 3))
    assert all(Value(3, (0,)) in carried[stage] for stage in (4, 5, 6, 7))
    assert carried[7] == (Value(3, (0,)), Value(4, (1,)), Value(4, (2,)), Value(6, (0,)))


def test_bart_carries_the_last_encoder_block_beside_the_hidden_states() -> None:
    assert flow_of("bart", 4).carried == ((), (Value(1, ()),), (Value(3, ()),), (Value(3, ()), Value(5, ())))


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_generation_with_encoder_outputs_carries_nothing_of_the_encoder(mode: str) -> None:
    assert flow_of("bart", 2, mode).carried[1] == (Value(1, ()),)
    assert flow_of("t5", 2, mode).carried[1] == (Value(0, (1,)), Value(0, (2,)), Value(1, (0,)))


def test_keys_and_values_that_later_blocks_reuse_are_carried() -> None:
    # blocks 2 and 3 (sliding, full) reuse what blocks 0 and 1 put into the dict shared_kv_states
    def shared(call: int, kind: str) -> list[Value]:
        return [Value(call, ("kwargs", "shared_kv_states", kind, part), written=True) for part in (0, 1)]

    sliding, full = shared(0, "sliding_attention"), shared(1, "full_attention")
    assert flow_of("gemma4", 4).carried == (
        (),
        (Value(0, ()), *sliding),
        (*sliding, Value(1, ()), *full),
        (*sliding, *full, Value(2, ())),
    )


def test_what_only_the_output_needs_is_handed_through_all_stages() -> None:
    recording = recording_of("llama", "forward", {"output_hidden_states": True})
    first, second, third = (Value(call, ()) for call in (0, 1, 2))
    embedded = Value(0, ("args", 0), written=True)  # the first block is given them
    carried = ((first, embedded), (first, embedded, second), (first, embedded, second, third))
    assert analyze(recording, [0, 1, 2, 3], 4).carried == ((), *carried)


# ---------------------------------------------------------------- what a stage holds

GPT2_FIRST = {"transformer.wte.weight", "lm_head.weight", "transformer.wpe.weight"}
GPT2_LAST = {"transformer.wte.weight", "lm_head.weight", "transformer.ln_f.weight", "transformer.ln_f.bias"}
BERT_EMBEDDINGS = {
    "bert.embeddings.word_embeddings.weight",
    "bert.embeddings.position_embeddings.weight",
    "bert.embeddings.token_type_embeddings.weight",
    "bert.embeddings.LayerNorm.weight",
    "bert.embeddings.LayerNorm.bias",
}
BERT_HEAD = {
    "cls.predictions.bias",
    "cls.predictions.decoder.bias",
    "cls.predictions.transform.dense.weight",
    "cls.predictions.transform.dense.bias",
    "cls.predictions.transform.LayerNorm.weight",
    "cls.predictions.transform.LayerNorm.bias",
}
BERT_TIED = {"bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"}
T5_TIED = {"shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}
ENCODER_NORM, DECODER_NORM = {"encoder.final_layer_norm.weight"}, {"decoder.final_layer_norm.weight"}


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("gpt2", {}, [GPT2_FIRST, set(), set(), GPT2_LAST]),
        (
            "gpt2",
            {"tie_word_embeddings": False},
            [GPT2_FIRST - {"lm_head.weight"}, set(), set(), GPT2_LAST - {"transformer.wte.weight"}],
        ),
        ("llama", {}, [{"model.embed_tokens.weight"}, set(), set(), {"model.norm.weight", "lm_head.weight"}]),
        ("qwen3", {}, [{"model.embed_tokens.weight"}, set(), set(), {"model.norm.weight", "lm_head.weight"}]),
        ("bert", {}, [BERT_EMBEDDINGS | BERT_TIED, set(), set(), BERT_HEAD | BERT_TIED]),
        ("t5", {}, [T5_TIED, set(), T5_TIED | ENCODER_NORM, T5_TIED | ENCODER_NORM | DECODER_NORM]),
    ],
    ids=["gpt2 tied", "gpt2 untied", "llama", "qwen3", "bert", "t5"],
)
def test_a_stage_holds_what_it_reads_outside_the_blocks(name: str, config: dict[str, Any], expected: list[set[str]]) -> None:
    assert [set(names) for names in flow_of(name, 4, **config).live_parameters] == expected


def test_modules_whose_answer_a_stage_does_not_need_are_dead() -> None:
    wte, wpe, norm, head = "transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head"
    dead = [set(names) for names in flow_of("gpt2", 4).dead_modules]
    assert dead == [{norm, head}, {wte, wpe, norm, head}, {wte, wpe, norm, head}, {wte, wpe}]


def test_the_norm_between_encoder_and_decoder_lives_where_the_decoder_does() -> None:
    dead = flow_of("t5", 4).dead_modules
    assert ["encoder.final_layer_norm" in names for names in dead] == [True, True, False, False]
    assert ["encoder.embed_tokens" in names for names in dead] == [False, True, True, True]
    assert ["decoder.embed_tokens" in names for names in dead] == [True, True, False, True]


def test_a_module_is_dead_with_all_that_lies_in_it() -> None:
    dead = flow_of("bert").dead_modules[1]
    assert {"bert.embeddings", "bert.embeddings.word_embeddings", "bert.embeddings.LayerNorm"} <= set(dead)


def test_rotary_buffers_live_on_every_stage_and_embedding_buffers_on_the_first() -> None:
    flow = flow_of("gemma3", 4)
    assert all("model.rotary_emb.full_attention_inv_freq" in names for names in flow.live_buffers)
    assert ["model.embed_tokens.embed_scale" in names for names in flow.live_buffers] == [True, False, False, False]


def test_every_stage_calls_the_one_block_of_albert() -> None:
    flow = flow_of("albert")
    (block,) = SMALL["albert"]()[2]
    assert flow.blocks_of_stage == ((block,), (block,))
    assert flow.calls == tuple(Call(block, nth) for nth in range(4))


def test_dropout_behind_the_encoder_is_drawn_by_every_decoder_stage() -> None:
    assert flow_of("t5", 4).random_in_several_stages == (SharedRandom("encoder.dropout", 1, "dropout", 0, (2, 3)),)
    assert flow_of("t5", 4, "forward").random_in_several_stages == ()
    assert flow_of("gpt2", 4).random_in_several_stages == ()


def test_one_stage_receives_nothing_and_needs_everything() -> None:
    flow = flow_of("gpt2", 1)
    assert flow.carried == ((),)
    assert flow.dead_modules == ((),)
    assert set(flow.live_parameters[0]) == GPT2_FIRST | GPT2_LAST


# ---------------------------------------------------------------- modules outside the blocks, in models made for it


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


class Toy(nn.Module):
    def __init__(self, forward: Callable[..., Any], block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.compute = forward

    def forward(self, ids: Tensor) -> Any:
        return self.compute(self, ids)


def toy_flow(forward: Callable[..., Any], block: type[nn.Module] = Block) -> DataFlow:
    """Two blocks, two stages."""
    with torch.device("meta"):
        model = Toy(forward, block)
    return analyze(record(model, ["layers.0", "layers.1"], {"ids": torch.tensor([[1, 2], [3, 4]])}), [0, 1], 2)


def norm_in_both_stages(model: Toy, ids: Tensor) -> Tensor:
    return model.norm(model.layers[1](model.layers[0](model.norm(model.embed(ids)))))


def norm_needed_once(model: Toy, ids: Tensor) -> Tensor:
    x = model.norm(model.embed(ids))
    return model.layers[1](model.norm(model.layers[0](x)))


def embedding_needed_again(model: Toy, ids: Tensor) -> Tensor:
    x = model.embed(ids)
    return model.layers[1](model.layers[0](x)) + x


def parameter_of_the_model_itself(model: Toy, ids: Tensor) -> Tensor:
    return model.layers[1](model.layers[0](model.embed(ids) * model.scale))


def parameter_behind_the_blocks(model: Toy, ids: Tensor) -> Tensor:
    return model.layers[1](model.layers[0](model.embed(ids))) * model.scale


@pytest.mark.parametrize(
    ("forward", "dead", "live"),
    [
        (norm_in_both_stages, [set(), {"embed"}], [{"embed", "norm"}, {"norm"}]),
        # the second call is needed on stage 1, so the parameters are there and the first may as well run
        (norm_needed_once, [set(), {"embed"}], [{"embed", "norm"}, {"norm"}]),
        (embedding_needed_again, [set(), set()], [{"embed"}, {"embed"}]),
        # no module's answer can stand for the multiplication: it runs on stage 1 too and reads the parameter
        (parameter_of_the_model_itself, [set(), {"embed"}], [{"embed", ""}, {""}]),
        # a stage ends with its last block call
        (parameter_behind_the_blocks, [set(), {"embed"}], [{"embed"}, {""}]),
    ],
)
def test_modules_used_by_several_stages(forward: Callable[..., Any], dead: list[set[str]], live: list[set[str]]) -> None:
    flow = toy_flow(forward)
    assert [set(names) for names in flow.dead_modules] == dead
    assert [{name.rpartition(".")[0] for name in names} for names in flow.live_parameters] == live


def test_a_module_that_hands_its_input_through_is_not_dead() -> None:
    class HandsThrough(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("range", torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x

    def forward(model: Toy, ids: Tensor) -> Tensor:
        return model.quantize(model.layers[1](model.layers[0](model.quantize(model.embed(ids)))))

    with torch.device("meta"):
        model = Toy(forward)
        model.quantize = HandsThrough()
    flow = analyze(record(model, ["layers.0", "layers.1"], {"ids": torch.tensor([[1, 2]])}), [0, 1], 2)
    assert [set(names) for names in flow.dead_modules] == [set(), {"embed"}]


def test_what_python_reads_must_be_right_on_every_stage_that_gets_there() -> None:
    def forward(model: Toy, ids: Tensor) -> Tensor:
        x = model.layers[0](model.embed(ids))
        return model.layers[1](ids.new_zeros(2, 2, 4) + 0.5) if x.sum() > 100 else model.layers[1](torch.ones(2, 2, 4))

    assert toy_flow(forward).carried[1] == (Value(0, ()),)


def test_reads_inside_a_dead_module_do_not_keep_it_alive() -> None:
    class Careful(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            assert ids.max() < 10
            return super().forward(ids)

    def forward(model: Toy, ids: Tensor) -> Tensor:
        return model.layers[1](model.layers[0](model.embed(ids)))

    with torch.device("meta"):
        model = Toy(forward)
        model.embed = Careful(10, 4)
    flow = analyze(record(model, ["layers.0", "layers.1"], {"ids": torch.tensor([[1, 2]])}), [0, 1], 2)
    assert flow.dead_modules[1] == ("embed",)


def test_a_module_that_gives_an_object_cannot_be_replaced_by_zeros() -> None:
    class GivesAnObject(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inside", torch.ones(1))

        def forward(self, x: Tensor) -> Any:
            return object(), x * 2

    def forward(model: Toy, ids: Tensor) -> Tensor:
        x = model.embed(ids)
        model.masker(x)
        return model.layers[1](model.layers[0](x))

    with torch.device("meta"):
        model = Toy(forward)
        model.masker = GivesAnObject()
    flow = analyze(record(model, ["layers.0", "layers.1"], {"ids": torch.tensor([[1, 2]])}), [0, 1], 2)
    assert flow.dead_modules == ((), ("embed",))


class Borrows(Block):
    lender: list[nn.Module]

    def forward(self, x: Tensor) -> Tensor:
        return self.lender[0](self.inner(x))


@pytest.mark.parametrize("called_outside_too", [True, False])
def test_what_a_block_borrows_from_outside_is_there(called_outside_too: bool) -> None:
    def forward(model: Toy, ids: Tensor) -> Tensor:
        Borrows.lender = [model.norm]
        x = model.embed(ids)
        return model.layers[1](model.layers[0](model.norm(x) if called_outside_too else x))

    flow = toy_flow(forward, Borrows)
    Borrows.lender = []
    assert flow.dead_modules[1] == ("embed",)
    assert set(flow.live_parameters[1]) == {"norm.weight", "norm.bias"}


# ---------------------------------------------------------------- proof by execution


def batch_for(model: Any, rows: int = 3, length: int = 11) -> dict[str, Tensor]:
    """A shape that was not recorded, padded on the right."""
    ids = torch.randint(5, 90, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, -4:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    if model.config.is_encoder_decoder:
        batch["labels"] = ids[:, :7].contiguous()
    return batch


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("name", sorted(SMALL))
def test_stages_that_get_only_what_is_carried_give_the_unsplit_output(name: str, num_stages: int) -> None:
    cls, config, _ = SMALL[name]()
    torch.manual_seed(0)
    model = cls(config).eval()
    batch = batch_for(model)
    with torch.no_grad():
        whole, split = model(**batch), run_stages(model, flow_of(name, num_stages), batch)
    assert torch.isfinite(whole.logits).all()
    torch.testing.assert_close(split.logits, whole.logits, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(split.loss, whole.loss, rtol=1e-6, atol=0)


def test_the_proof_fails_when_a_carried_value_is_missing() -> None:
    cls, config, _ = SMALL["t5"]()
    model, flow = cls(config).eval(), flow_of("t5", 4)
    incomplete = (*flow.carried[:3], flow.carried[3][1:])
    object.__setattr__(flow, "carried", incomplete)
    with torch.no_grad():
        assert run_stages(model, flow, batch_for(model)).logits.isnan().any()


# ---------------------------------------------------------------- as data


@pytest.mark.parametrize("name", ["gpt2", "t5", "gemma4"])
def test_a_data_flow_is_json(name: str) -> None:
    flow = flow_of(name, 4)
    data = json.loads(json.dumps(flow.to_json()))
    assert data["carried"][1][0] == {"call": 0, "path": list(flow.carried[1][0].path), "written": False}
    assert len(data["outputs"]) == len(flow.calls)
    assert set(data) == set(DataFlow.__dataclass_fields__)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("stages", "num_stages", "message"),
    [
        ([0, 0, 1], 2, "expected: 4 entries, one per block call\n  got: 3 entries"),
        ([0, 1, 0, 1], 2, r"must not fall.*\n  where: call 2 \(transformer.h.2\)\n  expected: stage 1 to 1\n  got: 0"),
        ([0, 0, 1, 2], 2, r"where: call 3 \(transformer.h.3\)\n  expected: stage 1 to 1\n  got: 2"),
        ([-1, 0, 0, 1], 2, r"where: call 0 \(transformer.h.0\)"),
        ([0, 0, 0, 0], 0, "at least one stage"),
    ],
)
def test_stages_that_do_not_fit_are_named(stages: Sequence[int], num_stages: int, message: str) -> None:
    with pytest.raises(PlanError, match=f"(?s){message}"):
        analyze(recording_of("gpt2"), stages, num_stages)


def test_a_stage_may_have_no_call_in_some_modes() -> None:
    # the stages of an encoder while decoding; and those of a decoder while the encoder runs by itself
    decoding = recording_of("bart", "decode")
    flow = analyze(decoding, [2, 2, 3, 3], 4)
    assert flow.carried == ((), (), (), (Value(1, ()),))
    assert flow.blocks_of_stage[:2] == ((), ())


def test_a_value_caught_inside_a_block_cannot_cross_a_cut() -> None:
    recording = recording_of("mixtral", inputs={"output_router_logits": True})
    with pytest.raises(PlanError, match=r"other than through its output(?s:.*)where: model.layers.\d, read by stage 1"):
        analyze(recording, [0, 0, 1, 1], 2)
    assert analyze(recording, [0, 0, 0, 0], 1).num_stages == 1


def test_blocks_that_talk_in_secret_cannot_be_parted() -> None:
    class Leaks(Block):
        kept: list[Tensor]

        def forward(self, x: Tensor) -> Tensor:
            if self.kept:
                x = x + self.kept.pop()
            self.kept.append(self.inner(x))
            return x * 2

    Leaks.kept = []
    with pytest.raises(PlanError, match=r"where: layers\.1 reads from layers\.0"):
        toy_flow(lambda model, ids: model.layers[1](model.layers[0](model.embed(ids))), Leaks)
    Leaks.kept.clear()
