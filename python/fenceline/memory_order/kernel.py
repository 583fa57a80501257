"""What our kernels read and write: declared once, in the kernel's own order, and read by all who want to know.

It is the form of ``access.Accesses``, with the tensors of a launch in place of memories that the host keeps account of:
a function that names the accesses one after the other, and the wait for the kernel in front between them::

    @declare_kernel
    def rms_norm(op: KernelAccesses, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        op.read(weight)
        op.wait()
        op.start_dependents()
        op.read(x)
        op.write(out)

A kernel that waits is launched programmatically where the GPU can (sm_90 and later): it may begin before the kernel in
front of it has ended, so that launching costs little, and what it reads before its wait is not ordered after that
kernel. Whoever writes such memory must be followed by another kernel before this one, which begins only when all in
front of it have ended, or waits for them before it lets others start.

A device that watches its memory (the virtual GPU) is told of launches, and reads the declaration. Tests run each kernel
among garbage and see that its declaration is true.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class KernelAccesses(Protocol):
    """A launch, to which its accesses are told. ``rows`` [N] integers on the device name rows of the first axis, None
    all of them; they are themselves read. A tensor that is None is an operand that this launch does without."""

    def read(self, tensor: torch.Tensor | None, rows: torch.Tensor | None = None) -> None:
        """It reads ``rows``, or some of what is in them."""

    def write(self, tensor: torch.Tensor | None, rows: torch.Tensor | None = None) -> None:
        """It writes ``rows``, or some of what is in them. A kernel that reads them as well says so."""

    def read_tokens(
        self,
        cache: torch.Tensor,
        page_table: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        page_size: int,
        but_last: bool = False,
    ) -> None:
        """It reads the first ``lengths`` [B] tokens, or all of them but the last, of the requests ``rows`` [B]: slot
        ``page_table[row, p // page_size] * page_size + p % page_size`` of ``cache`` for token p."""

    def wait(self) -> None:
        """It waits until all kernels in front of it have ended and what they wrote is there."""

    def start_dependents(self) -> None:
        """The kernel behind it may begin, once all of this one's blocks have come so far."""


Compute = Callable[..., None]
Launcher = Callable[["Kernel", Compute, tuple[Any, ...]], None]

_launchers: dict[str, Launcher] = {}


@dataclass(frozen=True, slots=True)
class Kernel:
    """``accesses(op, *operands)`` names what a launch with these operands touches."""

    name: str
    accesses: Callable[..., None]

    def launch(self, compute: Compute, *operands: Any) -> None:
        """Launch it on a device that watches its memory, :func:`is_watched`, on the current stream.

        ``compute(*operands)`` leaves what the kernel would, by torch's operators. It gets tensors of the CPU over the
        memory of those among ``operands``, when the launch runs.
        """
        device = next(operand.device for operand in operands if isinstance(operand, torch.Tensor))
        _launchers[device.type](self, compute, operands)


def declare_kernel(accesses: Callable[..., None]) -> Kernel:
    """The kernel whose accesses the decorated function names."""
    return Kernel(accesses.__name__, accesses)


def register_launcher(device_type: str, launcher: Launcher) -> None:
    """Tensors of ``device_type`` are on a device that watches its memory; ``launcher`` runs :meth:`Kernel.launch`."""
    _launchers[device_type] = launcher


def is_watched(device: torch.device) -> bool:
    """Whether the device wants to be told of kernels' launches."""
    return device.type in _launchers
