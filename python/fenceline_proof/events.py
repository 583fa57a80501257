"""Events that must happen in the runs of the workload ``everything``, and how they are observed.

Each event is a decision, or a coincidence of several, that could go wrong in its own way. Events are observed from
outside, by wrapping methods of the engine and by looking at what was replayed; the engine contains no counters for
this. To add one: a line in :data:`EVENTS`, and a call of ``note`` where it can be seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fenceline.ipc.io_struct import AbortReq, UpdateWeightsReq
from fenceline.mem_cache.hicache import HiCache
from fenceline.mem_cache.storage.controller import Ack, Done, Fetched
from fenceline.mem_cache.storage.worker import Outcome
from fenceline.mem_cache.transfer import PageMove, Ticket, TransferKind
from fenceline.mem_cache.tree.hiradix_cache import HiRadixCache
from fenceline.mem_cache.tree.radix_cache import TreeNode
from fenceline.memory_order import Device, Points
from fenceline.model_executor.step import StepBatch, StepOutput
from fenceline.sampling.sampling_batch import ReqSampling
from fenceline.scheduler.masked_steps import StepMasks
from fenceline.scheduler.population import InFlight
from fenceline.scheduler.req import Prefix, Req
from fenceline.scheduler.scheduler import Scheduler
from fenceline_proof.flashinfer_library import PLANNED
from fenceline_proof.pictures import PICTURES
from fenceline_proof.script import Flag, Flags
from fenceline_sim.device import VgpuDevice
from fenceline_sim.gpu import Graph

# The states of a request, for aborts (``state_of``).
STATES = (
    "queued", "waiting for storage", "half-way through its prompt", "with its first step in flight", "running",
    "before a remap", "retracted", "retracted with a tail",
)  # fmt: skip


def _plain(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "")


# With what their names do not say.
EVENTS: dict[str, str] = {
    # steps and graphs
    **_plain("decode replay", "padded decode replay", "decode beyond the graphs", "piecewise replay"),
    **_plain("padded piecewise replay", "prefill beyond the pieces", "masks after a replay", "masks of a first token"),
    "decode replay with the sampler": "one whose logits go to the sampler with all its features",
    "masks for some of a batch": "a decode step samples under the masks of some of its requests",
    "masks and draw before publishing": "of the step before, whose tokens cannot have ended an answer",
    "masks and draw after publishing": "of the step before, because an answer may have ended or not all have a mask",
    "mask of a request that has left": "it left while the step's forward ran",
    "return with a grammar": "a retracted request continues where it was in its grammar",
    "piecewise replay while loading": "one whose pages are being loaded from the host layer by layer",
    "a prompt in three chunks": "in consecutive steps",
    "prompts beside decoding": "a step computes prompts and a token of each running request",
    "planned decode replay": "the plan is copied to the graph's own memory before it is replayed",
    "replay compared with its step": "--debug-cuda-graph computes the step without its graph as well",
    "decode replay with an FP8 cache": "keys and values are kept in eight bits",
    "a step for a request that has left": "it left while the step was in flight, so its results are dropped",
    # speculation
    **_plain("verification replay", "padded verification replay", "retraction while speculating", "load with a draft"),
    "several accepted drafts": "a step yields more than two tokens for a request",
    "accepted draft of a tree": "its nodes' rows are moved",
    "accepted draft of several layers": "each of which proposes one token",
    "accepted draft without a model": "found in the request's own tokens",
    "drafts of another depth": "than those of the step before",
    "drafts under a window": "verified for a request that is longer than the window of some layers",
    "draft behind": "all proposals of a draft without hidden states are accepted: it lacks the row of the last one",
    "tokens after an end": "a request ends in the middle of what a step yields; the rest is dropped",
    "a rejected slot is handed on": "its page is leased again, and another step writes there",
    # the prefix cache
    **_plain("admission from storage with a draft", "hit", "hit half-way through a node", "eviction from the device"),
    "remap": "a request moves onto the pages of another with the same prompt, and the next step reads them",
    "remap of a request that leaves": "before the next step",
    "stale match": "the prefix found for a waiting request has moved, and is looked up again",
    "pages handed on in use": "pages are leased again before it is known that their last users are done",
    # the host tier
    **_plain("load in FP8", "load of several nodes", "backup of several nodes", "backup while prefixes load"),
    **_plain("eviction from the host", "a node leaves every tier", "a node in transit leaves the device"),
    "a node in transit is split": "",
    "load for several requests": "one transfer for all that a step admits",
    "match of pages that are loading": "a request finds pages that another request's load has not filled yet",
    "adopted page": "a page that is only on the host is computed again, and the computed one is kept",
    "write-back": "pages go to the host because their memory on the device is needed",
    "write-back under load": "while a load is in transfer",
    "host pages handed on in use": "leased again before it is known that the transfers that used them are done",
    "the host is full": "all its pages are in use, so a backup does not happen",
    # storage
    "fetch of several pages": "in one request to storage",
    "admission from storage": "a request is admitted with pages that storage returned",
    "prefetch of all": "every page that was asked for came",
    "prefetch of nothing": "storage has none of the pages",
    "prefetch cut short": "a request is admitted while pages are still being read",
    "prefetch out of time": "a request has waited for storage as long as it may",
    "a held page leaves the tree": "while a worker still writes it to storage",
    "eviction from storage": "its directory is full",
    "nothing may leave storage": "for a write that is larger than its directory",
    "storage refuses a write": "of one page",
    "storage raises": "which costs the call's pages",
    # retraction
    **_plain("retraction for memory", "retraction by pause", "retraction by recompute", "retraction by offload"),
    **_plain("retracted twice", "return", "abort of all", *(f"abort {state}" for state in STATES)),
    "preemption": "a running request is retracted for one of higher priority",
    "offloaded tail": "a page that is not full goes to the host",
    "return with its tail": "that page comes back with the request",
    "return without its tail": "that page is dropped and computed again",
    "return of counted tokens": "with penalties: its output is counted again",
    # pictures
    **_plain("a chunk ends inside a picture", "retraction with pictures", "drafts behind a picture"),
    "embeddings found": "of a picture that an earlier step has computed",
    "embeddings computed again": "others have been given their rows",
    "hit behind a picture": "a request finds a prefix with one on the device",
    "load behind a picture": "or on the host",
    "a draft sees the next chunk's picture": "its row of a token is computed from the tokens behind it",
    # the rest
    **{f"pause by {mode}": "with requests running" for mode in ("abort", "retract", "in_place")},
    "new weights with requests running": "which are computed again with these",
    "new weights of some tensors": "with requests running or waiting",
    "new weights before a pause": "generation does not go on with them at once",
    "flush": "of a tree that holds pages",
    "flush that waited": "until the last request left",
    "flush of storage": "",
}
# Rare ones that only runs with these flags show. None: of any value.
_NEEDED: dict[str, dict[str, Flag | None]] = {
    "accepted draft of a tree": {"speculative_eagle_topk": None},
    "accepted draft without a model": {"draft": "NGRAM"},
    "drafts under a window": {"draft": None, "model": "windows"},
    "a draft sees the next chunk's picture": {"draft": None, "model": PICTURES},
}


def may_show(event: str, flags: Flags) -> bool:
    """Whether a run of ``everything`` with these flags may show ``event``."""
    needed = _NEEDED.get(event, {})
    return all(name in flags and value in (None, flags[name]) for name, value in needed.items())


def state_of(scheduler: Scheduler, req: Req) -> str:
    if req.row == 0:
        if req.num_retractions:
            return "retracted" if req.tail is None else "retracted with a tail"
        return "queued" if scheduler.memory.may_schedule(req) else "waiting for storage"
    if req is scheduler.population.chunked:
        return "half-way through its prompt"
    if any(remap.req is req for remap in scheduler.memory.remaps):
        return "before a remap"
    return "running" if req.output_ids else "with its first step in flight"


class Watch:
    """Records the events of one run. Made before the model runner, so that it sees which graphs are captured."""

    def __init__(self, device: Device) -> None:
        self.seen: set[str] = set()
        self._graphs: list[Graph] = []
        self._num_replays: Counter[str] = Counter()
        self._has_replayed = False  # the latest decode step
        self._runs = 0  # requests, when the weights are replaced
        self._num_chunks: Counter[str] = Counter()
        self._encoded: set[bytes] = set()
        if isinstance(device, VgpuDevice):
            around(device.gpu, "graph", after=lambda graph, *args: self._graphs.append(graph))

    def note(self, event: str, happened: object = True) -> None:
        assert event in EVENTS, f"{event!r} is not in the list"
        if happened:
            self.seen.add(event)

    def watch(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._in_fp8 = scheduler.config.server_args.kv_cache_dtype == "fp8_e4m3"
        memory = scheduler.memory
        gone = "a step for a request that has left"
        around(scheduler, "launch", after=self._launched)
        around(scheduler, "publish", before=lambda flight: self.note(gone, any(req.left for req in flight.reqs)))
        around(scheduler.masks, "fill_masks", before=self._fills)
        around(scheduler.masks, "sample_early", after=partial(self._draws, "before", True))
        around(scheduler.masks, "stuck", before=partial(self._draws, "after", False))
        around(scheduler.control, "abort", before=self._aborts)
        around(scheduler.population, "retract", before=self._retracts)
        around(memory, "with_remaps", before=self._remaps)
        around(scheduler.control, "flush", after=self._flushed)
        around(scheduler.control, "pause", before=lambda mode: self.note(f"pause by {mode}", len(scheduler.running)))
        around(scheduler.control, "update_weights", before=self._updates, after=self._updated)
        around(scheduler.stats, "preempted", before=lambda victims: self.note("preemption"))
        around(
            scheduler.control, "flush_when_idle",
            before=lambda: self.note("flush that waited", scheduler.control._flushes),
        )  # fmt: skip
        self._speculates = scheduler.config.speculative is not None
        if self._speculates:
            self._watch_speculation()
        around(memory, "admit", before=self._admits, after=self._admitted)
        around(memory, "_match", before=self._matches)
        around(memory.pages, "alloc", after=partial(self._handed_on, "pages handed on in use"))
        around(memory.tree, "evict", after=lambda num, _: self.note("eviction from the device", num))
        around(memory.tree, "_split", before=self._splits)
        around(memory, "flush", before=lambda storage=False: self.note("flush", memory.tree.num_nodes))
        if memory.tiers is not None:
            assert isinstance(memory.tree, HiRadixCache), "the tree has several tiers"
            self._watch_tiers(memory.tiers, memory.tree)

    # --- steps ---------------------------------------------------------------------------------------

    def _launched(self, flight: InFlight, batch: StepBatch, reqs: Sequence[Req]) -> None:
        replayed = self._replayed()
        planned = self._scheduler.config.decode_attention_backend in PLANNED
        self.note("planned decode replay", planned and replayed and batch.is_decode)
        self.note("decode replay with an FP8 cache", self._in_fp8 and replayed and batch.is_decode)
        if batch.is_decode:
            self._decode(batch, [name for name in replayed if name.startswith(("decode", "verify"))])
        else:
            self._extend(batch, reqs, [name for name in replayed if name.startswith("prefill")])

    def _replayed(self) -> list[str]:
        """Graphs that were replayed since the last call."""
        counts = Counter({graph.name: graph.num_replays for graph in self._graphs})
        new = counts - self._num_replays
        self._num_replays = counts
        return list(new)

    def _decode(self, batch: StepBatch, replayed: list[str]) -> None:
        self._has_replayed = bool(replayed)
        if not replayed:
            self.note("decode beyond the graphs", self._scheduler.config.cuda_graph_bs)
            return
        full = _size(replayed[0]) == len(batch.rows)
        self.note("replay compared with its step", self._scheduler.config.server_args.debug_cuda_graph)
        if self._speculates:
            self.note("verification replay" if full else "padded verification replay")
        self.note("decode replay" if full else "padded decode replay")
        self.note("decode replay with the sampler", any(map(_beyond_a_draw, batch.sampling)))

    def _extend(self, batch: StepBatch, reqs: Sequence[Req], replayed: list[str]) -> None:
        num_tokens = batch.num_prompt_tokens + batch.num_decodes
        self.note("embeddings found", not batch.encodes and any(one.image_rows is not None for one in batch.chunks))
        encoded = {one.image.digest for one in batch.encodes}
        self.note("embeddings computed again", encoded & self._encoded)
        self._encoded |= encoded
        if replayed:
            full = _size(replayed[0]) == num_tokens
            self.note("piecewise replay" if full else "padded piecewise replay")
            self.note("piecewise replay while loading", batch.loads)
        else:
            self.note("prefill beyond the pieces", self._scheduler.config.piecewise_cuda_graph_tokens)
        self.note("prompts beside decoding", batch.num_decodes)
        for chunk, req in zip(batch.chunks, reqs, strict=False):
            self._num_chunks[req.rid] += 1
            self.note("a prompt in three chunks", self._num_chunks[req.rid] == 3)
            end = req.allocated_len
            self.note("a chunk ends inside a picture", any(one.offset < end < one.end for one in req.images))
            read_end = end if chunk.image_rows is None else end + len(chunk.image_rows) - len(chunk.token_ids)
            self.note("a draft sees the next chunk's picture", any(end <= one.offset < read_end for one in req.images))
            self.note("return of counted tokens", chunk.history is not None and req.num_retractions)

    def _draws(self, when: str, sampled: bool, *_: object) -> None:
        pending = self._scheduler.masks.pending
        self.note(f"masks and draw {when} publishing", pending is not None and bool(pending.sampled) is sampled)

    def _fills(self, pending: StepMasks) -> None:
        batch, mine = pending.flight.batch, pending.constrained.reqs
        if not batch.is_decode:
            self.note("masks of a first token")
        else:
            self.note("masks for some of a batch", len(mine) < len(batch.rows))
            self.note("masks after a replay", self._has_replayed)
        self.note("mask of a request that has left", any(req.left for req in mine))
        self.note("return with a grammar", any(req.num_retractions and not req.left for req in mine))

    # --- speculation ---------------------------------------------------------------------------------

    def _watch_speculation(self) -> None:
        scheduler, memory = self._scheduler, self._scheduler.memory
        self._rejected_pages: set[int] = set()
        config, draft = scheduler.config.speculative, scheduler.config.draft
        assert config is not None, "the engine speculates"
        self._depth: int | None = None  # of the latest step that was published
        self._has_trees, self._has_several_layers = config.topk > 1, draft is not None and draft.lookahead > 1
        windows = [window for window in scheduler.config.model.windows if window is not None]
        self._window = min(windows, default=None)
        self._is_behind, self._looks_up = draft is not None and draft.num_rows_behind > 0, draft is None
        around(scheduler.publisher, "publish_counted", before=self._counted)
        around(scheduler.publisher, "publish_tokens", before=self._yields)
        around(memory, "release", before=self._releases)
        around(memory.pages, "alloc", after=self._leased)

    def _counted(self, batch: StepBatch, reqs: Sequence[Req], number: int, out: StepOutput) -> None:
        counts = out.token_counts(len(reqs))
        self.note("several accepted drafts", max(counts) > 2)
        self.note("accepted draft of a tree", max(counts) > 1 and self._has_trees)
        self.note("accepted draft of several layers", max(counts) > 1 and self._has_several_layers)
        depth = batch.depth.depth
        self.note("drafts of another depth", self._depth not in (None, depth))
        self._depth = depth
        longest = max(req.committed_len for req in reqs)
        self.note("drafts under a window", depth and self._window is not None and longest > self._window)
        self.note("drafts behind a picture", depth and any(req.images for req in reqs))
        self.note("draft behind", self._is_behind and 0 < depth < max(counts))
        self.note("accepted draft without a model", max(counts) > 1 and self._looks_up)

    def _yields(self, req: Req, tokens: Sequence[int], *_: object) -> None:
        ends = (len(req.output_ids) + i >= req.max_new_tokens for i in range(1, len(tokens)))
        self.note("tokens after an end", any(ends) or any(token in req.stop_ids for token in tokens[:-1]))

    def _releases(self, req: Req) -> None:
        size = self._scheduler.config.server_args.page_size
        if req.row and req.num_verified:
            last = min(req.committed_len + (self._depth or 0), len(req.pages) * size - 1)
            self._rejected_pages |= set(req.pages[-(-req.committed_len // size) : last // size + 1])

    def _leased(self, result: tuple[Sequence[int], Points] | None, num: int) -> None:
        if result is not None:
            pages = {int(page) for page in result[0]}
            self.note("a rejected slot is handed on", pages & self._rejected_pages)
            self._rejected_pages -= pages

    # --- requests ------------------------------------------------------------------------------------

    def _aborts(self, message: AbortReq) -> None:
        self.note("abort of all", message.abort_all and len(self._scheduler.reqs) > 1)
        req = self._scheduler.reqs.get(message.rid)
        if req is not None:
            self.note(f"abort {state_of(self._scheduler, req)}")

    def _retracts(self, req: Req, cause: str) -> None:
        config = self._scheduler.config
        offloads = config.hicache is not None and config.server_args.retract_policy == "offload"
        self.note("retraction by pause" if self._scheduler.control.paused else "retraction for memory")
        self.note("retraction by offload" if offloads else "retraction by recompute")
        self.note("retraction with pictures", req.images)
        self.note("retracted twice", req.num_retractions == 1)
        self.note("retraction while speculating", req.num_verified)

    def _updates(self, message: UpdateWeightsReq) -> None:
        self._runs = len(self._scheduler.running)

    def _updated(self, result: tuple[bool, str, bytes], message: UpdateWeightsReq) -> None:
        self.note("new weights with requests running", result[0] and self._runs)
        self.note("new weights of some tensors", result[0] and message.file and self._scheduler.reqs)
        self.note("new weights before a pause", result[0] and message.keep_pause)

    def _flushed(self, result: tuple[bool, str], storage: bool) -> None:
        self.note("flush of storage", result[0] and storage)

    # --- prefixes ------------------------------------------------------------------------------------

    def _matches(self, req: Req) -> None:
        tree, queued = self._scheduler.memory.tree, req.queued_match
        self.note("stale match", queued is not None and queued.num_created == tree.num_created)

    def _admits(self, req: Req, prefix: Prefix) -> None:
        match = prefix.match
        self.note("hit", match.num_tokens)
        end = req.images[0].end if req.images else req.num_tokens
        self.note("hit behind a picture", match.num_tokens >= end)
        self.note("load behind a picture", match.num_host_tokens and match.num_tokens + match.num_host_tokens >= end)
        self.note("load with a draft", match.num_host_tokens and self._speculates)
        self.note("load in FP8", match.num_host_tokens and self._in_fp8)
        self.note("match of pages that are loading", match.loading)
        self.note("return", req.num_retractions)
        self.note("return with its tail", prefix.num_tail_tokens)
        self.note("return without its tail", req.tail is not None and not prefix.num_tail_tokens)
        op = req.prefetch
        self.note("prefetch cut short", op is not None and op.num_fetched < op.num_found)
        self.note("prefetch out of time", op is not None and op.timed_out)

    def _admitted(self, after: Points, req: Req, prefix: Prefix) -> None:
        details = req.cached_details
        from_storage = details is not None and details.storage
        self.note("admission from storage", from_storage)
        self.note("admission from storage with a draft", from_storage and self._speculates)

    def _remaps(self, batch: StepBatch) -> None:
        left = [remap.req.left for remap in self._scheduler.memory.remaps]
        self.note("remap", not all(left))
        self.note("remap of a request that leaves", any(left))

    def _handed_on(self, event: str, result: tuple[object, Points] | None, num: int) -> None:
        self.note(event, result is not None and not result[1].passed)

    def _splits(self, node: TreeNode, num_pages: int) -> None:
        self.note("hit half-way through a node")
        self.note("a node in transit is split", node.transfers)

    # --- tiers ---------------------------------------------------------------------------------------

    def _watch_tiers(self, tiers: HiCache, tree: HiRadixCache) -> None:
        self._tiers, self._tree = tiers, tree
        self._num_loading = 0
        around(tree, "begin_load", before=self._begins_load)
        around(tree, "_adopt", after=lambda num, *args: self.note("adopted page", num))
        around(tree, "begin_backup", after=self._began_backup)
        around(tree, "_drop", before=lambda node: self.note("a node leaves every tier"))
        around(
            tree, "_leave_device", before=lambda node: self.note("a node in transit leaves the device", node.transfers)
        )
        if tree._spill is not None:
            around(tree, "_spill", before=lambda nodes: self.note("write-back"))
        around(tiers, "offload", after=lambda tail, *args: self.note("offloaded tail", tail))
        around(tiers.host_pages, "alloc", after=partial(self._handed_on, "host pages handed on in use"))
        around(tree.host, "_evict_all", after=lambda num, _: self.note("eviction from the host", num))
        around(tree.host, "_orphan", before=lambda *args: self.note("a held page leaves the tree"))
        around(tiers._transfers, "load", before=self._loads)
        around(tiers._transfers, "drain_acks", after=self._acked)
        if tiers.storage is not None:
            around(tiers.storage._controller, "drain", after=self._drained)

    def _begins_load(self, host_node: TreeNode, device_pages: object, ticket: Ticket) -> None:
        nodes = self._tree._host_only(host_node)
        self.note("load of several nodes", len(nodes) > 1)
        self.note("load for several requests", ticket.num_pages)

    def _loads(self, *args: object) -> None:
        self._num_loading += 1

    def _acked(self, tickets: Sequence[Ticket]) -> None:
        self._num_loading -= sum(ticket.kind is TransferKind.LOAD for ticket in tickets)

    def _began_backup(self, move: PageMove, nodes: Sequence[TreeNode], ticket: Ticket) -> None:
        backed_up = [node for node in nodes if ticket in node.transfers]
        self.note("backup of several nodes", len(backed_up) > 1)
        loading = self._num_loading or self._tiers._load is not None  # submitted, or about to be
        self.note("backup while prefixes load", backed_up and loading)
        self.note("write-back under load", backed_up and loading and self._tree._leaving)
        self.note("the host is full", any(node.host_pages is None and node.on_device for node in nodes))

    def _drained(self, acks: Sequence[Ack]) -> None:
        for ack in acks:
            match ack:
                case Fetched():
                    self.note("fetch of several pages", ack.num_pages > 1)
                case Done():
                    self.note("prefetch of all", ack.outcome is Outcome.COMPLETE)
                    self.note("prefetch of nothing", ack.outcome is Outcome.ABSENT)


def _size(graph: str) -> int:
    """``decode[4]``, ``prefill[16].2`` → 4, 16."""
    return int(graph.partition("[")[2].partition("]")[0])


def _beyond_a_draw(sampling: ReqSampling) -> bool:
    """Whether a request needs more of the sampler than a temperature and a draw."""
    p = sampling.params
    filtered = not p.is_greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
    adjusted = p.needs_penalties or p.logit_bias or p.min_new_tokens
    return bool(sampling.return_logprob or filtered or adjusted)


def around(
    owner: object, name: str, before: Callable[..., object] = lambda *args, **kwargs: None,
    after: Callable[..., object] = lambda result, *args, **kwargs: None,
) -> None:  # fmt: skip
    """Wrap the method ``name`` of ``owner``: ``before`` gets its arguments, ``after`` its result and then these."""
    method = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        result = method(*args, **kwargs)
        after(result, *args, **kwargs)
        return result

    setattr(owner, name, wrapped)
