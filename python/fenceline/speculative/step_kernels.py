"""What a speculative step computes between its forwards, one launch each: the begin of a step, the positions and slots
of the draft's rows, the storing of drafts, the end of a chain, and the hidden states from which the next step goes on.

B requests, of which those in row 0, the sink, are padding. N rows of each request are verified. Tensors are int64
unless stated otherwise. All functions submit to the current stream, do not synchronise with the host, and may be
captured.
"""

from __future__ import annotations

import torch

from fenceline.layers.kernels.speculative_operands import (
    SINK_LEN,
    AcceptOutputs,
    BeginOutputs,
    NextRow,
    Pieces,
)
from fenceline.memory_order.kernel import Kernel, KernelAccesses, is_watched
from fenceline.speculative.accept import accept, simulate_drafts
from fenceline.speculative.draws import drawn_tokens
from fenceline.speculative.kv_rows import slots_at
from fenceline.speculative.refuse import check_draft
from fenceline.speculative.tree import DraftTree

Tensor = torch.Tensor

# --- the begin of a step


def _begin_accesses(
    op: KernelAccesses,
    rows: Tensor,
    state_lens: Tensor,
    page_table: Tensor,
    last_tokens: Tensor,
    page_size: int,
    depth: int,
    *outputs: Tensor | None,
) -> None:
    for state in (state_lens, page_table, last_tokens):
        op.read(state, rows)
    lens, seq_lens, path_lens, positions, out_slots, input_ids, is_bad = outputs
    for written in (lens, seq_lens, path_lens, positions, out_slots, _column(input_ids, 0), is_bad):
        op.write(written)


BEGIN = Kernel("begin_speculative_step", _begin_accesses)


def begin_step(
    rows: Tensor,
    state_lens: Tensor,
    page_table: Tensor,
    last_tokens: Tensor,
    page_size: int,
    depth: int,
    outputs: BeginOutputs,
) -> None:
    """Compute the rows that a step of ``depth`` verifies, except for the drafts, and write them to ``outputs``.

    ``rows`` [B] are the request rows. By row: ``state_lens`` [R], the number of tokens, the last of which has no KV
    yet; ``page_table`` [R, max_pages] int32 with columns for all rows of the step; and ``last_tokens`` [R].
    """
    operands = (rows, state_lens, page_table, last_tokens, page_size, depth, *outputs)
    if rows.is_cuda:
        from fenceline.layers.kernels.triton.speculative_step import launch_begin

        launch_begin(rows, state_lens, page_table, last_tokens, page_size, depth, outputs)
    elif is_watched(rows.device):
        BEGIN.launch(_begin, *operands)
    else:
        _begin(*operands)


def _begin(
    rows: Tensor,
    state_lens: Tensor,
    page_table: Tensor,
    last_tokens: Tensor,
    page_size: int,
    depth: int,
    lens: Tensor,
    seq_lens: Tensor,
    path_lens: Tensor | None,
    positions: Tensor,
    out_slots: Tensor,
    input_ids: Tensor,
    is_bad: Tensor,
) -> None:
    """The reference implementation."""
    num_rows = positions.shape[1]
    lens.copy_(state_lens[rows])
    seq_lens.copy_(lens - 1 + num_rows)
    if path_lens is not None:
        path_lens.copy_(lens + depth)
    positions.copy_((lens - 1).unsqueeze(1) + torch.arange(num_rows, device=rows.device))
    out_slots.copy_(slots_at(page_table, rows, positions, page_size))
    input_ids[:, 0] = last_tokens[rows]
    is_bad.fill_(False)


# --- rows of the draft


def _place_accesses(
    op: KernelAccesses,
    rows: Tensor,
    lens: Tensor,
    first: int,
    page_table: Tensor,
    page_size: int,
    positions: Tensor | None,
    slots: Tensor,
) -> None:
    op.read(lens)
    op.read(page_table, rows)
    op.write(positions)
    op.write(slots)


PLACE = Kernel("place_rows", _place_accesses)


def place_rows(
    rows: Tensor,
    lens: Tensor,
    first: int,
    page_table: Tensor,
    page_size: int,
    positions: Tensor | None,
    slots: Tensor,
) -> None:
    """Write the slots, and if given the positions, of W consecutive tokens of each request to ``slots`` and
    ``positions`` [B, W]. The first of these tokens is number ``lens`` [B] + ``first``. If that is negative, the
    position is 0 and the slot is the sink's. ``rows`` [B] and ``page_table`` as for :func:`begin_step`."""
    operands = (rows, lens, first, page_table, page_size, positions, slots)
    if rows.is_cuda:
        from fenceline.layers.kernels.triton.speculative_step import launch_place

        launch_place(*operands)
    elif is_watched(rows.device):
        PLACE.launch(_place, *operands)
    else:
        _place(*operands)


def _place(
    rows: Tensor,
    lens: Tensor,
    first: int,
    page_table: Tensor,
    page_size: int,
    positions: Tensor | None,
    slots: Tensor,
) -> None:
    """The reference implementation."""
    places = (lens + first).unsqueeze(1) + torch.arange(slots.shape[1], device=rows.device)
    slots.copy_(slots_at(page_table, rows, places, page_size))
    if positions is not None:
        positions.copy_(places.clamp(min=0))


# --- a draft


_NO_NEXT = (0, *[None] * 7)


def _keep_accesses(
    op: KernelAccesses,
    best_scores: Tensor,
    best_ids: Tensor,
    largest: Tensor,
    is_bad: Tensor,
    input_ids: Tensor,
    column: int,
    vocab_size: int,
    at: int,
    lens: Tensor | None,
    positions: Tensor | None,
    out_slots: Tensor | None,
    *following: Tensor | None,
) -> None:
    for read in (
        best_scores,
        best_ids,
        largest,
        is_bad,
        lens,
        _column(positions, at),
        _column(out_slots, at),
    ):
        op.read(read)
    for written in (is_bad, _column(input_ids, column), *following):
        op.write(written)


KEEP = Kernel("keep_draft", _keep_accesses)


def keep_draft(
    pieces: Pieces,
    is_bad: Tensor,
    input_ids: Tensor,
    column: int,
    vocab_size: int,
    following: NextRow | None,
) -> None:
    """Write the drafts that have been drawn to ``column`` of ``input_ids`` [B, N], and fill the draft's next row
    (``following``), if given.

    If a logit was NaN or the largest infinite, or the token is outside the vocabulary of ``vocab_size``, the whole
    draft of the request is unusable: ``is_bad`` [B] bool becomes true, and the token is 0. See ``check_draft``.
    """
    operands = (*pieces, is_bad, input_ids, column, vocab_size, *(following or _NO_NEXT))
    if is_bad.is_cuda:
        from fenceline.layers.kernels.triton.speculative_step import launch_keep

        launch_keep(pieces, is_bad, input_ids, column, vocab_size, following)
    elif is_watched(is_bad.device):
        KEEP.launch(_keep, *operands)
    else:
        _keep(*operands)


def _keep(
    best_scores: Tensor,
    best_ids: Tensor,
    largest: Tensor,
    is_bad: Tensor,
    input_ids: Tensor,
    column: int,
    vocab_size: int,
    at: int,
    lens: Tensor | None,
    positions: Tensor | None,
    out_slots: Tensor | None,
    draft_lens: Tensor | None,
    draft_ids: Tensor | None,
    draft_positions: Tensor | None,
    draft_slots: Tensor | None,
) -> None:
    """The reference implementation."""
    tokens = drawn_tokens(Pieces(best_scores, best_ids, largest))
    no_logprobs = torch.zeros_like(best_scores[:, :1])
    usable, _, bad = check_draft(tokens.unsqueeze(1), no_logprobs, vocab_size, is_bad)
    input_ids[:, column] = usable[:, 0]
    is_bad.copy_(bad)
    if lens is None or positions is None or out_slots is None:
        return
    assert draft_lens is not None and draft_ids is not None
    assert draft_positions is not None and draft_slots is not None
    draft_lens.copy_(lens + at)
    draft_ids.copy_(usable[:, 0])
    draft_positions.copy_(positions[:, at])
    draft_slots.copy_(out_slots[:, at])


def _proposal_accesses(
    op: KernelAccesses,
    best_scores: Tensor,
    best_ids: Tensor,
    largest: Tensor,
    rows: Tensor,
    counts: Tensor,
    kept: Tensor,
    ids: Tensor | None,
    ahead: int,
) -> None:
    for read in (best_scores, best_ids, largest):
        op.read(read)
    op.write(kept, rows)
    if ids is not None:
        op.read(counts)
        op.write(ids)


PROPOSAL = Kernel("keep_proposal", _proposal_accesses)


def keep_proposal(
    pieces: Pieces, rows: Tensor, counts: Tensor, kept: Tensor, ids: Tensor | None, ahead: int
) -> None:
    """Store the tokens that one layer of a draft with a layer for each step proposes for the next step.

    They are written to ``kept`` [R] at ``rows`` [B], -1 if a logit was NaN or the largest infinite. If ``ids`` [B, W],
    the input of the next layer, is given, they are also written there, at column ``counts`` [B] + ``ahead``, with 0 in
    place of -1."""
    operands = (*pieces, rows, counts, kept, ids, ahead)
    if rows.is_cuda:
        from fenceline.layers.kernels.triton.speculative_step import launch_proposal

        launch_proposal(pieces, rows, counts, kept, ids, ahead)
    elif is_watched(rows.device):
        PROPOSAL.launch(_keep_proposal, *operands)
    else:
        _keep_proposal(*operands)


def _keep_proposal(
    best_scores: Tensor,
    best_ids: Tensor,
    largest: Tensor,
    rows: Tensor,
    counts: Tensor,
    kept: Tensor,
    ids: Tensor | None,
    ahead: int,
) -> None:
    """The reference implementation."""
    tokens = drawn_tokens(Pieces(best_scores, best_ids, largest))
    kept[rows] = tokens
    if ids is not None:
        ids.scatter_(1, (counts + ahead).unsqueeze(1), tokens.clamp(min=0).unsqueeze(1))


# --- the end of a chain


def _accept_accesses(
    op: KernelAccesses,
    input_ids: Tensor,
    drawn: Tensor,
    is_bad: Tensor,
    may_accept: Tensor,
    rows: Tensor,
    lens: Tensor,
    accept_length: float | None,
    *kept: Tensor | None,
) -> None:
    for read in (input_ids, drawn, is_bad, may_accept, rows, lens):
        op.read(read)
    counts, num_bad, *of_rows = kept
    op.write(counts)
    op.write(num_bad)
    for state in of_rows:
        op.write(state, rows)


ACCEPT = Kernel("accept_chain", _accept_accesses)


def accept_chain(
    input_ids: Tensor,
    drawn: Tensor,
    is_bad: Tensor,
    may_accept: Tensor,
    rows: Tensor,
    lens: Tensor,
    accept_length: float | None,
    kept: AcceptOutputs,
) -> None:
    """Determine the accepted drafts of a chain, and advance the request rows.

    ``input_ids`` and ``drawn`` [B, N]: each request's last token and its drafts, and the tokens that the target has
    drawn there. ``is_bad`` and ``may_accept`` [B] bool: whether the request's draft is unusable, and whether its drafts
    may be accepted. ``lens`` [B]: the lengths when the step begins. ``accept_length``: simulate this mean number of
    tokens per step (see ``simulate_drafts``), None not to.
    """
    operands = (input_ids, drawn, is_bad, may_accept, rows, lens, accept_length, *kept)
    if rows.is_cuda:
        from fenceline.layers.kernels.triton.speculative_step import launch_accept

        launch_accept(input_ids, drawn, is_bad, may_accept, rows, lens, accept_length, kept)
    elif is_watched(rows.device):
        ACCEPT.launch(_accept, *operands)
    else:
        _accept(*operands)


def _accept(
    input_ids: Tensor,
    drawn: Tensor,
    is_bad: Tensor,
    may_accept: Tensor,
    rows: Tensor,
    lens: Tensor,
    accept_length: float | None,
    counts: Tensor,
    num_bad: Tensor,
    last_tokens: Tensor,
    state_lens: Tensor,
    previous: Tensor | None,
    is_behind: Tensor | None,
) -> None:
    """The reference implementation."""
    depth = input_ids.shape[1] - 1
    drafts = DraftTree(input_ids, (lens - 1).unsqueeze(1), None, None, is_bad | ~may_accept)
    if accept_length is not None:
        drafts = simulate_drafts(drafts, drawn, rows, accept_length)
    accepted = accept(drafts, drawn, depth)
    counts.copy_(accepted.counts)
    num_bad.copy_(is_bad)
    last_tokens[rows] = accepted.last_tokens
    state_lens[rows] = torch.where(rows == 0, SINK_LEN, lens + counts)
    if previous is not None:
        previous[rows] = drafts.token_ids.gather(1, (counts - 1).unsqueeze(1)).squeeze(1)
    if is_behind is not None:
        # The draft has computed the rows of all its proposals except the last; if it proposed nothing, that of the last
        # token.
        is_behind[rows] = counts > max(depth, 1)


# --- hidden states


def _hidden_accesses(op: KernelAccesses, hidden: Tensor, counts: Tensor, rows: Tensor, kept: Tensor) -> None:
    op.read(hidden)
    op.read(counts)
    op.write(kept, rows)


HIDDEN = Kernel("keep_last_hidden", _hidden_accesses)


def keep_last_hidden(hidden: Tensor, counts: Tensor, rows: Tensor, kept: Tensor) -> None:
    """Copy the hidden state of each request's last accepted token to ``kept`` [R, H] at ``rows`` [B]. It is row
    ``counts`` [B] - 1 of the W rows that the request has in ``hidden`` [B * W, H]. Both have the model's dtype."""
    if rows.is_cuda:
        from fenceline.layers.kernels.triton.speculative_step import launch_hidden

        launch_hidden(hidden, counts, rows, kept)
    elif is_watched(rows.device):
        HIDDEN.launch(_keep_hidden, hidden, counts, rows, kept)
    else:
        _keep_hidden(hidden, counts, rows, kept)


def _keep_hidden(hidden: Tensor, counts: Tensor, rows: Tensor, kept: Tensor) -> None:
    """The reference implementation."""
    size = len(rows)
    kept[rows] = hidden.view(size, -1, hidden.shape[1])[torch.arange(size, device=rows.device), counts - 1]


def _column(tensor: Tensor | None, column: int) -> Tensor | None:
    return None if tensor is None else tensor[:, column]
