"""Which running requests give way to waiting ones, where the forecast of memory is not simply a sum."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np

from fenceline.ipc.io_struct import TokenizedGenerateReq
from fenceline.mem_cache.tree.radix_cache import RadixCache
from fenceline.memory_order import LeasePool
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.scheduler.prefill import PrefillPlanner
from fenceline.scheduler.req import Req
from fenceline.scheduler.request_memory import RequestMemory
from fenceline.scheduler.schedule_policy import ShortShare, StepSharing

# What is left of their sum without the first two is less than the third.
EXPECTED = 0.1, 0.2, 2.0


def request(rid: str, prompt: Sequence[int], body: int = 0, max_new: int = 1, is_short: bool = False) -> Req:
    source = TokenizedGenerateReq(rid, array("i"), SamplingParams(), body=body)
    return Req(source, np.array(prompt, np.int32), frozenset(), 0, max_new, 1, is_short=is_short)


def make_memory(num_pages: int, num_rows: int = 8) -> RequestMemory:
    """With pages of one token."""
    pages = LeasePool("pages", 1 + num_pages)
    return RequestMemory(pages, LeasePool("rows", 1 + num_rows), RadixCache(pages, 1), 1)


def runs(memory: RequestMemory, *reqs: Req) -> list[Req]:
    """Their prompts have been computed and are in the tree."""
    for req in reqs:
        prefix = memory.match(req)
        memory.tree.lock(prefix.match.host_node)
        memory.admit(req, prefix)
        req.allocated_len = req.committed_len = req.num_tokens
        memory.cache_prompt(req)
    return list(reqs)


def displaced(
    memory: RequestMemory,
    running: Sequence[Req],
    newcomers: Sequence[Req],
    expected: Sequence[float] = (),
    share: ShortShare | None = None,
) -> list[str]:
    planner = PrefillPlanner(memory, None, 64, StepSharing(1))
    bodies = Counter(req.source.body for req in running)
    found, _ = planner.displaced(
        newcomers,
        running,
        np.array(expected or [0.0] * len(running)),
        lambda req: bodies[req.source.body],
        share or ShortShare(0, 0),
    )
    return [req.rid for req in found]


def test_a_prefix_that_splits_a_node_of_a_victim_is_not_counted_as_free() -> None:
    memory = make_memory(7)
    running = runs(
        memory, request("a", [1, 2, 3, 4], body=1), request("b", [8], body=1), request("c", [9], body=1)
    )
    # The second one needs two of the pages that the first victim leaves, so even b would not be enough for it.
    waiting = [request("first", [5, 6]), request("second", [1, 2, 7], max_new=2)]
    assert displaced(memory, running, waiting) == ["a"]


def test_nobody_gives_way_because_of_the_last_bit_of_a_sum() -> None:
    memory = make_memory(5)
    running = runs(memory, *(request(str(number), [number], body=1) for number in range(3)))
    a, b, c = EXPECTED
    assert a + b + c - a - b < c
    # Four pages would be free, of which two tokens are expected to be asked for; three are needed.
    assert displaced(memory, running, [request("w", [5, 6])], EXPECTED) == []


def test_a_short_one_does_not_give_way_if_a_long_one_then_does_not_fit() -> None:
    memory = make_memory(11, num_rows=4)
    running = runs(
        memory,
        request("long", [1, 2, 3, 4], body=2),
        request("victim", [5, 6, 7, 8, 9], body=1),
        request("short", [1, 2, 3], body=1, is_short=True),
        request("other", [9], body=1),
    )
    share = ShortShare(6, 0, held_tokens=3, final_tokens=3, held_rows=1)
    waiting = [request("first", [5, 4]), request("second", [4], is_short=True)]
    # Without "short", whose pages are all in use by "long", three tokens more are kept from "first".
    assert displaced(memory, running, waiting, share=share) == ["victim"]
