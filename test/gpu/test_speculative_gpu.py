"""The arithmetic of a speculative step in CUDA graphs: replays compute what the CPU computes, so no function asks the
host; moves of accepted rows, at the shapes of real models; and the kernels of a step beside torch's operators."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from speculative_step_cases import (
    check_accept,
    check_begin,
    check_draws,
    check_hidden,
    check_keep,
    check_kept_tokens,
    check_look_up,
    check_place,
    check_proposal,
)

from fenceline.config.kv_layout import KVLayout, keys_and_values
from fenceline.layers.kernels.embed_join import JoinNorms, embed_and_join
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.speculative.accept import accept
from fenceline.speculative.kv_rows import KVMover, node_slots
from fenceline.speculative.refuse import check_draft
from fenceline.speculative.tree import DraftTree, build_tree, first_candidates, more_candidates

pytestmark = pytest.mark.gpu

Inputs = dict[str, torch.Tensor]


def inputs_of(seed: int, batch: int, topk: int, num_steps: int, num_nodes: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def ints(*shape: int) -> torch.Tensor:
        return torch.randint(0, 3, shape, generator=generator)

    return {
        "roots": ints(batch),
        "seq_lens": ints(batch) * 50,
        "rows": torch.randperm(batch + 1, generator=generator)[:batch],
        "draws": ints(batch, num_nodes),
        "ids": torch.where(torch.rand(num_steps, batch, topk, topk, generator=generator) < 0.002, -5, 0)
        + ints(num_steps, batch, topk, topk),
        # Few values: equal scores must be told apart in the same way on both.
        "logprobs": -ints(num_steps, batch, topk, topk) / 2.0,
    }


def step(given: Inputs, num_nodes: int) -> list[torch.Tensor]:
    num_steps = len(given["ids"])
    is_bad = given["rows"] < 0
    candidates = None
    for ids, logprobs in zip(given["ids"], given["logprobs"], strict=True):
        ids, logprobs, is_bad = check_draft(ids, logprobs, 3, is_bad)
        if candidates is None:
            candidates = first_candidates(ids[:, 0], logprobs[:, 0])
        else:
            candidates = more_candidates(candidates, ids, logprobs)
    assert candidates is not None
    if given["ids"].shape[2] == 1:
        ids = torch.cat([given["roots"][:, None], candidates.token_ids], 1)
        positions = given["seq_lens"][:, None] + torch.arange(ids.shape[1], device=ids.device)
        tree = DraftTree(ids, positions, None, None)
    else:
        tree = build_tree(given["roots"], given["seq_lens"], candidates, num_nodes)
    tree = replace(tree, is_rejected=is_bad)
    accepted = accept(tree, given["draws"], num_steps)
    results = [tree.token_ids, tree.positions, is_bad, accepted.token_ids, accepted.counts, accepted.path]
    if tree.parents is not None and tree.ancestors is not None:
        results += [tree.parents, tree.ancestors]
    return [*results, accepted.last_tokens]


@pytest.mark.parametrize(
    ("batch", "topk", "num_steps", "num_nodes"), [(1, 1, 3, 4), (32, 1, 5, 6), (7, 4, 3, 8), (64, 8, 6, 64)]
)
def test_replays_of_a_step_equal_the_cpu(batch: int, topk: int, num_steps: int, num_nodes: int) -> None:
    given = {name: tensor.cuda() for name, tensor in inputs_of(0, batch, topk, num_steps, num_nodes).items()}
    step(given, num_nodes)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(given, num_nodes)
    for seed in range(20):
        plain = inputs_of(seed, batch, topk, num_steps, num_nodes)
        for name, tensor in plain.items():
            given[name].copy_(tensor)
        graph.replay()
        for left, right in zip(results, step(plain, num_nodes), strict=True):
            assert torch.equal(left.cpu(), right)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("batch", "num_nodes", "width"), [(1, 4, 4), (32, 26, 6), (64, 64, 17)])
def test_moves(batch: int, num_nodes: int, width: int, page_size: int) -> None:
    """Many paths that overlap, by one launch in a graph; the target's layers and a draft's, which differ."""
    layers = (
        *(keys_and_values(8, 128, "bfloat16"),) * 36,
        keys_and_values(2, 64, "bfloat16"),
        keys_and_values(1, 3, "float32"),
    )
    columns = -(-(100 + num_nodes) // page_size)
    pool = KVPool(batch * columns + 1, KVLayout(page_size, layers), torch.device("cuda"))
    parts = [tensor for _, tensor in pool.tensors()]
    table = (torch.randperm(batch * columns) + 1).view(batch, columns).int()
    table = torch.cat([torch.zeros(1, columns, dtype=torch.int32), table]).cuda()
    rows = (torch.randperm(batch) + 1).cuda()
    seq_lens = torch.zeros(batch, dtype=torch.int64, device="cuda")
    path, counts = torch.zeros(batch, width, dtype=torch.int64, device="cuda"), torch.ones_like(seq_lens)
    mover = KVMover(parts)

    def submit() -> None:
        mover.move(node_slots(table, rows, seq_lens, num_nodes, page_size), path, counts)

    submit()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        submit()
    random = np.random.default_rng(page_size)
    for _ in range(5):
        seq_lens.copy_(torch.from_numpy(random.integers(0, 100, batch)))
        counts.copy_(torch.from_numpy(random.integers(1, width + 1, batch)))
        paths = [[0, *(np.sort(random.permutation(num_nodes - 1)[: width - 1]) + 1)] for _ in range(batch)]
        path.copy_(torch.tensor(np.array(paths)))
        for part in parts:
            part.copy_(torch.randn(part.shape, device="cuda"))
        expected = [part.clone() for part in parts]
        slots = node_slots(table, rows, seq_lens, num_nodes, page_size).view(batch, num_nodes)
        inside = torch.arange(width, device="cuda") < counts[:, None]
        source, target = slots.gather(1, path)[inside], slots[:, :width][inside]
        for before, after in zip(parts, expected, strict=True):
            after[target] = before[source]
        graph.replay()
        for part, after in zip(parts, expected, strict=True):
            assert torch.equal(part, after)


# --- the kernels of a step, as by torch's operators


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("size", "num_rows"), [(1, 4), (32, 4), (7, 1), (300, 64)])
def test_begin_of_a_step(size: int, num_rows: int, page_size: int) -> None:
    for has_paths in (False, True):
        check_begin("cuda", size, num_rows, page_size, has_paths)


@pytest.mark.parametrize(("size", "num_pieces"), [(1, 126), (32, 149), (300, 1)])
def test_kept_drafts(size: int, num_pieces: int) -> None:
    for has_next in (False, True):
        check_keep("cuda", size, num_pieces, 4, has_next)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("size", "num_rows"), [(1, 4), (32, 6), (300, 16)])
def test_places_of_rows(size: int, num_rows: int, page_size: int) -> None:
    for first, has_positions in ((-3, True), (0, True), (12, False)):
        check_place("cuda", size, num_rows, page_size, first, has_positions)


@pytest.mark.parametrize(("size", "num_pieces"), [(1, 126), (32, 149), (300, 1)])
def test_proposals_of_several_layers(size: int, num_pieces: int) -> None:
    for has_ids in (False, True):
        check_proposal("cuda", size, num_pieces, 6, 2, has_ids)


@pytest.mark.parametrize("accept_length", [None, 1.0, 2.6, 3.0])
@pytest.mark.parametrize(("size", "num_rows"), [(1, 4), (32, 4), (9, 1), (300, 17)])
def test_ends_of_chains(size: int, num_rows: int, accept_length: float | None) -> None:
    for has_all in (False, True):
        check_accept("cuda", size, num_rows, accept_length, has_all)


@pytest.mark.parametrize("window", [(1, 12), (3, 5)])
@pytest.mark.parametrize(("size", "num_rows", "longest"), [(1, 8, 131_072), (32, 16, 5000), (300, 2, 40)])
def test_drafts_that_are_looked_up(size: int, num_rows: int, longest: int, window: tuple[int, int]) -> None:
    check_look_up("cuda", size, num_rows, longest, *window)
    check_kept_tokens("cuda", size, num_rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("size", "num_rows", "features"), [(1, 4, 4096), (32, 4, 2560), (300, 1, 40)])
def test_hidden_states_of_the_last_tokens(size: int, num_rows: int, features: int, dtype: torch.dtype) -> None:
    check_hidden("cuda", size, num_rows, features, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("size", "num_known", "vocab_size"), [(1, 32_000, 128_256), (33, 32_000, 151_936), (4, 40, 60)]
)
def test_draws_of_drafts(size: int, num_known: int, vocab_size: int, dtype: torch.dtype) -> None:
    check_draws("cuda", size, num_known, vocab_size, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("embedding", "width"), [(4096, 4096), (2560, 2560), (40, 72)])
def test_embeddings_beside_hidden_states(embedding: int, width: int, dtype: torch.dtype) -> None:
    table, weights = (torch.randn(300, embedding).to(dtype), [torch.rand(n).to(dtype) for n in (embedding, width)])
    for num_tokens in (1, 4, 33):
        ids, hidden = torch.randint(0, 300, (num_tokens,)), torch.randn(num_tokens, width).to(dtype)
        for norms in (None, JoinNorms(weights[0], weights[1], 1e-6)):
            there = None if norms is None else JoinNorms(weights[0].cuda(), weights[1].cuda(), 1e-6)
            joined = embed_and_join(ids.cuda(), table.cuda(), hidden.cuda(), there).cpu()
            expected = embed_and_join(ids, table, hidden, norms)
            if norms is None:
                assert torch.equal(joined, expected)
            else:
                tolerance = 2 * torch.finfo(dtype).eps
                torch.testing.assert_close(joined, expected, rtol=tolerance, atol=max(tolerance, 2e-5))
