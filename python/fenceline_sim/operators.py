"""What the schema of a torch operator says about how to run it on the virtual GPU, and which rows it accesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch

from fenceline_sim import backend

# The indexed tensors among an operator's arguments, each with an axis and the index on it. An index on axis 0 names the
# rows that are accessed; without one all rows are.
Indexes = Sequence[tuple[torch.Tensor, int, torch.Tensor]]
IndexRule = Callable[[Sequence[Any]], Indexes]

# Composite operators that run as one kernel; all others are decomposed.
_WHOLE = {
    "aten::linear", "aten::matmul", "aten::rms_norm", "aten::layer_norm", "aten::scaled_dot_product_attention",
    "aten::log_softmax", "aten::softmax", "aten::argsort", "aten::einsum",
}  # fmt: skip
# Operators whose output's shape or value the host needs, so that it waits for them.
_SYNCHRONISING = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::bincount", "aten::equal", "aten::_local_scalar_dense", "aten::repeat_interleave", "aten::histc",
}  # fmt: skip
_KNOWN_TO_THE_HOST = {"aten.repeat_interleave.self_int"}  # their overloads for which it need not wait
# In-place operators that do not read the old values.
_OVERWRITING = {"zero_", "fill_", "index_put_", "index_copy_", "index_fill_", "scatter_"}
_VIEWS_BY_NATURE = {"aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh"}
_REFUSED = {"aten::set_", "aten::resize_", "aten::resize_as_", "aten::record_stream"}


class Kind(Enum):
    COMPOSITE = "composite"
    VIEW = "view"
    KERNEL = "kernel"
    LIKE = "like"  # a factory that looks only at its argument's form
    EMPTY = "empty"  # the same without a value
    SYNC = "sync"
    COPY = "copy"
    TO_COPY = "to_copy"
    REFUSED = "refused"


class Operator:
    """What the schema of an operator says, worked out once."""

    def __init__(self, func: torch._ops.OpOverload) -> None:
        schema = func._schema
        self.func = func
        self.name = schema.name
        self.label = schema.name.removeprefix("aten::")
        # Positions and names of arguments that are written.
        self.mutated = [
            (i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
        ]
        # For each return: the name of the argument that it is, or None for a new tensor.
        self.outputs = [_aliased(schema, result) for result in schema.returns]
        self.indexes = _RULES.get(self.label)
        overload = func._overloadname
        self.is_out = overload.endswith("out")
        self.overwrites = self.is_out or (self.label in _OVERWRITING and "reduce" not in overload)
        self.kind = self._find_kind()

    def _find_kind(self) -> Kind:
        schema, name = self.func._schema, self.name
        # Attention has this tag because of its dropout, which inference does not use.
        draws = torch.Tag.nondeterministic_seeded in self.func.tags and "attention" not in self.label
        if name in _REFUSED or draws:
            return Kind.REFUSED
        if name == "aten::copy_":
            return Kind.COPY
        if name == "aten::_to_copy":
            return Kind.TO_COPY
        if name in _SYNCHRONISING and str(self.func) not in _KNOWN_TO_THE_HOST:
            return Kind.SYNC
        if name in _VIEWS_BY_NATURE:
            return Kind.VIEW
        if self.label.endswith("_like") or self.label.startswith("new_"):
            return Kind.EMPTY if "empty" in self.label else Kind.LIKE
        if name not in _WHOLE and backend.is_composite(self.func):
            return Kind.COMPOSITE
        if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
            return Kind.VIEW
        return Kind.KERNEL


def _aliased(schema: Any, result: Any) -> str | None:
    if result.alias_info is None or not result.alias_info.is_write:
        return None
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.before_set == result.alias_info.before_set:
            return str(argument.name)
    return None


def _by_dim(args: Sequence[Any]) -> Indexes:
    tensor, dim, index = args[:3]
    return ((tensor, dim % tensor.ndim, index),) if tensor.ndim else ()


def _by_list(args: Sequence[Any]) -> Indexes:
    return [(args[0], axis, index) for axis, index in enumerate(args[1]) if index is not None]


def _embedding(args: Sequence[Any]) -> Indexes:
    return ((args[0], 0, args[1]),)


_RULES: dict[str, IndexRule] = {
    **dict.fromkeys(("index", "index_put_", "_index_put_impl_", "_unsafe_index"), _by_list),
    "embedding": _embedding,
    **dict.fromkeys(
        ("index_select", "index_copy_", "index_add_", "index_fill_", "gather", "scatter_", "scatter_add_",
         "scatter_reduce_"), _by_dim
    ),
}  # fmt: skip
