"""StepAccesses: what a step reads and writes on FORWARD, as it is declared to the checker of memory order."""

from __future__ import annotations

import numpy as np

from fenceline.layers.forward_batch import SINK_ROW
from fenceline.mem_cache.kv_pool import EmbeddingPool, KVPool, ReqPool
from fenceline.memory_order.access import Accesses, Memory, PagedMemory
from fenceline.memory_order.edges import StreamName
from fenceline.model_executor.step import StepBatch

# The names of the steps in reports.
EXTEND_STEP, DECODE_STEP = "prefill step", "decode step"


class StepAccesses:
    """Declares what a step reads and writes on FORWARD apart from the rings: request rows, and KV pages of all layers.
    ``extend`` and ``decode`` are passed to ``Device.declare``. If a decode step has the same requests as the previous
    one, its declaration needs no operation over its rows."""

    def __init__(self, kv_pool: KVPool, req_pool: ReqPool, embeddings: EmbeddingPool | None = None) -> None:
        self._page_size = kv_pool.page_size
        rows, columns = req_pool.page_table.shape
        self.page_table = Memory("req_pool.page_table", rows)
        self.last_tokens = Memory("req_pool.last_tokens", rows)
        self.position_deltas = None
        if req_pool.position_deltas is not None:
            self.position_deltas = Memory("req_pool.position_deltas", rows)
        self.tokens = None if req_pool.tokens is None else Memory("req_pool.tokens", rows)
        self.embeddings = None if embeddings is None else Memory("image_embeddings", len(embeddings.rows))
        self.pages = PagedMemory("kv_pool", kv_pool.num_pages, kv_pool.page_size, (rows, columns), StreamName.FORWARD)

    def extend(self, op: Accesses, batch: StepBatch) -> None:
        """A prefill step: writes the pages of its chunks, and of the tokens that are decoded beside them, and reads all
        pages up to these."""
        num, size = len(batch.chunks), self._page_size
        self._write_table(op, batch)
        op.read(self.page_table, batch.rows)
        slots = np.concatenate([chunk.out_slots for chunk in batch.chunks])
        op.write(self.pages, slots // size)
        if batch.num_decodes:
            op.write(self.pages, self.pages.last_pages_of(batch.rows[num:], batch.seq_lens[num:]))
        op.read_pages(self.pages, batch.rows, batch.seq_lens)
        op.write(self.last_tokens, batch.rows[batch.samples])
        if self.position_deltas is not None:
            op.write(self.position_deltas, batch.rows[:num])
            if batch.num_decodes:
                op.read(self.position_deltas, batch.rows[num:])
        if self.tokens is not None:
            op.write(self.tokens, batch.rows)
        if self.embeddings is not None:
            for encode in batch.encodes:
                op.write(self.embeddings, encode.rows)
            for chunk in batch.chunks:
                if chunk.image_rows is not None:
                    op.read(self.embeddings, chunk.image_rows[chunk.image_rows != SINK_ROW])

    def decode(self, op: Accesses, batch: StepBatch) -> None:
        """A decode step: writes the pages of each request's new tokens, reads all of them."""
        if len(batch.page_writes):
            self._write_table(op, batch)
        op.read(self.page_table, batch.rows)
        if batch.may_accept is None:
            op.append_pages(self.pages, batch.rows, batch.seq_lens)
        else:  # the host knows only upper bounds of the lengths, and a bound may be lower than in the previous step
            op.read(self.pages, self.pages.pages_of(batch.rows, batch.seq_lens))
            op.write(self.pages, self.pages.pages_between(batch.rows, batch.starts, batch.seq_lens))
        if self.position_deltas is not None:
            op.read(self.position_deltas, batch.rows)
        op.write(self.last_tokens, batch.rows)  # it also reads them: the tokens of the previous step
        if self.tokens is not None:
            op.write(self.tokens, batch.rows)  # behind those that it reads

    def _write_table(self, op: Accesses, batch: StepBatch) -> None:
        writes = batch.page_writes
        op.write(self.page_table, writes.rows)
        op.write_table(self.pages, writes.rows, writes.columns, writes.pages)
