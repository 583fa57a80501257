"""Orders of events that once broke the scheduler, and the rules that keep them from doing so again."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from recording_device import LaggingStream
from scheduler_driver import Driver, assert_right, expected_output, make_driver, request
from token_worker import TokenResult

from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.ipc.io_struct import (
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
    TokenizedGenerateReq,
)
from fenceline.memory_order import Points, Stream
from fenceline.memory_order.checker import OrderError
from fenceline.memory_order.edges import Hazard, StreamName
from fenceline.memory_order.lease import LeaseError
from fenceline.model_executor.step import StepBatch
from fenceline.scheduler import control as scheduler_control
from fenceline.scheduler.control import StepProfiler
from fenceline.scheduler.request_memory import RequestMemory
from fenceline.scheduler.stats import SchedulerStats


def reply(driver: Driver, id: str) -> ControlReply:
    return next(r for r in driver.replies if isinstance(r, ControlReply) and r.id == id)


def steps(driver: Driver, count: int) -> None:
    for _ in range(count):
        driver.step()


# --- memory that is on its way back -----------------------------------------------------------------


def two_running(num_pages: int, first: TokenizedGenerateReq, second: TokenizedGenerateReq) -> Driver:
    """Both are admitted, although the pool cannot hold both to their ends."""
    driver = make_driver(num_pages=num_pages, page_size=1, num_rows=2, schedule_conservativeness=0.01)
    driver.send(first)
    steps(driver, 2)
    driver.send(second)
    steps(driver, 2)
    assert first.rid in driver.scheduler.reqs
    assert driver.scheduler.reqs[second.rid].row
    return driver


@pytest.mark.parametrize("num_pages", range(20, 27))
def test_memory_of_a_last_token_in_flight_is_waited_for(num_pages: int) -> None:
    """The pool is full, one of two requests has its last step in flight: the other cannot grow yet."""
    long = request("long", [2] * 5, max_new_tokens=15, ignore_eos=True)
    short = request("short", [1] * 5, max_new_tokens=6, ignore_eos=True)
    driver = two_running(num_pages, long, short)
    driver.run()
    assert_right(driver, short, long)
    if num_pages == 23:
        assert driver.scheduler.stats.num_retractions == 0, "what is about to be free retracts nobody"


@pytest.mark.parametrize("silent", [False, True])
def test_memory_of_an_aborted_request_is_back_at_once(silent: bool) -> None:
    stays = request("stays", [2] * 5, max_new_tokens=15, ignore_eos=True)
    gone = request("gone", [1] * 5, max_new_tokens=9, ignore_eos=True)
    driver = two_running(21, stays, gone)
    while driver.worker.pages.num_free:
        driver.step()
    assert driver.scheduler.stats.num_retractions == 0, "the pool is just full"
    driver.send(AbortReq(rid="gone", silent=silent))
    driver.run()
    assert_right(driver, stays)
    assert driver.scheduler.stats.num_retractions == 0, "the abort freed all that was needed"


def test_pages_of_a_prefix_wait_for_its_last_reader() -> None:
    """A reader of cached pages leaves with a step in flight, and another request evicts them at once."""
    driver = make_driver(num_pages=6, page_size=4, num_rows=2)
    driver.send(request("warm", [1] * 12, max_new_tokens=1))
    driver.run()
    waits = request("waits", [3] * 15, max_new_tokens=2, ignore_eos=True)
    driver.send(request("reader", [1] * 12 + [2], max_new_tokens=9, ignore_eos=True), waits)
    steps(driver, 2)
    assert driver.scheduler.waiting, "the reader's prefix is in the way"
    assert driver.answers["reader"].last.cached_tokens == 12
    driver.send(AbortReq(rid="reader"))
    driver.step()
    assert not driver.scheduler.waiting, "evicted while the reader's last step is in flight"
    driver.run()
    assert_right(driver, waits)


def test_pages_left_to_the_tree_wait_for_the_last_step() -> None:
    """A request leaves its output's pages to the tree with a step in flight; another evicts them at once."""
    driver = make_driver(num_pages=6, page_size=4, num_rows=2)
    driver.send(request("writer", [1] * 8, max_new_tokens=16, ignore_eos=True))
    driver.step()
    while driver.scheduler.reqs["writer"].committed_len < 17:
        driver.step()
    assert driver.worker.pages.num_free == 1
    next_one = request("next", [3] * 11, max_new_tokens=2, ignore_eos=True)
    driver.send(AbortReq(rid="writer"), next_one)
    driver.step()
    assert driver.scheduler.reqs["next"].row, "admitted while the writer's last step is in flight"
    driver.run()
    assert_right(driver, next_one)


def test_a_step_waits_for_the_pages_of_all_its_requests() -> None:
    """Two requests are admitted into one step and grow in the next, on pages with different Points."""
    driver = make_driver(num_pages=4, page_size=4, num_rows=2)
    waited: list[set[Stream]] = []
    pages, launch = driver.worker.pages, driver.worker.launch
    leased = pages.alloc(4)
    assert leased is not None
    streams = [LaggingStream(name, frozenset()) for name in (StreamName.LOAD, StreamName.STORE)]
    for page, stream in zip(leased[0], streams * 2, strict=True):
        pages.retire(np.array([page]), Points.of(stream.record()))

    def recording(batch: StepBatch) -> TokenResult:
        waited.append({point.stream for point in batch.after})
        return launch(replace(batch, after=Points.none()))

    driver.worker.launch = recording  # type: ignore[method-assign]
    reqs = [request(rid, [len(rid)] * 4, max_new_tokens=3, ignore_eos=True) for rid in ("a", "bb")]
    driver.send(*reqs)
    driver.run()
    assert_right(driver, *reqs)
    assert waited[:2] == [set(streams)] * 2


def test_a_request_moves_onto_the_pages_of_the_tree_once() -> None:
    """In steady decode no page table changes, whatever was remapped before."""
    driver = make_driver(num_pages=400, page_size=16, num_rows=4, context_length=1024)
    driver.send(*(request(f"r{i}", [1] * 64 + [i], max_new_tokens=40, ignore_eos=True) for i in range(3)))
    num_written = 0
    while driver.scheduler.reqs or driver.pending:
        driver.step()
        if driver.flight is not None and driver.flight.batch.is_decode:
            num_written += len(driver.flight.batch.page_writes)
    driver.run()
    # Two of them move 4 pages of the prompt; each grows from 65 + 15 to 65 + 39 tokens, a page at a time.
    assert num_written == 2 * 4 + 3 * 2


def test_pages_ahead_end_with_the_page_table() -> None:
    """However plentiful memory is, a request near the context length gets no page that its row has no column for."""
    driver = make_driver(num_pages=2000, page_size=1, context_length=64)
    req = request("a", [1] * 6, max_new_tokens=1000, ignore_eos=True)
    driver.send(req)
    most = 0
    while driver.scheduler.reqs or driver.pending:
        driver.step()
        most = max(most, driver.worker.pages.num_leased)
    driver.run()
    assert_right(driver, req)
    assert most == 63, "the last token needs no KV"


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_prompt_aborted_half_way_leaves_what_was_computed(num_steps: int) -> None:
    """Pages of chunks that never ran must not be found by the next request with that prompt."""
    driver = make_driver(page_size=2, chunked_prefill_size=8)
    prompt = list(range(1, 31))
    driver.send(request("half", prompt, max_new_tokens=4))
    steps(driver, num_steps)
    assert driver.scheduler.population.chunked is not None
    whole = request("whole", prompt, max_new_tokens=4, ignore_eos=True)
    driver.send(AbortReq(rid="half"), whole)
    driver.run()
    assert_right(driver, whole)
    assert driver.answers["whole"].last.cached_tokens == 8 * (num_steps - 1)


def test_flush_right_behind_the_abort_of_the_last_request() -> None:
    """Both arrive in one step: what the request held is given back before the tree is emptied."""
    driver = make_driver(page_size=4)
    driver.send(request("a", [1] * 30, max_new_tokens=50, ignore_eos=True))
    steps(driver, 4)
    driver.send(AbortReq(rid="a"), FlushCacheReq(id="f"))
    driver.run()
    assert reply(driver, "f").success
    assert driver.worker.pages.num_leased == 0


def test_a_retraction_makes_admission_more_careful() -> None:
    driver = make_driver(num_pages=24, page_size=4, schedule_conservativeness=0.05)
    driver.send(*(request(f"r{i}", [i + 1] * 3, max_new_tokens=50, ignore_eos=True) for i in range(8)))
    ratio = driver.scheduler.planner.ratio
    while not driver.scheduler.stats.num_retractions:
        before = ratio.value
        driver.step()
        assert ratio.value <= before or driver.scheduler.stats.num_retractions
    assert ratio.value > 2 * before
    driver.run()


def test_a_stop_token_before_min_new_tokens_ends_nothing() -> None:
    driver = make_driver()
    free = expected_output(request("x", [4, 5], max_new_tokens=12, ignore_eos=True), 256)
    req = request("a", [4, 5], max_new_tokens=12, ignore_eos=True, min_new_tokens=5, stop_token_ids=(free[1], free[8]))
    driver.send(req)
    driver.run()
    assert driver.answers["a"].output_ids == free[:9]


# --- control ----------------------------------------------------------------------------------------


def test_profile_into_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    driver = make_driver(torch_profiler_dir=str(tmp_path))
    driver.send(ProfileReq(id="p", action="start", output_dir="file/folder"))
    driver.step()
    assert not reply(driver, "p").success
    assert str(tmp_path / "file") in reply(driver, "p").message
    driver.send(ProfileReq(id="q", action="start", output_dir="a/b", num_steps=2))
    driver.send(request("a", [1, 2], max_new_tokens=5))
    driver.run()
    [trace] = (tmp_path / "a" / "b").iterdir()
    assert trace.name.endswith(".trace.json") and json.loads(trace.read_text())["traceEvents"]


def test_a_profile_is_private_in_a_folder_that_is_not(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    driver = make_driver(torch_profiler_dir=str(tmp_path))
    driver.send(ProfileReq(id="p", action="start", output_dir="a/b"), ProfileReq(id="q", action="stop"))
    driver.send(ProfileReq(id="r", action="start"), ProfileReq(id="s", action="stop"))
    driver.step()
    assert reply(driver, "q").success and reply(driver, "s").success
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert sorted(modes.values()) == [0o600, 0o600, 0o700, 0o700], modes


PROFILED = """
import json, sys
from pathlib import Path
import torch
from fenceline.scheduler.control import StepProfiler

profiler = StepProfiler(sys.argv[1])
before = set(sys.modules)
assert profiler.start("", None)[0]
torch.ones(3).sum()
success, text = profiler.stop()
assert success, text
[trace] = Path(sys.argv[1]).iterdir()
names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
print(json.dumps([sorted(names & {"aten::sum"}), sorted(set(sys.modules) - before)]))
"""


def test_a_profile_has_the_operators_and_imports_no_compiler(tmp_path: Path) -> None:
    """Importing torch._dynamo takes seconds, which every running request waits for."""
    run = subprocess.run(
        [sys.executable, "-c", PROFILED, str(tmp_path)], capture_output=True, text=True, check=True, timeout=300
    )
    operators, imported = json.loads(run.stdout.splitlines()[-1])
    assert operators == ["aten::sum"]
    assert not [name for name in imported if name.startswith(("torch._dynamo", "torch._inductor", "sympy"))]


def test_a_folder_for_a_profile_may_be_written_in_full(tmp_path: Path) -> None:
    driver = make_driver(torch_profiler_dir=str(tmp_path))
    for id, folder in (("p", str(tmp_path)), ("q", str(tmp_path / "a"))):
        driver.send(ProfileReq(id=id, action="start", output_dir=folder), ProfileReq(id=f"{id}s", action="stop"))
    driver.step()
    assert str(tmp_path / "fenceline-") in reply(driver, "p").message
    assert str(tmp_path / "a" / "fenceline-") in reply(driver, "q").message


@pytest.mark.parametrize(
    "folder",
    ["/", "/tmp", "..", "a/../..", "a//b", "a/", "\0", "a\nb", "x" * 5000, "a/" * 1500 + "a", ".hidden", "é"],
    ids=range(12),
)
def test_profiles_go_below_the_servers_folder_and_nowhere_else(tmp_path: Path, folder: str) -> None:
    root = tmp_path / "root"
    driver = make_driver(torch_profiler_dir=str(root))
    driver.send(ProfileReq(id="p", action="start", output_dir=folder))
    driver.step()
    assert not reply(driver, "p").success
    assert "--torch-profiler-dir" in reply(driver, "p").message
    assert len(reply(driver, "p").message) < 500
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_for_profiles_a_private_one_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    driver = make_driver()
    driver.send(ProfileReq(id="refused", action="start", output_dir="../x"))
    driver.step()
    assert not reply(driver, "refused").success
    assert not list(tmp_path.glob("fenceline-profile-*")), "a refused request leaves a folder behind"
    for id in "pq":
        driver.send(ProfileReq(id=id, action="start"), ProfileReq(id=f"{id}s", action="stop"))
    driver.step()
    (folder,) = tmp_path.glob("fenceline-profile-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert str(folder) in reply(driver, "ps").message


def test_the_folder_for_profiles_comes_from_flag_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(**flags: str) -> str | None:
        return resolve(ServerArgs(model_path="demo", device="cpu", **flags)).torch_profiler_dir

    monkeypatch.delenv("SGLANG_TORCH_PROFILER_DIR", raising=False)
    assert chosen() is None
    monkeypatch.setenv("SGLANG_TORCH_PROFILER_DIR", "/srv/traces")
    assert chosen() == "/srv/traces"
    assert chosen(torch_profiler_dir="/srv/mine") == "/srv/mine"


def test_profile_that_cannot_be_written_does_not_end_the_server(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    driver = make_driver(torch_profiler_dir=str(folder))
    driver.send(ProfileReq(id="p", action="start", num_steps=2))
    req = request("a", [1, 2], max_new_tokens=5, ignore_eos=True)
    driver.send(req)
    driver.step()
    folder.rmdir()
    driver.run()
    assert_right(driver, req)
    driver.send(ProfileReq(id="q", action="stop"))
    driver.step()
    assert reply(driver, "q").message == "no profile is running: start one first"


OBSERVERS = [
    (ProfileReq(id="p", action="start"), (StepProfiler, "start")),
    (ProfileReq(id="p", action="stop"), (StepProfiler, "stop")),
    (FlightRecorderReq(id="p", form="file"), (scheduler_control, "write_dump")),
    (FlightRecorderReq(id="p", form="json"), (scheduler_control, "dump_json")),
    (GetInternalStateReq(id="p"), (SchedulerStats, "state")),
]


def raiser(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", [RecursionError("deep"), MemoryError(), AssertionError("theirs"), KeyError(3)])
@pytest.mark.parametrize(("message", "place"), OBSERVERS, ids=range(5))
def test_no_failure_of_what_only_observes_ends_the_scheduler(
    message: Message, place: tuple[object, str], error: Exception, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    driver = make_driver()
    with monkeypatch.context() as patched:
        patched.setattr(*place, raiser(error))
        driver.send(message)
        driver.step()
    assert not reply(driver, "p").success
    assert type(error).__name__ in reply(driver, "p").message
    assert caplog.records[-1].exc_info, "with a traceback"
    req = request("a", [1, 2], max_new_tokens=5)
    driver.send(req)
    driver.run()
    assert_right(driver, req)


@pytest.mark.parametrize(
    ("error", "survives"),
    [
        (PermissionError("a file"), True),
        (AssertionError("books"), False),
        (LeaseError("retired twice"), False),
        (OrderError("no order", (), Hazard.RAW, "pages"), False),
    ],
)
def test_a_flush_that_breaks_an_invariant_ends_the_scheduler(
    error: Exception, survives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver()
    monkeypatch.setattr(RequestMemory, "flush", raiser(error))
    driver.send(FlushCacheReq(id="p"))
    if survives:
        driver.step()
        assert not reply(driver, "p").success
    else:
        with pytest.raises(type(error)):
            driver.step()


def test_a_profile_that_fails_does_not_end_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make_driver()
    driver.send(ProfileReq(id="p", action="start", num_steps=2))
    driver.step()
    profile = driver.scheduler.control.profiler._profile
    assert profile is not None
    monkeypatch.setattr(profile, "export_chrome_trace", raiser(MemoryError()))
    req = request("a", [1, 2], max_new_tokens=5, ignore_eos=True)
    driver.send(req)
    driver.run()
    assert_right(driver, req)


def test_a_server_that_drains_cannot_be_paused() -> None:
    driver = make_driver()
    req = request("a", [1, 2], max_new_tokens=5, ignore_eos=True)
    driver.send(req, ShutdownReq(drain=True), PauseGenerationReq(id="p", mode="in_place"))
    driver.run()
    assert driver.scheduler.stopped
    assert not reply(driver, "p").success
    assert_right(driver, req)


# --- prompt logprobs --------------------------------------------------------------------------------


def test_prompt_of_one_token_reports_its_unconditioned_position() -> None:
    driver = make_driver()
    driver.send(request("a", [9], max_new_tokens=2, return_logprob=True, logprob_start_len=0))
    driver.run()
    assert driver.scheduler.stats.num_generated_tokens == len(driver.answers["a"].output_ids)
    log = driver.first_logprobs["a"]
    assert (log.token_ids, log.logprobs) == ([9], [None])


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_prompt_retracted_half_way_is_scored_anew(num_steps: int) -> None:
    driver = make_driver(page_size=2, chunked_prefill_size=8)
    prompt = list(range(1, 31))
    driver.send(request("a", prompt, max_new_tokens=2, return_logprob=True, logprob_start_len=0))
    steps(driver, num_steps)
    assert driver.scheduler.population.chunked is not None
    driver.send(PauseGenerationReq(id="p", mode="retract"), ContinueGenerationReq(id="c"))
    driver.run()
    log = driver.first_logprobs["a"]
    assert (log.token_ids, log.logprobs) == (prompt, [None, *range(1, 30)])


@pytest.mark.parametrize("chunked_prefill_size", [4096, -1])
def test_a_step_scores_a_bounded_number_of_prompt_tokens(chunked_prefill_size: int) -> None:
    """Every scored position costs a vocabulary of logits, whoever asks for it."""
    driver = make_driver(num_pages=2000, page_size=4, context_length=2048, chunked_prefill_size=chunked_prefill_size)
    prompts = [[i + 1] * 700 for i in range(5)]
    for i, prompt in enumerate(prompts):
        driver.send(request(f"r{i}", prompt, max_new_tokens=2, return_logprob=True, logprob_start_len=0))
    while driver.scheduler.reqs or driver.pending:
        driver.step()
        if driver.flight is not None:
            assert sum(len(chunk.scored) for chunk in driver.flight.batch.chunks) <= 1024
    driver.run()
    for i, prompt in enumerate(prompts):
        log = driver.first_logprobs[f"r{i}"]
        assert log.token_ids == prompt
        assert log.logprobs == [None, *range(1, 700)]


def test_prompt_tokens_that_are_not_scored_do_not_count() -> None:
    driver = make_driver(num_pages=2000, page_size=4, context_length=4096, chunked_prefill_size=4096)
    prompt = [1] * 3000
    driver.send(request("a", prompt, max_new_tokens=0, return_logprob=True, logprob_start_len=2900))
    driver.run()
    assert driver.worker.num_steps == 1
    assert driver.first_logprobs["a"].logprobs == [None, *range(2901, 3000)]
    assert driver.scheduler.stats.num_generated_tokens == 0, "only the prompt was wanted"


@pytest.mark.parametrize("start", [7, 8, 10**6])
def test_prompt_logprobs_from_beyond_the_prompt_are_none(start: int) -> None:
    driver = make_driver()
    driver.send(request("a", [7] * 7, max_new_tokens=2, return_logprob=True, logprob_start_len=start))
    driver.run()
    assert driver.first_logprobs["a"].token_ids == []


# --- order and randomness ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "random"])
def test_seeds_depend_on_the_order_of_arrival_alone(policy: str) -> None:
    """However many steps pass between arrivals, a request without a seed gets the same one."""

    def seeds(num_steps: int) -> list[int]:
        driver = make_driver(num_rows=2, schedule_policy=policy)
        found = []
        for i in range(6):
            message = request(f"r{i}", [i + 1] * 9, max_new_tokens=30, ignore_eos=True)
            driver.send(
                msgspec.structs.replace(
                    message, sampling_params=msgspec.structs.replace(message.sampling_params, seed=None)
                )
            )
            driver.step()
            found.append(driver.scheduler.reqs[f"r{i}"].seed)
            steps(driver, num_steps)
        return found

    assert seeds(0) == seeds(3)


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "random"])
def test_a_retracted_request_goes_before_those_that_never_ran(policy: str) -> None:
    """It has spent steps already, and its pages may be gone from the tree: others' long prefixes do not pass it."""
    driver = make_driver(page_size=1, num_rows=1, schedule_policy=policy)
    driver.send(request("warm", [5] * 40, max_new_tokens=1))
    driver.run()
    driver.send(request("old", [1] * 4, max_new_tokens=9, ignore_eos=True))
    steps(driver, 3)
    driver.send(*(request(f"n{i}", [5] * 40 + [i], max_new_tokens=9, ignore_eos=True) for i in range(5)))
    driver.send(PauseGenerationReq(id="p", mode="retract"), ContinueGenerationReq(id="c"))
    driver.step()
    assert driver.scheduler.reqs["old"].num_retractions == 1
    assert driver.scheduler.reqs["old"].row != 0, "it is the first to be admitted again"
    driver.run()


@pytest.mark.parametrize("bodies", [(0, 0, 0, 0, 0), (1, 1, 1, 1, 1), (0, 1, 2, 0, 3)])
def test_who_is_retracted_resumes_in_the_old_order(bodies: tuple[int, ...]) -> None:
    """Before those that never ran, whether it came alone or in an HTTP body."""
    driver = make_driver(num_rows=3)
    reqs = [
        request(f"r{i}", [i + 1] * 9, body=body, max_new_tokens=9, ignore_eos=True) for i, body in enumerate(bodies)
    ]
    driver.send(*reqs)
    steps(driver, 4)
    running = [req.rid for req in driver.scheduler.reqs.values() if req.row]
    assert running == ["r0", "r1", "r2"]
    for number in range(2):
        driver.send(PauseGenerationReq(id=f"p{number}", mode="retract"))
        driver.step()
        assert [req.rid for req in driver.scheduler.waiting][:3] == running
        driver.send(ContinueGenerationReq(id=f"c{number}"))
        steps(driver, 3)
    driver.run()
    assert_right(driver, *reqs)


def test_a_step_does_not_look_through_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the head does not fit, a step asks nobody behind it: thousands may wait, and the device must not."""
    driver = make_driver(num_pages=64, page_size=4, num_rows=8)
    driver.send(request("running", [1] * 60, max_new_tokens=60, ignore_eos=True))
    steps(driver, 2)
    driver.send(*(request(f"w{i}", [i + 2] * 200, max_new_tokens=40, ignore_eos=True) for i in range(40)))
    driver.step()
    memory, asked = driver.scheduler.memory, []
    may_schedule = memory.may_schedule
    monkeypatch.setattr(memory, "may_schedule", lambda req: asked.append(req.rid) or may_schedule(req))
    steps(driver, 1)
    assert len(driver.scheduler.running) == 1 and len(driver.scheduler.waiting) == 40
    assert asked == ["w0"]
