"""The declared accesses of the layers' kernels, in Triton (``kernels.triton``) and in CUDA: what a kernel reads and
writes, and what it reads before it waits for the preceding kernel. See ``memory_order.kernel``."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from fenceline.memory_order.kernel import KernelAccesses, declare_kernel, declared

# See ``rms_norm.rms_norm``.
rms_norm = declared("rms_norm", "x weight out", "weight | > x -> out")

# See ``activation.silu_and_mul``; all activations have the same accesses.
silu_and_mul = declared("silu_and_mul", "gate_up out", "| > gate_up -> out")

# See ``rotate_store.rotate_and_store``.
rotate_and_store = declared(
    "rotate_and_store",
    "qkv q_weight k_weight table positions k_cache v_cache out_slots",
    "out_slots table[positions] q_weight k_weight | > qkv -> qkv k_cache[out_slots] v_cache[out_slots]",
)

# See ``by_head.by_head``, for few rows.
by_head = declared("by_head", "x weight out", "weight | > x -> out")

# See ``store_latent.store_latent``. Of ``out`` it writes the rotated part of each query, and the row.
store_latent = declared(
    "store_latent",
    "queries row norm_weight table positions out cache_rows out_slots",
    "out_slots table[positions] norm_weight | > queries row -> out cache_rows[out_slots]",
)

# See ``store_index.store_index``.
store_index = declared(
    "store_index",
    "queries key norm_weight norm_bias table positions weights out out_weights cache_rows out_slots",
    "out_slots table[positions] norm_weight norm_bias | > queries key weights -> out out_weights cache_rows[out_slots]",
)


def _groups(positions: torch.Tensor, out_slots: torch.Tensor, group: int) -> npt.NDArray[np.int64]:
    first = out_slots[(positions + 1) % group == 0] // group * group
    return (first[:, None] + torch.arange(group)).flatten().numpy()


@declare_kernel
def store_means(
    op: KernelAccesses,
    keys: torch.Tensor,
    means: torch.Tensor,
    positions: torch.Tensor,
    out_slots: torch.Tensor,
    group: int,
) -> None:
    """See ``select_blocks.store_means``."""
    op.read(positions)
    op.read(out_slots)
    op.read_rows(keys, _groups, positions, out_slots, group)
    op.write_rows(means, _groups, positions, out_slots, group)


# See ``lightning_inputs.lightning_inputs``.
lightning_inputs = declared(
    "lightning_inputs",
    "projected decays q_weight k_weight table positions q k v of_tokens",
    "projected decays q_weight k_weight table[positions] -> q k v of_tokens",
)

# See ``recurrence.short_convolution``.
short_convolution = declared(
    "short_convolution",
    "x weight bias starts absorbed query_starts slots conv ring out",
    "| > starts absorbed query_starts slots x weight bias conv[slots] ring[slots] -> out conv[slots] ring[slots]",
)

# See ``recurrence.delta_inputs``.
delta_inputs = declared(
    "delta_inputs", "mixed a b a_log dt_bias q k v decays beta", "| > mixed a b a_log dt_bias -> q k v decays beta"
)

# See ``recurrence.mamba_inputs``.
mamba_inputs = declared(
    "mamba_inputs", "mixed dt a_log dt_bias q k v decays", "| > mixed dt a_log dt_bias -> q k v decays"
)

# See ``recurrence.gated_norm``.
gated_norm = declared("gated_norm", "x gate weight inputs factors out", "| > x gate weight inputs factors -> out")

# See ``recurrence.recurrence``.
recurrence = declared(
    "recurrence",
    "q k v decays beta starts absorbed query_starts slots matrix keys values kept_decays out",
    "| > starts absorbed query_starts slots q k v decays beta matrix[slots] keys[slots] values[slots]"
    " kept_decays[slots] -> out matrix[slots] keys[slots] values[slots] kept_decays[slots]",
)

# ``skinny_gemm.skinny_linear``, of which only the kernel of one row reads weights before its wait, and
# fenceline_kernel's ``SkinnyGemm``, which also reads the norm's weight there. A norm of several rows is a kernel of
# its own (``rms_norm``). ``out`` is the residual if there is one.
skinny_linear = declared(
    "skinny_linear", "x weight norm_weight bias residual out", "weight norm_weight > | x bias residual -> out"
)


def _experts_hit(ends: torch.Tensor) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.diff(ends.numpy(), prepend=0))


def _pairs_of_experts(ids: torch.Tensor, num_experts: int) -> npt.NDArray[np.int64]:
    return np.flatnonzero(ids.flatten().numpy() < num_experts)


# See ``routing.router_logits`` and ``routing.normed_logits``, for few tokens; only the latter has a norm.
router_logits = declared("router_logits", "x norm_weight weight normed out", "norm_weight weight | > x -> normed out")

# See ``routing.route``: its only kernel if there are no more tokens than one program handles.
route = declared(
    "route",
    "logits correction out_slots ids weights order ends",
    "| > logits correction out_slots -> ids weights order ends",
)

# See ``routing.route``: the first of two kernels, for more tokens.
choose_experts = declared(
    "choose_experts",
    "logits correction out_slots ids weights counts",
    "| > logits correction out_slots -> ids weights counts",
)

# See ``routing.route``: the second of two kernels.
place_pairs = declared("place_pairs", "ids counts order ends", "| > ids counts -> order ends")

# See ``routing.of_experts``.
own_pairs = declared(
    "own_pairs", "ids order ends own_ids own_order own_ends", "| > ids order ends -> own_ids own_order own_ends"
)


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


# ``quantized_gemm.quantized_linear`` and fenceline_kernel's ``SkinnyGemm``. Only the latter reads anything before
# its wait. ``out`` is the residual if there is one.
quantized_linear = declared(
    "quantized_linear",
    "x data scales zeros norm_weight bias residual out",
    "data scales zeros norm_weight > | x bias residual -> out",
)

# ``skinny_gemm.scaled_linear``. ``out`` is the residual if there is one.
scaled_linear = declared(
    "scaled_linear", "x x_scales weight scales bias residual out", "> | x x_scales weight scales bias residual -> out"
)

# ``int4_gemm.int4_linear``, whose norm is a kernel of its own (``rms_norm`` or ``reorder_columns``). ``out`` is
# the residual if there is one; ``partial`` and ``num_done`` are used if K is split. Before its wait it reads scales
# and zero points, and prefetches the weight into L2.
int4_linear = declared(
    "int4_linear",
    "x data scales zeros bias residual out partial num_done",
    "data scales zeros > | x bias residual num_done -> out partial num_done",
)

# See ``int4_gemm.reorder_columns``.
reorder_columns = declared("reorder_columns", "x norm_weight out", "norm_weight > | x -> out")

# See ``quantized_gemm.dequantize``.
dequantize = declared("dequantize", "data scales zeros out", "data scales zeros -> out")

# See ``quantized_gemm.quantize_rows``.
quantize_rows = declared(
    "quantize_rows", "x scale norm_weight numbers scales", "scale norm_weight > | x -> numbers scales"
)


def _distinct(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A row that holds both keys and values is read once."""
    return (k_cache,) if v_cache is k_cache else (k_cache, v_cache)


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
    for cache in _distinct(k_cache, v_cache):
        op.read_tokens(cache, *requests, but_last=num_queries, window=window, queries=num_nodes)
    op.wait()
    op.read(q)
    op.read(ancestors)
    op.read(sinks)
    for cache in _distinct(k_cache, v_cache):
        op.read_tokens(cache, *requests, window=window, queries=num_nodes)
    op.read(num_done)
    for written in (out, partial, stats, num_done):
        op.write(written)


@declare_kernel
def list_attention(
    op: KernelAccesses,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    slots: torch.Tensor,
    lists: torch.Tensor,
    counts: torch.Tensor,
    partial: torch.Tensor,
    stats: torch.Tensor,
    num_done: torch.Tensor,
) -> None:
    """``decode_attention.decode_attention`` over lists of slots, which the preceding kernel may have written."""
    op.read(q)
    for cache in _distinct(k_cache, v_cache):
        op.read_tokens(cache, slots, lists, counts, 1)
    op.read(num_done)
    for written in (out, partial, stats, num_done):
        op.write(written)


# The second launch of ``decode_attention.decode_attention``, if it merges apart. Of ``out`` it writes the rows of
# requests that several workers share.
merge_pieces = declared("merge_pieces", "partial stats seq_lens out", "seq_lens | > partial stats -> out")


@declare_kernel
def score_keys(
    op: KernelAccesses,
    queries: torch.Tensor,
    weights: torch.Tensor,
    cache_rows: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    keys: torch.Tensor,
    page_size: int,
    ancestors: torch.Tensor | None = None,
) -> None:
    """See ``select_tokens.score_keys``."""
    op.read(queries)
    op.read(weights)
    op.read(ancestors)
    op.read_tokens(cache_rows, page_table, rows, seq_lens, page_size)
    op.write(keys)


# See ``select_tokens.select_best``.
select_best = declared(
    "select_best",
    "keys page_table rows seq_lens ancestors slots counts",
    "keys page_table[rows] seq_lens ancestors -> slots counts",
)


@declare_kernel
def score_blocks(
    op: KernelAccesses,
    queries: torch.Tensor,
    means: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    partial: torch.Tensor,
    keys: torch.Tensor,
    page_size: int,
) -> None:
    """The two launches of ``select_blocks.score_blocks``, of which the second reads what the first has left."""
    op.read(queries)
    op.read_tokens(means, page_table, rows, seq_lens, page_size)
    op.write(partial)
    op.write(keys)


# See ``select_blocks.choose_blocks``.
choose_blocks = declared(
    "choose_blocks",
    "keys page_table rows seq_lens chosen lists counts",
    "keys page_table[rows] seq_lens -> chosen lists counts",
)


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
    """The first launch of ``extend_attention.extend_attention``. With splits ``out`` is partial, with ``stats``."""
    op.read(query_starts)
    op.read(q)
    op.read(sinks)
    for cache in _distinct(k_cache, v_cache):
        op.read_tokens(cache, page_table, rows, seq_lens, page_size, window=window, queries=query_starts)
    op.write(out)
    op.write(stats)


# The second launch of ``extend_attention.extend_attention``.
merge_splits = declared("merge_splits", "partial stats out", "partial stats -> out")


def _gather_page_indices(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_lens: torch.Tensor,
    page_size: int,
    max_pages: int,
) -> None:
    num_pages = (-(-seq_lens // page_size)).clamp(0, max_pages)
    starts = [0, *accumulate(num_pages.tolist())]
    for row, start, stop in zip(rows.tolist(), starts, starts[1:], strict=False):
        indices[start:stop] = page_table[row, : stop - start]
    indptr.copy_(torch.tensor(starts, dtype=torch.int32))
    last_page_lens.copy_(seq_lens - (num_pages - 1) * page_size)


# See ``page_gather.gather_page_indices``.
gather_page_indices = declared(
    "gather_page_indices", _gather_page_indices, "page_table[rows] seq_lens -> indptr indices last_page_lens"
)

# See ``page_gather.gather_page_rows``.
gather_page_rows = declared(
    "gather_page_rows", "page_table rows seq_lens out seq_lens_32", "page_table[rows] seq_lens -> out seq_lens_32"
)
