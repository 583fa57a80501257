"""The activations of gated MLPs (arXiv:2002.05202) in Triton, for when they are not fused with the projection."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from fenceline.layers.kernels.base import ACTIVATIONS, RELU2, SILU
from fenceline.memory_order.triton_launcher import KernelVariant

_SILU, _GELU_TANH, _GELU, _, _RELU2 = (tl.constexpr(number) for number in range(len(ACTIVATIONS)))
_BLOCK = 1024
_ELEMENTS_A_THREAD = 8


def silu_and_mul(gate_up: torch.Tensor, activation: str = SILU, pdl: bool = False) -> torch.Tensor:
    """gate_up [T, 2 I], gate then up → silu(gate) * up, a new tensor [T, I] in its dtype, computed in float32, or with
    another ``activation``: see ``LayerKernels.activate``. gate_up is contiguous, in bfloat16, float16 or float32. Runs
    on the current stream, without host synchronisation. ``pdl``: see ``rms_norm``."""
    num_rows, width = gate_up.shape
    assert gate_up.is_contiguous() and (width % 2 == 0 or activation == RELU2)
    size = width if activation == RELU2 else width // 2
    out = gate_up.new_empty(num_rows, size)
    if num_rows == 0:
        return out
    variant = _variant(size, ACTIVATIONS.index(activation), pdl)
    variant.launch((num_rows * -(-size // variant.constants["BLOCK"]),), (gate_up, out))
    return out


@cache
def _variant(size: int, activation: int, pdl: bool) -> KernelVariant:
    block = min(_BLOCK, triton.next_power_of_2(size))
    constants = {"SIZE": size, "BLOCK": block, "ACTIVATION": activation, "PDL": pdl}
    return KernelVariant(_silu_and_mul_kernel, constants, max(1, block // (32 * _ELEMENTS_A_THREAD)), pdl)


@triton.jit
def _silu_and_mul_kernel(
    gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr
):
    num_blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    columns = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    live = columns < SIZE
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    gates = gate_up + row * (SIZE if ACTIVATION == _RELU2 else 2 * SIZE) + columns
    gate = tl.load(gates, mask=live, other=0.0).to(tl.float32)
    if ACTIVATION == _RELU2:
        up = gate
    else:
        up = tl.load(gates + SIZE, mask=live, other=0.0).to(tl.float32)
    if ACTIVATION == _GELU_TANH:  # (1 + tanh(y)) / 2 is the sigmoid of 2 y
        share = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif ACTIVATION == _GELU:
        share = 0.5 + 0.5 * tl.erf(gate * 0.7071067811865476)
    elif ACTIVATION == _SILU:
        share = tl.sigmoid(gate)
    else:
        share = (gate > 0.0).to(tl.float32)
    product = gate * share * up
    tl.store(out + row * SIZE + columns, product.to(out.dtype.element_ty), mask=live)
