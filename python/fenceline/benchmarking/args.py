"""The benchmark's arguments: BenchArgs, its checks, and the parser of the command line."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fenceline.benchmarking.endpoints import BACKENDS, backend_kind
from fenceline.config import user_path

GOODPUT_METRICS = ("ttft", "tpot", "e2el")
DATASETS = ("sharegpt", "custom", "random", "random-ids", "generated-shared-prefix", "multi-turn", "image")
IMAGE_SIZES = {"4k": (2160, 3840), "1080p": (1080, 1920), "720p": (720, 1280), "360p": (360, 640)}
"""The named values of --image-resolution: height, width."""


def _arg(default: object, help: str, *, begins: str = "", secret: bool = False, **settings: object) -> Any:
    """A field that is a flag, with argparse's ``settings``; ``begins``: the group of it and of those after it."""
    return field(default=default, repr=not secret, metadata={"help": help, "begins": begins, **settings})


@dataclass(frozen=True, slots=True)
class BenchArgs:
    """All settings of a run, named like the flags. Lengths are in tokens, rates per second."""

    backend: str = _arg(
        "fenceline", "Kind of server, and which of its APIs to use.", begins="server", choices=list(BACKENDS)
    )
    base_url: str | None = _arg(None, "Address of the server, instead of --host and --port.")
    host: str = _arg("127.0.0.1", "Server host.")
    port: int | None = _arg(None, "Server port; default: that of the backend.")
    api_key: str | None = _arg(None, "Bearer token to send; default: $OPENAI_API_KEY.", secret=True)
    header: tuple[str, ...] = _arg((), "Extra HTTP headers.", metavar="KEY=VALUE", nargs="+", secret=True)
    model: str | None = _arg(None, "Model name or path; default: that of the server.")
    served_model_name: str | None = _arg(None, "Model name in requests, if it differs from --model.")
    tokenizer: str | None = _arg(None, "Tokenizer directory or hub id; default: the model's.")
    trust_remote_code: bool = _arg(False, "Allow the tokenizer to run code of its own.")
    vocab_size: int | None = _arg(None, "random-ids without a tokenizer: ids are below this.")
    dataset_name: str = _arg("random", "Dataset of prompts; random needs no file.", begins="dataset", choices=DATASETS)
    dataset_path: str = _arg("", "JSON or JSONL file for sharegpt, custom, multi-turn.")
    num_prompts: int = _arg(1000, "Number of requests, or of conversations.")
    sharegpt_output_len: int | None = _arg(None, "Output length, instead of that in the file.")
    sharegpt_context_len: int | None = _arg(None, "Leave out longer requests of a file.")
    prompt_suffix: str = _arg("", "Appended to every user prompt read from a file.")
    apply_chat_template: bool = _arg(False, "Apply the tokenizer's chat template.")
    tokenize_prompt: bool = _arg(False, "Send token ids instead of text.")
    random_input_len: int = _arg(
        1024, "Input tokens of random, random-ids, multi-turn, image.", begins="synthetic datasets"
    )
    random_output_len: int = _arg(1024, "Output tokens of random, random-ids, multi-turn, image.")
    random_range_ratio: float = _arg(0.0, "Lengths are drawn from [ratio*len, len].")
    gsp_num_groups: int = _arg(64, "generated-shared-prefix: number of system prompts.")
    gsp_prompts_per_group: int = _arg(16, "Questions per system prompt.")
    gsp_system_prompt_len: int = _arg(2048, "Tokens of a system prompt.")
    gsp_question_len: int = _arg(128, "Tokens of a question.")
    gsp_output_len: int = _arg(256, "Tokens of an answer.")
    gsp_range_ratio: float = _arg(1.0, "Like --random-range-ratio, for gsp lengths.")
    gsp_num_turns: int = _arg(1, "Questions per conversation.")
    gsp_ordered: bool = _arg(False, "Keep groups together instead of shuffling.")
    multi_turn_num_turns: int = _arg(4, "multi-turn: number of turns, or maximum for a file.")
    multi_turn_question_len: int | None = _arg(None, "Tokens of later questions; default: --random-input-len.")
    image_count: int = _arg(1, "image: images of a request.", begins="images")
    image_resolution: str = _arg("1080p", f"{', '.join(IMAGE_SIZES)}, or HEIGHTxWIDTH.")
    image_format: str = _arg("jpeg", "Format of the files.", choices=["jpeg", "png"])
    image_content: str = _arg("random", "What they show: noise, or nothing.", choices=["random", "blank"])
    image_pool: int | None = _arg(
        None, "Number of images that all requests share, each sent before the measurement; default: no image is twice."
    )
    request_rate: float = _arg(float("inf"), "Poisson arrivals per second; inf sends all at once.", begins="load")
    burstiness: float = _arg(
        1.0, "Gamma-distributed gaps at that rate: below 1 in bursts, 1 Poisson, above 1 more even, inf even."
    )
    ramp_up_strategy: str | None = _arg(
        None,
        "Instead of --request-rate, a rate that grows with each request from start to end.",
        choices=["linear", "exponential"],
    )
    ramp_up_start_rps: float | None = _arg(None, "Requests per second at the start of the ramp.")
    ramp_up_end_rps: float | None = _arg(None, "Requests per second at its end.")
    max_concurrency: int | None = _arg(None, "Maximum number of requests (or conversations) in flight.")
    goodput: tuple[str, ...] = _arg(
        (),
        "Report how many requests meet all these limits: milliseconds of ttft, tpot, e2el, as in ttft:500 tpot:25.",
        metavar="METRIC:MS",
        nargs="+",
    )
    find_max_goodput: float = _arg(
        0.0,
        "Search the highest rate at which this share of the requests (0.99 by default, 0: off) meets --goodput.",
        metavar="SHARE",
        nargs="?",
        const=0.99,
    )
    warmup_requests: int = _arg(1, "Number of short requests before the measurement.")
    flush_cache: bool = _arg(False, "Flush the server's cache after the warm-up.")
    seed: int = _arg(1, "Seed of prompts, lengths, arrivals and samples.")
    disable_ignore_eos: bool = _arg(False, "Let answers end at end-of-sequence.", begins="requests")
    disable_stream: bool = _arg(False, "Ask for one reply instead of a stream.")
    return_logprob: bool = _arg(False, "Ask for output logprobs.")
    extra_request_body: str | None = _arg(None, "JSON object to merge into every request.", metavar="JSON")
    lora_name: tuple[str, ...] = _arg((), "LoRA adapters; each request draws one.", nargs="*")
    output_file: str | None = _arg(None, "JSONL file to append to; default: named after the run.", begins="output")
    output_details: bool = _arg(False, "Add per-request arrays to the line.")
    plot: str | None = _arg(None, "Draw the run: a page FILE.html, or FILE.png with matplotlib.", metavar="FILE")
    compare: tuple[str, ...] = _arg(
        (), "Send nothing; print the last results of two output files side by side.", metavar=("A", "B"), nargs=2
    )
    disable_tqdm: bool = _arg(False, "No progress bar.")
    tag: str | None = _arg(None, "A label that is written to the output line.")
    profile: bool = _arg(False, "Profile the run (/start_profile, /stop_profile).")
    profile_activities: tuple[str, ...] = _arg(("CPU", "GPU"), "What the profiler records.", nargs="+")
    profile_num_steps: int | None = _arg(None, "Number of steps after which the profiler stops.")
    profile_output_dir: str | None = _arg(None, "Folder in which the server writes the trace.")
    check_determinism: int = _arg(
        0,
        "Send N answered prompts again one at a time and compare the tokens (N is 16 by default, 0: off).",
        metavar="N",
        nargs="?",
        const=16,
    )

    @classmethod
    def from_namespace(cls, namespace: object) -> BenchArgs:
        """Make BenchArgs from an object with some of its attributes. Those that are missing or None have their
        defaults. Raises ValueError, whose text names the remedy, if a value is unusable."""
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
    def goodput_limits(self) -> dict[str, float]:
        """The limits of ``--goodput`` in milliseconds, by metric. :func:`check` has checked them."""
        return {name: float(limit) for name, _, limit in (pair.partition(":") for pair in self.goodput)}

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers of every request, including the authorization."""
        headers = dict(pair.split("=", 1) for pair in self.header)
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return headers


def check(args: BenchArgs) -> None:
    """Raises ValueError, whose text names the flag and the remedy, if an argument is unusable."""
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
    _check_goodput(args)
    _check_search(args)
    _check_files(args)
    if any("=" not in pair for pair in args.header):
        raise ValueError("--header takes KEY=VALUE pairs, as in --header X-Trace=1 X-Team=infra")
    if not all(text.isprintable() for text in (args.api_key or "", *args.header)):
        raise ValueError("--api-key, OPENAI_API_KEY and --header are single lines of printable characters: check them")
    if args.tokenize_prompt and backend_kind(args.backend) == "chat":
        raise ValueError(f"--tokenize-prompt cannot be used with {args.backend}: chat endpoints take text only")
    if args.check_determinism and backend_kind(args.backend) == "embeddings":
        raise ValueError(
            f"--check-determinism compares texts, and {args.backend} answers with numbers: leave it out (the server's"
            " --enable-deterministic-inference is tested with them)"
        )
    if args.dataset_name == "image":
        if backend_kind(args.backend) != "chat":
            raise ValueError(
                f"--dataset-name image cannot be used with {args.backend}: take --backend fenceline-oai-chat"
            )
        image_size(args.image_resolution)
    _check_extra_body(args)


def image_size(resolution: str) -> tuple[int, int]:
    """The height and width for which --image-resolution stands. Raises ValueError with the remedy."""
    found = re.fullmatch("([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", resolution)
    if resolution not in IMAGE_SIZES and found is None:
        raise ValueError(
            f"--image-resolution {resolution}: take {', '.join(IMAGE_SIZES)}, or HEIGHTxWIDTH as in 720x1280"
        )
    return IMAGE_SIZES[resolution] if found is None else (int(found[1]), int(found[2]))


def _check_ranges(args: BenchArgs) -> None:
    at_least_one = (
        "num_prompts random_input_len random_output_len gsp_num_groups gsp_prompts_per_group gsp_system_prompt_len "
        "gsp_question_len gsp_output_len gsp_num_turns multi_turn_num_turns max_concurrency sharegpt_output_len "
        "sharegpt_context_len multi_turn_question_len vocab_size image_count image_pool"
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
    if not args.burstiness > 0:
        raise ValueError(f"--burstiness {args.burstiness}: must be positive, 1 for a Poisson process")
    rated = args.request_rate < math.inf or args.ramp_up_strategy or args.find_max_goodput
    if args.burstiness != 1 and not rated:
        raise ValueError(f"--burstiness {args.burstiness}: nothing arrives at a rate; pass --request-rate R too")
    _check_ramp(args)
    if args.seed < 0:
        raise ValueError(f"--seed {args.seed}: must be 0 or more")
    if args.warmup_requests < 0 or args.check_determinism < 0:
        raise ValueError("--warmup-requests and --check-determinism take 0 or more")


def _check_ramp(args: BenchArgs) -> None:
    ends = (args.ramp_up_start_rps, args.ramp_up_end_rps)
    if args.ramp_up_strategy is None:
        if ends != (None, None):
            raise ValueError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy linear or exponential")
        return
    if args.ramp_up_strategy not in ("linear", "exponential"):
        raise ValueError(f"--ramp-up-strategy {args.ramp_up_strategy}: choose linear or exponential")
    if not all(end is not None and 0 < end < math.inf for end in ends):
        raise ValueError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, both positive and finite")
    if args.request_rate != math.inf:
        raise ValueError("--ramp-up-strategy takes the place of --request-rate: leave that out")


def _check_goodput(args: BenchArgs) -> None:
    metrics = [pair.partition(":")[0] for pair in args.goodput]
    for metric, pair in zip(metrics, args.goodput, strict=True):
        try:
            limit = float(pair.partition(":")[2])
        except ValueError:
            limit = 0.0
        if metric not in GOODPUT_METRICS or not limit > 0 or metrics.count(metric) > 1:
            raise ValueError(
                f"--goodput {pair}: give {', '.join(GOODPUT_METRICS)}, each at most once, with milliseconds above 0, "
                "as in --goodput ttft:500 tpot:25"
            )


def _check_search(args: BenchArgs) -> None:
    if not 0 <= args.find_max_goodput <= 1:
        raise ValueError(f"--find-max-goodput {args.find_max_goodput}: a share between 0 and 1, as in 0.99")
    if not args.find_max_goodput:
        return
    if not args.goodput:
        raise ValueError("--find-max-goodput needs the limits: pass --goodput too, as in --goodput ttft:500 tpot:25")
    if args.ramp_up_strategy or args.request_rate != math.inf:
        raise ValueError("--find-max-goodput chooses the rates: leave out --request-rate and --ramp-up-strategy")
    if args.profile:
        raise ValueError("--find-max-goodput makes many runs: profile one of them, with --request-rate and --profile")


def _check_files(args: BenchArgs) -> None:
    """What is written after the run must be known to be writable before it."""
    if args.plot:
        suffix = Path(args.plot).suffix.lower()
        if suffix not in (".html", ".png"):
            raise ValueError(f"--plot {args.plot}: give a name that ends in .html or .png")
        if suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
            raise ValueError(f"--plot {args.plot}: needs matplotlib: pip install matplotlib, or end the name in .html")
    for flag, name in (("--plot", args.plot), ("--output-file", args.output_file)):
        path = user_path(name or ".")
        if name and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
            raise ValueError(f"{flag} {name}: cannot be written; name a file in a folder that exists")


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
    group: argparse._ActionsContainer = parser
    for f in fields(BenchArgs):
        settings = dict(f.metadata)
        if begins := settings.pop("begins"):
            group = parser.add_argument_group(begins)
        kind = str(f.type).split(" | ")[0]
        if kind == "bool":
            settings["action"] = "store_true"
        elif kind in ("int", "float"):
            settings["type"] = int if kind == "int" else float
        group.add_argument(f"--{f.name.replace('_', '-')}", default=f.default, **settings)
    return parser
