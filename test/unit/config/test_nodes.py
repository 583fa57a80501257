"""Several hosts as one server: what they must have in common, and how they hear of each other."""

from __future__ import annotations

import multiprocessing
import signal
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

import fenceline
from fenceline.config import ConfigError
from fenceline.config.engine_config import EngineConfig, resolve
from fenceline.config.nodes import agreed, described
from fenceline.config.server_args import ServerArgs
from fenceline.entrypoints.launch import EngineBackend, EngineProcesses
from fenceline.ipc.io_struct import TOKENIZER_DECODER, FatalError, PortArgs
from fenceline.ipc.mailbox import Inbox
from fenceline.ipc.node_link import AddressError, NodeListener, NodePeers, own_address, own_interface, tell_nodes
from fenceline.ipc.rank_board import RankBoard, create_rank_board

ADDRESS = "127.0.0.1:20000"


def config(node: int, **flags: object) -> EngineConfig:
    values = {"page_size": 16, "tp_size": 2, "nnodes": 2, "node_rank": node, "dist_init_addr": ADDRESS} | flags
    return resolve(ServerArgs(model_path=fenceline.demo_model_path(), device="cpu", **values))  # type: ignore[arg-type]


def test_nodes_take_the_seed_of_node_0(tmp_path: Path) -> None:
    nodes = [config(0, port=1, random_seed=5), config(1, port=2, random_seed=6, flight_recorder_dir=str(tmp_path))]
    told = [described(each) for each in nodes]
    assert [agreed(each, told).random_seed for each in nodes] == [5, 5]
    assert [list(each.local_ranks) for each in nodes] == [[0], [1]]


@pytest.mark.parametrize("flag", [{"page_size": 8}, {"max_running_requests": 7}, {"schedule_policy": "lpm"}])
def test_nodes_that_were_started_differently_refuse(flag: dict[str, object]) -> None:
    nodes = [config(0), config(1, **flag)]
    told = [described(each) for each in nodes]
    for each in nodes:
        with pytest.raises(ValueError, match=f"node 1 and node 0 differ in {next(iter(flag))} "):
            agreed(each, told)


def test_the_address_and_interface_lead_to_node_0() -> None:
    assert own_address(ADDRESS) == "127.0.0.1" and own_interface("127.0.0.1").startswith("lo")
    with pytest.raises(AddressError, match="no network interface has the address 203.0.113.9"):
        own_interface("203.0.113.9")
    with pytest.raises(AddressError, match="--dist-init-addr 1.2.3.999:5: 1.2.3.999 cannot be reached"):
        own_address("1.2.3.999:5")


class Node:
    """A node's listener, its board and the socket of its main process."""

    def __init__(self, number: int, folder: Path, timeout_s: float) -> None:
        folder.mkdir()
        self.ports = PortArgs(
            scheduler=f"ipc://{folder}/scheduler", detokenizer="", tokenizer=f"ipc://{folder}/tokenizer"
        )
        create_rank_board(self.ports, 2)
        self.main = Inbox(self.ports.tokenizer, TOKENIZER_DECODER)
        self.board = RankBoard(self.ports, number, 2)
        copy = RankBoard(self.ports, number, 2, range(number, number + 1))
        self.listener = NodeListener(self.ports, copy, "127.0.0.1", number, timeout_s)

    def told(self) -> str:
        """Why the server ends, once this node's main process is told."""
        assert self.main.wait(60_000)
        (message,) = self.main.receive()
        assert isinstance(message, FatalError)
        return f"{message.source}: {message.message}"


def test_what_one_node_posts_the_other_reads(tmp_path: Path) -> None:
    nodes = [Node(number, tmp_path / str(number), 1e6) for number in range(2)]
    endpoints = [node.listener.endpoint for node in nodes]
    tell_nodes(nodes[0].ports, "nobody has met yet")
    for node in nodes:
        node.listener.start(endpoints)
    nodes[1].board.mirror = NodePeers(endpoints[:1]).write
    nodes[0].board.post_arrived(9)
    nodes[1].board.post_arrived(4)
    nodes[1].board.post_news([(1, 2, 3)])
    while nodes[0].board.all_arrived() != 4:
        pass  # the listener is a thread of this process
    tell_nodes(nodes[1].ports, "node 1: its rank has ended")
    assert nodes[0].told() == "node 0: node 1: its rank has ended"
    assert nodes[0].board.read_news(1) == [(1, 2, 3)]


def test_a_node_that_is_ended_by_force_tells_the_others(tmp_path: Path) -> None:
    """Asked to stop, a scheduler that does not in time is killed; other hosts' ranks may be waiting for it."""
    nodes = [Node(number, tmp_path / str(number), 1e6) for number in range(2)]
    endpoints = [node.listener.endpoint for node in nodes]
    for node in nodes:
        node.listener.start(endpoints)
    (tmp_path / "0" / "nodes").write_bytes(msgspec.msgpack.encode(endpoints[1:]))
    scheduler = multiprocessing.get_context("fork").Process(target=signal.pause, name="scheduler")
    scheduler.start()
    link = SimpleNamespace()
    EngineProcesses([scheduler], nodes[0].ports, link, 60.0).stop(0.1)  # type: ignore[arg-type]
    assert not scheduler.is_alive()
    assert "node 1: the scheduler of another host has been ended by force" in nodes[1].told()


def test_an_engine_is_node_0() -> None:
    """It would wait for ever for answers that go to another host."""
    flags = {"tp_size": 2, "nnodes": 2, "node_rank": 1, "dist_init_addr": ADDRESS, "device": "cpu"}
    with pytest.raises(ConfigError, match="node_rank=1: an Engine answers on node 0; start this node by python -m"):
        fenceline.Engine(model_path=fenceline.demo_model_path(), launch=never_launched, **flags)


def never_launched(config: EngineConfig) -> EngineBackend:
    raise AssertionError("processes were started")


def test_a_node_of_which_nothing_is_heard_ends_the_server(tmp_path: Path) -> None:
    node = Node(0, tmp_path / "0", 0.5)
    node.listener.start([node.listener.endpoint, "tcp://127.0.0.1:9"])
    assert "node 0: nothing was heard of node 1 for 0.5 s (--watchdog-timeout)" in node.told()


def test_what_a_rank_wrote_and_did_not_arrive_ends_the_server(tmp_path: Path) -> None:
    """ZeroMQ makes a broken connection again, and what was under way is lost: the board would stay behind."""
    node = Node(0, tmp_path / "0", 1e6)
    node.listener.start([node.listener.endpoint])
    peers = NodePeers([node.listener.endpoint])
    board = RankBoard(node.ports, 1, 2)
    board.mirror = peers.write
    board.post_arrived(1)
    with pytest.MonkeyPatch.context() as lost:
        lost.setattr(peers.outbox, "send", lambda *_: None)
        board.post_arrived(2)
    board.post_arrived(3)
    assert node.told() == "node 0: rank 1 has written what did not arrive: the network fails"
    peers.outbox.close()
