"""The server's control routes: which model it serves, cache flush, profiler, server info."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import aiohttp

from fenceline.benchmarking.args import BenchArgs
from fenceline.benchmarking.endpoints import backend_kind

_SECRET_KEYS = ("api_key", "admin_api_key")
_TIMEOUT = aiohttp.ClientTimeout(total=30)


@dataclass(frozen=True, slots=True)
class Model:
    """``name`` goes into requests; ``tokenizer`` is a directory or hub id."""

    name: str
    tokenizer: str


async def get_json(session: aiohttp.ClientSession, url: str) -> dict[str, Any] | None:
    """The JSON object at ``url``, None if the route is missing or gives something else.

    Raises:
        ValueError: nothing listens there, or the key is refused.
    """
    try:
        async with session.get(url, timeout=_TIMEOUT) as response:
            if response.status in (401, 403):
                raise ValueError(
                    f"{url} answers HTTP {response.status}: pass --api-key or set OPENAI_API_KEY"
                )
            if response.status != 200:
                return None
            body = await response.json(content_type=None)
    except (aiohttp.ClientConnectionError, TimeoutError) as error:
        raise ValueError(
            f"no server answers at {url} ({error}): start it, or set --host and --port, or --base-url"
        ) from error
    except (aiohttp.ClientError, UnicodeDecodeError) as error:
        raise ValueError(f"{url} is not a URL that can be asked ({error}): check --base-url") from error
    except ValueError as error:
        if "answers HTTP" in str(error):
            raise
        return None
    return body if isinstance(body, dict) else None


async def resolve_model(session: aiohttp.ClientSession, root: str, args: BenchArgs) -> Model:
    """Model name and tokenizer: the flags, else /get_model_info, else /v1/models.

    Raises:
        ValueError: the server cannot be reached or names no model.
    """
    if args.model:
        return Model(args.served_model_name or args.model, args.tokenizer or args.model)
    info = await get_json(session, root + "/get_model_info") or {}
    listed = await get_json(session, root + "/v1/models") or {}
    models = listed.get("data")
    first: dict[str, Any] = models[0] if isinstance(models, list) and models else {}
    names = (args.served_model_name, first.get("id"), info.get("model_path"))
    name = next((str(n) for n in names if n), None)
    if name is None:
        raise ValueError(f"{root} names no model at /get_model_info or /v1/models: pass --model")
    tokenizers = (
        args.tokenizer,
        info.get("tokenizer_path"),
        info.get("model_path"),
        first.get("root"),
        name,
    )
    return Model(name, next(str(t) for t in tokenizers if t))


async def post_control(session: aiohttp.ClientSession, url: str, body: dict[str, Any] | None = None) -> None:
    """Post to a control route.

    Raises:
        ValueError: the server refuses; says what it answered.
    """
    try:
        async with session.post(url, json=body or {}, timeout=_TIMEOUT) as response:
            if response.status != 200:
                text = (await response.text()).strip()[:300]
                raise ValueError(f"{url} answers HTTP {response.status}: {text}")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ValueError(f"{url} does not answer: {error}") from error


def profile_body(args: BenchArgs) -> dict[str, Any]:
    """The body of /start_profile."""
    body: dict[str, Any] = {"activities": list(args.profile_activities)}
    if args.profile_num_steps is not None:
        body["num_steps"] = args.profile_num_steps
    if args.profile_output_dir is not None:
        body["output_dir"] = args.profile_output_dir
    return body


async def get_server_info(
    session: aiohttp.ClientSession, root: str, args: BenchArgs
) -> tuple[dict[str, Any] | None, float | None]:
    """(server info without secrets, mean accept length of speculation); None where the server has none."""
    if backend_kind(args.backend) != "generate" and not args.backend.startswith(("fenceline", "sglang")):
        return None, None
    try:
        info = await get_json(session, root + "/get_server_info")
    except ValueError:  # the run is over; a server that went away shows in the failures
        return None, None
    if info is None:
        return None, None
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    accept_length = state.get("avg_spec_accept_length")
    return (
        {key: value for key, value in info.items() if key not in _SECRET_KEYS},
        float(accept_length) if isinstance(accept_length, int | float) else None,
    )
