"""Schedulers of several ranks: they see one value a turn, decide the same, and notice where they do not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from scheduler_driver import Driver, assert_right, make_driver, make_tiered_driver, request
from token_worker import TokenTransfers, TokenWorker, next_token

from fenceline.ipc.io_struct import AbortReq, GetInternalStateReq, Message, PortArgs, TickReq, TokenizedGenerateReq
from fenceline.ipc.rank_board import NUM_NEWS, NUM_STEPS, RankBoard, create_rank_board
from fenceline.model_executor.step import StepBatch, StepOutput
from fenceline.scheduler.ranks import TURN_DECODER, FollowingRank, LeadingRank, RanksDifferError, Turn


class Group:
    """Ranks in one thread, each with a driver. A turn of the leader's loop is followed by one of each other's."""

    def __init__(self, size: int, folder: Path, make: Callable[..., Driver] = make_driver, **flags: object) -> None:
        ports = PortArgs(scheduler=f"ipc://{folder}/scheduler", detokenizer="", tokenizer="")
        create_rank_board(ports, size)
        self.boards = [RankBoard(ports, rank, size) for rank in range(size)]
        self.drivers = [make(**flags) for _ in range(size)]
        self.turns: list[deque[bytes]] = [deque() for _ in range(size - 1)]
        leader = self.drivers[0]
        leader.scheduler.ranks = LeadingRank(
            self.boards[0],
            leader.worker,
            lambda block, timeout_ms: leader.drain(False),
            [turns.append for turns in self.turns],
        )
        for rank, turns in enumerate(self.turns, start=1):
            driver = self.drivers[rank]
            receive = lambda turns=turns: TURN_DECODER.decode(turns.popleft())  # noqa: E731
            driver.scheduler.ranks = FollowingRank(self.boards[rank], driver.worker, receive)

    def step(self) -> None:
        for driver in self.drivers[1:]:  # who waits for the next turn has said before what has arrived
            flight, link = driver.flight, driver.scheduler.ranks
            assert link is not None
            asked = flight is not None and not flight.batch.is_decode
            link.post_progress((flight.number, flight.result) if asked else None)  # type: ignore[union-attr]
        self.drivers[0].step()
        for driver, turns in zip(self.drivers[1:], self.turns, strict=True):
            if turns:
                driver.flight = driver.scheduler.step(driver.flight)
                assert not turns, "one turn for each of the leader's"

    def run(self, *messages: Message, max_steps: int = 5000) -> None:
        """Until everything is answered on all ranks."""
        leader = self.drivers[0]
        leader.send(*messages)
        for _ in range(max_steps):
            if not (leader.pending or leader.scheduler.reqs or leader.flight is not None):
                break
            self.step()
        self.settle()

    def settle(self) -> None:
        """Until all transfers have ended on all ranks."""
        for _ in range(5000):
            if not any(driver.scheduler.memory.num_outstanding for driver in self.drivers):
                break
            self.step()
        for driver in self.drivers:
            assert driver.scheduler.memory.num_outstanding == 0
            driver.scheduler.memory.check_memory(every_page=True)

    def answers(self) -> list[dict[str, list[int]]]:
        return [{rid: answer.output_ids for rid, answer in driver.answers.items()} for driver in self.drivers]


def requests(num: int, seed: int = 0) -> list[TokenizedGenerateReq]:
    random = Random(seed)
    common = [random.randrange(200) for _ in range(24)]
    return [
        request(
            f"r{i}",
            common[: random.randrange(24)] + [random.randrange(200) for _ in range(random.randrange(1, 40))],
            seed=i,
            max_new_tokens=random.randrange(1, 40),
        )
        for i in range(num)
    ]


@pytest.mark.parametrize(("size", "num_snapshots"), [(4, None), (3, 4)])
def test_ranks_whose_devices_differ_in_speed_decide_the_same(
    size: int, num_snapshots: int | None, tmp_path: Path
) -> None:
    """Short of memory, so that requests are retracted; results arrive when each rank's own dice say. In the last case
    requests begin with states of recurrent layers, of which there are few."""
    group = Group(size, tmp_path, num_pages=40, schedule_conservativeness=0.01, num_snapshots=num_snapshots)
    speeds = [Random(rank) for rank in range(size)]
    for driver, speed in zip(group.drivers, speeds, strict=True):
        driver.worker.is_quick = lambda speed=speed: speed.random() < 0.7  # type: ignore[attr-defined]
    reqs = requests(40)
    leader = group.drivers[0]
    leader.send(*reqs[:20])
    for _ in range(30):
        group.step()
    leader.send(AbortReq(rid="r12"), *reqs[20:], AbortReq(rid="r31"))
    group.run(max_steps=5000)
    first, *others = group.answers()
    assert all(answers == first for answers in others)
    assert_right(leader, *[req for req in reqs if req.rid not in ("r12", "r31")])
    assert group.drivers[0].scheduler.stats.num_retractions > 0
    assert len({driver.scheduler.num_launched for driver in group.drivers}) == 1


def test_what_time_limits_end_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    """The time comes with ticks, which are input like all other messages."""
    group = Group(2, tmp_path, num_rows=2, req_waiting_timeout=10.0, req_running_timeout=25.0)
    leader, random = group.drivers[0], Random(3)
    now = 1000.0
    for round in range(12):
        leader.send(*(request(f"{round}.{i}", [i + 1, round], seed=i, max_new_tokens=60) for i in range(2)))
        now += random.choice((0.1, 4.0, 9.0))
        leader.send(TickReq(now=now))
        for _ in range(random.randrange(1, 6)):
            group.step()
            assert len({tuple(driver.scheduler.reqs) for driver in group.drivers}) == 1
    group.run()
    finishes = [{rid: answer.finish for rid, answer in driver.answers.items()} for driver in group.drivers]
    assert finishes[0] == finishes[1] and group.answers()[0] == group.answers()[1]
    said = [finish.message for finish in finishes[0].values() if finish is not None and finish.type == "abort"]
    assert {"running" if "still running" in message else "waiting" for message in said} == {"running", "waiting"}


@pytest.mark.parametrize(("size", "policy"), [(2, "write_back"), (3, "write_through_selective")])
def test_ranks_with_different_transfers_decide_the_same(size: int, policy: str, tmp_path: Path) -> None:
    """Prefixes are evicted, retracted requests offloaded, and all come back from the host; when a copy runs and a step
    ends is each rank's own dice."""
    seeds = iter(range(size))
    group = Group(
        size,
        tmp_path,
        lambda **flags: make_tiered_driver(seed=next(seeds), **flags),
        hicache_write_policy=policy,
        retract_policy="offload",
        schedule_conservativeness=0.01,
    )
    leader = group.drivers[0]
    for round in range(2):
        reqs = [
            request(f"{round}-{i}", req.input_ids, seed=i, max_new_tokens=req.sampling_params.max_new_tokens)
            for i, req in enumerate(requests(30))
        ]
        group.run(*reqs)
        assert_right(leader, *reqs)
    first, *others = group.answers()
    assert all(answers == first for answers in others)
    assert leader.scheduler.stats.num_retractions > 0
    for driver in group.drivers:
        assert isinstance(driver.worker.hicache, TokenTransfers)
        assert min(driver.worker.hicache.num_moved.values()) > 0


def test_a_transfer_has_ended_when_it_has_ended_on_all_ranks(tmp_path: Path) -> None:
    group = Group(2, tmp_path, make_tiered_driver)
    followed = group.drivers[1].worker.hicache
    assert isinstance(followed, TokenTransfers)
    ended = followed.ended
    followed.ended = lambda: (0, 0)  # type: ignore[method-assign]
    leader = group.drivers[0]
    leader.send(*requests(1))
    for _ in range(60):
        group.step()
    assert len(leader.answers) == 1 and leader.scheduler.memory.num_outstanding > 0
    followed.ended = ended  # type: ignore[method-assign]
    group.settle()


def test_which_grammars_are_too_slow_rank_0_says_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(2, tmp_path)
    ended: list[list[int]] = []
    for driver, overdue in zip(group.drivers, ([3, 5], [4]), strict=True):
        monkeypatch.setattr(driver.scheduler.grammars, "overdue", lambda overdue=overdue: overdue)
        monkeypatch.setattr(driver.scheduler.grammars, "end", ended.append)
    group.drivers[0].send(*requests(1))
    group.step()
    assert ended == [[3, 5]] * 2


def test_results_count_as_arrived_when_all_ranks_have_them(tmp_path: Path) -> None:
    group = Group(2, tmp_path)
    quick = [True, False]
    for driver, rank in zip(group.drivers, range(2), strict=True):
        driver.worker.is_quick = lambda rank=rank: quick[rank]  # type: ignore[attr-defined]
    leader, turn = group.drivers[0], group.drivers[0].scheduler.ranks
    assert turn is not None
    leader.send(*requests(1))
    group.step()
    assert leader.flight is not None
    awaited = leader.flight.number, leader.flight.result
    assert not turn.turn(False, None, awaited)[1].results_arrived
    group.boards[1].post_arrived(awaited[0])
    assert turn.turn(False, None, awaited)[1].results_arrived


def test_who_only_observes_is_answered_by_rank_0(tmp_path: Path) -> None:
    group = Group(2, tmp_path)
    group.run(GetInternalStateReq(id="s"), *requests(2))
    assert [type(reply).__name__ for reply in group.drivers[0].replies].count("ControlReply") == 1
    assert not any(type(reply).__name__ == "ControlReply" for reply in group.drivers[1].replies)
    assert all(len(answers) == 2 for answers in group.answers())


def run_apart(group: Group) -> str:
    """What is said when the ranks have come apart."""
    long = request("long", list(range(150)), max_new_tokens=4)
    ending = request("ending", [1, 2, 3], max_new_tokens=9, stop_token_ids=[next_token([1, 2, 3], 0)])
    with pytest.raises(RanksDifferError) as error:
        group.run(long, *requests(8, seed=3), ending)
    return str(error.value)


def test_a_rank_that_follows_its_own_device_is_found(tmp_path: Path) -> None:
    """One that takes results as not arrived that are, because its own device says so a moment later."""
    group = Group(2, tmp_path)
    for driver in group.drivers:
        driver.worker.is_quick = lambda: True  # type: ignore[attr-defined]
    link = group.drivers[1].scheduler.ranks
    assert isinstance(link, FollowingRank)
    receive = link._receive

    def own() -> Turn:
        turn = receive()
        return Turn(turn.number, turn.messages, False)

    link._receive = own
    assert "ranks 0 and 1 have decided differently: step" in run_apart(group)


@pytest.mark.parametrize("which", ["pages", "rows", "requests", "lengths"])
def test_the_step_and_the_first_field_that_differs_are_named(which: str, tmp_path: Path) -> None:
    group = Group(3, tmp_path)
    driver = group.drivers[2]
    scheduler = driver.scheduler
    if which == "pages":
        scheduler.memory.pages.alloc(1)
    elif which == "rows":
        scheduler.memory.rows.alloc(1)
    elif which == "requests":
        link = scheduler.ranks
        assert isinstance(link, FollowingRank)
        receive = link._receive
        link._receive = lambda: _without_first(receive())
    else:
        scheduler.planner.prefill.step_tokens //= 2
    message = run_apart(group)
    assert message == f"ranks 0 and 2 have decided differently: step 1, {which}"


def test_a_token_that_one_rank_has_drawn_otherwise_is_named(tmp_path: Path) -> None:
    """One that ends no request, and so changes no decision."""
    group = Group(2, tmp_path)
    worker = group.drivers[1].worker
    assert isinstance(worker, TokenWorker)
    decode = worker._decode

    def otherwise(batch: StepBatch) -> StepOutput:
        out = decode(batch)
        return replace(out, tokens=out.tokens + 1)

    worker._decode = otherwise  # type: ignore[method-assign]
    with pytest.raises(RanksDifferError, match="sampled tokens"):
        group.run(*[request(f"r{i}", [i, 7], ignore_eos=True, max_new_tokens=8) for i in range(4)])


def _without_first(turn: Turn) -> Turn:
    return Turn(turn.number, turn.messages[1:], turn.results_arrived)


def test_a_record_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    ports = PortArgs(scheduler=f"ipc://{tmp_path}/scheduler", detokenizer="", tokenizer="")
    create_rank_board(ports, 2)
    ours, theirs = RankBoard(ports, 0, 2), RankBoard(ports, 1, 2)
    fields = (1, 2, 3, 4, 5, 6, 2**32 - 1)
    assert ours.decision(1, 7) is None
    theirs.post_decision(7, fields)
    assert ours.decision(1, 7) == fields
    assert ours.decision(0, 7) is None and ours.decision(1, 8) is None and not ours.agrees(1, 7)
    ours.post_decision(7, fields)
    assert ours.agrees(1, 7)
    whole = bytes(theirs._memory)
    at = whole.rindex((7).to_bytes(8, "little")) + 20
    theirs._memory[at : at + 4] = b"half"  # of another one
    assert ours.decision(1, 7) is None and not ours.agrees(1, 7)
    theirs.post_decision(7 + NUM_STEPS, fields)
    assert ours.decision(1, 7) is None and ours.decision(1, 7 + NUM_STEPS) == fields
    ours.post_transfers(4, 9)
    theirs.post_transfers(6, 2)
    assert ours.all_transfers() == theirs.all_transfers() == (4, 2)
    ours.post_arrived(5)
    assert ours.all_arrived() == theirs.all_arrived() == 0
    theirs.post_arrived(3)
    assert ours.all_arrived() == theirs.all_arrived() == 3


def test_the_watchdog_may_compare_while_a_step_is_decided(tmp_path: Path) -> None:
    """Its thread says why ranks wait for each other in vain; here the scheduler goes on in the midst of that."""
    group = Group(2, tmp_path)
    group.run(*requests(1))
    link, board = group.drivers[0].scheduler.ranks, group.boards[0]
    assert link is not None and len(link._latest) == 2
    agrees = board.agrees

    def interrupted(rank: int, step: int) -> bool:
        board.agrees = agrees  # type: ignore[method-assign]
        group.run(*[request("more", [9, 8, 7], max_new_tokens=2)])
        return agrees(rank, step)

    board.agrees = interrupted  # type: ignore[method-assign]
    link.compare()
    assert "more" in group.drivers[0].answers


def test_news_that_find_no_room_wait(tmp_path: Path) -> None:
    ports = PortArgs(scheduler=f"ipc://{tmp_path}/scheduler", detokenizer="", tokenizer="")
    create_rank_board(ports, 3)
    ours, theirs = RankBoard(ports, 0, 3), RankBoard(ports, 2, 3)
    news = [(number, -number, number << 40) for number in range(3 * NUM_NEWS + 5)]
    theirs.post_news(news[:3])
    assert ours.read_news(2) == news[:3] and ours.read_news(2) == [] and ours.read_news(1) == []
    theirs.post_news(news[3:])
    read = news[:3]
    while more := ours.read_news(2):
        assert len(more) <= NUM_NEWS
        read += more
        theirs.post_news([])
    assert read == news
    theirs.post_news([(1, 2, 3)])
    whole = bytes(theirs._memory)
    at = whole.rindex((len(news) + 1).to_bytes(8, "little")) + 20
    theirs._memory[at : at + 4] = b"half"
    assert ours.read_news(2) == []


def test_boards_of_two_hosts_show_the_same(tmp_path: Path) -> None:
    """Each host has a board of all lines; a rank's writes to its own are sent to the other host, in their order."""
    boards, copies = [], []
    for node in range(2):
        (tmp_path / str(node)).mkdir()
        ports = PortArgs(scheduler=f"ipc://{tmp_path}/{node}/scheduler", detokenizer="", tokenizer="")
        create_rank_board(ports, 2)
        boards.append(RankBoard(ports, node, 2))
        copies.append(RankBoard(ports, node, 2, range(node, node + 1)))
    written: list[tuple[int, bytes]] = []

    def mirror(at: int, data: bytes) -> None:
        written.append((at, data))
        copies[0].copy_write(at, data)

    ours, theirs = boards
    ours.mirror, theirs.mirror = copies[1].copy_write, mirror
    ours.post_arrived(5)
    theirs.post_arrived(3)
    theirs.post_transfers(7, 8)
    theirs.post_decision(1, (1, 2, 3, 4, 5, 6, 7))
    theirs.post_news([(1, 2, 3), (4, 5, 6)])
    assert ours.all_arrived() == theirs.all_arrived() == 3 and ours.all_transfers() == (0, 0)
    ours.post_transfers(9, 2)
    assert ours.all_transfers() == theirs.all_transfers() == (7, 2)
    assert ours.decision(1, 1) == (1, 2, 3, 4, 5, 6, 7) and ours.read_news(1) == [(1, 2, 3), (4, 5, 6)]
    theirs.post_failed()
    ours.post_failed()
    assert ours.all_failed() and theirs.all_failed()
    before = bytes(ours._memory)
    line = len(before) // 2
    for at, data in ((0, b"x" * 8), (line - 4, b"x" * 8), (-8, b"x" * 8), (2 * line - 4, b"x" * 8), (line, b"")):
        copies[0].copy_write(at, data)  # on its own line, across lines, outside
    assert bytes(ours._memory) == before and len(written) == 7


def test_ranks_have_compared_every_step(tmp_path: Path) -> None:
    group = Group(2, tmp_path)
    group.run(*requests(6))
    steps = group.drivers[0].scheduler.num_launched
    assert steps > 10
    for step in range(max(steps - NUM_STEPS + 1, 1), steps + 1):
        assert group.boards[0].decision(0, step) is not None
        assert group.boards[0].agrees(1, step)
