"""EngineConfig: the flags and the settings that follow from them on this machine. The engine reads nothing else."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from fenceline.config import ConfigError, require, user_path
from fenceline.config.chat_templates import read_chat_template
from fenceline.config.checks import check
from fenceline.config.draft_config import DraftConfig, SpeculativeAlgorithm, SpeculativeConfig, read_draft_config
from fenceline.config.families import Windows
from fenceline.config.flags import flags_of
from fenceline.config.hicache import HiCacheConfig, hicache_config, machine_bytes
from fenceline.config.image_rules import ImageRules, image_rules
from fenceline.config.kv_events import KVEventsConfig, kv_events_config
from fenceline.config.kv_layout import KVLayout
from fenceline.config.model_config import ModelConfig
from fenceline.config.model_files import CONVERT_DRAFT, hub_file, model_directory, pools_last_token, weight_files
from fenceline.config.private_files import make_private_folder, why_unusable
from fenceline.config.quantization import INT4_GROUPS, ON_LINE_METHOD, WHOLE_ROWS
from fenceline.config.request_limits import MAX_PRIORITY, MIN_PRIORITY
from fenceline.config.server_args import ServerArgs, is_registered
from fenceline.config.state_layout import GRID
from fenceline.config.traces import TracesConfig, traces_config
from fenceline.config.weight_headers import (
    check_fits,
    check_headers,
    gpu_free_bytes,
    machine_free_bytes,
    read_headers,
    weight_bytes,
)

# Keys can also be given in the environment, because every user of the machine can read a command line.
API_KEY_VARIABLE = "FENCELINE_API_KEY"
ADMIN_API_KEY_VARIABLE = "FENCELINE_ADMIN_API_KEY"
_SPECULATIVE_STEPS = 3
_ADAPTIVE = False  # whether steps propose more or fewer drafts unless --speculative-adaptive says so
# The same without a draft model: rows that are verified, and the fewest and most tokens that must have occurred before.
_LOOKED_UP_ROWS, _LOOKED_UP_ADAPTIVE, _MATCH_WINDOW = 8, True, (1, 12)
_TREE_TOKENS = 8  # default number of tokens that are verified with trees: the last token and drafts
_MOST_TREE_NODES = 64  # an ancestor mask has this many bits
_SAMPLING_BACKEND = "torch"  # --sampling-backend has no effect: every value that it accepts means this
# One of these files exists where Linux has an NVIDIA driver: bare metal and containers, WSL, Tegra.
_DRIVER_MARKS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl-gpu")
_MEM_FRACTION = {"cpu": 0.3, "cuda": 0.85}
# Tokens of other requests wait for a prefill step. On one core, a step of 128 tokens takes the demo model 20 ms, and
# 80 ms at the end of a prompt of 4,000 tokens. Longer steps take no less time for each token, shorter steps take more.
_CHUNKED_PREFILL_SIZE = {"cpu": 128, "cuda": 8192}
_MAX_PREFILL_TOKENS = 16384
_MAX_RUNNING_REQUESTS = {"cpu": 256, "cuda": 1024}
# On a CPU a prompt takes long even if most of it is cached, because its tokens attend to the cached prefix.
_PREFILL_MAX_REQUESTS: dict[str, int | None] = {"cpu": 8, "cuda": None}
# How much memory the page table (request rows x pages of the longest context, int32) may take by default.
_ROW_TABLE_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
_LEAST_EMBEDDING_ROWS = 8192
_ON_ANY_DEVICE = "torch"
_IN_FIXED_ORDER = "triton"  # the backend for GPUs that can add up in an order that only positions determine
_ATTENTION_BACKENDS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_draft_attention_backend",
)
_MAX_BS = 256
_MOST_GRAPHS = 512
# (up to this size, the distance between sizes), and the distance beyond. Sizes are closest for small batches, where a
# padded row costs most.
_BUCKET_STEPS = ((64, 8), (256, 16), (512, 32))
_STEP_BEYOND = 64
_GRAPH_TOKENS_STEPS = ((64, 16), (256, 32), (1024, 64), (2048, 128))
_GRAPH_TOKENS_STEP_BEYOND = 512
_SMALLEST_PREFILL = 16
_MAX_GRAPH_TOKENS = 2048
# Launching one layer takes the CPU about 0.33 ms in a server that computes several prompts in a step, and meanwhile it
# cannot send the first tokens of the step before. A token takes the GPU two operations for each weight, at 6e14
# operations per second (H200). A rank multiplies by its part of the weights only, and launches two sums more in each
# layer.
_LAUNCH_WEIGHT_TOKENS = 0.33e-3 * 6e14 / 2
_LAUNCHES_OF_RANKS = 1.25  # the CPU's time for a layer with sums over ranks, compared with one rank


@dataclass(frozen=True, slots=True)
class PriorityConfig:
    """The settings of --enable-priority-scheduling. ``preemption_threshold`` None: none is retracted for another."""

    low_values_first: bool
    default_value: int
    preemption_threshold: int | None

    def rank(self, priority: int) -> int:
        """The rank of requests with this ``priority``; requests with the smallest rank go first."""
        return priority if self.low_values_first else -priority


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The flags as they were given (``server_args``), and the settings that were derived from them. It has plain values
    only, so that it can be sent to the scheduler and detokenizer processes. If a flag and a field have the same name,
    the field is the one to use: the flag may be None or ``auto``. The context length and the dtype are in
    ``config.model``. Lengths and sizes are in tokens, times in seconds."""

    server_args: ServerArgs  # with the keys and timeouts that the environment gives

    # Model and tokenizer
    model: ModelConfig
    tokenizer_path: str  # a directory, as model.model_path is
    chat_template: str | None  # the template's text; None: the tokenizer's own
    served_model_name: str

    # Memory and scheduling
    mem_fraction_static: float
    max_total_tokens: int | None  # whole pages; None: the model runner takes what mem_fraction_static leaves
    max_running_requests: int
    chunked_prefill_size: int | None  # None: prompts are never split
    max_prefill_tokens: int
    prefill_max_requests: int | None  # None: any number in one prefill step
    priority: PriorityConfig | None  # None: priorities are refused
    hicache: HiCacheConfig | None  # None: pages are only on the device
    kv_events: KVEventsConfig | None = None  # None: changes of the prefix cache are not published
    traces: TracesConfig | None = None  # None: requests are not traced
    speculative: SpeculativeConfig | None  # None: one token per step

    # Device and kernels
    device: str  # cpu, cuda or a registered kind
    prefill_attention_backend: str  # auto: the model runner measures
    decode_attention_backend: str
    cuda_graph_bs: tuple[int, ...]  # batch sizes to capture for decode, ascending; empty: none
    piecewise_cuda_graph_tokens: tuple[int, ...]  # the same for prefill, in tokens
    random_seed: int
    num_embedding_rows: int = 0  # of the pool of images' embeddings; 0 for a model without a tower
    state_grid: int = GRID  # tokens between two states of recurrent layers that requests may begin with
    replica: int = 0  # which one of --dp-size the processes belong to that get this configuration
    images: ImageRules | None = None  # None for a model that reads text only

    # Logging, and folders as absolute paths
    log_level_http: str
    flight_recorder_dir: str
    torch_profiler_dir: str | None  # None: the scheduler makes a new folder
    cuda_coredump_dir: str | None

    @property
    def kv_layout(self) -> KVLayout:
        """What a KV page of one rank consists of: the model's layers, then those of the draft."""
        return _kv_layout(self.server_args, self.model, self.draft)

    @property
    def draft(self) -> DraftConfig | None:
        """The draft model; None without one."""
        return None if self.speculative is None else self.speculative.draft

    @property
    def looks_up_drafts(self) -> bool:
        """Whether drafts are looked up in the requests' own tokens."""
        return self.speculative is not None and self.speculative.match_window is not None

    @property
    def most_undone(self) -> int:
        """Tokens of a request that a decode step may compute and some of which then do not stay."""
        return 0 if self.speculative is None else self.speculative.largest.num_nodes

    @property
    def mixes_steps(self) -> bool:
        """Whether running requests decode in the steps that compute prompts. Not if they speculate, not if an image has
        to be seen whole, which might not fit beside them, and not if nothing is decoded."""
        args, model, vision = self.server_args, self.model, self.model.vision
        sees_whole = vision is not None and vision.sees_whole
        asked = args.enable_mixed_chunk
        if asked is None:
            is_chunked = self.chunked_prefill_size is not None
            asked = args.max_inter_token_ms is not None or (is_chunked and _limits_of(self.device) == "cuda")
        return asked and self.speculative is None and not sees_whole and not model.embeds

    @property
    def refuses_grammars(self) -> str | None:
        """Why this server cannot constrain answers to a grammar; None: it can."""
        args = self.server_args
        if args.grammar_backend == "none":
            return "this server runs with --grammar-backend none: answers cannot be constrained"
        if args.skip_tokenizer_init:
            return "this server runs with --skip-tokenizer-init: without a vocabulary answers cannot be constrained"
        return None

    @property
    def local_ranks(self) -> range:
        """Which ranks of a replica are on this host."""
        num = self.server_args.tp_size // self.server_args.nnodes
        return range(self.server_args.node_rank * num, (self.server_args.node_rank + 1) * num)

    @property
    def num_sharing(self) -> int:
        """How many ranks, of all replicas, are on this host and share its memory and cores."""
        return len(self.local_ranks) * self.server_args.dp_size

    def public_dict(self) -> dict[str, object]:
        """The configuration for logs and /get_server_info, as JSON values. API keys are only said to be set or not."""
        values = dataclasses.asdict(self, dict_factory=_with_lists)
        flags: dict[str, object] = values.pop("server_args")
        del values["replica"]
        for name in _secret_flags():
            flags[name] = flags[name] is not None
        if values.pop("speculative") is not None:
            assert self.speculative is not None
            steps, topk = self.speculative.num_steps, self.speculative.topk
            num_nodes = self.speculative.largest.num_nodes
            flags |= {"speculative_num_steps": steps, "speculative_eagle_topk": topk}
            flags["speculative_num_draft_tokens"] = num_nodes
            flags["speculative_adaptive"] = self.speculative.is_adaptive
            if self.speculative.match_window is not None:
                least, most = self.speculative.match_window
                flags["speculative_ngram_min_match_window_size"] = least
                flags["speculative_ngram_max_match_window_size"] = most
        flags["enable_mixed_chunk"] = self.mixes_steps
        model = {name: values["model"][name] for name in ("model_path", "dtype", "context_length")}
        return flags | values | model | {"sampling_backend": _SAMPLING_BACKEND, "is_embedding": self.model.embeds}


def _with_lists(fields: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The fields as a dict with sets as lists, because JSON has no sets."""
    return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in fields}


@functools.cache  # it takes a millisecond, and every GET /server_info needs it
def _secret_flags() -> Sequence[str]:
    return [flag.name for flag in flags_of(ServerArgs).values() if flag.spec.secret]


def resolve(args: ServerArgs, cuda_probe: Callable[[], bool] | None = None) -> EngineConfig:
    """The configuration for ``args`` on this machine. May download the model. ``cuda_probe`` says whether there is a
    GPU that can be used. Raises ConfigError, one line with the remedy, for values and combinations that cannot work."""
    args = _with_keys_of_environment(args)
    check(args)
    overrides = _model_overrides(args)
    chat_template = read_chat_template(args.chat_template)
    device = choose_device(args.device, cuda_probe or cuda_is_available)
    weights = args.load_format != "dummy"
    path = model_directory(args.model_path, "--model-path", args.revision, args.download_dir, weights)
    tokenizer_path = _tokenizer_path(args, path)
    model = _read_model(args, path, tokenizer_path, overrides, device)
    _check_latent(args, model, device)
    chunk = _chunked_prefill_size(args, device)
    max_prefill_tokens = args.max_prefill_tokens or max(_MAX_PREFILL_TOKENS, chunk or 0)
    _check_images(args, model, device, chunk and min(chunk, max_prefill_tokens))
    max_running_requests = _max_running_requests(args, device, model)
    _check_states(args, model, max_running_requests)
    _check_blocks(args, model, device)
    attention = attention_backends(args, device, model)
    speculative = _speculative(args, model, chunk and min(chunk, max_prefill_tokens))
    draft = None if speculative is None else speculative.draft
    _check_ranks(args, model, None if draft is None else draft.model)
    if draft is not None:
        _check_latent(args, draft.model, device)
    if device == "cpu":
        _check_memory(args, model, max_running_requests, _kv_layout(args, model, draft))
    return EngineConfig(
        server_args=_with_timeouts_of_environment(args),
        model=model,
        tokenizer_path=tokenizer_path,
        chat_template=chat_template,
        served_model_name=args.served_model_name or args.model_path,
        mem_fraction_static=args.mem_fraction_static or _MEM_FRACTION[_limits_of(device)],
        max_total_tokens=_whole_pages(args),
        max_running_requests=max_running_requests,
        chunked_prefill_size=chunk,
        max_prefill_tokens=max_prefill_tokens,
        prefill_max_requests=args.prefill_max_requests or _PREFILL_MAX_REQUESTS[_limits_of(device)],
        priority=_priority(args),
        hicache=hicache_config(args, device, attention),
        kv_events=kv_events_config(args),
        traces=traces_config(args),
        speculative=speculative,
        device=device,
        prefill_attention_backend=attention[0],
        decode_attention_backend=attention[1],
        cuda_graph_bs=() if model.embeds else cuda_graph_bs(args, device, max_running_requests),
        piecewise_cuda_graph_tokens=piecewise_cuda_graph_tokens(args, device, model, chunk or max_prefill_tokens),
        random_seed=args.random_seed if args.random_seed is not None else secrets.randbelow(2**31),
        num_embedding_rows=_num_embedding_rows(model, 0 if draft is None else draft.lookahead),
        images=image_rules(args, model),
        log_level_http=args.log_level_http or args.log_level,
        flight_recorder_dir=args.flight_recorder_dir or _flight_recorder_dir(args.flight_recorder_steps),
        torch_profiler_dir=_torch_profiler_dir(args),
        cuda_coredump_dir=core_dump_dir(args.cuda_coredump_dir),
    )


def _embedding(args: ServerArgs, model: ModelConfig) -> ModelConfig:
    """``model``, served for embeddings. Raises ``ConfigError`` for flags that need an answer's tokens, and for a model
    whose last token's state is not all that it was trained to give."""
    for name in ("speculative_algorithm", "cuda_graph_bs", "cuda_graph_max_bs"):
        require(
            getattr(args, name) is None,
            f"--{name.replace('_', '-')}: a server of embeddings (--is-embedding, or a modules.json that pools) decodes"
            " nothing; leave it out",
        )
    for name, wanted in (("is_causal", False), ("use_bidirectional_attention", True)):
        require(
            model.hf_config.get(name) is not wanted,
            f"--model-path {args.model_path}: config.json says {name} {str(wanted).lower()}, and tokens attend to"
            " those before them alone here; serve an embedding model that is a decoder, such as Qwen3-Embedding",
        )
    return dataclasses.replace(model, embeds=True)


def _check_images(args: ServerArgs, model: ModelConfig, device: str, step_tokens: int | None) -> None:
    """Raises ``ConfigError`` if images cannot be computed where their tokens attend to one another. ``step_tokens``:
    the most tokens of a prefill step; None: prompts are not split."""
    if model.vision is None or not model.vision.sees_whole:
        return
    require(
        device == "cpu" or not args.enable_deterministic_inference,
        f"--enable-deterministic-inference: on a GPU {model.architecture} attends to images in an order that depends on"
        " the step; leave it out",
    )
    num_tokens = model.vision.images.most_tokens
    require(
        step_tokens is None or step_tokens >= 2 * num_tokens,
        f"--chunked-prefill-size {step_tokens}: the {num_tokens} tokens of an image are computed in one step, which a"
        f" long prompt may have to share: give at least {2 * num_tokens}, or -1",
    )


def _num_embedding_rows(model: ModelConfig, lookahead: int) -> int:
    """Two of the largest images that fit into a prompt, with those between them from which a draft may compute its row
    of one token (``DraftConfig.lookahead``); or many small ones."""
    if model.vision is None:
        return 0
    return max(2 * min(model.vision.images.most_tokens, model.context_length) + lookahead, _LEAST_EMBEDDING_ROWS)


def _with_keys_of_environment(args: ServerArgs) -> ServerArgs:
    api_key = args.api_key if args.api_key is not None else os.environ.get(API_KEY_VARIABLE) or None
    admin_key = args.admin_api_key
    if admin_key is None:
        admin_key = os.environ.get(ADMIN_API_KEY_VARIABLE) or None
    return dataclasses.replace(args, api_key=api_key, admin_api_key=admin_key)


def _with_timeouts_of_environment(args: ServerArgs) -> ServerArgs:
    return dataclasses.replace(
        args,
        req_waiting_timeout=_timeout(args.req_waiting_timeout, "SGLANG_REQ_WAITING_TIMEOUT"),
        req_running_timeout=_timeout(args.req_running_timeout, "SGLANG_REQ_RUNNING_TIMEOUT"),
    )


def _timeout(given: float | None, variable: str) -> float | None:
    """A timeout in seconds, from the flag or, as in SGLang, the environment variable, where 0 or less means never."""
    if given is not None:
        return given
    text = os.environ.get(variable, "")
    try:
        seconds = float(text or -1)
    except ValueError:
        raise ConfigError(f"{variable}={text}: give a number of seconds, or unset it") from None
    return seconds if 0 < seconds < float("inf") else None


def _speculative(args: ServerArgs, target: ModelConfig, prefill_tokens: int | None) -> SpeculativeConfig | None:
    """How decode steps speculate; None: they do not. May download the draft. ``prefill_tokens``: the most tokens of a
    prefill step; None: prompts are not split."""
    if args.speculative_algorithm is None:
        return None
    if args.speculative_algorithm == SpeculativeAlgorithm.NGRAM.value:
        return _looked_up(args)
    directory = args.speculative_draft_model_path
    if directory is not None:
        flag, weights = "--speculative-draft-model-path", args.load_format != "dummy"
        directory = model_directory(directory, flag, args.speculative_draft_model_revision, args.download_dir, weights)
    token_map = args.speculative_token_map
    if token_map is not None:
        token_map = hub_file(token_map, "--speculative-token-map", args.download_dir)
    draft = read_draft_config(SpeculativeAlgorithm(args.speculative_algorithm), directory, target, token_map)
    if args.load_format != "dummy" and draft.model.model_path != target.model_path:
        read_headers(weight_files(Path(draft.model.model_path), CONVERT_DRAFT))  # reports a damaged file now
    num_layers = draft.model.num_layers
    has_layers_by_step = draft.algorithm is SpeculativeAlgorithm.NEXTN and num_layers > 1
    num_steps = args.speculative_num_steps or (num_layers if has_layers_by_step else _SPECULATIVE_STEPS)
    if has_layers_by_step and num_steps > num_layers:
        raise ConfigError(
            f"--speculative-num-steps {num_steps}: this model has {num_layers} layers that predict further tokens, one"
            f" for each step; give {num_layers} at most"
        )
    if has_layers_by_step and prefill_tokens is not None and prefill_tokens < 2 * num_layers:
        # A prompt whose computation goes on may get only half of a step, and all its chunks but the last end at least
        # ``lookahead`` tokens before its end.
        raise ConfigError(
            f"a prefill step of {prefill_tokens} tokens is too short for layers that look {num_layers} tokens ahead:"
            f" give at least {2 * num_layers} as --chunked-prefill-size and --max-prefill-tokens"
        )
    topk, num_draft_tokens = args.speculative_eagle_topk or 1, None
    if topk > 1:
        if has_layers_by_step:
            raise ConfigError(
                f"--speculative-eagle-topk {topk}: layers that each run one step propose chains, leave it out"
            )
        require(
            not target.recurrent_layers,
            f"--speculative-eagle-topk {topk}: layers of {target.architecture} carry a state from token to token, which"
            " follows one chain of drafts; leave it out",
        )
        _check_windows(target.windows + draft.model.windows, topk)
        num_draft_tokens = _tree_size(args, draft, num_steps, topk)
    is_adaptive = _ADAPTIVE if args.speculative_adaptive is None else args.speculative_adaptive
    simulated, backend = _simulated_acceptance(args, num_steps), args.speculative_draft_attention_backend
    return SpeculativeConfig(draft, num_steps, simulated, backend, topk, num_draft_tokens, is_adaptive)


def _looked_up(args: ServerArgs) -> SpeculativeConfig:
    """Without a draft model: tokens are looked up in those of their request."""
    least = args.speculative_ngram_min_match_window_size or _MATCH_WINDOW[0]
    most = args.speculative_ngram_max_match_window_size or max(_MATCH_WINDOW[1], least)
    num_steps = args.speculative_num_steps or (args.speculative_num_draft_tokens or _LOOKED_UP_ROWS) - 1
    is_adaptive = _LOOKED_UP_ADAPTIVE if args.speculative_adaptive is None else args.speculative_adaptive
    simulated = _simulated_acceptance(args, num_steps)
    return SpeculativeConfig(None, num_steps, simulated, is_adaptive=is_adaptive, match_window=(least, most))


def _simulated_acceptance(args: ServerArgs, num_steps: int) -> float | None:
    simulated = args.speculative_simulate_acceptance
    if simulated is not None and simulated > num_steps + 1:
        raise ConfigError(
            f"--speculative-simulate-acceptance {simulated:g}: a step yields at most --speculative-num-steps + 1 ="
            f" {num_steps + 1} tokens"
        )
    return simulated


def _check_windows(windows: Windows, topk: int) -> None:
    smallest = min((window for window in windows if window is not None), default=_MOST_TREE_NODES)
    if smallest < _MOST_TREE_NODES:
        raise ConfigError(
            f"--speculative-eagle-topk {topk}: trees need windows of {_MOST_TREE_NODES} tokens or more, this model's"
            f" have {smallest}; leave it out"
        )


def _tree_size(args: ServerArgs, draft: DraftConfig, num_steps: int, topk: int) -> int:
    """The value of --speculative-num-draft-tokens for trees, or its default."""
    flag = f"--speculative-eagle-topk {topk}"
    num_known = draft.draft_vocab_size or draft.model.vocab_size
    most_topk = min(num_known, _MOST_TREE_NODES - 1)
    if topk > most_topk:
        raise ConfigError(
            f"{flag}: give at most {most_topk}: the draft knows {num_known} tokens, and a tree has"
            f" {_MOST_TREE_NODES} at most, the last one of the request included"
        )
    if topk * (num_steps - 1) > _MOST_TREE_NODES:
        raise ConfigError(
            f"{flag}: with --speculative-num-steps {num_steps} the draft would attend to a tree of"
            f" {topk * (num_steps - 1)} tokens, {_MOST_TREE_NODES} at most are possible; lower one of the two"
        )
    least, most = num_steps + 1, min(1 + topk + (num_steps - 1) * topk * topk, _MOST_TREE_NODES)
    given = args.speculative_num_draft_tokens
    if given is None:
        return min(max(_TREE_TOKENS, least), most)
    if not least <= given <= most:
        raise ConfigError(
            f"--speculative-num-draft-tokens {given}: trees of {num_steps} steps and topk {topk} have {least} to {most}"
        )
    return given


def _check_ranks(args: ServerArgs, model: ModelConfig, draft: ModelConfig | None) -> None:
    """Refuse a number of ranks over which the model or its draft cannot be split."""
    size, groups, experts = args.tp_size, args.ep_size, model.experts
    if groups > 1 and (experts is None or experts.num_experts % groups):
        what = "no experts" if experts is None else f"{experts.num_experts} experts, which it does not divide"
        raise ConfigError(f"--ep-size {groups}: this model has {what}; leave it out or choose another")
    if size == 1:
        return
    _check_split(size, groups, model, "this model")
    if draft is not None:
        if groups > 1 and draft.experts is not None and draft.experts.num_experts % groups:
            raise ConfigError(
                f"--ep-size {groups}: the draft has {draft.experts.num_experts} experts, which it does not divide;"
                " leave it out or choose another"
            )
        _check_split(size, groups, draft, "the draft")


def _check_split(size: int, groups: int, model: ModelConfig, name: str) -> None:
    heads, kv_heads, experts = model.num_heads, model.num_kv_heads, model.experts
    group, recurrent = _expert_group(model), 0
    if model.recurrent is not None:
        recurrent = model.recurrent.num_key_heads or model.hidden_size
    possible = [
        n
        for n in range(1, heads + 1)
        if heads % n == 0
        and all(size % n == 0 for size in model.plain_mlp_sizes)
        and n % groups == 0
        and (experts is None or experts.intermediate_size % (n // groups * group) == 0)
        # All queries that share a key head select its blocks together.
        and (kv_heads % n == 0 or (model.blocks is None and n > kv_heads and n % kv_heads == 0))
        and recurrent % n == 0
    ]
    if size not in possible:
        raise ConfigError(
            f"--tp-size {size}: {name} has {heads} attention heads, {kv_heads} key/value heads"
            f"{f', {recurrent} key heads or channels of recurrent layers' if recurrent else ''} and MLPs of"
            f" {', '.join(map(str, sorted(set(model.mlp_sizes))))} features"
            f"{f' (experts in groups of {group})' if group > 1 else ''}, which it does not divide; use"
            f" {', '.join(map(str, possible))}{', or --ep-size' if group > 1 and groups < size else ''}"
        )


def _expert_group(model: ModelConfig) -> int:
    """Features of an expert can be split over ranks only in groups of this size: four-bit numbers of a group share a
    scale, and so must be on one rank."""
    if model.experts is None:
        return 1
    stored = model.experts.format or model.quantization
    four_bits = [] if stored is None else [each for each in stored.formats if each.kind in ("int4", "mxfp4")]
    # Made on-line or with a scale for each row, numbers are stored in groups that fit.
    fits = [each.method == ON_LINE_METHOD or each.group_size == WHOLE_ROWS for each in four_bits]
    sizes = [min(INT4_GROUPS) if any_ else each.group_size for any_, each in zip(fits, four_bits, strict=True)]
    return max(sizes, default=1)


def _priority(args: ServerArgs) -> PriorityConfig | None:
    if not args.enable_priority_scheduling:
        return None
    low_first, default = args.schedule_low_priority_values_first, args.default_priority_value
    if default is None:  # as in SGLang, requests with a priority go before those without
        default = MAX_PRIORITY if low_first else MIN_PRIORITY
    threshold = None if args.disable_priority_preemption else args.priority_scheduling_preemption_threshold
    return PriorityConfig(low_first, default, threshold)


def _torch_profiler_dir(args: ServerArgs) -> str | None:
    folder = args.torch_profiler_dir or os.environ.get("SGLANG_TORCH_PROFILER_DIR")
    return os.path.abspath(folder) if folder else None


def _flight_recorder_dir(num_steps: int) -> str:
    """The default folder for dumps. Each user has one, because other users cannot write to it. If another user has
    taken its name, a folder with a random name is used, so that the dump does not fail."""
    path = str(Path(tempfile.gettempdir()) / f"fenceline-flight-recorder-{os.getuid()}")
    try:
        if num_steps > 0:
            os.close(make_private_folder(path))
    except OSError:
        return f"{path}-{secrets.token_hex(8)}"
    return path


def core_dump_dir(wanted: str | None) -> str | None:
    """The folder of --cuda-coredump-dir as an absolute path; it is made if it does not exist. Raises ConfigError, one
    line, if it cannot be written to, or if other users could put links there, because the names that the driver uses
    can be guessed."""
    if wanted is None:
        return None
    path = user_path(wanted).absolute()
    try:
        os.close(make_private_folder(str(path)))
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(f"--cuda-coredump-dir {wanted}: {why_unusable(str(path), error)}") from error
    return str(path)


def choose_device(wanted: str, probe: Callable[[], bool]) -> str:
    """``cpu``, ``cuda`` or a registered kind for ``--device``. Raises ConfigError if there is no GPU to use."""
    if wanted == "cpu" or is_registered(wanted):
        return wanted
    available = probe()
    if wanted == "cuda" and not available:
        raise ConfigError(
            "--device cuda: torch sees no CUDA GPU; use --device cpu, or install a torch build for your driver"
        )
    return "cuda" if available else "cpu"


def cuda_is_available() -> bool:
    """Whether torch can use a CUDA GPU. Asks the driver and torch's files: importing torch would take seconds."""
    if not any(Path(mark).exists() for mark in _DRIVER_MARKS):
        return False
    built_for = torch_cuda_version()
    if built_for is None:
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    num_gpus, version = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(num_gpus)):
        return False
    if driver.cuDriverGetVersion(ctypes.byref(version)):
        return False
    # A driver runs what was built for its own major version (its version is 1000 major + 10 minor) and for older ones.
    return num_gpus.value > 0 and version.value // 1000 >= int(built_for.partition(".")[0])


def torch_cuda_version() -> str | None:
    """``torch.version.cuda`` of the installed torch, which is not imported: None for a build for the CPU."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return None
    text = Path(found.origin).with_name("version.py").read_text()
    match = re.search(r"^cuda\b[^=]*= *['\"]([0-9.]+)", text, re.MULTILINE)
    return None if match is None else match[1]


def _limits_of(device: str) -> str:
    return "cuda" if device == "cuda" else "cpu"


def _model_overrides(args: ServerArgs) -> dict[str, object]:
    text = args.json_model_override_args
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--json-model-override-args: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError("""--json-model-override-args: expected an object, for example '{"rope_theta": 1e6}'""")
    return value


def _read_model(
    args: ServerArgs, path: str, tokenizer_path: str, overrides: dict[str, object], device: str
) -> ModelConfig:
    try:
        model = ModelConfig.from_dir(
            path, overrides, args.context_length, args.dtype, tokenizer_path, args.quantization
        )
        if args.dtype == "auto":
            model = dataclasses.replace(model, dtype=_auto_dtype(device, model.dtype))
        if args.is_embedding or pools_last_token(Path(path)):
            model = _embedding(args, model)
        if args.load_format != "dummy":
            # The scheduler reads them, but what is missing, damaged or too large is reported now.
            tensors = read_headers(weight_files(Path(path)), model.quantization)
            check_headers(model, tensors)
            _check_weight_bytes(args, model, weight_bytes(model, tensors), device)
    except ValueError as error:
        text = str(error).removeprefix(f"{path}: ")  # the flag's name already leads to it
        raise ConfigError(text if text.startswith("--") else f"--model-path {args.model_path}: {text}") from error
    return model


def _check_weight_bytes(args: ServerArgs, model: ModelConfig, num_bytes: int, device: str) -> None:
    """Raises ConfigError if the ranks' parts of the weights do not fit here."""
    part = num_bytes // args.tp_size
    if device == "cuda":
        free = gpu_free_bytes()
        if free is not None:
            check_fits(model, part, free, "a GPU", (f"--tp-size {-(-num_bytes // free)} or more",))
    elif device == "cpu":
        num_ranks = args.tp_size // args.nnodes * args.dp_size
        remedies = ("fewer --dp-size",) if args.dp_size > 1 else ()
        check_fits(model, part * num_ranks, machine_free_bytes(), "this machine", remedies)


# Fields in which a checkpoint with new weights may differ: they do not affect the computation, or the server chooses
# them.
_MAY_DIFFER = {
    "model_path",
    "model_type",
    "eos_token_ids",
    "bos_token_id",
    "dtype",
    "sampling_defaults",
    "hf_config",
    "embeds",
}


def check_same_model(config: EngineConfig, directory: str) -> None:
    """Raises ``ConfigError`` if the config.json in ``directory`` does not describe the model that is served. Weights
    are not compared."""
    args, ours = config.server_args, config.model
    theirs = ModelConfig.from_dir(
        directory, _model_overrides(args), args.context_length, args.dtype, config.tokenizer_path, args.quantization
    )
    for field in dataclasses.fields(ModelConfig):
        a, b = getattr(theirs, field.name), getattr(ours, field.name)
        if field.name not in _MAY_DIFFER and a != b:
            raise ConfigError(
                f"{directory}: another model than the one that is served: its {field.name} is {a}, not {b}"
            )


def with_weights(config: EngineConfig, directory: str | None, label: str | None) -> EngineConfig:
    """``config`` after the weights have been replaced by those in ``directory`` (None: by tensors). ``label``: the new
    --weight-version; None: it does not change."""
    model, args = config.model, config.server_args
    if directory is not None:
        model = dataclasses.replace(model, model_path=directory)
        args = dataclasses.replace(args, load_format="auto")
    if label is not None:
        args = dataclasses.replace(args, weight_version=label)
    return dataclasses.replace(config, model=model, server_args=args)


def _tokenizer_path(args: ServerArgs, model_path: str) -> str:
    if args.tokenizer_path is None:
        return model_path
    return model_directory(args.tokenizer_path, "--tokenizer-path", None, args.download_dir, weights=False)


def _auto_dtype(device: str, checkpoint: str) -> str:
    if device != "cuda":
        return "float32"  # only few CPUs are fast with 16-bit types
    return "bfloat16" if checkpoint == "float32" else checkpoint


def _chunked_prefill_size(args: ServerArgs, device: str) -> int | None:
    if args.chunked_prefill_size == -1:
        return None
    default = _CHUNKED_PREFILL_SIZE[_limits_of(device)]
    if args.max_prefill_tokens is not None:  # without --chunked-prefill-size it limits the default too
        default = max(min(default, args.max_prefill_tokens // args.page_size * args.page_size), args.page_size)
    return args.chunked_prefill_size or default


def _whole_pages(args: ServerArgs) -> int | None:
    if args.max_total_tokens is None:
        return None
    return args.max_total_tokens // args.page_size * args.page_size


def _max_running_requests(args: ServerArgs, device: str, model: ModelConfig) -> int:
    """Of a model with states fewer may run, for which there is room (``state_pool.most_running``)."""
    if args.max_running_requests is not None:
        return args.max_running_requests
    row_bytes = _row_bytes(args, model)
    limit = min(_MAX_RUNNING_REQUESTS[_limits_of(device)], _ROW_TABLE_BYTES[_limits_of(device)] // row_bytes)
    if args.max_total_tokens is not None:
        limit = min(limit, args.max_total_tokens // args.page_size)
    if model.recurrent_layers and args.max_mamba_cache_size is not None:
        limit = min(limit, args.max_mamba_cache_size // (1 if args.disable_radix_cache else 2))
    return max(limit, 1)


def _row_bytes(args: ServerArgs, model: ModelConfig) -> int:
    """Of a request's row: its page table, and its tokens where drafts are looked up in them."""
    keeps_tokens = args.speculative_algorithm == SpeculativeAlgorithm.NGRAM.value
    return 4 * (-(-model.context_length // args.page_size) + keeps_tokens * model.context_length)


def _check_states(args: ServerArgs, model: ModelConfig, max_running_requests: int) -> None:
    """Raises ConfigError for what a model with recurrent layers cannot be served with, or another has no use for."""
    size, ratio = args.max_mamba_cache_size, args.mamba_full_memory_ratio
    if not model.recurrent_layers:
        require(size is None, f"--max-mamba-cache-size {size}: {model.architecture} has no states; leave it out")
        return
    require(ratio > 0, f"--mamba-full-memory-ratio {ratio:g}: must be above 0, 0.9 is usual")
    require(
        GRID % args.page_size == 0,
        f"--page-size {args.page_size}: {model.architecture} has states every {GRID} tokens, which are where a page"
        " ends; use --page-size 16, 32 or 64, a divisor of it",
    )
    require(
        size is None or size >= max_running_requests,
        f"--max-mamba-cache-size {size}: each of {max_running_requests} running requests has a state; give at least"
        " as many, or lower --max-running-requests",
    )


def _check_blocks(args: ServerArgs, model: ModelConfig, device: str) -> None:
    """Raises ConfigError for what attention to selected blocks cannot be computed with."""
    if (blocks := model.blocks) is None:
        return
    require(
        args.page_size % blocks.stride == 0,
        f"--page-size {args.page_size}: {model.architecture} keeps means of the keys of {blocks.stride} tokens, which"
        f" lie in one page; use --page-size 16, 32 or 64, a multiple of {blocks.stride}",
    )
    require(
        args.kv_cache_dtype == "auto",
        f"--kv-cache-dtype {args.kv_cache_dtype}: not supported for the selected blocks of {model.architecture}; leave"
        " it out",
    )
    require(
        args.speculative_algorithm is None,
        f"--speculative-algorithm: not supported for the selected blocks of {model.architecture}; leave it out",
    )
    for name in _ATTENTION_BACKENDS if device == "cuda" else ():
        require(
            (wanted := getattr(args, name)) in (None, "auto", "triton", _ON_ANY_DEVICE),
            f"--{name.replace('_', '-')} {wanted}: does not attend to the selected blocks of {model.architecture}; use"
            " triton, or leave it out",
        )


def _check_latent(args: ServerArgs, model: ModelConfig, device: str) -> None:
    """Raises ConfigError for what is not computed of latent attention: some of it by a GPU, some keys in FP8."""
    if model.indexer is not None and args.kv_cache_dtype != "auto" and model.indexer.head_dim.bit_count() != 1:
        raise ConfigError(
            f"--kv-cache-dtype {args.kv_cache_dtype}: in FP8 keys of an indexer have a power of two features, and"
            f" index_head_dim is {model.indexer.head_dim}; leave it out"
        )
    if model.latent is None or device != "cuda":
        return
    for name in _ATTENTION_BACKENDS:
        wanted = getattr(args, name)
        if wanted not in (None, "auto", "triton", _ON_ANY_DEVICE):
            raise ConfigError(
                f"--{name.replace('_', '-')} {wanted}: does not compute the latent attention of {model.architecture};"
                " use triton, or leave it out"
            )
    require(
        model.indexer is None or not args.enable_deterministic_inference,
        f"--enable-deterministic-inference: on a GPU the tokens that {model.architecture} selects depend on the batch;"
        " leave it out, or use --device cpu",
    )


def _kv_layout(args: ServerArgs, model: ModelConfig, draft: DraftConfig | None) -> KVLayout:
    dtype = "float8_e4m3fn" if args.kv_cache_dtype == "fp8_e4m3" else model.dtype
    models = [model] if draft is None else [model, draft.model]
    rows = chain.from_iterable(each.kv_rows(dtype, args.tp_size) for each in models)
    return KVLayout(args.page_size, tuple(rows))


def _check_memory(args: ServerArgs, model: ModelConfig, max_running_requests: int, layout: KVLayout) -> None:
    """Refuse what cannot fit in this machine's memory, if the device has no memory of its own, before any process is
    started. Memory that is in use, and that of a GPU, is taken into account by the scheduler before it allocates."""
    machine, page_size = machine_bytes(), args.page_size
    rows = max_running_requests * (_row_bytes(args, model) + 4)
    if rows > machine:
        raise ConfigError(
            f"--max-running-requests {max_running_requests}: with --context-length {model.context_length} their page"
            f" tables take {rows / 1e9:.1f} GB, and this machine has {machine / 1e9:.1f} GB of memory in all; lower"
            " one of the two"
        )
    bytes_per_token = args.tp_size * layout.page_nbytes // page_size
    if args.max_total_tokens is not None and args.max_total_tokens * bytes_per_token > machine:
        raise ConfigError(
            f"--max-total-tokens {args.max_total_tokens}: the KV cache takes {bytes_per_token} bytes a token, and this"
            f" machine has {machine / 1e9:.1f} GB of memory in all; give at most {machine // bytes_per_token}, or leave"
            " it out"
        )


def attention_backends(args: ServerArgs, device: str, model: ModelConfig) -> tuple[str, str]:
    """The attention backends of prefill and decode: a name, or ``auto`` for the one that is fastest on this GPU. Raises
    ConfigError for backends that ``device`` cannot run, and with speculation for those that cannot verify drafts."""
    both = args.attention_backend or "auto"
    if device == "cuda" and args.enable_deterministic_inference:
        _check_fixed_order(args)
        return _IN_FIXED_ORDER, _IN_FIXED_ORDER
    if device == "cuda":
        decode = args.decode_attention_backend or both
        return args.prefill_attention_backend or both, _verifying(args, decode, model)
    for name in _ATTENTION_BACKENDS:
        wanted = getattr(args, name)
        if wanted not in (None, "auto", _ON_ANY_DEVICE):
            raise ConfigError(
                f"--{name.replace('_', '-')} {wanted}: needs a CUDA GPU and this is {device}; leave it out"
            )
    return _ON_ANY_DEVICE, _ON_ANY_DEVICE


def _check_fixed_order(args: ServerArgs) -> None:
    """Raises ConfigError for flags with which a GPU adds up in an order that depends on more than a token's prefix."""
    flag = "--enable-deterministic-inference"
    for name in _ATTENTION_BACKENDS:
        wanted = getattr(args, name)
        if wanted not in (None, "auto", _IN_FIXED_ORDER):
            raise ConfigError(
                f"--{name.replace('_', '-')} {wanted}: adds up in an order that depends on the batch, which {flag}"
                f" rules out; use {_IN_FIXED_ORDER}, or leave it out"
            )


def _verifying(args: ServerArgs, decode: str, model: ModelConfig) -> str:
    """The decode backend: ``decode``, or with speculation one that can verify drafts. Only the device knows the lengths
    of speculative steps, so such a backend must not plan on the host."""
    if args.speculative_algorithm is None or decode in ("triton", "torch"):
        return decode
    if decode != "auto":
        raise ConfigError(
            f"--speculative-algorithm: {decode} cannot verify drafts, for the host learns their lengths late: "
            f"give --decode-attention-backend triton (--prefill-attention-backend {decode} may stay)"
        )
    if model.latent is not None:
        return "triton"
    return "triton" if model.head_dim >= 16 and model.head_dim & (model.head_dim - 1) == 0 else "torch"


def cuda_graph_bs(args: ServerArgs, device: str, max_running_requests: int) -> tuple[int, ...]:
    """The decode batch sizes to capture, ascending; empty: no graphs. Raises ConfigError for sizes that no batch
    reaches, and if --debug-cuda-graph would have nothing to compare."""
    buckets = _buckets(args, device, max_running_requests)
    _check_number(buckets, "--cuda-graph-max-bs or name fewer sizes with --cuda-graph-bs")
    if args.debug_cuda_graph and not buckets:
        raise ConfigError(
            f"--debug-cuda-graph: no graphs are captured on {device} by default; add --cuda-graph-bs 1 2 4 8"
        )
    return buckets


def _check_number(sizes: tuple[int, ...], remedy: str) -> None:
    if len(sizes) > _MOST_GRAPHS:
        raise ConfigError(
            f"{len(sizes)} graphs, up to size {sizes[-1]}, would take minutes to capture, and much memory; lower"
            f" {remedy}"
        )


def _buckets(args: ServerArgs, device: str, max_running_requests: int) -> tuple[int, ...]:
    if args.disable_cuda_graph:
        return ()
    if args.cuda_graph_bs is not None:
        if max(args.cuda_graph_bs) > max_running_requests:
            raise ConfigError(
                f"--cuda-graph-bs {max(args.cuda_graph_bs)}: no batch has more than {max_running_requests} requests; "
                "drop it or raise --max-running-requests"
            )
        return tuple(sorted(set(args.cuda_graph_bs)))
    if device != "cuda":
        return ()
    largest = min(args.cuda_graph_max_bs or _MAX_BS, max_running_requests)
    if args.disable_cuda_graph_padding:
        _check_number(tuple(range(1, largest + 1)), "--cuda-graph-max-bs or drop --disable-cuda-graph-padding")
        return tuple(range(1, largest + 1))
    return default_buckets(largest)


def default_buckets(largest: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then multiples of 8 up to 64, of 16 up to 256, of 32 up to 512, of 64 beyond; ``largest`` ends it."""
    return (*(size for size in (1, 2, 4) if size < largest), *_spread(8, _BUCKET_STEPS, _STEP_BEYOND, largest))


def piecewise_cuda_graph_tokens(
    args: ServerArgs, device: str, model: ModelConfig, max_step_tokens: int
) -> tuple[int, ...]:
    """The prefill sizes in tokens to capture in pieces, ascending; empty: none. No prefill step has more than
    ``max_step_tokens`` tokens. Raises ConfigError for sizes that no step reaches."""
    if args.disable_cuda_graph or args.disable_piecewise_cuda_graph:
        return ()
    if args.piecewise_cuda_graph_tokens is not None:
        largest = max(args.piecewise_cuda_graph_tokens)
        if largest > max_step_tokens:
            raise ConfigError(
                f"--piecewise-cuda-graph-tokens {largest}: no prefill step has more than {max_step_tokens} tokens; "
                "drop it or raise --chunked-prefill-size"
            )
        return tuple(sorted(set(args.piecewise_cuda_graph_tokens)))
    if device != "cuda":
        return ()
    if args.piecewise_cuda_graph_max_tokens is not None:
        sizes = _prefill_sizes(min(args.piecewise_cuda_graph_max_tokens, max_step_tokens))
        _check_number(sizes, "--piecewise-cuda-graph-max-tokens")
        return sizes
    worthwhile = 2 * launch_tokens(args.tp_size, model)  # in longer steps, padding costs more than launching
    sizes = _prefill_sizes(min(_MAX_GRAPH_TOKENS, max_step_tokens))
    return tuple(size for size in sizes if size <= max(worthwhile, sizes[0]))


def launch_tokens(num_ranks: int, model: ModelConfig) -> int:
    """The tokens of prompts that a GPU computes in the time in which a step is launched kernel by kernel."""
    ranks = num_ranks * (_LAUNCHES_OF_RANKS if num_ranks > 1 else 1)
    return int(_LAUNCH_WEIGHT_TOKENS * ranks / model.layer_weights)


def _prefill_sizes(largest: int) -> tuple[int, ...]:
    return _spread(_SMALLEST_PREFILL, _GRAPH_TOKENS_STEPS, _GRAPH_TOKENS_STEP_BEYOND, largest)


def _spread(smallest: int, steps: Sequence[tuple[int, int]], step_beyond: int, largest: int) -> tuple[int, ...]:
    sizes, size = [], smallest
    while size < largest:
        sizes.append(size)
        size += next((step for end, step in steps if size < end), step_beyond)
    return (*sizes, largest)
