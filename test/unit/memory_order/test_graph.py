"""The life of a graph: CAPTURED, REGISTERED, REPLAYABLE, in this order, and replayed only in the last."""

from __future__ import annotations

import pytest
import torch
from captured_graphs import faults_of

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


# As CUDA 12.8 prints four captured nodes.
PRINTED = """digraph dot {
subgraph cluster_1 {
label="graph_1" graph[style="dashed"];
"graph_1_node_0"[style="solid" style="solid" shape="record" label="{MEMSET
| {{ID | node handle | dptr} | {0 (topoId: 3) | 0x000000000A00B680 | 0x00007FC45DC00000}}}"];

"graph_1_node_1"[style="bold" shape="record" label="{KERNEL
| {ID | 1 (topoId: 2) | ampere_sgemm_128x64_tn\\<\\<\\<\\{16,10,2\\},128,0\\>\\>\\>}
| {cooperative | 0}
}"];

"graph_1_node_2"[style="bold" shape="record" label="{KERNEL
| {ID | 2 (topoId: 1) | _rms_norm_kernel\\<\\<\\<4,128,0\\>\\>\\>}
}"];
"graph_1_node_3"[style="solid" shape="record" label="{
MEMCPY
| {{ID | node handle} | {3 (topoId: 0) | 0x000055E7277A6AC0}}
}"];
"graph_1_node_0" -> "graph_1_node_1" [headlabel=0];
"graph_1_node_1" -> "graph_1_node_2" [headlabel=0];
"graph_1_node_2" -> "graph_1_node_3" [headlabel=0];
}
}
"""
EDGE = '"graph_1_node_1" -> "graph_1_node_2" [headlabel=0];\n'


def test_captured_work_has_a_total_order() -> None:
    assert faults_of(PRINTED) == []
    assert faults_of("digraph dot {\n}\n") == ["there are no nodes"]
    skipping = EDGE.replace("headlabel=0", 'headlabel=0 label="1"').replace("node_1", "node_0")
    assert faults_of(PRINTED.replace(EDGE, EDGE + skipping)) == []
    first, then = faults_of(PRINTED.replace(EDGE, ""))
    assert first.startswith("nothing orders graph_1_node_0 ({MEMSET") and "and graph_1_node_2 (" in first
    assert "_rms_norm_kernel" in first and "MEMCPY" in then
    forked = PRINTED.replace(EDGE, EDGE.replace("node_1", "node_0")).replace('_node_2" -> ', '_node_1" -> ')
    (both,) = faults_of(forked)
    assert "graph_1_node_1 (" in both and "graph_1_node_2 (" in both
    (waits,) = faults_of(PRINTED.replace("MEMCPY", "WAIT_EVENT"))
    assert waits.startswith("graph_1_node_3") and waits.endswith("is no work")
