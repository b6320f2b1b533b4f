"""DeepSpeed's communication op for CPUs, built before any rank needs it.

It is compiled when it is first used (about a CPU-minute) and kept in the user's cache. Ranks that wait for it look like a hang,
and a build that was killed leaves a lock that makes every later one wait for ever.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

_STALE_S = 300  # a build takes a minute or two
_CODE = "import os; os.environ['DS_ACCELERATOR'] = 'cpu'; from deepspeed.comm.torch import build_shm_op; build_shm_op()"


def prebuild(timeout_s: float = 400) -> None:
    """Raises subprocess.TimeoutExpired or CalledProcessError where it cannot be built."""
    remove_stale_locks()
    subprocess.run([sys.executable, "-c", _CODE], check=True, timeout=timeout_s, capture_output=True)


def remove_stale_locks(older_than_s: float = _STALE_S) -> list[Path]:
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    stale = [lock for lock in root.glob("**/lock") if time.time() - lock.stat().st_mtime > older_than_s]
    for lock in stale:
        lock.unlink(missing_ok=True)
    return stale
