"""What the tiers of the cache promise to any caller (trees, pages, storage's files, tiers), with faults."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from fenceline.mem_cache import kv_pool
from fenceline.mem_cache.hicache import HiCache, StorageTier, _Moves
from fenceline.mem_cache.host import cache_controller, page_copy
from fenceline.mem_cache.host.cache_controller import HiCacheController
from fenceline.mem_cache.host.host_pool import HostPool
from fenceline.mem_cache.host.page_copy import RunCopier
from fenceline.mem_cache.page_hash import page_keys
from fenceline.mem_cache.storage import controller, directory
from fenceline.mem_cache.storage.controller import StorageController
from fenceline.mem_cache.storage.directory import Cleaner, StorageDirectory, UsageCount
from fenceline.mem_cache.storage.file_backend import FileBackend
from fenceline.mem_cache.storage.worker import StorageWorker
from fenceline.mem_cache.transfer import PageMove
from fenceline.mem_cache.tree import hiradix_cache
from fenceline.mem_cache.tree.hiradix_cache import HostTier, InTransit
from fenceline.mem_cache.tree.radix_cache import LruQueue, RadixCache, as_tokens
from fenceline.memory_order import Points
from fenceline.vgpu.proving import page_contracts, start_up, storage_contracts, tier_contracts, tree_contracts
from fenceline.vgpu.proving.runs import ANSWERS, Outcome, Trial, run

torch.set_num_threads(1)

Check = Callable[[Random], str]
TREES, PAGES = tree_contracts.compare_trees, page_contracts.compare_pages
FILES, TIERS = storage_contracts.compare_storage_contracts, tier_contracts.compare_tiers


def nothing(self: Any, *args: Any, **named: Any) -> None:
    """In the place of a method that does something."""


def finds(check: Check, says: str, num_seeds: int = 120) -> bool:
    """Whether one of so many seeds finds that."""
    return any(says in check(Random(seed)) for seed in range(num_seeds))


def leaves_first_points(self: _Moves) -> PageMove:
    move = whole(self)
    return replace(move, after=self.moves[-1].after)


def covers_the_last(node: Any) -> Points:
    return node.transfers[-1].points if node.transfers else Points.none()


def takes_all_tokens(self: RadixCache, token_ids: Any) -> Any:
    return as_tokens(token_ids)


def gives_up_early(self: HostTier, num_pages: int, protected: Any) -> Any:
    return None if num_pages - self.pool.num_free >= self.num_pages else alloc(self, num_pages, protected)


def declares_the_first(self: HostPool, page: int, write: bool, what: str) -> None:
    self.device.host_access(self._areas[0][:, 0], write, what)


def waits_for_all(self: HiCacheController, loads: Any, num_layers: int, arrived: Any = None) -> Any:
    ready = layer_ready(self, loads, num_layers, arrived)
    return lambda layer: ready(num_layers - 1)


def subtracts_all(self: UsageCount, nbytes: int) -> None:
    self.write(0)


def one_key_less(*args: Any) -> list[bytes]:
    return page_keys(*args)[:-1]


def rounds_down(config: Any, device: Any, layout: Any, num_ranks: int = 1) -> int:
    longest = config.model.context_length // layout.page_size * layout.page_size
    shorter = replace(config, model=replace(config.model, context_length=longest))
    return kv_pool.num_kv_pages(shorter, device, layout, num_ranks)


def says_nothing(config: Any, device: Any, layout: Any, num_ranks: int = 1) -> int:
    kv_pool.logger.info = nothing.__get__(kv_pool.logger)  # type: ignore[method-assign]
    return kv_pool.num_kv_pages(config, device, layout, num_ranks)


whole, alloc, layer_ready = _Moves.whole, HostTier.alloc, HiCacheController.layer_ready


@pytest.mark.parametrize(
    ("check", "owner", "name", "fault", "says"),
    [
        (TREES, RadixCache, "_detach", nothing, "match is"),
        (TREES, RadixCache, "_whole_pages", takes_all_tokens, "are found, not"),
        (TREES, hiradix_cache, "transfer_points", covers_the_last, "retires with"),
        (TREES, HostTier, "alloc", gives_up_early, "host pages are not judged right"),
        (TREES, LruQueue, "check", nothing, "check does not notice that a queue"),
        (TREES, HostTier, "check", nothing, "check does not notice that"),
        (TREES, LruQueue, "clear", nothing, "nodes are kept"),
        (TREES, InTransit, "add", nothing, "retires with"),
        (TREES, RadixCache, "namespace", lambda self, node: "", "the namespace"),
        (PAGES, HostPool, "host_access", declares_the_first, "declared as one to other bytes"),
        (PAGES, RunCopier, "to_host", nothing, "RunCopier: a backup"),
        (PAGES, HiCacheController, "layer_ready", waits_for_all, "is used after"),
        (PAGES, HiCacheController, "before_persistent_forward", nothing, "persistent attention"),
        (PAGES, cache_controller, "_warm_up", nothing, "a host tier begins with"),
        (PAGES, page_copy, "_within", lambda layers, own, first=0: range(0), "CudaCopier: range"),
        (PAGES, page_contracts, "page_keys", one_key_less, "keys of"),
        (FILES, UsageCount, "subtract", subtracts_all, "is taken as one"),
        (FILES, StorageDirectory, "_remove_foreign", nothing, "a link in the place of a page stays"),
        (FILES, directory, "_try_lock", lambda *args: True, "two have the directory's lock"),
        (FILES, Cleaner, "_evict", lambda self, used, *args: used, "of a call are kept"),
        (FILES, FileBackend, "_note", nothing, "or this is not counted"),
        (TIERS, _Moves, "whole", leaves_first_points, "a load waits for"),
        (TIERS, StorageTier, "forget", nothing, "of other weights"),
        (TIERS, HiCache, "close", nothing, "storage does not end with its tier"),
        (TIERS, HiCache, "usable", lambda self, match: match, "are worth a transfer"),
        (TIERS, controller, "apply", nothing, "pages"),
        (TIERS, StorageWorker, "_parts", lambda self, pages, write: [[] for _ in pages], "are declared"),
        (TIERS, StorageController, "_end", nothing, "storage's jobs"),
    ],
)
def test_promises_of_the_tiers_are_kept(
    monkeypatch: pytest.MonkeyPatch, check: Check, owner: Any, name: str, fault: Any, says: str
) -> None:
    monkeypatch.setattr(owner, name, fault)
    assert finds(check, says)


def test_a_page_is_on_the_disk_before_it_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = StorageDirectory.publish

    def too_soon(self: StorageDirectory, temp: str, path: str) -> None:
        os.fsync(0)
        publish(self, temp, path)

    monkeypatch.setattr(StorageDirectory, "publish", too_soon)
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    assert finds(FILES, "a page is written by")


def first_failure(*workloads: str, seeds: range = range(8)) -> Outcome:
    """The first run of these that fails."""
    outcomes = (run(Trial(name, seed)) for seed in seeds for name in workloads)
    return next(outcome for outcome in outcomes if not outcome.clean)


@pytest.mark.parametrize(
    ("owner", "name", "fault", "says"),
    [
        (LruQueue, "check", nothing, "trees: check does not notice"),
        (cache_controller, "_warm_up", nothing, "pages: a host tier begins with"),
        (FileBackend, "_note", nothing, "storage's files: a directory that is locked"),
        (HiCache, "usable", lambda self, match: match, "tiers: "),
        (start_up, "num_kv_pages", rounds_down, "start: "),
        (start_up, "num_kv_pages", says_nothing, "start: -1 pages"),
    ],
)
def test_a_run_asks_for_the_promises_of_the_tiers(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any, says: str
) -> None:
    monkeypatch.setattr(owner, name, fault)
    found = first_failure("outputs", seeds=range(24))
    assert found.checker == ANSWERS and says in found.report, found.report
