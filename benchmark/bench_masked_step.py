"""Time of the scheduler's thread in a decode step under masks, with the real model runner and a GPU that does nothing.

    python benchmark/bench_masked_step.py [--running 1,64] [--threads 1,2] [--steps 250] [--repeats 5]

All requests have the JSON schema of h200/constrained.py over a vocabulary of Qwen's size, and draw prepared tokens that
it allows. Scheduler, rings, page tables, runner and sampler are the server's. Kernels, graphs and copies to the device
are replaced by functions that return at once, so that what is left is the time in which the thread prepares them; with
a real GPU each of these calls takes some microseconds more, and ``num_calls`` says how many of them a step makes.
Printed are medians over the steps of the repeats, in microseconds: of a step, and of its parts.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

sys.path.insert(0, str(Path(__file__).parent / "h200"))

from in_process import call_times, owner_of

import fenceline
from bench_scheduler import NullBox, Schema
from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.ipc.io_struct import LoadGrammarReq, TokenizedGenerateReq, id_array
from fenceline.layers.context import Shard
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.memory_order.device import CpuDevice, CpuStream
from fenceline.memory_order.edges import StreamName
from fenceline.memory_order.graph import Graph, GraphPool
from fenceline.memory_order.stream import Point
from fenceline.model_executor import decode_runner, parts
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.sampling import sampler
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.scheduler.population import InFlight
from fenceline.scheduler.scheduler import Scheduler

_VOCAB = 151936
_PROMPT_LEN = 8
I64 = npt.NDArray[np.int64]
_MOST_COPIED = 1 << 16  # bytes; masks of many requests stay where they are, because nothing reads them
_NOTHING = nullcontext()


class Gpu:
    """What the replaced calls do: they count themselves, and a draw writes the ``answers`` [steps, requests]."""

    def __init__(self, answers: I64) -> None:
        self.answers = torch.from_numpy(answers)
        self.num_calls = 0

    def draw(
        self, positions: torch.Tensor, rows: torch.Tensor, last_tokens: torch.Tensor, next_tokens: torch.Tensor
    ) -> None:
        """Both kernels of a draw."""
        self.num_calls += 2
        next_tokens.copy_(self.answers[self._step, : len(next_tokens)])

    def forward(self) -> None:
        """A decode step's replay, without its last draw."""
        self.num_calls += 1
        self._step += 1

    _step = 0


class NullStream(CpuStream):
    """A stream whose copies and events are counted."""

    gpu: Gpu

    def active(self) -> AbstractContextManager[None]:
        return _NOTHING

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.gpu.num_calls += 1
        if dst.nbytes <= _MOST_COPIED:
            dst.copy_(src)

    def record(self) -> Point:
        self.gpu.num_calls += 1
        point = super().record()
        self.passed_serial -= 1  # the host learns it later
        return point

    def _wait_event(self, point: Point) -> None:
        self.gpu.num_calls += 1

    def _query(self, point: Point) -> bool:
        return True


class NullGraph(Graph):
    """``replays``: what a replay does."""

    def __init__(self, name: str, pool: GraphPool, replays: Callable[[], None]) -> None:
        super().__init__(name, pool)
        self._replays = replays

    def _replay(self) -> None:
        self._replays()


class NullDevice(CpuDevice):
    """Nothing is computed. A graph's draw is known by its name."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        super().__init__()
        self.drawn: list[tuple[torch.Tensor, ...]] = []  # the operands of draws that are being captured

    def write_host(self, host: torch.Tensor, source: torch.Tensor) -> None:
        self.gpu.num_calls += 1
        host.copy_(source)

    def capture(self, name: str, pool: GraphPool, body: Callable[[], None]) -> Graph:
        if not name.endswith(".masked"):
            return NullGraph(name, pool, self.gpu.forward)
        self.drawn.clear()
        body()
        operands = self.drawn[-1]

        def replay() -> None:
            self.gpu.num_calls -= 1  # one launch instead of two
            self.gpu.draw(*operands)

        return NullGraph(name, pool, replay)

    def _make_stream(self, name: StreamName) -> NullStream:
        stream = NullStream(name, self.severed)
        stream.gpu = self.gpu
        return stream


class NullModel:
    """Its logits are never looked at."""

    nbytes = 0
    num_layers = 1
    num_heads = 1
    attention_rules: Mapping[int, object] = {}
    vision = None
    state_specs: tuple[object, ...] = ()

    def __init__(self, num_rows: int) -> None:
        self.context = SimpleNamespace(shard=Shard(), dtype=torch.bfloat16)
        self.lm_head = SimpleNamespace(weight=torch.empty(_VOCAB, 1))
        self._logits = torch.empty(num_rows, _VOCAB, dtype=torch.bfloat16)

    def hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        return batch.input_ids

    def own_logits(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        num_rows = batch.num_tokens if batch.logits_index is None else len(batch.logits_index)
        return self._logits[:num_rows]


class Launches:
    """``sample_tokens`` as on CUDA: what the thread does for two launches of Triton kernels."""

    def __init__(self, device: NullDevice) -> None:
        self._device = device

    def __call__(
        self,
        logits: torch.Tensor,
        *given: torch.Tensor | None,
        rows: torch.Tensor,
        last_tokens: torch.Tensor,
        next_tokens: torch.Tensor,
        masks: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        **_: object,
    ) -> None:
        from fenceline.layers.kernels.triton.sample import DrawInputs

        temperatures, scales, keys, *rest = given
        positions = rest[0] if positions is None else positions
        assert positions is not None
        self._device.drawn.append((positions, rows, last_tokens, next_tokens))
        inputs = DrawInputs(temperatures, scales, keys, positions, None, None, None, 1, 0, masks)
        best = [torch.empty(len(logits), 149, dtype=dtype) for dtype in (torch.float32, torch.int32)]
        _launch(logits, inputs.temperatures, inputs.noise_scales, inputs.seed_keys, positions, masks, *best)
        _launch(*best, rows, last_tokens, next_tokens)
        self._device.gpu.draw(positions, rows, last_tokens, next_tokens)


def _launch(*tensors: torch.Tensor | None) -> None:
    """``KernelVariant.launch``."""
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    key = (0, *[None if tensor is None else tensor.dtype for tensor in tensors])
    assert hash(key) and addresses


class Bench:
    """A scheduler in the midst of decoding ``num_running`` requests under ``schema``."""

    def __init__(self, num_running: int, num_steps: int, num_threads: int, schema: Schema) -> None:
        context = 64 + num_steps + num_running
        args = ServerArgs(
            model_path=fenceline.demo_model_path(), device="cpu", page_size=16, decode_log_interval=10**9,
            max_total_tokens=num_running * (context + 48), chunked_prefill_size=1024, prefill_max_requests=num_running,
        )  # fmt: skip
        config = resolve(args)
        model = dataclasses.replace(
            config.model, context_length=context, vocab_size=_VOCAB, num_layers=1, num_kv_heads=1, head_dim=8,
            eos_token_ids=(schema.compiled.eos_token_id,),
        )  # fmt: skip
        config = dataclasses.replace(
            config, max_running_requests=num_running, model=model, cuda_graph_bs=(num_running,)
        )
        self.gpu = Gpu(schema.answers)
        device = NullDevice(self.gpu)
        null_model, launches = NullModel(num_running), Launches(device)
        with mock.patch.object(parts, "load_model", lambda *_, **__: null_model):
            for module in (sampler, decode_runner):
                module.sample_tokens = launches  # type: ignore[assignment]
            runner = ModelRunner(config, device, show_progress=False)
        runner.sampler._device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
        self.gpu._step = 0
        params = SamplingParams(max_new_tokens=context - _PROMPT_LEN, ignore_eos=True, temperature=0.0)
        box = NullBox(
            [
                LoadGrammarReq("grammar", 1, schema.compiled.data, schema.compiled.vocabulary),
                *(
                    TokenizedGenerateReq(
                        rid=f"req-{i}",
                        input_ids=id_array([i + 1] * _PROMPT_LEN),
                        sampling_params=params,
                        stream=True,
                        grammar=1,
                    )
                    for i in range(num_running)
                ),
            ]
        )
        self.scheduler = Scheduler(config, runner, box, box)
        self.scheduler.may_publish_early = lambda flight: False  # type: ignore[method-assign]
        self.scheduler.grammars.use_threads(num_threads)
        self.runner = runner
        self._flight: InFlight | None = None
        while len(self.scheduler.running) < num_running:
            self.run(1)
        self.run(20)

    def run(self, num_steps: int) -> None:
        """The next ``num_steps``."""
        flight, step = self._flight, self.scheduler.step
        for _ in range(num_steps):
            flight = step(flight)
        self._flight = flight


PARTS = ("step", "launch_next", "publish", "accept_tokens", "fill_masks", "sample_held")


def measure(num_running: int, num_steps: int, num_threads: int, schema: Schema) -> tuple[dict[str, list[float]], int]:
    """The times of each part, and how many calls of the GPU a step makes."""
    bench = Bench(num_running, num_steps, num_threads, schema)
    before = bench.gpu.num_calls
    bench.run(10)
    num_calls = (bench.gpu.num_calls - before) // 10
    times = {part: call_times(owner_of(bench.scheduler, part), part) for part in PARTS}
    times["second phase"] = call_times(bench.runner, "_sample_held")
    bench.run(num_steps - 50)
    return times, num_calls


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", default="1,64")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    sizes = [int(n) for n in args.running.split(",")]
    torch.set_num_threads(1)
    schema = Schema(64 + args.steps + max(sizes), max(sizes))
    parts = (*PARTS, "second phase")
    print(f"{'running':>8} {'threads':>8} " + " ".join(f"{part:>14}" for part in parts) + f"{'GPU calls':>11}")
    with torch.inference_mode():
        for size in sizes:
            for num_threads in map(int, args.threads.split(",")):
                runs = [measure(size, args.steps, num_threads, schema) for _ in range(args.repeats)]
                medians = [statistics.median([statistics.median(times[part]) for times, _ in runs]) for part in parts]
                cells = " ".join(f"{median:>14.1f}" for median in medians)
                print(f"{size:>8} {num_threads:>8} {cells}{runs[0][1]:>11}", flush=True)


if __name__ == "__main__":
    main()
