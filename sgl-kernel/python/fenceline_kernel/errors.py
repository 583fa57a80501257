"""The error of this package that is not caused by a caller's arguments."""

from __future__ import annotations


class KernelUnavailable(RuntimeError):
    """The kernels cannot be used on this machine; the message is one line with the remedy."""
