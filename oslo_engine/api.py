"""``parallelize``: make a Transformers model train, generate and save across many devices."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from transformers import PreTrainedModel

from oslo_engine.assemble import assemble
from oslo_engine.comm.mesh import build_mesh
from oslo_engine.errors import PlanError, UnsupportedError
from oslo_engine.footprint.workload import Workload
from oslo_engine.fusion.fuse import fuse as fuse_model
from oslo_engine.fusion.fuse import unfuse
from oslo_engine.fusion.targets import parse_targets
from oslo_engine.integrations.peft import adapted_model, has_adapters, meet_adapters, refuse_prompts, set_aside
from oslo_engine.methods import with_parallel_methods
from oslo_engine.placement.device_map import DeviceMap
from oslo_engine.placement.place import lift, place
from oslo_engine.policy.schema import Policy

Model = TypeVar("Model", bound=PreTrainedModel)
logger = logging.getLogger(__name__)


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
    fuse: Any = None,
    seed: int | None = None,
    auto: bool = False,
    batch: int | None = None,
    device_map: DeviceMap | str | None = None,
    max_memory: Mapping[Any, int | str] | int | str | None = None,
    workload: Workload | None = None,
    **unknown: Any,
) -> Model:
    """Split a model over the ranks of this job, or with ``device_map`` over the devices of this process, in place.

    The model stays a Transformers model of its class. Every rank keeps its own slice: ``model.parameters()`` is what lives
    here.
    Ranks beyond ``tp * pp`` are data parallel: wrap ``model.gpu_modules()`` in DistributedDataParallel over
    ``model.mpu.get_data_parallel_group()``.

    Args:
        model: whole and the same on every rank; in memory, or on ``meta`` (it stays there, with this rank's shapes). Or what
            PEFT's ``get_peft_model`` made of one.
        tp: tensor-parallel size, any number up to the attention heads.
        pp: pipeline-parallel size, up to the number of blocks.
        policy: how the architecture may be split: None for the installed policy of ``model.config.model_type`` (where there is
            none, one is derived, with a warning), or a name, a path to a YAML file, a Policy.
        schedule: order of the pipeline: "gpipe", "1f1b", "interleaved", "zero-bubble" or "zero-bubble-v".
        micro_batch_size: rows of a micro-batch of the pipeline; ``model.set_micro_batch_size`` changes it.
        sequence_parallel: split activations between the tensor-parallel regions along the sequence, in training.
        expert_split: of mixtures of experts: "inner" cuts every expert over the tensor-parallel ranks, "expert" deals whole
            experts to them.
        fuse: True, or the targets of ``model.fuse``: what kernels compute in the split model. A model that is fused stays so.
        seed: of the dropout masks of a split model; by default taken from torch's seed on rank 0. Without tensor and pipeline
            parallelism dropout draws from torch's own generators.
        auto: choose tp, pp, schedule, micro-batch size, sequence parallelism and whether to recompute activations, by planning
            for the ranks of this job and their memory, and log the choice. For batches of ``batch`` rows.
        batch: with ``auto``: rows of a step over all ranks, by default one for each.
        device_map: where the parts of the model lie, without any splitting: ``{0: [0, 1, 2], "cpu": [3, 4, 5]}`` (blocks by
            device), ``{"encoder": {...}, "decoder": {...}}``, paths of modules; or "balanced" (all
            accelerators alike) or "auto" (as few as suffice). See docs/device_map.md.
        max_memory: for "balanced" and "auto" maps the devices to use and the memory of each: ``{0: "40GiB", "cpu": "100GiB"}``;
            with ``auto=True`` the memory of every rank: ``"40GiB"``. By default what is free.
        workload: for "balanced" and "auto" maps and ``auto=True`` what the model is to do; by default to train if it is in
            training mode.

    Returns:
        ``model``.

    Raises:
        TopologyError: the sizes do not fit the number of processes.
        PolicyError: no policy, or one that does not fit the model.
        FusionTargetError: ``fuse`` names what the model does not have.
        PlanError: the model cannot be laid out this way, the device map does not fit it, or it is no model of Transformers.
        UnsupportedError: a device map or ``auto`` together with another way to split.

    Communication: without a device map collective; every rank of the job must call it with the same arguments.
    """
    if unknown:
        raise _unknown_argument(next(iter(unknown)))
    settings = {
        "tp": (tp, 1),
        "pp": (pp, 1),
        "schedule": (schedule, "1f1b"),
        "micro_batch_size": (micro_batch_size, 1),
        "sequence_parallel": (sequence_parallel, False),
        "expert_split": (expert_split, "inner"),
        "policy": (policy, None),
        "fuse": (fuse, None),
        "seed": (seed, None),
        "auto": (auto, False),
    }
    given = {name: value for name, (value, default) in settings.items() if value != default}
    if batch is not None and not auto:
        raise PlanError(
            "batch belongs to auto=True", got=f"batch={batch!r}", hint="micro_batch_size sets rows of a micro-batch"
        )
    if not isinstance(adapted_model(model), PreTrainedModel):
        raise PlanError(
            "parallelize takes models of Transformers",
            expected="a transformers.PreTrainedModel, or what peft.get_peft_model makes of one",
            got=f"{type(model).__module__}.{type(model).__qualname__}",
            hint="call it before wrappers such as DistributedDataParallel or torch.compile",
        )
    if device_map is not None:
        if given:
            raise UnsupportedError(
                "a device map places a whole model in one process, so it goes with no splitting over ranks",
                got=f"device_map with {', '.join(f'{name}={value!r}' for name, value in given.items())}",
                hint="leave device_map out, or the rest; model.fuse() can be called on the placed model",
            )
        placed_class = with_parallel_methods(type(model))  # type: ignore[arg-type]
        if isinstance(max_memory, (int, str)):
            raise PlanError("a device map needs the memory of each device", expected='{0: "40GiB"}', got=repr(max_memory))
        return place(model, device_map, placed_class, max_memory=max_memory, workload=workload)
    if auto:
        chosen_here = [name for name in given if name not in ("auto", "policy", "fuse", "seed")]
        if chosen_here:
            raise UnsupportedError(
                "auto=True chooses the layout, so it goes with none of your own",
                got=", ".join(f"{name}={given[name]!r}" for name in chosen_here),
                hint="leave auto out, or these",
            )
        if isinstance(max_memory, Mapping):
            raise PlanError("auto=True needs one size for every rank", expected='max_memory="40GiB"', got=repr(max_memory))
        return _by_itself(model, policy=policy, fuse=fuse, seed=seed, batch=batch, memory=max_memory, workload=workload)
    if max_memory is not None or workload is not None:
        raise PlanError(
            "max_memory and workload belong to a device map or to auto=True", hint='pass device_map="balanced" or auto=True too'
        )
    if tp * pp > 1:
        refuse_prompts(model)
    outer, model = model, adapted_model(model)
    if "_oslo" in model.__dict__:
        raise PlanError("this model is parallelized already", got=type(model).__name__)
    fusion = model.__dict__.get("_oslo_fusion")
    if fuse is None and fusion is not None:
        fuse = True if fusion.targets is None else fusion.targets
    if fuse is not None and fuse is not False:
        parse_targets(model, fuse)
    unfuse(model)
    with set_aside(model):
        assemble(
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
    if has_adapters(model):
        meet_adapters(model, drawn_alike=True)
    if fuse is not None and fuse is not False:
        fuse_model(model, fuse)
    return outer


def _unknown_argument(name: str) -> Exception:
    if name != "deployment":
        return TypeError(f"parallelize() got an unexpected keyword argument {name!r}")
    return UnsupportedError(
        "a model in this process cannot be deployed: workers load their slices of a checkpoint themselves",
        got="deployment",
        hint="oslo_engine.AutoModelForCausalLM.from_pretrained_with_parallel(path, tensor_parallel_size=2, deployment=True)",
    )


def _by_itself(
    model: Model,
    *,
    policy: Policy | str | Path | None,
    fuse: Any,
    seed: int | None,
    batch: int | None,
    memory: int | str | None,
    workload: Workload | None,
) -> Model:
    from oslo_engine.footprint.profile import enable_checkpointing
    from oslo_engine.planning.choose import choose_layout

    if "_oslo" in model.__dict__:
        raise PlanError("this model is parallelized already", got=type(model).__name__)
    device = build_mesh(1, 1).device  # starts torch.distributed where there is a launcher
    chosen, told = choose_layout(model, device, policy=policy, batch=batch, memory=memory, workload=workload)
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning("auto=True has chosen %s", told)
    split = parallelize(
        model,
        tp=chosen.tp,
        pp=chosen.pp,
        policy=policy,
        schedule=chosen.schedule,
        micro_batch_size=chosen.rows,
        sequence_parallel=chosen.sequence_parallel,
        fuse=fuse,
        seed=seed,
    )
    if chosen.checkpointing:
        enable_checkpointing(split)
    return split


def deparallelize(model: Model) -> Model:
    """Undo ``parallelize(model, device_map=...)``: the model lies where it lay before, and is of the class it was of.

    Raises:
        PlanError: the model has no device map.
    """
    return lift(model)
