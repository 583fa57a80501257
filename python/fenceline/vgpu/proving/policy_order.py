"""The order in which waiting requests are tried under the policies that look at the prefix cache, computed from the
requests' tokens and from where their cached prefixes end."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from fractions import Fraction
from random import Random

import numpy as np

from fenceline.ipc.io_struct import TokenizedGenerateReq
from fenceline.mem_cache.tree.radix_cache import RadixCache
from fenceline.memory_order import LeasePool
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.scheduler import schedule_policy
from fenceline.scheduler.req import Prefix, Req
from fenceline.scheduler.request_memory import RequestMemory
from fenceline.vgpu.proving.limits import small_limits

POLICIES = ("lpm", "dfs-weight")
_NUM_QUEUES = 6


def compare_policies(random: Random) -> str:
    """The first order of random queues that is not right, "" if all are. The queues of runs are short, and few of their
    requests go on alike behind a cached prefix."""
    with small_limits("scheduler.schedule_policy"):
        for _ in range(_NUM_QUEUES):
            queue, match = _queue(random)
            wrong = (
                _wrong_order(queue, match, random)
                or _wrong_shuffle(queue, match)
                or _wrong_total(queue, random)
            )
            if wrong:
                return f"policies: {wrong}"
    return ""


def _queue(random: Random) -> tuple[list[Req], Callable[[Req], Prefix]]:
    """Waiting requests, of which many begin alike, and the lookup of their cached prefixes."""
    pages, size = LeasePool("pages", 40), random.choice((1, 2))
    tree = RadixCache(pages, size, lookahead=random.choice((0, 0, 1)))
    memory = RequestMemory(pages, LeasePool("rows", 2), tree, size)
    stems = [[random.randrange(2) for _ in range(16)] for _ in range(2)]
    for number in range(random.randrange(3)):
        stem = [*random.choice(stems)[: random.randint(1, 6) * size], number]
        num_pages = (len(stem) - tree.lookahead) // size
        leased = pages.alloc(num_pages)
        assert leased is not None, "there are enough pages"
        tree.insert(np.array(stem[: num_pages * size + tree.lookahead], np.int32), leased[0])
    queue = []
    for number in range(random.randint(1, schedule_policy._LPM_MAX_QUEUE + 1)):
        tokens = [*random.choice(stems)[: random.randint(1, 16)], *random.choice(((), (2,), (3, 3)))]
        source = TokenizedGenerateReq(f"r{number}", array("i"), SamplingParams())
        req = Req(source, np.array(tokens, np.int32), frozenset(), 0, 2, 1)
        req.num_retractions = int(random.random() < 0.1)
        queue.append(req)
    return queue, memory.match


def _wrong_order(queue: list[Req], match: Callable[[Req], Prefix], random: Random) -> str:
    for policy in POLICIES:
        said = schedule_policy.order_waiting(list(queue), policy, match, random)
        right = policy_order(policy, queue, match)
        if said != right:
            names = [[req.rid for req in reqs] for reqs in (said, right)]
            return f"{policy} puts requests in the order {names[0]}, {names[1]} is right"
    return ""


def _wrong_shuffle(queue: list[Req], match: Callable[[Req], Prefix]) -> str:
    """A random order has each request once and is not always the same; retracted requests come first."""
    orders = [schedule_policy.order_waiting(list(queue), "random", match, Random(seed)) for seed in range(20)]
    back = [req for req in queue if req.num_retractions]
    for order in orders:
        if order[: len(back)] != back or set(order) != set(queue) or len(order) != len(queue):
            return "a random order is not one of the waiting requests"
    is_free = len(queue) > len(back) + 1
    return (
        "the random order is always the same" if is_free and all(one == orders[0] for one in orders) else ""
    )


def _wrong_total(queue: list[Req], random: Random) -> str:
    """The tokens of a short queue are exact; those of a longer one are as many for each request as of its beginning."""
    num = len(queue) + random.choice((0, 0, 5))
    counted = queue[: schedule_policy._MAX_COUNTED]
    right = Fraction(sum(req.num_tokens for req in counted) * num, len(counted))
    said = schedule_policy.num_waiting_tokens(iter(queue), num)
    if not said <= right < said + 1 or schedule_policy.num_waiting_tokens(iter(()), 0):
        return f"{said} tokens are said to wait, {float(right)} are right"
    return ""


def policy_order(policy: str, waiting: Sequence[Req], match: Callable[[Req], Prefix]) -> list[Req]:
    """``waiting``, given in the order of their turns, as ``policy`` orders it. Retracted requests come first."""
    retracted = [req for req in waiting if req.num_retractions]
    fresh = [req for req in waiting if not req.num_retractions]
    if len(fresh) > schedule_policy._LPM_MAX_QUEUE:
        return retracted + fresh
    if policy == "lpm":
        return retracted + _longest_first(fresh, match)
    paths = {req.rid: tuple(node.id for node in match(req).match.host_node.path()) for req in fresh}
    return retracted + _heaviest_first(fresh, paths, 0)


def _longest_first(reqs: Sequence[Req], match: Callable[[Req], Prefix]) -> list[Req]:
    """Those with the longest cached prefix first. Behind all of these come requests that go on for some tokens as
    one in front of them does: when that one has run, more of their prompt is cached."""
    first, later, seen = [], [], set()
    for req in reqs:
        known = match(req).num_tokens
        begin = req.prompt_ids[: known + schedule_policy._IN_BATCH_MIN_SHARED].tolist()
        key = req.source.extra_key, known, tuple(begin)
        if len(begin) - known == schedule_policy._IN_BATCH_MIN_SHARED and key in seen:
            later.append(req)
        else:
            seen.add(key)
            first.append(req)
    return sorted(first, key=lambda req: match(req).num_tokens, reverse=True) + later


def _heaviest_first(reqs: Sequence[Req], paths: dict[str, tuple[int, ...]], depth: int) -> list[Req]:
    """Requests whose cached prefixes have the first ``depth`` nodes in common: below the next node that most of them
    share first, and those that share none last."""
    branches: dict[int, list[Req]] = {}
    own = []
    for req in reqs:
        path = paths[req.rid]
        if len(path) == depth:
            own.append(req)
        else:
            branches.setdefault(path[depth], []).append(req)
    ordered = []
    for branch in sorted(branches.values(), key=len, reverse=True):
        ordered += _heaviest_first(branch, paths, depth + 1)
    return ordered + own
