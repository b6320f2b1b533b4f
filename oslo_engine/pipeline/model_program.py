"""A parallelized model as the pipeline runtime sees it: its stages, its shared gradients, and what calling it does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from oslo_engine.comm.p2p import PipelineLinks
from oslo_engine.errors import UnsupportedError
from oslo_engine.pipeline.evaluation import evaluate
from oslo_engine.pipeline.fully_sharded import FullyShardedGradients, divided_parameters, fully_sharded
from oslo_engine.pipeline.ghost_cache import caches_of_stages
from oslo_engine.pipeline.loop import PipelineLoop, open_loop, train_step
from oslo_engine.pipeline.loss_check import check_loss_adds_up, divides_by_count
from oslo_engine.pipeline.micro_batch import MicroBatch, split_batch, weigh_by_labels
from oslo_engine.pipeline.outer_loss import COUNT, LABELS, OuterLoss, without_labels
from oslo_engine.pipeline.runtime import PipelineRuntime
from oslo_engine.pipeline.shared_gradients import SharedGradients
from oslo_engine.pipeline.stage import StageDone, StageRun
from oslo_engine.rewrite.cache_calls import find_cache
from oslo_engine.rewrite.dataflow import DataFlow
from oslo_engine.rewrite.flows import FlowBook
from oslo_engine.rewrite.skeleton import cache_argument
from oslo_engine.rewrite.state import ParallelState

_HIDDEN_STATES = "output_hidden_states"
_INSIDE = ("output_attentions", "output_router_logits")  # what models collect inside their blocks


class ModelProgram:
    """The stages of this rank (a ``StageProgram``), and the entry points of the model's forward.

    Args:
        model: rewritten for this rank.
        state: of the model.
        flows: what crosses the cuts.

    Communication: collective over the world when created (process groups).
    """

    def __init__(self, model: PreTrainedModel, state: ParallelState, flows: FlowBook) -> None:
        self.model, self.state, self.flows = model, state, flows
        self.num_stages = state.plan.num_stages
        mesh = state.mesh
        links = mesh.once("links", lambda: PipelineLinks.create(mesh.topology.groups("pp"), mesh.timeout))
        self.runtime = PipelineRuntime(self, links, schedule=state.plan.schedule, device=mesh.device, calls=mesh.calls)
        self._shared = SharedGradients(model, state)
        self.shifts_labels = flows.shifts_labels()
        self._loss_checked: Any = ()  # the loss function that was found to be a mean over labels
        self.decoding = False  # whether generate() is running: it makes the caches, and needs logits where tokens are chosen
        self.whole_outputs = False  # whether its caller wants to see the logits
        self.outputs_described: dict[Any, Any] = {}  # of the calls of this generate()
        self.writes_logits = False  # whether it writes into them, which assisted generation does
        self.divides_by_count = True  # whether that one heeds num_items_in_batch
        self._outer_loss: OuterLoss | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelProgram:
        raise UnsupportedError("a model that was split into a pipeline cannot be copied", hint="copy it before parallelize")

    # What the runtime calls

    def parameters(self) -> list[nn.Parameter]:
        return divided_parameters(self.model)

    def fully_sharded(self) -> FullyShardedGradients | None:
        return fully_sharded(self.model, schedule=self.state.plan.schedule)

    def run(self, stage: int, received: tuple[Tensor, ...], micro: MicroBatch) -> tuple[Tensor, ...] | Any:
        call, state = micro.context, self.state
        run = StageRun(self.model, self.flows.twin, call.flow, stage, received, state.streams)
        if run.only_relays:
            return run.outgoing()
        with state.switch.handled_by(run), state.streams.batch(micro.index, step=call.step):
            try:
                output = call.module(**self._with_cache_of(stage, call.arguments_of(micro)))
            except StageDone:
                return run.outgoing()
        if call.loss is not None:
            output["loss"] = call.loss.compute(output, micro.kwargs[LABELS], micro.kwargs.get(COUNT))
        return run.finished(output)

    def _with_cache_of(self, stage: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        cache = find_cache(kwargs)
        if cache is None:
            return kwargs
        own = caches_of_stages(cache, self.state.plan.stages_of(self.state.mesh.at.pp_rank))[stage]
        return {name: own if value is cache else value for name, value in kwargs.items()}

    def finish_gradients(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        return self._shared.sum(self.parameters(), gradients)

    # What the user calls

    def forward(self, kwargs: dict[str, Any]) -> Any:
        """The model's forward: a ``PipelineLoop`` where gradients are enabled, else the outputs of the whole batch."""
        if not torch.is_grad_enabled():
            return evaluate(self, self.model, self._collecting(kwargs))
        self._refuse_in_training(kwargs)
        return self.open_loop(kwargs)

    def open_loop(self, batch: Mapping[str, Any]) -> PipelineLoop:
        micros = self._training_batch(batch)
        return open_loop(self.runtime, micros)

    def train_step(self, batch: Mapping[str, Any]) -> Tensor:
        self._refuse_in_training(batch)
        return train_step(self.runtime, self._training_batch(batch))

    @contextmanager
    def loss_from(self, loss: OuterLoss | None) -> Iterator[None]:
        """In training forwards within, the last stage computes this loss in place of the model's own."""
        before, self._outer_loss = self._outer_loss, loss
        try:
            yield
        finally:
            self._outer_loss = before

    @contextmanager
    def generating(self, *, whole_outputs: bool, writes_logits: bool) -> Iterator[None]:
        """While ``generate`` runs only token ids travel; logits stay on the rank that chooses, unless ``whole_outputs``."""
        before = self.decoding, self.whole_outputs, self.writes_logits
        self.decoding, self.whole_outputs, self.writes_logits = True, whole_outputs, writes_logits
        self.outputs_described = {}
        try:
            yield
        finally:
            self.decoding, self.whole_outputs, self.writes_logits = before

    def callable_part(self, module: nn.Module) -> Callable[..., Any]:
        """A part of the model to be called by itself, over the stages that hold its blocks: the encoder, in ``generate``."""

        @functools.wraps(module.forward)
        def call(**kwargs: Any) -> Any:
            with torch.no_grad():
                return evaluate(self, module, kwargs)

        call.forward = call  # type: ignore[attr-defined]  # its signature is read
        return call

    def prepared(
        self, micros: Sequence[MicroBatch], module: nn.Module, kwargs: Mapping[str, Any], loss: OuterLoss | None = None
    ) -> list[MicroBatch]:
        """The micro-batches of a call of ``module``, with its data flow.

        Raises:
            UnsupportedError: it needs parameters that this layout did not give to the stages.
        """
        flow = self._flow(module, kwargs if loss is None else without_labels(kwargs))
        self._check_held(flow)
        if self.model.training:
            self.state.streams.next_step()
        return [replace(micro, context=_Call(module, flow, self.state.streams.step, loss)) for micro in micros]

    def with_own_cache(self, module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Where the model would wrap a cache in its forward, which most stages end early: do it before."""
        cache = find_cache(kwargs)
        if cache is None or not self._flow(module, kwargs).wraps_cache:
            return kwargs
        second = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        return {name: EncoderDecoderCache(cache, second) if value is cache else value for name, value in kwargs.items()}

    @property
    def cache_argument(self) -> str | None:
        """The forward's name for a cache that can be made for it; None where it keeps none, or one of its own kind."""
        known = self.model._supports_default_dynamic_cache()  # type: ignore[operator]
        return cache_argument(self.flows.twin) if known else None

    def new_cache(self) -> Cache:
        config = self.model.config.get_text_config(decoder=True)
        cache = DynamicCache(config=config)
        return EncoderDecoderCache(cache, DynamicCache(config=config)) if self.model.config.is_encoder_decoder else cache

    def _flow(self, module: nn.Module, kwargs: Mapping[str, Any]) -> DataFlow:
        root = "" if module is self.model else next(name for name, m in self.model.named_modules() if m is module)
        return self.flows.flow(kwargs, training=self.model.training, root=root)

    def _training_batch(self, batch: Mapping[str, Any]) -> list[MicroBatch]:
        self.runtime.refuse_open_loop()
        kwargs = {name: value for name, value in batch.items() if value is not None}
        if self.state.mesh.tp.size > 1:  # otherwise the stages compare at the end of the batch, where they meet anyway
            self.state.compare(kwargs).finish()
        _refuse_packed_without_mask(kwargs, self.model)
        kwargs["use_cache"] = False
        _refuse_trained_inputs(kwargs)
        _refuse_reentrant_checkpointing(self.model)
        loss = self._outer_loss
        if loss is None:
            self.check_loss()
        micros = split_batch(kwargs, self.state.micro_batch_size)
        micros = weigh_by_labels(
            micros,
            shift_labels=self.shifts_labels if loss is None else loss.shift_labels,
            divides_by_count=self.divides_by_count if loss is None else loss.divides_by_count,
        )
        self.runtime.check(micros)
        return self.prepared(micros, self.model, kwargs, loss)

    def check_loss(self) -> None:
        """Once for each loss function: the class's own, or one that was set on the model."""
        chosen = vars(self.model).get("_loss_function")
        if chosen is not self._loss_checked:
            twin = self.flows.twin
            if chosen is not None:
                twin.loss_function = chosen  # type: ignore[method-assign, assignment]
            twin.train()
            check_loss_adds_up(twin, shift_labels=self.shifts_labels)
            self.divides_by_count = divides_by_count(twin)
            self._loss_checked = chosen

    def _collecting(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """With ``output_hidden_states`` among the arguments, where the model's config asks for them too."""
        if inside := self._asked(kwargs, _INSIDE):
            raise UnsupportedError(
                "what a model collects inside its blocks is not gathered from the pipeline's stages",
                got=inside,
                hint="leave it off, or use pp=1",
            )
        wanted = kwargs.get(_HIDDEN_STATES, getattr(self.model.config, _HIDDEN_STATES, False))
        if wanted and not isinstance(wanted, bool):
            raise UnsupportedError(
                "a pipeline returns all hidden states or none", got=f"{_HIDDEN_STATES}={wanted!r}", hint="pass True"
            )
        return {**kwargs, _HIDDEN_STATES: True} if wanted else kwargs

    def _refuse_in_training(self, kwargs: Mapping[str, Any]) -> None:
        if collected := self._asked(kwargs, (_HIDDEN_STATES, *_INSIDE)):
            raise UnsupportedError(
                "a pipeline that trains hands out losses, and nothing that the model collects on the way",
                got=collected,
                hint="leave it off; call the model under torch.no_grad(), or use pp=1",
            )

    def _asked(self, kwargs: Mapping[str, Any], names: Sequence[str]) -> str:
        asked = [name for name in names if kwargs.get(name, getattr(self.model.config, name, False))]
        return ", ".join(f"{name}=True" for name in asked)

    def _check_held(self, flow: DataFlow) -> None:
        for stage, names in enumerate(flow.live_parameters):  # of all stages: every rank says the same
            for name in names:
                tensor = self.state.plan.tensor(name)
                if stage not in tensor.stages:
                    raise UnsupportedError(
                        "this call needs a parameter on a stage that does not hold it",
                        where=f"{name}, stage {stage}",
                        expected=f"use on stages {tensor.stages}",
                        hint="stages are planned for training and generation with ordinary arguments; use pp=1 for this call",
                    )


def _refuse_reentrant_checkpointing(model: nn.Module) -> None:
    """A stage asks for the gradients of what it received, which the older kind of checkpointing cannot give."""
    for name, module in model.named_modules():
        own = vars(module)  # asked at every batch, and a module looks long for what it does not have
        function = own.get("_gradient_checkpointing_func") if own.get("gradient_checkpointing") else None
        of_block = getattr(function, "keywords", {}).get("use_reentrant", False)
        if of_block or own.get("checkpoint_impl") is CheckpointImpl.REENTRANT:
            raise UnsupportedError(
                "a pipeline cannot train with reentrant activation checkpointing",
                where=name,
                got="use_reentrant=True",
                hint='call model.gradient_checkpointing_enable({"use_reentrant": False}), or use pp=1',
            )


def _refuse_trained_inputs(kwargs: Mapping[str, Any]) -> None:
    trained = [name for name, value in kwargs.items() if isinstance(value, Tensor) and value.requires_grad]
    if trained:
        raise UnsupportedError(
            "a pipeline gives no gradient to its inputs, so nothing in front of the model can be trained (prompt tuning)",
            got=", ".join(trained),
            hint="pass it detached, or use pp=1",
        )


def _refuse_packed_without_mask(kwargs: Mapping[str, Any], model: PreTrainedModel) -> None:
    """Transformers masks texts that are packed into one row apart where it makes no cache, and not where it makes one."""
    positions = kwargs.get("position_ids")
    if not isinstance(positions, Tensor) or kwargs.get("attention_mask") is not None or kwargs.get("use_cache") is False:
        return
    if getattr(model.config, "use_cache", False) and bool((positions.diff(dim=-1) != 1).any()):
        raise UnsupportedError(
            "packed position_ids without an attention_mask mean another thing with a cache than without one",
            hint="pass use_cache=False, as a pipeline trains, and compare with that; or an attention_mask",
        )


@dataclass(frozen=True)
class _Call:
    """What is called, the model or its encoder by itself in ``generate``; its data flow, and the step of its random streams.

    loss: where it is not the model that computes it.
    """

    module: nn.Module
    flow: DataFlow
    step: int
    loss: OuterLoss | None = None

    def arguments_of(self, micro: MicroBatch) -> dict[str, Any]:
        return micro.kwargs if self.loss is None else without_labels(micro.kwargs)
