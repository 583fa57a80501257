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


@pytest.fixture(scope="session")
def tools_server() -> Iterator[LiveServer]:
    """The server with the model that calls tools, shared by the tests of clients."""
    flags = ["--constrained-json-whitespace-pattern", "", "--max-total-tokens", "8192", "--enable-cache-report"]
    with LiveServer.real("--model-path", "demo-tools", "--device", "cpu", *flags) as live:
        yield live.wait_ready()
