"""Random cases for the CUDA package with their expected results, for emulation on the CPU and for a GPU."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from fenceline_kernel import DEFAULT_NUM_CTAS, FillField, FillPlan, KernelLibrary, PagePools
from kernel_surroundings import Launch

from fenceline.mem_cache.host.page_copy import copy_pages
from fenceline.memory_order import device as memory_order
from fenceline.memory_order.kernel import Kernel, KernelAccesses

_DTYPES = (
    torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.float32, torch.bfloat16, torch.float64,
)  # fmt: skip


@dataclass
class FillCase:
    """Fields to fill; before, their destinations hold random bytes."""

    fields: list[FillField]

    @property
    def max_live(self) -> int:
        """The most live rows that every field takes."""
        return min(len(t) for f in self.fields for t in (f.dst, f.src) if t is not None)

    def check(self, num_live: int) -> None:
        """Check that every destination holds the live rows of its source and padding, as computed with torch."""
        for one in self.fields:
            expected = torch.full_like(one.dst, one.pad)
            if one.src is not None:
                live = min(num_live, len(one.src), len(one.dst))
                rows = one.src[:live].to(one.dst.device)
                if one.dst.dim() == 2:
                    expected[:live, : one.src.shape[1]] = rows
                else:
                    expected[:live] = rows
            assert torch.equal(one.dst, expected), one.name


def random_fill_case(seed: int, device: str, pinned: bool = False) -> FillCase:
    """1 to 32 fields of random dtype and shape; ``pinned``: about half of the sources are in pinned host memory."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    fields = []
    for i in range(draw.choice((1, 2, 5, 32))):
        dtype = draw.choice(_DTYPES)
        size = draw.choice((1, 3, 16, 65))
        shape = draw.choice(((), (1,), (7,), (64,), (129,), (3, 5), (2, 8)))
        dst = _noise((size + 1, *shape), dtype, generator).to(device)[draw.randint(0, 1) :][:size]
        pad = draw.choice((0, 1)) if dtype in (torch.bool, torch.uint8) else draw.choice((-1, 0, 1))
        src = _random_source(draw, generator, size, shape, dtype)
        if src is not None:
            src = src.pin_memory() if pinned and draw.random() < 0.5 else src.to(device)
            if draw.random() < 0.3 and src.device.type == device:
                src = torch.cat([src, src], dim=0)[::2] if len(src) > 1 else src
        fields.append(FillField(dst, src, pad, f"field{i}"))
    return FillCase(fields)


def _random_source(
    draw: random.Random, generator: torch.Generator, size: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor | None:
    if draw.random() < 0.15:
        return None
    if len(shape) == 1 and draw.random() < 0.5:
        shape = (draw.randint(1, shape[0]),)  # a page table with fewer columns than its graph's
    return _noise((size + draw.randint(-1, 2), *shape), dtype, generator)


def _noise(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    values = torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator)
    return values.to(dtype)


@dataclass
class PageCase:
    """A KV pool, host memory in one of the layouts, and pages to copy between them."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    host: torch.Tensor
    page_size: int
    layout: str
    device_pages: np.ndarray
    host_pages: np.ndarray
    num_ctas: int = DEFAULT_NUM_CTAS
    min_rows: int = 1

    @staticmethod
    def random(
        seed: int,
        layout: str,
        device: str,
        num_layers: int | None = None,
        heads: tuple[int, int] | None = None,
        page_size: int | None = None,
    ) -> PageCase:
        """A random case. Shapes go from one chunk of a byte to whole pages of many heads; pages are distinct, and some
        are adjacent."""
        draw = random.Random(seed)
        page_size = page_size if page_size is not None else draw.choice((1, 2, 16, 64))
        num_layers = num_layers if num_layers is not None else draw.choice((1, 2, 5))
        heads = heads if heads is not None else draw.choice(((1, 1), (1, 3), (2, 6), (2, 8), (8, 128), (1, 64)))
        dtype = draw.choice((torch.bfloat16, torch.float32, torch.uint8))
        num_pages, num_host = draw.randint(3, 20), draw.randint(3, 25)
        if draw.random() < 0.5:  # layers at equal distances, as in the engine's pool on a GPU
            pool = list(_kv((2 * num_layers, num_pages * page_size, *heads), dtype, device))
        else:
            pool = [_kv((num_pages * page_size, *heads), dtype, device) for _ in range(2 * num_layers)]
        if layout == "layer_first":
            host = _kv((num_layers, 2, num_host * page_size, *heads), dtype, "cpu")
        else:
            host = _kv((num_host, num_layers, 2, page_size, *heads), dtype, "cpu")
        count = draw.randint(1, min(num_pages, num_host))
        device_pages = _page_list(draw, num_pages, count)
        host_pages = _page_list(draw, num_host, count)
        host = host.pin_memory() if device != "cpu" else host
        num_ctas = draw.choice((1, 3, DEFAULT_NUM_CTAS, 200))
        min_rows = draw.choice((1, 2, 4, 100))
        return PageCase(pool[::2], pool[1::2], host, page_size, layout, device_pages, host_pages, num_ctas, min_rows)

    def pools(self, io_backend: str, library: KernelLibrary | None = None) -> PagePools:
        """The pools of this case."""
        return PagePools(self.k, self.v, self.host, self.page_size, self.layout, io_backend, library)  # type: ignore[arg-type]

    def check_to_host(self, pools: PagePools, layers: range | None = None) -> None:
        """Copy to the host. Only the given pages may have changed, and no other byte."""
        expected = self.host.clone()
        for layer, c, device_page, host_page in self._copies(layers):
            self._host_page(expected, layer, c, host_page).copy_(self._device_page(layer, c, device_page))
        self.copy(pools, True, layers)
        _synchronize(self.k[0])
        assert torch.equal(self.host, expected)

    def check_to_device(self, pools: PagePools, layers: range | None = None) -> None:
        """Change the host's bytes and copy to the device. Only the given pages may have changed."""
        self.host.copy_(_kv(tuple(self.host.shape), self.host.dtype, "cpu"))
        expected = [tensor.clone() for tensor in (*self.k, *self.v)]
        for layer, c, device_page, host_page in self._copies(layers):
            begin = device_page * self.page_size
            target = expected[layer + c * len(self.k)][begin : begin + self.page_size]
            target.copy_(self._host_page(self.host, layer, c, host_page))
        self.copy(pools, False, layers)
        _synchronize(self.k[0])
        assert all(torch.equal(a, b) for a, b in zip((*self.k, *self.v), expected, strict=True))

    def copy(self, pools: PagePools, to_host: bool, layers: range | None = None) -> None:
        """Copy, and overwrite the lists of pages right after the call, because it must have read them. Behind each list
        stands the page that would continue it, which must not be read."""
        device_pages, host_pages = (
            np.append(one, one[-1:] + 1)[: len(one)] for one in (self.device_pages, self.host_pages)
        )
        pools.copy(
            device_pages, host_pages, to_host=to_host, layers=layers, num_ctas=self.num_ctas, min_rows=self.min_rows
        )  # fmt: skip
        device_pages[:], host_pages[:] = 0, 0

    def _copies(self, layers: range | None) -> Iterator[tuple[int, int, int, int]]:
        pairs = list(zip(self.device_pages.tolist(), self.host_pages.tolist(), strict=True))
        for layer in range(len(self.k)) if layers is None else layers:
            for c in (0, 1):
                for device_page, host_page in pairs:
                    yield layer, c, device_page, host_page

    def _device_page(self, layer: int, c: int, page: int) -> torch.Tensor:
        return (self.k, self.v)[c][layer][page * self.page_size : (page + 1) * self.page_size]

    def _host_page(self, host: torch.Tensor, layer: int, c: int, page: int) -> torch.Tensor:
        if self.layout == "page_first":
            return host[page, layer, c]
        return host[layer, c, page * self.page_size : (page + 1) * self.page_size]


def _page_list(draw: random.Random, size: int, count: int) -> np.ndarray:
    """``count`` distinct pages below ``size``: anywhere, in a row, or a row and then anywhere."""
    kind, start = draw.choice(("anywhere", "row", "both")), draw.randint(0, size - count)
    numbers = draw.sample(range(size), count)
    if kind != "anywhere":
        row = list(range(start, start + (count if kind == "row" else draw.randint(1, count))))
        numbers = (row + [number for number in numbers if number not in row])[:count]
    return np.array(numbers, dtype=np.int32)


def _kv(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random numbers of ``dtype`` without NaN, so that they compare equal to themselves."""
    return torch.randint(0, 120, shape, dtype=torch.uint8).to(dtype).to(device)


def _synchronize(tensor: torch.Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize()


# --- launches whose declarations are checked (kernel_surroundings)


def fill_launches(library: KernelLibrary | None = None) -> Iterator[Launch]:
    """Fills as in an arena: live rows from sources with as many rows, and padding for the rest or for whole fields."""
    generator = torch.Generator().manual_seed(2)
    for num_live, size in ((3, 5), (16, 16), (1, 70)):
        shapes = ((torch.int64, ()), (torch.int32, (7,)), (torch.bool, ()), (torch.bfloat16, (2, 3)))
        targets = [_noise((size, *shape), dtype, generator) for dtype, shape in shapes]
        sources = [_noise((num_live, *shape), dtype, generator) for dtype, shape in shapes[:-1]]

        def run(pdl: bool, num_fields: int, *tensors: torch.Tensor | None, num_live: int = num_live) -> None:
            fields = zip(tensors[:num_fields], tensors[num_fields:], strict=True)
            plan = FillPlan([FillField(dst, src, 1) for dst, src in fields if dst is not None], library)
            plan.fill(num_live)

        operands = (len(targets), *targets, *sources, None)
        yield Launch(f"fill of {num_live} of {size}", memory_order.fill_rows, operands, run)


def copy_launches(library: KernelLibrary | None = None, io_backend: str = "kernel") -> Iterator[Launch]:
    """Page copies both ways, of pages in a row and of single ones, in both layouts."""
    for seed, (layout, to_host) in enumerate(itertools.product(("layer_first", "page_first"), (True, False))):
        case = PageCase.random(seed, layout, "cpu", 2, (2, 3), 4)

        def declared(
            op: KernelAccesses, case: PageCase, to_host: bool, host: torch.Tensor, *sides: torch.Tensor
        ) -> None:
            lists = case.device_pages.astype(np.int64), case.host_pages.astype(np.int64)
            copy_pages.accesses(op, to_host, *lists, *_parts(case, host, sides))

        def run(pdl: bool, case: PageCase, to_host: bool, host: torch.Tensor, *sides: torch.Tensor) -> None:
            there = replace(case, host=host, k=list(sides[::2]), v=list(sides[1::2]))
            there.copy(there.pools(io_backend, library), to_host)

        sides = [tensor.clone() for pair in zip(case.k, case.v, strict=True) for tensor in pair]
        name = f"copy of pages {'to' if to_host else 'from'} the host, {layout}"
        operands = (case, to_host, case.host, *sides)
        yield Launch(name, Kernel(copy_pages.name, declared), operands, run, pinned=[case.host])


def _parts(case: PageCase, host: torch.Tensor, sides: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The operands of ``copy_pages``: for each layer, the pages of its keys and values on the device and on the
    host."""
    parts = []
    for number, side in enumerate(sides):
        layer, c = divmod(number, 2)
        there = host[:, layer, c] if case.layout == "page_first" else host[layer, c]
        parts += [side.view(-1, case.page_size, *side.shape[1:]), there]
        if case.layout == "layer_first":
            parts[-1] = there.view(-1, case.page_size, *there.shape[1:])
    return parts
