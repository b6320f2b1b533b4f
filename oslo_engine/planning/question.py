"""What is asked: which machine, which work."""

from __future__ import annotations

from dataclasses import dataclass

from oslo_engine.errors import PlanError
from oslo_engine.footprint.workload import Workload, check_count

GIGA = 1e9


@dataclass(frozen=True)
class Cluster:
    """The machine.

    gpus: of all nodes. memory: bytes of each. node_size: GPUs that the fast links join.
    node_gb_per_s, cluster_gb_per_s: what a GPU sends per second to one of its node, and to another node, in 10^9 bytes.
    tflops: what a GPU computes of a model, in 10^12 operations a second.

    Raises:
        PlanError: a number that is not positive.
    """

    gpus: int
    memory: int
    node_size: int = 8
    node_gb_per_s: float = 300.0
    cluster_gb_per_s: float = 25.0
    tflops: float = 300.0

    def __post_init__(self) -> None:
        check_count("gpus", self.gpus)
        check_count("node_size", self.node_size)
        for name in ("memory", "node_gb_per_s", "cluster_gb_per_s", "tflops"):
            if not getattr(self, name) > 0:
                raise PlanError(f"{name} must be positive", expected="> 0", got=repr(getattr(self, name)))

    def bytes_per_s(self, ranks_apart: int) -> float:
        """Of a link between ranks that many places from each other."""
        return GIGA * (self.node_gb_per_s if ranks_apart < self.node_size else self.cluster_gb_per_s)


@dataclass(frozen=True)
class Question:
    """What the cluster is to do.

    workload: of one micro-batch; its rows and whether it recomputes are the planner's to choose, unless ``checkpointing`` is
        given.
    batch: rows of a training step in all, or sequences at a time in inference.
    checkpointing: None to try both. most_zero: the highest stage of ZeRO to try.
    """

    cluster: Cluster
    workload: Workload
    batch: int
    checkpointing: bool | None = None
    most_zero: int = 3

    def __post_init__(self) -> None:
        check_count("batch", self.batch)
