"""The KV pool: what its memory costs, and that it begins as zeros."""

from __future__ import annotations

import psutil
import pytest
import torch
from page_pools import MIXED

from fenceline.config.kv_layout import KVLayout, KVRow
from fenceline.ipc.io_struct import SchedulerReady
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.scheduler.process import warn_of_small_pool

MIB = 1 << 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_unused_pool_on_the_cpu_costs_no_memory(dtype: str) -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    num_pages = 1024 * MIB // KVLayout.uniform(16, 2, 2, 32, dtype).page_nbytes
    pool = KVPool(num_pages, KVLayout.uniform(16, 2, 2, 32, dtype), torch.device("cpu"))
    assert pool.nbytes == 1024 * MIB
    assert process.memory_info().rss - before < 64 * MIB
    for layer in range(2):
        assert pool.row(layer, "k").shape == pool.row(layer, "v").shape == (num_pages * 16, 2, 32)
        assert pool.row(layer, "k").dtype == pool.row(layer, "v").dtype == getattr(torch, dtype)
        assert not pool.row(layer, "k")[:64].any()  # the sink above all
        assert not pool.row(layer, "v")[:64].any()


@pytest.mark.parametrize(("num_tokens", "warns"), [(4095, True), (4096, False)])
def test_a_pool_smaller_than_one_request_is_told_of(
    num_tokens: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    limits = SchedulerReady(
        max_total_num_tokens=num_tokens,
        max_running_requests=1,
        max_req_input_len=num_tokens - 1,
        context_length=4096,
        memory_bytes={},
    )
    warn_of_small_pool(limits)
    assert ("room for 4095 tokens" in caplog.text and "prompts of more than 4094" in caplog.text) is warns


def test_layers_and_sides_do_not_share_memory() -> None:
    pool = KVPool(4, KVLayout.uniform(16, 2, 2, 32, "float32"), torch.device("cpu"))
    rows = [pool.row(layer, name) for layer in range(2) for name in ("k", "v")]
    for number, tensor in enumerate(rows, start=1):
        tensor.fill_(number)
    assert [float(tensor.mean()) for tensor in rows] == [1, 2, 3, 4]


def test_layers_may_keep_different_rows() -> None:
    layout = KVLayout(4, MIXED)
    pool = KVPool(3, layout, torch.device("cpu"))
    assert [{name: tuple(row.shape) for name, row in rows.items()} for rows in pool.rows] == [
        {"k": (12, 2, 8), "v": (12, 2, 8)},
        {"k": (12, 1, 8), "v": (12, 1, 8)},
        {"k": (12, 1, 8), "v": (12, 1, 8)},
        {"latent": (12, 1, 7)},
        {"k": (12, 2, 6), "v": (12, 2, 4)},
        {"latent": (12, 1, 5)},
        {"k": (12, 3, 4), "v": (12, 3, 4)},
    ]
    assert pool.row(3, "latent").dtype == torch.float8_e4m3fn
    with pytest.raises(KeyError, match="v"):
        pool.row(3, "v")
    names = [name for name, _ in pool.tensors()]
    assert names == [f"layer{part.layer}.{part.row.name}" for part in layout.parts]
    assert "layer3.latent" in names and "layer6.v" in names
    assert pool.nbytes == sum(tensor.nbytes for _, tensor in pool.tensors()) == 3 * layout.page_nbytes
    assert [len(layers) for layers in layout.alike] == [1, 2, 1, 1, 1, 1]
    ends = [0, *(part.offset + part.nbytes for part in layout.parts)]
    assert [part.offset for part in layout.parts] == ends[:-1], "no gaps"
    assert [len(layout.parts_of(range(i, i + 1))) for i in range(7)] == [2, 2, 2, 1, 2, 1, 2]


def test_parts_are_the_tensors_bytes() -> None:
    pool = KVPool(3, KVLayout(4, MIXED), torch.device("cpu"))
    for number, (part, (_, tensor)) in enumerate(zip(pool.parts, pool.tensors(), strict=True)):
        tensor.view(torch.uint8)[4:8] = number + 1
        assert set(part[1].tolist()) == {number + 1}
        assert not part[0].any() and not part[2].any()


def test_on_a_gpu_layers_that_are_alike_are_evenly_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the copy engine takes a page of all of them in one copy; uniform models have one piece of memory."""
    zeros, asked = torch.zeros, []

    def on_the_cpu(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        asked.append(tuple(shape))
        return zeros(shape, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", on_the_cpu)
    gpu = torch.device("cuda")
    pool = KVPool(5, KVLayout.uniform(16, 3, 2, 8, "bfloat16"), gpu)
    assert asked == [(3, 2, 80, 2, 8)]
    starts = [tensor.data_ptr() for _, tensor in pool.tensors()]
    assert [start - starts[0] for start in starts] == [number * 80 * 2 * 8 * 2 for number in range(6)]
    assert pool.row(1, "k").stride() == pool.row(1, "v").stride() == (16, 8, 1)
    assert pool.row(2, "k").data_ptr() == starts[4] and pool.row(2, "v").data_ptr() == starts[5]
    asked.clear()
    KVPool(5, KVLayout(16, MIXED), gpu)
    assert asked == [
        (1, 2, 80, 2, 8), (2, 2, 80, 1, 8), (1, 1, 80, 1, 7), (80, 2, 6), (80, 2, 4), (1, 1, 80, 1, 5), (1, 2, 80, 3, 4)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("page_size", "layers", "what"),
    [(0, MIXED, "page_size 0"), (4, (), "at least one layer"), (4, (MIXED[0], ()), "layer 1 keeps nothing")],
)
def test_a_layout_that_is_none(page_size: int, layers: tuple[tuple[KVRow, ...], ...], what: str) -> None:
    with pytest.raises(AssertionError, match=what):
        KVLayout(page_size, layers)
