"""KVEventsConfig: where changes of the prefix cache are published, from --kv-events-config."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from fenceline.config import ConfigError, require
from fenceline.config.server_args import ServerArgs

_OPTION = "--kv-events-config"
_ENDPOINT = re.compile(r"tcp://[^/\s]+:[0-9]{1,5}|ipc://\S+")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """``endpoint`` and ``replay_endpoint``: of ZeroMQ, those of replica 0. ``buffer_steps``: batches of events that are
    kept for replay. ``hwm``: batches that may wait for a slow consumer before it loses some. ``max_queue_size``:
    batches that may wait until they are sent at all."""

    endpoint: str
    replay_endpoint: str | None
    buffer_steps: int
    hwm: int
    max_queue_size: int
    topic: str

    def of_replica(self, replica: int) -> KVEventsConfig:
        """The same for another replica, whose ports are higher by its number."""
        replay = self.replay_endpoint
        return replace(
            self,
            endpoint=_shifted(self.endpoint, replica),
            replay_endpoint=None if replay is None else _shifted(replay, replica),
        )


class _Given(msgspec.Struct, forbid_unknown_fields=True):
    """The flag's object. SGLang says by ``publisher`` whether events are published, vLLM by the first field."""

    enable_kv_cache_events: bool | None = None
    publisher: Literal["zmq", "null"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""


def kv_events_config(args: ServerArgs) -> KVEventsConfig | None:
    """None if no events are to be published. Raises ConfigError, one line with the remedy."""
    if args.kv_events_config is None:
        return None
    try:
        given = msgspec.json.decode(args.kv_events_config, type=_Given)
    except msgspec.MsgspecError as error:
        example = '\'{"publisher": "zmq", "endpoint": "tcp://*:5557"}\''
        raise ConfigError(f"{_OPTION}: {error}; give a JSON object such as {example}") from error
    publisher = given.publisher or ("zmq" if given.enable_kv_cache_events else "null")
    if publisher == "null" or given.enable_kv_cache_events is False:
        return None
    require(
        not args.disable_radix_cache,
        f"{_OPTION}: --disable-radix-cache keeps no prefixes that events could name: drop one of them",
    )
    for endpoint in filter(None, (given.endpoint, given.replay_endpoint)):
        require(
            _ENDPOINT.fullmatch(endpoint) is not None,
            f"{_OPTION}: {endpoint!r} is no endpoint: give tcp://*:PORT, tcp://HOST:PORT or ipc://PATH",
        )
        last = int(endpoint.rpartition(":")[2]) + args.dp_size - 1 if endpoint.startswith("tcp:") else 1
        require(0 < last < 1 << 16, f"{_OPTION}: {endpoint}: a port of each replica must be between 1 and 65535")
    require(given.endpoint != given.replay_endpoint, f"{_OPTION}: replay_endpoint needs a port of its own")
    for name in ("buffer_steps", "hwm", "max_queue_size"):
        require(0 < getattr(given, name) < 1 << 31, f"{_OPTION}: {name} must be a whole number above 0")
    return KVEventsConfig(
        endpoint=given.endpoint,
        replay_endpoint=given.replay_endpoint or None,
        buffer_steps=given.buffer_steps,
        hwm=given.hwm,
        max_queue_size=given.max_queue_size,
        topic=given.topic,
    )


def _shifted(endpoint: str, by: int) -> str:
    if by == 0:
        return endpoint
    if endpoint.startswith("ipc:"):
        return f"{endpoint}.{by}"
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + by}"
