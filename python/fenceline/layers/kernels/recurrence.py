"""Recurrent layers with torch's operators: what the CPU uses, and the reference for the kernels of other devices.

All tiles have a fixed shape, whatever the step has: absent tokens are zeros. And of element-wise operators only those
are used that compute the last elements of a tensor as the rest (see ``fixed_order.py``). So the bits of a token's
result do not depend on the step's other tokens and requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fenceline.config.state_layout import GRID
from fenceline.layers.recurrent_state import LayerState, StateRows


@dataclass(frozen=True, slots=True)
class _Request:
    """A request of a step, in host values."""

    start: int
    absorbed: int
    tokens: slice
    slot: int
    kept_end: int  # tokens that are known to be kept
    grid: int  # of the step's ``StateRows``

    @property
    def end(self) -> int:
        return self.start + self.tokens.stop - self.tokens.start


def _requests(rows: StateRows) -> Iterator[_Request]:
    bounds = rows.query_starts.tolist()
    values = (rows.starts.tolist(), rows.absorbed.tolist(), rows.slots.tolist(), bounds[:-1], bounds[1:])
    for start, absorbed, slot, first, end in zip(*values, strict=True):
        assert absorbed % rows.grid == 0 and absorbed <= start, (absorbed, start)
        kept_end = start + end - first if rows.kept else start
        yield _Request(start, absorbed, slice(first, end), slot, kept_end, rows.grid)


def short_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool, state: LayerState, rows: StateRows
) -> torch.Tensor:
    """Each channel's weighted sum of a token's and the ``taps - 1`` previous tokens' inputs: x [T, C], or in groups [T,
    G, C / G], weight [C, taps] and bias [C] → a new tensor [T, C] of x's type, if ``silu`` after that. The state has
    ``conv`` and ``x``."""
    x, columns, ring, taps = x.flatten(1), state["conv"], state["x"], weight.shape[1]
    columns = columns.view(*columns.shape[:2], -1)
    result = x.new_zeros(x.shape)
    before, weight = taps - 1, weight.float()
    for row in _requests(rows):
        new = x[row.tokens]
        # The inputs since ``begin``: the state's, then those after it.
        begin = row.absorbed - before
        known = new.new_zeros(row.start - begin, x.shape[1])
        if row.absorbed:
            known[:before] = columns[row.slot]
        latest = range(max(row.absorbed, row.start - ring.shape[1]), row.start)
        known[before + latest.start - row.absorbed :] = ring[row.slot, _places(latest, ring)]
        inputs = torch.cat((known, new))
        window = inputs[len(known) - before :].float()
        total = window[: len(new)] * weight[:, 0]
        for tap in range(1, taps):
            total += window[tap : tap + len(new)] * weight[:, tap]
        if bias is not None:
            total += bias.float()
        result[row.tokens] = total * sigmoid(total) if silu else total
        absorbed = row.kept_end // row.grid * row.grid
        if absorbed > row.absorbed:
            columns[row.slot] = inputs[absorbed - row.absorbed :][:before]
        latest = range(max(row.start, row.end - ring.shape[1]), row.end)
        ring[row.slot, _places(latest, ring)] = new[latest.start - row.start :]
    return result


@dataclass(frozen=True, slots=True, eq=False)
class DeltaGates:
    """How a gated delta net makes decays, and its heads: ``num_key_heads`` of ``key_dim`` features, and one of values
    for each ``a_log``. Each feature of a key has a decay of its own if it has its own ``dt_bias``. ``interleaved``: a
    key head's query, key and values lie together."""

    a_log: torch.Tensor  # [heads] float32
    dt_bias: torch.Tensor  # [heads] or [heads * key_dim] float32
    num_key_heads: int
    key_dim: int
    interleaved: bool = False


def delta_inputs(
    mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, gates: DeltaGates
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inputs of ``recurrence`` in a gated delta net (arXiv:2412.06464): q, k, v, decays and beta. ``mixed`` [T, C]
    has queries, keys and values, of which the first two are normalised; b is [T, heads], and a has as many features as
    ``dt_bias``. If they are ``interleaved`` a and b are [T, key heads, heads / key heads]."""
    size, key_heads, a, b = gates.key_dim, gates.num_key_heads, a.flatten(1), b.flatten(1)
    if gates.interleaved:
        parts = mixed.float().unflatten(1, (key_heads, -1)).tensor_split((size, 2 * size), 2)
    else:
        parts = mixed.float().tensor_split((key_heads * size, 2 * key_heads * size), 1)
    q, k = (_unit(part.flatten(1).unflatten(1, (key_heads, size))) for part in parts[:2])
    heads = len(gates.a_log)
    decays = softplus(a.float() + gates.dt_bias).unflatten(1, (heads, -1)) * -gates.a_log.exp()[:, None]
    decays = decays.squeeze(2) if len(gates.dt_bias) == heads else decays
    values = parts[2].flatten(1).unflatten(1, (heads, -1))
    return q * gates.key_dim**-0.5, k, values.contiguous(), decays, sigmoid(b)


@dataclass(frozen=True, slots=True, eq=False)
class MambaGates:
    """How Mamba2 makes time steps and decays, and its groups of heads, which share inputs ``B`` and ``C`` of
    ``state_size`` features."""

    a_log: torch.Tensor  # [heads] float32
    dt_bias: torch.Tensor  # [heads] float32
    skip: torch.Tensor  # [heads] float32, the factors of inputs that go past the recurrence
    num_groups: int
    state_size: int
    step_limits: tuple[float, float]


def mamba_inputs(
    mixed: torch.Tensor, dt: torch.Tensor, gates: MambaGates
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inputs of ``recurrence`` in Mamba2 (arXiv:2405.21060): q, k, v and decays, where q is C, k is B and v is x
    times the time step. ``mixed`` [T, C] has x, B and C; dt is [T, heads]."""
    size, heads = gates.num_groups * gates.state_size, len(gates.a_log)
    x, k, q = mixed.float().split((mixed.shape[1] - 2 * size, size, size), 1)
    steps = softplus(dt.float() + gates.dt_bias).clamp_(*gates.step_limits)
    values = x.unflatten(1, (heads, -1)) * steps[:, :, None]
    k, q = (part.unflatten(1, (gates.num_groups, -1)).contiguous() for part in (k, q))
    return q, k, values, steps * -gates.a_log.exp()


def _unit(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] of length 1 on its last axis."""
    return x * ((x * x).sum(-1, keepdim=True) + 1e-6).rsqrt_()


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    silu: bool = True,
    skip: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """RMSNorm of each head of x [T, heads, V] float32, times silu(gate), or its sigmoid if not ``silu``, [T, heads, V],
    or in groups [T, G, heads / G, V] → gate's type; weight [V], or [heads, V].

    ``skip`` of Mamba2, inputs [T, n, dim] and factors [n] float32, where n * dim is heads * V: first the inputs times
    their factors are added to x, and it is multiplied by silu(gate) *before* the norm."""
    gate = gate.reshape(x.shape)
    factor = sigmoid(gate)
    factor = gate.float() * factor if silu else factor
    if skip is not None:
        inputs, factors = skip
        x = (x + (inputs.float() * factors[:, None]).view(x.shape)) * factor
    normed = x * ((x * x).mean(-1, keepdim=True) + eps).rsqrt_() * weight.float()
    return (normed if skip is not None else normed * factor).to(gate.dtype)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), float32."""
    return (1 + (-x.float()).exp_()).reciprocal_()


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), float32."""
    x = x.float()
    return torch.where(x > 20, x, x.exp().log1p_())


def _places(positions: range, ring: torch.Tensor) -> torch.Tensor:
    return torch.tensor([position % ring.shape[1] for position in positions], dtype=torch.int64)


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decays: torch.Tensor,
    beta: torch.Tensor | None,
    state: LayerState,
    rows: StateRows,
) -> torch.Tensor:
    """Linear attention with decays, q and k [T, key heads, K], v [T, heads, V] → [T, heads, V], all float32. Of the
    matrix S [K, V] of a head, for each token in turn::

        S *= exp(decay)
        d = beta (v - k S), or v if there is no ``beta`` (the delta rule)
        S += k d
        result = q S

    ``decays``, at most 0, [T, heads] or, if each feature of a key has its own, [T, heads, K]; ``beta`` [T, heads]. Key
    heads are repeated for as many heads as there are. S is only made at the end of a block: what the tokens after it
    add to a result is summed up token by token. The state has ``matrix``, ``k``, ``d`` and ``decay``."""
    result = torch.zeros_like(v)
    for row in _requests(rows):
        matrix = state["matrix"][row.slot]
        matrix = matrix.clone() if row.absorbed else torch.zeros_like(matrix)
        new = [x[row.tokens] for x in (q, k, v, decays)], None if beta is None else beta[row.tokens]
        for base in range(row.absorbed, row.end, row.grid):
            block, end = _Block(state, row, base, *new), base + row.grid
            if end > row.start:
                result[row.tokens][block.own] = block.compute(matrix)
            if end > row.kept_end:
                block.store()
            if end <= row.end:
                matrix = block.absorbed(matrix)
            if end <= row.kept_end:
                state["matrix"][row.slot] = matrix
    return result


class _Block:
    """A block of a request: its rows before this step, and this step's."""

    def __init__(
        self, state: LayerState, row: _Request, base: int, new: list[torch.Tensor], beta: torch.Tensor | None
    ) -> None:
        """``base`` is the position of the block's first token; ``new``: q, k, v and decays of the step's tokens."""
        self._state, self._row, self._base = state, row, base
        self._first, self._end = min(max(row.start - base, 0), row.grid), min(row.end - base, row.grid)
        self.own = slice(base + self._first - row.start, base + self._end - row.start)  # of the request's tokens
        q, k, v, decays = new
        self._keys, self._values = self._tile(k, "k"), self._tile(v if beta is None else torch.zeros_like(v), "d")
        self._decays, self._repeats = self._tile(decays, "decay"), v.shape[1] // k.shape[1]
        self._queries, self._wanted = self._tile(q), self._tile(v)
        self._beta = None if beta is None else self._tile(beta)

    def _tile(self, new: torch.Tensor, name: str | None = None) -> torch.Tensor:
        """The block's rows [GRID, ...] of ``new``, behind those of the state if it keeps them."""
        tile = new.new_zeros(GRID, *new.shape[1:])
        if name is not None:
            ring = self._state[name]
            tile[: self._first] = ring[self._row.slot, _places(range(self._base, self._base + self._first), ring)]
        if self._first < self._end:
            tile[self._first : self._end] = new[self.own]
        return tile

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        """[GRID, key heads, K] → [heads, GRID, K], contiguous."""
        return x.transpose(0, 1).repeat_interleave(self._repeats, 0)

    def _sums(self) -> torch.Tensor:
        """The sum of decays from the block's first token to each, [heads, GRID, 1 or K], float64: of large sums the
        difference counts."""
        decays = self._decays if self._decays.dim() == 3 else self._decays[..., None]
        return decays.double().cumsum(0).transpose(0, 1).contiguous()

    def _products(self, queries: torch.Tensor, strictly: bool) -> torch.Tensor:
        """queries [heads, GRID, K] times the keys, decayed from a key to a query: [heads, GRID, GRID], 0 for later keys
        (``strictly``: and for the query's own token)."""
        later = torch.ones(GRID, GRID, dtype=torch.bool).triu(0 if strictly else 1)
        sums, keys = self._sums(), self._by_head(self._keys)
        if sums.shape[-1] == 1:
            between = (sums - sums.transpose(1, 2)).float().masked_fill_(later, -torch.inf).exp_()
            return (queries @ keys.transpose(1, 2)).mul_(between)
        result = torch.zeros(len(sums), GRID, GRID)
        for token in range(self._first, self._end):
            between = (sums[:, token : token + 1] - sums).float().masked_fill_(later[token][:, None], -torch.inf).exp_()
            result[:, token] = between.mul_(keys).mul_(queries[:, token : token + 1]).sum(2)
        return result

    def compute(self, matrix: torch.Tensor) -> torch.Tensor:
        """The results of this step's tokens [n, heads, V], from the state before the block. Also completes the
        block's values."""
        growth, queries, keys = self._sums().float().exp(), self._by_head(self._queries), self._by_head(self._keys)
        values = self._values.transpose(0, 1).contiguous()
        if self._beta is not None:
            beta = self._beta.transpose(0, 1)[..., None]
            wanted = beta * (self._wanted.transpose(0, 1) - (keys * growth) @ matrix)
            products = self._products(keys, strictly=True) * beta
            for token in range(self._first, self._end):
                values[:, token] = wanted[:, token] - (products[:, token, :, None] * values).sum(1)
            self._values = values.transpose(0, 1)
        result = (queries * growth) @ matrix + self._products(queries, strictly=False) @ values
        return result.transpose(0, 1)[self._first : self._end]

    def store(self) -> None:
        """Keep this step's rows in the state."""
        positions = range(self._base + self._first, self._base + self._end)
        for name, tile in (("k", self._keys), ("d", self._values), ("decay", self._decays)):
            ring = self._state[name]
            ring[self._row.slot, _places(positions, ring)] = tile[self._first : self._end]

    def absorbed(self, matrix: torch.Tensor) -> torch.Tensor:
        """The state after the block, which is full."""
        sums = self._sums()
        keys = self._by_head(self._keys) * (sums[:, -1:] - sums).float().exp()
        values = self._values.transpose(0, 1).contiguous()
        return matrix * sums[:, -1].float().exp()[..., None] + keys.transpose(1, 2) @ values
