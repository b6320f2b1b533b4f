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


def fingerprints_of_ranks(own: int, group: Any, device: torch.device) -> list[int]:
    """Everybody's fingerprint, by rank in the group. Communication: one all-gather of 8 bytes."""
    mine = torch.tensor([own], dtype=torch.int64, device=device)
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, mine, group=group)
    return [int(each) for each in everybody]
