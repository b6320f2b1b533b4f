"""The methods a model class gains: loading and saving split, what lives on this rank, and a forward that runs split."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

from torch import Tensor, nn
from transformers import LogitsProcessorList, PreTrainedModel

from oslo_engine.assemble import check_micro_batch_size
from oslo_engine.checkpoint.save import save_merged, save_split
from oslo_engine.comm.mpu import ModelParallelUnit
from oslo_engine.construct import initialize_parallel, load_parallel
from oslo_engine.errors import UnsupportedError
from oslo_engine.generation.agreement import AgreeOnTokens, refuse_what_ranks_cannot_agree_on
from oslo_engine.integrations.deepspeed import meet_engine
from oslo_engine.integrations.peft import refuse_adapters
from oslo_engine.pipeline.forward import run_forward, train_step
from oslo_engine.rewrite.state import ParallelState, parallel_state


class ParallelConstructors:
    """Class methods that build a model split. For model classes, and for Auto classes, which pick one by the config."""

    @classmethod
    def from_pretrained_with_parallel(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """This rank's slice of a checkpoint; see ``oslo_engine.construct.load_parallel`` for the arguments."""
        return load_parallel(cls, pretrained_model_name_or_path, with_parallel_methods, **kwargs)

    @classmethod
    def from_config_with_parallel(cls, config: Any, **kwargs: Any) -> Any:
        """This rank's slice of a randomly initialised model; see ``oslo_engine.construct.initialize_parallel``."""
        return initialize_parallel(cls, config, with_parallel_methods, **kwargs)


class ParallelMethods(ParallelConstructors):
    """Mixed in before a PreTrainedModel class. An instance that was not parallelized behaves as its class does."""

    @property
    def mpu(self) -> ModelParallelUnit:
        """Groups, sizes and ranks on each axis, under Megatron's and DeepSpeed's names."""
        return ModelParallelUnit(self._parallel.mesh)

    def gpu_modules(self) -> PreTrainedModel:
        """What lives on this rank, to hand to DistributedDataParallel or DeepSpeed: the model itself."""
        assert isinstance(self, PreTrainedModel)
        return self

    def gpu_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that live on this rank, for an optimizer."""
        return self.gpu_modules().parameters()

    def set_micro_batch_size(self, micro_batch_size: int) -> None:
        """Rows of a micro-batch from the next batch on."""
        check_micro_batch_size(micro_batch_size)
        self._parallel.micro_batch_size = micro_batch_size

    def train_step(self, batch: dict[str, Any]) -> Tensor:
        """Forward and backward of one batch; gradients are added to ``parameter.grad``.

        Args:
            batch: the arguments of forward, with labels; the same on every rank of one copy of the model.

        Returns:
            The batch's loss, a detached scalar, the same on every rank of one copy of the model.

        Communication: with data parallelism, gradients are averaged over dp at the end.
        """
        return train_step(self.gpu_modules(), batch)

    def save_pretrained_with_parallel(self, save_directory: Any, save_with_merging: bool = False, **kwargs: Any) -> None:
        """Save split (one file per rank, for any later layout), or merged (an ordinary Transformers checkpoint).

        Args:
            save_directory: a folder all ranks can write to.
            save_with_merging: whether to write what the unsplit model's ``save_pretrained`` would.
            kwargs: of ``save_pretrained``: ``max_shard_size``, ``safe_serialization``, ``save_function``, ...

        Communication: collective; every rank must call it.
        """
        (save_merged if save_with_merging else save_split)(self.gpu_modules(), save_directory, **kwargs)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        if "_oslo" in self.__dict__ and self._parallel.plan.topology.tp * self._parallel.plan.topology.pp > 1:
            raise UnsupportedError(
                "save_pretrained would write one rank's slice as if it were the model",
                hint="call save_pretrained_with_parallel(folder, save_with_merging=True) on every rank",
            )
        return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        if "_oslo" in self.__dict__ and new_num_tokens is not None and self._parallel.plan.topology.world_size > 1:
            raise UnsupportedError(
                "a split model cannot be resized",
                hint="pass resize_token_embeddings=N to from_pretrained_with_parallel, or resize before parallelize",
            )
        return super().resize_token_embeddings(new_num_tokens, *args, **kwargs)  # type: ignore[misc]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Transformers' ``generate``, on every rank at once: with the same inputs, and the same tokens on every rank."""
        if "_oslo" not in self.__dict__ or self._parallel.mesh.model.size == 1:
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        program = self._parallel.program
        refuse_what_ranks_cannot_agree_on(self, kwargs, pipeline=program is not None)
        agreements = self._parallel.agreements
        agreements.clear()
        try:
            with program.generating() if program is not None else nullcontext():
                output = super().generate(*args, **kwargs)  # type: ignore[misc]
        finally:
            last = agreements.pop() if agreements else None
            agreements.clear()
        if last is not None and last.seen is not None:
            output["scores"] = tuple(last.seen)
        return output

    def set_deepspeed_parallelism(self, *args: Any) -> None:
        """DeepSpeed calls this while it builds an engine around the model."""
        if "_oslo" in self.__dict__:
            meet_engine(self.gpu_modules(), sys._getframe(1))

    def get_encoder(self, *args: Any, **kwargs: Any) -> Any:
        encoder = super().get_encoder(*args, **kwargs)  # type: ignore[misc]
        state = self.__dict__.get("_oslo")
        if state is None or state.program is None or state.switch.current is not None or encoder is self:
            return encoder
        return state.program.callable_part(encoder)

    def _get_logits_processor(self, generation_config: Any, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        processors = super()._get_logits_processor(generation_config, *args, **kwargs)  # type: ignore[misc]
        if "_oslo" in self.__dict__ and self._parallel.mesh.model.size > 1:
            plan = self._parallel.plan
            source = plan.rank_of_stage[-1] * plan.topology.tp
            processors.append(AgreeOnTokens(self._parallel.mesh.model, source, generation_config))
            self._parallel.agreements.append(processors[-1])
        return processors

    @property
    def _parallel(self) -> ParallelState:
        return parallel_state(self)  # type: ignore[arg-type]


@cache
def with_parallel_methods(cls: type) -> type:
    """The subclass of a model class (or Auto class) that has the methods above; of the same name, one per class."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    if issubclass(cls, ParallelConstructors):
        return cls
    if not issubclass(cls, PreTrainedModel):
        return type(cls.__name__, (ParallelConstructors, cls), names)
    original = cls.forward

    @functools.wraps(original)  # generate() and Trainer read the signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "_oslo" not in self.__dict__:
            return original(self, *args, **kwargs)
        if self._parallel.plan.topology.tp > 1:
            refuse_adapters(self, "the model's forward")
        return run_forward(self, original, args, kwargs)

    return type(cls.__name__, (ParallelMethods, cls), {**names, "forward": forward})
