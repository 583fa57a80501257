"""The bodies of requests take turns: how long one waits depends on how many there are, not on their sizes."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scheduler_driver import Driver, assert_right, make_driver, request

from fenceline.ipc.io_struct import AbortReq, TokenizedGenerateReq, id_array
from fenceline.model_executor.step import ForwardResult, StepBatch
from fenceline.scheduler.admission import Holdings
from fenceline.scheduler.req import Req
from fenceline.scheduler.waiting_queue import WaitingQueue

PAGE = 4


def fair_driver(
    num_rows: int = 8, num_pages: int = 200, chunk: int = 16, page_size: int = PAGE, **flags: object
) -> Driver:
    return make_driver(num_pages=num_pages, page_size=page_size, num_rows=num_rows, chunked_prefill_size=chunk, **flags)  # type: ignore[arg-type]


def body_of(number: int, size: int, prompt_len: int = 8, **params: object) -> list[TokenizedGenerateReq]:
    """``size`` different prompts of one body; of no other, if the number is 0."""
    params = {"max_new_tokens": 6, "ignore_eos": True} | params
    return [
        request(
            f"{number}.{i}", [number + 1, i % 250 + 1, i // 250 + 1] + [7] * (prompt_len - 3), body=number, **params
        )
        for i in range(size)
    ]


def admissions(driver: Driver) -> list[str]:
    """The ids of requests in order of their first prefill, as it goes on."""
    seen: list[str] = []
    launch = driver.worker.launch

    def recording(batch: StepBatch) -> ForwardResult:
        if not batch.is_decode:
            rids = {req.row: req.rid for req in driver.scheduler.reqs.values()}
            seen.extend(rids[row] for row in batch.rows.tolist() if rids[row] not in seen)
        return launch(batch)

    driver.worker.launch = recording  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("chunk", [8, 400], ids=["one in a step", "all in one step"])
def test_bodies_take_turns(chunk: int) -> None:
    driver = fair_driver(num_rows=20, chunk=chunk)
    seen = admissions(driver)
    a, b, c = body_of(1, 3), body_of(2, 2), body_of(3, 4)
    driver.send(*a, *b, *c)
    driver.run()
    assert seen == ["1.0", "2.0", "3.0", "1.1", "2.1", "3.1", "1.2", "3.2", "3.3"]
    assert_right(driver, *a, *b, *c)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.sampled_from("aaartf"), st.integers(0, 3), st.integers(0, 1), st.integers(0, 7)), max_size=40)
)
def test_any_queue_keeps_the_order_of_each_body(ops: list[tuple[str, int, int, int]]) -> None:
    """Arrivals go behind those of their body, retracted ones before them; whoever came alone is then the first of its
    rank. Nobody is lost, and a better rank always goes first."""
    queue, expected, running = WaitingQueue(Holdings(), max_of_body=3), dict[object, list[str]](), list[Req]()

    def key(req: Req) -> object:
        return req.rank, req.source.body or req.rid

    def leave(index: int) -> Req:
        req = running.pop(index % len(running))
        req.left = True
        queue.holdings.release(req)
        return req

    for number, (op, body, rank, pick) in enumerate(ops):
        if op == "a":
            source = request(f"r{number}", [1, 2, 3], body=body)
            ids = np.array([1, 2, 3], np.int32)
            req = Req(source, ids, ids, (), frozenset(), 0, 9, 1, rank=rank)
            queue.add(req)
            expected.setdefault(key(req), []).append(req.rid)
        elif op == "t" and (first := next(queue.in_turn(lambda req: True), None)) is not None:
            queue.admit(first)
            assert expected[key(first)].pop(0) == first.rid
            running.append(first)
        elif op == "r" and running:
            req = leave(pick).resumed()
            queue.put_back(req)
            expected.setdefault(key(req), []).insert(0, req.rid)
            if not req.source.body:
                assert next(other for other in queue if other.rank == req.rank) is req
        elif op == "f" and running:
            leave(pick)
        waiting = list(queue)
        assert [req.rank for req in waiting] == sorted(req.rank for req in waiting)
        for of_body, rids in expected.items():
            assert [req.rid for req in waiting if key(req) == of_body] == rids
        assert len(queue) == len(waiting) == sum(map(len, expected.values()))


def test_who_came_alone_goes_in_order_of_arrival() -> None:
    driver = fair_driver(num_rows=3)
    seen = admissions(driver)
    reqs = [request(f"r{i}", [i + 1] * (3 + i % 7), max_new_tokens=2 + i % 5) for i in range(30)]
    for req in reqs:
        driver.send(req)
        driver.step()
    driver.run()
    assert seen == [req.rid for req in reqs]


def test_a_newcomer_does_not_wait_for_the_rest_of_a_body() -> None:
    """Whether they wait, or have all rows."""
    driver = fair_driver()
    seen = admissions(driver)
    flood = body_of(1, 100)
    driver.send(*flood)
    for _ in range(5):
        driver.step()
    before = len(seen)
    assert before < 30
    newcomer = request("new", [5, 6, 7], max_new_tokens=3)
    driver.send(newcomer)
    for _ in range(3):
        driver.step()
    assert seen.index("new") - before <= 1
    driver.run()
    assert_right(driver, newcomer, *flood)


def test_when_memory_runs_short_the_largest_body_gives_way() -> None:
    driver = fair_driver(num_rows=12, num_pages=60, schedule_conservativeness=0.01)
    single = request("single", [9] * 6, max_new_tokens=60, ignore_eos=True)
    flood = body_of(1, 9, prompt_len=4, max_new_tokens=80)
    driver.send(*flood)
    for _ in range(6):
        driver.step()
    driver.send(single)  # has the fewest outputs all the time
    driver.run()
    assert driver.scheduler.stats.num_retractions > 0
    assert driver.answers["single"].last.num_retractions == 0
    assert_right(driver, single, *flood)


@pytest.mark.parametrize("num_bodies", [1, 3])
def test_a_body_that_has_run_waits_for_one_of_each_newcomer(num_bodies: int) -> None:
    """Newcomers that come without end do not keep the requests of others waiting for ever."""
    driver = fair_driver(num_rows=2, chunk=16)
    flood = [req for number in range(num_bodies) for req in body_of(number + 1, 6, max_new_tokens=2)]
    driver.send(*flood)
    for number in range(60 * num_bodies):
        driver.send(request(f"new{number}", [number % 250 + 1, 5, 6], max_new_tokens=2))
        for _ in range(3):
            driver.step()
    assert all(req.rid in driver.answers and driver.answers[req.rid].finish for req in flood)
    driver.run()


@pytest.mark.long
@settings(max_examples=12, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 6)), min_size=1, max_size=6),
    num_rows=st.sampled_from([2, 3, 8, 64]),
    num_pages=st.sampled_from([40, 90, 400]),
    max_new_tokens=st.integers(1, 40),
    pause=st.integers(0, 40),
    abort=st.booleans(),
)
def test_a_newcomer_s_wait_depends_on_the_number_of_bodies(
    sizes: list[tuple[int, int]], num_rows: int, num_pages: int, max_new_tokens: int, pause: int, abort: bool
) -> None:
    """At most two of each body are admitted before it, however large they are; and everybody gets to the end."""
    driver = fair_driver(num_rows, num_pages, schedule_conservativeness=0.1)
    seen = admissions(driver)
    sent: list[TokenizedGenerateReq] = []
    for number, (size, steps) in enumerate(sizes, 1):
        sent += (body := body_of(number, size, max_new_tokens=max_new_tokens))
        driver.send(*body)
        for _ in range(steps):
            driver.step()
    for _ in range(pause):
        driver.step()
    aborted = {req.rid for req in sent[1::3]} if abort else set()
    for rid in sorted(aborted):
        driver.send(AbortReq(rid=rid))
    newcomer = request("new", [251, 3, 4, 5], max_new_tokens=3, ignore_eos=True)
    before = len(seen)
    driver.send(newcomer)
    if len(sizes) < num_rows:
        while "new" not in seen:
            driver.step()
        admitted = [rid for rid in seen[before : seen.index("new")] if rid not in aborted]
        assert all(len(list(run)) <= 2 for _, run in groupby(sorted(rid.split(".")[0] for rid in admitted)))
    driver.run()
    assert_right(driver, newcomer, *(req for req in sent if req.rid not in aborted))
    assert driver.scheduler.waiting.holdings == Holdings(page_size=PAGE) and len(driver.scheduler.waiting) == 0


def test_no_more_of_a_body_run_than_make_a_decode_step_long() -> None:
    """On a CPU, however many rows are free; they are for other bodies, and all of it comes to an end."""
    driver = fair_driver(num_rows=150, num_pages=1200, chunk=400)
    flood, others = body_of(1, 100, max_new_tokens=20), body_of(2, 20, max_new_tokens=20)
    running: list[dict[int, int]] = []
    launch = driver.worker.launch

    def recording(batch: StepBatch) -> ForwardResult:
        admitted = [req.source.body for req in driver.scheduler.reqs.values() if req.row]
        running.append({body: admitted.count(body) for body in (1, 2)})
        return launch(batch)

    driver.worker.launch = recording  # type: ignore[method-assign]
    driver.send(*flood)
    for _ in range(6):
        driver.step()
    driver.send(*others)
    driver.run()
    assert max(counts[1] for counts in running) == 32
    assert max(counts[2] for counts in running) == 20
    assert_right(driver, *flood, *others)


# --- samples of one prompt


def computed_tokens(driver: Driver) -> list[int]:
    """The prompt tokens of each prefill step, as it goes on."""
    counts: list[int] = []
    launch = driver.worker.launch

    def recording(batch: StepBatch) -> ForwardResult:
        if not batch.is_decode:
            counts.append(batch.num_prompt_tokens)
        return launch(batch)

    driver.worker.launch = recording  # type: ignore[method-assign]
    return counts


def samples(number: int, num: int, prompt: list[int], **params: object) -> list[TokenizedGenerateReq]:
    params = {"max_new_tokens": 4, "ignore_eos": True} | params
    return [request(f"{number}.{i}", prompt, seed=i, body=number, **params) for i in range(num)]


@pytest.mark.parametrize(("overlap", "policy"), [(True, "fcfs"), (False, "lpm")])
@pytest.mark.parametrize("chunk", [16, -1])
def test_the_samples_of_a_prompt_compute_it_once(chunk: int, overlap: bool, policy: str) -> None:
    driver = fair_driver(num_rows=16, chunk=chunk, disable_overlap_schedule=not overlap, schedule_policy=policy)
    counts = computed_tokens(driver)
    prompt = [i % 250 + 1 for i in range(101)]
    reqs = [*samples(1, 16, prompt), *samples(2, 8, prompt[1:])]
    driver.send(*reqs)
    driver.run()
    assert sum(counts) == 101 + 15 * 1 + 100 + 7 * PAGE
    for req in reqs:
        assert len(driver.answers[req.rid].output_ids) == 4


def test_a_late_sample_waits_for_its_prompt() -> None:
    driver = fair_driver(num_rows=16, chunk=16)
    counts = computed_tokens(driver)
    prompt = [i % 250 + 1 for i in range(101)]
    first, *others = samples(1, 3, prompt)
    driver.send(first)
    driver.step()
    driver.send(*others)
    driver.run()
    assert sum(counts) == 101 + 2 * 1


def test_a_sample_waits_for_the_first_when_a_scored_one_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, prefill steps may follow one another."""
    monkeypatch.setattr("fenceline.scheduler.step_planner.max_prefills_in_row", lambda *_: 3)
    driver = fair_driver(chunk=512)
    counts = computed_tokens(driver)
    prompt = [i % 250 + 1 for i in range(101)]
    first, _, third = samples(1, 3, prompt)
    _, scored, _ = samples(1, 3, prompt, return_logprob=True, logprob_start_len=0)
    driver.send(first, scored)
    driver.step()
    assert counts == [2 * 101], "a scored one does not wait"
    driver.send(AbortReq(rid=scored.rid), third)
    driver.run()
    assert sum(counts) == 2 * 101 + 1


def test_samples_share_one_copy_of_their_prompt() -> None:
    driver = fair_driver()
    driver.send(*samples(1, 5, [1, 2, 3] * 9), *body_of(2, 2), *samples(3, 1, [1, 2, 3] * 9))
    driver.scheduler.ingest(driver.drain(False))
    prompts = {req.rid: req.prompt_ids for req in driver.scheduler.waiting}
    assert all(prompts[f"1.{i}"] is prompts["1.0"] for i in range(5))
    assert prompts["2.0"] is not prompts["2.1"] and prompts["3.0"] is not prompts["1.0"]
    driver.run()


def test_the_prompt_of_samples_comes_with_the_first_of_them() -> None:
    driver = fair_driver()
    first, *others = samples(1, 5, [1, 2, 3] * 9)
    alone = request("alone", [9] * 9, max_new_tokens=4)
    without = [replace(req, input_ids=id_array(), same_prompt=True) for req in others]
    driver.send(first, alone, *without)
    driver.scheduler.ingest(driver.drain(False))
    prompts = {req.rid: req.prompt_ids for req in driver.scheduler.waiting}
    assert all(prompts[req.rid] is prompts[first.rid] for req in others)
    driver.run()
    for req in (first, alone, *others):
        assert_right(driver, req)


def test_the_bias_of_samples_comes_with_the_first_of_them() -> None:
    driver = fair_driver()
    banned = dict.fromkeys(range(0, 40, 3), -100.0)
    first, *others = (
        replace(req, sampling_params=replace(req.sampling_params, logit_bias=dict(banned)))
        for req in samples(1, 3, [1, 2, 3] * 9)
    )
    alone = request("alone", [9] * 9, max_new_tokens=4)
    without = [
        replace(req, sampling_params=replace(req.sampling_params, logit_bias=None), same_bias=True) for req in others
    ]
    driver.send(first, alone, *without)
    driver.scheduler.ingest(driver.drain(False))
    biases = {req.rid: req.source.sampling_params.logit_bias for req in driver.scheduler.waiting}
    assert all(biases[req.rid] is biases[first.rid] for req in others) and biases["alone"] is None
    driver.run()
    for req in (first, alone, *others):
        assert_right(driver, req)


@pytest.mark.parametrize("body", [0, 2])
def test_a_sample_whose_bias_was_lost_is_refused(body: int) -> None:
    driver = fair_driver()
    (known,) = samples(1, 1, [1, 2, 3])
    lost = replace(request("lost", [4, 5], body=body, max_new_tokens=4), same_bias=True)
    driver.send(known, lost)
    driver.run()
    finish = driver.answers["lost"].finish
    assert finish is not None and finish.status_code == 400
    assert_right(driver, known)


@pytest.mark.parametrize("body", [0, 2])
def test_a_sample_whose_prompt_was_lost_is_refused(body: int) -> None:
    driver = fair_driver()
    (known,) = samples(1, 1, [1, 2, 3])
    lost = replace(request("lost", [], body=body, max_new_tokens=4), same_prompt=True)
    driver.send(known, lost)
    driver.run()
    finish = driver.answers["lost"].finish
    assert finish is not None and finish.status_code == 400
    assert_right(driver, known)


@pytest.mark.parametrize(
    ("flags", "num_tokens"),
    [({"disable_radix_cache": True}, 90), ({"page_size": 64}, 64), ({}, 9)],
    ids=["no cache", "less than a page", "short prompt"],
)
def test_samples_do_not_wait_for_what_they_would_not_find(flags: dict[str, object], num_tokens: int) -> None:
    driver = fair_driver(chunk=512, **flags)  # type: ignore[arg-type]
    counts = computed_tokens(driver)
    driver.send(*samples(1, 5, [1, 2, 3] * (num_tokens // 3)))
    driver.run()
    assert len(counts) == 1


def test_samples_whose_prompts_are_scored_compute_them() -> None:
    driver = fair_driver(chunk=512)
    counts = computed_tokens(driver)
    prompt = [1, 2, 3] * 15
    reqs = samples(1, 3, prompt, return_logprob=True, logprob_start_len=0)
    driver.send(*reqs)
    driver.step()
    assert counts == [3 * len(prompt)]
    for req in reqs:
        driver.send(AbortReq(rid=req.rid))
    driver.run()


@pytest.mark.parametrize("how", ["aborted", "retracted", "paused"])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
def test_samples_do_not_hang_when_the_first_one_goes(how: str, steps: int) -> None:
    driver = fair_driver(chunk=16)
    scheduler = driver.scheduler
    reqs = samples(1, 6, [i % 250 + 1 for i in range(70)])
    driver.send(*reqs)
    for _ in range(steps):
        driver.step()
    if how == "aborted":
        driver.send(AbortReq(rid="1.0"))
    elif "1.0" in scheduler.reqs and scheduler.reqs["1.0"].row:
        if how == "retracted":
            scheduler.population.retract(scheduler.reqs["1.0"], "")
        else:
            scheduler.control.pause("retract")
            driver.step()
            scheduler.control.paused = False
    driver.run()
    for req in reqs[1:]:
        assert len(driver.answers[req.rid].output_ids) == 4
    assert how == "aborted" or len(driver.answers["1.0"].output_ids) == 4


def test_no_more_prompts_in_a_step_than_are_allowed() -> None:
    driver = fair_driver(num_rows=40, chunk=512)
    driver.scheduler.planner.prefill._max_reqs = 3
    counts: list[int] = []
    launch = driver.worker.launch

    def recording(batch: StepBatch) -> ForwardResult:
        if not batch.is_decode:
            counts.append(len(batch.rows))
        return launch(batch)

    driver.worker.launch = recording  # type: ignore[method-assign]
    reqs = body_of(0, 10)
    driver.send(*(request(f"r{i}", [i + 1] * 5, max_new_tokens=3) for i, _ in enumerate(reqs)))
    driver.run()
    assert counts == [3, 3, 3, 1]


@pytest.mark.parametrize("delay", [0, 4])
def test_a_newcomer_with_many_scored_tokens_waits_for_its_turn(delay: int) -> None:
    """1,024 tokens of a step are scored at most, so such a one would be half-way beside another that is half-way."""
    driver = fair_driver(num_rows=20, num_pages=12000, chunk=4400, context_length=30000)
    driver.send(*body_of(1, 8, prompt_len=9, max_new_tokens=40))
    while len(driver.scheduler.running) < 2:
        driver.step()
    driver.send(request("long", [9] * 24000, max_new_tokens=2))
    for _ in range(1 + delay):
        driver.step()
    scored = request("scored", [8] * 1050, max_new_tokens=2, return_logprob=True, logprob_start_len=0)
    driver.send(scored)
    for _ in range(80):
        driver.step()
    assert driver.answers["scored"].finish is not None
    assert driver.answers["long"].finish is not None
