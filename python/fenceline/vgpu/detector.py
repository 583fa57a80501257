"""The happens-before detector."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fenceline.vgpu.errors import RaceError
from fenceline.vgpu.memory import Tag
from fenceline.vgpu.operation import Operation


class Detector:
    """Placeholder until the next commit."""

    def __init__(self, history_of: Callable[[int, int], Operation]) -> None:
        self._history_of = history_of

    def check(self, op: Operation, lenient: bool = False) -> RaceError | None:
        """None."""
        return None

    def host_access(self, op: Operation, tag: Tag, tensor: torch.Tensor, write: bool) -> RaceError | None:
        """None."""
        return None
