"""How many prompts a prefill step takes: as many as let first tokens come soonest, on the mean of all that wait."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_driver import Driver, assert_right, make_driver, prefills, request

import fenceline
from fenceline.config.engine_config import launch_tokens, resolve
from fenceline.config.families import ExpertsConfig
from fenceline.config.model_config import ModelConfig
from fenceline.config.server_args import ServerArgs
from fenceline.ipc.io_struct import AbortReq, TokenizedGenerateReq
from fenceline.memory_order import Points
from fenceline.model_executor.step import ForwardResult, StepBatch
from fenceline.scheduler.req import Prefix, Req
from fenceline.scheduler.schedule_policy import PrefixWork, StepSharing, num_waiting_tokens


def sharing_driver(sharing: StepSharing, **flags: object) -> tuple[Driver, list[list[int]]]:
    """A driver whose prompts share steps like that, and its steps' prompts' tokens."""
    driver = make_driver(num_pages=400, page_size=4, num_rows=16, **flags)
    driver.scheduler.planner.prefill.sharing = sharing
    return driver, prefills(driver)


def model_of(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    return dataclasses.replace(
        resolve(ServerArgs(model_path=fenceline.demo_model_path(), device="cpu")).model,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
    )


@pytest.mark.parametrize(
    ("lens", "expected"),
    [
        ([10] * 8, [[10] * 4, [10] * 4]),
        ([32, 10, 60], [[32], [10, 54], [6]]),  # 64 tokens are a step's most: 6 of the last are left
        ([100, 20, 20], [[64], [20, 36], [20]]),  # who is half-way leaves up to half of a step
        ([90, 40, 20], [[64], [26, 38], [2, 20]]),
        ([5], [[5]]),
    ],
)
def test_a_step_takes_prompts_until_it_is_long_enough(lens: list[int], expected: list[list[int]]) -> None:
    driver, steps = sharing_driver(StepSharing(0, 32), chunked_prefill_size=64)
    reqs = [request(f"r{i}", [i + 1] * n, max_new_tokens=4, ignore_eos=True) for i, n in enumerate(lens)]
    driver.send(*reqs)
    driver.run()
    assert steps == expected
    assert_right(driver, *reqs)


def test_without_chunks_too() -> None:
    driver, steps = sharing_driver(StepSharing(0, 32), chunked_prefill_size=-1)
    reqs = [request(f"r{i}", [i + 1] * n, max_new_tokens=4) for i, n in enumerate([90, 16, 16, 16])]
    driver.send(*reqs)
    driver.run()
    assert steps == [[90], [16, 16], [16]]
    assert_right(driver, *reqs)


def test_a_burst_begins_with_long_steps_and_ends_with_short_ones() -> None:
    driver, steps = sharing_driver(StepSharing(10, 8))
    reqs = [request(f"r{i}", [i + 1] * 10, max_new_tokens=4, ignore_eos=True) for i in range(15)]
    driver.send(*reqs)
    driver.run()
    # 150 tokens wait: 38 in a step; 110: 33; 70: 26; 40: 20; 20: 14.
    assert [len(step) for step in steps] == [4, 4, 3, 2, 2]
    assert_right(driver, *reqs)


@pytest.mark.parametrize(
    ("lens", "expected"),
    [
        ([10] * 8, [[10] * 3, [10] * 3, [10] * 2]),
        ([10, 40, 10, 10], [[10], [40, 10], [10]]),  # one that is longer is launched anyhow: others may join it
        ([10] * 13, [[10] * 7, *[[10] * 3] * 2]),  # a step that is longer than launching it takes
    ],
)
def test_prompts_share_the_steps_that_are_graphs(lens: list[int], expected: list[list[int]]) -> None:
    driver, steps = sharing_driver(StepSharing(32, 8, graph_tokens=32, launch_tokens=60), chunked_prefill_size=128)
    reqs = [request(f"r{i}", [i + 1] * n, max_new_tokens=4, ignore_eos=True) for i, n in enumerate(lens)]
    driver.send(*reqs)
    driver.run()
    assert steps == expected
    assert_right(driver, *reqs)


def test_a_burst_of_32_prompts_is_computed_in_graphs() -> None:
    """Of the 0.6B, whose graphs have up to 2,048 tokens: launching more kernel by kernel would take longer."""
    model = model_of(1024, 3072, 28, 16, 8, 128)
    sharing = StepSharing.of(model, 2048, launch_tokens(1, model))
    driver = make_driver(num_pages=400, page_size=16, num_rows=32, chunked_prefill_size=8192, prefill_max_requests=64)
    driver.scheduler.planner.prefill.sharing, steps = sharing, prefills(driver)
    driver.send(*[request(f"r{i}", [i + 1] * 128, max_new_tokens=2, ignore_eos=True) for i in range(32)])
    driver.run()
    assert steps == [[128] * 16, [128] * 16]


def mean_wait(num_prompts: int, prompt_len: int, cost: int, size: Callable[[int], int]) -> float:
    """Of a burst's prompts, in the time of a token, with steps of ``size`` tokens while so many tokens wait."""
    now = total = 0.0
    while num_prompts:
        prompts = min(max(1, -(-size(num_prompts * prompt_len) // prompt_len)), num_prompts)
        now += cost + prompts * prompt_len
        total += prompts * now
        num_prompts -= prompts
    return total


@settings(max_examples=30)
@given(num=st.integers(1, 300), length=st.sampled_from([64, 128, 256]), cost=st.integers(50, 400))
def test_no_fixed_length_of_steps_is_much_better(num: int, length: int, cost: int) -> None:
    sharing = StepSharing(cost, 1)
    best = min(mean_wait(num, length, cost, lambda _, s=s: s) for s in range(length, 16384, length))
    ours = mean_wait(num, length, cost, sharing.tokens)
    assert ours <= 1.03 * best


def test_a_cached_prefix_is_no_work_that_waits() -> None:
    """The prompts of the burst above, each behind the same 80 tokens: the same steps."""
    driver, steps = sharing_driver(StepSharing(10, 8))
    prefix = [99] * 80
    driver.send(request("first", [*prefix, 1], max_new_tokens=1))
    driver.run()
    steps.clear()
    reqs = [request(f"r{i}", [*prefix, *[i + 1] * 10], max_new_tokens=4, ignore_eos=True) for i in range(15)]
    driver.send(*reqs)
    driver.run()
    assert [len(step) for step in steps] == [4, 4, 3, 2, 2]
    assert all(sum(step) == 10 * len(step) for step in steps), "the prefix was cached"
    assert_right(driver, *reqs)


@pytest.mark.parametrize("num", [0, 1, 256, 257, 1000])
def test_a_long_queue_is_taken_to_be_like_its_beginning(num: int) -> None:
    waiting = [SimpleNamespace(num_tokens=100) for _ in range(num)]
    assert num_waiting_tokens(waiting, num) == 100 * num  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "cost"),
    [
        (1024, 3072, 28, 16, 8, 128, 1952),  # Qwen3-0.6B
        (4096, 12288, 36, 32, 8, 128, 357),  # Qwen3-8B
        (8192, 28672, 80, 64, 8, 128, 260),  # Llama-3.3-70B
    ],
)
def test_what_a_step_costs_of_real_models(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int, cost: int
) -> None:
    model = model_of(hidden, intermediate, layers, heads, kv_heads, head_dim)
    assert StepSharing.of(model).cost_tokens == cost
    # Eight experts of a size cost a token what one MLP of eight times that size does, however many there are.
    experts = ExpertsConfig(num_experts=128, top_k=8, intermediate_size=intermediate // 8, renormalise=True)
    mixture = dataclasses.replace(model, experts=experts, intermediate_size=1)
    assert StepSharing.of(mixture).cost_tokens == cost


# --- beside a half-way prompt


def longs(num: int, **params: object) -> list[TokenizedGenerateReq]:
    return [request(f"long{i}", [i + 1] * 200, max_new_tokens=3, **params) for i in range(num)]


def rids_of_steps(driver: Driver) -> list[dict[str, int]]:
    """The prompts of each prefill step that follows, with their tokens."""
    steps: list[dict[str, int]] = []
    launch = driver.worker.launch

    def recording(batch: StepBatch) -> ForwardResult:
        if not batch.is_decode:
            rids = {req.row: req.rid for req in driver.scheduler.reqs.values()}
            sizes = (batch.seq_lens - batch.starts).tolist()
            steps.append({rids[row]: num for row, num in zip(batch.rows.tolist(), sizes, strict=True)})
        return launch(batch)

    driver.worker.launch = recording  # type: ignore[method-assign]
    return steps


@pytest.mark.parametrize("scores", [False, True], ids=["", "with logprobs"])
@pytest.mark.parametrize("num_cached", [0, 40])
def test_a_short_prompt_does_not_wait_for_long_ones(num_cached: int, scores: bool) -> None:
    """What is cached of it does not count."""
    driver, _ = sharing_driver(StepSharing(0, 32), chunked_prefill_size=16)
    cached = [99] * num_cached
    driver.send(request("before", [*cached, 98], max_new_tokens=1))
    driver.run()
    steps = rids_of_steps(driver)
    logprobs: dict[str, object] = {"return_logprob": True, "logprob_start_len": 0} if scores else {}
    reqs = longs(6, **logprobs)
    driver.send(*reqs)
    for _ in range(3):
        driver.step()
    new = request("new", [*cached, 5, 6, 7], max_new_tokens=3)
    driver.send(new)
    driver.step()
    assert steps[-1] == {"new": 3, "long0": 13}
    driver.run()
    assert_right(driver, new, *reqs)


def test_a_half_way_prompt_keeps_half_of_each_step() -> None:
    driver, _ = sharing_driver(StepSharing(0, 32), chunked_prefill_size=16)
    steps = rids_of_steps(driver)
    sent = longs(1)
    driver.send(*sent)
    while sent[0].rid not in driver.answers:
        driver.step()
        sent += (new := [request(f"new{len(sent) + i}", [i + 5] * 3, max_new_tokens=1) for i in range(4)])
        driver.send(*new)
    assert all(step["long0"] in (8, 10, 16) for step in steps[:-1] if "long0" in step)
    assert [len(step) for step in steps].count(3) > 10, "two newcomers beside it"
    driver.run()
    assert_right(driver, *sent)


def test_a_worse_priority_passes_nobody() -> None:
    driver, _ = sharing_driver(StepSharing(0, 32), chunked_prefill_size=16, enable_priority_scheduling=True)
    steps = rids_of_steps(driver)
    reqs = longs(2, priority=5)
    driver.send(*reqs)
    driver.step()
    worse, better = (request(rid, [7, 8, 9], max_new_tokens=1, priority=rank) for rid, rank in (("w", 1), ("b", 5)))
    driver.send(worse, better)
    driver.run()
    first = {rid: index for index, step in reversed(list(enumerate(steps))) for rid in step}
    assert first["b"] == 1 and first["w"] > first["long1"] > first["b"]
    assert_right(driver, worse, better, *reqs)


def test_nobody_passes_a_better_priority_that_waits() -> None:
    driver, _ = sharing_driver(StepSharing(0, 32), chunked_prefill_size=16, enable_priority_scheduling=True)
    steps = rids_of_steps(driver)
    half_way = longs(1, priority=5)
    driver.send(*half_way)
    driver.step()
    better = request("better", [8] * 40, max_new_tokens=1, priority=9)
    equal = request("equal", [9] * 3, max_new_tokens=1, priority=5)
    driver.send(better, equal)
    driver.run()
    first = {rid: index for index, step in reversed(list(enumerate(steps))) for rid in step}
    assert first["equal"] >= first["better"]
    assert_right(driver, better, equal, *half_way)


def test_the_end_of_a_half_way_prompt_shares_its_step() -> None:
    """What is left over then stays empty: those that follow are looked at in the next step."""
    driver, _ = sharing_driver(StepSharing(0, 32), chunked_prefill_size=16)
    steps = rids_of_steps(driver)
    reqs = [
        request(rid, [index + 1] * num, max_new_tokens=1)
        for index, (rid, num) in enumerate((("a", 26), ("b", 3), ("c", 40)))
    ]
    driver.send(*reqs)
    driver.run()
    assert steps[:3] == [{"a": 16}, {"b": 3, "a": 10}, {"c": 16}]
    assert_right(driver, *reqs)


def test_a_prompt_with_many_logprobs_is_not_short() -> None:
    driver = make_driver(4000, 4, 4, context_length=9000, chunked_prefill_size=4096)
    steps = rids_of_steps(driver)
    reqs = [
        request("long", [1] * 5000, max_new_tokens=1),
        request("scored", [2] * 1500, max_new_tokens=1, return_logprob=True, logprob_start_len=0),
    ]
    driver.send(*reqs)
    driver.run()
    assert steps[:2] == [{"long": 4096}, {"long": 904, "scored": 1024}]
    assert_right(driver, *reqs)


def test_a_half_way_prompt_keeps_half_of_what_a_step_scores() -> None:
    """Else short prompts with logprobs would leave nothing to it, and it would be in the step without a token."""
    driver = make_driver(4000, 4, 20, context_length=9000, chunked_prefill_size=4096)
    steps = rids_of_steps(driver)
    scores: dict[str, object] = {"return_logprob": True, "logprob_start_len": 0}
    long = request("long", [1] * 7000, max_new_tokens=1, **scores)
    driver.send(long)
    driver.step()
    short = [request(f"short{i}", [i + 2] * 510, max_new_tokens=1, **scores) for i in range(8)]
    driver.send(*short)
    driver.run()
    beside = [step for step in steps if "long" in step and len(step) > 1]
    assert beside and all(step["long"] >= 512 for step in beside)
    assert_right(driver, long, *short)


def test_not_more_prompts_beside_it_than_are_allowed_in_a_step() -> None:
    driver, _ = sharing_driver(StepSharing(0, 32), chunked_prefill_size=16, prefill_max_requests=3)
    steps = rids_of_steps(driver)
    reqs = longs(1)
    driver.send(*reqs)
    driver.step()
    shorts = [request(f"s{i}", [7, i + 1], max_new_tokens=1) for i in range(4)]
    driver.send(*shorts)
    driver.run()
    assert [len(step) for step in steps[1:3]] == [3, 3]
    assert_right(driver, *shorts, *reqs)


@pytest.mark.parametrize("what", ["rows", "memory"])
def test_who_has_no_room_waits_beside_it_too(what: str) -> None:
    driver, _ = sharing_driver(StepSharing(0, 32), chunked_prefill_size=16)
    scheduler = driver.scheduler
    free = scheduler.memory.rows.num_free if what == "rows" else scheduler.memory.num_available_pages - 52
    rows = scheduler.memory.rows.alloc(free - 1) if what == "rows" else None
    pages = scheduler.memory.pages.alloc(free) if what == "memory" else None
    steps = rids_of_steps(driver)
    reqs = longs(1)
    driver.send(*reqs)
    driver.step()
    shorts = [request(f"s{i}", [7, i + 1], max_new_tokens=5, ignore_eos=True) for i in range(4)]
    driver.send(*shorts)
    for _ in range(6):
        driver.step()
    assert all(list(step) == ["long0"] for step in steps)
    for lease, pool in ((rows, scheduler.memory.rows), (pages, scheduler.memory.pages)):
        if lease is not None:
            pool.retire(lease[0], Points.none())
    driver.run()
    assert_right(driver, *shorts, *reqs)


def test_no_more_is_looked_at_than_a_bound() -> None:
    """However many wait, and a prompt that has been found too long once is not looked up again."""
    driver, _ = sharing_driver(StepSharing(0, 32), chunked_prefill_size=16)
    driver.send(*longs(1), *(request(f"w{i}", [i % 250 + 1, 2] * 40, max_new_tokens=1) for i in range(1000)))
    driver.step()
    num_looked = 0
    match = driver.scheduler.memory.match

    def counted(req: Req) -> Prefix:
        nonlocal num_looked
        num_looked += 1
        return match(req)

    driver.scheduler.memory.match = counted  # type: ignore[method-assign]
    driver.step()
    assert 0 < num_looked <= 128
    for rid in list(driver.scheduler.reqs):
        driver.send(AbortReq(rid=rid))
    driver.run()


# --- the work of a step on a CPU


@pytest.mark.parametrize("other", ["none", "decodes", "waits"])
def test_a_step_behind_a_long_prefix_has_fewer_tokens(other: str) -> None:
    """Attention to the prefix is work as well, for which others wait."""
    driver = make_driver(1200, 4, 4, context_length=4000, chunked_prefill_size=128)
    reqs = [request("long", [1] * 3500, max_new_tokens=1)]
    if other == "waits":
        reqs.append(request("next", [2] * 200, max_new_tokens=1))
    if other == "decodes":
        reqs.append(request("reader", [2, 3], max_new_tokens=200, ignore_eos=True))
        driver.send(reqs[-1])
        driver.step()
    steps: list[tuple[int, int]] = []
    launch = driver.worker.launch

    def recording(batch: StepBatch) -> ForwardResult:
        if not batch.is_decode:
            columns = ((batch.seq_lens - batch.starts).tolist(), batch.starts.tolist())
            steps.extend((num, start) for num, start in zip(*columns, strict=True) if num > 2)
        return launch(batch)

    driver.worker.launch = recording  # type: ignore[method-assign]
    driver.send(*(req for req in reqs if req.rid != "reader"))
    driver.run()
    work = PrefixWork.of(driver.config.model, "cpu")
    assert work is not None and work.even_tokens == 1632, "of the demo model"
    of_full_step = work.of_tokens(128, 0)
    assert steps[0] == (128, 0)
    largest = max(work.of_tokens(*step) for step in steps)
    assert of_full_step < largest <= of_full_step * 1.25
    assert_right(driver, *reqs)


def test_a_prompt_comes_to_its_end_however_long_it_is() -> None:
    driver = make_driver(400, 4, 4, context_length=1000, chunked_prefill_size=128)
    driver.scheduler.planner.prefill._prefix_work = PrefixWork(1)
    steps = rids_of_steps(driver)
    long = request("long", [1] * 900, max_new_tokens=1)
    driver.send(long)
    driver.run()
    sizes = [step["long"] for step in steps]
    assert sizes[0] == 128 and min(sizes[:-1]) == sizes[-2] == 32
    assert_right(driver, long)


def test_a_prompt_ends_although_the_draft_looks_far_ahead() -> None:
    """A chunk other than the last ends that many tokens before the prompt's end, so the last has as many at least."""
    driver = make_driver(400, 1, 4, chunked_prefill_size=4)
    driver.scheduler.memory.tree.lookahead = 2
    driver.scheduler.planner.prefill._prefix_work = PrefixWork(1)
    steps = rids_of_steps(driver)
    long = request("long", [1] * 50, max_new_tokens=1)
    driver.send(long)
    driver.run()
    assert steps[0] == {"long": 4} and steps[-1] == {"long": 2}
    assert_right(driver, long)


@given(even=st.integers(1, 10_000), prefix=st.integers(0, 100_000), work=st.floats(0, 1e6))
def test_as_many_tokens_as_the_work_allows_and_not_one_more(even: int, prefix: int, work: float) -> None:
    of = PrefixWork(even)
    num = of.max_tokens(work, prefix)
    assert of.of_tokens(num, prefix) <= work * (1 + 1e-9)
    assert of.of_tokens(num + 1, prefix) > work * (1 - 1e-9)


def test_who_is_computed_beside_a_half_prompt_is_whole() -> None:
    """Though its own prefix, which is cached, is so long that its few tokens are much work."""
    driver = make_driver(4000, 4, 8, context_length=9000, chunked_prefill_size=128)
    steps = rids_of_steps(driver)
    prefix = [5] * 6000
    first = request("first", [*prefix, 1], max_new_tokens=1)
    driver.send(first)
    driver.run()
    long = request("long", [1] * 2000, max_new_tokens=1)
    driver.send(long)
    driver.step()
    behind = [request(f"behind{i}", [*prefix, *[i + 2] * 60], max_new_tokens=1) for i in range(4)]
    short = request("short", [9] * 10, max_new_tokens=1)
    driver.send(*behind, short)
    driver.run()
    assert any(step.keys() >= {"short", "long"} for step in steps)
    assert all("long" in step for step in steps if "short" in step), "it does not wait for the long ones"
    assert_right(driver, first, long, *behind, short)


def test_prompts_behind_long_prefixes_share_a_step() -> None:
    driver = make_driver(4000, 4, 8, context_length=9000, chunked_prefill_size=128)
    steps = rids_of_steps(driver)
    prefix = [5] * 6000
    first = request("first", [*prefix, 1], max_new_tokens=1)
    driver.send(first)
    driver.run()
    steps.clear()
    reqs = [request(f"r{i}", [*prefix, *[i + 2] * 12], max_new_tokens=1) for i in range(8)]
    driver.send(*reqs)
    driver.run()
    # 12 tokens there are the work of 56: after the third it is more than that of 128 without a prefix, times 1.25.
    assert [len(step) for step in steps] == [3, 3, 2]
    assert_right(driver, first, *reqs)
