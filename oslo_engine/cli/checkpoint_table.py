"""A checkpoint as rows of text; tensors that are alike but for a number in their names together."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from oslo_engine.cli.plan_table import ranges, readable, split_of

if TYPE_CHECKING:
    from oslo_engine.checkpoint.layout import Layout
    from oslo_engine.checkpoint.tensors import TensorSource

_KINDS = {
    "SplitSource": "split",
    "SafetensorsSource": "whole, safetensors",
    "PickledSource": "whole, torch",
    "DcpSource": "torch.distributed.checkpoint",
}


def facts(folder: Path, source: TensorSource) -> Iterator[tuple[str, str]]:
    """(what, answer) about the whole of it."""
    layout = _layout(source)
    kind = _KINDS[type(source).__name__]
    yield "form", kind if layout is None else f"{kind}, {layout.serialization}"
    if layout is not None:
        yield "layout", f"tp={layout.tp} pp={layout.pp}"
        yield "policy", layout.policy + (f" (hash {layout.policy_hash})" if layout.policy_hash else "")
    yield "model", _model(folder) if layout is None else layout.model
    specs = {source.identity(name): source.spec(name) for name in source.names()}.values()
    num_bytes = sum(spec.num_bytes for spec in specs)
    yield "tensors", f"{len(specs)}, {sum(math.prod(spec.shape) for spec in specs):,} numbers, {readable(num_bytes)}"


def file_rows(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else [folder]:
        if path.is_file():
            yield path.name, readable(path.stat().st_size)


def tensor_titles(source: TensorSource) -> tuple[str, ...]:
    return ("tensor", "shape", "type", "bytes") + (() if _layout(source) is None else ("split over tp", "pp ranks"))


def tensor_rows(source: TensorSource) -> Iterator[tuple[str, ...]]:
    """One row for tensors of the same form; ``h.*.weight (12)`` stands for 12 of them."""
    together: dict[tuple[str, ...], list[tuple[str, int, set[int]]]] = {}
    for name, ties, row, num_bytes, pp_ranks in _tensors(source):
        together.setdefault((re.sub(r"(?<=\.)\d+(?=\.)", "*", name), ties, *row), []).append((name, num_bytes, pp_ranks))
    for (pattern, ties, shape, dtype, *split), found in together.items():
        name = f"{pattern} ({len(found)})" if len(found) > 1 else found[0][0]
        holders = [ranges(sorted({rank for _, _, ranks in found for rank in ranks}))] if split else []
        yield name + ties, shape, dtype, readable(sum(num_bytes for _, num_bytes, _ in found)), *split, *holders


def _tensors(source: TensorSource) -> Iterator[tuple[str, str, tuple[str, ...], int, set[int]]]:
    """(name, its other names, the columns by which tensors are alike, bytes, pp ranks)."""
    layout = _layout(source)
    if layout is None:
        for name in source.names():
            spec = source.spec(name)
            yield name, "", (_shape(spec.shape), _type(spec.dtype)), spec.num_bytes, set()
        return
    for tensor in layout.tensors:
        ties = "".join(f" = {alias}" for alias in tensor.aliases if alias != tensor.name)
        split = "whole" if tensor.shard is None else split_of(tensor.shard)
        row = (_shape(tensor.shape), _type(tensor.dtype), split)
        yield tensor.name, ties, row, tensor.spec.num_bytes, set(tensor.pp_ranks)


def _layout(source: TensorSource) -> Layout | None:
    from oslo_engine.checkpoint.split import SplitSource

    return source.layout if isinstance(source, SplitSource) else None


def _model(folder: Path) -> str:
    """What the config says, if there is one."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return ", ".join(config.get("architectures") or [config["model_type"]])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "not known: no config.json that says it"


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _type(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
