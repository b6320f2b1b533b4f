"""Starting processes that know nothing of the user's script, and find modules where this process finds them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_starting = threading.Lock()
_NO_FOLDER = "PYTHONSAFEPATH"


@contextmanager
def main_hidden() -> Iterator[None]:
    """Worker processes need nothing of the user's script, and where it has no main guard, importing it would run it again.

    The process that they are forked from imports before it knows this one's ``sys.path``, and would begin with the current
    folder, whatever lies there.
    """
    with _starting:
        main, safe = sys.modules["__main__"], os.environ.get(_NO_FOLDER)
        sys.modules["__main__"] = ModuleType("__main__")
        if not {"", os.getcwd()} & set(sys.path):
            os.environ[_NO_FOLDER] = "1"
        try:
            yield
        finally:
            sys.modules["__main__"] = main
            if safe is None:
                os.environ.pop(_NO_FOLDER, None)
