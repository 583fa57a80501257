"""The last steps in counts: true to what was recorded, small whatever the batch, and nobody's words."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from scheduler_driver import Driver, make_driver, make_tiered_driver, request

from fenceline.ipc.io_struct import AbortReq, ControlReply, GetInternalStateReq
from fenceline.memory_order.edges import StreamName, pages_edge
from fenceline.scheduler.control import live_steps
from fenceline.scheduler.flight_dump import dump_json


def told(driver: Driver, num_steps: int = 1000) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(live_steps(driver.scheduler.recorder, num_steps))
    return record


def mixed_driver(num_reqs: int = 12) -> Driver:
    driver = make_driver(num_pages=num_reqs * 24, num_rows=num_reqs + 2)
    driver.send(*(request(f"secret{i}", [i % 7 + 1] * 5, max_new_tokens=9, ignore_eos=True) for i in range(num_reqs)))
    driver.step()
    driver.step()
    driver.send(AbortReq(rid="secret3"))
    driver.run()
    return driver


def test_counts_are_those_of_the_dump() -> None:
    driver = mixed_driver()
    steps, dump = told(driver)["steps"], json.loads(dump_json(driver.scheduler.recorder, "test"))
    assert len(steps) == len(dump["steps"]) > 9
    for step, full in zip(steps, dump["steps"], strict=True):
        assert (step["mode"], step["done"], step["in_flight"]) == (full["mode"], full["done"], full["in_flight"])
        assert step["published"] is (full["tokens"] is not None)
        if full["mode"] == "extend":
            assert step["reqs"] == len(full["seqs"])
            assert step["tokens"] == sum(seq["num_tokens"] for seq in full["seqs"])
        else:
            assert step["reqs"] == step["tokens"] == len(full["seq_lens"])
        whys = [event["why"] for event in full["events"] if event["event"] == "leave"]
        assert step["events"].get("left", {}) == {why: whys.count(why) for why in set(whys)}
        pages = [event["pages"] for event in full["events"] if event["event"] == "retire_pages"]
        assert step["events"].get("retired_pages", 0) == sum(map(len, pages))
    left = [part["events"].get("left", {}) for part in (*steps, told(driver))]
    assert sum(one.get("abort", 0) for one in left) == 1
    assert sum(one.get("length", 0) for one in left) == 11


def test_the_last_ones_and_no_more() -> None:
    driver = mixed_driver()
    assert told(driver, 3)["steps"] == told(driver)["steps"][-3:]


def test_neither_ids_nor_tokens_nor_the_batch_s_size_matter() -> None:
    record = live_steps(mixed_driver(60).scheduler.recorder, 8)
    assert b"secret" not in record and len(record) < 8 * 250
    step = orjson.loads(record)["steps"][0]
    assert step["reqs"] == 59
    assert all(isinstance(value, int | str) or name in ("after", "events") for name, value in step.items())


def test_transfers_and_the_edges_that_take_over_their_pages() -> None:
    driver = make_tiered_driver(num_pages=24)
    for index in range(6):
        driver.send(request(f"r{index}", [index + 1] * 40, max_new_tokens=6, ignore_eos=True))
        driver.run()
    steps = told(driver)["steps"]
    edge = pages_edge(StreamName.FORWARD, StreamName.STORE).name
    assert ["store", edge] in [after for step in steps for after in step["after"]]
    assert any(step["events"].get("transfers", {}).get("store", 0) > 0 for step in steps)


@pytest.mark.parametrize("num_steps", [0, 2])
def test_asked_for_with_the_state(num_steps: int) -> None:
    driver = mixed_driver()
    driver.send(GetInternalStateReq(id="s", num_steps=num_steps))
    driver.step()
    [reply] = [reply for reply in driver.replies if isinstance(reply, ControlReply)]
    assert reply.state is not None and reply.state.num_generated_tokens > 0
    assert len(json.loads(reply.payload)["steps"]) == 2 if num_steps else reply.payload == b""


def test_a_recorder_that_is_off() -> None:
    driver = make_driver(flight_recorder_steps=0)
    driver.send(request("r", [1, 2], max_new_tokens=4))
    driver.run()
    assert told(driver) == {"steps": [], "events": {}}
