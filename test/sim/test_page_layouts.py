"""Pages whose layers differ: every byte comes back through host and storage, and no page of another layout does."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from page_pools import MIXED, Shape, device_pages, make_pools
from storage_cases import key
from storage_tier import Clock

from fenceline.config.hicache import IoBackend
from fenceline.config.kv_layout import KVLayout, KVRow, index_keys, keys_and_values, latent
from fenceline.config.server_args import MemLayout
from fenceline.mem_cache.host.cache_controller import HiCacheController
from fenceline.mem_cache.host.page_copy import make_page_copier
from fenceline.mem_cache.page_hash import PageFingerprint, PageKey, page_keys
from fenceline.mem_cache.storage.backend import Reason
from fenceline.mem_cache.storage.controller import StorageController, StorageLimits, Written, apply
from fenceline.mem_cache.storage.file_backend import FileBackend
from fenceline.mem_cache.storage.worker import Outcome, Prefetch
from fenceline.mem_cache.transfer import Ticket
from fenceline.memory_order import Device, Points, open_device
from fenceline_sim import VgpuDevice, VirtualGpu

I32 = np.int32
MEM_LAYOUTS: tuple[MemLayout, ...] = ("layer_first", "page_first")
DTYPES = ("bfloat16", "float16", "float32", "uint8", "float8_e4m3fn")
NUM_PAGES = 4
_WAIT_S = 60.0  # for a disk
TOKENS = np.arange(100)


def fingerprint(layout: KVLayout) -> PageFingerprint:
    return PageFingerprint("tiny", layout.describe(), layout.page_nbytes)


def keys(layout: KVLayout) -> list[PageKey]:
    """Of the first pages of one prompt."""
    return page_keys(fingerprint(layout).root_key(), TOKENS, layout.page_size)[:NUM_PAGES]


class Server:
    """The tiers of one server as the engine makes them: pools of noise, a controller, a storage directory."""

    def __init__(
        self, device: Device, shape: Shape, mem_layout: MemLayout, io_backend: IoBackend, root: Path, seed: int
    ) -> None:
        self.device = device
        self.kv_pool, self.host_pool = make_pools(device, mem_layout, shape, seed)
        copier = make_page_copier(device, self.kv_pool, self.host_pool, io_backend)
        self.transfers = HiCacheController(device, self.kv_pool, self.host_pool, copier)
        self.backend = FileBackend(root, fingerprint(shape.layout), 1 << 20)
        # Two pages are one call of the backend, so that a fetch takes several.
        limits = StorageLimits(2 * self.host_pool.page_nbytes, max_write_pages=8, max_fetch_pages=8, close_s=60)
        self.storage = StorageController(
            device, self.host_pool, self.backend, "wait_complete", None, limits=limits, clock=Clock()
        )
        self.acks: list[object] = []

    def write(self, device_pages: np.ndarray) -> None:
        """Device pages by way of the host to storage."""
        host, after = self._lease()
        ticket = Ticket.store(1)
        self.transfers.store(ticket, device_pages, host, after.join(Points.of(self.device.forward.record())))
        self.storage.write(keys(self.kv_pool.layout), host, ticket.points, 7)
        self._until(lambda: Written(7, NUM_PAGES) in self.acks)

    def fetch(self, device_pages: np.ndarray) -> Outcome | None:
        """Pages from storage by way of the host to the device, layer by layer."""
        op = Prefetch(1, keys(self.kv_pool.layout))
        self.storage.query(op)
        self._until(lambda: op.over or op.num_found == NUM_PAGES)
        if op.over:
            return op.outcome
        host, after = self._lease()
        self.storage.fetch(op, host, after)
        self._until(lambda: op.over)
        ticket = Ticket.load(2)
        self.transfers.load(ticket, device_pages[: op.num_fetched], host[: op.num_fetched], op.after)
        assert len(ticket.layer_points) == (self.kv_pool.num_layers if op.num_fetched else 0)
        self.device.synchronize()
        return op.outcome

    def rows(self, page: int) -> dict[str, list[object]]:
        """Every row of a page as attention sees it, by tensor."""
        size = self.kv_pool.page_size
        slots = slice(page * size, (page + 1) * size)
        return {name: tensor.cpu()[slots].float().tolist() for name, tensor in self.kv_pool.tensors()}

    def _lease(self) -> tuple[np.ndarray, Points]:
        leased = self.host_pool.pages.alloc(NUM_PAGES)
        assert leased is not None
        return leased

    def _until(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline:
            if ready():
                return
            time.sleep(0)  # the storage's threads want to run
            self.transfers.drain_acks()
            for ack in self.storage.drain():
                apply(ack)
                self.acks.append(ack)
        raise AssertionError(f"nothing came: {self.acks}")


@contextmanager
def serving(kind: str, *args: object, seed: int = 0) -> Iterator[Server]:
    device = VgpuDevice(gpu=VirtualGpu(seed=seed, policy="random")) if kind == "vgpu" else open_device(kind)
    with torch.inference_mode():
        server = Server(device, *args, seed=seed)  # type: ignore[arg-type]
        yield server
        server.storage.close()
        device.synchronize()
    if isinstance(device, VgpuDevice):
        assert device.gpu.races == []


def round_trip(
    kind: str, layout: KVLayout, mem_layouts: tuple[MemLayout, MemLayout], io_backend: IoBackend, seed: int
) -> None:
    """One server keeps pages, another one that begins later, with other noise in its pools, gets them back."""
    shape = Shape(7, 6, layout.page_size, layers=layout.layers)
    given_to = np.array([3, 1, 2, 6], dtype=I32)  # others than they came from
    with TemporaryDirectory() as name:
        with serving(kind, shape, mem_layouts[0], io_backend, Path(name), seed=seed) as server:
            server.write(np.array([1, 2, 5, 6], dtype=I32))
            written = device_pages(server.kv_pool)[[1, 2, 5, 6]]
            rows = server.rows(5)
        with serving(kind, shape, mem_layouts[1], io_backend, Path(name), seed=seed + 1) as server:
            before = device_pages(server.kv_pool)
            assert server.fetch(given_to) is Outcome.COMPLETE
            after = device_pages(server.kv_pool)
            assert torch.equal(after[given_to], written)
            assert server.rows(2) == rows
            others = [page for page in range(7) if page not in given_to]
            assert torch.equal(after[others], before[others])
            assert server.backend.stats().errors == {}


ROWS = st.builds(
    KVRow, st.just("k"), st.lists(st.integers(1, 5), min_size=1, max_size=2).map(tuple), st.sampled_from(DTYPES)
)
LAYER = st.one_of(
    st.builds(keys_and_values, st.integers(1, 4), st.integers(1, 9), st.sampled_from(DTYPES)),
    st.builds(latent, st.integers(1, 17), st.sampled_from(DTYPES)),
    st.builds(
        lambda width, head_dim, dtype: latent(width, dtype) + index_keys(head_dim, dtype),
        *(st.integers(1, 17), st.integers(1, 9), st.sampled_from(DTYPES)),
    ),
    st.tuples(ROWS, ROWS.map(lambda row: replace(row, name="v"))),
)
LAYERS = st.lists(LAYER, min_size=1, max_size=5).map(tuple)


@pytest.mark.parametrize("kind", ["cpu", "vgpu"])
@pytest.mark.parametrize("mem_layouts", [MEM_LAYOUTS, MEM_LAYOUTS[::-1]], ids=["from layers", "from pages"])
def test_mixed_pages_through_all_tiers(kind: str, mem_layouts: tuple[MemLayout, MemLayout]) -> None:
    """Target and draft layers of every kind. The servers' host memory is laid out differently."""
    for seed in range(3):
        round_trip(kind, KVLayout(4, MIXED), mem_layouts, "kernel" if seed else "direct", seed)


@settings(deadline=None, max_examples=40)
@given(
    layers=LAYERS,
    page_size=st.sampled_from([1, 3, 16]),
    mem_layouts=st.tuples(st.sampled_from(MEM_LAYOUTS), st.sampled_from(MEM_LAYOUTS)),
    kind=st.sampled_from(["cpu", "cpu", "cpu", "vgpu"]),
)
def test_any_layers_through_all_tiers(
    layers: tuple[tuple[KVRow, ...], ...], page_size: int, mem_layouts: tuple[MemLayout, MemLayout], kind: str
) -> None:
    round_trip(kind, KVLayout(page_size, layers), mem_layouts, "direct", 0)


# --- other layouts -----------------------------------------------------------------------------------


def others() -> dict[str, KVLayout]:
    """Layouts with pages of the same number of bytes as ``KVLayout(4, MIXED)``, and all else alike but one thing."""
    head, *rest = MIXED
    return {
        "order of layers": KVLayout(4, (*rest, head)),
        "dtype": KVLayout(4, (keys_and_values(2, 8, "float16"), *rest)),
        "heads": KVLayout(4, (keys_and_values(4, 4, "bfloat16"), *rest)),
        "k before v": KVLayout(4, (head[::-1], *rest)),
        "a latent": KVLayout(4, (latent(32, "bfloat16"), *rest)),
        "an indexer's keys": KVLayout(4, (latent(24, "bfloat16") + index_keys(8, "bfloat16"), *rest)),
        "page size": KVLayout(2, (*MIXED, *MIXED)),
    }


@pytest.mark.parametrize("what", others())
def test_a_page_of_another_layout_is_never_taken(what: str, tmp_path: Path) -> None:
    mine, other = KVLayout(4, MIXED), others()[what]
    assert mine.page_nbytes == other.page_nbytes, "else the length of a file would tell"
    with serving("cpu", Shape(7, 6, 4, layers=MIXED), "page_first", "direct", tmp_path) as server:
        server.write(np.arange(1, 5, dtype=I32))
    shape = Shape(7, 6, other.page_size, layers=other.layers)
    with serving("cpu", shape, "page_first", "direct", tmp_path) as server:
        before = device_pages(server.kv_pool)
        assert server.fetch(np.arange(1, 5, dtype=I32)) is Outcome.ABSENT
        # Not even where somebody has given the files the names of this layout's pages.
        for name, own in zip(keys(mine), keys(other), strict=True):
            target = path_of(tmp_path, other, own)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path_of(tmp_path, mine, name), target)
        assert server.fetch(np.arange(1, 5, dtype=I32)) is Outcome.SHORT
        assert torch.equal(device_pages(server.kv_pool), before)
        assert server.backend.stats().errors == {Reason.KEY: 2}, "of the first batch"


def path_of(root: Path, layout: KVLayout, name: PageKey) -> Path:
    return root / fingerprint(layout).directory_name() / name.hex()[:2] / f"{name.hex()}.page"


def test_equal_layouts_have_one_description() -> None:
    seen = {layout.describe() for layout in (KVLayout(4, MIXED), *others().values())}
    assert len(seen) == 1 + len(others())
    alike = KVLayout.uniform(64, 36, 8, 128, "bfloat16")
    assert alike.describe() == KVLayout(64, 36 * (keys_and_values(8, 128, "bfloat16"),)).describe()
    assert len(alike.describe()) < 200, "one line for people, whatever the number of layers"
    assert key(0) not in {name for layout in others().values() for name in keys(layout)}
