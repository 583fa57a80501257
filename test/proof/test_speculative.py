"""A speculative step's arithmetic on the virtual GPU, captured in a graph: it asks the host nothing, its launches touch
what they declare, and a replay computes what the same functions compute on the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fenceline.config.kv_layout import KVLayout
from fenceline.layers.attention.backends import AttentionSetting
from fenceline.layers.attention.base import AttentionBackend
from fenceline.layers.attention.reference import ReferenceAttentionBackend
from fenceline.layers.forward_batch import QueryTree, VerifyInputs
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.speculative.accept import accept
from fenceline.speculative.kv_rows import KVMover, node_slots
from fenceline.speculative.refuse import check_draft
from fenceline.speculative.tree import DraftTree, build_tree, first_candidates, more_candidates
from fenceline_proof.launched_attention import LaunchedAttentionBackend
from fenceline_sim import VirtualGpu, use

torch.set_num_threads(1)

BATCH, TOPK, NUM_STEPS, NUM_NODES, VOCAB, PAGE_SIZE = 3, 2, 3, 6, 2, 4


class Step:
    """The inputs of a step on a device, and the step itself."""

    def __init__(self, device: torch.device, is_chain: bool) -> None:
        self.is_chain = is_chain
        self.pool = KVPool(20, KVLayout.uniform(PAGE_SIZE, 2, 1, 8, "float32"), device)
        self.parts = [tensor for _, tensor in self.pool.tensors()]
        children = 1 if is_chain else TOPK
        self.inputs = {
            "roots": torch.zeros(BATCH, dtype=torch.int64, device=device),
            "seq_lens": torch.ones(BATCH, dtype=torch.int64, device=device),
            "rows": torch.zeros(BATCH, dtype=torch.int64, device=device),
            "page_table": torch.zeros(5, 5, dtype=torch.int32, device=device),
            "draws": torch.zeros(BATCH, NUM_NODES, dtype=torch.int64, device=device),
            "ids": torch.zeros(NUM_STEPS, BATCH, children, children, dtype=torch.int64, device=device),
            "logprobs": torch.zeros(NUM_STEPS, BATCH, children, children, device=device),
            "q": torch.zeros(BATCH * NUM_NODES, 2, 8, device=device),
        }
        self.mover = KVMover(self.parts)

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def ints(high: int, like: torch.Tensor) -> torch.Tensor:
            return torch.randint(0, high, like.shape, generator=generator)

        given = self.inputs
        given["roots"].copy_(ints(VOCAB, given["roots"]))
        given["seq_lens"].copy_(ints(12, given["seq_lens"]))
        given["rows"].copy_(torch.tensor([1 + seed % 3, 4, 0]))
        pages = torch.randperm(19, generator=generator)[:15] + 1
        given["page_table"].copy_(torch.cat([torch.zeros(5), pages[:5], pages[:5], pages[:5], pages[5:10]]).view(5, 5))
        given["draws"].copy_(ints(VOCAB, given["draws"]))
        given["ids"].copy_(ints(VOCAB + (seed % 2), given["ids"]))
        given["logprobs"].copy_(-torch.rand(given["logprobs"].shape, generator=generator))
        for part in (*self.parts, given["q"]):
            part.copy_(torch.randn(part.shape, generator=generator))

    def run(self, backend: AttentionBackend) -> list[torch.Tensor]:
        """Attention of the nodes, their positions, whose drafts are bad, and what is accepted."""
        given = self.inputs
        is_bad = given["rows"] < 0
        candidates = None
        for ids, logprobs in zip(given["ids"], given["logprobs"], strict=True):
            ids, logprobs, is_bad = check_draft(ids, logprobs, VOCAB, is_bad)
            if candidates is None:
                candidates = first_candidates(ids[:, 0], logprobs[:, 0])
            else:
                candidates = more_candidates(candidates, ids, logprobs)
        assert candidates is not None
        if self.is_chain:
            ids = torch.cat([given["roots"][:, None], candidates.token_ids], 1)
            positions = given["seq_lens"][:, None] + torch.arange(ids.shape[1], device=ids.device)
            tree = DraftTree(ids, positions, None, None)
        else:
            tree = build_tree(given["roots"], given["seq_lens"], candidates, NUM_NODES)
        tree = replace(tree, is_rejected=is_bad)
        num_nodes = tree.token_ids.shape[1]
        # Attention reads lengths before its wait, so the kernel in front of it must not be the one that writes them.
        lens = given["seq_lens"] + num_nodes
        slots = node_slots(given["page_table"], given["rows"], given["seq_lens"], num_nodes, PAGE_SIZE)
        inputs = VerifyInputs(
            given["page_table"],
            given["rows"],
            lens,
            np.full(BATCH, 5 * PAGE_SIZE),
            QueryTree(num_nodes, num_nodes, tree.ancestors),
            num_heads=2,
        )
        plan = backend.plan_verify(inputs)
        assert plan is not None
        plan.prepare()
        q = given["q"][: BATCH * num_nodes]
        attended = plan.forward(1, q, q[:, :1], q[:, :1], 0.3)[: 2 * num_nodes]  # without the padded request
        accepted = accept(tree, given["draws"][:, :num_nodes], NUM_STEPS)
        self.mover.move(slots, accepted.path, accepted.counts)
        return [attended, tree.positions, is_bad, *(getattr(accepted, name) for name in accepted.__slots__)]


@pytest.mark.parametrize("is_chain", [False, True], ids=["tree", "chain"])
def test_a_captured_step_follows_its_inputs_without_the_host(is_chain: bool) -> None:
    gpu = VirtualGpu(policy="random", seed=1)
    ours, plain = Step(use(gpu), is_chain), Step(torch.device("cpu"), is_chain)
    ours.fill(0)
    graph = gpu.graph("speculative step")
    backend = LaunchedAttentionBackend(AttentionSetting(ours.pool, None, 2, 20))  # type: ignore[arg-type]
    with gpu.capture(graph):
        results = ours.run(backend)
    num_bad, counts = 0, set[int]()
    for seed in range(8):
        for step in (ours, plain):
            step.fill(seed)
        graph.replay()
        expected = plain.run(ReferenceAttentionBackend(plain.pool))
        for left, right in zip(results, expected, strict=True):
            torch.testing.assert_close(left.cpu(), right)
        live = slice(PAGE_SIZE, None)  # padded requests race for the sink's rows
        for left, right in zip(ours.parts, plain.parts, strict=True):
            assert left.cpu()[live].tolist() == right[live].tolist()
        num_bad += int(expected[2].sum())
        counts |= set(expected[4].tolist())
    assert num_bad > 0 and len(counts) > 2, (num_bad, counts)
