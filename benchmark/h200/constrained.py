"""The cost of a JSON schema on one H200: throughput and time to first token of constrained and free answers, in turns.

    python benchmark/h200/constrained.py --shape 0.6b 8b          # 64 at a time, then one at a time; four rounds
    python benchmark/h200/constrained.py --shape tiny --quick     # on any machine: whether it works at all

One server with dummy weights answers both kinds of requests, which run.py's client sends. All answers have the same
length: a free answer goes on to its limit, and the schema is a list with more records than fit, so that a constrained
answer cannot end before. Every second round begins with the other side. The schema has been seen before, so its
compilation is not measured. The aims are at least 0.95 of the free throughput with 64 requests at a time, and a first
token that is at most 10 ms later with one request at a time.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from bench_server import BenchServer, ServerDied
from run import Load, bench, graph_summary
from shapes import SHAPES, make_model_dir, make_tokenizer, num_plain_tokens

from fenceline.constrained.compile import compile_grammar, make_vocabulary
from fenceline.constrained.spec import GrammarSpec

SIDES = ("free", "schema")
LOADS = {"64": Load(128, 256, 64, 256), "1": Load(128, 32, 1, 24)}


def schema(num_tokens: int) -> dict[str, object]:
    """A schema whose answers have at least ``num_tokens`` tokens: each record takes at least eight."""
    record = {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 0, "maximum": 99999},
            "name": {"type": "string", "maxLength": 24},
            "kind": {"enum": ["created", "changed", "deleted"]},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,8}$"}, "maxItems": 4},
            "parent": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
        },
        "required": ["id", "name", "kind", "tags", "parent"],
        "additionalProperties": False,
    }
    place = {
        "type": "object",
        "properties": {"line": {"type": "integer"}, "exact": {"type": "boolean"}},
        "required": ["line", "exact"],
        "additionalProperties": False,
    }
    num = num_tokens // 8 + 1
    return {"type": "array", "items": record, "minItems": num, "maxItems": 2 * num, "$defs": {"place": place}}


@dataclass(frozen=True, slots=True)
class CompiledSchema:
    """:func:`schema` compiled for a vocabulary, both serialised, as the front end sends them to the scheduler."""

    vocabulary: bytes
    data: bytes
    eos_token_id: int

    @staticmethod
    def make(num_tokens: int, vocab_size: int) -> CompiledSchema:
        """For the tokenizer of ``make_tokenizer``; takes about ten seconds."""
        tokenizer = make_tokenizer()
        special = [index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special]
        eos = tokenizer.token_to_id("<|im_end|>")
        vocabulary = make_vocabulary(tokenizer.to_str(), special, vocab_size, [eos])
        spec = GrammarSpec("json_schema", json.dumps(schema(num_tokens)))
        data = compile_grammar(vocabulary, spec, max_whitespace=20)
        return CompiledSchema(vocabulary.serialize_json().encode(), data, eos)


@dataclass(frozen=True, slots=True)
class Run:
    """One side of one round: output tokens per second, and milliseconds."""

    shape: str
    load: str
    side: str
    round: int
    output_tok_s: float
    mean_ttft_ms: float
    median_ttft_ms: float
    mean_tpot_ms: float
    p99_itl_ms: float
    output_tokens: int
    graphs: str


def run_once(server: BenchServer, shape: str, key: str, side: str, round_: int, args: argparse.Namespace) -> Run:
    """Measure one run. Raises ServerDied, or RuntimeError if a request failed."""
    load = LOADS[key].eighth() if args.quick else LOADS[key]
    extra = []
    if side == "schema":
        body = {"sampling_params": {"json_schema": json.dumps(schema(load.output_len))}}
        extra = ["--extra-request-body", json.dumps(body)]
    name = f"{shape}-{key}-{side}-{round_}"
    result = bench(
        server, load, num_plain_tokens(shape), args.out, name, args.seed + max(round_, 0), args.timeout, extra
    )
    num_tokens = int(str(result["total_output_tokens"]))
    if result["failed"] or num_tokens != load.num_prompts * load.output_len:
        raise RuntimeError(f"{name}: {result['failed']} failed, {num_tokens} tokens: see {args.out}")
    names = ("output_throughput", "mean_ttft_ms", "median_ttft_ms", "mean_tpot_ms", "p99_itl_ms")
    figures = [float(str(result[name])) for name in names]
    return Run(shape, key, side, round_, *figures, num_tokens, graph_summary(result.get("server_info")))


def check(server: BenchServer) -> None:
    """Raise RuntimeError if the schema makes no difference to an answer."""
    texts = []
    for extra in ({}, {"json_schema": json.dumps(schema(64))}):
        params = {"max_new_tokens": 64, "ignore_eos": True, "temperature": 0} | extra
        body = json.dumps({"text": "Once", "sampling_params": params}).encode()
        request = urllib.request.Request(f"{server.url}/generate", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            texts.append(json.load(answer)["text"].lstrip())
    if not texts[1].startswith("[") or texts[0].startswith("["):
        raise RuntimeError(f"free and constrained answers begin {texts[0][:40]!r}, {texts[1][:40]!r}")


def run_shape(shape: str, args: argparse.Namespace) -> list[Run]:
    """All rounds of one shape. Raises ServerDied and RuntimeError."""
    runs = []
    flags = shlex.split(args.server_args)
    with BenchServer(make_model_dir(shape, args.models), flags, args.out / f"{shape}.server.log") as server:
        print(f"{shlex.join(server.command)}: ready after {server.start_s:.1f} s", flush=True)
        check(server)
        for key in args.load:
            for round_ in range(-1, args.rounds):  # the first round is a warm-up
                for side in SIDES if round_ % 2 == 0 else SIDES[::-1]:
                    run = run_once(server, shape, key, side, round_, args)
                    print(run, flush=True)
                    runs += [run] if round_ >= 0 else []
    return runs


HEADER = "| shape | load | tok/s free | schema | ratio, median (least) | TTFT ms free | schema | later by"
HEADER += " | TPOT ms free | schema | p99 ITL ms free | schema |"


def table_row(runs: Sequence[Run]) -> str:
    """One row of the table: medians over the rounds of one load. The ratio is that of the two sides of a round."""
    sides = [[run for run in runs if run.side == side] for side in SIDES]
    ratios = [two.output_tok_s / one.output_tok_s for one, two in zip(*sides, strict=True)]

    def both(name: str, digits: int) -> list[str]:
        return [f"{median(getattr(run, name) for run in side):,.{digits}f}" for side in sides]

    later = median(two.median_ttft_ms - one.median_ttft_ms for one, two in zip(*sides, strict=True))
    cells = [
        *(runs[0].shape, f"{runs[0].load} at a time"),
        *(*both("output_tok_s", 0), f"{median(ratios):.3f} ({min(ratios):.3f})"),
        *(*both("median_ttft_ms", 2), f"{later:.2f}"),
        *(*both("mean_tpot_ms", 3), *both("p99_itl_ms", 2)),
    ]
    return f"| {' | '.join(cells)} |"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["0.6b", "8b"], choices=list(SHAPES))
    parser.add_argument("--load", nargs="+", default=list(LOADS), choices=list(LOADS), help="requests at a time")
    parser.add_argument("--rounds", type=int, default=4, help="runs of each load on each side")
    parser.add_argument("--server-args", default="", help="more flags for the server, as one word")
    parser.add_argument("--out", type=Path, default=None, help="folder for logs and figures")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "fenceline-bench-models")
    parser.add_argument("--seed", type=int, default=1, help="of the first round's load; the next ones count on")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one run may take")
    parser.add_argument("--quick", action="store_true", help="an eighth of every length and number")
    args = parser.parse_args(argv)
    args.out = args.out or Path(tempfile.mkdtemp(prefix="fenceline-constrained-"))
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 if a run failed."""
    args = parse(argv)
    runs: list[Run] = []
    table, failed = [], False
    for shape in args.shape:
        try:
            made = run_shape(shape, args)
        except (ServerDied, RuntimeError) as error:
            print(f"{shape}: {error}", flush=True)
            failed = True
            continue
        runs += made
        table += [table_row([run for run in made if run.load == key]) for key in args.load]
        (args.out / "result.json").write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")
    print("", HEADER, "|---" * 12 + "|", *table, "", f"logs and figures: {args.out}", sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
