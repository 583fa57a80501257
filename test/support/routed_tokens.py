"""Random routings of tokens to experts, and comparisons of our products of experts with torch's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from fenceline.config.families import ExpertsConfig
from fenceline.layers.kernels.base import MOST_JOINED, LayerKernels, Routing


def routed(num_tokens: int, top_k: int, hit: list[int], num_experts: int, num_padded: int = 0) -> Routing:
    """A routing to random experts among ``hit``; the last ``num_padded`` tokens go to none."""
    ids = torch.stack([torch.tensor(hit)[torch.randperm(len(hit))[:top_k]] for _ in range(num_tokens)])
    ids[num_tokens - num_padded :] = num_experts
    return Routing.group(ids, torch.rand(num_tokens, top_k), num_experts)


def compare(
    routing: Routing,
    size: int,
    k: int,
    dtype: torch.dtype = torch.float32,
    limit: float = 0.0,
    groups: Callable[[int], int] | None = None,
    four_bits: int = 0,
    has_zeros: bool = True,
) -> None:
    """Compare both products of a mixture, from tokens to the sum, on the default device. Experts without tokens are
    full of NaN. With a ``limit`` they have biases and a clamped SwiGLU. ``groups``: they are in FP8, and it returns the
    number of scales for a row's length. ``four_bits``: they are int4, or MXFP4 without ``has_zeros``, in groups of this
    size."""
    from fenceline.layers.kernels.triton import grouped_gemm

    torch_kernels, num_experts = LayerKernels(), len(routing.ends)
    missed = torch.ones(num_experts, dtype=torch.bool)
    missed[routing.ids[routing.ids < num_experts]] = False
    gate_up, down = (
        (torch.randn(num_experts, 2 * size, k) / k**0.5).to(dtype),
        (torch.randn(num_experts, k, size) / size**0.5).to(dtype),
    )
    gate_up[missed], down[missed] = float("nan"), float("nan")
    gate_up_bias = down_bias = None
    if limit:
        gate_up_bias, down_bias = (torch.randn(w.shape[:2]).to(dtype) for w in (gate_up, down))
        gate_up_bias[missed], down_bias[missed] = float("nan"), float("nan")
    first, second = {"bias": gate_up_bias, "limit": limit}, {"bias": down_bias}
    if groups is not None:
        for given, matrix in ((first, gate_up), (second, down)):
            scales = torch.rand(*matrix.shape[:2], groups(matrix.shape[2])) + 0.5
            scales[missed] = float("nan")
            given["scales"] = scales
        gate_up, down = gate_up.to(torch.float8_e4m3fn), down.to(torch.float8_e4m3fn)
    if four_bits:
        packed = []
        for given, matrix in ((first, gate_up), (second, down)):
            shape = num_experts, matrix.shape[1], matrix.shape[2] // four_bits
            packed.append(torch.randint(0, 256, (*shape[:2], matrix.shape[2] // 2), dtype=torch.uint8))
            if has_zeros:
                given["zeros"] = torch.randint(0, 16, shape, dtype=torch.uint8)
                given["scales"] = (torch.rand(shape) + 0.5) / 8 / matrix.shape[2] ** 0.5
                given["scales"][missed] = float("nan")
            else:
                given["scales"] = torch.randint(119, 125, shape, dtype=torch.uint8)
                given["scales"][missed] = 255  # infinity
        gate_up, down = packed
    x = torch.randn(len(routing.ids), k).to(dtype)
    live = routing.order[: routing.ends[-1]]
    tolerance = 1e-4 if dtype is torch.float32 else 0.05
    block_k = 64 if four_bits == 32 else 32  # a block has several groups, or a part of one
    for cut in (grouped_gemm.GroupedConfig(16, 16, block_k, 4, 1), None):
        expected = torch_kernels.grouped_product(x, gate_up, routing, gated=True, **first)
        gated = grouped_gemm.grouped_product(x, gate_up, routing, True, cut, **first)
        torch.testing.assert_close(gated[live], expected[live], atol=tolerance, rtol=tolerance)
        products = torch_kernels.grouped_product(expected, down, routing, **second)
        ours = grouped_gemm.grouped_product(expected, down, routing, False, cut, **second)
        torch.testing.assert_close(ours[live], products[live], atol=tolerance, rtol=tolerance)
        both = [torch_kernels.combine_experts(products, routing), grouped_gemm.combine_experts(products, routing)]
        torch.testing.assert_close(both[0], both[1], atol=tolerance, rtol=tolerance)
        assert both[1].isfinite().all()


ALL_SCORES = tuple(itertools.product((False, True), repeat=3))


def compare_routes(
    num_tokens: int,
    num_experts: int,
    scores: Sequence[tuple[bool, bool, bool]] = ALL_SCORES,
    groups: tuple[int, int, int] = (1, 1, 2),
    ties: bool = False,
) -> None:
    """Compare our router's kernels with torch's operators, on the default device, with some padded tokens. ``scores``:
    whether they are sigmoids, renormalised and corrected. ``groups``: their number, how many of them are open, and by
    how many experts a group is scored. ``ties``: many experts have the same score."""
    from fenceline.layers.kernels.triton import routing

    logits, slots = torch.randn(num_tokens, num_experts), torch.randint(9, (num_tokens,))
    if ties:
        logits = (logits > 0).float()
    for sigmoid, renormalise, corrected in scores:
        experts = ExpertsConfig(
            num_experts=num_experts, top_k=3, intermediate_size=1, renormalise=renormalise, sigmoid=sigmoid,
            scaling=2.5, num_groups=groups[0], top_groups=groups[1], scored_by=groups[2],
        )  # fmt: skip
        correction = torch.randn(num_experts) if corrected else None
        for joined in (False, True)[: 1 + (num_tokens <= MOST_JOINED)]:
            expected = LayerKernels().route(logits, correction, slots, 3, experts, joined)
            ours = routing.route(logits, correction, slots, 3, experts, joined)
            assert torch.equal(ours.ids, expected.ids) and torch.equal(ours.ends, expected.ends)
            torch.testing.assert_close(ours.weights, expected.weights, atol=1e-6, rtol=1e-5)
            live = int(expected.ends[-1])
            assert torch.equal(ours.order[:live], expected.order[:live])
            assert torch.equal(ours.order[live:].sort().values, expected.order[live:].sort().values)
    lost = torch.full_like(logits, float("nan"))  # logits of tokens whose hidden states are NaN
    assert (routing.route(lost, None, slots, 3, experts).ids <= num_experts).all()
