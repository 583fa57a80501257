"""Makes steps without a scheduler. Requests join, decode in changing batches, and leave their rows and pages to the
next ones. A step never depends on a token, so one trace runs on any device, with or without guards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from fenceline.memory_order import Points
from fenceline.model_executor.step import Chunk, PageWrites, StepBatch
from fenceline.sampling.sampling_batch import ReqSampling
from fenceline.sampling.sampling_params import SamplingParams

VOCAB_SIZE = 256
GREEDY = SamplingParams(temperature=0.0)
PLAIN = (GREEDY, SamplingParams(temperature=0.8), SamplingParams(temperature=1.3))
# The requests above can be sampled inside a captured step; these need the whole sampler.
FULL = (
    SamplingParams(temperature=0.9, top_k=12, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    SamplingParams(temperature=1.1, logit_bias={5: 3.0, 9: -4.0}, min_new_tokens=3),
)


@dataclass(frozen=True, slots=True)
class TraceShape:
    """The limits of a random trace. ``batches``: sizes of decode batches; ``prompts``: lengths of prompts; ``outputs``:
    fewest and most decode steps of a request; ``steady``: average number of steps without a change; ``chunk``: longer
    prompts are computed in two steps; ``logprob_share``: the fraction of requests that want logprobs."""

    page_size: int = 16
    num_rows: int = 12
    num_pages: int = 200
    batches: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    prompts: tuple[int, ...] = (1, 3, 8, 15, 16, 17, 40)
    outputs: tuple[int, int] = (2, 40)
    steady: int = 6
    chunk: int = 1 << 30
    sampling: tuple[SamplingParams, ...] = PLAIN
    logprob_share: float = 0.0


@dataclass(slots=True, eq=False)
class TraceReq:
    """A request: ``seq_len`` tokens have been computed; ``until`` is its final length."""

    row: int
    prompt: np.ndarray
    until: int
    sampling: ReqSampling
    prompt_logprobs: bool
    seq_len: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        return self.seq_len >= len(self.prompt)


class TraceMaker:
    """Records steps. It leases rows and pages, the most recently released ones first."""

    def __init__(self, shape: TraceShape, random: Random) -> None:
        self.shape = shape
        self.random = random
        self.batches: list[StepBatch] = []
        self.live: list[TraceReq] = []
        self._rows = list(range(shape.num_rows, 0, -1))
        self._pages = list(range(shape.num_pages, 0, -1))
        self._promised = 0  # pages that the live requests will still need
        self._composition = 0
        self._decoded: list[TraceReq] = []

    def new_req(
        self, prompt_len: int, num_outputs: int, params: SamplingParams = GREEDY, logprobs: bool = False
    ) -> TraceReq | None:
        """A request with a row, or None if there is no free row or pages might run out."""
        needed = math.ceil((prompt_len + num_outputs) / self.shape.page_size)
        if not self._rows or needed > len(self._pages) - self._promised:
            return None
        self._promised += needed
        row = self._rows.pop()
        prompt = np.array([self.random.randrange(1, VOCAB_SIZE) for _ in range(prompt_len)], np.int64)
        sampling = ReqSampling(
            params, self.random.getrandbits(62), row, prompt_len, (7,), logprobs, 2 if logprobs else 0
        )
        req = TraceReq(row, prompt, prompt_len + num_outputs, sampling, logprobs and prompt_len > 1)
        self.live.append(req)
        return req

    def extend(self, reqs: Sequence[TraceReq]) -> None:
        """The next chunk of each request's prompt."""
        writes: list[tuple[int, int, int]] = []
        rows, starts = [req.row for req in reqs], [req.seq_len for req in reqs]
        chunks = [self._chunk(req, writes) for req in reqs]
        sampling = [req.sampling if req.ready else None for req in reqs]
        batch = StepBatch.of_chunks(rows, starts, chunks, sampling, _page_writes(writes), Points.none())
        self.batches.append(batch)

    def decode(self, reqs: list[TraceReq]) -> None:
        """A step that computes one token for each request."""
        if reqs != self._decoded:
            self._composition += 1
            self._decoded = list(reqs)
        writes: list[tuple[int, int, int]] = []
        for req in reqs:
            assert req.ready and req.seq_len < req.until
            self._grow(req, req.seq_len + 1, writes)
        self.batches.append(
            StepBatch(
                rows=np.array([req.row for req in reqs], np.int64),
                starts=np.array([req.seq_len - 1 for req in reqs], np.int64),
                seq_lens=np.array([req.seq_len for req in reqs], np.int64),
                samples=np.ones(len(reqs), np.bool_),
                sampling=tuple(req.sampling for req in reqs),
                page_writes=_page_writes(writes),
                after=Points.none(),
                composition=self._composition,
            )
        )

    def beside_a_prompt(self, prompt_len: int) -> None:
        """The last step, of decoding requests, also gets a new prompt, which ends with its first token."""
        decodes, req = self.batches.pop(), self.new_req(prompt_len, 0, PLAIN[1])
        assert req is not None
        self.extend([req])
        self.leave(req)
        self.batches[-1] = self.batches[-1].beside(decodes)

    def leave(self, req: TraceReq) -> None:
        """End ``req``. Its row and pages are the first to be leased in the next step."""
        self.live.remove(req)
        self._promised -= math.ceil(req.until / self.shape.page_size) - len(req.pages)
        self._rows.append(req.row)
        self._pages += reversed(req.pages)

    def _grow(self, req: TraceReq, seq_len: int, writes: list[tuple[int, int, int]]) -> None:
        req.seq_len = seq_len
        while len(req.pages) * self.shape.page_size < seq_len:
            self._promised -= 1
            writes.append((req.row, len(req.pages), self._pages[-1]))
            req.pages.append(self._pages.pop())

    def _chunk(self, req: TraceReq, writes: list[tuple[int, int, int]]) -> Chunk:
        start, size = req.seq_len, self.shape.page_size
        end = len(req.prompt)
        if end - start > self.shape.chunk:
            end = start + (end - start) // 2
        self._grow(req, end, writes)
        positions = np.arange(start, end)
        last = end == len(req.prompt)
        penalised = last and req.sampling.params.needs_penalties
        return Chunk(
            token_ids=req.prompt[start:end],
            out_slots=np.array(req.pages, np.int64)[positions // size] * size + positions % size,
            scored=range(end - last if req.prompt_logprobs and start == 0 else 0),
            top_logprobs=2,
            following=() if last else (int(req.prompt[end]),),
            history=(req.prompt, np.zeros(0, np.int64)) if penalised else None,
        )


def _page_writes(writes: list[tuple[int, int, int]]) -> PageWrites:
    if not writes:
        return PageWrites.none()
    rows, columns, pages = zip(*writes, strict=True)
    return PageWrites(np.array(rows, np.int64), np.array(columns, np.int64), np.array(pages, np.int32))


def random_trace(seed: int, num_steps: int, shape: TraceShape) -> list[StepBatch]:
    """Random joins, leaves, lengths and batches; all sizes in ``shape.batches`` are equally likely."""
    random = Random(seed)
    maker = TraceMaker(shape, random)
    chosen: list[TraceReq] = []
    while len(maker.batches) < num_steps:
        waiting = [req for req in maker.live if not req.ready]
        wanted = random.choice(shape.batches)
        if waiting and random.random() < 0.5:
            maker.extend(waiting)
        elif chosen and random.random() < 1 - 1 / shape.steady:
            pass  # the same batch again
        else:
            missing = max(wanted - len(maker.live), 0) or int(random.random() < 0.1)
            joining = [_random_req(maker) for _ in range(missing)]
            if reqs := [req for req in joining if req is not None]:
                maker.extend(reqs)
            ready = [req for req in maker.live if req.ready]
            chosen = random.sample(ready, min(wanted, len(ready)))
        if not chosen or len(maker.batches) >= num_steps:
            continue
        maker.decode(chosen)
        gone = [req for req in maker.live if req.ready and req.seq_len == req.until]
        if random.random() < 0.02:
            gone += [req for req in maker.live if req not in gone][:1]  # aborted
        for req in gone:
            maker.leave(req)
        if any(req in chosen for req in gone):
            chosen = []
    return maker.batches


def _random_req(maker: TraceMaker) -> TraceReq | None:
    shape, random = maker.shape, maker.random
    return maker.new_req(
        random.choice(shape.prompts),
        random.randint(*shape.outputs),
        random.choice(shape.sampling),
        random.random() < shape.logprob_share,
    )


def swap_trace(seed: int, num_steps: int, batch: int = 4, prompt_len: int = 6, mixed: bool = False) -> list[StepBatch]:
    """Two sets of requests alternate. Every step uploads its inputs with the same layout, so that a step that gets
    another step's values still computes valid addresses from them. Pages have one token. ``mixed``: each step also has
    a prompt, which ends with its first token."""
    shape = TraceShape(page_size=1, num_rows=2 * batch + 1, num_pages=2 * batch * (prompt_len + num_steps) + prompt_len)
    maker = TraceMaker(shape, Random(seed))
    reqs = [maker.new_req(prompt_len, num_steps, PLAIN[i % len(PLAIN)]) for i in range(2 * batch)]
    sets = [[req for req in half if req is not None] for half in (reqs[:batch], reqs[batch:])]
    assert len(sets[0]) == len(sets[1]) == batch
    for half in sets:
        maker.extend(half)
    for step in range(num_steps):
        maker.decode(sets[step % 2])
        if mixed:
            maker.beside_a_prompt(prompt_len)
    return maker.batches


def steady_trace(
    seed: int, num_steps: int, batch: int = 4, page_size: int = 16, params: SamplingParams = PLAIN[1]
) -> list[StepBatch]:
    """One batch of equal prompts, which no request joins or leaves."""
    pages = batch * math.ceil((6 + num_steps) / page_size)
    maker = TraceMaker(TraceShape(page_size=page_size, num_rows=batch, num_pages=pages), Random(seed))
    reqs = [req for _ in range(batch) if (req := maker.new_req(6, num_steps, params)) is not None]
    maker.extend(reqs)
    for _ in range(num_steps):
        maker.decode(reqs)
    return maker.batches


def row_reuse_trace(seed: int, num_reqs: int, prompt_len: int = 6) -> list[StepBatch]:
    """One row and one set of pages: each request ends with its first token, and the next one gets them immediately."""
    maker = TraceMaker(TraceShape(page_size=1, num_rows=1, num_pages=prompt_len), Random(seed))
    for _ in range(num_reqs):
        req = maker.new_req(prompt_len, 0, PLAIN[1])
        assert req is not None
        maker.extend([req])
        maker.leave(req)
    return maker.batches
