"""The back end of ranks on GPUs, over a torch.distributed that records its calls and a machine without GPUs."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from fenceline.distributed import gloo, nccl
from fenceline.distributed.nccl import NcclBackend
from fenceline.memory_order import CommunicatorError, PeerLostError

DEVICE = torch.device("cuda", 1)
SIZE = 3
NETWORK = "NCCL_SOCKET_IFNAME"


class FakeDistributed:
    """``torch.distributed`` as rank 1 of three sees it: the others bring what ``others`` says."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.fails: str | None = None
        self.others: dict[int, torch.Tensor] = {}
        self.group = SimpleNamespace(WORLD=SimpleNamespace(abort=self.abort))
        self.no_graphs = threading.Event()  # that contain NCCL's operations
        self.no_graphs.set()

    def abort(self) -> None:
        self.calls.append(("abort",))
        assert self.no_graphs.wait(60)
        self.calls.append(("aborted",))

    def wait_for(self, *call: object) -> None:
        deadline = time.monotonic() + 60
        while call not in self.calls:
            assert time.monotonic() < deadline, call
            time.sleep(0.001)

    def init_process_group(self, backend: str, **flags: object) -> None:
        if self.fails:
            raise RuntimeError(self.fails)
        self.calls.append((backend, flags.pop("rank"), flags.pop("world_size"), flags.pop("device_id")))
        self.flags = flags

    def all_gather_into_tensor(self, out: torch.Tensor, x: torch.Tensor) -> None:
        if self.fails:
            raise RuntimeError(self.fails)
        self.calls.append(("all_gather", x.nbytes))
        out.copy_(torch.stack([self.others.get(rank, x) for rank in range(SIZE)]))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDistributed:
    fake = FakeDistributed()
    for module in (nccl, gloo):
        monkeypatch.setattr(module, "dist", fake)
    monkeypatch.delenv(NETWORK, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return fake


def test_the_communicator_is_made_on_the_rank_s_gpu(fake: FakeDistributed) -> None:
    backend = NcclBackend(1, SIZE, "file:///m", DEVICE)
    assert fake.calls == [("nccl", 1, SIZE, DEVICE)]
    assert fake.flags["init_method"] == "file:///m"
    assert fake.flags["timeout"].days >= 365  # type: ignore[attr-defined]
    backend.check()
    backend.give_up()
    with pytest.raises(PeerLostError, match="rank 1 of 3: another rank has failed"):
        backend.check()
    backend.close()
    fake.wait_for("aborted")
    assert fake.calls[1:] == [("abort",), ("aborted",)]
    fake.fails = "The server socket has failed to listen\nmore"
    with pytest.raises(
        ValueError, match=r"cannot meet at file:///m with NCCL \(The server socket has failed to listen\)"
    ):
        NcclBackend(1, SIZE, "file:///m", DEVICE)


def test_nccl_listens_on_the_network_of_the_ranks(fake: FakeDistributed, monkeypatch: pytest.MonkeyPatch) -> None:
    NcclBackend(1, SIZE, "file:///m", DEVICE)
    assert os.environ.pop(NETWORK).removesuffix("0") == "=lo"
    NcclBackend(1, SIZE, "file:///m", DEVICE, "eth1")
    assert os.environ[NETWORK] == "=eth1"
    monkeypatch.setenv(NETWORK, "ib0")
    NcclBackend(1, SIZE, "file:///m", DEVICE, "eth1")
    assert os.environ[NETWORK] == "ib0"


def test_to_give_up_waits_for_no_graphs_with_operations(fake: FakeDistributed) -> None:
    """NCCL's abort waits until all of them have been destroyed, which a rank never does: it would not report why it
    ends, and a server that is told to end would have to be killed."""
    backend = NcclBackend(1, SIZE, "file:///m", DEVICE)
    fake.no_graphs.clear()
    backend.give_up()
    backend.close()
    fake.wait_for("abort")
    assert ("aborted",) not in fake.calls
    fake.no_graphs.set()
    fake.wait_for("aborted")


def test_an_orderly_end_aborts_nothing(fake: FakeDistributed) -> None:
    """An abort that has not ended when CUDA shuts down ends the process by SIGABRT."""
    NcclBackend(1, SIZE, "file:///m", DEVICE).close()
    assert [call[0] for call in fake.calls] == ["nccl"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_float32_in_the_order_of_ranks(fake: FakeDistributed, dtype: torch.dtype) -> None:
    parts = [torch.randn(4, 50, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(SIZE)]
    fake.others = {0: parts[0], 2: parts[2]}
    backend = NcclBackend(1, SIZE, "file:///m", DEVICE)
    x = parts[1].clone()
    backend.all_reduce(x)
    expected = ((parts[0].float() + parts[1].float()) + parts[2].float()).to(dtype)
    assert torch.equal(x, expected)
    assert [call[0] for call in fake.calls] == ["nccl", "all_gather"]


def test_a_size_is_captured_only_after_it_has_run(fake: FakeDistributed, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = NcclBackend(1, SIZE, "file:///m", DEVICE)
    small, large = torch.ones(8), torch.ones(16)
    backend.all_reduce(small)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    backend.all_reduce(small)
    for _ in range(2):  # that it was refused does not count
        with pytest.raises(CommunicatorError, match="a collective of 64 bytes is captured before one has run"):
            backend.all_reduce(large)
    assert fake.calls[1:] == [("all_gather", 32)] * 2
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    backend.all_reduce(large)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    backend.all_reduce(large)


def test_a_rank_that_is_gone_is_named_as_such(fake: FakeDistributed) -> None:
    backend = NcclBackend(1, SIZE, "file:///m", DEVICE)
    fake.fails = "NCCL communicator was aborted\nand much advice"
    with pytest.raises(PeerLostError, match=r"rank 1 of 3: a collective has failed \(NCCL communicator was aborted\)"):
        backend.all_gather(torch.ones(2), torch.empty(SIZE, 2))
