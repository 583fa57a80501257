"""What the scheduler hands to the model runner for one step: host values only, frozen once built."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fenceline.mem_cache.host.transfer import Ticket
from fenceline.memory_order import Points
from fenceline.sampling.sampling_batch import ReqSampling

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
    are this chunk's own tokens and ``next_token``, the prompt's token after the chunk, if any.
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
    next_token: int | None = None
    history: tuple[I64, I64] | None = None

    @property
    def seq_len(self) -> int:
        """Tokens of the request once this step has run."""
        return self.prefix_len + len(self.token_ids)

    def prompt_logprob_offsets(self) -> tuple[int, int]:
        """Range of chunk offsets whose logits score a prompt token; empty where none is wanted."""
        if self.prompt_logprobs_from is None:
            return 0, 0
        num_targets = len(self.token_ids) if self.next_token is not None else len(self.token_ids) - 1
        return max(self.prompt_logprobs_from - 1 - self.prefix_len, 0), max(num_targets, 0)


@dataclass(frozen=True, slots=True)
class ExtendBatch:
    """A prefill step. ``after``: Points of the memory it touches for the first time; ``loads``: transfers that bring
    pages that it reads, submitted but not waited for by any earlier step."""

    seqs: tuple[ExtendSeq, ...]
    page_writes: PageWrites
    after: Points
    loads: tuple[Ticket, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """A decode step: one token for each request.

    ``composition`` names the set and order of requests: while it stays the same the device's own rows,
    lengths and sampling parameters advance there and nothing is uploaded. ``seq_lens`` [B] include the
    token this step computes.
    """

    composition: int
    rows: I64
    seq_lens: I64
    sampling: tuple[ReqSampling, ...]
    page_writes: PageWrites
    after: Points


ScheduleBatch = ExtendBatch | DecodeBatch
