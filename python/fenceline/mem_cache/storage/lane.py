"""Lane: the jobs of one kind on their way to worker threads."""

from __future__ import annotations

from fenceline.mem_cache.storage.worker import Job
from fenceline.memory_order import Device, HostChannel


class Lane:
    """A channel that ``num_workers`` threads read, and since when nobody has heard of them. The scheduler thread's."""

    def __init__(self, device: Device, name: str, num_workers: int) -> None:
        self.name = name
        self.num_workers = num_workers
        self.jobs: HostChannel[Job | None] = device.make_channel()
        self.num_jobs = 0  # put and not finished
        self.is_stalled = False
        self._heard_at = 0.0

    def put(self, job: Job, now: float) -> None:
        """Hand a job over. ``now``: seconds of the controller's clock."""
        if self.num_jobs == 0:
            self._heard_at = now
        self.num_jobs += 1
        self.jobs.put(job)

    def heard(self, now: float, finished: bool) -> None:
        """A worker said something; ``finished``: that a job is done."""
        self._heard_at = now
        self.is_stalled = False
        self.num_jobs -= finished
        assert self.num_jobs >= 0, f"storage lane {self.name}: a job ended twice"

    def look(self, now: float, stall_s: float) -> bool:
        """Note whether there is work and no sign of it for ``stall_s``. True: since just now."""
        was_stalled = self.is_stalled
        self.is_stalled = self.num_jobs > 0 and now - self._heard_at > stall_s
        return self.is_stalled and not was_stalled

    def send_home(self) -> None:
        """One None for each worker, behind what is queued."""
        for _ in range(self.num_workers):
            self.jobs.put(None)
