"""Workloads of several tiers: what fits on no single one of them comes back from the one below.

As in ``workloads``, each is a function of a seed, and small. ``hicache_ratio`` makes a host tier of a few pages.
"""

from __future__ import annotations

from random import Random

from fenceline.managers.io_struct import AbortReq, FlushCacheReq
from fenceline.vgpu.proving.persistent_attention import PERSISTENT
from fenceline.vgpu.proving.script import Flag, Flags, Scenario, Script, Workload

_POLICIES = ("write_through", "write_through_selective", "write_back")
_LAYOUTS = ("layer_first", "page_first")


def _tiers(random: Random, **flags: Flag) -> Flags:
    """Flags of a host tier, anything that they do not say by chance."""
    chosen: dict[str, Flag] = {
        "enable_hierarchical_cache": True,
        "hicache_write_policy": random.choice(_POLICIES),
        "hicache_mem_layout": random.choice(_LAYOUTS),
        "hicache_io_backend": random.choice(("kernel", "direct")),
        "page_size": 4,
    }
    if random.random() < 0.3:
        chosen["attention_backend"] = PERSISTENT
    return chosen | flags


def _conversations(random: Random) -> Scenario:
    """More conversations than both tiers hold, of several turns each; some end early, some are forgotten."""
    script = Script(random)
    for index in range(4):
        rid = script.add(index * random.randint(0, 3), script.prompt(6, 14), random.randint(2, 6))
        for _ in range(random.randint(1, 2)):
            pause = random.randint(0, 4)
            rid = script.follow(rid, pause, script.prompt(1, 5), random.randint(1, 4), **script.options())
            if random.random() < 0.2:
                script.send(random.randint(8, 24), AbortReq(rid=rid))
    if random.random() < 0.2:
        script.send(random.randint(10, 30), FlushCacheReq(id="flush"))
    return script.scenario(
        max_total_tokens=48,
        max_running_requests=3,
        chunked_prefill_size=16,
        schedule_policy=random.choice(("fcfs", "lpm")),
        **_tiers(random, hicache_ratio=random.choice((0.5, 1.0, 2.0))),
        **script.graphs(2, 3),
        **script.in_turn(),
    )


def _spill(random: Random) -> Scenario:
    """write_back: pages are copied to the host at the moment when somebody else is given them."""
    script = Script(random)
    families = [script.prompt(9, 17) for _ in range(4)]
    for turn in range(7):
        script.add(2 * turn, families[turn % 4] + script.prompt(1, 3), random.randint(1, 3))
    return script.scenario(
        max_total_tokens=40,
        max_running_requests=2,
        chunked_prefill_size=32,
        **_tiers(random, hicache_ratio=2.0, hicache_write_policy="write_back", hicache_io_backend="direct"),
        **script.graphs(1, 2),
    )


def _offload(random: Random) -> Scenario:
    """F1: running requests lose their memory, the page that the step in flight writes included, and bring it back."""
    script = Script(random)
    for _ in range(4):
        script.add(random.randrange(3), script.prompt(3, 8), random.randint(5, 9), ignore_eos=True)
    return script.scenario(
        max_total_tokens=random.choice((24, 28, 32)),
        max_running_requests=4,
        chunked_prefill_size=16,
        schedule_conservativeness=0.01,
        retract_policy="offload",
        **_tiers(random, hicache_ratio=random.choice((0.5, 1.0, 2.0))),
        **script.graphs(2, 4),
        **script.in_turn(),
    )


def _storage(random: Random) -> Scenario:
    """Prefixes that only storage still has, in host pages that transfers have just used."""
    script = Script(random)
    families = [script.prompt(9, 17) for _ in range(4)]
    for turn in range(8):
        rid = script.add(2 * turn, families[turn % 4] + script.prompt(1, 3), random.randint(1, 4))
        if random.random() < 0.3:
            script.send(2 * turn + random.randint(1, 3), AbortReq(rid=rid))
    for step in (7, 12):
        if random.random() < 0.5:
            script.send(step, AbortReq(abort_all=True))
            script.send(step, FlushCacheReq(id=f"flush-{step}"))
    return script.scenario(
        max_total_tokens=40,
        max_running_requests=2,
        chunked_prefill_size=32,
        hicache_storage_backend="file",
        hicache_storage_prefetch_policy=random.choice(("best_effort", "wait_complete")),
        **_tiers(random, hicache_ratio=random.choice((0.5, 0.8))),
        **script.graphs(1, 2),
    )


HICACHE_WORKLOADS: tuple[Workload, ...] = (
    Workload(
        "conversations", "F3, F4: turns of conversations that both tiers forget", _conversations, share=4
    ),
    Workload("spill", "F15: pages go to the host while they are handed on", _spill, share=2),
    Workload("offload", "F1: what retracted requests leave goes to the host and back", _offload, share=3),
    Workload("storage", "F15: storage's threads read and fill host pages", _storage, share=3),
)
