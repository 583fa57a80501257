"""Sends the load: requests arrive at a given rate, conversations run turn by turn, and concurrency may be limited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fenceline.benchmarking.args import BenchArgs
from fenceline.benchmarking.client import Client
from fenceline.benchmarking.endpoints import backend_kind
from fenceline.benchmarking.records import BenchRequest, Call, Content, Message, Prompt, Reply, RequestOutput, joined
from fenceline.benchmarking.tokenizer import Tokenizer
from fenceline.ipc.progress import progress_bar

Style = Literal["plain", "messages", "template", "template-ids"]


def prompt_style(args: BenchArgs) -> Style:
    """How prompts are built. A chat endpoint applies the chat template itself, so the client does not."""
    if backend_kind(args.backend) == "chat":
        return "messages"
    if args.apply_chat_template:
        return "template-ids" if args.tokenize_prompt else "template"
    return "plain"


def check_template(args: BenchArgs, tokenizer: Tokenizer | None) -> None:
    """Raises ValueError for --apply-chat-template if the tokenizer has no chat template."""
    if prompt_style(args).startswith("template") and (tokenizer is None or not tokenizer.chat_template):
        raise ValueError("--apply-chat-template: the tokenizer has no chat template; leave the flag out")


@dataclass(slots=True)
class Conversation:
    """The history of one conversation. Call :meth:`answer` before the next :meth:`ask`."""

    style: Style
    tokenizer: Tokenizer | None = None
    _messages: list[Message] = field(default_factory=list)
    _history: Content | None = None

    def ask(self, content: Content, images: Sequence[str] = ()) -> Prompt:
        """Append ``content`` as the user's next turn. Returns the prompt, which later calls do not change. ``images``:
        data: URLs, for a chat endpoint."""
        if self.style == "plain":
            self._history = content if self._history is None else joined(self._history, content)
            return self._history
        text: str | list[dict[str, object]] = self._as_text(content)
        if images:
            parts: list[dict[str, object]] = [{"type": "image_url", "image_url": {"url": url}} for url in images]
            text = [*parts, {"type": "text", "text": text}]
        self._messages.append({"role": "user", "content": text})
        if self.style == "messages":
            return list(self._messages)
        assert self.tokenizer is not None, "check_template passed"
        text = self.tokenizer.apply_chat_template(self._messages, add_generation_prompt=True, tokenize=False)
        if self.style == "template-ids":
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        return text

    def answer(self, reply: Reply) -> None:
        """Append the server's answer to the history."""
        if self.style != "plain":
            self._messages.append({"role": "assistant", "content": reply.text})
        elif isinstance(self._history, str):
            self._history += reply.text
        elif self._history is not None:
            self._history = self._history + (reply.output_ids or self._encode(reply.text))

    def _as_text(self, content: Content) -> str:
        if isinstance(content, str):
            return content
        if self.tokenizer is None:
            raise ValueError("chat prompts are text: pass --tokenizer so that token ids can be decoded")
        return self.tokenizer.decode(content)

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            return []  # the server gave no token ids, and there is no tokenizer: the answer is left out
        return list(self.tokenizer.encode(text, add_special_tokens=False))


@dataclass(frozen=True, slots=True)
class Ramp:
    """A rate that goes from ``start`` to ``end`` requests per second, by equal steps (``strategy`` linear) or ratios
    (exponential) per request."""

    strategy: str
    start: float
    end: float


def ramp_of(args: BenchArgs) -> Ramp | None:
    """The ramp of --ramp-up-strategy, whose flags are checked; None without it."""
    if args.ramp_up_strategy is None:
        return None
    assert args.ramp_up_start_rps is not None and args.ramp_up_end_rps is not None, "checked"
    return Ramp(args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How the requests are sent. ``request_rate`` is in requests per second (inf: all at once), unless there is a
    ``ramp``; the gaps between arrivals are drawn from a gamma distribution with the shape ``burstiness``.
    ``max_concurrency`` limits the requests or conversations in flight (None: no limit). ``sampling_seed`` is the seed
    of the first request if requests are sampled at random and must be repeatable, else None; each further request has
    the next number."""

    request_rate: float = float("inf")
    burstiness: float = 1.0
    ramp: Ramp | None = None
    max_concurrency: int | None = None
    seed: int = 1
    sampling_seed: int | None = None
    lora_names: tuple[str, ...] = ()
    show_progress: bool = False


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All outputs, in the order of requests and turns. ``start_time`` and ``duration`` are seconds of perf_counter."""

    outputs: list[RequestOutput]
    start_time: float
    duration: float


def arrival_times(num: int, plan: LoadPlan, rng: np.random.Generator) -> np.ndarray:
    """When requests arrive, in seconds after the start, the first at 0. Float64 [num]."""
    if plan.ramp is not None:
        space = np.linspace if plan.ramp.strategy == "linear" else np.geomspace
        mean_gaps = 1.0 / space(plan.ramp.start, plan.ramp.end, num)
    elif plan.request_rate == float("inf"):
        return np.zeros(num)
    else:
        mean_gaps = np.full(num, 1.0 / plan.request_rate)
    gaps = mean_gaps
    if plan.burstiness != float("inf"):  # the limit of ever more even gaps, which no generator draws
        gaps = rng.gamma(plan.burstiness, mean_gaps / plan.burstiness)
    return np.concatenate(([0.0], np.cumsum(gaps)[:-1])) if num else np.zeros(0)


async def run_load(
    client: Client, requests: list[BenchRequest], plan: LoadPlan, new_conversation: Callable[[], Conversation]
) -> LoadResult:
    """Send every request at its time and wait for all replies."""
    rng = np.random.default_rng([plan.seed, 1])
    arrivals = arrival_times(len(requests), plan, rng)
    loras = rng.integers(0, max(1, len(plan.lora_names)), size=len(requests))
    gate: AbstractAsyncContextManager[object] = (
        asyncio.Semaphore(plan.max_concurrency) if plan.max_concurrency else nullcontext()
    )
    total = sum(len(request.turns) for request in requests)
    with progress_bar(total, "request", plan.show_progress) as bar:

        async def one(index: int) -> list[RequestOutput]:
            lora = plan.lora_names[int(loras[index])] if plan.lora_names else None
            seed = None if plan.sampling_seed is None else plan.sampling_seed + index
            async with gate:
                return await converse(client, requests[index], index, new_conversation(), seed, lora, bar.update)

        start = time.perf_counter()
        tasks: list[asyncio.Task[list[RequestOutput]]] = []
        for index, arrival in enumerate(arrivals):
            # The delay is relative to the start and not to the previous arrival, so that errors do not add up.
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
    """Run one request, turn by turn. If a turn fails, the later ones are not sent, and are reported as failed too."""
    outputs: list[RequestOutput] = []
    num_tokens = 0  # an estimate of the length of the history, for servers that do not report prompt_tokens
    failed_turn: int | None = None
    for i, turn in enumerate(request.turns):
        num_tokens += turn.prompt_len
        call = Call(conversation.ask(turn.content, turn.images), turn.output_len, seed, lora_name)
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
