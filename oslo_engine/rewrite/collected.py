"""Which hidden states a model returns, and where in its forward they come from.

The last stage of a pipeline returns the output, but of the blocks only its own run there. What a model collects on the way is
found in the recording: it is the result of a block, or what a block was given (the embeddings), and the stage that runs the
block sends it on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from oslo_engine.errors import UnsupportedError
from oslo_engine.rewrite.record import Recording
from oslo_engine.rewrite.structure import Path, entries_of, walk
from oslo_engine.rewrite.values import Value, value_of


@dataclass(frozen=True)
class Collected:
    """One tuple of hidden states in a model's output.

    Attributes:
        key: its name there: "hidden_states", "encoder_hidden_states".
        entries: what each is; None where the last stage computes it (a norm behind the blocks).
    """

    key: str
    entries: tuple[Value | None, ...]

    def to_json(self) -> Any:
        return {"key": self.key, "entries": [entry and entry.to_json() for entry in self.entries]}


def collected_in(recording: Recording) -> tuple[Collected, ...]:
    """The tuples of hidden states that the recorded call returned."""
    named = [(str(key), value) for key, value in entries_of(output_of(recording)) or () if _is_collected((key, 0))]
    tuples = [(key, value) for key, value in named if isinstance(value, (tuple, list))]
    given = _given_to_blocks(recording) if tuples else {}
    return tuple(Collected(key, tuple(_source(node, given) for node in nodes)) for key, nodes in tuples)


def computed_output(recording: Recording, collected: Sequence[Collected]) -> Iterator[fx.Node]:
    """What the last stage must compute of the output: all but what is collected elsewhere."""
    elsewhere = {(one.key, index) for one in collected for index, value in enumerate(one.entries) if value is not None}
    for path, node in walk(output_of(recording)):
        if isinstance(node, fx.Node) and path not in elsewhere:
            yield node


def check_collected(recording: Recording) -> None:
    """Raises:
    UnsupportedError: a call that was to return hidden states has none under a name, or has them deeper in its output.
    """
    paths = [path for path, _ in walk(output_of(recording)) if any(str(key).endswith("hidden_states") for key in path)]
    wrong = [path for path in paths if not _is_collected(path)]
    if wrong or not paths:
        raise UnsupportedError(
            "the hidden states of a pipeline are found by their names in the model's output",
            expected="hidden_states=(...) in it",
            got=f"them at {list(wrong[0])}" if wrong else "none (return_dict=False?)",
            hint="leave output_hidden_states off, or use pp=1",
        )


def _source(node: Any, given: Mapping[fx.Node, Value]) -> Value | None:
    return (value_of(node) or given.get(node)) if isinstance(node, fx.Node) else None


def output_of(recording: Recording) -> Any:
    """What the recorded call returned: containers with nodes in the place of tensors."""
    return next(node for node in reversed(recording.graph.nodes) if node.op == "output").args[0]


def _is_collected(path: Path) -> bool:
    return len(path) == 2 and str(path[0]).endswith("hidden_states")


def _given_to_blocks(recording: Recording) -> dict[fx.Node, Value]:
    given: dict[fx.Node, Value] = {}
    for number, call in enumerate(recording.calls):
        for path, node in walk({"args": call.node.args, "kwargs": call.node.kwargs}):
            if isinstance(node, fx.Node):
                given.setdefault(node, Value(number, path, written=True))
    return given
