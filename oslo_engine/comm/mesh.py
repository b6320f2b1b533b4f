"""The process groups of one rank: a torch DeviceMesh over (pp, dp, tp), and the model-parallel group that spans pp and tp."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from oslo_engine.comm.calls import Calls
from oslo_engine.comm.collectives import Axis
from oslo_engine.comm.last_words import watch_each_other
from oslo_engine.errors import TopologyError, UnsupportedError
from oslo_engine.topology import AXES, Coordinate, Topology

Made = TypeVar("Made")


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands and the groups it communicates in.

    tp, pp, dp: the axes; model: tp and pp together (the ranks that hold one copy of the model).
    device: where this rank computes.
    device_mesh: the torch DeviceMesh with dimensions pp, dp, tp (None without torch.distributed), for FSDP2 and DTensor users.
    timeout: of the process groups, as the job's default group has it.
    calls: what this rank does together with the others of its copy of the model.
    """

    topology: Topology
    at: Coordinate
    tp: Axis
    pp: Axis
    dp: Axis
    model: Axis
    device: torch.device
    device_mesh: Any = None
    timeout: timedelta = default_pg_timeout
    calls: Calls = field(default_factory=Calls, repr=False, compare=False)
    _made: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What ``make`` returned when it was first asked for under this key: groups that all models of this layout share.

        Process groups are dear (gloo gives each a thread that wakes a hundred times a second) and never go away by themselves.

        Communication: whatever ``make`` does; every rank must ask in the same order.
        """
        if key not in self._made:
            self._made[key] = make()
        found: Made = self._made[key]
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        return self  # process groups cannot be copied

    def __reduce__(self) -> Any:
        """Of a model that is whole in every process: it finds its place anew in the process where it is unpickled."""
        if self.topology.tp * self.topology.pp > 1:
            raise UnsupportedError(
                "a split model cannot be pickled: this process has a slice of it, and groups that end with the process",
                got=f"tp={self.topology.tp}, pp={self.topology.pp}",
                hint="model.save_pretrained_with_parallel(folder) on every rank, and from_pretrained_with_parallel(folder)",
            )
        return build_mesh, (1, 1)


_MESHES: dict[tuple[int, int], tuple[Any, Mesh]] = {}


def build_mesh(tp: int, pp: int) -> Mesh:
    """The groups for this world, made when first asked for. Collective: every rank must call it with the same sizes.

    ``torch.distributed`` is initialised from the launcher's environment (torchrun, deepspeed) where the script did not do it.
    With tp == pp == 1 no process group is needed.

    Raises:
        TopologyError: the sizes do not fit the world, or there is no launcher.
    """
    Topology(tp=tp, pp=pp)
    if not dist.is_initialized() and ("WORLD_SIZE" in os.environ and "RANK" in os.environ):
        _initialize_from_launcher()
    if not dist.is_initialized():
        if tp * pp > 1:
            raise TopologyError(
                "tensor and pipeline parallelism need several processes",
                where=f"tp={tp}, pp={pp}",
                expected=f"{tp * pp} processes (or a multiple)",
                got="one process without torch.distributed",
                hint=f"launch with: torchrun --nproc-per-node={tp * pp} script.py",
            )
        return Mesh(Topology(), Coordinate(0, 0, 0), Axis("tp"), Axis("pp"), Axis("dp"), Axis("model"), _device())
    topology = Topology.from_world(dist.get_world_size(), tp=tp, pp=pp)
    world = dist.group.WORLD
    known = _MESHES.get((tp, pp))
    if known is None or known[0] is not world:  # torch.distributed may have been shut down and initialised again
        known = _MESHES[tp, pp] = (world, _new_mesh(topology))
    return known[1]


def _new_mesh(topology: Topology) -> Mesh:
    at = topology.coordinate(dist.get_rank())
    calls = _calls_of(topology, dist.get_rank())
    watch_each_other(calls)
    device = _device()
    device_mesh = dist.init_device_mesh(device.type, tuple(topology.size(axis) for axis in AXES), mesh_dim_names=AXES)
    axes = {
        axis: Axis(axis, topology.size(axis), at.on(axis), device_mesh.get_group(axis) if topology.size(axis) > 1 else None)
        for axis in AXES
    }
    timeout = _default_timeout()
    model = _model_axis(topology, axes, timeout)
    return Mesh(topology, at, axes["tp"], axes["pp"], axes["dp"], model, device, device_mesh, timeout, calls)


def _calls_of(topology: Topology, rank: int) -> Calls:
    (tp_ranks,) = (ranks for ranks in topology.groups("tp") if rank in ranks)
    (model_ranks,) = (ranks for ranks in topology.groups("pp", "tp") if rank in ranks)
    return Calls(f"tp={topology.tp} pp={topology.pp}", rank, tp_ranks, model_ranks)


def _model_axis(topology: Topology, axes: dict[Any, Axis], timeout: timedelta) -> Axis:
    if topology.pp == 1 or topology.tp == 1:
        only = axes["pp"] if topology.tp == 1 else axes["tp"]
        return Axis("model", only.size, only.rank, only.group)
    mine: Axis | None = None
    for ranks in topology.groups("pp", "tp"):  # every rank creates every group, in the same order
        group = dist.new_group(ranks, timeout=timeout)
        if dist.get_rank() in ranks:
            mine = Axis("model", len(ranks), ranks.index(dist.get_rank()), group)
    assert mine is not None
    return mine


def _default_timeout() -> timedelta:
    """The default group's timeout: groups made with ``new_group`` do not inherit it."""
    options = getattr(dist.distributed_c10d._get_default_group()._get_backend(_device()), "options", None)
    return getattr(options, "_timeout", default_pg_timeout)


def _initialize_from_launcher() -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def _device() -> torch.device:
    if torch.cuda.is_available() and (not dist.is_initialized() or dist.get_backend() == "nccl"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
