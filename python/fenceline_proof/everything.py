"""The workload ``everything``: each run is a random combination of all features.

Seeds take turns through all pairs of an arrangement of requests and an engine, so that twenty runs have all of them.

The fields of requests, the flags of the engine and the messages of control are lists of independent choices below. A
new feature is one more line in one of them, and an event or two in ``events.EVENTS``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from msgspec import structs

from fenceline.ipc.io_struct import (
    AbortReq,
    CancelFlushReq,
    ContinueGenerationReq,
    FlushCacheReq,
    PauseGenerationReq,
    TokenizedGenerateReq,
)
from fenceline_proof.events import STATES
from fenceline_proof.flashinfer_library import PLANNED
from fenceline_proof.grammars import choose, load_grammars
from fenceline_proof.hicache_workloads import with_storage_limits
from fenceline_proof.launched_attention import LAUNCHED, REFERENCE
from fenceline_proof.persistent_attention import PERSISTENT
from fenceline_proof.pictures import PICTURES, with_pictures
from fenceline_proof.script import GRAPH_CONTEXT, Arrival, Flag, Flags, Scenario, Script, Workload
from fenceline_proof.speculative_workloads import (
    chains_beside_states,
    chains_of_models,
    chains_that_see,
    draft_flags,
    several_layers,
    trees,
    without_drafts,
)
from fenceline_proof.tiny_model import VOCAB_SIZE

_POLICIES = ("write_through", "write_through_selective", "write_back")
_ATTENTION = (PERSISTENT, LAUNCHED, *PLANNED, "", "")  # "": torch's operators
_HOT = 4.0  # the common noise makes drafts agree, also those of several layers
# What kind of engine a run has: it speculates, plans attention on the host, or keeps keys and values in FP8.
_DRAFTS, _PLANS, _EIGHT_BITS = "drafts", "plans", "eight bits"


def _request(random: Random, num_prompt: int) -> dict[str, Any]:
    """The options of one request of ``num_prompt`` tokens, each chosen independently."""

    def wants(share: float) -> bool:
        return random.random() < share

    options: dict[str, Any] = {"extra_key": random.choice(("", "", "", "", "a", "b")), "stream": wants(0.8)}
    if wants(0.5):
        options["temperature"] = random.choice((0.6, 1.3, _HOT))
        if wants(0.4):
            options |= {"top_k": random.choice((1, 2, 8)), "top_p": random.choice((0.6, 0.9, 1.0))}
        if wants(0.3):
            options["min_p"] = random.choice((0.02, 0.1))
    if wants(0.35):
        options |= {"frequency_penalty": random.choice((-0.5, 0.8)), "presence_penalty": 0.3}
        options["repetition_penalty"] = random.choice((1.0, 1.4))
    if wants(0.35):
        options["logit_bias"] = {random.randrange(VOCAB_SIZE): 4.0, random.randrange(VOCAB_SIZE): -5.0}
    if wants(0.3):
        options["stop_token_ids"] = tuple(random.sample(range(1, VOCAB_SIZE), 8))
    if wants(0.3):
        options["ignore_eos"] = True
    if wants(0.3):
        start = random.choice((-1, 0, num_prompt // 2, num_prompt - 1))
        options |= {"return_logprob": True, "logprob_start_len": start}
        options |= {"top_logprobs_num": random.choice((0, 3)), "token_ids_logprob": random.choice(([], [9, 2]))}
    return options


def _requests(script: Script) -> None:
    """Bursts of requests of a few families with common prefixes, some of them twins (with equal prompts). All may end
    in the pause between bursts. The burst before the last evicts the prefixes of the last one from the device.

    In some runs all requests are plain: they share a whole family's prefix, are greedy and in one namespace. Such
    requests share more and hold more memory together, and twins get equal answers.
    """
    random, step = script.random, 0
    plain = random.random() < 0.35
    constrained = not plain and random.random() < 0.75
    if constrained:
        load_grammars(script)
        script.abort_when("running", random.randrange(3, 12))
    families = [script.prompt(9, 15) for _ in range(4)]
    for first, second in random.choice((((0, 1), (1, 2)), ((0, 1), (2, 3), (0, 1)))):
        third = random.choice((first, second, random.randrange(4)))
        for family in (families[first], families[second], families[third]):
            kept = len(family) if plain or random.random() < 0.7 else random.randrange(len(family))
            prompt = family[:kept] + script.prompt(1, 6)
            _some(script, step + random.choice((0, 0, 0, 2)), prompt, plain, constrained)
        step += random.choice((random.randint(4, 10), random.randint(16, 30)))


def _some(script: Script, step: int, prompt: list[int], plain: bool, constrained: bool) -> None:
    """A request, or two with the same prompt. The two have equal options except the seed, or independent ones."""
    random = script.random
    num_twins = random.choice((1, 1, 2))
    alike = plain or random.random() < 0.5
    for index in range(num_twins):
        if index == 0 or not alike:
            options: dict[str, Any] = {"ignore_eos": True} if plain else _request(random, len(prompt))
            options["priority"] = random.choice((0, step, 20))  # used if the engine has priorities
            num_tokens = random.choice((0, 1, 3, 5, 9, 14))
            if num_tokens > 1 and random.random() < 0.2:
                options["min_new_tokens"] = random.randrange(2, num_tokens + 1)
                options["stop_token_ids"] = tuple(range(16, VOCAB_SIZE))  # which it would draw before
            if constrained and random.random() < 0.75:
                options["grammar"], num_tokens = choose(random), max(num_tokens, 5)
        rid = script.add(step, prompt, num_tokens, **options)
    if random.random() < 0.2:
        script.follow(rid, random.randint(0, 4), script.prompt(1, 5), random.randint(1, 4))


def _control(script: Script) -> None:
    """Pauses, aborts and flushes that arrive while the requests run."""
    random = script.random
    step = 0
    for number, mode in enumerate(random.sample(("abort", "retract", "in_place"), random.choice((1, 2, 2)))):
        step += random.randint(3, 7)
        script.send(step, PauseGenerationReq(id=f"pause {number}", mode=mode))
        step += random.randint(1, 4)
        script.send(step, ContinueGenerationReq(id=f"continue {number}"))
    for state in random.sample((*STATES, "before a remap", "retracted"), 4):
        script.abort_when(state, random.randrange(12))
    if random.random() < 0.2:
        script.send(random.randrange(4, 30), AbortReq(abort_all=True))
    if random.random() < 0.5:
        script.when_idle(random.randrange(10, 30), FlushCacheReq(id="flush", storage=random.random() < 0.7))
    if random.random() < 0.75:
        step = random.randrange(20)
        script.send(step, FlushCacheReq(id="early", wait=random.random() < 0.5))
        if random.random() < 0.2:
            script.send(step + random.randint(1, 8), CancelFlushReq(id="early"))


def _flags(random: Random, page_size: int, most: int, tiers: bool = False) -> Flags:
    """The engine's flags, each chosen independently except those that need each other."""
    flags: dict[str, Flag] = {
        "page_size": page_size, "context_length": GRAPH_CONTEXT, "max_total_tokens": random.choice((40, 56, 64)),
        "max_running_requests": most, "chunked_prefill_size": random.choice((8, 16, 24, -1)),
        "schedule_policy": random.choice(("fcfs", "lpm", "dfs-weight", "random")),
        "schedule_conservativeness": random.choice((0.01, 0.01, 1.0)), "stream_interval": random.choice((1, 1, 3)),
        "disable_overlap_schedule": random.random() < 0.1,
    }  # fmt: skip
    if random.random() < 0.85:
        flags["cuda_graph_bs"] = random.choice(((1, 2), (2,), (1, most), (most,)))
        flags["disable_cuda_graph_padding"] = random.random() < 0.15
        flags["debug_cuda_graph"] = random.random() < 0.45
    if random.random() < 0.75:
        flags["piecewise_cuda_graph_tokens"] = random.choice(((2, 8), (4,), (8,)))
    backend = random.choice(_ATTENTION)
    if backend:
        flags["attention_backend"] = backend
    if random.random() < 0.5:
        flags |= {"enable_priority_scheduling": True, "schedule_policy": "fcfs"}
        flags["schedule_low_priority_values_first"] = random.random() < 0.3
        flags["priority_scheduling_preemption_threshold"] = random.choice((0, 0, 10))
    if tiers or random.random() < 0.9:
        flags |= _tiers(random)
    else:
        flags["disable_radix_cache"] = flags["schedule_policy"] == "fcfs"
    return flags


def _tiers(random: Random) -> Flags:
    flags: dict[str, Flag] = {
        "enable_hierarchical_cache": True, "hicache_ratio": random.choice((0.5, 0.5, 0.5, 1.0, 2.0)),
        "hicache_write_policy": random.choice(_POLICIES),
        "hicache_mem_layout": random.choice(("layer_first", "page_first")),
        "hicache_io_backend": random.choice(("kernel", "direct")),
        "retract_policy": random.choice(("recompute", "offload", "offload", "offload")),
    }  # fmt: skip
    if random.random() < 0.8:
        policy = random.choice(("best_effort", "wait_complete", "timeout"))
        flags |= {"hicache_storage_backend": "file", "hicache_storage_prefetch_policy": policy}
        if policy == "timeout":
            flags["hicache_storage_prefetch_timeout"] = random.choice((0.02, 0.1))  # two steps, ten
    return flags


def _loads_meet(script: Script, page_size: int, engine: str) -> Flags:
    """An arranged run: two prefixes that are on the host alone are needed at once, one of them twice. That one consists
    of two nodes, because its beginning was a prompt before. With write_back other prompts, which fill the device, go to
    the host one after the other while the first of the two is loading."""
    random, size = script.random, 3 * page_size
    first, second = script.prompt(size, size), script.prompt(size, size)
    fillers = [script.prompt(size, size) for _ in range(4)]
    for turn, prompt in enumerate((first[:page_size], first, second, *fillers)):
        script.add(5 * turn, prompt + script.prompt(1, 1), 1)
    for prompt in (first, second, first):
        script.add(38, prompt + script.prompt(1, 2), random.randint(1, 3))
    flags: Flags = {}
    if engine == _PLANS and random.random() < 0.5:  # or they are computed again, and the host's copies kept
        flags = {"least_tokens": size + 1}
    return {
        **flags,
        "max_total_tokens": 14 * page_size, "max_running_requests": 3, "chunked_prefill_size": -1, "hicache_ratio": 2.0,
        "hicache_write_policy": random.choice(("write_through", "write_back", "write_back")),
    }  # fmt: skip


def _overtaken(script: Script, page_size: int, engine: str) -> Flags:
    """An arranged run: of two twins one is preempted by a request of higher priority. Or both are, because that request
    is large, and it evicts their pages from a small host tier, so that their tails cannot be used. Or one goes for a
    sample of a prompt, and the other one for the second sample, when the prompt is cached."""
    random = script.random
    large = random.random() < 0.6
    num_better = 1 if large else random.choice((1, 2))
    prompt = script.prompt(2 * page_size, 2 * page_size + 2)
    num_tokens = 5 * page_size
    for priority in (0, 0 if large or num_better == 2 else 30):
        script.add(0, prompt, num_tokens, ignore_eos=True, priority=priority)
    step = random.randint(5, 8)
    better = script.prompt(6 * page_size, 6 * page_size) if large else script.prompt(2, 4)
    if num_better == 2:
        better = script.prompt(34, 38)
    for _ in range(num_better):
        body = step + 1 if num_better == 2 else 0
        script.add(step, better, 10 * page_size if large else 12, ignore_eos=True, priority=30, body=body)
    if random.random() < 0.3:
        script.abort_when("before a remap", 0)
    return {
        "max_total_tokens": 128 if num_better == 2 else 18 * page_size, "max_running_requests": 3 if large else 2,
        "chunked_prefill_size": -1, "enable_priority_scheduling": True, "schedule_policy": "fcfs",
        "schedule_conservativeness": 1.0, "schedule_low_priority_values_first": False,
        "hicache_ratio": 0.5 if large else 2.0, "hicache_write_policy": "write_through", "retract_policy": "offload",
    }  # fmt: skip


def _from_storage(script: Script, page_size: int, engine: str) -> Flags:
    """An arranged run: prompts come back when device and host are empty, so only storage still has them. While some
    pages are still being written there, the first of them leave the host."""
    random = script.random
    families = [script.prompt(3 * page_size, 5 * page_size) for _ in range(2)]
    for turn, family in enumerate(families):
        script.add(3 * turn, family + script.prompt(1, 3), random.randint(1, 3))
    back = random.randint(12, 20)
    script.empty(back, wait=True)
    for family, pause in zip((families[0], families[1], families[0]), (0, 1, random.randrange(4)), strict=True):
        prompt = family + script.prompt(1, 3)
        options = _request(random, len(prompt)) | {"extra_key": ""}
        script.add(back + 3 + pause, prompt, random.randint(2, 6), **options)
    if random.random() < 0.4:
        script.abort_when("waiting for storage", back)
    if random.random() < 0.5:
        script.when_idle(back + 6, FlushCacheReq(id="of storage", storage=True))
    flags: dict[str, Flag] = {}
    if random.random() < (0.9 if engine == _DRAFTS else 0.4):  # or storage often answers too late
        flags["hicache_storage_prefetch_policy"] = "wait_complete"
    if random.random() < 0.8:  # or a directory is often too small for what comes back
        flags["hicache_storage_size"] = 1.0
    return {
        **flags, "max_total_tokens": 16 * page_size + 16, "max_running_requests": random.choice((2, 3)),
        "hicache_ratio": random.choice((1.0, 2.0)), "hicache_write_policy": "write_through",
        "hicache_storage_backend": "file",
    }  # fmt: skip


def _paused_twice(script: Script, page_size: int, engine: str) -> Flags:
    """An arranged run: two pauses retract requests of different kinds, half of whose pages are not full; one is aborted
    then or soon after."""
    random = script.random
    flags: Flags = {}
    hot = {"temperature": _HOT}
    kinds: list[dict[str, Any]] = [hot, {**hot, "repetition_penalty": 1.3, "frequency_penalty": 0.4}]
    constrained = random.random() < 0.7
    if constrained:
        load_grammars(script)
        kinds = random.choice((kinds, [])) + [{"grammar": choose(random), "min_new_tokens": 8}]
    most = random.choice((2, 3))
    for index in range(3):
        options = kinds[index % len(kinds)] | {"ignore_eos": True}
        script.add(index, script.prompt(2, 2 * page_size), random.randint(12, 22), **options)
    step = random.randint(7, 10)
    if constrained and random.random() < 0.6:
        script.abort_when("running", step - random.randint(1, 4))
    crowded = random.random() < 0.5
    if crowded:  # two that come during the first pause take all pages on both tiers, so that no tail can be used
        flags = {"enable_priority_scheduling": True, "schedule_policy": "fcfs", "chunked_prefill_size": -1}
        flags |= {"schedule_low_priority_values_first": False, "hicache_write_policy": "write_through"}
        for _ in range(2):
            script.add(step, script.prompt(26, 28), 2, priority=30)
    elif random.random() < 0.7:  # half-way through its prompt
        flags, most = {**flags, "chunked_prefill_size": 8}, 4
        scored = {"return_logprob": True, "logprob_start_len": random.randrange(4)}
        script.add(step - random.randint(2, 4), script.prompt(24, 32), random.randint(1, 4), **scored)
    with_a_tail = ("retracted with a tail",)
    for state in random.choice((with_a_tail, with_a_tail, ("retracted", "running"), ("queued",))):
        script.abort_when(state, step + random.choice((0, 6)))
    for number in range(2):
        script.send(step, PauseGenerationReq(id=f"pause {number}", mode="retract"))
        script.send(step + random.randint(1, 2), ContinueGenerationReq(id=f"continue {number}"))
        step += random.randint(5, 7)
    return {
        **flags, "max_running_requests": most, "max_total_tokens": 64 if crowded else random.choice((64, 96)),
        "hicache_ratio": 0.5 if crowded else random.choice((0.5, 0.5, 1.0, 2.0)),
        "retract_policy": "offload" if crowded else random.choice(("offload", "offload", "recompute")),
    }  # fmt: skip


_Arrangement = Callable[[Script, int, str], Flags]  # of a run's script, page size and engine
_ENGINES = (_DRAFTS, _PLANS, _EIGHT_BITS)
_ARRANGEMENTS: tuple[_Arrangement | None, ...] = (  # None: requests and flags of all kinds
    None, _from_storage, _paused_twice, None, _loads_meet, _overtaken, None
)  # fmt: skip


def _everything(random: Random, arrangement: _Arrangement | None, engine: str) -> Scenario:
    scenario = _product(random, arrangement, engine)
    flags = dict(with_storage_limits(random, scenario.flags))
    flags |= _seldom(random, flags)
    if "kv_cache_dtype" in flags:  # FlashInfer reads no FP8: our own kernels attend in its place
        flags = {name: LAUNCHED if value in PLANNED else value for name, value in flags.items()}
    if flags.get("model") == "sparse":  # only these attend to selected tokens
        chosen = [name for name in flags if name.endswith("attention_backend")]
        flags |= {name: REFERENCE for name in chosen if flags[name] != LAUNCHED}
    if flags.get("model") == PICTURES:
        scenario = with_pictures(replace(scenario, flags=flags), random)
        flags = dict(scenario.flags)
    arrivals = scenario.arrivals
    if random.random() < 0.4:
        arrivals = _in_bodies(random, arrivals)
    return replace(scenario, flags=flags, arrivals=arrivals)


def _of_engine(random: Random, engine: str, arrangement: _Arrangement | None) -> Flags:
    if engine == _EIGHT_BITS and random.random() < 0.85:
        return {"kv_cache_dtype": "fp8_e4m3"}
    if engine == _PLANS and random.random() < 0.7:
        return {"attention_backend": random.choice(PLANNED), "disable_overlap_schedule": False}
    if arrangement is _paused_twice:  # where they agree
        return several_layers(random)
    return random.choice((trees, several_layers, several_layers, draft_flags))(random)


def _seldom(random: Random, flags: Flags) -> Flags:
    more: dict[str, Flag] = {}
    if random.random() < 0.15:
        more["prefill_max_requests"] = random.choice((1, 2))
    if random.random() < 0.15:
        more["max_prefill_tokens"] = random.choice((24, 40))
    if flags.get("enable_priority_scheduling") and random.random() < 0.15:
        more["disable_priority_preemption"] = True
    if random.random() < 0.2:  # another one than prefill has; on a GPU both stand-ins of FlashInfer are one
        planned = () if flags.get("attention_backend") in PLANNED else PLANNED
        more["decode_attention_backend"] = random.choice((PERSISTENT, LAUNCHED, "", *planned))
    if "draft" in flags and random.random() < 0.2:
        more["speculative_draft_attention_backend"] = random.choice((PERSISTENT, LAUNCHED))
    return more


def _in_bodies(random: Random, arrivals: Sequence[Arrival]) -> tuple[Arrival, ...]:
    """Most requests that arrive together come in one HTTP body."""

    def placed(arrival: Arrival) -> Arrival:
        message = arrival.message
        if not isinstance(message, TokenizedGenerateReq) or random.random() >= 0.8:
            return arrival
        return replace(arrival, message=structs.replace(message, body=arrival.step + 1))

    return tuple(map(placed, arrivals))


def _product(random: Random, arrangement: _Arrangement | None, engine: str) -> Scenario:
    script = Script(random)
    page_size = random.choice((1, 2, 4, 4, 8) if arrangement is None else (2, 4))
    if random.random() < 0.2:
        script.add(random.randrange(20), script.prompt(120, 130), 1)  # larger than the pool
    of_engine = _of_engine(random, engine, arrangement)
    if arrangement is not None:  # for events that rarely happen by chance
        piece = arrangement(script, page_size, engine)
        flags: Flags = {**_flags(random, page_size, int(str(piece["max_running_requests"])), tiers=True), **of_engine}
        share = 0.0 if arrangement is _paused_twice and "draft" in flags else 0.5
        return script.scenario(**_fitting({**_with_another_model(random, flags, share), **piece}))
    _requests(script)
    _control(script)
    flags = {**_flags(random, page_size, random.randint(2, 4)), **of_engine}
    if random.random() < 0.5:
        # They are the plain model's.
        keep_pause = random.random() < 0.3
        script.new_weights(random.randrange(2, 7), partly=0.6, keep_pause=keep_pause)
    else:
        flags = _with_another_model(random, flags, 0.8)
    if random.random() < 0.4:  # shorter parts of a prefix are not loaded from the host, but computed again
        flags = {**flags, "least_tokens": 3 * page_size}
    if random.random() < 0.2:  # as much memory as the running requests can use
        flags = {name: value for name, value in flags.items() if name != "max_total_tokens"}
        flags["context_length"] = GRAPH_CONTEXT - 3  # the last page is not whole
    return script.scenario(**_fitting(_with_states(random, flags) if not script.num_updates else flags))


def _fitting(flags: Flags) -> Flags:
    """Without --debug-cuda-graph beside drafts: it computes prefill steps in pieces twice and the draft's rows once,
    and the tags expect one after the other. Without a time-out for prefetches unless their policy is ``timeout``."""
    fitting = dict(flags)
    if "draft" in flags:
        fitting["debug_cuda_graph"] = False
    if flags.get("hicache_storage_prefetch_policy") != "timeout":
        fitting.pop("hicache_storage_prefetch_timeout", None)
    return fitting


def _with_another_model(random: Random, flags: Flags, share: float) -> Flags:
    """Another model in the place of the plain one in a share of the runs; its draft is a whole model, or one that sees
    pictures. Those kinds of attention that the engine asks for select no tokens, so that the sparse one comes with
    drafts."""
    if random.random() >= share:
        return flags
    model = random.choice(("windows", "windows", "sparse", "experts", PICTURES, PICTURES, PICTURES))
    if "draft" not in flags:
        return {**flags, "model": "windows" if model == "sparse" else model}
    if "speculative_eagle_topk" in flags and model in ("experts", PICTURES):  # the others have no trees
        return {**flags, "draft": random.choice(("NEAR", "ITSELF")), "model": model}
    drafts = chains_that_see(random) if model == PICTURES else chains_of_models(random)
    return {**without_drafts(flags), **drafts, "model": model}


def _with_states(random: Random, flags: Flags) -> Flags:
    """The model with recurrent layers in place of the plain one in a few runs, without the flags that are refused
    beside it, and without --debug-cuda-graph, because the tags do not know that it puts states back. It has a generator
    of its own, so that the other runs stay as they are."""
    own = Random(str(random.getstate()[1][:8]))
    if "model" in flags or own.random() < 0.3:
        return flags
    kept = {**without_drafts(flags)}
    for refused in ("debug_cuda_graph", "hicache_storage_size"):
        kept.pop(refused, None)
    kept |= chains_beside_states(own) if "draft" in flags else {}
    if not flags.get("disable_radix_cache"):
        kept["max_mamba_cache_size"] = int(str(flags["max_running_requests"])) + own.choice((1, 3, 16))
    return {**kept, "model": "states"}


_KINDS = tuple(partial(_everything, arrangement=some, engine=engine) for engine in _ENGINES for some in _ARRANGEMENTS)
EVERYTHING = Workload(
    "everything", "a random product of all features", lambda random: random.choice(_KINDS)(random),
    share=len(_KINDS) - 1, kinds=_KINDS,
)  # fmt: skip
