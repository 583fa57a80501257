"""What a turn of the event loop sends, and what a step of the scheduler takes in, has limits; the order stays."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import zmq

from fenceline.ipc.io_struct import (
    SCHEDULER_DECODER,
    AbortReq,
    PortArgs,
    TokenizedGenerateReq,
    encode,
)
from fenceline.ipc.sockets import MAX_TURN_BYTES, Inbox, ZmqLink, make_ports, remove_ports
from fenceline.sampling.sampling_params import SamplingParams


@pytest.fixture
def ports() -> Iterator[PortArgs]:
    ports = make_ports()
    yield ports
    remove_ports(ports)


def request(rid: str, num_ids: int) -> TokenizedGenerateReq:
    return TokenizedGenerateReq(rid=rid, input_ids=[1] * num_ids, sampling_params=SamplingParams())


async def test_a_burst_is_sent_over_several_turns_and_in_order(ports: PortArgs) -> None:
    link = ZmqLink(ports)
    sent: list[bytes] = []
    link._outbox.send_multipart = lambda parts, flags: sent.extend(parts)  # type: ignore[method-assign]
    for index in range(40):
        link.send(request(str(index), 100_000))
    link.send(AbortReq(rid="39"))
    sizes = []
    while len(sent) < 41:
        sizes.append(sum(map(len, sent)))
        await asyncio.sleep(0)
    sizes.append(sum(map(len, sent)))
    turns = [after - before for before, after in zip([0, *sizes], sizes, strict=False)]
    assert max(turns) < 2 * MAX_TURN_BYTES
    messages = [SCHEDULER_DECODER.decode(data) for data in sent]
    assert [message.rid for message in messages] == [*map(str, range(40)), "39"]
    del link._outbox.send_multipart
    link.close()


async def test_what_is_left_when_the_link_closes_is_sent(ports: PortArgs) -> None:
    link = ZmqLink(ports)
    sent: list[bytes] = []
    link._outbox.send_multipart = lambda parts, flags: sent.extend(parts)  # type: ignore[method-assign]
    for index in range(40):
        link.send(request(str(index), 100_000))
    link.close()
    assert len(sent) == 40


def test_an_inbox_gives_as_much_as_is_asked_for(ports: PortArgs) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox = Inbox(context, ports.scheduler, SCHEDULER_DECODER)
    sender = context.socket(zmq.PUSH)
    sender.connect(ports.scheduler)
    sender.send_multipart([encode(request(str(index), 1000)) for index in range(10)])
    inbox.wait()
    taken = [len(inbox.drain(4)), len(inbox.drain(100, 1500)), len(inbox.drain())]
    assert taken == [4, 2, 4]
    inbox.socket.close()
    sender.close()
    context.term()
