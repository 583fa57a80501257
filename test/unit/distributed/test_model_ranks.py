"""The model runner's ranks under schedulers that get the same messages: the answers of one rank alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from demo_requests import greedy_requests, prompts, sampled_reference, sampled_requests
from model_parity import save_checkpoint
from ranks import Ranks
from sala_reference import save_sala
from scheduler_driver import Driver, answers, make_model_driver, request

from fenceline.ipc.io_struct import TokenizedGenerateReq
from fenceline.model_executor import model_runner, parts
from fenceline.model_executor.step import MixedCosts, StepCosts

Result = TypeVar("Result")
LENGTHS = [(1, 70), (2, 40), (3, 150)]  # the first token, and how many: states are made at multiples of 64


def on_ranks(size: int, work: Callable[[Driver], Result], **flags: object) -> list[Result]:
    """What ``work`` gives on each of ``size`` ranks, which have made their drivers together."""
    ranks, ep_size = Ranks(size), flags.get("ep_size", 1)
    assert isinstance(ep_size, int)

    def run(rank: int) -> Result:
        shard = replace(ranks.shards[rank], ep_size=ep_size)
        return work(make_model_driver(rank=(ranks.devices[rank], shard), **flags))

    return ranks.run(run)


def plain_requests() -> list[TokenizedGenerateReq]:
    """A temperature at most: ranks draw without whole rows."""
    return [
        request(f"r{i}", ids, seed=i, temperature=0.5 * i, max_new_tokens=24, ignore_eos=True)
        for i, ids in enumerate(prompts())
    ]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("requests", [greedy_requests, plain_requests])
def test_ranks_answer_as_one(size: int, requests: Callable[[], list[TokenizedGenerateReq]]) -> None:
    expected = answers(make_model_driver(), requests())
    assert on_ranks(size, lambda driver: answers(driver, requests())) == [expected] * size


@pytest.mark.parametrize("graphs", [{}, {"cuda_graph_bs": [1, 2, 4, 8], "piecewise_cuda_graph_tokens": [16, 64]}])
def test_sums_that_yield_the_next_norm_change_no_answer(graphs: dict[str, object]) -> None:
    """Steps of few rows have their sums, residuals and norms in one operation; others do not, in the same run."""
    expected = answers(make_model_driver(), greedy_requests())
    ranks = Ranks(2)
    ranks.most_fused_rows = 20

    def run(rank: int) -> list[list[int]]:
        driver = make_model_driver(rank=(ranks.devices[rank], ranks.shards[rank]), **graphs)
        return answers(driver, greedy_requests())

    assert ranks.run(run) == [expected] * 2
    num_layers = 4
    assert ranks.num_fused[0] == ranks.num_fused[1] > 10 * (2 * num_layers - 1)


def test_ranks_mix_steps_by_the_costs_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own costs one of the two would compute shorter chunks, and their sums would not match."""
    own = iter([0.02, 0.0001])

    def measured(*_: object) -> MixedCosts:
        return MixedCosts((32,), (next(own),))

    def work(driver: Driver) -> tuple[list[list[int]], bool, StepCosts | MixedCosts | None]:
        found = answers(driver, sampled_requests())
        return found, driver.scheduler.stats.num_mixed_steps > 3, driver.worker.step_costs

    monkeypatch.setattr(model_runner, "measure_mixed", measured)
    flags = {"chunked_prefill_size": 48, "enable_mixed_chunk": True, "max_inter_token_ms": 20}
    first, second = on_ranks(2, work, **flags)
    assert first == second and first[:2] == (sampled_reference(), True) and first[2] is not None


def test_ranks_answer_as_one_with_whole_rows_and_retraction() -> None:
    def work(driver: Driver) -> tuple[list[list[int]], bool]:
        return answers(driver, sampled_requests()), driver.scheduler.stats.num_retractions > 0

    flags: dict[str, object] = {
        "page_size": 1,
        "max_total_tokens": 230,
        "schedule_conservativeness": 0.01,
        "chunked_prefill_size": 64,
        "memory_check": "order",
    }
    assert on_ranks(2, work, **flags) == [(sampled_reference(), True)] * 2


def test_ranks_score_as_one() -> None:
    """Logprobs of a prompt, of its answer and of named tokens, to 1e-4."""
    req = request(
        "r", prompts()[2], temperature=0.7, max_new_tokens=6, ignore_eos=True, return_logprob=True,
        logprob_start_len=0, top_logprobs_num=3, token_ids_logprob=[5, 1000],
    )  # fmt: skip

    def work(driver: Driver) -> list[float]:
        answers(driver, [req])
        scores = [value for value in driver.first_logprobs["r"].logprobs if value is not None]
        scores += [value for value in driver.output_logprobs["r"] if value is not None]
        return scores + [value for named in driver.output_named["r"] for value, _ in named]

    expected = work(make_model_driver())
    assert len(expected) > len(req.input_ids)
    for scores in on_ranks(2, work):
        assert scores == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "size", "ep_size", "others"),
    [
        ("qwen3-next", 4, 1, {"num_attention_heads": 8, "intermediate_size": 72}),
        ("kimi-linear", 2, 2, {}),
        ("lfm2", 2, 1, {}),
        ("minicpm-sala", 2, 1, {}),
        ("nemotron-h-moe", 2, 2, {}),
    ],
)
def test_ranks_with_states_answer_as_one(
    name: str, size: int, ep_size: int, others: dict[str, object], tmp_path: Path
) -> None:
    """States are divided by heads or channels, and each rank has as many, of which requests begin with the same."""
    if name == "minicpm-sala":
        save_sala(tmp_path)
    else:
        save_checkpoint(name, tmp_path, others)

    def work(driver: Driver) -> tuple[list[list[int]], list[int], int]:
        tokens = [[(first + number * number) % 90 + 2 for number in range(length)] for first, length in LENGTHS]
        told: list[list[int]] = []
        for turn in ("first", "again"):
            reqs = [request(f"{turn}{i}", ids, temperature=0, max_new_tokens=12) for i, ids in enumerate(tokens)]
            told += answers(driver, reqs)
        cached = [driver.answers[f"again{i}"].last.cached_tokens for i in range(len(tokens))]  # type: ignore[union-attr]
        return told, cached, driver.worker.states.snapshots.size  # type: ignore[union-attr]

    flags: dict[str, object] = {"model_path": str(tmp_path), "max_mamba_cache_size": 13}
    expected = work(make_model_driver(**flags))
    assert expected[1:] == ([64, 0, 128], 14)
    assert on_ranks(size, work, **flags, ep_size=ep_size) == [expected] * size


def test_ranks_have_as_many_states_as_the_one_with_least_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save_checkpoint("lfm2", tmp_path)
    ranks, flags = Ranks(2), {"model_path": str(tmp_path), "num_rows": 4}
    room = {id(device): number for device, number in zip(ranks.devices, (7, 5), strict=True)}
    monkeypatch.setattr(parts, "num_snapshots", lambda config, device, specs: room[id(device)])

    def leasable(rank: int) -> int:
        worker = make_model_driver(rank=(ranks.devices[rank], ranks.shards[rank]), **flags).worker  # type: ignore[arg-type]
        return worker.states.snapshots.num_free  # type: ignore[union-attr]

    assert ranks.run(leasable) == [5, 5]
