"""What a turn of the event loop sends, and what a step of the scheduler takes in, has limits; the order stays.
Prompts and logprobs travel as bytes."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_driver import make_driver

from fenceline.frontend.scheduler_link import MAX_TURN_BYTES, SocketLink
from fenceline.images.image_input import ImageInput
from fenceline.ipc.io_struct import (
    DETOKENIZER_DECODER,
    ENCODER,
    SCHEDULER_DECODER,
    TOKENIZER_DECODER,
    AbortReq,
    BatchTokenOut,
    PortArgs,
    SchedulerInput,
    TokenizedGenerateReq,
    TokenLogprobs,
    TokenOut,
    TokenPairs,
    decode,
    encode,
    encode_apart,
    id_array,
)
from fenceline.ipc.mailbox import Inbox, Outbox, make_ports, remove_ports
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.scheduler.process import SocketOutbox
from fenceline.scheduler.ranks import TURN_DECODER, Turn


@pytest.fixture
def ports() -> Iterator[PortArgs]:
    ports = make_ports()
    yield ports
    remove_ports(ports)


def request(rid: str, num_ids: int) -> TokenizedGenerateReq:
    return TokenizedGenerateReq(rid=rid, input_ids=id_array([1] * num_ids), sampling_params=SamplingParams())


@pytest.mark.parametrize("skip_detokenizer", [False, True])
async def test_who_will_get_a_message_is_woken(ports: PortArgs, skip_detokenizer: bool) -> None:
    """The scheduler by the front end, and whoever gets the tokens by the scheduler."""
    link = SocketLink(msgspec.structs.replace(ports, tokenizer=f"{ports.tokenizer}-of-link"))
    outbox = SocketOutbox(ports, skip_detokenizer)
    to = ports.tokenizer if skip_detokenizer else ports.detokenizer
    scheduler, tokens = Inbox(ports.scheduler, SCHEDULER_DECODER), Inbox(to, TOKENIZER_DECODER)
    woken: list[str] = []
    scheduler.on_wake, tokens.on_wake = partial(woken.append, "scheduler"), partial(woken.append, "tokens")
    with closing(link), closing(outbox), closing(scheduler), closing(tokens):
        link.wake()
        link.send(AbortReq(rid="1"))
        outbox.expect_tokens()
        outbox.to_detokenizer(BatchTokenOut(outs=[]))
        assert (await asyncio.to_thread(scheduler.receive), woken) == ([AbortReq(rid="1")], ["scheduler"])
        assert (tokens.receive(), woken) == ([BatchTokenOut(outs=[])], ["scheduler", "tokens"])


async def test_a_burst_is_sent_over_several_turns_and_in_order(ports: PortArgs) -> None:
    link = SocketLink(ports)
    sent: list[bytes] = []
    link._outbox.send = lambda to, *messages: sent.extend(messages)  # type: ignore[method-assign]
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
    del link._outbox.send
    link.close()


async def test_what_is_left_when_the_link_closes_is_sent(ports: PortArgs) -> None:
    link = SocketLink(ports)
    sent: list[bytes] = []
    link._outbox.send = lambda to, *messages: sent.extend(messages)  # type: ignore[method-assign]
    for index in range(40):
        link.send(request(str(index), 100_000))
    link.close()
    assert len(sent) == 40


def test_an_inbox_gives_as_much_as_is_asked_for(ports: PortArgs) -> None:
    inbox = Inbox(ports.scheduler, SCHEDULER_DECODER)
    sender = Outbox(ports.scheduler)
    messages = [encode(request(str(index), 10_000)) for index in range(10)]
    sender.send(ports.scheduler, *messages)
    inbox.wait()
    taken = [len(inbox.drain(4)), len(inbox.drain(100, 2 * len(messages[0]) - 1)), len(inbox.drain())]
    assert taken == [4, 2, 4]
    inbox.close()
    sender.close()


def picture(pixels: bytes) -> ImageInput:
    return ImageInput(pixels=pixels, height=len(pixels) // 3, width=1, grid=(1, 1), digest=bytes(16))


async def test_pixels_are_sent_as_they_are_and_arrive(ports: PortArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    link, inbox = SocketLink(ports), Inbox(ports.scheduler, SCHEDULER_DECODER)
    send = link._outbox.send
    sent: list[bytes] = []

    def noting(to: str, *messages: bytes) -> None:
        sent.extend(messages)
        send(to, *messages)

    monkeypatch.setattr(link._outbox, "send", noting)
    pixels = [os.urandom(size) for size in (3, 3 << 20)]
    with_images = msgspec.structs.replace(request("1", 10), images=[picture(data) for data in pixels])
    for message in (with_images, request("2", 10)):
        link.send(message)
    await asyncio.sleep(0)
    received: list[SchedulerInput] = []
    while len(received) < 2:
        received += inbox.receive()
    assert received == [with_images, request("2", 10)]
    assert sent[1] is pixels[0] and sent[2] is pixels[1] and len(sent[0]) < 1000
    turn = Turn(1, received, False)  # the other ranks get them too
    assert TURN_DECODER.decode(ENCODER.encode(turn)).messages == received
    link.close()
    inbox.close()


def test_a_request_without_its_pixels_is_dropped(ports: PortArgs) -> None:
    inbox, sender = Inbox(ports.scheduler, SCHEDULER_DECODER), Outbox(ports.scheduler)
    with_images = msgspec.structs.replace(request("1", 10), images=[picture(b"123"), picture(b"456")])
    for parts in (encode_apart(with_images)[:-1], [encode(request("2", 10))]):
        sender.send(ports.scheduler, *parts)
    received: list[SchedulerInput] = []
    while not received:
        received += inbox.receive()
    assert received == [request("2", 10)] and inbox.num_dropped == 1
    inbox.close()
    sender.close()


def test_fewer_requests_are_taken_at_once_if_they_are_large(ports: PortArgs) -> None:
    """Biases are decoded one by one, so their bytes count for more than those of ids."""

    inbox = Inbox(ports.scheduler, SCHEDULER_DECODER)
    sender = Outbox(ports.scheduler)
    params = SamplingParams(logit_bias=dict.fromkeys(range(1000), 1.0))
    biased = msgspec.structs.replace(request("r", 0), sampling_params=params)
    num_ids = len(encode(biased)) // 4
    taken = []
    for message in (request("r", num_ids), biased):
        sender.send(ports.scheduler, *[encode(message)] * 64)
        inbox.wait()
        taken.append(len(inbox.drain(None, 64 * 4 * num_ids)))
        inbox.drain()
    assert taken[0] >= 32 and taken[1] <= 5, taken
    inbox.close()
    sender.close()


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_a_prompt_arrives_as_it_was_sent(ids: list[int]) -> None:
    message = msgspec.structs.replace(request("r", 0), input_ids=id_array(ids))
    data = encode(message)
    assert SCHEDULER_DECODER.decode(data) == message
    assert decode(data) == message
    turn = Turn(1, [message], False)
    assert TURN_DECODER.decode(ENCODER.encode(turn)) == turn
    assert len(data) - len(encode(request("r", 0))) <= 4 * len(ids) + 4  # four bytes say how many follow


@pytest.mark.parametrize("make", [list, tuple])
def test_ids_that_fit_32_bits_become_an_array(make: Callable[..., Sequence[int]]) -> None:
    ids = [0, 1, -1, 2**31 - 1, -(2**31)]
    made = id_array(make(ids))
    assert made.typecode == "i" and made.tolist() == ids
    assert id_array(make(())).tolist() == []
    for bad, error in ((2**31, OverflowError), (-(2**31) - 1, OverflowError), (1.0, TypeError), ("1", TypeError)):
        with pytest.raises(error):
            id_array(make([5, bad]))


def test_a_long_prompt_is_sent_and_taken_in_as_one_object() -> None:
    """A list would be as many objects as there are ids, each made and freed while others wait."""
    message = msgspec.structs.replace(request("r", 0), input_ids=id_array(range(1000, 101_000)))
    driver = make_driver(num_pages=32_000, context_length=120_000)
    driver.send(request("first", 8))
    driver.scheduler.ingest(driver.drain(False))
    before = sys.getallocatedblocks()
    data = encode(message)
    arrived = SCHEDULER_DECODER.decode(data)
    driver.scheduler.ingest([arrived])
    assert sys.getallocatedblocks() - before < 200
    req = driver.scheduler.reqs["r"]
    assert np.shares_memory(req.prompt_ids, np.frombuffer(arrived.input_ids, dtype=np.int32))
    assert not req.source.input_ids
    assert req.prompt_ids.tolist() == list(message.input_ids)


@pytest.mark.parametrize(
    "ids", [b"abc", b"\0\0\0\0\0", [1, 2, 3], [2**40], ["a"], "abcd", 7, None, {1: 2}, 1.5], ids=repr
)
def test_what_are_no_token_ids_is_dropped(ids: object, ports: PortArgs, caplog: pytest.LogCaptureFixture) -> None:
    inbox = Inbox(ports.scheduler, SCHEDULER_DECODER)
    sender = Outbox(ports.scheduler)
    good = request("good", 3)
    bad = msgspec.msgpack.decode(encode(good)) | {"input_ids": ids}
    sender.send(ports.scheduler, msgspec.msgpack.encode(bad), encode(good))
    with caplog.at_level(logging.WARNING):
        assert inbox.receive() == []
        assert inbox.receive() == [good]
    assert inbox.num_dropped == 1
    assert "$.input_ids" in caplog.text
    inbox.close()
    sender.close()


PAIRS = st.lists(
    st.lists(st.tuples(st.floats(width=32, allow_nan=False), st.integers(0, 2**31 - 1)), max_size=4), max_size=5
)


@given(PAIRS, PAIRS, st.integers(0, 6))
def test_pairs_are_what_they_were_made_of(
    positions: list[list[tuple[float, int]]], more: list[list[tuple[float, int]]], num: int
) -> None:
    pairs = TokenPairs.of(positions)
    assert list(pairs) == positions
    assert list(pairs.first(num)) == positions[:num]
    pairs.extend(TokenPairs.of(more))
    assert list(pairs) == positions + more
    assert pairs.num_pairs == sum(map(len, positions + more))


@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 2))
def test_positions_added_together_are_those_added_one_by_one(num: int, num_pairs: int, already: int) -> None:
    positions = [[(-float(i), 10 * i + j) for j in range(num_pairs)] for i in range(num)]
    first = [[(-1.5, 7)]] * already
    together, others = TokenPairs.of(first), TokenPairs.of(positions)
    together.append(bytes(others.logprobs), bytes(others.token_ids), num)
    assert together == TokenPairs.of(first + positions)
    with pytest.raises(AssertionError):
        together.append(b"1234", b"1234", 2)


def test_half_a_million_logprobs_pass_a_process_as_few_objects() -> None:
    """Each would be three, which the detokenizer and the event loop make and free while others wait."""
    ids = list(range(3900))
    logprobs = TokenLogprobs(
        token_ids=ids, logprobs=[-1.0] * 3900, top_logprobs=TokenPairs.of([[(-1.5, 7)] * 128] * 3900)
    )
    token = TokenOut(
        rid="r", output_ids=[], prompt_tokens=3900, completion_tokens=0, cached_tokens=0, input_logprobs=logprobs
    )
    data = encode(BatchTokenOut(outs=[token]))
    before = sys.getallocatedblocks()
    message = DETOKENIZER_DECODER.decode(data)
    assert sys.getallocatedblocks() - before < 5 * 3900
    assert message == BatchTokenOut(outs=[token])


def test_a_token_in_the_middle_of_an_answer_is_few_bytes() -> None:
    """Three processes encode or decode them; what is told once travels with the first one."""
    token = TokenOut(rid="r" * 32, output_ids=[9], prompt_tokens=9, completion_tokens=9, cached_tokens=0)
    assert len(encode(BatchTokenOut(outs=[token] * 100))) < 100 * (32 + 16)
