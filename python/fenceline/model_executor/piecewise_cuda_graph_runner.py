"""PiecewiseCudaGraphRunner: prefill steps whose stretches between attention calls are captured, for a list of sizes.

Attention depends on the requests' lengths and runs as it is planned for each batch; everything else depends on the
number of tokens alone. A step of few tokens takes the GPU less time than launching its kernels takes the CPU, so it runs
in the smallest captured size that holds its tokens, the rest padded::

    piece 0    embedding, layer 0 until attention        graph
    attention of layer 0, of the step's tokens alone     launched
    piece 1    layer 0 from there, layer 1 until ...     graph
    ...        and the last piece ends the last layer

Padded tokens write the sink and read rows of their own, which are zeroed before each step where attention, which leaves
them out, would have written.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Sequence

import torch
from tqdm import tqdm

from fenceline.layers.forward_batch import ForwardBatch
from fenceline.layers.kernels.base import LayerKernels
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.memory_order import Arena, ArenaField, Device, Graph, GraphPool, Role
from fenceline.memory_order.guards import SINK
from fenceline.model_executor.cuda_graph_runner import GraphMismatch, GraphStats
from fenceline.models.decoder import CausalLM, DecoderLayer

logger = logging.getLogger(__name__)

_SINK_SLOT = 0


class PiecewiseCudaGraphRunner:
    """The captured sizes of one model's prefill. Owns their pool; what the pieces hand each other is the arena's."""

    def __init__(
        self,
        device: Device,
        model: CausalLM,
        kernels: LayerKernels,
        kv_pool: KVPool,
        sizes: Sequence[int],
        debug: bool = False,
    ) -> None:
        """``sizes``: ascending numbers of tokens. Nothing is captured before :meth:`capture`."""
        assert list(sizes) == sorted(set(sizes)), "sizes ascend"
        self.stats = GraphStats(replays_by_size={str(size): 0 for size in sizes})
        self._device = device
        self._model = model
        self._kernels = kernels
        self._kv_pool = kv_pool
        self._sizes = list(sizes)
        self._debug = debug
        self._layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
        self._pieces: dict[int, list[Graph]] = {}
        self._addresses = self._named()
        heads, dtype = self._layers[0].params.heads, kv_pool.k(0).dtype
        # Severed, padding writes the last slot, which is somebody's (F18).
        sink = _SINK_SLOT if device.keeps(SINK) else len(kv_pool.k(0)) - 1
        attended = heads.num_heads * heads.head_dim
        self._arena = Arena(
            device,
            "prefill",
            sizes[-1],
            (
                ArenaField("input_ids", torch.int64, Role.PLAN, pad=0),
                ArenaField("positions", torch.int64, Role.PLAN, pad=0),
                ArenaField("out_slots", torch.int64, Role.PLAN, pad=sink),
                ArenaField("attended", dtype, Role.INPUT, pad=0, shape=(attended,)),
                ArenaField(
                    "qkv",
                    dtype,
                    Role.OUTPUT,
                    pad=0,
                    shape=(attended + 2 * heads.num_kv_heads * heads.head_dim,),
                ),
                ArenaField("hidden", dtype, Role.OUTPUT, pad=0, shape=(model.config.hidden_size,)),
            ),
        )

    def capture(self, show_progress: bool) -> None:
        """Capture every size, the largest first so that smaller ones fit into its memory. Waits for the device."""
        begin, (free_before, _) = time.perf_counter(), self._device.memory_info()
        pool = self._device.make_graph_pool("prefill")
        for size in tqdm(
            sorted(self._sizes, reverse=True), desc="Capturing prefill graphs", disable=not show_progress
        ):
            with self._device.forward.active():  # compiles and sets up what a first call does, in the sink
                for piece in range(len(self._layers) + 1):
                    self._run(piece, size)
            self._device.synchronize()
            self._pieces[size] = [self._capture(piece, size, pool) for piece in range(len(self._layers) + 1)]
            for graph in self._pieces[size]:
                graph.register()  # one rank: nobody else has to know an address
        for pieces in self._pieces.values():
            for graph in pieces:
                graph.allow_replay()
        self._device.synchronize()
        self.stats.capture_bytes = max(free_before - self._device.memory_info()[0], 0)
        self.stats.capture_s = time.perf_counter() - begin
        logger.info(
            "Captured prefill graphs of %d sizes up to %d tokens in %.1f s, %.2f GiB",
            *(len(self._sizes), self._sizes[-1], self.stats.capture_s, self.stats.capture_bytes / 2**30),
        )

    def _capture(self, piece: int, size: int, pool: GraphPool) -> Graph:
        return self._device.capture(f"prefill[{size}].{piece}", pool, lambda: self._run(piece, size))

    def size_for(self, num_tokens: int) -> int | None:
        """The size that a step of ``num_tokens`` is replayed in, None if it runs without graphs; total (F11)."""
        self.stats.eligible_steps += num_tokens <= self._sizes[-1]
        index = bisect.bisect_left(self._sizes, num_tokens)
        if index == len(self._sizes):
            return None
        if self._addresses != self._named():
            self.stats.fallbacks["address"] = self.stats.fallbacks.get("address", 0) + 1
            return None
        return self._sizes[index]

    def hidden_states(self, size: int, batch: ForwardBatch) -> torch.Tensor:
        """``CausalLM.hidden_states`` of a batch of at most ``size`` tokens, with FORWARD current. Good until the next
        step is submitted."""
        num_tokens = batch.num_tokens
        sources = {"input_ids": batch.input_ids, "positions": batch.positions, "out_slots": batch.out_slots}
        self._arena.fill(sources, num_tokens)
        outputs = self._arena.begin_replay()
        qkv, hidden = outputs.take("qkv", num_tokens), outputs.take("hidden", num_tokens)
        if self._debug:
            self._compare(size, batch, qkv, hidden)
        else:
            self._submit(size, batch, qkv, graphs=True)
        self.stats.replays += 1
        self.stats.replays_by_size[str(size)] += 1
        return hidden

    def _submit(self, size: int, batch: ForwardBatch, qkv: torch.Tensor, graphs: bool) -> None:
        """All pieces, with attention between them over the ``qkv`` of the batch's own tokens."""
        pieces, attn, ready = self._pieces[size], batch.attn, batch.layer_ready
        params = self._layers[0].params
        heads, scale = params.heads, params.scale
        q, k, v = heads.split(qkv)
        attended = self._arena["attended"][: len(qkv)].view(len(qkv), heads.num_heads, heads.head_dim)
        for piece, graph in enumerate(pieces):
            if ready is not None and piece < len(self._layers):
                ready(
                    piece
                )  # before the piece that stores: the last page loaded may be one the batch goes on with
            if graphs:
                graph.replay()
            else:
                self._run(piece, size)
            if piece < len(self._layers):
                attn.forward_into(piece, q, k, v, scale, attended)

    def _run(self, piece: int, size: int) -> None:
        """From attention of the layer in front (or the embedding) to attention of layer ``piece`` (or the end)."""
        arena, kernels = self._arena, self._kernels
        x = arena["hidden"][:size]
        if piece == 0:
            x.copy_(self._model.embed_tokens(arena["input_ids"][:size]))
        else:
            self._layers[piece - 1].after_attention(x, arena["attended"][:size], kernels)
        if piece < len(self._layers):
            qkv = self._layers[piece].before_attention(x, kernels, arena["qkv"][:size])
            positions, out_slots = arena["positions"][:size], arena["out_slots"][:size]
            p, k_cache, v_cache = self._layers[piece].params, self._kv_pool.k(piece), self._kv_pool.v(piece)
            table = self._model.rotary.table
            kernels.rotate_and_store(qkv, p.heads, p.norms, table, positions, k_cache, v_cache, out_slots)

    def _compare(self, size: int, batch: ForwardBatch, qkv: torch.Tensor, hidden: torch.Tensor) -> None:
        """``--debug-cuda-graph``: the step without its graphs, then with them; every bit must agree."""
        self._submit(size, batch, qkv, graphs=False)
        expected = hidden.clone()
        self._submit(size, batch, qkv, graphs=True)
        self._device.synchronize()
        wrong = torch.nonzero((hidden != expected).any(1)).flatten().tolist()
        if wrong:
            raise GraphMismatch(
                f"prefill[{size}]: hidden states of tokens {wrong[:8]} differ: {hidden[wrong[0], :4].tolist()} by "
                f"replay, {expected[wrong[0], :4].tolist()} without the graphs"
            )

    def _named(self) -> Sequence[int]:
        """Where the memory lies that captured graphs have baked in beside the weights and the arena."""
        return [self._kv_pool.k(0).data_ptr(), self._kv_pool.v(0).data_ptr()]
