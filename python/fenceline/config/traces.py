"""TracesConfig: where traces of requests are sent, from --otlp-traces-endpoint and the variables of OpenTelemetry."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from urllib.parse import urlsplit

from fenceline.config import require
from fenceline.config.server_args import ServerArgs

_OPTION = "--otlp-traces-endpoint"
_DEFAULT = "localhost:4317"  # of --enable-trace alone, as in SGLang
_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http",
}
_HTTP_PORT, _HTTP_PATH = 4318, "/v1/traces"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracesConfig:
    """``endpoint``: a URL. ``protocol``: ``grpc`` or ``http/protobuf``."""

    endpoint: str
    protocol: str


def traces_config(args: ServerArgs) -> TracesConfig | None:
    """None if requests are not traced. Raises ConfigError, one line with the remedy."""
    given = args.otlp_traces_endpoint or (_DEFAULT if args.enable_trace else None)
    if given is None:
        return None
    scheme, separator, rest = given.partition("://")
    url = given if separator else f"http://{given}"
    if scheme == "grpc" and separator:
        url = f"http://{rest}"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    require(
        parts.scheme in ("http", "https") and bool(host),
        f"{_OPTION} {given}: give the URL of a collector, such as http://localhost:4317 (gRPC) or"
        f" http://localhost:4318{_HTTP_PATH} (HTTP)",
    )
    by_http = scheme != "grpc" and (port == _HTTP_PORT or parts.path.endswith(_HTTP_PATH))
    variable, protocol = next(
        ((name, os.environ[name]) for name in _VARIABLES if os.environ.get(name)),
        ("", "http/protobuf" if by_http else "grpc"),
    )
    require(protocol in _EXPORTERS, f"{variable}={protocol}: use one of {', '.join(_EXPORTERS)}")
    if protocol == "http/protobuf" and parts.path in ("", "/"):
        url = url.rstrip("/") + _HTTP_PATH
    for module in ("opentelemetry.sdk.trace", _EXPORTERS[protocol]):
        require(
            _is_there(module),
            f"{_OPTION}: the packages of OpenTelemetry are not installed: pip install 'fenceline[otlp]'",
        )
    return TracesConfig(endpoint=url, protocol=protocol)


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # a package above it
        return False
