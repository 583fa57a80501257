"""Workloads of two to four requests, all of whose schedules with few preemptions are tried (``campaign.explore``).

Schedules are distinguished by what the host learns: whether work had run each time that it asked. If there is no race,
two schedules with the same answers are the same run, whatever ran at the same time; and the detector says for each run
whether there is a race. So the answers are what is tried: all as late as possible or all as early as possible, except
for up to two. None of these workloads uses storage, whose threads would be scheduled too.
"""

from __future__ import annotations

from random import Random

from fenceline.ipc.io_struct import AbortReq
from fenceline_proof.script import Flags, Scenario, Script, Workload

_TIERS: Flags = {
    "enable_hierarchical_cache": True, "hicache_io_backend": "direct", "page_size": 2, "chunked_prefill_size": 8,
    "max_running_requests": 1, "max_total_tokens": 10,
}  # fmt: skip


def _pair(random: Random) -> Scenario:
    script = Script(random)
    for step in range(2):
        script.add(step, script.prompt(9, 9), 3, ignore_eos=True)
    return script.scenario((40, 2, 2), page_size=2, cuda_graph_bs=(1, 2), context_length=64)


def _row(random: Random) -> Scenario:
    script = Script(random)
    rids = [script.add(0, script.prompt(5, 5), 2, ignore_eos=True) for _ in range(4)]
    script.send(5, AbortReq(rid=rids[1]))
    return script.scenario((8, 1, 3), page_size=1)


def _twins(random: Random) -> Scenario:
    script = Script(random)
    prompt = script.prompt(5, 5)
    rids = [script.add(step, prompt, 5, ignore_eos=True) for step in (0, 0, 2, 3)]
    script.send(8, AbortReq(rid=rids[1]))
    return script.scenario((16, 3, 2), page_size=2, schedule_conservativeness=0.01)


def _back(random: Random) -> Scenario:
    script = Script(random)
    family = script.prompt(7, 7)
    script.add(0, family, 1)
    script.add(0, script.prompt(8, 8), 1)
    rid = script.add(0, family, 1)
    script.send(3, AbortReq(rid=rid))
    script.add(3, family, 2)
    return script.scenario(**_TIERS, hicache_ratio=2.0, hicache_write_policy="write_through")


def _spilled(random: Random) -> Scenario:
    script = Script(random)
    first, second = script.prompt(7, 7), script.prompt(7, 7)
    for prompt in (first, second, first, second):
        script.add(0, prompt, 1)
    return script.scenario(**_TIERS, hicache_ratio=0.8, hicache_write_policy="write_back")


_ALL = (
    Workload("pair", "two prompts in chunks, then decode in graphs", _pair),
    Workload("row", "four requests in one row, one of them aborted", _row),
    Workload("twins", "one prompt four times, an abort, little memory", _twins),
    Workload("back", "a prompt leaves for the host and comes back; an abort", _back),
    Workload("spilled", "four prompts take turns on the device", _spilled),
)
SMALL_WORKLOADS = {workload.name: workload for workload in _ALL}
