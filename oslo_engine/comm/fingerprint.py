"""Whether ranks that must have been given the same thing were: fingerprints to compare, before anything goes wrong silently."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor

_ENTRIES = 64  # of each tensor that are looked at
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SPREAD, _MIXED = -0x61C8864680B583EB, -0x40A7B892E31B1A47  # odd numbers, as of the generator splitmix64


def fingerprint(values: Iterable[tuple[str, Any]]) -> int:
    """A number that differs where names, shapes, types or entries differ (of large tensors, some of the entries).

    Args:
        values: (name, tensor or nested containers of tensors); what holds no tensor counts by its name only.
    """
    digest = hashlib.blake2b(digest_size=7)
    for name, value in values:
        digest.update(name.encode())
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor):
                digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
                if not leaf.is_meta and leaf.numel():
                    digest.update(_some_entries(leaf))
    return int.from_bytes(digest.digest(), "little")


def _some_entries(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    step = max(flat.numel() // _ENTRIES, 1)
    return flat[::step][:_ENTRIES].cpu().contiguous().view(torch.uint8).numpy().tobytes()


def contents(tensor: Tensor) -> Tensor:
    """A number of all entries in their order, which differs for certain where one entry does, and else all but surely.

    Returns: an int64 scalar on the tensor's device; reading it waits for that. 0 where there are no entries.
    """
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(_BITS.get(flat.element_size(), torch.uint8))
    weights = torch.arange(bits.numel(), device=bits.device).add_(1).mul_(_SPREAD)
    weights = weights.bitwise_xor_(weights >> 31).mul_(_MIXED).bitwise_or_(1)  # of each position another, odd
    return weights.mul_(bits).sum()


def fingerprints_of_ranks(own: int, group: Any, device: torch.device) -> list[int]:
    """Everybody's fingerprint, by rank in the group. Communication: one all-gather of 8 bytes."""
    mine = torch.tensor([own], dtype=torch.int64, device=device)
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, mine, group=group)
    return [int(each) for each in everybody]
