"""A decoder layer: a mixer of tokens, such as attention, and an MLP, which both add to the residual stream. The MLP is
dense or a mixture of experts (``experts.py``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from fenceline.config.model_config import ModelConfig
from fenceline.config.state_layout import StateSpec
from fenceline.layers.attention.base import LayerRules
from fenceline.layers.context import LayerContext, Shard
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.layers.kernels.base import ONE, RELU2, HeadLayout, KVScales, QKNorm
from fenceline.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    WideNorm,
)
from fenceline.layers.recurrent_state import LayerState, StateRows
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.layers.weight import RMSNorm, WeightSlot, WeightSlots
from fenceline.memory_order import ArenaField, Role


@dataclass(frozen=True, slots=True)
class LayerSite:
    """What a layer is built from: it is layer ``index`` of the model that ``config`` describes, and layer ``layer_id``
    of the KV pool, or of the pool of states if it is recurrent. ``context`` names its tensors in the checkpoint;
    ``rotary`` rotates its queries and keys."""

    config: ModelConfig
    context: LayerContext
    rotary: RotaryEmbedding
    layer_id: int
    index: int


@dataclass(frozen=True, slots=True)
class BranchNorms:
    """The norms before and after a branch, by their names in the checkpoint without the layer's prefix; None: none."""

    before: str | None = None
    after: str | None = None


class Branch(ABC):
    """x += scale * after(f(before(x))), where a subclass defines f and ``before`` and ``after`` are norms. Most
    families have no norm ``after`` and a scale of 1. GLM-4 has both norms (sandwich norms), OLMo 2 has only the second
    one, and Granite has a scale."""

    name: str  # in the checkpoint, below the layer's

    def __init__(self, config: ModelConfig, context: LayerContext, norms: BranchNorms) -> None:
        """Parameters are uninitialised."""
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norms, self.module = norms, context.module
        self.scale = config.multipliers.residual
        self.input_norm: RMSNorm | None = None if norms.before is None else context.norm(size, eps)
        self.output_norm: RMSNorm | None = None if norms.after is None else context.norm(size, eps)
        self.next_norm: RMSNorm | None = None  # the norm of the branch that reads the stream next, if it is known
        # Nothing comes between f and the residual stream, so a kernel may add its result.
        self.adds_plainly = self.output_norm is None and self.scale == 1.0

    @abstractmethod
    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """The residual stream x [T, hidden_size], added to in place."""

    def add_product(
        self, x: torch.Tensor, linear: RowParallelLinear, y: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """x [T, hidden_size] += scale * after(linear(y)), in place; returns x."""
        if linear.shard.size == 1 and self.adds_plainly:
            return linear.weight.add_product(x, y, linear.bias)
        return self.add_parts(x, linear.part(y), linear.shard, batch)

    def add_parts(self, x: torch.Tensor, y: torch.Tensor, shard: Shard, batch: ForwardBatch) -> torch.Tensor:
        """x [T, hidden_size] += scale * after(the sum of the ranks' y), in place; returns x. With several ranks the
        all-reduce may compute the next branch's norm of x as well; the next branch finds it in ``batch.normed``."""
        if shard.size > 1 and self.adds_plainly and self.next_norm is not None:
            normed = shard.all_reduce_add_norm(y, x, self.next_norm)
            if normed is not None:
                batch.normed[self.next_norm] = normed
                return x
        return self.add(x, shard.all_reduce(y))

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] += scale * after(y), in place; returns x."""
        return x.add_(y if self.output_norm is None else self.output_norm.forward(y), alpha=self.scale)

    @abstractmethod
    def weight_slots(self, prefix: str) -> WeightSlots:
        """Slots by their names in the checkpoint, without those of the norms around the branch."""

    def all_slots(self) -> WeightSlots:
        """The slots of the branch and of the norms around it, by their whole names."""
        slots = self.weight_slots(f"{self.module}{self.name}.")
        if self.input_norm is not None:
            slots |= self.input_norm.weight_slots(f"{self.module}{self.norms.before}")
        if self.output_norm is not None:
            slots |= self.output_norm.weight_slots(f"{self.module}{self.norms.after}")
        return slots

    def normed_product(
        self, linear: ColumnParallelLinear, x: torch.Tensor, batch: ForwardBatch, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """linear(norm(x)), in ``out`` if given. The branch before may have left the norm in ``batch.normed``."""
        normed = batch.normed.pop(self.input_norm, None)
        if self.input_norm is None or normed is not None:
            return linear.forward(x if normed is None else normed, out)
        return linear.forward_normed(x, self.input_norm, out)


BEFORE_ATTENTION = BranchNorms("input_layernorm")
BEFORE_MLP = BranchNorms("post_attention_layernorm")


class TokenMixer(Branch):
    """The branch in which tokens read one another: x += output(attention(projections(norm(x)))). A subclass defines the
    projections, which of its rows in the KV pool they fill, and the output. What it shares with others is the interface
    to the attention's plan and to the pieces of a forward. Only ``attend`` depends on the requests' lengths, so what
    comes before and after it can be captured in graphs: ``project`` then ends one piece, ``add_output`` begins the
    next, and they share ``batch.buffers``."""

    name = "self_attn"
    state_spec: StateSpec | None = None
    """What a recurrent layer keeps of a request; None for one that attends."""

    def __init__(
        self, site: LayerSite, norms: BranchNorms, heads: HeadLayout, width: int, rules: LayerRules, score_scale: float
    ) -> None:
        """``heads`` are those that attention computes on this rank, and ``width`` is the number of features of
        ``project``'s result. Scores are multiplied by ``score_scale``."""
        super().__init__(site.config, site.context, norms)
        self.layer_id, self.heads, self.rules, self.score_scale = site.layer_id, heads, rules, score_scale
        self.value_scale = 1.0  # what the pool's values are to be multiplied by
        self._dtype, self._rotary = site.context.dtype, site.rotary
        # Layers with the same width share their buffers. Layers whose heads are laid out in the same way also share the
        # views.
        self._widths = width, heads.num_heads * heads.head_dim
        self._projected_buffer, self._attended_buffer = f"qkv_{width}", f"attended_{self._widths[1]}"
        self._views_key = f"{width} {heads}"

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """The residual stream x [T, hidden_size], added to in place. Writes the batch's rows to its pool."""
        return self.add_output(x, batch, self.attend(self.project(x, batch), batch))

    @abstractmethod
    def project(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x → what attention reads of this step's tokens, [T, width], in the layer's buffer if the forward has pieces.
        The layer's rows of the pool are written."""

    def split(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of the result of ``project``: q, k and v as ``AttentionPlan.forward`` takes them."""
        return self.heads.split(projected)

    def attend(self, projected: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Attention over the prefix and the new tokens, [T, num_heads * head_dim]."""
        attended = self._attention(projected, batch)
        return (attended if self.value_scale == 1.0 else attended.mul_(self.value_scale)).flatten(1)

    def _attention(self, projected: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """See ``AttentionPlan.forward``."""
        return batch.attn.forward(self.layer_id, *self.split(projected), self.score_scale)

    def attend_between_pieces(self, batch: ForwardBatch) -> None:
        """``attend`` for a forward in pieces: it reads its input from one buffer and writes its result to another."""
        buffers = batch.buffers
        assert buffers is not None, "only a forward in pieces has buffers"
        views = buffers.views.get(self._views_key)
        if views is None:
            q, k, v = self.split(buffers.tensors[self._projected_buffer])
            views = q, k, v, buffers.tensors[self._attended_buffer].view(q.shape)
            buffers.views[self._views_key] = views
        q, k, v, attended = views
        batch.attn.forward_into(self.layer_id, q, k, v, self.score_scale, attended)
        if self.value_scale != 1.0:
            attended.mul_(self.value_scale)

    def add_output(self, x: torch.Tensor, batch: ForwardBatch, attended: torch.Tensor | None = None) -> torch.Tensor:
        """x += the output of ``attended``, in place; returns x. None: ``attended`` is the buffer that
        ``attend_between_pieces`` has filled."""
        if attended is None:
            assert batch.buffers is not None, "only a forward in pieces has buffers"
            attended = batch.buffers.tensors[self._attended_buffer]
        return self._add_attended(x, attended, batch)

    @abstractmethod
    def _add_attended(self, x: torch.Tensor, attended: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x += the output of ``attended`` [T, num_heads * head_dim], in place; returns x."""

    def arena_fields(self) -> Sequence[ArenaField]:
        """The arena fields of the buffers. Attention does not write padded rows, so they are zeroed in each step."""
        return (
            ArenaField(self._attended_buffer, self._dtype, Role.INPUT, pad=0, shape=self._widths[1:]),
            ArenaField(self._projected_buffer, self._dtype, Role.OUTPUT, pad=0, shape=self._widths[:1]),
        )


class RecurrentMixer(TokenMixer):
    """A mixer whose tokens read a state in place of one another, so that it has no rows in the KV pool. Between pieces
    of a forward it runs where attention does."""

    in_proj: ColumnParallelLinear
    gates_proj: ColumnParallelLinear | None = None
    """The last projections, if they may be stored in another format than ``in_proj``, else None: it has them too."""

    def project(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x → in_proj(norm(x)), then gates_proj(norm(x)), [T, width]."""
        out = None if batch.buffers is None else batch.buffers.tensors[self._projected_buffer]
        if self.gates_proj is None:
            return self.normed_product(self.in_proj, x, batch, out)
        normed = batch.normed.pop(self.input_norm, None)
        if normed is None:
            normed = x if self.input_norm is None else self.input_norm.forward(x)
        return torch.cat((self.in_proj.forward(normed), self.gates_proj.forward(normed)), 1, out=out)

    def mix(self, projected: torch.Tensor, state: LayerState, rows: StateRows) -> torch.Tensor:
        """The result of ``project`` → what the output's projection reads, [T, num_heads * head_dim] of ``heads``. Reads
        and writes the slots ``rows`` of the layer's ``state``. A mixer that needs more of the step has its own
        ``attend``."""
        raise AssertionError(f"{type(self).__name__} has neither mix nor attend")

    def attend(self, projected: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        assert batch.states is not None, "recurrent layers have states"
        return self.mix(projected, batch.states.layers[self.layer_id], batch.states.rows)

    def attend_between_pieces(self, batch: ForwardBatch) -> None:
        assert batch.buffers is not None, "only a forward in pieces has buffers"
        tensors = batch.buffers.tensors
        tensors[self._attended_buffer].copy_(self.attend(tensors[self._projected_buffer], batch))


class SelfAttention(TokenMixer):
    """x += o_proj(attention(rope(qkv_proj(norm(x))))), with queries and keys normalised head by head in some families.
    Its rows in the pool are ``k`` and ``v``."""

    gated = False
    """Whether q_proj also makes gates, by whose sigmoids the heads' results are multiplied."""
    gate: str | None = None
    """The projection that makes them, if it is one of its own."""

    def __init__(
        self,
        site: LayerSite,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm: bool = False,
        wide_qk_norm: bool = False,
        norms: BranchNorms = BEFORE_ATTENTION,
        input_size: int | None = None,
        sinks: bool = False,
    ) -> None:
        """``input_size`` is the number of input features, hidden_size by default; if there is no norm before the
        branch, ``project`` uses its input unchanged. ``qk_norm``: each query and key head is normalised;
        ``wide_qk_norm``: all query heads are normalised together, and so are all key heads. ``sinks``: see
        ``LayerRules``. The window is the config's; one at least as long as the context has no effect and is left out.
        Parameters are uninitialised."""
        config, context = site.config, site.context.inside(self.name)
        head_dim, hidden_size, eps = config.head_dim, config.hidden_size, config.rms_norm_eps
        self.qkv_proj = QKVParallelLinear(
            input_size or hidden_size, config.num_heads, config.num_kv_heads, head_dim, qkv_bias, context,
            self.gated, self.gate,
        )  # fmt: skip
        heads = HeadLayout(self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, head_dim)
        window = config.window(site.index)
        binds = window is not None and window < config.context_length
        own_sinks = torch.empty(heads.num_heads, dtype=torch.float32) if sinks else None
        rules = LayerRules(window if binds else None, config.attention_soft_cap, own_sinks)
        self._plain_score_scale = config.multipliers.attention or head_dim**-0.5
        width = (heads.num_heads + 2 * heads.num_kv_heads) * head_dim
        super().__init__(site, norms, heads, width, rules, self._plain_score_scale)
        self.o_proj = RowParallelLinear("o_proj", config.num_heads * head_dim, hidden_size, o_bias, context)
        self.q_norm = context.norm(head_dim, eps) if qk_norm else None
        self.k_norm = context.norm(head_dim, eps) if qk_norm else None
        self._first_head, self._all_heads = context.shard.rank * heads.num_heads, config.num_heads
        self._norms = None
        if self.q_norm is not None and self.k_norm is not None:
            self._norms = QKNorm(self.q_norm.weight, self.k_norm.weight, eps)
        self._wide_norms: tuple[WideNorm, ...] = ()
        if wide_qk_norm:
            q_part, k_part, *_ = self.qkv_proj.parts
            self._wide_norms = (WideNorm("q_norm", q_part, eps, context), WideNorm("k_norm", k_part, eps, context))
        self._kernels = context.kernels
        # A checkpoint may have scales by which keys and values are divided in FP8. They are kept as Python numbers,
        # because they are arguments of kernel launches.
        quantization, is_fp8 = config.quantization, context.kv_dtype not in (None, context.dtype)
        self._loads_kv_scales = is_fp8 and quantization is not None and quantization.has_kv_scales
        self._kv_scale_params = torch.ones(2, dtype=torch.float32)
        self._kv_scales = ONE

    def project(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x → rotated queries, keys and values [T, size of ``heads``]; keys and values also go to the pool."""
        layer_id, pool, buffers = self.layer_id, batch.kv_pool, batch.buffers
        qkv = self._products(x, batch, None if buffers is None else buffers.tensors[self._projected_buffer])
        if self._wide_norms:
            for norm, x_part in zip(self._wide_norms, qkv.split(self.qkv_proj.sizes, 1), strict=False):
                x_part.copy_(norm.forward(x_part))
        if batch.layer_ready is not None:
            # This must come before the store too, because this batch may write to the last page that is being loaded.
            batch.layer_ready(layer_id)
        table = self._rotary.table if batch.angles is None else batch.angles
        self._kernels.rotate_and_store(
            qkv, self.heads, self._norms, table, batch.positions[0],
            pool.row(layer_id, "k"), pool.row(layer_id, "v"), batch.out_slots, self._kv_scales,
        )  # fmt: skip
        return qkv

    def _products(self, x: torch.Tensor, batch: ForwardBatch, out: torch.Tensor | None) -> torch.Tensor:
        """x → queries, keys and values [T, size of ``heads``] as the matrix makes them, in ``out`` if given."""
        return self.normed_product(self.qkv_proj, x, batch, out)

    def _take_kv_scales(self) -> None:
        k, v = self._kv_scale_params.tolist()
        self._kv_scales, self.value_scale = KVScales(k, v), v
        self.score_scale = self._plain_score_scale * k  # scores are computed from stored (scaled) keys

    def _add_attended(self, x: torch.Tensor, attended: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return self.add_product(x, self.o_proj, attended, batch)

    def weight_slots(self, prefix: str) -> WeightSlots:
        slots = {**self.qkv_proj.weight_slots(prefix), **self.o_proj.weight_slots(prefix)}
        if self.q_norm is not None and self.k_norm is not None:
            slots |= self.q_norm.weight_slots(f"{prefix}q_norm")
            slots |= self.k_norm.weight_slots(f"{prefix}k_norm")
        for norm in self._wide_norms:
            slots |= norm.weight_slots(prefix)
        if self.rules.sinks is not None:
            slots[f"{prefix}sinks"] = WeightSlot(self.rules.sinks, (self._all_heads,), 0, self._first_head)
        if self._loads_kv_scales:
            for index, name in enumerate(("k_scale", "v_scale")):
                param = self._kv_scale_params[index : index + 1]
                slots[prefix + name] = WeightSlot(param, (), convert=torch.flatten, loaded=self._take_kv_scales)
        if (order := self._rotary.order) is not None:
            self.qkv_proj.weight.moves_rows(len(order))
            of_queries = (*order, *range(len(order), 2 * len(order))) if self.gated else order
            for part, new_order in (("q_proj", of_queries), ("q_norm", order), ("k_", order)):
                slots |= in_order({name: s for name, s in slots.items() if name.startswith(prefix + part)}, new_order)
        return slots


class GatedAttention(SelfAttention):
    """Attention whose result is multiplied by sigmoid(gate(norm(x))), feature by feature, before o_proj. The rows of
    q_proj are a query's and a gate's for each head in turn."""

    gated = True

    def _products(self, x: torch.Tensor, batch: ForwardBatch, out: torch.Tensor | None) -> torch.Tensor:
        *others, gates = self._gates_last(super()._products(x, batch, None).split(self.qkv_proj.sizes, 1))
        if batch.buffers is None:
            batch.sparse.gates = gates
        else:
            batch.buffers.tensors[self._gates_buffer].copy_(gates)
        return torch.cat(others, 1, out=out)

    def _gates_last(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The parts of the product → queries, keys, values and gates, each [T, features]."""
        both, *others = parts
        queries, gates = both.unflatten(1, (self.heads.num_heads, 2, -1)).unbind(2)
        return queries.flatten(1), *others, gates.flatten(1)

    @property
    def _gates_buffer(self) -> str:
        return f"gates_{self._widths[1]}"

    def attend(self, projected: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        gates, batch.sparse.gates = batch.sparse.gates, None
        assert gates is not None, "project has left them"
        return super().attend(projected, batch).mul_(self._kernels.sigmoid(gates))

    def attend_between_pieces(self, batch: ForwardBatch) -> None:
        super().attend_between_pieces(batch)
        assert batch.buffers is not None
        tensors = batch.buffers.tensors
        tensors[self._attended_buffer].mul_(self._kernels.sigmoid(tensors[self._gates_buffer]))

    def arena_fields(self) -> Sequence[ArenaField]:
        gates = ArenaField(self._gates_buffer, self._dtype, Role.OUTPUT, pad=0, shape=self._widths[1:])
        return (*super().arena_fields(), gates)


class OutputGatedAttention(GatedAttention):
    """``GatedAttention`` whose gates have a projection of their own, ``o_gate``."""

    gated, gate = False, "o_gate"

    def _gates_last(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return parts


def in_order(slots: WeightSlots, order: Sequence[int]) -> WeightSlots:
    """``slots`` into which tensors [heads * head_dim, ...] go with the features of each head in ``order``. Tensors that
    are not kept, or are one number for all rows, have no order."""
    return {
        name: replace(slot, convert=partial(_reordered, order, slot.convert))
        if slot.dest.numel() and slot.full_shape
        else slot
        for name, slot in slots.items()
    }


def _reordered(
    order: Sequence[int], convert: Callable[[torch.Tensor], torch.Tensor] | None, tensor: torch.Tensor
) -> torch.Tensor:
    """``tensor`` [heads * head_dim, ...], after ``convert``, with the features of each head in ``order``."""
    tensor = tensor if convert is None else convert(tensor)
    heads = tensor.unflatten(0, (-1, len(order)))
    return heads.index_select(1, torch.tensor(order, device=tensor.device)).flatten(0, 1)


class GatedMLP(Branch):
    """x += down(activation(gate(norm(x))) * up(norm(x))): SwiGLU and similar MLPs (arXiv:2002.05202)."""

    name = "mlp"

    def __init__(self, site: LayerSite, bias: bool = False, norms: BranchNorms = BEFORE_MLP) -> None:
        super().__init__(site.config, site.context, norms)
        config, context = site.config, site.context.inside(self.name)
        hidden_size, size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, {"gate_proj": size, "up_proj": size}, bias, context)
        self.down_proj = RowParallelLinear("down_proj", size, hidden_size, bias, context)
        self.activation = config.activation

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        normed = batch.normed.pop(self.input_norm, None)
        read, norm = (x, self.input_norm) if normed is None else (normed, None)
        gated = self.gate_up_proj.forward_gated(read, norm, self.activation)
        return self.add_product(x, self.down_proj, gated, batch)

    def weight_slots(self, prefix: str) -> WeightSlots:
        return {**self.gate_up_proj.weight_slots(prefix), **self.down_proj.weight_slots(prefix)}


class PlainMLP(Branch):
    """x += down(relu(up(norm(x)))²), without a gate (arXiv:2109.08668)."""

    def __init__(self, site: LayerSite, name: str, bias: bool = False, norms: BranchNorms = BEFORE_MLP) -> None:
        super().__init__(site.config, site.context, norms)
        self.name = name
        config, context = site.config, site.context.inside(name)
        hidden_size, size = config.hidden_size, config.intermediate_size
        self.up_proj = MergedColumnParallelLinear(hidden_size, {"up_proj": size}, bias, context)
        self.down_proj = RowParallelLinear("down_proj", size, hidden_size, bias, context)
        self._kernels = context.kernels

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        squared = self._kernels.activate(self.normed_product(self.up_proj, x, batch), RELU2)
        return self.add_product(x, self.down_proj, squared, batch)

    def weight_slots(self, prefix: str) -> WeightSlots:
        return {**self.up_proj.weight_slots(prefix), **self.down_proj.weight_slots(prefix)}


class DecoderLayer:
    """x += mixer(x), then x += mlp(x), if there is an MLP."""

    def __init__(self, self_attn: TokenMixer, mlp: Branch | None = None) -> None:
        self.self_attn = self_attn
        self.mlp: Branch | None = None
        if mlp is not None:
            self.complete(mlp)

    def complete(self, mlp: Branch) -> None:
        """Have ``mlp`` follow the mixer, which nothing follows yet."""
        assert self.mlp is None, "a layer has one MLP"
        self.mlp, self.self_attn.next_norm = mlp, mlp.input_norm

    @property
    def last(self) -> Branch:
        return self.self_attn if self.mlp is None else self.mlp

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """The residual stream x [T, hidden_size], added to in place."""
        return self.after_mixing(self.self_attn.forward(x, batch), batch)

    def after_mixing(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """What follows the mixer: x += mlp(x), in place; returns x."""
        return x if self.mlp is None else self.mlp.forward(x, batch)

    def weight_slots(self) -> WeightSlots:
        """Slots by their names in the checkpoint."""
        return self.self_attn.all_slots() | ({} if self.mlp is None else self.mlp.all_slots())
