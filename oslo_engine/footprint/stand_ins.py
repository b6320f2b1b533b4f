"""A rank's surroundings without other ranks: groups whose collectives move nothing and are written down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oslo_engine.comm.collectives import Axis
from oslo_engine.comm.mesh import Mesh
from oslo_engine.topology import Coordinate, Topology

Note = Callable[[str, int], None]


class _Done:
    """The handle of a collective that is complete."""

    def wait(self, *timeout: Any) -> bool:
        return True


class RecordedGroup:
    """Takes a process group's place in ``torch.distributed``'s functions.

    Args:
        note: called with the kind of every collective, under the names of ``comm.counter``, and the bytes that are handed in.
    """

    def __init__(self, note: Note) -> None:
        self._note = note

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> _Done:
        return self._done("allreduce", tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> _Done:
        return self._done("allgather", inputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], options: Any = None) -> _Done:
        return self._done("reduce_scatter", [tensor for row in inputs for tensor in row])

    def _done(self, kind: str, tensors: list[Tensor]) -> _Done:
        self._note(kind, sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        return _Done()


def lone_mesh(tp: int, device: torch.device, note: Note) -> Mesh:
    """The mesh of tp rank 0 of ``tp``, alone in its process."""
    group = RecordedGroup(note) if tp > 1 else None
    axis = Axis("tp", tp, 0, group)
    return Mesh(Topology(tp=tp), Coordinate(0, 0, 0), axis, Axis("pp"), Axis("dp"), Axis("model", tp, 0, group), device)
