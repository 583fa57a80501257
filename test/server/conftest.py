"""Live servers for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from live_server import LiveServer


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    """The real server over the fake scheduler, shared by tests that leave it as they found it."""
    with LiveServer.fake("--enable-metrics", "--enable-cache-report") as live:
        yield live.wait_ready()


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    """An HTTP client of :func:`server`."""
    with server.client() as client:
        yield client
