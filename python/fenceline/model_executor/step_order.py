"""Declares to the checker (``--memory-check order``) what a step touches on FORWARD beside the rings."""

from __future__ import annotations

import numpy as np

from fenceline.mem_cache.kv_pool import KVPool
from fenceline.mem_cache.req_pool import ReqPool
from fenceline.memory_order import OrderChecker
from fenceline.memory_order.checker import Operation
from fenceline.memory_order.edges import StreamName
from fenceline.model_executor.step import DecodeBatch, ExtendBatch, PageWrites


class StepOrder:
    """Request rows and KV pages as the checker knows them.

    ``extend`` and ``decode`` are called before the step's work is submitted, after its edges have been applied, and
    raise ``OrderError``. A page stands for all layers. A decode step whose requests are
    those of the step before costs no operation over its rows.
    """

    def __init__(self, checker: OrderChecker, kv_pool: KVPool, req_pool: ReqPool) -> None:
        self.checker = checker
        self._page_size = kv_pool.page_size
        rows, columns = req_pool.page_table.shape
        self.page_table = checker.memory("req_pool.page_table", rows)
        self.last_tokens = checker.memory("req_pool.last_tokens", rows)
        self.pages = checker.paged_memory(
            "kv_pool", kv_pool.num_pages, kv_pool.page_size, (rows, columns), StreamName.FORWARD
        )

    def begin_step(self) -> None:
        """What is submitted from now on is the next step's."""
        self.checker.begin_step()

    def extend(self, batch: ExtendBatch) -> None:
        """A prefill step: writes the pages of its chunks, reads all pages up to them."""
        checker = self.checker
        op = checker.begin(StreamName.FORWARD, "prefill step")
        self._write_table(op, batch.page_writes)
        rows = np.array([seq.row for seq in batch.seqs], dtype=np.int64)
        seq_lens = np.array([seq.seq_len for seq in batch.seqs], dtype=np.int64)
        checker.read(op, self.page_table, rows)
        checker.write(
            op, self.pages, np.concatenate([seq.out_slots for seq in batch.seqs]) // self._page_size
        )
        checker.read_pages(op, self.pages, rows, seq_lens)
        sampled = np.array([seq.row for seq in batch.seqs if seq.sampling is not None], dtype=np.int64)
        checker.write(op, self.last_tokens, sampled)

    def decode(self, batch: DecodeBatch) -> None:
        """A decode step: writes each request's last page, reads all of them."""
        checker, rows = self.checker, batch.rows
        op = checker.begin(StreamName.FORWARD, "decode step")
        if len(batch.page_writes):
            self._write_table(op, batch.page_writes)
        checker.read(op, self.page_table, rows)
        checker.append_pages(op, self.pages, rows, batch.seq_lens)
        checker.write(op, self.last_tokens, rows)  # and reads them: the tokens of the step before

    def _write_table(self, op: Operation, writes: PageWrites) -> None:
        self.checker.write(op, self.page_table, writes.rows)
        self.pages.write_table(writes.rows, writes.columns, writes.pages)
