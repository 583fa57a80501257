"""Backends: the URL of each backend, and the format of its request bodies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fenceline.benchmarking.records import Call

Kind = Literal["generate", "completions", "chat", "embeddings"]

_PATHS: dict[Kind, str] = {
    "generate": "/generate",
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "embeddings": "/v1/embeddings",
}

# backend -> (wire format, default port)
BACKENDS: dict[str, tuple[Kind, int]] = {
    "fenceline": ("generate", 30000),
    "fenceline-oai": ("completions", 30000),
    "fenceline-oai-chat": ("chat", 30000),
    "fenceline-embedding": ("embeddings", 30000),
    "sglang": ("generate", 30000),
    "sglang-native": ("generate", 30000),
    "sglang-oai": ("completions", 30000),
    "sglang-oai-chat": ("chat", 30000),
    "sglang-embedding": ("embeddings", 30000),
    "vllm": ("completions", 8000),
    "vllm-chat": ("chat", 8000),
    "openai": ("completions", 30000),
    "openai-chat": ("chat", 30000),
    "openai-embeddings": ("embeddings", 30000),
    "lmdeploy": ("completions", 23333),
    "lmdeploy-chat": ("chat", 23333),
}

# Backends that support `continuous_usage_stats`, which puts the token count into every chunk.
_CONTINUOUS_USAGE = ("fenceline-oai", "fenceline-oai-chat", "sglang-oai", "sglang-oai-chat", "vllm", "vllm-chat")

# Keys of --extra-request-body that the native endpoint expects inside sampling_params.
_SAMPLING_NAMES = (
    "temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty stop stop_token_ids "
    "min_new_tokens max_new_tokens ignore_eos seed sampling_seed logit_bias skip_special_tokens "
    "spaces_between_special_tokens no_stop_trim"
)
_SAMPLING_KEYS = frozenset(_SAMPLING_NAMES.split())


def backend_kind(backend: str) -> Kind:
    return BACKENDS[backend][0]


def server_url(backend: str, base_url: str | None, host: str, port: int | None) -> str:
    """The server's root address, without a trailing slash or ``/v1``."""
    if base_url is None:
        shown = f"[{host}]" if ":" in host and not host.startswith("[") else host
        return f"http://{shown}:{BACKENDS[backend][1] if port is None else port}"
    return base_url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The URL to which requests are sent, and the parameters that all of them have."""

    backend: str
    root: str
    model: str
    stream: bool = True
    ignore_eos: bool = True
    return_logprob: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        return backend_kind(self.backend)

    @property
    def url(self) -> str:
        """The URL to which requests are posted."""
        return self.root + _PATHS[self.kind]

    def payload(self, call: Call) -> dict[str, Any]:
        """The JSON body of ``call``. Values in ``extra_body`` replace those set here; nested objects are merged."""
        if self.kind == "generate":
            return _merged(self._native(call), _native_extra(self.extra_body))
        if self.kind == "embeddings":
            return _merged({"model": self.model, "input": call.prompt}, self.extra_body)
        body = self._openai(call)
        if self.kind == "chat":
            assert isinstance(call.prompt, list), "a chat endpoint takes messages"
            body["messages"] = call.prompt
        else:
            body["prompt"] = call.prompt
        return _merged(body, self.extra_body)

    def _native(self, call: Call) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "temperature": 0.0,
            "max_new_tokens": call.output_len,
            "ignore_eos": self.ignore_eos,
        }
        if call.seed is not None:
            sampling["seed" if self.backend == "fenceline" else "sampling_seed"] = call.seed
        key = "text" if isinstance(call.prompt, str) else "input_ids"
        body: dict[str, Any] = {key: call.prompt, "sampling_params": sampling, "stream": self.stream}
        if self.return_logprob:
            body |= {"return_logprob": True, "logprob_start_len": -1}
        if call.lora_name:
            body["lora_path"] = call.lora_name
        return body

    def _openai(self, call: Call) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": call.lora_name or self.model,
            "temperature": 0.0,
            "max_tokens": call.output_len,
            "stream": self.stream,
        }
        if self.ignore_eos:  # OpenAI's own API does not have this field, so false is not sent
            body["ignore_eos"] = True
        if self.stream:
            body["stream_options"] = {"include_usage": True}
            if self.backend in _CONTINUOUS_USAGE:
                body["stream_options"]["continuous_usage_stats"] = True
        if call.seed is not None:
            body["seed"] = call.seed
        if self.return_logprob:
            body["logprobs"] = True if self.kind == "chat" else 1
        return body


def _native_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Move sampling keys from the top level into ``sampling_params``, where /generate expects them."""
    out = {key: value for key, value in extra.items() if key not in _SAMPLING_KEYS}
    moved = {key: value for key, value in extra.items() if key in _SAMPLING_KEYS}
    if moved:
        out["sampling_params"] = moved | dict(out.get("sampling_params", {}))
    return out


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(out.get(key), dict):
            out[key] = {**out[key], **value}
        else:
            out[key] = value
    return out


def is_sampled(extra_body: Mapping[str, Any]) -> bool:
    """Whether requests with this extra body are sampled at random and do not set a seed themselves."""
    flat = dict(extra_body.get("sampling_params") or {})
    flat = {**{k: v for k, v in extra_body.items() if k != "sampling_params"}, **flat}
    seeded = any(flat.get(key) is not None for key in ("seed", "sampling_seed"))
    temperature = flat.get("temperature")
    return isinstance(temperature, int | float) and temperature > 0 and not seeded
