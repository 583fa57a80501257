"""What could be gained by prefill and decode side by side, on partitions of a GPU's multiprocessors (SMs)?

    python benchmark/h200/side_by_side.py --shape 8b --batch 64,256 --sms 32,48,64,88

Decode steps are replayed over and over on some SMs while chunks of prompts are computed on the others, by two model
runners in one process, each with graphs that were captured on its own stream. A row has the milliseconds of a step and
of a chunk alone on their SMs and beside each other, the tokens per second of both kinds, and the *gain*: the time on
all SMs, in turns, of what is computed in a second. It bounds what a server can gain: its work is seldom so divided.
SMs of "all": two streams on the whole GPU. "mixed" is a step of both, chunk and rows that decode, on all SMs.

cuBLAS, and kernels that divide work among SMs, are told their number, except FlashInfer's, whose grid is the GPU's.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import torch
from shapes import SHAPES, make_model_dir
from sm_partitions import num_sms, split

from fenceline.config.draft_config import StepShape
from fenceline.config.engine_config import resolve
from fenceline.config.server_args import parse_args
from fenceline.memory_order import open_device
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import ForwardResult, StepBatch
from fenceline.model_executor.warm_up import _extend_batch, _launched, _MeasuredRequests

_MOST_STEPS = 160  # decode steps of one measurement, by which requests grow
_ALONE = 8  # steps and chunks that are timed alone, as many after others that are not
_COLUMNS = "rows", "SMs", "step ms", "chunk ms", "step beside", "chunk beside", "tok/s out", "tok/s in", "gain"

Events = list[torch.cuda.Event]  # the ends of steps


class Side:
    """A model runner whose FORWARD is moved from stream to stream."""

    def __init__(self, model_dir: Path, sizes: Sequence[int], num_tokens: int) -> None:
        argv = f"--model-path {model_dir} --load-format dummy --enable-mixed-chunk --disable-piecewise-cuda-graph"
        argv += f" --max-total-tokens {num_tokens} --max-running-requests {max(sizes)} --cuda-graph-bs"
        self.config = resolve(parse_args([*argv.split(), *map(str, sizes)]))
        self.device = open_device(self.config.device)
        self.runner = ModelRunner(self.config, self.device, show_progress=False)
        for rows in self.runner.kv_pool.rows:
            for keys_or_values in rows.values():
                keys_or_values.normal_()

    def move(self, stream: torch.cuda.Stream, sms: int) -> None:
        """All steps run on ``stream`` from now on, which has so many ``sms``."""
        torch.cuda.synchronize()
        self.device.forward.raw = stream  # type: ignore[attr-defined]
        use_sms(sms)
        for backend in {self.runner.parts.attention.decode, self.runner.parts.attention.prefill}:
            for name in {"num_sms", "_num_sms"} & vars(backend).keys():
                setattr(backend, name, sms)
            vars(backend).get("_workspaces", {}).clear()
        self.runner._capture(self.config, False)

    def submit(self, num: int, begin: torch.cuda.Event, submit: Callable[[], object]) -> Events:
        """Call ``submit`` for each of ``num`` steps after ``begin``."""
        stream, ends = self.device.forward.raw, []  # type: ignore[attr-defined]
        stream.wait_event(begin)
        for _ in range(num):
            submit()
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record(stream)
        return ends

    def replays(self, size: int, num: int, begin: torch.cuda.Event) -> Events:
        """Decode steps of the ``size`` requests of the latest batch."""
        with self.device.forward.active():
            return self.submit(num, begin, self.runner.decode._captured[size].graph.replay)

    def launches(self, batch: StepBatch, num: int, begin: torch.cuda.Event) -> Events:
        """Steps of ``batch``; as when serving, one's results are awaited while the next one runs."""
        results: list[ForwardResult] = []

        def launch() -> None:
            results.append(_launched(self.runner.launch, batch))
            if len(results) > 1:
                results.pop(0).wait()

        ends = self.submit(num, begin, launch)
        results.pop().wait()
        return ends


def use_sms(sms: int) -> None:
    """Products that are launched or captured from now on are divided for so many ``sms``."""
    torch._C._set_sm_carveout_experimental(num_sms() - sms or None)
    cublas = ctypes.CDLL(f"libcublas.so.{(torch.version.cuda or '').split('.')[0]}")
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    assert cublas.cublasSetSmCountTarget(handle, sms % num_sms()) == 0  # 0: all


def begun() -> torch.cuda.Event:
    """An event a moment from now, so that much is submitted before it."""
    torch.cuda.synchronize()
    begin = torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(40_000_000)  # about 20 ms
    begin.record()
    return begin


def milliseconds(begin: torch.cuda.Event, ends: Events, until: float = float("inf")) -> float:
    """Of a step: the mean over those that ended ``until`` then, without the first one, which may have begun late."""
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) for end in ends]
    last = max(sum(time <= until for time in times), 2) - 1
    return (times[last] - times[0]) / last


def alone(submit: Callable[[int, torch.cuda.Event], Events]) -> float:
    """Milliseconds of one of the steps that ``submit`` submits."""
    milliseconds(begin := begun(), submit(_ALONE, begin))
    return milliseconds(begin := begun(), submit(_ALONE, begin))


class Bench:
    """Decode steps on one side, chunks on the other."""

    def __init__(self, decode: Side, prefill: Side, args: argparse.Namespace) -> None:
        self.decode, self.prefill, self.args = decode, prefill, args
        runner, config, self._composition = decode.runner, decode.config, count(1)
        page_size, longest = config.server_args.page_size, config.model.context_length
        length = args.prompt_len + 2 * _MOST_STEPS
        self._reqs = _MeasuredRequests(runner.req_pool.rows, runner.pages, page_size, length, max(args.batch), longest)
        for prompts in self._reqs.prompts(config):
            _launched(runner.launch, prompts).wait()
        self.chunk = _extend_batch((args.chunk,), 0, config.model.vocab_size)

    def decodes(self, size: int) -> StepBatch:
        """A decode step of ``size`` requests of --prompt-len tokens."""
        lens = np.full(size, self.args.prompt_len, np.int64)
        batch = self._reqs.decode_batch(next(self._composition), size, StepShape())
        return replace(batch, starts=lens - 1, seq_lens=lens)

    def fill(self, size: int) -> torch.cuda.Event:
        """Decode steps are those of ``size`` new requests. Returns an event a moment from now."""
        _launched(self.decode.runner.launch, self.decodes(size)).wait()
        return begun()

    def measure(self, size: int) -> tuple[float, float, float, float]:
        """Milliseconds of a step and of a chunk alone, and beside each other. A thread submits the replays, so that
        chunks do not wait for that."""
        replays, chunks = partial(self.decode.replays, size), partial(self.prefill.launches, self.chunk)
        self.fill(size)
        step, chunk = alone(replays), alone(chunks)
        num_steps, num_chunks = (min(int(self.args.seconds * 1e3 / one) + 3, _MOST_STEPS) for one in (step, chunk))
        begin = self.fill(size)
        with ThreadPoolExecutor(1) as thread:
            steps = thread.submit(replays, num_steps, begin)
            both = chunks(num_chunks, begin), steps.result()
        torch.cuda.synchronize()
        until = min(begin.elapsed_time(ends[-1]) for ends in both)
        return step, chunk, *(milliseconds(begin, ends, until) for ends in both[::-1])

    def run(self) -> None:
        """Print the table."""
        print(f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|", sep="\n")
        in_turns: dict[int, tuple[float, float]] = {}
        for sms in (None, *self.args.sms):
            sides = [(torch.cuda.Stream(), num_sms()) for _ in range(2)]
            if sms is not None:
                sides = [(part.stream, part.num_sms) for part in split(sms)]
            self.prefill.move(*sides[1])
            self.decode.move(*sides[0])
            for size in self.args.batch:
                use_sms(sides[1][1])
                times = self.measure(size)
                base = in_turns.setdefault(size, times[:2])
                self.print(size, "all" if sms is None else str(sides[0][1]), times, base)
                if sms is None:
                    mixed = alone(partial(self.decode.launches, self.chunk.beside(self.decodes(size))))
                    self.print(size, "mixed", (*base, mixed, mixed), base)

    def print(self, size: int, sms: str, times: Sequence[float], in_turns: Sequence[float]) -> None:
        """One row; ``in_turns``: milliseconds of a step and of a chunk on all SMs."""
        step, chunk = times[2:]
        cells = *(f"{one:.2f}" for one in times), f"{size / step * 1e3:,.0f}", f"{self.args.chunk / chunk * 1e3:,.0f}"
        print(f"| {size} | {sms} | {' | '.join(cells)} | {in_turns[0] / step + in_turns[1] / chunk:.3f} |", flush=True)


@torch.inference_mode()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", choices=list(SHAPES))
    parser.add_argument("--batch", default="64,256", type=_numbers, help="requests that decode")
    parser.add_argument("--sms", default="32,48,64,88", type=_numbers, help="SMs on which they do")
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a prompt in one step")
    parser.add_argument("--seconds", type=float, default=1.0, help="of both beside each other")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "fenceline-bench-models")
    args = parser.parse_args()
    model_dir = make_model_dir(args.shape, args.models)
    num_tokens = max(args.batch) * (args.prompt_len + 2 * _MOST_STEPS + 64)
    Bench(Side(model_dir, args.batch, num_tokens), Side(model_dir, args.batch[:1], 8 * args.chunk), args).run()


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


if __name__ == "__main__":
    main()
