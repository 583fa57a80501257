"""PiecewiseCudaGraphRunner: prefill steps as CUDA graphs of the pieces between attention calls, for a list of sizes.

Attention depends on the requests' lengths and is launched as planned for each batch; so is what a recurrent layer
computes from its states, which is its attention here. Everything else depends on the number of tokens only. For a step
of few tokens, launching each kernel takes the CPU longer than the GPU needs to run them. So such a step is replayed in
the smallest captured size that holds its tokens, and the other rows are padded::

    piece 0    embedding, layer 0 until attention        graph
    attention of layer 0, of the step's tokens alone     launched
    piece 1    layer 0 from there, layer 1 until ...     graph
    ...        and the last piece ends the last layer

Padded tokens write their KV to the sink. Attention leaves them out, so the rows of its output that belong to them are
zeroed before each step. Final norm and head run without a graph, on the few rows whose logits are needed.
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
    ImageRows,
    PieceBuffers,
)
from fenceline.memory_order import Arena, ArenaField, Graph, GraphPool, Role
from fenceline.memory_order.edges import SINK
from fenceline.model_executor.graph_runner import GraphMismatch, GraphRunner
from fenceline.model_executor.parts import Parts

Piece = Callable[[], None]
_AUX = "aux_hidden"


@dataclass(frozen=True, slots=True)
class _Captured:
    """The graphs of one size. ``graphs[i]`` is the piece before attention of layer i; the last follows all of them."""

    graphs: Sequence[Graph]
    replays: list[Piece]  # the functions that replay these graphs


class PiecewiseCudaGraphRunner(GraphRunner):
    """Runs the prefill steps of one model, with graphs where there are any. It owns the graphs' memory pool. Values
    that pass from one piece to the next are in the arena."""

    def __init__(self, parts: Parts, sizes: Sequence[int], aux_layers: tuple[int, ...] = ()) -> None:
        """``sizes`` are ascending numbers of tokens. ``aux_layers`` are the ``layers`` of ``ForwardBatch.aux_hidden``,
        empty if batches have none. Nothing is captured before :meth:`capture`."""
        device, model = parts.device, parts.model
        super().__init__(device, "prefill", "tokens", sizes)
        self._model = model
        self._kv_pool = parts.kv_pool
        self._debug = parts.config.server_args.debug_cuda_graph
        self._compares = False
        self._captured: dict[int, _Captured] = {}
        self._aux_layers = aux_layers
        self._states = parts.states
        self._embeddings = None if parts.embeddings is None else parts.embeddings.rows
        self._has_axes = model.config.moves_positions
        self.arena = Arena(device, "prefill", sizes[-1], (*self._plan_fields(), *model.arena_fields()))
        self._outputs = [f.name for f in self.arena.fields.values() if f.role is Role.OUTPUT]
        self._inputs = [f.name for f in self.arena.fields.values() if f.role is Role.INPUT]

    def _plan_fields(self) -> Sequence[ArenaField]:
        aux = (len(self._aux_layers) * self._model.config.hidden_size,)
        angles = self._model.rotary.table.shape[1:]
        return (
            ArenaField("input_ids", torch.int64, Role.PLAN, pad=0),
            ArenaField("positions", torch.int64, Role.PLAN, pad=0),
            ArenaField("out_slots", torch.int64, Role.PLAN, pad=SINK),
            *([ArenaField("image_rows", torch.int64, Role.PLAN, pad=SINK)] if self._embeddings is not None else ()),
            *([ArenaField("angles", torch.float32, Role.PLAN, pad=0, shape=angles)] if self._has_axes else ()),
            *([ArenaField(_AUX, self._model.context.dtype, Role.OUTPUT, pad=0, shape=aux)] if self._aux_layers else ()),
        )

    def addresses(self) -> Sequence[int]:
        embeddings = () if self._embeddings is None else (self._embeddings,)
        return [tensor.data_ptr() for tensor in (*self._kv_pool.rows[0].values(), *embeddings)]

    def capture(self, show_progress: bool) -> None:
        """Capture every size, and replay each graph once. Waits for the device."""
        self._capture_sizes(self._capture_size, show_progress)
        for captured in self._captured.values():
            captured.replays.extend(graph.bind() for graph in captured.graphs)
            # The first replay of a graph uploads it to the device; no request should wait for that.
            with self._device.forward.active():
                for replay in captured.replays:
                    replay()
        self._device.synchronize()

    def size_for(self, num: int) -> int | None:
        """The captured size in which a step of ``num`` tokens is replayed, None if it runs without graphs. Defined for
        every ``num`` (F11). Steps larger than the largest size are not meant to use graphs, so they count neither as
        eligible nor as a fallback."""
        if num > self._sizes[-1]:
            return None
        self.stats.eligible_steps += 1
        return super().size_for(num)

    def hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        """``CausalLM.hidden_states`` [T, hidden_size] of ``batch``, with graphs if there are some for T tokens. FORWARD
        must be current. The result is valid until the next step is submitted."""
        num_tokens = batch.num_tokens
        size = self.size_for(num_tokens)
        if size is None or not self.fits():
            return self._model.hidden_states(batch)
        self.arena.fill(self._sources(batch), num_tokens, max(size, num_tokens))
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

    def _sources(self, batch: ForwardBatch) -> Mapping[str, torch.Tensor]:
        """The values of the PLAN fields for ``batch``."""
        sources = {"input_ids": batch.input_ids, "positions": batch.positions[0], "out_slots": batch.out_slots}
        if self._embeddings is not None:
            images = batch.images
            sources["image_rows"] = torch.zeros_like(batch.input_ids) if images is None else images.rows
        if self._has_axes:
            in_all = batch.positions if len(batch.positions) > 1 else batch.positions * 3
            placed = self._model.rotary.placed(replace(batch, positions=in_all))
            assert placed.angles is not None, "positions have several axes"
            sources |= {"positions": placed.positions[0], "angles": placed.angles}
        return sources

    def begin_serving(self) -> None:
        """From now on count steps and, with ``--debug-cuda-graph``, compare them. Steps of the warm-up cannot be
        compared: all their tokens write to the sink's one slot, and it is undefined which of them is written last."""
        self.stats.restart()
        self._compares = self._debug

    def _submit(self, pieces: Sequence[Piece], batch: ForwardBatch) -> None:
        """Submit all pieces, and between them attention of the batch's tokens (without padding)."""
        attend, ready = self._model.attend, batch.layer_ready
        for index, layer in enumerate(self._model.layers):
            if ready is not None and layer.self_attn.state_spec is None:
                # Wait before the piece that stores this layer's KV: it may write to a page that is still being loaded.
                ready(layer.self_attn.layer_id)
            pieces[index]()
            attend(index, batch)
        pieces[-1]()

    def _capture_size(self, pool: GraphPool, size: int) -> Sequence[Graph]:
        pieces = self._pieces(size)
        # The first call compiles and initialises kernels. The arena holds padding, so only the sink is written.
        with self._device.forward.active():
            for piece in pieces:
                piece()
        self._device.synchronize()
        graphs = [self._device.capture(f"prefill[{size}].{index}", pool, piece) for index, piece in enumerate(pieces)]
        self._captured[size] = _Captured(graphs, [])
        return graphs

    def _pieces(self, size: int) -> list[Piece]:
        """Functions that run the model's pieces on the first ``size`` rows of the arena."""
        rows = {name: self.arena[name][:size] for name in self.arena.fields}
        batch = ForwardBatch(
            mode=ForwardMode.EXTEND,
            input_ids=rows["input_ids"],
            positions=(rows["positions"],),
            out_slots=rows["out_slots"],
            logits_index=None,
            attn=_NoAttention(),
            kv_pool=self._kv_pool,
            buffers=PieceBuffers(rows),
            images=None if self._embeddings is None else ImageRows(rows["image_rows"], self._embeddings),
            angles=rows.get("angles"),
            aux_hidden=AuxHiddenStates(self._aux_layers, rows[_AUX]) if self._aux_layers else None,
        )
        return [partial(self._model.run_piece, index, batch) for index in range(self._model.num_layers + 1)]

    def _compare(self, size: int, batch: ForwardBatch, outputs: Mapping[str, torch.Tensor]) -> None:
        """``--debug-cuda-graph``: run the step without graphs and then with them. Raises ``GraphMismatch`` unless all
        ``outputs`` are equal bit by bit."""
        states = () if self._states is None else self._states.of_rows
        before = [tensor.clone() for tensor in states]
        self._submit(self._pieces(size), batch)
        eager = {name: output.clone() for name, output in outputs.items()}
        for tensor, values in zip(states, before, strict=True):
            tensor.copy_(values)
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
    """The attention plan of captured pieces, which never call attention."""

    def forward(self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        raise AssertionError("attention is in no piece")
