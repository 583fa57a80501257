"""The benchmark's arguments: BenchArgs, its checks, and the parser of the command line."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass, field, fields
from typing import Any

from fenceline.benchmarking.endpoints import BACKENDS, backend_kind

DATASETS = ("sharegpt", "custom", "random", "random-ids", "generated-shared-prefix", "multi-turn")


@dataclass(frozen=True, slots=True)
class BenchArgs:
    """All settings of a run, named like the flags. Lengths are in tokens, rates per second."""

    backend: str = "fenceline"
    base_url: str | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    api_key: str | None = field(default=None, repr=False)
    header: tuple[str, ...] = field(default=(), repr=False)
    model: str | None = None
    served_model_name: str | None = None
    tokenizer: str | None = None
    trust_remote_code: bool = False
    vocab_size: int | None = None
    dataset_name: str = "random"
    dataset_path: str = ""
    num_prompts: int = 1000
    sharegpt_output_len: int | None = None
    sharegpt_context_len: int | None = None
    random_input_len: int = 1024
    random_output_len: int = 1024
    random_range_ratio: float = 0.0
    gsp_num_groups: int = 64
    gsp_prompts_per_group: int = 16
    gsp_system_prompt_len: int = 2048
    gsp_question_len: int = 128
    gsp_output_len: int = 256
    gsp_range_ratio: float = 1.0
    gsp_num_turns: int = 1
    gsp_ordered: bool = False
    multi_turn_num_turns: int = 4
    multi_turn_question_len: int | None = None
    prompt_suffix: str = ""
    apply_chat_template: bool = False
    tokenize_prompt: bool = False
    request_rate: float = float("inf")
    max_concurrency: int | None = None
    warmup_requests: int = 1
    flush_cache: bool = False
    seed: int = 1
    disable_ignore_eos: bool = False
    disable_stream: bool = False
    return_logprob: bool = False
    extra_request_body: str | None = None
    lora_name: tuple[str, ...] = ()
    profile: bool = False
    profile_activities: tuple[str, ...] = ("CPU", "GPU")
    profile_num_steps: int | None = None
    profile_output_dir: str | None = None
    output_file: str | None = None
    output_details: bool = False
    disable_tqdm: bool = False
    tag: str | None = None
    check_determinism: int = 0

    @classmethod
    def from_namespace(cls, namespace: object) -> BenchArgs:
        """Make BenchArgs from an object with some of its attributes. Those that are missing or None have their
        defaults.

        Raises:
            ValueError: a value is unusable. The text names the remedy.
        """
        values: dict[str, Any] = {}
        for f in fields(cls):
            value = getattr(namespace, f.name, None)
            if value is not None:
                values[f.name] = tuple(value) if isinstance(value, list) else value
        values["api_key"] = values.get("api_key") or os.environ.get("OPENAI_API_KEY")
        args = cls(**values)
        check(args)
        return args

    @property
    def extra_body(self) -> dict[str, Any]:
        """``--extra-request-body`` as a dictionary. :func:`check` has checked it."""
        return dict(json.loads(self.extra_request_body)) if self.extra_request_body else {}

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers of every request, including the authorization."""
        headers = dict(pair.split("=", 1) for pair in self.header)
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return headers


def check(args: BenchArgs) -> None:
    """Refuse unusable arguments.

    Raises:
        ValueError: an argument is unusable. The text names the flag and the remedy.
    """
    if args.backend not in BACKENDS:
        raise ValueError(f"--backend {args.backend}: choose one of {', '.join(BACKENDS)}")
    if args.dataset_name not in DATASETS:
        raise ValueError(f"--dataset-name {args.dataset_name}: choose one of {', '.join(DATASETS)}")
    if args.dataset_name in ("sharegpt", "custom") and not args.dataset_path:
        raise ValueError(
            f"--dataset-name {args.dataset_name} reads a file and nothing is downloaded: pass --dataset-path FILE, "
            "or use --dataset-name random"
        )
    _check_ranges(args)
    if any("=" not in pair for pair in args.header):
        raise ValueError("--header takes KEY=VALUE pairs, as in --header X-Trace=1 X-Team=infra")
    if args.tokenize_prompt and backend_kind(args.backend) == "chat":
        raise ValueError(
            f"--tokenize-prompt cannot be used with {args.backend}: chat endpoints take text only"
        )
    _check_extra_body(args)


def _check_ranges(args: BenchArgs) -> None:
    at_least_one = (
        "num_prompts random_input_len random_output_len gsp_num_groups gsp_prompts_per_group gsp_system_prompt_len "
        "gsp_question_len gsp_output_len gsp_num_turns multi_turn_num_turns max_concurrency sharegpt_output_len "
        "sharegpt_context_len multi_turn_question_len vocab_size"
    )
    for name in at_least_one.split():
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    for name in ("random_range_ratio", "gsp_range_ratio"):
        if not 0.0 <= getattr(args, name) <= 1.0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: must lie between 0 and 1")
    if not args.request_rate > 0:
        raise ValueError(f"--request-rate {args.request_rate}: must be positive, or inf to send all at once")
    if args.seed < 0:
        raise ValueError(f"--seed {args.seed}: must be 0 or more")
    if args.warmup_requests < 0 or args.check_determinism < 0:
        raise ValueError("--warmup-requests and --check-determinism take 0 or more")


def _check_extra_body(args: BenchArgs) -> None:
    try:
        body = json.loads(args.extra_request_body or "{}")
    except ValueError as error:
        raise ValueError(f"--extra-request-body is not JSON ({error}): pass one object in quotes") from error
    if not isinstance(body, dict):
        raise ValueError("--extra-request-body must be a JSON object, as in '{\"temperature\": 0.8}'")
    sampling = body.get("sampling_params", {})
    if body.get("n", 1) != 1 or (isinstance(sampling, dict) and sampling.get("n", 1) != 1):
        raise ValueError(
            "--extra-request-body: n must be 1, because each request has one answer here; raise --num-prompts"
        )


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The parser of the command line. Defaults are those of BenchArgs. Abbreviations of flags, such as
    ``--random-input``, are accepted."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Benchmark online serving: throughput, latencies, determinism.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_server_flags(parser)
    _add_dataset_flags(parser)
    _add_synthetic_flags(parser)
    _add_load_flags(parser)
    _add_request_flags(parser)
    _add_output_flags(parser)
    defaults = {f.name: f.default for f in fields(BenchArgs)}
    parser.set_defaults(**{a.dest: defaults[a.dest] for a in parser._actions if a.dest in defaults})
    return parser


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("server")
    g.add_argument("--backend", choices=list(BACKENDS), help="Kind of server, and which of its APIs to use.")
    g.add_argument("--base-url", help="Address of the server, instead of --host and --port.")
    g.add_argument("--host", help="Server host.")
    g.add_argument("--port", type=int, help="Server port; default: that of the backend.")
    g.add_argument("--api-key", help="Bearer token to send; default: $OPENAI_API_KEY.")
    g.add_argument("--header", nargs="+", metavar="KEY=VALUE", help="Extra HTTP headers.")
    g.add_argument("--model", help="Model name or path; default: that of the server.")
    g.add_argument("--served-model-name", help="Model name in requests, if it differs from --model.")
    g.add_argument("--tokenizer", help="Tokenizer directory or hub id; default: the model's.")
    g.add_argument(
        "--trust-remote-code", action="store_true", help="Allow the tokenizer to run code of its own."
    )
    g.add_argument("--vocab-size", type=int, help="random-ids without a tokenizer: ids are below this.")


def _add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("dataset")
    g.add_argument("--dataset-name", choices=DATASETS, help="Dataset of prompts; random needs no file.")
    g.add_argument("--dataset-path", help="JSON or JSONL file for sharegpt, custom, multi-turn.")
    g.add_argument("--num-prompts", type=int, help="Number of requests, or of conversations.")
    g.add_argument("--sharegpt-output-len", type=int, help="Output length, instead of that in the file.")
    g.add_argument("--sharegpt-context-len", type=int, help="Leave out longer requests of a file.")
    g.add_argument("--prompt-suffix", help="Appended to every user prompt read from a file.")
    g.add_argument("--apply-chat-template", action="store_true", help="Apply the tokenizer's chat template.")
    g.add_argument("--tokenize-prompt", action="store_true", help="Send token ids instead of text.")


def _add_synthetic_flags(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("synthetic datasets")
    g.add_argument("--random-input-len", type=int, help="Input tokens of random, random-ids, multi-turn.")
    g.add_argument("--random-output-len", type=int, help="Output tokens of random, random-ids, multi-turn.")
    g.add_argument("--random-range-ratio", type=float, help="Lengths are drawn from [ratio*len, len].")
    g.add_argument("--gsp-num-groups", type=int, help="generated-shared-prefix: number of system prompts.")
    g.add_argument("--gsp-prompts-per-group", type=int, help="Questions per system prompt.")
    g.add_argument("--gsp-system-prompt-len", type=int, help="Tokens of a system prompt.")
    g.add_argument("--gsp-question-len", type=int, help="Tokens of a question.")
    g.add_argument("--gsp-output-len", type=int, help="Tokens of an answer.")
    g.add_argument("--gsp-range-ratio", type=float, help="Like --random-range-ratio, for gsp lengths.")
    g.add_argument("--gsp-num-turns", type=int, help="Questions per conversation.")
    g.add_argument("--gsp-ordered", action="store_true", help="Keep groups together instead of shuffling.")
    g.add_argument(
        "--multi-turn-num-turns", type=int, help="multi-turn: number of turns, or maximum for a file."
    )
    g.add_argument(
        "--multi-turn-question-len", type=int, help="Tokens of later questions; default: --random-input-len."
    )


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("load")
    g.add_argument("--request-rate", type=float, help="Poisson arrivals per second; inf sends all at once.")
    g.add_argument(
        "--max-concurrency", type=int, help="Maximum number of requests (or conversations) in flight."
    )
    g.add_argument("--warmup-requests", type=int, help="Number of short requests before the measurement.")
    g.add_argument("--flush-cache", action="store_true", help="Flush the server's cache after the warm-up.")
    g.add_argument("--seed", type=int, help="Seed of prompts, lengths, arrivals and samples.")


def _add_request_flags(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("requests")
    g.add_argument("--disable-ignore-eos", action="store_true", help="Let answers end at end-of-sequence.")
    g.add_argument("--disable-stream", action="store_true", help="Ask for one reply instead of a stream.")
    g.add_argument("--return-logprob", action="store_true", help="Ask for output logprobs.")
    g.add_argument("--extra-request-body", metavar="JSON", help="JSON object to merge into every request.")
    g.add_argument("--lora-name", nargs="*", help="LoRA adapters; each request draws one.")


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("output")
    g.add_argument("--output-file", help="JSONL file to append to; default: named after the run.")
    g.add_argument("--output-details", action="store_true", help="Add per-request arrays to the line.")
    g.add_argument("--disable-tqdm", action="store_true", help="No progress bar.")
    g.add_argument("--tag", help="A label that is written to the output line.")
    g.add_argument("--profile", action="store_true", help="Profile the run (/start_profile, /stop_profile).")
    g.add_argument("--profile-activities", nargs="+", help="What the profiler records.")
    g.add_argument("--profile-num-steps", type=int, help="Number of steps after which the profiler stops.")
    g.add_argument("--profile-output-dir", help="Folder in which the server writes the trace.")
    g.add_argument(
        "--check-determinism",
        nargs="?",
        type=int,
        const=16,
        metavar="N",
        help="Send N answered prompts again one at a time and compare the tokens (N is 16 by default, 0: off).",
    )
