"""Workloads that speculate: drafts that are accepted and rejected, on one tier and on several.

As in ``workloads``, each is a function of a seed, and small. ``draft`` is one of ``tiny_model.DRAFTS``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from fenceline.ipc.io_struct import AbortReq, ContinueGenerationReq, PauseGenerationReq
from fenceline_proof.grammars import choose, load_grammars
from fenceline_proof.hicache_workloads import storage_flags, tier_flags
from fenceline_proof.persistent_attention import PERSISTENT
from fenceline_proof.script import Flag, Flags, Scenario, Script, Workload
from fenceline_proof.tiny_model import DRAFTS, VOCAB_SIZE


def without_drafts(flags: Flags) -> Flags:
    others = ("draft", "speculative_", "depth_seed")
    return {name: value for name, value in flags.items() if not name.startswith(others)}


def looked_up(random: Random) -> Flags:
    """No draft model: tokens are looked up in those of the request, which any target of ``tiny_model`` can do."""
    flags: Flags = {"draft": "NGRAM", "speculative_adaptive": False, "speculative_num_steps": random.choice((1, 3, 5))}
    return {**flags, "speculative_ngram_min_match_window_size": random.choice((1, 1, 2)), **_depths(random)}


def _sometimes_looked_up(drafts: Callable[[Random], Flags]) -> Callable[[Random], Flags]:
    """``drafts``, and in some runs :func:`looked_up`; the others stay as they are."""

    def choose(random: Random) -> Flags:
        own = Random()
        own.setstate(random.getstate())
        return looked_up(own) if own.random() < 0.15 else drafts(random)

    return choose


@_sometimes_looked_up
def draft_flags(random: Random) -> Flags:
    """A draft, and how many tokens it proposes: in half of the runs another number in each step, in some trees."""
    draft = random.choice(DRAFTS)
    if draft == "NEXTN2":
        return several_layers(random)
    if random.random() < 0.35:
        flags = _tree_flags(random, draft)
    else:
        flags = {"draft": draft, "speculative_num_steps": random.choice((1, 2, 3))}
    return flags | _depths(random)


@_sometimes_looked_up
def chains_that_see(random: Random) -> Flags:
    """Drafts of the model with pictures, all of which see these; as often as not a whole model, which often agrees."""
    if random.random() < 0.4:
        return chains_of_models(random)
    if random.random() < 0.4:
        return several_layers(random)
    draft = random.choice(("EAGLE3", "EAGLE3", "NEXTN"))
    return {"draft": draft, "speculative_num_steps": random.choice((1, 2, 3)), **_depths(random)}


@_sometimes_looked_up
def chains_of_models(random: Random) -> Flags:
    """A whole model as the draft, which any target of ``tiny_model`` has, and no trees, which need long windows."""
    num_steps = random.choice((1, 2, 3))
    return {"draft": random.choice(("NEAR", "ITSELF")), "speculative_num_steps": num_steps, **_depths(random)}


@_sometimes_looked_up
def chains_beside_states(random: Random) -> Flags:
    """Drafts of the model with recurrent layers, whose own layers all attend."""
    draft = random.choice(("EAGLE3", "NEXTN", "NEAR"))
    return {"draft": draft, "speculative_num_steps": random.choice((1, 2, 3)), **_depths(random)}


def trees_under_windows(random: Random) -> Scenario:
    """Trees of drafts, verified for requests that are a little shorter than the window of some layers, and grow longer
    than it."""
    script = Script(random)
    family = script.prompt(52, 60)
    for step in range(3):
        prompt = family + script.prompt(1, 6)
        script.add(step * random.randint(1, 4), prompt, random.randint(6, 14), **_options(script))
    return script.scenario(
        (256, 2, 64), model="long_windows", page_size=random.choice((2, 4)),
        **_tree_flags(random, random.choice(("NEAR", "ITSELF"))),
    )  # fmt: skip


def several_layers(random: Random) -> Flags:
    """A draft with a layer for each of its steps."""
    num_layers = random.choice((2, 3))
    return {"draft": f"NEXTN{num_layers}", "speculative_num_steps": num_layers, **_depths(random)}


def trees(random: Random) -> Flags:
    """Trees of drafts, of a model that often agrees."""
    return _tree_flags(random, random.choice(("NEAR", "ITSELF", "NEXTN", "EAGLE3"))) | _depths(random)


def _depths(random: Random) -> dict[str, Flag]:
    return {"depth_seed": random.randrange(1 << 16)} if random.random() < 0.5 else {}


def _tree_flags(random: Random, draft: str) -> dict[str, Flag]:
    num_steps, topk = random.choice((1, 2, 3)), random.choice((2, 3))
    most = 1 + topk + (num_steps - 1) * topk * topk
    return {
        "draft": draft,
        "speculative_num_steps": num_steps,
        "speculative_eagle_topk": topk,
        # All nodes of a small tree, so that the proof can tell which of them must be accepted.
        "speculative_num_draft_tokens": random.choice((min(most, 7), random.randint(num_steps + 1, min(most, 7)))),
    }


def _options(script: Script) -> dict[str, object]:
    """As ``Script.options``, but more often a high temperature: the common noise makes random drafts agree."""
    random = script.random
    options = script.options()
    if random.random() < 0.5:
        options = {"temperature": random.choice((0.8, 1.3))}
    if random.random() < 0.2:
        options["stop_token_ids"] = tuple(random.sample(range(1, VOCAB_SIZE), 12))
    return options | {"ignore_eos": True}


def _speculation(random: Random) -> Scenario:
    """Prompts with common prefixes, in chunks, and some that are shorter than a draft has layers; aborts at any moment;
    little memory. All decode steps are in graphs."""
    script = Script(random)
    family = script.prompt(9, 13)
    for index in range(6):
        is_short = random.random() < 0.2
        prompt = script.prompt(1, 3) if is_short else family[: random.randrange(4, 14)] + script.prompt(1, 4)
        rid = script.add(index * random.randint(0, 3), prompt, random.randint(3, 12), **_options(script))
        if random.random() < 0.25:
            script.send(random.randrange(3, 14), AbortReq(rid=rid, silent=random.random() < 0.3))
    return script.scenario(
        (random.choice((64, 96)), 5, 16), page_size=random.choice((2, 4)),
        schedule_conservativeness=random.choice((0.01, 1.0)), **draft_flags(random), **script.graphs(2, 4, share=1.0),
        **script.in_turn(),
    )  # fmt: skip


def _speculation_trees(random: Random) -> Scenario:
    """The same with trees, of drafts that often agree: accepted nodes seldom lie where their tokens belong. Pages are
    small, so that a tree needs some of its own, and there are few of them."""
    scenario = _speculation(random)
    draft = random.choice(("NEAR", "ITSELF", "NEAR", "NEXTN", "EAGLE3"))
    flags = {**without_drafts(scenario.flags), **_tree_flags(random, draft), "page_size": 2}
    return replace(scenario, flags=flags)


def _speculation_tiers(random: Random) -> Scenario:
    """Prefixes come back from the host and from storage; running requests are retracted, by a pause too. Some drafts
    have rows of another size than the target's. Under masks the draft is extended apart from the step's forward, while
    backups may want the same multiprocessors."""
    script = Script(random)
    constrained = random.random() < 0.4
    if constrained:
        load_grammars(script)
    families = [script.prompt(9, 13) for _ in range(3)]
    for turn in range(7):
        prompt = families[turn % 3] + script.prompt(1, 3)
        options = _options(script)
        if constrained and random.random() < 0.6:
            options["grammar"] = choose(random)
        script.add(2 * turn, prompt, random.randint(2, 9), **options)
    pause = random.randint(4, 9)
    script.send(pause, PauseGenerationReq(id="pause", mode="retract"))
    script.send(pause + random.randint(1, 2), ContinueGenerationReq(id="continue"))
    step = random.randint(12, 18)
    script.empty(step)  # of device and host: the rest comes from storage
    exclusive: Flags = {}
    if constrained and random.random() < 0.7:
        exclusive = {"attention_backend": PERSISTENT, "hicache_io_backend": "kernel"}
    storage = storage_flags(random)
    scenario = script.scenario(
        (random.choice((40, 48)), 3, 16), schedule_conservativeness=0.01,
        retract_policy=random.choice(("offload", "recompute")), **draft_flags(random),
        **tier_flags(random, hicache_ratio=random.choice((1.0, 2.0)), **exclusive), **storage,
        **script.graphs(1, 3, share=0.7), **script.in_turn(),
    )  # fmt: skip
    if scenario.flags["draft"] == "EAGLE3" and random.random() < 0.8:
        flags = {**scenario.flags, "draft": "EAGLE3 of one head"}
        flags["hicache_io_backend"] = random.choice(("kernel", "kernel", "kernel", "direct"))
        return replace(scenario, flags=flags)
    return scenario


SPECULATIVE_WORKLOADS = (
    Workload("speculation", "drafts that are accepted and rejected, in padded graphs", _speculation, share=2),
    Workload("speculation_trees", "trees of drafts, and the rows that are moved", _speculation_trees),
    Workload("speculation_tiers", "pages with a draft's layers on host and storage", _speculation_tiers),
)
