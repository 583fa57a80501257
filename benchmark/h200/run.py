"""Measures the serving speed on one H200 over HTTP with our bench_serving, and compares it with SGLang's.

    python benchmark/h200/run.py                                   # both shapes, the three loads: about 3 minutes
    python benchmark/h200/run.py --shape 8b --load 32 --server-args "--decode-attention-backend triton"
    python benchmark/h200/run.py --shape 8b --load stalls-64 stalls-128 stalls-16 \
        --server-args "--enable-mixed-chunk --max-inter-token-ms 30"    # and without: who decodes while prompts come
    python benchmark/h200/run.py --shape 8b --load stalls-128 --fewer 4 --goodput ttft:500 tpot:25    # a minute
    python benchmark/h200/run.py --shape qwen2.5-vl-7b             # with images: each new, or seen before
    python benchmark/h200/run.py --shape minicpm-sala --server-args "--page-size 64" --load 32 long-16
    python benchmark/h200/run.py --shape tiny --quick              # on any machine: whether it works at all

Each shape's server runs with dummy weights and otherwise default flags (--server-args adds some). Each load is warmed
up with short requests of its own prompt length, the prefix cache is flushed, and the measured run follows: random token
ids sent as ids, lengths exact (of the loads "stalls" from a range), answers streamed. Loads with images have one of
1280x720 pixels a request, through chat completions; those that were seen before are 16 that the server has had, and its
cache is kept. The table is Markdown; --out keeps the logs, bench_serving's lines with the server's own state in them,
and result.json.

SGLang's figures: version 0.5.16 on one H200, bf16, dummy weights, fa3 backend, its defaults and its own client.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from bench_server import BenchServer, ServerDied
from shapes import SHAPES, has_tower, make_model_dir, num_plain_tokens

_WARMUP_OUTPUT_LEN = 16
_MOST_WARMUP_PROMPTS, _MOST_WARMUP_TOKENS = 64, 2**17
_DYING_S = 3.0  # a server whose scheduler has died ends within this time; its requests fail a little earlier


@dataclass(frozen=True, slots=True)
class Load:
    """``concurrency`` requests at a time; lengths in tokens, or the greatest ones, and the smallest are ``range_ratio``
    of these. ``images``: what each request has before its text."""

    input_len: int
    output_len: int
    concurrency: int
    num_prompts: int
    images: Literal["none", "a new one", "one seen before"] = "none"
    range_ratio: float = 1.0

    def eighth(self) -> Load:
        """A smaller load, for --quick."""
        lens = (max(self.input_len // 8, 1), max(self.output_len // 8, 2))
        sizes = max(self.concurrency // 8, 1), max(self.num_prompts // 8, 2)
        return Load(*lens, *sizes, self.images, self.range_ratio)

    def flags(self, vocab: int) -> list[str]:
        """Those of bench_serving that say what is sent; ``vocab``: ids of plain tokens."""
        if self.images == "none":
            return [*_TEXT_FLAGS, "--vocab-size", str(vocab), "--flush-cache"]
        return [*_IMAGE_FLAGS, *(["--flush-cache"] if self.images == "a new one" else ["--image-pool", "16"])]

    def __str__(self) -> str:
        image = "" if self.images == "none" else f", an image ({self.images})"
        lens = f"{self.input_len} in, {self.output_len} out"
        lens += "" if self.range_ratio == 1 else f" (from {self.range_ratio:g} of these)"
        return f"{lens}, {self.concurrency} at a time, {self.num_prompts} requests{image}"


_TEXT_FLAGS = ["--backend", "fenceline", "--dataset-name", "random-ids"]
_IMAGE_FLAGS = ["--backend", "fenceline-oai-chat", "--dataset-name", "image", "--image-resolution", "720p"]


@dataclass(frozen=True, slots=True)
class Figures:
    """Output tokens and requests per second over the run; means over requests, in milliseconds; the 99th percentile of
    all gaps between tokens, and the median of the requests' longest gaps. With --goodput they are those of the highest
    rate at which 99 % of the requests meet the limits, and ``goodput_s`` is how many do per second."""

    output_tok_s: float
    ttft_ms: float
    tpot_ms: float
    requests_s: float | None = None
    itl_p99_ms: float | None = None
    gap_ms: float | None = None
    goodput_s: float | None = None


LOADS = {"1": Load(1024, 256, 1, 12), "32": Load(128, 512, 32, 96), "256": Load(1024, 256, 256, 512)}
_AT_A_TIME = {1: 12, 16: 96, 64: 256}  # with images: how many requests in all
IMAGE_LOADS = {f"image-{at}": Load(100, 128, at, num, "a new one") for at, num in _AT_A_TIME.items()}
IMAGE_LOADS |= {f"seen-{at}": Load(100, 128, at, num, "one seen before") for at, num in _AT_A_TIME.items()}
# Who decodes while prompts come: chats of any length, short ones, and long prompts.
STALL_LOADS = {
    "stalls-64": Load(2048, 512, 64, 384, range_ratio=0.0),
    "stalls-128": Load(512, 128, 128, 1024, range_ratio=0.5),
    "stalls-16": Load(8192, 256, 16, 96),
}
LONG_LOADS = {"long-16": Load(65_536, 128, 16, 16), "long-64": Load(32_768, 128, 64, 64)}
ALL_LOADS = IMAGE_LOADS | STALL_LOADS | LONG_LOADS | LOADS
SGLANG = {
    ("0.6b", "1"): Figures(601, 11.8, 1.62),
    ("0.6b", "32"): Figures(15487, 32, 2.00),
    ("0.6b", "256"): Figures(18249, 326, 12.1),
    ("8b", "1"): Figures(191, 26.6, 5.14),
    ("8b", "32"): Figures(5272, 85, 5.90),
    ("8b", "256"): Figures(5878, 3036, 31.3),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One measured load. If it failed, ``figures`` is None and ``error`` says why."""

    shape: str
    load: str
    what: str
    figures: Figures | None
    graphs: str = ""
    error: str = ""


def bench(
    server: BenchServer,
    load: Load,
    vocab: int,
    out: Path,
    name: str,
    seed: int,
    timeout_s: float,
    extra: Sequence[str] = (),
) -> dict[str, object]:
    """Run bench_serving and return its JSON line; ``extra``: more of its flags. Raises ServerDied, or RuntimeError with
    the end of bench_serving's output."""
    file = out / f"{name}.bench.json"
    file.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "fenceline.bench_serving", "--base-url", server.url),
        *(*load.flags(vocab), "--random-range-ratio", f"{load.range_ratio:g}"),
        *("--random-input-len", str(load.input_len), "--random-output-len", str(load.output_len)),
        *("--num-prompts", str(load.num_prompts), "--max-concurrency", str(load.concurrency), "--seed", str(seed)),
        *("--warmup-requests", "1", "--disable-tqdm", "--output-file", str(file)),
        *extra,
    ]
    with (out / f"{name}.bench.txt").open("w") as log:
        log.write(shlex.join(command) + "\n")
        log.flush()
        client = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait(client, server, timeout_s)
        finally:
            client.kill()
            client.wait()
    if not file.is_file():
        tail = "\n".join((out / f"{name}.bench.txt").read_text().splitlines()[-2:])
        raise RuntimeError(f"bench_serving failed:\n{tail}")
    return dict(json.loads(file.read_text().splitlines()[-1]))


def _wait(client: subprocess.Popen[bytes], server: BenchServer, timeout_s: float) -> None:
    for _ in range(int(timeout_s)):
        try:
            client.wait(1.0)
            return
        except subprocess.TimeoutExpired:
            server.raise_if_dead()
    raise RuntimeError(f"bench_serving still ran after {timeout_s:g} s (--timeout)")


def measure(server: BenchServer, shape: str, key: str, args: argparse.Namespace) -> Row:
    """Warm up and run one load. Raises ServerDied."""
    load = ALL_LOADS[key].eighth() if args.quick else ALL_LOADS[key]
    load = replace(load, num_prompts=max(load.num_prompts // args.fewer, load.concurrency))
    name, vocab = f"{shape}-{key}", num_plain_tokens(shape)
    try:
        prompts = min(load.concurrency, _MOST_WARMUP_PROMPTS, -(-_MOST_WARMUP_TOKENS // load.input_len))
        warmup = replace(load, output_len=_WARMUP_OUTPUT_LEN, num_prompts=prompts)
        extra = shlex.split(args.bench_args)
        bench(server, warmup, vocab, args.out, f"{name}-warmup", args.seed + 1000, args.timeout, extra)
        if args.goodput:  # requests arrive when they do, however many there are
            extra += ["--goodput", *args.goodput, "--find-max-goodput", "--max-concurrency", str(load.num_prompts)]
        result = bench(server, load, vocab, args.out, name, args.seed, args.timeout, extra)
    except RuntimeError as error:
        server.raise_if_dead(_DYING_S)
        return Row(shape, key, str(load), None, error=str(error))
    if result["failed"]:
        server.raise_if_dead(_DYING_S)
    values = [float(str(result[k])) for k in _FIGURES]
    goodput = None
    if args.goodput:
        goodput = float(str(result["request_goodput"])) if result["max_goodput_rate"] else 0.0
    error = f"{result['failed']} requests failed" if result["failed"] else ""
    return Row(shape, key, str(load), Figures(*values, goodput), graph_summary(result.get("server_info")), error)


_FIGURES = "output_throughput", "mean_ttft_ms", "mean_tpot_ms", "request_throughput", "p99_itl_ms"
_FIGURES += ("median_longest_gap_ms",)


def graph_summary(info: object) -> str:
    """The ratio of replays to eligible steps, fallbacks and repairs since the server's start, for decode and for
    prefill, if the server reports them."""
    states = info.get("internal_states") if isinstance(info, dict) else None
    state = states[0] if isinstance(states, list) and states else None
    counts = []
    for name in ("cuda_graphs", "piecewise_cuda_graphs"):
        graphs = state.get(name) if isinstance(state, dict) else None
        if isinstance(graphs, dict):
            lost = {**graphs.get("fallbacks", {}), **graphs.get("repairs", {})}
            counts.append(f"{graphs['replays']}/{graphs['eligible_steps']}" + (f" {lost}" if lost else ""))
    return ", ".join(counts)


def loads_of(shape: str) -> list[str]:
    """The loads that the model of ``shape`` can take."""
    return list(IMAGE_LOADS | LOADS if has_tower(shape) else LOADS)


def run_shape(shape: str, keys: Sequence[str], args: argparse.Namespace) -> Iterator[Row]:
    """Measure the loads of one shape on one server, or on a new one after the first has died."""
    model_dir = make_model_dir(shape, args.models)
    left = list(keys)
    while left:
        try:
            with BenchServer(model_dir, shlex.split(args.server_args), args.out / f"{shape}.server.log") as server:
                print(f"{shlex.join(server.command)}: ready after {server.start_s:.1f} s", flush=True)
                while left:
                    yield measure(server, shape, left[0], args)
                    left.pop(0)
        except ServerDied as error:
            yield Row(shape, left[0], str(ALL_LOADS[left[0]]), None, error=str(error))
            left.pop(0)


COLUMNS = ["shape", "load", "output tok/s", "SGLang", "ratio", "TTFT mean ms", "SGLang"]
COLUMNS += [
    "TPOT mean ms",
    "SGLang",
    "ratio",
    "requests/s",
    "ITL p99 ms",
    "longest gap, median ms",
    "goodput, requests/s",
]
COLUMNS.append("graph replays")
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def table_row(row: Row) -> str:
    """One row of the table. The ratios are ours to SGLang's for throughput and SGLang's to ours for TPOT, so above 1 is
    better."""
    if row.figures is None:
        return f"| {row.shape} | {row.what} | failed |"
    ours, theirs = row.figures, SGLANG.get((row.shape, row.load))
    if theirs is None:
        cells = [f"{ours.output_tok_s:,.0f}", "", "", f"{ours.ttft_ms:.1f}", "", f"{ours.tpot_ms:.2f}", "", ""]
    else:
        cells = [
            *(f"{ours.output_tok_s:,.0f}", f"{theirs.output_tok_s:,.0f}"),
            f"{ours.output_tok_s / theirs.output_tok_s:.2f}",
            *(f"{ours.ttft_ms:.1f}", f"{theirs.ttft_ms:g}"),
            *(f"{ours.tpot_ms:.2f}", f"{theirs.tpot_ms:g}", f"{theirs.tpot_ms / ours.tpot_ms:.2f}"),
        ]
    more = ours.requests_s, ours.itl_p99_ms, ours.gap_ms, ours.goodput_s
    cells += ["" if one is None else f"{one:.2f}" for one in more]
    return f"| {row.shape} | {row.what} | {' | '.join(cells)} | {row.graphs} |"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="all", choices=["all", *SHAPES], help="all: 0.6b and 8b")
    parser.add_argument("--load", nargs="+", choices=list(ALL_LOADS), help="requests at a time (default: all)")
    parser.add_argument("--server-args", default="", help="more flags for the server, as one word")
    parser.add_argument("--bench-args", default="", help="more flags for bench_serving, as one word")
    parser.add_argument("--out", type=Path, default=None, help="folder for logs and figures")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "fenceline-bench-models")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one load may take")
    parser.add_argument("--quick", action="store_true", help="an eighth of every length and number")
    parser.add_argument("--fewer", type=int, default=1, metavar="N", help="an N-th of the requests, one wave at least")
    parser.add_argument(
        "--goodput", nargs="+", default=[], help="search the highest rate within these limits, as in ttft:500 tpot:25"
    )
    args = parser.parse_args(argv)
    args.out = args.out or Path(tempfile.mkdtemp(prefix="fenceline-bench-"))
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 if a load failed."""
    args = parse(argv)
    shapes = ["0.6b", "8b"] if args.shape == "all" else [args.shape]
    rows: list[Row] = []
    for shape in shapes:
        for row in run_shape(shape, args.load or loads_of(shape), args):
            rows.append(row)  # the file is written at once, so that the row is kept if a later load fails
            print(table_row(row), *([row.error] if row.error else []), sep="\n", flush=True)
            (args.out / "result.json").write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")
    print("", HEADER, *[table_row(row) for row in rows], "", f"logs and figures: {args.out}", sep="\n")
    return 1 if any(row.error for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
