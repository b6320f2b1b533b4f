"""The methods a model class gains: loading and saving split, what lives on this rank, fusing, and a forward that runs split."""

from __future__ import annotations

import copyreg
import functools
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from oslo_engine.assemble import check_micro_batch_size
from oslo_engine.checkpoint.save import save_merged, save_split
from oslo_engine.comm.mpu import ModelParallelUnit
from oslo_engine.construct import initialize_parallel, load_parallel
from oslo_engine.deploy.settings import Deployment
from oslo_engine.deployed import load_deployed
from oslo_engine.errors import UnsupportedError
from oslo_engine.fusion.fuse import fuse, fusion_report, unfuse
from oslo_engine.fusion.report import FusionReport
from oslo_engine.generation.agreement import Agreement
from oslo_engine.generation.choices import agree_on_beams, with_choice
from oslo_engine.generation.groups import check_groups
from oslo_engine.generation.ngrams import fused_ngram_blocking, use_fused_ngram_blocking
from oslo_engine.generation.proposals import agree_on_proposals
from oslo_engine.generation.run import run_generate
from oslo_engine.generation.stopping import AgreedCriteria
from oslo_engine.integrations.adapter_files import save_adapters
from oslo_engine.integrations.deepspeed import meet_engine
from oslo_engine.integrations.peft import (
    has_adapters,
    meet_adapters,
    refuse_adapters,
    refuse_new_prompts,
    refuse_saving_alone,
)
from oslo_engine.pipeline.forward import run_forward, train_step
from oslo_engine.placement.place import Placement, lift, place, placement_of
from oslo_engine.rewrite.state import ParallelState, parallel_state


class ParallelConstructors:
    """Class methods that build a model split. For model classes, and for Auto classes, which pick one by the config."""

    @classmethod
    def from_pretrained_with_parallel(
        cls, pretrained_model_name_or_path: Any, *, deployment: bool | Deployment = False, **kwargs: Any
    ) -> Any:
        """This rank's slice of a checkpoint; see ``oslo_engine.construct.load_parallel`` for the arguments.

        With ``deployment`` (True, or a ``Deployment`` with settings), in an ordinary Python process: a ``DeployedModel``, whose
        slices are loaded by workers that it starts on this machine.
        """
        if deployment:
            return load_deployed(cls, pretrained_model_name_or_path, with_parallel_methods, deployment, **kwargs)
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

    is_parallelizable = True

    def parallelize(self, device_map: Any = "balanced", **options: Any) -> Any:
        """Put the model's parts on several devices of this process; see ``oslo_engine.parallelize`` for maps and options."""
        return place(self.gpu_modules(), device_map, with_parallel_methods(type(self)), **options)  # type: ignore[arg-type]

    def deparallelize(self) -> Any:
        """Undo ``parallelize``: the model lies on the devices it came from, and is of the class it was of."""
        return lift(self.gpu_modules())

    @property
    def device_map(self) -> dict[str, torch.device] | None:
        """The device of every part of a model that has a device map."""
        placement = self._placement
        return None if placement is None else dict(placement.device_of)

    @property
    def model_parallel(self) -> bool:
        """Whether the model has a device map."""
        return self._placement is not None

    @property
    def _placement(self) -> Placement | None:
        return placement_of(self)

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        # What .to(), .cuda(), .half() of the model and of whatever wraps it come down to.
        if (placement := self._placement) is not None:
            placement.check_move(fn)
        return super()._apply(fn, *args, **kwargs)  # type: ignore[misc]

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

    def fuse(self, targets: Any = None) -> Any:
        """Let kernels compute what they can of this model; see ``fusion_report`` for what was replaced and what was left.

        Args:
            targets: None for everything; "mlp", "attention", "norm", "loss"; classes of modules, such as ``oslo.GPT2MLP``; or a
                list of these.

        Returns:
            The model.

        Raises:
            FusionTargetError: a target that the model does not have.

        Communication: none; every rank of a split model calls it with the same targets.
        """
        fuse(self.gpu_modules(), targets)
        return self

    def unfuse(self) -> Any:
        """Take back what ``fuse`` did. Returns the model."""
        unfuse(self.gpu_modules())
        return self

    @property
    def fusion_report(self) -> FusionReport | None:
        """Of the last ``fuse``: print it, or read ``replaced``, ``left`` and ``counts``. None while nothing is fused."""
        return fusion_report(self.gpu_modules())

    def save_pretrained_with_parallel(self, save_directory: Any, save_with_merging: bool = False, **kwargs: Any) -> None:
        """Save split (one file per rank, for any later layout), or merged (an ordinary Transformers checkpoint).

        Args:
            save_directory: a folder all ranks can write to.
            save_with_merging: whether to write what the unsplit model's ``save_pretrained`` would.
            kwargs: of ``save_pretrained``: ``max_shard_size``, ``safe_serialization``, ``save_function``, ...

        With adapters of PEFT around its modules the model saves these, in the files that PEFT's ``save_pretrained`` writes, and
        takes its ``selected_adapters`` and ``save_embedding_layers``.

        Communication: collective; every rank must call it.
        """
        with self._parallel.mesh.calls.call("saving"):
            if has_adapters(self.gpu_modules()):
                if save_with_merging:
                    refuse_adapters(self.gpu_modules(), "save_pretrained_with_parallel(save_with_merging=True)")
                return save_adapters(self.gpu_modules(), save_directory, **kwargs)
            (save_merged if save_with_merging else save_split)(self.gpu_modules(), save_directory, **kwargs)

    @property
    def peft_config(self) -> Any:
        """The adapters of PEFT in this model by name; PEFT sets it when they are there, and deletes it when they are not."""
        if "peft_config" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no adapters")
        return self.__dict__["peft_config"]

    @peft_config.setter
    def peft_config(self, configs: Any) -> None:
        self.__dict__["peft_config"] = configs
        if "_oslo" in self.__dict__:
            meet_adapters(self.gpu_modules())

    @peft_config.deleter
    def peft_config(self) -> None:
        del self.__dict__["peft_config"]
        if "_oslo" in self.__dict__:
            self._parallel.set_adapters((), ())

    def get_submodule(self, target: str) -> nn.Module:
        if "_oslo" in self.__dict__:
            refuse_new_prompts(self.gpu_modules(), sys._getframe(1))
        return super().get_submodule(target)  # type: ignore[misc, no-any-return]

    def __getstate__(self) -> Any:
        """What says that a split model cannot be pickled comes first, before modules that could not say it so well."""
        state = dict(self.__dict__)
        return {"_oslo": state.pop("_oslo"), **state} if "_oslo" in state else state

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if "_oslo" in self.__dict__:
            refuse_saving_alone(self.gpu_modules(), sys._getframe(1))
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

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

    def generate(
        self, *args: Any, fused_no_repeat_ngram_blocking: bool = False, decode_groups: int | None = None, **kwargs: Any
    ) -> Any:
        """Transformers' ``generate``, on every rank at once: with the same inputs, and the same tokens on every rank.

        Args:
            args, kwargs: of ``generate``.
            fused_no_repeat_ngram_blocking: block repeated n-grams (``no_repeat_ngram_size``) by a kernel. The tokens are the
                same.
            decode_groups: into how many groups of rows a pipeline deals the batch, so that its stages compute at the same time;
                by default, in greedy and beam search, one for each stage but none of fewer than 16 rows.
        """
        with fused_ngram_blocking(fused_no_repeat_ngram_blocking):
            if "_oslo" not in self.__dict__ or self._parallel.mesh.model.size == 1:
                check_groups(decode_groups, pipeline=False)
                return super().generate(*args, **kwargs)  # type: ignore[misc]
            return run_generate(self, super().generate, args, kwargs, decode_groups)  # type: ignore[misc]

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

    def _get_static_cache_init_shape(self) -> Any:
        """None, so that every layer of a static cache is made when it is first used: Transformers would ask the config for the
        heads, the layers and the device, and here they are those of this rank, or lie where the blocks lie."""
        if "_oslo" in self.__dict__ or self._placement is not None:
            return None
        return super()._get_static_cache_init_shape()  # type: ignore[misc]

    def _get_logits_processor(self, generation_config: Any, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        processors = super()._get_logits_processor(generation_config, *args, **kwargs)  # type: ignore[misc]
        use_fused_ngram_blocking(processors)
        agreement = self._agreement
        return processors if agreement is None else with_choice(processors, agreement, generation_config)

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> StoppingCriteriaList:
        criteria = super()._get_stopping_criteria(*args, **kwargs)  # type: ignore[misc]
        return criteria if self._agreement is None else AgreedCriteria(criteria, self._agreement)

    def _get_top_k_continuations(self, **kwargs: Any) -> Any:
        found = super()._get_top_k_continuations(**kwargs)  # type: ignore[misc]
        return found if self._agreement is None else agree_on_beams(self, self._agreement, found, kwargs)

    def _get_candidate_generator(self, *args: Any, logits_processor: Any, **kwargs: Any) -> Any:
        agreement = self._agreement
        if agreement is None:
            return super()._get_candidate_generator(*args, logits_processor=logits_processor, **kwargs)  # type: ignore[misc]
        plain = logits_processor.without_choice()  # it is also asked which proposals are allowed at all
        generator = super()._get_candidate_generator(*args, logits_processor=plain, **kwargs)  # type: ignore[misc]
        return agree_on_proposals(generator, agreement)

    @property
    def _agreement(self) -> Agreement | None:
        return self._parallel.agreement if "_oslo" in self.__dict__ else None

    @property
    def _parallel(self) -> ParallelState:
        return parallel_state(self)  # type: ignore[arg-type]


class _Made(type):
    """Of the classes made below. Their names lead to the classes behind them, so pickle must be told how to make them again."""


def _behind(made: Any) -> Any:
    return next(base for base in made.__mro__ if not issubclass(base, ParallelConstructors))


@cache
def with_parallel_methods(cls: type) -> type:
    """The subclass of a model class (or Auto class) that has the methods above; of the same name, one per class."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    if issubclass(cls, ParallelConstructors):
        return cls
    if not issubclass(cls, PreTrainedModel):
        return _Made(cls.__name__, (ParallelConstructors, cls), names)
    original = cls.forward

    @functools.wraps(original)  # generate() and Trainer read the signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "_oslo" not in self.__dict__:
            return original(self, *args, **kwargs)
        if has_adapters(self):
            meet_adapters(self)
        return run_forward(self, original, args, kwargs)

    return _Made(cls.__name__, (ParallelMethods, cls), {**names, "forward": forward})


def _how_to_make(made: Any) -> tuple[Any, tuple[Any]]:
    return with_parallel_methods, (_behind(made),)


copyreg.pickle(_Made, _how_to_make)  # type: ignore[arg-type]
