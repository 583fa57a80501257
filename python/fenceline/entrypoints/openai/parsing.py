"""Parses the bytes of a request into a checked body, and its fields into SamplingParams; every mistake becomes an error
of one readable line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from fenceline.config.request_limits import MAX_ARGUMENT_VALUES
from fenceline.constrained.spec import ANY_OBJECT, GrammarSpec
from fenceline.entrypoints.fields import (
    CHAT,
    COMPLETION,
    EMBEDDING,
    MESSAGE,
    MESSAGE_WITHOUT_EFFECT,
    RERANK,
    FieldRules,
    UnknownFields,
)
from fenceline.entrypoints.generate_body import grammar_of
from fenceline.entrypoints.json_body import count_values
from fenceline.entrypoints.openai.protocol import (
    ChatBody,
    ChatMessage,
    CommonBody,
    CompletionBody,
    EmbeddingBody,
    GenerationBody,
    RerankBody,
    ScoreBody,
)
from fenceline.entrypoints.openai.tool_call_parser import CallTexts
from fenceline.frontend.request_types import RequestError, check_num_params
from fenceline.sampling.sampling_params import SamplingParams

Body = TypeVar("Body", bound=BaseModel)


# Fields for which the model's generation_config.json may give a default (--sampling-defaults model).
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_RULES: Mapping[type[BaseModel], FieldRules] = {
    CompletionBody: FieldRules(CompletionBody.model_fields, COMPLETION),
    ChatBody: FieldRules(ChatBody.model_fields, CHAT),
    EmbeddingBody: FieldRules(EmbeddingBody.model_fields, EMBEDDING),
    RerankBody: FieldRules(RerankBody.model_fields, RERANK),
    ScoreBody: FieldRules(ScoreBody.model_fields, RERANK),
}
_MESSAGE_RULES = FieldRules(ChatMessage.model_fields, MESSAGE, MESSAGE_WITHOUT_EFFECT)


def parse_body(body_type: type[Body], raw: bytes, unknown: UnknownFields) -> Body:
    """The body of a request. Raises RequestError (400) for bad JSON, missing, wrong and refused fields."""
    body = parse_model(body_type, _RULES[body_type], raw, unknown)
    _check_counts(body)
    return body


def _without_other_tools(tools: list[object], types: frozenset[str], unknown: UnknownFields) -> list[object]:
    """``tools`` of these types, or of none. Others are noted: one must not refuse the whole request."""
    kinds = [tool.get("type") if isinstance(tool, dict) else None for tool in tools]
    names = {kind for kind in kinds if isinstance(kind, str)} - types
    unknown.note(names, "tool of type")
    return [tool for tool, kind in zip(tools, kinds, strict=True) if not (isinstance(kind, str) and kind in names)]


def _check_counts(body: BaseModel) -> None:
    """Raise RequestError (400) for lists of sampling parameters, or arguments of calls, with too many entries."""
    if isinstance(body, CommonBody):
        check_num_params(body.stop, body.stop_token_ids, body.logit_bias)
    if isinstance(body, ChatBody):
        _check_arguments(body)


def chat_completion(fields: Mapping[str, object]) -> ChatBody:
    """The chat completion that another route's request stands for; None is no value. Raises as :func:`parse_body`."""
    try:
        body = ChatBody.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        raise _readable(error) from None
    _check_counts(body)
    return body


def parse_model(body_type: type[Body], rules: FieldRules, raw: bytes, unknown: UnknownFields) -> Body:
    """The body of a request by its type and ``rules`` alone. Raises RequestError (400)."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(400, f"the request's body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError(400, "the request's body must be a JSON object")
    if unknown_names := rules.unknown(value):
        unknown.note(unknown_names, rules)
    if body_type is ChatBody:
        _check_message_fields(value.get("messages"), unknown)
    if issubclass(body_type, CommonBody) and isinstance(value.get("tools"), list):
        value["tools"] = _without_other_tools(value["tools"], body_type.tool_types, unknown)
    try:
        return body_type.model_validate({key: item for key, item in value.items() if item is not None})
    except ValidationError as error:
        raise _readable(error) from None


def _check_arguments(body: ChatBody) -> None:
    """Raise RequestError (400) if the arguments of all tool calls, which are JSON texts, have too many values to parse.
    Their number is counted before they are parsed."""
    left = MAX_ARGUMENT_VALUES
    for message in body.messages:
        for call in message.tool_calls or ():
            function = call.get("function")
            arguments = function.get("arguments") if isinstance(function, Mapping) else None
            if isinstance(arguments, str):
                left -= count_values(arguments.encode("utf-8", "surrogatepass"), left)
            if left < 0:
                raise RequestError(
                    400,
                    f"the arguments of all tool calls may have at most {MAX_ARGUMENT_VALUES} JSON values together",
                    param="messages",
                )


def _check_message_fields(messages: object, unknown: UnknownFields) -> None:
    """Check the fields of messages that templates do not get by the same rules as the fields of the body."""
    unknown_names: set[str] = set()
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict) or message.keys() <= _MESSAGE_RULES.declared:
            continue
        try:
            unknown_names |= _MESSAGE_RULES.unknown(message)
        except RequestError as error:
            where = f"messages[{index}]"
            raise RequestError(
                400, f"{where}: {error.message}", param=f"{where}.{error.param}", code=error.code
            ) from error
    if unknown_names:
        unknown.note(unknown_names, _MESSAGE_RULES)


def _readable(error: ValidationError) -> RequestError:
    """The first of pydantic's errors as ``messages[1].role: ...``, without pydantic's vocabulary."""
    first = error.errors(include_url=False, include_context=False)[0]
    steps = [step for step in first["loc"] if not _is_union_tag(step)]
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).lstrip(".")
    text = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        message = f"{path}: this field is required"
    elif first["type"] == "value_error":
        message = f"{path} {text}"
    else:
        message = f"{path}: {text[:1].lower()}{text[1:]}{_given(first['input'])}"
    return RequestError(400, message, param=path or None)


def _is_union_tag(step: int | str) -> bool:
    """Whether ``step`` is the member of a union that pydantic tried. It is in the error's path but not in the body."""
    return isinstance(step, str) and (step in ("str", "dict[str,any]", "dict[str,object]") or "[" in step)


def _given(value: object) -> str:
    if isinstance(value, str | int | float) and len(str(value)[:41]) <= 40:
        return f", got {value!r}"
    return ""


def refuse_unavailable(body: GenerationBody) -> None:
    """Raise RequestError (400) for features of OpenAI's API that this server does not have."""
    if body.stream_options is not None and not body.stream:
        raise RequestError(400, "stream_options is only allowed when stream is true", param="stream_options")


def answer_grammar(body: GenerationBody) -> GrammarSpec | None:
    """The form of the answer that is asked for, None for any. Raises RequestError (400) for what is none."""
    if isinstance(body, ChatBody) and must_call(body):
        return grammar_of(json_schema=_calls_schema(body))
    form = body.response_format or {}
    kind = form.get("type", "text")
    asked = grammar_of(regex=body.regex, ebnf=body.ebnf)
    if kind == "text":
        return asked
    if asked is not None:
        raise RequestError(
            400, f"{asked.kind} and response_format exclude each other: give one of them", param=asked.kind
        )
    match kind:
        case "json_object":  # other servers take a schema here too
            schema = form.get("schema")
            if schema is not None and not isinstance(schema, dict):
                raise RequestError(
                    400, "response_format of type json_object takes an object as schema", param="response_format.schema"
                )
            return grammar_of(json_schema=schema) if schema else ANY_OBJECT
        case "json_schema":
            given = form.get("json_schema")
            schema = given.get("schema") if isinstance(given, dict) else None
            if not isinstance(schema, dict):
                raise RequestError(
                    400,
                    'response_format of type json_schema takes {"name": ..., "schema": {...}} as json_schema',
                    param="response_format.json_schema",
                )
            return grammar_of(json_schema=schema)
        case "structural_tag":
            return grammar_of(structural_tag=dict(form))
        case _:
            shown = repr(kind)[:60]
            raise RequestError(
                400,
                f"response_format is of type text, json_object, json_schema or structural_tag, got {shown}",
                param="response_format.type",
            )


def refuse_completion(body: CompletionBody) -> None:
    """:func:`refuse_unavailable` for completions."""
    refuse_unavailable(body)
    if body.best_of is not None and body.best_of != body.n:
        raise RequestError(
            400,
            f"best_of must equal n={body.n} here, got {body.best_of}: ask for n choices with logprobs and choose",
            param="best_of",
        )


def refuse_chat(body: ChatBody) -> None:
    """:func:`refuse_unavailable` for chat, and fields that contradict each other."""
    refuse_unavailable(body)
    if body.tool_choice is not None:
        _check_tool_choice(body)
    if body.modalities is not None and set(body.modalities) - {"text"}:
        raise RequestError(400, "modalities: only text is generated here", param="modalities")
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError(400, "top_logprobs is only allowed when logprobs is true", param="top_logprobs")
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError(
            400,
            "continue_final_message and add_generation_prompt exclude each other; set one of them",
            param="continue_final_message",
        )


def _check_tool_choice(body: ChatBody) -> None:
    choice = body.tool_choice
    if choice in ("none", "auto"):
        return
    if choice == "required":
        wanted = None
    elif isinstance(choice, Mapping) and isinstance(function := choice.get("function"), Mapping):
        wanted = function.get("name")
    else:
        raise RequestError(
            400,
            'tool_choice must be \'none\', \'auto\', \'required\' or {"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    names = [tool.function.name for tool in body.tools]
    if not names:
        raise RequestError(400, "tool_choice is only allowed with tools", param="tool_choice")
    if wanted is not None and wanted not in names:
        raise RequestError(
            400, f"tool_choice names a function that is not among the tools: {str(wanted)[:128]!r}", param="tool_choice"
        )


def must_call(body: ChatBody) -> bool:
    """Whether ``tool_choice`` leaves no answer but a call."""
    return body.tool_choice not in (None, "none", "auto")


def calls_tag(body: ChatBody, texts: CallTexts) -> GrammarSpec | None:
    """The form of an answer of text and calls, each of one of the tools, with arguments as its schema says, or of any
    JSON object where the tool is not strict."""
    form = {
        "type": "triggered_tags",
        "triggers": [texts.mark],
        "tags": _call_tags(body, texts),
        "stop_after_first": not body.parallel_tool_calls,
    }
    return grammar_of(structural_tag={"type": "structural_tag", "format": form})


def call_or(form: GrammarSpec, body: ChatBody, texts: CallTexts | None, begins: Sequence[str]) -> GrammarSpec | None:
    """The form of an answer that is calls, or as ``form`` says. ``texts``: as of :func:`calls_tag`; None if all that is
    known of calls is how they begin, with one of ``begins``: then what follows may be anything. Raises RequestError
    (400) if ``form`` cannot be a part of another."""
    match form.kind:
        case "json_schema":
            answer = {"type": "json_schema", "json_schema": json.loads(form.text)}
        case "regex":
            answer = {"type": "regex", "pattern": form.text}
        case "ebnf":
            answer = {"type": "grammar", "grammar": form.text}
        case "structural_tag":
            answer = json.loads(form.text).get("format")
            if not isinstance(answer, dict):
                raise RequestError(
                    400,
                    "response_format: this structural tag leaves the model no way to call its tools: give it a format, "
                    "or set tool_choice to 'none' or 'required'",
                    param="response_format",
                    code="unsupported",
                )
    calls: list[dict[str, object]]
    if texts is not None:
        one = {"at_least_one": True, "stop_after_first": not body.parallel_tool_calls}
        tags = _call_tags(body, texts)
        calls = [{"type": "tags_with_separator", "tags": tags, "separator": "\n", **one}]
    else:
        parts = [({"type": "const_string", "value": begin}, {"type": "any_text"}) for begin in begins]
        calls = [{"type": "sequence", "elements": list(part)} for part in parts]
    either = {"type": "or", "elements": [answer, *calls]}
    return grammar_of(structural_tag={"type": "structural_tag", "format": either}) if calls else form


def _call_tags(body: ChatBody, texts: CallTexts) -> list[dict[str, object]]:
    """A tag for the calls of each tool."""
    tags: list[dict[str, object]] = []
    for tool in body.tools:
        schema: object = (tool.function.parameters or _NO_PARAMETERS) if tool.function.strict else {"type": "object"}
        begin = texts.before_name + tool.function.name + texts.before_arguments
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"type": "tag", "begin": begin, "content": content, "end": texts.end})
    return tags


_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def _calls_schema(body: ChatBody) -> dict[str, object]:
    """The schema of a list of calls, ``[{"name": ..., "parameters": {...}}, ...]``, of the tools that may be called."""
    function = body.tool_choice.get("function") if isinstance(body.tool_choice, Mapping) else None
    wanted = function.get("name") if isinstance(function, Mapping) else None
    calls: list[dict[str, object]] = []
    schemas: dict[str, object] = {}
    for index, tool in enumerate(body.tools):
        if wanted is None or tool.function.name == wanted:
            place = f"tool{index}"
            schemas[place] = _moved(tool.function.parameters or _NO_PARAMETERS, f"#/$defs/{place}")
            parts = {"name": {"const": tool.function.name}, "parameters": {"$ref": f"#/$defs/{place}"}}
            calls.append(
                {
                    "type": "object",
                    "properties": parts,
                    "required": ["name", "parameters"],
                    "additionalProperties": False,
                }
            )
    bounds = {"minItems": 1} if body.parallel_tool_calls and wanted is None else {"minItems": 1, "maxItems": 1}
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {"type": "array", "items": items, **bounds, "$defs": schemas}


def _moved(value: object, place: str) -> object:
    """The schema ``value`` with its references to itself as they are where it stands at ``place``."""
    if isinstance(value, list):
        return [_moved(one, place) for one in value]
    if not isinstance(value, Mapping):
        return value
    moved = {key: _moved(one, place) for key, one in value.items()}
    ref = value.get("$ref")
    if isinstance(ref, str) and ref.startswith("#"):
        moved["$ref"] = place + ref[1:]
    return moved


def sampling_params(body: GenerationBody, max_new_tokens: int, defaults: Mapping[str, float | int]) -> SamplingParams:
    """The sampling parameters of a request; ranges are checked when it is submitted. A value comes from the request,
    else from the model, else from OpenAI's defaults. ``defaults``: the model's values for fields that the request
    leaves out, by the names of ``SamplingParams``. Raises RequestError (400) for a malformed ``logit_bias``."""
    given = {name: value for name in _DEFAULTED if (value := getattr(body, name)) is not None}
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=body.min_tokens,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_logit_bias(body.logit_bias),
        stop=tuple(body.stop),
        stop_token_ids=tuple(token for token in body.stop_token_ids if token is not None),
        ignore_eos=body.ignore_eos,
        skip_special_tokens=body.skip_special_tokens,
        spaces_between_special_tokens=body.spaces_between_special_tokens,
        no_stop_trim=body.no_stop_trim or body.include_stop_str_in_output,
        seed=body.seed,
        **{**defaults, **given},
    )


def _logit_bias(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 18):
            raise RequestError(
                400, f'logit_bias keys must be token ids such as "50256", got {key[:40]!r}', param="logit_bias"
            )
        bias[int(key)] = value
    return bias
