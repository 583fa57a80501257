"""From ServerArgs to EngineConfig: checks, downloads, reads the model's configuration and chooses the defaults."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fenceline.config.chat_templates import CHAT_TEMPLATES
from fenceline.config.checks import check
from fenceline.config.core_dumps import core_dump_dir
from fenceline.config.device import choose_device, cuda_is_available, machine_bytes
from fenceline.config.engine_config import EngineConfig, PriorityConfig
from fenceline.config.errors import ConfigError
from fenceline.config.graphs import attention_backends, cuda_graph_bs, piecewise_cuda_graph_tokens
from fenceline.config.hf_files import weight_files
from fenceline.config.hicache import hicache_config
from fenceline.config.hub import model_directory
from fenceline.config.model_config import ModelConfig
from fenceline.config.private_files import make_private_folder
from fenceline.config.request_limits import MAX_PRIORITY, MIN_PRIORITY

if TYPE_CHECKING:
    from fenceline.config.server_args import ServerArgs

# A key on the command line can be read by every user of the machine.
API_KEY_VARIABLE = "FENCELINE_API_KEY"
ADMIN_API_KEY_VARIABLE = "FENCELINE_ADMIN_API_KEY"
_MEM_FRACTION = {"cpu": 0.3, "cuda": 0.85}
_CHUNKED_PREFILL_SIZE = {"cpu": 2048, "cuda": 8192}
_MAX_PREFILL_TOKENS = 16384
_NUM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MAX_RUNNING_REQUESTS = {"cpu": 256, "cuda": 1024}
# Memory that the table (request rows x pages of the longest context, int32) may take by default.
_ROW_TABLE_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}


def resolve(args: ServerArgs, cuda_probe: Callable[[], bool] = cuda_is_available) -> EngineConfig:
    """The configuration that ``args`` ask for on this machine. May download the model.

    Raises ConfigError, one line with the remedy, for values and combinations that cannot work.
    """
    if args.api_key is None and os.environ.get(API_KEY_VARIABLE):
        args = dataclasses.replace(args, api_key=os.environ[API_KEY_VARIABLE])
    if args.admin_api_key is None and os.environ.get(ADMIN_API_KEY_VARIABLE):
        args = dataclasses.replace(args, admin_api_key=os.environ[ADMIN_API_KEY_VARIABLE])
    check(args)
    overrides = _model_overrides(args)
    chat_template = _read_chat_template(args)
    device = choose_device(args.device, cuda_probe)
    weights = args.load_format != "dummy"
    path = model_directory(args.model_path, "--model-path", args.revision, args.download_dir, weights)
    tokenizer_path = _tokenizer_path(args, path)
    model = _read_model(args, path, tokenizer_path, overrides, device)
    chunk = _chunked_prefill_size(args, device)
    max_prefill_tokens = args.max_prefill_tokens or max(_MAX_PREFILL_TOKENS, chunk or 0)
    max_running_requests = _max_running_requests(args, device, model.context_length)
    if device == "cpu":
        _check_memory(args, model, max_running_requests)
    prefill_attention_backend, decode_attention_backend = attention_backends(args, device)
    return EngineConfig(
        model=model,
        model_path=path,
        tokenizer_path=tokenizer_path,
        tokenizer_mode=args.tokenizer_mode,
        skip_tokenizer_init=args.skip_tokenizer_init,
        load_format=args.load_format,
        dtype=model.dtype,
        context_length=model.context_length,
        chat_template=chat_template,
        served_model_name=args.served_model_name or args.model_path,
        weight_version=args.weight_version,
        host=args.host,
        port=args.port,
        api_key=args.api_key,
        admin_api_key=args.admin_api_key,
        max_queued_requests=args.max_queued_requests,
        req_waiting_timeout_s=_timeout(args.req_waiting_timeout, "SGLANG_REQ_WAITING_TIMEOUT"),
        req_running_timeout_s=_timeout(args.req_running_timeout, "SGLANG_REQ_RUNNING_TIMEOUT"),
        allow_auto_truncate=args.allow_auto_truncate,
        watchdog_timeout_s=args.watchdog_timeout,
        mem_fraction_static=args.mem_fraction_static or _MEM_FRACTION[_limits_of(device)],
        max_total_tokens=_whole_pages(args),
        max_running_requests=max_running_requests,
        page_size=args.page_size,
        chunked_prefill_size=chunk,
        max_prefill_tokens=max_prefill_tokens,
        schedule_policy=args.schedule_policy,
        priority=_priority(args),
        schedule_conservativeness=args.schedule_conservativeness,
        disable_radix_cache=args.disable_radix_cache,
        disable_overlap_schedule=args.disable_overlap_schedule,
        hicache=hicache_config(args, device, (prefill_attention_backend, decode_attention_backend)),
        device=device,
        prefill_attention_backend=prefill_attention_backend,
        decode_attention_backend=decode_attention_backend,
        sampling_backend="torch",
        cuda_graph_bs=cuda_graph_bs(args, device, max_running_requests),
        piecewise_cuda_graph_tokens=piecewise_cuda_graph_tokens(
            args, device, model, chunk or max_prefill_tokens
        ),
        disable_cuda_graph_padding=args.disable_cuda_graph_padding,
        debug_cuda_graph=args.debug_cuda_graph,
        cuda_coredump_dir=core_dump_dir(args.cuda_coredump_dir),
        random_seed=args.random_seed if args.random_seed is not None else secrets.randbelow(2**31),
        memory_check=args.memory_check,
        sampling_defaults=args.sampling_defaults,
        trust_remote_code=args.trust_remote_code,
        enable_deterministic_inference=args.enable_deterministic_inference,
        strict_model_name=args.strict_model_name,
        strict_fields=args.strict_fields,
        reasoning_parser=args.reasoning_parser,
        enable_cache_report=args.enable_cache_report,
        stream_interval=args.stream_interval,
        incremental_streaming_output=args.incremental_streaming_output,
        log_level=args.log_level,
        log_level_http=args.log_level_http or args.log_level,
        log_requests=args.log_requests,
        log_requests_level=args.log_requests_level,
        decode_log_interval=args.decode_log_interval,
        enable_metrics=args.enable_metrics,
        metrics_prefix=args.metrics_prefix,
        flight_recorder_steps=args.flight_recorder_steps,
        flight_recorder_dir=args.flight_recorder_dir or _flight_recorder_dir(args.flight_recorder_steps),
        flight_recorder_prompts=args.flight_recorder_prompts,
        torch_profiler_dir=_torch_profiler_dir(args),
    )


def _torch_profiler_dir(args: ServerArgs) -> str | None:
    folder = args.torch_profiler_dir or os.environ.get("SGLANG_TORCH_PROFILER_DIR")
    return os.path.abspath(folder) if folder else None


def _flight_recorder_dir(num_steps: int) -> str:
    """One for each user: in a shared temporary folder the other's could not be written to. Where somebody else has
    taken the name, one that nobody can guess: a dump must not fail for that."""
    path = str(Path(tempfile.gettempdir()) / f"fenceline-flight-recorder-{os.getuid()}")
    try:
        if num_steps > 0:
            os.close(make_private_folder(path))
    except OSError:
        return f"{path}-{secrets.token_hex(8)}"
    return path


def _timeout(given: float | None, variable: str) -> float | None:
    """Seconds, from the flag or as SGLang from the environment, where 0 or less means never."""
    if given is not None:
        return given
    text = os.environ.get(variable, "")
    try:
        seconds = float(text or -1)
    except ValueError:
        raise ConfigError(f"{variable}={text}: give a number of seconds, or unset it") from None
    return seconds if 0 < seconds < float("inf") else None


def _priority(args: ServerArgs) -> PriorityConfig | None:
    if not args.enable_priority_scheduling:
        return None
    low_first, default = args.schedule_low_priority_values_first, args.default_priority_value
    if default is None:  # as in SGLang: whoever names a priority goes before those that do not
        default = MAX_PRIORITY if low_first else MIN_PRIORITY
    threshold = None if args.disable_priority_preemption else args.priority_scheduling_preemption_threshold
    return PriorityConfig(low_first, default, threshold)


def _limits_of(device: str) -> str:
    return "cuda" if device == "cuda" else "cpu"


def _model_overrides(args: ServerArgs) -> dict[str, object]:
    text = args.json_model_override_args
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--json-model-override-args: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(
            """--json-model-override-args: expected an object, for example '{"rope_theta": 1e6}'"""
        )
    return value


def _read_chat_template(args: ServerArgs) -> str | None:
    if args.chat_template is None:
        return None
    if args.chat_template in CHAT_TEMPLATES:
        return CHAT_TEMPLATES[args.chat_template]
    path = Path(args.chat_template).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"--chat-template {args.chat_template}: no such file; give a file with a Jinja template, or one of "
            f"the names {', '.join(CHAT_TEMPLATES)}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template {args.chat_template}: cannot be read as UTF-8 text ({error})"
        ) from error
    return _template_of_json(args.chat_template, text) if path.suffix == ".json" else text


def _template_of_json(name: str, text: str) -> str:
    """The template in a chat_template.json or tokenizer_config.json."""
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"--chat-template {name}: not valid JSON ({error})") from error
    template = value.get("chat_template") if isinstance(value, dict) else None
    if not isinstance(template, str):
        raise ConfigError(
            f"--chat-template {name}: expected an object with the template as the text of chat_template; for the "
            "template alone give the file the ending .jinja"
        )
    return template


def _read_model(
    args: ServerArgs, path: str, tokenizer_path: str, overrides: dict[str, object], device: str
) -> ModelConfig:
    try:
        model = ModelConfig.from_dir(path, overrides, args.context_length, args.dtype, tokenizer_path)
        if args.load_format != "dummy":
            weight_files(Path(path))  # read by the scheduler; said now where there are none
    except ValueError as error:
        text = str(error).removeprefix(f"{path}: ")  # the flag names it already
        raise ConfigError(
            text if text.startswith("--") else f"--model-path {args.model_path}: {text}"
        ) from error
    if args.dtype == "auto":
        return dataclasses.replace(model, dtype=_auto_dtype(device, model.dtype))
    return model


def _tokenizer_path(args: ServerArgs, model_path: str) -> str:
    if args.tokenizer_path is None:
        return model_path
    return model_directory(args.tokenizer_path, "--tokenizer-path", None, args.download_dir, weights=False)


def _auto_dtype(device: str, checkpoint: str) -> str:
    if device != "cuda":
        return "float32"  # few CPUs compute fast in 16 bits
    return "bfloat16" if checkpoint == "float32" else checkpoint


def _chunked_prefill_size(args: ServerArgs, device: str) -> int | None:
    if args.chunked_prefill_size == -1:
        return None
    default = _CHUNKED_PREFILL_SIZE[_limits_of(device)]
    if args.max_prefill_tokens is not None:  # chosen alone, it bounds the default chunk too
        default = max(
            min(default, args.max_prefill_tokens // args.page_size * args.page_size), args.page_size
        )
    return args.chunked_prefill_size or default


def _check_memory(args: ServerArgs, model: ModelConfig, max_running_requests: int) -> None:
    """Refuse what a machine with no device of its own cannot hold, before anything is started for it. What is free at
    that moment, and on a GPU, the scheduler judges before it allocates."""
    machine, page_size = machine_bytes(), args.page_size
    rows = max_running_requests * 4 * (-(-model.context_length // page_size) + 1)
    if rows > machine:
        raise ConfigError(
            f"--max-running-requests {max_running_requests}: with --context-length {model.context_length} their page"
            f" tables take {rows / 1e9:.1f} GB, and this machine has {machine / 1e9:.1f} GB of memory in all; lower"
            " one of the two"
        )
    bytes_per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * _NUM_BYTES[model.dtype]
    if args.max_total_tokens is not None and args.max_total_tokens * bytes_per_token > machine:
        raise ConfigError(
            f"--max-total-tokens {args.max_total_tokens}: the KV cache takes {bytes_per_token} bytes a token, and this"
            f" machine has {machine / 1e9:.1f} GB of memory in all; give at most {machine // bytes_per_token}, or leave"
            " it out"
        )


def _whole_pages(args: ServerArgs) -> int | None:
    if args.max_total_tokens is None:
        return None
    return args.max_total_tokens // args.page_size * args.page_size


def _max_running_requests(args: ServerArgs, device: str, context_length: int) -> int:
    if args.max_running_requests is not None:
        return args.max_running_requests
    row_bytes = 4 * -(-context_length // args.page_size)
    limit = min(_MAX_RUNNING_REQUESTS[_limits_of(device)], _ROW_TABLE_BYTES[_limits_of(device)] // row_bytes)
    if args.max_total_tokens is not None:
        limit = min(limit, args.max_total_tokens // args.page_size)
    return max(limit, 1)
