"""The KV pool: what its memory costs, and that it begins as zeros."""

from __future__ import annotations

import psutil
import pytest
import torch

from fenceline.mem_cache.kv_pool import KVPool

MIB = 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_unused_pool_on_the_cpu_costs_no_memory(dtype: torch.dtype) -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    num_pages = 256 * MIB // KVPool.bytes_per_page(16, 2, 2, 32, dtype)
    pool = KVPool(num_pages, 16, 2, 2, 32, dtype, torch.device("cpu"))
    assert pool.nbytes == 256 * MIB
    assert process.memory_info().rss - before < 64 * MIB
    for layer in range(2):
        assert pool.k(layer).shape == pool.v(layer).shape == (num_pages * 16, 2, 32)
        assert pool.k(layer).dtype == pool.v(layer).dtype == dtype
        assert not pool.k(layer)[:64].any()  # the sink above all
        assert not pool.v(layer)[:64].any()


def test_layers_and_sides_do_not_share_memory() -> None:
    pool = KVPool(4, 16, 2, 2, 32, torch.float32, torch.device("cpu"))
    for number, tensor in enumerate((pool.k(0), pool.v(0), pool.k(1), pool.v(1)), start=1):
        tensor.fill_(number)
    assert [float(t.mean()) for t in (pool.k(0), pool.v(0), pool.k(1), pool.v(1))] == [1, 2, 3, 4]
