"""What the scheduler says of its work, and the sizes of the memory that the engine allocates, are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from tiny_model import without_questions

from fenceline.ipc.io_struct import Message, TickReq
from fenceline.mem_cache import kv_pool
from fenceline.mem_cache.host import cache_controller, host_pool, page_copy
from fenceline.mem_cache.host.cache_controller import num_host_pages
from fenceline.mem_cache.kv_pool import KVPool, ReqPool, num_kv_pages
from fenceline.mem_cache.storage import controller
from fenceline.memory_order.device import Device
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.speculative_runner import SpeculativeState
from fenceline.scheduler import control, core_dumps, live_steps
from fenceline.scheduler.control import SchedulerControl, StepProfiler
from fenceline.scheduler.flight_recorder import FlightRecorder
from fenceline.scheduler.req import Req
from fenceline.scheduler.request_memory import RequestMemory
from fenceline.scheduler.scheduler import OutputSender, Scheduler
from fenceline.scheduler.stats import SchedulerStats
from fenceline.vgpu.proving import start_up
from fenceline.vgpu.proving.runs import ANSWERS, HAPPENS_BEFORE, Outcome, Trial, run

torch.set_num_threads(1)


def first_failure(*workloads: str) -> Outcome:
    """The first run of these that fails."""
    outcomes = (run(Trial(name, seed)) for seed in range(8) for name in workloads)
    return next(outcome for outcome in outcomes if not outcome.clean)


def nothing(self: Any, *args: Any) -> None:
    """In the place of a method that counts."""


def one_abort_more(self: Scheduler, req: Req, message: str, status_code: int | None) -> None:
    self.stats.num_aborts += 1
    end(self, req, message, status_code)


def one_token_more(self: Scheduler, req: Req, *args: Any) -> None:
    self.stats.num_generated_tokens += 1
    publish_tokens(self, req, *args)


def not_retracted(self: Req) -> Req:
    resumed = resume(self)
    resumed.num_retractions = 0
    return resumed


def not_by_tier(self: RequestMemory, *args: Any) -> Any:
    points = admit(self, *args)
    self.cached_tokens.clear()
    return points


def none_cached(self: SchedulerStats, plan: Any, *args: Any) -> None:
    self.num_computed_prompt_tokens += plan.num_new_tokens


def remaps_lost(self: Scheduler, writes: Any) -> Any:
    self.remaps = []
    return writes


def not_counted(self: ModelRunner, batch: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self.device.checker, "begin_step", lambda: None, raising=False)
        return launch(self, batch)


launch = ModelRunner.launch
end, publish_tokens, resume, admit = Scheduler.end, Scheduler.publish_tokens, Req.resumed, RequestMemory.admit


@pytest.mark.parametrize(
    ("owner", "name", "fault", "workload", "says"),
    [
        (SchedulerStats, "arrived", nothing, "mixed", "figures: prompt tokens: 0 is reported"),
        (Scheduler, "publish_tokens", one_token_more, "mixed", "figures: generated tokens"),
        (SchedulerStats, "prefill", none_cached, "prefixes", "figures: cached tokens: 0 is reported"),
        (SchedulerStats, "retracted", nothing, "retraction", "figures: retractions: 0 is reported"),
        (SchedulerStats, "preempted", nothing, "priorities", "figures: retractions"),
        (Scheduler, "end", one_abort_more, "aborts", "figures: aborts"),
        (ModelRunner, "launch", not_counted, "everything", "figures: steps of --memory-check order: 0"),
        (SchedulerStats, "decode", lambda self, depth: False, "speculation", "figures: steps by depth"),
        (SchedulerStats, "verified", nothing, "speculation", "figures: the length that is accepted"),
        (Req, "resumed", not_retracted, "retraction", "retractions: 0 is reported"),
        (RequestMemory, "admit", not_by_tier, "conversations", "figures: cached tokens of all tiers"),
        (FlightRecorder, "launched", nothing, "mixed", "flight record: 0 steps are recorded"),
        (FlightRecorder, "published", nothing, "mixed", "flight record: tokens: [] is reported"),
        (FlightRecorder, "departed", nothing, "mixed", "flight record: events"),
        (FlightRecorder, "completed", nothing, "spill", "flight record: events"),
        (FlightRecorder, "sampled", nothing, "grammars", "flight record: end"),
        (Scheduler, "with_remaps", remaps_lost, "handed_on", "figures: page tables written again"),
    ],
)
def test_what_the_scheduler_says_is_compared(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    fault: Callable[..., Any],
    workload: str,
    says: str,
) -> None:
    monkeypatch.setattr(owner, name, fault)
    found = first_failure(workload)
    assert found.checker == ANSWERS and says in found.report, found.report


def all_but_the_last(self: Scheduler, messages: Sequence[Message]) -> None:
    ticks = [message for message in messages if isinstance(message, TickReq)]
    ingest(self, [message for message in messages if message not in ticks[-1:]])


def unsent_after_a_refusal(self: OutputSender) -> None:
    if self._outs and self._outs[-1].finish_reason is None:
        flush(self)


def one_too_early(self: Scheduler, now: float) -> None:
    req = next(iter(self.reqs.values()), None)
    if req is not None and req.clocked_running is True and self.config.server_args.req_running_timeout:
        self.end(req, "still running after 3 s (--req-running-timeout)", 503)
    end_overdue(self, now)


ingest, flush, end_overdue = Scheduler.ingest, OutputSender.flush, Scheduler.end_overdue


@pytest.mark.parametrize(
    ("owner", "name", "fault", "says"),
    [
        (Scheduler, "ingest", all_but_the_last, "is not ended, and has been"),
        (Scheduler, "end_overdue", one_too_early, "is ended: still running after"),
        (
            OutputSender,
            "flush",
            unsent_after_a_refusal,
            "have not been sent, and messages have been taken in",
        ),
        (Scheduler, "report", nothing, "the front end knows None instead of"),
    ],
)
def test_what_is_due_and_does_not_come_is_found(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    fault: Callable[..., Any],
    says: str,
) -> None:
    monkeypatch.setattr(owner, name, fault)
    without_questions(monkeypatch)
    found = first_failure("everything")
    assert found.checker == ANSWERS and says in found.report, found.report


def drafts_of_a_request(self: Req) -> Any:
    return counts(self).__class__(self.num_verified, self.num_accepted, self.num_drafts + 1)


counts = Req.spec_counts.fget  # type: ignore[attr-defined]


def test_what_is_said_of_the_drafts_of_a_request_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Req, "spec_counts", property(drafts_of_a_request))
    found = first_failure("speculation")
    assert found.checker == ANSWERS and "drafts: SpecCounts" in found.report, found.report


def test_memory_of_another_size_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    make = ReqPool.__init__

    def larger(self: ReqPool, num_rows: int, max_pages_per_req: int, device: torch.device) -> None:
        make(self, num_rows, max_pages_per_req + 1, device)

    monkeypatch.setattr(ReqPool, "__init__", larger)
    found = first_failure("mixed")
    assert found.checker == ANSWERS and "memory: req_pool.page_table has" in found.report, found.report


def test_the_memory_of_drafts_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    make = SpeculativeState.__init__

    def larger(self: SpeculativeState, device: Device, num_rows: int, *args: Any) -> None:
        make(self, device, num_rows + 1, *args)

    monkeypatch.setattr(SpeculativeState, "__init__", larger)
    found = first_failure("speculation")
    assert found.checker == ANSWERS and "memory: draft_state." in found.report, found.report


def test_rows_of_another_width_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def name_rows(self: Device, tensor: torch.Tensor, name: str) -> None:
        self.name_memory(tensor, name, tensor[0].nbytes + 1)

    monkeypatch.setattr(Device, "name_rows", name_rows)
    found = first_failure("mixed")
    assert "are said to have" in found.report, found.report


def test_graphs_of_prefill_have_a_row_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    from fenceline.model_executor import piecewise_cuda_graph_runner

    arena = piecewise_cuda_graph_runner.Arena

    def larger(device: Device, name: str, num_rows: int, fields: Any) -> Any:
        return arena(device, name, num_rows + 1, fields)

    monkeypatch.setattr(piecewise_cuda_graph_runner, "Arena", larger)
    found = first_failure("everything")
    assert "memory: prefill." in found.report, found.report


def failed_twice(self: SchedulerControl, id: str, error: Exception) -> None:
    failed(self, id, error)
    failed(self, id, error)


failed = SchedulerControl._failed


@pytest.mark.parametrize(
    ("owner", "name", "fault", "says"),
    [
        (SchedulerControl, "_failed", failed_twice, "observers: "),
        (SchedulerControl, "_dump", lambda self: self._dumps.clear(), "observers: "),
        (control, "_MAX_REPLY_CHARS", 999, "observers: an error of 999 characters"),
        (
            control,
            "live_steps",
            lambda recorder, num: live_steps.live_steps(recorder, num - 1),
            "of the latest steps",
        ),
        (control, "dump_json", lambda *args: b'{"steps": []}', "observers: a dump does not have all steps"),
        (StepProfiler, "step", nothing, "the profiler's messages succeed and fail"),
        (control, "trace_folder", lambda root, folder: ["a"], "the profiler's messages succeed and fail"),
        (core_dumps, "_SECTION_SIZE_AT", 24, "core dumps: "),
        (core_dumps.CoreDumps, "found", lambda self: {}, "core dumps: a dump is waited for"),
    ],
)
def test_answers_that_only_observe_are_compared(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any, says: str
) -> None:
    monkeypatch.setattr(owner, name, fault)
    found = first_failure("mixed")
    assert found.checker == ANSWERS and says in found.report, found.report


@pytest.mark.parametrize(
    ("owner", "name", "fault", "says"),
    [
        (start_up, "check_row_bytes", lambda *args: None, "start: request rows"),
        (kv_pool, "_CPU_KV_BYTES", 1 << 8, "start: "),
        (start_up, "num_kv_pages", lambda *args: num_kv_pages(*args) + 1, "bytes free"),
        (start_up, "num_host_pages", lambda *args: num_host_pages(*args) + 1, "host pages of"),
        (host_pool, "_KEPT_FREE", 0.5, "start: a host tier"),
    ],
)
def test_decisions_about_memory_at_the_start_are_compared(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any, says: str
) -> None:
    if name == "_CPU_KV_BYTES":  # as the check reads the limit too, the function alone gets another one
        monkeypatch.setattr(start_up, "num_kv_pages", with_another_limit)
    else:
        monkeypatch.setattr(owner, name, fault)
    found = first_failure("spill")
    assert found.checker == ANSWERS and says in found.report, found.report


@pytest.mark.parametrize(
    ("owner", "name", "fault", "says"),
    [
        (start_up, "_refuses", lambda *args: False, "start: "),
        (page_copy, "_check", lambda *args: None, ""),
        (controller, "header_nbytes", lambda secret: 0, "start: storage of "),
        (start_up, "model_id", lambda config: config.model.model_path, "have one identity"),
        (KVPool, "nbytes", property(lambda self: 1), "figures: bytes of the cache"),
    ],
)
def test_what_is_decided_with_storage_at_the_start_is_compared(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any, says: str
) -> None:
    monkeypatch.setattr(owner, name, fault)
    found = first_failure("storage")
    assert says in found.report, found.report


def test_the_first_copies_wait_for_what_comes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unordered:
        """The device, without its waits for itself."""

        def __init__(self, device: Device) -> None:
            self.store, self.load = device.store, device.load

        def synchronize(self) -> None:
            return None

    warm_up = cache_controller._warm_up
    monkeypatch.setattr(
        cache_controller, "_warm_up", lambda device, *args: warm_up(cast(Device, Unordered(device)), *args)
    )
    found = first_failure("spill")
    assert found.checker == HAPPENS_BEFORE, found.report


def with_another_limit(config: Any, device: Any, layout: Any, num_ranks: int) -> int:
    before, kv_pool._CPU_KV_BYTES = kv_pool._CPU_KV_BYTES, 1 << 8
    try:
        return num_kv_pages(config, device, layout, num_ranks)
    finally:
        kv_pool._CPU_KV_BYTES = before
