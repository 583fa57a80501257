"""Models with recurrent layers in the whole engine on a GPU: the tokens of the CPU, and the same bits however requests
are cut, batched, cached, retracted and replayed."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from draft_checkpoints import random_eagle3, save_own_mtp
from model_parity import save_checkpoint
from sala_reference import save_sala
from scheduler_driver import Driver, answers, make_model_driver, request
from speculative_driver import guess

from fenceline.ipc.io_struct import TokenizedGenerateReq

pytestmark = pytest.mark.gpu
_TIERS: dict[str, object] = {"enable_hierarchical_cache": True, "hicache_ratio": 8.0, "schedule_conservativeness": 0.01}
_LENGTHS = (50, 64, 115, 150)  # states are made at multiples of 64 tokens, some of them while the request decodes
NAMES = ("qwen3-next", "kimi-linear", "lfm2", "minicpm-sala", "nemotron-h-moe")


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hybrid")
    if request.param == "minicpm-sala":
        save_sala(directory)
    else:
        save_checkpoint(request.param, directory)
    return directory


def _reqs(name: str) -> list[TokenizedGenerateReq]:
    prompts = [[2 + (length * 7 + number * number) % 90 for number in range(length)] for length in _LENGTHS]
    params = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True, "return_logprob": True}
    return [request(f"{name}{len(prompt)}", prompt, **params) for prompt in prompts]


def _told(driver: Driver, groups: list[list[TokenizedGenerateReq]]) -> tuple[list[list[int]], list[list[float]]]:
    tokens = [told for group in groups for told in answers(driver, group)]
    return tokens, [driver.output_logprobs[req.rid] for group in groups for req in group]


def test_logprobs_are_near_those_of_the_cpu(checkpoint: Path) -> None:
    alone = [
        _told(make_model_driver(device=device, model_path=str(checkpoint)), [[req] for req in _reqs(device)])
        for device in ("cpu", "cuda")
    ]
    for ours, theirs, tokens, others in zip(alone[1][1], alone[0][1], alone[1][0], alone[0][0], strict=True):
        same = next((i for i, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b), len(tokens))
        assert same > 0 and ours[:same] == pytest.approx(theirs[:same], abs=2e-2)


@pytest.mark.parametrize(
    "flags",
    [
        {"chunked_prefill_size": 48},
        {"max_total_tokens": 560, "schedule_conservativeness": 0.01, "max_mamba_cache_size": 9},
        {"disable_overlap_schedule": True, "page_size": 64},
        {"disable_cuda_graph": True},
        {"max_total_tokens": 560, "max_mamba_cache_size": 9, "hicache_io_backend": "kernel", **_TIERS},
        {"max_total_tokens": 512, "hicache_write_policy": "write_back", "retract_policy": "offload", **_TIERS},
    ],
)
def test_company_and_cuts_change_no_bit(checkpoint: Path, flags: dict[str, object]) -> None:
    same = {
        "device": "cuda",
        "dtype": "bfloat16",
        "model_path": str(checkpoint),
        "enable_deterministic_inference": True,
    }
    alone = _told(make_model_driver(**same, disable_radix_cache=True), [[req] for req in _reqs("alone")])
    driver = make_model_driver(**same | flags)
    for name in ("first", "again"):
        assert _told(driver, [_reqs(name)]) == alone
    assert "enable_hierarchical_cache" not in flags or driver.scheduler.memory.cached_tokens["host"] > 0


@pytest.mark.parametrize(
    ("algorithm", "share", "flags"),
    [
        ("NEXTN", None, {"chunked_prefill_size": 48}),
        ("EAGLE3", None, {"disable_overlap_schedule": True}),
        ("STANDALONE", None, {"max_total_tokens": 560, "schedule_conservativeness": 0.01}),
        ("NEXTN", 0.0, {"speculative_num_steps": 7, "disable_cuda_graph": True}),
        ("NEXTN", 0.3, {"disable_cuda_graph": True}),
    ],
)
def test_drafts_change_no_bit(tmp_path: Path, algorithm: str, share: float | None, flags: dict[str, object]) -> None:
    """``share`` of the drafts are wrong, and all others right; None: they are random models'."""
    save_own_mtp("qwen3-next", tmp_path / "target")
    same: dict[str, object] = {"device": "cuda", "dtype": "bfloat16", "model_path": str(tmp_path / "target")}
    same["enable_deterministic_inference"] = True
    alone = _told(make_model_driver(**same, disable_radix_cache=True), [[req] for req in _reqs("alone")])
    drafts: dict[str, object] = {"speculative_algorithm": algorithm, "speculative_num_steps": 3}
    if algorithm == "EAGLE3":
        random_eagle3(Random(7)).save(tmp_path / "draft")
    elif algorithm == "STANDALONE":
        save_checkpoint("qwen3", tmp_path / "draft")
    if algorithm != "NEXTN":
        drafts["speculative_draft_model_path"] = str(tmp_path / "draft")
    driver = make_model_driver(**same | drafts | flags)
    names = ("first", "again")
    if share is not None:
        known = {f"{name}{size}": told for name in names for size, told in zip(_LENGTHS, alone[0], strict=True)}
        counts = guess(driver, known, share)
    for name in names:
        assert _told(driver, [_reqs(name)]) == alone
    assert share is None or max(counts) == driver.config.speculative.largest.num_tokens
