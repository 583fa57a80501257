"""Where a router might send tokens, and our products of experts compared with torch's."""

from __future__ import annotations

import torch

from fenceline.layers.kernels.base import Routing, TorchLayerKernels


def routed(num_tokens: int, top_k: int, hit: list[int], num_experts: int, num_padded: int = 0) -> Routing:
    """Random experts among ``hit``; the last ``num_padded`` tokens go to none."""
    ids = torch.stack([torch.tensor(hit)[torch.randperm(len(hit))[:top_k]] for _ in range(num_tokens)])
    ids[num_tokens - num_padded :] = num_experts
    return Routing.group(ids, torch.rand(num_tokens, top_k), num_experts)


def compare(routing: Routing, size: int, k: int, dtype: torch.dtype = torch.float32) -> None:
    """Both products of a mixture, from tokens to the sum, on the default device. Experts that no token hits are full of
    NaN."""
    from fenceline.layers.kernels import grouped_gemm

    torch_kernels, num_experts = TorchLayerKernels(), len(routing.ends)
    missed = torch.ones(num_experts, dtype=torch.bool)
    missed[routing.ids[routing.ids < num_experts]] = False
    gate_up, down = (
        (torch.randn(num_experts, 2 * size, k) / k**0.5).to(dtype),
        (torch.randn(num_experts, k, size) / size**0.5).to(dtype),
    )
    gate_up[missed], down[missed] = float("nan"), float("nan")
    x = torch.randn(len(routing.ids), k).to(dtype)
    live = routing.order[: routing.ends[-1]]
    tolerance = 1e-4 if dtype is torch.float32 else 0.05
    for cut in (grouped_gemm.GroupedConfig(16, 16, 32, 4, 1), None):
        expected = torch_kernels.grouped_product(x, gate_up, routing, gated=True)
        gated = grouped_gemm.grouped_product(x, gate_up, routing, True, cut)
        torch.testing.assert_close(gated[live], expected[live], atol=tolerance, rtol=tolerance)
        products = torch_kernels.grouped_product(expected, down, routing)
        ours = grouped_gemm.grouped_product(expected, down, routing, False, cut)
        torch.testing.assert_close(ours[live], products[live], atol=tolerance, rtol=tolerance)
        both = [
            torch_kernels.combine_experts(products, routing),
            grouped_gemm.combine_experts(products, routing),
        ]
        torch.testing.assert_close(both[0], both[1], atol=tolerance, rtol=tolerance)
        assert both[1].isfinite().all()
