"""Errors that a virtual GPU raises."""

from __future__ import annotations


class VgpuError(RuntimeError):
    """Base of all of them."""


class DeadlockError(VgpuError):
    """The host waits for work that can never run."""


class KernelError(VgpuError):
    """An operation failed when it ran, as an illegal memory access does on a GPU. Later calls raise it again."""


class CaptureError(VgpuError):
    """Something was done during graph capture that cannot be part of a graph."""


class CheckError(VgpuError):
    """Memory was used in the right order but in the wrong way, which happens-before cannot detect.

    ``checker``: the check that failed. ``guard``: what should have prevented it (``memory_order/edges.py``), "" if not
    known. ``memory``: its name, and rows. ``places``: the source lines concerned, the one with the fault last.
    """

    checker = ""

    def __init_subclass__(cls, checker: str) -> None:
        cls.checker = checker

    def __init__(
        self, message: str, guard: str = "", memory: str = "", places: tuple[str, ...] = (), order: int = 0
    ) -> None:
        said = not guard or "\n  missing " in message
        super().__init__(message if said else f"{message}\n  missing guard: {guard}")
        self.guard = guard
        self.memory = memory
        self.places = places
        self.order = order


class FreshnessError(CheckError, checker="freshness"):
    """Rows were read that have not been written since their fill began."""


class ProtectionError(CheckError, checker="protection"):
    """A graph writes memory that graphs must not write."""


class GenerationError(CheckError, checker="generation"):
    """A view of one fill or replay was used after the next one had begun."""


class BoundsError(CheckError, checker="bounds"):
    """An index names no row of the memory it is used on: it is too large, or negative."""


class StaleMemoryError(CheckError, checker="lifetime"):
    """Memory was used after the tensor that it belonged to had been freed."""


class PeerError(CheckError, checker="peers"):
    """A device accesses another one's memory whose address it has not been told."""


class TagError(CheckError, checker="tags"):
    """A slot of KV memory holds another token or part than it should."""


class OwnershipError(CheckError, checker="ownership"):
    """A page is used by a request that has neither leased nor shares it."""


class FootprintError(CheckError, checker="footprint"):
    """An operation accesses something else than it has declared, or ``--memory-check order`` remembers it wrongly."""


class RaceError(VgpuError):
    """Two operations touch the same memory and nothing orders them.

    ``edges``: the declared edges that would, or guards, ``edge`` the first of them, "" if none fits. ``hazard``: RAW,
    WAR, WAW or exclusive. ``memory``: its name and rows. ``places``: the source lines of the two, in program order.
    ``order``: where in the program the race is; of several races the one with the least is the cause of the others.
    """

    def __init__(
        self, message: str, edge: str = "", edges: tuple[str, ...] = (), hazard: str = "", memory: str = "",
        places: tuple[str, ...] = (), order: tuple[int, int] = (0, 0),
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.edge = edge
        self.edges = edges
        self.hazard = hazard
        self.memory = memory
        self.places = places
        self.order = order
