"""Recurrent layers: the short convolution, what a gated delta net makes of its result, linear attention with states by
blocks, and the gated norm.

The bits of a token's result do not depend on how tokens come in steps, nor on other requests. A program computes the
rows of its request 16 at a time, at places that are multiples of 16 from the request's first token, with the same
products whether one of the rows is new or all of them are. In a step of one token of each request its query and its key
share such a tile: where in a tile a row lies does not change its sums. Nothing is compiled to fused products and sums
that has several tiles, since each would have others.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from fenceline.config.state_layout import GRID
from fenceline.layers.kernels.recurrence import DeltaGates, MambaGates
from fenceline.layers.recurrent_state import LayerState, StateRows
from fenceline.memory_order.triton_launcher import KernelVariant

_BLOCK_TOKENS, _BLOCK_CHANNELS = 32, 128
_BLOCK_VALUES = 64  # features of values in a program
_BLOCK_FEATURES, _BLOCK_DECAYS = 16, 32  # of keys, in a product, and if each has its own decay
_STAGES, _WARPS, _REGISTERS = 5, 4, 128  # for one token of each request
_BLOCK_ROWS, _BLOCK_ELEMENTS = 8, 1024  # of the gated norm
_PRECISION = "tf32x3"  # three products of a tensor core, which together are as exact as float32


def _operands(rows: StateRows) -> tuple[torch.Tensor, ...]:
    assert all(x.dtype == torch.int64 and x.is_contiguous() for x in (rows.starts, rows.absorbed, rows.slots))
    assert rows.query_starts.dtype == torch.int32
    assert rows.grid == GRID, "tiles are blocks"
    return rows.starts, rows.absorbed, rows.query_starts, rows.slots


def _slot_stride(x: torch.Tensor) -> int:
    assert x[0].is_contiguous(), "a slot's part is contiguous"
    return x.stride(0)


def short_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    state: LayerState,
    rows: StateRows,
    pdl: bool = False,
) -> torch.Tensor:
    """See ``LayerKernels.short_convolution``. The last axis of x is contiguous, as are weight and bias. Current stream,
    no host synchronisation. Only programs of a request's first tokens read or write its slot."""
    columns, ring, (channels, taps) = state["conv"], state["x"], weight.shape
    assert x.shape[1:].numel() == channels and x.stride(-1) == 1 and weight.is_contiguous()
    assert x.dtype == columns.dtype == ring.dtype and taps - 1 <= _BLOCK_TOKENS
    out, most = x.new_empty(len(x), channels), int(rows.query_lens_cpu.max())
    block_tokens = 1 if most == 1 else _BLOCK_TOKENS
    constants = {
        "CHANNELS": channels,
        "TAPS": taps,
        "RING": ring.shape[1],
        "BLOCK_RING": triton.next_power_of_2(ring.shape[1]),
        "X_ROW": x.stride(0),
        "GROUP": x.shape[-1],
        "X_GROUP": x.stride(-2) if x.dim() == 3 else 0,
        "COLUMNS_SLOT": _slot_stride(columns),
        "RING_SLOT": _slot_stride(ring),
        "KEPT": rows.kept,
        "SILU": silu,
        "HAS_BIAS": bias is not None,
        "BLOCK_T": block_tokens,
        "BLOCK_C": _BLOCK_CHANNELS,
        "GRID": GRID,
    }
    grid = (len(rows.slots), -(-most // block_tokens), -(-channels // _BLOCK_CHANNELS))
    tensors = (x, weight, bias, columns, ring, *_operands(rows), out)
    _variant(_short_convolution_kernel, tuple(constants.items()), enable_fp_fusion=False).launch(grid, tensors)
    return out


@cache
def _variant(
    kernel: object, constants: tuple[tuple[str, int | bool | str], ...], num_warps: int = 4, **options: int
) -> KernelVariant:
    return KernelVariant(kernel, dict(constants), num_warps, **options)  # type: ignore[arg-type]


@triton.jit
def _short_convolution_kernel(
    x, weight, bias, columns, ring, starts, absorbed_by, query_starts, slots, out,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr, BLOCK_RING: tl.constexpr, X_ROW: tl.constexpr,
    GROUP: tl.constexpr, X_GROUP: tl.constexpr,
    COLUMNS_SLOT: tl.constexpr, RING_SLOT: tl.constexpr, KEPT: tl.constexpr, SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """One program computes some channels of some tokens of a request."""
    BEFORE: tl.constexpr = TAPS - 1
    request, tile = tl.program_id(0), tl.program_id(1)
    channels = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = channels < CHANNELS
    of_x = channels // GROUP * X_GROUP + channels % GROUP
    first = tl.load(query_starts + request).to(tl.int64)
    num = tl.load(query_starts + request + 1).to(tl.int64) - first
    if tile * BLOCK_T < num:
        start, absorbed = tl.load(starts + request), tl.load(absorbed_by + request)
        slot = tl.load(slots + request)
        own_columns, own_ring = columns + slot * COLUMNS_SLOT, ring + slot * RING_SLOT
        tokens = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        for tap in tl.static_range(TAPS):
            at = tokens - BEFORE + tap  # counted from the first token of the step
            new = (at >= 0) & (at < num)
            values = tl.load(
                x + (first + at)[:, None] * X_ROW + of_x[None, :], mask=new[:, None] & live[None, :], other=0.0
            ).to(tl.float32)
            if tile == 0:
                position = start + at
                kept = (at < 0) & (position >= absorbed)
                values += tl.load(
                    own_ring + (position % RING)[:, None] * CHANNELS + channels[None, :],
                    mask=kept[:, None] & live[None, :], other=0.0,
                ).to(tl.float32)  # fmt: skip
                column = position - absorbed + BEFORE
                carried = (at < 0) & (position < absorbed) & (column >= tl.where(absorbed > 0, 0, BEFORE))
                values += tl.load(
                    own_columns + column[:, None] * CHANNELS + channels[None, :],
                    mask=carried[:, None] & live[None, :], other=0.0,
                ).to(tl.float32)  # fmt: skip
            factor = tl.load(weight + channels * TAPS + tap, mask=live, other=0.0).to(tl.float32)
            total += values * factor[None, :]
        if HAS_BIAS:
            total += tl.load(bias + channels, mask=live, other=0.0).to(tl.float32)[None, :]
        if SILU:
            total = total / (1 + tl.exp(-total))
        tl.store(
            out + (first + tokens)[:, None] * CHANNELS + channels[None, :],
            total.to(out.dtype.element_ty), mask=(tokens < num)[:, None] & live[None, :],
        )  # fmt: skip
        if tile == 0:
            kept_end = start
            if KEPT:
                kept_end += num
            after = kept_end // GRID * GRID
            taps = tl.arange(0, BLOCK_RING)
            carried_at = after - BEFORE + taps - start
            moved = taps < tl.where(after > absorbed, BEFORE, 0)
            carry = tl.load(
                x + (first + carried_at)[:, None] * X_ROW + of_x[None, :],
                mask=(moved & (carried_at >= 0))[:, None] & live[None, :], other=0.0,
            ) + tl.load(
                own_ring + ((start + carried_at) % RING)[:, None] * CHANNELS + channels[None, :],
                mask=(moved & (carried_at < 0))[:, None] & live[None, :], other=0.0,
            )  # fmt: skip
            tl.debug_barrier()  # before what has been read is overwritten
            tl.store(
                own_columns + taps[:, None] * CHANNELS + channels[None, :], carry, mask=moved[:, None] & live[None, :]
            )
            latest_at = num - RING + taps
            latest = ((taps < RING) & (latest_at >= 0))[:, None] & live[None, :]
            inputs = tl.load(x + (first + latest_at)[:, None] * X_ROW + of_x[None, :], mask=latest, other=0.0)
            tl.store(
                own_ring + ((start + latest_at) % RING)[:, None] * CHANNELS + channels[None, :], inputs, mask=latest
            )


def delta_inputs(
    mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, gates: DeltaGates, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``LayerKernels.delta_inputs``. ``mixed`` is contiguous, as is the last axis of a and b."""
    (num_tokens, width), heads = mixed.shape, len(gates.a_log)
    by_channel = len(gates.dt_bias) > heads
    assert mixed.is_contiguous() and a.stride(-1) == b.stride(-1) == 1
    assert a.shape[1:].numel() == len(gates.dt_bias) and b.shape[1:].numel() == heads
    keys, values = (num_tokens, gates.num_key_heads, gates.key_dim), width - 2 * gates.num_key_heads * gates.key_dim
    q, k = mixed.new_empty(keys, dtype=torch.float32), mixed.new_empty(keys, dtype=torch.float32)
    v = mixed.new_empty(num_tokens, heads, values // heads, dtype=torch.float32)
    of_decays = (num_tokens, heads, gates.key_dim) if by_channel else (num_tokens, heads)
    decays, beta = (mixed.new_empty(shape, dtype=torch.float32) for shape in (of_decays, (num_tokens, heads)))
    if num_tokens:
        repeats = heads // gates.num_key_heads
        constants = {
            "KEY_HEADS": gates.num_key_heads,
            "REPEATS": repeats,
            "BLOCK_REPEATS": triton.next_power_of_2(repeats),
            "K": gates.key_dim,
            "BLOCK_K": triton.next_power_of_2(gates.key_dim),
            "VALUES": values // gates.num_key_heads,
            "BLOCK_VALUES": triton.next_power_of_2(values // gates.num_key_heads),
            "A_ROW": a.stride(0),
            "B_ROW": b.stride(0),
            "GROUP": b.stride(1) if gates.interleaved else repeats,
            "INTERLEAVED": gates.interleaved,
            "BY_CHANNEL": by_channel,
        }
        variant = _variant(_delta_inputs_kernel, tuple(constants.items()), 1)
        tensors = (mixed, a, b, gates.a_log, gates.dt_bias, q, k, v, decays, beta)
        variant.launch((num_tokens, gates.num_key_heads), tensors)
    return q, k, v, decays, beta


@triton.jit
def _delta_inputs_kernel(
    mixed, a, b, a_log, dt_bias, q, k, v, decays, beta,
    KEY_HEADS: tl.constexpr, REPEATS: tl.constexpr, BLOCK_REPEATS: tl.constexpr, K: tl.constexpr,
    BLOCK_K: tl.constexpr, VALUES: tl.constexpr, BLOCK_VALUES: tl.constexpr, A_ROW: tl.constexpr, B_ROW: tl.constexpr,
    GROUP: tl.constexpr, INTERLEAVED: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """One program: a token's key head with the heads that share it."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    of_query = mixed + token * (KEY_HEADS * (2 * K + VALUES))
    if INTERLEAVED:
        of_query += head * (2 * K + VALUES)
        of_key, of_value = of_query + K, of_query + 2 * K
    else:
        of_value = of_query + 2 * KEY_HEADS * K + head * VALUES
        of_query += head * K
        of_key = of_query + KEY_HEADS * K
    features = tl.arange(0, BLOCK_K)
    live = features < K
    query = tl.load(of_query + features, mask=live, other=0.0).to(tl.float32)
    key = tl.load(of_key + features, mask=live, other=0.0).to(tl.float32)
    query = query * tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * (K**-0.5)
    key = key * tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
    tl.store(q + (token * KEY_HEADS + head) * K + features, query, mask=live)
    tl.store(k + (token * KEY_HEADS + head) * K + features, key, mask=live)
    features = tl.arange(0, BLOCK_VALUES)
    live = features < VALUES
    value = tl.load(of_value + features, mask=live, other=0.0).to(tl.float32)
    tl.store(v + (token * KEY_HEADS + head) * VALUES + features, value, mask=live)
    repeats = tl.arange(0, BLOCK_REPEATS)
    heads, live = head * REPEATS + repeats, repeats < REPEATS
    of_gates = head * GROUP + repeats
    if BY_CHANNEL:
        channels = tl.arange(0, BLOCK_K)[None, :]
        at, is_one = heads[:, None] * K + channels, live[:, None] & (channels < K)
        of_a = at
        rate = tl.exp(tl.load(a_log + heads, mask=live, other=0.0))[:, None]
        decay_row = decays + token * (KEY_HEADS * REPEATS * K)
    else:
        at, is_one = heads, live
        of_a = of_gates
        rate = tl.exp(tl.load(a_log + heads, mask=live, other=0.0))
        decay_row = decays + token * (KEY_HEADS * REPEATS)
    step = tl.load(a + token * A_ROW + of_a, mask=is_one, other=0.0).to(tl.float32)
    step += tl.load(dt_bias + at, mask=is_one, other=0.0)
    step = tl.where(step > 20.0, step, tl.log(1 + tl.exp(step)))
    tl.store(decay_row + at, -rate * step, mask=is_one)
    gate = tl.load(b + token * B_ROW + of_gates, mask=live, other=0.0).to(tl.float32)
    tl.store(beta + token * (KEY_HEADS * REPEATS) + heads, 1 / (1 + tl.exp(-gate)), mask=live)


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decays: torch.Tensor,
    beta: torch.Tensor | None,
    state: LayerState,
    rows: StateRows,
    pdl: bool = False,
) -> torch.Tensor:
    """See ``LayerKernels.recurrence``. All operands are contiguous float32. Current stream, no host
    synchronisation."""
    (_, key_heads, key_dim), (_, heads, value_dim) = k.shape, v.shape
    operands = (q, k, v, decays) if beta is None else (q, k, v, decays, beta)
    assert all(x.is_contiguous() and x.dtype == torch.float32 for x in operands)
    ring = state["k"].shape[1]
    block_values = max(min(triton.next_power_of_2(value_dim), _BLOCK_VALUES), 16)
    out = torch.empty_like(v)
    one = rows.kept and ring == GRID and decays.dim() == 2 and int(rows.query_lens_cpu.max()) == 1
    constants = {
        "HEADS": heads,
        "KEY_HEADS": key_heads,
        "K": key_dim,
        "V": value_dim,
        "BLOCK_V": block_values,
        "RING": ring,
        "MATRIX_SLOT": _slot_stride(state["matrix"]),
        "K_SLOT": _slot_stride(state["k"]),
        "D_SLOT": _slot_stride(state["d"]),
        "DECAY_SLOT": _slot_stride(state["decay"]),
        "KEPT": rows.kept,
        "HAS_BETA": beta is not None,
        "DECAYS": key_dim if decays.dim() == 3 else 1,
        "CHUNK": _BLOCK_FEATURES if decays.dim() == 2 else _BLOCK_DECAYS,
        "PRECISION": _PRECISION,
        "GRID": GRID,
        "ONE": one,
        "STAGES": _STAGES,
    }
    kept = (state["matrix"], state["k"], state["d"], state["decay"])
    options = {"num_warps": _WARPS, "maxnreg": _REGISTERS} if one else {}
    variant = _variant(_recurrence_kernel, tuple(constants.items()), **options, enable_fp_fusion=False)
    grid = (len(rows.slots), heads, -(-value_dim // block_values))
    scratch = None if rows.kept else v.new_empty(len(rows.slots), heads, key_dim, value_dim)
    variant.launch(grid, (q, k, v, decays, beta, *kept, scratch, *_operands(rows), out))
    if not one:
        names = ("HEADS", "KEY_HEADS", "K", "RING", "K_SLOT", "DECAY_SLOT", "DECAYS", "GRID", "KEPT")
        block = ("BLOCK_K", triton.next_power_of_2(key_dim))
        variant = _variant(_keep_rows_kernel, (*((name, constants[name]) for name in names), block))
        tensors = (k, decays, state["k"], state["decay"], rows.starts, rows.query_starts, rows.slots)
        variant.launch((len(rows.slots), heads), tensors)
    return out


@triton.jit
def _sums_at(rows, tokens, sums):
    """Those of ``sums`` [GRID] whose tokens are ``rows``."""
    return tl.sum(tl.where(tokens[None, :] == rows[:, None], sums[None, :], 0.0), 1)


@triton.jit
def _key_features(
    new, kept, rows, base, first, low, high, features, K: tl.constexpr, ROW: tl.constexpr, RING: tl.constexpr
):  # fmt: skip
    """Some features of the keys of ``rows`` of a block, [rows, features]: those before ``low`` are kept, those before
    ``high`` are of this step, and zeros. ``first``: where the block's token 0 is on the T axis, were it of this
    step."""
    old, own = kept + _places(base, rows, RING)[:, None] * ROW, new + first * ROW + rows[:, None] * ROW
    place = tl.where((rows < low)[:, None], old, own) + features[None, :]
    return tl.load(place, (rows < high)[:, None] & (features < K)[None, :], 0.0)


@triton.jit
def _places(base, rows, RING: tl.constexpr):
    """Where the ring has the rows of a block."""
    return ((base % RING).to(tl.int32) + rows) % RING


@triton.jit
def _sum_of(
    new, kept, from_row, to_row, base, first, low, high, features, K: tl.constexpr, ROW: tl.constexpr,
    RING: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """The sum of the decays of a block's rows from ``from_row`` to before ``to_row``, for each of ``features``."""
    rows = tl.arange(0, GRID)
    decays = _key_features(new, kept, rows, base, first, low, high, features, K, ROW, RING)
    return tl.sum(tl.where(((rows >= from_row) & (rows < to_row))[:, None], decays, 0.0), 0)[None, :]


@triton.jit
def _sums_after(
    new, kept, rows, base, first, low, high, features, K: tl.constexpr, ROW: tl.constexpr, RING: tl.constexpr, end
):
    """The sums of decays from behind each of ``rows`` to before ``end``, [rows, features]."""
    following = _key_features(new, kept, rows + 1, base, first, low, high, features, K, ROW, RING)
    return tl.cumsum(tl.where((rows + 1 < end)[:, None], following, 0.0), 0, reverse=True)


@triton.jit
def _scores(
    new_q, new_k, kept_k, new_decay, kept_decay, rows, others, base, first, low, high, before,
    FOR_KEYS: tl.constexpr, DIAGONAL: tl.constexpr, DECAYS: tl.constexpr, DECAY_ROW: tl.constexpr, K: tl.constexpr,
    ROW: tl.constexpr, RING: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Products of the queries, and of the keys, of 16 ``rows`` with the keys of ``others``: all rows of the block, of
    which those from ``before`` on count as zeros, or, in the diagonal, the same 16. If each feature has its own decay,
    it is part of the products: of exponentials of sums that are at most 0, none of which is the difference of two large
    ones."""
    of_queries = tl.zeros((rows.shape[0], others.shape[0]), tl.float32)
    of_keys = tl.zeros((rows.shape[0], others.shape[0]), tl.float32)
    is_new = (rows >= low) & (rows < high)
    low_other, high_other = tl.minimum(low, before), tl.minimum(high, before)
    for chunk in range(0, K, CHUNK):
        features = chunk + tl.arange(0, CHUNK)
        other = _key_features(new_k, kept_k, others, base, first, low_other, high_other, features, K, ROW, RING)
        place = new_q + (first + rows)[:, None] * ROW + features[None, :]
        queries = tl.load(place, is_new[:, None] & (features < K)[None, :], 0.0)
        keys = queries
        if FOR_KEYS:
            keys = _key_features(new_k, kept_k, rows, base, first, low, high, features, K, ROW, RING)
        if DECAYS > 1:
            decays = _key_features(new_decay, kept_decay, rows, base, first, low, high, features, K, DECAY_ROW, RING)
        if DECAYS > 1 and DIAGONAL:
            sums = tl.cumsum(decays.to(tl.float64), 0)
            local = rows % 16
            for column in range(16):
                is_column = (local == column)[:, None]
                key = tl.sum(tl.where(is_column, other, 0.0), 0)[None, :]
                until = tl.sum(tl.where(is_column, sums, 0.0), 0)[None, :]
                key = key * tl.exp(tl.minimum((sums - until).to(tl.float32), 0.0))
                is_here = (local == column)[None, :]
                of_queries += tl.where(is_here, tl.sum(queries * key, 1)[:, None], 0.0)
                if FOR_KEYS:
                    of_keys += tl.where(is_here, tl.sum(keys * key, 1)[:, None], 0.0)
        else:
            if DECAYS > 1:
                growth = tl.exp(tl.cumsum(decays, 0))
                queries, keys = queries * growth, keys * growth
                other *= tl.exp(
                    _sums_after(
                        new_decay, kept_decay, others, base, first, low_other, high_other, features,
                        K, DECAY_ROW, RING, before,
                    )
                )  # fmt: skip
            of_queries = tl.dot(queries, tl.trans(other), of_queries, input_precision=PRECISION)
            if FOR_KEYS:
                of_keys = tl.dot(keys, tl.trans(other), of_keys, input_precision=PRECISION)
    return of_queries, of_keys


@triton.jit
def _recurrence_kernel(
    q, k, v, decays, beta, matrix, ring_k, ring_d, ring_decay, scratch, starts, absorbed_by, query_starts, slots, out,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
    RING: tl.constexpr, MATRIX_SLOT: tl.constexpr, K_SLOT: tl.constexpr, D_SLOT: tl.constexpr,
    DECAY_SLOT: tl.constexpr, KEPT: tl.constexpr, HAS_BETA: tl.constexpr, DECAYS: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, GRID: tl.constexpr, ONE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program computes some features of a head's values, for all tokens of a request. Its part of the matrix and
    the rows ``d`` of the ring are its own, so that it may overwrite them; keys and decays it shares with other
    programs, which may be behind, so rows that these still need are overwritten by the next kernel. A matrix that is
    not kept goes to ``scratch``."""
    ROWS: tl.constexpr = 16
    KEY_ROW: tl.constexpr = KEY_HEADS * K
    VALUE_ROW: tl.constexpr = HEADS * V
    DECAY_ROW: tl.constexpr = HEADS * DECAYS
    request, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key_head = head // (HEADS // KEY_HEADS)
    begin = tl.load(query_starts + request).to(tl.int64)
    num = tl.load(query_starts + request + 1).to(tl.int64) - begin
    if num > 0:
        start, absorbed = tl.load(starts + request), tl.load(absorbed_by + request)
        slot = tl.load(slots + request)
        end = start + num
        kept_end = start
        if KEPT:
            kept_end = end
        values = part * BLOCK_V + tl.arange(0, BLOCK_V)
        of_values = (values < V)[None, :]
        in_block, local = tl.arange(0, GRID), tl.arange(0, ROWS)
        own_matrix = matrix + slot * MATRIX_SLOT + head * (K * V)
        not_kept = own_matrix
        if not KEPT:
            not_kept = scratch + (request.to(tl.int64) * HEADS + head) * (K * V)
        current = own_matrix
        kept_k = ring_k + slot * K_SLOT + key_head * K
        kept_d = ring_d + slot * D_SLOT + head * V
        kept_decay, new_decay = ring_decay + slot * DECAY_SLOT + head * DECAYS, decays + head * DECAYS
        new_k, new_q, new_v = k + key_head * K, q + key_head * K, v + head * V
        blocks = 1
        if not ONE:
            blocks = (end - absorbed + GRID - 1) // GRID
        for block in range(blocks):
            base = absorbed + block * GRID
            first = begin + base - start
            low = tl.minimum(tl.maximum(start - base, 0), GRID).to(tl.int32)
            high = tl.minimum(end - base, GRID).to(tl.int32)
            if DECAYS == 1:
                old = tl.load(kept_decay + _places(base, in_block, RING) * HEADS, mask=in_block < low, other=0.0)
                own = (in_block >= low) & (in_block < high)
                decay = old + tl.load(new_decay + first * HEADS + in_block * HEADS, mask=own, other=0.0)
                sums = tl.cumsum(decay.to(tl.float64), 0)
            if ONE and low < high:
                # The same sums as below. The one tile has the new token's key in its row and its query 8 rows off.
                before = low // ROWS * ROWS
                rows = before + local
                is_key, is_query = (rows == low)[:, None], (rows == (low ^ 8))[:, None]
                to_row = tl.sum(tl.where(in_block == low, sums, 0.0), 0)
                growth, between = tl.exp(to_row.to(tl.float32)), tl.exp((to_row - sums).to(tl.float32))
                wanted = tl.load(new_v + begin * VALUE_ROW + values[None, :], of_values, 0.0)
                share = 1.0
                if HAS_BETA:
                    share = tl.load(beta + begin * HEADS + head)
                scores = tl.zeros((ROWS, GRID), tl.float32)
                result = tl.zeros((ROWS, BLOCK_V), tl.float32)
                for chunk in tl.range(0, K, CHUNK, num_stages=STAGES):
                    features = chunk + tl.arange(0, CHUNK)
                    live = features < K
                    place_s = current + features[:, None] * V + values[None, :]
                    carried = tl.load(place_s, ((base > 0) & live)[:, None] & of_values, 0.0)
                    others = _key_features(
                        new_k, kept_k, in_block, base, first, low, high, features, K, KEY_ROW, RING
                    )  # fmt: skip
                    pair = tl.load(new_q + begin * KEY_ROW + features[None, :], is_query & live[None, :], 0.0)
                    pair += tl.load(new_k + begin * KEY_ROW + features[None, :], is_key & live[None, :], 0.0)
                    place_k = kept_k + _places(base, rows, RING)[:, None] * KEY_ROW + features[None, :]
                    tl.store(place_k, pair, is_key & live[None, :] & (part == 0) & (head % (HEADS // KEY_HEADS) == 0))
                    scores = tl.dot(pair, tl.trans(others), scores, input_precision=PRECISION)
                    result = tl.dot(pair, carried, result, input_precision=PRECISION)
                place_d = kept_d + _places(base, in_block, RING)[:, None] * VALUE_ROW + values[None, :]
                earlier = tl.load(place_d, (in_block < before)[:, None] & of_values, 0.0)
                result *= growth
                scores *= between[None, :]
                if HAS_BETA:
                    wanted = share * (wanted - result)
                    scores = tl.where(is_key, scores * share, scores)
                known = tl.dot(tl.where((in_block < before)[None, :], scores, 0.0), earlier, input_precision=PRECISION)
                result += known
                if HAS_BETA:
                    wanted -= known
                place = kept_d + _places(base, rows, RING)[:, None] * VALUE_ROW + values[None, :]
                newest = tl.load(place, (rows < low)[:, None] & of_values, 0.0)
                written = newest + tl.where(is_key, wanted, 0.0)
                if HAS_BETA:
                    of_key = _sums_at(rows, in_block, tl.sum(tl.where(is_key, scores, 0.0), 0))
                    change = tl.sum(tl.where(rows < low, of_key, 0.0)[:, None] * written, 0)
                    written -= tl.where(is_key, change[None, :], 0.0)
                of_query = _sums_at(rows, in_block, tl.sum(tl.where(is_query, scores, 0.0), 0))
                of_query = tl.where(is_query & (rows <= low)[None, :], of_query[None, :], 0.0)
                result += tl.dot(of_query, written, input_precision=PRECISION)
                place_o = out + begin * VALUE_ROW + head * V + values[None, :]
                tl.store(place_o + local[:, None] * 0, result, is_query & of_values)
                tl.store(place, written, is_key & of_values)
                if part == 0:
                    tl.store(kept_decay + _places(base, low, RING) * HEADS, tl.load(new_decay + begin * HEADS))
                tl.debug_barrier()  # other threads read this row
            elif low < high:
                for sub in range(low // ROWS, (high + ROWS - 1) // ROWS):
                    rows = sub * ROWS + local
                    is_new = (rows >= low) & (rows < high)
                    if DECAYS == 1:
                        to_row = _sums_at(rows, in_block, sums)
                        growth = tl.exp(to_row.to(tl.float32))[:, None]
                    result = tl.zeros((ROWS, BLOCK_V), tl.float32)
                    known = tl.zeros((ROWS, BLOCK_V), tl.float32)
                    if base > 0:
                        for chunk in range(0, K, CHUNK):
                            features = chunk + tl.arange(0, CHUNK)
                            live = features < K
                            carried = tl.load(
                                current + features[:, None] * V + values[None, :], live[:, None] & of_values, 0.0
                            )
                            if DECAYS > 1:
                                own_decays = _key_features(
                                    new_decay, kept_decay, rows, base, first, low, high, features, K, DECAY_ROW, RING
                                )
                                growth = tl.exp(
                                    tl.cumsum(own_decays, 0)
                                    + _sum_of(
                                        new_decay, kept_decay, 0, sub * ROWS, base, first, low, high, features,
                                        K, DECAY_ROW, RING, GRID,
                                    )
                                )  # fmt: skip
                            place = new_q + first * KEY_ROW + rows[:, None] * KEY_ROW + features[None, :]
                            queries = tl.load(place, is_new[:, None] & live[None, :], 0.0)
                            if DECAYS > 1:
                                queries *= growth
                            result = tl.dot(queries, carried, result, input_precision=PRECISION)
                            if HAS_BETA:
                                keys = _key_features(
                                    new_k, kept_k, rows, base, first, low, high, features, K, KEY_ROW, RING
                                )
                                if DECAYS > 1:
                                    keys *= growth
                                known = tl.dot(keys, carried, known, input_precision=PRECISION)
                        if DECAYS == 1:
                            result, known = result * growth, known * growth
                    place = new_v + first * VALUE_ROW + rows[:, None] * VALUE_ROW + values[None, :]
                    wanted = tl.load(place, is_new[:, None] & of_values, 0.0)
                    if HAS_BETA:
                        share = tl.load(beta + first * HEADS + rows * HEADS + head, mask=is_new, other=0.0)[:, None]
                        wanted = share * (wanted - known)
                    if sub > 0:
                        before = sub * ROWS
                        before_queries, before_keys = _scores(
                            new_q, new_k, kept_k, new_decay, kept_decay, rows, in_block, base, first, low, high,
                            before, HAS_BETA, False, DECAYS, DECAY_ROW, K, KEY_ROW, RING, CHUNK, PRECISION,
                        )  # fmt: skip
                        if DECAYS == 1:
                            until = tl.exp((to_row[:, None] - sums[None, :]).to(tl.float32))
                            until = tl.where((in_block < before)[None, :], until, 0.0)
                            before_queries, before_keys = before_queries * until, before_keys * until
                        place_d = kept_d + _places(base, in_block, RING)[:, None] * VALUE_ROW + values[None, :]
                        earlier = tl.load(place_d, (in_block < before)[:, None] & of_values, 0.0)
                        result += tl.dot(before_queries, earlier, input_precision=PRECISION)
                        if HAS_BETA:
                            wanted -= tl.dot(before_keys * share, earlier, input_precision=PRECISION)
                    of_queries, of_keys = _scores(
                        new_q, new_k, kept_k, new_decay, kept_decay, rows, rows, base, first, low, high, GRID,
                        HAS_BETA, True, DECAYS, DECAY_ROW, K, KEY_ROW, RING, CHUNK, PRECISION,
                    )  # fmt: skip
                    if DECAYS == 1:
                        between = tl.exp((to_row[:, None] - to_row[None, :]).to(tl.float32))
                        of_queries, of_keys = of_queries * between, of_keys * between
                    is_old = (rows < low)[:, None]
                    place = kept_d + _places(base, rows, RING)[:, None] * VALUE_ROW + values[None, :]
                    written = tl.load(place, is_old & of_values, 0.0) + tl.where(is_old, 0.0, wanted)
                    if HAS_BETA:
                        scores = tl.where(local[:, None] > local[None, :], of_keys * share, 0.0)
                        # Of rows that are not new, the scores are zero.
                        for row in range(tl.maximum(low - sub * ROWS, 1), tl.minimum(high - sub * ROWS, ROWS)):
                            is_row = (local == row)[:, None]
                            of_row = tl.sum(tl.where(is_row, scores, 0.0), 0)
                            change = tl.sum(of_row[:, None] * written, 0)
                            written -= tl.where(is_row, change[None, :], 0.0)
                    scores = tl.where(local[:, None] >= local[None, :], of_queries, 0.0)
                    result += tl.dot(scores, written, input_precision=PRECISION)
                    store = is_new[:, None] & of_values
                    tl.store(
                        out + first * VALUE_ROW + rows[:, None] * VALUE_ROW + head * V + values[None, :], result, store
                    )
                    tl.store(place, written, store)
                    tl.debug_barrier()  # other threads read these rows
            if base + GRID <= end:
                target = not_kept
                if base + GRID <= kept_end:
                    target = own_matrix
                if DECAYS == 1:
                    total = tl.sum(tl.where(in_block == GRID - 1, sums, 0.0), 0)
                    whole = tl.exp(total.to(tl.float32))
                for chunk in range(0, K, CHUNK):
                    features = chunk + tl.arange(0, CHUNK)
                    place = features[:, None] * V + values[None, :]
                    live = (features < K)[:, None] & of_values
                    before = (features < tl.where(base > 0, K, 0))[:, None] & of_values
                    if DECAYS > 1:
                        whole = tl.exp(
                            tl.trans(
                                _sum_of(
                                    new_decay, kept_decay, 0, GRID, base, first, low, high, features,
                                    K, DECAY_ROW, RING, GRID,
                                )
                            )
                        )  # fmt: skip
                    carried = tl.load(current + place, before, 0.0) * whole
                    for sub in range(GRID // ROWS):
                        rows = sub * ROWS + local
                        if DECAYS == 1:
                            growth = tl.exp((total - _sums_at(rows, in_block, sums)).to(tl.float32))[:, None]
                        else:
                            growth = tl.exp(
                                _sums_after(
                                    new_decay, kept_decay, rows, base, first, low, high, features,
                                    K, DECAY_ROW, RING, (sub + 1) * ROWS,
                                )
                                + _sum_of(
                                    new_decay, kept_decay, (sub + 1) * ROWS, GRID, base, first, low, high, features,
                                    K, DECAY_ROW, RING, GRID,
                                )
                            )  # fmt: skip
                        keys = _key_features(new_k, kept_k, rows, base, first, low, high, features, K, KEY_ROW, RING)
                        place_d = kept_d + _places(base, rows, RING)[:, None] * VALUE_ROW + values[None, :]
                        written = tl.load(place_d, of_values, 0.0)
                        carried += tl.dot(tl.trans(keys * growth), written, input_precision=PRECISION)
                    tl.store(target + place, carried, live)
                current = target
                tl.debug_barrier()  # other threads read the matrix, and the next block's rows take the places of these


@triton.jit
def _keep_rows_kernel(
    k, decays, ring_k, ring_decay, starts, query_starts, slots,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, RING: tl.constexpr, K_SLOT: tl.constexpr,
    DECAY_SLOT: tl.constexpr, DECAYS: tl.constexpr, GRID: tl.constexpr, BLOCK_K: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Keys and decays of the open block after a step, or of all its tokens if it is not kept."""
    request, head = tl.program_id(0), tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    begin = tl.load(query_starts + request).to(tl.int64)
    num = tl.load(query_starts + request + 1).to(tl.int64) - begin
    start, slot = tl.load(starts + request), tl.load(slots + request)
    end = start + num
    first = start
    if KEPT:
        first = tl.maximum(start, end // GRID * GRID)
    for tile in range(first, end, GRID):
        position = tile + tl.arange(0, GRID)
        token = begin + position - start
        features = tl.arange(0, BLOCK_K)
        store = (position < end)[:, None] & (features < DECAYS)[None, :]
        row = head * DECAYS + features[None, :]
        decay = tl.load(decays + token[:, None] * (HEADS * DECAYS) + row, mask=store, other=0.0)
        kept_decay = ring_decay + slot * DECAY_SLOT
        tl.store(kept_decay + (position % RING)[:, None] * (HEADS * DECAYS) + row, decay, mask=store)
        if head % (HEADS // KEY_HEADS) == 0:
            store = (position < end)[:, None] & (features < K)[None, :]
            row = key_head * K + features[None, :]
            keys = tl.load(k + token[:, None] * (KEY_HEADS * K) + row, mask=store, other=0.0)
            tl.store(ring_k + slot * K_SLOT + (position % RING)[:, None] * (KEY_HEADS * K) + row, keys, mask=store)


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    silu: bool = True,
    skip: tuple[torch.Tensor, torch.Tensor] | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """See ``LayerKernels.gated_norm``. x is contiguous, as are a token's gates and its inputs of ``skip``. Current
    stream, no host synchronisation."""
    num_tokens, heads, size = x.shape
    assert x.is_contiguous() and gate.stride(-1) == 1 and gate.stride(-2) == size and weight.is_contiguous()
    inputs, factors = (None, None) if skip is None else skip
    assert inputs is None or (inputs.stride(2) == 1 and inputs.stride(1) == inputs.shape[2])
    out = gate.new_empty(x.shape)
    if num_tokens:
        block = triton.next_power_of_2(size)
        rows = min(_BLOCK_ROWS, max(_BLOCK_ELEMENTS // block, 1))
        constants = {
            "HEADS": heads,
            "SIZE": size,
            "BLOCK": block,
            "GATE_ROW": gate.stride(0),
            "GROUP": gate.shape[-2],
            "GATE_GROUP": gate.stride(1) if gate.dim() == 4 else 0,
            "ROWS": rows,
            "SILU": silu,
            "OWN_WEIGHTS": weight.dim() == 2,
            "SKIP_ROW": 0 if inputs is None else inputs.stride(0),
            "SKIP_DIM": 0 if inputs is None else inputs.shape[2],
        }
        _variant(_gated_norm_kernel, tuple(constants.items())).launch(
            (-(-num_tokens * heads // rows),), (x, gate, weight, inputs, factors, out), (num_tokens * heads, eps)
        )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm_kernel(
    x, gate, weight, inputs, factors, out, num_rows, eps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, GATE_ROW: tl.constexpr, GROUP: tl.constexpr,
    GATE_GROUP: tl.constexpr, ROWS: tl.constexpr,
    SILU: tl.constexpr, OWN_WEIGHTS: tl.constexpr, SKIP_ROW: tl.constexpr, SKIP_DIM: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    features = tl.arange(0, BLOCK)
    live = (rows < num_rows)[:, None] & (features < SIZE)[None, :]
    values = tl.load(x + rows[:, None] * SIZE + features[None, :], mask=live, other=0.0)
    in_token = (rows % HEADS * SIZE)[:, None] + features[None, :]
    of_gate = rows // HEADS * GATE_ROW + rows % HEADS // GROUP * GATE_GROUP + rows % GROUP * SIZE
    gates = tl.load(gate + of_gate[:, None] + features[None, :], mask=live, other=0.0).to(tl.float32)
    share = 1 / (1 + tl.exp(-gates))
    if SILU:
        share *= gates
    if SKIP_DIM:
        past = tl.load(inputs + (rows // HEADS * SKIP_ROW)[:, None] + in_token, mask=live, other=0.0).to(tl.float32)
        values = (values + past * tl.load(factors + in_token // SKIP_DIM, mask=live, other=0.0)) * share
    factor = tl.rsqrt(tl.sum(values * values, 1) / SIZE + eps)[:, None]
    if OWN_WEIGHTS:
        weights = tl.load(weight + in_token, mask=live, other=0.0).to(tl.float32)
    else:
        weights = tl.load(weight + features, mask=features < SIZE, other=0.0).to(tl.float32)[None, :]
    result = values * factor * weights
    if not SKIP_DIM:
        result *= share
    tl.store(out + rows[:, None] * SIZE + features[None, :], result.to(out.dtype.element_ty), mask=live)


def mamba_inputs(
    mixed: torch.Tensor, dt: torch.Tensor, gates: MambaGates, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``LayerKernels.mamba_inputs``. ``mixed`` is contiguous, as are the steps of a token. Current stream, no host
    synchronisation."""
    (num_tokens, width), heads, groups, state_size = mixed.shape, len(gates.a_log), gates.num_groups, gates.state_size
    assert mixed.is_contiguous() and dt.stride(1) == 1 and dt.shape[1] == heads
    dim = (width - 2 * groups * state_size) // heads
    q, k = (mixed.new_empty(num_tokens, groups, state_size, dtype=torch.float32) for _ in range(2))
    v = mixed.new_empty(num_tokens, heads, dim, dtype=torch.float32)
    decays = mixed.new_empty(num_tokens, heads, dtype=torch.float32)
    if num_tokens:
        repeats = heads // groups
        constants = {
            "GROUPS": groups,
            "STATE": state_size,
            "BLOCK_STATE": triton.next_power_of_2(state_size),
            "REPEATS": repeats,
            "BLOCK_REPEATS": triton.next_power_of_2(repeats),
            "DIM": dim,
            "BLOCK_DIM": triton.next_power_of_2(dim),
            "DT_ROW": dt.stride(0),
        }
        tensors = (mixed, dt, gates.a_log, gates.dt_bias, q, k, v, decays)
        _variant(_mamba_inputs_kernel, tuple(constants.items())).launch(
            (num_tokens, groups), tensors, gates.step_limits
        )
    return q, k, v, decays


@triton.jit
def _mamba_inputs_kernel(
    mixed, dt, a_log, dt_bias, q, k, v, decays, least, most,
    GROUPS: tl.constexpr, STATE: tl.constexpr, BLOCK_STATE: tl.constexpr, REPEATS: tl.constexpr,
    BLOCK_REPEATS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, DT_ROW: tl.constexpr,
):  # fmt: skip
    """One program: a token's group of heads."""
    HEADS: tl.constexpr = GROUPS * REPEATS
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = mixed + token * (HEADS * DIM + 2 * GROUPS * STATE)
    features = tl.arange(0, BLOCK_STATE)
    live = features < STATE
    place = (token * GROUPS + group) * STATE + features
    of_group = row + HEADS * DIM + group * STATE + features
    tl.store(k + place, tl.load(of_group, mask=live, other=0.0).to(tl.float32), mask=live)
    tl.store(q + place, tl.load(of_group + GROUPS * STATE, mask=live, other=0.0).to(tl.float32), mask=live)
    repeats = tl.arange(0, BLOCK_REPEATS)
    heads, live = group * REPEATS + repeats, repeats < REPEATS
    step = tl.load(dt + token * DT_ROW + heads, mask=live, other=0.0).to(tl.float32)
    step += tl.load(dt_bias + heads, mask=live, other=0.0)
    step = tl.where(step > 20.0, step, tl.log(1 + tl.exp(step)))
    step = tl.minimum(tl.maximum(step, least), most)
    rate = tl.exp(tl.load(a_log + heads, mask=live, other=0.0))
    tl.store(decays + token * HEADS + heads, -rate * step, mask=live)
    features = tl.arange(0, BLOCK_DIM)
    live = live[:, None] & (features < DIM)[None, :]
    place = heads[:, None] * DIM + features[None, :]
    values = tl.load(row + place, mask=live, other=0.0).to(tl.float32)
    tl.store(v + token * (HEADS * DIM) + place, values * step[:, None], mask=live)
