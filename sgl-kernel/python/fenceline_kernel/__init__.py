"""Fenceline's own CUDA C++ kernels: compiled on first use, called through a plain C ABI.

``available()`` says whether they can be used here; if not, everything else raises ``KernelUnavailable`` with the
remedy. Every call enqueues on a stream and returns. The caller keeps the tensors alive, and does not let others write
them, until that stream has passed the call.
"""

from fenceline_kernel.errors import KernelUnavailable
from fenceline_kernel.fill import MAX_FILL_FIELDS, FillField, FillPlan, arena_fill
from fenceline_kernel.library import KernelLibrary, available, load, why_unavailable
from fenceline_kernel.pages import DEFAULT_MIN_ROWS, DEFAULT_NUM_CTAS, PagePools
from fenceline_kernel.version import __version__

__all__ = [
    "DEFAULT_MIN_ROWS",
    "DEFAULT_NUM_CTAS",
    "MAX_FILL_FIELDS",
    "FillField",
    "FillPlan",
    "KernelLibrary",
    "KernelUnavailable",
    "PagePools",
    "__version__",
    "arena_fill",
    "available",
    "load",
    "why_unavailable",
]
