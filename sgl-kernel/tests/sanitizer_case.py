"""Every kernel path once, small: ``compute-sanitizer --tool memcheck python sgl-kernel/tests/sanitizer_case.py``.

Destinations and sources end where their allocations end, so that one access too many is seen.
"""

from __future__ import annotations

import torch
from fenceline_kernel import FillField, PagePools, arena_fill, gather_pages, scatter_pages


def fills() -> None:
    """Every access width, with and without a source, with missing columns."""
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        for row in ((), (3,), (4,)):
            target = torch.empty((5, *row), dtype=dtype, device="cuda")
            source = torch.ones((3, *(max(1, width - 1) for width in row)), dtype=dtype, device="cuda")
            arena_fill([FillField(target, source, 1), FillField(torch.empty_like(target), None, 0)], 3)


def copies() -> None:
    """Every access width, both layouts, both directions, one page refused."""
    for heads in ((1, 1), (1, 4), (2, 16)):
        pool = [torch.zeros((4, *heads), dtype=torch.uint8, device="cuda") for _ in range(2)]
        layer_first = torch.zeros((2, 2, 6, *heads), dtype=torch.uint8).pin_memory()
        page_first = torch.zeros((3, 2, 2, 2, *heads), dtype=torch.uint8).pin_memory()
        device_pages = torch.tensor([1, 0, 2], dtype=torch.int32, device="cuda")
        host_pages = torch.tensor([2, 0, 1], dtype=torch.int32, device="cuda")
        rejected = torch.zeros(1, dtype=torch.int32, device="cuda")
        for pools in (PagePools(pool, [t.clone() for t in pool], layer_first, 2, "layer_first"),
                      PagePools(pool, [t.clone() for t in pool], page_first, 2, "page_first")):  # fmt: skip
            gather_pages(pools, device_pages, host_pages, num_rejected=rejected)
            scatter_pages(pools, host_pages, device_pages, num_rejected=rejected)
        assert rejected.item() == 4


if __name__ == "__main__":
    fills()
    copies()
    torch.cuda.synchronize()
    print("sanitizer case done")
