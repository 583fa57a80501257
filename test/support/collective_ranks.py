"""Ranks as threads on the devices of one virtual GPU. They run programs of collective operations, for tests of the
all-reduce and of the errors that are reported if ranks differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fenceline_proof.collectives import in_order
from fenceline_sim.all_reduce import Act
from fenceline_sim.factories import use
from fenceline_sim.gpu import VirtualGpu
from fenceline_sim.peers import Grain, Group, PeerRank
from fenceline_sim.threads import join_all

Program = Callable[[PeerRank], None]

# Up to two blocks of two threads, with vectors of 16 bytes in two words, so that every part of the kernel is used.
FINE = Grain(vector=8, num_blocks=2, num_threads=2, word=8, capacity=8, vector_bytes=16, refresh_every=1)


def run_ranks(
    gpu: VirtualGpu,
    programs: Sequence[Program],
    grain: Grain = Grain(),
    left_out: frozenset[Act] = frozenset(),
    severed: frozenset[str] = frozenset(),
) -> None:
    """Run one program for each rank to its end. An exception of a rank is raised."""
    use(gpu)
    group, joined = Group(gpu, len(programs), grain), []

    def body(rank: int) -> Callable[[], None]:
        def run() -> None:
            backend = PeerRank(group, rank, severed, left_out)
            joined.append(rank)
            gpu.rotation.block_until(lambda: len(joined) == len(programs), "the other ranks")
            programs[rank](backend)

        return run

    try:
        join_all([gpu.spawn(f"rank{rank}", body(rank), rank) for rank in range(len(programs))])
    finally:
        gpu.rotation.abandon()


def sums_of(
    seed: int,
    sizes: Sequence[int],
    num_ranks: int = 2,
    grain: Grain = FINE,
    left_out: frozenset[Act] = frozenset(),
    policy: str = "random",
    gathers: frozenset[int] = frozenset(),
    severed: frozenset[str] = frozenset(),
) -> None:
    """One all-reduce for each of ``sizes`` elements, and all results compared with the sums in the order of ranks.
    ``gathers``: numbers of those that are gathers instead. ``severed``: guards that are left out."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [[torch.randn(n, generator=generator).bfloat16() for _ in range(num_ranks)] for n in sizes]

    def program(backend: PeerRank) -> None:
        results = []
        for number, given in enumerate(inputs):
            x = given[backend.rank].to("vgpu")
            if number in gathers:
                out = torch.empty((num_ranks, len(x)), dtype=x.dtype, device="vgpu")
                backend.all_gather(x, out)
                results.append(out)
            else:
                backend.all_reduce(x)
                results.append(x)
        for number, (given, x) in enumerate(zip(inputs, results, strict=True)):
            result, wanted = x.cpu(), torch.stack(given) if number in gathers else in_order(given)
            assert torch.equal(result, wanted), f"rank {backend.rank}: {result} of {given}"

    gpu = VirtualGpu(seed, policy, num_devices=num_ranks)
    run_ranks(gpu, [program] * num_ranks, grain, left_out, severed)
