"""Dropout: the same masks on replicated activations, other ones on each rank's heads, and the same again through recompute."""

from __future__ import annotations

from typing import Any

import torch

import oslo_engine as oslo
import small_models
from oslo_engine.rewrite.state import parallel_state

ATTENTION, MLP = "attn.attn_dropout", "mlp.dropout"


def build(*, checkpointing: bool = False, pp: int = 1, tp: int = 2, seed: int | None = 5, **options: Any) -> Any:
    cls, config, _ = small_models.gpt2(resid_pdrop=0.3, attn_pdrop=0.3, embd_pdrop=0.3, attn_implementation="eager")
    torch.manual_seed(0)
    model = oslo.parallelize(cls(config), tp=tp, pp=pp, seed=seed, **options).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def batch(rows: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, small_models.VOCAB, (rows, 12), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids}


def masks(model: Any) -> dict[str, torch.Tensor]:
    """Which entries every dropout module zeroed in the last forward."""
    seen: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda _, args, out, name=name: seen.setdefault(name, []).append(out == 0))
    return seen


def run_masks() -> dict[str, Any]:
    torch.manual_seed(torch.distributed.get_rank())  # the user's own state differs between ranks: it must not matter
    model = build()
    before = torch.get_rng_state()
    seen = masks(model)
    model(**batch()).loss.backward()
    model(**batch()).loss.backward()
    return {"seen": seen, "user_state_kept": torch.equal(before, torch.get_rng_state())}


def test_replicated_activations_share_masks_and_heads_do_not(rank_pool) -> None:
    first, second = rank_pool(2).run(run_masks)
    assert first["user_state_kept"]
    names = [name for name in first["seen"] if name.endswith(("drop", "resid_dropout", "mlp.dropout"))]
    assert len(names) == 1 + 2 * small_models.LAYERS
    for name in names:
        for ours, theirs in zip(first["seen"][name], second["seen"][name], strict=True):
            assert torch.equal(ours, theirs), name
        assert not torch.equal(first["seen"][name][0], first["seen"][name][1]), "every step draws other masks"


def attention_masks() -> list[torch.Tensor]:
    """Attention dropout is a function call: its masks are read off the probabilities."""
    seen: list[torch.Tensor] = []
    original = torch.nn.functional.dropout

    def dropout(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = original(x, *args, **kwargs)
        if x.ndim == 4:
            seen.append((out == 0) & (x != 0))
        return out

    torch.nn.functional.dropout = dropout
    try:
        build()(**batch())
    finally:
        torch.nn.functional.dropout = original
    return seen


def test_attention_masks_differ_between_ranks(rank_pool) -> None:
    first, second = rank_pool(2).run(attention_masks)
    assert len(first) == small_models.LAYERS
    for ours, theirs in zip(first, second, strict=True):
        assert ours.shape == theirs.shape
        assert not torch.equal(ours, theirs)


def gradients(options: dict[str, Any], steps: int = 1) -> dict[str, torch.Tensor]:
    model = build(**options)
    for _ in range(steps):
        if options.get("pp", 1) > 1:
            model.train_step(batch(4))
        else:
            model(**batch(4)).loss.backward()
    parallel = parallel_state(model)
    assert parallel.streams.enabled
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_recompute_redraws_the_same_masks(rank_pool) -> None:
    for options in ({}, {"sequence_parallel": True}, {"tp": 1, "pp": 2, "micro_batch_size": 2}):
        plain = rank_pool(2).run(gradients, options)
        recomputed = rank_pool(2).run(gradients, {**options, "checkpointing": True})
        for ours, theirs in zip(plain, recomputed, strict=True):
            assert ours.keys() == theirs.keys()
            for name in ours:
                torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-7, msg=name)


def test_the_seed_decides(rank_pool) -> None:
    one, again, other = (rank_pool(2).run(gradients, {"seed": seed})[0] for seed in (1, 1, 2))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def losses_of_stages() -> list[float]:
    model = build(tp=1, pp=2, micro_batch_size=2)
    return [model.train_step(batch(4)).item() for _ in range(3)]


def test_a_pipeline_draws_other_masks_every_step(rank_pool) -> None:
    first, second = rank_pool(2).run(losses_of_stages)
    assert first == second
    assert len(set(first)) == 3
