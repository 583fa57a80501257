"""The life of a graph: CAPTURED, REGISTERED, REPLAYABLE, in this order, and replayed only in the last."""

from __future__ import annotations

import pytest
import torch

from fenceline.memory_order import Graph, GraphError, GraphPool, GraphState, open_device


class Counted(Graph):
    """Counts its replays."""

    num_replays = 0

    def _replay(self) -> None:
        self.num_replays += 1


def make() -> Counted:
    return Counted("decode[4]", GraphPool("decode", None))


def test_it_is_replayed_when_everybody_is_ready() -> None:
    graph = make()
    assert graph.state is GraphState.CAPTURED
    graph.register()
    assert graph.state is GraphState.REGISTERED
    graph.allow_replay()
    assert graph.state is GraphState.REPLAYABLE
    graph.replay()
    graph.replay()
    assert graph.num_replays == 2


@pytest.mark.parametrize("registered", [False, True])
def test_an_early_replay_is_refused_and_does_nothing(registered: bool) -> None:
    graph = make()
    if registered:
        graph.register()
    state = "REGISTERED" if registered else "CAPTURED"
    with pytest.raises(GraphError, match=rf"decode\[4\] is {state}, not yet REPLAYABLE"):
        graph.replay()
    assert graph.num_replays == 0


def test_no_state_is_left_out_or_entered_twice() -> None:
    graph = make()
    with pytest.raises(GraphError, match="is CAPTURED and cannot become REPLAYABLE"):
        graph.allow_replay()
    graph.register()
    with pytest.raises(GraphError, match="is REGISTERED and cannot become REGISTERED"):
        graph.register()
    graph.allow_replay()
    for again in (graph.register, graph.allow_replay):
        with pytest.raises(GraphError, match="cannot become"):
            again()
    assert graph.state is GraphState.REPLAYABLE


def test_on_the_cpu_a_replay_is_the_body_again() -> None:
    device, cell = open_device("cpu"), torch.zeros(1)
    pool = device.make_graph_pool("test")

    def body() -> None:
        cell.add_(1)

    graph = device.capture("count", pool, body)
    assert (pool.owner, graph.pool, graph.name) == ("test", pool, "count")
    assert cell.item() == 0, "capturing runs nothing"
    graph.register()
    graph.allow_replay()
    for expected in (1, 2, 3):
        graph.replay()
        assert cell.item() == expected
