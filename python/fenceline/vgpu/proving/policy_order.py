"""The order in which waiting requests are tried under the policies that look at the prefix cache, computed from the
requests' tokens and from where their cached prefixes end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fenceline.scheduler import schedule_policy
from fenceline.scheduler.req import Prefix, Req

POLICIES = ("lpm", "dfs-weight")


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
