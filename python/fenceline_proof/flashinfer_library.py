"""FlashInfer's library for devices without its kernels: its two kinds of functions, ``plan`` and ``run``, in torch.

The attention backend is FlashInfer's own (``layers.attention.flashinfer_backend``) with all its memory and waits; only
the compiled functions are others. ``plan`` writes the same arrays to the pinned buffer as FlashInfer does and submits
one copy of them on the current stream. ``run`` attends tile by tile to what these arrays name at the moment when it
runs, and to nothing else. So a plan that has been overwritten, or not copied yet, gives wrong values.

Importing this module makes two backends available on any device. :data:`FLASHINFER` decodes with the kernels for CUDA
cores and has room for one plan, so that each wait matters (two plans would leave so much time that the scheduler's own
order covers two of them); :data:`FLASHINFER_TENSOR_CORES` decodes with those for tensor cores and has room for two, as
on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fenceline.layers.attention.backends import AttentionSetting, register_attention_backend
from fenceline.layers.attention.flashinfer_backend import FlashInferAttentionBackend
from fenceline.layers.attention.flashinfer_library import AttentionShape, Module, PlanInfo
from fenceline.memory_order import Device
from fenceline.memory_order.kernel import KernelAccesses, declare_kernel

FLASHINFER, FLASHINFER_TENSOR_CORES = "flashinfer_planned", "flashinfer_tensor_cores"
PLANNED = (FLASHINFER, FLASHINFER_TENSOR_CORES)  # both backends

_NUM_SMS = 6
_QUERY_TILE = 4  # queries of a tile; FlashInfer's have 16 to 128 rows
_ALIGN = 16  # bytes, of each array of a plan
_CAUSAL = 1  # its mask_mode

I64 = npt.NDArray[np.int64]


class _Layout(NamedTuple):
    """A plan's numbers for ``run``, ``plan_info_vec``: where in the integer workspace each array begins, in bytes."""

    num_tiles: int  # of the launch; those beyond the plan's are marked as invalid
    num_requests: int
    requests: int  # of each tile, int32
    query_tiles: int  # of each tile, int32: which of its request's
    key_tiles: int  # of each tile, int32
    valid: int  # of each tile, uint8
    chunk: int  # keys of a key tile, one int32
    nbytes: int


def _layout(num_tiles: int, num_requests: int) -> _Layout:
    column, flags = -(-4 * num_tiles // _ALIGN) * _ALIGN, -(-num_tiles // _ALIGN) * _ALIGN
    valid = 3 * column
    chunk = valid + flags
    return _Layout(num_tiles, num_requests, 0, column, 2 * column, valid, chunk, chunk + _ALIGN)


def _chunk_tokens(num_tiles: I64, kv_lens: I64, page_size: int, most: int) -> int:
    """The fewest keys, in whole pages, into which they can be split so that there are at most ``most`` tiles."""
    longest = max(-(-int(kv_lens.max()) // page_size), 1)
    for pages in range(1, longest):
        if int((num_tiles * np.maximum(-(-kv_lens // (pages * page_size)), 1)).sum()) <= most:
            return pages * page_size
    return longest * page_size


def _plan(
    ints: torch.Tensor, pinned: torch.Tensor, query_lens: I64, kv_lens: I64, page_size: int, most: int, graph: bool
) -> PlanInfo:
    """Write the plan to ``pinned`` and submit its copy to ``ints``. ``most``: tiles of a launch, at least one for each
    request; a graph's launch has as many, whatever the lengths."""
    query_tiles = -(-query_lens // _QUERY_TILE)
    most = max(most, int(query_tiles.sum()))
    chunk = _chunk_tokens(query_tiles, kv_lens, page_size, most)
    tiles = [
        (request, query_tile, key_tile)
        for request, (num, length) in enumerate(zip(query_tiles.tolist(), kv_lens.tolist(), strict=True))
        for query_tile in range(num)
        for key_tile in range(max(-(-length // chunk), 1))
    ]
    layout = _layout(most if graph else len(tiles), len(kv_lens))
    assert layout.nbytes <= min(ints.numel(), pinned.numel()), "the plan fits its memory"
    buffer = pinned.numpy()[: layout.nbytes]
    buffer[:] = 0
    for start, column in zip(layout[2:5], range(3), strict=True):
        buffer[start:].view(np.int32)[: len(tiles)] = [tile[column] for tile in tiles]
    buffer[layout.valid :][: len(tiles)] = 1
    buffer[layout.chunk :].view(np.int32)[0] = chunk
    ints[: layout.nbytes].copy_(pinned[: layout.nbytes], non_blocking=True)
    return [int(number) for number in layout]


class _Tile(NamedTuple):
    request: int
    query_tile: int
    first_key: int
    last_key: int


def _tiles(plan: torch.Tensor, layout: _Layout, num_requests: int) -> Iterator[_Tile]:
    """The tiles of a plan, uint8. Whatever it holds, they are of existing requests."""
    data = plan.numpy()
    columns = [data[start:].view(np.int32)[: layout.num_tiles].tolist() for start in layout[2:5]]
    chunk = int(data[layout.chunk :].view(np.int32)[0])
    for request, query_tile, key_tile, valid in zip(
        *columns, data[layout.valid :][: layout.num_tiles].tolist(), strict=True
    ):
        if valid and 0 <= request < num_requests:
            yield _Tile(request, query_tile, key_tile * chunk, (key_tile + 1) * chunk)


class _Rules(NamedTuple):
    """Which keys a query attends to, and how. ``window_left``: so many before its own; -1: all."""

    scale: float
    soft_cap: float
    window_left: int
    causal: bool

    def first_key(self, position: int) -> int:
        """Of those that a query at ``position`` attends to."""
        return 0 if self.window_left < 0 else max(position - self.window_left, 0)


def _rules_of(args: Mapping[str, Any], causal: bool) -> _Rules:
    return _Rules(args["sm_scale"], args["logits_soft_cap"], args["window_left"], causal)


def _slots_of_requests(
    indptr: torch.Tensor, indices: torch.Tensor, last_page_lens: torch.Tensor, page_size: int
) -> list[I64]:
    """The slots of each request's tokens."""
    pages, starts = indices.numpy(), indptr.tolist()
    slots = []
    for start, stop, rest in zip(starts, starts[1:], last_page_lens.tolist(), strict=False):
        mine = pages[max(start, 0) : max(stop, 0)].astype(np.int64)
        of_pages = (mine[:, None] * page_size + np.arange(page_size)).reshape(-1)
        slots.append(of_pages[: max(len(of_pages) - page_size + rest, 0)])
    return slots


def _planned_slots(
    plan: torch.Tensor,
    query_starts: torch.Tensor | None,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_lens: torch.Tensor,
    layout: _Layout,
    page_size: int,
    rules: _Rules,
) -> I64:
    """The slots whose keys the plan's tiles attend to, request after request."""
    slots = _slots_of_requests(indptr, indices, last_page_lens, page_size)
    starts = range(len(slots) + 1) if query_starts is None else query_starts.tolist()
    read = [np.zeros(len(mine), np.bool_) for mine in slots]
    for tile in _tiles(plan, layout, len(slots)):
        num_queries, num_keys = starts[tile.request + 1] - starts[tile.request], len(slots[tile.request])
        first_key = rules.first_key(num_keys - num_queries + tile.query_tile * _QUERY_TILE)
        read[tile.request][max(tile.first_key, first_key) : tile.last_key] = True
    return np.concatenate([np.zeros(0, np.int64), *(s[r] for s, r in zip(slots, read, strict=True))])


@declare_kernel
def flashinfer_paged(
    op: KernelAccesses,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    floats: torch.Tensor,
    plan: torch.Tensor,
    query_starts: torch.Tensor | None,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_lens: torch.Tensor,
    layout: _Layout,
    page_size: int,
    rules: _Rules,
) -> None:
    """``DecodeKernels.run`` and ``PrefillKernels.run_paged``: not launched programmatically, so nothing is early.
    Partial results are written to ``floats`` and read from there."""
    for read in (q, plan, query_starts, indptr, indices, last_page_lens):
        op.read(read)
    for cache in (k_cache, v_cache):
        op.read_rows(
            cache, _planned_slots, plan, query_starts, indptr, indices, last_page_lens, layout, page_size, rules
        )
    op.write(floats)
    op.write(out)


@declare_kernel
def flashinfer_ragged(
    op: KernelAccesses,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    floats: torch.Tensor,
    plan: torch.Tensor,
    starts: torch.Tensor,
    layout: _Layout,
) -> None:
    """``PrefillKernels.run_ragged``."""
    for read in (q, k, v, plan, starts):
        op.read(read)
    op.write(floats)
    op.write(out)


@dataclass(frozen=True, slots=True)
class _Sequences:
    """Queries and keys of each request: ``query_starts`` [B + 1], and where in k and v its keys are."""

    query_starts: Sequence[int]
    slots: Sequence[I64]


def _attend(
    plan: torch.Tensor,
    layout: _Layout,
    seqs: _Sequences,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    rules: _Rules,
) -> None:
    """q, out [T, num_heads, head_dim], k, v [slots, num_kv_heads, head_dim]: a partial result for each tile, and their
    sum over the tiles of the same queries. Rows that no tile names are zero."""
    group = q.shape[1] // k.shape[1]
    rows = len(q)
    best = torch.full((rows, q.shape[1], 1), float("-inf"))
    total, sums = torch.zeros(rows, q.shape[1], 1), torch.zeros(q.shape)
    for tile in _tiles(plan, layout, len(seqs.slots)):
        begin, end = seqs.query_starts[tile.request], seqs.query_starts[tile.request + 1]
        first = min(begin + tile.query_tile * _QUERY_TILE, rows)
        last = min(first + _QUERY_TILE, end, rows)
        slots = seqs.slots[tile.request]
        first_key = max(tile.first_key, rules.first_key(first - end + len(slots)))
        at = torch.from_numpy(slots[first_key : tile.last_key])
        if first >= last or len(at) == 0:
            continue
        keys, values = (x.index_select(0, at).float().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->qhk", q[first:last].float(), keys) * rules.scale
        if rules.soft_cap:
            scores = (scores / rules.soft_cap).tanh() * rules.soft_cap
        positions = torch.arange(first, last) - end + len(slots)
        ago = positions[:, None] - first_key - torch.arange(len(at))
        beyond = (ago < 0) & rules.causal | (ago > rules.window_left) & (rules.window_left >= 0)
        scores.masked_fill_(beyond[:, None], float("-inf"))
        top = torch.maximum(best[first:last], scores.amax(-1, keepdim=True))
        seen = torch.isfinite(top)
        weights = torch.where(seen, (scores - top).exp(), torch.zeros(()))
        before = torch.where(seen, (best[first:last] - top).exp(), torch.zeros(()))
        sums[first:last] = sums[first:last] * before + torch.einsum("qhk,khd->qhd", weights, values)
        total[first:last] = total[first:last] * before + weights.sum(-1, keepdim=True)
        best[first:last] = top
    out.copy_(sums / total.clamp(min=torch.finfo(torch.float32).tiny))


def _run_paged(
    ints: torch.Tensor,
    info: PlanInfo,
    floats: torch.Tensor,
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    query_starts: torch.Tensor | None,
    pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    rules: _Rules,
) -> None:
    layout, page_size = _Layout(*info), k_pages.shape[1]

    def compute(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, _: torch.Tensor, plan: torch.Tensor,
        starts: torch.Tensor | None, indptr: torch.Tensor, indices: torch.Tensor, lens: torch.Tensor, *rest: object,
    ) -> None:  # fmt: skip
        slots = _slots_of_requests(indptr, indices, lens, page_size)
        query_starts = range(len(slots) + 1) if starts is None else starts.tolist()
        _attend(plan, layout, _Sequences(query_starts, slots), q, k, v, out, rules)

    caches = [cache.view(-1, *cache.shape[2:]) for cache in (k_pages, v_pages)]
    operands = (q, *caches, out, floats, ints[: layout.nbytes], query_starts, *pages, layout, page_size, rules)
    flashinfer_paged.launch(compute, *operands)


class _Decode:
    """The functions of FlashInfer's decode module."""

    is_compiled = True

    def begin_to_compile(self) -> None:
        """See ``Module``."""

    @property
    def functions(self) -> Any:
        return self

    def plan(
        self,
        floats: torch.Tensor,
        ints: torch.Tensor,
        pinned: torch.Tensor,
        indptr: torch.Tensor,
        batch_size: int,
        num_heads: int,
        num_kv_heads: int,
        page_size: int,
        graph: bool,
        *unused: object,
    ) -> PlanInfo:
        """See ``flashinfer_library.DecodeKernels.plan``. Of lengths it is told the pages alone."""
        kv_lens = np.diff(indptr.numpy()).astype(np.int64) * page_size
        assert len(kv_lens) == batch_size, "one offset more than requests"
        most = max(2 * _NUM_SMS // num_kv_heads, batch_size)
        return _plan(ints, pinned, np.ones_like(kv_lens), kv_lens, page_size, most, graph)

    def run(self, **args: Any) -> None:
        _run_paged(
            args["int_workspace_buffer"],
            args["plan_info_vec"],
            args["float_workspace_buffer"],
            args["q"],
            args["paged_k_cache"],
            args["paged_v_cache"],
            None,
            (args["paged_kv_indptr"], args["paged_kv_indices"], args["paged_kv_last_page_len"]),
            args["o"],
            _rules_of(args, causal=False),
        )


class _Prefill:
    """The functions of FlashInfer's fa2 prefill module."""

    is_compiled = True

    def begin_to_compile(self) -> None:
        """See ``Module``."""

    @property
    def functions(self) -> Any:
        return self

    def plan(
        self,
        floats: torch.Tensor,
        ints: torch.Tensor,
        pinned: torch.Tensor,
        query_starts: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_lens: torch.Tensor,
        num_rows: int,
        batch_size: int,
        num_heads: int,
        num_kv_heads: int,
        page_size: int,
        graph: bool,
        *unused: object,
    ) -> PlanInfo:
        query_lens = np.diff(query_starts.numpy()).astype(np.int64)
        assert len(query_lens) == batch_size and int(query_lens.sum()) == num_rows, "offsets fit the batch"
        lens = kv_lens.numpy().astype(np.int64)
        most = 2 * _NUM_SMS // num_kv_heads
        return _plan(ints, pinned, query_lens, lens, page_size, most, graph)

    def paged_run(self, **args: Any) -> None:
        _run_paged(
            args["int_workspace_buffer"],
            args["plan_info_vec"],
            args["float_workspace_buffer"],
            args["q"],
            args["paged_k_cache"],
            args["paged_v_cache"],
            args["qo_indptr"],
            (args["paged_kv_indptr"], args["paged_kv_indices"], args["paged_kv_last_page_len"]),
            args["o"],
            _rules_of(args, causal=args["mask_mode"] == _CAUSAL),
        )

    def ragged_run(self, **args: Any) -> None:
        layout, rules = _Layout(*args["plan_info_vec"]), _rules_of(args, causal=True)

        def compute(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, _: torch.Tensor,
            plan: torch.Tensor, starts: torch.Tensor, *rest: object,
        ) -> None:  # fmt: skip
            at = starts.tolist()
            slots = [np.arange(first, last) for first, last in zip(at, at[1:], strict=False)]
            _attend(plan, layout, _Sequences(at, slots), q, k, v, out, rules)

        plan = args["int_workspace_buffer"][: layout.nbytes]
        memory = args["o"], args["float_workspace_buffer"], plan, args["qo_indptr"]
        flashinfer_ragged.launch(compute, args["q"], args["k"], args["v"], *memory, layout)


class PlannedLibrary:
    """See ``layers.attention.flashinfer_library.Library``."""

    plan_bytes = 1 << 14
    split_args = ()

    def __init__(self, plan_slots: int) -> None:
        self.plan_slots = plan_slots

    def check(self, device: Device, shape: AttentionShape) -> None:
        """Everything can be computed."""

    def num_sms(self, device: torch.device) -> int:
        """See ``Library``: few, so that not everything is split into single pages."""
        return _NUM_SMS

    def prefill_generation(self, device: torch.device, dtype: torch.dtype) -> str:
        return "fa2"

    def prefill_module(self, shape: AttentionShape, generation: str) -> Module:
        return _Prefill()

    def decode_module(self, shape: AttentionShape) -> Module:
        return _Decode()


def _make(setting: AttentionSetting, tensor_cores: bool) -> FlashInferAttentionBackend:
    library = PlannedLibrary(2 if tensor_cores else 1)
    given = setting.kv_pool, setting.device, setting.num_heads
    return FlashInferAttentionBackend(
        *given, tensor_cores=tensor_cores, library=library, layers=setting.own_layers, rules=setting.rules
    )


register_attention_backend(FLASHINFER, lambda setting: _make(setting, tensor_cores=False))
register_attention_backend(FLASHINFER_TENSOR_CORES, lambda setting: _make(setting, tensor_cores=True))
