"""The CUDA package without a GPU: it compiles, and its headers' logic runs on the CPU under the real bindings."""

from __future__ import annotations

import ctypes
import os
import random
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import fenceline_kernel
import numpy as np
import pytest
import torch
from fenceline_kernel import FillField, FillPlan, KernelLibrary, KernelUnavailable, PagePools, library, pages
from fenceline_kernel.cache import (
    Sources,
    build_ahead,
    cache_folder,
    cache_key,
    compiled_library,
    find_sources,
    prebuilt_library,
)
from fenceline_kernel.fill import pad_pattern
from fenceline_kernel.toolchain import WHEEL_ARCHS, Nvcc, arch_of, check_driver, find_nvcc, runs_on
from kernel_package_cases import FillCase, PageCase, copy_launches, fill_launches, random_fill_case
from kernel_surroundings import check, check_forgetting
from page_pools import MIXED, Shape, bytes_of, device_pages, host_pages, make_pools

from fenceline.mem_cache.host.page_copy import CudaCopier
from fenceline.memory_order import open_device

PACKAGE = Path(__file__).resolve().parents[3] / "sgl-kernel"
UNITS = find_sources().units()


def nvcc_or_skip() -> Nvcc:
    try:
        return find_nvcc()
    except KernelUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same C ABI for CPU tensors: the headers compiled by the host compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: install g++")
    output = tmp_path_factory.mktemp("emulation") / "emulation.so"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    source = PACKAGE / "tests" / "host_emulation.cpp"
    subprocess.run([compiler, *flags, f"-I{PACKAGE / 'include'}", str(source), "-o", str(output)], check=True)
    return output


@pytest.fixture(scope="module")
def emulated(emulation: Path) -> KernelLibrary:
    """The package's functions over the emulation."""
    return KernelLibrary(lambda unit: emulation, "cpu")


@pytest.fixture(scope="module")
def counted(emulation: Path) -> ctypes.CDLL:
    """The emulation itself, for what only it tells."""
    return ctypes.CDLL(str(emulation))


# --- arena fill


@pytest.mark.parametrize("seed", range(60))
def test_fill_copies_live_rows_and_pads_the_rest(emulated: KernelLibrary, seed: int) -> None:
    case = random_fill_case(seed, "cpu")
    num_live = random.Random(seed).randint(0, case.max_live)
    FillPlan(case.fields, emulated).fill(num_live)
    case.check(num_live)


def test_fill_reads_the_number_of_live_rows_when_it_runs(emulated: KernelLibrary) -> None:
    case = random_fill_case(3, "cpu")
    num_live = torch.tensor([1])
    plan = FillPlan(case.fields, emulated)
    for value in (1, 0, case.max_live, 10**12, -5):
        num_live.fill_(value)
        plan.fill(num_live)
        case.check(min(max(value, 0), 10**6))


def test_fill_reads_no_row_that_the_source_does_not_have(emulated: KernelLibrary) -> None:
    """The rows behind it are somebody's: here they hold 9."""
    buffer, target = torch.full((8,), 9), torch.zeros(8, dtype=torch.int64)
    buffer[:5] = 1
    FillPlan([FillField(target, buffer[:5], -1)], emulated).fill(torch.tensor([8]))
    assert target.tolist() == [1] * 5 + [-1] * 3


def test_fill_is_one_launch(emulated: KernelLibrary, counted: ctypes.CDLL) -> None:
    fields = [FillField(torch.ones(8), torch.zeros(8), 2.0) for _ in range(32)]
    before = counted.emulation_num_launches()
    fenceline_kernel.arena_fill(fields, 3, library=emulated)
    assert counted.emulation_num_launches() == before + 1
    assert all(field.dst.tolist() == [0.0] * 3 + [2.0] * 5 for field in fields)


def test_fill_leaves_the_bytes_around_the_destination(emulated: KernelLibrary) -> None:
    buffer = torch.full((9, 3), 7, dtype=torch.int16)
    source = torch.arange(12, dtype=torch.int16).view(4, 3)
    FillPlan([FillField(buffer[2:7], source, -1)], emulated).fill(2)
    assert buffer.tolist() == [[7] * 3] * 2 + [[0, 1, 2], [3, 4, 5]] + [[-1] * 3] * 3 + [[7] * 3] * 2
    assert source.flatten().tolist() == list(range(12))


@pytest.mark.parametrize(
    ("pad", "dtype", "pattern"),
    [
        (-1, torch.int32, 0xFFFF_FFFF_FFFF_FFFF),
        (1, torch.int32, 0x0000_0001_0000_0001),
        (1, torch.int64, 1),
        (True, torch.bool, 0x0101_0101_0101_0101),
        (1.0, torch.bfloat16, 0x3F80_3F80_3F80_3F80),
        (1.0, torch.float64, 0x3FF0_0000_0000_0000),
    ],
)
def test_pad_patterns(pad: float, dtype: torch.dtype, pattern: int) -> None:
    assert pad_pattern(pad, dtype) == pattern


def bad_fields() -> dict[str, tuple[list[FillField], str]]:
    good = torch.zeros(4, 6, dtype=torch.int32)
    other = torch.zeros(4, 6, dtype=torch.int32)
    return {
        "none": ([], "1 to 32 fields, got 0"),
        "many": ([FillField(torch.zeros(1), None, 0)] * 33, "got 33: split them"),
        "dtype": ([FillField(good, other.long(), 0, "rows")], "rows: src is torch.int64, dst is torch.int32"),
        "strided": ([FillField(good.T, None, 0, "table")], "table: dst must be contiguous"),
        "scalar": ([FillField(torch.tensor(1), None, 0)], r"must be contiguous \[size, ...\]"),
        "wide": ([FillField(good, torch.zeros(4, 7, dtype=torch.int32), 0)], "rows must be alike"),
        "shape": ([FillField(good, torch.zeros(4, dtype=torch.int32), 0)], "rows must be alike"),
        "columns": ([FillField(good, torch.zeros(6, 4, dtype=torch.int32).T, 0)], r"call contiguous\(\)"),
        "pad": ([FillField(good, None, 2**31, "ids")], "ids: pad 2147483648 is no torch.int32"),
        "pad type": ([FillField(good, None, 0.5)], "pad 0.5 is no torch.int32"),
        "bool": ([FillField(good.bool(), None, 2)], "pad 2 is no torch.bool"),
        "complex": ([FillField(torch.zeros(2, dtype=torch.complex64), None, 0)], "view it as a smaller dtype"),
        "self": ([FillField(good, good, 0, "plan")], "plan: src overlaps the destination plan"),
        "chain": ([FillField(good, None, 0), FillField(other, good[1:], 0, "b")], "b: src overlaps"),
        "twice": (
            [FillField(good, None, 0), FillField(good[3:], None, 0, "b")],
            "b: its memory overlaps another destination",
        ),
    }


@pytest.mark.parametrize("name", bad_fields())
def test_fields_that_cannot_be_filled_are_refused(emulated: KernelLibrary, name: str) -> None:
    fields, message = bad_fields()[name]
    with pytest.raises(ValueError, match=message):
        FillPlan(fields, emulated)


def test_plan_takes_other_sources_and_checks_them_too(emulated: KernelLibrary) -> None:
    """A ring's slots take turns; the destinations and pads stay."""
    tables, ids = torch.zeros(4, 6, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    plan = FillPlan([FillField(tables, None, -1, "tables"), FillField(ids, torch.ones(4).long(), 5, "ids")], emulated)
    for width in (2, 6, 1):
        plan.fill(3, [torch.full((3, width), width, dtype=torch.int32), None])
        assert tables.tolist() == [[width] * width + [-1] * (6 - width)] * 3 + [[-1] * 6]
        assert ids.tolist() == [5] * 4
    plan.fill(2)
    assert (tables.tolist(), ids.tolist()) == ([[-1] * 6] * 4, [1, 1, 5, 5])
    with pytest.raises(ValueError, match="num_live is 4, these fields take 0 to 3"):
        plan.fill(4, [None, torch.zeros(3).long()])
    with pytest.raises(ValueError, match="tables: src overlaps the destination tables"):
        plan.fill(1, [tables[1:], None])
    with pytest.raises(ValueError, match="ids: src overlaps the destination tables"):
        plan.fill(1, [None, tables.view(torch.int64)[3]])
    with pytest.raises(ValueError, match="1 sources for 2 fields"):
        plan.fill(1, [None])


def test_two_fields_may_share_a_source(emulated: KernelLibrary) -> None:
    """Overlap is refused where something is written, not where two only read."""
    source = torch.arange(5)
    first, second = torch.zeros(5, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    fenceline_kernel.arena_fill([FillField(first, source, 9), FillField(second, source[1:], 9)], 3, library=emulated)
    assert (first.tolist(), second.tolist()) == ([0, 1, 2, 9, 9], [1, 2, 3, 9])


def test_numbers_of_live_rows_that_do_not_fit_are_refused(emulated: KernelLibrary) -> None:
    plan = FillPlan([FillField(torch.zeros(8), torch.zeros(5), 0)], emulated)
    for bad in (-1, 6):
        with pytest.raises(ValueError, match=f"num_live is {bad}, these fields take 0 to 5"):
            plan.fill(bad)
    with pytest.raises(ValueError, match="one int64 on cpu"):
        plan.fill(torch.tensor([1], dtype=torch.int32))


# --- page copy

IO_BACKENDS = ("kernel", "direct")
LAYOUTS = ("layer_first", "page_first")


def page_list(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


@pytest.mark.parametrize("io_backend", IO_BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(12))
def test_pages_travel_both_ways_and_nothing_else_changes(
    emulated: KernelLibrary, io_backend: str, layout: str, seed: int
) -> None:
    case = PageCase.random(seed, layout, "cpu")
    pools = case.pools(io_backend, emulated)
    case.check_to_host(pools)
    case.check_to_device(pools)


@pytest.mark.parametrize("io_backend", IO_BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_some_layers_alone(emulated: KernelLibrary, io_backend: str, layout: str) -> None:
    case = PageCase.random(7, layout, "cpu", num_layers=6, heads=(2, 4))
    pools = case.pools(io_backend, emulated)
    for layers in (range(2, 4), range(1), range(5, 6), range(6)):
        case.check_to_host(pools, layers)
        case.check_to_device(pools, layers)


@pytest.mark.parametrize("io_backend", IO_BACKENDS)
@pytest.mark.parametrize("to_host", [True, False])
def test_pages_out_of_bounds_are_refused_and_nothing_is_copied(
    emulated: KernelLibrary, io_backend: str, to_host: bool
) -> None:
    case = PageCase.random(1, "page_first", "cpu")
    pools = case.pools(io_backend, emulated)
    before = [tensor.clone() for tensor in (case.host, *case.k, *case.v)]
    for pair in ((pools.num_device_pages, 0), (-1, 0), (0, pools.num_host_pages), (0, -(2**31))):
        words = f"pair 1 is device page {pair[0]} of {pools.num_device_pages} and host page {pair[1]} of"
        with pytest.raises(ValueError, match=words):
            pools.copy(page_list(1, pair[0]), page_list(1, pair[1]), to_host=to_host)
    assert all(torch.equal(a, b) for a, b in zip((case.host, *case.k, *case.v), before, strict=True))


@pytest.mark.parametrize(("num_pages", "num_launches"), [(0, 0), (240, 1), (241, 1), (3824, 1), (3825, 2), (7649, 3)])
def test_long_lists_take_several_launches(
    emulated: KernelLibrary, counted: ctypes.CDLL, num_pages: int, num_launches: int
) -> None:
    pool, host = [torch.arange(8000.0).view(8000, 1, 1)], torch.zeros(8000, 1, 2, 1, 1, 1)
    pools = PagePools(pool, pool, host, 1, "page_first", library=emulated)
    order = np.random.default_rng(0).permutation(8000).astype(np.int32)
    taken, given_to = order[:num_pages], order[::-1][:num_pages].copy()
    before = counted.emulation_num_launches()
    pools.copy(taken, given_to, to_host=True)
    assert counted.emulation_num_launches() == before + num_launches
    expected = torch.zeros(8000)
    expected[torch.from_numpy(given_to).long()] = torch.from_numpy(taken).float()
    assert torch.equal(host[:, 0, 0].flatten(), expected)
    assert torch.equal(host[:, 0, 1].flatten(), expected)


def test_more_layers_than_one_launch_takes(emulated: KernelLibrary, counted: ctypes.CDLL) -> None:
    case = PageCase.random(2, "layer_first", "cpu", num_layers=130, heads=(1, 8))
    before = counted.emulation_num_launches()
    case.check_to_host(case.pools("kernel", emulated))
    assert counted.emulation_num_launches() == before + 2


@pytest.mark.parametrize(
    ("layout", "min_rows", "plain", "strided"),
    [
        ("layer_first", 1, 6 * 4, 0),  # one copy for each run, layer and side
        ("page_first", 100, 6 * 9, 0),  # one for each page, layer and side
        ("page_first", 4, 6 * 5, 6 * 1),  # the run of four is one strided copy for each layer and side
        ("page_first", 3, 6 * 2, 6 * 2),
        ("page_first", 1, 6 * 2, 6 * 2),  # a single page has nothing to stride over
    ],
)
def test_the_copy_engine_takes_pages_in_a_row_together(
    emulated: KernelLibrary, counted: ctypes.CDLL, layout: str, min_rows: int, plain: int, strided: int
) -> None:
    case = PageCase.random(0, layout, "cpu", num_layers=3, page_size=2)
    case.k, case.v = ([torch.rand(40, 2, 4) for _ in range(3)] for _ in range(2))
    case.host = torch.zeros((3, 2, 40, 2, 4) if layout == "layer_first" else (20, 3, 2, 2, 2, 4))
    case.device_pages = page_list(3, 4, 5, 6, 9, 10, 11, 1, 0)  # runs: 4 pages, 3 pages, one, one
    case.host_pages = page_list(0, 1, 2, 3, 4, 5, 6, 8, 9)
    case.min_rows = min_rows
    before = counted.emulation_num_plain(), counted.emulation_num_strided()
    case.check_to_host(case.pools("direct", emulated))
    assert counted.emulation_num_plain() - before[0] == plain
    assert counted.emulation_num_strided() - before[1] == strided


@pytest.mark.parametrize(
    ("layout", "layers", "strided", "plain"),
    [
        ("layer_first", None, 4, 0),  # one for each run, in which pages lie side by side on both sides
        ("page_first", None, 9, 0),  # one for each page
        ("layer_first", range(1, 2), 0, 4 * 2),  # the two pieces of one layer are not worth a strided copy
    ],
)
def test_layers_that_lie_evenly_apart_travel_together(
    emulated: KernelLibrary, counted: ctypes.CDLL, layout: str, layers: range | None, strided: int, plain: int
) -> None:
    case = PageCase.random(0, layout, "cpu", num_layers=3, page_size=2)
    pool = torch.rand(6, 40, 2, 4)
    case.k, case.v = list(pool[::2]), list(pool[1::2])
    case.host = torch.zeros((3, 2, 40, 2, 4) if layout == "layer_first" else (20, 3, 2, 2, 2, 4))
    case.device_pages = page_list(3, 4, 5, 6, 9, 10, 11, 1, 0)  # runs: 4 pages, 3 pages, one, one
    case.host_pages = page_list(0, 1, 2, 3, 4, 5, 6, 8, 9)
    case.min_rows = 4
    before = counted.emulation_num_plain(), counted.emulation_num_strided()
    case.check_to_host(case.pools("direct", emulated), layers)
    assert counted.emulation_num_plain() - before[0] == plain
    assert counted.emulation_num_strided() - before[1] == strided
    case.check_to_device(case.pools("direct", emulated))


@pytest.mark.parametrize("io_backend", IO_BACKENDS)
def test_target_and_draft_share_a_host_buffer(emulated: KernelLibrary, io_backend: str) -> None:
    """Two pools of different depth, each a view of the layers of one page_first buffer."""
    host = torch.zeros(5, 7, 2, 4, 2, 8)
    lists = page_list(3, 1), page_list(0, 4)
    for layers, value in ((slice(0, 5), 1.0), (slice(5, 7), 2.0)):
        pool = [torch.full((16, 2, 8), value) for _ in range(layers.stop - layers.start)]
        pools = PagePools(pool, pool, host[:, layers], 4, "page_first", io_backend, emulated)  # type: ignore[arg-type]
        pools.copy(*lists, to_host=True)
    assert host.mean(dim=(2, 3, 4, 5)).tolist() == [
        [1.0] * 5 + [2.0] * 2 if p in (0, 4) else [0.0] * 7 for p in range(5)
    ]


@pytest.mark.parametrize("io_backend", IO_BACKENDS)
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_the_engines_copier_takes_layers_that_differ(emulated: KernelLibrary, io_backend: str, layout: str) -> None:
    """Ranges of layers that are alike by the kernels, what they do not take by torch: every byte, and no other."""
    device = open_device("cpu")
    kv_pool, host_pool = make_pools(device, layout, Shape(layers=MIXED))  # type: ignore[arg-type]
    copier = CudaCopier(device, kv_pool, host_pool, io_backend, emulated)  # type: ignore[arg-type]
    before, expected = device_pages(kv_pool), host_pages(host_pool)
    taken, there = page_list(3, 4, 5, 9), page_list(7, 8, 14, 0)
    expected[there] = before[taken]
    copier.to_host(device.store, taken, there)
    assert torch.equal(host_pages(host_pool), expected)
    for layers in (range(1), range(1, 5), range(5, 7)):
        copier.to_device(device.load, there, page_list(1, 2, 11, 10), layers)
        moved = bytes_of(kv_pool.layout, layers)
        before[[1, 2, 11, 10], moved] = expected[there, moved]
        assert torch.equal(device_pages(kv_pool), before)


@pytest.mark.parametrize("io_backend", IO_BACKENDS)
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_layers_that_are_alike_are_one_call_with_strides(
    emulated: KernelLibrary, io_backend: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, shape = open_device("cpu"), Shape()
    kv_pool, host_pool = make_pools(device, layout, shape)  # type: ignore[arg-type]
    calls = []
    copy = PagePools.copy

    def recording(self: PagePools, *args: object, **named: object) -> None:
        strides = self.host_page_stride, self.host_layer_stride, self.host_kv_stride, self.chunk_bytes
        calls.append((strides, named.get("layers"), self._tensors[0].data_ptr(), self.host.data_ptr()))
        copy(self, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(PagePools, "copy", recording)
    copier = CudaCopier(device, kv_pool, host_pool, io_backend, emulated)  # type: ignore[arg-type]
    copier.to_host(device.store, page_list(3, 4), page_list(7, 8))
    for layer in range(3):
        copier.to_device(device.load, page_list(7, 8), page_list(1, 2), range(layer, layer + 1))
    part = 4 * 2 * 8 * 2
    strides = (part, 30 * part, 15 * part, part) if layout == "layer_first" else (6 * part, 2 * part, part, part)
    ends = kv_pool.row(0, "k").data_ptr(), host_pool.buffer.data_ptr()
    layers = [None, range(1), range(1, 2), range(2, 3)]
    assert calls == [(strides, some, *ends) for some in layers]


def test_pools_that_do_not_fit_are_refused(emulated: KernelLibrary) -> None:
    pool, host = [torch.zeros(8, 2, 4)] * 3, torch.zeros(3, 2, 12, 2, 4)
    refused = (
        (pool[:2], host, 4, "layer_first", "one tensor for each layer"),
        (pool, host, 3, "layer_first", r"k must be \[num_pages \* 3"),
        (pool, host, 4, "page_first", "page_first host memory must be"),
        (pool, host[:, :, :10], 4, "layer_first", "layer_first host memory must be"),
        (pool, host.transpose(3, 4).contiguous().transpose(3, 4), 4, "layer_first", "contiguous slots"),
        (pool, host.double(), 4, "layer_first", "make them equal"),
        (pool, host, 4, "token_first", "use layer_first or page_first"),
        ([torch.zeros(8, 4, 4)[:, ::2]] * 3, host, 4, "layer_first", "must be contiguous"),
    )
    for k, memory, page_size, layout, message in refused:
        with pytest.raises(ValueError, match=message):
            PagePools(k, pool, memory, page_size, layout, "kernel", emulated)  # type: ignore[arg-type]


def test_page_lists_that_do_not_fit_are_refused(emulated: KernelLibrary) -> None:
    pools = PageCase.random(0, "page_first", "cpu").pools("kernel", emulated)
    one = page_list(0)
    refused = (
        (one.astype(np.int64), one, {}, "device_pages must be contiguous int32"),
        (one, one.astype(np.float32), {}, "host_pages must be contiguous int32"),
        (one[None], one, {}, "device_pages must be contiguous int32"),
        (one, page_list(0, 1), {}, "1 device pages but 2 host pages"),
        (page_list(0, 0, 0, 0)[::2], page_list(0, 1), {}, "device_pages must be contiguous"),
        (one, one, {"layers": range(99)}, "give a range within"),
        (one, one, {"layers": range(0)}, "give a range within"),
        (one, one, {"layers": range(0, 1, 2)}, "give a range within"),
        (one, one, {"num_ctas": 0}, "give 1 to 1024"),
        (one, one, {"min_rows": 0}, "give 1 or more"),
    )
    for device, host, options, message in refused:
        with pytest.raises(ValueError, match=message):
            pools.copy(device, host, to_host=True, **options)


# --- headers


def test_fast_division_is_division(counted: ctypes.CDLL) -> None:
    quotient = counted.emulation_quotient
    draw = random.Random(0)
    divisors = [1, 2, 3, 5, 7, 72, 2**16 - 1, 2**30 + 1, 2**31 - 1, *(draw.randrange(1, 2**31) for _ in range(300))]
    for divisor in divisors:
        near = [k * divisor + d for k in (0, 1, 2, (2**31 - 1) // divisor) for d in (-1, 0, 1)]
        for n in (*near, 2**31 - 1, draw.randrange(2**31)):
            if 0 <= n < 2**31:
                assert quotient(n, divisor) == n // divisor, (n, divisor)


def test_widest_unit(counted: ctypes.CDLL) -> None:
    widest = counted.emulation_widest_unit
    widest.argtypes = (ctypes.c_uint64,)
    assert [widest(bits) for bits in (0, 2**40, 16 | 48, 8 | 64, 4 | 8, 6, 1 | 16)] == [16, 16, 16, 8, 4, 2, 1]


def test_headers_know_nothing_of_torch() -> None:
    for header in (PACKAGE / "include").rglob("*.h"):
        includes = [line for line in header.read_text().splitlines() if line.startswith("#include")]
        assert not any(word in line for line in includes for word in ("torch", "ATen", "c10", "Python.h")), header


# --- compiler and cache


def test_architectures() -> None:
    assert [arch_of(capability) for capability in ((8, 0), (8, 9), (9, 0), (10, 0))] == ["80", "89", "90a", "100"]
    runs = [c for c in ((7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (10, 3), (12, 0)) if runs_on(WHEEL_ARCHS, c)]
    assert runs == [(8, 0), (8, 6), (9, 0), (10, 0), (10, 3)]


def fake_nvcc(folder: Path, body: str) -> Nvcc:
    """A compiler that is a shell script; ``$out`` is what it is asked to make."""
    path = folder / "bin" / "nvcc"
    path.parent.mkdir(parents=True, exist_ok=True)
    find_out = 'all="$*"; while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done\n'
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo release 13.0 && exit 0\n{find_out}{body}\n')
    path.chmod(0o755)
    return Nvcc(path, "release 13.0")


def test_a_compiler_newer_than_the_driver_is_refused() -> None:
    newer = Nvcc(Path("/cuda/bin/nvcc"), "Cuda compilation tools, release 13.0, V13.0.48")
    with pytest.raises(KernelUnavailable, match=r"nvcc is of CUDA 13, the driver of CUDA 12\.8: update the driver"):
        check_driver(newer, 12080)
    for fine in (13000, 13020, 14000, None):
        check_driver(newer, fine)
    check_driver(Nvcc(Path("nvcc"), "says nothing of itself"), 12080)


def test_compiler_is_found_or_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = fake_nvcc(tmp_path, "exit 0").path
    assert find_nvcc({"CUDA_HOME": str(tmp_path), "PATH": ""}) == Nvcc(compiler, "release 13.0")
    assert find_nvcc({"PATH": str(compiler.parent)}).path == compiler
    with pytest.raises(KernelUnavailable, match="CUDA_HOME is set but .*/absent/bin/nvcc is no program"):
        find_nvcc({"CUDA_HOME": str(tmp_path / "absent"), "PATH": str(compiler.parent)})
    monkeypatch.setattr("fenceline_kernel.toolchain._candidates", lambda environ: [tmp_path / "none"])
    with pytest.raises(KernelUnavailable, match="install the CUDA 13 toolkit and set CUDA_HOME") as error:
        find_nvcc({})
    assert "\n" not in str(error.value)


def test_cache_folder_respects_xdg(tmp_path: Path) -> None:
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "fenceline" / "kernels"
    for environ in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert cache_folder(environ) == Path.home() / ".cache" / "fenceline" / "kernels"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(KernelUnavailable, match="set XDG_CACHE_HOME"):
        cache_folder({})
    assert cache_folder({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/fenceline/kernels")


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    texts = {"csrc/a.cu": '#include "near.cuh"\n', "csrc/b.cu": "", "csrc/near.cuh": '# include "fenceline/far.h"\n'}
    for name, text in {**texts, "include/fenceline/far.h": "#include <cstdint>\n"}.items():
        path = tmp_path / "sources" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Sources(tmp_path / "sources")


def test_cache_key_depends_on_all_that_matters(sources: Sources, tmp_path: Path) -> None:
    def key(version: str = "13.0", archs: tuple[str, ...] = ("90a",), path: str = "/a/nvcc") -> str:
        return cache_key(sources, "a", Nvcc(Path(path), version), archs)

    first = key()
    assert key(path="/b/nvcc") == first
    shutil.copytree(sources.root, tmp_path / "copy")
    assert cache_key(Sources(tmp_path / "copy"), "a", Nvcc(Path("nvcc"), "13.0"), ("90a",)) == first
    for name in ("csrc/b.cu", "include/fenceline/other.h"):  # no part of unit a
        (sources.root / name).write_text("// changed")
    assert key() == first
    seen = {first, key("13.1"), key(archs=("80",)), key(archs=("80", "90a"))}
    for name in ("include/fenceline/far.h", "csrc/near.cuh", "csrc/a.cu"):
        with open(sources.root / name, "a") as file:
            file.write("// changed")
        seen.add(key())
    assert len(seen) == 7


def test_real_units_depend_on_their_headers() -> None:
    """The closure finds what the compiler finds: each unit changes with its own header and not with its neighbour's."""
    files = {unit: {path.name for path in find_sources()._closure(find_sources().unit_file(unit))} for unit in UNITS}
    assert {"arena_fill.cu", "launch.cuh", "abi.h", "common.h", "arena_fill.h"} <= files["arena_fill"]
    assert {"page_copy.cu", "launch.cuh", "page_copy.h"} <= files["page_copy"]
    assert {"page_direct.cu", "page_direct.h", "page_copy.h"} <= files["page_direct"]
    assert "page_direct.h" not in files["page_copy"]
    assert "skinny_gemm.h" not in files["arena_fill"] | files["page_copy"]


# One process that compiles: torch, which the package's front door imports, would take seconds.
COMPILE_ONCE_TOLD = """
import sys, types
package = types.ModuleType("fenceline_kernel")
package.__path__ = [sys.argv[1]]
sys.modules["fenceline_kernel"] = package
from pathlib import Path
from fenceline_kernel.cache import Sources, compiled_library
from fenceline_kernel.toolchain import Nvcc
print("ready", flush=True)
sys.stdin.readline()
library = compiled_library(Sources(Path(sys.argv[2])), "a", Nvcc(Path(sys.argv[3]), ""), ["90a"], Path(sys.argv[4]))
print(library.read_text())
"""


def test_processes_that_start_at_once_compile_once(sources: Sources, tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "cache"
    nvcc = fake_nvcc(tmp_path, f'echo compiled >> {log}; printf li > "$out"; sleep 0.3; printf brary >> "$out"')
    modules = PACKAGE / "python" / "fenceline_kernel"
    command = [sys.executable, "-c", COMPILE_ONCE_TOLD, modules, sources.root, nvcc.path, folder]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.communicate(timeout=60)[0] for process in processes] == ["library\n"] * 4
    assert log.read_text() == "compiled\n"
    assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".so"]


def test_failed_compilation_tells_the_first_error(sources: Sources, tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path, 'touch "$out"; echo "a.cu(3): warning: w"; echo "a.cu(7): error: x" >&2; exit 2')
    with pytest.raises(KernelUnavailable, match=r"nvcc failed: a\.cu\(7\): error: x$"):
        compiled_library(sources, "a", nvcc, ["90a"], tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_cache_that_cannot_be_written_is_told_with_the_remedy(sources: Sources, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelUnavailable, match="cannot be written .*: set XDG_CACHE_HOME"):
        compiled_library(sources, "a", Nvcc(Path("nvcc"), ""), ["90a"], tmp_path / "file" / "cache")


def test_library_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_text("no library")
    with pytest.raises(KernelUnavailable, match=r"broken\.so cannot be loaded"):
        KernelLibrary(lambda unit: tmp_path / "broken.so")


def test_what_was_built_ahead_is_used_for_its_sources_alone(sources: Sources, tmp_path: Path) -> None:
    folder = tmp_path / "_lib"
    assert prebuilt_library(sources, "a", (9, 0), folder) is None
    build_ahead(sources, fake_nvcc(tmp_path, 'touch "$out"'), ("80", "90a"), folder)
    assert [prebuilt_library(sources, unit, (9, 0), folder) for unit in "ab"] == [folder / "a.so", folder / "b.so"]
    assert prebuilt_library(sources, "a", (8, 6), folder) == folder / "a.so"
    assert prebuilt_library(sources, "a", (10, 0), folder) is None
    (sources.root / "csrc" / "near.cuh").write_text("// changed")
    assert prebuilt_library(sources, "a", (9, 0), folder) is None
    assert prebuilt_library(sources, "b", (9, 0), folder) == folder / "b.so"


def test_available_says_no_without_raising_and_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not fenceline_kernel.available()
    assert "torch sees no NVIDIA GPU" in (fenceline_kernel.why_unavailable() or "")


def test_missing_compiler_makes_the_kernels_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def no_compiler() -> Nvcc:
        asked.append(1)
        raise KernelUnavailable("nvcc was not found")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 7))
    monkeypatch.setattr(library, "find_nvcc", no_compiler)
    monkeypatch.setattr(library, "PREBUILT", Path("/nonexistent"))
    library._load.cache_clear()
    try:
        assert fenceline_kernel.why_unavailable() == "nvcc was not found"
        assert not fenceline_kernel.available()
        with pytest.raises(KernelUnavailable, match="nvcc was not found"):
            FillPlan([FillField(torch.zeros(1), None, 0)])
        assert asked == [1]
    finally:
        library._load.cache_clear()


# --- nvcc itself, and the wheel


class _QuickNvcc(Nvcc):
    """Optimises little, which takes less than half the time and refuses the same sources."""

    def command(self, archs: Sequence[str], include: Path, source: Path, output: Path) -> list[str]:
        program, *rest = Nvcc.command(self, archs, include, source, output)
        return [program, "-Xcicc", "-O1", "-Xptxas", "-O1", *rest]


def quick_nvcc() -> Nvcc:
    found = nvcc_or_skip()
    return _QuickNvcc(found.path, found.version)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)  # on a busy machine the tensor-core kernels take nvcc minutes
@pytest.mark.parametrize("unit", UNITS)
def test_unit_compiles_for_every_architecture(unit: str) -> None:
    """Machine code for sm_80, sm_90a and sm_100, on a machine that need have no GPU; again only when sources, compiler
    or flags change: the cache is the user's."""
    compiled = compiled_library(find_sources(), unit, quick_nvcc(), WHEEL_ARCHS, cache_folder())
    assert ctypes.CDLL(str(compiled))


@pytest.mark.slow
def test_compiled_functions_answer_through_the_bindings() -> None:
    nvcc, folder = quick_nvcc(), cache_folder()
    kernels = KernelLibrary(lambda unit: compiled_library(find_sources(), unit, nvcc, WHEEL_ARCHS, folder), "cpu")
    with pytest.raises(RuntimeError, match="arena_fill: num_live is negative"):
        kernels.arena_fill(bytes(48), 1, -1, None, torch.device("cpu"), 0)
    pool, host = [torch.zeros(4, 1, 1)], torch.zeros(4, 1, 2, 1, 1, 1)
    for io_backend in IO_BACKENDS:
        pools = PagePools(pool, pool, host, 1, "page_first", io_backend, kernels)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="pair 1 is device page 4 of 4 and host page 0 of 4"):
            pools.copy(page_list(0, 4), page_list(0, 0), to_host=True)
        request = pages.PageCopyRequestC(num_layers=1, chunk_bytes=1)
        assert pools._function(ctypes.byref(request), 0) == b"num_ctas is 1 to 1024"


def build_wheel(folder: Path, cuda_home: Path) -> Path:
    """pip wheel of a copy of the package: a build leaves folders beside its sources."""
    checkout = folder / "sgl-kernel"
    shutil.copytree(PACKAGE, checkout, ignore=shutil.ignore_patterns("build", "_lib", "*.egg-info", "__pycache__"))
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(checkout)]
    subprocess.run(command, env={**os.environ, "CUDA_HOME": str(cuda_home)}, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return wheel


def test_wheel_without_a_compiler_carries_the_sources(tmp_path: Path) -> None:
    assert build_wheel(tmp_path, tmp_path / "none").name.endswith("-py3-none-any.whl")
    carried = Sources(tmp_path / "site" / "fenceline_kernel" / "_src")
    assert [carried.digest(unit) for unit in UNITS] == [find_sources().digest(unit) for unit in UNITS]


def test_wheel_with_a_compiler_carries_every_library(tmp_path: Path) -> None:
    log = tmp_path / "log"
    fake_nvcc(tmp_path / "cuda", f'echo "$0 $all" >> {log}; echo library > "$out"')
    wheel = build_wheel(tmp_path, tmp_path / "cuda")
    assert re.search(r"-py3-none-(?!any)\w+\.whl$", wheel.name)
    carried, folder = (Sources(tmp_path / "site/fenceline_kernel/_src"), tmp_path / "site/fenceline_kernel/_lib")
    for unit in UNITS:
        for capability in ((8, 0), (9, 0), (10, 0)):
            found = prebuilt_library(carried, unit, capability, folder)
            assert found is not None
            assert found.read_text() == "library\n"
    assert log.read_text().count("code=sm_90a") == len(UNITS)


def test_cases_are_not_trivial() -> None:
    """The random cases reach every access width, narrower sources and strided rows."""
    fields = [field for seed in range(60) for field in random_fill_case(seed, "cpu").fields]
    assert {field.dst.element_size() for field in fields} == {1, 2, 4, 8}
    sourced = [field for field in fields if field.src is not None]
    assert any(field.src is None for field in fields)
    assert any(f.src is not None and f.src.dim() == 2 and f.src.shape[1] < f.dst.shape[1] for f in sourced)
    assert any(f.src is not None and not f.src.is_contiguous() for f in sourced)
    assert isinstance(random_fill_case(0, "cpu"), FillCase)


# --- what the kernels declare


def test_fills_touch_what_they_declare(emulated: KernelLibrary) -> None:
    for launch in fill_launches(emulated):
        check(launch)
        check_forgetting([launch])


@pytest.mark.parametrize("io_backend", ["kernel", "direct"])
def test_page_copies_touch_what_they_declare(emulated: KernelLibrary, io_backend: str) -> None:
    for launch in copy_launches(emulated, io_backend):
        check(launch)
        check_forgetting([launch])
