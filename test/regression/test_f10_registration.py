"""F10: a graph that has addresses of other ranks' buffers baked in is replayed only after they have been exchanged."""

from __future__ import annotations

from random import Random

import pytest
import torch
from collective_ranks import run_ranks

from fenceline.memory_order import Communicator, GraphError, GraphState
from fenceline.memory_order.edges import REGISTERED_GRAPH
from fenceline_proof.collectives import GRAIN, Ranks, make_program
from fenceline_sim import VirtualGpu
from fenceline_sim.device import VgpuDevice
from fenceline_sim.errors import PeerError
from fenceline_sim.factories import use
from fenceline_sim.peers import PeerRank

torch.set_num_threads(1)


def run(seed: int, severed: frozenset[str] = frozenset()) -> str:
    program = make_program(Random(seed))
    gpu = VirtualGpu(seed, num_devices=program.num_ranks)
    use(gpu)
    try:
        return Ranks(gpu, program, severed).run(seed)
    finally:
        gpu.rotation.abandon()


@pytest.mark.parametrize("seed", range(4))
def test_registered_graphs_give_the_right_sums(seed: int) -> None:
    assert run(seed) == ""


@pytest.mark.parametrize("seed", range(4))
def test_without_the_exchange_a_replay_is_refused_by_the_device(seed: int) -> None:
    with pytest.raises(PeerError, match="was replayed before rank . was told where rank . has its") as error:
        run(seed, frozenset({REGISTERED_GRAPH.name}))
    assert error.value.guard == REGISTERED_GRAPH.name


def test_a_replay_before_registration_raises() -> None:
    gpu = VirtualGpu(7, num_devices=2)

    def program(backend: PeerRank) -> None:
        device = VgpuDevice(frozenset(), gpu)
        communicator = Communicator("ranks", device, device.forward, backend)
        with device.forward.active():
            x = torch.ones(24, dtype=torch.bfloat16, device="vgpu")
            graph = device.capture("sum", device.make_graph_pool("test"), lambda: communicator.all_reduce(x))
            assert graph.state is GraphState.CAPTURED
            with pytest.raises(GraphError, match="is CAPTURED, not yet REPLAYABLE"):
                graph.replay()
            graph.register(*device.communicators)
            with pytest.raises(GraphError, match="is REGISTERED, not yet REPLAYABLE"):
                graph.replay()

    run_ranks(gpu, [program, program], GRAIN)
