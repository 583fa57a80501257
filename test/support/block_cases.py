"""Steps of attention to selected blocks in a page pool, and what each query must find."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from sala_reference import selected_blocks

from fenceline.config.families import BlocksConfig
from fenceline.config.kv_layout import KVLayout, group_means, keys_and_values
from fenceline.layers.attention.base import AttentionBackend, LayerRules
from fenceline.layers.forward_batch import AttentionInputs, BlockQueries, ForwardMode
from fenceline.layers.kernels.base import LayerKernels
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.memory_order.guards import first_of_best

_SCALE = 0.7


class BlockSteps:
    """Requests of ``lengths`` with random keys, which are stored in steps of random lengths. All other rows of the pool
    are NaN, except the sink's."""

    def __init__(
        self,
        seed: int,
        lengths: Sequence[int],
        blocks: BlocksConfig,
        page_size: int = 16,
        heads: tuple[int, int, int] = (2, 3, 8),
        store_means: Callable[..., None] = LayerKernels().store_means,
        device: str = "cpu",
        dtype: str = "float32",
    ) -> None:
        """``heads``: key heads, query heads of each, and their features."""
        self.device, self.dtype = device, getattr(torch, dtype)
        self.lengths, self.blocks, (self.kv_heads, self.group, self.dim) = list(lengths), blocks, heads
        self.generator = torch.Generator().manual_seed(seed)
        shape = self.kv_heads, self.dim
        rows = keys_and_values(*shape, dtype) + group_means(*shape, blocks.stride, dtype)
        pages = [-(-length // page_size) for length in lengths]
        self.pool = KVPool(sum(pages) + 1, KVLayout(page_size, (rows,)), torch.device(device))
        self.rules = {0: LayerRules(selects=True)}
        for row in self.pool.rows[0].values():
            row[page_size:] = torch.nan
        free = (torch.randperm(sum(pages), generator=self.generator) + 1).tolist()
        self.table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
        self.keys = [torch.randn(length, *shape, generator=self.generator) for length in lengths]
        for i, (keys, count) in enumerate(zip(self.keys, pages, strict=True)):
            self.table[i, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
            first = 0
            while first < len(keys):
                end = min(first + int(torch.randint(1, 40, (), generator=self.generator)), len(keys))
                at = torch.arange(first, end)
                slots = (self.table[i, at // page_size].long() * page_size + at % page_size).to(device)
                self.pool.row(0, "k")[slots] = self.pool.row(0, "v")[slots] = keys[first:end].to(self.pool.row(0, "k"))
                store_means(self.pool.row(0, "k"), self.pool.row(0, "index"), at.to(device), slots, blocks.stride)
                first = end

    def check(self, backend: AttentionBackend, new: Sequence[int] | None = None) -> None:
        """A decode step, or one of prompts whose last ``new`` tokens are the queries."""
        num = len(self.lengths) if new is None else sum(new)
        queries = 2 * torch.randn(num, self.kv_heads * self.group, self.dim, generator=self.generator)
        found = self.results(backend, queries, new, range(len(self.lengths))).unflatten(1, (self.kv_heads, -1)).cpu()
        new = new or [1] * num
        lasts = [(keys, last) for keys, num in zip(self.keys, new, strict=True) for last in range(-num, 0)]
        for own, result, (keys, last) in zip(queries.unflatten(1, (self.kv_heads, -1)), found, lasts, strict=True):
            for head in range(self.kv_heads):
                seen = keys[: len(keys) + 1 + last, head]
                numbers = selected_blocks(own[head], seen, self._sparse)
                seen = seen[torch.isin(torch.arange(len(seen)) // self.blocks.size, torch.tensor(numbers))]
                expected = torch.softmax(own[head] @ seen.T * _SCALE, -1) @ seen
                torch.testing.assert_close(result[head], expected, atol=1e-5, rtol=1e-4)

    def results(
        self, backend: AttentionBackend, queries: torch.Tensor, new: Sequence[int] | None, rows: Sequence[int]
    ) -> torch.Tensor:
        """Those of ``queries`` in a step of the requests ``rows``; see ``check``."""
        mode, new = (ForwardMode.DECODE, [1] * len(rows)) if new is None else (ForwardMode.EXTEND, new)
        lens, starts = torch.tensor(self.lengths)[list(rows)], torch.tensor([0, *new]).cumsum(0).int()
        of_rows, num_new, device = torch.tensor(list(rows)), torch.tensor(list(new)).numpy(), self.device
        queries, tensors = queries.to(device, self.dtype), (self.table, of_rows, lens)
        plan = backend.plan(
            AttentionInputs(mode, *(x.to(device) for x in tensors), lens.numpy(), num_new, starts.to(device))
        )
        chosen = plan.select_blocks(0, BlockQueries(queries, self.dim**-0.5, self.blocks, first_of_best))
        row = queries[:, : self.kv_heads]  # not read: this step's rows are in the pool
        return plan.forward_selected(0, queries, row, row, _SCALE, chosen)

    @property
    def _sparse(self) -> dict[str, int]:
        """In the words of config.json."""
        blocks = self.blocks
        return {
            "kernel_size": blocks.width,
            "kernel_stride": blocks.stride,
            "block_size": blocks.size,
            "topk": blocks.top_k - blocks.local,
            "init_blocks": blocks.first,
            "window_size": blocks.local * blocks.size,
        }
