"""Triton's kernels for a GPU that is not there: compiled for sm_90, and their launches recorded. Importing this module
needs Triton."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

from fenceline.memory_order import triton_launcher as launcher

# With another version Triton itself launches, and the recorder cannot stand for its driver.
IS_KNOWN = triton.__version__.startswith(launcher._KNOWN_VERSION)
STREAM = 77


class Recorder:
    """What Triton asks of a GPU's driver, and every launch with its arguments."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.through_triton = 0
        recorder = self

        class Launcher(nvidia.CudaLauncher):
            def __init__(self, source: Any, metadata: Any) -> None:
                self.num_ctas = 1
                self.global_scratch_size = self.profile_scratch_size = 0
                self.global_scratch_align = self.profile_scratch_align = 1
                self.launch_cooperative_grid, self.launch_pdl = False, metadata.launch_pdl
                self.launch = lambda *args: recorder.launches.append(args)

            def __call__(self, *args: Any) -> None:
                recorder.through_triton += 1
                super().__call__(*args)

        self.launcher_cls = Launcher
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 1 << 17},
            load_binary=lambda name, kernel, shared, device: (object(), hash(kernel), 32, 0, 1024),
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)
