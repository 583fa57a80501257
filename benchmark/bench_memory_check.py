"""What --memory-check order costs per decode step: the whole loop with the real model runner, and a model that is free.

    python benchmark/bench_memory_check.py [--running 1,16,64,256] [--prompt-len 64] [--steps 200] [--repeats 9]

Everything that a decode step does on the CPU is timed but the model's layers and the sampler: the scheduler, the rings,
the page tables, the attention plan. Runs with ``off`` and ``order`` alternate, so that a machine that slows
down does so for both; the cost is the median of the differences between neighbours.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time

import torch

import fenceline
from bench_scheduler import NullBox
from fenceline.config.resolve import resolve
from fenceline.config.sampling_params import SamplingParams
from fenceline.config.server_args import ServerArgs
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.managers.io_struct import TokenizedGenerateReq
from fenceline.managers.scheduler import InFlight, Scheduler
from fenceline.memory_order import open_device
from fenceline.model_executor.model_runner import ModelRunner


class NullModel(torch.nn.Module):
    """Logits that were there before: the first token of the vocabulary wins."""

    def __init__(self, vocab_size: int, num_rows: int) -> None:
        super().__init__()
        self._logits = torch.zeros(num_rows, vocab_size)
        self._logits[:, 1] = 1.0

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        num_rows = batch.num_tokens if batch.logits_index is None else len(batch.logits_index)
        return self._logits[:num_rows]


def make_scheduler(
    num_running: int, prompt_len: int, num_steps: int, page_size: int, check: str
) -> Scheduler:
    """A scheduler with ``num_running`` requests in its inbox, over a ModelRunner without a model."""
    context = prompt_len + num_steps + 64
    num_tokens = num_running * (context + 2 * page_size + 16)
    args = ServerArgs(
        model_path=fenceline.demo_model_path(), device="cpu", page_size=page_size, decode_log_interval=10**9,
        max_total_tokens=num_tokens, memory_check=check,
    )  # fmt: skip
    config = dataclasses.replace(resolve(args), max_running_requests=num_running, context_length=context)
    tiny = dataclasses.replace(config.model, vocab_size=16, num_layers=1, num_kv_heads=1, head_dim=8)
    runner = ModelRunner(config, open_device("cpu"), show_progress=False)
    runner.model = NullModel(tiny.vocab_size, num_running)
    runner.sampler = type(runner.sampler)(tiny.vocab_size, num_running + 1, runner.device.torch_device)
    params = SamplingParams(max_new_tokens=context - prompt_len, ignore_eos=True, temperature=0.0)
    box = NullBox(
        [
            TokenizedGenerateReq(
                rid=f"req-{i}",
                input_ids=[2 + i % 9, *[3] * (prompt_len - 1)],
                sampling_params=params,
                stream=True,
            )
            for i in range(num_running)
        ]
    )
    return Scheduler(config, runner, box, box)


def step_times_us(num_running: int, prompt_len: int, num_steps: int, page_size: int) -> tuple[float, float]:
    """Mean CPU time of one decode step in microseconds with ``off`` and with ``order``, in alternating slices."""
    schedulers = [make_scheduler(num_running, prompt_len, num_steps, page_size, c) for c in ("off", "order")]
    flights: list[InFlight | None] = [None, None]
    for which, scheduler in enumerate(schedulers):
        while len(scheduler.running) < num_running:
            flights[which] = scheduler.step(flights[which])
        for _ in range(8):
            flights[which] = scheduler.step(flights[which])
    times = [0.0, 0.0]
    for done in range(0, num_steps, 20):
        for which in (0, 1) if done % 40 else (1, 0):
            begin = time.process_time()
            for _ in range(20):
                flights[which] = schedulers[which].step(flights[which])
            times[which] += time.process_time() - begin
    return times[0] / num_steps * 1e6, times[1] / num_steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--running", default="1,16,64,256", help="numbers of running requests")
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200, help="decode steps, a multiple of 20")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--page-size", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    step_times_us(4, 8, 20, args.page_size)  # the first run of a process also pays for its imports
    print(f"{'running':>8} {'off us/step':>12} {'order':>8} {'cost: median':>13} {'min':>7} {'max':>7}")
    for size in [int(n) for n in args.running.split(",")]:
        pairs = [
            step_times_us(size, args.prompt_len, args.steps, args.page_size) for _ in range(args.repeats)
        ]
        costs = [order - off for off, order in pairs]
        off, order = (statistics.median(column) for column in zip(*pairs, strict=True))
        cost = statistics.median(costs)
        print(f"{size:>8} {off:>12.1f} {order:>8.1f} {cost:>13.1f} {min(costs):>7.1f} {max(costs):>7.1f}")


if __name__ == "__main__":
    main()
