"""The findings of a virtual GPU's checks, and which of them is raised."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fenceline_sim.errors import CheckError, KernelError, RaceError, VgpuError
from fenceline_sim.place import raised_at
from fenceline_sim.streams import Operation


class Findings:
    """Raises a finding, and again at every later call; with ``collect`` it only keeps findings.

    ``look_ahead``: returns races of queued work, since a schedule may show an effect before its cause.
    """

    def __init__(self, collect: bool, look_ahead: Callable[[], list[RaceError]]) -> None:
        self.races: list[RaceError] = []
        self.errors: list[CheckError] = []
        self._failure: BaseException | None = None
        self._collect = collect
        self._look_ahead = look_ahead

    def raise_again(self) -> None:
        if self._failure is not None:
            raise self._failure

    def add_races(self, races: Sequence[RaceError]) -> None:
        if races and not self._collect:
            self._raise_first([*races, *self._look_ahead()])
        if races:
            self._keep(races)

    def add_errors(self, errors: Sequence[CheckError]) -> None:
        """Add findings of the other checks. If a race is the cause, the race is raised instead."""
        if not errors:
            return
        self.errors += errors
        if not self._collect:
            self._raise_first(self._look_ahead())
            self._failure = errors[0]
            raise self._failure

    def stop(self, error: VgpuError) -> None:
        """Raise ``error``, and again at every later call of any thread."""
        self._failure = error
        raise error

    def fail(self, op: Operation, error: Exception) -> None:
        """A kernel failed. If it read values that a race left there, the race is raised instead."""
        self._raise_first(self._look_ahead())
        lines = [f"{op.label} on {op.where} failed: {error}", f"submitted at {op.place}"]
        lines += [f"failed at {line}" for line in raised_at(error, 1)]
        self._failure = KernelError("\n  ".join(lines))
        raise self._failure from error

    def _keep(self, races: Sequence[RaceError]) -> None:
        known = {(race.places, race.hazard) for race in self.races}
        self.races += [race for race in races if (race.places, race.hazard) not in known]

    def _raise_first(self, races: Sequence[RaceError]) -> None:
        if races:
            self._failure = min(races, key=lambda race: race.order)
            self._keep(races)
            raise self._failure
