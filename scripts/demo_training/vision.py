"""demo-vision in plain torch: a small Qwen3-VL. A tower makes embeddings of pictures, which the text model, a demo
model with three axes of positions, reads in place of those of placeholder tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fenceline_demo.picture_chat import SETTINGS, PictureItem, PictureRows, Pictures, build_rows
from fenceline_demo.pictures import NUM_LABELS
from fenceline_demo.tokenizer import FastEncoder

from .model import DemoModel, Shape, rotate

TEXT_SHAPE = Shape(
    vocab_size=512, hidden_size=128, intermediate_size=320, num_hidden_layers=4, head_dim=32,
    max_position_embeddings=1024,
)  # fmt: skip
SECTIONS = (6, 5, 5)
"""Of the pairs of a text head's features: how many turn by a token's time, row and column, interleaved."""
LABEL_WEIGHT = 0.5
"""Of the loss of labels, when the whole model is trained."""
_NEARNESS = 3.5  # of the first biases; a patch next to the favoured one has a third of its weight
_EPS = 1e-6
_THETA = 10_000.0
FRAMES = 2
"""A picture is repeated for so many frames. Training needs only the sum of their weights."""


@dataclass(frozen=True, slots=True)
class TowerShape:
    """The tower's dimensions, named as in config.json. ``deepstack``: the layers after each of which further
    embeddings are made, which are added after the text model's first layers."""

    depth: int = 4
    hidden_size: int = 96
    intermediate_size: int = 256
    num_heads: int = 4
    position_side: int = 8
    deepstack: tuple[int, ...] = (1,)


class Tower(nn.Module):
    """Patches projected, learned positions, layers with two-dimensional rotary positions, and mergers: the last is for
    the embeddings, the others are of ``deepstack``."""

    def __init__(self, shape: TowerShape, out_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        n, size, inner, square = shape.depth, shape.hidden_size, shape.intermediate_size, shape.hidden_size * 4
        mergers, patch = len(shape.deepstack) + 1, 3 * SETTINGS.patch_size**2

        def matrix(count: int, rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(count, rows, columns) * scale * columns**-0.5)

        def vector(value: float, *sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.full(sizes, value))

        self.patches, self.patch_bias = matrix(1, size, patch), vector(0.0, size)
        self.positions = nn.Parameter(torch.randn(shape.position_side**2, size) * 0.1)
        self.qkv, self.qkv_bias = matrix(3 * n, size, size), vector(0.0, 3 * n, size)
        self.proj, self.proj_bias = matrix(n, size, size, 0.0), vector(0.0, n, size)
        self.fc1, self.fc1_bias = matrix(n, inner, size), vector(0.0, n, inner)
        self.fc2, self.fc2_bias = matrix(n, size, inner, 0.0), vector(0.0, n, size)
        self.norms, self.norm_biases = vector(1.0, 2 * n, size), vector(0.0, 2 * n, size)
        self.merger1, self.merger1_bias = matrix(mergers, square, square), vector(0.0, mergers, square)
        self.merger2, self.merger2_bias = matrix(mergers, out_size, square), vector(0.0, mergers, out_size)
        self.merger_norm, self.merger_norm_bias = vector(1.0, size), vector(0.0, size)
        self.deep_norms, self.deep_norm_biases = vector(1.0, mergers - 1, square), vector(0.0, mergers - 1, square)
        self.labels, self.label_bias = vector(0.0, sum(NUM_LABELS), out_size), vector(0.0, sum(NUM_LABELS))

        self._look_around()

    @torch.no_grad()
    def _look_around(self) -> None:
        """Sets the biases of queries and keys so that each head begins with the patches on one side of its own: near
        patches belong together, which a tower would take long to find out. Rotations make of equal vectors a product
        that is largest for equal places, and of one that is turned by some angle, for places so far apart."""
        shape = self.shape
        quarter = shape.hidden_size // shape.num_heads // 4
        biases = self.qkv_bias.view(shape.depth, 3, shape.num_heads, 2, 2, quarter)  # axis, then row or column
        for head in range(shape.num_heads):
            for axis, distance in enumerate((0.8 * (-1) ** head, 0.8 * (-1) ** (head // 2))):
                for number in range(2):  # the fastest turn, and the next, because the first has a short period
                    turn = distance * _THETA ** (-number / quarter)
                    biases[:, 0, head, 0, axis, number] = _NEARNESS * math.cos(turn)
                    biases[:, 0, head, 1, axis, number] = _NEARNESS * math.sin(turn)
                    biases[:, 1, head, 0, axis, number] = _NEARNESS

    def matrices(self) -> list[nn.Parameter]:
        """The stacked weight matrices, [count, out, in] each."""
        return [self.patches, self.qkv, self.proj, self.fc1, self.fc2, self.merger1, self.merger2]

    def others(self) -> list[nn.Parameter]:
        """Positions, norms, biases and what labels are told with."""
        muon = {id(each) for each in self.matrices()}
        return [each for each in self.parameters() if id(each) not in muon]

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x.to(self.dtype), weight.to(self.dtype), bias.to(self.dtype)).float()

    def _in_squares(self, patches: Tensor) -> Tensor:
        """[N, rows, columns, ...] of patches → [N, patches, ...], those of a square one after the other."""
        side = SETTINGS.merge_size
        parts = patches.unflatten(2, (-1, side)).unflatten(1, (-1, side))
        return parts.transpose(2, 3).flatten(1, 4)

    def _merge(self, index: int, x: Tensor, norm: Tensor, bias: Tensor) -> Tensor:
        x = F.layer_norm(x.reshape(-1, len(norm)), norm.shape, norm, bias, _EPS).view(-1, self.merger1.shape[-1])
        hidden = F.gelu(self._linear(x, self.merger1[index], self.merger1_bias[index]))
        return self._linear(hidden, self.merger2[index], self.merger2_bias[index])

    def forward(self, pixels: Tensor) -> list[Tensor]:
        """The embeddings [N * tokens, out] of pictures [N, height, width, 3] uint8, then those of ``deepstack``."""
        shape, side = self.shape, SETTINGS.patch_size
        count, rows, columns = len(pixels), pixels.shape[1] // side, pixels.shape[2] // side
        values = (pixels.float() / 127.5 - 1).view(count, rows, side, columns, side, 3).permute(0, 1, 3, 5, 2, 4)
        x = self._linear(self._in_squares(values.flatten(3)), self.patches[0], self.patch_bias)
        table = self.positions.T.view(1, -1, shape.position_side, shape.position_side)
        places = F.interpolate(table, (rows, columns), mode="bilinear", align_corners=True)
        x = x + self._in_squares(places.permute(0, 2, 3, 1))
        quarter = shape.hidden_size // shape.num_heads // 4
        frequencies = _THETA ** -(torch.arange(quarter, device=x.device) / quarter)
        grid = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), -1).to(x.device)
        angles = (self._in_squares(grid[None])[0].unsqueeze(2) * frequencies).flatten(1).repeat(count, 1)
        cos, sin = angles.cos(), angles.sin()
        deep: list[Tensor] = []
        for i in range(shape.depth):
            normed = F.layer_norm(x, x.shape[-1:], self.norms[2 * i], self.norm_biases[2 * i], _EPS)
            heads = [
                self._linear(normed, self.qkv[3 * i + part], self.qkv_bias[3 * i + part])
                .flatten(0, 1)
                .unflatten(-1, (shape.num_heads, -1))
                for part in range(3)
            ]
            heads[:2] = [rotate(each, cos, sin) for each in heads[:2]]
            q, k, v = (each.to(self.dtype).unflatten(0, (count, -1)).transpose(1, 2) for each in heads)
            attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + self._linear(attended, self.proj[i], self.proj_bias[i])
            normed = F.layer_norm(x, x.shape[-1:], self.norms[2 * i + 1], self.norm_biases[2 * i + 1], _EPS)
            inner = F.gelu(self._linear(normed, self.fc1[i], self.fc1_bias[i]), approximate="tanh")
            x = x + self._linear(inner, self.fc2[i], self.fc2_bias[i])
            if i in shape.deepstack:
                index = len(deep)
                deep.append(self._merge(index, x, self.deep_norms[index], self.deep_norm_biases[index]))
        return [self._merge(len(deep), x, self.merger_norm, self.merger_norm_bias), *deep]

    def label_loss(self, results: Sequence[Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
        """How badly each of the results tells labels [n, 2], a scalar; and for each row whether the embeddings have
        both as the most likely ones. Nothing else teaches a tower as fast, because each row has its own right
        answer."""
        losses, right = torch.zeros((), device=labels.device), torch.ones_like(labels[:, 0], dtype=torch.bool)
        for number, result in enumerate(results):
            found = F.linear(result, self.labels, self.label_bias).split(NUM_LABELS, 1)
            for logits, wanted in zip(found, labels.T, strict=True):
                weights = torch.where(wanted == 0, 0.3, 1.0)  # most squares are empty
                losses = losses + (F.cross_entropy(logits, wanted, reduction="none") * weights).sum() / weights.sum()
                right = right & (logits.argmax(1) == wanted) if number == 0 else right
        return losses / len(results), right


@dataclass(frozen=True, slots=True)
class PictureBatch:
    """`PictureRows` on the device: ids, targets int64 and weights fp32 [rows, length], axes [3, rows, length]; for each
    size of pictures the pixels, labels [N * tokens, 2] and places [N * tokens]."""

    ids: Tensor
    targets: Tensor
    weights: Tensor
    axes: Tensor
    pictures: tuple[tuple[Tensor, Tensor, Tensor], ...]


def pictures_to_device(pictures: Pictures, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pixels [N, height, width, 3] uint8 and labels [N * tokens, 2] int64."""
    return torch.from_numpy(pictures.pixels).to(device), torch.from_numpy(pictures.labels).to(device).flatten(0, 1)


def to_device(rows: PictureRows, device: torch.device) -> PictureBatch:
    """Shifts ids and marks into inputs and targets; only answers count."""
    tokens = torch.from_numpy(rows.ids.astype("int64")).to(device)
    weights = torch.from_numpy(rows.is_answer[:, 1:].astype("float32")).to(device)
    pictures = tuple(
        (*pictures_to_device(each, device), torch.from_numpy(places).to(device).flatten())
        for each, places in zip(rows.pictures, rows.places, strict=True)
    )
    axes = torch.from_numpy(rows.axes).to(device)
    return PictureBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), weights, axes, pictures)


class VisionModel(nn.Module):
    """Tower and text model, with the training loss."""

    def __init__(self, dtype: torch.dtype, compiled: bool, shape: Shape = TEXT_SHAPE) -> None:
        super().__init__()
        self.text = DemoModel(shape, dtype, compiled)
        self.tower = Tower(TowerShape(), shape.hidden_size, dtype)
        self.tower_rests = False
        """Whether the tower is computed without gradients."""

    def matrices(self) -> list[nn.Parameter]:
        """The stacked weight matrices, [count, out, in] each."""
        return self.text.matrices() + self.tower.matrices()

    def others(self) -> list[nn.Parameter]:
        """Embedding, positions, norms and biases."""
        return self.text.others() + self.tower.others()

    def rotary(self, axes: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [tokens, head_dim / 2] of positions ``axes`` [3, tokens], fp32."""
        half = self.text.shape.head_dim // 2
        axis = torch.zeros(half, dtype=torch.long, device=axes.device)
        for number in (1, 2):
            axis[number : 3 * SECTIONS[number] : 3] = number
        powers = torch.arange(half, device=axes.device) / half
        angles = axes.T[:, axis].float() * self.text.shape.rope_theta**-powers
        return angles.cos(), angles.sin()

    def hidden(self, batch: PictureBatch) -> tuple[Tensor, Tensor]:
        """The residual stream after the last layer, [rows * length, hidden] fp32, and the loss of labels."""
        x = self.text.embedded(batch.ids)
        deep = [torch.zeros_like(x) for _ in self.tower.shape.deepstack]
        named = torch.zeros((), device=x.device)
        for pixels, labels, places in batch.pictures:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.tower_rests):
                embeddings, *more = results = self.tower(pixels)
                named = named + self.tower.label_loss(results, labels)[0] / len(batch.pictures)
            x = x.index_copy(0, places, embeddings)
            deep = [each.index_copy(0, places, new) for each, new in zip(deep, more, strict=True)]
        return self.text.layers(x, self.rotary(batch.axes.flatten(1)), batch.ids.shape, deep)[0][-1], named

    def forward(self, batch: PictureBatch) -> tuple[Tensor, Tensor]:
        """Loss (a scalar) and hits [rows, length] bool."""
        hidden, named = self.hidden(batch)
        loss, hits = self.text.output(hidden, batch.targets, batch.weights)
        return loss + LABEL_WEIGHT * named, hits


@torch.no_grad()
def accuracy(
    model: VisionModel, encoder: FastEncoder, items: Sequence[PictureItem], num_rows: int, device: torch.device
) -> dict[str, float]:
    """The fraction of right answers by category, teacher-forced: each token is the most likely one."""
    right: dict[str, list[bool]] = {}
    for first in range(0, len(items), num_rows):
        part = items[first : first + num_rows]
        full = [*part, *[part[0]] * (num_rows - len(part))]  # of one size, for which there is compiled code
        batch = to_device(build_rows([item.conversation() for item in full], 192, encoder), device)
        _, hits = model(batch)
        for item, good in zip(part, (hits | (batch.weights == 0)).all(1).tolist(), strict=False):
            right.setdefault(item.item.category, []).append(good)
    return {category: sum(found) / len(found) for category, found in right.items()}
