"""SchedulerControl: carries out control messages (flushes, pauses, new weights, profiles, dumps) and answers them."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import orjson
import torch

from fenceline.config.private_files import new_file
from fenceline.constrained.matcher import GrammarStore
from fenceline.ipc.io_struct import (
    AbortReq,
    CancelFlushReq,
    ContinueGenerationReq,
    ControlReply,
    FlightRecorderReq,
    FlushCacheReq,
    GetInternalStateReq,
    InternalState,
    LoadGrammarReq,
    Message,
    PauseGenerationReq,
    ProfileReq,
    ShutdownReq,
    SlowGrammarsReq,
    StatsReport,
    UpdateWeightsReq,
)
from fenceline.memory_order import old_kv_removal
from fenceline.memory_order.edges import StreamName, pages_edge
from fenceline.model_executor.step import Worker
from fenceline.models.loader import NewWeights
from fenceline.scheduler.flight_dump import OFF, dump_json, dump_of_last, write_dump
from fenceline.scheduler.flight_recorder import CompletionsEvent, Event, FlightRecorder, Leaving, Retirement, StepRecord
from fenceline.scheduler.flight_trace import trace_json
from fenceline.scheduler.population import Population
from fenceline.scheduler.publishing import Publisher

logger = logging.getLogger(__name__)

_FOLDER_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_MAX_FOLDER_DEPTH = 4
_MAX_REPLY_CHARS = 1000
_DUMP_PAUSE_S = 0.001
# Steps in a trace that is asked for over HTTP, which has 8 MB with 256 requests. A dump in a file can be converted to a
# trace of all its steps.
TRACE_STEPS = 128


class SchedulerControl:
    """Carries out control messages and answers them: those that change requests or memory in :meth:`carry_out`, those
    that only observe in :meth:`observe`."""

    def __init__(
        self,
        population: Population,
        publisher: Publisher,
        grammars: GrammarStore,
        worker: Worker,
        recorder: FlightRecorder,
        torch_profiler_dir: str | None,
        send: Callable[[Message], None],
        state: Callable[[bool], InternalState],
    ) -> None:
        """``send`` sends a message to the front end. ``state(paused)`` returns the scheduler's counters and gauges."""
        self.profiler = StepProfiler(torch_profiler_dir)
        # Runs the work of making a dump, here at once. The scheduler's process uses a thread instead, so that steps go
        # on meanwhile; ``send`` must then be safe to call from that thread.
        self.run_in_background: Callable[[Callable[[], None]], None] = lambda work: work()
        self.still_working: Callable[[], None] = lambda: None  # called during a long turn, for the watchdog
        self.paused = False
        self.draining = False
        self._population = population
        self._publisher = publisher
        self._grammars = grammars
        self._worker = worker
        self._recorder = recorder
        self._send = send
        self._state = state
        self._reported: InternalState | None = None  # what the front end knows
        self._flushes: list[FlushCacheReq] = []  # that wait for the last request to leave
        self._dumps: deque[FlightRecorderReq] = deque()  # requested, but not begun yet
        self._dumping = threading.Lock()

    def carry_out(self, message: Message) -> None:
        """Carry out and answer one control message."""
        logger.debug("Control message: %s", type(message).__name__)
        answer = self.answer
        match message:
            case LoadGrammarReq():
                self._grammars.load(message.id, message.grammar, message.data, message.vocabulary, message.forgotten)
            case SlowGrammarsReq():
                self._grammars.end(message.grammars)
            case FlushCacheReq():
                if message.wait and self._population.reqs:
                    self._flushes.append(message)
                else:
                    answer(message.id, partial(self.flush, message.storage))
            case CancelFlushReq():
                for flush in [flush for flush in self._flushes if flush.id == message.id]:
                    self._flushes.remove(flush)
                    answer(flush.id, partial(self.flush, flush.storage))
            case UpdateWeightsReq():
                answer(message.id, partial(self.update_weights, message))
            case PauseGenerationReq():
                answer(message.id, partial(self.pause, message.mode))
            case ContinueGenerationReq():
                self.paused = False
                answer(message.id, lambda: (True, "generation continues"))
            case ShutdownReq():
                self.draining, self.paused = True, False
                if not message.drain:
                    self.abort(AbortReq(abort_all=True))
            case ProfileReq() | FlightRecorderReq() | GetInternalStateReq():
                self.observe(message)
            case _:
                raise AssertionError(f"the scheduler does not take a {type(message).__name__}")

    def abort(self, message: AbortReq) -> None:
        """End one request, or all. ``silent`` means the detokenizer has already told the client."""
        rids = list(self._population.reqs) if message.abort_all else [message.rid]
        for rid in rids:
            req = self._population.reqs.get(rid)
            if req is None:
                continue
            if message.silent:
                self._population.leave(req, "abort")
            else:
                self._publisher.end(req, message.message or "aborted", message.status_code)
        self._publisher.output.flush()

    def flush(self, storage: bool) -> tuple[bool, str]:
        """Empty the prefix cache, and with ``storage`` the storage tier too. Fails while there are requests."""
        self._population.release()  # requests aborted by the messages just before still lock their prefixes
        if self._population.reqs:
            return False, f"cache not flushed: {len(self._population.reqs)} requests are pending"
        try:
            num_pages = self._population.memory.flush(storage)
        except ValueError as error:
            return False, f"cache not flushed: {error}"
        return True, f"cache flushed: {num_pages} pages are free again"

    def flush_when_idle(self) -> None:
        """Carry out the flushes that have waited until no request is left."""
        flushes, self._flushes = self._flushes, []
        for flush in flushes:
            self.answer(flush.id, partial(self.flush, flush.storage))

    def update_weights(self, message: UpdateWeightsReq) -> tuple[bool, str, bytes]:
        """Replace the model's weights. First all running requests are retracted and all cache tiers forget the KV that
        the old weights computed; the requests then go on with the new weights from their published tokens. If the new
        weights do not fit the model, nothing is changed."""
        weights = NewWeights(message.id, message.model_path, message.file, message.weight_version)
        try:
            self._worker.check_weights(weights)
        except ValueError as error:
            return False, f"weights not updated: {error}", b"0"
        if message.abort_all_requests:
            self.abort(AbortReq(abort_all=True))
        population = self._population
        running = population.retract_all("new weights")
        population.release()
        # All requests of the step in flight have left, so its tokens are dropped.
        old_kv_removal(self._worker.device, partial(population.memory.forget, population.waiting))()
        try:
            self._worker.replace_weights(weights, self.still_working)
        except (OSError, ValueError) as error:
            raise RuntimeError(f"some weights are new and others are not: {error}") from error
        done = "weights updated"
        if message.keep_pause and self.draining:
            done += ", and no pause: the server is shutting down, and its last requests must be allowed to end"
        elif message.keep_pause:
            self.stop_scheduling()
        return True, done, str(running).encode()

    def pause(self, mode: str) -> tuple[bool, str]:
        """Launch nothing until a ContinueGenerationReq. ``mode`` says what happens to running requests: ``abort``,
        ``retract``, or ``in_place``."""
        if mode not in ("abort", "retract", "in_place"):
            return False, f"unknown mode {mode!r}: use abort, retract or in_place"
        if self.draining:
            return False, "the server is shutting down: its last requests must be allowed to end"
        self.stop_scheduling()
        if mode == "abort":
            self.abort(AbortReq(abort_all=True))
        elif mode == "retract":
            self._population.retract_all("/pause_generation")
        return True, f"paused ({mode}); /continue_generation resumes"

    def stop_scheduling(self) -> None:
        """Pause until a ContinueGenerationReq."""
        self.paused = True
        self._population.stop_clocks()

    def state(self) -> InternalState:
        """The scheduler's counters and gauges, for the front end."""
        return self._state(self.paused)

    def report(self) -> None:
        """Send :meth:`state` to the front end if it has changed since it was sent. No error in it ends the scheduler,
        which only observes here."""
        try:
            state = self.state()
        except Exception:
            logger.exception("the state could not be told")
            return
        if state != self._reported:
            self._reported = state
            self._send(StatsReport(state=state))

    def answer(self, id: str, carry_out: Callable[[], tuple[bool, str] | tuple[bool, str, bytes]]) -> None:
        """Call ``carry_out``, which changes requests or memory, and send the reply to control message ``id``.
        ``carry_out`` returns whether it succeeded, a text, and optionally a payload. An OSError or a ValueError is
        reported to the sender. Any other exception (an assertion, a lease given back twice, an OrderError) means that
        the scheduler's state can no longer be trusted; it is passed on and ends the scheduler."""
        try:
            success, text, *payload = carry_out()
        except (OSError, ValueError) as error:
            self._failed(id, error)
        else:
            self.report()  # first, so that whoever has the answer finds its effects in the metrics
            self._send(ControlReply(id=id, success=success, message=text, payload=b"".join(payload)))

    def observe(self, message: ProfileReq | FlightRecorderReq | GetInternalStateReq) -> None:
        """Carry out a message that only observes. Any error is reported to the sender, and the scheduler goes on."""
        if isinstance(message, FlightRecorderReq):
            self._dumps.append(message)
            if len(self._dumps) == 1:
                self.run_in_background(self._dump)
            return
        try:
            match message:
                case ProfileReq():
                    success, text = self._profile(message)
                    reply = ControlReply(id=message.id, success=success, message=text)
                case GetInternalStateReq():
                    steps = live_steps(self._recorder, message.num_steps) if message.num_steps else b""
                    reply = ControlReply(id=message.id, success=True, state=self.state(), payload=steps)
        except Exception as error:
            self._failed(message.id, error)
        else:
            self._send(reply)

    def _failed(self, id: str, error: Exception) -> None:
        logger.exception("a control message failed")
        text = f"failed: {type(error).__name__}: {error}"[:_MAX_REPLY_CHARS]
        self._send(ControlReply(id=id, success=False, message=text))

    def _profile(self, message: ProfileReq) -> tuple[bool, str]:
        if message.action == "start":
            return self.profiler.start(message.output_dir or "", message.num_steps)
        if message.action == "stop":
            return self.profiler.stop()
        return False, f"unknown action {message.action!r}: use start or stop"

    def _dump(self) -> None:
        """Answer the requests for dumps, one form after the other. All requests for the same form get the same dump."""
        with self._dumping:
            asked: list[FlightRecorderReq] = []
            # A request that comes meanwhile is either taken here too, or finds the queue empty and starts a new call.
            while self._dumps:
                asked.append(self._dumps.popleft())
            for form in dict.fromkeys(message.form for message in asked):
                ids = [message.id for message in asked if message.form == form]
                try:
                    reply = self._dump_reply(form)
                except Exception as error:
                    for id in ids:
                        self._failed(id, error)
                else:
                    for id in ids:
                        self._send(msgspec.structs.replace(reply, id=id))

    def _dump_reply(self, form: str) -> ControlReply:
        if not self._recorder.enabled:
            return ControlReply(id="", success=False, message=OFF)
        if form == "json":
            payload = dump_json(self._recorder, "request", _let_steps_run)
            return ControlReply(id="", success=True, payload=payload)
        if form == "trace":
            dump = dump_of_last(self._recorder, "request", TRACE_STEPS, _let_steps_run)
            return ControlReply(id="", success=True, payload=trace_json(dump, _let_steps_run))
        try:
            path = write_dump(self._recorder, "request", _let_steps_run)
        except OSError as error:
            return ControlReply(id="", success=False, message=f"the dump could not be written: {error}")
        return ControlReply(id="", success=True, message=str(path))


def live_steps(recorder: FlightRecorder, num_steps: int) -> bytes:
    """The last ``num_steps`` steps as a JSON object: ``steps``, oldest first, and the ``events`` since the last launch.
    They are counts, without ids of requests, tokens or pages, so any client may see them.

    Each step has

    * ``mode`` (extend or decode), ``reqs`` (the number of requests) and ``tokens`` (the number of tokens computed, of
      requests that decode one each);
    * ``done``: the serial of the Point that ends the step, by which it is identified;
    * ``in_flight``: how many earlier steps were not published yet when it was launched;
    * ``published``: whether its own results have been published;
    * ``after``: the other streams whose pages it reuses, each with the name of the edge;
    * ``events`` between the launch before and this one, as counts: requests that ``left`` (by reason),
      ``retired_pages``, ``transfers`` that had ended (by kind), and ``storage`` jobs. Counts of 0 are left out.
    """
    steps, events = recorder.snapshot(num_steps)
    return orjson.dumps({"steps": [_step(step) for step in steps], "events": _counts(events)})


def _step(step: StepRecord) -> dict[str, object]:
    batch = step.batch
    return {
        "mode": "decode" if batch.is_decode else "extend",
        "reqs": len(step.rids),
        "tokens": batch.num_prompt_tokens + batch.num_decodes,
        "done": step.done,
        "in_flight": step.in_flight,
        "published": bool(step.tokens),
        "after": [
            [stream, pages_edge(StreamName.FORWARD, StreamName(stream)).name]
            for stream, _ in step.after
            if stream != StreamName.FORWARD.value
        ],
        "events": _counts(step.events),
    }


def _counts(events: Sequence[Event]) -> dict[str, object]:
    left: Counter[str] = Counter()
    transfers: Counter[str] = Counter()
    retired_pages = storage = 0
    for event in events:
        match event:
            case Leaving():
                left[event.why] += 1
            case Retirement():
                retired_pages += len(event.pages)
            case CompletionsEvent():
                transfers.update(kind for kind, _, _ in event.transfers)
                storage += len(event.storage)
    counts = {"left": left, "retired_pages": retired_pages, "transfers": transfers, "storage": storage}
    return {name: count for name, count in counts.items() if count}


def _let_steps_run() -> None:
    """Sleep briefly, so that the scheduler's thread gets the interpreter lock. A step releases the lock hundreds of
    times, in torch's operators. Each time, a thread that runs Python code without a pause would keep it for 5 ms
    (Python's switch interval)."""
    time.sleep(_DUMP_PAUSE_S)


def trace_folder(root: str | None, output_dir: str) -> list[str]:
    """Return the names of the folders that lead from ``root``, the folder for traces, to ``output_dir``. ``root`` is
    None if that folder has not been made yet. ``output_dir`` is a relative path, or a path that begins with ``root``.
    Raises ValueError (one line) for anything else."""
    below = "" if output_dir == root else output_dir.removeprefix(f"{root}/")
    names = below.split("/") if below else []
    if len(names) > _MAX_FOLDER_DEPTH or not all(map(_FOLDER_NAME.fullmatch, names)):
        raise ValueError(
            f"output_dir must be up to {_MAX_FOLDER_DEPTH} plain names (letters, digits, '.', '_', '-') joined by '/', "
            f"below the server's {root or 'folder for traces'} (--torch-profiler-dir)"
        )
    return names


class StepProfiler:
    """Runs the torch profiler over a range of steps and writes a Chrome trace to a folder below ``root``. If ``root``
    is None, a private temporary folder is made for the first trace and used for all later ones."""

    def __init__(self, root: str | None) -> None:
        self._root = root
        # The running torch.autograd.profiler.profile, whose methods have no types; None while none runs.
        self._profile: Any = None
        self._path = ""
        self.steps_left: int | None = None  # steps until the trace ends by itself; None if it does not

    def start(self, output_dir: str, num_steps: int | None) -> tuple[bool, str]:
        """Begin a trace in ``output_dir`` (see :func:`trace_folder`). It ends after ``num_steps`` steps, or by
        :meth:`stop` if that is None. Returns whether it has begun, and a text for the client."""
        if self._profile is not None:
            return False, "a profile is already running: stop it first"
        try:
            names = trace_folder(self._root, output_dir)
            if self._root is None:  # after the check: a refused request leaves no folder behind
                self._root = tempfile.mkdtemp(prefix="fenceline-profile-")
            folder = Path(self._root)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in names:
                folder /= name
                folder.mkdir(mode=0o700, exist_ok=True)
        except ValueError as error:
            return False, str(error)
        except OSError as error:
            return False, f"cannot make the folder for the trace: {error}"
        # torch.profiler.profile adds a schedule to this class, but its first start imports torch's compiler. That takes
        # 130 MB, and 1.3 s of CPU time during which no step is launched.
        profile: Any = torch.autograd.profiler.profile(use_device="cuda" if torch.cuda.is_available() else None)
        profile.__enter__()
        self._path = str(folder / f"fenceline-{os.getpid()}-{time.strftime('%Y%m%d-%H%M%S')}.trace.json")
        self._profile, self.steps_left = profile, num_steps
        return True, f"profiling into {self._path}"

    def step(self) -> None:
        """Note that one of ``steps_left`` steps has been launched. The trace is written after the last one."""
        assert self.steps_left is not None, "only a trace with a number of steps counts them"
        self.steps_left -= 1
        if self.steps_left <= 0:
            _, message = self.stop()
            logger.info("%s", message)

    def stop(self) -> tuple[bool, str]:
        """End the trace and write it. Returns whether that succeeded, and a text for the client."""
        if self._profile is None:
            return False, "no profile is running: start one first"
        profile, self._profile, self.steps_left = self._profile, None, None
        try:
            profile.__exit__(None, None, None)
            with new_file(self._path) as path:
                profile.export_chrome_trace(path)
        except Exception as error:  # whatever goes wrong in the profiler, the steps go on
            return False, f"the trace could not be written to {self._path}: {type(error).__name__}: {error}"
        return True, f"trace written to {self._path}"
