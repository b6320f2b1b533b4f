"""A model that writes down what it hears: ``generate`` and training, split, are those of the unsplit model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oslo_engine as oslo
import small_models

NEW = 6
pytestmark = pytest.mark.slow


def speech_model() -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=small_models.VOCAB,
        d_model=small_models.HIDDEN,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=32,
        decoder_start_token_id=1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )

    model = WhisperForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.3, generator=generator)
    return model


def transcribe(tp: int, pp: int) -> list[str]:
    reference, model = speech_model(), oslo.parallelize(speech_model(), tp=tp, pp=pp).eval()
    features = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(0))
    told = []
    for settings in ({}, {"num_beams": 2}, {"do_sample": True}):
        torch.manual_seed(2)
        wanted = reference.generate(features, max_new_tokens=NEW, **settings)
        torch.manual_seed(2)
        got = model.generate(features, max_new_tokens=NEW, **settings)
        if not torch.equal(got, wanted):
            told.append(f"{settings}: {got.tolist()} instead of {wanted.tolist()}")
    return told


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_speech_gives_the_tokens_of_the_unsplit_model(rank_pool, tp: int, pp: int) -> None:
    for told in rank_pool(tp * pp).run(transcribe, tp, pp):
        assert told == []


def train_on_speech(dtype: torch.dtype) -> tuple[float, float]:
    """Relative error of the loss, and the largest of any gradient, on two stages."""
    reference, model = speech_model().to(dtype), oslo.parallelize(speech_model().to(dtype), pp=2)
    features = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(0), dtype=dtype)
    batch = {"input_features": features, "labels": torch.arange(3, 15).view(2, 6)}
    wanted = reference(**batch).loss
    wanted.backward()
    loss = model.eval().train_step(batch)
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    held = [(name, parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert len(held) > 10
    errors = [float((grad - gradients[name]).norm() / (gradients[name].norm() + 1e-8)) for name, grad in held]
    return abs(float(loss) - float(wanted)) / float(wanted), max(errors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_speech_trains_on_two_stages_as_unsplit(rank_pool, dtype: torch.dtype) -> None:
    for loss_error, gradient_error in rank_pool(2).run(train_on_speech, dtype):
        assert loss_error < 1e-5
        assert gradient_error < 1e-4
