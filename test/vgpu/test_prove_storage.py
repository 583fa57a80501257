"""The record of what a storage directory must do: faults of one line each in the storage, and what reports them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from storage_tier import tier_fingerprint
from tiny_model import without_questions

from fenceline.ipc.io_struct import TokenizedGenerateReq
from fenceline.mem_cache import hicache, page_hash
from fenceline.mem_cache.storage import directory, file_backend, page_file, worker
from fenceline.mem_cache.storage.controller import StorageController
from fenceline.mem_cache.storage.file_backend import FileBackend
from fenceline.mem_cache.transfer import Ticket
from fenceline.mem_cache.tree import hiradix_cache
from fenceline.mem_cache.tree.hiradix_cache import HiRadixCache
from fenceline.scheduler.request_memory import RequestMemory
from fenceline.scheduler.scheduler import Scheduler
from fenceline.vgpu.proving.runs import Trial, run
from fenceline.vgpu.proving.storage_record import StorageRecord
from fenceline.vgpu.proving.workloads import WORKLOADS

torch.set_num_threads(1)


@cache
def _seeds(*flags: str, workload: str = "storage") -> list[int]:
    """Runs of ``workload`` with all of these flags."""
    make = WORKLOADS[workload].make
    found = (seed for seed in range(1000) if set(flags) <= set(make(Random(seed)).flags))
    return list(islice(found, 16))


SMALL, BAD, KEYED = ("hicache_storage_size",), ("bad_days",), ("hicache_storage_key", "bad_days")


def _newest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    oldest_first = directory._oldest_first
    monkeypatch.setattr(directory, "_oldest_first", lambda *args: oldest_first(*args)[::-1])


def _evicts_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory.Cleaner, "low_bytes", property(lambda self: 0, lambda self, value: None))


def _unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory.Cleaner, "make_room", lambda *args: True)


def _use_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_backend.FileBackend, "_touch", lambda *args: None)


def _books_kept_low(monkeypatch: pytest.MonkeyPatch) -> None:
    write = directory.UsageCount.write
    monkeypatch.setattr(directory.UsageCount, "write", lambda self, used: write(self, max(used - 1, 0)))


def _books_kept_low_once_inexact(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a run in which the number of bytes in use may be too high, since a page has vanished."""
    _books_kept_low(monkeypatch)
    inexact = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(StorageRecord, "_books_are_exact", inexact, raising=False)


def _temporary_files_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_backend.FileBackend, "_remove", lambda *args: None)


def _goes_on_when_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory.StorageDirectory, "num_free_bytes", lambda self: 1 << 40)
    monkeypatch.setattr(file_backend, "_reason", lambda error: file_backend.Reason.IO)


def _counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    add = file_backend.FileBackend._add

    def twice(self: file_backend.FileBackend, stats: file_backend.StorageStats) -> None:
        add(self, stats)
        add(self, stats)

    monkeypatch.setattr(file_backend.FileBackend, "_add", twice)


def _given_up_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    take = StorageController._take_wrote

    def fewer(self: StorageController, event: worker.Wrote, *rest: object) -> None:
        take(self, event, *rest)  # type: ignore[arg-type]
        self._stats.unwritten -= event.num_pages - event.num_written

    monkeypatch.setattr(StorageController, "_take_wrote", fewer)


def _unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_file, "_verify", lambda *args: None)


def _files_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = SimpleNamespace(**{**vars(file_backend.os), "close": lambda fd: None})
    monkeypatch.setattr(file_backend, "os", kept)


def _not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory.StorageDirectory, "_make_again", lambda self: None)


def _keys_of_the_next_token_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is then found again only if the same token follows it."""
    right = page_hash.page_keys

    def longer(parent: bytes, token_ids: np.ndarray, page_size: int, lookahead: int = 0) -> list[bytes]:
        shorter = len(right(parent, token_ids, page_size, lookahead + 1))
        some = right(parent, token_ids, page_size, lookahead + 1)
        return some + right(
            some[-1] if some else parent, token_ids[shorter * page_size :], page_size, lookahead
        )

    for module in (page_hash, hiradix_cache, hicache):
        monkeypatch.setattr(module, "page_keys", longer)


def _fetched_pages_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HiRadixCache, "insert_host", lambda self, tokens, pages, *rest: pages)


def _one_page_less_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    right = hicache.StorageTier.prefetch

    def shorter(self: hicache.StorageTier, token_ids: np.ndarray, *rest: Any) -> object:
        return right(self, token_ids[: -self._page_size], *rest)

    monkeypatch.setattr(hicache.StorageTier, "prefetch", shorter)


def _the_last_token_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it is computed in any case."""

    def wrong(self: RequestMemory, req: Any) -> None:
        if self._storage is not None:
            prompt = np.append(req.prompt_ids, 0)
            req.prefetch = self._storage.prefetch(prompt, self.match(req).match, req.source.extra_key)

    monkeypatch.setattr(RequestMemory, "prefetch", wrong)


def _nothing_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = Scheduler.accept

    def wrong(self: Scheduler, message: TokenizedGenerateReq) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.memory, "prefetch", lambda req: None)
            accept(self, message)

    monkeypatch.setattr(Scheduler, "accept", wrong)


def _the_first_node_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    right = hicache.StorageTier.write
    monkeypatch.setattr(
        hicache.StorageTier, "write", lambda self, nodes, after: right(self, nodes[1:], after)
    )


@pytest.mark.parametrize(
    ("plant", "flags", "said"),
    [
        (_newest_first, SMALL, "storage: call"),
        (_evicts_more, SMALL, "storage: call"),
        (_unbounded, SMALL, "storage: call"),
        (_use_unnoticed, SMALL, "storage: call"),
        (_books_kept_low, (), "bytes are in use"),
        (_books_kept_low_once_inexact, (), "bytes are in use, and at least"),
        (_temporary_files_left, BAD, "that nobody writes any more"),
        (_goes_on_when_full, BAD, "storage: call"),
        (_counted_twice, (), "storage: call"),
        (_given_up_uncounted, BAD, "pages not in storage"),
        (_files_left_open, (), "leaves files open"),
        (_not_made_again, BAD, "storage: call"),
        (_keys_of_the_next_token_too, (), "under keys that are not theirs"),
        (_fetched_pages_given_back, (), "storage's use: gives back"),
        (_one_page_less_is_looked_for, (), "storage's use: asks for"),
        (_the_last_token_is_looked_for, (), "storage's use: asks for"),
        (_nothing_is_looked_for, (), "storage's use: the prompt of r0 is not looked for"),
        (_the_first_node_is_not_written, (), "pages not in storage"),
    ],
)
def test_a_fault_of_the_storage_is_reported(
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    flags: tuple[str, ...],
    said: str,
) -> None:
    plant(monkeypatch)
    without_questions(monkeypatch)
    reports = (run(Trial("storage", seed)).report for seed in _seeds(*flags))
    report = next((report for report in reports if report), "")
    assert said in report, report


def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are read that belong to another key."""
    verify = page_file._verify

    def verified(header: bytes, key: bytes, *rest: Any) -> None:
        verify(header, header[16:48], *rest)

    monkeypatch.setattr(page_file, "_verify", verified)


def _links_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory.StorageDirectory, "_remove_foreign", lambda *args: None)


def _a_page_more_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    put = StorageController.write

    def write(self: StorageController, *args: Any) -> None:
        self._max_write_pages += 1
        put(self, *args)

    monkeypatch.setattr(StorageController, "write", write)


def _one_thread_more(monkeypatch: pytest.MonkeyPatch) -> None:
    make = StorageController.__init__
    monkeypatch.setattr(
        StorageController,
        "__init__",
        lambda self, *args, **kwargs: make(self, *args, num_workers=3, **kwargs),
    )


def _never_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StorageController, "_look", lambda *args: None)


def _misses_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    take = StorageController._take_asked

    def uncounted(self: StorageController, *args: Any) -> None:
        before = self._stats.missed
        take(self, *args)
        self._stats.missed = before

    monkeypatch.setattr(StorageController, "_take_asked", uncounted)


def _incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prefetch is said to have ended early."""
    end = StorageController._end

    def ended(self: StorageController, op: worker.Prefetch, outcome: worker.Outcome, acks: Any) -> None:
        end(self, op, worker.Outcome.SHORT if outcome is worker.Outcome.COMPLETE else outcome, acks)

    monkeypatch.setattr(StorageController, "_end", ended)


def _found_pages_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hicache.StorageTier, "_fetch", lambda self, op: self._controller.cancel(op))


def _fetched_pages_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hicache.StorageTier, "_settle", lambda *args: None)


def _ends_unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StorageController, "_take_until", lambda *args: False)


@pytest.mark.parametrize(
    ("plant", "flags", "said"),
    [
        (_unverified, KEYED, "bytes that it was not given under this key"),
        (_unverified, BAD, "bytes that it was not given under this key"),
        (_no_key, BAD, "bytes that it was not given under this key"),
        (_links_uncounted, BAD, ""),
        (_a_page_more_is_held, (), "storage's jobs: "),
        (_one_thread_more, (), "storage's jobs: storage has 4 threads"),
        (_never_looks, BAD, "figures: stalls of storage: 0 is reported"),
        (_misses_uncounted, (), "figures: pages that were wanted from storage and missed"),
        (_incomplete, (), "storage's jobs: "),
        (_found_pages_not_fetched, (), "storage's use: storage has found"),
        (_fetched_pages_not_offered, (), "are offered to the tree"),
        (_ends_unheard, (), "storage's jobs: no answer is heard"),
    ],
)
def test_a_fault_in_fetching_is_reported(
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    flags: tuple[str, ...],
    said: str,
) -> None:
    plant(monkeypatch)
    without_questions(monkeypatch)
    outcomes = (run(Trial("fetched", seed)) for seed in _seeds(*flags, workload="fetched"))
    failed = next((outcome for outcome in outcomes if not outcome.clean), None)
    assert failed is not None
    assert said in failed.report, failed.report


def test_batches_that_are_too_large_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    right = worker.StorageWorker.__init__
    monkeypatch.setattr(
        worker.StorageWorker, "__init__", lambda self, *args: right(self, *args[:-1], args[-1] + 1)
    )
    small = (run(Trial("fetched", seed)).report for seed in (1, 12, 19, 26, 37))
    assert re.search(r"[sg]et of \d+ pages, \d+ are the most", "".join(small))


def test_a_directory_that_does_not_say_whose_pages_it_has_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_hash.PageFingerprint, "describe", lambda self: "{}")
    assert "says '{}\\n' of the pages in its folder" in run(Trial("storage", _seeds()[0])).report


def test_the_pages_of_a_transfer_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ticket, "add_pages", lambda self, num_pages: None)
    assert re.search(r"is said to have 0 pages, it has \d+", run(Trial("fetched", 0)).report)


def test_a_storage_with_bad_days_is_clean() -> None:
    outcomes = [run(Trial("storage", seed)) for seed in _seeds(*SMALL, *BAD)[:10]]
    assert all(outcome.clean for outcome in outcomes), [outcome.report for outcome in outcomes]
    assert set.union(*(set(outcome.events) for outcome in outcomes)) >= {
        "storage raises",
        "eviction from storage",
    }


def _recorded(root: Path, num_pages: int) -> tuple[FileBackend, StorageRecord, Callable[..., list[bool]]]:
    """A directory for ``num_pages`` pages, its record, and a function that stores pages of these keys."""
    fingerprint = tier_fingerprint()
    max_bytes = num_pages * (page_file.header_nbytes(None) + fingerprint.page_nbytes)
    backend = FileBackend(root, fingerprint, max_bytes)
    storage = SimpleNamespace(directory=str(root), max_bytes=max_bytes)
    config: Any = SimpleNamespace(
        hicache=SimpleNamespace(storage=storage),
        server_args=SimpleNamespace(hicache_storage_key=None),
        model=SimpleNamespace(model_path=""),
    )
    record = StorageRecord(backend, config, Random(0))
    page = np.zeros(fingerprint.page_nbytes, dtype=np.uint8)
    return backend, record, lambda *keys: backend.set(list(keys), [[page]] * len(keys))


def test_a_call_that_is_held_up_is_numbered_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What other threads use meanwhile was used before it, so it may evict that."""
    backend, record, store = _recorded(tmp_path, num_pages=3)
    *old, new = (bytes([number]) * 32 for number in range(4))
    monkeypatch.setattr(record, "_begin_bad_day", lambda name, keys: None)
    assert store(*old) == [True] * 3
    monkeypatch.setattr(record, "_begin_bad_day", lambda name, keys: name == "set" and backend.exists(old))
    assert store(new) == [True]
    assert not record.wrong


def test_a_folder_that_the_engine_has_checked_is_not_exchanged_for_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, record, store = _recorded(tmp_path, num_pages=3)
    monkeypatch.setattr(record, "_begin_bad_day", lambda name, keys: None)
    assert store(bytes(32)) == [True]
    record._remove_folder(SimpleNamespace(choice=lambda names: backend._model))  # type: ignore[arg-type]
    random: Any = SimpleNamespace(random=lambda: 0.9)
    monkeypatch.setattr(record, "_begin_bad_day", lambda name, keys: record._place_foreign(keys, random))
    assert store(bytes(32)) == [True]
    assert not record.wrong
