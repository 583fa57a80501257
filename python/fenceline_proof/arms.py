"""Arms: runs with one edge or guard severed, on the workload that isolates its path, and the failure they must show."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fenceline.memory_order.edges import EDGE_PARTS, EDGES, GUARDS, ROWS, UNDER_SPECULATION, edge_of
from fenceline_proof.runs import HAPPENS_BEFORE, Outcome, Trial
from fenceline_sim.errors import (
    BoundsError,
    FreshnessError,
    OwnershipError,
    PeerError,
    ProtectionError,
    StaleMemoryError,
    TagError,
)

NECESSARY, REDUNDANT, DORMANT = "necessary", "redundant", "dormant"
MISNAMED = "misnamed"  # with it severed runs fail, but no report names it
UNPROVEN = "unproven"  # no arm, or no run
_NO_WORKLOAD = "no workload of the proof isolates it"

_EDGE_WORKLOADS = {
    "forward_after_schedule@InputRing.upload": "mixed", "forward_after_schedule@PlanRing.planning": "flashinfer",
    "forward_after_schedule@MaskTable.upload": "grammars", "schedule_after_forward@InputRing.upload": "row_reuse",
    "schedule_after_forward@PlanRing.planning": "flashinfer", "schedule_after_forward@MaskTable.upload": "grammars",
    "copy_after_forward": "prefixes", "host_after_copy": "aborts", "host_after_forward": "spill",
    "staging_reuse@InputRing.upload": "staging", "staging_reuse@PlanRing.planning": "flashinfer",
    "staging_reuse@MaskTable.begin": "grammars", "store_after_forward": "offload",
    "forward_after_store@ModelRunner.launch": "spill", "forward_after_store@ModelRunner.copy_state": "states",
    "load_after_forward": "swap", "forward_after_load@HiCacheController.layer_ready": "spill",
    "forward_after_load@ModelRunner.launch": "spill", "forward_after_load@ModelRunner.copy_state": "states",
    "load_after_store": "spill", "store_after_load": "overwritten", "sm_exclusive:forward-store": "persistent",
    "sm_exclusive:store-forward": "persistent", "host_page_reuse:host-load": "refill",
    "host_page_reuse:host-store": "storage",
}  # fmt: skip
# The first seed whose run needs it, of those whose first runs do not: nothing is to be seen in these.
_FIRST_SEEDS = {
    "forward_after_store@ModelRunner.copy_state": 5, "load_after_forward": 1,
    "forward_after_load@ModelRunner.copy_state": 5, "queued_match": 1, "all_shares": 2, "kept_hidden": 2,
    "rank_results": 2, "ended_on_all": 27, "step_images": 1, "row_delta": 2, "row_state": 5, "committed_state": 6,
    "accepted_state": 1, "new_weights": 1, "host_after_copy/speculation": 2, "plan_source/speculation": 2,
    "total_buckets/speculation": 4, "whole_page/sparse": 5,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Arm:
    """``names(outcome)``: whether the failure is the one that severing ``name``, an edge, one pair of an edge that has
    several, or a guard, must lead to."""

    name: str
    workload: str
    names: Callable[[Outcome], bool]

    def num_runs(self, most: int) -> int:
        """How many of ``most`` runs it gets. One that speculates, or of two ranks, takes twice as long as another; of
        one that is known to be covered none is expected to fail."""
        slow = self.workload.startswith(("speculation", "ranks"))
        return -(-most // 3) if self.covered else -(-most // 2) if slow else most

    @property
    def kind(self) -> str:
        return "edge" if edge_of(self.name) in EDGES else "guard"

    @property
    def covered(self) -> str:
        """What covers a part of an edge without which no run fails, "" if nothing is known to."""
        return _covered(self.name)

    @property
    def severs(self) -> str:
        return UNDER_SPECULATION.get(self.name, self.name)

    def trial(self, number: int, first_seed: int = 0, detect: bool = True) -> Trial:
        """Its run of that ``number``, counted from ``first_seed`` or from the first one that needs it."""
        seed = max(first_seed, _FIRST_SEEDS.get(self.name, 0)) + number
        return Trial(self.workload, seed, frozenset({self.severs}), detect)


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    kind: str
    status: str
    workload: str = ""
    seed: int | None = None
    num_caught: int = 0
    num_runs: int = 0
    caught_by: str = ""
    report: str = ""

    @property
    def fine(self) -> bool:
        """Whether it is necessary, or there is a reason for keeping it."""
        return self.status in (NECESSARY, DORMANT) or (self.status == REDUNDANT and bool(_covered(self.name)))


def _covered(name: str) -> str:
    return EDGE_PARTS[name].covered if name in EDGE_PARTS else ""


def _by_edge(name: str) -> Callable[[Outcome], bool]:
    edge, pair = edge_of(name), name.partition("@")[0].partition(":")[2]
    named = _by_guard(HAPPENS_BEFORE, edge)
    if not pair:
        return named
    waiter, source = pair.split("-")
    # The stream that should have waited is listed second.
    order = re.compile(rf"^  1\. .* on {source} \((.|\n)*^  2\. .* on {waiter}[: ]", re.MULTILINE)
    return lambda outcome: named(outcome) and bool(order.search(outcome.report))


def _by_report(pattern: str, checker: str = HAPPENS_BEFORE) -> Callable[[Outcome], bool]:
    return lambda outcome: outcome.checker == checker and bool(re.search(pattern, outcome.report))


def _by_tags(pattern: str) -> Callable[[Outcome], bool]:
    """A slot is found to hold, or to be used for, something else than it must; or its page is somebody else's."""
    found = _by_report(pattern, TagError.checker)
    return lambda outcome: found(outcome) or outcome.checker == OwnershipError.checker


def _by_guard(checker: str, name: str) -> Callable[[Outcome], bool]:
    return lambda outcome: outcome.checker == checker and name in outcome.edges


def _by_ranks(outcome: Outcome) -> bool:
    """Ranks have decided differently and report it, or wait for different collective operations."""
    return bool(re.search("have decided differently|wait for different collectives", outcome.report))


def _by_effect(outcome: Outcome) -> bool:
    """For a guard of program order, which happens-before does not check: wrong tokens, or shapes that do not fit."""
    return not outcome.clean and outcome.checker != HAPPENS_BEFORE


def _by_name(checker: str, **workloads: str) -> Sequence[Arm]:
    """Of guards, with their workloads, whose check names them."""
    return [Arm(name, workload, _by_guard(checker, name)) for name, workload in workloads.items()]


_ON_RETIRED = _by_report(r"on kv_pool\.layer\d(.|\n)*_after_(store|forward)")
_GUARD_ARMS = (
    *_by_name(FreshnessError.checker, arena_pad="graphs", total_buckets="buckets", mask_rows="grammars"),
    *_by_name(FreshnessError.checker, kept_hidden="speculation"),
    *_by_name(ProtectionError.checker, plan_source="graphs"),
    *_by_name(StaleMemoryError.checker, graph_pool="graphs"),
    *_by_name(BoundsError.checker, sink="graphs"),
    *_by_name(TagError.checker, encoded_first="pictures", step_images="pictures", row_delta="pictures"),
    *_by_name(TagError.checker, ends_at_state="states", row_state="states", snapshot_after="states"),
    *_by_name(TagError.checker, accepted_state="states", loaded_state="states", row_tokens="speculation"),
    *_by_name(PeerError.checker, registered_graph="collectives"),
    *_by_name(HAPPENS_BEFORE, one_stream="collectives", peer_halves="collectives", peer_words="collectives"),
    Arm("startup_stop", "mixed", _by_report(r"it on default ")),
    Arm("growth_stop", "growth", _by_report(r"^wrong stream: .* belongs to default, and is used on ")),
    Arm("own_copy", "staging", _by_report(r"on input_ring\.device(.|\n)*copy to device writes it")),
    Arm("same_composition", "bursts", _by_effect),
    Arm("queued_match", "queued", lambda outcome: outcome.checker == OwnershipError.checker),
    Arm("retired_after", "spill", _ON_RETIRED),
    Arm("own_results", "outputs", _by_report(r"WAR on decode\.next_tokens(.|\n)*copy to host reads it on copy")),
    Arm("step_slots", "speculation", _by_tags("speculative step stores ")),
    Arm("in_flight", "speculation", _by_tags("speculative step (stores|writes) ")),
    Arm("whole_page", "speculation_tiers", _by_tags(r"^tags: kv_pool\.layer2\.")),
    Arm("whole_rows", "sparse", _by_tags(r"^tags: kv_pool\.layer0\.index")),
    Arm("all_shares", "ranks", _by_effect),
    Arm("step_selection", "sparse", lambda outcome: "step_selection: layer 1" in outcome.report),
    Arm("tie_order", "sparse", _by_effect),
    Arm("whole_page/sparse", "sparse", _by_tags(r"^tags: kv_pool\.layer2\.index")),
    Arm("tree_slots", "speculation_trees", _by_tags("speculative step (stores|writes) ")),
    Arm("moved_nodes", "speculation_trees", _by_tags("speculative step reads it as token ")),
    Arm("image_keys", "pictures", _by_tags("reads it as token|for token .* of a prefix in the tree")),
    Arm("image_names", "stored_pictures", _by_tags("storage is given it under a key|reads it as|fills it")),
    Arm("committed_state", "states", _by_guard(TagError.checker, "committed_state")),
    Arm("new_weights", "new_weights", _by_report(r"it on default ")),
    Arm("old_kv", "new_weights", _by_tags(r"holds token (.|\n)* with weights \d|with weights \d")),
    Arm("flag_generation", "collectives", lambda outcome: "flag_generation" in outcome.edges),
    Arm("rank_results", "ranks", _by_ranks),
    Arm("ended_on_all", "ranks", _by_ranks),
)
_ARENA_PAD = _by_guard(FreshnessError.checker, "arena_pad")
_SPECULATIVE_ARMS = (
    Arm("host_after_copy/speculation", "speculation", _by_edge("host_after_copy")),
    Arm("same_composition/speculation", "speculation", _by_effect),
    Arm("retired_after/speculation", "speculation_tiers", _ON_RETIRED),
    Arm("arena_pad/speculation", "speculation", lambda found: _ARENA_PAD(found) and "speculative." in found.report),
    Arm("own_results/speculation", "speculation", _by_report(r"WAR on speculative\.")),
    Arm("plan_source/speculation", "speculation", _by_tags("speculative step ")),
    Arm("total_buckets/speculation", "speculation", _by_guard(FreshnessError.checker, "total_buckets")),
    Arm("graph_pool/speculation", "speculation", _by_guard(StaleMemoryError.checker, "graph_pool")),
    Arm("sink/speculation", "speculation", _by_guard(BoundsError.checker, "sink")),
)


def all_arms() -> list[Arm]:
    """One for each edge, and for each guard that is not dormant, in the tables' order."""
    edges = [Arm(name, workload, _by_edge(name)) for name, workload in _EDGE_WORKLOADS.items()]
    found = {arm.name: arm for arm in (*edges, *_GUARD_ARMS, *_SPECULATIVE_ARMS)}
    return [found[name] for name in ROWS if name in found]


def judge(arm: Arm, outcomes: Sequence[Outcome]) -> Row:
    """The result of an arm's runs, in order of seeds."""
    row = Row(arm.name, arm.kind, UNPROVEN, arm.workload, num_runs=len(outcomes))
    if not outcomes:
        return replace(row, report="there was no time for a run")
    caught = [outcome for outcome in outcomes if arm.names(outcome)]
    failed = [outcome for outcome in outcomes if not outcome.clean]
    first = next(iter(caught or failed), None)
    if first is None:
        return replace(row, status=REDUNDANT, report=arm.covered or "no run fails without it")
    caught_by = first.checker + (", by name" if edge_of(arm.name) in first.edges else "")
    row = replace(row, seed=first.trial.seed, caught_by=caught_by, report=first.report)
    if not caught:
        return replace(row, status=MISNAMED)
    return replace(row, status=NECESSARY, num_caught=len(caught))


def unarmed_rows() -> list[Row]:
    armed = {arm.name for arm in all_arms()}
    rows = [Row(name, "edge", UNPROVEN, report=_NO_WORKLOAD) for name in EDGE_PARTS if name not in armed]
    for name, guard in GUARDS.items():
        if name not in armed:
            status = DORMANT if guard.dormant else UNPROVEN
            rows.append(Row(name, "guard", status, report=guard.dormant or _NO_WORKLOAD))
    return rows
