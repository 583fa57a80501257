"""A worker without a model whose "KV" is the tokens themselves, so that one wrong page shows in the output.

Every slot of its pool stores the token whose KV it would hold. The next token is a hash of the request's
whole history *as read back through the page table*: a page lost, shared wrongly or overwritten gives another
token. Steps run only when their result is waited for, as on a device that is always behind. What a batch is
given anew must come with the Points of whoever touched it last.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from fenceline.mem_cache.req_pool import ReqPool
from fenceline.memory_order import LeasePool, Point, Points, Stream
from fenceline.memory_order.edges import StreamName
from fenceline.model_executor.forward_result import LogprobValues, StepOutput
from fenceline.model_executor.sampling_batch import ReqSampling
from fenceline.model_executor.schedule_batch import DecodeBatch, ExtendBatch, PageWrites, ScheduleBatch

VOCAB_SIZE = 211


def next_token(history: list[int], seed: int) -> int:
    """The reference: the token after ``history``, a function of nothing else (and of a sampling seed)."""
    return zlib.crc32(np.array([seed, *history], dtype=np.int64).tobytes()) % VOCAB_SIZE


class LaggingStream(Stream):
    """A stream whose Points pass only when the host waits for them."""

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        raise AssertionError("this stream copies nothing")

    def _record_event(self) -> object:
        return None

    def _wait_event(self, point: Point) -> None:
        raise AssertionError("there is only one stream")

    def _block(self, point: Point) -> None:
        raise AssertionError("results are waited for through their ForwardResult")


class TokenResult:
    """A step that runs, with all before it, when it is waited for."""

    def __init__(self, worker: TokenWorker, run: Callable[[], StepOutput], done: Point) -> None:
        self.done = done
        self.run = run
        self.output: StepOutput | None = None
        self._worker = worker

    def wait(self) -> StepOutput:
        self._worker.run_until(self)
        assert self.output is not None
        output, self.output = self.output, None
        return output


class AuditedPool(LeasePool):
    """Notes which steps touch which ids, and that ids handed out again come with those steps' Points."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__(name, size, reserved=1)
        self._fresh: set[int] = set()
        self._touched = np.zeros(size, dtype=np.int64)  # serial of the last step

    def alloc(self, n: int) -> tuple[np.ndarray, Points] | None:
        leased = super().alloc(n)
        if leased is not None:
            self._fresh |= set(leased[0].tolist())
        return leased

    def submitted(self, touched: np.ndarray, done: Point, after: Points) -> None:
        """A step that touches ``touched`` is submitted; all that was handed out since the last one is for it."""
        waited = max((point.serial for point in after), default=done.stream.passed_serial)
        for id in self._fresh:
            assert self._touched[id] <= max(waited, done.stream.passed_serial), (
                f"{self.name}: {id} was handed out without waiting for {done.stream.name}@{self._touched[id]}"
            )
        self._fresh.clear()
        assert self._leased[touched].all(), (
            f"{self.name}: a step uses {touched[~self._leased[touched]]}, leased to nobody"
        )
        self._touched[touched] = done.serial


class TokenWorker:
    """Stands in for a ModelRunner (see the module's docstring)."""

    def __init__(self, num_pages: int, page_size: int, num_rows: int, context_length: int) -> None:
        self.page_size = page_size
        self.pages = AuditedPool("KV pages", num_pages + 1)
        self.req_pool = ReqPool(num_rows + 1, -(-context_length // page_size) + 1, torch.device("cpu"))
        self.req_pool.rows = AuditedPool("request rows", num_rows + 1)
        self._page_table = np.zeros(self.req_pool.page_table.shape, dtype=np.int32)  # as of what is submitted
        self.memory_bytes = {"weights": 0, "kv_cache": 0}
        self.graph_stats = None
        self.forward = LaggingStream(StreamName.FORWARD, frozenset())
        self.num_steps = 0
        self._slots = np.full((num_pages + 1) * page_size, -1, dtype=np.int64)
        self._queue: deque[TokenResult] = deque()
        self._composition: tuple[int, np.ndarray, np.ndarray] | None = None

    def launch(self, batch: ScheduleBatch) -> TokenResult:
        self.num_steps += 1
        if isinstance(batch, ExtendBatch):
            run = lambda: self._extend(batch)  # noqa: E731
            lens = {seq.row: seq.seq_len for seq in batch.seqs}
        else:
            run = lambda: self._decode(batch)  # noqa: E731
            lens = dict(zip(batch.rows.tolist(), batch.seq_lens.tolist(), strict=True))
        result = TokenResult(self, run, self.forward.record())
        self._audit(batch, lens, result.done)
        self._queue.append(result)
        return result

    def _audit(self, batch: ScheduleBatch, lens: dict[int, int], done: Point) -> None:
        writes = batch.page_writes
        assert (writes.rows > 0).all(), "the page table of the sink row names only the sink page"
        self._page_table[writes.rows, writes.columns] = writes.pages
        used = [self._page_table[row, : -(-length // self.page_size)] for row, length in lens.items()]
        self.pages.submitted(np.concatenate(used), done, batch.after)
        self.req_pool.rows.submitted(np.array(list(lens)), done, batch.after)

    def run_until(self, result: TokenResult) -> None:
        while result.output is None:
            step = self._queue.popleft()
            step.output = step.run()
            self.forward.note_passed(step.done)

    def _write_pages(self, writes: PageWrites) -> None:
        if len(writes):
            pairs = set(zip(writes.rows.tolist(), writes.columns.tolist(), strict=True))
            assert len(pairs) == len(writes), "one step writes a page-table entry twice"
            self.req_pool.write_pages(
                *(torch.from_numpy(a) for a in (writes.rows, writes.columns, writes.pages))
            )

    def _slot(self, row: int, position: int) -> int:
        page = int(self.req_pool.page_table[row, position // self.page_size])
        assert page > 0, f"row {row} position {position} has no page"
        return page * self.page_size + position % self.page_size

    def _history(self, row: int, length: int) -> list[int]:
        return [int(self._slots[self._slot(row, p)]) for p in range(length)]

    def _extend(self, batch: ExtendBatch) -> StepOutput:
        self._write_pages(batch.page_writes)
        tokens, scored, sampled = [], [], []
        for seq in batch.seqs:
            slots = [self._slot(seq.row, p) for p in range(seq.prefix_len, seq.seq_len)]
            assert slots == seq.out_slots.tolist()
            self._slots[slots] = seq.token_ids
            if seq.sampling is not None:
                token = next_token(self._history(seq.row, seq.seq_len), seq.sampling.seed)
                self.req_pool.last_tokens[seq.row] = token
                tokens.append(token)
                sampled.append(seq.sampling)
            first, last = seq.prompt_logprob_offsets()
            scored += [float(seq.prefix_len + offset + 1) for offset in range(first, last)]
        prompt = _values(scored) if scored else None
        return StepOutput(np.array(tokens, dtype=np.int64), _logprobs(tokens, sampled), prompt)

    def _decode(self, batch: DecodeBatch) -> StepOutput:
        self._write_pages(batch.page_writes)
        if self._composition is not None and self._composition[0] == batch.composition:
            _, rows, lens = self._composition
            lens = lens + 1
        else:
            rows, lens = batch.rows, batch.seq_lens
        assert rows.tolist() == batch.rows.tolist() and lens.tolist() == batch.seq_lens.tolist()
        self._composition = (batch.composition, rows, lens)
        tokens = []
        for row, length, sampling in zip(rows.tolist(), lens.tolist(), batch.sampling, strict=True):
            self._slots[self._slot(row, length - 1)] = int(self.req_pool.last_tokens[row])
            token = next_token(self._history(row, length), sampling.seed)
            self.req_pool.last_tokens[row] = token
            tokens.append(token)
        return StepOutput(np.array(tokens, dtype=np.int64), _logprobs(tokens, batch.sampling), None)


def _logprobs(tokens: list[int], sampling: Sequence[ReqSampling]) -> LogprobValues | None:
    """A token's "logprob" is the token; there is one if anybody in the batch asked, as the runner does it."""
    return _values([-float(t) for t in tokens]) if any(s.return_logprob for s in sampling) else None


def _values(chosen: list[float]) -> LogprobValues:
    num = len(chosen)
    return LogprobValues(
        np.array(chosen, dtype=np.float32), np.zeros((num, 0), np.float32), np.zeros((num, 0), np.int64)
    )


__all__ = ["VOCAB_SIZE", "LaggingStream", "Points", "TokenWorker", "next_token"]
