"""Small limits: values for the sizes above which the engine divides its work or works differently, and which small runs
would never reach.

A quarter of the runs of the intact engine use these limits. No answer may depend on them. Attention in parts sums in
another order, so in these runs only the answers are compared, not the bytes.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

# By module and name: the value in those runs.
SMALL: Mapping[str, Mapping[str, object]] = {
    "layers.attention.cpu_backend": {
        "_GATHER_BYTES": 3000,  # the keys and values of a few tokens at a time
        "_SLACK_TOKENS": 2,
        "_QUERY_BLOCK": 4,
        "_MIN_SINGLES": 2,
    },
    "layers.attention.reference": {
        "_GATHER_BYTES": 3000,
        "_GRAPH_GATHERS": 1 << 20,  # or nothing would be captured
        "_QUERY_BLOCK": 4,
    },
    "layers.attention.shared_prefixes": {"_WORTH_PAIRS": 4, "_BLOCK": 2, "_MAX_PREFIX_DEPTH": 1},
    "mem_cache.storage.controller": {"_BATCH_BYTES": 600},  # some pages of a token, none of four
    "mem_cache.storage.page_file": {"_MAX_PARTS": 2},
    "memory_order.access": {"_MAX_LOG": 4, "_MAX_RUNS": 2},
    "memory_order.staging": {"_MIN_SLOT_BYTES": 512, "_SMALL_BYTES": 64},
    "sampling.gumbel": {"CHUNK_ELEMENTS": 100},
    "scheduler.admission": {
        "CLIP_NEW_TOKENS": 4,
        # A third of the memory and of the rows is the reserve, for bodies of a sixth of the memory at most.
        "_RESERVE_MEMORY": 3,
        "_RESERVE_ROWS": 3,
        "_NUM_SMALL": 2,
        "_LEAST_SMALL_TOKENS": 1,
    },
    "scheduler.prefill": {"MAX_SCORED_TOKENS": 6, "_MAX_LOOKED_AT": 4},
    "scheduler.request_memory": {"_MIN_SHARED_TOKENS": 4},
    "scheduler.running_batch": {"_AHEAD_TOKENS": 2},
    "scheduler.schedule_policy": {
        "_LPM_MAX_QUEUE": 3,
        "_IN_BATCH_MIN_SHARED": 4,
        "_STEP_FLOP": 0,  # or a tiny model's step costs more than all prompts, and all go together
        "_STEP_TOKENS": 8,
        "_MIN_SHARED_TOKENS": 8,
        "_MAX_COUNTED": 3,
    },
    # As on a GPU, several full steps of prompts may follow one another.
    "scheduler.step_planner": {"max_prefills_in_row": lambda device: 3},
    "scheduler.stats": {"_REPORT_INTERVAL_S": 0.0},
}


@contextmanager
def small_limits(*modules: str) -> Iterator[None]:
    """Inside, the engine has these limits; if ``modules`` are named, those of these alone."""
    before: list[tuple[ModuleType, str, object]] = []
    for name in modules or SMALL:
        module = importlib.import_module(f"fenceline.{name}")
        for limit, value in SMALL[name].items():
            before.append((module, limit, getattr(module, limit)))
            setattr(module, limit, value)
    try:
        yield
    finally:
        for module, limit, value in before:
            setattr(module, limit, value)
