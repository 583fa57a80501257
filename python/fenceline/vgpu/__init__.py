"""A virtual GPU for torch: CUDA's asynchronous semantics on a CPU, every interleaving from a seed.

Importing this package makes ``vgpu`` a device that ``memory_order.open_device`` knows. For tests and debugging only.
"""

from fenceline.vgpu.device import VgpuDevice
from fenceline.vgpu.errors import CaptureError, DeadlockError, KernelError, RaceError, VgpuError
from fenceline.vgpu.factories import use
from fenceline.vgpu.gpu import Event, VirtualGpu

__all__ = [
    "CaptureError",
    "DeadlockError",
    "Event",
    "KernelError",
    "RaceError",
    "VgpuDevice",
    "VgpuError",
    "VirtualGpu",
    "use",
]
