"""Runs a model stage by stage in one process, to prove a data flow right.

Everything a stage should not need is poisoned with NaN: tensors it is not said to read, the answers of dead modules, and block
results that are not carried. If the last stage's output equals the unsplit model's, nothing was missing.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from oslo_engine.rewrite.dataflow import Call, DataFlow
from oslo_engine.rewrite.structure import Path, Structure, TensorSlot, arguments_of, at, rebuild, walk
from oslo_engine.rewrite.values import Value


class StageDone(Exception):
    """The last own block of a stage has run."""


def run_stages(model: nn.Module, flow: DataFlow, inputs: Mapping[str, Any]) -> Any:
    """The last stage's output; every stage gets nothing from the one before but what ``flow.carried`` names."""
    received: dict[Value, Tensor] = {}
    output = None
    for stage in range(flow.num_stages):
        run = _StageRun(model, flow, stage, received)
        output = run(inputs)
        received = run.sent
    return output


class _StageRun:
    def __init__(self, model: nn.Module, flow: DataFlow, stage: int, received: Mapping[Value, Tensor]) -> None:
        assert set(received) == set(flow.carried[stage])
        self.model, self.flow, self.stage = model, flow, stage
        self.known = dict(received)
        self.is_last = stage == flow.num_stages - 1
        self.last_own = max(number for number, of in enumerate(flow.stage_of_call) if of == stage)
        self.counts: Counter[str] = Counter()
        self.sent: dict[Value, Tensor] = {}

    def __call__(self, inputs: Mapping[str, Any]) -> Any:
        output = None
        with self._poisoned_tensors(), self._wrapped_forwards(), contextlib.suppress(StageDone):
            output = self.model(**inputs)
        if not self.is_last:
            self.sent = {value: self.known[value] for value in self.flow.carried[self.stage + 1]}
        return output

    @contextlib.contextmanager
    def _poisoned_tensors(self) -> Iterator[None]:
        blocks = tuple(f"{block}." for block in self.flow.blocks_of_stage[self.stage])
        kept = {*self.flow.live_parameters[self.stage], *self.flow.live_buffers[self.stage]}
        named = [*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers(remove_duplicate=False)]
        needed = {id(tensor) for name, tensor in named if name in kept or name.startswith(blocks)}
        poisoned = {id(tensor): tensor for _, tensor in named if id(tensor) not in needed and tensor.is_floating_point()}
        values = {key: tensor.detach().clone() for key, tensor in poisoned.items()}
        with torch.no_grad():
            for tensor in poisoned.values():
                tensor.fill_(torch.nan)
        try:
            yield
        finally:
            with torch.no_grad():
                for key, tensor in poisoned.items():
                    tensor.copy_(values[key])

    @contextlib.contextmanager
    def _wrapped_forwards(self) -> Iterator[None]:
        modules = {name: self.model.get_submodule(name) for name in {call.block for call in self.flow.calls}}
        modules |= {name: self.model.get_submodule(name) for name in self.flow.dead_modules[self.stage]}
        for name, module in modules.items():
            is_block = any(call.block == name for call in self.flow.calls)
            module.forward = self._block(name, module.forward) if is_block else self._dead(module.forward)
        try:
            yield
        finally:
            for module in modules.values():
                del module.forward

    def _dead(self, forward: Any) -> Any:
        return lambda *args, **kwargs: pytree.tree_map(_poison, forward(*args, **kwargs))

    def _block(self, name: str, forward: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            number = self.flow.calls.index(Call(name, self.counts[name]))
            self.counts[name] += 1
            if self.flow.stage_of_call[number] < self.stage:
                return self._stand_in(number, arguments_of(args, kwargs))
            assert self.flow.stage_of_call[number] == self.stage, "a stage ends with its last own block"
            output = forward(*args, **kwargs)
            self._keep(number, output, arguments_of(args, kwargs))
            if number == self.last_own and not self.is_last:
                raise StageDone
            return output

        return call

    def _keep(self, number: int, output: Any, arguments: Mapping[str, Any]) -> None:
        for value in () if self.is_last else self.flow.carried[self.stage + 1]:
            if value.call == number:
                self.known[value] = at(arguments if value.written else output, value.path)

    def _stand_in(self, number: int, arguments: Mapping[str, Any]) -> Any:
        like = next(leaf for _, leaf in walk(arguments) if isinstance(leaf, Tensor))

        def filled(structure: Structure, prefix: Path, written: bool) -> Any:
            def tensor_at(path: Path, slot: TensorSlot) -> Tensor:
                carried = self.known.get(Value(number, (*prefix, *path), written))
                shape = like.shape if like.ndim == slot.ndim else (1,) * slot.ndim
                return torch.full(shape, torch.nan) if carried is None else carried

            return rebuild(structure, tensor_at, arguments)

        for entry in self.flow.written[number]:
            at(arguments, entry.path)[entry.key] = filled(entry.value, (*entry.path, entry.key), written=True)
        return filled(self.flow.outputs[number], (), written=False)


def _poison(leaf: Any) -> Any:
    return torch.full_like(leaf, torch.nan) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
