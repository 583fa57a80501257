"""Checks a kernel's declared accesses: memory outside the declaration neither changes its results nor is written.

Each operand is a view in the middle of a larger buffer. All memory that is not declared as read is filled with garbage,
and in a second run with other garbage; the kernel must write the same values. All memory that is not declared as
written must keep its value.

In Triton's interpreter, each program of a kernel with programmatic dependent launch begins with garbage in all memory
except what it declares to read early. The rest gets its values when the program waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from fenceline.memory_order.kernel import Kernel, Rows

_MARGIN = 64  # elements before and after an operand; addresses stay aligned to at least 16 bytes
# Integer garbage is valid as an index, so that a kernel that wrongly uses it does not end the process. Memory that is
# to be written begins with other garbage, so that copied garbage is noticed.
_FLOATS, _INTS = (float("nan"), 3e4), (0, 1)
_OTHER_FLOATS, _OTHER_INTS = (-1.5, 2e4), (-7, -9)


@dataclass(frozen=True)
class Launch:
    """``run(pdl, *operands)`` launches the kernel on operands like ``operands``, which are those that it declares.

    ``outputs``: the operands that the launching function would allocate itself, in this order. ``waits_in``: the module
    whose ``tl_cuda`` the kernel uses to wait; None: it has no programmatic dependent launch. ``pinned``: the operands
    that are in host memory.
    """

    name: str
    kernel: Kernel
    operands: Sequence[Any]
    run: Callable[..., object]
    outputs: Sequence[torch.Tensor] = ()
    waits_in: ModuleType | None = None
    pinned: Sequence[torch.Tensor] = ()


class Touched:
    """See ``KernelAccesses``: which elements of each operand's buffer are read, read early, and written."""

    def __init__(self, operands: Sequence[Any], but: torch.Tensor | None = None) -> None:
        """``but``: an operand of which no access is recorded, as if its declaration were missing."""
        tensors = {id(t): t for t in operands if isinstance(t, torch.Tensor)}
        self._operands = tensors
        sizes = {key: _size(t) for key, t in tensors.items()}
        self.read_there, self.early_there, self.written_there = (
            {key: np.zeros(size, np.bool_) for key, size in sizes.items()} for _ in range(3)
        )
        self.waits = False
        self.starts_before_wait = False
        self._but = but

    def _mark(self, masks: dict[int, Any], tensor: torch.Tensor | None, rows: Any) -> None:
        """``tensor`` is an operand or a view of one."""
        operand = None if tensor is None else self._operand(tensor)
        if tensor is not None and operand is not None and operand is not self._but:
            at = _places(tensor) + tensor.storage_offset() - operand.storage_offset()
            masks[id(operand)][(at if rows is None else at[rows]).reshape(-1)] = True

    def _operand(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self._operands:
            return self._operands[id(tensor)]
        memory = tensor.untyped_storage().data_ptr()
        (whole,) = (t for t in self._operands.values() if t.untyped_storage().data_ptr() == memory)
        return whole

    def read(self, tensor: torch.Tensor | None, rows: Rows = None) -> None:
        if isinstance(rows, torch.Tensor):
            self.read(rows)
        self._mark(self.read_there, tensor, None if rows is None else np.asarray(rows))

    def write(self, tensor: torch.Tensor | None, rows: Rows = None) -> None:
        self._mark(self.written_there, tensor, None if rows is None else np.asarray(rows))
        if isinstance(rows, torch.Tensor):
            self.read(rows)

    def read_tokens(
        self,
        cache: torch.Tensor,
        page_table: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        page_size: int,
        but_last: int = 0,
        window: int | None = None,
        queries: int | torch.Tensor = 1,
    ) -> None:
        self.read(page_table, rows)
        self.read(lengths)
        num_queries = [queries] * len(rows) if isinstance(queries, int) else queries.diff().tolist()
        for row, length, num in zip(rows.tolist(), lengths.tolist(), num_queries, strict=True):
            first = 0 if window is None else max(length - num - window + 1, 0)
            at = np.arange(first, length - but_last)
            pages = page_table[row].numpy()[at // page_size].astype(np.int64)
            self._mark(self.read_there, cache, pages * page_size + at % page_size)

    def read_rows(self, tensor: torch.Tensor, rows: Callable[..., Any], *operands: Any) -> None:
        self._mark(self.read_there, tensor, rows(*operands))

    def write_rows(self, tensor: torch.Tensor, rows: Callable[..., Any], *operands: Any) -> None:
        self._mark(self.written_there, tensor, rows(*operands))

    def wait(self) -> None:
        assert not self.waits, "it waits once"
        self.waits = True
        self.early_there = {key: mask.copy() for key, mask in self.read_there.items()}

    def start_dependents(self) -> None:
        self.starts_before_wait = not self.waits


def _size(tensor: torch.Tensor) -> int:
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return span + 2 * _MARGIN


def _places(tensor: torch.Tensor) -> Any:
    """The index of each element in the operand's buffer."""
    flat = torch.arange(_size(tensor))
    return flat.as_strided(tensor.shape, tensor.stride(), _MARGIN).numpy()


def _garbage(size: int, dtype: torch.dtype, number: int) -> torch.Tensor:
    if not dtype.is_floating_point:
        return torch.full((size,), _INTS[number], dtype=dtype)
    # Values differ where possible, so that garbage that is moved within an operand is noticed.
    return (_FLOATS[number] + torch.arange(size) % 64 * 128).to(dtype)


def check(launch: Launch, device: str = "cpu", pdl: bool = False, but: torch.Tensor | None = None) -> None:
    """Raises AssertionError if the kernel violates its declaration. ``but``: see ``Touched``."""
    touched = Touched(launch.operands, but)
    launch.kernel.accesses(touched, *launch.operands)
    runs = [_run(launch, touched, device, pdl, number) for number in range(2)]
    changed = False
    for key, written in touched.written_there.items():
        name = f"operand {[id(t) for t in launch.operands].index(key)} of {launch.name}"
        left = np.ones(len(written), np.bool_)
        for before, after in runs:
            kept = _same(before[key], after[key])
            assert kept[~written].all(), f"{name} is written where that is not declared"
            left &= kept
        equal = _same(runs[0][1][key], runs[1][1][key])
        assert (equal | left)[written].all(), f"{name} depends on what is not declared as read"
        changed = changed or not left.all()
    assert changed, f"{launch.name} writes nothing"


def check_forgetting(launches: Sequence[Launch]) -> None:
    """Checks that ``check`` fails for at least one launch of a kernel if any of the operands is not declared. So every
    declaration is needed, and ``check`` can fail. The smallest launches come first: most operands need no other."""

    def size(launch: Launch) -> int:
        return sum(_size(operand) for operand in launch.operands if isinstance(operand, torch.Tensor))

    for number in range(len(launches[0].operands)):
        given = [launch for launch in sorted(launches, key=size) if isinstance(launch.operands[number], torch.Tensor)]
        if given and all(_is_true_without(launch, number) for launch in given):
            raise AssertionError(f"operand {number} of {launches[0].kernel.name} need not be declared")


def _is_true_without(launch: Launch, number: int) -> bool:
    try:
        check(launch, but=launch.operands[number])
    except AssertionError:
        return False
    return True


def _same(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Element by element, bit by bit."""
    width = a.element_size()
    raw = [t.contiguous().view(torch.uint8).view(-1, width).numpy() for t in (a, b)]
    return (raw[0] == raw[1]).all(axis=1)


Buffers = dict[int, torch.Tensor]


def _run(launch: Launch, touched: Touched, device: str, pdl: bool, number: int) -> tuple[Buffers, Buffers]:
    """One launch with garbage in all memory that is not declared as read. Returns all buffers before and after it."""
    before: Buffers = {}
    for operand in launch.operands:
        if isinstance(operand, torch.Tensor):
            buffer = _garbage(_size(operand), operand.dtype, number)
            read = torch.from_numpy(touched.read_there[id(operand)])
            at = torch.from_numpy(_places(operand))
            real = buffer.clone()
            real[at.reshape(-1)] = operand.reshape(-1)
            other = _OTHER_FLOATS if operand.dtype.is_floating_point else _OTHER_INTS
            written = torch.from_numpy(touched.written_there[id(operand)])
            before[id(operand)] = torch.where(read, real, buffer.masked_fill_(written, other[number]))
    on_host = {id(operand) for operand in launch.pinned} if device != "cpu" else set()
    there = {
        key: buffer.pin_memory() if key in on_host else buffer.to(device, copy=True) for key, buffer in before.items()
    }

    def view(operand: Any) -> Any:
        if not isinstance(operand, torch.Tensor):
            return operand
        return there[id(operand)].as_strided(operand.shape, operand.stride(), _MARGIN)

    with _allocating([view(output) for output in launch.outputs]), _inside(there) if device == "cpu" else nullcontext():
        if pdl and device == "cpu":
            with _overlapped(launch, touched, there, number):
                launch.run(True, *map(view, launch.operands))
        else:
            launch.run(pdl, *map(view, launch.operands))
    if on_host:
        torch.cuda.synchronize()
    return before, {key: buffer.cpu() for key, buffer in there.items()}


@contextmanager
def _allocating(outputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """The next tensors that are allocated are ``outputs``."""
    coming = list(outputs)

    def instead(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate(*args: Any, **options: Any) -> torch.Tensor:
            return coming.pop(0) if coming else real(*args, **options)

        return allocate

    with (
        mock.patch.object(torch, "empty", instead(torch.empty)),
        mock.patch.object(torch, "empty_like", instead(torch.empty_like)),
        mock.patch.object(torch.Tensor, "new_empty", instead(torch.Tensor.new_empty)),
    ):
        yield
    assert not coming, "the launch has memory of its own"


@contextmanager
def _inside(there: Buffers) -> Iterator[None]:
    """In Triton's interpreter, each access must be within its operand, even if what is read there has no effect."""
    from triton.runtime.interpreter import InterpreterBuilder

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    outside: list[str] = []
    margins = []
    for number, buffer in enumerate(there.values()):
        begin, size = buffer.data_ptr(), _MARGIN * buffer.element_size()
        margins += [(number, begin, begin + size), (number, begin + buffer.nbytes - size, begin + buffer.nbytes)]

    def note(kind: str, pointers: Any, mask: Any) -> None:
        at = pointers.data[mask.data]
        outside.extend(f"{kind} {number}" for number, low, high in margins if ((at >= low) & (at < high)).any())

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        note("reads outside of tensor", pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        note("writes outside of tensor", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    with (
        mock.patch.object(InterpreterBuilder, "create_masked_load", checked_load),
        mock.patch.object(InterpreterBuilder, "create_masked_store", checked_store),
    ):
        yield
    assert not outside, f"the kernel {outside[0]} of those that it is given"


@contextmanager
def _overlapped(launch: Launch, touched: Touched, there: Buffers, number: int) -> Iterator[None]:
    """In Triton's interpreter, let each program begin before the preceding kernel has written."""
    from triton.runtime.interpreter import interpreter_builder

    hidden: Buffers = {}
    counts = {"programs": 0, "waits": 0, "starts": 0}

    def begin(x: int, y: int, z: int) -> None:
        assert not hidden, "every program waits: kernels behind count on it"
        counts["programs"] += 1
        for key, buffer in there.items():
            hidden[key] = buffer.clone()
            late = torch.from_numpy(~touched.early_there[key])
            buffer.copy_(torch.where(late, _garbage(len(buffer), buffer.dtype, number), buffer))
        set_grid_idx(x, y, z)

    def wait() -> None:
        counts["waits"] += 1
        for key, buffer in there.items():
            early = torch.from_numpy(touched.early_there[key])
            assert _same(buffer, hidden[key])[early.numpy()].all(), "nothing is written before the wait"
            buffer.copy_(hidden[key])
        hidden.clear()

    def start() -> None:
        assert bool(hidden) is touched.starts_before_wait, "it starts others before its wait or after it"
        counts["starts"] += 1

    assert launch.waits_in is not None
    set_grid_idx = interpreter_builder.set_grid_idx
    tl_cuda = SimpleNamespace(gdc_wait=wait, gdc_launch_dependents=start)
    with (
        mock.patch.object(launch.waits_in, "tl_cuda", tl_cuda),
        mock.patch.object(interpreter_builder, "set_grid_idx", begin),
    ):
        yield
    assert counts["programs"] == counts["waits"] == counts["starts"] > 0, counts
