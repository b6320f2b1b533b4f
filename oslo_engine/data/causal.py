"""Windows of a data set, as batches for causal language models are made of."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from oslo_engine.data.index_cache import Arrays, cached_arrays, content_key
from oslo_engine.data.indexed import IndexedDataset
from oslo_engine.data.windows import BestFit, Contiguous, Layout, Piece, Shuffled, best_fit_arrays, shuffled_arrays
from oslo_engine.errors import DataError

IGNORED = -100  # label of what is not to be predicted
BORDERS = ("position_ids", "document_ids", "cu_seqlens")
ARRANGEMENTS = ("contiguous", "shuffled", "best_fit")
TAILS = ("drop", "pad", "keep")
_WORTH_CACHING = 1 << 16  # documents


class DatasetForCausalLM(Dataset[dict[str, torch.Tensor]]):
    """Documents of a data set, cut into windows of ``max_seq_length`` tokens.

    An item has ``input_ids`` and ``labels`` (the same: Transformers' models shift them), i64[max_seq_length], and, where
    windows are padded, ``attention_mask``. Every token is in exactly one window, but for what the tail drops.

    Args:
        data_name: common name of the ``.bin`` and ``.idx`` files.
        max_seq_length: tokens of a window.
        split_type: a name for this part of the documents; train and valid are shuffled in orders of their own.
        start_weight: where the part begins, as a share of all documents.
        end_weight: where it ends. A document belongs to one part only.
        binarization_impl: ``mmap``, ``lazy`` or ``cached``.
        seed: of the order of documents.
        documents: (first, behind the last) instead of weights.
        arrangement: ``contiguous``: documents as they lie in the file; the order of windows is the sampler's matter.
            ``shuffled``: documents in a random order, another one in each epoch (``set_epoch``), before windows are cut.
            ``best_fit``: documents whole, as many as fit into a window, padded; only longer ones are cut.
        tail: of the last window if it is not full: ``drop``, ``pad`` or ``keep`` it shorter. With ``best_fit``, ``pad``.
        pad_token_id: where windows are padded.
        borders: what an item says about borders of documents: ``position_ids`` that begin anew with each, i64;
            ``document_ids``, i64 (-1 for padding); ``cu_seqlens``, i32[documents in the window + 1]. With any of these, the
            first token of a document is not predicted from the one before it.
        cache_dir: for what is computed for large data sets; by default a hidden folder beside the data.

    Raises:
        DataError: the files are damaged, an argument is wrong, or there is not one window.
    """

    def __init__(
        self,
        data_name: str | os.PathLike[str],
        max_seq_length: int,
        split_type: str = "train",
        start_weight: float = 0.0,
        end_weight: float = 1.0,
        binarization_impl: str = "mmap",
        seed: int = 0,
        *,
        documents: tuple[int, int] | None = None,
        arrangement: str = "contiguous",
        tail: str | None = None,
        pad_token_id: int | None = None,
        borders: Collection[str] = (),
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.data = IndexedDataset(data_name, binarization_impl)
        self.max_seq_length, self.split_type, self.seed = max_seq_length, split_type, seed
        self.arrangement = arrangement
        self.tail = tail or ("pad" if arrangement == "best_fit" else "drop")
        self.pad_token_id, self.borders = pad_token_id, frozenset(borders)
        self._check(borders)
        self._range = self._documents(start_weight, end_weight, documents)
        prefix = self.data.prefix
        self._cache = prefix.with_name(f".{prefix.name}.cache") if cache_dir is None else Path(cache_dir)
        # In shared memory: workers of a DataLoader that persist see the epoch change.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._layout: tuple[int, Layout] | None = None
        self._pads = self.tail == "pad"
        self._length = self._num_windows(start_weight, end_weight)

    def _check(self, borders: Collection[str]) -> None:
        for name, value, known in (("arrangement", self.arrangement, ARRANGEMENTS), ("tail", self.tail, TAILS)):
            if value not in known:
                raise DataError(f"no such {name}", expected=f"one of {', '.join(known)}", got=repr(value))
        if isinstance(borders, str) or not self.borders <= set(BORDERS):
            raise DataError("no such mark of borders", expected=f"some of {', '.join(BORDERS)}", got=borders)
        if self.max_seq_length < 1:
            raise DataError("max_seq_length must be positive", got=self.max_seq_length)
        if self.arrangement == "best_fit" and self.tail != "pad":
            raise DataError("windows that documents are fitted into are padded", expected="tail='pad'", got=repr(self.tail))
        if (self.tail == "pad") != (self.pad_token_id is not None):
            raise DataError(
                "pad_token_id goes with windows that are padded, and they need it",
                expected="pad_token_id with tail='pad' or arrangement='best_fit', and only then",
                got=f"pad_token_id={self.pad_token_id}, tail={self.tail!r}",
            )

    def _documents(self, start: float, end: float, documents: tuple[int, int] | None) -> tuple[int, int]:
        count = self.data.num_documents
        if documents is None:
            if not 0 <= start < end <= 1:
                raise DataError(
                    "a part of a data set must begin before it ends",
                    expected="0 <= start_weight < end_weight <= 1",
                    got=f"{start} to {end}",
                )
            return round(start * count), round(end * count)
        if (start, end) != (0.0, 1.0):
            raise DataError("a part is given by weights or by documents", expected="one of the two", got=f"{start}, {end}")
        first, stop = documents
        if not 0 <= first < stop <= count:
            raise DataError("there are no such documents", expected=f"0 <= first < stop <= {count}", got=f"{first} to {stop}")
        return first, stop

    def _num_windows(self, start: float, end: float) -> int:
        first, stop = self._range
        bounds = self.data.document_bounds
        self._bounds: NDArray[np.int64] = bounds[first : stop + 1]
        num_tokens = int(self._bounds[-1] - self._bounds[0])
        whole = self.max_seq_length if self.tail == "drop" else 1
        if num_tokens < whole:
            raise DataError(
                "a part of a data set has not one window",
                where=f"{self.data.prefix}, {self.split_type}, documents {first} to {stop} of {self.data.num_documents}",
                expected=f"at least {whole} tokens",
                got=f"{num_tokens}",
                hint="take a larger part, or a smaller max_seq_length; tail='pad' and tail='keep' use what is there",
            )
        if self.tail == "drop":
            return num_tokens // self.max_seq_length
        return len(self._current())

    def set_epoch(self, epoch: int) -> None:
        """Of ``arrangement="shuffled"``: the order of documents is another one in each epoch."""
        self._epoch[0] = epoch

    @property
    def num_tokens(self) -> int:
        return int(self._bounds[-1] - self._bounds[0])

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": int(self._epoch), "windows": len(self), "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises DataError where the state is that of other windows."""
        expected = {name: state.get(name) for name in ("windows", "seed")}
        if expected != {"windows": len(self), "seed": self.seed}:
            raise DataError("a state of other windows", expected=expected, got=f"{len(self)} windows, seed {self.seed}")
        self.set_epoch(state["epoch"])

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, window: int) -> dict[str, torch.Tensor]:
        if not -self._length <= window < self._length:
            raise IndexError(f"window {window} of {self._length}")
        pieces = self._current().pieces(window % self._length, bool(self.borders))
        if len(pieces) == 1 and not self._pads and not self.borders:
            input_ids = torch.from_numpy(self.data.read(*pieces[0]).astype(np.int64))
            return {"input_ids": input_ids, "labels": input_ids.clone()}
        return self._item(pieces)

    def _item(self, pieces: list[Piece]) -> dict[str, torch.Tensor]:
        used = sum(stop - start for start, stop in pieces)
        size = self.max_seq_length if self._pads else used
        tokens = np.empty(size, np.int64)
        begins, at = [], 0
        for start, stop in pieces:
            begins.append(at)
            tokens[at : at + stop - start] = self.data.read(start, stop)
            at += stop - start
        labels = tokens
        if self.pad_token_id is not None:
            tokens[used:] = self.pad_token_id
        if self._pads or self.borders:
            labels = tokens.copy()
            labels[used:] = IGNORED
            if self.borders:
                labels[begins[1:]] = IGNORED
        item = {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        if labels is tokens:
            item["labels"] = item["input_ids"].clone()
        if self._pads:
            item["attention_mask"] = (torch.arange(size) < used).long()
        if self.borders:
            item |= self._marks(begins, used, size)
        return item

    def _marks(self, begins: list[int], used: int, size: int) -> dict[str, torch.Tensor]:
        """Padding counts as a document of its own, number -1."""
        ends = [*begins, used, size] if used < size else [*begins, size]
        lengths = np.diff(ends)
        marks: dict[str, NDArray[Any]] = {}
        if "position_ids" in self.borders:
            marks["position_ids"] = np.arange(size) - np.repeat(ends[:-1], lengths)
        if "document_ids" in self.borders:
            numbers = np.arange(len(lengths))
            if used < size:
                numbers[-1] = -1
            marks["document_ids"] = np.repeat(numbers, lengths)
        if "cu_seqlens" in self.borders:
            marks["cu_seqlens"] = np.array(ends, np.int32)
        return {name: torch.from_numpy(mark) for name, mark in marks.items()}

    def _current(self) -> Layout:
        epoch = int(self._epoch) if self.arrangement == "shuffled" else 0
        if self._layout is None or self._layout[0] != epoch:
            self._layout = epoch, self._arranged(epoch)
        return self._layout[1]

    def _arranged(self, epoch: int) -> Layout:
        bounds = self._bounds
        if self.arrangement == "contiguous":
            return Contiguous(bounds, self.max_seq_length)
        if self.arrangement == "best_fit":
            return BestFit(self._cached(lambda: best_fit_arrays(bounds, self.max_seq_length), self.max_seq_length))
        seed = (self.seed, self.split_type, epoch)
        return Shuffled(self._cached(lambda: shuffled_arrays(bounds, *seed), *seed), self.max_seq_length)

    def _cached(self, build: Any, *key: object) -> Arrays:
        if len(self._bounds) <= _WORTH_CACHING:
            arrays: Arrays = build()
            return arrays
        return cached_arrays(self._cache, content_key(1, self.arrangement, *key, self._bounds), build)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_layout": None, "_bounds": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._bounds = self.data.document_bounds[self._range[0] : self._range[1] + 1]
