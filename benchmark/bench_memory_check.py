"""The cost of --memory-check and of the flight recorder per decode step, in the loop with the real model runner.

    python benchmark/bench_memory_check.py [--running 1,16,64,256] [--prompt-len 64] [--steps 600]

Only the model is replaced by one that computes nothing. The loop runs with ``order``, with ``full``, or only with the
recorder, and each call into them is timed where the loop makes it, with the CPU's caches as they are there. The cost is
the sum of the medians of a step's calls. It is compared with a step without a check: scheduler, rings, page tables,
sampler. The comparisons of ``full`` are torch's operators on a CPU; on a GPU they are kernels inside the graphs, and
benchmark/h200/decode.py --memory-check off,order,full has their time.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from unittest import mock

import torch

import fenceline
from bench_scheduler import NullBox
from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.ipc.io_struct import TokenizedGenerateReq, id_array
from fenceline.layers.context import Shard
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.mem_cache.page_tags import PageTags
from fenceline.memory_order import Device, OrderChecker, open_device
from fenceline.model_executor import parts
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.scheduler.flight_recorder import FlightRecorder
from fenceline.scheduler.population import InFlight
from fenceline.scheduler.scheduler import Scheduler


class NullModel:
    """A model that returns prepared logits, with which the first token of the vocabulary is sampled."""

    nbytes = 0
    num_layers = 1
    attention_rules: Mapping[int, object] = {}
    vision = None
    state_specs: tuple[object, ...] = ()

    def __init__(self, vocab_size: int, num_rows: int) -> None:
        self.context = SimpleNamespace(shard=Shard(), dtype=torch.float32)
        self._logits = torch.zeros(num_rows, vocab_size)
        self._logits[:, 1] = 1.0

    def hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        return batch.input_ids

    def own_logits(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        num_rows = batch.num_tokens if batch.logits_index is None else len(batch.logits_index)
        return self._logits[:num_rows]


def make_scheduler(num_running: int, prompt_len: int, num_steps: int, page_size: int, check: str) -> Scheduler:
    """A scheduler with ``num_running`` requests in its inbox, over a ModelRunner without a model."""
    context = prompt_len + num_steps + 64
    num_tokens = num_running * (context + 2 * page_size + 16)
    args = ServerArgs(
        model_path=fenceline.demo_model_path(), device="cpu", page_size=page_size, decode_log_interval=10**9,
        max_total_tokens=num_tokens, memory_check=check,
    )  # fmt: skip
    config = resolve(args)
    tiny = dataclasses.replace(
        config.model, context_length=context, vocab_size=16, num_layers=1, num_kv_heads=1, head_dim=8
    )
    config = dataclasses.replace(config, max_running_requests=num_running, model=tiny)
    with mock.patch.object(parts, "load_model", lambda *_, **__: NullModel(16, num_running)):
        runner = ModelRunner(config, open_device("cpu"), show_progress=False)
    params = SamplingParams(max_new_tokens=context - prompt_len, ignore_eos=True, temperature=0.0)
    box = NullBox(
        [
            TokenizedGenerateReq(
                rid=f"req-{i}",
                input_ids=id_array([2 + i % 9, *[3] * (prompt_len - 1)]),
                sampling_params=params,
                stream=True,
            )
            for i in range(num_running)
        ]
    )
    return Scheduler(config, runner, box, box)


class Stopwatch:
    """Times every call of some methods."""

    def __init__(self, methods: Sequence[tuple[type, str]]) -> None:
        self._methods = methods
        self._times: dict[str, list[float]] = {}

    def start(self) -> None:
        """Begin to time calls."""
        for owner, name in self._methods:
            setattr(owner, name, self._timed(getattr(owner, name), f"{owner.__name__}.{name}"))

    def stop(self) -> dict[str, list[float]]:
        """Stop timing. Returns the seconds of each call by method."""
        for owner, name in self._methods:
            setattr(owner, name, getattr(owner, name).__wrapped__)
        return self._times

    def _timed(self, method: Callable[..., object], name: str) -> Callable[..., object]:
        clock, times = time.perf_counter, self._times.setdefault(name, [])

        @functools.wraps(method)
        def timed(*args: object) -> object:
            begin = clock()
            result = method(*args)
            times.append(clock() - begin)
            return result

        return timed


RECORDER = [(FlightRecorder, name) for name in ("launched", "published")]
TAGS = [(PageTags, name) for name in ("arrays", "begin_step", "visit", "read")]
ENTRANCES = [(Device, "declare"), *((OrderChecker, name) for name in ("begin_step", "record", "wait", "host_waited"))]
CALLS = {"off": RECORDER, "order": ENTRANCES, "full": TAGS}


def run(num_running: int, prompt_len: int, num_steps: int, page_size: int, check: str) -> tuple[float, float]:
    """The median of a decode step in microseconds, and the microseconds of its calls into what ``check`` names, with
    ``off`` into the recorder."""
    scheduler = make_scheduler(num_running, prompt_len, num_steps, page_size, check)
    flight: InFlight | None = None
    while len(scheduler.running) < num_running:
        flight = scheduler.step(flight)
    for _ in range(8):
        flight = scheduler.step(flight)
    watch = Stopwatch(CALLS[check])
    watch.start()
    steps = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        flight = scheduler.step(flight)
        steps.append(time.perf_counter() - begin)
    calls = watch.stop()
    cost = sum(statistics.median(times) * len(times) for times in calls.values() if times) / num_steps
    return statistics.median(steps) * 1e6, cost * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", default="1,16,64,256", help="numbers of running requests")
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--page-size", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    columns = ("running", "step: us", "recorder: us", "share", "order: us", "min", "max", "full: us", "min", "max")
    print(" ".join(f"{column:>12}" for column in columns))
    for size in [int(n) for n in args.running.split(",")]:
        shape = (size, args.prompt_len, args.steps, args.page_size)
        plain = [run(*shape, "off") for _ in range(args.repeats)]
        step, recorder = (statistics.median(column) for column in zip(*plain, strict=True))
        figures = [f"{step:.1f}", f"{recorder:.2f}", f"{recorder / step:.2%}"]
        for check in ("order", "full"):
            costs = [run(*shape, check)[1] for _ in range(args.repeats)]
            figures += [f"{cost:.1f}" for cost in (statistics.median(costs), min(costs), max(costs))]
        print(" ".join(f"{figure:>12}" for figure in (str(size), *figures)))


if __name__ == "__main__":
    main()
