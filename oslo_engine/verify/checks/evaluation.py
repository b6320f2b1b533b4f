"""Are all parameters where they belong, and does a forward give the same numbers?"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from oslo_engine.verify.checks.check import Check
from oslo_engine.verify.compare import bits_that_differ, relative_error, without_padding
from oslo_engine.verify.report import Row, judge
from oslo_engine.verify.trial import Trial, gather_objects

_PLACED = "parameters in place"
_LOGITS, _LOSS = "logits, evaluation", "loss, evaluation"


def placement_check(trial: Trial) -> Check:
    return Check((_PLACED,), _place)


def evaluation_check(trial: Trial) -> Check:
    return Check((_LOGITS, _LOSS), _evaluate)


def _place(trial: Trial) -> Iterator[Row]:
    """Every rank holds the entries that the plan says, and together the ranks hold every parameter."""
    whole = dict(trial.reference.named_parameters())
    wrong = [
        name
        for name, parameter, tensor in trial.parameters()
        if bits_that_differ(parameter, trial.slice_of(whole[name], tensor))
    ]
    held = {name for names in gather_objects([name for name, _, _ in trial.parameters()]) for name in names}
    missing = [name for name in whole if name not in held]
    detail = [f"{name} is wrong" for name in wrong[:1]] + [f"{name} is on no rank" for name in missing[:1]]
    yield judge(_PLACED, len(wrong) + len(missing), 0, ", ".join(detail))


def _evaluate(trial: Trial) -> Iterator[Row]:
    # Without a cache, which nothing here goes on from: some models compute other numbers with one.
    takes_cache = "use_cache" in inspect.signature(trial.reference.forward).parameters
    batch: dict[str, Any] = {**trial.batch(trial.shapes[0]), **({"use_cache": False} if takes_cache else {})}
    trial.reference.eval()
    trial.model.eval()
    with torch.no_grad():
        wanted, got = trial.reference(**batch), trial.model(**batch)
    ours, theirs = got.logits, wanted.logits
    if ours.shape == theirs.shape:
        ours, theirs = without_padding(ours, batch), without_padding(theirs, batch)
    yield judge(_LOGITS, relative_error(ours, theirs), trial.limits.logits)
    yield judge(_LOSS, relative_error(got.loss, wanted.loss), trial.limits_for(wanted.loss).loss)
