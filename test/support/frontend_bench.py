"""A tokenizer manager without sockets: tests read its messages and pass it the answers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from tiny_tokenizers import byte_level

from fenceline.config.engine_config import EngineConfig, PriorityConfig, resolve
from fenceline.config.image_rules import ImageRules
from fenceline.config.server_args import ServerArgs
from fenceline.config.traces import TracesConfig
from fenceline.frontend.tokenizer_manager import TokenizerManager
from fenceline.ipc.io_struct import (
    BatchStrOut,
    FinishReason,
    Message,
    SchedulerReady,
    StrOut,
    TokenizedGenerateReq,
    TokenLogprobs,
    TokenOut,
    TokenPairs,
)

READY = SchedulerReady(
    max_total_num_tokens=100, max_running_requests=2, max_req_input_len=63, context_length=64, memory_bytes={}
)
STOP = FinishReason(type="stop", matched=2)


@cache
def demo_config() -> EngineConfig:
    return resolve(ServerArgs(model_path="demo", device="cpu"))


class MemoryLink:
    """Keeps what the manager sends."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.num_wakes = 0

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def wake(self) -> None:
        self.num_wakes += 1

    async def receive(self) -> list[Message]:
        raise AssertionError("tests hand messages to the manager themselves")

    def close(self) -> None:
        pass

    def requests(self) -> list[TokenizedGenerateReq]:
        return [message for message in self.sent if isinstance(message, TokenizedGenerateReq)]


class Bench:
    """A tokenizer manager that is ready, and its link; ``flags`` are ServerArgs fields."""

    def __init__(
        self,
        priority: PriorityConfig | None = None,
        images: ImageRules | None = None,
        traces: TracesConfig | None = None,
        **flags: object,
    ) -> None:
        config = demo_config()
        args = replace(config.server_args, **flags)
        config = replace(config, server_args=args, priority=priority, images=images, traces=traces)
        self.link = MemoryLink()
        self.manager = TokenizerManager(config, byte_level(), self.link)
        self.manager.handle(READY)

    def news(self, rid: str, ids: list[int], total: int, end: FinishReason | None = None, text: str = "") -> None:
        token = TokenOut(
            rid=rid, output_ids=ids, prompt_tokens=3, completion_tokens=total, cached_tokens=1, finish_reason=end,
            output_logprobs=TokenLogprobs(
                token_ids=ids, logprobs=[-1.0] * len(ids), top_logprobs=TokenPairs.of([[]] * len(ids))
            ),
        )  # fmt: skip
        self.manager.handle(BatchStrOut(outs=[StrOut(token=token, text=text)]))
