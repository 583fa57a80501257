"""Which tensors and rows the indexing operators access."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# The indexed tensors among an operator's arguments, each with an axis and the index on it. An index on axis 0 names the
# rows that are accessed; without one all rows are.
Indexes = Sequence[tuple[torch.Tensor, int, torch.Tensor]]
IndexRule = Callable[[Sequence[Any]], Indexes]
Rows = Sequence[tuple[torch.Tensor, torch.Tensor]]


def _by_dim(args: Sequence[Any]) -> Indexes:
    tensor, dim, index = args[:3]
    return ((tensor, dim % tensor.ndim, index),) if tensor.ndim else ()


def _by_list(args: Sequence[Any]) -> Indexes:
    return [(args[0], axis, index) for axis, index in enumerate(args[1]) if index is not None]


def _embedding(args: Sequence[Any]) -> Indexes:
    return ((args[0], 0, args[1]),)


_RULES: dict[str, IndexRule] = {
    "index": _by_list,
    "index_put_": _by_list,
    "_index_put_impl_": _by_list,
    "_unsafe_index": _by_list,
    "embedding": _embedding,
    **dict.fromkeys(
        ("index_select", "index_copy_", "index_add_", "index_fill_", "gather", "scatter_", "scatter_add_",
         "scatter_reduce_"), _by_dim
    ),
}  # fmt: skip


def declare_rows(name: str, rule: Callable[[Sequence[Any]], Rows]) -> None:
    """Declare which rows (axis 0) the custom operator ``name`` (``library::name``) accesses, before its first call.

    ``rule`` gets the positional arguments, with plain tensors whose values are not computed yet, and returns the
    indexed tensors, each with its index.
    """
    _RULES[name] = lambda args: [(tensor, 0, index) for tensor, index in rule(args)]


def index_rule(label: str) -> IndexRule | None:
    """The rule of the operator called ``label``, None if it does not index."""
    return _RULES.get(label)
