"""Random initialisation of one rank's slices, bit for bit as the unsplit model would have got, without building it whole."""

from __future__ import annotations

import copy
from collections.abc import Collection

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers import initialization as transformers_init

from oslo_engine.checkpoint.place import place, slice_of
from oslo_engine.checkpoint.shadow import ShadowExecution
from oslo_engine.checkpoint.skeleton import as_meta, meta_model, on_registration
from oslo_engine.errors import UnsupportedError
from oslo_engine.plan.plan import Plan, TensorPlan
from oslo_engine.topology import Coordinate


def initialize_like_unsplit(
    cls: type[PreTrainedModel],
    config: PretrainedConfig,
    plan: Plan,
    at: Coordinate,
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> None:
    """Fill this rank's model with the slices of ``cls._from_config(config)``, built from the present random state.

    The constructor and the initialisers run once, on every rank in full, since the random numbers of one tensor come after
    those of all before it; at any time only about one tensor exists besides the slices. The random state is afterwards what it
    would be had the whole model been built.

    Args:
        cls: the Transformers class.
        model: rewritten by ``plan``: parameters on meta with this rank's shapes.
        device: where the values go; they are drawn on the default device, as those of the unsplit model.
        dtype: as in ``_from_config``.

    Raises:
        UnsupportedError: the constructor is not the same twice, or computes with whole parameters where only slices are left.
    """
    tensors = _tensors_by_registration(cls, config, plan, dtype)
    shadow = ShadowExecution()
    num_registered = 0

    def adopt(parameter: nn.Parameter) -> nn.Parameter:
        nonlocal num_registered
        num_registered += 1
        tensor = tensors[num_registered - 1] if num_registered <= len(tensors) else None
        if num_registered > len(tensors) or (tensor is not None and tensor.shape != tuple(parameter.shape)):
            raise _not_the_same_twice(cls)
        if tensor is None or at.pp_rank not in plan.holders(tensor):
            return shadow.adopt(parameter, wanted=False)
        return shadow.adopt(parameter, wanted=True, keep=slice_of(tensor, at.tp_rank))

    with shadow, on_registration(adopt):
        built = cls._from_config(copy.deepcopy(config), **_given(dtype))
    if num_registered != len(tensors):
        raise _not_the_same_twice(cls)
    _take(built, shadow, plan, at, model, device, list(plan.held_by(at.pp_rank)))


def initialize_missing(
    cls: type[PreTrainedModel],
    config: PretrainedConfig,
    plan: Plan,
    at: Coordinate,
    model: nn.Module,
    missing: Collection[str],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> None:
    """Initialise the tensors that a checkpoint lacks, as ``from_pretrained`` of the unsplit model would.

    It draws from the present random state, which must be the same on every rank; so must be the names: all that are missing,
    not only this rank's.

    Args:
        missing: first names of tensors of the plan (``LoadReport.uninitialized``).
    """
    if not missing:
        return
    with transformers_init.no_tie_weights():  # as while loading: a tied name is another parameter, and not initialised
        fresh = meta_model(cls, copy.deepcopy(config), dtype)
    tied = set(fresh.all_tied_weights_keys)
    shadow = ShadowExecution()
    for module in fresh.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    for name, tensor in [*fresh.named_parameters(), *fresh.named_buffers()]:
        planned = plan.tensor(name)
        if planned.name not in missing or name in tied:
            vars(tensor)["_is_hf_initialized"] = True
        elif isinstance(tensor, nn.Parameter):
            shadow.adopt(tensor, wanted=at.pp_rank in plan.holders(planned), keep=slice_of(planned, at.tp_rank))
    with shadow:
        fresh.initialize_weights()
    fresh.tie_weights(recompute_mapping=False)
    _take(fresh, shadow, plan, at, model, device, [tensor for tensor in plan.held_by(at.pp_rank) if tensor.name in missing])


def _take(
    built: PreTrainedModel,
    shadow: ShadowExecution,
    plan: Plan,
    at: Coordinate,
    model: nn.Module,
    device: torch.device,
    tensors: list[TensorPlan],
) -> None:
    for tensor in tensors:
        keep = slice_of(tensor, at.tp_rank)
        whole = built.get_buffer(tensor.name) if tensor.is_buffer else built.get_parameter(tensor.name)
        if whole.is_meta:
            value = shadow.result(whole, keep)
        elif keep is None:
            value = whole
        else:
            value = keep.cut(whole.detach())
        place(model, tensor, value, device)


def _tensors_by_registration(
    cls: type[PreTrainedModel], config: PretrainedConfig, plan: Plan, dtype: torch.dtype | None
) -> list[TensorPlan | None]:
    """For each parameter, in the order in which modules register them, the tensor that it is in the end; None if replaced."""
    registered: list[nn.Parameter] = []

    def record(parameter: nn.Parameter) -> nn.Parameter:
        registered.append(as_meta(parameter))
        return registered[-1]

    with torch.random.fork_rng(devices=[]), on_registration(record):
        skeleton = cls._from_config(copy.deepcopy(config), **_given(dtype))
    names = {id(parameter): name for name, parameter in skeleton.named_parameters(remove_duplicate=False)}
    try:
        return [plan.tensor(names[id(parameter)]) if id(parameter) in names else None for parameter in registered]
    except KeyError:
        raise _not_the_same_twice(cls) from None


def _not_the_same_twice(cls: type) -> UnsupportedError:
    return UnsupportedError(
        "the constructor makes other parameters the second time",
        where=cls.__name__,
        hint="build the model whole and call parallelize",
    )


def _given(dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    return {} if dtype is None else {"dtype": dtype}
