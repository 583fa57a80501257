"""CPU time of the scheduler per decode step, with a worker that computes nothing.

    python benchmark/bench_scheduler.py [--running 1,16,64,256] [--steps 400] [--repeats 5]
    python benchmark/bench_scheduler.py --compare-flight-recorder --repeats 25
    python benchmark/bench_scheduler.py --schema 1,2,4 --running 1,16,64    # threads that fill masks

Everything that the scheduler process does in a steady decode step is timed: draining the inbox, planning,
publishing one token for every (streaming) request and encoding the message to the detokenizer. The line
fitted through the medians gives the base and the cost of each added request. The cost of submitting work to the
device is not included, because it belongs to the model runner. With --compare-flight-recorder a scheduler with
and one without the recorder run in turns, and the fastest tenth of their blocks of steps are compared.

With --schema all requests have the JSON schema of h200/constrained.py, over a vocabulary of Qwen's size, and draw
random tokens among those that it allows. Printed are medians of wall time: of a step, and of what it does between the
tokens of one step and the masks of the next. The copy of the masks to the device is not included.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import torch

sys.path.insert(0, str(Path(__file__).parent / "h200"))

from constrained import CompiledSchema
from in_process import call_times, owner_of

import fenceline
from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.ipc.io_struct import BatchTokenOut, LoadGrammarReq, Message, TokenizedGenerateReq, encode, id_array
from fenceline.mem_cache.kv_pool import ReqPool
from fenceline.memory_order import LeasePool, Point, Points, open_device
from fenceline.model_executor.step import Completions, HeldStep, StepBatch, StepOutput, drain_completions
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.scheduler.population import InFlight
from fenceline.scheduler.ranks import RankLink
from fenceline.scheduler.scheduler import Scheduler

_TOKEN = 42
_BLOCK = 16  # steps of one scheduler before the other runs; this is shorter than disturbances by other load
_RING = 512
_VOCAB = 151936
_PROMPT_LEN = 8
I64 = npt.NDArray[np.int64]


class NullResult:
    """The result of a step that has ended when it is launched."""

    def __init__(self, num_tokens: int, done: Point, tokens: I64 | None = None) -> None:
        self._num_tokens = num_tokens
        self._tokens = tokens
        self.done = done

    def arrived(self) -> bool:
        return True

    def wait(self) -> StepOutput:
        if self._tokens is not None:
            return StepOutput(self._tokens, None, None)
        return StepOutput(np.full(self._num_tokens, _TOKEN, dtype=np.int64), None, None)


class NullWorker:
    """A worker whose steps all return the same token and use no memory."""

    def __init__(self, num_pages: int, num_rows: int) -> None:
        self.device = open_device("cpu")
        self.pages = LeasePool("KV pages", num_pages + 1)
        self.max_step_tokens = 1
        self.step_costs = None
        self.states = None
        self.req_pool = ReqPool(num_rows + 1, 1, torch.device("cpu"))
        self.memory_bytes = {"weights": 0, "kv_cache": 0}
        self.graph_stats = None
        self.prefill_graph_stats = None
        self.hicache = None
        self.storage = None
        self._forward = self.device.forward

    def completions(self, awaited: NullResult | None) -> Completions:
        return drain_completions(None, None, awaited)

    def launch(self, batch: StepBatch) -> NullResult:
        return NullResult(len(batch.sampling), self._forward.record())

    def copy_state(self, source: int, slot: int, after: Points) -> Point:
        return self._forward.record()


class SchemaWorker(NullWorker):
    """A worker whose steps return prepared ``answers`` [steps, requests], and masks are filled before they do. A
    request's prompt has ``prompt_len`` tokens, its row is its number plus one."""

    def __init__(self, num_pages: int, answers: I64, prompt_len: int) -> None:
        super().__init__(num_pages, answers.shape[1])
        self._answers = answers
        self._prompt_len = prompt_len
        self._masks = np.empty((answers.shape[1], _VOCAB // 32), np.int32)

    def launch(self, batch: StepBatch) -> HeldStep:
        places = batch.seq_lens - self._prompt_len if batch.is_decode else np.zeros(len(batch.rows), np.int64)
        tokens = self._answers[places, batch.rows - 1][batch.samples]
        masks = self._masks[: len(tokens)]
        return HeldStep(self._forward.record(), lambda: masks, partial(self._sample, tokens))

    def _sample(self, tokens: I64) -> NullResult:
        return NullResult(len(tokens), self._forward.record(), tokens)


class NullBox:
    """An inbox that returns the given messages, and an outbox that encodes messages and drops them."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages
        self.num_bytes = 0

    def drain(self, block: bool, timeout_ms: int | None = None) -> Sequence[Message]:
        messages, self.messages = self.messages, ()
        return messages

    def to_detokenizer(self, message: BatchTokenOut) -> None:
        self.num_bytes += len(encode(message))

    def to_tokenizer(self, message: Message) -> None:
        self.num_bytes += len(encode(message))


class Schema:
    """The compiled schema, and answers [steps, requests] of tokens that are drawn at random among those it allows."""

    def __init__(self, num_steps: int, num_running: int) -> None:
        import xgrammar

        self.compiled = CompiledSchema.make(num_steps, _VOCAB)
        vocabulary = xgrammar.TokenizerInfo.deserialize_json(self.compiled.vocabulary.decode())
        grammar = xgrammar.CompiledGrammar.deserialize_json(self.compiled.data.decode(), vocabulary)
        rng, words = Random(1), np.empty((1, _VOCAB // 32), np.int32)
        self.answers = np.empty((num_steps, num_running), np.int64)
        for answer in self.answers.T:
            matcher = xgrammar.GrammarMatcher(grammar)
            for place in range(num_steps):
                matcher.fill_next_token_bitmask(words)
                allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
                answer[place] = rng.choice(allowed)
                assert matcher.accept_token(int(answer[place])), "the mask allows it"


class Bench:
    """A scheduler in the midst of decoding ``num_running`` requests, for ``num_steps`` steps at most; with ``schema``
    all of them have it."""

    def __init__(
        self,
        num_running: int,
        num_steps: int,
        page_size: int,
        recorder_steps: int = 512,
        schema: Schema | None = None,
        make_link: Callable[[NullWorker, NullBox], RankLink] | None = None,
    ) -> None:
        """``make_link``: makes the link to other ranks from the worker and the inbox, where there are some."""
        context = 64 + num_steps + num_running  # requests already decode while the prompts of others are computed
        args = ServerArgs(
            model_path=fenceline.demo_model_path(),
            device="cpu",
            page_size=page_size,
            decode_log_interval=10**9,
            flight_recorder_steps=recorder_steps,
        )
        config = resolve(args)
        model = dataclasses.replace(config.model, context_length=context)
        config = dataclasses.replace(config, max_running_requests=num_running, model=model)
        params = SamplingParams(max_new_tokens=context, ignore_eos=True, temperature=0.0)
        messages: list[Message] = []
        num_pages = num_running * (context // page_size + 2)
        worker = NullWorker(num_pages, num_running)
        if schema is not None:
            model = dataclasses.replace(model, vocab_size=_VOCAB, eos_token_ids=(schema.compiled.eos_token_id,))
            config = dataclasses.replace(config, model=model)
            worker = SchemaWorker(num_pages, schema.answers[:, :num_running], _PROMPT_LEN)
            messages.append(LoadGrammarReq("grammar", 1, schema.compiled.data, schema.compiled.vocabulary))
        messages += [
            TokenizedGenerateReq(
                rid=f"req-{i}",
                input_ids=id_array([i + 1] * _PROMPT_LEN),
                sampling_params=params,
                stream=True,
                grammar=0 if schema is None else 1,
            )
            for i in range(num_running)
        ]
        box = NullBox(messages)
        link = None if make_link is None else make_link(worker, box)
        self.scheduler = Scheduler(config, worker, box, box, link)
        if schema is not None:  # as on a GPU, where a step is published while the next one runs
            self.scheduler.may_publish_early = lambda flight: False  # type: ignore[method-assign]
        self._flight: InFlight | None = None
        while len(self.scheduler.running) < num_running:
            self.run(1)
        self.run(32)  # warm
        assert len(self.scheduler.running) == num_running

    def run(self, num_steps: int) -> float:
        """Mean CPU time of a step in microseconds, over the next ``num_steps``."""
        flight, step = self._flight, self.scheduler.step
        begin = time.process_time_ns()
        for _ in range(num_steps):
            flight = step(flight)
        self._flight = flight
        return (time.process_time_ns() - begin) / num_steps / 1e3


def compare_threads(sizes: Sequence[int], threads: Sequence[int], num_steps: int, page_size: int) -> None:
    """Print what a step takes whose requests all have a schema, by the number of threads that fill masks."""
    schema = Schema(64 + num_steps + max(sizes), max(sizes))
    parts = ("step", "publish", "accept_tokens", "fill_masks", "sample_held")
    print(f"{'running':>8} {'threads':>8} " + " ".join(f"{part:>14}" for part in parts) + "  us, medians")
    for size in sizes:
        for num_threads in threads:
            bench = Bench(size, num_steps, page_size, schema=schema)
            bench.scheduler.grammars.use_threads(num_threads)
            times = {part: call_times(owner_of(bench.scheduler, part), part) for part in parts}
            bench.run(num_steps)
            medians = [statistics.median(times[part]) for part in parts]
            print(f"{size:>8} {num_threads:>8} " + " ".join(f"{median:>14.1f}" for median in medians))


def step_time_us(num_running: int, num_steps: int, page_size: int) -> float:
    """Mean CPU time of one decode step in microseconds."""
    return Bench(num_running, num_steps, page_size).run(num_steps)


def compare_flight_recorder(sizes: Sequence[int], num_steps: int, repeats: int, page_size: int) -> None:
    """Print how much time the recorder adds to a step: two schedulers run in turns, ``_BLOCK`` steps each, with full
    rings."""
    print(f"{'running':>8} {'off us/step':>12} {'on':>9} {'added':>9} {'ratio':>7} {'median ratio':>13}")
    for size in sizes:
        steps = num_steps * repeats
        off, on = (Bench(size, _RING + steps, page_size, ring) for ring in (0, _RING))
        off.run(_RING)
        on.run(_RING)
        pairs = []
        for index in range(steps // _BLOCK):
            if index % 2:
                pairs.append((off.run(_BLOCK), on.run(_BLOCK)))
            else:
                second = on.run(_BLOCK)
                pairs.append((off.run(_BLOCK), second))
        # Other load can only add time, so the fast blocks are those that it did not disturb.
        base, kept = (statistics.quantiles(times, n=10)[0] for times in zip(*pairs, strict=True))
        median = statistics.median(pair[1] / pair[0] for pair in pairs)
        print(f"{size:>8} {base:>12.1f} {kept:>9.1f} {kept - base:>9.2f} {kept / base:>7.4f} {median:>13.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", default="1,16,64,256", help="numbers of running requests")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--compare-flight-recorder", action="store_true")
    parser.add_argument("--schema", default="", help="how many threads fill masks: one or several numbers")
    args = parser.parse_args()
    sizes = [int(n) for n in args.running.split(",")]
    if args.schema:
        compare_threads(sizes, [int(n) for n in args.schema.split(",")], args.steps, args.page_size)
        return
    medians = []
    # The first run of a process also includes the time of its imports.
    step_time_us(max(sizes), args.steps, args.page_size)
    if args.compare_flight_recorder:
        compare_flight_recorder(sizes, args.steps, args.repeats, args.page_size)
        return
    print(f"{'running':>8} {'median us/step':>15} {'min':>9} {'max':>9}")
    for size in sizes:
        times = [step_time_us(size, args.steps, args.page_size) for _ in range(args.repeats)]
        medians.append(statistics.median(times))
        print(f"{size:>8} {medians[-1]:>15.1f} {min(times):>9.1f} {max(times):>9.1f}")
    if len(sizes) > 1:
        slope, base = np.polyfit(sizes, medians, 1)
        print(f"base {base:.1f} us, {slope:.2f} us for each added request")


if __name__ == "__main__":
    main()
