"""Which way a sum of ranks on GPUs of one host takes, over a kernel package and an NCCL that record their calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from fenceline_kernel import KernelUnavailable

from fenceline.distributed import peer
from fenceline.distributed.peer import MAX_BYTES, PeerBackend, one_shot_bytes
from fenceline.memory_order import CommunicatorError

CPU = torch.device("cpu")


class FakeNccl:
    """Rank 1 of two; both bring the same."""

    rank, size = 1, 2

    def __init__(self) -> None:
        self.gathered: list[int] = []
        self.closed = False

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.gathered.append(x.nbytes)
        out.copy_(torch.stack([x, x]).view(out.shape))

    def close(self) -> None:
        self.closed = True


class FakeAllReduce:
    """``PeerAllReduce``."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        exchange: Callable[[bytes], Sequence[bytes]],
        one: int,
        most: int,
    ) -> None:
        assert (rank, size, one, most) == (1, 2, one_shot_bytes(2), MAX_BYTES)
        assert list(exchange(b"a\0b")) == [b"a\0b", b"a\0b"] and list(exchange(b"")) == [b"", b""]
        self.calls: list[tuple[int, bool]] = []
        self.fails = ""

    def takes(self, x: torch.Tensor) -> bool:
        return 0 < x.nbytes <= MAX_BYTES and x.nbytes % 16 == 0

    def all_reduce(self, x: torch.Tensor, registered: bool) -> None:
        self.calls.append((x.nbytes, registered))

    def register(self) -> None:
        if self.fails:
            raise RuntimeError(self.fails)


def make(
    monkeypatch: pytest.MonkeyPatch, capturing: bool = False
) -> tuple[PeerBackend, FakeNccl, FakeAllReduce]:
    monkeypatch.setattr(peer, "PeerAllReduce", FakeAllReduce)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    nccl = FakeNccl()
    backend = PeerBackend(nccl, CPU)  # type: ignore[arg-type]
    nccl.gathered.clear()
    own = backend._own
    assert isinstance(own, FakeAllReduce)
    return backend, nccl, own


@pytest.mark.parametrize("capturing", [False, True])
def test_small_sums_are_ours_and_others_go_through_nccl(
    monkeypatch: pytest.MonkeyPatch, capturing: bool
) -> None:
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
        assert torch.equal(x, torch.full((count,), 3.0))
    assert len(own.calls) == len(sizes) and nccl.gathered == [12, MAX_BYTES + 16]


def test_without_peer_access_everything_goes_through_nccl(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unavailable(*given: object) -> None:
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


def test_the_largest_message_of_one_shot_falls_with_the_number_of_ranks() -> None:
    limits = [one_shot_bytes(size) for size in range(2, 9)]
    assert limits == sorted(limits, reverse=True) and all(limit % 16 == 0 for limit in limits)
