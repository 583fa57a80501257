"""What the storage tier counts, beside what its backend does."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from fenceline.mem_cache.storage.base import StorageStats
from fenceline.mem_cache.storage.prefetch import Outcome


@dataclass(frozen=True, slots=True)
class StorageTierStats:
    """Counts since the start, of pages unless named otherwise; of what ``drain`` has returned. Seconds are summed over
    worker threads; a prefetch's run from ``query`` to its closing ack."""

    backend: StorageStats
    prefetches: Mapping[Outcome, int] = field(default_factory=dict)  # that ended, by how
    num_prefetching: int = 0  # that have not ended
    timeouts: int = 0  # prefetches that a request has ceased to wait for
    found: int = 0
    fetched: int = 0
    fetched_in_vain: int = 0  # after the request had gone on without them
    missed: int = 0  # looked for and not there, behind one that is not, or not to be read
    prefetch_seconds: float = 0.0
    written: int = 0  # in storage now, or before
    unwritten: int = 0  # tried and not kept
    dropped: int = 0  # not tried: the queue was full, or storage does not answer
    num_queued: int = 0  # pages held for writing, at this moment
    num_writes: int = 0  # calls of the backend
    num_reads: int = 0
    write_seconds: float = 0.0
    read_seconds: float = 0.0
    query_seconds: float = 0.0
    edge_seconds: float = 0.0  # workers waiting for transfers that still used their host pages
    crashes: int = 0  # calls in which the backend raised
    stalls: int = 0  # times that storage has stopped answering

    @property
    def errors(self) -> dict[str, int]:
        """Why pages were not read or not written, by reason: the backend's own, what was ``dropped``, and the calls
        in which it raised (``crash``)."""
        own = {reason.value: num for reason, num in self.backend.errors.items()}
        ours = {"dropped": self.dropped, "crash": self.crashes}
        return own | {reason: num for reason, num in ours.items() if num}


@dataclass(slots=True)
class TierTally:
    """The same, while they are counted, by the scheduler thread."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    outcomes: Counter[Outcome] = field(default_factory=Counter)

    def snapshot(self, backend: StorageStats, num_prefetching: int, num_queued: int) -> StorageTierStats:
        """The sums so far."""
        counts, seconds = self.counts, self.seconds
        return StorageTierStats(
            backend=backend,
            prefetches=dict(self.outcomes),
            num_prefetching=num_prefetching,
            timeouts=counts["timeouts"],
            found=counts["found"],
            fetched=counts["fetched"],
            fetched_in_vain=counts["fetched_in_vain"],
            missed=counts["missed"],
            num_writes=counts["num_writes"],
            num_reads=counts["num_reads"],
            prefetch_seconds=seconds["prefetch"],
            written=counts["written"],
            unwritten=counts["unwritten"],
            dropped=counts["dropped"],
            num_queued=num_queued,
            write_seconds=seconds["write"],
            read_seconds=seconds["read"],
            query_seconds=seconds["query"],
            edge_seconds=seconds["edge"],
            crashes=counts["crashes"],
            stalls=counts["stalls"],
        )
