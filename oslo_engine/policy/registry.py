"""Which policy serves which model: the YAML files that are installed as ``oslo_engine.policies``."""

from __future__ import annotations

import difflib
from functools import cache, partial
from importlib import resources
from pathlib import Path

from oslo_engine.errors import PolicyError
from oslo_engine.policy.loader import Reading, load_policy, read_policy
from oslo_engine.policy.schema import Policy
from oslo_engine.policy.schema_faults import nearest


def find_policy(choice: Policy | str | Path | None, model_type: str) -> Policy:
    """The policy to use for a model.

    Args:
        choice: None for the installed policy of this ``config.model_type``; or a Policy, the name of an installed one, or the
            path of a YAML file.
        model_type: ``config.model_type`` of the model.

    Raises:
        PolicyError: there is none, or the file is wrong.
    """
    if isinstance(choice, Policy):
        return choice
    if choice is None:
        served = policies_by_model_type()
        if model_type not in served:
            raise PolicyError(
                f"no policy serves model type {model_type!r}",
                got=model_type,
                expected=f"one of {len(served)} model types; nearest: {_nearest(model_type, served)}",
                hint="pass policy=PATH to a YAML file of your own; docs/policies.md shows how to write one",
            )
        return served[model_type]
    path = Path(choice)
    if path.suffix in (".yaml", ".yml"):
        return load_policy(path, partial(_sibling_or_installed, path))
    return installed_policy(str(choice))


def read_policy_file(path: Path) -> Reading:
    """A policy file that may be wrong, and what is wrong with it; see ``loader.read_policy``."""
    return read_policy(path, partial(_sibling_or_installed, path))


@cache
def installed_policy(name: str) -> Policy:
    return load_policy(_installed_file(name), _installed_file)


@cache
def policies_by_model_type() -> dict[str, Policy]:
    """Every ``config.model_type`` that an installed policy serves."""
    found: dict[str, Policy] = {}
    for name in installed_names():
        policy = installed_policy(name)
        for model_type in policy.models:
            if model_type in found:
                raise PolicyError(f"two policies serve {model_type!r}", where=policy.origin, got=found[model_type].origin)
            found[model_type] = policy
    return found


@cache
def installed_names() -> tuple[str, ...]:
    """The policies. Files whose names begin with ``_`` are parts that policies extend."""
    return tuple(sorted(file.stem for file in _folder().glob("*.yaml") if not file.name.startswith("_")))


def _folder() -> Path:
    return Path(str(resources.files("oslo_engine.policies")))


def _installed_file(name: str) -> Path:
    file = _folder() / f"{name}.yaml"
    if not file.is_file():
        near = nearest(name, installed_names())
        raise PolicyError(
            "no such policy",
            got=name,
            expected=f"one of: {', '.join(installed_names())}",
            hint=f"did you mean {near!r}?" if near else "a policy of your own is named by the path of its file",
        )
    return file


def _sibling_or_installed(path: Path, name: str) -> Path:
    sibling = path.parent / f"{name}.yaml"
    return sibling if sibling.is_file() else _installed_file(name)


def _nearest(model_type: str, served: dict[str, Policy]) -> str:
    return ", ".join(difflib.get_close_matches(model_type, served, n=3, cutoff=0.3)) or "none"
