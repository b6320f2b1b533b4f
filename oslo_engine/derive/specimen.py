"""Tiny models to look at: their blocks, and one call of each kind of block."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from oslo_engine.derive.calls import Call, forget_graph, observed
from oslo_engine.derive.stacks import Stack, find_stacks
from oslo_engine.errors import UnsupportedError
from oslo_engine.tiny.batches import Shape, make_batch, vocab_size
from oslo_engine.tiny.fill import fill
from oslo_engine.tiny.subject import Subject

# Two rows, so that a batch's dimension is none of the heads'; lengths that no window or chunk of a tiny model divides.
SHAPES = (Shape(2, 9, 7), Shape(2, 13, 11))


@dataclass(frozen=True)
class Kind:
    """Blocks that are alike: their names, the first of them stands for all."""

    blocks: tuple[str, ...]

    @property
    def block(self) -> str:
        return self.blocks[0]


@dataclass
class Specimen:
    """A model in float64 with random weights, and what its blocks were called with in a run of the whole.

    seeds: of the weights in each run.
    runs: for each of them, block -> its call.
    """

    model: PreTrainedModel
    stacks: tuple[Stack, ...]
    kinds: tuple[Kind, ...]
    seeds: tuple[int, ...]
    runs: tuple[dict[str, Call], ...]

    def block(self, name: str) -> nn.Module:
        return self.model.get_submodule(name)

    def is_causal(self) -> bool:
        """Whether a text's last token leaves the logits of those before it as they are."""
        self.use(0)
        batch = _unpadded_batch(self.model, Shape(1, 6, 6), micro_batch_size=1, seed=0)
        tokens = "decoder_input_ids" if self.model.config.is_encoder_decoder else "input_ids"
        outputs = []
        for shift in (0, 1):
            ids = batch[tokens].clone()
            ids[:, -1] = (ids[:, -1] + shift) % vocab_size(self.model.config)
            with torch.no_grad():
                outputs.append(self.model(**batch | {tokens: ids}).logits)
        first, second = outputs
        return bool((first[:, 0] - second[:, 0]).abs().max() <= 1e-6 * first.abs().max())

    def use(self, number: int) -> dict[str, Call]:
        """Give the model the weights of a run; the calls in it."""
        fill(self.model, self.seeds[number])
        return self.runs[number]


def build(
    subject: Subject, attention: str | None = "eager", seed: int = 0, dtype: torch.dtype = torch.float64
) -> PreTrainedModel:
    """
    Raises:
        UnsupportedError: the class cannot build a model from this config.
    """
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        own = dataclasses.replace(subject, config=copy.deepcopy(subject.config))
        model = own.build(lambda cls, config, **more: cls._from_config(config, **more), dtype=torch.float32, **options)
    fill(model, seed)
    for module in model.modules():  # grouped matrix products know no float64
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"
    return model.to(dtype).eval()


def run(model: PreTrainedModel, shape: Shape, seed: int) -> Any:
    """A forward with labels and without a cache."""
    batch: dict[str, Any] = _unpadded_batch(model, shape, micro_batch_size=2, seed=seed)
    if getattr(model.config, "use_cache", None):
        batch["use_cache"] = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            outputs = model(**batch)
        except Exception as error:  # whatever a class raises that reads something else than text
            raise UnsupportedError(
                "the class does not run on text alone", where=type(model).__name__, got=str(error).partition("\n")[0]
            ) from error
    forget_graph(model)
    return outputs


def _unpadded_batch(model: PreTrainedModel, shape: Shape, *, micro_batch_size: int, seed: int) -> dict[str, torch.Tensor]:
    """Rows that attend to nothing are no numbers in float64."""
    batch = make_batch(model.config, shape, micro_batch_size=micro_batch_size, seed=seed, model=model)
    if "attention_mask" in batch:
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    return batch


def observe(subject: Subject, *, seeds: Sequence[int] = (0, 1), attention: str | None = "eager") -> Specimen:
    """Build a model and run it with several weights and lengths.

    Raises:
        UnsupportedError: it cannot be built, or does not run.
    """
    runs: list[dict[str, Call]] = []
    model = build(subject, attention)
    try:
        run(model, SHAPES[0], 0)
    except RuntimeError:  # some operations know no float64
        model = build(subject, attention, dtype=torch.float32)
    stacks = find_stacks(model, lambda: run(model, SHAPES[0], 0))
    blocks = {name: model.get_submodule(name) for stack in stacks for name in stack.blocks}
    for number, seed in enumerate(seeds):
        fill(model, seed)
        with observed(blocks) as calls:
            run(model, SHAPES[number % len(SHAPES)], seed)
        runs.append(calls)
    fill(model, 0)
    return Specimen(model, stacks, _kinds(blocks, runs[0]), tuple(seeds), tuple(runs))


def _kinds(blocks: dict[str, nn.Module], calls: dict[str, Call]) -> tuple[Kind, ...]:
    """Blocks with the same parameters, settings and arguments are of one kind."""
    found: dict[Any, list[str]] = {}
    for name, block in blocks.items():
        if name in calls:
            found.setdefault((_signature(block), _arguments(calls[name]), _parent(name)), []).append(name)
    return tuple(Kind(tuple(names)) for names in found.values())


def _parent(name: str) -> str:
    return ".".join(word for word in name.split(".") if not word.isdigit())


def _signature(block: nn.Module) -> Any:
    parameters = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
    settings = tuple(
        (path, name, value)
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, (bool, str)) and name != "training"
    )
    return type(block), parameters, settings


def _arguments(call: Call) -> Any:
    given = tuple(type(value).__name__ for value in call.args)
    return given, tuple(sorted((name, type(value).__name__) for name, value in call.kwargs.items()))
