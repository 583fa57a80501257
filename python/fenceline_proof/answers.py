"""Compares each answer of a run with the oracle's.

The driver keeps a :class:`Transcript` of the messages to and from the scheduler, in order. Besides tokens it checks
that every increment is sent once and in order, nothing after the end or during a pause, finish reasons and logprobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import numpy.typing as npt

from fenceline.ipc.io_struct import (
    AbortReq,
    ContinueGenerationReq,
    FinishReason,
    Message,
    PauseGenerationReq,
    TokenizedGenerateReq,
    TokenLogprobs,
    TokenOut,
    UpdateWeightsReq,
)
from fenceline_proof.oracle import Answer, Oracle, Query, is_stuck
from fenceline_proof.tiny_model import PIECES

F64 = npt.NDArray[np.float64]
_Logprobs = Sequence[tuple[float | None, int]]

LOGPROB_TOLERANCE = EMBEDDING_TOLERANCE = 1e-4
_STUCK = FinishReason(type="abort", message="no token of the vocabulary can follow in its grammar", status_code=400)
_LOWEST = float(np.finfo(np.float32).min)  # the logprob of probability 0
# At most this share of the compared tokens may differ because of rounding, in addition to one in each run.
MAX_CLOSE_SHARE = 1e-3


@dataclass(slots=True)
class Exchange:
    """One request: its message, its output so far, and what ended it if it did not end by itself."""

    request: TokenizedGenerateReq
    seed: int
    outs: list[TokenOut] = field(default_factory=list)
    aborted: AbortReq | None = None  # the message that aborted it
    ended: bool = False
    # (number of its outputs by then, folder) of each update of the weights that it has seen, and of the one before it.
    weights: list[tuple[int, str]] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for out in self.outs for token in out.output_ids]


@dataclass(frozen=True, slots=True)
class Findings:
    """The first error in the answers of a run, "" if there is none; the number of tokens that were compared; and of
    those that differ because of rounding."""

    wrong: str = ""
    num_tokens: int = 0
    num_close: int = 0


@dataclass(frozen=True, slots=True)
class Setting:
    """What the answers of a server depend on besides its model. ``capacity``: its longest sequence, in tokens."""

    random_seed: int
    eos_ids: frozenset[int]
    capacity: int

    def num_new_tokens(self, request: TokenizedGenerateReq) -> int:
        """Most tokens that ``request`` gets; -1 if it is refused."""
        wanted, num_prompt = request.sampling_params.max_new_tokens, len(request.input_ids)
        limit = min(wanted, self.capacity - num_prompt)
        return -1 if num_prompt == 0 or limit < min(wanted, 1) else limit


class Transcript:
    def __init__(self, setting: Setting) -> None:
        self.exchanges: dict[str, Exchange] = {}
        self._wrong: list[str] = []
        self._seeds = Random(setting.random_seed)  # of requests that bring none, in order of arrival
        self._setting = setting
        self._paused = self._quiet = False
        self._weights = ""  # the folder of the latest, "" for the first ones

    def turn(self) -> None:
        """The scheduler begins a turn of its loop. What was in flight at a pause has been sent in the turn before."""
        self._quiet = self._paused

    def received(self, message: Message) -> None:
        match message:
            case TokenizedGenerateReq():
                seed = message.sampling_params.seed
                exchange = Exchange(message, self._seeds.getrandbits(63) if seed is None else seed)
                exchange.weights.append((0, self._weights))
                self.exchanges[message.rid] = exchange
            case AbortReq():
                for exchange in self._targets(message):
                    if exchange.aborted is None:  # a later one, even if silent, finds no request any more
                        exchange.aborted, exchange.ended = message, message.silent
            case PauseGenerationReq():
                self._paused = True
                if message.mode == "abort":
                    self.received(AbortReq(abort_all=True))
            case ContinueGenerationReq():
                self._paused = self._quiet = False
            case UpdateWeightsReq():
                if message.abort_all_requests:
                    self.received(AbortReq(abort_all=True))
                self._paused |= message.keep_pause

    def updated(self, folder: str, num_outputs: Mapping[str, int]) -> None:
        """The weights are those of ``folder`` from now on. ``num_outputs``: of the requests that are there, by rid."""
        self._weights = folder
        for rid, exchange in self.exchanges.items():
            if not exchange.ended:  # one that is not there yet has arrived just behind the update
                exchange.weights.append((num_outputs.get(rid, 0), folder))

    def _targets(self, message: AbortReq) -> list[Exchange]:
        rids = list(self.exchanges) if message.abort_all else [message.rid]
        exchanges = [self.exchanges[rid] for rid in rids if rid in self.exchanges]
        return [exchange for exchange in exchanges if not exchange.ended]

    def sent(self, out: TokenOut) -> None:
        exchange = self.exchanges.get(out.rid)
        if exchange is None or exchange.ended:
            self._wrong.append(f"{out.rid} has an output {'after its end' if exchange else 'without a request'}")
            return
        if (out.decode is not None) != (not exchange.outs):
            self._wrong.append(f"{out.rid} is announced with output no. {len(exchange.outs)}, not with the first")
        if exchange.aborted and (out.finish_reason is None or out.finish_reason.type != "abort"):
            self._wrong.append(f"{out.rid} goes on after it was aborted")
        if self._quiet and (out.finish_reason is None or out.finish_reason.type != "abort"):
            self._wrong.append(f"{out.rid} goes on while generation is paused")
        exchange.outs.append(out)
        exchange.ended = out.finish_reason is not None

    def compare(self, oracle: Oracle) -> Findings:
        wrong, num_tokens, num_close = list(self._wrong), 0, 0
        for rid, exchange in self.exchanges.items():
            comparison = _Comparison(exchange, oracle, self._setting)
            difference = comparison.run()
            if difference:
                wrong.append(f"{rid}: {difference}")
            num_tokens += comparison.num_tokens
            num_close += comparison.num_close
        if num_close > 1 + num_tokens * MAX_CLOSE_SHARE:
            wrong.append(f"{num_close} differences by rounding in {num_tokens} tokens: that is too many")
        return Findings("\n".join(wrong), num_tokens, num_close)


class _Comparison:
    def __init__(self, exchange: Exchange, oracle: Oracle, setting: Setting) -> None:
        params, prompt = exchange.request.sampling_params, exchange.request.input_ids
        self.num_tokens = self.num_close = 0
        self._exchange = exchange
        self._oracle = oracle
        self._setting = setting
        self._limit = setting.num_new_tokens(exchange.request)
        self._refused = self._limit < 0
        self._forced: tuple[tuple[int, int], ...] = ()
        self._query = Query(
            prompt=tuple(prompt), seed=exchange.seed,
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else setting.eos_ids),
            max_new_tokens=self._limit, min_new_tokens=params.min_new_tokens, temperature=params.temperature,
            top_k=params.top_k, top_p=params.top_p, min_p=params.min_p, repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty, presence_penalty=params.presence_penalty,
            logit_bias=tuple(sorted((params.logit_bias or {}).items())), grammar=exchange.request.grammar,
            eos_ids=setting.eos_ids if exchange.request.grammar else frozenset(),
            pieces=PIECES if exchange.request.grammar else (), weights=tuple(dict(exchange.weights).items()),
            images=tuple((one.offset, one.pixels, one.height, one.width) for one in exchange.request.images),
        )  # fmt: skip

    def run(self) -> str:
        """The first error, "" if there is none. Where the engine may have rounded a key or a value to another number of
        FP8, nothing is said of the values."""
        exchange = self._exchange
        if not exchange.ended:
            return "was never answered"
        reason = exchange.outs[-1].finish_reason if exchange.outs else None
        if self._refused:
            right = reason is not None and reason.type == "abort" and reason.status_code == 400
            return "" if right and not exchange.tokens else "is not refused though it does not fit"
        tokens, counts = self._tokens(reason), self._counts()
        logprobs = (
            ""
            if tokens or counts
            else (self._output_logprobs() or self._input_logprobs(reason) or self._embedding(reason))
        )
        return counts if self._answer.num_near_ties else tokens or counts or logprobs

    def _counts(self) -> str:
        said, num_prompt = 0, len(self._query.prompt)
        for out in self._exchange.outs:
            said += len(out.output_ids)
            if out.completion_tokens != said or out.prompt_tokens != num_prompt:
                return (
                    f"{out.prompt_tokens} prompt and {out.completion_tokens} completion tokens are reported, "
                    f"{num_prompt} and {said} is right"
                )
        return ""

    @property
    def _answer(self) -> Answer:
        return self._oracle.answer(self._query, self._forced)

    def _tokens(self, reason: FinishReason | None) -> str:
        expected = FinishReason(type="length", length=0) if self._limit == 0 else None
        tokens = self._exchange.tokens
        for index, token in enumerate(tokens):
            if expected is not None:
                return f"goes on with {token} after its end ({_describe(expected)}) at output {index}"
            step = self._answer.step(index)
            self.num_tokens += 1
            if token != step.token:
                if token not in step.close:
                    return f"output {index} is {token}, alone it is {step.token} (after {tokens[:index]})"
                self.num_close += 1
                self._forced = (*self._forced, (index, token))
            expected = self._end_after(tokens[: index + 1])
        # An answer that may be broken off.
        begun = expected is None or not tokens or expected == _STUCK
        if reason is None:
            right = begun and self._exchange.aborted is not None
        elif reason.type == "abort":
            asked = self._exchange.aborted  # by a client, in its words
            words = None if asked is None else (asked.message or "aborted", asked.status_code)
            right = begun and (reason == expected or (reason.message, reason.status_code) == words)
        else:
            right = reason == expected
        return "" if right else f"ends with {_describe(reason)} after {len(tokens)} tokens, not {_describe(expected)}"

    def _end_after(self, tokens: Sequence[int]) -> FinishReason | None:
        num_outputs, token = len(tokens), tokens[-1]
        if token in self._query.eos_ids:  # its grammar has ended
            return FinishReason(type="stop", matched=token)
        if token in self._query.stop_ids and num_outputs >= self._query.min_new_tokens:
            return FinishReason(type="stop", matched=token)
        if num_outputs >= self._limit:
            return FinishReason(type="length", length=num_outputs)
        return _STUCK if is_stuck(self._query, tokens) else None

    def _output_logprobs(self) -> str:
        parts = [out.output_logprobs for out in self._exchange.outs]
        if not self._exchange.request.return_logprob:
            return "has logprobs that nobody asked for" if any(parts) else ""
        tokens = self._exchange.tokens
        expected = [self._answer.step(index).logprobs for index in range(len(tokens))]
        return self._logprobs("output", parts, tokens, expected)

    def _input_logprobs(self, reason: FinishReason | None) -> str:
        request = self._exchange.request
        parts = [out.input_logprobs for out in self._exchange.outs if out.input_logprobs is not None]
        start = request.logprob_start_len
        if not request.return_logprob or start < 0:
            return "has input logprobs that nobody asked for" if parts else ""
        if not self._exchange.outs:  # ended without an output
            return ""
        if len(parts) != 1:
            return f"has its input logprobs in {len(parts)} of its outputs, not in one"
        tokens = request.input_ids[start:]
        rows: list[F64 | None] = [None, *self._answer.prompt_logprobs(start)]
        # In the middle of its prompt.
        if reason is not None and reason.type == "abort" and not self._exchange.tokens:
            tokens = tokens[: len(parts[0].token_ids)]
            rows = rows[: len(tokens)]
        return self._logprobs("input", parts, tokens, rows)

    def _embedding(self, reason: FinishReason | None) -> str:
        first = self._exchange.outs[0].decode if self._exchange.outs else None
        found = None if first is None else first.embedding
        if (found is not None) != (self._exchange.request.embed and reason is not None and reason.type == "length"):
            return "has an embedding" if found is not None else "has no embedding"
        state, right = np.frombuffer(found or b"", np.float32), self._answer.embedding() if found else None
        if right is not None and not (np.abs(state - right) <= EMBEDDING_TOLERANCE).all():
            return f"its embedding is {state}, alone {right}"
        return ""

    def _logprobs(
        self, side: str, parts: Sequence[TokenLogprobs | None], tokens: Sequence[int], expected: Sequence[F64 | None]
    ) -> str:
        """``expected``: of each token the row of logprobs, None if it has no logprob."""
        present = [part for part in parts if part is not None]
        ids = [token for part in present for token in part.token_ids]
        chosen = [value for part in present for value in part.logprobs]
        tops = [top for part in present for top in part.top_logprobs]
        named = [pairs for part in present for pairs in part.token_ids_logprobs]
        asked = self._exchange.request.token_ids_logprob
        if ids != list(tokens) or not len(ids) == len(chosen) == len(tops):
            return f"has {side} logprobs of the tokens {ids}, not of {list(tokens)}"
        if len(named) != (len(ids) if asked else 0):
            return f"has {side} logprobs of named tokens at {len(named)} of {len(ids)} positions"
        for position, (token, value, top, row) in enumerate(zip(tokens, chosen, tops, expected, strict=True)):
            pairs = named[position] if asked else []
            if row is None:
                wrong = value is not None or bool(top) or bool(pairs)
            else:
                wrong = not self._agrees((value, token), top, pairs, row)
            if wrong:
                right = None if row is None else [(row[token], token), *_best(row, len(top)), *_of(row, asked)]
                return f"{side} logprobs at {position} are {[(value, token), *top, *pairs]}, alone {right}"
        return ""

    def _agrees(self, chosen: tuple[float | None, int], top: _Logprobs, named: _Logprobs, row: F64) -> bool:
        """Whether the logprobs of a position, of its token, the best ones and the ``named`` ones, are those of ``row``
        [V]."""
        request = self._exchange.request
        num_top = min(request.top_logprobs_num, len(row))
        best = np.sort(row)[::-1][:num_top].tolist()
        return (
            len(top) == len({id for _, id in top}) == num_top
            and all(_close(got, row[id]) and _close(got, right) for (got, id), right in zip(top, best, strict=True))
            and [id for _, id in named] == request.token_ids_logprob
            and all(_close(got, row[id]) for got, id in (chosen, *named))
        )


def _close(value: float | None, right: float) -> bool:
    return value is not None and abs(value - max(right, _LOWEST)) <= LOGPROB_TOLERANCE


def _best(row: F64, num: int) -> list[tuple[float, int]]:
    return _of(row, np.argsort(-row)[:num].tolist())


def _of(row: F64, ids: Sequence[int]) -> list[tuple[float, int]]:
    return [(float(row[id]), id) for id in ids]


def _describe(reason: FinishReason | None) -> str:
    if reason is None:
        return "nothing"
    extra = reason.matched if reason.type == "stop" else reason.message or ""
    return f"{reason.type} {extra}".strip()
