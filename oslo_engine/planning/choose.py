"""``parallelize(model, auto=True)``: the layout that planning finds fastest on the ranks and the memory of this job."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from oslo_engine.errors import OsloError, PlanError
from oslo_engine.footprint.workload import Workload, parse_bytes
from oslo_engine.planning.candidates import Candidate
from oslo_engine.planning.question import Cluster, Question
from oslo_engine.planning.words import layout_words, readable

if TYPE_CHECKING:
    from oslo_engine.policy.schema import Policy

_KEPT_FREE = 0.05  # of a device's memory: for the allocator's gaps and the libraries' own


def choose_layout(
    model: PreTrainedModel,
    device: torch.device,
    *,
    policy: Policy | str | Path | None = None,
    batch: int | None = None,
    memory: int | str | None = None,
    workload: Workload | None = None,
) -> tuple[Candidate, str]:
    """The fastest layout without ZeRO that fits, and a sentence that says so. The model is left as it is.

    Activations are recomputed only where nothing fits otherwise.

    Args:
        device: where this rank computes.
        batch: rows of a step over all ranks; by default one for each.
        memory: of each rank; by default what its device has free, of the rank that has least.
        workload: by default to train if the model is in training mode, 512 tokens a row; ``rows`` does not matter.

    Raises:
        PlanError: nothing fits, and by how much; on every rank.
        UnsupportedError: planning cannot run this model.

    Communication: one all-gather of what the ranks have free and one broadcast of rank 0's choice, as objects.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    frees = [_free_bytes(device) if memory is None else parse_bytes(memory, "max_memory")] * ranks
    if ranks > 1:
        dist.all_gather_object(frees, frees[0])
    asked = workload or Workload("train" if model.training else "inference")
    cluster = Cluster(ranks, min(frees), _node_size(ranks))
    question = Question(cluster, asked.with_rows(1), ranks if batch is None else batch, most_zero=0)
    found: list[Any] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            found = [_fastest(model, policy, question)]
        except OsloError as error:
            found = [error]
    if ranks > 1:
        dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], OsloError):
        raise found[0]
    chosen: tuple[Candidate, str] = found[0]
    return chosen


def _fastest(model: PreTrainedModel, policy: Policy | str | Path | None, question: Question) -> tuple[Candidate, str]:
    from oslo_engine.planning.model_plans import ModelPlans
    from oslo_engine.planning.search import search
    from oslo_engine.tiny.subject import find_subject

    plans = ModelPlans(find_subject(model), model.dtype, policy)
    for checkpointing in (True,) if question.workload.checkpointing else (False, True):
        fitting, others, refused = search(plans, dataclasses.replace(question, checkpointing=checkpointing))
        if fitting:
            best = fitting[0]
            there = f"{question.cluster.gpus} x {readable(question.cluster.memory)}"
            told = f"{layout_words(best.candidate)}: {readable(best.memory)} on the fullest rank, of {there}"
            return best.candidate, told
        if not question.workload.trains:
            break
    nearest = f"{layout_words(others[0].candidate)} takes {readable(others[0].memory)}" if others else "; ".join(refused)
    raise PlanError(
        "no layout of this model fits on these ranks",
        where=type(model).__name__,
        expected=f"at most {readable(question.cluster.memory)} on each of {question.cluster.gpus} ranks",
        got=nearest or f"no layout for a batch of {question.batch} rows",
        hint="more ranks, a shorter dtype, or ZeRO; oslo-engine plan says what suffices",
    )


def _free_bytes(device: torch.device) -> int:
    """What a rank may fill: free memory of its GPU, or its share of the machine's."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, int(free * (1 - _KEPT_FREE)))


def _node_size(ranks: int) -> int:
    """Ranks that fast links join: those of one machine, as the launcher says."""
    return min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", torch.accelerator.device_count() or ranks)))
