"""Mixed precision as it was where the user called the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AutocastState:
    """The autocast setting of the CPU and of the device, whether on or off."""

    settings: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def capture(cls, device: torch.device) -> AutocastState:
        kinds = dict.fromkeys(("cpu", device.type))
        return cls(tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """For forwards: exactly these settings, whatever holds around."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.settings:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield

    @contextmanager
    def off(self) -> Iterator[None]:
        """For backwards, which follow the dtypes of their forwards."""
        with ExitStack() as stack:
            for kind, _, dtype in self.settings:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=False))
            yield
