"""ModelRunner: turns a ScheduleBatch into work on the device, and gives back a ForwardResult.

Everything it submits goes to FORWARD in program order; inputs arrive through the input ring, results
leave through the result ring. The next tokens stay on the device: a decode step reads what the step
before it sampled without the host having seen it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fenceline.config.draft_config import StepShape
from fenceline.config.engine_config import EngineConfig, check_same_model, with_weights
from fenceline.config.model_files import weight_files
from fenceline.config.quantization import ON_LINE_METHOD
from fenceline.config.weight_headers import check_fits, read_headers, weight_bytes
from fenceline.ipc.progress import announced
from fenceline.layers.attention.backends import AttentionBackends, AttentionSetting, make_attention_backends
from fenceline.layers.context import Shard, fp8_kv_dtype, make_layer_context
from fenceline.layers.forward_batch import AttentionInputs, ForwardBatch, ForwardMode
from fenceline.mem_cache.host.cache_controller import HiCacheController, make_hicache_controller
from fenceline.mem_cache.host.host_pool import available_host_bytes
from fenceline.mem_cache.kv_pool import KVLayout, KVPool, ReqPool, check_row_bytes, num_kv_pages
from fenceline.mem_cache.page_hash import model_id
from fenceline.mem_cache.storage.controller import Storage, make_storage
from fenceline.memory_order import (
    Device,
    InputRing,
    MaskTable,
    ResultRing,
    page_leases,
    wait_for_pages,
    writing_weights,
)
from fenceline.memory_order.access import Accesses, Memory, PagedMemory
from fenceline.memory_order.edges import STARTUP_STOP, StreamName
from fenceline.model_executor.decode_runner import DecodeRunner, Logits
from fenceline.model_executor.graph_runner import GraphStats
from fenceline.model_executor.piecewise_cuda_graph_runner import PiecewiseCudaGraphRunner
from fenceline.model_executor.speculative_runner import SpeculativeRunner
from fenceline.model_executor.step import (
    Completions,
    DecodeBatch,
    ExtendBatch,
    ExtendSeq,
    ForwardResult,
    HeldStep,
    ScheduleBatch,
    StepCosts,
    concatenated,
    drain_completions,
)
from fenceline.model_executor.warm_up import measure_steps, warm_up
from fenceline.models.draft import DraftModel
from fenceline.models.loader import (
    NewWeights,
    check_weights,
    load_draft_model,
    load_model,
    replace_weights,
)
from fenceline.sampling.rank_sampler import RankSampler
from fenceline.sampling.sampler import OutputLogprobs, Sampler, prompt_logprobs
from fenceline.sampling.sampling_batch import SamplingBatch, padded_ids, sampling_arrays

logger = logging.getLogger(__name__)

Arrays = dict[str, npt.NDArray[np.generic]]
Views = dict[str, torch.Tensor]


class ModelRunner:
    """Owns the model, the KV pool, the request rows and the sampler of one device."""

    def __init__(
        self,
        config: EngineConfig,
        device: Device,
        show_progress: bool = True,
        shard: Shard = Shard(),
    ) -> None:
        """``shard``: the part of the model that this rank computes; its communicator belongs to FORWARD."""
        self.device = device
        self._config = config
        if config.server_args.memory_check == "order":
            device.check_order()
        self.page_size = config.server_args.page_size
        model = config.model
        dtype = getattr(torch, model.dtype)
        with _phase("Prepared kernels", "preparing kernels; the first start compiles them"):
            context = make_layer_context(device.torch_device, shard, dtype)
        if config.server_args.kv_cache_dtype == "fp8_e4m3":
            context = replace(context, kv_dtype=fp8_kv_dtype(device.torch_device))
        if device.kind == "cuda" and config.server_args.load_format != "dummy":
            needed = weight_bytes(model, read_headers(weight_files(Path(model.model_path)))) // shard.size
            check_fits(model, needed, device.memory_info()[0], "this GPU", ("a larger --tp-size",))
        with announced("loading weights", has_bar=True):
            self.model = load_model(
                model,
                config.server_args.load_format,
                device.torch_device,
                context,
                config.random_seed,
                show_progress,
            )
        self.draft: DraftModel | None = None
        largest = StepShape()
        if config.speculative is not None:
            largest = config.speculative.largest
            self.draft = load_draft_model(
                config.speculative.draft,
                config.server_args.load_format,
                device.torch_device,
                context,
                config.random_seed,
                show_progress,
                self.model,
            )
        self.max_step_tokens = largest.num_tokens
        num_rows = config.max_running_requests + 1  # with the sink
        rank_sampler: RankSampler | None = None
        if shard.size > 1:
            rank_sampler = RankSampler(self.model.lm_head, num_rows, device.torch_device)
        self.sampler = rank_sampler or Sampler(model.vocab_size, num_rows, device.torch_device)
        self._masks = (
            MaskTable(device, num_rows, model.vocab_size) if config.refuses_grammars is None else None
        )
        max_tokens_per_req = config.model.context_length + largest.num_slots - 1
        max_pages_per_req = -(-max_tokens_per_req // config.server_args.page_size) + 1
        check_row_bytes(config, device, num_rows, max_pages_per_req)
        self.req_pool = ReqPool(num_rows, max_pages_per_req, device.torch_device)
        draft_rows = () if self.draft is None else self.draft.kv_rows
        layout = KVLayout(config.server_args.page_size, self.model.kv_rows + draft_rows)
        num_pages = num_kv_pages(config, device, layout, config.num_sharing)  # of what is left
        with device.forward.active():
            num_pages = shard.smallest(num_pages)
        with _phase("Allocated the KV pool", "allocating the KV pool"):
            self.kv_pool = KVPool(num_pages, layout, device.torch_device, dtype)
        for name, tensor in self.kv_pool.tensors():
            device.name_rows(tensor, f"kv_pool.{name}")
        self.pages = page_leases(device, num_pages)
        device.name_rows(self.req_pool.page_table, "req_pool.page_table")
        device.name_rows(self.req_pool.last_tokens, "req_pool.last_tokens")
        self._num_heads = shard.divide(model.num_heads, "attention heads")
        with _phase("Prepared attention", "preparing attention; the first start compiles kernels"):
            self._attention, self._draft_attention = self._make_attention(config)
        self._inputs = InputRing(device)
        hicache = config.hicache
        # With the direct backend, backups keep the copy engine busy, so FORWARD copies small results itself.
        by_forward = hicache is not None and hicache.io_backend == "direct"
        self._results = ResultRing(device, small_by_forward=by_forward)
        self.speculative: SpeculativeRunner | None = None
        self.decode: DecodeRunner | SpeculativeRunner
        padding = not config.server_args.disable_cuda_graph_padding
        if self.draft is not None:
            assert config.speculative is not None
            self.decode = self.speculative = SpeculativeRunner(
                device,
                self.model,
                self.draft,
                self.kv_pool,
                self.req_pool,
                self._attention.decode,
                self._draft_attention.decode,
                config.max_running_requests,
                config.speculative,
                config.cuda_graph_bs,
                padding,
                rank_sampler,
            )
        else:
            self.decode = DecodeRunner(
                device,
                self.model,
                self.kv_pool,
                self.req_pool,
                self._attention.decode,
                config.max_running_requests,
                config.cuda_graph_bs,
                padding,
                debug=config.server_args.debug_cuda_graph,
                rank_sampler=rank_sampler,
                masks=None if self._masks is None else self._masks.table,
            )
        self.prefill_graphs: PiecewiseCudaGraphRunner | None = None
        if config.piecewise_cuda_graph_tokens:
            sizes = config.piecewise_cuda_graph_tokens
            self.prefill_graphs = PiecewiseCudaGraphRunner(
                device,
                self.model,
                self.kv_pool,
                sizes,
                config.server_args.debug_cuda_graph,
                () if config.speculative is None else config.speculative.draft.aux_layers,
            )
        self._extended: tuple[ForwardBatch, torch.Tensor] | None = (
            None  # of the latest prefill step, for the draft
        )
        self._accesses = StepAccesses(self.kv_pool, self.req_pool)
        self.hicache: HiCacheController | None = None
        self.storage: Storage | None = None
        if config.hicache is not None:
            with _phase("Allocated the host tier", "allocating the host tier"):
                with device.forward.active():  # before any rank takes its part
                    room = shard.smallest(available_host_bytes() // config.num_sharing)
                pages = self._accesses.pages
                self.hicache = make_hicache_controller(config, device, self.kv_pool, pages, room)
            if config.hicache.storage is not None:
                with _phase("Opened the storage", "opening the storage"):
                    self.storage = make_storage(device, self.hicache.host_pool, config, rank=shard.rank)
        device.full_stop(STARTUP_STOP)  # weights and pools were written on the default stream
        self._capture(config, show_progress)
        if device.kind == "cuda":
            with _room_for("the largest prefill step", "lower --chunked-prefill-size"):
                with _phase(
                    "Warmed up attention of prefill steps",
                    "warming up attention of prefill steps; the first start compiles kernels",
                ):
                    for backend in {self._attention.prefill, self._draft_attention.prefill}:
                        backend.warm_up()
                with announced("warming up with prefill steps"):
                    warm_up(device, config, self.launch)
        self.step_costs: StepCosts | None = None  # None unless the depth of steps may change
        if config.speculative is not None and config.speculative.is_adaptive and device.keeps_time:
            with announced("measuring decode steps"):
                costs = measure_steps(config, self.launch, self.req_pool.rows, self.pages)
            with device.forward.active():
                self.step_costs = StepCosts.decode(shard.of_first(costs.encode()))
            self.decode.stats.restart()
        if self.prefill_graphs is not None:
            self.prefill_graphs.begin_serving()

    def _make_attention(self, config: EngineConfig) -> tuple[AttentionBackends, AttentionBackends]:
        """The backends of the model's layers and of the draft's: the same ones where the heads are alike and no flag
        wants others, or if there is no draft."""

        shard = self.model.context.shard

        def agreed(name: str) -> str:  # what rank 0 has measured
            with self.device.forward.active():
                return shard.of_first(name.encode()).decode()

        model, draft, num_layers = self.model, self.draft, self.kv_pool.num_layers
        rules = model.attention_rules | ({} if draft is None else draft.attention_rules)

        def make(num_heads: int, layers: range, prefill: str, decode: str) -> AttentionBackends:
            length = config.model.context_length
            setting = AttentionSetting(self.kv_pool, self.device, num_heads, length, layers, rules, agreed)
            return make_attention_backends(prefill, decode, setting)

        prefill, decode = config.prefill_attention_backend, config.decode_attention_backend
        wanted = None if config.speculative is None else config.speculative.draft_attention_backend
        if draft is None or (
            wanted is None and draft.kv_rows[0] == model.kv_rows[0] and draft.num_heads == self._num_heads
        ):
            shared = make(self._num_heads, range(num_layers), prefill, decode)
            return shared, shared
        target = make(self._num_heads, range(model.num_layers), prefill, decode)
        layers = range(model.num_layers, num_layers)
        prefill, decode = wanted or target.prefill_name, wanted or target.decode_name
        return target, make(draft.num_heads, layers, prefill, decode)

    @torch.inference_mode()
    def _capture(self, config: EngineConfig, show_progress: bool) -> None:
        if self.decode.has_graphs:
            room = _room_for("decode graphs", "lower --cuda-graph-max-bs, or give --disable-cuda-graph")
            with room, announced("capturing decode graphs", has_bar=True):
                self.decode.capture(config.model.context_length, show_progress)
        if self.prefill_graphs is not None:
            remedy = "lower --piecewise-cuda-graph-max-tokens, or give --disable-piecewise-cuda-graph"
            with _room_for("prefill graphs", remedy), announced("capturing prefill graphs", has_bar=True):
                self.prefill_graphs.capture(show_progress)

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the long-lived allocations by name."""
        sizes = {"weights": self.model.nbytes, "kv_cache": self.kv_pool.nbytes}
        if self.hicache is not None:
            sizes["host_kv_cache"] = self.hicache.host_pool.nbytes
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
        """See ``Worker``."""
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
        with writing_weights(self.device):
            replace_weights(self.model, weights, one_more)
        self._config = with_weights(self._config, weights.directory, weights.label)
        if self.storage is not None:
            # No file describes single tensors: the id of the latest update stands for all of them.
            update = f" {weights.update_id}" if weights.partly else ""
            self.storage.root_key.weights_replaced(model_id(self._config) + update)

    @torch.inference_mode()
    def launch(self, batch: ScheduleBatch) -> ForwardResult | HeldStep:
        """Submit one step in its two phases: the forward, which yields Logits, and the sampling from them. Does not
        wait for the device.

        If the CPU is not needed between the two phases, they are one submission. A decode step whose requests need at
        most a temperature is a single replay, which includes the draw. Of a step with token masks only the forward is
        submitted.
        """
        wait_for_pages(self.device.forward, batch.after)  # WAR, WAW: transfers may still use retired pages
        self.device.checker.begin_step()
        exclusive = self.hicache
        if exclusive is not None:
            mode = _mode(batch)
            if not (self._attention.persistent(mode) or self._draft_attention.persistent(mode)):
                exclusive = None
        if exclusive is not None:
            exclusive.before_persistent_forward()
        views = self._upload(batch)
        with self.device.forward.active():
            logits = self._forward(batch, views)
            result: ForwardResult | HeldStep
            if len(batch.constrained):
                assert self._masks is not None, "grammars are refused where there is no table for their masks"
                result = self._held(batch, logits, views, self._masks)
            else:
                result = self._sample(batch, logits, views)
        if exclusive is not None:
            exclusive.after_persistent_forward(result.done)
        return result

    def _held(self, batch: ScheduleBatch, logits: Logits, views: Views, masks: MaskTable) -> HeldStep:
        """The step whose forward has just been submitted."""
        draw = logits.under_masks
        if draw is not None:
            num_reqs, num_rows = draw.num_reqs, draw.num_rows
        else:
            assert logits.values is not None, "tokens under masks are drawn from logits"
            num_reqs = num_rows = len(logits.values) // max(logits.num_verified, 1)
        return HeldStep(
            self.device.forward.record(),
            partial(masks.begin, batch.constrained, num_reqs, num_rows),
            partial(self._sample_held, batch, logits, views, masks),
        )

    @torch.inference_mode()
    def _sample_held(
        self, batch: ScheduleBatch, logits: Logits, views: Views, masks: MaskTable
    ) -> ForwardResult:
        """The second phase of a step with masks."""
        exclusive = self.hicache
        if self.speculative is None or not self._draft_attention.persistent(_mode(batch)):
            exclusive = None
        if exclusive is not None:
            exclusive.before_persistent_forward()  # the second phase runs the draft's attention
        with self.device.forward.active():
            uploaded = masks.upload()
            if logits.under_masks is None:
                result = self._sample(batch, logits, views, uploaded)
            else:
                # The next forward is submitted after this, and the GPU waits for it: so as few calls as possible.
                tokens = {"next_tokens": logits.under_masks.replay()}
                result = ForwardResult(self._results.download(tokens, small_by_forward=True))
            masks.drawn(result.done)
        if exclusive is not None:
            exclusive.after_persistent_forward(result.done)
        return result

    def _upload(self, batch: ScheduleBatch) -> Views:
        """Upload the inputs of a step in one copy and return their views on the device. Empty for a decode step that
        needs no new inputs."""
        if isinstance(batch, ExtendBatch):
            arrays = _extend_arrays(batch)
            if self.speculative is not None:
                arrays |= self.speculative.extend_arrays(batch)
        else:
            arrays = self.decode.arrays(batch)
        if len(batch.page_writes):
            arrays |= _page_write_arrays(batch)
        return self._inputs.upload(arrays) if arrays else {}

    # --- the two phases, both on FORWARD, which is current -------------------------------------------

    def _forward(self, batch: ScheduleBatch, views: Views) -> Logits:
        """The first phase: write the page table and the KV, and compute what the second phase needs. ``views``: what
        :meth:`_upload` returned."""
        if isinstance(batch, ExtendBatch):
            return self._extend(batch, views)
        self.device.declare(StreamName.FORWARD, "decode step", self._accesses.decode, batch)
        self._write_pages(views)
        return self.decode.forward(batch, views)

    def _sample(
        self, batch: ScheduleBatch, logits: Logits, views: Views, masks: torch.Tensor | None = None
    ) -> ForwardResult:
        """The second phase: draw the next tokens unless the forward has drawn them, store them as the last tokens of
        their rows, and start copying the results of both phases to the host."""
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
                logprobs = self.speculative.logprobs_of_path(logprobs)
        if logprobs is not None:
            results |= _logprob_results("out", logprobs)
        if self.speculative is not None and isinstance(batch, ExtendBatch):
            assert self._extended is not None
            self.speculative.extend(*self._extended, views, results["next_tokens"], logits.sampling)
            self._extended = None  # hidden states of a whole step
        if logits.prompt_logprobs is not None:
            results |= _logprob_results("prompt", logits.prompt_logprobs)
        communicator = self.model.context.shard.communicator
        check = None if communicator is None else communicator.check
        return ForwardResult(self._results.download(results), check)

    def _write_pages(self, views: Views) -> None:
        if "page_rows" in views:
            self.req_pool.write_pages(views["page_rows"], views["page_columns"], views["page_ids"])

    # --- extend --------------------------------------------------------------------------------------

    def _extend(self, batch: ExtendBatch, views: Views) -> Logits:
        layer_ready = self._layer_ready(batch)
        self._write_pages(views)
        attention = _extend_attention(batch, views, self.req_pool.page_table)
        self._begin_penalties(batch, views)
        forward_batch = ForwardBatch(
            mode=ForwardMode.EXTEND,
            input_ids=views["input_ids"],
            positions=views["positions"],
            out_slots=views["out_slots"],
            logits_index=views["logits_index"],
            attn=self._attention.prefill.plan(attention),
            kv_pool=self.kv_pool,
            layer_ready=layer_ready,
            aux_hidden=None
            if self.speculative is None
            else self.speculative.make_aux(len(views["input_ids"])),
        )
        layers = self.prefill_graphs or self.model
        x = layers.hidden_states(forward_batch)
        values = self.model.own_logits(x, forward_batch)
        if self.speculative is not None:
            if self._draft_attention.prefill is not self._attention.prefill:
                own = self._draft_attention.prefill.plan(attention)
                forward_batch = replace(forward_batch, attn=own)
            self._extended = forward_batch, x
        for ticket in batch.loads:
            ticket.waited = True  # FORWARD has waited for it: all later submissions come after the load
        sampled = [seq.sampling for seq in batch.seqs if seq.sampling is not None]
        num_sampled = len(sampled)
        prompts = None
        if "prompt_targets" in views:
            prompts = _score_prompts(batch, views, self.model.lm_head.whole_logits(values[num_sampled:]))
        if not sampled:
            none = torch.empty(0, dtype=torch.int64, device=self.device.torch_device)
            return Logits(tokens=none, prompt_logprobs=prompts)
        return Logits(
            values=values[:num_sampled],
            positions=views["sample_positions"],
            rows=views["sample_rows"],
            sampling=SamplingBatch.from_views(sampled, views),
            prompt_logprobs=prompts,
        )

    def _layer_ready(self, batch: ExtendBatch) -> Callable[[int], None] | None:
        """The function ``f(layer)`` that makes FORWARD wait for that layer of ``batch.loads``; None without loads.

        Also declares the step's accesses. These are of whole pages (all layers), so with loads they are declared after
        the wait for the last layer.
        """

        def declare() -> None:
            self.device.declare(StreamName.FORWARD, "prefill step", self._accesses.extend, batch)

        if not batch.loads:
            declare()
            return None
        assert self.hicache is not None, "without a host tier nothing is loaded"
        return self.hicache.layer_ready(batch.loads, self.model.num_layers, declare)

    def _begin_penalties(self, batch: ExtendBatch, views: Views) -> None:
        for index, seq in enumerate(batch.seqs):
            if seq.history is not None:
                prompt, output = views[f"history_prompt_{index}"], views[f"history_output_{index}"]
                self.sampler.begin_request(seq.row, prompt, output)


def _mode(batch: ScheduleBatch) -> ForwardMode:
    return ForwardMode.EXTEND if isinstance(batch, ExtendBatch) else ForwardMode.DECODE


@contextmanager
def _phase(done: str, doing: str) -> Iterator[None]:
    """Log the duration of a part of start-up when it is done, and that it is going on if it takes long."""
    begin = time.perf_counter()
    with announced(doing):
        yield
    logger.info("%s in %.1f s", done, time.perf_counter() - begin)


@contextmanager
def _room_for(what: str, otherwise: str) -> Iterator[None]:
    """For parts of start-up that allocate memory after the KV pool. Raises ``ValueError`` with the remedy if there is
    not enough memory left."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"no memory is left for {what} beside weights and KV cache: lower --mem-fraction-static, {otherwise}"
        ) from error


def _logprob_results(prefix: str, values: OutputLogprobs) -> Views:
    results = {
        f"{prefix}_chosen": values.chosen,
        f"{prefix}_top": values.top_logprobs,
        f"{prefix}_top_ids": values.top_ids,
    }
    return results if values.named is None else results | {f"{prefix}_named": values.named}


def _score_prompts(batch: ExtendBatch, views: Views, logits: torch.Tensor) -> OutputLogprobs:
    """Logprobs of prompt tokens. ``logits`` [N, vocab_size] are not converted to float32 as a whole: for a chunk of
    8,192 tokens and a vocabulary of 150,000 that would take 5 GB."""
    top_k = max(seq.prompt_top_logprobs for seq in batch.seqs)
    named_ids = None
    if "prompt_named_rows" in views:
        named_ids = views["prompt_named_ids"].view(len(batch.seqs), -1)[views["prompt_named_rows"]]
    return prompt_logprobs(logits, views["prompt_targets"], top_k, named_ids)


def _page_write_arrays(batch: ScheduleBatch) -> Arrays:
    writes = batch.page_writes
    return {"page_rows": writes.rows, "page_columns": writes.columns, "page_ids": writes.pages}


def _extend_arrays(batch: ExtendBatch) -> Arrays:
    """The host inputs of an extend step, except its page writes."""
    seqs = batch.seqs
    starts = list(accumulate([len(seq.token_ids) for seq in seqs], initial=0))
    sampled = [i for i, seq in enumerate(seqs) if seq.sampling is not None]
    arrays: Arrays = {
        "input_ids": concatenated([seq.token_ids for seq in seqs]),
        "positions": concatenated([np.arange(seq.prefix_len, seq.seq_len, dtype=np.int64) for seq in seqs]),
        "out_slots": concatenated([seq.out_slots for seq in seqs]),
        "rows": np.array([seq.row for seq in seqs], dtype=np.int64),
        "seq_lens": np.array([seq.seq_len for seq in seqs], dtype=np.int64),
        "query_starts": np.array(starts, dtype=np.int32),
        "sample_rows": np.array([seqs[i].row for i in sampled], dtype=np.int64),
        "sample_positions": np.array([seqs[i].seq_len for i in sampled], dtype=np.int64),
    }
    logits_index = [np.array([starts[i + 1] - 1 for i in sampled], dtype=np.int64)]
    targets, named_rows = [], []
    for i, seq in enumerate(seqs):
        first, last = seq.prompt_logprob_offsets()
        if first < last:
            logits_index.append(np.arange(starts[i] + first, starts[i] + last, dtype=np.int64))
            targets.append(_prompt_targets(seq, first, last))
            named_rows.append(np.full(last - first, i, dtype=np.int64))
    arrays["logits_index"] = concatenated(logits_index)
    if targets:
        arrays["prompt_targets"] = np.concatenate(targets)
        if any(seq.prompt_token_ids_logprob for seq in seqs):
            arrays["prompt_named_rows"] = np.concatenate(named_rows)
            arrays["prompt_named_ids"] = padded_ids([seq.prompt_token_ids_logprob for seq in seqs])
    for i, seq in enumerate(seqs):
        if seq.history is not None:
            arrays[f"history_prompt_{i}"], arrays[f"history_output_{i}"] = seq.history
    return arrays | sampling_arrays([seq.sampling for seq in seqs if seq.sampling is not None])


def _prompt_targets(seq: ExtendSeq, first: int, last: int) -> npt.NDArray[np.int64]:
    """The tokens that the logits at chunk offsets ``first`` .. ``last - 1`` score: those at the next positions."""
    tokens = np.concatenate([seq.token_ids[1:], np.array(seq.following[:1], dtype=np.int64)])
    return tokens[first:last]


def _extend_attention(batch: ExtendBatch, views: Views, page_table: torch.Tensor) -> AttentionInputs:
    return AttentionInputs(
        mode=ForwardMode.EXTEND,
        page_table=page_table,
        rows=views["rows"],
        seq_lens=views["seq_lens"],
        seq_lens_cpu=np.array([seq.seq_len for seq in batch.seqs], dtype=np.int64),
        query_lens_cpu=np.array([len(seq.token_ids) for seq in batch.seqs], dtype=np.int64),
        query_starts=views["query_starts"],
    )


class StepAccesses:
    """Declares what a step reads and writes on FORWARD apart from the rings: request rows, and KV pages of all layers.

    ``extend`` and ``decode`` are passed to ``Device.declare``. If a decode step has the same requests as the previous
    one, its declaration needs no operation over its rows.
    """

    def __init__(self, kv_pool: KVPool, req_pool: ReqPool) -> None:
        self._page_size = kv_pool.page_size
        rows, columns = req_pool.page_table.shape
        self.page_table = Memory("req_pool.page_table", rows)
        self.last_tokens = Memory("req_pool.last_tokens", rows)
        self.pages = PagedMemory(
            "kv_pool", kv_pool.num_pages, kv_pool.page_size, (rows, columns), StreamName.FORWARD
        )

    def extend(self, op: Accesses, batch: ExtendBatch) -> None:
        """A prefill step: writes the pages of its chunks, reads all pages up to them."""
        self._write_table(op, batch)
        rows = np.array([seq.row for seq in batch.seqs], dtype=np.int64)
        seq_lens = np.array([seq.seq_len for seq in batch.seqs], dtype=np.int64)
        op.read(self.page_table, rows)
        op.write(self.pages, np.concatenate([seq.out_slots for seq in batch.seqs]) // self._page_size)
        op.read_pages(self.pages, rows, seq_lens)
        sampled = np.array([seq.row for seq in batch.seqs if seq.sampling is not None], dtype=np.int64)
        op.write(self.last_tokens, sampled)

    def decode(self, op: Accesses, batch: DecodeBatch) -> None:
        """A decode step: writes the pages of each request's new tokens, reads all of them."""
        if len(batch.page_writes):
            self._write_table(op, batch)
        op.read(self.page_table, batch.rows)
        if batch.committed_lens is None:
            op.append_pages(self.pages, batch.rows, batch.seq_lens)
        else:  # the host knows only upper bounds of the lengths, and a bound may be lower than in the previous step
            op.read(self.pages, self.pages.pages_of(batch.rows, batch.seq_lens))
            written = self.pages.pages_between(batch.rows, batch.committed_lens, batch.seq_lens)
            op.write(self.pages, written)
        op.write(self.last_tokens, batch.rows)  # it also reads them: the tokens of the previous step

    def _write_table(self, op: Accesses, batch: ExtendBatch | DecodeBatch) -> None:
        writes = batch.page_writes
        op.write(self.page_table, writes.rows)
        op.write_table(self.pages, writes.rows, writes.columns, writes.pages)
