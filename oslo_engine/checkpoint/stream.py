"""Copying tensors, or slices of them, from a checkpoint into new files, a few megabytes at a time.

While one buffer is hashed, the next one is read and written, so a copy takes about as long as reading and writing, or hashing,
whichever is slower; and not even one tensor is in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from oslo_engine.checkpoint.ranges import TensorSpec
from oslo_engine.checkpoint.safetensors_io import SafetensorsWriter, as_bytes, runs_of_bytes
from oslo_engine.checkpoint.tensors import TensorSource
from oslo_engine.shards import Span

BUFFER_BYTES = 1 << 23


@dataclass(frozen=True)
class Target:
    """A file that gets the concatenation of ``spans`` along ``dim`` of a tensor; of a tensor without dimensions all of it."""

    writer: SafetensorsWriter
    dim: int
    spans: Sequence[Span]


def whole_into(writer: SafetensorsWriter, spec: TensorSpec) -> Target:
    return Target(writer, 0, ((0, spec.shape[0] if spec.shape else 1),))


class Copier:
    """Copies tensors of one source one after another.

    Args:
        written: is told after every step how many bytes were written; what it raises ends the copy.
    """

    def __init__(self, source: TensorSource, written: Callable[[int], None]) -> None:
        self._source, self._written = source, written
        self._buffers = [_Buffer(), _Buffer()]

    def copy(self, name: str, targets: Sequence[Target]) -> None:
        """Append a tensor to files. All targets have the same ``dim``."""
        if not targets:
            return
        spec = self._source.spec(name)
        if targets[0].dim:
            self._copy_rows(name, spec, (0, spec.shape[0]), lambda rows: _columns(rows, targets))
            return
        for target in targets:
            for span in target.spans:
                self._copy_rows(name, spec, span, partial(_all_rows, target.writer))

    def copy_whole(self, tensor: Tensor, targets: Sequence[Target]) -> None:
        """The same for a tensor that is in memory."""
        for target in targets:
            for view in runs_of_bytes(tensor.contiguous(), target.dim, target.spans) if tensor.ndim else [as_bytes(tensor)]:
                _wait(target.writer.write(view))
                self._written(len(view))

    def _copy_rows(
        self,
        name: str,
        spec: TensorSpec,
        span: Span,
        split: Callable[[Tensor], Sequence[tuple[SafetensorsWriter, memoryview]]],
    ) -> None:
        row_bytes = max(1, math.prod(spec.shape[1:]) * spec.dtype.itemsize)
        step = max(1, BUFFER_BYTES // row_bytes)
        for start in range(*span, step):
            stop = min(start + step, span[1])
            buffer = self._buffers[0].free()
            rows = buffer.hold(TensorSpec(spec.dtype, (stop - start, *spec.shape[1:]) if spec.shape else ()))
            self._source.read_into(name, rows, 0, [(start, stop, 0)])
            for writer, view in split(rows):
                buffer.pending.append(writer.write(view))
                self._written(len(view))
            if row_bytes <= BUFFER_BYTES:  # of larger ones there is only one, lest two be as large as the tensor
                self._buffers.reverse()


class _Buffer:
    """Memory that is read into again and again, once all that was in it is hashed."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.pending: list[Future[None] | None] = []

    def free(self) -> _Buffer:
        for hashed in self.pending:
            _wait(hashed)
        self.pending.clear()
        return self

    def hold(self, spec: TensorSpec) -> Tensor:
        """Memory for a tensor."""
        if self._memory.numel() < spec.num_bytes or self._memory.numel() > max(BUFFER_BYTES, spec.num_bytes):
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = torch.empty(max(BUFFER_BYTES, spec.num_bytes), dtype=torch.uint8)
        return self._memory[: spec.num_bytes].view(spec.dtype).view(spec.shape)


def _all_rows(writer: SafetensorsWriter, rows: Tensor) -> list[tuple[SafetensorsWriter, memoryview]]:
    return [(writer, as_bytes(rows))]


def _columns(rows: Tensor, targets: Sequence[Target]) -> list[tuple[SafetensorsWriter, memoryview]]:
    views = []
    for target in targets:
        pieces = [rows.narrow(target.dim, start, stop - start) for start, stop in target.spans]
        views.append((target.writer, as_bytes(torch.cat(pieces, target.dim) if len(pieces) > 1 else pieces[0])))
    return views


def _wait(hashed: Future[None] | None) -> None:
    if hashed is not None:
        hashed.result()
