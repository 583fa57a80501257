"""Pairs of conflicting accesses: which edge they belong to, and whether anything had to wait."""

from __future__ import annotations

import pytest
import torch

from fenceline.memory_order.edges import EDGES
from fenceline_proof.table import Proof, as_text
from fenceline_sim import VirtualGpu, use
from fenceline_sim.pairs import Pair, PairsMet, missed


def watched(policy: str) -> tuple[VirtualGpu, set[Pair]]:
    gpu = VirtualGpu(policy=policy)
    assert gpu.detector is not None
    gpu.detector.pairs = PairsMet()
    return gpu, gpu.detector.pairs.found


@pytest.mark.parametrize(("policy", "waited"), [("laziest", True), ("eager", False)])
def test_a_pair_is_met_with_its_edge_and_its_wait(policy: str, waited: bool) -> None:
    """STORE reads what FORWARD has written, in its order; on other rows there is nothing to order."""
    gpu, found = watched(policy)
    forward, store = gpu.stream("forward"), gpu.stream("store")
    pages = torch.zeros(4, 4, device=use(gpu))
    gpu.name_memory(pages, "kv_pool.layer0.k", row_bytes=16)
    gpu.synchronize_all()
    with gpu.on(forward):
        pages[1:3] = 1.0  # a copy of a number
    mark = gpu.record(forward)
    with gpu.on(store):
        pages[:1].clone()
    gpu.wait(store, mark)
    with gpu.on(store):
        pages[2:].clone()
    gpu.synchronize_all()
    (pair,) = found
    assert pair == ("store_after_forward", "store", "forward", "RAW", waited)


@pytest.mark.parametrize(("policy", "waited"), [("laziest", True), ("eager", False)])
def test_what_the_host_submits_after_it_waited_is_ordered(policy: str, waited: bool) -> None:
    """FORWARD fills a result slot again that COPY has read; no edge joins these two."""
    gpu, found = watched(policy)
    forward, copy = gpu.stream("forward"), gpu.stream("copy")
    slot = torch.zeros(4, device=use(gpu))
    gpu.synchronize_all()
    with gpu.on(copy):
        slot.clone()
    gpu.synchronize(gpu.record(copy))
    with gpu.on(forward):
        slot.fill_(1.0)
    gpu.synchronize_all()
    (pair,) = found
    assert pair[:4] == ("host_after_copy", "host", "copy", "WAR") and pair.waited is waited


def test_memory_that_has_been_freed_is_no_conflict() -> None:
    gpu, found = watched("eager")
    forward, load = gpu.stream("forward"), gpu.stream("load")
    with gpu.on(load):
        page = torch.zeros(4, device=use(gpu))
    gpu.wait(forward, gpu.record(load))
    with gpu.on(forward):
        page.add_(1.0)
    gpu.wait(load, gpu.record(forward))
    del page
    gpu.synchronize_all()
    assert {pair[:4] for pair in found} == {
        ("forward_after_load", "forward", "load", "RAW"),
        ("forward_after_load", "forward", "load", "WAW"),
    }


def test_an_edge_that_was_never_met_is_named_and_fails_the_proof() -> None:
    pairs = [
        Pair(edge.name, waiter.value, source.value, hazard.value, True)
        for edge in EDGES.values()
        for waiter, source in edge.pairs
        for hazard in edge.hazards
    ]
    assert missed(pairs) == []
    lazy = [pair._replace(waited=pair.edge != "staging_reuse") for pair in pairs]
    assert missed(lazy) == ["staging_reuse, host ← schedule: nothing had to wait"]
    assert missed([pair for pair in pairs if pair[1:4] != ("host", "store", "WAW")]) == []
    assert missed([pair for pair in pairs if pair[:3] != ("host_page_reuse", "host", "load")]) == [
        "host_page_reuse, host ← load: no pair of accesses"
    ]
    met = [pair for pair in pairs if (pair.edge, pair.hazard) != ("forward_after_load", "WAW")]
    assert missed(met) == ["forward_after_load, WAW"]
    assert Proof(num_intact=1).clean
    proof = Proof(num_intact=1, missed_pairs=missed(met))
    assert not proof.clean and "NEVER MET: forward_after_load, WAW" in as_text(proof)
