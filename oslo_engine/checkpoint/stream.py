"""Copying tensors, or slices of them, from a checkpoint into new files, a few megabytes at a time.

While buffers are hashed, each file's by a thread of its own, the next one is read and written: files that are written side by
side get their parts in turn. Not even one tensor is in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from oslo_engine.checkpoint.ranges import TensorSpec, consecutive
from oslo_engine.checkpoint.safetensors_io import SafetensorsWriter, as_bytes
from oslo_engine.checkpoint.tensors import TensorSource
from oslo_engine.shards import Span

BUFFER_BYTES = 1 << 21
NUM_BUFFERS = 8


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

    Nothing is allocated meanwhile but its buffers: of memory that several threads take and let go, a few megabytes at a time,
    much may stay with the process.

    Args:
        written: is told after every step how many bytes were written; what it raises ends the copy.
    """

    def __init__(self, source: TensorSource, written: Callable[[int], None]) -> None:
        self._source, self._written = source, written
        self._rows = _Buffer()  # of which columns are taken
        self._outgoing = [_Buffer() for _ in range(NUM_BUFFERS)]  # some are hashed while another one is filled

    def copy(self, name: str, targets: Sequence[Target]) -> None:
        """Append a tensor to files. All targets have the same ``dim``."""
        for buffer in (self._rows, *self._outgoing):
            buffer.shrink()
        if not targets:
            return
        spec = self._source.spec(name)
        if targets[0].dim:
            for start, stop in _blocks(spec, (0, spec.shape[0])):
                self._write_columns(self._read(name, start, stop, self._rows), targets)
            return
        blocks_of = [[block for span in target.spans for block in _blocks(spec, span)] for target in targets]
        for blocks in zip_longest(*blocks_of):
            for target, block in zip(targets, blocks, strict=True):
                if block is not None:
                    start, stop = block
                    buffer = self._take_buffer(num_bytes=(stop - start) * _row_bytes(spec))
                    self._write(target.writer, as_bytes(self._read(name, start, stop, buffer)), buffer)

    def copy_whole(self, tensor: Tensor, targets: Sequence[Target]) -> None:
        """The same for a tensor that is in memory."""
        tensor, own = tensor.detach().cpu().contiguous(), _Buffer()
        spec = TensorSpec(tensor.dtype, tuple(tensor.shape))
        for target in targets:
            for start, stop in _blocks(spec, (0, spec.shape[0])) if target.dim else ():
                self._write_columns(tensor[start:stop], [target])
            for start, stop in () if target.dim else target.spans:
                self._write(target.writer, as_bytes(tensor[start:stop] if tensor.ndim else tensor), own)
        own.free()

    def _read(self, name: str, start: int, stop: int, buffer: _Buffer) -> Tensor:
        spec = self._source.spec(name)
        rows = buffer.hold(TensorSpec(spec.dtype, (stop - start, *spec.shape[1:]) if spec.shape else ()))
        self._source.read_into(name, rows, 0, [(start, stop, 0)])
        return rows

    def _write_columns(self, rows: Tensor, targets: Sequence[Target]) -> None:
        """Append to each target its columns of some rows: of all targets together if they fit into a buffer."""
        dim = targets[0].dim
        item_bytes = math.prod(rows.shape[dim + 1 :]) * rows.dtype.itemsize
        lines = rows.reshape(-1).view(torch.uint8).view(math.prod(rows.shape[:dim]), -1)
        buffer, used = self._take_buffer(num_bytes=rows.nbytes), 0
        for target in targets:
            runs, width = consecutive([(start * item_bytes, stop * item_bytes) for start, stop in target.spans])
            if used and used + len(lines) * width > BUFFER_BYTES:
                buffer, used = self._take_buffer(num_bytes=rows.nbytes), 0
            columns = buffer.hold(TensorSpec(torch.uint8, (len(lines), width)), at=used)
            for start, stop, at in runs:
                columns[:, at : at + stop - start] = lines[:, start:stop]
            self._write(target.writer, as_bytes(columns), buffer)
            used += columns.nbytes

    def _take_buffer(self, *, num_bytes: int) -> _Buffer:
        """The one that waited longest; for more than fits into one always the same, lest two be as large as a tensor."""
        buffer = self._outgoing[0].free()
        if num_bytes <= BUFFER_BYTES:
            self._outgoing.append(self._outgoing.pop(0))
        return buffer

    def _write(self, writer: SafetensorsWriter, view: memoryview, buffer: _Buffer) -> None:
        buffer.pending.append(writer.write(view))
        self._written(len(view))


class _Buffer:
    """Memory that is used again and again, once all that was in it is hashed."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.pending: list[Future[None] | None] = []

    def free(self) -> _Buffer:
        for hashed in self.pending:
            if hashed is not None:
                hashed.result()
        self.pending.clear()
        return self

    def shrink(self) -> None:
        """Give back what one large row needed."""
        if self._memory.numel() > BUFFER_BYTES:
            self.free()._memory = torch.empty(0, dtype=torch.uint8)

    def hold(self, spec: TensorSpec, at: int = 0) -> Tensor:
        """Memory for a tensor, from byte ``at`` on; other than 0 only where it fits."""
        if self._memory.numel() < at + spec.num_bytes:
            assert not at
            self._memory = torch.empty(0, dtype=torch.uint8)  # before the new one is there
            self._memory = torch.empty(max(BUFFER_BYTES, spec.num_bytes), dtype=torch.uint8)
        return self._memory[at : at + spec.num_bytes].view(spec.dtype).view(spec.shape)


def _row_bytes(spec: TensorSpec) -> int:
    return max(1, math.prod(spec.shape[1:]) * spec.dtype.itemsize)


def _blocks(spec: TensorSpec, span: Span) -> Iterator[Span]:
    """Rows that fit into a buffer together, at least one."""
    step = max(1, BUFFER_BYTES // _row_bytes(spec))
    for start in range(*span, step):
        yield start, min(start + step, span[1])
