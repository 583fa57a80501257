"""Control messages to the scheduler and the futures of their replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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
)

CONTROL_TIMEOUT_S = 30.0
STORAGE_TIMEOUT_S = 300.0  # emptying a storage removes many files
MAX_FLUSH_WAIT_S = 3600.0  # for the last request to leave
PROFILE_TIMEOUT_S = 300.0  # stopping writes a trace of many megabytes


class ControlClient:
    """Sends control messages and resolves each caller's future by the message's id."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._waiting: dict[str, asyncio.Future[ControlReply]] = {}
        self._failure: RequestError | None = None

    async def flush_cache(self, storage: bool = False, wait_s: float = 0.0) -> ControlReply:
        """See :class:`FlushCacheReq`; waits ``wait_s`` seconds at most for the last request to leave."""
        timeout_s = STORAGE_TIMEOUT_S if storage else CONTROL_TIMEOUT_S
        message = FlushCacheReq(id=uuid4().hex, storage=storage, wait=wait_s > 0)
        if wait_s <= 0:
            return await self._ask(message, timeout_s)
        cancel = CancelFlushReq(id=message.id)
        deadline = asyncio.get_running_loop().call_later(wait_s, self._send, cancel)
        try:
            return await self._ask(message, wait_s + timeout_s)
        except asyncio.CancelledError:
            self._send(cancel)  # the client has left, so nothing should be flushed any more
            raise
        finally:
            deadline.cancel()

    async def pause(self, mode: str) -> ControlReply:
        """See :class:`PauseGenerationReq`. Raises RequestError for an unknown mode."""
        if mode not in ("abort", "retract", "in_place"):
            raise RequestError(400, f"mode must be abort, retract or in_place, got {mode!r}", param="mode")
        return await self._ask(PauseGenerationReq(id=uuid4().hex, mode=mode))

    async def resume(self) -> ControlReply:
        """See :class:`ContinueGenerationReq`."""
        return await self._ask(ContinueGenerationReq(id=uuid4().hex))

    async def profile(self, action: str, output_dir: str | None, num_steps: int | None) -> ControlReply:
        """See :class:`ProfileReq`."""
        message = ProfileReq(id=uuid4().hex, action=action, output_dir=output_dir, num_steps=num_steps)
        return await self._ask(message, PROFILE_TIMEOUT_S)

    async def flight_recorder(self, form: Literal["file", "json", "trace"]) -> ControlReply:
        """See :class:`FlightRecorderReq`."""
        return await self._ask(FlightRecorderReq(id=uuid4().hex, form=form))

    async def internal_state(self, num_steps: int = 0) -> ControlReply:
        """See :class:`GetInternalStateReq`."""
        return await self._ask(GetInternalStateReq(id=uuid4().hex, num_steps=num_steps))

    async def load_grammar(
        self, grammar: int, data: bytes, vocabulary: bytes, forgotten: list[int]
    ) -> ControlReply:
        """See :class:`LoadGrammarReq`."""
        message = LoadGrammarReq(
            id=uuid4().hex, grammar=grammar, data=data, vocabulary=vocabulary, forgotten=forgotten
        )
        return await self._ask(message)

    def resolve(self, reply: ControlReply) -> None:
        """Hand a reply to its caller; late replies are dropped."""
        future = self._waiting.pop(reply.id, None)
        if future is not None and not future.done():
            future.set_result(reply)

    def fail(self, error: RequestError) -> None:
        """The scheduler is gone: every caller, present and future, gets ``error``."""
        self._failure = error
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)

    async def _ask(
        self,
        message: FlushCacheReq
        | PauseGenerationReq
        | ContinueGenerationReq
        | ProfileReq
        | FlightRecorderReq
        | GetInternalStateReq
        | LoadGrammarReq,
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> ControlReply:
        if self._failure is not None:
            raise self._failure
        future: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._waiting[message.id] = future
        self._send(message)
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise RequestError(
                503,
                f"the scheduler did not answer within {timeout_s:g} s; see its log",
                code="scheduler_busy",
            ) from None
        finally:
            self._waiting.pop(message.id, None)
