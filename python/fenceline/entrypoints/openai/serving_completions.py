"""/v1/completions: text or token ids in, their continuations out."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from fenceline.entrypoints.generate_body import shared_inputs
from fenceline.entrypoints.openai.answer import (
    AnswerHead,
    Generator,
    ServedModel,
    TokenIds,
    UsageCounter,
    finish_fields,
    required_tokenizer,
)
from fenceline.entrypoints.openai.delivery import Answer, StreamShape, TextFrame
from fenceline.entrypoints.openai.logprobs import LegacyLogprobs, LegacyLogprobsWriter, join_legacy
from fenceline.entrypoints.openai.parsing import answer_grammar, refuse_completion, sampling_params
from fenceline.entrypoints.openai.protocol import CompletionBody
from fenceline.entrypoints.openai.token_texts import TokenTexts
from fenceline.entrypoints.sse import while_connected
from fenceline.frontend.request_types import GenerateChunk, GenerateInput, check_num_requests, expand_samples, may_wait

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionServing:
    """Answers completion requests."""

    def __init__(self, generator: Generator, model: ServedModel, texts: TokenTexts | None) -> None:
        """``texts`` is None exactly where the server runs without a tokenizer."""
        self._generator = generator
        self._model = model
        self._texts = texts

    async def respond(self, body: CompletionBody, head: AnswerHead, request: Request) -> Response:
        """The answer, whole or as a stream. Raises RequestError, before anything is sent."""
        required_tokenizer(self._generator)
        assert self._texts is not None
        refuse_completion(body)
        check_num_requests(len(body.prompt), body.n)
        inputs = self._inputs(body, head.id)
        group = await while_connected(request, self._generator.submit_many(inputs), may_wait(inputs))
        try:
            echoed = await self._echoed(body)
        except BaseException:
            group.close()
            raise
        choices = [
            CompletionChoice(index, body, self._texts, echoed[index // body.n], TokenIds.of(body, group, index))
            for index in range(len(group.streams))
        ]
        usage = UsageCounter(len(choices), body.n, self._model.cache_report, body.return_cached_tokens_details)
        answer = Answer(group, choices, usage)
        fields = head.fields("text_completion")
        if body.stream:
            return answer.stream(StreamShape.of(body, fields))
        return await answer.whole(fields, request)

    async def _echoed(self, body: CompletionBody) -> list[str]:
        """The text that precedes the output of each prompt's choices: the prompt itself if ``echo`` is set."""
        if not body.echo:
            return [""] * len(body.prompt)
        lists = [prompt for prompt in body.prompt if isinstance(prompt, list)]
        if not lists:
            return [prompt for prompt in body.prompt if isinstance(prompt, str)]
        return await self._generator.detokenize(lists, body.skip_special_tokens)

    def _inputs(self, body: CompletionBody, rid: str) -> list[GenerateInput]:
        max_new_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        params = sampling_params(body, max_new_tokens, self._model.sampling_defaults)
        grammar = answer_grammar(body)
        shared = shared_inputs(body, len(body.prompt))
        inputs: list[GenerateInput] = []
        for index, prompt in enumerate(body.prompt):
            first = GenerateInput(
                text=prompt if isinstance(prompt, str) else None,
                input_ids=prompt if isinstance(prompt, list) else None,
                sampling_params=params,
                rid=rid if index == 0 else f"{rid}-{index * body.n}",
                family=rid,
                return_logprob=body.logprobs is not None,
                logprob_start_len=0 if body.echo and body.logprobs is not None else -1,
                top_logprobs_num=body.logprobs or 0,
                add_special_tokens=body.add_special_tokens is not False,
                grammar=grammar,
                **shared[index],
            )
            inputs.extend(expand_samples(first, body.n))
        return inputs


class CompletionChoice:
    """Writes one choice, whole or chunk by chunk."""

    reasoning_tokens = None  # a completion is its text

    def __init__(self, index: int, body: CompletionBody, texts: TokenTexts, echoed: str, ids: TokenIds | None) -> None:
        self.index = index
        self._ids = ids
        self._logprobs: LegacyLogprobsWriter | None = None
        if body.logprobs is not None:
            self._logprobs = LegacyLogprobsWriter(texts, body.logprobs, body.skip_special_tokens, echoed)
        self._echoed = echoed

    def whole(self, chunk: GenerateChunk) -> dict[str, object]:
        """The choice with the output of ``chunk``; the echoed prompt comes first."""
        text, self._echoed = self._echoed + chunk.text, ""
        return {
            "index": self.index,
            "text": text,
            "logprobs": self._render_logprobs(chunk),
            **finish_fields(chunk.finish_reason),
            **(self._ids.fields(chunk) if self._ids is not None else {}),
        }

    def _render_logprobs(self, chunk: GenerateChunk) -> LegacyLogprobs | None:
        writer = self._logprobs
        if writer is None:
            return None
        prompt = writer.write(chunk.input_logprobs) if chunk.input_logprobs is not None else None
        return join_legacy(prompt, writer.write(chunk.output_logprobs) if chunk.output_logprobs is not None else None)

    def text_frame(self, shape: StreamShape) -> TextFrame | None:
        """The prepared frame for chunks that carry text alone; None if every chunk of this choice carries more."""
        if self._logprobs is not None or self._ids is not None:
            return None
        choice = {"index": self.index, "text": TextFrame.MARK, "logprobs": None, **finish_fields(None)}
        return shape.text_frame(choice)

    def frames(self, chunk: GenerateChunk, shape: StreamShape, usage: Mapping[str, object]) -> bytes:
        """The chunk as one event; no bytes if there is nothing to send."""
        choice = self.whole(chunk)
        news = choice["text"] or choice["logprobs"] is not None or choice.get("token_ids")
        if not news and chunk.finish_reason is None:
            return b""
        return shape.frame(choice, usage)
