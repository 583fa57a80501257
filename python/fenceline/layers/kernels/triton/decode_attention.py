"""Attention of a few query tokens per request over paged keys and values, in Triton: one launch, whatever the lengths.

Decode has one query for each request. A verify step has several, the tokens of a draft, which form a chain or a tree;
each attends to its own ancestors.

The time is mostly that of reading K and V once, so the kernel spreads these reads evenly over the GPU. Every request is
cut into blocks of ``block_n`` tokens. All blocks of the batch, one request after the other, form one sequence, and each
of the workers that share a KV head takes an equally long section of it. A worker finds its section from ``seq_lens`` in
device memory. So the grid never changes, a captured graph stays balanced when lengths change, and nothing is planned on
the host.

If a request lies within one section, its worker computes the result. Otherwise each worker writes a partial result for
its piece of the request to the workspace. The worker that ends last, which an atomic counter shows, merges them in the
order of the pieces, so results do not depend on timing. No worker waits for another.
With ``DecodeConfig.merge_apart`` a second launch merges them, with many programs for each request: the sums over
latents are so long that one worker would take longer to merge them than all have taken to compute them.

With ``launch_pdl`` a worker starts while the preceding kernel still runs, finds its section and prefetches the first
keys and values of it into L2. It reads q and everything else after the wait. See ``decode_attention`` for what the
preceding kernel must and must not do.

The rows of a worker's matrix products are the query heads that share its KV head, for all queries of a request. If
there are more than ``_MAX_ROWS`` rows, they are cut into tiles with workers of their own. These read the same keys and
values, mostly from L2.

Sparse attention reads the tokens of lists, each as a request with one query and pages of one token: see
``TritonAttentionBackend.attend_to``.

If one row holds a token's key and value (a latent), its value is the key's first features. They are read once for both
products; the key's other features, its tail, are a product of their own.

With a window, the blocks of a request begin at the first token to which one of its queries may attend. A sink is one
more score; the piece that has a request's first block begins with it.

With segments (``DecodeConfig.segment``) the bits of a result depend on the keys and values of its own tokens alone.
Requests are cut at multiples of ``segment`` tokens from their first token on. Each segment has a softmax of its own,
and these are merged in order, after the sink: in registers if one worker has the whole request, otherwise by the worker
that ends last. ``extend_attention`` does the same for the same segments. What a query does not see has no weight in
either, exactly, so it makes no difference which other queries are beside it. A query of a tree is a request of its
own then: its keys are read in the order of positions, which behind the prefix is that of its ancestors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from fenceline.layers.attention.base import PLAIN, LayerRules
from fenceline.layers.forward_batch import QueryTree

MIN_ROWS = 16  # of a matrix product
_MAX_ROWS = 64  # the sums of this many rows fit in a worker's registers
# A merge apart: up to how many requests rows are merged one by one, and in chunks of features, and how many elements of
# partial results a program has in registers at once.
_MERGED_ROW_BY_ROW, _MERGED_IN_CHUNKS, _MERGED_CHUNK, _MERGED_ELEMENTS = 64, 8, 128, 8192
_LOG2_E = 1.4426950408889634
_SECTOR_BYTES = tl.constexpr(32)  # the smallest unit that a cache fetches
_NO_SCORE = tl.constexpr(-1.0e30)  # below every score, and finite so that differences are not NaN
_LOG2_E_IN_KERNEL = tl.constexpr(_LOG2_E)
_ONE_QUERY = QueryTree(1, 1)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How a batch is divided: blocks of ``block_n`` tokens (a power of two >= 16), ``num_workers`` for each KV head.

    ``launch_pdl``: overlap the launch with the end of the preceding kernel (sm_90 and later), and meanwhile fetch the
    first ``num_prefetched`` blocks of each worker into L2. ``max_registers``: how many registers a thread may use; with
    fewer, more workers run on a multiprocessor at once. ``merge_elements`` (a power of two): how many elements of
    partial results each warp holds in registers at once while it merges. ``min_blocks``: a worker that has anything to
    do has at least so many blocks, because pieces take time to merge. ``merge_apart``: a second launch does that, which
    is not possible with segments. ``segment``: the tokens of a
    segment, a multiple of ``block_n``; 0: there are none, and workers' sections are cut anywhere.
    """

    block_n: int
    num_workers: int
    num_warps: int
    num_stages: int
    launch_pdl: bool = False
    max_registers: int | None = None
    num_prefetched: int = 2
    merge_elements: int = 2048
    min_blocks: int = 1
    merge_apart: bool = False
    segment: int = 0


class DecodeWorkspace:
    """Memory for the partial results of up to ``max_workers`` workers for each KV head and tile. Every launch uses the
    same memory. ``head_dim`` is that of values. ``tiles``: how the query rows are cut, see :func:`query_tiles`.
    ``segments`` of a request and ``rows`` (a power of two) of a tile at most have partial results, with
    ``DecodeConfig.segment``; 0: without it. Launches that share a workspace must be on one stream. Only requests that
    several workers share use it, and only within a launch."""

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        max_workers: int,
        device: torch.device,
        tiles: tuple[int, int] = (1, MIN_ROWS),
        segments: int = 0,
        rows: int = 0,
    ) -> None:
        assert max_workers >= 1
        self.max_workers, self.segments = max_workers, segments
        self.shape = num_kv_heads, head_dim, tiles
        num_tiles, rows = tiles[0], rows or tiles[1]
        self.rows = rows
        # In a worker's section at most the first and the last request are incomplete. One request at most begins in a
        # worker's section and ends behind it.
        pieces = num_tiles * num_kv_heads * max_workers * (segments or 2)
        self.partial = torch.empty(pieces * rows * head_dim, dtype=torch.float32, device=device)
        self.stats = torch.empty(pieces * 2 * rows, dtype=torch.float32, device=device)
        # How many pieces of a request are done, at the index of the worker that has the first piece. Zero between
        # launches.
        self.num_done = torch.zeros(num_tiles * num_kv_heads * max_workers, dtype=torch.int32, device=device)


def query_tiles(num_rows: int, fixed: bool = False) -> tuple[int, int]:
    """How the ``num_rows`` = queries x group of a request and KV head are cut: (number of tiles, rows of each).
    ``fixed``: tiles have as many rows for few as for many."""
    rows = _MAX_ROWS if fixed else min(max(triton.next_power_of_2(num_rows), MIN_ROWS), _MAX_ROWS)
    return -(-num_rows // rows), rows


@dataclass(frozen=True, slots=True)
class PagedRequests:
    """Where the tokens of B requests are. The tensors are read on the device when a launch runs. Token p of request b
    is slot ``page_table[rows[b], p // page_size] * page_size + p % page_size``; columns past its pages are not read."""

    page_table: torch.Tensor  # [num_rows, max_pages] int32, rows may be strided
    rows: torch.Tensor  # [B] int64
    seq_lens: torch.Tensor  # [B] int64, >= 1
    page_size: int  # a power of two


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    requests: PagedRequests,
    scale: float,
    workspace: DecodeWorkspace,
    config: DecodeConfig,
    tree: QueryTree = _ONE_QUERY,
    rules: LayerRules = PLAIN,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale * q k^T) v for each request's last tokens → contiguous [B * num_queries, H, D] in q's dtype, in
    ``out`` if given. ``rules``: see ``LayerRules``; sinks are contiguous.

    q [B * num_queries, H, D], one request after the other, its heads contiguous, tokens possibly strided; k_cache,
    v_cache [num_slots, Hkv, D], contiguous, in q's dtype or FP8; one tensor if ``rules.shared``. ``tree`` says
    to which tokens each query attends; the keys and values of all of them must be finite. Softmax statistics and sums
    are float32. A query that attends to no token (in a request shorter than its queries) gets finite numbers. One
    launch on the current stream, which a graph may capture; no host synchronisation.

    With ``config.launch_pdl``, ``requests``, the masks of ``tree`` and the slots of all tokens except each request's
    queries may be read before the preceding kernel has ended. So of this function's inputs, that kernel may write only
    q and the queries' slots. If it lets its dependents start early, it must do so after its own wait, so that all
    kernels before it have ended. ``rotate_and_store`` is such a kernel, and so is every kernel that does not use
    dependent launches.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[1]
    group = num_heads // num_kv_heads
    batch, num_queries, num_nodes = len(requests.rows), tree.num_queries, tree.num_nodes
    assert q.shape[0] == batch * num_queries, (q.shape, batch, num_queries)
    assert q.stride(2) == 1 and q.stride(1) == head_dim, q.stride()
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.shape[2] == head_dim
    assert k_cache.dtype == v_cache.dtype and k_cache.dtype in (q.dtype, torch.float8_e4m3fn)
    assert requests.rows.shape == requests.seq_lens.shape == (batch,)
    assert group * num_kv_heads == num_heads
    assert 1 <= config.num_workers <= workspace.max_workers, (config, workspace.max_workers)
    paths = num_queries if config.segment and tree.ancestors is not None else 0
    if paths:
        num_queries = 1
    num_tiles, rows = tiles = query_tiles(num_queries * group, config.segment > 0)
    value_dim, tail = split_row(head_dim, v_cache, k_cache, rules)
    assert workspace.shape == (num_kv_heads, value_dim, tiles), (workspace.shape, k_cache.shape, tiles)
    assert requests.page_table.dtype == torch.int32 and requests.page_table.stride(1) == 1
    assert requests.rows.dtype == requests.seq_lens.dtype == torch.int64
    assert requests.rows.is_contiguous() and requests.seq_lens.is_contiguous()
    tree.check(batch)
    window, sinks = rules.window or 0, rules.sinks
    assert tree.ancestors is None or not window or window >= tree.num_nodes, (window, tree.num_nodes)
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.shape == (num_heads,))
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
    dim_pad = padded_head_dim(value_dim)
    merged_rows = min(triton.next_power_of_2(num_queries * group), rows)
    if paths:
        batch, num_nodes = batch * paths, 1
    if config.segment:
        assert config.segment % config.block_n == 0 and not config.merge_apart
        assert workspace.segments and workspace.rows == merged_rows, (workspace.segments, workspace.rows)
    merge_elements = config.merge_elements * config.num_warps
    part = max(min(merged_rows, merge_elements // dim_pad), 1)
    _decode_kernel[(num_tiles * num_kv_heads, config.num_workers)](
        q, k_cache, v_cache, out, requests.page_table, requests.rows, requests.seq_lens, tree.ancestors,
        sinks, workspace.partial, workspace.stats, workspace.num_done,
        batch, scale * _LOG2_E, rules.soft_cap * _LOG2_E, q.stride(0), requests.page_table.stride(0),
        NUM_WORKERS=config.num_workers, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=value_dim, DIM_PAD=dim_pad, TAIL=tail,
        TAIL_PAD=padded_head_dim(tail), SHARED=rules.shared, GROUP=group,
        NUM_QUERIES=num_queries, NUM_NODES=num_nodes, TREE=tree.ancestors is not None and not paths, ROWS=rows,
        PATHS=paths, PATH_NODES=tree.num_nodes if paths else 0, WINDOW=window, CAPS=rules.soft_cap != 0,
        SINKS=sinks is not None,
        MERGED_ROWS=merged_rows, PAGE_SIZE=requests.page_size, BATCH_PAD=padded_batch(batch), BLOCK_N=config.block_n,
        MIN_BLOCKS=config.min_blocks, SEGMENT=config.segment, MAX_SEGMENTS=workspace.segments,
        APART=config.merge_apart, PART=part, MERGE=max(merge_elements // (part * dim_pad), 1),
        PDL=config.launch_pdl, NUM_PREFETCHED=config.num_prefetched if config.launch_pdl else 0,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=config.launch_pdl,
        maxnreg=config.max_registers,
    )  # fmt: skip
    if config.merge_apart:
        _merge_pieces(out, requests.seq_lens, workspace, config, num_kv_heads, tree, rules)
    return out


def _merge_pieces(
    out: torch.Tensor,
    seq_lens: torch.Tensor,
    workspace: DecodeWorkspace,
    config: DecodeConfig,
    num_kv_heads: int,
    tree: QueryTree,
    rules: LayerRules,
) -> None:
    """Merge the pieces of ``decode_attention``'s launch into ``out``. A program has some rows of a request's tile, and
    of a few requests some features only. With ``config.launch_pdl`` it reads ``seq_lens`` before its wait."""
    batch, num_heads, width = len(seq_lens), *out.shape[1:]
    _, head_dim, (num_tiles, rows) = workspace.shape
    dim_pad = padded_head_dim(head_dim)
    part = 1 if batch <= _MERGED_ROW_BY_ROW else 4
    chunk = min(dim_pad, _MERGED_CHUNK) if batch <= _MERGED_IN_CHUNKS else dim_pad
    grid = (batch, num_tiles * num_kv_heads * (rows // part), dim_pad // chunk)
    _merge_pieces_kernel[grid](
        workspace.partial, workspace.stats, seq_lens, out, batch,
        NUM_WORKERS=config.num_workers, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, DIM_PAD=dim_pad,
        TAIL=width - head_dim, GROUP=num_heads // num_kv_heads, NUM_QUERIES=tree.num_queries, NUM_NODES=tree.num_nodes,
        WINDOW=rules.window or 0, ROWS=rows, PART=part, CHUNK=chunk, MERGE=max(_MERGED_ELEMENTS // (part * chunk), 1),
        BATCH_PAD=padded_batch(batch), BLOCK_N=config.block_n, MIN_BLOCKS=config.min_blocks, PDL=config.launch_pdl,
        num_warps=4, launch_pdl=config.launch_pdl,
    )  # fmt: skip


def padded_head_dim(head_dim: int) -> int:
    """``head_dim`` rounded up to what matrix products take. Features past a head's end are zeros in registers."""
    return max(triton.next_power_of_2(head_dim), 16)


def split_row(head_dim: int, v_cache: torch.Tensor, k_cache: torch.Tensor, rules: LayerRules) -> tuple[int, int]:
    """Of how many features a value consists, and how many a key has more, behind these."""
    value_dim = rules.value_dim or head_dim if rules.shared else v_cache.shape[2]
    assert value_dim <= head_dim, "no value is wider than a key"
    assert not rules.shared or v_cache.data_ptr() == k_cache.data_ptr(), "one row, one tensor"
    return value_dim, head_dim - value_dim


def padded_batch(batch: int) -> int:
    """``batch`` rounded up: the number of lengths that a worker reads. Each value compiles a kernel."""
    return next((size for size in (1, 64, 256) if batch <= size), 0) or triton.next_power_of_2(batch)


@triton.jit(do_not_specialize=["batch"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, page_table_ptr, rows_ptr, seq_lens_ptr, ancestors_ptr, sinks_ptr, partial_ptr,
    stats_ptr, num_done_ptr, batch, scale_log2, cap_log2, q_stride, page_table_stride,
    NUM_WORKERS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    TAIL: tl.constexpr, TAIL_PAD: tl.constexpr, SHARED: tl.constexpr, GROUP: tl.constexpr,
    NUM_QUERIES: tl.constexpr, NUM_NODES: tl.constexpr, TREE: tl.constexpr, ROWS: tl.constexpr,
    PATHS: tl.constexpr, PATH_NODES: tl.constexpr, WINDOW: tl.constexpr, CAPS: tl.constexpr, SINKS: tl.constexpr,
    MERGED_ROWS: tl.constexpr, PAGE_SIZE: tl.constexpr, BATCH_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
    MIN_BLOCKS: tl.constexpr, SEGMENT: tl.constexpr, MAX_SEGMENTS: tl.constexpr, APART: tl.constexpr,
    PART: tl.constexpr, MERGE: tl.constexpr, PDL: tl.constexpr, NUM_PREFETCHED: tl.constexpr,
):  # fmt: skip
    # Adjacent programs read the heads of the same tokens, which are adjacent in memory.
    lane, worker = tl.program_id(0), tl.program_id(1)
    if NUM_QUERIES * GROUP <= ROWS:  # one tile
        head, first_row = lane, 0
    else:
        head, first_row = lane % NUM_KV_HEADS, lane // NUM_KV_HEADS * ROWS
    UNIT: tl.constexpr = SEGMENT if SEGMENT > 0 else BLOCK_N  # what a worker's section is a multiple of
    WIDTH: tl.constexpr = HEAD_DIM + TAIL  # of a head's query, key and place in the result
    if PDL:
        tl_cuda.gdc_launch_dependents()
    # Before the wait the kernel may write nothing, and may not read what the preceding kernel writes.
    if BATCH_PAD == 1:  # no search is needed, which lowers the latency of a single request
        request, request_first = 0, 0
        seq_len, table_row, path = _request(seq_lens_ptr, rows_ptr, ancestors_ptr, request, PATHS, PATH_NODES)
        total = _num_units(seq_len, NUM_NODES, WINDOW, UNIT)
        stretch = _stretch(total, NUM_WORKERS, MIN_BLOCKS)
        unit = worker * stretch
    else:
        ids = tl.arange(0, BATCH_PAD)
        if PATHS > 0:
            known = tl.minimum(ids, batch - 1)
            seq_lens, _, _ = _request(seq_lens_ptr, rows_ptr, ancestors_ptr, known, PATHS, PATH_NODES)
            seq_lens = tl.where(ids < batch, seq_lens, 0)
        else:
            seq_lens = tl.load(seq_lens_ptr + ids, mask=ids < batch, other=0).to(tl.int32)
        num_blocks = _num_units(seq_lens, NUM_NODES, WINDOW, UNIT)
        total = tl.sum(num_blocks, 0)
        stretch = _stretch(total, NUM_WORKERS, MIN_BLOCKS)
        unit = worker * stretch
        ends = tl.cumsum(num_blocks, 0)
        request = tl.minimum(tl.sum((ends <= unit).to(tl.int32), 0), batch - 1)
        request_first = tl.max(tl.where(ends <= unit, ends, 0), 0)
        seq_len, table_row, path = _request(seq_lens_ptr, rows_ptr, ancestors_ptr, request, PATHS, PATH_NODES)
    last_unit = tl.minimum(unit + stretch, total)
    k_head = k_ptr + head * WIDTH
    v_head = k_head if SHARED else v_ptr + head * HEAD_DIM
    if NUM_PREFETCHED > 0:
        first_block, end_block = _blocks(unit, last_unit, request_first, seq_len, NUM_NODES, WINDOW, UNIT, BLOCK_N)
        _prefetch(
            k_head, v_head, page_table_ptr + table_row * page_table_stride, first_block, end_block, seq_len,
            NUM_KV_HEADS, HEAD_DIM, DIM_PAD, TAIL, TAIL_PAD, SHARED, NUM_QUERIES, PAGE_SIZE, BLOCK_N, NUM_PREFETCHED,
        )  # fmt: skip
    if PDL:
        tl_cuda.gdc_wait()
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PAD)
    queries = (first_row + rows) // GROUP
    query_live = queries < NUM_QUERIES
    row_live = in_heads(query_live[:, None], dims, HEAD_DIM, DIM_PAD)
    q_rows = _row_offsets(first_row + rows, head, q_stride, GROUP, WIDTH, NUM_QUERIES)[:, None]
    q_offsets = q_rows + dims[None, :]
    out_stride: tl.constexpr = NUM_KV_HEADS * GROUP * WIDTH
    out_offsets = _row_offsets(first_row + rows, head, out_stride, GROUP, WIDTH, NUM_QUERIES)[:, None] + dims[None, :]
    ancestors = tl.zeros([ROWS], tl.int64)
    sinks = tl.full([ROWS], _NO_SCORE, tl.float32)
    if SINKS:
        heads = head * GROUP + (first_row + rows) % GROUP
        sinks = tl.load(sinks_ptr + heads, mask=query_live, other=0.0) * _LOG2_E_IN_KERNEL
    while unit < last_unit:
        request_end = request_first + _num_units(seq_len, NUM_NODES, WINDOW, UNIT)
        stop = tl.minimum(last_unit, request_end)
        next_request = tl.minimum(request + 1, batch - 1)
        next_seq_len, next_table_row, next_path = _request(
            seq_lens_ptr, rows_ptr, ancestors_ptr, next_request, PATHS, PATH_NODES
        )
        first_query = tl.cast(request, tl.int64) * NUM_QUERIES
        q = operand(tl.load(q_ptr + first_query * q_stride + q_offsets, mask=row_live, other=0.0), k_ptr, SHARED)
        q_tail = q
        if TAIL > 0:
            in_tail = tl.arange(0, TAIL_PAD)
            q_tail = tl.load(
                q_ptr + first_query * q_stride + q_rows + (HEAD_DIM + in_tail)[None, :],
                mask=in_heads(query_live[:, None], in_tail, TAIL, TAIL_PAD), other=0.0,
            )  # fmt: skip
            q_tail = operand(q_tail, k_ptr, SHARED)
        if TREE:
            ancestors = tl.load(ancestors_ptr + first_query + queries, mask=query_live, other=0)
        top = tl.full([ROWS], _NO_SCORE, tl.float32)
        norm = tl.zeros([ROWS], tl.float32)
        if SINKS:
            begins = unit == request_first
            top, norm = tl.where(begins, sinks, top), norm + tl.where(begins, 1.0, 0.0)
        at = rows[:, None] * HEAD_DIM + dims[None, :]
        table = page_table_ptr + table_row * page_table_stride
        if SEGMENT > 0:
            acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
            is_piece = (unit != request_first) | (stop != request_end)
            kept = row_live & (rows < MERGED_ROWS)[:, None] & is_piece
            for segment in tl.range(unit, stop):
                first_block, end_block = _blocks(
                    segment, segment + 1, request_first, seq_len, NUM_NODES, WINDOW, UNIT, BLOCK_N
                )  # fmt: skip
                part, part_top, part_norm = _attend(
                    q, q_tail, queries, ancestors, tl.full([ROWS], _NO_SCORE, tl.float32), tl.zeros([ROWS], tl.float32),
                    k_head, v_head, table, first_block, end_block, seq_len, path, scale_log2, cap_log2,
                    NUM_KV_HEADS, HEAD_DIM, DIM_PAD, TAIL, TAIL_PAD, SHARED, NUM_QUERIES, NUM_NODES, TREE, PATH_NODES,
                    ROWS, WINDOW, CAPS, PAGE_SIZE, BLOCK_N,
                )  # fmt: skip
                piece = _segment_piece(
                    lane, request_first // stretch, segment - request_first, NUM_WORKERS, MAX_SEGMENTS
                )
                tl.store(partial_ptr + piece * (MERGED_ROWS * HEAD_DIM) + at, part, mask=kept)
                stats_at = stats_ptr + piece * (2 * MERGED_ROWS) + rows
                tl.store(stats_at, part_top, mask=(rows < MERGED_ROWS) & is_piece)
                tl.store(stats_at + MERGED_ROWS, part_norm, mask=(rows < MERGED_ROWS) & is_piece)
                acc, top, norm = merged(acc, top, norm, part, part_top, part_norm)
        else:
            first_block, end_block = _blocks(unit, stop, request_first, seq_len, NUM_NODES, WINDOW, UNIT, BLOCK_N)
            acc, top, norm = _attend(
                q, q_tail, queries, ancestors, top, norm, k_head, v_head, table, first_block, end_block, seq_len, path,
                scale_log2, cap_log2,
                NUM_KV_HEADS, HEAD_DIM, DIM_PAD, TAIL, TAIL_PAD, SHARED, NUM_QUERIES, NUM_NODES, TREE, 0,
                ROWS, WINDOW, CAPS, PAGE_SIZE, BLOCK_N,
            )  # fmt: skip
        out_row = out_ptr + first_query * out_stride
        if (unit == request_first) & (stop == request_end):
            tl.store(out_row + out_offsets, (acc / norm[:, None]).to(out_ptr.dtype.element_ty), mask=row_live)
        else:
            if SEGMENT == 0:
                piece = _piece(lane, worker, unit == request_first, NUM_WORKERS)
                tl.store(partial_ptr + piece * (ROWS * HEAD_DIM) + at, acc, mask=row_live)
                tl.store(stats_ptr + piece * (2 * ROWS) + rows, top)
                tl.store(stats_ptr + piece * (2 * ROWS) + ROWS + rows, norm)
            if not APART:
                first_worker = request_first // stretch
                last_worker = (request_end - 1) // stretch
                counter = num_done_ptr + lane * NUM_WORKERS + first_worker
                # All threads' stores come before the one thread's release, and its acquire before all threads' loads.
                tl.debug_barrier()
                num_before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                tl.debug_barrier()
                if num_before == last_worker - first_worker:
                    tl.store(counter, 0)
                    if SEGMENT > 0:
                        _merge_segments(
                            out_row, partial_ptr, stats_ptr, sinks_ptr, lane, first_row, first_worker,
                            request_end - request_first, NUM_WORKERS, MAX_SEGMENTS, NUM_KV_HEADS, HEAD_DIM, DIM_PAD,
                            TAIL, GROUP, NUM_QUERIES, MERGED_ROWS, SINKS,
                        )  # fmt: skip
                    else:
                        for begin in tl.range(0, MERGED_ROWS, PART, num_stages=1):
                            _merge(
                                out_row, partial_ptr, stats_ptr, lane, first_row, begin, 0, first_worker, last_worker,
                                NUM_WORKERS, NUM_KV_HEADS, HEAD_DIM, DIM_PAD, TAIL, GROUP, NUM_QUERIES, ROWS, PART,
                                DIM_PAD, MERGE,
                            )  # fmt: skip
        unit = stop
        request, request_first = next_request, request_end
        seq_len, table_row, path = next_seq_len, next_table_row, next_path


@triton.jit
def _request(
    seq_lens_ptr, rows_ptr, ancestors_ptr, request, PATHS: tl.constexpr, PATH_NODES: tl.constexpr
):  # fmt: skip
    """A request's length and row of the page table. With PATHS each query of a tree is one, of the length that it would
    have without the tree's other branches, and its path is the bits of its ancestors and itself."""
    if PATHS > 0:
        own = (PATH_NODES - PATHS + request % PATHS).to(tl.int64)
        path = tl.load(ancestors_ptr + request) | (tl.full([], 1, tl.int64) << own)
        if PATH_NODES < 64:
            path = path & ((1 << PATH_NODES) - 1)
        seq_len = tl.load(seq_lens_ptr + request // PATHS).to(tl.int32)
        seq_len = tl.maximum(seq_len - PATH_NODES + _count_path(path), 1)  # a padded request is shorter than its tree
        table_row = tl.load(rows_ptr + request // PATHS)
    else:
        path = tl.full([], 0, tl.int64)
        seq_len = tl.load(seq_lens_ptr + request).to(tl.int32)
        table_row = tl.load(rows_ptr + request)
    return seq_len, table_row, path


@triton.jit
def _count_path(path):
    """How many bits of ``path`` are set, int32."""
    return (_count_bits(path & 0xFFFFFFFF) + _count_bits((path >> 32) & 0xFFFFFFFF)).to(tl.int32)


@triton.jit
def _first_visible(seq_len, NUM_NODES: tl.constexpr, WINDOW: tl.constexpr):
    """The first token to which a query of a request may attend."""
    if WINDOW > 0:
        first = tl.maximum(seq_len - (NUM_NODES + WINDOW - 1), 0)
    else:
        first = seq_len * 0
    return first


@triton.jit
def _num_units(seq_len, NUM_NODES: tl.constexpr, WINDOW: tl.constexpr, UNIT: tl.constexpr):
    """How many blocks or segments of a request are read."""
    last = (seq_len + UNIT - 1) // UNIT
    return last - _first_visible(seq_len, NUM_NODES, WINDOW) // UNIT


@triton.jit
def _stretch(total, NUM_WORKERS: tl.constexpr, MIN_BLOCKS: tl.constexpr):
    """How many of the batch's ``total`` units each worker has."""
    stretch = (total + NUM_WORKERS - 1) // NUM_WORKERS
    if MIN_BLOCKS > 1:
        stretch = tl.maximum(stretch, MIN_BLOCKS)
    return stretch


@triton.jit
def _blocks(
    unit, stop, request_first, seq_len, NUM_NODES: tl.constexpr, WINDOW: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The first block and the end of those that units of a request consist of; its first unit is ``request_first``."""
    first = _first_visible(seq_len, NUM_NODES, WINDOW)
    begin = (first // UNIT + unit - request_first) * (UNIT // BLOCK_N)
    end = (first // UNIT + stop - request_first) * (UNIT // BLOCK_N)
    if UNIT > BLOCK_N:
        begin = tl.maximum(begin, first // BLOCK_N)
        end = tl.minimum(end, (seq_len + BLOCK_N - 1) // BLOCK_N)
    return begin, end


@triton.jit
def _row_offsets(rows, head, token_stride, GROUP: tl.constexpr, WIDTH: tl.constexpr, NUM_QUERIES: tl.constexpr):
    """Where rows begin, relative to a request's first query. Row r is query r // GROUP, and head r % GROUP of those
    that share KV head ``head``."""
    if NUM_QUERIES == 1:  # rows past the group are not live
        offsets = (head * GROUP + rows) * WIDTH
    else:
        offsets = rows // GROUP * token_stride + (head * GROUP + rows % GROUP) * WIDTH
    return offsets


@triton.jit
def _prefetch(
    k_ptr, v_ptr, table_ptr, first_block, last_block, seq_len, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, TAIL: tl.constexpr, TAIL_PAD: tl.constexpr, SHARED: tl.constexpr,
    NUM_QUERIES: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Prefetch the first ``NUM_BLOCKS`` of a range of a request's blocks into L2, except the tokens of its queries. All
    multiprocessors share L2, so data that is written after the prefetch is read correctly."""
    SECTOR: tl.constexpr = _SECTOR_BYTES * 8 // k_ptr.dtype.element_ty.primitive_bitwidth
    sectors = tl.arange(0, DIM_PAD // SECTOR if DIM_PAD > SECTOR else 1) * SECTOR
    in_tail = tl.arange(0, TAIL_PAD // SECTOR if TAIL_PAD > SECTOR else 1) * SECTOR
    for ahead in tl.static_range(NUM_BLOCKS):
        positions = (first_block + ahead) * BLOCK_N + tl.arange(0, BLOCK_N)
        live = (positions < seq_len - NUM_QUERIES) & (first_block + ahead < last_block)
        pages = tl.load(table_ptr + positions // PAGE_SIZE, mask=live, other=0)
        slots = pages.to(tl.int64) * PAGE_SIZE + positions % PAGE_SIZE
        wanted = in_heads(live[:, None], sectors, HEAD_DIM, DIM_PAD)
        keys = k_ptr + slots[:, None] * (NUM_KV_HEADS * (HEAD_DIM + TAIL))
        _prefetch_sectors(keys + sectors[None, :], wanted)
        if TAIL > 0:
            in_row = in_heads(live[:, None], in_tail, TAIL, TAIL_PAD)
            _prefetch_sectors(keys + (HEAD_DIM + in_tail)[None, :], in_row)
        if not SHARED:
            _prefetch_sectors(v_ptr + slots[:, None] * (NUM_KV_HEADS * HEAD_DIM) + sectors[None, :], wanted)


@triton.jit
def _prefetch_sectors(pointers, live):
    tl.inline_asm_elementwise(
        "{ .reg .pred live; setp.ne.s32 live, $2, 0; @live prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r", [pointers.to(tl.int64), live.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _attend(
    q, q_tail, queries, ancestors, top, norm, k_ptr, v_ptr, table_ptr, first_block, last_block, seq_len, path,
    scale_log2, cap_log2,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, TAIL: tl.constexpr,
    TAIL_PAD: tl.constexpr, SHARED: tl.constexpr, NUM_QUERIES: tl.constexpr,
    NUM_NODES: tl.constexpr, TREE: tl.constexpr, PATH_NODES: tl.constexpr, ROWS: tl.constexpr,
    WINDOW: tl.constexpr, CAPS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention of q [ROWS, DIM_PAD], with the tail [ROWS, TAIL_PAD] if there is one, over some blocks of a request →
    sums [ROWS, DIM_PAD], largest scores [ROWS] and norms [ROWS]. The latter two start with the values of ``top`` and
    ``norm``. Row r is query ``queries[r]`` with the mask ``ancestors[r]``, both [ROWS]. A row that attends to no token
    in these blocks keeps ``_NO_SCORE`` as its largest score, and so has no weight in a merge."""
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    if WINDOW > 0:
        if TREE:
            own_bit = tl.full([ROWS], 1, tl.int64) << (NUM_NODES - NUM_QUERIES + queries).to(tl.int64)
            above = ancestors & ~own_bit
            if NUM_NODES < 64:
                above = above & ((1 << NUM_NODES) - 1)
            depths = _count_path(above)
        else:
            depths = NUM_NODES - NUM_QUERIES + queries
    if SHARED:  # see ``token_slots``
        slots, live = _slots_of(
            table_ptr, first_block, seq_len, path, NUM_NODES, PATH_NODES, WINDOW, PAGE_SIZE, BLOCK_N
        )  # fmt: skip
    for block in tl.range(first_block, last_block):
        positions = block * BLOCK_N + tl.arange(0, BLOCK_N)
        following = tl.minimum(block + 1, last_block - 1) if SHARED else block
        next_slots, next_live = _slots_of(
            table_ptr, following, seq_len, path, NUM_NODES, PATH_NODES, WINDOW, PAGE_SIZE, BLOCK_N
        )  # fmt: skip
        if not SHARED:
            slots, live = next_slots, next_live
        scores, v = scores_and_values(
            q, q_tail, k_ptr, v_ptr, slots, live, NUM_KV_HEADS, HEAD_DIM, DIM_PAD, TAIL, TAIL_PAD, SHARED, True
        )
        scores *= scale_log2
        if CAPS:
            scores = soft_capped(scores, cap_log2)
        if NUM_NODES == 1:
            visible = live[None, :]
        else:
            nodes = positions - (seq_len - NUM_NODES)
            own = NUM_NODES - NUM_QUERIES + queries
            if TREE:
                bits = ancestors[:, None] >> tl.minimum(tl.maximum(nodes, 0), 63).to(tl.int64)[None, :]
                known = (nodes < 0)[None, :] | (nodes[None, :] == own[:, None]) | ((bits & 1) != 0)
                visible = known & live[None, :]
            else:
                visible = nodes[None, :] <= own[:, None]
            if WINDOW > 0:
                # A tree has at most as many nodes as the window has tokens, so a node's ancestors are always in it.
                near = nodes[None, :] > depths[:, None] - WINDOW
                visible = visible & (near | (nodes >= 0)[None, :]) if TREE else visible & near
                visible = visible & live[None, :]
        scores = tl.where(visible, scores, _NO_SCORE)
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        decay = tl.exp2(top - new_top)
        norm = norm * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        top = new_top
        if SHARED:
            slots, live = next_slots, next_live
    return acc, top, norm


@triton.jit
def _slots_of(
    table_ptr, block, seq_len, path, NUM_NODES: tl.constexpr, PATH_NODES: tl.constexpr, WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The slots of a block and which of its positions are visible to any row."""
    positions = block * BLOCK_N + tl.arange(0, BLOCK_N)
    live = positions < seq_len
    if WINDOW > 0:
        live = live & (positions >= _first_visible(seq_len, NUM_NODES, WINDOW))
    if PATH_NODES > 0:
        prefix = seq_len - _count_path(path)
        places = positions
        for node in tl.static_range(PATH_NODES):
            depth = _count_path(path & ((1 << node) - 1))
            is_there = (((path >> node) & 1) != 0) & (positions == prefix + depth)
            places = tl.where(is_there, prefix + node, places)
        pages = tl.load(table_ptr + places // PAGE_SIZE, mask=live, other=0)
        slots = pages.to(tl.int64) * PAGE_SIZE + places % PAGE_SIZE
    else:
        slots = token_slots(table_ptr, block, positions, live, PAGE_SIZE, BLOCK_N, True)
    return slots, live


@triton.jit
def scores_and_values(
    q, q_tail, k_ptr, v_ptr, slots, live, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    TAIL: tl.constexpr, TAIL_PAD: tl.constexpr, SHARED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The products of q [ROWS, DIM_PAD] and its tail with the keys in ``slots`` [N], float32 [ROWS, N], and the values
    there [N, DIM_PAD]. Without MASKED all of them are ``live``."""
    STRIDE: tl.constexpr = NUM_KV_HEADS * (HEAD_DIM + TAIL)
    k = _rows_at(k_ptr, slots, live, STRIDE, 0, HEAD_DIM, DIM_PAD, MASKED)
    if SHARED:
        k = converted(k, q)
        v = k
    else:
        k = k.to(q.dtype)
        v = _rows_at(v_ptr, slots, live, NUM_KV_HEADS * HEAD_DIM, 0, HEAD_DIM, DIM_PAD, MASKED).to(q.dtype)
    if TAIL > 0:
        # First: its barrier between the writes of converted keys and their reads is that of all keys then. Otherwise q
        # would be read into registers in front of a barrier of its own, and there are not enough.
        k_tail = converted(_rows_at(k_ptr, slots, live, STRIDE, HEAD_DIM, TAIL, TAIL_PAD, MASKED), q)
        scores = tl.dot(q_tail, tl.trans(k_tail), input_precision="ieee")
        scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
    else:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    return scores, v


@triton.jit
def operand(q, k_ptr, SHARED: tl.constexpr):
    """q in the type in which it is multiplied by rows that are keys and values. If they are FP8 this is float16, to
    which one instruction converts two numbers. 64 rows stay bfloat16, because they are multiplied from shared memory
    only if they are what was loaded."""
    if (SHARED and k_ptr.dtype.element_ty == tl.float8e4nv) and (q.dtype == tl.bfloat16 and q.shape[0] < 64):
        q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    return q


@triton.jit
def converted(rows, q):
    """Rows of the pool in q's type. Triton converts operands of products in their registers: these here twice, once for
    each product, and without copying them ahead of time. It leaves instructions where they are that may have effects.

    An E4M3 number with its bits where a bfloat16 has them is 2^-120 of itself."""
    if rows.dtype == tl.float8e4nv and q.dtype == tl.float16:
        rows = tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r", [rows], dtype=tl.float16, is_pure=False, pack=4,
        )  # fmt: skip
    elif rows.dtype == tl.float8e4nv and q.dtype == tl.bfloat16:
        rows = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, sign, scale, zero;
            mov.b32 scale, 0x7b807b80;
            mov.b32 zero, 0x80008000;
            prmt.b32 a, 0, $2, 0x5140;
            and.b32 sign, a, 0x80008000;
            shr.b32 a, a, 4;
            lop3.b32 a, a, 0x07f007f0, sign, 0xea;
            fma.rn.bf16x2 $0, a, scale, zero;
            prmt.b32 b, 0, $2, 0x7362;
            and.b32 sign, b, 0x80008000;
            shr.b32 b, b, 4;
            lop3.b32 b, b, 0x07f007f0, sign, 0xea;
            fma.rn.bf16x2 $1, b, scale, zero;
            }""",
            "=r,=r,r", [rows], dtype=tl.bfloat16, is_pure=False, pack=4,
        )  # fmt: skip
    else:
        rows = rows.to(q.dtype)
    return rows


@triton.jit
def _rows_at(
    ptr, slots, live, STRIDE: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """``SIZE`` features of each row from ``FIRST`` on, as [N, PAD]."""
    dims = tl.arange(0, PAD)
    at = ptr + slots[:, None] * STRIDE + (FIRST + dims)[None, :]
    if MASKED:
        rows = tl.load(at, mask=in_heads(live[:, None], dims, SIZE, PAD), other=0.0)
    elif PAD > SIZE:
        rows = tl.load(at, mask=(dims < SIZE)[None, :], other=0.0)
    else:
        rows = tl.load(at)
    return rows


@triton.jit
def merged(acc, top, norm, part, part_top, part_norm):
    """The sums, largest scores and norms of one more segment merged into those of the preceding ones."""
    new_top = tl.maximum(top, part_top)
    decay, weight = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
    return acc * decay[:, None] + part * weight[:, None], new_top, norm * decay + part_norm * weight


@triton.jit
def in_heads(live, dims, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """The mask ``live`` [N, 1] without the features ``dims`` past a head's end."""
    if DIM_PAD > HEAD_DIM:
        live = live & (dims < HEAD_DIM)[None, :]
    return live


@triton.jit
def soft_capped(scores, cap):
    """cap * tanh(scores / cap), with tanh as a sigmoid."""
    return cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)


@triton.jit
def _count_bits(x):
    """How many bits of x are set; x is int64 and only its lowest 32 bits may be set."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24) & 0xFF


@triton.jit
def token_slots(
    table_ptr, block, positions, live, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr
):
    """KV slots [BLOCK_N] int64 of the ``positions`` of a block of one request; the sink's where not ``live``.

    Latent rows get those of the following block while a block is computed: so no copy waits for a page's number, and
    all stages of the pipeline hold rows."""
    if PAGE_SIZE % BLOCK_N == 0:
        pages = tl.load(table_ptr + block // (PAGE_SIZE // BLOCK_N))  # one page holds the whole block
    elif MASKED:
        pages = tl.load(table_ptr + positions // PAGE_SIZE, mask=live, other=0)
    else:
        pages = tl.load(table_ptr + positions // PAGE_SIZE)
    return pages.to(tl.int64) * PAGE_SIZE + positions % PAGE_SIZE


@triton.jit
def _piece(lane, worker, begins, NUM_WORKERS: tl.constexpr):
    """The index of a piece's partial result. A worker may have two: the end of a request and the next's beginning."""
    return (lane * NUM_WORKERS + worker) * 2 + tl.where(begins, 1, 0)


@triton.jit
def _merge(
    out_ptr, partial_ptr, stats_ptr, lane, first_row, begin, first_dim, first_worker, last_worker,
    NUM_WORKERS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, TAIL: tl.constexpr,
    GROUP: tl.constexpr, NUM_QUERIES: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
    MERGE: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of PART rows from ``begin`` on of a request's tile, CHUNK features from ``first_dim`` on, and
    store the result; ``out_ptr`` points to that of the first query."""
    rows = begin + tl.arange(0, PART)
    dims = first_dim + tl.arange(0, CHUNK)
    row_live = first_row + rows < NUM_QUERIES * GROUP
    acc = tl.zeros([PART, CHUNK], tl.float32)
    top = tl.full([PART], _NO_SCORE, tl.float32)
    norm = tl.zeros([PART], tl.float32)
    # Rows are the first axis, so each warp has its own rows, and a thread adds up pieces without exchanging data.
    for first in tl.range(first_worker, last_worker + 1, MERGE, num_stages=1):
        workers = first + tl.arange(0, MERGE)
        pieces = _piece(lane, workers, workers == first_worker, NUM_WORKERS)
        live = row_live[:, None] & (workers <= last_worker)[None, :]
        at = pieces[None, :, None] * (ROWS * HEAD_DIM) + rows[:, None, None] * HEAD_DIM + dims[None, None, :]
        wanted = live[:, :, None]
        if DIM_PAD > HEAD_DIM:
            wanted = wanted & (dims < HEAD_DIM)[None, None, :]
        partial = tl.load(partial_ptr + at, mask=wanted, other=0.0)
        stats_at = stats_ptr + pieces[None, :] * (2 * ROWS) + rows[:, None]
        piece_top = tl.load(stats_at, mask=live, other=_NO_SCORE)
        piece_norm = tl.load(stats_at + ROWS, mask=live, other=0.0)
        new_top = tl.maximum(top, tl.max(piece_top, 1))
        weights = tl.exp2(piece_top - new_top[:, None])
        decay = tl.exp2(top - new_top)
        norm = norm * decay + tl.sum(piece_norm * weights, 1)
        acc = acc * decay[:, None] + tl.sum(partial * weights[:, :, None], 1)
        top = new_top
    norm = tl.where(row_live, norm, 1.0)
    stride: tl.constexpr = NUM_KV_HEADS * GROUP * (HEAD_DIM + TAIL)
    offsets = _row_offsets(first_row + rows, lane % NUM_KV_HEADS, stride, GROUP, HEAD_DIM + TAIL, NUM_QUERIES)
    out_at = out_ptr + offsets[:, None] + dims[None, :]
    wanted = in_heads(row_live[:, None], dims, HEAD_DIM, DIM_PAD)
    tl.store(out_at, (acc / norm[:, None]).to(out_ptr.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["batch"])
def _merge_pieces_kernel(
    partial_ptr, stats_ptr, seq_lens_ptr, out_ptr, batch,
    NUM_WORKERS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    TAIL: tl.constexpr, GROUP: tl.constexpr, NUM_QUERIES: tl.constexpr, NUM_NODES: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr, MERGE: tl.constexpr, BATCH_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr, MIN_BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    request, first_dim = tl.program_id(0), tl.program_id(2) * CHUNK
    lane, begin = tl.program_id(1) // (ROWS // PART), tl.program_id(1) % (ROWS // PART) * PART
    first_row = 0
    if NUM_QUERIES * GROUP > ROWS:
        first_row = lane // NUM_KV_HEADS * ROWS
    ids = tl.arange(0, BATCH_PAD)
    seq_lens = tl.load(seq_lens_ptr + ids, mask=ids < batch, other=0).to(tl.int32)
    num_blocks = _num_units(seq_lens, NUM_NODES, WINDOW, BLOCK_N)
    stretch = _stretch(tl.sum(num_blocks, 0), NUM_WORKERS, MIN_BLOCKS)
    first_worker = tl.sum(tl.where(ids < request, num_blocks, 0), 0) // stretch
    last_worker = (tl.sum(tl.where(ids <= request, num_blocks, 0), 0) - 1) // stretch
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    if (last_worker > first_worker) & (first_row + begin < NUM_QUERIES * GROUP):
        out_stride: tl.constexpr = NUM_KV_HEADS * GROUP * (HEAD_DIM + TAIL)
        _merge(
            out_ptr + request.to(tl.int64) * NUM_QUERIES * out_stride, partial_ptr, stats_ptr, lane, first_row, begin,
            first_dim, first_worker, last_worker,
            NUM_WORKERS, NUM_KV_HEADS, HEAD_DIM, DIM_PAD, TAIL, GROUP, NUM_QUERIES, ROWS, PART, CHUNK, MERGE,
        )  # fmt: skip


@triton.jit
def _segment_piece(lane, first_worker, segment, NUM_WORKERS: tl.constexpr, MAX_SEGMENTS: tl.constexpr):
    """The index of a segment's partial result, of the request that begins in the section of ``first_worker`` and ends
    behind it."""
    return (lane * NUM_WORKERS + first_worker).to(tl.int64) * MAX_SEGMENTS + segment


@triton.jit
def _merge_segments(
    out_ptr, partial_ptr, stats_ptr, sinks_ptr, lane, first_row, first_worker, num_segments, NUM_WORKERS: tl.constexpr,
    MAX_SEGMENTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    TAIL: tl.constexpr, GROUP: tl.constexpr, NUM_QUERIES: tl.constexpr, MERGED_ROWS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the segments of a request's tile in order and store the result, like ``_merge``."""
    rows = tl.arange(0, MERGED_ROWS)
    dims = tl.arange(0, DIM_PAD)
    row_live = first_row + rows < NUM_QUERIES * GROUP
    wanted = in_heads(row_live[:, None], dims, HEAD_DIM, DIM_PAD)
    head = lane % NUM_KV_HEADS
    acc = tl.zeros([MERGED_ROWS, DIM_PAD], tl.float32)
    top = tl.full([MERGED_ROWS], _NO_SCORE, tl.float32)
    norm = tl.zeros([MERGED_ROWS], tl.float32)
    if SINKS:
        top = tl.load(sinks_ptr + head * GROUP + (first_row + rows) % GROUP) * _LOG2_E_IN_KERNEL
        norm += 1.0
    first = _segment_piece(lane, first_worker, 0, NUM_WORKERS, MAX_SEGMENTS)
    for start in tl.range(0, num_segments, 4, num_stages=1):
        for ahead in tl.static_range(4):  # their loads do not wait for each other
            piece = first + start + ahead
            inside = start + ahead < num_segments
            at = piece * (MERGED_ROWS * HEAD_DIM) + rows[:, None] * HEAD_DIM + dims[None, :]
            part = tl.load(partial_ptr + at, mask=wanted & inside, other=0.0)
            stats_at = stats_ptr + piece * (2 * MERGED_ROWS) + rows
            part_top = tl.load(stats_at, mask=row_live & inside, other=_NO_SCORE)
            part_norm = tl.load(stats_at + MERGED_ROWS, mask=row_live & inside, other=0.0)
            acc, top, norm = merged(acc, top, norm, part, part_top, part_norm)
    norm = tl.where(row_live, norm, 1.0)
    stride: tl.constexpr = NUM_KV_HEADS * GROUP * (HEAD_DIM + TAIL)
    offsets = _row_offsets(first_row + rows, head, stride, GROUP, HEAD_DIM + TAIL, NUM_QUERIES)
    out_at = out_ptr + offsets[:, None] + dims[None, :]
    tl.store(out_at, (acc / norm[:, None]).to(out_ptr.dtype.element_ty), mask=wanted)
