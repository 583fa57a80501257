"""Products of few rows on a GPU: against float32, bit-reproducible, rows independent, and ordered behind each other."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fenceline.layers.context import Shard, make_layer_context, torch_context
from fenceline.layers.cuda_layers import CudaProduct
from fenceline.layers.kernels.triton.skinny_gemm import Fusion, TritonConfig, skinny_linear
from fenceline.layers.skinny_table import CudaConfig

pytestmark = pytest.mark.gpu

FUSIONS = ("plain", "norm", "gated", "residual")
SHAPES = ((1024, 1024), (1000, 1032), (24, 72), (6144, 4096))  # weight rows and K: even, ragged, tiny, real
CUTS = (
    CudaConfig(),
    CudaConfig(tiles=2, warps_n=2, warps_k=4, depth=6, prefetch_bytes=512),
    CudaConfig(tiles=2, warps_k=16, depth=2, num_ctas=4),
    CudaConfig(tiles=6, warps_k=4, depth=4, pdl=False, num_ctas=100),
    CudaConfig(tiles=2, warps_k=4, cluster=4, prefetch_bytes=4096),
    CudaConfig(tiles=4, warps_n=2, warps_k=2, cluster=2, num_ctas=6, depth=2),
    CudaConfig(tiles=3, warps_n=4, warps_k=1, depth=3),
)
TRITON_CUTS = (
    TritonConfig(4, 512, 4),
    TritonConfig(16, 128, 4, 4),
    TritonConfig(32, 64, 8, 3, launch_pdl=False),
    TritonConfig(64, 128, 4, 3),
    TritonConfig(128, 64, 8, 4),
)


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def make_fusion(kind: str, rows: int, weight_rows: int, k: int) -> Fusion:
    bias = random(weight_rows) if weight_rows % 16 else None
    norm = random(k) if kind in ("norm", "gated") else None
    return Fusion(norm, 1e-6, bias, kind == "gated", random(rows, weight_rows) if kind == "residual" else None)


def reference(x: torch.Tensor, weight: torch.Tensor, fusion: Fusion) -> torch.Tensor:
    wide = x.double()
    if fusion.norm_weight is not None:
        wide = F.rms_norm(wide, x.shape[1:], fusion.norm_weight.double(), fusion.eps)
    y = F.linear(wide, weight.double(), None if fusion.bias is None else fusion.bias.double())
    if fusion.gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if fusion.residual is None else y + fusion.residual.double()


def own_residual(fusion: Fusion) -> Fusion:
    return replace(fusion, residual=None if fusion.residual is None else fusion.residual.clone())


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_cuda_agrees_with_float64(product: CudaProduct, cut: CudaConfig) -> None:
    torch.manual_seed(0)
    for (weight_rows, k), rows, kind in itertools.product(SHAPES, (1, 3, 8, 9, 16), FUSIONS):
        if (kind == "gated" and cut.tiles * cut.warps_n % 2) or (cut.tiles == 3 and rows > 8):
            continue
        x, weight = random(rows, k), random(weight_rows, k, scale=k**-0.5)
        fusion = make_fusion(kind, rows, weight_rows, k)
        want = reference(x, weight, fusion)
        out = torch.full_like(want, float("nan"), dtype=torch.bfloat16) if fusion.residual is None else None
        got = product(x, weight, cut, own_residual(fusion), out)
        error = ((got.double() - want).norm() / want.norm()).item()
        assert error < 6e-3, (weight_rows, k, rows, kind, error)
        assert torch.equal(got, product(x, weight, cut, own_residual(fusion), None)), (weight_rows, k, rows, kind)
        others = torch.cat([random(rows - 1, k), x[-1:]])
        again = product(others, weight, cut, own_residual(fusion), None)
        assert torch.equal(again[-1], got[-1]), (weight_rows, k, rows, kind)


@pytest.mark.parametrize("cut", TRITON_CUTS, ids=str)
def test_triton_agrees_with_float64(cut: TritonConfig) -> None:
    torch.manual_seed(0)
    for (weight_rows, k), rows, kind in itertools.product(((1000, 1032), (1024, 1024)), (1, 5, 32, 100), FUSIONS):
        if rows > 1 and cut.block_n < 16:
            continue
        x, weight = random(rows, k), random(weight_rows, k, scale=k**-0.5)
        fusion = make_fusion(kind, rows, weight_rows, k)
        want = reference(x, weight, fusion)
        got = skinny_linear(x, weight, cut, own_residual(fusion))
        error = ((got.double() - want).norm() / want.norm()).item()
        assert error < 6e-3, (weight_rows, k, rows, kind, error)


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_a_chain_of_early_starts_reads_what_was_written(product: CudaProduct, rows: int) -> None:
    """Each kernel starts while the preceding one still runs: with a wait missing it would read old data."""
    torch.manual_seed(0)
    hidden, size, layers = 1024, 3072, 12
    norm = 1 + 0.1 * random(hidden)
    ups = [random(2 * size, hidden, scale=hidden**-0.5) for _ in range(layers)]
    downs = [random(hidden, size, scale=size**-0.5) for _ in range(layers)]
    x = random(rows, hidden)
    gated = torch.empty(rows, size, dtype=torch.bfloat16, device="cuda")

    def chain(residual: torch.Tensor, cut: CudaConfig) -> None:
        for up, down in zip(ups, downs, strict=True):
            product(residual, up, cut, Fusion(norm, 1e-6, gated=True), gated)
            product(gated, down, cut, Fusion(residual=residual), None)

    for cut in (
        CudaConfig(depth=2),
        CudaConfig(tiles=2, depth=4, prefetch_bytes=4096),
        CudaConfig(tiles=2, warps_k=4, cluster=2),
    ):
        want = x.clone()
        chain(want, replace(cut, pdl=False))
        residual = torch.empty_like(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            residual.copy_(x)
            chain(residual, cut)
        for _ in range(100):
            gated.fill_(float("nan"))
            graph.replay()
            assert torch.equal(residual, want), cut


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17, 200])
def test_fused_products_agree_with_torch(rows: int) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda")
    contexts = make_layer_context(device, Shard(), torch.bfloat16), torch_context(Shard(), torch.bfloat16)
    for (n, k), biased in itertools.product(((1024, 1024), (6144, 4096)), (False, True)):
        x, weight, scale = random(rows, k), random(n, k, scale=k**-0.5), random(k)
        bias = random(n) if biased else None
        residual, out = random(rows, n), torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
        results = []
        for context in contexts:
            with device:
                ours, norm = context.linear(n, k, []), context.norm(k, 1e-6)
            for slot in ours.slots("w", slice(None), (n, k), dim=0, start=0).values():
                slot.load("w", weight)
            norm.weight.copy_(scale)
            into = torch.empty_like(out)
            products = {
                "plain": ours.product(x, bias),
                "into": ours.product(x, bias, into),
                "add": ours.add_product(residual.clone(), x, bias),
                "normed": ours.normed_product(x, norm, bias, out),
                "gated": ours.gated_product(x, norm, bias, norm.kernels),
                "gated, without norm": ours.gated_product(x, None, bias, norm.kernels),
            }
            assert products["normed"] is out and products["into"] is into
            results.append(products | {"normed": out.clone()})
        pairs = {name: (results[0][name], results[1][name]) for name in results[0]}
        for name, (got, want) in pairs.items():
            error = ((got.float() - want.float()).norm() / want.float().norm()).item()
            assert error < 1e-2, (name, n, k, biased, error)
