"""How processes talk: an Inbox (a ZeroMQ PULL socket) receives what any number of Outboxes (PUSH sockets) send.

An endpoint is ``ipc:///path`` in the server's private folder, or ``tcp://address:port`` between hosts. Messages of one
sender arrive in their order, whole and once. Nothing is dropped because a queue is full: queues have no limit
(high-water mark 0), and what may be under way is bounded where requests are admitted. Whoever started the processes
notices that one of them has ended.
"""

from __future__ import annotations

import logging
import select
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar, cast

import msgspec
import zmq

from fenceline.images.image_input import ImageInput
from fenceline.ipc.io_struct import PortArgs, TokenizedGenerateReq

logger = logging.getLogger(__name__)

MAX_DRAINED = 16  # messages handled in one go: bounds the time until those who wait for them run
MAX_DRAINED_BYTES = 1 << 20  # and no more after so many bytes: logprobs of a long prompt are megabytes
LINGER_S = 1.0  # how long an outbox that is closed still tries to deliver the rest
# In a request, what is no token id, such as biases of a thousand tokens, is decoded one by one: a byte of it takes as
# long as so many bytes of ids.
_SLOW_BYTE = 16
_COPIED_BYTES = 1 << 20  # at most, of what is sent: to copy more takes longer than to say when it may be freed
_MOST_BYTES = 1 << 30  # of a message
_RETRY_MS, _MOST_RETRY_MS = 10, 500  # until a sender tries again to connect, twice as long each time
_MAX_TMPDIR_CHARS = 64
_WAKE = b"\xc1"  # begins no message

M = TypeVar("M")


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


class Outbox:
    """Sends to the inboxes that listen, or will listen, at ``endpoints``. Any thread may send."""

    def __init__(self, *endpoints: str) -> None:
        self._context = zmq.Context()  # of its own: closing waits for what this outbox has sent
        self._lock = threading.Lock()
        self._sockets = {endpoint: self._connected(endpoint) for endpoint in endpoints}

    def _connected(self, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.LINGER, 0)  # unless it is closed
        socket.set(zmq.RECONNECT_IVL, _RETRY_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, _MOST_RETRY_MS)
        socket.set(zmq.TCP_KEEPALIVE, 1)
        socket.connect(endpoint)
        return socket

    def send(self, endpoint: str, *messages: bytes) -> None:
        """Send messages, which arrive together; never blocks. After :meth:`close` they are dropped. A message may be
        followed by pixels (``encode_apart``)."""
        with self._lock:
            if not self._context.closed:
                socket = self._sockets[endpoint]
                for data in messages[:-1]:
                    socket.send(data, zmq.NOBLOCK | zmq.SNDMORE, copy=len(data) <= _COPIED_BYTES)
                socket.send(messages[-1], zmq.NOBLOCK, copy=len(messages[-1]) <= _COPIED_BYTES)

    def wake(self, endpoint: str) -> None:
        """Wake the reader, and ZeroMQ's threads on the way to it, for a message that will follow within half a
        millisecond. A message to an idle process wakes three threads one after the other, which takes 0.3 to 0.4 ms
        where the machine's cores sleep; here that time passes while the message is made."""
        self.send(endpoint, _WAKE)

    def close(self, linger_s: float = LINGER_S) -> None:
        """Stop sending; what has not been delivered yet gets ``linger_s``. Harmless to repeat."""
        with self._lock:
            self._context.destroy(int(linger_s * 1000))


class Inbox(Generic[M]):
    """What one process receives at ``endpoint``; a port ``*`` is any that is free. Belongs to one thread. What
    ``decoder`` does not take is logged and dropped: garbage, and well-formed messages for somebody else. Whoever can
    write to the socket cannot end its reader with that."""

    def __init__(self, endpoint: str, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.MAXMSGSIZE, _MOST_BYTES)
        self._socket.set(zmq.TCP_KEEPALIVE, 1)
        self._socket.bind(endpoint)
        self.endpoint = cast(bytes, self._socket.get(zmq.LAST_ENDPOINT)).decode().rstrip("\0")
        self._news = select.poll()  # much cheaper than to ask ZeroMQ
        self._news.register(self._socket, select.POLLIN)
        self._is_empty = False  # unless its descriptor has shown something since
        self._arrived: deque[zmq.Frame] = deque()  # what has been taken and not drained yet
        self._decoder = decoder
        self._name = endpoint.rpartition("/")[2]
        self.num_dropped = 0
        self.on_wake: Callable[[], None] | None = None  # called when somebody wakes the reader (Outbox.wake)

    def fileno(self) -> int:
        """A descriptor that becomes readable when something may have arrived; only then: :meth:`fetch` all."""
        return self._socket.fileno()

    def has_arrived(self) -> bool:
        """Whether there is something to drain."""
        return bool(self._arrived) or self._receive_nowait()

    def fetch(self) -> bool:
        """Take all that has arrived, after which the descriptor is readable only by what comes later. Returns whether
        there is something to drain."""
        while self._receive_nowait():
            pass
        return bool(self._arrived)

    def wait(self, timeout_ms: float | None = None) -> bool:
        """Wait until a message has arrived; False if the time runs out first."""
        deadline = float("inf") if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        while not self.has_arrived():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self._news.poll(None if timeout_ms is None else 1000 * left_s)
        return True

    def receive(self) -> list[M]:
        """Wait for one message; none if what came was dropped."""
        self.wait()
        return self._decoded(self._arrived.popleft())

    def drain(self, limit: int | None = None, max_bytes: int | None = None) -> list[M]:
        """The messages that have arrived, without waiting: at most ``limit``, and none after ``max_bytes``. In a
        request each byte that is not of its prompt's ids counts as ``_SLOW_BYTE``, and pixels, which are not touched,
        count as nothing."""
        messages: list[M] = []
        num_bytes = 0
        while (limit is None or len(messages) < limit) and (max_bytes is None or num_bytes < max_bytes):
            if not self.has_arrived():
                break
            frame = self._arrived.popleft()
            for message in self._decoded(frame):
                messages.append(message)
                num_bytes += len(frame)
                if isinstance(message, TokenizedGenerateReq):
                    num_bytes += (_SLOW_BYTE - 1) * (len(frame) - 4 * len(message.input_ids))
        return messages

    def _receive_nowait(self) -> bool:
        """Take what was sent together; False if there is nothing."""
        if self._is_empty and not self._news.poll(0):
            return False
        while True:
            # Asked first, because pyzmq's exception takes the CPU longer than all else here.
            self._is_empty = not cast(int, self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN
            if self._is_empty:
                return False
            frames = [self._socket.recv(zmq.NOBLOCK, copy=False)]
            while frames[-1].more:
                frames.append(self._socket.recv(zmq.NOBLOCK, copy=False))
            if len(frames[0]) != len(_WAKE) or frames[0].bytes != _WAKE:
                self._arrived += frames
                return True
            if self.on_wake is not None:
                self.on_wake()

    def close(self) -> None:
        """Stop listening. What has not been received is lost. Harmless to repeat."""
        self._context.destroy(0)

    def _decoded(self, frame: zmq.Frame) -> list[M]:
        data = frame.bytes
        try:
            message = self._decoder.decode(data)
            if isinstance(message, TokenizedGenerateReq) and message.images:
                message = msgspec.structs.replace(message, images=self._with_pixels(message.images, frame))
            return [message]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self.num_dropped += 1
            # The 1st, 2nd, 4th, 8th: a flood does not fill the log.
            if self.num_dropped & (self.num_dropped - 1) == 0:
                logger.warning(
                    "The %s's socket received %d bytes that are not a message for it (%s) and were dropped, %d so far",
                    self._name, len(data), str(error)[:200], self.num_dropped,
                )  # fmt: skip
            return []

    def _with_pixels(self, images: Sequence[ImageInput], frame: zmq.Frame) -> list[ImageInput]:
        """``images`` of the message in ``frame``, with the pixels that were sent behind it."""
        found = []
        for image in images:
            if not frame.more:
                raise msgspec.ValidationError("an image's pixels are missing")
            frame = self._arrived.popleft()
            found.append(msgspec.structs.replace(image, pixels=frame.buffer.toreadonly()))
        return found
