"""Fused models compute what they computed before, and say what was fused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import small_models
from oslo_engine.errors import FusionTargetError
from oslo_engine.fusion.fuse import fuse, fusion_report, unfuse
from oslo_engine.layers.specialize import original_class

LIMIT = 1e-5
GRADIENT_LIMIT = 1e-4


def build(name: str, *, dropout: float = 0.0, attention: str = "eager", **options: Any) -> Any:
    cls, config, _ = getattr(small_models, name)(**options)
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, dropout)
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation=attention).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + float(parameter.dim() == 1))
    return model


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, small_models.VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def step(model: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(5)
    output = model(**batch())
    output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return output.logits.detach(), output.loss.detach(), gradients


def assert_equal_steps(got: Any, wanted: Any) -> None:
    assert error(got[0], wanted[0]) <= LIMIT
    assert error(got[1], wanted[1]) <= LIMIT
    assert got[2].keys() == wanted[2].keys()
    largest = max(float(each.abs().max()) for each in wanted[2].values())
    for name, gradient in wanted[2].items():
        # A gradient that is zero but for rounding (of the bias of keys) is measured by the others.
        size = max(float(gradient.abs().max()), 1e-3 * largest)
        assert float((got[2][name] - gradient).abs().max()) <= GRADIENT_LIMIT * size, name


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", small_models.SMALL)
def test_a_fused_model_equals_the_original_and_can_be_undone(name: str) -> None:
    model = build(name)
    keys, before = list(model.state_dict()), step(model)
    report = fuse(model)
    assert report.replaced
    assert list(model.state_dict()) == keys
    assert_equal_steps(step(model), before)
    unfuse(model)
    assert fusion_report(model) is None
    assert all(type(module) is original_class(module) for module in model.modules())
    assert not [key for module in model.modules() for key in vars(module) if key.startswith("_oslo_fus")]
    after = step(model)
    assert torch.equal(after[0], before[0])
    assert all(torch.equal(after[2][key], gradient) for key, gradient in before[2].items())


def test_gpt2_has_its_activation_its_residuals_and_its_softmax_fused_in_every_layer() -> None:
    model = build("gpt2")
    layers = small_models.LAYERS
    assert fuse(model).counts == {
        "bias_gelu": layers,
        "bias_dropout_residual": 2 * layers,
        "scale_mask_softmax": layers,
        "layer_norm": 2 * layers + 1,
        "cross_entropy": 1,
    }
    assert not fusion_report(model).left


def test_llama_has_its_gates_and_its_norms_with_the_residual_before_them_fused_in_every_layer() -> None:
    layers = small_models.LAYERS
    assert fuse(build("llama")).counts == {
        "glu": layers,
        "add_rms_norm": layers,
        "rms_norm": layers + 1,
        "scale_mask_softmax": layers,
        "rotary": layers,
        "cross_entropy": 1,
    }


class _Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the kernels that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "oslo_engine":
            name = func._opname
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5", "bart", "gemma3"])
def test_the_kernels_of_the_report_are_those_that_run(name: str) -> None:
    model = build(name)
    reported = fuse(model).counts
    with _Calls() as calls, torch.no_grad():
        model(**batch())
    if "rotary" in reported:
        reported["rotary"] *= 2  # queries and keys
    assert calls.counts == reported


def test_attention_of_a_torch_kernel_is_left_and_the_report_says_so() -> None:
    report = fuse(build("gpt2", attention="sdpa"))
    assert "scale_mask_softmax" not in report.counts
    left = [place for place in report.left if place.kernel == "scale_mask_softmax"]
    assert [place.module for place in left] == [f"transformer.h.{layer}.attn" for layer in range(small_models.LAYERS)]
    assert "scaled_dot_product_attention is one kernel already" in str(report)


@pytest.mark.parametrize(
    ("targets", "kernels"),
    [
        ("norm", {"layer_norm"}),
        (["mlp"], {"bias_gelu", "bias_dropout_residual"}),
        (["attention", "loss"], {"scale_mask_softmax", "bias_dropout_residual", "cross_entropy"}),
    ],
    ids=str,
)
def test_targets_by_name(targets: Any, kernels: set[str]) -> None:
    model = build("gpt2")
    before = step(model)
    assert set(fuse(model, targets).counts) == kernels
    assert_equal_steps(step(model), before)


def test_targets_by_class_fuse_what_their_modules_compute() -> None:
    import oslo_engine as oslo

    model = build("gpt2")
    report = fuse(model, [oslo.GPT2MLP])
    assert report.counts == {"bias_gelu": small_models.LAYERS, "bias_dropout_residual": small_models.LAYERS}
    assert all(".mlp." in place.module for place in report.replaced)
    attention = fuse(model, [oslo.GPT2Attention])
    assert attention.counts == {"scale_mask_softmax": small_models.LAYERS, "bias_dropout_residual": small_models.LAYERS}
    both = fuse(model, [oslo.GPT2MLP, oslo.GPT2Attention])
    assert len(both.replaced) == len(report.replaced) + len(attention.replaced)
    mixed = fuse(model, [oslo.GPT2Attention, "norm"])
    assert mixed.counts == attention.counts | {"layer_norm": 2 * small_models.LAYERS + 1}


@pytest.mark.parametrize("targets", ["mpl", [nn.Conv2d], [], [3], ["mlp", "atention"]], ids=str)
def test_a_wrong_target_is_an_error_that_lists_what_there_is(targets: Any) -> None:
    model = build("gpt2")
    with pytest.raises(FusionTargetError, match="mlp, attention, norm, loss") as raised:
        fuse(model, targets)
    assert "GPT2MLP" in str(raised.value)
    assert fusion_report(model) is None


def test_a_kernel_that_differs_from_the_original_is_not_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    import oslo_engine.kernels.bias_gelu as kernel

    right = kernel.bias_gelu
    monkeypatch.setattr(kernel, "bias_gelu", lambda x, bias=None, form="erf": right(x, bias, form) * 1.001)
    model = build("gpt2")
    before = step(model)
    report = fuse(model)
    assert "bias_gelu" not in report.counts
    assert [place.kernel for place in report.left] == ["bias_gelu"] * small_models.LAYERS
    assert "differs from the original by 1.0e-03" in report.left[0].reason
    assert_equal_steps(step(model), before)


def test_a_norm_that_computes_something_else_is_left() -> None:
    class OddNorm(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 1.01

    model = build("gpt2")
    model.transformer.ln_f = OddNorm(small_models.HIDDEN)
    report = fuse(model, "norm")
    assert report.counts == {"layer_norm": 2 * small_models.LAYERS}
    assert [place.module for place in report.left] == ["transformer.ln_f"]


def test_the_epsilon_of_a_norm_is_the_one_it_computes_with() -> None:
    model = build("llama", rms_norm_eps=0.03)
    before = step(model)
    assert len(fuse(model, "norm").replaced) == 2 * small_models.LAYERS + 1
    assert_equal_steps(step(model), before)


# ------------------------------------------------------------------ together with other features


def test_a_rotation_by_other_angles_in_the_second_half_is_left() -> None:
    class Odd(nn.Module):
        def __init__(self, original: nn.Module) -> None:
            super().__init__()
            self.original = original

        def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            cos, sin = self.original(*args, **kwargs)
            return torch.cat((cos[..., :4], cos[..., 4:] * 0.5), -1), sin

    model = build("llama")
    model.model.rotary_emb = Odd(model.model.rotary_emb)
    before = step(model)
    report = fuse(model)
    assert "rotary" not in report.counts
    assert "different angles" in str(report)
    assert_equal_steps(step(model), before)


def test_autocast() -> None:
    model = build("gpt2").bfloat16().float()
    types: list[torch.dtype] = []
    model.transformer.h[1].ln_1.register_forward_hook(lambda module, args, output: types.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        before = step(model)
        fuse(model)
        after = step(model)
    assert types[0] == types[1]
    assert after[0].dtype == before[0].dtype
    assert error(after[0].float(), before[0].float()) < 3e-2
    assert error(after[1], before[1]) < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keeps_types_and_is_no_worse_than_before(dtype: torch.dtype) -> None:
    inputs = {"input_ids": batch()["input_ids"]}
    exact = build("llama").double()
    rounded = build("llama").to(dtype)
    with torch.no_grad():
        for wide, narrow in zip(exact.parameters(), rounded.parameters(), strict=True):
            wide.copy_(narrow)
        wanted = exact(**inputs).logits
        before = rounded(**inputs).logits
        assert fuse(rounded).replaced
        after = rounded(**inputs).logits
    assert after.dtype == before.dtype == dtype
    assert error(after.double(), wanted) <= 1.5 * error(before.double(), wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_draws_the_same_masks_again(reentrant: bool) -> None:
    model = build("gpt2", dropout=0.2)
    fuse(model)
    wanted = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    got = step(model)
    assert torch.equal(got[0], wanted[0])
    assert_equal_steps(got, wanted)


def test_dropout_drops_the_wanted_share_and_never_the_same_twice() -> None:
    model = build("gpt2", dropout=0.3)
    fuse(model, "mlp")
    block = model.transformer.h[0]
    x = torch.randn(4, 64, small_models.HIDDEN)
    block.attn = _NoAttention()
    torch.manual_seed(0)
    first, second = block(x), block(x)
    torch.manual_seed(0)
    again = block(x)
    dropped = (first == x).float().mean()
    assert 0.28 < float(dropped) < 0.32
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    block.eval()
    whole = block(x) - x
    kept = first != x
    assert torch.allclose((first - x)[kept], whole[kept] / 0.7, atol=1e-5)


class _NoAttention(nn.Module):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


def test_torch_compile_traces_the_original_in_one_graph() -> None:
    model = build("gpt2").eval()
    fuse(model)
    block, x = model.transformer.h[0], torch.randn(2, 7, small_models.HIDDEN)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        wanted = block(x)
        assert error(torch.compile(block, backend=backend, fullgraph=True)(x), wanted) <= LIMIT
    (graph,) = graphs
    assert "gelu" in graph.code or "tanh" in graph.code
    assert "oslo_engine" not in graph.code
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generation_gives_the_same_tokens(name: str, how: dict[str, Any]) -> None:
    model = build(name).eval()
    inputs = {key: value for key, value in batch().items() if key != "labels"}
    arguments = {**inputs, **how, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(**arguments)
    fuse(model)
    assert torch.equal(model.generate(**arguments), wanted)


def test_a_copy_is_fused_too_and_has_weights_of_its_own() -> None:
    model = build("gpt2")
    fuse(model)
    before = step(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_equal_steps(step(twin), before)
    assert fusion_report(twin) == fusion_report(model)
    unfuse(twin)
    assert all(type(module) is original_class(module) for module in twin.modules())
    assert_equal_steps(step(twin), before)


def test_a_pickled_model_is_the_plain_one() -> None:
    model = build("gpt2")
    before = step(model)
    fuse(model)
    loaded = pickle.loads(pickle.dumps(model))
    assert all(type(module) is original_class(module) for module in loaded.modules())
    assert fusion_report(loaded) is None
    assert_equal_steps(step(loaded), before)


def test_what_replaces_a_parameter_is_what_the_kernel_reads() -> None:
    model = build("gpt2")
    fuse(model)
    for module in (model.transformer.h[0].mlp.c_fc, model.transformer.h[1].mlp.c_proj):
        module.bias = nn.Parameter(torch.full_like(module.bias, 0.7))
    fused = step(model)
    unfuse(model)
    assert_equal_steps(fused, step(model))


def test_hooks_see_values() -> None:
    model = build("gpt2")
    fuse(model)
    seen = []
    model.transformer.h[0].mlp.register_forward_hook(lambda module, args, output: seen.append(output + 0))
    model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda module, args, output: seen.append(output * 1))
    fused = step(model)
    assert all(type(value) is Tensor for value in seen)
    values = list(seen)
    seen.clear()
    unfuse(model)
    assert_equal_steps(fused, step(model))
    assert all(error(a.detach(), b.detach()) <= LIMIT for a, b in zip(values, seen, strict=True))
