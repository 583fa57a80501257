"""Checkpoints in the published quantised formats, made of plain ones, beside the plain numbers that they stand for.

Written from the formats' descriptions alone: nothing of the package is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FP8 = torch.float8_e4m3fn
BLOCK = 128

Tensors = dict[str, torch.Tensor]
# A matrix [N, K] → the checkpoint's tensors by their suffixes, and the matrix that they stand for.
Quantiser = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Published:
    """A format as tools publish it: its quantization_config, and what becomes of a matrix."""

    config: Mapping[str, object]
    quantise: Quantiser


def write_published(plain: Path, folder: Path, published: Published) -> None:
    """The checkpoint ``plain`` in the ``published`` format in ``folder``, and the numbers that it stands for, as a
    plain checkpoint, in ``folder / "dequantised"``."""
    config = json.loads((plain / "config.json").read_text())
    tensors: Tensors = {}
    for path in sorted(plain.glob("*.safetensors")):
        tensors |= load_file(path)
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if not (name.endswith(".weight") and module.endswith(LINEARS)):
            stored[name] = meant[name] = tensor
            continue
        parts, meant[name] = published.quantise(tensor.float())
        stored |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
    for where, entries, values in (
        (folder, {"quantization_config": dict(published.config)}, stored),
        (folder / "dequantised", {}, meant),
    ):
        where.mkdir(parents=True, exist_ok=True)
        (where / "config.json").write_text(json.dumps(config | entries))
        save_file({name: value.contiguous() for name, value in values.items()}, where / "model.safetensors")


def _to_fp8(matrix: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (matrix / scale).clamp(-448, 448).to(FP8)


def _fp8_tensor(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = matrix.abs().max() / 448
    numbers = _to_fp8(matrix, scale)
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale


def _fp8_channel(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = (matrix.abs().amax(1, keepdim=True) / 448).bfloat16()
    numbers = _to_fp8(matrix, scale.float())
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale.float()


def _fp8_static(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    parts, meant = _fp8_tensor(matrix)
    return {**parts, "input_scale": torch.tensor([0.25 + len(matrix) / 1024])}, meant


def _fp8_blocks(suffix: str) -> Quantiser:
    def quantise(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        num_rows, num_columns = matrix.shape
        scales = torch.empty(-(-num_rows // BLOCK), -(-num_columns // BLOCK))
        numbers, meant = torch.empty(matrix.shape, dtype=FP8), torch.empty_like(matrix)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
                scales[i, j] = matrix[block].abs().max() / 448
                numbers[block] = _to_fp8(matrix[block], scales[i, j])
                meant[block] = numbers[block].float() * scales[i, j]
        return {"weight": numbers, suffix: scales}, meant

    return quantise


def _compressed(weights: Mapping[str, object], **inputs: object) -> dict[str, object]:
    activations = {"num_bits": 8, "type": "float", **inputs} if inputs else None
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": activations}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


_FP8_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True}

FP8_FORMATS: dict[str, Published] = {
    "fp8-tensor": Published({"quant_method": "fp8", "activation_scheme": "dynamic"}, _fp8_tensor),
    "fp8-static": Published(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, _fp8_static
    ),
    "fp8-blocks": Published(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
        },
        _fp8_blocks("weight_scale_inv"),
    ),
    "compressed-tensors-tensor": Published(
        _compressed(_FP8_WEIGHTS | {"strategy": "tensor"}, dynamic=False, strategy="tensor"), _fp8_static
    ),
    "compressed-tensors-channel": Published(
        _compressed(_FP8_WEIGHTS | {"strategy": "channel"}, dynamic=True, strategy="token"), _fp8_channel
    ),
    "compressed-tensors-blocks": Published(
        _compressed(
            _FP8_WEIGHTS | {"strategy": "block", "block_structure": [BLOCK, BLOCK]},
            dynamic=True,
            strategy="group",
        ),
        _fp8_blocks("weight_scale"),
    ),
}
