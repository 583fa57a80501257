"""SamplingBatch: the sampling parameters of one batch composition, as the sampler reads them. They are the same in each
step of these requests.

On the host, :func:`sampling_arrays` converts the requests' parameters to a few small arrays, which are uploaded
together with the step's other inputs. On the device, :class:`SamplingBatch` has the views of that upload. An array that
no request of the batch needs is None, so the host always knows which operations are needed, without reading from the
device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch

from fenceline.sampling.gumbel import mix_seeds
from fenceline.sampling.sampling_params import TOP_K_ALL, SamplingParams

Array = npt.NDArray[np.generic]

# Temperatures outside these bounds have the same effect as the bound: at the smallest the draw is an arg-max with
# random ties, at the largest it is uniform in float32. And -inf / temperature remains -inf.
MIN_TEMPERATURE = 1e-6
MAX_TEMPERATURE = 1e6
UNLIMITED_K = 2**31 - 1
NO_TOP_P = 2.0  # greater than the sum of all probabilities, so that every token is kept


@dataclass(frozen=True, slots=True)
class ReqSampling:
    """The sampling parameters of one request, on the host. ``seed`` has been chosen (64 bits, signed or not). ``row``
    is the request's row in tables on the device. ``stop_ids`` are masked until ``params.min_new_tokens`` outputs exist,
    unless the request is ``constrained``: then the masks of each step say which tokens may be drawn."""

    params: SamplingParams
    seed: int
    row: int
    prompt_len: int
    stop_ids: tuple[int, ...] = ()
    return_logprob: bool = False
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    constrained: bool = False

    @property
    def accepts_drafts(self) -> bool:
        """Whether drafts of this request may be accepted. Penalties and grammar masks depend on all tokens before,
        including drafts, but the token counts and grammars do not include drafts."""
        return not (self.constrained or self.params.needs_penalties)


def padded_ids(lists: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """Lists of token ids as a flattened table: [len(lists) * longest] int64. Shorter rows are padded with token 0."""
    width = max(map(len, lists))
    return np.array([[*ids, *[0] * (width - len(ids))] for ids in lists], np.int64).ravel()


def sampling_arrays(reqs: Sequence[ReqSampling]) -> dict[str, Array]:
    """The arrays that the device needs for ``reqs`` (in batch order); all are 1-D, of dtype int64, float32 or float64.
    Keys are names of :class:`SamplingBatch` fields. A batch of greedy requests without penalties, bias, min_new_tokens
    and logprobs needs none."""
    arrays: dict[str, Array] = {}
    _add_draw(arrays, reqs)
    _add_filters(arrays, reqs)
    _add_penalties(arrays, reqs)
    _add_bias(arrays, reqs)
    _add_min_tokens(arrays, reqs)
    wanted = [i for i, r in enumerate(reqs) if r.return_logprob]
    if wanted and len(wanted) < len(reqs):
        arrays["logprob_index"] = np.array(wanted, np.int64)
    if any(reqs[i].token_ids_logprob for i in wanted):
        arrays["logprob_named_ids"] = padded_ids([reqs[i].token_ids_logprob for i in wanted])
    return arrays


def _add_draw(arrays: dict[str, Array], reqs: Sequence[ReqSampling]) -> None:
    greedy = [r.params.is_greedy for r in reqs]
    if all(greedy):
        return
    arrays["seed_keys"] = mix_seeds([r.seed for r in reqs])
    arrays["temperatures"] = np.array(
        [
            1.0 if g else min(max(r.params.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)
            for r, g in zip(reqs, greedy, strict=True)
        ],
        np.float32,
    )
    if any(greedy):
        arrays["noise_scales"] = np.array([0.0 if g else 1.0 for g in greedy], np.float32)


def _add_filters(arrays: dict[str, Array], reqs: Sequence[ReqSampling]) -> None:
    params = [r.params for r in reqs]
    index = [i for i, p in enumerate(params) if not p.is_greedy and (_has_top_k(p) or _has_top_p(p))]
    if index:
        chosen = [params[i] for i in index]
        if len(index) < len(reqs):
            arrays["filter_index"] = np.array(index, np.int64)
        arrays["top_ks"] = np.array([p.top_k if _has_top_k(p) else UNLIMITED_K for p in chosen], np.int64)
        if any(_has_top_p(p) for p in chosen):
            arrays["top_ps"] = np.array([p.top_p if _has_top_p(p) else NO_TOP_P for p in chosen], np.float64)
    if any(_has_min_p(p) for p in params):
        arrays["min_p_logs"] = np.array([math.log(p.min_p) if _has_min_p(p) else -math.inf for p in params], np.float32)


def _has_top_k(params: SamplingParams) -> bool:
    return params.top_k != TOP_K_ALL


def _has_top_p(params: SamplingParams) -> bool:
    return params.top_p < 1.0


def _has_min_p(params: SamplingParams) -> bool:
    return params.min_p > 0.0 and not params.is_greedy


def _add_penalties(arrays: dict[str, Array], reqs: Sequence[ReqSampling]) -> None:
    index = [i for i, r in enumerate(reqs) if r.params.needs_penalties]
    if not index:
        return
    chosen = [reqs[i] for i in index]
    if len(index) < len(reqs):
        arrays["penalty_index"] = np.array(index, np.int64)
    arrays["penalty_rows"] = np.array([r.row for r in chosen], np.int64)
    arrays["repetition_penalties"] = np.array([r.params.repetition_penalty for r in chosen], np.float32)
    arrays["frequency_penalties"] = np.array([r.params.frequency_penalty for r in chosen], np.float32)
    arrays["presence_penalties"] = np.array([r.params.presence_penalty for r in chosen], np.float32)


def _add_bias(arrays: dict[str, Array], reqs: Sequence[ReqSampling]) -> None:
    biased = [(i, r.params.logit_bias) for i, r in enumerate(reqs) if r.params.logit_bias]
    if not biased:
        return
    made: dict[int, tuple[Array, Array]] = {}  # samples of one prompt share a dict
    for _, bias in biased:
        if id(bias) not in made:
            num = len(bias)
            made[id(bias)] = (np.fromiter(bias.keys(), np.int64, num), np.fromiter(bias.values(), np.float32, num))
    index = np.array([i for i, _ in biased], np.int64)
    arrays["bias_index"] = np.repeat(index, [len(bias) for _, bias in biased])
    arrays["bias_ids"] = np.concatenate([made[id(bias)][0] for _, bias in biased])
    arrays["bias_values"] = np.concatenate([made[id(bias)][1] for _, bias in biased])


def _add_min_tokens(arrays: dict[str, Array], reqs: Sequence[ReqSampling]) -> None:
    triples = [
        (i, t, r.prompt_len + r.params.min_new_tokens)
        for i, r in enumerate(reqs)
        if r.params.min_new_tokens > 0 and not r.constrained
        for t in dict.fromkeys(r.stop_ids)
    ]
    if not triples:
        return
    index, ids, until = zip(*triples, strict=True)
    arrays["stop_index"] = np.array(index, np.int64)
    arrays["stop_ids"] = np.array(ids, np.int64)
    arrays["stop_until"] = np.array(until, np.int64)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters of B requests: views on the device, and flags on the host. A tensor is None if no request
    of the batch needs it. F requests have filters, P have penalties and L ask for logprobs. M pairs (request, token)
    are biased, and S pairs are masked. Index tensors contain positions in the batch; if an index is None but its values
    are not, the values are those of all B requests in order. The views are part of the step's upload, and must remain
    valid as long as this batch is used."""

    num_reqs: int  # B
    return_logprob: bool
    constrained: bool  # whether some request is
    max_top_logprobs: int
    max_top_k: int  # of the requests with filters; UNLIMITED_K if one of them has only top_p
    seed_keys: torch.Tensor | None = None  # [B] int64; None: every request is greedy
    temperatures: torch.Tensor | None = None  # [B] float32, 1 for greedy requests
    noise_scales: torch.Tensor | None = None  # [B] float32, 0 for greedy requests and 1 for others
    filter_index: torch.Tensor | None = None  # [F] int64
    top_ks: torch.Tensor | None = None  # [F] int64
    top_ps: torch.Tensor | None = None  # [F] float64, above 1: keep all
    min_p_logs: torch.Tensor | None = None  # [B] float32, log(min_p), -inf: keep all
    penalty_index: torch.Tensor | None = None  # [P] int64
    penalty_rows: torch.Tensor | None = None  # [P] int64, request rows
    repetition_penalties: torch.Tensor | None = None  # [P] float32
    frequency_penalties: torch.Tensor | None = None  # [P] float32
    presence_penalties: torch.Tensor | None = None  # [P] float32
    bias_index: torch.Tensor | None = None  # [M] int64
    bias_ids: torch.Tensor | None = None  # [M] int64
    bias_values: torch.Tensor | None = None  # [M] float32
    stop_index: torch.Tensor | None = None  # [S] int64
    stop_ids: torch.Tensor | None = None  # [S] int64
    stop_until: torch.Tensor | None = None  # [S] int64, first position at which the token is allowed
    logprob_index: torch.Tensor | None = None  # [L] int64; None with return_logprob: all requests
    logprob_named_ids: torch.Tensor | None = None  # [L * W] int64: for each of the L requests, W tokens by id

    @staticmethod
    def from_views(reqs: Sequence[ReqSampling], views: Mapping[str, torch.Tensor]) -> SamplingBatch:
        """``views`` has the arrays of ``sampling_arrays(reqs)`` on the device, under the same names. It may also
        contain other inputs of the step and, for greedy requests, the inputs of random draws; these are not used."""
        names = _GREEDY_NAMES if all(r.params.is_greedy for r in reqs) else _ARRAY_NAMES
        filtered = [r.params for r in reqs if not r.params.is_greedy]
        filtered = [p for p in filtered if _has_top_k(p) or _has_top_p(p)]
        return SamplingBatch(
            num_reqs=len(reqs),
            constrained=any(r.constrained for r in reqs),
            return_logprob=any(r.return_logprob for r in reqs),
            max_top_logprobs=max((r.top_logprobs_num for r in reqs if r.return_logprob), default=0),
            max_top_k=max((p.top_k if _has_top_k(p) else UNLIMITED_K for p in filtered), default=0),
            **{name: views[name] for name in names if name in views},
        )

    @property
    def is_plain(self) -> bool:
        """Whether every request needs at most a temperature and a draw, which a captured decode step includes."""
        return not self.constrained and self.is_plain_under_masks

    @property
    def is_plain_under_masks(self) -> bool:
        """Whether every request needs at most a temperature and a draw, and perhaps a mask."""
        beyond = (self.filter_index, self.top_ks, self.min_p_logs, self.penalty_rows, self.bias_index, self.stop_index)
        return not self.return_logprob and all(part is None for part in beyond)


_HOST_FACTS = ("num_reqs", "return_logprob", "constrained", "max_top_logprobs", "max_top_k")
_DRAW_NAMES = ("seed_keys", "temperatures", "noise_scales")
_ARRAY_NAMES = tuple(f.name for f in fields(SamplingBatch) if f.name not in _HOST_FACTS)
_GREEDY_NAMES = tuple(name for name in _ARRAY_NAMES if name not in _DRAW_NAMES)
