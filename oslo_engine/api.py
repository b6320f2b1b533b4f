"""``parallelize``: make a Transformers model train, generate and save across many devices."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedModel

from oslo_engine.assemble import assemble
from oslo_engine.comm.mesh import build_mesh
from oslo_engine.errors import PlanError
from oslo_engine.integrations.peft import refuse_adapters
from oslo_engine.methods import with_parallel_methods
from oslo_engine.policy.schema import Policy

Model = TypeVar("Model", bound=PreTrainedModel)


def parallelize(
    model: Model,
    *,
    tp: int = 1,
    pp: int = 1,
    policy: Policy | str | Path | None = None,
    schedule: str = "1f1b",
    micro_batch_size: int = 1,
    sequence_parallel: bool = False,
    expert_split: str = "inner",
    seed: int | None = None,
) -> Model:
    """Split a model over the ranks of this job, in place.

    The model stays a Transformers model of its class. Every rank keeps its own slice: ``model.parameters()`` is what lives
    here.
    Ranks beyond ``tp * pp`` are data parallel: wrap ``model.gpu_modules()`` in DistributedDataParallel over
    ``model.mpu.get_data_parallel_group()``.

    Args:
        model: whole and the same on every rank; in memory, or on ``meta`` (it stays there, with this rank's shapes).
        tp: tensor-parallel size, any number up to the attention heads.
        pp: pipeline-parallel size, up to the number of blocks.
        policy: how the architecture may be split: None for the installed policy of ``model.config.model_type`` (where there is
            none, one is derived, with a warning), or a name, a path to a YAML file, a Policy.
        schedule: order of the pipeline: "gpipe", "1f1b", "interleaved", "zero-bubble" or "zero-bubble-v".
        micro_batch_size: rows of a micro-batch of the pipeline; ``model.set_micro_batch_size`` changes it.
        sequence_parallel: split activations between the tensor-parallel regions along the sequence, in training.
        expert_split: of mixtures of experts: "inner" cuts every expert over the tensor-parallel ranks, "expert" deals whole
            experts to them.
        seed: of the dropout masks of a split model; by default taken from torch's seed on rank 0. Without tensor and pipeline
            parallelism dropout draws from torch's own generators.

    Returns:
        ``model``.

    Raises:
        TopologyError: the sizes do not fit the number of processes.
        PolicyError: no policy, or one that does not fit the model.
        PlanError: the model cannot be laid out this way.

    Communication: collective; every rank of the job must call it with the same arguments.
    """
    if tp * pp > 1:
        refuse_adapters(model, "parallelize")
    if "_oslo" in model.__dict__:
        raise PlanError("this model is parallelized already", got=type(model).__name__)
    return assemble(
        model,
        with_parallel_methods(type(model)),  # type: ignore[arg-type]
        build_mesh(tp, pp),
        policy=policy,
        schedule=schedule,
        micro_batch_size=micro_batch_size,
        sequence_parallel=sequence_parallel,
        expert_split=expert_split,
        seed=seed,
    )
