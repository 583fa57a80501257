"""What recurrent layers keep of a request: the only source of these sizes, also where torch is not loaded. Beside
``kv_layout.py``, which says the same of pages."""

from __future__ import annotations

from dataclasses import dataclass

from fenceline.config.kv_layout import KVRow

GRID = 64
"""Tokens in a block. States exist at its multiples, counted from a request's first token."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """``row`` is kept of each of the latest ``window`` tokens."""

    row: KVRow
    window: int = GRID

    def length(self, most_undone: int) -> int:
        """Rows of a slot; that of position p is p modulo this. A step whose tokens may be undone has at most
        ``most_undone`` of them: there are enough rows that neither they nor those of the step before, whose full block
        has not been absorbed yet, lie on one that is still needed."""
        return self.window + 2 * most_undone


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What a recurrent layer keeps of a request. ``carried``: the state at the last point of the grid. ``kept``: rows
    of the tokens after it."""

    carried: tuple[KVRow, ...]
    kept: tuple[TokenRow, ...]


def convolution(channels: int, taps: int, dtype: str, groups: int = 1) -> StateSpec:
    """Of a convolution over ``taps`` tokens: the inputs of the last ones, in the model's ``dtype``. The state has those
    before the point of the grid. ``groups``: in how many the channels lie, so that what is stored tells the order."""
    columns = KVRow("conv", (taps - 1, *((groups,) if groups > 1 else ()), channels // groups), dtype)
    return StateSpec((columns,), (TokenRow(KVRow("x", (channels,), dtype), taps - 1),))


def recurrence(heads: int, key_heads: int, key_dim: int, value_dim: int, by_channel: bool = False) -> StateSpec:
    """Of linear attention: a matrix for each of ``heads``. Of a token, its keys, its values (after the delta rule, if
    the layer has one) and its decays as logarithms, of which each feature of a key has its own if ``by_channel``."""
    decays = (heads, key_dim) if by_channel else (heads,)
    rows = {"k": (key_heads, key_dim), "d": (heads, value_dim), "decay": decays}
    return StateSpec(
        (KVRow("matrix", (heads, key_dim, value_dim), "float32"),),
        tuple(TokenRow(KVRow(name, shape, "float32")) for name, shape in rows.items()),
    )


def together(*specs: StateSpec) -> StateSpec:
    """What a layer keeps that has several of these parts."""
    return StateSpec(sum((spec.carried for spec in specs), ()), sum((spec.kept for spec in specs), ()))
