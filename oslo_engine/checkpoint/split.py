"""Reading a split checkpoint at any other tp and pp."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from oslo_engine.checkpoint.atomic import MANIFEST
from oslo_engine.checkpoint.checksums import check_unaltered
from oslo_engine.checkpoint.layout import Layout, TensorLayout, read_layout
from oslo_engine.checkpoint.ranges import Piece, TensorSpec
from oslo_engine.checkpoint.tensors import PickledSource, SafetensorsSource, TensorSource
from oslo_engine.errors import CheckpointError
from oslo_engine.shards import Span


class SplitSource(TensorSource):
    """The whole tensors of a split checkpoint, put together from slices of the ranks' files, which are opened when first read.

    Raises:
        CheckpointError: ``layout.json`` is damaged; a file is missing, left over, or has another size than when it was saved.
    """

    native = True

    def __init__(self, folder: Path, manifest: str = MANIFEST) -> None:
        self.folder, self._manifest = folder, manifest
        self.layout: Layout = read_layout(folder / manifest)
        self._tensors: dict[str, TensorLayout] = {alias: tensor for tensor in self.layout.tensors for alias in tensor.aliases}
        self._files: dict[str, TensorSource] = {}
        self._check_files()

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def spec(self, name: str) -> TensorSpec:
        return self._tensors[name].spec

    def identity(self, name: str) -> object:
        return self._tensors[name].name

    def read_into(self, name: str, out: Tensor, dim: int, pieces: Sequence[Piece]) -> None:
        tensor = self._tensors[name]
        if tensor.shard is None:
            self._file_of(tensor, 0).read_into(tensor.name, out, dim, pieces)
        elif dim == tensor.shard.dim:
            for tp_rank, overlaps in self._overlaps(tensor, pieces):
                self._file_of(tensor, tp_rank).read_into(tensor.name, out, dim, overlaps)
        else:  # cut in both dimensions: the file gives one cut, memory the other
            cut = tensor.shard.dim
            spans, size = [(start, stop) for start, stop, _ in pieces], tensor.shard.size
            for tp_rank, overlaps in self._overlaps(tensor, [(0, size, 0)]):
                part = self._file_of(tensor, tp_rank).read(tensor.name, dim, spans)
                for start, stop, at in overlaps:
                    taken, done = part.narrow(cut, start, stop - start), 0
                    for first, last, to in pieces:
                        num = last - first
                        out.narrow(cut, at, stop - start).narrow(dim, to, num).copy_(taken.narrow(dim, done, num))
                        done += num

    def verify(self, part: int = 0, parts: int = 1, *, thorough: bool = False) -> None:
        for name in self.layout.file_names()[part::parts]:
            check_unaltered(self.folder / name, self.layout.files[name], "a file of the checkpoint", thorough=thorough)

    def open_all(self) -> None:
        """Open every file now, which compares its header with the layout."""
        for pp_rank in range(self.layout.pp):
            for tp_rank in range(self.layout.tp):
                self._file(tp_rank, pp_rank)

    def check_configs(self) -> None:
        """That the configs that were saved with it are still there; they may have been edited.

        Raises:
            CheckpointError: one is missing.
        """
        for name in self.layout.configs:
            if not (path := self.folder / name).is_file():
                raise CheckpointError(
                    "a config is missing",
                    where=str(path),
                    expected=f"listed in {self._manifest}",
                    hint="copy it again; without it what is written could not be loaded",
                )

    @staticmethod
    def _overlaps(tensor: TensorLayout, wanted: Sequence[Piece]) -> Iterator[tuple[int, list[Piece]]]:
        """For each tp rank whose file is needed: (start and stop in the file, where it goes in the result)."""
        assert tensor.shard is not None
        taken: set[Span] = set()
        for tp_rank in tensor.tp_ranks_stored():
            pieces: list[Piece] = []
            local = 0
            for start, stop in tensor.shard.spans[tp_rank]:
                for first, last, at in wanted if (start, stop) not in taken else ():
                    low, high = max(first, start), min(last, stop)
                    if low < high:
                        pieces.append((local + low - start, local + high - start, at + low - first))
                taken.add((start, stop))
                local += stop - start
            if pieces:
                yield tp_rank, pieces

    def _file_of(self, tensor: TensorLayout, tp_rank: int) -> TensorSource:
        return self._file(tp_rank, tensor.pp_ranks[0])

    def _file(self, tp_rank: int, pp_rank: int) -> TensorSource:
        name = self.layout.file_name(tp_rank, pp_rank)
        if name not in self._files:
            path = self.folder / name
            kind = SafetensorsSource if self.layout.serialization == "safetensors" else PickledSource
            file: TensorSource = kind([path])
            names, listed = set(file.names()), self.layout.stored_in(tp_rank, pp_rank)
            for stored in listed:
                spec = file.spec(stored.name) if stored.name in names else None
                if spec != stored.local_spec(tp_rank):
                    raise CheckpointError(
                        f"a file does not have {stored.name!r} as the layout says",
                        where=str(path),
                        expected=str(stored.local_spec(tp_rank)),
                        got=str(spec),
                    )
            if unknown := sorted(names - {stored.name for stored in listed}):
                raise CheckpointError(
                    f"a file has {unknown[0]!r}, which is not listed for it",
                    where=str(path),
                    expected=f"the {len(listed)} tensors that {self._manifest} lists for it",
                    got=f"{len(names)} tensors",
                    hint="copy the checkpoint again",
                )
            self._files[name] = file
        return self._files[name]

    def _check_files(self) -> None:
        for name, record in self.layout.files.items():
            path = self.folder / name
            if not path.is_file():
                raise CheckpointError(
                    "a file of the split checkpoint is missing", where=str(path), expected=f"listed in {self._manifest}"
                )
            if path.stat().st_size != record.size_bytes:
                raise CheckpointError(
                    "a file of the split checkpoint has the wrong size",
                    where=str(path),
                    expected=f"{record.size_bytes} bytes",
                    got=f"{path.stat().st_size} bytes",
                    hint="copy the checkpoint again",
                )
        for path in self.folder.glob(f"*{self.layout.stem}_tp=*_pp=*"):
            if path.suffix in (".safetensors", ".bin") and path.name not in self.layout.files:
                raise CheckpointError(
                    "a file does not belong to this split checkpoint",
                    where=str(path),
                    expected=f"the {len(self.layout.files)} files in {self._manifest}: tp={self.layout.tp} pp={self.layout.pp}",
                    hint="delete it, or copy the checkpoint again",
                )
