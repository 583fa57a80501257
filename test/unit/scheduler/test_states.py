"""Recurrent states in the scheduler: requests go on from the right ones, and all snapshots come back.

The worker's states are the tokens that they have absorbed, and exist at multiples of 8 tokens.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from scheduler_driver import (
    Driver,
    assert_right,
    capacity,
    expected_output,
    make_driver,
    make_tiered_driver,
    prefills,
    request,
)
from token_worker import TokenWorker

from fenceline.ipc.io_struct import (
    AbortReq,
    ContinueGenerationReq,
    FlushCacheReq,
    PauseGenerationReq,
    TokenizedGenerateReq,
)
from fenceline.mem_cache.tree.hiradix_cache import HiRadixCache
from fenceline.mem_cache.tree.radix_cache import RadixCache
from fenceline.memory_order import LeasePool

GRID = 8


def _cached(driver: Driver, req: TokenizedGenerateReq) -> int:
    driver.send(req)
    driver.run()
    assert_right(driver, req)
    last = driver.answers[req.rid].last
    assert last is not None
    return last.cached_tokens


def _prompt(first: int, num_tokens: int) -> list[int]:
    return [(first + number * number) % 200 for number in range(num_tokens)]


def test_a_prompt_goes_on_from_the_last_state_of_its_prefix() -> None:
    driver = make_driver(num_snapshots=8)
    assert _cached(driver, request("a", _prompt(1, 30), max_new_tokens=1)) == 0
    assert _cached(driver, request("b", _prompt(1, 30), max_new_tokens=1)) == 24
    # The pages of 20 tokens are there, and no state after them: only that after 24.
    assert _cached(driver, request("c", [*_prompt(1, 20), 5, 5, 5, 5, 5, 5], max_new_tokens=1)) == 0
    assert _cached(driver, request("d", [*_prompt(1, 20), 5, 5, 5, 5, 5, 5], max_new_tokens=1)) == 24


def test_each_chunk_of_a_prompt_leaves_a_state() -> None:
    driver = make_driver(num_snapshots=8, chunked_prefill_size=12)
    assert _cached(driver, request("a", _prompt(1, 30), max_new_tokens=1)) == 0  # after 8, 24 and no more
    assert _cached(driver, request("b", [*_prompt(1, 20), 3], max_new_tokens=1)) == 8


def test_a_shared_beginning_is_found_from_the_third_request_on() -> None:
    """The second one leaves a state where it parts from the first, whose own state is too far on for it. Then all who
    begin so find that, and it costs no further step."""
    driver = make_driver(num_snapshots=8, chunked_prefill_size=128)
    steps = prefills(driver)
    system = _prompt(1, 21)
    assert [_cached(driver, request(f"r{n}", [*system, *[n] * 20], max_new_tokens=1)) for n in range(4)] == [
        0,
        0,
        16,
        16,
    ]
    assert steps == [[41], [16], [25], [25], [25]]


def test_a_prompt_that_ends_at_a_point_of_the_grid_finds_the_one_before() -> None:
    """The other samples at once, another request from the third one on."""
    driver = make_driver(num_snapshots=8, chunked_prefill_size=128)
    reqs = [request(rid, _prompt(1, 40), body=1, max_new_tokens=2, ignore_eos=True) for rid in "ab"]
    driver.send(*reqs)
    driver.run()
    assert_right(driver, *reqs)
    assert [driver.answers[rid].last.cached_tokens for rid in "ab"] == [0, 32]
    cached = [_cached(driver, request(f"r{n}", _prompt(2, 40), max_new_tokens=2)) for n in range(4)]
    assert cached == [0, 0, 32, 32]


def test_a_prompt_of_more_chunks_than_snapshots_keeps_its_last_states() -> None:
    driver = make_driver(num_snapshots=2, chunked_prefill_size=8)
    assert _cached(driver, request("a", _prompt(1, 60), max_new_tokens=1)) == 0
    assert _cached(driver, request("b", _prompt(1, 60), max_new_tokens=1)) == 56
    assert _cached(driver, request("c", _prompt(1, 50), max_new_tokens=1)) == 48


@pytest.mark.parametrize("most", [1, 4])
def test_a_conversation_goes_on_from_the_end_of_the_answer(most: int) -> None:
    driver = make_driver(num_snapshots=8, max_step_tokens=most)
    first = request("a", _prompt(1, 10), max_new_tokens=20, ignore_eos=True)
    assert _cached(driver, first) == 0
    answer = driver.answers["a"].output_ids
    assert _cached(driver, request("b", [*first.input_ids, *answer, 7, 7], max_new_tokens=20, ignore_eos=True)) == 24


def test_states_go_before_pages_the_oldest_first() -> None:
    driver = make_driver(num_snapshots=2)
    for number in (1, 2, 3):
        assert _cached(driver, request(f"a{number}", _prompt(number, 17), max_new_tokens=1)) == 0
    tree = driver.scheduler.memory.tree
    assert tree.num_states == 2 and tree.num_pages == 12
    for number, cached in ((3, 16), (2, 16), (1, 0)):
        assert _cached(driver, request(f"b{number}", _prompt(number, 17), max_new_tokens=1)) == cached


def test_without_snapshots_nothing_is_shared() -> None:
    driver = make_driver(num_snapshots=0)
    assert [_cached(driver, request(rid, _prompt(1, 30), max_new_tokens=9)) for rid in "ab"] == [0, 0]


def test_a_snapshot_may_go_in_the_step_that_reads_it() -> None:
    """One request waits for the other's row, begins with the state that this one leaves, and its own snapshot takes
    the place of that: all in one turn, before any copy has been made."""
    driver = make_driver(num_rows=1, num_snapshots=1)
    assert isinstance(driver.worker, TokenWorker)
    driver.worker.is_quick = lambda: True
    first = request("a", _prompt(1, 10), max_new_tokens=9, ignore_eos=True)
    answer = expected_output(first, capacity(driver))
    second = request("b", [*first.input_ids, *answer, *_prompt(3, 8)], max_new_tokens=2, ignore_eos=True)
    driver.send(first, second)
    driver.run()
    assert_right(driver, first, second)
    assert driver.answers["b"].last.cached_tokens == 16


def test_without_snapshots_samples_do_not_wait_for_one_another() -> None:
    """They would find nothing."""
    driver = make_driver(num_snapshots=0, chunked_prefill_size=128)
    steps = prefills(driver)
    driver.send(*(request(rid, _prompt(1, 41), body=1, max_new_tokens=2) for rid in "ab"))
    driver.run()
    assert steps == [[41, 41]]


def test_a_retracted_request_answers_the_same() -> None:
    driver = make_driver(num_pages=20, num_snapshots=4, schedule_conservativeness=0.01)
    reqs = [request(f"r{n}", _prompt(n, 9 + n), max_new_tokens=24, ignore_eos=True) for n in range(4)]
    driver.send(*reqs)
    driver.run()
    assert_right(driver, *reqs)
    assert driver.scheduler.stats.num_retractions > 0


@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("after", range(1, 9))
def test_an_aborted_request_leaves_no_wrong_state(after: int, most: int) -> None:
    """Whatever step was in flight: of a chunk, or one that came to a multiple of 8 tokens."""
    driver = make_driver(num_snapshots=8, chunked_prefill_size=12, max_step_tokens=most)
    driver.send(request("a", _prompt(1, 30), max_new_tokens=30, ignore_eos=True))
    for _ in range(after):
        driver.step()
    driver.send(AbortReq(rid="a"))
    driver.run()
    assert _cached(driver, request("b", _prompt(1, 30), max_new_tokens=12, ignore_eos=True)) % GRID == 0


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pauses_and_flushes_keep_the_books(mode: str) -> None:
    driver = make_driver(num_snapshots=3)
    reqs = [request(f"r{n}", _prompt(n, 20), max_new_tokens=18, ignore_eos=True) for n in range(3)]
    driver.send(*reqs)
    for _ in range(6):
        driver.step()
    driver.send(PauseGenerationReq(id="p", mode=mode))
    driver.step()
    driver.step()
    driver.send(FlushCacheReq(id="f"), ContinueGenerationReq(id="c"))
    driver.run()
    assert_right(driver, *reqs)
    driver.send(FlushCacheReq(id="g"))
    driver.step()
    assert driver.scheduler.memory.tree.num_states == 0
    assert _cached(driver, request("last", _prompt(1, 20), max_new_tokens=1)) == 0


@pytest.mark.parametrize("most", [1, 5])
@pytest.mark.parametrize("seed", range(6))
def test_any_requests_with_common_prefixes(seed: int, most: int) -> None:
    """Whatever is cut, cached, evicted, aborted and retracted: the right tokens, and clean books at the end. Steps
    yield up to ``most`` tokens; if that is several, they absorb those of the steps before."""
    random = Random(seed)
    page_size = random.choice((1, 2, 4, 8))
    driver = make_driver(
        num_pages=random.choice((120, 160, 400)) // page_size,
        page_size=page_size,
        num_rows=random.randint(1, 5),
        num_snapshots=random.choice((1, 2, 4, 16)),
        max_step_tokens=most,
        chunked_prefill_size=random.choice((8, 16, 64, -1)),
        schedule_conservativeness=random.choice((0.01, 1.0)),
        disable_overlap_schedule=random.random() < 0.2,
    )
    assert isinstance(driver.worker, TokenWorker)
    driver.worker.is_quick = lambda: random.random() < 0.5
    reqs: list[TokenizedGenerateReq] = []
    aborted = set()
    for number in range(24):
        before = [*random.choice(reqs).input_ids] if reqs and random.random() < 0.3 else _prompt(1, 60)
        prompt = [*before[: random.randint(4, 60)], *random.choices((1, 2), k=random.randint(1, 9))]
        reqs.append(
            request(f"r{number}", prompt, max_new_tokens=random.randint(1, 30), ignore_eos=random.random() < 0.5)
        )
        driver.send(reqs[-1])
        for _ in range(random.randint(0, 12)):
            driver.step()
        if random.random() < 0.2:
            aborted.add(random.choice(reqs).rid)
            driver.send(*(AbortReq(rid=rid) for rid in aborted))
        if random.random() < 0.1:
            driver.send(PauseGenerationReq(id=f"p{number}", mode=random.choice(("retract", "in_place"))))
            driver.step()
            driver.send(ContinueGenerationReq(id=f"c{number}"))
    driver.run()
    assert_right(driver, *(req for req in reqs if req.rid not in aborted))
    driver.scheduler.memory.tree.check()


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_state_that_is_there_already_is_given_back(ahead: int) -> None:
    """``ahead``: the tree's pages depend on so many tokens behind them, a state does not."""
    pages, states = LeasePool("pages", 16), LeasePool("states", 4)
    tree = RadixCache(pages, 4, lookahead=ahead, states=states)
    leased = pages.alloc(4)
    assert leased is not None
    tokens = list(range(16 + ahead))
    tree.insert(tokens[: 8 + ahead], leased[0][:2])
    (first, _), (second, _), num_created = tree.lease_state(), tree.lease_state(), tree.num_created  # type: ignore[misc]
    tree.give_state(tokens[: 8 + ahead], first)
    assert tree.num_created > num_created  # a match that waits is looked up again
    tree.give_state(tokens[: 8 + ahead], second)
    tree.insert(tokens, leased[0])
    assert tree.match_prefix(tokens).state == first and states.num_leased == tree.num_states == 1
    tree.check()
    tree.evict(4)
    assert states.num_leased == 0


def test_a_state_is_no_further_use_of_its_prefix() -> None:
    """Under write_through_selective a prefix goes to the host at its second use."""
    pages, states = LeasePool("pages", 16), LeasePool("states", 4)
    on_host = LeasePool("host pages", 16, reserved=0), LeasePool("host states", 4, reserved=0)
    tree = HiRadixCache(pages, 4, on_host[0], "write_through_selective", states=(states, on_host[1]))
    leased, slot = pages.alloc(2), tree.lease_state()
    assert leased is not None and slot is not None
    node = tree.insert(np.arange(8), leased[0]).node
    tree.give_state(np.arange(8), slot[0])
    assert tree.backup_candidates(node) == []
    assert tree.match_prefix(np.arange(8)).state == slot[0]
    assert tree.backup_candidates(node) == [node]


def test_states_of_nodes_that_left_do_not_pile_up() -> None:
    pages, states = LeasePool("pages", 9), LeasePool("states", 4)
    tree = RadixCache(pages, 4, states=states)
    for number in range(100):
        leased = pages.alloc(1)
        assert leased is not None
        tree.insert([number] * 4, leased[0])
        slot = tree.lease_state()
        assert slot is not None
        tree.give_state([number] * 4, slot[0])
        tree.evict(1)
    tree.check()
    assert len(tree._stateful) <= 2 * states.size


# --- on the host ---------------------------------------------------------------------------------------


def _num_states(driver: Driver) -> tuple[int, int]:
    """On the device and on the host."""
    tree = driver.scheduler.memory.tree
    assert isinstance(tree, HiRadixCache)
    return tree.num_states, tree.host.num_states


def _fill(driver: Driver, first: int = 100, num_prompts: int = 3) -> None:
    for number in range(num_prompts):
        _cached(driver, request(f"fill{first + number}", _prompt(first + number, 31), max_new_tokens=1))


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_a_state_comes_back_from_the_host_with_its_pages(policy: str) -> None:
    driver = make_tiered_driver(num_snapshots=4, num_host_states=16, hicache_write_policy=policy)
    for rid in "ab":
        _cached(driver, request(rid, _prompt(1, 30), max_new_tokens=1))
    _fill(driver)
    assert _cached(driver, request("c", [*_prompt(1, 30), 5, 5], max_new_tokens=1)) == 24
    details = driver.answers["c"].last.cached_tokens_details
    assert details is not None and (details.device, details.host) == (0, 24)
    num_bytes = driver.worker.hicache.num_moved["load"]
    assert _cached(driver, request("d", [*_prompt(1, 30), 6, 6], max_new_tokens=1)) == 24
    assert driver.worker.hicache.num_moved["load"] == num_bytes  # both are on the device again


def test_a_state_comes_back_to_pages_that_have_stayed() -> None:
    driver = make_tiered_driver(num_pages=60, num_snapshots=1, num_host_states=16)
    _cached(driver, request("a", _prompt(1, 30), max_new_tokens=1))
    _fill(driver, num_prompts=1)  # takes the snapshot, and no page
    assert _num_states(driver) == (1, 2)
    assert _cached(driver, request("b", _prompt(1, 30), max_new_tokens=1)) == 24
    details = driver.answers["b"].last.cached_tokens_details
    assert details is not None and (details.device, details.host) == (24, 0)


def test_pages_on_the_host_without_a_state_are_no_hit() -> None:
    driver = make_tiered_driver(num_snapshots=4, num_host_states=2, chunked_prefill_size=8)
    _cached(driver, request("a", _prompt(1, 30), max_new_tokens=1))  # states after 8, 16 and 24, of which two fit
    _fill(driver)
    tree = driver.scheduler.memory.tree
    assert tree.match_prefix(np.array(_prompt(1, 30))).num_known == 28  # the pages are there
    assert _cached(driver, request("b", _prompt(1, 30), max_new_tokens=1)) == 0


def test_a_flush_gives_back_the_states_of_both_tiers() -> None:
    driver = make_tiered_driver(num_snapshots=4)
    _cached(driver, request("a", _prompt(1, 30), max_new_tokens=1))
    driver.send(FlushCacheReq(id="f"))
    driver.step()
    assert _num_states(driver) == (0, 0) and driver.worker.hicache.host_states.slots.num_leased == 0


class _SlowGrammar:
    """Accepts every token, until it is found to take too long."""

    is_too_slow = ended = False

    def may_end_with(self, token: int) -> bool:
        return False

    def accept(self, token: int) -> bool:
        return True


@pytest.mark.parametrize("num_new", (12, 13, 14))
def test_a_request_with_a_slow_grammar_leaves_no_wrong_state(num_new: int) -> None:
    """It ends when a token is published while the next step is in flight, which may come to a multiple of 8 tokens."""
    driver = make_driver(num_snapshots=8)
    first = request("a", _prompt(1, 10), max_new_tokens=40, ignore_eos=True)
    driver.send(first)
    driver.step()
    grammar, population = _SlowGrammar(), driver.scheduler.population
    driver.scheduler.reqs["a"].grammar = grammar  # type: ignore[assignment]
    population.num_constrained += 1
    driver.worker.is_quick = lambda: False  # type: ignore[attr-defined]
    tokens = driver.scheduler.reqs["a"].output_ids
    while len(tokens) < num_new:
        driver.step()
    grammar.is_too_slow = True
    driver.run()
    assert driver.answers["a"].finish is not None and driver.answers["a"].finish.type == "abort"
    prompt = [*first.input_ids, *driver.answers["a"].output_ids, 7, 7]
    _cached(driver, request("b", prompt, max_new_tokens=4, ignore_eos=True))
