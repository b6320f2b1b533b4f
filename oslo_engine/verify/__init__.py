"""``verify``: prove that a model, split in some way, computes what it computes unsplit."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from oslo_engine.policy.registry import find_policy
from oslo_engine.policy.schema import Policy
from oslo_engine.tiny.sizes import Sizes
from oslo_engine.tiny.subject import find_subject
from oslo_engine.verify.launch import Outcome, run_ranks
from oslo_engine.verify.report import Report, Row, merge_rows
from oslo_engine.verify.settings import DType, Settings
from oslo_engine.verify.task import Task

__all__ = ["verify"]


def verify(
    model: Any,
    *,
    task: str | None = None,
    tp: int = 1,
    pp: int = 1,
    schedule: str = "1f1b",
    micro_batch_size: int = 2,
    sequence_parallel: bool = False,
    expert_split: str = "inner",
    policy: Policy | str | Path | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    vocab: int | None = None,
    layers: int | None = None,
    tied: bool | None = None,
    full_size: bool = False,
    dtype: DType = "float32",
    dropout: float = 0.0,
    gradient_checkpointing: bool = False,
    fuse: bool = False,
    seed: int = 0,
    timeout_s: float = 300,
) -> Report:
    """Split a model over ``tp * pp`` processes on this machine and compare it with the unsplit model, number by number.

    The architecture is the model's, its sizes are tiny unless told otherwise, its weights random. docs/verify.md says what is
    compared and how to read the result.

    Args:
        model: a model type of Transformers, a folder or hub name with a config, a config, or a model (whose
            weights are not used).
        task: causal, masked or seq2seq, for architectures that have language models of several kinds; by default the class
            that the config names, else what the architecture is mostly used for.
        tp, pp, schedule, micro_batch_size, sequence_parallel, expert_split, policy: as in ``parallelize``.
        heads, kv_heads, vocab, layers: sizes; layers of each stack.
        tied: whether the embedding and the head are one parameter; by default as in the config.
        full_size: keep the config's sizes, for what these do not say. Every rank holds the whole model twice.
        dtype: of weights and activations.
        dropout: probability; above 0 the checks are those of the masks.
        gradient_checkpointing: recompute activations in the split model.
        fuse: let kernels compute what they can of the split model. Attention is then eager, so that they find its scores.
        seed: of weights, batches and masks.
        timeout_s: after which the ranks are ended.

    Returns:
        The report; ``report.ok`` is the verdict. A check that fails is no exception.

    Raises:
        OsloError: the arguments are wrong, or the model cannot be split this way.

    Communication: among the ranks that it starts. Torch's process group of this process, if it has one, is not touched.
    """
    started = time.monotonic()
    sizes = Sizes(heads=heads, kv_heads=kv_heads, vocab=vocab, layers=layers, tied=tied, full=full_size)
    settings = Settings(
        tp=tp,
        pp=pp,
        schedule=schedule,
        micro_batch_size=micro_batch_size,
        sequence_parallel=sequence_parallel,
        expert_split=expert_split,
        dtype=dtype,
        dropout=dropout,
        gradient_checkpointing=gradient_checkpointing,
        fuse=fuse,
        seed=seed,
    )
    subject = find_subject(model, task)
    if settings.num_ranks > 1 or policy is not None:
        settings = dataclasses.replace(settings, policy=find_policy(policy, subject.config.model_type))
    small = subject.shrunk(sizes, num_blocks=settings.num_blocks, dropout=dropout)
    outcome = run_ranks(lambda folder: Task(small, settings, tied, folder, timeout_s), settings.num_ranks, timeout_s)
    if outcome.refused is not None:
        raise outcome.refused
    return Report(
        model=f"{subject.name} ({subject.config.model_type})",
        settings=_asked_for(settings, sizes),
        rows=_rows(outcome, settings.num_ranks),
        seconds=time.monotonic() - started,
        errors=outcome.errors,
    )


def _rows(outcome: Outcome, num_ranks: int) -> tuple[Row, ...]:
    if not outcome.names:
        return (Row("splitting the model", "fail", detail="see below"),)
    return tuple(merge_rows(name, outcome.rows.get(name, {}), num_ranks) for name in outcome.names)


def _asked_for(settings: Settings, sizes: Sizes) -> dict[str, Any]:
    """tp and pp, and what is not the default."""
    asked: dict[str, Any] = {"tp": settings.tp, "pp": settings.pp}
    for part in (settings, sizes):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if field.name not in asked and field.name != "policy" and value != field.default:
                asked[field.name] = value
    if settings.policy is not None:
        asked["policy"] = settings.policy.name
    return asked
