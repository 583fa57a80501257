"""What one connection may cost: sizes are limited while bytes arrive, and slow clients are disconnected."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import time

import orjson
import pytest
import uvicorn
from fake_transport import Wire
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.entrypoints import http_protocol as limits
from fenceline.entrypoints.access import AccessRules
from fenceline.entrypoints.http_protocol import HttpProtocol
from fenceline.entrypoints.http_server import (
    MAX_CONNECTIONS,
    HttpServer,
    is_worth_a_line,
    max_connections,
    raise_descriptor_limit,
)
from fenceline.entrypoints.json_body import MAX_BODY_BYTES
from fenceline.entrypoints.middleware import MAX_BODIES_BYTES, RequestMiddleware
from fenceline.frontend.request_types import RequestError

MIB = 1 << 20


class Server:
    """Connections of one server over ``app``."""

    def __init__(self, app: object, max_connections: int = 1000) -> None:
        self.config = uvicorn.Config(app, lifespan="off", log_config=None)  # type: ignore[arg-type]
        self.config.load()
        self.state = ServerState()
        self.max_connections = max_connections
        self.refused: list[tuple[int, str | None]] = []

    def connect(self) -> tuple[HttpProtocol, Wire]:
        wire = Wire()
        connection = HttpProtocol(
            config=self.config,
            server_state=self.state,
            app_state={},
            refused=lambda error: self.refused.append((error.status, error.code)),
            max_connections=self.max_connections,
        )
        connection.connection_made(wire)
        return connection, wire

    def pass_time(self, seconds: float) -> None:
        """Look at every connection once a second, as the server does."""
        for _ in range(int(seconds)):
            for connection in list(self.state.connections):
                connection.check_pace()  # type: ignore[union-attr]


class App:
    """Reads the body and answers; notes what it got. ``gate``: it waits for it before the answer."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.bodies: list[int] = []
        self.gone = 0
        self.gate: asyncio.Event | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone += 1
                return
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
        self.bodies.append(size)
        if self.gate is not None:
            await self.gate.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def status_of(wire: Wire) -> int:
    return int(wire.sent.split(b" ", 2)[1])


def error_of(wire: Wire) -> dict[str, object]:
    error: dict[str, object] = orjson.loads(wire.sent.partition(b"\r\n\r\n")[2])["error"]
    return error


async def send(data: list[bytes], app: App | None = None) -> tuple[Wire, int, App]:
    """A connection that gets ``data``; how many bytes of it were given to the parser."""
    app = app or App()
    connection, wire = Server(app).connect()
    num_fed = 0
    parser = connection.parser

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(parser, name)

        def feed_data(self, piece: bytes) -> None:
            nonlocal num_fed
            num_fed += len(piece)
            parser.feed_data(piece)

    connection.parser = Counting()  # type: ignore[assignment]
    for part in data:
        await settle()
        while not (wire.reading or wire.closing):
            await asyncio.sleep(0)
        if wire.closing:
            break
        connection.data_received(part)
    await settle()
    return wire, num_fed, app


# --- heads


@pytest.mark.parametrize("part", [1000, 200_000, 4 * MIB])
async def test_a_head_without_end_is_refused_at_64_kib(part: int) -> None:
    start = b"POST /generate HTTP/1.1\r\nHost: x\r\nX-Long: "
    wire, num_fed, app = await send([start, *([b"a" * part] * (4 * MIB // part))])
    assert num_fed <= (64 << 10) + part + len(start), "at most one read more"
    assert status_of(wire) == 431
    assert error_of(wire)["code"] == "headers_too_large"
    assert wire.closing
    assert app.paths == []


async def test_a_head_of_64_kib_is_served_and_its_successor_too() -> None:
    start = b"GET /a HTTP/1.1\r\nHost: x\r\nX-Long: "
    head = start + b"a" * ((64 << 10) - len(start) - 4) + b"\r\n\r\n"
    wire, _, app = await send([head, head, head])
    assert app.paths == ["/a"] * 3
    assert not wire.closing


@pytest.mark.parametrize(("num", "status"), [(limits.MAX_HEADERS, 200), (limits.MAX_HEADERS + 1, 431)])
async def test_the_number_of_headers_is_limited(num: int, status: int) -> None:
    lines = b"".join(b"X-%d: 1\r\n" % index for index in range(num))
    wire, _, _ = await send([b"GET / HTTP/1.1\r\n" + lines + b"\r\n"])
    assert status_of(wire) == status


@pytest.mark.parametrize(("num", "status"), [(0, 200), (1, 200), (2, 400)])
async def test_a_request_names_one_host(num: int, status: int) -> None:
    wire, _, app = await send([b"GET / HTTP/1.1\r\n" + b"Host: a\r\n" * num + b"\r\n"])
    assert status_of(wire) == status
    assert len(app.paths) == (status == 200)


@pytest.mark.parametrize(("num", "status"), [(8000, 200), (9000, 414)])
async def test_the_length_of_a_url_is_limited(num: int, status: int) -> None:
    wire, _, app = await send([b"GET /" + b"a" * num, b" HTTP/1.1\r\nHost: x\r\n\r\n"])
    assert status_of(wire) == status
    assert len(app.paths) == (status == 200)


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: " + b"9" * 5000,
        b"Content-Length: " + b"0" * 4999 + b"2",
        b"Content-Length: -1",
        b"Content-Length: +2",
        b"Content-Length: 2.0",
        b"Content-Length: 0x2",
        b"Content-Length: 2, 2",
        b"Content-Length: 2\r\nContent-Length: 2",
        b"Content-Length: 2\r\nContent-Length: 3",
        b"Content-Length: 2\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 2",
        b"Transfer-Encoding: chunked, identity",
        b"X: a\x00b",
        b"X : 1",
        b"no colon",
    ],
    ids=range(15),
)
async def test_ambiguous_and_malformed_heads_are_400(headers: bytes, caplog: pytest.LogCaptureFixture) -> None:
    app = App()
    door = RequestMiddleware(app, AccessRules())
    connection, wire = Server(door).connect()
    connection.data_received(b"POST /generate HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n\r\n{}")
    await settle()
    assert status_of(wire) == 400
    assert error_of(wire)["type"] == "invalid_request_error"
    assert app.paths == []
    assert not caplog.records, "no traceback, and no line of the log for each"


async def test_a_length_beyond_the_limit_is_413() -> None:
    connection, wire = Server(RequestMiddleware(App(), AccessRules())).connect()
    connection.data_received(b"POST / HTTP/1.1\r\nContent-Length: 18446744073709551615\r\n\r\n")
    await settle()
    assert status_of(wire) == 413


BODY = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
NEXT = b"GET /next HTTP/1.1\r\nHost: x\r\n\r\n"
FRAMED = {
    "length": b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    "chunks": b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n",
    "trailers": b"Transfer-Encoding: chunked\r\n\r\n1\r\n%s\r\n%x;a=b\r\n%s\r\n0\r\nX: y\r\n\r\n"
    % (BODY[:1], len(BODY) - 1, BODY[1:]),
}
OFFERS = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n",
    b"Upgrade: websocket\r\nConnection: keep-alive, UPGRADE\r\n",
    b"CONNECTION: upgrade\r\nConnection: x\r\nuPgRaDe: a/1, b\r\nUpgrade: c\r\n",
)


@pytest.mark.parametrize("offer", OFFERS, ids=["h2c", "websocket", "two"])
@pytest.mark.parametrize("framing", FRAMED)
async def test_an_offer_of_another_protocol_costs_no_body(framing: str, offer: bytes) -> None:
    """curl --http2 makes one. A body that was taken for the next request would be smuggled in behind a proxy."""
    data = b"POST /first HTTP/1.1\r\nHost: x\r\n" + offer + FRAMED[framing] + NEXT
    for cut in range(1, len(data)):
        app = App()
        connection, wire = Server(app).connect()
        for part in (data[:cut], data[cut:]):
            connection.data_received(part)
            await settle()
        assert app.paths == ["/first", "/next"], cut
        assert app.bodies == [len(BODY), 0], cut
        assert wire.sent.count(b"200 OK") == 2 and not wire.closing


@pytest.mark.parametrize("offer", OFFERS, ids=["h2c", "websocket", "two"])
async def test_an_offer_without_a_body_has_its_followers(offer: bytes) -> None:
    app = App()
    connection, _ = Server(app).connect()
    connection.data_received((b"GET /a HTTP/1.1\r\nHost: x\r\n" + offer + b"\r\n") * 3 + NEXT)
    await settle()
    assert app.paths == ["/a", "/a", "/a", "/next"]


@pytest.mark.parametrize(
    "head",
    [
        b"POST /a HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 5\r\nTransfer-Encoding: chunked",
        b"POST /a HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\nContent-Length: 5",
        b"POST /a HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: x\r\nContent-Length: 5",
        b"POST /a HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 5\r\nContent-Length: 6",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\nContent-Length: 5",
        b"CONNECT x:1 HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c",
    ],
)
async def test_what_is_ambiguous_with_an_offer_ends_the_connection(head: bytes) -> None:
    app = App()
    connection, wire = Server(app).connect()
    connection.data_received(head + b"\r\n\r\n" + NEXT)
    await settle()
    assert app.paths == []
    assert wire.closing and status_of(wire) in (400, 405)


async def test_what_the_application_does_not_get_is_counted() -> None:
    server = Server(App(), max_connections=2)
    for data in (b"x\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000, b"GET / HTTP/1.1\r\n\r\n"):
        connection, wire = server.connect()
        connection.data_received(data)
        await settle()
    assert status_of(wire) == 503 and wire.closing
    assert server.refused == [(400, None), (431, "headers_too_large"), (503, "too_many_connections")]


FRAGMENTS = st.sampled_from(
    [
        b"GET /health HTTP/1.1\r\n", b"POST /generate HTTP/1.1\r\n", b"GET /health HTTP/1.0\r\n", b"\r\n", b"\n",
        b"PUT ", b"CONNECT x:1 HTTP/1.1\r\n", b"/a?b=c#d", b" HTTP/1.1\r\n", b"Host: x\r\n", b"Content-Length: 5\r\n",
        b"Content-Length: 99999999999999999999\r\n", b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n",
        b"Connection: close\r\n", b"Connection: upgrade\r\nUpgrade: h2c\r\n", b"Authorization: Bearer x\r\n",
        b"5\r\nhello\r\n", b"0\r\n", b"ffffffffffffffffffff\r\n", b"1;a=b\r\n", b"hello", b"a" * 20_000, b"X: ",
        b"\x00", b"PRI * HTTP/2.0\r\n\r\n", b" folded\r\n", b"\x16\x03\x01",
    ]
) | st.binary(max_size=20)  # fmt: skip


@settings(max_examples=400)
@given(data=st.lists(st.lists(FRAGMENTS, max_size=8).map(b"".join), max_size=6), key=st.sampled_from([None, "x", "y"]))
def test_any_bytes_are_answered_or_refused(data: list[bytes], key: str | None) -> None:
    async def run() -> None:
        logged: list[logging.LogRecord] = []
        handler = logging.Handler(logging.ERROR)
        handler.emit = logged.append  # type: ignore[method-assign]
        logging.getLogger().addHandler(handler)
        connection, wire = Server(RequestMiddleware(App(), AccessRules(api_key=key))).connect()
        for part in data:
            if wire.closing:
                break
            if not wire.reading:
                break
            connection.data_received(part)
            assert len(connection.pipeline) <= limits.MAX_PIPELINED
            await settle()
        connection.connection_lost(None)
        await settle()
        logging.getLogger().removeHandler(handler)
        assert not logged
        assert b"HTTP/1.1 5" not in wire.sent

    asyncio.run(run())


# --- bodies


@pytest.mark.parametrize(
    "parts",
    [
        [b"1;", *[b"x" * 4096] * 1000],
        [b"1\r\na\r\n0\r\nX-Trailer: ", *[b"x" * 4096] * 1000],
        [b"1\r\na\r\n0\r\n", *[b"X-Trailer: x\r\n" * 300] * 1000],
    ],
    ids=["extension", "trailer", "trailers"],
)  # fmt: skip
async def test_what_surrounds_the_chunks_of_a_body_is_limited(parts: list[bytes]) -> None:
    head = b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    wire, num_fed, app = await send([head, *parts])
    assert num_fed < 3 * limits.MAX_FRAMING_BYTES + max(map(len, parts))
    assert status_of(wire) == 400
    assert wire.closing
    assert not app.bodies


async def test_small_chunks_and_short_extensions_are_a_body() -> None:
    head = b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    wire, _, app = await send([head, b"1;a=b\r\nx\r\n" * 20_000, b"0\r\nX-Trailer: 1\r\n\r\n"])
    assert status_of(wire) == 200
    assert app.bodies == [20_000]


async def test_only_so_many_requests_wait_for_their_answers() -> None:
    app = App()
    app.gate = asyncio.Event()
    server = Server(app)
    connection, wire = server.connect()
    connection.data_received(b"GET / HTTP/1.1\r\n\r\n" * (limits.MAX_PIPELINED + 1))
    await settle()
    assert len(connection.pipeline) == limits.MAX_PIPELINED and not wire.closing
    connection.data_received(b"GET / HTTP/1.1\r\n\r\n")
    assert wire.closing and server.refused == [(400, None)]


async def test_pipelined_requests_are_answered_in_order() -> None:
    wire, _, app = await send([b"".join(b"GET /%d HTTP/1.1\r\n\r\n" % index for index in range(5))])
    assert app.paths == [f"/{index}" for index in range(5)]
    assert wire.sent.count(b"200 OK") == 5


async def test_every_request_of_a_connection_hears_of_its_end() -> None:
    num_told = 0

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_told
        while (await receive())["type"] != "http.disconnect":
            pass
        num_told += 1

    connection, _ = Server(wait).connect()
    connection.data_received(b"GET /1 HTTP/1.1\r\n\r\n")
    await settle()
    connection.data_received(b"GET /2 HTTP/1.1\r\n\r\n" * 3)
    connection.connection_lost(None)
    await settle()
    assert num_told == 1, "the first; those behind it never began"
    assert not connection.tasks


async def test_a_wrong_key_is_refused_before_the_body() -> None:
    app = App()
    connection, wire = Server(RequestMiddleware(app, AccessRules(api_key="secret"))).connect()
    head = b"POST /generate HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 60000000\r\n\r\n"
    connection.data_received(head)
    await settle()
    assert status_of(wire) == 401
    assert app.paths == []
    num_sent = 0
    while not wire.closing and num_sent < 60_000_000:  # whoever sends it all the same fills nothing
        connection.data_received(b"a" * 250_000)
        num_sent += 250_000
        while not (wire.reading or wire.closing):
            await asyncio.sleep(0)
    assert len(connection.cycle.body) == 0


async def test_what_follows_a_refusal_is_not_read_for_ever() -> None:
    connection, wire = Server(RequestMiddleware(App(), AccessRules(api_key="secret"))).connect()
    connection.data_received(b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    await settle()
    num_sent, chunk = 0, b"%x\r\n" % MIB + b"a" * MIB + b"\r\n"
    while not wire.closing:
        connection.data_received(chunk)
        num_sent += MIB
        while not (wire.reading or wire.closing):
            await asyncio.sleep(0)
    assert num_sent <= 2 * MAX_BODY_BYTES + MIB


async def test_all_large_bodies_together_are_limited() -> None:
    """64 clients that send 64 MiB each."""
    num_held = most_held = 0
    answers: list[int] = []
    gate = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_held, most_held
        mine = 0
        try:
            while True:
                message = await receive()
                mine += len(message["body"])
                num_held += len(message["body"])
                most_held = max(most_held, num_held)
                if not message["more_body"]:
                    break
            await gate.wait()
            answers.append(200)
        except RequestError as error:
            answers.append(error.status)
        finally:
            num_held -= mine

    door = RequestMiddleware(app, AccessRules())
    piece = bytes(MIB)

    async def client() -> None:
        num = 0

        async def receive() -> Message:
            nonlocal num
            await asyncio.sleep(0)
            num += 1
            return {"type": "http.request", "body": piece, "more_body": num < 64}

        async def send(message: Message) -> None:
            pass

        await door({"type": "http", "method": "POST", "path": "/generate", "headers": []}, receive, send)

    clients = [asyncio.ensure_future(client()) for _ in range(64)]
    while len(answers) < 60:
        await asyncio.sleep(0)
    assert set(answers) == {503}
    gate.set()
    await asyncio.gather(*clients)
    assert sorted(answers) == [200] * 4 + [503] * 60, "those that had come far enough are served"
    assert most_held <= MAX_BODIES_BYTES + 64 * (64 << 10)
    assert door.num_body_bytes == 0


# --- pace


async def test_a_connection_that_says_nothing_is_closed() -> None:
    server = Server(App())
    _, wire = server.connect()
    server.pass_time(limits.HEAD_TIMEOUT_S)
    assert not wire.closing
    server.pass_time(2)
    assert wire.closing
    assert wire.sent == b""


async def test_half_a_head_is_closed_however_it_drips() -> None:
    server = Server(App())
    connection, wire = server.connect()
    connection.data_received(b"GET /health HTTP/1.1\r\nX: ")
    for _ in range(int(limits.HEAD_TIMEOUT_S) + 2):
        if not wire.closing:
            connection.data_received(b"a")
            server.pass_time(1)
    await settle()
    assert wire.closing
    assert status_of(wire) == 408


async def test_the_second_request_of_a_connection_has_its_own_time() -> None:
    server = Server(App())
    connection, wire = server.connect()
    for _ in range(3):
        server.pass_time(limits.HEAD_TIMEOUT_S - 2)
        connection.data_received(b"GET /health HTTP/1.1\r\n\r\n")
        await settle()
    server.pass_time(50)
    assert not wire.closing, "an idle connection is the keep-alive time-out's"
    connection.data_received(b"GET /heal")
    server.pass_time(limits.HEAD_TIMEOUT_S)
    assert not wire.closing
    server.pass_time(2)
    assert wire.closing
    connection.connection_lost(None)


async def test_a_body_that_drips_is_closed_one_that_keeps_pace_is_not() -> None:
    app = App()
    server = Server(app)
    slow, slow_wire = server.connect()
    steady, steady_wire = server.connect()
    for connection in (slow, steady):
        connection.data_received(b"POST / HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n")
    for _ in range(300):
        if not slow_wire.closing:
            slow.data_received(b"a" * 100)
        steady.data_received(b"a" * 3000)
        await settle()
        server.pass_time(1)
    assert slow_wire.closing
    assert status_of(slow_wire) == 408
    assert not steady_wire.closing
    for connection in (slow, steady):
        connection.connection_lost(None)
    await settle()
    assert app.gone == 2


async def test_nobody_is_closed_while_the_server_works() -> None:
    app = App()
    app.gate = asyncio.Event()
    server = Server(app)
    connection, wire = server.connect()
    connection.data_received(b"GET / HTTP/1.1\r\n\r\nGET /next HT")
    await settle()
    server.pass_time(1000)
    assert not wire.closing
    app.gate.set()
    await settle()
    connection.data_received(b"TP/1.1\r\n\r\n")
    await settle()
    assert app.paths == ["/", "/next"]


async def test_the_server_looks_once_a_second() -> None:
    server = HttpServer(App(), resolve(ServerArgs(model_path="demo", device="cpu")))
    looks = []

    class Connection:
        transport = Wire()

        def check_pace(self) -> None:
            looks.append(counter)

    server.server_state.connections.add(Connection())  # type: ignore[arg-type]
    for counter in range(30):
        await server.on_tick(counter)
    assert looks == [0, 10, 20]


def test_probes_have_no_access_line_unless_they_fail() -> None:
    def is_written(path: str, status: int, level: int = logging.INFO) -> bool:
        logger = logging.getLogger("test.probes")
        logger.setLevel(level)
        values = ("1.2.3.4:5", "GET", path, "1.1", status)
        line = '%s - "%s %s HTTP/%s" %d'
        return is_worth_a_line(logger.makeRecord(logger.name, logging.INFO, "", 0, line, values, None))

    for path in ("/health", "/health_generate", "/metrics", "/live_state"):
        assert not is_written(path, 200)
        assert is_written(path, 503)
        assert is_written(path, 200, logging.DEBUG)
    assert is_written("/v1/models", 200) and is_written("/health/x", 404)
    HttpServer(App(), resolve(ServerArgs(model_path="demo", device="cpu")))
    assert is_worth_a_line in logging.getLogger("uvicorn.access").filters


async def test_an_access_line_is_written_at_the_next_tick(caplog: pytest.LogCaptureFixture) -> None:
    server = HttpServer(App(), resolve(ServerArgs(model_path="demo", device="cpu")))
    server.config.load()
    connection = server.config.http(config=server.config, server_state=server.server_state, app_state={})  # type: ignore
    wire = Wire()
    connection.connection_made(wire)
    with caplog.at_level(logging.INFO):
        before = time.time()
        connection.data_received(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        await settle()
        after = time.time()
        assert b"200 OK" in wire.sent and not caplog.messages, "the answer would wait for the log"
        await server.on_tick(1)
    assert [message.partition(" - ")[2] for message in caplog.messages] == ['"GET /v1/models HTTP/1.1" 200']
    assert before <= caplog.records[0].created <= after, "the time of the answer"


async def test_the_last_access_lines_are_written_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    app = App()
    app.gate = asyncio.Event()
    server = HttpServer(app, resolve(ServerArgs(model_path="demo", device="cpu")))
    sock = socket.create_server(("127.0.0.1", 0))
    with caplog.at_level(logging.INFO):
        serving = asyncio.ensure_future(server.serve(sockets=[sock]))
        while not server.started:
            await asyncio.sleep(0)
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        while not app.paths:
            await asyncio.sleep(0)
        server.should_exit = True
        while sock.fileno() >= 0:
            await asyncio.sleep(0.01)  # until the last tick is over
        app.gate.set()
        assert b"200 OK" in await reader.read()
        writer.close()
        await serving
    assert any('"GET /v1/models HTTP/1.1" 200' in message for message in caplog.messages)


async def test_who_takes_too_little_of_his_answer_is_dropped() -> None:
    server = Server(App())
    connection, wire = server.connect()
    connection.transport.write(b"a" * (1 << 20))
    await settle()
    wire.untaken = 1 << 20
    for _ in range(3):
        server.pass_time(limits.WRITE_PERIOD_S)
        wire.untaken -= limits.WRITE_PERIOD_BYTES
    assert not wire.aborted
    for _ in range(3):
        server.pass_time(limits.WRITE_PERIOD_S / 2)
        wire.untaken -= 1
    assert wire.aborted


async def test_a_stream_waits_for_its_reader() -> None:
    """What is generated meanwhile is merged where it is made; here nothing piles up."""
    num_sent = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while num_sent < 1000:
            await send({"type": "http.response.body", "body": b"a" * 10_000, "more_body": True})
            num_sent += 1
            await asyncio.sleep(0)

    connection, wire = Server(app).connect()
    connection.data_received(b"GET / HTTP/1.1\r\n\r\n")
    while num_sent < 10:
        await asyncio.sleep(0)
    connection.pause_writing()  # as the transport does beyond 64 KiB
    for _ in range(200):
        await asyncio.sleep(0)
    assert num_sent <= 11
    assert len(wire.sent) < 12 * 10_100
    connection.resume_writing()
    await settle()
    assert num_sent > 11
    connection.connection_lost(None)
    while num_sent < 1000:
        await asyncio.sleep(0)


# --- number of connections


@pytest.mark.parametrize(
    ("descriptors", "connections"), [(-1, MAX_CONNECTIONS), (1 << 20, MAX_CONNECTIONS), (1024, 896), (64, 32)]
)
def test_descriptors_are_kept_in_reserve(descriptors: int, connections: int) -> None:
    assert max_connections(descriptors) == connections


def test_the_descriptor_limit_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, values: asked.append(values))
    raise_descriptor_limit()
    assert asked == [(4096, 4096)]


def test_where_the_hard_limit_cannot_be_had_macos_own_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(kind: int, values: tuple[int, int]) -> None:
        asked.append(values)
        if values[0] > 10240:
            raise ValueError

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 2**63 - 1))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_descriptor_limit()
    assert asked[-1] == (10240, 2**63 - 1)
