"""Messages that only observe, sent to the scheduler when a run has ended: its state with the latest steps, dumps of the
flight record, the profiler; and messages that fail. Each must have one answer, the right one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn
from unittest.mock import patch

import orjson

from fenceline.ipc.io_struct import (
    ControlReply,
    FlightRecorderReq,
    GetInternalStateReq,
    Message,
    ProfileReq,
)
from fenceline.memory_order.edges import StreamName, pages_edge
from fenceline.scheduler.control import SchedulerControl, StepProfiler
from fenceline.scheduler.flight_recorder import CompletionsEvent, Departure, Event, Retirement, StepRecord
from fenceline.scheduler.scheduler import Scheduler

_NUM_STEPS = 8
_MOST_CHARS = 1000  # of a reply
_LOGGER = logging.getLogger("fenceline.scheduler.control")


def compare_observers(scheduler: Scheduler) -> str:
    """What is wrong with the answers, "" if nothing is."""
    control = scheduler.control
    sent: list[Message] = []
    dumps: list[Callable[[], None]] = []
    before = control._send, control.run_in_background, _LOGGER.disabled
    control._send, control.run_in_background, _LOGGER.disabled = sent.append, dumps.append, True
    try:
        control.observe(GetInternalStateReq(id="steps", num_steps=_NUM_STEPS), scheduler.state)
        control.observe(GetInternalStateReq(id="no state"), _fails)
        control.observe(ProfileReq(id="stop", action="stop"), scheduler.state)
        control.answer("long", _fails)
        # Those that come before a dump has been begun are answered by the same one.
        for id in ("json", "json again"):
            control.observe(FlightRecorderReq(id=id, form="json"), scheduler.state)
        control.observe(FlightRecorderReq(id="trace", form="trace"), scheduler.state)
        for dump in dumps:
            dump()
    finally:
        control._send, control.run_in_background, _LOGGER.disabled = before
    replies = {message.id: message for message in sent if isinstance(message, ControlReply)}
    enabled = scheduler.recorder.enabled
    said = [(message.id, message.success) for message in sent if isinstance(message, ControlReply)]
    right = [("steps", True), ("no state", False), ("stop", False), ("long", False)]
    right += [(id, enabled) for id in ("json", "json again", "trace")]
    if said != right or len(sent) != len(right) or len(dumps) != 1:
        return f"observers: {said} is answered with {len(dumps)} dumps, {right} with one is right"
    if len(replies["long"].message) != _MOST_CHARS:
        return f"observers: an error of {len(replies['long'].message)} characters is told, {_MOST_CHARS} are the most"
    steps, events = scheduler.recorder.snapshot()
    records = list(steps)
    if enabled and len(orjson.loads(replies["json"].payload)["steps"]) != len(records):
        return "observers: a dump does not have all steps"
    live = {"steps": [_live(step) for step in records[-_NUM_STEPS:]], "events": _counts(events)}
    if orjson.loads(replies["steps"].payload) != live:
        return f"observers: {replies['steps'].payload.decode()} is told of the latest steps, {live} is right"
    return _compare_dumps(control, scheduler) or _compare_profiles(control, scheduler)


def _compare_dumps(control: SchedulerControl, scheduler: Scheduler) -> str:
    """A dump is begun at once if none is asked for before, lets steps run, and if it fails each that asked for it is
    told so."""
    sent: list[Message] = []
    dumps: list[Callable[[], None]] = []
    pauses: list[float] = []
    before = control._send, control.run_in_background, _LOGGER.disabled
    control._send, control.run_in_background, _LOGGER.disabled = sent.append, dumps.append, True
    try:
        with patch("time.sleep", pauses.append):
            control.observe(FlightRecorderReq(id="first", form="trace"), scheduler.state)
            num_begun = len(dumps)
            for dump in dumps:
                dump()
        anything: Any = control
        with patch.object(anything, "_dump_reply", lambda form: _fails()):
            for id in ("fails", "fails too"):
                control.observe(FlightRecorderReq(id=id, form="trace"), scheduler.state)
            for dump in dumps[num_begun:]:
                dump()
    finally:
        control._send, control.run_in_background, _LOGGER.disabled = before
    enabled = scheduler.recorder.enabled
    said = [(message.id, message.success) for message in sent if isinstance(message, ControlReply)]
    if said != [("first", enabled), ("fails", False), ("fails too", False)] or (num_begun, len(dumps)) != (
        1,
        2,
    ):
        return f"observers: {said} is answered, with {num_begun} dumps begun at once and {len(dumps)} in all"
    if enabled and next(scheduler.recorder.snapshot(1)[0], None) and (not pauses or min(pauses) <= 0):
        return f"observers: a dump pauses for {pauses} s and does not let steps run"
    return ""


class _Profile:
    """Torch's profiler, which would find nothing on a virtual GPU: a trace without events. It is written when the
    profiler has run and has been stopped."""

    def __init__(self, use_device: str | None = None) -> None:
        self._calls: list[str] = []

    def __enter__(self) -> None:
        self._calls.append("begin")

    def __exit__(self, *args: object) -> None:
        self._calls.append("end")

    def export_chrome_trace(self, path: str) -> None:
        if self._calls == ["begin", "end"]:
            Path(path).write_text("{}")


def _compare_profiles(control: SchedulerControl, scheduler: Scheduler) -> str:
    """A trace is written to the folder that was asked for, after so many steps or when it is stopped; what is wrong."""
    sent: list[Message] = []
    before = control._send, control.profiler, _LOGGER.disabled
    with (
        TemporaryDirectory(prefix="fenceline-prove-") as root,
        patch("torch.autograd.profiler.profile", _Profile),
    ):
        control._send, control.profiler, _LOGGER.disabled = sent.append, StepProfiler(root), True

        def ask(action: str, folder: str | None = None, num_steps: int | None = None) -> bool:
            message = ProfileReq(id="profile", action=action, output_dir=folder, num_steps=num_steps)
            control.observe(message, scheduler.state)
            reply = sent[-1]
            return isinstance(reply, ControlReply) and reply.success

        try:
            said = [ask("start", "../outside"), ask("start", "a/b", 2), ask("start", "c")]
            for _ in range(2):  # steps, which are counted while a trace is to end by itself
                said.append(control.profiler.steps_left is not None)
                if said[-1]:
                    control.profiler.step()
            said += [ask("stop"), ask("start", f"{root}/d"), ask("stop"), ask("pause")]
            said += [ask("start", "1/2/3/4"), ask("stop"), ask("start", "1/2/3/4/5")]
        finally:
            control._send, control.profiler, _LOGGER.disabled = before
        folders = sorted(str(path.parent.relative_to(root)) for path in Path(root).rglob("*.trace.json"))
        made = sorted(str(path.relative_to(root)) for path in Path(root).rglob("*") if path.is_dir())
    if said != [False, True, False, True, True, False, True, True, False, True, True, False]:
        return f"observers: the profiler's messages succeed and fail as {said}"
    right = ["1", "1/2", "1/2/3", "1/2/3/4", "a", "a/b", "d"]
    if folders != ["1/2/3/4", "a/b", "d"] or made != right:
        return f"observers: traces are in {folders} of {made}, they were asked for in a/b, d and 1/2/3/4"
    return ""


def _fails() -> NoReturn:
    raise ValueError("x" * 2 * _MOST_CHARS)


def _live(step: StepRecord) -> dict[str, object]:
    """What ``scheduler.live_steps`` describes."""
    is_decode = step.batch.is_decode
    num_tokens = len(step.rids) if is_decode else step.batch.num_prompt_tokens
    others = [StreamName(name) for name, _ in step.after if name != StreamName.FORWARD.value]
    return {
        "mode": "decode" if is_decode else "extend",
        "reqs": len(step.rids),
        "tokens": num_tokens,
        "done": step.done,
        "in_flight": step.in_flight,
        "published": True,
        "after": [[name.value, pages_edge(StreamName.FORWARD, name).name] for name in others],
        "events": _counts(step.events),
    }


def _counts(events: Sequence[Event]) -> dict[str, object]:
    """How many there were of each kind; none of kinds that there were none of."""
    ended = [event for event in events if isinstance(event, CompletionsEvent)]
    counts: dict[str, object] = {
        "left": Counter(event.why for event in events if isinstance(event, Departure)),
        "retired_pages": sum(len(event.pages) for event in events if isinstance(event, Retirement)),
        "transfers": Counter(kind for event in ended for kind, _, _ in event.transfers),
        "storage": sum(len(event.storage) for event in ended),
    }
    return {name: count for name, count in counts.items() if count}
