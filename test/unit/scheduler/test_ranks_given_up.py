"""A rank that is lost while the others' devices wait for it: they are told, and what comes without it is no result."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from demo_requests import greedy_requests
from ranks import Ranks, ThreadBackend
from scheduler_driver import answers, make_model_driver

from fenceline.ipc.io_struct import PortArgs
from fenceline.ipc.rank_board import RankBoard, create_rank_board
from fenceline.memory_order import PeerLostError
from fenceline.scheduler.process import _watch_ranks

WAIT_S = 60.0


def test_a_rank_that_fails_is_given_up_by_the_others(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/scheduler"
    ports = PortArgs(scheduler=address, detokenizer=address, tokenizer=address)
    create_rank_board(ports, 2)
    ours, theirs = RankBoard(ports, 0, 2), RankBoard(ports, 1, 2)
    given_up = threading.Event()
    shard = SimpleNamespace(communicator=SimpleNamespace(give_up=given_up.set))
    _watch_ranks(SimpleNamespace(board=ours), shard)  # type: ignore[arg-type]
    assert not ours.any_failed() and not given_up.wait(0.5)
    theirs.post_failed()
    assert given_up.wait(WAIT_S)


def test_results_without_all_ranks_are_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks are told before their fifth results."""
    ranks = Ranks(2)
    num_asked = [0, 0]

    def check(backend: ThreadBackend) -> None:
        num_asked[backend.rank] += 1
        if num_asked[backend.rank] == 5:
            raise PeerLostError("lost")

    monkeypatch.setattr(ThreadBackend, "check", check)

    def run(rank: int) -> str:
        driver = make_model_driver(rank=(ranks.devices[rank], ranks.shards[rank]))
        with pytest.raises(PeerLostError, match="lost"):
            answers(driver, greedy_requests())
        return "raised"

    assert ranks.run(run) == ["raised"] * 2
    assert num_asked == [5, 5]
