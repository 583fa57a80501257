"""What a virtual GPU raises."""

from __future__ import annotations


class VgpuError(RuntimeError):
    """Base of all of them."""


class DeadlockError(VgpuError):
    """The host waits for work that can never run."""


class KernelError(VgpuError):
    """An operation failed when it ran, as an illegal memory access does on a GPU. Later calls raise it again."""


class CaptureError(VgpuError):
    """Something was done during graph capture that cannot be part of a graph."""


class RaceError(VgpuError):
    """Two operations touch the same memory and nothing orders them. ``edge``: the missing edge, "" if none fits."""

    def __init__(self, message: str, edge: str = "") -> None:
        super().__init__(message)
        self.edge = edge
