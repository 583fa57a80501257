"""Several virtual devices: what is reported where ranks differ, or use each other's memory when they may not."""

from __future__ import annotations

import re

import pytest
import torch
from collective_ranks import run_ranks

from fenceline_proof.runs import Trial, run
from fenceline_sim import DeadlockError, RaceError, VirtualGpu
from fenceline_sim.all_reduce import Launch
from fenceline_sim.peers import PeerRank
from fenceline_sim.policy import POLICIES

torch.set_num_threads(1)


def ones(n: int) -> torch.Tensor:
    return torch.ones(n, device="vgpu")


def both(gpu: VirtualGpu, *programs: object) -> None:
    run_ranks(gpu, programs)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_at_different_collectives_are_named_with_lines(policy: str) -> None:
    def first(backend: PeerRank) -> None:
        backend.all_reduce(ones(8))
        backend.all_reduce(ones(4))  # the sum
        assert ones(1).tolist()

    def second(backend: PeerRank) -> None:
        backend.all_reduce(ones(8))
        backend.all_gather(ones(4), torch.empty((2, 4), device="vgpu"))  # the gather
        assert ones(1).tolist()

    with pytest.raises(DeadlockError, match="each for its 2. one") as error:
        both(VirtualGpu(3, policy, num_devices=2), first, second)
    text = str(error.value)
    assert re.search(r"rank 0: all-reduce of \[4\] float32, .*# the sum", text), text
    assert re.search(r"rank 1: all-gather of \[4\] float32, .*# the gather", text), text


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rank_that_goes_around_a_collective_is_named(policy: str) -> None:
    def goes_on(backend: PeerRank) -> None:
        backend.all_reduce(ones(8))
        x = ones(8)
        backend.all_reduce(x)  # the other rank does not come here
        assert x.tolist()

    def goes_around(backend: PeerRank) -> None:
        x = ones(8)
        backend.all_reduce(x)  # its last
        if backend.rank == 0:
            backend.all_reduce(x)
        assert x.tolist()

    with pytest.raises(DeadlockError) as error:
        both(VirtualGpu(5, policy, num_devices=2), goes_on, goes_around)
    text = str(error.value)
    assert "rank 1 in the 2. collective, all-reduce of [8] float32" in text, text
    assert "# the other rank does not come here" in text and "# its last" in text, text


@pytest.mark.parametrize("policy", POLICIES)
def test_one_communicator_on_two_streams_is_a_race(policy: str) -> None:
    gpu = VirtualGpu(1, policy, num_devices=2)

    def program(backend: PeerRank) -> None:
        x, y = ones(8), ones(8)
        gpu.synchronize_all()
        other = gpu.stream("other")
        backend.all_reduce(x)
        with gpu.on(other):
            backend.all_reduce(y)
        gpu.synchronize_all()

    with pytest.raises(RaceError, match="exclusive on resource communicator of rank . *\n(.|\n)*one_stream"):
        both(gpu, program, program)


def test_nothing_but_flags_orders_two_devices() -> None:
    """A rank that reads its peer's memory right away, although a collective before has ended on both."""
    gpu = VirtualGpu(2, num_devices=2)
    shared: dict[int, torch.Tensor] = {}

    def program(backend: PeerRank) -> None:
        mine = shared[backend.rank] = ones(4)
        backend.all_reduce(ones(4))
        gpu.rotation.block_until(lambda: len(shared) == 2, "the other rank")
        other = shared[1 - backend.rank]
        assert (other + 0).tolist() == [1.0] * 4
        mine.zero_()  # the other rank may not have read it

    with pytest.raises(RaceError, match="WAR on tensor"):
        both(gpu, program, program)


def test_a_device_that_waits_for_its_peer_does_not_stop_the_host() -> None:
    """A poll is answered "not yet" as long as the peer has not launched its part, and the peer is let go on."""
    gpu = VirtualGpu(1, "laziest", num_devices=2)
    polled = []

    def polls(backend: PeerRank) -> None:
        backend.all_reduce(ones(4))
        mark = gpu.record(gpu.thread.current)
        while not gpu.query(mark):
            polled.append(True)

    def comes_late(backend: PeerRank) -> None:
        gpu.rotation.block_until(lambda: len(polled) > 3, "polls")
        x = ones(4)
        backend.all_reduce(x)
        assert x.tolist() == [2.0] * 4

    both(gpu, polls, comes_late)
    assert len(polled) > 3


@pytest.mark.parametrize("name", ["refreshed", "share"])
def test_the_workload_has_blocks_and_words_to_be_written_again(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """No word is written again; or all threads of a block take the vectors of its first one."""
    wrong = {
        "refreshed": lambda self, *args: None,
        "share": lambda self, block, thread, count: range(
            block * self.num_threads, count, self.num_blocks * self.num_threads
        ),
    }
    monkeypatch.setattr(Launch, name, wrong[name])
    assert not all(run(Trial("collectives", seed)).clean for seed in range(40))
