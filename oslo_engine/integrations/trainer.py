"""Transformers' Trainer and its subclasses for a split model: ``from oslo_engine import Trainer``.

The training loop, logging, evaluation and callbacks are Transformers' own. With a split model data is divided
among copies of the model and not among ranks, a pipeline hands out micro-batches, the gradient norm and a checkpoint concern
all ranks. A model that is not parallelized is trained as ever.
"""

from __future__ import annotations

import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

from oslo_engine.checkpoint.resume import load_training
from oslo_engine.checkpoint.skeleton import transformers_class
from oslo_engine.checkpoint.training import save_training
from oslo_engine.errors import UnsupportedError
from oslo_engine.integrations.accelerate import adopt
from oslo_engine.integrations.peft import has_adapters
from oslo_engine.pipeline.loss_check import divides_by_count, outer_loss
from oslo_engine.pipeline.outer_loss import OuterLoss
from oslo_engine.rewrite.optimizers import check_optimizer
from oslo_engine.rewrite.skeleton import skeleton
from oslo_engine.rewrite.state import ParallelState, parallel_state, split_model_in


@cache
def trainer_for_split_models(cls: type) -> type:
    """The subclass of a Trainer class that also trains split models; of the same name, one per class."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (SplitTraining, cls), names)


class SplitTraining:
    """Mixed in before ``transformers.Trainer``. Every rank of the job makes one and makes the same calls."""

    model: Any
    args: Any
    _oslo_loss: Any = None  # a compute_loss_func, and how it is put together from micro-batches

    @property
    def _split(self) -> Any:
        """The split model in what this trainer trains; None if there is none."""
        return split_model_in(self.model) if isinstance(self.model, nn.Module) else None

    @property
    def _parallel(self) -> ParallelState:
        return parallel_state(self._split)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._split is not None:
            self._check_launched()
        if self._split is not None and self.model_accepts_loss_kwargs:
            # Some models take num_items_in_batch and ignore it; Trainer would scale their loss by the number of copies.
            twin = skeleton(transformers_class(type(self._split)), self._split.config).train()
            self.model_accepts_loss_kwargs = divides_by_count(twin)

    def _check_launched(self) -> None:
        """Raises UnsupportedError where every rank takes itself for the first, and would log and write."""
        known = getattr(self.args.distributed_state, "num_processes", 1)
        if dist.is_initialized() and known != dist.get_world_size():
            raise UnsupportedError(
                "TrainingArguments do not know that this is one of several processes",
                where=f"{type(self).__name__}, rank {dist.get_rank()}",
                expected=f"{dist.get_world_size()} processes",
                got=str(known),
                hint="without a GPU pass use_cpu=True; and start the script with torchrun or accelerate launch",
            )

    def create_accelerator_and_postprocess(self: Any) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if self._split is not None:
            adopt(self.accelerator, self._split)
            self.gather_function = self.accelerator.gather_for_metrics

    # Sizes: a "process" that has data of its own is a copy of the model

    def get_tp_size(self) -> int:
        return 1 if self._split is not None else super().get_tp_size()  # type: ignore[misc]

    def get_total_train_batch_size(self: Any, args: Any) -> int:
        if self._split is None:
            return super().get_total_train_batch_size(args)  # type: ignore[misc]
        return self._train_batch_size * args.gradient_accumulation_steps * self._parallel.mesh.dp.size

    # Training

    def create_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, asked before the first batch whether it fits a split model."""
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if self._split is not None:
            check_optimizer(optimizer)
        return optimizer

    def training_step(
        self: Any, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        if self._split is None or self._parallel.program is None:
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        if type(self).compute_loss is not sys.modules["transformers"].Trainer.compute_loss:
            raise UnsupportedError(
                "a pipeline computes the loss stage by stage, so a Trainer's own compute_loss is not called there",
                where=type(self).__name__,
                hint="pass compute_loss_func=..., set model.loss_function before parallelize, or use pp=1",
            )
        model.train()
        inputs = self._prepare_inputs(inputs)
        counted = (self.model_accepts_loss_kwargs or self.compute_loss_func is not None) and num_items_in_batch is not None
        scale = 1.0 if counted or self.compute_loss_func is not None else 1.0 / self.current_gradient_accumulation_steps
        if counted:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
            scale *= self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        with self.compute_loss_context_manager(), self._parallel.program.loss_from(self._outer_loss(inputs)):
            micros = model(**inputs)
        total = torch.zeros((), device=self.args.device)
        for micro in micros:
            loss = micro.loss * scale
            self.accelerator.backward(loss)
            total += loss.detach()
        return total

    def _outer_loss(self: Any, inputs: dict[str, Any]) -> OuterLoss | None:
        """What ``compute_loss`` does with the output of the model, where it does not take the model's own loss."""
        if "labels" not in inputs:
            return None
        if self.compute_loss_func is not None:
            return self._loss_of(self.compute_loss_func)
        if self.label_smoother is None:
            return None
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        shift = transformers_class(type(self._split)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

        def smoothed(output: Any, labels: Tensor, count: Any) -> Any:
            return self.label_smoother(output, labels, shift_labels=shift, num_items_in_batch=count)

        return OuterLoss(smoothed, shift, divides_by_count=True)

    def _loss_of(self: Any, function: Any) -> OuterLoss:
        if self._oslo_loss is None or self._oslo_loss[0] is not function:

            def compute(output: Any, labels: Tensor, count: Any) -> Any:
                return function(output, labels, num_items_in_batch=count)

            self._oslo_loss = function, outer_loss(self._parallel.program.flows.twin.train(), compute)
        found: OuterLoss = self._oslo_loss[1]
        return found

    # Checkpoints

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """What is asked for by the user is written merged; a checkpoint to go on from is split, with all else beside it."""
        if self._split is None:
            return super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        folder = output_dir or self.args.output_dir
        adapters = has_adapters(self._split)
        if adapters:
            self._split.save_pretrained_with_parallel(folder)
        if _internal_call and not self.args.save_only_model:
            save_training(folder, self._split, self.optimizer.optimizer, **self._objects())
        elif not adapters:
            self._split.save_pretrained_with_parallel(folder, save_with_merging=not _internal_call)
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, Path(folder) / "training_args.bin")
        return None

    def _objects(self: Any) -> dict[str, Any]:
        scaler = self.accelerator.scaler
        return {"scheduler": self.lr_scheduler} | ({} if scaler is None else {"scaler": scaler})

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._split is None:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _save_scaler(self, output_dir: str) -> None:
        if self._split is None:
            super()._save_scaler(output_dir)  # type: ignore[misc]

    def _save_rng_state(self, output_dir: str) -> None:
        if self._split is None:
            super()._save_rng_state(output_dir)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._split is None:  # a split model is loaded with its optimizer, which is not there yet
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        if self._split is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        elif checkpoint is not None:
            load_training(checkpoint, self._split, self.optimizer.optimizer, **self._objects())
            self._oslo_generators = random.getstate(), numpy.random.get_state(), torch.get_rng_state()

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._split is None:
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Again as the checkpoint had them: skipping the batches that it had seen has drawn numbers."""
        if self._split is None:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
        elif checkpoint is not None:
            python, of_numpy, of_torch = self._oslo_generators
            random.setstate(python)
            numpy.random.set_state(of_numpy)
            torch.set_rng_state(of_torch)

    def _load_best_model(self: Any) -> None:
        if self._split is None:
            super()._load_best_model()  # type: ignore[misc]
        else:
            load_training(self.state.best_model_checkpoint, self._split)
