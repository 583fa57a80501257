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
    best_scores: torch.Tensor,
    best_ids: torch.Tensor,
) -> None:
    for read in (logits, temperatures, noise_scales, seed_keys, positions, thresholds, maxima):
        op.read(read)
    op.write(best_scores)
    op.write(best_ids)


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


# The two launches of a draw. Their winners lie in two tensors [B, pieces of the vocabulary], float32 and int32.
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
) -> None:
    """Write to ``next_tokens`` [B] int64 a draw from each row of softmax(logits / temperature).

    ``logits`` [B, V] bfloat16, float16 or float32, not changed. Absent (None): ``temperatures`` [B] float32 are 1;
    ``noise_scales`` [B] float32 are 1 (0: the arg-max, ties to the lowest id); ``seed_keys`` [B] int64
    (``gumbel.mix_seeds``): every row is greedy; ``thresholds`` [B] float32: all tokens may be drawn. With thresholds,
    ``maxima`` [B] float32 (required) are the rows' maxima, and tokens with (logit - maximum) / temperature below the
    threshold are not drawn while any other is left. ``positions`` [B] int64, those the sampled tokens will have.

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

        inputs = DrawInputs(temperatures, noise_scales, seed_keys, positions, thresholds, maxima)
        launch(logits, inputs, rows, last_tokens, next_tokens, steps)
        return
    drawn = (logits, temperatures, noise_scales, seed_keys, positions, thresholds)
    kept = (rows, last_tokens, next_tokens, steps)
    if is_watched(logits.device):  # as on CUDA, with a vocabulary in one piece
        best_scores = logits.new_empty(logits.shape[0], 1, dtype=torch.float32)
        best_ids = positions.new_empty(logits.shape[0], 1, dtype=torch.int32)
        PIECES.launch(_draw_whole, *drawn, maxima, best_scores, best_ids)
        COMBINE.launch(_keep_whole, best_scores, best_ids, *kept)
    else:
        _keep(_draw(*drawn), *kept)


def _draw_whole(*operands: torch.Tensor) -> None:
    *drawn, _, best_scores, best_ids = operands
    best_ids[:, 0] = _draw(*drawn)
    best_scores.zero_()


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
) -> torch.Tensor:
    """The same operations as the sampler's, in the same order."""
    scores = logits.float()
    if seed_keys is None:
        return scores.argmax(dim=-1)
    scaled = scores - scores.amax(dim=-1, keepdim=True)
    if temperatures is not None:
        scaled.div_(temperatures[:, None])
    sampler = GumbelSampler(logits.shape[1], logits.device)
    return sampler.draw(scaled, seed_keys, positions, noise_scales, thresholds)
