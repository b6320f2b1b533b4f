"""Which fields of a config change, and to what, when the model becomes tiny."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedConfig

from oslo_engine.tiny import names
from oslo_engine.tiny.kinds import Kinds
from oslo_engine.tiny.names import HEAD_SIZE, HEADS, INNER, POSITIONS, VOCAB
from oslo_engine.tiny.sizes import Sizes
from oslo_engine.tiny.written import ANY, written_sizes

# What can be asked for, and the fields that hold it.
ASKED = {
    "heads": names.HEADS_NAMES,
    "kv_heads": names.KV_HEADS_NAMES,
    "layers": names.LAYERS_NAMES,
    "vocab": ("vocab_size",),
}
BY_LAYER = "per_layer_config"  # an argument of every config class: number of a layer -> fields that differ there
_TOKEN_ENDS = ("_token_id", "_token_ids", "_token_index", "_token_idx", "_index", "_id")


class Changes:
    """The fields of one config that change.

    Args:
        config: whose.
        given: its fields.
        sizes: what was asked for.
        num_blocks: how many there are at least, of all stacks together.
        by_name: see ``shrink``.
        written: fields that the policies' file sets.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        given: Mapping[str, Any],
        sizes: Sizes,
        num_blocks: int,
        by_name: bool,
        written: Mapping[str, Any],
    ) -> None:
        self.given, self.sizes, self.by_name = given, sizes, by_name
        self.written = written if by_name else _not_to_replace(given, written)
        self.old_heads, self.old_hidden = self._first(names.HEADS_NAMES), self._first(names.HIDDEN_NAMES)
        # Some have only lists with an entry a layer.
        self.old_layers = self._first(names.LAYERS_NAMES) or getattr(config, "num_hidden_layers", None)
        own_head_size = self._first(names.HEAD_SIZE_NAMES)
        self.old_head_size = own_head_size or (self.old_hidden or 0) // (self.old_heads or 1)
        decoupled = own_head_size is not None and own_head_size * (self.old_heads or 0) != self.old_hidden
        self.heads = sizes.heads or HEADS
        self.hidden = self.heads * HEAD_SIZE
        self.head_size = names.WIDE_HEAD_SIZE if decoupled else HEAD_SIZE
        self.kv_heads = self._kv_heads()
        self.kinds = Kinds(given, self.old_layers, self.written)
        enough = max(2, -(-num_blocks // (2 if config.is_encoder_decoder else 1)), self.kinds.count)
        self.layers = sizes.layers or enough
        self.vocab = sizes.vocab or VOCAB

    def tiny(self) -> dict[str, Any]:
        changed = {name: small for name, value in self.given.items() if (small := self._small(name, value)) is not None}
        changed |= self._lists(self.layers)
        if isinstance(each := self.given.get(BY_LAYER), dict):
            changed[BY_LAYER] = {at: self._small_overrides(layer) for at, layer in self.kinds.overrides(each, self.layers)}
        changed |= _special_tokens(self.given, self.vocab)
        everywhere = {name: value for name, value in written_sizes(ANY).items() if is_size(self.given.get(name))}
        written = {name: value for name, value in {**everywhere, **self.written}.items() if name not in self.kinds.patterns}
        return changed | {name: self._worked_out(value) for name, value in written.items()}

    def requested(self) -> dict[str, Any]:
        """Only what was asked for, at full size."""
        changed: dict[str, Any] = {}
        for asked, found in ASKED.items():
            if (value := getattr(self.sizes, asked)) is not None:
                changed.update(self._set(found, value))
        if self.sizes.layers:
            changed.update(self.kinds.lists(self.sizes.layers))
            if isinstance(each := self.given.get(BY_LAYER), dict):
                changed[BY_LAYER] = dict(self.kinds.overrides(each, self.sizes.layers))
        return {**changed, **(_special_tokens(self.given, self.sizes.vocab) if self.sizes.vocab else {})}

    def _small(self, name: str, value: Any) -> Any:
        """What becomes of a field; None if it stays."""
        if name == "head_dim" and (value is None or is_size(value)):  # also where it is left to the model
            return self._head_dim(value)
        if isinstance(value, dict) and name.startswith("rope"):
            return _small_rope(value, self.head_size, self.old_head_size)
        if isinstance(value, (list, tuple)):
            return [names.LISTS[name]] * len(value) if name in names.LISTS else None
        if not is_size(value):
            return None
        if (size := next((size for table, size in self._tables() if name in table), None)) is not None:
            return size
        if name in names.FIXED:
            return names.FIXED[name]
        if name in names.AT_MOST:
            return min(value, names.AT_MOST[name])
        return self._by_ending(name, value)

    def _tables(self) -> tuple[tuple[tuple[str, ...], int], ...]:
        return (
            (names.HIDDEN_NAMES + names.WIDTH_NAMES, self.hidden),
            (names.HEADS_NAMES + names.LINEAR_KEY_HEADS_NAMES, self.heads),
            (names.KV_HEADS_NAMES, self.kv_heads),
            (names.HEAD_SIZE_NAMES, self.head_size),
            (names.LAYERS_NAMES, self.layers),
            (names.INNER_NAMES, INNER),
            (names.POSITION_NAMES, POSITIONS),
            (names.STATE_HEADS_NAMES, 2 * self.heads),
        )

    def _by_ending(self, name: str, value: int) -> int | None:
        if name.endswith(("vocab_size", "_vocab")) or name.startswith("vocab_size"):
            old = self.given.get("vocab_size") or value
            return self.vocab if 2 * value > old else min(value, names.SIDE_VOCAB)
        if name in names.OWN_WIDTH_NAMES:
            return self._width(value)
        if name in names.STATE_GROUPS_NAMES:
            return self._groups(value)
        if name == "rotary_dim":
            return self.head_size // 2
        if name == "max_window_layers":
            return min(value, self.layers)
        if not self.old_layers or value > self.old_layers:
            return None
        if name.endswith(("_period", "_freq", "_step", "_interval")):
            return min(value, 2)  # every so many layers
        return 1 if name.endswith("_offset") else None

    def _lists(self, num_layers: int) -> dict[str, Any]:
        """Per-layer lists; sizes among them become small and stay different."""
        made: dict[str, Any] = self.kinds.lists(num_layers)
        tables = ((names.INNER_NAMES, INNER), (names.HEADS_NAMES, self.heads), (names.KV_HEADS_NAMES, self.kv_heads))
        for name, value in made.items():
            small = next((small for table, small in tables if name in table), names.LISTS.get(name))
            if small is not None and name not in self.written:
                order = sorted(set(value))
                made[name] = [small + 4 * order.index(each) if small == INNER else small for each in value]
        return made

    def _head_dim(self, value: int | None) -> int:
        """In latent attention it is that of a part, or of both."""
        parts = {name: self.given[name] for name in ("qk_rope_head_dim", "qk_nope_head_dim") if is_size(self.given.get(name))}
        same = next((names.FIXED[name] for name, size in parts.items() if size == value), None)
        if same is None and len(parts) == 2 and sum(parts.values()) == value:
            return names.FIXED["qk_head_dim"]
        return same or self.head_size

    def _small_overrides(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return {name: small if (small := self._small(name, value)) is not None else value for name, value in given.items()}

    def _width(self, value: int) -> int:
        if value == self.old_hidden:
            return self.hidden
        return self.hidden // 2 if value < (self.old_hidden or value) else 2 * self.hidden

    def _groups(self, value: int) -> int:
        return 1 if value == 1 else self.kv_heads if self.kv_heads < self.heads else self._fewer_heads()

    def _worked_out(self, value: Any) -> Any:
        """Written sizes may depend on those that were asked for."""
        if isinstance(value, list):
            return [self._worked_out(each) for each in value]
        return value(self._unit) if callable(value) else value

    def _unit(self, name: str) -> int:
        units = {"heads": self.heads, "kv_heads": self.kv_heads, "head_size": self.head_size, "hidden": self.hidden}
        return {**units, "layers": self.layers, "vocab": self.vocab}[name]

    def _set(self, found: Iterable[str], value: int) -> dict[str, int]:
        return {name: value for name in found if is_size(self.given.get(name))}

    def _first(self, found: Iterable[str]) -> int | None:
        return next((self.given[name] for name in found if is_size(self.given.get(name))), None)

    def _kv_heads(self) -> int:
        if is_size(self.given.get("kv_lora_rank")):
            return self.heads  # latent attention makes the keys of all heads of one latent
        if self.sizes.kv_heads:
            return self.sizes.kv_heads
        old = self._first(names.KV_HEADS_NAMES)
        if old == 1:
            return 1
        if old == self.old_heads and not self.by_name:
            return self.heads
        return self._fewer_heads()

    def _fewer_heads(self) -> int:
        return next(count for count in range(max(self.heads // 2, 1), 0, -1) if self.heads % count == 0)


def _not_to_replace(given: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """What is written, less what somebody's own config says: settings, and kinds of layers that it does not have."""
    kept: dict[str, Any] = {}
    for name, value in written.items():
        own = given.get(name)
        if own and isinstance(value, (str, dict)):
            continue
        if isinstance(own, (list, tuple)) and isinstance(value, list) and any(isinstance(each, str) for each in value):
            value = [each for each in value if each in own] or list(own)
        kept[name] = value
    return kept


def is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _small_rope(rope: Mapping[str, Any], head_size: int, old_head_size: int) -> dict[str, Any]:
    """Rotary parameters: one factor per frequency where there are such, fewer original positions; per kind of layer or not."""
    small: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            small[name] = _small_rope(value, head_size, old_head_size)
        elif isinstance(value, list) and name.endswith("_factor") and old_head_size:
            small[name] = value[: len(value) * head_size // old_head_size]
        elif isinstance(value, list) and name.endswith("_section") and old_head_size:
            small[name] = _small_section(value, sum(value) * head_size // old_head_size)
        else:
            small[name] = names.FIXED.get(name, value)
    return small


def _small_section(shares: list[int], total: int) -> list[int]:
    """About the same shares of a smaller total, the first ones larger."""
    small = [share * total // sum(shares) for share in shares]
    return [each + (at < total - sum(small)) for at, each in enumerate(small)]


def _special_tokens(given: Mapping[str, Any], vocab: int) -> dict[str, Any]:
    """Ids outside the vocabulary move to its end; what was one token stays one."""
    moved: dict[int, int] = {}

    def inside(token: Any) -> Any:
        if isinstance(token, (list, tuple)):
            return [inside(each) for each in token]
        if not isinstance(token, int) or isinstance(token, bool) or token < vocab:
            return token
        return moved.setdefault(token, vocab - 1 - len(moved))

    return {
        name: inside(value)
        for name, value in given.items()
        if value is not None and (name.endswith(_TOKEN_ENDS) or (name.endswith("_tokens") and isinstance(value, list)))
    }
