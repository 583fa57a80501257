"""Recurrent layers: results do not depend on how tokens are cut into steps, nor on other requests, and are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fenceline.config import state_layout
from fenceline.config.state_layout import GRID, StateSpec
from fenceline.layers.kernels import recurrence as kernels
from fenceline.layers.recurrent_state import LayerState, StateRows, empty_states

TAPS = 4
UNDONE = 24  # most tokens of a step that may be undone


@dataclass(frozen=True)
class Kind:
    """A recurrent layer: heads, key heads, K, V, and of what its decays and values are made."""

    sizes: tuple[int, int, int, int]
    by_channel: bool = False
    delta: bool = True

    @property
    def channels(self) -> int:
        heads, key_heads, key_dim, value_dim = self.sizes
        return 2 * key_heads * key_dim + heads * value_dim

    @property
    def spec(self) -> StateSpec:
        return state_layout.together(
            state_layout.convolution(self.channels, TAPS, "float32"),
            state_layout.recurrence(*self.sizes, self.by_channel),
        )

    def inputs(self, length: int, seed: int) -> list[torch.Tensor]:
        """x, decays and beta of a request's tokens."""
        heads, _, key_dim, _ = self.sizes
        generator = torch.Generator().manual_seed(seed)
        shape = (length, heads, key_dim) if self.by_channel else (length, heads)
        decays = -F.softplus(torch.randn(shape, generator=generator) - 1) * 2
        return [
            torch.randn(length, self.channels, generator=generator),
            decays,
            torch.randn(length, heads, generator=generator).sigmoid(),
        ]

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads, key_heads, key_dim, value_dim = self.sizes
        q, k, v = x.split((key_heads * key_dim, key_heads * key_dim, heads * value_dim), 1)
        unit = [F.normalize(part.unflatten(1, (key_heads, key_dim)), dim=-1) for part in (q, k)]
        return unit[0], unit[1], v.unflatten(1, (heads, value_dim))


GATED_DELTA_NET = Kind((4, 2, 16, 24))
KINDS = [GATED_DELTA_NET, Kind((3, 3, 16, 24), by_channel=True), Kind((4, 1, 16, 24), delta=False)]
WEIGHT = {kind: torch.randn(kind.channels, TAPS, generator=torch.Generator().manual_seed(5)) for kind in KINDS}
BIAS = {kind: torch.randn(kind.channels, generator=torch.Generator().manual_seed(6)) for kind in KINDS}

Work = tuple[int, list[torch.Tensor], int, int, int]  # slot, inputs, tokens absorbed, first token, end


def step(kind: Kind, state: LayerState, work: Sequence[Work], kept: bool = True) -> list[torch.Tensor]:
    """One step of a layer → each request's results."""
    lens = [end - start for *_, start, end in work]
    rows = StateRows(
        starts=torch.tensor([start for *_, start, _ in work]),
        absorbed=torch.tensor([absorbed for _, _, absorbed, _, _ in work]),
        query_starts=torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32),
        query_lens_cpu=np.array(lens),
        slots=torch.tensor([slot for slot, *_ in work]),
        kept=kept,
    )
    x, decays, beta = (torch.cat([given[i][a:b] for _, given, _, a, b in work]) for i in range(3))
    mixed = kernels.short_convolution(x, WEIGHT[kind], BIAS[kind], True, state, rows)
    result = kernels.recurrence(*kind.split(mixed), decays, beta if kind.delta else None, state, rows)
    return list(result.split(lens))


def alone(kind: Kind, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, LayerState]:
    """A request in one step: its results, and the state that it leaves in slot 1."""
    (state,) = empty_states([kind.spec], 2, UNDONE)
    (result,) = step(kind, state, [(1, inputs, 0, 0, len(inputs[0]))])
    return result, state


def token_by_token(kind: Kind, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition in float64: results, and the matrix after the last token."""
    x, decays, beta = (tensor.double() for tensor in inputs)
    heads, key_heads, key_dim, value_dim = kind.sizes
    padded = F.conv1d(
        F.pad(x.T[None], (TAPS - 1, 0)), WEIGHT[kind].double()[:, None], BIAS[kind].double(), groups=len(x.T)
    )
    q, k, v = kind.split(F.silu(padded[0].T))
    matrix, results = torch.zeros(heads, key_dim, value_dim, dtype=torch.float64), []
    for token in range(len(x)):
        for head in range(heads):
            own = head // (heads // key_heads)
            decay = decays[token, head].exp()
            matrix[head] = matrix[head] * (decay[:, None] if kind.by_channel else decay)
            new = v[token, head]
            if kind.delta:
                new = beta[token, head] * (new - k[token, own] @ matrix[head])
            matrix[head] += torch.outer(k[token, own], new)
        results.append(torch.stack([q[token, h // (heads // key_heads)] @ matrix[h] for h in range(heads)]))
    return torch.stack(results), matrix


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
