"""How many tokens per second can bench_serving's client take? Measured against a responder that does no work.

    python benchmark/bench_client_capacity.py --num-streams 256 --output-len 256 --backend fenceline

A second process answers each request with a prepared stream, one server-sent event per token, as an inference
server would: every stream gets one event per step. With ``--step-ms 0`` steps follow one another as fast as the
responder can write. If the client is slower, several events come in one read, which takes less time, so look at reads/s
as well. With ``--step-ms 10`` the load is that of a server with a decode step of 10 ms, and the client's CPU share
shows how much capacity is left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any, cast

from fenceline.benchmarking.client import Client, open_session, raise_file_limit
from fenceline.benchmarking.endpoints import BACKENDS, Endpoint, Kind, backend_kind
from fenceline.benchmarking.load import Conversation, LoadPlan, Style, run_load
from fenceline.benchmarking.records import BenchRequest, Turn
from fenceline.benchmarking.runner import run_async

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"


def prepared_events(kind: Kind, output_len: int) -> list[bytes]:
    """The HTTP chunks of one whole stream, one per token; the last also carries [DONE] and the end of the body."""
    events = []
    for i in range(1, output_len + 1):
        event: dict[str, Any]
        if kind == "generate":
            meta = {"id": "0", "finish_reason": None, "prompt_tokens": 16, "completion_tokens": i, "cached_tokens": 0}
            event = {"text": " word" * i, "output_ids": list(range(1000, 1000 + i)), "meta_info": meta}
        else:
            piece = {"delta": {"content": " word"}} if kind == "chat" else {"text": " word"}
            event = {"id": "0", "model": "m", "choices": [{"index": 0, "finish_reason": None, **piece}]}
        events.append(b"data: " + json.dumps(event).encode() + b"\n\n")
    if kind != "generate":
        usage = {"choices": [], "usage": {"prompt_tokens": 16, "completion_tokens": output_len}}
        events[-1] += b"data: " + json.dumps(usage).encode() + b"\n\n"
    events[-1] += b"data: [DONE]\n\n"
    chunks = [b"%x\r\n%b\r\n" % (len(event), event) for event in events]
    chunks[-1] += b"0\r\n\r\n"
    return chunks


class Stream(asyncio.Protocol):
    """One connection: it reads one request and then gets one chunk per step."""

    def __init__(self, streams: set[Stream]) -> None:
        self.position = 0
        self.writable = True
        self._streams = streams
        self._request = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods without the base class.
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.discard(self)

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True

    def data_received(self, data: bytes) -> None:
        self._request += data
        head, separator, body = self._request.partition(b"\r\n\r\n")
        lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
        if separator and len(body) >= int(lengths[0]):
            self.transport.write(_HEAD)
            self._streams.add(self)


def respond(kind: Kind, output_len: int, step_s: float, ready: Connection) -> None:
    """The responder process: sends its port through ``ready`` and serves until it is terminated."""
    chunks = prepared_events(kind, output_len)

    async def serve() -> dict[str, Any]:
        streams: set[Stream] = set()
        server = await asyncio.get_running_loop().create_server(lambda: Stream(streams), "127.0.0.1", 0)
        ready.send(server.sockets[0].getsockname()[1])
        due = time.perf_counter()
        while True:
            due = max(due + step_s, time.perf_counter() - step_s)  # after a late step there is no burst
            await asyncio.sleep(max(0.0, due - time.perf_counter()) if streams else 0.001)
            for stream in [s for s in streams if s.writable]:
                stream.transport.write(chunks[stream.position])
                stream.position += 1
                if stream.position == len(chunks):
                    streams.discard(stream)
                    stream.transport.close()

    run_async(serve())


async def measure(args: argparse.Namespace, port: int) -> dict[str, Any]:
    """Drive the responder with the real client and load generator."""
    endpoint = Endpoint(args.backend, f"http://127.0.0.1:{port}", "m")
    request = BenchRequest((Turn("say something", 16, args.output_len),))
    requests = [request] * (args.num_streams * args.rounds)
    style: Style = "messages" if endpoint.kind == "chat" else "plain"
    async with open_session({}) as session:
        client = Client(session, endpoint)
        cpu = time.process_time()
        load = await run_load(client, requests, LoadPlan(max_concurrency=args.num_streams), lambda: Conversation(style))
        cpu = time.process_time() - cpu
    failures = [o.reply.error for o in load.outputs if not o.reply.success]
    if failures:
        raise ValueError(f"{len(failures)} streams failed, the first with: {failures[0]}")
    num_tokens = sum(o.reply.output_len for o in load.outputs)
    return {
        "backend": args.backend,
        "streams": args.num_streams,
        "step_ms": args.step_ms,
        "duration_s": round(load.duration, 3),
        "tokens": num_tokens,
        "tokens_per_s": round(num_tokens / load.duration),
        "reads_per_s": round(client.num_reads / load.duration),
        "tokens_per_read": round(num_tokens / client.num_reads, 2),
        "client_cpu_share": round(cpu / load.duration, 3),
        "client_cpu_us_per_token": round(1e6 * cpu / num_tokens, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=list(BACKENDS), default="fenceline")
    parser.add_argument("--num-streams", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=4, help="Streams one after another in each slot.")
    parser.add_argument("--step-ms", type=float, default=0.0, help="Milliseconds between the events of a stream.")
    args = parser.parse_args()
    raise_file_limit()
    here, there = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    kind = backend_kind(args.backend)
    process = spawn.Process(target=respond, args=(kind, args.output_len, args.step_ms / 1e3, there), daemon=True)
    process.start()
    try:
        if not here.poll(30):
            raise SystemExit("the responder did not start within 30 s")
        result = run_async(measure(args, here.recv()))
    finally:
        process.terminate()
        process.join()
    for key, value in result.items():
        print(f"{key:<28}{value}")
    print(f"tokens/s: {result['tokens_per_s']}")


if __name__ == "__main__":
    main()
