"""How the front end reaches the scheduler: :class:`SchedulerLink`, and the one over sockets."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

import msgspec

from fenceline.ipc.io_struct import (
    TOKENIZER_DECODER,
    IdArray,
    Message,
    PortArgs,
    TokenizedGenerateReq,
    encode_apart,
    id_array,
)
from fenceline.ipc.mailbox import MAX_DRAINED, MAX_DRAINED_BYTES, Inbox, Outbox

MAX_HELD_BYTES = 32 << 10  # of requests: about 8,192 tokens, as many as a prefill step takes
MAX_TURN_BYTES = 2 << 20  # of requests, in one turn of the event loop: one or two milliseconds


class SchedulerLink(Protocol):
    """How the TokenizerManager reaches the other two managers. In-process runners bring their own."""

    def send(self, message: Message) -> None:
        """Hand one message to the scheduler; never blocks."""
        ...

    def wake(self) -> None:
        """The scheduler, which idles, is about to get a request."""
        ...

    async def receive(self) -> list[Message]:
        """Wait for news; at least one message, and no more than it takes a moment to handle."""
        ...

    def close(self) -> None:
        """Release sockets. Harmless to repeat."""
        ...


class SocketLink:
    """The TokenizerManager's sockets: receives at ``ports.tokenizer``, sends to ``ports.scheduler``.

    Everything that one turn of the event loop sends arrives together, so that requests that come at the same time are
    one prefill step, and not the first of them alone and then the others. But as soon as there is enough for a step, it
    is sent: the device computes it while the turn continues, which takes a tenth of a second for hundreds of requests.
    More than :data:`MAX_TURN_BYTES` wait for the next turns, in order, so that thousands of prompts do not keep the
    loop.

    The prompt of a body's samples is sent with the first of them. With each of a thousand, it would take the scheduler
    dozens of steps to take them in, for which every later request waits.
    """

    def __init__(self, ports: PortArgs) -> None:
        self._inbox: Inbox[Message] = Inbox(ports.tokenizer, TOKENIZER_DECODER)
        self._outbox = Outbox(ports.scheduler)
        self._scheduler = ports.scheduler
        self._unsent: list[bytes] = []
        self._num_held = 0  # bytes of them
        self._num_turn_bytes = 0  # sent in this turn of the event loop
        self._backlog: deque[Message] = deque()  # what is left to the next turns
        self._turn: asyncio.Handle | None = None  # the end of this turn
        self._watching: asyncio.AbstractEventLoop | None = None  # calls _note_news
        self._news = asyncio.Event()  # something has arrived
        # The last prompt and logit_bias of a body with several requests that have been sent, and the body's number.
        self._latest_prompt: tuple[int, IdArray] = 0, id_array()
        self._latest_bias: tuple[int, dict[int, float]] = 0, {}

    def send(self, message: Message) -> None:
        if self._turn is None:
            try:
                self._turn = asyncio.get_running_loop().call_soon(self._end_turn)
            except RuntimeError:  # no event loop is running (any more)
                self._write(message)
                self._flush()
                return
        if self._backlog or self._num_turn_bytes > MAX_TURN_BYTES:
            self._backlog.append(message)
        else:
            self._write(message)

    def wake(self) -> None:
        self._outbox.wake(self._scheduler)

    def _write(self, message: Message) -> None:
        if isinstance(message, TokenizedGenerateReq) and message.body:
            message = self._without_known_parts(message)
        parts = encode_apart(message)
        self._unsent += parts
        self._num_held += sum(map(len, parts))
        self._num_turn_bytes += len(parts[0])  # the others are pixels, which take no time
        if self._num_held > MAX_HELD_BYTES:
            self._flush()

    def _without_known_parts(self, message: TokenizedGenerateReq) -> TokenizedGenerateReq:
        """``message`` without what the request before it in its body has too. Its samples share these objects."""
        params = message.sampling_params
        bias = params.logit_bias
        body, latest_bias = self._latest_bias
        if bias and body == message.body and latest_bias is bias:
            params = msgspec.structs.replace(params, logit_bias=None)
            message = msgspec.structs.replace(message, sampling_params=params, same_bias=True)
        elif bias:
            self._latest_bias = message.body, bias
        body, latest = self._latest_prompt
        if body == message.body and latest is message.input_ids:
            return msgspec.structs.replace(message, input_ids=id_array(), images=[], same_prompt=True)
        self._latest_prompt = message.body, message.input_ids
        return message

    def _end_turn(self) -> None:
        """Send what this turn gathered, and as much of the backlog as one more may."""
        self._num_turn_bytes = 0
        self._turn = None
        if self._backlog:
            self._turn = asyncio.get_running_loop().call_soon(self._end_turn)
        while self._backlog and self._num_turn_bytes <= MAX_TURN_BYTES:
            self._write(self._backlog.popleft())
        self._flush()

    def _flush(self) -> None:
        if self._unsent:
            parts, self._unsent, self._num_held = self._unsent, [], 0
            self._outbox.send(self._scheduler, *parts)

    async def receive(self) -> list[Message]:
        if self._watching is None:
            self._watching = asyncio.get_running_loop()
            self._watching.add_reader(self._inbox.fileno(), self._note_news)
        while not (messages := self._inbox.drain(MAX_DRAINED, MAX_DRAINED_BYTES)):
            self._news.clear()
            await self._news.wait()
        return messages

    def _note_news(self) -> None:
        # All of it, whether or not somebody receives, so that the descriptor does not stay readable.
        if self._inbox.fetch():
            self._news.set()

    def close(self) -> None:
        """See :class:`SchedulerLink`. Called on the event loop's thread, while no task receives."""
        while self._backlog:
            self._write(self._backlog.popleft())
        self._flush()
        if self._watching is not None and not self._watching.is_closed():
            self._watching.remove_reader(self._inbox.fileno())
        self._watching = None
        self._inbox.close()
        self._outbox.close()
