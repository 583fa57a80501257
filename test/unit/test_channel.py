"""What is sent over a channel arrives whole, once and in order, whenever and however slowly its reader reads."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenceline.ipc import channel
from fenceline.ipc.channel import PullSocket, PushSocket

LARGE = 3 << 20  # more than a socket holds


@pytest.fixture(params=["ipc", "tcp"])
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PullSocket]:
    reader = PullSocket(f"ipc://{tmp_path}/s" if request.param == "ipc" else "tcp://127.0.0.1:*")
    yield reader
    reader.close()


def test_messages_arrive_whole_and_in_order(reader: PullSocket) -> None:
    sender = PushSocket(reader.endpoint)
    messages = [b"", b"a", os.urandom(LARGE), b"b" * 300_000, b"", os.urandom(LARGE), b"end"]
    for message in messages:
        sender.send(message)
    assert [reader.receive() for _ in messages] == messages
    assert reader.receive_nowait() is None and not reader.poll(0)
    sender.close()
    assert not reader.poll(0), "the sender's end is no message"


def test_sending_does_not_wait_for_a_reader_that_does_not_read(reader: PullSocket) -> None:
    sender = PushSocket(reader.endpoint)
    messages = [bytes([number]) * 100_000 for number in range(200)]  # 20 MB
    for message in messages:
        sender.send(message)  # else this thread, which reads afterwards, would wait for itself
    assert [reader.receive() for _ in messages] == messages
    sender.close()


def test_what_is_sent_before_anybody_listens_arrives(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/late"
    sender = PushSocket(endpoint)
    sender.send(b"1")
    sender.send_many([b"2", b"3"])
    reader = PullSocket(endpoint)
    assert [reader.receive() for _ in range(3)] == [b"1", b"2", b"3"]
    sender.send(b"4")
    assert reader.receive() == b"4"
    sender.close()
    reader.close()


def test_what_is_sent_together_is_there_together(reader: PullSocket) -> None:
    sender = PushSocket(reader.endpoint)
    sender.send_many([b"%d" % number for number in range(1000)])
    assert reader.receive() == b"0"
    assert [reader.receive_nowait() for _ in range(999)] == [b"%d" % number for number in range(1, 1000)]
    sender.close()


def test_threads_and_senders_do_not_mix_their_messages(reader: PullSocket) -> None:
    senders = [PushSocket(reader.endpoint) for _ in range(2)]

    def send(thread: int) -> None:
        for number in range(200):
            senders[thread % 2].send(b"%d %d " % (thread, number) + b"x" * (number * 997 % 20_000))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    seen: dict[int, list[int]] = {number: [] for number in range(4)}
    for _ in range(800):
        thread_number, number, rest = reader.receive().split(b" ")
        assert rest == b"x" * (int(number) * 997 % 20_000)
        seen[int(thread_number)].append(int(number))
    for thread in threads:
        thread.join()
    assert all(numbers == list(range(200)) for numbers in seen.values())
    for sender in senders:
        sender.close()


def test_closing_waits_for_what_has_not_been_taken(reader: PullSocket) -> None:
    sender = PushSocket(reader.endpoint)
    data = os.urandom(LARGE)
    sender.send(data)
    received: list[bytes] = []
    reading = threading.Thread(target=lambda: received.append(reader.receive()))
    reading.start()
    sender.close(60.0)
    reading.join()
    assert received == [data]
    sender.send(b"too late")
    assert not reader.poll(0)


def test_closing_without_a_reader_ends(tmp_path: Path) -> None:
    sender = PushSocket(f"ipc://{tmp_path}/nobody")
    sender.send(b"1")
    sender.close(0.0)
    sender.close(0.0)


def test_what_is_sent_to_a_reader_that_has_gone_is_dropped(reader: PullSocket) -> None:
    sender = PushSocket(reader.endpoint)
    sender.send(b"1")
    assert reader.receive() == b"1"
    reader.close()
    for _ in range(100):
        sender.send(b"x" * 100_000)
    sender.close(60.0)
    assert not sender._unsent


def test_what_are_no_messages_closes_the_connection_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "scheduler"
    reader = PullSocket(f"ipc://{path}")
    good = PushSocket(reader.endpoint)
    good.send(b"1")
    with socket.socket(socket.AF_UNIX) as bad, caplog.at_level(logging.WARNING):
        bad.connect(str(path))
        bad.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert reader.receive() == b"1"
        while not caplog.text:
            assert not reader.poll(1)
        assert bad.recv(1) == b"", "closed"
    assert "The scheduler's socket received what are no messages; the connection was closed" in caplog.text
    good.send(b"2")
    assert reader.receive() == b"2"
    good.close()
    reader.close()


def test_a_sender_that_ends_in_the_middle_of_a_message_leaves_nothing(tmp_path: Path) -> None:
    reader = PullSocket(f"ipc://{tmp_path}/s")
    with socket.socket(socket.AF_UNIX) as half:
        half.connect(f"{tmp_path}/s")
        half.sendall(channel._HEAD.pack(channel._MAGIC, 100) + b"x" * 50)
    sender = PushSocket(reader.endpoint)
    sender.send(b"1")
    assert reader.receive() == b"1"
    assert not reader.poll(0)
    sender.close()
    reader.close()


def test_its_descriptor_says_when_something_may_have_arrived(reader: PullSocket) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        assert not selector.select(0)
        sender = PushSocket(reader.endpoint)
        for message in (b"1", b"2" * LARGE):
            sender.send(message)
            while (received := reader.receive_nowait()) is None:
                assert selector.select(60)
            assert received == message
            assert reader.receive_nowait() is None
            assert not selector.select(0)
        sender.close()


@given(st.lists(st.binary(max_size=40), max_size=12), st.data())
def test_messages_are_cut_wherever_reads_end(messages: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(channel._HEAD.pack(channel._MAGIC, len(each)) + each for each in messages)
    connection = channel._Connection(None)  # type: ignore[arg-type]
    received: deque[bytes] = deque()
    at = 0
    while at < len(stream):
        num = data.draw(st.integers(1, len(stream) - at))
        assert connection.cut(memoryview(stream)[at : at + num], received)
        at += num
    assert list(received) == messages
    assert not connection._begun
