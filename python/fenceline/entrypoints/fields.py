"""Fields of request bodies that this server does not act on: refused with a remedy, without effect, or unknown.

The types of the bodies declare the supported fields. All other fields of OpenAI, SGLang and vLLM are listed here, so
that none of them is silently ignored. Both kinds of bodies (msgspec structs and pydantic models) are judged by one
:class:`FieldRules` for each endpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NoReturn, TypeVar

import msgspec

from fenceline.config.flags import did_you_mean
from fenceline.config.request_limits import MAX_BODY_FIELDS
from fenceline.entrypoints.json_body import parse_body
from fenceline.frontend.request_types import RequestError

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_NAMES_LOGGED = 100
MAX_NAME_CHARS = 64
MAX_NEUTRAL_BYTES = 4096  # a longer value asks for something


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a field is refused and what to do: ``remedy`` follows "NAME is not available: ". Null, false, an empty
    string, list or object, and lists of these ask for nothing and are accepted, and so are the values in
    ``neutral``."""

    remedy: str
    neutral: tuple[object, ...] = ()

    def accepts(self, value: object) -> bool:
        """Whether ``value`` asks for nothing."""
        return _is_empty(value) or any(type(value) is type(one) and value == one for one in self.neutral)


def _is_empty(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_empty, value))
    return value is None or value is False or value in ("", {})


def _same(names: str, refused: Refused) -> dict[str, Refused]:
    return dict.fromkeys(names.split(), refused)


_CONSTRAINED = Refused(
    "use response_format on OpenAI's routes, or json_schema, regex, ebnf or structural_tag in sampling_params of"
    " /generate"
)
_TEXT_ONLY = Refused("only text, images and frames of videos are read; leave it out")
_ONE_RANK = Refused("the server chooses the replica (--load-balance-method); leave it out", neutral=(0,))
_ONE_PROCESS = Refused("prefill and decode share one process; leave it out", neutral=(0, 1))
_BEAMS = Refused("there is no beam search; ask for n samples with logprobs and choose", neutral=(0, 1, 1.0, 0.0))
_INTERNALS = Refused("the model's inner values are not returned; leave it out", neutral=(0,))
_BIAS = Refused("use logit_bias")

# Fields of a prompt's continuation, on every endpoint that generates.
GENERATION: Mapping[str, Refused] = {
    **_same(
        "json_schema regex ebnf structural_tag grammar guided_json guided_regex guided_choice guided_grammar"
        " guided_json_object guided_decoding_backend guided_whitespace_pattern structured_outputs",
        _CONSTRAINED,
    ),
    "stop_regex": Refused("use stop strings"),
    **_same("use_beam_search beam_width length_penalty early_stopping", _BEAMS),
    "prompt_logprobs": Refused(
        "use /generate with return_logprob and logprob_start_len, or echo with logprobs on /v1/completions"
    ),
    "logprob_token_ids": Refused("use token_ids_logprob of /generate"),
    **_same(
        "truncate_prompt_tokens truncation_side",
        Refused("shorten the prompt, or start the server with --allow-auto-truncate"),
    ),
    **_same("bad_words allowed_token_ids logits_processors custom_logit_processor custom_params", _BIAS),
    "detokenize": Refused("use /generate, whose answers have output_ids", neutral=(True,)),
    "repetition_detection": Refused("use repetition_penalty"),
    **_same(
        "thinking_token_budget max_thinking_tokens",
        Refused("use max_tokens, or chat_template_kwargs such as enable_thinking", neutral=(-1,)),
    ),
    "require_reasoning": Refused("use --reasoning-parser"),
    "watermarking": Refused("answers carry no watermark; leave it out"),
    "image_data": Refused("send images in messages, or use /generate"),
    "video_data": Refused("send videos in messages, or use /generate"),
    **_same(
        "audio_data images_config video_config mm_processor_kwargs media_io_kwargs mm_hashes"
        " mm_content_hashes use_audio_in_video max_dynamic_patch min_dynamic_patch image_max_dynamic_patch"
        " video_max_dynamic_patch",
        _TEXT_ONLY,
    ),
    **_same("input_embeds prompt_embeds positional_embed_overrides", Refused("send text or token ids instead")),
    **_same("lora_path lora_id", Refused("merge the adapter into the model; this server has no adapters")),
    "session_params": Refused("send the whole conversation; its prefix is cached"),
    **_same("data_parallel_rank routed_dp_rank", _ONE_RANK),
    **_same(
        "bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size disagg_prefill_dp_rank"
        " kv_transfer_params ec_transfer_params need_wait_for_mm_inputs num_items_assigned encoder_urls"
        " http_worker_ipc",
        _ONE_PROCESS,
    ),
    **_same(
        "return_hidden_states return_routed_experts routed_experts_start_len routed_experts_prompt_start"
        " return_indexer_topk return_entropy return_sampling_mask",
        _INTERNALS,
    ),
    "return_meta_info": Refused("use /generate, whose answers have meta_info"),
    **_same(
        "return_flat_raw_top_logprobs return_flat_raw_top_logprobs_b64", Refused("use top_logprobs_num of /generate")
    ),
    "return_token_strs": Refused("use /detokenize with each id"),
    "return_tokens_as_token_ids": Refused("use return_token_ids"),
    **_same("return_token_offsets return_prompt_text", Refused("use /tokenize, which takes prompt or messages")),
    "return_bytes": _TEXT_ONLY,
    "multi_item_delimiter_indices": Refused("send the items as prompts of their own"),
    # What only /generate does not know by these names:
    "add_special_tokens": Refused("send input_ids, which /tokenize makes", neutral=(True,)),
    "include_stop_str_in_output": Refused("use no_stop_trim in sampling_params"),
    "request_id": Refused("use rid"),
    "ngram_corpus_id": Refused("drafts come from a model or the request's own text; leave it out"),
    "stream_interval": Refused("start the server with --stream-interval", neutral=(1,)),
    "background": Refused("use stream, or wait for the answer"),
    "custom_labels": Refused("metrics carry the label model_name alone; leave it out"),
    "no_logs": Refused("start the server without --log-requests"),
    "log_metrics": Refused("every request is counted; leave it out", neutral=(True,)),
    "vllm_xargs": Refused("there are no extensions; leave it out"),
}

# Fields of the OpenAI endpoints beside those.
OPENAI: Mapping[str, Refused] = {
    **GENERATION,
    "input_text": Refused("use prompt or messages"),
    "logprob_start_len": Refused("use /generate, or echo with logprobs on /v1/completions", neutral=(-1,)),
    "token_ids_logprob": Refused("use /generate"),
    "include_reasoning": Refused("leave reasoning_content out in the client", neutral=(True,)),
}

COMPLETION: Mapping[str, Refused] = {
    **OPENAI,
    "suffix": Refused(
        "the models served here continue text, they do not fill in the middle; put what must be known into the prompt"
    ),
    "messages": Refused("use /v1/chat/completions"),
}

CHAT: Mapping[str, Refused] = {
    **OPENAI,
    **_same("functions function_call", Refused("use tools and tool_choice", neutral=("none", "auto"))),
    "audio": Refused("only text is generated; leave it out"),
    "best_of": Refused("ask for n choices with logprobs and choose", neutral=(1,)),
    "chat_template": Refused("start the server with --chat-template"),
    "documents": Refused("put them into the messages"),
    "echo": Refused("put the message before the answer in the client"),
    "prompt": Refused("use /v1/completions"),
    "reasoning": Refused("use reasoning_effort or chat_template_kwargs"),
    "task": Refused("ask for it in a message"),
    "verbosity": Refused("ask for it in a message", neutral=("medium",)),
    "web_search_options": Refused("nothing is searched for; put what must be known into the messages"),
}

# Requests that are read and generate nothing.
READING: Mapping[str, Refused] = {
    **{
        name: GENERATION[name]
        for name in (
            "truncate_prompt_tokens", "truncation_side", "image_data", "video_data", "audio_data",
            "mm_processor_kwargs", "lora_path", "lora_id", "data_parallel_rank", "routed_dp_rank",
            "return_hidden_states",
        )
    },
    "stream": Refused("the answer comes as a whole; leave it out"),
}  # fmt: skip

EMBEDDING: Mapping[str, Refused] = {
    **READING,
    "n": Refused("an input has one embedding; leave it out", neutral=(1,)),
    "messages": Refused("send the text as input"),
    "embed_dtype": Refused("embeddings are float32; leave it out", neutral=("float32",)),
    "endianness": Refused("base64 is of little-endian numbers; leave it out", neutral=("little", "native")),
    **_same("normalize use_activation", Refused("embeddings have length 1; leave it out", neutral=(True,))),
}

RERANK: Mapping[str, Refused] = {
    **READING,
    **_same(
        "max_tokens_per_doc max_chunks_per_doc max_query_length max_doc_length",
        Refused("shorten the documents, or start the server with --allow-auto-truncate"),
    ),
    "rank_fields": Refused("put what matters into the text of a document"),
    "return_embeddings": Refused("use /v1/embeddings"),
    **_same("data_1 data_2", Refused("use text_1 and text_2")),
}

# A message of a conversation.
MESSAGE: Mapping[str, Refused] = {
    "audio": _TEXT_ONLY,
    "function_call": Refused("use tool_calls"),
    "tools": Refused("put them at the top level of the body"),
}
MESSAGE_WITHOUT_EFFECT = frozenset(("annotations", "refusal"))

# sampling_params of /generate.
SAMPLING: Mapping[str, Refused] = {
    name: GENERATION[name]
    for name in (
        "stop_regex", "custom_params", "beam_width",
        "stream_interval", "use_beam_search", "length_penalty", "early_stopping", "bad_words", "allowed_token_ids",
        "logits_processors", "truncate_prompt_tokens", "detokenize", "prompt_logprobs",
    )
}  # fmt: skip

# /start_profile: what is recorded, and of which steps, is not to be chosen.
PROFILE: Mapping[str, Refused] = {
    "start_step": Refused("call /start_profile when that step is near"),
    "profile_by_stage": Refused("the trace shows prefill and decode; leave it out"),
    "profile_stages": Refused("the trace shows prefill and decode; leave it out"),
    "profile_prefix": Refused("the server names the trace; /stop_profile says how"),
}
PROFILE_WITHOUT_EFFECT = frozenset(("activities", "merge_profiles", "profile_id", "record_shapes", "with_stack"))

# Labels, hints and choices of a provider's billing or storage: the answer is the same with and without them.
WITHOUT_EFFECT = frozenset(
    (
        # OpenAI's
        "user", "metadata", "store", "service_tier", "prediction", "safety_identifier",
        "prompt_cache_key", "prompt_cache_retention",
        # SGLang's and vLLM's
        "conversation_id", "external_trace_header", "kv_router_hint", "modalities", "model", "received_time",
        "return_mm_kwargs", "routing_key", "session_id",
    )
)  # fmt: skip


class FieldRules:
    """The rules for the fields that one type of body does not declare."""

    def __init__(
        self,
        declared: Iterable[str],
        refused: Mapping[str, Refused],
        without_effect: frozenset[str] = WITHOUT_EFFECT,
        within: Mapping[str, frozenset[str]] = MappingProxyType({}),
    ) -> None:
        """``within``: fields that hold objects, with the names in those, which clients write one level too high."""
        self.declared = frozenset(declared)
        self._within = dict(within)  # rules go to another process, which a proxy cannot
        judged = self.declared | without_effect
        self._refused = {name: rule for name, rule in refused.items() if name not in judged}
        self._refused_names = frozenset(self._refused)
        self._without_effect = without_effect

    def unknown(self, fields: Mapping[str, object]) -> set[str]:
        """The names among ``fields`` that nobody knows. Values are JSON values or ``msgspec.Raw``. Raises RequestError
        (400) for the first field that is refused."""
        extra = set(fields) - self.declared
        if len(extra) > MAX_BODY_FIELDS:
            raise RequestError(
                400, f"{len(extra)} fields are not known or have no effect, at most {MAX_BODY_FIELDS} are allowed"
            )
        for name in sorted(extra & self._refused_names):
            refused = self._refused[name]
            if not refused.accepts(_value(fields[name])):
                raise RequestError(400, f"{name} is not available: {refused.remedy}", param=name, code="unsupported")
        return extra - self._refused_names - self._without_effect

    def refuse_unknown(self, name: str, what: str) -> NoReturn:
        """Raise RequestError (400) for ``name``, which is a ``what``."""
        clipped = name[:MAX_NAME_CHARS]
        raise RequestError(400, f"{what} {clip_name(name)} is not known{self.hint(clipped)}", param=clipped)

    def hint(self, name: str) -> str:
        """``; did you mean X?`` for the closest known name, here or one level down, or an empty text."""
        for field, names in self._within.items():
            if name in names:
                return f"; it belongs in {field}"
        if close := did_you_mean(name, self.declared):
            return close
        for field, names in self._within.items():
            if close := did_you_mean(name, names):
                return f"{close.removesuffix('?')} in {field}?"
        return ""


class UnknownFields:
    """What requests hold and the server does not use, logged once a name: fields that nobody knows, which
    --strict-fields refuses, and what is left out knowingly."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._seen: set[str] = set()

    def note(self, names: set[str], rules: FieldRules | str) -> None:
        """``names`` are unknown by these rules, or of things that are left out, whose kind is given: "tool of type".
        Raises RequestError (400) for the first unknown one if the server is strict."""
        kind = rules if isinstance(rules, str) else ""
        if self._strict and names and not isinstance(rules, str):
            rules.refuse_unknown(min(names), "field")
        for name in names:
            if len(self._seen) >= MAX_NAMES_LOGGED:
                return
            clipped = name[:MAX_NAME_CHARS]
            if kind + clipped in self._seen:
                continue
            self._seen.add(kind + clipped)
            if isinstance(rules, str):
                logger.warning("A request has a %s %s, which is left out here", rules, clip_name(name))
                continue
            logger.warning(
                "A request has the field %s, which is not known and has no effect%s (--strict-fields refuses such)",
                clip_name(name),
                rules.hint(clipped),
            )


def parse_known(
    data: bytes,
    kind: type[T],
    rules: FieldRules,
    unknown: UnknownFields,
    amend: Callable[[dict[str, msgspec.Raw]], None] | None = None,
) -> T:
    """``data`` as the struct ``kind``, which forbids fields that it does not declare: ``rules`` judge those. Only a
    body that has such is looked at twice; ``amend`` may change what is kept of it. Raises RequestError 400 for bad
    JSON, wrong types and fields that are refused."""
    try:
        return parse_body(data, kind)
    except RequestError as error:
        if "unknown field" not in error.message:
            raise
    fields = parse_body(data, dict[str, msgspec.Raw])
    if unknown_names := rules.unknown(fields):
        unknown.note(unknown_names, rules)
    kept = {name: value for name, value in fields.items() if name in rules.declared}
    if amend is not None:
        amend(kept)
    return parse_body(msgspec.json.encode(kept), kind)


def clip_name(name: str) -> str:
    """A client's name for logs and messages: quoted, escaped and of bounded length."""
    return ascii(name[:MAX_NAME_CHARS]) + ("..." if len(name) > MAX_NAME_CHARS else "")


def _value(value: object) -> object:
    """A ``msgspec.Raw`` as what it holds; a long one as true, since it asks for something in any case."""
    if not isinstance(value, msgspec.Raw):
        return value
    data = bytes(value)
    return parse_body(data, object) if len(data) <= MAX_NEUTRAL_BYTES else True
