"""Compares all-reduces, with one process for each GPU: our own, NCCL's and that of torch's symmetric memory.

    python benchmark/h200/all_reduce.py [--gpus 2] [--json FILE] [--sweep] [--quick]
    python benchmark/h200/all_reduce.py --one-gpu [--json FILE] [--quick]

Each is captured in a CUDA graph of 64 calls, which all ranks replay. The figure is microseconds per call: the median
over replays of the slowest rank. Before that, all results of our own are compared with the sum in the order of ranks,
bit by bit. ``one shot 512``: with blocks of 512 threads, so on fewer SMs. Our own small ones are then measured again
with ``pdl``, where a launch starts while the preceding kernel ends. ``--sweep`` also tries other numbers of blocks and
threads. It takes about two minutes on two GPUs.

``--one-gpu``: 2 and 4 ranks are streams of one GPU, so no data crosses a link. The time is a lower bound of the time of
a call on several GPUs: launch, flags and passes over memory. The table also has torch's copy of as many bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from fenceline_kernel.all_reduce import ROW_WAYS, PeerAllReduce
from fenceline_kernel.one_process import OneProcessRanks

_CALLS = 64  # calls in a graph
_REPLAYS = 30
_MAX_BYTES = 64 << 20
SIZES = (
    4 << 10,
    8 << 10,
    16 << 10,
    32 << 10,
    64 << 10,
    128 << 10,
    256 << 10,
    512 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
    64 << 20,
)
QUICK = (8 << 10, 64 << 10, 1 << 20, 64 << 20)
ROW = 4096  # elements of a row in fused operations
Way = Callable[[], object]


def with_pdl(pdl: int) -> str:
    """A remark for a line of output."""
    return f", with pdl {pdl}" if pdl else ""


class Rank:
    """The work of one process."""

    def __init__(self, rank: int, size: int, meeting: str) -> None:
        torch.cuda.set_device(rank)
        self.rank, self.size = rank, size
        self.device = torch.device("cuda", rank)
        dist.init_process_group("nccl", init_method=meeting, rank=rank, world_size=size, device_id=self.device)
        self.stream = torch.cuda.Stream()
        self.own = PeerAllReduce(rank, size, self.device, self.exchange, 1 << 20, _MAX_BYTES)
        # Peers have opened this memory, which must not be freed before they close it.
        self.registered: list[torch.Tensor] = []

    def exchange(self, data: bytes) -> list[bytes]:
        parts: list[object] = [None] * self.size
        dist.all_gather_object(parts, data)
        return [bytes(part) for part in parts]  # type: ignore[call-overload]

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def capture(self, way: Way, calls: int = 1) -> torch.cuda.CUDAGraph:
        with torch.cuda.stream(self.stream):
            way()
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            for _ in range(calls):
                way()
        return graph

    def time_us(self, way: Way, register: bool = False, nbytes: int = 0) -> float:
        """Microseconds of a call in a graph, for the slowest rank."""
        calls = _CALLS if nbytes <= 4 << 20 else 8
        graph = self.capture(way, calls)
        if register:
            self.own.register()
        times = []
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                graph.replay()
            for _ in range(_REPLAYS):
                dist.barrier(device_ids=[self.rank])
                self.stream.synchronize()
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) * 1e3 / calls)
        slowest = torch.tensor(times, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return statistics.median(slowest.tolist())

    # --- correctness --------------------------------------------------------------------------------------

    def in_order(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.new_empty((self.size, *x.shape))
        dist.all_gather_into_tensor(parts, x)
        total = parts[0].float()
        for part in parts[1:]:
            total += part.float()
        return total.to(x.dtype)

    def check(self, pdl: int) -> None:
        generator = torch.Generator(self.device).manual_seed(self.rank)
        num_checked = 0
        self.own.pdl = pdl
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for numel in (8, 24, 1000, 4096, 5 * 4096, 33 * 4096 + 8, 200_000):
                for two_shots in (False, True):
                    x = torch.randn(numel, generator=generator, device=self.device).to(dtype)
                    wanted = self.in_order(x)
                    self.own.all_reduce(x, two_shots)
                    assert torch.equal(x, wanted), f"{dtype} {numel} {two_shots}: {(x != wanted).sum()} differ"
                    num_checked += 1
        for rows, fused in itertools.product((1, 3, 64, 300), ROW_WAYS):
            x = torch.randn(rows, ROW, generator=generator, device=self.device).bfloat16()
            residual = torch.randn(rows, ROW, device=self.device).bfloat16()
            dist.broadcast(residual, 0)
            weight = torch.rand(ROW, device=self.device).bfloat16()
            dist.broadcast(weight, 0)
            wanted = self.in_order(x) + residual
            hidden, normed = torch.empty_like(x), torch.empty_like(x)
            if not self.own.takes_rows(x, fused):
                continue
            self.own.all_reduce_add_norm(x, residual, weight, 1e-6, hidden, normed, fused)
            assert torch.equal(hidden, wanted), "fused: residual"
            squares = wanted.float().square().mean(-1, keepdim=True)
            exact = wanted.float() * (squares + 1e-6).rsqrt() * weight.float()
            assert torch.allclose(normed.float(), exact, rtol=1e-2, atol=1e-3), "fused: norm"
            num_checked += 1
        # In graphs, replayed with other values while one rank is late.
        x = torch.zeros(300_000, device=self.device).bfloat16()
        small = torch.zeros(4096, device=self.device).bfloat16()
        self.registered.append(x)
        source, small_source = torch.zeros_like(x), torch.zeros_like(small)

        def step() -> None:
            x.copy_(source)
            small.copy_(small_source)
            self.own.all_reduce(small)
            self.own.all_reduce(x, True, registered=torch.cuda.is_current_stream_capturing())
            self.own.all_reduce(small)

        graph = self.capture(step)
        self.own.register()
        for turn in range(100):
            source.normal_(generator=generator)
            small_source.normal_(generator=generator)
            wanted, twice = self.in_order(source), self.in_order(self.in_order(small_source))
            torch.cuda.synchronize()
            with torch.cuda.stream(self.stream):
                if turn % self.size == self.rank:
                    torch.cuda._sleep(200_000)
                graph.replay()
            self.stream.synchronize()
            assert torch.equal(x, wanted) and torch.equal(small, twice), f"replay {turn}"
            num_checked += 2
        self.say(f"{num_checked} sums of {self.size} ranks equal the sum in the order of ranks{with_pdl(pdl)}")

    # --- time ---------------------------------------------------------------------------------------------

    def ways(self, nbytes: int, others_too: bool = True) -> dict[str, tuple[Way, bool]]:
        """The all-reduces that are compared: name → (a function that makes one call, whether its addresses must be
        exchanged)."""
        x = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=self.device)
        found: dict[str, tuple[Way, bool]] = {}
        if nbytes <= self.own.one_shot_bytes:
            found["one shot"] = (lambda: self.own.all_reduce(x, False), False)
            found["one shot 512"] = (lambda: self.own.all_reduce(x, False, num_threads=512), False)
        if nbytes >= 32 << 10:
            found["two shots"] = (lambda: self.own.all_reduce(x, True), False)
            capturing = torch.cuda.is_current_stream_capturing
            found["registered"] = (lambda: self.own.all_reduce(x, True, registered=capturing()), True)
            self.registered.append(x)
        if nbytes % (2 * ROW) == 0:
            rows = x.view(-1, ROW)
            others = [torch.zeros_like(rows) for _ in range(3)]
            weight = torch.ones(ROW, dtype=torch.bfloat16, device=self.device)
            for way in ROW_WAYS:
                if self.own.takes_rows(rows, way):
                    add_norm = partial(self.own.all_reduce_add_norm, rows, others[0], weight, 1e-6)
                    found[f"fused {way}"] = (partial(add_norm, others[1], others[2], way), False)
        if others_too:
            found["NCCL"] = (lambda: dist.all_reduce(x), False)
            found |= self.symmetric(nbytes)
        return found

    def symmetric(self, nbytes: int) -> dict[str, tuple[Way, bool]]:
        try:
            import torch.distributed._symmetric_memory as symm_mem

            x = symm_mem.empty(nbytes // 2, dtype=torch.bfloat16, device=self.device)
            x.zero_()
            group = dist.group.WORLD.group_name
            symm_mem.rendezvous(x, group)
        except Exception as error:
            self.say(f"symmetric memory cannot be used: {error}")
            return {}
        one = torch.ops.symm_mem.one_shot_all_reduce
        two = torch.ops.symm_mem.two_shot_all_reduce_
        found: dict[str, tuple[Way, bool]] = {"torch two shots": (lambda: two(x, "sum", group), False)}
        if nbytes <= 1 << 20:
            found["torch one shot"] = (lambda: one(x, "sum", group), False)
        return found

    def measured(self, nbytes: int, pdl: int = 0) -> dict[str, object]:
        """Microseconds of each way. ``pdl``: only of our own in one launch."""
        self.own.pdl = pdl
        line: dict[str, object] = {
            name: round(self.time_us(way, register, nbytes), 2)
            for name, (way, register) in self.ways(nbytes, not pdl).items()
            if not pdl or name in ("one shot", "registered") or name.startswith("fused")
        }
        figures = ", ".join(f"{name} {us}" for name, us in line.items())
        self.say(f"{nbytes:>9} bytes: {figures} us{with_pdl(pdl)}")
        return {"bytes": nbytes, **line}

    def sweep(self) -> list[dict[str, object]]:
        rows: list[dict[str, object]] = []
        for nbytes in (8 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20):
            x = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=self.device)
            for two_shots in (False, True):
                if (nbytes > self.own.one_shot_bytes and not two_shots) or (two_shots and nbytes < 64 << 10):
                    continue
                for blocks in (1, 2, 4, 8, 16, 32, 64, 128):
                    for threads in (32, 64, 128, 256, 512):
                        share = nbytes // 16 // (self.size if two_shots else 1)
                        if not threads <= share <= blocks * threads * 16 or blocks * threads > 2 * share:
                            continue
                        cut = {"num_blocks": blocks, "num_threads": threads}
                        us = self.time_us(lambda: self.own.all_reduce(x, two_shots, **cut), nbytes=nbytes)  # noqa: B023
                        rows.append({"bytes": nbytes, "two_shots": two_shots, **cut, "us": round(us, 2)})
                        self.say(
                            f"  {nbytes:>9} {'two' if two_shots else 'one'} {blocks:>4} x {threads:<4} {us:8.2f} us"
                        )
        return rows


def run(rank: int, args: argparse.Namespace, meeting: str) -> None:
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    me = Rank(rank, args.gpus, meeting)
    sizes = QUICK if args.quick else SIZES
    me.check(0)
    results = [me.measured(nbytes) for nbytes in sizes]
    me.check(2)
    for nbytes, result in zip(sizes, results, strict=True):
        if nbytes <= me.own.one_shot_bytes:
            result["pdl"] = me.measured(nbytes, 2)
    me.own.pdl = 0
    swept = me.sweep() if args.sweep else []
    me.own.close()
    if rank == 0 and args.json is not None:
        gpu = torch.cuda.get_device_name(0)
        text = json.dumps(
            {"gpus": args.gpus, "gpu": gpu, "torch": torch.__version__, "us": results, "sweep": swept}, indent=1
        )
        args.json.write_text(text + "\n")
    dist.barrier(device_ids=[rank])
    sys.stdout.flush()
    os._exit(0)  # NCCL's threads may hang in a destructor


def one_gpu(args: argparse.Namespace) -> list[dict[str, object]]:
    """Microseconds of a call in a graph, with ranks that are streams of one GPU."""
    device = torch.device("cuda", 0)
    results: list[dict[str, object]] = []
    for size in (2, 4):
        ranks = OneProcessRanks(size, device, 1 << 20, _MAX_BYTES, limit_s=5.0)
        for nbytes in QUICK if args.quick else SIZES:
            xs = [torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device) for _ in range(size)]
            line = {name: round(_time_one_gpu(ranks, way, nbytes), 2) for name, way in _one_gpu_ways(ranks, xs)}
            results.append({"ranks": size, "bytes": nbytes, **line})
            text = ", ".join(f"{name} {us}" for name, us in line.items())
            print(f"{size} ranks {nbytes:>9} bytes: {text} us", flush=True)
        ranks.close()
    return results


def _one_gpu_ways(ranks: OneProcessRanks, xs: list[torch.Tensor]) -> Iterator[tuple[str, Callable[[int], object]]]:
    nbytes, own = xs[0].nbytes, ranks.ranks
    if nbytes <= own[0].one_shot_bytes:
        yield "one shot", lambda rank: own[rank].all_reduce(xs[rank], False)
        outs = [x.new_empty((ranks.size, *x.shape)) for x in xs]
        yield "gather", lambda rank: own[rank].all_gather(xs[rank], outs[rank])
    rows = [x.view(-1, ROW) if nbytes % (2 * ROW) == 0 else x.view(1, -1) for x in xs]
    for way in ROW_WAYS:
        if own[0].takes_rows(rows[0], way):
            weight = rows[0].new_ones(rows[0].shape[1])
            calls = [
                partial(each.all_reduce_add_norm, row, hidden := row.clone(), weight, 1e-6, hidden, row.clone(), way)
                for each, row in zip(own, rows, strict=True)
            ]
            yield f"fused {way}", partial(_call, calls)
    if nbytes >= 32 << 10:
        yield "two shots", lambda rank: own[rank].all_reduce(xs[rank], True)
        yield "registered", lambda rank: own[rank].all_reduce(xs[rank], True, registered=True)
    copies = [x.clone() for x in xs]
    yield "torch copy", lambda rank: copies[rank].copy_(xs[rank])


def _call(calls: Sequence[Way], rank: int) -> object:
    return calls[rank]()


def _time_one_gpu(ranks: OneProcessRanks, way: Callable[[int], object], nbytes: int) -> float:
    calls = _CALLS if nbytes <= 4 << 20 else 8

    def body(rank: int) -> None:
        for _ in range(calls):
            way(rank)

    graphs = ranks.capture(body)
    times = []
    begin = torch.cuda.Event(enable_timing=True)
    ends = [torch.cuda.Event(enable_timing=True) for _ in ranks.streams]
    for _ in range(_REPLAYS // 2):
        torch.cuda.synchronize()
        begin.record(ranks.streams[0])
        ranks.replay(graphs)
        for end, stream in zip(ends, ranks.streams, strict=True):
            end.record(stream)
        torch.cuda.synchronize()
        assert not ranks.lost, "a launch has given up its wait"
        times.append(max(begin.elapsed_time(end) for end in ends) * 1e3 / calls)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sweep", action="store_true", help="also numbers of blocks and threads")
    parser.add_argument("--quick", action="store_true", help="four sizes")
    parser.add_argument("--one-gpu", action="store_true", help="ranks are streams of one GPU: a lower bound")
    args = parser.parse_args()
    if args.one_gpu:
        os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}  # CUDA has not begun
        results = one_gpu(args)
        if args.json is not None:
            gpu = torch.cuda.get_device_name(0)
            text = json.dumps({"gpu": gpu, "torch": torch.__version__, "one_gpu_us": results}, indent=1)
            args.json.write_text(text + "\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (args, f"file://{folder}/meeting"), args.gpus)


if __name__ == "__main__":
    main()
