"""ServerArgs: every flag of the server, with SGLang's names wherever SGLang has the flag.

The class's fields are the single place where a flag is declared: the command line, YAML files, keyword arguments
of ``fenceline.Engine`` and ``docs/use/server_arguments.md`` all use these declarations. Values are as the user gave
them; the settings that follow from them on this machine are in ``EngineConfig``.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NoReturn

from fenceline.config import ConfigError
from fenceline.config.draft_config import SpeculativeAlgorithm
from fenceline.config.flags import build_parser, flag, from_mapping, parse_values

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
MemLayout = Literal["layer_first", "page_first"]
PrefetchPolicy = Literal["best_effort", "wait_complete", "timeout"]
RetractPolicy = Literal["recompute", "offload"]
LoadBalanceMethod = Literal["round_robin", "shortest_queue", "cache_aware"]

_model = partial(flag, group="Model and tokenizer")
_http = partial(flag, group="HTTP server")
_memory = partial(flag, group="Memory and scheduling")
_hicache = partial(flag, group="HiCache")
_speculation = partial(flag, group="Speculative decoding")
_runtime = partial(flag, group="Device and kernels")
_api = partial(flag, group="API behaviour")
_logging = partial(flag, group="Logging and metrics")

_BACKENDS = ("auto", "torch", "triton", "flashinfer", "fa3")
_REFUSED_BACKENDS = {
    **dict.fromkeys(
        ("fa4", "flashmla", "cutlass_mla", "trtllm_mla", "trtllm_mha", "minicpm_flashinfer", "aiter", "nsa"),
        "leave it out, or choose triton, flashinfer or fa3",
    ),
    "torch_native": "use torch",
}
# What --help shows of the flags, unless it is asked for more.
_USUAL = (
    "host", "port", "api_key", "served_model_name", "context_length", "quantization", "mem_fraction_static",
    "max_running_requests", "enable_hierarchical_cache", "speculative_algorithm", "tp_size", "dp_size",
    "enable_metrics",
)  # fmt: skip
# Registered kinds of device besides cpu and cuda; see memory_order.register_device.
_registered_kinds: set[str] = set()


def register_kind(kind: str) -> None:
    """Allow ``kind`` as a device in the configuration. Its limits are those of the CPU."""
    _registered_kinds.add(kind)


def is_registered(kind: object) -> bool:
    """Whether ``kind`` was registered by :func:`register_kind`."""
    return kind in _registered_kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """The flags as the user gave them. None means that the value is chosen in ``EngineConfig``."""

    # Model and tokenizer
    model_path: str = _model(
        "",
        "A directory in Hugging Face format, a GGUF file, a hub id such as Qwen/Qwen3-0.6B, or one of the package: "
        "demo, demo-moe (experts), demo-tools (calls a calculator), demo-vision (reads pictures). Required.",
        aliases=("--model",),
    )
    tokenizer_path: str | None = _model(None, "The tokenizer's directory or hub id, unless it is the model's own.")
    tokenizer_mode: str = _model("auto", "Without effect: the fast tokenizer is always used.", choices=("auto", "slow"))
    skip_tokenizer_init: bool = _model(
        False, "Run without a tokenizer: requests carry input_ids, answers carry output_ids."
    )
    revision: str | None = _model(None, "Branch, tag or commit of the hub id of --model-path.")
    download_dir: str | None = _model(None, "Where hub downloads are kept; Hugging Face's own cache unless given.")
    load_format: str = _model(
        "auto",
        "How weights are read: auto, safetensors and gguf read the files, dummy makes random weights.",
        choices=("auto", "safetensors", "gguf", "dummy"),
        refused=dict.fromkeys(
            ("pt", "npcache", "bitsandbytes"), "convert the weights to safetensors and leave the flag out"
        ),
    )
    dtype: str = _model(
        "auto",
        "Type of weights, activations and KV cache. auto is float32 on a CPU, on a GPU the checkpoint's type, "
        "bfloat16 for float32 checkpoints.",
        choices=("auto", "float32", "float", "bfloat16", "float16", "half"),
    )
    quantization: str | None = _model(
        None,
        "The number format of the linear layers: fp8 and int4 round plain weights while they are loaded. A quantised "
        "checkpoint needs no flag; gguf keeps the matrices of a GGUF file that are in Q4_0 in four bits.",
        choices=("fp8", "int4", "compressed-tensors", "awq", "gptq", "gguf"),
        refused=dict.fromkeys(
            ("bitsandbytes", "marlin", "gptq_marlin", "awq_marlin", "modelopt", "modelopt_fp8",
             "modelopt_fp4", "w8a8_int8", "w8a8_fp8", "petit_nvfp4", "qoq", "mxfp4", "moe_wna16"),
            "use fp8 or int4, which round plain weights while they are loaded, or a checkpoint in a format of "
            "docs/use/quantization.md",
        ),
    )  # fmt: skip
    kv_cache_dtype: str = _model(
        "auto",
        "Type of keys and values on every tier. fp8_e4m3 takes half of bfloat16's memory; the checkpoint's scales are "
        "used, or 1.",
        choices=("auto", "fp8_e4m3"),
        refused=dict.fromkeys(
            ("fp8_e5m2", "fp4_e2m1", "int8", "bf16", "bfloat16"), "use fp8_e4m3, or auto, which keeps --dtype"
        ),
    )
    context_length: int | None = _model(
        None, "Longest sequence in tokens, prompt and answer together; the model's own limit unless given."
    )
    json_model_override_args: str = _model(
        "{}", "A JSON object whose entries replace those of the model's config.json.", metavar="JSON"
    )
    trust_remote_code: bool = _model(False, "Without effect: code from a model's directory is never run.")
    chat_template: str | None = _model(
        None,
        "The chat template in place of the tokenizer's: a .jinja file, a .json file with it under chat_template, or "
        "chatml, gemma-it, llama-2, llama-3-instruct, mistral or vicuna_v1.1.",
        metavar="FILE",
    )
    is_embedding: bool = _model(
        False,
        "Serve embeddings, the state of each text's last token. A model whose modules.json pools, such as "
        "Qwen3-Embedding, is served so without the flag.",
    )
    served_model_name: str | None = _model(None, "The model's name in the API; --model-path as given unless set.")
    weight_version: str = _model(
        "default", "A label for these weights, reported by /model_info and with every answer of /generate."
    )

    # HTTP server
    host: str = _http("127.0.0.1", "The address to listen on; 0.0.0.0 for every interface.")
    port: int = _http(30000, "The port to listen on; 0 takes a free one.")
    api_key: str | None = _http(
        None,
        "The key that requests must carry, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'; open are /health, "
        "/metrics and the page at /, which asks for the key. Other users can read a command line: FENCELINE_API_KEY of "
        "the environment holds unless this is given.",
        secret=True,
    )
    admin_api_key: str | None = _http(
        None,
        "The key for endpoints that act on the whole server: /flush_cache, /clear_hicache_storage_backend, "
        "/hicache/storage-backend/clear, /abort_request, /pause_generation, /continue_generation, "
        "/update_weights_from_disk, /update_weights_from_tensor, /start_profile, /stop_profile and /flight_recorder. "
        "--api-key does not open them then. FENCELINE_ADMIN_API_KEY of the environment holds unless this is given.",
        secret=True,
    )
    cors_allowed_origins: tuple[str, ...] | None = _http(
        None,
        "The web sites whose pages may use this server, as in https://chat.example.org, or * for all. Unless given, "
        "none.",
        metavar="ORIGIN",
    )
    allowed_hosts: tuple[str, ...] | None = _http(
        None,
        "Further host names by which this server may be addressed without a key, as in *.example.com, or * for all.",
        metavar="NAME",
    )
    disable_web_page: bool = _http(False, "Serve no page at /.")
    max_queued_requests: int | None = _http(
        None, "Most requests that may wait; others get 503. Unlimited unless given."
    )
    req_waiting_timeout: float | None = _http(
        None,
        "Seconds after which a request that still waits in the queue is ended with 503; SGLANG_REQ_WAITING_TIMEOUT, or "
        "never, unless given.",
    )
    req_running_timeout: float | None = _http(
        None,
        "Seconds after which a running request is ended with 503; SGLANG_REQ_RUNNING_TIMEOUT, or never, unless given.",
    )
    shutdown_timeout: float = _http(
        30.0, "Seconds that running requests have to end after SIGTERM; those that are left are aborted."
    )
    allow_auto_truncate: bool = _http(False, "Cut off the end of prompts that are too long instead of refusing them.")
    watchdog_timeout: float = _http(
        300.0, "Seconds of one step, or of silence of a process, after which the server reports a hang and exits."
    )

    # Memory and scheduling
    mem_fraction_static: float | None = _memory(
        None,
        "Share of a GPU's memory for weights and KV cache together, 0.85 unless given; on a CPU of the free memory "
        "for the KV cache, 0.3 unless given and never more than 4 GiB. Lower it when memory runs out.",
    )
    max_total_tokens: int | None = _memory(
        None,
        "Size of the KV cache in tokens. Unless given, what --mem-fraction-static allows, but no more than "
        "--max-running-requests of the longest sequences need.",
    )
    max_running_requests: int | None = _memory(
        None,
        "Most requests running at once. Unless given, 1024 on a GPU and 256 on a CPU, or fewer where memory has no "
        "room for them.",
    )
    page_size: int = _memory(
        1, "Tokens per KV cache page; prefixes are shared in whole pages.", choices=(1, 16, 32, 64)
    )
    max_mamba_cache_size: int | None = _memory(
        None,
        "Of a model with recurrent layers: most states in memory, for running requests and for cached prefixes. "
        "Unless given, what --mamba-full-memory-ratio allows.",
    )
    mamba_full_memory_ratio: float = _memory(
        0.9, "Of a model with recurrent layers: memory of their states, relative to that of the KV cache."
    )
    chunked_prefill_size: int | None = _memory(
        None,
        "Most prompt tokens of one prefill step, a multiple of --page-size; -1 turns chunking off. A smaller size "
        "shortens pauses of decoding requests. 8192 on a GPU, 128 on a CPU unless given.",
    )
    enable_mixed_chunk: bool | None = _memory(
        None,
        "Prompts are computed in the steps in which running requests decode, so that these do not wait for them: "
        "--chunked-prefill-size then counts the tokens of both. On on a GPU unless --no-enable-mixed-chunk, off on a "
        "CPU. Not with speculative decoding, nor for models that see images whole.",
    )
    max_inter_token_ms: float | None = _memory(
        None,
        "Steps are mixed, and this is about the longest time between two tokens of a running request because of "
        "prompts, which are computed in chunks that fit, by times measured at start. On a GPU 30, or three times what "
        "a step without prompts takes, on a CPU no limit unless given.",
    )
    max_prefill_tokens: int | None = _memory(
        None,
        "Most tokens of the prompts of one prefill batch (a single longer one is admitted); 16384, or "
        "--chunked-prefill-size if that is larger, unless given.",
    )
    prefill_max_requests: int | None = _memory(
        None, "Most prompts of one prefill step. Any number on a GPU, 8 on a CPU unless given."
    )
    schedule_policy: str = _memory(
        "fcfs",
        "Order of waiting requests: first come first served (fcfs), longest cached prefix first (lpm), the most "
        "shared prefixes first (dfs-weight), or random.",
        choices=("fcfs", "lpm", "dfs-weight", "random"),
    )
    enable_priority_scheduling: bool = _memory(
        False,
        "Waiting requests of a higher `priority` are admitted first, and running ones may be retracted for them. Needs "
        "--schedule-policy fcfs.",
    )
    schedule_low_priority_values_first: bool = _memory(False, "A smaller `priority` is better.")
    default_priority_value: int | None = _memory(
        None, "The `priority` of requests that give none. Unless given, these are admitted last."
    )
    priority_scheduling_preemption_threshold: int = _memory(
        10, "A running request is retracted for a waiting one whose `priority` is better by more than this."
    )
    disable_priority_preemption: bool = _memory(
        False, "No running request is retracted for a waiting one of a better `priority`."
    )
    schedule_conservativeness: float = _memory(
        1.0, "How much of the answers' possible length admission keeps free; raise it if requests are often retracted."
    )
    disable_radix_cache: bool = _memory(False, "Do not share prefixes between requests.")
    disable_overlap_schedule: bool = _memory(False, "Finish each step's results before the next step is launched.")

    # HiCache
    enable_hierarchical_cache: bool = _hicache(
        False, "Keep KV pages in host memory too, as a second tier of the prefix cache.", aliases=("--enable-hicache",)
    )
    hicache_ratio: float = _hicache(
        2.0, "Size of the host tier in multiples of the device's KV cache, unless --hicache-size is given."
    )
    hicache_size: float = _hicache(
        0.0, "Size of each rank's host tier in GB (10^9 bytes); with 0 --hicache-ratio gives it."
    )
    hicache_write_policy: WritePolicy = _hicache(
        "write_through",
        "When pages are copied to the host: at once, on the second use of their prefix (write_through_selective), or "
        "when they are evicted from the device (write_back).",
    )
    hicache_io_backend: str | None = _hicache(
        None,
        "How pages are copied: by the copy engine (direct), or by a kernel, which slows down others. direct unless "
        "given, or kernel where pages have one token and attention is not persistent.",
        choices=("kernel", "direct"),
        refused={"kernel_ascend": "use --hicache-io-backend kernel or direct"},
    )
    hicache_mem_layout: MemLayout = _hicache(
        "layer_first",
        "The order of bytes in the host tier: as on the device, or page_first, which a storage writes and reads in "
        "one piece.",
        refused=dict.fromkeys(
            ("page_first_direct", "page_first_kv_split", "page_head"), "use --hicache-mem-layout page_first"
        ),
    )
    retract_policy: RetractPolicy = _hicache(
        "recompute",
        "What happens to the KV of a request that is retracted for lack of memory, as far as the prefix cache cannot "
        "keep it: recompute drops it, offload copies it to the host and back.",
    )
    hicache_storage_backend: str = _hicache(
        "none",
        "A third tier that outlives the server: file keeps pages in a directory that servers of one machine may share.",
        choices=("none", "file"),
        refused=dict.fromkeys(
            ("mooncake", "hf3fs", "nixl", "aibrix", "dynamic", "eic", "lmcache", "simm"),
            "use --hicache-storage-backend file",
        ),
    )
    hicache_storage_dir: str | None = _hicache(
        None,
        "The directory of --hicache-storage-backend file, writable by no other user; fenceline-hicache-UID in the "
        "system's temporary folder unless given.",
        metavar="DIR",
    )
    hicache_storage_size: float | None = _hicache(
        None,
        "Most GB (10^9 bytes) of pages in that directory; 64, or half the file system if that is less, unless given.",
    )
    hicache_storage_key: str | None = _hicache(
        None,
        "Authenticate each stored page with a secret key, which all servers that share pages must have: file:PATH or "
        "env:NAME.",
        metavar="file:PATH|env:NAME",
    )
    hicache_storage_prefetch_policy: PrefetchPolicy = _hicache(
        "best_effort",
        "How long a request waits for its pages to be read from storage: not at all (best_effort), until all are "
        "there, or for --hicache-storage-prefetch-timeout.",
    )
    hicache_storage_prefetch_timeout: float | None = _hicache(
        None, "Most seconds of --hicache-storage-prefetch-policy timeout; 1 unless given."
    )

    # Speculative decoding
    speculative_algorithm: str | None = _speculation(
        None,
        "What proposes tokens for the model to verify: a layer that reads hidden states (EAGLE, EAGLE3), layers in "
        "the model's own checkpoint (NEXTN), a small model (STANDALONE), or the request's own text (NGRAM).",
        choices=tuple(algorithm.value for algorithm in SpeculativeAlgorithm),
        refused={"DFLASH": "its drafts are not supported: use EAGLE3"},
    )
    speculative_draft_model_path: str | None = _speculation(
        None,
        "The draft model: a directory or a hub id. Unless given, it is looked for in the model's own directory.",
        aliases=("--speculative-draft-model",),
    )
    speculative_draft_model_revision: str | None = _speculation(
        None, "Branch, tag or commit of a hub id given as --speculative-draft-model-path."
    )
    speculative_token_map: str | None = _speculation(
        None,
        "With EAGLE: a file with the ids of the tokens that the draft may propose, as torch.save writes them "
        "(FR-Spec). A path, or ORG/NAME/FILE on the hub.",
        metavar="FILE",
    )
    speculative_num_steps: int | None = _speculation(
        None,
        "Tokens that the draft proposes in a step, 1 to 15; 3 unless given, 7 with NGRAM. With several NEXTN layers "
        "their number is the default and the limit.",
    )
    speculative_eagle_topk: int | None = _speculation(
        None, "How many tokens the draft proposes for each place: 1 (unless given) makes a chain, more make a tree."
    )
    speculative_num_draft_tokens: int | None = _speculation(
        None,
        "Rows that the model verifies for each request, the last token's among them: --speculative-num-steps + 1 with "
        "chains; 8 with NGRAM and with trees unless given, 64 at most with trees.",
    )
    speculative_ngram_min_match_window_size: int | None = _speculation(
        None,
        "With NGRAM: how many of the last tokens must have occurred before, 1 to 64; 1 unless given.",
        aliases=("--prompt-lookup-min", "--ngram-prompt-lookup-min"),
    )
    speculative_ngram_max_match_window_size: int | None = _speculation(
        None,
        "With NGRAM: how many of the last tokens are compared, 1 to 64; 12 unless given.",
        aliases=("--prompt-lookup-max", "--ngram-prompt-lookup-max"),
    )
    speculative_adaptive: bool | None = _speculation(
        None,
        "Whether each decode step proposes as many tokens as promise the best speed, from none to "
        "--speculative-num-steps. Off unless given, on with NGRAM.",
    )
    speculative_draft_attention_backend: str | None = _speculation(
        None,
        "The attention backend of the draft's layers, if it should differ from the model's.",
        choices=("triton", "torch"),
        refused={
            "flashinfer": "its plan needs lengths that the host learns late: leave it out",
            "fa3": "its plan needs lengths that the host learns late: leave it out",
        },
    )
    speculative_simulate_acceptance: float | None = _speculation(
        None,
        "With --load-format dummy: how many tokens a step yields on average, whatever the draft proposes. To measure "
        "speed at a known acceptance.",
    )

    # Device and kernels
    device: str = _runtime(
        "auto",
        "Where the model runs; auto is a CUDA GPU if there is one and the CPU otherwise.",
        choices=("auto", "cpu", "cuda"),
        refused=dict.fromkeys(("xpu", "hpu", "npu", "mps"), "use --device cpu or --device cuda"),
    )
    tp_size: int = _runtime(
        1,
        "Ranks that compute the model together, each with a GPU and a part of every layer and of the KV cache (tensor "
        "parallelism). It must divide the attention heads.",
        aliases=("--tensor-parallel-size", "--tp"),
    )
    ep_size: int = _runtime(
        1,
        "Parts into which the experts of a mixture are split (expert parallelism). It must divide --tp-size and the "
        "number of experts. 1 splits every expert over all ranks.",
        aliases=("--expert-parallel-size", "--ep"),
    )
    dp_size: int = _runtime(
        1,
        "Replicas of the model, each with --tp-size ranks and a KV cache of its own, behind one server (data "
        "parallelism).",
        aliases=("--data-parallel-size", "--dp"),
    )
    load_balance_method: LoadBalanceMethod = _runtime(
        "cache_aware",
        "Which replica gets a request: cache_aware the one that was sent the longest part of its prompt before.",
    )
    nnodes: int = _runtime(
        1,
        "Hosts that the ranks are spread over, as many on each. Each starts a server with the same flags and its "
        "--node-rank.",
    )
    node_rank: int = _runtime(0, "Which of the hosts this is, from 0 on. Node 0 answers requests.")
    dist_init_addr: str | None = _runtime(
        None,
        "HOST:PORT of node 0 at which the ranks of several hosts meet: an IPv4 address of a private network and a free "
        "port.",
        aliases=("--nccl-init-addr",),
    )
    attention_backend: str | None = _runtime(
        None,
        "The attention kernels of prefill and decode: triton our own, flashinfer and fa3 those packages', torch plain "
        "torch and the only one on a CPU. auto measures those that are installed.",
        choices=_BACKENDS,
        refused=_REFUSED_BACKENDS,
    )
    prefill_attention_backend: str | None = _runtime(
        None,
        "The attention kernels of prefill, if they should differ from --attention-backend.",
        choices=_BACKENDS,
        refused=_REFUSED_BACKENDS,
    )
    decode_attention_backend: str | None = _runtime(
        None,
        "The attention kernels of decode, if they should differ from --attention-backend.",
        choices=_BACKENDS,
        refused=_REFUSED_BACKENDS,
    )
    sampling_backend: str = _runtime(
        "auto",
        "Without effect: a GPU draws with our own kernel, a CPU with torch's operators.",
        choices=("auto", "torch", "pytorch"),
        refused={"flashinfer": "use --sampling-backend torch"},
    )
    disable_cuda_graph: bool = _runtime(False, "Launch every step kernel by kernel instead of replaying graphs.")
    cuda_graph_max_bs: int | None = _runtime(
        None,
        "Largest decode batch that is captured as a graph, larger ones run without; 256 or --max-running-requests if "
        "that is smaller, unless given.",
        aliases=("--cuda-graph-max-bs-decode",),
    )
    cuda_graph_bs: tuple[int, ...] | None = _runtime(
        None,
        "The decode batch sizes to capture, as in --cuda-graph-bs 1 2 4 8; a batch runs in the next larger one. Unless "
        "given, on a GPU 24 sizes up to --cuda-graph-max-bs; on a CPU none.",
        metavar="BS",
        aliases=("--cuda-graph-bs-decode",),
    )
    disable_cuda_graph_padding: bool = _runtime(
        False,
        "Replay a graph only for batches of exactly its size; unless --cuda-graph-bs is given, every size up to "
        "--cuda-graph-max-bs is captured.",
    )
    disable_piecewise_cuda_graph: bool = _runtime(
        False, "Launch every prefill step kernel by kernel.", aliases=("--disable-prefill-cuda-graph",)
    )
    piecewise_cuda_graph_max_tokens: int | None = _runtime(
        None,
        "Prefill steps of up to this many tokens replay graphs of the kernels between their attention calls. Unless "
        "given, it depends on the model's width and is at most 2048.",
        aliases=("--cuda-graph-max-bs-prefill",),
    )
    piecewise_cuda_graph_tokens: tuple[int, ...] | None = _runtime(
        None,
        "The prefill sizes in tokens to capture; a step runs in the next larger one. Unless given, on a GPU sizes up "
        "to --piecewise-cuda-graph-max-tokens; on a CPU none.",
        metavar="TOKENS",
        aliases=("--cuda-graph-bs-prefill",),
    )
    debug_cuda_graph: bool = _runtime(
        False, "Run every replayed step once more without its graph, and stop at the first field that differs. Slow."
    )
    cuda_coredump_dir: str | None = _runtime(
        None,
        "Have the CUDA driver write a core dump into this folder when a kernel fails; see docs/use/debugging.md.",
        metavar="DIR",
    )
    random_seed: int | None = _runtime(
        None,
        "Seed that the seeds of requests without one are drawn from; a random one unless given, reported at start.",
    )
    memory_check: str = _runtime(
        "off",
        "order refuses a step that would access memory in no order with an earlier one, full lets the device compare "
        "tags of the KV pages in every step. See docs/use/debugging.md.",
        choices=("off", "order", "full"),
    )

    # API behaviour
    sampling_defaults: str = _api(
        "model",
        "Where sampling parameters that a request leaves out come from: the model's generation_config.json (model) or "
        "OpenAI's defaults (openai).",
        choices=("model", "openai"),
    )
    strict_model_name: bool = _api(
        False,
        "Answer requests for a model of any other name than --served-model-name with a 404; otherwise every name is "
        "served.",
    )
    strict_fields: bool = _api(
        False, "Answer requests that have unknown fields with a 400; otherwise each such name is logged once."
    )
    enable_deterministic_inference: bool = _api(
        False,
        "Logits of a token depend on the tokens before it alone, bit by bit, whatever is computed beside it. All "
        "sums then have a fixed order, which takes some time, and on a GPU our own kernels.",
    )
    reasoning_parser: str | None = _api(
        None,
        "The model family whose tags mark the thinking of a reasoning model. Default: gpt-oss where the chat template "
        "shows its form, else none.",
        # The last five are other names of these.
        choices=(
            "deepseek-r1", "deepseek-v3", "glm45", "gpt-oss", "mimo", "minimax", "qwen3", "qwen3-thinking", "seed_oss",
            "deepseek_r1", "deepseek_v3", "glm47", "minimax_m2", "openai_gptoss",
        ),
    )  # fmt: skip
    tool_call_parser: str | None = _api(
        None,
        "How the model writes tool calls. Default: the form that the chat template shows.",
        # From qwen on they are other names of these.
        choices=(
            "qwen25", "qwen3_coder", "seed_oss", "llama3", "mistral", "pythonic", "deepseekv3", "deepseekv31", "glm45",
            "minimax-m2", "olmo3", "gpt-oss", "granite", "hermes", "qwen", "qwen3_xml", "mimo", "llama3_json",
            "llama4_json", "llama4_pythonic", "deepseek_v3", "deepseek_v31", "glm", "glm47", "minimax_m2", "openai",
        ),
    )  # fmt: skip
    grammar_backend: Literal["xgrammar", "none"] = _api(
        "xgrammar", "The library that constrains answers. With none, requests that ask for it are answered with a 400."
    )
    limit_mm_data_per_request: str | None = _api(
        None,
        "The most images and videos that a request may have, and frames that a video may have, as in "
        '\'{"image": 8, "video": {"count": 2, "num_frames": 64}}\'; 32, 4 and 256 unless given.',
        aliases=("--limit-mm-per-prompt",),
        metavar="JSON",
    )
    mm_process_config: str | None = _api(
        None,
        "The least and the most pixels to which images are resized, as in "
        '\'{"image": {"min_pixels": 65536, "max_pixels": 1048576}}\'; within the model\'s own limits, which hold '
        "unless given. Fewer pixels are fewer tokens.",
        metavar="JSON",
    )
    allowed_media_domains: tuple[str, ...] | None = _api(
        None,
        "The hosts from which images are fetched, as in images.example.org: at public addresses, and without "
        "following redirects. Unless given, none: images come in data: URLs.",
        metavar="HOST",
    )
    constrained_json_whitespace_pattern: str | None = _api(
        None,
        "How much white space a constrained JSON text may have in one place: the class [\\n\\t ] followed by *, ? or "
        "{0,N}; an empty text for one space after each comma and colon. 20 characters unless given.",
        metavar="REGEX",
    )
    enable_cache_report: bool = _api(
        False, "Report cached prompt tokens in the usage of OpenAI answers (prompt_tokens_details)."
    )
    stream_interval: int = _api(1, "Tokens in each chunk of a stream; more than one saves CPU time.")
    incremental_streaming_output: bool = _api(
        False, "Events of a streaming /generate carry only what is new instead of everything so far."
    )

    # Logging and metrics
    log_level: str = _logging(
        "info",
        "Least severe level that is logged. debug also shows each request, step and control message.",
        choices=("debug", "info", "warning", "error", "critical"),
    )
    log_level_http: str | None = _logging(
        None,
        "Least severe level that the HTTP server logs; --log-level unless given.",
        choices=("debug", "info", "warning", "error", "critical"),
    )
    log_format: Literal["text", "json"] = _logging("text", "Log lines for people, or one JSON object a line.")
    log_requests: bool = _logging(False, "Log every request and its answer.")
    log_requests_level: int = _logging(
        2,
        "How much --log-requests shows: 0 ids and counts, 1 also sampling parameters, 2 also 2,048 characters of "
        "prompt and answer, 3 everything.",
        choices=(0, 1, 2, 3),
    )
    decode_log_interval: int = _logging(40, "Log a line of figures each time this many decode steps have run.")
    enable_metrics: bool = _logging(
        False, "Serve Prometheus metrics at /metrics, and add times to the meta_info of /generate."
    )
    metrics_prefix: str = _logging(
        "both",
        "Which names metrics have: fenceline: for all, sglang: for those that SGLang has, for its dashboards, or both.",
        choices=("both", "fenceline", "sglang"),
    )
    flight_recorder_steps: int = _logging(
        512, "How many of the scheduler's last steps are kept in memory, for a file when the engine dies. 0 keeps none."
    )
    flight_recorder_dir: str | None = _logging(
        None,
        "The folder for the files of the flight recorder; one below the system's temporary folder unless given.",
        metavar="DIR",
    )
    torch_profiler_dir: str | None = _logging(
        None,
        "Traces of /start_profile are written below this folder; SGLANG_TORCH_PROFILER_DIR of the environment, or a "
        "private temporary one, unless given.",
        metavar="DIR",
    )
    flight_recorder_prompts: bool = _logging(False, "Keep the token ids of prompts in the flight recorder too.")
    otlp_traces_endpoint: str | None = _logging(
        None,
        "Send a trace of each request to this OpenTelemetry collector, such as http://localhost:4317; see "
        "docs/use/traces.md.",
        metavar="URL",
    )
    enable_trace: bool = _logging(False, "As --otlp-traces-endpoint localhost:4317, unless that is given.")
    kv_events_config: str | None = _logging(
        None,
        "Publish what the prefix cache gains and loses to routers, by ZeroMQ, as in "
        '\'{"publisher": "zmq", "endpoint": "tcp://*:5557"}\'; see docs/use/kv_events.md. The events name the tokens '
        "of prompts and answers.",
        metavar="JSON",
    )

    @classmethod
    def from_kwargs(cls, values: Mapping[str, object]) -> ServerArgs:
        """Keyword arguments (``fenceline.Engine(**values)``) as flags, checked like a command line. ``device`` may also
        be a registered kind (see memory_order.register_device), which the command line does not accept. Raises
        ConfigError for unknown or refused names and for values of the wrong type."""
        known = {name: value for name, value in values.items() if name != "device" or not is_registered(value)}
        args = cls(**from_mapping(cls, known))
        return args if len(known) == len(values) else dataclasses.replace(args, device=str(values["device"]))


def parse_args(argv: Sequence[str], prog: str = "python -m fenceline.launch_server") -> ServerArgs:
    """The flags of a command line and of its ``--config`` file; the model may also stand alone, as in ``MODEL --port
    8000``. ``-h`` prints the help and exits. Raises ConfigError, one line with the remedies, for everything that is
    unknown, refused or malformed."""
    return ServerArgs(**parse_values(make_parser(prog), ServerArgs, argv, positional="model_path"))


def make_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of the flags. A model that stands alone is not among them: :func:`parse_args` finds it."""
    return build_parser(ServerArgs, prog, "Serve a language model over HTTP.", _USUAL)


def exit_with(error: ConfigError, prog: str) -> NoReturn:
    """End the process with one line on stderr and status 2, as is usual for a wrong flag."""
    print(f"{prog}: error: {error}", file=sys.stderr)
    sys.exit(2)
