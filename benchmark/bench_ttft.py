"""Time to first token without the model: client, HTTP, tokenizer manager, scheduler, detokenizer, and back.

    python benchmark/bench_ttft.py [--loads 1x1024,32x128] [--rounds 60] [--client lean,bench]

The server is the real one over HTTP with the real scheduler (tree, pages, batches), whose worker computes nothing and
ends at once. A load ``32x128`` sends 32 prompts of 128 random token ids together, as ids, streamed, waits for all
answers, and repeats this ``--rounds`` times. ``lean`` is a plain socket that looks for the first token, so its figures
are the server's; ``bench`` is bench_serving's own client, whose time is part of what bench_serving reports. Both make a
new connection for each request. CPU time is that of each process, per request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import cast

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).parent / "h200"))

from shapes import NUM_PLAIN_TOKENS, make_model_dir

from bench_scheduler import NullWorker
from fenceline.benchmarking.client import Client, open_session
from fenceline.benchmarking.endpoints import Endpoint
from fenceline.benchmarking.records import Call
from fenceline.config.engine_config import EngineConfig, resolve
from fenceline.config.server_args import parse_args
from fenceline.entrypoints.supervisor import serve_until_stopped
from fenceline.ipc.child_process import Watchdog, freeze_garbage_collector, prepare_child
from fenceline.ipc.free_memory import FreeMemoryWatch
from fenceline.ipc.io_struct import SCHEDULER_DECODER, PortArgs
from fenceline.ipc.mailbox import Inbox
from fenceline.scheduler.process import SocketInbox, SocketOutbox, ready_message, run_loop
from fenceline.scheduler.scheduler import Scheduler

NUM_PAGES = 1 << 20
WARM_ROUNDS = 10

Send = Callable[[list[int]], Awaitable[float]]  # one prompt; seconds until its first token


def run_scheduler(config: EngineConfig, ports: PortArgs) -> None:
    """The entry of the scheduler process."""
    prepare_child("scheduler", config.server_args, ports)
    messages = Inbox(ports.scheduler, SCHEDULER_DECODER)
    inbox = SocketInbox(messages, Watchdog(0.0, lambda reason: None), FreeMemoryWatch())
    outbox = SocketOutbox(ports, config.server_args.skip_tokenizer_init)
    scheduler = Scheduler(config, NullWorker(NUM_PAGES, config.max_running_requests), inbox, outbox)
    outbox.to_tokenizer(ready_message(config, scheduler))
    freeze_garbage_collector()
    run_loop(scheduler)
    outbox.close()


class FirstToken(asyncio.Protocol):
    """One streaming request on a bare socket."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.first = 0.0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._tail = (self._tail + data)[-512:]
        if not self.first and b"data: " in self._tail:
            self.first = now
        if b"data: [DONE]" in self._tail:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done.done():
            return
        if self.first:
            self.done.set_result(self.first)
        else:
            self.done.set_exception(RuntimeError(f"no token came: {self._tail.decode(errors='replace')}"))


def body_of(ids: Sequence[int], output_len: int) -> dict[str, object]:
    """The body of /generate, as bench_serving writes it."""
    sampling = {"temperature": 0.0, "max_new_tokens": output_len, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": sampling, "stream": True}


def lean_sender(host: str, port: int, output_len: int) -> Send:
    """Sends on a bare socket. The body is ready before the clock starts, as bench_serving's is."""

    async def send(ids: list[int]) -> float:
        data = json.dumps(body_of(ids, output_len)).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        await asyncio.sleep(0)  # every request of the round is ready
        start = time.perf_counter()
        client = FirstToken(request)
        await asyncio.get_running_loop().create_connection(lambda: client, host, port)
        return await client.done - start

    return send


def bench_sender(client: Client, output_len: int) -> Send:
    """Sends as bench_serving does."""

    async def send(ids: list[int]) -> float:
        reply = await client.send(Call(ids, output_len))
        assert reply.success, reply.error
        return reply.ttft

    return send


@dataclass(frozen=True, slots=True)
class Load:
    """``num`` prompts of ``length`` ids at a time."""

    num: int
    length: int

    @classmethod
    def parse(cls, text: str) -> Load:
        """``32x128``."""
        num, _, length = text.partition("x")
        return cls(int(num), int(length))

    def prompts(self, rng: random.Random) -> list[list[int]]:
        """One round's prompts, without long common prefixes."""
        return [[rng.randrange(1000, NUM_PLAIN_TOKENS) for _ in range(self.length)] for _ in range(self.num)]


async def rounds(send: Send, rounds_of_prompts: Sequence[Sequence[list[int]]]) -> list[float]:
    """Every request's TTFT in seconds."""
    times: list[float] = []
    for prompts in rounds_of_prompts:
        times += await asyncio.gather(*(send(ids) for ids in prompts))
    return times


def cpu_seconds(pid: int) -> dict[str, float]:
    """CPU time so far of the server's processes by role, and of this one."""
    main = psutil.Process(pid)
    times = {"client": time.process_time(), "http+tokenizer": sum(main.cpu_times()[:2])}
    engine = [child for child in main.children() if "resource_tracker" not in " ".join(child.cmdline())]
    for name, child in zip(("scheduler", "detokenizer"), engine, strict=True):
        times[name] = sum(child.cpu_times()[:2])
    return times


async def measure(
    args: argparse.Namespace, pid: int, host: str, port: int, client: str, load: Load
) -> dict[str, object]:
    """One load with one client."""
    rng = random.Random(args.seed)
    async with open_session({}) as session:
        endpoint = Endpoint("fenceline", f"http://{host}:{port}", "model")
        bench = client == "bench"
        send = (
            bench_sender(Client(session, endpoint), args.output_len)
            if bench
            else lean_sender(host, port, args.output_len)
        )
        prompts = [load.prompts(rng) for _ in range(WARM_ROUNDS + args.rounds)]
        await rounds(send, prompts[:WARM_ROUNDS])
        before = cpu_seconds(pid)
        times = [1e3 * t for t in await rounds(send, prompts[WARM_ROUNDS:])]
        after = cpu_seconds(pid)
    num = len(times)
    lasts = [max(times[first : first + load.num]) for first in range(0, num, load.num)]
    return {
        "load": f"{load.num}x{load.length}",
        "client": client,
        "ttft_ms": {"fast": _fast(times), "median": round(median(times), 2), "mean": round(fmean(times), 2)},
        "last_of_round_ms": {"fast": _fast(lasts), "median": round(median(lasts), 2)},
        "cpu_us_per_request": {name: round(1e6 * (after[name] - before[name]) / num) for name in after},
    }


def _fast(times: Sequence[float]) -> float:
    """The first decile, because other load can only add time."""
    return round(quantiles(times, n=10)[0], 2)


def serve(args: argparse.Namespace) -> int:
    """The server process."""
    model = make_model_dir("tiny", Path(tempfile.gettempdir()) / "fenceline-bench-models")
    flags = ["--model-path", str(model), "--port", "0", "--device", "cpu", "--log-level", args.log_level]
    # Prompts as long, and steps as large, as on a GPU.
    flags += ["--load-format", "dummy", "--chunked-prefill-size", "8192", "--max-prefill-tokens", "16384"]
    flags += ["--json-model-override-args", '{"max_position_embeddings": 32768}']
    import bench_ttft  # the server's processes import this file by its name, not as the program that it is here

    return serve_until_stopped(resolve(parse_args(flags)), bench_ttft.run_scheduler)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default="1x1024,32x128", help="prompts at a time x their ids")
    parser.add_argument("--client", default="lean,bench", help="lean, bench or both")
    parser.add_argument("--rounds", type=int, default=60, help="rounds of each load (default: 60)")
    parser.add_argument("--output-len", type=int, default=2, help="tokens of each answer (default: 2)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-level", default="info", help="the server's, as by default: info")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args)
    command = [sys.executable, __file__, "--serve", "--log-level", args.log_level]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        address = next(line for line in server.stdout if " at http://" in line).strip().rsplit("/", 1)[1]
        host, port = address.split(":")
        for load in map(Load.parse, args.loads.split(",")):
            for client in args.client.split(","):
                result = uvloop.run(measure(args, server.pid, host, int(port), client, load))
                print(json.dumps(result), flush=True)
    finally:
        server.terminate()
        server.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
