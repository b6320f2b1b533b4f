"""Starting processes that know nothing of the user's script."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_starting = threading.Lock()


@contextmanager
def main_hidden() -> Iterator[None]:
    """Worker processes need nothing of the user's script, and where it has no main guard, importing it would run it again."""
    with _starting:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
