"""/v1/chat/completions: a conversation in, the assistant's next message out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fenceline.constrained.spec import GrammarSpec, ThinkTokens
from fenceline.entrypoints.generate_body import shared_inputs
from fenceline.entrypoints.openai.answer import (
    AnswerHead,
    Generator,
    ServedModel,
    TokenIds,
    UsageCounter,
    required_tokenizer,
)
from fenceline.entrypoints.openai.chat_choice import ChatChoice
from fenceline.entrypoints.openai.chat_reader import ChatReader
from fenceline.entrypoints.openai.chat_template import IMAGE, VIDEO, ChatTemplate
from fenceline.entrypoints.openai.delivery import Answer, StreamShape
from fenceline.entrypoints.openai.parsing import (
    answer_grammar,
    call_or,
    calls_tag,
    must_call,
    refuse_chat,
    sampling_params,
)
from fenceline.entrypoints.openai.protocol import ChatBody, ChatMessage, ImagePart, TextPart
from fenceline.entrypoints.openai.reasoning_parser import ReasoningFormat, ReasoningParser, ReasoningTokens
from fenceline.entrypoints.openai.token_texts import TokenTexts
from fenceline.entrypoints.openai.tool_call_parser import (
    JSON_CALLS,
    TOOL_CALL_FORMATS,
    CallTexts,
    ToolCallFormat,
    ToolCallParser,
)
from fenceline.entrypoints.sse import while_connected
from fenceline.frontend.request_stream import StreamGroup
from fenceline.frontend.request_types import GenerateInput, RequestError, expand_samples, may_wait

logger = logging.getLogger(__name__)

_MESSAGES = "gpt-oss"  # the format of answers that are lists of messages
# Conversations up to this size are rendered on the event loop, which takes a millisecond or two.
_INLINE_CHARS, _INLINE_MESSAGES = 1 << 15, 64


class ChatServing:
    """Answers chat requests."""

    def __init__(
        self,
        generator: Generator,
        model: ServedModel,
        texts: TokenTexts | None,
        template: ChatTemplate | str,
        reasoning: ReasoningFormat | None,
        tool_calls: ToolCallFormat | None,
    ) -> None:
        """``template`` is the chat template, or the reason why there is none, with which chat requests are refused.
        ``tool_calls`` is None if nothing says how the model writes them: then requests with tools are refused."""
        self._generator = generator
        self._model = model
        self._texts = texts
        self._template = template
        self._reasoning = reasoning
        self._tool_calls = tool_calls
        self._told_not_strict = False

    async def respond(self, body: ChatBody, head: AnswerHead, request: Request) -> Response:
        """The answer, whole or as a stream. Raises RequestError, before anything is sent."""
        prompt, group = await self.submit(body, head.id, request)
        functions = functions_of(body)
        assert self._texts is not None  # there is a tokenizer
        choices = [
            ChatChoice(index, body, self._texts, self.reader(body, prompt, functions), TokenIds.of(body, group, index))
            for index in range(body.n)
        ]
        usage = UsageCounter(body.n, body.n, self._model.cache_report, body.return_cached_tokens_details)
        answer = Answer(group, choices, usage)
        if body.stream:
            return answer.stream(StreamShape.of(body, head.fields("chat.completion.chunk")))
        return await answer.whole(head.fields("chat.completion"), request)

    async def submit(self, body: ChatBody, rid: str, request: Request) -> tuple[str | list[int], StreamGroup]:
        """The prompt and the answers that are being generated. Raises RequestError."""
        required_tokenizer(self._generator)
        self.check(body)
        prompt = await self._prompt(body)
        inputs = self._inputs(body, prompt, rid)
        work = self._generator.submit_many(inputs)
        return prompt, await while_connected(request, work, may_wait(inputs))

    def check(self, body: ChatBody) -> None:
        """Raise RequestError (400) for what this server or this model does not have."""
        refuse_chat(body)
        if may_call(body) and self._tool_calls is None and not must_call(body):
            raise RequestError(
                400,
                "tools is not available: the chat template does not show how this model writes calls; start the server "
                "with --tool-call-parser, or set tool_choice to 'none', 'required' or a function",
                param="tools",
                code="unsupported",
            )

    def _call_texts(self) -> CallTexts | None:
        """What stands around calls, None where a grammar does not find them in other text."""
        texts = None if self._tool_calls is None else self._tool_calls.texts
        if texts is None:
            return None
        tokenizer = required_tokenizer(self._generator)
        # Grammars are of text, and special tokens have none.
        return None if tokenizer.backend.token_to_id(texts.mark) in tokenizer.special_ids else texts

    def _calls_have_special_tokens(self) -> bool:
        """Whether calls are marked by special tokens, which the output must contain then."""
        form = self._tool_calls
        if form is None or form.has_special_tokens:
            return form is not None
        tokenizer = required_tokenizer(self._generator)
        marks = (*form.marks, *(() if form.texts is None else (form.texts.mark,)))
        return any(tokenizer.backend.token_to_id(mark) in tokenizer.special_ids for mark in marks)

    async def count_tokens(self, body: ChatBody, request: Request) -> int:
        """The number of tokens of the prompt. Raises RequestError."""
        self.check(body)
        return len(await tokenize_conversation(self._generator, self._template, body, request))

    def reader(
        self, body: ChatBody, prompt: str | list[int], functions: Mapping[str, Mapping[str, object]]
    ) -> ChatReader:
        """What reads one answer to ``body``; ``functions``: :func:`functions_of` it."""
        form = self._tool_calls if may_call(body) else None
        if must_call(body):
            form = JSON_CALLS if form is None else replace(JSON_CALLS, make_id=form.make_id)
        front: ReasoningParser | ToolCallParser | None = self._parser(body, prompt)
        if self._reads_messages(body):
            messages = TOOL_CALL_FORMATS[_MESSAGES]
            front = ToolCallParser(messages, functions if form is messages else {})
            form = None if form is messages else form
        calls = None if form is None else ToolCallParser(form, functions)
        separates = self._reasoning is not None and body.separate_reasoning
        return ChatReader(
            front, calls, not body.parallel_tool_calls, separates and front is not None, self._reasoning_tokens()
        )

    def _reasoning_tokens(self) -> ReasoningTokens | None:
        form = self._reasoning
        if form is None:
            return None
        end = required_tokenizer(self._generator).backend.token_to_id(form.end_token or form.end)
        return None if end is None else ReasoningTokens(end, form.in_messages)

    def _reads_messages(self, body: ChatBody) -> bool:
        """Whether answers are lists of messages, which have to be taken apart for ``body``."""
        if may_call(body) and self._tool_calls is not None and self._tool_calls.reads_reasoning:
            return True
        return self._reasoning is not None and self._reasoning.in_messages and body.separate_reasoning

    async def _prompt(self, body: ChatBody) -> str | list[int]:
        """The text of the conversation, or its token ids if the client sent those."""
        if body.input_ids:
            return body.input_ids
        return await conversation_text(self._generator, self._template, body)

    def _inputs(self, body: ChatBody, prompt: str | list[int], rid: str) -> list[GenerateInput]:
        asked = body.max_completion_tokens or body.max_tokens
        # Without a limit the answer may fill the context: the tokenizer manager reduces it to what the prompt leaves.
        params = sampling_params(body, asked or self._model.context_length, self._model.sampling_defaults)
        # Messages are separated by special tokens.
        in_messages = self._reasoning is not None and self._reasoning.in_messages
        if in_messages or (may_call(body) and self._calls_have_special_tokens()):
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        grammar = answer_grammar(body)
        calls: tuple[int, ...] = ()
        if may_call(body) and not must_call(body):
            if grammar is not None:
                grammar, calls = self._call_or(grammar, body)
            elif any(tool.function.strict for tool in body.tools):
                grammar = self._strict_calls(body)
        first = GenerateInput(
            text=prompt if isinstance(prompt, str) else None,
            input_ids=None if isinstance(prompt, str) else prompt,
            images=body.images(),
            sampling_params=params,
            rid=rid,
            return_logprob=body.logprobs,
            top_logprobs_num=body.top_logprobs or 0,
            add_special_tokens=bool(body.add_special_tokens),  # off by default: the template writes them
            grammar=grammar,
            think=None if grammar is None else self._think(body, prompt, calls),
            **shared_inputs(body, 1)[0],
        )
        return expand_samples(first, body.n)

    def _strict_calls(self, body: ChatBody) -> GrammarSpec | None:
        """The form of text and calls with arguments as strict functions' schemas say. None, once with a line in the
        log, where a grammar does not find calls in other text."""
        texts = self._call_texts()
        if texts is not None:
            return calls_tag(body, texts)
        if not self._told_not_strict:
            self._told_not_strict = True
            logger.warning(
                "A request has functions with strict true. Their schemas are not enforced where the model may answer "
                "with text too, because no text tells for certain that JSON arguments begin in this model's calls; "
                "with tool_choice 'required' or the name of a function they are"
            )
        return None

    def _call_or(self, form: GrammarSpec, body: ChatBody) -> tuple[GrammarSpec | None, tuple[int, ...]]:
        """The form of an answer that is calls or as ``form`` says, and tokens with which calls may begin instead: texts
        of grammars do not contain special tokens."""
        assert self._tool_calls is not None, "check refuses such requests"
        tokenizer = required_tokenizer(self._generator)
        names = [tool.function.name for tool in body.tools]
        begins = dict.fromkeys(begin.replace("NAME", name) for begin in self._tool_calls.begins for name in names)
        ids = {begin: tokenizer.backend.token_to_id(begin) for begin in begins}
        special = {begin: id for begin, id in ids.items() if id is not None and id in tokenizer.special_ids}
        texts = [begin for begin in begins if begin not in special]
        return call_or(form, body, self._call_texts(), texts), tuple(special.values())

    def _parser(self, body: ChatBody, prompt: str | list[int]) -> ReasoningParser | None:
        form = self._reasoning
        if form is None or form.in_messages or not body.separate_reasoning:
            return None
        begun = self._begun(body, prompt)
        if begun is not None:
            return ReasoningParser(form, inside=True) if form.is_open_within(begun) else None
        return ReasoningParser(form, form.is_open_after(self._tail(prompt)))

    def _think(self, body: ChatBody, prompt: str | list[int], calls: tuple[int, ...]) -> ThinkTokens | None:
        """Between which tokens the model thinks before the answer's grammar begins; None if it does not, and there are
        no ``calls``."""
        think = self._thought(body, prompt)
        if not calls:
            return think
        return msgspec.structs.replace(think or ThinkTokens(-1, (), False), calls=calls)

    def _thought(self, body: ChatBody, prompt: str | list[int]) -> ThinkTokens | None:
        form = self._reasoning
        if form is None:
            return None
        begun = self._begun(body, prompt)
        if begun is not None:
            return self._think_tokens(body, form, is_open=True) if form.is_open_within(begun) else None
        tail = self._tail(prompt).rstrip()
        if tail.endswith(form.end):
            return None  # the template has switched it off
        return self._think_tokens(body, form, form.is_open_after(tail))

    def _think_tokens(self, body: ChatBody, form: ReasoningFormat, is_open: bool) -> ThinkTokens:
        tokenizer = required_tokenizer(self._generator)
        if form.in_messages:  # several tokens; an answer begins with one of its messages
            answer, call, header_end = (
                tuple(tokenizer.encode(text, False)) for text in (form.answer_header, form.call_header, form.header_end)
            )
            # A model that has to call begins with the header of a call; the grammar's calls follow all the same.
            must, may = must_call(body), may_call(body)
            return ThinkTokens(-1, answer, True, (call,) if must else (), header_end, may and not must)
        start, end = tokenizer.backend.token_to_id(form.start), tokenizer.backend.token_to_id(form.end)
        if end is None:
            raise RequestError(
                400,
                f"response_format: the model's tokenizer has no token {form.end}, after which the answer begins; start "
                "the server without --reasoning-parser",
                param="response_format",
            )
        return ThinkTokens(-1 if start is None else start, (end,), is_open)

    def _tail(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return required_tokenizer(self._generator).decode(prompt[-8:], skip_special_tokens=False)

    def _begun(self, body: ChatBody, prompt: str | list[int]) -> str | None:
        """The beginning of the answer that is to be continued, None where there is none."""
        if isinstance(prompt, list) or not body.continue_final_message:
            return None
        return body.messages[-1].text


def may_call(body: ChatBody) -> bool:
    """Whether the request's tools are shown to the model and it may call them."""
    return bool(body.tools) and body.tool_choice != "none"


def functions_of(body: ChatBody) -> Mapping[str, Mapping[str, object]]:
    """The request's functions by name."""
    return {tool.function.name: tool.function.model_dump() for tool in body.tools}


async def conversation_text(generator: Generator, template: ChatTemplate | str, body: ChatBody) -> str:
    """:func:`render_chat`, in a worker thread if the conversation is long. Raises RequestError (400) before rendering
    for a conversation that cannot fit the context."""
    generator.check_images(body.images())
    num_chars = 0
    for message in body.messages:
        num_chars += len(message.text)
        num_chars += len(message.reasoning_content or message.reasoning or "")
        num_chars += sum(len(msgspec.json.encode(call)) for call in message.tool_calls or ())
    if may_call(body):
        num_chars += sum(len(msgspec.json.encode(tool.model_dump())) for tool in body.tools)
    generator.check_text_length(num_chars)
    if num_chars <= _INLINE_CHARS and len(body.messages) <= _INLINE_MESSAGES:
        return render_chat(template, body)
    return await asyncio.to_thread(render_chat, template, body)


async def tokenize_conversation(
    generator: Generator, template: ChatTemplate | str, body: ChatBody, request: Request
) -> Sequence[int]:
    """The token ids of the prompt. Raises RequestError, and ClientDisconnect if the client leaves meanwhile."""
    text = await conversation_text(generator, template, body)
    images = body.images()
    work = generator.tokenize([text], bool(body.add_special_tokens), images)
    [tokens] = await while_connected(request, work, is_long=bool(images))
    return tokens


def render_chat(template: ChatTemplate | str, body: ChatBody) -> str:
    """The prompt text of a conversation. Raises RequestError (400) with the template's message if the template refuses
    the conversation, or with ``template`` if that is the reason why there is none."""
    if isinstance(template, str):
        raise RequestError(400, template)
    shows_tools = may_call(body) and template.has_tools
    if may_call(body) and not (shows_tools or must_call(body)):
        raise RequestError(400, "tools is not available: the chat template has no place for them", param="tools")
    variables = dict(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    try:
        return template.render(
            [_template_message(message) for message in body.messages],
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=body.continue_final_message,
            tools=[tool.model_dump(exclude_none=True) for tool in body.tools] if shows_tools else (),
            variables=variables,
        )
    except ValueError as error:
        raise RequestError(400, str(error), param="messages") from error


def _template_message(message: ChatMessage) -> dict[str, object]:
    values = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        # Templates know where an image or a video stands, not what it shows, and most of them by these types.
        values["content"] = [
            part.model_dump() if isinstance(part, TextPart) else dict(IMAGE if isinstance(part, ImagePart) else VIDEO)
            for part in message.content
        ]
    if message.reasoning is not None:
        values.setdefault("reasoning_content", message.reasoning)  # the name that templates use
    if message.role == "developer":
        values["role"] = "system"  # the name that templates use
    return values
