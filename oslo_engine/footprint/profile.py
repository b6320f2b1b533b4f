"""What a training step keeps, needs for a moment and communicates, block by block: found by running it on fake tensors.

The model is the engine's own, rewritten for tp rank 0, so its sizes and collectives are those of a real step. Fake tensors have
shapes and no data.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel, masking_utils

from oslo_engine.comm.random import RandomStreams
from oslo_engine.errors import UnsupportedError
from oslo_engine.footprint.live_bytes import LiveBytes, Segment
from oslo_engine.footprint.outcomes import Outcomes
from oslo_engine.footprint.stand_ins import lone_mesh
from oslo_engine.footprint.workload import Workload
from oslo_engine.plan.plan import Plan
from oslo_engine.rewrite.apply import apply_plan

FAKE = torch.device("cpu")
OUTSIDE = ""
_OUTCOMES = Outcomes()


@dataclass(frozen=True)
class SentValue:
    """A tensor in a block's output, as it would cross a cut behind the block."""

    bytes: int
    num_dims: int
    has_gradient: bool


Sent = Mapping[str, Mapping[tuple[Any, ...], SentValue]]


@dataclass(frozen=True)
class StepProfile:
    """The segments of one micro-batch's forward and backward.

    forward, backward: in the order in which they ran; a segment's label is ("forward", block) or, between blocks, with "".
    sent: of every block the tensors in its output, by their place.
    """

    forward: tuple[Segment, ...]
    backward: tuple[Segment, ...]
    sent: Sent


class StepProfiler:
    """Runs steps of a model on fake tensors.

    Args:
        model: on meta; used up.
        plan: of this model, without a pipeline.
    """

    def __init__(self, model: PreTrainedModel, plan: Plan) -> None:
        self._model, self._blocks = model, plan.blocks
        self._mode, self._live = FakeTensorMode(), LiveBytes(_OUTCOMES.run)
        with self._mode, torch.random.fork_rng(devices=[]):
            _make_fake(model)
            mesh = lone_mesh(plan.topology.tp, FAKE, self._live.note_collective)
            streams = RandomStreams(0, dp_rank=0, tp_rank=0, device=FAKE)
            apply_plan(model, plan, mesh, streams, parallel_class=type(model))
            del model.__dict__["_oslo"]
            self._live.leave_out(_state(model))

    def profile(self, workload: Workload) -> StepProfile:
        """Run one training step of one micro-batch, or in inference one forward over whole sequences that fills the cache.

        Raises:
            UnsupportedError: the model does not run on text alone, or asks for values.
        """
        model, live = self._model, self._live
        model.train(workload.trains)
        recomputing = _recomputing(model) if workload.trains and workload.checkpointing else contextlib.nullcontext()
        with self._mode, torch.random.fork_rng(devices=[]), recomputing:
            batch = text_batch(model, workload)
            live.leave_out(value for value in batch.values() if isinstance(value, Tensor))
            live.segments = []
            with _watched_blocks(model, self._blocks, live) as sent:
                try:
                    with live, torch.set_grad_enabled(workload.trains), _one_text_a_row():
                        live.begin(("forward", OUTSIDE))
                        output = model(**batch)
                        if workload.trains:
                            loss = output.loss
                            del output
                            live.begin(("backward", OUTSIDE))
                            loss.backward()
                        live.end()
                except Exception as error:  # whatever a model's own code raises that wants sound, pictures or values of tensors
                    raise UnsupportedError(
                        "the activations of this model cannot be measured on fake tensors",
                        where=type(model).__name__,
                        got=f"{type(error).__name__}: {str(error).splitlines()[0]}",
                    ) from error
        forward = tuple(segment for segment in live.segments if segment.label[0] == "forward")
        return StepProfile(forward, tuple(live.segments[len(forward) :]), sent)


def enable_checkpointing(model: PreTrainedModel) -> None:
    """Let blocks recompute their activations, by the name that this version of Transformers has for it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()


@contextlib.contextmanager
def _recomputing(model: PreTrainedModel) -> Iterator[None]:
    enable_checkpointing(model)
    try:
        yield
    finally:
        disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
        disable()


@contextlib.contextmanager
def _one_text_a_row() -> Iterator[None]:
    """Transformers looks at position ids for several texts in a row; at fake ones it cannot, and would prepare for them."""
    before = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None  # type: ignore[assignment]
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = before


def text_batch(model: PreTrainedModel, workload: Workload) -> dict[str, Any]:
    """Token ids without padding; in training labels, each a tensor of its own; in inference logits of the last token only."""
    batch: dict[str, Any] = {"input_ids": _ids(workload.rows, workload.length)}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = _ids(workload.rows, workload.target_length)
    if workload.trains:
        batch["labels"] = _ids(*batch.get("decoder_input_ids", batch["input_ids"]).shape)
    if model.can_generate():
        batch["use_cache"] = not workload.trains
        if not workload.trains and "logits_to_keep" in inspect.signature(model.forward).parameters:
            batch["logits_to_keep"] = 1
    return batch


def _ids(rows: int, length: int) -> Tensor:
    return torch.zeros(rows, length, dtype=torch.long, device=FAKE)


def _make_fake(model: nn.Module) -> None:
    """Put a fake tensor in the place of every parameter and buffer."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=FAKE)
                    made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
                table[name] = made[id(tensor)]  # type: ignore[assignment]


def _state(model: nn.Module) -> list[Tensor]:
    """What is no activation. Every parameter gets a gradient, as it has one in every micro-batch but the first."""
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [*parameters, *gradients, *model.buffers()]


@contextlib.contextmanager
def _watched_blocks(model: nn.Module, blocks: Sequence[str], live: LiveBytes) -> Iterator[Sent]:
    """Within, begin a segment where a block's forward or backward begins or ends."""
    sent: dict[str, dict[tuple[Any, ...], SentValue]] = {}
    from_blocks: set[int] = set()

    def begin(label: tuple[str, str]) -> Any:
        return lambda *_: live.begin(label)

    def before(path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            came = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
            if came and id(came[0]) not in from_blocks:
                came[0].register_hook(begin(("backward", OUTSIDE)))
            live.begin(("forward", path))

        return hook

    def behind(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            live.begin(("forward", OUTSIDE))
            sent[path] = {}
            watched = False
            for place, leaf in pytree.tree_flatten_with_path(output)[0]:
                if isinstance(leaf, Tensor):
                    size = leaf.numel() * leaf.element_size()
                    sent[path][_plain(place)] = SentValue(size, leaf.ndim, leaf.requires_grad)
                    if leaf.requires_grad and not watched:
                        leaf.register_hook(begin(("backward", path)))
                        from_blocks.add(id(leaf))
                        watched = True

        return hook

    handles = []
    for path in blocks:
        block = model.get_submodule(path)
        handles += [
            block.register_forward_pre_hook(before(path), with_kwargs=True),
            block.register_forward_hook(behind(path)),
        ]
    try:
        yield sent
    finally:
        for handle in handles:
            handle.remove()


def _plain(place: Any) -> tuple[Any, ...]:
    """The indices and keys that lead to a leaf."""
    return tuple(getattr(step, "idx", getattr(step, "key", getattr(step, "name", None))) for step in place)
