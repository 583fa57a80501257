"""Schedules written down and played back: what of a failing run's context switches matters.

A schedule is told as its difference from the laziest one, which runs nothing before the host needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fenceline.vgpu.gpu import VirtualGpu
from fenceline.vgpu.policy import Policy
from fenceline.vgpu.streams import VirtualStream


class Switch(NamedTuple):
    """When the host has made its ``at``-th submission, stream number ``stream`` runs up to operation ``upto``."""

    at: int
    stream: int
    upto: int


class Recording(Policy):
    """``inner``'s choices, noted."""

    def __init__(self, inner: Policy) -> None:
        self.switches: list[Switch] = []
        self.gpu: VirtualGpu | None = None
        self._inner = inner
        self.switch_odds = inner.switch_odds

    def begin_call(self, call: int) -> None:
        """See Policy."""
        self._inner.begin_call(call)

    def pick(self, runnable: Sequence[VirtualStream], needed: VirtualStream | None) -> VirtualStream | None:
        """See Policy."""
        choice = self._inner.pick(runnable, needed)
        if choice is not None and choice is not needed:
            self._note(choice)
        return choice

    def _note(self, stream: VirtualStream) -> None:
        assert self.gpu is not None, "the recording is told its GPU before anything runs"
        switch = Switch(self.gpu.position, stream.number, stream.queue[0].seq)
        if self.switches and self.switches[-1][:2] == switch[:2]:
            self.switches.pop()
        self.switches.append(switch)


class Playback(Policy):
    """Plays ``switches``; where they say nothing, the device does only what the host needs."""

    def __init__(self, switches: Sequence[Switch]) -> None:
        self.gpu: VirtualGpu | None = None
        self._at: dict[int, list[Switch]] = {}
        for switch in switches:
            self._at.setdefault(switch.at, []).append(switch)

    def pick(self, runnable: Sequence[VirtualStream], needed: VirtualStream | None) -> VirtualStream | None:
        """See Policy."""
        assert self.gpu is not None, "the playback is told its GPU before anything runs"
        for switch in self._at.get(self.gpu.position, ()):
            for stream in runnable:
                if stream.number == switch.stream and stream.queue[0].seq <= switch.upto:
                    return stream
        return needed


def shrink(
    switches: Sequence[Switch], fails: Callable[[Sequence[Switch]], bool], max_runs: int = 80
) -> list[Switch] | None:
    """A small part of ``switches`` with which the run still fails, None if not even all of them make it fail.

    Delta debugging (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", TSE 2002), stopped
    after ``max_runs`` runs.
    """
    left = max_runs
    if fails(()):
        return []
    if not fails(switches):
        return None
    kept, parts = list(switches), 2
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


def told(switches: Sequence[Switch], gpu: VirtualGpu) -> list[str]:
    """Each switch as a sentence; ``gpu`` is the one on which the run that they belong to has just failed."""
    operations = {op.seq: op for agent in gpu.agents for op in agent.history}
    lines = []
    for switch in switches:
        host, last = operations.get(switch.at), operations.get(switch.upto)
        if host is None or last is None:
            continue
        lines.append(
            f"the host has come to {host.place}\n    and {last.where} runs up to {last.label} of {last.place}"
        )
    return lines
