"""Writing while training goes on: one thread, with a process group of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from oslo_engine.comm.mesh import Mesh


class Saving:
    """A save that may still be running. ``wait()`` ends it; an error is raised there, once, on every rank."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether everything is on the disk, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when everything is on the disk.

        Raises:
            OsloError: the save failed, on this or another rank.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def run(self, write: Callable[[Any], None], *, in_background: bool) -> Saving:
        """Call ``write`` with the group to communicate in, now or in a thread."""
        if not in_background:
            write(None)
            return self
        # The thread's messages must not mix with those of the training.
        group = self._mesh.once("saving", lambda: dist.new_group(backend="gloo") if dist.is_initialized() else None)

        def run() -> None:
            try:
                write(group)
            except BaseException as error:
                self._error = error

        # Not a daemon: a script that ends waits for its last checkpoint.
        self._thread = threading.Thread(target=run, name="saving the training")
        self._thread.start()
        return self


def saving_of(mesh: Mesh) -> Saving:
    """The save of this layout: one at a time."""
    return mesh.once("saving handle", lambda: Saving(mesh))
