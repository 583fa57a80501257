"""Images are fetched from named hosts at public addresses only, and an answer cannot lead anywhere else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from fenceline.frontend import image_fetch
from fenceline.frontend.image_fetch import fetch, is_public

HOST = "images.example.org"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nimage"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("fd00:ec2::254", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:169.254.169.254", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::5db8:d822", True),
        ("64:ff9b:1::7f00:1", False),
        ("::127.0.0.1", False),
        ("2002:7f00:1::", False),
        ("2001:0:7f00:1::", False),
    ],
)
def test_public_addresses(address: str, expected: bool) -> None:
    assert is_public(address) is expected


@asynccontextmanager
async def _server(answer: bytes, pause: bool = False) -> AsyncIterator[tuple[int, list[bytes]]]:
    asked: list[bytes] = []
    release = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        if pause:
            await release.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], asked
    finally:
        release.set()
        server.close()


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name is known, and this machine counts as public. Lists the names that are resolved."""
    names: list[str] = []

    async def resolve(_: object, host: str, port: int, **__: object) -> list[tuple[object, ...]]:
        names.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)
    monkeypatch.setattr(image_fetch, "is_public", lambda _: True)
    return names


@pytest.mark.parametrize(
    "answer",
    [
        OK,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nim\r\n3\r\nage\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Type: image/png\r\n\r\nimage",
    ],
)
async def test_an_image_is_fetched_as_it_is(public: list[str], answer: bytes) -> None:
    async with _server(answer) as (port, asked):
        assert await fetch(f"http://{HOST.upper()}:{port}/a/b.png?x=1#y", {HOST}) == b"image"
    assert asked[0].startswith(f"GET /a/b.png?x=1 HTTP/1.1\r\nHost: {HOST}:{port}\r\n".encode())
    assert public == [HOST]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\n\r\n", "status 302, and redirects are not followed"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "is answered with status 404"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nimage", "broke off"),
        (b"", "broke off"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "cannot be fetched"),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n", "cannot be fetched"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", "more than"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(100_000), "more than"),
    ],
)
async def test_what_is_no_answer_is_refused(
    public: list[str], monkeypatch: pytest.MonkeyPatch, answer: bytes, reason: str
) -> None:
    monkeypatch.setattr(image_fetch, "MAX_BYTES", 1000)
    async with _server(answer) as (port, asked):
        with pytest.raises(ValueError, match=reason):
            await fetch(f"http://{HOST}:{port}/a.png", {HOST})
    assert len(asked) == 1


async def test_a_host_that_does_not_answer_in_time_is_given_up(
    public: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_fetch, "FETCH_S", 0.2)
    async with _server(OK[:-1], pause=True) as (port, _):
        with pytest.raises(ValueError, match=f"{HOST} did not send it within 0.2 s"):
            await fetch(f"http://{HOST}:{port}/a.png", {HOST})


async def test_this_machine_is_not_asked() -> None:
    async with _server(OK) as (port, asked):
        for url in (f"http://localhost:{port}/", f"http://127.0.0.1:{port}/", f"http://[::ffff:7f00:1]:{port}/"):
            with pytest.raises(ValueError, match="not at a public address"):
                await fetch(url, {"localhost", "127.0.0.1", "::ffff:7f00:1"})
    assert asked == []


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda port: f"http://example.com:{port}/", "not fetched from 'example.com'"),
        (lambda port: f"http://{HOST}.evil.org:{port}/", "not fetched from"),
        (lambda port: f"http://{HOST}@127.0.0.1:{port}/", "has a user name"),
        (lambda port: f"http://user:x@{HOST}:{port}/", "has a user name"),
        (lambda port: f"http://127.0.0.1:{port}\\@{HOST}/", "printable ASCII"),
        (lambda port: f"http://{HOST}:{port}/\r\nX: y", "printable ASCII"),
        (lambda port: f"http://{HOST}:99999/", "its URL is none"),
        (lambda port: f"http://{HOST}:{port}/" + "a" * 5000, "at most 4096"),
        (lambda port: f"http:///{HOST}:{port}/", "not fetched from ''"),
    ],
)
async def test_other_hosts_are_not_asked(public: list[str], make: Callable[[int], str], reason: str) -> None:
    async with _server(OK) as (port, asked):
        with pytest.raises(ValueError, match=reason):
            await fetch(make(port), {HOST})
    assert asked == [] and public == []
