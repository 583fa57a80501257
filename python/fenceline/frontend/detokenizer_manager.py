"""DetokenizerManager: from the scheduler's token ids to text, stop strings included, in its own process.

It decodes a few tokens at a time. A character that is split over tokens is sent as a whole, and text that may be the
beginning of a stop string is held back until it is known whether it is.
"""

from __future__ import annotations

import codecs
import faulthandler
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from fenceline.config.engine_config import EngineConfig
from fenceline.frontend.tokenizer import BYTE_TOKEN, Tokenizer, byte_alphabet, load_tokenizer
from fenceline.ipc.child_process import Watchdog, freeze_garbage_collector, prepare_child
from fenceline.ipc.io_struct import (
    DETOKENIZER_DECODER,
    AbortReq,
    BatchStrOut,
    BatchTokenOut,
    DecodeInfo,
    DetokenizerInput,
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
from fenceline.ipc.mailbox import MAX_DRAINED, MAX_DRAINED_BYTES, Inbox, Outbox

logger = logging.getLogger(__name__)
_REPLACEMENT = "\ufffd"
_MAX_INCOMPLETE_TOKENS = 8  # a character has at most four bytes: beyond this the bytes are simply invalid
_WINDOW_TOKENS = 8  # context that decides about spaces; more than any tokenizer looks back


# --- decoding

# A byte-level or byte-fallback tokenizer is a table from ids to bytes, and decoding is a UTF-8 decoder that is fed with
# them: exact, and a fraction of a microsecond for each token. Any other tokenizer is decoded in a sliding window: the
# text of the last tokens is decoded without and with the new ones, and the difference is new.


class IncrementalDecoder(Protocol):
    """The decoder of one request."""

    def feed(self, ids: Sequence[int]) -> str:
        """Text that these tokens complete; however tokens are grouped, the concatenation is the same."""
        ...

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never completed."""
        ...


class DecoderFactory:
    """Makes a request's decoder; holds the tables shared by all requests of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special_ids = tokenizer.special_ids
        recipe = _recipe(tokenizer)
        self._table: list[bytes] | None = None
        self._strip_lead = False
        if recipe is not None:
            self._strip_lead = recipe.strip_lead
            self._table = _byte_table(tokenizer, recipe.byte_level)
            self._plain_table = [
                b"" if index in self._special_ids else piece for index, piece in enumerate(self._table)
            ]

    def make(self, prompt_tail: Sequence[int], skip_special_tokens: bool) -> IncrementalDecoder:
        """A decoder for the output that follows a prompt ending in ``prompt_tail``."""
        if self._table is None:
            return WindowDecoder(self._tokenizer, prompt_tail, skip_special_tokens)
        table = self._plain_table if skip_special_tokens else self._table
        before = b"".join([table[index] for index in prompt_tail if 0 <= index < len(table)])
        return ByteDecoder(table, before, strip_lead=self._strip_lead and not before)


class ByteDecoder:
    """Decodes by a table from ids to bytes. Ids outside the table give no text, as in ``tokenizers``."""

    __slots__ = ("_decode", "_strip_lead", "_table")

    def __init__(self, table: list[bytes], before: bytes, strip_lead: bool) -> None:
        self._table = table
        self._strip_lead = strip_lead
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._decode(before[-4:].lstrip(bytes(range(0x80, 0xC0))))  # a character the prompt left incomplete

    def feed(self, ids: Sequence[int]) -> str:
        table = self._table
        try:
            data = table[ids[0]] if len(ids) == 1 else b"".join([table[index] for index in ids])
        except IndexError:
            data = b"".join([table[index] for index in ids if index < len(table)])
        if self._strip_lead and data:
            self._strip_lead = False
            data = data.removeprefix(b" ")
        return self._decode(data)

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDecoder:
    """Decodes a sliding window of tokens twice, without and with the newest ones; the difference is new."""

    __slots__ = ("_ids", "_num_read", "_skip", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_tail[-_WINDOW_TOKENS:])
        self._num_read = len(self._ids)  # tokens of the window whose text is out

    def feed(self, ids: Sequence[int]) -> str:
        """See :class:`IncrementalDecoder`. One by one, so that grouping makes no difference."""
        return "".join([self._feed_one(index) for index in ids])

    def flush(self) -> str:
        return self._take() if len(self._ids) > self._num_read else ""

    def _feed_one(self, index: int) -> str:
        self._ids.append(index)
        if len(self._ids) - self._num_read < _MAX_INCOMPLETE_TOKENS and self._text(self._ids).endswith(_REPLACEMENT):
            return ""
        return self._take()

    def _take(self) -> str:
        before = self._text(self._ids[: self._num_read])
        text = self._text(self._ids)[len(before) :]
        del self._ids[:-_WINDOW_TOKENS]
        self._num_read = len(self._ids)
        return text

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip)


class _Recipe:
    """How tokens become bytes: by GPT-2's byte alphabet, or as text with ``<0x..>`` bytes."""

    def __init__(self, byte_level: bool, strip_lead: bool) -> None:
        self.byte_level = byte_level
        self.strip_lead = strip_lead


def _recipe(tokenizer: Tokenizer) -> _Recipe | None:
    """The recipe of the tokenizer's decoder, None if it is neither of the two kinds."""
    decoder = tokenizer.backend.decoder
    if decoder is None:
        return None
    state = json.loads(decoder.__getstate__())
    if state["type"] == "ByteLevel":
        return _Recipe(byte_level=True, strip_lead=False)
    if state["type"] != "Sequence":
        return None
    steps = state["decoders"]
    kinds = [step["type"] for step in steps]
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or kinds[3:] not in ([], ["Strip"]):
        return None
    replaces_space = steps[0]["pattern"] == {"String": "▁"} and steps[0]["content"] == " "
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if not replaces_space or steps[3:] not in ([], [strip]):
        return None
    return _Recipe(byte_level=False, strip_lead=bool(steps[3:]))


def _byte_table(tokenizer: Tokenizer, byte_level: bool) -> list[bytes]:
    """The bytes of every id, empty where there is no token."""
    table = [b""] * tokenizer.vocab_size
    alphabet = byte_alphabet()
    for piece, index in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        table[index] = _byte_level(piece, alphabet) if byte_level else _byte_fallback(piece)
    for index in tokenizer.backend.get_added_tokens_decoder():
        text = tokenizer.token_text(index)  # added tokens are text, whatever their letters mean as bytes
        if _REPLACEMENT not in text and not (not byte_level and text == ""):
            table[index] = text.encode()
    return table


def _byte_level(piece: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes([alphabet[letter] for letter in piece])
    except KeyError:
        return piece.encode()


def _byte_fallback(piece: str) -> bytes:
    match = BYTE_TOKEN.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace("▁", " ").encode()


# --- stop strings

# The automaton of Aho and Corasick ("Efficient string matching", CACM 18, 1975): its states are the beginnings of the
# stop strings, and after each character it is in the longest one that the text ends with. A character costs a constant
# number of steps on average, whatever the strings are. States are made when the text first gets there: a request pays
# for its text and not for the length of strings that never come near a match.


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The stop string found, and the text before it that was not yet let out."""

    stop: str
    text: str


class _State:
    """The beginning, ``depth`` characters long, that all of ``stops`` share. ``fallback`` is the longest other
    beginning with which this one ends (None for the empty one, which has no other). ``match`` is the longest stop
    string with which this beginning ends, "" if there is none; ``goes_on``: one of ``stops`` is longer."""

    __slots__ = ("_ahead", "_next", "depth", "fallback", "goes_on", "match")

    def __init__(self, depth: int, stops: Sequence[str], fallback: _State | None) -> None:
        self.depth = depth
        self.fallback = fallback
        self.match: str = "" if fallback is None else fallback.match
        self._next: dict[str, _State] = {}  # the states that were made, by the character that leads there
        self._ahead: dict[str, list[str]] = {}  # the stop strings of those that were not
        for stop in stops:
            if len(stop) == depth:
                self.match = stop
            else:
                self._ahead.setdefault(stop[depth], []).append(stop)
        self.goes_on = bool(self._ahead)

    def after(self, char: str) -> _State:
        """The state when ``char`` has followed."""
        state = self
        while True:
            following = state._next.get(char)
            if following is not None:
                return following
            if char in state._ahead:
                return state._make(char)
            if state.fallback is None:
                return state
            state = state.fallback

    def _make(self, char: str) -> _State:
        # Of the states that are made on the way, each shorter, no two belong to one stop string: the recursion is at
        # most as deep as there are stop strings.
        fallback = self if self.fallback is None else self.fallback.after(char)
        made = self._next[char] = _State(self.depth + 1, self._ahead.pop(char), fallback)
        return made


class StopScanner:
    """Holds back the end of the text that may still become a stop string. The match is the one that completes first; of
    several completing with the same character the longest. That makes the outcome independent of how the text was cut
    into pieces."""

    __slots__ = ("_held", "_state")

    def __init__(self, stops: Sequence[str]) -> None:
        self._state = _State(0, list(stops), None)
        self._held = ""  # the beginning that ``_state`` stands for

    def feed(self, text: str, armed: bool = True) -> str | StopMatch:
        """Add ``text``. Returns the text that can be sent, or the match, which is ordinary text unless ``armed``."""
        state = self._state
        buffer = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            state = state.after(char)
            if not state.match:
                continue
            if armed:
                return StopMatch(state.match, buffer[: end - len(state.match)])
            # The match is ordinary text. Go on from the longest beginning that can still become a stop string.
            while not state.goes_on and state.fallback is not None:
                state = state.fallback
        self._state = state
        split = len(buffer) - state.depth
        self._held = buffer[split:]
        return buffer[:split]

    def flush(self) -> str:
        """The text held back, at the end of the output."""
        held, self._held = self._held, ""
        return held


# --- requests


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
    """Decodes the new tokens of all requests. It has no sockets, so it can run in-process as well."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._factory = DecoderFactory(tokenizer)
        self._states: dict[str, DecodeState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def process(self, batch: BatchTokenOut) -> tuple[BatchStrOut, list[AbortReq]]:
        """The batch with its text, and the requests that a stop string has ended, which the scheduler must release."""
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
            return StrOut(token=token, text="") if _was_aborted(token) else None
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
                return StrOut(token=_cut(token, len(token.output_ids), found), text=_join(parts, found, state))
            parts += (found, scanner.flush())
        return StrOut(token=token, text="".join(parts))


def _was_aborted(token: TokenOut) -> bool:
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
        self._ports = ports
        self._inbox: Inbox[DetokenizerInput] = Inbox(ports.detokenizer, DETOKENIZER_DECODER)
        self._outbox = Outbox(ports.tokenizer, ports.scheduler)
        self._inbox.on_wake = partial(self._outbox.wake, ports.tokenizer)  # text follows the tokens

    def run(self, watchdog: Watchdog) -> None:
        """Decode until told to stop. All messages that are waiting are answered with one."""
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
                    self._outbox.send(self._ports.tokenizer, encode(message))
                    continue
                assert isinstance(message, BatchTokenOut), type(message).__name__
                batch, stopped = self._detokenizer.process(message)
                for abort in stopped:
                    self._outbox.send(self._ports.scheduler, encode(abort))
                outs.extend(batch.outs)
            if outs:
                self._outbox.send(self._ports.tokenizer, encode(BatchStrOut(outs=outs)))

    def fail(self, reason: str) -> None:
        """Tell the main process why this process ends."""
        self._outbox.send(self._ports.tokenizer, encode(FatalError(source="detokenizer", message=reason)))
        self.close()

    def close(self) -> None:
        """Close the sockets; what was sent is still delivered."""
        self._inbox.close()
        self._outbox.close()


def run_detokenizer_process(config: EngineConfig, ports: PortArgs) -> None:
    """The detokenizer process' main function; ends with the parent or on :class:`ShutdownReq`."""
    prepare_child("detokenizer", config.server_args, ports, config.replica)
    watchdog = Watchdog(config.server_args.watchdog_timeout, lambda reason: _exit_hung(ports, reason))
    manager = DetokenizerManager(Detokenizer(load_tokenizer(config.tokenizer_path)), ports)
    freeze_garbage_collector()
    try:
        manager.run(watchdog)
    except Exception as error:
        logger.exception("the detokenizer failed")
        manager.fail(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from error


def _exit_hung(ports: PortArgs, reason: str) -> None:
    """Called by the watchdog's thread: report the reason, write all stacks and exit. The hung thread's sockets are not
    touched."""
    faulthandler.dump_traceback(all_threads=True)
    outbox = Outbox(ports.tokenizer)
    outbox.send(ports.tokenizer, encode(FatalError(source="detokenizer", message=reason)))
    outbox.close()
    os._exit(1)
