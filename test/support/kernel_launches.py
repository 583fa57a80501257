"""Small launches of each Triton kernel with the operands that it declares, for ``kernel_surroundings``. Importing this
module needs Triton."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from kernel_surroundings import Launch
from routed_tokens import routed

from fenceline.config.families import BlocksConfig, ExpertsConfig
from fenceline.config.state_layout import GRID
from fenceline.layers.attention.base import LayerRules
from fenceline.layers.forward_batch import BlockQueries, QueryTree
from fenceline.layers.kernels import accesses, embed_join
from fenceline.layers.kernels.base import HeadLayout, LayerKernels, QKNorm, Routing
from fenceline.layers.kernels.index_rows import packed, rounded
from fenceline.layers.kernels.recurrence import DeltaGates, MambaGates
from fenceline.layers.kernels.speculative_operands import AcceptOutputs, BeginOutputs, NextRow, Pieces
from fenceline.layers.kernels.triton import (
    activation,
    by_head,
    decode_attention,
    extend_attention,
    grouped_gemm,
    int4_gemm,
    lightning_inputs,
    page_gather,
    quantized_gemm,
    recurrence,
    rms_norm,
    rotate_store,
    routing,
    select_blocks,
    select_tokens,
    skinny_gemm,
    store_index,
    store_latent,
)
from fenceline.layers.kernels.triton import decode_prologue as decode_prologue_triton
from fenceline.layers.kernels.triton import embed_join as embed_join_triton
from fenceline.layers.kernels.triton import kv_rows as kv_rows_triton
from fenceline.layers.kernels.triton import sample as sample_triton
from fenceline.layers.kernels.triton import speculative_step as step_triton
from fenceline.layers.kernels.triton import token_lookup as lookup_triton
from fenceline.layers.quantized import FP8, round_to_fp8, round_to_int4
from fenceline.layers.recurrent_state import StateRows
from fenceline.memory_order.guards import first_of_best
from fenceline.model_executor.decode_runner import DECODE_PROLOGUE
from fenceline.sampling import draw_kernels as sample
from fenceline.sampling.gumbel import mix_seeds
from fenceline.speculative import kv_rows
from fenceline.speculative import step_kernels as step
from fenceline.speculative import token_lookup as lookup

_SCALE = 0.3


def launches() -> Iterator[Launch]:
    """All launches. The first launch of each kernel has every operand."""
    yield from _norms()
    yield from _activations()
    yield from _rotations()
    yield from _latents()
    yield from _indexes()
    yield from _recurrences()
    yield from _products_by_head()
    yield from _products()
    yield from _quantized_products()
    yield from _scaled_products()
    yield from _int4_products()
    yield from _reorderings()
    yield from _plain_matrices()
    yield from _roundings()
    yield from _routings()
    yield from _grouped_products()
    yield from _combinations()
    yield from _decodes()
    yield from _selections()
    yield from _selections_of_blocks()
    yield from _lightnings()
    yield from _extends()
    yield from _gathers()
    yield from _prologues()
    yield from _draws()
    yield from _moves()
    yield from _begins()
    yield from _places()
    yield from _joins()
    yield from _drafts()
    yield from _ends()
    yield from _look_ups()


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def _norms() -> Iterator[Launch]:
    for rows, size, dtype in ((5, 48, torch.float32), (1, 64, torch.bfloat16), (2, 2560, torch.float16)):
        x, weight = _random(rows, size + 3, dtype=dtype)[:, :size], _random(size, dtype=dtype)
        out = x.new_empty(x.shape)

        def run(pdl: bool, x: Any, weight: Any, out: Any) -> None:
            rms_norm.rms_norm(x, weight, 1e-6, pdl)

        yield Launch(f"rms_norm {rows}x{size}", accesses.rms_norm, (x, weight, out), run, [out], rms_norm)


def _activations() -> Iterator[Launch]:
    for rows, size in ((3, 40), (1, 1100)):
        gate_up, out = _random(rows, 2 * size), torch.empty(rows, size)

        def run(pdl: bool, gate_up: Any, out: Any) -> None:
            activation.silu_and_mul(gate_up, pdl=pdl)

        name = f"silu_and_mul {rows}x{size}"
        yield Launch(name, accesses.silu_and_mul, (gate_up, out), run, [out], activation)


def _rotations() -> Iterator[Launch]:
    shapes = ((HeadLayout(3, 1, 8), 2, True), (HeadLayout(4, 2, 40), 1, False), (HeadLayout(2, 2, 8), 3, True))
    for heads, num_tokens, has_norms in shapes:
        dim = heads.head_dim
        qkv = _random(num_tokens, (heads.num_heads + 2 * heads.num_kv_heads) * dim)
        weights = (_random(dim), _random(dim)) if has_norms else (None, None)
        table = _random(20, 3 * dim // 2)
        caches = [_random(12, heads.num_kv_heads, dim) for _ in range(2)]
        positions, slots = torch.randperm(20)[:num_tokens], torch.randperm(12)[:num_tokens]

        def run(
            pdl: bool, qkv: Any, q: Any, k: Any, table: Any, positions: Any, k_cache: Any, v_cache: Any, slots: Any,
            heads: HeadLayout = heads,
        ) -> None:  # fmt: skip
            norms = None if q is None else QKNorm(q, k, 1e-6)
            rotate_store.rotate_and_store(qkv, heads, norms, table, positions, k_cache, v_cache, slots, pdl=pdl)

        operands = (qkv, *weights, table, positions, *caches, slots)
        name = f"rotate_and_store {num_tokens} tokens of {heads}"
        yield Launch(name, accesses.rotate_and_store, operands, run, waits_in=rotate_store)


def _latents() -> Iterator[Launch]:
    # Tokens, heads, features of a query, rank, rope, other features in front of the row.
    for num_tokens, num_heads, query_dim, rank, rope, others in ((2, 3, 12, 24, 6, 0), (3, 20, 48, 40, 32, 16)):
        queries = _random(num_tokens, num_heads, query_dim)
        row = _random(num_tokens, others + rank + rope)[:, others:]
        table, cache_rows = _random(20, 3 * rope // 2), _random(12, 1, rank + rope)
        positions, slots = torch.randperm(20)[:num_tokens], torch.randperm(12)[:num_tokens]
        out = _random(num_tokens, num_heads + 1, rank + rope)

        def run(
            pdl: bool, queries: Any, row: Any, weight: Any, table: Any, positions: Any, out: Any, cache_rows: Any,
            slots: Any,
        ) -> None:  # fmt: skip
            store_latent.store_latent(queries, row, weight, 1e-6, table, positions, out, cache_rows, slots, pdl)

        operands = (queries, row, _random(rank), table, positions, out, cache_rows, slots)
        name = f"store_latent {num_tokens}x{num_heads}"
        yield Launch(name, accesses.store_latent, operands, run, waits_in=store_latent)


def _indexes() -> Iterator[Launch]:
    # Tokens, heads, features, rotated features, whether rows are in FP8.
    for num_tokens, num_heads, dim, rope, in_fp8 in ((2, 3, 20, 6, False), (3, 20, 32, 16, True)):
        queries, key, weights = (
            _random(num_tokens, num_heads, dim),
            _random(num_tokens, dim),
            _random(num_tokens, num_heads),
        )
        table, cache_rows = _random(20, 3 * rope // 2), _random(12, 1, dim)
        cache_rows = packed(*rounded(cache_rows)) if in_fp8 else cache_rows
        positions, slots = torch.randperm(20)[:num_tokens], torch.randperm(12)[:num_tokens]

        def run(
            pdl: bool, queries: Any, key: Any, weight: Any, bias: Any, table: Any, positions: Any, weights: Any,
            out: Any, out_weights: Any, cache_rows: Any, slots: Any,
        ) -> None:  # fmt: skip
            made = weights, 0.3, out, out_weights, cache_rows, slots
            store_index.store_index(queries, key, weight, bias, 1e-6, table, positions, *made, pdl)

        outputs = torch.empty_like(queries), torch.empty_like(weights)
        norm = _random(dim), _random(dim)
        operands = (queries, key, *norm, table, positions, weights, *outputs, cache_rows, slots)
        name = f"store_index {num_tokens}x{num_heads}"
        yield Launch(name, accesses.store_index, operands, run, waits_in=store_index)


def _recurrences() -> Iterator[Launch]:
    for tokens, repeats in ((3, 2), (1, 1)):
        key_heads, key_dim, heads, value_dim = 2, 12, 2 * repeats, 20
        made = [_random(tokens, key_heads, key_dim), _random(tokens, key_heads, key_dim)]
        made += [_random(tokens, heads, value_dim), _random(tokens, heads), _random(tokens, heads)]
        mixed = _random(tokens, 2 * key_heads * key_dim + heads * value_dim)

        def run_inputs(pdl: bool, mixed: Any, a: Any, b: Any, a_log: Any, dt_bias: Any, *made: Any) -> None:
            recurrence.delta_inputs(mixed, a, b, DeltaGates(a_log, dt_bias, 2, 12), pdl)

        operands = (mixed, _random(tokens, heads), _random(tokens, heads), _random(heads), _random(heads), *made)
        yield Launch(f"delta_inputs {tokens}x{repeats}", accesses.delta_inputs, operands, run_inputs, made)

        mixed = _random(tokens, heads * 20 + 2 * 2 * 12)
        made = [_random(tokens, 2, 12), _random(tokens, 2, 12), _random(tokens, heads, 20), _random(tokens, heads)]

        def run_mamba(pdl: bool, mixed: Any, dt: Any, a_log: Any, dt_bias: Any, *made: Any) -> None:
            recurrence.mamba_inputs(mixed, dt, MambaGates(a_log, dt_bias, a_log, 2, 12, (0.01, 2.0)), pdl)

        operands = (mixed, _random(tokens, heads), _random(heads), _random(heads), *made)
        yield Launch(f"mamba_inputs {tokens}x{repeats}", accesses.mamba_inputs, operands, run_mamba, made)

        def run_norm(pdl: bool, x: Any, gate: Any, weight: Any, inputs: Any, factors: Any, out: Any) -> None:
            skip = None if inputs is None else (inputs, factors)
            recurrence.gated_norm(x, gate, weight, 1e-6, True, skip, pdl)

        has_skip = repeats > 1
        weights = (_random(3, 20), _random(tokens, 6, 10), _random(6)) if has_skip else (_random(20), None, None)
        operands = (_random(tokens, 3, 20), _random(tokens, 3, 20), *weights, out := _random(tokens, 3, 20))
        name = f"gated_norm {tokens}, {'with' if has_skip else 'without'} a skip"
        yield Launch(name, accesses.gated_norm, operands, run_norm, [out])
    # Of three requests the first one fills a block, the second begins with another's state.
    for has_all, first, lens in ((True, 70, [60, 2, 5]), (False, 70, [60, 2, 5]), (True, 127, [1, 1, 1])):
        starts = torch.tensor([first, 64, 0])
        bounds = torch.tensor([0, *accumulate(lens)], dtype=torch.int32)
        rows = starts, starts // GRID * GRID, bounds, torch.tensor([3, 1, 4])
        channels, num_tokens = 40, sum(lens)
        state = _random(6, 3, channels), _random(6, 3, channels)
        out = _random(num_tokens, channels)

        def convolve(pdl: bool, x: Any, weight: Any, bias: Any, *rest: Any, lens: list[int] = lens) -> None:
            *given, columns, ring, _ = rest
            state = {"conv": columns, "x": ring}
            recurrence.short_convolution(x, weight, bias, True, state, _state_rows(given, lens), pdl)

        x = _random(num_tokens, channels + 8)[:, 4:-4]  # a part of what a projection makes
        operands = (x, _random(channels, 4), _random(channels) if has_all else None)
        name = f"short_convolution {sum(lens)}, {'with' if has_all else 'without'} a bias"
        yield Launch(name, accesses.short_convolution, (*operands, *rows, *state, out), convolve, [out])
        sizes = (num_tokens, 1, 12), (num_tokens, 1, 12), (num_tokens, 2, 20), (num_tokens, 2)
        q, k, v, decays = (_random(*size) / 4 for size in sizes)
        beta = torch.rand(num_tokens, 2) if has_all else None
        kept = _random(6, 2, 12, 20), _random(6, 64, 1, 12) / 4, _random(6, 64, 2, 20), -torch.rand(6, 64, 2)
        out = torch.empty_like(v)

        def recur(pdl: bool, q: Any, k: Any, v: Any, decays: Any, beta: Any, *rest: Any, lens: Any = lens) -> None:
            *given, matrix, keys, values, kept_decays, _ = rest
            state = {"matrix": matrix, "k": keys, "d": values, "decay": kept_decays}
            recurrence.recurrence(q, k, v, decays, beta, state, _state_rows(given, lens), pdl)

        name = f"recurrence {sum(lens)}, {'with' if has_all else 'without'} a delta rule"
        yield Launch(name, accesses.recurrence, (q, k, v, -decays.abs(), beta, *rows, *kept, out), recur, [out])


def _state_rows(operands: Any, lens: list[int]) -> StateRows:
    starts, absorbed, query_starts, slots = operands
    return StateRows(starts, absorbed, query_starts, np.array(lens), slots)


def _products_by_head() -> Iterator[Launch]:
    # Rows, heads, K, outputs, whether the outputs' axis of a matrix is the contiguous one.
    for rows, heads, k, n, transposed in ((3, 2, 20, 24, True), (1, 3, 24, 20, False), (17, 2, 33, 16, False)):
        x, out = _random(rows, heads + 1, k + 6)[:, :heads, :k], _random(rows, heads + 1, n + 8)[:, :heads, 8:]
        weight = _random(heads, k, n).transpose(1, 2) if transposed else _random(heads, n, k)

        def run(pdl: bool, x: Any, weight: Any, out: Any) -> None:
            by_head.by_head(x, weight, out, pdl)

        yield Launch(f"by_head {rows}x{heads}x{k}x{n}", accesses.by_head, (x, weight, out), run, waits_in=by_head)


def _products() -> Iterator[Launch]:
    # Rows, K, outputs, norm, bias, gated, residual.
    shapes = (
        (1, 72, 20, True, True, False, True),
        (3, 40, 24, False, True, False, True),  # a norm of several rows is a kernel of its own
        (1, 64, 12, True, False, True, False),
        (2, 48, 9, False, True, True, False),
    )
    for rows, k, num_out, has_norm, has_bias, gated, adds in shapes:
        width = num_out * (2 if gated else 1)
        x, weight = _random(rows, k), _random(width, k)
        norm = _random(k) if has_norm else None
        bias = _random(width) if has_bias else None
        out = _random(rows, num_out)

        def run(
            pdl: bool, x: Any, weight: Any, norm: Any, bias: Any, residual: Any, out: Any, gated: bool = gated
        ) -> None:
            config = skinny_gemm.TritonConfig(8 if len(x) == 1 else 16, 32, 4, launch_pdl=pdl)
            fusion = skinny_gemm.Fusion(norm, 1e-6, bias, gated, residual)
            skinny_gemm.skinny_linear(x, weight, config, fusion, None if residual is not None else out)

        operands = (x, weight, norm, bias, out if adds else None, out)
        name = f"skinny_linear {rows}x{k}x{width}{' gated' * gated}"
        yield Launch(name, accesses.skinny_linear, operands, run, waits_in=skinny_gemm)


def _quantized_products() -> Iterator[Launch]:
    # Kind, rows, K, group, outputs, norm, bias, gated, residual.
    shapes = (
        ("int4", 1, 96, 32, 20, True, True, False, True),
        ("int4", 1, 64, 64, 9, False, True, True, False),
        ("fp8", 1, 200, 128, 20, True, True, False, True),
        ("fp8", 1, 40, 40, 24, True, True, False, True),
        ("fp8", 1, 64, 64, 12, True, False, True, False),
    )
    for kind, rows, k, group, num_out, has_norm, has_bias, gated, adds in shapes:
        width = num_out * (2 if gated else 1)
        stored = (round_to_fp8 if kind == "fp8" else round_to_int4)(_random(width, k), group)
        data, scales, zeros = (*stored, None)[:3]
        norm = _random(k) if has_norm else None
        bias = _random(width) if has_bias else None
        out = _random(rows, num_out)

        def run(
            pdl: bool, x: Any, data: Any, scales: Any, zeros: Any, norm: Any, bias: Any, residual: Any, out: Any,
            gated: bool = gated, group: int = group,
        ) -> None:  # fmt: skip
            config = skinny_gemm.TritonConfig(8, 32, 4, launch_pdl=pdl)
            fusion = skinny_gemm.Fusion(norm, 1e-6, bias, gated, residual)
            result = None if residual is not None else out
            data = data if zeros is not None else data.view(FP8)
            quantized_gemm.quantized_linear(x, data, scales, zeros, group, config, fusion, result)

        operands = (
            _random(rows, k),
            data.contiguous().view(torch.uint8),
            scales,
            zeros,
            norm,
            bias,
            out if adds else None,
            out,
        )
        name = f"quantized_linear {kind} {rows}x{k}x{width}{' gated' * gated}"
        yield Launch(name, accesses.quantized_linear, operands, run, waits_in=quantized_gemm)


def _scaled_products() -> Iterator[Launch]:
    # Rows, K, group, outputs, bias, gated, residual.
    shapes = (
        (3, 40, 40, 24, True, False, True),
        (2, 272, 128, 9, True, True, False),
        (5, 96, 96, 12, False, True, False),
        (17, 160, 32, 20, False, False, False),
    )
    for rows, k, group, num_out, has_bias, gated, adds in shapes:
        width = num_out * (2 if gated else 1)
        x, x_scales = round_to_fp8(_random(rows, k), group)
        weight, scales = round_to_fp8(_random(width, k), group)
        out = _random(rows, num_out)

        def run(
            pdl: bool, x: Any, x_scales: Any, weight: Any, scales: Any, bias: Any, residual: Any, out: Any,
            gated: bool = gated, group: int = group,
        ) -> None:  # fmt: skip
            config = skinny_gemm.TritonConfig(16, 32, 4, launch_pdl=pdl)
            fusion = skinny_gemm.Fusion(bias=bias, gated=gated, residual=residual)
            skinny_gemm.scaled_linear(
                x.view(FP8), x_scales, weight.view(FP8), scales, group, config, fusion,
                None if residual is not None else out,
            )  # fmt: skip

        operands = (
            x.contiguous().view(torch.uint8),
            x_scales.contiguous(),
            weight.contiguous().view(torch.uint8),
            scales,
            _random(width) if has_bias else None,
            out if adds else None,
            out,
        )
        name = f"scaled_linear {rows}x{k}x{width}{' gated' * gated}"
        yield Launch(name, accesses.scaled_linear, operands, run, waits_in=skinny_gemm)


def _int4_products() -> Iterator[Launch]:
    # Rows, K, group, outputs, bias, gated, residual, programs that share K.
    shapes = (
        (18, 192, 32, 80, True, False, True, 2),
        (3, 96, 32, 40, True, True, False, 1),
        (17, 128, 64, 80, False, False, False, 1),
        (2, 256, 128, 72, False, True, False, 3),
    )
    for rows, k, group, num_out, has_bias, gated, adds, split in shapes:
        width = num_out * (2 if gated else 1)
        data, scales, zeros = round_to_int4(_random(width, k), group)
        out = _random(rows, num_out)
        tiles = -(-width // 64) * -(-rows // 16)
        partial = torch.empty(tiles, split, 64, 16) if split > 1 else None
        num_done = torch.zeros(tiles, dtype=torch.int32) if split > 1 else None

        def run(
            pdl: bool, x: Any, data: Any, scales: Any, zeros: Any, bias: Any, residual: Any, out: Any, _: Any,
            num_done: Any, gated: bool = gated, group: int = group, split: int = split,
        ) -> None:  # fmt: skip
            config = int4_gemm.Int4Config(64, 16, min(group, 64), 4, 2, split, launch_pdl=pdl)
            workspace = int4_gemm.SplitWorkspace(x.device)
            if num_done is not None:
                workspace.num_done = num_done
            fusion = skinny_gemm.Fusion(bias=bias, gated=gated, residual=residual)
            result = None if residual is not None else out
            int4_gemm.int4_linear(x, data, scales, zeros, group, config, workspace, fusion, result)

        operands = (
            _random(rows, k), data.contiguous(), scales, zeros, _random(width) if has_bias else None,
            out if adds else None, out, partial, num_done,
        )  # fmt: skip
        name = f"int4_linear {rows}x{k}x{width}{' gated' * gated} in {split}"
        outputs = [] if partial is None else [partial]
        yield Launch(name, accesses.int4_linear, operands, run, outputs, waits_in=int4_gemm)


def _reorderings() -> Iterator[Launch]:
    for rows, k, block, norm in ((3, 192, 64, _random(192)), (2, 128, 128, None)):
        x = _random(rows, k)

        def run(pdl: bool, x: Any, norm: Any, out: Any, block: int = block) -> None:
            int4_gemm.reorder_columns(x, block, norm, 1e-6, pdl)

        operands = (x, norm, torch.empty_like(x))
        name = f"reorder_columns {rows}x{k} by {block}"
        yield Launch(name, accesses.reorder_columns, operands, run, [operands[2]], int4_gemm)


def _plain_matrices() -> Iterator[Launch]:
    for kind, k, group in (("int4", 96, 32), ("fp8", 200, 128), ("fp8", 40, 40)):
        stored = (round_to_fp8 if kind == "fp8" else round_to_int4)(_random(5, k), group)
        data, scales, zeros = (*stored, None)[:3]

        def run(pdl: bool, data: Any, scales: Any, zeros: Any, out: Any, k: int = k, group: int = group) -> None:
            data = data if zeros is not None else data.view(FP8)
            quantized_gemm.dequantize(data, scales, zeros, group, k, torch.float32)

        out = torch.empty(5, k)
        operands = (data.contiguous().view(torch.uint8), scales, zeros, out)
        yield Launch(f"dequantize {kind} {group}", accesses.dequantize, operands, run, [out])


def _roundings() -> Iterator[Launch]:
    for scale, norm, group in ((torch.tensor(0.5), None, 128), (None, _random(200), 128), (None, None, 200)):
        x, (numbers, scales) = _random(3, 200), round_to_fp8(torch.ones(3, 200), group)

        def run(pdl: bool, x: Any, scale: Any, norm: Any, numbers: Any, scales: Any, group: int = group) -> None:
            quantized_gemm.quantize_rows(x, group, scale, norm, 1e-6, pdl)

        operands = (x, scale, norm, numbers.contiguous().view(torch.uint8), scales)
        name = f"quantize_rows {scale} {group}"
        yield Launch(name, accesses.quantize_rows, operands, run, [operands[3], scales], quantized_gemm)


def _routings() -> Iterator[Launch]:
    x, weight, out = _random(3, 40), _random(6, 40), _random(3, 6)

    def norm_and_multiply(pdl: bool, x: Any, norm: Any, weight: Any, *_: Any) -> None:
        routing.normed_logits(x, norm, 1e-6, weight, pdl=pdl)

    operands = (x, _random(40), weight, normed := torch.empty_like(x), out)
    yield Launch("normed_logits", accesses.router_logits, operands, norm_and_multiply, [normed, out], routing)

    def multiply(pdl: bool, x: Any, norm: Any, weight: Any, *_: Any) -> None:
        routing.router_logits(x, weight, pdl=pdl)

    yield Launch("router_logits", accesses.router_logits, (x, None, weight, None, out), multiply, [out], routing)
    choice = ExpertsConfig(num_experts=6, top_k=2, intermediate_size=1, renormalise=True)
    for tokens in (7, 40):
        logits, correction, slots = _random(tokens, 6), _random(6) / 16, torch.arange(tokens) % 5
        want = LayerKernels().route(logits, correction, slots, 1, choice)
        inputs, chosen, sorted_pairs = ((logits, correction, slots), (want.ids, want.weights), (want.order, want.ends))
        if tokens <= routing.TOKENS_A_PROGRAM:

            def route(pdl: bool, logits: Any, correction: Any, slots: Any, *_: Any) -> None:
                routing.route(logits, correction, slots, 1, choice, pdl=pdl)

            operands = (*inputs, *chosen, *sorted_pairs)
            yield Launch("route", accesses.route, operands, route, [*chosen, *sorted_pairs], routing)
            continue

        def choose(pdl: bool, logits: Any, correction: Any, slots: Any, *written: Any) -> None:
            routing.choose_experts(logits, correction, slots, 1, choice, *written, pdl)

        def place(pdl: bool, *operands: Any) -> None:
            routing.place_pairs(*operands, pdl)

        live = want.ids.flatten() < 6
        cells = torch.arange(2 * tokens) // (2 * routing.TOKENS_A_PROGRAM) * 6 + want.ids.flatten()
        counts = cells[live].bincount(minlength=12).view(2, 6).int()
        yield Launch(
            "choose_experts", accesses.choose_experts, (*inputs, *chosen, counts.clone()), choose, waits_in=routing
        )
        yield Launch("place_pairs", accesses.place_pairs, (want.ids, counts, *sorted_pairs), place, waits_in=routing)
        for first in (0, 2):

            def turn(pdl: bool, *operands: Any, first: int = first) -> None:
                routing.own_pairs(*operands, first, pdl)

            own = want.of_experts(range(first, first + 3))
            operands = want.ids, want.order, want.ends, own.ids.clone(), own.order.clone(), own.ends.clone()
            yield Launch("own_pairs", accesses.own_pairs, operands, turn, waits_in=routing)


def _grouped_products() -> Iterator[Launch]:
    # Tokens, experts for each, those that are hit, all, padded tokens, features, inputs, gated, by tiles, biases.
    shapes = (
        (7, 2, [0, 2, 5], 6, 1, 24, 40, True, True, False),
        (35, 1, [2], 3, 2, 17, 16, False, True, True),
        (3, 2, [0, 2, 5], 6, 1, 23, 40, True, False, True),
        (7, 2, [0, 2, 5], 6, 1, 24, 140, True, True, False),
        (3, 2, [0, 2, 5], 6, 1, 23, 140, False, False, False),
        (7, 2, [0, 2, 5], 6, 1, 24, 96, True, True, False),
        (3, 2, [0, 2, 5], 6, 1, 23, 96, True, False, False),
        (7, 2, [0, 2, 5], 6, 1, 24, 64, False, True, False),
        (3, 2, [0, 2, 5], 6, 1, 23, 64, True, False, False),
    )
    for tokens, top_k, hit, num_experts, padded, size, k, gated, by_tiles, has_bias in shapes:
        sent = routed(tokens, top_k, hit, num_experts, padded)
        x, weight = _random(tokens, k), _random(num_experts, size * (2 if gated else 1), k)
        out = _random(tokens * top_k, size)

        def run(
            pdl: bool, x: Any, weight: Any, order: Any, ends: Any, out: Any, bias: Any, scales: Any, zeros: Any,
            gated: bool = gated, by_tiles: bool = by_tiles,
        ) -> None:  # fmt: skip
            has_four_bits = weight.shape[2] < x.shape[1]
            cut = grouped_gemm.GroupedConfig(16, 16, 32 if has_four_bits else 16, 4, 1) if by_tiles else None
            weight = weight if scales is None or has_four_bits else weight.view(torch.float8_e4m3fn)
            grouped_gemm.grouped_product(
                x, weight, Routing(order, order, order, ends), gated, cut, bias, scales=scales, pdl=pdl, zeros=zeros
            )

        bias = _random(*weight.shape[:2]) if has_bias else None
        scales = zeros = None
        if k in (96, 64):  # MXFP4 and int4 in groups of 32
            groups = (*weight.shape[:2], k // 32)
            scales = torch.randint(120, 124, groups, dtype=torch.uint8)
            if k == 64:
                scales, zeros = torch.rand(groups) + 0.5, torch.randint(0, 16, groups, dtype=torch.uint8)
            weight = torch.randint(0, 256, (*weight.shape[:2], k // 2), dtype=torch.uint8)
        if k > 128:
            scales, weight = (torch.rand(*weight.shape[:2], 2) + 0.5, weight.to(torch.float8_e4m3fn).view(torch.uint8))
        operands = (x, weight, sent.order, sent.ends, out, bias, scales, zeros)
        yield Launch(f"grouped_product {tokens}x{top_k}", accesses.grouped_product, operands, run, [out], grouped_gemm)


def _combinations() -> Iterator[Launch]:
    for tokens, top_k, padded, size, adds in ((5, 2, 1, 48, True), (3, 3, 0, 20, False)):
        sent = routed(tokens, top_k, [0, 1, 3], 4, padded)
        y, out = _random(tokens * top_k, size), _random(tokens, size)

        def run(pdl: bool, y: Any, ids: Any, weights: Any, out: Any, num_experts: int, adds: bool) -> None:
            sent = Routing(ids, weights, ids, torch.zeros(num_experts))
            grouped_gemm.combine_experts(y, sent, out if adds else None, pdl)

        operands = (y, sent.ids, sent.weights, out, 4, adds)
        outputs = () if adds else (out,)
        yield Launch(
            f"combine_experts {tokens}x{top_k}", accesses.combine_experts, operands, run, outputs, grouped_gemm
        )


def _paged(lens: list[int], page_size: int, heads: tuple[int, int], dim: int = 16) -> tuple[Any, ...]:
    """Keys, values, page table, rows and lengths of requests whose pages are anywhere in a pool."""
    pages = [-(-n // page_size) for n in lens]
    num_pages = sum(pages) + 3
    caches = [_random(num_pages * page_size, heads[1], dim) for _ in range(2)]
    table = torch.zeros(len(lens) + 2, max(pages) + 2, dtype=torch.int32)
    rows = torch.randperm(len(lens) + 2)[: len(lens)]
    free = (torch.randperm(num_pages - 1) + 1).tolist()
    for row, count in zip(rows, pages, strict=True):
        table[row, :count] = torch.tensor([free.pop() for _ in range(count)])
    return *caches, table, rows, torch.tensor(lens)


def value_dim_of(k: torch.Tensor, v: torch.Tensor) -> int:
    """Of 16 features; of a row that is key and value 12."""
    return 12 if k.data_ptr() == v.data_ptr() else 16


def _rules(k: torch.Tensor, v: torch.Tensor, window: int | None, sinks: torch.Tensor | None) -> LayerRules:
    if value_dim_of(k, v) == 16:
        return LayerRules(window, 0.0, sinks)
    return LayerRules(window, 0.0, sinks, ("latent", "latent"), 12)


def _decodes() -> Iterator[Launch]:
    # Lengths, page size, heads, queries, nodes, whether they are a tree, the window (0: keys and values are one row).
    shapes = (
        ([34, 5], 4, (2, 1), 3, 4, True, None),
        ([34, 1], 4, (2, 1), 1, 1, False, None),
        ([34, 5], 4, (20, 1), 2, 2, False, 0),
        ([50], 1, (6, 2), 1, 1, False, None),
        ([17, 1, 33], 16, (2, 2), 1, 1, False, None),
        ([40, 9], 16, (4, 2), 4, 4, False, None),
        ([70], 1, (9, 1), 8, 8, True, None),
        ([70, 9], 4, (4, 2), 1, 1, False, 21),
        ([70, 20], 1, (4, 2), 3, 4, False, 6),
        ([70, 20], 16, (4, 2), 3, 5, True, 18),
    )
    for lens, page_size, heads, num_queries, num_nodes, is_tree, window in shapes:
        k_cache, v_cache, table, rows, seq_lens = _paged(lens, page_size, heads)
        if window == 0:
            v_cache, window = k_cache, None
        q = _random(len(lens) * num_queries, heads[0], 16)
        out = torch.empty_like(q)
        ancestors = torch.randint(0, 1 << num_nodes, (len(lens), num_queries)) if is_tree else None
        tiles = decode_attention.query_tiles(num_queries * (heads[0] // heads[1]))
        value_dim = value_dim_of(k_cache, v_cache)
        workspace = decode_attention.DecodeWorkspace(heads[1], value_dim, 4, torch.device("cpu"), tiles)
        scratch = (workspace.partial, workspace.stats, workspace.num_done)

        def run(
            pdl: bool, q: Any, k: Any, v: Any, out: Any, table: Any, rows: Any, seq_lens: Any, partial: Any,
            stats: Any, num_done: Any, page_size: int, ancestors: Any, num_queries: int, num_nodes: int,
            window: int | None, sinks: Any,
        ) -> None:  # fmt: skip
            space = decode_attention.DecodeWorkspace.__new__(decode_attention.DecodeWorkspace)
            tiles = decode_attention.query_tiles(num_queries * (q.shape[1] // k.shape[1]))
            space.max_workers, space.segments, space.shape = 4, 0, (k.shape[1], value_dim_of(k, v), tiles)
            space.partial, space.stats, space.num_done = partial, stats, num_done
            config = decode_attention.DecodeConfig(16, 3, 4, 2, pdl, num_prefetched=0 if k.device.type == "cpu" else 2)
            requests = decode_attention.PagedRequests(table, rows, seq_lens, page_size)
            tree, rules = QueryTree(num_queries, num_nodes, ancestors), _rules(k, v, window, sinks)
            decode_attention.decode_attention(q, k, v, requests, _SCALE, space, config, tree, rules)

        sinks = None if window is None else torch.randn(heads[0])
        scratch += page_size, ancestors, num_queries, num_nodes, window, sinks
        operands = (q, k_cache, v_cache, out, table, rows, seq_lens, *scratch)
        name = f"decode_attention of {lens}, {num_queries} queries, pages of {page_size}, window {window}"
        yield Launch(name, accesses.decode_attention, operands, run, [out], decode_attention)
    for counts, heads, is_latent in (([34, 5], 20, True), ([17, 1, 33], 3, False)):
        k_cache, v_cache, table, rows, seq_lens = _paged(counts, 1, (heads, 1))
        v_cache = k_cache if is_latent else v_cache
        q = _random(len(counts), heads, 16)
        tiles, value_dim = decode_attention.query_tiles(heads), value_dim_of(k_cache, v_cache)
        workspace = decode_attention.DecodeWorkspace(1, value_dim, 4, torch.device("cpu"), tiles)

        def attend(
            pdl: bool, q: Any, k: Any, v: Any, out: Any, slots: Any, lists: Any, counts: Any, partial: Any, stats: Any,
            num_done: Any,
        ) -> None:  # fmt: skip
            space = decode_attention.DecodeWorkspace.__new__(decode_attention.DecodeWorkspace)
            tiles = decode_attention.query_tiles(q.shape[1])
            space.max_workers, space.segments, space.shape = 4, 0, (1, value_dim_of(k, v), tiles)
            space.partial, space.stats, space.num_done = partial, stats, num_done
            config = decode_attention.DecodeConfig(16, 3, 4, 2)
            requests, rules = decode_attention.PagedRequests(slots, lists, counts, 1), _rules(k, v, None, None)
            decode_attention.decode_attention(q, k, v, requests, _SCALE, space, config, rules=rules, out=out)

        scratch = (workspace.partial, workspace.stats, workspace.num_done)
        operands = (q, k_cache, v_cache, torch.empty_like(q), table, rows, seq_lens, *scratch)
        yield Launch(f"list_attention of {counts}", accesses.list_attention, operands, attend)
    # Lengths, heads, queries, features of a value, further features of a key.
    for lens, heads, num_queries, value_dim, tail in (([70, 40], 5, 2, 12, 4), ([64], 5, 1, 16, 16)):
        tiles = decode_attention.query_tiles(num_queries * heads)
        workspace = decode_attention.DecodeWorkspace(1, value_dim, 4, torch.device("cpu"), tiles)
        partial, stats = torch.rand_like(workspace.partial), torch.rand_like(workspace.stats) + 0.5
        out = torch.empty(len(lens) * num_queries, heads, value_dim + tail)

        def merge(
            pdl: bool, partial: Any, stats: Any, seq_lens: Any, out: Any,
            workspace: Any = workspace, nodes: int = num_queries,
        ) -> None:  # fmt: skip
            space = decode_attention.DecodeWorkspace.__new__(decode_attention.DecodeWorkspace)
            space.shape, space.partial, space.stats = workspace.shape, partial, stats
            config = decode_attention.DecodeConfig(16, 4, 4, 1, pdl, merge_apart=True)
            tree = QueryTree(nodes, nodes)
            decode_attention._merge_pieces(out, seq_lens, space, config, 1, tree, LayerRules())

        operands = (partial, stats, torch.tensor(lens), out)
        yield Launch(f"merge_pieces of {lens}", accesses.merge_pieces, operands, merge, waits_in=decode_attention)


def _selections() -> Iterator[Launch]:
    # Lengths, page size, heads, features, queries, nodes, whether they are a tree, whether rows are in FP8.
    shapes = (
        ([34, 5], 4, 3, 16, 3, 4, True, False),
        ([34, 5], 4, 3, 16, 1, 1, False, True),
        ([140, 9], 16, 17, 20, 2, 2, False, False),
    )
    for lens, page_size, heads, dim, num_queries, num_nodes, is_tree, in_fp8 in shapes:
        index, _, table, rows, seq_lens = _paged(lens, page_size, (1, 1), dim)
        if in_fp8:
            index = packed(*rounded(index))
        num, sizes = len(lens) * num_queries, (num_queries, num_nodes)
        queries, weights = _random(num, heads, dim), _random(num, heads)
        ancestors = torch.randint(0, 1 << num_nodes, (len(lens), num_queries)) if is_tree else None

        def score(
            pdl: bool, queries: Any, weights: Any, index: Any, table: Any, rows: Any, seq_lens: Any, keys: Any,
            page_size: int, ancestors: Any, sizes: tuple[int, int] = sizes, longest: int = max(lens),
        ) -> None:  # fmt: skip
            requests = decode_attention.PagedRequests(table, rows, seq_lens, page_size)
            tree = QueryTree(*sizes, ancestors)
            select_tokens.score_keys(queries, weights, index, requests, tree, 4, longest, 0, 2)

        keys = torch.empty(num, -(-max(lens) // 16) * 16, dtype=torch.int32)
        operands = (queries, weights, index, table, rows, seq_lens, keys, page_size, ancestors)
        yield Launch(f"score_keys of {lens}", accesses.score_keys, operands, score, [keys])
        found = torch.randint(-3, 3, keys.shape).float()  # whose garbage, unlike that of integers, is not all equal

        def select(
            pdl: bool, keys: Any, table: Any, rows: Any, seq_lens: Any, ancestors: Any, slots: Any, counts: Any,
            page_size: int = page_size, sizes: tuple[int, int] = sizes,
        ) -> None:  # fmt: skip
            requests = decode_attention.PagedRequests(table, rows, seq_lens, page_size)
            tree = QueryTree(*sizes, ancestors)
            select_tokens.select_best(keys.view(torch.int32), requests, tree, 0, slots, counts)

        chosen = torch.empty(num, 4, dtype=torch.int32), torch.empty(num, dtype=torch.int64)
        operands = (found, table, rows, seq_lens, ancestors, *chosen)
        yield Launch(f"select_best of {lens}", accesses.select_best, operands, select)


def _lightnings() -> Iterator[Launch]:
    for num, heads, dim in ((3, 5, 12), (1, 16, 32)):
        projected, decays, weights = _random(num, 4 * heads * dim), -torch.rand(heads), _random(2, dim)
        table, positions = _random(9, 3 * dim // 2), torch.tensor([4, 2, 7])[:num]

        def run(pdl: bool, projected: Any, decays: Any, q: Any, k: Any, table: Any, positions: Any, *outs: Any) -> None:
            lightning_inputs.lightning_inputs(projected, decays, QKNorm(q, k, 1e-3), table, positions, 0.3)

        outs = [torch.empty(num, heads, dim) for _ in range(3)] + [torch.empty(num, heads)]
        operands = (projected, decays, *weights, table, positions, *outs)
        yield Launch(f"lightning_inputs of {heads}", accesses.lightning_inputs, operands, run, outs)


def _selections_of_blocks() -> Iterator[Launch]:
    blocks = BlocksConfig(size=8, top_k=3, first=1, local=0, width=4, stride=2)
    for lens, page_size, group, dim in (([70, 9], 8, 3, 16), ([33, 1], 16, 17, 20)):
        keys, _, table, rows, seq_lens = _paged(lens, page_size, (1, 2), dim)
        means, num = _random(len(keys), 2, dim // 2), len(lens)
        positions = torch.tensor([1, 2, 7, 0])
        out_slots = torch.tensor([5, page_size, page_size + 3, 0])

        def store(pdl: bool, *operands: Any) -> None:
            select_blocks.store_means(*operands)

        operands = (keys, means, positions, out_slots, 2)
        yield Launch(f"store_means of {dim}", accesses.store_means, operands, store)

        def score(
            pdl: bool, queries: Any, means: Any, table: Any, rows: Any, seq_lens: Any, partial: Any, scores: Any,
            page_size: int, longest: int = max(lens),
        ) -> None:  # fmt: skip
            requests = decode_attention.PagedRequests(table, rows, seq_lens, page_size)
            wanted = BlockQueries(queries, 0.3, blocks, first_of_best)
            select_blocks.score_blocks(wanted, means, requests, longest, 1, False)

        scores = torch.empty(num, 2, -(-max(lens) // 8), dtype=torch.int32)
        queries, partial = _random(num, 2 * group, dim), torch.empty(num, 2, 2, 2, select_blocks._padded(group))
        operands = (queries, means, table, rows, seq_lens, partial, scores, page_size)
        yield Launch(f"score_blocks of {lens}", accesses.score_blocks, operands, score, [partial, scores])

        def choose(
            pdl: bool, found: Any, table: Any, rows: Any, seq_lens: Any, chosen: Any, lists: Any, counts: Any,
            page_size: int = page_size,
        ) -> None:  # fmt: skip
            requests = decode_attention.PagedRequests(table, rows, seq_lens, page_size)
            select_blocks.choose_blocks(found.view(torch.int32), requests, blocks, 0, len(rows))

        found = torch.rand(scores.shape)
        lists = torch.empty(2 * num, 24, dtype=torch.int32), torch.empty(2 * num, dtype=torch.int64)
        chosen = torch.empty(2 * num, 3, dtype=torch.int32)
        operands = (found, table, rows, seq_lens, chosen, *lists)
        yield Launch(f"choose_blocks of {lens}", accesses.choose_blocks, operands, choose, [*lists, chosen])


def _extends() -> Iterator[Launch]:
    shapes = (
        ([34, 3], [2, 3], 4, (2, 1), 2, None),
        ([20, 5], [6, 5], 4, (4, 2), 1, None),
        ([33], [1], 16, (2, 1), 1, None),
        ([34, 3], [2, 3], 4, (20, 1), 2, 0),
        ([70, 3], [20, 3], 4, (2, 1), 2, 9),
        ([70, 25], [3, 25], 1, (4, 2), 1, 18),
    )
    for lens, query_lens, page_size, heads, num_splits, window in shapes:
        k_cache, v_cache, table, rows, seq_lens = _paged(lens, page_size, heads)
        if window == 0:
            v_cache, window = k_cache, None
        q = _random(sum(query_lens), heads[0], 16)
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        shape = (num_splits,) if num_splits > 1 else ()
        out = torch.empty(*shape, *q.shape[:2], 16 if num_splits == 1 else value_dim_of(k_cache, v_cache))
        stats = torch.empty(num_splits, 2, *q.shape[:2]) if num_splits > 1 else None
        tiles = sum(-(-n * heads[0] // heads[1] // 16) for n in query_lens)
        name = f"extend_attention of {lens} in {num_splits}, window {window}"
        grid = extend_attention.ExtendGrid(tiles, num_splits)

        def run(
            pdl: bool, q: Any, k: Any, v: Any, out: Any, stats: Any, table: Any, rows: Any, seq_lens: Any,
            starts: Any, page_size: int, window: int | None, sinks: Any,
            grid: extend_attention.ExtendGrid = grid,
        ) -> None:  # fmt: skip
            requests = decode_attention.PagedRequests(table, rows, seq_lens, page_size)
            config = extend_attention.ExtendConfig(16, 16, 4, 2)
            merged = None if grid.num_splits == 1 else torch.zeros_like(q)
            target = out if merged is None else merged
            rules = _rules(k, v, window, sinks)
            extend_attention.extend_attention(q, k, v, requests, starts, grid, _SCALE, config, target, rules)

        sinks = None if window is None else torch.randn(heads[0])
        operands = (
            q, k_cache, v_cache, out, stats, table, rows, seq_lens, starts, page_size, window, sinks
        )  # fmt: skip
        outputs = [out, stats] if stats is not None else []
        yield Launch(name, accesses.extend_attention, operands, run, outputs)
    partial, out = _random(2, 5, 4, 12), torch.empty(5, 4, 12)
    stats = torch.rand(2, 2, 5, 4) + 0.5

    def merge(pdl: bool, partial: Any, stats: Any, out: Any) -> None:
        extend_attention._merge_kernel[(5, 2)](
            partial, stats, out, None, 2, 5, NUM_HEADS=4, HEAD_DIM=12, DIM_PAD=16, TAIL=0, HEADS=2, SINKS=False,
            num_warps=4,
        )  # fmt: skip

    yield Launch("merge_splits", accesses.merge_splits, (partial, stats, out), merge)


def _gathers() -> Iterator[Launch]:
    for lens, page_size in (([9, 1, 40, 16], 4), ([70], 1)):
        _, _, table, rows, seq_lens = _paged(lens, page_size, (1, 1))
        num_pages = [-(-n // page_size) for n in lens]
        sizes = len(lens) + 1, sum(num_pages), len(lens)
        ragged = [torch.zeros(size, dtype=torch.int32) for size in sizes]

        def indices(
            pdl: bool, table: Any, rows: Any, lens: Any, *out: Any, size: int = page_size, most: int = max(num_pages)
        ) -> None:
            page_gather.gather_page_indices(table, rows, lens, size, most, *out)

        name = f"gather_page_indices of {lens}"
        yield Launch(name, accesses.gather_page_indices, (table, rows, seq_lens, *ragged), indices)
        padded = torch.zeros(len(lens), 80, dtype=torch.int32), torch.zeros(len(lens), dtype=torch.int32)

        def to_rows(pdl: bool, table: Any, rows: Any, lens: Any, *out: Any, size: int = page_size) -> None:
            page_gather.gather_page_rows(table, rows, lens, size, *out)

        yield Launch(
            f"gather_page_rows of {lens}", accesses.gather_page_rows, (table, rows, seq_lens, *padded), to_rows
        )


def _prologues() -> Iterator[Launch]:
    for size, page_size in ((5, 4), (40, 1)):
        rows = torch.randperm(50)[:size]
        plan = rows, torch.randint(1, 30, (size,)), torch.randint(0, 9, (size,))
        table = torch.randint(0, 1000, (50, 40), dtype=torch.int32)
        state = table, torch.randint(0, 1000, (50,))
        outputs = [torch.zeros(size, dtype=torch.int64) for _ in range(4)]

        def run(
            pdl: bool, rows: Any, lens: Any, steps: Any, table: Any, tokens: Any, page_size: int, *outputs: Any
        ) -> None:
            four = outputs[0], outputs[1], outputs[2], outputs[3]
            decode_prologue_triton.launch((rows, lens, steps), (table, tokens), page_size, four)

        operands = (*plan, *state, page_size, *outputs)
        yield Launch(f"decode_prologue of {size}", DECODE_PROLOGUE, operands, run)


def _draws() -> Iterator[Launch]:
    # Thresholds count from the maximum of all tokens, so there are no masks beside them.
    for num_reqs, vocab_size, has_all, has_masks in (
        (3, 1100, True, False),
        (3, 40, False, False),
        (3, 70, False, True),
    ):
        logits = _random(num_reqs, vocab_size) * 3
        some = (
            torch.rand(num_reqs) + 0.5,
            torch.ones(num_reqs),
            torch.from_numpy(mix_seeds(range(num_reqs))),
            torch.arange(num_reqs) * 7 + 3,
            torch.full((num_reqs,), -1.5),
            logits.amax(-1),
        )
        ids = torch.randperm(2 * vocab_size)[:vocab_size]
        inputs = (*some, ids) if has_all else (None, None, None, some[3], None, None, None)
        pieces = _draw_variants(vocab_size)[0]
        best = torch.zeros(num_reqs, pieces), torch.zeros(num_reqs, pieces, dtype=torch.int32)
        largest = torch.zeros(num_reqs, pieces) if has_all else None
        words = torch.randint(-(2**31), 2**31, (num_reqs, -(-vocab_size // 32)))
        masks = words.int() if has_masks else None

        def draw(pdl: bool, logits: Any, *rest: Any) -> None:
            each = 0 if rest[-4] is None else 1
            _draw_variants(logits.shape[1], rows_each_mask=each)[1].launch((rest[-2].numel(),), (logits, *rest), (2, 5))

        name = f"draw_from_pieces {num_reqs}x{vocab_size}"
        yield Launch(name, sample.PIECES, (logits, *inputs, masks, *best, largest), draw)
        scores, ids = torch.rand(num_reqs, pieces), torch.randint(0, vocab_size, (num_reqs, pieces)).int()
        rows, tokens = torch.randperm(9)[:num_reqs], torch.zeros(9, dtype=torch.int64)
        nexts, steps = torch.zeros(num_reqs, dtype=torch.int64), torch.randint(0, 9, (num_reqs,))

        def combine(pdl: bool, *operands: Any) -> None:
            sample_triton._combine_variant(operands[0].shape[1]).launch((len(operands[0]),), operands)

        kept = (scores, ids, rows, tokens, nexts, steps)
        yield Launch(f"combine_pieces {num_reqs}", sample.COMBINE, kept, combine)


def _moves() -> Iterator[Launch]:
    # Nodes, paths, counts. The paths end with what is not on them.
    shapes = ((5, [[0, 2, 4], [0, 3, 1]], [3, 2]), (4, [[0, 1, 3, 0], [0, 2, 3, 0], [0, 3, 0, 0]], [1, 3, 2]))
    for num_nodes, paths, counts in shapes:
        path, batch = torch.tensor(paths), len(paths)
        slots = torch.randperm(4 + batch * num_nodes)[: batch * num_nodes]
        parts = _random(40, 2, 6), _random(40, 14), _random(40, 3, 2, dtype=torch.float16)

        def run(pdl: bool, slots: Any, path: Any, counts: Any, *parts: Any) -> None:
            addresses = torch.tensor([part.data_ptr() for part in parts]).to(slots.device)
            words = [part[0].numel() * part.element_size() // 4 for part in parts]
            kv_rows_triton.launch(slots, path, counts, addresses, torch.tensor(words).to(slots.device), max(words))

        operands = (slots, path, torch.tensor(counts), *parts)
        yield Launch(f"move_accepted of {paths}", kv_rows.KERNEL, operands, run)


def _ids(*shape: int, most: int = 99) -> torch.Tensor:
    return torch.randint(0, most, shape)


def _begins() -> Iterator[Launch]:
    # Requests, rows of each, page size, whether there are paths.
    for size, num_rows, page_size, has_paths in ((3, 4, 4, True), (5, 1, 1, False), (70, 33, 16, False)):
        rows = torch.randperm(size + 4)[:size]
        lens, table = _ids(size + 4, most=30) + 1, _ids(size + 4, 70).int()
        vectors = [torch.zeros(size, dtype=torch.int64) for _ in range(3)]
        tiles = [torch.zeros(size, num_rows, dtype=torch.int64) for _ in range(3)]
        begun = BeginOutputs(
            vectors[0], vectors[1], vectors[2] if has_paths else None, *tiles, torch.zeros(size, dtype=torch.bool)
        )

        def run(
            pdl: bool, rows: Any, lens: Any, table: Any, tokens: Any, page_size: int, depth: int, *begun: Any
        ) -> None:
            step_triton.launch_begin(rows, lens, table, tokens, page_size, depth, BeginOutputs(*begun))

        operands = (rows, lens, table, _ids(size + 4), page_size, 2, *begun)
        yield Launch(f"begin_speculative_step of {size}x{num_rows}", step.BEGIN, operands, run)


def _places() -> Iterator[Launch]:
    # Requests, rows of each, page size, the first row from a request's length on, whether there are positions.
    for size, num_rows, page_size, first, has_positions in ((3, 4, 4, 2, True), (5, 1, 1, -40, False)):
        rows = torch.randperm(size + 4)[:size]
        outputs = [torch.zeros(size, num_rows, dtype=torch.int64) for _ in range(2)]

        def run(pdl: bool, rows: Any, lens: Any, first: int, table: Any, page_size: int, *outputs: Any) -> None:
            step_triton.launch_place(rows, lens, first, table, page_size, *outputs)

        table, positions = _ids(size + 4, 70).int(), outputs[0] if has_positions else None
        operands = (rows, _ids(size, most=30) + 1, first, table, page_size, positions, outputs[1])
        yield Launch(f"place_rows of {size}x{num_rows}", step.PLACE, operands, run)


def _joins() -> Iterator[Launch]:
    for tokens, size, width, has_norms in ((3, 40, 48, True), (2, 64, 64, False), (1, 100, 20, True)):
        ids, table, hidden = torch.randperm(9)[:tokens], _random(9, size), _random(tokens, width)
        weights = (_random(size), _random(width)) if has_norms else (None, None)

        def run(pdl: bool, ids: Any, table: Any, hidden: Any, first: Any, second: Any, out: Any) -> None:
            norms = None if first is None else embed_join.JoinNorms(first, second, 1e-6)
            embed_join_triton.launch(ids, table, hidden, norms, out, pdl)

        operands = (ids, table, hidden, *weights, torch.empty(tokens, size + width))
        name = f"embed_and_join {tokens}x{size}"
        yield Launch(name, embed_join.KERNEL, operands, run, waits_in=embed_join_triton)


def _drafts() -> Iterator[Launch]:
    for size, num_pieces, num_rows, column, has_next in ((3, 5, 4, 1, True), (2, 150, 5, 4, False)):
        pieces = Pieces(
            torch.randn(size, num_pieces), _ids(size, num_pieces, most=89).int() + 1, torch.randn(size, num_pieces)
        )
        is_bad, ids = torch.tensor([False, True, False])[:size], _ids(size, num_rows)
        outputs = [torch.zeros(size, dtype=torch.int64) for _ in range(4)]
        following = (1, _ids(size), _ids(size, num_rows), _ids(size, num_rows), *outputs)

        def run(pdl: bool, *operands: Any, has_next: bool = has_next) -> None:
            scores, best, largest, is_bad, ids, column, vocab_size, *rest = operands
            following = NextRow(*rest) if has_next else None
            step_triton.launch_keep(Pieces(scores, best, largest), is_bad, ids, column, vocab_size, following)

        rest = following if has_next else (0, *[None] * 7)
        yield Launch(f"keep_draft {size}x{num_pieces}", step.KEEP, (*pieces, is_bad, ids, column, 90, *rest), run)

    for size, num_pieces, num_rows, has_ids in ((3, 5, 4, True), (2, 150, 5, False)):
        pieces = Pieces(torch.randn(size, num_pieces), _ids(size, num_pieces).int(), torch.randn(size, num_pieces))
        rows, counts = torch.randperm(size + 3)[:size], _ids(size, most=num_rows - 1)
        kept, ids = torch.zeros(size + 3, 2, dtype=torch.int64), _ids(size, num_rows) if has_ids else None

        def propose(pdl: bool, scores: Any, best: Any, largest: Any, *rest: Any) -> None:
            step_triton.launch_proposal(Pieces(scores, best, largest), *rest)

        operands = (*pieces, rows, counts, kept[:, 1], ids, 1)
        yield Launch(f"keep_proposal {size}x{num_pieces}", step.PROPOSAL, operands, propose)


def _ends() -> Iterator[Launch]:
    for size, num_rows, accept_length, has_all in ((3, 4, None, True), (4, 3, 1.5, False), (40, 40, None, True)):
        ids, drawn = _ids(size, num_rows, most=2), _ids(size, num_rows, most=2)
        flags = torch.rand(2, size) < 0.5
        ids[0, 1:] = drawn[0, :-1]  # the first request's drafts count, so that everything matters
        flags[:, 0] = torch.tensor([False, True])
        rows = torch.randperm(size + 3)[:size]
        counts = [torch.zeros(size, dtype=torch.int64) for _ in range(2)]
        of_rows = [torch.zeros(size + 3, dtype=torch.int64) for _ in range(3)]
        behind = torch.zeros(size + 3, dtype=torch.bool)
        kept = (*counts, *of_rows, behind) if has_all else (*counts, *of_rows[:2], None, None)

        def run(
            pdl: bool, ids: Any, drawn: Any, is_bad: Any, may: Any, rows: Any, lens: Any, length: Any, *kept: Any
        ) -> None:
            step_triton.launch_accept(ids, drawn, is_bad, may, rows, lens, length, AcceptOutputs(*kept))

        operands = (ids, drawn, flags[0].clone(), flags[1].clone(), rows, _ids(size), accept_length, *kept)
        yield Launch(f"accept_chain {size}x{num_rows}", step.ACCEPT, operands, run)
    for size, num_rows, features in ((3, 4, 40), (2, 3, 2500)):
        hidden, counts = _random(size * num_rows, features), _ids(size, most=num_rows) + 1
        kept, rows = torch.zeros(6, 2, features), torch.randperm(6)[:size]

        def keep(pdl: bool, *operands: Any) -> None:
            step_triton.launch_hidden(*operands)

        operands = (hidden, counts, rows, kept[:, 1])
        yield Launch(f"keep_last_hidden {size}x{features}", step.HIDDEN, operands, keep)


def _look_ups() -> Iterator[Launch]:
    for size, num_rows, longest, window in ((3, 4, 50, (1, 3)), (2, 9, 600, (2, 4))):
        tokens, rows = _ids(size + 3, longest + num_rows, most=3).int(), torch.randperm(size + 2)[:size] + 1
        lens = _ids(size, most=longest - 2) + 2

        def look_up(pdl: bool, *operands: Any) -> None:
            lookup_triton.launch_look_up(*operands)

        operands = (rows, lens, tokens, *window, _ids(size, num_rows))
        yield Launch(f"look_up_drafts {size}x{longest}", lookup.LOOK_UP, operands, look_up)

        def keep(pdl: bool, *operands: Any) -> None:
            lookup_triton.launch_keep(*operands)

        yield Launch(f"keep_tokens {size}x{num_rows}", lookup.KEEP, (rows, lens, _ids(size, num_rows), tokens), keep)


def _draw_variants(vocab_size: int, rows_each_mask: int = 0) -> Any:
    return sample_triton._variants(vocab_size, vocab_size, rows_each_mask=rows_each_mask)
