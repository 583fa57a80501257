"""The gather of a batch's pages, and the fa3 backend on top of it, in Triton's interpreter.

The interpreter is chosen when triton is imported, so the cases run in a process of their own: this file as a script.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_interpreter import outcomes_of, print_outcomes, set_up_interpreter

CHECKS = (
    "indices",
    "indices_of_many_requests",
    "rows",
    "rows_again_after_a_longer_batch",
    "fa3_extend",
    "fa3_decode",
    "fa3_graph",
)

results = outcomes_of(__file__)


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, results: dict[str, str]) -> None:
    assert results[name] == ""


# --- the checks, run in the script -------------------------------------------------------------------


def table(num_rows: int, columns: int) -> torch.Tensor:
    return torch.randint(1, 10_000, (num_rows, columns), generator=torch.Generator().manual_seed(1)).int()


def indices(lens: tuple[int, ...] = (1, 16, 17, 40, 15), page_size: int = 16) -> None:
    from fenceline.layers.kernels.triton.page_gather import gather_page_indices

    num_pages = [-(-n // page_size) for n in lens]
    page_table = table(len(lens) + 3, max(num_pages) + 2)
    rows = torch.randperm(len(lens) + 3, generator=torch.Generator().manual_seed(2))[: len(lens)]
    indptr = torch.full((len(lens) + 1,), -7, dtype=torch.int32)
    pages = torch.full((sum(num_pages) + 2,), -7, dtype=torch.int32)
    last = torch.full((len(lens),), -7, dtype=torch.int32)
    gather_page_indices(page_table, rows, torch.tensor(lens), page_size, max(num_pages), indptr, pages, last)
    assert indptr.tolist() == [0, *np.cumsum(num_pages).tolist()]
    expected = [page_table[row, :count] for row, count in zip(rows, num_pages, strict=True)]
    assert pages[:-2].tolist() == torch.cat(expected).tolist()
    assert pages[-2:].tolist() == [-7, -7], "nothing is written past the last page"
    assert last.tolist() == [n - (count - 1) * page_size for n, count in zip(lens, num_pages, strict=True)]


def indices_of_many_requests() -> None:
    """More than one pass over the lengths before a request, more than one block of pages in it."""
    indices(tuple(1 + (37 * i) % 5 for i in range(300)), page_size=1)
    indices((3, 1300, 512, 513), page_size=1)


def rows(lens: tuple[int, ...] = (1, 64, 65, 600 * 64)) -> None:
    from fenceline.layers.kernels.triton.page_gather import gather_page_rows

    page_table = table(6, 700)
    chosen = torch.tensor([5, 0, 2, 3])[: len(lens)]
    out = torch.full((len(lens), 704), -7, dtype=torch.int32)
    seq_lens = torch.zeros(len(lens), dtype=torch.int32)
    gather_page_rows(page_table, chosen, torch.tensor(lens), 64, out, seq_lens)
    check_rows(page_table, chosen, lens, out)
    assert seq_lens.tolist() == list(lens)


def check_rows(page_table: torch.Tensor, chosen: torch.Tensor, lens: tuple[int, ...], out: torch.Tensor) -> None:
    for i, length in enumerate(lens):
        count = -(-length // 64)
        end = min(-(-count // 512) * 512, out.shape[1])
        assert out[i, :count].tolist() == page_table[chosen[i], :count].tolist()
        assert not out[i, count:end].any(), "the sink follows the last page"


def rows_again_after_a_longer_batch() -> None:
    from fenceline.layers.kernels.triton.page_gather import gather_page_rows

    page_table, chosen = table(4, 64), torch.tensor([1, 3])
    out, seq_lens = torch.zeros(2, 64, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    for lens in ((64 * 60, 64 * 50), (65, 1)):
        gather_page_rows(page_table, chosen, torch.tensor(lens), 64, out, seq_lens)
        check_rows(page_table, chosen, lens, out)


def flash_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    """What flash_attn_with_kvcache documents, in float64, on the types that it insists on."""
    assert causal and page_table.dtype == cache_seqlens.dtype == cu_seqlens_q.dtype == torch.int32
    assert k_cache.shape == v_cache.shape and k_cache.dim() == 4
    assert page_table.shape[0] == len(cache_seqlens) == len(cu_seqlens_q) - 1
    starts = cu_seqlens_q.tolist()
    assert starts[-1] == len(q) and max_seqlen_q == max(np.diff(starts))
    outputs = []
    for i, length in enumerate(cache_seqlens.tolist()):
        pages = page_table[i, : -(-length // k_cache.shape[1])].long()
        group = q.shape[1] // k_cache.shape[2]
        keys = k_cache[pages].flatten(0, 1)[:length].double().repeat_interleave(group, dim=1)
        values = v_cache[pages].flatten(0, 1)[:length].double().repeat_interleave(group, dim=1)
        queries = q[starts[i] : starts[i + 1]].double()
        last = length - len(queries) + torch.arange(len(queries))
        left, right = (length if size == -1 else size for size in window_size)
        hidden = torch.arange(length) > last[:, None] + min(right, 0)
        hidden |= torch.arange(length) < last[:, None] - left
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * softmax_scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs).to(q.dtype)


def fa3_plan(seq_lens: list[int], query_lens: list[int], page_size: int, kind: str, window: int | None = None) -> None:
    from attention_cases import SCALE, Case

    from fenceline.layers.attention.base import LayerRules
    from fenceline.layers.attention.fa3_backend import Fa3AttentionBackend
    from fenceline.layers.forward_batch import AttentionInputs, ForwardMode, GraphDecodeInputs

    rules = LayerRules(window, 0.0 if window is None else 0.8)
    case = Case(seq_lens, query_lens, page_size, (4, 2), seed=3, dtype=torch.bfloat16, rules=rules)
    backend = Fa3AttentionBackend(case.pool, flash_attention, case.rules_there())
    if kind == "graph":
        rows, lens = (torch.zeros(len(seq_lens), dtype=torch.int64), torch.ones(len(seq_lens), dtype=torch.int64))
        plan = backend.plan_graph(GraphDecodeInputs(case.page_table, rows, lens, max(seq_lens) + 20))
        assert plan is not None
        rows.copy_(case.rows)
        lens.copy_(torch.tensor(seq_lens))
        plan.prepare()
    else:
        starts = torch.tensor([0, *np.cumsum(query_lens).tolist()], dtype=torch.int32)
        plan = backend.plan(
            AttentionInputs(
                mode=ForwardMode.EXTEND if kind == "extend" else ForwardMode.DECODE,
                page_table=case.page_table,
                rows=case.rows,
                seq_lens=torch.tensor(seq_lens),
                seq_lens_cpu=np.array(seq_lens),
                query_lens_cpu=np.array(query_lens),
                query_starts=starts if kind == "extend" else None,
            )
        )
    q = torch.cat(case.queries)
    unused = torch.zeros(len(q), 2, 8)
    output = plan.forward(1, q, unused, unused, SCALE)
    for ours, expected in zip(output.split(query_lens), case.expected(), strict=True):
        torch.testing.assert_close(ours.double(), expected, atol=3e-2, rtol=0)


def fa3_extend() -> None:
    fa3_plan([5, 90, 40, 16], [5, 1, 7, 16], 16, "extend")
    fa3_plan([7, 3], [7, 1], 1, "extend")
    fa3_plan([40, 90, 16], [9, 1, 16], 16, "extend", window=10)


def fa3_decode() -> None:
    fa3_plan([1, 16, 17, 33], [1] * 4, 16, "decode")
    fa3_plan([1, 16, 17, 33], [1] * 4, 16, "decode", window=16)


def fa3_graph() -> None:
    fa3_plan([1, 16, 17, 33], [1] * 4, 16, "graph")


if __name__ == "__main__":
    set_up_interpreter()
    print_outcomes({name: globals()[name] for name in CHECKS})
