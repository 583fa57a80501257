"""What a policy of the scheduler does to the loads of h200/run.py, without a GPU: its real loop, and a clock.

    python benchmark/simulate_loads.py --load stalls-64 stalls-128 256               # some seconds
    python benchmark/simulate_loads.py --load 256 --server-args="--enable-mixed-chunk"
    python benchmark/simulate_loads.py --load 256 --drafts 3 --in-row 1 16           # full prefill steps in a row

Steps take what they take on an H200 for Qwen3-8B: weights are read or multiplied, whichever is longer, contexts are
read, and with --drafts as many tokens more are verified and the draft runs before. Clients wait for 8 ms before their
next request. Beside what was measured without drafts (docs/use/performance.md), throughput was within a tenth, and
times within a third: policies can be compared, not servers.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "h200"))

from run import LOADS, STALL_LOADS, Load

import fenceline
from bench_scheduler import NullWorker
from fenceline.config.engine_config import resolve
from fenceline.config.server_args import parse_args
from fenceline.ipc.io_struct import BatchTokenOut, Message, TokenizedGenerateReq, id_array
from fenceline.model_executor.step import MixedCosts, StepBatch, StepOutput
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.scheduler.scheduler import Scheduler

_CHUNK = 8192
_CONTEXT_S = 147_456 / 4.29e12  # of a token's keys and values
_LAUNCH_S, _CLIENT_S = 0.0004, 0.008
_SIZES = (32, 64, 128, 256, 512, 1024, 2048)
_DRAWN = 0.15, 0.15, 0.25, 0.45  # the shares of steps that yield 1, 2, 3 and all tokens: three in the mean


def products_s(rows: int, least: float = 0.0039, each: float = 20.5e-6, base: float = 0.0009) -> float:
    """Seconds of a step's products: of reading weights, or of multiplying ``rows``, and of all that is small."""
    return float((least**3 + (rows * each) ** 3) ** (1 / 3) + base)


prompts_s = partial(products_s, least=0.0045, each=23.3e-6, base=0.0012)


class TimedWorker(NullWorker):
    """A worker on a GPU that has work until ``busy`` seconds; it is ``now``."""

    def __init__(self, num_tokens: int, num_rows: int, drafts: int) -> None:
        super().__init__(num_tokens, num_rows)
        self.max_step_tokens, self.now, self.busy, self._rng = 1 + drafts, 0.0, 0.0, np.random.default_rng(0)
        self.step_costs = MixedCosts(_SIZES, tuple(map(prompts_s, _SIZES)), 1e-10, _CONTEXT_S)

    def launch(self, batch: StepBatch) -> TimedResult:
        self.now += _LAUNCH_S
        num, prompts, width = batch.num_decodes, batch.num_prompt_tokens, self.max_step_tokens
        context = int(batch.seq_lens[len(batch.chunks) :].sum()) * _CONTEXT_S
        seconds = (prompts_s(prompts + num) if prompts else products_s(num * width)) + context
        counts = np.ones(len(batch.sampling), np.int64)
        if width > 1 and not prompts:
            seconds += 0.0022 + 1e-6 * num * width
            counts = self._rng.choice(np.arange(width - 3, width + 1), size=num, p=_DRAWN)
        self.busy = max(self.busy, self.now) + seconds
        return TimedResult(self, StepOutput(np.full(int(counts.sum()), 42), None, None, counts), self.busy)


class TimedResult:
    """A step's output, which is there at ``end``."""

    def __init__(self, worker: TimedWorker, out: StepOutput, end: float) -> None:
        self.done, self._worker, self._out, self._end = worker.device.forward.record(), worker, out, end

    def arrived(self) -> bool:
        return self._end <= self._worker.now

    def wait(self) -> StepOutput:
        self._worker.now = max(self._worker.now, self._end)
        return self._out


class Simulation:
    """A server, and clients that send a request when one of theirs has ended."""

    def __init__(self, load: Load, args: argparse.Namespace, in_row: int | None) -> None:
        argv = ["--model-path", fenceline.demo_model_path(), "--device", "cpu", "--page-size", "1"]
        argv += [
            "--chunked-prefill-size",
            str(_CHUNK),
            "--max-running-requests",
            "1024",
            "--decode-log-interval",
            "9999",
        ]
        config = resolve(parse_args([*argv, *shlex.split(args.server_args)]))
        model = dataclasses.replace(config.model, context_length=40_960)
        config = dataclasses.replace(config, device="cuda", prefill_max_requests=None, model=model)
        self.worker = TimedWorker(args.max_total_tokens, config.max_running_requests, args.drafts)
        self.scheduler = Scheduler(config, self.worker, self, self)
        if in_row is not None:
            self.scheduler.planner.max_in_row = in_row * self.scheduler.planner.prefill.step_tokens
        self._rng, self._load, self._num_sent = np.random.default_rng(1), load, 0
        self._coming: list[tuple[float, Message]] = []
        self.told: dict[str, list[tuple[float, int]]] = {}  # by request: when it was sent, and when tokens came
        for _ in range(load.concurrency):
            self.send(0.0)
        flight = None
        while self.scheduler.reqs or self._coming or flight is not None:
            flight = self.scheduler.step(flight)

    def send(self, at: float) -> None:
        """Another request at this time, if the load has one more."""
        load = self._load
        if self._num_sent == load.num_prompts:
            return
        num_in, num_out = (
            int(self._rng.integers(max(int(most * load.range_ratio), 1), most + 1))
            for most in (load.input_len, load.output_len)
        )
        params = SamplingParams(max_new_tokens=num_out, ignore_eos=True, temperature=0.0)
        ids, rid = id_array(self._rng.integers(5, 200, size=num_in).tolist()), f"req-{self._num_sent}"
        self._num_sent += 1
        self.told[rid] = [(at, 0)]
        self._coming.append((at, TokenizedGenerateReq(rid=rid, input_ids=ids, sampling_params=params, stream=True)))

    def drain(self, block: bool, timeout_ms: int | None = None) -> Sequence[Message]:
        worker = self.worker
        if block and self._coming:
            worker.now = max(worker.now, min(at for at, _ in self._coming))
        come = [message for at, message in self._coming if at <= worker.now]
        self._coming = [(at, message) for at, message in self._coming if at > worker.now]
        return come

    def to_detokenizer(self, message: BatchTokenOut) -> None:
        for out in message.outs:
            self.told[out.rid].append((self.worker.now, len(out.output_ids)))
            if out.finish_reason is not None:
                self.send(self.worker.now + _CLIENT_S)

    def to_tokenizer(self, message: Message) -> None:
        """Statistics are not looked at."""

    def row(self) -> str:
        """Cells: tokens per second, mean times to the first token and per token, p99 and the median longest gap."""
        firsts, tpots, longest, gaps, num_tokens = [], [], [], [], 0
        for told in self.told.values():
            times, counts = zip(*told, strict=True)
            num_tokens += sum(counts)
            firsts.append(times[1] - times[0])
            if len(times) > 2:
                between = np.diff(times[1:])
                gaps.extend(between)
                longest.append(float(between.max()))
                tpots.append((times[-1] - times[1]) / (sum(counts) - counts[1]))
        ms = statistics.mean(firsts), statistics.mean(tpots), np.percentile(gaps, 99), statistics.median(longest)
        return " | ".join([f"{num_tokens / self.worker.now:,.0f}", *(f"{1e3 * float(one):,.1f}" for one in ms)])


def main() -> None:
    """Simulate and print."""
    loads = STALL_LOADS | LOADS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", nargs="+", choices=list(loads), default=[*STALL_LOADS, "256"])
    parser.add_argument("--drafts", type=int, default=0, choices=[0, 3], help="tokens that a step verifies more")
    parser.add_argument("--in-row", type=int, nargs="+", default=[None], help="full prefill steps in a row")
    parser.add_argument("--max-total-tokens", type=int, default=700_000)
    parser.add_argument("--server-args", default="", help="more flags for the server, as one word")
    args = parser.parse_args()
    columns = "load", "in a row", "tokens/s", "TTFT ms", "TPOT ms", "ITL p99 ms", "longest gap ms"
    print(f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", sep="\n")
    for key in args.load:
        for in_row in args.in_row:
            print(f"| {loads[key]} | {in_row or ''} | {Simulation(loads[key], args, in_row).row()} |", flush=True)


if __name__ == "__main__":
    main()
