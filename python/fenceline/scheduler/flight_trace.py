"""Converts a flight recorder's dump to a trace for Perfetto or chrome://tracing: ``fenceline trace FILE``.

The recorder keeps what was decided and in which order, but no times. The trace's time axis therefore counts steps: each
step is one millisecond long, however long it took. The order of events is real, their durations are not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from fenceline.config.private_files import new_file
from fenceline.memory_order.edges import StreamName, pages_edge
from fenceline.scheduler.flight_dump import read_dump

Json = Mapping[str, Any]

STREAMS, REQUESTS = 1, 2  # the trace's processes; their threads are the rows
_ROWS = {name.value: row for row, name in enumerate(StreamName, 1)}
_HOST, _FORWARD = StreamName.HOST.value, StreamName.FORWARD.value
# Lengths in microseconds of the trace: from one launch to the next, a launch, a step whose results the next launch
# waits for, and any other action of the host. If the host did much between two launches, they are further apart.
_STEP, _LAUNCH, _WAITED, _BRIEF = 1000, 100, 500, 20


def trace_of(dump: Json) -> dict[str, Any]:
    """The dump as a JSON object of the Trace Event Format. The rows of the first process are the streams. Each step is
    a slice on FORWARD, and its end is a Point. A slice on HOST is a launch, a publication of results, a request that
    leaves or a retirement of pages. An arrow means that its end waited for its start: a step waited for the Points of
    the memory that it reuses (the arrow has the edge's name), or the host for results. The second process has a row for
    each request, named by its id."""
    return {"traceEvents": list(itertools.chain.from_iterable(_Trace(dump).parts())), **_about(dump)}


def trace_json(dump: Json, pause: Callable[[], object]) -> bytes:
    """:func:`trace_of` as JSON. ``pause`` is called after each step, so that it can let other threads run."""
    encoded: list[bytes] = []
    for part in _Trace(dump).parts():
        if part:
            encoded.append(orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1])
            pause()
    return b"".join((b'{"traceEvents":[', b",".join(encoded), b"],", orjson.dumps(_about(dump))[1:]))


def _about(dump: Json) -> dict[str, Any]:
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "reason": dump["reason"],
            "created": dump["created"],
            "server_version": dump["server_version"],
            "earlier steps are unknown": dump["wrapped"],
            "time": "1 ms is one step: a flight recorder keeps the order of events, not when they were",
        },
    }


class _Trace:
    """Makes the events of the trace of ``dump``."""

    def __init__(self, dump: Json) -> None:
        self._events: list[dict[str, Any]] = []  # of the part that is being made
        self._dump, self._steps = dump, dump["steps"]
        self._request_rows: dict[str, int] = {}
        self._point_ends: dict[tuple[str, int], int] = {}  # (stream, serial) -> when its slice ends
        self._num_arrows = 0
        self._launch_time = 0  # when the last step was launched
        self._host_time = 0  # when the last slice on HOST's row ends
        self._num_published = 0

    def parts(self) -> Iterator[list[dict[str, Any]]]:
        """All events, in parts. Each part has the events of one step and of the host before it; the last one has what
        the host did after the last step."""
        self._name_process(STREAMS, "streams")
        self._name_process(REQUESTS, "requests")
        for name, row in _ROWS.items():
            self._name_row(STREAMS, row, name.upper())
        for number, step in enumerate(self._steps):
            self._between_launches(step["events"], number - step["in_flight"])
            if number:
                self._launch_time = max(self._launch_time + _STEP, self._host_time + _BRIEF)
            self._step(number, step)
            yield self._take()
        num_done = sum(step["tokens"] is not None for step in self._steps)
        self._between_launches(self._dump["events"], num_done)
        yield self._take()

    def _take(self) -> list[dict[str, Any]]:
        events, self._events = self._events, []
        return events

    def _between_launches(self, events: Sequence[Json], num_published: int) -> None:
        """Add what the host did after the last launch: publishing steps up to ``num_published``, and ``events``."""
        while self._num_published < num_published:
            self._publish(self._num_published)
            self._num_published += 1
        for event in events:
            if event["event"] == "leave":
                start = self._host(f"{event['rid']} leaves: {event['why']}", event)
                self._instant(REQUESTS, self._request_row(event["rid"]), start, event["why"], event)
            elif event["event"] == "retire_pages":
                self._host(f"retire {len(event['pages'])} pages", event)
            else:
                self._completions(event)

    def _publish(self, number: int) -> None:
        done = self._steps[number]["done"]
        self._host_time = max(self._host_time, self._point_ends[_FORWARD, done])
        start = self._host(f"publish step {number}", {"tokens": self._steps[number]["tokens"]})
        self._arrow("results", (_FORWARD, done), _HOST, start)

    def _completions(self, event: Json) -> None:
        """Add transfers and storage jobs that have ended and were noticed by the host."""
        for kind, number, num_pages in event.get("transfers", ()):
            start = self._host(f"{kind} {number} has ended", {"pages": num_pages})
            self._slice(STREAMS, _ROWS[kind], start - _BRIEF, _BRIEF, f"{kind} {number}", {"pages": num_pages})
        if event.get("storage"):
            self._host("storage jobs have ended", {"jobs": event["storage"]})

    def _step(self, number: int, step: Json) -> None:
        facts = list(self._facts(step))
        tokens = sum(num for _, num, _ in facts)
        what = f"{step['mode']} {len(facts)} requests, {tokens} tokens"
        told = {key: step[key] for key in ("after", "done", "passed", "in_flight", "page_writes")}
        launch, start = self._launch_time, self._launch_time + _LAUNCH
        self._host_time = start
        self._slice(STREAMS, _ROWS[_HOST], launch, _LAUNCH, f"launch step {number}", told)
        for stream, serial in step["after"].items():
            self._take_over(number, stream, serial)
        args = {"step": number, "requests": [rid for rid, _, _ in facts], **told}
        # If the next launch does not wait for this step's results, the step runs until then.
        overlaps = number + 1 < len(self._steps) and self._steps[number + 1]["in_flight"] > 0
        end = start + (_STEP - _BRIEF if overlaps else _WAITED)
        self._slice(STREAMS, _ROWS[_FORWARD], start, end - start, what, args)
        self._mark_point(_FORWARD, step["done"], end)
        for rid, num, args in facts:
            name = f"{step['mode']} {num} tokens" if step["mode"] == "extend" else step["mode"]
            self._slice(REQUESTS, self._request_row(rid), start, end - start, name, {"step": number, **args})

    def _facts(self, step: Json) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """For each request in the step: its id, the number of tokens computed for it, and further arguments."""
        sampled = iter(() if step["tokens"] is None else step["tokens"])
        if step["mode"] == "extend":
            for seq in step["seqs"]:
                token = next(sampled, None) if seq["sampling"] is not None else None
                facts = {"row": seq["row"], "prefix_len": seq["prefix_len"], "token": token}
                yield seq["rid"], seq["num_tokens"], facts
            return
        batch = self._dump["compositions"][str(step["composition"])]
        for rid, row, seq_len in zip(batch["rids"], batch["rows"], step["seq_lens"], strict=True):
            yield rid, 1, {"row": row, "seq_len": seq_len, "token": next(sampled, None)}

    def _take_over(self, number: int, stream: str, serial: int) -> None:
        """Add an arrow to the step, which reuses memory that ``stream`` accessed before its Point ``serial``."""
        start = self._launch_time + _LAUNCH
        if stream == _FORWARD:
            # Not every Point of FORWARD ends a step: the arrow starts at the last step that ends at or before it.
            ends = [step["done"] for step in self._steps[:number] if step["done"] <= serial]
            if ends:
                self._arrow(f"reuses memory after forward {serial}", (_FORWARD, ends[-1]), _FORWARD, start)
            return
        # Operations of other streams are not recorded: a short slice stands for them.
        if (stream, serial) not in self._point_ends:
            end = self._launch_time
            self._slice(STREAMS, _ROWS[stream], end - _BRIEF, _BRIEF, f"until {serial}", {})
            self._mark_point(stream, serial, end)
        edge = pages_edge(StreamName.FORWARD, StreamName(stream))
        self._arrow(edge.name, (stream, serial), _FORWARD, start)

    def _mark_point(self, stream: str, serial: int, end: int) -> None:
        self._point_ends[stream, serial] = end
        self._instant(STREAMS, _ROWS[stream], end, f"Point {stream} {serial}", {"serial": serial})

    def _host(self, name: str, args: Json) -> int:
        """Add a short slice at the end of HOST's row. Returns its start time."""
        start, self._host_time = self._host_time, self._host_time + _BRIEF
        self._slice(STREAMS, _ROWS[_HOST], start, _BRIEF, name, args)
        return start

    def _request_row(self, rid: str) -> int:
        row = self._request_rows.get(rid)
        if row is None:
            row = self._request_rows[rid] = len(self._request_rows) + 1
            self._name_row(REQUESTS, row, rid)
        return row

    # --- events of the format

    def _slice(self, pid: int, tid: int, start: int, length: int, name: str, args: Json) -> None:
        event = {"ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": length, "name": name}
        self._events.append({**event, "args": dict(args)})

    def _instant(self, pid: int, tid: int, when: int, name: str, args: Json) -> None:
        event = {"ph": "i", "pid": pid, "tid": tid, "ts": when, "s": "t", "name": name}
        self._events.append({**event, "args": dict(args)})

    def _arrow(self, name: str, source: tuple[str, int], stream: str, start: int) -> None:
        """Add an arrow from the slice that ends at the Point ``source`` (stream, serial) to the slice of ``stream``
        that starts at ``start``."""
        stream_of, _ = source
        self._num_arrows += 1
        common = {"cat": "edge", "id": self._num_arrows, "name": name, "pid": STREAMS}
        end = self._point_ends[source]
        self._events.append({"ph": "s", "tid": _ROWS[stream_of], "ts": end - 1, **common})
        self._events.append({"ph": "f", "bp": "e", "tid": _ROWS[stream], "ts": start, **common})

    def _name_process(self, pid: int, name: str) -> None:
        for kind, value in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": pid})):
            self._events.append({"ph": "M", "pid": pid, "tid": 0, "name": kind, "args": value})

    def _name_row(self, pid: int, row: int, name: str) -> None:
        for kind, value in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": row})):
            self._events.append({"ph": "M", "pid": pid, "tid": row, "name": kind, "args": value})


def write_trace(file: Path, output: Path | None) -> Path:
    """Write the trace of the dump ``file`` to ``output``, or beside the dump under its name with ``.trace.json``.
    Returns where it is. Raises ValueError, one line, if ``file`` is no dump, and OSError if nothing can be written."""
    output = output or file.with_suffix(".trace.json")
    trace = trace_of(read_dump(file))
    with new_file(str(output)) as path:
        Path(path).write_bytes(orjson.dumps(trace))
    return output
