"""Publisher: takes the results of steps, appends their tokens to requests, and tells the detokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import compress, repeat

import numpy as np

from fenceline.constrained.matcher import RequestGrammar
from fenceline.ipc.io_struct import BatchTokenOut, FinishReason, TokenizedGenerateReq, TokenLogprobs, TokenOut
from fenceline.model_executor.step import Chunk, LogprobValues, StepBatch, StepOutput
from fenceline.scheduler.masked_steps import TOO_SLOW, MaskedSteps
from fenceline.scheduler.population import InFlight, Population
from fenceline.scheduler.req import LogprobLog, Req
from fenceline.scheduler.stats import SchedulerStats
from fenceline.scheduler.step_planner import StepPlanner

_DECODED = Chunk(np.zeros(0, np.int64), np.zeros(0, np.int64))  # in the place of the chunks of rows that decode


class Publisher:
    """Publishes steps to the requests of ``population``, and tells ``planner`` how many drafts were accepted."""

    def __init__(
        self,
        population: Population,
        planner: StepPlanner,
        masks: MaskedSteps,
        stats: SchedulerStats,
        send: Callable[[BatchTokenOut], None],
    ) -> None:
        self._population = population
        self._running = population.running
        self._planner = planner
        self._masks = masks
        self._stats = stats
        self.output = OutputSender(send, speculates=not population.running.is_exact)

    def publish(self, flight: InFlight, out: StepOutput) -> None:
        """Append the step's tokens to its requests, and end those that they end. Completed prompts go to the tree."""
        completed: Sequence[Req] = ()
        if flight.batch.is_decode:
            self.publish_decode(flight.batch, flight.reqs, flight.number, out)
        else:
            completed = self.publish_extend(flight.batch, flight.reqs, out)
        self.output.flush()
        for req in completed:  # after the flush: first tokens need not wait for the tree
            if not req.left:  # or its prompt is cached when its memory is released
                self._population.memory.cache_prompt(req)

    def finish(self, req: Req, reason: FinishReason | None) -> None:
        """Send a request's last output with its finish reason, and let it leave."""
        assert reason is not None, f"{req.rid} has no reason to end"
        self.output.finish(req, reason)
        self._population.leave(req, reason.type)

    def end(self, req: Req, message: str, status_code: int | None) -> None:
        """Abort ``req`` and tell its client why."""
        self._stats.num_aborts += 1
        self.finish(req, FinishReason(type="abort", message=message, status_code=status_code))

    def publish_decode(self, batch: StepBatch, reqs: Sequence[Req], number: int, out: StepOutput) -> None:
        """Append the new token of each request that has not left since the launch. This is the hot loop of decoding;
        the rarer cases are in :meth:`publish_counted` and :meth:`publish_tokens`."""
        if not self._running.is_exact or out.logprobs is not None:
            self.publish_counted(batch, reqs, number, out)
            return
        num_published = 0
        tokens = out.tokens.tolist()
        accepted = self._masks.accept_tokens(batch, reqs, tokens)
        for req, length, token, goes_on in zip(reqs, batch.seq_lens.tolist(), tokens, accepted, strict=True):
            if req.left:
                continue
            grammar = req.grammar
            if grammar is not None and (not goes_on or grammar.may_end_with(token)):
                self.publish_tokens(req, [token], out, 0, goes_on)
                continue
            num_published += 1
            req.committed_len = length
            req.output_ids.append(token)
            if token not in req.stop_ids and len(req.output_ids) < req.max_new_tokens:
                self.output.token(req)
                continue
            reason = req.finish_reason_after(token)
            if reason is None:
                self.output.token(req)
            else:
                self.finish(req, reason)
        self._stats.num_generated_tokens += num_published

    def publish_counted(self, batch: StepBatch, reqs: Sequence[Req], number: int, out: StepOutput) -> None:
        """Like :meth:`publish_decode`, for steps with several tokens per request or with logprobs."""
        tokens, counts = out.tokens.tolist(), out.token_counts(len(reqs))
        shape, is_exact, last = self._planner.shapes[batch.depth.depth], self._running.is_exact, 0
        accepted = self._masks.accept_tokens(batch, reqs, tokens) if is_exact else [None] * len(reqs)
        for req, length, count, goes_on in zip(reqs, batch.seq_lens.tolist(), counts, accepted, strict=True):
            first, last = last, last + count
            if not req.left:
                if not is_exact:
                    self._stats.verified(req, count - 1, shape.depth)
                    req.verified = req.committed_len, req.committed_len + count
                self.publish_tokens(req, tokens[first:last], out, first, goes_on)
                assert req.committed_len <= length - shape.num_spare and count <= shape.num_tokens, (
                    f"{req.rid} got more tokens than it may"
                )
        if out.counts is not None:
            assert batch.may_accept is not None, "the engine speculates"
            if self._planner.draft_depth is not None:
                self._planner.draft_depth.published(shape.depth, out.counts[batch.may_accept])
        if out.bad_drafts is not None and out.bad_drafts.any():
            self._stats.bad_drafts([reqs[index] for index in np.flatnonzero(out.bad_drafts).tolist()])
        if not is_exact:
            self._population.joining += self._running.settle(reqs, number)

    def publish_extend(self, batch: StepBatch, reqs: Sequence[Req], out: StepOutput) -> list[Req]:
        """Append the first tokens of completed prompts, log prompt logprobs, and append the next tokens of those that
        decode beside them. Returns the requests with completed prompts."""
        completed: list[Req] = []
        tokens = out.tokens.tolist()
        counts = iter(out.token_counts(len(batch.sampling)))
        num_tokens = num_scored = num_embedded = 0
        goes_on: Iterator[bool | None] = repeat(None)
        if batch.num_decodes:  # the masks of the next step may be begun now
            sampled_reqs = list(compress(reqs, batch.samples.tolist()))
            goes_on = iter(self._masks.accept_tokens(batch, sampled_reqs, tokens))
        chunks = *batch.chunks, *[_DECODED] * batch.num_decodes
        columns = (chunks, batch.starts.tolist(), batch.seq_lens.tolist(), batch.samples.tolist())
        for req, chunk, start, length, samples in zip(reqs, *columns, strict=True):
            scored, num_scored = num_scored, num_scored + len(chunk.scored)
            sampled, num_tokens = num_tokens, num_tokens + (next(counts) if samples else 0)
            accepted = next(goes_on) if samples else None
            embedded, num_embedded = num_embedded, num_embedded + chunk.embeds
            if req.left:
                continue
            if chunk.embeds:
                assert out.embeddings is not None, "a step yields what its chunks ask for"
                req.embedding = out.embeddings[embedded].tobytes()
            req.committed_len = length
            if chunk.scored and out.prompt_logprobs is not None:
                position = start + chunk.scored.start + 1
                targets = req.prompt_ids[position : position + len(chunk.scored)].tolist()
                _log_prompt(req, targets, out.prompt_logprobs, scored)
            if samples:
                self.publish_tokens(req, tokens[sampled:num_tokens], out, sampled, accepted)
                if chunk is not _DECODED:
                    completed.append(req)
        return completed

    def publish_tokens(
        self, req: Req, tokens: Sequence[int], out: StepOutput, first: int, accepted: bool | None = None
    ) -> None:
        """Append a step's new tokens; tokens after the one that ends the request are dropped. ``first``: the index in
        ``out`` of the first of them. ``accepted``: whether the grammar has accepted the only token, None if the
        grammar has not been asked yet."""
        if req.max_new_tokens == 0:  # only the prompt was to be computed
            self.finish(req, FinishReason(type="length", length=0))
            return
        for index, token in enumerate(tokens, first):
            req.output_ids.append(token)
            req.committed_len = req.num_tokens - 1  # the KV of the last token is computed by the next step
            if out.logprobs is not None:
                _log_output(req, token, out.logprobs, index)
            self._stats.num_generated_tokens += 1
            if req.grammar is not None and not self._goes_on(req, req.grammar, token, accepted):
                return
            reason = req.finish_reason_after(token)
            if reason is not None:
                break
        if reason is None:
            self.output.token(req)
        else:
            self.finish(req, reason)

    def _goes_on(self, req: Req, grammar: RequestGrammar, token: int, accepted: bool | None) -> bool:
        """Advance the request's grammar by a new token, unless ``accepted`` says that this has been done. Returns False
        if the request has been ended because of its grammar."""
        if accepted is None:
            if grammar.is_too_slow:
                if req.finish_reason_after(token) is not None:
                    return True  # the answer is complete without it
                self.end(req, TOO_SLOW, 400)
                return False
            accepted = grammar.accept(token)
        if not accepted:
            self.end(req, "a token was drawn that its grammar does not allow: logits are not finite", 500)
        return accepted


class OutputSender:
    """What the detokenizer is told about each request, and when: the news of one step go as one message."""

    def __init__(self, send: Callable[[BatchTokenOut], None], speculates: bool = False) -> None:
        """``speculates``: whether each message carries the request's counts of drafts."""
        self._send = send
        self._speculates = speculates
        self._outs: list[TokenOut] = []

    def token(self, req: Req) -> None:
        """``req`` goes on and has a new token. The detokenizer is told at the first token, and then when
        ``emit_interval`` tokens have been gathered."""
        emitted = req.num_emitted
        if emitted == 0 or len(req.output_ids) - emitted >= req.emit_interval:
            self._add(req, None)

    def finish(self, req: Req, reason: FinishReason) -> None:
        """Add the last output of ``req``, with its finish reason."""
        self._add(req, reason)

    def flush(self) -> None:
        """Send what has been collected."""
        if self._outs:
            outs, self._outs = self._outs, []
            self._send(BatchTokenOut(outs=outs))

    def _add(self, req: Req, reason: FinishReason | None) -> None:
        num_outputs = len(req.output_ids)
        decode = None
        if not req.announced:
            req.announced = True
            decode = req.decode_info()
        output_logprobs = input_logprobs = None
        if req.output_log is not None:
            output_logprobs, req.output_log = _taken(req.output_log), LogprobLog()
        if req.prompt_log is not None and (req.output_ids or reason is not None):
            input_logprobs, req.prompt_log = _taken(req.prompt_log), None
        self._outs.append(
            TokenOut(
                rid=req.rid,
                output_ids=req.output_ids[req.num_emitted :],
                prompt_tokens=len(req.prompt_ids),
                completion_tokens=num_outputs,
                cached_tokens=req.cached_tokens,
                finish_reason=reason,
                decode=decode,
                input_logprobs=input_logprobs,
                output_logprobs=output_logprobs,
                num_retractions=req.num_retractions,
                cached_tokens_details=req.cached_details,
                spec=req.spec_counts if self._speculates else None,
            )
        )
        req.num_emitted = num_outputs


def _log_output(req: Req, token: int, values: LogprobValues, index: int) -> None:
    """Note the logprob of a sampled token."""
    if req.output_log is not None:
        _append(req.output_log, [token], values, index, req.source)


def _log_prompt(req: Req, tokens: list[int], values: LogprobValues, start: int) -> None:
    """Note the logprobs of the prompt's next ``tokens``; their values begin at ``start`` in the step's."""
    if req.prompt_log is not None:
        _append(req.prompt_log, tokens, values, start, req.source)


def _append(
    log: LogprobLog, tokens: list[int], values: LogprobValues, start: int, source: TokenizedGenerateReq
) -> None:
    num, num_top, named = len(tokens), source.top_logprobs_num, source.token_ids_logprob
    rows = slice(start, start + num)
    log.token_ids += tokens
    log.logprobs += values.chosen[rows].tolist()
    ids = values.top_ids[rows, :num_top].astype(np.int32)
    log.top.append(values.top[rows, :num_top].tobytes(), ids.tobytes(), num)
    if named:
        assert values.named is not None, "a step computes what its requests name"
        named_ids = np.asarray(named, dtype=np.int32).tobytes() * num
        log.named.append(values.named[rows, : len(named)].tobytes(), named_ids, num)


def _taken(log: LogprobLog) -> TokenLogprobs:
    return TokenLogprobs(
        token_ids=log.token_ids, logprobs=log.logprobs, top_logprobs=log.top, token_ids_logprobs=log.named
    )
