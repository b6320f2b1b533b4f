"""What all kernels have in common: light imports, one node in a graph, tiles, and where an op runs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from kernel_checks import evaluate, evaluate_far, random, run
from oslo_engine import kernels
from oslo_engine.kernels.bias_dropout_residual import bias_dropout_residual
from oslo_engine.kernels.bias_gelu import bias_gelu
from oslo_engine.kernels.cross_entropy import cross_entropy
from oslo_engine.kernels.dispatch import KernelInputError, rows_of, runs_triton
from oslo_engine.kernels.glu import swiglu
from oslo_engine.kernels.layer_norm import add_layer_norm
from oslo_engine.kernels.no_repeat_ngram import no_repeat_ngram
from oslo_engine.kernels.rms_norm import rms_norm
from oslo_engine.kernels.rotary import rotary
from oslo_engine.kernels.scale_mask_softmax import scale_mask_softmax

FOLDER = Path(kernels.__file__).parent
NAMES = sorted(file.stem for file in FOLDER.glob("*.py") if "custom_op(" in file.read_text())
# Every kernel, so that what needs no values of its own can be checked of all.
EVERY = """
import torch
from importlib import import_module
def use(name, *arguments):
    return getattr(import_module("oslo_engine.kernels." + name), name)(*arguments)
x = torch.ones(2, 4, requires_grad=True)
use("layer_norm", x).sum().backward()
use("rms_norm", x).sum().backward()
use("bias_gelu", x).sum().backward()
use("glu", x, x, "silu").sum().backward()
use("cross_entropy", x, torch.tensor([0, 1])).sum().backward()
use("rotary", x, x[:, :2].detach(), x[:, :2].detach()).sum().backward()
use("scale_mask_softmax", x[None, None]).sum().backward()
use("bias_dropout_residual", x, None, x).sum().backward()
use("no_repeat_ngram", x, torch.tensor([[0, 0], [1, 2]]), 2).sum()
"""


def test_every_kernel_is_listed_and_tested() -> None:
    assert len(NAMES) == 9
    for name in NAMES:
        assert f"\n    {name} " in kernels.__doc__
        assert (FOLDER / "gpu" / f"{name}.py").exists()
        assert (Path(__file__).parent / f"test_kernel_{name}.py").exists()
        assert f'"{name}"' in EVERY


def test_triton_is_needed_where_it_runs_only() -> None:
    """Importing does not import it, references run without it, and where it is wanted and missing an error says so."""
    code = f"""
import importlib.util, os, sys
import oslo_engine.kernels
for name in {NAMES}:
    importlib.import_module("oslo_engine.kernels." + name)
assert "triton" not in sys.modules
sys.modules["triton"] = None  # whoever imports it now fails
{EVERY}
os.environ["TRITON_INTERPRET"] = "1"
importlib.util.find_spec = lambda name: None
use("layer_norm", x)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=100)
    assert "MissingDependencyError: the kernels need Triton to run on a GPU" in found.stderr, found.stderr
    assert "pip install triton" in found.stderr


def block(x: Tensor, weight: Tensor, bias: Tensor, table: Tensor, seed: Tensor, target: Tensor) -> Tensor:
    """Most kernels, one after another."""
    y, summed = add_layer_norm(x, x * 2, weight, bias)
    y = swiglu(bias_gelu(y, bias), rms_norm(summed, weight))
    y = rotary(y, table, table)
    y = bias_dropout_residual(y, bias, summed, 0.5, True, seed)
    probabilities = scale_mask_softmax((y @ y.transpose(-1, -2)).unsqueeze(1), causal=True)
    return cross_entropy((probabilities.squeeze(1) @ y), target)


OPS_OF_BLOCK = [
    f"oslo_engine.{name}"
    for name in (
        "add_layer_norm",
        "bias_gelu",
        "rms_norm",
        "glu",
        "rotary",
        "bias_dropout_residual",
        "scale_mask_softmax",
        "cross_entropy",
    )
]


def block_inputs() -> tuple[Tensor, ...]:
    floats = [random(2, 3, 8), random(8, seed=1), random(8, seed=2), random(3, 4, seed=3, grad=False)]
    return *floats, torch.tensor(7), torch.ones(2, 3, dtype=torch.int64)


def test_compiled_graphs_hold_the_ops() -> None:
    seen: list[str] = []

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if "oslo_engine" in str(node.target))
        return torch._dynamo.backends.debugging.aot_eager(graph, inputs)

    inputs = block_inputs()
    leaves = inputs[:3]
    right = block(*inputs)
    found = torch.compile(block, backend=backend, fullgraph=True)(*inputs)
    torch.testing.assert_close(found, right)
    grads = [torch.autograd.grad(loss, leaves) for loss in (found, right)]
    torch.testing.assert_close(*grads)
    assert [name.removesuffix(".default") for name in seen] == OPS_OF_BLOCK


def test_traced_graphs_hold_one_node_per_op() -> None:
    class Block(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor, bias: Tensor, table: Tensor, seed: Tensor, target: Tensor) -> Tensor:
            return block(no_repeat_ngram(x, target, 2), weight, bias, table, seed, target)

    nodes = [str(node.target) for node in fx.symbolic_trace(Block()).graph.nodes]
    assert [name for name in nodes if "oslo_engine" in name] == ["oslo_engine.no_repeat_ngram", *OPS_OF_BLOCK]


def test_triton_serves_its_dtypes_on_the_interpreter_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not runs_triton(torch.ones(1))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    served = [
        dtype
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        if runs_triton(torch.ones(1, dtype=dtype))
    ]
    assert served == [torch.float32, torch.bfloat16, torch.float16]
    assert not runs_triton(torch.ones(1, device="meta"))


def test_rows_are_views_where_they_can_be() -> None:
    x = torch.arange(60).view(3, 4, 5)
    assert rows_of(x[:, :, 1:4]).data_ptr() == x[:, :, 1:4].data_ptr()
    assert rows_of(x.transpose(0, 1)).equal(x.transpose(0, 1).reshape(12, 5))
    assert rows_of(x.transpose(1, 2)).stride(-1) == 1
    assert rows_of(x.new_empty(3, 0)).shape == (3, 0)
    assert rows_of(x[0, 0]).shape == (1, 5)


FAR = {
    "layer_norm.layer_norm": [random(4, 8), random(8, seed=1), random(8, seed=2)],
    "layer_norm.add_layer_norm": [random(4, 8), random(4, 8, seed=1), random(8, seed=2)],
    "rms_norm.rms_norm": [random(4, 8), random(8, seed=1)],
    "rms_norm.add_rms_norm": [random(4, 8), random(4, 8, seed=1), random(8, seed=2)],
    "bias_gelu.bias_gelu": [random(4, 8), random(8, seed=1)],
    "glu.swiglu": [random(4, 8), random(4, 8, seed=1)],
    "cross_entropy.cross_entropy": [random(4, 8), torch.tensor([0, 2, 7, 3])],
    "rotary.rotary": [random(4, 8), random(4, 4, grad=False), random(4, 4, grad=False)],
    "scale_mask_softmax.scale_mask_softmax": [random(1, 1, 4, 8), None, None, None, None, 1.0, False, 2.0],
    "bias_dropout_residual.bias_dropout_residual": [random(4, 8), None, None, 0.5, True, torch.tensor(3)],
}


@pytest.mark.parametrize("name", FAR)
def test_rows_may_lie_far_apart(name: str) -> None:
    """As in tensors of more than 2^31 elements."""
    near, far = (run("interpreter", function, name, FAR[name]) for function in (evaluate, evaluate_far))
    torch.testing.assert_close(far, near)


@pytest.mark.parametrize("name", [name for name in FAR if name != "rotary.rotary"])  # which is its own gradient
def test_second_derivatives_are_refused(name: str) -> None:
    module, function = name.split(".")
    output = getattr(import_module(f"oslo_engine.kernels.{module}"), function)(*FAR[name])
    output = output[0] if isinstance(output, tuple) else output
    (grad,) = torch.autograd.grad(output.square().sum(), FAR[name][0], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        grad.sum().backward()


class Recorder:
    """In place of a Triton program."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.fn = type("program", (), {})

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *_, **__: self.grids.append(grid)


def test_rows_lie_on_the_axis_that_is_long_enough() -> None:
    launch = pytest.importorskip("oslo_engine.kernels.gpu.launch", reason="needs triton")
    recorder = Recorder()
    launch.launch(recorder, (70_000, 65_535), torch.ones(1))
    launch.launch(recorder, (0, 3), torch.ones(1))
    assert recorder.grids == [(70_000, 65_535)]
    with pytest.raises(KernelInputError, match="too many columns"):
        launch.launch(recorder, (1, 65_536), torch.ones(1))


def test_tiles_are_powers_of_two_that_cover_a_row_or_say_so() -> None:
    launch = pytest.importorskip("oslo_engine.kernels.gpu.launch", reason="needs triton")
    for length in (0, 1, 3, 64, 1000, 8192, 8193, 10**6):
        for tile in (launch.row_tile(length), launch.plain_tile(length), launch.plain_tile(length, rows=4, longest=256)):
            assert tile.whole == (tile.columns >= length)
            assert all(size & (size - 1) == 0 for size in (tile.rows, tile.columns, tile.warps))
            assert 1 <= tile.warps <= 16
            assert tile.rows * tile.columns <= 8192
    assert launch.row_tile(8192).whole
    assert not launch.row_tile(8193).whole
