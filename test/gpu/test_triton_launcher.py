"""Launches that bypass Triton's own, on a GPU: the results, the stream and capture are those of launches through it."""

from __future__ import annotations

import pytest
import torch

from fenceline.layers.kernels.triton.rms_norm import _variant, rms_norm
from fenceline.memory_order import triton_launcher as launcher

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    _variant.cache_clear()
    generator = torch.Generator("cuda").manual_seed(3)
    x = torch.randn(300, 1024, generator=generator, device="cuda", dtype=BF16)
    return x, torch.randn(1024, generator=generator, device="cuda", dtype=BF16)


@pytest.mark.parametrize("pdl", [False, True])
def test_a_bound_launch_computes_what_tritons_does(inputs: tuple[torch.Tensor, torch.Tensor], pdl: bool) -> None:
    if pdl and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("dependent launch begins with sm_90")
    x, weight = inputs
    for num_rows in (1, 16, 33, 300):  # Triton launches the first alone
        expected = torch.nn.functional.rms_norm(x[:num_rows].float(), (1024,), weight.float(), 1e-6)
        actual = rms_norm(x[:num_rows], weight, 1e-6, pdl=pdl)
        torch.testing.assert_close(actual.float(), expected, rtol=0.02, atol=0.02)
    assert len(_variant(1024, pdl)._bound) == 1, "this Triton is known"


def test_an_unaligned_address_after_aligned_ones(inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight = inputs
    expected = rms_norm(x, weight, 1e-6)
    moved = torch.empty(1025, dtype=BF16, device="cuda")[1:].copy_(weight)
    assert moved.data_ptr() % 16
    for _ in range(2):
        assert torch.equal(rms_norm(x, moved, 1e-6), expected)
        assert torch.equal(rms_norm(x, weight, 1e-6), expected)


def test_the_current_stream_and_capture(inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight = inputs
    expected = rms_norm(x, weight, 1e-6)
    source = torch.zeros_like(x)
    assert not rms_norm(source, weight, 1e-6).any()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        source.copy_(x)
        out = rms_norm(source, weight, 1e-6)  # elsewhere it would read zeros
    stream.synchronize()
    assert torch.equal(out, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = rms_norm(source, weight, 1e-6)
    source.neg_()
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, -expected)


def test_an_unknown_triton_still_launches(
    inputs: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = inputs
    expected = rms_norm(x, weight, 1e-6)
    _variant.cache_clear()
    monkeypatch.setattr(launcher, "_KNOWN_VERSION", "2.")
    for _ in range(2):
        assert torch.equal(rms_norm(x, weight, 1e-6), expected)
    assert not _variant(1024, False)._bound
    _variant.cache_clear()
