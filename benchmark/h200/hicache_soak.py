"""The public reproduction of sglang#20611 as a bounded soak, and the check that its answers are right.

    python benchmark/h200/hicache_soak.py run --minutes 10 --out DIR     # server and load; writes DIR/soak.json
    python benchmark/h200/hicache_soak.py verify --out DIR               # waits for it; quiet server, planted faults
    python benchmark/h200/hicache_soak.py run --preset cpu --minutes 0.2 --out DIR    # any machine: whether it works
    python benchmark/h200/hicache_soak.py both --preset demo --minutes 0.5 --out DIR  # both at once, speculating

The load: conversations of several turns, 64 at a time, from a population that does not fit the device and hardly fits
the host. A conversation that comes back finds its prefix on the device, on the host, or nowhere. Everything is backed
up (write_through) and evicted all the time, with the kernel io backend, together with FlashInfer's persistent fa3
prefill. The run has passed if no request failed, no decode step fell back from its graph, nothing had to be repaired,
every window of the run had an eviction, and no node is locked at the end. verify: see hicache_verify.py.

The presets demo and demo-cpu serve the demo model with its EAGLE-3 head and a third tier in files, from which prefixes
must come back too; the server that verifies decodes without drafts. --server-args "--hicache-io-backend direct" is the
same with the copy engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench_server import BenchServer, ServerDied
from hicache_client import Answer, Client, RequestFailed, flush, server_state, table, words
from hicache_presets import PRESETS, Lengths, Preset
from hicache_verify import Sample, verify
from shapes import make_model_dir

_WINDOW_S = 5.0
_MOST_ERRORS = 20  # after this many the run ends early
_LONGEST_ABORT_S = 0.1


@dataclass(slots=True)
class Conversation:
    """A conversation; ``ids`` are all its tokens so far."""

    ids: list[int]
    num_turns: int = 0


@dataclass(slots=True)
class Tally:
    """The client's counts."""

    num_visits: int = 0
    num_turns: int = 0
    num_aborted: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


class Load:
    """Conversations in turns against one server until ``end`` (time.monotonic)."""

    def __init__(self, client: Client, preset: Preset, args: argparse.Namespace) -> None:
        self.tally = Tally()
        self.samples: list[Sample] = []
        self._client = client
        self._lengths: Lengths = preset.lengths
        self._preset = preset
        self._rng = random.Random(args.seed)
        self._abort_share: float = args.abort_share
        self._resting: list[Conversation] = []
        self._begin = time.monotonic()
        self._end = self._begin + args.minutes * 60
        self._sample_every_s = args.minutes * 60 / args.samples

    @property
    def over(self) -> bool:
        """Whether the time is over, so that no further turn begins."""
        return time.monotonic() >= self._end or len(self.tally.errors) >= _MOST_ERRORS

    async def run(self) -> None:
        """Run all workers until the end."""
        await asyncio.gather(*(self._work() for _ in range(self._preset.concurrency)))

    async def _work(self) -> None:
        while not self.over:
            conversation = self._next_conversation()
            self.tally.num_visits += 1
            for _ in range(self._rng.randint(1, 4)):
                if self.over or not await self._turn(conversation):
                    break
            else:
                self._resting.append(conversation)

    def _next_conversation(self) -> Conversation:
        """A conversation that is not running: half of the time the one that has waited longest. While there are few, a
        new one."""
        if len(self._resting) + self._preset.concurrency < self._preset.population:
            return Conversation(self._preset.ids(self._rng, self._draw(self._lengths.first)))
        index = 0 if self._rng.random() < 0.5 else self._rng.randrange(len(self._resting))
        return self._resting.pop(index)

    async def _turn(self, conversation: Conversation) -> bool:
        """One message and its answer. False if the conversation has ended."""
        message = self._preset.ids(self._rng, self._draw(self._lengths.message))
        num_tokens = self._draw(self._lengths.answer)
        prompt = conversation.ids + message
        if len(prompt) + num_tokens > self._lengths.longest:
            return False
        elapsed = time.monotonic() - self._begin
        sampled = len(self.samples) * self._sample_every_s <= elapsed
        if sampled:  # counted before the answer has come, so that not all requests of one wave are samples
            self.samples.append(Sample.empty())
            place = len(self.samples) - 1
        try:
            answer = await self._ask(prompt, num_tokens, sampled)
        except RequestFailed as error:
            self.tally.errors.append(f"after {elapsed:.1f} s: {error}")
            return False
        if answer is None:
            return True
        if sampled:
            self.samples[place] = Sample.of(prompt, answer, f"{elapsed:.1f} s, turn {conversation.num_turns}")
        self._count(prompt, answer)
        conversation.ids, conversation.num_turns = prompt + answer.output_ids, conversation.num_turns + 1
        return True

    async def _ask(self, prompt: list[int], num_tokens: int, sampled: bool) -> Answer | None:
        """The answer; None if the client has aborted the request, as real clients sometimes do."""
        if sampled or self._rng.random() >= self._abort_share:
            return await self._client.generate(prompt, num_tokens, logprobs=sampled)
        limit_s = self._rng.random() * _LONGEST_ABORT_S
        try:
            return await asyncio.wait_for(self._client.generate(prompt, num_tokens), limit_s)
        except TimeoutError:
            self.tally.num_aborted += 1
            return None

    def _count(self, prompt: list[int], answer: Answer) -> None:
        self.tally.num_turns += 1
        self.tally.num_prompt_tokens += len(prompt)
        self.tally.num_output_tokens += len(answer.output_ids)
        for tier, num in answer.tiers.items():
            self.tally.hit_tokens[tier] = self.tally.hit_tokens.get(tier, 0) + num

    def _draw(self, limits: tuple[int, int]) -> int:
        return self._rng.randint(*limits)


async def run_load(server: BenchServer, preset: Preset, args: argparse.Namespace) -> dict[str, object]:
    """Run the load while recording the server's state; then the server's state when nothing runs."""
    windows: list[dict[str, object]] = []
    async with Client(server.url) as client:
        load = Load(client, preset, args)
        watcher = asyncio.create_task(_watch(server, load, windows, args.out))
        try:
            await load.run()
        finally:
            watcher.cancel()
    seconds = time.monotonic() - load._begin
    server.raise_if_dead()
    settled = await _settle(server.url)
    samples = [s for s in load.samples if s.output_ids]
    (args.out / "samples.json").write_text(json.dumps([asdict(s) for s in samples]))
    return {
        "seconds": seconds,
        "tally": asdict(load.tally),
        "waves": load.tally.num_visits / preset.concurrency,
        "num_samples": len(samples),
        "windows": windows,
        "settled": settled,
        "log_errors": _log_errors(args.out / "soak.server.log"),
    }


async def _watch(server: BenchServer, load: Load, windows: list[dict[str, object]], out: Path) -> None:
    """Record the server's state every few seconds, and write it to progress.json."""
    while True:
        await asyncio.sleep(_WINDOW_S)
        try:
            state = await asyncio.to_thread(server_state, server.url)
        except RequestFailed as error:
            state = {"error": str(error)}
        seconds = round(time.monotonic() - load._begin, 1)
        tally = load.tally
        windows.append({"seconds": seconds, "turns": tally.num_turns, "state": state})
        line = {"seconds": seconds, "turns": tally.num_turns, "errors": tally.errors[:3], "alive": server.alive}
        (out / "progress.json").write_text(json.dumps(line | {"hits": tally.hit_tokens, "state": state}))


async def _settle(url: str, timeout_s: float = 30.0) -> dict[str, object]:
    """The state once nothing runs and no node is locked, or after ``timeout_s``; then the cache is flushed."""
    end = time.monotonic() + timeout_s
    while True:
        state = await asyncio.to_thread(server_state, url)
        hicache = state.get("hicache")
        locked = hicache["num_locked_nodes"] if isinstance(hicache, dict) else 0
        if time.monotonic() > end or not (state["num_running_reqs"] or state["num_queue_reqs"] or locked):
            break
        await asyncio.sleep(0.2)
    try:
        await asyncio.to_thread(flush, url)
        return state | {"flushed": True}
    except RequestFailed as error:
        return state | {"flushed": str(error)}


def _log_errors(log: Path) -> list[str]:
    marks = ("ERROR", "Traceback", "CUDA error", "illegal")
    return [line for line in log.read_text(errors="replace").splitlines() if any(m in line for m in marks)]


def num_still_windows(windows: Sequence[Mapping[str, object]]) -> int:
    """Windows without an eviction from the device, after the first with one."""
    evicted = [_number(w["state"], "hicache", "evicted_tokens", "device") for w in windows]
    begun = [value for value in evicted if value]
    return sum(later <= earlier for earlier, later in zip(begun, begun[1:], strict=False))


def _number(value: object, *keys: str) -> float:
    for key in keys:
        value = value.get(key, 0) if isinstance(value, Mapping) else 0
    return float(value) if isinstance(value, (int, float)) else 0.0


def failures(result: Mapping[str, object], flags: Sequence[str]) -> list[str]:
    """The failures of the run, one line each. ``flags``: those of the server, which say what must have happened."""
    tiers, stores, speculates = (
        any(flag.partition("=")[0] == name for flag in flags)
        for name in ("--enable-hierarchical-cache", "--hicache-storage-backend", "--speculative-algorithm")
    )
    state, tally, windows = result["settled"], result["tally"], result["windows"]
    assert isinstance(state, dict) and isinstance(tally, dict) and isinstance(windows, list)
    graphs = state.get("cuda_graphs") or {}
    found = [f"request failed: {line}" for line in tally["errors"]]
    found += [f"fallback: {k} {v}" for k, v in graphs.get("fallbacks", {}).items()]
    found += [f"repair: {k} {v}" for k, v in graphs.get("repairs", {}).items()]
    found += [f"the server's log: {line[:200]}" for line in result["log_errors"][:5]]  # type: ignore[index]
    if state["flushed"] is not True:
        found.append(f"the cache could not be flushed: {state['flushed']}")
    if speculates and not _number(state, "avg_spec_accept_length") > 1.0:
        found.append("no draft was ever accepted")
    if not tiers:
        return found
    still, locked = num_still_windows(windows), _number(state, "hicache", "num_locked_nodes")
    if locked:
        found.append(f"{locked:.0f} nodes are locked although nothing runs")
    if still or not _number(state, "hicache", "evicted_tokens", "device"):
        found.append(f"eviction stopped in {still} of {len(windows)} windows: make the pool smaller")
    found += [
        f"no prefix came back from the {tier}: make the population larger"
        for tier in ("host", *(["storage"] if stores else []))
        if not tally["hit_tokens"].get(tier)
    ]
    return found


def report(result: Mapping[str, object]) -> str:
    """The run as a table."""
    tally, state, seconds = result["tally"], result["settled"], result["seconds"]
    assert isinstance(tally, dict) and isinstance(state, dict) and isinstance(seconds, float)
    hicache, graphs = state.get("hicache") or {}, state.get("cuda_graphs") or {}
    turns = tally["num_turns"]
    rows: list[tuple[str, object]] = [
        ("duration", f"{seconds:.0f} s"),
        ("waves of conversations, turns", f"{result['waves']:.0f}, {turns:,} ({turns / seconds:.1f}/s)"),
        ("failed, aborted by the client", f"{len(tally['errors'])}, {tally['num_aborted']:,}"),
        ("prompt, output tokens", f"{tally['num_prompt_tokens']:,}, {tally['num_output_tokens']:,}"),
        ("hit tokens by tier", ", ".join(f"{k} {v:,}" for k, v in tally["hit_tokens"].items())),
        ("pool, host tier (tokens)", f"{state['max_total_num_tokens']:,}, {hicache.get('num_host_tokens', 0):,}"),
        ("evicted tokens", ", ".join(f"{k} {v:,}" for k, v in hicache.get("evicted_tokens", {}).items())),
        ("loads", _transfers(hicache.get("load"), seconds)),
        ("stores", _transfers(hicache.get("store"), seconds)),
        ("storage: read", _transfers(hicache.get("storage_read"), seconds)),
        ("storage: written", _transfers(hicache.get("storage_write"), seconds)),
        ("prefetches", ", ".join(f"{k} {v:,}" for k, v in hicache.get("prefetches", {}).items()) or "none"),
        ("mean accept length", f"{state.get('avg_spec_accept_length') or 1.0:.3f}"),
        ("graph replays of eligible steps", f"{graphs.get('replays', 0):,} of {graphs.get('eligible_steps', 0):,}"),
        ("fallbacks, repairs", f"{graphs.get('fallbacks') or 'none'}, {graphs.get('repairs') or 'none'}"),
        ("retractions, recomputed as stale", f"{state['num_retractions']}, {hicache.get('recomputes') or 'none'}"),
        ("nodes locked afterwards, flushed", f"{hicache.get('num_locked_nodes', 0)}, {state['flushed']}"),
    ]
    return table(["soak", ""], rows)


def _transfers(state: Mapping[str, float] | None, seconds: float) -> str:
    if not state:
        return "none"
    num, size, busy = state["num_transfers"], state["num_bytes"], state["seconds"]
    rate = f", {size / busy / 1e9:.1f} GB/s while they ran" if busy else ""
    return f"{num:,.0f}, {size / 1e9:,.1f} GB ({size / seconds / 1e9:.2f} GB/s over the run{rate})"


def run(args: argparse.Namespace) -> int:
    """``run``: the exit code."""
    with tempfile.TemporaryDirectory(prefix="pages-", dir=args.out) as storage_dir:
        return _run(args, storage_dir)


def _run(args: argparse.Namespace, storage_dir: str) -> int:
    preset = PRESETS[args.preset]
    flags = [
        *preset.model,
        *preset.speculation,
        *preset.tight,
        *([] if args.without_hicache else preset.soak_tiers(storage_dir)),
        *words(args.server_args),
    ]
    model = make_model_dir(preset.shape, args.models)
    (args.out / "soak.json").unlink(missing_ok=True)
    (args.out / "soak.server.log").unlink(missing_ok=True)
    result: dict[str, object] = {}
    try:
        with BenchServer(model, flags, args.out / "soak.server.log") as server:
            print(f"{' '.join(server.command[1:])}: ready after {server.start_s:.1f} s", flush=True)
            result = asyncio.run(run_load(server, preset, args))
            result["command"] = server.command
        found = failures(result, flags)
    except (ServerDied, RequestFailed) as error:
        found = [str(error)]
    if "tally" in result:
        print("", report(result), "", sep="\n")
    for line in found:
        print(f"FAILED: {line}")
    partial = args.out / "soak.json.new"
    partial.write_text(json.dumps(result | {"failures": found}))
    partial.rename(args.out / "soak.json")  # verify waits for it
    return 1 if found else 0


def both(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """``both``: the exit code. The servers that verify start and are calibrated while the load runs, and have --wait
    seconds when it has ended."""
    (args.out / "soak.json").unlink(missing_ok=True)  # of an earlier run
    log = args.out / "verify.log"
    with log.open("w") as file:
        command = [sys.executable, __file__, "verify", *argv, "--wait", "inf"]  # the load's end is known here
        verifying = subprocess.Popen(command, stdout=file)
        try:
            failed = run(args)
            failed = max(failed, verifying.wait(args.wait))
        except subprocess.TimeoutExpired:
            print(f"FAILED: the answers were not verified within {args.wait:g} s")
            failed = 1
        finally:
            verifying.terminate()
            verifying.wait()
    print(log.read_text())
    return failed


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "verify", "both"))
    parser.add_argument("--out", type=Path, required=True, help="folder for logs, samples and figures")
    parser.add_argument("--preset", choices=list(PRESETS), default="h200")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the load lasts")
    parser.add_argument("--samples", type=int, default=256, help="answers to be checked, spread over the run")
    parser.add_argument("--abort-share", type=float, default=0.01, help="requests that the client gives up")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--server-args", default="", help="more flags for the soak's server, as one word")
    parser.add_argument("--without-hicache", action="store_true", help="the same load on the plain prefix cache")
    parser.add_argument(
        "--wait", type=float, default=900.0, help="seconds: verify waits for the run's end, both for verify's"
    )
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "fenceline-bench-models")
    args = parser.parse_args(argv)
    if args.minutes <= 0 or args.samples < 1 or not 0 <= args.abort_share < 1:
        parser.error("--minutes must be above 0, --samples at least 1, --abort-share in [0, 1)")
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 if there was no failure."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parse(argv)
    if args.what == "both":
        argv.remove("both")
        return both(args, argv)
    return run(args) if args.what == "run" else verify(args)


if __name__ == "__main__":
    sys.exit(main())
