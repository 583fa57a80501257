"""A step as scheduler and worker see it: what is to be computed, what has come of it, what has ended meanwhile.

All of them are host values and frozen once built. The scheduler builds a ScheduleBatch. The worker launches it and
gives back a ForwardResult, which brings a StepOutput. Completions are what a turn of the loop learns of device and
disk.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fenceline.mem_cache.hicache import Transfers
from fenceline.mem_cache.kv_pool import ReqPool
from fenceline.mem_cache.storage.controller import Ack, Storage
from fenceline.mem_cache.transfer import Ticket
from fenceline.memory_order import Device, LeasePool, Point, Points, ResultLease
from fenceline.model_executor.graph_runner import GraphStats
from fenceline.models.loader import NewWeights
from fenceline.sampling.sampling_batch import ReqSampling

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]

_NO_IDS: I64 = np.zeros(0, dtype=np.int64)
_NO_PAGES: I32 = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class PageWrites:
    """Page-table entries to write before the step: ``page_table[rows, columns] = pages``, all [N]."""

    rows: I64 = field(default_factory=lambda: _NO_IDS)
    columns: I64 = field(default_factory=lambda: _NO_IDS)
    pages: I32 = field(default_factory=lambda: _NO_PAGES)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class ExtendSeq:
    """A request's part of an extend step: the tokens after its first ``prefix_len``, which are cached.

    ``sampling`` is None while the prompt goes on in a later chunk. ``prompt_logprobs_from`` is the first
    position (not before ``prefix_len + 1``) whose token's logprob is wanted, None for none; the targets
    are this chunk's own tokens and the one after it. ``following``: the prompt's tokens after the chunk, as many as
    the step reads: one, or with a draft the ``DraftConfig.lookahead``.
    ``history`` (prompt ids, output ids) goes with requests whose penalties start here.
    """

    row: int
    token_ids: I64
    prefix_len: int
    out_slots: I64
    sampling: ReqSampling | None
    prompt_logprobs_from: int | None = None
    prompt_top_logprobs: int = 0
    prompt_token_ids_logprob: tuple[int, ...] = ()
    following: tuple[int, ...] = ()
    history: tuple[I64, I64] | None = None

    @property
    def seq_len(self) -> int:
        """Tokens of the request once this step has run."""
        return self.prefix_len + len(self.token_ids)

    def prompt_logprob_offsets(self) -> tuple[int, int]:
        """Range of chunk offsets whose logits score a prompt token; empty where none is wanted."""
        if self.prompt_logprobs_from is None:
            return 0, 0
        num_targets = len(self.token_ids) if self.following else len(self.token_ids) - 1
        return max(self.prompt_logprobs_from - 1 - self.prefix_len, 0), max(num_targets, 0)


@dataclass(frozen=True, slots=True)
class ExtendBatch:
    """A prefill step. ``after``: Points of the memory it touches for the first time; ``loads``: transfers that bring
    pages that it reads, submitted but not waited for by any earlier step."""

    seqs: tuple[ExtendSeq, ...]
    page_writes: PageWrites
    after: Points
    loads: tuple[Ticket, ...] = ()

    @property
    def constrained(self) -> I64:
        """See :class:`DecodeBatch`; places among the requests that sample."""
        return constrained_rows([seq.sampling for seq in self.seqs])


class DepthChoice(NamedTuple):
    """How many tokens a decode step's draft proposes, one after the other, and ``why``: "fixed", the "best" of several
    depths, "kept" because none is better by enough, or a "probe" of the greatest. ``rates``: the tokens in a second
    that each depth promised, ascending."""

    depth: int
    why: str = "fixed"
    rates: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds that decode steps take: of batches of each of ``sizes``, which ascend, those of each depth, ascending."""

    sizes: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    @staticmethod
    def measured(sizes: tuple[int, ...], seconds: Sequence[Sequence[float]]) -> StepCosts:
        """Of measurements, to which whatever else runs only adds: a step takes no longer than a deeper one of as many
        requests or more."""
        flipped = np.array(seconds)[::-1, ::-1]
        least = np.minimum.accumulate(np.minimum.accumulate(flipped, 0), 1)[::-1, ::-1]
        return StepCosts(sizes, tuple([tuple(of_size) for of_size in least.tolist()]))

    def of(self, num_reqs: int) -> tuple[float, ...]:
        """Those of each depth, of ``num_reqs`` requests: as long as the next larger size takes, or the largest if there
        is none."""
        return self.seconds[min(bisect_left(self.sizes, num_reqs), len(self.sizes) - 1)]


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """A decode step: new tokens for each request, ``Worker.max_step_tokens`` at most.

    ``composition`` names the set and order of requests: while it stays the same the device's own rows,
    lengths and sampling parameters advance there and nothing is uploaded. ``seq_lens`` [B] are the lengths after the
    step, its tokens included: exact where a step yields one token, else the most that they can be, and no KV is written
    beyond them. ``num_advanced``: by how much every length grew since the step before, of the same composition; 0 where
    there is no such number. ``committed_lens`` [B], where a step yields several: no KV is written in front of them.
    ``constrained``: the places of requests that sample under a mask. ``may_accept`` [B], where the engine speculates:
    whether more than one of a request's tokens may be drawn in a step. ``depth``: what the draft proposes.
    """

    composition: int
    rows: I64
    seq_lens: I64
    sampling: tuple[ReqSampling, ...]
    page_writes: PageWrites
    after: Points
    num_advanced: int = 0
    committed_lens: I64 | None = None
    constrained: I64 = field(default_factory=lambda: _NO_IDS)
    may_accept: npt.NDArray[np.bool_] | None = None
    depth: DepthChoice = DepthChoice(0)


ScheduleBatch = ExtendBatch | DecodeBatch


def constrained_rows(sampling: Sequence[ReqSampling | None]) -> I64:
    """The places, among the requests that sample, of those that do it under a mask."""
    present = [one for one in sampling if one is not None]
    return np.flatnonzero(np.fromiter((one.constrained for one in present), np.bool_, len(present)))


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens may be drawn: ``bits`` [M, ceil(V / 32)] int32 for the requests at places ``rows`` [M] int64 among
    those that sample. The others' may be any."""

    rows: I64
    bits: I32


@dataclass(frozen=True, slots=True)
class LogprobValues:
    """Logprobs of N tokens: the tokens' own [N] and the best alternatives' [N, K] with their ids; ``named`` [N, W] are
    those of the tokens that each request names, where one does."""

    chosen: F32
    top: F32
    top_ids: I64
    named: F32 | None = None

    def rows(self, kept: npt.NDArray[np.bool_]) -> LogprobValues:
        """Those of some of the tokens, [N] bool."""
        named = None if self.named is None else self.named[kept]
        return LogprobValues(self.chosen[kept], self.top[kept], self.top_ids[kept], named)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Host values of a step. ``tokens`` [N]: those of each of the S requests that sampled, one request's after the
    other's, in batch order. ``counts`` [S]: how many each has, at least one; None stands for one each.

    ``logprobs`` are of N tokens; ``prompt_logprobs`` cover all wanted prompt positions of all requests, in batch order.
    """

    tokens: I64
    logprobs: LogprobValues | None
    prompt_logprobs: LogprobValues | None
    counts: I64 | None = None
    bad_drafts: I64 | None = (
        None  # [S], 1 for a request whose draft was not usable: not finite, or no ids of tokens
    )

    def token_counts(self, num_reqs: int) -> list[int]:
        """``counts`` as ints, of the ``num_reqs`` requests that sampled."""
        counts = [1] * num_reqs if self.counts is None else self.counts.tolist()
        assert len(counts) == num_reqs and sum(counts) == len(self.tokens), (
            "tokens and counts are of one step"
        )
        return counts


class ForwardResult:
    """``done`` is the Point on FORWARD after which the step no longer touches any memory it was given."""

    def __init__(self, lease: ResultLease) -> None:
        self._lease = lease
        self.done: Point = lease.produced

    def arrived(self) -> bool:
        """Whether :meth:`wait` would not block; to be asked once a step."""
        return self._lease.arrived()

    def wait(self) -> StepOutput:
        """Block the host until the outputs are there. Raises LeaseError on a second call."""
        values = self._lease.wait()
        tokens, logprobs = np.asarray(values["next_tokens"], dtype=np.int64), _logprobs(values, "out")
        counts = bad_drafts = None
        if "counts" in values:  # tokens [B, T]: of each request as many count as ``counts`` [B] says
            counts = np.asarray(values["counts"], dtype=np.int64)
            bad_drafts = np.asarray(values["num_bad"], dtype=np.int64)
            kept = (np.arange(tokens.shape[1]) < counts[:, None]).ravel()
            tokens, logprobs = tokens.ravel()[kept], None if logprobs is None else logprobs.rows(kept)
        return StepOutput(tokens, logprobs, _logprobs(values, "prompt"), counts, bad_drafts)


class HeldStep:
    """A step whose forward has been submitted, and whose sampling waits for the host's masks: which tokens may come
    depends on those of the step before, which the host reads meanwhile.

    ``done`` is the Point on FORWARD after the forward: what comes later touches the requests' rows, and KV only
    where the engine speculates: then nothing is published between the two phases.
    """

    def __init__(self, done: Point, sample: Callable[[TokenMasks], ForwardResult]) -> None:
        self.done = done
        self._sample = sample

    def sample(self, masks: TokenMasks) -> ForwardResult:
        """Submit the rest, once, before the next step."""
        return self._sample(masks)


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
    """All that a turn of the scheduler's loop learns of device and disk, drained once at its beginning. Between two of
    them nobody asks, so that decisions are a function of messages and of these values alone.

    ``transfers`` between device and host that have ended; ``storage``: what its workers have done; ``results_arrived``:
    whether the results that were asked for are there, so that taking them does not block.
    """

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
    max_step_tokens: int  # that a decode step yields for a request

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Long-lived allocations by name."""
        ...

    @property
    def step_costs(self) -> StepCosts | None: ...  # None unless the depth of steps may change

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

    def check_weights(self, weights: NewWeights) -> None:
        """Raises ``ValueError`` with the reason where ``weights`` cannot take the place of the model's: on all ranks
        if on one."""
        ...

    def replace_weights(self, weights: NewWeights, one_more: Callable[[], None]) -> None:
        """Replace the model's weights, after the steps in flight, by ``weights``, which have been checked. ``one_more``
        is called for each tensor."""
        ...

    def launch(self, batch: ScheduleBatch) -> ForwardResult | HeldStep:
        """Submit one step without waiting for it; one with ``constrained`` requests as far as its logits."""
        ...
