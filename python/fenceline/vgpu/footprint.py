"""Which rows of a tensor the indexing operators touch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# From an operator's arguments: indexed tensors, each with the rows (axis 0) that are touched. Others: all of them.
Rows = Sequence[tuple[torch.Tensor, torch.Tensor]]
RowIndexes = Callable[[Sequence[Any]], Rows]


def _by_dim(tensor: int, dim: int, index: int) -> RowIndexes:
    def rows(args: Sequence[Any]) -> Rows:
        return ((args[tensor], args[index]),) if args[dim] == 0 else ()

    return rows


def _by_list(args: Sequence[Any]) -> Rows:
    first = args[1][0] if args[1] else None
    return () if first is None else ((args[0], first),)


def _embedding(args: Sequence[Any]) -> Rows:
    return ((args[0], args[1]),)


_DIM_FIRST = _by_dim(tensor=0, dim=1, index=2)
_ROWS: dict[str, RowIndexes] = {
    "index": _by_list,
    "index_put_": _by_list,
    "_index_put_impl_": _by_list,
    "_unsafe_index": _by_list,
    "embedding": _embedding,
    **dict.fromkeys(
        ("index_select", "index_copy_", "index_add_", "index_fill_", "gather", "scatter_", "scatter_add_",
         "scatter_reduce_"), _DIM_FIRST
    ),
}  # fmt: skip


def declare_rows(name: str, rule: RowIndexes) -> None:
    """Say which rows the custom operator ``name`` (``library::name``) touches, before it is first called.

    ``rule`` gets the positional arguments, tensors as plain ones whose values are not there yet.
    """
    _ROWS[name] = rule


def row_indexes(label: str) -> RowIndexes | None:
    """The rule of the operator called ``label``, None if it does not index."""
    return _ROWS.get(label)
