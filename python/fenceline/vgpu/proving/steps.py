"""Drives the real Scheduler and ModelRunner one turn at a time, and executes recorded decisions again in order."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import numpy as np

from fenceline.config.engine_config import EngineConfig
from fenceline.config.resolve import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.managers.io_struct import BatchTokenOut, Message
from fenceline.managers.scheduler import Scheduler
from fenceline.managers.scheduler_types import InFlight
from fenceline.memory_order import Device, Points, open_device
from fenceline.model_executor.cuda_graph_runner import GraphStats
from fenceline.model_executor.forward_result import ForwardResult, LogprobValues, StepOutput
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.schedule_batch import ScheduleBatch
from fenceline.vgpu.proving.tiny_model import tiny_model_path
from fenceline.vgpu.proving.workloads import Arrival, Flags

_MAX_STEPS = 2000


@lru_cache
def _config(flags: tuple[tuple[str, int | float | str | bool], ...]) -> EngineConfig:
    args = ServerArgs(model_path=tiny_model_path(), random_seed=1, log_level="error", **dict(flags))  # type: ignore[arg-type]
    return resolve(args)


def make_config(flags: Flags, device: str) -> EngineConfig:
    """The engine's configuration with the tiny model. Pages may be smaller than the command line allows."""
    return _config(tuple(sorted({"device": device, **flags}.items())))


@dataclass(slots=True)
class Decision:
    """One launched step: what the scheduler decided, and what the device answered (None until published)."""

    batch: ScheduleBatch
    output: StepOutput | None = None


class _Noted:
    """A flight's result on its way through the driver's hands: what ``publish`` takes is written down."""

    def __init__(self, result: ForwardResult, decision: Decision) -> None:
        self.done = result.done
        self._result = result
        self._decision = decision

    def wait(self) -> StepOutput:
        self._decision.output = self._result.wait()
        return self._decision.output


class _Witness:
    """The scheduler's Worker: a ModelRunner whose launches, and what is published of them, are written down."""

    def __init__(self, runner: ModelRunner, decisions: list[Decision]) -> None:
        self.device = runner.device
        self.pages = runner.pages
        self.req_pool = runner.req_pool
        self.memory_bytes = runner.memory_bytes
        self.hicache = runner.hicache
        self.storage = runner.storage
        self._runner = runner
        self._decisions = decisions

    @property
    def graph_stats(self) -> GraphStats | None:
        """See ModelRunner."""
        return self._runner.graph_stats

    def launch(self, batch: ScheduleBatch) -> ForwardResult:
        """See ModelRunner."""
        result = self._runner.launch(batch)
        decision = Decision(batch)
        self._decisions.append(decision)
        return cast(ForwardResult, _Noted(result, decision))


class Loop:
    """A Scheduler over a ModelRunner, the arrivals it will see, and the decisions it took. No threads."""

    def __init__(
        self,
        config: EngineConfig,
        device: Device,
        arrivals: Iterable[Arrival] = (),
        tell: Callable[[Message], None] = lambda message: None,
    ) -> None:
        self.decisions: list[Decision] = []
        self.step_no = 0
        self.answered: set[str] = set()
        self._arrivals = deque(arrivals)
        self._tell = tell
        self._flight: InFlight | None = None
        self.runner = ModelRunner(config, device, show_progress=False)
        self.scheduler = Scheduler(config, _Witness(self.runner, self.decisions), self, self)

    def send(self, message: Message) -> None:
        """Put a message into the inbox as of now."""
        self._arrivals.append(Arrival(self.step_no, message))

    # --- inbox and outbox of the scheduler

    def drain(self, block: bool, timeout_ms: int | None = None) -> Sequence[Message]:
        """See ``managers.scheduler.Inbox``. A scheduler that would sleep is taken to the next arrival."""
        if block and self._arrivals:
            self.step_no = max(self.step_no, self._arrivals[0].step)
        messages = []
        while self._arrivals and self._arrivals[0].step <= self.step_no:
            messages.append(self._arrivals.popleft().message)
        return messages

    def to_detokenizer(self, message: BatchTokenOut) -> None:
        """See ``managers.scheduler.Outbox``."""
        for out in message.outs:
            assert out.rid not in self.answered, f"{out.rid} speaks after its end"
            if out.finish_reason is not None:
                self.answered.add(out.rid)
        self._tell(message)

    def to_tokenizer(self, message: Message) -> None:
        """See ``managers.scheduler.Outbox``."""
        self._tell(message)

    # --- the loop

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self._arrivals or self._flight is not None or self.scheduler.reqs)

    def step(self) -> None:
        """One turn of the scheduler's loop."""
        self._flight = self.scheduler.step(self._flight)
        self.step_no += 1
        self.scheduler.memory.tree.check()

    def run(self) -> None:
        """Until everything that arrives is answered. Raises what the engine raises."""
        while self.busy:
            assert self.step_no < _MAX_STEPS, f"not done after {_MAX_STEPS} steps"
            self.step()
        self.scheduler.memory.check_books()


def execute(
    config: EngineConfig,
    decisions: Sequence[Decision],
    prepare: Callable[[ModelRunner], None] = lambda runner: None,
) -> str:
    """Execute ``decisions`` one after the other on the CPU; "" if every answer is the same, else where it is not.

    ``prepare`` is called before the first, with a runner that has done nothing yet.
    """
    runner = ModelRunner(config, open_device("cpu"), show_progress=False)
    prepare(runner)
    for number, decision in enumerate(decisions):
        # The CPU is synchronous: what the batch's memory was used for before has been done.
        batch = dataclasses.replace(decision.batch, after=Points.none())
        expected = runner.launch(batch).wait()
        assert decision.output is not None, "every launched step is published"
        difference = _difference(expected, decision.output)
        if difference:
            return f"step {number} of {len(decisions)} ({type(batch).__name__}): {difference}"
    return ""


def _difference(expected: StepOutput, got: StepOutput) -> str:
    if not np.array_equal(expected.next_tokens, got.next_tokens):
        return f"tokens {got.next_tokens.tolist()}, in order of submission {expected.next_tokens.tolist()}"
    for name in ("logprobs", "prompt_logprobs"):
        if not _same(getattr(expected, name), getattr(got, name)):
            return f"{name} differ from those in order of submission"
    return ""


def _same(a: LogprobValues | None, b: LogprobValues | None) -> bool:
    if a is None or b is None:
        return a is b
    pairs = ((a.chosen, b.chosen), (a.top, b.top), (a.top_ids, b.top_ids))
    return all(np.array_equal(x, y) for x, y in pairs)
