"""A worker without a model whose "KV" is the tokens themselves, so that one wrong page leads to a wrong output.

Every slot of its pool stores the token whose KV it would hold, or the embedding that it has read for a token of an
image. The next token is a hash of the request's whole history *as read back through the page table*, so a page that is
lost, shared wrongly or overwritten leads to another token. Steps run only when their result is waited for, as on a
device that is always behind the host. Pages and rows that a batch gets must come with the Points of their last users.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import torch
from recording_device import LaggingStream

from fenceline.images.image_input import ImageInput
from fenceline.mem_cache.host.cache_controller import TransferCounts
from fenceline.mem_cache.host.host_states import Pairs
from fenceline.mem_cache.kv_pool import ReqPool
from fenceline.mem_cache.transfer import Ticket, TransferKind
from fenceline.memory_order import LeasePool, Point, Points, Stream, open_device
from fenceline.memory_order.edges import StreamName
from fenceline.model_executor.step import (
    Completions,
    LogprobValues,
    PageWrites,
    StepBatch,
    StepOutput,
    drain_completions,
)
from fenceline.sampling.sampling_batch import ReqSampling

VOCAB_SIZE = 211
_REJECTED = -2  # not a token: a step that reads it produces an unexpected output


def next_token(history: list[int], seed: int) -> int:
    """The reference: the token after ``history``, a function of only the history and a sampling seed."""
    return zlib.crc32(np.array([seed, *history], dtype=np.int64).tobytes()) % VOCAB_SIZE


def embeddings_of(image: ImageInput) -> list[int]:
    """Those of its tokens: numbers that are no tokens, others for each digest."""
    return [VOCAB_SIZE + zlib.crc32(image.digest + bytes([token])) for token in range(image.num_tokens)]


class TokenResult:
    """The result of a step. Waiting for it runs the step and all preceding ones."""

    def __init__(
        self, worker: TokenWorker, run: Callable[[], StepOutput], done: Point, waits: tuple[Point, ...] = ()
    ) -> None:
        self.done = done
        self.run = run
        self.waits = waits  # Points of other streams for which the step waits
        self.output: StepOutput | None = None
        self._worker = worker

    def arrived(self) -> bool:
        return self.output is not None or self._worker.is_quick()

    def wait(self) -> StepOutput:
        self._worker.run_until(self)
        self.done.stream.note_passed(self.done)
        assert self.output is not None
        output, self.output = self.output, None
        return output


class AuditedPool(LeasePool):
    """Records which steps and transfers use which ids, and checks that ids leased again come with their Points."""

    def __init__(self, name: str, size: int, reserved: int = 1) -> None:
        super().__init__(name, size, reserved)
        self._fresh: set[int] = set()
        self._touched: dict[Stream, np.ndarray] = {}  # by id: the serial of the last work on each stream
        # What each stream has waited for, also through others, now and when a Point was recorded.
        self._clocks: dict[Stream, dict[Stream, int]] = {}
        self._clock_at: dict[tuple[Stream, int], dict[Stream, int]] = {}

    def alloc(self, n: int) -> tuple[np.ndarray, Points] | None:
        leased = super().alloc(n)
        if leased is not None:
            self._fresh |= set(leased[0].tolist())
        return leased

    def submitted(self, touched: np.ndarray, done: Point, after: Points, is_step: bool = False) -> None:
        """Record that work that uses ``touched`` is submitted. Ids that were leased since the last step are for this
        work; what is not a step takes only those of them that it uses."""
        fresh = set(self._fresh) if is_step else self._fresh & set(touched.tolist())
        clock = self._clocks.setdefault(done.stream, {})
        for point in after:
            heard = self._clock_at.get((point.stream, point.serial), {}) | {point.stream: point.serial}
            clock.update((stream, max(serial, clock.get(stream, 0))) for stream, serial in heard.items())
        self._clock_at[done.stream, done.serial] = dict(clock)
        for stream, serials in self._touched.items():
            known = max(clock.get(stream, 0), stream.passed_serial)
            for id in fresh:
                assert serials[id] <= known, (
                    f"{self.name}: {id} was handed out without waiting for {stream.name}@{serials[id]}"
                )
        self._fresh -= fresh
        assert self._leased[touched].all(), (
            f"{self.name}: work uses {touched[~self._leased[touched]]}, leased to nobody"
        )
        self.touched(touched, done)

    def touched(self, ids: np.ndarray, done: Point) -> None:
        """Record that work up to ``done`` uses ``ids``."""
        if done.stream not in self._touched:
            self._touched[done.stream] = np.zeros(self.size, dtype=np.int64)
        self._touched[done.stream][ids] = done.serial


class TokenStates:
    """Replaces a StatePool: the state of a slot is the list of tokens that it has absorbed."""

    grid = 8

    def __init__(self, num_rows: int, num_snapshots: int) -> None:
        self.snapshots = AuditedPool("state snapshots", num_rows + num_snapshots, reserved=num_rows)
        self.carried: list[list[int]] = [[_REJECTED] for _ in range(self.snapshots.size)]
        self.absorbed = [0] * num_rows  # by row, as the device knows: how many tokens its state has absorbed


class TokenHostStates:
    """Replaces HostStates."""

    def __init__(self, num_slots: int) -> None:
        self.slots = AuditedPool("host states", num_slots, reserved=0)
        self.carried: list[list[int]] = [[_REJECTED] for _ in range(num_slots)]


class TokenWorker:
    """Replaces a ModelRunner (see the module's docstring)."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_rows: int,
        context_length: int,
        max_step_tokens: int = 1,
        num_snapshots: int | None = None,
    ) -> None:
        """``max_step_tokens``: a decode step yields up to this many tokens for each request, depending on its history,
        as if drafts had been accepted. The slots after these have rejected drafts, which must not be read.
        ``num_snapshots``: of the states of a recurrent layer; None: there is no such layer."""
        self.device = open_device("cpu")
        self.page_size = page_size
        self.max_step_tokens = max_step_tokens
        self.step_costs = None
        self.num_by_count: Counter[int] = Counter()  # how often a request got this many tokens in a decode step
        self._lens: dict[int, int] = {}  # by row: how many tokens have their KV in slots, as the device knows
        self.pages = AuditedPool("KV pages", num_pages + 1)
        self.req_pool = ReqPool(num_rows + 1, -(-context_length // page_size) + 1, torch.device("cpu"))
        self.req_pool.rows = AuditedPool("request rows", num_rows + 1)
        self._page_table = np.zeros(self.req_pool.page_table.shape, dtype=np.int32)  # as of what is submitted
        self.states = None if num_snapshots is None else TokenStates(num_rows + 1, num_snapshots)
        self.memory_bytes = {"weights": 0, "kv_cache": 0}
        self.graph_stats = None
        self.prefill_graph_stats = None
        self.hicache: TokenTransfers | None = None
        self.storage = None
        self.forward = LaggingStream(StreamName.FORWARD, frozenset())
        # Returns whether a step has run already when its result is polled.
        self.is_quick: Callable[[], bool] = lambda: False
        self.num_steps = 0
        self.slots = np.full((num_pages + 1) * page_size, -1, dtype=np.int64)
        self.embeddings = np.full(1 << 10, -1, dtype=np.int64)
        self._queue: deque[TokenResult] = deque()
        self.num_run = 0  # steps that have run; the host knows about those whose results it has waited for
        self._composition: tuple[int, np.ndarray, np.ndarray] | None = None

    def completions(self, awaited: TokenResult | None) -> Completions:
        return drain_completions(self.hicache, self.storage, awaited)

    def launch(self, batch: StepBatch) -> TokenResult:
        self.num_steps += 1

        def run() -> StepOutput:
            output = self._decode(batch) if batch.is_decode else self._extend(batch)
            for row, slot in batch.snapshots:
                self._copy_state(row, slot)
            return output

        lens = dict(zip(batch.rows.tolist(), batch.seq_lens.tolist(), strict=True))
        loads = [point for ticket in batch.loads for point in ticket.points]
        result = TokenResult(self, run, self.forward.record(), (*batch.after, *loads))
        for ticket in batch.loads:
            ticket.waited = True
        self._audit(batch, lens, result)
        self._queue.append(result)
        return result

    def _audit(self, batch: StepBatch, lens: dict[int, int], result: TokenResult) -> None:
        writes, done, after = batch.page_writes, result.done, Points.of(*result.waits)
        assert (writes.rows > 0).all(), "the page table of the sink row names only the sink page"
        self._page_table[writes.rows, writes.columns] = writes.pages
        used = [self._page_table[row, : -(-length // self.page_size)] for row, length in lens.items()]
        self.pages.submitted(np.concatenate(used), done, after, is_step=True)
        if self.states is not None:
            slots = np.array([slot for _, slot in batch.snapshots], dtype=np.int64)
            self.states.snapshots.submitted(slots, done, after, is_step=True)
        self.req_pool.rows.submitted(np.array(list(lens)), done, after, is_step=True)

    def run_until(self, result: TokenResult) -> None:
        while result.output is None:
            step = self._queue.popleft()
            for point in step.waits:
                self.run_to(point)
            step.output = step.run()
            self.num_run = step.done.serial

    def run_to(self, point: Point) -> None:
        """Run all work of a stream that comes before ``point``."""
        if point.stream is not self.forward:
            assert self.hicache is not None
            self.hicache.run_to(point)
            return
        while self.num_run < point.serial:
            self.run_until(self._queue[0])

    def run_oldest(self) -> None:
        """Run the oldest step that has not run."""
        if self._queue:
            self.run_until(self._queue[0])

    def _write_pages(self, writes: PageWrites) -> None:
        if len(writes):
            pairs = set(zip(writes.rows.tolist(), writes.columns.tolist(), strict=True))
            assert len(pairs) == len(writes), "one step writes a page-table entry twice"
            self.req_pool.write_pages(*(torch.from_numpy(a) for a in (writes.rows, writes.columns, writes.pages)))

    def _slot(self, row: int, position: int) -> int:
        page = int(self.req_pool.page_table[row, position // self.page_size])
        assert page > 0, f"row {row} position {position} has no page"
        return page * self.page_size + position % self.page_size

    def _history(self, row: int, length: int) -> list[int]:
        return [int(self.slots[self._slot(row, p)]) for p in range(length)]

    def copy_state(self, source: int, slot: int, after: Points) -> Point:
        """Submit a copy, which runs in its turn among the steps."""
        assert self.states is not None

        def run() -> StepOutput:
            self._copy_state(source, slot)
            return StepOutput(np.zeros(0, dtype=np.int64), None, None)

        done = self.forward.record()
        self._queue.append(TokenResult(self, run, done, tuple(after)))
        rows, snapshots = self.req_pool.rows, self.states.snapshots
        for id in (source, slot):
            pool = rows if id < rows.size else snapshots
            pool.submitted(np.array([id]), done, after)
        return done

    def _copy_state(self, source: int, slot: int) -> None:
        assert self.states is not None
        self.states.carried[slot] = self.states.carried[source]

    def _absorb(self, row: int, start: int, length: int, verifies: bool = False) -> list[int]:
        """The history of ``row`` after a step that brings it from ``start`` to ``length`` tokens: its pages', and with
        a recurrent layer the tokens that its state has absorbed before those of the block that was open. A step that
        ``verifies`` drafts absorbs the tokens before it alone."""
        history, states = self._history(row, length), self.states
        if states is not None:
            absorbed = states.absorbed[row] if verifies else start // states.grid * states.grid
            if absorbed:
                history[:absorbed] = states.carried[row]
                assert len(history) == length, f"row {row}: its state is not that after {absorbed} tokens"
            states.absorbed[row] = length // states.grid * states.grid
            states.carried[row] = history[: states.absorbed[row]]
        return history

    @property
    def _verifies(self) -> bool:
        return self.states is not None and self.max_step_tokens > 1

    def _extend(self, batch: StepBatch) -> StepOutput:
        self._write_pages(batch.page_writes)
        for encode in batch.encodes:
            self.embeddings[encode.rows] = embeddings_of(encode.image)
        tokens, scored, samplings = [], [], iter(batch.sampling)
        columns = (batch.rows, batch.starts, batch.seq_lens, batch.samples)
        rows = zip(*(column.tolist() for column in columns), batch.chunks, strict=False)
        for row, start, length, samples, chunk in rows:
            slots = [self._slot(row, p) for p in range(start, length)]
            assert slots == chunk.out_slots.tolist()
            self.slots[slots] = chunk.token_ids
            if chunk.image_rows is not None:
                self.slots[slots] = np.where(chunk.image_rows, self.embeddings[chunk.image_rows], chunk.token_ids)
            self._lens[row] = length
            history = self._absorb(row, start, length)
            if samples:
                token = next_token(history, next(samplings).seed)
                self.req_pool.last_tokens[row] = token
                tokens.append(token)
            scored += [float(start + offset + 1) for offset in chunk.scored]
        num = len(batch.chunks)
        for row, length in zip(batch.rows[num:].tolist(), batch.seq_lens[num:].tolist(), strict=True):
            tokens += self._decode_row(row, length, next(samplings), 1)
        prompt = _values(scored) if scored else None
        return StepOutput(np.array(tokens, dtype=np.int64), _logprobs(tokens, batch.sampling), prompt)

    def _decode(self, batch: StepBatch) -> StepOutput:
        self._write_pages(batch.page_writes)
        if self._composition is not None and self._composition[0] == batch.composition:
            _, rows, lens = self._composition
            lens = lens + batch.num_advanced if batch.num_advanced else batch.seq_lens
        else:
            assert batch.num_advanced == 0, "a batch of others continues nothing"
            rows, lens = batch.rows, batch.seq_lens
        assert rows.tolist() == batch.rows.tolist() and lens.tolist() == batch.seq_lens.tolist()
        self._composition = (batch.composition, rows, lens)
        tokens: list[int] = []
        counts: list[int] = []
        for row, most, sampling in zip(rows.tolist(), lens.tolist(), batch.sampling, strict=True):
            accepted = self._decode_row(row, most, sampling, batch.depth.depth + 1)
            tokens += accepted
            counts.append(len(accepted))
        self.num_by_count.update(counts)
        sampled = [sampling for sampling, num in zip(batch.sampling, counts, strict=True) for _ in range(num)]
        out = StepOutput(np.array(tokens, dtype=np.int64), _logprobs(tokens, sampled), None)
        return out if self.max_step_tokens == 1 else dataclasses.replace(out, counts=np.array(counts))

    def _decode_row(self, row: int, most: int, sampling: ReqSampling, num_tokens: int) -> list[int]:
        """The step of one request, which yields up to ``num_tokens`` tokens; its length is at most ``most``
        afterwards."""
        first = self._lens[row]
        assert first < most <= first + 2 * self.max_step_tokens, "the step before, this one, and no more"
        end = min(first + num_tokens, most)
        history, accepted = self._absorb(row, first, first, True) if self._verifies else self._history(row, first), []
        token = int(self.req_pool.last_tokens[row])
        wanted = 1 + zlib.crc32(np.array([token, first], dtype=np.int64).tobytes()) % num_tokens
        for position in range(first, min(first + wanted, end)):
            self.slots[self._slot(row, position)] = token
            history.append(token)
            if self.states is not None and not self._verifies:
                history = self._absorb(row, position, position + 1)
            token = next_token(history, sampling.seed)
            accepted.append(token)
        self._lens[row] = first + len(accepted)
        assert self.states is not None or self._history(row, self._lens[row]) == history
        for position in range(self._lens[row], end):  # drafts that were not accepted
            self.slots[self._slot(row, position)] = _REJECTED
        self.req_pool.last_tokens[row] = token
        return accepted


def _logprobs(tokens: list[int], sampling: Sequence[ReqSampling]) -> LogprobValues | None:
    """A token's "logprob" is the token. As in the runner, there are logprobs if any request of the batch wants them."""
    return _values([-float(t) for t in tokens]) if any(s.return_logprob for s in sampling) else None


def _values(chosen: list[float]) -> LogprobValues:
    num = len(chosen)
    return LogprobValues(
        np.array(chosen, dtype=np.float32), np.zeros((num, 0), np.float32), np.zeros((num, 0), np.int64)
    )


class TokenTransfers:
    """Replaces a HiCacheController over a TokenWorker. Each stream runs its copies in order, each after the work for
    which it waits, and at the latest when something waits for the copy. ``random`` decides which run earlier, so that a
    copy without a necessary wait reads or writes a page too early."""

    def __init__(self, worker: TokenWorker, num_host_pages: int, random: Random, num_host_states: int = 4) -> None:
        self.host_pages = AuditedPool("host KV pages", num_host_pages, reserved=0)
        self.host_states = None if worker.states is None else TokenHostStates(num_host_states)
        self.load_stream = LaggingStream(StreamName.LOAD, frozenset())
        self.store_stream = LaggingStream(StreamName.STORE, frozenset())
        self.num_moved = {"load": 0, "store": 0}
        self.counts = {kind: TransferCounts() for kind in TransferKind}
        self._worker = worker
        self._random = random
        self._host = np.full((num_host_pages, worker.page_size), -1, dtype=np.int64)
        self._queues: dict[Stream, deque[tuple[Point, Points, Callable[[], None]]]] = {
            self.load_stream: deque(),
            self.store_stream: deque(),
        }
        self._tickets: dict[TransferKind, deque[Ticket]] = {kind: deque() for kind in TransferKind}
        self._num_run = dict.fromkeys(self._queues, 0)  # the host knows of those that were drained
        worker.hicache = self

    @property
    def num_in_flight(self) -> int:
        return sum(map(len, self._tickets.values()))

    def store(
        self, ticket: Ticket, device_pages: np.ndarray, host_pages: np.ndarray, after: Points, states: Pairs = ()
    ) -> None:
        def run() -> None:
            self._host[host_pages] = self._pages[device_pages]
            for slot, host_slot in states:
                self._host_states[host_slot] = self._states[slot]

        self._submit(self.store_stream, ticket, device_pages, host_pages, after, run, states)

    def load(
        self, ticket: Ticket, device_pages: np.ndarray, host_pages: np.ndarray, after: Points, states: Pairs = ()
    ) -> None:
        def run() -> None:
            self._pages[device_pages] = self._host[host_pages]
            for row, host_slot in states:
                self._states[row] = self._host_states[host_slot]

        self._submit(self.load_stream, ticket, device_pages, host_pages, after, run, states)

    @property
    def _states(self) -> list[list[int]]:
        return [] if self._worker.states is None else self._worker.states.carried

    @property
    def _host_states(self) -> list[list[int]]:
        return [] if self.host_states is None else self.host_states.carried

    @property
    def _pages(self) -> np.ndarray:
        return self._worker.slots.reshape(-1, self._worker.page_size)

    def _submit(
        self,
        stream: Stream,
        ticket: Ticket,
        pages: np.ndarray,
        host_pages: np.ndarray,
        after: Points,
        run: Callable[[], None],
        states: Pairs,
    ) -> None:
        assert len(pages) == len(host_pages) == ticket.num_pages and (len(pages) or states)
        done = stream.record()
        for slot, host_slot in states:
            assert self.host_states is not None
            self.host_states.slots.submitted(np.array([host_slot]), done, after)
            if stream is self.load_stream:
                ticket.state_points = Points.of(done)
                self._worker.req_pool.rows.submitted(np.array([slot]), done, after)
            else:
                self._worker.states.snapshots.touched(np.array([slot]), done)
        self.host_pages.submitted(host_pages, done, after)
        if stream is self.load_stream:
            self._worker.pages.submitted(pages, done, after)
            self.num_moved["load"] += len(pages)
        else:
            self._worker.pages.touched(pages, done)
            self.num_moved["store"] += len(pages)
        self._queues[stream].append((done, after, run))
        ticket.submit(Points.of(done), (done,) if stream is self.load_stream and len(pages) else ())
        self._tickets[ticket.kind].append(ticket)
        self.counts[ticket.kind].num_transfers += 1
        self._advance()

    def _advance(self) -> None:
        """Run some of the copies that can run now."""
        while self._random.random() < 0.5:
            stream = self._random.choice([self.load_stream, self.store_stream, self._worker.forward])
            if stream is self._worker.forward:
                self._worker.run_oldest()
            elif self._queues[stream] and all(map(self._has_run, self._queues[stream][0][1])):
                self.run_to(self._queues[stream][0][0])

    def run_to(self, point: Point) -> None:
        queue = self._queues[point.stream]
        while not self._has_run(point):
            done, after, run = queue.popleft()
            for earlier in after:
                self._worker.run_to(earlier)
            run()
            self._num_run[point.stream] = done.serial

    def _has_run(self, point: Point) -> bool:
        if point.stream is self._worker.forward:
            return self._worker.num_run >= point.serial
        return self._num_run[point.stream] >= point.serial

    def ended(self) -> tuple[int, int]:
        self._advance()
        # Each transfer has one Point of its own.
        return self._num_run[self.load_stream], self._num_run[self.store_stream]

    def drain_acks(self, until: tuple[int, int] | None = None) -> list[Ticket]:
        acks = []
        for (kind, tickets), most in zip(self._tickets.items(), until or self.ended(), strict=True):
            stream = self.load_stream if kind is TransferKind.LOAD else self.store_stream
            for _ in range(most - (self.counts[kind].num_transfers - len(tickets))):
                ticket = tickets.popleft()
                for point in ticket.points:
                    stream.note_passed(point)
                acks.append(ticket)
        return acks


__all__ = ["VOCAB_SIZE", "LaggingStream", "Points", "TokenTransfers", "TokenWorker", "next_token"]
