"""SchedulerControl: what the scheduler does on request beside serving: flush, pause, profile, tell its state."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from fenceline.ipc.io_struct import (
    AbortReq,
    CancelFlushReq,
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
from fenceline.scheduler.flight_dump import OFF, dump_json, write_dump

if TYPE_CHECKING:
    from fenceline.scheduler.interfaces import Outbox
    from fenceline.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

_FOLDER_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_MAX_FOLDER_DEPTH = 4
_MAX_REPLY_CHARS = 1000
# What these go wrong about says nothing of requests and memory, which they do not touch.
_OBSERVERS = (ProfileReq, FlightRecorderReq, GetInternalStateReq)


class SchedulerControl:
    """Answers control messages; each is handled between two steps."""

    def __init__(self, scheduler: Scheduler, outbox: Outbox) -> None:
        self._scheduler = scheduler
        self._outbox = outbox
        self._profiler = StepProfiler(scheduler.config.torch_profiler_dir)
        self._flushes: list[FlushCacheReq] = []  # that wait for the last request to leave

    def handle(self, message: Message) -> None:
        """Carry out one control message and answer it, with ``success`` False if that fails.

        Whatever goes wrong with a message that only observes is its sender's affair. A message that changes requests or
        memory may fail for want of files and for wrong values; any other exception there (an assertion, a lease given
        up twice, an OrderError) means that the books can no longer be trusted, and ends the scheduler.
        """
        try:
            self._carry_out(message)
        except Exception as error:
            if not isinstance(message, _OBSERVERS) and not isinstance(error, (OSError, ValueError)):
                raise
            logger.exception("%s failed", type(message).__name__)
            id = getattr(message, "id", None)
            if id is not None:
                self._reply(id, False, f"failed: {type(error).__name__}: {error}"[:_MAX_REPLY_CHARS])

    def _carry_out(self, message: Message) -> None:
        match message:
            case FlushCacheReq():
                if message.wait and self._scheduler.reqs:
                    self._flushes.append(message)
                else:
                    self._reply(message.id, *self._flush(message.storage))
            case CancelFlushReq():
                for flush in [flush for flush in self._flushes if flush.id == message.id]:
                    self._flushes.remove(flush)
                    self._reply(flush.id, *self._flush(flush.storage))
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

    def when_idle(self) -> None:
        """No request is left: flush where somebody has waited for that."""
        flushes, self._flushes = self._flushes, []
        for flush in flushes:
            self.handle(msgspec.structs.replace(flush, wait=False))

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
            return self._profiler.start(message.output_dir or "", message.num_steps)
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


def trace_folder(root: str | None, output_dir: str) -> list[str]:
    """``output_dir`` as the names of folders below ``root``, the folder for traces (None: not made yet). It may also
    be written as a path that begins with ``root``. Raises ValueError, one line, if it is anything else."""
    below = "" if output_dir == root else output_dir.removeprefix(f"{root}/")
    names = below.split("/") if below else []
    if len(names) > _MAX_FOLDER_DEPTH or not all(map(_FOLDER_NAME.fullmatch, names)):
        raise ValueError(
            f"output_dir must be up to {_MAX_FOLDER_DEPTH} plain names (letters, digits, '.', '_', '-') joined by '/', "
            f"below the server's {root or 'folder for traces'} (--torch-profiler-dir)"
        )
    return names


class StepProfiler:
    """The torch profiler over a range of steps; the trace is a Chrome trace in a folder below ``root``, or without one
    below a private folder that is made for the first trace."""

    def __init__(self, root: str | None) -> None:
        self._root = root
        self._profile: torch.profiler.profile | None = None
        self._path = ""
        self._steps_left: int | None = None

    def start(self, output_dir: str, num_steps: int | None) -> tuple[bool, str]:
        """Begin a trace below the folder for traces; with ``num_steps`` it ends by itself."""
        if self._profile is not None:
            return False, "a profile is already running: stop it first"
        try:
            names = trace_folder(self._root, output_dir)
            if self._root is None:  # after the check: a refused request leaves no folder behind
                self._root = tempfile.mkdtemp(prefix="fenceline-profile-")
            folder = Path(self._root, *names)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except ValueError as error:
            return False, str(error)
        except OSError as error:
            return False, f"cannot make the folder for the trace: {error}"
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(activities=activities)
        profile.start()
        self._path = str(folder / f"fenceline-{os.getpid()}-{time.strftime('%Y%m%d-%H%M%S')}.trace.json")
        self._profile, self._steps_left = profile, num_steps
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
        try:
            profile.stop()
            profile.export_chrome_trace(self._path)
        except Exception as error:  # of the profiler, whatever it is; the steps go on
            return False, f"the trace could not be written to {self._path}: {type(error).__name__}: {error}"
        return True, f"trace written to {self._path}"
