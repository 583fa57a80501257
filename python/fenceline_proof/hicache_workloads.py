"""Workloads of several tiers: prefixes that do not fit one tier come back from the one below.

As in ``workloads``, each is a function of a seed, and small. ``hicache_ratio`` makes a host tier of a few pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from fenceline.ipc.io_struct import AbortReq, ContinueGenerationReq, FlushCacheReq, PauseGenerationReq
from fenceline_proof.persistent_attention import PERSISTENT
from fenceline_proof.script import PIECES, Flag, Flags, Scenario, Script, Workload
from fenceline_proof.tiny_model import MOST_TOKEN_BYTES, VOCAB_SIZE, storage_secret

_BACK: Flags = {"hicache_write_policy": "write_back", "hicache_io_backend": "direct"}
_POLICIES = ("write_through", "write_through_selective", "write_back")
_LAYOUTS = ("layer_first", "page_first")


def tier_flags(random: Random, **flags: Flag) -> Flags:
    """Flags of a host tier; those that are not given are chosen at random."""
    chosen: dict[str, Flag] = {
        "enable_hierarchical_cache": True, "hicache_write_policy": random.choice(_POLICIES),
        "hicache_mem_layout": random.choice(_LAYOUTS), "hicache_io_backend": random.choice(("kernel", "direct")),
        "page_size": 4,
    }  # fmt: skip
    if random.random() < 0.3:
        chosen["attention_backend"] = PERSISTENT
    return chosen | flags


def storage_flags(random: Random) -> Flags:
    """In half of the runs there is storage."""
    if random.random() >= 0.5:
        return {}
    policy = random.choice(("best_effort", "wait_complete"))
    return {"hicache_storage_backend": "file", "hicache_storage_prefetch_policy": policy}


def _conversations(random: Random) -> Scenario:
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
    scenario = script.scenario(
        (48, 3, 16), schedule_policy=random.choice(("fcfs", "lpm")),
        **tier_flags(random, hicache_ratio=random.choice((0.5, 1.0, 2.0))), **script.graphs(2, 3), **script.in_turn(),
    )  # fmt: skip
    return replace(scenario, flags=_with_least_tokens(random, scenario.flags))


def _fp8(random: Random) -> Scenario:
    scenario, between = _conversations(random), PIECES if random.random() < 0.5 else {}
    return replace(scenario, flags={**scenario.flags, **between, "kv_cache_dtype": "fp8_e4m3"})


def _spill(random: Random) -> Scenario:
    script = Script(random)
    families = [script.prompt(9, 17) for _ in range(4)]
    for turn in range(7):
        script.add(2 * turn, families[turn % 4] + script.prompt(1, 3), random.randint(1, 3))
    return script.scenario((40, 2, 32), **tier_flags(random, hicache_ratio=2.0, **_BACK), **script.graphs(1, 2))


def _queued(random: Random) -> Scenario:
    """F5: the prefixes of all requests that wait together are looked up; the first one admitted evicts the other's."""
    script = Script(random)
    families = [script.prompt(13, 14) for _ in range(2)]
    for turn in range(3):
        step = 26 * turn
        for index, family in enumerate(families):
            script.add(step + 3 * index, family, 1)
        long, other = (families[0], families[1]) if turn % 2 else (families[1], families[0])
        script.add(step + 10, long[:12] + script.prompt(22, 24), random.randint(1, 3))
        script.add(step + 10, other + script.prompt(1, 1), 1)
    return script.scenario(
        (44, 3, 64), schedule_policy="lpm", schedule_conservativeness=0.1, **tier_flags(random, hicache_ratio=2.0),
        **script.graphs(1, 2),
    )  # fmt: skip


def _offload(random: Random) -> Scenario:
    script = Script(random)
    for _ in range(4):
        script.add(random.randrange(3), script.prompt(3, 8), random.randint(5, 9), ignore_eos=True)
    pause = random.randint(3, 6)
    for step in (pause, pause + random.randint(3, 6)):
        script.send(step, PauseGenerationReq(id=f"pause-{step}", mode="retract"))
        script.send(step + random.randint(1, 2), ContinueGenerationReq(id=f"continue-{step}"))
    return script.scenario(
        (random.choice((24, 28, 32)), 4, 16), schedule_conservativeness=0.01, retract_policy="offload",
        **tier_flags(random, hicache_ratio=random.choice((0.5, 1.0, 2.0))), **script.graphs(2, 4), **script.in_turn(),
    )  # fmt: skip


def _namespaces(random: Random) -> Scenario:
    script = Script(random)
    family = script.prompt(13, 17)
    for turn in range(8):
        options = {"extra_key": random.choice(("", "salt")), "priority": random.choice((0, 0, 20))}
        prompt = family + script.prompt(1, 3)
        rid = script.add(2 * turn, prompt, random.randint(2, 6), ignore_eos=True, **options)
        if random.random() < 0.2:
            script.send(2 * turn + random.randint(1, 6), AbortReq(rid=rid))
    for step in (7, 12):
        if random.random() < 0.7:
            script.empty(step)
    return script.scenario(
        (56, 2, 32), enable_priority_scheduling=True, retract_policy=random.choice(("offload", "recompute")),
        hicache_storage_backend="file", hicache_storage_prefetch_policy=random.choice(("best_effort", "wait_complete")),
        **tier_flags(random, hicache_ratio=random.choice((0.8, 2.0))), **script.graphs(1, 2),
    )  # fmt: skip


def _storage(random: Random) -> Scenario:
    script = Script(random)
    families = [script.prompt(9, 17) for _ in range(4)]
    for turn in range(8):
        rid = script.add(2 * turn, families[turn % 4] + script.prompt(1, 3), random.randint(1, 4))
        if random.random() < 0.3:
            script.send(2 * turn + random.randint(1, 3), AbortReq(rid=rid))
    for step in (7, 12):
        if random.random() < 0.5:
            script.empty(step)
    scenario = script.scenario(
        (40, 2, 32), hicache_storage_backend="file",
        hicache_storage_prefetch_policy=random.choice(("best_effort", "wait_complete")),
        **tier_flags(random, hicache_ratio=random.choice((0.5, 0.8))), **script.graphs(1, 2),
    )  # fmt: skip
    return replace(scenario, flags=with_storage_limits(random, scenario.flags))


def _fetched(random: Random) -> Scenario:
    """Prompts come back when only storage has them, the beginning of each first: longer ones find some of their pages
    in the tree, and fetch those behind. Some of these are in the tree when they come, because two fetch the same."""
    script = Script(random)
    size = random.choice((1, 2, 4))
    families = [script.prompt(6 * size, 6 * size) for _ in range(2)]
    for index, family in enumerate(families):
        script.add(3 * index, family + script.prompt(1, 3), 1)
    step = random.randint(12, 16)
    for _ in range(2):
        script.empty(step)
        step += 1
        for num_pages in (random.choice((1, 2)), random.choice((3, 4)), 6):
            for family in random.sample(families, random.choice((1, 2))):
                for _ in range(random.choice((1, 1, 2))):
                    rid = script.add(step, family[: num_pages * size] + script.prompt(1, 2), 2)
                if random.random() < 0.1:
                    script.send(step + random.randint(1, 2), AbortReq(rid=rid))
            step += random.randint(2, 7)
        step += 6
    flags: Flags = {
        "max_total_tokens": 32 * size, "max_running_requests": 3, "chunked_prefill_size": 32,
        "hicache_storage_backend": "file",
        "hicache_storage_prefetch_policy": random.choice(("best_effort", "wait_complete", "wait_complete")),
        **tier_flags(random, page_size=size, hicache_ratio=2.0, hicache_write_policy="write_through"),
    }  # fmt: skip
    if random.random() < 0.3:
        return script.scenario(**with_storage_limits(random, flags))
    if random.random() < 0.6:  # in a directory that is large enough, so that what is damaged is read
        flags = {**flags, "bad_days": random.randrange(1 << 16)}
        if random.random() < 0.3:
            flags = {**flags, "hicache_storage_key": f"file:{storage_secret()}"}
    return script.scenario(**_with_least_tokens(random, flags))


def _with_least_tokens(random: Random, flags: Flags) -> Flags:
    """``flags``, and in some of the runs short parts of a prefix are computed again and not taken from the tier below.
    How long they must be is often no multiple of a page."""
    if random.random() < 0.6:
        return flags
    return {**flags, "least_tokens": random.randint(1, 3 * int(str(flags["page_size"])))}


def with_storage_limits(random: Random, flags: Flags) -> Flags:
    """``flags``, and if they ask for storage in some of the runs a small directory, a key, and bad days."""
    if flags.get("hicache_storage_backend", "none") == "none":
        return flags
    more: dict[str, Flag] = {}
    is_roomy = "hicache_storage_size" in flags
    if not is_roomy and random.random() < 0.5:
        page_bytes = MOST_TOKEN_BYTES * int(str(flags["page_size"])) + 96  # with a header and an authentication code
        more["hicache_storage_size"] = random.uniform(1.1, 3.0) * page_bytes / 1e9
    if random.random() < 0.3:
        more["hicache_storage_key"] = f"file:{storage_secret()}"
    if random.random() < (0.2 if is_roomy else 0.6):
        more["bad_days"] = random.randrange(1 << 16)
    return {**flags, **more} if is_roomy else _with_least_tokens(random, {**flags, **more})


def _swapping(script: Script, sizes: tuple[int, int, int], **flags: Flag) -> Scenario:
    tiers: Flags = {"hicache_ratio": 4.0, "hicache_write_policy": "write_through", "hicache_io_backend": "direct"}
    return script.scenario(sizes, **flags, **tier_flags(script.random, **tiers), **script.graphs(1))


def _swap(random: Random) -> Scenario:
    """F3: the pool holds one request. It ends on a stop token, which is known only one step later. The next request's
    pages are loaded from the host into its pages, which its step in flight still uses."""
    script = Script(random)
    families = [script.prompt(12, 15) for _ in range(3)]
    for turn in range(5):
        stop = tuple(random.sample(range(1, VOCAB_SIZE), 24))
        script.add(0, families[turn % 3], 6, temperature=1.0, stop_token_ids=stop)
    return _swapping(script, (24, 1, 16))


def _shared_prefixes(random: Random) -> Scenario:
    """Two requests share a prefix and little else. One meets a stop token, which is known only one step later, perhaps
    just when the other has all its tokens; and the next two need another prefix, which evicts this one."""
    script = Script(random)
    families = [script.prompt(24, 24) for _ in range(3)]
    for turn in range(7):
        stop = {"temperature": 1.0, "stop_token_ids": tuple(random.sample(range(1, VOCAB_SIZE), 40))}
        for num_tokens, options in random.choice((((3, stop), (2, {})), ((2, {}), (3, stop)))):
            prompt = families[turn % 3] + script.prompt(1, 1)
            script.add(0, prompt, num_tokens, ignore_eos=True, min_new_tokens=1, **options)
    most = random.choice((1, 2, 2))
    return _swapping(script, (24 + 8 * most, most, -1), schedule_conservativeness=0.01)


def _copies(random: Random) -> Scenario:
    """Twins compute the same prompt. The second one's copies go back when the first one's are cached, while a step in
    flight reads them, and a prefix is loaded into them."""
    script = Script(random)
    prefix, filler = script.prompt(12, 12), script.prompt(36, 36)
    step = 0
    for _ in range(3):
        script.add(step, prefix + script.prompt(1, 1), 1)
        script.add(step + 6, filler + script.prompt(1, 1), 1)
        step += 12
        twin = script.prompt(12, 12) + script.prompt(1, 1)
        for _ in range(2):
            script.add(step, twin, random.randint(2, 3), ignore_eos=True)
        script.add(step + random.randrange(3), prefix + script.prompt(1, 1), 1)
        step += 10
    return _swapping(script, (40, 3, -1))


def _overwritten(random: Random) -> Scenario:
    """F15: a request leaves while its pages are being loaded. The host pages that they come from are the only ones that
    can be evicted when the next request evicts another prompt from the device.

    The device holds two prompts and a page, the host one: the prompt that was evicted from the device last.
    """
    script = Script(random)
    prompts = [script.prompt(13, 14) for _ in range(3)]
    for index, prompt in enumerate(prompts):
        script.add(6 * index, prompt, 1)
    del prompts[1]  # it is evicted from both tiers in the first round
    for turn in range(4):
        step = 18 + 8 * turn
        rid = script.add(step, prompts[turn], 1)
        script.send(step + 1, AbortReq(rid=rid))
        prompts.append(script.prompt(13, 14))
        script.add(step + 1, prompts[-1], 1)
    return script.scenario((28, 1, 16), **tier_flags(random, hicache_ratio=0.5, **_BACK))


def _persistent(random: Random) -> Scenario:
    script = Script(random)
    for index in range(5):
        script.add(2 * index, script.prompt(4, 12), random.randint(2, 5))
    return script.scenario(
        (64, 3, 16),
        **tier_flags(
            random, hicache_ratio=2.0, hicache_write_policy="write_through", hicache_io_backend="kernel",
            attention_backend=PERSISTENT,
        ),
        **script.graphs(1, 3),
    )  # fmt: skip


def _refill(random: Random) -> Scenario:
    """F15: a request leaves while its page is being loaded, and storage fills the host page that it comes from.

    The device has three pages and the host one: the page that was evicted from the device last.
    """
    script = Script(random)
    gone, here = script.prompt(5, 6), script.prompt(5, 6)
    step = 0
    for prompt in (gone, script.prompt(5, 6), here):
        script.add(step, prompt, 1)
        step += 10
    for _ in range(4):
        for _ in range(2):
            script.add(step, script.prompt(5, 6), 1)
            step += 10
        rid = script.add(step, here, 1)
        # Storage's thread may answer at once. The flush is refused because a request waits, but it makes the scheduler
        # release the aborted request's pages before it reads the acks of this step.
        script.add(step + 1, gone, 1)
        script.send(step + 1, AbortReq(rid=rid))
        script.send(step + 1, FlushCacheReq(id=f"flush-{step}"))
        step += 14
        here, gone = gone, here
    return script.scenario(
        (12, 1, 32), hicache_storage_backend="file", hicache_storage_prefetch_policy="wait_complete",
        **tier_flags(random, hicache_ratio=0.4, **_BACK),
    )  # fmt: skip


def _cancelled(random: Random) -> Scenario:
    """F15: storage is to fill the host page of a request that was retracted and has left, while its tail may still be
    copied there. Who asked for it leaves before storage has begun, so the page goes back unused.

    The device has three pages and the host one. During a pause nothing waits for the copy.
    """
    script = Script(random)
    gone = script.prompt(5, 6)
    step = 0
    for prompt in (gone, script.prompt(5, 6), script.prompt(5, 6)):
        script.add(step, prompt, 1)
        step += 10
    for turn in range(4):
        rid = script.add(step, script.prompt(1, 1), 8, ignore_eos=True)
        pause = step + random.randint(2, 3)
        script.send(pause, PauseGenerationReq(id=f"pause-{turn}", mode="retract"))
        left = pause + random.randint(0, 1)
        script.send(left, AbortReq(rid=rid))
        asked = script.add(left, gone, 1)
        script.send(left + random.randint(1, 3), AbortReq(rid=asked))
        script.send(left + 4, ContinueGenerationReq(id=f"continue-{turn}"))
        step = left + 10
    return script.scenario(
        (12, 1, 32), retract_policy="offload", hicache_storage_backend="file",
        hicache_storage_prefetch_policy="wait_complete",
        **tier_flags(random, hicache_ratio=0.4, hicache_write_policy="write_back"),
    )  # fmt: skip


def _gone_while_loading(random: Random) -> Scenario:
    """F15: a request leaves while its prefix is being loaded. Two others evict in one step: the first the prefix from
    the device, the second another prompt, for whose backup the prefix leaves the host too."""
    script = Script(random)
    prefix = script.prompt(8, 8)
    script.add(0, prefix + script.prompt(1, 1), 1)
    script.add(4, script.prompt(15, 15), 1)  # the prefix goes to the host, which has room for nothing else
    other = script.add(8, script.prompt(5, 5), 9, ignore_eos=True)
    load = 10 + random.randrange(2)
    left = script.add(load, prefix + script.prompt(1, 1), 2)
    for rid in (left, other):
        script.send(load + 1, AbortReq(rid=rid))
    for length in (11, 7):
        script.add(load + 1, script.prompt(length, length), 1)
    return script.scenario(
        (24, 4, 64), schedule_conservativeness=0.01, **tier_flags(random, hicache_ratio=0.35, page_size=2, **_BACK)
    )


def _held(random: Random) -> Scenario:
    """F15: a prefix leaves the device for the host, and comes back before storage has written it. All requests are
    aborted and the cache is flushed while it is being loaded, so that its host pages go when storage has written them.
    """
    script = Script(random)
    step = 0
    for turn in range(5):
        prefix = script.prompt(8, 8)
        script.add(step, prefix + script.prompt(1, 1), 1)
        other = script.add(step + 4, script.prompt(11, 12), 4, ignore_eos=True)
        script.send(step + 5, AbortReq(rid=other))
        script.add(step + 5, prefix + script.prompt(1, 1), 4, ignore_eos=True)
        script.send(step + 6, AbortReq(abort_all=True))
        script.send(step + 6, FlushCacheReq(id=f"flush-{turn}"))
        step += 12
    return script.scenario(
        (16, 2, 64), hicache_storage_backend="file",
        **tier_flags(random, hicache_ratio=2.0, hicache_write_policy="write_back", page_size=2),
    )  # fmt: skip


def _gone_while_stored(random: Random) -> Scenario:
    """F15: a prefix is backed up and leaves the device. A twin that was computing it too brings it back at once, and it
    leaves again. Then a request loads it, and the backup may still be writing the host pages."""
    script = Script(random)
    prefix = script.prompt(12, 12)
    for step in range(2):
        script.add(step, prefix + script.prompt(1, 1), 1)
    # Of 20 pages the prefix has six and the twin seven, so the next prompt evicts the prefix.
    script.add(2, script.prompt(17, 18), 1)
    # The twin's copy of the prefix has six pages now, and five are free.
    script.add(3, script.prompt(11, 12), 1)
    script.add(3, prefix[:2] + script.prompt(1, 1), 1)
    return script.scenario(
        (40, 4, 64), schedule_conservativeness=0.01, **tier_flags(random, hicache_ratio=2.0, page_size=2, **_BACK)
    )


def _together(random: Random) -> Scenario:
    """F15: two prompts are evicted from the device together, and backed up into the host pages of two prefixes. One of
    these is being loaded. A request for each of these has just been aborted: the host has them, and nothing else."""
    script = Script(random)
    loaded, kept = script.prompt(8, 8), script.prompt(8, 8)
    prompts = [
        *(prefix + script.prompt(1, 1) for prefix in (loaded, kept)),
        script.prompt(34, 34),  # both prefixes go to the host, which has no room for this prompt
        kept + script.prompt(1, 1),  # comes back, and stays on the host too
        *(script.prompt(9, 9) for _ in range(2)),
    ]
    for index, prompt in enumerate(prompts):
        script.add(6 * index, prompt, 1)
    step = 6 * len(prompts)
    for prefix in (loaded, kept):
        rid = script.add(step, prefix + script.prompt(1, 1), 3, ignore_eos=True)
        script.send(step + 1, AbortReq(rid=rid))
    script.add(step + 1, script.prompt(18, 20), 1)
    return script.scenario(
        (40, 4, 64), schedule_conservativeness=0.01,
        **tier_flags(random, hicache_ratio=0.42, hicache_write_policy="write_back", page_size=2),
    )  # fmt: skip


def _either(*makes: Callable[[Random], Scenario]) -> Callable[[Random], Scenario]:
    return lambda random: random.choice(makes)(random)


_handed_on, _gone = _either(_copies, _shared_prefixes), _either(_gone_while_loading, _gone_while_stored)
_LATE = ("laziest", "random", "fifo", "pct")  # so that transfers are not known to have ended
_RANDOM = ("random",)  # with the others storage's threads hardly ever run first
HICACHE_WORKLOADS: tuple[Workload, ...] = (
    Workload("conversations", "turns of conversations that device and host forget", _conversations, share=3),
    Workload("offload", "F1: what retracted requests leave goes to the host and back", _offload, share=2),
    Workload("fp8", "conversations with keys and values in FP8, of half the bytes on each tier", _fp8),
    Workload("spill", "pages go to the host while they are handed on, and come back", _spill),
    Workload("queued", "F5: prefixes move between their lookup and their use", _queued),
    Workload("swap", "F3: pages are loaded into those of a step in flight", _swap),
    Workload("handed_on", "F3: pages are loaded into shared ones of a step in flight", _handed_on),
    Workload("overwritten", "F15: backups into host pages that are being loaded", _overwritten, policies=_LATE),
    Workload("gone", "F15: nodes leave the device while transfers use their host pages", _gone, policies=_LATE),
    Workload("persistent", "F2: backups and persistent attention on the same multiprocessors", _persistent),
    Workload("namespaces", "prompts in several namespaces, priorities, three tiers", _namespaces, share=2),
    Workload("storage", "F15: storage's threads read and fill host pages", _storage, share=2),
    Workload("fetched", "pages from storage behind those that the tree has", _fetched, share=2),
    Workload("refill", "F15: storage fills host pages that are being loaded", _refill, policies=_RANDOM),
    Workload("cancelled", "F15: fetches into pages that copies still use are given up", _cancelled, policies=_RANDOM),
    Workload("together", "F15: two backups into host pages, some of which are loaded", _together, policies=_LATE),
    Workload("held", "F15: host pages of a load leave the tree, storage has them", _held, policies=("pct", "laziest")),
)
