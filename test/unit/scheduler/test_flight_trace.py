"""Traces made of flight recorders' files: whole by the format's rules, and true to what was recorded."""

from __future__ import annotations

import json
import os
import stat
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import pytest
from demo_requests import greedy_requests
from scheduler_driver import Driver, answers, make_driver, make_model_driver, make_tiered_driver, request

from fenceline.cli import main
from fenceline.ipc.io_struct import AbortReq
from fenceline.memory_order import open_device
from fenceline.scheduler import flight_dump
from fenceline.scheduler.flight_dump import VERSION, dump_json, dump_of_last
from fenceline.scheduler.flight_recorder import FlightRecorder
from fenceline.scheduler.flight_trace import REQUESTS, STREAMS, trace_json, trace_of
from fenceline_proof.steps import Loop, make_config
from fenceline_proof.workloads import WORKLOADS

Event = dict[str, Any]


def dump_of(recorder: FlightRecorder) -> dict[str, Any]:
    dump: dict[str, Any] = json.loads(dump_json(recorder, "test"))
    return dump


def rows_of(events: list[Event], pid: int) -> dict[str, int]:
    return {
        event["args"]["name"]: event["tid"]
        for event in events
        if (event["ph"], event["name"], event["pid"]) == ("M", "thread_name", pid)
    }


def slices_of(events: list[Event], pid: int, row: str) -> list[Event]:
    tid = rows_of(events, pid)[row]
    return [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == (pid, tid)]


def arrows_of(events: list[Event]) -> list[tuple[str, Event, Event]]:
    """(name, the slice that an arrow leaves, the slice that it reaches)."""
    slices = [event for event in events if event["ph"] == "X"]

    def enclosing(flow: Event) -> Event:
        (found,) = [
            event
            for event in slices
            if (event["pid"], event["tid"]) == (flow["pid"], flow["tid"])
            and event["ts"] <= flow["ts"] < event["ts"] + event["dur"]
        ]
        return found

    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = [event for event in events if event["ph"] == "f"]
    assert sorted(starts) == sorted(end["id"] for end in ends), "each arrow has two ends"
    return [(end["name"], enclosing(starts[end["id"]]), enclosing(end)) for end in ends]


def check_format(trace: dict[str, Any]) -> list[Event]:
    """The rules of the Trace Event Format that viewers rely on; the events."""
    trace = json.loads(json.dumps(trace))
    events: list[Event] = trace["traceEvents"]
    named = {pid: rows_of(events, pid) for pid in (STREAMS, REQUESTS)}
    taken: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        assert event["ph"] in "MXisf" and isinstance(event["name"], str) and event["name"]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["args"].keys() <= {"name", "sort_index"}
            continue
        assert event["tid"] in named[event["pid"]].values(), "every row has a name"
        assert isinstance(event["ts"], int) and event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] > 0
            taken[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "i":
            assert event["s"] == "t"
        else:
            assert event["cat"] and event.get("bp", "e") == "e"
    for spans in taken.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False)), "no overlap"
    for _, source, target in arrows_of(events):
        assert source["ts"] + source["dur"] <= target["ts"], "no arrow points back"
    return events


def check_content(dump: dict[str, Any]) -> list[Event]:
    """Every step, token, Point, edge and leaving request of the dump is in its trace, once; the trace's events."""
    events = check_format(trace_of(dump))
    steps = slices_of(events, STREAMS, "FORWARD")
    assert [step["args"]["step"] for step in steps] == list(range(len(dump["steps"])))
    told: dict[str, list[int]] = defaultdict(list)
    for rid in rows_of(events, REQUESTS):
        for event in slices_of(events, REQUESTS, rid):
            assert steps[event["args"]["step"]]["ts"] == event["ts"]
            told[rid] += [] if event["args"]["token"] is None else [event["args"]["token"]]
    assert sum(map(len, told.values())) == sum(len(step["tokens"] or ()) for step in dump["steps"])
    points = {event["name"] for event in events if event["ph"] == "i" and event["pid"] == STREAMS}
    assert {f"Point forward {step['done']}" for step in dump["steps"]} <= points
    arrows = arrows_of(events)
    for number, step in enumerate(dump["steps"]):
        found = {source["tid"] for name, source, target in arrows if target is steps[number]}
        rows = rows_of(events, STREAMS)
        told_of = {stream for stream in step["after"] if stream != "forward"}
        assert {rows[stream.upper()] for stream in told_of} <= found
    published = [source for name, source, _ in arrows if name == "results"]
    assert published == [steps[i] for i, step in enumerate(dump["steps"]) if step["tokens"] is not None]
    every = [event for step in dump["steps"] for event in step["events"]] + dump["events"]
    gone = [(event["rid"], event["why"]) for event in every if event["event"] == "leave"]
    names = {tid: rid for rid, tid in rows_of(events, REQUESTS).items()}
    shown = [event for event in events if event["ph"] == "i" and event["pid"] == REQUESTS]
    assert [(names[event["tid"]], event["name"]) for event in shown] == gone
    return events


def test_the_demo_models_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command line, as users do."""
    driver = make_model_driver(chunked_prefill_size=32)
    reqs = greedy_requests(8)
    outputs = answers(driver, reqs)
    file = tmp_path / "flight.json"
    file.write_bytes(dump_json(driver.scheduler.recorder, "test"))
    for flags, written in (((), "flight.trace.json"), (("--output", str(tmp_path / "t.json")), "t.json")):
        with pytest.raises(SystemExit) as ended:
            main(["trace", str(file), *flags])
        assert ended.value.code == 0 and written in capsys.readouterr().out
        assert json.loads((tmp_path / written).read_text()) == trace_of(json.loads(file.read_text()))
        assert stat.S_IMODE((tmp_path / written).stat().st_mode) == 0o600
    with pytest.raises(SystemExit):
        main(["trace", str(file), "--output", os.devnull])
    assert not Path(os.devnull).is_file()
    events = check_content(json.loads(file.read_text()))
    assert list(rows_of(events, REQUESTS)) == [req.rid for req in reqs]
    for req, output in zip(reqs, outputs, strict=True):
        slices = slices_of(events, REQUESTS, req.rid)
        extends = [event["name"] for event in slices if event["name"] != "decode"]
        assert sum(int(name.split()[1]) for name in extends) >= len(req.input_ids) - 16
        assert [e["args"]["token"] for e in slices if e["args"]["token"] is not None][:8] == output
    overlapping = [event["name"] for event in slices_of(events, STREAMS, "HOST")]
    assert overlapping.index("launch step 2") > overlapping.index("publish step 0") and overlapping


@pytest.mark.parametrize("name", ["mixed", "swap"])
def test_a_run_on_the_virtual_gpu(name: str) -> None:
    scenario = WORKLOADS[name].make(Random(3))
    loop = Loop(make_config({**scenario.flags}, "vgpu"), open_device("vgpu"), scenario=scenario)
    loop.run()
    check_content(dump_of(loop.scheduler.recorder))


def test_steps_that_take_over_pages_say_by_which_edge() -> None:
    driver = make_tiered_driver(num_pages=24)
    for index in range(6):
        driver.send(request(f"r{index}", [index + 1] * 40, max_new_tokens=6, ignore_eos=True))
        driver.run()
    dump = dump_of(driver.scheduler.recorder)
    assert any("store" in step["after"] for step in dump["steps"])
    names = {name for name, _, _ in arrows_of(check_content(dump))}
    assert "forward_after_store" in names and "results" in names


def busy_driver() -> Driver:
    """Chunks, retractions, an abort, and many that leave between two launches."""
    driver = make_driver(num_pages=60, num_rows=64, schedule_conservativeness=0.01, disable_radix_cache=True)
    driver.send(*(request(f"r{i}", [i + 1] * 3, max_new_tokens=9, ignore_eos=True) for i in range(50)))
    driver.step()
    driver.step()
    driver.send(AbortReq(rid="r7"))
    driver.run()
    return driver


def test_retractions_aborts_and_many_that_leave_at_once() -> None:
    driver = busy_driver()
    assert driver.scheduler.stats.num_retractions > 0
    events = check_content(dump_of(driver.scheduler.recorder))
    assert {e["name"] for e in events if e["ph"] == "i" and e["pid"] == REQUESTS} == {"length", "abort", "retract"}


def test_a_ring_that_has_wrapped_and_steps_in_flight() -> None:
    driver = make_driver(flight_recorder_steps=5)
    driver.send(request("a", [1] * 30, max_new_tokens=40, ignore_eos=True))
    for _ in range(20):
        driver.step()
    dump = dump_of(driver.scheduler.recorder)
    assert dump["wrapped"] and dump["steps"][-1]["tokens"] is None
    check_content(dump)
    assert trace_of(dump)["otherData"]["earlier steps are unknown"] is True


@pytest.mark.parametrize("last", [1, 7, 1000])
def test_the_last_steps_of_a_running_scheduler_without_a_file(last: int) -> None:
    recorder = busy_driver().scheduler.recorder
    paused: list[None] = []
    trace = json.loads(trace_json(dump_of_last(recorder, "test", last), lambda: paused.append(None)))
    events = check_format(trace)
    launches = [event for event in slices_of(events, STREAMS, "HOST") if event["name"].startswith("launch")]
    num_kept = len(list(recorder.snapshot()[0]))
    assert len(launches) == min(last, num_kept) and len(paused) >= len(launches)
    if last > num_kept:
        expected = trace_of(dump_of(recorder))
        expected["otherData"]["created"] = trace["otherData"]["created"]
        assert trace == expected, "all there is"
    assert trace["otherData"]["earlier steps are unknown"] is (last < num_kept)


def test_no_steps_at_all() -> None:
    assert check_content(dump_of(make_driver().scheduler.recorder))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "not a flight recorder's dump"),
        ('{"format": "fenceline-flight-recorder", "version": 99}', "version 99 of the format"),
        (f'{{"format": "fenceline-flight-recorder", "version": {VERSION}}}', "not a whole dump (compositions,"),
    ],
)
def test_other_files_are_refused_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    monkeypatch.setattr(flight_dump, "_MAX_BYTES", 1 << 16)
    for path in (file, tmp_path / "missing.json", Path("/dev/zero")):
        with pytest.raises(SystemExit) as ended:
            main(["trace", str(path)])
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("fenceline trace: ") and any(
            word in line for word in (words, "cannot be read", "longer than")
        )
    assert not file.with_suffix(".trace.json").exists()
