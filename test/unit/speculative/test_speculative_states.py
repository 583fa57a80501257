"""Drafts beside layers that carry states, in the whole engine, on the CPU: the bits are those without drafts, whichever
tokens of a step fill a block and are accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from draft_checkpoints import save_own_mtp
from model_parity import save_checkpoint
from scheduler_driver import Driver, answers, make_model_driver, request
from speculative_driver import guess

from fenceline.config import ConfigError
from fenceline.ipc.io_struct import TokenizedGenerateReq

Told = tuple[list[list[int]], list[list[float | None]]]

_LENGTHS = (50, 64, 115, 150)  # states are made at multiples of 64 tokens, some of them while the request decodes
_WHOLE = "STANDALONE"  # a draft whose folder has the same name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets and drafts of them."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(3)
    save_own_mtp("qwen3-next", folder / "qwen3-next")
    save_checkpoint("nemotron-h-moe", folder / "nemotron-h-moe")
    save_checkpoint("qwen3", folder / _WHOLE)
    return folder


def _driver(folder: Path, target: str, algorithm: str | None = None, **flags: object) -> Driver:
    drafts: dict[str, object] = {}
    if algorithm is not None:
        own = algorithm in ("NEXTN", "NGRAM")
        drafts = {"speculative_algorithm": algorithm, "speculative_num_steps": 3, "speculative_adaptive": False}
        drafts["speculative_draft_model_path"] = None if own else str(folder / algorithm)
    every = {"model_path": str(folder / target), "enable_deterministic_inference": True}
    return make_model_driver(**{**every, **drafts, **flags})


def _reqs(name: str = "") -> list[TokenizedGenerateReq]:
    """Greedy ones, and others that are so hot that random drafts are accepted."""
    return [
        request(
            f"{name}{length}",
            [2 + (length * 7 + number * number) % 90 for number in range(length)],
            seed=length,
            temperature=2.0 * (length % 2),
            max_new_tokens=20,
            ignore_eos=True,
            return_logprob=True,
        )
        for length in _LENGTHS
    ]


def _told(driver: Driver, reqs: list[TokenizedGenerateReq]) -> Told:
    return answers(driver, reqs), [driver.output_logprobs[req.rid] for req in reqs]


_plain: dict[Path, Told] = {}


def _alone(folder: Path, target: str) -> Told:
    """Tokens and logprobs without drafts and without a cache, computed once."""
    if folder / target not in _plain:
        _plain[folder / target] = _told(_driver(folder, target, disable_radix_cache=True), _reqs())
    return _plain[folder / target]


def _cached(driver: Driver, reqs: list[TokenizedGenerateReq]) -> list[int]:
    ends = [driver.answers[req.rid].last for req in reqs]
    return [last.cached_tokens for last in ends if last is not None]


@pytest.mark.parametrize(
    ("target", "algorithm", "flags"),
    [
        ("qwen3-next", "NEXTN", {"chunked_prefill_size": 48}),
        ("qwen3-next", _WHOLE, {"page_size": 64}),
        ("qwen3-next", "NEXTN", {"max_total_tokens": 464, "schedule_conservativeness": 0.01}),
        ("nemotron-h-moe", _WHOLE, {"chunked_prefill_size": 48}),
    ],
)
def test_drafts_change_no_bit(folder: Path, target: str, algorithm: str, flags: dict[str, object]) -> None:
    driver = _driver(folder, target, algorithm, **flags)
    for name in ("first", "again"):
        assert _told(driver, _reqs(name)) == _alone(folder, target)
    if "max_total_tokens" in flags:
        assert driver.scheduler.stats.num_retractions > 0
    else:
        assert _cached(driver, _reqs("again")) == [0, 0, 64, 128]  # as without drafts


@pytest.mark.parametrize(
    ("target", "algorithm", "num_steps", "share"), [("qwen3-next", "NEXTN", 3, 0.3), ("qwen3-next", "NEXTN", 7, 0.1)]
)
def test_any_of_a_steps_tokens_may_fill_a_block(
    folder: Path, target: str, algorithm: str, num_steps: int, share: float
) -> None:
    alone = _alone(folder, target)
    driver = _driver(folder, target, algorithm, speculative_num_steps=num_steps)
    known = {req.rid: tokens for req, tokens in zip(_reqs(), alone[0], strict=True)}
    counts = guess(driver, known, share)
    assert _told(driver, _reqs()) == alone
    assert max(counts) == num_steps + 1 and (share == 0 or len(set(counts)) > 3)


def test_a_conversation_goes_on_from_its_answers_state(folder: Path) -> None:
    driver, first = _driver(folder, "qwen3-next", "NEXTN"), _reqs()[2]
    tokens = [*first.input_ids, *answers(driver, [first])[0], 5, 6, 7]
    second = [request("second", tokens, max_new_tokens=3, return_logprob=True)]
    told = _told(driver, second)
    assert _cached(driver, second) == [128]
    assert told == _told(_driver(folder, "qwen3-next", disable_radix_cache=True), second)


def test_trees_and_drafts_with_states_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--speculative-eagle-topk 2: layers of Qwen3Next.* carry a state .* leave"):
        _driver(folder, "qwen3-next", "NEXTN", speculative_eagle_topk=2)
    own = str(folder / "qwen3-next")
    with pytest.raises(ConfigError, match=r"layers of Qwen3NextForCausalLM carry a state, .*; use a draft"):
        _driver(folder, "qwen3-next", _WHOLE, speculative_draft_model_path=own)
