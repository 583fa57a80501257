"""The data types of a benchmark: its requests, and the replies to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]  # {"role": ..., "content": ...}
Prompt = str | list[int] | list[Message]  # text, token ids, or chat messages
Content = str | list[int]  # one user turn: text or token ids


def joined(head: Content, tail: Content, between: str = "") -> Content:
    """``head`` and ``tail``, which are of one kind; ``between`` separates texts."""
    if isinstance(head, str):
        assert isinstance(tail, str), "turns of one conversation are of one kind"
        return head + between + tail
    assert not isinstance(tail, str), "turns of one conversation are of one kind"
    return head + tail


@dataclass(frozen=True, slots=True)
class Turn:
    """One user turn. ``prompt_len`` is the number of tokens of ``content``, without the conversation before it, and
    without those of the ``images``, which are data: URLs and come before the text."""

    content: Content
    prompt_len: int
    output_len: int
    images: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request, or one conversation if it has several turns."""

    turns: tuple[Turn, ...]

    def __post_init__(self) -> None:
        assert self.turns, "a request has at least one turn"


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request about to be sent."""

    prompt: Prompt
    output_len: int
    seed: int | None = None
    lora_name: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of one HTTP request. Times are in seconds; ``start_time`` is a value of ``time.perf_counter()``.
    ``prompt_tokens`` and ``cached_tokens`` are the server's counts, None if it does not report them. ``ttft`` is 0 for
    a reply without tokens. ``itl`` has one entry for each token after those of the first chunk. ``longest_gap`` is
    the longest time between two arrivals, however many tokens the later one brought; 0 if there was only one."""

    success: bool
    error: str = ""
    text: str = ""
    output_ids: list[int] | None = None
    output_len: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    start_time: float = 0.0
    latency: float = 0.0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    longest_gap: float = 0.0

    @property
    def tpot(self) -> float:
        """Seconds for each token after the first; 0 for a single token, which meets any limit."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A reply, with the ``index`` of its request, its ``turn`` (from 0), the ``call`` that was sent, and
    ``prompt_len``, the number of tokens of the whole prompt."""

    index: int
    turn: int
    call: Call
    prompt_len: int
    reply: Reply
