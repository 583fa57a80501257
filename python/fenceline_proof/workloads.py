"""Workloads of one tier: the messages that arrive at each step of the scheduler's loop, and the engine's flags.

Each is a function of a seed. Sizes are small because a hazard needs two steps in flight, not a thousand requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from msgspec import structs

from fenceline.ipc.io_struct import (
    AbortReq,
    CancelFlushReq,
    ContinueGenerationReq,
    FlushCacheReq,
    GetInternalStateReq,
    Message,
    PauseGenerationReq,
    TokenizedGenerateReq,
)
from fenceline_proof.everything import EVERYTHING
from fenceline_proof.flashinfer_library import FLASHINFER, PLANNED
from fenceline_proof.grammars import GRAMMARS
from fenceline_proof.hicache_workloads import HICACHE_WORKLOADS, storage_flags, tier_flags
from fenceline_proof.launched_attention import LAUNCHED, REFERENCE
from fenceline_proof.pictures import FIRST_PICTURE, with_pictures
from fenceline_proof.script import GRAPH_CONTEXT, PIECES, Arrival, Flags, Scenario, Script, Workload
from fenceline_proof.speculative_workloads import (
    SPECULATIVE_WORKLOADS,
    chains_beside_states,
    chains_of_models,
    chains_that_see,
    trees_under_windows,
)
from fenceline_proof.tiny_model import VOCAB_SIZE


def _mixed(random: Random) -> Scenario:
    script = Script(random)
    for _ in range(5):
        prompt = script.prompt(1, 26)
        script.add(random.randrange(8), prompt, random.randint(1, 6), **script.options())
    return script.scenario((160, 4, 8), **script.graphs(1, 3), **script.in_turn())


def _prefixes(random: Random) -> Scenario:
    script = Script(random)
    families = [script.prompt(8, 16) for _ in range(3)]
    for turn in range(6):
        prompt = random.choice(families) + script.prompt(1, 6)
        script.add(turn * random.randint(1, 3), prompt, random.randint(1, 4))
    branches = random.random() < 0.5
    if branches:
        _branches(script)
    return script.scenario(
        (80 if branches else 48, 4 if branches else 3, 16), schedule_policy=random.choice(("fcfs", "lpm")),
        **script.graphs(2, 3), **script.in_turn(),
    )  # fmt: skip


def _branches(script: Script) -> None:
    """Four requests that are computed in one step: all share some pages that are cached, and in pairs they share
    more."""
    random = script.random
    stem = script.prompt(4, 12)
    branches = [stem + script.prompt(4, 12) for _ in range(2)]
    for step, prompt in ((24, branches[0]), (26, branches[1])):
        script.add(step, prompt + script.prompt(1, 1), 1)
    for index in range(4):
        script.add(40, branches[index // 2] + script.prompt(1, 2), random.randint(1, 3))


def _aborts(random: Random) -> Scenario:
    script = Script(random)
    for _ in range(5):
        start = random.randrange(7)
        rid = script.add(start, script.prompt(1, 20), random.randint(2, 8), **script.options())
        if random.random() < 0.7:
            abort = AbortReq(rid=rid, silent=random.random() < 0.3)
            script.send(start + random.randrange(7), abort)
    if random.random() < 0.3:
        script.send(random.randrange(4, 10), AbortReq(abort_all=True))
    return script.scenario((96, 3, 8), **script.graphs(2, 3), **script.in_turn())


def _retraction(random: Random) -> Scenario:
    script = Script(random)
    for _ in range(4):
        script.add(random.randrange(3), script.prompt(3, 8), random.randint(5, 9), ignore_eos=True)
    flags: Flags = {
        "max_total_tokens": random.choice((24, 28, 32)), "max_running_requests": 4, "chunked_prefill_size": 16,
        "page_size": 4, "schedule_conservativeness": 0.01, **script.graphs(2, 4), **script.in_turn(),
    }  # fmt: skip
    if random.random() < 0.4:  # its answer ends when it has all memory
        script.add(random.randrange(8), script.prompt(1, 22), 64, ignore_eos=True)
    return script.scenario(**flags)


def _bursts(random: Random) -> Scenario:
    script = Script(random)
    step = 0
    for _ in range(2):
        for _ in range(4):
            script.add(step, script.prompt(1, 12), random.randint(1, 4), **script.options())
        step += random.randint(3, 14)
    if random.random() < 0.5:
        pause = random.randrange(1, step)
        mode = random.choice(("abort", "retract", "in_place"))
        script.send(pause, PauseGenerationReq(id="pause", mode=mode))
        script.send(pause + random.randint(1, 3), ContinueGenerationReq(id="continue"))
    script.send(random.randrange(step), FlushCacheReq(id="flush"))
    script.send(random.randrange(step), GetInternalStateReq(id="state"))
    scenario = script.scenario(
        (128, 4, random.choice((8, -1))), disable_radix_cache=random.random() < 0.3,
        schedule_policy=random.choice(("fcfs", "random")), **script.graphs(1, 4), **script.in_turn(),
    )  # fmt: skip
    if random.random() < 0.3:
        scenario = _scored(scenario, random)
    return _with_waiting_flush(scenario, random) if random.random() < 0.4 else scenario


def _with_waiting_flush(scenario: Scenario, random: Random) -> Scenario:
    """The same, and a flush that waits until no request is left; in some runs it is cancelled."""
    step = random.randrange(max(arrival.step for arrival in scenario.arrivals) + 1)
    added = [Arrival(step, FlushCacheReq(id="waits", wait=True))]
    if random.random() < 0.3:
        added.append(Arrival(step + random.randint(1, 6), CancelFlushReq(id="waits")))
    arrivals = sorted((*scenario.arrivals, *added), key=lambda arrival: arrival.step)
    return replace(scenario, arrivals=tuple(arrivals))


def _scored(scenario: Scenario, random: Random) -> Scenario:
    """The same requests, which all ask for logprobs, from anywhere in their prompts, and for different numbers of
    alternatives."""

    def scored(message: Message) -> Message:
        if not isinstance(message, TokenizedGenerateReq):
            return message
        start, num = random.randrange(-1, len(message.input_ids)), random.choice((0, 1, 2, 4))
        return structs.replace(message, return_logprob=True, logprob_start_len=start, top_logprobs_num=num)

    arrivals = tuple(replace(arrival, message=scored(arrival.message)) for arrival in scenario.arrivals)
    return replace(scenario, arrivals=arrivals)


def _row_reuse(random: Random) -> Scenario:
    """F13: one row; its owner ends on a stop token, which is known only while its next step is in flight."""
    script = Script(random)
    for _ in range(4):
        stop = tuple(random.sample(range(1, VOCAB_SIZE), 24))
        script.add(0, script.prompt(2, 5), 6, temperature=1.0, stop_token_ids=stop)
    return script.scenario((24, 1, 16), page_size=1, **script.graphs(1))


def _staging(random: Random) -> Scenario:
    """F12: every step uploads, since pages of one token come one by one and the batch changes all the time."""
    script = Script(random)
    for index in range(6):
        script.add(index * random.randint(1, 2), script.prompt(1, 4), random.randint(2, 6), **script.options())
    return script.scenario((40, 3, 8), page_size=1, **script.graphs(2, 3))


def _growth(random: Random) -> Scenario:
    script = Script(random)
    script.add(0, script.prompt(2, 4), 5)
    long = script.prompt(2600, 2700)
    script.add(random.randint(0, 2), long, 2)
    if random.random() < 0.5:
        script.add(3, long[:300], 2, return_logprob=True, logprob_start_len=0, top_logprobs_num=20)
    return script.scenario((8192, 3, -1), page_size=16, max_prefill_tokens=4096)


def _graphs(random: Random) -> Scenario:
    script = Script(random)
    for index in range(6):
        script.add(index * random.randint(0, 3), script.prompt(1, 6), random.randint(2, 9), **script.options())
    return script.scenario((96, 5, 16), **script.graphs(2, 4, share=1.0), **script.in_turn())


def _buckets(random: Random) -> Scenario:
    script = Script(random)
    for index in range(6):
        start, options = index * random.randint(0, 2), random.choice(({}, {"temperature": 0.8}))
        script.add(start, script.prompt(1, 4), random.randint(4, 9), ignore_eos=True, **options)
    return script.scenario((128, 5, 16), cuda_graph_bs=(1, random.choice((2, 3))), context_length=GRAPH_CONTEXT)


def _outputs(random: Random) -> Scenario:
    script = Script(random)
    for index in range(4):
        options = {"temperature": 1.0, "ignore_eos": True}
        script.add(index * random.randint(0, 4), script.prompt(1, 4), random.randint(5, 10), **options)
    return script.scenario((96, 3, 16), cuda_graph_bs=(1, 3), context_length=GRAPH_CONTEXT)


# Those that decode in padded graphs and beyond them, split prompts, retract, and load prefixes from the host.
_OF_ATTENTION = (
    _mixed, _graphs, _aborts, _retraction,
    *(workload.make for workload in HICACHE_WORKLOADS if workload.name in ("spill", "offload")),
)  # fmt: skip


def _attention(backend: str) -> Callable[[Random], Scenario]:
    """Scenarios of other workloads with that attention backend; half of our own kernels' are over latents, some with
    drafts or pieces."""

    def make(random: Random) -> Scenario:
        scenario = random.choice(_OF_ATTENTION)(random)
        flags = {**scenario.flags, "attention_backend": backend}
        if backend == LAUNCHED and random.random() < 0.5:
            drafts = chains_of_models(random) if random.random() < 0.3 else {}
            flags |= {**drafts, **(PIECES if random.random() < 0.4 else {}), "model": "latents"}
        return replace(scenario, flags=flags)

    return make


def _experts(random: Random) -> Scenario:
    scenario = random.choice((_mixed, _prefixes, _aborts, _graphs, _retraction))(random)
    return replace(scenario, flags={**scenario.flags, "model": "experts"})


def _sparse(random: Random) -> Scenario:
    """F20: layers that attend to the tokens which an indexer selects, and layers that share its selection; more than it
    selects come back from the host, in pieces of graphs or whole. Some runs verify drafts."""
    kinds = *_OF_ATTENTION, *(workload.make for workload in HICACHE_WORKLOADS if workload.name == "conversations")
    scenario = random.choice(kinds)(random)
    drafts = chains_of_models(random) if random.random() < 0.4 else {}
    if drafts and random.random() < 0.5 and drafts["draft"] != "NGRAM":
        drafts = {**drafts, "draft": "NEXTN"}
    between = PIECES if random.random() < 0.4 else {}
    ours: Flags = {"model": "sparse", "attention_backend": random.choice((LAUNCHED, REFERENCE))}
    return replace(scenario, flags={**scenario.flags, **drafts, **between, **ours})


def _states(random: Random) -> Scenario:
    """Requests of a model with recurrent layers: mostly conversations and prompts that part at any token, with few
    snapshots; else what others ask for, cut, retracted, aborted and paused. Some runs verify drafts."""
    own = Random(str(random.getstate()[1][:8]))  # so that the other runs stay as they are
    drafts = chains_beside_states(own) if own.random() < 0.4 else {}
    if random.random() < 0.4:
        scenario = random.choice((_bursts, _retraction, _aborts, _row_reuse, _mixed))(random)
    else:
        scenario = _parting(random, 1.3 if drafts else 0.0)  # the common noise makes drafts agree
    flags = {**scenario.flags, "model": "states"}
    if not flags.get("disable_radix_cache"):
        flags["max_mamba_cache_size"] = int(str(flags["max_running_requests"])) + random.choice((1, 2, 4, 8, 32))
    if random.random() < 0.5:
        flags["chunked_prefill_size"] = random.choice((4, 8))
    between = PIECES if random.random() > 0.7 and flags.get("chunked_prefill_size") != 4 else {}
    tiers: Flags = {}
    if not flags.get("disable_radix_cache") and random.random() < 0.5:
        ratio, policy = random.choice((1.0, 2.0, 4.0)), random.choice(("recompute", "offload"))
        tiers = tier_flags(random, hicache_ratio=ratio, page_size=flags.get("page_size", 1), retract_policy=policy)
        # States are taken from the device before their pages.
        num_snapshots = random.choice((1, 1, 2))
        flags["max_mamba_cache_size"] = int(str(flags["max_running_requests"])) + num_snapshots
        if random.random() < 0.3:  # prefixes that only storage still has
            kinds = [one.make for one in HICACHE_WORKLOADS if one.name in ("namespaces", "fetched")]
            scenario = random.choice(kinds)(random)
            tiers = {"hicache_storage_prefetch_policy": "wait_complete", "hicache_storage_size": 1.0}
            most = int(str(scenario.flags["max_running_requests"])) + num_snapshots
            return replace(scenario, flags={**scenario.flags, **tiers, "model": "states", "max_mamba_cache_size": most})
    return replace(scenario, flags={**flags, **between, **tiers, **drafts})


def _parting(random: Random, temperature: float) -> Scenario:
    script = Script(random)
    families = [script.prompt(10, 20) for _ in range(2)]
    for turn in range(7):
        family = random.choice(families)
        prompt = family[: random.randint(5, len(family))] + script.prompt(1, 5)
        stops = tuple(random.sample(range(VOCAB_SIZE), random.choice((0, 12))))  # many answers end while a step goes on
        options = {"stop_token_ids": stops, "temperature": temperature}
        rid = script.add(turn * random.randint(2, 4), prompt, random.randint(1, 12), **options)
        if random.random() < 0.3:
            script.follow(rid, random.randint(1, 3), script.prompt(1, 4), random.randint(1, 5), temperature=temperature)
        elif random.random() < 0.2:
            script.send(3 * turn + random.randint(1, 6), AbortReq(rid=rid))
    return script.scenario(
        (random.choice((64, 96, 160)), 3, 16), page_size=random.choice((2, 4)), **script.graphs(2, 3),
        **script.in_turn(),
    )  # fmt: skip


def _pictures(random: Random) -> Scenario:
    """Prompts with pictures that fill the pool of embeddings, in chunks that end inside them, as prefixes on all tiers,
    retracted, with other weights, beside drafts that see them, and in pieces."""
    kinds = *_OF_ATTENTION, _prefixes, _bursts, _new_weights
    kinds += tuple(one.make for one in HICACHE_WORKLOADS if one.name in ("conversations", "storage"))
    scenario = random.choice(kinds)(random)
    drafts = chains_that_see(random) if random.random() < 0.5 else {}
    between = PIECES if random.random() < 0.4 else {}
    flags = {**scenario.flags, **drafts, **between}
    if "hicache_storage_backend" not in flags:  # there all is aborted soon
        looks_ahead = str(flags.get("draft", "")).startswith("NEXTN")
        flags["chunked_prefill_size"] = 8 if between or looks_ahead else random.choice((4, 8))
    return with_pictures(replace(scenario, flags=flags), random)


def _stored_pictures(random: Random) -> Scenario:
    script = Script(random)
    families = [[*script.prompt(1, 3), FIRST_PICTURE + 3 * index, *script.prompt(4, 8)] for index in range(2)]
    for turn in range(8):
        script.add(3 * turn + 15 * (turn > 3), families[turn // 2 % 2] + script.prompt(1, 3), random.randint(1, 4))
    script.empty(24)
    scenario = script.scenario(
        (64, 2, random.choice((8, 16))), hicache_storage_backend="file",
        hicache_storage_prefetch_policy="wait_complete",
        **{**tier_flags(random, hicache_ratio=2.0), "page_size": 2, "hicache_write_policy": "write_through"},
    )  # fmt: skip
    return with_pictures(scenario, random)


def _windows(random: Random) -> Scenario:
    """Layers that read what lies in their window and layers that read all, by three kinds of attention, some of them
    between the pieces of a graph; in half of the runs drafts are verified, of a model whose layers are as the target's,
    and in some of these trees of drafts. FlashInfer has one plan for each window."""
    scenario = random.choice((_mixed, _prefixes, _aborts, _graphs, _retraction))(random)
    kind = random.random()
    if kind < 0.25:
        planned = {"attention_backend": random.choice(PLANNED)}
        return replace(scenario, flags={**scenario.flags, **planned, "model": "windows"})
    ours = {"attention_backend": LAUNCHED} if kind < 0.75 else {}
    drafts = chains_of_models(random) if random.random() < 0.5 else {}
    if drafts and random.random() < 0.3:
        scenario = trees_under_windows(random)
        return replace(scenario, flags={**scenario.flags, **ours})
    between = PIECES if random.random() < 0.4 else {}
    return replace(scenario, flags={**scenario.flags, **ours, **drafts, **between, "model": "windows"})


def _new_weights(random: Random) -> Scenario:
    """Requests that share prefixes, before, while and after the weights are replaced; some prefixes are on the host or
    in storage, or on their way from there."""
    script = Script(random)
    families = [script.prompt(8, 16) for _ in range(2)]
    for turn in range(7):
        prompt = families[turn % 2] + script.prompt(1, 4)
        script.add(3 * turn + random.randrange(3), prompt, random.randint(2, 9), **script.options())
    step = random.randint(3, 8)
    for _ in range(random.randint(1, 3)):
        script.new_weights(step, abort_all=random.random() < 0.1)
        step += random.randint(1, 9)
    if random.random() < 0.3:
        script.send(step, PauseGenerationReq(id="pause", mode=random.choice(("retract", "in_place"))))
        script.new_weights(step + 1)
        script.send(step + 2, ContinueGenerationReq(id="continue"))
    storage = storage_flags(random)
    tiers = tier_flags(random, hicache_ratio=random.choice((1.0, 2.0))) if random.random() < 0.7 else {}
    return script.scenario(
        (random.choice((48, 96)), 3, 8), **{"page_size": 4, **tiers, **(storage if tiers else {})},
        **script.graphs(1, 3), **script.in_turn(),
    )  # fmt: skip


def _no_script(random: Random) -> Scenario:
    raise AssertionError("this workload goes through the front end, not through a script")


COLLECTIVES = "collectives"  # of several devices, without an engine
RANKS = "ranks"
RANKS_STORAGE = "ranks_storage"
WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        EVERYTHING,  # first, since a proof that is cut short needs most of its runs
        Workload("mixed", "chunked prefill and decode side by side, all kinds of sampling", _mixed, share=2),
        Workload("prefixes", "prefix hits and evictions in a pool that is too small", _prefixes, share=2),
        Workload("aborts", "requests aborted at any moment", _aborts, share=2),
        Workload("retraction", "running requests lose their memory and come back", _retraction, share=2),
        Workload("bursts", "four at once, then silence; pauses and flushes", _bursts, share=2),
        Workload("row_reuse", "one row, refilled while its last owner's step is in flight", _row_reuse, share=2),
        Workload("staging", "every step uploads", _staging, share=2),
        Workload("graphs", "decode in padded graphs of two sizes, and beyond them", _graphs, share=2),
        Workload("outputs", "F8: every decode step a replay, its tokens taken as they are", _outputs, share=2),
        Workload("buckets", "F11: more requests than the largest graph holds", _buckets),
        Workload("growth", "uploads and results that outgrow the rings", _growth),
        GRAMMARS,
        *HICACHE_WORKLOADS,
        Workload("launched", "attention by launches of our own kernels", _attention(LAUNCHED), share=2),
        Workload("flashinfer", "F12: plans made on the host, with room for one", _attention(FLASHINFER), share=2),
        Workload("new_weights", "the weights are replaced while requests run", _new_weights, share=2),
        Workload("experts", "a mixture of experts, in padded graphs and without", _experts, share=2),
        Workload("windows", "layers with sliding windows and soft caps", _windows, share=2),
        Workload("states", "a model with recurrent layers, and few snapshots of their states", _states, share=2),
        Workload("pictures", "prompts with pictures, whose embeddings never stay long", _pictures, share=2),
        Workload("stored_pictures", "pictures in storage, and nearly equal ones in prompts", _stored_pictures),
        Workload("sparse", "F20: layers that attend to selected tokens", _sparse, share=2),
        *SPECULATIVE_WORKLOADS,
        Workload(COLLECTIVES, "F10, F19: sums of several ranks, eager and in graphs", _no_script),
        Workload(RANKS, "F19: the engine on two ranks, with prefixes on the host", _no_script),
        Workload(RANKS_STORAGE, "two ranks whose storages differ in time and in failures", _no_script),
    )
}
SCRIPTED = tuple(name for name, workload in WORKLOADS.items() if workload.make is not _no_script)
