"""DetokenizerManager: from the scheduler's token ids to text, stop strings included, in its own process."""

from __future__ import annotations

import faulthandler
import logging
import os

import msgspec
import zmq

from fenceline.config.engine_config import EngineConfig
from fenceline.frontend.incremental_decode import DecoderFactory, IncrementalDecoder
from fenceline.frontend.stop_strings import StopMatch, StopScanner
from fenceline.frontend.tokenizer import Tokenizer, load_tokenizer
from fenceline.ipc.child_process import Watchdog, freeze_garbage_collector, prepare_child
from fenceline.ipc.io_struct import (
    DETOKENIZER_DECODER,
    AbortReq,
    BatchStrOut,
    BatchTokenOut,
    DecodeInfo,
    FatalError,
    FinishReason,
    PortArgs,
    SchedulerReady,
    ShutdownReq,
    StrOut,
    TokenLogprobs,
    TokenOut,
    encode,
)
from fenceline.ipc.sockets import MAX_DRAINED, MAX_DRAINED_BYTES, Inbox, connect_push

logger = logging.getLogger(__name__)


class DecodeState:
    """One request being decoded."""

    __slots__ = ("decoder", "min_new_tokens", "no_stop_trim", "num_tokens", "scanner")

    def __init__(self, info: DecodeInfo, factory: DecoderFactory) -> None:
        params = info.sampling_params
        self.decoder: IncrementalDecoder = factory.make(info.prompt_tail_ids, params.skip_special_tokens)
        self.scanner = StopScanner(params.stop) if params.stop else None
        self.min_new_tokens = params.min_new_tokens
        self.no_stop_trim = params.no_stop_trim
        self.num_tokens = 0


class Detokenizer:
    """Decodes the news of all requests. Knows no sockets, so that it runs in-process as well."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._factory = DecoderFactory(tokenizer)
        self._states: dict[str, DecodeState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def process(self, batch: BatchTokenOut) -> tuple[BatchStrOut, list[AbortReq]]:
        """The news with text, and the requests that a stop string ended: the scheduler must release them."""
        outs: list[StrOut] = []
        stopped: list[AbortReq] = []
        for token in batch.outs:
            out = self._decode(token)
            if out is None:
                continue
            if token.finish_reason is None and out.token.finish_reason is not None:
                stopped.append(AbortReq(rid=token.rid, silent=True))
            outs.append(out)
        return BatchStrOut(outs=outs), stopped

    def _decode(self, token: TokenOut) -> StrOut | None:
        if token.decode is not None:
            self._states[token.rid] = DecodeState(token.decode, self._factory)
        state = self._states.get(token.rid)
        if state is None:
            # Either tokens sampled before the scheduler heard of a stop string: not part of the answer; or
            # the end of a request that never started.
            return StrOut(token=token, text="") if _ended_early(token) else None
        if token.finish_reason is not None:
            del self._states[token.rid]
        if state.scanner is not None:
            return self._scan(token, state, state.scanner)
        text = state.decoder.feed(_visible_ids(token, state))
        if token.finish_reason is not None:
            text += state.decoder.flush()
        return StrOut(token=token, text=text)

    def _scan(self, token: TokenOut, state: DecodeState, scanner: StopScanner) -> StrOut:
        """Token by token: a stop string ends the output at the very token that completes it."""
        parts: list[str] = []
        for position, index in enumerate(_visible_ids(token, state)):
            state.num_tokens += 1
            found = scanner.feed(state.decoder.feed((index,)), state.num_tokens >= state.min_new_tokens)
            if isinstance(found, StopMatch):
                self._states.pop(token.rid, None)
                return StrOut(token=_cut(token, position + 1, found), text=_join(parts, found, state))
            parts.append(found)
        if token.finish_reason is not None:
            found = scanner.feed(state.decoder.flush())
            if isinstance(found, StopMatch):
                return StrOut(
                    token=_cut(token, len(token.output_ids), found), text=_join(parts, found, state)
                )
            parts += (found, scanner.flush())
        return StrOut(token=token, text="".join(parts))


def _ended_early(token: TokenOut) -> bool:
    return token.finish_reason is not None and token.finish_reason.type == "abort"


def _visible_ids(token: TokenOut, state: DecodeState) -> list[int]:
    """The ids that make text: all but the stop token that ended the request."""
    reason = token.finish_reason
    if reason is None or state.no_stop_trim or not isinstance(reason.matched, int):
        return token.output_ids
    ends_so = bool(token.output_ids) and token.output_ids[-1] == reason.matched
    return token.output_ids[:-1] if ends_so else token.output_ids


def _join(parts: list[str], match: StopMatch, state: DecodeState) -> str:
    return "".join([*parts, match.text, match.stop if state.no_stop_trim else ""])


def _cut(token: TokenOut, num_kept: int, match: StopMatch) -> TokenOut:
    """The news ending with its ``num_kept``-th token, because of the stop string."""
    surplus = len(token.output_ids) - num_kept
    logprobs = token.output_logprobs
    if logprobs is not None and surplus:
        logprobs = TokenLogprobs(
            token_ids=logprobs.token_ids[:num_kept],
            logprobs=logprobs.logprobs[:num_kept],
            top_logprobs=logprobs.top_logprobs.first(num_kept),
            token_ids_logprobs=logprobs.token_ids_logprobs.first(num_kept),
        )
    return msgspec.structs.replace(
        token,
        output_ids=token.output_ids[:num_kept],
        completion_tokens=token.completion_tokens - surplus,
        output_logprobs=logprobs,
        finish_reason=FinishReason(type="stop", matched=match.stop),
    )


class DetokenizerManager:
    """The detokenizer's sockets and loop."""

    def __init__(self, detokenizer: Detokenizer, ports: PortArgs) -> None:
        self._detokenizer = detokenizer
        self._context = zmq.Context()
        self._inbox = Inbox(self._context, ports.detokenizer, DETOKENIZER_DECODER)
        self._to_tokenizer = connect_push(self._context, ports.tokenizer)
        self._to_scheduler = connect_push(self._context, ports.scheduler)

    def run(self, watchdog: Watchdog) -> None:
        """Decode until told to stop. What has piled up meanwhile goes out as few messages."""
        while True:
            watchdog.waiting()
            first = self._inbox.receive()
            watchdog.busy()
            messages = [*first, *self._inbox.drain(MAX_DRAINED - 1, MAX_DRAINED_BYTES)]
            outs: list[StrOut] = []
            for message in messages:
                if isinstance(message, ShutdownReq):
                    self.close()
                    return
                if isinstance(message, SchedulerReady):
                    self._to_tokenizer.send(encode(message))
                    continue
                assert isinstance(message, BatchTokenOut), type(message).__name__
                batch, stopped = self._detokenizer.process(message)
                for abort in stopped:
                    self._to_scheduler.send(encode(abort))
                outs.extend(batch.outs)
            if outs:
                self._to_tokenizer.send(encode(BatchStrOut(outs=outs)))

    def fail(self, reason: str) -> None:
        """Tell the main process why this one dies."""
        self._to_tokenizer.send(encode(FatalError(source="detokenizer", message=reason)))
        self.close()

    def close(self) -> None:
        """Close the sockets; what was sent is still delivered."""
        for socket in (self._inbox.socket, self._to_tokenizer, self._to_scheduler):
            socket.close()
        self._context.term()


def run_detokenizer_process(config: EngineConfig, ports: PortArgs) -> None:
    """The detokenizer process' main function; ends with the parent or on :class:`ShutdownReq`."""
    prepare_child("detokenizer", config.server_args.log_level, ports)
    watchdog = Watchdog(config.server_args.watchdog_timeout, lambda reason: _die_of_hang(ports, reason))
    manager = DetokenizerManager(Detokenizer(load_tokenizer(config.tokenizer_path)), ports)
    freeze_garbage_collector()
    try:
        manager.run(watchdog)
    except Exception as error:
        logger.exception("the detokenizer failed")
        manager.fail(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from error


def _die_of_hang(ports: PortArgs, reason: str) -> None:
    """From the watchdog's thread: say why, show where, and go. Sockets of the hung thread are not touched."""
    faulthandler.dump_traceback(all_threads=True)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    connect_push(context, ports.tokenizer).send(encode(FatalError(source="detokenizer", message=reason)))
    context.destroy(linger=1000)
    os._exit(1)
