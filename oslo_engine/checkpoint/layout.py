"""``layout.json``: which entries of which tensor stand in which file of a split checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from oslo_engine.checkpoint.checksums import FileRecord, record_of
from oslo_engine.checkpoint.ranges import TensorSpec
from oslo_engine.errors import CheckpointError
from oslo_engine.plan.plan import Plan
from oslo_engine.shards import Shard

FORMAT = "oslo_engine split checkpoint"
VERSION = 1  # of what a reader must understand; keys that it does not know it may ignore

Serialization = Literal["safetensors", "torch"]
FILE_NAMES: dict[Serialization, str] = {
    "safetensors": "{stem}_tp={tp}_pp={pp}.safetensors",
    "torch": "pytorch_{stem}_tp={tp}_pp={pp}.bin",
}
CONFIGS = ("config.json", "generation_config.json")


@dataclass(frozen=True)
class TensorLayout:
    """One logical tensor of the model.

    name, aliases: its first name, which it has in the files, and all of them.
    shape, dtype: of the whole tensor.
    shard: how the tp ranks divide it; None where it is not cut.
    pp_ranks: the pp ranks that hold it; the first one's files have it.
    merged_name: its name in a merged checkpoint; None where it has none.
    converted: whether a merged checkpoint has it in another form, as Transformers' weight conversions make it.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    shard: Shard | None
    pp_ranks: tuple[int, ...]
    is_buffer: bool = False
    merged_name: str | None = None
    converted: bool = False

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.dtype, self.shape)

    def local_spec(self, tp_rank: int) -> TensorSpec:
        return self.spec if self.shard is None else TensorSpec(self.dtype, self.shard.local_shape(self.shape, tp_rank))

    def tp_ranks_stored(self) -> tuple[int, ...]:
        """The tp ranks whose files have a slice of it: each entry is stored once, by the first rank that holds it."""
        if self.shard is None:
            return (0,)
        seen: set[tuple[int, int]] = set()
        stored = []
        for rank, spans in enumerate(self.shard.spans):
            if not seen.issuperset(spans):
                stored.append(rank)
            seen.update(spans)
        return tuple(stored)


@dataclass(frozen=True)
class Layout:
    """A split checkpoint.

    tp, pp: how many files on each axis.
    policy, model: the names of the policy and of the model class it was saved with.
    policy_hash: of what the policy said then; empty where there was none.
    configs: what the config files were, if they were written with it. They may be edited: only ``verify`` compares them.
    files: what each file must be.
    stem: what the names of the files begin with.
    """

    tp: int
    pp: int
    policy: str
    model: str
    serialization: Serialization
    tensors: tuple[TensorLayout, ...]
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    stem: str = "model"
    policy_hash: str = ""
    configs: Mapping[str, FileRecord] = field(default_factory=dict)

    def with_configs(self, folder: Path) -> Layout:
        """With what the config files in a folder are now."""
        there = [name for name in CONFIGS if (folder / name).is_file()]
        return replace(self, configs={name: record_of(folder / name) for name in there})

    def file_name(self, tp_rank: int, pp_rank: int) -> str:
        return FILE_NAMES[self.serialization].format(stem=self.stem, tp=tp_rank, pp=pp_rank)

    def file_names(self) -> list[str]:
        return [self.file_name(tp_rank, pp_rank) for pp_rank in range(self.pp) for tp_rank in range(self.tp)]

    def stored_in(self, tp_rank: int, pp_rank: int) -> list[TensorLayout]:
        """The tensors in one file."""
        return [t for t in self.tensors if t.pp_ranks[0] == pp_rank and tp_rank in t.tp_ranks_stored()]

    def write(self, path: Path) -> None:
        data = {
            "format": FORMAT,
            "version": VERSION,
            "tp": self.tp,
            "pp": self.pp,
            "policy": self.policy,
            "policy_hash": self.policy_hash,
            "model": self.model,
            "serialization": self.serialization,
            "stem": self.stem,
            "files": {name: asdict(record) for name, record in self.files.items()},
            "configs": {name: asdict(record) for name, record in self.configs.items()},
        }
        head = json.dumps(data, indent=2).removesuffix("\n}")
        tensors = ",\n    ".join(json.dumps(_tensor_to_json(tensor)) for tensor in self.tensors)  # a line each
        path.write_text(f'{head},\n  "tensors": [\n    {tensors}\n  ]\n}}\n', encoding="utf-8")


def layout_of(plan: Plan, dtypes: Mapping[str, torch.dtype], serialization: Serialization, *, policy_hash: str = "") -> Layout:
    """The layout in which a plan's tensors are saved.

    Args:
        dtypes: the type of each tensor as it is now, by its first name.
        policy_hash: of the policy with which it was planned.
    """
    return Layout(
        tp=plan.topology.tp,
        pp=plan.topology.pp,
        policy=plan.policy,
        policy_hash=policy_hash,
        model=plan.model,
        serialization=serialization,
        tensors=tuple(
            TensorLayout(
                name=tensor.name,
                aliases=tensor.aliases,
                shape=tensor.shape,
                dtype=dtypes[tensor.name],
                shard=tensor.shard,
                pp_ranks=plan.holders(tensor),
                is_buffer=tensor.is_buffer,
                merged_name=tensor.name,
            )
            for tensor in plan.tensors
            if tensor.persistent
        ),
    )


def read_layout(path: Path) -> Layout:
    """Read and check ``layout.json``.

    Raises:
        CheckpointError: it is not one, or contradicts itself.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError("cannot read the layout of a split checkpoint", where=str(path), got=str(error)) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CheckpointError("this is not the layout of a split checkpoint", where=str(path), expected=f'"format": "{FORMAT}"')
    if type(data.get("version")) is not int or data["version"] != VERSION:
        raise CheckpointError(
            "the layout has a version that this oslo_engine does not know",
            where=str(path),
            expected=str(VERSION),
            got=repr(data.get("version")),
            hint="load it with the version that saved it, or a newer one",
        )
    try:
        layout = Layout(
            tp=_positive(data["tp"]),
            pp=_positive(data["pp"]),
            policy=str(data["policy"]),
            model=str(data["model"]),
            serialization=data["serialization"],
            tensors=tuple(_tensor_from_json(entry, data["tp"], data["pp"]) for entry in data["tensors"]),
            files=_records_from_json(data["files"]),
            stem=data.get("stem", "model"),
            policy_hash=str(data.get("policy_hash", "")),
            configs=_records_from_json(data.get("configs", {})),
        )
        _require(layout.stem.isidentifier(), f"stem {layout.stem!r}")
        names = [alias for tensor in layout.tensors for alias in tensor.aliases]
        _require(len(names) == len(set(names)), "a name stands for two tensors")
        _require(len(layout.files) == layout.tp * layout.pp, f"tp={layout.tp}, pp={layout.pp}, {len(layout.files)} files")
        _require(set(layout.files) == set(layout.file_names()), f"files are {sorted(layout.files)}")
        _require(set(layout.configs) <= set(CONFIGS), f"configs are {sorted(layout.configs)}")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            "the layout of the split checkpoint is damaged", where=str(path), got=f"{type(error).__name__}: {error}"
        ) from None
    return layout


def _tensor_to_json(tensor: TensorLayout) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": tensor.name}
    if len(tensor.aliases) > 1:
        entry["aliases"] = list(tensor.aliases)
    entry |= {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "pp_ranks": list(tensor.pp_ranks)}
    if tensor.shard is not None:
        entry |= {"dim": tensor.shard.dim, "spans": [[list(span) for span in spans] for spans in tensor.shard.spans]}
    if tensor.is_buffer:
        entry["is_buffer"] = True
    if tensor.converted:
        entry["converted"] = True
    elif tensor.merged_name != tensor.name:
        entry["merged_name"] = tensor.merged_name
    return entry


def _tensor_from_json(entry: dict[str, Any], tp: int, pp: int) -> TensorLayout:
    name, shape, dtype = entry["name"], tuple(entry["shape"]), getattr(torch, entry["dtype"])
    aliases = tuple(entry.get("aliases", [name]))
    named = name in aliases and all(isinstance(alias, str) for alias in aliases)
    _require(named and isinstance(dtype, torch.dtype), f"{name!r} is malformed")
    _require(all(type(size) is int and size >= 0 for size in shape), f"{name}: shape {shape}")
    pp_ranks = tuple(entry["pp_ranks"])
    staged = bool(pp_ranks) and all(type(rank) is int and rank in range(pp) for rank in pp_ranks)
    _require(staged, f"{name}: pp_ranks {pp_ranks}")
    converted = entry.get("converted", False)
    return TensorLayout(
        name=name,
        aliases=aliases,
        shape=shape,
        dtype=dtype,
        shard=_shard_from_json(name, entry, shape, tp) if "spans" in entry else None,
        pp_ranks=pp_ranks,
        is_buffer=entry.get("is_buffer", False),
        merged_name=None if converted else entry.get("merged_name", name),
        converted=converted,
    )


def _shard_from_json(name: str, entry: dict[str, Any], shape: Sequence[int], tp: int) -> Shard:
    dim = entry["dim"]
    spans = tuple(tuple((start, stop) for start, stop in rank) for rank in entry["spans"])
    _require(all(type(end) is int for rank in spans for span in rank for end in span), f"{name}: spans {spans}")
    _require(type(dim) is int and 0 <= dim < len(shape) and len(spans) == tp, f"{name}: dim {dim}, {len(spans)} lists of spans")
    size, end = shape[dim], 0
    for start, stop in sorted({span for rank in spans for span in rank if span[1] > span[0]}):
        _require(start == end, f"{name}: spans overlap or leave a gap at {min(start, end)}")
        end = stop
    _require(end == size or math.prod(shape) == 0, f"{name}: spans end at {end} of {size}")
    return Shard(dim, size, spans)


def _records_from_json(entries: dict[str, Any]) -> dict[str, FileRecord]:
    return {name: FileRecord.from_json(entry) for name, entry in entries.items()}


def _positive(value: Any) -> int:
    _require(type(value) is int and value > 0, f"{value!r} is not a size")
    return int(value)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)
