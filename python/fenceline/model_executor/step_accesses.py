"""What a step reads and writes on FORWARD beside the rings."""

from __future__ import annotations

import numpy as np

from fenceline.mem_cache.kv_pool import KVPool, ReqPool
from fenceline.memory_order.access import Accesses, Memory, PagedMemory
from fenceline.memory_order.edges import StreamName
from fenceline.model_executor.step import DecodeBatch, ExtendBatch


class StepAccesses:
    """Request rows and KV pages of a runner; a page stands for all layers.

    ``extend`` and ``decode`` are for ``Device.declare``. A decode step whose requests are those of the step before
    costs no operation over its rows.
    """

    def __init__(self, kv_pool: KVPool, req_pool: ReqPool) -> None:
        self._page_size = kv_pool.page_size
        rows, columns = req_pool.page_table.shape
        self.page_table = Memory("req_pool.page_table", rows)
        self.last_tokens = Memory("req_pool.last_tokens", rows)
        self.pages = PagedMemory(
            "kv_pool", kv_pool.num_pages, kv_pool.page_size, (rows, columns), StreamName.FORWARD
        )

    def extend(self, op: Accesses, batch: ExtendBatch) -> None:
        """A prefill step: writes the pages of its chunks, reads all pages up to them."""
        self._write_table(op, batch)
        rows = np.array([seq.row for seq in batch.seqs], dtype=np.int64)
        seq_lens = np.array([seq.seq_len for seq in batch.seqs], dtype=np.int64)
        op.read(self.page_table, rows)
        op.write(self.pages, np.concatenate([seq.out_slots for seq in batch.seqs]) // self._page_size)
        op.read_pages(self.pages, rows, seq_lens)
        sampled = np.array([seq.row for seq in batch.seqs if seq.sampling is not None], dtype=np.int64)
        op.write(self.last_tokens, sampled)

    def decode(self, op: Accesses, batch: DecodeBatch) -> None:
        """A decode step: writes each request's last page, reads all of them."""
        if len(batch.page_writes):
            self._write_table(op, batch)
        op.read(self.page_table, batch.rows)
        op.append_pages(self.pages, batch.rows, batch.seq_lens)
        op.write(self.last_tokens, batch.rows)  # and reads them: the tokens of the step before

    def _write_table(self, op: Accesses, batch: ExtendBatch | DecodeBatch) -> None:
        writes = batch.page_writes
        op.write(self.page_table, writes.rows)
        op.write_table(self.pages, writes.rows, writes.columns, writes.pages)
