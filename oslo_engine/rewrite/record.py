"""Record the data flow of a Transformers model: one run of its own Python, no weights, blocks as single nodes.

    graph:   input_ids -> embedding -> [model.layers.0] -> getitem -> [model.layers.1] -> ... -> norm -> linear -> cross_entropy

The recording holds for one mode (training, prefill, decode) and any batch size or length. What a stage needs and what crosses
a cut is read off it in ``dataflow``.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn

from oslo_engine.errors import PlanError
from oslo_engine.rewrite.cache_calls import CacheCall, find_cache, watched, wraps
from oslo_engine.rewrite.effects import Effects
from oslo_engine.rewrite.meta_weights import MetaWeights, tensors_in, without_weights
from oslo_engine.rewrite.replay import Replay
from oslo_engine.rewrite.structure import SCALARS, Path, Structure, Written, arguments_of, at, slots, walk
from oslo_engine.rewrite.tape import Tape, escaped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Forward = Callable[..., Any]


@dataclass(frozen=True)
class BlockCall:
    """One call of a block.

    Attributes:
        name: of the block module.
        nth: how many calls of the same module came before; ALBERT calls one block many times.
        node: the call_module node.
        output: structure of what it returned.
        written: what it put into dicts and lists among its arguments.
        outside_reads: parameters and buffers it read that do not belong to it.
        cached: what it wrote into a cache among its arguments.
    """

    name: str
    nth: int
    node: fx.Node
    output: Structure
    written: tuple[Written, ...]
    outside_reads: tuple[str, ...]
    cached: tuple[CacheCall, ...]


@dataclass(frozen=True)
class Span:
    """One call of a module outside the blocks that owns parameters or buffers.

    Attributes:
        module: its name.
        nth: how many calls of it came before.
        first: the call recorded ``graph.nodes[first:last]``.
        last: see ``first``.
        handed_through: nodes of tensors that it returned but did not make: its input, handed through.
        replaceable: whether it returned tensors and plain values only, so that zeros can stand for its answer.
    """

    module: str
    nth: int
    first: int
    last: int
    handed_through: tuple[fx.Node, ...]
    replaceable: bool


@dataclass(frozen=True)
class WrittenKey:
    """Key of the getitem node that leads from a block call to a tensor it wrote into its arguments, at ``path``."""

    path: Path


@dataclass(frozen=True)
class Recording:
    """What ``record`` saw. It holds no tensor and no module.

    Attributes:
        graph: torch-function level. ``node.meta["at"]`` is the innermost call outside the blocks, as (module, nth);
            ``meta["read"]`` marks values that Python read, ``meta["random"]`` nodes that drew random numbers, ``meta["call"]``
            is the number of a block call and ``meta["escape"]`` that of the call which a value left by a side door.
        calls: the block calls in order.
        spans: calls of modules outside the blocks, by position in the graph.
        aliases: name of each parameter and buffer in the graph -> all its names (ties).
        buffers: the names in ``aliases`` that are buffers.
        hidden_flows: (i, j): block call j reads a value that call i kept to itself.
        wraps_cache: whether the model put the cache that it was given into an ``EncoderDecoderCache`` and returned that.
        kept: attributes of modules in which the call left a tensor, which the next one may read.
    """

    graph: fx.Graph
    calls: tuple[BlockCall, ...]
    spans: tuple[Span, ...]
    aliases: Mapping[str, tuple[str, ...]]
    buffers: frozenset[str]
    hidden_flows: tuple[tuple[int, int], ...]
    wraps_cache: bool
    kept: tuple[str, ...] = ()

    @property
    def random(self) -> tuple[fx.Node, ...]:
        """Nodes outside the blocks that drew random numbers (dropout of embeddings, noise)."""
        return tuple(node for node in self.graph.nodes if node.meta.get("random"))

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """Nodes whose value Python read: the model's control flow depends on them."""
        return tuple(node for node in self.graph.nodes if node.meta.get("read"))


def record(
    model: PreTrainedModel, leaves: Sequence[str], inputs: Mapping[str, Any], *, root: str = "", replay: bool = True
) -> Recording:
    """Run ``model`` once and write down its data flow.

    Args:
        model: parameters on meta, float32 (see ``skeleton``); in the train or eval state to be recorded. It is left as it was.
        leaves: names of the blocks, relative to ``model``.
        inputs: keyword arguments, small and real: tensors, numbers, model outputs, a cache (which is filled, as always).
        root: name of the submodule to call instead of the whole model, for instance the encoder.
        replay: whether blocks that are alike may be run once; not where hooks inside them collect something.

    Returns:
        The recording. Its size does not depend on the model's weights.

    Raises:
        PlanError: a leaf or the root is no module of the model, blocks lie within one another, no block was called, or a block
            returns something that no stand-in could be built for.

    Communication: none.
    """
    blocks = _blocks(model, leaves)
    called = _submodule(model, root, "the module to record does not exist")
    with without_weights(model) as weights:
        return _Recorder(model, blocks, weights, replay=replay).run(called, inputs)


class _Recorder:
    """Wraps the forward of all blocks and of all modules outside them; ``without_weights`` takes the wrappers off again."""

    def __init__(self, model: nn.Module, blocks: dict[str, nn.Module], weights: MetaWeights, *, replay: bool) -> None:
        self._model = model
        self._aliases, self._buffers, names = _tensor_names(model)
        self._tape = Tape(names, weights)
        self._replay, self._replays = Replay(blocks), replay
        self._calls: list[BlockCall] = []
        self._spans: list[Span] = []
        self._counts: Counter[str] = Counter()
        inside = {id(part) for block in blocks.values() for part in block.modules()}
        for name, block in blocks.items():
            self._wrap(name, block, self._call_block)
        for name, module in model.named_modules():
            if id(module) not in inside:
                owns = any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
                self._wrap(name, module, self._call_owner if owns else self._call_outside)

    @staticmethod
    def _wrap(name: str, module: nn.Module, call: Callable[..., Any]) -> None:
        # nn.Module.__call__ finds the instance attribute, and so do direct calls of forward; what wraps __call__ stays outside.
        wrapper = functools.partial(call, name, module.forward)
        module.forward = functools.wraps(module.forward)(wrapper)  # type: ignore[method-assign]

    def run(self, root: nn.Module, inputs: Mapping[str, Any]) -> Recording:
        tape = self._tape
        for name, value in inputs.items():
            if tensors_in(value):
                tape.bind(value, tape.graph.placeholder(name))
        before = _tensors_kept(self._model)
        with tape:
            output = root(**inputs)
        kept = [name for name, tensor in _tensors_kept(self._model).items() if before.get(name) is not tensor]
        if not self._calls:
            raise PlanError(
                "no block was called while recording",
                where=type(root).__name__,
                expected=f"a call of {', '.join(self._replay.blocks)}",
                hint="check the policy's layers against the modules that the model's forward calls",
            )
        tape.graph.output(tape.mapped(output))
        return Recording(
            graph=tape.graph,
            calls=tuple(self._calls),
            spans=tuple(self._spans),
            aliases=self._aliases,
            buffers=self._buffers,
            hidden_flows=tuple(sorted(tape.hidden_flows)),
            wraps_cache=wraps(find_cache(output), find_cache(inputs)),
            kept=tuple(kept),
        )

    def _call_outside(self, name: str, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        tape = self._tape
        if tape.in_block:
            return forward(*args, **kwargs)
        before, tape.place = tape.place, (name, self._counts[name])
        self._counts[name] += 1
        try:
            return forward(*args, **kwargs)
        finally:
            tape.place = before

    def _call_owner(self, name: str, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        nodes = self._tape.graph.nodes
        nth, first = self._counts[name], len(nodes)
        output = self._call_outside(name, forward, *args, **kwargs)
        if not self._tape.in_block:
            returned = [self._tape.node_of(tensor) for tensor in tensors_in(output)]
            made = set(itertools.islice(reversed(nodes), len(nodes) - first))
            replaceable = bool(returned) and all(isinstance(leaf, (Tensor, *SCALARS)) for _, leaf in walk(output))
            handed_through = tuple(node for node in returned if node not in made)
            self._spans.append(Span(name, nth, first, len(nodes), handed_through, replaceable))
        return output

    def _call_block(self, name: str, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        tape = self._tape
        if tape.in_block:
            return forward(*args, **kwargs)
        arguments = arguments_of(args, kwargs)
        node = tape.enter_block(name, arguments)
        cached: list[CacheCall] = []
        try:
            signature = self._replay.signature(name, arguments) if self._replays else None
            if signature in self._replay.answers:
                output, structure, reads = self._replay.answer(signature, arguments)
                written: tuple[Written, ...] = ()
            else:
                effects = Effects(arguments)
                with watched(arguments) as cached:
                    output = forward(*args, **kwargs)
                structure, written = _described(name, effects, output)
                reads = tuple(sorted(read for read in tape.names_read if not _belongs(self._aliases[read], name)))
                if effects.changed_tensors():
                    tape.written(effects.changed_tensors(), tape.add(escaped, (node,), escape=node.meta["call"]))
                elif signature is not None:
                    self._replay.remember(signature, output, structure, reads)
            self._bind_results(node, output, structure, arguments, written)
        finally:
            tape.leave_block()
        self._calls.append(BlockCall(name, self._counts[name], node, structure, written, reads, tuple(cached)))
        self._counts[name] += 1
        return output

    def _bind_results(
        self, node: fx.Node, output: Any, structure: Structure, arguments: Mapping[str, Any], written: Sequence[Written]
    ) -> None:
        tape = self._tape
        for path, _ in slots(structure):
            steps = functools.reduce(lambda parent, key: tape.add(operator.getitem, (parent, key)), path, node)
            tape.bind(at(output, path), steps)
        for entry in written:
            for path, _ in slots(entry.value):
                whole = (*entry.path, entry.key, *path)
                tape.bind(at(arguments, whole), tape.add(operator.getitem, (node, WrittenKey(whole))))


def _described(name: str, effects: Effects, output: Any) -> tuple[Structure, tuple[Written, ...]]:
    """Structure of a block's output and of what it put into the containers it was given."""
    try:
        return effects.structure(output), effects.written()
    except PlanError as error:
        raise PlanError(error.what, where=f"{name}: {error.where}", got=error.got, hint=error.hint) from None


def _tensor_names(model: nn.Module) -> tuple[dict[str, tuple[str, ...]], frozenset[str], dict[int, str]]:
    """All names of every parameter and buffer, which are buffers, and the first name by ``id``."""
    named: list[tuple[str, Tensor]] = list(model.named_parameters(remove_duplicate=False))
    num_parameters = len(named)
    named += model.named_buffers(remove_duplicate=False)
    first: dict[int, str] = {}
    aliases: dict[str, tuple[str, ...]] = {}
    for name, tensor in named:
        key = first.setdefault(id(tensor), name)
        aliases[key] = (*aliases.get(key, ()), name)
    buffers = frozenset(name for name, _ in named[num_parameters:] if name in aliases)
    return aliases, buffers, first


def _tensors_kept(model: nn.Module) -> dict[str, Tensor]:
    """Tensors that lie on modules as plain attributes, by name."""
    modules = model.named_modules()
    return {
        f"{name}.{key}": value for name, module in modules for key, value in vars(module).items() if isinstance(value, Tensor)
    }


def _belongs(aliases: Sequence[str], block: str) -> bool:
    return any(alias.startswith(f"{block}.") for alias in aliases)


def _blocks(model: nn.Module, leaves: Sequence[str]) -> dict[str, nn.Module]:
    blocks: dict[str, nn.Module] = {}
    for name in leaves:
        module = _submodule(model, name, "a block of the policy does not exist in the model")
        if all(module is not other for other in blocks.values()):
            blocks[name] = module
    for name in blocks:
        inner = next((other for other in blocks if other.startswith(f"{name}.")), None)
        if inner is not None:
            raise PlanError("a block lies within another block", where=inner, expected="blocks side by side", got=f"in {name}")
    return blocks


def _submodule(model: nn.Module, name: str, fault: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        children = ", ".join(child for child, _ in model.named_children())
        raise PlanError(
            fault, where=name, expected=f"a module below {type(model).__name__}: {children}", got="no such module"
        ) from None
