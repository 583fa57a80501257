"""Runs ranks as processes over gloo: each runs one program and writes its results to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import torch
from forking import FORKING

from fenceline.distributed.gloo import GlooBackend
from fenceline.memory_order import Communicator, PeerLostError, open_device


def numbers(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """The input of ``rank``: numbers whose sum depends on the order of adding and on how often it is rounded."""
    values = torch.randn(5, 300, generator=torch.Generator().manual_seed(rank))
    return values.to(dtype)


def run_gloo_ranks(size: int, folder: Path, meeting: str | None = None) -> list[dict[str, Any]]:
    """The results of all ranks: sums by dtype, what each has gathered, the addresses at which it listened, and the
    error that it got after the last rank had ended. They meet in a file unless ``meeting`` is given."""
    meeting = meeting or (folder / "meeting").as_uri()
    processes = [FORKING.Process(target=_run, args=(rank, size, folder, meeting)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0, process.exitcode
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


def _run(rank: int, size: int, folder: Path, meeting: str) -> None:
    device = open_device("cpu")
    backend = GlooBackend(rank, size, meeting)
    communicator = Communicator("ranks", device, device.forward, backend)
    results: dict[str, Any] = {}
    with device.forward.active():
        for dtype in (torch.float32, torch.bfloat16):
            results[str(dtype)] = communicator.all_reduce(numbers(rank, dtype))
        results["gathered"] = communicator.all_gather(torch.arange(4).view(2, 2) + 10 * rank)
        results["smallest"] = communicator.smallest(100 - rank)
        results["exchanged"] = [data.hex() for data in communicator.exchange(b"x\0y" * rank)]
        sockets = psutil.Process().net_connections("inet")
        results["listens"] = [each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN]
        results["lost"] = ""
        if rank < size - 1:
            try:
                communicator.all_gather(torch.ones(1))
            except PeerLostError as error:
                results["lost"] = str(error)
    torch.save(results, folder / f"{rank}.pt")
    communicator.close()
