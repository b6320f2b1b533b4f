"""What every pipeline stage receives, reads and can leave out, from one recording.

A stage runs the model's own forward from the top: calls of other stages' blocks are answered by stand-ins, and it stops
after the last block call of its own. Walking back from what a stage must get right (the arguments of its block calls, on
the last stage the model's output, and every value that Python branches on) and stopping at block calls gives

* the block results it needs from earlier stages: these are carried, through all stages between;
* the parameters outside the blocks it needs, and so the modules it does not need.

Everything else that the walk passes (masks, position ids, a norm between encoder and decoder) each stage computes by itself.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from oslo_engine.errors import PlanError
from oslo_engine.rewrite.cache_calls import CacheCall
from oslo_engine.rewrite.collected import Collected, collected_in, computed_output
from oslo_engine.rewrite.record import BlockCall, Recording, Span
from oslo_engine.rewrite.structure import Structure, Written
from oslo_engine.rewrite.values import Value, value_of


@dataclass(frozen=True, order=True)
class Call:
    """The ``nth`` (0-based) call of a block."""

    block: str
    nth: int


@dataclass(frozen=True)
class SharedRandom:
    """A node outside the blocks that draws random numbers and that several stages need: they must draw the same.

    Attributes:
        module: the innermost module call it belongs to, and ``nth``, which call of that module.
        op: name of the torch function.
        index: how many draws came before in the same module call.
        stages: those that need it.
    """

    module: str
    nth: int
    op: str
    index: int
    stages: tuple[int, ...]


@dataclass(frozen=True)
class DataFlow:
    """The data flow of one mode over the stages. Pure data; every tuple "per stage" has ``num_stages`` entries.

    Attributes:
        num_stages: number of virtual stages.
        calls: every block call, in the order of the forward.
        stage_of_call: the stage that runs it.
        outputs: structure of what each call returns, to build stand-ins.
        written: per call, what it puts into dicts and lists among its arguments; a stand-in does the same.
        cached: per call, what it writes into a cache; a stand-in does the same.
        carried: per stage, the values it receives from the stage before, sorted. Values for later stages are among them.
        blocks_of_stage: per stage, the blocks it calls.
        live_parameters: per stage, names of parameters outside its blocks that it reads, with all their aliases.
        live_buffers: the same for buffers.
        dead_modules: per stage, modules outside the blocks that own parameters or buffers and none of whose calls it needs:
            a call may be answered with one expanded zero. A module is dead or alive as a whole: if one of its calls is
            needed its parameters are there, so the others can run too.
        random_in_several_stages: draws that must agree between stages.
        collected: hidden states in the model's output.
        wraps_cache: see ``Recording``.
    """

    num_stages: int
    calls: tuple[Call, ...]
    stage_of_call: tuple[int, ...]
    outputs: tuple[Structure, ...]
    written: tuple[tuple[Written, ...], ...]
    cached: tuple[tuple[CacheCall, ...], ...]
    carried: tuple[tuple[Value, ...], ...]
    blocks_of_stage: tuple[tuple[str, ...], ...]
    live_parameters: tuple[tuple[str, ...], ...]
    live_buffers: tuple[tuple[str, ...], ...]
    dead_modules: tuple[tuple[str, ...], ...]
    random_in_several_stages: tuple[SharedRandom, ...]
    collected: tuple[Collected, ...]
    wraps_cache: bool

    def to_json(self) -> dict[str, Any]:
        """As nested dicts, lists, strings and numbers."""
        return {
            "num_stages": self.num_stages,
            "calls": [[call.block, call.nth] for call in self.calls],
            "stage_of_call": list(self.stage_of_call),
            "outputs": [structure.to_json() for structure in self.outputs],
            "written": [[entry.to_json() for entry in entries] for entries in self.written],
            "cached": [[call.to_json() for call in calls] for calls in self.cached],
            "carried": [[value.to_json() for value in values] for values in self.carried],
            "blocks_of_stage": [list(names) for names in self.blocks_of_stage],
            "live_parameters": [list(names) for names in self.live_parameters],
            "live_buffers": [list(names) for names in self.live_buffers],
            "dead_modules": [list(names) for names in self.dead_modules],
            "random_in_several_stages": [
                {"module": r.module, "nth": r.nth, "op": r.op, "index": r.index, "stages": list(r.stages)}
                for r in self.random_in_several_stages
            ],
            "collected": [one.to_json() for one in self.collected],
            "wraps_cache": self.wraps_cache,
        }


def analyze(recording: Recording, stage_of_call: Sequence[int], num_stages: int) -> DataFlow:
    """Work out what every stage receives, reads and can leave out.

    Args:
        recording: of one mode, see ``record``.
        stage_of_call: the stage of every block call, in the order of ``recording.calls``; it never falls.
        num_stages: number of virtual stages. Some may have no call: while decoding, those of an encoder.

    Returns:
        The data flow; ``carried[0]`` is empty.

    Raises:
        PlanError: the stages do not fit the calls, or a block hands a value past its output (a shared cache, a hook, a
            write into its argument) to another stage.

    Communication: none.
    """
    _check_stages(recording, stage_of_call, num_stages)
    _check_hidden_flows(recording, stage_of_call)
    stages = [_Stage(recording, stage_of_call, stage, num_stages) for stage in range(num_stages)]
    received = [
        {value for later in stages[stage:] for value in later.needs if stage_of_call[value.call] < stage}
        for stage in range(num_stages)
    ]
    return DataFlow(
        num_stages=num_stages,
        calls=tuple(Call(call.name, call.nth) for call in recording.calls),
        stage_of_call=tuple(stage_of_call),
        outputs=tuple(call.output for call in recording.calls),
        written=tuple(call.written for call in recording.calls),
        cached=tuple(call.cached for call in recording.calls),
        carried=tuple(tuple(sorted(values, key=lambda value: value.order)) for values in received),
        blocks_of_stage=tuple(tuple(dict.fromkeys(call.name for call in stage.own_calls)) for stage in stages),
        live_parameters=tuple(stage.names_read(buffers=False) for stage in stages),
        live_buffers=tuple(stage.names_read(buffers=True) for stage in stages),
        dead_modules=tuple(stage.dead_modules for stage in stages),
        random_in_several_stages=tuple(_shared_random(recording, stages)),
        collected=stages[-1].collected,
        wraps_cache=recording.wraps_cache,
    )


class _Stage:
    """One stage's view of the recording.

    ``live`` are the nodes it must compute right, ``needs`` the block results it takes from elsewhere.
    """

    def __init__(self, recording: Recording, stage_of_call: Sequence[int], stage: int, num_stages: int) -> None:
        self._recording = recording
        self._stage_of_call, self._stage = stage_of_call, stage
        self._nodes = list(recording.graph.nodes)
        self._position = {node: position for position, node in enumerate(self._nodes)}
        own = [number for number, of in enumerate(stage_of_call) if of == stage]
        self.own_calls: list[BlockCall] = [recording.calls[number] for number in own]
        is_last = stage == num_stages - 1
        self._end = len(self._nodes) if is_last else self._first_stop(stage)
        self._candidates = [span for span in recording.spans if span.replaceable and not self._holds_a_call(span)]
        self.live: set[fx.Node] = set()
        self._results: set[fx.Node] = set()
        self.needs: set[Value] = set()
        self.collected = collected_in(recording) if is_last else ()
        self.needs |= {value for one in self.collected for value in one.entries if value is not None}
        self._walk_back(argument for call in self.own_calls for argument in call.node.all_input_nodes)
        if is_last:
            self._walk_back(computed_output(recording, self.collected))
        self._add_reads()
        self.dead_modules = self._dead_modules()

    def _first_stop(self, stage: int) -> int:
        """Position behind the stage's last own call.

        Where it has none, it stops at the first later call (an encoder's stage while decoding), or runs nothing (a
        decoder's stage while the encoder is called by itself).
        """
        if self.own_calls:
            return self._position[self.own_calls[-1].node] + 1
        later = [number for number, of in enumerate(self._stage_of_call) if of > stage]
        return self._position[self._recording.calls[later[0]].node] if later else 0

    def _holds_a_call(self, span: Span) -> bool:
        return any(span.first <= self._position[call.node] < span.last for call in self._recording.calls)

    def _walk_back(self, start: Iterable[fx.Node]) -> None:
        stack = list(start)
        while stack:
            node = stack.pop()
            if node in self.live:
                continue
            value = value_of(node)
            if value is not None:
                self.needs.add(value)
                self._results.add(node)
                continue
            if "escape" in node.meta:
                self._check_escape(node)
                continue
            self.live.add(node)
            stack += node.all_input_nodes

    def _add_reads(self) -> None:
        """What Python reads must be right, but only where it runs: reads within a dead module don't keep it alive."""
        reads = [node for node in self._recording.reads if self._position[node] < self._end]
        while True:
            dead = self._dead_modules()
            running = [node for node in reads if node not in self.live and not self._within(node, dead)]
            if not running:
                return
            self._walk_back(running)

    def _dead_modules(self) -> tuple[str, ...]:
        computed = sorted(self._position[node] for node in self.live if node.op == "call_function")
        needed = self.live | self._results
        aliases = self._recording.aliases
        outside_reads = {alias for call in self.own_calls for name in call.outside_reads for alias in aliases[name]}
        alive = {
            span.module
            for span in self._recording.spans
            if span not in self._candidates or _any_between(computed, span) or not needed.isdisjoint(span.handed_through)
        }
        return tuple(
            module
            for module in dict.fromkeys(span.module for span in self._candidates)
            if module not in alive and not any(name.rpartition(".")[0] == module for name in outside_reads)
        )

    def _within(self, node: fx.Node, modules: Sequence[str]) -> bool:
        position = self._position[node]
        return any(span.first <= position < span.last and span.module in modules for span in self._candidates)

    def names_read(self, *, buffers: bool) -> tuple[str, ...]:
        """Parameters (or buffers) read outside the stage's blocks, needed or not, and those that its blocks read from there."""
        read = {name for call in self.own_calls for name in call.outside_reads}
        own = {call.node for call in self.own_calls}
        for node in self._nodes[: self._end]:
            if node in own if node.op == "call_module" else not self._within(node, self.dead_modules):
                read |= {str(source.target) for source in node.all_input_nodes if source.op == "get_attr"}
        names = [name for name in self._recording.aliases if name in read and (name in self._recording.buffers) is buffers]
        return tuple(alias for name in names for alias in self._recording.aliases[name])

    def _check_escape(self, node: fx.Node) -> None:
        number = node.meta["escape"]
        if self._stage_of_call[number] != self._stage:
            raise PlanError(
                "a value leaves a block other than through its output, and another stage needs it",
                where=f"{self._recording.calls[number].name}, read by stage {self._stage}",
                expected="blocks that only hand on what they return",
                got="a captured inner output, or a write into an argument",
                hint="switch off what the model collects inside its blocks (output_router_logits), or use pp=1",
            )


def _any_between(positions: Sequence[int], span: Span) -> bool:
    index = bisect.bisect_left(positions, span.first)
    return index < len(positions) and positions[index] < span.last


def _shared_random(recording: Recording, stages: Sequence[_Stage]) -> Iterator[SharedRandom]:
    draws: Counter[tuple[str, int]] = Counter()
    for node in recording.random:
        module, nth = node.meta["at"]
        needing = tuple(number for number, stage in enumerate(stages) if node in stage.live)
        if len(needing) > 1:
            op = getattr(node.target, "__name__", str(node.target))
            yield SharedRandom(module, nth, op, draws[module, nth], needing)
        draws[module, nth] += 1


def _check_stages(recording: Recording, stage_of_call: Sequence[int], num_stages: int) -> None:
    calls = [call.name for call in recording.calls]
    if num_stages < 1:
        raise PlanError("there must be at least one stage", where="num_stages", expected="1 or more", got=str(num_stages))
    if len(stage_of_call) != len(calls):
        raise PlanError(
            "the stages do not fit the recorded block calls",
            where="stage_of_call",
            expected=f"{len(calls)} entries, one per block call",
            got=f"{len(stage_of_call)} entries",
        )
    for number, (before, after) in enumerate(zip([0, *stage_of_call], [*stage_of_call, num_stages - 1], strict=True)):
        if before <= after < num_stages:
            continue
        raise PlanError(
            "stages must not fall in the order of the block calls",
            where=f"call {number} ({calls[number]})" if number < len(calls) else "after the last block call",
            expected=f"stage {before} to {num_stages - 1}",
            got=str(after),
        )


def _check_hidden_flows(recording: Recording, stage_of_call: Sequence[int]) -> None:
    for maker, reader in recording.hidden_flows:
        if stage_of_call[maker] != stage_of_call[reader]:
            raise PlanError(
                "a block reads a value that another stage's block keeps to itself",
                where=f"{recording.calls[reader].name} reads from {recording.calls[maker].name}",
                expected="both on one stage",
                got=f"stages {stage_of_call[reader]} and {stage_of_call[maker]}",
                hint="cut before or after both, or use pp=1",
            )
