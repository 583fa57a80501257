"""The back end of ranks on the CPU, in processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gloo_ranks import numbers, run_gloo_ranks
from live_server import unused_port

from fenceline.distributed.gloo import GlooBackend
from fenceline.memory_order import PeerLostError


@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=pytest.mark.long)])
def test_ranks_over_gloo(tmp_path: Path, hosts: int) -> None:
    """Sums are those of float32 in the order of ranks, rounded once; a rank that has ended ends the others' waiting.
    Nothing listens on other networks than that of the meeting."""
    size = 3
    by_rank = run_gloo_ranks(size, tmp_path, f"tcp://127.0.0.1:{unused_port()}" if hosts > 1 else None)
    assert {address for results in by_rank for address in results["listens"]} == {"127.0.0.1"}
    for dtype in (torch.float32, torch.bfloat16):
        first, second, third = (numbers(rank, dtype).float() for rank in range(size))
        in_order = ((first + second) + third).to(dtype)
        if dtype == torch.float32:
            assert not torch.equal(in_order, first + (second + third)), "the numbers show the order"
        else:
            rounded = ((first + second).to(dtype) + third).to(dtype)
            assert not torch.equal(in_order, rounded), "the numbers show that they are rounded once"
        for results in by_rank:
            assert torch.equal(results[str(dtype)], in_order)
    for rank, results in enumerate(by_rank):
        assert results["gathered"].tolist() == [[0, 1, 10, 11, 20, 21], [2, 3, 12, 13, 22, 23]]
        assert results["smallest"] == 98
        assert results["exchanged"] == ["", "780079", "780079780079"]
        if rank < size - 1:
            assert f"rank {rank} of {size}: a collective has failed" in results["lost"]


def test_rank_0_listens_at_an_address_of_its_own_host() -> None:
    with pytest.raises(ValueError, match="cannot meet at tcp://203.0.113.9:20000 .*: check --dist-init-addr"):
        GlooBackend(0, 2, "tcp://203.0.113.9:20000")


def test_a_rank_that_ends_while_the_others_connect_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that is left does not report this as its own fault: the parent says which one has ended, and why."""

    def refused(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError(
            "Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: Connection refused\nat"
        )

    monkeypatch.setattr(torch.distributed, "init_process_group", refused)
    with pytest.raises(PeerLostError, match=r"rank 0 of 2: the ranks cannot connect \(.*: Connection refused\)$"):
        GlooBackend(0, 2, (tmp_path / "meeting").as_uri())
