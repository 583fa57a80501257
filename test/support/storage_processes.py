"""Processes that use a storage directory: one that writes until it is killed, one that shares it with others, and one
that is killed at each system call in turn. Run as a script: ``MODE ROOT SEED``. Imports no torch."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from storage_cases import (
    check_usage,
    contents,
    file_nbytes,
    fingerprint,
    flip,
    key,
    page_files,
    path_of,
    read_checked,
    temp_files,
    usage_of,
)

from fenceline.mem_cache.storage.backend import Reason
from fenceline.mem_cache.storage.file_backend import FileBackend

WRITER_PAGE = 200_000
WRITER_BOUND = 6 * file_nbytes(WRITER_PAGE)
SHARED_PAGE = 3000
SHARED_BOUND = 12 * file_nbytes(SHARED_PAGE)
SCENE_PAGE = 500
SCENE_BOUND = 3 * file_nbytes(SCENE_PAGE)
CALLS = ("open", "close", "write", "writev", "pwrite", "ftruncate", "rename", "unlink", "utime", "mkdir")


def write_until_killed(root: Path, seed: int) -> None:
    """Write batches of random pages, forever."""
    random = Random(seed)
    backend = FileBackend(root, fingerprint(WRITER_PAGE), WRITER_BOUND, lock_timeout_s=30.0)
    batches = [[key(n) for n in random.sample(range(16), 3)] for _ in range(8)]
    pages = [contents(names, WRITER_PAGE) for names in batches]
    print("ready", flush=True)
    while True:
        for names, batch in zip(batches, pages, strict=True):
            backend.set(names, batch)


def share(root: Path, seed: int, num_calls: int = 700) -> None:
    """Act as one of several servers of two models; prints its errors."""
    random = Random(seed)
    model = fingerprint(SHARED_PAGE, model_id=f"model {seed % 2}")
    backend = FileBackend(root, model, SHARED_BOUND, lock_timeout_s=30.0)
    for _ in range(num_calls):
        names = [key(n) for n in random.sample(range(10), random.randint(1, 3))]
        call = random.random()
        if call < 0.5:
            read_checked(backend, names)
        elif call < 0.9:
            backend.set(names, contents(names, SHARED_PAGE))
        else:
            backend.exists(names)
    stats = backend.stats()
    print(json.dumps({"hits": stats.hits, "evictions": stats.evictions, "errors": stats.errors}))


def scene(root: Path) -> None:
    """Make all kinds of calls: write pages, find a damaged one, evict, clear, and write again."""
    backend = FileBackend(root, fingerprint(SCENE_PAGE), SCENE_BOUND, fsync=True)
    names = [key(n) for n in range(2)]
    backend.set(names, contents(names, SCENE_PAGE))
    flip(path_of(root, fingerprint(SCENE_PAGE), names[1]), 100, 1)
    read_checked(backend, names)
    more = [key(n) for n in range(3, 6)]  # three pages, so that the remaining one must be evicted
    backend.set(more, contents(more, SCENE_PAGE))
    backend.clear()
    backend.set(names[:1], contents(names[:1], SCENE_PAGE))


def die_at(turn: int, name: str, call: Callable[..., Any], seen: list[int]) -> Callable[..., Any]:
    """``call``, but the process is killed before the ``turn``-th of all such calls, and in the middle of writes."""

    def killing(*args: Any, **kwargs: Any) -> Any:
        seen[0] += 1
        if seen[0] == turn:
            if name == "writev":  # torn: the header and some of the payload
                call(args[0], [args[1][0], args[1][1][: SCENE_PAGE // 2]])
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    return killing


def die_in_scene(root: Path, turn: int) -> bool:
    """Run the scene in a child that dies at its ``turn``-th system call; False if it has fewer."""
    child = os.fork()
    if child == 0:
        seen = [0]
        for name in CALLS:
            setattr(os, name, die_at(turn, name, getattr(os, name), seen))
        os.fsync = die_at(turn, "fsync", lambda fd: None, seen)  # the real one is slow, and a kill undoes no write
        fcntl.flock = die_at(turn, "flock", fcntl.flock, seen)  # type: ignore[assignment]
        scene(root)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the scene failed on its own"
    return False


def die_at_each_call(root: Path, _: int) -> None:
    """After each death no wrong page is read, the bound holds, and a new server works and leaves no other files."""
    turn = 1
    while die_in_scene(root, turn):
        if (root / "usage").exists() and (root / "usage").stat().st_size:
            # The dead writer's files (not the model's description) count too until the next scan removes them.
            sizes = [path.stat().st_size for path in (*temp_files(root), *page_files(root))]
            on_disk = sum(size for size in sizes if size >= SCENE_PAGE)
            assert on_disk <= usage_of(root)[1] <= SCENE_BOUND, f"call {turn}"
        backend = FileBackend(root, fingerprint(SCENE_PAGE), SCENE_BOUND)
        assert temp_files(root) == [], f"call {turn}: unfinished files stay"
        actual = check_usage(root, SCENE_BOUND)
        assert actual == len(page_files(root)) * file_nbytes(SCENE_PAGE), f"call {turn}"
        read_checked(backend, [key(n) for n in range(6)])
        assert set(backend.stats().errors) <= {Reason.CHECKSUM}, f"call {turn}: {backend.stats()}"
        names = [key(n) for n in range(10, 13)]
        assert backend.set(names, contents(names, SCENE_PAGE)) == [True] * 3, f"call {turn}"
        shutil.rmtree(root)
        turn += 1
    print(json.dumps({"deaths": turn - 1}))


if __name__ == "__main__":
    modes = {"write": write_until_killed, "share": share, "die": die_at_each_call}
    modes[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
