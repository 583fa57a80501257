"""What is sent over a channel arrives whole, once and in order, whenever and however slowly its reader reads."""

from __future__ import annotations

import asyncio
import errno
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
from fenceline.ipc.io_struct import ControlReply, encode
from fenceline.ipc.sockets import MAX_DRAINED_BYTES, SocketLink, make_ports, remove_ports

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


def test_bytes_that_are_not_messages_close_the_connection_alone(
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
    assert "The scheduler's socket received bytes that are not messages" in caplog.text
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
def test_messages_are_put_together_wherever_reads_end(messages: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(channel._HEAD.pack(channel._MAGIC, len(each)) + each for each in messages)
    connection = channel._Connection(None)  # type: ignore[arg-type]
    received: deque[bytes] = deque()
    at = 0
    while at < len(stream):
        num = data.draw(st.integers(1, len(stream) - at))
        assert connection.split(memoryview(stream)[at : at + num], received)
        at += num
    assert list(received) == messages
    assert not connection._partial


def test_a_large_message_that_has_arrived_is_taken_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes behind it, an abort for example, would wait for as many steps as there are reads."""
    monkeypatch.setattr(channel, "_READ_BYTES", 1000)
    reader = PullSocket(f"ipc://{tmp_path}/s")
    sender = PushSocket(reader.endpoint)
    messages = [b"x" * 14_000, b"behind"]
    sender.send_many(messages)
    assert [reader.receive_nowait() for _ in range(2)] == messages
    sender.close()
    reader.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOBUFS, errno.EHOSTUNREACH], ids=errno.errorcode.get)
def test_what_could_not_be_sent_for_a_moment_is_sent_later(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = PullSocket(f"ipc://{tmp_path}/s")
    sender = PushSocket(reader.endpoint)
    connected, failures = sender._connected, [OSError(number, "short")] * 3

    def fail_at_first() -> socket.socket:
        if failures:
            raise failures.pop()
        return connected()

    monkeypatch.setattr(sender, "_connected", fail_at_first)
    sender.send(b"1")
    sender.send(b"2")
    assert [reader.receive(), reader.receive()] == [b"1", b"2"]
    assert not failures
    sender.close()
    reader.close()


def test_an_error_that_does_not_pass_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    sender = PushSocket(f"ipc://{tmp_path}/file/s")
    with caplog.at_level(logging.WARNING):
        sender.send(b"1")
    assert "nothing more can be sent to ipc://" in caplog.text
    sender.close()


def test_messages_stay_in_order_where_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    sender = PushSocket(endpoint)

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError):
            sender.send(b"1")
    reader = PullSocket(endpoint)
    sender.send(b"2")
    assert [reader.receive(), reader.receive()] == [b"1", b"2"]
    sender.close()
    reader.close()


def test_a_connection_waits_while_there_is_no_descriptor_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "PAUSE_S", 0.001)
    reader = PullSocket(f"ipc://{tmp_path}/s")
    listener = reader._listener
    failures = 2

    class Short:
        def fileno(self) -> int:
            return listener.fileno()

        def accept(self) -> tuple[socket.socket, object]:
            nonlocal failures
            if failures:
                failures -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return listener.accept()

        def close(self) -> None:
            listener.close()

    short = Short()
    reader._selector.unregister(listener)
    reader._selector.register(short, selectors.EVENT_READ)
    reader._listener = short  # type: ignore[assignment]
    sender = PushSocket(reader.endpoint)
    sender.send(b"1")
    assert reader.receive_nowait() is None and reader.is_paused
    assert reader.receive() == b"1"
    assert not failures and not reader.is_paused
    sender.close()
    reader.close()


async def test_a_link_receives_what_comes_behind_what_it_drops(tmp_path: Path) -> None:
    """A drain ends after so many bytes, whether they were messages or not, and the descriptor shows nothing then."""
    ports = make_ports()
    link = SocketLink(ports)
    sender = PushSocket(ports.tokenizer)
    report = ControlReply(id="1", success=True)
    sender.send_many([b"\xc1" * (MAX_DRAINED_BYTES + 1), encode(report)])
    assert await asyncio.wait_for(link.receive(), 60) == [report]
    sender.send(encode(report))
    assert await asyncio.wait_for(link.receive(), 60) == [report]
    sender.close()
    link.close()
    remove_ports(ports)


async def test_a_link_from_which_nobody_receives_does_not_keep_the_event_loop_busy() -> None:
    ports = make_ports()
    link = SocketLink(ports)
    sender = PushSocket(ports.tokenizer)
    report = encode(ControlReply(id="1", success=True))
    sender.send(report)
    await link.receive()
    waiting = asyncio.ensure_future(link.receive())
    await asyncio.sleep(0)
    waiting.cancel()
    sender.send(report)
    while link._receiving is not None:  # for a few turns it is still watched
        await asyncio.sleep(0)
    assert len(await link.receive()) == 1
    sender.close()
    link.close()
    remove_ports(ports)
