"""The flight recorder: what it keeps, what it must not keep, and the file it becomes."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scheduler_driver import Driver, make_driver, make_tiered_driver, request
from token_worker import TokenWorker

from fenceline.config import ConfigError
from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.ipc.io_struct import AbortReq, ControlReply, FlightRecorderReq
from fenceline.model_executor.step import ForwardResult, HeldStep, StepBatch
from fenceline.scheduler import control, flight_dump, flight_recorder
from fenceline.scheduler.flight_dump import OFF, dump_and_log, dump_json, write_dump

PROMPT = [171, 172, 173, 174, 175, 176, 177, 178, 179]


def dump(driver: Driver) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(dump_json(driver.scheduler.recorder, "test"))
    return record


def events(record: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    every = [event for step in record["steps"] for event in step["events"]] + record["events"]
    return [event for event in every if event["event"] == kind]


def test_steps_requests_and_tokens_are_those_of_the_run() -> None:
    driver = make_driver()
    for index in range(3):
        driver.send(request(f"r{index}", [index + 1] * 6, max_new_tokens=9, ignore_eos=True))
    driver.run()
    record = dump(driver)
    assert len(record["steps"]) == driver.worker.num_steps and not record["wrapped"]
    assert record["format"] == "fenceline-flight-recorder" and record["version"] == 3
    told: dict[str, list[int]] = {}
    for step in record["steps"]:
        if step["mode"] == "extend":
            rids = [seq["rid"] for seq in step["seqs"] if seq["sampling"] is not None]
        else:
            rids = record["compositions"][str(step["composition"])]["rids"]
            assert len(step["seq_lens"]) == len(rids)
        for rid, token in zip(rids, step["tokens"], strict=True):
            told.setdefault(rid, []).append(token)
    for rid, answer in driver.answers.items():
        assert told[rid][:9] == answer.output_ids
    assert [step["in_flight"] for step in record["steps"]] == [0] + [1] * (len(record["steps"]) - 1)
    assert record["config"]["page_size"] == 4 and record["config"]["model"]["vocab_size"] == 211
    assert record["reqs"] == []


def test_what_is_recorded_does_not_change_later() -> None:
    """Batches are kept by reference: the lengths of a step are still those it was launched with."""
    driver = make_driver()
    taken: list[tuple[list[int], ...]] = []
    launch = driver.worker.launch

    def spy(batch: Any) -> Any:
        pages = batch.page_writes.pages.tolist()
        taken.append((batch.rows.tolist(), batch.starts.tolist(), batch.seq_lens.tolist(), pages))
        return launch(batch)

    driver.worker.launch = spy
    for index in range(6):
        driver.send(request(f"r{index}", [index + 1] * (3 * index + 1), max_new_tokens=5 + 7 * index))
        driver.step()
    driver.run()
    found = []
    for step in driver.scheduler.recorder.snapshot()[0]:
        batch = step.batch
        pages = batch.page_writes.pages.tolist()
        found.append((batch.rows.tolist(), batch.starts.tolist(), batch.seq_lens.tolist(), pages))
    assert found == taken


def test_the_ring_keeps_the_last_steps_and_nothing_that_is_large() -> None:
    driver = make_driver(flight_recorder_steps=4)
    driver.send(request("long", [1] * 30, max_new_tokens=20, ignore_eos=True))
    driver.run()
    record = dump(driver)
    assert record["wrapped"] and len(record["steps"]) == 4 < driver.worker.num_steps
    assert [step["seq_lens"] for step in record["steps"]] == [[46], [47], [48], [49]]
    for step in driver.scheduler.recorder.snapshot()[0]:
        assert step.batch.after.points == ()


@pytest.mark.parametrize(
    ("params", "flags"),
    [
        ({}, {}),
        ({"logit_bias": dict.fromkeys(range(100), 0.5)}, {}),
        ({"stop_token_ids": tuple(range(1000, 1100))}, {}),
        ({"stop": ("x" * 4000,)}, {}),
        ({"frequency_penalty": 0.5}, {"flight_recorder_prompts": True}),
    ],
    ids=["page tables", "biases", "stop ids", "stop strings", "prompts"],
)
def test_large_requests_shorten_the_ring(
    params: dict[str, object], flags: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size is bounded, whatever is in the steps: the oldest are forgotten, the latest are there."""
    monkeypatch.setattr(flight_recorder, "_MAX_BYTES", 40_000)
    is_short = bool(params) and not flags
    page_size = 16 if flags else 1  # with prompts kept, let them be most of it
    driver = make_driver(400, page_size, context_length=400, chunked_prefill_size=64, **flags)
    recorder = driver.scheduler.recorder
    most = 0
    for index in range(40):
        length = 5 if is_short else 200
        driver.send(request(f"r{index}", [index + 1] * length, max_new_tokens=4, ignore_eos=True, **params))
        driver.step()
        driver.step()
        sizes = {}  # by what is kept: steps of a run share it
        for step in recorder.snapshot()[0]:
            arrays: list[Any] = [step.batch.page_writes.rows, step.batch.page_writes.columns]
            kept: list[tuple[int, int]] = []
            for chunk in step.batch.chunks:
                arrays += [chunk.out_slots, *([chunk.token_ids, *(chunk.history or ())] if flags else [])]
            for sampling in step.batch.sampling if step.batch.chunks else ():
                p = sampling.params
                num = 100 * (len(p.logit_bias or ()) + len(p.stop_token_ids)) + sum(map(len, p.stop))
                kept.append((id(p), num))
            sizes |= {id(array): array.nbytes for array in arrays} | dict(kept)
        most = max(most, sum(sizes.values()))
    driver.run()
    assert 20_000 < most <= 40_000
    record = dump(driver)
    assert record["wrapped"] and 1 < len(record["steps"]) < driver.worker.num_steps
    assert [step["done"] for step in record["steps"]][-1] == driver.worker.num_steps
    assert all(step["tokens"] is not None for step in record["steps"])


@pytest.mark.parametrize("prompts", [False, True])
def test_prompts_only_when_asked_for(prompts: bool) -> None:
    """Neither whole, nor as the token after a chunk, nor as the history of a penalised request."""
    driver = make_driver(page_size=4, chunked_prefill_size=4, flight_recorder_prompts=prompts)
    driver.send(request("r", PROMPT, max_new_tokens=3, ignore_eos=True, frequency_penalty=0.5, stop=("secret",)))
    driver.run()
    record = dump(driver)
    seqs = [seq for step in record["steps"] for seq in step.get("seqs", ())]
    assert [seq["num_tokens"] for seq in seqs] == [4, 4, 1]
    if prompts:
        assert sum((seq["token_ids"] for seq in seqs), []) == PROMPT
        assert [seq["following"] for seq in seqs] == [[175], [179], []] and seqs[-1]["history"][0] == PROMPT
    else:
        assert [seq["token_ids"] for seq in seqs] == [None] * 3
        assert [seq["following"] for seq in seqs] == [[-1], [-1], []] and seqs[-1]["history"][0] == len(PROMPT)
    assert b"secret" not in dump_json(driver.scheduler.recorder, "test"), "stop strings are words"


def test_what_drafts_are_looked_up_in_is_not_kept() -> None:
    """Chunks bring whole prompts again for it, which nobody has asked to keep and no limit counts."""
    driver = make_driver(max_step_tokens=8, speculative_algorithm="NGRAM")
    launch = driver.worker.launch
    num_told: list[int] = []

    def watched(batch: StepBatch) -> ForwardResult | HeldStep:
        num_told.extend([len(chunk.looked_up) for chunk in batch.chunks])
        return launch(batch)

    driver.worker.launch = watched  # type: ignore[method-assign]
    driver.send(request("r", PROMPT, max_new_tokens=3, ignore_eos=True))
    driver.run()
    assert sum(num_told) == len(PROMPT)
    chunks = [chunk for step in driver.scheduler.recorder.snapshot()[0] for chunk in step.batch.chunks]
    assert len(chunks) == len(num_told) and not any(len(chunk.looked_up) for chunk in chunks)


def test_those_that_leave_say_why_and_what_was_held(caplog: pytest.LogCaptureFixture) -> None:
    driver = make_driver(num_pages=12, schedule_conservativeness=0.01, disable_radix_cache=True)
    driver.send(*(request(f"r{i}", [i + 1] * 6, max_new_tokens=20, ignore_eos=True) for i in range(3)))
    driver.run()
    driver.send(request("stops", [9] * 6, max_new_tokens=20, stop_token_ids=tuple(range(211))))
    driver.run()
    driver.send(request("leaves", [8] * 6, max_new_tokens=20, ignore_eos=True))
    driver.step()
    driver.step()
    driver.send(AbortReq(rid="leaves"), request("never", [5] * 6), AbortReq(rid="never"))
    driver.run()
    record = dump(driver)
    why: dict[str, list[str]] = {}
    for event in events(record, "leave"):
        why.setdefault(event["rid"], []).append(event["why"])
        cause = r"memory: a decode step needs \d+ pages, \d+ are available" if event["why"] == "retract" else ""
        assert re.fullmatch(cause, event["cause"])
        assert len(event["pages"]) * 4 >= event["committed_len"] and event["row"] > 0
    assert driver.scheduler.stats.num_retractions > 0
    assert sum(reasons.count("retract") for reasons in why.values()) == driver.scheduler.stats.num_retractions
    retracted = {rid for rid, reasons in why.items() if "retract" in reasons}
    assert set(re.findall("KV cache full: retracted (.*), #", caplog.text)) == retracted, "one at a time"
    assert {reasons[-1] for rid, reasons in why.items() if rid[0] == "r"} == {"length"}
    assert why["stops"] == ["stop"] and why["leaves"] == ["abort"] and "never" not in why
    leased = sum(len(step["page_writes"]["pages"]) for step in record["steps"] if step["page_writes"])
    assert leased == sum(len(event["pages"]) for event in events(record, "retire_pages")), "nothing is cached"


def test_what_a_turn_learns_is_one_value_that_is_recorded() -> None:
    """Results of a prompt that had arrived, and transfers that had ended, are told with the step that came after; a
    turn that learns nothing records nothing."""
    driver = make_tiered_driver(num_pages=40, hicache_write_policy="write_through")
    assert isinstance(driver.worker, TokenWorker)
    asked: list[bool] = []
    driver.worker.is_quick = lambda: bool(asked.append(True)) or len(asked) == 2
    driver.scheduler.config = dataclasses.replace(driver.config, device="cuda")  # a CPU asks for every step's
    drains: list[int] = []
    completions = driver.worker.completions
    driver.worker.completions = lambda awaited: drains.append(len(asked)) or completions(awaited)
    for index in range(2):  # the first prompt's results are late, the second one's have arrived
        driver.send(request(f"r{index}", [index + 1] * 9, max_new_tokens=6, ignore_eos=True))
        num_turns = len(drains)
        while driver.pending or driver.scheduler.reqs or driver.flight is not None:
            driver.step()
            num_turns += 1
            assert len(drains) == num_turns, "once a turn"
    assert len(asked) == 2, "a prompt's results are asked for once, a decode step's not at all"
    record = dump(driver)
    told = events(record, "completions")
    assert [event["results_arrived"] for event in told].count(True) == 1
    ended = [transfer for event in told for transfer in event["transfers"]]
    assert sorted(id for _, id, _ in ended) == list(range(1, len(ended) + 1)) and ended, "each once"
    assert {kind for kind, _, _ in ended} == {"store"}
    assert all(event["results_arrived"] or event["transfers"] for event in told)
    arrived = [s for s in record["steps"] for e in s["events"] if e["event"] == "completions"]
    late = [s["in_flight"] for s in arrived if any(e.get("results_arrived") for e in s["events"])]
    assert late == [0], "published before the next launch"


def test_live_requests_are_told_with_their_pages() -> None:
    driver = make_driver()
    driver.send(request("alive", [3] * 6, max_new_tokens=20, ignore_eos=True))
    for _ in range(4):
        driver.step()
    (req,) = dump(driver)["reqs"]
    assert (req["rid"], req["row"], req["num_prompt_tokens"]) == ("alive", 1, 6)
    assert req["pages"] == list(driver.scheduler.reqs["alive"].pages)
    assert dump(driver)["steps"][-1]["tokens"] is None, "in flight"


def test_off_records_nothing() -> None:
    driver = make_driver(flight_recorder_steps=0)
    driver.send(request("r", [1, 2], max_new_tokens=4), FlightRecorderReq(id="ask"))
    driver.run()
    steps, events = driver.scheduler.recorder.snapshot()
    assert (list(steps), events) == ([], [])
    assert not driver.worker.pages.observers
    assert ControlReply(id="ask", success=False, message=OFF) in driver.replies


def test_asked_for_by_message(tmp_path: Path) -> None:
    driver = make_driver(flight_recorder_dir=str(tmp_path / "dumps"))
    driver.send(request("r", [1, 2], max_new_tokens=4))
    driver.run()
    driver.send(FlightRecorderReq(id="json", form="json"), FlightRecorderReq(id="file"))
    driver.send(FlightRecorderReq(id="trace", form="trace"))
    driver.step()
    replies = {reply.id: reply for reply in driver.replies if isinstance(reply, ControlReply)}
    path = Path(replies["file"].message)
    assert path.parent == tmp_path / "dumps"
    assert json.loads(path.read_text())["steps"] == json.loads(replies["json"].payload)["steps"] != []
    assert json.loads(replies["trace"].payload)["traceEvents"]


def test_a_step_waits_for_no_dump_and_requests_share_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make_driver(flight_recorder_dir=str(tmp_path))
    beside: list[Callable[[], None]] = []
    driver.scheduler.control.run_in_background = beside.append
    dumped, paused = list[bytes](), list[None]()
    monkeypatch.setattr(control, "_let_steps_run", lambda: paused.append(None))
    monkeypatch.setattr(flight_dump, "_PAUSE_BYTES", 1)

    def counted_dump(*args: Any) -> bytes:
        dumped.append(dump_json(*args))
        return dumped[-1]

    monkeypatch.setattr(control, "dump_json", counted_dump)
    driver.send(*(FlightRecorderReq(id=f"early {number}", form="json") for number in range(9)))
    driver.send(request("r", [1, 2], max_new_tokens=4, ignore_eos=True))
    driver.run()
    assert not dumped and len(beside) == 1
    beside.pop()()
    assert len(dumped) == 1
    assert len(paused) == driver.worker.num_steps, "others may run after each byte of this test"
    driver.send(*(FlightRecorderReq(id=f"late {number}", form="file" if number else "json") for number in range(3)))
    driver.step()
    [work] = beside
    work()
    assert len(dumped) == 2 and len(list(tmp_path.iterdir())) == 1
    replies = {reply.id: reply for reply in driver.replies if isinstance(reply, ControlReply)}
    assert {replies[f"early {number}"].payload for number in range(9)} == {dumped[0]}
    assert replies["late 0"].payload == dumped[1]
    assert replies["late 1"].message == replies["late 2"].message != ""
    work()  # for a request that the dump before has answered
    assert len(dumped) == 2


def test_files_are_the_owners_and_never_overwritten(tmp_path: Path) -> None:
    driver = make_driver(flight_recorder_dir=str(tmp_path / "new" / "folder"))
    first, second = (write_dump(driver.scheduler.recorder, "test") for _ in range(2))
    assert first != second and first.exists()
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700


def test_a_dump_that_cannot_be_written_hides_no_other_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    driver = make_driver(flight_recorder_dir=str(blocked))
    with caplog.at_level(logging.ERROR):
        dump_and_log(driver.scheduler.recorder, "the reason")
        dump_and_log(None, "before there was a scheduler")
    (line,) = caplog.messages
    assert line.startswith("flight recorder: no dump could be written (")
    driver.send(FlightRecorderReq(id="file"))
    driver.step()
    reply = next(reply for reply in driver.replies if isinstance(reply, ControlReply))
    assert not reply.success and "could not be written" in reply.message


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shared temporary folder anybody may have made it before us."""
    driver = make_driver(flight_recorder_dir=str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    monkeypatch.setattr(Path, "stat", lambda self, **_: os.stat_result((0o40700, 1, 1, 1, 77, 77, 0, 0, 0, 0)))
    driver.send(FlightRecorderReq(id="file"))
    driver.step()
    reply = next(reply for reply in driver.replies if isinstance(reply, ControlReply))
    assert not reply.success and "belongs to another user" in reply.message


def test_flags() -> None:
    def config(**flags: Any) -> Any:
        return resolve(ServerArgs(model_path="demo", device="cpu", **flags))

    assert config().server_args.flight_recorder_steps == 512 and not config().server_args.flight_recorder_prompts
    assert "fenceline-flight-recorder" in config().flight_recorder_dir
    with pytest.raises(ConfigError, match="--flight-recorder-steps -1"):
        config(flight_recorder_steps=-1)
    with pytest.raises(ConfigError, match="--flight-recorder-dir is empty"):
        config(flight_recorder_dir="")
