"""Runs the compiled all-reduce of 2 or 4 ranks, which are streams of one GPU, as a process: ``python
one_gpu_all_reduce.py CASE SIZE [pdl]``. It prints its results as JSON; its status is not 0 if a sum was wrong or a
launch gave up."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable

import torch
from fenceline_kernel.all_reduce import ROW_WAYS
from fenceline_kernel.one_process import OneProcessRanks
from peer_memory import NEAR_THE_END, begin_at, launches_of

ROW = 4096  # elements
ONE_SHOT, MOST = 1 << 20, 64 << 20
LIMIT_S = 5.0
# Bytes of a message, and how often its graphs are replayed.
REPLAYS = ((16, 100), (8 << 10, 400), (64 << 10, 300), (1 << 20, 300), (1040 << 10, 100), (8 << 20, 60), (MOST, 12))
# Bytes of messages in one graph: of one block and of many, of one shot and of two.
MIXED = (64 << 10, 16, 8 << 10, ONE_SHOT + 16, 48, (128 << 10) + 16, ONE_SHOT, 2048 + 16)

DEVICE = torch.device("cuda", 0)


def open_ranks(size: int, pdl: bool) -> OneProcessRanks:
    return OneProcessRanks(size, DEVICE, ONE_SHOT, MOST, LIMIT_S, pdl)


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


class Rounds:
    """Graphs that check themselves. Each replay sums other numbers than the preceding one, with every algorithm, and
    counts the differences from the sum in the order of ranks."""

    def __init__(self, ranks: OneProcessRanks, nbytes: int) -> None:
        self.ranks, self.nbytes = ranks, nbytes
        generator = torch.Generator(DEVICE).manual_seed(nbytes)
        numel = nbytes // 2
        self.sources = [torch.randn(numel, generator=generator, device=DEVICE).bfloat16() for _ in range(ranks.size)]
        self.residual = torch.randn(numel, generator=generator, device=DEVICE).bfloat16()
        self.weight = 1 + 0.1 * torch.randn(ROW, generator=generator, device=DEVICE).bfloat16()
        self.turns = [torch.zeros((), device=DEVICE) for _ in range(ranks.size)]
        self.wrong = [torch.zeros(6, dtype=torch.int64, device=DEVICE) for _ in range(ranks.size)]

    def body(self, rank: int) -> None:
        own, turn, wrong = self.ranks.ranks[rank], self.turns[rank], self.wrong[rank]
        turn.add_(1)
        parts = [source * turn.bfloat16() for source in self.sources]
        wanted = in_order(parts)
        mine = parts[rank]
        num_launches = 0
        for place, (two, registered) in enumerate(((False, False), (True, False), (True, True))):
            if self.nbytes > ONE_SHOT and not two:
                continue
            x = mine.clone()
            own.all_reduce(x, two, registered)
            wrong[place].add_((x.view(torch.int16) != wanted.view(torch.int16)).sum())
            num_launches += 1
        if self.nbytes <= ONE_SHOT:
            gathered = mine.new_empty((self.ranks.size, *mine.shape))
            own.all_gather(mine, gathered)
            wrong[3].add_((gathered.view(torch.int16) != torch.stack(parts).view(torch.int16)).sum())
            num_launches += 1
        for way in ROW_WAYS:
            if self.nbytes % (2 * ROW) == 0 and own.takes_rows(mine.view(-1, ROW), way):
                self._fused(rank, mine, wanted, way)
                num_launches += 1
        if num_launches % 2 == 0:  # so that each launch uses the other half of the buffers in the next replay
            own.all_reduce(mine.clone(), True)

    def _fused(self, rank: int, mine: torch.Tensor, wanted: torch.Tensor, way: str) -> None:
        wrong, x, residual = self.wrong[rank], mine.clone().view(-1, ROW), self.residual.view(-1, ROW)
        hidden, normed = residual.clone(), torch.empty_like(x)
        self.ranks.ranks[rank].all_reduce_add_norm(x, hidden, self.weight, 1e-6, hidden, normed, way)
        added = wanted.view(-1, ROW) + residual
        wrong[4].add_((hidden.view(torch.int16) != added.view(torch.int16)).sum())
        exact = added.float() * (added.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight.float()
        wrong[5].add_(((normed.float() - exact).abs() > 1e-2 * exact.abs() + 1e-2).sum())


def ways(ranks: OneProcessRanks) -> dict[str, object]:
    """One shot and two shots, both also with registered memory, gather and fused, in graphs; sometimes one rank is
    late."""
    found: dict[str, object] = {}
    for nbytes, num_replays in REPLAYS:
        rounds = Rounds(ranks, nbytes)
        graphs = ranks.capture(rounds.body)
        for turn in range(num_replays):
            if turn % 10 == 3:
                with torch.cuda.stream(ranks.streams[turn // 10 % ranks.size]):
                    torch.cuda._sleep(200_000)
            ranks.replay(graphs)
        torch.cuda.synchronize()
        wrong = [each.tolist() for each in rounds.wrong]
        assert not ranks.lost, f"{nbytes} bytes: a launch has waited for {LIMIT_S} s"
        assert [int(turn) for turn in rounds.turns] == [num_replays] * ranks.size
        assert not any(map(any, wrong)), f"{nbytes} bytes: {wrong} differ (one, two, registered, gather, fused, norm)"
        found[str(nbytes)] = num_replays
        del graphs, rounds
    return found


def mixed(ranks: OneProcessRanks) -> dict[str, object]:
    """All kinds of launches of different sizes in turn in one graph; sometimes one rank is late."""
    rounds = [Rounds(ranks, nbytes) for nbytes in MIXED]

    def body(rank: int) -> None:
        for each in rounds:
            each.body(rank)
        # Launches one directly after another, for programmatic dependent launches.
        for source in (rounds[1].sources[0], rounds[2].sources[0], rounds[0].sources[0]):
            ranks.ranks[rank].all_reduce(source.clone(), False)
            for _ in range(3):
                ranks.ranks[rank].all_gather(source, source.new_empty((ranks.size, *source.shape)))

    before = [launches_of(own) for own in ranks.ranks]
    graphs = ranks.capture(body)
    num_replays = 120
    for turn in range(num_replays):
        if turn % 10 == 3:
            with torch.cuda.stream(ranks.streams[turn // 10 % ranks.size]):
                torch.cuda._sleep(200_000)
        ranks.replay(graphs)
    torch.cuda.synchronize()
    assert not ranks.lost, f"a launch has waited for {LIMIT_S} s"
    for nbytes, each in zip(MIXED, rounds, strict=True):
        wrong = [found.tolist() for found in each.wrong]
        assert not any(map(any, wrong)), f"{nbytes} bytes: {wrong} differ"
    launches = {launches_of(own) - start for own, start in zip(ranks.ranks, before, strict=True)}
    assert len(launches) == 1 and launches.pop() % num_replays == 0
    return {"replays": num_replays}


def wraps(ranks: OneProcessRanks) -> dict[str, object]:
    """The same while the last 32 bits of the generation, which words hold, begin at 0 again."""
    for own in ranks.ranks:
        begin_at(own, NEAR_THE_END)
    found = mixed(ranks)
    assert launches_of(ranks.ranks[0]) > 1 << 32
    return found


def types(ranks: OneProcessRanks) -> dict[str, object]:
    """Sums of every type, eagerly, with sizes around the boundaries of blocks and slices."""
    num = 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for nbytes in (
            16,
            48,
            1024,
            2048 - 16,
            2048 + 16,
            64 * 128 * 16,
            64 * 128 * 16 + 16,
            1025 * 16,
            512 * 16 - 16,
            64 * 512 * 16 + 16,
            ONE_SHOT,
            ONE_SHOT + 16,
            8 << 20,
        ):
            parts = [torch.randn(nbytes // dtype.itemsize, device=DEVICE).to(dtype) for _ in ranks.ranks]
            wanted = in_order(parts)
            torch.cuda.synchronize()
            for own, stream, part in zip(ranks.ranks, ranks.streams, parts, strict=True):
                with torch.cuda.stream(stream):
                    own.all_reduce(part)
            torch.cuda.synchronize()
            assert not ranks.lost
            for rank, part in enumerate(parts):
                assert torch.equal(part, wanted), f"{dtype}, {nbytes} bytes, rank {rank}"
                num += 1
    return {"sums": num}


def rows(ranks: OneProcessRanks) -> dict[str, object]:
    """Sum, residual and norm of rows of every length: of one to four vectors for each thread; in two shots too where
    ranks have whole warps' parts of a row."""
    num = 0
    for numel in (8, 264, 4096, 4104, 8192, 12288, 16384):
        for count, way in itertools.product((1, 3, 32, 70), ROW_WAYS):
            parts = [torch.randn(count, numel, device=DEVICE).bfloat16() for _ in ranks.ranks]
            if not ranks.ranks[0].takes_rows(parts[0], way):
                continue
            residual, weight = torch.randn_like(parts[0]), torch.randn_like(parts[0][0])
            added = in_order(parts) + residual
            scale = (added.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            exact = added.float() * scale * weight.float()
            hidden = [residual.clone() for _ in parts]
            normed = [torch.zeros_like(residual) for _ in parts]
            torch.cuda.synchronize()
            for rank, (own, stream) in enumerate(zip(ranks.ranks, ranks.streams, strict=True)):
                with torch.cuda.stream(stream):
                    own.all_reduce_add_norm(parts[rank], hidden[rank], weight, 1e-6, hidden[rank], normed[rank], way)
            torch.cuda.synchronize()
            assert not ranks.lost
            for rank in range(ranks.size):
                assert torch.equal(hidden[rank], added), f"{count} rows of {numel}, rank {rank}"
                assert torch.equal(normed[rank], normed[0]), f"{count} rows of {numel}: ranks differ"
                assert torch.allclose(normed[rank].float(), exact, rtol=1e-2, atol=1e-2)
                num += 1
    return {"rows": num}


def alone(ranks: OneProcessRanks) -> dict[str, object]:
    """A rank whose peers never take part waits in a kernel, is told to give up, and ends, and so does every later
    launch. If it is not told, the time limit ends it."""
    own, x = ranks.ranks[0], torch.ones(1 << 20, device=DEVICE)
    done = torch.cuda.Event()
    with torch.cuda.stream(ranks.streams[0]):
        own.all_reduce(x, True)
        done.record()
    assert not done.query() and not own.lost
    own.give_up()
    done.synchronize()
    assert own.lost
    other = ranks.ranks[1]
    with torch.cuda.stream(ranks.streams[1]):
        other.all_reduce(torch.ones(64, device=DEVICE), False)
        done.record()
    done.synchronize()
    assert other.lost
    return {"ended": 2}


CASES: dict[str, Callable[[OneProcessRanks], dict[str, object]]] = {
    "ways": ways,
    "mixed": mixed,
    "wraps": wraps,
    "types": types,
    "rows": rows,
    "alone": alone,
}


def main() -> None:
    ranks = open_ranks(int(sys.argv[2]), sys.argv[3:] == ["pdl"])
    found = CASES[sys.argv[1]](ranks)
    ranks.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
