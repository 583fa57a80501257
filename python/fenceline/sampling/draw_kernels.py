"""The end of a step: draws one token for each request on the device, and updates the state that the next step reads."""

from __future__ import annotations

import torch

from fenceline.memory_order.kernel import declared, is_watched
from fenceline.sampling.gumbel import GumbelSampler, row_chunks

# The two launches of a draw. The first writes the best score (float32) and token (int32) of each piece of the
# vocabulary to tensors [B, pieces], and the second compares them. For drafts, the second launch is another kernel
# (keep_draft in speculative/step_kernels.py), which also reads the largest logit of each piece.
_READ = "logits temperatures noise_scales seed_keys positions thresholds maxima token_ids masks"
_BEST = "best_scores best_ids largest"
PIECES = declared("draw_from_pieces", f"{_READ} {_BEST}", f"{_READ} -> {_BEST}")
COMBINE = declared(
    "combine_pieces",
    "best_scores best_ids rows last_tokens next_tokens steps",
    "best_scores best_ids steps -> next_tokens last_tokens[rows] steps",
)


def sample_tokens(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    noise_scales: torch.Tensor | None,
    seed_keys: torch.Tensor | None,
    positions: torch.Tensor,
    rows: torch.Tensor | None,
    last_tokens: torch.Tensor | None,
    next_tokens: torch.Tensor,
    steps: torch.Tensor | None = None,
    maxima: torch.Tensor | None = None,
    rows_each: int = 1,
    ahead: int = 0,
    masks: torch.Tensor | None = None,
    thresholds: torch.Tensor | None = None,
) -> None:
    """Draw one token from each row of softmax(logits / temperature) and write it to ``next_tokens`` [B] int64.

    ``logits`` [B, V] bfloat16, float16 or float32 are not changed. ``positions`` + ``ahead`` [B] int64 are the
    positions that the drawn tokens will have. The other inputs may be None:

    * ``temperatures`` [B] float32; None: 1.
    * ``noise_scales`` [B] float32; None: 1. With 0 a row's token is the arg-max (of equal logits the lowest id).
    * ``seed_keys`` [B] int64 (``gumbel.mix_seeds``); None: all rows are greedy.
    * ``thresholds`` [B] float32; None: all tokens may be drawn. Otherwise ``maxima`` [B] float32, the rows' largest
      logits, are required, and tokens with (logit - maximum) / temperature below the threshold are not drawn as long
      as there is another.
    * ``masks``, contiguous, not together with thresholds: see :func:`masked`; None: all tokens may be drawn.

    If ``rows_each`` is above 1, that many consecutive rows share temperature, scale and key, which then are
    [B / rows_each].

    If ``rows`` [B] int64 and ``last_tokens`` are given, ``last_tokens[rows]`` is set to the tokens; padding has row 0,
    the sink. If ``steps`` [B] int64 is given, it is incremented. From NaN logits some id of the vocabulary is drawn.

    The draw is that of gumbel.py: it depends only on (logits row, temperature, seed, position). Without a GPU
    it equals the eager sampler's bit by bit. On CUDA the sampler calls this function. There scores are
    logit / temperature in float32, without subtracting the maximum first, which saves a pass over the logits.

    It is submitted to the current stream, on CUDA as two launches, without host synchronisation. It may be captured.
    """
    assert logits.shape[0] == positions.shape[0] == next_tokens.shape[0]
    assert (rows is None) == (last_tokens is None)
    assert thresholds is None or maxima is not None, "thresholds are relative to the maximum"
    assert thresholds is None or masks is None, "thresholds are relative to the maximum of the tokens that masks allow"
    if logits.is_cuda:
        from fenceline.layers.kernels.triton.sample import DrawInputs, launch

        inputs = DrawInputs(
            temperatures, noise_scales, seed_keys, positions, thresholds, maxima, None, rows_each, ahead, masks
        )
        launch(logits, inputs, rows, last_tokens, next_tokens, steps)
        return
    drawn = (logits, temperatures, noise_scales, seed_keys, positions, thresholds)
    kept = (rows, last_tokens, next_tokens, steps)
    if is_watched(logits.device):  # two launches, as on CUDA, with the vocabulary as one piece

        def draw(*operands: torch.Tensor) -> None:
            *drawn, _, _, masks, best_scores, best_ids, _ = operands
            best_ids[:, 0] = _draw(*drawn, masks=masks, rows_each=rows_each, ahead=ahead)
            best_scores.zero_()

        best_scores = logits.new_empty(logits.shape[0], 1, dtype=torch.float32)
        best_ids = positions.new_empty(logits.shape[0], 1, dtype=torch.int32)
        PIECES.launch(draw, *drawn, maxima, None, masks, best_scores, best_ids, None)
        COMBINE.launch(_keep_best, best_scores, best_ids, *kept)
    else:
        _keep(_draw(*drawn, masks=masks, rows_each=rows_each, ahead=ahead), *kept)


def draw_part(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    noise_scales: torch.Tensor | None,
    seed_keys: torch.Tensor | None,
    positions: torch.Tensor,
    first_id: int,
    rows_each: int = 1,
    ahead: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first launch of :func:`sample_tokens` on CUDA for a part of the vocabulary, whose first column is the token
    ``first_id``. Returns, for each of the P pieces of each row, the best score with noise [B, P] float32 and its token
    [B, P] int32. For the operands see :func:`sample_tokens`. Pieces of all parts make what it draws."""
    from fenceline.layers.kernels.triton.sample import DrawInputs, launch_part

    inputs = DrawInputs(
        temperatures,
        noise_scales,
        seed_keys,
        positions,
        None,
        None,
        rows_each=rows_each,
        ahead=ahead,
        first_id=first_id,
    )
    return launch_part(logits, inputs)


def combine_pieces(
    best_scores: torch.Tensor,
    best_ids: torch.Tensor,
    rows: torch.Tensor | None,
    last_tokens: torch.Tensor | None,
    next_tokens: torch.Tensor,
    steps: torch.Tensor | None = None,
) -> None:
    """The second launch of :func:`sample_tokens`: the token of each row's best piece, of equal scores the lowest.
    ``best_scores`` [B, P] float32 and ``best_ids`` [B, P] int32, contiguous, are those of pieces of the vocabulary in
    their order. The other operands are those of :func:`sample_tokens`."""
    if best_scores.is_cuda:
        from fenceline.layers.kernels.triton.sample import launch_combine

        launch_combine(best_scores, best_ids, rows, last_tokens, next_tokens, steps)
    else:
        COMBINE.launch(_keep_best, best_scores, best_ids, rows, last_tokens, next_tokens, steps)


def draw_pieces(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    noise_scales: torch.Tensor | None,
    seed_keys: torch.Tensor | None,
    positions: torch.Tensor,
    ahead: int,
    token_ids: torch.Tensor | None,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first launch of :func:`sample_tokens`. Returns, for each of the P pieces of each row, the best score with
    noise [B, P] float32, its token [B, P] int32, and the largest logit [B, P] float32, which is +inf if a logit is NaN.
    For the operands see :func:`sample_tokens`. ``token_ids`` [V] int64, which are distinct, are the columns' tokens in
    a vocabulary of ``vocab_size``; None: the columns are the vocabulary. Of equal scores that of the lowest token
    wins."""
    num = len(logits)
    if logits.is_cuda:
        from fenceline.layers.kernels.triton.sample import DrawInputs, launch_pieces

        inputs = DrawInputs(temperatures, noise_scales, seed_keys, positions, None, None, token_ids, ahead=ahead)
        return launch_pieces(logits, inputs)

    def draw(
        logits: torch.Tensor, temperatures: torch.Tensor | None, scales: torch.Tensor | None,
        keys: torch.Tensor | None, positions: torch.Tensor, _1: None, _2: None, token_ids: torch.Tensor | None,
        _3: None, best_scores: torch.Tensor, best_ids: torch.Tensor, largest: torch.Tensor,
    ) -> None:  # fmt: skip
        best = logits.float().amax(dim=-1)
        largest[:, 0] = best.masked_fill(best.isnan(), torch.inf)
        logits = whole_vocabulary(logits, token_ids, vocab_size)
        best_ids[:, 0] = _draw(logits, temperatures, scales, keys, positions, None, ahead=ahead)
        best_scores.zero_()

    best_scores, largest = (logits.new_empty(num, 1, dtype=torch.float32) for _ in range(2))
    best_ids = positions.new_empty(num, 1, dtype=torch.int32)
    operands = (logits, temperatures, noise_scales, seed_keys, positions, None, None, token_ids, None)
    PIECES.launch(draw, *operands, best_scores, best_ids, largest)
    return best_scores, best_ids, largest


def masked(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """A copy of ``logits`` [B, V] that is -inf where the token's bit in ``masks`` [B, ceil(V / 32)] int32 is not set.
    If there are fewer masks, [B / n, ceil(V / 32)], they apply to every n-th row, beginning with the first: a request's
    n rows are verified, and only the first needs its mask, because its drafts are not accepted."""
    stride = len(logits) // len(masks)
    if stride > 1:
        made = logits.clone()
        made[::stride] = masked(logits[::stride], masks)
        return made
    vocab_size = logits.shape[1]
    places = torch.arange(32, dtype=torch.int32, device=masks.device)
    pieces = []
    for rows in row_chunks(*logits.shape):
        bits = (masks[rows].unsqueeze(-1) >> places).bitwise_and_(1).flatten(1)[:, :vocab_size]
        pieces.append(logits[rows].masked_fill(bits == 0, -torch.inf))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def whole_vocabulary(logits: torch.Tensor, token_ids: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """Logits [B, vocab_size] with ``logits`` [B, V] at ``token_ids`` [V] int64 and -inf elsewhere. ``logits`` itself if
    ``token_ids`` is None."""
    if token_ids is None:
        return logits
    whole = logits.new_full((len(logits), vocab_size), -torch.inf)
    whole[:, token_ids] = logits
    return whole


def _keep_best(
    best_scores: torch.Tensor,
    best_ids: torch.Tensor,
    rows: torch.Tensor | None,
    last_tokens: torch.Tensor | None,
    next_tokens: torch.Tensor,
    steps: torch.Tensor | None,
) -> None:
    # The ids of a piece are lower than those of the next one, so the first maximum is right.
    best = best_scores.argmax(dim=-1, keepdim=True)
    _keep(best_ids.gather(1, best).squeeze(1).long(), rows, last_tokens, next_tokens, steps)


def _keep(
    tokens: torch.Tensor,
    rows: torch.Tensor | None,
    last_tokens: torch.Tensor | None,
    next_tokens: torch.Tensor,
    steps: torch.Tensor | None,
) -> None:
    next_tokens.copy_(tokens)
    if rows is not None and last_tokens is not None:
        last_tokens.index_copy_(0, rows, next_tokens)
    if steps is not None:
        steps.add_(1)


def _draw(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    noise_scales: torch.Tensor | None,
    seed_keys: torch.Tensor | None,
    positions: torch.Tensor,
    thresholds: torch.Tensor | None,
    *,
    masks: torch.Tensor | None = None,
    rows_each: int = 1,
    ahead: int = 0,
) -> torch.Tensor:
    """Draw with the same operations as the sampler, in the same order."""
    scores = logits.float() if masks is None else masked(logits.float(), masks)
    if seed_keys is None:
        return scores.argmax(dim=-1)
    if rows_each > 1:
        temperatures, noise_scales, seed_keys = (
            None if values is None else values.repeat_interleave(rows_each)
            for values in (temperatures, noise_scales, seed_keys)
        )
        assert seed_keys is not None
    scaled = scores - scores.amax(dim=-1, keepdim=True)
    if temperatures is not None:
        scaled.div_(temperatures[:, None])
    sampler = GumbelSampler(logits.shape[1], logits.device)
    return sampler.draw(scaled, seed_keys, positions + ahead if ahead else positions, noise_scales, thresholds)
