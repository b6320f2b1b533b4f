"""``generate`` of a split model: Transformers' own, on every rank, with what makes the ranks agree in its place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from transformers import GenerationMixin

from oslo_engine.errors import UnsupportedError
from oslo_engine.generation.agreement import Agreement
from oslo_engine.generation.groups import fill_token, generate_in_groups, has_own_generate, number_of_groups
from oslo_engine.generation.heads import Heads
from oslo_engine.generation.stopping import GuardedStreamer
from oslo_engine.rewrite.state import ParallelState, parallel_state

_CACHES = ("cache", "past_key_values")
_OTHER_LOOPS = ("custom_generate", "penalty_alpha", "dola_layers", "constraints", "force_words_ids", "diversity_penalty")
_ASSISTED = ("assistant_model", "prompt_lookup_num_tokens")


def run_generate(
    model: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], decode_groups: int | None
) -> Any:
    """``generate``, as one call of all ranks.

    Args:
        original: ``generate`` of the model's class, bound.
        decode_groups: of rows, in a pipeline; see ``number_of_groups``.

    Raises:
        UnsupportedError: a way to generate that ranks cannot do together.

    Communication: collective over tp and pp.
    """
    with parallel_state(model).mesh.calls.call("generate"):
        return _run(model, original, args, kwargs, decode_groups)


def _run(
    model: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], decode_groups: int | None
) -> Any:
    state = parallel_state(model)
    given = _by_name(original, args, kwargs)
    asked = _Asked(model, given)
    _refuse(asked, pipeline=state.program is not None)
    assisted = any(asked(name) is not None for name in _ASSISTED)
    agreement = Agreement.begin(
        state.mesh.model,
        deciding_rank(state),
        state.mesh.device,
        own_processors=bool(given.get("logits_processor")) or given.get("prefix_allowed_tokens_fn") is not None,
        # The clocks of the ranks differ.
        own_stops=bool(given.get("stopping_criteria")) or given.get("streamer") is not None or asked("max_time") is not None,
        assisted=assisted,
    )
    if given.get("streamer") is not None:
        given["streamer"] = GuardedStreamer(given["streamer"], agreement)
    before, state.agreement = state.agreement, agreement
    program = state.program
    shown = ("output_logits",) if program is None else ("output_logits", "output_hidden_states")
    shows_outputs = bool(asked("return_dict_in_generate")) and any(asked(name) for name in shown)
    # A loop that is not Transformers' own may look at logits on every rank.
    everywhere = shows_outputs or has_own_generate(model) or any(asked(name) for name in _OTHER_LOOPS)
    agreement.several_stages = program is not None
    in_last_stage = state.mesh.at.pp_rank == state.plan.rank_of_stage[-1]
    heads = Heads(model, state.mesh.tp, computes=in_last_stage)
    try:
        with program.generating(whole_outputs=everywhere, writes_logits=assisted) if program is not None else nullcontext():
            groups = number_of_groups(model, state, agreement, given, asked, decode_groups)
            if not (everywhere or agreement.own_processors):
                heads.put_logits("first rank")
                agreement.heads = heads if groups == 1 else None
            if groups > 1:
                return generate_in_groups(state, original, given, groups, fill_token(asked))
            output = original(**given)
    finally:
        heads.restore()
        state.agreement = before
    if agreement.scores:
        output["scores"] = tuple(agreement.scores)
    return output


def deciding_rank(state: ParallelState) -> int:
    """Of the ranks that hold one copy of the model: tp rank 0 of the last stage."""
    return state.plan.rank_of_stage[-1] * state.plan.topology.tp


def _by_name(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    parameters = list(inspect.signature(original).parameters.values())
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):  # the class hands on what it is given
        parameters = list(inspect.signature(GenerationMixin.generate).parameters.values())[1:]
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    if len(args) > len(names):
        raise TypeError(f"generate takes {len(names)} arguments without a name, got {len(args)}")
    return {**dict(zip(names, args, strict=False)), **kwargs}


class _Asked:
    """What one setting is in this call."""

    def __init__(self, model: Any, given: Mapping[str, Any]) -> None:
        self.model, self._given = model, given
        self._config = given.get("generation_config") or model.generation_config

    def __call__(self, name: str) -> Any:
        value = self._given.get(name)
        return getattr(self._config, name, None) if value is None else value


def _refuse(asked: _Asked, *, pipeline: bool) -> None:
    """Ways to generate in which tokens are proposed from inside the split model, or whose state has no place in a pipeline."""
    for name in ("assistant_early_exit", "use_mtp"):
        if asked(name):
            raise UnsupportedError(
                "a split model does not propose tokens to itself",
                got=f"{name}={asked(name)}",
                hint="assistant_model=... and prompt_lookup_num_tokens=... work",
            )
    from transformers.cache_utils import QuantizedCache

    if asked("cache_implementation") == "quantized" or any(isinstance(asked(name), QuantizedCache) for name in _CACHES):
        raise UnsupportedError(
            "a split model has no quantised cache: the numbers that share a scale in the unsplit one's lie on several ranks",
            hint="leave it out: every rank holds the cache of its own heads and layers only",
        )
    if asked("speculation_type") is not None and asked("assistant_model") is not None:
        raise UnsupportedError(
            "an assistant that reads the layers of a split model does not work",
            got=f"speculation_type={asked('speculation_type')!r}",
            hint="use an assistant that is a model of its own",
        )
    if pipeline and not asked.model._supports_default_dynamic_cache() and asked("use_cache") is not False:
        raise UnsupportedError(
            "a pipeline cannot continue from the state that this class keeps between tokens",
            where=type(asked.model).__name__,
            hint="pass use_cache=False: every step then computes the whole text anew",
        )
