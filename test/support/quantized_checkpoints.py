"""Makes checkpoints in the published quantised formats from plain ones, with the plain numbers for which they stand.

It is written only from the descriptions of the formats and uses nothing of the package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LINEARS += ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "wq_b", "wk")
LINEARS += ("qkv_proj", "gate_up_proj", ".w1", ".w2", ".w3")  # fused matrices, and those of some experts
LINEARS += ("z_proj", "o_gate")  # gates of MiniCPM-SALA
LINEARS += ("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "out_proj")  # of gated delta nets, without their gates
LINEARS += (".in_proj",)  # of Mamba2 and short convolutions
LINEARS += ("f_a_proj", "g_a_proj", "f_b_proj", "g_b_proj", "attn.b_proj")  # gates of Kimi delta attention
FP8 = torch.float8_e4m3fn
BLOCK = 128

Tensors = dict[str, torch.Tensor]
# A matrix [N, K] → the checkpoint's tensors by their suffixes, and the matrix for which they stand.
Quantiser = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Published:
    """A published format: its quantization_config, and the function that quantises a matrix."""

    config: Mapping[str, object]
    quantise: Quantiser


def write_published(
    plain: Path,
    folder: Path,
    published: Published,
    left_out: str = "",
    quantise: Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]] | None = None,
) -> None:
    """The checkpoint ``plain`` in the ``published`` format in ``folder``, and the numbers that it stands for, as a
    plain checkpoint, in ``folder / "dequantised"``. Modules whose whole names match ``left_out`` stay plain.
    ``quantise`` also gets a module's name; None: the format's function."""
    config = json.loads((plain / "config.json").read_text())
    tensors: Tensors = {}
    for path in sorted(plain.glob("*.safetensors")):
        tensors |= load_file(path)
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        is_linear = name.endswith(".weight") and module.endswith(LINEARS)
        if not is_linear or re.fullmatch(left_out, module):
            stored[name] = meant[name] = tensor
            continue
        matrix = tensor.float()
        parts, meant[name] = quantise(module, matrix) if quantise else published.quantise(matrix)
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


def _as_transformers(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """One number has no dimension in what transformers 5 writes, and other names."""
    parts, meant = _fp8_static(matrix)
    scales = {"weight_scale_inv": parts["weight_scale"], "activation_scale": parts["input_scale"]}
    return {"weight": parts["weight"]} | {name: scale.reshape(()) for name, scale in scales.items()}, meant


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
    activations = {"num_bits": 8, "type": weights["type"], **inputs} if inputs else None
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": activations}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


_FP8_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True}

FP8_FORMATS: dict[str, Published] = {
    "fp8-tensor": Published({"quant_method": "fp8", "activation_scheme": "dynamic"}, _fp8_tensor),
    "fp8-static": Published(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, _fp8_static
    ),
    "fp8-transformers": Published(
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "weight_block_size": None,
            "dequantize": False,
            "modules_to_not_convert": ["lm_head"],
        },
        _as_transformers,
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
            _FP8_WEIGHTS | {"strategy": "block", "block_structure": [BLOCK, BLOCK]}, dynamic=True, strategy="group"
        ),
        _fp8_blocks("weight_scale"),
    ),
}


def _int4(matrix: torch.Tensor, group: int, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Numbers [N, K] from 0 to 15, scales and zero points [N, K / group], and what they stand for; a group of -1 is a
    row."""
    group = matrix.shape[1] if group == -1 else group
    grouped = matrix.view(len(matrix), -1, group)
    if symmetric:
        scales = (grouped.abs().amax(2) / 7.5).half().float()
        zeros = torch.full_like(scales, 8)
    else:
        low, high = grouped.amin(2), grouped.amax(2)
        scales = ((high - low) / 15).half().float()
        zeros = (-low / scales).round().clamp(0, 15)
    numbers = ((grouped / scales[:, :, None]).round() + zeros[:, :, None]).clamp(0, 15)
    meant = (numbers - zeros[:, :, None]) * scales[:, :, None]
    return numbers.view_as(matrix).int(), scales, zeros.int(), meant.view_as(matrix)


def _words(numbers: torch.Tensor, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> torch.Tensor:
    """Eight numbers along a row in an int32; ``order``: which of them is in its first four bits, and so on."""
    words = torch.zeros(len(numbers), numbers.shape[1] // 8, dtype=torch.int64)
    for position, number in enumerate(order):
        words |= numbers[:, number::8].long() << 4 * position
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _awq(group: int, symmetric: bool, with_zeros: bool = True) -> Quantiser:
    def quantise(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        numbers, scales, zeros, meant = _int4(matrix, group, symmetric)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        parts = {"qweight": _words(numbers.t(), order), "scales": scales.t().half()}
        return parts | ({"qzeros": _words(zeros.t(), order)} if with_zeros else {}), meant

    return quantise


def _gptq(group: int, offset: int, symmetric: bool) -> Quantiser:
    def quantise(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        if not symmetric:
            matrix = matrix.clone()
            matrix[1::4].abs_()  # their zero points are 0, the next row's are not
        numbers, scales, zeros, meant = _int4(matrix, group, symmetric)
        return {
            "qweight": _words(numbers).t(),
            "qzeros": _words(zeros.t()) - offset * 0x11111111,  # a borrow goes to the next zero point, as in GPTQModel
            "scales": scales.t().half(),
            "g_idx": (torch.arange(matrix.shape[1]) // (group if group > 0 else matrix.shape[1])).int(),
        }, meant

    return quantise


def _compressed_int4(group: int, symmetric: bool) -> Quantiser:
    def quantise(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        numbers, scales, zeros, meant = _int4(matrix, group, symmetric)
        parts = {"weight_packed": _words(numbers), "weight_scale": scales, "weight_shape": torch.tensor(matrix.shape)}
        return parts | ({} if symmetric else {"weight_zero_point": _words(zeros.t()).t()}), meant

    return quantise


_INT4_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group"}

# GPTQ's first version, in which zero points are stored less one.
GPTQ_ASYMMETRIC = Published(
    {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
    _gptq(32, 1, symmetric=False),
)

INT4_FORMATS: dict[str, Published] = {
    "awq": Published(
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        _awq(128, symmetric=False),
    ),
    "awq-rows": Published(
        {"quant_method": "awq", "bits": 4, "group_size": -1, "zero_point": True}, _awq(-1, symmetric=False)
    ),
    "awq-symmetric": Published(
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": False},
        _awq(64, symmetric=True, with_zeros=False),
    ),
    "gptq-rows-act-order": Published(  # all columns are of one group, so their order makes no difference
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True, "sym": True},
        _gptq(-1, 1, symmetric=True),
    ),
    "gptq-act-order-in-place": Published(  # as static groups leave it
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "static_groups": True},
        _gptq(32, 1, symmetric=False),
    ),
    "gptq": Published(
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True},
        _gptq(64, 1, symmetric=True),
    ),
    "gptq-v2": Published(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2", "sym": False},
        _gptq(32, 0, symmetric=False),
    ),
    "compressed-tensors-int4": Published(
        _compressed(_INT4_WEIGHTS | {"group_size": 128, "symmetric": True}) | {"format": "pack-quantized"},
        _compressed_int4(128, symmetric=True),
    ),
    "compressed-tensors-int4-channel": Published(
        _compressed({"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True}),
        _compressed_int4(-1, symmetric=True),
    ),
    "compressed-tensors-int4-zeros": Published(
        _compressed(_INT4_WEIGHTS | {"group_size": 32, "symmetric": False}), _compressed_int4(32, symmetric=False)
    ),
}


def _int8(matrix: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers [N, K], scales [N, K / group], and what they stand for."""
    grouped = matrix.view(len(matrix), -1, group)
    scales = (grouped.abs().amax(2) / 127).bfloat16()
    numbers = (grouped / scales.float()[:, :, None]).round().clamp(-128, 127)
    return (numbers.view_as(matrix).to(torch.int8), scales, (numbers * scales.float()[:, :, None]).view_as(matrix))


def _int8_rows(with_input: bool) -> Quantiser:
    def quantise(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        numbers, scales, meant = _int8(matrix, matrix.shape[1])
        unused = {"input_scale": torch.ones(1), "input_zero_point": torch.ones(1, dtype=torch.int8)}
        zeros = {"weight_zero_point": torch.zeros(len(matrix), 1, dtype=torch.int8)}
        return {"weight": numbers, "weight_scale": scales} | (unused | zeros if with_input else {}), meant

    return quantise


def _int8_packed(group: int) -> Quantiser:
    def quantise(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        numbers, scales, meant = _int8(matrix, group if group > 0 else matrix.shape[1])
        words = (numbers.long() + 128).view(len(matrix), -1, 4)
        words = (words << torch.tensor([0, 8, 16, 24])).sum(2)
        words = torch.where(words >= 2**31, words - 2**32, words).int()
        return {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor(matrix.shape)}, meant

    return quantise


_INT8_WEIGHTS: dict[str, object] = {"num_bits": 8, "type": "int", "symmetric": True}
_IN_GROUPS = {"strategy": "group", "group_size": 128}

INT8_FORMATS: dict[str, Published] = {
    "w8a8": Published(
        _compressed(_INT8_WEIGHTS | {"strategy": "channel"}, dynamic=True, strategy="token")
        | {"format": "int-quantized"},
        _int8_rows(with_input=False),
    ),
    "w8a8-static": Published(
        _compressed(_INT8_WEIGHTS | {"strategy": "channel"}, dynamic=False, strategy="tensor"),
        _int8_rows(with_input=True),
    ),
    "w8a16": Published(
        _compressed(_INT8_WEIGHTS | {"strategy": "channel"}) | {"format": "pack-quantized"}, _int8_packed(-1)
    ),
    "w8a16-groups": Published(_compressed(_INT8_WEIGHTS | _IN_GROUPS), _int8_packed(128)),
}
