"""Drafts without a draft model: what followed the last tokens of a request where they occurred before.

The device keeps the tokens of each request by row (``ReqPool.tokens``), because the host learns them a step late. Both
functions have a reference in torch's operators and Triton kernels for CUDA, which are imported when first used. They
submit to the current stream, do not synchronise with the host, and may be captured.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fenceline.memory_order.kernel import declared

Tensor = torch.Tensor


def look_up_drafts(rows: Tensor, lens: Tensor, tokens: Tensor, least: int, most: int, input_ids: Tensor) -> None:
    """Write the drafts of B requests to all columns of ``input_ids`` [B, N] int64 but the first.

    ``tokens`` [R, T] int32 are the tokens by request row, of which those of ``rows`` [B] int64 have ``lens`` [B] int64.
    Tokens below 0 match nothing and are never proposed. The longest match of a request's last tokens counts, of
    ``least`` to ``most`` tokens, and of several the latest one. If it ends p tokens before the request does, the drafts
    are the p tokens behind it, over and over. Without a match they are the last token, over and over."""
    operands = (rows, lens, tokens, least, most, input_ids)
    if rows.is_cuda:
        from fenceline.layers.kernels.triton.token_lookup import launch_look_up

        launch_look_up(*operands)
    else:
        LOOK_UP.run(*operands)


def _look_up(rows: Tensor, lens: Tensor, tokens: Tensor, least: int, most: int, input_ids: Tensor) -> None:
    held, last = tokens[rows, : int(lens.max())], (lens - 1).unsqueeze(1)
    ends = torch.arange(held.shape[1], device=rows.device)  # where a match may end
    matches = ends < last
    sizes = torch.zeros_like(matches, dtype=torch.int64)
    for back in range(most):
        own = held.gather(1, (last - back).clamp(min=0))
        matches = matches & (F.pad(held, (back, 0))[:, : len(ends)] == own) & (own >= 0) & (ends >= back)
        if not matches.any():
            break
        sizes += matches
    best, end = torch.where(sizes >= least, sizes * len(ends) + ends, -1).max(1, keepdim=True)
    end = torch.where(best >= 0, end, last - 1)
    ahead = torch.arange(input_ids.shape[1] - 1, device=rows.device)
    input_ids[:, 1:] = held.gather(1, end + 1 + ahead % (last - end)).clamp(min=0)


LOOK_UP = declared("look_up_drafts", _look_up, "lens tokens[rows] -> input_ids")


def keep_tokens(rows: Tensor, lens: Tensor, drawn: Tensor, tokens: Tensor) -> None:
    """Write ``drawn`` [B, N] int64 to ``tokens`` [R, T] int32 of ``rows`` [B], from column ``lens`` [B] on. Tokens that
    do not become the request's are written again before they are read. The sink, row 0, is left as it is."""
    if rows.is_cuda:
        from fenceline.layers.kernels.triton.token_lookup import launch_keep

        launch_keep(rows, lens, drawn, tokens)
    else:
        KEEP.run(rows, lens, drawn, tokens)


def _keep(rows: Tensor, lens: Tensor, drawn: Tensor, tokens: Tensor) -> None:
    columns = lens.unsqueeze(1) + torch.arange(drawn.shape[1], device=rows.device)
    live = (rows > 0).unsqueeze(1)
    tokens[rows.unsqueeze(1), columns * live] = (drawn * live).int()


KEEP = declared("keep_tokens", _keep, "lens drawn -> tokens[rows]")
