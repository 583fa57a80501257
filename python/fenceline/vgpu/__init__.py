"""A virtual GPU for torch: CUDA's asynchronous semantics on a CPU, with a schedule that a seed decides.

Importing this package makes ``vgpu`` a device that ``memory_order.open_device`` knows. For tests and debugging only.
"""

from fenceline.vgpu.device import VgpuDevice
from fenceline.vgpu.errors import (
    AuditError,
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
from fenceline.vgpu.factories import use
from fenceline.vgpu.gpu import Event, Graph, VirtualGpu
from fenceline.vgpu.kernels import Rows, launch
from fenceline.vgpu.operators import declare_rows
from fenceline.vgpu.policy import Script, Turn
from fenceline.vgpu.threads import Channel

__all__ = [
    "AuditError",
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
    "Rows",
    "Script",
    "StaleMemoryError",
    "Turn",
    "VgpuDevice",
    "VgpuError",
    "VirtualGpu",
    "declare_rows",
    "launch",
    "use",
]
