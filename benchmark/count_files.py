"""Counts the files and functions that a steady decode step enters, which one must read to follow it.

    python benchmark/count_files.py [--running 4] [--list] [--source DIR]

The demo model on the CPU decodes ``--running`` requests, and one call of ``Scheduler.step`` runs under a profiler. The
script counts the functions of the package that are entered and the files that they are in, by folder. ``--source``
names another checkout's ``python`` folder, so that two can be compared in the same way.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

_WARM_STEPS = 40  # after these all prompts are computed, and pages have been allocated in advance


def steady_step(num_running: int) -> Callable[[], None]:
    """A step of the loop in which each of ``num_running`` requests gets a token and nothing else happens."""
    import fenceline
    from fenceline.config.engine_config import resolve
    from fenceline.config.server_args import ServerArgs
    from fenceline.ipc.io_struct import Message, TokenizedGenerateReq, id_array
    from fenceline.memory_order import open_device
    from fenceline.model_executor.model_runner import ModelRunner
    from fenceline.sampling.sampling_params import SamplingParams
    from fenceline.scheduler.scheduler import Scheduler

    args = ServerArgs(
        model_path=fenceline.demo_model_path(), device="cpu", max_total_tokens=4096, page_size=16,
        log_level="error", decode_log_interval=10**9, max_running_requests=num_running,
    )  # fmt: skip
    config = resolve(args)
    params = SamplingParams(max_new_tokens=200, ignore_eos=True, temperature=0.0)
    prompts = [list(range(5 + i, 25 + i)) for i in range(num_running)]
    messages: list[Message] = [
        TokenizedGenerateReq(rid=str(i), input_ids=id_array(ids), sampling_params=params, stream=True)
        for i, ids in enumerate(prompts)
    ]

    class Box:
        def drain(self, block: bool, timeout_ms: int | None = None) -> list[Message]:
            taken = messages[:]
            messages.clear()
            return taken

        def to_detokenizer(self, message: object) -> None: ...

        def to_tokenizer(self, message: object) -> None: ...

    worker = ModelRunner(config, open_device("cpu"), show_progress=False)
    scheduler = Scheduler(config, worker, Box(), Box())
    flight: Any = None

    def step() -> None:
        nonlocal flight
        flight = scheduler.step(flight)

    for _ in range(_WARM_STEPS):
        step()
    return step


def entered(step: Callable[[], None], package: Path) -> Counter[tuple[str, str]]:
    """How often ``step`` enters each function (file below ``package``, name)."""
    calls: Counter[tuple[str, str]] = Counter()
    prefix = f"{package}/"

    def profile(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(prefix):
            calls[code.co_filename.removeprefix(prefix), code.co_qualname] += 1

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def main() -> None:
    """Count, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=4, metavar="N", help="requests that decode")
    parser.add_argument("--list", action="store_true", help="name the files and their functions")
    parser.add_argument("--source", type=Path, metavar="DIR", help="the python folder of another checkout")
    args = parser.parse_args()
    if args.source is not None:
        sys.path.insert(0, str(args.source.resolve()))
    step = steady_step(args.running)
    package = Path(sys.modules["fenceline"].__path__[0])
    calls = entered(step, package)
    files = sorted({file for file, _ in calls})
    lines = {file: len((package / file).read_text().splitlines()) for file in files}
    if args.list:
        for file in files:
            names = sorted(name for where, name in calls if where == file)
            print(f"{file} ({lines[file]} lines): {', '.join(names)}")
    folders = Counter(file.partition("/")[0] for file in files)
    print(f"files entered: {len(files)}, of {sum(lines.values())} lines")
    print(f"functions entered: {len(calls)}, by {calls.total()} calls")
    print("by folder: " + ", ".join(f"{folder} {num}" for folder, num in sorted(folders.items())))


if __name__ == "__main__":
    main()
