"""--log-requests: one line when a request arrives and one when it ends."""

from __future__ import annotations

import logging

import msgspec

from fenceline.config.engine_config import EngineConfig
from fenceline.frontend.request_table import RequestEntry
from fenceline.frontend.request_types import GenerateInput
from fenceline.ipc.io_struct import TokenizedGenerateReq, TokenOut

logger = logging.getLogger(__name__)

MAX_LOGGED_CHARS = 2048


class RequestLog:
    """Writes what --log-requests-level asks for: 0 ids and counts, 1 sampling parameters, 2 the beginning
    of prompts, 3 all of them."""

    def __init__(self, config: EngineConfig) -> None:
        self._level = config.server_args.log_requests_level if config.server_args.log_requests else -1

    def received(self, inp: GenerateInput, message: TokenizedGenerateReq) -> None:
        """A request was accepted."""
        if self._level < 0:
            return
        line = f"Receive: rid={message.rid} prompt_tokens={len(message.input_ids)} stream={inp.stream}"
        if self._level >= 1:
            line += f" sampling_params={msgspec.to_builtins(message.sampling_params)}"
        if self._level >= 2:
            prompt = inp.text if inp.text is not None else str(message.input_ids)
            line += f" prompt={self._cut(prompt)!r}"
        logger.info(line)

    def finished(self, entry: RequestEntry, token: TokenOut) -> None:
        """A request ended in the scheduler."""
        if self._level < 0:
            return
        reason = token.finish_reason
        logger.info(
            "Finish: rid=%s finish_reason=%s prompt_tokens=%d completion_tokens=%d cached_tokens=%d retractions=%d",
            entry.rid, reason.type if reason else None, token.prompt_tokens, token.completion_tokens,
            token.cached_tokens, token.num_retractions,
        )  # fmt: skip

    def abandoned(self, entry: RequestEntry) -> None:
        """The consumer went away."""
        if self._level >= 0:
            logger.info(
                "Abort: rid=%s the client went away after %d tokens", entry.rid, entry.completion_tokens
            )

    def _cut(self, text: str) -> str:
        return text if self._level >= 3 or len(text) <= MAX_LOGGED_CHARS else text[:MAX_LOGGED_CHARS] + "..."
