"""What the answers of completions and chat completions have in common: the served model, the head, usage and finish
reasons."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from starlette.requests import Request

from fenceline.config.engine_config import EngineConfig
from fenceline.entrypoints.middleware import REQUEST_ID
from fenceline.entrypoints.openai.protocol import CommonBody, GenerationBody, ReadingBody
from fenceline.frontend.request_stream import StreamGroup
from fenceline.frontend.request_types import GenerateChunk, GenerateInput, MediaSource, RequestError, new_rid
from fenceline.frontend.tokenizer import Tokenizer
from fenceline.ipc.io_struct import CachedTokensDetails, FinishReason


class Generator(Protocol):
    """The part of the TokenizerManager that the API needs."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None under --skip-tokenizer-init."""

    def reserved_id(self, wanted: str, instead: Callable[[], str]) -> AbstractContextManager[str]:
        """The id of a request whose client gave none: ``wanted``, or one made by ``instead`` if that is taken. No other
        request gets the same id while the context is open."""

    def check_text_length(self, num_chars: int) -> None:
        """Raise RequestError if a prompt of so many characters cannot fit."""

    def check_images(self, images: Sequence[MediaSource]) -> None:
        """Raise RequestError for images that this server does not take, whatever they show."""

    def tokenize(
        self, texts: Sequence[str], add_special_tokens: bool = True, images: Sequence[MediaSource] = ()
    ) -> Coroutine[Any, Any, list[Sequence[int]]]:
        """Token ids of each text, of a single one with those of its ``images``."""

    async def detokenize(self, lists: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """The text of each list of token ids."""

    async def submit_many(self, inputs: Sequence[GenerateInput]) -> StreamGroup:
        """Send all requests or none. Raises RequestError."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model of this server, as the API shows it."""

    name: str
    context_length: int
    hidden_size: int
    sampling_defaults: Mapping[str, float | int]
    cache_report: bool
    strict_name: bool
    created: int

    @classmethod
    def from_config(cls, config: EngineConfig) -> ServedModel:
        """The model of ``config``, created now."""
        defaults = config.model.sampling_defaults.as_dict() if config.server_args.sampling_defaults == "model" else {}
        return cls(
            config.served_model_name,
            config.model.context_length,
            config.model.hidden_size,
            defaults,
            config.server_args.enable_cache_report,
            config.server_args.strict_model_name,
            int(time.time()),
        )

    def name_for(self, asked: str | None) -> str:
        """The name under which a request for the model ``asked`` is answered: the one that it gave. ``default`` and no
        name at all mean the server's. Raises RequestError (404) for an adapter (``MODEL:ADAPTER``) and, with
        --strict-model-name, for any other name."""
        if not asked or asked == "default":
            return self.name
        if asked.startswith(f"{self.name}:"):
            raise _not_found(f"{asked!r} names an adapter; this server serves {self.name!r} without any")
        if self.strict_name:
            self.require(asked)
        return asked

    def require(self, asked: str) -> None:
        """Raise RequestError (404) for any model but this one."""
        if asked not in ("", "default", self.name):
            raise _not_found(f"the model {asked!r} does not exist; this server serves {self.name!r}")


def _not_found(message: str) -> RequestError:
    return RequestError(404, message, param="model", code="model_not_found")


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The fields that begin every object of one answer."""

    id: str
    created: int
    model: str

    @classmethod
    def now(cls, id: str, model: str) -> AnswerHead:
        """The head of an answer that begins now."""
        return cls(id, int(time.time()), model)

    def fields(self, kind: str) -> dict[str, object]:
        """As JSON values; ``kind`` is the ``object`` field."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def answer_id(
    prefix: str, body: CommonBody | ReadingBody, request: Request, generator: Generator
) -> AbstractContextManager[str]:
    """The id of an answer, by which it can be aborted: the client's own, or ``prefix`` and the HTTP request's id."""
    given = body.rid or body.request_id
    if given is not None:
        return nullcontext(given)
    wanted = f"{prefix}{request.scope.get(REQUEST_ID) or new_rid()}"
    return generator.reserved_id(wanted, lambda: f"{prefix}{new_rid()}")


class TokenIds:
    """``token_ids`` and ``prompt_token_ids`` of one choice, for requests that ask for them. A prompt's ids are sent
    once: with the first choice of the prompt, and in a stream with that choice's first chunk."""

    def __init__(self, with_output: bool, prompt_ids: Sequence[int] | None) -> None:
        self._with_output = with_output
        self._prompt_ids = prompt_ids

    @classmethod
    def of(cls, body: GenerationBody, group: StreamGroup, index: int) -> TokenIds | None:
        """The ids of choice ``index``; None if the request asked for none."""
        if not (body.return_token_ids or body.return_prompt_token_ids):
            return None
        return cls(body.return_token_ids, group.streams[index].prompt_ids if index % body.n == 0 else None)

    def fields(self, chunk: GenerateChunk) -> dict[str, object]:
        """The fields for ``chunk``, the next chunk of the choice."""
        fields: dict[str, object] = {}
        if self._prompt_ids is not None:
            fields["prompt_token_ids"] = list(self._prompt_ids)
            self._prompt_ids = None
        if self._with_output:
            fields["token_ids"] = chunk.output_ids
        return fields


class UsageCounter:
    """Token counts of one answer: of each choice and of all together. A prompt counts once, however many choices are
    sampled from it. The choices of one prompt are adjacent. ``cached_tokens_details``: the request asked for the cached
    tokens by tier, as SGLang's clients do."""

    def __init__(
        self, num_choices: int, choices_per_prompt: int, cache_report: bool, cached_tokens_details: bool = False
    ) -> None:
        self._counts = [_Counts()] * num_choices
        self._choices_per_prompt = choices_per_prompt
        self._cache_report = cache_report
        self._cached_tokens_details = cached_tokens_details

    def note(self, index: int, chunk: GenerateChunk) -> None:
        """Remember the totals of choice ``index`` that its latest chunk carries."""
        self._counts[index] = _Counts(
            chunk.prompt_tokens,
            chunk.completion_tokens,
            chunk.cached_tokens,
            chunk.cached_tokens_details,
            self._counts[index].reasoning,
        )

    def note_reasoning(self, index: int, num_tokens: int | None) -> None:
        """Remember how many tokens of choice ``index`` were reasoning; None if that is not known."""
        self._counts[index] = self._counts[index]._replace(reasoning=num_tokens)

    def of_choice(self, index: int) -> dict[str, object]:
        return self._usage([self._counts[index]], [self._counts[index]])

    def total(self) -> dict[str, object]:
        return self._usage(self._prompts(), self._counts)

    def extension(self) -> dict[str, object]:
        """``{"sglext": {"cached_tokens_details": ...}}`` if the request asked for it and there is HiCache."""
        details = _details(self._prompts()) if self._cached_tokens_details else None
        return {} if details is None else {"sglext": {"cached_tokens_details": details}}

    def _prompts(self) -> Sequence[_Counts]:
        return self._counts[:: self._choices_per_prompt]

    def _usage(self, prompts: Sequence[_Counts], choices: Sequence[_Counts]) -> dict[str, object]:
        prompt = sum(counts.prompt for counts in prompts)
        completion = sum(counts.completion for counts in choices)
        usage: dict[str, object] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        if self._cache_report or self._cached_tokens_details:
            report: dict[str, object] = {"cached_tokens": sum(counts.cached for counts in prompts)}
            details = _details(prompts)
            if details is not None:
                report["cached_tokens_details"] = details
            usage["prompt_tokens_details"] = report
        reasoning = [counts.reasoning for counts in choices if counts.reasoning is not None]
        if reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(reasoning)}
        return usage


class _Counts(NamedTuple):
    prompt: int = 0
    completion: int = 0
    cached: int = 0
    details: CachedTokensDetails | None = None
    reasoning: int | None = None


def _details(prompts: Sequence[_Counts]) -> dict[str, int] | None:
    """Cached tokens of all prompts by tier; None without HiCache."""
    found = [counts.details for counts in prompts if counts.details is not None]
    if not found:
        return None
    return {
        "device": sum(details.device for details in found),
        "host": sum(details.host for details in found),
        "storage": sum(details.storage for details in found),
    }


def finish_fields(reason: FinishReason | None) -> dict[str, object]:
    """``finish_reason`` of a choice and, as SGLang adds, what stopped it."""
    if reason is None:
        return {"finish_reason": None, "matched_stop": None}
    return {"finish_reason": reason.type, "matched_stop": reason.matched}


def required_tokenizer(generator: Generator) -> Tokenizer:
    """The tokenizer. Raises RequestError (400) if the server runs without one."""
    if generator.tokenizer is None:
        raise RequestError(
            400, "this server runs with --skip-tokenizer-init and speaks token ids only; use /generate with input_ids"
        )
    return generator.tokenizer
