"""Threads of the host as agents: one runs at a time, and the seed decides which.

Another thread may continue at any call into the virtual GPU, and only there, so a run is repeatable. For the detector
they are ordered by what orders real threads: start, join, and messages through a :class:`Channel`. (There is no lock,
since a lock orders threads only by chance.)
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Generic, TypeVar

import torch

from fenceline.memory_order.stream import Clock
from fenceline_sim.errors import DeadlockError, VgpuError
from fenceline_sim.findings import Findings
from fenceline_sim.streams import HostThread

T = TypeVar("T")

_GRACE_S = 10.0
_PATIENCE = 8  # unsuccessful polls of a channel, after which another thread runs


class _Turn:
    """A thread's entry in the rotation: it runs once ``may_run`` has been released."""

    def __init__(self, agent: HostThread) -> None:
        self.agent = agent
        self.may_run = threading.Semaphore(0)
        self.ready: Callable[[], bool] | None = None  # what it is blocked on, None: it could run
        self.finished = False
        self.thread: threading.Thread | None = None


class _Abandoned(BaseException):
    """Ends a thread of a run that has ended."""


class Rotation:
    """Decides which of the host's threads runs. ``odds``: the probability of a switch at a call."""

    def __init__(self, main: HostThread, seed: int, odds: float) -> None:
        self._random = Random(seed)
        self._odds = odds
        self._turns = {main.number: _Turn(main)}
        self._local = threading.local()
        self._local.agent = main
        self.is_shared = False  # whether there is more than one thread
        self._is_over = False

    @property
    def agent(self) -> HostThread:
        """The calling thread. Raises ``VgpuError`` if the GPU has not started it."""
        try:
            agent: HostThread = self._local.agent
        except AttributeError:
            name = threading.current_thread().name
            raise VgpuError(f"thread {name!r} is unknown to the virtual GPU: start it with spawn") from None
        return agent

    def start(self, agent: HostThread, run: Callable[[], None]) -> None:
        turn = self._turns[agent.number] = _Turn(agent)
        self.is_shared = True

        def body() -> None:
            self._local.agent = agent
            turn.may_run.acquire()
            try:
                if not self._is_over:
                    run()
            finally:
                turn.finished = True
                if not self._is_over:
                    self._hand_on()

        turn.thread = threading.Thread(target=body, name=agent.name, daemon=True)
        turn.thread.start()

    def finished(self, agent: HostThread) -> bool:
        return self._turns[agent.number].finished

    def abandon(self) -> None:
        """End the other threads where they are. Only the calling thread continues; it need not be one of them."""
        self._is_over, self.is_shared = True, False
        caller = getattr(self._local, "agent", None)
        for turn in self._turns.values():
            if turn.agent is not caller and not turn.finished:
                turn.may_run.release()
                if turn.thread is not None:
                    turn.thread.join(_GRACE_S)

    def maybe_switch(self) -> None:
        """Called at a call into the GPU: another thread may run first."""
        if self.is_shared and self._others() and self._random.random() < self._odds:
            self.give_way()

    def give_way(self) -> None:
        """Let another thread run first, if any can."""
        if others := self._others():
            self._switch(self._turns[self.agent.number], self._random.choice(others))

    def block_until(self, ready: Callable[[], bool], what: str) -> None:
        """Let others run until ``ready``. Raises ``DeadlockError`` if no other thread can run."""
        me = self._turns[self.agent.number]
        me.ready = ready
        while not ready():
            others = self._others()
            if not others:
                raise DeadlockError(f"deadlock: {me.agent.name} waits for {what}, and no other thread can run")
            self._switch(me, self._random.choice(others))
        me.ready = None

    def _others(self) -> list[_Turn]:
        me = self._turns[self.agent.number]
        return [turn for turn in self._able() if turn is not me]

    def _able(self) -> list[_Turn]:
        turns = self._turns.values()
        return [turn for turn in turns if not turn.finished and (turn.ready is None or turn.ready())]

    def _switch(self, me: _Turn, other: _Turn) -> None:
        other.may_run.release()
        me.may_run.acquire()
        if self._is_over:
            raise _Abandoned

    def _hand_on(self) -> None:
        able = self._able()
        if able:
            self._random.choice(able).may_run.release()
        else:  # all others are blocked: let one of them detect the deadlock
            for turn in reversed(self._turns.values()):  # not one that waits for another one's end, if possible
                if not turn.finished:
                    turn.may_run.release()
                    return


class Worker:
    """A thread of the host that ``VirtualGpu.spawn`` started.

    Operations run in whichever thread lets the device go on. OpenMP keeps a number of threads for each thread, and the
    bytes of a sum depend on it, so a new thread takes over the number of the one that starts it.
    """

    def __init__(self, rotation: Rotation, agent: HostThread, run: Callable[[], None]) -> None:
        self.name = agent.name
        self._rotation = rotation
        self._agent = agent
        self._error: BaseException | None = None
        self._num_torch_threads = torch.get_num_threads()
        rotation.start(agent, lambda: self._guarded(run))

    def _guarded(self, run: Callable[[], None]) -> None:
        torch.set_num_threads(self._num_torch_threads)
        try:
            run()
        except BaseException as error:  # raised again by join
            self._error = error

    def join(self) -> None:
        """Wait for its end. Raises what it raised."""
        rotation = self._rotation
        rotation.block_until(lambda: rotation.finished(self._agent), f"{self.name} to end")
        rotation.agent.order_after(self._agent.now())
        if self._error is not None:
            raise self._error


def join_all(workers: Sequence[Worker]) -> None:
    """Wait for the ends of all. Raises what the first has raised that has not failed because another one had ended."""
    errors: list[Exception] = []
    for worker in workers:
        try:
            worker.join()
        except Exception as error:
            errors.append(error)
    if errors:
        raise next((error for error in errors if not isinstance(error, DeadlockError)), errors[0])


class Channel(Generic[T]):
    """An unbounded queue between host threads: everything before ``put`` happens before everything after ``get``."""

    def __init__(self, rotation: Rotation, findings: Findings) -> None:
        self._rotation = rotation
        self._findings = findings
        self._items: deque[tuple[T, Clock]] = deque()
        self._num_asked = 0  # unsuccessful polls since the last item

    def put(self, item: T) -> None:
        thread = self._rotation.agent
        self._items.append((item, thread.now()))
        self._rotation.maybe_switch()

    def get(self) -> T:
        """The oldest item; blocks until there is one. Raises ``DeadlockError`` if there never will be."""
        try:
            self._rotation.block_until(lambda: bool(self._items), "a message")
        except DeadlockError:
            self._findings.raise_again()  # an error that has ended the sending thread is the cause
            raise
        return self._take()

    def poll(self) -> T | None:
        """The oldest item; None if there is none now, which orders nothing. After enough calls without an item other
        threads run, whatever the policy."""
        self._rotation.maybe_switch()
        if not self._items:
            self._findings.raise_again()
            self._num_asked += 1
            if self._num_asked >= _PATIENCE:
                self._rotation.give_way()
        return self._take() if self._items else None

    def _take(self) -> T:
        self._num_asked = 0
        item, clock = self._items.popleft()
        self._rotation.agent.order_after(clock)
        return item
