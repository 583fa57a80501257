"""Checks a soak's answers: each one is teacher-forced through a server with the same weights and no other load.

The answers were greedy, so each of their tokens had the largest logit of its step. The quiet server (without HiCache,
with memory for everything) computes prompt and answer as one prompt. Its logprobs of every token of the answer give

    gap    its largest logprob minus the token's: 0 if both chose the same token
    KL     of the soak's distribution over tokens from the quiet server's, over the alternatives that both returned

Neither is zero in bf16, because the same sums in other shapes are rounded differently. Calibration measures by how
much: conversations of the same lengths on the quiet server itself, 64 at a time, are scored in the same way. A sample
passes if its largest gap, mean gap and mean KL are at most twice the largest of the calibration. A second server, in
which every other prefix is loaded from the host with one page wrong (hicache_fault.py), shows what the check can
detect.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from bench_server import BenchServer, ServerDied
from hicache_client import Alternatives, Answer, Client, RequestFailed, flush, in_turns, table
from hicache_presets import PRESETS, Preset
from shapes import make_model_dir

_FAULTS = "none,zero,none,stale"
_SCORED_AT_ONCE = 4  # a batch size that differs from those in which the answers were made
_MARGIN = 2.0
# The bounds are at least one rounding step of a bf16 logit between 1 and 2, once in 32 tokens, even if the calibration
# finds no gap: in fp32 a few answers do not show how large rounding errors can be.
_LEAST_BOUND = {"largest gap": 2.0**-7, "mean gap": 2.0**-12, "mean KL": 1e-7}
_LEAST_SEEN = 0.9  # the share of wrong pages that must be detected
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer of the server under test."""

    prompt: list[int]
    output_ids: list[int]
    logprobs: list[float]
    top: list[Alternatives]
    tiers: dict[str, int]
    label: str

    @classmethod
    def empty(cls) -> Sample:
        """A sample whose answer has not come yet."""
        return cls([], [], [], [], {}, "")

    @classmethod
    def of(cls, prompt: list[int], answer: Answer, label: str) -> Sample:
        """The sample of an answer with logprobs."""
        return cls(prompt, answer.output_ids, answer.output_logprobs, answer.output_top, dict(answer.tiers), label)


@dataclass(frozen=True, slots=True)
class Score:
    """One sample compared with the quiet server. Natural logarithms."""

    label: str
    largest_gap: float
    mean_gap: float
    mean_kl: float
    mean_difference: float  # mean absolute difference of the tokens' own logprobs
    num_tokens: int
    num_host_tokens: int


Measure = Callable[[Score], float]
MEASURES: dict[str, Measure] = {
    "largest gap": lambda s: s.largest_gap,
    "mean gap": lambda s: s.mean_gap,
    "mean KL": lambda s: s.mean_kl,
}
_REPORTED: dict[str, Measure] = MEASURES | {"mean difference of logprobs": lambda s: s.mean_difference}


def divergence(p: Alternatives, q: Alternatives) -> float:
    """KL of p from q over the tokens that both list, with all others as one token: at most the KL of the whole."""
    others = {token: value for value, token in q}
    shared = [(value, others[token]) for value, token in p if token in others]
    rest_p = 1.0 - sum(math.exp(value) for value, _ in shared)
    rest_q = 1.0 - sum(math.exp(value) for _, value in shared)
    total = sum(math.exp(value) * (value - other) for value, other in shared)
    if rest_p > 1e-9 and rest_q > 1e-9:
        total += rest_p * math.log(rest_p / rest_q)
    return max(total, 0.0)


def score_of(sample: Sample, answer: Answer) -> Score:
    """``answer``: the quiet server's logprobs of the sample's tokens."""
    gaps = [
        max(0.0, max(value for value, _ in top) - chosen)
        for top, chosen in zip(answer.input_top, answer.input_logprobs, strict=True)
    ]
    kls = [divergence(p, q) for p, q in zip(sample.top, answer.input_top, strict=True)]
    differences = [abs(a - b) for a, b in zip(sample.logprobs, answer.input_logprobs, strict=True)]
    return Score(
        label=sample.label,
        largest_gap=max(gaps),
        mean_gap=statistics.fmean(gaps),
        mean_kl=statistics.fmean(kls),
        mean_difference=statistics.fmean(differences),
        num_tokens=len(gaps),
        num_host_tokens=sample.tiers.get("host", 0),
    )


async def score_all(url: str, samples: Sequence[Sample]) -> list[Score]:
    """Score every sample with the quiet server, beginning with an empty cache."""
    await asyncio.to_thread(flush, url)
    async with Client(url, timeout_s=600.0) as client:
        asked = [client.score(s.prompt + s.output_ids, len(s.prompt)) for s in samples]
        answers = await in_turns(asked, _SCORED_AT_ONCE)
    return [score_of(sample, answer) for sample, answer in zip(samples, answers, strict=True)]


def prompt_of(rng: random.Random, preset: Preset) -> list[int]:
    """A prompt of a length that occurs in the soak."""
    lengths = preset.lengths
    num = rng.randint(lengths.first[0], lengths.longest - lengths.message[1] - lengths.answer[1])
    return preset.ids(rng, num)


async def second_turns(client: Client, preset: Preset, prompts: Sequence[list[int]], at_once: int) -> list[Sample]:
    """Run conversations of two turns; the answers of the second turns are returned."""
    rng = random.Random(17)
    lengths = preset.lengths
    firsts = await in_turns([client.generate(p, lengths.answer[0]) for p in prompts], at_once)
    seconds = [
        prompt + first.output_ids + preset.ids(rng, lengths.message[0])
        for prompt, first in zip(prompts, firsts, strict=True)
    ]
    num = max(lengths.answer[0], 32)
    answers = await in_turns([client.generate(ids, num, logprobs=True) for ids in seconds], at_once)
    return [Sample.of(ids, answer, "quiet") for ids, answer in zip(seconds, answers, strict=True)]


async def calibrate(url: str, preset: Preset) -> list[Score]:
    """The effect of rounding alone: the quiet server's own answers, generated in large batches and scored in small
    ones."""
    rng = random.Random(11)
    prompts = [prompt_of(rng, preset) for _ in range(preset.num_calibrations)]
    async with Client(url, timeout_s=600.0) as client:
        samples = await second_turns(client, preset, prompts, preset.concurrency)
    return await score_all(url, samples)


async def controls(url: str, preset: Preset, log: Path) -> list[Sample]:
    """Send prompts that have been evicted to the host, one by one, to the server with planted faults. The samples'
    labels are the faults of their loads."""
    rng = random.Random(13)
    prompts = [prompt_of(rng, preset) for _ in range(preset.num_controls)]
    samples = []
    async with Client(url, timeout_s=600.0) as client:
        for prompt in prompts:
            await client.generate(prompt, 1)
        for prompt in prompts:
            before = len(_lines(log))
            ids = prompt + preset.ids(rng, preset.lengths.message[0])
            answer = await client.generate(ids, max(preset.lengths.answer[0], 32), logprobs=True)
            loads = [json.loads(line) for line in _lines(log)[before:]]
            if len(loads) == 1 and answer.tiers.get("host"):
                samples.append(Sample.of(ids, answer, str(loads[0]["kind"])))
    return samples


def _lines(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.is_file() else []


def bounds_of(calibration: Sequence[Score]) -> dict[str, float]:
    """The largest values allowed for a right answer."""
    return {
        name: max(_MARGIN * max(map(measure, calibration)), _LEAST_BOUND.get(name, 0.0))
        for name, measure in MEASURES.items()
    }


def passes(score: Score, bounds: Mapping[str, float]) -> bool:
    """Whether every measure is within its bound."""
    return all(measure(score) <= bounds[name] for name, measure in MEASURES.items())


def report(groups: Mapping[str, Sequence[Score]], bounds: Mapping[str, float]) -> str:
    """Two tables: the measures of each group, and how far answers from wrong pages are from right ones."""
    rows = []
    for name, measure in _REPORTED.items():
        for group, scores in groups.items():
            values = sorted(map(measure, scores)) or [math.nan]
            cells = [f"{v:.2e}" for v in (values[0], statistics.median(values), values[-1])]
            rows.append([name, group, len(scores), *cells, f"{bounds[name]:.2e}" if name in bounds else ""])
    text = table(["measure", "answers", "number", "least", "median", "most", "bound"], rows)
    right = [s for g, scores in groups.items() if g != "one page wrong" for s in scores]
    wrong = groups.get("one page wrong", ())
    if not wrong or not right:
        return text
    rows = [[name, *_separation(measure, right, wrong)] for name, measure in _REPORTED.items()]
    columns = ["measure", "least wrong / most right", "medians", "in standard deviations of the right"]
    return f"{text}\n\n{table(columns, rows)}"


def _separation(measure: Measure, right: Sequence[Score], wrong: Sequence[Score]) -> list[str]:
    good, bad = [*map(measure, right)], [*map(measure, wrong)]
    deviation = statistics.pstdev(good) or math.inf
    middle = statistics.median(good)
    distance = (statistics.median(bad) - statistics.fmean(good)) / deviation
    return [
        f"{min(bad) / max(good):.1f}" if max(good) else "inf",
        f"{statistics.median(bad) / middle:.0f}" if middle else "inf",
        f"{distance:.0f}",
    ]


def verdicts(groups: Mapping[str, Sequence[Score]], bounds: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """(results, failures), one line each."""
    said, missed = [], []
    for group, scores in groups.items():
        num_passed = sum(passes(score, bounds) for score in scores)
        said.append(f"{group}: {num_passed} of {len(scores)} pass")
        if group == "one page wrong":
            if num_passed > (1 - _LEAST_SEEN) * len(scores) or not scores:
                missed.append(f"{num_passed} of {len(scores)} answers from a wrong page pass the check")
        elif num_passed < len(scores) or not scores:
            failed = [score for score in scores if not passes(score, bounds)]
            missed.append(f"{group}: {len(failed)} of {len(scores)} fail, such as {failed[:3]}")
    return said, missed


def outcome(result: Mapping[str, Mapping[str, object]], scores: Sequence[Score], bounds: Mapping[str, float]) -> str:
    """A table with the counts of a run that must be zero, and with its answers. ``result``: its soak.json."""
    tally, state = result["tally"], result["settled"]
    graphs, hicache = state.get("cuda_graphs") or {}, state.get("hicache") or {}
    assert isinstance(graphs, dict) and isinstance(hicache, dict) and isinstance(tally["errors"], list)
    rows = [
        ("failed requests", len(tally["errors"])),
        ("fallbacks", sum(graphs.get("fallbacks", {}).values())),
        ("repairs", sum(graphs.get("repairs", {}).values())),
        ("locked nodes", hicache.get("num_locked_nodes", 0)),
        ("sampled answers verified", f"{sum(passes(s, bounds) for s in scores)} of {len(scores)}"),
    ]
    return table(["soak and verification", ""], rows)


def _wait_for_run(out: Path, timeout_s: float) -> list[Sample]:
    """The soak's samples, once it has ended. Raises RequestFailed."""
    end = time.monotonic() + timeout_s
    while not (out / "soak.json").is_file():
        if time.monotonic() > end:
            raise RequestFailed(f"{out}/soak.json is not there after {timeout_s:g} s: has the run been started?")
        time.sleep(_POLL_S)
    file = out / "samples.json"
    if not file.is_file():
        raise RequestFailed(f"{file} is not there: the run failed, see {out}/soak.json")
    return [Sample(**fields) for fields in json.loads(file.read_text())]


def measure_groups(args: argparse.Namespace, preset: Preset) -> dict[str, list[Score]]:
    """Start both servers, score everything. Raises ServerDied or RequestFailed."""
    model = make_model_dir(preset.shape, args.models)
    fault_log = args.out / "faults.jsonl"
    fault_log.unlink(missing_ok=True)
    launcher = (str(Path(__file__).parent / "hicache_fault.py"), "--faults", _FAULTS, "--fault-log", str(fault_log))
    plants_faults = preset.num_controls > 0 and not args.without_hicache
    fault_flags = [*preset.model, *preset.fault, *preset.fault_tiers()]
    servers = [
        BenchServer(model, [*preset.model, *preset.quiet], args.out / "quiet.server.log"),
        BenchServer(model, fault_flags, args.out / "fault.server.log", launcher=launcher),
    ]
    if not plants_faults:
        servers.pop()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        entered = [pool.submit(server.__enter__) for server in servers]
        for server in servers:
            stack.callback(server.stop)
        for future in entered:
            future.result()
        quiet = servers[0].url
        groups = {"calibration": asyncio.run(calibrate(quiet, preset))}
        planted: list[Sample] = []
        if plants_faults:
            planted = asyncio.run(controls(servers[1].url, preset, fault_log))
            servers[1].stop()
        print(f"calibrated; {len(planted)} controls; waiting for the run's end", flush=True)
        samples = _wait_for_run(args.out, args.wait)
        found = asyncio.run(score_all(quiet, [*samples, *planted]))
    groups["soak"] = found[: len(samples)]
    if plants_faults:
        groups["host hits, every page right"] = [s for s in found[len(samples) :] if s.label == "none"]
        groups["one page wrong"] = [s for s in found[len(samples) :] if s.label != "none"]
    return groups


def verify(args: argparse.Namespace) -> int:
    """``hicache_soak.py verify``: the exit code. The last table is that of the run and of its answers."""
    preset = PRESETS[args.preset]
    try:
        groups = measure_groups(args, preset)
    except (ServerDied, RequestFailed) as error:
        print(f"FAILED: {error}")
        return 1
    bounds = bounds_of(groups["calibration"])
    said, missed = verdicts(groups, bounds)
    with_host = sum(bool(score.num_host_tokens) for score in groups["soak"])
    tokens = sum(score.num_tokens for score in groups["soak"])
    said.append(f"soak: {tokens} tokens checked, {with_host} of the answers after a prefix from the host")
    scores = {group: [asdict(score) for score in found] for group, found in groups.items()}
    (args.out / "verify.json").write_text(json.dumps({"bounds": bounds, "said": said, "missed": missed} | scores))
    print("", report(groups, bounds), "", *said, sep="\n")
    print("", outcome(json.loads((args.out / "soak.json").read_text()), groups["soak"], bounds), "", sep="\n")
    for line in missed:
        print(f"FAILED: {line}")
    return 1 if missed else 0
