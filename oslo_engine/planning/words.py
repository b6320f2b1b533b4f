"""What reports say in words."""

from __future__ import annotations

from collections.abc import Iterator

from oslo_engine.planning.candidates import Candidate

EXACT = "weights, buffers, gradients and optimizer state (without ZeRO); messages of tp and pp; micro-batches in flight"
ESTIMATED = (
    "activations (measured on fake tensors, without padding: within 10 % in the tests), ZeRO's parts, bubble (stages of equal "
    "cost), seconds (nothing overlaps)"
)
NOT_COUNTED = "the allocator's gaps, buffers of DistributedDataParallel and NCCL, what the CUDA context takes (about 0.5 GiB)"


def layout_words(candidate: Candidate) -> str:
    """``tp=8 pp=4 dp=2, 1f1b, 16 micro-batches of 2, recomputing, ZeRO 1``."""
    return ", ".join(_words(candidate))


def _words(candidate: Candidate) -> Iterator[str]:
    yield f"tp={candidate.tp} pp={candidate.pp} dp={candidate.dp}"
    if candidate.pp > 1:
        yield candidate.schedule
    yield f"{candidate.micro_batches} micro-batch{'es' * (candidate.micro_batches > 1)} of {candidate.rows}"
    if candidate.sequence_parallel:
        yield "sequence parallel"
    if candidate.checkpointing:
        yield "recomputing"
    if candidate.zero:
        yield f"ZeRO {candidate.zero}"


def readable(size_bytes: float) -> str:
    """``12.3 GiB``."""
    sign = "-" if size_bytes < 0 else ""
    size = abs(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{sign}{size:.4g} {unit}"
        size /= 1024
    return f"{sign}{size:.4g} TiB"
