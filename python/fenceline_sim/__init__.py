"""A virtual GPU for torch: CUDA's asynchronous semantics on a CPU, with a schedule that a seed decides.

Importing this package makes ``vgpu`` a device that ``memory_order.open_device`` knows. For tests and debugging only.
"""

from fenceline_sim.device import VgpuDevice
from fenceline_sim.errors import (
    BoundsError,
    CaptureError,
    CheckError,
    DeadlockError,
    FreshnessError,
    GenerationError,
    KernelError,
    ProtectionError,
    RaceError,
    StaleMemoryError,
    VgpuError,
)
from fenceline_sim.factories import use
from fenceline_sim.gpu import Event, Graph, VirtualGpu
from fenceline_sim.policy import Script, Turn
from fenceline_sim.threads import Channel

__all__ = [
    "BoundsError",
    "CaptureError",
    "Channel",
    "CheckError",
    "DeadlockError",
    "Event",
    "FreshnessError",
    "GenerationError",
    "Graph",
    "KernelError",
    "ProtectionError",
    "RaceError",
    "Script",
    "StaleMemoryError",
    "Turn",
    "VgpuDevice",
    "VgpuError",
    "VirtualGpu",
    "use",
]
