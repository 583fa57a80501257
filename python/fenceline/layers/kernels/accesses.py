"""The declared accesses of the layers' kernels, in Triton (``kernels.triton``) and in CUDA: what a kernel reads and
writes, and what it reads before it waits for the preceding kernel. See ``memory_order.kernel``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from fenceline.memory_order.kernel import KernelAccesses, declare_kernel


@declare_kernel
def rms_norm(op: KernelAccesses, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """See ``rms_norm.rms_norm``."""
    op.read(weight)
    op.wait()
    op.start_dependents()
    op.read(x)
    op.write(out)


@declare_kernel
def silu_and_mul(op: KernelAccesses, gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """See ``activation.silu_and_mul``; all activations have the same accesses."""
    op.wait()
    op.start_dependents()
    op.read(gate_up)
    op.write(out)


@declare_kernel
def rotate_and_store(
    op: KernelAccesses,
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    table: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out_slots: torch.Tensor,
) -> None:
    """See ``rotate_store.rotate_and_store``."""
    op.read(out_slots)
    op.read(table, positions)
    op.read(q_weight)
    op.read(k_weight)
    op.wait()
    op.start_dependents()
    op.read(qkv)
    op.write(qkv)
    op.write(k_cache, out_slots)
    op.write(v_cache, out_slots)


@declare_kernel
def skinny_linear(
    op: KernelAccesses,
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """``skinny_gemm.skinny_linear``, of which only the kernel of one row reads weights before its wait, and
    fenceline_kernel's ``SkinnyGemm``, which also reads the norm's weight there. A norm of several rows is a kernel of
    its own (``rms_norm``). ``out`` is the residual if there is one."""
    op.read(weight)
    op.read(norm_weight)
    op.start_dependents()
    op.wait()
    op.read(x)
    op.read(bias)
    op.read(residual)
    op.write(out)


def _experts_hit(ends: torch.Tensor) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.diff(ends.numpy(), prepend=0))


def _pairs_of_experts(ids: torch.Tensor, num_experts: int) -> npt.NDArray[np.int64]:
    return np.flatnonzero(ids.flatten().numpy() < num_experts)


@declare_kernel
def router_logits(op: KernelAccesses, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """See ``routing.router_logits``, for few tokens."""
    op.read(weight)
    op.wait()
    op.start_dependents()
    op.read(x)
    op.write(out)


@declare_kernel
def route(
    op: KernelAccesses,
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    out_slots: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor,
    ends: torch.Tensor,
) -> None:
    """See ``routing.route``: its only kernel if there are no more tokens than one program handles."""
    _read_scores(op, logits, correction, out_slots)
    op.write(ids)
    op.write(weights)
    op.write(order)
    op.write(ends)


@declare_kernel
def choose_experts(
    op: KernelAccesses,
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    out_slots: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """See ``routing.route``: the first of two kernels, for more tokens."""
    _read_scores(op, logits, correction, out_slots)
    op.write(ids)
    op.write(weights)
    op.write(counts)


def _read_scores(
    op: KernelAccesses, logits: torch.Tensor, correction: torch.Tensor | None, out_slots: torch.Tensor
) -> None:
    op.wait()
    op.start_dependents()
    op.read(logits)
    op.read(correction)
    op.read(out_slots)


@declare_kernel
def place_pairs(
    op: KernelAccesses, ids: torch.Tensor, counts: torch.Tensor, order: torch.Tensor, ends: torch.Tensor
) -> None:
    """See ``routing.route``: the second of two kernels."""
    op.wait()
    op.start_dependents()
    op.read(ids)
    op.read(counts)
    op.write(order)
    op.write(ends)


@declare_kernel
def grouped_product(
    op: KernelAccesses,
    x: torch.Tensor,
    weight: torch.Tensor,
    order: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
) -> None:
    """See ``grouped_gemm.grouped_product``. It reads only the experts to which some token goes."""
    op.wait()
    op.start_dependents()
    op.read(ends)
    op.read(order)
    op.read(x)
    op.read_rows(weight, _experts_hit, ends)
    for of_experts in (bias, scales, zeros):
        if of_experts is not None:
            op.read_rows(of_experts, _experts_hit, ends)
    op.write(out)


@declare_kernel
def combine_experts(
    op: KernelAccesses,
    y: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    num_experts: int,
    adds: bool,
) -> None:
    """See ``grouped_gemm.combine_experts``. ``out`` is the residual if ``adds``. Rows of y that belong to no expert are
    not read, because no kernel has written them."""
    op.wait()
    op.start_dependents()
    op.read(ids)
    op.read(weights)
    op.read_rows(y, _pairs_of_experts, ids, num_experts)
    if adds:
        op.read(out)
    op.write(out)


@declare_kernel
def quantized_linear(
    op: KernelAccesses,
    x: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """``quantized_gemm.quantized_linear`` and fenceline_kernel's ``SkinnyGemm``. Only the latter reads anything before
    its wait. ``out`` is the residual if there is one."""
    for operand in (data, scales, zeros, norm_weight):
        op.read(operand)
    op.start_dependents()
    op.wait()
    for operand in (x, bias, residual):
        op.read(operand)
    op.write(out)


@declare_kernel
def scaled_linear(
    op: KernelAccesses,
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """``skinny_gemm.scaled_linear``. ``out`` is the residual if there is one."""
    op.start_dependents()
    op.wait()
    for operand in (x, x_scales, weight, scales, bias, residual):
        op.read(operand)
    op.write(out)


@declare_kernel
def int4_linear(
    op: KernelAccesses,
    x: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    partial: torch.Tensor | None,
    num_done: torch.Tensor | None,
) -> None:
    """``int4_gemm.int4_linear``, whose norm is a kernel of its own (``rms_norm`` or ``reorder_columns``). ``out`` is
    the residual if there is one; ``partial`` and ``num_done`` are used if K is split. Before its wait it reads scales
    and zero points, and prefetches the weight into L2."""
    for weight in (data, scales, zeros):
        op.read(weight)
    op.start_dependents()
    op.wait()
    for operand in (x, bias, residual, num_done):
        op.read(operand)
    for written in (out, partial, num_done):
        op.write(written)


@declare_kernel
def reorder_columns(
    op: KernelAccesses, x: torch.Tensor, norm_weight: torch.Tensor | None, out: torch.Tensor
) -> None:
    """See ``int4_gemm.reorder_columns``."""
    op.read(norm_weight)
    op.start_dependents()
    op.wait()
    op.read(x)
    op.write(out)


@declare_kernel
def dequantize(
    op: KernelAccesses,
    data: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """See ``quantized_gemm.dequantize``."""
    for operand in (data, scales, zeros):
        op.read(operand)
    op.write(out)


@declare_kernel
def quantize_rows(
    op: KernelAccesses,
    x: torch.Tensor,
    scale: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    numbers: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """See ``quantized_gemm.quantize_rows``."""
    op.read(scale)
    op.read(norm_weight)
    op.start_dependents()
    op.wait()
    op.read(x)
    op.write(numbers)
    op.write(scales)


@declare_kernel
def decode_attention(
    op: KernelAccesses,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    partial: torch.Tensor,
    stats: torch.Tensor,
    num_done: torch.Tensor,
    page_size: int,
    ancestors: torch.Tensor | None = None,
    num_queries: int = 1,
    num_nodes: int = 1,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """See ``decode_attention.decode_attention``. Before its wait it prefetches keys and values of some tokens into L2,
    but not those of each request's queries, which the preceding kernel may still be writing."""
    op.start_dependents()
    requests = page_table, rows, seq_lens, page_size
    for cache in (k_cache, v_cache):
        op.read_tokens(cache, *requests, but_last=num_queries, window=window, queries=num_nodes)
    op.wait()
    op.read(q)
    op.read(ancestors)
    op.read(sinks)
    for cache in (k_cache, v_cache):
        op.read_tokens(cache, *requests, window=window, queries=num_nodes)
    op.read(num_done)
    for written in (out, partial, stats, num_done):
        op.write(written)


@declare_kernel
def extend_attention(
    op: KernelAccesses,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor | None,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    page_size: int,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """The first launch of ``extend_attention.extend_attention``. If keys are split, ``out`` are partial results with
    their ``stats``."""
    op.read(query_starts)
    op.read(q)
    op.read(sinks)
    for cache in (k_cache, v_cache):
        op.read_tokens(cache, page_table, rows, seq_lens, page_size, window=window, queries=query_starts)
    op.write(out)
    op.write(stats)


@declare_kernel
def merge_splits(op: KernelAccesses, partial: torch.Tensor, stats: torch.Tensor, out: torch.Tensor) -> None:
    """The second launch of ``extend_attention.extend_attention``."""
    op.read(partial)
    op.read(stats)
    op.write(out)


@declare_kernel
def gather_page_indices(
    op: KernelAccesses,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_lens: torch.Tensor,
) -> None:
    """See ``page_gather.gather_page_indices``."""
    op.read(page_table, rows)
    op.read(seq_lens)
    for written in (indptr, indices, last_page_lens):
        op.write(written)


@declare_kernel
def gather_page_rows(
    op: KernelAccesses,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    seq_lens_32: torch.Tensor,
) -> None:
    """See ``page_gather.gather_page_rows``."""
    op.read(page_table, rows)
    op.read(seq_lens)
    op.write(out)
    op.write(seq_lens_32)
