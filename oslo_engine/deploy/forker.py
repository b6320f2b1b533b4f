"""Imported in the process that workers are forked from, and nowhere else. It ends when the parent does, however that ends."""

from __future__ import annotations

import atexit

from oslo_engine.deploy.folder import clear_left_behind

atexit.register(clear_left_behind)  # workers, which are forked from it, end without this
