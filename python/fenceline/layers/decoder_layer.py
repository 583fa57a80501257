"""A decoder layer: attention, then a mixer of features: a dense MLP, or experts (``experts.py``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from fenceline.config.model_config import ModelConfig
from fenceline.layers.attention.base import LayerRules
from fenceline.layers.branch import Branch, BranchNorms
from fenceline.layers.context import LayerContext
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.layers.kernels.base import ONE, HeadLayout, KVScales, QKNorm
from fenceline.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear, WideNorm
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.layers.weight import WeightSlot, WeightSlots
from fenceline.mem_cache.kv_pool import KVRow, keys_and_values
from fenceline.memory_order import ArenaField, Role

_BEFORE_ATTENTION = BranchNorms("input_layernorm")
_BEFORE_MLP = BranchNorms("post_attention_layernorm")


class SelfAttention(Branch):
    """x += o_proj(attention(rope(qkv_proj(norm(x))))), with queries and keys normalised head by head in some families.

    Only ``attend`` depends on the requests' lengths, so what comes before and after it can be captured in graphs:
    ``project`` then ends one piece, ``add_output`` begins the next, and they share ``batch.buffers``.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        layer_id: int,
        rotary: RotaryEmbedding,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm: bool = False,
        wide_qk_norm: bool = False,
        norms: BranchNorms = _BEFORE_ATTENTION,
        input_size: int | None = None,
        window: int | None = None,
        sinks: bool = False,
    ) -> None:
        """``layer_id`` is its index in the KV pool. Without a norm before it, ``project`` takes its input as it is;
        that has ``input_size`` features, hidden_size by default. ``qk_norm``: each query and key head is normalised,
        ``wide_qk_norm``: all query heads together, and all key heads. ``window`` and ``sinks``: see ``LayerRules``;
        a window that no sequence is longer than is none. Parameters are uninitialised."""
        super().__init__(config, context, norms)
        head_dim, hidden_size, eps = config.head_dim, config.hidden_size, config.rms_norm_eps
        self.layer_id = layer_id
        self.score_scale = config.multipliers.attention or head_dim**-0.5
        self.qkv_proj = QKVParallelLinear(
            input_size or hidden_size, config.num_heads, config.num_kv_heads, head_dim, qkv_bias, context
        )
        self.o_proj = RowParallelLinear("o_proj", config.num_heads * head_dim, hidden_size, o_bias, context)
        self.q_norm = context.norm(head_dim, eps) if qk_norm else None
        self.k_norm = context.norm(head_dim, eps) if qk_norm else None
        self.heads = HeadLayout(self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, head_dim)
        binds = window is not None and window < config.context_length
        self._first_head, self._all_heads = context.shard.rank * self.heads.num_heads, config.num_heads
        own_sinks = torch.empty(self.heads.num_heads, dtype=torch.float32) if sinks else None
        self.rules = LayerRules(window if binds else None, config.attention_soft_cap, own_sinks)
        self._norms = None
        if self.q_norm is not None and self.k_norm is not None:
            self._norms = QKNorm(self.q_norm.weight, self.k_norm.weight, eps)
        self._wide_norms: tuple[WideNorm, ...] = ()
        if wide_qk_norm:
            q_part, k_part, _ = self.qkv_proj.parts
            self._wide_norms = (
                WideNorm("q_norm", q_part, eps, context),
                WideNorm("k_norm", k_part, eps, context),
            )
        self._kernels = context.kernels
        self._dtype = context.dtype
        self._kv_dtype = context.kv_dtype or context.dtype
        # Of a checkpoint: what keys and values are divided by in FP8. As numbers, for they are arguments of launches.
        quantization = config.quantization
        self._has_kv_scales = quantization is not None and quantization.has_kv_scales
        self._kv_scale_params = torch.ones(2, dtype=torch.float32)
        self._kv_scales = ONE
        self._rotary = rotary
        # Layers of one width share their buffers. Layers whose heads are laid out in the same way also share the views.
        self._views_key = repr(self.heads)
        self._qkv_buffer = f"qkv_{sum(self.qkv_proj.sizes)}"
        self._attended_buffer = f"attended_{self.heads.num_heads * head_dim}"

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """The residual stream x [T, hidden_size], added to in place. Writes the batch's keys and values to its pool."""
        return self.add_output(x, batch, self.attend(self.project(x, batch), batch))

    def project(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x → rotated queries, keys and values [T, size of ``heads``]; keys and values also go to the pool."""
        layer_id, pool, buffers = self.layer_id, batch.kv_pool, batch.buffers
        out = None if buffers is None else buffers.tensors[self._qkv_buffer]
        if self.input_norm is None:
            qkv = self.qkv_proj.forward(x, out)
        else:
            qkv = self.qkv_proj.forward_normed(x, self.input_norm, out)
        if self._wide_norms:
            for norm, x_part in zip(self._wide_norms, qkv.split(self.qkv_proj.sizes, 1), strict=False):
                x_part.copy_(norm.forward(x_part))
        if batch.layer_ready is not None:
            # Before storing as well: this batch may write to the last page that is being loaded.
            batch.layer_ready(layer_id)
        self._kernels.rotate_and_store(
            qkv, self.heads, self._norms, self._rotary.table, batch.positions,
            pool.k(layer_id), pool.v(layer_id), batch.out_slots, self._kv_scales,
        )  # fmt: skip
        return qkv

    def attend(self, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Attention over the prefix and the new tokens, [T, num_heads * head_dim]."""
        attended = batch.attn.forward(self.layer_id, *self.heads.split(qkv), self._stored_score_scale)
        return self._as_values(attended).flatten(1)

    def attend_between_pieces(self, batch: ForwardBatch) -> None:
        """``attend``, which reads its input from one buffer and writes its result to another."""
        buffers = batch.buffers
        assert buffers is not None, "only a forward in pieces has buffers"
        views = buffers.views.get(self._views_key)
        if views is None:
            q, k, v = self.heads.split(buffers.tensors[self._qkv_buffer])
            views = q, k, v, buffers.tensors[self._attended_buffer].view(q.shape)
            buffers.views[self._views_key] = views
        q, k, v, attended = views
        batch.attn.forward_into(self.layer_id, q, k, v, self._stored_score_scale, attended)
        self._as_values(attended)

    @property
    def _stored_score_scale(self) -> float:
        """The factor of scores with keys as they are stored."""
        return self.score_scale * self._kv_scales.k

    def _as_values(self, attended: torch.Tensor) -> torch.Tensor:
        """Sums of values as they are stored → of the values, in place."""
        return attended if self._kv_scales.v == 1 else attended.mul_(self._kv_scales.v)

    def _take_kv_scales(self) -> None:
        k, v = self._kv_scale_params.tolist()
        self._kv_scales = KVScales(k, v)

    def add_output(
        self, x: torch.Tensor, batch: ForwardBatch, attended: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x += the output projection of ``attended`` (None: of the buffer that attention has filled), in place;
        returns x."""
        if attended is None:
            assert batch.buffers is not None, "only a forward in pieces has buffers"
            attended = batch.buffers.tensors[self._attended_buffer]
        return self.add_product(x, self.o_proj, attended)

    @property
    def kv_rows(self) -> tuple[KVRow, ...]:
        """What each token keeps of this layer in the KV pool."""
        return keys_and_values(self.heads.num_kv_heads, self.heads.head_dim, self._kv_dtype)

    def arena_fields(self) -> Sequence[ArenaField]:
        """The buffers. Attention does not write rows of padded tokens, so those rows are zeroed before each step."""
        widths = sum(self.qkv_proj.sizes), self.heads.num_heads * self.heads.head_dim
        return (
            ArenaField(self._attended_buffer, self._dtype, Role.INPUT, pad=0, shape=widths[1:]),
            ArenaField(self._qkv_buffer, self._dtype, Role.OUTPUT, pad=0, shape=widths[:1]),
        )

    def weight_slots(self, prefix: str) -> WeightSlots:
        slots = {**self.qkv_proj.weight_slots(prefix), **self.o_proj.weight_slots(prefix)}
        if self.q_norm is not None and self.k_norm is not None:
            slots |= self.q_norm.weight_slots(f"{prefix}q_norm")
            slots |= self.k_norm.weight_slots(f"{prefix}k_norm")
        for norm in self._wide_norms:
            slots |= norm.weight_slots(prefix)
        if self.rules.sinks is not None:
            slots[f"{prefix}sinks"] = WeightSlot(self.rules.sinks, (self._all_heads,), 0, self._first_head)
        if self._has_kv_scales and self._kv_dtype != self._dtype:
            for index, name in enumerate(("k_scale", "v_scale")):
                param = self._kv_scale_params[index : index + 1]
                slots[prefix + name] = WeightSlot(
                    param, (), convert=torch.flatten, loaded=self._take_kv_scales
                )
        if self._rotary.order is not None:
            self.qkv_proj.weight.moves_rows(len(self._rotary.order))
            for name, slot in slots.items():
                if name.startswith((f"{prefix}q_", f"{prefix}k_")) and slot.dest.numel() and slot.full_shape:
                    slots[name] = replace(slot, convert=partial(_reordered, self._rotary.order, slot.convert))
        return slots


def _reordered(
    order: Sequence[int], convert: Callable[[torch.Tensor], torch.Tensor] | None, tensor: torch.Tensor
) -> torch.Tensor:
    """``tensor``, after ``convert``, [heads * head_dim, ...] with the features of each head in ``order``."""
    tensor = tensor if convert is None else convert(tensor)
    heads = tensor.unflatten(0, (-1, len(order)))
    return heads.index_select(1, torch.tensor(order, device=tensor.device)).flatten(0, 1)


class GatedMLP(Branch):
    """x += down(activation(gate(norm(x))) * up(norm(x))), SwiGLU and its relatives (arXiv:2002.05202)."""

    def __init__(
        self, config: ModelConfig, context: LayerContext, bias: bool, norms: BranchNorms = _BEFORE_MLP
    ) -> None:
        super().__init__(config, context, norms)
        hidden_size, size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, {"gate_proj": size, "up_proj": size}, bias, context
        )
        self.down_proj = RowParallelLinear("down_proj", size, hidden_size, bias, context)
        self.activation = config.activation

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        gated = self.gate_up_proj.forward_gated(x, self.input_norm, self.activation)
        return self.add_product(x, self.down_proj, gated)

    def weight_slots(self, prefix: str) -> WeightSlots:
        return {**self.gate_up_proj.weight_slots(prefix), **self.down_proj.weight_slots(prefix)}


class DecoderLayer:
    """x += attention(x), then x += mixer(x)."""

    def __init__(self, self_attn: SelfAttention, mlp: Branch, mlp_name: str = "mlp") -> None:
        """``mlp_name``: the mixer's in the checkpoint."""
        self.self_attn = self_attn
        self.mlp = mlp
        self.mlp_name = mlp_name

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """The residual stream x [T, hidden_size], added to in place."""
        return self.mlp.forward(self.self_attn.forward(x, batch), batch)

    def weight_slots(self, prefix: str) -> WeightSlots:
        """Slots by their names in the checkpoint."""
        return {
            **self.self_attn.weight_slots(f"{prefix}self_attn."),
            **self.self_attn.norm_slots(prefix),
            **self.mlp.weight_slots(f"{prefix}{self.mlp_name}."),
            **self.mlp.norm_slots(prefix),
        }
