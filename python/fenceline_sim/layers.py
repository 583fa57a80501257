"""Layers on the virtual GPU. They make the same launches as on a GPU. These declare
the kernels' accesses and compute their values with torch's operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from fenceline.config.families import ExpertsConfig
from fenceline.layers.context import LayerContext, Shard
from fenceline.layers.kernels import accesses
from fenceline.layers.kernels.base import ONE, SILU, HeadLayout, KVScales, LayerKernels, QKNorm, Routing
from fenceline.layers.kernels.recurrence import DeltaGates, MambaGates
from fenceline.layers.recurrent_state import LayerState, StateRows
from fenceline.layers.weight import DenseWeight, RMSNorm
from fenceline.memory_order.kernel import Kernel

_FEW_ROWS = 8  # up to this many rows a GPU without measurements uses our own kernels (skinny_table)
_FEW_HEAD_ROWS = 64  # of ``by_head``, whose import needs Triton
_FEW_TOKENS, _TOKENS_A_PROGRAM = 16, 32  # of the router's kernels (``routing``, whose import needs Triton)
_TORCH = LayerKernels()


def _result(
    kernel: Kernel, function: Callable[..., torch.Tensor], out: torch.Tensor, *operands: torch.Tensor | None
) -> torch.Tensor:
    """One launch of ``kernel``, which writes ``function(*operands)`` to ``out``, its last operand."""

    def compute(*given: torch.Tensor) -> None:
        given[-1].copy_(function(*given[:-1]))

    kernel.launch(compute, *operands, out)
    return out


def _of_rows(rows: StateRows) -> tuple[torch.Tensor, ...]:
    return rows.starts, rows.absorbed, rows.query_starts, rows.slots


class LaunchedLayerKernels(LayerKernels):
    """One launch for each method, as in ``CudaLayerKernels``."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return _result(accesses.rms_norm, partial(_TORCH.rms_norm, eps=eps), torch.empty_like(x), x, weight)

    def activate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        return _result(accesses.silu_and_mul, partial(_TORCH.activate, activation=activation), out, gate_up)

    def rotate_and_store(
        self, qkv: torch.Tensor, heads: HeadLayout, norms: QKNorm | None, table: torch.Tensor, positions: torch.Tensor,
        k_cache: torch.Tensor, v_cache: torch.Tensor, out_slots: torch.Tensor, kv_scales: KVScales = ONE,
    ) -> None:  # fmt: skip
        def compute(
            qkv: torch.Tensor, q: torch.Tensor | None, k: torch.Tensor | None, table: torch.Tensor,
            positions: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out_slots: torch.Tensor,
        ) -> None:  # fmt: skip
            plain = None if norms is None or q is None or k is None else QKNorm(q, k, norms.eps)
            _TORCH.rotate_and_store(qkv, heads, plain, table, positions, k_cache, v_cache, out_slots, kv_scales)

        weights = (None, None) if norms is None else (norms.q_weight, norms.k_weight)
        operands = (qkv, *weights, table, positions, k_cache, v_cache, out_slots)
        accesses.rotate_and_store.launch(compute, *operands)

    def by_head(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if len(x) > _FEW_HEAD_ROWS:
            return _TORCH.by_head(x, weight, out)
        accesses.by_head.launch(_TORCH.by_head, x, weight, out)
        return out

    def store_latent(
        self, queries: torch.Tensor, row: torch.Tensor, norm_weight: torch.Tensor, eps: float, table: torch.Tensor,
        positions: torch.Tensor, out: torch.Tensor, cache_rows: torch.Tensor, out_slots: torch.Tensor,
    ) -> None:  # fmt: skip
        def compute(queries: torch.Tensor, row: torch.Tensor, norm_weight: torch.Tensor, *rest: torch.Tensor) -> None:
            _TORCH.store_latent(queries, row, norm_weight, eps, *rest)

        operands = (queries, row, norm_weight, table, positions, out, cache_rows, out_slots)
        accesses.store_latent.launch(compute, *operands)

    def store_index(
        self, queries: torch.Tensor, key: torch.Tensor, norm_weight: torch.Tensor, norm_bias: torch.Tensor, eps: float,
        table: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor, scale: float, out: torch.Tensor,
        out_weights: torch.Tensor, cache_rows: torch.Tensor, out_slots: torch.Tensor,
    ) -> None:  # fmt: skip
        def compute(
            queries: torch.Tensor, key: torch.Tensor, norm_weight: torch.Tensor, norm_bias: torch.Tensor,
            table: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor, *made: torch.Tensor,
        ) -> None:  # fmt: skip
            _TORCH.store_index(
                queries, key, norm_weight, norm_bias, eps, table, positions, weights, scale, *made
            )  # fmt: skip

        operands = (queries, key, norm_weight, norm_bias, table, positions, weights, out, out_weights, cache_rows)
        accesses.store_index.launch(compute, *operands, out_slots)

    def short_convolution(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool, state: LayerState,
        rows: StateRows,
    ) -> torch.Tensor:  # fmt: skip
        def compute(
            x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, starts: torch.Tensor,
            absorbed: torch.Tensor, query_starts: torch.Tensor, slots: torch.Tensor, conv: torch.Tensor,
            ring: torch.Tensor, out: torch.Tensor,
        ) -> None:  # fmt: skip
            given = replace(rows, starts=starts, absorbed=absorbed, query_starts=query_starts, slots=slots)
            out.copy_(_TORCH.short_convolution(x, weight, bias, silu, {"conv": conv, "x": ring}, given))

        out = torch.empty_like(x)
        operands = (x, weight, bias, *_of_rows(rows), state["conv"], state["x"], out)
        accesses.short_convolution.launch(compute, *operands)
        return out

    def delta_inputs(
        self, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, gates: DeltaGates
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        def compute(
            mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor,
            *written: torch.Tensor,
        ) -> None:  # fmt: skip
            made = _TORCH.delta_inputs(mixed, a, b, replace(gates, a_log=a_log, dt_bias=dt_bias))
            for out, value in zip(written, made, strict=True):
                out.copy_(value)

        tokens, heads = b.shape
        values = mixed.shape[1] - 2 * gates.num_key_heads * gates.key_dim
        keys = (tokens, gates.num_key_heads, gates.key_dim)
        of_decays = (tokens, heads) if a.shape == b.shape else (tokens, heads, gates.key_dim)
        shapes = (keys, keys, (tokens, heads, values // heads), of_decays, (tokens, heads))
        q, k, v, decays, beta = (mixed.new_empty(shape, dtype=torch.float32) for shape in shapes)
        operands = (mixed, a, b, gates.a_log, gates.dt_bias, q, k, v, decays, beta)
        accesses.delta_inputs.launch(compute, *operands)
        return q, k, v, decays, beta

    def mamba_inputs(
        self, mixed: torch.Tensor, dt: torch.Tensor, gates: MambaGates
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        def compute(
            mixed: torch.Tensor, dt: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, *written: torch.Tensor
        ) -> None:
            made = _TORCH.mamba_inputs(mixed, dt, replace(gates, a_log=a_log, dt_bias=dt_bias))
            for out, value in zip(written, made, strict=True):
                out.copy_(value)

        (tokens, heads), keys = dt.shape, (len(dt), gates.num_groups, gates.state_size)
        values = mixed.shape[1] - 2 * gates.num_groups * gates.state_size
        shapes = (keys, keys, (tokens, heads, values // heads), (tokens, heads))
        q, k, v, decays = (mixed.new_empty(shape, dtype=torch.float32) for shape in shapes)
        accesses.mamba_inputs.launch(compute, mixed, dt, gates.a_log, gates.dt_bias, q, k, v, decays)
        return q, k, v, decays

    def gated_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, silu: bool = True,
        skip: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        def compute(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *past: torch.Tensor) -> torch.Tensor:
            return _TORCH.gated_norm(x, gate, weight, eps, silu, None if skip is None else (past[0], past[1]))

        past = (None, None) if skip is None else skip
        return _result(accesses.gated_norm, compute, gate.new_empty(x.shape), x, gate, weight, *past)

    def recurrence(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decays: torch.Tensor, beta: torch.Tensor | None,
        state: LayerState, rows: StateRows,
    ) -> torch.Tensor:  # fmt: skip
        def compute(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decays: torch.Tensor, beta: torch.Tensor | None,
            starts: torch.Tensor, absorbed: torch.Tensor, query_starts: torch.Tensor, slots: torch.Tensor,
            matrix: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, out: torch.Tensor,
        ) -> None:  # fmt: skip
            given = replace(rows, starts=starts, absorbed=absorbed, query_starts=query_starts, slots=slots)
            of_layer = {"matrix": matrix, "k": keys, "d": values, "decay": kept}
            out.copy_(_TORCH.recurrence(q, k, v, decays, beta, of_layer, given))

        out = torch.empty_like(v)
        tensors = (state["matrix"], state["k"], state["d"], state["decay"])
        accesses.recurrence.launch(compute, q, k, v, decays, beta, *_of_rows(rows), *tensors, out)
        return out

    def router_logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if len(x) > _FEW_TOKENS:
            return _TORCH.router_logits(x, weight)
        out = x.new_empty(len(x), len(weight), dtype=torch.float32)
        return _result(accesses.router_logits, _TORCH.router_logits, out, x, weight)

    def route(
        self, logits: torch.Tensor, correction: torch.Tensor | None, out_slots: torch.Tensor, num_sink_slots: int,
        experts: ExpertsConfig,
    ) -> Routing:  # fmt: skip
        num_tokens, num_experts = logits.shape
        num_programs = -(-num_tokens // _TOKENS_A_PROGRAM)

        def route(
            logits: torch.Tensor, correction: torch.Tensor | None, out_slots: torch.Tensor, *written: torch.Tensor
        ) -> None:
            routing = _TORCH.route(logits, correction, out_slots, num_sink_slots, experts)
            for out, value in zip(written, (routing.ids, routing.weights, routing.order, routing.ends), strict=True):
                out.copy_(value)

        def choose(
            logits: torch.Tensor, correction: torch.Tensor | None, out_slots: torch.Tensor,
            ids: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor,
        ) -> None:  # fmt: skip
            routing = _TORCH.route(logits, correction, out_slots, num_sink_slots, experts)
            ids.copy_(routing.ids)
            weights.copy_(routing.weights)
            for tokens, row in zip(ids.split(_TOKENS_A_PROGRAM), counts, strict=True):
                row.copy_(tokens.flatten().bincount(minlength=num_experts)[:num_experts])

        def place(ids: torch.Tensor, counts: torch.Tensor, order: torch.Tensor, ends: torch.Tensor) -> None:
            routing = Routing.group(ids, ids, num_experts)
            order.copy_(routing.order)
            ends.copy_(counts.sum(0).cumsum(0))

        ids = logits.new_empty(num_tokens, experts.top_k, dtype=torch.int64)
        weights, order = torch.empty_like(ids, dtype=torch.float32), ids.new_empty(ids.numel())
        ends = ids.new_empty(num_experts, dtype=torch.int32)
        inputs = logits, correction, out_slots, ids, weights
        if num_programs == 1:
            accesses.route.launch(route, *inputs, order, ends)
        else:
            counts = ends.new_empty(num_programs, num_experts)
            accesses.choose_experts.launch(choose, *inputs, counts)
            accesses.place_pairs.launch(place, ids, counts, order, ends)
        return Routing(ids, weights, order, ends)

    def grouped_product(
        self, x: torch.Tensor, weight: torch.Tensor, routing: Routing, gated: bool = False,
        bias: torch.Tensor | None = None, limit: float = 0.0, scales: torch.Tensor | None = None,
        zeros: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        def compute(
            x: torch.Tensor, weight: torch.Tensor, order: torch.Tensor, ends: torch.Tensor, out: torch.Tensor,
            bias: torch.Tensor | None, scales: torch.Tensor | None, zeros: torch.Tensor | None,
        ) -> None:  # fmt: skip
            top_k = len(order) // len(x)  # 1 where x has a row for each pair
            shape = len(x), top_k
            sorted_pairs = Routing(order.new_empty(shape), x.new_empty(shape), order, ends)
            live = order[: ends[-1]]
            product = _TORCH.grouped_product(x, weight, sorted_pairs, gated, bias, limit, scales, zeros)
            out[live] = product[live]

        num_pairs = len(routing.order)
        out = x.new_empty(num_pairs, weight.shape[1] // (2 if gated else 1))
        operands = (x, weight, routing.order, routing.ends, out, bias, scales, zeros)
        accesses.grouped_product.launch(compute, *operands)
        return out

    def combine_experts(self, y: torch.Tensor, routing: Routing, residual: torch.Tensor | None = None) -> torch.Tensor:
        num_experts, adds = len(routing.ends), residual is not None

        def compute(y: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, *_: object) -> None:
            routed = Routing(ids, weights, ids.flatten(), ids.new_empty(num_experts))
            total = _TORCH.combine_experts(y, routed)
            out.add_(total) if adds else out.copy_(total)

        out = y.new_empty(len(routing.ids), y.shape[1]) if residual is None else residual
        operands = y, routing.ids, routing.weights, out
        accesses.combine_experts.launch(compute, *operands, num_experts, adds)
        return out


class LaunchedDenseWeight(DenseWeight):
    """Products of few rows are one launch each, as in ``CudaDenseWeight`` where our kernels are faster. Other products
    use torch's operators, as a GPU uses cuBLAS."""

    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not 0 < x.shape[0] <= _FEW_ROWS:
            return super().product(x, bias, out)
        return self._launch(x, None, bias, out, gated=False)

    def normed_product(
        self, x: torch.Tensor, norm: RMSNorm, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if x.shape[0] > _FEW_ROWS:
            return super().normed_product(x, norm, bias, out)
        return self._launch(x, norm, bias, out, gated=False)

    def gated_product(
        self, x: torch.Tensor, norm: RMSNorm | None, bias: torch.Tensor | None, kernels: LayerKernels,
        activation: str = SILU,
    ) -> torch.Tensor:  # fmt: skip
        if x.shape[0] > _FEW_ROWS or activation != SILU:
            return super().gated_product(x, norm, bias, kernels, activation)
        return self._launch(x, norm, bias, None, gated=True)

    def add_product(self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[0] > _FEW_ROWS:
            return super().add_product(residual, x, bias)

        def compute(
            x: torch.Tensor, weight: torch.Tensor, _: None, bias: torch.Tensor | None, *sums: torch.Tensor
        ) -> None:
            sums[0].add_(torch.nn.functional.linear(x, weight, bias))

        accesses.skinny_linear.launch(compute, x, self.data, None, bias, residual, residual)
        return residual

    def _launch(
        self, x: torch.Tensor, norm: RMSNorm | None, bias: torch.Tensor | None, out: torch.Tensor | None, gated: bool
    ) -> torch.Tensor:
        def compute(
            x: torch.Tensor, weight: torch.Tensor, norm_weight: torch.Tensor | None, bias: torch.Tensor | None,
            _: None, out: torch.Tensor,
        ) -> None:  # fmt: skip
            if norm is not None and norm_weight is not None:
                x = _TORCH.rms_norm(x, norm_weight, norm.eps)
            product = torch.nn.functional.linear(x, weight, bias)
            out.copy_(_TORCH.activate(product, SILU) if gated else product)

        if out is None:
            out = x.new_empty(x.shape[0], self.shape[0] // (2 if gated else 1))
        weight = None if norm is None else norm.weight
        accesses.skinny_linear.launch(compute, x, self.data, weight, bias, None, out)
        return out


def launched_context(shard: Shard, dtype: torch.dtype) -> LayerContext:
    """The context of layers on the virtual GPU."""

    def dense(out_features: int, in_features: int) -> DenseWeight:
        return LaunchedDenseWeight(out_features, in_features, dtype)

    return LayerContext(shard, LaunchedLayerKernels(), dtype, dense)
