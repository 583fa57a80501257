"""uvicorn's connections with fewer system calls, and with limits on what one client can use.

Everything that one turn of the event loop writes is sent by one write. uvloop hands each write to the kernel at once.
An answer's head, its first event, the last event and the end of the chunked body would be writes and packets of their
own, each of which wakes the client, and beside a client on the same machine a wake-up costs more than everything else
that the server does for a request.

uvicorn and httptools buffer a request's head without limit and join its parts at quadratic cost, before the API key is
checked, and they wait for the rest of a request for ever. Here sizes are limited while bytes arrive, and a client that
is too slow is disconnected.

One turn of the event loop accepts, reads and parses a bounded amount for all connections together. libuv would accept
all waiting connections, and read megabytes from each connection that has sent them, before anything else runs. Data
beyond the turn's share is kept, and nothing more is read, until a later turn handles it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import select
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, cast

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from fenceline.entrypoints.errors import error_bytes, error_response
from fenceline.entrypoints.json_body import MAX_BODY_BYTES
from fenceline.frontend.request_types import RequestError

logger = logging.getLogger(__name__)

Pace = tuple[int, str, int]
Address = tuple[str, int]

MAX_HELD_BYTES = 1 << 16
LOG_DELAY_S = 0.05  # longer than a burst of requests takes to be accepted
_LINES_AT_ONCE = 16

# Of one request.
MAX_HEAD_BYTES = 64 << 10  # request line and headers together
MAX_URL_BYTES = 8 << 10
MAX_HEADERS = 128
_MAX_LENGTH_DIGITS = 20
MAX_FRAMING_BYTES = 16 << 10  # of a chunked body, in a row: chunk extensions, trailers
MAX_PIPELINED = 16  # requests that are read before the answer to the one before them is complete
# Limits on the pace of a connection, which check_pace checks once a second.
HEAD_TIMEOUT_S = 10.0  # for a request's head, and for a new connection to say anything
BODY_PERIOD_S = 20.0  # a body brings BODY_PERIOD_BYTES in each such period, or ends
BODY_PERIOD_BYTES = 20 << 10
# In each such period the client must read WRITE_PERIOD_BYTES of its answer, or all that is ready.
WRITE_PERIOD_S = 60.0
WRITE_PERIOD_BYTES = 16 << 10
_MAX_LOOK_INTERVAL_S = 2.0
_MAX_CLOSED_AT_ONCE = 64  # of the connections that have not kept pace, in one turn
_WARNING_INTERVAL_S = 60.0
_EVICTED_SHARE = 16  # of idle connections, how many are closed where a new one has no room: 1 in 16
# How much is still read of a body that was refused before it arrived, so that the client gets to the answer.
_MAX_DISCARDED_BYTES = 2 * MAX_BODY_BYTES
_REFUSAL_HEAD = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
_PIECE_BYTES = 16 << 10  # of a request that is parsed in one go
_END = b"\r\n\r\n"  # of a head, and of a chunked body
# Of all connections together in one turn of the event loop, some milliseconds: bytes that are read and parsed, and what
# counts as so many bytes.
TURN_BYTES = 1 << 20
_HEAD_BYTES = 16 << 10  # a request: the application's work for it
_CALL_BYTES = 1 << 9  # a part of a body, however short: one byte if it is sent in chunks of one
_READ_BYTES = 64 << 10  # read at a time; reading on where it had stopped counts before it is known what comes
_NEW_SHARE = 4  # a quarter of a turn is for data that has just arrived, the rest for data that has waited
_SMALL_BYTES = 2 << 10  # connections whose waiting data is smaller than this go first
# Clients that wait for a Listener: those that post nothing, those that post, and those that have sent nothing yet.
_READERS, _POSTERS, _SILENT = range(3)
# Which of them goes first, for each of the connections that are made in one turn.
_PREFERRED = (
    (_READERS, _POSTERS, _SILENT), (_POSTERS, _READERS, _SILENT), (_READERS, _POSTERS, _SILENT),
    (_SILENT, _POSTERS, _READERS),
)  # fmt: skip
MAX_ACCEPTED = len(_PREFERRED)
MAX_TAKEN = 256  # of the system's queue in one turn, which costs a few per cent of making them
SILENT_S = 3  # how long Linux keeps a connection back, while it does, if its client sends nothing
_PEEK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_PEEKED_BYTES = 4096  # of what a new client has sent, to see whether it may be served first
_ACCEPT_PAUSE_S = 0.05  # while there is no room for another one
_NO_ROOM_ERRORS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))

Data = bytes | bytearray | memoryview


class JoiningTransport(asyncio.Transport):
    """``transport``, except that data is held until the callbacks that are ready now have run, or 64 KiB are."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._held: list[Data] = []
        self._num_held = 0
        self._num_written = 0  # bytes handed to the transport since the connection began
        self._num_pauses = 0  # how many have paused reading: uvicorn, and the limits of a turn

    def write(self, data: Data) -> None:
        """Write ``data`` soon; in order, and before the connection is closed."""
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(data)
        self._num_held += len(data)
        if self._num_held > MAX_HELD_BYTES:
            self._flush()

    def writelines(self, list_of_data: Iterable[Data]) -> None:
        """:meth:`write` for each."""
        for data in list_of_data:
            self.write(data)

    def _flush(self) -> None:
        if self._held:
            held, num_held, self._held, self._num_held = self._held, self._num_held, [], 0
            if self._transport.is_closing():
                return  # the client has reset the connection in the meantime
            self._num_written += num_held
            self._transport.write(held[0] if len(held) == 1 else b"".join(held))

    def close(self) -> None:
        """Write what is held and close."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once; data that is held is lost."""
        self._held.clear()
        self._transport.abort()

    def can_write_eof(self) -> bool:
        """As the transport."""
        return self._transport.can_write_eof()

    def write_eof(self) -> None:
        """After what is held."""
        self._flush()
        self._transport.write_eof()

    def get_write_buffer_size(self) -> int:
        """Bytes that the kernel has not taken."""
        return self._num_held + self._transport.get_write_buffer_size()

    @property
    def num_taken(self) -> int:
        """Bytes that the kernel has taken since the connection began."""
        return self._num_written - self._transport.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """As the transport, whose limits are those that pause the protocol."""
        self._transport.set_write_buffer_limits(high, low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As the transport."""
        return self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """As the transport."""
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        """Read nothing until :meth:`resume_reading` has been called as many times as this method."""
        self._num_pauses += 1
        if self._num_pauses == 1:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._num_pauses -= 1
        if not self._num_pauses:
            self._transport.resume_reading()

    def is_reading(self) -> bool:
        """Whether nobody has paused reading."""
        return not self._num_pauses

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """As the transport."""
        self._transport.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """As the transport."""
        return self._transport.get_protocol()


class LateLogger:
    """Writes access lines a moment later, many at a time, so that answers that begin now do not wait for the log
    file."""

    def __init__(self, logger: logging.Logger, loop: asyncio.AbstractEventLoop) -> None:
        self._logger = logger
        self._loop = loop
        self._lines: deque[tuple[str, tuple[object, ...]]] = deque()

    def info(self, text: str, *values: object) -> None:
        """As ``logging.Logger.info``, in the same order."""
        if self._logger.isEnabledFor(logging.INFO):
            if not self._lines:
                self._loop.call_later(LOG_DELAY_S, self._write)
            self._lines.append((text, values))

    def _write(self) -> None:
        # A share of them, so that those of a flood do not pile up.
        self.flush(max(_LINES_AT_ONCE, len(self._lines) // 4))
        if self._lines:
            self._loop.call_soon(self._write)

    def flush(self, most: int | None = None) -> None:
        """Write what waits, at most ``most`` lines."""
        for _ in range(min(len(self._lines), most or len(self._lines))):
            text, values = self._lines.popleft()
            self._logger.info(text, *values)


class ConnectionLimits:
    """The limits that the connections of one server share: how many there may be, how much one turn of the event loop
    reads and parses for all of them, and the clock by which their pace is measured.

    ``access_log``: where their requests are logged. ``refused`` is told of those that the application does not get,
    with the reason. ``now`` is in seconds. Time in which the server itself was suspended or busy is not counted,
    because it could not read what its clients sent.
    """

    def __init__(self, max_connections: int, refused: Callable[[RequestError], object] | None = None) -> None:
        self.max_connections = max_connections
        self.refused = refused or (lambda error: None)
        self.num_made = 0  # connections, from the beginning
        self.num_leaving = 0  # closed to make room; the event loop has not removed them yet
        self.now = 0.0
        self.left = TURN_BYTES  # of this turn
        self.buffer = memoryview(bytearray(_READ_BYTES))  # where each connection reads to
        self._looked_at = float("inf")
        self._warned_at = float("-inf")
        self.access_log: LateLogger | None = None
        self._turn_planned = False
        self._waiting: tuple[deque[Callable[[], None]], deque[Callable[[], None]]] = deque(), deque()

    def advance(self, loop_time: float) -> None:
        """Called before the server checks all connections, about once a second."""
        self.now += min(max(loop_time - self._looked_at, 0.0), _MAX_LOOK_INTERVAL_S)
        self._looked_at = loop_time

    def warn(self, num_connections: int, num_idle: int) -> None:
        """Log that all connections are taken, at most once a minute."""
        if self.now - self._warned_at < _WARNING_INTERVAL_S:
            return
        self._warned_at = self.now
        logger.warning(
            "All %d connections are taken, %d of them idle: idle ones are closed for new ones. A connection takes a "
            "file descriptor: raise the limit (ulimit -n) if these are your clients.",
            num_connections, num_idle,
        )  # fmt: skip

    def spend(self, num_bytes: int) -> None:
        """Count ``num_bytes`` as read and parsed in this turn."""
        self.left -= num_bytes
        if not self._turn_planned:
            self._turn_planned = True
            asyncio.get_running_loop().call_soon(self._turn)

    def wait(self, go_on: Callable[[], None], small: bool) -> None:
        """Call ``go_on`` in a later turn, in order; those that are ``small`` go first."""
        self._waiting[not small].append(go_on)
        self.spend(0)

    def _turn(self) -> None:
        self._turn_planned = False
        self.left = TURN_BYTES
        for waiting in self._waiting:
            while waiting and self.left > TURN_BYTES // _NEW_SHARE:
                waiting.popleft()()
        if any(self._waiting):
            self.spend(0)


_Connecting = Coroutine["asyncio.Future[Any] | None", None, None]
_Taken = tuple[socket.socket, Any]  # a connection as socket.accept returns it, with the client's address


def _address(name: Any) -> Address:
    return str(name[0]), int(name[1])


def _begun(accepted: socket.socket) -> bytes | None:
    """The beginning of what a new client has sent; None: nothing yet; b"": it has closed or reset the connection."""
    try:
        return accepted.recv(_PEEKED_BYTES, _PEEK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _is_part(begun: bytes | None) -> bool:
    """Whether a complete head is not in it and can only come yet."""
    return begun is not None and len(begun) < _PEEKED_BYTES and b"\r\n\r\n" not in begun


class Listener:
    """Accepts connections on ``sock``. In each turn of the event loop it takes many from the system's queue and makes
    connections of a few. Those for which there is no descriptor wait in the system's queue; libuv would close them all.

    Whoever comes after a flood must not wait until all of the flood has been served, and the system's queue has one
    order. So a connection whose client has closed its side without a complete head is closed, without an answer, before
    it costs anything else, and a client whose request begins with GET or HEAD (a monitor's /health, a page) does not
    wait for the others. Clients that have sent nothing yet come last, and are looked at again each turn. While some
    wait, Linux is told to keep those that send nothing in its own queue, and to hand over the others before them.
    Otherwise a connection is made before its client has sent anything, because a first token would wait for that.

    ``make_protocol`` is told the address that is listened on and the client's, ``has_room`` how many have been taken
    and are no connections yet.
    """

    def __init__(
        self,
        sock: socket.socket,
        make_protocol: Callable[[Address, Address], asyncio.BaseProtocol],
        has_room: Callable[[int], bool],
    ) -> None:
        self._sock = sock
        self._address = _address(sock.getsockname())
        self._make_protocol = make_protocol
        self._has_room = has_room
        self._loop = asyncio.get_running_loop()
        # Taken and no connections yet: _READERS, _POSTERS and _SILENT.
        self._waiting: tuple[deque[_Taken], ...] = (deque(), deque(), deque())
        self._keeps_silent_back = False
        self._connecting: set[_Connecting] = set()
        self._turn: asyncio.Handle | None = None
        self._pause: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        self._loop.add_reader(sock, self._accept)

    def _accept(self) -> None:
        num_waiting = sum(map(len, self._waiting)) + len(self._connecting)
        for _ in range(MAX_TAKEN):
            try:
                if not self._has_room(num_waiting):
                    if num_waiting:
                        break  # each of them that becomes a connection makes room
                    raise OSError(errno.EMFILE, "no room")
                taken = self._sock.accept()
            except OSError as error:
                if error.errno in _NO_ROOM_ERRORS:
                    self._loop.remove_reader(self._sock)
                    self._pause = self._loop.call_later(
                        _ACCEPT_PAUSE_S, self._loop.add_reader, self._sock, self._accept
                    )
                break  # others: there is none, or it has been given up already
            num_waiting += self._take(*taken)
        if self._turn is None:
            self._connect_some()

    def _take(self, accepted: socket.socket, peer: Any) -> bool:
        """Whether the connection waits from now on; else its client has left."""
        begun = _begun(accepted)
        # After the end nothing comes any more, so what is there then is all.
        if begun == b"" or (_is_part(begun) and _has_left(accepted) and _is_part(_begun(accepted))):
            accepted.close()
            return False
        kind = _SILENT
        if begun is not None:
            kind = _READERS if begun.startswith((b"GET ", b"HEAD ")) else _POSTERS
        self._waiting[kind].append((accepted, peer))
        return True

    def _look_again(self) -> None:
        """Whoever has been silent may have sent something, or left, since it was looked at."""
        silent = self._waiting[_SILENT]
        for _ in range(min(len(silent), MAX_TAKEN)):
            self._take(*silent.popleft())

    def _connect_some(self) -> None:
        self._turn = None
        self._look_again()
        for kinds in _PREFERRED:
            waiting = next((self._waiting[kind] for kind in kinds if self._waiting[kind]), None)
            if waiting is None:
                break
            self._go_on(self._connect(waiting.popleft()))
        some_wait = any(self._waiting)
        if some_wait != self._keeps_silent_back:
            self._keep_silent_back(some_wait)
        if some_wait:
            self._turn = self._loop.call_soon(self._connect_some)

    def _keep_silent_back(self, wanted: bool) -> None:
        self._keeps_silent_back = wanted
        if hasattr(socket, "TCP_DEFER_ACCEPT"):
            with suppress(OSError):  # a kernel that knows the name and not the option
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, SILENT_S if wanted else 0)

    def _go_on(self, connecting: _Connecting, _: object = None) -> None:
        """Run ``connecting`` until it waits for something. A task would begin a turn of the event loop later, for which
        a first token would wait."""
        self._connecting.discard(connecting)
        try:
            waited_for = connecting.send(None)
        except StopIteration:
            return
        self._connecting.add(connecting)
        if waited_for is None:  # for a turn of the event loop
            self._loop.call_soon(self._go_on, connecting)
        else:
            waited_for.add_done_callback(partial(self._go_on, connecting))

    async def _connect(self, taken: _Taken) -> None:
        accepted, peer = taken
        try:
            make_protocol = partial(self._make_protocol, self._address, _address(peer))
            await self._loop.connect_accepted_socket(make_protocol, accepted)
        except (OSError, IndexError, ValueError, asyncio.CancelledError):
            accepted.close()  # the client has gone, and some systems have no address for it then, or the loop ends
        except Exception:  # a defect, which must not keep the other clients from being connected
            accepted.close()
            logger.exception("a client could not be connected")

    def close(self) -> None:
        """Accept no more. Clients that have been taken and are no connections yet are disconnected, as those are that
        wait in the system's queue."""
        if self._pause is not None:
            self._pause.cancel()
        if self._turn is not None:
            self._turn.cancel()
        self._loop.remove_reader(self._sock)
        for waiting in self._waiting:
            while waiting:
                waiting.popleft()[0].close()

    async def wait_closed(self) -> None:
        """As a server of asyncio's; connections are waited for by uvicorn."""


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 on a :class:`JoiningTransport`, with limits.

    A request that is malformed or too large is answered with a 4xx in the server's own form, and the connection is
    closed. If there are too many connections, some on which no request is being answered are closed for new ones. If
    there are none, a new connection gets 503, except for /health, so that a monitor sees that the server is busy and
    not dead.
    """

    def __init__(
        self,
        *args: Any,
        limits: ConnectionLimits,
        addresses: tuple[Address | None, Address | None] = (None, None),
        **kwargs: Any,
    ) -> None:
        """``addresses``: that which is listened on and the client's, for the application and the log."""
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._addresses = addresses
        self._refusal: RequestError | None = None  # set by the parser's callbacks, which can only raise
        self._in_head = True
        self._num_head_bytes = 0  # of the request that is being received
        self._num_framing_bytes = 0  # since the last byte of a body
        self._num_body_bytes = 0
        self._content_length: int | None = None  # as it was announced; None: nothing, or in chunks
        self._last_bytes = b""  # of what has been parsed, if they may be the beginning of _END
        self._waits_for_answers = False  # as many requests as may wait do so, and what follows is not parsed
        self._earlier: list[
            RequestResponseCycle
        ] = []  # requests in front of the last one; some may be answered
        self._num_heads = 0  # complete ones since the connection began
        self._pace: Pace = (0, "head", 0)  # the client's progress when it last made any
        self._pace_at = 0.0
        self._cost = 0  # of what has been parsed, beside its bytes
        self._unparsed: bytes | memoryview = b""  # has arrived, and waits for a later turn
        self._waits_for_turn = False
        self._unstarted: Any = None  # the application, where it waits for the request's body
        self._crowded = False  # there is only room for /health
        self._number = 0  # of connections, in the order in which they were made
        self._leaves = False  # counted in the limits' num_leaving
        self._periods_taken = 0  # how much of the answers the kernel had taken when it last took enough
        self._taken_at = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """A client has connected."""
        if self._limits.access_log is None:
            self._limits.access_log = LateLogger(self.access_logger, self.loop)
        self.access_logger = cast(logging.Logger, self._limits.access_log)
        # As uvicorn's, which asks the kernel for the addresses a dozen times.
        self.connections.add(self)
        self.transport = JoiningTransport(transport, self.loop)
        self.flow = FlowControl(self.transport)
        self.server, self.client = self._addresses
        self.scheme = "http"
        self._limits.num_made = self._number = self._limits.num_made + 1
        self._pace_at = self._taken_at = self._limits.now
        num_staying = len(self.connections) - self._limits.num_leaving
        if num_staying > self._limits.max_connections and not self._make_room():
            self._crowded = True
            self.app = partial(_only_health, self.app, self._limits.refused)  # type: ignore[assignment]  # uvicorn's types and starlette's

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has disconnected. uvicorn reports this only to the last of its requests."""
        for cycle in self._earlier:
            cycle.disconnected = True
            cycle.message_event.set()
        self._unparsed, self._unstarted = b"", None
        if self._leaves:
            self._leaves = False
            self._limits.num_leaving -= 1
        super().connection_lost(exc)

    # --- sizes

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived, as far as this turn allows."""
        self._unset_keepalive_if_required()
        self._unparsed = bytes(self._unparsed) + data if self._unparsed else data
        if not self._waits_for_turn:
            self._parse()

    def _parse(self) -> None:
        """Parse in pieces, so that limits are noticed before much is kept."""
        rest, limits = self._unparsed, self._limits
        while rest and limits.left > 0 and not self.transport.is_closing() and not self._is_full():
            limit = self._piece_bytes(rest)
            if len(rest) <= limit:
                piece, rest = rest, b""
            else:
                view = memoryview(rest)
                piece, rest = view[:limit], view[limit:]
            self._feed(piece)
            limits.spend(len(piece) + self._cost)
            self._cost = 0
        self._unparsed = b"" if self.transport.is_closing() else rest
        if self._unparsed or (limits.left <= 0 and not self._in_head):
            self._waits_for_turn = True
            self.transport.pause_reading()
            self._waits_for_answers = self._is_full()
            if not self._waits_for_answers:
                limits.wait(self._go_on, len(self._unparsed) <= _SMALL_BYTES and self._in_head)

    def _is_full(self) -> bool:
        return self._in_head and len(self.pipeline) >= MAX_PIPELINED

    def on_response_complete(self) -> None:
        """An answer has been written: the next request begins, and one more may be read."""
        super().on_response_complete()
        if self._waits_for_answers and not self.transport.is_closing():
            self._waits_for_answers = False
            self._limits.wait(self._go_on, len(self._unparsed) <= _SMALL_BYTES)

    def _piece_bytes(self, rest: bytes | memoryview) -> int:
        """How much of ``rest`` is parsed at once: no more than the end of a head or body, so that what follows can
        wait."""
        if not self._in_head and self._content_length is not None:
            return min(self._content_length - self._num_body_bytes, _PIECE_BYTES)
        limit = min(MAX_HEAD_BYTES - self._num_head_bytes, _PIECE_BYTES) if self._in_head else _PIECE_BYTES
        before = self._last_bytes
        text = before + rest[:limit]
        end = text.find(_END)
        self._last_bytes = text[-3:] if end < 0 else b""
        return limit if end < 0 else end + len(_END) - len(before)

    def _go_on(self) -> None:
        """Called in the turn that continues with this connection."""
        self._waits_for_turn = False
        if self.parser is None:  # the client has gone
            return
        if self._unparsed:
            self._parse()
        else:
            self._limits.spend(_READ_BYTES)
        self.transport.resume_reading()

    def _feed(self, piece: bytes | memoryview) -> None:
        num_body_bytes = self._num_body_bytes
        if self._in_head:
            self._num_head_bytes += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as offer:
            # To HTTP/2, as curl --http2 does: it gets HTTP/1.1. httptools would skip the body.
            self._feed(self._without_offer())
            if (rest := piece[offer.args[0] :]) and not self.transport.is_closing():
                self._feed(rest)
            return
        except httptools.HttpParserError as error:
            self._refuse(self._refusal or RequestError(400, f"this is not valid HTTP: {error}"))
            return
        if self._in_head:
            if self._num_head_bytes >= MAX_HEAD_BYTES:
                self._refuse(_too_large_head(f"{MAX_HEAD_BYTES >> 10} KiB"))
            return
        if self._unstarted is not None and self._is_answered_before_its_body():
            self._start()
        self._num_framing_bytes += len(piece)
        if self._num_body_bytes != num_body_bytes:
            self._num_framing_bytes = 0
        elif self._num_framing_bytes > MAX_FRAMING_BYTES:
            self._refuse(RequestError(400, "chunk extensions and trailers are not supported: leave them out"))

    def _without_offer(self) -> bytes:
        """The head that was parsed last, without its offer of another protocol, for a new parser."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        with suppress(AttributeError):  # httptools before 0.6.3; as uvicorn
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"\r\n".join(lines) + _END

    def on_url(self, url: bytes) -> None:
        """A part of the request's URL."""
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._raise(RequestError(414, f"the URL is longer than {MAX_URL_BYTES >> 10} KiB"))

    def on_headers_complete(self) -> None:
        """The head is complete: the application gets the request."""
        if self.parser.get_method() == b"CONNECT":
            self._raise(RequestError(405, "CONNECT is not allowed: this is no proxy"))
        if self.parser.should_upgrade():
            return  # it will be parsed again
        if len(self.headers) > MAX_HEADERS:
            self._raise(_too_large_head(f"{MAX_HEADERS} lines"))
        self._unset_keepalive_if_required()
        if sum(name == b"host" for name, _ in self.headers) > 1:  # a proxy in front may go by the other one
            self._raise(RequestError(400, "there is more than one Host header"))
        length = next((value for name, value in self.headers if name == b"content-length"), None)
        if length is not None and len(length) > _MAX_LENGTH_DIGITS:
            self._raise(RequestError(400, f"Content-Length has more than {_MAX_LENGTH_DIGITS} digits"))
        self._content_length = None if length is None else int(length)
        before = self.cycle
        super().on_headers_complete()
        if self.pipeline:
            self._earlier = [one for one in (*self._earlier, before) if not one.response_complete]
        self._in_head, self._num_head_bytes, self._num_framing_bytes = False, 0, 0
        self._num_heads += 1
        self._pace_at = self._limits.now
        self._cost += _HEAD_BYTES

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Start the application for ``cycle`` as soon as its body is complete, or so large that it must be read while
        it arrives."""
        self._unstarted = app
        if cycle is not self.cycle or not cycle.more_body or len(cycle.body) > HIGH_WATER_LIMIT:
            self._start(cycle)
        elif not self._in_head and self._is_answered_before_its_body():  # it has waited for others
            self._start()

    def _start(self, cycle: RequestResponseCycle | None = None) -> None:
        app, self._unstarted = self._unstarted, None
        super()._start_asgi_task(cycle or self.cycle, app)

    def _is_answered_before_its_body(self) -> bool:
        """Whether a request can be answered although its body has not arrived."""
        if self.expect_100_continue or self._crowded:
            return True
        return (self._content_length or 0) > MAX_BODY_BYTES

    def on_body(self, body: bytes) -> None:
        """A part of the request's body."""
        self._num_body_bytes += len(body)
        self._cost += _CALL_BYTES
        cycle = self.cycle
        if cycle.response_complete:
            if self._num_body_bytes > _MAX_DISCARDED_BYTES:
                self.transport.close()
            return
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            if self._unstarted is not None:
                self._start()
            self.flow.pause_reading()
            cycle.message_event.set()

    def on_message_complete(self) -> None:
        """The request is complete."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._in_head, self._num_head_bytes, self._num_body_bytes = True, 0, 0
        if self._unstarted is not None:
            self._start()

    def _raise(self, error: RequestError) -> NoReturn:
        self._refusal = error
        raise error

    def _refuse(self, error: RequestError) -> None:
        """Answer with ``error``, unless an answer has begun or others come first, and close the connection."""
        self._limits.refused(error)
        cycle = self.cycle  # of this request, or of the one before if this one's head is not complete
        free = self._is_answered() if self._in_head else not (cycle.response_started or self.pipeline)
        if free:
            body = error_bytes(error)
            self.transport.write(STATUS_LINE[error.status] + _REFUSAL_HEAD % len(body) + body)
            client = ":".join(map(str, self.client or ()))
            self.access_logger.info("%s - %d %s", client, error.status, error.message)
        if not self._is_answered():
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()

    # --- pace

    def check_pace(self) -> None:
        """Disconnect a client that does not continue its request or does not read its answer, and notice one that has
        disconnected while nothing is read from it. Called about once a second, which costs less than a timer for each
        request."""
        now = self._limits.now
        transport = cast(JoiningTransport, self.transport)
        periods_taken = transport.num_taken // WRITE_PERIOD_BYTES
        if not transport.get_write_buffer_size() or periods_taken != self._periods_taken:
            self._periods_taken, self._taken_at = periods_taken, now
        elif now - self._taken_at > WRITE_PERIOD_S:
            transport.abort()
        if not transport.is_reading():
            sock = transport.get_extra_info("socket")
            if sock is not None and _has_left(sock):
                transport.abort()
        if transport.is_closing():
            return
        pace = self._client_pace()
        if pace != self._pace:
            self._pace, self._pace_at = pace, now
        elif pace[1] and now - self._pace_at > (HEAD_TIMEOUT_S if self._in_head else BODY_PERIOD_S):
            self._give_up()

    def _client_pace(self) -> Pace:
        """A value that changes when the client makes progress: the number of requests that have begun, what is expected
        of the client ("head", "body", or "" if nothing is), and how much of it has arrived."""
        if not self._in_head:
            waits = self.transport.is_reading() and not self.pipeline
            return self._num_heads, "body" if waits else "", self._num_body_bytes // BODY_PERIOD_BYTES
        # Before a later request's head has begun, uvicorn's keep-alive time-out holds.
        waits = self._is_answered() and (self._num_head_bytes > 0 or self._num_heads == 0)
        return self._num_heads, "head" if waits else "", 0

    def _is_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _give_up(self) -> None:
        if self._in_head and not self._num_head_bytes:
            self.transport.close()  # it has asked for nothing
        elif self._in_head:
            self._refuse(RequestError(408, f"the request's head was not complete after {HEAD_TIMEOUT_S:g} s"))
        else:
            self._refuse(
                RequestError(
                    408,
                    f"the request's body came too slowly: send {BODY_PERIOD_BYTES >> 10} KiB in "
                    f"{BODY_PERIOD_S:g} s at least",
                )
            )

    # --- number of connections

    def _make_room(self) -> bool:
        """Close some of the connections that wait for their client, those that have waited longest first. Of the
        connections of the last HEAD_TIMEOUT_S, those that have not completed a request's head come first: a flood of
        them must not take the places of clients that pause between requests for less than that. They are removed before
        the next ones are accepted. False if there are none."""
        others = cast("set[HttpProtocol]", self.connections)
        idle = [other for other in others if other is not self and other._is_idle()]
        self._limits.warn(self._limits.max_connections, len(idle))
        recent = self._limits.now - HEAD_TIMEOUT_S
        # The latest have sent something that has not been read, so they are the last of their kind.
        idle.sort(
            key=lambda other: (other._pace_at > recent, other._num_heads > 0, other._pace_at, other._number)
        )
        for other in idle[: len(idle) // _EVICTED_SHARE + 1]:
            other._leaves = True
            self._limits.num_leaving += 1
            other.transport.close()
        return bool(idle)

    def _is_idle(self) -> bool:
        waits = self._unstarted is not None or (self._in_head and self._is_answered())
        transport = cast(JoiningTransport, self.transport)
        # With an answer that its client has not taken, a closed connection would stay.
        return waits and not transport.is_closing() and not transport.get_write_buffer_size()


class BoundedReader(asyncio.BufferedProtocol):
    """``connection``, which gets 64 KiB at a time.

    uvloop reads 256 KiB from each connection that has so much before the connection can pause it: from all that were
    accepted together, megabytes in one turn."""

    def __init__(self, connection: HttpProtocol, limits: ConnectionLimits) -> None:
        self._connection = connection
        self._buffer = limits.buffer

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where to read to."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have come."""
        self._connection.data_received(bytes(self._buffer[:nbytes]))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As for the connection; so are the other methods."""
        self._connection.connection_made(cast(asyncio.Transport, transport))

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def eof_received(self) -> None:
        self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()


async def _only_health(
    app: ASGIApp, refused: Callable[[RequestError], object], scope: Scope, receive: Receive, send: Send
) -> None:
    """``app`` for a connection too many."""
    if scope["path"] == "/health":
        await app(scope, receive, send)
        return
    error = RequestError(503, "the server has no room for more connections", code="too_many_connections")
    refused(error)
    response = error_response(error)
    response.headers["connection"] = "close"
    await response(scope, receive, send)


def check_paces(connections: Iterable[HttpProtocol]) -> bool:
    """Call :meth:`HttpProtocol.check_pace` of each. False if so many had to be closed that the rest is left for another
    turn."""
    num_closed = 0
    for connection in connections:
        connection.check_pace()
        num_closed += connection.transport.is_closing()
        if num_closed == _MAX_CLOSED_AT_ONCE:
            return False
    return True


def _has_left(sock: socket.socket) -> bool:
    """Whether the client has closed the connection, seen without reading from it. This is known on Linux only."""
    event = getattr(select, "POLLRDHUP", 0)
    if not event:
        return False
    poll = select.poll()
    poll.register(sock.fileno(), event)
    return bool(poll.poll(0))


def _too_large_head(limit: str) -> RequestError:
    return RequestError(431, f"the request's headers are larger than {limit}", code="headers_too_large")
