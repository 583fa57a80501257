"""Products of many rows by an algorithm of cuBLAS' that torch would not take."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fenceline.layers.kernels import many_rows
from fenceline.layers.kernels.cuda_kernels import make_cuda_kernels
from fenceline.layers.kernels.torch_kernels import TorchLayerKernels
from fenceline.memory_order import open_device

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(4096, 1024), (24576, 4096), (768, 520)])
def test_every_proposal_multiplies_every_number_of_rows(dtype: torch.dtype, n: int, k: int) -> None:
    cublas = many_rows.CublasLt(torch.device("cuda"))
    weight = (torch.randn(n, k, device="cuda") * k**-0.5).to(dtype)
    proposals = cublas.proposals(2048, weight, 8)
    assert len(proposals) > 1
    for rows in (1024, 1025, 2047, 2048, 5000):
        x = torch.randn(rows, k, device="cuda").to(dtype)
        expected = F.linear(x.float(), weight.float())
        num_accepted = 0
        for proposal in proposals:
            if not cublas.accepts(rows, weight, proposal):
                continue
            num_accepted += 1
            out = torch.full((rows, n), float("nan"), device="cuda", dtype=dtype)
            cublas.linear(x, weight, proposal, out)
            torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
        assert num_accepted > 1, rows


def test_the_model_runners_choice_in_a_graph_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_rows, "_MARGIN", -1.0)  # some other than torch's is taken whatever it measures
    device = open_device("cuda")
    kernels, plain = make_cuda_kernels(device.torch_device), TorchLayerKernels()
    weight = (torch.randn(24576, 4096, device="cuda") / 64).bfloat16()
    norm = torch.rand(4096, device="cuda").bfloat16()
    calls: list[int] = []
    linear = many_rows.CublasLt.linear

    def noted(self: many_rows.CublasLt, x: torch.Tensor, *args: object) -> None:
        calls.append(x.shape[0])
        linear(self, x, *args)  # type: ignore[arg-type]

    kernels.choose_products([weight], device)
    monkeypatch.setattr(many_rows.CublasLt, "linear", noted)
    x = torch.randn(2048, 4096, device="cuda").bfloat16()
    device.synchronize()
    with device.forward.active():
        gated = kernels.norm_gate_up(x, norm, 1e-6, weight, None)
        product = kernels.norm_linear(x, norm, 1e-6, weight, None)
    assert calls == [2048, 2048]
    torch.testing.assert_close(gated, plain.norm_gate_up(x, norm, 1e-6, weight, None), rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(product, plain.norm_linear(x, norm, 1e-6, weight, None), rtol=3e-2, atol=3e-2)
    captured: list[torch.Tensor] = []
    graph = device.capture(
        "product",
        device.make_graph_pool("product"),
        lambda: captured.append(kernels.norm_gate_up(x, norm, 1e-6, weight, None)),
    )
    graph.register()
    graph.allow_replay()
    for _ in range(3):
        captured[0].zero_()
        device.synchronize()
        graph.replay()
        device.synchronize()
        assert torch.equal(captured[0], gated)
