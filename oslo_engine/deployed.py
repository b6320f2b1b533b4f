"""Loading a model as a deployment: each worker loads its slice of the checkpoint."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch.distributed as dist

from oslo_engine.construct import load_parallel
from oslo_engine.deploy.settings import Deployment
from oslo_engine.errors import DeploymentError
from oslo_engine.topology import Topology


def load_deployed(
    cls: type,
    path: Any,
    wrap: Callable[[type], type],
    deployment: bool | Deployment,
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    **kwargs: Any,
) -> Any:
    """Start workers on this machine that each load their slice of a checkpoint.

    Args:
        cls: a model class, an Auto class, or one that ``wrap`` made of these.
        path: see ``load_parallel``. It reads the checkpoint on every worker.
        wrap: gives the parallel class of a model class; importable.
        deployment: settings, or True for the defaults.
        kwargs: of ``load_parallel``.

    Returns:
        A ``DeployedModel``.

    Raises:
        DeploymentError: this process is itself one of several ranks, or the workers cannot import the class.
        Exception: what a worker raised while it loaded; no worker is left.
    """
    from oslo_engine.deploy.model import DeployedModel

    if dist.is_available() and dist.is_initialized():
        raise DeploymentError(
            "deployment=True starts its own workers",
            got="torch.distributed is initialised",
            hint="start it with python",
        )
    topology = Topology(tp=tensor_parallel_size, pp=pipeline_parallel_size)
    sizes: dict[str, Any] = {"tensor_parallel_size": topology.tp, "pipeline_parallel_size": topology.pp}
    load = functools.partial(load_parallel, _importable(cls), path, wrap, **sizes, **kwargs)
    return DeployedModel(load, topology.tp * topology.pp, deployment if isinstance(deployment, Deployment) else Deployment())


def _importable(cls: type) -> type:
    """The class that its module and name lead to: of one that ``wrap`` made, the one behind it, which has its name.

    Raises:
        DeploymentError: only the user's script has it.
    """
    for base in cls.__mro__:
        same_name = (base.__module__, base.__qualname__) == (cls.__module__, cls.__qualname__)
        if same_name and base.__module__ != "__main__" and _found(base) is base:
            return base
    raise DeploymentError(
        "the workers cannot import the model's class",
        where=f"{cls.__module__}.{cls.__qualname__}",
        expected="a class of Transformers, or at the top of a module that can be imported",
        hint="move it from the script to a module of its own",
    )


def _found(cls: type) -> Any:
    try:
        return attrgetter(cls.__qualname__)(sys.modules[cls.__module__])
    except (AttributeError, KeyError):
        return None
