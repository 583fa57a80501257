"""The ends of the channels between the processes: what each receives, and how the front end sends."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections import deque
from pathlib import Path
from typing import Any, Protocol

import msgspec

from fenceline.ipc.channel import PAUSE_S, PullSocket, PushSocket
from fenceline.ipc.io_struct import (
    TOKENIZER_DECODER,
    IdArray,
    Message,
    PortArgs,
    TokenizedGenerateReq,
    encode,
    id_array,
)

logger = logging.getLogger(__name__)

MAX_DRAINED = 16  # messages handled in one go: bounds the time until those who wait for them run
MAX_DRAINED_BYTES = 1 << 20  # and no more after so many bytes: logprobs of a long prompt are megabytes
MAX_HELD_BYTES = 32 << 10  # of requests: about 8,192 tokens, as many as a prefill step takes
MAX_TURN_BYTES = 2 << 20  # of requests, in one turn of the event loop: one or two milliseconds
# What the scheduler takes in before a step. Requests beyond that are in no hurry: they fill many steps. The limit in
# bytes is for long prompts: a megabyte of their ids takes one millisecond. What else is in a request, such as biases of
# a thousand tokens, is decoded one by one: a byte takes as long as _SLOW_BYTE bytes of ids.
MAX_STEP_MESSAGES, MAX_STEP_BYTES = 512, 4 << 20
_SLOW_BYTE = 16
_MAX_TMPDIR_CHARS = 64
_MOST_UNREAD = 16  # turns of the event loop in which something has arrived and nobody receives


class SchedulerLink(Protocol):
    """How the TokenizerManager reaches the other two managers. In-process runners bring their own."""

    def send(self, message: Message) -> None:
        """Hand one message to the scheduler; never blocks."""
        ...

    async def receive(self) -> list[Message]:
        """Wait for news; at least one message, and no more than it takes a moment to handle."""
        ...

    def close(self) -> None:
        """Release sockets. Harmless to repeat."""
        ...


def make_ports() -> PortArgs:
    """Endpoints in a fresh private folder; :func:`remove_ports` deletes it."""
    # A socket's path may have about 100 characters, so a long TMPDIR is passed over.
    root = tempfile.gettempdir() if len(tempfile.gettempdir()) <= _MAX_TMPDIR_CHARS else "/tmp"
    folder = tempfile.mkdtemp(prefix="fenceline-", dir=root)
    return PortArgs(
        scheduler=f"ipc://{folder}/scheduler",
        detokenizer=f"ipc://{folder}/detokenizer",
        tokenizer=f"ipc://{folder}/tokenizer",
    )


def remove_ports(ports: PortArgs) -> None:
    """Delete the sockets' folder; not an error if it is gone."""
    shutil.rmtree(Path(ports.scheduler.removeprefix("ipc://")).parent, ignore_errors=True)


class Inbox:
    """What one process receives at ``endpoint``.

    What ``decoder`` does not take is logged and dropped: garbage, and well-formed messages for somebody else. Whoever
    can write to the socket cannot end its reader with that.
    """

    def __init__(self, endpoint: str, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self.socket = PullSocket(endpoint)
        self._decoder = decoder
        self._name = endpoint.rpartition("/")[2]
        self.num_dropped = 0

    def wait(self, timeout_ms: int | None = None) -> bool:
        """Wait until a message has arrived; False if the time runs out first."""
        return self.socket.poll(timeout_ms)

    def receive(self) -> list[Message]:
        """Wait for one message; none if what came was dropped."""
        return self._decoded(self.socket.receive())

    def drain(self, limit: int | None = None, max_bytes: int | None = None) -> list[Message]:
        """The messages that have arrived, without waiting: at most ``limit``, and none after ``max_bytes``. In a
        request each byte that is not of its prompt's ids counts as ``_SLOW_BYTE``."""
        messages: list[Message] = []
        num_bytes = 0
        while (limit is None or len(messages) < limit) and (max_bytes is None or num_bytes < max_bytes):
            data = self.socket.receive_nowait()
            if data is None:
                break
            num_bytes += len(data)
            for message in self._decoded(data):
                messages.append(message)
                if isinstance(message, TokenizedGenerateReq):
                    num_bytes += (_SLOW_BYTE - 1) * (len(data) - 4 * len(message.input_ids))
        return messages

    def _decoded(self, data: bytes) -> list[Message]:
        try:
            return [self._decoder.decode(data)]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._drop(len(data), error)
            return []

    def _drop(self, num_bytes: int, error: Exception) -> None:
        self.num_dropped += 1
        # The 1st, 2nd, 4th, 8th: a flood does not fill the log.
        if self.num_dropped & (self.num_dropped - 1) == 0:
            logger.warning(
                "The %s's socket received %d bytes that are not a message for it (%s) and were dropped, %d so far",
                self._name, num_bytes, str(error)[:200], self.num_dropped,
            )  # fmt: skip


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
        self._inbox = Inbox(ports.tokenizer, TOKENIZER_DECODER)
        self._outbox = PushSocket(ports.scheduler)
        self._unsent: list[bytes] = []
        self._num_held = 0  # bytes of them
        self._num_turn_bytes = 0  # sent in this turn of the event loop
        self._backlog: deque[Message] = deque()  # what is left to the next turns
        self._turn: asyncio.Handle | None = None  # the end of this turn
        self._receiving: asyncio.AbstractEventLoop | None = None  # while the inbox is watched
        self._news = asyncio.Event()  # something may have arrived
        self._num_unread = 0  # how often it was set since somebody received
        # The last prompt and logit_bias of a body with several requests that have been sent, and the body's number.
        self._latest_prompt: tuple[int, IdArray] = 0, id_array()
        self._latest_bias: tuple[int, dict[int, float]] = 0, {}

    def send(self, message: Message) -> None:
        """See :class:`SchedulerLink`."""
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

    def _write(self, message: Message) -> None:
        if isinstance(message, TokenizedGenerateReq) and message.body:
            message = self._without_known_parts(message)
        data = encode(message)
        self._unsent.append(data)
        self._num_held += len(data)
        self._num_turn_bytes += len(data)
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
            return msgspec.structs.replace(message, input_ids=id_array(), same_prompt=True)
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
            self._outbox.send_many(parts)

    async def receive(self) -> list[Message]:
        """See :class:`SchedulerLink`."""
        messages = self._inbox.drain(MAX_DRAINED, MAX_DRAINED_BYTES)
        while not messages:
            self._watch()
            if not self._inbox.socket.has_message:  # a drain may have ended at what it dropped
                await self._news.wait()
            messages = self._inbox.drain(MAX_DRAINED, MAX_DRAINED_BYTES)
        return messages

    def _watch(self) -> None:
        """Have ``_news`` set once something may have arrived. To begin and end this for each message would cost more
        than to read it, so the descriptor stays watched as long as somebody receives."""
        self._news.clear()
        self._num_unread = 0
        if self._receiving is None:
            self._receiving = asyncio.get_running_loop()
            self._receiving.add_reader(self._inbox.socket.fileno(), self._note_news)
        if self._inbox.socket.is_paused:
            self._receiving.call_later(PAUSE_S, self._news.set)

    def _note_news(self) -> None:
        self._num_unread += 1
        if self._num_unread > _MOST_UNREAD:  # until somebody receives again
            self._unwatch()
        self._news.set()

    def _unwatch(self) -> None:
        if self._receiving is not None and not self._receiving.is_closed():
            self._receiving.remove_reader(self._inbox.socket.fileno())
        self._receiving = None

    def close(self) -> None:
        """See :class:`SchedulerLink`. Called on the event loop's thread, while no task receives."""
        while self._backlog:
            self._write(self._backlog.popleft())
        self._flush()
        self._unwatch()
        self._inbox.socket.close()
        self._outbox.close()
