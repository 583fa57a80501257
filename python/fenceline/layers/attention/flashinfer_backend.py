"""FlashInfer's kernels as an attention backend: prefill with its FA3 kernels on Hopper GPUs, planned decode.

Every batch is planned on the host from its lengths, and the plan is copied to the device. The backend orders that copy
itself (F12): a slot of a ``PlanRing`` is written, FlashInfer submits the copy on SCHEDULE, and FORWARD waits for it.
Before a later plan rewrites the slot, it waits on the host until that copy has run. Pages and offsets into them never
come from the host: they are gathered on the device from the page table.

A graph does not read the memory that a plan is copied to (F9). Each bucket has an integer workspace of its own, which
is updated from the ring's slot before each replay; pages, offsets and last page lengths are computed by the graph in
each replay. The layout of a bucket's plan depends on the number of requests alone, which is asserted at each replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fenceline.layers.attention.base import NO_RULES, AttentionBackend, LayerRules, window_of
from fenceline.layers.attention.flashinfer_library import (
    AttentionShape,
    DecodeKernels,
    InstalledLibrary,
    Library,
    Pages,
    PlanInfo,
    PrefillKernels,
    Workspace,
)
from fenceline.layers.forward_batch import AttentionInputs, AttentionPlan, ForwardMode, GraphDecodeInputs
from fenceline.layers.kernels import accesses
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.memory_order import Device
from fenceline.memory_order.staging import PlanRing

_MAX_QUERY_TILE = 128
# Up to this group size the CUDA-core decode kernels read the pool as fast as those on tensor cores, without padding
# the group to a tensor core's tile.
_MAX_CUDA_CORE_GROUP = 3

Lens = npt.NDArray[np.int64]


class FlashInferAttentionBackend(AttentionBackend):
    """Plans over one KV pool. A plan is valid until the next is made: they share the ring and the workspaces.
    ``num_heads`` is the number of this rank's query heads. Benchmarks that compare kernels set ``prefill`` to
    FlashInfer's fa2 or fa3 and ``tensor_cores`` to whether decode uses them; None chooses what suits the GPU and the
    model. ``library``: None stands for the installed package. Raises ValueError with the remedy if FlashInfer is
    missing or has no kernels for the model."""

    def __init__(
        self,
        kv_pool: KVPool,
        device: Device,
        num_heads: int,
        prefill: str | None = None,
        tensor_cores: bool | None = None,
        library: Library | None = None,
        layers: Sequence[int] | None = None,
        rules: Mapping[int, LayerRules] = NO_RULES,
    ) -> None:
        layers = range(kv_pool.num_layers) if layers is None else layers
        keys = kv_pool.row(layers[0], "k")
        heads = num_heads, keys.shape[1], keys.shape[2]
        window, soft_cap = window_of(rules), _soft_cap_of(rules)
        self.shape = AttentionShape(*heads, kv_pool.page_size, keys.dtype, window, soft_cap)
        library = InstalledLibrary() if library is None else library
        library.check(device, self.shape)
        self.kv_pool = kv_pool
        pages = (kv_pool.num_pages, kv_pool.page_size, *keys.shape[1:])
        # These views are made once, because prefill needs them in each layer and the CPU limits short prompts.
        self._layer_pages = {
            layer: (kv_pool.row(layer, "k").view(pages), kv_pool.row(layer, "v").view(pages)) for layer in layers
        }
        self._device = device
        fa3_or_fa2 = prefill or library.prefill_generation(device.torch_device, self.shape.dtype)
        self.prefill = PrefillKernels(self.shape, fa3_or_fa2, library)
        # fa3 has one block for each tile of queries and does not split the keys, so a few new tokens after a long
        # prefix would leave most of the GPU idle. fa2 splits the keys.
        self._few_queries = PrefillKernels(self.shape, "fa2", library) if prefill is None else self.prefill
        self.decode: DecodeKernels | PrefillKernels = DecodeKernels(self.shape, library)
        if self.shape.group > _MAX_CUDA_CORE_GROUP if tensor_cores is None else tensor_cores:
            fa2 = self.prefill
            self.decode = PrefillKernels(self.shape, "fa2", library) if fa3_or_fa2 != "fa2" else fa2
        # Layers with other windows, and those of a draft with other heads, have backends of their own.
        name = f"plan_ring.layer{layers[0]}" if layers[0] else "plan_ring"
        self._ring = PlanRing(device, library.plan_bytes, library.plan_slots, name)
        self._num_sms = library.num_sms(device.torch_device)
        self._floats = self._bytes(self._eager_float_bytes())
        self._indices = torch.empty(0, dtype=torch.int32, device=device.torch_device)
        self._buckets: dict[int, _Bucket] = {}

    one_plan = True  # see PlanRing

    def is_compiled(self, mode: ForwardMode) -> bool:
        if mode is ForwardMode.EXTEND:
            return self.prefill.is_compiled and self._few_queries.is_compiled
        return self.decode.is_compiled

    def begin_to_compile(self) -> None:
        for kernels in (self.prefill, self._few_queries):
            kernels.begin_to_compile()

    def persistent(self, mode: ForwardMode) -> bool:
        """The fa3 kernels are persistent, and only prefill uses them. The others have a block for each tile."""
        return mode is ForwardMode.EXTEND and self.prefill.generation == "fa3"

    def warm_up(self) -> None:
        _ = self._few_queries.functions

    def _prefill_kernels(self, query_lens: Lens, paged: bool) -> PrefillKernels:
        num_tiles = int((-(-query_lens // _MAX_QUERY_TILE)).sum()) * self.shape.num_heads
        return self._few_queries if paged and num_tiles < self._num_sms else self.prefill

    @property
    def num_plans(self) -> int:
        """How many plans have been made; see ``_EagerPlan``."""
        return self._ring.num_plans

    def layer_pages(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a layer's keys and values, [num_pages, page_size, num_kv_heads, head_dim]."""
        return self._layer_pages[layer_id]

    # --- eager steps -------------------------------------------------------------------------------------

    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        """Plan on the host; allocates index tensors on the current stream, FORWARD. No host synchronisation."""
        lens = inputs.seq_lens_cpu
        assert len(lens) > 0, "an empty batch has nothing to attend to"
        assert bool((lens >= inputs.query_lens_cpu).all()), "seq_lens include this step's tokens"
        if inputs.mode is ForwardMode.DECODE:
            assert bool((inputs.query_lens_cpu == 1).all()), "decode has one query for each request"
            space, info = self._plan_decode(lens, graph=False)
            return _DecodePlan(self, space, info, self._gather(inputs))
        assert not inputs.whole, "images that are seen whole are torch's"
        assert inputs.query_starts is not None, "EXTEND says where each request's queries start"
        paged = bool((lens > inputs.query_lens_cpu).any())
        kernels = self._prefill_kernels(inputs.query_lens_cpu, paged)
        with self._ring.planning() as slot:
            space = Workspace(self._floats, slot.device, slot.host)
            info = kernels.plan(space, inputs.query_lens_cpu, lens, paged=paged)
        pages = self._gather(inputs) if paged else None
        return _ExtendPlan(self, kernels, space, info, inputs.query_starts, pages)

    def _plan_decode(self, lens: Lens, graph: bool) -> tuple[Workspace, PlanInfo]:
        with self._ring.planning() as slot:
            space = Workspace(self._floats, slot.device, slot.host)
            return space, self._decode_info(space, lens, graph)

    def _decode_info(self, space: Workspace, lens: Lens, graph: bool) -> PlanInfo:
        if isinstance(self.decode, DecodeKernels):
            return self.decode.plan(space, lens, graph=graph)
        return self.decode.plan(space, np.ones_like(lens), lens, paged=True, causal=False, graph=graph)

    def _gather(self, inputs: AttentionInputs) -> Pages:
        num_pages = -(-inputs.seq_lens_cpu // self.shape.page_size)
        indices = _ints(int(num_pages.sum()), inputs.page_table.device)
        pages = _pages_into(indices, len(num_pages))
        _gather_into(pages, inputs, self.shape.page_size, int(num_pages.max()))
        return pages

    def attend(
        self,
        layer_id: int,
        q: torch.Tensor,
        space: Workspace,
        info: PlanInfo,
        pages: Pages,
        starts: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Decode attention, one query for each request: q [B, num_heads, head_dim] → the same shape."""
        k, v = self.layer_pages(layer_id)
        if isinstance(self.decode, DecodeKernels):
            return self.decode.run(space, info, q, k, v, pages, scale)
        return self.decode.run_paged(space, info, q, k, v, starts, pages, scale, causal=False)

    # --- graphs ------------------------------------------------------------------------------------------

    def plan_graph(self, inputs: GraphDecodeInputs) -> AttentionPlan | None:
        """See ``AttentionBackend.plan_graph``. The bucket's first plan is for padding only: all lengths are 1."""
        size = len(inputs.rows)
        assert size not in self._buckets, f"bucket {size} has its plan already"
        max_pages = -(-inputs.max_seq_len // self.shape.page_size)
        with self._device.forward.active():
            self._grow(self._graph_float_bytes(size), size * max_pages)
            plan_space, info = self._plan_decode(np.ones(size, dtype=np.int64), graph=True)
            ints = self._bytes(self._graph_int_bytes(size))
            ints.copy_(plan_space.ints[: ints.numel()])
            self._buckets[size] = _Bucket(info, ints)
            space = Workspace(self._floats, ints, plan_space.pinned)
            pages = _pages_into(self._indices, size)
            return _GraphDecodePlan(self, inputs, space, info, pages, max_pages)

    def before_replay(self, bucket: int, seq_lens_cpu: Lens) -> None:
        """Plan for these lengths, padded with 1, and copy the plan on FORWARD to where the graph reads it."""
        known = self._buckets[bucket]
        lens = np.ones(bucket, dtype=np.int64)
        lens[: len(seq_lens_cpu)] = seq_lens_cpu
        space, info = self._plan_decode(lens, graph=True)
        assert list(info) == list(known.info), f"the plan of bucket {bucket} is laid out as when it was captured"
        with self._device.forward.active():
            known.ints.copy_(space.ints[: known.ints.numel()])

    # --- workspaces --------------------------------------------------------------------------------------

    def _bytes(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device.torch_device)

    def _grow(self, float_bytes: int, num_indices: int) -> None:
        """Make the buffers for partial results and page indices. All graphs share them, since only one runs at a time.
        A larger bucket gets new buffers. Graphs captured earlier use the old ones, which their plans keep alive."""
        if self._floats.numel() < float_bytes:
            self._floats = self._bytes(float_bytes)
        if self._indices.numel() < num_indices:
            self._indices = _ints(num_indices, self._device.torch_device)

    def _float_bytes(self, tiles: int, query_tile: int) -> int:
        """Bytes of the partial results and log-sums, in float32, of ``tiles`` tiles with ``query_tile`` queries each,
        for every head."""
        return self.shape.num_heads * tiles * query_tile * (self.shape.head_dim + 1) * 4 + 1024

    def _eager_float_bytes(self) -> int:
        """FlashInfer splits keys only while there are at most two tiles for each multiprocessor
        (PrefillSplitQOKVIndptr) or, on CUDA cores, while all blocks run at once, at most 32 on a multiprocessor
        (BatchDecode…WorkEstimationDispatched)."""
        on_tensor_cores = self._float_bytes(2 * self._num_sms // self.shape.num_kv_heads + 1, _MAX_QUERY_TILE)
        return max(on_tensor_cores, self._float_bytes(self._cuda_core_tiles(0), 1))

    def _cuda_core_tiles(self, size: int) -> int:
        return max(32 * self._num_sms // self.shape.num_kv_heads + 1, size)

    def _tensor_core_tiles(self, size: int) -> int:
        """Tiles of a graph's launch: two for each multiprocessor, or what the requests need without splits, if more."""
        group, tile = self.shape.group, self._query_tile
        return max(2 * self._num_sms // self.shape.num_kv_heads, -(-size * group // tile) + size - 1)

    @property
    def _query_tile(self) -> int:
        """Rows of a decode tile, which has one query of a request with all heads of a group (FA2DetermineCtaTileQ)."""
        return next(tile for tile in (16, 64, _MAX_QUERY_TILE) if self.shape.group <= tile)

    def _graph_float_bytes(self, size: int) -> int:
        if isinstance(self.decode, DecodeKernels):
            return self._float_bytes(self._cuda_core_tiles(size), 1)
        return self._float_bytes(self._tensor_core_tiles(size), self._query_tile)

    def _graph_int_bytes(self, size: int) -> int:
        """Bytes of three indices and a flag for each tile and two offsets for each request, in arrays aligned to 16."""
        tiles = max(self._cuda_core_tiles(size), self._tensor_core_tiles(size))
        return (13 * tiles + 8 * (size + 1) + 512 + 15) // 16 * 16


def _soft_cap_of(rules: Mapping[int, LayerRules]) -> float:
    """The one soft cap that all layers have. Raises ValueError with the remedy for layers with sinks."""
    if any(rule.sinks is not None for rule in rules.values()):
        raise ValueError(
            "--attention-backend flashinfer has no kernels with attention sinks: use --attention-backend triton"
        )
    soft_caps = {rule.soft_cap for rule in rules.values()} or {0.0}
    assert len(soft_caps) == 1, f"layers with one window have one soft cap, not {soft_caps}"
    return soft_caps.pop()


@dataclass(frozen=True, slots=True)
class _Bucket:
    """The plan that a captured graph reads: ``ints`` is its data, ``info`` says where in it each array begins."""

    info: PlanInfo
    ints: torch.Tensor


def _ints(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int32, device=device)


def _pages_into(indices: torch.Tensor, num_requests: int) -> Pages:
    return Pages(_ints(num_requests + 1, indices.device), indices, _ints(num_requests, indices.device))


def _gather_into(pages: Pages, inputs: AttentionInputs | GraphDecodeInputs, page_size: int, max_pages: int) -> None:
    """Pages and offsets of the requests, on the current stream."""
    given = inputs.page_table, inputs.rows, inputs.seq_lens, page_size, max_pages
    results = pages.indptr, pages.indices, pages.last_page_lens
    if inputs.page_table.is_cuda:
        from fenceline.layers.kernels.triton.page_gather import gather_page_indices

        gather_page_indices(*given, *results)
    else:
        accesses.gather_page_indices.run(*given[:3], *results, page_size, max_pages)


class _EagerPlan(AttentionPlan):
    """It uses a slot of the ring: using it after another plan has been made fails an assertion."""

    def __init__(self, backend: FlashInferAttentionBackend, space: Workspace, info: PlanInfo) -> None:
        self.backend, self.space, self.info = backend, space, info
        self._number = backend.num_plans

    def _check(self) -> None:
        assert self._number == self.backend.num_plans, "this plan's memory has been given to a later plan"


class _DecodePlan(_EagerPlan):
    """One query for each request."""

    def __init__(self, backend: FlashInferAttentionBackend, space: Workspace, info: PlanInfo, pages: Pages) -> None:
        super().__init__(backend, space, info)
        self.pages = pages
        self.starts = _one_each(len(pages.last_page_lens), pages.indptr.device)

    def forward(self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        self._check()
        return self.backend.attend(layer_id, q, self.space, self.info, self.pages, self.starts, scale)


class _ExtendPlan(_EagerPlan):
    """Any number of queries for each request. ``pages`` is None if no request has a prefix: then this step's own k and
    v are all the keys and values, and the kernels read them contiguously instead of page by page."""

    def __init__(
        self,
        backend: FlashInferAttentionBackend,
        kernels: PrefillKernels,
        space: Workspace,
        info: PlanInfo,
        starts: torch.Tensor,
        pages: Pages | None,
    ) -> None:
        super().__init__(backend, space, info)
        self.kernels, self.starts, self.pages = kernels, starts, pages

    def forward(self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        return self._run(layer_id, q, k, v, scale, None)

    def forward_into(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        self._run(layer_id, q, k, v, scale, out)

    def _run(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor | None
    ) -> torch.Tensor:
        self._check()
        kernels, space = self.kernels, self.space
        if self.pages is None:
            return kernels.run_ragged(space, self.info, q, k, v, self.starts, scale, out)
        keys, values = self.backend.layer_pages(layer_id)
        return kernels.run_paged(space, self.info, q, keys, values, self.starts, self.pages, scale, out=out)


class _GraphDecodePlan(AttentionPlan):
    """The attention of a bucket's decode step. Its memory lives as long as this plan, which the graph's owner keeps."""

    def __init__(
        self,
        backend: FlashInferAttentionBackend,
        inputs: GraphDecodeInputs,
        space: Workspace,
        info: PlanInfo,
        pages: Pages,
        max_pages: int,
    ) -> None:
        self.backend, self.inputs, self.space, self.info = backend, inputs, space, info
        self.pages, self.max_pages = pages, max_pages
        self.starts = _one_each(len(inputs.rows), inputs.rows.device)

    def prepare(self) -> None:
        """Gather pages and offsets of the current requests. See ``AttentionPlan.prepare``."""
        _gather_into(self.pages, self.inputs, self.backend.shape.page_size, self.max_pages)

    def forward(self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        return self.backend.attend(layer_id, q, self.space, self.info, self.pages, self.starts, scale)


def _one_each(size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(size + 1, dtype=torch.int32, device=device)
