"""``generate`` of a split model gives the tokens of the unsplit one, in every way to generate, and never hangs."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    DynamicCache,
    GPT2LMHeadModel,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import oslo_engine as oslo
import small_models
from oslo_engine.errors import PipelineError, UnsupportedError

NEW = 6


def whole(name: str, **more: Any) -> Any:
    """A model whose texts vary."""
    cls, config, _ = getattr(small_models, name)(**more)
    config.tie_word_embeddings = False
    model = cls(config)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.3, generator=generator)
    return model.eval()


def prompts(rows: int, length: int = 7, seed: int = 0) -> Tensor:
    """Each repeats itself, so that there is something to look up."""
    ids = torch.randint(3, small_models.VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    ids[:, -3:] = ids[:, :3]
    return ids


def left_padded(rows: int = 3) -> dict[str, Tensor]:
    ids, mask = prompts(rows), torch.ones(rows, 7, dtype=torch.int64)
    for row in range(1, rows):
        ids[row, :row], mask[row, :row] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


class StopsAtLength(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


class Forbids(LogitsProcessor):
    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, self.tokens] = -1e9
        return scores


Way = Callable[[Any], Any]


def way(rows: int = 2, padded: bool = False, seed: int = 11, **settings: Any) -> Way:
    def run(model: Any) -> Any:
        inputs = left_padded(rows) if padded else {"input_ids": prompts(rows)}
        torch.manual_seed(seed)
        return model.generate(**inputs, **{"max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False, **settings})

    return run


def from_embeddings(model: Any) -> Tensor:
    table = torch.randn(small_models.VOCAB, small_models.HIDDEN, generator=torch.Generator().manual_seed(1))
    embeds = table[prompts(2)]
    return model.generate(inputs_embeds=embeds, max_new_tokens=NEW, pad_token_id=0, do_sample=False)


def continued(model: Any) -> Tensor:
    settings = {"max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(prompts(2), cache=DynamicCache(config=model.config), **settings)
    longer = torch.cat([first.sequences, prompts(2, 3, seed=5)], dim=1)
    return model.generate(longer, cache=first.cache, **settings).sequences


def helped(model: Any, **settings: Any) -> Tensor:
    """By a model that is often right: this one with a little noise."""
    helper = whole("gpt2")
    for parameter in helper.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)), alpha=0.01)
    return way(1, assistant_model=helper, **settings)(model)


WAYS: dict[str, Way] = {
    "greedy": way(),
    "one row, long prompt": lambda model: model.generate(prompts(1, 40), max_new_tokens=NEW, pad_token_id=0, do_sample=False),
    "left padding": way(3, padded=True),
    "sampling": way(do_sample=True),
    "sampling, left padding, top_p": way(3, padded=True, do_sample=True, top_p=0.8, temperature=1.3),
    "sampling, several returned": way(do_sample=True, num_return_sequences=3),
    "beams": way(num_beams=3),
    "beams, several returned, length penalty": way(num_beams=3, num_return_sequences=2, length_penalty=2.0),
    "beam sampling": way(num_beams=2, do_sample=True, top_k=20),
    "repetition": way(repetition_penalty=1.5, no_repeat_ngram_size=2, max_new_tokens=12),
    "least length": way(min_new_tokens=4, eos_token_id=list(range(3, 40))),
    "rows end early": way(4, eos_token_id=list(range(3, 30)), max_new_tokens=12),
    "beams end early": way(eos_token_id=list(range(3, 20)), num_beams=2, early_stopping=True),
    "criterion": way(stopping_criteria=StoppingCriteriaList([StopsAtLength(9)])),
    "processor": way(logits_processor=LogitsProcessorList([Forbids(*range(40, 90))])),
    "allowed tokens": way(prefix_allowed_tokens_fn=lambda row, ids: [5, 6, 7 + row]),
    "static cache": way(cache_implementation="static"),
    "prompt lookup": way(1, prompt_lookup_num_tokens=3, max_new_tokens=14),
    "prompt lookup, sampling": way(1, prompt_lookup_num_tokens=2, do_sample=True, top_k=3, max_new_tokens=14),
    "no cache": way(use_cache=False),
}
DECODER_ONLY = {
    "guidance": way(guidance_scale=1.5),
    "embeddings": from_embeddings,
    "continued": continued,
    "helped": helped,
    "helped, sampling": lambda model: helped(model, do_sample=True, top_k=5),
    "chunked prefill": way(prefill_chunk_size=3),
    "chunked prefill into a static cache": way(prefill_chunk_size=3, cache_implementation="static"),
}


def ways_of(name: str) -> dict[str, Way]:
    return WAYS if name in ("t5", "bart") else {**WAYS, **DECODER_ONLY}


def compare(name: str, tp: int, pp: int, only: list[str] | None = None) -> dict[str, str]:
    """What differs, by the way to generate."""
    reference, model = whole(name), oslo.parallelize(whole(name), tp=tp, pp=pp).eval()
    torch.manual_seed(dist.get_rank())
    told = {}
    for title, run in ways_of(name).items():
        if only is not None and title not in only:
            continue
        try:
            wanted = run(reference)
        except Exception as error:
            told[title] = f"unsplit: {type(error).__name__}: {error}"[:200]
            continue
        got = run(model)
        if got.shape != wanted.shape or not torch.equal(got, wanted):
            told[title] = f"{got.tolist()} instead of {wanted.tolist()}"
    return told


LAYOUTS = [(2, 1), (1, 2)]


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
@pytest.mark.parametrize("name", ["gpt2"])
def test_tokens_are_those_of_the_unsplit_model(rank_pool, name: str, tp: int, pp: int) -> None:
    for told in rank_pool(tp * pp).run(compare, name, tp, pp):
        assert told == {}


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize("name", ["llama", "t5", "bart", "mixtral", "gemma3"])
def test_tokens_are_those_of_the_unsplit_model_for_other_architectures(rank_pool, name: str, tp: int, pp: int) -> None:
    for told in rank_pool(tp * pp).run(compare, name, tp, pp, timeout_s=110):
        assert told == {}


class Refuses(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        raise ValueError("this criterion fails")


class RefusesScores(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        raise ValueError("this processor fails")


class Collects(BaseStreamer):
    def __init__(self, limit: int = 100) -> None:
        self.tokens: list[int] = []
        self.limit, self.ended = limit, False

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()
        if len(self.tokens) > self.limit:
            raise ValueError("this streamer fails")

    def end(self) -> None:
        self.ended = True


def on_one_rank(tp: int, pp: int, rank: int) -> dict[str, Any]:
    """What happens where one rank's caller stops early, streams, or fails."""
    reference, model = whole("gpt2"), oslo.parallelize(whole("gpt2"), tp=tp, pp=pp).eval()
    mine = dist.get_rank() == rank
    torch.manual_seed(dist.get_rank())
    settings: dict[str, Any] = {"max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False}
    ids, told = prompts(1), {}
    plain = reference.generate(ids, **settings)

    stop = StoppingCriteriaList([StopsAtLength(9)] if mine else [])
    told["stopped"] = torch.equal(model.generate(ids, stopping_criteria=stop, **settings), plain[:, :9])

    streamer = Collects() if mine else None
    told["streamed"] = torch.equal(model.generate(ids, streamer=streamer, **settings), plain)
    told["streamed right"] = streamer is None or (streamer.tokens == plain.flatten().tolist() and streamer.ended)

    failing: dict[str, Any] = {
        "criterion": {"stopping_criteria": StoppingCriteriaList([Refuses()] if mine else [])},
        "processor": {"logits_processor": LogitsProcessorList([RefusesScores()] if mine else [])},
        "streamer": {"streamer": Collects(limit=9) if mine else None},
    }
    for what, given in failing.items():
        try:
            model.generate(ids, **given, **settings)
            told[what] = "nothing raised"
        except (ValueError, PipelineError) as error:
            told[what] = f"{type(error).__name__}: {error}".partition("\n")[0]
        told[f"after the {what}"] = torch.equal(model.generate(ids, **settings), plain)
    return told


@pytest.mark.parametrize(("tp", "pp", "rank"), [(2, 1, 0), (2, 1, 1), (1, 2, 0), (1, 2, 1)])
def test_what_one_rank_does_all_do(rank_pool, tp: int, pp: int, rank: int) -> None:
    for number, told in enumerate(rank_pool(2).run(on_one_rank, tp, pp, rank)):
        for what in ("criterion", "processor", "streamer"):
            expected = f"ValueError: this {what} fails" if number == rank else "PipelineError: "
            assert told[what].startswith(expected)
        assert all(value is True for name, value in told.items() if name not in ("criterion", "processor", "streamer")), told


def shown(tp: int, pp: int) -> dict[str, float]:
    """Largest error of what ``generate`` shows."""
    reference, model = whole("gpt2"), oslo.parallelize(whole("gpt2"), tp=tp, pp=pp).eval()
    settings: dict[str, Any] = {"max_new_tokens": NEW, "pad_token_id": 0, "return_dict_in_generate": True}
    settings |= {"output_scores": True, "output_logits": True, "output_hidden_states": True}
    found = {}
    for title, more in {"greedy": {}, "sampling": {"do_sample": True, "top_k": 0}, "beams": {"num_beams": 2}}.items():
        torch.manual_seed(4)
        wanted = reference.generate(prompts(2), **settings, **{"do_sample": False, **more})
        torch.manual_seed(4)
        got = model.generate(prompts(2), **settings, **{"do_sample": False, **more})
        assert torch.equal(got.sequences, wanted.sequences)
        for name in ("scores", "logits"):
            pairs = zip(got[name], wanted[name], strict=True)
            found[f"{title} {name}"] = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
        steps = zip(got.hidden_states, wanted.hidden_states, strict=True)
        states = [pair for ours, theirs in steps for pair in zip(ours, theirs, strict=True)]
        found[f"{title} hidden states"] = max(float((a - b).abs().max()) for a, b in states)
    return found


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_scores_logits_and_hidden_states_are_those_of_the_unsplit_model(rank_pool, tp: int, pp: int) -> None:
    for errors in rank_pool(2).run(shown, tp, pp):
        assert len(errors) == 9
        assert max(errors.values()) < 1e-4, errors


class HandsOn(GPT2LMHeadModel):
    """As some classes of Transformers have it, which do something of their own first."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return super().generate(*args, **kwargs)


def given_without_names() -> bool:
    reference, model = whole("gpt2"), whole("gpt2")
    model.__class__ = HandsOn
    model = oslo.parallelize(model, tp=2).eval()
    settings = {"max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False}
    return torch.equal(model.generate(prompts(2), **settings), reference.generate(prompts(2), **settings))


def test_a_class_that_hands_on_its_arguments_takes_them_without_names(rank_pool) -> None:
    assert all(rank_pool(2).run(given_without_names))


GROUPED: dict[str, Way] = {
    "greedy": way(5, max_new_tokens=12),
    "rows end early": way(5, eos_token_id=list(range(3, 30)), max_new_tokens=12),
    "left padding": way(4, padded=True),
    "beams": way(3, num_beams=2, num_return_sequences=2, eos_token_id=list(range(3, 20)), max_new_tokens=10),
    "no cache": way(3, use_cache=False),
    "many micro-batches": way(16, use_cache=False, max_new_tokens=3),
    "many rows": way(34, max_new_tokens=3),
    "many beams": way(9, num_beams=4, max_new_tokens=3),
}
BY_DEFAULT = ("many rows", "many beams")  # dealt out without being asked for


def compare_groups(name: str, tp: int, pp: int) -> dict[str, Any]:
    """What differs; and how many groups there were by default."""
    reference, model = whole(name), oslo.parallelize(whole(name), tp=tp, pp=pp).eval()
    runs = []
    state = model._oslo
    real = state.program.runtime.evaluate

    def noted(micros: Any) -> Any:
        runs.append(state.program.runtime.turns)
        return real(micros)

    state.program.runtime.evaluate = noted
    told: dict[str, Any] = {}
    for title, run in GROUPED.items():
        wanted = run(reference)
        for groups in (None, 1, 2, 3):
            generate = model.generate
            model.generate = lambda *args, _g=groups, _r=generate, **kwargs: _r(*args, decode_groups=_g, **kwargs)
            runs.clear()
            got = run(model)
            del model.generate
            if not torch.equal(got, wanted):
                told[f"{title}, {groups} groups"] = f"{got.tolist()} instead of {wanted.tolist()}"
            dealt = title in BY_DEFAULT if groups is None else groups > 1
            if (runs[0] is None) is dealt:
                told[f"{title}, {groups} groups"] = f"ran with {runs[0]}"
    return told


@pytest.mark.parametrize(("name", "tp", "pp"), [("llama", 1, 2), ("t5", 1, 2)])
def test_groups_of_rows_give_the_tokens_of_the_batch(rank_pool, name: str, tp: int, pp: int) -> None:
    for told in rank_pool(tp * pp).run(compare_groups, name, tp, pp):
        assert told == {}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tp", "pp"), [("gpt2", 1, 4), ("mixtral", 2, 2), ("gemma3", 1, 3), ("bart", 1, 4)])
def test_groups_of_rows_at_other_layouts(rank_pool, name: str, tp: int, pp: int) -> None:
    for told in rank_pool(tp * pp).run(compare_groups, name, tp, pp, timeout_s=110):
        assert told == {}


def seconds_of_decoding(row_s: float, rows: int, new: int) -> dict[int, float]:
    """By number of groups, with stages whose time is that of their rows."""
    model = oslo.parallelize(whole("gpt2"), pp=2).eval()
    own = model._oslo.mesh.at.pp_rank * 2
    model.transformer.h[own].mlp.register_forward_pre_hook(lambda module, args: time.sleep(row_s * args[0].shape[0]))
    found = {}
    for groups in (1, 2):
        dist.barrier()
        start = time.perf_counter()
        model.generate(
            prompts(rows), max_new_tokens=new, min_new_tokens=new, pad_token_id=0, do_sample=False, decode_groups=groups
        )
        found[groups] = time.perf_counter() - start
    return found


def test_two_groups_on_two_stages_take_little_more_than_half_the_time(rank_pool) -> None:
    for seconds in rank_pool(2).run(seconds_of_decoding, 0.015, 8, 8):
        assert seconds[1] / seconds[2] > 1.5, seconds


def fail_in_the_middle(rank: int) -> tuple[str, bool]:
    """A stage that fails for one group: all ranks raise, none hangs, and the model goes on."""
    reference, model = whole("gpt2"), oslo.parallelize(whole("gpt2"), pp=2).eval()
    calls = [0]

    def fails(module: Any, args: Any) -> None:
        calls[0] += 1
        if calls[0] == 6:
            raise ValueError("this stage fails")

    if model._oslo.mesh.at.pp_rank == rank:
        model.transformer.h[rank * 2].mlp.register_forward_pre_hook(fails)
    settings: dict[str, Any] = {"max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False}
    try:
        model.generate(prompts(4), decode_groups=3, **settings)
        told = "nothing raised"
    except (ValueError, PipelineError) as error:
        told = f"{type(error).__name__}: {error}"
    return told, torch.equal(model.generate(prompts(4), **settings), reference.generate(prompts(4), **settings))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_that_fails_for_one_group_ends_all_of_them(rank_pool, rank: int) -> None:
    answers = rank_pool(2).run(fail_in_the_middle, rank)
    assert answers[rank] == ("ValueError: this stage fails", True)
    assert answers[1 - rank][0].startswith("PipelineError")
    assert "this stage fails" in answers[1 - rank][0]
    assert answers[1 - rank][1]


def ask_for_groups(**settings: Any) -> str:
    model = oslo.parallelize(whole("gpt2"), pp=2).eval()
    try:
        model.generate(prompts(2), max_new_tokens=2, pad_token_id=0, decode_groups=2, **settings)
    except UnsupportedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("settings", [{"cache_implementation": "static"}, {"return_dict_in_generate": True}])
def test_groups_are_refused_where_rows_must_stay_together(rank_pool, settings: dict[str, Any]) -> None:
    assert all("cannot be decoded in groups" in message for message in rank_pool(2).run(ask_for_groups, **settings))


def leaves_groups_on() -> dict[str, bool]:
    """A single row with ``decode_groups=2``, in ways that several rows would have to be decoded together."""
    reference, model = whole("gpt2"), oslo.parallelize(whole("gpt2"), pp=2).eval()
    told = {}
    for title, settings in {"greedy": {}, "static": {"cache_implementation": "static"}, "beams": {"num_beams": 2}}.items():
        given = {"max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False, **settings}
        got = model.generate(prompts(1), decode_groups=2, **given)
        told[title] = torch.equal(got, reference.generate(prompts(1), **given))
    return told


def test_a_single_row_is_one_group_whatever_was_asked_for(rank_pool) -> None:
    for told in rank_pool(2).run(leaves_groups_on):
        assert told == {"greedy": True, "static": True, "beams": True}


def run_beside_a_state() -> dict[str, Any]:
    """Of a class that keeps a part of its state in its modules: what would share that state, and what may run."""
    torch.manual_seed(0)  # some of its weights are vectors that the class draws
    reference = whole("recurrent_gemma")
    model = oslo.parallelize(copy.deepcopy(reference), pp=2).eval()
    told: dict[str, Any] = {}
    refused = {"guidance": way(guidance_scale=1.5), "groups": way(4, decode_groups=2)}
    for title, run in refused.items():
        try:
            told[title] = run(model).tolist()
        except UnsupportedError as error:
            told[title] = str(error)
    same = {
        "greedy": way(),
        "many rows": way(34, max_new_tokens=4),  # would be dealt into groups
        "guidance without a cache": way(guidance_scale=1.5, use_cache=False),
        "beams": way(num_beams=2),
    }
    for title, run in same.items():
        told[title] = torch.equal(run(model), run(reference))
    return told


def test_nothing_runs_between_the_tokens_of_a_class_that_keeps_its_state_in_its_modules(rank_pool) -> None:
    for told in rank_pool(2).run(run_beside_a_state):
        assert "keeps a state in its modules" in told.pop("guidance")
        assert "a state kept in the model's modules" in told.pop("groups")
        assert all(value is True for value in told.values()), told


def ask_without_a_pipeline(tp: int) -> list[str]:
    model = oslo.parallelize(whole("gpt2"), tp=tp).eval() if tp > 1 else oslo.GPT2LMHeadModel(whole("gpt2").config).eval()
    told = []
    for wish in (2, 0, True):
        try:
            model.generate(prompts(2), max_new_tokens=2, pad_token_id=0, decode_groups=wish)
            told.append("")
        except UnsupportedError as error:
            told.append(error.what)
    assert model.generate(prompts(2), max_new_tokens=2, pad_token_id=0, decode_groups=1).shape == (2, 9)
    return told


@pytest.mark.parametrize("tp", [1, 2])
def test_groups_are_refused_without_a_pipeline(rank_pool, tp: int) -> None:
    for told in rank_pool(tp).run(ask_without_a_pipeline, tp):
        assert told == ["only a pipeline decodes in groups of rows", *["the number of groups must be a positive integer"] * 2]


def random_settings(draw: random.Random) -> dict[str, Any]:
    """Settings of ``generate`` that go together."""
    settings: dict[str, Any] = {"max_new_tokens": draw.randint(1, 10), "pad_token_id": 0, "do_sample": draw.random() < 0.5}
    optional: dict[str, Any] = {
        "num_beams": draw.randint(1, 4),
        "min_new_tokens": draw.randint(1, settings["max_new_tokens"]),
        "repetition_penalty": draw.uniform(0.7, 1.6),
        "no_repeat_ngram_size": draw.randint(1, 3),
        "eos_token_id": draw.sample(range(3, small_models.VOCAB), draw.randint(1, 25)),
        "suppress_tokens": draw.sample(range(3, small_models.VOCAB), 20),
        "renormalize_logits": True,
        "use_cache": False,
    }
    sampled: dict[str, Any] = {
        "temperature": draw.uniform(0.3, 2),
        "top_k": draw.randint(1, 60),
        "top_p": draw.uniform(0.3, 1),
        "min_p": draw.uniform(0, 0.2),
        "typical_p": draw.uniform(0.4, 1),
    }
    pool = {**optional, **(sampled if settings["do_sample"] else {})}
    chosen = draw.sample(sorted(pool), draw.randint(0, 4))
    settings |= {name: pool[name] for name in chosen}
    beams = settings.get("num_beams", 1)
    if beams > 1 or settings["do_sample"]:
        settings["num_return_sequences"] = draw.randint(1, beams if beams > 1 else 3)
    if beams > 1 and draw.random() < 0.5:
        settings["length_penalty"] = draw.uniform(-1, 2)
    return settings


def compare_random_settings(tp: int, pp: int, count: int) -> list[str]:
    draw, told = random.Random(1), []
    names = ["gpt2", "llama", "t5", "mixtral", "gemma3"]
    pairs = {name: (whole(name), oslo.parallelize(whole(name), tp=tp, pp=pp).eval()) for name in names}
    for number in range(count):
        name, settings = draw.choice(names), random_settings(draw)
        run = way(draw.randint(1, 4), padded=draw.random() < 0.5, seed=number, **settings)
        reference, model = pairs[name]
        wanted = run(reference)
        got = run(model)
        if got.shape != wanted.shape or not torch.equal(got, wanted):
            told.append(f"{name} {settings}: {got.tolist()} instead of {wanted.tolist()}")
    return told


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_a_hundred_random_settings_agree(rank_pool, tp: int, pp: int) -> None:
    for told in rank_pool(2).run(compare_random_settings, tp, pp, 100, timeout_s=450):
        assert told == []


def asks_for_a_quantised_cache(tp: int, pp: int) -> str:
    model = oslo.parallelize(whole("gpt2"), tp=tp, pp=pp).eval()
    try:
        model.generate(prompts(1), max_new_tokens=2, pad_token_id=0, cache_implementation="quantized")
    except UnsupportedError as error:
        return error.what
    return ""


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_quantised_caches_are_refused(rank_pool, tp: int, pp: int) -> None:
    assert all("quantised cache" in told for told in rank_pool(2).run(asks_for_a_quantised_cache, tp, pp))
