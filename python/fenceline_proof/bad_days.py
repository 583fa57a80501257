"""Storage that fails as disks and people make it fail: at random calls, by a seed.

No answer may depend on what storage keeps, so nothing is compared here. What a storage directory must do then is tested
beside it (test/unit/mem_cache/test_storage_*.py).
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from fenceline.mem_cache.storage.backend import Reason
from fenceline.mem_cache.storage.controller import StorageController
from fenceline.mem_cache.storage.file_backend import FileBackend

# Seconds without news after which storage counts as stalled: more than five steps of the loop and less than six.
_SHORT_PATIENCE_S = 0.055
_TICK_NS = 10**6
_OTHER_MODEL = "0123456789abcdef" * 2
_KINDS = ("full", "refusal", "refusal", "damage", "gone", "books", "folder", "crash", "crash", "slow", "slow")
_LOGGER = logging.getLogger("fenceline.mem_cache.storage")


class CrashError(Exception):
    """What a backend raises, which it promises not to do."""


def order_calls(backend: FileBackend) -> None:
    """Let times of use have an order: the machine's clock may stand still between two calls, and who leaves storage
    first must not depend on it."""
    start_ns, calls = time.time_ns(), iter(range(1, 1 << 40))
    backend._clock = lambda: start_ns + next(calls) * _TICK_NS


class BadDays:
    """Makes the storage of ``controller`` fail at random calls: full, unreadable, damaged or gone pages, lost books, a
    folder that somebody removes, calls that take long or raise. It then counts as not answering after a few steps, and
    in half of the runs few pages are written or fetched at once. ``events``: what has happened."""

    def __init__(
        self, controller: StorageController, seed: int, pause: Callable[[int], None] = lambda num_polls: None
    ) -> None:
        """``pause`` holds the calling thread up until the scheduler has looked for news so many times."""
        backend = controller._backend
        assert isinstance(backend, FileBackend), "the one that the flags can ask for"
        self.events: set[str] = set()
        self._backend, self._directory, self._pause = backend, backend._directory, pause
        self._random = Random(seed)
        self._decays = self._random.random() < 0.5  # most pages are damaged when they are read
        self._kind = ""  # of the call that is made
        controller._limits = replace(controller._limits, stall_s=_SHORT_PATIENCE_S)
        if seed % 2 == 0:
            controller._limits = replace(controller._limits, max_write_pages=3, max_fetch_pages=3, max_prefetches=2)
            controller._max_write_pages = controller._max_fetch_pages = 3
        for name in ("exists", "get", "set"):
            setattr(backend, name, self._failing(name, getattr(backend, name)))
        num_free_bytes = self._directory.num_free_bytes
        self._directory.num_free_bytes = lambda: 0 if self._kind == "full" else num_free_bytes()  # type: ignore[method-assign]
        for name in ("publish", "open"):
            setattr(self._directory, name, self._refusing(getattr(self._directory, name)))

    def _failing(self, name: str, call: Callable[..., list[bool]]) -> Callable[..., list[bool]]:
        def failing(*args: Any) -> list[bool]:
            kind = self._begin(name)
            if kind == "crash":
                self.events.add("storage raises")
                raise CrashError("a call of the storage raises")
            if kind == "slow":
                self._pause(self._random.randint(1, 16))
            self._kind = kind
            result = call(*args)
            if name == "set" and kind == "refusal" and not all(result):
                self.events.add("storage refuses a write")
            self._kind = ""
            return result

        return failing

    def _refusing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(*args: Any) -> Any:
            if self._kind == "refusal" and self._random.random() < 0.7:
                raise OSError(errno.EIO, "refused")
            return call(*args)

        return refusing

    def _begin(self, name: str) -> str:
        """What goes wrong during a call: the kind, "" if nothing does. What others do to the directory is done now."""
        random, root = self._random, self._directory.root
        if name == "get" and self._decays and random.random() < 0.7:
            kind = "damage"
        elif random.random() > 0.5:
            return ""
        else:
            kind = random.choice(_KINDS)
        pages = sorted(root.glob(f"{self._backend._model}/*/*.page"))
        if kind in ("damage", "gone") and pages:
            page = random.choice(pages)
            if kind == "gone":
                page.unlink()
            else:
                _damage(page, random)
        elif kind == "books" and root.exists():
            usage = root / "usage"
            usage.unlink(missing_ok=True)
            if random.random() < 0.5:
                usage.write_bytes(random.randbytes(random.randrange(24)))
                usage.chmod(0o600)
            self.events.add("the books of storage are lost")
        elif kind == "folder":
            folders = sorted(path.name for path in root.glob("*") if path.is_dir())
            shutil.rmtree(root / (random.choice(("", *folders)) if folders else ""), ignore_errors=True)
            self.events.add("a folder of storage is removed")
        return kind


def _damage(page: Path, random: Random) -> None:
    """Cut a page's file off, or change one byte of it."""
    data, status = bytearray(page.read_bytes()), page.stat()
    index = random.randrange(len(data))
    if random.random() < 0.3:
        del data[index:]
    else:
        data[index] ^= random.randrange(1, 256)
    page.write_bytes(data)
    os.utime(page, ns=(status.st_atime_ns, status.st_mtime_ns))


def events_of(backend: FileBackend) -> set[str]:
    """The events that the storage itself has counted."""
    stats = backend.stats()
    found = {
        "eviction from storage": stats.evictions,
        "nothing may leave storage": stats.errors[Reason.FULL],
        "the disk is full": stats.errors[Reason.NO_SPACE],
    }
    return {event for event, num in found.items() if num}


def leave_behind(folder: str, random: Random) -> None:
    """What others have left in a directory: pages of another model, some of them from a clock that was wrong, and a
    file that was being written when its writer died."""
    root, now_ns = Path(folder), time.time_ns()
    root.chmod(stat.S_IRWXU)
    for _ in range(random.randrange(4)):
        name = random.randbytes(32).hex()
        page = root / _OTHER_MODEL / name[:2] / f"{name}.page"
        page.parent.mkdir(parents=True, exist_ok=True, mode=stat.S_IRWXU)
        page.parent.parent.chmod(stat.S_IRWXU)
        page.write_bytes(bytes(random.choice((100, 600))))
        page.chmod(stat.S_IRUSR | stat.S_IWUSR)
        used_ns = now_ns + random.choice((-1, -1, 1)) * random.randrange(10**12, 10**13)
        os.utime(page, ns=(used_ns, used_ns))
    if random.random() < 0.5:
        temp = root / "tmp" / f"{random.randbytes(16).hex()}.tmp"
        temp.parent.mkdir(mode=stat.S_IRWXU)
        temp.write_bytes(bytes(300))
        temp.chmod(stat.S_IRUSR | stat.S_IWUSR)


@contextmanager
def without_logs() -> Iterator[None]:
    """Inside, the storage's warnings of what goes wrong in it are not printed."""
    handler, propagates = logging.NullHandler(), _LOGGER.propagate
    _LOGGER.addHandler(handler)
    _LOGGER.propagate = False
    try:
        yield
    finally:
        _LOGGER.removeHandler(handler)
        _LOGGER.propagate = propagates
