"""The router of a mixture of experts in Triton. It computes the logits of few tokens, normalising them first, and
chooses the experts of any number of tokens and sorts them by expert, in one kernel for up to 32 tokens and in two for
more.

Pairs of token and expert are sorted by counting, so that the order does not depend on timing. A program has 32 tokens.
The place of a pair is the number of pairs that come before it: those with smaller experts, those with the same expert
in preceding programs, and those with the same expert among the preceding tokens of its own program.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from fenceline.config.families import ExpertsConfig
from fenceline.layers.kernels.base import LayerKernels, Routing
from fenceline.layers.kernels.triton.rms_norm import rms_norm
from fenceline.layers.kernels.triton.skinny_gemm import SplitWorkspace, fixed_linear
from fenceline.memory_order.triton_launcher import KernelVariant

TOKENS_A_PROGRAM = 32
_FEW_TOKENS = 64  # with more tokens cuBLAS computes the logits, which reads the router's weights once for all of them
_EXPERTS_A_PROGRAM = 4
_ENOUGH_PROGRAMS, _MOST_TOGETHER = 128, 8  # with more programs, each computes the logits of up to so many tokens
_LEAST: tl.constexpr = tl.constexpr(-3.0e38)  # of all scores; what does not exist is less

_TORCH = LayerKernels()


def router_logits(
    x: torch.Tensor, weight: torch.Tensor, fixed: SplitWorkspace | None = None, pdl: bool = False
) -> torch.Tensor:
    """See ``LayerKernels.router_logits``. x and weight contiguous. Current stream, no host synchronisation. ``fixed``:
    sums have a fixed order. ``pdl``: see ``rms_norm``; reads ``weight`` before its wait."""
    if fixed is not None:
        return fixed_linear(x.float(), weight, fixed, pdl=pdl)
    if not 0 < len(x) <= _FEW_TOKENS:
        return F.linear(x.float(), weight)
    return _launch_logits(x, None, 0.0, weight, None, pdl)


def normed_logits(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    fixed: SplitWorkspace | None = None,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``LayerKernels.normed_logits`` and ``router_logits``. Also reads ``norm_weight`` before its wait."""
    if fixed is not None or not 0 < len(x) <= _FEW_TOKENS:
        normed = rms_norm(x, norm_weight, eps, pdl)
        return normed, router_logits(normed, weight, fixed, pdl)
    normed = torch.empty_like(x)
    return normed, _launch_logits(x, norm_weight, eps, weight, normed, pdl)


def _launch_logits(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    normed: torch.Tensor | None,
    pdl: bool,
) -> torch.Tensor:
    """The logits of norm(x), which goes to ``normed``."""
    num_tokens, k = x.shape
    assert x.is_contiguous() and weight.is_contiguous() and weight.dtype == torch.float32
    assert norm_weight is None or norm_weight.is_contiguous()
    out = x.new_empty(num_tokens, len(weight), dtype=torch.float32)
    blocks, together = triton.cdiv(len(weight), _EXPERTS_A_PROGRAM), 1
    while together < _MOST_TOGETHER and blocks * num_tokens >= 2 * together * _ENOUGH_PROGRAMS:
        together *= 2
    variant = _logits_variant(len(weight), k, together, pdl)
    grid = (blocks, triton.cdiv(num_tokens, together))
    variant.launch(grid, (x, norm_weight, weight, normed, out), (num_tokens, eps))
    return out


def route(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    out_slots: torch.Tensor,
    num_sink_slots: int,
    experts: ExpertsConfig,
    joined: bool = False,
    fixed: object = None,
    pdl: bool = False,
) -> Routing:
    """See ``LayerKernels.route``. All contiguous. Current stream, no host synchronisation. ``fixed``: unless None, few
    tokens too have tiles of the full size, and none are ``joined``. ``pdl``: see ``rms_norm``; reads nothing before its
    wait."""
    num_tokens, num_experts = logits.shape
    if num_tokens == 0:
        return _TORCH.route(logits, correction, out_slots, num_sink_slots, experts, joined)
    num_programs = triton.cdiv(num_tokens, TOKENS_A_PROGRAM)
    ids = torch.empty(num_tokens, experts.top_k + joined, dtype=torch.int64, device=logits.device)
    weights = torch.empty_like(ids, dtype=torch.float32)
    order, ends = ids.new_empty(ids.numel()), ids.new_empty(num_experts + joined, dtype=torch.int32)
    if num_programs == 1 and fixed is None:
        _launch(logits, correction, out_slots, num_sink_slots, experts, ids, weights, order, ends, None, pdl)
    else:
        assert not joined
        counts = ends.new_empty(num_programs, num_experts)
        choose_experts(logits, correction, out_slots, num_sink_slots, experts, ids, weights, counts, pdl)
        place_pairs(ids, counts, order, ends, pdl)
    return Routing(ids, weights, order, ends)


def of_experts(routing: Routing, own: range, pdl: bool = False) -> Routing:
    """See ``LayerKernels.of_experts``. Current stream, no host synchronisation. ``pdl``: see ``rms_norm``; reads
    nothing before its wait."""
    ids, order = torch.empty_like(routing.ids), torch.empty_like(routing.order)
    ends = routing.ends.new_empty(len(own))
    if len(order):
        own_pairs(routing.ids, routing.order, routing.ends, ids, order, ends, own.start, pdl)
    else:
        ends.zero_()
    return Routing(ids, routing.weights, order, ends)


def own_pairs(
    ids: torch.Tensor,
    order: torch.Tensor,
    ends: torch.Tensor,
    own_ids: torch.Tensor,
    own_order: torch.Tensor,
    own_ends: torch.Tensor,
    first: int,
    pdl: bool = False,
) -> None:
    """Write the last three, a rank's own ids, order and ends of ``Routing``. Its first expert is ``first``."""
    variant = _own_variant(len(own_ends), first, pdl)
    grid = (triton.cdiv(len(order), variant.constants["BLOCK"]),)
    variant.launch(grid, (ids, order, ends, own_ids, own_order, own_ends), (len(order),))


def choose_experts(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    out_slots: torch.Tensor,
    num_sink_slots: int,
    experts: ExpertsConfig,
    ids: torch.Tensor,
    weights: torch.Tensor,
    counts: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Write ids and weights of ``Routing``, and for each ``TOKENS_A_PROGRAM`` tokens how many pairs each expert has:
    ``counts`` [ceil(T / TOKENS_A_PROGRAM), num_experts] int32."""
    _launch(logits, correction, out_slots, num_sink_slots, experts, ids, weights, None, None, counts, pdl)


def place_pairs(
    ids: torch.Tensor, counts: torch.Tensor, order: torch.Tensor, ends: torch.Tensor, pdl: bool = False
) -> None:
    """Write order and ends of ``Routing``, after ``choose_experts``."""
    variant = _place_variant(len(ends), ids.shape[1], pdl)
    variant.launch((len(counts),), (ids, counts, order, ends), (len(ids),))


def _launch(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    out_slots: torch.Tensor,
    num_sink_slots: int,
    experts: ExpertsConfig,
    ids: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor | None,
    ends: torch.Tensor | None,
    counts: torch.Tensor | None,
    pdl: bool,
) -> None:
    assert logits.is_contiguous() and out_slots.is_contiguous() and logits.dtype == torch.float32
    num_tokens, num_experts = logits.shape
    rows = TOKENS_A_PROGRAM if counts is not None else min(TOKENS_A_PROGRAM, triton.next_power_of_2(num_tokens))
    groups = 1, 1, 1
    if experts.num_groups > 1:
        groups = experts.num_groups, experts.top_groups, min(experts.scored_by, num_experts // experts.num_groups)
    joined = ids.shape[1] > experts.top_k
    scored = experts.sigmoid, experts.renormalise, correction is None
    variant = _route_variant(num_experts, experts.top_k, rows, groups, *scored, joined, pdl)
    operands = (logits, correction, out_slots, ids, weights, order, ends, counts)
    variant.launch((triton.cdiv(num_tokens, rows),), operands, (num_tokens, num_sink_slots, experts.scaling))


@cache
def _logits_variant(num_experts: int, k: int, together: int, pdl: bool) -> KernelVariant:
    constants: dict[str, int | bool] = {
        "NUM_EXPERTS": num_experts,
        "K": k,
        "BLOCK_E": _EXPERTS_A_PROGRAM,
        "BLOCK_K": min(2048, triton.next_power_of_2(k)),
        "TOGETHER": together,
        "PDL": pdl,
    }
    return KernelVariant(_logits_kernel, constants, 4, pdl)


@cache
def _route_variant(
    num_experts: int,
    top_k: int,
    rows: int,
    groups: tuple[int, int, int],
    sigmoid: bool,
    renormalise: bool,
    uncorrected: bool,
    joined: bool,
    pdl: bool,
) -> KernelVariant:
    """``groups``: their number, how many of them are open, and by how many experts a group is scored."""
    num_groups, top_groups, scored_by = groups
    assert scored_by in (1, 2), "the kernel adds up at most two scores"
    constants: dict[str, int | bool] = {
        "NUM_EXPERTS": num_experts,
        "BLOCK_E": triton.next_power_of_2(num_experts),
        "TOP_K": top_k,
        "BLOCK_K": triton.next_power_of_2(top_k + joined),
        "ROWS": rows,
        "NUM_GROUPS": num_groups,
        "TOP_GROUPS": top_groups,
        "SCORED_BY": scored_by,
        "SIGMOID": sigmoid,
        "RENORMALISE": renormalise,
        "CORRECTED": not uncorrected,
        "JOINED": joined,
        "PDL": pdl,
    }
    return KernelVariant(_route_kernel, constants, 4 if rows <= 8 else 8, pdl)


@cache
def _place_variant(num_experts: int, top_k: int, pdl: bool) -> KernelVariant:
    constants: dict[str, int | bool] = {
        "NUM_EXPERTS": num_experts,
        "BLOCK_E": triton.next_power_of_2(num_experts),
        "TOP_K": top_k,
        "BLOCK_K": triton.next_power_of_2(top_k),
        "ROWS": TOKENS_A_PROGRAM,
        "PDL": pdl,
    }
    return KernelVariant(_place_kernel, constants, 8, pdl)


@cache
def _own_variant(num_own: int, first: int, pdl: bool) -> KernelVariant:
    constants: dict[str, int | bool] = {
        "FIRST": first,
        "NUM_OWN": num_own,
        "BLOCK_E": triton.next_power_of_2(num_own),
        "BLOCK": 512,
        "PDL": pdl,
    }
    return KernelVariant(_own_kernel, constants, 4, pdl)


@triton.jit(do_not_specialize=["num_pairs"])
def _own_kernel(
    ids, order, ends, own_ids, own_order, own_ends, num_pairs,
    FIRST: tl.constexpr, NUM_OWN: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = pairs < num_pairs
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    before = 0
    if FIRST > 0:
        before = tl.load(ends + FIRST - 1)
    expert = tl.load(ids + pairs, mask=exists, other=0) - FIRST
    tl.store(own_ids + pairs, tl.where((expert >= 0) & (expert < NUM_OWN), expert, NUM_OWN), mask=exists)
    tl.store(own_order + pairs, tl.load(order + (pairs + before) % num_pairs, mask=exists, other=0), mask=exists)
    if tl.program_id(0) == 0:
        experts = tl.arange(0, BLOCK_E)
        own = experts < NUM_OWN
        tl.store(own_ends + experts, tl.load(ends + FIRST + experts, mask=own, other=0) - before, mask=own)


@triton.jit(do_not_specialize=["num_tokens"])
def _logits_kernel(
    x, norm_weight, weight, normed, out, num_tokens, eps,
    NUM_EXPERTS: tl.constexpr, K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The logits of some experts for TOGETHER tokens. The first programs of these store their norms too."""
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    exists = experts < NUM_EXPERTS
    columns = tl.arange(0, BLOCK_K)
    rows = weight + experts[:, None] * K + columns[None, :]
    first = tl.load(rows, mask=exists[:, None] & (columns < K)[None, :], other=0.0)
    if norm_weight is not None:
        first_scale = tl.load(norm_weight + columns, mask=columns < K, other=0.0).to(tl.float32)
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    begin = tl.program_id(1) * TOGETHER
    for token in range(begin, tl.minimum(begin + TOGETHER, num_tokens)):
        if norm_weight is not None:
            squares = tl.zeros((BLOCK_K,), dtype=tl.float32)
            for at in range(0, K, BLOCK_K):
                part = tl.load(x + token * K + at + columns, mask=at + columns < K, other=0.0).to(tl.float32)
                squares += part * part
            factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        sums = tl.zeros((BLOCK_E, BLOCK_K), dtype=tl.float32)
        for at in range(0, K, BLOCK_K):
            inside = at + columns < K
            row = tl.load(x + token * K + at + columns, mask=inside, other=0.0)
            if norm_weight is not None:
                scale = first_scale
                if at > 0:
                    scale = tl.load(norm_weight + at + columns, mask=inside, other=0.0).to(tl.float32)
                row = (row.to(tl.float32) * factor * scale).to(row.dtype)
                tl.store(normed + token * K + at + columns, row, mask=inside & (tl.program_id(0) == 0))
            matrix = first
            if at > 0:
                matrix = tl.load(rows + at, mask=exists[:, None] & inside[None, :], other=0.0)
            sums += matrix * row.to(tl.float32)[None, :]
        tl.store(out + token * NUM_EXPERTS + experts, tl.sum(sums, 1), mask=exists)


@triton.jit
def _store_order(order, tokens, live, padded, slot, start, start_padded, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Write the pairs of these tokens to ``order``. ``slot`` [ROWS, BLOCK_E]: for each token and expert j if this is
    the token's j-th expert, -1 if it is none of them. ``start`` [BLOCK_E]: the place of the first pair of each expert;
    ``start_padded``: that of the first padded token's."""
    taken = (slot >= 0) & (live & (padded == 0))[:, None]
    ones = taken.to(tl.int32)
    place = start[None, :] + tl.cumsum(ones, 0) - ones
    tl.store(order + place, tokens[:, None].to(tl.int64) * TOP_K + slot, mask=taken)
    left_out = live & (padded != 0)
    count = left_out.to(tl.int32)
    rank = tl.cumsum(count, 0) - count
    j = tl.arange(0, BLOCK_K)
    last = start_padded + rank[:, None] * TOP_K + j[None, :]
    pairs = tokens[:, None].to(tl.int64) * TOP_K + j[None, :]
    tl.store(order + last, pairs, mask=left_out[:, None] & (j < TOP_K)[None, :])


@triton.jit
def _best_two(a, second_a, b, second_b):
    """The two highest scores of both sides, of which each has its own two."""
    return tl.maximum(a, b), tl.maximum(tl.minimum(a, b), tl.maximum(second_a, second_b))


@triton.jit(do_not_specialize=["num_tokens", "num_sink_slots"])
def _route_kernel(
    logits, correction, out_slots, ids, weights, order, ends, counts, num_tokens, num_sink_slots, scaling,
    NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SCORED_BY: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, CORRECTED: tl.constexpr, JOINED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """If ``counts`` is None, one program handles all tokens. Else each writes how many pairs each expert has."""
    PAIRS: tl.constexpr = TOP_K + 1 if JOINED else TOP_K  # of a token
    NONE: tl.constexpr = NUM_EXPERTS + 1 if JOINED else NUM_EXPERTS
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = tokens < num_tokens
    experts = tl.arange(0, BLOCK_E)
    exists = experts < NUM_EXPERTS
    wanted = live[:, None] & exists[None, :]
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    x = tl.load(logits + tokens[:, None] * NUM_EXPERTS + experts[None, :], mask=wanted, other=0.0)
    if SIGMOID:
        scores = tl.sigmoid(x)
    else:
        x = tl.where(exists[None, :], x, float("-inf"))
        exps = tl.exp(x - tl.max(x, 1)[:, None])
        scores = exps / tl.sum(exps, 1)[:, None]
    chosen_by = scores
    if CORRECTED:
        chosen_by += tl.load(correction + experts, mask=exists, other=0.0)[None, :]
    # NaN scores become the lowest score, so that the chosen expert always exists.
    chosen_by = tl.where(chosen_by >= _LEAST, chosen_by, _LEAST)
    chosen_by = tl.where(exists[None, :], chosen_by, float("-inf"))
    if NUM_GROUPS > 1:
        # Everything keeps the shape of the scores: a shape with an axis for groups costs most of the registers.
        size: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
        group = experts // size
        by_group = tl.full((ROWS, BLOCK_E), float("-inf"), dtype=tl.float32)  # each expert has its group's score
        for g in range(NUM_GROUPS):
            inside = ((group == g) & exists)[None, :]
            own = tl.where(inside, chosen_by, float("-inf"))
            none = tl.full((ROWS, BLOCK_E), float("-inf"), dtype=tl.float32)
            first, second = tl.reduce((own, none), 1, _best_two)
            total = tl.maximum(first + second, _LEAST) if SCORED_BY == 2 else first
            by_group = tl.where(inside, total[:, None], by_group)
        opened = tl.zeros((ROWS, BLOCK_E), dtype=tl.int32)
        for _ in range(TOP_GROUPS):
            hit = group[None, :] == (tl.argmax(by_group, 1) // size)[:, None]
            opened = tl.where(hit, 1, opened)
            by_group = tl.where(hit, float("-inf"), by_group)
        chosen_by = tl.where(opened != 0, chosen_by, float("-inf"))
    padded = (tl.load(out_slots + tokens, mask=live, other=0) < num_sink_slots).to(tl.int32)
    slot = tl.full((ROWS, BLOCK_E), -1, dtype=tl.int32)
    for j in range(TOP_K):
        best = tl.argmax(chosen_by, 1)
        hit = experts[None, :] == best[:, None]
        slot = tl.where(hit, j, slot)
        chosen_by = tl.where(hit, float("-inf"), chosen_by)
        tl.store(ids + tokens * PAIRS + j, tl.where(padded != 0, NONE, best).to(tl.int64), mask=live)
    chosen = slot >= 0
    if RENORMALISE:
        scores = scores / (tl.sum(tl.where(chosen, scores, 0.0), 1) + 1e-20)[:, None]  # all sigmoids may be zero
    scores *= scaling
    tl.store(weights + tokens[:, None] * PAIRS + slot, scores, mask=chosen & live[:, None])
    goes = live & (padded == 0)
    count = tl.sum((chosen & goes[:, None]).to(tl.int32), 0)
    if counts is None:
        last = tl.cumsum(count, 0)
        tl.store(ends + experts, last, mask=exists)
        total = tl.sum(count, 0)
        if JOINED:
            ones = goes.to(tl.int32)
            pair = tokens * PAIRS + TOP_K
            tl.store(ids + pair, tl.where(padded != 0, NONE, NUM_EXPERTS).to(tl.int64), mask=live)
            tl.store(weights + pair, tl.full((ROWS,), 1.0, dtype=tl.float32), mask=live)
            tl.store(order + total + tl.cumsum(ones, 0) - ones, pair.to(tl.int64), mask=goes)
            total += tl.sum(ones, 0)
            tl.store(ends + NUM_EXPERTS, total)
        _store_order(order, tokens, live, padded, slot, last - count, total, PAIRS, BLOCK_K)
    else:
        tl.store(counts + tl.program_id(0) * NUM_EXPERTS + experts, count, mask=exists)


@triton.jit(do_not_specialize=["num_tokens"])
def _place_kernel(
    ids, counts, order, ends, num_tokens,
    NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    experts = tl.arange(0, BLOCK_E)
    exists = experts < NUM_EXPERTS
    others = tl.arange(0, 32)
    total = tl.zeros((BLOCK_E,), dtype=tl.int32)
    before = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for start in range(0, tl.num_programs(0), 32):
        index = start + others
        wanted = (index < tl.num_programs(0))[:, None] & exists[None, :]
        part = tl.load(counts + index[:, None] * NUM_EXPERTS + experts[None, :], mask=wanted, other=0)
        total += tl.sum(part, 0)
        before += tl.sum(tl.where((index < program)[:, None], part, 0), 0)
    last = tl.cumsum(total, 0)
    if program == 0:
        tl.store(ends + experts, last, mask=exists)
    tokens = program * ROWS + tl.arange(0, ROWS)
    live = tokens < num_tokens
    slot = tl.full((ROWS, BLOCK_E), -1, dtype=tl.int32)
    for j in range(TOP_K):
        expert = tl.load(ids + tokens * TOP_K + j, mask=live, other=NUM_EXPERTS)
        slot = tl.where(experts[None, :] == expert[:, None], j, slot)
    padded = (tl.load(ids + tokens * TOP_K, mask=live, other=NUM_EXPERTS) == NUM_EXPERTS).to(tl.int32)
    padded_before = program * ROWS * TOP_K - tl.sum(before, 0)
    first_padded = tl.sum(total, 0) + padded_before
    _store_order(order, tokens, live, padded, slot, last - total + before, first_padded, TOP_K, BLOCK_K)
