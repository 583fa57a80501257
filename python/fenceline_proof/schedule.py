"""Shrinks a failing run's schedule: its turns (``VirtualGpu.trace``) are reduced to the few that are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fenceline_sim.place import Place, here
from fenceline_sim.policy import Script, Turn
from fenceline_sim.streams import Operation, VirtualStream


def shrink(turns: Sequence[Turn], fails: Callable[[Sequence[Turn]], bool], max_runs: int = 100) -> list[Turn] | None:
    """A small part of ``turns`` with which the run still fails, None if not even all of them make it fail.

    If a turn is left out, the device does that work later, when the host needs it. Delta debugging (Zeller and
    Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", TSE 2002), stopped after ``max_runs`` runs.
    """
    if fails(()):
        return []
    if not fails(turns):
        return None
    left = max_runs
    kept, parts = list(turns), 2
    while len(kept) > 1:
        size = -(-len(kept) // parts)
        for start in range(0, len(kept), size):
            rest = kept[:start] + kept[start + size :]
            left -= 1
            if left < 0:
                return kept
            if fails(rest):
                kept, parts = rest, max(parts - 1, 2)
                break
        else:
            if size == 1:
                return kept
            parts = min(2 * parts, len(kept))
    return kept


class DescribedScript(Script):
    """Repeats ``turns`` and records, in ``lines``, where the host was at each and what ran."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        super().__init__(turns)
        self._calls = {turn.call for turn in turns}
        self._call, self._place = 0, here()
        self._repeated: dict[tuple[int, str], tuple[Place, list[Operation]]] = {}

    def begin_call(self, call: int) -> None:
        super().begin_call(call)
        if call in self._calls:
            self._call, self._place = call, here()

    def pick(self, runnable: Sequence[VirtualStream], needed: VirtualStream | None) -> VirtualStream | None:
        due = bool(self._due)
        choice = super().pick(runnable, needed)
        if due and choice is not None:
            _, operations = self._repeated.setdefault((self._call, choice.name), (self._place, []))
            operations.append(choice.queue[0])
        return choice

    @property
    def lines(self) -> list[str]:
        """One line for each turn that was repeated."""
        found = []
        for (_, name), (place, operations) in self._repeated.items():
            first, last = operations[0], operations[-1]
            what = first.label if first is last else f"{len(operations)} operations, {first.label} to {last.label},"
            found.append(f"while the host is at {place}\n     {name} runs {what} of {last.place}")
        return found
