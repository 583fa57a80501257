"""KVEventPublisher: sends the changes of the prefix cache to whoever subscribes, by ZeroMQ.

The scheduler hands over the notes of a step and goes on; a thread encodes and sends them. It never waits for a
consumer: one that is too slow loses batches, sees a gap in their numbers, and asks for them again (replay).
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from fenceline.config import ConfigError
from fenceline.config.kv_events import KVEventsConfig
from fenceline.mem_cache.kv_events import KVEventBatch, KVEventLog, Note

logger = logging.getLogger(__name__)

_SEQ_NBYTES = 8
_END = (-1).to_bytes(_SEQ_NBYTES, "big", signed=True)
_LINGER_MS = 1000
_MOST_RECEIVED_NBYTES = 4096  # of a subscription or a request for a replay; who sends more is disconnected
_BELL = "inproc://bell"


class KVEventPublisher:
    """Publishes the notes of ``log``. A message is (topic, number of the batch as 8 bytes, big-endian, batch as
    msgpack); the answer to a replay request, which is such a number, are the messages from that one on that are kept,
    and one with the number -1."""

    def __init__(self, config: KVEventsConfig, log: KVEventLog, replica: int = 0) -> None:
        """Raises ConfigError if an endpoint cannot be used."""
        config = config.of_replica(replica)
        self.log, self._replica = log, replica
        self._topic = config.topic.encode()
        self._context = zmq.Context()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._queue: deque[tuple[int, float, Sequence[Note]]] = deque(maxlen=config.max_queue_size)
        self._num_batches = 0
        self._ending = False
        self._encoder = msgspec.msgpack.Encoder()
        try:
            self._pub = self._open(zmq.PUB, config.endpoint, config.hwm)
            # As many messages may wait for one consumer as a whole replay has.
            replay = config.replay_endpoint
            self._replay = None if replay is None else self._open(zmq.ROUTER, replay, config.buffer_steps + 1)
        except ConfigError:
            self._context.destroy(0)
            raise
        self._bell = self._context.socket(zmq.PAIR)
        self._bell.bind(_BELL)
        self._bell_rope = self._context.socket(zmq.PAIR)
        self._bell_rope.connect(_BELL)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        logger.info("Publishing KV events at %s", config.endpoint)

    def _open(self, kind: int, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
        opened = self._context.socket(kind)
        opened.set(zmq.SNDHWM, hwm)
        opened.set(zmq.LINGER, _LINGER_MS)
        opened.set(zmq.IPV6, 1)
        opened.set(zmq.MAXMSGSIZE, _MOST_RECEIVED_NBYTES)
        try:
            if endpoint.startswith("ipc:"):
                _check_free(endpoint)
            if kind == zmq.ROUTER or "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc:"):
                opened.bind(endpoint)
            else:  # as in vLLM and SGLang: a consumer listens there
                opened.connect(endpoint)
        except zmq.ZMQError as error:
            why = zmq.strerror(error.errno or 0)
            raise ConfigError(f"--kv-events-config: cannot use {endpoint} ({why}): name one that is free") from error
        return opened

    def publish(self) -> None:
        """Publish what has been noted since the last call, as one batch. Called once a step; never waits."""
        notes = self.log.take()
        if notes:
            # If too many are in the queue, the oldest is dropped, and its number is missing.
            self._queue.append((self._num_batches, time.time(), notes))
            self._num_batches += 1
            self._ring()

    def close(self) -> None:
        """Send the rest and stop. What has not been delivered yet gets a second."""
        self._ending = True
        self._ring()
        self._thread.join(_LINGER_MS / 1000)
        if not self._thread.is_alive():
            self._context.destroy()

    def _ring(self) -> None:
        try:
            self._bell_rope.send(b"", zmq.NOBLOCK)
        except zmq.Again:  # it has been rung often enough
            pass

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while not self._ending or self._queue:
            ready = dict(poller.poll())
            try:
                while self._bell.poll(0):
                    self._bell.recv()
                self._send_queued()
                if self._replay is not None and self._replay in ready:
                    self._answer(self._replay)
            except Exception:  # whatever it is, serving goes on, and consumers see a gap
                logger.exception("KV events could not be published")

    def _send_queued(self) -> None:
        while self._queue:
            number, when, notes = self._queue.popleft()
            batch = KVEventBatch(when, [self.log.event(note) for note in notes], self._replica)
            payload = self._encoder.encode(batch)
            self._kept.append((number, payload))
            self._pub.send_multipart((self._topic, _seq(number), payload))

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Answer a request for a replay, in the form of vLLM."""
        *address, start = replay.recv_multipart()
        if len(start) != _SEQ_NBYTES:
            logger.warning("A replay request of %d bytes was ignored: it is a number of 8", len(start))
            return
        first = int.from_bytes(start, "big")
        for number, payload in self._kept:
            if number >= first:
                replay.send_multipart((*address, self._topic, _seq(number), payload))
        replay.send_multipart((*address, b"", _END, b""))


def _check_free(endpoint: str) -> None:
    """Raise ConfigError if the path of ``endpoint`` is a file or another server's socket: ZeroMQ would replace both."""
    path = endpoint.removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:  # there is nothing, or nobody listens any more
            if not os.path.lexists(path) or stat.S_ISSOCK(os.lstat(path).st_mode):
                return
    raise ConfigError(f"--kv-events-config: cannot use {endpoint} (it is in use): name one that is free")


def _seq(number: int) -> bytes:
    return number.to_bytes(_SEQ_NBYTES, "big")
