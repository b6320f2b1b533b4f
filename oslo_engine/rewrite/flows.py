"""The data flows of one model: one recording for every kind of call, made when it first comes up.

Which block values a stage needs can depend on which arguments a call has (labels, a cache, encoder outputs). So the model's
twin on ``meta`` is recorded once for each combination, at a small size; the cuts stay where the plan put them.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from oslo_engine.errors import OsloError, PlanError
from oslo_engine.rewrite.collected import check_collected
from oslo_engine.rewrite.dataflow import DataFlow, analyze
from oslo_engine.rewrite.meta_weights import without_weights
from oslo_engine.rewrite.record import Recording, record
from oslo_engine.rewrite.skeleton import Mode, assume_labels, cache_argument, doubt_labels, example_inputs

Signature = tuple[Any, ...]
_TEXTS = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")
_ROWS, _LENGTH = 2, 8  # of the batches that are recorded


class FlowBook:
    """Recordings and data flows of a model.

    Args:
        twin: the unsplit model on meta.
        blocks: names of its blocks.
    """

    def __init__(self, twin: PreTrainedModel, blocks: Sequence[str]) -> None:
        self.twin, self.blocks = twin, list(blocks)
        self._stage_of: dict[tuple[str, int], int] = {}
        self._num_stages = 0
        self._flows: dict[Signature, DataFlow] = {}
        self._usual_flows: dict[tuple[int, ...], DataFlow] = {}  # planning asks for the same cuts again and again
        self._usual = self._record_usual_calls()

    def __deepcopy__(self, memo: dict[int, Any]) -> FlowBook:
        return self

    def calls(self) -> list[tuple[str, int]]:
        """(block, nth) of the block calls of a whole forward, in order."""
        return [(call.name, call.nth) for call in self._usual[0].calls]

    @property
    def kept_in_modules(self) -> str | None:
        """An attribute of a module in which a call leaves a tensor for the next token; None where all of it is in the cache."""
        return next((name for recording in self._usual[1:] for name in recording.kept), None)

    def shifts_labels(self) -> bool:
        """Whether the loss compares position t with the label at t + 1, so that the first label of a row counts for nothing.

        Found by asking: the mean over no label at all is not a number.
        """
        inputs = example_inputs(self.twin, "train")
        labels = inputs.get("labels")
        if labels is None or labels.ndim != 2 or labels.is_floating_point():
            return False
        only_first = torch.full_like(labels, -100)
        only_first[:, 0] = labels[:, 0]
        with without_weights(self.twin), torch.no_grad():
            loss = self.twin(**{**inputs, "labels": only_first}).loss
        return loss is not None and bool(loss.isnan())  # some want labels of a second kind too

    def place(self, stage_of: Mapping[tuple[str, int], int], num_stages: int) -> None:
        """Say where the cuts lie."""
        self._stage_of, self._num_stages = dict(stage_of), num_stages
        self._flows.clear()

    def live_tensors(self) -> list[set[str]]:
        """Per stage, the parameters and buffers outside its blocks that training or generation reads, with all their names."""
        live: list[set[str]] = [set() for _ in range(self._num_stages)]
        for recording in range(len(self._usual)):
            flow = self._usual_flow(recording)
            for stage, names in enumerate(live):
                names.update(flow.live_parameters[stage], flow.live_buffers[stage])
        return live

    def training_flow(self) -> DataFlow:
        """The data flow of an ordinary training forward, over the stages that ``place`` made."""
        return self._usual_flow(0)

    def shared_random_modules(self) -> list[str]:
        """Modules outside the blocks that draw random numbers which several stages must draw alike."""
        flow = self.training_flow()
        return list(dict.fromkeys(draw.module for draw in flow.random_in_several_stages))

    def flow(self, inputs: Mapping[str, Any], *, training: bool, root: str = "") -> DataFlow:
        """The data flow of a call with these arguments.

        Args:
            inputs: the call's keyword arguments; only their names, kinds and plain values matter.
            training: whether the model is in training mode.
            root: the submodule that is called; "" for the model.
        """
        kinds = sorted((name, _kind(value)) for name, value in inputs.items() if value is not None)
        collects = bool(inputs.get("output_hidden_states"))
        texts = [(name, value.shape) for name in _TEXTS if isinstance(value := inputs.get(name), Tensor)] if collects else []
        signature = (root, training, *texts, *kinds)
        if signature not in self._flows:
            self.twin.train(training)
            recording = self._record_collecting(inputs, root) if collects else self._record(inputs, root)
            self._flows[signature] = self._analyze(recording)
        return self._flows[signature]

    def _record(self, inputs: Mapping[str, Any], root: str) -> Recording:
        try:
            return record(self.twin, self.blocks, small_inputs(self.twin, inputs, root), root=root)
        except OsloError:
            raise
        except Exception:  # whatever a model's own code raises that takes texts of one length only
            return record(self.twin, self.blocks, small_inputs(self.twin, inputs, root, shorten=False), root=root)

    def _record_collecting(self, inputs: Mapping[str, Any], root: str) -> Recording:
        """At the lengths of this call: some models pad a text, and cut what they padded off what they return."""
        inputs = small_inputs(self.twin, inputs, root, shorten=False)
        recording = record(self.twin, self.blocks, inputs, root=root, replay=False)
        check_collected(recording)
        return recording

    def _record_usual_calls(self) -> list[Recording]:
        self.twin.train()
        recordings = [self._record_training()]
        if self.twin.can_generate():
            self.twin.eval()
            mode: Mode = "prefill" if cache_argument(self.twin) is not None else "forward"
            recordings.append(record(self.twin, self.blocks, example_inputs(self.twin, mode)))
        return recordings

    def _record_training(self) -> Recording:
        """Which labels a head takes is found by running the model: this is that run, unless it wants others than most do."""
        assume_labels(self.twin)
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return record(self.twin, self.blocks, example_inputs(self.twin, "train"))
        doubt_labels(self.twin)
        return record(self.twin, self.blocks, example_inputs(self.twin, "train"))

    def _usual_flow(self, number: int) -> DataFlow:
        recording = self._usual[number]
        key = (number, self._num_stages, *(self._stage_of.get((call.name, call.nth), -1) for call in recording.calls))
        if key not in self._usual_flows:
            self._usual_flows[key] = self._analyze(recording)
        return self._usual_flows[key]

    def _analyze(self, recording: Recording) -> DataFlow:
        stages = []
        for call in recording.calls:
            stage = self._stage_of.get((call.name, call.nth))
            if stage is None:
                raise PlanError(
                    "a block is called more often than when the model was planned",
                    where=f"{call.name}, call {call.nth}",
                    hint="this argument combination changes how often blocks run; use pp=1",
                )
            stages.append(stage)
        return analyze(recording, stages, self._num_stages)


def small_inputs(twin: PreTrainedModel, inputs: Mapping[str, Any], root: str = "", *, shorten: bool = True) -> dict[str, Any]:
    """Arguments of the same kind for a batch of 2 x 8 tokens (or of the given rows and length), a cache being empty."""
    with torch.inference_mode(False), torch.no_grad():
        return _small_inputs(twin, inputs, root, shorten)


def _small_inputs(twin: PreTrainedModel, inputs: Mapping[str, Any], root: str, shorten: bool) -> dict[str, Any]:
    small: dict[str, Any] = {}
    ids = inputs.get("input_ids")
    length = ids.shape[1] if isinstance(ids, Tensor) and ids.ndim == 2 else None
    for name, value in inputs.items():
        if value is None:
            continue
        if isinstance(value, Cache):
            small |= {"use_cache": True, name: _empty_cache(twin, value)}
        else:
            change = functools.partial(_small, name, length) if shorten else _on_cpu
            small[name] = pytree.tree_map_only(Tensor, change, value)
    if not root:
        small.setdefault("use_cache", False)
    return small


def _empty_cache(twin: PreTrainedModel, cache: Cache) -> Cache | None:
    """One such as ``generate`` makes; None, to be made by the model, where that makes none."""
    if not twin._supports_default_dynamic_cache():  # type: ignore[operator]
        return None
    config = twin.config.get_text_config(decoder=True)
    if isinstance(cache, EncoderDecoderCache):
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    return DynamicCache(config=config)


def _on_cpu(tensor: Tensor) -> Tensor:
    """A copy, as tensors made in inference mode do not tell of writes."""
    return tensor.detach().cpu().clone()


def _small(name: str, length: int | None, tensor: Tensor) -> Tensor:
    tensor = _on_cpu(tensor)
    if "position" in name and tensor.ndim and not tensor.is_floating_point():
        rows = tensor[..., :1] if tensor.shape[0] == 1 else _resized(tensor[..., :1], -2 if tensor.ndim > 1 else 0, _ROWS)
        return torch.arange(_LENGTH).expand(*rows.shape[:-1], _LENGTH)
    if tensor.ndim and tensor.shape[0] != 1:
        tensor = _resized(tensor, 0, _ROWS)
    sequence = name.endswith(("_ids", "_mask", "_embeds", "_outputs")) or (name == "labels" and not tensor.is_floating_point())
    sequence = sequence or (tensor.ndim == 2 and not tensor.is_floating_point() and tensor.shape[1] == length)
    if sequence and tensor.ndim in (2, 3):
        tensor = _resized(tensor, 1, _LENGTH)
    elif sequence and tensor.ndim == 4:
        tensor = _resized(_resized(tensor, 2, _LENGTH), 3, _LENGTH)
    return tensor


def _resized(tensor: Tensor, dim: int, size: int) -> Tensor:
    """The last ``size`` entries along a dimension; the last one repeated where there are fewer."""
    have = tensor.shape[dim]
    index = torch.arange(max(have - size, 0), max(have - size, 0) + size).clamp(max=have - 1)
    return tensor.index_select(dim, index)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"tensor {value.ndim} {value.dtype}"
    return repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__
