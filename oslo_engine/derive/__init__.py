"""``derive``: a policy for an architecture that nobody wrote one for, from what depends on what in a tiny model of it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from oslo_engine.derive.assemble import joined, make_policy, told_apart
from oslo_engine.derive.found import Findings
from oslo_engine.derive.regions import BlockSearch
from oslo_engine.derive.specimen import Specimen, observe
from oslo_engine.derive.stacks import Stack
from oslo_engine.derive.vocabulary import find_vocabulary
from oslo_engine.derive.write import policy_text
from oslo_engine.errors import OsloError, PolicyError
from oslo_engine.plan.match import match_policy
from oslo_engine.policy.schema import Policy
from oslo_engine.tiny.sizes import Sizes
from oslo_engine.tiny.subject import Subject

__all__ = ["Derived", "derive"]

_HEADS, _MOST_APART = 8, 3
# Eight heads show layouts in blocks of several heads; fewer KV heads than ranks show what follows their ratio.
_SIZES = (Sizes(heads=_HEADS, kv_heads=2), Sizes(heads=_HEADS), Sizes())
_OTHER_SIZES = (Sizes(heads=6, kv_heads=3), Sizes(heads=6))
_NUM_BLOCKS = 4
_TP = (2, 3, 4)


@dataclass(frozen=True)
class Derived:
    """policy: a proposal until ``verify`` has run it. yaml: the same, with what was seen. notes: what could not be decided."""

    policy: Policy
    yaml: str
    notes: tuple[str, ...]


def derive(subject: Subject) -> Derived:
    """Find out how an architecture may be split.

    Args:
        subject: an architecture; only tiny models of it are built.

    Raises:
        UnsupportedError: no tiny model can be built or run.
        PolicyError: its blocks are not found, or what was found contradicts itself.
    """
    with torch.random.fork_rng(devices=[]):
        first, small = _first(subject)
        specimens = [(first, True), *_others(subject, small)]
        return _derive(subject, specimens)


def _derive(subject: Subject, specimens: Sequence[tuple[Specimen, bool]]) -> Derived:
    first = specimens[0][0]
    if not first.stacks:
        raise PolicyError("no list of blocks runs in the model's forward", where=subject.name)
    findings = Findings()
    truths = {}
    for kind in first.kinds:
        search = BlockSearch(specimens, kind, findings)
        search.run()
        truths[kind] = search.truth
    regions = told_apart(joined(findings.regions, truths), truths)
    stacks = _labelled(first)
    model_type = subject.config.model_type
    first.use(0)
    policy = make_policy(model_type, model_type, first.model, stacks, regions, find_vocabulary(first.model), findings)
    notes = []
    for tp in _TP:
        try:
            match_policy(first.model, policy, tp)
        except OsloError as error:
            notes.append(f"tp={tp}: {error.what}")
    evidence = dict(zip(policy.regions, (one.told for one in regions), strict=True))
    said = [
        f"Derived from tiny models of {subject.name}: what entries each feature depends on, in {len(first.runs)} runs of other",
        f"weights and lengths, and {len(specimens)} models on which each rank's part was tried alone (tp 2, 3; at one size 4).",
        "A proposal until `oslo-engine verify` has run it.",
        *(f"Not decided: {note}" for note in notes),
    ]
    return Derived(policy, policy_text(policy, evidence, said), tuple(notes))


def _first(subject: Subject) -> tuple[Specimen, Subject]:
    """The model to look into, of the first sizes that the architecture takes."""
    for last, sizes in enumerate(_SIZES, 1):
        try:
            small = subject.shrunk(sizes, num_blocks=_NUM_BLOCKS)
            return observe(small), small
        except Exception:
            if last == len(_SIZES):
                raise
    raise AssertionError


def _others(subject: Subject, small: Subject) -> list[tuple[Specimen, bool]]:
    """Models to try on: with another attention, of another size, and with numbers that happen to be equal made unequal."""
    found: list[tuple[Specimen, bool]] = []
    with contextlib.suppress(Exception):  # it may have only one attention
        found.append((observe(small, seeds=(0,), attention="sdpa"), True))
    for sizes in _OTHER_SIZES:
        with contextlib.suppress(Exception):  # the architecture may have no such size
            found.append((observe(subject.shrunk(sizes, num_blocks=_NUM_BLOCKS), seeds=(0,)), False))
            break
    for apart in _apart(small):
        with contextlib.suppress(Exception):  # they may have to be equal
            found.append((observe(apart, seeds=(0,)), False))
    return found


def _apart(small: Subject) -> Iterator[Subject]:
    """For each number of the config that is that of the heads: the same with this one halved."""
    names = [name for name, value in vars(small.config).items() if value == _HEADS and isinstance(value, int)]
    for name in names[:_MOST_APART] if len(names) > 1 else ():
        config = copy.deepcopy(small.config)
        setattr(config, name, _HEADS // 2)
        yield dataclasses.replace(small, config=config)


def _labelled(specimen: Specimen) -> dict[str, Stack]:
    """Stacks by name: the last one is the decoder's where later tokens do not matter to earlier ones."""
    stacks = specimen.stacks
    last = "encoder" if not specimen.is_causal() else "decoder"
    if len(stacks) == 1:
        return {last: stacks[0]}
    if len(stacks) == 2 and last == "decoder":
        return {"encoder": stacks[0], "decoder": stacks[1]}
    return {_label(stack, at): stack for at, stack in enumerate(stacks)}


def _label(stack: Stack, at: int) -> str:
    words = [word for word in stack.pattern.split(".") if word != "*"]
    return f"{words[-1]}_{at}"
