"""The demo model's drafts: what scripts/train_demo_drafts.py trains is what the server computes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from paged_draft import PagedDraft, Rows
from scheduler_driver import Driver, answers, request
from tokenizers import Tokenizer

from demo_training.drafts import MTP, Draft, Eagle3, target_states
from demo_training.export import load_weights
from demo_training.model import DemoModel, Shape
from fenceline.config.draft_config import SpeculativeAlgorithm
from fenceline.config.engine_config import resolve
from fenceline.config.model_files import demo_model_path
from fenceline.config.server_args import ServerArgs
from fenceline.layers.forward_batch import ForwardMode
from fenceline.memory_order import open_device
from fenceline.model_executor.model_runner import ModelRunner
from fenceline_demo.evaluation import held_out_items


@pytest.fixture(scope="module")
def target() -> DemoModel:
    """The shipped model, in the form in which it was trained."""
    model = DemoModel(Shape(), torch.float32, compiled=False).requires_grad_(False)
    load_weights(model, Path(demo_model_path()))
    return model


def new_draft(kind: type[Eagle3] | type[MTP], target: DemoModel) -> Draft:
    """Random weights as large as trained ones, rounded as on disk."""
    torch.manual_seed(1)
    draft = kind(target)
    with torch.no_grad():
        for param in draft.parameters():
            param.add_(torch.randn(param.shape) * 0.1 * param.std(correction=0).clamp(min=0.2))
            param.copy_(param.bfloat16())
    return draft.requires_grad_(False)


@pytest.mark.parametrize("kind", [Eagle3, MTP])
def test_a_trained_chain_is_the_served_one(tmp_path: Path, target: DemoModel, kind: type[Eagle3] | type[MTP]) -> None:
    draft = new_draft(kind, target)
    draft.save(tmp_path)
    algorithm = SpeculativeAlgorithm.EAGLE3 if kind is Eagle3 else SpeculativeAlgorithm.NEXTN
    ours = PagedDraft(Path(demo_model_path()), 16, algorithm, tmp_path)
    assert ours.draft is not None and ours.draft.nbytes <= 2 << 20, "1 MB in bf16, here in fp32"
    ids = torch.randint(0, 1024, (40,), generator=torch.Generator().manual_seed(2))
    row = 30  # whose chain is compared at every step
    expected = draft.chains(target_states(target, ids[None]), torch.tensor([[5, row]]), target)
    (hidden,) = ours.target_step([(2, ids, 0, row + 1)])
    for step, logits in enumerate(expected):
        if step == 0 or kind is MTP:
            given = Rows(2, 0, ids[1 + step : row + 2 + step], hidden)
            ((found, hidden),) = ours.draft_step([given], ForwardMode.EXTEND, step)
            torch.testing.assert_close(found[5], logits[0, 0], atol=2e-3, rtol=1e-4)
        else:
            given = Rows(2, row + step, ids[row + 1 + step : row + 2 + step], hidden[-1:])
            ((found, hidden),) = ours.draft_step([given], ForwardMode.DECODE, step)
        torch.testing.assert_close(found[-1], logits[0, 1], atol=2e-3, rtol=1e-4)


def evict_device(driver: Driver) -> None:
    """Every cached page leaves the device; it is on the host and, once this returns, in storage."""
    tree = driver.scheduler.memory.tree
    tree.evict(tree.num_evictable_pages)
    while driver.scheduler.memory.num_outstanding:
        driver.step()


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["EAGLE3", "NEXTN"])
def test_the_shipped_drafts_are_accepted_cold_and_cached(algorithm: str, tmp_path: Path) -> None:
    """Held-out items of half the categories, greedily: more than two tokens a step, as many after a load from host or
    storage as cold, and the answers are right."""
    tokenizer = Tokenizer.from_file(str(Path(demo_model_path()) / "tokenizer.json"))
    (newline,) = tokenizer.encode("\n").ids
    items = held_out_items(7, 6)
    expected = [item.item.answer for item in items]
    args = ServerArgs(
        model_path="demo",
        device="cpu",
        random_seed=1,
        speculative_algorithm=algorithm,
        max_total_tokens=20480,
        enable_hierarchical_cache=True,
        hicache_ratio=2.0,
        hicache_storage_backend="file",
        hicache_storage_dir=str(tmp_path),
        hicache_storage_prefetch_policy="wait_complete",
    )
    config = resolve(args)
    assert config.hicache is not None and config.hicache.storage is not None
    storage = dataclasses.replace(config.hicache.storage, prefetch_threshold=1)  # of prompts of any length
    config = dataclasses.replace(config, hicache=dataclasses.replace(config.hicache, storage=storage))

    def ask(driver: Driver, tier: str) -> float:
        """The accept length of one pass over the items, most of whose prompts come from ``tier``."""
        stats = driver.scheduler.stats
        before = stats.num_accepted, stats.num_verified
        reqs = [
            request(
                f"{tier}{index}",
                tokenizer.encode(item.prompt()).ids,
                temperature=0.0,
                max_new_tokens=len(item.item.answer) + 8,
                stop_token_ids=(newline,),
            )
            for index, item in enumerate(items)
        ]
        assert [tokenizer.decode(output).strip() for output in answers(driver, reqs)] == expected
        if tier:
            found = [driver.answers[req.rid].last for req in reqs]
            hits = [last.cached_tokens_details for last in found if last is not None]
            num_found = sum(getattr(details, tier) for details in hits if details is not None)
            assert num_found > 0.5 * sum(len(req.input_ids) for req in reqs)
        return 1 + (stats.num_accepted - before[0]) / (stats.num_verified - before[1])

    def make() -> Driver:
        return Driver(config, ModelRunner(config, open_device("cpu"), show_progress=False))

    driver = make()
    cold = ask(driver, "")
    evict_device(driver)
    lengths = [ask(driver, "host")]
    evict_device(driver)
    driver.scheduler.close()
    driver = make()
    lengths.append(ask(driver, "storage"))
    driver.scheduler.close()
    assert cold >= 2.0 and lengths == [pytest.approx(cold, abs=0.05)] * 2


def test_the_shipped_drafts_are_small() -> None:
    files = Path(demo_model_path()).glob("*/*")
    assert 0 < sum(file.stat().st_size for file in files) <= 2_000_000
