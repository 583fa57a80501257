"""ReplicaLink: the TokenizerManager's connection to several replicas of the engine, as if they were one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random

import msgspec

from fenceline.config.engine_config import EngineConfig
from fenceline.frontend.load_balance import LoadBalancer
from fenceline.frontend.scheduler_link import SchedulerLink
from fenceline.ipc.io_struct import (
    AbortReq,
    BatchStrOut,
    BatchTokenOut,
    CancelFlushReq,
    ControlReply,
    FatalError,
    FlushCacheReq,
    Message,
    SchedulerReady,
    StatsReport,
    TokenizedGenerateReq,
    TokenOut,
    UpdateWeightsReq,
)

_OWN = -1  # in place of a replica's number: what the link answers itself


class ReplicaLink:
    """See :class:`SchedulerLink`. A request, and the message that aborts it, go to one replica; everything else goes to
    all. Caches are flushed on all replicas or on none: all requests pass through this link, so it knows when no replica
    has one. Messages from a replica carry its number. The replicas are ready when each of them is."""

    def __init__(self, links: Sequence[SchedulerLink], config: EngineConfig) -> None:
        self._links = links
        self._balancer = LoadBalancer(config.server_args.load_balance_method, len(links))
        self._seeds = Random(config.random_seed)
        self._placed: dict[str, tuple[int, int]] = {}  # by rid: the replica and the prompt's tokens, until it ends
        self._ready: dict[int, SchedulerReady] = {}
        self._receiving: dict[int, asyncio.Task[list[Message]]] = {}
        self._flushes: list[FlushCacheReq] = []  # that wait for the last request of all replicas to leave
        # Of flushes and of updates of weights, by id: how many replicas have not answered yet.
        self._forgetting: dict[str, int] = {}
        self._refusals: asyncio.Queue[list[Message]] = asyncio.Queue()

    def send(self, message: Message) -> None:
        match message:
            case TokenizedGenerateReq():
                self._place(message)
            case AbortReq(abort_all=False):
                if message.rid in self._placed:
                    self._links[self._placed[message.rid][0]].send(message)
            case FlushCacheReq() if self._placed:  # all or none: an idle one would flush, a busy one refuse
                if message.wait:
                    self._flushes.append(message)
                else:
                    self._refuse(message)
            case CancelFlushReq() if any(each.id == message.id for each in self._flushes):
                self._refuse(message)
                self._flushes = [each for each in self._flushes if each.id != message.id]
            case _:
                self._send_to_all(message)

    def wake(self) -> None:
        """Which replica will get the request is not known yet."""

    def _send_to_all(self, message: Message) -> None:
        if isinstance(message, FlushCacheReq | UpdateWeightsReq):
            self._forgetting[message.id] = len(self._links)
        if isinstance(message, FlushCacheReq):
            # A request whose stop string the detokenizer has found has ended here, and is about to in its replica.
            message = msgspec.structs.replace(message, wait=True)
        for link in self._links:
            link.send(message)

    def _refuse(self, flush: FlushCacheReq | CancelFlushReq) -> None:
        text = f"cache not flushed: {len(self._placed)} requests are pending"
        replies = [ControlReply(flush.id, False, text, replica=replica) for replica in range(len(self._links))]
        self._refusals.put_nowait(list(replies))

    def _place(self, message: TokenizedGenerateReq) -> None:
        replica = message.replica
        if replica is None:
            replica = self._balancer.choose(message.input_ids, message.extra_key)
        if message.sampling_params.seed is None:  # the replicas' own seeds are the same: so would draws be
            params = msgspec.structs.replace(message.sampling_params, seed=self._seeds.getrandbits(63))
            message = msgspec.structs.replace(message, sampling_params=params)
        num_tokens = len(message.input_ids)
        self._placed[message.rid] = replica, num_tokens
        self._balancer.begun(replica, num_tokens)
        self._links[replica].send(message)

    async def receive(self) -> list[Message]:
        messages: list[Message] = []
        try:
            while not messages:
                for replica, link in enumerate(self._links):
                    if replica not in self._receiving:
                        self._receiving[replica] = asyncio.ensure_future(link.receive())
                if _OWN not in self._receiving:
                    self._receiving[_OWN] = asyncio.ensure_future(self._refusals.get())
                await asyncio.wait(self._receiving.values(), return_when=asyncio.FIRST_COMPLETED)
                for replica in [replica for replica, task in self._receiving.items() if task.done()]:
                    for message in self._receiving.pop(replica).result():
                        messages += [message] if replica == _OWN else self._taken(replica, message)
        except asyncio.CancelledError:
            for task in self._receiving.values():
                task.cancel()
            await asyncio.gather(*self._receiving.values(), return_exceptions=True)
            raise
        return messages

    def _taken(self, replica: int, message: Message) -> list[Message]:
        """``message`` of ``replica`` as the TokenizerManager gets it; nothing for the messages that a replica is ready,
        except the last one."""
        match message:
            case BatchStrOut():
                self._note_ended([out.token for out in message.outs])
                return [msgspec.structs.replace(message, replica=replica)]
            case BatchTokenOut():
                self._note_ended(message.outs)
                return [msgspec.structs.replace(message, replica=replica)]
            case ControlReply() | StatsReport():
                if isinstance(message, ControlReply) and message.id in self._forgetting:
                    self._note_forgotten(message)
                return [msgspec.structs.replace(message, replica=replica)]
            case FatalError():
                return [FatalError(source=f"replica {replica}: {message.source}", message=message.message)]
            case SchedulerReady():
                self._ready[replica] = message
                return [self._all_ready()] if len(self._ready) == len(self._links) else []
            case _:
                return [message]

    def _note_forgotten(self, reply: ControlReply) -> None:
        """A replica has emptied its cache, or refused to."""
        if reply.success:
            self._balancer.flushed()
        self._forgetting[reply.id] -= 1
        if not self._forgetting[reply.id]:
            del self._forgetting[reply.id]

    def _note_ended(self, outs: Sequence[TokenOut]) -> None:
        for out in outs:
            if out.finish_reason is not None and out.rid in self._placed:
                self._balancer.ended(*self._placed.pop(out.rid))
        if not self._placed:
            flushes, self._flushes = self._flushes, []
            for flush in flushes:
                self._send_to_all(flush)

    def _all_ready(self) -> SchedulerReady:
        """The limits that hold on every replica; the number of running requests is the sum over all replicas."""
        limits = list(self._ready.values())
        return SchedulerReady(
            max_total_num_tokens=min(each.max_total_num_tokens for each in limits),
            max_running_requests=sum(each.max_running_requests for each in limits),
            max_req_input_len=min(each.max_req_input_len for each in limits),
            context_length=min(each.context_length for each in limits),
            memory_bytes=limits[0].memory_bytes,
            num_replicas=len(limits),
        )

    def close(self) -> None:
        """See :class:`SchedulerLink`. Nobody receives any more: messages still awaited are given up."""
        for task in self._receiving.values():
            task.cancel()
        self._receiving.clear()
        for link in self._links:
            link.close()
