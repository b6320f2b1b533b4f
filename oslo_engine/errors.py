"""The exceptions users of oslo_engine can meet.

Every message answers five questions, each on its own line where it has an answer: what went wrong, where, what was expected,
what was found, and what to do about it.
"""

from __future__ import annotations

from typing import Any


class OsloError(Exception):
    """Base of all errors raised on purpose.

    Args:
        what: one sentence that says what is wrong.
        where: module, parameter, file:line or rank that it concerns.
        expected: what would have been right.
        got: what was found instead.
        hint: what the user can do about it.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: Any = None,
        got: Any = None,
        hint: str | None = None,
    ) -> None:
        self.what, self.where, self.expected, self.got, self.hint = what, where, expected, got, hint
        lines = [what]
        for label, value in (("where", where), ("expected", expected), ("got", got), ("hint", hint)):
            if value is not None:
                lines.append(f"  {label}: {value}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, self.where, self.expected, self.got, self.hint)


def _rebuild(cls: type[OsloError], what: str, where: Any, expected: Any, got: Any, hint: Any) -> OsloError:
    return cls(what, where=where, expected=expected, got=got, hint=hint)


class TopologyError(OsloError, ValueError):
    """The sizes of tp, pp, dp and the world do not fit together."""


class PolicyError(OsloError, ValueError):
    """A policy file is wrong or does not fit the model; ``where`` is file:line."""


class PlanError(OsloError, ValueError):
    """A model cannot be laid out as asked (head counts, stages, ties, unsupported modules)."""


class BatchError(OsloError, ValueError):
    """A batch cannot be run: lengths differ, too few rows, no labels."""


class PipelineError(OsloError, RuntimeError):
    """The pipeline loop was used in an order that cannot work."""


class GradientError(OsloError, RuntimeError):
    """A gradient is infinite or not a number; ``where`` is the ranks and parameters."""


class ShardedLogitsError(OsloError, RuntimeError):
    """An operation needs the whole vocabulary while this rank holds a slice of it."""


class CheckpointError(OsloError, RuntimeError):
    """A checkpoint is missing, incomplete, altered or foreign; ``where`` is the file."""


class DataError(OsloError, ValueError):
    """A data set, its source or a request for its batches is wrong; ``where`` is the file, with a line where there is one."""


class MissingDependencyError(OsloError, ImportError):
    """An optional package is needed; ``hint`` is the pip command."""


class UnsupportedError(OsloError, NotImplementedError):
    """A setting that this combination of model and layout does not support."""


class DeploymentError(OsloError, RuntimeError):
    """A deployed model cannot take or finish a call; ``where`` is the rank."""


class NotHereError(OsloError, AttributeError):
    """What a model has and a deployed model has not: its modules and weights lie in other processes."""


class QueueFullError(DeploymentError):
    """As many calls wait already as the deployment allows."""


class CallCancelledError(DeploymentError):
    """The call was cancelled before it had a result."""


class WorkerDied(DeploymentError):
    """A worker process ended while it was needed; ``where`` is its rank, ``got`` its exit code."""


class WorkerHungError(WorkerDied):
    """A worker did not go on and was ended; notes say where the workers stood."""


class FusionTargetError(OsloError, ValueError):
    """A target of ``fuse`` that the model does not have."""
