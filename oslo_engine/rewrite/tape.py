"""Write down what a running model computes, as one torch.fx graph of torch functions.

The tape sees every torch function that Python code calls (``torch.overrides``), so views, factories, losses and masks
appear as the model's author wrote them. Tensors are told apart by identity. Three things keep the data flow honest:

* a write (``x[i] = y``, ``x.add_(y)``) renews every known tensor in the same storage, views and bases alike;
* a value that Python read (``if t.any()``) is a node of its own, marked ``meta["read"]``: control flow depends on it;
* a tensor that no recorded function made is traced to the aten operations behind it, or to the block call it was made in.

The graph is for analysis only and is never executed.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from oslo_engine.rewrite.meta_weights import MetaWeights, tensors_in
from oslo_engine.rewrite.structure import entries_of, walk

# Functions that hand values to Python without an aten operation that says so.
READERS = frozenset({"tolist", "numpy", "__array__"})
ATOMS = (
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


@dataclass(frozen=True)
class Opaque:
    """Stands in the graph for an object that is no tensor, such as a cache: the recording keeps nothing of it."""

    type_name: str


def made_unseen(*inputs: Any) -> Any:
    """Target of nodes for tensors made out of sight of the tape (``vmap``), or before it began: they depend on the inputs."""


def written_through(before: Any, write: Any) -> Any:
    """Target of nodes for tensors whose storage was written to through another tensor."""


def escaped(call: Any) -> Any:
    """Target of nodes for tensors that left a block call other than through its output."""


class Tape(TorchFunctionMode):
    """Records the functions called while it is on.

    Args:
        names: ``id`` of every parameter and buffer -> its name, used as the target of get_attr nodes.
        weights: the dispatch mode it runs under; it tells the tape about reads, random draws and unseen operations.
    """

    def __init__(self, names: Mapping[int, str], weights: MetaWeights) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self._weights = weights
        weights.observe = self._observe
        self.place: tuple[str, int] = ("", 0)  # (module, which call of it) that is running
        self._names = names
        self._nodes: dict[int, fx.Node] = {}
        # storage -> the known tensors in it, by id. What has a node stays alive here, or another tensor could take its id.
        self._sharing: dict[int, dict[int, Tensor]] = {}
        self._parents: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        # The block call that is running, if any, and what it was given, reads and makes.
        self._call: int | None = None
        self._call_nodes: list[fx.Node] = []
        self._given: set[int] = set()
        self.names_read: set[str] = set()  # parameters and buffers
        self._made_in: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.hidden_flows: set[tuple[int, int]] = set()  # (call that made a value, call that read it) past all arguments

    # ------------------------------------------------------------------ values and nodes

    def bind(self, value: Any, node: fx.Node) -> None:
        """Let ``node`` stand for a value: a tensor, or a container whose tensors become getitem nodes."""
        if isinstance(value, Tensor):
            self._nodes[id(value)] = node
            self._sharing.setdefault(_storage(value), {})[id(value)] = value
            return
        for key, child in entries_of(value) or ():
            if tensors_in(child):
                self.bind(child, self.add(operator.getitem, (node, key)))

    def mapped(self, value: Any) -> Any:
        """``value`` as a graph argument: nodes for tensors, ``Opaque`` for objects the graph must not keep."""
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, ATOMS):
            return value
        if isinstance(value, slice):
            return slice(self.mapped(value.start), self.mapped(value.stop), self.mapped(value.step))
        entries = entries_of(value)
        if entries is None:
            return Opaque(type(value).__name__)
        if isinstance(value, tuple | list):
            children = [self.mapped(child) for _, child in entries]
            return children if isinstance(value, list) else tuple(children)
        return {key: self.mapped(child) for key, child in entries}

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node that made ``tensor``, created now if it is a parameter, was made unseen, or was there before."""
        known = self._nodes.get(id(tensor))
        if known is not None:
            return known
        node = self._origin(tensor)
        self.bind(tensor, node)
        return node

    def _origin(self, tensor: Tensor) -> fx.Node:
        if id(tensor) in self._names:
            return self.graph.get_attr(self._names[id(tensor)])
        if tensor in self._made_in:
            call = self._made_in[tensor]
            return self.add(escaped, (self._call_nodes[call],), escape=call)
        parents = self._parents.get(tensor, ())
        if not parents and tensor._is_view():
            parents = (tensor._base,)
        return self.add(made_unseen, tuple(self.node_of(parent) for parent in parents))

    def add(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, **meta: Any) -> fx.Node:
        """Append a function call to the graph, at the place that is running."""
        node = self.graph.call_function(target, args, kwargs or {})
        node.meta.update(meta, at=self.place)
        return node

    def written(self, tensors: list[Tensor], node: fx.Node) -> None:
        """``node`` changed these tensors: renew everything that shares their storage."""
        changed = {id(tensor) for tensor in tensors}
        for storage in {_storage(tensor) for tensor in tensors}:
            for key in self._sharing.get(storage, ()):
                self._nodes[key] = node if key in changed else self.add(written_through, (self._nodes[key], node))

    # ------------------------------------------------------------------ torch functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._call is not None:
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        if any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in given):
            return func(*args, **kwargs)  # inside vmap: what comes out of it is traced back through the aten operations
        versions = [tensor._version for tensor in given]
        num_reads, num_draws = self._weights.num_reads, self._weights.num_draws
        out = func(*args, **kwargs)
        made = tensors_in(out)
        written = [tensor for tensor, version in zip(given, versions, strict=True) if tensor._version != version]
        is_read = not made and (self._weights.num_reads > num_reads or getattr(func, "__name__", "") in READERS)
        is_new = any(all(tensor is not other for other in given) for tensor in made)
        if is_read or is_new or written:
            node = self.add(func, self.mapped(tuple(args)), self.mapped(kwargs))
            node.meta.update(read=is_read, random=self._weights.num_draws > num_draws)
            known = {id(tensor): self.node_of(tensor) for tensor in given}  # what is returned as it came stays what it was
            self.bind(out, node)
            self._nodes.update(known)
            self.written(written, node)
        return out

    def _observe(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Every aten operation, seen or not: where tensors come from."""
        if self._call is None:
            for tensor in outputs:
                if all(tensor is not other for other in inputs):
                    self._parents[tensor] = tuple(inputs)
            return
        for tensor in inputs:
            self._note_use(tensor)
        for tensor in outputs:
            if all(tensor is not other for other in inputs):
                self._made_in[tensor] = self._call

    # ------------------------------------------------------------------ block calls

    @property
    def in_block(self) -> bool:
        return self._call is not None

    def enter_block(self, name: str, arguments: Mapping[str, Any]) -> fx.Node:
        """Append a block call; until ``leave_block`` nothing is recorded but what the block reads."""
        node = self.graph.call_module(name, self.mapped(arguments["args"]), self.mapped(arguments["kwargs"]))
        node.meta.update(call=len(self._call_nodes), at=self.place)
        self._call = len(self._call_nodes)
        self._call_nodes.append(node)
        tensors = [value for _, value in walk(arguments) if isinstance(value, Tensor)]
        self._given = {id(t) for t in tensors} | {id(t._base) for t in tensors if t._is_view()}
        self.names_read = set()
        return node

    def leave_block(self) -> None:
        self._call = None

    def _note_use(self, tensor: Tensor) -> None:
        if id(tensor) in self._names:
            self.names_read.add(self._names[id(tensor)])
        if id(tensor) in self._given:
            return
        base = tensor._base if tensor._is_view() else None
        if base is not None and id(base) in self._given:
            return
        for made in (tensor, base):
            if made is not None and self._made_in.get(made, self._call) != self._call:
                self.hidden_flows.add((self._made_in[made], self._call))  # type: ignore[arg-type]


def _storage(tensor: Tensor) -> int:
    """Identity of the memory behind a tensor; its own where it has none to share (sparse layouts)."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
