"""KV events on their way: the socket of events, the replay of lost ones, and what the scheduler publishes."""

from __future__ import annotations

import dataclasses
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from kv_event_mirror import Mirror
from live_server import unused_port
from scheduler_driver import Driver, make_driver, make_model_driver, request

from fenceline.config import ConfigError
from fenceline.config.engine_config import resolve
from fenceline.config.kv_events import KVEventsConfig, kv_events_config
from fenceline.config.server_args import ServerArgs
from fenceline.ipc.io_struct import TOKENIZER_DECODER, FatalError, FlushCacheReq
from fenceline.ipc.mailbox import Inbox, make_ports, remove_ports
from fenceline.mem_cache.kv_events import KVEventBatch, KVEventLog, Medium, block_hash
from fenceline.scheduler import process as scheduler_process
from fenceline.scheduler.kv_event_publisher import KVEventPublisher
from fenceline.scheduler.process import run_scheduler_process
from fenceline.scheduler.request_memory import note_kv_events

PATIENCE_MS = 30_000
END = (-1).to_bytes(8, "big", signed=True)


class Consumer:
    """What subscribes to a publisher and asks it for replays."""

    def __init__(self, config: KVEventsConfig, hwm: int = 0) -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.set(zmq.RCVHWM, hwm)
        self.sub.connect(config.endpoint)
        self.sub.subscribe(config.topic)
        assert config.replay_endpoint is not None
        self.replay = self.context.socket(zmq.DEALER)
        self.replay.connect(config.replay_endpoint)

    def receive(self) -> tuple[int, bytes]:
        assert self.sub.poll(PATIENCE_MS), "no event comes"
        topic, number, payload = self.sub.recv_multipart()
        assert topic == b"kv@test"
        return int.from_bytes(number, "big"), payload

    def replayed(self, first: int) -> dict[int, bytes]:
        """The batches from ``first`` on that the publisher has kept."""
        self.replay.send_multipart([b"", first.to_bytes(8, "big")])
        found: dict[int, bytes] = {}
        while True:
            assert self.replay.poll(PATIENCE_MS), "the replay does not end"
            empty, _, number, payload = self.replay.recv_multipart()
            assert empty == b""
            if number == END:
                return found
            found[int.from_bytes(number, "big")] = payload


@pytest.fixture
def config(tmp_path: Path) -> KVEventsConfig:
    return KVEventsConfig(
        endpoint=f"ipc://{tmp_path}/events",
        replay_endpoint=f"ipc://{tmp_path}/replay",
        buffer_steps=1000,
        hwm=1000,
        max_queue_size=1000,
        topic="kv@test",
    )


@pytest.fixture
def closing() -> Iterator[list[KVEventPublisher | Consumer]]:
    opened: list[KVEventPublisher | Consumer] = []
    yield opened
    for each in reversed(opened):
        if isinstance(each, Consumer):
            each.context.destroy(0)
        else:
            each.close()


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def note(log: KVEventLog, number: int, num_tokens: int = 4) -> None:
    """A page is stored."""
    log.stored(Medium.GPU, log.run([key(number)], np.full(num_tokens, 7, np.int32), None, ""))


def test_a_late_consumer_replays_what_it_has_missed(
    config: KVEventsConfig, closing: list[KVEventPublisher | Consumer]
) -> None:
    log = KVEventLog(4)
    publisher = KVEventPublisher(config, log)
    closing.append(publisher)
    for number in range(100):
        note(log, number)
        publisher.publish()
    publisher.publish()  # there is nothing, and no batch
    first = Consumer(config)
    closing.append(first)
    assert list(first.replayed(0)) == list(range(100)), "they have been sent before the late one comes"
    consumer = Consumer(config)
    closing.append(consumer)
    number, seen = 100, None
    while seen is None:  # until the subscription has arrived
        note(log, number)
        publisher.publish()
        number += 1
        if consumer.sub.poll(20):
            seen = consumer.receive()
    assert seen[0] >= 100, "it has missed those before it came"
    missed = consumer.replayed(0)
    mirror = Mirror()
    for batch in range(seen[0]):
        mirror.apply(missed[batch])
    mirror.apply(seen[1])
    for batch in range(seen[0] + 1, number):
        received, payload = consumer.receive()
        assert received == batch
        mirror.apply(payload)
    assert mirror.media["GPU"] == set(range(number))
    assert consumer.replayed(number) == {}


def test_a_slow_consumer_loses_and_nobody_waits_for_it(
    config: KVEventsConfig, closing: list[KVEventPublisher | Consumer]
) -> None:
    """Its gap is filled by a replay, as far back as batches are kept."""
    config = dataclasses.replace(config, hwm=1, buffer_steps=50)
    log = KVEventLog(1 << 16)
    publisher = KVEventPublisher(config, log)
    closing.append(publisher)
    consumer = Consumer(config, hwm=1)
    closing.append(consumer)
    number = 0
    while not consumer.sub.poll(20):
        note(log, number, 1 << 16)
        publisher.publish()
        number += 1
    last = number + 200
    while number < last:  # it does not read
        note(log, number, 1 << 16)
        publisher.publish()
        number += 1
    kept = consumer.replayed(0)  # after all others, since one thread sends
    assert list(kept) == list(range(last - 50, last))
    received = []
    while consumer.sub.poll(200):
        received.append(consumer.receive()[0])
    assert received == sorted(received) and len(received) < last - 50


def test_a_batch_that_cannot_wait_any_longer_leaves_a_gap(
    config: KVEventsConfig, closing: list[KVEventPublisher | Consumer]
) -> None:
    log = KVEventLog(4)
    publisher = KVEventPublisher(dataclasses.replace(config, max_queue_size=2), log)
    closing.append(publisher)
    consumer = Consumer(config)
    closing.append(consumer)
    consumer.replayed(0)
    ring, publisher._ring = publisher._ring, lambda: None  # type: ignore[method-assign]
    for number in range(5):
        note(log, number)
        publisher.publish()
    publisher._ring = ring  # type: ignore[method-assign]
    ring()
    while len(kept := consumer.replayed(0)) < 2:
        pass
    assert list(kept) == [3, 4]


def test_a_stranger_takes_no_memory(config: KVEventsConfig, closing: list[KVEventPublisher | Consumer]) -> None:
    """Whoever sends more than a request has is disconnected before it is all received."""
    log = KVEventLog(4)
    closing.append(KVEventPublisher(config, log))
    stranger, consumer = Consumer(config), Consumer(config)
    closing.extend((stranger, consumer))
    ended = stranger.replay.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    stranger.replay.send_multipart([b"", bytes(1 << 20)])
    assert ended.poll(PATIENCE_MS), "it stays connected"
    stranger.replay.disable_monitor()
    assert consumer.replayed(0) == {}


def test_a_file_and_a_socket_in_use_are_not_replaced(
    config: KVEventsConfig, closing: list[KVEventPublisher | Consumer], tmp_path: Path
) -> None:
    closing.append(KVEventPublisher(config, KVEventLog(4)))
    (tmp_path / "notes").write_text("mine")
    for path in ("events", "notes"):
        with pytest.raises(ConfigError, match=f"cannot use ipc://{tmp_path}/{path} .*name one that is free"):
            KVEventPublisher(dataclasses.replace(config, endpoint=f"ipc://{tmp_path}/{path}"), KVEventLog(4))
    assert (tmp_path / "notes").read_text() == "mine"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "left"))  # by a server that died
    again = dataclasses.replace(config, endpoint=f"ipc://{tmp_path}/left", replay_endpoint=None)
    closing.append(KVEventPublisher(again, KVEventLog(4)))


def test_replicas_have_ports_of_their_own(closing: list[KVEventPublisher | Consumer]) -> None:
    port = unused_port()
    config = kv_events_config(args(f'{{"publisher": "zmq", "endpoint": "tcp://*:{port}", "topic": "kv@test"}}', 2))
    assert config is not None
    publisher = KVEventPublisher(config, KVEventLog(4), replica=1)
    closing.append(publisher)
    assert publisher._pub.get(zmq.LAST_ENDPOINT).rstrip(b"\0").endswith(f":{port + 1}".encode())
    with pytest.raises(ConfigError, match=f"cannot use tcp://\\*:{port + 1} .*name one that is free"):
        KVEventPublisher(config, KVEventLog(4), replica=1)


def test_a_scheduler_whose_port_is_taken_prints_no_traceback(
    closing: list[KVEventPublisher | Consumer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = resolve(args(f'{{"publisher": "zmq", "endpoint": "tcp://*:{unused_port()}"}}', device="cpu"))
    assert config.kv_events is not None
    closing.append(KVEventPublisher(config.kv_events, KVEventLog(4)))
    monkeypatch.setattr(scheduler_process, "prepare_child", lambda *args: None)
    ports = make_ports()
    inbox = Inbox(ports.tokenizer, TOKENIZER_DECODER)
    try:
        with pytest.raises(SystemExit):
            run_scheduler_process(config, ports)
        assert inbox.wait(PATIENCE_MS)
        [fatal] = inbox.receive()
        assert isinstance(fatal, FatalError) and "name one that is free" in fatal.message
    finally:
        inbox.close()
        remove_ports(ports)
    [line] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert line.getMessage() == "the scheduler has failed" and not line.exc_info


def args(text: str, dp_size: int = 1, **flags: object) -> ServerArgs:
    return ServerArgs(model_path="demo", kv_events_config=text, dp_size=dp_size, **flags)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "publishes"),
    [
        ('{"publisher": "zmq"}', True),  # SGLang
        ('{"enable_kv_cache_events": true}', True),  # vLLM
        ('{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv-events"}', True),
        ('{"enable_kv_cache_events": false, "publisher": "zmq"}', False),
        ('{"publisher": "null"}', False),
        ("{}", False),
    ],
)
def test_both_servers_ways_to_say_so(text: str, publishes: bool) -> None:
    config = kv_events_config(args(text))
    assert (config is not None) is publishes
    if config is not None:
        assert (config.endpoint, config.buffer_steps, config.hwm) == ("tcp://*:5557", 10_000, 100_000)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("zmq", "JSON is malformed"),
        ('{"publisher": "kafka"}', "Invalid enum value 'kafka'"),
        ('{"publisher": "zmq", "end_point": "x"}', "unknown field `end_point`"),
        ('{"publisher": "zmq", "endpoint": "5557"}', "'5557' is no endpoint: give tcp://"),
        ('{"publisher": "zmq", "endpoint": "tcp://*:65536"}', "between 1 and 65535"),
        ('{"publisher": "zmq", "replay_endpoint": "tcp://*:5557"}', "a port of its own"),
        ('{"publisher": "zmq", "hwm": 0}', "hwm must be a whole number above 0"),
    ],
)
def test_a_wrong_configuration_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        kv_events_config(args(text))
    assert str(caught.value).startswith("--kv-events-config: ") and "\n" not in str(caught.value)


def test_without_a_prefix_cache_there_is_nothing_to_publish() -> None:
    with pytest.raises(ConfigError, match="--disable-radix-cache keeps no prefixes"):
        kv_events_config(args('{"publisher": "zmq"}', disable_radix_cache=True))


class Watched:
    """A driver of a scheduler, and a mirror that hears of each of its steps."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.mirror = driver, Mirror()
        self.log = KVEventLog(driver.config.server_args.page_size)
        note_kv_events(self.log, driver.config, driver.scheduler.memory)
        driver.scheduler.kv_events = self  # type: ignore[assignment]

    def publish(self) -> None:
        batch = KVEventBatch(0.0, [self.log.event(note) for note in self.log.take()], 0)
        self.mirror.apply(msgspec.msgpack.encode(batch))

    def close(self) -> None:
        pass

    def answer(self, rid: str, prompt: list[int], extra_key: str = "") -> None:
        self.driver.send(request(rid, prompt, extra_key=extra_key, max_new_tokens=4, temperature=0.0, ignore_eos=True))
        self.driver.run(max_steps=100_000)
        while self.driver.scheduler.memory.num_outstanding:
            self.driver.step()

    def flush(self, storage: bool = False) -> None:
        self.driver.send(FlushCacheReq(id="flush", storage=storage))
        self.driver.step()


def test_a_server_on_one_tier() -> None:
    """Evictions for lack of room, prefixes of a namespace, and the end of all by a flush."""
    watched = Watched(make_driver(num_pages=24, page_size=4))
    for turn in range(12):
        watched.answer(f"r{turn}", list(range(5 + turn, 37 + turn)), "tenant" if turn % 3 == 0 else "")
        tree = watched.driver.scheduler.memory.tree
        there = {block_hash(key) for node in tree._nodes() for key in tree.keys(node)}
        assert watched.mirror.media["GPU"] == there and there
    assert watched.driver.scheduler.memory.num_evicted_pages > 0
    watched.flush()
    assert not any(watched.mirror.media.values())


def test_a_server_on_three_tiers(tmp_path: Path) -> None:
    """What is on the disk is what the directory has, also when it is full, and after a flush that keeps it."""
    driver = make_model_driver(
        max_total_tokens=60 * 16,
        enable_hierarchical_cache=True,
        hicache_ratio=2.0,
        hicache_storage_backend="file",
        hicache_storage_dir=str(tmp_path),
        hicache_storage_size=60 * 33_000 / 1e9,
    )
    watched = Watched(driver)
    media = watched.mirror.media

    def on_disk() -> set[int]:
        return {block_hash(bytes.fromhex(path.stem)) for path in tmp_path.rglob("*.page")}

    try:
        for turn in range(5):
            watched.answer(f"r{turn}", [5 + (turn * token) % 190 for token in range(400)])
            assert media["DISK"] == on_disk()
            tree = driver.scheduler.memory.tree
            nodes = {block_hash(key): node for node in tree._nodes() for key in tree.keys(node)}
            assert media["GPU"] == {block for block, node in nodes.items() if node.on_device}
            assert media["CPU_PINNED"] == {block for block, node in nodes.items() if node.host_pages is not None}
        assert driver.scheduler.memory.tiers is not None and driver.scheduler.memory.tiers.storage is not None
        assert driver.scheduler.memory.tiers.storage.stats().backend.evictions > 0
        watched.flush()
        assert media == {"GPU": set(), "CPU_PINNED": set(), "DISK": on_disk()} and on_disk()
        watched.answer("again", [5 + 4 * token % 190 for token in range(400)])  # computed, or read and written again
        assert media["DISK"] == on_disk()
        watched.flush(storage=True)
        watched.answer("last", list(range(5, 60)))
        assert media["DISK"] == on_disk() and len(on_disk()) == 3
    finally:
        driver.scheduler.close()
