"""What is sent arrives whole, once and in order, whenever and however slowly its reader reads."""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fenceline.frontend.scheduler_link import SocketLink
from fenceline.ipc.io_struct import ControlReply, PortArgs, encode
from fenceline.ipc.mailbox import MAX_DRAINED_BYTES, Inbox, Outbox, make_ports, remove_ports

LARGE = 3 << 20  # more than a socket holds
BYTES = msgspec.msgpack.Decoder(bytes)
Reader = Inbox[bytes]


def send(outbox: Outbox, to: Reader, *messages: bytes) -> None:
    outbox.send(to.endpoint, *map(msgspec.msgpack.encode, messages))


def receive(reader: Reader, num: int) -> list[bytes]:
    received: list[bytes] = []
    while len(received) < num:
        received += reader.receive()
    return received


@pytest.fixture(params=["ipc", "tcp"])
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reader]:
    reader = Inbox(f"ipc://{tmp_path}/s" if request.param == "ipc" else "tcp://127.0.0.1:*", BYTES)
    yield reader
    reader.close()


@pytest.fixture
def outbox(reader: Reader) -> Iterator[Outbox]:
    outbox = Outbox(reader.endpoint)
    yield outbox
    outbox.close(0.0)


@pytest.fixture
def ports() -> Iterator[PortArgs]:
    ports = make_ports()
    yield ports
    remove_ports(ports)


def test_messages_arrive_whole_and_in_order(reader: Reader, outbox: Outbox) -> None:
    messages = [b"", b"a", os.urandom(LARGE), b"b" * 300_000, b"", os.urandom(LARGE), b"end"]
    for message in messages:
        send(outbox, reader, message)
    assert receive(reader, len(messages)) == messages
    outbox.close()
    assert not reader.wait(0) and reader.drain() == [], "the sender's end is no message"


def test_who_is_woken_gets_no_message(reader: Reader, outbox: Outbox) -> None:
    seen: list[str] = []
    reader.on_wake = lambda: seen.append("woken")
    for number in b"12":
        outbox.wake(reader.endpoint)
        send(outbox, reader, b"%c" % number)
    assert receive(reader, 2) == [b"1", b"2"] and seen == ["woken"] * 2
    outbox.wake(reader.endpoint)
    while len(seen) < 3:
        assert not reader.wait(10), "a reader that waits waits on"
    assert reader.num_dropped == 0


def test_a_reader_that_does_not_read_holds_up_no_sender(reader: Reader, outbox: Outbox) -> None:
    messages = [bytes([number % 256]) * 5_000 for number in range(5_000)]  # 25 MB
    for message in messages:
        send(outbox, reader, message)  # else this thread, which reads afterwards, would wait for itself
    assert receive(reader, len(messages)) == messages


def test_what_is_sent_before_anybody_listens_arrives(ports: PortArgs) -> None:
    outbox = Outbox(ports.scheduler)
    outbox.send(ports.scheduler, *map(msgspec.msgpack.encode, [b"1", b"2"]))
    reader = Inbox(ports.scheduler, BYTES)
    send(outbox, reader, b"3")
    assert receive(reader, 3) == [b"1", b"2", b"3"]
    outbox.close()
    reader.close()


def test_what_is_sent_together_is_there_together(reader: Reader, outbox: Outbox) -> None:
    messages = [b"%d" % number for number in range(1000)]
    send(outbox, reader, *messages)
    assert reader.receive() == messages[:1]
    assert reader.drain(9) == messages[1:10]
    assert reader.wait(0), "the rest has arrived"
    assert reader.drain() == messages[10:]


def test_threads_and_senders_do_not_mix_their_messages(reader: Reader) -> None:
    outboxes = [Outbox(reader.endpoint) for _ in range(2)]

    def send_all(thread: int) -> None:
        for number in range(200):
            message = b"%d %d " % (thread, number) + b"x" * (number * 997 % 20_000)
            send(outboxes[thread % 2], reader, message)

    threads = [threading.Thread(target=send_all, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    seen: dict[int, list[int]] = {number: [] for number in range(4)}
    for message in receive(reader, 800):
        thread_number, number, rest = message.split(b" ")
        assert rest == b"x" * (int(number) * 997 % 20_000)
        seen[int(thread_number)].append(int(number))
    for thread in threads:
        thread.join()
    assert all(numbers == list(range(200)) for numbers in seen.values())
    for outbox in outboxes:
        outbox.close()


def test_closing_waits_for_what_has_not_been_taken(reader: Reader, outbox: Outbox) -> None:
    data = os.urandom(LARGE)
    send(outbox, reader, data)
    received: list[bytes] = []
    reading = threading.Thread(target=lambda: received.extend(reader.receive()))
    reading.start()
    outbox.close(60.0)
    reading.join()
    assert received == [data]
    send(outbox, reader, b"too late")
    outbox.close()
    assert not reader.wait(0)


def test_closing_and_ending_wait_for_no_missing_reader(ports: PortArgs) -> None:
    outbox = Outbox(ports.scheduler)
    outbox.send(ports.scheduler, b"1")
    outbox.close(0.0)
    for size in (1, LARGE):
        send_it = f"to = {ports.scheduler!r}; Outbox(to).send(to, b'1' * {size})"
        program = f"from fenceline.ipc.mailbox import Outbox; {send_it}"
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_only_the_user_may_enter_the_folder_of_the_sockets(ports: PortArgs) -> None:
    assert stat.S_IMODE(Path(ports.scheduler.removeprefix("ipc://")).parent.stat().st_mode) == 0o700


def test_bytes_that_are_no_messages_end_nothing(ports: PortArgs) -> None:
    reader = Inbox(ports.scheduler, BYTES)
    outbox = Outbox(reader.endpoint)
    send(outbox, reader, b"1")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" + b"\0" * 8 + b"\x7f" + b"\xff" * 100, os.urandom(1000)):
        with socket.socket(socket.AF_UNIX) as bad:
            bad.connect(ports.scheduler.removeprefix("ipc://"))
            bad.sendall(garbage)
    send(outbox, reader, b"2")
    assert receive(reader, 2) == [b"1", b"2"]
    outbox.close()
    reader.close()


def test_its_descriptor_says_when_something_has_arrived(reader: Reader, outbox: Outbox) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        for message in (b"1", b"2" * LARGE):
            send(outbox, reader, message)
            while not reader.has_arrived():
                assert selector.select(60)
            assert reader.drain() == [message]
            assert not reader.has_arrived()


async def test_a_link_receives_what_comes_behind_what_it_drops(ports: PortArgs) -> None:
    link = SocketLink(ports)
    outbox = Outbox(ports.tokenizer)
    report = ControlReply(id="1", success=True)
    outbox.send(ports.tokenizer, b"\xc1" * (MAX_DRAINED_BYTES + 1), encode(report))
    assert await asyncio.wait_for(link.receive(), 60) == [report]
    outbox.send(ports.tokenizer, encode(report))
    assert await asyncio.wait_for(link.receive(), 60) == [report]
    outbox.close()
    link.close()


async def test_a_link_without_receivers_keeps_no_event_loop_busy(
    ports: PortArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    note = SocketLink._note_news
    monkeypatch.setattr(SocketLink, "_note_news", lambda link: (calls.append(1), note(link)))
    link = SocketLink(ports)
    outbox = Outbox(ports.tokenizer)
    report = encode(ControlReply(id="1", success=True))
    outbox.send(ports.tokenizer, report)
    await link.receive()
    outbox.send(ports.tokenizer, report)
    while not link._news.is_set():
        await asyncio.sleep(0)
    another = Outbox(ports.tokenizer)
    another.send(ports.tokenizer, report)
    seen = len(calls)
    while len(calls) == seen:  # its connection and its message wake the loop too
        await asyncio.sleep(0)
    calls.clear()
    for _ in range(1000):
        await asyncio.sleep(0)
    assert len(calls) < 10
    received = 0
    while received < 2:
        received += len(await asyncio.wait_for(link.receive(), 60))
    another.close()
    outbox.close()
    link.close()
