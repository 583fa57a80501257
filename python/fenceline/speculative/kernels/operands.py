"""What the kernels of a speculative step read and write, by name: see ``step``."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

Tensor = torch.Tensor

SINK_LEN = 2  # of the sink's row: a last token and one before it


class Begun(NamedTuple):
    """Where the begin of a step goes."""

    lens: Tensor  # [B]
    seq_lens: Tensor  # [B], with all N rows
    path_lens: Tensor | None  # [B], with all rows that a path may have; None: nobody needs it
    positions: Tensor  # [B, N], from that of the last token on
    out_slots: Tensor  # [B, N]
    input_ids: Tensor  # [B, N], of which the first column is written: the last tokens
    is_bad: Tensor  # [B] bool: false


class NextRow(NamedTuple):
    """The row of each request that the draft computes next: column ``at`` of ``positions`` and ``out_slots`` [B, N],
    where the request has ``lens`` + ``at`` tokens, and where all that goes."""

    at: int
    lens: Tensor  # [B]
    positions: Tensor
    out_slots: Tensor
    draft_lens: Tensor  # [B]
    draft_ids: Tensor  # [B]
    draft_positions: Tensor  # [B]
    draft_slots: Tensor  # [B]


class Kept(NamedTuple):
    """Where the end of a step goes: of the requests [B], and of their rows [R]."""

    counts: Tensor  # [B]: the step's tokens, 1 to N
    num_bad: Tensor  # [B]: 1 where the draft could not be used
    last_tokens: Tensor  # [R]
    state_lens: Tensor  # [R]: that of the sink remains
    previous: Tensor | None  # [R]: the token in front of the last one. None: nobody needs it
    is_behind: Tensor | None  # [R] bool: whether the draft has not computed that one yet


def sure_and_more(accept_length: float) -> tuple[int, int]:
    """The tokens that each simulated step has, and of 2**31 hashes how many give it one more."""
    sure = int(accept_length)
    return sure, math.ceil((accept_length - sure) * 2**31)
