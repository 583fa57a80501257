"""One-way channels between processes: a PullSocket receives what any number of PushSockets send.

An endpoint is ``ipc:///path`` (a Unix socket) or ``tcp://address:port``. A message is a head of eight bytes, a constant
and the length, and its bytes. Messages of one sender arrive in their order, whole and once.

Sending never blocks and has no limit. What the kernel takes at once is sent by one system call of the sender's own
thread, and the reader's own thread reads it, so that nobody waits until another thread has been woken on either side. A
first token passes three channels, and each of its wake-ups costs as much as its work. Only what the kernel does not
take is left to a thread, which also waits for a reader that does not listen yet. Where the reader has gone, what is
sent is dropped: whoever started the processes notices that one has ended.
"""

from __future__ import annotations

import errno
import logging
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<II")
_MAGIC = 0x434E4C46  # "FLNC"
_READ_BYTES = 256 << 10  # read at a time
_MOST_READS = 16  # of each sender, one after the other, before what has arrived is handled
_MOST_BYTES = 1 << 30  # of a message
_BUFFER_BYTES = 4 << 20  # of a socket, in the kernel, which allows less on most systems
_BACKLOG = 128
_RETRY_S = 0.01  # until a sender that could not send tries again; each time it waits twice as long,
_MOST_RETRY_S = 0.5  # up to this
PAUSE_S = 0.1  # while there is no descriptor for another connection
LINGER_S = 1.0  # how long a sender that is closed still tries to send the rest
# The reader does not listen yet, or takes nothing at the moment; or something is short, which may pass.
_PASSING = frozenset(
    (errno.EAGAIN, errno.ENOENT, errno.ECONNREFUSED, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE, errno.ENOBUFS)
    + (errno.ENOMEM, errno.EHOSTUNREACH, errno.ENETUNREACH)
)  # fmt: skip
_NO_DESCRIPTOR = frozenset((errno.EMFILE, errno.ENFILE))
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # a program that embeds an engine may die of SIGPIPE

Address = str | tuple[str, int]


def _parse(endpoint: str) -> tuple[socket.AddressFamily, Address]:
    kind, _, rest = endpoint.partition("://")
    if kind == "ipc":
        return socket.AF_UNIX, rest
    assert kind == "tcp", endpoint
    host, _, port = rest.rpartition(":")
    return socket.AF_INET, (host, 0 if port == "*" else int(port))


class _Connection:
    """The connection of one sender."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._partial = bytearray()  # the beginning of a message

    def split(self, arrived: memoryview, messages: deque[bytes]) -> bool:
        """Append the messages that end in ``arrived``. False if these bytes are not messages."""
        if not self._partial:
            used = _split(arrived, messages)
            if used is None:
                return False
            self._partial += arrived[used:]
            return True
        self._partial += arrived
        with memoryview(self._partial) as view:
            used = _split(view, messages)
        if used is None:
            return False
        del self._partial[:used]
        return True


def _split(data: memoryview, messages: deque[bytes]) -> int | None:
    """Append all whole messages of ``data``; returns how many bytes they are, None if a head is not that of a
    message."""
    at, end = 0, len(data)
    while end - at >= _HEAD.size:
        magic, length = _HEAD.unpack_from(data, at)
        if magic != _MAGIC or length > _MOST_BYTES:
            return None
        last = at + _HEAD.size + length
        if last > end:
            break
        messages.append(bytes(data[at + _HEAD.size : last]))
        at = last
    return at


class PullSocket:
    """Listens on ``endpoint`` and receives. Belongs to one thread. A connection that sends bytes that are not messages
    is logged and closed."""

    def __init__(self, endpoint: str) -> None:
        family, address = _parse(endpoint)
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.bind(address)
            self._listener.listen(_BACKLOG)
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self.endpoint = endpoint
        if family == socket.AF_INET:
            host, port = self._listener.getsockname()
            self.endpoint = f"tcp://{host}:{port}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._messages: deque[bytes] = deque()  # have arrived
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._num_refused = 0  # connections that were closed because of what they had sent
        # While there is no descriptor for another connection: when the listener is watched again.
        self._accepts_at: float | None = None

    def fileno(self) -> int:
        """A descriptor that is readable if something may have arrived since the last :meth:`receive_nowait` that
        returned None. While :attr:`is_paused` it does not show new connections."""
        return self._selector.fileno()

    @property
    def has_message(self) -> bool:
        """Whether one has been read already and not been received; the descriptor does not show it."""
        return bool(self._messages)

    @property
    def is_paused(self) -> bool:
        """Whether no connections are accepted for a moment, because there is no descriptor for one."""
        return self._accepts_at is not None

    def poll(self, timeout_ms: float | None = None) -> bool:
        """Wait until a message has arrived; False if the time runs out first."""
        if timeout_ms is None:
            while not self._messages:
                self._read(None)
            return True
        deadline = time.monotonic() + timeout_ms / 1000
        num_late = 0
        while not self._messages and num_late < _MOST_READS:
            left = deadline - time.monotonic()
            is_late = left <= 0
            num_late += is_late
            if not self._read(max(left, 0.0)) and is_late:
                break
        return bool(self._messages)

    def receive(self) -> bytes:
        """Wait for the next message."""
        while not self._messages:
            self._read(None)
        return self._messages.popleft()

    def receive_nowait(self) -> bytes | None:
        """The next message, None if none has arrived."""
        for _ in range(_MOST_READS):
            if self._messages or not self._read(0.0):
                break
        return self._messages.popleft() if self._messages else None

    def close(self) -> None:
        """Stop listening. What has not been received is lost. Harmless to repeat."""
        for key in list((self._selector.get_map() or {}).values()):
            key.fileobj.close()  # type: ignore[union-attr]  # a socket
        self._listener.close()
        self._selector.close()
        self._messages.clear()

    def _read(self, timeout_s: float | None) -> bool:
        """Read once what each sender has sent, after waiting for anything. False if there was nothing."""
        if self._accepts_at is not None:
            pause_s = self._accepts_at - time.monotonic()
            if pause_s <= 0:
                self._accepts_at = None
                self._selector.register(self._listener, selectors.EVENT_READ)
            elif timeout_s is None or timeout_s > pause_s:
                timeout_s = pause_s
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            if key.data is None:
                self._accept()
            elif not self._receive_from(key.data):
                self._selector.unregister(key.fileobj)
                key.data.sock.close()
        return bool(ready)

    def _receive_from(self, connection: _Connection) -> bool:
        """False if the connection is to be closed."""
        try:
            num = connection.sock.recv_into(self._buffer)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not num:
            return False
        if connection.split(self._buffer[:num], self._messages):
            return True
        self._num_refused += 1
        # The 1st, 2nd, 4th, 8th: a flood does not fill the log.
        if self._num_refused & (self._num_refused - 1) == 0:
            logger.warning(
                "The %s's socket received bytes that are not messages, and closed that connection; %d so far",
                self.endpoint.rpartition("/")[2], self._num_refused,
            )  # fmt: skip
        return False

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:  # it stays in the queue
                self._selector.unregister(self._listener)
                self._accepts_at = time.monotonic() + PAUSE_S
            return  # others: it has been given up already
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._selector.register(sock, selectors.EVENT_READ, _Connection(sock))


class PushSocket:
    """Sends to the PullSocket that listens, or will listen, on ``endpoint``. Any thread may send."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._family, self._address = _parse(endpoint)
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._unsent: deque[memoryview] = deque()
        self._thread: threading.Thread | None = None  # while it sends what is unsent
        self._lost = False  # the reader has gone
        self._closed = False

    def send(self, data: bytes) -> None:
        """Send one message; never blocks. After :meth:`close` it is dropped."""
        self.send_many((data,))

    def send_many(self, messages: Sequence[bytes]) -> None:
        """Send messages by one system call, as far as the kernel takes them: a reader finds some ten KiB at once."""
        frames = b"".join([part for data in messages for part in (_HEAD.pack(_MAGIC, len(data)), data)])
        with self._lock:
            if self._closed or self._lost:
                return
            rest = memoryview(frames)
            if not self._unsent:
                rest = rest[self._send_some(rest) :]
                if not rest or self._lost:
                    return
            self._unsent.append(rest)
            if self._thread is None:
                thread = threading.Thread(target=self._send_rest, name="channel", daemon=True)
                thread.start()  # it waits for the lock
                self._thread = thread

    def close(self, linger_s: float = LINGER_S) -> None:
        """Stop sending; what the kernel has not taken yet gets ``linger_s``. Harmless to repeat."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(linger_s)
        with self._lock:
            self._lost = True  # ends the thread
            self._unsent.clear()
            if self._sock is not None:
                self._sock.close()
                self._sock = None

    def _send_some(self, data: memoryview) -> int:
        """How many bytes of ``data`` the kernel takes at once. Called with the lock."""
        try:
            if self._sock is None:
                if self._family != socket.AF_UNIX:
                    return 0  # connecting takes a while: the thread does it
                self._sock = self._connected()
            return self._sock.send(data, _NO_SIGNAL)
        except OSError as error:
            self._fail(error)
            return 0

    def _fail(self, error: OSError) -> None:
        if isinstance(error, TimeoutError) or error.errno in _PASSING:
            return
        self._lost = True
        if not isinstance(error, ConnectionError):  # whose reader has gone
            logger.warning("nothing more can be sent to %s: %s", self._endpoint, error)

    def _connected(self) -> socket.socket:
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            if self._family == socket.AF_UNIX:
                sock.setblocking(False)
            else:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                sock.settimeout(LINGER_S)
            sock.connect(self._address)
            sock.setblocking(False)
        except OSError:
            sock.close()
            raise
        return sock

    def _send_rest(self) -> None:
        """The thread: send what is unsent, in order."""
        retry_s = _RETRY_S
        while True:
            if self._sock is None and not self._lost:
                self._connect()
            with self._lock:
                if self._lost:
                    self._unsent.clear()
                if not self._unsent:
                    self._thread = None
                    return
                sock, num = self._sock, 0
                if sock is not None:
                    num = self._send_some(self._unsent[0])
                    self._unsent[0] = self._unsent[0][num:]
                    if not self._unsent[0]:
                        self._unsent.popleft()
                        continue
            if sock is not None:
                with suppress(OSError, ValueError):  # closed meanwhile
                    _wait_writable(sock)
            if num:
                retry_s = _RETRY_S
            else:
                time.sleep(retry_s)  # nothing tells when somebody will listen; nobody waits for this thread
                retry_s = min(2 * retry_s, _MOST_RETRY_S)

    def _connect(self) -> None:
        """Try to connect, without the lock, so that nobody waits for it."""
        try:
            sock = self._connected()
        except OSError as error:
            self._fail(error)
            return
        with self._lock:
            if self._lost:
                sock.close()
            else:
                self._sock = sock


def close_all(sockets: Iterable[PushSocket], linger_s: float = LINGER_S) -> None:
    """Close all; what the kernel has not taken yet gets ``linger_s`` together."""
    deadline = time.monotonic() + linger_s
    for each in sockets:
        each.close(max(deadline - time.monotonic(), 0.0))


def _wait_writable(sock: socket.socket) -> None:
    poll = select.poll()  # needs no descriptor
    poll.register(sock, select.POLLOUT)
    poll.poll(LINGER_S * 1000)
