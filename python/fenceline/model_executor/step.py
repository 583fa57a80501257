"""A step as scheduler and worker see it: the batch to compute, its results, and what has ended on device and disk.

Batches, outputs and completions are host values and frozen once built. The scheduler builds a StepBatch. The worker
launches it and returns a ForwardResult, whose ``wait`` returns a StepOutput. Completions are all that a turn of the
loop learns about device and disk.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from fenceline.images.image_input import ImageInput
from fenceline.mem_cache.hicache import Transfers
from fenceline.mem_cache.kv_pool import ReqPool
from fenceline.mem_cache.page_tags import PageFinding
from fenceline.mem_cache.state_pool import StatePool
from fenceline.mem_cache.storage.controller import Ack, Storage
from fenceline.mem_cache.transfer import Ticket
from fenceline.memory_order import Device, LeasePool, Point, Points, ResultLease
from fenceline.model_executor.graph_runner import GraphStats
from fenceline.models.loader import NewWeights
from fenceline.sampling.sampling_batch import ReqSampling

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

_Number = TypeVar("_Number", bound=np.generic)

_NO_IDS: I64 = np.zeros(0, dtype=np.int64)
_NO_PAGES: I32 = np.zeros(0, dtype=np.int32)


def concatenated(arrays: Sequence[npt.NDArray[_Number]]) -> npt.NDArray[_Number]:
    """``arrays``, at least one, as one array. If there is only one, which is common, it is returned and not copied."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


@dataclass(frozen=True, slots=True)
class PageWrites:
    """Page-table entries to write before the step: ``page_table[rows, columns] = pages``, all [N]."""

    rows: I64
    columns: I64
    pages: I32

    @staticmethod
    def none() -> PageWrites:
        """No writes; always the same object."""
        return _NO_WRITES

    def __len__(self) -> int:
        return len(self.rows)


_NO_WRITES = PageWrites(_NO_IDS, _NO_IDS, _NO_PAGES)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The T tokens of a prompt that a step computes for a row. ``token_ids`` and ``out_slots`` [T]: the tokens, and
    where their KV goes. ``following``: the prompt's tokens after the chunk that the step reads: at most one, or with a
    draft ``DraftConfig.lookahead``. ``scored``: the offsets in the chunk whose logits score a prompt token, which is
    the next one; ``top_logprobs`` and ``token_ids_logprob`` say which further logprobs are wanted there. ``history``
    (prompt ids, output ids) is given if the request has penalties and samples its first token in this step. ``embeds``:
    whether the step yields the state of the chunk's last token, its prompt's embedding.

    Of a prompt with images: ``image_rows`` [T + n] has for each token of one the row of its embedding in the device's
    pool, and the sink's for all others; the last n are those of the tokens behind the chunk of which a draft reads
    embeddings. None: there are no such tokens. ``axes`` [3, T] are the tokens' positions where
    these have three axes; None: all three are the token's place in the prompt. ``position_delta`` is how far positions
    behind the prompt are from the tokens' places. ``whole``: (first, end) of the tokens of one image, which attend to
    one another if the model does so.

    ``looked_up`` int32, where drafts are looked up in a request's tokens: those up to the chunk's end that the row does
    not have yet, which in the first step of a request includes its cached prefix; -1 for those of images."""

    token_ids: I64
    out_slots: I64
    following: tuple[int, ...] = ()
    scored: range = range(0)
    top_logprobs: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    history: tuple[I64, I64] | None = None
    embeds: bool = False
    image_rows: I64 | None = None
    axes: I64 | None = None
    position_delta: int = 0
    whole: tuple[tuple[int, int], ...] = ()
    looked_up: I32 = field(default_factory=lambda: _NO_PAGES)


@dataclass(frozen=True, slots=True, eq=False)
class Encode:
    """An image whose embeddings a step computes before its tokens, and the ``rows`` [N] of the pool that take them, in
    the order of its placeholder tokens."""

    image: ImageInput
    rows: I64


class DepthChoice(NamedTuple):
    """The draft depth of a decode step: how many tokens the draft proposes one after the other. ``why``: "fixed" if the
    engine has one depth; "best" if it is now better than the previous choice; "kept" if no depth is better by enough;
    "probe" for a trial of the greatest depth; "memory" if the chosen depth does not fit and this is the best that does.
    ``rates``: expected tokens per second of each depth, depths ascending."""

    depth: int
    why: str = "fixed"
    rates: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds that decode steps take. ``sizes``: batch sizes, ascending. ``seconds[i][j]``: for ``sizes[i]`` and the
    j-th draft depth, depths ascending."""

    sizes: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    @staticmethod
    def measured(sizes: tuple[int, ...], seconds: Sequence[Sequence[float]]) -> StepCosts:
        """Costs from measurements. Noise only makes a measured step longer, so each entry is lowered to the smallest
        among steps that are at least as deep and at least as large."""
        flipped = np.array(seconds)[::-1, ::-1]
        least = np.minimum.accumulate(np.minimum.accumulate(flipped, 0), 1)[::-1, ::-1]
        return StepCosts(sizes, tuple([tuple(of_size) for of_size in least.tolist()]))

    def encode(self) -> bytes:
        """As bytes, for other ranks."""
        return json.dumps([self.sizes, self.seconds]).encode()

    @staticmethod
    def decode(data: bytes) -> StepCosts:
        sizes, seconds = json.loads(data)
        return StepCosts(tuple(sizes), tuple(map(tuple, seconds)))

    def of(self, num_reqs: int) -> tuple[float, ...]:
        """Seconds of a step of ``num_reqs`` requests, by depth: those of the next larger measured size, or of the
        largest if there is none."""
        return self.seconds[min(bisect_left(self.sizes, num_reqs), len(self.sizes) - 1)]


@dataclass(frozen=True, slots=True)
class MixedCosts:
    """Seconds that steps take in which prompts are computed and others decode: ``seconds[i]`` if they have ``sizes[i]``
    tokens in all, ascending, and no context; more than the last in proportion. ``per_pair`` is added for each pair of a
    prompt's token and a token in front of its chunk, and ``per_context`` for each token of who decodes."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    per_pair: float = 0.0
    per_context: float = 0.0

    def encode(self) -> bytes:
        """As bytes, for other ranks."""
        return json.dumps([self.sizes, self.seconds, self.per_pair, self.per_context]).encode()

    @staticmethod
    def decode(data: bytes) -> MixedCosts:
        sizes, seconds, per_pair, per_context = json.loads(data)
        return MixedCosts(tuple(sizes), tuple(seconds), per_pair, per_context)

    def of(self, num_prompt: int, num_decodes: int, prefix: int, context: int) -> float:
        """Seconds of a step of ``num_prompt`` tokens after a ``prefix``, and of requests that decode and have
        ``context`` tokens together."""
        num, last = num_prompt + num_decodes, self.sizes[-1]
        more = self.per_pair * num_prompt * prefix + self.per_context * context
        if num > last:
            return self.seconds[-1] * num / last + more
        if num <= self.sizes[0]:
            return self.seconds[0] + more
        i = bisect_left(self.sizes, num)  # asked often, of few sizes: np.interp takes longer
        share = (num - self.sizes[i - 1]) / (self.sizes[i] - self.sizes[i - 1])
        return self.seconds[i - 1] + share * (self.seconds[i] - self.seconds[i - 1]) + more

    def tokens_within(self, limit: float, num_decodes: int, prefix: int, context: int, most: int) -> int:
        """The greatest number of prompt tokens, up to ``most``, with which a step takes at most ``limit`` seconds."""
        seconds = partial(self.of, num_decodes=num_decodes, prefix=prefix, context=context)
        return max(bisect_right(range(most + 1), limit, key=seconds) - 1, 0)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step of B requests, each of which has a row. All columns are [B].

    Row i computes the tokens at positions ``starts[i]`` to ``seq_lens[i] - 1`` of the request in page-table row
    ``rows[i]``, and draws the next one if ``samples[i]``. The host gives the ids of the first ``len(chunks)`` rows, the
    ``chunks`` of their prompts. Each row after these, the ``num_decodes`` last ones, goes on from its last token, which
    only the device knows. A step may have rows of both kinds.

    ``sampling``: the parameters of the rows that sample. ``constrained``: the indices, among these, of those that
    sample under a mask. ``after``: Points of the memory that the step touches for the first time. ``loads``: transfers
    that bring pages that it reads, submitted but not waited for by any earlier step. ``encodes``: the images whose
    embeddings it computes first. ``snapshots``: (row, slot) of the states that it copies behind its layers.

    Of steps without chunks: ``composition`` names the set and order of requests. While it stays the same, rows, lengths
    and sampling parameters advance on the device and are not uploaded. ``num_advanced``: by how much every length has
    grown since the previous step of the same composition, 0 if they have not grown by the same.

    If the engine speculates, a step without chunks yields 1 to ``Worker.max_step_tokens`` tokens for each row. Then
    ``starts`` and ``seq_lens`` are bounds: no KV is written before or beyond them. ``depth`` is the draft's, and
    ``may_accept`` says which requests may get more than one token; it is None if the engine does not speculate.
    """

    rows: I64
    starts: I64
    seq_lens: I64
    samples: Bools
    sampling: tuple[ReqSampling, ...]
    page_writes: PageWrites
    after: Points
    chunks: tuple[Chunk, ...] = ()
    constrained: I64 = field(default_factory=lambda: _NO_IDS)
    loads: tuple[Ticket, ...] = ()
    encodes: tuple[Encode, ...] = ()
    snapshots: tuple[tuple[int, int], ...] = ()
    composition: int = 0
    num_advanced: int = 0
    may_accept: Bools | None = None
    depth: DepthChoice = DepthChoice(0)

    @staticmethod
    def of_chunks(
        rows: Sequence[int],
        starts: Sequence[int],
        chunks: Sequence[Chunk],
        sampling: Sequence[ReqSampling | None],
        page_writes: PageWrites,
        after: Points,
        loads: tuple[Ticket, ...] = (),
        encodes: tuple[Encode, ...] = (),
        snapshots: tuple[tuple[int, int], ...] = (),
    ) -> StepBatch:
        """A step of prompts only. ``sampling`` [B]: None for a row that does not sample."""
        firsts, sizes = np.array(starts, np.int64), [len(chunk.token_ids) for chunk in chunks]
        present = tuple([one for one in sampling if one is not None])
        return StepBatch(
            rows=np.array(rows, np.int64),
            starts=firsts,
            seq_lens=firsts + sizes,
            samples=np.array([one is not None for one in sampling], np.bool_),
            sampling=present,
            page_writes=page_writes,
            after=after,
            chunks=tuple(chunks),
            constrained=constrained_rows(present),
            loads=loads,
            encodes=encodes,
            snapshots=snapshots,
        )

    def beside(self, decodes: StepBatch) -> StepBatch:
        """This step of prompts with the rows of ``decodes``, which yield one token each, behind its own."""
        writes, others = self.page_writes, decodes.page_writes
        return replace(
            self,
            rows=np.concatenate([self.rows, decodes.rows]),
            starts=np.concatenate([self.starts, decodes.starts]),
            seq_lens=np.concatenate([self.seq_lens, decodes.seq_lens]),
            samples=np.concatenate([self.samples, decodes.samples]),
            sampling=self.sampling + decodes.sampling,
            page_writes=PageWrites(
                rows=np.concatenate([writes.rows, others.rows]),
                columns=np.concatenate([writes.columns, others.columns]),
                pages=np.concatenate([writes.pages, others.pages]),
            ),
            after=self.after.join(decodes.after),
            constrained=np.concatenate([self.constrained, decodes.constrained + len(self.sampling)]),
        )

    @property
    def is_decode(self) -> bool:
        """Whether the host gives no ids, so that the step runs from the arena of decode steps and their graphs."""
        return not self.chunks

    @property
    def num_decodes(self) -> int:
        """Rows that go on from their last token."""
        return len(self.rows) - len(self.chunks)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum([len(chunk.token_ids) for chunk in self.chunks])


def constrained_rows(sampling: Sequence[ReqSampling]) -> I64:
    """The indices of the requests that sample under a mask."""
    rows = [row for row, one in enumerate(sampling) if one.constrained]
    return np.array(rows, dtype=np.int64) if rows else _NO_IDS


@dataclass(frozen=True, slots=True)
class LogprobValues:
    """Logprobs of N tokens: ``chosen`` [N] of the tokens themselves, ``top`` and ``top_ids`` [N, K] of the most likely
    ones, and ``named`` [N, W] of the tokens in the requests' ``token_ids_logprob``, None if no request has any."""

    chosen: F32
    top: F32
    top_ids: I64
    named: F32 | None = None

    def rows(self, kept: Bools) -> LogprobValues:
        """The logprobs of the tokens for which ``kept`` [N] is True."""
        named = None if self.named is None else self.named[kept]
        return LogprobValues(self.chosen[kept], self.top[kept], self.top_ids[kept], named)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Host values of a step. ``tokens`` [N]: the new tokens of the S requests that sampled, request by request in batch
    order. ``counts`` [S]: the number of tokens of each request, at least one; None if each has one. ``logprobs`` are
    those of ``tokens``; ``prompt_logprobs`` those of all wanted prompt positions, in batch order. ``bad_drafts`` [S]: 1
    for a request whose draft was unusable, because logits were not finite or ids were no tokens. ``findings``: what
    ``--memory-check full`` has found, in this step. ``embeddings`` [E, hidden_size]: those of the chunks that embed, in
    batch order; None if none does. The tokens of their requests mean nothing."""

    tokens: I64
    logprobs: LogprobValues | None
    prompt_logprobs: LogprobValues | None
    counts: I64 | None = None
    bad_drafts: I64 | None = None
    findings: tuple[PageFinding, ...] = ()
    embeddings: F32 | None = None

    def token_counts(self, num_reqs: int) -> list[int]:
        """``counts`` as a list; ``num_reqs``: how many requests sampled."""
        counts = [1] * num_reqs if self.counts is None else self.counts.tolist()
        assert len(counts) == num_reqs and sum(counts) == len(self.tokens), "tokens and counts are of one step"
        return counts


class ForwardResult:
    """``done`` is the Point on FORWARD after which the step no longer touches any memory it was given."""

    def __init__(
        self,
        lease: ResultLease,
        check: Callable[[], None] | None = None,
        read_findings: Callable[[I32], tuple[PageFinding, ...]] | None = None,
    ) -> None:
        """``check`` is called when the outputs have arrived; it raises if they are not valid results.
        ``read_findings``: see ``PageTags.read``; None if the results have none."""
        self._lease = lease
        self._check = check
        self._read_findings = read_findings
        self.done: Point = lease.produced

    def arrived(self) -> bool:
        """Whether :meth:`wait` would not block; to be asked once a step."""
        return self._lease.arrived()

    def wait(self) -> StepOutput:
        """Block the host until the outputs have arrived. Raises ``LeaseError`` on a second call, and ``PeerLostError``
        if another rank has failed meanwhile."""
        values = self._lease.wait()
        if self._check is not None:
            self._check()
        tokens, logprobs = np.asarray(values["next_tokens"], dtype=np.int64), _logprobs(values, "out")
        counts = bad_drafts = None
        if "counts" in values:  # tokens [B, T], of which the first counts[b] of each row b are valid
            counts = np.asarray(values["counts"], dtype=np.int64)
            bad_drafts = np.asarray(values["num_bad"], dtype=np.int64)
            kept = (np.arange(tokens.shape[1]) < counts[:, None]).ravel()
            tokens, logprobs = tokens.ravel()[kept], None if logprobs is None else logprobs.rows(kept)
        findings: tuple[PageFinding, ...] = ()
        if self._read_findings is not None:
            findings = self._read_findings(np.asarray(values["findings"], dtype=np.int32))
        embeddings = values.get("embeddings")
        return StepOutput(
            tokens,
            logprobs,
            _logprobs(values, "prompt"),
            counts,
            bad_drafts,
            findings,
            None if embeddings is None else np.asarray(embeddings, dtype=np.float32),
        )


class HeldStep:
    """A step whose forward has been submitted and whose sampling waits for token masks from the host. The masks depend
    on the previous step's tokens, which the host reads while the forward runs. ``done`` is the Point on FORWARD after
    the forward. The sampling that follows touches the requests' rows, and the KV only if the engine speculates; in that
    case nothing is published between the two phases."""

    def __init__(self, done: Point, begin_masks: Callable[[], I32], sample: Callable[[], ForwardResult]) -> None:
        self.done = done
        self._begin_masks = begin_masks
        self._sample = sample

    def begin_masks(self) -> I32:
        """Memory [M, ceil(V / 32)] int32 for the masks of the batch's ``constrained`` requests: one bit for each token,
        set if it may be drawn. To be called once; every word has to be written before :meth:`sample`."""
        return self._begin_masks()

    def sample(self) -> ForwardResult:
        """Submit the sampling under the masks. To be called once, before the next step is launched."""
        return self._sample()


def _logprobs(values: dict[str, npt.NDArray[np.generic]], prefix: str) -> LogprobValues | None:
    if f"{prefix}_chosen" not in values:
        return None
    named = values.get(f"{prefix}_named")
    return LogprobValues(
        chosen=np.asarray(values[f"{prefix}_chosen"], dtype=np.float32),
        top=np.asarray(values[f"{prefix}_top"], dtype=np.float32),
        top_ids=np.asarray(values[f"{prefix}_top_ids"], dtype=np.int64),
        named=None if named is None else np.asarray(named, dtype=np.float32),
    )


@dataclass(frozen=True, slots=True)
class Completions:
    """All that a turn of the scheduler's loop learns about device and disk, drained once at its beginning. The device
    and the disk are not asked in between, so that decisions are a function of the messages and of these values alone.
    ``transfers``: transfers between device and host that have ended; ``storage``: what the storage workers have done;
    ``results_arrived``: whether the awaited results have arrived, so that taking them does not block."""

    transfers: Sequence[Ticket] = ()
    storage: Sequence[Ack] = ()
    results_arrived: bool = False

    def __bool__(self) -> bool:
        return bool(self.transfers or self.storage or self.results_arrived)


_NOTHING_ENDED = Completions()


def drain_completions(
    transfers: Transfers | None, storage: Storage | None, awaited: ForwardResult | None
) -> Completions:
    """What has ended since the last call; ``awaited``: the results to ask for, None to ask for none."""
    if transfers is None and awaited is None:
        return _NOTHING_ENDED
    return Completions(
        transfers=() if transfers is None else transfers.drain_acks(),
        storage=() if storage is None else storage.controller.drain(),
        results_arrived=awaited is not None and awaited.arrived(),
    )


class Worker(Protocol):
    """What computes steps: a ModelRunner, or a stand-in that benchmarks measure the scheduler with."""

    device: Device
    pages: LeasePool
    req_pool: ReqPool
    states: StatePool | None  # None without recurrent layers
    max_step_tokens: int  # that a decode step yields for a request

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Long-lived allocations by name."""
        ...

    @property
    def step_costs(self) -> StepCosts | MixedCosts | None: ...  # None unless decisions depend on them

    @property
    def hicache(self) -> Transfers | None: ...  # what moves pages to the host tier and back, None without one

    @property
    def storage(self) -> Storage | None: ...  # the tier below the host, None without one

    @property
    def graph_stats(self) -> GraphStats | None: ...  # None without graphs

    @property
    def prefill_graph_stats(self) -> GraphStats | None: ...  # None without graphs of prefill's pieces

    def completions(self, awaited: ForwardResult | None) -> Completions:
        """What has ended since the last call; ``awaited``: the results to ask for, None to ask for none."""
        ...

    def copy_state(self, source: int, slot: int, after: Points) -> Point:
        """Submit a copy of what ``source`` carries to ``slot``, both slots of ``states``, after ``after`` and behind
        the steps that have been launched. Returns the Point on FORWARD after it."""
        ...

    def check_weights(self, weights: NewWeights) -> None:
        """Raises ``ValueError`` with the reason if ``weights`` cannot replace the model's. All ranks raise together."""
        ...

    def replace_weights(self, weights: NewWeights, one_more: Callable[[], None]) -> None:
        """Replace the model's weights by ``weights``, which have been checked, after the steps in flight. ``one_more``
        is called for each tensor that has been replaced."""
        ...

    def launch(self, batch: StepBatch) -> ForwardResult | HeldStep:
        """Submit one step without waiting for it. With ``constrained`` requests only the forward is submitted, and a
        HeldStep returned."""
        ...
