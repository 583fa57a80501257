"""Which way a sum of ranks on GPUs of one host takes, over a kernel package and an NCCL that record their calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fenceline_kernel import KernelUnavailable
from fenceline_kernel.all_reduce import ROW_WAYS, PeerAllReduce

from fenceline.config.engine_config import EngineConfig, resolve
from fenceline.config.server_args import parse_args
from fenceline.distributed import SHARED_GPU_VARIABLE, peer
from fenceline.distributed.peer import PeerBackend, one_shot_bytes
from fenceline.distributed.staged import StagedBackend
from fenceline.entrypoints import launch
from fenceline.memory_order import CollectiveBackend, CommunicatorError, PeerLostError
from fenceline.scheduler.process import _device_of

CPU = torch.device("cpu")
MAX_BYTES = 4 << 20  # instead of 64 MiB, of which a test would hold several


@pytest.fixture(autouse=True)
def small_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "MAX_BYTES", MAX_BYTES)


class FakeNccl(CollectiveBackend):
    """Rank 1 of ``size``; all bring the same."""

    rank = 1

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self.gathered: list[int] = []
        self.closed = self.given_up = False

    def give_up(self) -> None:
        self.given_up = True

    def check(self) -> None:
        if self.given_up:
            raise PeerLostError("NCCL's")

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.gathered.append(x.nbytes)
        out.view(self.size, *x.shape).copy_(x)

    def close(self) -> None:
        self.closed = True


class FakeAllReduce:
    """``PeerAllReduce``. ``sum_factor``: what a sum of bfloat16 is of one rank's part, 0: what is right."""

    sum_factor = 0

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        exchange: Callable[[bytes], Sequence[bytes]],
        one: int,
        most: int,
        pdl: int,
    ) -> None:
        assert (rank, one, most) == (1, one_shot_bytes(size), MAX_BYTES)
        self.pdl, self.size = pdl, size
        assert list(exchange(b"a\0b")) == [b"a\0b"] * size and list(exchange(b"")) == [b""] * size
        self.ways: set[str] = set()
        self.calls: list[tuple[int, bool]] = []
        self.gathered: list[int] = []
        self.one_shot_bytes = one
        self.fails = ""
        self.lost = self.closed = False
        self.factor, self.limit_s = FakeAllReduce.sum_factor or size, -1.0

    def takes(self, x: torch.Tensor) -> bool:
        return 0 < x.nbytes <= MAX_BYTES and x.nbytes % 16 == 0

    takes_rows: Any = PeerAllReduce.takes_rows
    _row_kind: Any = PeerAllReduce._row_kind
    _rows_together: Any = PeerAllReduce._rows_together
    _max_blocks = 128

    def all_reduce(self, x: torch.Tensor, two_shots: bool | None = None, registered: bool = False) -> None:
        if two_shots is False and x.nbytes > self.one_shot_bytes:
            raise RuntimeError("all_reduce: the message is too long for one shot")
        self.calls.append((x.nbytes, registered))
        if x.is_floating_point():
            x.mul_(self.factor if x.dtype is torch.bfloat16 else self.size)

    def all_reduce_add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        hidden: torch.Tensor,
        normed: torch.Tensor,
        way: str = "",
    ) -> None:
        assert self.takes_rows(x, way)
        self.ways.add(way)
        hidden.copy_(residual + x * self.size)
        normed.copy_(F.rms_norm(hidden.float(), hidden.shape[1:], weight.float(), eps))

    def limit(self, limit_s: float) -> None:
        self.limit_s = limit_s

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        assert x.nbytes % 16 == 0 and x.nbytes <= self.one_shot_bytes
        self.gathered.append(x.nbytes)
        out.view(torch.uint8).copy_(torch.stack([x] * self.size).view(torch.uint8))

    def give_up(self) -> None:
        self.lost = True

    def close(self) -> None:
        self.closed = True

    def register(self) -> None:
        if self.fails:
            raise RuntimeError(self.fails)


def make(monkeypatch: pytest.MonkeyPatch, capturing: bool = False) -> tuple[PeerBackend, FakeNccl, FakeAllReduce]:
    monkeypatch.setattr(peer, "PeerAllReduce", FakeAllReduce)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    nccl = FakeNccl()
    backend = PeerBackend(nccl, CPU)  # type: ignore[arg-type]
    nccl.gathered.clear()
    own = backend._own
    assert isinstance(own, FakeAllReduce) and own.limit_s == 0, "the trial's limit has been lifted"
    own.calls.clear()
    own.gathered.clear()
    return backend, nccl, own


@pytest.mark.parametrize("capturing", [False, True])
def test_small_sums_are_ours_and_others_go_through_nccl(monkeypatch: pytest.MonkeyPatch, capturing: bool) -> None:
    """In a capture peers write to where the sum is wanted, once they know the address."""
    backend, nccl, own = make(monkeypatch, capturing)
    limit = one_shot_bytes(2)
    sizes = (16, limit - 16, limit, limit + 16, MAX_BYTES)
    for nbytes in sizes:
        backend.all_reduce(torch.zeros(nbytes, dtype=torch.uint8))
    assert own.calls == [(nbytes, capturing) for nbytes in sizes] and nccl.gathered == []
    for count in (3, MAX_BYTES // 4 + 4):
        x = torch.full((count,), 1.5)
        backend.all_reduce(x)
        assert x.min() == x.max() == 3.0
    # 12 bytes are padded to 16, in memory that peers do not learn of.
    assert own.calls[len(sizes) :] == [(16, False)] and nccl.gathered == [MAX_BYTES + 16]


def test_few_bytes_of_any_type_are_gathered_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plain draw needs: NCCL has no part in such a step, nor in its graph."""
    backend, nccl, own = make(monkeypatch, capturing=True)
    for x in (
        torch.tensor([3, 2**62 + 1]),
        torch.tensor([[1.5, -0.0, float("nan")]], dtype=torch.float64),
        torch.arange(7, dtype=torch.uint8),
        torch.zeros(one_shot_bytes(2), dtype=torch.uint8),
    ):
        out = x.new_empty((2, *x.shape))
        backend.all_gather(x, out)
        assert torch.equal(out.view(torch.uint8), torch.stack([x, x]).view(torch.uint8))
    assert own.gathered == [16, 32, 16, one_shot_bytes(2)] and nccl.gathered == []
    for count in (0, one_shot_bytes(2) + 1):
        x = torch.zeros(count, dtype=torch.uint8)
        backend.all_gather(x, x.new_empty((2, count)))
    assert len(own.gathered) == 4 and nccl.gathered == [0, one_shot_bytes(2) + 1]


def test_results_are_none_once_a_wait_has_been_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, nccl, own = make(monkeypatch)
    backend.check()
    own.lost = True  # a launch has ended without the others
    with pytest.raises(PeerLostError, match="rank 1 of 2: an all-reduce has ended without all ranks"):
        backend.check()
    own.lost = False
    backend.give_up()
    assert own.lost and nccl.given_up
    own.lost = False  # no launch of ours was waiting
    with pytest.raises(PeerLostError, match="NCCL's"):
        backend.check()
    backend.close()
    assert own.closed and nccl.closed


def test_kernels_that_give_another_sum_than_torch_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer, "PeerAllReduce", FakeAllReduce)
    monkeypatch.setattr(FakeAllReduce, "sum_factor", 3)
    nccl = FakeNccl()
    backend = PeerBackend(nccl, CPU)  # type: ignore[arg-type]
    assert "The CUDA all-reduce is wrong here and is not used: one shot with 1 rows" in caplog.text
    x = torch.ones(4).bfloat16()
    backend.all_reduce(x)
    assert x.tolist() == [2.0] * 4


@pytest.mark.parametrize("size", range(2, 9))
def test_however_many_ranks_try_all_that_they_will_use(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(peer, "PeerAllReduce", FakeAllReduce)
    own = PeerBackend(FakeNccl(size), CPU)._own  # type: ignore[arg-type]
    assert isinstance(own, FakeAllReduce), "no trial that fails by its own length turns the kernels off"
    assert own.ways == (set(ROW_WAYS) if size in (2, 4, 8) else {"one shot"})


def test_only_ranks_with_own_gpus_start_the_next_kernel_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that ranks share, the next kernel of one would take the place of blocks that another one waits for."""

    class Sharing(FakeNccl, StagedBackend):
        def __init__(self) -> None:
            FakeNccl.__init__(self)

    assert make(monkeypatch)[2].pdl == 2
    own = PeerBackend(Sharing(), CPU)._own
    assert isinstance(own, FakeAllReduce) and own.pdl == 1


class Meeting:
    """The collectives of two ranks in threads. One that the other does not join, or joins with another number of
    bytes, is an error, where NCCL's would wait."""

    def __init__(self) -> None:
        self.barrier = Barrier(2)
        self.parts: list[torch.Tensor] = [torch.empty(0)] * 2

    def gather(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        self.parts[rank] = x.clone()
        self.barrier.wait(60)
        parts = list(self.parts)
        self.barrier.wait(60)
        assert parts[0].nbytes == parts[1].nbytes, "the ranks are in different collectives"
        return torch.stack([part.view(x.shape) for part in parts])


class MeetingBackend(CollectiveBackend):
    """NCCL's part of one rank of a :class:`Meeting`."""

    size = 2

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(self.meeting.gather(self.rank, x).view(out.shape))

    def give_up(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("fault", ["a wrong sum", "an error"])
def test_one_rank_that_finds_kernels_wrong_turns_them_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """The rank that finds nothing goes on with the trial, and both must still meet in the same collectives."""
    kernels = Meeting()

    class OneWrong:
        lost = False

        def __init__(self, rank: int, *given: object, pdl: int) -> None:
            self.rank = rank

        def all_reduce(self, x: torch.Tensor, registered: bool = False) -> None:
            wrong = self.rank == 1 and len(x) == 1
            total = kernels.gather(self.rank, x).float().sum(0)
            x.copy_(total * 3 if wrong and fault == "a wrong sum" else total)

        def all_reduce_add_norm(
            self,
            x: torch.Tensor,
            residual: torch.Tensor,
            weight: torch.Tensor,
            eps: float,
            hidden: torch.Tensor,
            normed: torch.Tensor,
            way: str = "",
        ) -> None:
            hidden.copy_(residual + kernels.gather(self.rank, x).float().sum(0).bfloat16())
            normed.copy_(F.rms_norm(hidden.float(), hidden.shape[1:], weight.float(), eps))
            if self.rank == 1 and len(x) == 1 and fault == "an error":
                raise RuntimeError("launch failed")

        def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
            out.copy_(kernels.gather(self.rank, x))

        def takes_rows(self, x: torch.Tensor, way: str) -> bool:
            return way == "one shot"

        def limit(self, limit_s: float) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr(peer, "PeerAllReduce", OneWrong)
    others = Meeting()

    def rank(number: int) -> PeerBackend:
        try:
            return PeerBackend(MeetingBackend(others, number), CPU)  # type: ignore[arg-type]
        except BaseException:
            for meeting in (others, kernels):
                meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(2) as pool:
        backends = [future.result() for future in [pool.submit(rank, number) for number in range(2)]]
        assert all(backend._own is None for backend in backends)
        sums = [torch.full((4,), float(number + 1)) for number in range(2)]
        list(pool.map(PeerBackend.all_reduce, backends, sums))
    assert [x.tolist() for x in sums] == [[3.0] * 4] * 2
    shown = "one shot with 1 rows" if fault == "a wrong sum" else "launch failed"
    assert caplog.text.count(f"is wrong here and is not used: {shown}") == 2


def test_rows_are_summed_and_normed_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _, _ = make(monkeypatch)
    x, residual, weight = (torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16(), torch.ones(64).bfloat16())
    wanted = residual + x * 2
    normed = backend.all_reduce_add_norm(x, residual, weight, 1e-6)
    assert normed is not None and torch.equal(residual, wanted)
    assert torch.allclose(normed.float(), F.rms_norm(wanted.float(), (64,), eps=1e-6), rtol=0.02)
    for given, scale in (
        # Too large for one shot, and a rank's part of a row is less than a warp's; with larger parts see below.
        (torch.zeros(one_shot_bytes(2) // 128 + 1, 64).bfloat16(), weight),
        (torch.zeros(1, 20_000).bfloat16(), torch.ones(20_000).bfloat16()),  # too long a row
        (torch.zeros(4, 6).bfloat16(), weight[:6]),  # rows that are no whole vectors
        (x, weight.float()),  # a weight with an offset
        (x[:0], weight),
    ):
        before = given.clone()
        assert backend.all_reduce_add_norm(given, torch.zeros_like(given), scale, 1e-6) is None
        assert torch.equal(given, before)
    many = torch.randn(one_shot_bytes(2) // 1024 + 1, 512).bfloat16()
    wanted, residual_of_many = many * 2, torch.zeros_like(many)
    assert backend.all_reduce_add_norm(many, residual_of_many, torch.ones(512).bfloat16(), 1e-6) is not None
    assert torch.equal(residual_of_many, wanted)
    without = PeerBackend(FakeNccl(), CPU, fuses_norm=False)  # type: ignore[arg-type]
    assert without.all_reduce_add_norm(x, residual, weight, 1e-6) is None


def test_without_peer_access_everything_goes_through_nccl(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unavailable(*given: object, pdl: int) -> None:
        raise KernelUnavailable("rank 0 cannot reach the other GPUs' memory")

    monkeypatch.setattr(peer, "PeerAllReduce", unavailable)
    backend = PeerBackend(FakeNccl(), CPU)  # type: ignore[arg-type]
    x = torch.ones(4)
    backend.all_reduce(x)
    assert x.tolist() == [2.0] * 4 and "rank 0 cannot reach" in caplog.text
    backend.register()


def test_memory_that_cannot_be_shared_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, nccl, own = make(monkeypatch)
    backend.register()
    own.fails = "peer_locate: invalid argument"
    with pytest.raises(CommunicatorError, match=r"invalid argument.*leave expandable_segments out"):
        backend.register()
    backend.close()
    assert nccl.closed


def test_the_largest_one_shot_message_falls_with_the_ranks() -> None:
    limits = [one_shot_bytes(size) for size in range(2, 9)]
    assert limits == sorted(limits, reverse=True) and all(limit % 16 == 0 for limit in limits)


def test_ranks_that_share_a_gpu_exchange_by_way_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """FakeNccl stands for gloo: both bring the same."""
    backend = StagedBackend(FakeNccl())  # type: ignore[arg-type]
    x, out = torch.arange(6.0).view(2, 3), torch.empty(2, 2, 3)
    backend.all_gather(x, out)
    assert torch.equal(out, torch.stack([x, x]))
    backend.all_reduce(x)
    assert torch.equal(x, torch.arange(6.0).view(2, 3) * 2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    on_gpu = SimpleNamespace(is_cuda=True, nbytes=9 << 20)
    with pytest.raises(CommunicatorError, match="9437184 bytes is too large for our own kernels"):
        backend.all_gather(on_gpu, out)  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "device"), [(None, 1), ("", 1), ("0", 1), ("1", 0)])
def test_each_rank_has_a_gpu_of_its_own_unless_shared(
    monkeypatch: pytest.MonkeyPatch, value: str | None, device: int
) -> None:
    monkeypatch.delenv(SHARED_GPU_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(SHARED_GPU_VARIABLE, value)
    config = SimpleNamespace(local_ranks=range(2, 4), num_sharing=2, replica=0)  # of the second of two hosts
    assert _device_of(3, config) == device  # type: ignore[arg-type]


def test_each_replica_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARED_GPU_VARIABLE, raising=False)
    started: list[tuple[int, int | None]] = []

    def start(config: EngineConfig, *entries: object) -> SimpleNamespace:
        started.extend((config.replica, _device_of(rank, config)) for rank in config.local_ranks)
        return SimpleNamespace(link=None)

    monkeypatch.setattr(launch, "launch_processes", start)
    monkeypatch.setattr(launch, "ReplicaLink", lambda links, config: None)
    flags = ("--model-path", "demo", "--device", "cpu")
    for more, wanted in {
        "": [(0, None)],
        "--dp-size 2": [(0, 0), (1, 1)],
        "--dp-size 2 --tp-size 2": [(0, 0), (0, 1), (1, 2), (1, 3)],
    }.items():
        started.clear()
        launch.launch(resolve(parse_args([*flags, *more.split()])))
        assert started == wanted
