"""A model with recurrent layers in the whole engine, on the CPU: tokens are those of a reference, and the same bits
however requests are cut, batched, cached and retracted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_parity import save_checkpoint
from sala_reference import save_sala
from scheduler_driver import Driver, answers, make_model_driver, request

from fenceline.config import ConfigError
from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.ipc.io_struct import TokenizedGenerateReq

_TIERS = {"enable_hierarchical_cache": True, "hicache_ratio": 8.0, "schedule_conservativeness": 0.01}
_LENGTHS = (50, 64, 115, 150)  # states are made at multiples of 64 tokens, some of them while the request decodes


_ONE_HEAD = (
    '{"linear_num_key_heads": 1, "lightning_nh": 1, "lightning_nkv": 1, "n_groups": 1}'  # of the recurrent layers
)


@pytest.fixture(scope="module", params=["qwen3-next", "minicpm-sala", "nemotron-h-moe"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, torch.nn.Module]:
    directory = tmp_path_factory.mktemp("hybrid")
    if request.param == "minicpm-sala":
        return directory, save_sala(directory)
    return directory, save_checkpoint(request.param, directory)


def _driver(directory: Path, **flags: object) -> Driver:
    return make_model_driver(model_path=str(directory), enable_deterministic_inference=True, **flags)


def _prompt(first: int, num_tokens: int) -> list[int]:
    return [2 + (first * 7 + number * number) % 90 for number in range(num_tokens)]


def _request(rid: str, prompt: list[int], num_new: int) -> TokenizedGenerateReq:
    return request(rid, prompt, temperature=0.0, max_new_tokens=num_new, ignore_eos=True, return_logprob=True)


def _reqs(name: str = "") -> list[TokenizedGenerateReq]:
    return [_request(f"{name}{length}", _prompt(length, length), 20) for length in _LENGTHS]


@pytest.fixture(scope="module")
def alone(checkpoint: tuple[Path, torch.nn.Module]) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens and logprobs of each request alone, whole, without a cache."""
    driver = _driver(checkpoint[0], disable_radix_cache=True)
    return _told(driver, _reqs(), one_by_one=True)


def _told(
    driver: Driver, reqs: list[TokenizedGenerateReq], one_by_one: bool = False
) -> tuple[list[list[int]], list[list[float]]]:
    groups = [[req] for req in reqs] if one_by_one else [reqs]
    tokens = [told for group in groups for told in answers(driver, group)]
    return tokens, [driver.output_logprobs[req.rid] for req in reqs]


@torch.inference_mode()
def test_tokens_are_those_of_the_reference(
    checkpoint: tuple[Path, torch.nn.Module], alone: tuple[list[list[int]], list[list[float]]]
) -> None:
    _, reference = checkpoint
    for req, output in zip(_reqs(), alone[0], strict=True):
        tokens = [*req.input_ids, *output]
        logits = reference(torch.tensor([tokens[:-1]])).logits[0, len(req.input_ids) - 1 :]
        best = logits.max(-1).values
        chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        assert bool((best - chosen < 1e-3).all())


@pytest.mark.parametrize(
    "flags",
    [
        {"chunked_prefill_size": 48},
        {"max_total_tokens": 464, "schedule_conservativeness": 0.01, "max_mamba_cache_size": 9},
        {"disable_overlap_schedule": True, "page_size": 64},
        {"max_total_tokens": 464, "max_mamba_cache_size": 9, **_TIERS},
        {"max_total_tokens": 464, "max_mamba_cache_size": 9, "hicache_io_backend": "kernel", **_TIERS},
        {"max_total_tokens": 464, "hicache_write_policy": "write_back", "retract_policy": "offload", **_TIERS},
        {
            "chunked_prefill_size": 96,
            "piecewise_cuda_graph_tokens": (92, 96),
            "cuda_graph_bs": [2, 8],
            "debug_cuda_graph": True,
        },
        {"max_total_tokens": 464, "max_mamba_cache_size": 9, "piecewise_cuda_graph_tokens": (48, 384), **_TIERS},
    ],
)
def test_company_and_cuts_change_no_bit(
    checkpoint: tuple[Path, torch.nn.Module], alone: tuple[list[list[int]], list[list[float]]], flags: dict[str, object]
) -> None:
    driver = _driver(checkpoint[0], **flags)
    for name in ("first", "again"):
        assert _told(driver, _reqs(name)) == alone
    if "schedule_conservativeness" in flags:
        assert driver.scheduler.stats.num_retractions > 0
    if "enable_hierarchical_cache" in flags:
        assert driver.scheduler.memory.cached_tokens["host"] > 0
    if "piecewise_cuda_graph_tokens" in flags:
        stats = driver.worker.prefill_graphs.stats  # type: ignore[union-attr]
        assert stats.replays == stats.eligible_steps > 3 and all(stats.replays_by_size.values())


def test_a_conversation_goes_on_from_its_answers_state(
    checkpoint: tuple[Path, torch.nn.Module], alone: tuple[list[list[int]], list[list[float]]]
) -> None:
    driver = _driver(checkpoint[0])
    first = _reqs("first")[2]
    assert answers(driver, [first]) == [alone[0][2]]
    tokens = [*first.input_ids, *alone[0][2], 5, 6, 7]
    second = _request("second", tokens, 3)
    told = _told(driver, [second])
    last = driver.answers["second"].last
    assert last is not None and last.cached_tokens == 128
    fresh = _driver(checkpoint[0], disable_radix_cache=True)
    assert told == _told(fresh, [second])


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            {"tp_size": 2, "load_format": "dummy", "json_model_override_args": _ONE_HEAD},
            "--tp-size 2: .* 1 key heads or channels of recurrent layers .* use 1$",
        ),
        ({"max_mamba_cache_size": 3}, "--max-mamba-cache-size 3: each of 8 running requests has a state; give"),
        ({"mamba_full_memory_ratio": 0.0}, "--mamba-full-memory-ratio 0: must be above 0"),
        ({"page_size": 128}, "--page-size 128: .* has states every 64 tokens, .* use --page-size 16, 32 or 64"),
    ],
)
def test_what_states_do_not_allow_is_refused_with_a_remedy(
    checkpoint: tuple[Path, torch.nn.Module], flags: dict[str, object], reason: str
) -> None:
    sizes = {"max_running_requests": 8, "page_size": 16} | flags
    args = ServerArgs(model_path=str(checkpoint[0]), device="cpu", **sizes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=reason):
        resolve(args)


def test_models_without_states_have_no_use_for_their_number() -> None:
    with pytest.raises(ConfigError, match=r"--max-mamba-cache-size 9: .* has no states; leave it out"):
        make_model_driver(max_mamba_cache_size=9)
