"""Prefetch: one waiting request's pages on their way from storage, and what the scheduler hears about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from fenceline.mem_cache.page_hash import PageKey
from fenceline.memory_order.stream import Points

I32 = npt.NDArray[np.int32]


class PrefetchState(StrEnum):
    """Where a prefetch stands, as far as the scheduler has drained."""

    NEW = "new"
    QUERYING = "querying"  # a worker asks which pages are there
    FOUND = "found"  # the caller is to call fetch or cancel
    FETCHING = "fetching"  # a worker fills host pages, which nobody else may touch
    OVER = "over"  # no worker touches its pages any more


class Outcome(StrEnum):
    """How a prefetch ended."""

    COMPLETE = "complete"  # every page asked for is there
    ABSENT = "absent"  # storage has no page of the prefix
    SHORT = "short"  # a page was gone, damaged or could not be read: a shorter prefix
    CANCELLED = "cancelled"  # the request did not wait for the rest
    DROPPED = "dropped"  # not tried: too many at once, storage does not answer, or is being cleared


class Prefetch:
    """A prefix that a waiting request would like to have. The scheduler thread's, changed by the controller alone.

    ``keys``: of the pages wanted, in order, the first right behind what device and host have. Pages come in order, so
    at any time ``host_pages[:num_fetched]`` hold their KV. Once ``cancel`` was called ``num_fetched`` does not grow any
    more. All of ``host_pages`` stay leased until the closing ack (:class:`Done` or :class:`Failed`); those not used are
    then retired after ``after``, which the worker may not have waited for. Those used keep it: the worker has waited,
    the streams that touch them next have not.
    """

    __slots__ = (
        "after", "cancelled", "deadline", "handle", "heard_at", "host_pages", "keys", "num_fetched", "num_found",
        "outcome", "started_at", "state", "timed_out"
    )  # fmt: skip

    def __init__(self, handle: int, keys: Sequence[PageKey]) -> None:
        """``handle``: what the caller knows it by."""
        self.handle = handle
        self.keys = tuple(keys)
        self.state = PrefetchState.NEW
        self.outcome: Outcome | None = None  # set when over
        self.num_found = 0  # pages that may be fetched
        self.num_fetched = 0
        self.host_pages: I32 = np.empty(0, dtype=np.int32)
        self.after = Points.none()
        self.cancelled = False  # the one field that a worker looks at, between batches
        self.timed_out = False
        self.started_at = 0.0  # seconds of the controller's clock, as the next two
        self.deadline = float("inf")
        self.heard_at: float | None = None  # of a worker that has begun to fetch

    @property
    def over(self) -> bool:
        """Whether no worker touches ``host_pages`` any more."""
        return self.state is PrefetchState.OVER

    def __repr__(self) -> str:
        return f"prefetch {self.handle} ({self.state.value}, {self.num_fetched} of {self.num_found} pages)"


# --- acks: what StorageController.drain returns ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Written:
    """The workers are done with the host pages of a ``write``; ``num_written`` of them are in storage now."""

    handle: int
    num_written: int


@dataclass(frozen=True, slots=True)
class Found:
    """Storage has the first ``num_pages`` (at least one) of the keys: call ``fetch`` with that many host pages, or
    fewer, or ``cancel``."""

    op: Prefetch
    num_pages: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """``op.host_pages[first : first + num_pages]`` hold their KV; no worker touches them any more."""

    op: Prefetch
    first: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class Done:
    """Closing ack: complete, nothing found, cancelled or dropped (``op.outcome``)."""

    op: Prefetch


@dataclass(frozen=True, slots=True)
class Failed:
    """Closing ack: pages that storage had promised did not come. What came before them is good."""

    op: Prefetch


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The request need not wait any longer: its time is up, or storage does not answer. ``op`` goes on."""

    op: Prefetch


Ack = Written | Found | Fetched | Done | Failed | TimedOut
