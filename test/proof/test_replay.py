"""A flight recorder's dump runs again on the virtual GPU: silent if the engine is whole, by name if an edge is cut."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from trace_runner import record_steps

from fenceline.mem_cache.transfer import TransferKind
from fenceline.memory_order import Points, open_device
from fenceline.memory_order.edges import HOST_AFTER_FORWARD, RING_EDGES
from fenceline.scheduler.flight_dump import VERSION, dump_json
from fenceline_proof.everything import EVERYTHING
from fenceline_proof.hicache_workloads import HICACHE_WORKLOADS
from fenceline_proof.recording import read_recording
from fenceline_proof.replay import main, replay
from fenceline_proof.speculative_workloads import SPECULATIVE_WORKLOADS
from fenceline_proof.steps import Loop, make_config
from fenceline_proof.workloads import SCRIPTED, WORKLOADS

torch.set_num_threads(1)

TIERED = [workload.name for workload in (*HICACHE_WORKLOADS, EVERYTHING)]
SPECULATIVE = [workload.name for workload in SPECULATIVE_WORKLOADS]
NAMES = [  # recordings hold no weights; some of pictures speculate
    name for name in SCRIPTED if name not in ("growth", "new_weights", "pictures", *TIERED, *SPECULATIVE)
]
MIXED = NAMES[::2]  # run with prompts and decoding in one step


class RecordedLoop(Loop):
    """``taken``: the steps that were launched."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.taken = record_steps(self.runner)


def run(name: str, seed: int = 3, **flags: int | bool) -> RecordedLoop:
    scenario = WORKLOADS[name].make(Random(seed))
    config = make_config({**scenario.flags, **flags}, "cpu")
    loop = RecordedLoop(config, open_device("cpu"), scenario=scenario)
    # Steps overlap, as on a GPU.
    loop.scheduler.config = dataclasses.replace(config, device="vgpu")
    loop.run()
    return loop


def dump(loop: Loop, folder: Path) -> Path:
    path = folder / "flight.json"
    path.write_bytes(dump_json(loop.scheduler.recorder, "test"))
    return path


def edited(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def test_a_recording_is_the_decisions_that_were_taken(tmp_path: Path) -> None:
    """With prompts even the tokens are the recorded ones."""
    num_mixed = 0
    for name in NAMES:
        flags = {"enable_mixed_chunk": name in MIXED}
        loop = run(name, flight_recorder_prompts=True, disable_cuda_graph=True, **flags)
        num_mixed += loop.scheduler.stats.num_mixed_steps
        recording = read_recording(dump(loop, tmp_path))
        assert recording.problems == () and recording.page_table == {} and not recording.wrapped
        assert len(recording.steps) == len(loop.taken) > 5
        for step, taken in zip(recording.steps, loop.taken, strict=True):
            for field in ("rows", "columns", "pages"):
                found, expected = (getattr(b.page_writes, field) for b in (step.batch, taken.batch))
                assert found.tolist() == expected.tolist()
            assert step.batch.is_decode == taken.batch.is_decode
            for column in ("rows", "starts", "seq_lens", "samples", "constrained"):
                assert getattr(step.batch, column).tolist() == getattr(taken.batch, column).tolist()
            for found, expected in zip(step.batch.chunks, taken.batch.chunks, strict=True):
                for column in ("token_ids", "out_slots"):
                    assert getattr(found, column).tolist() == getattr(expected, column).tolist()
    assert num_mixed > 10


@pytest.mark.parametrize("name", NAMES[::3])
def test_a_wrapped_ring_starts_in_the_middle(name: str, tmp_path: Path) -> None:
    loop = run(name, flight_recorder_steps=6, enable_mixed_chunk=name in MIXED)
    recording = read_recording(dump(loop, tmp_path))
    assert recording.wrapped and len(recording.steps) == 6 < len(loop.taken)
    assert recording.problems == ()
    assert replay(recording, seed=1).verdict is None


def test_page_tables_of_what_was_forgotten_are_those_of_then(tmp_path: Path) -> None:
    """The engine in the middle of its work: rows that are alive and rows that have left since the ring began."""
    num_rows = 0
    for seed in range(4):
        scenario = WORKLOADS["mixed"].make(Random(seed))
        config = make_config({**scenario.flags, "flight_recorder_steps": 4}, "cpu")
        loop = RecordedLoop(config, open_device("cpu"), scenario=scenario)
        while loop.step_no < 14:
            loop.step()
        path = dump(loop, tmp_path)
        recording = read_recording(path)
        for row, pages in recording.page_table.items():
            written = {}
            for step in loop.taken:
                writes = step.batch.page_writes
                of_row = writes.rows == row
                columns, ids = writes.columns[of_row].tolist(), writes.pages[of_row].tolist()
                written |= dict(zip(columns, ids, strict=True))
            assert pages == [written[column] for column in range(len(pages))]
        num_rows += len(recording.page_table)
        assert main([str(path), "--seeds", "1"]) == 0
    assert num_rows > 3


# A replay has no host tier, and only beside one does FORWARD write to the host.
REPLAYED = [edge.name for edge in RING_EDGES if edge is not HOST_AFTER_FORWARD]


@pytest.mark.parametrize("edge", REPLAYED)
def test_a_severed_edge_is_reported_by_name(edge: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = dump(run("staging"), tmp_path)
    assert main([str(path), "--seeds", "2", "--sever", edge]) == 1
    out = capsys.readouterr().out
    assert "happens-before" in out and f"missing edge: {edge}" in out
    command = out[out.index("repeat: ") :].split()[4:]
    assert main(command) == 1
    assert out[out.index("race:") :] == (again := capsys.readouterr().out)[again.index("race:") :]


def test_a_huge_pool_is_replayed_with_the_pages_in_use(tmp_path: Path) -> None:
    path = dump(run("prefixes"), tmp_path)
    record = json.loads(path.read_text())
    size, far = record["config"]["page_size"], 1_000_000
    for step in record["steps"]:
        if step["page_writes"]:
            step["page_writes"]["pages"] = [page + far for page in step["page_writes"]["pages"]]
        for seq in step.get("seqs", ()):
            seq["out_slots"] = [slot + far * size for slot in seq["out_slots"]]
        for event in step["events"]:
            if "pages" in event:
                event["pages"] = [page + far for page in event["pages"]]
    recording = read_recording(edited(path, steps=record["steps"], num_pages=2 * far))
    assert recording.num_pages < 100 and recording.recorded_pages == 2 * far
    assert replay(recording, seed=0).verdict is None


def test_a_page_used_after_it_was_retired_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = dump(run("mixed"), tmp_path)
    steps = json.loads(path.read_text())["steps"]
    at = next(i for i, s in enumerate(steps) if i > 0 and s["mode"] == "decode" and not s["page_writes"])
    written = [page for step in steps[:at] if step["page_writes"] for page in step["page_writes"]["pages"]]
    steps[at]["events"].append({"event": "retire_pages", "pages": written, "after": {}})
    assert main([str(edited(path, steps=steps)), "--seeds", "1"]) == 1
    out = capsys.readouterr().out
    assert f"in the recording itself: step {at}: " in out and "which are retired" in out


@pytest.mark.parametrize("name", ["conversations", "offload"])
def test_steps_of_an_engine_with_tiers_run_without_transfers(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = run(name)
    assert loop.runner.hicache is not None and loop.runner.hicache.counts[TransferKind.STORE].num_transfers
    path = dump(loop, tmp_path)
    assert len(read_recording(path).steps) == len(loop.taken)
    assert main([str(path), "--seeds", "4"]) == 0
    out = capsys.readouterr().out
    assert "host tier's transfers are not recorded" in out and "every checker is silent" in out


@pytest.mark.parametrize("name", SPECULATIVE)
def test_steps_that_speculated_are_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(dump(run(name), tmp_path))]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "--speculative-algorithm" in err and "cannot be replayed" in err


def test_only_the_last_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = dump(run("mixed"), tmp_path)
    assert main([str(path), "--seeds", "1", "--last", "5", "--policy", "laziest"]) == 0
    assert "5 steps" in capsys.readouterr().out


def test_what_is_no_dump_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = dump(run("mixed"), tmp_path)
    assert main([str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    for version in (2, 99):
        assert main([str(edited(path, version=version))]) == 2
        assert f"version {version} of the format; this program reads {VERSION}" in capsys.readouterr().err
    assert main([str(edited(path, version=VERSION, steps=[]))]) == 2
    assert "holds no steps" in capsys.readouterr().err
    path.write_text("[]")
    assert main([str(path)]) == 2
    path.write_text("{")
    assert main([str(path)]) == 2
    assert "not JSON" in capsys.readouterr().err


def test_points_of_memory_are_those_of_the_replay(tmp_path: Path) -> None:
    """What a step was given came after an earlier step's end; the replay hands over its own Point of that step."""
    loop = run("aborts")
    path = dump(loop, tmp_path)
    steps = json.loads(path.read_text())["steps"]
    steps[2]["after"] = {"forward": steps[0]["done"]}
    recording = read_recording(edited(path, steps=steps))
    assert dict(recording.steps[2].after) == {"forward": steps[0]["done"]}
    assert replay(recording, seed=2).verdict is None
    assert recording.steps[2].batch.after == Points.none()
    assert np.all([step.in_flight <= 1 for step in recording.steps])
