"""EngineConfig: the resolved configuration, the only one the engine reads."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fenceline.config.hicache import HiCacheConfig
    from fenceline.config.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class PriorityConfig:
    """--enable-priority-scheduling. ``preemption_threshold`` None: running requests keep their places."""

    low_values_first: bool
    default_value: int
    preemption_threshold: int | None

    def rank(self, priority: int) -> int:
        """What requests are ordered by: the smallest goes first."""
        return priority if self.low_values_first else -priority


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that was chosen or defaulted, resolved once by ``fenceline.config.resolve``.

    Plain values only, so that it travels to the scheduler and detokenizer processes as it is. Lengths and sizes are
    in tokens, times in seconds. ``chunked_prefill_size`` None means that prompts are never split;
    ``max_total_tokens`` None that the model runner sizes the KV pool from ``mem_fraction_static``;
    ``max_queued_requests`` None that the queue is unbounded. ``chat_template`` is the template's text.
    Attention backends are names or ``auto``, which the model runner decides by measuring. ``cuda_graph_bs`` are the
    decode batch sizes to capture and ``piecewise_cuda_graph_tokens`` prefill's sizes in tokens, ascending; empty means
    no graphs. ``hicache`` None: pages live on the device alone. ``torch_profiler_dir`` None: a fresh folder
    of the scheduler's own.
    """

    # Model and tokenizer
    model: ModelConfig
    model_path: str
    tokenizer_path: str
    tokenizer_mode: str
    skip_tokenizer_init: bool
    load_format: str
    dtype: str
    context_length: int
    chat_template: str | None
    served_model_name: str
    weight_version: str

    # HTTP server
    host: str
    port: int
    api_key: str | None = dataclasses.field(repr=False)
    admin_api_key: str | None = dataclasses.field(repr=False)
    max_queued_requests: int | None
    req_waiting_timeout_s: float | None
    req_running_timeout_s: float | None
    allow_auto_truncate: bool
    watchdog_timeout_s: float

    # Memory and scheduling
    mem_fraction_static: float
    max_total_tokens: int | None
    max_running_requests: int
    page_size: int
    chunked_prefill_size: int | None
    max_prefill_tokens: int
    schedule_policy: str
    priority: PriorityConfig | None  # None: priorities are refused
    schedule_conservativeness: float
    disable_radix_cache: bool
    disable_overlap_schedule: bool
    hicache: HiCacheConfig | None

    # Device and kernels
    device: str
    prefill_attention_backend: str
    decode_attention_backend: str
    sampling_backend: str
    cuda_graph_bs: tuple[int, ...]
    piecewise_cuda_graph_tokens: tuple[int, ...]
    disable_cuda_graph_padding: bool
    debug_cuda_graph: bool
    cuda_coredump_dir: str | None
    random_seed: int
    memory_check: str

    # API behaviour
    sampling_defaults: str
    trust_remote_code: bool
    enable_deterministic_inference: bool
    strict_model_name: bool
    strict_fields: bool
    reasoning_parser: str | None
    enable_cache_report: bool
    stream_interval: int
    incremental_streaming_output: bool

    # Logging and metrics
    log_level: str
    log_level_http: str
    log_requests: bool
    log_requests_level: int
    decode_log_interval: int
    enable_metrics: bool
    metrics_prefix: str
    flight_recorder_steps: int
    flight_recorder_dir: str
    flight_recorder_prompts: bool
    torch_profiler_dir: str | None

    def public_dict(self) -> dict[str, object]:
        """The configuration for logs and /get_server_info: JSON values, keys replaced by whether they are set."""
        values = dataclasses.asdict(self)
        values["api_key"] = self.api_key is not None
        values["admin_api_key"] = self.admin_api_key is not None
        return values
