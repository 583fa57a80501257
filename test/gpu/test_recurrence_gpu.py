"""Recurrent layers on a GPU: the kernels against torch on the CPU, and cut into steps, with the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from recurrence_cases import KINDS, LARGE, Kind, check_steps, empty_states

from fenceline.layers.kernels import recurrence as reference
from fenceline.layers.kernels.triton import recurrence as kernels
from fenceline.layers.recurrent_state import LayerState, StateRows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", KINDS + LARGE)
def test_steps_of_all_kinds(kind: Kind) -> None:
    check_steps(kind, (kernels.short_convolution, kernels.recurrence), "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_and_norm_do_not_depend_on_other_tokens(dtype: torch.dtype) -> None:
    heads, key_heads, size = 32, 16, 128
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(300, (2 * key_heads + heads) * size, generator=generator).to(dtype)
    a, b = torch.randn(300, 2 * heads, generator=generator).to(dtype).split(heads, 1)
    gates = reference.DeltaGates(*torch.randn(2, heads, generator=generator), key_heads, size)
    on_gpu = reference.DeltaGates(gates.a_log.cuda(), gates.dt_bias.cuda(), key_heads, size)
    found = kernels.delta_inputs(mixed.cuda(), a.cuda(), b.cuda(), on_gpu)
    one = kernels.delta_inputs(mixed[7:8].cuda(), a[7:8].cuda(), b[7:8].cuda(), on_gpu)
    for ours, alone, theirs in zip(found, one, reference.delta_inputs(mixed, a, b, gates), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=1e-5, rtol=1e-5)
        assert torch.equal(ours[7:8], alone)
    x, weight, gate = (
        found[2],
        torch.randn(size, generator=generator).to(dtype).cuda(),
        mixed[:, -heads * size :].cuda(),
    )
    gate = gate.unflatten(1, (heads, size))
    normed = kernels.gated_norm(x, gate, weight, 1e-6)
    expected = reference.gated_norm(x.cpu(), gate.cpu(), weight.cpu(), 1e-6)
    torch.testing.assert_close(normed.cpu(), expected, atol=1e-5 if dtype == torch.float32 else 3e-2, rtol=2e-2)
    assert torch.equal(kernels.gated_norm(x[7:8], gate[7:8], weight, 1e-6), normed[7:8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_and_norm_of_mamba2_do_not_depend_on_other_tokens(dtype: torch.dtype) -> None:
    """With the sizes of Nemotron Nano 9B v2."""
    heads, groups, size, dim = 128, 8, 128, 80
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(300, heads * dim + 2 * groups * size, generator=generator).to(dtype)
    dt = torch.randn(300, heads + 8, generator=generator).to(dtype)[:, 8:]
    vectors = torch.randn(3, heads, generator=generator)
    gates = reference.MambaGates(*vectors, groups, size, (0.0, float("inf")))
    on_gpu = reference.MambaGates(*vectors.cuda(), groups, size, (0.0, float("inf")))
    found = kernels.mamba_inputs(mixed.cuda(), dt.cuda(), on_gpu)
    one = kernels.mamba_inputs(mixed[7:8].cuda(), dt[7:8].cuda(), on_gpu)
    for ours, alone, theirs in zip(found, one, reference.mamba_inputs(mixed, dt, gates), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=1e-5, rtol=1e-5)
        assert torch.equal(ours[7:8], alone)
    x, gate = found[2].view(300, groups, -1), torch.randn(300, heads * dim, generator=generator).to(dtype).cuda()
    gate, weight = gate.unflatten(1, (groups, -1)), torch.randn(groups, heads * dim // groups, generator=generator)
    weight, inputs = weight.to(dtype).cuda(), mixed.cuda()[:, : heads * dim].unflatten(1, (heads, dim))
    normed = kernels.gated_norm(x, gate, weight, 1e-5, skip=(inputs, on_gpu.skip))
    expected = reference.gated_norm(x.cpu(), gate.cpu(), weight.cpu(), 1e-5, skip=(inputs.cpu(), gates.skip))
    torch.testing.assert_close(normed.cpu(), expected, atol=1e-5 if dtype == torch.float32 else 3e-2, rtol=2e-2)
    own = slice(7, 8)
    alone = kernels.gated_norm(x[own], gate[own], weight, 1e-5, skip=(inputs[own], on_gpu.skip))
    assert torch.equal(alone, normed[own])


def test_a_decode_step_in_a_graph_has_the_same_bits() -> None:
    """Its slots and positions are what they are when the graph is replayed."""
    kind = LARGE[0]
    length = 70
    x, decays, beta = (tensor.cuda() for tensor in kind.inputs(length, 1))
    with torch.device("cuda"):
        first, second = empty_states([kind.spec, kind.spec], 3)
    rows = StateRows(
        starts=torch.zeros(2, dtype=torch.int64, device="cuda"),
        absorbed=torch.zeros(2, dtype=torch.int64, device="cuda"),
        query_starts=torch.arange(3, dtype=torch.int32, device="cuda"),
        query_lens_cpu=np.ones(2, np.int64),
        slots=torch.tensor([1, 0], device="cuda"),
    )
    q, k, v = (part.contiguous() for part in kind.split(x))
    inputs = [torch.zeros(2, *tensor.shape[1:], device="cuda") for tensor in (q, k, v, decays, beta)]

    def run(state: LayerState) -> torch.Tensor:
        return kernels.recurrence(*inputs, state, rows)

    eager, replayed = [], []
    for state, found, captured in ((first, eager, False), (second, replayed, True)):
        graph = torch.cuda.CUDAGraph() if captured else None
        rows.starts.zero_()
        rows.absorbed.zero_()
        if graph is not None:
            with torch.cuda.graph(graph):
                out = run(state)
        for position in range(length):
            rows.starts[0] = position
            rows.absorbed[0] = position // 64 * 64
            for tensor, own in zip(inputs, (q, k, v, decays, beta), strict=True):
                tensor[0] = own[position]
            if graph is None:
                out = run(state)
            else:
                graph.replay()
            found.append(out[0].clone())
    assert torch.equal(torch.stack(eager), torch.stack(replayed))
