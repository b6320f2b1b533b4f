"""Models on pretend devices, compared with the same model on one device. Jobs for a rank pool of one process.

The unplaced model lies on one pretend device. Loss and logits must be equal to its bit for bit, unless "cpu" is in the map,
where models choose other operations. Gradients may differ in their last bits: what flows from several devices into one value
(the output of an encoder, a tied weight) is added up for each device first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

import pretend_devices
from oslo_engine import deparallelize, parallelize
from oslo_engine.placement.stacks import find_stacks
from oslo_engine.tiny.batches import Shape, make_batch, make_inputs
from oslo_engine.tiny.fill import fill
from oslo_engine.tiny.sizes import Sizes
from oslo_engine.tiny.subject import find_subject

DEVICES = {
    "2": ("sim:0", "sim:1"),
    "3": ("sim:0", "sim:1", "sim:2"),
    "4": ("sim:3", "sim:0", "sim:1", "sim:2"),
    "cpu": ("cpu", "sim:0", "sim:2"),
}
SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4}
TOLERANCE = 2e-6  # of the largest entry
NOISE = 1e-8  # of the largest entry of any gradient
Made = tuple[Any, dict[str, Any], dict[str, Any] | None]  # model, batch with labels, arguments of generate


def text_model(task: str, model_type: str) -> Made:
    subject = find_subject(model_type, task).shrunk(Sizes(layers=4), num_blocks=4)
    model = subject.build(lambda cls, config: cls._from_config(config, attn_implementation="eager"))
    fill(model, 0)
    batch = make_batch(model.config, Shape(3, 9, 6), micro_batch_size=1, seed=0, model=model)
    if not model.can_generate() or "input_ids" not in batch:
        return model.eval(), batch, None
    ids, mask = make_inputs(model.config, 3, 7, torch.Generator().manual_seed(1))
    return model.eval(), batch, {"input_ids": ids, "attention_mask": mask}


def image_model() -> Made:
    """Classifies pictures."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**SMALL, intermediate_size=32, image_size=16, patch_size=8, num_labels=4)
    return _filled(
        ViTForImageClassification(config), {"pixel_values": _noise(3, 3, 16, 16), "labels": torch.tensor([0, 2, 3])}, {}
    )


def speech_model() -> Made:
    """From sound to text."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    layers = {f"{part}_{what}": 4 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    special = {"pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = WhisperConfig(
        **layers, **special, vocab_size=64, d_model=16, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8,
        max_source_positions=10, max_target_positions=32, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    sound = {"input_features": _noise(3, 8, 20)}
    batch = {**sound, "labels": torch.randint(3, 60, (3, 6), generator=torch.Generator().manual_seed(1))}
    return _filled(WhisperForConditionalGeneration(config), batch, sound)


def picture_and_text_model() -> Made:
    """From a picture and text to text."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(**SMALL, intermediate_size=32, image_size=16, patch_size=8)
    text = LlamaConfig(**SMALL, intermediate_size=32, vocab_size=64)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=63, vision_feature_layer=-1)
    ids = torch.randint(3, 60, (3, 9), generator=torch.Generator().manual_seed(1))
    ids[:, 1:5] = 63  # four patches
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": _noise(3, 3, 16, 16)}
    return _filled(LlavaForConditionalGeneration(config), {**inputs, "labels": ids.masked_fill(ids == 63, -100)}, inputs)


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _filled(model: Any, batch: dict[str, Any], inputs: dict[str, Any]) -> Made:
    fill(model, 0)
    return model.eval(), batch, inputs or None


def spread(model: Any, devices: Sequence[str]) -> dict[str, str]:
    """A map with blocks on every device, in order."""
    blocks = [block for stack in find_stacks(model) for block in stack.blocks]
    return {block: devices[at * len(devices) // len(blocks)] for at, block in enumerate(blocks)}


def train(model: Any, batch: dict[str, Any]) -> Any:
    model.zero_grad()
    with pretend_devices.single_threaded_backward():
        output = model(**batch)
        output.loss.backward()
    return output


def on_device(batch: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def surface(model: Any) -> Any:
    """What deparallelize must bring back: class, attributes, hooks of every module, keys and devices of the state dict."""
    hooks = [(len(module._forward_pre_hooks), len(module._forward_hooks)) for module in model.modules()]
    names = [sorted(vars(module)) for module in model.modules()]
    state = {name: (value.device, tuple(value.shape)) for name, value in model.state_dict().items()}
    return type(model), hooks, names, state


def generated(model: Any, inputs: dict[str, Any]) -> list[Any]:
    settings: list[dict[str, Any]] = [{}, {"num_beams": 3}]
    return [model.generate(**inputs, max_new_tokens=5, do_sample=False, **each).cpu() for each in settings]


def check_placed(make: Callable[..., Made], *args: str, devices: Sequence[str] = tuple(DEVICES)) -> None:
    """Forward, loss, every gradient, greedy and beam ids of a placed model are those of one device; and it can be undone."""
    pretend_devices.install()
    model_on_cpu, batch, inputs = make(*args)
    whole = copy.deepcopy(model_on_cpu).to("sim:0")
    whole.tie_weights()
    expected, state = train(whole, on_device(batch, "sim:0")), copy.deepcopy(whole.state_dict())
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    ids = generated(whole, on_device(inputs, "sim:0")) if inputs is not None else []
    # Some gradients are zero but for rounding, such as those of key biases.
    noise = NOISE * max(float(gradient.cpu().abs().max()) for gradient in gradients.values() if gradient is not None)
    for name in devices:
        model = copy.deepcopy(model_on_cpu)
        with torch.no_grad():
            model(**batch)  # some of Transformers' models put hooks of their own on themselves in the first forward
        before = surface(model)
        parallelize(model, device_map=spread(model, DEVICES[name]))
        assert {str(parameter.device) for parameter in model.parameters()} >= set(DEVICES[name]) - {"cpu"}
        output = train(model, batch)
        assert output.loss.device.type == "cpu"
        assert _same(output.loss, expected.loss, name), name
        assert _same(output.logits, expected.logits, name), name
        factor = 10 if name == "cpu" else 1
        for key, parameter in model.named_parameters():
            assert parameter.grad is None or parameter.grad.device == parameter.device
            assert _alike(parameter.grad, gradients[key], factor * noise, factor * TOLERANCE), (name, key)
        if inputs is not None:
            for own, other in zip(generated(model, inputs), ids, strict=True):
                assert torch.equal(own, other), name
        deparallelize(model)
        assert surface(model) == before
        assert all(torch.equal(value, state[key].cpu()) for key, value in model.state_dict().items())
        assert _same(train(model, batch).loss, expected.loss, "cpu")


def _same(one: Any, other: Any, devices: str) -> bool:
    return _alike(one, other, 0.0) if devices == "cpu" else torch.equal(one.cpu(), other.cpu())


def _alike(one: Any, other: Any, noise: float, tolerance: float = TOLERANCE) -> bool:
    if one is None or other is None:
        return one is other
    expected = other.cpu()
    return bool((one.cpu() - expected).abs().max() <= max(tolerance * expected.abs().max(), noise))


def check_copies(task: str, model_type: str) -> None:
    """In a forward and in a generation, on 2 and on 4 devices: copies over a border, beside accelerate's on the same map."""
    from accelerate import dispatch_model

    pretend_devices.install()
    model, batch, inputs = text_model(task, model_type)
    assert inputs is not None
    for name in ("2", "4"):
        ours = parallelize(copy.deepcopy(model), device_map=spread(model, DEVICES[name]))
        by_path = {path: str(device) for path, device in ours.device_map.items()}  # type: ignore[attr-defined]
        theirs = dispatch_model(copy.deepcopy(model), device_map=by_path, force_hooks=True)
        theirs.tie_weights()
        given = on_device(inputs, DEVICES[name][0])
        counts = []
        for each in (ours, theirs):
            with torch.no_grad(), pretend_devices.count_copies() as forward:
                each(**batch)
            with pretend_devices.count_copies() as generation:
                each.generate(**given, max_new_tokens=4, min_new_tokens=4, do_sample=False)
            counts.append({f"{kind} {what}": n for what, c in (("f", forward), ("g", generation)) for kind, n in c.items()})
        assert counts[0]["between f"] >= len(DEVICES[name]) - 1, "the value that the blocks hand on"
        assert all(counts[0][kind] <= counts[1][kind] for kind in counts[0]), (name, counts)
