"""The one launch between projection and attention: it normalises and rotates queries and keys and stores keys and
values."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from fenceline.layers.kernels.base import ONE, HeadLayout, KVScales, QKNorm
from fenceline.memory_order.triton_launcher import KernelVariant

# Up to this many tokens the kernel is limited by latency, so a program is one warp with few heads. With more tokens it
# is limited by the number of bytes in flight.
_FEW_TOKENS = 256
_SMALL_TILE, _LARGE_TILE = 512, 1024
_ELEMENTS_A_THREAD = 16  # half of them in each half of a head


def rotate_and_store(
    qkv: torch.Tensor,
    heads: HeadLayout,
    norms: QKNorm | None,
    table: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out_slots: torch.Tensor,
    kv_scales: KVScales = ONE,
    fixed: object = None,
    pdl: bool = False,
) -> None:
    """See ``LayerKernels.rotate_and_store``.

    qkv [T, size of ``heads``] and both caches [num_slots, num_kv_heads, head_dim] are contiguous, of one dtype or the
    caches in FP8; table [max_positions, 3 * head_dim / 2] float32 is contiguous; positions and out_slots [T] int64 must
    be in range (not checked). Slots of padded tokens may repeat; it is undefined which token's bytes stay there.
    Current stream, no host synchronisation. ``fixed``: unless None, tiles do not depend on the number of tokens.
    ``pdl``: see ``rms_norm``; reads positions, out_slots, table and the norms' weights before its wait.
    """
    num_tokens, width = qkv.shape
    head_dim = heads.head_dim
    half = head_dim // 2
    assert width == (heads.num_heads + 2 * heads.num_kv_heads) * head_dim and head_dim % 2 == 0
    assert table.shape[1] == 3 * half and table.dtype == torch.float32 and table.is_contiguous()
    assert k_cache.shape[1:] == v_cache.shape[1:] == (heads.num_kv_heads, head_dim)
    assert qkv.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()
    rounds = k_cache.dtype == torch.float8_e4m3fn
    assert k_cache.dtype == v_cache.dtype and (rounds or k_cache.dtype == qkv.dtype)
    assert positions.dtype == out_slots.dtype == torch.int64
    assert positions.is_contiguous() and out_slots.is_contiguous()
    if num_tokens == 0:
        return
    tile = _SMALL_TILE if num_tokens <= _FEW_TOKENS or fixed is not None else _LARGE_TILE
    blocks, variant = _variant(heads.num_heads, heads.num_kv_heads, half, tile, norms is not None, rounds, pdl)
    q_weight, k_weight, eps = None, None, 0.0
    if norms is not None:
        q_weight, k_weight, eps = norms.q_weight, norms.k_weight, norms.eps
    tensors = (qkv, q_weight, k_weight, table, positions, k_cache, v_cache, out_slots)
    variant.launch((num_tokens * blocks,), tensors, (eps, kv_scales.k, kv_scales.v))


@cache
def _variant(
    num_heads: int, num_kv_heads: int, half: int, tile: int, has_norms: bool, rounds: bool, pdl: bool
) -> tuple[int, KernelVariant]:
    """The number of programs for each token, and the kernel that they run."""
    block_half = triton.next_power_of_2(half)
    most_heads = triton.next_power_of_2(max(num_heads, num_kv_heads))
    block_heads = min(max(1, tile // (2 * block_half)), most_heads)
    blocks = -(-num_heads // block_heads) + 2 * -(-num_kv_heads // block_heads)
    constants = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HALF": half,
        "BLOCK_HALF": block_half,
        "BLOCK_HEADS": block_heads,
        "HAS_NORMS": has_norms,
        "ROUNDS": rounds,
        "PDL": pdl,
    }
    num_warps = max(1, 2 * block_half * block_heads // (32 * _ELEMENTS_A_THREAD))
    return blocks, KernelVariant(_rotate_and_store_kernel, constants, num_warps, pdl)


@triton.jit
def _rotate_and_store_kernel(
    qkv, q_weight, k_weight, table, positions, k_cache, v_cache, out_slots, eps, k_scale, v_scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, HAS_NORMS: tl.constexpr, ROUNDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program computes some heads of one kind (query, key or value) of a token, as two tiles [heads, half]."""
    Q_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    KV_BLOCKS: tl.constexpr = (NUM_KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    BLOCKS: tl.constexpr = Q_BLOCKS + 2 * KV_BLOCKS
    HEAD_DIM: tl.constexpr = 2 * HALF
    ROW: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    is_query = block < Q_BLOCKS
    is_value = block >= Q_BLOCKS + KV_BLOCKS
    kv_block = tl.where(is_value, block - Q_BLOCKS - KV_BLOCKS, block - Q_BLOCKS)
    heads = tl.where(is_query, block, kv_block) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    first = tl.where(is_query, 0, tl.where(is_value, NUM_HEADS + NUM_KV_HEADS, NUM_HEADS))
    lanes = tl.arange(0, BLOCK_HALF)
    in_half = lanes < HALF
    live = (heads < tl.where(is_query, NUM_HEADS, NUM_KV_HEADS))[:, None] & in_half[None, :]
    elements = heads[:, None] * HEAD_DIM + lanes[None, :]
    source = qkv + token * ROW + first * HEAD_DIM + elements

    # Positions and slots were written at the beginning of the step, so they can be read before the wait, where this
    # takes no extra time.
    stored = tl.load(out_slots + token) * (NUM_KV_HEADS * HEAD_DIM) + elements
    angles = table + tl.load(positions + token) * (3 * HALF) + lanes
    cos = tl.load(angles, mask=in_half, other=0.0)[None, :]
    sin = tl.load(angles + 2 * HALF, mask=in_half, other=0.0)[None, :]
    if HAS_NORMS:
        of_query, of_key = in_half & is_query, in_half & (block >= Q_BLOCKS)
        w1 = tl.load(q_weight + lanes, mask=of_query, other=0.0) + tl.load(k_weight + lanes, mask=of_key, other=0.0)
        w2 = tl.load(q_weight + HALF + lanes, mask=of_query, other=0.0) + tl.load(
            k_weight + HALF + lanes, mask=of_key, other=0.0
        )
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()

    x1 = tl.load(source, mask=live, other=0.0)
    x2 = tl.load(source + HALF, mask=live, other=0.0)
    if is_value:
        if ROUNDS:
            r1, x1 = rounded(x1, v_scale, v_cache)
            r2, x2 = rounded(x2, v_scale, v_cache)
            tl.store(source, x1, mask=live)
            tl.store(source + HALF, x2, mask=live)
            tl.store(v_cache + stored, r1, mask=live)
            tl.store(v_cache + stored + HALF, r2, mask=live)
        else:
            tl.store(v_cache + stored, x1, mask=live)
            tl.store(v_cache + stored + HALF, x2, mask=live)
    else:
        dtype = qkv.dtype.element_ty
        f1, f2 = x1.to(tl.float32), x2.to(tl.float32)
        if HAS_NORMS:
            factor = tl.rsqrt(tl.sum(f1 * f1 + f2 * f2, axis=1) / HEAD_DIM + eps)[:, None]
            # Rounded after the norm, so that the result is the same as with two operators.
            f1 = (f1 * factor * w1.to(tl.float32)[None, :]).to(dtype).to(tl.float32)
            f2 = (f2 * factor * w2.to(tl.float32)[None, :]).to(dtype).to(tl.float32)
        y1 = (f1 * cos - f2 * sin).to(dtype)
        y2 = (f2 * cos + f1 * sin).to(dtype)
        if is_query:
            tl.store(source, y1, mask=live)
            tl.store(source + HALF, y2, mask=live)
        else:
            if ROUNDS:
                r1, y1 = rounded(y1, k_scale, k_cache)
                r2, y2 = rounded(y2, k_scale, k_cache)
                tl.store(k_cache + stored, r1, mask=live)
                tl.store(k_cache + stored + HALF, r2, mask=live)
            else:
                tl.store(k_cache + stored, y1, mask=live)
                tl.store(k_cache + stored + HALF, y2, mask=live)
            tl.store(source, y1, mask=live)
            tl.store(source + HALF, y2, mask=live)


@triton.jit
def rounded(x, scale, cache):
    """x / scale as the nearest number of the cache's type, E4M3: in that type and in x's. A zero has no sign.

    It is computed in float32, and nothing is converted back from E4M3: ptxas 12.8, which comes with Triton 3.6, packs
    four converted numbers for one store, and then converts back from a register that does not hold two of them
    (triton-lang/triton#11111 is of this kind). Adding ``big`` rounds to multiples of its last bit: of 1/8 of x's
    binade or, below the smallest normal number 2^-6, of 2^-9."""
    x32 = tl.minimum(tl.maximum(x.to(tl.float32) / scale, -448.0), 448.0)
    exponent = tl.maximum(x32.to(tl.int32, bitcast=True) & 0x7F800000, (127 - 6) << 23)
    big = (exponent + ((20 << 23) + (1 << 22))).to(tl.float32, bitcast=True)  # 1.5 * 2^20 of these binades
    nearest = (x32 + big) - big
    return nearest.to(cache.dtype.element_ty), nearest.to(x.dtype)
