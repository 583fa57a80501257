"""The end of a step: one token for each request, drawn on the device, and the state that the next step reads."""

from __future__ import annotations

import torch

from fenceline.sampling.gumbel import GumbelSampler


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
    next_tokens.copy_(_draw(logits, temperatures, noise_scales, seed_keys, positions, thresholds))
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
