"""Saved and loaded, split and merged, at the same layout and at another: bit for bit the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from oslo_engine.errors import PlanError, UnsupportedError
from oslo_engine.methods import with_parallel_methods
from oslo_engine.rewrite.state import parallel_state
from oslo_engine.verify.checks.check import Check
from oslo_engine.verify.checks.training import gradient_error, one_backward, way_to_train
from oslo_engine.verify.compare import bits_that_differ
from oslo_engine.verify.report import Row, judge, not_applicable
from oslo_engine.verify.trial import Trial, gather_objects, use_eager_experts

_SAME, _OTHER = "checkpoint, split, same layout", "checkpoint, split, other layout"
_TRAINED = "gradients, after loading"
_PLAIN, _MERGED = "checkpoint, merged, plain Transformers", "checkpoint, merged, other layout"


def checkpoint_check(trial: Trial) -> Check:
    return Check((_SAME, _TRAINED, _OTHER, _PLAIN, _MERGED), _round_trip)


def _round_trip(trial: Trial) -> Iterator[Row]:
    settings = trial.settings
    split, merged = trial.folder / "split", trial.folder / "merged"
    _reset_buffers(trial)
    trial.model.save_pretrained_with_parallel(split)
    loaded = _load(trial, split, settings.tp, settings.pp)
    yield _compare(trial, _SAME, loaded)
    yield _train(trial, loaded)
    other, model = _load_elsewhere(trial, split)
    if model is None:
        yield not_applicable(_OTHER, f"{settings.num_ranks} ranks cannot hold this model in another way")
    else:
        yield _compare(trial, _OTHER, model, other)
    trial.model.save_pretrained_with_parallel(merged, save_with_merging=True)
    gather_objects(None)  # until all have written
    yield _compare_plain(trial, trial.subject.load_class().from_pretrained(merged, dtype="auto"))
    if model is None:
        yield not_applicable(_MERGED, f"{settings.num_ranks} ranks cannot hold this model in another way")
    else:
        yield _compare(trial, _MERGED, _load_elsewhere(trial, merged)[1], other)


def _reset_buffers(trial: Trial) -> None:
    """Some forwards change buffers (ranges of a quantisation); compared is what is saved."""
    plan, tp_rank = parallel_state(trial.model).plan, parallel_state(trial.model).mesh.at.tp_rank
    wanted = dict(trial.reference.named_buffers())
    for name, buffer in trial.model.named_buffers():
        tensor = plan.tensor(name)
        whole = wanted[tensor.name]
        if not buffer.is_meta:
            buffer.copy_(whole if tensor.shard is None else tensor.shard.apply(whole, tp_rank))


def _train(trial: Trial, loaded: Any) -> Row:
    """Loading puts new parameters in place: what sums their gradients over ranks must know them."""
    if trial.settings.dropout:
        return not_applicable(_TRAINED, "the unsplit model draws other dropout masks")
    batch = trial.batch(trial.shapes[0])
    before = {name: buffer.clone() for name, buffer in trial.reference.named_buffers()}
    trial.reference.train().zero_grad()
    wanted, _ = one_backward(trial.reference, batch)
    for name, buffer in trial.reference.named_buffers():
        buffer.copy_(before[name])
    way_to_train(trial)(loaded.train(), batch)
    worst = gradient_error(trial, trial.limits_for(wanted), [batch], loaded)
    return judge(_TRAINED, worst.value, trial.limits.gradients, worst.name)


def _load(trial: Trial, folder: Any, tp: int, pp: int) -> Any:
    settings = trial.settings
    cls: Any = with_parallel_methods(trial.subject.load_class())
    model = cls.from_pretrained_with_parallel(
        folder,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        micro_batch_size=settings.micro_batch_size,
        policy=settings.policy,
        schedule=settings.schedule if pp > 1 else "1f1b",
        expert_split=settings.expert_split,
        dtype="auto",
        **settings.attention,
    )
    if settings.dtype == "float64":
        use_eager_experts(model)
    return model.fuse() if settings.fuse else model


def _load_elsewhere(trial: Trial, folder: Any) -> tuple[str, Any]:
    """At the first other layout of the same ranks that the model can take; every rank comes to the same one."""
    tp, pp, ranks = trial.settings.tp, trial.settings.pp, trial.settings.num_ranks
    candidates = dict.fromkeys([(pp, tp), (ranks, 1), (1, ranks)])
    for other in candidates:
        if other == (tp, pp):
            continue
        try:
            return f"tp={other[0]} pp={other[1]}", _load(trial, folder, *other)
        except (PlanError, UnsupportedError):  # too few heads or blocks, or no pipeline at all
            continue
    return "", None


def _compare(trial: Trial, name: str, model: nn.Module, detail: str = "") -> Row:
    whole = {**dict(trial.reference.named_parameters()), **dict(trial.reference.named_buffers())}
    plan, at = parallel_state(model).plan, parallel_state(model).mesh.at
    ours = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wrong = []
    for tensor in plan.held_by(at.pp_rank):
        wanted = whole[tensor.name].detach()
        expected = wanted if tensor.shard is None else tensor.shard.apply(wanted, at.tp_rank)
        if tensor.name not in ours or bits_that_differ(ours[tensor.name], expected):
            wrong.append(tensor.name)
    return judge(name, len(wrong), 0, wrong[0] if wrong else detail)


def _compare_plain(trial: Trial, loaded: nn.Module) -> Row:
    whole, ours = trial.reference.state_dict(), loaded.state_dict()
    missing = torch.empty(0)
    wrong = [name for name in {**whole, **ours} if bits_that_differ(ours.get(name, missing), whole.get(name, missing))]
    return judge(_PLAIN, len(wrong), 0, wrong[0] if wrong else "")
