"""What answers of both endpoints have in common: the served model, their head, usage and finish reasons."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fenceline.config.engine_config import EngineConfig
from fenceline.managers.io_struct import FinishReason
from fenceline.managers.request_stream import StreamGroup
from fenceline.managers.request_types import GenerateChunk, GenerateInput, RequestError
from fenceline.managers.tokenizer import Tokenizer

MAX_CHOICES = 1024  # of one request, over all its prompts


class Generator(Protocol):
    """The part of the TokenizerManager that the API needs."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None under --skip-tokenizer-init."""

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``."""

    def is_active(self, rid: str) -> bool:
        """Whether a request of this id is in flight."""

    async def submit_many(self, inputs: Sequence[GenerateInput]) -> StreamGroup:
        """Send all requests or none. Raises RequestError."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model of this server, as the API shows it."""

    name: str
    context_length: int
    sampling_defaults: Mapping[str, float | int]
    cache_report: bool
    created: int

    @classmethod
    def from_config(cls, config: EngineConfig) -> ServedModel:
        """The model of ``config``, created now."""
        defaults = config.model.sampling_defaults.as_dict() if config.sampling_defaults == "model" else {}
        return cls(
            config.served_model_name,
            config.context_length,
            defaults,
            config.enable_cache_report,
            int(time.time()),
        )

    def check_name(self, asked: str | None) -> None:
        """Raise RequestError (404) for another model. ``default`` and no name at all mean this one."""
        if asked not in (None, "", "default", self.name):
            raise RequestError(
                404,
                f"the model {asked!r} does not exist; this server serves {self.name!r}",
                param="model",
                code="model_not_found",
            )


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


class UsageCounter:
    """Token counts of one answer: of each choice and of all together.

    A prompt counts once, however many choices are drawn from it; choices lie prompt by prompt.
    """

    def __init__(self, num_choices: int, choices_per_prompt: int, cache_report: bool) -> None:
        self._counts = [(0, 0, 0)] * num_choices
        self._choices_per_prompt = choices_per_prompt
        self._cache_report = cache_report

    def note(self, index: int, chunk: GenerateChunk) -> None:
        """Take the totals of choice ``index`` from its latest chunk."""
        self._counts[index] = (chunk.prompt_tokens, chunk.completion_tokens, chunk.cached_tokens)

    def of_choice(self, index: int) -> dict[str, object]:
        """``usage`` of one choice so far."""
        return self._as_dict(*self._counts[index])

    def total(self) -> dict[str, object]:
        """``usage`` of the answer."""
        firsts = self._counts[:: self._choices_per_prompt]
        return self._as_dict(
            sum(prompt for prompt, _, _ in firsts),
            sum(completion for _, completion, _ in self._counts),
            sum(cached for _, _, cached in firsts),
        )

    def _as_dict(self, prompt: int, completion: int, cached: int) -> dict[str, object]:
        usage: dict[str, object] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        if self._cache_report:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage


def finish_fields(reason: FinishReason | None) -> dict[str, object]:
    """``finish_reason`` of a choice and, as SGLang adds, what stopped it."""
    if reason is None:
        return {"finish_reason": None, "matched_stop": None}
    return {"finish_reason": reason.type, "matched_stop": reason.matched}


def check_choices(num_prompts: int, n: int) -> None:
    """Raise RequestError (400) when prompts times ``n`` are more than one request may ask for."""
    if num_prompts * n > MAX_CHOICES:
        raise RequestError(
            400,
            f"{num_prompts} prompts with n={n} are {num_prompts * n} choices, at most {MAX_CHOICES} are given in one "
            "request; send several",
            param="n",
        )


def required_tokenizer(generator: Generator) -> Tokenizer:
    """The tokenizer. Raises RequestError (400) if the server runs without."""
    if generator.tokenizer is None:
        raise RequestError(
            400,
            "this server runs with --skip-tokenizer-init and speaks token ids only; use /generate with input_ids",
        )
    return generator.tokenizer
