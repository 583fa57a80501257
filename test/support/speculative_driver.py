"""A speculating scheduler over the real ModelRunner, with checkpoints of small random models in float32."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch
from draft_checkpoints import VOCAB, add_mtp, random_eagle, random_eagle3, save_appended_mtp, save_target
from safetensors.torch import load_file, save_file
from scheduler_driver import Driver, answers, request

import fenceline
from fenceline.config.draft_config import SpeculativeAlgorithm, SpeculativeConfig, read_draft_config
from fenceline.config.engine_config import resolve
from fenceline.config.model_config import ModelConfig
from fenceline.config.server_args import ServerArgs
from fenceline.ipc.io_struct import TokenizedGenerateReq, encode
from fenceline.layers.context import Shard
from fenceline.memory_order import Device, open_device
from fenceline.model_executor.drafts import StepPlans
from fenceline.model_executor.model_runner import ModelRunner
from fenceline_proof.random_depths import RandomDepths

EAGLE, EAGLE3 = SpeculativeAlgorithm.EAGLE, SpeculativeAlgorithm.EAGLE3
NEXTN, STANDALONE = SpeculativeAlgorithm.NEXTN, SpeculativeAlgorithm.STANDALONE
NGRAM = SpeculativeAlgorithm.NGRAM
CONTEXT = 160
# Each algorithm with its drafts. If the target is its own draft, it proposes exactly what the target draws.
DRAFTS = [
    (EAGLE, "eagle"),
    (EAGLE3, "eagle3"),
    (NEXTN, None),
    (NEXTN, "mtp"),
    (STANDALONE, "near"),
    (STANDALONE, "target"),
    (NGRAM, None),
]
# Targets that have their draft as a layer behind their last: with latents, and with an indexer beside them.
# The second has an indexer too, so that one is enough for most runs of the suite.
LATENT_DRAFTS = [pytest.param(NEXTN, "deepseek-v3", marks=pytest.mark.long), pytest.param(NEXTN, "glm-5-shared")]
LATENT_TARGETS = [str(draft.values[1]) for draft in LATENT_DRAFTS]
NUM_MTP_LAYERS = 4  # layers of "mtp", each for one step; the target has one


_models: dict[str, Path] = {}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target with a multi-token prediction layer, drafts for it, and a draft that is almost equal to the target. They
    are saved once, though pytest has a fixture for each file that imports this one."""
    if not _models:
        _models.update(_save_models(tmp_path_factory.mktemp("models")))
    return _models


def _save_models(folder: Path) -> dict[str, Path]:
    torch.manual_seed(7)
    rng = Random(7)
    save_target("llama", folder / "target")
    add_mtp(folder / "target", 1)
    save_target("llama", folder / "mtp")
    add_mtp(folder / "mtp", NUM_MTP_LAYERS)
    save_target("llama", folder / "near")
    for path in (folder / "near").glob("*.safetensors"):
        tensors = load_file(path)
        save_file({name: t + 0.02 * torch.randn_like(t) for name, t in tensors.items()}, path, {"format": "pt"})
    random_eagle(rng, "Llama").save(folder / "eagle")
    random_eagle3(rng).save(folder / "eagle3")
    for name in LATENT_TARGETS:
        save_appended_mtp(name, folder / name)
    return {path.name: path for path in folder.iterdir()}


def target_of(draft: str | None) -> str:
    """The name of the target of ``draft``."""
    return draft if draft in LATENT_TARGETS else "target"


def make_driver(
    models: dict[str, Path],
    algorithm: SpeculativeAlgorithm | None = None,
    draft: str | None = None,
    num_steps: int = 3,
    num_rows: int = 8,
    device: Device | None = None,
    simulated_accept_length: float | None = None,
    topk: int = 1,
    num_draft_tokens: int | None = None,
    depth_seed: int | None = None,
    measures_steps: bool = False,
    prefill_backend: str | None = None,
    shard: Shard = Shard(),
    token_map: Path | None = None,
    target: str | None = None,
    **flags: object,
) -> Driver:
    """A scheduler over the target; without ``algorithm`` it decodes one token per step. ``target``: its name, that of
    the draft's target by default. ``depth_seed``: each step has a
    random depth from 0 to ``num_steps``, drawn from this seed. ``measures_steps``: depths are chosen by measured
    speed. ``shard``: the part of the model on ``device``, if there are several ranks. ``token_map``: the file of the
    tokens that the draft may propose."""
    device = device or open_device("cpu")
    device.keeps_time = measures_steps
    sizes: dict[str, object] = {"max_total_tokens": 4096, "page_size": 16, "chunked_prefill_size": 32}
    args = ServerArgs(
        model_path=fenceline.demo_model_path(),
        device=device.kind,
        dtype="float32",
        random_seed=1,
        max_running_requests=num_rows,
        **(sizes | flags),  # type: ignore[arg-type]
    )
    target = target or target_of(draft)
    model = ModelConfig.from_dir(str(models[target]), dtype="float32")
    model = dataclasses.replace(model, context_length=CONTEXT)
    args = dataclasses.replace(args, tp_size=shard.size)
    config = dataclasses.replace(resolve(args), model=model)
    if prefill_backend is not None:
        config = dataclasses.replace(config, prefill_attention_backend=prefill_backend)
    if algorithm is not None:
        directory = None if draft is None or (algorithm is NEXTN and draft == target) else str(models[draft])
        window = (1, 12) if algorithm is NGRAM else None
        told = None
        if algorithm is not NGRAM:
            told = read_draft_config(algorithm, directory, model, None if token_map is None else str(token_map))
        speculative = SpeculativeConfig(told, num_steps, simulated_accept_length, match_window=window)
        speculative = dataclasses.replace(speculative, is_adaptive=measures_steps or depth_seed is not None)
        if topk > 1:
            speculative = dataclasses.replace(speculative, topk=topk, num_draft_tokens=num_draft_tokens or 8)
        config = dataclasses.replace(config, speculative=speculative)
    if config.hicache is not None:  # let prefixes of any length come from the lower tiers
        storage = config.hicache.storage
        storage = storage and dataclasses.replace(storage, prefetch_threshold=1)
        hicache = dataclasses.replace(config.hicache, storage=storage, load_back_threshold=1)
        config = dataclasses.replace(config, hicache=hicache)
    driver = Driver(config, ModelRunner(config, device, show_progress=False, shard=shard))
    if depth_seed is not None:
        driver.scheduler.planner.draft_depth = RandomDepths(tuple(driver.scheduler.planner.shapes), depth_seed)
    return driver


_plain: dict[tuple[Path | bytes, ...], list[list[int]]] = {}


def plain_answers(models: dict[str, Path], reqs: list[TokenizedGenerateReq], target: str = "target") -> list[list[int]]:
    """The tokens that the target alone gives, computed once: tests of many drafts send the same requests."""
    key = (models[target], *map(encode, reqs))
    if key not in _plain:
        _plain[key] = answers(make_driver(models, target=target), reqs)
    return _plain[key]


def requests(seed: int, num: int = 8, **params: object) -> list[TokenizedGenerateReq]:
    """Greedy and sampled requests with prompts of 1 to 70 tokens."""
    rng = Random(seed)
    return [
        request(
            f"r{index}",
            [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 70))],
            seed=rng.randrange(99),
            **{"temperature": rng.choice([0.0, 0.5, 1.0]), "max_new_tokens": rng.randrange(1, 40), "ignore_eos": True}
            | params,
        )
        for index in range(num)
    ]


def continued(first: list[TokenizedGenerateReq], outputs: list[list[int]]) -> list[TokenizedGenerateReq]:
    """Requests that continue where the answers ``outputs`` to ``first`` ended."""
    return [
        request(f"again{i}", [*req.input_ids, *output, 9], temperature=0.7, seed=i, max_new_tokens=20, ignore_eos=True)
        for i, (req, output) in enumerate(zip(first, outputs, strict=True))
    ]


def count_tokens(driver: Driver) -> Counter[int]:
    """A counter that is filled while the driver runs: by number of tokens, how often a request got this many in a
    step."""
    assert isinstance(driver.worker, ModelRunner) and driver.worker.speculative is not None
    runner, counted = driver.worker.speculative, Counter[int]()
    accept = runner.accept

    def accept_and_count(drawn: torch.Tensor) -> dict[str, torch.Tensor]:
        results = accept(drawn)
        counted.update(results["counts"].tolist())
        return results

    runner.accept = accept_and_count  # type: ignore[method-assign]
    return counted


def guess(driver: Driver, known: dict[str, list[int]], share: float) -> list[int]:
    """From now on drafts are, but for a ``share`` of them, the tokens that each request in ``known`` will draw; in
    steps without graphs. Returns the list to which each step adds how many tokens every request got."""
    assert isinstance(driver.worker, ModelRunner) and driver.worker.speculative is not None
    runner, counts, random = driver.worker.speculative, list[int](), Random(3)
    accept = runner.accept

    def propose(plans: StepPlans) -> None:
        arena, width = runner.arena, plans.shape.num_nodes
        reqs = {req.row: req for req in driver.scheduler.reqs.values()}
        columns = (arena[name][: plans.size].tolist() for name in ("plan_rows", "lens"))
        ids = arena["input_ids"].view(-1)[: plans.size * width].view(plans.size, width)
        for index, (row, length) in enumerate(zip(*columns, strict=True)):
            if row not in reqs:
                continue
            tokens = [*reqs[row].prompt_ids, *known[reqs[row].rid], *[0] * width]
            for place in range(1, width):
                wrong = random.random() < share
                ids[index, place] = (tokens[length + place - 1] + wrong) % VOCAB

    def accept_and_count(drawn: torch.Tensor | None) -> dict[str, torch.Tensor]:
        results = accept(drawn)
        counts.extend(results["counts"].tolist())
        return results

    for chain in runner._proposals.values():
        chain.propose = propose  # type: ignore[method-assign]
    runner.accept = accept_and_count  # type: ignore[method-assign]
    return counts


def check_token_rows(driver: Driver) -> int:
    """Compare the rows of running requests with what the host knows of their tokens. Returns how many there are."""
    assert isinstance(driver.worker, ModelRunner)
    held, reqs = driver.worker.req_pool.tokens, [req for req in driver.scheduler.running.reqs if not req.left]
    assert held is not None and not held[0].any()
    for req in reqs:
        tokens = req.token_ids().tolist()
        for image in req.images:
            tokens[image.offset : image.end] = [-1] * image.num_tokens
        assert held[req.row, : len(tokens)].tolist() == tokens, req.rid
    return len(reqs)
