"""Sparse attention of the triton backend on the CPU: its kernels in Triton's interpreter, which select exactly the
tokens of the reference, and compiled for a GPU that is not there.

Run as a script this file is the checks themselves, for the interpreter is chosen when triton is imported.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import pytest
import torch
from model_parity import PagedModel, save_checkpoint
from selection_cases import Sizes, Steps
from triton_interpreter import compile_kernel, in_front_of_nan, outcomes_of, print_outcomes, set_up_interpreter

from fenceline.layers.forward_batch import ForwardMode, IndexQueries, QueryTree
from fenceline.layers.kernels.base import LayerKernels
from fenceline.memory_order.guards import first_of_best

INTERPRETED = (
    "every_kind_of_step",
    "rows_in_fp8",
    "many_blocks",
    "queries_in_several_launches",
    "scores_of_every_sign",
    "padded_requests_see_one_token",
    "few_tokens_are_all_attended_to",
    "whole_model",
)
TREE = [-1, 0, 0, 1, 2]  # the parent of each node

interpreted = outcomes_of(__file__)
compiled = outcomes_of(__file__, "compile")


@pytest.mark.long
@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name: str, interpreted: dict[str, str]) -> None:
    assert interpreted[name] == ""


@pytest.mark.long
def test_compiles_without_a_gpu(compiled: dict[str, str]) -> None:
    assert compiled["sm_90"] == ""


# --- the checks, run in the script -------------------------------------------------------------------------------


def backend_of(steps: Steps):  # type: ignore[no-untyped-def]
    from fenceline.layers.attention.triton_backend import TritonAttentionBackend

    return TritonAttentionBackend(steps.pool, 0, steps.rules, steps.sizes.heads)


def check_every_kind_of_step() -> None:
    """Lengths of fewer tokens than are selected, as many, one more, and many; odd sizes."""
    for page_size, heads, dims in ((1, 3, (34, 24)), (16, 20, (20, 16))):
        sizes = Sizes(page_size, 16, heads, *dims, index_heads=heads, index_dim=20)
        steps = Steps(page_size, (9, 16, 17, 80), sizes)
        backend = backend_of(steps)
        steps.check(*steps.extended(backend, [9, 3, 2, 4]))
        steps.check(*steps.decoded(backend))
        steps.check(*steps.verified(backend, None, 4))
        steps.check(*steps.verified(backend, TREE, 5))


def check_rows_in_fp8() -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 4e-3)):
        sizes = Sizes(4, 16, 3, 20, 16, 17, 32, "float8_e4m3fn", dtype)
        steps = Steps(3, (9, 90), sizes)
        backend = backend_of(steps)
        for plan, reads in (steps.decoded(backend), steps.verified(backend, TREE, 5)):
            steps.check(plan, reads, tolerance=tolerance)


def check_many_blocks() -> None:
    """More tokens than a program counts at once, so that equal ones lie in several parts."""
    steps = Steps(5, (9000, 300), Sizes(64, 700, 2, 16, 16, 1, 4))
    steps.check(*steps.decoded(backend_of(steps)))


def check_queries_in_several_launches() -> None:
    from fenceline.layers.attention import triton_backend
    from fenceline.layers.kernels.triton import select_tokens

    steps = Steps(6, (70, 20), Sizes(16, 16, 2, 16, 16))
    with mock.patch.object(select_tokens, "_MOST_SCORES", 600), mock.patch.object(triton_backend, "_MOST_LISTS", 4):
        backend = backend_of(steps)
        steps.check(*steps.extended(backend, [7, 20]))
        steps.check(*steps.verified(backend, None, 3))


def selected(scores: torch.Tensor, top_k: int) -> list[list[int]]:
    """The positions that are selected of one request for each row of ``scores``, which are its only head's products."""
    from fenceline.layers.kernels.triton.decode_attention import PagedRequests
    from fenceline.layers.kernels.triton.select_tokens import select_tokens

    num, length = scores.shape
    cache_rows = in_front_of_nan(scores.flatten()[:, None, None].expand(-1, 1, 4) * torch.tensor([1.0, 0, 0, 0]))
    table = torch.arange(num * length).view(num, length).int()
    requests = PagedRequests(table, torch.arange(num), torch.full((num,), length), 1)
    signs = torch.tensor([1.0, -1.0])[:, None] * torch.tensor([1.0, 0, 0, 0])
    queries, weights = signs.expand(num, 2, 4).contiguous(), torch.tensor([[1.0, -1.0]]).expand(num, 2).contiguous()
    index = IndexQueries(queries, weights, top_k, first_of_best)
    slots, counts = select_tokens(index, cache_rows, requests, QueryTree(1, 1), length, 2)
    return [(slots[i, : counts[i]] - i * length).tolist() for i in range(num)]


def check_scores_of_every_sign() -> None:
    """Of any size, with equal ones, zeros of both signs and numbers that differ in the last bit."""
    scores = torch.randn(6, 200) * 10.0 ** torch.randint(-20, 20, (6, 200))
    scores[1] = torch.randint(-2, 3, (200,)).float()
    scores[2] = torch.tensor([0.0, -0.0]).repeat(100)
    scores[3] = 1.0 + torch.randint(0, 3, (200,)) * 2.0**-23
    scores[4, 100:] = scores[4, :100]
    scores[5] = -scores[3]
    for top_k in (1, 16, 100, 199, 200):
        expected = [row.nonzero().flatten().tolist() for row in first_of_best(scores, top_k)]
        assert selected(scores, top_k) == expected, top_k


def check_padded_requests_see_one_token() -> None:
    """In a graph: their length is 1 or that of the tree, and their row the sink's."""
    steps = Steps(7, (40, 30), Sizes(4, 5))
    backend = backend_of(steps)
    for tree in (None, TREE):
        plan, reads = steps.verified(backend, tree, 5)
        plan.requests.seq_lens[1] = 1  # type: ignore[attr-defined]
        plan.requests.page_table[steps.rows[1], 0] = 0  # type: ignore[attr-defined]
        num = len(reads) // 2
        queries, weights = steps.whole(2 * num, 2, 4), steps.whole(2 * num, 2)
        slots, counts = plan.select(0, IndexQueries(queries, weights, 5, first_of_best))
        assert counts[num:].tolist() == [1] * num and slots[num:, 0].tolist() == [0] * num
        assert counts[:num].tolist() == [5] * num


def check_few_tokens_are_all_attended_to() -> None:
    """If no request has more than are selected, there is no list, and nothing is scored."""
    steps = Steps(8, (5, 3), Sizes(4, 5))
    backend = backend_of(steps)
    steps.pool.row(0, "index").fill_(torch.nan)
    plan, reads = steps.decoded(backend)
    assert plan.select(0, IndexQueries(steps.whole(2, 2, 4), steps.whole(2, 2), 5, first_of_best)) == ()
    assert len(reads) == 2


def check_whole_model() -> None:
    """Layers that select and some that share a selection: the logits are those of torch's operators, for prompts in
    pieces and then decode."""
    from fenceline.layers.attention.triton_backend import TritonAttentionBackend
    from fenceline.layers.kernels.triton.store_index import store_index

    with TemporaryDirectory() as directory:
        save_checkpoint("glm-5-shared", Path(directory))
        expected, ours = (PagedModel(Path(directory), 16, "cpu") for _ in range(2))
    ours.backend = TritonAttentionBackend(ours.pool, 0, ours.model.attention_rules, ours.config.num_heads)
    one, two = torch.randint(0, 100, (2, 60))
    steps = (
        ([(0, one, 0, 20), (1, two, 0, 5)], ForwardMode.EXTEND),
        ([(0, one, 20, 25), (1, two, 5, 8)], ForwardMode.EXTEND),
        ([(0, one, 25, 26), (1, two, 8, 9)], ForwardMode.DECODE),
    )
    for work, mode in steps:
        wanted = expected.step(work, mode)
        with mock.patch.object(LayerKernels, "store_index", staticmethod(store_index)):
            found = ours.step(work, mode)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def compile_for_hopper() -> None:
    """The kernels of DeepSeek-V3.2 and GLM-5, down to machine code."""
    from fenceline.layers.kernels.triton import select_tokens as module

    for heads, in_fp8, tree in ((64, False, (1, 1, False)), (64, True, (1, 1, False)), (32, True, (4, 4, True))):
        shape = (heads, 128, 132 if in_fp8 else 128, in_fp8, 2048, 64, 128)
        score = module._score_variant(*shape, *tree).constants
        score |= {} if in_fp8 else {"scales": None}
        select = module._select_variant(2048, 64, 16, *tree).constants
        absent = {} if tree[2] else {"ancestors": None}
        ptx = compile_kernel(
            module._score_kernel, score | absent, "sm_90", 4, 3, False, "fp8e4nv" if in_fp8 else "bf16"
        )
        wide = re.search(r"cp\.async\.\S+ \[.*\], \[.*\], 0x10", ptx)
        assert bool(wide) != in_fp8, "rows of 132 bytes begin at any multiple of four"
        compile_kernel(module._select_kernel, select | absent, "sm_90", module._SELECT_WARPS, 3, False)


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        print_outcomes({"sm_90": compile_for_hopper})
    else:
        set_up_interpreter()
        np.seterr(over="ignore")
        print_outcomes({name: globals()[f"check_{name}"] for name in INTERPRETED})
