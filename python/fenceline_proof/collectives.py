"""Collective operations of two or three ranks on virtual GPUs of one host: eager ones, ones in graphs, and small and
large sums, between steps of their own. Each rank is a thread, which stands for its process: two ranks are ordered only
by what they write to each other's GPU memory, and by the meetings at which they exchange addresses."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

import torch

from fenceline.memory_order import Communicator, CommunicatorError, Graph
from fenceline_sim.device import VgpuDevice
from fenceline_sim.gpu import VirtualGpu
from fenceline_sim.peers import Grain, Group, PeerRank
from fenceline_sim.threads import join_all

_SMALL, _LARGE = 8, 24  # elements; a sum of the latter takes two shots
GRAIN = Grain(two_shots_from=_LARGE, word=8)
# In some programs large sums have five vectors, for two blocks of two threads, and generations repeat after twelve
# launches, so that words have to be written again.
_FINE = GRAIN._replace(vector=8, num_blocks=2, num_threads=2, capacity=5, num_tags=12, refresh_every=1)
_LARGE_FINE = 40


class Act(NamedTuple):
    """What all ranks do at one place of their program: ``kind`` is "sum", "gather", "elsewhere" or "replay"; with
    ``size`` elements, or graph ``size``."""

    kind: str
    size: int


class Program(NamedTuple):
    """``graphs``: the sizes of the sums that each captures."""

    num_ranks: int
    graphs: tuple[tuple[int, ...], ...]
    acts: tuple[Act, ...]
    grain: Grain = GRAIN


def make_program(random: Random) -> Program:
    sizes = (_SMALL, _LARGE)
    # The first one has a large sum, whose addresses must be exchanged.
    graphs = ((_LARGE, random.choice(sizes)), tuple(random.choices(sizes, k=random.randint(1, 2))))
    kinds = ("sum", "sum", "gather", "elsewhere", "replay", "replay")
    acts = [Act("sum", _SMALL), Act("replay", 0), Act("sum", _LARGE), Act("elsewhere", _SMALL)]
    for kind in random.choices(kinds, k=random.randint(3, 6)):
        acts.append(Act(kind, random.randrange(len(graphs)) if kind == "replay" else random.choice(sizes)))
    program = Program(random.choice((2, 2, 3)), graphs, tuple(acts))
    return _finely(program) if random.random() < 0.4 else program


def _finely(program: Program) -> Program:
    larger = {_LARGE: _LARGE_FINE}
    graphs = tuple(tuple(larger.get(size, size) for size in sizes) for sizes in program.graphs)
    acts = tuple(act if act.kind == "replay" else Act(act.kind, larger.get(act.size, act.size)) for act in program.acts)
    return Program(program.num_ranks, graphs, 2 * acts, _FINE)


class Ranks:
    """The run: ``results[rank]`` are what each operation has returned, in order."""

    def __init__(self, gpu: VirtualGpu, program: Program, severed: frozenset[str]) -> None:
        self.gpu, self.program, self._severed = gpu, program, severed
        self.results: list[list[torch.Tensor]] = [[] for _ in range(program.num_ranks)]
        self.wanted: list[torch.Tensor] = []
        self._inputs: list[list[torch.Tensor]] = []  # by act, and then by rank
        self._group = Group(gpu, program.num_ranks, program.grain)
        self._met = [0] * program.num_ranks

    def run(self, seed: int) -> str:
        """Run all ranks to their end; what differs from the sums of the inputs, "" if nothing does."""
        self._draw(Random(seed))
        workers = [self.gpu.spawn(f"rank{rank}", self._body(rank), rank) for rank in range(self.program.num_ranks)]
        join_all(workers)
        for rank, results in enumerate(self.results):
            for number, (result, wanted) in enumerate(zip(results, self.wanted, strict=True)):
                if not torch.equal(result, wanted):
                    return f"rank {rank}, result {number}: {result.tolist()} in place of {wanted.tolist()}"
        return ""

    def _draw(self, random: Random) -> None:
        for act in self.program.acts:
            sizes = self.program.graphs[act.size] if act.kind == "replay" else (act.size,)
            for size in sizes:
                values = [[random.uniform(-2, 2) for _ in range(size)] for _ in range(self.program.num_ranks)]
                inputs = [torch.tensor(some).bfloat16() for some in values]
                self._inputs.append(inputs)
                self.wanted.append(torch.cat(inputs) if act.kind == "gather" else in_order(inputs))

    def _meet(self, rank: int) -> None:
        self._met[rank] += 1
        mine = self._met[rank]
        self.gpu.rotation.block_until(lambda: min(self._met) >= mine, "the other ranks")

    def _body(self, rank: int) -> Callable[[], None]:
        def body() -> None:
            device = VgpuDevice(self._severed, self.gpu)
            backend = PeerRank(self._group, rank, self._severed)
            communicator = Communicator("ranks", device, device.forward, backend)
            self._meet(rank)
            with torch.inference_mode(), device.forward.active():
                graphs = [self._capture(rank, device, communicator, sizes) for sizes in self.program.graphs]
                self._meet(rank)
                for captured in graphs:
                    captured.graph.register(*device.communicators)
                self._meet(rank)
                for captured in graphs:
                    captured.graph.allow_replay()
                inputs = iter([given[rank] for given in self._inputs])
                for act in self.program.acts:
                    self._do(act, rank, device, communicator, graphs, inputs.__next__)
            device.synchronize()

        return body

    def _capture(self, rank: int, device: VgpuDevice, communicator: Communicator, sizes: tuple[int, ...]) -> _Captured:
        given = [torch.zeros(size, dtype=torch.bfloat16, device="vgpu") for size in sizes]
        sums: list[torch.Tensor] = []

        def body() -> None:
            sums[:] = [communicator.all_reduce(x * 1) for x in given]

        return _Captured(device.capture(f"graph of {sizes}", device.make_graph_pool("ranks"), body), given, sums)

    def _do(
        self, act: Act, rank: int, device: VgpuDevice, communicator: Communicator, graphs: list[_Captured],
        next_input: Callable[[], torch.Tensor],
    ) -> None:  # fmt: skip
        results = self.results[rank]
        if act.kind == "replay":
            captured = graphs[act.size]
            for x in captured.given:
                x.copy_(next_input())
            captured.graph.replay()
            results += [total.cpu() for total in captured.sums]
            return
        values = next_input()
        if act.kind == "elsewhere":
            with device.store.active():  # whoever is refused there does it where it belongs
                try:
                    communicator.all_reduce(torch.zeros(act.size, dtype=torch.bfloat16, device="vgpu"))
                except CommunicatorError:
                    pass
        x = values.to("vgpu")
        if act.kind == "gather":
            results.append(communicator.all_gather(x).cpu())
        else:
            results.append(communicator.all_reduce(x).cpu())


class _Captured(NamedTuple):
    graph: Graph
    given: list[torch.Tensor]
    sums: list[torch.Tensor]


def in_order(inputs: list[torch.Tensor]) -> torch.Tensor:
    """The sum in float32 in the order of ranks, rounded once."""
    total = inputs[0].float()
    for part in inputs[1:]:
        total = total + part.float()
    return total.to(inputs[0].dtype)
