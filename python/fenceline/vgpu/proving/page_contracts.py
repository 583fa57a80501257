"""What the memory of pages, its copies and its keys promise to any caller, asked with random layouts.

The models of the workloads have few layouts: most have layers of one size, none a latent, and what only a GPU with the
kernel library or a watching host does is not run at all. So pools of random layouts are made on the CPU, with rows of
unequal sizes, and what is copied is compared with the bytes that were put into each page.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch

from fenceline.config.server_args import MemLayout
from fenceline.mem_cache import kv_pool as kv_pool_module
from fenceline.mem_cache.host import cache_controller, page_copy
from fenceline.mem_cache.host.cache_controller import HiCacheController
from fenceline.mem_cache.host.host_pool import HostPool
from fenceline.mem_cache.host.page_copy import CudaCopier, PageCopier, RunCopier
from fenceline.mem_cache.kv_pool import KVLayout, KVPool, KVRow, keys_and_values, latent
from fenceline.mem_cache.page_hash import page_keys
from fenceline.mem_cache.transfer import Ticket, TransferKind
from fenceline.memory_order.device import CpuDevice, CpuStream
from fenceline.memory_order.edges import WHOLE_PAGE, StreamName
from fenceline.memory_order.stream import Point, Points, Stream
from fenceline.vgpu.proving.contracts import raises

_ROOM = 1 << 30
_MEM_LAYOUTS: tuple[MemLayout, ...] = ("layer_first", "page_first")
_LEAST_PAGE = 16  # tokens of a page that the copy engine moves at its rate
_INT32 = np.iinfo(np.int32)


def compare_pages(random: Random) -> str:
    """The first promise that is not kept, "" if all are."""
    threads = torch.get_num_threads()
    try:
        for part in (_layouts, _tensors, _host_memory, _copies, _transfers, _start, _keys):
            for wrong in part(random):
                return f"pages: {wrong}"
    finally:
        torch.set_num_threads(threads)
    return ""


def _layout(random: Random, with_latents: bool = True) -> KVLayout:
    """Layers of which neighbours are mostly alike: keys and values of one size, or of two, or a latent."""
    layers: list[tuple[KVRow, ...]] = []
    for _ in range(random.randint(1, 3)):
        heads, dtype = random.choice((1, 2)), random.choice((torch.uint8, torch.bfloat16, torch.float32))
        rows = keys_and_values(heads, random.choice((1, 2, 3)), dtype)
        if with_latents and random.random() < 0.4:
            unequal = (KVRow("k", (2,), dtype), KVRow("v", (3,), dtype))
            rows = random.choice((latent(random.choice((2, 3)), dtype), unequal))
        layers += [rows] * random.choice((1, 1, 2, 3))
    return KVLayout(random.choice((1, 2, 4)), tuple(layers))


class _Watched(CpuDevice):
    """A device that notes what it is told of memory and in which order its streams are used."""

    watches_host = True

    def __init__(self, severed: frozenset[str] = frozenset()) -> None:
        self.said: list[tuple[Any, ...]] = []
        super().__init__(severed)
        self._readers = (lambda stream, label, *args: self.said.append((stream, label)),)

    def name_memory(self, tensor: torch.Tensor, name: str, row_bytes: int | None = None) -> None:
        self.said.append(("row", row_bytes))

    def host_access(self, buffer: torch.Tensor, write: bool, what: str) -> None:
        first, strides, shape = buffer.storage_offset(), buffer.stride(), buffer.shape
        starts = [first + index * strides[0] for index in range(shape[0])]
        self.said += [("host", byte) for start in starts for byte in range(start, start + shape[1])]

    def _synchronize(self) -> None:
        self.said.append(("synchronize",))

    def _make_stream(self, name: StreamName) -> Stream:
        return _Stream(name, self.severed, self.said)


class _Stream(CpuStream):
    """Points pass when the host learns of it. ``told``: what has been submitted."""

    def __init__(self, name: StreamName, severed: frozenset[str], told: list[tuple[Any, ...]]) -> None:
        super().__init__(name, severed)
        self.lags, self.told = True, told

    def record(self) -> Point:
        point = super().record()
        self.told.append((self.name, "record", point.serial))
        return point

    def wait(self, after: Point | Points, edge: Any) -> None:
        super().wait(after, edge)
        points = after.points if isinstance(after, Points) else (after,)
        self.told += [(self.name, "wait", point.stream.name, point.serial) for point in points]

    def seconds_between(self, first: Point, last: Point) -> float:
        return 1000.0 * first.serial + last.serial


# --- layouts and their memory


def _layouts(random: Random) -> Iterator[str]:
    """A uniform layout has so many layers of keys and values."""
    num_layers, heads, width = random.randint(1, 4), random.randint(1, 3), random.randint(1, 4)
    layout = KVLayout.uniform(2, num_layers, heads, width, torch.float32)
    rows = [(row.name, row.shape) for layer in layout.layers for row in layer]
    if rows != [(name, (heads, width)) for _ in range(num_layers) for name in ("k", "v")]:
        yield f"a layout of {num_layers} layers has {rows}"


def _tensors(random: Random) -> Iterator[str]:
    """Attention computes in the type of the first row unless another one is given. On a GPU layers whose rows are all
    alike are evenly spaced in one tensor, and others are in tensors of their own."""
    layout = _layout(random)
    pool = KVPool(2, layout, torch.device("cpu"))
    if pool.dtype is not layout.layers[0][0].dtype:
        yield f"attention computes in {pool.dtype}, and the first row is {layout.layers[0][0].dtype}"
    rows, num_layers = layout.layers[-1], random.randint(1, 3)
    gpu = cast(torch.device, SimpleNamespace(type="cuda"))

    def zeros(shape: Sequence[int], dtype: torch.dtype, device: object) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    with patch.object(kv_pool_module, "torch", SimpleNamespace(zeros=zeros)):
        tensors = kv_pool_module._allocate(num_layers, rows, 3, gpu)
    shapes = [[(tensor.shape, tensor.dtype) for tensor in layer] for layer in tensors]
    if shapes != [[((3, *row.shape), row.dtype) for row in rows]] * num_layers:
        yield f"{num_layers} layers of {rows} on a GPU are {shapes}"
    num_storages = len({tensor.untyped_storage().data_ptr() for layer in tensors for tensor in layer})
    kinds = {(row.shape, row.dtype) for row in rows}
    if num_storages != (1 if len(kinds) == 1 else num_layers * len(rows)):
        yield f"{num_layers} layers of {rows} on a GPU are in {num_storages} tensors"


def _host_memory(random: Random) -> Iterator[str]:
    """A thread that accesses a page declares the bytes of that page and no others. A row, by which accesses are
    reported, is one part if all are equally large, else a whole page, or the most that divides all parts."""
    layout, device, num_pages = _layout(random), _Watched(), random.randint(2, 4)
    mem_layout: MemLayout = random.choice(_MEM_LAYOUTS)
    pool = HostPool(device, num_pages, layout, mem_layout, _ROOM)
    sizes = sorted({part.nbytes for part in layout.parts})
    divides = max(num for num in range(1, sizes[0] + 1) if not any(size % num for size in sizes))
    together = mem_layout == "page_first" and sizes[0] != sizes[-1]
    row = sum(part.nbytes for part in layout.parts) if together else divides
    if device.said != [("row", row)]:
        yield f"rows of host memory ({mem_layout}, parts of {sizes} bytes) are {device.said}, not of {row} bytes"
    device.said.clear()
    page, base = random.randrange(num_pages), pool.buffer.data_ptr()
    pool.host_access(page, True, "contract")
    pieces = [(piece.ctypes.data - base, piece.nbytes) for piece in pool.page(page)]
    right = [byte for start, nbytes in pieces for byte in range(start, start + nbytes)]
    if sorted(byte for _, byte in device.said) != sorted(right):
        yield f"an access to host page {page} ({mem_layout}) is declared as one to other bytes"


# --- copies


def _contents(random: Random, layout: KVLayout, num_pages: int) -> np.ndarray[Any, Any]:
    """Random bytes of so many pages: [page, byte in the layout's order]."""
    generator = np.random.default_rng(random.randrange(1 << 30))
    return generator.integers(0, 256, (num_pages, layout.page_nbytes), np.uint8)


def _on_device(pool: KVPool) -> np.ndarray[Any, Any]:
    """The bytes of all pages, from the tensors that attention reads."""
    parts = [
        tensor.contiguous().view(torch.uint8).reshape(pool.num_pages, -1).numpy()
        for _, tensor in pool.tensors()
    ]
    return np.concatenate(parts, axis=1)


def _on_host(pool: HostPool) -> np.ndarray[Any, Any]:
    """The bytes of all pages, as storage takes them."""
    return np.stack([np.concatenate(pool.page(page)) for page in range(pool.num_pages)])


def _copies(random: Random) -> Iterator[str]:
    """Pages become equal byte for byte, those of some layers alone too, and no other page changes; nothing is copied
    where no page is named. A backup by kernels is declared as one that uses the SMs, and nothing else is."""
    layout, device = _layout(random), _Watched()
    pool = KVPool(random.randint(3, 5), layout, torch.device("cpu"))
    host = HostPool(device, random.randint(3, 5), layout, random.choice(_MEM_LAYOUTS), _ROOM)
    uses_sm = random.random() < 0.5
    with patch.object(page_copy, "is_watched", lambda _: True):
        copiers: tuple[PageCopier, ...] = (
            CudaCopier(device, pool, host, "kernel" if uses_sm else "direct"),
            RunCopier(device, pool, host, uses_sm, strided=random.random() < 0.5),
        )
    for copier in copiers:
        what, alike = type(copier).__name__, len(layout.alike)
        num = random.randint(0, 3)
        pages, host_pages = _some(random, pool.num_pages, num), _some(random, host.num_pages, num)
        before, on_host = _contents(random, layout, pool.num_pages), _contents(random, layout, host.num_pages)
        _fill(pool, host, before, on_host)
        device.said.clear()
        copier.to_host(device.store, pages, host_pages)
        is_declared = (StreamName.STORE, "backup of KV pages by kernels") in device.said
        if is_declared != uses_sm:
            yield f"{what}: a backup is {'' if is_declared else 'not '}declared as one by kernels"
        right = on_host.copy()
        right[host_pages] = before[pages]
        if not np.array_equal(_on_host(host), right) or not np.array_equal(_on_device(pool), before):
            yield f"{what}: pages {pages} of {layout.layers} are not copied to {host_pages} ({alike} kinds)"
        _fill(pool, host, before, on_host)
        layers = _some_layers(random, layout.num_layers)
        copier.to_device(device.load, host_pages, pages, layers)
        right = before.copy()
        for part in layout.parts:
            if part.layer in layers:
                columns = slice(part.offset, part.offset + part.nbytes)
                right[pages, columns] = on_host[host_pages, columns]
        if not np.array_equal(_on_device(pool), right) or not np.array_equal(_on_host(host), on_host):
            yield f"{what}: {layers} of {layout.layers} are not copied from {host_pages} to {pages}"


def _some(random: Random, num_pages: int, num: int) -> np.ndarray[Any, Any]:
    """Different pages, in some runs neighbours."""
    first = random.randint(0, num_pages - num)
    pages = random.choice((list(range(first, first + num)), random.sample(range(num_pages), num)))
    return np.array(pages, np.int32)


def _some_layers(random: Random, num_layers: int) -> range:
    first = random.randrange(num_layers)
    return range(first, random.randint(first + 1, num_layers))


def _fill(
    pool: KVPool, host: HostPool, on_device: np.ndarray[Any, Any], on_host: np.ndarray[Any, Any]
) -> None:
    for part, tensor in zip(pool.layout.parts, (tensor for _, tensor in pool.tensors()), strict=True):
        data = torch.from_numpy(np.ascontiguousarray(on_device[:, part.offset : part.offset + part.nbytes]))
        tensor.view(torch.uint8).view(pool.num_pages, part.nbytes).copy_(data)
    for page in range(host.num_pages):
        start = 0
        for piece in host.page(page):
            piece[:] = on_host[page, start : start + piece.nbytes]
            start += piece.nbytes


# --- transfers


class _NoCopies:
    """A copier that notes what it is asked for."""

    def __init__(self, told: list[tuple[Any, ...]], uses_sm: bool) -> None:
        self.told, self.uses_sm = told, uses_sm

    def to_host(self, stream: Stream, device_pages: Any, host_pages: Any) -> None:
        self.told.append(("to_host", device_pages.tolist(), host_pages.tolist()))

    def to_device(self, stream: Stream, host_pages: Any, device_pages: Any, layers: range) -> None:
        self.told.append(("to_device", host_pages.tolist(), device_pages.tolist(), *layers))


def _transfers(random: Random) -> Iterator[str]:
    """A transfer's time begins after its waits. A load has a Point for each layer, after that layer's copy; a step
    waits for a layer's own Point, and with its last layer for the whole page, and says what it reads."""
    layout = _layout(random, with_latents=False)
    num_layers, uses_sm = layout.num_layers, random.random() < 0.5
    num_target = random.randint(1, num_layers)
    cuts_draft = random.random() < 0.3  # a load without its draft's layers, as if the guard were not there
    device = _Watched(frozenset((WHOLE_PAGE.name,)) if cuts_draft else frozenset())
    pool = KVPool(4, layout, torch.device("cpu"))
    host = HostPool(device, 4, layout, "layer_first", _ROOM)
    copier = _NoCopies(device.said, uses_sm)
    transfers = HiCacheController(device, pool, host, cast(PageCopier, copier), num_target_layers=num_target)
    for _ in range(random.randint(0, 2)):
        device.load.record()
    after, load = device.forward.record(), Ticket.load(1)
    device.said.clear()
    pages = np.array(random.sample(range(1, 4), 2), np.int32)
    transfers.load(load, pages, pages[::-1].copy(), Points.of(after))
    kinds = [said[1] for said in device.said if said[0] is StreamName.LOAD]
    num_loaded = num_target if cuts_draft else num_layers
    if kinds != ["wait", "record", *["load of KV pages", "record"] * num_loaded]:
        yield f"a load of {num_loaded} layers is submitted as {kinds}"
    serials = [point.serial for point in load.layer_points]
    begin = next((said[2] for said in device.said if said[:2] == (StreamName.LOAD, "record")), 0)
    if serials != [begin + 1 + min(layer, num_loaded - 1) for layer in range(num_layers)]:
        yield f"the layers of a load end at {serials}, which begins at {begin}"
    # A step of the target alone, of which a draft's layers may follow.
    arrived: list[int] = []
    ready = transfers.layer_ready([load], num_target, lambda: arrived.append(1))
    for layer in range(num_target):
        device.said.clear()
        ready(layer)
        is_last = layer == num_target - 1
        right = [
            (StreamName.FORWARD, "wait", StreamName.LOAD, serials[-1 if is_last else layer]),
            (StreamName.FORWARD, "layer of a prefill step"),
        ]
        if device.said != right or len(arrived) != is_last:
            yield f"layer {layer} of {num_target} is used after {device.said}, not {right}"
    yield from _backups(transfers, device, uses_sm)
    # Seconds are those of the device's own clock, between the Points around the copies.
    for point in (load.layer_points[-1], device.store.record()):
        point.stream.ask(point)
    done = transfers.drain_acks()
    seconds = transfers.counts[TransferKind.LOAD].seconds
    if load in done and seconds != 1000.0 * begin + serials[-1]:
        yield f"a load is said to take {seconds} seconds"


def _backups(transfers: HiCacheController, device: _Watched, uses_sm: bool) -> Iterator[str]:
    """Backups on SMs and persistent attention exclude each other, and say so."""
    store, pages = Ticket.store(2), np.array([1], np.int32)
    transfers.store(store, pages, pages, Points.none())
    device.said.clear()
    transfers.before_persistent_forward()
    (end,) = store.points
    right = [
        (StreamName.FORWARD, "wait", StreamName.STORE, end.serial),
        (StreamName.FORWARD, "persistent attention"),
    ]
    if device.said != (right if uses_sm else []):
        yield f"persistent attention begins after {device.said}, with uses_sm {uses_sm}"


# --- the start on a GPU


def _start(random: Random) -> Iterator[str]:
    """On a GPU the sink page is copied to the host and back before a request waits, all its layers, and nothing of it
    overlaps other work; pages of few tokens are warned of where the copy engine moves them."""
    device, num_layers = _Watched(), random.randint(1, 3)
    device.kind = random.choice(("cuda", "cuda", "cpu"))
    io_backend, page_size = (
        random.choice(("direct", "kernel")),
        random.choice((1, _LEAST_PAGE // 2, _LEAST_PAGE, 64)),
    )
    copier = _NoCopies(device.said, False)
    config = SimpleNamespace(
        hicache=SimpleNamespace(io_backend=io_backend, host_bytes=1),
        server_args=SimpleNamespace(hicache_mem_layout="layer_first"),
        model=SimpleNamespace(num_layers=num_layers),
    )
    pool = SimpleNamespace(page_size=page_size, num_layers=num_layers, layout=SimpleNamespace(page_nbytes=1))
    with (
        patch.object(cache_controller, "HostPool", lambda *args: None),
        patch.object(cache_controller, "make_page_copier", lambda *args: copier),
        patch.object(cache_controller, "HiCacheController", lambda *args: None),
        _warnings(cache_controller.logger) as warned,
    ):
        cache_controller.make_hicache_controller(config, device, pool, None, 1)  # type: ignore[arg-type]
    is_slow = device.kind == "cuda" and io_backend == "direct" and page_size < _LEAST_PAGE
    if bool(warned) != is_slow:
        yield f"pages of {page_size} tokens ({device.kind}, {io_backend}) are {'' if warned else 'not '}warned of"
    stop = ("synchronize",)
    right = [stop, ("to_host", [0], [0]), stop, ("to_device", [0], [0], *range(num_layers)), stop]
    if device.said != (right if device.kind == "cuda" else []):
        yield f"a host tier begins with {device.said} ({device.kind})"


@contextmanager
def _warnings(logger: logging.Logger) -> Iterator[list[str]]:
    """What is logged as a warning meanwhile, in place of the log."""
    said: list[str] = []
    with patch.object(logger, "warning", lambda text, *args: said.append(text % args)):
        yield said


# --- keys


def _keys(random: Random) -> Iterator[str]:
    """A key is a digest of the one before, the page's tokens and those behind them that it depends on; token ids of any
    integer type that int32 can hold are taken, and no others."""
    size, lookahead = random.choice((1, 2, 3)), random.choice((0, 1, 2))
    dtype: Any = random.choice((np.int32, np.int64))
    tokens = np.array([random.randrange(1 << 31) for _ in range(random.randint(0, 9))], dtype)
    if len(tokens) and random.random() < 0.7:
        tokens[random.randrange(len(tokens))] = random.choice((_INT32.min, _INT32.max))
    parent = hashlib.sha256(b"contract").digest()
    right: list[bytes] = []
    while (len(right) + 1) * size + lookahead <= len(tokens):
        own = tokens[len(right) * size :][: size + lookahead].tolist()
        data = b"".join(token.to_bytes(4, "little", signed=True) for token in own)
        right.append(hashlib.sha256((right[-1] if right else parent) + data).digest())
    try:
        got = page_keys(parent, tokens, size, lookahead)
    except AssertionError as error:
        yield f"tokens {tokens} are refused: {error}"
        return
    if got != right:
        yield f"{len(got)} keys of {len(tokens)} tokens are not the {len(right)} that are right"
    beyond = np.array([1, random.choice((_INT32.min - 1, _INT32.max + 1))], np.int64)
    if not raises(AssertionError, page_keys, parent, beyond, size):
        yield f"tokens {beyond} share a key with others"
