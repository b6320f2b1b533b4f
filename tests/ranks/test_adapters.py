"""LoRA in a split model, put in before it was split or afterwards, against PEFT around the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import oslo_engine as oslo
import small_models
from oslo_engine.errors import UnsupportedError
from oslo_engine.rewrite.state import parallel_state
from trainer_runs import as_launched, curve, trainer_of
from training_runs import Recipe, differences, train_rank, train_unsplit

# Column and row layers, fused QKV, embeddings, and what is whole.
TARGETS = {
    "gpt2": ["c_attn", "c_proj", "c_fc", "wte", "wpe"],
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "embed_tokens", "lm_head"],
    "bert": ["query", "key", "value", "dense", "word_embeddings"],
    "t5": ["q", "v", "o", "wi", "wo", "embed_tokens"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "albert": ["query", "value", "dense", "ffn"],  # one block, which both stages hold
    "bloom": ["query_key_value", "dense", "dense_h_to_4h"],
}
RATE, STEPS, LENGTH = 0.05, 3, 10


def small(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    if name == "phi3":
        from transformers import Phi3Config, Phi3ForCausalLM

        config = Phi3Config(**small_models._llama_like(pad_token_id=0, **more))
        cls: Any = Phi3ForCausalLM
    else:
        cls, config, _ = getattr(small_models, name)(**more)
    for option in [option for option in vars(config) if "drop" in option]:
        setattr(config, option, 0.0)
    return cls(config).train()


def lora(name: str, **more: Any) -> Any:
    import peft

    settings = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS[name], "fan_in_fan_out": name == "gpt2"}
    return peft.LoraConfig(**{**settings, **more})


def adapt(model: Any, config: Any) -> Any:
    """PEFT around a whole model, with both halves as if they had been trained: one is zero at the beginning."""
    import peft

    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return adapted


def batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(3, small_models.VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def train(adapted: Any, clip: Any, *, pp: int = 1) -> tuple[list[float], list[float], list[dict[str, Tensor]]]:
    """Losses, gradient norms and gradients by name, of each step."""
    optimizer = torch.optim.SGD([parameter for parameter in adapted.parameters() if parameter.requires_grad], lr=RATE)
    losses, norms, gradients = [], [], []
    for step in range(STEPS):
        output = adapted(**batch(step))
        losses.append(0.0)
        for micro in output if pp > 1 else [output]:
            micro.loss.backward()
            losses[-1] += micro.loss.item()
        gradients.append({n: p.grad.clone() for n, p in adapted.named_parameters() if p.grad is not None})
        norms.append(float(clip(adapted)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, gradients


def clip_whole(adapted: Any) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(adapted.parameters(), 0.5)


def split(name: str, tp: int, pp: int, before: bool, folder: Path, config: Any = None, **more: Any) -> Any:
    """The adapted model of ``adapt``, split."""
    import peft

    model = small(name)
    if before:
        return oslo.parallelize(adapt(model, config or lora(name)), tp=tp, pp=pp, **more)
    oslo.parallelize(model, tp=tp, pp=pp, **more)
    return peft.PeftModel.from_pretrained(model, folder, is_trainable=True)


def train_split(name: str, tp: int, pp: int, before: bool, folder: Path, **more: Any) -> Any:
    adapted = split(name, tp, pp, before, folder, **more)
    model = adapted.get_base_model()
    found = train(adapted, lambda _: oslo.clip_grad_norm_(model, 0.5), pp=pp)
    state = parallel_state(model)
    shards = {f"base_model.model.{tensor.name}": tensor.shard for tensor in state.adapters}
    return *found, shards, state.mesh.at.tp_rank


def check(name: str, ranks: list[Any], wanted: Any) -> None:
    losses, norms, gradients = wanted
    seen: set[str] = set()
    for ours, our_norms, our_gradients, shards, tp_rank in ranks:
        assert ours == pytest.approx(losses, rel=1e-5)
        assert our_norms == pytest.approx(norms, rel=1e-4)
        for step, of_step in enumerate(our_gradients):
            for key, gradient in of_step.items():
                whole = gradients[step][key]
                expected = whole if shards[key] is None else shards[key].apply(whole, tp_rank)
                assert gradient.shape == expected.shape, key
                error = float((gradient - expected).abs().max())
                assert error <= 1e-4 * float(whole.abs().max()) + 1e-8, (name, step, key, error)
                seen.add(key)
    assert seen == set(gradients[0])


RUNS = [("gpt2", 2, 2), ("llama", 2, 1), ("llama", 1, 2), ("albert", 2, 2), ("bert", 2, 1), ("t5", 2, 2)]
SLOW_RUNS = [(name, tp, pp) for name in TARGETS for tp, pp in ((2, 1), (1, 2), (2, 2)) if (name, tp, pp) not in RUNS]
SLOW_RUNS += [("llama", 4, 1)]  # two ranks hold one KV head


@pytest.mark.parametrize(("name", "tp", "pp"), [*RUNS, *(pytest.param(*run, marks=pytest.mark.slow) for run in SLOW_RUNS)])
def test_adapters_train_as_around_the_whole_model(rank_pool: Any, tmp_path: Path, name: str, tp: int, pp: int) -> None:
    adapted = adapt(small(name), lora(name))
    adapted.save_pretrained(tmp_path)
    wanted = train(adapted, clip_whole)
    for before in (True, False):
        check(name, rank_pool(tp * pp).run(train_split, name, tp, pp, before, tmp_path), wanted)


# -- files


def files(folder: Path) -> dict[str, Any]:
    """The bytes of the weights, and the config without the order in which a set of names was written."""
    found: dict[str, Any] = {
        path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".json", ".safetensors")
    }
    config = json.loads(found["adapter_config.json"])
    return {**found, "adapter_config.json": {**config, "target_modules": sorted(config["target_modules"])}}


def save_split(name: str, tp: int, pp: int, before: bool, folder: Path, out: Path) -> str:
    adapted = split(name, tp, pp, before, folder)
    with pytest.raises(UnsupportedError) as alone:
        adapted.save_pretrained(out)
    with pytest.raises(UnsupportedError, match="merge"):
        adapted.save_pretrained_with_parallel(out, save_with_merging=True)
    adapted.save_pretrained_with_parallel(out / "adapters")
    adapted.merge_and_unload().save_pretrained_with_parallel(out / "merged", save_with_merging=True)
    return str(alone.value)


@pytest.mark.parametrize(("name", "tp", "pp", "before"), [("gpt2", 2, 2, True), ("llama", 2, 2, False), ("phi3", 2, 1, False)])
def test_adapters_are_saved_loaded_and_merged_as_of_the_whole_model(
    rank_pool: Any, tmp_path: Path, name: str, tp: int, pp: int, before: bool
) -> None:
    adapted = adapt(small(name), lora(name))
    adapted.save_pretrained(tmp_path / "whole")
    out = tmp_path / "split"
    for message in rank_pool(tp * pp).run(save_split, name, tp, pp, before, tmp_path / "whole", out):
        assert "save_pretrained_with_parallel" in message
    assert files(out / "adapters") == files(tmp_path / "whole")
    merged = type(small(name)).from_pretrained(out / "merged").state_dict()
    for key, value in adapted.merge_and_unload().state_dict().items():
        torch.testing.assert_close(merged[key], value, rtol=1e-5, atol=1e-7)


# -- random numbers


def masks_and_gradients(name: str, folder: Path, checkpointing: bool, steps: int = 1) -> Any:
    """Which entries each dropout before an adapter kept, call by call, and the gradients."""
    torch.manual_seed(torch.distributed.get_rank())  # the user's own state must not matter
    adapted = split(name, 2, 1, True, folder, lora(name, lora_dropout=0.4), seed=5)
    if checkpointing:
        adapted.gradient_checkpointing_enable({"use_reentrant": False})
    seen: dict[str, list[Tensor]] = {}
    for key, module in adapted.named_modules():
        if isinstance(module, torch.nn.Dropout) and "lora_dropout" in key:
            module.register_forward_hook(lambda _, args, out, key=key: seen.setdefault(key, []).append(out != 0))
    for _ in range(steps):
        adapted(**batch(0)).loss.backward()
    return seen, {key: p.grad for key, p in adapted.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_dropout_masks_are_alike_before_columns_and_apart_before_rows(rank_pool: Any, tmp_path: Path, name: str) -> None:
    (first, _), (second, _) = rank_pool(2).run(masks_and_gradients, name, tmp_path, False, 2)
    rows = ("c_proj", "output.dense")
    columns = 0
    for key, (ours, again) in first.items():
        assert not torch.equal(ours, again), "every step draws other masks"
        if any(row in key for row in rows):
            assert not torch.equal(ours, second[key][0]), key
        else:
            assert torch.equal(ours, second[key][0]), key
            columns += 1
    assert columns >= 2 * small_models.LAYERS


@pytest.mark.parametrize("name", ["gpt2"])
def test_recomputation_draws_the_masks_of_adapters_again(rank_pool: Any, tmp_path: Path, name: str) -> None:
    once = rank_pool(2).run(masks_and_gradients, name, tmp_path, False)
    twice = rank_pool(2).run(masks_and_gradients, name, tmp_path, True)
    for (_, wanted), (seen, found) in zip(once, twice, strict=True):
        assert all(len(calls) == 2 for calls in seen.values())
        for key, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[key])


# -- the loops people have

LOOPS = [
    Recipe("gpt2", tp=2, dp=2, lora=True, accumulation=2),
    Recipe("llama", tp=2, pp=2, lora=True, schedule="zero-bubble"),
    Recipe("llama", tp=2, dp=2, lora=True, wrapper="fsdp2"),
    Recipe("gpt2", tp=2, dp=2, lora=True, sequence_parallel=True, checkpointing=True),
]
SLOW_LOOPS = [
    Recipe("bert", tp=2, pp=2, lora=True, checkpointing=True),
    Recipe("t5", pp=2, dp=2, lora=True),
    Recipe("llama", pp=2, dp=2, lora=True, wrapper="fsdp2"),
    Recipe("llama", pp=2, dp=2, lora=True, schedule="interleaved"),
    Recipe("mixtral", tp=2, pp=2, lora=True),
]


@pytest.mark.parametrize("recipe", [*LOOPS, *(pytest.param(run, marks=pytest.mark.slow) for run in SLOW_LOOPS)], ids=str)
def test_adapters_train_in_the_usual_wrappers(rank_pool: Any, recipe: Recipe) -> None:
    found = differences(recipe, train_unsplit(recipe), rank_pool(4).run(train_rank, recipe))
    assert max(found.values()) < 1e-5


def stopped(folder: Path, tp: int, pp: int, resume: bool) -> list[float]:
    """Losses of three steps, or of the two that follow a checkpoint of them at another layout."""
    import peft

    model = oslo.parallelize(small("llama"), tp=tp, pp=pp)
    adapted = peft.get_peft_model(model, lora("llama"))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    if resume:
        oslo.load_training(folder, adapted, optimizer)
    losses = []
    for step in range(1 if resume else 0, 3):
        losses.append(float(model.train_step(batch(step))))
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            oslo.save_training(folder, adapted, optimizer)
    return losses


def test_training_adapters_goes_on_at_another_layout(rank_pool: Any, tmp_path: Path) -> None:
    wanted = rank_pool(2).run(stopped, tmp_path, 2, 1, False)[0]
    for losses in rank_pool(2).run(stopped, tmp_path, 1, 2, True):
        assert losses == pytest.approx(wanted[1:], rel=1e-5)


def trainer_losses(folder: Path, tp: int, pp: int) -> list[float]:
    as_launched()
    adapted = split("gpt2", tp, pp, True, folder)
    copies = adapted.get_base_model().mpu.get_data_parallel_world_size()
    settings = {"save_strategy": "steps", "save_steps": 3}
    trainer = trainer_of(oslo, adapted, folder / "run", copies, **settings)
    trainer.train()
    again = trainer_of(oslo, adapted, folder / "run", copies, **settings)
    again.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-3"))
    assert curve(again) == pytest.approx(curve(trainer))
    trainer.save_model(str(folder / "end"))
    return curve(trainer)


def test_trainer_trains_resumes_and_saves_adapters(rank_pool: Any, tmp_path: Path) -> None:
    import transformers

    reference = trainer_of(transformers, adapt(small("gpt2"), lora("gpt2")), tmp_path / "one", 1)
    reference.train()
    for losses in rank_pool(2).run(trainer_losses, tmp_path, 2, 1):
        assert losses == pytest.approx(curve(reference), rel=1e-4)
    found = files(tmp_path / "end")["adapter_config.json"]
    reference.save_model(str(tmp_path / "one" / "end"))
    assert found == files(tmp_path / "one" / "end")["adapter_config.json"]


# -- what comes after parallelize


def initial_values(tp: int, pp: int) -> dict[str, Tensor]:
    """Adapters that PEFT has put into a split model, whole, as far as this rank has them; rank 0 decides."""
    import peft

    model = oslo.parallelize(small("llama"), tp=tp, pp=pp)
    torch.manual_seed(7 if torch.distributed.get_rank() == 0 else torch.distributed.get_rank())
    adapted = peft.get_peft_model(model, lora("llama", init_lora_weights="gaussian"))
    found, values = {}, dict(adapted.named_parameters())
    for tensor in parallel_state(model).adapters:
        if torch.distributed.get_rank() // tp in parallel_state(model).plan.holders(tensor):
            value = values[f"base_model.model.{tensor.name}"].detach()
            parts = [torch.empty(tensor.local_shape(rank)) for rank in range(tp)]
            if tensor.shard is None:
                found[tensor.name] = value.clone()
            elif tp > 1:
                torch.distributed.all_gather(parts, value, group=model.mpu.get_tensor_model_parallel_group())
                found[tensor.name] = tensor.shard.undo(parts)
    return found


def test_adapters_put_into_a_split_model_begin_the_same_for_every_layout(rank_pool: Any) -> None:
    by_rank = rank_pool(2).run(initial_values, 2, 1)
    stages = rank_pool(2).run(initial_values, 1, 2)
    of_pipeline = {**stages[0], **stages[1]}
    assert set(by_rank[0]) == set(of_pipeline)
    for name, value in by_rank[0].items():
        assert torch.equal(value, by_rank[1][name])
        assert torch.equal(value, of_pipeline[name])
        assert bool(value.any()) == ("lora_A" in name or "embedding_B" in name)


def second_adapter(folder: Path) -> tuple[list[float], list[float]]:
    """Losses with the first and with the second of two adapters, the second one loaded into the adapted model."""
    adapted = split("gpt2", 2, 1, False, folder / "first")
    first = float(adapted(**batch(0)).loss)
    adapted.load_adapter(folder / "second", "other", is_trainable=True)
    adapted.set_adapter("other")
    loss = adapted(**batch(0)).loss
    loss.backward()
    norm = float(oslo.clip_grad_norm_(adapted, 1.0))
    adapted.save_pretrained_with_parallel(folder / "saved")
    return [first, float(loss)], [norm]


def test_a_second_adapter_is_loaded_and_trained(rank_pool: Any, tmp_path: Path) -> None:
    first = adapt(small("gpt2"), lora("gpt2"))
    first.save_pretrained(tmp_path / "first")
    other = adapt(small("gpt2"), lora("gpt2", r=2, target_modules=["c_attn", "c_proj", "c_fc", "lm_head"]))
    other.save_pretrained(tmp_path / "second")
    loss = other(**batch(0)).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    for losses, norms in rank_pool(2).run(second_adapter, tmp_path):
        assert losses == pytest.approx([float(first(**batch(0)).loss), float(loss)], rel=1e-5)
        assert norms == pytest.approx([float(norm)], rel=1e-4)
    first.load_adapter(tmp_path / "second", "other")
    first.save_pretrained(tmp_path / "both")
    for folder in (".", "other"):
        assert files(tmp_path / "saved" / folder) == files(tmp_path / "both" / folder)


REFUSED = {
    "IA3": lambda peft: peft.IA3Config(target_modules=["c_attn"], feedforward_modules=[]),
    "DoraLinearVariant": lambda peft: lora("gpt2", use_dora=True, target_modules=["c_attn"]),
    "modules_to_save": lambda peft: lora("gpt2", modules_to_save=["ln_f"]),
    "PROMPT_TUNING": lambda peft: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    "PREFIX_TUNING": lambda peft: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    "pissa": lambda peft: lora("gpt2", init_lora_weights="pissa", target_modules=["c_attn"]),
}


def refused(kind: str, before: bool, tp: int, pp: int) -> str:
    import peft

    model, config = small("gpt2"), REFUSED[kind](peft)
    if not before:
        oslo.parallelize(model, tp=tp, pp=pp)
        with pytest.raises(UnsupportedError) as error:
            peft.get_peft_model(model, config)
        return str(error.value)
    adapted = peft.get_peft_model(model, config)
    with pytest.raises(UnsupportedError) as error:
        oslo.parallelize(adapted, tp=tp, pp=pp)
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "before"), [(kind, before) for kind in REFUSED for before in (True, False) if kind != "pissa" or not before]
)
def test_what_cannot_be_split_is_refused_by_name_on_every_rank(rank_pool: Any, kind: str, before: bool) -> None:
    for message in rank_pool(2).run(refused, kind, before, 2, 1):
        assert kind in message


class Prompted(torch.nn.Module):
    """A trained prompt in front of a model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.module, self.prompt = model, torch.nn.Parameter(torch.zeros(4, LENGTH, small_models.HIDDEN))

    def forward(self, labels: Tensor) -> Any:
        return self.module(inputs_embeds=self.prompt, labels=labels)


def prompts() -> list[str]:
    wrapped, messages = Prompted(oslo.parallelize(small("gpt2"), tp=2)), []
    wrapped(batch(0)["labels"]).loss.backward()
    with pytest.raises(UnsupportedError) as error:
        oslo.clip_grad_norm_(wrapped, 1.0)
    messages.append(str(error.value))
    wrapped = Prompted(oslo.parallelize(small("gpt2"), pp=2))
    with pytest.raises(UnsupportedError) as error:
        wrapped(batch(0)["labels"])
    return [*messages, str(error.value)]


def test_what_is_trained_in_front_of_a_split_model_is_not_left_out_silently(rank_pool: Any) -> None:
    for in_front, of_pipeline in rank_pool(2).run(prompts):
        assert "prompt" in in_front
        assert "inputs_embeds" in of_pipeline


def generated(folder: Path) -> Tensor:
    adapted = split("llama", 2, 2, False, folder).eval()
    return adapted.generate(input_ids=batch(0)["input_ids"], max_new_tokens=6, do_sample=False, pad_token_id=0)


def test_a_split_model_with_adapters_generates_what_the_whole_one_does(rank_pool: Any, tmp_path: Path) -> None:
    adapted = adapt(small("llama"), lora("llama")).eval()
    adapted.save_pretrained(tmp_path)
    wanted = adapted.generate(input_ids=batch(0)["input_ids"], max_new_tokens=6, do_sample=False, pad_token_id=0)
    for ids in rank_pool(4).run(generated, tmp_path):
        assert torch.equal(ids, wanted)


@pytest.mark.parametrize("adapters_first", [True, False])
def test_a_fused_model_heeds_its_adapters(tmp_path: Path, adapters_first: bool) -> None:
    import peft

    wanted = adapt(small("llama"), lora("llama"))
    wanted.save_pretrained(tmp_path)
    model = oslo.parallelize(small("llama"), fuse=None if adapters_first else True)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path, is_trainable=True)
    if adapters_first:
        model.fuse()
    loss, right = adapted(**batch(0)).loss, wanted(**batch(0)).loss
    loss.backward()
    right.backward()
    assert float(loss) == pytest.approx(float(right), rel=1e-5)
    whole = {name: parameter.grad for name, parameter in wanted.named_parameters() if parameter.grad is not None}
    for name, parameter in adapted.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, whole.pop(name), rtol=1e-4, atol=1e-6)
    assert not whole


# -- stages without anything to train


def frozen(part: str, tp: int, pp: int, wrapper: str) -> tuple[list[float], list[float]]:
    """Losses and gradient norms where only the parameters with ``part`` in their names are trained."""
    model = small("gpt2")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part in name)
    outer = oslo.parallelize(model, tp=tp, pp=pp)
    trainable = [parameter for parameter in outer.parameters() if parameter.requires_grad]
    if wrapper == "ddp" and trainable:
        outer = torch.nn.parallel.DistributedDataParallel(outer, process_group=model.mpu.get_data_parallel_group())
    optimizer = torch.optim.SGD(trainable, lr=RATE) if trainable else None
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(0.0)
        output = outer(**batch(step))
        for micro in output if pp > 1 else [output]:
            micro.loss.backward()
            losses[-1] += micro.loss.item()
        norms.append(float(oslo.clip_grad_norm_(model, 0.5)))
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


@pytest.mark.parametrize("wrapper", ["none", "ddp"])
@pytest.mark.parametrize("part", ["h.0.mlp", "h.3.mlp", "ln_f", "wpe"])
def test_stages_without_anything_to_train(rank_pool: Any, part: str, wrapper: str) -> None:
    model = small("gpt2")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part in name)
    losses, norms, _ = train(model, clip_whole)
    for ours, our_norms in rank_pool(2).run(frozen, part, 1, 2, wrapper):
        assert ours == pytest.approx(losses, rel=1e-5)
        assert our_norms == pytest.approx(norms, rel=1e-4)
