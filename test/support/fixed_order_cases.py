"""Attention in a fixed order: the same request in many batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from attention_cases import SCALE, Case, case, path_to

from fenceline.layers.forward_batch import AttentionInputs, ForwardMode

_LONGEST = 3000  # tokens of a request


def step_of(requests: Sequence[tuple[int, int, int]], page_size: int, heads: tuple[int, int], **options: Any) -> Case:
    """A batch of (number of the request, tokens so far, new tokens). A request's keys, values and queries are the same
    in every batch. ``options``: those of ``Case``."""
    step: Case = case([n for _, n, _ in requests], [new for *_, new in requests], page_size, heads, **options)
    head_dim = step.queries[0].shape[2]
    for i, (number, length, new) in enumerate(requests):
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(number))
        keys, values, queries = (draw(_LONGEST, n, head_dim)[:length] for n in (heads[1], heads[1], heads[0]))
        for row, numbers in zip(step.rules.rows, (keys, values), strict=True):
            pool = step.pool.row(1, row)
            pool[step.slots[i].to(pool.device)] = numbers.to(pool)
        step.queries[i] = queries[length - new :].to(step.queries[i].dtype)
    return step


def attend(step: Case, way: str, num_sms: int, trees: list[list[int]] | None = None) -> list[torch.Tensor]:
    """Each request's results, on the CPU. ``way``: decode, verify (of a chain, or ``trees``) or extend. The work is
    divided as for ``num_sms`` multiprocessors."""
    from fenceline.layers.attention.triton_backend import TritonAttentionBackend

    class Backend(TritonAttentionBackend):
        def _num_workers(self, workers_per_sm: int) -> int:
            self.num_sms = num_sms
            return super()._num_workers(workers_per_sm)

    device, lens = step.device, np.array(step.query_lens)
    backend = Backend(step.pool, 1, step.rules_there(), step.queries[0].shape[1], _LONGEST)
    if way == "verify":
        y = step.verify(backend, len(step.queries[0]), trees)
    else:
        starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lens)])).int().to(device)
        seq_lens = torch.tensor(step.seq_lens)
        table, rows = step.page_table.to(device), step.rows.to(device)
        mode = ForwardMode[way.upper()]
        inputs = AttentionInputs(mode, table, rows, seq_lens.to(device), seq_lens.numpy(), lens, starts)
        queries = torch.cat(step.queries).to(device)
        y = backend.plan(inputs).forward(1, queries, queries[:, :1], queries[:, :1], SCALE).cpu()
    assert all(not workspace.num_done.any() for workspace in backend._workspaces.values())
    return list(y[..., : step.rules.value_dim or y.shape[-1]].split(step.query_lens))


def check_trees(page_size: int, num_sms: int, tree: list[int], prefix: int, **options: Any) -> None:
    """Each node of a tree after ``prefix`` tokens, some of whose branches come later, has the bits of a decode step of
    its path as a plain sequence. ``tree``: the nodes' parents. There are two such requests, and a padded one."""
    num, heads, total = len(tree), (6, 2), prefix + len(tree)
    step = step_of([(1, total, num), (2, total + 1, num), (3, num, num)], page_size, heads, **options)
    step.seq_lens[2] = 1
    nodes = attend(step, "verify", num_sms, [tree, tree[:1] + [0] * (num - 1), tree])
    assert nodes[2].isfinite().all()
    for node in range(num):
        path = path_to(tree, node)[::-1]
        alone = step_of([(1, prefix + len(path), 1)], 16, heads, **options)
        for row in ("k", "v"):
            from_tree, pool = step.pool.row(1, row), alone.pool.row(1, row)
            for depth, each in enumerate(path):
                pool[alone.slots[0][prefix + depth]] = from_tree[step.slots[0][prefix + each]]
        alone.queries[0] = step.queries[0][node : node + 1]
        assert torch.equal(attend(alone, "decode", 1)[0], nodes[0][node : node + 1]), node


def check_attention(
    ways: Sequence[tuple[int, int]],
    ends: Sequence[int],
    heads: tuple[int, int] = (6, 2),
    chunks: Sequence[int] = (1, 100),
    **options: Any,
) -> None:
    """Decode, verification of a chain and chunks of a prompt have the bits of a prefill of the whole prompt. ``ways``:
    page sizes and numbers of multiprocessors. ``ends``: how many tokens of the prompt are there."""
    longest = max(ends)
    [whole] = attend(step_of([(1, longest, longest)], 16, heads, **options), "extend", 1)
    for page_size, num_sms in ways:
        for way, sizes in (("decode", (1,)), ("verify", (4,)), ("extend", chunks)):
            for new in sizes:
                for end in ends:
                    others = [(2, 390, 5), (3, 40, 40)] if way == "extend" else [(2, 390, new), (3, 40, new)]
                    for beside in ([], others) if end == longest else (others,):
                        step = step_of([(1, end, new), *beside], page_size, heads, **options)
                        got = attend(step, way, num_sms)[0]
                        assert torch.equal(got, whole[end - new : end]), (page_size, num_sms, way, new, end)
