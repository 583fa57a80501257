"""Several ranks on one GPU, for tests on machines that have one: the environment variable that asks for it."""

from __future__ import annotations

import os

VARIABLE = "FENCELINE_RANKS_SHARE_GPU"


def ranks_share_gpu() -> bool:
    """Whether all ranks use the first GPU that this host shows: ``FENCELINE_RANKS_SHARE_GPU=1``."""
    return os.environ.get(VARIABLE, "").strip() not in ("", "0")
