"""Every kernel path once, small: ``compute-sanitizer --tool memcheck python sgl-kernel/tests/sanitizer_case.py``.

Destinations and sources end where their allocations end, so that an access beyond them is reported.
"""

from __future__ import annotations

import numpy as np
import torch
from fenceline_kernel import FillField, PagePools, arena_fill


def fills() -> None:
    """Every access width, with and without a source, with missing columns."""
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        for row in ((), (3,), (4,)):
            target = torch.empty((5, *row), dtype=dtype, device="cuda")
            source = torch.ones((3, *(max(1, width - 1) for width in row)), dtype=dtype, device="cuda")
            arena_fill([FillField(target, source, 1), FillField(torch.empty_like(target), None, 0)], 3)


def copies() -> None:
    """Every access width, both layouts, both directions, few pages and many, SMs and the copy engine."""
    for heads, num_pages in (((1, 1), 4), ((1, 4), 4), ((2, 16), 4), ((1, 16), 300)):
        pool = [torch.zeros((2 * num_pages, *heads), dtype=torch.uint8, device="cuda") for _ in range(2)]
        layer_first = torch.zeros((2, 2, 2 * num_pages, *heads), dtype=torch.uint8).pin_memory()
        page_first = torch.zeros((num_pages, 2, 2, 2, *heads), dtype=torch.uint8).pin_memory()
        device_pages = np.arange(num_pages, dtype=np.int32)
        host_pages = np.roll(device_pages, 1)
        for io_backend in ("kernel", "direct"):
            for host, layout in ((layer_first, "layer_first"), (page_first, "page_first")):
                pools = PagePools(pool, [t.clone() for t in pool], host, 2, layout, io_backend)
                pools.copy(device_pages, host_pages, to_host=True)
                pools.copy(device_pages, host_pages, to_host=False)


if __name__ == "__main__":
    fills()
    copies()
    torch.cuda.synchronize()
    print("sanitizer case done")
