"""A short run of a model runner, for compute-sanitizer:

    compute-sanitizer --tool memcheck --error-exitcode 9 python test/support/sanitizer_run.py
    compute-sanitizer --tool memcheck --error-exitcode 9 python test/support/sanitizer_run.py --speculative
    compute-sanitizer --tool memcheck --error-exitcode 9 python test/support/sanitizer_run.py --mixed

Requests join and leave, decode steps replay graphs, and every sampling feature is used. ``--eager`` runs the same steps
without captures; with PYTORCH_NO_CUDA_MEMORY_CACHING=1 every tensor is then a separate allocation, whose bounds the
sanitizer knows. ``--speculative`` serves the demo model with its EAGLE-3 head instead: greedy and sampled requests in
batches of one to eight, half of them with cached prefixes, for at least as many decode steps. ``--mixed`` serves such
requests without drafts, each while others decode, in steps with prompts and rows that decode.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "sgl-kernel" / "python"))

from guarded_runs import EagerCudaDevice, trace_shape
from scheduler_driver import Driver, request
from step_traces import FULL, PLAIN, VOCAB_SIZE, random_trace
from trace_runner import make_runner, play

from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.memory_order import Device, open_device
from fenceline.model_executor.model_runner import ModelRunner

SIZES = (1, 2, 4, 8)


def run_steps(device: Device, num_steps: int, page_size: int) -> tuple[ModelRunner, int, int]:
    """Run random steps of a tiny model. Returns the runner, the number of steps, and how many of them yielded a token
    outside the vocabulary."""
    shape = trace_shape(
        page_size, batches=(1, 2, 3, 5, 8, 11), chunk=16, sampling=PLAIN + FULL, logprob_share=0.1, steady=2
    )
    runner = make_runner(device, shape)
    outputs = play(runner, random_trace(1, num_steps, shape))
    device.synchronize()
    wrong = [out for out in outputs if ((out.tokens < 0) | (out.tokens >= VOCAB_SIZE)).any()]
    return runner, len(outputs), len(wrong)


# What a server is asked to do, and where each step of it counts.
SERVED: dict[str, dict[str, Any]] = {
    "speculative": {"speculative_algorithm": "EAGLE3", "disable_piecewise_cuda_graph": True},
    "mixed": {"enable_mixed_chunk": True, "chunked_prefill_size": 64},
}


def run_served(device: Device, num_steps: int, page_size: int, way: str) -> tuple[ModelRunner, int, int]:
    """Run waves of requests to the demo model until ``num_steps`` steps have had drafts, or have been mixed. Returns
    the runner, the number of decode steps, and how many answers are invalid: a valid one has as many tokens of the
    vocabulary as were requested."""
    args = ServerArgs(
        model_path="demo",
        device=device.kind,
        random_seed=1,
        page_size=page_size,
        max_running_requests=SIZES[-1],
        max_total_tokens=4096,
        cuda_graph_bs=SIZES,
        **SERVED[way],
    )
    config = resolve(args)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, context_length=512))
    runner = ModelRunner(config, device, show_progress=False)
    driver, rng, wrong, wave = Driver(config, runner), Random(1), 0, 0
    prefix = [rng.randrange(3, config.model.vocab_size) for _ in range(100)]
    stats = driver.scheduler.stats
    depths = stats.num_steps_by_depth
    while max(sum(num for depth, num in depths.items() if depth > 0), stats.num_mixed_steps) < num_steps:
        reqs = [
            request(
                f"{wave}:{index}",
                prefix[: 100 * (index % 2)] + [rng.randrange(3, config.model.vocab_size) for _ in range(20)],
                temperature=float(index % 3 == 0),
                seed=index,
                max_new_tokens=24 - index,
                ignore_eos=True,
            )
            for index in range(rng.choice((1, 3, 5, 8)))
        ]
        for req in reqs:
            driver.send(req)
            driver.step()
        driver.run()
        for req in reqs:
            ids = driver.answers[req.rid].output_ids
            is_right = len(ids) == req.sampling_params.max_new_tokens and 0 <= min(ids) <= max(ids)
            wrong += not (is_right and max(ids) < config.model.vocab_size)
        wave += 1
    device.synchronize()
    driver.scheduler.close()
    return runner, sum(depths.values()), wrong


def main() -> None:
    """Prints how many steps ran. The exit status is 1 if a token is not in the vocabulary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eager", action="store_true", help="no captures")
    served = parser.add_mutually_exclusive_group()
    served.add_argument("--speculative", action="store_true", help="the demo model with its EAGLE-3 head")
    served.add_argument("--mixed", action="store_true", help="the demo model, whose steps are mixed")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: whether it works")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--page-size", type=int, default=16)
    args = parser.parse_args()
    device = EagerCudaDevice() if args.eager else open_device(args.device)
    ways = [way for way in SERVED if getattr(args, way)]
    run = partial(run_served, way=ways[0]) if ways else run_steps
    runner, num_steps, num_wrong = run(device, args.steps, args.page_size)
    assert runner.decode.has_graphs
    replays = runner.decode.stats.replays
    print(f"{num_steps} steps, {replays} {'eager' if args.eager else 'replays'}, {num_wrong} wrong", flush=True)
    sys.exit(1 if num_wrong else 0)


if __name__ == "__main__":
    main()
