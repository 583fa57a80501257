"""Speculation in the proof: faults that change no token, because a draft changes none, are named where they happen."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from fenceline.config.draft_config import DraftConfig
from fenceline.layers.attention import reference
from fenceline.layers.attention.reference import ReferenceAttentionBackend
from fenceline.layers.forward_batch import AttentionPlan, QueryTree, VerifyInputs
from fenceline.mem_cache import hicache
from fenceline.mem_cache.tree import radix_cache
from fenceline.memory_order.access import PagedMemory
from fenceline.model_executor.drafts import HiddenDraft, LayerDraft, WholeDraft
from fenceline.model_executor.speculative_runner import SpeculativeRunner
from fenceline.speculative.kv_rows import KVMover
from fenceline_proof import runs
from fenceline_proof.runs import ANSWERS, Trial, run
from fenceline_proof.script import Scenario, Script, Workload
from fenceline_proof.speculative_workloads import trees_under_windows
from fenceline_proof.workloads import WORKLOADS
from fenceline_sim import VirtualGpu, use
from fenceline_sim.errors import OwnershipError, TagError

torch.set_num_threads(1)

TAGS, OWNERSHIP = TagError.checker, OwnershipError.checker


def _row_computed_again(patch: pytest.MonkeyPatch) -> None:
    """A whole model as a draft computes the token before the last one in every step, though it mostly has it."""
    right = WholeDraft._compute_two

    def wrong(self: WholeDraft, *args: Any) -> torch.Tensor:
        self.parts.state.is_behind.fill_(True)
        return right(self, *args)

    patch.setattr(WholeDraft, "_compute_two", wrong)


def _row_left_out(patch: pytest.MonkeyPatch) -> None:
    """It does not compute that token after all of its proposals have been accepted."""
    right = WholeDraft._compute_two

    def wrong(self: WholeDraft, *args: Any) -> torch.Tensor:
        self.parts.state.is_behind.fill_(False)
        return right(self, *args)

    patch.setattr(WholeDraft, "_compute_two", wrong)


def _one_page_declared(patch: pytest.MonkeyPatch) -> None:
    """Of the pages that a step may write the last one is declared."""
    patch.setattr(PagedMemory, "pages_between", lambda self, rows, first, lengths: self.last_pages_of(rows, lengths))


def _draft_not_extended(patch: pytest.MonkeyPatch) -> None:
    """The draft keeps the rows that it has computed while it proposed."""
    patch.setattr(HiddenDraft, "_extend", lambda *args: None)
    patch.setattr(LayerDraft, "extend", lambda *args: None)


def _rows_one_too_late(patch: pytest.MonkeyPatch) -> None:
    right = SpeculativeRunner._begin

    def wrong(self: SpeculativeRunner, plans: Any) -> None:
        right(self, plans)
        slots = self.arena["out_slots"][: plans.size]
        slots.copy_(slots.roll(-1, 1))

    patch.setattr(SpeculativeRunner, "_begin", wrong)


def _behind_without_proposals(patch: pytest.MonkeyPatch) -> None:
    """A whole model as a draft takes it that a step without proposals leaves its row out."""
    right = SpeculativeRunner._accept

    def wrong(self: SpeculativeRunner, plans: Any) -> None:
        right(self, plans)
        if plans.shape.depth == 0:
            self.state.is_behind.fill_(True)

    patch.setattr(SpeculativeRunner, "_accept", wrong)


def _moved_from_the_next_node(patch: pytest.MonkeyPatch) -> None:
    """Accepted rows are taken from the nodes behind theirs."""
    right = KVMover.move

    def wrong(self: KVMover, slots: torch.Tensor, path: torch.Tensor, counts: torch.Tensor) -> None:
        right(self, slots.view(len(path), -1).roll(-1, 1).flatten(), path, counts)

    patch.setattr(KVMover, "move", wrong)


def _verified_by(tokens: int, patch: pytest.MonkeyPatch) -> None:
    """The target's attention of a verification has a window that is longer by ``tokens``, the draft's a right one."""
    _verify_otherwise(patch, lambda window, tree: window + (tokens if tree.num_nodes > 2 else 0))


def _verify_otherwise(patch: pytest.MonkeyPatch, window_of: Callable[[int, QueryTree], int | None]) -> None:
    """Verifications attend with another window. The draft attends for one row or two."""
    right = ReferenceAttentionBackend.plan_verify

    def wrong(self: ReferenceAttentionBackend, inputs: VerifyInputs) -> AttentionPlan | None:
        if self.window is None:
            return right(self, inputs)
        window = window_of(self.window, inputs.tree)
        rules = {layer: replace(rule, window=window) for layer, rule in self.rules.items()}
        return right(ReferenceAttentionBackend(self.kv_pool, rules), inputs)

    patch.setattr(ReferenceAttentionBackend, "plan_verify", wrong)


def _verified_with_a_token_in_front_of_the_window(patch: pytest.MonkeyPatch) -> None:
    _verified_by(1, patch)


def _verified_without_the_first_token_of_the_window(patch: pytest.MonkeyPatch) -> None:
    _verified_by(-1, patch)


def _drafted_without_a_window(patch: pytest.MonkeyPatch) -> None:
    """The draft attends to all tokens when it proposes, though its layer has a window."""
    _verify_otherwise(patch, lambda window, tree: window if tree.num_nodes > 2 else None)


# Of layers with a window.
WINDOW_FAULTS = {
    "verified with a token in front of the window": (
        _verified_with_a_token_in_front_of_the_window,
        r"layer0\.k page .* speculative step reads it as token \d+ of r\d",
    ),
    "verified without the first token of the window": (
        _verified_without_the_first_token_of_the_window,
        r"layer0\.k page .* speculative step reads it as token \d+ of r\d",
    ),
    "drafted without a window": (
        _drafted_without_a_window,
        r"layer2\.k page .* holds token 0 of r\d.* speculative step reads it as token \d+ of r\d",
    ),
}

FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str, str]] = {
    "a row computed again": (_row_computed_again, "ITSELF", TAGS, r"computes token \d+ of r\d again"),
    "behind without proposals": (_behind_without_proposals, "ITSELF", TAGS, r"computes token \d+ of r\d again"),
    "a row left out": (_row_left_out, "ITSELF", TAGS, r"layer2\.k page 0, .* stores token \d+ of r\d here"),
    "one page declared": (_one_page_declared, "EAGLE3", TAGS, "writes a page that it has not declared"),
    "a draft not extended": (_draft_not_extended, "NEXTN", TAGS, r"holds .* from its own hidden states"),
    "moved from the next node": (_moved_from_the_next_node, "NEAR", TAGS, r"stores token \d+ of r\d here"),
    "rows one too late": (_rows_one_too_late, "EAGLE3", TAGS, r"stores token \d+ of r\d here"),
}


def _two_requests(draft: str, **flags: int | str) -> Callable[[Any], Scenario]:
    def make(random: Any) -> Scenario:
        script = Script(random)
        for _ in range(2):
            script.add(0, script.prompt(5, 5), 14, ignore_eos=True, temperature=1.0)
        return script.scenario(
            max_total_tokens=64,
            max_running_requests=2,
            chunked_prefill_size=16,
            page_size=4,
            draft=draft,
            speculative_num_steps=2,
            cuda_graph_bs=(2,),
            context_length=64,
            **flags,
        )

    return make


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_changes_no_token_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault, draft, checker, report = FAULTS[name]
    flags = {"depth_seed": 1} if fault is _behind_without_proposals else {}
    if fault is _moved_from_the_next_node:
        flags = {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
    monkeypatch.setitem(WORKLOADS, "two", Workload("two", "", _two_requests(draft, **flags)))
    assert run(Trial("two", 2)).clean
    fault(monkeypatch)
    outcome = run(Trial("two", 2))
    assert outcome.checker == checker, outcome.report
    assert re.search(report, outcome.report), outcome.report


def test_the_engine_of_a_wrong_slot_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that still waits on a stream refers to the tags, and these to the work that has written each slot."""
    gpus: list[weakref.ref[VirtualGpu]] = []

    def noting(*args: Any, **options: Any) -> VirtualGpu:
        gpu = VirtualGpu(*args, **options)
        gpus.append(weakref.ref(gpu))
        return gpu

    monkeypatch.setattr(runs, "VirtualGpu", noting)
    monkeypatch.setitem(WORKLOADS, "two", Workload("two", "", _two_requests("EAGLE3")))
    _rows_one_too_late(monkeypatch)
    assert run(Trial("two", 2)).checker == TAGS
    use(VirtualGpu())
    gc.collect()
    assert [gpu() for gpu in gpus] == [None]


@pytest.mark.parametrize("draft", ["NEAR", "ITSELF"])
@pytest.mark.parametrize("name", WINDOW_FAULTS)
def test_a_verification_reads_the_window_and_nothing_before(
    monkeypatch: pytest.MonkeyPatch, name: str, draft: str
) -> None:
    """The requests are longer than the window, and in layers without one all of them is read."""
    fault, report = WINDOW_FAULTS[name]
    monkeypatch.setitem(WORKLOADS, "two", Workload("two", "", _two_requests(draft, model="windows")))
    outcome = run(Trial("two", 2))
    assert outcome.clean and "drafts under a window" in outcome.events, outcome.report
    fault(monkeypatch)
    outcome = run(Trial("two", 2))
    assert outcome.checker == TAGS, outcome.report
    assert re.search(report, outcome.report), outcome.report


def _half_a_window(patch: pytest.MonkeyPatch) -> None:
    """The nodes of a tree attend to half of the tokens in the window."""
    right = reference._visible

    def wrong(tree: QueryTree, nodes: torch.Tensor, window: int | None) -> torch.Tensor:
        visible = right(tree, nodes, window)
        return visible if window is None or tree.ancestors is None else visible & (nodes > 32 - window)

    patch.setattr(reference, "_visible", wrong)


def _from_the_token_before(patch: pytest.MonkeyPatch) -> None:
    """All reads of a tree begin a token too early."""
    _verify_otherwise(patch, lambda window, tree: window + (tree.ancestors is not None))


@pytest.mark.parametrize(
    ("fault", "checker"), [(_half_a_window, ANSWERS), (_from_the_token_before, TAGS)], ids=["half", "before"]
)
def test_trees_are_verified_under_windows(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None], checker: str
) -> None:
    """The requests grow longer than the window. Drafts of three steps attend to frontiers of several depths."""
    monkeypatch.setitem(WORKLOADS, "trees", Workload("trees", "", trees_under_windows))
    makes = ((seed, trees_under_windows(Random(seed)).flags) for seed in range(100))
    seed = next(seed for seed, flags in makes if flags["speculative_num_steps"] == 3)
    outcome = run(Trial("trees", seed))
    assert outcome.clean and "drafts under a window" in outcome.events, outcome.report
    fault(monkeypatch)
    assert run(Trial("trees", seed)).checker == checker


def _found_by_their_own_tokens(patch: pytest.MonkeyPatch) -> None:
    """Pages are found whatever token follows them."""
    patch.setattr(DraftConfig, "lookahead", 0)


def _named_by_their_own_tokens(patch: pytest.MonkeyPatch) -> None:
    """The same in storage alone."""
    right = radix_cache.page_keys

    def wrong(parent: bytes, tokens: Any, page_size: int, lookahead: int, images: Any) -> list[bytes]:
        return right(parent, tokens[: len(tokens) - lookahead], page_size, images=images)

    patch.setattr(radix_cache, "page_keys", wrong)
    patch.setattr(hicache, "page_keys", wrong)


def _shared_with_a_row_left_out(patch: pytest.MonkeyPatch) -> None:
    """A request that has ended leaves the row that its next step would have computed."""
    patch.setattr(DraftConfig, "num_rows_behind", 0)


SHARING_FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = {
    "found by their own tokens": (_found_by_their_own_tokens, "EAGLE3", r"reads it as token 7 of r1"),
    "named by their own tokens": (_named_by_their_own_tokens, "NEXTN", r"load fills it for token 7 of r0"),
    "a row left out": (_shared_with_a_row_left_out, "ITSELF", r"which the draft has not computed, layer2\.k"),
}


def _prompts_that_part(draft: str) -> Callable[[Any], Scenario]:
    """Two prompts that part where a page ends, one after the other."""

    def make(random: Any) -> Scenario:
        script = Script(random)
        shared = script.prompt(8, 8)
        for step, token in ((0, 3), (20, 4)):
            script.add(step, [*shared, token, 9], 7, ignore_eos=True, temperature=1.0)  # its last page is full
        return script.scenario(
            max_total_tokens=64,
            max_running_requests=2,
            chunked_prefill_size=16,
            page_size=4,
            draft=draft,
            speculative_num_steps=1,
            context_length=64,
            enable_hierarchical_cache=True,
            hicache_ratio=4.0,
            hicache_storage_backend="file",
            hicache_storage_prefetch_policy="wait_complete",
            disable_cuda_graph=True,
        )

    return make


@pytest.mark.parametrize("name", SHARING_FAULTS)
def test_a_row_that_depends_on_another_token_is_not_shared(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault, draft, report = SHARING_FAULTS[name]
    monkeypatch.setitem(WORKLOADS, "part", Workload("part", "", _prompts_that_part(draft)))
    assert run(Trial("part", 2)).clean
    fault(monkeypatch)
    outcome = run(Trial("part", 2))
    assert outcome.checker == TAGS, outcome.report
    assert re.search(report, outcome.report), outcome.report
