"""Megatron-style model parallel unit: what DeepSpeed, samplers and DDP ask for."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from oslo_engine.comm.collectives import Axis
from oslo_engine.comm.mesh import Mesh


class ModelParallelUnit:
    """Groups, sizes and ranks on each axis. ``model_parallel`` spans tp and pp: the ranks that share one copy of the model."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def is_of(self, mesh: Mesh) -> bool:
        """Whether it speaks for the models of this mesh."""
        return self._mesh is mesh

    def get_tensor_parallel_group(self) -> Any:
        return self._group(self._mesh.tp)

    def get_tensor_parallel_world_size(self) -> int:
        return self._mesh.tp.size

    def get_tensor_parallel_rank(self) -> int:
        return self._mesh.tp.rank

    def get_pipeline_parallel_group(self) -> Any:
        return self._group(self._mesh.pp)

    def get_pipeline_parallel_world_size(self) -> int:
        return self._mesh.pp.size

    def get_pipeline_parallel_rank(self) -> int:
        return self._mesh.pp.rank

    def get_data_parallel_group(self) -> Any:
        return self._group(self._mesh.dp)

    def get_data_parallel_world_size(self) -> int:
        return self._mesh.dp.size

    def get_data_parallel_rank(self) -> int:
        return self._mesh.dp.rank

    def get_model_parallel_group(self) -> Any:
        return self._group(self._mesh.model)

    def get_model_parallel_world_size(self) -> int:
        return self._mesh.model.size

    def get_model_parallel_rank(self) -> int:
        return self._mesh.model.rank

    def _group(self, axis: Axis) -> Any:
        """A real group even for an axis of size 1: DDP and samplers do not take None for "only me"."""
        if axis.group is None and dist.is_initialized():
            return self._mesh.once("self", lambda: dist.new_group([dist.get_rank()], use_local_synchronization=True))
        return axis.group

    # The names by which Megatron-LM and DeepSpeed know the same things.
    get_tensor_model_parallel_group = get_tensor_parallel_group
    get_tensor_model_parallel_world_size = get_tensor_parallel_world_size
    get_tensor_model_parallel_rank = get_tensor_parallel_rank
    get_pipeline_model_parallel_group = get_pipeline_parallel_group
    get_pipeline_model_parallel_world_size = get_pipeline_parallel_world_size
    get_pipeline_model_parallel_rank = get_pipeline_parallel_rank
    get_pipe_parallel_group = get_pipeline_parallel_group
    get_pipe_parallel_world_size = get_pipeline_parallel_world_size
    get_pipe_parallel_rank = get_pipeline_parallel_rank
