"""A server with everything real but the scheduler and detokenizer, which follow a script."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import openai
import pytest
import uvicorn
import xgrammar
from fastapi import FastAPI
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from fenceline.config.engine_config import EngineConfig, resolve
from fenceline.config.server_args import ServerArgs
from fenceline.constrained.compile import compile_grammar, make_vocabulary
from fenceline.constrained.compile_server import VocabularySource
from fenceline.constrained.spec import GrammarSpec
from fenceline.entrypoints.access import AccessRules
from fenceline.entrypoints.body_parser import BodyParser
from fenceline.entrypoints.errors import install_error_handlers
from fenceline.entrypoints.fields import UnknownFields
from fenceline.entrypoints.middleware import RequestMiddleware
from fenceline.entrypoints.native_api import NativeApi
from fenceline.entrypoints.openai.router import create_router
from fenceline.frontend import grammar_client
from fenceline.frontend.tokenizer import Tokenizer, load_tokenizer
from fenceline.frontend.tokenizer_manager import TokenizerManager
from fenceline.ipc.forked_jobs import JobResult
from fenceline.ipc.io_struct import (
    AbortReq,
    BatchStrOut,
    CachedTokensDetails,
    ControlReply,
    FinishReason,
    LoadGrammarReq,
    Message,
    SchedulerReady,
    StrOut,
    TokenizedGenerateReq,
    TokenLogprobs,
    TokenOut,
    TokenPairs,
)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT_LENGTH = 2048


@dataclass
class Script:
    """What the model says to every request: ``pieces`` of text, one chunk each, every token its own bytes."""

    pieces: list[str] = field(default_factory=lambda: ["Hello", " w", "ör", "ld"])
    finish: FinishReason = field(default_factory=lambda: FinishReason(type="stop", matched=0))
    cached_tokens: int = 0
    cached_details: CachedTokensDetails | None = None
    endless: bool = False
    answer_of: Callable[[TokenizedGenerateReq], list[str]] | None = None

    def say(self, message: TokenizedGenerateReq) -> list[str]:
        """The pieces for one request, none where it may generate nothing."""
        if message.sampling_params.max_new_tokens == 0:
            return []
        return self.pieces if self.answer_of is None else self.answer_of(message)


class ScriptedLink:
    """Stands in for the two other processes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.script = Script()
        self.sent: list[TokenizedGenerateReq] = []
        self.aborted: list[str] = []
        self.manager: TokenizerManager | None = None
        self._tokenizer = tokenizer
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, message: Message) -> None:
        """Start to answer a request."""
        if isinstance(message, TokenizedGenerateReq):
            self.sent.append(message)
            task = asyncio.ensure_future(self._answer(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(message, AbortReq):
            self.aborted.append(message.rid)
        elif isinstance(message, LoadGrammarReq):
            assert self.manager is not None
            self.manager.handle(ControlReply(id=message.id, success=True, message=""))

    def wake(self) -> None:
        pass

    async def receive(self) -> list[Message]:
        """Nothing comes this way: answers go straight to the manager."""
        await asyncio.Event().wait()
        return []

    def close(self) -> None:
        """Stop answering."""
        for task in self._tasks:
            task.cancel()

    async def _answer(self, message: TokenizedGenerateReq) -> None:
        pieces, count = self.script.say(message), 0
        while self.script.endless and message.rid not in self.aborted:
            count += 1
            self._deliver(message, "x", [5], count, None)
            await asyncio.sleep(0)
        for piece in pieces:
            ids = self._tokenizer.encode(piece, False)
            count += len(ids)
            self._deliver(message, piece, ids, count, None)
            # Let the reader come by, so that chunks arrive one by one.
            for _ in range(5):
                await asyncio.sleep(0)
        self._deliver(message, "", [], count, self.script.finish)

    def _deliver(
        self, message: TokenizedGenerateReq, text: str, ids: list[int], count: int, finish: FinishReason | None
    ) -> None:
        first = count == len(ids)
        wants_prompt = message.return_logprob and message.logprob_start_len == 0 and first
        token = TokenOut(
            rid=message.rid,
            output_ids=ids,
            prompt_tokens=len(message.input_ids),
            completion_tokens=count,
            cached_tokens=self.script.cached_tokens,
            cached_tokens_details=self.script.cached_details,
            finish_reason=finish,
            output_logprobs=_logprobs(ids, message.top_logprobs_num) if message.return_logprob and ids else None,
            input_logprobs=_logprobs(message.input_ids.tolist(), message.top_logprobs_num, True)
            if wants_prompt
            else None,
        )
        assert self.manager is not None
        self.manager.handle(BatchStrOut(outs=[StrOut(token=token, text=text)]))


def _logprobs(ids: list[int], num_top: int, of_prompt: bool = False) -> TokenLogprobs:
    """-0.5 for every token, which is the second best; the best is always token 7; the rest cannot be."""
    top = [(-0.25, 7), (-0.5, 0), *((float("-inf"), 20 + i) for i in range(18))]
    tops = [[(value, ids[i] if other == 0 else other) for value, other in top[:num_top]] for i in range(len(ids))]
    values: list[float | None] = [-0.5] * len(ids)
    if of_prompt:
        values[0], tops[0] = None, []
    return TokenLogprobs(token_ids=list(ids), logprobs=values, top_logprobs=TokenPairs.of(tops))


@dataclass
class Server:
    """A live server and what is behind it."""

    url: str
    config: EngineConfig
    manager: TokenizerManager
    link: ScriptedLink
    tokenizer: Tokenizer
    client: openai.AsyncOpenAI
    app: FastAPI

    @property
    def script(self) -> Script:
        """What the model will say."""
        return self.link.script


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a byte-level tokenizer: every byte is a token, a few pairs and specials too."""
    folder = tmp_path_factory.mktemp("byte-model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    vocab |= {"He": 256, "ll": 257}
    backend = RustTokenizer(models.BPE(vocab=vocab, merges=[("H", "e"), ("l", "l")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "<|im_start|>", "<|im_end|>")])
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 261, "hidden_size": 16,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT_LENGTH, "rms_norm_eps": 1e-5, "eos_token_id": 260, "bos_token_id": 258,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20, "top_p": 0.95}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": CHATML}))
    return folder


class Compiler:
    """Compiles grammars in this process. One of its own for each server would take two seconds of CPU time."""

    ended = False

    def __init__(self, source: VocabularySource, num_children: int) -> None:
        self._vocabulary = _vocabulary(source)

    async def started(self) -> bytes:
        """See ``CompileProcess``."""
        return self._vocabulary.serialize_json().encode()

    async def compile(self, spec: GrammarSpec, max_whitespace: int | None, is_short: bool) -> JobResult:
        """See ``CompileProcess``."""
        try:
            return JobResult(1, compile_grammar(self._vocabulary, spec, max_whitespace))
        except ValueError as error:
            return JobResult(1, error=str(error), is_refused=True)

    def close(self) -> None:
        """See ``CompileProcess``."""


@cache
def _vocabulary(source: VocabularySource) -> xgrammar.TokenizerInfo:
    return make_vocabulary(source.tokenizer_json, source.special_ids, source.vocab_size, source.eos_token_ids)


@pytest.fixture
def serve(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """``async with serve(**server_args) as server``: a live server with these flags."""
    monkeypatch.setattr(grammar_client, "CompileProcess", Compiler)

    @asynccontextmanager
    async def start(tokenizer: Tokenizer | None = None, **flags: object) -> AsyncIterator[Server]:
        args = {"model_path": str(model_dir), "served_model_name": "byte", "load_format": "dummy", **flags}
        config = resolve(ServerArgs.from_kwargs(args))
        tokenizer = tokenizer or load_tokenizer(model_dir)
        link = ScriptedLink(tokenizer)
        manager = TokenizerManager(config, None if config.server_args.skip_tokenizer_init else tokenizer, link)
        link.manager = manager
        manager.handle(
            SchedulerReady(
                max_total_num_tokens=4096, max_running_requests=64, max_req_input_len=CONTEXT_LENGTH - 1,
                context_length=CONTEXT_LENGTH, memory_bytes={},
            )
        )  # fmt: skip
        app = FastAPI()
        install_error_handlers(app)
        parser = BodyParser(config.model.context_length, UnknownFields(config.server_args.strict_fields))
        app.include_router(create_router(manager, config, parser))
        app.include_router(NativeApi(manager, config, parser).router())
        app.add_middleware(RequestMiddleware, rules=AccessRules(api_key=config.server_args.api_key))
        async with _running(app) as url:
            key = config.server_args.api_key or "none"
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
            async with client:
                yield Server(url, config, manager, link, tokenizer, client, app)
            link.close()

    return start


class _Server(uvicorn.Server):
    """Looks whether it should end more often than ten times a second: a test waits for it."""

    async def main_loop(self) -> None:
        while not self.should_exit:
            await asyncio.sleep(0.005)


@asynccontextmanager
async def _running(app: FastAPI) -> AsyncIterator[str]:
    server = _Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    sock = server.config.bind_socket()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio does it only to sockets of its own
    task = asyncio.ensure_future(server.serve(sockets=[sock]))
    while not server.started:
        await asyncio.sleep(0.001)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
