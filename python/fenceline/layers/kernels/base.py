"""What layers compute besides products with one matrix: normalisation, activation, rotation and storing of keys and
values, and the products of a mixture of experts.

LayerKernels computes these with torch's operators. Devices with kernels of their own override its methods.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fenceline.config.families import ExpertsConfig
from fenceline.layers.kernels.four_bit import four_bit_numbers
from fenceline.layers.kernels.index_rows import packed, rounded, spread
from fenceline.layers.kernels.recurrence import (
    DeltaGates,
    MambaGates,
    delta_inputs,
    gated_norm,
    mamba_inputs,
    recurrence,
    short_convolution,
)
from fenceline.layers.recurrent_state import LayerState, StateRows


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How a fused row of queries, keys and values is laid out: ``num_heads`` query heads, then ``num_kv_heads`` of
    keys, then as many of values, each of ``head_dim`` elements."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of qkv [T, size]: q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim]."""
        sizes = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        # This runs once for each layer, so it uses methods of torch that are not written in Python, which are faster.
        heads = qkv.view(qkv.shape[0], sum(sizes), self.head_dim)
        return heads.split_with_sizes(sizes, 1)  # type: ignore[return-value]


CLAMPED_ALPHA = 1.702  # of the clamped SwiGLU in gpt-oss's experts
ACTIVATIONS = SILU, GELU_TANH, GELU, RELU, RELU2 = "silu", "gelu_tanh", "gelu", "relu", "relu2"

FP8_MAX = 448.0  # the largest number of E4M3
MOST_JOINED = 32  # tokens that go through a shared expert as through the others
FP8_GROUP = 128  # how many numbers of a row share a scale, if a row has several scales


@dataclass(frozen=True, slots=True)
class KVScales:
    """The numbers by which keys and values are divided before they are stored in FP8."""

    k: float = 1.0
    v: float = 1.0


ONE = KVScales()


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMSNorm of each query and key head before the rotation; weights [head_dim], in the model's type or float32."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts T tokens go through, ``top_k`` each. Pair ``t * top_k + j`` is token t with its j-th expert. Pairs
    of padded tokens have the expert id ``num_experts``, which stands for no expert."""

    ids: torch.Tensor  # [T, top_k] int64
    weights: torch.Tensor  # [T, top_k] float32, the weight of each expert's result
    order: torch.Tensor  # [T * top_k] int64, the pairs sorted by expert, those of padded tokens last
    ends: torch.Tensor  # [num_experts] int32, where the pairs of each expert end in ``order``

    @classmethod
    def group(cls, ids: torch.Tensor, weights: torch.Tensor, num_experts: int) -> Routing:
        """Sort the pairs by expert, without host synchronisation."""
        by_expert, order = ids.flatten().sort(stable=True)
        experts = torch.arange(num_experts, device=ids.device)
        ends = torch.searchsorted(by_expert, experts, right=True, out_int32=True)
        return cls(ids, weights, order, ends)

    def of_experts(self, own: range) -> Routing:
        """The routing for a rank that holds only the experts ``own``, which are then numbered from 0. All other pairs
        have no expert. The pairs of ``own`` follow each other in ``order``, so it is turned until they come first."""
        before = self.ends[own.start - 1] if own.start else self.ends.new_zeros(())
        places = torch.arange(len(self.order), device=self.order.device) + before
        ids = self.ids - own.start
        ids = ids.masked_fill((ids < 0) | (ids >= len(own)), len(own))
        order = self.order[places % max(len(places), 1)]
        return Routing(ids, self.weights, order, self.ends[own.start : own.stop] - before)


class LayerKernels:
    """The operations with torch's operators: what the CPU uses, and the reference for the kernels of other devices. All
    run on the current stream and, except on a CPU, never make the host wait. Activations are contiguous [T, features]
    in the model's dtype; sums are at least float32."""

    fixed_order = False
    """Whether the bits of a row's results do not depend on the other rows and their number, nor on how rows are
    padded."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last axis, x [..., D] → a new tensor of its shape. ``weight`` may be float32."""
        if weight.dtype == x.dtype:
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, K] @ weight [N, K] transposed + bias [N] → a new tensor [T, N]."""
        return F.linear(x, weight, bias)

    def by_head(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """x [T, H, K], each head times the transpose of its own matrix in ``weight`` [H, N, K] → ``out`` [T, H, N]. The
        last axis of x and ``out`` is contiguous."""
        return out.copy_((x.transpose(0, 1) @ weight.transpose(1, 2)).transpose(0, 1))

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor of x's type."""
        return x.sigmoid()

    def activate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """gate_up [T, 2 I], gate then up → activation(gate) * up, a new tensor [T, I]. ``activation`` is one of
        ACTIVATIONS; GELU_TANH is the approximation of gelu by tanh (arXiv:1606.08415). RELU2 has no gate
        (arXiv:2109.08668): x [T, I] → relu(x)², [T, I]."""
        if activation == RELU2:
            return F.relu(gate_up).square_()
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == SILU:
            return F.silu(gate).mul_(up)
        if activation == RELU:
            return F.relu(gate).mul_(up)
        return F.gelu(gate, approximate="tanh" if activation == GELU_TANH else "none").mul_(up)

    def short_convolution(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        silu: bool,
        state: LayerState,
        rows: StateRows,
    ) -> torch.Tensor:
        """See ``recurrence.short_convolution``."""
        return short_convolution(x, weight, bias, silu, state, rows)

    def recurrence(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decays: torch.Tensor,
        beta: torch.Tensor | None,
        state: LayerState,
        rows: StateRows,
    ) -> torch.Tensor:
        """See ``recurrence.recurrence``."""
        return recurrence(q, k, v, decays, beta, state, rows)

    def delta_inputs(
        self, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, gates: DeltaGates
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """See ``recurrence.delta_inputs``."""
        return delta_inputs(mixed, a, b, gates)

    def mamba_inputs(
        self, mixed: torch.Tensor, dt: torch.Tensor, gates: MambaGates
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """See ``recurrence.mamba_inputs``."""
        return mamba_inputs(mixed, dt, gates)

    def gated_norm(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        silu: bool = True,
        skip: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """See ``recurrence.gated_norm``."""
        return gated_norm(x, gate, weight, eps, silu, skip)

    def lightning_inputs(
        self,
        projected: torch.Tensor,
        decays: torch.Tensor,
        norms: QKNorm,
        table: torch.Tensor,
        positions: torch.Tensor,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The inputs of ``recurrence`` in lightning attention: q * scale, k and v [T, heads, head_dim], and ``decays``
        [heads] float32 for each token. The first three quarters of ``projected`` [T, 4 * heads * head_dim] are q, k and
        v, of which q and k are normalised and rotated. Others: see ``rotate_and_store``."""
        q, k, v, _ = projected.unflatten(1, (4, len(decays), -1)).unbind(1)
        q, k = self._rotated(q, k, norms, table, positions)
        return q.float() * scale, k.float(), v.float().contiguous(), decays.expand(len(q), -1).contiguous()

    def _rotated(
        self, q: torch.Tensor, k: torch.Tensor, norms: QKNorm | None, table: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New tensors: see ``rotate_and_store``."""
        if norms is not None:
            q, k = self.rms_norm(q, norms.q_weight, norms.eps), self.rms_norm(k, norms.k_weight, norms.eps)
        cos, sin = rotary_angles(table, positions)
        return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        heads: HeadLayout,
        norms: QKNorm | None,
        table: torch.Tensor,
        positions: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out_slots: torch.Tensor,
        kv_scales: KVScales = ONE,
    ) -> None:
        """Normalise (if ``norms``) and rotate q and k in place, and write k and v to the pool.

        If the caches are FP8, k and v are divided by ``kv_scales`` and rounded, and the rounded numbers are also
        written to qkv. So attention sees the same numbers before and after a prefix has been cached.

        qkv [T, size of ``heads``]; ``table`` [max_positions, 3 * head_dim / 2] float32, cos twice then sin (see
        ``RotaryEmbedding``); positions [T] int64; caches [num_slots, num_kv_heads, head_dim]; out_slots [T] int64.
        """
        q, k, v = heads.split(qkv)
        for part, rotated in zip((q, k), self._rotated(q, k, norms, table, positions), strict=True):
            part.copy_(rotated)
        _store(k, k_cache, out_slots, kv_scales.k)
        _store(v, v_cache, out_slots, kv_scales.v)

    def store_latent(
        self,
        queries: torch.Tensor,
        row: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        table: torch.Tensor,
        positions: torch.Tensor,
        out: torch.Tensor,
        cache_rows: torch.Tensor,
        out_slots: torch.Tensor,
    ) -> None:
        """The rows of latent attention: ``row`` [T, rank + rope], its first part normalised and its second rotated,
        goes to ``out[:, H]`` and to the pool. The last rope features of each query in ``queries`` [T, H, features] are
        rotated and go to the end of its place ``out[:, h]``.

        ``norm_weight`` [rank]; ``table`` and positions: see ``rotate_and_store``; ``out`` [T, H + 1, rank + rope];
        ``cache_rows`` [num_slots, 1, rank + rope]; out_slots [T] int64. If the cache is FP8, the row is rounded in both
        places.
        """
        num_heads, rank = queries.shape[1], len(norm_weight)
        latent, common = row.split((rank, row.shape[1] - rank), 1)
        rotated = torch.cat((queries[..., queries.shape[2] - common.shape[1] :], common.unsqueeze(1)), 1)
        out[..., rank:] = apply_rotary(rotated, *rotary_angles(table, positions))
        stored = out[:, num_heads:]
        stored[:, 0, :rank] = self.rms_norm(latent.contiguous(), norm_weight, eps)
        _store(stored, cache_rows, out_slots)

    def store_means(
        self, keys: torch.Tensor, means: torch.Tensor, positions: torch.Tensor, out_slots: torch.Tensor, group: int
    ) -> None:
        """Where a token at ``positions`` [T] int64 is the last of its ``group``, the mean of the keys in the group's
        slots goes to the rows of these. ``keys`` [num_slots, num_kv_heads, head_dim]; ``means`` [num_slots,
        num_kv_heads, head_dim / group], see ``kv_layout.group_means``; out_slots [T] int64."""
        full = out_slots[(positions + 1) % group == 0] // group
        total, (_, num_heads, head_dim) = keys.unflatten(0, (-1, group))[full].float(), keys.shape
        while total.shape[1] > 1:  # halves are added: no order of a library's choice
            odd, half = total[:, -1:] if total.shape[1] % 2 else total[:, :0], total.shape[1] // 2
            total = torch.cat((total[:, :half] + total[:, half : 2 * half], odd), 1)
        means.view(-1, num_heads, head_dim).index_copy_(0, full, (total[:, 0] / group).to(means.dtype))

    def store_index(
        self,
        queries: torch.Tensor,
        key: torch.Tensor,
        norm_weight: torch.Tensor,
        norm_bias: torch.Tensor,
        eps: float,
        table: torch.Tensor,
        positions: torch.Tensor,
        weights: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        out_weights: torch.Tensor,
        cache_rows: torch.Tensor,
        out_slots: torch.Tensor,
    ) -> None:
        """What an indexer scores tokens by. ``key`` [T, D] is normalised (LayerNorm, ``norm_weight`` and ``norm_bias``
        [D] float32). The first features of the key and of the ``queries`` [T, H, D] are rotated. The key goes to the
        pool, the queries go to ``out`` [T, H, D], and ``weights`` [T, H] float32 * ``scale`` to ``out_weights``.

        ``cache_rows`` [num_slots, 1, features of the row]. If it is of bytes, keys and queries are rounded to FP8 (see
        ``index_rows``), and the queries' scales are multiplied by the weights. Others: see ``store_latent``.
        """
        num_heads, dims = queries.shape[1], table.shape[1] // 3 * 2
        normed = F.layer_norm(key.float(), norm_weight.shape, norm_weight, norm_bias, eps).to(key.dtype)
        both = torch.cat((queries, normed.unsqueeze(1)), 1)
        both[..., :dims] = apply_rotary(both[..., :dims], *rotary_angles(table, positions))
        weights = weights * scale
        if cache_rows.dtype == torch.uint8:
            numbers, scales = rounded(spread(both.float()))
            both, row = numbers.to(both.dtype), packed(numbers[:, num_heads:], scales[:, num_heads:])
            weights = weights * scales[:, :num_heads, 0]
        else:
            row = both[:, num_heads:]
        out.copy_(both[:, :num_heads])
        out_weights.copy_(weights)
        cache_rows.index_copy_(0, out_slots, row)

    def router_logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [T, K] of any float type by ``weight`` [num_experts, K] float32, transposed → [T, num_experts] float32."""
        return self.linear(x.float(), weight)

    def normed_logits(
        self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``rms_norm`` of x, and its ``router_logits``."""
        normed = self.rms_norm(x, norm_weight, eps)
        return normed, self.router_logits(normed, weight)

    def of_experts(self, routing: Routing, own: range) -> Routing:
        """``routing.of_experts(own)``."""
        return routing.of_experts(own)

    def route(
        self,
        logits: torch.Tensor,
        correction: torch.Tensor | None,
        out_slots: torch.Tensor,
        num_sink_slots: int,
        experts: ExpertsConfig,
        joined: bool = False,
    ) -> Routing:
        """Choose the experts of each token and their weights by the rules in ``experts``. logits [T, num_experts]
        float32; ``correction`` [num_experts] float32 is added to the scores when experts are chosen, but not when their
        weights are computed. Of equal scores, of experts or of groups, the first wins. Tokens whose ``out_slots`` [T]
        int64 are less than ``num_sink_slots``, that is, whose keys go to the sink page, are padding and go to no
        expert. ``joined``, for at most ``MOST_JOINED`` tokens: there is one more expert, the last, to which each token
        goes with a weight of 1, as its last."""
        padded = out_slots < num_sink_slots
        scores = self.sigmoid(logits) if experts.sigmoid else logits.softmax(-1)
        chosen_by = scores if correction is None else scores + correction
        if experts.num_groups > 1:
            chosen_by = _of_best_groups(chosen_by, experts)
        ids = _highest(chosen_by, experts.top_k)
        weights = scores.gather(1, ids)
        if experts.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # all sigmoids may be zero
        if experts.scaling != 1.0:
            weights = weights * experts.scaling
        if joined:
            ids, weights = F.pad(ids, (0, 1), value=experts.num_experts), F.pad(weights, (0, 1), value=1.0)
        num_experts = experts.num_experts + joined
        return Routing.group(ids.masked_fill(padded.unsqueeze(1), num_experts), weights, num_experts)

    def grouped_product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        routing: Routing,
        gated: bool = False,
        bias: torch.Tensor | None = None,
        limit: float = 0.0,
        scales: torch.Tensor | None = None,
        zeros: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Each pair's row of x times the transpose of its expert's matrix in ``weight`` [num_experts, N, K], plus the
        expert's ``bias`` [num_experts, N] → [T * top_k, N] in x's dtype. Rows of padded tokens are undefined.

        x is [T, K], with a row for each token, or [T * top_k, K], with a row for each pair. ``gated``: the first half
        of a matrix's rows makes gate, the second up, and the result is silu(gate) * up [T * top_k, N / 2]. With a
        ``limit`` c above 0, gate is clamped to at most c and up to [-c, c], and the result is
        gate * sigmoid(CLAMPED_ALPHA * gate) * (up + 1).

        ``weight`` may be FP8 or int8 with float32 ``scales`` [num_experts, N, groups]. A row has one scale (groups is
        1) or one for each FP8_GROUP numbers. The unscaled numbers are converted to x's type and multiplied by x, and
        the sums are scaled. ``weight`` may also have four bits for each number, uint8 [num_experts, N, K / 2], with
        ``scales`` and ``zeros`` for groups: see ``four_bit.four_bit_numbers``.
        """
        # On a CPU the host may read the routing, so only the experts to which a token goes are read.
        tokens = routing.order if len(x) == len(routing.order) else routing.order // routing.ids.shape[1]
        products = x.new_empty(len(routing.order), weight.shape[1])
        start = 0
        for expert, end in enumerate(routing.ends.tolist()):
            if end > start:
                own_bias = None if bias is None else bias[expert]
                rows = x.index_select(0, tokens[start:end])
                matrix = weight[expert]
                if matrix.dtype == torch.uint8:
                    assert scales is not None
                    own_zeros = None if zeros is None else zeros[expert]
                    matrix = four_bit_numbers(matrix, scales[expert], own_zeros, x.dtype)
                elif scales is not None:
                    matrix = _scaled(matrix, scales[expert]).to(x.dtype)
                products[start:end] = self.linear(rows, matrix, own_bias)
            start = end
        if limit:
            gate, up = products.chunk(2, dim=-1)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            products = gate * self.sigmoid(gate * CLAMPED_ALPHA) * (up + 1)
        elif gated:
            products = self.activate(products, SILU)
        return torch.empty_like(products).index_copy_(0, routing.order, products)

    def prepare_linear(self, n: int, k: int, dtype: torch.dtype) -> None:
        """Called when a weight is made of which ``linear`` will take matrices [n, k] of ``dtype``, which it may try
        here. Raises ``ValueError`` with the remedy if their products are wrong."""
        return

    def prepare_four_bits(self, group: int, has_zeros: bool) -> None:
        """Called when a matrix of four-bit numbers is made, with groups of ``group`` numbers: int4 if ``has_zeros``,
        else MXFP4. An implementation may try its kernels for such matrices here."""
        return

    def combine_experts(self, y: torch.Tensor, routing: Routing, residual: torch.Tensor | None = None) -> torch.Tensor:
        """y [T * top_k, N] → the weighted sum of each token's pairs, zero for padded tokens. It is a new tensor [T, N],
        or it is added in place to ``residual`` [T, N], which is returned."""
        live = (routing.ids < len(routing.ends)).unsqueeze(-1)
        pairs = torch.where(live, y.view(*routing.ids.shape, -1).float(), 0.0)
        total = (pairs * routing.weights.unsqueeze(-1)).sum(1).to(y.dtype)
        return total if residual is None else residual.add_(total)


def _store(x: torch.Tensor, cache: torch.Tensor, out_slots: torch.Tensor, scale: float = 1.0) -> None:
    """Write x [T, heads, features] to its slots. If the cache is FP8, x becomes what is stored, rounded x / scale."""
    if cache.dtype == x.dtype:
        cache.index_copy_(0, out_slots, x)
    else:
        rounded = (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(cache.dtype)
        # torch has no index_copy_ for FP8, so the rows are copied as bytes.
        cache.view(torch.uint8).index_copy_(0, out_slots, rounded.view(torch.uint8))
        x.copy_(rounded)


def _of_best_groups(scores: torch.Tensor, experts: ExpertsConfig) -> torch.Tensor:
    """``scores`` [T, num_experts] with -inf outside the chosen groups of experts, which are those whose
    ``scored_by`` best experts have the highest sum of scores."""
    groups = scores.unflatten(1, (experts.num_groups, -1))
    sums = groups.topk(min(experts.scored_by, groups.shape[2]), dim=-1).values.sum(-1)
    best = _highest(sums, experts.top_groups)
    closed = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
    return groups.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1)


def _highest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Where the ``k`` highest of each row of ``scores`` [T, n] are, from the highest on; of equal ones the first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def _scaled(matrix: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """FP8 or int8 numbers [N, K] times their scales [N, groups] → [N, K] float32."""
    if scales.shape[1] > 1:
        scales = scales.repeat_interleave(FP8_GROUP, 1)[:, : matrix.shape[1]]
    return matrix.float() * scales


def rotary_angles(table: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``RotaryEmbedding.table`` at positions [T] int64 → cos [T, 1, head_dim] and sin [T, 1, head_dim / 2]."""
    rows = table.index_select(0, positions).unsqueeze(1)
    head_dim = table.shape[1] * 2 // 3
    return rows[..., :head_dim], rows[..., head_dim:]


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x[i], x[i + head_dim / 2]) of x [T, heads, head_dim] by the token's angles. Computed in
    float32, returned as a new tensor in x's type."""
    x1, x2 = x.chunk(2, dim=-1)
    rotated = x * cos
    first, second = rotated.chunk(2, dim=-1)
    # In place on a new tensor: this needs a third of the usual temporaries and is faster on a CPU.
    first.addcmul_(x2.to(rotated.dtype), sin, value=-1.0)
    second.addcmul_(x1.to(rotated.dtype), sin)
    return rotated.to(x.dtype)
