"""Req: one request as the scheduler knows it. Owned and mutated by the scheduler alone."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fenceline.constrained.matcher import RequestGrammar
from fenceline.images.image_input import ImageInput
from fenceline.ipc.io_struct import (
    CachedTokensDetails,
    DecodeInfo,
    FinishReason,
    SpecCounts,
    Stage,
    TokenizedGenerateReq,
    TokenPairs,
)
from fenceline.mem_cache.hicache import OffloadedTail
from fenceline.mem_cache.storage.worker import Prefetch
from fenceline.mem_cache.tree.radix_cache import MatchResult, TreeNode
from fenceline.memory_order import Points
from fenceline.sampling.sampling_batch import ReqSampling

I32 = npt.NDArray[np.int32]

# Prompt tokens the detokenizer gets as context for decoding the first output tokens.
_DECODE_CONTEXT = 8
# Tokens between messages for a request whose tokens are not streamed or searched for stop strings.
_QUIET_INTERVAL = 64


def no_pages() -> array[int]:
    """An empty list of KV pages: int32, which numpy copies a hundred times as fast as a list of as many ints."""
    return array("i")


def emit_interval(message: TokenizedGenerateReq, stream_interval: int) -> int:
    """Tokens between two messages to the detokenizer: ``stream_interval`` for streams and stop strings, else more."""
    watched = message.stream or message.sampling_params.stop
    return stream_interval if watched else _QUIET_INTERVAL


@dataclass(slots=True)
class LogprobLog:
    """Logprobs gathered since the last message: tokens, their logprobs, the top alternatives, and the logprobs of the
    tokens in ``token_ids_logprob``."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    top: TokenPairs = field(default_factory=TokenPairs)
    named: TokenPairs = field(default_factory=TokenPairs)

    @staticmethod
    def of_prompt(source: TokenizedGenerateReq, prompt_ids: I32) -> LogprobLog | None:
        """The log of a prompt before any of it is scored; None if no prompt logprobs are asked for. As in SGLang, the
        first position asked for has no logprob, even if it is not the first of the prompt."""
        if not source.return_logprob or source.logprob_start_len < 0:
            return None
        first = prompt_ids[source.logprob_start_len : source.logprob_start_len + 1].tolist()
        if not first:
            return LogprobLog()
        named = TokenPairs.of([[]]) if source.token_ids_logprob else TokenPairs()
        return LogprobLog(first, [None], TokenPairs.of([[]]), named)


@dataclass(frozen=True, slots=True)
class Prefix:
    """The cached prefix of a request: ``match`` in the tree, followed by ``num_tail_tokens`` that the request left on
    the host in a page of its own when it was retracted."""

    match: MatchResult
    num_tail_tokens: int = 0

    @property
    def num_page_tokens(self) -> int:
        """Tokens in pages of the tree, on the device or the host."""
        return self.match.num_tokens + self.match.num_host_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV need not be computed."""
        return self.num_page_tokens + self.num_tail_tokens


@dataclass(frozen=True, slots=True)
class QueuedMatch:
    """A waiting request's prefix, with the tree's ``num_created`` and ``num_moves`` when it was matched."""

    prefix: Prefix
    num_created: int
    num_moves: int


@dataclass(slots=True, eq=False)
class Samples:
    """What the samples of one prompt share: the prompt with its images, and the first of them that computes it."""

    prompt_ids: I32
    prompt_keys: I32  # in which digests stand for the tokens of images, else prompt_ids itself
    images: tuple[ImageInput, ...] = ()
    computing: Req | None = None


@dataclass(slots=True, eq=False)
class Req:
    """One request from its arrival until it leaves.

    There are two lengths, which differ while a step is in flight. ``committed_len`` counts the tokens whose KV has been
    computed by published steps. ``allocated_len`` is the upper bound of what all steps in flight may access (while a
    request decodes, the column in RunningBatch is valid instead). No other request uses the memory between the two
    until those steps are done. ``output_ids`` holds published tokens only.
    ``left`` is set once, when the request finishes, is aborted or is retracted. A retracted request goes on as a new
    Req (:meth:`resumed`), so tokens in flight for the old one are dropped.
    """

    source: TokenizedGenerateReq  # without its input_ids and images
    rid: str = field(init=False)
    prompt_ids: I32
    prompt_keys: I32  # see Samples
    images: tuple[ImageInput, ...]
    stop_ids: frozenset[int]
    seed: int
    max_new_tokens: int
    emit_interval: int  # tokens between two messages to the detokenizer
    samples: Samples | None = None  # of its prompt; None if it came alone
    rank: int = 0  # of its priority: the smallest is scheduled first
    output_ids: list[int] = field(default_factory=list)
    grammar: RequestGrammar | None = None  # has accepted the tokens of output_ids
    num_retractions: int = 0
    num_kept: int = 0  # of output_ids: those that it had when it was retracted
    cached_tokens: int = 0  # of the prompt, as reported; set at first admission
    cached_details: CachedTokensDetails | None = None  # the same by tier, set with it; None without HiCache
    was_admitted: bool = False
    num_emitted: int = 0
    announced: bool = False  # the detokenizer knows this request
    prompt_log: LogprobLog | None = None
    output_log: LogprobLog | None = None
    embedding: bytes | None = None  # see DecodeInfo
    # Seconds of the statistics' clock. No decision depends on it, nor on queue_time_s.
    arrived_at: float = 0.0
    queue_time_s: float | None = None  # from its arrival to its first step
    stages: list[Stage] | None = None  # that begin with its admission; None if requests are not traced
    queued_since: float = 0.0  # of the same clock: since when it waits, 0 once it runs

    # Memory, while admitted
    row: int = 0
    pages: array[int] = field(default_factory=no_pages)
    node: TreeNode | None = None
    in_reserve: bool = False  # see Holdings
    shared_len: int = 0  # leading tokens whose pages belong to the tree
    allocated_len: int = 0
    committed_len: int = 0
    # Snapshots of its recurrent state that the tree is to get once their steps are published: after how many tokens,
    # and in which slots. ``snapshot_len``: after how many the latest one is, its prefix's included. ``fork_len``: see
    # RequestMemory.fork.
    snapshots: list[tuple[int, int]] = field(default_factory=list)
    snapshot_len: int = 0
    fork_len: int = 0
    # Of its latest published step that has verified drafts: how many tokens' KV there was before, and after it with
    # what it yielded behind the request's end.
    verified: tuple[int, int] | None = None
    last_flight: Points = field(default_factory=Points.none)
    num_verified: int = 0  # decode steps of the request, if the engine speculates
    num_drafts: int = 0  # draft tokens that were verified in them
    num_accepted: int = 0  # how many of those were accepted
    has_bad_draft: bool = False
    last_step: int = 0  # number of the latest step that it is in
    queued_match: QueuedMatch | None = None  # while it waits
    prefetch: Prefetch | None = None  # of its prompt's pages from storage, until it is admitted
    # Its last, incomplete page on the host, from a retraction until it is admitted again.
    tail: OffloadedTail | None = None
    tail_after: Points = field(default_factory=Points.none)  # when the copy of that page to the host is done
    left: bool = False
    # Whether the last tick found it running (None before the first tick), and the time of the tick since which it has.
    clocked_running: bool | None = None
    clocked_since: float = 0.0
    _sampling: ReqSampling | None = None  # for the row that it had when this was made

    def __post_init__(self) -> None:
        self.rid = self.source.rid

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and published output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def final_len(self) -> int:
        """``allocated_len`` after the last step: the last sampled token needs no KV of its own."""
        return len(self.prompt_ids) + max(self.max_new_tokens, 1) - 1

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt tokens are scored: asked for, and not already done before a retraction."""
        return self.source.return_logprob and self.source.logprob_start_len >= 0 and not self.output_ids

    @property
    def spec_counts(self) -> SpecCounts:
        """Verified steps, accepted drafts and all drafts of this request."""
        return SpecCounts(self.num_verified, self.num_accepted, self.num_drafts)

    def token_ids(self) -> I32:
        """Prompt and published output as one array."""
        return self._followed_by_output(self.prompt_ids)

    def key_ids(self) -> I32:
        """``token_ids`` as the prefix tree knows them."""
        return self._followed_by_output(self.prompt_keys)

    def _followed_by_output(self, prompt: I32) -> I32:
        if not self.output_ids:
            return prompt
        # By way of int64: if an edge is missing, "tokens" may be any bytes, and that must not hide what is reported.
        outputs = np.array(self.output_ids, dtype=np.int64).astype(np.int32)
        return np.concatenate([prompt, outputs])

    def sampling(self) -> ReqSampling:
        """The request's sampling parameters as the sampler reads them; the row must be assigned."""
        if self._sampling is None or self._sampling.row != self.row:
            self._sampling = ReqSampling(
                params=self.source.sampling_params,
                seed=self.seed,
                row=self.row,
                prompt_len=len(self.prompt_ids),
                stop_ids=tuple(sorted(self.stop_ids)),
                return_logprob=self.source.return_logprob,
                top_logprobs_num=self.source.top_logprobs_num,
                token_ids_logprob=tuple(self.source.token_ids_logprob),
                constrained=self.grammar is not None,
            )
        return self._sampling

    def decode_info(self) -> DecodeInfo:
        """What the detokenizer is told once, with the first token."""
        return DecodeInfo(
            prompt_tail_ids=self.prompt_ids[-_DECODE_CONTEXT:].tolist(),
            sampling_params=self.source.sampling_params,
            queue_time_s=self.queue_time_s,
            embedding=self.embedding,
        )

    def finish_reason_after(self, token: int) -> FinishReason | None:
        """Why the request ends with ``token`` as its newest output, or None if it goes on."""
        num_outputs = len(self.output_ids)
        if self.grammar is not None and self.grammar.ended:
            return FinishReason(type="stop", matched=self.grammar.end_token(token))
        if token in self.stop_ids and num_outputs >= self.source.sampling_params.min_new_tokens:
            return FinishReason(type="stop", matched=token)
        if num_outputs >= self.max_new_tokens:
            return FinishReason(type="length", length=num_outputs)
        return None

    def resumed(self) -> Req:
        """A new Req for a retracted request: it has all published tokens, and no memory yet."""
        return Req(
            source=self.source,
            prompt_ids=self.prompt_ids,
            prompt_keys=self.prompt_keys,
            images=self.images,
            stop_ids=self.stop_ids,
            seed=self.seed,
            max_new_tokens=self.max_new_tokens,
            emit_interval=self.emit_interval,
            rank=self.rank,
            samples=self.samples,
            output_ids=self.output_ids,
            grammar=self.grammar,
            num_retractions=self.num_retractions + 1,
            num_kept=len(self.output_ids),
            cached_tokens=self.cached_tokens,
            cached_details=self.cached_details,
            was_admitted=True,
            num_emitted=self.num_emitted,
            num_verified=self.num_verified,
            num_drafts=self.num_drafts,
            num_accepted=self.num_accepted,
            has_bad_draft=self.has_bad_draft,
            announced=self.announced,
            # If the prompt was not completed, all of it is scored again.
            prompt_log=self.prompt_log if self.output_ids else LogprobLog.of_prompt(self.source, self.prompt_ids),
            output_log=self.output_log,
            arrived_at=self.arrived_at,
            queue_time_s=self.queue_time_s,
            stages=self.stages,
            queued_since=time.perf_counter(),
        )
