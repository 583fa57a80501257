"""Messages between the hosts (nodes) of one server apart from collective operations, over TCP.

On each node the process of its first rank listens. It writes what ranks of other nodes post into its node's copy of the
RankBoard, passes on why a node fails, and detects nodes that are silent: all nodes send a heartbeat twice a second.
Addresses are exchanged when the ranks have met. There is no authentication: the network must be private.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from fenceline.config import ConfigError
from fenceline.ipc.child_process import Silence
from fenceline.ipc.io_struct import FatalError, PortArgs, encode
from fenceline.ipc.mailbox import Inbox, Outbox
from fenceline.ipc.rank_board import RankBoard, rank_of

HEARTBEAT_S = 0.5


class BoardWrite(msgspec.Struct, frozen=True, tag=True):
    """Bytes that a rank has written to its line of the board, as its ``number``-th write, from 1 on."""

    at: int
    data: bytes
    number: int


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """``node`` runs."""

    node: int


class NodeFailed(msgspec.Struct, frozen=True, tag=True):
    """A node ends, for this reason, and with it the server."""

    reason: str


_DECODER: msgspec.msgpack.Decoder[BoardWrite | Heartbeat | NodeFailed] = msgspec.msgpack.Decoder(
    BoardWrite | Heartbeat | NodeFailed
)
_ENCODER = msgspec.msgpack.Encoder()


class AddressError(ConfigError):
    """An address that leads nowhere, with the remedy."""


def own_address(dist_init_addr: str) -> str:
    """This host's address on the network on which it reaches ``dist_init_addr`` ("host:port")."""
    host, _, port = dist_init_addr.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise AddressError(
            f"--dist-init-addr {dist_init_addr}: {host} cannot be reached ({error}); give an IPv4 address of node 0"
        ) from error


def own_interface(address: str) -> str:
    """The name of the network interface that has ``address``."""
    for name, found in psutil.net_if_addrs().items():
        if any(each.address == address for each in found):
            return str(name)
    raise AddressError(f"no network interface has the address {address}")


class NodePeers:
    """The listeners of the other nodes. Sending never blocks."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._endpoints = endpoints
        self._num_writes = 0
        self.outbox = Outbox(*endpoints)

    def write(self, at: int, data: bytes) -> None:
        """Have the other nodes' boards show what this rank has written to its own."""
        self._num_writes += 1
        self.send(BoardWrite(at, data, self._num_writes))

    def send(self, message: BoardWrite | Heartbeat | NodeFailed) -> None:
        data = _ENCODER.encode(message)
        for endpoint in self._endpoints:
            self.outbox.send(endpoint, data)


class NodeListener:
    """The thread of a node's first rank, with sockets of its own. It ends when a node fails."""

    def __init__(self, ports: PortArgs, board: RankBoard, address: str, node: int, timeout_s: float) -> None:
        """Listens on ``address``. ``board``: a view of its own, on which it writes. A node that is silent for
        ``timeout_s`` has failed."""
        self._inbox = Inbox(f"tcp://{address}:*", _DECODER)
        self.endpoint = self._inbox.endpoint
        self._ports = ports
        self._board = board
        self._node = node
        self._timeout_s = timeout_s

    def start(self, endpoints: Sequence[str]) -> None:
        """``endpoints``: all nodes', in their order."""
        others = {node: endpoint for node, endpoint in enumerate(endpoints) if node != self._node}
        _peers_file(self._ports).write_bytes(_ENCODER.encode(list(others.values())))
        threading.Thread(target=self._run, args=(others,), name="nodes", daemon=True).start()

    def _run(self, others: Mapping[int, str]) -> None:
        peers = NodePeers(list(others.values()))
        silences = {other: Silence(2 * HEARTBEAT_S) for other in others}
        heartbeats = dict.fromkeys(others, 0)
        num_writes: Counter[int] = Counter()  # of each rank
        next_heartbeat = 0.0
        while True:
            if (now := time.monotonic()) >= next_heartbeat:
                next_heartbeat = now + HEARTBEAT_S
                peers.send(Heartbeat(self._node))
                for other, silence in silences.items():
                    if silence.look(heartbeats[other], now) > self._timeout_s:
                        self._tell(
                            f"nothing was heard of node {other} for {self._timeout_s:g} s (--watchdog-timeout): it has"
                            " ended, or the network fails"
                        )
                        return
            if not self._inbox.wait(HEARTBEAT_S * 1000):
                continue
            for message in self._inbox.receive():
                match message:
                    case BoardWrite():
                        rank = rank_of(message.at)
                        if message.number != num_writes[rank] + 1:  # the connection broke and was made again
                            self._tell(f"rank {rank} has written what did not arrive: the network fails")
                            return
                        num_writes[rank] += 1
                        self._board.copy_write(message.at, message.data)
                    case Heartbeat():
                        if message.node in heartbeats:
                            heartbeats[message.node] += 1
                    case NodeFailed():
                        self._tell(message.reason)
                        return

    def _tell(self, reason: str) -> None:
        """This node's main process ends the server, or its part of it."""
        main = Outbox(self._ports.tokenizer)
        main.send(self._ports.tokenizer, encode(FatalError(source=f"node {self._node}", message=reason)))
        main.close()


def tell_nodes(ports: PortArgs, reason: str) -> None:
    """From a main process: this node ends for this reason. Nobody is told before the ranks have met."""
    try:
        endpoints = msgspec.msgpack.decode(_peers_file(ports).read_bytes(), type=list[str])
    except FileNotFoundError:
        return
    peers = NodePeers(endpoints)
    peers.send(NodeFailed(reason))
    peers.outbox.close()


def _peers_file(ports: PortArgs) -> Path:
    return Path(ports.scheduler.removeprefix("ipc://")).with_name("nodes")
