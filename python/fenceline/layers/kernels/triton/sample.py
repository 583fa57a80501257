"""``sample_tokens`` in Triton: the programs of a first kernel draw from pieces of the vocabulary, and a second kernel
compares the best tokens of the pieces.

The pieces do not depend on the batch. Logarithms are computed by libdevice, as in torch's CUDA operators, so the noise
equals that of ``GumbelSampler`` on the same GPU bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from fenceline.memory_order.triton_launcher import KernelVariant

# The size of a piece. The largest vocabularies need 149 programs per row, so even one request uses all of a large GPU.
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class DrawInputs:
    """The inputs of a draw other than the logits; see ``sample_tokens`` and, for ``token_ids``, ``draw_pieces``."""

    temperatures: torch.Tensor | None
    noise_scales: torch.Tensor | None
    seed_keys: torch.Tensor | None
    positions: torch.Tensor
    thresholds: torch.Tensor | None
    maxima: torch.Tensor | None
    token_ids: torch.Tensor | None = None
    rows_each: int = 1
    ahead: int = 0
    masks: torch.Tensor | None = None
    first_id: int = 0


def launch(
    logits: torch.Tensor,
    inputs: DrawInputs,
    rows: torch.Tensor | None,
    last_tokens: torch.Tensor | None,
    next_tokens: torch.Tensor,
    steps: torch.Tensor | None,
) -> None:
    """See ``sample_tokens``. Rows of the logits may be strided. Allocates two tensors [B, pieces] for partial draws."""
    if len(logits):
        best_scores, best_ids, _ = _launch_pieces(logits, inputs, None)
        launch_combine(best_scores, best_ids, rows, last_tokens, next_tokens, steps)


def launch_combine(
    best_scores: torch.Tensor,
    best_ids: torch.Tensor,
    rows: torch.Tensor | None,
    last_tokens: torch.Tensor | None,
    next_tokens: torch.Tensor,
    steps: torch.Tensor | None,
) -> None:
    assert next_tokens.is_contiguous() and next_tokens.dtype == torch.int64
    assert best_scores.is_contiguous() and best_ids.is_contiguous()
    if len(best_scores):
        combine = _combine_variant(best_scores.shape[1])
        combine.launch((len(best_scores),), (best_scores, best_ids, rows, last_tokens, next_tokens, steps))


def launch_part(logits: torch.Tensor, inputs: DrawInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``draw_part``. There must be at least one row."""
    scores, ids, _ = _launch_pieces(logits, inputs, None)
    return scores, ids


def launch_pieces(logits: torch.Tensor, inputs: DrawInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``draw_pieces``. There must be at least one row."""
    pieces = _variants(logits.shape[1], logits.stride(0))[0]
    largest = torch.empty(len(logits), pieces, dtype=torch.float32, device=logits.device)
    scores, ids, _ = _launch_pieces(logits, inputs, largest)
    return scores, ids, largest


def _launch_pieces(
    logits: torch.Tensor, inputs: DrawInputs, largest: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    masks = inputs.masks
    rows_each_mask = 0
    if masks is not None:
        rows_each_mask = num_rows // len(masks)
        assert masks.is_contiguous() and masks.shape[1] == -(-vocab_size // 32), masks.shape
    pieces, draw = _variants(vocab_size, logits.stride(0), inputs.rows_each, rows_each_mask)
    best_scores = torch.empty(num_rows, pieces, dtype=torch.float32, device=logits.device)
    best_ids = torch.empty(num_rows, pieces, dtype=torch.int32, device=logits.device)
    tensors = (
        logits,
        inputs.temperatures,
        inputs.noise_scales,
        inputs.seed_keys,
        inputs.positions,
        inputs.thresholds,
        inputs.maxima,
        inputs.token_ids,
        masks,
        best_scores,
        best_ids,
        largest,
    )
    draw.launch((pieces * num_rows,), tensors, (inputs.ahead, inputs.first_id))
    return best_scores, best_ids, largest


@cache
def _variants(vocab_size: int, stride: int, rows_each: int = 1, rows_each_mask: int = 0) -> tuple[int, KernelVariant]:
    """The number of pieces, and the kernel that draws in each of them."""
    block = min(_BLOCK, max(32, triton.next_power_of_2(vocab_size)))
    pieces = -(-vocab_size // block)
    constants = {"STRIDE": stride, "VOCAB": vocab_size, "BLOCK": block, "ROWS_EACH": rows_each}
    constants["ROWS_EACH_MASK"] = rows_each_mask
    return pieces, KernelVariant(_piece_kernel, constants, max(1, block // 256))


@cache
def _combine_variant(pieces: int) -> KernelVariant:
    """The kernel that compares so many pieces."""
    block = max(32, triton.next_power_of_2(pieces))
    constants = {"PIECES": pieces, "BLOCK": block}
    return KernelVariant(_combine_kernel, constants, max(1, min(4, block // 64)))


@triton.jit(do_not_specialize=["ahead", "first_id"])
def _piece_kernel(
    logits, temperatures, noise_scales, seed_keys, positions, thresholds, maxima, token_ids, masks, best_scores,
    best_ids, largest, ahead, first_id,
    STRIDE: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr, ROWS_EACH: tl.constexpr,
    ROWS_EACH_MASK: tl.constexpr,
):  # fmt: skip
    """A program finds the best token among BLOCK consecutive columns of one row."""
    PIECES: tl.constexpr = (VOCAB + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // PIECES
    piece = tl.program_id(0) % PIECES
    req = row // ROWS_EACH
    columns = piece * BLOCK + tl.arange(0, BLOCK)
    live = columns < VOCAB
    ids = columns + first_id
    if token_ids is not None:
        ids = tl.load(token_ids + columns, mask=live, other=2147483647).to(tl.int32)
    temperature = 1.0
    if temperatures is not None:
        temperature = tl.load(temperatures + req)
    scale = 1.0
    if noise_scales is not None:
        scale = tl.load(noise_scales + req)
    if seed_keys is not None:
        key_a, key_b = _row_keys(tl.load(seed_keys + req), tl.load(positions + row) + ahead)
    if thresholds is not None:
        threshold = tl.load(thresholds + row)
        maximum = tl.load(maxima + row)
    offset = row.to(tl.int64) * STRIDE
    values = tl.load(logits + offset + columns, mask=live, other=-float("inf")).to(tl.float32)
    scores = values
    if temperatures is not None:
        scores = tl.div_rn(values, tl.zeros_like(values) + temperature)
    if seed_keys is not None:  # noqa: SIM102 - known when compiling; the inner condition depends on the request
        if scale != 0.0:
            scores += scale * _gumbel(ids, key_a, key_b)
    if thresholds is not None:
        distance = tl.div_rn(values - maximum, tl.zeros_like(values) + temperature)
        scores = tl.where(distance < threshold, -float("inf"), scores)
    if masks is not None:
        WORDS: tl.constexpr = (VOCAB + 31) // 32
        has_mask = row % ROWS_EACH_MASK == 0
        words = masks + (row // ROWS_EACH_MASK).to(tl.int64) * WORDS + columns // 32
        bits = tl.load(words, mask=live & has_mask, other=-1) >> (columns % 32)
        scores = tl.where((bits & 1) != 0, scores, -float("inf"))
    # A NaN is drawn only if there is nothing else. Columns beyond the vocabulary are never drawn.
    scores = tl.where(live & (scores == scores), scores, -float("inf"))
    out = row.to(tl.int64) * PIECES + piece
    if token_ids is None:
        score, index = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
        best = first_id + piece * BLOCK + index
    else:
        score = tl.max(scores, axis=0)
        best = tl.min(tl.where(scores == score, ids, 2147483647), axis=0)
    tl.store(best_scores + out, score)
    tl.store(best_ids + out, best)
    if largest is not None:
        tl.store(largest + out, tl.max(tl.where(values == values, values, float("inf")), axis=0))


@triton.jit
def _combine_kernel(
    best_scores, best_ids, rows, last_tokens, next_tokens, steps, PIECES: tl.constexpr, BLOCK: tl.constexpr
):
    """A program finds the best token of all pieces of one row; of equal scores the one with the lowest id."""
    req = tl.program_id(0)
    pieces = tl.arange(0, BLOCK)
    live = pieces < PIECES
    if rows is not None:
        row = tl.load(rows + req)
    offsets = req.to(tl.int64) * PIECES + pieces
    scores = tl.load(best_scores + offsets, mask=live, other=-float("inf"))
    ids = tl.load(best_ids + offsets, mask=live, other=2147483647)
    # The lowest id among the best scores. Both loads are issued at once, and no third load depends on them.
    token = tl.min(tl.where(scores == tl.max(scores, axis=0), ids, 2147483647), axis=0).to(tl.int64)
    tl.store(next_tokens + req, token)
    if rows is not None:
        tl.store(last_tokens + row, token)
    if steps is not None:
        tl.store(steps + req, tl.load(steps + req) + 1)


@triton.jit
def _row_keys(seed_key, position):
    """The upper and lower half (uint32) of splitmix64's finaliser of (seed, position). See gumbel.py."""
    z = seed_key.to(tl.uint64, bitcast=True) + position.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 32).to(tl.uint32), z.to(tl.uint32)


@triton.jit
def _gumbel(ids, key_a, key_b):
    """Standard Gumbel noise (float32, finite) of token ids (int32), with exactly the operations of GumbelSampler."""
    x = ids.to(tl.uint32) * 0x9E3779B1 + key_a
    x = ((x ^ (x >> 16)) * 0x7FEB352D) ^ key_b
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = (x ^ (x >> 16)) & 0x7FFFFFFF
    v = (x.to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 2147483648.0)
    v = tl.minimum(v, 0.999999940395355224609375)  # 1 - 2**-24
    return -libdevice.log(-libdevice.log1p(-v))
