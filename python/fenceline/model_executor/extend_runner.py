"""ExtendRunner: steps with chunks of prompts, whose inputs are uploaded as a whole.

Behind the chunks a step may have rows that decode. The ids of their tokens, and the slots, are derived on the device,
as in a decode step. All tokens go through the layers together, so that weights are read once, and only attention is
computed apart.

It is the counterpart of DecodeRunner, which runs from an arena. Small steps are replayed in pieces if there are
graphs of them (``piecewise_cuda_graph_runner``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from fenceline.config.engine_config import EngineConfig
from fenceline.layers.attention.base import plan_extend
from fenceline.layers.forward_batch import SINK_ROW, AttentionInputs, ForwardBatch, ForwardMode, ImageRows
from fenceline.layers.recurrent_state import StateRows, StateStep
from fenceline.mem_cache.host.cache_controller import HiCacheController
from fenceline.mem_cache.page_tags import Visited, When
from fenceline.memory_order import encoded_first, write_deltas
from fenceline.memory_order.edges import StreamName
from fenceline.model_executor.decode_runner import Arrays, Logits, Views, decode_prologue
from fenceline.model_executor.drafts import Extended
from fenceline.model_executor.image_encoder import ImageEncoder
from fenceline.model_executor.parts import Parts
from fenceline.model_executor.piecewise_cuda_graph_runner import PiecewiseCudaGraphRunner
from fenceline.model_executor.speculative_runner import SpeculativeRunner
from fenceline.model_executor.step import Chunk, StepBatch, concatenated
from fenceline.model_executor.step_accesses import EXTEND_STEP
from fenceline.sampling.sampler import OutputLogprobs, prompt_logprobs
from fenceline.sampling.sampling_batch import SamplingBatch, padded_ids, sampling_arrays

# A shorter prompt gains less by the expanded form of latent attention than its further launches take.
_FEWEST_EXPANDED = 256


class ExtendRunner:
    """Runs steps with chunks on one device. All work goes to FORWARD, which must be current in :meth:`forward`."""

    def __init__(
        self,
        parts: Parts,
        graphs: PiecewiseCudaGraphRunner | None,
        speculative: SpeculativeRunner | None,
        hicache: HiCacheController | None,
    ) -> None:
        """``graphs``, ``speculative``, ``hicache``: None without graphs of pieces, a draft, a host tier."""
        self.graphs = graphs
        self._parts = parts
        self._speculative = speculative
        self._hicache = hicache
        self._encoder = None
        if parts.model.vision is not None and parts.embeddings is not None:
            together = not parts.config.server_args.enable_deterministic_inference
            self._encoder = ImageEncoder(parts.model.vision, parts.embeddings, together)
        self._least_expanded = _least_expanded(parts.config, graphs)
        # How many steps ago the lengths of rows that decode were uploaded: always in this step.
        self._no_steps = torch.zeros(
            parts.config.max_running_requests, dtype=torch.int64, device=parts.device.torch_device
        )

    def arrays(self, batch: StepBatch) -> Arrays:
        """The arrays to upload before :meth:`forward`."""
        arrays = _extend_arrays(batch)
        if self._encoder is not None:
            arrays |= _image_arrays(batch, self._parts.req_pool.position_deltas is not None)
            arrays |= self._encoder.arrays(batch.encodes)
        if self._hicache is not None and batch.loads:
            divided = self._hicache.divided(batch.loads)
            if len(divided):
                arrays["divided_pages"] = divided.astype(np.int64)
        if self._parts.page_tags is not None or self._parts.states is not None:
            arrays["starts"] = batch.starts
        return arrays if self._speculative is None else arrays | self._speculative.draft.prefill_arrays(batch)

    def forward(self, batch: StepBatch, views: Views) -> Logits:
        """Submit the forward: the KV of the chunks and of the rows that decode, and the logits of their ends and of the
        tokens that are scored, but none if all of these ends embed. ``views``: the uploaded arrays of :meth:`arrays`.
        """
        speculative = self._speculative
        attention = _extend_attention(batch, views, self._parts.req_pool.page_table)
        self._begin_penalties(batch, views)
        if "position_deltas" in views:
            deltas = self._parts.req_pool.position_deltas
            assert deltas is not None, "only a model whose images move positions has deltas"
            rows = views["rows"][: len(batch.chunks)]
            write_deltas(self._parts.device, deltas, rows, views["position_deltas"])
        if batch.num_decodes:
            self._derive_decodes(batch.num_decodes, views)
        if not batch.loads:
            self._visit_pages(views, When.BEFORE)
        forward_batch = ForwardBatch(
            mode=ForwardMode.EXTEND,
            input_ids=views["input_ids"],
            positions=tuple(views["axes"]) if "axes" in views else (views["positions"],),
            out_slots=views["out_slots"],
            logits_index=views["logits_index"],
            attn=self._parts.attention.plan_extend(attention, batch.num_decodes, self._least_expanded),
            kv_pool=self._parts.kv_pool,
            layer_ready=self._layer_ready(batch, views) if batch.loads else None,
            aux_hidden=None if speculative is None else speculative.make_aux(len(views["input_ids"])),
            images=self._image_rows(views),
            states=self._state_step(batch, views),
        )
        layers = self.graphs or self._parts.model
        read = partial(layers.hidden_states, forward_batch)
        if self._encoder is None or not batch.encodes:
            x = read()
        else:
            x = encoded_first(self._parts.device, partial(self._encoder.encode, batch.encodes, views), read)
        embeddings = values = None
        if "embed_index" in views:
            embeddings = self._parts.model.embeddings(x, views["embed_index"])
        if embeddings is None or len(embeddings) < len(views["logits_index"]):
            values = self._parts.model.own_logits(x, forward_batch)
        self._visit_pages(views, When.AFTER)
        extended = None
        if speculative is not None:
            of_draft = self._parts.draft_attention.prefill
            if attention.whole or of_draft is not self._parts.attention.prefill:
                causal = replace(attention, whole=())  # a draft's row of an image depends on what is behind it
                forward_batch = replace(forward_batch, attn=plan_extend(of_draft, causal, self._least_expanded))
            extended = Extended(forward_batch, x, views)
        for ticket in batch.loads:
            ticket.waited = True  # FORWARD has waited for it: all later submissions come after the load
        num_sampled = len(batch.sampling)
        prompts = None
        if "prompt_targets" in views:
            assert values is not None, "what embeds scores no prompt"
            fixed_order = self._parts.config.server_args.enable_deterministic_inference
            whole = self._parts.model.lm_head.whole_logits(values[num_sampled:])
            prompts = _score_prompts(batch, views, whole, fixed_order)
        if not num_sampled or values is None:  # nobody reads the tokens of requests that embed
            tokens = torch.zeros(num_sampled, dtype=torch.int64, device=self._parts.device.torch_device)
            sampling = SamplingBatch.from_views(batch.sampling, views)  # a draft draws after them
            return Logits(
                tokens=tokens, sampling=sampling, prompt_logprobs=prompts, extended=extended, embeddings=embeddings
            )
        return Logits(
            values=values[:num_sampled],
            positions=views["sample_positions"],
            rows=views["sample_rows"],
            sampling=SamplingBatch.from_views(batch.sampling, views),
            prompt_logprobs=prompts,
            extended=extended,
            embeddings=embeddings,
        )

    def _derive_decodes(self, num: int, views: Views) -> None:
        """Write the inputs of the last ``num`` tokens, each of a row that decodes."""
        req_pool = self._parts.req_pool
        rows, seq_lens = views["rows"][-num:], views["seq_lens"][-num:]
        positions = views["positions"][-num:]
        decode_prologue(
            rows,
            seq_lens,
            self._no_steps[:num],
            req_pool.page_table,
            req_pool.last_tokens,
            self._parts.kv_pool.page_size,
            seq_lens,
            positions,
            views["out_slots"][-num:],
            views["input_ids"][-num:],
        )
        if req_pool.position_deltas is not None:
            positions.copy_(req_pool.positions(positions, rows))
        if "axes" in views:
            views["axes"][:, -num:] = positions

    def _image_rows(self, views: Views) -> ImageRows | None:
        if "image_rows" not in views:
            return None
        assert self._encoder is not None, "a model without a tower has no images"
        return ImageRows(views["image_rows"], self._encoder.pool.rows)

    def _state_step(self, batch: StepBatch, views: Views) -> StateStep | None:
        pool = self._parts.states
        if pool is None:
            return None
        rows = StateRows(
            starts=views["starts"],
            absorbed=views["starts"] // pool.grid * pool.grid,
            query_starts=views["query_starts"],
            query_lens_cpu=batch.seq_lens - batch.starts,
            slots=views["rows"],
            grid=pool.grid,
        )
        if self._speculative is not None:
            self._speculative.state.absorbed[views["rows"]] = rows.absorbed_after()
        return StateStep(rows, pool.layers)

    def _visit_pages(self, views: Views, when: When, layer: int | None = None) -> None:
        """``--memory-check full``: compare the tags of the pages of the step's requests."""
        if self._parts.page_tags is not None:
            rows, starts, ends = views["rows"], views["starts"], views["seq_lens"]
            visited = Visited(rows, starts, ends, views["out_slots"], views["query_starts"])
            self._parts.page_tags.visit(visited, when, layer)

    def _layer_ready(self, batch: StepBatch, views: Views) -> Callable[[int], None]:
        """The function ``f(layer)`` that makes FORWARD wait for that layer of ``batch.loads``, and get the other ranks'
        shares of the divided pages. After the last one it declares the step's accesses, since these are of whole pages
        (all layers)."""
        assert self._hicache is not None, "without a host tier nothing is loaded"
        declare = partial(
            self._parts.device.declare, StreamName.FORWARD, EXTEND_STEP, self._parts.accesses.extend, batch
        )
        num_layers = self._parts.config.model.num_attention_layers
        ready = self._hicache.layer_ready(batch.loads, num_layers, declare, views.get("divided_pages"))
        if self._parts.page_tags is None:
            return ready

        def ready_and_right(layer: int) -> None:
            ready(layer)
            if layer < num_layers - 1:
                self._visit_pages(views, When.LAYER, layer)
            else:  # all layers of the pages have been loaded, so the step may tag those that it writes
                self._visit_pages(views, When.BEFORE)

        return ready_and_right

    def _begin_penalties(self, batch: StepBatch, views: Views) -> None:
        for index, (row, chunk) in enumerate(zip(batch.rows.tolist(), batch.chunks, strict=False)):
            if chunk.history is not None:
                prompt, output = views[f"history_prompt_{index}"], views[f"history_output_{index}"]
                self._parts.sampler.begin_request(row, prompt, output)


def _score_prompts(batch: StepBatch, views: Views, logits: torch.Tensor, fixed_order: bool) -> OutputLogprobs:
    """Logprobs of prompt tokens. ``logits`` [N, vocab_size] are not converted to float32 as a whole: for a chunk of
    8,192 tokens and a vocabulary of 150,000 that would take 5 GB."""
    top_k = max(chunk.top_logprobs for chunk in batch.chunks)
    named_ids = None
    if "prompt_named_rows" in views:
        named_ids = views["prompt_named_ids"].view(len(batch.chunks), -1)[views["prompt_named_rows"]]
    return prompt_logprobs(logits, views["prompt_targets"], top_k, named_ids, fixed_order)


def _extend_arrays(batch: StepBatch) -> Arrays:
    """The host inputs of an extend step, except its page writes. Those of rows that decode are placeholders where the
    device derives them."""
    chunks, samples = batch.chunks, batch.samples
    starts = [0, *accumulate((batch.seq_lens - batch.starts).tolist())]
    of_decodes = (np.zeros(batch.num_decodes, np.int64),) * (batch.num_decodes > 0)
    bounds = zip(batch.starts.tolist(), batch.seq_lens.tolist(), strict=True)
    arrays: Arrays = {
        "input_ids": concatenated([*[chunk.token_ids for chunk in chunks], *of_decodes]),
        "positions": concatenated([np.arange(first, end, dtype=np.int64) for first, end in bounds]),
        "out_slots": concatenated([*[chunk.out_slots for chunk in chunks], *of_decodes]),
        "rows": batch.rows,
        "seq_lens": batch.seq_lens,
        "query_starts": np.array(starts, dtype=np.int32),
        "sample_rows": batch.rows[samples],
        "sample_positions": batch.seq_lens[samples],
    }
    ends = [end - 1 for end, is_sampled in zip(starts[1:], samples.tolist(), strict=True) if is_sampled]
    logits_index, targets, named_rows = [np.array(ends, dtype=np.int64)], [], []
    for i, chunk in enumerate(chunks):
        if chunk.scored:
            logits_index.append(starts[i] + np.array(chunk.scored, dtype=np.int64))
            targets.append(_prompt_targets(chunk))
            named_rows.append(np.full(len(chunk.scored), i, dtype=np.int64))
    arrays["logits_index"] = concatenated(logits_index)
    if embeds := [end - 1 for end, chunk in zip(starts[1:], chunks, strict=False) if chunk.embeds]:
        arrays["embed_index"] = np.array(embeds, dtype=np.int64)
    if targets:
        arrays["prompt_targets"] = np.concatenate(targets)
        if any(chunk.token_ids_logprob for chunk in chunks):
            arrays["prompt_named_rows"] = np.concatenate(named_rows)
            arrays["prompt_named_ids"] = padded_ids([chunk.token_ids_logprob for chunk in chunks])
    for i, chunk in enumerate(chunks):
        if chunk.history is not None:
            arrays[f"history_prompt_{i}"], arrays[f"history_output_{i}"] = chunk.history
    return arrays | sampling_arrays(batch.sampling)


def _image_arrays(batch: StepBatch, moves_positions: bool) -> Arrays:
    """The host inputs of a step's tokens that a model without a tower does not have. ``moves_positions``: images may
    move the positions of the tokens behind them."""
    arrays: Arrays = {}
    chunks = batch.chunks
    if any(chunk.image_rows is not None for chunk in chunks):
        of_chunks = [
            np.full(size, SINK_ROW) if one.image_rows is None else one.image_rows[:size]
            for one, size in zip(chunks, [len(chunk.token_ids) for chunk in chunks], strict=True)
        ]
        arrays["image_rows"] = concatenated([*of_chunks, np.full(batch.num_decodes, SINK_ROW)])
    if moves_positions:
        arrays["position_deltas"] = np.array([chunk.position_delta for chunk in chunks], dtype=np.int64)
    if any(chunk.axes is not None for chunk in chunks):
        each = *chunks, *[None] * batch.num_decodes
        bounds = zip(batch.starts.tolist(), batch.seq_lens.tolist(), each, strict=True)
        axes = [
            np.tile(np.arange(first, end, dtype=np.int64), (3, 1)) if one is None or one.axes is None else one.axes
            for first, end, one in bounds
        ]
        arrays["axes"] = np.concatenate(axes, axis=1)
    return arrays


def _prompt_targets(chunk: Chunk) -> npt.NDArray[np.int64]:
    """The tokens that the logits at the chunk's ``scored`` offsets score: those at the next positions."""
    tokens = np.concatenate([chunk.token_ids[1:], np.array(chunk.following[:1], dtype=np.int64)])
    return tokens[chunk.scored.start : chunk.scored.stop]


def _least_expanded(config: EngineConfig, graphs: PiecewiseCudaGraphRunner | None) -> int | None:
    """From how many tokens on a prompt without a prefix attends to keys and values of its own, in layers of latents.
    Steps that are replayed in pieces have no such prompts. None: no prompt does, because its rows would differ in their
    last bits from those after a cached prefix, or because layers attend to selected rows."""
    model = config.model
    if model.latent is None or model.indexer is not None or config.server_args.enable_deterministic_inference:
        return None
    return _FEWEST_EXPANDED if graphs is None else max(graphs.sizes[-1] + 1, _FEWEST_EXPANDED)


def _extend_attention(batch: StepBatch, views: Views, page_table: torch.Tensor) -> AttentionInputs:
    return AttentionInputs(
        mode=ForwardMode.EXTEND,
        page_table=page_table,
        rows=views["rows"],
        seq_lens=views["seq_lens"],
        seq_lens_cpu=batch.seq_lens,
        query_lens_cpu=batch.seq_lens - batch.starts,
        query_starts=views["query_starts"],
        whole=tuple([(i, *span) for i, chunk in enumerate(batch.chunks) for span in chunk.whole]),
    )
