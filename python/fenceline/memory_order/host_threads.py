"""Threads of the host beside the scheduler's, and the queues between them and it.

A :class:`Device` starts and makes them: on a virtual one they are agents that take turns by the seed. What was done
before ``put`` happened before what follows the ``get``, or the ``poll``, that returns the item; nothing else orders
two threads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


class HostWorker(Protocol):
    """A running thread. It ends with the process, or when what it runs returns."""

    def join(self) -> None:
        """Wait for its end. Raises what it raised."""


class HostChannel(Protocol[T]):
    """An unbounded queue between threads of the host: first in, first out, any number of threads at either end."""

    def put(self, item: T) -> None:
        """Add an item; never blocks."""

    def get(self) -> T:
        """The oldest item; blocks until there is one."""

    def poll(self) -> T | None:
        """The oldest item, None if there is none now. (Of a channel that carries None itself, use ``get`` alone.)"""


class ThreadWorker:
    """A daemon thread that runs ``run``."""

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._guarded, args=(run,), name=name, daemon=True)
        self._thread.start()

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:  # raised again by join
            logger.exception("thread %s has failed", threading.current_thread().name)
            self._error = error

    def join(self) -> None:
        """See :class:`HostWorker`."""
        self._thread.join()
        if self._error is not None:
            raise self._error


class QueueChannel(Generic[T]):
    """See :class:`HostChannel`."""

    def __init__(self) -> None:
        self._items: SimpleQueue[T] = SimpleQueue()

    def put(self, item: T) -> None:
        """See :class:`HostChannel`."""
        self._items.put(item)

    def get(self) -> T:
        """See :class:`HostChannel`."""
        return self._items.get()

    def poll(self) -> T | None:
        """See :class:`HostChannel`."""
        try:
            return self._items.get_nowait()
        except Empty:
            return None
