"""Batches in a page pool whose attention is computed in float64 by its definition."""

from __future__ import annotations

import numpy as np
import torch

from fenceline.layers.attention.torch_backend import TorchAttentionBackend
from fenceline.layers.forward_batch import AttentionInputs, ForwardMode
from fenceline.mem_cache.kv_pool import KVLayout, KVPool

SCALE = 0.3


class Case:
    """Requests with histories in a pool whose other bytes are NaN, and this step's q, k, v."""

    def __init__(
        self,
        seq_lens: list[int],
        query_lens: list[int],
        page_size: int,
        heads: tuple[int, int],
        seed: int,
        dtype: torch.dtype = torch.float32,
        head_dim: int = 8,
        device: str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self.seq_lens, self.query_lens = seq_lens, query_lens
        num_heads, num_kv_heads = heads
        generator = torch.Generator().manual_seed(seed)
        pages = [-(-n // page_size) for n in seq_lens]
        num_pages = sum(pages) + 3
        self.pool = KVPool(
            num_pages, KVLayout.uniform(page_size, 2, num_kv_heads, head_dim, dtype), self.device
        )
        for tensor in (self.pool.k(1), self.pool.v(1)):
            tensor[page_size:] = float("nan")
        free = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
        # Columns past a request's pages name other requests' pages: a row is not cleared when it is leased again.
        self.page_table = torch.randint(
            1, num_pages, (len(seq_lens) + 2, max(pages) + 2), generator=generator
        ).int()
        self.rows = torch.randperm(len(seq_lens) + 2, generator=generator)[: len(seq_lens)]
        self.slots = []
        for row, count, length in zip(self.rows, pages, seq_lens, strict=True):
            self.page_table[row, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
            position = torch.arange(length)
            self.slots.append(
                self.page_table[row, position // page_size].long() * page_size + position % page_size
            )
        self.keys = [torch.randn(n, num_kv_heads, head_dim, generator=generator).to(dtype) for n in seq_lens]
        self.values = [
            torch.randn(n, num_kv_heads, head_dim, generator=generator).to(dtype) for n in seq_lens
        ]
        self.queries = [
            torch.randn(n, num_heads, head_dim, generator=generator).to(dtype) for n in query_lens
        ]
        for slots, keys, values in zip(self.slots, self.keys, self.values, strict=True):
            self.pool.k(1)[slots.to(self.device)] = keys.to(self.device)
            self.pool.v(1)[slots.to(self.device)] = values.to(self.device)

    def begin_alike(self, requests: list[int], num_tokens: int) -> None:
        """Let ``requests`` have the first one's whole pages of the first ``num_tokens`` tokens."""
        first, size = requests[0], self.pool.page_size
        num_pages = num_tokens // size
        num = num_pages * size
        for i in requests[1:]:
            self.page_table[self.rows[i], :num_pages] = self.page_table[self.rows[first], :num_pages]
            for of_request in (self.slots, self.keys, self.values):
                of_request[i][:num] = of_request[first][:num]

    def run(self, mode: ForwardMode) -> list[torch.Tensor]:
        inputs = AttentionInputs(
            mode=mode,
            page_table=self.page_table.to(self.device),
            rows=self.rows.to(self.device),
            seq_lens=torch.tensor(self.seq_lens).to(self.device),
            seq_lens_cpu=np.array(self.seq_lens, dtype=np.int64),
            query_lens_cpu=np.array(self.query_lens, dtype=np.int64),
        )
        plan = TorchAttentionBackend(self.pool).plan(inputs)
        step = (torch.cat(self.queries), torch.cat(self._last(self.keys)), torch.cat(self._last(self.values)))
        output = plan.forward(1, *(tensor.to(self.device) for tensor in step), SCALE)
        return list(output.cpu().split(self.query_lens))

    def expected(self) -> list[torch.Tensor]:
        """softmax(q k^T) v for one head at a time, in float64."""
        results = []
        for q, k, v in zip(self.queries, self.keys, self.values, strict=True):
            group = q.shape[1] // k.shape[1]
            last = len(k) - len(q) + torch.arange(len(q))
            hidden = torch.arange(len(k)) > last[:, None]
            result = torch.empty(q.shape, dtype=torch.float64)
            for head in range(q.shape[1]):
                keys, values = k[:, head // group].double(), v[:, head // group].double()
                scores = (q[:, head].double() @ keys.T * SCALE).masked_fill(hidden, float("-inf"))
                result[:, head] = torch.softmax(scores, dim=1) @ values
            results.append(result)
        return results

    def check(self, mode: ForwardMode, tolerance: float = 1e-5) -> None:
        for ours, expected in zip(self.run(mode), self.expected(), strict=True):
            torch.testing.assert_close(ours.double(), expected, atol=tolerance, rtol=0)

    def _last(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor[-new:] for tensor, new in zip(tensors, self.query_lens, strict=True)]


def case(seq_lens: list[int], query_lens: list[int], page_size: int, heads: tuple[int, int], **options):  # type: ignore[no-untyped-def]
    """A ``Case``, which computes the expected result; every slot that belongs to no request holds NaN."""
    return Case(seq_lens, query_lens, page_size, heads, **({"seed": 1, "head_dim": 16} | options))


def requests_of(step):  # type: ignore[no-untyped-def]
    from fenceline.layers.kernels.decode_attention import PagedRequests

    return PagedRequests(step.page_table, step.rows, torch.tensor(step.seq_lens), step.pool.page_size)


def decode(step, num_workers: int = 3, workspace=None, queries=None, launch_pdl=False) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """One launch with blocks of 16 tokens; the workspace must be as it was before."""
    from fenceline.layers.kernels.decode_attention import DecodeConfig, DecodeWorkspace, decode_attention

    keys, values = step.pool.k(1), step.pool.v(1)
    workspace = workspace or DecodeWorkspace(keys.shape[1], keys.shape[2], 8, keys.device)
    config = DecodeConfig(16, num_workers, 4, 2, launch_pdl)
    queries = torch.cat(step.queries) if queries is None else queries
    output = decode_attention(queries, keys, values, requests_of(step), SCALE, workspace, config)
    assert not workspace.num_done.any()
    return output


def spoil(step) -> None:  # type: ignore[no-untyped-def]
    for row, length in zip(step.rows, step.seq_lens, strict=True):
        step.page_table[row, -(-length // step.pool.page_size) :] = 1 << 30
