"""The load generator: arrivals at a rate, a cap on concurrency, a progress bar."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from fenceline.benchmarking.client import Client
from fenceline.benchmarking.conversation import Conversation
from fenceline.benchmarking.records import BenchRequest, Call, Reply, RequestOutput


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How the requests are sent.

    ``request_rate`` per second (inf: all at once); ``max_concurrency`` requests or conversations in flight, None
    for no cap; ``sampling_seed`` is the first request's seed where sampling draws at random, else None.
    """

    request_rate: float = float("inf")
    max_concurrency: int | None = None
    seed: int = 1
    sampling_seed: int | None = None
    lora_names: tuple[str, ...] = ()
    show_progress: bool = False


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All outputs in the order of requests and turns; ``start_time`` and ``duration`` in seconds."""

    outputs: list[RequestOutput]
    start_time: float
    duration: float


def arrival_times(num: int, request_rate: float, rng: np.random.Generator) -> np.ndarray:
    """Seconds after the start at which requests arrive: a Poisson process, the first at 0. Float64 [num]."""
    if request_rate == float("inf"):
        return np.zeros(num)
    gaps = rng.exponential(1.0 / request_rate, size=num)
    return np.concatenate(([0.0], np.cumsum(gaps)[:-1])) if num else np.zeros(0)


async def run_load(
    client: Client,
    requests: list[BenchRequest],
    plan: LoadPlan,
    new_conversation: Callable[[], Conversation],
) -> LoadResult:
    """Send every request at its time and wait for all replies."""
    rng = np.random.default_rng([plan.seed, 1])
    arrivals = arrival_times(len(requests), plan.request_rate, rng)
    loras = rng.integers(0, max(1, len(plan.lora_names)), size=len(requests))
    gate: AbstractAsyncContextManager[object] = (
        asyncio.Semaphore(plan.max_concurrency) if plan.max_concurrency else nullcontext()
    )
    total = sum(len(request.turns) for request in requests)
    with tqdm(total=total, disable=None if plan.show_progress else True) as bar:

        async def one(index: int) -> list[RequestOutput]:
            lora = plan.lora_names[int(loras[index])] if plan.lora_names else None
            seed = None if plan.sampling_seed is None else plan.sampling_seed + index
            async with gate:
                return await converse(
                    client, requests[index], index, new_conversation(), seed, lora, bar.update
                )

        start = time.perf_counter()
        tasks: list[asyncio.Task[list[RequestOutput]]] = []
        for index, arrival in enumerate(arrivals):
            # Against the start, not the previous arrival: lateness must not add up.
            delay = start + float(arrival) - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(one(index)))
        groups = await asyncio.gather(*tasks)
        duration = time.perf_counter() - start
    return LoadResult([output for group in groups for output in group], start, duration)


async def converse(
    client: Client,
    request: BenchRequest,
    index: int,
    conversation: Conversation,
    seed: int | None,
    lora_name: str | None,
    on_turn: Callable[[int], object],
) -> list[RequestOutput]:
    """Run one request, turn by turn. After a failed turn the rest is reported as failed, not sent."""
    outputs: list[RequestOutput] = []
    num_tokens = 0  # our own estimate of the history, for servers that report no prompt_tokens
    failed_turn: int | None = None
    for i, turn in enumerate(request.turns):
        num_tokens += turn.prompt_len
        call = Call(conversation.ask(turn.content), turn.output_len, seed, lora_name)
        if failed_turn is None:
            reply = await client.send(call)
            if not reply.success:
                failed_turn = i
        else:
            reply = Reply(False, f"not sent: turn {failed_turn + 1} of the conversation failed")
        prompt_len = num_tokens if reply.prompt_tokens is None else reply.prompt_tokens
        outputs.append(RequestOutput(index, i, call, prompt_len, reply))
        conversation.answer(reply)
        num_tokens += reply.output_len
        on_turn(1)
    return outputs
