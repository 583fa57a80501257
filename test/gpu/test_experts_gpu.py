"""Products of a mixture of experts on a GPU: against torch's, few and many tokens, captured while routing changes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from routed_tokens import compare, compare_routes, routed

from fenceline.layers.cuda_four_bit import four_bits_agree, product_by_parts
from fenceline.layers.kernels.base import LayerKernels
from fenceline.layers.kernels.triton.grouped_gemm import combine_experts, grouped_product
from fenceline.layers.kernels.triton.routing import router_logits

pytestmark = pytest.mark.gpu

ALL = list(range(128))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 3, 32, 700])
def test_products_equal_torchs(num_tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        compare(routed(num_tokens, 8, ALL, 128, num_padded=num_tokens // 3), 96, 256, dtype)


@pytest.mark.parametrize("hit", [[5], [0, 127], [3, 4, 5, 6, 7, 8, 9, 10]], ids=str)
def test_uneven_routing(hit: list[int]) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        compare(routed(150, len(hit), hit, 128), 96, 256, torch.bfloat16)


@pytest.mark.parametrize("num_tokens", [1, 3, 32, 700])
def test_biases_and_a_clamped_swiglu(num_tokens: int) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        compare(routed(num_tokens, 4, ALL, 128), 90, 2880, torch.bfloat16, limit=0.9)


@pytest.mark.parametrize("one_scale", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 3, 32, 700])
def test_experts_in_fp8(num_tokens: int, one_scale: bool) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no instructions for FP8")
    torch.manual_seed(0)
    with torch.device("cuda"):
        groups = (lambda k: 1) if one_scale else (lambda k: -(-k // 128))
        compare(routed(num_tokens, 8, ALL, 128), 768, 2048, torch.bfloat16, groups=groups)


@pytest.mark.parametrize(("group", "has_zeros"), [(32, True), (64, True), (128, True), (32, False)])
@pytest.mark.parametrize("num_tokens", [1, 3, 32, 700])
def test_experts_of_four_bits(num_tokens: int, group: int, has_zeros: bool) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        sent = routed(num_tokens, 8, ALL, 128, num_padded=num_tokens // 3)
        compare(sent, 768, 2048, torch.bfloat16, four_bits=group, has_zeros=has_zeros)
        if not has_zeros:
            compare(routed(num_tokens, 4, ALL, 128), 2880, 2880, torch.bfloat16, 0.9, None, 32, has_zeros)


@pytest.mark.parametrize(("group", "has_zeros"), [(32, True), (64, True), (128, True), (32, False)])
def test_the_trial_of_four_bits_accepts_the_products(group: int, has_zeros: bool) -> None:
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    product = partial(grouped_product, pdl=pdl)
    assert four_bits_agree(torch.device("cuda"), product, group, has_zeros)


@pytest.mark.parametrize("has_zeros", [True, False])
def test_a_graph_of_what_takes_the_place_of_packed_products(has_zeros: bool) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        weight = torch.randint(0, 256, (16, 96, 64), dtype=torch.uint8)
        zeros = torch.randint(0, 16, (16, 96, 4), dtype=torch.uint8) if has_zeros else None
        scales = torch.rand(16, 96, 4) / 90 if has_zeros else torch.randint(119, 125, (16, 96, 4)).byte()
        x, routing = torch.randn(24, 128).bfloat16(), routed(24, 4, ALL[:16], 16, 5)
        operands = (x, weight, routing, True, None, 0.0, scales, zeros)
        product_by_parts(grouped_product, *operands)  # compiled before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = product_by_parts(grouped_product, *operands)
        graph.replay()
        live = routing.order[: routing.ends[-1]]
        expected = LayerKernels().grouped_product(*operands)
        torch.testing.assert_close(y[live], expected[live], atol=0.05, rtol=0.05)


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 32, 33, 256, 8192])
def test_routes_equal_torchs(num_tokens: int) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        compare_routes(num_tokens, 128)
        compare_routes(num_tokens, 60)
        compare_routes(num_tokens, 256, [(True, True, True)], groups=(8, 4, 2))  # DeepSeek-V3
        compare_routes(num_tokens, 160, [(False, False, False)], groups=(8, 3, 1))  # DeepSeek-V2


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 40])
def test_logits_equal_torchs(num_tokens: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(num_tokens, 2048, device="cuda").bfloat16()
    weight = torch.randn(128, 2048, device="cuda") / 45
    logits = router_logits(x, weight)
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().T, atol=1e-3, rtol=1e-3)


def test_a_graph_follows_the_routing() -> None:
    """Captured for one routing, replayed for others: shapes do not depend on it and nothing is left of the last one."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        gate_up = (torch.randn(128, 128, 256) / 16).bfloat16()
        x = torch.randn(24, 256).bfloat16()
        held = routed(24, 8, ALL, 128)
        gated = grouped_product(x, gate_up, held, gated=True)  # compiled before the capture
        combine_experts(gated, held)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = combine_experts(grouped_product(x, gate_up, held, gated=True), held)
        for hit, num_padded in ((ALL, 0), ([7, 8, 9, 10, 11, 12, 13, 14], 5), (ALL, 24), (ALL[64:], 1)):
            routing = routed(24, 8, hit, 128, num_padded)
            for name in ("ids", "weights", "order", "ends"):
                getattr(held, name).copy_(getattr(routing, name))
            graph.replay()
            torch_kernels = LayerKernels()
            products = torch_kernels.grouped_product(x, gate_up, routing, gated=True)
            expected = torch_kernels.combine_experts(products, routing)
            torch.testing.assert_close(y, expected, atol=0.05, rtol=0.05)
