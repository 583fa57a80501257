"""The back ends of memory_order's Communicator, which carry out collective operations of ranks."""

from __future__ import annotations

import os

# Several ranks on one GPU, for tests on machines that have one.
SHARED_GPU_VARIABLE = "FENCELINE_RANKS_SHARE_GPU"


def ranks_share_gpu() -> bool:
    """Whether all ranks use the first GPU that this host shows: ``FENCELINE_RANKS_SHARE_GPU=1``."""
    return os.environ.get(SHARED_GPU_VARIABLE, "").strip() not in ("", "0")
