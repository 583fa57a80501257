"""A scheduler without a model: it uses the real messages and repeats the prompt.

The answer to prompt ids p is p[0], p[1], ..., p[0], ...; an end-of-sequence id or a stop token id among
them ends it, as does ``max_new_tokens``. The logprob of token t is ``-(t % 8) / 8``. A prompt seen before is
cached except for its last token; with HiCache it is found on the device, or in the storage after a flush that kept
the storage. Special seeds make it misbehave: see ``Seed``.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass

import msgspec

from fenceline.config.engine_config import EngineConfig
from fenceline.ipc.child_process import prepare_child
from fenceline.ipc.io_struct import (
    SCHEDULER_DECODER,
    AbortReq,
    BatchTokenOut,
    CachedTokensDetails,
    ContinueGenerationReq,
    ControlReply,
    CudaGraphState,
    DecodeInfo,
    FatalError,
    FinishReason,
    FlightRecorderReq,
    FlushCacheReq,
    GetInternalStateReq,
    HiCacheState,
    InternalState,
    Message,
    PauseGenerationReq,
    PortArgs,
    ProfileReq,
    SchedulerReady,
    ShutdownReq,
    StatsReport,
    TickReq,
    TokenizedGenerateReq,
    TokenLogprobs,
    TokenOut,
    TokenPairs,
    TransferState,
    encode,
)
from fenceline.ipc.mailbox import Inbox, Outbox

CAPACITY_TOKENS = 4096
MAX_RUNNING = 64
CONTEXT_LENGTH = 1024
SLOW_STEP_S = 0.02
RELEASE = signal.SIGUSR2
HICACHE_STATE = HiCacheState(
    cached_tokens={"device": 11, "host": 12, "storage": 13}, num_host_tokens=8192, num_used_host_tokens=640,
    pages={"device": 1, "host": 2, "both": 3, "in_transit": 4}, num_locked_nodes=5,
    evicted_tokens={"device": 14, "host": 15},
    load=TransferState(num_transfers=21, num_tokens=22, num_bytes=23, seconds=2.5),
    store=TransferState(num_transfers=31, num_tokens=32, num_bytes=33, seconds=3.5),
    storage_read=TransferState(num_transfers=41, num_tokens=42, num_bytes=43, seconds=4.5),
    storage_write=TransferState(num_transfers=51, num_tokens=52, num_bytes=53, seconds=5.5),
    prefetches={"complete": 6, "cancelled": 7}, recomputes={"queued_match": 8},
    num_storage_misses=9, storage_errors={"no_space": 10},
)  # fmt: skip


class Seed:
    """``sampling_params.seed`` values with a meaning."""

    HANG = 7001  # never answers; it keeps its place until it is aborted
    HELD = 7002  # sends its first token; the others when the scheduler process gets the signal ``RELEASE``
    RAISE = 7003  # the scheduler fails with an exception
    DIE = 7004  # the scheduler process ends without a message
    REFUSE = 7005  # ends in an error of its own, status 507
    BURST = 7006  # all tokens in one message
    SLOW = 7007  # one token every 20 ms


class FakeFailure(Exception):
    """Raised for ``Seed.RAISE``."""


@dataclass(slots=True)
class Running:
    """One request: its message and how many tokens have been sent."""

    req: TokenizedGenerateReq
    cached_tokens: int
    details: CachedTokensDetails | None = None
    num_out: int = 0
    next_time: float = 0.0


class FakeScheduler:
    """The requests and the answers, without sockets."""

    def __init__(self, eos_ids: tuple[int, ...], *, has_tiers: bool = False) -> None:
        self.eos_ids = frozenset(eos_ids)
        self.has_tiers = has_tiers
        self.running: dict[str, Running] = {}
        self.waiting: dict[str, Running] = {}
        self.seen: set[tuple[str | int, ...]] = set()
        self.stored: set[tuple[str | int, ...]] = set()
        self.latest_prompt: tuple[int, list[int]] = 0, []  # see TokenizedGenerateReq.same_prompt
        self.latest_bias: tuple[int, dict[int, float] | None] = 0, None  # see TokenizedGenerateReq.same_bias
        self.paused = False
        self.released = False
        self.stopping = False
        self.num_aborts = 0
        self.num_generated = 0

    @property
    def busy(self) -> bool:
        """Whether a step may have something to send."""
        active = any(running.req.sampling_params.seed != Seed.HANG for running in self.running.values())
        return not self.paused and (active or bool(self.waiting))

    def handle(self, message: Message) -> tuple[list[TokenOut], list[Message]]:
        """Apply one message; returns the outputs and replies that it causes."""
        match message:
            case TokenizedGenerateReq():
                return self.accept(message), []
            case AbortReq():
                return self.abort(message), []
            case TickReq():
                return [], []
            case FlushCacheReq(id=id, storage=storage):
                return [], [self.flush(id, storage)]
            case PauseGenerationReq(id=id, mode=mode):
                self.paused = True
                outs = self.abort(AbortReq(abort_all=True)) if mode == "abort" else []
                return outs, [ControlReply(id=id, success=True)]
            case ContinueGenerationReq(id=id):
                self.paused = False
                return [], [ControlReply(id=id, success=True)]
            case FlightRecorderReq(id=id, form="trace"):
                return [], [ControlReply(id=id, success=True, payload=b'{"traceEvents":[]}')]
            case FlightRecorderReq(id=id):
                return [], [ControlReply(id=id, success=False, message="a fake has no flight recorder")]
            case GetInternalStateReq(id=id):
                return [], [ControlReply(id=id, success=True, state=self.state())]
            case ProfileReq(id=id, action=action):
                return [], [ControlReply(id=id, success=action == "start", message=f"profile {action}")]
            case ShutdownReq():
                self.stopping = True
        return [], []

    def accept(self, req: TokenizedGenerateReq) -> list[TokenOut]:
        """Put a request into the queue."""
        params = req.sampling_params
        if req.same_bias:
            body, bias = self.latest_bias
            assert body == req.body, f"{req.rid} has come without its logit_bias"
            req = msgspec.structs.replace(req, sampling_params=msgspec.structs.replace(params, logit_bias=bias))
        elif req.body and params.logit_bias:
            self.latest_bias = req.body, params.logit_bias
        if req.same_prompt:
            body, prompt = self.latest_prompt
            assert body == req.body, f"{req.rid} has come without its prompt"
            req = msgspec.structs.replace(req, input_ids=prompt)
        elif req.body:
            self.latest_prompt = req.body, req.input_ids
        assert req.rid not in self.running, req.rid
        assert req.rid not in self.waiting, req.rid
        seed = req.sampling_params.seed
        if seed == Seed.RAISE:
            raise FakeFailure("as the request asked")
        if seed == Seed.DIE:
            os._exit(77)
        if seed == Seed.REFUSE:
            reason = FinishReason(type="abort", message="no room for this one", status_code=507)
            return [TokenOut(rid=req.rid, output_ids=[], prompt_tokens=len(req.input_ids), completion_tokens=0,
                             cached_tokens=0, finish_reason=reason)]  # fmt: skip
        key = (req.extra_key, *req.input_ids)
        self.waiting[req.rid] = Running(req, *self.cached(key))
        self.seen.add(key)
        self.stored.add(key)
        return []

    def cached(self, key: tuple[str | int, ...]) -> tuple[int, CachedTokensDetails | None]:
        """How much of a prompt is cached, and in which tier."""
        length = len(key) - 2  # without the namespace and the last token
        device = length if key in self.seen else 0
        if not self.has_tiers:
            return device, None
        storage = length if key in self.stored and not device else 0
        return device + storage, CachedTokensDetails(device=device, host=0, storage=storage)

    def abort(self, message: AbortReq) -> list[TokenOut]:
        """End requests, without a message if the detokenizer has already told the client."""
        rids = [*self.running, *self.waiting] if message.abort_all else [message.rid]
        outs: list[TokenOut] = []
        for rid in rids:
            running = self.running.pop(rid, None) or self.waiting.pop(rid, None)
            if running is None:
                continue
            self.num_aborts += not message.silent
            if not message.silent:
                outs.append(self.out(running, [], FinishReason(type="abort", message="aborted")))
        return outs

    def flush(self, id: str, storage: bool) -> ControlReply:
        """Refused unless idle."""
        idle = not self.running and not self.waiting
        if idle:
            self.seen.clear()
        if idle and storage:
            self.stored.clear()
        return ControlReply(id=id, success=idle, message="" if idle else "requests are running")

    def step(self, now: float) -> list[TokenOut]:
        """A token for every running request that is due."""
        if self.paused:
            return []
        while self.waiting and len(self.running) < MAX_RUNNING:
            rid = next(iter(self.waiting))
            self.running[rid] = self.waiting.pop(rid)
        outs: list[TokenOut] = []
        for running in list(self.running.values()):
            seed = running.req.sampling_params.seed
            if seed == Seed.HANG or now < running.next_time:
                continue
            if seed == Seed.HELD and running.num_out and not self.released:
                continue
            if seed == Seed.SLOW:
                running.next_time = now + SLOW_STEP_S
            count = running.req.sampling_params.max_new_tokens if seed == Seed.BURST else 1
            outs.append(self.advance(running, max(count, 1)))
        return outs

    def advance(self, running: Running, count: int) -> TokenOut:
        """The next ``count`` tokens of a request, fewer if it ends."""
        params = running.req.sampling_params
        prompt = running.req.input_ids
        new: list[int] = []
        reason: FinishReason | None = None
        while reason is None and len(new) < count:
            total = running.num_out + len(new)
            if total >= params.max_new_tokens:
                reason = FinishReason(type="length", length=params.max_new_tokens)
                break
            token = prompt[total % len(prompt)]
            new.append(token)
            ends = token in params.stop_token_ids or (token in self.eos_ids and not params.ignore_eos)
            if ends and total + 1 >= params.min_new_tokens:
                reason = FinishReason(type="stop", matched=token)
            elif total + 1 >= params.max_new_tokens:
                reason = FinishReason(type="length", length=params.max_new_tokens)
        if reason is not None:
            del self.running[running.req.rid]
        self.num_generated += len(new)
        return self.out(running, new, reason)

    def out(self, running: Running, new: list[int], reason: FinishReason | None) -> TokenOut:
        """The message with the new tokens of one request."""
        req = running.req
        first = running.num_out == 0
        running.num_out += len(new)
        info = DecodeInfo(
            prompt_tail_ids=req.input_ids[-8:].tolist(), sampling_params=req.sampling_params, queue_time_s=0.25
        )
        wants_input = first and req.return_logprob and req.logprob_start_len >= 0
        return TokenOut(
            rid=req.rid,
            output_ids=new,
            prompt_tokens=len(req.input_ids),
            completion_tokens=running.num_out,
            cached_tokens=running.cached_tokens,
            finish_reason=reason,
            decode=info if first and (new or reason is None or reason.type != "abort") else None,
            input_logprobs=logprobs_of(req.input_ids.tolist(), req.logprob_start_len, req) if wants_input else None,
            output_logprobs=logprobs_of(new, -1, req) if req.return_logprob else None,
            cached_tokens_details=running.details,
        )

    def state(self) -> InternalState:
        """The state of the scheduler."""
        used = sum(len(running.req.input_ids) + running.num_out for running in self.running.values())
        return InternalState(
            num_running_reqs=len(self.running), num_queue_reqs=len(self.waiting), num_used_tokens=used,
            num_evictable_tokens=CAPACITY_TOKENS // 4,
            max_total_num_tokens=CAPACITY_TOKENS, token_usage=used / CAPACITY_TOKENS, cache_hit_rate=0.25,
            gen_throughput=123.0, last_gen_throughput=123.0, num_retractions=3, num_aborts=self.num_aborts,
            num_generated_tokens=self.num_generated, num_prompt_tokens=0, num_cached_tokens=0,
            new_token_ratio=0.5, paused=self.paused, memory_bytes={"weights": 1, "kv_cache": 2},
            cuda_graphs=CudaGraphState(
                eligible_steps=9, replays=7, replays_by_size={"1": 7}, fallbacks={"size": 2}, repairs={},
                capture_s=1.5, capture_bytes=3,
            ),
            piecewise_cuda_graphs=CudaGraphState(
                eligible_steps=5, replays=4, replays_by_size={"16": 4}, fallbacks={"address": 1}, repairs={},
                capture_s=0.5, capture_bytes=2,
            ),
            hicache=HICACHE_STATE if self.has_tiers else None,
            avg_spec_accept_length=2.5,
            spec_steps_by_depth={"0": 3, "2": 5},
        )  # fmt: skip


def logprobs_of(ids: list[int], start: int, req: TokenizedGenerateReq) -> TokenLogprobs:
    """Logprobs of ``ids`` from position ``start`` on (-1: all of an output)."""
    chosen = ids if start < 0 else ids[start:]
    logprobs: list[float | None] = [-(token % 8) / 8 for token in chosen]
    if start == 0 and logprobs:
        logprobs[0] = None
    top = [[(-(rank + 1) / 8, (token + rank) % 256) for rank in range(req.top_logprobs_num)] for token in chosen]
    if start == 0 and top:
        top[0] = []
    named = [[(-(token % 8) / 8, token) for token in req.token_ids_logprob] for _ in chosen]
    if start == 0 and named:
        named[0] = []
    return TokenLogprobs(
        token_ids=chosen,
        logprobs=logprobs,
        top_logprobs=TokenPairs.of(top),
        token_ids_logprobs=TokenPairs.of(named if req.token_ids_logprob else []),
    )


class FakeProcess:
    """The sockets around a FakeScheduler."""

    def __init__(self, scheduler: FakeScheduler, ports: PortArgs, *, to_tokenizer: bool) -> None:
        self.scheduler = scheduler
        self.inbox = Inbox(ports.scheduler, SCHEDULER_DECODER)
        self.tokenizer = ports.tokenizer
        self.detokenizer = ports.tokenizer if to_tokenizer else ports.detokenizer
        self.outbox = Outbox(*{self.tokenizer, self.detokenizer})

    def run(self) -> None:
        """Serve until told to stop."""
        signal.signal(RELEASE, lambda *_: setattr(self.scheduler, "released", True))
        self.outbox.send(
            self.detokenizer,
            encode(
                SchedulerReady(
                    max_total_num_tokens=CAPACITY_TOKENS, max_running_requests=MAX_RUNNING,
                    max_req_input_len=CONTEXT_LENGTH - 1, context_length=CONTEXT_LENGTH,
                    memory_bytes={"weights": 1, "kv_cache": 2},
                )
            ),
        )  # fmt: skip
        while not self.scheduler.stopping:
            outs: list[TokenOut] = []
            for message in self.receive():
                news, replies = self.scheduler.handle(message)
                outs += news
                for reply in replies:
                    self.outbox.send(self.tokenizer, encode(reply))
            outs += self.scheduler.step(time.monotonic())
            if outs:
                self.outbox.send(self.detokenizer, encode(BatchTokenOut(outs=outs)))
                self.outbox.send(self.tokenizer, encode(StatsReport(state=self.scheduler.state())))
        self.close()

    def receive(self) -> list[Message]:
        """The messages that have arrived. It waits while there is nothing to do, and briefly between steps."""
        if self.scheduler.busy:
            self.inbox.wait(1)
        else:
            self.inbox.wait()
        return self.inbox.drain()

    def fail(self, error: Exception) -> None:
        """Tell the main process."""
        failed = FatalError(source="scheduler", message=f"{type(error).__name__}: {error}")
        self.outbox.send(self.tokenizer, encode(failed))
        self.close()

    def close(self) -> None:
        """Close the sockets; what was sent is still delivered."""
        self.inbox.close()
        self.outbox.close()


def run_fake_scheduler(config: EngineConfig, ports: PortArgs) -> None:
    """The entry of a scheduler process."""
    prepare_child("scheduler", config.server_args, ports)
    eos_ids = config.model.eos_token_ids
    scheduler = FakeScheduler(eos_ids, has_tiers=config.hicache is not None)
    process = FakeProcess(scheduler, ports, to_tokenizer=config.server_args.skip_tokenizer_init)
    try:
        process.run()
    except FakeFailure as error:
        process.fail(error)
        raise SystemExit(1) from error


def run_stillborn_scheduler(config: EngineConfig, ports: PortArgs) -> None:
    """A scheduler process that fails while it loads its model."""
    prepare_child("scheduler", config.server_args, ports)
    raise SystemExit(3)


def run_never_ready_scheduler(config: EngineConfig, ports: PortArgs) -> None:
    """A scheduler process that loads its model forever."""
    prepare_child("scheduler", config.server_args, ports)
    threading.Event().wait()
