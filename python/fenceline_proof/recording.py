"""A flight recorder's dump as decisions that the tiny model can execute: the same rows, pages and lengths.

What the dump does not contain is made up: tokens of prompts that were not kept (and all tokens modulo the tiny
vocabulary), and the history before the ring begins: rows and pages that are in use then hold zeros, and page tables
name the pages that their requests are known to have had.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fenceline.memory_order import Points
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import Chunk, PageWrites, StepBatch, constrained_rows
from fenceline.sampling.sampling_batch import ReqSampling
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.scheduler.flight_dump import read_dump
from fenceline_proof.script import Flags
from fenceline_proof.tiny_model import VOCAB_SIZE

I64 = npt.NDArray[np.int64]

# Pools up to this size keep their page ids; of larger ones only the pages that the dump names are made.
_MAX_TOKENS = 1 << 16
_MAX_TOP = 20  # logprob alternatives of a vocabulary that has hardly more


@dataclass(frozen=True, slots=True)
class Step:
    """One launch. ``after`` and ``done``: serials of the Points it was given and the one that ended it.

    ``in_flight``: how many steps before it had not been published when it was launched.
    """

    batch: StepBatch
    after: Mapping[str, int]
    done: int
    in_flight: int


@dataclass(frozen=True)
class Recording:
    """A dump, read and made executable. ``page_table``: row → pages, as of before the first step."""

    reason: str
    wrapped: bool
    steps: tuple[Step, ...]
    page_table: Mapping[int, Sequence[int]]
    num_rows: int
    num_pages: int
    page_size: int
    recorded_pages: int
    problems: tuple[str, ...]
    graph_sizes: tuple[int, ...] = ()  # in which its decode batches were replayed
    has_host_tier: bool = False  # whose transfers are not recorded

    @cached_property
    def flags(self) -> Flags:
        """Flags of an engine that is large enough."""
        longest = max((int(step.batch.seq_lens.max()) for step in self.steps), default=1)
        columns = max(
            (int(s.batch.page_writes.columns.max()) for s in self.steps if len(s.batch.page_writes)), default=0
        )
        columns = max(columns, *(len(pages) for pages in self.page_table.values()), 0)
        context = max(longest, columns * self.page_size) + self.page_size
        # Only the graphs that were used: each batch runs in the same size as before.
        graphs = {"cuda_graph_bs": self.graph_sizes} if self.graph_sizes else {}
        return {
            **graphs, "page_size": self.page_size, "max_total_tokens": (self.num_pages - 1) * self.page_size,
            "max_running_requests": max((self.num_rows - 1, *self.graph_sizes)), "context_length": context,
            "json_model_override_args": json.dumps({"max_position_embeddings": context}),
        }  # fmt: skip

    @torch.inference_mode()
    def prepare(self, runner: ModelRunner) -> None:
        """Write the history from before the ring begins to a new runner, and wait until the device has it."""
        table = runner.req_pool.page_table
        device = runner.device
        with device.forward.active():
            for row, pages in self.page_table.items():
                columns = torch.arange(len(pages), device=table.device)
                ids = torch.tensor(pages, dtype=torch.int32).to(table.device)
                runner.req_pool.write_pages(torch.full_like(columns, row), columns, ids)
            for row in sorted({s.row for step in self.steps for s in step.batch.sampling if s.params.needs_penalties}):
                none = torch.zeros(0, dtype=torch.int64).to(table.device)
                runner.sampler.begin_request(row, none, none)
        device.synchronize()


def read_recording(path: Path, last: int | None = None) -> Recording:
    """The dump in ``path``, or its ``last`` steps. Raises ValueError, one line, for anything that is not a dump, and
    for steps that speculated: where one writes depends on how many drafts were accepted before it, which is a value."""
    dump = read_dump(path)
    algorithm = dump["config"].get("speculative_algorithm")
    if algorithm is not None:
        raise ValueError(
            f"{path}: steps of a server with --speculative-algorithm {algorithm} cannot be replayed: how many drafts"
            " are accepted depends on values, which a replay makes up"
        )
    return _Reader(dump, last).recording()


class _Reader:
    def __init__(self, dump: Mapping[str, Any], last: int | None) -> None:
        self._dump = dump
        self._steps: Sequence[Mapping[str, Any]] = dump["steps"]
        self._cut = last is not None and last < len(self._steps)
        if last is not None:
            self._steps = self._steps[-last:]
        self._page_size: int = dump["config"]["page_size"]
        self._samplings = [_sampling(facts) for facts in dump["samplings"]]
        self._base = self._forgotten_pages()
        self._ids = self._page_ids()

    def recording(self) -> Recording:
        dump = self._dump
        base = {row: [self._ids[page] for page in pages] for row, pages in self._base.items()}
        return Recording(
            reason=dump["reason"], wrapped=bool(dump["wrapped"]) or self._cut,
            steps=tuple(self._step(step) for step in self._steps), page_table=base,
            num_rows=max((1, *self._rows())) + 1, num_pages=max(self._ids.values(), default=1) + 1,
            page_size=self._page_size, recorded_pages=dump["num_pages"], problems=tuple(self._stale_pages()),
            graph_sizes=tuple(sorted(self._graph_sizes())), has_host_tier=dump["config"].get("hicache") is not None,
        )  # fmt: skip

    def _graph_sizes(self) -> set[int]:
        config = self._dump["config"]
        sizes, exact = (sorted(config.get("cuda_graph_bs", ())), config.get("disable_cuda_graph_padding", False))
        batches = {len(self._composition(step)["rows"]) for step in self._steps if step["mode"] != "extend"}
        fitting = (next((size for size in sizes if size >= batch), None) for batch in batches)
        return {size for size in fitting if size is not None and (not exact or size in batches)}

    # --- the history before the ring begins

    def _forgotten_pages(self) -> dict[int, list[int]]:
        """Pages of the rows that are in use when the ring begins, as far as the dump shows them."""
        known: dict[int, list[int]] = {}
        begun: set[int] = set()
        for step in self._steps:
            for event in step["events"]:
                if event["event"] == "leave" and event["row"] not in begun:
                    known.setdefault(event["row"], event["pages"])
                    begun.add(event["row"])
            writes = step["page_writes"]
            if writes is not None:
                pairs = zip(writes["rows"], writes["columns"], strict=True)
                begun |= {row for row, column in pairs if column == 0 and row not in known}
        for event in self._dump["events"]:
            if event["event"] == "leave" and event["row"] not in begun:
                known.setdefault(event["row"], event["pages"])
                begun.add(event["row"])
        for req in self._dump["reqs"]:
            if req["row"] and req["row"] not in begun:
                known.setdefault(req["row"], req["pages"])
        used = self._rows()
        return {row: pages for row, pages in sorted(known.items()) if row in used and pages}

    def _rows(self) -> set[int]:
        rows: set[int] = set()
        for step in self._steps:
            if step["mode"] == "extend":
                rows |= {seq["row"] for seq in step["seqs"]}
            else:
                rows |= set(self._composition(step)["rows"])
        return rows

    # --- pages

    def _page_ids(self) -> dict[int, int]:
        """The id that each page gets: its own if the pool is small enough, otherwise its rank among those in use."""
        named = set(range(1, 2))
        for pages in self._base.values():
            named |= set(pages)
        for step in self._steps:
            if step["page_writes"] is not None:
                named |= set(step["page_writes"]["pages"])
            for seq in step.get("seqs", ()):
                named |= {slot // self._page_size for slot in seq["out_slots"]}
        if self._dump["num_pages"] * self._page_size <= _MAX_TOKENS:
            named = set(range(1, self._dump["num_pages"]))
        return {0: 0} | {page: rank for rank, page in enumerate(sorted(named - {0}), 1)}

    def _stale_pages(self) -> Iterable[str]:
        """Steps that use a page after it was retired and before it was leased again: an error even without a race."""
        table = {row: dict(enumerate(pages)) for row, pages in self._base.items()}
        retired: set[int] = set()
        for number, step in enumerate(self._steps):
            for event in step["events"]:
                if event["event"] == "retire_pages":
                    retired |= set(event["pages"])
            writes = step["page_writes"] or {"rows": [], "columns": [], "pages": []}
            for row, column, page in zip(writes["rows"], writes["columns"], writes["pages"], strict=True):
                table.setdefault(row, {})[column] = page
                retired.discard(page)
            for rid, row, length in self._lengths(step):
                columns = range(-(-length // self._page_size))
                stale = sorted({table.get(row, {}).get(column, 0) for column in columns} & retired)
                if stale:
                    yield f"step {number}: {rid} in row {row} uses pages {stale[:8]}, which are retired"

    def _lengths(self, step: Mapping[str, Any]) -> list[tuple[str, int, int]]:
        if step["mode"] == "extend":
            return [(s["rid"], s["row"], s["prefix_len"] + s["num_tokens"]) for s in step["seqs"]]
        composition = self._composition(step)
        return list(zip(composition["rids"], composition["rows"], step["seq_lens"], strict=True))

    # --- steps

    def _composition(self, step: Mapping[str, Any]) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._dump["compositions"][str(step["composition"])]
        return found

    def _step(self, step: Mapping[str, Any]) -> Step:
        batch = self._extend(step) if step["mode"] == "extend" else self._decode(step)
        return Step(batch, step["after"], step["done"], step["in_flight"])

    def _decode(self, step: Mapping[str, Any]) -> StepBatch:
        of_batch, writes = self._composition(step), self._page_writes(step)
        batch = self._decodes(of_batch["rows"], step["seq_lens"], of_batch["sampling"], writes)
        return replace(batch, composition=step["composition"])

    def _decodes(self, rows: Any, seq_lens: Any, samplings: Iterable[int], writes: PageWrites) -> StepBatch:
        sampling, lens = tuple(self._samplings[index] for index in samplings), _ints(seq_lens)
        return StepBatch(
            rows=_ints(rows), starts=lens - 1, seq_lens=lens, samples=np.ones(len(lens), np.bool_), sampling=sampling,
            page_writes=writes, after=Points.none(), constrained=constrained_rows(sampling),
        )  # fmt: skip

    def _extend(self, step: Mapping[str, Any]) -> StepBatch:
        seqs = [seq for seq in step["seqs"] if seq["out_slots"]]
        decodes = step["seqs"][len(seqs) :]
        batch = StepBatch.of_chunks(
            [seq["row"] for seq in seqs], [seq["prefix_len"] for seq in seqs], [self._chunk(seq) for seq in seqs],
            [None if seq["sampling"] is None else self._samplings[seq["sampling"]] for seq in seqs],
            self._page_writes(step), Points.none(),
        )  # fmt: skip
        if not decodes:
            return batch
        rows, lens = [seq["row"] for seq in decodes], [seq["prefix_len"] + 1 for seq in decodes]
        return batch.beside(self._decodes(rows, lens, [seq["sampling"] for seq in decodes], PageWrites.none()))

    def _chunk(self, seq: Mapping[str, Any]) -> Chunk:
        history = None
        if seq["history"] is not None:
            prompt, output = seq["history"]
            history = (_tokens(prompt, seq["row"], 0), _tokens(output, seq["row"], 0))
        slots = _ints(seq["out_slots"])
        pages = np.array([self._ids[page] for page in (slots // self._page_size).tolist()], dtype=np.int64)
        ids = seq["num_tokens"] if seq["token_ids"] is None else seq["token_ids"]
        return Chunk(
            token_ids=_tokens(ids, seq["row"], seq["prefix_len"]),
            out_slots=pages * self._page_size + slots % self._page_size, scored=range(*seq["scored"]),
            top_logprobs=min(seq["top_logprobs"], _MAX_TOP), token_ids_logprob=_named(seq["token_ids_logprob"]),
            following=tuple(token % VOCAB_SIZE for token in seq["following"]), history=history, embeds=seq["embeds"],
        )  # fmt: skip

    def _page_writes(self, step: Mapping[str, Any]) -> PageWrites:
        writes = step["page_writes"]
        if writes is None:
            return PageWrites.none()
        pages = np.array([self._ids[page] for page in writes["pages"]], dtype=np.int32)
        return PageWrites(_ints(writes["rows"]), _ints(writes["columns"]), pages)


def _sampling(facts: Mapping[str, Any]) -> ReqSampling:
    params = dict(facts["params"])
    bias = {int(token) % VOCAB_SIZE: float(value) for token, value in params.pop("logit_bias")}
    return ReqSampling(
        params=SamplingParams(**params, logit_bias=bias or None), seed=facts["seed"], row=facts["row"],
        prompt_len=facts["prompt_len"], stop_ids=tuple(sorted({token % VOCAB_SIZE for token in facts["stop_ids"]})),
        return_logprob=facts["return_logprob"], top_logprobs_num=min(facts["top_logprobs_num"], _MAX_TOP),
        token_ids_logprob=_named(facts["token_ids_logprob"]), constrained=facts["constrained"],
    )  # fmt: skip


def _named(ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(token % VOCAB_SIZE for token in ids)


def _tokens(ids: int | Sequence[int], row: int, first: int) -> I64:
    """Token ids of the tiny vocabulary: the recorded ones, or as many made up from row and position."""
    if isinstance(ids, int):
        return (np.arange(first, first + ids, dtype=np.int64) * 7 + row * 13) % (VOCAB_SIZE - 1) + 1
    return _ints(ids) % VOCAB_SIZE


def _ints(values: Sequence[int]) -> I64:
    return np.array(values, dtype=np.int64)
