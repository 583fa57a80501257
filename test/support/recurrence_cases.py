"""Requests for recurrent layers, in steps of any kind: for the arithmetic of torch and of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import numpy as np
import torch
import torch.nn.functional as F

from fenceline.config import state_layout
from fenceline.config.state_layout import GRID, StateSpec
from fenceline.layers.kernels import recurrence as kernels
from fenceline.layers.recurrent_state import LayerState, StateRows

TAPS = 4
UNDONE = 24  # most tokens of a step that may be undone


def empty_states(
    specs: Sequence[StateSpec], num_slots: int, most_undone: int = 0, fill: float = float("nan")
) -> list[LayerState]:
    """States of layers on the default device, all ``fill``. Slot 0 is the sink."""
    return [
        {row.name: torch.full((num_slots, *row.shape), fill, dtype=getattr(torch, row.dtype)) for row in spec.carried}
        | {
            kept.row.name: torch.full(
                (num_slots, kept.length(most_undone), *kept.row.shape), fill, dtype=getattr(torch, kept.row.dtype)
            )
            for kept in spec.kept
        }
        for spec in specs
    ]


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
        return unit[0], unit[1], v.unflatten(1, (heads, value_dim)).contiguous()


GATED_DELTA_NET = Kind((4, 2, 16, 24))
KINDS = [GATED_DELTA_NET, Kind((3, 3, 16, 24), by_channel=True), Kind((4, 1, 16, 24), delta=False)]
LARGE = [
    Kind((4, 2, 128, 128)),
    Kind((2, 2, 128, 128), True),
    Kind((4, 1, 128, 64), delta=False),
]  # heads as in published models
ALL = KINDS + LARGE
WEIGHT = {kind: torch.randn(kind.channels, TAPS, generator=torch.Generator().manual_seed(5)) for kind in ALL}
BIAS = {kind: torch.randn(kind.channels, generator=torch.Generator().manual_seed(6)) for kind in ALL}

Arithmetic = tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]  # the convolution and the recurrence
TORCH: Arithmetic = kernels.short_convolution, kernels.recurrence
Work = tuple[int, list[torch.Tensor], int, int, int]  # slot, inputs, tokens absorbed, first token, end


def step(
    kind: Kind, state: LayerState, work: Sequence[Work], kept: bool = True, arithmetic: Arithmetic = TORCH
) -> list[torch.Tensor]:
    """One step of a layer → each request's results."""
    lens = [end - start for *_, start, end in work]
    device = state["matrix"].device
    rows = StateRows(
        starts=torch.tensor([start for *_, start, _ in work], device=device),
        absorbed=torch.tensor([absorbed for _, _, absorbed, _, _ in work], device=device),
        query_starts=torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32, device=device),
        query_lens_cpu=np.array(lens),
        slots=torch.tensor([slot for slot, *_ in work], device=device),
        kept=kept,
    )
    x, decays, beta = (torch.cat([given[i][a:b] for _, given, _, a, b in work]).to(device) for i in range(3))
    convolution, recurrence = arithmetic
    groups = F.pad(x.unflatten(1, (2, -1)), (3, 5))[..., 3:-5]  # beside what the convolution does not read
    mixed = convolution(groups, WEIGHT[kind].to(device), BIAS[kind].to(device), True, state, rows)
    q, k, v = (part.to(device) for part in kind.split(mixed.cpu()))
    return list(recurrence(q, k, v, decays, beta if kind.delta else None, state, rows).cpu().split(lens))


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


def check_steps(kind: Kind, arithmetic: Arithmetic, device: str = "cpu") -> None:
    """Requests in steps of all kinds, with drafts that are undone and a padded row, in slots full of NaN, and token by
    token where nothing is undone: each has the bits that it has alone in one step, which are near those of torch's
    operators, also in its state."""
    random = Random(1)
    lengths = 2 * GRID + 21, 50, GRID
    requests = [kind.inputs(length, seed) for seed, length in enumerate(lengths)]
    wrong = kind.inputs(3 * GRID, seed=99)
    with torch.device(device):
        (state,) = empty_states([kind.spec], len(requests) + 1, UNDONE)
    position, absorbed = [0] * len(requests), [0] * len(requests)
    found: list[list[torch.Tensor]] = [[] for _ in requests]
    sizes = iter((30, 20, 5, 24, 44, 1, 1, 9, 24, 24, 70, 70, 70, 70, 70))
    while live := [i for i, length in enumerate(lengths) if position[i] < length]:
        size, work, taken = next(sizes), [], []
        kept = size != 24
        for i in live:
            own = min(size, lengths[i] - position[i])
            stays = own if kept else random.randint(1, own)
            right = position[i] + stays
            drafted = [torch.cat((a[:right], b[right:])) for a, b in zip(requests[i], wrong, strict=True)]
            work.append((i + 1, drafted, absorbed[i], position[i], position[i] + own))
            taken.append(stays)
        work.append((0, wrong, 0, 0, 1))
        for i, stays, output in zip(live, taken, step(kind, state, work, kept, arithmetic), strict=False):
            found[i].append(output[:stays])
            absorbed[i] = (position[i] + (stays if kept else 0)) // GRID * GRID
            position[i] += stays
    for i, inputs in enumerate(requests):
        with torch.device(device):
            (own_state,) = empty_states([kind.spec], 2, UNDONE)
        (whole,) = step(kind, own_state, [(1, inputs, 0, 0, lengths[i])], arithmetic=arithmetic)
        assert torch.equal(torch.cat(found[i]), whole)
        with torch.device(device):
            (decoded,) = empty_states([kind.spec], 2)
        ends = sorted({0, 1, 2, *range((2 * GRID - 2, 44, GRID - 4)[i], len(whole) + 1)})  # and behind a prompt
        tokens = [
            step(kind, decoded, [(1, inputs, first // GRID * GRID, first, end)], True, arithmetic)[0]
            for first, end in pairwise(ends)
        ]
        assert torch.equal(torch.cat(tokens), whole)
        expected, left = alone(kind, inputs)
        torch.testing.assert_close(whole, expected, atol=5e-6, rtol=1e-5)
        if lengths[i] >= GRID:
            for name in ("matrix", "conv"):
                torch.testing.assert_close(own_state[name][1].cpu(), left[name][1], atol=1e-5, rtol=1e-5)
        if absorbed[i] and absorbed[i] == lengths[i] // GRID * GRID:
            for other in (state["matrix"][i + 1], decoded["matrix"][1]):
                assert torch.equal(other, own_state["matrix"][1])
            assert torch.equal(state["conv"][i + 1], own_state["conv"][1])
