"""DeepSpeed around a split model.

    engine, *_ = deepspeed.initialize(
        model=model.gpu_modules(), model_parameters=model.gpu_parameters(), mpu=model.mpu, config=config
    )

While DeepSpeed builds its engine it calls ``set_deepspeed_parallelism`` on the modules that have it, before it makes groups or
an optimizer. The model has it, and there it meets its engine: what cannot work is refused, the parameters are marked for
DeepSpeed's gradient norm, and the micro-batch loop learns whom to tell where the last backward of a batch is.
"""

from __future__ import annotations

import weakref
from types import FrameType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from oslo_engine.comm.mpu import ModelParallelUnit
from oslo_engine.errors import PlanError, UnsupportedError
from oslo_engine.plan.plan import TensorPlan
from oslo_engine.rewrite.gradients import Answer, answer_for
from oslo_engine.rewrite.optimizers import check_optimizer
from oslo_engine.rewrite.state import ParallelState, parallel_state

_REDUCED_EVERY_BACKWARD = 2  # from this ZeRO stage on


def meet_engine(model: nn.Module, caller: FrameType | None) -> None:
    """Prepare a split model for the engine that is just being built around it.

    Args:
        caller: the frame that called ``set_deepspeed_parallelism``; DeepSpeed hands over nothing that would lead to the engine.

    Raises:
        PlanError: the engine was not given this model's mpu.
        UnsupportedError: ZeRO 2 or 3 with a pipeline, clipping where DeepSpeed cannot count each gradient once, or an optimizer
            that does not fit a split model.

    Communication: none.
    """
    state = parallel_state(model)
    engine = None if caller is None else caller.f_locals.get("self")
    if not hasattr(engine, "zero_optimization_stage"):
        raise UnsupportedError(
            "this version of DeepSpeed builds its engine in another way",
            expected="DeepSpeedEngine, calling set_deepspeed_parallelism on its module",
            got=f"a call from {type(engine).__name__}",
            hint="use a version of DeepSpeed that oslo_engine was tried with: see constraints.txt",
        )
    _check(engine, state)
    if isinstance(optimizer := getattr(engine, "client_optimizer", None), Optimizer):
        check_optimizer(optimizer)  # now: ZeRO gives it other parameters
    for name, parameter in model.named_parameters():
        _mark(parameter, state.plan.tensor(name), counts=answer_for(state, name) is not Answer.NOTHING)
    if state.program is not None:
        state.program.runtime.before_backward = _Boundary(engine)


def _check(engine: Any, state: ParallelState) -> None:
    topology, stage = state.plan.topology, engine.zero_optimization_stage()
    split = topology.tp * topology.pp > 1
    if split and not (isinstance(engine.mpu, ModelParallelUnit) and engine.mpu.is_of(state.mesh)):
        raise PlanError(
            "DeepSpeed does not know which ranks hold parts of one model, and would average the gradients of different parts",
            where="deepspeed.initialize",
            expected="mpu=model.mpu",
            got=f"mpu={engine.mpu!r}",
        )
    if topology.pp > 1 and stage >= _REDUCED_EVERY_BACKWARD:
        raise UnsupportedError(
            "ZeRO 2 and 3 divide gradients after every backward, and a pipeline runs one for each micro-batch",
            where=f"deepspeed.initialize, pp={topology.pp}",
            expected='"zero_optimization": {"stage": 0} or 1',
            got=f"stage {stage}",
            hint="use ZeRO 1, which divides the optimizer's state as well, or pp=1 with a larger tp",
        )
    if engine.gradient_clipping() and (shared := _counted_in_part(state)):
        raise UnsupportedError(
            "DeepSpeed's gradient norm cannot count KV heads once that several ranks hold",
            where=shared[0],
            expected='"gradient_clipping": 0',
            got=f"gradient_clipping {engine.gradient_clipping()}, tp={topology.tp}",
            hint="choose a tp that divides the KV heads, or clip with oslo.clip_grad_norm_ (ZeRO 0)",
        )


def _counted_in_part(state: ParallelState) -> list[str]:
    return [tensor.name for tensor in state.plan.parameters if tensor.shard is not None and tensor.shard.overlaps]


def _mark(parameter: nn.Parameter, tensor: TensorPlan, *, counts: bool) -> None:
    """Say in DeepSpeed's words whether this rank's gradient counts in the norm of the whole model.

    It knows three marks. Without ZeRO the first rank of a model counts everything and the others what has one of the first
    two; with ZeRO every tensor-parallel rank 0 counts everything, the others what has one of the first two, and nobody what has
    the third.
    """
    sharded = tensor.shard is not None
    parameter.tensor_model_parallel = sharded and counts  # type: ignore[attr-defined]
    parameter.model_parallel = counts and not sharded  # type: ignore[attr-defined]
    parameter.ds_pipe_replicated = not counts  # type: ignore[attr-defined]


class _Boundary:
    """Tells an engine which backward of a batch is its last: the one after which gradients are there to be reduced."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self, *, last: bool) -> None:
        engine = self._engine()
        if engine is None or not engine.managed_gradient_accumulation():
            return
        # None: what the engine's own count of steps says, as gradient_accumulation_steps may ask for more batches.
        engine.set_gradient_accumulation_boundary(None if last else False)
