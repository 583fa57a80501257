"""The effect of HiCache on decode: throughput while pages are copied, and the cost of its edges while none are.

    python benchmark/h200/hicache_decode.py transfers --shape 0.6b --batch 64 --io-backend direct,kernel
    python benchmark/h200/hicache_decode.py idle --shape 0.6b --batch 1,64

transfers: requests decode in steady state in the scheduler's real loop, without HTTP. Blocks of steps without transfers
alternate with blocks in which backups, loads or both keep their streams busy: pages that no request uses, copied by the
same controller and therefore with the same edges. The ratio is the throughput with transfers over that without, medians
of blocks.

idle: three engines in one process, one with HiCache and two without, run --steps steps in turns on the same batch;
nothing is copied. "off again" shows the noise of the ratio of "on". "CPU" is the loop's own time per step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from hicache_client import table, words
from in_process import InProcessEngine
from shapes import SHAPES, kv_bytes_per_token, make_model_dir

from fenceline.mem_cache.host.cache_controller import HiCacheController
from fenceline.mem_cache.transfer import Ticket, TransferKind
from fenceline.memory_order import LeasePool, Points

_WARM_STEPS = 30
_FINISH_STEPS = 20  # most steps after a block until its last transfers have ended
_IN_FLIGHT = 2  # transfers per direction: one runs, and the next one waits on the stream
_WHATS: dict[str, tuple[TransferKind, ...]] = {
    "backups": (TransferKind.STORE,),
    "loads": (TransferKind.LOAD,),
    "both": (TransferKind.STORE, TransferKind.LOAD),
}


@dataclass(frozen=True, slots=True)
class Block:
    """Medians over blocks; ``rate`` in bytes per second, of both directions together."""

    step_s: float
    cpu_s: float
    rate: float


class Traffic:
    """Keeps LOAD and STORE busy with pages that it has leased. The scheduler does not see its tickets."""

    def __init__(self, engine: InProcessEngine, num_pages: int) -> None:
        controller = engine.runner.hicache
        assert controller is not None, "the engine has HiCache"
        self._controller: HiCacheController = controller
        self._pools = (engine.runner.pages, controller.host_pages)
        self._pages: dict[TransferKind, tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]] = {}
        self._after: dict[TransferKind, Points] = {}
        for kind in TransferKind:
            device, device_after = _lease(self._pools[0], num_pages)
            host, host_after = _lease(self._pools[1], num_pages)
            self._pages[kind], self._after[kind] = (device, host), device_after.join(host_after)
        self._num_in_flight = dict.fromkeys(TransferKind, 0)
        self._num = 0
        self._others: list[Ticket] = []  # the scheduler's tickets, until it drains them
        self._drain = controller.drain_acks
        controller.drain_acks = self._drain_others  # type: ignore[method-assign]

    def feed(self, kinds: Sequence[TransferKind]) -> None:
        """Submit transfers, so that the streams of ``kinds`` stay busy."""
        self._collect()
        for kind in kinds:
            while self._num_in_flight[kind] < _IN_FLIGHT:
                self._submit(kind)

    def finish(self, step: Callable[[], None]) -> None:
        """Run steps until none of the transfers is in flight."""
        while any(self._num_in_flight.values()):
            step()
            self._collect()

    def num_bytes(self) -> int:
        """Bytes submitted so far, in both directions."""
        return sum(counts.num_bytes for counts in self._controller.counts.values())

    def close(self) -> None:
        """Return the pages. No transfer may be in flight."""
        self._controller.drain_acks = self._drain  # type: ignore[method-assign]
        for kind, pages in self._pages.items():
            for pool, ids in zip(self._pools, pages, strict=True):
                pool.retire(ids, after=self._after[kind])

    def _submit(self, kind: TransferKind) -> None:
        self._num += 1
        ticket = Ticket(-self._num, kind)
        move = self._controller.load if kind is TransferKind.LOAD else self._controller.store
        move(ticket, *self._pages[kind], self._after[kind])
        self._after[kind] = ticket.points
        self._num_in_flight[kind] += 1

    def _collect(self) -> None:
        for ticket in self._drain():
            if ticket.id < 0:
                self._num_in_flight[ticket.kind] -= 1
            else:
                self._others.append(ticket)

    def _drain_others(self) -> list[Ticket]:
        self._collect()
        others, self._others = self._others, []
        return others


def _lease(pool: LeasePool, num: int) -> tuple[npt.NDArray[np.int32], Points]:
    leased = pool.alloc(num)
    if leased is None:
        raise ValueError(f"{pool.num_free} of {num} {pool.name} are free: lower --pages or raise the pools")
    return leased


def start_batch(engine: InProcessEngine, batch: int, num_steps: int, prompt_len: int) -> None:
    """``batch`` requests in steady decode, long enough for ``num_steps`` steps."""
    engine.submit(batch, prompt_len, [num_steps + _WARM_STEPS + 64])
    engine.step_until(lambda: len(engine.scheduler.running) == batch)
    for _ in range(_WARM_STEPS):
        engine.step()
    hicache = engine.runner.hicache
    engine.step_until(lambda: hicache is None or not hicache.num_in_flight)  # the prompts' backups


def run_block(engine: InProcessEngine, num_steps: int, before_step: Callable[[], None] = lambda: None) -> Block:
    """``num_steps`` steps."""
    engine.device.synchronize()
    engine.step()
    begin, blocked = time.perf_counter(), engine.blocked_s
    for _ in range(num_steps):
        before_step()
        engine.step()
    elapsed = time.perf_counter() - begin
    return Block(elapsed / num_steps, (elapsed - engine.blocked_s + blocked) / num_steps, 0.0)


def median_block(blocks: Sequence[Block]) -> Block:
    """The median of each field."""
    columns = zip(*((b.step_s, b.cpu_s, b.rate) for b in blocks), strict=True)
    return Block(*(statistics.median(column) for column in columns))


def measure_transfers(io: str, args: argparse.Namespace) -> dict[str, list[Block]]:
    """Blocks by what is copied, with a block of "nothing" between any two."""
    flags = [*args.tokens, "--enable-hierarchical-cache", "--hicache-io-backend", io, *args.host]
    model = make_model_dir(args.shape, args.models)
    blocks: dict[str, list[Block]] = {what: [] for what in ("nothing", *_WHATS)}
    with InProcessEngine(model, [*flags, *words(args.server_args)]) as engine:
        print(f"{args.shape}, {io}: ready after {engine.start_s:.1f} s", flush=True)
        args.attention = attention_of(engine)
        num_blocks = args.repeats * 2 * len(_WHATS)
        start_batch(engine, args.batch[0], num_blocks * (args.steps + _FINISH_STEPS), args.prompt_len)
        traffic = Traffic(engine, args.pages)
        for _ in range(args.repeats):
            for what, kinds in _WHATS.items():
                blocks["nothing"].append(run_block(engine, args.steps))
                blocks[what].append(_busy_block(engine, traffic, kinds, args.steps))
        assert len(engine.scheduler.running) == args.batch[0], "no request has left"
        traffic.close()
        engine.abort_all()
        if engine.graphs is not None:
            stats = engine.graphs.stats
            print(f"replays {stats.replays} of {stats.eligible_steps}, {stats.fallbacks} {stats.repairs}")
    return blocks


def _busy_block(engine: InProcessEngine, traffic: Traffic, kinds: Sequence[TransferKind], num_steps: int) -> Block:
    traffic.feed(kinds)
    size, begin = traffic.num_bytes(), time.perf_counter()
    block = run_block(engine, num_steps, lambda: traffic.feed(kinds))
    rate = (traffic.num_bytes() - size) / (time.perf_counter() - begin)
    traffic.finish(engine.step)
    return Block(block.step_s, block.cpu_s, rate)


def attention_of(engine: InProcessEngine) -> str:
    """The attention backend that was chosen for decode."""
    return type(engine.runner.parts.attention.decode).__name__.removesuffix("Backend")


def transfers(args: argparse.Namespace) -> tuple[str, list[object]]:
    """The table and the figures of ``transfers``."""
    rows: list[list[object]] = []
    figures: list[object] = []
    for io in args.io_backend:
        blocks = measure_transfers(io, args)
        without = median_block(blocks["nothing"])
        for what in _WHATS:
            busy = median_block(blocks[what])
            cells = [f"{args.batch[0] / b.step_s:,.0f}" for b in (without, busy)]
            rows.append(
                [args.shape, args.batch[0], f"{io}, {args.attention}", what, *cells]
                + [f"{without.step_s / busy.step_s:.4f}", f"{busy.rate / 1e9:.1f}", f"{busy.cpu_s * 1e6:.0f}"]
            )
        steps = {what: [b.step_s for b in found] for what, found in blocks.items()}
        figures.append({"io": io, "attention": args.attention, "step_s": steps})
    columns = ["shape", "batch", "io, decode attention", "what travels", "tok/s without", "tok/s with", "ratio"]
    return table([*columns, "GB/s submitted", "CPU us/step"], rows), figures


def idle(args: argparse.Namespace) -> tuple[str, list[object]]:
    """The table and the figures of ``idle``."""
    model = make_model_dir(args.shape, args.models)
    host = ["--enable-hierarchical-cache", "--hicache-io-backend", args.io_backend[0], *args.host]
    plain = [*args.tokens, *words(args.server_args)]
    rows: list[list[object]] = []
    figures: list[object] = []
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(InProcessEngine(model, [*plain, *flags]))
            for name, flags in (("off", []), ("on", host), ("off again", []))
        }
        print(f"{args.shape}: three engines, the last ready after {engines['off again'].start_s:.1f} s", flush=True)
        for batch in args.batch:
            blocks = idle_blocks(engines, batch, args)
            medians = {name: median_block(found) for name, found in blocks.items()}
            for name in ("on", "off again"):
                ratios = [a.step_s / b.step_s for a, b in zip(blocks[name], blocks["off"], strict=True)]
                rows.append(
                    [args.shape, batch, name, f"{medians['off'].step_s * 1e3:.4f}", f"{medians[name].step_s * 1e3:.4f}"]
                    + [f"{statistics.median(ratios):.4f}", f"{min(ratios):.4f} to {max(ratios):.4f}"]
                    + [f"{medians['off'].cpu_s * 1e6:.0f}", f"{medians[name].cpu_s * 1e6:.0f}"]
                )
            figures.append({"batch": batch, "step_s": {n: [b.step_s for b in f] for n, f in blocks.items()}})
    columns = ["shape", "batch", "HiCache", "step ms off", "step ms", "ratio", "pairs", "CPU us off", "CPU us"]
    return table(columns, rows), figures


def idle_blocks(engines: dict[str, InProcessEngine], batch: int, args: argparse.Namespace) -> dict[str, list[Block]]:
    """Blocks in turns; the order within a turn changes, because clocks and temperature drift."""
    for engine in engines.values():
        start_batch(engine, batch, args.repeats * (args.steps + 1), args.prompt_len)
    blocks: dict[str, list[Block]] = {name: [] for name in engines}
    names = list(engines)
    for turn in range(args.repeats):
        for name in names[turn % 3 :] + names[: turn % 3]:
            blocks[name].append(run_block(engines[name], args.steps))
    for engine in engines.values():
        engine.abort_all()
    return blocks


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("transfers", "idle"))
    parser.add_argument("--shape", default="0.6b", choices=list(SHAPES))
    parser.add_argument("--batch", default="64", help="requests that decode; transfers takes one number")
    parser.add_argument("--io-backend", default="direct,kernel")
    parser.add_argument("--pages", type=int, default=32, help="of one transfer")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--pool", type=int, default=0, help="tokens; what the batch needs unless given")
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100, help="of one block")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--server-args", default="", help="more flags for the engine, as one word")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "fenceline-bench-models")
    parser.add_argument("--out", type=Path, default=None, help="JSON file, one line is added")
    args = parser.parse_args(argv)
    args.io_backend = args.io_backend.split(",")
    if not args.batch.replace(",", "").isdigit() or set(args.io_backend) - {"direct", "kernel"}:
        parser.error("--batch takes numbers with commas between them, --io-backend direct, kernel or both")
    args.batch = [int(number) for number in args.batch.split(",")]
    if min(args.pages, args.steps, args.repeats, *args.batch) < 1 or (args.what == "transfers" and len(args.batch) > 1):
        parser.error("--pages, --steps, --repeats and --batch must be at least 1; transfers takes one --batch")
    num_blocks = args.repeats * (1 if args.what == "idle" else 2 * len(_WHATS))
    longest = args.prompt_len + num_blocks * (args.steps + _FINISH_STEPS) + _WARM_STEPS + 64 + 2 * args.page_size
    pool = args.pool or (max(args.batch) * longest + 2 * args.pages * args.page_size) // args.page_size * args.page_size
    args.tokens = ["--page-size", str(args.page_size), "--max-total-tokens", str(pool)]
    args.tokens += ["--max-running-requests", str(max(args.batch)), "--cuda-graph-bs", *map(str, args.batch)]
    host_tokens = 8 * args.pages * args.page_size + 2 * max(args.batch) * args.prompt_len  # traffic, prompts
    args.host = ["--hicache-size", str(host_tokens * kv_bytes_per_token(args.shape) / 1e9)]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table, writes --out."""
    args = parse(argv)
    try:
        with torch.inference_mode():
            text, figures = transfers(args) if args.what == "transfers" else idle(args)
    except ValueError as error:
        print(f"FAILED: {error}")
        return 1
    if args.out is not None:
        with args.out.open("a") as file:
            file.write(json.dumps({"what": args.what, "shape": args.shape, "figures": figures}) + "\n")
    print("", text, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
