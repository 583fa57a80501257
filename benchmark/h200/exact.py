"""The witness: a request's answer is the same bits alone and in any company, with everything on.

    python benchmark/h200/exact.py run --out DIR --model demo --device cpu --seconds 600        # a piece
    python benchmark/h200/exact.py run --out DIR --model 0.6b --configs eagle3_tree everything --jitter 7
    python benchmark/h200/exact.py sum DIR                                                      # all pieces
    python benchmark/h200/exact.py severed --out DIR --lanes 32 --gpus 0 1 2 3                  # the witness itself

A pool of requests of every kind is answered once by a quiet server that has nothing else to do and shares no prefix:
the reference. Then servers with graphs, tiers, drafts, retractions and so on answer them again and again in random
company, while other clients leave, requests are aborted, the server pauses, its cache is flushed and its weights are
loaded again. Token ids and the bits of every logprob are compared with the reference's. A difference is reported with
request, position, step and the server's flight record.

``run`` adds a line of JSON for each configuration to DIR/pieces.jsonl, and keeps the reference in DIR, so that the next
piece goes on from there. ``sum`` prints their counts together. Both return 1 if an answer differed, a request failed,
a step fell back from its graph or was repaired. What is part of a model's identity (``--tp-size``, ``--quantization``,
...) goes into --identity, which the quiet server gets too. --jitter and --sever: see disturbed.py.

``severed`` makes a piece of each edge and guard without it, and a table of what each shows: bits that differ, errors
or nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import math
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from bench_server import BenchServer, ServerDied
from hicache_client import RequestFailed, table
from shapes import SHAPES, kv_bytes_per_token, make_model_dir, num_plain_tokens
from tokenizers import Tokenizer

from fenceline.config.model_files import DEMOS
from fenceline.memory_order.edges import EDGE_PARTS, EDGES, GUARDS
from fenceline_demo.corpus import encode_document
from fenceline_demo.documents import short_document
from fenceline_demo.tokenizer import FastEncoder

Json = dict[str, Any]
_SEED = 7  # of the servers: of dummy weights, and of seeds that requests do not give
_ANSWER = 48  # most tokens of an answer
_MOST_ERRORS = 20  # after as many, or as many different answers, a configuration ends early
_TIMEOUT_S = 300.0
_FLUSH = f"/flush_cache?timeout={_TIMEOUT_S - 10:g}"  # a busy CPU takes minutes for what is pending
_HANGS_S = {"cuda": 20.0, "cpu": _TIMEOUT_S}  # after as long past its end a severed piece is ended
_LEAST_S = 5.0  # of a configuration, however long the server's start has taken


# The pool


def make_pool(num: int, longest: int, ids: Callable[[random.Random, int], list[int]], vocab: int) -> list[Json]:
    """``num`` bodies of /generate, always the same. Prompts have 1 to ``longest`` tokens, short ones more often; two of
    three begin like others. Every kind of request is met with every kind of sampling. ``ids`` makes a prompt."""
    rng = random.Random(41)

    def length(most: int) -> int:
        return round(math.exp(rng.uniform(0, math.log(most))))

    trunks = [ids(rng, longest)] + [ids(rng, length(longest)) for _ in range(max(num // 12, 2))]
    sampled = {"temperature": 0.9}
    ways: Sequence[Json] = (
        {"temperature": 0}, sampled, sampled | {"top_p": 0.8, "top_k": 40}, sampled | {"min_p": 0.05, "top_p": 0.95},
        {"temperature": 0, "frequency_penalty": 0.6, "presence_penalty": 0.3}, sampled | {"repetition_penalty": 1.2},
        sampled | {"logit_bias": {str(token): 4.0 - token % 9 for token in range(1, min(vocab, 200), 7)}},
    )  # fmt: skip
    kinds: Sequence[Json] = (
        {}, {"ignore_eos": True}, {"stop": ["\n", "e a"]}, {"n": 3}, {"stop_token_ids": [19, 20], "min_new_tokens": 5},
        {"regex": "[a-z]{2,9}( [0-9]{1,4}){1,5}"}, {"ebnf": 'root ::= ("yes" | "no") (" " root)?'},
        {"json_schema": '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'},
    )  # fmt: skip
    told: Sequence[Json] = ({}, {"top_logprobs_num": 5}, {"token_ids_logprob": [3, 9, 70]}, {"logprob_start_len": 0})
    pool: list[Json] = []
    for number in range(num):
        prompt = ids(rng, length(longest))
        if number % 3:
            trunk = trunks[number // 12 % len(trunks)]
            prompt = (trunk[: rng.randint(1, len(trunk))] + prompt[: length(64)])[:longest]
        params = {"max_new_tokens": rng.randint(5, _ANSWER), "seed": number, **ways[number % len(ways)]}
        body = {"input_ids": prompt, "sampling_params": params | kinds[number % len(kinds)], "return_logprob": True}
        logprobs = told[number // 8 % len(told)]
        if "logprob_start_len" in logprobs:
            logprobs = {"logprob_start_len": rng.randrange(len(prompt)), "top_logprobs_num": number % 3}
        pool.append(body | logprobs)
    return pool


def prompt_maker(model: str, folder: Path) -> Callable[[random.Random, int], list[int]]:
    """Text of its corpus for a demo model, so that drafts are accepted; random ids for dummy weights."""
    if model not in DEMOS:
        vocab = num_plain_tokens(model)
        return lambda rng, num: rng.choices(range(vocab), k=num)
    encoder = FastEncoder(Tokenizer.from_file(str(folder / "tokenizer.json")))

    def ids(rng: random.Random, num: int) -> list[int]:
        made: list[int] = []
        while len(made) < num:
            made += encode_document(short_document(rng), encoder)[0]
        return made[:num]

    return ids


# Comparison


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of an answer. ``position`` is a token's in its sequence, ``step`` its number in the answer,
    negative in the prompt. ``expected`` and ``got`` are values as text, floats with their bits."""

    request: int
    sample: int
    position: int
    step: int
    what: str
    expected: str
    got: str


def _track(ask: Json, answer: Json, whole: bool) -> Iterator[tuple[int, str, object]]:
    """(step, name, value) of everything that must be the same, in the order of positions."""
    meta, start = answer["meta_info"], ask.get("logprob_start_len", 0) - len(ask["input_ids"])
    for side in ("input", "output"):
        lists = {key: meta[f"{side}_{key}"] for key in _LOGPROBS if f"{side}_{key}" in meta}
        for index in range(max(map(len, lists.values()), default=0)):
            step = start + index if side == "input" else index
            for name, entries in lists.items():
                values = entries[index] if index < len(entries) else None
                yield from ((step, f"{side}_{name}", value) for value in _plain(name, values))
    yield from ((step, "output_ids", token) for step, token in enumerate(answer["output_ids"]))
    if whole:
        end = len(answer["output_ids"])
        yield end, "text", answer.get("text")
        yield end, "finish_reason", meta["finish_reason"]


_LOGPROBS = ("token_logprobs", "top_logprobs", "token_ids_logprobs")


def _plain(name: str, entry: Any) -> list[object]:
    """The numbers of one position."""
    if name == "token_logprobs" or not entry:
        return [entry and entry[0], entry and entry[1]]
    return [number for value, token, _ in entry for number in (value, token)]


def _bits(value: object) -> int | None:
    """The bits of a float32 (JSON has all of its digits) or of an integer; None for anything else."""
    if isinstance(value, float):
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    return value if isinstance(value, int) else None


def compare(request: int, ask: Json, expected: Sequence[Json], got: Sequence[Json]) -> tuple[int, Difference | None]:
    """How many bits differ, and the first difference. Of an answer that was aborted what there is is compared."""
    if len(expected) != len(got):
        counts = str(len(expected)), str(len(got))
        return 1, Difference(request, 0, len(ask["input_ids"]), 0, "number of samples", *counts)
    bits, first = 0, None
    if orjson.dumps(expected) == orjson.dumps(_kept(got)):  # as nearly always, and faster
        return bits, first
    for sample, (left, right) in enumerate(zip(expected, got, strict=True)):
        aborted = right["meta_info"]["finish_reason"]["type"] == "abort"
        left = _cut(left, right) if aborted else left
        tracks = [[*_track(ask, answer, not aborted)] for answer in (left, right)]
        for one, other in zip(*tracks, strict=False):
            if one == other and type(one[2]) is type(other[2]):
                continue
            a, b = _bits(one[2]), _bits(other[2])
            bits += 1 if a is None or b is None else (a ^ b).bit_count()
            if first is None:
                position = len(ask["input_ids"]) + one[0]
                first = Difference(request, sample, position, one[0], one[1], _shown(one[2]), _shown(other[2]))
        if len(tracks[0]) != len(tracks[1]) and first is None:
            bits, lengths = bits + 1, [str(len(track)) for track in tracks]
            first = Difference(request, sample, len(ask["input_ids"]), 0, "number of values", *lengths)
    return bits, first


def _cut(answer: Json, aborted: Json) -> Json:
    """As much of the reference as an aborted answer has: its tokens, and what is known of the prompt by then."""
    num, there = len(aborted["output_ids"]), aborted["meta_info"]
    meta = {
        name: values[: num if name.startswith("output_") else len(there.get(name) or ())]
        for name, values in answer["meta_info"].items()
        if isinstance(values, list) and (name.startswith("output_") or there.get(name))
    }
    return answer | {"output_ids": answer["output_ids"][:num], "meta_info": meta}


def _shown(value: object) -> str:
    return f"{value!r} (0x{_bits(value):08x})" if isinstance(value, float) else repr(value)


# Client


class Client:
    """Posts JSON to one server; use it in an ``async with`` block."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def post(self, path: str, body: Mapping[str, object] = {}) -> Any:
        """The JSON of the answer, or of a stream's last event; None if it is no JSON. Raises RequestFailed."""
        try:
            async with self._session.post(f"{self.url}{path}", json=body) as response:
                raw = await response.read()
                if response.status != 200:
                    raise RequestFailed(f"{path}: HTTP {response.status}: {raw[:300].decode(errors='replace')}")
            if body.get("stream"):
                raw = raw.removesuffix(b"data: [DONE]\n\n").rpartition(b"data: ")[2]
            return orjson.loads(raw) if raw.startswith((b"{", b"[")) else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise RequestFailed(f"{path}: {type(error).__name__}: {error}") from error

    async def answer(self, body: Mapping[str, object]) -> list[Json]:
        """The samples of one prompt."""
        reply = await self.post("/generate", body)
        samples: list[Json] = reply if isinstance(reply, list) else [reply]
        for one in samples:
            if "meta_info" not in one:
                raise RequestFailed(f"/generate: {str(one)[:300]}")
        return samples


def _kept(samples: Sequence[Json]) -> list[Json]:
    """What the reference keeps of an answer."""
    names = ("finish_reason", *(f"{side}_{name}" for side in ("input", "output") for name in _LOGPROBS))
    return [
        {"text": one.get("text"), "output_ids": one["output_ids"]}
        | {"meta_info": {name: one["meta_info"][name] for name in names if name in one["meta_info"]}}
        for one in samples
    ]


async def complete(reference: dict[str, list[Json]], url: str, pool: Sequence[Json], until: float) -> None:
    """Add the answers that are missing, one request after the other, until a time of ``time.monotonic``."""
    async with Client(url) as client:
        for number, ask in enumerate(pool):
            if str(number) not in reference and time.monotonic() < until:
                reference[str(number)] = _kept(await client.answer(ask))


# Company


@dataclass(slots=True)
class Tally:
    """The client's counts."""

    answers: int = 0
    different: int = 0
    bits: int = 0
    errors: list[str] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    first: Difference | None = None
    flight: str = ""


class Company:
    """Sends requests of the pool in random company until ``until`` (time.monotonic), and compares the answers."""

    def __init__(self, client: Client, pool: Sequence[Json], reference: Mapping[str, list[Json]], args: Json) -> None:
        """``args``: ``until``, ``seed``, ``workers``, ``priorities``, ``checkpoint`` (a folder, or None for dummy
        weights), ``jitter`` (whether clients hesitate) and ``out``."""
        self.tally = Tally()
        self._client, self._pool, self._reference, self._args = client, pool, reference, args
        self._rng = random.Random(args["seed"])
        self._open = asyncio.Event()
        self._sent = 0

    @property
    def over(self) -> bool:
        """Whether no further request begins."""
        worst = max(len(self.tally.errors), self.tally.different)
        return time.monotonic() >= self._args["until"] or worst >= _MOST_ERRORS

    async def run(self) -> None:
        """All clients, until the end."""
        self._open.set()
        disturbing = asyncio.create_task(self._disturb())
        try:
            await asyncio.gather(*(self._work() for _ in range(self._args["workers"])))
        finally:
            disturbing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await disturbing
            await self._client.post("/continue_generation")

    async def _work(self) -> None:
        numbers = [int(number) for number in self._reference]
        while not self.over:
            near = self._rng.randrange(len(numbers))
            for _ in range(self._rng.randint(1, 4)):  # neighbours often share a prefix
                await self._open.wait()
                if self._args["jitter"]:
                    await asyncio.sleep(self._rng.expovariate(50))
                try:
                    await self._ask(numbers[min(near + self._rng.randrange(6), len(numbers) - 1)])
                except RequestFailed as error:
                    self.tally.errors.append(str(error))
                if self.over:
                    return

    async def _ask(self, number: int) -> None:
        """Ask and compare. Of a hundred requests three are left by their clients, three are aborted by another one."""
        self._sent += 1
        body = self._pool[number] | {"rid": f"exact-{self._args['seed']}-{self._sent}.", "stream": False}
        if self._args["priorities"]:
            body["priority"] = self._rng.randint(0, 40)
        fate, ask = self._rng.random(), self._pool[number]
        if fate < 0.2 and "n" not in ask["sampling_params"]:
            body["stream"] = True
        answering = asyncio.create_task(self._client.answer(body))
        try:
            if fate > 0.94:
                await asyncio.wait([answering], timeout=self._rng.random() * 0.3)
                if fate > 0.97 and not answering.done():
                    self.tally.events["clients that left"] += 1
                    return
                await self._client.post("/abort_request", {"rid": body["rid"]})
            samples = await answering
        finally:
            answering.cancel()
        tally = self.tally
        for meta in (sample["meta_info"] for sample in samples):
            tally.events["aborted"] += meta["finish_reason"]["type"] == "abort"
            tally.events["accepted drafts"] += max(meta["completion_tokens"] - meta.get("spec_verify_ct", 10**9) - 1, 0)
        bits, first = compare(number, ask, self._reference[str(number)], samples)
        tally.answers, tally.bits, tally.different = tally.answers + 1, tally.bits + bits, tally.different + bool(first)
        if first is not None and tally.first is None:
            tally.first = first
            tally.flight = (await self._client.post("/flight_recorder"))["path"]
            (self._args["out"] / f"different-{number}.json").write_text(json.dumps({"ask": ask, "got": samples}))

    async def _disturb(self) -> None:
        """Now and then pause the server, empty its cache or load its weights again."""
        what = ["pause in_place", "pause retract", "pause abort", "flush"]
        what += [] if self._args["checkpoint"] is None else ["reload", "reload abort"]
        while True:
            await asyncio.sleep(self._rng.uniform(1.0, 9.0))
            kind, _, mode = self._rng.choice(what).partition(" ")
            try:
                if kind == "pause":
                    await self._client.post("/pause_generation", {"mode": mode})
                    await asyncio.sleep(0.3)
                    await self._client.post("/continue_generation")
                elif kind == "reload":
                    body = {"model_path": str(self._args["checkpoint"]), "abort_all_requests": bool(mode)}
                    await self._client.post("/update_weights_from_disk", body)
                else:
                    self._open.clear()
                    await self._client.post(_FLUSH)
            except RequestFailed as error:
                self.tally.errors.append(str(error))
            self._open.set()
            self.tally.events[f"{kind} {mode}".strip()] += 1


# Configurations


def configurations(longest: int, token_bytes: int, on_cpu: bool, storage: str) -> dict[str, list[str]]:
    """Flags by name. Pools are so small that eviction never stops; ``token_bytes`` is the KV of a token."""
    pool = (5 * longest // 4 + 4 * _ANSWER + 63) // 64 * 64
    tight = f"--max-total-tokens {pool} --schedule-conservativeness 0.2 --max-running-requests 16 --page-size 16"
    graphs = "--cuda-graph-bs 1 2 4 8 16 --piecewise-cuda-graph-tokens 16 64 128" if on_cpu else ""
    host = f"--enable-hierarchical-cache --hicache-size {3 * pool * token_bytes / 1e9:.6f}"
    files = (
        f"--hicache-storage-backend file --hicache-storage-dir {storage} --hicache-storage-prefetch-policy timeout"
        f" --hicache-storage-size {12 * pool * token_bytes / 1e9:.6f}"
    )
    kernel, direct = f"{host} --hicache-io-backend kernel", f"{host} --hicache-io-backend direct"
    first = "--enable-priority-scheduling --priority-scheduling-preemption-threshold 3"
    eagle3 = "--speculative-algorithm EAGLE3"
    tree = "--speculative-eagle-topk 3 --speculative-num-steps 3 --speculative-num-draft-tokens 8"
    return {
        name: flags.split()
        for name, flags in {
            "plain": "--disable-cuda-graph --page-size 1",
            "graphs": f"{graphs} --max-running-requests 16 --page-size 64 --schedule-policy lpm",
            "retraction": f"{graphs} {tight} --chunked-prefill-size 192",
            "offload": f"{tight} {kernel} --retract-policy offload --hicache-write-policy write_back",
            "priorities": f"{graphs} {tight} {first}",
            "kernel_files": f"{graphs} {tight} {kernel} {files}",
            "direct_files": f"{tight} {direct} {files} --hicache-mem-layout page_first",
            "eagle3_chain": f"{graphs} {tight} {eagle3} {direct}",
            "eagle3_tree": f"{graphs} {tight} {eagle3} {tree}",
            "nextn": f"{tight} --speculative-algorithm NEXTN {kernel}",
            "mixed": f"{graphs} {tight} {kernel} {files} {first} --chunked-prefill-size 192 --enable-mixed-chunk",
            "ngram": f"{graphs} {tight} --speculative-algorithm NGRAM {kernel} --retract-policy offload",
            "everything": f"{graphs} {tight} {eagle3} {kernel} {files} {first} --retract-policy offload"
            " --enable-mixed-chunk",
            "replicas": f"{tight} --dp-size 2",
        }.items()
    }


# Pieces


def state_of(url: str) -> Json:
    """Events and memory by the server's own counts, added up over its replicas."""
    with urllib.request.urlopen(f"{url}/get_server_info", timeout=60) as response:
        states = json.load(response)["internal_states"]
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        metrics = response.read().decode()
    resident = [float(line.split()[-1]) for line in metrics.splitlines() if re.match(r"process_resident_mem", line)]

    def total(*path: str) -> int:
        found = 0
        for state in states:
            for key in path:
                state = (state or {}).get(key)
            found += sum(state.values()) if isinstance(state, dict) else state or 0
        return int(found)

    counts = {name: total(*path) for name, path in _EVENTS.items()}
    graphs = ("cuda_graphs", "piecewise_cuda_graphs")
    return {
        "events": {name: count for name, count in counts.items() if count},
        "fallbacks": sum(total(kind, "fallbacks") for kind in graphs),
        "repairs": sum(total(kind, "repairs") for kind in graphs),
        "memory_mb": round(sum(resident) / 1e6),
        "used_tokens": total("num_used_tokens"),
    }


_EVENTS: dict[str, tuple[str, ...]] = {
    "retractions": ("num_retractions",),
    "mixed steps": ("num_mixed_steps",),
    "replays": ("cuda_graphs", "replays"),
    "prefill replays": ("piecewise_cuda_graphs", "replays"),
    "tokens from device": ("num_cached_tokens",),
    "tokens loaded from host": ("hicache", "load", "num_tokens"),
    "tokens stored to host": ("hicache", "store", "num_tokens"),
    "tokens read from files": ("hicache", "storage_read", "num_tokens"),
    "tokens written to files": ("hicache", "storage_write", "num_tokens"),
    "tokens evicted": ("hicache", "evicted_tokens"),
}


async def answer_in_company(server: BenchServer, pool: Sequence[Json], reference: Json, how: Json) -> Json:
    """One configuration's line of pieces.jsonl."""
    begin = time.monotonic()
    async with Client(server.url) as client:
        for ask in pool[:4]:  # memory is counted when it has begun
            await client.answer(ask)
        before = state_of(server.url)
        how = how | {"until": max(how["until"], time.monotonic() + _LEAST_S)}
        company = Company(client, pool, reference, how)
        await company.run()
        server.raise_if_dead()
        tally = company.tally
        try:
            await client.post(_FLUSH)
        except RequestFailed as error:
            tally.errors.append(str(error))
    after = state_of(server.url)
    return {
        "minutes": (time.monotonic() - begin) / 60,
        "answers": tally.answers,
        "different": tally.different,
        "bits": tally.bits,
        "errors": tally.errors[:_MOST_ERRORS],
        "first": tally.first and asdict(tally.first),
        "flight": tally.flight,
        "events": dict(Counter(after["events"]) + tally.events),
        "memory_mb": [before["memory_mb"], after["memory_mb"]],
        **{name: after[name] for name in ("fallbacks", "repairs", "used_tokens")},
    }


def run(args: argparse.Namespace) -> int:
    """``run``: the exit code."""
    end, folder = time.monotonic() + args.seconds, make_model_dir(args.model, args.models)
    launcher = [str(Path(__file__).with_name("disturbed.py"))]
    launcher += [] if args.jitter is None else ["--jitter", str(args.jitter)]
    launcher += [part for name in args.sever for part in ("--sever", name)]
    same = f"--enable-deterministic-inference --enable-metrics --random-seed {_SEED} --dtype {args.dtype}".split()
    same += ["--device", args.device, *args.identity.split()]
    same += ["--load-format", "auto"] if args.model in DEMOS else []
    most = json.loads((folder / "config.json").read_text())["max_position_embeddings"] - 2 * _ANSWER
    longest = min(args.longest, most)
    same += ["--context-length", str(longest + 2 * _ANSWER)]
    pool = make_pool(args.requests, longest, prompt_maker(args.model, folder), num_plain_tokens(args.model))
    key = hashlib.sha256(json.dumps([pool, same, args.model]).encode()).hexdigest()[:12]
    file, until = args.out / f"reference-{key}.json", time.monotonic() + args.seconds * 0.6
    reference: dict[str, list[Json]] = orjson.loads(file.read_bytes()) if file.is_file() else {}
    if len(reference) < len(pool):
        with BenchServer(folder, [*same, "--disable-radix-cache"], args.out / "quiet.log") as quiet:
            asyncio.run(complete(reference, quiet.url, pool, max(until, time.monotonic() + _LEAST_S)))
        file.write_bytes(orjson.dumps(reference))
    print(f"reference {key}: {len(reference)} of {len(pool)} requests", flush=True)
    if not reference:
        raise SystemExit("the quiet server has had no time to answer: give more --seconds")
    token_bytes = kv_bytes_per_token(args.model) * (2 if args.dtype == "float32" else 1)
    with tempfile.TemporaryDirectory(prefix="exact-") as storage:
        all_flags = configurations(longest, token_bytes, args.device == "cpu", storage)
        possible = [
            name
            for name, flags in all_flags.items()
            if name != "replicas"  # needs as many GPUs
            and all((folder / word.lower()).is_dir() for word in flags if word in ("EAGLE3", "NEXTN"))
        ]
        first = args.seed % len(possible)  # another piece begins elsewhere
        names = args.configs or possible[first:] + possible[:first]
        failed = False
        for index, name in enumerate(names):
            share = (end - time.monotonic()) / (len(names) - index)
            if share <= 0 and index:
                print(f"no time is left for {', '.join(names[index:])}", flush=True)
                break
            line: Json = {"config": name, "seed": args.seed + index, "jitter": args.jitter, "reference": key}
            flags = [*same, *all_flags[name], "--flight-recorder-dir", str(args.out)]
            how = {
                "until": time.monotonic() + share, "seed": args.seed + index, "workers": args.workers, "out": args.out,
                "priorities": "--enable-priority-scheduling" in flags, "jitter": args.jitter is not None,
                "checkpoint": folder if args.model in DEMOS else None,
            }  # fmt: skip
            try:
                with BenchServer(folder, flags, args.out / f"{name}.log", launcher=launcher) as server:
                    line |= asyncio.run(answer_in_company(server, pool, reference, how))
            except (ServerDied, RequestFailed, OSError) as error:
                line |= {"errors": [str(error)]}
            line |= {"command": " ".join(flags), "model": args.model, "time": time.time()}
            with (args.out / "pieces.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(report([line], events=False).splitlines()[2], flush=True)
            failed |= bool(faults(line))
    return int(failed)


def severed(args: argparse.Namespace) -> int:
    """``severed``: the exit code, which is 1 if the intact server shows anything. --seconds are those of each name; the
    intact server has --quiet more, in which the quiet one answers."""

    def piece(name: str | None, gpus: str | None) -> tuple[list[Json], str]:
        """Its lines, and what its process said last."""
        folder = args.out / (name or "intact")
        folder.mkdir(parents=True, exist_ok=True)
        if name is not None:
            for reference in (args.out / "intact").glob("reference-*.json"):
                shutil.copy(reference, folder)
        seconds = args.seconds + (args.quiet if name is None else 0)
        command = ["timeout", "-k", "30", str(seconds + _HANGS_S[args.device]), sys.executable, __file__, "run"]
        command += [f"--out={folder}", f"--seconds={seconds}"]
        command += [f"--model={args.model}", f"--device={args.device}", f"--identity={args.identity}"]
        command += [f"--jitter={args.seed}", f"--requests={args.requests}", f"--longest={args.longest}"]
        command += ["--configs", *args.configs, *(["--sever", name] if name else [])]
        env = os.environ | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        (folder / "run.log").write_text(ended.stdout)
        file = folder / "pieces.jsonl"
        lines = [json.loads(text) for text in file.read_text().splitlines()] if file.is_file() else []
        said = "it does not end" if ended.returncode == 124 else ended.stdout.rstrip().rpartition("\n")[2]
        return lines, "" if lines else said

    gpus = args.gpus or [None]
    intact = shown_by(*piece(None, gpus[0]))
    print(f"intact: {intact[0]}, {intact[1]} answers {intact[2]}", flush=True)
    with ThreadPoolExecutor(args.lanes) as pool:
        found = pool.map(piece, args.names, itertools.cycle(gpus))
        rows = [[name, *shown_by(*one)] for name, one in zip(args.names, found, strict=True)]
    print(table(["severed", "shows as", "answers", "first"], rows))
    return int(intact[0] != "nothing")


def shown_by(lines: Sequence[Json], words: str) -> tuple[str, str, str]:
    """What a piece shows, the number of its answers, and the first fault. ``words``: if its process left no line."""
    answers = sum(line.get("answers", 0) for line in lines)
    found = [fault for line in lines for fault in faults(line)] or ([words] if words else [])
    if any(line.get("different") for line in lines):
        kind, found = "bits", [fault for fault in found if "bits differ" in fault]
    else:
        kind = "an error" if found else "nothing"
    return kind, f"{answers:,}", " ".join(found[0].split())[:160] if found else ""


def faults(line: Json) -> list[str]:
    """What a piece shows to be wrong."""
    found = [f"{name}: {line[name]}" for name in ("fallbacks", "repairs", "used_tokens") if line.get(name)]
    found += [] if line.get("answers") or line["errors"] else ["no answer was compared"]
    found += [f"error: {error}" for error in line["errors"]]
    if line.get("first"):
        first = Difference(**line["first"])
        found.append(
            f"{line['different']} answers, {line['bits']} bits differ; first: request {first.request} sample"
            f" {first.sample} position {first.position} step {first.step}: {first.what} {first.got} instead of"
            f" {first.expected}; flight record {line['flight']}"
        )
    return found


def report(lines: Sequence[Json], events: bool = True) -> str:
    """The pieces by configuration and together, as a table; then what happened, and what was wrong."""
    groups: dict[str, list[Json]] = {}
    for line in lines:
        groups.setdefault(line["config"], []).append(line)
    if len(groups) > 1:
        groups["together"] = list(lines)
    rows = []
    for name, own in groups.items():
        counts = [f"{sum(line.get(key, 0) for line in own):,}" for key in ("answers", "different", "bits")]
        minutes = sum(line.get("minutes", 0.0) for line in own)
        memory = [line["memory_mb"] for line in own if "memory_mb" in line]
        shown = f"{memory[0][0]:,} → {max(after for _, after in memory):,}" if memory else ""
        others = [sum(line.get(key, 0) for line in own) for key in ("fallbacks", "repairs")]
        rows.append([name, f"{minutes:.1f}", *counts, sum(len(line["errors"]) for line in own), *others, shown])
    columns = ["configuration", "minutes", "answers", "different", "bits", "errors", "fallbacks", "repairs", "MB"]
    text = table(columns, rows)
    if events:
        happened: Counter[str] = Counter()
        for line in lines:
            happened.update(line.get("events", {}))
        text += "\n\n" + table(["event", "number"], [[name, f"{num:,}"] for name, num in sorted(happened.items())])
    for line in lines:
        text += "".join(f"\nFAILED {line['config']}, seed {line['seed']}: {fault}" for fault in faults(line))
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 if everything was the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    summing = parts.add_parser("sum", help="the table of all pieces")
    summing.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    running = parts.add_parser("run", help="a piece")
    every, severable = [*configurations(0, 0, True, "")], sorted({*EDGES, *EDGE_PARTS, *GUARDS})
    running.add_argument("--seconds", type=float, default=600.0, help="for everything, servers' starts too")
    running.add_argument("--configs", nargs="+", default=[], choices=every, help="unless given, all that can be")
    running.add_argument("--dtype", default="bfloat16")
    running.add_argument("--workers", type=int, default=24, help="requests at a time")
    running.add_argument("--jitter", type=int, metavar="SEED", help="random delays on host and streams")
    running.add_argument(
        "--sever", action="append", default=[], choices=severable, metavar="NAME", help="an edge or guard"
    )
    running.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "fenceline-bench-models")
    severing = parts.add_parser("severed", help="a piece without each edge and guard, with random delays")
    severing.add_argument("names", nargs="*", default=severable, metavar="NAME", help="unless given, all")
    severing.add_argument("--lanes", type=int, default=1, help="pieces at a time")
    severing.add_argument("--gpus", nargs="+", metavar="GPU", help="of the pieces in turn, several as in 0,1 2,3")
    severing.add_argument("--seconds", type=float, default=60.0, help="of a piece")
    severing.add_argument("--quiet", type=float, default=60.0, metavar="SECONDS", help="more of the intact piece")
    severing.add_argument("--configs", nargs="+", default=["kernel_files", "everything"], choices=every)
    for part in (running, severing):
        part.add_argument("--out", type=Path, required=True, help="folder for reference, logs and pieces.jsonl")
        part.add_argument("--model", choices=[*DEMOS, *SHAPES], default="demo")
        part.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
        part.add_argument("--identity", default="", help="--identity='FLAGS': more flags of all servers")
        part.add_argument("--requests", type=int, default=504, help="in the pool")
        part.add_argument("--longest", type=int, default=8000, help="tokens of the longest prompt")
        part.add_argument("--seed", type=int, default=1, help="of the company; another one for each piece")
    args = parser.parse_args(argv)
    if args.what != "sum":
        if unknown := set(getattr(args, "names", ())) - {*severable}:
            parser.error(f"no edge or guard has the name {', '.join(sorted(unknown))}")
        args.out = args.out.resolve()
        args.out.mkdir(parents=True, exist_ok=True)
        return run(args) if args.what == "run" else severed(args)
    lines = [json.loads(text) for d in args.folders for text in (d / "pieces.jsonl").read_text().splitlines()]
    print(report(lines))
    return int(any(map(faults, lines)))


if __name__ == "__main__":
    sys.exit(main())
