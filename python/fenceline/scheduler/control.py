"""SchedulerControl: how control messages are answered, and what of them only observes: profiles, dumps, the state."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from fenceline.ipc.io_struct import (
    ControlReply,
    FlightRecorderReq,
    GetInternalStateReq,
    InternalState,
    Message,
    ProfileReq,
)
from fenceline.scheduler.flight_dump import OFF, dump_json, dump_of_last, write_dump
from fenceline.scheduler.flight_recorder import FlightRecorder
from fenceline.scheduler.flight_trace import trace_json
from fenceline.scheduler.live_steps import live_steps

logger = logging.getLogger(__name__)

_FOLDER_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_MAX_FOLDER_DEPTH = 4
_MAX_REPLY_CHARS = 1000
_DUMP_PAUSE_S = 0.001
TRACE_STEPS = 128  # of a trace over HTTP: with 256 requests 8 MB; a file can be made a trace of all


class SchedulerControl:
    """Answers control messages. Those that only observe are carried out here; those that change requests or memory are
    the scheduler's, which has them answered by :meth:`answer`."""

    def __init__(
        self, recorder: FlightRecorder, torch_profiler_dir: str | None, send: Callable[[Message], None]
    ) -> None:
        """``send``: to the front end."""
        self.profiler = StepProfiler(torch_profiler_dir)
        # How a dump is made; the scheduler's process has it made beside the steps, where ``send`` may be called too.
        self.run_beside: Callable[[Callable[[], None]], None] = lambda work: work()
        self._recorder = recorder
        self._send = send
        self._dumps: deque[FlightRecorderReq] = deque()  # asked for, and not begun
        self._dumping = threading.Lock()

    def answer(self, id: str, carry_out: Callable[[], tuple[bool, str] | tuple[bool, str, bytes]]) -> None:
        """Carry out something that changes requests or memory, and tell whether it succeeded, with a text, and with
        what else was asked for.

        It may fail for want of files and for wrong values. Any other exception (an assertion, a lease given up twice,
        an OrderError) means that the books can no longer be trusted, and ends the scheduler.
        """
        try:
            success, text, *payload = carry_out()
        except (OSError, ValueError) as error:
            self._failed(id, error)
        else:
            self._send(ControlReply(id=id, success=success, message=text, payload=b"".join(payload)))

    def observe(
        self,
        message: ProfileReq | FlightRecorderReq | GetInternalStateReq,
        state: Callable[[], InternalState],
    ) -> None:
        """Carry out a message that only observes; whatever goes wrong with it is its sender's affair.

        ``state``: how things stand, asked for if the message wants to know.
        """
        if isinstance(message, FlightRecorderReq):
            self._dumps.append(message)
            if len(self._dumps) == 1:
                self.run_beside(self._dump)
            return
        try:
            match message:
                case ProfileReq():
                    success, text = self._profile(message)
                    reply = ControlReply(id=message.id, success=success, message=text)
                case GetInternalStateReq():
                    steps = live_steps(self._recorder, message.num_steps) if message.num_steps else b""
                    reply = ControlReply(id=message.id, success=True, state=state(), payload=steps)
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
        """Answer the dumps that have been asked for: those of a kind by one dump, and one after the other."""
        with self._dumping:
            asked: list[FlightRecorderReq] = []
            while self._dumps:  # one that comes meanwhile is either taken too, or the first of the next
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


def _let_steps_run() -> None:
    """A thread that works in Python keeps the interpreter for 5 ms each time that a step's operator has given it up,
    which is hundreds of times a step. One that sleeps does not."""
    time.sleep(_DUMP_PAUSE_S)


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
        self._profile: Any = (
            None  # torch.autograd.profiler.profile, whose methods have no types; None: there is none
        )
        self._path = ""
        self.steps_left: int | None = None  # until the trace ends by itself, None if it does not

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
        # torch.profiler.profile is this one with a schedule, and its first start imports torch's compiler: 1.3 s of CPU
        # time in which no step is launched, and 130 MB.
        profile: Any = torch.autograd.profiler.profile(
            use_device="cuda" if torch.cuda.is_available() else None
        )
        profile.__enter__()
        self._path = str(folder / f"fenceline-{os.getpid()}-{time.strftime('%Y%m%d-%H%M%S')}.trace.json")
        self._profile, self.steps_left = profile, num_steps
        return True, f"profiling into {self._path}"

    def step(self) -> None:
        """One of ``steps_left`` steps has been launched."""
        assert self.steps_left is not None, "only a trace of so many steps counts them"
        self.steps_left -= 1
        if self.steps_left <= 0:
            _, message = self.stop()
            logger.info("%s", message)

    def stop(self) -> tuple[bool, str]:
        """End the trace and write it."""
        if self._profile is None:
            return False, "no profile is running: start one first"
        profile, self._profile, self.steps_left = self._profile, None, None
        try:
            profile.__exit__(None, None, None)
            profile.export_chrome_trace(self._path)
        except Exception as error:  # of the profiler, whatever it is; the steps go on
            return False, f"the trace could not be written to {self._path}: {type(error).__name__}: {error}"
        return True, f"trace written to {self._path}"
