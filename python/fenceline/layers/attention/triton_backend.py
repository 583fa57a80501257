"""The ``triton`` attention backend: our own kernels over the page table in device memory.

There is no plan step: the kernels read requests and lengths from device memory when they run, and divide the work
there. A captured decode step therefore needs nothing from the host when requests or their lengths change.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from fenceline.config.families import BlocksConfig
from fenceline.config.kv_layout import INDEX
from fenceline.layers.attention.base import NO_RULES, PLAIN, AttentionBackend, LayerRules, window_of
from fenceline.layers.forward_batch import (
    AttendNew,
    AttentionInputs,
    AttentionPlan,
    BlockQueries,
    ForwardMode,
    GraphDecodeInputs,
    IndexQueries,
    QueryTree,
    VerifyInputs,
)
from fenceline.layers.kernels.triton.decode_attention import (
    MIN_ROWS,
    DecodeConfig,
    DecodeWorkspace,
    PagedRequests,
    decode_attention,
    query_tiles,
)
from fenceline.layers.kernels.triton.extend_attention import ExtendConfig, ExtendGrid, extend_attention, extend_grid
from fenceline.layers.kernels.triton.select_blocks import choose_blocks, score_blocks
from fenceline.layers.kernels.triton.select_tokens import select_tokens
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.memory_order.guards import first_of_best

# At most this many workers for each multiprocessor: as many as can run on it at once, so that all end at the same time.
_MAX_WORKERS_PER_SM = 4
_FIXED_WORKERS_PER_SM = 2  # of tiles that always have 64 rows
_FIXED_WORKSPACE_BYTES = 256 << 20  # there are fewer workers if their segments need more
_LARGE_SHARED = (9, 10)  # compute capabilities with 227 KiB of shared memory, enough for blocks of 128 tokens
_LATENT_MIN_TOKENS = 64  # a worker that has fewer latent rows spares less time than its piece takes to merge
_LATENT_WORKERS_PER_SM = 2
# Of tokens that one launch attends to. More lists would need variants of the kernel that no decode step has, and these
# fill a GPU with an even number of tokens for each worker.
_MOST_LISTS = 256

_ONE_TILE = (1, MIN_ROWS)
# In a fixed order: a segment has at least this many tokens, and a request at most so many segments and tokens behind
# its context.
_SEGMENT, _MOST_SEGMENTS, _AHEAD = 256, 256, 64


class TritonAttentionBackend(AttentionBackend):
    """Plans over layers of one KV pool whose heads have the same number and size. All plans share workspaces, so they
    must run on one stream."""

    def __init__(
        self,
        kv_pool: KVPool,
        first_layer: int = 0,
        rules: Mapping[int, LayerRules] = NO_RULES,
        num_heads: int | None = None,
        longest: int | None = None,
    ) -> None:
        """``first_layer``: the first of these layers. ``num_heads``: query heads; None: at most 16 share a KV head.
        ``longest``: the longest sequence, if sums shall have an order that depends on positions alone."""
        first = rules.get(first_layer, PLAIN)
        keys = self._keys = kv_pool.row(first_layer, first.rows[0])
        head_dim = keys.shape[2]
        self._shared, self._value_dim = first.shared, first.value_dim or head_dim
        self.kv_pool = kv_pool
        self.rules, self.window = rules, window_of(rules)
        self.num_sms = 1
        self._launch_pdl = False
        self._wide = head_dim > 128  # fewer of these fit in shared memory and registers
        self._large_blocks = False
        if keys.is_cuda:
            device = torch.cuda.get_device_properties(keys.device)
            self.num_sms = device.multi_processor_count
            self._launch_pdl = device.major >= 9
            self._large_blocks = not self._wide and device.major in _LARGE_SHARED
        self._group = 1 if num_heads is None else num_heads // keys.shape[1]
        self._segment, self._max_segments = 0, 0
        if longest is not None:
            self._segment = _SEGMENT
            while longest + _AHEAD > self._segment * _MOST_SEGMENTS:
                self._segment *= 2
            self._max_segments = -(-(longest + _AHEAD) // self._segment)
        # By tiles, rows that are merged, and KV heads.
        self._workspaces: dict[tuple[tuple[int, int], int, int], DecodeWorkspace] = {}
        self.workspace = self._workspace(self._group)
        selects = any(of_layer.selects for of_layer in rules.values())
        self._lists = torch.arange(_MOST_LISTS if selects else 0, device=keys.device)

    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        """See ``AttentionBackend.plan``. Copies nothing: the plan is valid as long as the tensors of ``inputs`` are."""
        assert len(inputs.seq_lens_cpu) > 0, "an empty batch has nothing to attend to"
        assert bool((inputs.query_lens_cpu >= 1).all()), "a request without new tokens does not belong in a batch"
        assert bool((inputs.query_lens_cpu <= inputs.seq_lens_cpu).all()), "seq_lens include this step's tokens"
        requests = self.requests_of(inputs)
        if inputs.mode is ForwardMode.DECODE:
            assert bool((inputs.query_lens_cpu == 1).all()), "decode has one query for each request"
            return self._plan_decode(requests, int(inputs.seq_lens_cpu.max()))
        assert not inputs.whole, "images that are seen whole are torch's"
        assert inputs.query_starts is not None, "EXTEND says where each request's queries start"
        return _ExtendPlan(self, requests, inputs)

    def plan_graph(self, inputs: GraphDecodeInputs) -> AttentionPlan | None:
        """See ``AttentionBackend.plan_graph``; every bucket can be captured."""
        return self._plan_decode(self.requests_of(inputs), inputs.max_seq_len)

    def plan_verify(self, inputs: VerifyInputs) -> AttentionPlan | None:
        num_queries, group = inputs.tree.num_queries, inputs.num_heads // self._keys.shape[1]
        config = self.verify_config(len(inputs.rows), num_queries, group, inputs.tree.ancestors is None)
        # In a fixed order each query of a tree is a request of its own.
        by_path = self._segment > 0 and inputs.tree.ancestors is not None
        workspace = self._workspace(group if by_path else num_queries * group)
        longest = int(inputs.max_seq_lens_cpu.max())
        return _DecodePlan(self, self.requests_of(inputs), longest, workspace, config, inputs.tree)

    def requests_of(self, inputs: AttentionInputs | GraphDecodeInputs | VerifyInputs) -> PagedRequests:
        """The tensors of a batch that the kernels read."""
        return PagedRequests(inputs.page_table, inputs.rows, inputs.seq_lens, self.kv_pool.page_size)

    def decode_config(self, batch: int) -> DecodeConfig:
        """How decode of ``batch`` requests is divided. The lengths are not known here, so any batch may have long
        requests. A single request is limited by latency, and one worker merges all of its pieces, so these are few; all
        other batches get enough pipeline stages to keep the memory busy."""
        if self._segment:
            return self._fixed_config(self._group)
        tiles = query_tiles(self._group)
        if self._shared or tiles != _ONE_TILE:
            return self._config_of_tiles(tiles)
        if self._keys.element_size() > 2:
            return DecodeConfig(32, self._num_workers(2), 4, 2, self._launch_pdl)
        if self._wide:
            return DecodeConfig(32, self._num_workers(2), 4, 3, self._launch_pdl)
        if batch == 1:
            if self._large_blocks:
                return DecodeConfig(128, self._num_workers(1), 4, 1, self._launch_pdl)
            return DecodeConfig(32, self._num_workers(2), 2, 1, self._launch_pdl)
        if 8 < batch <= 16 and self._large_blocks:
            return DecodeConfig(128, self._num_workers(1), 8, 5, self._launch_pdl)
        return DecodeConfig(64, self._num_workers(2), 4, 5, self._launch_pdl)

    def verify_config(self, batch: int, num_queries: int, group: int, is_chain: bool = True) -> DecodeConfig:
        """How a verify step is divided. Each request has ``num_queries`` queries, and ``group`` query heads share a KV
        head. A tile of 16 rows takes as long as in decode."""
        if self._segment:
            return self._fixed_config(num_queries * group if is_chain else group)
        tiles = query_tiles(num_queries * group)
        if tiles == _ONE_TILE:
            return self.decode_config(batch)
        return self._config_of_tiles(tiles)

    def _config_of_tiles(self, tiles: tuple[int, int]) -> DecodeConfig:
        """How a decode or verify step is divided whose query rows make ``tiles``."""
        if self._shared:
            # The sums of 64 rows fill the registers of eight warps, those of 32 rows half of that.
            is_large = tiles[1] == 64 or self._keys.element_size() > 2
            num_workers = max(self._num_workers(1 if is_large else _LATENT_WORKERS_PER_SM) // tiles[0], 1)
            # FP8 rows wait in stages of their own before they are converted.
            in_fp8 = self._keys.element_size() == 1
            block_n, num_stages = (64, 3 if in_fp8 else 2) if tiles[1] == 64 else (32, 3)
            if self._keys.element_size() > 2:
                block_n, num_stages = 16, 1
            return DecodeConfig(
                block_n, num_workers, 8 if is_large else 4, num_stages, self._launch_pdl,
                min_blocks=_LATENT_MIN_TOKENS // block_n, merge_apart=True,
            )  # fmt: skip
        num_workers = max(self._num_workers(2) // tiles[0], 1)
        if self._keys.element_size() > 2:
            return DecodeConfig(32, num_workers, 4, 2, self._launch_pdl)
        if self._wide:
            return DecodeConfig(32, num_workers, 8, 2, self._launch_pdl)
        return DecodeConfig(64, num_workers, 4, 3, self._launch_pdl)

    def _fixed_config(self, num_rows: int) -> DecodeConfig:
        """How any decode or verify step is divided in a fixed order: like a prefill, so that tiles of 64 rows are
        multiplied by the same instructions and rows are added up by as many threads."""
        block_n, num_warps, num_stages = self._fixed_blocks
        num_workers = self._workspace(num_rows).max_workers
        return DecodeConfig(block_n, num_workers, num_warps, num_stages, self._launch_pdl, segment=self._segment)

    @property
    def _fixed_blocks(self) -> tuple[int, int, int]:
        """Keys of a block, warps and stages of a tile of 64 rows in a fixed order."""
        if self._keys.element_size() > 2:
            return 32, 4, 2
        return (32, 8, 2) if self._wide else (64, 4, 3)

    def extend_config(self, max_rows: int) -> ExtendConfig:
        """How a prefill is divided whose longest request has ``max_rows`` query rows for each KV head."""
        if self._segment:
            block_n, num_warps, num_stages = self._fixed_blocks
            tiles = 2 if max_rows > 64 and block_n == 64 else 1  # twice the rows take twice the warps
            return ExtendConfig(64 * tiles, block_n, num_warps * tiles, num_stages, self._segment)
        if self._shared:
            if self._keys.element_size() > 2:
                return ExtendConfig(16, 16, 4, 1)
            return ExtendConfig(64, 64, 8, 3 if self._keys.element_size() == 1 else 2)
        if self._keys.element_size() > 2:
            return ExtendConfig(32, 32, 4, 2)
        if self._wide:
            return ExtendConfig(16, 32, 4, 3) if max_rows <= 16 else ExtendConfig(64, 32, 8, 2)
        if max_rows <= 16:
            return ExtendConfig(16, 64, 4, 5)
        if max_rows <= 64:
            return ExtendConfig(64, 64, 4, 3)
        return ExtendConfig(128, 64, 8, 3)

    def plan_new(self, query_lens_cpu: npt.NDArray[np.int64], starts: torch.Tensor) -> AttendNew:
        """See ``AttentionBackend.plan_new``. k and v are a pool whose slots are the tokens."""
        longest = torch.arange(int(query_lens_cpu.max()), dtype=torch.int32, device=starts.device)
        rows = torch.arange(len(query_lens_cpu), device=starts.device)
        requests = PagedRequests(starts[:-1].unsqueeze(1) + longest, rows, starts.diff().long(), 1)
        return partial(self._attend_new, query_lens_cpu, starts, requests)

    def _attend_new(
        self,
        query_lens_cpu: npt.NDArray[np.int64],
        starts: torch.Tensor,
        requests: PagedRequests,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        config, heads = self.new_config(v), (q.shape[1], q.shape[1])
        grid = extend_grid(query_lens_cpu, query_lens_cpu, heads, config, self.num_sms)
        return extend_attention(q, k, v, requests, starts, grid, scale, config)[..., : v.shape[2]]

    def new_config(self, v: torch.Tensor) -> ExtendConfig:
        """How attention of new prompts with values ``v`` is divided. Keys may have more features than values."""
        if v.element_size() > 2:
            return ExtendConfig(32, 32, 4, 2)
        return ExtendConfig(128, 128, 8, 2) if v.shape[2] <= 128 else ExtendConfig(128, 64, 8, 2)

    def attend_to(
        self, slots: torch.Tensor, counts: torch.Tensor, layer_id: int, q: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention of T queries, of each to the first ``counts`` [T] int64 of its ``slots`` [T, most] int32, like
        ``AttentionPlan.forward``. A list is the pages of one token of a request that has one query. Nothing is read
        before the preceding kernel, which may have written the lists, has ended."""
        rules, out = self.rules[layer_id], torch.empty(q.shape, dtype=q.dtype, device=q.device)
        keys, values = (self.kv_pool.row(layer_id, name) for name in rules.rows)
        for first in range(0, len(q), _MOST_LISTS):
            some = slice(first, min(first + _MOST_LISTS, len(q)))
            num = some.stop - first
            lists = PagedRequests(slots[some], self._lists[:num], counts[some], 1)
            config = replace(self.decode_config(num), launch_pdl=False)
            decode_attention(q[some], keys, values, lists, scale, self.workspace, config, rules=rules, out=out[some])
        return out

    def attend_to_blocks(
        self,
        scores: torch.Tensor,
        requests: PagedRequests,
        blocks: BlocksConfig,
        layer_id: int,
        q: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Attention of T queries, each a request of its own, to the tokens that they choose by ``scores`` (see
        ``score_blocks``) with each key head. A list is the pages of one token of a request with one key head, whose
        keys are those of the pool with the heads as further slots."""
        num_kv_heads = self._keys.shape[1]
        heads = q.contiguous().view(len(q) * num_kv_heads, -1, q.shape[2])
        out, step = torch.empty_like(heads), max(_MOST_LISTS // num_kv_heads, 1)
        keys, values = (self.kv_pool.row(layer_id, name).view(-1, 1, q.shape[2]) for name in ("k", "v"))
        workspace = self._workspace(self._group, 1)
        for first in range(0, len(q), step):
            num = min(step, len(q) - first)
            slots, counts = choose_blocks(scores, requests, blocks, first, num)
            some = slice(first * num_kv_heads, (first + num) * num_kv_heads)
            lists = PagedRequests(slots, self._lists[: len(slots)], counts, 1)
            config = self.decode_config(len(slots))
            num_workers = min(config.num_workers * num_kv_heads, workspace.max_workers)
            config = replace(config, launch_pdl=False, num_workers=num_workers)
            decode_attention(heads[some], keys, values, lists, scale, workspace, config, out=out[some])
        return out.view(q.shape)

    def _plan_decode(self, requests: PagedRequests, longest: int) -> AttentionPlan:
        config = self.decode_config(len(requests.rows))
        return _DecodePlan(self, requests, longest, self.workspace, config, QueryTree(1, 1))

    def _workspace(self, num_rows: int, num_kv_heads: int | None = None) -> DecodeWorkspace:
        """The workspace for ``num_rows`` query rows of a request and KV head. ``num_kv_heads``: the pool's unless
        given."""
        num_kv_heads = num_kv_heads or self._keys.shape[1]
        fixed = self._segment > 0
        tiles = query_tiles(num_rows, fixed)
        rows = min(1 << (num_rows - 1).bit_length(), tiles[1]) if fixed else tiles[1]
        if (tiles, rows, num_kv_heads) not in self._workspaces:
            per_sm = _LATENT_WORKERS_PER_SM if self._shared else _MAX_WORKERS_PER_SM
            per_sm = _FIXED_WORKERS_PER_SM if fixed else per_sm
            head_dim = self._value_dim
            max_workers = self._num_workers(per_sm) * self._keys.shape[1] // num_kv_heads // tiles[0]
            if fixed:
                of_worker = 4 * tiles[0] * num_kv_heads * self._max_segments * rows * head_dim
                max_workers = min(max_workers, _FIXED_WORKSPACE_BYTES // of_worker)
            max_workers = max(max_workers, 1)
            self._workspaces[tiles, rows, num_kv_heads] = DecodeWorkspace(
                num_kv_heads, head_dim, max_workers, self._keys.device, tiles, self._max_segments, rows
            )
        return self._workspaces[tiles, rows, num_kv_heads]

    def _num_workers(self, workers_per_sm: int) -> int:
        return max(self.num_sms * workers_per_sm // self._keys.shape[1], 1)


class _Plan(AttentionPlan):
    """A plan in which queries may attend to selected tokens, as lists of slots and their lengths; no list if the
    queries see no more tokens than are to be selected."""

    def __init__(self, backend: TritonAttentionBackend, longest: int) -> None:
        """No request has more than ``longest`` tokens."""
        self._backend, self._longest = backend, longest
        self._blocks: BlocksConfig | None = None  # of the latest scores

    @abstractmethod
    def _queries(self) -> tuple[PagedRequests, QueryTree]:
        """The queries as those of requests that have the same number of them."""

    def forward(self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        return self._run(layer_id, q, scale, None)

    def forward_into(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        self._run(layer_id, q, scale, out)

    @abstractmethod
    def _run(self, layer_id: int, q: torch.Tensor, scale: float, out: torch.Tensor | None) -> torch.Tensor:
        """See ``forward``; keys and values are read from the pool. ``out``: where the result goes, if given."""

    def select(self, layer_id: int, index: IndexQueries) -> Sequence[torch.Tensor]:
        assert index.best is first_of_best, "the kernel has no other order (guard tie_order)"
        if self._longest <= index.top_k:
            return ()
        rows, num_sms = self._backend.kv_pool.row(layer_id, INDEX), self._backend.num_sms
        return select_tokens(index, rows, *self._queries(), self._longest, num_sms)

    def select_blocks(self, layer_id: int, wanted: BlockQueries) -> Sequence[torch.Tensor]:
        """The scores by which ``forward_selected`` chooses; none if a query attends to all tokens."""
        assert wanted.best is first_of_best, "the kernel has no other order (guard tie_order)"
        self._blocks = wanted.blocks
        if self._longest <= wanted.blocks.top_k * wanted.blocks.size:
            return ()
        (requests, tree), backend = self._queries(), self._backend
        assert tree.num_queries == 1, "the queries of a verify step select no blocks"
        means, fixed = backend.kv_pool.row(layer_id, INDEX), backend._segment > 0
        return (score_blocks(wanted, means, requests, self._longest, backend.num_sms, fixed),)

    def forward_selected(
        self,
        layer_id: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        tokens: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        if not tokens:
            return self.forward(layer_id, q, k, v, scale)
        if self._blocks is not None:
            requests, _ = self._queries()
            return self._backend.attend_to_blocks(tokens[0], requests, self._blocks, layer_id, q, scale)
        slots, counts = tokens
        return self._backend.attend_to(slots, counts, layer_id, q, scale)


class _DecodePlan(_Plan):
    """One query for each request, or the few queries of a verify step; eager or in a graph."""

    def __init__(
        self,
        backend: TritonAttentionBackend,
        requests: PagedRequests,
        longest: int,
        workspace: DecodeWorkspace,
        config: DecodeConfig,
        tree: QueryTree,
    ) -> None:
        super().__init__(backend, longest)
        self.requests = requests
        self.workspace = workspace
        self.config = config
        self.tree = tree

    def _queries(self) -> tuple[PagedRequests, QueryTree]:
        return self.requests, self.tree

    def _run(self, layer_id: int, q: torch.Tensor, scale: float, out: torch.Tensor | None) -> torch.Tensor:
        pool, rules = self._backend.kv_pool, self._backend.rules.get(layer_id, PLAIN)
        keys, values = (pool.row(layer_id, name) for name in rules.rows)
        how = self.workspace, self.config, self.tree, rules, out
        return decode_attention(q, keys, values, self.requests, scale, *how)


class _ExtendPlan(_Plan):
    """Any number of queries for each request, after a prefix that is in the pool."""

    def __init__(self, backend: TritonAttentionBackend, requests: PagedRequests, inputs: AttentionInputs) -> None:
        super().__init__(backend, int(inputs.seq_lens_cpu.max()))
        self._requests = requests
        self._inputs = inputs
        # Computed by the first layer that needs them, used by all.
        self._cut: tuple[ExtendConfig, ExtendGrid] | None = None
        self._each: PagedRequests | None = None  # every query as a request of its own

    def _queries(self) -> tuple[PagedRequests, QueryTree]:
        if self._each is None:
            rows, seq_lens = self._inputs.each_query()
            self._each = replace(self._requests, rows=rows, seq_lens=seq_lens)
        return self._each, QueryTree(1, 1)

    def _run(self, layer_id: int, q: torch.Tensor, scale: float, out: torch.Tensor | None) -> torch.Tensor:
        pool, query_starts = self._backend.kv_pool, self._inputs.query_starts
        rules = self._backend.rules.get(layer_id, PLAIN)
        keys, values = (pool.row(layer_id, name) for name in rules.rows)
        if self._cut is None:
            lens = self._inputs.query_lens_cpu
            config = self._backend.extend_config(int(lens.max()) * (q.shape[1] // keys.shape[1]))
            heads = q.shape[1], keys.shape[1]
            num_sms, window = self._backend.num_sms, self._backend.window
            grid = extend_grid(lens, self._inputs.seq_lens_cpu, heads, config, num_sms, window)
            self._cut = config, grid
        config, grid = self._cut
        assert query_starts is not None
        return extend_attention(q, keys, values, self._requests, query_starts, grid, scale, config, out, rules)
