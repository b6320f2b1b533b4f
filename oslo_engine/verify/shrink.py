"""A tiny model of the same architecture: the config with its sizes made small.

Works on the names that configs have in common, nothing here knows an architecture. What is no size (activations, norms,
kinds of attention, scaling) stays as it is; per-layer lists keep every kind of layer that they have; special tokens are
moved into the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedConfig

from oslo_engine.errors import PlanError
from oslo_engine.verify.settings import Sizes

# 131 is prime: no number of ranks divides the vocabulary. 16 features a head leave an even number to partial rotary embeddings.
HEADS, HEAD_SIZE, VOCAB, INNER, POSITIONS = 4, 16, 131, 52, 64
WIDE_HEAD_SIZE = 24  # where heads times head size is not the hidden size

_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim")
_HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "attention_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
)
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HEAD_SIZE = ("head_dim", "d_kv", "dim_head", "attention_head_size", "kv_channels", "query_pre_attn_scalar")
_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
)
_INNER = (
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "d_ff",
    "ffn_hidden_size",
    "hidden_dim",
)
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_source_positions", "max_target_positions")
_FIXED = {
    "original_max_position_embeddings": POSITIONS // 2,
    "sliding_window": 5,
    "attention_window_size": 5,
    "window_size": 5,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_NOT_ARGUMENTS = ("model_type", "transformers_version", "architectures", "_name_or_path", "id2label", "label2id")


def shrink(
    config: PreTrainedConfig, sizes: Sizes, *, num_blocks: int = 2, dropout: float = 0.0, grouped: bool = False
) -> PreTrainedConfig:
    """The config to verify with, of the same class.

    Args:
        config: any size; unchanged.
        sizes: what was asked for.
        num_blocks: how many there are at least, of all stacks together, unless ``sizes`` says how many layers.
        dropout: every dropout probability becomes this.
        grouped: where the config has as many KV heads as heads, use fewer.

    Raises:
        PlanError: the config has no such size, or its class does not take the small ones.
    """
    given = {name: value for name, value in config.to_dict().items() if name not in _NOT_ARGUMENTS}
    changes = _Changes(config, given, sizes, num_blocks, grouped)
    changed: dict[str, Any] = changes.requested() if sizes.full else changes.tiny()
    changed |= _dropouts(given, dropout, type(config).__name__)
    if sizes.tied is not None:
        changed["tie_word_embeddings"] = sizes.tied
    for name in getattr(config, "sub_configs", None) or {}:
        if isinstance(part := getattr(config, name, None), PreTrainedConfig):
            changed[name] = shrink(part, sizes, num_blocks=num_blocks, grouped=grouped).to_dict()
    try:
        small = type(config)(**{**given, **changed})
    except Exception as error:  # whatever the class's own checks raise
        raise PlanError(
            "the config's class does not take a small size",
            where=type(config).__name__,
            got=f"{type(error).__name__}: {error}",
            hint="pass a config of a small model and full_size=True (--full-size)",
        ) from error
    for name, value in given.items():  # constructors derive settings from one another
        if name not in changed and isinstance(value, (bool, str, float)) and getattr(small, name, value) != value:
            setattr(small, name, value)
    if small.is_encoder_decoder and getattr(small, "decoder_start_token_id", None) is None:
        small.decoder_start_token_id = small.pad_token_id if small.pad_token_id is not None else 0
    return small


class _Changes:
    """The fields of one config that change."""

    def __init__(
        self, config: PreTrainedConfig, given: Mapping[str, Any], sizes: Sizes, num_blocks: int, grouped: bool
    ) -> None:
        self.given, self.sizes, self.what = given, sizes, type(config).__name__
        self.old_heads, self.old_hidden = self._first(_HEADS), self._first(_HIDDEN)
        self.old_layers = self._first(_LAYERS)
        own_head_size = self._first(_HEAD_SIZE)
        self.old_head_size = own_head_size or (self.old_hidden or 0) // (self.old_heads or 1)
        decoupled = own_head_size is not None and own_head_size * (self.old_heads or 0) != self.old_hidden
        self.heads = sizes.heads or HEADS
        self.hidden = self.heads * HEAD_SIZE
        self.head_size = WIDE_HEAD_SIZE if decoupled else HEAD_SIZE
        self.kv_heads = sizes.kv_heads or self._default_kv_heads(grouped)
        self.layers = sizes.layers or max(2, -(-num_blocks // (2 if config.is_encoder_decoder else 1)))

    def tiny(self) -> dict[str, Any]:
        vocab = self.sizes.vocab or VOCAB
        old_vocab = self.given.get("vocab_size")
        changed: dict[str, Any] = {
            **self._set(_HIDDEN, self.hidden),
            **self._set(_HEADS, self.heads, asked="heads" if self.sizes.heads else None),
            **self._set(_KV_HEADS, self.kv_heads, asked="kv_heads" if self.sizes.kv_heads else None),
            **self._set(_HEAD_SIZE, self.head_size),
            **({"head_dim": self.head_size} if "head_dim" in self.given else {}),  # also where it is left to the model, as None
            **self._set(_LAYERS, self.layers, asked="layers" if self.sizes.layers else None),
            **self._set(_INNER, INNER),
            **self._set(_POSITIONS, POSITIONS),
            **{name: value for name, value in _FIXED.items() if _is_size(self.given.get(name))},
        }
        for name, value in self.given.items():
            if value == old_vocab and name.endswith("vocab_size"):
                changed[name] = vocab
            elif name in ("embedding_size", "word_embed_proj_dim") and _is_size(value):
                changed[name] = self.hidden if value == self.old_hidden else self.hidden // 2
            elif name == "rotary_dim" and _is_size(value):
                changed[name] = self.head_size // 2
            elif name == "max_window_layers" and _is_size(value):
                changed[name] = min(value, self.layers)
            elif isinstance(value, (list, tuple)) and len(value) == self.old_layers:
                changed[name] = _each_kind(value, self.layers)
            elif isinstance(value, dict) and name.startswith("rope"):
                changed[name] = _small_rope(value, self.head_size, self.old_head_size)
        return {**changed, **_special_tokens(self.given, vocab)}

    def requested(self) -> dict[str, Any]:
        """Only what was asked for, at full size."""
        sizes = self.sizes
        changed: dict[str, Any] = {}
        for asked, names in (("heads", _HEADS), ("kv_heads", _KV_HEADS), ("layers", _LAYERS), ("vocab", ("vocab_size",))):
            if (value := getattr(sizes, asked)) is not None:
                changed.update(self._set(names, value, asked=asked))
        if sizes.layers:
            lists = {
                name: value
                for name, value in self.given.items()
                if isinstance(value, (list, tuple)) and len(value) == self.old_layers
            }
            changed.update({name: _each_kind(value, sizes.layers) for name, value in lists.items()})
        return {**changed, **(_special_tokens(self.given, sizes.vocab) if sizes.vocab else {})}

    def _set(self, names: Iterable[str], value: int, *, asked: str | None = None) -> dict[str, int]:
        found = {name: value for name in names if _is_size(self.given.get(name))}
        if asked is not None and not found:
            raise PlanError(
                f"the config has no size for {asked}", where=self.what, expected=" or ".join(names), got="none of them"
            )
        return found

    def _first(self, names: Iterable[str]) -> int | None:
        return next((self.given[name] for name in names if _is_size(self.given.get(name))), None)

    def _default_kv_heads(self, grouped: bool) -> int:
        old = self._first(_KV_HEADS)
        if old == 1:
            return 1
        if old == self.old_heads and not grouped:
            return self.heads
        return next(count for count in range(max(self.heads // 2, 1), 0, -1) if self.heads % count == 0)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _each_kind(values: Iterable[Any], count: int) -> list[Any]:
    """``count`` entries that go round all different ones: ``s s s f s s s f`` -> ``s f s``."""
    kinds: list[Any] = []
    for value in values:
        if value not in kinds:
            kinds.append(value)
    return [kinds[at % len(kinds)] for at in range(count)]


def _small_rope(rope: Mapping[str, Any], head_size: int, old_head_size: int) -> dict[str, Any]:
    """Rotary parameters: one factor per frequency where there are such, fewer original positions; per kind of layer or not."""
    small: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            small[name] = _small_rope(value, head_size, old_head_size)
        elif isinstance(value, list) and name.endswith("_factor") and old_head_size:
            small[name] = value[: len(value) * head_size // old_head_size]
        else:
            small[name] = _FIXED.get(name, value)
    return small


def _special_tokens(given: Mapping[str, Any], vocab: int) -> dict[str, Any]:
    """Ids outside the vocabulary move to its end; what was one token stays one."""
    moved: dict[int, int] = {}

    def inside(token: Any) -> Any:
        if isinstance(token, list):
            return [inside(each) for each in token]
        if not isinstance(token, int) or isinstance(token, bool) or token < vocab:
            return token
        return moved.setdefault(token, vocab - 1 - len(moved))

    names = [
        name for name, value in given.items() if name.endswith(("_token_id", "_token_ids", "_tokens")) and value is not None
    ]
    return {name: inside(given[name]) for name in names}


def _dropouts(given: Mapping[str, Any], probability: float, what: str) -> dict[str, float]:
    found = {
        name: 0.0 if name.endswith(("layerdrop", "path_rate")) else probability
        for name, value in given.items()
        if "drop" in name and isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    if probability > 0 and not any(found.values()):
        raise PlanError("the config has no dropout", where=what, expected="a field with 'drop' in its name", got="none")
    return found
