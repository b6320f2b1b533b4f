"""What plans need to know of a model and a policy whatever the pipeline: read once, used for many layouts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from oslo_engine.errors import PlanError
from oslo_engine.plan.match import Match, match_policy
from oslo_engine.plan.plan import RegionPlan
from oslo_engine.policy.schema import Policy
from oslo_engine.shards import Shard


@dataclass(frozen=True)
class LogicalTensor:
    """A parameter (tied names are one) or a buffer of the whole model.

    blocks: the blocks that its names lie in; none for what stands outside.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    is_buffer: bool
    persistent: bool
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class Survey:
    """What does not depend on the layout.

    tensors: in the order of the model.
    sizes: of every block, entries of its parameters; head_size: of the output head.
    outer_modules: modules outside the blocks that own parameters.
    """

    tensors: tuple[LogicalTensor, ...]
    sizes: Mapping[str, int]
    head_size: int
    outer_modules: tuple[str, ...]


@dataclass(frozen=True)
class Cut:
    """How the tp ranks divide a tensor. inside: it is a whole parameter within a region, of which each sees its own part."""

    tensor: LogicalTensor
    shard: Shard | None
    inside: bool


@dataclass(frozen=True)
class Prepared:
    """A model matched for one number of tp ranks."""

    match: Match
    survey: Survey
    cuts: tuple[Cut, ...]


def prepare(
    model: PreTrainedModel, policy: Policy | None, tp: int, *, expert_split: str = "inner", survey: Survey | None = None
) -> Prepared:
    """
    Args:
        model: on ``meta`` or real; names, shapes and ties are read.
        policy: None: nothing is cut, and there are no blocks.
        survey: of this model and policy, from another number of ranks; by default it is made.

    Raises:
        PolicyError, PlanError: as ``match_policy``; tied parameters that are cut in different ways.
    """
    match = Match() if policy is None else match_policy(model, policy, tp, expert_split=expert_split)
    if survey is None:
        survey = survey_model(model, [block for stack in match.stacks.values() for block in stack])
    is_inside = _names_inside(match.regions)
    cuts = []
    for tensor in survey.tensors:
        shards = {match.shards.get(name) for name in tensor.names}
        if len(shards) > 1:
            raise PlanError("tied parameters must be cut alike", where=", ".join(tensor.names))
        shard = shards.pop()
        inside = tp > 1 and shard is None and not tensor.is_buffer and any(map(is_inside, tensor.names))
        cuts.append(Cut(tensor, shard, inside))
    return Prepared(match, survey, tuple(cuts))


def survey_model(model: PreTrainedModel, blocks: Sequence[str]) -> Survey:
    """Read what stands in a model, on ``meta`` or real."""
    known = set(blocks)
    tensors = []
    for names, tensor, is_buffer, persistent in _logical_tensors(model):
        within = dict.fromkeys(block for name in names if (block := _block_of(name, known)) is not None)
        dtype = str(tensor.dtype).removeprefix("torch.")
        tensors.append(LogicalTensor(tuple(names), tuple(tensor.shape), dtype, is_buffer, persistent, tuple(within)))
    head = model.get_output_embeddings()
    modules = {block: model.get_submodule(block) for block in blocks}
    return Survey(
        tuple(tensors),
        {block: _numel(module) for block, module in modules.items()},
        0 if head is None else _numel(head),
        _outer_modules(model, list(modules.values())),
    )


def _logical_tensors(model: PreTrainedModel) -> Iterator[tuple[list[str], Tensor, bool, bool]]:
    """(names, tensor, is buffer, is in the state dict), tied names together, in the order of the model."""
    by_id: dict[int, tuple[list[str], Tensor, bool]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), ([], parameter, False))[0].append(name)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        by_id.setdefault(id(buffer), ([], buffer, True))[0].append(name)
    for names, tensor, is_buffer in by_id.values():
        yield names, tensor, is_buffer, not is_buffer or any(_is_persistent(model, name) for name in names)


def _is_persistent(model: PreTrainedModel, name: str) -> bool:
    path, _, leaf = name.rpartition(".")
    return leaf not in model.get_submodule(path)._non_persistent_buffers_set


def _block_of(name: str, blocks: Collection[str]) -> str | None:
    """The innermost block that a name lies in."""
    end = len(name)
    while end > 0:
        if name[:end] in blocks:
            return name[:end]
        end = name.rfind(".", 0, end)
    return None


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _outer_modules(model: PreTrainedModel, blocks: Sequence[nn.Module]) -> tuple[str, ...]:
    inside = {id(module) for block in blocks for module in block.modules()}
    return tuple(
        name
        for name, module in model.named_modules()
        if name and id(module) not in inside and any(True for _ in module.parameters(recurse=False))
    )


def _names_inside(regions: Sequence[RegionPlan]) -> Callable[[str], bool]:
    """Whether an uncut parameter of this name lies inside a region: it sees only this rank's share of the items there."""
    scopes = {region.scope for region in regions if region.enter == "scope"}
    # What stands behind a sum over the ranks is outside again: biases of rows.
    outside = {name for region in regions if region.leave == "rows" for name in (*region.rows, *region.inner)}
    named = {name for region in regions for name in (*region.summed, *region.once)}

    def is_inside(name: str) -> bool:
        module = name.rpartition(".")[0]
        return name in named or (module not in outside and _block_of(module, scopes) is not None)

    return is_inside
