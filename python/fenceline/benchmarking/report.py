"""The report on the terminal and the line of JSON, with SGLang's layout and keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from fenceline.benchmarking.args import BenchArgs
from fenceline.benchmarking.determinism import DeterminismResult
from fenceline.benchmarking.goodput import Trial, best_of
from fenceline.benchmarking.metrics import BenchmarkMetrics, Summary
from fenceline.benchmarking.records import RequestOutput
from fenceline.config import user_path

_WIDTH = 50
_NUM_REASONS = 3


def format_report(args: BenchArgs, metrics: BenchmarkMetrics, accept_length: float | None = None) -> str:
    lines = ["", " Serving Benchmark Result ".center(_WIDTH, "=")]
    lines += _head(args, metrics, accept_length)
    lines += _section("End-to-End Latency", "E2E Latency", metrics.e2e_latency)
    lines += _section("Time to First Token", "TTFT", metrics.ttft)
    lines += _section("Time per Output Token (excl. 1st token)", "TPOT", metrics.tpot)
    lines += _section("Inter-Token Latency", "ITL", metrics.itl)
    lines += _section("Longest Gap of a Request", "Longest Gap", metrics.longest_gap)
    if metrics.turns:
        lines.append("Time to First Token by Turn".center(_WIDTH, "-"))
        for turn in metrics.turns:
            lines.append(_line(f"Turn {turn.turn} completed:", turn.completed))
            lines.append(_line(f"Turn {turn.turn} mean TTFT (ms):", turn.ttft.mean))
            lines.append(_line(f"Turn {turn.turn} median TTFT (ms):", turn.ttft.median))
            lines.append(_line(f"Turn {turn.turn} P99 TTFT (ms):", turn.ttft.p99))
    lines.append("=" * _WIDTH)
    lines += _failures(metrics)
    return "\n".join(lines)


def _head(args: BenchArgs, metrics: BenchmarkMetrics, accept_length: float | None) -> list[str]:
    optional: list[tuple[str, int | float | str | None]] = [
        ("Total cached input tokens:", metrics.total_cached),
        ("Total generated tokens:", metrics.total_output),
        ("Total generated tokens (retokenized):", metrics.total_output_retokenized),
        ("Request throughput (req/s):", metrics.request_throughput),
        ("Request goodput (req/s):", metrics.request_goodput),
        ("Requests within the limits (%):", None if metrics.good_fraction is None else 100 * metrics.good_fraction),
        ("Input token throughput (tok/s):", metrics.input_throughput),
        ("Output token throughput (tok/s):", metrics.output_throughput),
        ("Peak output token throughput (tok/s):", metrics.max_output_tokens_per_s),
        ("Peak concurrent requests:", metrics.max_concurrent_requests),
        ("Total token throughput (tok/s):", metrics.total_throughput),
        ("Concurrency:", metrics.concurrency),
        ("Accept length:", accept_length),
    ]
    lines = [
        _line("Backend:", args.backend),
        _line("Traffic request rate:", traffic(args)),
        _line("Max request concurrency:", args.max_concurrency or "not set"),
        _line("Successful requests:", metrics.completed),
        _line("Failed requests:", metrics.failed),
        _line("Benchmark duration (s):", metrics.duration),
        _line("Total input tokens:", metrics.total_input),
    ]
    return lines + [_line(label, value) for label, value in optional if value is not None]


def traffic(args: BenchArgs) -> str:
    """The rate of requests in words."""
    text = str(args.request_rate)
    if args.ramp_up_strategy:
        text = f"{args.ramp_up_start_rps:g} to {args.ramp_up_end_rps:g} ({args.ramp_up_strategy})"
    return text if args.burstiness == 1 else f"{text}, burstiness {args.burstiness:g}"


def _line(label: str, value: int | float | str) -> str:
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"


def _section(title: str, name: str, summary: Summary) -> list[str]:
    rows = [("Mean", summary.mean), ("Median", summary.median), ("P90", summary.p90), ("P95", summary.p95)]
    rows += [("P99", summary.p99), ("Max", summary.max)]
    return [title.center(_WIDTH, "-")] + [_line(f"{stat} {name} (ms):", value) for stat, value in rows]


def _failures(metrics: BenchmarkMetrics) -> list[str]:
    if not metrics.failed:
        return []
    lines = [f"{metrics.failed} of {metrics.failed + metrics.completed} requests failed:"]
    lines += [f"  {count} x {reason}" for reason, count in metrics.errors[:_NUM_REASONS]]
    more = len(metrics.errors) - _NUM_REASONS
    return lines + ([f"  and {more} other reasons (--output-details has them all)"] if more > 0 else [])


def format_determinism(result: DeterminismResult) -> str:
    """What the determinism check found, ready to print."""
    lines = [
        f"Determinism check: {result.checked} prompts replayed alone, {result.differ} differ, {result.failed} failed"
    ]
    if result.first is not None:
        first = result.first
        lines.append(
            f"  first difference: request {first.index}, turn {first.turn + 1}, {first.unit} {first.position}: "
            f"{first.in_run} in the run, {first.in_replay} alone"
        )
    if result.first_error:
        lines.append(f"  first failure: {result.first_error}")
    return "\n".join(lines)


def format_trial(trial: Trial) -> str:
    """One run of --find-max-goodput, in a line."""
    return (
        f"Rate {trial.request_rate:.4g} req/s: {100 * trial.good_request_fraction:.2f} % within the limits, "
        f"goodput {trial.request_goodput:.2f} req/s"
    )


def format_search(trials: Sequence[Trial], wanted: float) -> str:
    """What --find-max-goodput found."""
    best = best_of(trials, wanted)
    if best is None:
        return f"Maximum goodput: none, at no rate {100 * wanted:g} % of the requests met the limits"
    if best.request_rate == float("inf"):
        return "Maximum goodput: not reached, all requests at once met the limits; raise --num-prompts"
    return f"Maximum goodput: {best.request_goodput:.2f} req/s at a rate of {best.request_rate:.4g} req/s"


def search_dict(trials: Sequence[Trial], wanted: float) -> dict[str, Any]:
    """The part of the JSONL object for --find-max-goodput; a rate of None: no rate met the limits."""
    best = best_of(trials, wanted)
    return {
        "max_goodput_share": wanted,
        "max_goodput_rate": best.request_rate if best else None,
        "max_goodput_trials": [asdict(trial) for trial in trials],
    }


def result_dict(
    args: BenchArgs, metrics: BenchmarkMetrics, accept_length: float | None, server_info: object
) -> dict[str, Any]:
    """The JSONL object without per-request details."""
    head: dict[str, Any] = {
        "tag": args.tag,
        "backend": args.backend,
        "dataset_name": args.dataset_name,
        "request_rate": args.request_rate,
        "burstiness": args.burstiness,
        "ramp_up_strategy": args.ramp_up_strategy,
        "ramp_up_start_rps": args.ramp_up_start_rps,
        "ramp_up_end_rps": args.ramp_up_end_rps,
        "max_concurrency": args.max_concurrency,
        "sharegpt_output_len": args.sharegpt_output_len,
        "random_input_len": args.random_input_len,
        "random_output_len": args.random_output_len,
        "random_range_ratio": args.random_range_ratio,
        "num_prompts": args.num_prompts,
        "seed": args.seed,
        "server_info": server_info,
        "duration": metrics.duration,
        "completed": metrics.completed,
        "failed": metrics.failed,
        "total_input_tokens": metrics.total_input,
        "total_cached_tokens": metrics.total_cached,
        "total_output_tokens": metrics.total_output,
        "total_output_tokens_retokenized": metrics.total_output_retokenized,
        "request_throughput": metrics.request_throughput,
        "goodput": args.goodput_limits or None,
        "request_goodput": metrics.request_goodput,
        "good_request_count": metrics.good,
        "good_request_fraction": metrics.good_fraction,
        "input_throughput": metrics.input_throughput,
        "output_throughput": metrics.output_throughput,
        "total_throughput": metrics.total_throughput,
    }
    for name in ("e2e_latency", "ttft", "tpot", "itl", "longest_gap"):
        head |= _flat(name, getattr(metrics, name))
    head |= {
        "concurrency": metrics.concurrency,
        "accept_length": accept_length,
        "max_output_tokens_per_s": metrics.max_output_tokens_per_s,
        "max_concurrent_requests": metrics.max_concurrent_requests,
    }
    if metrics.turns:
        head["turns"] = [{"turn": t.turn, "completed": t.completed, **_flat("ttft", t.ttft)} for t in metrics.turns]
    return head


def _flat(name: str, summary: Summary) -> dict[str, float]:
    stats = ("mean", "median", "std", "p90", "p95", "p99", "max")
    return {f"{stat}_{name}_ms": getattr(summary, stat) for stat in stats}


def result_details(outputs: list[RequestOutput]) -> dict[str, Any]:
    """Arrays with one entry per request, in the order of requests and turns. Times are in seconds, as in SGLang."""
    return {
        "input_lens": [output.prompt_len for output in outputs],
        "output_lens": [output.reply.output_len if output.reply.success else 0 for output in outputs],
        "ttfts": [output.reply.ttft for output in outputs],
        "itls": [output.reply.itl for output in outputs],
        "longest_gaps": [output.reply.longest_gap for output in outputs],
        "generated_texts": [output.reply.text for output in outputs],
        "errors": [output.reply.error for output in outputs],
    }


def output_path(args: BenchArgs) -> Path:
    """--output-file; by default a name made of the backend, the current month and day, and the workload."""
    if args.output_file:
        return user_path(args.output_file)
    return Path(f"{args.backend}_{datetime.now().strftime('%m%d')}_{workload(args)}.jsonl")


def workload(args: BenchArgs) -> str:
    """What is sent, in short, for names."""
    if args.dataset_name.startswith("random"):
        return f"{args.num_prompts}_{args.random_input_len}_{args.random_output_len}"
    return f"{args.num_prompts}_{args.dataset_name}"


def append_line(path: Path, result: dict[str, Any]) -> None:
    """Append ``result`` as one line of JSON. An infinite rate is written as ``Infinity``, as in SGLang. Raises
    ValueError if the file cannot be written."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    except OSError as error:
        raise ValueError(f"--output-file {path}: {error}; pass a path that can be written") from error
