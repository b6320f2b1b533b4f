"""Models that break the engine, in the ranks, when they are built there: one class for each mistake that verify must notice.

oslo.verify(saboteur("row_bias_on_every_rank"), tp=2)
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM


def nothing() -> None:
    """Or every sabotage might be noticed for another reason."""


def row_bias_on_every_rank() -> None:
    from oslo_engine.layers import region

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self._product(x)
        self._streams.leave_sharded()
        return region.reduce_from(y if self.bias is None else y + self.bias, self._axis)

    region._Row.forward = forward  # type: ignore[method-assign]


def gradients_of_norms_not_summed() -> None:
    from oslo_engine.rewrite import regions

    regions.sum_gradient = lambda module, *_, **__: module  # type: ignore[assignment]


def tied_gradients_not_summed() -> None:
    from oslo_engine.pipeline.shared_gradients import SharedGradients

    SharedGradients.sum = lambda self, parameters, gradients: gradients  # type: ignore[method-assign]


def micro_batches_weigh_the_same() -> None:
    from oslo_engine.pipeline import model_program

    model_program.weigh_by_labels = lambda micros, **_: micros


def replicated_gradients_counted_twice() -> None:
    from oslo_engine.rewrite import gradients

    gradients._pieces = lambda grad, tensor, tp_rank: iter([grad])


def clipping_forgotten() -> None:
    from oslo_engine.rewrite import gradients
    from oslo_engine.verify.checks import training

    training.clip_grad_norm_ = lambda model, max_norm: gradients.gradient_norm(model)


def last_token_chosen_by_another_rule() -> None:
    from oslo_engine.generation import choices

    original = choices.Choice.__call__

    def call(self: Any, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return original(self, input_ids, -scores if self._beams == 1 else scores.flip(-1))

    choices.Choice.__call__ = call  # type: ignore[method-assign]


def same_masks_on_all_ranks() -> None:
    from oslo_engine.comm.random import RandomStreams

    RandomStreams.enter_sharded = lambda self: None  # type: ignore[method-assign]


def different_masks_on_shared_activations() -> None:
    from oslo_engine.comm.random import RandomStreams

    RandomStreams.block = lambda self, per_rank=False: nullcontext()  # type: ignore[method-assign]
    RandomStreams.batch = lambda self, micro_batch=0: nullcontext()  # type: ignore[method-assign]


def same_masks_every_step() -> None:
    from oslo_engine.comm.random import RandomStreams

    def next_step(self: Any) -> None:
        self.enabled = True

    RandomStreams.next_step = next_step  # type: ignore[method-assign]


def nothing_is_dropped() -> None:
    torch.nn.functional.dropout = lambda x, *args, **kwargs: x


def a_new_seed_every_time() -> None:
    from oslo_engine import assemble

    original, count = assemble._common_seed, itertools.count()
    assemble._common_seed = lambda seed, mesh: original(seed, mesh) + next(count)


def recompute_draws_new_masks() -> None:
    import torch.utils.checkpoint

    original = torch.utils.checkpoint.checkpoint
    from transformers import modeling_utils

    modeling_utils.checkpoint = lambda *args, **kwargs: original(*args, **{**kwargs, "preserve_rng_state": False})


def a_slice_is_loaded_wrong() -> None:
    from oslo_engine import construct

    original = construct.load_weights

    def load(model: Any, *args: Any, **kwargs: Any) -> Any:
        report = original(model, *args, **kwargs)
        with torch.no_grad():
            next(p for p in model.parameters() if p.ndim == 1).neg_()
        return report

    construct.load_weights = load


def a_rank_raises() -> None:
    _on_rank_1(lambda: 1 / 0)


def a_rank_dies() -> None:
    _on_rank_1(lambda: os._exit(7))


def a_rank_sleeps() -> None:
    _on_rank_1(lambda: time.sleep(1000))


def _on_rank_1(misfortune: Callable[[], Any]) -> None:
    """In the middle of generation, while the others wait for it."""
    from oslo_engine.generation import choices

    original = choices.Choice.__call__

    def call(self: Any, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            misfortune()
        return original(self, input_ids, scores)

    choices.Choice.__call__ = call  # type: ignore[method-assign]


def a_carried_value_is_forgotten() -> None:
    from oslo_engine.pipeline import stage

    original = stage.StageRun.__init__

    def init(self: Any, model: Any, twin: Any, flow: Any, number: int, received: Any, *rest: Any, **options: Any) -> None:
        *kept, last = received or (None,)
        original(self, model, twin, flow, number, received and (*kept, last * 0), *rest, **options)

    stage.StageRun.__init__ = init  # type: ignore[method-assign]


def a_block_runs_on_the_wrong_stage() -> None:
    """The cut lies one block later than the weights are placed for."""
    from oslo_engine.rewrite import planning

    original = planning.FlowBook.place

    def place(self: Any, stage_of: Any, num_stages: int) -> None:
        stages = list(stage_of.values())
        original(self, dict(zip(stage_of, [stages[0], *stages[:-1]], strict=True)), num_stages)

    planning.FlowBook.place = place  # type: ignore[method-assign]


def _break(how: str) -> None:
    """Once in each rank."""
    if dist.is_initialized() and not _broken:
        globals()[how]()
        _broken.append(how)


_broken: list[str] = []


@functools.cache
def breaking(how: str, cls: type) -> Any:
    """A subclass of a model class that breaks the engine in the ranks when it is built there."""

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        _break(how)
        cls.__init__(self, config, *args, **kwargs)

    name = f"{how}__{cls.__name__}"
    return type(name, (cls,), {"__init__": init, "__module__": __name__, "__qualname__": name})


def __getattr__(name: str) -> Any:
    """So that ranks can import these classes by name."""
    how, _, class_name = name.partition("__")
    if not how or not class_name or how not in globals():
        raise AttributeError(name)
    import transformers

    return breaking(how, getattr(transformers, class_name))


def saboteur(how: str, cls: type | None = None, config: Any = None) -> Any:
    """A model on meta whose class and config are what verify reads."""
    assert how in globals(), how
    if cls is None and how == "gradients_of_norms_not_summed":
        cls, config = Qwen3ForCausalLM, Qwen3Config(num_hidden_layers=2, num_key_value_heads=8)
    elif cls is None:
        cls, config = GPT2LMHeadModel, GPT2Config(n_layer=2)
    with torch.device("meta"):
        return breaking(how, cls)(config)
