"""The workload ``processes``: a whole server but for HTTP. Requests travel from clients through the tokenizer manager,
sockets, the scheduler's process on a virtual GPU and the detokenizer's process, and back.

Everything is the code of the real server; only the device is virtual, with the seed's schedule and all checks. The
machine decides when messages arrive, so the same seed may give other batches. The answers must not depend on that: the
text, tokens and finish reason that each client gets are compared with the oracle's answer to its request. An aborted
answer must be a beginning of it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch

import fenceline
from fenceline.config.engine_config import EngineConfig
from fenceline.entrypoints.launch import EngineProcesses, launch_processes
from fenceline.ipc.io_struct import PortArgs
from fenceline.memory_order import register_device
from fenceline.scheduler.process import run_scheduler_process
from fenceline_proof.answers import Findings
from fenceline_proof.oracle import Oracle, Query, text_of
from fenceline_proof.tiny_model import EOS_TOKEN, PIECES, VOCAB_SIZE, tiny_model_path, tiny_tokenizer
from fenceline_sim.device import VgpuDevice
from fenceline_sim.gpu import VirtualGpu

PROCESSES = "processes"
_LETTERS = range(1, 27)  # the ids of single letters, which the tokenizer finds in a text
_MAX_FLUSHES = 1000  # the scheduler answers one in each step, so this is far longer than any answer
_STOP_STRINGS = ("a", "th", "on", "ne", "é", "r.")


@dataclass(frozen=True, slots=True)
class _Client:
    """One request, and what its client does. ``is_text``: the prompt is sent as text. ``gives_up_after``: the number of
    parts of the answer after which the client aborts the request, or closes the stream if it ``leaves``. ``aborts``:
    another request, which may still wait, and which the client aborts when it gets the first part."""

    rid: str
    query: Query
    is_text: bool
    stop: tuple[str, ...] = ()
    gives_up_after: int | None = None
    leaves: bool = False
    aborts: str | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Of ``Engine.generate``."""
        query = self.query
        params = {
            "max_new_tokens": query.max_new_tokens,
            "temperature": query.temperature,
            "repetition_penalty": query.repetition_penalty,
            "stop_token_ids": sorted(query.stop_ids - {EOS_TOKEN}),
            "ignore_eos": EOS_TOKEN not in query.stop_ids,
            "sampling_seed": query.seed,
            "stop": list(self.stop),
        }
        text = b"".join(PIECES[token] for token in query.prompt).decode()
        prompt = {"prompt": text} if self.is_text else {"input_ids": list(query.prompt)}
        return {**prompt, "sampling_params": params, "rid": self.rid}


@dataclass(slots=True)
class _Said:
    """What a client has got: the last part of its answer."""

    answer: dict[str, Any] = field(default_factory=dict)
    is_cut: bool = False  # the client left, so there may be no end


def run_processes(seed: int, policy: str, severed: frozenset[str]) -> Findings:
    """Serve some clients and compare their answers. Raises ``RuntimeError`` with what the scheduler reports."""
    random = Random(seed)
    with TemporaryDirectory(prefix="fenceline-prove-") as folder:
        tiny_tokenizer().backend.save(f"{folder}/tokenizer.json")
        Path(folder, "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
        report = Path(folder, "report")
        backends: list[EngineProcesses] = []

        def launch(config: EngineConfig) -> EngineProcesses:
            entry = partial(_serve_on_vgpu, seed, policy, severed, str(report))
            backends.append(launch_processes(config, scheduler_entry=entry))
            return backends[-1]

        clients = _clients(random)
        said = {client.rid: _Said() for client in clients}
        with fenceline.Engine(launch=launch, tokenizer_path=folder, **_flags(random)) as engine:
            asyncio.run(_serve(engine, clients, said))
            # What the detokenizer has ended, at a stop string, may go on for some steps.
            flushed = any(engine.flush_cache() for _ in range(_MAX_FLUSHES))
        wrong = [] if flushed else ["the cache is not flushed, though every request has ended"]
        status = (
            backends[0].processes[0].exitcode
        )  # the scheduler's; the detokenizer is killed when it has ended
        if report.exists() or status:
            raise RuntimeError(report.read_text() if report.exists() else f"the scheduler ends with {status}")
    return _compare(clients, said, wrong)


def _serve_on_vgpu(
    seed: int, policy: str, severed: frozenset[str], report: str, config: EngineConfig, ports: PortArgs
) -> None:
    """The main function of the scheduler's process. Findings after the last request are written to ``report``."""
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    devices: list[VgpuDevice] = []

    def open_device(_: frozenset[str]) -> VgpuDevice:
        devices.append(VgpuDevice(severed, VirtualGpu(seed=seed, policy=policy)))
        return devices[-1]

    register_device(VgpuDevice.kind, open_device)
    run_scheduler_process(config, ports)
    try:
        devices[0].synchronize()
    except Exception as error:
        Path(report).write_text(f"{type(error).__name__}: {error}")
        sys.exit(1)


def _flags(random: Random) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "model_path": tiny_model_path(),
        "device": VgpuDevice.kind,
        "random_seed": 1,
        "page_size": random.choice((1, 16)),
        "context_length": 64,
        "max_total_tokens": 112,
        "max_running_requests": 3,
        "chunked_prefill_size": 16,
        "stream_interval": random.choice((1, 1, 2)),
    }
    if random.random() < 0.5:
        flags["cuda_graph_bs"] = (1, 3)
    if random.random() < 0.7:
        policy = random.choice(("write_through", "write_back"))
        flags |= {"enable_hierarchical_cache": True, "hicache_ratio": 1.0, "hicache_write_policy": policy}
        flags["hicache_io_backend"] = "direct"
    return flags


def _clients(random: Random) -> list[_Client]:
    """Ten clients of two families of prompts. In every run one gives up, one leaves, one is aborted by another, and two
    have stop strings."""
    families = [[random.choice(_LETTERS) for _ in range(random.randint(16, 20))] for _ in range(2)]
    clients = []
    for number in range(10):
        is_text = random.random() < 0.5
        own = [
            random.choice(_LETTERS if is_text else range(1, VOCAB_SIZE - 8))
            for _ in range(random.randint(1, 6))
        ]
        stop_ids = random.sample(range(1, VOCAB_SIZE), random.choice((0, 0, 8)))
        patient = number in (0, 1, 2)  # with long answers, so that there is something to give up
        query = Query(
            prompt=(*random.choice(families), *own),
            seed=random.getrandbits(32),
            stop_ids=frozenset() if patient else frozenset((EOS_TOKEN, *stop_ids)),
            max_new_tokens=24 if patient else random.randint(1, 14),
            temperature=random.choice((0.0, 0.9)),
            repetition_penalty=random.choice((1.0, 1.0, 1.3)),
        )
        clients.append(
            _Client(
                rid=f"c{number}",
                query=query,
                is_text=is_text,
                stop=tuple(random.sample(_STOP_STRINGS, 3))
                if number in (3, 4) or random.random() < 0.3
                else (),
                gives_up_after=random.randint(1, 4) if number in (0, 1) else None,
                leaves=number == 1,
                aborts=random.choice(("c2", "c9")) if number == 3 else None,
            )
        )
    return clients


async def _serve(engine: fenceline.Engine, clients: Sequence[_Client], said: dict[str, _Said]) -> None:
    await asyncio.gather(*(_ask(engine, client, said[client.rid]) for client in clients))


async def _ask(engine: fenceline.Engine, client: _Client, said: _Said) -> None:
    parts = cast(AsyncIterator[dict[str, Any]], await engine.async_generate(**client.arguments, stream=True))
    num_parts = 0
    async for part in parts:
        said.answer, num_parts = part, num_parts + 1
        if num_parts == 1 and client.aborts is not None:
            engine.abort(client.aborts)
        if num_parts == client.gives_up_after:
            if client.leaves:
                said.is_cut = True
                break
            engine.abort(client.rid)
    await parts.aclose()  # type: ignore[attr-defined]


def _compare(clients: Sequence[_Client], said: dict[str, _Said], wrong: list[str]) -> Findings:
    oracle = Oracle(tiny_model_path())
    may_end = {client.aborts for client in clients} | {c.rid for c in clients if c.gives_up_after is not None}
    num_tokens = num_close = 0
    for client in clients:
        difference, num, is_close = compare_answer(
            oracle,
            client.query,
            client.stop,
            said[client.rid].answer,
            said[client.rid].is_cut,
            client.rid in may_end,
        )
        num_tokens += num
        num_close += is_close
        if difference:
            wrong.append(f"{client.rid}: {difference}")
    return Findings("\n".join(wrong), num_tokens, num_close)


def compare_answer(
    oracle: Oracle, query: Query, stop: tuple[str, ...], answer: dict[str, Any], is_cut: bool, may_abort: bool
) -> tuple[str, int, bool]:
    """The first error in what a client got, "" if there is none; how many tokens were compared; and whether they end at
    one that differs because of rounding."""
    if not answer:
        return "was never answered", 0, False
    right, ids = oracle.answer(query), answer["output_ids"]
    expected: list[int] = []
    reason: dict[str, Any] | None = None
    while reason is None:
        step = right.step(len(expected))
        if len(expected) < len(ids) and ids[len(expected)] != step.token and ids[len(expected)] in step.close:
            return "", len(expected), True
        expected.append(step.token)
        if step.token in query.stop_ids:
            reason = {"type": "stop", "matched": step.token}
        elif len(expected) == query.max_new_tokens:
            reason = {"type": "length", "length": len(expected)}
    shown = expected[:-1] if reason["type"] == "stop" else expected
    text = text_of(PIECES, query.prompt, shown, stop, 0)
    if text.stop is not None:
        expected, reason = expected[: text.num_tokens], {"type": "stop", "matched": text.stop}
    meta = answer["meta_info"]
    said, end = answer["text"], meta["finish_reason"]
    counts = {"prompt_tokens": len(query.prompt), "completion_tokens": len(ids)}
    if any(meta[name] != count for name, count in counts.items()):
        return f"counts {meta}, right is {counts}", len(ids), False
    broken_off = is_cut if end is None else may_abort and end["type"] == "abort"
    if broken_off:
        fits = text.text.startswith(said.rstrip("\ufffd")) and ids == expected[: len(ids)]
        wrong = f"is aborted with {said!r} {ids}, no beginning of {text.text!r} {expected}"
        return "" if fits else wrong, len(ids), False
    if (said, ids, end) == (text.text, expected, reason):
        return "", len(ids), False
    return f"is {said!r} {ids} {end}, alone {text.text!r} {expected} {reason}", len(ids), False


def missing_edges(report: str) -> tuple[str, ...]:
    """The edges and guards that a report says are missing."""
    named = (
        name for line in re.findall(r"missing (?:edge|guard): (.*)", report) for name in line.split(" or ")
    )
    return tuple(dict.fromkeys(named))
