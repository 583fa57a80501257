"""A live server with the demo model under load: everybody gets the answer they would get alone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import httpx
import pytest
from live_server import LiveServer, scheduler_state, wait_for

NUM_REQUESTS = 200


@pytest.fixture(scope="module")
def tight() -> Iterator[LiveServer]:
    """Far less memory than 200 requests want, and prompts cut into small chunks."""
    flags = "--model-path demo --device cpu --page-size 1 --max-total-tokens 2400 --chunked-prefill-size 64"
    more = "--max-running-requests 64 --schedule-conservativeness 0.05 --enable-cache-report --random-seed 3"
    with LiveServer.real(*flags.split(), *more.split()) as live:
        yield live.wait_ready()


def body(index: int) -> dict[str, object]:
    """A sum for some, seeded free-running text with penalties for others; prefixes are shared by tens."""
    if index % 2:
        text = f"<|im_start|>user\nWhat is {index} + {index // 2}?<|im_end|>\n<|im_start|>assistant\n"
        return {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 12}}
    shared = f"Once upon a time in town {index // 20} there lived a baker. " * 2
    params = {"temperature": 0.9, "sampling_seed": index, "max_new_tokens": 60, "ignore_eos": True}
    return {"text": f"{shared}{index}", "sampling_params": {**params, "frequency_penalty": 0.2}}


async def ask_all(base_url: str, indices: range, at_once: int) -> list[list[int]]:
    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(base_url=base_url, timeout=240, limits=limits) as client:
        answers = await asyncio.gather(*(client.post("/generate", json=body(i)) for i in indices))
    assert [a.status_code for a in answers] == [200] * len(answers), answers[0].text
    return [a.json()["output_ids"] for a in answers]


PHASES = (
    r"Loading demo; the address follows",
    r"Started the scheduler process in \S+ s",
    r"Opened the device \(cpu\) in \S+ s",
    r"Prepared kernels in \S+ s",
    r"Loaded weights: \S+ GiB, from 1 file, in \S+ s",
    r"Sized memory: \S+ of \S+ GiB are free .* KV cache takes \S+ GiB \(2400 tokens\)",
    r"Allocated the KV pool in \S+ s",
    r"Prepared attention in \S+ s",
    r"The server is fired up and ready to roll!",
)


def test_the_log_names_each_phase_of_the_start(tight: LiveServer) -> None:
    """One line each, in order, none of them overwritten by a progress bar."""
    lines = [line.rstrip("\n") for line in tight.lines]
    places = []
    for phase in PHASES:
        (place,) = [number for number, line in enumerate(lines) if re.match(rf"\[\S+ \S+ INFO \w+\] {phase}", line)]
        places.append(place)
    assert places == sorted(places)
    # Beside the scheduler's start.
    for phase in (r"Loaded the tokenizer \(\d+ tokens\) in \S+ s", r"Started the detokenizer process in \S+ s"):
        assert len(re.findall(phase, tight.output)) == 1
    assert not re.search(r"\d%\|", tight.output)


@pytest.mark.long
def test_two_hundred_at_once_answer_as_alone(tight: LiveServer) -> None:
    together = asyncio.run(ask_all(tight.base_url, range(NUM_REQUESTS), NUM_REQUESTS))
    with tight.client() as client:
        after = scheduler_state(client)
        assert client.post("/flush_cache").status_code == 200, "idle again, nothing is held"
    assert after["num_retractions"] > 0, "the pool was meant to be too small"
    assert after["num_running_reqs"] == after["num_queue_reqs"] == after["num_used_tokens"] == 0
    some = range(0, NUM_REQUESTS, 9)
    alone = asyncio.run(ask_all(tight.base_url, some, 1))
    assert [together[i] for i in some] == alone


def test_a_client_that_leaves_gives_its_memory_back(tight: LiveServer) -> None:
    params = {"temperature": 0, "max_new_tokens": 2000, "ignore_eos": True}
    with tight.client() as client:
        before = scheduler_state(client)["num_aborts"]
        with client.stream(
            "POST", "/generate", json={"text": "Hello", "stream": True, "sampling_params": params}
        ) as answer:
            next(answer.iter_lines())

        def is_over() -> bool:
            state = scheduler_state(client)
            return state["num_aborts"] > before and not state["num_used_tokens"]

        wait_for(is_over)
        now = scheduler_state(client)
        assert now["num_aborts"] == before + 1
        assert now["num_running_reqs"] == now["num_used_tokens"] == 0
