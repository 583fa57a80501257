"""Checks that need only the flags: impossible values and conflicts, each reported in one line with its remedy."""

from __future__ import annotations

import re
from importlib.util import find_spec

from fenceline.config import ConfigError, require
from fenceline.config.flags import flags_of
from fenceline.config.hicache import check_hicache
from fenceline.config.request_limits import MAX_PRIORITY, MIN_PRIORITY
from fenceline.config.server_args import ServerArgs
from fenceline.constrained.spec import GRAMMAR_REMEDY, max_whitespace

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.\-\[\]:]+")
_HOST = re.compile(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_MAX_SEED = 2**63 - 1
_CHUNKING_OFF = -1
_MOST = 2**31 - 1  # the largest count, because int32 tensors hold counts
_ANY_SIZE = ("random_seed", "default_priority_value")  # these are not counts and have their own bounds
_MOST_SPECULATIVE_STEPS = 15
_LONGEST_MATCH = 64  # of the tokens that NGRAM looks up
_MOST_RUNNING = 1 << 16  # each takes a row of the page table and of the sampler's tables, and time in every decode step
_AT_LEAST_ONE = (
    "max_queued_requests",
    "max_total_tokens",
    "max_running_requests",
    "max_mamba_cache_size",
    "max_prefill_tokens",
    "prefill_max_requests",
    "cuda_graph_max_bs",
    "piecewise_cuda_graph_max_tokens",
    "stream_interval",
    "decode_log_interval",
    "tp_size",
    "ep_size",
    "nnodes",
    "dp_size",
)


def check(args: ServerArgs) -> None:
    """Raise ConfigError for the first impossible value or conflict of ``args``."""
    _check_model(args)
    _check_server(args)
    _check_ranges(args)
    _check_priority(args)
    _check_speculation(args)
    _check_kv_cache(args)
    _check_ranks(args)
    _check_memory(args)
    _check_graphs(args)
    _check_conflicts(args)
    check_hicache(args)


def _check_model(args: ServerArgs) -> None:
    require(
        args.model_path != "",
        "--model-path is required: a directory, a hub id, or 'demo' for the model that ships with the package",
    )
    require(args.tokenizer_path != "", "--tokenizer-path is empty: name a directory or hub id, or leave it out")
    require(args.served_model_name != "", "--served-model-name is empty: give a name or leave it out")


def _check_server(args: ServerArgs) -> None:
    require(args.host != "", "--host is empty: use 127.0.0.1 for this machine only or 0.0.0.0 for every interface")
    require(0 <= args.port <= 65535, f"--port {args.port}: choose 1 to 65535, or 0 for a free one")
    for name, key in (("--api-key", args.api_key), ("--admin-api-key", args.admin_api_key)):
        require(key != "", f"{name} is empty: give a key or leave the flag out")
        require(
            key is None or (key.isascii() and key.isprintable() and key == key.strip()),
            f"{name}: use ASCII characters only, without blanks around them, HTTP headers carry nothing else reliably",
        )
    for origin in args.cors_allowed_origins or ():
        require(
            origin == "*" or _ORIGIN.fullmatch(origin) is not None,
            f"--cors-allowed-origins {origin}: give *, or what browsers call the origin of a page: scheme, host and"
            " perhaps a port in small letters, without a path, as in https://chat.example.org",
        )
    for name in args.allowed_hosts or ():
        require(
            _HOST.fullmatch(name) is not None,
            f"--allowed-hosts {name}: give names without a scheme or port, as llm.example.org or *.example.org, or *",
        )
    require(args.watchdog_timeout > 0, f"--watchdog-timeout {args.watchdog_timeout:g}: give a number of seconds > 0")
    require(
        0 <= args.shutdown_timeout <= _MOST,
        f"--shutdown-timeout {args.shutdown_timeout:g}: give a number of seconds, 0 to abort requests at once",
    )
    for name in ("req_waiting_timeout", "req_running_timeout"):
        seconds = getattr(args, name)
        require(
            seconds is None or seconds > 0,
            f"--{name.replace('_', '-')} {seconds}: give a number of seconds > 0, or leave it out",
        )


def _check_ranges(args: ServerArgs) -> None:
    require(
        args.flight_recorder_steps >= 0,
        f"--flight-recorder-steps {args.flight_recorder_steps}: give a number of steps, or 0 to record nothing",
    )
    require(args.flight_recorder_dir != "", "--flight-recorder-dir is empty: name a folder or leave the flag out")
    require(args.torch_profiler_dir != "", "--torch-profiler-dir is empty: name a folder or leave the flag out")
    for name in _AT_LEAST_ONE:
        value = getattr(args, name)
        require(value is None or value >= 1, f"--{name.replace('_', '-')} {value}: must be at least 1")
    for item in flags_of(type(args)).values():
        value = getattr(args, item.name)
        if item.type is int and not item.many and value is not None and item.name not in _ANY_SIZE:
            require(value <= _MOST, f"{item.option} {value}: must be at most {_MOST}; lower it")
    require(
        args.context_length is None or args.context_length >= 2,
        f"--context-length {args.context_length}: too short for any request, which has a token of prompt and one of"
        " answer; give at least 2",
    )
    running = args.max_running_requests
    require(
        running is None or running <= _MOST_RUNNING,
        f"--max-running-requests {running}: no more than {_MOST_RUNNING} can run at once; lower it, more requests wait"
        " in the queue",
    )
    fraction = args.mem_fraction_static
    require(
        fraction is None or 0 < fraction < 1,
        f"--mem-fraction-static {fraction}: must lie between 0 and 1, for example 0.8",
    )
    require(
        args.schedule_conservativeness > 0,
        f"--schedule-conservativeness {args.schedule_conservativeness:g}: must be above 0, 1.0 is usual",
    )
    most_ms = args.max_inter_token_ms
    require(
        most_ms is None or most_ms > 0,
        f"--max-inter-token-ms {most_ms}: give a number of milliseconds > 0, for example 40",
    )
    require(
        most_ms is None or (args.enable_mixed_chunk is not False and args.chunked_prefill_size != _CHUNKING_OFF),
        "--max-inter-token-ms limits the chunks of prompts beside which others decode: leave out"
        " --no-enable-mixed-chunk and --chunked-prefill-size -1",
    )
    seed = args.random_seed
    require(seed is None or 0 <= seed <= _MAX_SEED, f"--random-seed {seed}: must lie between 0 and 2^63 - 1")


def _check_priority(args: ServerArgs) -> None:
    threshold, default = args.priority_scheduling_preemption_threshold, args.default_priority_value
    require(
        threshold >= 0,
        f"--priority-scheduling-preemption-threshold {threshold}: must be at least 0, or requests of one priority "
        "would take each other's places for ever",
    )
    require(
        default is None or MIN_PRIORITY <= default <= MAX_PRIORITY,
        f"--default-priority-value {default}: must fit in 64 bits",
    )
    require(
        not args.enable_priority_scheduling or args.schedule_policy == "fcfs",
        f"--enable-priority-scheduling orders by priority and then by arrival, not by --schedule-policy "
        f"{args.schedule_policy}: use fcfs",
    )


def _check_speculation(args: ServerArgs) -> None:
    steps, topk, rows = (args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens)
    simulated = args.speculative_simulate_acceptance
    least, most = args.speculative_ngram_min_match_window_size, args.speculative_ngram_max_match_window_size
    given = {
        "--speculative-draft-model-path": args.speculative_draft_model_path,
        "--speculative-draft-model-revision": args.speculative_draft_model_revision,
        "--speculative-token-map": args.speculative_token_map,
        "--speculative-adaptive": args.speculative_adaptive or None,
        "--speculative-draft-attention-backend": args.speculative_draft_attention_backend,
        "--speculative-num-steps": steps,
        "--speculative-eagle-topk": topk,
        "--speculative-num-draft-tokens": rows,
        "--speculative-simulate-acceptance": simulated,
        "--speculative-ngram-min-match-window-size": least,
        "--speculative-ngram-max-match-window-size": most,
    }
    for name, value in given.items():
        require(
            value is None or args.speculative_algorithm is not None, f"{name} {value}: needs --speculative-algorithm"
        )
    revision = args.speculative_draft_model_revision
    require(
        revision is None or args.speculative_draft_model_path is not None,
        f"--speculative-draft-model-revision {revision}: chooses a version of the hub id that"
        " --speculative-draft-model-path gives, add it or leave this out",
    )
    token_map = args.speculative_token_map
    require(
        token_map is None or args.speculative_algorithm == "EAGLE",
        f"--speculative-token-map {token_map}: for --speculative-algorithm EAGLE alone (an EAGLE-3 draft's checkpoint"
        " has its own), leave it out",
    )
    require(
        token_map is None or args.tp_size == 1,
        f"--speculative-token-map {token_map}: is not possible with --tp-size above 1, leave one of them out",
    )
    require(
        steps is None or 1 <= steps <= _MOST_SPECULATIVE_STEPS,
        f"--speculative-num-steps {steps}: must be 1 to {_MOST_SPECULATIVE_STEPS}",
    )
    require(
        simulated is None or simulated >= 1,
        f"--speculative-simulate-acceptance {simulated}: every step yields a token, give at least 1",
    )
    require(
        simulated is None or args.load_format == "dummy",
        f"--speculative-simulate-acceptance {simulated}: changes tokens, which only --load-format dummy allows",
    )
    require(
        simulated is None or topk in (None, 1),
        f"--speculative-simulate-acceptance {simulated}: of chains alone, leave --speculative-eagle-topk out",
    )
    require(topk is None or topk >= 1, f"--speculative-eagle-topk {topk}: must be at least 1")
    if args.speculative_algorithm == "NGRAM":
        _check_look_up(args)
        return
    require(
        least is None and most is None,
        "--speculative-ngram-min-match-window-size and --speculative-ngram-max-match-window-size are for"
        " --speculative-algorithm NGRAM alone, leave them out",
    )
    require(
        rows is None or topk not in (None, 1) or (steps is not None and rows == steps + 1),
        f"--speculative-num-draft-tokens {rows}: a chain has --speculative-num-steps + 1, leave it out",
    )


def _check_look_up(args: ServerArgs) -> None:
    steps, topk, rows = (args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens)
    least, most = args.speculative_ngram_min_match_window_size, args.speculative_ngram_max_match_window_size
    model, backend = args.speculative_draft_model_path, args.speculative_draft_attention_backend
    require(
        model is None and backend is None,
        "--speculative-algorithm NGRAM has no draft model: leave --speculative-draft-model-path and"
        " --speculative-draft-attention-backend out",
    )
    require(topk in (None, 1), f"--speculative-eagle-topk {topk}: NGRAM proposes chains, leave it out")
    require(
        rows is None or (2 <= rows <= _MOST_SPECULATIVE_STEPS + 1 and steps in (None, rows - 1)),
        f"--speculative-num-draft-tokens {rows}: must be 2 to {_MOST_SPECULATIVE_STEPS + 1} with NGRAM, the last token"
        " included, and one more than --speculative-num-steps if that is given",
    )
    for name, size in (("min", least), ("max", most)):
        require(
            size is None or 1 <= size <= _LONGEST_MATCH,
            f"--speculative-ngram-{name}-match-window-size {size}: must be 1 to {_LONGEST_MATCH}",
        )
    require(
        least is None or most is None or least <= most,
        f"--speculative-ngram-min-match-window-size {least}: is more than"
        f" --speculative-ngram-max-match-window-size {most}, exchange them",
    )


def _check_kv_cache(args: ServerArgs) -> None:
    if args.kv_cache_dtype == "auto":
        return
    require(
        args.speculative_algorithm is None,
        f"--kv-cache-dtype {args.kv_cache_dtype} does not go with --speculative-algorithm yet: leave one of them out",
    )
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        backend = getattr(args, name)
        require(
            backend not in ("flashinfer", "fa3"),
            f"--{name.replace('_', '-')} {backend} does not read --kv-cache-dtype {args.kv_cache_dtype}: use triton, or"
            " leave it out",
        )


def _check_ranks(args: ServerArgs) -> None:
    """Check how ranks are spread over nodes, and experts over ranks."""
    _check_nodes(args)
    require(
        args.tp_size % args.ep_size == 0,
        f"--ep-size {args.ep_size}: experts are split over the ranks of --tp-size, which is {args.tp_size} and no"
        " multiple of it",
    )


def _check_nodes(args: ServerArgs) -> None:
    nnodes, node, address = args.nnodes, args.node_rank, args.dist_init_addr
    require(0 <= node < nnodes, f"--node-rank {node}: of {nnodes} nodes (--nnodes) the last is {nnodes - 1}")
    require(
        nnodes > 1 or address is None,
        f"--dist-init-addr {address}: is for several hosts; give --nnodes too, or leave it out",
    )
    if nnodes == 1:
        return
    require(args.dp_size == 1, f"--dp-size {args.dp_size}: replicas share one host so far; leave --nnodes out")
    require(address is not None, f"--nnodes {nnodes}: give --dist-init-addr HOST:PORT, the same on all nodes")
    host, _, port = (address or "").rpartition(":")
    require(
        host not in ("", "0.0.0.0") and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535,
        f"--dist-init-addr {address}: give HOST:PORT of node 0, for example 192.168.0.1:20000",
    )
    require(
        args.tp_size % nnodes == 0,
        f"--nnodes {nnodes}: the ranks (--tp-size {args.tp_size}) cannot be spread evenly over as many nodes",
    )


def _check_memory(args: ServerArgs) -> None:
    page, chunk, prefill = args.page_size, args.chunked_prefill_size, args.max_prefill_tokens
    pool = args.max_total_tokens
    require(
        pool is None or pool >= page,
        f"--max-total-tokens {pool}: not even one page of {page}; raise it or lower --page-size",
    )
    require(
        pool is None or pool >= 2 * page,
        f"--max-total-tokens {pool}: one page of {page} serves no request; give at least {2 * page} or lower"
        " --page-size",
    )
    require(
        prefill is None or prefill >= page,
        f"--max-prefill-tokens {prefill}: not even one page of {page}; raise it or lower --page-size",
    )
    if chunk is None or chunk == _CHUNKING_OFF:
        return
    require(chunk >= 1, f"--chunked-prefill-size {chunk}: give a number of tokens, or -1 to turn chunking off")
    require(
        chunk % page == 0,
        f"--chunked-prefill-size {chunk}: must be a multiple of --page-size {page}; use {max(chunk // page, 1) * page}",
    )
    require(
        prefill is None or prefill >= chunk,
        f"--max-prefill-tokens {prefill}: smaller than --chunked-prefill-size {chunk}; raise the one or lower the"
        " other",
    )


def _check_graphs(args: ServerArgs) -> None:
    sizes, largest = args.cuda_graph_bs, args.cuda_graph_max_bs
    require(
        not (args.debug_cuda_graph and args.disable_cuda_graph),
        "--debug-cuda-graph compares graphs with steps that run without, and --disable-cuda-graph leaves none: drop one"
        " of them",
    )
    require(args.cuda_coredump_dir != "", "--cuda-coredump-dir is empty: name a folder or leave the flag out")
    _check_sizes("--piecewise-cuda-graph-tokens", args.piecewise_cuda_graph_tokens, "step", "token")
    _check_sizes("--cuda-graph-bs", sizes, "batch", "request")
    if sizes is None:
        return
    shown = " ".join(map(str, sizes))
    require(
        largest is None or max(sizes) <= largest,
        f"--cuda-graph-bs {shown}: goes beyond --cuda-graph-max-bs {largest}; one of the two is enough",
    )


def _check_sizes(flag: str, sizes: tuple[int, ...] | None, what: str, unit: str) -> None:
    if sizes is None:
        return
    shown = " ".join(map(str, sizes))
    require(sizes != (), f"{flag} is empty: give {what} sizes, or --disable-cuda-graph for no graphs")
    require(min(sizes) >= 1, f"{flag} {shown}: a {what} has at least 1 {unit}; drop what is smaller")


def _check_conflicts(args: ServerArgs) -> None:
    require(
        not (args.disable_radix_cache and args.schedule_policy in ("lpm", "dfs-weight")),
        f"--schedule-policy {args.schedule_policy} sorts by cached prefix and --disable-radix-cache keeps none: use "
        "--schedule-policy fcfs",
    )
    try:
        max_whitespace(args.constrained_json_whitespace_pattern)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    require(
        args.grammar_backend == "none" or args.skip_tokenizer_init or find_spec("xgrammar") is not None,
        f"--grammar-backend xgrammar: the package is not installed; {GRAMMAR_REMEDY}",
    )
    if args.skip_tokenizer_init:
        for name in ("tokenizer_path", "chat_template", "reasoning_parser", "tool_call_parser"):
            option = "--" + name.replace("_", "-")
            require(
                getattr(args, name) is None,
                f"{option} needs the tokenizer that --skip-tokenizer-init leaves out: drop one of them",
            )
