"""Launches of kernels that have declared their accesses (``memory_order.kernel``): any Python function over memory of
the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fenceline.memory_order.kernel import Compute, Kernel, Rows
from fenceline_sim.gpu import VirtualGpu
from fenceline_sim.layout import layout_of
from fenceline_sim.memory import Access, Bound
from fenceline_sim.place import here
from fenceline_sim.streams import Operation
from fenceline_sim.tensor import VTensor, access


def _bound(tensor: torch.Tensor, ids: torch.Tensor) -> Bound:
    assert isinstance(tensor, VTensor) and isinstance(ids, VTensor), "rows of the device are named on the device"
    return Bound(tensor.allocation.tag, 0, tensor.shape[0], ids.plain, access(ids))


class _Declared:
    """The accesses that a declaration names for one launch on ``gpu``: see ``KernelAccesses``."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self.ahead: _Reads | None = None
        self.reads = _Reads()
        self.writes: list[Access] = []
        self.bounds: list[Bound] = []
        self.starts_next = False
        self._gpu = gpu

    def read(self, tensor: torch.Tensor | None, rows: Rows = None) -> None:
        if tensor is not None:
            self.reads.accesses.append(self._access(tensor, rows))
            self.reads.tensors.add(id(tensor))
            self._look_up(self.reads.bounds, tensor, rows)

    def write(self, tensor: torch.Tensor | None, rows: Rows = None) -> None:
        if tensor is not None:
            self.writes.append(self._access(tensor, rows))
            self._look_up(self.bounds, tensor, rows)

    def _access(self, tensor: torch.Tensor, rows: Rows) -> Access:
        if isinstance(rows, np.ndarray):
            rows = torch.from_numpy(rows)
        if isinstance(tensor, VTensor):
            return access(tensor, rows.plain if isinstance(rows, VTensor) else rows)
        tag = self._gpu.pinned.find(tensor)
        assert tag is not None, "a kernel reaches memory of the device, and pinned memory"
        return Access(tag, layout_of(tensor), rows)

    def _look_up(self, bounds: list[Bound], tensor: torch.Tensor, rows: Rows) -> None:
        """Rows on the device have to be within bounds, and are read themselves."""
        if isinstance(rows, torch.Tensor):
            bounds.append(_bound(tensor, rows))
            self.read(rows)

    def read_tokens(
        self, cache: torch.Tensor, page_table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, page_size: int,
        but_last: int = 0, window: int | None = None, queries: int | torch.Tensor = 1,
    ) -> None:  # fmt: skip
        self.read(page_table, rows)
        self.read(lengths)
        self.read_rows(cache, _token_slots, page_table, rows, lengths, page_size, but_last, window, queries)

    def read_rows(self, tensor: torch.Tensor, rows: Callable[..., npt.NDArray[np.int64]], *operands: Any) -> None:
        self.reads.accesses.append(self._computed(tensor, rows, operands))
        self.reads.tensors.add(id(tensor))

    def write_rows(self, tensor: torch.Tensor, rows: Callable[..., npt.NDArray[np.int64]], *operands: Any) -> None:
        self.writes.append(self._computed(tensor, rows, operands))

    def _computed(
        self, tensor: torch.Tensor, rows: Callable[..., npt.NDArray[np.int64]], operands: tuple[Any, ...]
    ) -> Access:
        values = [operand.plain if isinstance(operand, VTensor) else operand for operand in operands]
        return self._access(tensor, None)._replace(rows=partial(rows, *values))

    def wait(self) -> None:
        assert self.ahead is None and not self.writes, "it waits once, before it writes"
        self.ahead, self.reads = self.reads, _Reads()

    def start_dependents(self) -> None:
        self.starts_next = self.ahead is None


class _Reads:
    def __init__(self) -> None:
        self.accesses: list[Access] = []
        self.bounds: list[Bound] = []
        self.tensors: set[int] = set()  # by identity


def _token_slots(
    page_table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, size: int, but_last: int, window: int | None,
    queries: int | torch.Tensor,
) -> npt.NDArray[np.int64]:  # fmt: skip
    """See ``KernelAccesses.read_tokens``: the slots, request after request. Where the last ones are left out, because
    the preceding kernel may be writing them, so is page 0, the sink: padded requests of several tokens write it all the
    time, and nobody uses what it holds."""
    table = page_table.numpy()
    slots = [np.zeros(0, np.int64)]
    num_queries = [queries] * len(rows) if isinstance(queries, int) else queries.diff().tolist()
    for row, length, num in zip(rows.tolist(), lengths.tolist(), num_queries, strict=True):
        first = 0 if window is None else max(length - num - window + 1, 0)
        # The checks have reported values that are out of bounds here, which a race may lead to.
        length = min(max(length - but_last, 0), table.shape[1] * size)
        row = row if -len(table) <= row < len(table) else 0
        pages = table[row, : -(-length // size)].astype(np.int64)
        slots.append((pages[:, None] * size + np.arange(size)).reshape(-1)[first:length])
    found = np.concatenate(slots)
    return found[found >= size] if but_last else found


def launch_declared(kernel: Kernel, compute: Compute, operands: tuple[Any, ...]) -> None:
    """Queue a launch of ``kernel`` on the current stream: see ``Kernel.launch``.

    What it reads before its wait is read when it begins, which may be before the preceding kernel has run; values that
    are not read again after the wait keep the value that they had then.
    """
    gpu = next(operand.gpu for operand in operands if isinstance(operand, VTensor))
    declared = _Declared(gpu)
    kernel.accesses(declared, *operands)
    values = [operand.plain if isinstance(operand, VTensor) else operand for operand in operands]
    begun, reads, place = None, declared.reads, here()
    if declared.ahead is not None:
        early = declared.ahead.tensors - reads.tensors
        kept = [(i, values[i]) for i, operand in enumerate(operands) if id(operand) in early]

        def begin() -> None:
            for i, plain in kept:
                values[i] = plain.clone()

        if declared.ahead.accesses:
            label = f"{kernel.name}, before it waits for the kernel in front,"
            begun = Operation(label, place, begin, declared.ahead.accesses, bounds=declared.ahead.bounds)
            begun = begun if gpu.submit_ahead(begun) else None
        if begun is None:
            reads.accesses += declared.ahead.accesses
            reads.bounds += declared.ahead.bounds

    def run() -> None:
        compute(*values)

    gpu.submit(
        kernel.name, run, reads.accesses, declared.writes, place, bounds=(*reads.bounds, *declared.bounds), after=begun,
        starts_next=declared.starts_next and begun is not None,
    )  # fmt: skip


class _Operand(NamedTuple):
    """Stands in arguments for the launch's operand of that number."""

    number: int


def launch_function(
    kernel: Kernel, function: Callable[..., Any], args: tuple[Any, ...], operands: Sequence[Any], *outs: torch.Tensor
) -> None:
    """Launch ``kernel`` with ``(*operands, *outs)``. It calls ``function(*args)``, in which the tensors among
    ``operands``, also those within dataclasses and mappings, are as they are when it runs, and writes its results to
    ``outs``."""
    numbers = {id(operand): _Operand(number) for number, operand in enumerate(operands)}
    template, num_outs = _changed(args, lambda tensor: numbers.get(id(tensor), tensor)), len(outs)

    def compute(*given: Any) -> None:  # which keeps no tensor of the device
        results = function(*_changed(template, lambda operand: given[operand.number], _Operand))
        if num_outs:
            results = results if isinstance(results, tuple) else (results,)
            for out, result in zip(given[-num_outs:], results, strict=True):
                out.copy_(result)

    kernel.launch(compute, *operands, *outs)


def _changed(value: Any, change: Callable[[Any], Any], kind: type = torch.Tensor) -> Any:
    """``value`` with all of that ``kind`` in it changed."""
    if isinstance(value, kind):
        return change(value)
    if type(value) is tuple:
        return tuple(_changed(item, change, kind) for item in value)
    if isinstance(value, Mapping):
        return {name: _changed(item, change, kind) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        old = {field.name: getattr(value, field.name) for field in fields(value)}
        new = {name: _changed(item, change, kind) for name, item in old.items()}
        return replace(value, **new) if any(new[name] is not old[name] for name in new) else value
    return value
