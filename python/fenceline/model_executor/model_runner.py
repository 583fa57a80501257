"""ModelRunner: turns a StepBatch into work on the device, and gives back a ForwardResult.

Everything it submits goes to FORWARD in program order; inputs arrive through the input ring, results
leave through the result ring. The next tokens stay on the device: a decode step reads what the step
before it sampled without the host having seen it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from fenceline.config.engine_config import EngineConfig, check_same_model, with_weights
from fenceline.config.quantization import ON_LINE_METHOD
from fenceline.ipc.progress import announced
from fenceline.layers.context import Shard
from fenceline.layers.forward_batch import ForwardMode
from fenceline.mem_cache.host.cache_controller import HiCacheController
from fenceline.mem_cache.page_hash import model_id
from fenceline.memory_order import (
    Device,
    InputRing,
    MaskTable,
    Point,
    Points,
    ResultRing,
    states_to_copy,
    wait_for_pages,
    weight_write,
    with_snapshots,
)
from fenceline.memory_order.access import Accesses
from fenceline.memory_order.edges import STARTUP_STOP, StreamName
from fenceline.model_executor.decode_runner import Arrays, DecodeRunner, Logits
from fenceline.model_executor.extend_runner import ExtendRunner
from fenceline.model_executor.graph_runner import GraphStats
from fenceline.model_executor.parts import build_parts, open_tiers, phase, room_for
from fenceline.model_executor.piecewise_cuda_graph_runner import PiecewiseCudaGraphRunner
from fenceline.model_executor.speculative_runner import SpeculativeRunner
from fenceline.model_executor.step import (
    Completions,
    ForwardResult,
    HeldStep,
    MixedCosts,
    PageWrites,
    StepBatch,
    StepCosts,
    drain_completions,
)
from fenceline.model_executor.step_accesses import DECODE_STEP, EXTEND_STEP
from fenceline.model_executor.warm_up import measure_mixed, measure_steps, warm_up
from fenceline.models.loader import NewWeights, check_weights, replace_weights
from fenceline.sampling.sampler import OutputLogprobs

logger = logging.getLogger(__name__)

I64 = npt.NDArray[np.int64]
Views = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Way:
    """How the steps of one kind run. ``name`` and ``accesses``: how they are declared. ``forward_alone`` and
    ``draft_alone``: what has to keep backups off the SMs while the forward runs, and while the draft's attention runs
    in the second phase; None if no attention kernel of the phase is persistent, or if there are no backups."""

    name: str
    runner: DecodeRunner | SpeculativeRunner | ExtendRunner
    accesses: Callable[[Accesses, StepBatch], None]
    forward_alone: HiCacheController | None
    draft_alone: HiCacheController | None


class ModelRunner:
    """Owns the model, the KV pool, the request rows and the sampler of one device."""

    def __init__(
        self, config: EngineConfig, device: Device, show_progress: bool = True, shard: Shard = Shard()
    ) -> None:
        """``shard``: the part of the model that this rank computes; its communicator belongs to FORWARD."""
        self.device = device
        if config.server_args.memory_check == "order":
            device.check_order()
        parts = build_parts(config, device, shard, show_progress)
        config = self._config = parts.config
        self.model, self.draft, self.sampler = parts.model, parts.draft, parts.sampler
        self.req_pool, self.kv_pool, self.pages = parts.req_pool, parts.kv_pool, parts.pages
        self.states = parts.states
        self.max_step_tokens = parts.largest.num_tokens
        self.parts = parts
        self._inputs = InputRing(device)
        # With the direct backend, backups keep the copy engine busy, so FORWARD copies small results itself.
        by_forward = config.hicache is not None and config.hicache.io_backend == "direct"
        self._results = ResultRing(device, small_by_forward=by_forward)
        self.speculative = None if config.speculative is None else SpeculativeRunner(parts)
        self.decode = self.speculative or DecodeRunner(parts)
        sizes = config.piecewise_cuda_graph_tokens
        aux_layers = () if config.draft is None else config.draft.aux_layers
        self.prefill_graphs = PiecewiseCudaGraphRunner(parts, sizes, aux_layers) if sizes else None
        self.hicache, self.storage = open_tiers(parts)
        self.extend = ExtendRunner(parts, self.prefill_graphs, self.speculative, self.hicache)
        accesses = parts.accesses
        decode, extend = ForwardMode.DECODE, ForwardMode.EXTEND
        of_extend = (extend, decode) if config.mixes_steps else (extend,)
        self._decode_way = self._way(DECODE_STEP, (decode,), self.decode, accesses.decode)
        self._extend_way = self._way(EXTEND_STEP, of_extend, self.extend, accesses.extend)
        device.full_stop(STARTUP_STOP)  # weights and pools were written on the default stream
        self._capture(config, show_progress)
        if device.kind == "cuda":
            self._warm_up(config)
        self.step_costs = self._measure_steps(config)
        if self.prefill_graphs is not None:
            self.prefill_graphs.begin_serving()
        if parts.page_tags is not None:
            with device.forward.active():
                parts.page_tags.begin_serving()

    def _way(
        self,
        name: str,
        modes: Sequence[ForwardMode],
        runner: DecodeRunner | SpeculativeRunner | ExtendRunner,
        accesses: Callable[[Accesses, StepBatch], None],
    ) -> _Way:
        """``modes``: of the attention in its steps."""
        draft_alone = self.hicache if any(map(self.parts.draft_attention.persistent, modes)) else None
        forward_alone = self.hicache if any(map(self.parts.attention.persistent, modes)) else draft_alone
        return _Way(name, runner, accesses, forward_alone, None if self.speculative is None else draft_alone)

    @torch.inference_mode()
    def _capture(self, config: EngineConfig, show_progress: bool) -> None:
        if self.decode.has_graphs:
            room = room_for("decode graphs", "lower --cuda-graph-max-bs, or give --disable-cuda-graph")
            with room, announced("capturing decode graphs", has_bar=True):
                self.decode.capture(config.model.context_length, show_progress)
        if self.prefill_graphs is not None:
            remedy = "lower --piecewise-cuda-graph-max-tokens, or give --disable-piecewise-cuda-graph"
            with room_for("prefill graphs", remedy), announced("capturing prefill graphs", has_bar=True):
                self.prefill_graphs.capture(show_progress)

    def _warm_up(self, config: EngineConfig) -> None:
        with room_for("the largest prefill step", "lower --chunked-prefill-size"):
            with phase(
                "Warmed up attention of prefill steps",
                "warming up attention of prefill steps; the first start compiles kernels",
            ):
                for backend in {self.parts.attention.prefill, self.parts.draft_attention.prefill}:
                    backend.warm_up()
            with announced("warming up with prefill steps"):
                is_new = isinstance(self.decode, DecodeRunner) and self.decode.is_new
                warm_up(self.device, config, self.launch, is_new)

    def _measure_steps(self, config: EngineConfig) -> StepCosts | MixedCosts | None:
        """See ``Worker.step_costs``; those that rank 0 has measured."""
        device = self.device
        has_depths = config.speculative is not None and config.speculative.is_adaptive
        has_limit = config.mixes_steps and (device.kind == "cuda" or config.server_args.max_inter_token_ms is not None)
        if not (has_depths or has_limit) or not device.keeps_time:
            return None
        with announced("measuring steps"):
            measure = measure_steps if has_depths else measure_mixed
            costs: StepCosts | MixedCosts = measure(config, self.launch, self.req_pool.rows, self.pages)
        with device.forward.active():
            agreed = type(costs).decode(self.model.context.shard.of_first(costs.encode()))
        self.decode.stats.restart()
        return agreed

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the long-lived allocations by name."""
        sizes = {"weights": self.model.nbytes, "kv_cache": self.kv_pool.nbytes}
        if self.states is not None:
            sizes["states"] = self.states.nbytes
        if self.hicache is not None:
            sizes["host_kv_cache"] = self.hicache.host_pool.nbytes
            if self.hicache.host_states is not None:
                sizes["host_states"] = self.hicache.host_states.buffer.nbytes
        return sizes

    @property
    def graph_stats(self) -> GraphStats | None:
        """Counts of graph replays, None without graphs."""
        return self.decode.stats if self.decode.has_graphs else None

    @property
    def prefill_graph_stats(self) -> GraphStats | None:
        """Counts of prefill steps replayed in pieces, None without such graphs."""
        return None if self.prefill_graphs is None else self.prefill_graphs.stats

    def completions(self, awaited: ForwardResult | None) -> Completions:
        """See ``Worker``. Queries the device; to be called once a step."""
        return drain_completions(self.hicache, self.storage, awaited)

    def check_weights(self, weights: NewWeights) -> None:
        reason = ""
        try:
            self._check_weights(weights)
        except Exception as error:
            # Of any type: libraries may raise anything when they read a damaged file. Nothing has been touched, and the
            # other ranks wait for this one's answer.
            text = str(error)
            if not isinstance(error, OSError | ValueError):
                logger.warning("new weights could not be checked", exc_info=error)
                text = f"{type(error).__name__}: {text}"
            reason = next(iter(text.splitlines()), type(error).__name__)
        shard = self.model.context.shard
        if shard.size > 1:
            with self.device.forward.active():
                reasons = shard.exchange(reason.encode(errors="backslashreplace"))
            reason = next((told.decode() for told in reasons if told), "")
        if reason:
            raise ValueError(reason)

    def _check_weights(self, weights: NewWeights) -> None:
        model, args = self._config.model, self._config.server_args
        format = model.quantization
        if format is None and model.experts is not None:
            format = model.experts.format
        if format is not None and format.method != ON_LINE_METHOD and args.load_format == "dummy":
            raise ValueError(
                f"dummy weights were rounded as on-line, not stored as the checkpoint's ({format.method}); start the"
                " server with a checkpoint"
            )
        if format is not None and format.has_kv_scales and args.kv_cache_dtype == "fp8_e4m3":
            raise ValueError(
                "the scales of keys and values are constants of captured graphs (--kv-cache-dtype fp8_e4m3 with a"
                " checkpoint that has some), so they cannot be replaced; start the server with the new weights"
            )
        if weights.directory is not None:
            check_same_model(self._config, weights.directory)
        check_weights(self.model, weights)

    def replace_weights(self, weights: NewWeights, one_more: Callable[[], None]) -> None:
        """See ``Worker``. The parameters keep their addresses, so that captured graphs, and a draft that shares some of
        them, read the new values. A draft's own weights are not replaced."""
        with weight_write(self.device):
            replace_weights(self.model, weights, one_more)
        self._config = with_weights(self._config, weights.directory, weights.label)
        if self.storage is not None:
            # No file describes single tensors: the id of the latest update stands for all of them.
            update = f" {weights.update_id}" if weights.partly else ""
            self.storage.root_key.weights_replaced(model_id(self._config) + update)

    @torch.inference_mode()
    def launch(self, batch: StepBatch) -> ForwardResult | HeldStep:
        """Submit one step in its two phases: the forward, which yields Logits, and the sampling from them. Does not
        wait for the device. If the CPU is not needed between the two phases, they are one submission. A decode step
        whose requests need at most a temperature is a single replay, which includes the draw. Of a step with token
        masks only the forward is submitted."""
        wait_for_pages(self.device.forward, batch.after)  # WAR, WAW: transfers may still use retired pages
        self.device.checker.begin_step()
        way = self._decode_way if batch.is_decode else self._extend_way
        if way.forward_alone is not None:
            way.forward_alone.before_persistent_forward()
        views = self._upload(way.runner.arrays(batch), batch.page_writes)
        with self.device.forward.active():
            if not batch.loads:  # else the step declares its accesses when all layers have been loaded
                self.device.declare(StreamName.FORWARD, way.name, way.accesses, batch)
            if "page_rows" in views:
                self.req_pool.write_pages(views["page_rows"], views["page_columns"], views["page_ids"])
            if self.parts.page_tags is not None:
                self.parts.page_tags.begin_step(views)
            logits = self._forward(way, batch, views)
            result: ForwardResult | HeldStep
            if len(batch.constrained):
                masks = self.parts.masks
                assert masks is not None, "grammars are refused where there is no table for their masks"
                result = self._held(batch.constrained, logits, way.draft_alone, masks)
            else:
                result = self._sample(logits)
        if way.forward_alone is not None:
            way.forward_alone.after_persistent_forward(result.done)
        return result

    def _forward(self, way: _Way, batch: StepBatch, views: Views) -> Logits:
        """The first phase, on FORWARD, which is current; with the snapshots of states of a model that has some."""
        states = self.states
        if states is None:
            return way.runner.forward(batch, views)
        copies = partial(states.copy, batch.snapshots)
        return with_snapshots(self.device, partial(way.runner.forward, batch, views), copies)

    @torch.inference_mode()
    def copy_state(self, source: int, slot: int, after: Points) -> Point:
        """See ``Worker``."""
        states, forward = self.states, self.device.forward
        assert states is not None, "the model has no states"
        wait_for_pages(forward, after)
        with forward.active():
            states.copy(states_to_copy(self.device, ((source, slot),), states.num_rows))
        return forward.record()

    def _upload(self, arrays: Arrays, writes: PageWrites) -> Views:
        """Upload the inputs of a step in one copy and return their views on the device. Empty for a decode step that
        needs no new inputs."""
        if len(writes):
            arrays |= {"page_rows": writes.rows, "page_columns": writes.columns, "page_ids": writes.pages}
        if self.parts.page_tags is not None:
            arrays |= self.parts.page_tags.arrays(writes.pages)
        return self._inputs.upload(arrays) if arrays else {}

    def _held(self, constrained: I64, logits: Logits, alone: HiCacheController | None, masks: MaskTable) -> HeldStep:
        """The step whose forward has just been submitted; ``alone``: see ``_Way.draft_alone``."""
        draw = logits.under_masks
        if draw is not None:
            num_reqs, num_rows = draw.num_reqs, draw.num_rows
        else:
            assert logits.values is not None, "tokens under masks are drawn from logits"
            num_reqs = num_rows = len(logits.values) // max(logits.num_verified, 1)
        return HeldStep(
            self.device.forward.record(),
            partial(masks.begin, constrained, num_reqs, num_rows),
            partial(self._sample_held, logits, alone, masks),
        )

    @torch.inference_mode()
    def _sample_held(self, logits: Logits, alone: HiCacheController | None, masks: MaskTable) -> ForwardResult:
        """The second phase of a step with masks."""
        if alone is not None:
            alone.before_persistent_forward()
        with self.device.forward.active():
            uploaded = masks.upload()
            if logits.under_masks is None:
                result = self._sample(logits, uploaded)
            else:
                # The next forward is submitted after this, and the GPU waits for it: so as few calls as possible.
                result = self._result({"next_tokens": logits.under_masks.replay()}, small_by_forward=True)
            masks.drawn(result.done)
        if alone is not None:
            alone.after_persistent_forward(result.done)
        return result

    def _sample(self, logits: Logits, masks: torch.Tensor | None = None) -> ForwardResult:
        """The second phase, on FORWARD, which is current: draw the next tokens unless the forward has drawn them, store
        them as the last tokens of their rows, and start copying the results of both phases to the host."""
        tokens, logprobs = logits.tokens, None
        if tokens is None:
            assert logits.values is not None and logits.positions is not None and logits.sampling is not None
            last_tokens = None if logits.rows is None else self.req_pool.last_tokens
            out = self.sampler.forward(
                logits.values, logits.positions, logits.sampling, masks, logits.rows, last_tokens
            )
            tokens, logprobs = out.next_tokens, out.logprobs
        results = {"next_tokens": tokens}
        if logits.num_verified:
            assert self.speculative is not None
            results = self.speculative.accept(None if logits.tokens is not None else tokens)
            if logprobs is not None:
                logprobs = self.speculative.logprobs_of_tokens(logprobs)
        if logprobs is not None:
            results |= _logprob_results("out", logprobs)
        if logits.extended is not None:
            assert self.speculative is not None
            self.speculative.draft.after_prefill(logits.extended, tokens, logits.sampling)
        if logits.prompt_logprobs is not None:
            results |= _logprob_results("prompt", logits.prompt_logprobs)
        if logits.embeddings is not None:
            results |= {"embeddings": logits.embeddings}
        communicator = self.model.context.shard.communicator
        return self._result(results, None if communicator is None else communicator.check)

    def _result(
        self, results: Views, check: Callable[[], None] | None = None, small_by_forward: bool = False
    ) -> ForwardResult:
        """Start copying ``results`` to the host, with what ``--memory-check full`` has found until now."""
        tags = self.parts.page_tags
        if tags is not None:
            results = results | {"findings": tags.findings}
        lease = self._results.download(results, small_by_forward)
        return ForwardResult(lease, check, None if tags is None else tags.read)


def _logprob_results(prefix: str, values: OutputLogprobs) -> Views:
    results = {
        f"{prefix}_chosen": values.chosen,
        f"{prefix}_top": values.top_logprobs,
        f"{prefix}_top_ids": values.top_ids,
    }
    return results if values.named is None else results | {f"{prefix}_named": values.named}
