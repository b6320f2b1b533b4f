"""Accelerate around a split model: ``Accelerator`` in which a "process" is a copy of the model.

    from oslo_engine import Accelerator                     # the rest of the script stays

    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(oslo.parallelize(model, tp=2), optimizer, loader)

Accelerate's own would give every rank other data and average gradients over all of them. Here the ranks of one copy get the
same data, copies share gradients through DistributedDataParallel, and metrics are gathered over copies.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.amp
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from oslo_engine.checkpoint.resume import load_training
from oslo_engine.checkpoint.training import save_training
from oslo_engine.comm.mpu import ModelParallelUnit
from oslo_engine.errors import MissingDependencyError, UnsupportedError
from oslo_engine.rewrite.gradients import clip_grad_norm_
from oslo_engine.rewrite.optimizers import check_optimizer
from oslo_engine.rewrite.scaler import GradScaler
from oslo_engine.rewrite.state import parallel_state, split_model_in

if TYPE_CHECKING:
    from accelerate import Accelerator


def accelerator_class() -> type[Accelerator]:
    """``accelerate.Accelerator`` for split models.

    Raises:
        MissingDependencyError: accelerate is not installed.
    """
    try:
        import accelerate
    except ImportError as error:
        raise MissingDependencyError(
            "Accelerator needs the package accelerate", got=str(error), hint="pip install 'oslo-engine[trainer]'"
        ) from None
    return _subclass(accelerate.Accelerator)


@cache
def _subclass(cls: type) -> type:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (SplitAccelerator, cls), names)


def adopt(accelerator: Any, model: nn.Module) -> None:
    """Let an accelerator that was made elsewhere work for a split model."""
    cls: Any = type(accelerator)
    accelerator.__class__ = _subclass(cls)
    accelerator.work_for(model)


class SplitAccelerator:
    """Mixed in before ``accelerate.Accelerator``; without a split model it changes nothing."""

    _oslo_model: Any = None

    def work_for(self: Any, model: nn.Module) -> None:
        """From now on this is the model whose copies are the processes.

        Raises:
            UnsupportedError: Accelerate was configured to divide the model in its own way.
        """
        if str(self.distributed_type) not in ("DistributedType.NO", "DistributedType.MULTI_CPU", "DistributedType.MULTI_GPU"):
            raise UnsupportedError(
                "Accelerate was configured to divide the model, which is split already",
                expected="plain data parallelism",
                got=str(self.distributed_type),
                hint="call deepspeed.initialize(..., mpu=model.mpu) or fully_shard yourself: see docs/training.md",
            )
        self._oslo_model = model
        if type(self.scaler) is torch.amp.GradScaler:
            self.scaler.__class__ = GradScaler  # what has been decided about it stays

    @property
    def _mpu(self) -> ModelParallelUnit | None:
        return None if self._oslo_model is None else ModelParallelUnit(parallel_state(self._oslo_model).mesh)

    @property
    def num_processes(self) -> int:
        """Copies of the model."""
        mpu = self._mpu
        return super().num_processes if mpu is None else mpu.get_data_parallel_world_size()  # type: ignore[misc]

    @property
    def process_index(self) -> int:
        """Which copy this rank holds a part of."""
        mpu = self._mpu
        return super().process_index if mpu is None else mpu.get_data_parallel_rank()  # type: ignore[misc]

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Accelerate's ``prepare``. Data loaders may come before the model, so it is looked for first."""
        for value in args:
            found = split_model_in(value) if isinstance(value, nn.Module) else None
            if found is not None:
                self.work_for(found)
        return super().prepare(*args, **kwargs)  # type: ignore[misc]

    def prepare_model(
        self: Any, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        if self._oslo_model is None or getattr(model, "_is_accelerate_prepared", False):
            prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)  # type: ignore[misc]
            return prepared
        prepared = super().prepare_model(model, device_placement, True)  # type: ignore[misc]
        if evaluation_mode or self.num_processes == 1 or not any(p.requires_grad for p in model.parameters()):
            return prepared
        options = self.ddp_handler.to_kwargs() if self.ddp_handler is not None else {}
        wrapped = DistributedDataParallel(prepared, process_group=self._mpu.get_data_parallel_group(), **options)
        wrapped._is_accelerate_prepared = True  # type: ignore[assignment]
        self._models[self._models.index(prepared)] = wrapped
        return wrapped

    def prepare_optimizer(self: Any, optimizer: Any, device_placement: bool | None = None) -> Any:
        if self._oslo_model is not None and not hasattr(optimizer, "optimizer"):  # one that is prepared wraps another
            check_optimizer(optimizer)
        return super().prepare_optimizer(optimizer, device_placement)  # type: ignore[misc]

    def clip_grad_norm_(self: Any, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        if self._oslo_model is None:
            norm: Tensor = super().clip_grad_norm_(parameters, max_norm, norm_type)  # type: ignore[misc]
            return norm
        self.unscale_gradients()
        return clip_grad_norm_(self._oslo_model, max_norm, norm_type)

    def gather(self, tensor: Any) -> Any:
        """The values of all copies, one after another. Communication: one all-gather of each tensor over dp."""
        if self._oslo_model is None:
            return super().gather(tensor)  # type: ignore[misc]
        return pytree.tree_map_only(Tensor, self._gather_one, tensor)

    def _gather_one(self, tensor: Tensor) -> Tensor:
        own = tensor.reshape(1) if tensor.ndim == 0 else tensor.contiguous()
        if self.num_processes == 1:
            return own
        parts = [torch.empty_like(own) for _ in range(self.num_processes)]
        dist.all_gather(parts, own, group=self._mpu.get_data_parallel_group())  # type: ignore[union-attr]
        return torch.cat(parts)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """As Accelerate's, over the copies."""
        if self._oslo_model is None:
            return super().reduce(tensor, reduction, scale)  # type: ignore[misc]

        def reduce_one(value: Tensor) -> Tensor:
            total = value.clone() * scale
            if self.num_processes > 1:
                dist.all_reduce(total, group=self._mpu.get_data_parallel_group())  # type: ignore[union-attr]
            return total / self.num_processes if reduction == "mean" else total

        return pytree.tree_map_only(Tensor, reduce_one, tensor)

    def save_state(self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As a training checkpoint of oslo_engine, for any later layout. Every rank calls it."""
        if self._oslo_model is None:
            return super().save_state(output_dir, *args, **kwargs)  # type: ignore[misc]
        save_training(output_dir, self._oslo_model, self._only_optimizer(), **self._others())
        return output_dir

    def load_state(self: Any, input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self._oslo_model is None:
            return super().load_state(input_dir, *args, **kwargs)  # type: ignore[misc]
        load_training(input_dir, self._oslo_model, self._only_optimizer(), **self._others())
        return None

    def save_model(self: Any, model: nn.Module, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Merged, as Accelerate writes an unsplit one. Every rank calls it."""
        if self._oslo_model is None:
            return super().save_model(model, save_directory, *args, **kwargs)  # type: ignore[misc]
        return self._oslo_model.save_pretrained_with_parallel(save_directory, save_with_merging=True)

    def get_state_dict(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._oslo_model is None:
            return super().get_state_dict(model, *args, **kwargs)  # type: ignore[misc]
        raise UnsupportedError(
            "the state dict of a split model is one rank's part",
            hint="model.save_pretrained_with_parallel(folder, save_with_merging=True) writes the whole",
        )

    def _only_optimizer(self: Any) -> Any:
        if len(self._optimizers) > 1:
            raise UnsupportedError("a training checkpoint has one optimizer", got=str(len(self._optimizers)))
        return self._optimizers[0].optimizer if self._optimizers else None

    def _others(self: Any) -> dict[str, Any]:
        found = {f"scheduler{number or ''}": each for number, each in enumerate(self._schedulers)}
        found |= {f"custom{number}": each for number, each in enumerate(self._custom_objects)}
        return found if self.scaler is None else {**found, "scaler": self.scaler}
