"""PEFT's LoRA in a split model: ``get_peft_model`` before ``parallelize`` or after it.

PEFT makes its layers by itself, around modules of the split model as around any others. Then the model *meets* them: each
adapter becomes a part of the plan, and each rank keeps its part of it. Where PEFT was first, its layers are set aside while the
model is split, and put back around the same modules.

PEFT calls nothing of ours when it is done, but it sets ``peft_config`` on the model, takes it away when adapters are unloaded,
and reads the model's ``state_dict`` to save them: these three are where the model hears of it. What comes later (a second
adapter) is met at the next forward.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oslo_engine.comm.fingerprint import fingerprint, fingerprints_of_ranks
from oslo_engine.comm.random import mix
from oslo_engine.errors import PlanError, UnsupportedError
from oslo_engine.integrations.adapters import parts_of, place_adapter, stand_around
from oslo_engine.layers.specialize import original_class
from oslo_engine.plan.plan import TensorPlan, without_wrappers
from oslo_engine.rewrite.state import ParallelState, parallel_state

_DRAWN_FROM_NOTHING = (True, False, "gaussian")  # initial values that don't depend on the module's weight
# Settings of LoraConfig that change the model itself, or tie or train other things than adapters.
_REFUSED_SETTINGS = (
    "layer_replication",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "ensure_weight_tying",
)


def adapted_model(model: Any) -> Any:
    """The model inside of what ``get_peft_model`` returned; any other model itself."""
    peft: Any = sys.modules.get("peft")  # who uses it has imported it
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    return model.get_base_model()


def has_adapters(model: nn.Module) -> bool:
    return bool(model.__dict__.get("peft_config"))


# -- before parallelize


@contextmanager
def set_aside(model: nn.Module) -> Iterator[None]:
    """Take adapters away, and put them back around the same modules.

    Raises:
        UnsupportedError: of a kind that a split model cannot have.
    """
    if not has_adapters(model):
        yield
        return
    _check_kinds(model)
    slots: list[tuple[nn.Module, str, Any]] = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent._modules.items()
        if child is not None and _is_adapted(child)
    ]
    for parent, name, layer in slots:
        parent._modules[name] = layer.get_base_layer()
    try:
        yield
    finally:
        for parent, name, layer in slots:
            parent._modules[name] = layer


# -- the meeting


def meet_adapters(model: nn.Module, *, drawn_alike: bool = False) -> None:
    """Make the adapters of a split model a part of it; those that are already are left alone.

    Args:
        drawn_alike: whether the ranks have the same whole adapters, as where PEFT was before ``parallelize``. Otherwise PEFT
            has drawn them on each rank from what that rank has; then they are drawn again, the same for every layout.

    Raises:
        UnsupportedError: adapters that a split model cannot have.
        PlanError: the ranks have different adapters.

    Communication: where there are new ones, one broadcast or all-gather of 8 bytes over all ranks.
    """
    state = parallel_state(model)
    configs = tuple((model.__dict__.get("peft_config") or {}).values())
    if len(configs) == len(state.adapter_configs) and all(map(operator.is_, configs, state.adapter_configs)):
        return
    if state.mesh.model.size > 1:
        _check_kinds(model)
    new = [(path, layer, adapter) for path, layer in _layers(model) for adapter in layer.r if not _met(layer, adapter)]
    seed = 0
    if drawn_alike:
        _check_same(new, state)
    elif new and state.mesh.model.size > 1:
        _check_drawn_from_nothing(model)
        seed = _common_seed(state)
    for path, layer, adapter in new:
        weight = state.plan.tensor(f"{path}.weight")
        if drawn_alike or state.mesh.model.size == 1:
            values = _values(layer, adapter)
        else:
            values = _draw(layer, adapter, weight, model.__dict__["peft_config"][adapter], mix(seed, path, adapter))
        stand_around(layer)
        met = place_adapter(layer, adapter, path, weight, state, values)
        layer.lora_dropout[adapter].__dict__["_oslo_tensors"] = met
    tensors = [
        tensor
        for _, layer in _layers(model)
        for adapter in layer.r
        for tensor in layer.lora_dropout[adapter].__dict__["_oslo_tensors"]
    ]
    state.set_adapters(tuple(tensors), configs)
    if "_oslo_cuts_on_load" not in model.__dict__:
        model.__dict__["_oslo_cuts_on_load"] = model.register_load_state_dict_pre_hook(_cut_loaded)


def _met(layer: Any, adapter: str) -> bool:
    return "_oslo_tensors" in layer.lora_dropout[adapter].__dict__


def _is_adapted(module: nn.Module) -> bool:
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer)


def _layers(model: nn.Module) -> list[tuple[str, Any]]:
    return [(without_wrappers(name), module) for name, module in model.named_modules() if _is_adapted(module)]


def _values(layer: nn.Module, adapter: str) -> dict[str, Tensor]:
    return {name: module._parameters[leaf] for name, module, leaf in parts_of(layer, adapter)}  # type: ignore[misc]


def _draw(layer: Any, adapter: str, weight: TensorPlan, config: Any, seed: int) -> dict[str, Tensor]:
    """Initial values of an adapter of the whole module, drawn by PEFT."""
    cls, base = original_class(layer), layer.get_base_layer()
    if isinstance(base, nn.Embedding):
        stand_in: nn.Module = nn.utils.skip_init(nn.Embedding, *weight.shape)
    else:
        out, width = weight.shape if isinstance(base, nn.Linear) else reversed(weight.shape)
        stand_in = nn.utils.skip_init(nn.Linear, width, out, bias=getattr(base, "bias", None) is not None)
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        fresh = cls(stand_in, adapter, config=config, r=layer.r[adapter], lora_alpha=layer.lora_alpha[adapter])
    finally:
        generator.set_state(before)
    return _values(fresh, adapter)


def _common_seed(state: ParallelState) -> int:
    box = [torch.initial_seed()]  # and not what PEFT left of the generator: it has drawn this rank's shapes
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _check_same(new: Sequence[tuple[str, Any, str]], state: ParallelState) -> None:
    if state.mesh.topology.world_size == 1:
        return
    named = [(f"{path}.{name}", value) for path, layer, adapter in new for name, value in _values(layer, adapter).items()]
    found = fingerprints_of_ranks(fingerprint(named), None, state.mesh.device)
    if len(set(found)) > 1:
        raise PlanError(
            "the ranks were given different adapters",
            expected="the same adapters on every rank",
            got=f"{len(set(found))} different ones",
            hint="load them, or call torch.manual_seed(...) with one number on every rank before get_peft_model",
        )


# -- loading


def _cut_loaded(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict is loaded: of whole tensors keep this rank's part, and nothing of what other stages hold."""
    if not has_adapters(model):
        return
    meet_adapters(model)  # a second adapter is loaded as soon as it is there
    state = parallel_state(model)
    at, held = state.mesh.at, set(state.held())
    for name in [name for name in state_dict if name.startswith(prefix)]:
        if not state.plan.knows(name.removeprefix(prefix)):
            continue
        tensor = state.plan.tensor(name.removeprefix(prefix))
        if tensor not in held:
            del state_dict[name]
        elif tensor.shard is not None and tuple(state_dict[name].shape) == tensor.shape:
            state_dict[name] = tensor.shard.apply(state_dict[name], at.tp_rank)


# -- what is refused


def refuse_saving_alone(model: nn.Module, caller: FrameType | None) -> None:
    """Raises UnsupportedError where PEFT asks for the state dict of a split model to save adapters: a rank has but its part."""
    if not has_adapters(model) or parallel_state(model).mesh.model.size == 1:
        return
    saver = sys.modules["peft"].utils.save_and_load.get_peft_model_state_dict.__code__
    while caller is not None and caller.f_code is not saver:
        caller = caller.f_back
    if caller is not None and caller.f_locals.get("state_dict") is None:
        raise UnsupportedError(
            "save_pretrained would write one rank's part of the adapters as if it were all",
            hint="call save_pretrained_with_parallel(folder) on every rank: it writes the same files",
        )


def refuse_prompts(adapted: Any) -> None:
    """Raises UnsupportedError where PEFT trains something in front of a model: prompts, prefixes."""
    for name, config in (getattr(adapted, "_peft_config", None) or {}).items():
        if config.is_prompt_learning:
            raise _refused(f"adapters of type {config.peft_type.value}", name)


def refuse_new_prompts(model: nn.Module, caller: FrameType | None) -> None:
    """The same where PEFT is about to look for the embeddings of a split model, which it would not find by their sizes."""
    peft: Any = sys.modules.get("peft")
    if peft is None or caller is None or parallel_state(model).mesh.model.size == 1:
        return
    if caller.f_code is peft.PeftModel._setup_prompt_encoder.__code__:
        refuse_prompts(caller.f_locals["self"])


def refuse_adapters(model: nn.Module, where: str) -> None:
    """Raises UnsupportedError where PEFT has put adapters into a model."""
    if has_adapters(model):
        raise UnsupportedError(
            "a model is saved merged without adapters around it",
            where=where,
            got=", ".join(str(name) for name in model.__dict__["peft_config"]),
            hint="merge them first: model = adapted.merge_and_unload(); or save them: save_pretrained_with_parallel(folder)",
        )


def _check_kinds(model: nn.Module) -> None:
    from peft import PeftType
    from peft.tuners.lora import Embedding, Linear

    for adapter, config in model.__dict__["peft_config"].items():
        if config.peft_type != PeftType.LORA:
            raise _refused(f"adapters of type {getattr(config.peft_type, 'value', config.peft_type)}", adapter)
        for setting in _REFUSED_SETTINGS:
            if getattr(config, setting, None):
                raise _refused(f"{setting} of LoraConfig", adapter)
    for path, layer in _layers(model):
        if original_class(layer) not in (Linear, Embedding):
            raise _refused(f"{type(layer).__name__} of {type(layer).__module__}", path)
        for adapter, variant in layer.lora_variant.items():
            raise _refused(f"{type(variant).__name__}", f"{path}, adapter {adapter}")


def _refused(what: str, where: str) -> UnsupportedError:
    return UnsupportedError(
        "a split model cannot have adapters of this kind",
        where=where,
        expected="LoRA on Linear, Conv1D and Embedding modules",
        got=what,
        hint="leave it out, or use tp=1 and pp=1",
    )


def _check_drawn_from_nothing(model: nn.Module) -> None:
    for adapter, config in model.__dict__["peft_config"].items():
        if config.init_lora_weights not in _DRAWN_FROM_NOTHING:
            raise UnsupportedError(
                "these initial values are made from whole weights, of which each rank has a part",
                where=f"adapter {adapter}",
                got=f"init_lora_weights={config.init_lora_weights!r}",
                hint="call get_peft_model before parallelize",
            )
