"""The sampler: it turns logits into tokens, on the device and in program order on FORWARD.

The order of operations is that of vLLM and SGLang:

1. logit_bias; repetition, frequency and presence penalty; the min_new_tokens mask; the grammars' masks;
2. the arg-max, for greedy requests;
3. temperature; then the logprobs are computed;
4. top_k, top_p and min_p (jointly); the draw.

As in SGLang by default, logprobs of outputs are those of the distribution after bias, penalties, masks and temperature
and before top_k, top_p and min_p. So a token's logprob is that of the unfiltered draw. For a greedy request the
temperature is 1 there. With neutral parameters the logprobs are the model's own log-softmax.

A request's token depends on its own logits, parameters, seed and position only, bit by bit: neither on its place in the
batch nor on the other requests. There is no host synchronisation and no shape that depends on data, so a step can be
captured. On CUDA the draw uses the same kernel as captured decode steps, so a request gets the same tokens whether its
batch replays a graph or needs this sampler. Temporary memory is at most two copies of the logits and a few pieces of
``CHUNK_ELEMENTS``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fenceline.sampling.draw_kernels import masked, sample_tokens
from fenceline.sampling.gumbel import GumbelSampler, row_chunks, take_rows
from fenceline.sampling.logprobs import OutputLogprobs, prompt_logprobs, spread, token_logprobs
from fenceline.sampling.sampling_batch import SamplingBatch

__all__ = ["OutputLogprobs", "SampleOutput", "Sampler", "prompt_logprobs"]


# One int16 per (row, token): bit 14 is set if the token is in the prompt, and the bits below count its occurrences in
# the output, up to _MAX_COUNT. Zero means that the request does not contain the token.
_IN_PROMPT = 1 << 14
_MAX_COUNT = _IN_PROMPT - 1

# Probabilities, relative to the largest one of their row, are rounded to integer multiples of 1 / _UNIT. Sums of
# integers are exact in any order, so top_p cuts at the same token, whatever the shape of the batch and however the
# device orders its reductions and scans.
_UNIT = float(1 << 40)


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """One token for each of B requests. The tensors are newly allocated and belong to the caller."""

    next_tokens: torch.Tensor  # [B] int64
    logprobs: OutputLogprobs | None  # None if no request asked for them


class Sampler:
    """Samples for request rows ``0 .. num_rows - 1`` over ``vocab_size`` tokens on ``device``. Token counts for
    penalties (``2 * num_rows * vocab_size`` bytes) are allocated when the first request with penalties begins. All
    methods must be called with the same stream current."""

    def __init__(self, vocab_size: int, num_rows: int, device: torch.device, fixed_order: bool = False) -> None:
        """``fixed_order``: that of logprobs, see ``token_logprobs``."""
        self._vocab_size, self._fixed_order = vocab_size, fixed_order
        self._num_rows = num_rows
        self._device = device
        self._gumbel = GumbelSampler(vocab_size, device)
        self._counts: TokenCounts | None = None

    def begin_request(self, row: int, prompt_ids: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Initialise the token counts of ``row``. Must be called before the first token of a request with
        ``needs_penalties`` is sampled, and again when the request resumes after a retraction, with its outputs so far.
        ``prompt_ids`` and ``output_ids`` are 1-D int64 tensors on the device."""
        if self._counts is None:
            self._counts = TokenCounts(self._num_rows, self._vocab_size, self._device)
        self._counts.begin(row, prompt_ids, output_ids)

    def forward(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        batch: SamplingBatch,
        masks: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        last_tokens: torch.Tensor | None = None,
    ) -> SampleOutput:
        """Sample one token per request, and count it if the request has penalties. If ``rows`` [B] int64, which are
        distinct, and ``last_tokens`` [R] int64 are given, ``last_tokens[rows]`` is set to the tokens.

        ``logits`` [B, V] float32, bfloat16 or float16 are not changed. ``positions`` [B] int64: the position that the
        sampled token will have in its sequence, which is the prompt length plus the outputs so far. Because sampled
        tokens are counted, requests with penalties whose token will be dropped (those with an unfinished prompt) must
        not be in the batch. ``masks``: which tokens may be drawn, see :func:`masked`; None: all. From NaN logits some
        token of the vocabulary is drawn, never an id outside it.
        """
        assert logits.shape == (batch.num_reqs, self._vocab_size), (logits.shape, batch.num_reqs)
        if self._device.type == "cuda" and not (self._needs_scaled(batch) or _adjusts(batch)):
            tokens = _choose_fused(logits, None, positions, batch, masks, rows, last_tokens)
            return SampleOutput(tokens, None)
        logits = self._adjust(logits.float(), positions, batch)
        if masks is not None:
            logits = masked(logits, masks)
        scaled = _scale(logits, batch) if self._needs_scaled(batch) else None
        next_tokens = self._choose(logits, scaled, positions, batch)
        if rows is not None:
            assert last_tokens is not None, "rows are those of last_tokens"
            last_tokens.index_copy_(0, rows, next_tokens)
        if batch.penalty_rows is not None:
            assert self._counts is not None
            index = batch.penalty_index
            sampled = next_tokens if index is None else next_tokens.index_select(0, index)
            self._counts.add(batch.penalty_rows, sampled)
        if scaled is None or not batch.return_logprob:
            return SampleOutput(next_tokens, None)
        return SampleOutput(next_tokens, _logprobs(scaled, next_tokens, batch, self._fixed_order))

    def _needs_scaled(self, batch: SamplingBatch) -> bool:
        """Whether scaled logits must be computed. On CUDA the kernel of the draw scales the logits itself, so only
        logprobs and filters need them."""
        if batch.return_logprob or batch.seed_keys is None:
            return batch.return_logprob
        return self._device.type != "cuda" or batch.top_ks is not None or batch.min_p_logs is not None

    def _choose(
        self, logits: torch.Tensor, scaled: torch.Tensor | None, positions: torch.Tensor, batch: SamplingBatch
    ) -> torch.Tensor:
        if self._device.type == "cuda":
            return _choose_fused(logits, scaled, positions, batch)
        if scaled is None or batch.seed_keys is None:
            return logits.argmax(dim=-1)
        thresholds = keep_thresholds(scaled, batch)
        return self._gumbel.draw(scaled, batch.seed_keys, positions, batch.noise_scales, thresholds)

    def _adjust(self, logits: torch.Tensor, positions: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Apply bias, penalties and the min_new_tokens mask. Returns ``logits`` itself if there is nothing to do."""
        if not _adjusts(batch):
            return logits
        logits = logits.clone()
        if batch.bias_index is not None:
            assert batch.bias_ids is not None and batch.bias_values is not None
            biased = logits[batch.bias_index, batch.bias_ids] + batch.bias_values
            logits[batch.bias_index, batch.bias_ids] = biased
        if batch.penalty_rows is not None:
            self._penalize_(logits, batch)
        if batch.stop_index is not None:
            assert batch.stop_ids is not None and batch.stop_until is not None
            too_early = positions[batch.stop_index] < batch.stop_until
            old = logits[batch.stop_index, batch.stop_ids]
            logits[batch.stop_index, batch.stop_ids] = old.masked_fill(too_early, -torch.inf)
        return logits

    def _penalize_(self, logits: torch.Tensor, batch: SamplingBatch) -> None:
        assert self._counts is not None, "begin_request comes before the first step of a penalised request"
        assert batch.penalty_rows is not None and batch.repetition_penalties is not None
        assert batch.frequency_penalties is not None and batch.presence_penalties is not None
        for rows in row_chunks(batch.penalty_rows.shape[0], self._vocab_size):
            penalized = self._counts.apply(
                take_rows(logits, batch.penalty_index, rows),
                batch.penalty_rows[rows],
                batch.repetition_penalties[rows],
                batch.frequency_penalties[rows],
                batch.presence_penalties[rows],
            )
            if batch.penalty_index is None:
                logits[rows] = penalized
            else:
                logits.index_copy_(0, batch.penalty_index[rows], penalized)


class TokenCounts:
    """Counts the tokens of each request that has repetition, frequency or presence penalties. Owns a [num_rows, V]
    int16 table (2 * num_rows * V bytes). All methods submit to the current stream, in program order with the sampler,
    and do not synchronise with the host."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._table = torch.zeros((num_rows, vocab_size), dtype=torch.int16, device=device)

    def begin(self, row: int, prompt_ids: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Clear ``row`` and count the given tokens (1-D int64, on the table's device)."""
        counts = torch.zeros(self._table.shape[1], dtype=torch.int32, device=self._table.device)
        counts.scatter_add_(0, output_ids, torch.ones_like(output_ids, dtype=torch.int32))
        counts.clamp_(max=_MAX_COUNT)
        entry = self._table[row]
        entry.zero_().index_fill_(0, prompt_ids, _IN_PROMPT)
        entry.add_(counts.to(torch.int16))

    def add(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Count one output token of each of the distinct ``rows``; both [P] int64."""
        entries = self._table[rows, token_ids]
        room = (entries & _MAX_COUNT) < _MAX_COUNT
        self._table[rows, token_ids] = entries + room

    def apply(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        repetition: torch.Tensor,
        frequency: torch.Tensor,
        presence: torch.Tensor,
    ) -> torch.Tensor:
        """Penalised copy of ``logits`` [P, V] float32 for request rows ``rows`` [P]; penalties are [P] float32. First
        the repetition penalty, for every token of prompt or output: a positive logit is divided by it, a negative one
        multiplied (Keskar et al. 2019, as in transformers). Then ``frequency * count + presence`` is subtracted for
        output tokens (OpenAI's formula). Neutral penalties do not change any bit."""
        entries = self._table.index_select(0, rows)
        factor = repetition[:, None]
        repeated = torch.where(logits < 0, logits * factor, logits / factor)
        logits = torch.where(entries > 0, repeated, logits)
        counts = entries.bitwise_and_(_MAX_COUNT)
        logits -= counts * frequency[:, None]
        logits -= (counts > 0) * presence[:, None]
        return logits


def _adjusts(batch: SamplingBatch) -> bool:
    """Whether some logits are changed before a token is drawn, other than by a mask."""
    return batch.bias_index is not None or batch.penalty_rows is not None or batch.stop_index is not None


def _choose_fused(
    logits: torch.Tensor,
    scaled: torch.Tensor | None,
    positions: torch.Tensor,
    batch: SamplingBatch,
    masks: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    last_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    thresholds = None if scaled is None or batch.seed_keys is None else keep_thresholds(scaled, batch)
    next_tokens = torch.empty_like(positions)
    sample_tokens(
        logits,
        batch.temperatures,
        batch.noise_scales,
        batch.seed_keys,
        positions,
        rows=rows,
        last_tokens=last_tokens,
        next_tokens=next_tokens,
        maxima=None if thresholds is None else logits.amax(dim=-1),
        masks=masks,
        thresholds=thresholds,
    )
    return next_tokens


def _scale(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """(logits - row maximum) / temperature, as a new tensor. The maximum is first, lest it overflow."""
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    return scaled if batch.temperatures is None else scaled.div_(batch.temperatures[:, None])


def _logprobs(
    scaled: torch.Tensor, next_tokens: torch.Tensor, batch: SamplingBatch, fixed_order: bool
) -> OutputLogprobs:
    index, named_ids = batch.logprob_index, batch.logprob_named_ids
    if named_ids is not None:
        named_ids = named_ids.view(batch.num_reqs if index is None else index.shape[0], -1)
    part = token_logprobs(scaled, next_tokens, batch.max_top_logprobs, index, named_ids, fixed_order)
    return part if index is None else spread(part, index, batch.num_reqs)


def keep_thresholds(scaled: torch.Tensor, batch: SamplingBatch) -> torch.Tensor | None:
    """The lowest score of each request that may be drawn after top_k, top_p and min_p: [B] float32 for ``scaled`` [B,
    V] float32, whose rows have the maximum 0. None: all tokens may be drawn.

    The filters are thresholds on values, not on ranks. So the tokens that are kept depend only on the row's values, not
    on how a sort or a top-k breaks ties, which are common with bf16 logits. Tokens that tie with the last one kept are
    kept too, as in transformers. As in SGLang the filters are joint: each is computed from the full distribution after
    temperature, and a token must pass all of them. A full sort is done only if some request has top_p without top_k.
    """
    thresholds = _sorted_thresholds(scaled, batch)
    if batch.min_p_logs is None:
        return thresholds
    # p >= min_p * p_max; as the largest score is 0, that is score >= log(min_p).
    return batch.min_p_logs if thresholds is None else torch.maximum(thresholds, batch.min_p_logs)


def _sorted_thresholds(scaled: torch.Tensor, batch: SamplingBatch) -> torch.Tensor | None:
    if batch.top_ks is None:
        return None
    index, top_ks = batch.filter_index, batch.top_ks
    pieces = []
    for rows in row_chunks(top_ks.shape[0], scaled.shape[1]):
        top_ps = None if batch.top_ps is None else batch.top_ps[rows]
        pieces.append(_lowest_kept(take_rows(scaled, index, rows), batch.max_top_k, top_ks[rows], top_ps))
    lowest = torch.cat(pieces)
    if index is None:
        return lowest
    return scaled.new_full((scaled.shape[0],), -torch.inf).index_copy_(0, index, lowest)


def _lowest_kept(
    scaled: torch.Tensor, max_top_k: int, top_ks: torch.Tensor, top_ps: torch.Tensor | None
) -> torch.Tensor:
    """The lowest score [F] that top_k and top_p keep in each row of ``scaled`` [F, V]."""
    vocab_size = scaled.shape[1]
    if max_top_k < vocab_size:
        ordered = scaled.topk(max_top_k, dim=-1).values
    else:
        ordered = scaled.sort(dim=-1, descending=True).values
    last = top_ks.clamp(max=ordered.shape[1]) - 1
    if top_ps is not None:
        last = torch.minimum(last, _last_in_nucleus(scaled, ordered, top_ps))
    return ordered.gather(1, last[:, None]).squeeze(1)


def _last_in_nucleus(scaled: torch.Tensor, ordered: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """The rank [F] int64 of the last token of the smallest set of tokens whose probability reaches ``top_p`` (Holtzman
    et al. 2020)."""
    mass = _fixed_point(ordered)
    total = mass.sum(-1) if ordered.shape == scaled.shape else _fixed_point(scaled).sum(-1)
    limit = (total * top_ps).to(torch.int64).clamp_(min=1)
    before = mass.cumsum(-1) - mass
    num_kept = (before < limit[:, None]).sum(-1)
    return (num_kept - 1).clamp_(min=0)  # for a row of NaN, num_kept is 0; rank 0 keeps the index valid


def _fixed_point(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.to(torch.float64).exp_().mul_(_UNIT).to(torch.int64)
