"""A short run of a model runner, for compute-sanitizer:

    compute-sanitizer --tool memcheck --error-exitcode 9 python test/support/sanitizer_run.py

Requests join and leave, decode steps replay graphs, every sampling feature is used. ``--eager`` runs the same steps
without captures; with PYTORCH_NO_CUDA_MEMORY_CACHING=1 every tensor is then a separate allocation, whose bounds the
sanitizer knows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "sgl-kernel" / "python"))

from guarded_runs import EagerCudaDevice, trace_shape
from step_traces import FULL, PLAIN, VOCAB_SIZE, random_trace
from trace_runner import make_runner, play

from fenceline.memory_order import open_device


def main() -> None:
    """Prints how many steps ran. Exit status 1 if a token is not of the vocabulary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--eager", action="store_true", help="no captures")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--page-size", type=int, default=16)
    args = parser.parse_args()
    shape = trace_shape(
        args.page_size,
        batches=(1, 2, 3, 5, 8, 11),
        chunk=16,
        sampling=PLAIN + FULL,
        logprob_share=0.1,
        steady=2,
    )
    device = EagerCudaDevice() if args.eager else open_device("cuda")
    runner = make_runner(device, shape)
    outputs = play(runner, random_trace(1, args.steps, shape))
    device.synchronize()
    wrong = [out for out in outputs if ((out.tokens < 0) | (out.tokens >= VOCAB_SIZE)).any()]
    assert runner.decode.has_graphs
    replays = runner.decode.stats.replays
    print(
        f"{len(outputs)} steps, {replays} {'eager' if args.eager else 'replays'}, {len(wrong)} wrong",
        flush=True,
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
