"""OutputSender: what the scheduler tells the detokenizer about each request, and when."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fenceline.ipc.io_struct import (
    BatchTokenOut,
    FinishReason,
    TokenizedGenerateReq,
    TokenLogprobs,
    TokenOut,
)
from fenceline.model_executor.step import LogprobValues
from fenceline.scheduler.req import LogprobLog, Req


class OutputSender:
    """Collects the news of one step and sends them as one message."""

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


def log_output(req: Req, token: int, values: LogprobValues, index: int) -> None:
    """Note the logprob of a sampled token."""
    if req.output_log is not None:
        _append(req.output_log, [token], values, index, req.source)


def log_prompt(req: Req, tokens: list[int], values: LogprobValues, start: int) -> None:
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
