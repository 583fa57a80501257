"""A virtual GPU for torch: CUDA's asynchronous semantics on a CPU, every interleaving from a seed.

Importing this package makes ``vgpu`` a device that ``memory_order.open_device`` knows. For tests and debugging only.
"""

from fenceline.vgpu.device import VgpuDevice
from fenceline.vgpu.errors import (
    CaptureError,
    DeadlockError,
    KernelError,
    RaceError,
    StaleMemoryError,
    VgpuError,
)
from fenceline.vgpu.event import Event
from fenceline.vgpu.factories import use
from fenceline.vgpu.gpu import VirtualGpu
from fenceline.vgpu.graph import Graph

__all__ = [
    "CaptureError",
    "DeadlockError",
    "Event",
    "Graph",
    "KernelError",
    "RaceError",
    "StaleMemoryError",
    "VgpuDevice",
    "VgpuError",
    "VirtualGpu",
    "use",
]
