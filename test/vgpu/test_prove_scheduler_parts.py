"""Parts of the scheduler, its memory of requests and a scheduler at rest are asked with random values, and what a turn
of the loop has to do is noticed if it is left out. Each check is tested with faults."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from msgspec import structs

from fenceline.constrained.matcher import GrammarClock, GrammarStore
from fenceline.ipc.io_struct import CancelFlushReq
from fenceline.mem_cache.hicache import HiCache
from fenceline.mem_cache.storage.controller import StorageController
from fenceline.scheduler import control, waiting_queue
from fenceline.scheduler import request_memory as request_memory_module
from fenceline.scheduler import scheduler as scheduler_module
from fenceline.scheduler.control import StepProfiler
from fenceline.scheduler.core_dumps import is_complete
from fenceline.scheduler.ranks import RankLink
from fenceline.scheduler.req import Req
from fenceline.scheduler.request_memory import PageTables, RequestMemory
from fenceline.scheduler.running_batch import NewTokenRatio, RunningBatch
from fenceline.scheduler.scheduler import OutputSender, Scheduler
from fenceline.scheduler.stats import SchedulerStats
from fenceline.scheduler.waiting_queue import WaitingQueue
from fenceline.vgpu.proving import gpu_core_dumps
from fenceline.vgpu.proving.decode_room import compare_growth
from fenceline.vgpu.proving.request_memory_parts import compare_request_memory
from fenceline.vgpu.proving.runs import Outcome, Trial, run
from fenceline.vgpu.proving.scheduler_parts import compare_scheduler_parts

torch.set_num_threads(1)


def first_failure(*workloads: str, seeds: range = range(8)) -> Outcome:
    """The first run of these that fails."""
    outcomes = (run(Trial(name, seed)) for seed in seeds for name in workloads)
    return next(outcome for outcome in outcomes if not outcome.clean)


def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    """In the place of a method that does something."""


def is_said(compare: Callable[[Random], str], num_seeds: int = 60) -> str:
    """What the check says of the first random values of which it says anything."""
    return next(filter(None, (compare(Random(seed)) for seed in range(num_seeds))), "")


# --- parts


def in_front(self: WaitingQueue, req: Req) -> None:
    self._queue(req, -self._num_turns).reqs.append(req)
    self.num_reqs += 1
    self.num_short += req.is_short


def noted(self: WaitingQueue, req: Req) -> None:
    if req.source.body:
        self._num_running[req.source.body] -= 1
        if not self._num_running[req.source.body]:
            del self._num_running[req.source.body], self._computing[req.source.body]


def unshared(self: WaitingQueue) -> bool:
    return any(num > 2 for num in self._num_running.values())


def always_computing(self: WaitingQueue, req: Req) -> bool:
    return self._page_size is not None and not req.left


def not_behind(self: PageTables, row: int) -> int:
    self._clock.move(row)
    return self._clock.version(row)


def too_many_more(self: NewTokenRatio, num_decoded: int, num_running: int, num_max_new: int) -> None:
    self.value = min((num_decoded + 21 * num_running) / num_max_new, 1.0)


def one_context_token_less(self: Req) -> Any:
    told = decode_info(self)
    return structs.replace(told, prompt_tail_ids=told.prompt_tail_ids[1:])


def one_token_late(self: OutputSender, req: Req) -> None:
    if len(req.output_ids) - req.num_emitted > req.emit_interval or not req.num_emitted:
        self._add(req, None)


def all_alternatives(log: Any, tokens: Any, values: Any, start: int, source: Any) -> None:
    append(log, tokens, values, start, type("Asks", (), {"top_logprobs_num": 4, "token_ids_logprob": []}))


def unnoticed(self: RankLink) -> None:
    """In the place of the comparison of ranks."""


def without_its_time(self: Req) -> Req:
    again = resumed(self)
    again.queue_time_s = None
    return again


def with_all_logprobs(self: Req) -> Req:
    again = resumed(self)
    again.prompt_log = self.prompt_log
    return again


def nothing_forgotten(
    self: GrammarStore, id: str, number: int, data: bytes, vocabulary: bytes, _: Any
) -> None:
    load(self, id, number, data, vocabulary, ())


def with_the_old_clock(self: GrammarStore, number: int, think: Any) -> Any:
    clock = self._clocks.get(number)
    begun = begin(self, number, think)
    begun.clock = clock or begun.clock
    return begun


resumed, load, begin = Req.resumed, GrammarStore.load, GrammarStore.begin
decode_info, append = Req.decode_info, scheduler_module._append


@pytest.mark.parametrize(
    ("owner", "name", "fault", "says"),
    [
        (WaitingQueue, "add", in_front, "the queue's order"),
        (WaitingQueue, "computes", nothing, "the queue's samples that wait"),
        (WaitingQueue, "release", noted, "the queue's notes of those that have left"),
        (WaitingQueue, "is_shared", property(unshared), "the queue's sharing"),
        (WaitingQueue, "_is_computing", always_computing, "the queue's samples that wait"),
        (waiting_queue, "_key", lambda req: (0, req.source.body or req.rid), "the queue's turns"),
        (WaitingQueue, "newcomers", lambda self, may_schedule: iter(()), "the queue's newcomers"),
        (WaitingQueue, "_is_worth_waiting", lambda self, req, num_shared: False, "the queue's turns if each"),
        (PageTables, "moved", not_behind, "of the page table"),
        (NewTokenRatio, "after_retraction", too_many_more, "are expected to ask for"),
        (Req, "finish_reason_after", nothing, "end with None"),
        (Req, "resumed", without_its_time, "has another queue_time_s"),
        (Req, "resumed", with_all_logprobs, "has logprobs of [2, 3] of its prompt"),
        (GrammarStore, "load", nothing_forgotten, "and 2 was forgotten"),
        (
            GrammarClock,
            "is_over",
            property(lambda self: False),
            "of a grammar that was too slow are not ended",
        ),
        (
            GrammarStore,
            "begin",
            with_the_old_clock,
            "of a grammar that was too slow are not ended, or new ones are",
        ),
        (Req, "decode_info", one_context_token_less, "the prompt ends with"),
        (OutputSender, "token", one_token_late, "with an interval of"),
        (scheduler_module, "_append", all_alternatives, "a request gets the logprobs"),
        (RankLink, "compare", unnoticed, "the decisions of steps [] are compared"),
    ],
)
def test_parts_of_the_scheduler(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any, says: str
) -> None:
    assert is_said(compare_scheduler_parts) == ""
    monkeypatch.setattr(owner, name, fault)
    assert says in is_said(compare_scheduler_parts)


def everything_cached(req: Req) -> int:
    return req.num_tokens


def leaves_own_pages(self: RequestMemory, req: Req) -> None:
    retire, self.pages.retire = self.pages.retire, lambda ids, after: retire(ids[1:], after)  # type: ignore
    try:
        release(self, req)
    finally:
        self.pages.retire = retire  # type: ignore[method-assign]


def evicts_more(self: RequestMemory, num_pages: int) -> Any:
    if num_pages > self.pages.num_free:
        self.num_evicted_pages += self.tree.evict(num_pages)
    return alloc(self, num_pages)


def offloads_only_a_tail(self: RequestMemory, req: Req) -> Any:
    cache, self.cache_prompt = self.cache_prompt, lambda req: None  # type: ignore[method-assign]
    try:
        return offload(self, req)
    finally:
        self.cache_prompt = cache  # type: ignore[method-assign]


def keeps_tails(self: RequestMemory, req: Req, *args: Any) -> None:
    req.tail = None


def never_clears(self: RequestMemory, storage: bool = False) -> int:
    return flush(self)


def counts_alone(self: RequestMemory, every_page: bool = False) -> None:
    assert self.tiers is not None
    self.tiers.check_memory()


release, alloc, offload = RequestMemory.release, RequestMemory._alloc, RequestMemory.offload
flush = RequestMemory.flush


@pytest.mark.parametrize(
    ("owner", "name", "fault", "says"),
    [
        (request_memory_module, "_most_cached", everything_cached, "are found"),
        (RequestMemory, "_num_complete", lambda self, req: req.shared_len, "are cached"),
        (RequestMemory, "release", leaves_own_pages, "pages are leased when twins have left"),
        (RequestMemory, "_alloc", evicts_more, "pages are evicted for"),
        (RequestMemory, "offload", offloads_only_a_tail, "is offloaded"),
        (RequestMemory, "_take_tail", keeps_tails, "of a tail"),
        (RequestMemory, "flush", never_clears, "a flush frees"),
        (RequestMemory, "_end_prefetch", lambda self, req: 0, "of other weights"),
        (RequestMemory, "check_memory", counts_alone, "nobody notices"),
    ],
)
def test_the_memory_of_requests(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any, says: str
) -> None:
    assert is_said(compare_request_memory) == ""
    monkeypatch.setattr(owner, name, fault)
    assert says in is_said(compare_request_memory)


def test_the_slots_of_a_decode_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_slot_less(self: RunningBatch, *args: Any) -> Any:
        batch = schedule_step(self, *args)
        object.__setattr__(batch, "seq_lens", batch.seq_lens - 1)
        return batch

    schedule_step = RunningBatch.schedule_step
    monkeypatch.setattr(RunningBatch, "schedule_step", one_slot_less)
    assert "slots leads to" in is_said(compare_growth)


def test_a_core_dump_without_its_first_section(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_long_enough(path: str) -> bool:
        with open(path, "rb") as file:
            data = file.read()
        offset, num = int.from_bytes(data[40:48], "little"), int.from_bytes(data[60:62], "little")
        return (offset > 0 and not num and len(data) > offset) or is_complete(path)

    monkeypatch.setattr(gpu_core_dumps, "is_complete", is_long_enough)
    assert "are said to be whole" in is_said(gpu_core_dumps.compare_core_dumps)


# --- in runs


def one_token_more(self: Scheduler, message: Any) -> None:
    accept(self, message)
    req = self.reqs.get(message.rid)
    if req is not None:
        req.max_new_tokens += message.sampling_params.max_new_tokens > req.max_new_tokens


def takes_any_id(self: Scheduler, message: Any) -> None:
    self.reqs.pop(message.rid, None)
    accept(self, message)


def without(kind: type) -> Callable[[Scheduler, Any], None]:
    """Carries out no messages of ``kind``."""

    def carries_out(self: Scheduler, message: Any) -> None:
        if not isinstance(message, kind):
            carry_out(self, message)

    return carries_out


def goes_on_anyway(self: Scheduler, req: Any, grammar: Any, token: int, accepted: Any) -> bool:
    return True


def takes_the_share(self: Scheduler, num_pages: int, num_available: int) -> bool:
    return num_pages <= num_available


def tells_late(self: Scheduler, reqs: Any) -> Any:
    yield from reqs


def no_drafts_told(self: Scheduler, *args: Any) -> None:
    before, self.draft_depth = self.draft_depth, None
    try:
        publish_counted(self, *args)
    finally:
        self.draft_depth = before


def scores_nothing(self: Any, *args: Any) -> None:
    """In the place of the note of a prompt's logprobs."""


def numbers_from_zero(self: Scheduler, batch: Any, reqs: Any) -> Any:
    flight = launch(self, batch, reqs)
    object.__setattr__(flight, "number", flight.number - 1)
    return flight


def logs_never(self: SchedulerStats, depth: int) -> bool:
    return decode(self, depth) and False


def keeps_on_pause(self: Scheduler, mode: str) -> Any:
    give_back_all, self.give_back_all = self.give_back_all, lambda: 0  # type: ignore[method-assign]
    try:
        return pause(self, mode)
    finally:
        self.give_back_all = give_back_all  # type: ignore[method-assign]


def counts_no_grammar(self: Scheduler, req: Req) -> None:
    self.reqs[req.rid] = req


accept, carry_out, launch = Scheduler.accept, Scheduler.carry_out, Scheduler.launch
publish_counted, pause, decode = Scheduler.publish_counted, Scheduler.pause, SchedulerStats.decode


@pytest.mark.parametrize(
    ("owner", "name", "fault", "workload", "says"),
    [
        (WaitingQueue, "computes", nothing, "mixed", "scheduler: "),
        (RequestMemory, "_take_tail", keeps_tails, "mixed", "request memory: "),
        (Scheduler, "accept", one_token_more, "mixed", "at rest: a prompt of"),
        (Scheduler, "accept", takes_any_id, "mixed", "at rest: a second request"),
        (Scheduler, "end_overdue", nothing, "mixed", "at rest: a request that is"),
        (Scheduler, "carry_out", without(CancelFlushReq), "mixed", "at rest: flushes that wait"),
        (Scheduler, "goes_on", goes_on_anyway, "mixed", "at rest: a request with"),
        (Scheduler, "has_room", takes_the_share, "mixed", "at rest: "),
        (Scheduler, "track_admissions", tells_late, "mixed", "at rest: the queue has been told of"),
        (Scheduler, "publish_counted", no_drafts_told, "mixed", "is told of the drafts"),
        (scheduler_module, "_log_prompt", scores_nothing, "prefixes", "of a prompt are scored"),
        (Scheduler, "launch", numbers_from_zero, "mixed", "has the number 0"),
        (StepProfiler, "step", nothing, "mixed", "steps of a trace"),
        (SchedulerStats, "decode", logs_never, "mixed", "log lines of decode steps"),
        (HiCache, "write_backups", nothing, "conversations", "wait to be backed up"),
        (Scheduler, "check_memory", nothing, "mixed", "has not been checked"),
        (Scheduler, "pause", keeps_on_pause, "bursts", "keep their memory (retract)"),
        (Scheduler, "enter", counts_no_grammar, "grammars", "are said to have a grammar"),
        (Scheduler, "sample_early", nothing, "grammars", "has not been sampled early"),
        (Scheduler, "retract_for_waiting", nothing, "bodies", "none gives way to bodies"),
        (control, "_let_steps_run", lambda: None, "mixed", "does not let steps run"),
        (control, "_MAX_FOLDER_DEPTH", 3, "mixed", "the profiler's messages succeed and fail"),
        (StorageController, "close", nothing, "storage", "threads of the storage are left"),
    ],
)
def test_runs_report_it(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any, workload: str, says: str
) -> None:
    monkeypatch.setattr(owner, name, fault)
    assert says in first_failure(workload, seeds=range(12)).report


def test_memory_that_is_given_back_after_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launch_next, retire_departed, ingest = Scheduler.launch_next, Scheduler.retire_departed, Scheduler.ingest
    begins: list[bool] = []

    def begin(self: Scheduler, messages: Any) -> None:
        ingest(self, messages)
        begins.append(True)

    def launch(self: Scheduler) -> Any:
        begins.clear()
        return launch_next(self)

    monkeypatch.setattr(Scheduler, "ingest", begin)
    monkeypatch.setattr(Scheduler, "launch_next", launch)
    monkeypatch.setattr(Scheduler, "retire_departed", lambda self: None if begins else retire_departed(self))
    report = first_failure("aborts", "mixed").report
    assert "have left and keep their memory, and a step is launched" in report
