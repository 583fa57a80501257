"""PageCopier on the CPU and on the virtual GPU: the pages named become equal, and no other byte changes."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from page_pools import MIXED, Shape, bytes_of, device_pages, host_pages, make_pools

from fenceline.config.hicache import IoBackend
from fenceline.config.kv_layout import KVRow
from fenceline.config.server_args import MemLayout
from fenceline.mem_cache.host.page_copy import PageCopier, Run, RunCopier, make_page_copier, runs_of
from fenceline.memory_order import open_device
from fenceline.memory_order.access import occupies_sm
from fenceline.memory_order.edges import StreamName
from fenceline_sim import RaceError, VgpuDevice, VirtualGpu

LAYOUTS: tuple[MemLayout, ...] = ("layer_first", "page_first")


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


@st.composite
def page_lists(draw: st.DrawFn, size: int) -> list[int]:
    """Distinct pages below ``size``, often with runs."""
    numbers = draw(st.permutations(range(size)))
    if draw(st.booleans()):
        start = draw(st.integers(0, size - 1))
        run = list(range(start, min(start + draw(st.integers(1, size)), size)))
        numbers = run + [number for number in numbers if number not in run]
    return numbers[: draw(st.integers(0, size))]


@given(page_lists(12), page_lists(15))
def test_runs_are_the_pairs_in_order_and_as_few_as_can_be(device: list[int], host: list[int]) -> None:
    n = min(len(device), len(host))
    runs = list(runs_of(pages(*device[:n]), pages(*host[:n])))
    pairs = [(run.device_page + i, run.host_page + i) for run in runs for i in range(run.num_pages)]
    assert pairs == list(zip(device[:n], host[:n], strict=True))
    for before, after in zip(runs, runs[1:], strict=False):
        ends = (before.device_page + before.num_pages, before.host_page + before.num_pages)
        assert ends != (after.device_page, after.host_page)


def test_a_run_breaks_where_either_side_does() -> None:
    assert list(runs_of(pages(1, 2, 3, 4, 9), pages(5, 6, 8, 9, 10))) == [Run(1, 5, 2), Run(3, 8, 2), Run(9, 10, 1)]
    assert list(runs_of(pages(3, 2, 1), pages(3, 2, 1))) == [Run(3, 3, 1), Run(2, 2, 1), Run(1, 1, 1)]


@settings(deadline=None, max_examples=30)
@given(
    layout=st.sampled_from(LAYOUTS),
    strided=st.booleans(),
    device=page_lists(12),
    host=page_lists(15),
    bounds=st.tuples(st.integers(0, 7), st.integers(0, 7)),
    page_size=st.sampled_from([1, 4]),
    layers=st.sampled_from([(), MIXED]),
)
def test_random_lists_both_ways(
    layout: MemLayout,
    strided: bool,
    device: list[int],
    host: list[int],
    bounds: tuple[int, int],
    page_size: int,
    layers: tuple[tuple[KVRow, ...], ...],
) -> None:
    cpu = open_device("cpu")
    kv_pool, host_pool = make_pools(cpu, layout, Shape(page_size=page_size, layers=layers))
    copier = RunCopier(cpu, kv_pool, host_pool, uses_sm=False, strided=strided)
    n = min(len(device), len(host))
    before, expected = device_pages(kv_pool), host_pages(host_pool)
    expected[host[:n]] = before[device[:n]]
    copier.to_host(cpu.copy, pages(*device[:n]), pages(*host[:n]))
    assert torch.equal(host_pages(host_pool), expected)
    assert torch.equal(device_pages(kv_pool), before)
    some = range(*(min(bound, kv_pool.num_layers) for bound in sorted(bounds)))
    there = device[::-1][:n]  # other pages than they came from
    wanted = before.clone()
    moved = bytes_of(kv_pool.layout, some)
    for at, page in zip(there, host[:n], strict=True):
        wanted[at, moved] = expected[page, moved]
    copier.to_device(cpu.copy, pages(*host[:n]), pages(*there), some)
    assert torch.equal(device_pages(kv_pool), wanted)
    assert torch.equal(host_pages(host_pool), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lists_that_do_not_fit_are_refused_and_nothing_is_copied(layout: MemLayout) -> None:
    cpu = open_device("cpu")
    kv_pool, host_pool = make_pools(cpu, layout, Shape())
    copier = make_page_copier(cpu, kv_pool, host_pool, "direct")
    before = device_pages(kv_pool), host_pages(host_pool)
    for device, host, words in (
        (pages(1, 12), pages(1, 2), r"device pages 1\.\.12 are not all in 0\.\.11"),
        (pages(1, -1), pages(1, 2), r"device pages -1\.\.1 are"),
        (pages(1, 2), pages(15, 1), r"host pages 1\.\.15 are not all in 0\.\.14"),
        (pages(1, 2), pages(1), "2 device pages but 1 host pages"),
    ):
        with pytest.raises(ValueError, match=words):
            copier.to_host(cpu.copy, device, host)
        with pytest.raises(ValueError, match=words):
            copier.to_device(cpu.copy, host, device, range(3))
    assert torch.equal(device_pages(kv_pool), before[0])
    assert torch.equal(host_pages(host_pool), before[1])


def test_the_io_backend_decides_who_uses_the_sms() -> None:
    cpu = open_device("cpu")
    pools = make_pools(cpu, "page_first", Shape())
    assert make_page_copier(cpu, *pools, "kernel").uses_sm
    assert not make_page_copier(cpu, *pools, "direct").uses_sm


# --- on the virtual GPU


def test_a_copy_by_sms_is_one_launch_for_the_pages_named() -> None:
    """Other pages may be used on other streams meanwhile; those named may not, on either side."""
    for busy, raced in ((3, False), (2, True)):
        device = virtual("random", 0)
        kv_pool, host_pool = make_pools(device, "page_first", Shape())
        copier = make_page_copier(device, kv_pool, host_pool, "kernel")
        device.synchronize()
        with device.load.active():
            kv_pool.parts[0][busy] = 1
        copier.to_host(device.store, pages(2, 5), pages(3, 4))
        device.host_access(host_pool.parts[0][5:6], True, "another page")
        if raced:
            with pytest.raises(RaceError, match=r"2\. copy_pages reads it on store"):
                device.synchronize()
        else:
            device.synchronize()
            copier.to_host(device.store, pages(2, 5), pages(3, 4))
            with pytest.raises(RaceError, match=r"1\. copy_pages writes it on store"):
                device.host_access(host_pool.parts[0][4:5], False, "this page")
                device.synchronize()


def virtual(policy: str, seed: int) -> VgpuDevice:
    return VgpuDevice(gpu=VirtualGpu(policy=policy, seed=seed))


@pytest.mark.parametrize("io_backend", ["kernel", "direct"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("policy", "seed"), [("random", 0), ("random", 1), ("laziest", 0)])
def test_the_virtual_gpu_reads_lists_at_the_call_bytes_later(
    layout: MemLayout, policy: str, seed: int, io_backend: IoBackend
) -> None:
    device = virtual(policy, seed)
    kv_pool, host_pool = make_pools(device, layout, Shape())
    copier = make_page_copier(device, kv_pool, host_pool, io_backend)
    before, expected = device_pages(kv_pool), host_pages(host_pool)
    taken, given_to = pages(3, 4, 5, 9), pages(0, 1, 2, 14)
    expected[given_to] = before[taken]
    copier.to_host(device.store, taken, given_to)
    taken[:], given_to[:] = 0, 0
    device.synchronize()
    assert torch.equal(host_pages(host_pool), expected)
    back = pages(7, 8, 2, 1)
    for layer in range(3):
        copier.to_device(device.load, pages(0, 1, 2, 14), back, range(layer, layer + 1))
    before[back] = expected[[0, 1, 2, 14]]
    device.synchronize()
    assert torch.equal(device_pages(kv_pool), before)


@pytest.mark.parametrize("io_backend", ["kernel", "direct"])
def test_the_virtual_gpu_sees_a_store_that_does_not_wait(io_backend: IoBackend) -> None:
    device = virtual("random", 0)
    kv_pool, host_pool = make_pools(device, "page_first", Shape())
    copier: PageCopier = make_page_copier(device, kv_pool, host_pool, io_backend)
    with device.forward.active():
        kv_pool.row(1, "k")[8:12] = 1.0
    copier.to_host(device.store, pages(2), pages(3))
    with pytest.raises(RaceError, match="store_after_forward"):
        device.synchronize()


def test_the_virtual_gpu_sees_a_store_by_sms_beside_attention() -> None:
    for io_backend in ("kernel", "direct"):
        device = virtual("random", 0)
        copier = make_page_copier(device, *(pools := make_pools(device, "page_first", Shape())), io_backend)  # type: ignore[arg-type]
        device.declare(StreamName.FORWARD, "attention", occupies_sm)
        copier.to_device(device.load, pages(1), pages(5), range(3))  # loads run beside it
        device.load.record()
        copier.to_host(device.store, pages(2), pages(3))
        if io_backend == "kernel":
            with pytest.raises(RaceError, match="sm_exclusive"):
                device.synchronize()
        else:
            device.synchronize()
        assert pools[1].pages.num_free == 15


def test_without_fenceline_kernel_direct_falls_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = open_device("cpu")
    monkeypatch.setattr(device, "kind", "cuda")
    pools = make_pools(device, "page_first", Shape())
    for reason in ("is not installed", "cannot be used"):
        if reason == "is not installed":
            monkeypatch.setitem(sys.modules, "fenceline_kernel", None)
        else:
            monkeypatch.delitem(sys.modules, "fenceline_kernel")  # torch sees no GPU here
        with pytest.raises(ValueError, match="or use --hicache-io-backend direct"):
            make_page_copier(device, *pools, "kernel")
        with caplog.at_level("WARNING"):
            copier = make_page_copier(device, *pools, "direct")
        assert isinstance(copier, RunCopier)
        assert "slower without fenceline_kernel" in caplog.text
        before = device_pages(pools[0])
        copier.to_host(device.store, pages(3, 4), pages(0, 1))
        assert torch.equal(host_pages(pools[1])[:2], before[3:5])
