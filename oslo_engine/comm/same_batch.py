"""Whether the ranks of one copy of a model were given the same batch: asked at every step, since nothing else would tell.

Tensor-parallel ranks with different batches compute something, and the loss looks like one. So before they begin they tell each
other three numbers: of what they do, and of the shapes and contents of their batches. On an accelerator the answer is read when
the forward has been put on its queue, so that the question costs no waiting; it lies before that forward's own messages there.

They tell them by an all-reduce in which each fills its own row. An all-gather would meet the one that a save begins with, if a
rank saves meanwhile, and take its numbers; with gloo two operations of different kinds wait for each other, which is noticed.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor

from oslo_engine.comm.collectives import Axis
from oslo_engine.comm.fingerprint import contents
from oslo_engine.errors import BatchError

_PLAIN = (bool, int, float, str)
_DOES = {0: "a forward without gradients", 1: "a forward"}


class BatchComparison:
    """One batch, while the ranks compare it: made before the forward, to be finished behind it.

    Args:
        batch: the arguments of the call. Of tensors that were computed with gradients only the shape is compared, as they may
            differ by rounding.
        ranks: of ``axis``, as the job numbers them.
        number: of this batch, for the message.

    Raises:
        BatchError: on all ranks, where batches differ, if the device is a CPU.

    Communication: one all-reduce of 24 bytes for each rank over ``axis``.
    """

    def __init__(
        self, batch: Mapping[str, Any], axis: Axis, device: torch.device, *, ranks: tuple[int, ...], number: int
    ) -> None:
        self._batch, self._ranks, self._number = batch, ranks, number
        table = torch.zeros(axis.size, 3, dtype=torch.int64, device=device)
        table[axis.rank] = _numbers(batch, device)
        dist.all_reduce(table, group=axis.group)
        self._everybody = table.to("cpu", non_blocking=True)
        self._there = None
        if device.type == "cuda":
            self._there = torch.cuda.Event()
            self._there.record()
        else:
            self.finish()

    def finish(self) -> None:
        """Wait for the answer.

        Raises:
            BatchError: on all ranks, where batches differ.
        """
        if self._there is not None:
            self._there.synchronize()  # type: ignore[no-untyped-call]
        everybody = [tuple(numbers) for numbers in self._everybody.tolist()]
        if len(set(everybody)) == 1:
            return
        if len({does for does, *_ in everybody}) > 1:
            one, other = (next(at for at, (found, *_) in enumerate(everybody) if found == does) for does in (1, 0))
            told = [(self._ranks[at], _DOES[everybody[at][0]]) for at in sorted((one, other))]
            raise BatchError(
                "the ranks of one copy of the model must do the same",
                got=" while ".join(f"rank {rank} is in {what}" for rank, what in told),
                hint="did one have fewer batches? DataLoader(..., drop_last=True), and the same sampler on all of them",
            )
        differ = "the same shapes, but other values" if len({shapes for _, shapes, _ in everybody}) == 1 else "other shapes"
        raise BatchError(
            "the ranks of one copy of the model were given different batches",
            where=f"batch {self._number} of this model",
            expected="the same batch on every rank that holds a part of one copy of the model",
            got=f"{differ} {apart(everybody, self._ranks)}; here {_described(self._batch)}",
            hint="give samplers num_replicas=model.mpu.get_data_parallel_world_size(), rank=model.mpu.get_data_parallel_rank()",
        )


def apart(numbers: Sequence[Any], ranks: Sequence[int], kind: str = "rank") -> str:
    """Who has other numbers than whom, the fewest first: "on rank 2 than on rank 0, 1, 3"."""
    alike = [[rank for rank, each in zip(ranks, numbers, strict=True) if each == one] for one in set(numbers)]
    fewest_first = sorted(alike, key=lambda group: (len(group), group))
    return " than ".join(f"on {kind} {', '.join(map(str, group))}" for group in fewest_first)


def _numbers(batch: Mapping[str, Any], device: torch.device) -> Tensor:
    """[3] int64: whether it trains; of names, shapes and plain values; and of what the tensors contain."""
    shapes, values = 0, torch.zeros((), dtype=torch.int64, device=device)
    for name, value in sorted(batch.items()):
        for leaf in pytree.tree_leaves(value):
            shapes = zlib.crc32(f"{name} {_kind(leaf)}".encode(), shapes)
            if isinstance(leaf, Tensor) and not leaf.requires_grad:
                values = values * 31 + contents(leaf).to(device, non_blocking=True)
    known = [torch.full_like(values, number) for number in (int(torch.is_grad_enabled()), shapes)]
    return torch.stack([*known, values])


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype}"
    return repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__


def _described(batch: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {tuple(value.shape)}" for name, value in batch.items() if isinstance(value, Tensor))
