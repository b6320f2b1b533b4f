"""What a model is to do, as far as its memory depends on that."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from oslo_engine.errors import PlanError

Task = Literal["train", "inference"]
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_FP32_BYTES = 4


def _factored(shape: tuple[int, ...], itemsize: int) -> int:
    """Rows and columns of a matrix, all of a vector, as ``torch.optim.Adafactor`` keeps them."""
    if len(shape) < 2:
        return math.prod(shape) * itemsize
    return (math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1]) * itemsize


# Bytes of state for a parameter, of its shape and the bytes of an entry. Step counters are left out: they stay on the host.
OPTIMIZERS: dict[str, Callable[[tuple[int, ...], int], int]] = {
    "adamw": lambda shape, itemsize: 2 * math.prod(shape) * itemsize,
    "adamw-master": lambda shape, itemsize: (3 if itemsize < _FP32_BYTES else 2) * math.prod(shape) * _FP32_BYTES,
    "adafactor": _factored,
    "sgd-momentum": lambda shape, itemsize: math.prod(shape) * itemsize,
    "sgd": lambda shape, itemsize: 0,
}


@dataclass(frozen=True)
class Workload:
    """A training step, or generation.

    task: "train", or "inference".
    rows: of one micro-batch; in inference sequences at a time.
    length: tokens of a sequence; in inference prompt and continuation together.
    target_length: tokens of the decoder's sequence, of encoder-decoders.
    optimizer: a key of ``OPTIMIZERS``: "adamw" keeps two numbers a parameter in its dtype, "adamw-master" three in float32 for
        parameters of a shorter type, as DeepSpeed and Megatron do.
    checkpointing: whether blocks recompute their activations in the backward.

    Raises:
        PlanError: no such task or optimizer, or sizes that are not positive.
    """

    task: Task = "train"
    rows: int = 1
    length: int = 512
    target_length: int = 128
    optimizer: str = "adamw"
    checkpointing: bool = False

    def __post_init__(self) -> None:
        for name, known in (("task", ("train", "inference")), ("optimizer", tuple(OPTIMIZERS))):
            if getattr(self, name) not in known:
                raise PlanError(f"there is no such {name}", expected=" or ".join(known), got=repr(getattr(self, name)))
        for name in ("rows", "length", "target_length"):
            check_count(name, getattr(self, name))

    @property
    def trains(self) -> bool:
        return self.task == "train"

    def with_rows(self, rows: int) -> Workload:
        return replace(self, rows=rows)

    def optimizer_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        return OPTIMIZERS[self.optimizer](shape, itemsize) if self.trains else 0


def check_count(name: str, value: Any) -> None:
    """
    Raises:
        PlanError: it is no positive whole number.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name} must be a positive whole number", expected=">= 1", got=repr(value))


def parse_bytes(size: int | float | str, where: str) -> int:
    """``80GiB``, ``"40 GB"``, ``8e9`` -> bytes.

    Args:
        where: what the size is of, for the error.

    Raises:
        PlanError: it is no positive size.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+]?[0-9]+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get(match[2].upper()) if match else None
    try:
        value = float(match[1]) * unit if match and unit is not None else 0.0
    except ValueError:
        value = 0.0
    if isinstance(size, bool) or not math.isfinite(value) or value < 1:
        raise PlanError(
            "this is no size of memory", where=where, expected="such as 80GiB, 40GB or a number of bytes", got=repr(size)
        )
    return int(value)
