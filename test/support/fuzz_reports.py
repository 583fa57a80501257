"""What fuzzing found in others' deterministic modes, as traffic to a driver. Each time and in any company, every answer
has the bits that it has alone. Memory that no request has written is NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from scheduler_driver import Driver, request

import fenceline
from fenceline.ipc.io_struct import AbortReq, Message, TokenizedGenerateReq
from fenceline.model_executor.model_runner import ModelRunner

Answer = tuple[object, ...]
Make = Callable[..., Driver]  # a driver of a deterministic engine; takes further flags

_EAGLE3: dict[str, Any] = {
    "speculative_algorithm": "EAGLE3", "speculative_num_steps": 3,
    "speculative_draft_model_path": f"{fenceline.demo_model_path()}/eagle3",
}  # fmt: skip


def collect(driver: Driver, asked: Sequence[TokenizedGenerateReq]) -> dict[str, Answer]:
    """Send what is ``asked``, and answer it and what is running. By request: ids, and logprobs of prompt and output."""
    driver.send(*asked)
    driver.run()
    return answers_of(driver, [req.rid for req in asked])


def answers_of(driver: Driver, rids: Sequence[str]) -> dict[str, Answer]:
    """Those of requests that have ended, which the driver forgets with all others."""
    tables = driver.first_logprobs, driver.output_logprobs
    found = {
        rid: (tuple(driver.answers[rid].output_ids), tables[0].get(rid), tuple(tables[1].get(rid, ()))) for rid in rids
    }
    for table in (driver.answers, *tables):
        table.clear()  # type: ignore[attr-defined]
    return found


def check_replays(
    make: Make,
    arrivals: Sequence[tuple[int, TokenizedGenerateReq]],
    cancels: Sequence[tuple[int, str]] = (),
    num_turns: int = 3,
    **flags: Any,
) -> None:
    """Replay the traffic on one engine: requests and cancellations with the steps before which they arrive. From turn
    to turn the steps between them grow."""
    cancelled = {rid for _, rid in cancels}
    asked = [req for _, req in arrivals if req.rid not in cancelled]
    quiet = make(disable_overlap_schedule=True, disable_radix_cache=True, disable_cuda_graph=True)
    expected = {rid: answer for req in asked for rid, answer in collect(quiet, [req]).items()}
    driver = make(**flags)
    assert isinstance(driver.worker, ModelRunner)
    pool = driver.worker.kv_pool
    for layer in range(pool.num_layers):
        for row in (pool.row(layer, "k"), pool.row(layer, "v")):
            row[pool.page_size :] = torch.nan
    for turn in range(num_turns):
        events: list[tuple[int, Message]] = [(turn * step, req) for step, req in arrivals]
        events += [(turn * step + 1, AbortReq(rid=rid)) for step, rid in cancels]
        for step in range(1 + max(at for at, _ in events)):
            driver.send(*(message for at, message in events if at == step))
            driver.step()
        driver.run()
        found = answers_of(driver, [req.rid for req in asked])
        wrong = [rid for rid, answer in found.items() if answer != expected[rid]]
        assert not wrong, (turn, wrong, found[wrong[0]], expected[wrong[0]])


def _request(rid: str, begin: int, length: int, prefix: int = 0) -> TokenizedGenerateReq:
    """Greedy, with logprobs. ``prefix``: with how many tokens it begins that all prompts share."""
    tokens = [3 + token % 900 for token in torch.randperm(4000, generator=torch.Generator().manual_seed(5)).tolist()]
    ids = tokens[:prefix] + tokens[200 + begin :][:length]
    given: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True, "return_logprob": True}
    return request(rid, ids, **given)


def sglang_22819(make: Make) -> None:
    """https://github.com/sgl-project/sglang/issues/22819: beside requests without a prefix, those whose shared prefix
    is exactly one page of 64 tokens got other answers with --enable-deterministic-inference."""
    sharing = [(step, _request(f"shares{step}", 300 * step, n, 64)) for step, n in enumerate((1, 2, 30, 64, 90))]
    others = [(step, _request(f"other{step}", 50 * step, n)) for step, n in enumerate((64, 17, 65))]
    check_replays(make, sharing + others, page_size=64)


def sglang_23392(make: Make) -> None:
    """https://github.com/sgl-project/sglang/issues/23392: while drafts are verified, requests that share a prefix of
    128 tokens are cancelled and sent again; they and unrelated ones got other answers."""
    early = [(0, _request(f"early{i}", 300 * i, 9 + 8 * i, 128)) for i in range(4)]
    again = [(step, _request(f"again{i}", 300 * i, 9 + 8 * i, 128)) for i, step in ((0, 2), (1, 3))]
    others = [(1, _request("other1", 40, 70)), (2, _request("other2", 90, 33))]
    check_replays(make, early + again + others, [(1, "early0"), (2, "early1")], page_size=1, **_EAGLE3)


def vllm_39146(make: Make) -> None:
    """https://github.com/vllm-project/vllm/issues/39146: without prefix caching, answers to short requests changed when
    memory was used again: by a long one that came later, and by requests sent again after others were cancelled."""
    early = [(0, _request(f"early{i}", 300 * i, n)) for i, n in enumerate((5, 33, 128, 100))]
    again = [(2, _request("again2", 600, 128)), (2, _request("again3", 900, 100))]
    late = [(3, _request("long", 0, 500)), (4, _request("late", 70, 33))]
    check_replays(
        make, early + again + late, [(1, "early2"), (1, "early3")], page_size=16, disable_radix_cache=True,
        max_total_tokens=800,
    )  # fmt: skip


def vllm_47069(make: Make) -> None:
    """https://github.com/vllm-project/vllm/issues/47069, and 51902 on its cause: in a burst, attention was cut by the
    longest chunk of the step, from 9 to 10 tokens, so that a prefill changed the answers beside it."""
    lens = enumerate((12, 9, 10, 200, 31, 7, 64, 65))
    burst = [(step, _request(f"r{step}", 100 * step, n)) for step, n in lens]
    check_replays(make, [*burst, (3, _request("long", 50, 400))], num_turns=2, chunked_prefill_size=64)


REPORTS: tuple[Callable[[Make], None], ...] = (sglang_22819, sglang_23392, vllm_39146, vllm_47069)
