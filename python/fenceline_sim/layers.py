"""Layers on the virtual GPU. They make the same launches as on a GPU. These declare
the kernels' accesses and compute their values with torch's operators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fenceline.config.families import ExpertsConfig
from fenceline.layers.context import LayerContext, Shard
from fenceline.layers.kernels import accesses
from fenceline.layers.kernels.base import ONE, RELU2, SILU, HeadLayout, KVScales, LayerKernels, QKNorm, Routing
from fenceline.layers.kernels.recurrence import DeltaGates, MambaGates
from fenceline.layers.recurrent_state import LayerState, StateRows
from fenceline.layers.weight import DenseWeight, RMSNorm
from fenceline.memory_order.kernel import Kernel
from fenceline_sim.kernels import launch_function
from fenceline_sim.state_tags import NOT_KEPT

_FEW_ROWS = 8  # up to this many rows a GPU without measurements uses our own kernels (skinny_table)
_FEW_HEAD_ROWS = 64  # of ``by_head``, whose import needs Triton
_FEW_TOKENS, _TOKENS_A_PROGRAM = 64, 32  # of the router's kernels (``routing``, whose import needs Triton)
_TORCH = LayerKernels()


def _of_step(kernel: Kernel, rows: StateRows) -> Kernel:
    """``kernel``, whose name tells the tags if it absorbs no tokens of the step."""
    return kernel if rows.kept else replace(kernel, name=f"{kernel.name}{NOT_KEPT}")


def _of_rows(rows: StateRows) -> tuple[torch.Tensor, ...]:
    return rows.starts, rows.absorbed, rows.query_starts, rows.slots


class LaunchedLayerKernels(LayerKernels):
    """One launch for each method, as in ``CudaLayerKernels``."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = x.new_empty(x.shape)
        launch_function(accesses.rms_norm, _TORCH.rms_norm, (x, weight, eps), (x, weight), out)
        return out

    def activate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // (1 if activation == RELU2 else 2))
        launch_function(accesses.silu_and_mul, _TORCH.activate, (gate_up, activation), (gate_up,), out)
        return out

    def rotate_and_store(
        self, qkv: torch.Tensor, heads: HeadLayout, norms: QKNorm | None, table: torch.Tensor, positions: torch.Tensor,
        k_cache: torch.Tensor, v_cache: torch.Tensor, out_slots: torch.Tensor, kv_scales: KVScales = ONE,
    ) -> None:  # fmt: skip
        weights = (None, None) if norms is None else (norms.q_weight, norms.k_weight)
        rest = table, positions, k_cache, v_cache, out_slots
        args = qkv, heads, norms, *rest, kv_scales
        launch_function(accesses.rotate_and_store, _TORCH.rotate_and_store, args, (qkv, *weights, *rest))

    def lightning_inputs(
        self, projected: torch.Tensor, decays: torch.Tensor, norms: QKNorm, table: torch.Tensor,
        positions: torch.Tensor, scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        num, heads, width = len(projected), len(decays), projected.shape[1] // 4
        q, k, v = (projected.new_empty(num, heads, width // heads, dtype=torch.float32) for _ in range(3))
        outs = q, k, v, decays.new_empty(num, heads)
        operands = projected, decays, norms.q_weight, norms.k_weight, table, positions
        args = projected, decays, norms, table, positions, scale
        launch_function(accesses.lightning_inputs, _TORCH.lightning_inputs, args, operands, *outs)
        return outs

    def store_means(
        self, keys: torch.Tensor, means: torch.Tensor, positions: torch.Tensor, out_slots: torch.Tensor, group: int
    ) -> None:
        accesses.store_means.launch(_TORCH.store_means, keys, means, positions, out_slots, group)

    def by_head(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if len(x) > _FEW_HEAD_ROWS:
            return _TORCH.by_head(x, weight, out)
        accesses.by_head.launch(_TORCH.by_head, x, weight, out)
        return out

    def store_latent(
        self, queries: torch.Tensor, row: torch.Tensor, norm_weight: torch.Tensor, eps: float, table: torch.Tensor,
        positions: torch.Tensor, out: torch.Tensor, cache_rows: torch.Tensor, out_slots: torch.Tensor,
    ) -> None:  # fmt: skip
        made, rest = (queries, row, norm_weight), (table, positions, out, cache_rows, out_slots)
        launch_function(accesses.store_latent, _TORCH.store_latent, (*made, eps, *rest), (*made, *rest))

    def store_index(
        self, queries: torch.Tensor, key: torch.Tensor, norm_weight: torch.Tensor, norm_bias: torch.Tensor, eps: float,
        table: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor, scale: float, out: torch.Tensor,
        out_weights: torch.Tensor, cache_rows: torch.Tensor, out_slots: torch.Tensor,
    ) -> None:  # fmt: skip
        made, rest = (queries, key, norm_weight, norm_bias), (table, positions, weights)
        outs = out, out_weights, cache_rows, out_slots
        args = *made, eps, *rest, scale, *outs
        launch_function(accesses.store_index, _TORCH.store_index, args, (*made, *rest, *outs))

    def short_convolution(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool, state: LayerState,
        rows: StateRows,
    ) -> torch.Tensor:  # fmt: skip
        out = x.new_empty(len(x), len(weight))
        args, operands = (x, weight, bias, silu, state, rows), (x, weight, bias, *_of_rows(rows))
        tensors = state["conv"], state["x"]
        launch_function(
            _of_step(accesses.short_convolution, rows), _TORCH.short_convolution, args, (*operands, *tensors), out
        )
        return out

    def delta_inputs(
        self, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, gates: DeltaGates
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, heads = len(b), len(gates.a_log)
        values = mixed.shape[1] - 2 * gates.num_key_heads * gates.key_dim
        keys = (tokens, gates.num_key_heads, gates.key_dim)
        of_decays = (tokens, heads) if a.shape == b.shape else (tokens, heads, gates.key_dim)
        shapes = (keys, keys, (tokens, heads, values // heads), of_decays, (tokens, heads))
        q, k, v, decays, beta = (mixed.new_empty(shape, dtype=torch.float32) for shape in shapes)
        args, operands = (mixed, a, b, gates), (mixed, a, b, gates.a_log, gates.dt_bias)
        launch_function(accesses.delta_inputs, _TORCH.delta_inputs, args, operands, q, k, v, decays, beta)
        return q, k, v, decays, beta

    def mamba_inputs(
        self, mixed: torch.Tensor, dt: torch.Tensor, gates: MambaGates
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        (tokens, heads), keys = dt.shape, (len(dt), gates.num_groups, gates.state_size)
        values = mixed.shape[1] - 2 * gates.num_groups * gates.state_size
        shapes = (keys, keys, (tokens, heads, values // heads), (tokens, heads))
        q, k, v, decays = (mixed.new_empty(shape, dtype=torch.float32) for shape in shapes)
        args, operands = (mixed, dt, gates), (mixed, dt, gates.a_log, gates.dt_bias)
        launch_function(accesses.mamba_inputs, _TORCH.mamba_inputs, args, operands, q, k, v, decays)
        return q, k, v, decays

    def gated_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, silu: bool = True,
        skip: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        out = gate.new_empty(x.shape)
        args, past = (x, gate, weight, eps, silu, skip), (None, None) if skip is None else skip
        launch_function(accesses.gated_norm, _TORCH.gated_norm, args, (x, gate, weight, *past), out)
        return out

    def recurrence(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decays: torch.Tensor, beta: torch.Tensor | None,
        state: LayerState, rows: StateRows,
    ) -> torch.Tensor:  # fmt: skip
        out = torch.empty_like(v)
        inputs, tensors = (q, k, v, decays, beta), (state["matrix"], state["k"], state["d"], state["decay"])
        operands = *inputs, *_of_rows(rows), *tensors
        launch_function(_of_step(accesses.recurrence, rows), _TORCH.recurrence, (*inputs, state, rows), operands, out)
        return out

    def router_logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if len(x) > _FEW_TOKENS:
            return _TORCH.router_logits(x, weight)
        out = x.new_empty(len(x), len(weight), dtype=torch.float32)
        launch_function(accesses.router_logits, _TORCH.router_logits, (x, weight), (x, None, weight, None), out)
        return out

    def normed_logits(
        self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if len(x) > _FEW_TOKENS:
            return super().normed_logits(x, norm_weight, eps, weight)
        outs = torch.empty_like(x), x.new_empty(len(x), len(weight), dtype=torch.float32)
        args, operands = (x, norm_weight, eps, weight), (x, norm_weight, weight)
        launch_function(accesses.router_logits, _TORCH.normed_logits, args, operands, *outs)
        return outs

    def route(
        self, logits: torch.Tensor, correction: torch.Tensor | None, out_slots: torch.Tensor, num_sink_slots: int,
        experts: ExpertsConfig, joined: bool = False,
    ) -> Routing:  # fmt: skip
        num_tokens, num_experts = logits.shape
        num_programs = -(-num_tokens // _TOKENS_A_PROGRAM)

        def route(*args: Any) -> tuple[torch.Tensor, ...]:
            routing = _TORCH.route(*args)
            if num_programs == 1:
                return routing.ids, routing.weights, routing.order, routing.ends
            tiles = routing.ids.split(_TOKENS_A_PROGRAM)
            counts = [ids.flatten().bincount(minlength=num_experts + 1) for ids in tiles]  # padding has no expert
            return routing.ids, routing.weights, torch.stack(counts)[:, :num_experts]

        def place(ids: torch.Tensor, counts: torch.Tensor, order: torch.Tensor, ends: torch.Tensor) -> None:
            routing = Routing.group(ids, ids, num_experts)
            order.copy_(routing.order)
            ends.copy_(counts.sum(0).cumsum(0))

        ids = logits.new_empty(num_tokens, experts.top_k + joined, dtype=torch.int64)
        weights, order = torch.empty_like(ids, dtype=torch.float32), ids.new_empty(ids.numel())
        ends = ids.new_empty(num_experts + joined, dtype=torch.int32)
        inputs = logits, correction, out_slots
        args = *inputs, num_sink_slots, experts, joined
        if num_programs == 1:
            launch_function(accesses.route, route, args, inputs, ids, weights, order, ends)
        else:
            counts = ends.new_empty(num_programs, num_experts)
            launch_function(accesses.choose_experts, route, args, inputs, ids, weights, counts)
            accesses.place_pairs.launch(place, ids, counts, order, ends)
        return Routing(ids, weights, order, ends)

    def of_experts(self, routing: Routing, own: range) -> Routing:
        def turn(*tensors: torch.Tensor) -> None:
            ids, order, ends, *written = tensors
            found = Routing(ids, ids, order, ends).of_experts(own)
            for target, value in zip(written, (found.ids, found.order, found.ends), strict=True):
                target.copy_(value)

        ids, order = torch.empty_like(routing.ids), torch.empty_like(routing.order)
        ends = routing.ends.new_empty(len(own))
        accesses.own_pairs.launch(turn, routing.ids, routing.order, routing.ends, ids, order, ends)
        return Routing(ids, routing.weights, order, ends)

    def grouped_product(
        self, x: torch.Tensor, weight: torch.Tensor, routing: Routing, gated: bool = False,
        bias: torch.Tensor | None = None, limit: float = 0.0, scales: torch.Tensor | None = None,
        zeros: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        def compute(
            x: torch.Tensor, weight: torch.Tensor, order: torch.Tensor, ends: torch.Tensor, out: torch.Tensor,
            bias: torch.Tensor | None, *scaling: torch.Tensor | None,
        ) -> None:  # fmt: skip
            shape = len(x), len(order) // len(x)  # top_k, 1 where x has a row for each pair
            sorted_pairs, live = Routing(order.new_empty(shape), x.new_empty(shape), order, ends), order[: ends[-1]]
            out[live] = _TORCH.grouped_product(x, weight, sorted_pairs, gated, bias, limit, *scaling)[live]

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

        operands = x, self.data, None, bias, residual
        launch_function(accesses.skinny_linear, _added, operands, operands, residual)
        return residual

    def _launch(
        self, x: torch.Tensor, norm: RMSNorm | None, bias: torch.Tensor | None, out: torch.Tensor | None, gated: bool
    ) -> torch.Tensor:
        def product(x: torch.Tensor, weight: torch.Tensor, norm_weight: Any, bias: Any) -> torch.Tensor:
            x = x if norm is None else _TORCH.rms_norm(x, norm_weight, norm.eps)
            product = torch.nn.functional.linear(x, weight, bias)
            return _TORCH.activate(product, SILU) if gated else product

        if out is None:
            out = x.new_empty(x.shape[0], self.shape[0] // (2 if gated else 1))
        operands = x, self.data, None if norm is None else norm.weight, bias
        launch_function(accesses.skinny_linear, product, operands, (*operands, None), out)
        return out


def _added(
    x: torch.Tensor, weight: torch.Tensor, _: None, bias: torch.Tensor | None, residual: torch.Tensor
) -> torch.Tensor:
    return residual + torch.nn.functional.linear(x, weight, bias)


def launched_context(shard: Shard, dtype: torch.dtype) -> LayerContext:
    def dense(out_features: int, in_features: int) -> DenseWeight:
        return LaunchedDenseWeight(out_features, in_features, dtype)

    return LayerContext(shard, LaunchedLayerKernels(), dtype, dense)
