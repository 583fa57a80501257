"""Named operands of the kernels of a speculative step, see ``speculative.step_kernels``. Tensors are int64 unless
stated otherwise."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

Tensor = torch.Tensor

SINK_LEN = 2  # the length of the sink's row: a last token and one before it


class Pieces(NamedTuple):
    """The best token of each of P pieces of the vocabulary, for B requests: see ``draw_pieces``."""

    best_scores: torch.Tensor  # [B, P] float32
    best_ids: torch.Tensor  # [B, P] int32
    largest: torch.Tensor  # [B, P] float32


class BeginOutputs(NamedTuple):
    """Outputs of ``begin_step``."""

    lens: Tensor  # [B]: the requests' lengths, including the last token, which has no KV yet
    seq_lens: Tensor  # [B]: the lengths including all N rows
    path_lens: Tensor | None  # [B]: the lengths including the longest possible path; None: not needed
    positions: Tensor  # [B, N]: consecutive positions, beginning with that of the last token
    out_slots: Tensor  # [B, N]: the KV slots of these positions
    input_ids: Tensor  # [B, N]: only the first column is written, with the last tokens
    is_bad: Tensor  # [B] bool: set to false


class NextRow(NamedTuple):
    """The row of each request that the draft computes next, and the outputs of ``keep_draft`` for it. The row is column
    ``at`` of ``positions`` and ``out_slots`` [B, N]. The request then has ``lens`` + ``at`` tokens."""

    at: int
    lens: Tensor  # [B]
    positions: Tensor
    out_slots: Tensor
    draft_lens: Tensor  # [B], output: lens + at
    draft_ids: Tensor  # [B], output: the drafted token
    draft_positions: Tensor  # [B], output
    draft_slots: Tensor  # [B], output


class AcceptOutputs(NamedTuple):
    """Outputs of ``accept_chain``: for each request [B], or for each request row [R]."""

    counts: Tensor  # [B]: the number of tokens that the step yields, 1 to N
    num_bad: Tensor  # [B]: 1 if the draft was unusable
    last_tokens: Tensor  # [R]
    state_lens: Tensor  # [R]: the new lengths; that of the sink stays SINK_LEN
    previous: Tensor | None  # [R]: the token before the last one; None: not needed
    is_behind: Tensor | None  # [R] bool: whether the draft has not computed that token yet; None: not needed


def simulated_counts(accept_length: float) -> tuple[int, int]:
    """For ``simulate_drafts``: the minimum number of tokens that a step yields, and the bound below which a hash in
    [0, 2**31) makes it yield one more."""
    min_count = int(accept_length)
    return min_count, math.ceil((accept_length - min_count) * 2**31)
