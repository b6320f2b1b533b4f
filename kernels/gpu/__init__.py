"""The Triton programs of the kernels and what launches them: one module per kernel, imported at its first use on a GPU."""

from __future__ import annotations

from importlib.util import find_spec

from oslo_engine.errors import MissingDependencyError

if find_spec("triton") is None:
    raise MissingDependencyError("the kernels need Triton to run on a GPU", hint="pip install triton")
