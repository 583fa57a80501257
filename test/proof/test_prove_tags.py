"""Shadow tags and ownership: faults that no race is part of are named by the operation that brings them about."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import more_workloads

from fenceline.ipc.io_struct import FlushCacheReq
from fenceline.layers import decoder_layer
from fenceline.layers.attention.reference import ReferenceAttentionBackend, Requests
from fenceline.layers.decoder_layer import SelfAttention
from fenceline.layers.forward_batch import AttentionInputs, ForwardMode
from fenceline.mem_cache.hicache import HiCache, StorageTier
from fenceline.mem_cache.host.page_copy import RunCopier
from fenceline.mem_cache.kv_pool import ReqPool
from fenceline.mem_cache.page_hash import PageFingerprint
from fenceline.mem_cache.storage.file_backend import FileBackend
from fenceline.mem_cache.storage.worker import Prefetch
from fenceline.mem_cache.tree import hiradix_cache, radix_cache
from fenceline.mem_cache.tree.hiradix_cache import HiRadixCache
from fenceline.mem_cache.tree.radix_cache import RadixCache
from fenceline.memory_order import Points
from fenceline.model_executor import extend_runner
from fenceline.model_executor.piecewise_cuda_graph_runner import PiecewiseCudaGraphRunner
from fenceline.scheduler.prefill import PrefillPlanner
from fenceline.scheduler.request_memory import RequestMemory
from fenceline_proof.runs import ANSWERS, Outcome, Trial, run
from fenceline_proof.script import GRAPH_CONTEXT, Scenario, Script
from fenceline_sim.errors import OwnershipError, TagError

torch.set_num_threads(1)

TAGS, OWNERSHIP = TagError.checker, OwnershipError.checker

# --- faults, each a line of the engine -----------------------------------------------------------------


def _pages_loaded_in_a_wrong_order(patch: pytest.MonkeyPatch) -> None:
    right = HiRadixCache.begin_load

    def wrong(self: HiRadixCache, *args: Any) -> Any:
        move = right(self, *args)
        return dataclasses.replace(move, host_pages=move.host_pages[::-1].copy())

    patch.setattr(HiRadixCache, "begin_load", wrong)


def _a_node_leaves_without_its_transfers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hiradix_cache, "transfer_points", lambda node: Points.none())


def _admitted_pages_without_their_points(patch: pytest.MonkeyPatch) -> None:
    right = RequestMemory.admit

    def wrong(self: RequestMemory, *args: Any) -> Points:
        right(self, *args)
        return Points.none()

    patch.setattr(RequestMemory, "admit", wrong)


def _pages_of_a_load_without_their_points(patch: pytest.MonkeyPatch) -> None:
    right = HiCache.begin_load
    patch.setattr(HiCache, "begin_load", lambda self, match, pages, after: right(self, match, pages, Points.none()))


def _unused_pages_of_a_fetch_without_their_points(patch: pytest.MonkeyPatch) -> None:
    right = StorageTier._end

    def wrong(self: StorageTier, op: Prefetch) -> None:
        op.after = Points.none()
        right(self, op)

    patch.setattr(StorageTier, "_end", wrong)


def _pages_backed_up_in_a_wrong_order(patch: pytest.MonkeyPatch) -> None:
    right = HiRadixCache.begin_backup

    def wrong(self: HiRadixCache, *args: Any) -> Any:
        move = right(self, *args)
        return dataclasses.replace(move, device_pages=move.device_pages[::-1].copy())

    patch.setattr(HiRadixCache, "begin_backup", wrong)


def _halves_swapped_on_the_way_to_the_host(patch: pytest.MonkeyPatch) -> None:
    """Of each layer the host gets keys where values belong, and the other way round."""
    right, pieces = RunCopier.to_host, RunCopier._pieces

    def swapped(self: RunCopier, *args: Any) -> Iterator[Any]:
        pairs = list(pieces(self, *args))
        num_runs = len(pairs) // len(args[-1])
        for index, (device, _) in enumerate(pairs):
            first = index // (2 * num_runs) * 2 * num_runs
            yield device, pairs[first + (index - first + num_runs) % (2 * num_runs)][1]

    def wrong(self: RunCopier, *args: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(RunCopier, "_pieces", swapped)
            right(self, *args)

    patch.setattr(RunCopier, "to_host", wrong)


def _a_copy_that_takes_the_neighbour_page(patch: pytest.MonkeyPatch) -> None:
    """Backups read one device page too far."""
    right = RunCopier.to_host

    def wrong(self: RunCopier, stream: Any, device_pages: Any, *args: Any) -> None:
        right(self, stream, np.minimum(device_pages + 1, self._kv_pool.num_pages - 1), *args)

    patch.setattr(RunCopier, "to_host", wrong)


def _rows_stored_under_the_neighbour_layer(patch: pytest.MonkeyPatch) -> None:
    right = SelfAttention.project

    def wrong(self: SelfAttention, *args: Any) -> torch.Tensor:
        self.layer_id ^= 1
        try:
            return right(self, *args)
        finally:
            self.layer_id ^= 1

    patch.setattr(SelfAttention, "project", wrong)


def _a_page_table_off_by_one_page(patch: pytest.MonkeyPatch) -> None:
    right = ReqPool.write_pages
    patch.setattr(ReqPool, "write_pages", lambda self, rows, columns, pages: right(self, rows, columns + 1, pages))


def _attention_reads_one_page_too_far(patch: pytest.MonkeyPatch) -> None:
    right = Requests.reads

    def wrong(self: Requests, *args: Any) -> Any:
        return right(dataclasses.replace(self, page_table=torch.roll(self.page_table, -1, 1)), *args)

    patch.setattr(Requests, "reads", wrong)


def _attention_reads_in_another_order(patch: pytest.MonkeyPatch) -> None:
    right = Requests.reads

    def wrong(*args: Any) -> Any:
        slots, visible = right(*args)
        return slots.flip(1), visible

    patch.setattr(Requests, "reads", wrong)


def _decode_otherwise(patch: pytest.MonkeyPatch, change: Callable[[AttentionInputs], dict[str, Any]]) -> None:
    """Decode steps attend with inputs of which some are others."""
    right = ReferenceAttentionBackend.plan

    def wrong(self: ReferenceAttentionBackend, inputs: AttentionInputs) -> Any:
        if inputs.mode is ForwardMode.DECODE:
            inputs = dataclasses.replace(inputs, **change(inputs))
        return right(self, inputs)

    patch.setattr(ReferenceAttentionBackend, "plan", wrong)


def _attention_reads_another_request(patch: pytest.MonkeyPatch) -> None:
    """The rows of a decode step are taken in the opposite order."""
    _decode_otherwise(patch, lambda inputs: {"rows": inputs.rows.flip(0)})


def _attention_reads_nothing_of_the_last_request(patch: pytest.MonkeyPatch) -> None:
    """Its row is that of padding, whose pages are all the sink's."""
    _decode_otherwise(patch, lambda inputs: {"rows": torch.cat([inputs.rows[:-1], inputs.rows[-1:] * 0])})


def _attention_leaves_out_the_last_token(patch: pytest.MonkeyPatch) -> None:
    """Of each request of a decode step the token that is computed is not attended to."""
    _decode_otherwise(patch, lambda inputs: {"seq_lens": inputs.seq_lens - 1, "seq_lens_cpu": inputs.seq_lens_cpu - 1})


def _a_window_longer_by(tokens: int, patch: pytest.MonkeyPatch) -> None:
    right = decoder_layer.LayerRules
    patch.setattr(
        decoder_layer, "LayerRules", lambda window, *others: right(None if window is None else window + tokens, *others)
    )


def _attention_reads_a_token_in_front_of_the_window(patch: pytest.MonkeyPatch) -> None:
    _a_window_longer_by(1, patch)


def _attention_leaves_out_the_first_token_of_the_window(patch: pytest.MonkeyPatch) -> None:
    _a_window_longer_by(-1, patch)


def _a_host_page_matched_for_another_salt(patch: pytest.MonkeyPatch) -> None:
    right = HiRadixCache.match_prefix
    patch.setattr(
        HiRadixCache, "match_prefix", lambda self, tokens, extra_key="": right(self, tokens, "a" if extra_key else "")
    )


def _a_live_slot_written_by_a_padded_row(patch: pytest.MonkeyPatch) -> None:
    right = PiecewiseCudaGraphRunner._plan_fields

    def wrong(self: PiecewiseCudaGraphRunner) -> Any:
        return [dataclasses.replace(f, pad=5) if f.name == "out_slots" else f for f in right(self)]

    patch.setattr(PiecewiseCudaGraphRunner, "_plan_fields", wrong)


def _a_page_used_after_it_was_retired(patch: pytest.MonkeyPatch) -> None:
    """Requests that the tree moves onto other pages keep those in their page table that they have given back."""
    right = RequestMemory.with_remaps

    def wrong(self: RequestMemory, batch: Any) -> Any:
        right(self, batch)
        return batch

    patch.setattr(RequestMemory, "with_remaps", wrong)


def _a_page_of_another_request(patch: pytest.MonkeyPatch) -> None:
    """Those who grow are given the pages that were handed out last time."""
    right, last = RequestMemory.grow, {}

    def wrong(self: RequestMemory, reqs: Any, nums: Any) -> Any:
        pages, after = right(self, reqs, nums)
        given, last["pages"] = last.get("pages", pages), pages
        if len(given) != len(pages):
            return pages, after
        for req, part in zip(reqs, np.split(given, np.cumsum(nums)[:-1]), strict=True):
            req.pages[-len(part) :] = type(req.pages)("i", part.tolist())
        return given, after

    patch.setattr(RequestMemory, "grow", wrong)


def _a_page_given_back_too_early(patch: pytest.MonkeyPatch) -> None:
    """A request's last page is retired before the step that the request is admitted to."""
    right = PrefillPlanner._add_chunk

    def wrong(self: PrefillPlanner, plan: Any, req: Any, budget: Any, *known: Any) -> None:
        right(self, plan, req, budget, *known)
        self._memory.pages.retire(np.array(req.pages[-1:], np.int32), plan.after)

    patch.setattr(PrefillPlanner, "_add_chunk", wrong)


def _a_row_without_the_points_of_its_last_step(patch: pytest.MonkeyPatch) -> None:
    right = RequestMemory.release

    def wrong(self: RequestMemory, req: Any) -> None:
        retire = self.rows.retire
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self.rows, "retire", lambda ids, after: retire(ids, Points.none()))
            right(self, req)

    patch.setattr(RequestMemory, "release", wrong)


def _storage_forgets_the_salt(patch: pytest.MonkeyPatch) -> None:
    right = PageFingerprint.root_key
    patch.setattr(PageFingerprint, "root_key", lambda self, extra_key="": right(self))


def _storage_brings_the_wrong_page(patch: pytest.MonkeyPatch) -> None:
    right = FileBackend.get

    def wrong(self: FileBackend, keys: Any, pages: Any) -> Any:
        return right(self, keys, pages[::-1])

    patch.setattr(FileBackend, "get", wrong)


def _a_request_that_keeps_what_the_tree_has_taken(patch: pytest.MonkeyPatch) -> None:
    """It goes on as if the whole pages of its prompt were still its own."""
    right = RequestMemory.cache_prompt

    def wrong(self: RequestMemory, req: Any) -> Any:
        shared = req.shared_len
        remap = right(self, req)
        req.shared_len = shared
        return remap

    patch.setattr(RequestMemory, "cache_prompt", wrong)


def _a_page_that_nobody_has(patch: pytest.MonkeyPatch) -> None:
    """Who asks for pages uses those behind the ones that it is given."""
    right = RequestMemory._alloc

    def wrong(self: RequestMemory, num_pages: int) -> Any:
        pages, after = right(self, num_pages)
        return pages + 1, after

    patch.setattr(RequestMemory, "_alloc", wrong)


def _a_prefix_that_is_a_page_too_long(patch: pytest.MonkeyPatch) -> None:
    """The first page behind a request's cached prefix is taken for a part of it."""
    right = RequestMemory.admit

    def wrong(self: RequestMemory, req: Any, prefix: Any) -> Any:
        after = right(self, req, prefix)
        req.shared_len += self.page_size
        return after

    patch.setattr(RequestMemory, "admit", wrong)


def _tokens_stored_in_another_order(patch: pytest.MonkeyPatch) -> None:
    """The slots of a chunk are taken from its end."""
    right = PrefillPlanner._slots
    patch.setattr(PrefillPlanner, "_slots", lambda self, *args: right(self, *args)[::-1])


def _a_token_sampled_for_the_next_row(patch: pytest.MonkeyPatch) -> None:
    right = extend_runner._extend_arrays

    def wrong(batch: Any) -> Any:
        arrays = right(batch)
        return arrays | {"sample_rows": arrays["sample_rows"] + 1}

    patch.setattr(extend_runner, "_extend_arrays", wrong)


def _a_key_without_the_pages_before(patch: pytest.MonkeyPatch) -> None:
    """A page's name in storage says what its own tokens are, and not what comes before them."""
    right = radix_cache.page_keys

    def wrong(parent: bytes, tokens: Any, page_size: int, lookahead: int, images: Any) -> list[bytes]:
        pages = [tokens[first : first + page_size] for first in range(0, len(tokens), page_size)]
        return [key for page in pages for key in right(bytes(32), page, page_size)]

    patch.setattr(radix_cache, "page_keys", wrong)


def _no_attention_in_a_step_without_graphs(patch: pytest.MonkeyPatch) -> None:
    """Of the two passes of ``--debug-cuda-graph``, the first one skips it in the second step."""
    right, passes = PiecewiseCudaGraphRunner._submit, []

    def wrong(self: PiecewiseCudaGraphRunner, pieces: Any, batch: Any) -> None:
        passes.append(pieces)
        if len(passes) != 3:
            right(self, pieces, batch)
            return
        for piece in pieces:
            piece()

    patch.setattr(PiecewiseCudaGraphRunner, "_submit", wrong)


def _the_tree_has_pages_in_another_order(patch: pytest.MonkeyPatch) -> None:
    """Nobody asks for that prefix again, so nobody reads them."""
    right = RadixCache._add_leaf

    def wrong(self: RadixCache, parent: Any, tokens: Any, pages: Any, *args: Any) -> Any:
        return right(self, parent, tokens, pages[::-1].copy(), *args)

    patch.setattr(RadixCache, "_add_leaf", wrong)


# --- where they show -----------------------------------------------------------------------------------

HOST = {
    "max_total_tokens": 28,
    "max_running_requests": 1,
    "chunked_prefill_size": 32,
    "page_size": 4,
    "enable_hierarchical_cache": True,
    "hicache_ratio": 4.0,
    "hicache_io_backend": "direct",
}


def _reloaded(random: Random) -> Scenario:
    """A prefix of several pages goes to the host and comes back, in the end for another namespace."""
    script = Script(random)
    family = script.prompt(16, 16)
    for turn, (prompt, salt) in enumerate(
        ((family, "a"), (script.prompt(18, 18), ""), (family, "a"), (script.prompt(18, 18), ""), (family, "b"))
    ):
        script.add(12 * turn, prompt + script.prompt(3, 3), 3, extra_key=salt)
    return script.scenario(**HOST)


def _stored(random: Random) -> Scenario:
    """A prefix of several pages that only storage still has, asked for in another namespace and in its own."""
    script = Script(random)
    family = script.prompt(12, 12)
    for turn, salt in enumerate("aba"):
        script.add(16 * turn, family + script.prompt(3, 3), 3, extra_key=salt)
        script.send(16 * turn + 12, FlushCacheReq(id=f"flush-{turn}"))
    flags = {"hicache_storage_backend": "file", "hicache_storage_prefetch_policy": "wait_complete"}
    return script.scenario(**HOST, **flags, hicache_write_policy="write_through")


def _stored_apart(random: Random) -> Scenario:
    """Two prompts of two pages, of which only the second ones are the same, go to storage."""
    script = Script(random)
    same = script.prompt(4, 4)
    for turn in range(2):
        script.add(16 * turn, script.prompt(4, 4) + same + script.prompt(1, 3), 3)
    return script.scenario(**HOST, hicache_storage_backend="file", hicache_write_policy="write_through")


def _pieces(random: Random) -> Scenario:
    """Prompts whose steps are padded, some of them beside others that decode."""
    script = Script(random)
    for turn in range(4):
        script.add(3 * turn, script.prompt(5, 7), 6)
    return script.scenario(
        max_total_tokens=96, max_running_requests=4, chunked_prefill_size=16, page_size=4,
        piecewise_cuda_graph_tokens=(8, 16),
    )  # fmt: skip


def _computed_twice(random: Random) -> Scenario:
    """Prefill steps that are compared with their replays. The second step computes the rest of a prompt and then the
    beginning of one that has nothing before it, so that attention reads no slots of this one, in either pass."""
    script = Script(random)
    for length in (14, 6):
        script.add(0, script.prompt(length, length), 2)
    return script.scenario(
        max_total_tokens=96, max_running_requests=4, chunked_prefill_size=8, page_size=4,
        piecewise_cuda_graph_tokens=(8,), cuda_graph_bs=(4,), context_length=GRAPH_CONTEXT, debug_cuda_graph=True,
    )  # fmt: skip


def _one_begins_like_another(random: Random) -> Scenario:
    """The second step computes a prompt of one token, whose slots attention does not read, before the rest of a longer
    one that begins with the same token. Prove had this with --workload engine --seed 300890."""
    script = Script(random)
    prompt = script.prompt(13, 13)
    for length in (13, 1):
        script.add(0, prompt[:length], 2)
    return script.scenario(max_total_tokens=96, max_running_requests=4, chunked_prefill_size=8, page_size=4)


def _twins(random: Random) -> Scenario:
    """The same prompt at the same time, computed twice; afterwards one of the two gives its pages back."""
    script = Script(random)
    prompt = script.prompt(12, 12)
    for _ in range(2):
        script.add(0, prompt, 8)
    return script.scenario(max_total_tokens=96, max_running_requests=4, chunked_prefill_size=None, page_size=4)


def _crowd(random: Random) -> Scenario:
    """Requests that decode side by side and grow."""
    script = Script(random)
    for _ in range(3):
        script.add(0, script.prompt(4, 9), 14)
    return script.scenario(max_total_tokens=160, max_running_requests=4, chunked_prefill_size=None, page_size=4)


MORE_WORKLOADS = {
    "tags_reloaded": _reloaded,
    "tags_stored": _stored,
    "tags_stored_apart": _stored_apart,
    "tags_pieces": _pieces,
    "tags_computed_twice": _computed_twice,
    "tags_one_begins_like_another": _one_begins_like_another,
    "tags_twins": _twins,
    "tags_crowd": _crowd,
}
R, K0 = r"r\d", r"kv_pool\.layer0\.k"
SALT_A = r"page \d+, slot 0 of it, holds token 0 of r0 \(namespace 'a'\), .*"
PLANTED = [
    (_pages_loaded_in_a_wrong_order, "tags_reloaded", TAGS,
     rf"tags: {K0} page \d+, slot 0 of it, holds token \d+ of {R} .*: load fills it for token 0 of {R} .*"
     r"\n  by copy to device on load .*\n  from host_pool page \d+, slot 0 of it\n  written by copy to host on store"),
    (_pages_backed_up_in_a_wrong_order, "tags_reloaded", TAGS,
     rf"tags: host_pool page \d+, slot 0 of it, holds token \d+ of {R} .*: store fills it for token \d+ of {R} .*"
     rf"\n  by copy to host on store .*\n  from {K0} page \d+, slot 0 of it\n  written by rotate_and_store on forward"),
    (_halves_swapped_on_the_way_to_the_host, "tags_reloaded", TAGS,
     r"tags: host_pool .*: store brings layer0\.k to layer0\.v\n  by copy to host on store"),
    (_a_copy_that_takes_the_neighbour_page, "tags_reloaded", TAGS,
     rf"tags: host_pool .*: store brings {K0} page \d+, which does not go here\n  by copy to host on store"),
    (_rows_stored_under_the_neighbour_layer, "tags_crowd", TAGS,
     r"tags: kv_pool\.layer1\.k .*: prefill step stores layer0\.k in layer1\.k\n  by rotate_and_store on forward"),
    (_a_page_table_off_by_one_page, "tags_crowd", TAGS,
     rf"tags: the page table of {R} \(row \d+\), column 0, names page 0, not \d+\n  written by index_put_ on forward"),
    (_attention_reads_one_page_too_far, "tags_crowd", TAGS,
     rf"tags: {K0} .* holds token 4 of (?P<one>{R}), .*: prefill step reads it as token 0 of (?P=one)\n"
     r"  by index_select on forward .*\n  written by rotate_and_store on forward"),
    (_attention_reads_in_another_order, "tags_crowd", TAGS,
     rf"tags: {K0} .*: prefill step reads it as token 0 of {R}\n  by index_select on forward"),
    (_attention_reads_another_request, "tags_crowd", TAGS,
     rf"tags: {K0} .* holds token 0 of (?P<one>{R}), .*: decode step reads it as token 0 of (?!(?P=one))"),
    (_attention_reads_nothing_of_the_last_request, "tags_crowd", TAGS,
     rf"tags: decode step has not read layer0\.k of {R}\n  by the time of "),
    (_no_attention_in_a_step_without_graphs, "tags_computed_twice", TAGS,
     r"tags: prefill step has not read layer0\.k of r0\n  by the time of rotate_and_store in prefill\[8\]\.0 on "),
    (_attention_leaves_out_the_last_token, "tags_reloaded", TAGS,
     rf"tags: {K0} .* holds token \d+ of (?P<one>{R}) .*: decode step: token \d+ of (?P=one) .* is left out\n"
     r"  by index_select on forward"),
    (_attention_reads_a_token_in_front_of_the_window, "windows", TAGS,
     rf"tags: {K0} .* holds token (\d+) of (?P<one>{R}), .*: \w+ step reads it as token \d+ of (?P=one)\n  by "),
    (_attention_leaves_out_the_first_token_of_the_window, "windows", TAGS,
     rf"tags: {K0} .* holds token (\d+) of (?P<one>{R}), .*: \w+ step reads it as token \d+ of (?P=one)\n  by "),
    (_a_host_page_matched_for_another_salt, "tags_reloaded", TAGS,
     rf"tags: {K0} {SALT_A}: load fills it for token 0 of r4 \(namespace 'b'\)\n  by copy to device on load"),
    (_a_live_slot_written_by_a_padded_row, "tags_pieces", TAGS,
     rf"tags: {K0} page 1, slot 1 .*: row \d of prefill step, which is padding \(\d are live\), writes it\n"
     r"  by rotate_and_store in prefill\[8\]"),
    (_a_page_used_after_it_was_retired, "tags_twins", "footprint",
     r"footprint: a decode step declares pages \(\[[\d, ]+\], \[[\d, ]+\]\), \(\[[\d, ]+\], \[[\d, ]+\]\) are its own"),
    (_a_page_given_back_too_early, "tags_pieces", OWNERSHIP,
     rf"ownership: KV pages \d+: {R} uses it after it was retired\n  submitted at .*\n  leased at .*\n  retired at "),
    (_a_row_without_the_points_of_its_last_step, "tags_crowd", OWNERSHIP,
     rf"ownership: request rows \d+: is retired with Points \[\], and a step of {R} on forward may still use it\n"
     r"  submitted at .*\n  retired at .*\n  missing edge: a Point on forward"),
    (_a_node_leaves_without_its_transfers, "tags_reloaded", OWNERSHIP,
     r"ownership: (host )?KV pages \d+: is retired with Points \[.*\], and a store on store may still use it\n"
     r"  submitted at .* in _submit_store: .*\n  retired at .* in \w+: .*\n  missing edge: (\w+ or )?a Point on store"),
    (_admitted_pages_without_their_points, "conversations", OWNERSHIP,
     rf"ownership: KV pages \d+: a step of {R} uses it on forward, which has not waited for a store on store\n"
     r"  submitted at .*\n  used before at .*\n  missing edge: forward_after_store or a Point on store"),
    (_pages_of_a_load_without_their_points, "handed_on", OWNERSHIP,
     rf"ownership: KV pages \d+: a load uses it on load, which has not waited for a step of {R} on forward\n"
     r"  submitted at .*\n  used before at .*\n  missing edge: load_after_forward or a Point on forward"),
    (_unused_pages_of_a_fetch_without_their_points, "cancelled", OWNERSHIP,
     r"ownership: host KV pages \d+: is retired with Points \[\], and a store on store may still use it\n"
     r"  submitted at .* in _submit_store: .*\n  retired at .* in _end: "),
    (_a_page_of_another_request, "tags_crowd", OWNERSHIP,
     rf"ownership: KV pages \d+: (?P<one>{R}) uses it, and it is (?!(?P=one)){R}'s\n  submitted at .*\n  leased at "),
    (_storage_forgets_the_salt, "tags_stored", TAGS,
     rf"tags: {K0} {SALT_A}: load fills it for token 0 of r1 \(namespace 'b'\)\n  by copy to device on load .*\n"
     r"  from host_pool .*\n  written by fetch from storage on host:storage-fetch"),
    (_storage_brings_the_wrong_page, "tags_stored", TAGS,
     r"tags: host_pool .*: storage fills it with bytes that it was not given under this key\n"
     r"  by fetch from storage on host:storage-fetch"),
    (_a_request_that_keeps_what_the_tree_has_taken, "tags_crowd", OWNERSHIP,
     rf"ownership: KV pages \d+: {R} writes it, though it belongs to the prefix tree\n  submitted at .*\n  leased at "),
    (_a_page_that_nobody_has, "tags_crowd", OWNERSHIP,
     rf"ownership: KV pages \d+: {R} uses it, and nobody has leased it\n  submitted at .* in launch"),
    (_a_prefix_that_is_a_page_too_long, "tags_crowd", OWNERSHIP,
     rf"ownership: KV pages \d+: {R} uses it, and has neither leased nor shares it\n  submitted at .*\n  leased at "),
    (_tokens_stored_in_another_order, "tags_crowd", TAGS,
     rf"tags: {K0} page \d+, slot \d of it, holds .*: prefill step stores token 0 of {R} here, not in slot 0 of page "
     r"\d+\n  by rotate_and_store on forward"),
    (_a_token_sampled_for_the_next_row, "tags_crowd", TAGS,
     r"tags: req_pool\.last_tokens row 4 is written by a prefill step that has no request there\n"
     r"  written by index_copy_ on forward"),
    (_a_key_without_the_pages_before, "tags_stored_apart", TAGS,
     r"tags: host_pool page \d+, slot 3 of it, holds token 7 of r1, .*: storage is given it under a key that "
     r"stands for token 7 of r0"),
    (_the_tree_has_pages_in_another_order, "tags_crowd", TAGS,
     rf"tags: {K0} page \d+, slot 0 of it, holds token \d+ of (?P<one>{R}), .*: the tree has it for token \d+ of "
     r"(?P=one)\n  written by rotate_and_store on forward"),
]  # fmt: skip


_more_workloads = more_workloads(MORE_WORKLOADS)


def _first_failure(name: str, detect: bool = True) -> Outcome | None:
    outcomes = (run(Trial(name, seed, detect=detect)) for seed in range(4))
    return next((outcome for outcome in outcomes if not outcome.clean), None)


@pytest.mark.parametrize("name", MORE_WORKLOADS)
def test_the_workloads_of_this_page_are_clean(name: str) -> None:
    assert all(run(Trial(name, seed)).clean for seed in range(2))


@pytest.mark.parametrize(
    ("plant", "workload", "checker", "report"), PLANTED, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_fault_is_named_where_it_happens(
    plant: Callable[[pytest.MonkeyPatch], None],
    workload: str,
    checker: str,
    report: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not by the oracle, which would only know that a token is wrong."""
    plant(monkeypatch)
    outcome = _first_failure(workload)
    assert outcome is not None and outcome.checker == checker, outcome and outcome.report
    assert re.search(report, outcome.report), outcome.report


def test_wrong_tokens_name_the_first_slot_whose_tag_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the detector nothing stops a run, and what was noticed on the way is told with the wrong tokens."""
    _halves_swapped_on_the_way_to_the_host(monkeypatch)
    outcome = _first_failure("tags_reloaded", detect=False)
    assert outcome is not None and outcome.checker == ANSWERS, outcome
    assert re.search(r"the first wrong slot: tags: host_pool page \d+, slot 0 of it", outcome.report), outcome.report
