"""Building a model split from the start: from a checkpoint in any form, or from a config. No rank ever holds it whole."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from oslo_engine.assemble import assemble
from oslo_engine.checkpoint.agree import together
from oslo_engine.checkpoint.initialize import initialize_like_unsplit, initialize_missing
from oslo_engine.checkpoint.load import LoadReport, load_weights
from oslo_engine.checkpoint.policy_hash import warn_of_another_policy
from oslo_engine.checkpoint.skeleton import meta_model, transformers_class
from oslo_engine.checkpoint.source import TensorSource, floating_dtype, open_source, verify_source
from oslo_engine.comm.mesh import Mesh, build_mesh
from oslo_engine.errors import CheckpointError, UnsupportedError
from oslo_engine.plan.plan import Plan
from oslo_engine.rewrite.planning import plan_model
from oslo_engine.rewrite.state import parallel_state
from oslo_engine.topology import Coordinate, Topology

logger = logging.getLogger(__name__)

_HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
_ELSEWHERE = {
    "device_map": "every rank has one device; model parallelism without a launcher is another call",
    "quantization_config": "quantised weights cannot be cut",
    "gguf_file": "load it with Transformers, save it, and load that",
    "state_dict": "build the model with Transformers and call oslo.parallelize(model)",
    "distributed_config": "use tensor_parallel_size and pipeline_parallel_size",
    "tp_plan": "use tensor_parallel_size",
    "tp_size": "use tensor_parallel_size",
}


def load_parallel(
    cls: Any,
    path: str | Path,
    wrap: Callable[[type], type],
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    micro_batch_size: int = 1,
    resize_token_embeddings: int | None = None,
    seed: int | None = None,
    policy: Any = None,
    schedule: str = "1f1b",
    sequence_parallel: bool = False,
    expert_split: str = "inner",
    output_loading_info: bool = False,
    **kwargs: Any,
) -> Any:
    """Load this rank's slice of a checkpoint. ``Cls.from_pretrained_with_parallel``.

    Args:
        cls: a model class or an Auto class.
        path: a hub name, or a folder: an ordinary Transformers checkpoint, or one saved split at any layout.
        wrap: gives the parallel class of a model class.
        tensor_parallel_size, pipeline_parallel_size, micro_batch_size, policy, schedule, sequence_parallel,
            expert_split: see ``parallelize``.
        resize_token_embeddings: new size of the vocabulary; new rows are what ``model.resize_token_embeddings`` would give
            them.
        seed: of new rows, missing heads and dropout; by default torch's random state on rank 0.
        output_loading_info: also return which tensors were missing, unexpected or of another shape.
        kwargs: of ``from_pretrained``: ``dtype``, ``attn_implementation``, hub options, and attributes of the config.

    Returns:
        The model in evaluation mode, as ``from_pretrained`` returns it; with ``output_loading_info`` a tuple.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or lacks what the model needs.
        UnsupportedError: an option that has no meaning for a split model.

    Communication: collective.
    """
    for name, instead in _ELSEWHERE.items():
        if kwargs.pop(name, None) is not None:
            raise UnsupportedError(f"{name} cannot be combined with loading a model split", got=name, hint=instead)
    mesh = build_mesh(tensor_parallel_size, pipeline_parallel_size)
    hub = {name: kwargs.pop(name) for name in _HUB if name in kwargs}
    dtype = kwargs.pop("dtype", None) or kwargs.pop("torch_dtype", None) or "auto"
    kwargs.pop("torch_dtype", None)
    generation = kwargs.pop("generation_config", None)
    ignore_mismatched = kwargs.pop("ignore_mismatched_sizes", False)
    attention = kwargs.pop("attn_implementation", None)
    kwargs.pop("use_safetensors", None)
    config = _config(cls, path, hub, kwargs)
    if attention is not None:
        config._attn_implementation = attention
    folder = _folder(path, hub)
    source = _open_on_every_rank(folder)
    model_class = transformers_class(_model_class(cls, config))
    model = meta_model(model_class, config, _dtype(dtype, config, source))
    with _common_random_state(mesh, seed):
        resized = _resize(model, source, resize_token_embeddings) if resize_token_embeddings else set()
        model = assemble(
            model,
            wrap(model_class),
            mesh,
            policy=policy,
            schedule=schedule,
            micro_batch_size=micro_batch_size,
            sequence_parallel=sequence_parallel,
            expert_split=expert_split,
            seed=seed,
        )
        plan = parallel_state(model).plan
        warn_of_another_policy(source, parallel_state(model).policy_hash)
        asked = None if dtype == "auto" else model.dtype
        rest = _only(plan, lambda names: not names & resized)
        load = partial(
            load_weights, model, rest, mesh.at, source, mesh.device, asked, ignore_mismatched_sizes=ignore_mismatched
        )
        report = together(load, what="loading the checkpoint")[0]  # the same on every rank
        report = replace(report, unexpected=tuple(name for name in report.unexpected if name not in resized))
        initialize_missing(model_class, model.config, plan, mesh.at, model, report.uninitialized, mesh.device, model.dtype)
    _tell(report, folder, model)
    _set_generation_config(model, generation, folder)
    model.eval()
    return (model, _loading_info(report)) if output_loading_info else model


def initialize_parallel(
    cls: Any,
    config: PreTrainedConfig,
    wrap: Callable[[type], type],
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    micro_batch_size: int = 1,
    resize_token_embeddings: int | None = None,
    seed: int | None = None,
    policy: Any = None,
    schedule: str = "1f1b",
    sequence_parallel: bool = False,
    expert_split: str = "inner",
    **kwargs: Any,
) -> Any:
    """This rank's slice of a randomly initialised model. ``Cls.from_config_with_parallel``.

    Args:
        config: unchanged.
        seed: of the weights and dropout: the weights are those of ``torch.manual_seed(seed); cls._from_config(config)``. By
            default torch's random state on rank 0.
        kwargs: of ``from_config``: ``dtype``, ``attn_implementation``.

    Returns:
        The model in training mode, as a constructor returns it.

    Communication: collective.
    """
    dtype = kwargs.pop("dtype", None) or kwargs.pop("torch_dtype", None) or config.dtype
    attention = kwargs.pop("attn_implementation", None)
    if kwargs:
        raise TypeError(f"from_config_with_parallel got unexpected arguments: {', '.join(sorted(kwargs))}")
    config = copy.deepcopy(config)
    if attention is not None:
        config._attn_implementation = attention
    if resize_token_embeddings is not None:
        config.get_text_config().vocab_size = resize_token_embeddings
    mesh = build_mesh(tensor_parallel_size, pipeline_parallel_size)
    model_class = transformers_class(_model_class(cls, config))
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with _common_random_state(mesh, seed):
        model = assemble(
            meta_model(model_class, config, dtype),
            wrap(model_class),
            mesh,
            policy=policy,
            schedule=schedule,
            micro_batch_size=micro_batch_size,
            sequence_parallel=sequence_parallel,
            expert_split=expert_split,
            seed=seed,
        )
        initialize_like_unsplit(model_class, config, parallel_state(model).plan, mesh.at, model, mesh.device, dtype)
    return model


def _model_class(cls: Any, config: PreTrainedConfig) -> type[PreTrainedModel]:
    mapping = getattr(cls, "_model_mapping", None)
    if mapping is None:
        return cls
    if type(config) not in mapping:
        raise UnsupportedError(f"{cls.__name__} has no class for this config", got=type(config).__name__)
    found = mapping[type(config)]
    if not isinstance(found, (tuple, list)):
        return found
    return next((one for one in found if one.__name__ in (config.architectures or ())), found[0])


def _config(cls: Any, path: str | Path, hub: dict[str, Any], kwargs: dict[str, Any]) -> PreTrainedConfig:
    config = kwargs.pop("config", None)
    if isinstance(config, PreTrainedConfig):
        if kwargs:
            raise TypeError(f"from_pretrained_with_parallel got unexpected arguments: {', '.join(sorted(kwargs))}")
        return copy.deepcopy(config)
    if Path(path).is_dir() and config is None and not (Path(path) / hub.get("subfolder", "") / "config.json").is_file():
        raise CheckpointError("the checkpoint has no config.json", where=str(path), hint="pass config=...")
    config_class = AutoConfig if hasattr(cls, "_model_mapping") else cls.config_class
    config, unused = config_class.from_pretrained(config or path, return_unused_kwargs=True, **hub, **kwargs)
    if unused:
        raise TypeError(f"from_pretrained_with_parallel got unexpected arguments: {', '.join(sorted(unused))}")
    return config


def _folder(path: str | Path, hub: dict[str, Any]) -> Path:
    if Path(path).is_dir():
        return Path(path) / hub.get("subfolder", "")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    options = {name: value for name, value in hub.items() if name != "subfolder"}
    try:
        folder = Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors"], **options)) / hub.get(
            "subfolder", ""
        )
        if not any(folder.glob("*.safetensors")):
            snapshot_download(str(path), allow_patterns=["*.bin"], **options)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            "no such checkpoint", where=str(path), expected="a folder, or a name on the hub", got=str(error)
        ) from None
    return folder


def _open_on_every_rank(folder: Path) -> TensorSource:
    """Open a checkpoint and compare its files with their checksums; a fault that one rank finds is raised on all."""
    opened: list[TensorSource] = []
    together(lambda: opened.append(open_source(folder)), what="opening the checkpoint")
    verify_source(opened[0])
    return opened[0]


def _dtype(dtype: Any, config: PreTrainedConfig, source: TensorSource) -> torch.dtype:
    """What ``from_pretrained`` takes "auto" to mean: the config's type, else the checkpoint's."""
    if dtype == "auto":
        dtype = config.dtype or floating_dtype(source) or torch.get_default_dtype()
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _resize(model: PreTrainedModel, source: TensorSource, size: int) -> set[str]:
    """Resize the vocabulary of a model on meta as Transformers would, with these tensors whole and real; all their names.

    New rows depend on all the old ones (their mean and covariance), so this is the one place where a rank holds a whole tensor.
    """
    vocabulary = [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None]
    whole = plan_model(model, None, Topology()).plan
    ids = {id(parameter) for module in vocabulary for parameter in module.parameters()}
    names = {name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in ids}
    load_weights(model, _only(whole, lambda aliases: bool(aliases & names)), Coordinate(0, 0, 0), source, torch.device("cpu"))
    model.resize_token_embeddings(size)
    return {name for name, parameter in model.named_parameters(remove_duplicate=False) if not parameter.is_meta}


def _only(plan: Plan, wanted: Callable[[set[str]], bool]) -> Plan:
    """A plan of some of the tensors, chosen by their names."""
    return replace(plan, tensors=tuple(tensor for tensor in plan.tensors if wanted(set(tensor.aliases))))


def _loading_info(report: LoadReport) -> dict[str, Any]:
    """Under the names that Transformers uses."""
    return {
        "missing_keys": set(report.missing),
        "unexpected_keys": set(report.unexpected),
        "mismatched_keys": set(report.mismatched),
        "error_msgs": [],
    }


@contextmanager
def _common_random_state(mesh: Mesh, seed: int | None) -> Iterator[None]:
    """Every rank draws what rank 0 would: from ``seed`` (and then goes on as before), or from its present state."""
    if seed is not None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
        return
    if mesh.topology.world_size > 1:
        box = [torch.get_rng_state()]
        dist.broadcast_object_list(box, src=0)
        torch.set_rng_state(box[0])
    yield


def _tell(report: LoadReport, folder: Path, model: nn.Module) -> None:
    if report.unexpected:
        logger.warning("%s: not used by %s: %s", folder, type(model).__name__, ", ".join(sorted(report.unexpected)))
    made_by_class = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    if uninitialized := sorted(set(report.uninitialized) - made_by_class):
        logger.warning(
            "%s: newly initialised in %s, train it before use: %s",
            folder,
            type(model).__name__,
            ", ".join(uninitialized),
        )


def _set_generation_config(model: PreTrainedModel, given: GenerationConfig | None, folder: Path) -> None:
    if not model.can_generate():
        return
    if given is not None:
        model.generation_config = given
    elif (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
