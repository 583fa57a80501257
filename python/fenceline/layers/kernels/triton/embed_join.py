"""``embed_and_join`` in Triton: two programs for each token, one for the embedding and one for the hidden state."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from fenceline.memory_order.triton_launcher import KernelVariant

_ELEMENTS_A_THREAD = 8  # one 16-byte load of bfloat16
_MAX_WARPS = 16


def launch(
    ids: torch.Tensor,
    table: torch.Tensor,
    hidden: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    out: torch.Tensor,
    pdl: bool = False,
) -> None:
    """See ``embed_and_join``. ``pdl``: see ``rms_norm``; reads the norms' weights before its wait."""
    if len(ids) == 0:
        return
    first, second, eps = (None, None, 0.0) if norms is None else norms
    tensors = (ids, table, hidden, first, second, out)
    assert all(t is None or t.is_contiguous() for t in tensors) and table.dtype == hidden.dtype
    variant = _variant(table.shape[1], hidden.shape[1], norms is not None, pdl)
    variant.launch((2 * len(ids),), tensors, (eps,))


@cache
def _variant(embedding_size: int, hidden_size: int, has_norms: bool, pdl: bool) -> KernelVariant:
    block = triton.next_power_of_2(max(embedding_size, hidden_size))
    num_warps = max(1, min(_MAX_WARPS, block // (32 * _ELEMENTS_A_THREAD)))
    constants = {"EMBEDDING": embedding_size, "HIDDEN": hidden_size, "BLOCK": block, "HAS_NORMS": has_norms, "PDL": pdl}
    return KernelVariant(_embed_and_join_kernel, constants, num_warps, pdl)


@triton.jit
def _embed_and_join_kernel(
    ids, table, hidden, embeddings_norm, hidden_norm, out, eps,
    EMBEDDING: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, HAS_NORMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) // 2).to(tl.int64)
    is_hidden = tl.program_id(0) % 2 == 1
    size = tl.where(is_hidden, HIDDEN, EMBEDDING)
    columns = tl.arange(0, BLOCK)
    live = columns < size
    if HAS_NORMS:
        weight = tl.load(embeddings_norm + columns, mask=live & (is_hidden == 0), other=0.0).to(tl.float32)
        weight += tl.load(hidden_norm + columns, mask=live & is_hidden, other=0.0).to(tl.float32)
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    row = tl.load(ids + token)
    embedded = tl.load(table + row * EMBEDDING + columns, mask=live & (is_hidden == 0), other=0.0)
    values = tl.where(is_hidden, tl.load(hidden + token * HIDDEN + columns, mask=live & is_hidden, other=0.0), embedded)
    if HAS_NORMS:
        wide = values.to(tl.float32)
        mean_square = tl.sum(wide * wide, axis=0) / size
        values = (wide * tl.rsqrt(mean_square + eps) * weight).to(out.dtype.element_ty)
    target = out + token * (EMBEDDING + HIDDEN) + tl.where(is_hidden, EMBEDDING, 0)
    tl.store(target + columns, values, mask=live)
