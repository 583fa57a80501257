"""PiecewiseCudaGraphRunner: prefill steps whose stretches between attention calls are captured, for a list of sizes.

Attention depends on the requests' lengths and runs as it is planned for each batch; everything else depends on the
number of tokens alone. A step of few tokens takes the CPU longer to launch, kernel by kernel, than it takes the GPU, so
it runs in the smallest captured size that holds its tokens, the rest padded::

    piece 0    embedding, layer 0 until attention        graph
    attention of layer 0, of the step's tokens alone     launched
    piece 1    layer 0 from there, layer 1 until ...     graph
    ...        and the last piece ends the last layer

Padded tokens write the sink and read rows of their own, which are zeroed before each step where attention, which leaves
them out, would have written. Final norm and head run on the few rows that are asked for, without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from fenceline.layers.forward_batch import (
    AttentionPlan,
    AuxHiddenStates,
    ForwardBatch,
    ForwardMode,
    PieceBuffers,
)
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.memory_order import Arena, ArenaField, Device, Graph, GraphPool, Role
from fenceline.memory_order.edges import SINK
from fenceline.model_executor.graph_runner import GraphMismatch, GraphRunner
from fenceline.models.decoder import CausalLM

Piece = Callable[[], None]
_AUX = "aux_hidden"


@dataclass(frozen=True, slots=True)
class _Captured:
    """One size. ``graphs[i]`` is what precedes attention of layer i, the last what follows all of it."""

    graphs: Sequence[Graph]
    replays: list[Piece]  # of these graphs


class PiecewiseCudaGraphRunner(GraphRunner):
    """The captured sizes of one model's prefill. Owns their pool; what the pieces hand each other is the arena's."""

    def __init__(
        self,
        device: Device,
        model: CausalLM,
        kv_pool: KVPool,
        sizes: Sequence[int],
        debug: bool = False,
        aux_layers: tuple[int, ...] = (),
    ) -> None:
        """``sizes``: ascending numbers of tokens. ``aux_layers``: the ``layers`` of ``ForwardBatch.aux_hidden``, if
        batches have it. Nothing is captured before :meth:`capture`."""
        super().__init__(device, "prefill", "tokens", sizes)
        self._model = model
        self._kv_pool = kv_pool
        self._debug = debug
        self._compares = False
        self._captured: dict[int, _Captured] = {}
        self._aux_layers = aux_layers
        self.arena = Arena(device, "prefill", sizes[-1], (*self._plan_fields(), *model.arena_fields()))
        self._outputs = [f.name for f in self.arena.fields.values() if f.role is Role.OUTPUT]
        self._inputs = [f.name for f in self.arena.fields.values() if f.role is Role.INPUT]

    def _plan_fields(self) -> Sequence[ArenaField]:
        aux = (len(self._aux_layers) * self._model.config.hidden_size,)
        return (
            ArenaField("input_ids", torch.int64, Role.PLAN, pad=0),
            ArenaField("positions", torch.int64, Role.PLAN, pad=0),
            ArenaField("out_slots", torch.int64, Role.PLAN, pad=SINK),
            *(
                [ArenaField(_AUX, self._model.context.dtype, Role.OUTPUT, pad=0, shape=aux)]
                if self._aux_layers
                else ()
            ),
        )

    def addresses(self) -> Sequence[int]:
        """See ``GraphRunner.addresses``."""
        return [self._kv_pool.k(0).data_ptr(), self._kv_pool.v(0).data_ptr()]

    def capture(self, show_progress: bool) -> None:
        """Capture every size. Waits for the device."""
        self._capture_sizes(self._capture_size, show_progress)
        for captured in self._captured.values():
            captured.replays.extend(graph.bind() for graph in captured.graphs)
            # A graph is uploaded to the device when it is first replayed.
            with self._device.forward.active():
                for replay in captured.replays:
                    replay()
        self._device.synchronize()

    def size_for(self, num: int) -> int | None:
        """The size that a step of ``num`` tokens is replayed in, None if it runs without graphs; total (F11).

        Steps beyond the largest are not meant for graphs, so they count neither as eligible nor as a fallback."""
        if num > self._sizes[-1]:
            return None
        self.stats.eligible_steps += 1
        return super().size_for(num)

    def hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        """``CausalLM.hidden_states`` [T, hidden_size], by graphs where there are some for so many tokens, with FORWARD
        current. Good until the next step is submitted."""
        num_tokens = batch.num_tokens
        size = self.size_for(num_tokens)
        if size is None or not self.fits():
            return self._model.hidden_states(batch)
        sources = {"input_ids": batch.input_ids, "positions": batch.positions, "out_slots": batch.out_slots}
        self.arena.fill(sources, num_tokens, max(size, num_tokens))
        outputs = self.arena.begin_replay()
        tensors = {name: outputs.take(name, num_tokens) for name in (*self._outputs, *self._inputs)}
        batch = replace(batch, buffers=PieceBuffers(tensors))
        if self._compares:
            self._compare(size, batch, {name: tensors[name] for name in self._outputs})
        else:
            self._submit(self._captured[size].replays, batch)
        self.stats.count_replay(size)
        if batch.aux_hidden is not None:
            batch.aux_hidden.out.copy_(tensors[_AUX])
        return tensors["hidden"]

    def begin_serving(self) -> None:
        """Count, and with ``--debug-cuda-graph`` compare, from now on. Not before: all tokens of a warm-up's step go to
        the sink, where it is undefined which of them stays."""
        self.stats.restart()
        self._compares = self._debug

    def _submit(self, pieces: Sequence[Piece], batch: ForwardBatch) -> None:
        """All pieces, with attention of the batch's own tokens between them."""
        attend, ready = self._model.attend, batch.layer_ready
        for layer_id in range(self._model.num_layers):
            if ready is not None:
                # Before the piece that stores: it may go on with the page that was loaded last.
                ready(layer_id)
            pieces[layer_id]()
            attend(layer_id, batch)
        pieces[-1]()

    def _capture_size(self, pool: GraphPool, size: int) -> Sequence[Graph]:
        pieces = self._pieces(size)
        # The first call compiles kernels and sets them up. It uses only the sink.
        with self._device.forward.active():
            for piece in pieces:
                piece()
        self._device.synchronize()
        graphs = [
            self._device.capture(f"prefill[{size}].{index}", pool, piece)
            for index, piece in enumerate(pieces)
        ]
        self._captured[size] = _Captured(graphs, [])
        return graphs

    def _pieces(self, size: int) -> list[Piece]:
        """The model's pieces over the first ``size`` rows of the arena."""
        rows = {name: self.arena[name][:size] for name in self.arena.fields}
        batch = ForwardBatch(
            mode=ForwardMode.EXTEND,
            input_ids=rows["input_ids"],
            positions=rows["positions"],
            out_slots=rows["out_slots"],
            logits_index=None,
            attn=_NoAttention(),
            kv_pool=self._kv_pool,
            buffers=PieceBuffers(rows),
            aux_hidden=AuxHiddenStates(self._aux_layers, rows[_AUX]) if self._aux_layers else None,
        )
        return [partial(self._model.run_piece, index, batch) for index in range(self._model.num_layers + 1)]

    def _compare(self, size: int, batch: ForwardBatch, outputs: Mapping[str, torch.Tensor]) -> None:
        """``--debug-cuda-graph``: the step without its graphs, then with them; every bit must agree."""
        self._submit(self._pieces(size), batch)
        eager = {name: output.clone() for name, output in outputs.items()}
        self._submit([graph.replay for graph in self._captured[size].graphs], batch)
        self._device.synchronize()
        for name, replayed in outputs.items():
            expected = eager[name]
            rows = torch.nonzero((replayed != expected).any(1)).flatten().tolist()
            if rows:
                raise GraphMismatch(
                    f"prefill[{size}]: {name} of rows {rows[:8]} differs: {replayed[rows[0], :4].tolist()} by replay, "
                    f"{expected[rows[0], :4].tolist()} without the graphs"
                )


class _NoAttention(AttentionPlan):
    """Pieces are what lies between attention calls."""

    def forward(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        raise AssertionError("attention is in no piece")
