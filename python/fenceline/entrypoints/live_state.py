"""GET /live_state: the state of the server and its last steps, for the web page."""

from __future__ import annotations

import asyncio
import time

import msgspec
import orjson
from fastapi import APIRouter
from starlette.responses import Response

from fenceline.config.engine_config import EngineConfig
from fenceline.entrypoints.access import for_clients
from fenceline.frontend.tokenizer_manager import TokenizerManager
from fenceline.images.header import MAX_BYTES
from fenceline.version import __version__

LIVE_STATE_PATH = "/live_state"
NUM_STEPS = 32
# How long one answer of the scheduler serves all who ask. While nothing runs, the scheduler is left alone for longer:
# it gives memory back when nobody has written to it for a second.
MIN_INTERVAL_S = 0.2
IDLE_INTERVAL_S = 2.0
_HEADERS = {"Cache-Control": "no-store"}


class LiveState:
    """The scheduler is asked at most five times a second, however many viewers there are, and never without."""

    def __init__(self, manager: TokenizerManager, config: EngineConfig) -> None:
        self._manager = manager
        self._about = {
            "model": config.served_model_name,
            "version": __version__,
            "context_length": config.model.context_length,
            "has_image_understanding": config.images is not None,
            "max_image_bytes": MAX_BYTES,
            "records_steps": config.server_args.flight_recorder_steps > 0,
        }
        self._latest = b""
        self._was_idle = False
        self._asked_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    def router(self) -> APIRouter:
        router = APIRouter(tags=["Page"])
        router.add_api_route(LIVE_STATE_PATH, self.live_state, methods=["GET"])
        return router

    @for_clients
    async def live_state(self) -> Response:
        """The scheduler's state and its last 32 steps in counts, at most 0.2 s old (2 s while nothing runs)."""
        now = _now()
        is_idle = self._was_idle and not self._manager.num_active
        if self._asking is None and now - self._asked_at >= (IDLE_INTERVAL_S if is_idle else MIN_INTERVAL_S):
            self._asked_at = now
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(self._asked)
        if self._asking is not None:
            await asyncio.shield(self._asking)  # another may wait for it when this one's client has left
        return Response(self._latest, media_type="application/json", headers=_HEADERS)

    async def _ask(self) -> None:
        state, steps = await self._manager.live_state(NUM_STEPS)
        limits = self._manager.limits
        assert limits is not None, "the scheduler answers when it is ready"
        self._was_idle = not state.num_running_reqs and not state.num_queue_reqs
        self._latest = orjson.dumps(
            {
                **self._about,
                "max_running_requests": limits.max_running_requests,
                "time": _now(),
                "latency": self._manager.metrics.latency(),
                "state": msgspec.to_builtins(state),
                "recorded": orjson.Fragment(steps or b"null"),
            }
        )

    def _asked(self, task: asyncio.Task[None]) -> None:
        self._asking = None
        if task.cancelled() or task.exception() is not None:
            self._asked_at = float("-inf")  # who asks next gets no old news


def _now() -> float:
    return time.monotonic()
