"""SchedulerControl: what the scheduler does on request beside serving: flush, pause, profile, tell its state."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

import torch

from fenceline.managers.flight_dump import OFF, dump_json, write_dump
from fenceline.managers.io_struct import (
    AbortReq,
    ContinueGenerationReq,
    ControlReply,
    FlightRecorderReq,
    FlushCacheReq,
    GetInternalStateReq,
    Message,
    PauseGenerationReq,
    ProfileReq,
    ShutdownReq,
)

if TYPE_CHECKING:
    from fenceline.managers.scheduler import Scheduler
    from fenceline.managers.scheduler_types import Outbox

logger = logging.getLogger(__name__)

_PROFILE_DIR = "/tmp/fenceline-profile"


class SchedulerControl:
    """Answers control messages; each is handled between two steps."""

    def __init__(self, scheduler: Scheduler, outbox: Outbox) -> None:
        self._scheduler = scheduler
        self._outbox = outbox
        self._profiler = StepProfiler()

    def handle(self, message: Message) -> None:
        """Carry out one control message and answer it."""
        match message:
            case FlushCacheReq():
                self._reply(message.id, *self._flush(message.storage))
            case PauseGenerationReq():
                self._reply(message.id, *self._pause(message.mode))
            case ContinueGenerationReq():
                self._scheduler.paused = False
                self._reply(message.id, True, "generation continues")
            case ProfileReq():
                self._reply(message.id, *self._profile(message))
            case FlightRecorderReq():
                self._outbox.to_tokenizer(self._flight_recorder(message))
            case GetInternalStateReq():
                state = self._scheduler.stats.state(self._scheduler)
                self._outbox.to_tokenizer(ControlReply(id=message.id, success=True, state=state))
            case ShutdownReq():
                self._shutdown(message.drain)
            case _:
                raise AssertionError(f"the scheduler does not take a {type(message).__name__}")

    def after_step(self) -> None:
        """Count a step for a profile that was asked for by number of steps."""
        self._profiler.step()

    def _flush(self, storage: bool) -> tuple[bool, str]:
        scheduler = self._scheduler
        scheduler.retire_departed()  # requests aborted by the messages just before still lock their prefixes
        if scheduler.reqs:
            return False, f"cache not flushed: {len(scheduler.reqs)} requests are pending"
        try:
            num_pages = scheduler.memory.flush(storage)
        except ValueError as error:
            return False, f"cache not flushed: {error}"
        return True, f"cache flushed: {num_pages} pages are free again"

    def _pause(self, mode: str) -> tuple[bool, str]:
        scheduler = self._scheduler
        if mode not in ("abort", "retract", "in_place"):
            return False, f"unknown mode {mode!r}: use abort, retract or in_place"
        if scheduler.draining:
            return False, "the server is shutting down: its last requests must be allowed to end"
        scheduler.paused = True
        if mode == "abort":
            scheduler.abort(AbortReq(abort_all=True))
        elif mode == "retract":
            # Newest first: each goes to the head of the queue, so they resume in their old order.
            for req in [r for r in reversed(list(scheduler.reqs.values())) if r.row]:
                scheduler.retract(req)
        return True, f"paused ({mode}); /continue_generation resumes"

    def _profile(self, message: ProfileReq) -> tuple[bool, str]:
        if message.action == "start":
            return self._profiler.start(message.output_dir or _PROFILE_DIR, message.num_steps)
        if message.action == "stop":
            return self._profiler.stop()
        return False, f"unknown action {message.action!r}: use start or stop"

    def _flight_recorder(self, message: FlightRecorderReq) -> ControlReply:
        recorder = self._scheduler.recorder
        if not recorder.enabled:
            return ControlReply(id=message.id, success=False, message=OFF)
        if not message.write:
            return ControlReply(id=message.id, success=True, payload=dump_json(recorder, "request"))
        try:
            path = write_dump(recorder, "request")
        except OSError as error:
            return ControlReply(
                id=message.id, success=False, message=f"the dump could not be written: {error}"
            )
        return ControlReply(id=message.id, success=True, message=str(path))

    def _shutdown(self, drain: bool) -> None:
        self._scheduler.draining = True
        self._scheduler.paused = False
        if not drain:
            self._scheduler.abort(AbortReq(abort_all=True))

    def _reply(self, id: str, success: bool, message: str) -> None:
        self._outbox.to_tokenizer(ControlReply(id=id, success=success, message=message))


class StepProfiler:
    """The torch profiler over a range of steps; the trace is a Chrome trace in the output folder."""

    def __init__(self) -> None:
        self._profile: torch.profiler.profile | None = None
        self._path = ""
        self._steps_left: int | None = None

    def start(self, output_dir: str, num_steps: int | None) -> tuple[bool, str]:
        """Begin a trace; with ``num_steps`` it ends by itself."""
        if self._profile is not None:
            return False, "a profile is already running: stop it first"
        try:
            os.makedirs(output_dir, exist_ok=True)
        except (OSError, ValueError) as error:  # ValueError: a name with a null byte
            return False, f"cannot make the folder for the trace: {error}"
        self._path = os.path.join(
            output_dir, f"fenceline-{os.getpid()}-{time.strftime('%Y%m%d-%H%M%S')}.trace.json"
        )
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()
        self._steps_left = num_steps
        return True, f"profiling into {self._path}"

    def step(self) -> None:
        """One step has been launched."""
        if self._profile is None or self._steps_left is None:
            return
        self._steps_left -= 1
        if self._steps_left <= 0:
            _, message = self.stop()
            logger.info("%s", message)

    def stop(self) -> tuple[bool, str]:
        """End the trace and write it."""
        if self._profile is None:
            return False, "no profile is running: start one first"
        profile, self._profile = self._profile, None
        profile.stop()
        try:
            profile.export_chrome_trace(self._path)
        except (OSError, RuntimeError) as error:
            return False, f"the trace could not be written to {self._path}: {error}"
        return True, f"trace written to {self._path}"
