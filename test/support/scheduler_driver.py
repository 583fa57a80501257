"""Drives a Scheduler in this process: requests in, whole outputs out, one step at a time."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from token_worker import VOCAB_SIZE, TokenTransfers, TokenWorker, embeddings_of, next_token

import fenceline
from fenceline.config.engine_config import EngineConfig, resolve
from fenceline.config.server_args import ServerArgs
from fenceline.ipc.io_struct import (
    BatchTokenOut,
    FinishReason,
    Message,
    TokenizedGenerateReq,
    TokenLogprobs,
    TokenOut,
    id_array,
)
from fenceline.layers.context import Shard
from fenceline.memory_order import Device, open_device
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import ForwardResult, HeldStep, StepBatch, Worker
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.scheduler.population import InFlight
from fenceline.scheduler.scheduler import Scheduler


@dataclass
class Answer:
    """The output of one request that was sent to the detokenizer."""

    output_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    last: TokenOut | None = None
    num_messages: int = 0


@dataclass
class Driver:
    """Inbox and outbox of a Scheduler under test, and the loop around it."""

    config: EngineConfig
    worker: Worker
    pending: deque[Message] = field(default_factory=deque)
    answers: dict[str, Answer] = field(default_factory=dict)
    first_logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    output_logprobs: dict[str, list[float | None]] = field(default_factory=dict)
    output_named: dict[str, list[list[tuple[float, int]]]] = field(default_factory=dict)
    replies: list[Message] = field(default_factory=list)
    flight: InFlight | None = None

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config, self.worker, self, self)

    def drain(self, block: bool, timeout_ms: int | None = None) -> Sequence[Message]:
        assert not block or timeout_ms is not None or self.pending, (
            "the scheduler blocks although requests are waiting for it"
        )
        if block and timeout_ms is not None and not self.pending:
            time.sleep(timeout_ms / 1000)  # like a poll of the socket, so that storage workers can run
        messages, self.pending = list(self.pending), deque()
        return messages

    def to_detokenizer(self, message: BatchTokenOut) -> None:
        for out in message.outs:
            answer = self.answers.setdefault(out.rid, Answer())
            assert answer.finish is None, f"{out.rid} speaks after its end"
            assert (out.decode is not None) == (answer.num_messages == 0)
            answer.output_ids += out.output_ids
            answer.finish, answer.last = out.finish_reason, out
            answer.num_messages += 1
            if out.input_logprobs is not None:
                assert out.rid not in self.first_logprobs, "the prompt's logprobs are told once"
                self.first_logprobs[out.rid] = out.input_logprobs
            if out.output_logprobs is not None:
                self.output_logprobs.setdefault(out.rid, []).extend(out.output_logprobs.logprobs)
                self.output_named.setdefault(out.rid, []).extend(out.output_logprobs.token_ids_logprobs)
            assert out.completion_tokens == len(answer.output_ids)

    def to_tokenizer(self, message: Message) -> None:
        self.replies.append(message)

    def send(self, *messages: Message) -> None:
        self.pending.extend(messages)

    def step(self) -> None:
        """One step of the loop; nothing if the scheduler would block."""
        scheduler = self.scheduler
        if self.pending or self.flight is not None or not scheduler.idle or scheduler.memory.num_outstanding:
            self.flight = self.scheduler.step(self.flight)
            self.scheduler.memory.tree.check()

    def run(self, max_steps: int = 5000) -> None:
        """Run until everything is answered, and then check the scheduler's accounts page by page."""
        for _ in range(max_steps):
            if not (self.pending or self.scheduler.reqs or self.flight is not None):
                break
            self.step()
        else:
            raise AssertionError(f"not done after {max_steps} steps")
        self.scheduler.memory.check_memory(every_page=True)


def make_driver(
    num_pages: int = 64,
    page_size: int = 4,
    num_rows: int = 8,
    context_length: int = 256,
    max_step_tokens: int = 1,
    num_snapshots: int | None = None,
    **flags: object,
) -> Driver:
    """A scheduler over a TokenWorker; ``flags`` are ServerArgs fields."""
    flags.setdefault("chunked_prefill_size", 16 * page_size)
    args = ServerArgs(
        model_path=fenceline.demo_model_path(),
        device="cpu",
        random_seed=7,
        page_size=page_size,
        max_running_requests=num_rows,
        **flags,  # type: ignore[arg-type]
    )
    config = resolve(args)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model, context_length=context_length, vocab_size=VOCAB_SIZE, eos_token_ids=(0,)
        ),
    )
    return Driver(config, TokenWorker(num_pages, page_size, num_rows, context_length, max_step_tokens, num_snapshots))


def make_model_driver(
    num_rows: int = 8, device: str = "cpu", rank: tuple[Device, Shard] | None = None, **flags: object
) -> Driver:
    """A scheduler over the real ModelRunner with the demo model, in fp32 by default; ``flags`` are ServerArgs fields.
    ``rank``: the device and the part of the model of one of several ranks."""
    sizes: dict[str, object] = {"max_total_tokens": 4096, "page_size": 16, "chunked_prefill_size": 2048}
    flags = sizes | {"random_seed": 1, "dtype": "float32", "model_path": fenceline.demo_model_path()} | flags
    opened, shard = rank or (open_device(device), Shard())
    config = resolve(
        ServerArgs(
            device=device,
            max_running_requests=num_rows,
            tp_size=shard.size,
            **flags,  # type: ignore[arg-type]
        )
    )
    return Driver(config, ModelRunner(config, opened, show_progress=False, shard=shard))


def prefills(driver: Driver) -> list[list[int]]:
    """A list that is filled from now on: for each prefill step, how many tokens of each prompt it computes."""
    steps: list[list[int]] = []
    launch = driver.worker.launch

    def recording(batch: StepBatch) -> ForwardResult | HeldStep:
        if not batch.is_decode:
            steps.append([len(chunk.token_ids) for chunk in batch.chunks])
        return launch(batch)

    driver.worker.launch = recording  # type: ignore[method-assign]
    return steps


def request(rid: str, prompt: list[int], seed: int = 0, **params: object) -> TokenizedGenerateReq:
    """A request. Its ``seed`` is 0 by default, so that the reference knows it."""
    stream = bool(params.pop("stream", True))
    outer = {
        name: params.pop(name)
        for name in list(params)
        if "logprob" in name or name in ("extra_key", "priority", "body", "embed")
    }
    return TokenizedGenerateReq(
        rid=rid,
        input_ids=id_array(prompt),
        sampling_params=SamplingParams(seed=seed, **params),  # type: ignore[arg-type]
        stream=stream,
        **outer,  # type: ignore[arg-type]
    )


def expected_output(req: TokenizedGenerateReq, capacity: int, eos: int = 0) -> list[int]:
    """The expected output of ``req``, computed alone."""
    params = req.sampling_params
    history, output = list(req.input_ids), []
    for image in req.images:
        history[image.offset : image.end] = embeddings_of(image)
    assert params.seed is not None
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {eos})
    for _ in range(min(params.max_new_tokens, capacity - len(req.input_ids))):
        token = next_token(history, params.seed)
        history.append(token)
        output.append(token)
        if token in stops and len(output) >= params.min_new_tokens:
            break
    return output


def make_tiered_driver(
    num_pages: int = 24,
    num_host_pages: int = 64,
    page_size: int = 4,
    num_rows: int = 6,
    seed: int = 0,
    max_step_tokens: int = 1,
    num_snapshots: int | None = None,
    num_host_states: int = 4,
    **flags: object,
) -> Driver:
    """Like :func:`make_driver`, with a host tier. ``seed`` decides when transfers run; see TokenTransfers."""
    driver = make_driver(num_pages, page_size, num_rows, enable_hierarchical_cache=True, **flags)
    length = driver.config.model.context_length
    worker = TokenWorker(num_pages, page_size, num_rows, length, max_step_tokens, num_snapshots)
    TokenTransfers(worker, num_host_pages, Random(seed), num_host_states)
    return Driver(driver.config, worker)


def capacity(driver: Driver) -> int:
    """The most tokens that a request may have."""
    num_tokens = driver.scheduler.memory.num_pages * driver.config.server_args.page_size
    return min(driver.config.model.context_length, num_tokens - driver.worker.max_step_tokens + 1)


def assert_right(driver: Driver, *reqs: TokenizedGenerateReq) -> None:
    """Check that each request was answered to its end with the reference's tokens."""
    for req in reqs:
        answer = driver.answers[req.rid]
        assert answer.output_ids == expected_output(req, capacity(driver)), req.rid
        assert answer.finish is not None and answer.finish.type in ("stop", "length")


def answers(driver: Driver, reqs: list[TokenizedGenerateReq]) -> list[list[int]]:
    """Send all requests at once and run until all are answered. Returns the tokens of each."""
    driver.send(*reqs)
    driver.run()
    return [driver.answers[req.rid].output_ids for req in reqs]


def asked_twice(checkpoint: Path, flags: Mapping[str, object], device: str = "cuda") -> list[list[int]]:
    """A model's greedy answers to eight prompts, four of which begin with the same 40 tokens. It is asked twice, the
    second time after prefix hits."""
    driver = make_model_driver(model_path=str(checkpoint), device=device, **flags)  # type: ignore[arg-type]
    prompts = [[(3 * j + (i if j >= 40 or i >= 4 else 0)) % 101 for j in range(50 + i)] for i in range(8)]
    params = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    rounds = [
        answers(driver, [request(f"{number}, {i}", prompt, **params) for i, prompt in enumerate(prompts)])
        for number in range(2)
    ]
    assert rounds[0] == rounds[1]
    return rounds[0]
