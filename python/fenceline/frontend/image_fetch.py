"""Fetches an image over HTTP without being led anywhere else: from hosts that --allowed-media-domains names, at public
addresses to which the name is resolved once, without redirects, with limits on bytes and time."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
import ssl
from collections.abc import Collection
from urllib.parse import SplitResult, urlsplit

import httptools

from fenceline.images.header import MAX_BYTES

FETCH_S = 10.0  # name, connection, head and body together
MAX_URL_CHARS = 4096
_MAX_HEAD_BYTES = 64 << 10
_READ_BYTES = 1 << 16
_PORTS = {"http": 80, "https": 443}


async def fetch(url: str, domains: Collection[str]) -> bytes:
    """The file at ``url``. Raises ValueError with the reason."""
    target, host, port = _target(url, domains)
    try:
        async with asyncio.timeout(FETCH_S):
            address = await _public_address(host, port)
            return await _get(target, host, port, address)
    except TimeoutError:
        raise ValueError(f"{host} did not send it within {FETCH_S:g} s") from None
    except (OSError, httptools.HttpParserError, httptools.HttpParserUpgrade) as error:  # ssl's errors are OSErrors
        raise ValueError(f"it cannot be fetched from {host} ({type(error).__name__})") from None


def _target(url: str, domains: Collection[str]) -> tuple[SplitResult, str, int]:
    if len(url) > MAX_URL_CHARS or not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise ValueError(f"its URL must be of at most {MAX_URL_CHARS} printable ASCII characters")
    try:
        target = urlsplit(url)
        host, port = (target.hostname or "").rstrip("."), target.port
    except ValueError as error:
        raise ValueError(f"its URL is none ({error})") from None
    if target.username is not None or target.password is not None:
        raise ValueError("its URL has a user name")
    if host not in domains:
        raise ValueError(f"images are not fetched from {host[:128]!r}, which --allowed-media-domains does not name")
    return target, host, _PORTS[target.scheme] if port is None else port


async def _public_address(host: str, port: int) -> str:
    """The address to connect to. Whoever owns the name may answer differently the next time: it is not asked again."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(each[4][0]) for each in found]
    if not addresses or not all(map(is_public, addresses)):
        raise ValueError(f"{host} is not at a public address")
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether ``address`` is one of the public network, also where it embeds another."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if ip not in _UNICAST:
            return False
    return ip.is_global and not ip.is_multicast


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_UNICAST = ipaddress.IPv6Network("2000::/3")  # all that is assigned to the public network


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()  # reads all certificates


async def _get(target: SplitResult, host: str, port: int, address: str) -> bytes:
    tls = _tls() if target.scheme == "https" else None
    reader, writer = await asyncio.open_connection(address, port, ssl=tls, server_hostname=host if tls else None)
    try:
        path = (target.path or "/") + (f"?{target.query}" if target.query else "")
        name = host if port == _PORTS[target.scheme] else f"{host}:{port}"
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: {name}\r\nAccept: image/*\r\nAccept-Encoding: identity\r\n"
            "Connection: close\r\n\r\n".encode("ascii")
        )
        answer, num_bytes = _Answer(), 0
        parser = httptools.HttpResponseParser(answer)
        while not answer.is_whole and (data := await reader.read(_READ_BYTES)):
            parser.feed_data(data)
            num_bytes += len(data)
            if num_bytes > MAX_BYTES + _MAX_HEAD_BYTES:
                raise ValueError(f"its file has more than {MAX_BYTES >> 20} MiB")
            if answer.has_head and (status := parser.get_status_code()) != 200:
                moved = ", and redirects are not followed" if 300 <= status < 400 else ""
                raise ValueError(f"its URL is answered with status {status}{moved}")
        if not answer.has_head or not (answer.is_whole or answer.ends_with_connection):
            raise ValueError(f"{host} broke off before it was whole")
        return bytes(answer.body)
    finally:
        writer.transport.abort()


class _Answer:
    """Called by the parser."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.has_head = self.is_whole = False
        self.ends_with_connection = True  # unless its head says how long it is

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self.ends_with_connection = False

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.is_whole = True
