"""Measures the time to first token with a long prefix that is computed, comes from the host, or is on the device.

    python benchmark/h200/hicache_ttft.py                              # Llama-3.1-8B's shape, both io backends, HTTP
    python benchmark/h200/hicache_ttft.py --io-backend direct --via in-process
    python benchmark/h200/hicache_ttft.py --shape tiny --prefix 512 --page-size 16 --server-args "--device cpu"

A prompt is a prefix of random ids and a short new suffix. Each repeat has a new prefix: after a flush it is computed;
sent again with another suffix it is on the device; then a prompt as large as the pool evicts it, and sent once more it
is loaded from the host. The run fails if the answers' own counts say otherwise. Nothing else runs; the client is a
plain socket whose bytes are ready before the clock starts. The floor is the time in which torch copies the prefix's
bytes from pinned memory to the device, measured before. Figures are medians.

SGLang's figures: version 0.5.16 on one H200, Llama-3.1-8B's shape, page size 64.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
import torch
from bench_server import BenchServer, ServerDied
from hicache_client import RequestFailed, flush, random_ids, table, words
from in_process import InProcessEngine
from shapes import SHAPES, kv_bytes_per_token, make_model_dir, num_plain_tokens

_SUFFIX_LEN = 64
_QUIET_S = 0.1  # the pause between two requests, in which backups end and the engine becomes idle
_SGLANG = {8192: ("214", "26 to 30", "14"), 16384: ("490", "47 to 52", "15")}

Asked = tuple[float, Mapping[str, int]]  # seconds to the first token, cached tokens by tier
Ask = Callable[[list[int]], Asked]


@dataclass(frozen=True, slots=True)
class Figures:
    """Milliseconds, medians; ``floor_ms`` is the time to copy the prefix's bytes over the link."""

    io_backend: str
    via: str
    prefix: int
    computed_ms: float
    host_ms: float
    device_ms: float
    floor_ms: float
    spread_ms: tuple[float, float]  # the shortest and longest time from the host


def ask_http(url: str, ids: list[int]) -> Asked:
    """One streamed request on a bare socket. Raises RequestFailed."""
    host, _, port = url.removeprefix("http://").partition(":")
    sampling = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
    data = orjson.dumps({"input_ids": ids, "sampling_params": sampling, "stream": True})
    head = f"POST /generate HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    request = f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
    reply, first = b"", 0.0
    begin = time.perf_counter()
    with socket.create_connection((host, int(port)), timeout=120) as sock:
        sock.sendall(request)
        while piece := sock.recv(1 << 16):
            reply += piece
            if not first and b"data: " in reply:
                first = time.perf_counter()
    if not first:
        raise RequestFailed(f"no token came: {reply[-300:].decode(errors='replace')}")
    line = next(line for line in reply.split(b"\n") if line.startswith(b"data: "))
    meta = orjson.loads(line.removeprefix(b"data: "))["meta_info"]
    return first - begin, meta.get("cached_tokens_details") or {"device": meta["cached_tokens"]}


def ask_in_process(engine: InProcessEngine, ids: list[int]) -> Asked:
    """One request through the scheduler's loop, until its token has been sent."""
    engine.device.synchronize()
    begin = time.perf_counter()
    rid = engine.submit_ids(ids, 1)
    engine.step()
    req = engine.scheduler.reqs[rid]
    engine.step_until(lambda: rid not in engine.scheduler.reqs)
    seconds = time.perf_counter() - begin
    end = time.perf_counter() + _QUIET_S
    engine.step_until(lambda: time.perf_counter() > end)  # acks
    details = req.cached_details
    tiers = {"device": req.cached_tokens}
    if details is not None:
        tiers = {"device": details.device, "host": details.host, "storage": details.storage}
    return seconds, tiers


def check_tiers(what: str, tiers: Mapping[str, int], prefix: int) -> None:
    """Raise RequestFailed unless the whole prefix was where it should have been."""
    found = {tier: num for tier, num in tiers.items() if num}
    wanted = {} if what == "computed" else {what: prefix}
    if found != wanted:
        raise RequestFailed(f"a prefix of {prefix} tokens that was to be {what} was found as {found or 'nowhere'}")


def repeat(
    ask: Ask, flush_all: Callable[[], None], rng: random.Random, prefix: int, args: argparse.Namespace
) -> dict[str, float]:
    """One prefix computed, on the device and on the host; milliseconds by place."""
    vocab = num_plain_tokens(args.shape)
    ids = random_ids(rng, prefix, vocab)
    times: dict[str, float] = {}
    flush_all()
    for what in ("computed", "device", "host"):
        if what == "host":
            if args.without_hicache:
                return times | {"host": float("nan")}
            ask(random_ids(rng, args.pool - 1, vocab))  # with its new token it takes every page
            time.sleep(_QUIET_S)
        seconds, tiers = ask(ids + random_ids(rng, _SUFFIX_LEN, vocab))
        check_tiers(what, tiers, prefix)
        times[what] = seconds * 1e3
        time.sleep(_QUIET_S)
    return times


def measure(ask: Ask, flush_all: Callable[[], None], io: str, args: argparse.Namespace) -> list[Figures]:
    """All prefixes on one engine. The first repeat warms up."""
    rng = random.Random(args.seed)
    found = []
    for prefix in args.prefix:
        times = [repeat(ask, flush_all, rng, prefix, args) for _ in range(args.repeats + 1)][1:]
        computed, host, device = (statistics.median(t[what] for t in times) for what in ("computed", "host", "device"))
        hosts = [t["host"] for t in times]
        spread = (min(hosts), max(hosts))
        floor = args.floors[prefix]
        found.append(Figures(io, args.via, prefix, computed, host, device, floor, spread))
        print(found[-1], flush=True)
    return found


def flags_of(io: str, args: argparse.Namespace) -> list[str]:
    """The engine's flags: a pool little larger than the longest prompt, a host tier that holds it and the filler."""
    tokens = ("--max-total-tokens", str(args.pool), "--context-length", str(args.pool + args.page_size))
    flags = [*tokens, "--page-size", str(args.page_size), "--max-running-requests", "8", *words(args.server_args)]
    if args.without_hicache:
        return flags
    host = ("--enable-hierarchical-cache", "--hicache-ratio", "3", "--hicache-io-backend", io)
    return [*flags, *host, "--hicache-mem-layout", args.mem_layout]


def measure_floor(num_bytes: int) -> float:
    """Milliseconds of one copy of pinned memory to the device; on a CPU of a plain copy."""
    cuda = torch.cuda.is_available()
    source = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=cuda)
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda" if cuda else "cpu")
    times = []
    for _ in range(6):
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        if cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[1:])


def over_http(args: argparse.Namespace) -> list[Figures]:
    """A server for each io backend, started together, measured one after the other. Raises ServerDied."""
    model = make_model_dir(args.shape, args.models)
    servers = {io: BenchServer(model, flags_of(io, args), args.out / f"ttft.{io}.server.log") for io in args.io_backend}
    found = []
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        starting = [pool.submit(server.__enter__) for server in servers.values()]
        for server in servers.values():
            stack.callback(server.stop)
        for future in starting:
            future.result()
        for io, server in servers.items():
            print(f"{' '.join(server.command[1:])}: ready after {server.start_s:.1f} s", flush=True)
            url = server.url
            found += measure(lambda ids, url=url: ask_http(url, ids), lambda url=url: flush(url), io, args)  # type: ignore[misc]
            server.raise_if_dead()
            server.stop()
    return found


def in_process(args: argparse.Namespace) -> list[Figures]:
    """An engine in this process for each io backend, one after the other."""
    found = []
    for io in args.io_backend:
        with (
            torch.inference_mode(),
            InProcessEngine(make_model_dir(args.shape, args.models), flags_of(io, args)) as engine,
        ):
            print(f"{io}: ready after {engine.start_s:.1f} s", flush=True)
            found += measure(lambda ids, e=engine: ask_in_process(e, ids), engine.flush, io, args)  # type: ignore[misc]
    return found


def report(found: Sequence[Figures]) -> str:
    """The table."""
    columns = ["prefix", "io", "computed ms", "SGLang", "host ms", "least to most", "above the floor", "SGLang"]
    columns += ["device ms", "SGLang", "link's floor ms"]
    rows = []
    for f in found:
        computed, host, device = _SGLANG.get(f.prefix, ("", "", ""))
        cells = [f"{f.prefix:,}", f"{f.io_backend}, {f.via}", f"{f.computed_ms:.1f}", computed, f"{f.host_ms:.1f}"]
        cells += [f"{f.spread_ms[0]:.1f} to {f.spread_ms[1]:.1f}", f"{f.host_ms - f.floor_ms:+.1f}", host]
        rows.append([*cells, f"{f.device_ms:.1f}", device, f"{f.floor_ms:.1f}"])
    return table(columns, rows)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b", choices=list(SHAPES))
    parser.add_argument("--prefix", default="8192,16384", help="tokens, multiples of --page-size")
    parser.add_argument("--io-backend", default="direct,kernel")
    parser.add_argument("--mem-layout", default="layer_first")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--via", choices=("http", "in-process"), default="http")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--server-args", default="", help="more flags for the server, as one word")
    parser.add_argument("--without-hicache", action="store_true", help="the plain prefix cache: no host column")
    parser.add_argument("--out", type=Path, default=None, help="folder for logs and ttft.json")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "fenceline-bench-models")
    args = parser.parse_args(argv)
    args.io_backend = args.io_backend.split(",")
    if not args.prefix.replace(",", "").isdigit() or set(args.io_backend) - {"direct", "kernel"}:
        parser.error("--prefix takes numbers with commas between them, --io-backend direct, kernel or both")
    args.prefix = [int(number) for number in args.prefix.split(",")]
    if any(number < 1 or number % args.page_size for number in args.prefix) or args.repeats < 1:
        parser.error(f"--prefix: use multiples of --page-size {args.page_size}; --repeats at least 1")
    pages = max(args.prefix) // args.page_size + -(-_SUFFIX_LEN // args.page_size) + 8
    args.pool = pages * args.page_size
    args.out = args.out or Path(tempfile.mkdtemp(prefix="fenceline-ttft-"))
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table, writes ttft.json. Returns the exit code."""
    args = parse(argv)
    per_token = kv_bytes_per_token(args.shape)
    args.floors = {prefix: measure_floor(prefix * per_token) for prefix in args.prefix}
    try:
        found = over_http(args) if args.via == "http" else in_process(args)
    except (ServerDied, RequestFailed) as error:
        print(f"FAILED: {error}")
        return 1
    with (args.out / "ttft.json").open("a") as file:
        file.writelines(json.dumps(asdict(f)) + "\n" for f in found)
    print("", report(found), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
