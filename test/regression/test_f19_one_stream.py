"""F19: a communicator belongs to one stream. On another one its operations would run in an order of that device's own,
and ranks whose devices choose differently would wait for each other for ever."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from ranks import Ranks

from fenceline.memory_order import Communicator, CommunicatorError, Device, open_device
from fenceline.memory_order.edges import ONE_STREAM
from fenceline_proof.collectives import Ranks as Collectives
from fenceline_proof.collectives import make_program
from fenceline_sim import RaceError, VirtualGpu
from fenceline_sim.device import VgpuDevice
from fenceline_sim.factories import use

OPERATIONS: dict[str, Callable[[Communicator], object]] = {
    "all-reduce": lambda communicator: communicator.all_reduce(torch.ones(3)),
    "all-gather": lambda communicator: communicator.all_gather(torch.ones(3)),
    "smallest": lambda communicator: communicator.smallest(3),
}


class Silent:
    """A back end that must not be asked."""

    rank, size = 0, 2

    def all_reduce(self, x: torch.Tensor) -> None:
        raise AssertionError("it was submitted")

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        raise AssertionError("it was submitted")

    def close(self) -> None:
        return


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", ["cpu", "vgpu"])
def test_on_another_stream_it_raises(kind: str, operation: str) -> None:
    device: Device = open_device("cpu")
    if kind == "vgpu":
        device = VgpuDevice(frozenset(), VirtualGpu(seed=3))
    communicator = Communicator("ranks", device, device.forward, Silent())
    for stream in (device.store, device.load, device.schedule, device.copy):
        with stream.active(), pytest.raises(CommunicatorError, match="belongs to forward"):
            OPERATIONS[operation](communicator)
    with device.forward.active(), device.store.active(), pytest.raises(CommunicatorError):
        OPERATIONS[operation](communicator)
    with pytest.raises(CommunicatorError):  # where none is current
        OPERATIONS[operation](communicator)
    with open_device("cpu").forward.active(), pytest.raises(CommunicatorError):  # another device's
        OPERATIONS[operation](communicator)


@pytest.mark.parametrize("seed", range(3))
def test_without_the_guard_two_streams_race_for_the_communicator(seed: int) -> None:
    program = make_program(Random(seed))
    gpu = VirtualGpu(seed, num_devices=program.num_ranks)
    use(gpu)
    try:
        with pytest.raises(RaceError, match="exclusive on resource communicator") as error:
            Collectives(gpu, program, frozenset({ONE_STREAM.name})).run(seed)
    finally:
        gpu.rotation.abandon()
    assert error.value.edges == (ONE_STREAM.name,)


def test_on_its_own_stream_it_works() -> None:
    ranks = Ranks(3)

    def work(rank: int) -> tuple[list[float], list[list[float]], int]:
        communicator = ranks.shards[rank].communicator
        assert communicator is not None
        with ranks.devices[rank].store.active():
            pass  # what was current before is so again
        sums = communicator.all_reduce(torch.tensor([1.0, 10.0]) * (rank + 1))
        parts = communicator.all_gather(torch.tensor([[float(rank)], [10.0 + rank]]))
        return sums.tolist(), parts.tolist(), communicator.smallest(7 - rank)

    expected = [6.0, 60.0], [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]], 5
    assert ranks.run(work) == [expected] * 3
