"""The zmq ends of the pipeline: PULL sockets bound by their readers, PUSH sockets of the writers."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from fenceline.managers.io_struct import TOKENIZER_DECODER, Message, PortArgs, encode

logger = logging.getLogger(__name__)

MAX_DRAINED = 16  # messages handled in one go: bounds the time until those who wait for them run
MAX_HELD_BYTES = 32 << 10  # of requests: about 8,192 tokens, as many as a prefill step takes
_MAX_TMPDIR_CHARS = 64


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


def bind_pull(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """A PULL socket without a limit on queued messages: a slow reader never blocks the scheduler."""
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(endpoint)
    return socket


def connect_push(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """A PUSH socket; sending never blocks, on close pending messages get a second."""
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(endpoint)
    return socket


class Inbox:
    """What one process receives, from a PULL socket bound to ``endpoint``.

    What ``decoder`` does not take is logged and dropped: garbage, and well-formed messages for somebody else. Whoever
    can write to the socket cannot end its reader with that.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        decoder: msgspec.msgpack.Decoder[Any],
    ) -> None:
        self.socket = bind_pull(context, endpoint)
        self._decoder = decoder
        self._name = endpoint.rpartition("/")[2]
        self.num_dropped = 0

    def wait(self, timeout_ms: int | None = None) -> None:
        """Until something may have arrived, or the time is over."""
        self.socket.poll(timeout_ms)

    def drain(self, limit: int | None = None) -> list[Message]:
        """The messages that have arrived, at most ``limit``, without waiting."""
        messages: list[Message] = []
        while limit is None or len(messages) < limit:
            try:
                data = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                messages.append(self._decoder.decode(data))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                self._drop(len(data), error)
        return messages

    def _drop(self, num_bytes: int, error: Exception) -> None:
        self.num_dropped += 1
        if (
            self.num_dropped & (self.num_dropped - 1) == 0
        ):  # the 1st, 2nd, 4th, 8th: a flood does not fill the log
            logger.warning(
                "The %s's socket brought %d bytes that are no message for it (%s); dropped, %d so far",
                self._name, num_bytes, str(error)[:200], self.num_dropped,
            )  # fmt: skip


async def _news(socket: zmq.Socket[bytes]) -> None:
    """Wait until ``socket`` may have received something, after a receive in vain. zmq.asyncio's own poll costs a third
    more, and first tokens wait for it."""
    loop = asyncio.get_running_loop()
    fd = socket.getsockopt(zmq.FD)
    assert isinstance(fd, int)
    news = asyncio.Event()
    loop.add_reader(fd, news.set)
    try:
        await news.wait()
    finally:
        loop.remove_reader(fd)


class ZmqLink:
    """The TokenizerManager's sockets: binds ``ports.tokenizer``, connects to ``ports.scheduler``.

    What one turn of the event loop sends arrives together: requests that come at the same time are one prefill step,
    not the first of them alone and then the others. But what fills a step leaves at once: the device computes it while
    the turn goes on, which for hundreds of requests takes a tenth of a second. (Parts of a zmq message are delivered
    all or none; readers take each as a message.)
    """

    def __init__(self, ports: PortArgs) -> None:
        self._context = zmq.Context()
        self._inbox = Inbox(self._context, ports.tokenizer, TOKENIZER_DECODER)
        self._outbox = connect_push(self._context, ports.scheduler)
        self._unsent: list[bytes] = []
        self._num_held = 0  # bytes of them

    def send(self, message: Message) -> None:
        """See :class:`SchedulerLink`."""
        data = encode(message)
        self._unsent.append(data)
        self._num_held += len(data)
        if self._num_held > MAX_HELD_BYTES:
            self._flush()
            return
        if len(self._unsent) > 1:
            return
        try:
            asyncio.get_running_loop().call_soon(self._flush)
        except RuntimeError:  # nobody runs a loop (any more)
            self._flush()

    def _flush(self) -> None:
        if self._unsent:
            parts, self._unsent, self._num_held = self._unsent, [], 0
            self._outbox.send_multipart(parts, zmq.NOBLOCK)

    async def receive(self) -> list[Message]:
        """See :class:`SchedulerLink`."""
        messages = self._inbox.drain(MAX_DRAINED)
        while not messages:
            await _news(self._inbox.socket)
            messages = self._inbox.drain(MAX_DRAINED)
        return messages

    def close(self) -> None:
        """See :class:`SchedulerLink`. On the event loop's thread; nobody may be receiving."""
        if self._context.closed:
            return
        self._flush()
        self._inbox.socket.close()
        self._outbox.close()
        self._context.term()
