"""A virtual GPU for torch: CUDA's asynchronous semantics on a CPU, with a schedule that a seed decides.

Importing this package makes ``vgpu`` a device that ``memory_order.open_device`` knows. For tests and debugging only.
"""

from fenceline_sim.device import VgpuDevice
from fenceline_sim.errors import CaptureError, DeadlockError, KernelError, RaceError, VgpuError
from fenceline_sim.factories import use
from fenceline_sim.gpu import Graph, VirtualGpu

__all__ = [
    "CaptureError", "DeadlockError", "Graph", "KernelError", "RaceError", "VgpuDevice", "VgpuError",
    "VirtualGpu", "use",
]  # fmt: skip
