"""Logprobs in OpenAI's two shapes: the legacy object of completions and the list of chat completions.

The alternatives of each position are encoded as JSON at once. Those of a long answer encoded by one call would keep the
event loop waiting for as long as the call takes.
"""

from __future__ import annotations

import codecs
from typing import TypedDict

import orjson

from fenceline.entrypoints.openai.token_texts import TokenTexts
from fenceline.ipc.io_struct import TokenLogprobs

# JSON has no minus infinity; OpenAI writes this for tokens that cannot be drawn.
LOWEST_LOGPROB = -9999.0


class LegacyLogprobs(TypedDict):
    """``logprobs`` of a completion choice; all lists have one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[orjson.Fragment | None] | None  # each a dict of texts and logprobs
    text_offset: list[int]


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


class LegacyLogprobsWriter:
    """Writes the legacy object of one choice, piece by piece; text offsets continue from piece to piece.
    ``text_offset`` counts characters from the beginning of the choice's text (which includes the prompt where it is
    echoed). Special tokens are zero characters wide where they are left out of the text."""

    def __init__(self, texts: TokenTexts, num_top: int, skip_special_tokens: bool, text_start: str = "") -> None:
        """``text_start``: the echoed prompt; a blank that only its first token has is not counted."""
        self._texts = texts
        self._num_top = num_top
        self._skip_special = skip_special_tokens
        self._text_start = text_start
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def write(self, positions: TokenLogprobs) -> LegacyLogprobs:
        """The object for consecutive positions that follow those written before."""
        tokens, offsets = [], []
        for token_id in positions.token_ids:
            text, raw = self._texts.look_up(token_id)
            tokens.append(text)
            offsets.append(self._offset)
            if not (self._skip_special and self._texts.is_special(token_id)):
                self._advance(raw)
        return {
            "tokens": tokens,
            "token_logprobs": [None if value is None else _finite(value) for value in positions.logprobs],
            "top_logprobs": self._tops(positions) if self._num_top else None,
            "text_offset": offsets,
        }

    def _advance(self, raw: bytes) -> None:
        if self._text_start:
            if raw.startswith(b" ") and not self._text_start.startswith(" "):
                raw = raw[1:]  # sentencepiece puts a blank before the first word
            self._text_start = ""
        self._offset += len(self._decoder.decode(raw))

    def _tops(self, positions: TokenLogprobs) -> list[orjson.Fragment | None]:
        return [
            # the first token of a prompt follows nothing, so it has no logprob
            None if logprob is None else self._top(top, token_id, logprob)
            for token_id, logprob, top in zip(
                positions.token_ids, positions.logprobs, positions.top_logprobs, strict=True
            )
        ]

    def _top(self, top: list[tuple[float, int]], chosen: int, logprob: float) -> orjson.Fragment:
        found = {self._texts.look_up(token_id)[0]: _finite(value) for value, token_id in top[: self._num_top]}
        # As with OpenAI, the chosen token is always listed, even if it is not among the best.
        found.setdefault(self._texts.look_up(chosen)[0], _finite(logprob))
        return orjson.Fragment(orjson.dumps(found))


def join_legacy(first: LegacyLogprobs | None, then: LegacyLogprobs | None) -> LegacyLogprobs | None:
    """Two consecutive pieces as one."""
    if first is None or then is None:
        return first or then
    top = None
    if first["top_logprobs"] is not None and then["top_logprobs"] is not None:
        top = first["top_logprobs"] + then["top_logprobs"]
    return {
        "tokens": first["tokens"] + then["tokens"],
        "token_logprobs": first["token_logprobs"] + then["token_logprobs"],
        "top_logprobs": top,
        "text_offset": first["text_offset"] + then["text_offset"],
    }


def chat_logprobs(texts: TokenTexts, positions: TokenLogprobs, num_top: int) -> dict[str, object]:
    """``logprobs`` of a chat choice or delta."""
    content: list[orjson.Fragment] = []
    for token_id, logprob, top in zip(positions.token_ids, positions.logprobs, positions.top_logprobs, strict=True):
        entry = _entry(texts, token_id, 0.0 if logprob is None else logprob)
        entry["top_logprobs"] = [_entry(texts, other, value) for value, other in top[:num_top]]
        content.append(orjson.Fragment(orjson.dumps(entry)))
    return {"content": content, "refusal": None}


def _entry(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, object]:
    text, raw = texts.look_up(token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}
