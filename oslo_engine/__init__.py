"""One call makes a Hugging Face Transformers model train and generate across many devices.

    import oslo_engine as oslo

    model = oslo.parallelize(model, tp=2, pp=2)

Names are looked up when they are first used, so importing the package costs nothing: first our own (``__all__``), then every
public name of Transformers, whose model classes come with the methods of ``oslo_engine.methods``.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oslo_engine.api import deparallelize, parallelize
    from oslo_engine.checkpoint.resume import load_training
    from oslo_engine.checkpoint.training import save_training
    from oslo_engine.data.blend import DatasetBlender
    from oslo_engine.data.builder import IndexedDatasetBuilder
    from oslo_engine.data.causal import DatasetForCausalLM
    from oslo_engine.data.collate import FlatteningCollator, SpanCorruptionCollator
    from oslo_engine.data.indexed import IndexedDataset
    from oslo_engine.data.loader import InfiniteDataLoader
    from oslo_engine.data.preprocess import DatasetPreprocessor
    from oslo_engine.data.sampler import DistributedProxySampler
    from oslo_engine.deploy.settings import Deployment
    from oslo_engine.errors import (
        BatchError,
        CallCancelledError,
        CheckpointError,
        DataError,
        DeploymentError,
        FusionTargetError,
        GradientError,
        MissingDependencyError,
        NotHereError,
        OsloError,
        PipelineError,
        PlanError,
        PolicyError,
        QueueFullError,
        ShardedLogitsError,
        TopologyError,
        UnsupportedError,
        WorkerDied,
        WorkerHungError,
    )
    from oslo_engine.layers.vocab_shard import gather_logits
    from oslo_engine.pipeline.recording import record_timeline
    from oslo_engine.plan.plan import Plan
    from oslo_engine.planning import plan
    from oslo_engine.policy.schema import Policy
    from oslo_engine.rewrite.gradients import clip_grad_norm_
    from oslo_engine.rewrite.scaler import GradScaler
    from oslo_engine.topology import Topology
    from oslo_engine.verify import verify

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "CallCancelledError",
    "CheckpointError",
    "DataError",
    "DatasetBlender",
    "DatasetForCausalLM",
    "DatasetPreprocessor",
    "Deployment",
    "DeploymentError",
    "DistributedProxySampler",
    "FlatteningCollator",
    "FusionTargetError",
    "GradScaler",
    "GradientError",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "InfiniteDataLoader",
    "MissingDependencyError",
    "NotHereError",
    "OsloError",
    "PipelineError",
    "Plan",
    "PlanError",
    "Policy",
    "PolicyError",
    "QueueFullError",
    "ShardedLogitsError",
    "SpanCorruptionCollator",
    "Topology",
    "TopologyError",
    "UnsupportedError",
    "WorkerDied",
    "WorkerHungError",
    "clip_grad_norm_",
    "deparallelize",
    "gather_logits",
    "load_training",
    "parallelize",
    "plan",
    "record_timeline",
    "save_training",
    "verify",
]

_MODULE_OF = {
    "Deployment": "deploy.settings",
    "GradScaler": "rewrite.scaler",
    "DatasetBlender": "data.blend",
    "DatasetForCausalLM": "data.causal",
    "DatasetPreprocessor": "data.preprocess",
    "DistributedProxySampler": "data.sampler",
    "FlatteningCollator": "data.collate",
    "IndexedDataset": "data.indexed",
    "IndexedDatasetBuilder": "data.builder",
    "InfiniteDataLoader": "data.loader",
    "Plan": "plan.plan",
    "Policy": "policy.schema",
    "SpanCorruptionCollator": "data.collate",
    "Topology": "topology",
    "clip_grad_norm_": "rewrite.gradients",
    "deparallelize": "api",
    "gather_logits": "layers.vocab_shard",
    "load_training": "checkpoint.resume",
    "parallelize": "api",
    "plan": "planning",
    "record_timeline": "pipeline.recording",
    "save_training": "checkpoint.training",
    "verify": "verify",
} | {name: "errors" for name in __all__ if name.endswith("Error") or name == "WorkerDied"}

# Subpackages whose names are public names of Transformers too: as attributes of this module they are those.
_NOT_SUBPACKAGES = {"pipeline"}


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "Accelerator":
        value = import_module(f"{__name__}.integrations.accelerate").accelerator_class()
    elif name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    elif name not in _NOT_SUBPACKAGES and find_spec(f"{__name__}.{name}"):
        value = import_module(f"{__name__}.{name}")
    else:
        value = _from_transformers(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def _from_transformers(name: str) -> Any:
    """A public object of Transformers; the model classes among them with the methods of ``oslo_engine.methods``.

    Raises:
        AttributeError: there is none of that name; the message has the nearest.
    """
    import transformers

    value = getattr(transformers, name, None)
    if value is None:
        value = _model_part(name)
    if value is None or (isinstance(value, ModuleType) and value.__name__ == f"transformers.{name}"):
        raise AttributeError(f"neither {__name__!r} nor 'transformers' has {name!r}; {_nearest(name, dir(transformers))}")
    bases = {base.__name__ for base in value.__mro__} if isinstance(value, type) else set()
    if {"PreTrainedModel", "_BaseAutoModelClass"} & bases:
        return import_module(f"{__name__}.methods").with_parallel_methods(value)
    if "Trainer" in bases:
        return import_module(f"{__name__}.integrations.trainer").trainer_for_split_models(value)
    return value


def _model_part(name: str) -> Any:
    """A class that only a modelling file defines, such as an attention or feed-forward block; None if there is none.

    Its folder is found by the model's name in front, the longest that fits, and its file is searched as text before it is
    imported: of all the modelling files only the right one is loaded.
    """
    import transformers.models
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

    prefixes = set()
    for model_type, config in CONFIG_MAPPING_NAMES.items():
        folder = model_type_to_module_name(model_type)
        prefixes |= {(_squeezed(folder), folder), (_squeezed(config.removesuffix("Config")), folder)}
    fitting = [(prefix, folder) for prefix, folder in prefixes if _squeezed(name).startswith(prefix)]
    for _, folder in sorted(fitting, key=lambda pair: (-len(pair[0]), pair[1])):
        for file in sorted((Path(transformers.models.__file__).parent / folder).glob("modeling_*.py")):
            if f"\nclass {name}(" in file.read_text(encoding="utf-8"):
                return getattr(import_module(f"transformers.models.{folder}.{file.stem}"), name)
    return None


def _squeezed(name: str) -> str:
    return name.replace("_", "").lower()


def _nearest(name: str, others: list[str]) -> str:
    import difflib

    candidates = [*__all__, *(other for other in others if not other.startswith("_") and "." not in other)]
    near = difflib.get_close_matches(name, candidates, n=10)
    objects = [other for other in near if other in __all__ or not find_spec(f"transformers.{other}")]
    return f"did you mean {' or '.join(objects[:3])}?" if objects else "nothing there has a similar name"


class _Package(ModuleType):
    """Keeps the import of a submodule from rebinding an attribute that is something else, such as ``oslo_engine.verify``."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and (name in _MODULE_OF or name in _NOT_SUBPACKAGES)):
            super().__setattr__(name, value)


def _adopt(name: str) -> None:
    """In a clone, take a folder that lies beside this one as the subpackage that it is when installed."""
    source = Path(__file__).parent.parent / name / "__init__.py"
    if (Path(__file__).parent / name).is_dir() or not source.is_file():
        return
    spec = spec_from_file_location(f"{__name__}.{name}", source, submodule_search_locations=[str(source.parent)])
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


sys.modules[__name__].__class__ = _Package
for _name in ("kernels", "policies"):
    _adopt(_name)
