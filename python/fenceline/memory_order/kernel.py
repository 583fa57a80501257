"""Declarations of what our kernels read and write: made once, in the kernel's own order.

A declaration names the accesses one after the other, and the wait for the preceding kernel where it comes between
them::

    RMS_NORM = declared("rms_norm", "x weight out", "weight | > x -> out")

says that the kernel reads ``weight``, waits for the preceding kernel (``|``), lets the next one begin (``>``), reads
``x`` and writes ``out``. Kernels whose accesses are not of whole operands, rows or a column have a function that names
them (``declare_kernel``), in the form of ``access.Accesses``, with the tensors of a launch in place of Memory objects.

A kernel that waits is launched programmatically on GPUs that can do so (sm_90 and later): it may begin before the
preceding kernel has ended, which hides the time of the launch, and what it reads before its wait is not ordered after
that kernel. So between a kernel that writes such memory and this one there must be another kernel that begins only when
all before it have ended, or that waits for them before it lets others start.

A device that watches its memory (the virtual GPU) is told of launches and reads the declarations. Tests check each
declaration by running its kernel with random values in all other memory.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Rows = torch.Tensor | npt.NDArray[np.int64] | None


class KernelAccesses(Protocol):
    """Takes the accesses of a launch. ``rows`` [N] name rows of the first axis (None: all of them): integers on the
    device, which count as read themselves, or on the host, where they are given with the launch. A tensor that is None
    is an operand that this launch does not have. Tensors may be in pinned memory of the host."""

    def read(self, tensor: torch.Tensor | None, rows: Rows = None) -> None:
        """The kernel reads ``rows``, or a part of them."""

    def write(self, tensor: torch.Tensor | None, rows: Rows = None) -> None:
        """The kernel writes ``rows``, or a part of them. If it reads them as well, that is declared separately."""

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
        """The kernel reads the first ``lengths`` [B] tokens, without the last ``but_last`` of them, of the requests
        ``rows`` [B]: slot ``page_table[row, p // page_size] * page_size + p % page_size`` of ``cache`` for token p.
        With a ``window`` it leaves out those in front of the window of the first of each request's queries, which are
        its last tokens: ``queries`` of them, or as many as lie between the numbers of ``queries`` [B + 1]."""

    def read_rows(self, tensor: torch.Tensor, rows: Callable[..., npt.NDArray[np.int64]], *operands: Any) -> None:
        """The kernel reads ``rows(*operands)`` of ``tensor``, in that order: numbers computed from what the operands
        hold when it runs, which are then CPU tensors. What it reads of the operands is declared separately."""

    def write_rows(self, tensor: torch.Tensor, rows: Callable[..., npt.NDArray[np.int64]], *operands: Any) -> None:
        """The kernel writes ``rows(*operands)`` of ``tensor``, see :meth:`read_rows`."""

    def wait(self) -> None:
        """The kernel waits until all preceding kernels have ended and their writes are visible."""

    def start_dependents(self) -> None:
        """The next kernel may begin once all blocks of this one have come to this point."""


Compute = Callable[..., object]
Launcher = Callable[["Kernel", Compute, tuple[Any, ...]], None]

_launchers: dict[str, Launcher] = {}


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that has declared its accesses: ``accesses(op, *operands)`` names those of a launch with ``operands``.
    ``reference(*operands)`` computes its results with torch's operators."""

    name: str
    accesses: Callable[..., None]
    reference: Compute | None = None

    def launch(self, compute: Compute, *operands: Any) -> None:
        """Launch it on the CPU, or on the current stream of a device that watches its memory (:func:`is_watched`).
        ``compute(*operands)`` computes the kernel's results with torch's operators. When the launch runs, on the CPU at
        once, it gets CPU tensors over the memory of the tensors among ``operands``."""
        device = next(operand.device for operand in operands if isinstance(operand, torch.Tensor))
        if device.type == "cpu":
            compute(*operands)
        else:
            _launchers[device.type](self, compute, operands)

    def run(self, *operands: Any) -> None:
        """:meth:`launch` with its reference."""
        assert self.reference is not None, f"{self.name} has no reference"
        self.launch(self.reference, *operands)


_WORD = re.compile(r"(\w+)(?:\[(?:(\w+)|:,(\w+))\])?")  # x, x[rows], x[:,column]


def declared(name: str, operands: str | Compute, order: str) -> Kernel:
    """The kernel that accesses its operands in the ``order`` of these words: what it reads; ``|`` where it waits for
    the preceding kernel; ``>`` where it lets the next one begin; ``->``, and then what it writes. ``x[rows]`` are the
    rows of x that the operand ``rows`` names (None: all), ``x[:,column]`` is one column, a number or an operand.
    ``operands``: the names of the operands, or the reference, whose parameters they are. A launch may lack the last."""
    names = operands.split() if isinstance(operands, str) else list(inspect.signature(operands).parameters)
    words = [(word, _WORD.fullmatch(word)) for word in order.split()]
    for word, match in words:
        known = word in ("|", ">", "->") or (match and match[1] in names and match[2] in (None, *names))
        assert known, f"{name} has no operand {word}"

    def accesses(op: KernelAccesses, *given: Any) -> None:
        of = dict(zip(names, given, strict=False))
        access = op.read
        for word, match in words:
            if match is not None:
                tensor, rows, column = of.get(match[1]), match[2], match[3]
                if tensor is not None and column is not None:
                    tensor = tensor[:, int(column) if column.isdigit() else of[column]]
                access(tensor, None if rows is None else of[rows])
            elif word == "->":
                access = op.write
            else:
                (op.wait if word == "|" else op.start_dependents)()

    return Kernel(name, accesses, None if isinstance(operands, str) else operands)


def declare_kernel(accesses: Callable[..., None]) -> Kernel:
    """The kernel whose accesses the decorated function names."""
    return Kernel(accesses.__name__, accesses)


def register_launcher(device_type: str, launcher: Launcher) -> None:
    """Say that devices of ``device_type`` watch their memory; ``launcher`` does :meth:`Kernel.launch` for them."""
    _launchers[device_type] = launcher


def is_watched(device: torch.device) -> bool:
    """Whether ``device`` is told of kernels' launches."""
    return device.type in _launchers
