"""The end of a step: one token for each request, drawn on the device, and the state that the next step reads."""

from __future__ import annotations

import torch

from fenceline.memory_order.kernel import Kernel, KernelAccesses, is_watched
from fenceline.sampling.gumbel import GumbelSampler


def _pieces(
    op: KernelAccesses,
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    noise_scales: torch.Tensor | None,
    seed_keys: torch.Tensor | None,
    positions: torch.Tensor,
    thresholds: torch.Tensor | None,
    maxima: torch.Tensor | None,
    token_ids: torch.Tensor | None,
    best_scores: torch.Tensor,
    best_ids: torch.Tensor,
    largest: torch.Tensor | None,
) -> None:
    for read in (logits, temperatures, noise_scales, seed_keys, positions, thresholds, maxima, token_ids):
        op.read(read)
    op.write(best_scores)
    op.write(best_ids)
    op.write(largest)


def _combine(
    op: KernelAccesses,
    best_scores: torch.Tensor,
    best_ids: torch.Tensor,
    rows: torch.Tensor | None,
    last_tokens: torch.Tensor | None,
    next_tokens: torch.Tensor,
    steps: torch.Tensor | None,
) -> None:
    for read in (best_scores, best_ids, steps):
        op.read(read)
    op.write(next_tokens)
    op.write(last_tokens, rows)
    op.write(steps)


# The two launches of a draw. Their winners lie in two tensors [B, pieces of the vocabulary], float32 and int32. Drafts
# are kept by another second launch (speculative/kernels/step.py), which also reads the largest logits of the pieces.
PIECES = Kernel("draw_from_pieces", _pieces)
COMBINE = Kernel("combine_pieces", _combine)


def sample_tokens(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    noise_scales: torch.Tensor | None,
    seed_keys: torch.Tensor | None,
    positions: torch.Tensor,
    thresholds: torch.Tensor | None,
    rows: torch.Tensor | None,
    last_tokens: torch.Tensor | None,
    next_tokens: torch.Tensor,
    steps: torch.Tensor | None = None,
    maxima: torch.Tensor | None = None,
    rows_each: int = 1,
    ahead: int = 0,
) -> None:
    """Write to ``next_tokens`` [B] int64 a draw from each row of softmax(logits / temperature).

    ``logits`` [B, V] bfloat16, float16 or float32, not changed. Absent (None): ``temperatures`` [B] float32 are 1;
    ``noise_scales`` [B] float32 are 1 (0: the arg-max, ties to the lowest id); ``seed_keys`` [B] int64
    (``gumbel.mix_seeds``): every row is greedy; ``thresholds`` [B] float32: all tokens may be drawn. With thresholds,
    ``maxima`` [B] float32 (required) are the rows' maxima, and tokens with (logit - maximum) / temperature below the
    threshold are not drawn while any other is left. ``positions`` + ``ahead`` [B] int64 are those the sampled tokens
    will have. With ``rows_each`` of several, as many rows of logits, one after the other, share temperature, scale and
    key: those are [B / rows_each].

    ``last_tokens[rows]`` is set to the tokens where both are given (rows [B] int64; padding repeats row 0, the sink);
    ``steps`` [B] int64 grow by one. NaN logits give some id of the vocabulary.

    The draw is that of gumbel.py: a function of (logits row, temperature, seed, position) alone, whatever else is in
    the batch. On the CPU and on vgpu it equals the eager sampler's bit by bit. On CUDA the sampler calls this; there
    scores are logit / temperature in float32. The maximum is not subtracted first, which saves a pass over the logits.

    Current stream, two launches on CUDA, no host synchronisation, fit for capture.
    """
    assert logits.shape[0] == positions.shape[0] == next_tokens.shape[0]
    assert (rows is None) == (last_tokens is None)
    assert thresholds is None or maxima is not None, "thresholds count from the maximum"
    if logits.is_cuda:
        from fenceline.sampling.kernels.sample_triton import DrawInputs, launch

        inputs = DrawInputs(
            temperatures, noise_scales, seed_keys, positions, thresholds, maxima, None, rows_each, ahead
        )
        launch(logits, inputs, rows, last_tokens, next_tokens, steps)
        return
    drawn = (logits, temperatures, noise_scales, seed_keys, positions, thresholds)
    kept = (rows, last_tokens, next_tokens, steps)
    if is_watched(logits.device):  # as on CUDA, with a vocabulary in one piece

        def draw(*operands: torch.Tensor) -> None:
            *drawn, _, _, best_scores, best_ids, _ = operands
            best_ids[:, 0] = _draw(*drawn, rows_each=rows_each, ahead=ahead)
            best_scores.zero_()

        best_scores = logits.new_empty(logits.shape[0], 1, dtype=torch.float32)
        best_ids = positions.new_empty(logits.shape[0], 1, dtype=torch.int32)
        PIECES.launch(draw, *drawn, maxima, None, best_scores, best_ids, None)
        COMBINE.launch(_keep_whole, best_scores, best_ids, *kept)
    else:
        _keep(_draw(*drawn, rows_each=rows_each, ahead=ahead), *kept)


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
    """The first launch of :func:`sample_tokens` alone: of each piece of each row the best score with noise [B, P]
    float32, its token [B, P] int32, and the largest logit [B, P] float32, +inf where one is NaN.

    Operands as of :func:`sample_tokens`. ``token_ids`` [V] int64: which token of a vocabulary of ``vocab_size`` each
    column is, all different; None: the columns are the vocabulary. Of equal scores the lowest token is the best.
    """
    num = len(logits)
    if logits.is_cuda:
        from fenceline.sampling.kernels.sample_triton import DrawInputs, launch_pieces

        inputs = DrawInputs(temperatures, noise_scales, seed_keys, positions, None, None, token_ids, 1, ahead)
        return launch_pieces(logits, inputs)

    def draw(
        logits: torch.Tensor, temperatures: torch.Tensor | None, scales: torch.Tensor | None,
        keys: torch.Tensor | None, positions: torch.Tensor, _1: None, _2: None, token_ids: torch.Tensor | None,
        best_scores: torch.Tensor, best_ids: torch.Tensor, largest: torch.Tensor,
    ) -> None:  # fmt: skip
        best = logits.float().amax(dim=-1)
        largest[:, 0] = best.masked_fill(best.isnan(), torch.inf)
        logits = whole_vocabulary(logits, token_ids, vocab_size)
        best_ids[:, 0] = _draw(logits, temperatures, scales, keys, positions, None, ahead=ahead)
        best_scores.zero_()

    best_scores, largest = (logits.new_empty(num, 1, dtype=torch.float32) for _ in range(2))
    best_ids = positions.new_empty(num, 1, dtype=torch.int32)
    operands = (logits, temperatures, noise_scales, seed_keys, positions, None, None, token_ids)
    if is_watched(logits.device):
        PIECES.launch(draw, *operands, best_scores, best_ids, largest)
    else:
        draw(*operands, best_scores, best_ids, largest)
    return best_scores, best_ids, largest


def whole_vocabulary(logits: torch.Tensor, token_ids: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """Logits [B, vocab_size] of which ``logits`` [B, V] are those of ``token_ids`` [V] int64; of others -inf."""
    if token_ids is None:
        return logits
    whole = logits.new_full((len(logits), vocab_size), -torch.inf)
    whole[:, token_ids] = logits
    return whole


def _keep_whole(best_scores: torch.Tensor, best_ids: torch.Tensor, *kept: torch.Tensor) -> None:
    _keep(best_ids[:, 0].long(), *kept)


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
    rows_each: int = 1,
    ahead: int = 0,
) -> torch.Tensor:
    """The same operations as the sampler's, in the same order."""
    scores = logits.float()
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
    return sampler.draw(
        scaled, seed_keys, positions + ahead if ahead else positions, noise_scales, thresholds
    )
