from __future__ import annotations

import json
from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from oslo_engine.errors import PlanError
from oslo_engine.rewrite.effects import Effects
from oslo_engine.rewrite.structure import (
    Argument,
    Constant,
    Container,
    Path,
    Repeat,
    TensorSlot,
    Written,
    arguments_of,
    describe,
    rebuild,
    slots,
)

Pair = namedtuple("Pair", ["left", "right"])
A, B = torch.zeros(2), torch.zeros(2, 3, dtype=torch.bfloat16)


class Box(UserDict[str, Any]):
    pass


def filled(value: Any, given: dict[int, Path] | None = None, arguments: dict[str, Any] | None = None) -> Any:
    """Describe and rebuild, with the path of each slot as a stand-in for the tensor."""
    return rebuild(describe(value, given or {}), lambda path, slot: path, arguments or {})  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (A, ()),
        ((A, None, [B, 3]), ((0,), None, [(2, 0), 3])),
        ({"x": {"y": A}}, {"x": {"y": ("x", "y")}}),
        (Pair(A, B), Pair((0,), (1,))),
        (Box(x=A), Box(x=("x",))),
        ((), ()),
    ],
)
def test_a_container_is_built_again_with_its_type(value: Any, expected: Any) -> None:
    built = filled(value)
    assert built == expected
    assert type(built) is type(expected)


def test_a_model_output_is_built_again() -> None:
    output = BaseModelOutput(last_hidden_state=A, hidden_states=(A, B))
    built = rebuild(describe(output, {}), lambda path, slot: B if path == ("hidden_states", 1) else A, {})
    assert type(built) is BaseModelOutput
    assert built.last_hidden_state is A
    assert built.hidden_states == (A, B)
    assert built.attentions is None


def test_slots_keep_dimensions_and_dtype() -> None:
    assert list(slots(describe((A, {"b": B}), {}))) == [((0,), TensorSlot(1, "float32")), ((1, "b"), TensorSlot(2, "bfloat16"))]


def test_one_tensor_in_two_places_stays_one() -> None:
    structure = describe((A, [A]), {})
    assert structure == Container("tuple", ((0, TensorSlot(1, "float32")), (1, Container("list", ((0, Repeat((0,))),)))))
    first, (second,) = rebuild(structure, lambda path, slot: torch.ones(1), {})
    assert first is second


def test_arguments_are_handed_through() -> None:
    cache = object()
    arguments = arguments_of((A,), {"cache": cache, "pair": (B,)})
    structure = Effects(arguments).structure((A, cache, B, None))
    assert [entry for _, entry in structure.entries] == [  # type: ignore[union-attr]
        Argument(("args", 0)),
        Argument(("kwargs", "cache")),
        Argument(("kwargs", "pair", 0)),
        Constant(None),
    ]
    other = arguments_of((B,), {"cache": 1, "pair": (A,)})
    assert rebuild(structure, lambda path, slot: A, other) == (B, 1, A, None)


def test_a_changed_argument_is_a_result() -> None:
    tensor, untouched = torch.zeros(1), torch.zeros(1)
    effects = Effects(arguments_of((tensor, untouched), {}))
    tensor.add_(1)
    assert effects.changed_tensors() == [tensor]
    assert effects.structure((tensor, untouched)) == Container(
        "tuple", ((0, TensorSlot(1, "float32")), (1, Argument(("args", 1))))
    )


def test_a_list_with_a_changed_tensor_is_a_result() -> None:
    state = [torch.zeros(1), torch.zeros(2)]
    effects = Effects(arguments_of((), {"state": state}))
    state[0].add_(1)
    assert effects.structure(state) == Container("list", ((0, TensorSlot(1, "float32")), (1, Argument(("kwargs", "state", 1)))))


def test_new_and_replaced_entries_of_containers_are_found() -> None:
    box, items = Box(old=A, same=B), [A]
    effects = Effects(arguments_of((items,), {"box": box}))
    box["old"], box["new"], made = (B.clone(), B), A, A.clone()
    items.append(made)
    assert effects.written() == (
        Written(("args", 0), 1, TensorSlot(1, "float32")),
        Written(
            ("kwargs", "box"),
            "old",
            Container("tuple", ((0, TensorSlot(2, "bfloat16")), (1, Argument(("kwargs", "box", "same"))))),
        ),
        Written(("kwargs", "box"), "new", Argument(("args", 0, 0))),
    )


def test_objects_that_no_stand_in_can_be_built_for_are_refused() -> None:
    with pytest.raises(PlanError, match=r"where: output\[1\]\['x'\]\n  got: object"):
        describe((A, {"x": object()}), {})


def test_structures_are_json() -> None:
    given: dict[int, Path] = {id(B): ("args", 0)}
    structure = describe((A, {"again": A, "given": B, "none": None}), given)
    assert json.loads(json.dumps(structure.to_json())) == {
        "container": "tuple",
        "entries": [
            [0, {"tensor": [1, "float32"]}],
            [
                1,
                {
                    "container": "dict",
                    "entries": [["again", {"repeat": [0]}], ["given", {"argument": ["args", 0]}], ["none", {"constant": None}]],
                },
            ],
        ],
    }


def test_rebuilding_asks_for_each_slot_once() -> None:
    asked: list[Path] = []

    def tensor_at(path: Path, slot: TensorSlot) -> Tensor:
        asked.append(path)
        return A

    rebuild(describe((A, (A, B)), {}), tensor_at, {})
    assert asked == [(0,), (1, 1)]
