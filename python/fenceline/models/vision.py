"""VisionTower: makes embeddings of images, which a prompt has in place of the embeddings of its placeholder tokens.

A tower reads one image at a time, whatever else a step computes, so an image's embeddings never depend on its
neighbours. Every rank has the whole tower. Patches are computed in an order in which those of a window lie together,
and windows of one size too: attention within windows is then one product for each size that there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from fenceline.config.vision import VisionConfig
from fenceline.layers.context import LayerContext, Shard, torch_context
from fenceline.layers.kernels.base import apply_rotary
from fenceline.layers.linear import MergedColumnParallelLinear, ReplicatedLinear
from fenceline.layers.weight import RMSNorm, WeightSlot, WeightSlots

_EPS = 1e-6
_THETA = 10_000.0

Segments = tuple[tuple[int, int], ...]  # (how many, of how many patches each), one after the other


@dataclass(frozen=True, slots=True, eq=False)
class PatchOrder:
    """In which order the patches of an image with one grid are computed. ``patches`` [P] int64: the number of each in
    the image, row by row. ``embeddings`` [N] int64: the number in the image's grid of each row of the tower's result.
    ``windows``: how the patches are divided for layers that attend within windows."""

    patches: npt.NDArray[np.int64]
    embeddings: npt.NDArray[np.int64]
    windows: Segments


@lru_cache(maxsize=64)
def patch_order(grid: tuple[int, int], merge: int, window: int) -> PatchOrder:
    """The order for ``grid`` (rows, columns) of embeddings, each of ``merge`` x ``merge`` patches, and windows of
    ``window`` x ``window`` embeddings."""
    rows, columns = grid
    numbers = np.arange(rows * columns, dtype=np.int64).reshape(rows, columns)
    windows = [
        numbers[row : row + window, column : column + window].ravel()
        for row in range(0, rows, window)
        for column in range(0, columns, window)
    ]
    windows.sort(key=len)
    embeddings = np.concatenate(windows)
    inside = np.arange(merge, dtype=np.int64)
    across = (embeddings // columns * merge)[:, None, None] + inside[:, None]
    along = (embeddings % columns * merge)[:, None, None] + inside
    patches = (across * (columns * merge) + along).ravel()
    sizes = groupby(len(numbers) * merge * merge for numbers in windows)
    return PatchOrder(patches, embeddings, tuple((len(list(same)), size) for size, same in sizes))


class _VisionBlock:
    """x += proj(attention(rope(qkv(norm1(x))))); x += down(silu(gate) * up of norm2(x)); all with biases."""

    def __init__(self, config: VisionConfig, context: LayerContext) -> None:
        size = config.hidden_size
        self.num_heads, self.head_dim = config.num_heads, size // config.num_heads
        self.norm1, self.norm2 = context.norm(size, _EPS), context.norm(size, _EPS)
        self.qkv = ReplicatedLinear("qkv", size, 3 * size, True, context)
        self.proj = ReplicatedLinear("proj", size, size, True, context)
        outputs = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up = MergedColumnParallelLinear(size, outputs, True, context)
        self.down = ReplicatedLinear("down_proj", config.intermediate_size, size, True, context)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, segments: Segments) -> torch.Tensor:
        q, k, v = self.qkv.forward_normed(x, self.norm1).view(len(x), 3, self.num_heads, self.head_dim).unbind(1)
        attended = attend_within(segments, apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v)
        x = x + self.proj.forward(attended)
        return x + self.down.forward(self.gate_up.forward_gated(x, self.norm2))

    def weight_slots(self, prefix: str) -> WeightSlots:
        return {
            **self.norm1.weight_slots(f"{prefix}norm1"),
            **self.norm2.weight_slots(f"{prefix}norm2"),
            **self.qkv.weight_slots(f"{prefix}attn."),
            **self.proj.weight_slots(f"{prefix}attn."),
            **self.gate_up.weight_slots(f"{prefix}mlp."),
            **self.down.weight_slots(f"{prefix}mlp."),
        }


def attend_within(segments: Segments, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of each of ``segments`` to itself; q, k, v [P, heads, head_dim] → [P, heads * head_dim]."""
    parts, start = [], 0
    for count, size in segments:
        end = start + count * size
        inputs = [each[start:end].unflatten(0, (count, size)).transpose(1, 2) for each in (q, k, v)]
        parts.append(F.scaled_dot_product_attention(*inputs).transpose(1, 2).reshape(end - start, -1))
        start = end
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class VisionTower:
    """The tower of Qwen2.5-VL (arXiv:2502.13923): patches projected, layers with two-dimensional rotary positions, and
    a merger of each square of patches to one embedding."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        """Parameters of ``dtype`` are allocated on the default device and not initialised."""
        context = torch_context(Shard(), dtype)
        self.config, self._dtype = config, dtype
        images, size = config.images, config.hidden_size
        self.width = config.out_size
        """Features of a row of the result."""
        self._values = torch.from_numpy(images.values()).to(torch.get_default_device())
        self._channels = torch.arange(3)
        head_dim = size // config.num_heads
        exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)
        self._frequencies = 1.0 / _THETA**exponents
        self._patch_features = 3 * config.temporal_patch_size * images.patch_size**2
        self.patch_embed = torch.empty(size, self._patch_features, dtype=dtype)
        self.blocks = [_VisionBlock(config, context) for _ in range(config.depth)]
        merged = size * images.merge_size**2
        self.merger_norm: RMSNorm = context.norm(size, _EPS)
        self.merger = [
            ReplicatedLinear("mlp.0", merged, merged, True, context),
            ReplicatedLinear("mlp.2", merged, config.out_size, True, context),
        ]

    def order(self, grid: tuple[int, int]) -> PatchOrder:
        """The order in which :meth:`forward` wants the patches of an image with ``grid``."""
        return patch_order(grid, self.config.images.merge_size, self.config.window)

    def forward(self, pixels: torch.Tensor, patches: torch.Tensor, windows: Segments) -> torch.Tensor:
        """The embeddings [N, width] of one image, in the order of ``PatchOrder.embeddings``. ``pixels`` [height, width,
        3] uint8; ``patches`` and ``windows``: of its :meth:`order`, on the device. On the current stream."""
        side = self.config.images.patch_size
        num_columns = pixels.shape[1] // side
        x = F.linear(self._in_patches(pixels, patches), self.patch_embed)
        places = torch.stack((patches // num_columns, patches % num_columns), 1)
        angles = (places.unsqueeze(2) * self._frequencies).flatten(1).unsqueeze(1)
        cos, sin = angles.cos().repeat(1, 1, 2), angles.sin()
        whole = ((1, len(patches)),)
        for index, block in enumerate(self.blocks):
            x = block.forward(x, cos, sin, whole if index in self.config.full_layers else windows)
        return self._merge(x)

    def _in_patches(self, pixels: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
        """Normalised ``patches`` [P, features], each repeated for every frame that the tower reads."""
        side, frames = self.config.images.patch_size, self.config.temporal_patch_size
        height, width, _ = pixels.shape
        values = self._values[pixels.long(), self._channels].to(self._dtype)
        squares = values.view(height // side, side, width // side, side, 3).permute(0, 2, 4, 1, 3)
        squares = squares.reshape(-1, 3, 1, side * side).index_select(0, patches)
        return squares.expand(-1, -1, frames, -1).reshape(len(patches), self._patch_features)

    def _merge(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.merger
        return second.forward(F.gelu(first.forward(self.merger_norm.forward(x).view(-1, first.in_features))))

    def weight_slots(self, prefix: str) -> WeightSlots:
        """Slots by their names in the checkpoint, which begin with ``prefix``."""
        side = self.config.images.patch_size
        kernel = len(self.patch_embed), 3, self.config.temporal_patch_size, side, side
        slots = {f"{prefix}patch_embed.proj.weight": WeightSlot(self.patch_embed, kernel, convert=_flat)}
        for index, block in enumerate(self.blocks):
            slots |= block.weight_slots(f"{prefix}blocks.{index}.")
        slots |= self.merger_norm.weight_slots(f"{prefix}merger.ln_q")
        for linear in self.merger:
            slots |= linear.weight_slots(f"{prefix}merger.")
        return slots


def _flat(kernel: torch.Tensor) -> torch.Tensor:
    return kernel.flatten(1)
