"""How programs are laid over rows: tiles, warps, and the launch itself.

Rows lie on the first axis of a grid, which may be 2^31 - 1 long; the others end at ``LONGEST_AXIS``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from oslo_engine.kernels.dispatch import require

# Rows up to the first length are held whole; longer ones are read several times, in pieces of the second.
LONGEST_TILE, PIECE = 8192, 4096
LONGEST_AXIS = 65535
LANES = 64 if torch.version.hip else 32  # threads of a warp


class Tile(NamedTuple):
    """What one program holds at a time: ``rows`` x ``columns``; ``whole`` where that covers a row from end to end."""

    rows: int
    columns: int
    whole: bool
    warps: int


def row_tile(length: int, *, elements: int = 1024, longest: int = LONGEST_TILE) -> Tile:
    """Tile for a reduction over rows of this length; several short rows share one, up to ``elements``."""
    columns = triton.next_power_of_2(max(length, 1))
    columns = columns if columns <= longest else min(longest, PIECE)
    rows = max(1, min(32, elements // columns))
    return Tile(rows, columns, columns >= length, warps_for(rows * columns))


def plain_tile(length: int, *, rows: int = 2, longest: int = 1024) -> Tile:
    """Tile for work without a reduction over the row: rows are cut into columns anywhere."""
    columns = min(triton.next_power_of_2(max(length, 1)), longest)
    rows = min(64, rows * longest // columns)
    return Tile(rows, columns, columns >= length, warps_for(rows * columns))


def num_programs(like: Tensor, num_tiles: int) -> int:
    """How many programs share the tiles where each sums over many: enough to fill the GPU, few enough to add up after.

    The interpreter gets two, so that small inputs make them take more than one tile.
    """
    at_once = 4 * torch.cuda.get_device_properties(like.device).multi_processor_count if like.is_cuda else 2
    return min(num_tiles, at_once)


def launch(program: Any, grid: tuple[int, ...], like: Tensor, *arguments: Any, warps: int = 4, **constants: Any) -> None:
    """Start ``program`` on the device of ``like`` (Triton itself takes the current one). Nothing happens on an empty grid."""
    fits = max(grid[1:], default=0) <= LONGEST_AXIS
    require(fits, "too many columns", where=program.fn.__name__, expected=f"at most {LONGEST_AXIS} blocks", got=grid)
    if 0 not in grid:
        with torch.cuda.device_of(like):
            program[grid](*arguments, num_warps=warps, **constants)


def warps_for(elements: int) -> int:
    """Warps of a program with so many elements: eight for each thread, 128 bits of a 16-bit dtype."""
    return max(1, min(16, elements // (8 * LANES)))
