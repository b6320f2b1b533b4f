"""Which layers of a deep model a shallow one keeps: one of each kind, in their order.

Configs say what a layer is in lists with an entry a layer (``s s s f s s s f``) or in lists of layer numbers. Layers that are
alike in all such lists are of one kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MOST_KINDS = 6  # lists with ever other values (a rate a layer) say nothing about kinds
_NUMBERS = ("layers", "layer_indices", "layer_ids", "layers_idx", "layer_idx", "indices", "idxs", "layers_to_transform")


class Kinds:
    """The lists about layers of one config, and how to write them for fewer layers.

    Args:
        given: the config's fields.
        num_layers: how many layers they are about.
        wanted: patterns to use instead of the config's own, or of one that the class works out; they repeat.
    """

    def __init__(self, given: Mapping[str, Any], num_layers: int | None, wanted: Mapping[str, Any]) -> None:
        lists = {name: value for name, value in given.items() if isinstance(value, (list, tuple)) and num_layers}
        self._wanted = {
            name: value
            for name, value in wanted.items()
            if isinstance(value, list) and (given.get(name) is None or (name in lists and len(lists[name]) == num_layers))
        }
        rest = {name: value for name, value in lists.items() if name not in self._wanted}
        self._numbers = {
            name: value for name, value in rest.items() if name.endswith(_NUMBERS) and _are_layers(value, num_layers or 0)
        }
        self._of_layers = {
            name: value for name, value in rest.items() if name not in self._numbers and len(value) == num_layers
        }
        self._examples = self._find(num_layers or 0)

    @property
    def patterns(self) -> tuple[str, ...]:
        """Which of ``wanted`` are about layers."""
        return tuple(self._wanted)

    @property
    def count(self) -> int:
        """Layers that are needed to have all kinds."""
        kinds = len(self._examples) if len(self._examples) <= _MOST_KINDS else 0
        return max((kinds, *(len(value) for value in self._wanted.values())))

    def lists(self, num_layers: int) -> dict[str, list[Any]]:
        """The lists for this many layers, which go round the kinds."""
        kept = self._kept(num_layers)
        made = {name: [value[layer] for layer in kept] for name, value in self._of_layers.items()}
        for name, value in self._numbers.items():
            made[name] = [at for at, layer in enumerate(kept) if layer in value]
        for name, value in self._wanted.items():
            made[name] = [value[at % len(value)] for at in range(num_layers)]
        return made

    def overrides(self, by_layer: Mapping[Any, Any], num_layers: int) -> list[tuple[int, Any]]:
        """(layer, entry) of a mapping from some layers, for this many layers."""
        entries = {int(layer): entry for layer, entry in by_layer.items() if str(layer).isdecimal()}
        return [(at, entries[layer]) for at, layer in enumerate(self._kept(num_layers)) if layer in entries]

    def _kept(self, num_layers: int) -> list[int]:
        return [self._examples[at % len(self._examples)] for at in range(num_layers)] if self._examples else []

    def _find(self, num_layers: int) -> list[int]:
        """The first layer of each kind."""
        kinds: dict[str, int] = {}
        for layer in range(num_layers):
            kind = [value[layer] for value in self._of_layers.values()]
            kind += [layer in value for value in self._numbers.values()]
            kinds.setdefault(repr(kind), layer)
        return list(kinds.values())


def _are_layers(value: Sequence[Any], num_layers: int) -> bool:
    """Different numbers of layers in their order."""
    numbers = all(isinstance(each, int) and not isinstance(each, bool) for each in value)
    return numbers and bool(value) and list(value) == sorted({each for each in value if 0 <= each < num_layers})
