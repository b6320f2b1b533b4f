"""On a rank: the unsplit model and its split copy, and what the checks need to compare them."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from oslo_engine.api import parallelize
from oslo_engine.errors import PlanError, UnsupportedError
from oslo_engine.plan.plan import TensorPlan
from oslo_engine.rewrite.state import parallel_state
from oslo_engine.tiny.batches import Shape, make_batch, pad_token, training_shapes
from oslo_engine.tiny.fill import fill
from oslo_engine.tiny.subject import Subject
from oslo_engine.verify.compare import LIMITS, Limits
from oslo_engine.verify.settings import Settings

Batch = dict[str, Tensor]


@dataclass
class Trial:
    """reference: the unsplit model. model: the split one, of the same weights. folder: empty, shared by all ranks."""

    subject: Subject
    settings: Settings
    folder: Path
    reference: PreTrainedModel
    model: Any

    @property
    def config(self) -> Any:
        return self.reference.config

    @property
    def limits(self) -> Limits:
        return LIMITS[self.settings.dtype]

    def limits_for(self, loss: Tensor) -> Limits:
        """Many models compute their loss in float32 at most: then it, and the gradients, are as accurate as that."""
        return LIMITS["float32"] if self.settings.dtype == "float64" and loss.dtype == torch.float32 else self.limits

    @property
    def shapes(self) -> tuple[Shape, Shape, Shape]:
        settings = self.settings
        multiple = settings.tp if settings.sequence_parallel else 1
        return training_shapes(pp=settings.pp, micro_batch_size=settings.micro_batch_size, multiple=multiple)

    def batch(self, shape: Shape, number: int = 0) -> Batch:
        seed = self.settings.seed * 1000 + number
        size = self.settings.micro_batch_size
        return make_batch(self.config, shape, micro_batch_size=size, seed=seed, model=self.reference)

    def split_again(self) -> Any:
        """Another split copy of the unsplit model. Collective."""
        return split(self.reference, self.settings)

    def parameters(self, model: Any = None) -> Iterator[tuple[str, nn.Parameter, TensorPlan]]:
        """(first name, this rank's slice, its plan) of every parameter of the split model (or another one) that lives here."""
        model = self.model if model is None else model
        plan = parallel_state(model).plan
        for name, parameter in model.named_parameters():
            tensor = plan.tensor(name)
            yield tensor.name, parameter, tensor

    def slice_of(self, whole: Tensor, tensor: TensorPlan) -> Tensor:
        """What this rank should hold of a whole tensor (a weight, or its gradient)."""
        tp_rank = parallel_state(self.model).mesh.at.tp_rank
        return whole.detach() if tensor.shard is None else tensor.shard.apply(whole.detach(), tp_rank)


def build_trial(subject: Subject, settings: Settings, tied: bool | None, folder: Path) -> Trial:
    """Build the unsplit model, fill it and split a copy. Collective.

    Raises:
        OsloError: the model cannot be split this way.
    """
    reference = subject.build(_construct, dtype=getattr(torch, settings.dtype), **settings.attention)
    if settings.dtype == "float64":
        use_eager_experts(reference)
    fill(reference, settings.seed)
    _check_ties(reference, tied)
    if reference.can_generate():
        reference.generation_config = _generation_config(reference.config)
    if settings.gradient_checkpointing and not reference.supports_gradient_checkpointing:
        raise UnsupportedError("this class knows no gradient checkpointing", where=subject.name)
    _check_runs(reference, settings)
    return Trial(subject, settings, folder, reference, split(reference, settings))


def _check_runs(reference: PreTrainedModel, settings: Settings) -> None:
    """Whether the unsplit model computes anything from text alone."""
    shape = training_shapes(pp=settings.pp, micro_batch_size=settings.micro_batch_size, multiple=1)[0]
    batch = make_batch(reference.config, shape, micro_batch_size=settings.micro_batch_size, seed=0, model=reference)
    try:
        with torch.no_grad():
            reference.eval()(**batch)
    except Exception as error:  # whatever a class raises that wants sound or pictures
        raise UnsupportedError(
            "the unsplit model does not run on text alone", where=type(reference).__name__, got=str(error).partition("\n")[0]
        ) from error


def use_eager_experts(model: nn.Module) -> None:
    """For float64, which the other implementations do not know."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"


def _construct(cls: Any, config: Any, **options: Any) -> Any:
    return cls._from_config(config, **options)


def split(reference: PreTrainedModel, settings: Settings) -> Any:
    """A split copy of a model. Collective."""
    model = parallelize(
        copy.deepcopy(reference),
        tp=settings.tp,
        pp=settings.pp,
        policy=settings.policy,
        schedule=settings.schedule,
        micro_batch_size=settings.micro_batch_size,
        sequence_parallel=settings.sequence_parallel,
        expert_split=settings.expert_split,
        fuse=settings.fuse or None,
        seed=settings.seed,
    )
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """The values of all ranks (of a group), in order; for one process its own."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def seed_everything(seed: int, rank: int) -> None:
    """Different on each rank, as in a careless training script: nothing may depend on it."""
    torch.manual_seed(seed + 1 + rank)
    random.seed(seed + 1 + rank)


def _check_ties(reference: PreTrainedModel, tied: bool | None) -> None:
    embedding, head = reference.get_input_embeddings(), reference.get_output_embeddings()
    if tied is not None and (embedding.weight is head.weight) != tied:
        raise PlanError(
            f"this class does not {'tie' if tied else 'untie'} its embedding and its head",
            where=type(reference).__name__,
            expected=f"tie_word_embeddings={tied} to be obeyed",
            got="tied" if not tied else "not tied",
        )


def _generation_config(config: Any) -> GenerationConfig:
    """Nothing ends a text but what a check asks for."""
    return GenerationConfig(
        pad_token_id=pad_token(config),
        bos_token_id=getattr(config, "bos_token_id", None),
        decoder_start_token_id=getattr(config, "decoder_start_token_id", None),
        do_sample=False,
    )
