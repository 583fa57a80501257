"""AttentionBackend: plans the attention of a batch once; each layer then runs with that plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from fenceline.layers.forward_batch import (
    AttendNew,
    AttentionInputs,
    AttentionPlan,
    ForwardMode,
    GraphDecodeInputs,
    IndexQueries,
    PlanSection,
    VerifyInputs,
)


@dataclass(frozen=True, slots=True, eq=False)
class LayerRules:
    """What a layer's attention computes in addition to softmax(scale q k^T) v.

    ``window``: a query attends to its own token and the ``window - 1`` before it (None: to all). ``soft_cap`` c: a
    score s becomes c tanh(s / c); 0 means no cap. ``sinks`` [num_heads] float32: one more score for each head, which
    belongs to no token and has a value of zero. The soft cap is not applied to the sinks.

    ``rows`` names the layer's rows in the KV pool that hold the keys and the values. It may be the same row for both
    (``latent``). ``value_dim``: the layer needs only so many of each result's features, the first ones, so the others
    are undefined and need not be computed (None: all). ``selects``: a query attends to the tokens that an indexer has
    selected for it (``AttentionPlan.select``), or to those of selected blocks (``select_blocks``).
    """

    window: int | None = None
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    rows: tuple[str, str] = ("k", "v")
    value_dim: int | None = None
    selects: bool = False

    @property
    def shared(self) -> bool:
        """Whether one row holds both keys and values."""
        return self.rows[0] == self.rows[1]

    @property
    def plain(self) -> bool:
        """Whether the layer has none of these, so that attention is softmax(scale q k^T) v with rows k and v."""
        plain_scores = self.window is None and self.soft_cap == 0.0 and self.sinks is None
        return plain_scores and self.rows == PLAIN.rows and not self.selects


PLAIN = LayerRules()
NO_RULES: Mapping[int, LayerRules] = {}


def window_of(rules: Mapping[int, LayerRules]) -> int | None:
    """The one window that all layers in ``rules`` have. Plans depend on it; see ``by_kind``."""
    windows = {rule.window for rule in rules.values()}
    assert len(windows) <= 1, f"a backend attends with one window, not with {windows}"
    return next(iter(windows), None)


class AttentionBackend(ABC):
    """Makes plans and owns the workspace that they share. All its layers have the same window. ``rules`` in its
    constructor maps layers, by their index in the pool, to their rules; layers that are not in it have none."""

    one_plan = False
    """Whether a plan is valid only until the next one is made, so that a step cannot have two."""

    @abstractmethod
    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        """Prepare one eager batch. No host synchronisation."""

    def plan_new(self, query_lens_cpu: npt.NDArray[np.int64], starts: torch.Tensor) -> AttendNew:
        """Causal attention of prompts to their own tokens alone, whose keys and values need not be in the pool, as a
        function (q, k, v, scale) → [T, num_heads, features of v]. q and k [T, num_heads, head_dim] and v [T, num_heads,
        features] are contiguous, one prompt after the other; ``starts`` [B + 1] int32 says where each starts."""
        return partial(_attend_each, query_lens_cpu.tolist())

    def persistent(self, mode: ForwardMode) -> bool:
        """Whether the kernels for ``mode`` are persistent: they hold their SMs until all tiles are done, so no other
        kernel that needs SMs may run at the same time (edge sm_exclusive)."""
        return False

    def is_compiled(self, mode: ForwardMode) -> bool:
        """Whether steps of this mode can run without a compiler that takes a minute or more."""
        return True

    def begin_to_compile(self) -> None:
        """Compile what prefill steps need in the background, unless it is compiled. Who needs it earlier waits."""
        return

    def warm_up(self) -> None:
        """Load the kernels that only some batches need, so that no step waits for a compiler. Called once at start."""
        return

    def plan_graph(self, inputs: GraphDecodeInputs) -> AttentionPlan | None:
        """A plan that a graph of this bucket can capture; None if this backend (or this size) cannot be captured.
        Called once for each bucket, before its warm-up and its capture, which use the plan as it is then: for a batch
        of padding, whose lengths are all 1. What it needs besides ``inputs`` outlives all graphs."""
        return None

    def plan_verify(self, inputs: VerifyInputs) -> AttentionPlan | None:
        """A plan for a few queries of each request, which form a chain or a tree; None if this backend has none. A
        graph can capture it, and eager steps can use it. If there is a window, it has at least as many tokens as the
        tree has nodes. The first plan of a shape may allocate, so it is made outside captures. ``prepare`` is called
        at the beginning of each step.

        A backend that plans on the host from the lengths cannot do this, because the host learns the lengths of
        speculative steps one step late. This rules out FlashInfer, whose kernels split the keys by such a plan and
        whose packed mask covers all keys and would have to be written again in each step. FA3 has no mask for single
        tokens.
        """
        return None

    def before_replay(self, bucket: int, seq_lens_cpu: npt.NDArray[np.int64]) -> None:
        """Bring the host's part of the bucket's plan up to date, on FORWARD, before each replay of it and each eager
        run of a step. ``seq_lens_cpu`` [n <= bucket] include this step's token. Backends without a plan step have
        nothing to do."""
        return


def _attend_each(lens: Sequence[int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    out, start = torch.empty_like(v), 0
    for length in lens:
        of_prompt = slice(start, start + length)
        own_q, own_k, own_v = (tensor[of_prompt].transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
        attended = F.scaled_dot_product_attention(own_q, own_k, own_v, is_causal=True, scale=scale)
        out[of_prompt] = attended[0].transpose(0, 1)
        start += length
    return out


def plan_extend(backend: AttentionBackend, inputs: AttentionInputs, least: int | None) -> AttentionPlan:
    """``backend.plan`` of an EXTEND step, with ``sections`` if any prompt of at least ``least`` tokens is new. None: no
    plan has sections."""
    lens = inputs.query_lens_cpu
    if least is None or not ((lens >= least) & (lens == inputs.seq_lens_cpu)).any():
        return backend.plan(inputs)
    return _CutPlan(backend, inputs, least)


class _CutPlan(AttentionPlan):
    """The plan of a step in sections. Layers that do not know of them use that of the whole step."""

    def __init__(self, backend: AttentionBackend, inputs: AttentionInputs, least: int) -> None:
        self._backend, self._inputs = backend, inputs
        lens = inputs.query_lens_cpu
        is_new = (lens >= least) & (lens == inputs.seq_lens_cpu)
        ends = [*np.flatnonzero(np.diff(is_new)) + 1, len(lens)]
        firsts = [0, *ends[:-1]]
        self.sections = [self._section(int(a), int(b), bool(is_new[a])) for a, b in zip(firsts, ends, strict=True)]

    def _section(self, first: int, end: int, is_new: bool) -> PlanSection:
        """The section of the requests from ``first`` to ``end``."""
        tokens, some = _some_requests(self._inputs, first, end)
        if is_new:
            assert some.query_starts is not None, "EXTEND says where each request's queries start"
            return PlanSection(tokens, attend_new=self._backend.plan_new(some.query_lens_cpu, some.query_starts))
        return PlanSection(tokens, plan=self._backend.plan(some))

    @cached_property
    def _whole(self) -> AttentionPlan:
        return self._backend.plan(self._inputs)

    def forward(self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        return self._whole.forward(layer_id, q, k, v, scale)

    def select(self, layer_id: int, index: IndexQueries) -> Sequence[torch.Tensor]:
        return self._whole.select(layer_id, index)

    def forward_selected(
        self,
        layer_id: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        tokens: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        return self._whole.forward_selected(layer_id, q, k, v, scale, tokens)


def plan_mixed(
    prompts: AttentionBackend, decodes: AttentionBackend, inputs: AttentionInputs, num_decodes: int, least: int | None
) -> AttentionPlan:
    """The plan of an EXTEND step whose last ``num_decodes`` requests have one query: ``decodes`` attends to these as in
    a decode step, and ``prompts`` to all others, as :func:`plan_extend` plans it."""
    num_prompts = len(inputs.query_lens_cpu) - num_decodes
    tokens, of_prompts = _some_requests(inputs, 0, num_prompts)
    _, of_decodes = _some_requests(inputs, num_prompts, len(inputs.query_lens_cpu))
    # Copies, because kernels are launched slowly where addresses are not aligned.
    rows, seq_lens = of_decodes.rows.clone(), of_decodes.seq_lens.clone()
    of_decodes = replace(of_decodes, mode=ForwardMode.DECODE, rows=rows, seq_lens=seq_lens, query_starts=None, whole=())
    return _MixedPlan(plan_extend(prompts, of_prompts, least), decodes.plan(of_decodes), tokens.stop)


class _MixedPlan(AttentionPlan):
    """Two plans: that of the first ``num_tokens`` queries, and that of the others."""

    def __init__(self, prompts: AttentionPlan, decodes: AttentionPlan, num_tokens: int) -> None:
        rest = slice(num_tokens, None)
        self._parts = (slice(num_tokens), prompts), (rest, decodes)
        if prompts.sections:
            self.sections = [*prompts.sections, PlanSection(rest, plan=decodes)]

    def forward(self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.forward_into(layer_id, q, k, v, scale, out)
        return out

    def forward_into(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        for tokens, plan in self._parts:
            plan.forward_into(layer_id, q[tokens], k[tokens], v[tokens], scale, out[tokens])


def _some_requests(inputs: AttentionInputs, first: int, end: int) -> tuple[slice, AttentionInputs]:
    """The requests of ``inputs`` from ``first`` to ``end``, and where their queries are."""
    lens, starts = inputs.query_lens_cpu[first:end], inputs.query_starts
    assert starts is not None, "EXTEND says where each request's queries start"
    begin = int(inputs.query_lens_cpu[:first].sum())
    some = replace(
        inputs,
        rows=inputs.rows[first:end],
        seq_lens=inputs.seq_lens[first:end],
        seq_lens_cpu=inputs.seq_lens_cpu[first:end],
        query_lens_cpu=lens,
        query_starts=starts[first : end + 1] - begin if first else starts[: end + 1],
    )
    return slice(begin, begin + int(lens.sum())), some
