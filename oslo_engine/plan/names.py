"""The modules of a model under the names a policy uses for them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from oslo_engine.errors import PolicyError
from oslo_engine.policy.schema_faults import joined


class Names:
    """Looks up patterns among the modules of a model; ``base`` is the prefix of its base model (``model.``)."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        prefix = model.base_model_prefix
        self.base = f"{prefix}." if prefix and prefix in self.modules else ""

    def expand(self, pattern: str) -> tuple[str, ...]:
        """Module names that fit a pattern whose ``*`` stays within one name."""
        if "*" not in pattern:
            return (pattern,) if pattern in self.modules else ()
        found = [("", self.modules[""])]
        for word in pattern.split("."):
            found = [
                (f"{path}.{name}" if path else name, child)
                for path, module in found
                for name, child in module._modules.items()
                if child is not None and fnmatch.fnmatchcase(name, word)
            ]
        return tuple(path for path, _ in found)

    def from_base(self, pattern: str) -> tuple[str, ...]:
        """The same for a pattern relative to the base model, or else to the model."""
        return self.expand(self.base + pattern) or self.expand(pattern)

    def parameters(self, pattern: str) -> tuple[str, ...]:
        """Full names of parameters and buffers ``module pattern.leaf`` that are there."""
        path, _, leaf = pattern.rpartition(".")
        return tuple(
            f"{name}.{leaf}".lstrip(".")
            for name in (self.expand(path) if path else ("",))
            if self.modules[name]._parameters.get(leaf) is not None or self.modules[name]._buffers.get(leaf) is not None
        )

    def children(self, name: str) -> str:
        return ", ".join(child for child, _ in self.modules[name].named_children()) or "no modules"

    def modules_inside(self, name: str) -> list[str]:
        """Every module within one, relative to it."""
        return [path for path, _ in self.modules[name].named_modules() if path]

    def tensors_inside(self, name: str) -> list[str]:
        """Every parameter and buffer within a module, relative to it."""
        module = self.modules[name]
        return [path for path, _ in [*module.named_parameters(), *module.named_buffers()]]


def split_optional(pattern: str) -> tuple[str, bool]:
    """``maybe name`` may match nothing: (name, whether it may)."""
    return pattern.removeprefix("maybe "), pattern.startswith("maybe ")


def names_part(pattern: str, full: str) -> bool:
    """Whether the dotted words of a pattern stand next to each other somewhere in a full name."""
    words, parts = pattern.split("."), full.split(".")
    return any(all(map(fnmatch.fnmatchcase, parts[at : at + len(words)], words)) for at in range(len(parts) - len(words) + 1))


class Faults:
    """Everything that is wrong with a policy, told at once.

    places: modules at which a rule failed, so that what else is missing there need not be told.
    """

    def __init__(self) -> None:
        self.found: list[PolicyError] = []
        self.places: list[str] = []

    @contextmanager
    def collect(self, *places: str) -> Iterator[None]:
        try:
            yield
        except PolicyError as fault:
            self.add(fault)
            self.places += places

    def add(self, fault: PolicyError) -> None:
        """The same rule fails alike in every block: it is told once."""
        if without_numbers(str(fault)) not in (without_numbers(str(other)) for other in self.found):
            self.found.append(fault)

    def raise_any(self, describe: Callable[[], str]) -> None:
        """
        Raises:
            PolicyError: there is a fault; of several, each with its place.
        """
        if self.found:
            raise joined(self.found, f"the policy of {describe()}")


def without_numbers(text: str) -> str:
    """Module names in a text with ``*`` for every number in them."""
    return re.sub(r"(?<=\.)\d+(?=[.\s,:]|$)", "*", text)


def told_short(names: Sequence[str], most: int = 12) -> str:
    """A list for a message: the first few, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
