"""A draft's KV in the prefix cache is what it would be if it were computed anew, on every tier: so drafts are accepted
after a hit as they are without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from draft_checkpoints import VOCAB
from scheduler_driver import Driver, request
from speculative_driver import EAGLE, EAGLE3, LATENT_DRAFTS, NEXTN, NGRAM, STANDALONE, make_driver, models

from fenceline.config.draft_config import SpeculativeAlgorithm
from fenceline.ipc.io_struct import AbortReq, CachedTokensDetails, ContinueGenerationReq, PauseGenerationReq, SpecCounts
from fenceline.mem_cache.transfer import TransferKind
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import ForwardResult, HeldStep, StepBatch

__all__ = ["models"]  # a fixture

PAGE = 16
TIERS = [
    (EAGLE3, "eagle3", "write_back", "layer_first"),
    (STANDALONE, "near", "write_through_selective", "page_first"),
    (EAGLE, "eagle", "write_through", "layer_first"),
    (NEXTN, None, "write_back", "page_first"),
    (NEXTN, "mtp", "write_through", "page_first"),
    (NEXTN, "glm-5-shared", "write_through", "layer_first"),
]

Rows = dict[str, torch.Tensor]  # by layer and name, [tokens, *shape of the row]
MakeDriver = Callable[..., Driver]


@dataclass(frozen=True)
class Served:
    """A request's answer, how its drafts fared, and from where its prefix came."""

    output_ids: list[int]
    drafts: SpecCounts
    details: CachedTokensDetails | None


@pytest.fixture
def driver_of(models: dict[str, Path]) -> Iterator[MakeDriver]:
    """Makes engines whose workers end with the test."""
    made: list[Driver] = []

    def make(algorithm: SpeculativeAlgorithm, draft: str | None, **flags: object) -> Driver:
        made.append(make_driver(models, algorithm, draft, **flags))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for driver in made:
        driver.scheduler.close()


def tiers(policy: str, layout: str, directory: Path) -> dict[str, object]:
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 4.0,
        "hicache_write_policy": policy,
        "hicache_mem_layout": layout,
        "hicache_storage_backend": "file",
        "hicache_storage_dir": str(directory),
        "hicache_storage_prefetch_policy": "wait_complete",
        "max_total_tokens": 640,
    }


def serve(driver: Driver, prompt: list[int], extra_key: str = "", **params: object) -> Served:
    rid = f"r{len(driver.answers)}"
    params = {"max_new_tokens": 20, "temperature": 2.0, "ignore_eos": True, "seed": len(prompt)} | params
    driver.send(request(rid, prompt, extra_key=extra_key, **params))  # type: ignore[arg-type]
    driver.run(max_steps=100_000)
    answer = driver.answers[rid]
    assert answer.last is not None and answer.last.spec is not None
    return Served(answer.output_ids, answer.last.spec, answer.last.cached_tokens_details)


def settle(driver: Driver) -> None:
    """Until every transfer and every job of the storage has ended."""
    while driver.scheduler.memory.num_outstanding:
        driver.step()


def evict_device(driver: Driver) -> None:
    """What has no copy on the host gets one now or is lost, by the write policy."""
    tree = driver.scheduler.memory.tree
    tree.evict(tree.num_evictable_pages)
    settle(driver)


def random_tokens(seed: int, num_tokens: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(3, VOCAB) for _ in range(num_tokens)]


def rows_of(driver: Driver, pages: np.ndarray) -> Rows:
    """The draft's rows in device pages."""
    assert isinstance(driver.worker, ModelRunner)
    pool, first = driver.worker.kv_pool, driver.worker.model.num_layers
    slots = torch.from_numpy((pages[:, None] * PAGE + np.arange(PAGE)).reshape(-1))
    layers = range(first, pool.num_layers)
    return {f"{layer}.{name}": row[slots] for layer in layers for name, row in pool.rows[layer].items()}


def check_tree(driver: Driver, cold: Driver) -> int:
    """Compare the draft's rows in all device pages of the tree of ``driver`` with those that ``cold`` computes in one
    prefill of the same tokens. Returns how many pages there are."""
    tree, num_pages = driver.scheduler.memory.tree, 0
    for node in tree._nodes():
        if not node.on_device or any(child.on_device for child in node.children.values()):
            continue
        path = node.path()
        tokens = np.concatenate([part.tokens[: part.num_pages * PAGE] for part in path])
        tokens = np.append(tokens, node.tokens[node.num_pages * PAGE :])
        space = f"{len(cold.answers)}"
        serve(cold, [*tokens.tolist(), 7], extra_key=space, max_new_tokens=1)
        ours = np.concatenate([part.pages for part in path])
        theirs = cold.scheduler.memory.tree.match_prefix(tokens, space).pages
        assert len(theirs) == len(ours)
        torch.testing.assert_close(rows_of(driver, ours), rows_of(cold, theirs), atol=1e-4, rtol=1e-3)
        num_pages += len(ours)
    return num_pages


@pytest.mark.long
@pytest.mark.parametrize(("algorithm", "draft", "policy", "layout"), TIERS)
def test_drafts_after_a_hit_fare_as_without_one(
    driver_of: MakeDriver, algorithm: SpeculativeAlgorithm, draft: str | None, policy: str, layout: str, tmp_path: Path
) -> None:
    """Prompts that continue otherwise just where a page that they share ends, after it came from each tier."""
    flags = tiers(policy, layout, tmp_path)
    driver, cold = driver_of(algorithm, draft, **flags), driver_of(algorithm, draft)
    shared = random_tokens(1, 3 * PAGE)
    # Drafts that read hidden states have another row of the last token of a page where the prompts part behind it.
    found = 3 * PAGE if algorithm is STANDALONE else 2 * PAGE

    def check(driver: Driver, number: int, tier: str) -> None:
        prompt = [*shared, number, *random_tokens(number, 20)]
        ours, expected = serve(driver, prompt), serve(cold, prompt, extra_key=tier)
        assert (ours.output_ids, ours.drafts) == (expected.output_ids, expected.drafts)
        assert expected.drafts.num_accepted > 0, "or the counts say nothing"
        assert check_tree(driver, cold) > 0
        assert ours.details is not None and getattr(ours.details, tier) == found

    serve(driver, [*shared, 90, *random_tokens(2, 20)])
    check(driver, 91, "device")
    evict_device(driver)
    check(driver, 92, "host")
    evict_device(driver)
    check(driver_of(algorithm, draft, **flags), 93, "storage")


@pytest.mark.parametrize(
    ("algorithm", "draft", "depth_seed"),
    [
        *((*draft, None) for draft in ((EAGLE, "eagle"), (NEXTN, None), (STANDALONE, "target"))),
        pytest.param(*LATENT_DRAFTS[1].values, None),
        *((*draft, 2) for draft in ((EAGLE3, "eagle3"), (NEXTN, "mtp"), (STANDALONE, "near"), (NGRAM, None))),
    ],
)
def test_whatever_is_cached_is_complete(
    driver_of: MakeDriver, algorithm: SpeculativeAlgorithm, draft: str | None, depth_seed: int | None, tmp_path: Path
) -> None:
    """Prompts in chunks and at the end of a page; one token a step; ends in the middle of a step; aborts; retraction by
    way of the host; with drafts of each kind, steps without any among others."""
    flags = tiers("write_through", "layer_first", tmp_path) | {"retract_policy": "offload"}
    driver = driver_of(algorithm, draft, depth_seed=depth_seed, **flags)
    cold = driver_of(algorithm, draft)
    kinds: list[dict[str, object]] = [
        {},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"stop_token_ids": tuple(range(3, 20))},
        {"max_new_tokens": 0},
        {"max_new_tokens": 1},
        {"max_new_tokens": 17},
        {"max_new_tokens": 33},
        {"min_new_tokens": 9, "temperature": 0.0},
    ]
    for index, (kind, num_tokens) in enumerate((kind, n) for n in (2 * PAGE, 37) for kind in kinds):
        prompt = random_tokens(10 + index, num_tokens)
        params = {"max_new_tokens": 30, "temperature": 0.6, "seed": index, "ignore_eos": True}
        driver.send(request(f"r{index}", prompt, **params | kind))  # type: ignore[arg-type]
        for _ in range(3):
            driver.step()
        if index == 4:
            driver.send(AbortReq(rid="r1"))
        if index in (5, 6):
            driver.send(PauseGenerationReq(id="p", mode="retract"), ContinueGenerationReq(id="c"))
    driver.run(max_steps=100_000)
    assert driver.scheduler.stats.num_aborts == 1
    assert check_tree(driver, cold) > 20


def test_a_standalone_draft_lacks_no_row(driver_of: MakeDriver, tmp_path: Path) -> None:
    """The draft is the target, so all that it proposes is accepted, unless it has not computed what it reads. A request
    ends with a step of which all is accepted and with a page; another one is retracted after such a step."""
    flags = tiers("write_through", "layer_first", tmp_path)
    driver = driver_of(STANDALONE, "target", **flags, disable_overlap_schedule=True, retract_policy="offload")
    prompt = random_tokens(3, 2 * PAGE)
    first = serve(driver, prompt, max_new_tokens=17)
    again = [*prompt, *first.output_ids, 5]
    for tier, num_cached in (("device", 2 * PAGE), ("host", 3 * PAGE)):
        served = serve(driver, again)
        assert served.drafts.num_accepted == served.drafts.num_drafts
        assert served.details is not None and getattr(served.details, tier) == num_cached
        evict_device(driver)
    driver.send(request("retracted", prompt, max_new_tokens=40, temperature=0.6, ignore_eos=True))
    for _ in range(4):
        driver.step()
    driver.send(PauseGenerationReq(id="pause", mode="retract"), ContinueGenerationReq(id="go on"))
    driver.run(max_steps=100_000)
    last = driver.answers["retracted"].last
    assert last is not None and last.spec is not None and last.num_retractions == 1
    assert last.spec.num_accepted == last.spec.num_drafts


def test_a_page_that_is_shared_is_not_offloaded_again(driver_of: MakeDriver, tmp_path: Path) -> None:
    """A request that is retracted before it has computed anything has the pages of its prefix from others, who may give
    them up before a copy has read them."""
    flags = tiers("write_through", "layer_first", tmp_path)
    driver = driver_of(STANDALONE, "near", **flags, retract_policy="offload")
    prompt = random_tokens(4, 2 * PAGE)
    serve(driver, [*prompt, 5])
    settle(driver)
    assert driver.scheduler.memory.tiers is not None
    copied = driver.scheduler.memory.tiers.counts[TransferKind.STORE]
    before = copied.num_pages
    driver.send(request("r", [*prompt, 6, 7], max_new_tokens=4, ignore_eos=True))
    driver.step()
    assert driver.scheduler.reqs["r"].shared_len == driver.scheduler.reqs["r"].committed_len == 2 * PAGE
    driver.send(PauseGenerationReq(id="pause", mode="retract"))
    driver.step()
    assert driver.scheduler.reqs["r"].num_retractions == 1 and copied.num_pages == before
    driver.send(ContinueGenerationReq(id="go on"))
    driver.run(max_steps=100_000)


@pytest.mark.parametrize(
    "num_tokens", [*range(2 * PAGE - 1, 2 * PAGE + 6), 2 * PAGE + 10, *range(3 * PAGE - 2, 3 * PAGE + 2)]
)
def test_layers_that_look_ahead_lengthen_no_chunk(driver_of: MakeDriver, num_tokens: int) -> None:
    """Of a prompt whose last tokens are fewer than the layers read behind a chunk, the chunk before is shorter."""
    driver = driver_of(NEXTN, "mtp", chunked_prefill_size=PAGE)
    launch, sizes = driver.worker.launch, []

    def count(batch: StepBatch) -> ForwardResult | HeldStep:
        if not batch.is_decode:
            sizes.append(batch.num_prompt_tokens)
        return launch(batch)

    driver.worker.launch = count  # type: ignore[method-assign]
    for seed, (rid, length) in enumerate((("long", num_tokens), ("short", 5), ("scored", num_tokens))):
        scored = {"return_logprob": True, "logprob_start_len": 0} if rid == "scored" else {}
        driver.send(request(rid, random_tokens(seed, length), max_new_tokens=9, ignore_eos=True, **scored))
    driver.run(max_steps=100_000)
    assert sum(sizes) == 2 * num_tokens + 5 and max(sizes) <= PAGE
    assert check_tree(driver, driver_of(NEXTN, "mtp")) > 2
