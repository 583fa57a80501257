"""VisionTower: makes embeddings of images, which a prompt has in place of the embeddings of its placeholder tokens.

A tower reads several images at a time, whose patches lie one behind the other (:mod:`fenceline.models.patch_order`).
The few frames of a video of which it makes one grid of embeddings are an image. No patch attends to one of another
image. Every rank has the whole tower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from fenceline.config.vision import VisionConfig
from fenceline.layers.context import LayerContext, Shard, torch_context
from fenceline.layers.kernels.base import apply_rotary
from fenceline.layers.linear import MergedColumnParallelLinear, ReplicatedLinear
from fenceline.layers.weight import RMSNorm, WeightSlot, WeightSlots, whole
from fenceline.models.patch_order import PackedPatches, PatchOrder, Runs, pack, patch_order

_EPS = 1e-6
_THETA = 10_000.0
_PLAIN = "linear_fc1", "linear_fc2"
TOWERS = ("visual.", "vision_tower.", "multi_modal_projector.")
"""How the names of all towers' tensors begin."""


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """How patches are divided into segments, each of which attends to itself. ``bounds`` int32, on the device: where
    they begin and the last one ends."""

    runs: Runs
    bounds: torch.Tensor

    @property
    def longest(self) -> int:
        """Patches of the longest segment."""
        return max(size for _, size in self.runs)


@dataclass(frozen=True, slots=True, eq=False)
class PackedImages:
    """What a tower reads, on the device: ``pixels`` [frames, height, width, 3] uint8 of each image, one frame or as
    many as the tower reads together, and their patches, see ``PackedPatches``."""

    pixels: Sequence[torch.Tensor]
    patches: torch.Tensor
    places: torch.Tensor
    points: torch.Tensor | None
    windows: Segments
    images: Segments


class _LayerNorm:
    """LayerNorm over the last axis."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.weight, self.bias = torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, _EPS)

    def weight_slots(self, name: str) -> WeightSlots:
        return {f"{name}.weight": whole(self.weight), f"{name}.bias": whole(self.bias)}


class _GatedMLP:
    """down(silu(gate) * up), with biases."""

    def __init__(self, config: VisionConfig, context: LayerContext) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_up = MergedColumnParallelLinear(size, {"gate_proj": inner, "up_proj": inner}, True, context)
        self.down = ReplicatedLinear("down_proj", inner, size, True, context)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down.forward(self.gate_up.forward_gated(x, None))

    def weight_slots(self, prefix: str) -> WeightSlots:
        return self.gate_up.weight_slots(prefix) | self.down.weight_slots(prefix)


class _PlainMLP:
    """second(gelu(first)), with biases."""

    def __init__(self, sizes: tuple[int, int, int], names: tuple[str, str], context: LayerContext, gelu: str) -> None:
        """``gelu``: none or tanh, as in torch."""
        self.first = ReplicatedLinear(names[0], sizes[0], sizes[1], True, context)
        self.second = ReplicatedLinear(names[1], sizes[1], sizes[2], True, context)
        self._gelu = gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second.forward(F.gelu(self.first.forward(x), approximate=self._gelu))

    def weight_slots(self, prefix: str) -> WeightSlots:
        return self.first.weight_slots(prefix) | self.second.weight_slots(prefix)


@dataclass(frozen=True, slots=True)
class _BlockNames:
    """What the checkpoint calls the parts of a block."""

    norms: tuple[str, str] = ("norm1", "norm2")
    attention: str = "attn."
    qkv: tuple[str, ...] = ("qkv",)
    proj: str = "proj"
    mlp: tuple[str, str] = _PLAIN


_SIGLIP = _BlockNames(
    ("layer_norm1", "layer_norm2"), "self_attn.", ("q_proj", "k_proj", "v_proj"), "out_proj", ("fc1", "fc2")
)


class _VisionBlock:
    """x += proj(attention(rope(qkv(norm1(x))))); x += mlp(norm2(x)); all with biases."""

    def __init__(self, config: VisionConfig, context: LayerContext) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        self.names = _SIGLIP if config.style == "siglip" else _BlockNames()
        self.num_heads, self.head_dim = config.num_heads, size // config.num_heads
        self.norm1, self.norm2 = (_make_norm(size, config, context) for _ in range(2))
        parts = {name: 3 * size // len(self.names.qkv) for name in self.names.qkv}
        self.qkv = MergedColumnParallelLinear(size, parts, True, context)
        self.proj = ReplicatedLinear(self.names.proj, size, size, True, context)
        self.mlp: _GatedMLP | _PlainMLP
        if config.style == "qwen2_5_vl":
            self.mlp = _GatedMLP(config, context)
        else:
            self.mlp = _PlainMLP((size, inner, size), self.names.mlp, context, "tanh")

    def forward(
        self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor] | None, segments: Segments
    ) -> torch.Tensor:
        """x [P, hidden_size] → a new tensor. ``angles``: cos and sin, as ``apply_rotary`` takes them; None: no head
        rotates."""
        qkv = self.qkv.forward(self.norm1.forward(x)).view(len(x), 3 * self.num_heads, self.head_dim)
        qk, v = qkv.split((2 * self.num_heads, self.num_heads), 1)
        if angles is not None:
            qk = apply_rotary(qk, *angles)
        q, k = qk.split(self.num_heads, 1)
        x = x + self.proj.forward(attend_within(segments, q, k, v))
        return x + self.mlp.forward(self.norm2.forward(x))

    def weight_slots(self, prefix: str) -> WeightSlots:
        return {
            **self.norm1.weight_slots(prefix + self.names.norms[0]),
            **self.norm2.weight_slots(prefix + self.names.norms[1]),
            **self.qkv.weight_slots(prefix + self.names.attention),
            **self.proj.weight_slots(prefix + self.names.attention),
            **self.mlp.weight_slots(f"{prefix}mlp."),
        }


class _Merger:
    """Makes one embedding of a square of patches: mlp(norm(x)). ``norms_square``: the norm is over all of a square's
    features, otherwise over those of each patch."""

    def __init__(self, config: VisionConfig, context: LayerContext, norms_square: bool = False) -> None:
        self._size = config.hidden_size * config.images.merge_size**2
        self._norm_name, names = ("ln_q", ("mlp.0", "mlp.2")) if config.style == "qwen2_5_vl" else ("norm", _PLAIN)
        self._norm_size = self._size if norms_square else config.hidden_size
        self.norm = _make_norm(self._norm_size, config, context)
        self.mlp = _PlainMLP((self._size, self._size, config.out_size), names, context, "none")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp.forward(self.norm.forward(x.view(-1, self._norm_size)).view(-1, self._size))

    def weight_slots(self, prefix: str) -> WeightSlots:
        return self.norm.weight_slots(f"{prefix}{self._norm_name}") | self.mlp.weight_slots(prefix)


def _make_norm(size: int, config: VisionConfig, context: LayerContext) -> RMSNorm | _LayerNorm:
    return context.norm(size, _EPS) if config.style == "qwen2_5_vl" else _LayerNorm(size, context.dtype)


class _Projector:
    """Gemma 3's: the mean of each square of patches, normalised, times a matrix."""

    def __init__(self, config: VisionConfig, context: LayerContext) -> None:
        self._square = config.images.merge_size**2
        self.last_norm = _LayerNorm(config.hidden_size, context.dtype)
        self.norm = replace(context, norm_offset=1.0).norm(config.hidden_size, _EPS)
        self.weight = torch.empty(config.out_size, config.hidden_size, dtype=context.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        means = self.last_norm.forward(x).unflatten(0, (-1, self._square)).mean(1)
        return F.linear(self.norm.forward(means), self.weight)

    def weight_slots(self, prefix: str) -> WeightSlots:
        matrix = WeightSlot(self.weight, (self.weight.shape[1], self.weight.shape[0]), convert=torch.t)
        return {
            **self.last_norm.weight_slots(f"{prefix}post_layernorm"),
            **self.norm.weight_slots("multi_modal_projector.mm_soft_emb_norm"),
            "multi_modal_projector.mm_input_projection_weight": matrix,
        }


def attend_within(segments: Segments, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of each of ``segments`` to itself; q, k, v [P, heads, head_dim] → [P, heads * head_dim]. Does not make
    the host wait."""
    if _has_varlen(q):
        from torch.nn.attention.varlen import varlen_attn  # takes seconds, which other servers need not wait

        bounds, longest = segments.bounds, segments.longest
        return varlen_attn(q, k, v, bounds, bounds, longest, longest).flatten(1)  # type: ignore[union-attr]
    parts, start = [], 0
    for count, size in segments.runs:
        end = start + count * size
        inputs = [each[start:end].unflatten(0, (count, size)).transpose(1, 2) for each in (q, k, v)]
        parts.append(F.scaled_dot_product_attention(*inputs).transpose(1, 2).reshape(end - start, -1))
        start = end
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _has_varlen(q: torch.Tensor) -> bool:
    """Whether torch has FlashAttention for ``q`` [P, heads, head_dim], which takes segments of any lengths at once."""
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16) or q.shape[2] % 8 or q.shape[2] > 256:
        return False
    return torch.cuda.get_device_capability(q.device) >= (8, 0)


class VisionTower:
    """The towers of Qwen2.5-VL (arXiv:2502.13923) and Qwen3-VL (arXiv:2511.21631): patches projected, layers with
    two-dimensional rotary positions, and a merger of each square of patches to one embedding. Gemma 3's, SigLIP
    (arXiv:2303.15343), has learned positions alone."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        """Parameters of ``dtype`` are allocated on the default device and not initialised."""
        context = torch_context(Shard(), dtype)
        self.config, self._dtype = config, dtype
        images, size = config.images, config.hidden_size
        self.width = config.out_size * (1 + len(config.deepstack))
        """Features of a row of the result: an image's embedding, then what ``deepstack`` adds."""
        self._values = torch.tensor(images.values())
        self._channels = torch.arange(3)
        quarter = size // config.num_heads // 4
        self._frequencies = 1.0 / _THETA ** (torch.arange(quarter, dtype=torch.float32) / quarter)
        self._patch_features = 3 * config.temporal_patch_size * images.patch_size**2
        self.patch_embed = torch.empty(size, self._patch_features, dtype=dtype)
        self.patch_bias = None if config.style == "qwen2_5_vl" else torch.empty(size, dtype=dtype)
        self.positions = torch.empty(config.position_side**2, size, dtype=dtype) if config.position_side else None
        self.blocks = [_VisionBlock(config, context) for _ in range(config.depth)]
        self.merger: _Merger | _Projector = (_Projector if config.style == "siglip" else _Merger)(config, context)
        self.deepstack = [_Merger(config, context, norms_square=True) for _ in config.deepstack]

    def order(self, grid: tuple[int, int]) -> PatchOrder:
        """The order of the patches of an image with ``grid``, and of its embeddings."""
        return patch_order(grid, self.config.images.merge_size, self.config.window)

    def pack(self, grids: Sequence[tuple[int, int]]) -> PackedPatches:
        """The patches of images with these grids, which :meth:`forward` reads together."""
        merge = self.config.images.merge_size
        return pack([*map(self.order, grids)], [merge * columns for _, columns in grids], self.config.position_side)

    def forward(self, packed: PackedImages) -> torch.Tensor:
        """The embeddings [N, width] of images, one image behind the other, each in the order of its
        ``PatchOrder.embeddings``. On the current stream."""
        config, start, squares = self.config, 0, []
        for pixels in packed.pixels:
            end = start + pixels.shape[1] * pixels.shape[2] // config.images.patch_size**2
            squares.append(self._in_patches(pixels, packed.patches[start:end]))
            start = end
        x = F.linear(torch.cat(squares), self.patch_embed, self.patch_bias)
        if self.positions is not None and packed.points is not None:
            x = x + self._stretched(self.positions, packed.points)
        rotation = None
        if config.style != "siglip":
            angles = (packed.places.T.unsqueeze(2) * self._frequencies).flatten(1).unsqueeze(1)
            rotation = angles.cos().repeat(1, 1, 2), angles.sin()
        results: list[torch.Tensor] = []
        for index, block in enumerate(self.blocks):
            x = block.forward(x, rotation, packed.images if index in config.full_layers else packed.windows)
            if index in config.deepstack:
                results.append(self.deepstack[len(results)].forward(x))
        merged = self.merger.forward(x)
        return torch.cat((merged, *results), 1) if results else merged

    def _in_patches(self, pixels: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
        """Normalised ``patches`` [P, features] of one image, a single frame repeated for each that the tower reads."""
        side, frames = self.config.images.patch_size, self.config.temporal_patch_size
        num_given, height, width, _ = pixels.shape
        values = self._values[pixels.long(), self._channels].to(self._dtype)
        squares = values.view(num_given, height // side, side, width // side, side, 3).permute(1, 3, 5, 0, 2, 4)
        squares = squares.reshape(-1, 3, num_given, side * side).index_select(0, patches)
        return squares.expand(-1, -1, frames, -1).reshape(len(patches), self._patch_features)

    def _stretched(self, table: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        """The learned positions at ``points`` [2, P] of the square ``table``; between its own points they are
        interpolated in both directions."""
        side, taken = self.config.position_side, torch.zeros((), device=table.device)
        (above, share_above), (left, share_left) = (_taps(at, side) for at in points)
        for row, row_share in zip(above, share_above, strict=True):
            for column, share in zip(left, share_left, strict=True):
                taken = taken + table.index_select(0, row * side + column) * (row_share * share).unsqueeze(1)
        return taken.to(self._dtype)

    def weight_slots(self) -> WeightSlots:
        """Slots by their names in the checkpoint."""
        side, frames = self.config.images.patch_size, self.config.temporal_patch_size
        if self.config.style == "siglip":
            prefix, patches, positions, block = _SIGLIP_NAMES
            kernel: tuple[int, ...] = (len(self.patch_embed), 3, side, side)
        else:
            prefix, patches, positions, block = _QWEN_NAMES
            kernel = len(self.patch_embed), 3, frames, side, side
        slots = {f"{prefix}{patches}.weight": WeightSlot(self.patch_embed, kernel, convert=_flat)}
        if self.patch_bias is not None:
            slots[f"{prefix}{patches}.bias"] = whole(self.patch_bias)
        if self.positions is not None:
            slots[f"{prefix}{positions}.weight"] = whole(self.positions)
        for index, one in enumerate(self.blocks):
            slots |= one.weight_slots(f"{prefix}{block}.{index}.")
        slots |= self.merger.weight_slots(prefix if self.config.style == "siglip" else f"{prefix}merger.")
        for index, merger in enumerate(self.deepstack):
            slots |= merger.weight_slots(f"{prefix}deepstack_merger_list.{index}.")
        return slots


# The tower's prefix, and below it the patches' projection, the learned positions, and the blocks.
_QWEN_NAMES = "visual.", "patch_embed.proj", "pos_embed", "blocks"
_SIGLIP_NAMES = "vision_tower.", "embeddings.patch_embedding", "embeddings.position_embedding", "encoder.layers"


def _taps(at: torch.Tensor, side: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The two of ``side`` points between which each of ``at`` [P] lies, and their shares."""
    before = at.floor()
    share = at - before
    first = before.long()
    return (first, (first + 1).clamp(max=side - 1)), (1 - share, share)


def _flat(kernel: torch.Tensor) -> torch.Tensor:
    return kernel.flatten(1)
