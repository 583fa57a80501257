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

import logging
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<II")
_MAGIC = 0x434E4C46  # "FLNC"
_READ_BYTES = 256 << 10  # more than a Unix socket holds
_BUFFER_BYTES = 4 << 20  # of a socket, in the kernel, which allows less on most systems
_BACKLOG = 128
_RETRY_S = 0.01  # while the reader does not listen yet
LINGER_S = 1.0  # how long a sender that is closed still tries to send the rest
# The reader does not listen yet, or takes nothing at the moment.
_NOT_YET = (BlockingIOError, FileNotFoundError, ConnectionRefusedError, TimeoutError)

Address = str | tuple[str, int]


def _parse(endpoint: str) -> tuple[socket.AddressFamily, Address]:
    kind, _, rest = endpoint.partition("://")
    if kind == "ipc":
        return socket.AF_UNIX, rest
    assert kind == "tcp", endpoint
    host, _, port = rest.rpartition(":")
    return socket.AF_INET, (host, 0 if port == "*" else int(port))


class _Connection:
    """What one sender has sent, and the reader has not put together yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._begun = bytearray()  # of a message

    def cut(self, arrived: memoryview, messages: deque[bytes]) -> bool:
        """Append the messages that end in ``arrived``. False if these are not messages."""
        if not self._begun:
            used = _cut(arrived, messages)
            if used is None:
                return False
            self._begun += arrived[used:]
            return True
        self._begun += arrived
        with memoryview(self._begun) as view:
            used = _cut(view, messages)
        if used is None:
            return False
        del self._begun[:used]
        return True


def _cut(data: memoryview, messages: deque[bytes]) -> int | None:
    """Append all whole messages of ``data``; returns how many bytes they are, None if one has another head."""
    at, end = 0, len(data)
    while end - at >= _HEAD.size:
        magic, length = _HEAD.unpack_from(data, at)
        if magic != _MAGIC:
            return None
        last = at + _HEAD.size + length
        if last > end:
            break
        messages.append(bytes(data[at + _HEAD.size : last]))
        at = last
    return at


class PullSocket:
    """Listens on ``endpoint`` and receives. Belongs to one thread. A connection that sends what are no messages is
    logged and closed."""

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

    def fileno(self) -> int:
        """A descriptor that is readable if something may have arrived since the last :meth:`receive_nowait` that
        returned None."""
        number: int = self._selector.fileno()
        return number

    def poll(self, timeout_ms: float | None = None) -> bool:
        """Wait until a message has arrived; False if the time is over before."""
        if timeout_ms is None:
            while not self._messages:
                self._read(None)
            return True
        deadline = time.monotonic() + timeout_ms / 1000
        while not self._messages:
            left = deadline - time.monotonic()
            self._read(max(left, 0.0))
            if left <= 0:
                break
        return bool(self._messages)

    def receive(self) -> bytes:
        """Wait for the next message."""
        while not self._messages:
            self._read(None)
        return self._messages.popleft()

    def receive_nowait(self) -> bytes | None:
        """The next message, None if none has arrived."""
        if not self._messages:
            self._read(0.0)
        return self._messages.popleft() if self._messages else None

    def close(self) -> None:
        """Listen no more. What has not been received is lost. Harmless to repeat."""
        for key in list((self._selector.get_map() or {}).values()):
            key.fileobj.close()  # type: ignore[union-attr]  # a socket
        self._selector.close()
        self._messages.clear()

    def _read(self, timeout_s: float | None) -> None:
        """Read once what each sender has sent, after waiting for anything."""
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._accept()
                continue
            connection: _Connection = key.data
            try:
                num = connection.sock.recv_into(self._buffer)
            except BlockingIOError:
                continue
            except OSError:
                num = 0
            if num and connection.cut(self._buffer[:num], self._messages):
                continue
            if num:
                logger.warning(
                    "The %s's socket received what are no messages; the connection was closed",
                    self.endpoint.rpartition("/")[2],
                )
            self._selector.unregister(connection.sock)
            connection.sock.close()

    def _accept(self) -> None:
        with suppress(
            OSError
        ):  # it has been given up already, or there is no descriptor: it waits in the queue
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, _Connection(sock))


class PushSocket:
    """Sends to the PullSocket that listens, or will listen, on ``endpoint``. Any thread may send."""

    def __init__(self, endpoint: str) -> None:
        self._family, self._address = _parse(endpoint)
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._unsent: deque[memoryview] = deque()
        self._thread: threading.Thread | None = None  # while anything is unsent
        self._lost = False  # the reader has gone
        self.closed = False

    def send(self, data: bytes) -> None:
        """Send one message; never blocks. After :meth:`close` it is dropped."""
        self.send_many((data,))

    def send_many(self, messages: Sequence[bytes]) -> None:
        """Send messages together, so that the reader finds all of them at once if they fit the kernel's buffer."""
        frames = b"".join([part for data in messages for part in (_HEAD.pack(_MAGIC, len(data)), data)])
        with self._lock:
            if self.closed or self._lost:
                return
            rest = memoryview(frames)
            if self._thread is None:
                rest = rest[self._send_some(rest) :]
                if not rest or self._lost:
                    return
            self._unsent.append(rest)
            if self._thread is None:
                self._thread = threading.Thread(target=self._send_rest, name="channel", daemon=True)
                self._thread.start()

    def close(self, linger_s: float = LINGER_S) -> None:
        """Send no more; what the kernel has not taken yet gets ``linger_s``. Harmless to repeat."""
        with self._lock:
            self.closed = True
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
            return self._sock.send(data)
        except _NOT_YET:
            return 0
        except OSError:
            self._lost = True
            return 0

    def _connected(self) -> socket.socket:
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            if self._family == socket.AF_UNIX:
                sock.setblocking(False)
            else:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.settimeout(LINGER_S)
            sock.connect(self._address)
            sock.setblocking(False)
        except OSError:
            sock.close()
            raise
        return sock

    def _send_rest(self) -> None:
        """The thread: send what is unsent, in order."""
        while True:
            if self._sock is None and not self._connect():
                time.sleep(_RETRY_S)
            with self._lock:
                if self._lost:
                    self._unsent.clear()
                if not self._unsent:
                    self._thread = None
                    return
                sock = self._sock
                if sock is None:
                    continue
                num = self._send_some(self._unsent[0])
                if num == len(self._unsent[0]):
                    self._unsent.popleft()
                    continue
                self._unsent[0] = self._unsent[0][num:]
            with suppress(OSError, ValueError):  # closed meanwhile
                _wait_writable(sock)

    def _connect(self) -> bool:
        """Whether there is a connection now. Without the lock, so that nobody waits for it."""
        try:
            sock = self._connected()
        except _NOT_YET:
            return False
        except OSError:
            self._lost = True
            return True
        with self._lock:
            if self._lost:
                sock.close()
            else:
                self._sock = sock
        return True


def _wait_writable(sock: socket.socket) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_WRITE)
        selector.select(LINGER_S)
