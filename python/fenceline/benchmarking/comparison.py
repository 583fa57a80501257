"""--compare A B: two results side by side. A file is one of ours or SGLang's (its last line) or one of vLLM's."""

from __future__ import annotations

import json
import math
from typing import Any

from fenceline.config import user_path

_STATS = ("mean", "median", "p99")
_FIGURES = {
    "completed": "Successful requests",
    "failed": "Failed requests",
    "duration": "Duration (s)",
    "request_throughput": "Requests/s",
    "request_goodput": "Requests/s within the limits",
    "good_request_fraction": "Share within the limits",
    "max_goodput_rate": "Highest rate within the limits",
    "input_throughput": "Input tokens/s",
    "output_throughput": "Output tokens/s",
    "total_throughput": "Total tokens/s",
    "max_output_tokens_per_s": "Peak output tokens/s",
    "concurrency": "Concurrency",
    "accept_length": "Accept length",
    "total_input_tokens": "Input tokens",
    "total_cached_tokens": "Cached input tokens",
    "total_output_tokens": "Output tokens",
}
_LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "longest_gap": "Longest gap", "e2e_latency": "E2E latency"}
_FIGURES |= {
    f"{stat}_{key}_ms": f"{stat.capitalize()} {name} (ms)" for key, name in _LATENCIES.items() for stat in _STATS
}
_VLLM_NAMES = {"total_token_throughput": "total_throughput"}
_VLLM_NAMES |= {f"{stat}_e2el_ms": f"{stat}_e2e_latency_ms" for stat in _STATS}
_SETTINGS = (
    "tag backend model_id dataset_name num_prompts random_input_len random_output_len random_range_ratio"
    " sharegpt_output_len request_rate burstiness ramp_up_strategy ramp_up_start_rps ramp_up_end_rps max_concurrency"
    " goodput seed"
)


def read_result(path: str) -> dict[str, Any]:
    """The last result in a file. Raises ValueError if there is none."""
    try:
        text = user_path(path).read_text(encoding="utf-8").strip()
        try:
            result = json.loads(text)
        except ValueError:
            result = json.loads(text.splitlines()[-1] if text else text)
    except (OSError, ValueError) as error:
        raise ValueError(f"--compare {path}: {error}; give files that --output-file has written") from error
    if not isinstance(result, dict) or "request_throughput" not in result:
        raise ValueError(f"--compare {path}: no result of a run; give files that --output-file has written")
    return {_VLLM_NAMES.get(str(key), str(key)): value for key, value in result.items()}


def compare_results(first: str, second: str) -> str:
    """A Markdown table of the figures that both files have, with ratios of the second to the first, after a line for
    each setting in which they differ. Raises ValueError if a file cannot be read."""
    a, b = read_result(first), read_result(second)
    lines = [f"A: {first}", f"B: {second}"]
    settings = [(name, str(a.get(name)), str(b.get(name))) for name in _SETTINGS.split()]  # vLLM's inf is a text
    lines += [f"{name}: {in_a} in A, {in_b} in B" for name, in_a, in_b in settings if in_a != in_b]
    lines += ["", "| | A | B | B/A |", "|---|---|---|---|"]
    for key, label in _FIGURES.items():
        in_a, in_b = a.get(key), b.get(key)
        if isinstance(in_a, int | float) and isinstance(in_b, int | float) and (in_a or in_b):
            shown = [f"{value:,}" if isinstance(value, int) else f"{value:,.2f}" for value in (in_a, in_b)]
            lines.append(f"| {label} | {shown[0]} | {shown[1]} | {_ratio(in_a, in_b)} |")
    return "\n".join(lines)


def _ratio(first: float, second: float) -> str:
    return f"{second / first:.3f}" if first and math.isfinite(first) else ""
