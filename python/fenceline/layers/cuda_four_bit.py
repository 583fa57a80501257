"""Experts of four bits on an NVIDIA GPU: a trial at start of the products that read them as they are stored, and the
slower product that is used if the trial fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from triton.errors import TritonError

from fenceline.layers.kernels.base import LayerKernels, Routing
from fenceline.layers.kernels.four_bit import four_bit_numbers
from fenceline.layers.kernels.triton.grouped_gemm import GroupedConfig, grouped_config

logger = logging.getLogger(__name__)

_TOLERANCE = 0.02  # of the trial, relative to the result's norm: rounding to bfloat16 makes an error of 0.004
_PART_BYTES = 48 << 20  # of plain float32 numbers at a time; converting them needs six times as much memory

# See ``grouped_gemm.grouped_product``.
GroupedProduct = Callable[..., torch.Tensor]


def four_bits_agree(device: torch.device, product: GroupedProduct, group: int, has_zeros: bool) -> bool:
    """Whether ``product`` runs on ``device`` and is right for four-bit numbers in groups of ``group``, for few pairs
    and for many with every configuration that it chooses, and with gate, biases and a limit. If not, this is logged."""
    name = f"{'int4' if has_zeros else 'MXFP4'} in groups of {group}"
    generator = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, device=device, generator=generator)
    bits = partial(torch.randint, device=device, generator=generator, dtype=torch.uint8)
    # K takes more than one block of 1,024 inputs, and the last block is not full.
    num_groups = 1024 // group + 1
    num_experts, size, k, top_k = 4, 40, num_groups * group, 2
    weight = bits(0, 256, (num_experts, 2 * size, k // 2))
    scales = zeros = None
    if has_zeros:
        scales = (1 + draw(num_experts, 2 * size, num_groups).abs()) / k**0.5 / 4
        zeros = bits(0, 16, (num_experts, 2 * size, num_groups))
    else:
        scales = bits(118, 124, (num_experts, 2 * size, num_groups))
    bias = draw(num_experts, 2 * size).bfloat16()
    # One expert has no tokens, and some tokens have no expert.
    cuts: list[tuple[int, GroupedConfig | None]] = [(5, None)]
    cuts += [(50, grouped_config(pairs * num_experts, num_experts, 2)) for pairs in (16, 64, 128)]
    for num_tokens, cut in cuts:
        x = draw(num_tokens, k).bfloat16()
        ids = torch.rand(num_tokens, num_experts - 1, device=device, generator=generator).argsort(1)[:, :top_k]
        ids[-2:] = num_experts
        routing = Routing.group(ids, torch.ones_like(ids, dtype=torch.float32), num_experts)
        live = routing.order[: int(routing.ends[-1])]
        for given in ({"gated": True}, {"bias": bias}, {"gated": True, "bias": bias, "limit": 2.0}):
            numbers = {"scales": scales, "zeros": zeros}
            # The reference has the same inputs in float32.
            wide = {key: value.float() if key == "bias" else value for key, value in given.items()}  # type: ignore[attr-defined]
            want = LayerKernels().grouped_product(x.float(), weight, routing, **wide, **numbers)[live]  # type: ignore[arg-type]
            try:
                got = product(x, weight, routing, config=cut, **given, **numbers)[live].float()
            except (RuntimeError, TritonError) as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                logger.warning(
                    "grouped products of %s cannot be used here (%s); experts are dequantised for each product, which"
                    " is slow", name, reason,
                )  # fmt: skip
                return False
            error_size = ((got - want).norm() / want.norm()).item()
            if not error_size < _TOLERANCE:
                logger.warning(
                    "grouped products of %s are wrong here by %.3f of the result; experts are dequantised for each"
                    " product, which is slow", name, error_size,
                )  # fmt: skip
                return False
    return True


def product_by_parts(
    plain_product: GroupedProduct,
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    gated: bool,
    bias: torch.Tensor | None,
    limit: float,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
) -> torch.Tensor:
    """The grouped product of four-bit numbers, computed by ``plain_product``, which takes plain matrices. A few experts
    at a time are dequantised, whether tokens go to them or not. Rows of padded tokens are zero. It may be captured."""
    num_experts, width, _ = weight.shape
    each = max(1, _PART_BYTES // (4 * width * x.shape[1]))
    out = x.new_zeros(len(routing.order), width // 2 if gated else width)
    for first in range(0, num_experts, each):
        own = slice(first, min(first + each, num_experts))
        part = routing.of_experts(range(own.start, own.stop))
        plain = four_bit_numbers(weight[own], scales[own], None if zeros is None else zeros[own], x.dtype)
        own_bias = None if bias is None else bias[own]
        product = plain_product(x, plain, part, gated, bias=own_bias, limit=limit)
        is_own = part.ids.flatten() < own.stop - own.start
        out = torch.where(is_own.unsqueeze(1), product, out)
    return out
