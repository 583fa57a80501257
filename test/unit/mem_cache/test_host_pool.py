"""HostPool: where the bytes of a page lie in each layout, what storage sees, and what is said where memory is short."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from page_pools import MIXED, Shape, host_page, host_pages, make_pools
from torch.utils._python_dispatch import TorchDispatchMode

from fenceline.config.server_args import MemLayout
from fenceline.mem_cache.host import host_pool as module
from fenceline.mem_cache.host.host_pool import HostPool, available_host_bytes
from fenceline.memory_order import Device, cuda, open_device

LAYOUTS: tuple[MemLayout, ...] = ("layer_first", "page_first")
SHAPE = Shape()


@pytest.fixture
def device() -> Device:
    return open_device("cpu")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_and_shapes(device: Device, layout: MemLayout) -> None:
    _, pool = make_pools(device, layout, SHAPE)
    part_nbytes = 4 * 2 * 8 * 2
    assert pool.page_nbytes == SHAPE.layout.page_nbytes == 2 * 3 * part_nbytes
    assert pool.nbytes == pool.buffer.nbytes == 15 * pool.page_nbytes
    strides = (part_nbytes, 1) if layout == "layer_first" else (6 * part_nbytes, 1)
    assert [(tuple(part.shape), part.stride()) for part in pool.parts] == 6 * [((15, part_nbytes), strides)]
    assert (pool.pages.size, pool.pages.num_free) == (15, 15)  # page 0 is a page like any other


@pytest.mark.parametrize("shape", [SHAPE, Shape(layers=MIXED)], ids=["alike", "mixed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_are_disjoint_contiguous_and_make_up_everything(device: Device, layout: MemLayout, shape: Shape) -> None:
    _, pool = make_pools(device, layout, shape)
    pool.buffer.zero_()
    number = 0
    for page in range(15):
        for part, whole in zip(pool.layout.parts, pool.parts, strict=True):
            mine = whole[page]
            assert mine.is_contiguous()
            assert mine.nbytes == part.nbytes
            assert not mine.any(), "no other part reaches here"
            number = number % 255 + 1
            mine.fill_(number)
            assert set(host_page(pool, page)[part.offset : part.offset + part.nbytes].tolist()) == {number}
    assert pool.buffer.all()


@pytest.mark.parametrize("shape", [SHAPE, Shape(layers=MIXED)], ids=["alike", "mixed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_row_of_watched_accesses_has_two_pages(
    device: Device, layout: MemLayout, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: dict[str, int] = {}
    monkeypatch.setattr(
        type(device), "name_memory", lambda self, tensor, name, row_bytes=None: named.update({name: row_bytes})
    )
    _, pool = make_pools(device, layout, shape)
    pages_of: dict[int, set[int]] = {}
    for page in range(15):
        for part in pool.parts:
            start = part[page].data_ptr() - pool.buffer.data_ptr()
            for row in range(start // named["host_pool"], -(-(start + part[page].nbytes) // named["host_pool"])):
                pages_of.setdefault(row, set()).add(page)
    assert all(len(pages) == 1 for pages in pages_of.values())


@pytest.mark.parametrize("shape", [SHAPE, Shape(layers=MIXED)], ids=["alike", "mixed"])
def test_storage_sees_the_same_bytes_in_both_layouts(device: Device, shape: Shape) -> None:
    seen = {}
    for layout, num_pieces in (("layer_first", len(shape.layout.parts)), ("page_first", 1)):
        _, pool = make_pools(device, layout, shape)  # type: ignore[arg-type]
        values = torch.from_numpy(np.random.default_rng(2).integers(0, 256, (15, pool.page_nbytes), np.uint8))
        for part, whole in zip(pool.layout.parts, pool.parts, strict=True):
            whole.copy_(values[:, part.offset : part.offset + part.nbytes])
        pieces = [pool.page(page) for page in range(15)]
        assert {len(one) for one in pieces} == {num_pieces}
        assert all(piece.flags.c_contiguous and piece.dtype == np.uint8 for one in pieces for piece in one)
        seen[layout] = [b"".join(piece.tobytes() for piece in one) for one in pieces]
        assert seen[layout] == [value.numpy().tobytes() for value in values]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_storage_writes_into_the_parts_is_in_the_pool(device: Device, layout: MemLayout) -> None:
    _, pool = make_pools(device, layout, SHAPE)
    before = host_pages(pool)
    for part in pool.page(7):
        part[:] = 0
    after = host_pages(pool)
    assert not after[7].any()
    assert torch.equal(after[torch.arange(15) != 7], before[torch.arange(15) != 7])


class Operations(TorchDispatchMode):
    """Counts torch's operations, views among them."""

    num = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_host_access_costs_nothing_unless_watched(
    device: Device, layout: MemLayout, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, pool = make_pools(device, layout, SHAPE)
    seen: list[int] = []
    monkeypatch.setattr(device, "watches_host", watched)
    monkeypatch.setattr(device, "host_access", lambda view, write, what: seen.append(view.numel()))
    with Operations() as operations:
        pool.host_access(3, True, "a test")
    assert (sum(seen), operations.num > 0) == ((pool.page_nbytes, True) if watched else (0, False))


@pytest.mark.parametrize("page", [-1, 15])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_that_is_not_there_has_no_parts(device: Device, layout: MemLayout, page: int) -> None:
    with pytest.raises(AssertionError, match="there is no host page"):
        make_pools(device, layout, SHAPE)[1].page(page)


# --- memory that is not there


def test_a_pool_larger_than_the_machine_is_refused(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(nbytes: int) -> torch.Tensor:
        raise AssertionError("it would have been allocated")

    monkeypatch.setattr(device, "host_buffer", never)
    num_pages = 10**15 // SHAPE.layout.page_nbytes
    with pytest.raises(ValueError, match=r"needs 1000000\.0 GB.* lower --hicache-size \(GB\) or --hicache-ratio"):
        HostPool(device, num_pages, SHAPE.layout, "page_first")


def test_some_memory_is_left_to_others(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    page = SHAPE.layout.page_nbytes
    monkeypatch.setattr(module, "available_host_bytes", lambda: 100 * page)
    assert HostPool(device, 95, SHAPE.layout, "page_first").num_pages == 95
    with pytest.raises(ValueError, match="lower --hicache-size"):
        HostPool(device, 96, SHAPE.layout, "page_first")


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: out of memory\nlong advice"), MemoryError(), OSError("no")]
)
def test_memory_that_cannot_be_pinned_is_refused_with_the_remedy(
    device: Device, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(nbytes: int) -> torch.Tensor:
        raise error

    monkeypatch.setattr(device, "host_buffer", fails)
    with pytest.raises(ValueError, match="could not be allocated and pinned .*: lower --hicache-size") as raised:
        HostPool(device, 10, SHAPE.layout, "layer_first")
    assert "\n" not in str(raised.value)
    assert raised.value.__cause__ is error


def test_wrong_layouts_and_no_pages_are_refused(device: Device) -> None:
    with pytest.raises(ValueError, match="--hicache-mem-layout token_first: use layer_first or page_first"):
        HostPool(device, 3, SHAPE.layout, "token_first")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="room for no page: raise --hicache-size"):
        HostPool(device, 0, SHAPE.layout, "page_first")


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = available_host_bytes()
    for name, text in (("max", "1000000"), ("current", "700000"), ("stat", "anon 5\ninactive_file 100000\n")):
        (tmp_path / name).write_text(text)
    files = tuple(str(tmp_path / name) for name in ("max", "current", "stat"))
    monkeypatch.setattr(module, "_CGROUP_FILES", (files,))
    assert available_host_bytes() == 400000
    (tmp_path / "current").write_text("1200000")
    assert available_host_bytes() == 0
    for text in ("max", str(10**18)):
        (tmp_path / "max").write_text(text)
        assert available_host_bytes() > machine / 2


# --- memory of many gigabytes, with a registry in CUDA's place


class Registry:
    """What is pinned, as CUDA would know it."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> None:
        self.pinned[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.pinned[address]


def test_a_mapped_buffer_is_pinned_whole_and_touched_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_TOUCH_BYTES", 1 << 20)
    registry, process = Registry(), psutil.Process()
    before, resident = process.memory_info().rss, []

    def register(address: int, nbytes: int) -> None:
        resident.append(process.memory_info().rss - before)
        registry.register(address, nbytes)

    nbytes = (64 << 20) + 4097  # no multiple of what a thread touches at a time
    buffer = cuda.pinned_buffer(nbytes, register, registry.unregister)
    assert registry.pinned == {buffer.data_ptr(): nbytes}
    assert resident[0] >= 60 << 20, "pinning finds the memory in place"
    assert (buffer.dtype, buffer.numel()) == (torch.uint8, nbytes) and not buffer.any()


def test_a_mapped_buffer_is_unpinned_with_the_last_view() -> None:
    registry = Registry()
    buffer = cuda.pinned_buffer(1 << 20, registry.register, registry.unregister)
    view = buffer.view(torch.float32)[100:]
    array = view.numpy()
    del buffer
    gc.collect()
    assert len(registry.pinned) == 1
    view.fill_(3.0)
    del view
    gc.collect()
    assert len(registry.pinned) == 1
    assert array.min() == 3.0
    del array
    gc.collect()
    assert registry.pinned == {}


def test_memory_that_is_refused_is_given_back() -> None:
    def refuse(address: int, nbytes: int) -> None:
        raise RuntimeError("cudaHostRegister failed with error 2")

    before = psutil.Process().memory_info().rss
    with pytest.raises(RuntimeError, match="error 2"):
        cuda.pinned_buffer(64 << 20, refuse, Registry().unregister)
    gc.collect()
    assert psutil.Process().memory_info().rss - before < 32 << 20
