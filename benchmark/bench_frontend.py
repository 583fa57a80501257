"""How many tokens per second the front end delivers over HTTP, with a scheduler that computes nothing.

Everything but the model is real: HTTP, TokenizerManager, DetokenizerManager, the messages between them. The
null scheduler emits one token for every stream per step, at a given total rate or as fast as it can.

    python benchmark/bench_frontend.py --streams 256 --rates 10000,30000,0 --endpoint completions

For each rate (0: as fast as possible) it prints the tokens per second delivered between the first byte and the
last, tokens per event (more than 1 if the front end was too slow and merged tokens), the time between events as
measured by a client, and the CPU time that each process spent per delivered token. Clients are separate processes that
only count bytes; ``benchmark/bench_client_capacity.py`` measures their capacity.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import cast

import psutil

from fenceline.config.engine_config import EngineConfig, resolve
from fenceline.config.server_args import parse_args
from fenceline.entrypoints.supervisor import serve_until_stopped
from fenceline.ipc.child_process import prepare_child
from fenceline.ipc.io_struct import (
    SCHEDULER_DECODER,
    AbortReq,
    BatchTokenOut,
    DecodeInfo,
    FinishReason,
    PortArgs,
    SchedulerReady,
    ShutdownReq,
    TokenizedGenerateReq,
    TokenOut,
    encode,
)
from fenceline.ipc.mailbox import Inbox, Outbox

FIRST_TOKEN_ID, NUM_TOKEN_IDS = 300, 400  # ordinary words of the demo model's vocabulary


@dataclass(slots=True)
class NullRequest:
    """A request and how many of its tokens have been sent."""

    req: TokenizedGenerateReq
    num_out: int = 0

    def next(self) -> TokenOut:
        """Its next token."""
        req, first = self.req, self.num_out == 0
        self.num_out += 1
        params = req.sampling_params
        ends = self.num_out >= params.max_new_tokens
        return TokenOut(
            rid=req.rid,
            output_ids=[FIRST_TOKEN_ID + (self.num_out * 7 + len(req.rid)) % NUM_TOKEN_IDS],
            prompt_tokens=len(req.input_ids),
            completion_tokens=self.num_out,
            cached_tokens=0,
            finish_reason=FinishReason(type="length", length=self.num_out) if ends else None,
            decode=DecodeInfo(prompt_tail_ids=req.input_ids[-8:].tolist(), sampling_params=params) if first else None,
        )


def run_null_scheduler(config: EngineConfig, ports: PortArgs, rate: float, streams: int) -> None:
    """The entry of a scheduler process. Waits for ``streams`` requests, then serves all at ``rate`` tokens/s."""
    prepare_child("scheduler", config.server_args, ports)
    inbox = Inbox(ports.scheduler, SCHEDULER_DECODER)
    outbox = Outbox(ports.tokenizer, ports.detokenizer)
    outbox.send(
        ports.tokenizer,
        encode(
            SchedulerReady(
                max_total_num_tokens=1 << 24, max_running_requests=4096, max_req_input_len=4000,
                context_length=1 << 20, memory_bytes={},
            )
        ),
    )  # fmt: skip
    running: dict[str, NullRequest] = {}
    started = False
    due = time.perf_counter()
    while True:
        wait_ms = max(0.0, due - time.perf_counter()) * 1000 if started and rate else 0 if started else None
        messages = inbox.drain() if wait_ms == 0 or inbox.wait(wait_ms) else []
        for message in messages:
            if isinstance(message, ShutdownReq):
                return
            if isinstance(message, TokenizedGenerateReq):
                running[message.rid] = NullRequest(message)
            elif isinstance(message, AbortReq):
                running.pop(message.rid, None)
        if not started and len(running) >= streams:
            started, due = True, time.perf_counter()
        started = started and bool(running)
        now = time.perf_counter()
        if not started or (rate and now < due):
            continue
        outs = [request.next() for request in running.values()]
        outbox.send(ports.detokenizer, encode(BatchTokenOut(outs=outs)))
        for out in outs:
            if out.finish_reason is not None:
                del running[out.rid]
        due += len(outs) / rate if rate else 0.0


@dataclass(frozen=True, slots=True)
class ClientResult:
    """The measurements of one client process."""

    first: float
    last: float
    num_events: int
    num_bytes: int
    gaps: list[float]


class CountingClient(asyncio.Protocol):
    """One streaming request: counts events and notes the time between arrivals."""

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self.request, self.done = request, done
        self.first = self.last = 0.0
        self.num_events = self.num_bytes = 0
        self.gaps: list[float] = []
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        count = data.count(b"data: ")
        if count:
            if self.first:
                self.gaps.append(now - self.last)
            else:
                self.first = now
            self.last = now
        self.num_events += count
        self.num_bytes += len(data)
        self._tail = (self._tail + data)[-32:]
        if b"[DONE]" in self._tail:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def drive(host: str, port: int, request: bytes, streams: int) -> ClientResult:
    """``streams`` connections at once, until all have ended."""
    loop = asyncio.get_running_loop()
    clients = [CountingClient(request, loop.create_future()) for _ in range(streams)]
    await asyncio.gather(*(loop.create_connection(lambda c=client: c, host, port) for client in clients))
    await asyncio.gather(*(client.done for client in clients))
    return ClientResult(
        min(client.first for client in clients),
        max(client.last for client in clients),
        sum(client.num_events - 1 for client in clients),  # [DONE] is none
        sum(client.num_bytes for client in clients),
        [gap for client in clients for gap in client.gaps[:: max(1, len(client.gaps) // 200)]],
    )


def run_client(results: Connection, host: str, port: int, request: bytes, streams: int) -> None:
    """The entry of a client process."""
    import uvloop

    results.send(uvloop.run(drive(host, port, request, streams)))


def http_request(endpoint: str, output_len: int, host: str) -> bytes:
    """The streaming request that every client sends."""
    path, body = {
        "completions": ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": output_len, "ignore_eos": True}),
        "chat": ("/v1/chat/completions", {
            "messages": [{"role": "user", "content": "hi"}], "max_tokens": output_len, "ignore_eos": True}),
        "generate": ("/generate", {
            "input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": output_len, "ignore_eos": True}}),
    }[endpoint]  # fmt: skip
    data = json.dumps({**body, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


def cpu_seconds(pid: int) -> dict[str, float]:
    """CPU time so far of the server's processes by role."""
    main = psutil.Process(pid)
    times = {"http+tokenizer": sum(main.cpu_times()[:2])}
    engine = [child for child in main.children() if "resource_tracker" not in " ".join(child.cmdline())]
    for name, child in zip(("null scheduler", "detokenizer"), engine, strict=True):
        times[name] = sum(child.cpu_times()[:2])
    return times


def measure(args: argparse.Namespace, rate: float) -> dict[str, object]:
    """One rate: start a server, run the clients, stop it."""
    flags = ["--serve", "--streams", str(args.streams), "--rate", str(rate)]
    if args.incremental:
        flags.append("--incremental")
    server = subprocess.Popen([sys.executable, __file__, *flags], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = next(line for line in server.stdout if " at http://" in line).strip().rsplit("/", 1)[1]
        host, port = address.split(":")
        request = http_request(args.endpoint, args.output_len, address)
        shares = [len(range(index, args.streams, args.clients)) for index in range(args.clients)]
        before = cpu_seconds(server.pid)
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe(duplex=False) for _ in shares]
        for (_, sender), share in zip(pipes, shares, strict=True):
            context.Process(target=run_client, args=(sender, host, int(port), request, share), daemon=True).start()
        results: list[ClientResult] = [receiver.recv() for receiver, _ in pipes]
        after = cpu_seconds(server.pid)
    finally:
        server.terminate()
        server.wait()
    return report(args, rate, results, {name: after[name] - before[name] for name in after})


def report(
    args: argparse.Namespace, rate: float, results: list[ClientResult], cpu: dict[str, float]
) -> dict[str, object]:
    """The figures of one rate; perf_counter is the same clock in all processes of a machine."""
    duration = max(result.last for result in results) - min(result.first for result in results)
    tokens = args.streams * args.output_len
    gaps = sorted(gap for result in results for gap in result.gaps)
    return {
        "endpoint": args.endpoint,
        "streams": args.streams,
        "offered_tokens_per_s": rate or None,
        "tokens_per_s": round(tokens / duration),
        "tokens_per_event": round(tokens / sum(result.num_events for result in results), 2),
        "bytes_per_token": round(sum(result.num_bytes for result in results) / tokens, 1),
        "event_gap_ms": {p: round(1000 * gaps[int(len(gaps) * p / 100)], 2) for p in (50, 99)},
        "cpu_us_per_token": {name: round(1e6 * value / tokens, 1) for name, value in cpu.items()},
    }


def serve(args: argparse.Namespace) -> int:
    """The server process."""
    flags = ["--model-path", "demo", "--port", "0", "--device", "cpu", "--log-level", "warning"]
    if args.incremental:
        flags.append("--incremental-streaming-output")
    import bench_frontend  # the server's processes import this file by its name, not as the program that it is here

    entry = partial(bench_frontend.run_null_scheduler, rate=args.rate, streams=args.streams)
    return serve_until_stopped(resolve(parse_args(flags)), entry)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256, help="concurrent streams (default: 256)")
    parser.add_argument("--output-len", type=int, default=1000, help="tokens per stream (default: 1000)")
    parser.add_argument("--rates", default="10000,30000,0", help="offered tokens/s, comma-separated; 0: no limit")
    parser.add_argument("--clients", type=int, default=2, help="client processes (default: 2)")
    parser.add_argument("--endpoint", choices=("completions", "chat", "generate"), default="completions")
    parser.add_argument("--incremental", action="store_true", help="/generate sends only what is new")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args)
    for rate in args.rates.split(","):
        print(json.dumps(measure(args, float(rate))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
