"""What one slot of recurrent state consists of (StateLayout): the only source of its sizes, also where torch is not
loaded. Beside ``kv_layout.py``, which says the same of pages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fenceline.config.kv_layout import KVRow

GRID = 64
"""Tokens between two points, counted from a request's first token, at which the chunk form of a recurrence makes the
state. Between two such points the recurrent form does. So a state depends on the request's tokens alone, and not on
how they came: in one prompt or cut, by decode steps, behind a cached prefix."""

_ALIGNMENT = 16  # bytes, so that kernels may load vectors


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What a recurrent layer keeps of one request. ``carried``: its state after a token, such as the last inputs of a
    convolution (``conv``) and the sum over all tokens. ``kept``: of one token, what the chunk form reads to make the
    state at the next point of the grid from that at the last one."""

    carried: tuple[KVRow, ...]
    kept: tuple[KVRow, ...] = ()


@dataclass(frozen=True)
class StateLayout:
    """A slot of all recurrent layers of a model; ``layers[i]`` is what the i-th of these keeps.

    A request's slot has three parts: ``grid``, the state at the last point of the grid; ``running``, the state after
    the last token; and ``ring``, what is kept of the tokens between the two, each at its position % GRID. The first two
    are alike. A snapshot, which other requests begin from, is the first one alone. All parts of a slot are contiguous:
    one copy moves the state of all layers.
    """

    layers: tuple[StateSpec, ...]

    def offsets(self) -> list[dict[str, tuple[int, int]]]:
        """By layer and name where a tensor lies: of ``carried`` the bytes before it in each of the first two parts, and
        of ``kept`` those in the ring; with its bytes, there for GRID tokens."""
        carried = kept = 0
        found = []
        for spec in self.layers:
            places = {}
            for row in spec.carried:
                places[row.name] = carried, row.nbytes
                carried += _aligned(row.nbytes)
            for row in spec.kept:
                places[row.name] = kept, GRID * row.nbytes
                kept += _aligned(GRID * row.nbytes)
            found.append(places)
        return found

    @cached_property
    def snapshot_nbytes(self) -> int:
        """Bytes of a state of all layers."""
        return sum(_aligned(row.nbytes) for spec in self.layers for row in spec.carried)

    @cached_property
    def slot_nbytes(self) -> int:
        """Bytes of a request's slot."""
        ring = sum(_aligned(GRID * row.nbytes) for spec in self.layers for row in spec.kept)
        return 2 * self.snapshot_nbytes + ring


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def gated_delta_net(
    num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int, conv_kernel: int, dtype: str
) -> StateSpec:
    """Of a gated delta net (arXiv:2412.06464) behind a convolution over ``conv_kernel`` tokens: the last inputs of the
    convolution, and a matrix for each value head. Keys are kept normalised, and decays as logarithms."""
    channels = 2 * num_k_heads * head_k_dim + num_v_heads * head_v_dim
    return StateSpec(
        carried=(
            KVRow("conv", (channels, conv_kernel - 1), dtype),
            KVRow("recurrent", (num_v_heads, head_k_dim, head_v_dim), "float32"),
        ),
        kept=(
            KVRow("k", (num_k_heads, head_k_dim), "float32"),
            KVRow("v", (num_v_heads, head_v_dim), "float32"),
            KVRow("decay", (num_v_heads,), "float32"),
            KVRow("beta", (num_v_heads,), "float32"),
        ),
    )
