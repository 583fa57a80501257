"""What a speculative step computes between its forwards, one launch each: the begin of a step, the positions and slots
of the draft's rows, the storing of drafts, the end of a chain, and the hidden states from which the next step goes on.

B requests, of which those in row 0, the sink, are padding. N rows of each request are verified. Tensors are int64
unless stated otherwise. All functions submit to the current stream, do not synchronise with the host, and may be
captured.
"""

from __future__ import annotations

import torch

from fenceline.layers.kernels.speculative_operands import SINK_LEN, AcceptOutputs, BeginOutputs, NextRow, Pieces
from fenceline.memory_order.kernel import Kernel, KernelAccesses, declared
from fenceline.speculative.accept import accept, simulate_drafts
from fenceline.speculative.draws import drawn_tokens
from fenceline.speculative.kv_rows import slots_at
from fenceline.speculative.refuse import check_draft
from fenceline.speculative.tree import DraftTree

Tensor = torch.Tensor

# --- the begin of a step


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
    yet; ``page_table`` [R, max_pages] int32 with columns for all rows of the step; and ``last_tokens`` [R]."""
    operands = (rows, state_lens, page_table, last_tokens, page_size, depth, *outputs)
    if rows.is_cuda:
        from fenceline.layers.kernels.triton.speculative_step import launch_begin

        launch_begin(rows, state_lens, page_table, last_tokens, page_size, depth, outputs)
    else:
        BEGIN.run(*operands)


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
    num_rows = positions.shape[1]
    lens.copy_(state_lens[rows])
    seq_lens.copy_(lens - 1 + num_rows)
    if path_lens is not None:
        path_lens.copy_(lens + depth)
    positions.copy_((lens - 1).unsqueeze(1) + torch.arange(num_rows, device=rows.device))
    out_slots.copy_(slots_at(page_table, rows, positions, page_size))
    input_ids[:, 0] = last_tokens[rows]
    is_bad.fill_(False)


BEGIN = declared(
    "begin_speculative_step",
    _begin,
    "state_lens[rows] page_table[rows] last_tokens[rows]"
    " -> lens seq_lens path_lens positions out_slots input_ids[:,0] is_bad",
)


# --- rows of the draft


def place_rows(
    rows: Tensor, lens: Tensor, first: int, page_table: Tensor, page_size: int, positions: Tensor | None, slots: Tensor
) -> None:
    """Write the slots, and if given the positions, of W consecutive tokens of each request to ``slots`` and
    ``positions`` [B, W]. The first of these tokens is number ``lens`` [B] + ``first``. If that is negative, the
    position is 0 and the slot is the sink's. ``rows`` [B] and ``page_table`` as for :func:`begin_step`."""
    operands = (rows, lens, first, page_table, page_size, positions, slots)
    if rows.is_cuda:
        from fenceline.layers.kernels.triton.speculative_step import launch_place

        launch_place(*operands)
    else:
        PLACE.run(*operands)


def _place(
    rows: Tensor, lens: Tensor, first: int, page_table: Tensor, page_size: int, positions: Tensor | None, slots: Tensor
) -> None:
    places = (lens + first).unsqueeze(1) + torch.arange(slots.shape[1], device=rows.device)
    slots.copy_(slots_at(page_table, rows, places, page_size))
    if positions is not None:
        positions.copy_(places.clamp(min=0))


PLACE = declared("place_rows", _place, "lens page_table[rows] -> positions slots")


# --- a draft


_NO_NEXT = (0, *[None] * 7)


def keep_draft(
    pieces: Pieces, is_bad: Tensor, input_ids: Tensor, column: int, vocab_size: int, following: NextRow | None
) -> None:
    """Write the drafts that have been drawn to ``column`` of ``input_ids`` [B, N], and fill the draft's next row
    (``following``), if given. If a logit was NaN or the largest infinite, or the token is outside the vocabulary of
    ``vocab_size``, the whole draft of the request is unusable: ``is_bad`` [B] bool becomes true, and the token is 0.
    See ``check_draft``."""
    operands = (*pieces, is_bad, input_ids, column, vocab_size, *(following or _NO_NEXT))
    if is_bad.is_cuda:
        from fenceline.layers.kernels.triton.speculative_step import launch_keep

        launch_keep(pieces, is_bad, input_ids, column, vocab_size, following)
    else:
        KEEP.run(*operands)


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


KEEP = declared(
    "keep_draft",
    _keep,
    "best_scores best_ids largest is_bad lens positions[:,at] out_slots[:,at]"
    " -> is_bad input_ids[:,column] draft_lens draft_ids draft_positions draft_slots",
)


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


def keep_proposal(pieces: Pieces, rows: Tensor, counts: Tensor, kept: Tensor, ids: Tensor | None, ahead: int) -> None:
    """Store the tokens that one layer of a draft with a layer for each step proposes for the next step. They are
    written to ``kept`` [R] at ``rows`` [B], -1 if a logit was NaN or the largest infinite. If ``ids`` [B, W], the input
    of the next layer, is given, they are also written there, at column ``counts`` [B] + ``ahead``, with 0 for -1."""
    operands = (*pieces, rows, counts, kept, ids, ahead)
    if rows.is_cuda:
        from fenceline.layers.kernels.triton.speculative_step import launch_proposal

        launch_proposal(pieces, rows, counts, kept, ids, ahead)
    else:
        PROPOSAL.run(*operands)


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
    tokens = drawn_tokens(Pieces(best_scores, best_ids, largest))
    kept[rows] = tokens
    if ids is not None:
        ids.scatter_(1, (counts + ahead).unsqueeze(1), tokens.clamp(min=0).unsqueeze(1))


PROPOSAL = Kernel("keep_proposal", _proposal_accesses, _keep_proposal)


# --- the end of a chain


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
    """Determine the accepted drafts of a chain, and advance the request rows. ``input_ids`` and ``drawn`` [B, N]: each
    request's last token and its drafts, and the tokens that the target has drawn there. ``is_bad`` and ``may_accept``
    [B] bool: whether the request's draft is unusable, and whether its drafts may be accepted. ``lens`` [B]: the lengths
    when the step begins. ``accept_length``: simulate this mean number of tokens per step (see ``simulate_drafts``),
    None not to."""
    operands = (input_ids, drawn, is_bad, may_accept, rows, lens, accept_length, *kept)
    if rows.is_cuda:
        from fenceline.layers.kernels.triton.speculative_step import launch_accept

        launch_accept(input_ids, drawn, is_bad, may_accept, rows, lens, accept_length, kept)
    else:
        ACCEPT.run(*operands)


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


ACCEPT = declared(
    "accept_chain",
    _accept,
    "input_ids drawn is_bad may_accept rows lens"
    " -> counts num_bad last_tokens[rows] state_lens[rows] previous[rows] is_behind[rows]",
)


# --- hidden states


def keep_last_hidden(hidden: Tensor, counts: Tensor, rows: Tensor, kept: Tensor) -> None:
    """Copy the hidden state of each request's last accepted token to ``kept`` [R, H] at ``rows`` [B]. It is row
    ``counts`` [B] - 1 of the W rows that the request has in ``hidden`` [B * W, H]. Both have the model's dtype."""
    if rows.is_cuda:
        from fenceline.layers.kernels.triton.speculative_step import launch_hidden

        launch_hidden(hidden, counts, rows, kept)
    else:
        HIDDEN.run(hidden, counts, rows, kept)


def _keep_hidden(hidden: Tensor, counts: Tensor, rows: Tensor, kept: Tensor) -> None:
    size = len(rows)
    kept[rows] = hidden.view(size, -1, hidden.shape[1])[torch.arange(size, device=rows.device), counts - 1]


HIDDEN = declared("keep_last_hidden", _keep_hidden, "hidden counts -> kept[rows]")
