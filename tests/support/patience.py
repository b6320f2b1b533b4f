"""Limits in seconds on a machine that may be busy with other things."""

from __future__ import annotations

import os


def on_this_machine(limit_s: float) -> float:
    """A limit for a machine with nothing else to do, stretched by how many processes want each core just now."""
    return limit_s * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
