"""Recurrent layers: results do not depend on how tokens are cut into steps, nor on other requests, and are right."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrence_cases import KINDS, UNDONE, Kind, alone, empty_states, step, token_by_token

from fenceline.config.state_layout import GRID
from fenceline.layers.kernels.recurrence import DeltaGates, MambaGates, delta_inputs, gated_norm, mamba_inputs
from fenceline.layers.recurrent_state import StateRows


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_the_definition(kind: Kind) -> None:
    inputs = kind.inputs(3 * GRID, seed=1)
    result, state = alone(kind, inputs)
    expected, matrix = token_by_token(kind, inputs)
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(state["matrix"][1].double(), matrix, atol=1e-5, rtol=1e-5)


def test_strong_decays_neither_overflow_nor_lose_anything() -> None:
    for kind in KINDS:
        x, decays, beta = kind.inputs(2 * GRID, seed=2)
        inputs = [x, decays * 60, beta]
        result, _ = alone(kind, inputs)
        torch.testing.assert_close(result.double(), token_by_token(kind, inputs)[0], atol=1e-5, rtol=0)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_no_bit_depends_on_cuts_or_company(data: st.DataObject) -> None:
    """Requests take turns in steps of any length. In some steps any token but the first may be undone, and is then
    written again with another one's inputs. Slots are full of NaN, which only what was never written may still be."""
    kind = data.draw(st.sampled_from(KINDS))
    lengths = data.draw(st.lists(st.integers(1, 2 * GRID + 9), min_size=1, max_size=3))
    requests = [kind.inputs(length, seed) for seed, length in enumerate(lengths)]
    wrong = kind.inputs(3 * GRID, seed=99)
    (state,) = empty_states([kind.spec], len(requests) + 2, UNDONE)
    position, absorbed = [0] * len(requests), [0] * len(requests)
    results: list[list[torch.Tensor]] = [[] for _ in requests]
    while live := [i for i, length in enumerate(lengths) if position[i] < length]:
        chosen = data.draw(st.lists(st.sampled_from(live), min_size=1, unique=True))
        kept = data.draw(st.booleans())
        work, taken = [], []
        for i in chosen:
            most = lengths[i] - position[i]
            size = data.draw(st.integers(1, most if kept else min(most, UNDONE)))
            stays = size if kept else data.draw(st.integers(1, size))
            right = position[i] + stays
            drafted = [torch.cat((a[:right], b[right:])) for a, b in zip(requests[i], wrong, strict=True)]
            work.append((i + 1, drafted, absorbed[i], position[i], position[i] + size))
            taken.append(stays)
        if data.draw(st.booleans()):
            work.append((0, wrong, 0, 0, 1))  # padding
        outputs = step(kind, state, work, kept)
        for i, stays, output in zip(chosen, taken, outputs, strict=False):
            results[i].append(output[:stays])
            absorbed[i] = (position[i] + (stays if kept else 0)) // GRID * GRID
            position[i] += stays
    for i, inputs in enumerate(requests):
        expected, left = alone(kind, inputs)
        assert torch.equal(torch.cat(results[i]), expected)
        if absorbed[i] and absorbed[i] == lengths[i] // GRID * GRID:
            assert torch.equal(state["matrix"][i + 1], left["matrix"][1])
            assert torch.equal(state["conv"][i + 1], left["conv"][1])


def test_a_request_may_begin_with_anothers_state() -> None:
    """After a prefix hit a request has another one's matrix and columns, and no rows of the open block."""
    for kind in KINDS:
        inputs = kind.inputs(2 * GRID + 9, seed=3)
        expected, _ = alone(kind, inputs)
        (state,) = empty_states([kind.spec], 3)
        step(kind, state, [(1, inputs, 0, 0, GRID + 50)])
        for row in kind.spec.carried:
            state[row.name][2] = state[row.name][1]
        (result,) = step(kind, state, [(2, inputs, GRID, GRID, len(expected))])
        assert torch.equal(result, expected[GRID:])


def test_states_after_a_step_are_where_the_rows_say() -> None:
    rows = StateRows(
        starts=torch.tensor([60, 63, 0]),
        absorbed=torch.tensor([0, 0, 0]),
        query_starts=torch.tensor([0, 3, 4, 133], dtype=torch.int32),
        query_lens_cpu=np.array([3, 1, 129]),
        slots=torch.tensor([1, 2, 3]),
    )
    assert rows.absorbed_after().tolist() == [0, 64, 128]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.sampled_from([(6, 2, 12, 20), (3, 3, 16, 16), (2, 1, 128, 128)]), st.booleans())
def test_inputs_and_norms_do_not_depend_on_other_tokens(
    num_tokens: int, sizes: tuple[int, int, int, int], by_channel: bool
) -> None:
    heads, key_heads, key_dim, value_dim = sizes
    generator = torch.Generator().manual_seed(num_tokens)
    draw = partial(torch.randn, generator=generator)
    num_decays = heads * key_dim if by_channel else heads
    gates = DeltaGates(draw(heads), draw(num_decays), key_heads, key_dim)
    mixed = draw(num_tokens, 2 * key_heads * key_dim + heads * value_dim)
    a, b, weight = draw(num_tokens, num_decays) * 10, draw(num_tokens, heads), draw(value_dim)
    together = delta_inputs(mixed, a, b, gates)
    gate = draw(num_tokens, heads, value_dim)
    normed = gated_norm(together[2], gate, weight, 1e-6)
    for token in range(num_tokens):
        own = slice(token, token + 1)
        for whole, one in zip(together, delta_inputs(mixed[own], a[own], b[own], gates), strict=True):
            assert torch.equal(whole[own], one)
        assert torch.equal(normed[own], gated_norm(together[2][own], gate[own], weight, 1e-6))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.sampled_from([(6, 2, 12, 10), (3, 3, 16, 16), (16, 2, 128, 80)]))
def test_inputs_of_mamba2_do_not_depend_on_other_tokens(num_tokens: int, sizes: tuple[int, int, int, int]) -> None:
    heads, groups, state_size, dim = sizes
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(num_tokens))
    gates = MambaGates(draw(heads), draw(heads), draw(heads), groups, state_size, (0.01, 2.0))
    mixed, dt = draw(num_tokens, heads * dim + 2 * groups * state_size), draw(num_tokens, heads) * 10
    together = mamba_inputs(mixed, dt, gates)
    x, gate = together[2].view(num_tokens, groups, -1), draw(num_tokens, groups, heads * dim // groups)
    weight = draw(groups, heads * dim // groups)
    inputs = mixed[:, : heads * dim].unflatten(1, (heads, dim))
    normed = gated_norm(x, gate, weight, 1e-6, skip=(inputs, gates.skip))
    for token in range(num_tokens):
        own = slice(token, token + 1)
        for whole, one in zip(together, mamba_inputs(mixed[own], dt[own], gates), strict=True):
            assert torch.equal(whole[own], one)
        assert torch.equal(normed[own], gated_norm(x[own], gate[own], weight, 1e-6, skip=(inputs[own], gates.skip)))
