from __future__ import annotations

import copy
import gc
import json
import subprocess
import sys
import textwrap
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oslo_engine.errors import PlanError
from oslo_engine.rewrite.record import Recording, record
from oslo_engine.rewrite.replay import Replay
from oslo_engine.rewrite.skeleton import example_inputs, skeleton
from oslo_engine.rewrite.structure import Argument, Constant, Container, TensorSlot
from oslo_engine.rewrite.values import value_of
from small_models import SMALL


def recorded(name: str, mode: str = "train", **config: Any) -> Recording:
    cls, built, blocks = SMALL[name](**config)
    model = skeleton(cls, built).train(mode == "train")
    return record(model, blocks, example_inputs(model, mode))


# ---------------------------------------------------------------- toy models: one block class, whatever forward a test needs


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Toy(nn.Module):
    def __init__(self, forward: Callable[..., Any], block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(block() for _ in range(5))
        self.norm = nn.LayerNorm(4)
        self.compute = forward

    def forward(self, ids: Tensor) -> Any:
        return self.compute(self, ids)


def toy(forward: Callable[..., Any], block: type[nn.Module] = Block) -> Recording:
    with torch.device("meta"):
        model = Toy(forward, block)
    return record(model, [f"layers.{layer}" for layer in range(5)], {"ids": torch.tensor([[1, 2, 3], [4, 5, 6]])})


def output_depends_on(recording: Recording) -> set[int]:
    """Numbers of the block calls that the output is computed from."""
    stack, seen, found = [node for node in recording.graph.nodes if node.op == "output"], set(), set()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            if node.op == "call_module":
                found.add(node.meta["call"])
            stack += node.all_input_nodes
    return found


# ---------------------------------------------------------------- the graph


def test_blocks_are_single_nodes_and_what_they_do_inside_is_not_recorded() -> None:
    recording = recorded("gpt2")
    modules = [node.target for node in recording.graph.nodes if node.op == "call_module"]
    assert modules == [f"transformer.h.{layer}" for layer in range(4)]
    functions = {getattr(node.target, "__name__", "") for node in recording.graph.nodes if node.op == "call_function"}
    assert {"embedding", "layer_norm", "linear", "cross_entropy"} <= functions
    assert not {"addmm", "scaled_dot_product_attention", "softmax"} & functions


def test_a_block_takes_the_result_of_the_one_before() -> None:
    first, second, *_ = recorded("gpt2").calls
    assert second.node.args[0] is first.node


def test_parameters_are_named_where_they_are_read_and_ties_share_one_node() -> None:
    tied, untied = recorded("gpt2"), recorded("gpt2", tie_word_embeddings=False)
    assert tied.aliases["transformer.wte.weight"] == ("transformer.wte.weight", "lm_head.weight")
    read = {node.target for node in tied.graph.nodes if node.op == "get_attr"}
    assert read == {"transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight", "transformer.ln_f.bias"}
    assert "lm_head.weight" in {node.target for node in untied.graph.nodes if node.op == "get_attr"}


def test_buffers_are_told_from_parameters() -> None:
    recording = recorded("llama")
    assert "model.rotary_emb.inv_freq" in recording.buffers
    assert all(name.startswith("model.rotary_emb.") for name in recording.buffers)
    assert "lm_head.weight" in recording.aliases


def test_a_block_called_many_times_is_counted() -> None:
    calls = recorded("albert").calls
    assert len({call.name for call in calls}) == 1
    assert [call.nth for call in calls] == [0, 1, 2, 3]


def test_spans_say_which_nodes_a_module_outside_the_blocks_recorded() -> None:
    recording = recorded("gpt2")
    nodes = list(recording.graph.nodes)
    functions = {
        span.module: [
            getattr(node.target, "__name__", "") for node in nodes[span.first : span.last] if node.op == "call_function"
        ]
        for span in recording.spans
    }
    assert functions.pop("transformer.ln_f")[0] == "layer_norm"
    assert functions == {"transformer.wte": ["embedding"], "transformer.wpe": ["embedding"], "lm_head": ["linear"]}


def test_a_module_called_twice_has_two_spans() -> None:
    recording = toy(lambda model, ids: model.norm(model.layers[0](model.norm(model.embed(ids)))))
    assert [(span.module, span.nth) for span in recording.spans] == [("embed", 0), ("norm", 0), ("norm", 1)]


def test_random_nodes_outside_the_blocks_are_known_in_training_only() -> None:
    assert [(node.target.__name__, node.meta["at"]) for node in recorded("gpt2").random] == [
        ("dropout", ("transformer.drop", 0))
    ]
    assert recorded("gpt2", "forward").random == ()


def test_values_that_python_reads_are_nodes() -> None:
    recording = toy(lambda model, ids: model.layers[0](model.embed(ids)) if ids.sum() > 3 else None)
    (read,) = recording.reads
    assert [node.target for node in read.args[0].args[0].all_input_nodes] == ["ids"]


# ---------------------------------------------------------------- data flow that is easy to lose


def through_a_view(model: Toy, ids: Tensor) -> Tensor:
    result = torch.zeros(2, 3, 4)
    result[:, 1:][:, 0] = model.layers[0](model.embed(ids))[:, 0]
    return result + 0


def through_an_older_view(model: Toy, ids: Tensor) -> Tensor:
    result = torch.zeros(2, 3, 4)
    flat = result.view(-1)
    result.add_(model.layers[0](model.embed(ids)))
    return flat + 0


def through_iteration(model: Toy, ids: Tensor) -> Tensor:
    return torch.stack([row * 2 for row in model.layers[0](model.embed(ids))])


def through_vmap(model: Toy, ids: Tensor) -> Tensor:
    return torch.vmap(lambda row: row.mean(0))(model.layers[0](model.embed(ids)))


def through_an_attribute(model: Toy, ids: Tensor) -> Tensor:
    return model.layers[0](model.embed(ids)).T + 0


def through_an_out_argument(model: Toy, ids: Tensor) -> Tensor:
    result = torch.zeros(2, 3, 4)
    torch.add(model.layers[0](model.embed(ids)), 1, out=result)
    return result + 0


@pytest.mark.filterwarnings("ignore:The use of `x.T`")
@pytest.mark.parametrize(
    "forward",
    [through_a_view, through_an_older_view, through_iteration, through_vmap, through_an_attribute, through_an_out_argument],
)
def test_a_block_result_is_followed(forward: Callable[..., Any]) -> None:
    assert output_depends_on(toy(forward)) == {0}


def test_a_value_that_is_only_passed_on_is_not_computed_again() -> None:
    recording = toy(lambda model, ids: model.layers[0](model.embed(ids)).to(torch.float32).contiguous())
    (output,) = (node for node in recording.graph.nodes if node.op == "output")
    assert output.all_input_nodes == [recording.calls[0].node]


def test_a_tensor_returned_as_it_came_beside_new_ones_stays_what_it_was() -> None:
    def forward(model: Toy, ids: Tensor) -> Tensor:
        first = model.layers[0](model.embed(ids))
        same, _ = torch.atleast_1d(first, model.layers[1](first).sum())
        assert same is first
        return same + 0

    assert output_depends_on(toy(forward)) == {0}


# ---------------------------------------------------------------- what blocks return, and what else they do


def test_an_output_that_is_an_argument_is_known_as_that_argument() -> None:
    first, second = recorded("t5").calls[:2]
    assert first.output == Container(
        "tuple", ((0, TensorSlot(3, "float32")), (1, TensorSlot(4, "float32")), (2, Constant(None)))
    )
    assert isinstance(second.output, Container)
    assert dict(second.output.entries)[1] == Argument(("args", 2))
    assert value_of(second.node.args[2]).call == 0  # type: ignore[union-attr]


class WritesItsArgument(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.inner(x))


def test_an_argument_changed_and_returned_is_a_result() -> None:
    recording = toy(lambda model, ids: model.layers[1](model.layers[0](model.embed(ids))), WritesItsArgument)
    assert recording.calls[0].output == TensorSlot(3, "float32")
    assert recording.calls[1].node.args[0] is recording.calls[0].node


def test_what_a_block_puts_into_a_dict_argument_is_its_result() -> None:
    calls = recorded("gemma4").calls
    assert [[(entry.path, entry.key) for entry in call.written] for call in calls] == [
        [(("kwargs", "shared_kv_states"), "sliding_attention")],
        [(("kwargs", "shared_kv_states"), "full_attention")],
        [],
        [],
    ]


def test_a_write_into_an_argument_reaches_everything_in_its_storage() -> None:
    def forward(model: Toy, ids: Tensor) -> Tensor:
        x = torch.ones(2, 3, 4)
        flat = x.view(-1)
        model.layers[0](x)
        return flat + 0

    recording = toy(forward, WritesItsArgument)
    assert output_depends_on(recording) == {0}
    assert [node.meta["escape"] for node in recording.graph.nodes if "escape" in node.meta] == [0]


class Collects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, last: dict[str, Tensor]) -> Tensor:
        last["x"] = self.inner(x)
        return x * 2


def test_equal_blocks_that_fill_a_dict_are_all_run() -> None:
    def forward(model: Toy, ids: Tensor) -> Tensor:
        x = model.embed(ids)
        last = {"x": x}
        for layer in model.layers:
            layer(x, last)
        return last["x"]

    recording = toy(forward, Collects)
    assert [[entry.key for entry in call.written] for call in recording.calls] == [["x"]] * 5
    assert output_depends_on(recording) == {0, 1, 2, 3, 4}, "every call was given what the one before put into the dict"


class Doubles(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


def test_a_tensor_that_leaves_a_block_through_a_hook_is_traced_to_its_call() -> None:
    def forward(model: Toy, ids: Tensor) -> Tensor:
        caught: list[Tensor] = []
        hook = model.layers[1].inner.register_forward_hook(lambda module, args, output: caught.append(output))
        model.layers[1](model.layers[0](model.embed(ids)))
        hook.remove()
        return caught[0] + 1

    recording = toy(forward, Doubles)
    assert [node.meta["escape"] for node in recording.graph.nodes if "escape" in node.meta] == [1]


class Leaks(Block):
    kept: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        if self.kept:
            x = x + self.kept.pop()
        self.kept.append(self.inner(x))
        return x * 2


def test_a_value_that_passes_from_block_to_block_in_secret_is_noticed() -> None:
    Leaks.kept = []
    recording = toy(lambda model, ids: model.layers[1](model.layers[0](model.embed(ids))), Leaks)
    Leaks.kept.clear()
    assert recording.hidden_flows == ((0, 1),)


def test_no_small_model_passes_values_in_secret() -> None:
    for name in SMALL:
        assert recorded(name).hidden_flows == (), name


class Borrows(Block):
    lender: list[nn.Module]

    def forward(self, x: Tensor) -> Tensor:
        return self.lender[0](self.inner(x))


def test_parameters_that_a_block_borrows_from_outside_are_named() -> None:
    def forward(model: Toy, ids: Tensor) -> Tensor:
        Borrows.lender = [model.norm]
        x = model.embed(ids)
        for layer in model.layers:
            x = layer(x)
        return x

    recording = toy(forward, Borrows)
    Borrows.lender = []
    assert [call.outside_reads for call in recording.calls] == [("norm.bias", "norm.weight")] * 5
    assert all(call.outside_reads == () for call in recorded("llama").calls)


# ---------------------------------------------------------------- one run per signature


def blocks_that_run(mode: str) -> list[int]:
    cls, built, _ = SMALL["llama"](num_hidden_layers=12)
    model = skeleton(cls, built)
    inputs = example_inputs(model, mode)
    ran: list[int] = []
    for layer, block in enumerate(model.model.layers):
        block.mlp.register_forward_hook(lambda module, args, output, layer=layer: ran.append(layer))
    record(model, [f"model.layers.{layer}" for layer in range(12)], inputs)
    return ran


def test_equal_blocks_run_once_apart_from_the_ends_of_the_stack() -> None:
    # 2 and 8 are also numbers of heads and sizes in this model, so blocks 2 and 8 look different
    assert blocks_that_run("forward") == [0, 1, 2, 8, 11]


def test_every_block_runs_where_a_cache_must_be_filled() -> None:
    assert blocks_that_run("prefill") == list(range(12))


@pytest.mark.parametrize("name", sorted(SMALL))
def test_answering_equal_blocks_does_not_change_the_recording(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    once = recorded(name)
    monkeypatch.setattr(Replay, "signature", lambda self, name, arguments: None)
    every = recorded(name)
    assert str(once.graph) == str(every.graph)
    assert [(call.output, call.written) for call in once.calls] == [(call.output, call.written) for call in every.calls]


# ---------------------------------------------------------------- inputs and roots


def test_the_encoder_can_be_recorded_by_itself() -> None:
    cls, built, blocks = SMALL["t5"]()
    model = skeleton(cls, built).eval()
    recording = record(model, blocks, example_inputs(model, "forward", root="encoder"), root="encoder")
    assert [call.name for call in recording.calls] == blocks[:4]
    assert output_depends_on(recording) == {0, 1, 2, 3}


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoder_outputs_are_inputs_like_any_other(name: str) -> None:
    cls, built, blocks = SMALL[name]()
    model = skeleton(cls, built).eval()
    inputs = example_inputs(model, "prefill")
    recording = record(model, blocks, inputs)
    assert [call.name for call in recording.calls] == blocks[4:]
    first = recording.calls[0].node
    reached = set(first.all_input_nodes) | {n for node in first.all_input_nodes for n in node.all_input_nodes}
    assert "encoder_outputs" in {node.target for node in reached if node.op == "placeholder"}


def test_an_empty_and_a_filled_cache_are_recorded_and_not_kept() -> None:
    from transformers import DynamicCache

    cls, built, blocks = SMALL["llama"]()
    model = skeleton(cls, built).eval()
    empty = DynamicCache(config=built)
    prefill = record(model, blocks, {**example_inputs(model, "prefill"), "cache": empty})
    assert empty.get_seq_length() == 8
    decode = record(model, blocks, {**example_inputs(model, "decode"), "cache": empty})
    assert [call.name for call in prefill.calls] == [call.name for call in decode.calls] == blocks
    for recording in (prefill, decode):
        assert not {type(item) for item in everything_in(recording)} & {DynamicCache, Tensor}


def test_deprecated_argument_names_reach_the_blocks() -> None:
    from transformers import DynamicCache

    cls, built, blocks = SMALL["gpt2"]()
    model = skeleton(cls, built).eval()
    inputs = example_inputs(model, "prefill")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        old = record(model, blocks, {**inputs, "past_key_values": DynamicCache(config=built)})
    assert str(old.graph) == str(record(model, blocks, inputs).graph)


def test_captured_hidden_states_are_block_results() -> None:
    cls, built, blocks = SMALL["llama"]()
    model = skeleton(cls, built).eval()
    recording = record(model, blocks, {**example_inputs(model, "forward"), "output_hidden_states": True})
    (output,) = (node for node in recording.graph.nodes if node.op == "output")
    assert {value.call for node in output.all_input_nodes if (value := value_of(node)) is not None} == {0, 1, 2}


def test_blocks_are_seen_under_gradient_checkpointing() -> None:
    cls, built, blocks = SMALL["llama"]()
    model = skeleton(cls, built).train()
    plain = record(model, blocks, example_inputs(model, "train"))
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = True
    assert [call.name for call in record(model, blocks, example_inputs(model, "train")).calls] == [c.name for c in plain.calls]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "gemma3"])
def test_both_kinds_of_attention_have_the_same_blocks(name: str, attention: str) -> None:
    cls, built, blocks = SMALL[name]()
    built._attn_implementation = attention
    model = skeleton(cls, built).eval()
    assert model.config._attn_implementation == attention
    assert [call.name for call in record(model, blocks, example_inputs(model, "forward")).calls] == blocks


# ---------------------------------------------------------------- no trace


def state_of(model: nn.Module) -> list[Any]:
    return [
        (name, {key: dict(value) if isinstance(value, dict) else value for key, value in module.__dict__.items()})
        for name, module in model.named_modules()
    ]


@pytest.mark.parametrize("options", [{}, {"output_hidden_states": True}])
def test_the_model_is_found_again_as_it_was(options: dict[str, Any]) -> None:
    cls, built, blocks = SMALL["gemma3"]()
    model = skeleton(cls, built)
    model.model.layers[1].eval()
    inputs = {**example_inputs(model, "train"), **options}
    before, random_state = state_of(model), torch.get_rng_state()
    with torch.enable_grad():
        record(model, blocks, inputs)
        assert torch.is_grad_enabled()
    assert state_of(model) == before
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert all(buffer.is_meta for buffer in model.buffers())


def test_the_model_is_found_again_as_it_was_after_an_error_and_after_changing_itself() -> None:
    def forward(model: Toy, ids: Tensor) -> Tensor:
        model.count = 1
        model.norm.weight = nn.Parameter(torch.ones(4))
        model.norm.register_buffer("extra", torch.ones(1))
        model.layers[0](model.embed(ids))
        raise KeyError("from the model")

    with torch.device("meta"):
        model = Toy(forward)
    before = state_of(model)
    with pytest.raises(KeyError, match="from the model"):
        record(model, ["layers.0"], {"ids": torch.tensor([[1]])})
    assert state_of(model) == before


def everything_in(value: Any) -> list[Any]:
    """All objects reachable from a recording, short of modules of code, functions and classes."""
    stop = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
    found, stack = {id(value): value}, [value]
    while stack:
        for item in gc.get_referents(stack.pop()):
            if id(item) not in found and not isinstance(item, stop):
                found[id(item)] = item
                stack.append(item)
    return list(found.values())


@pytest.mark.parametrize("name", ["gpt2", "t5", "gemma4", "mamba"])
def test_a_recording_holds_no_tensor_and_no_module(name: str) -> None:
    kept = [item for item in everything_in(recorded(name)) if isinstance(item, Tensor | nn.Module)]
    assert kept == []


# ---------------------------------------------------------------- bad input


def meta_toy(forward: Callable[..., Any], block: type[nn.Module] = Block) -> Toy:
    with torch.device("meta"):
        return Toy(forward, block)


def plain(model: Toy, ids: Tensor) -> Tensor:
    return model.layers[0](model.embed(ids))


class ReturnsAnObject(Block):
    def forward(self, x: Tensor) -> Any:
        return self.inner(x), object()


@pytest.mark.parametrize(
    ("leaves", "root", "block", "message"),
    [
        (["layers.7"], "", Block, "a block of the policy does not exist in the model\n  where: layers.7"),
        (["layers.0", "layers.0.inner"], "", Block, "a block lies within another block\n  where: layers.0.inner"),
        (["layers.2"], "", Block, "no block was called while recording\n  where: Toy\n  expected: a call of layers.2"),
        (["layers.0"], "encoder", Block, "the module to record does not exist\n  where: encoder"),
        (["layers.0"], "", ReturnsAnObject, "neither a tensor nor a container of tensors\n  where: layers.0: output.1."),
    ],
)
def test_bad_input_is_named(leaves: list[str], root: str, block: type[nn.Module], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        record(meta_toy(plain, block), leaves, {"ids": torch.tensor([[1]])}, root=root)


# ---------------------------------------------------------------- size

LARGE = """
    import json, sys, time
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from oslo_engine.rewrite.record import record
    from oslo_engine.rewrite.skeleton import example_inputs, skeleton

    torch.set_num_threads(1)
    layers, hidden, inner, heads = json.loads(sys.argv[1])
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8,
        vocab_size=128256,
    )
    start = time.process_time()
    model = skeleton(LlamaForCausalLM, config)
    recording = record(model, [f"model.layers.{layer}" for layer in range(layers)], example_inputs(model, "train"))
    seconds = time.process_time() - start
    peak_kib = int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])  # ru_maxrss knows the parent's
    print(len(recording.calls), seconds, peak_kib * 1024)
"""


@pytest.mark.parametrize(
    "shape", [(80, 8192, 28672, 64), pytest.param((126, 16384, 53248, 128), marks=pytest.mark.slow)], ids=["70B", "405B"]
)
def test_recording_allocates_no_weight(shape: tuple[int, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LARGE), json.dumps(shape)], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    num_calls, seconds, peak_bytes = (float(word) for word in done.stdout.split()[-3:])
    assert num_calls == shape[0]
    assert seconds < 5
    assert peak_bytes < 1.5e9


def test_a_deep_copy_of_a_model_is_recorded_like_the_model() -> None:
    cls, built, blocks = SMALL["gpt2"]()
    model = skeleton(cls, built).eval()
    inputs = example_inputs(model, "forward")
    assert str(record(copy.deepcopy(model), blocks, inputs).graph) == str(record(model, blocks, inputs).graph)
