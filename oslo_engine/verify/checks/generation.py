"""Does ``generate`` give the same tokens, on every rank?"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from oslo_engine.tiny.batches import make_inputs
from oslo_engine.verify.checks.check import Check
from oslo_engine.verify.report import Row, judge, not_applicable
from oslo_engine.verify.trial import Trial, gather_objects

_ROWS, _LENGTH, _NEW = 4, 9, 6
_BEAMS = {"generation, greedy": 1, "generation, 2 beams": 2}


def generation_check(trial: Trial) -> Check:
    why_not = None if trial.reference.can_generate() else "this class does not generate"
    return Check(tuple(_BEAMS), _generate, why_not)


def _generate(trial: Trial) -> Iterator[Row]:
    """Left-padded prompts. A token that one row meets half-way ends a text, so the rows end at different times."""
    generator = torch.Generator().manual_seed(trial.settings.seed)
    ids, mask = make_inputs(trial.config, _ROWS, _LENGTH, generator)
    trial.reference.eval()
    trial.model.eval()
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": _NEW}
    if "attention_mask" in inspect.signature(trial.reference.forward).parameters:
        options["attention_mask"] = mask
    reference: Any = trial.reference
    if trial.settings.pp > 1 and not reference._supports_default_dynamic_cache():
        options["use_cache"] = False
    end: int | None = None
    for name, beams in _BEAMS.items():
        try:
            if end is None:
                end = int(reference.generate(ids, **options)[1, -_NEW // 2])
            wanted = reference.generate(ids, num_beams=beams, eos_token_id=end, **options)
        except Exception as error:  # whatever a class raises that does not generate in this way, or not from text
            yield not_applicable(name, f"the unsplit model cannot: {error}".partition("\n")[0])
            continue
        got = trial.model.generate(ids, num_beams=beams, eos_token_id=end, **options)
        yield _judge_tokens(trial, name, got, wanted)


def _judge_tokens(trial: Trial, name: str, got: Tensor, wanted: Tensor) -> Row:
    """In 16 bits two tokens often have the same score, so there the ranks only have to agree among themselves."""
    everywhere = gather_objects(got.tolist())
    if any(tokens != everywhere[0] for tokens in everywhere):
        return judge(name, len({str(tokens) for tokens in everywhere}), 1, "different texts on the ranks")
    if trial.settings.dtype in ("bfloat16", "float16"):
        return judge(name, 0, 0, "the same on all ranks; in 16 bits ties differ from the unsplit model's")
    differing = max(got.numel(), wanted.numel()) if got.shape != wanted.shape else int((got != wanted).sum())
    return judge(name, differing, 0, f"of {wanted.numel()} tokens")
