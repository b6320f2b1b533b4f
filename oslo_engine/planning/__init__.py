"""``plan``: which layouts of a model fit on which GPUs, and what they cost. No GPU, no weights, no process group."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oslo_engine.footprint.workload import Task, Workload, parse_bytes
from oslo_engine.planning.question import Cluster, Question

if TYPE_CHECKING:
    from oslo_engine.planning.report import PlanReport
    from oslo_engine.policy.schema import Policy


def plan(
    model: Any,
    *,
    gpus: int,
    memory: int | str,
    task: Task = "train",
    batch: int | None = None,
    length: int = 512,
    target_length: int = 128,
    dtype: str = "bfloat16",
    optimizer: str = "adamw",
    checkpointing: bool | None = None,
    node_size: int = 8,
    node_gb_per_s: float = 300.0,
    cluster_gb_per_s: float = 25.0,
    tflops: float = 300.0,
    policy: Policy | str | Path | None = None,
) -> PlanReport:
    """List the layouts in which a model fits on some GPUs, fastest first.

    Args:
        model: a model type, a folder or hub name, a config or a model; weights are not read.
        gpus: how many there are.
        memory: of each: bytes, or "80GiB".
        task: "train", or "inference" (generation with a cache).
        batch: rows of a step over all GPUs, or sequences at a time; by default one for each GPU.
        length: tokens of a row; in inference prompt and continuation together.
        target_length: tokens of a row's target, of encoder-decoders.
        dtype: of weights and activations.
        optimizer: "adamw", "adamw-master" (float32 copies of shorter weights), "adafactor", "sgd-momentum" or "sgd".
        checkpointing: whether blocks recompute their activations; by default both are tried.
        node_size: GPUs that fast links join.
        node_gb_per_s, cluster_gb_per_s: what a GPU sends a second within its node and to others, in 10^9 bytes.
        tflops: what a GPU computes of such a model, in 10^12 operations a second.
        policy: how the model may be split; by default the installed one of its model type.

    Raises:
        UnsupportedError: no such model, or none that runs on text.
        PlanError: sizes that make no sense.
    """
    import torch

    from oslo_engine.planning.model_plans import ModelPlans
    from oslo_engine.planning.report import PlanReport
    from oslo_engine.planning.search import least_gpus, search
    from oslo_engine.tiny.subject import find_subject

    cluster = Cluster(gpus, parse_bytes(memory, "memory"), node_size, node_gb_per_s, cluster_gb_per_s, tflops)
    workload = Workload(task, 1, length, target_length, optimizer)
    question = Question(cluster, workload, gpus if batch is None else batch, checkpointing)
    plans = ModelPlans(find_subject(model), _dtype(dtype, torch), policy)
    fitting, others, refused = search(plans, question)
    parameters = plans.lay(1, 1).plan.parameters
    return PlanReport(
        model=plans.subject.name,
        dtype=dtype,
        parameters=sum(math.prod(tensor.shape) for tensor in parameters),
        question=question,
        fitting=tuple(fitting),
        others=tuple(others),
        refused=refused,
        least_gpus=least_gpus(plans, question),
    )


def _dtype(name: str, torch: Any) -> Any:
    from oslo_engine.errors import PlanError

    known = ("float32", "bfloat16", "float16", "float64")
    if name not in known:
        raise PlanError("there is no such dtype for a model", expected=" or ".join(known), got=repr(name))
    return getattr(torch, name)
