"""The parts that the runners of a device share, built one after the other when the engine starts and frozen then."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fenceline.config.draft_config import StepShape
from fenceline.config.engine_config import EngineConfig
from fenceline.config.model_files import weight_files
from fenceline.config.weight_headers import check_fits, read_headers, weight_bytes
from fenceline.ipc.progress import announced
from fenceline.layers.attention.backends import AttentionBackends, AttentionSetting, make_attention_backends
from fenceline.layers.context import Shard, fp8_kv_dtype, make_layer_context
from fenceline.mem_cache.host.cache_controller import HiCacheController, make_hicache_controller
from fenceline.mem_cache.host.host_pool import available_host_bytes
from fenceline.mem_cache.kv_pool import EmbeddingPool, KVPool, ReqPool, check_row_bytes, num_kv_pages
from fenceline.mem_cache.page_tags import PageTags
from fenceline.mem_cache.state_pool import StatePool, most_running, num_snapshots
from fenceline.mem_cache.storage.controller import Storage, make_storage
from fenceline.memory_order import Device, LeasePool, MaskTable, page_leases, selecting
from fenceline.model_executor.step_accesses import StepAccesses
from fenceline.models.decoder import CausalLM
from fenceline.models.draft import DraftModel
from fenceline.models.loader import load_draft_model, load_model
from fenceline.sampling.rank_sampler import RankSampler
from fenceline.sampling.sampler import Sampler

logger = logging.getLogger(__name__)


@contextmanager
def phase(done: str, doing: str) -> Iterator[None]:
    """Log the duration of a part of start-up when it is done, and that it is going on if it takes long."""
    begin = time.perf_counter()
    with announced(doing):
        yield
    logger.info("%s in %.1f s", done, time.perf_counter() - begin)


@contextmanager
def room_for(what: str, otherwise: str) -> Iterator[None]:
    """For parts of start-up that allocate memory after the KV pool. Raises ``ValueError`` if too little is left."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"no memory is left for {what} beside weights and KV cache: lower --mem-fraction-static, {otherwise}"
        ) from error


@dataclass(frozen=True, slots=True)
class Parts:
    """What the runners of one device work with. ``draft``: None without a draft model. ``largest``: the shape of the
    deepest decode steps. ``sampler`` draws tokens; ``rank_sampler`` is the same if several ranks draw together, else
    None. ``masks``: None if grammars are refused. ``embeddings``: of images, None without a tower. ``states``: None
    without recurrent layers. ``accesses`` declares how a step uses the memory of ``req_pool`` and ``kv_pool``.
    ``draft_attention``: that of the draft's layers, the same as ``attention`` where the heads are alike and no flag
    wants another, or if there is no draft. ``page_tags``: None without ``--memory-check full``."""

    config: EngineConfig
    device: Device
    model: CausalLM
    draft: DraftModel | None
    largest: StepShape
    sampler: Sampler | RankSampler
    rank_sampler: RankSampler | None
    masks: MaskTable | None
    req_pool: ReqPool
    embeddings: EmbeddingPool | None
    states: StatePool | None
    kv_pool: KVPool
    pages: LeasePool
    accesses: StepAccesses
    attention: AttentionBackends
    draft_attention: AttentionBackends
    page_tags: PageTags | None


def build_parts(config: EngineConfig, device: Device, shard: Shard, show_progress: bool) -> Parts:
    """Load the weights of ``shard``, allocate request rows, and what memory is left as KV pages."""
    model, draft = _load_models(config, device, shard, show_progress)
    config = _with_room_for_states(config, device, model)
    largest = StepShape() if config.speculative is None else config.speculative.largest
    num_rows, vocab_size = config.max_running_requests + 1, config.model.vocab_size  # with the sink
    how = num_rows, device.torch_device, config.server_args.enable_deterministic_inference
    rank_sampler = None if shard.size == 1 else RankSampler(model.lm_head, *how)
    sampler = rank_sampler or Sampler(vocab_size, *how)
    masks = MaskTable(device, num_rows, vocab_size) if config.refuses_grammars is None else None
    max_tokens_per_req = config.model.context_length + largest.num_slots - 1
    max_pages_per_req = -(-max_tokens_per_req // config.server_args.page_size) + 1
    num_tokens = max_tokens_per_req if config.looks_up_drafts else 0
    check_row_bytes(config, device, num_rows, max_pages_per_req, num_tokens)
    moves_positions = config.model.moves_positions
    req_pool = ReqPool(num_rows, max_pages_per_req, device.torch_device, moves_positions, num_tokens)
    embeddings = None
    if model.vision is not None:
        size = config.num_embedding_rows + 1, model.vision.width
        embeddings = EmbeddingPool(*size, model.context.dtype, device.torch_device)
        device.name_rows(embeddings.rows, "image_embeddings")
    states = _make_states(config, device, model, num_rows)
    layout = config.kv_layout
    num_pages = num_kv_pages(config, device, layout, config.num_sharing)  # of what is left
    with device.forward.active():
        num_pages = shard.smallest(num_pages)
    with phase("Allocated the KV pool", "allocating the KV pool"):
        kv_pool = KVPool(num_pages, layout, device.torch_device, model.context.dtype)
    for name, tensor in kv_pool.tensors():
        device.name_rows(tensor, f"kv_pool.{name}")
    pages = page_leases(device, num_pages)
    device.name_rows(req_pool.page_table, "req_pool.page_table")
    device.name_rows(req_pool.last_tokens, "req_pool.last_tokens")
    with phase("Prepared attention", "preparing attention; the first start compiles kernels"):
        attention, draft_attention = _prepare_attention(config, device, model, draft, kv_pool)
    if req_pool.position_deltas is not None:
        device.name_rows(req_pool.position_deltas, "req_pool.position_deltas")
    if req_pool.tokens is not None:
        device.name_rows(req_pool.tokens, "req_pool.tokens")
    accesses = StepAccesses(kv_pool, req_pool, embeddings)
    is_full = config.server_args.memory_check == "full"
    page_tags = PageTags(device, kv_pool, req_pool, pages) if is_full else None
    return Parts(
        config, device, model, draft, largest, sampler, rank_sampler, masks,
        req_pool, embeddings, states, kv_pool, pages, accesses, attention, draft_attention, page_tags,
    )  # fmt: skip


def _with_room_for_states(config: EngineConfig, device: Device, model: CausalLM) -> EngineConfig:
    """``config``, in which no more requests run than ``most_running`` on each rank, nor has a graph more."""
    if not model.state_specs:
        return config
    with device.forward.active():
        most = model.context.shard.smallest(most_running(config, device, model.state_specs))
    if most == config.max_running_requests:
        return config
    logger.info("At most %d requests run at a time, because of their states (--max-running-requests)", most)
    sizes = config.cuda_graph_bs
    if sizes and sizes[-1] > most:
        sizes = *[size for size in sizes if size < most], most
    return replace(config, max_running_requests=most, cuda_graph_bs=sizes)


def _make_states(config: EngineConfig, device: Device, model: CausalLM, num_rows: int) -> StatePool | None:
    specs = model.state_specs
    if not specs:
        return None
    number = num_snapshots(config, device, specs)
    with device.forward.active():
        number = model.context.shard.smallest(number)
    pool = StatePool(num_rows, number, specs, device.torch_device, config.state_grid, config.most_undone)
    device.name_rows(pool.carried, "states")
    device.name_rows(pool.kept, "open_blocks")
    return pool


def _load_models(
    config: EngineConfig, device: Device, shard: Shard, show_progress: bool
) -> tuple[CausalLM, DraftModel | None]:
    model, args, place = config.model, config.server_args, device.torch_device
    with phase("Prepared kernels", "preparing kernels; the first start compiles them"):
        fixed_order = args.enable_deterministic_inference
        context = make_layer_context(place, shard, getattr(torch, model.dtype), fixed_order)
        context = replace(context, selecting=selecting(device))
    if args.kv_cache_dtype == "fp8_e4m3":
        context = replace(context, kv_dtype=fp8_kv_dtype(place))
    if device.kind == "cuda" and args.load_format != "dummy":
        stored = read_headers(weight_files(Path(model.model_path)), model.quantization)
        needed = weight_bytes(model, stored) // shard.size
        check_fits(model, needed, device.memory_info()[0], "this GPU", ("a larger --tp-size",))
    how = args.load_format, place, context, config.random_seed, show_progress
    with announced("loading weights", has_bar=True):
        target = load_model(model, *how)
    if config.draft is None:
        return target, None
    return target, load_draft_model(config.draft, *how, target)


def _prepare_attention(
    config: EngineConfig, device: Device, model: CausalLM, draft: DraftModel | None, kv_pool: KVPool
) -> tuple[AttentionBackends, AttentionBackends]:
    """``Parts.attention`` and ``Parts.draft_attention``."""
    shard, num_layers, num_of_target = model.context.shard, kv_pool.num_layers, config.model.num_attention_layers
    rules = model.attention_rules | ({} if draft is None else draft.attention_rules)

    def agreed(name: str) -> str:  # what rank 0 has measured
        with device.forward.active():
            return shard.of_first(name.encode()).decode()

    def make(num_heads: int, layers: range, prefill: str, decode: str) -> AttentionBackends:
        length = config.model.context_length
        fixed_order = config.server_args.enable_deterministic_inference
        vision = config.model.vision
        sees_whole = vision is not None and vision.sees_whole
        setting = AttentionSetting(kv_pool, device, num_heads, length, layers, rules, agreed, fixed_order, sees_whole)
        return make_attention_backends(prefill, decode, setting)

    num_heads = shard.divide(config.model.num_heads, "attention heads")
    prefill, decode = config.prefill_attention_backend, config.decode_attention_backend
    wanted = None if config.speculative is None else config.speculative.draft_attention_backend
    kinds = kv_pool.layout.layers
    if draft is None or (wanted is None and kinds[0] == kinds[-1] and draft.num_heads == num_heads):
        shared = make(num_heads, range(num_layers), prefill, decode)
        return shared, shared
    target = make(num_heads, range(num_of_target), prefill, decode)
    layers = range(num_of_target, num_layers)
    prefill, decode = wanted or target.prefill_name, wanted or target.decode_name
    return target, make(draft.num_heads, layers, prefill, decode)


def open_tiers(parts: Parts) -> tuple[HiCacheController | None, Storage | None]:
    """What moves pages to the host and back, and the tier below the host; None without."""
    config, device, shard, storage = parts.config, parts.device, parts.model.context.shard, None
    if config.hicache is None:
        return None, None
    with phase("Allocated the host tier", "allocating the host tier"):
        with device.forward.active():  # before any rank takes its part
            room = shard.smallest(available_host_bytes() // config.num_sharing)
        pages, communicator = parts.accesses.pages, shard.communicator
        hicache = make_hicache_controller(
            config, device, parts.kv_pool, pages, room, communicator, parts.page_tags, parts.states
        )
    if config.hicache.storage is not None:
        with phase("Opened the storage", "opening the storage"):
            storage = make_storage(device, hicache.host_pool, config, rank=shard.rank, states=hicache.host_states)
    return hicache, storage
