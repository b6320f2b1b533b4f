"""Reading a split checkpoint at any other tp and pp."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from oslo_engine.checkpoint.atomic import MANIFEST
from oslo_engine.checkpoint.layout import Layout, TensorLayout, read_layout
from oslo_engine.checkpoint.safetensors_io import TensorSpec, record_of
from oslo_engine.checkpoint.tensors import PickledSource, SafetensorsSource, TensorSource
from oslo_engine.errors import CheckpointError
from oslo_engine.shards import Span


class SplitSource(TensorSource):
    """The whole tensors of a split checkpoint, put together from slices of the ranks' files, which are opened when first read.

    Raises:
        CheckpointError: ``layout.json`` is damaged; a file is missing, left over, or has another size than when it was saved.
    """

    native = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.layout: Layout = read_layout(folder / MANIFEST)
        self._tensors: dict[str, TensorLayout] = {alias: tensor for tensor in self.layout.tensors for alias in tensor.aliases}
        self._files: dict[str, TensorSource] = {}
        self._check_files()

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def spec(self, name: str) -> TensorSpec:
        return self._tensors[name].spec

    def identity(self, name: str) -> object:
        return self._tensors[name].name

    def read(self, name: str, dim: int | None = None, spans: Sequence[Span] | None = None) -> Tensor:
        tensor = self._tensors[name]
        if tensor.shard is None:
            return self._file(tensor, 0).read(tensor.name, dim, spans)
        cut = tensor.shard.dim
        across = None if dim is None or spans is None or dim == cut else (dim, spans)
        wanted = [(0, tensor.shard.size)] if spans is None or dim != cut else spans
        shape = _result_shape(tensor.shape, cut, wanted)
        out = torch.empty(_result_shape(shape, *across) if across else shape, dtype=tensor.dtype)
        for tp_rank, pairs in self._overlaps(tensor, wanted):
            file, at_part = self._file(tensor, tp_rank), 0
            # Cut in both dimensions: the file gives one cut, memory the other.
            part = file.read(tensor.name, *across) if across else file.read(tensor.name, cut, [local for local, _ in pairs])
            for (start, stop), at in pairs:
                piece = part.narrow(cut, start if across else at_part, stop - start)
                out.narrow(cut, at, stop - start).copy_(piece)
                at_part += stop - start
        return out

    def verify(self, part: int = 0, parts: int = 1) -> None:
        for name in self.layout.file_names()[part::parts]:
            record = record_of(self.folder / name)
            if record != self.layout.files[name]:
                raise CheckpointError(
                    "a file of the checkpoint was altered after it was saved",
                    where=str(self.folder / name),
                    expected=f"sha256 {self.layout.files[name].sha256}",
                    got=record.sha256,
                    hint="copy the checkpoint again",
                )

    @staticmethod
    def _overlaps(tensor: TensorLayout, wanted: Sequence[Span]) -> Iterator[tuple[int, list[tuple[Span, int]]]]:
        """For each tp rank whose file is needed: (span in the file, where it goes in the result)."""
        assert tensor.shard is not None
        taken: set[Span] = set()
        for tp_rank in tensor.tp_ranks_stored():
            pairs: list[tuple[Span, int]] = []
            local = 0
            for start, stop in tensor.shard.spans[tp_rank]:
                at = 0
                for first, last in wanted if (start, stop) not in taken else ():
                    low, high = max(first, start), min(last, stop)
                    if low < high:
                        pairs.append(((local + low - start, local + high - start), at + low - first))
                    at += last - first
                taken.add((start, stop))
                local += stop - start
            if pairs:
                yield tp_rank, pairs

    def _file(self, tensor: TensorLayout, tp_rank: int) -> TensorSource:
        name = self.layout.file_name(tp_rank, tensor.pp_ranks[0])
        if name not in self._files:
            path = self.folder / name
            kind = SafetensorsSource if self.layout.serialization == "safetensors" else PickledSource
            file: TensorSource = kind([path])
            names = set(file.names())
            for stored in self.layout.stored_in(tp_rank, tensor.pp_ranks[0]):
                spec = file.spec(stored.name) if stored.name in names else None
                if spec != stored.local_spec(tp_rank):
                    raise CheckpointError(
                        f"a file does not have {stored.name!r} as the layout says",
                        where=str(path),
                        expected=str(stored.local_spec(tp_rank)),
                        got=str(spec),
                    )
            self._files[name] = file
        return self._files[name]

    def _check_files(self) -> None:
        for name, record in self.layout.files.items():
            path = self.folder / name
            if not path.is_file():
                raise CheckpointError(
                    "a file of the split checkpoint is missing", where=str(path), expected=f"listed in {MANIFEST}"
                )
            if path.stat().st_size != record.size_bytes:
                raise CheckpointError(
                    "a file of the split checkpoint has the wrong size",
                    where=str(path),
                    expected=f"{record.size_bytes} bytes",
                    got=f"{path.stat().st_size} bytes",
                    hint="copy the checkpoint again",
                )
        for path in self.folder.glob("*_tp=*_pp=*"):
            if path.suffix in (".safetensors", ".bin") and path.name not in self.layout.files:
                raise CheckpointError(
                    "a file does not belong to this split checkpoint",
                    where=str(path),
                    expected=f"the {len(self.layout.files)} files of {MANIFEST}: tp={self.layout.tp}, pp={self.layout.pp}",
                    hint="delete it, or copy the checkpoint again",
                )


def _result_shape(shape: Sequence[int], dim: int, spans: Sequence[Span]) -> tuple[int, ...]:
    return (*shape[:dim], sum(stop - start for start, stop in spans), *shape[dim + 1 :])
