"""Control messages to the scheduler and the futures of their replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal
from uuid import uuid4

from fenceline.frontend.request_types import RequestError
from fenceline.ipc.io_struct import (
    CancelFlushReq,
    ContinueGenerationReq,
    ControlReply,
    FlightRecorderReq,
    FlushCacheReq,
    GetInternalStateReq,
    LoadGrammarReq,
    Message,
    PauseGenerationReq,
    ProfileReq,
    UpdateWeightsReq,
)

CONTROL_TIMEOUT_S = 30.0
STORAGE_TIMEOUT_S = 300.0  # emptying a storage removes many files
MAX_FLUSH_WAIT_S = 3600.0  # for the last request to leave
FLUSH_GRACE_S = 1.0  # for requests that have ended for the client, and are about to in the scheduler
UPDATE_TIMEOUT_S = 3600.0  # reading a checkpoint of hundreds of gigabytes
PROFILE_TIMEOUT_S = 300.0  # stopping writes a trace of many megabytes


_Control = (
    FlushCacheReq
    | UpdateWeightsReq
    | PauseGenerationReq
    | ContinueGenerationReq
    | ProfileReq
    | FlightRecorderReq
    | GetInternalStateReq
    | LoadGrammarReq
)


class ControlClient:
    """Sends control messages and resolves each caller's future by the message's id."""

    def __init__(self, send: Callable[[Message], None], num_replicas: int = 1) -> None:
        """``send`` reaches all replicas, and each answers."""
        self._send = send
        self._num_replicas = num_replicas
        self._waiting: dict[str, asyncio.Future[list[ControlReply]]] = {}
        self._replies: dict[str, list[ControlReply]] = {}  # the replies that have arrived, by message
        self._failure: RequestError | None = None
        self._num_updates = 0  # of weights, that are not answered yet

    @property
    def updating(self) -> bool:
        """Whether weights are being replaced. Until that is done the scheduler computes and answers nothing else."""
        return self._num_updates > 0

    async def flush_cache(self, storage: bool = False, wait_s: float = 0.0) -> ControlReply:
        """See :class:`FlushCacheReq`; waits ``wait_s`` seconds at most for the last request to leave."""
        timeout_s = STORAGE_TIMEOUT_S if storage else CONTROL_TIMEOUT_S
        message = FlushCacheReq(id=uuid4().hex, storage=storage, wait=wait_s > 0)
        # Several replicas always wait: see ReplicaLink.
        wait_s = wait_s if wait_s > 0 else FLUSH_GRACE_S
        cancel = CancelFlushReq(id=message.id)
        deadline = asyncio.get_running_loop().call_later(wait_s, self._send, cancel)
        try:
            return await self._ask(message, wait_s + timeout_s)
        except asyncio.CancelledError:
            self._send(cancel)  # the client has left, so nothing should be flushed any more
            raise
        finally:
            deadline.cancel()

    async def update_weights(self, message: UpdateWeightsReq) -> ControlReply:
        self._num_updates += 1
        try:
            return await self._ask(message, UPDATE_TIMEOUT_S)
        finally:
            self._num_updates -= 1

    async def pause(self, mode: str) -> ControlReply:
        """See :class:`PauseGenerationReq`. Raises RequestError for an unknown mode."""
        if mode not in ("abort", "retract", "in_place"):
            raise RequestError(400, f"mode must be abort, retract or in_place, got {mode!r}", param="mode")
        return await self._ask(PauseGenerationReq(id=uuid4().hex, mode=mode))

    async def resume(self) -> ControlReply:
        return await self._ask(ContinueGenerationReq(id=uuid4().hex))

    async def profile(self, action: str, output_dir: str | None, num_steps: int | None) -> ControlReply:
        message = ProfileReq(id=uuid4().hex, action=action, output_dir=output_dir, num_steps=num_steps)
        return await self._ask(message, PROFILE_TIMEOUT_S)

    async def flight_recorder(self, form: Literal["file", "json", "trace"]) -> ControlReply:
        return await self._ask(FlightRecorderReq(id=uuid4().hex, form=form))

    async def internal_states(self, num_steps: int = 0) -> list[ControlReply]:
        """See :class:`GetInternalStateReq`; of each replica."""
        return await self._ask_all(GetInternalStateReq(id=uuid4().hex, num_steps=num_steps))

    async def load_grammar(self, grammar: int, data: bytes, vocabulary: bytes, forgotten: list[int]) -> ControlReply:
        message = LoadGrammarReq(id=uuid4().hex, grammar=grammar, data=data, vocabulary=vocabulary, forgotten=forgotten)
        return await self._ask(message)

    def resolve(self, reply: ControlReply) -> None:
        """Hand a reply to its caller; late replies are dropped."""
        future = self._waiting.get(reply.id)
        if future is None or future.done():
            return
        replies = self._replies.setdefault(reply.id, [])
        replies.append(reply)
        if len(replies) == self._num_replicas:
            future.set_result(sorted(replies, key=lambda each: each.replica))

    def fail(self, error: RequestError) -> None:
        """The scheduler has ended: all present and future callers get ``error``."""
        self._failure = error
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)

    async def _ask(self, message: _Control, timeout_s: float = CONTROL_TIMEOUT_S) -> ControlReply:
        return _as_one(await self._ask_all(message, timeout_s))

    async def _ask_all(self, message: _Control, timeout_s: float = CONTROL_TIMEOUT_S) -> list[ControlReply]:
        """Each replica's reply, in their order. While weights are replaced, other messages wait as long as it takes."""
        if self._failure is not None:
            raise self._failure
        future: asyncio.Future[list[ControlReply]] = asyncio.get_running_loop().create_future()
        self._waiting[message.id] = future
        self._send(message)
        try:
            while True:
                await asyncio.wait((future,), timeout=timeout_s)
                if future.done():
                    return future.result()
                if isinstance(message, UpdateWeightsReq) or not self.updating:
                    raise RequestError(
                        503, f"the scheduler did not answer within {timeout_s:g} s; see its log", code="scheduler_busy"
                    )
        finally:
            self._waiting.pop(message.id, None)
            self._replies.pop(message.id, None)


def _as_one(replies: Sequence[ControlReply]) -> ControlReply:
    """The replies of several replicas as one, which is a success if all of them are. Payloads are JSON."""
    if len(replies) == 1:
        return replies[0]
    messages = [reply.message for reply in replies]
    if len(set(messages)) == 1:
        message = messages[0]
    else:
        message = "; ".join(f"replica {number}: {each}" for number, each in enumerate(messages))
    payloads = [reply.payload for reply in replies]
    payload = b"[" + b",".join(payloads) + b"]" if all(payloads) else b""
    return ControlReply(
        id=replies[0].id, success=all(reply.success for reply in replies), message=message, payload=payload
    )
