"""Dumps: the contents of a FlightRecorder as one JSON object, usually in a file.

``docs/use/flight_recorder.md`` describes the format, which ``FORMAT`` and ``VERSION`` identify.
docs/use/flight_recorder.md says what reads such a file.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from fenceline.ipc.child_process import DUMP_SIGNAL
from fenceline.model_executor.step import Chunk, PageWrites, StepBatch
from fenceline.sampling.sampling_batch import ReqSampling
from fenceline.scheduler.flight_recorder import (
    REDACTED,
    CompletionsEvent,
    Event,
    FlightRecorder,
    Leaving,
    Retirement,
    Serials,
    StepRecord,
)
from fenceline.scheduler.req import Req
from fenceline.version import __version__

logger = logging.getLogger(__name__)

FORMAT = "fenceline-flight-recorder"
VERSION = 3
OFF = "the flight recorder is off: start the server with --flight-recorder-steps 512"

# ``pause`` is called after this many bytes of JSON, or steps without JSON: about every millisecond.
_PAUSE_BYTES = 32 << 10
_PAUSE_STEPS = 8
_MAX_BYTES = 1 << 30
_NUMBERS = itertools.count()  # distinguish files that one process writes in the same second
# The sampling parameters that the sampler reads. Stop strings are left out: the sampler does not use them, and they are
# private text.
_PARAMS = (
    "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty",
)  # fmt: skip


def read_dump(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. Raises ValueError, one line, for anything that is not a dump of this version."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)  # a device or a pipe may have no end
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    if len(content) > _MAX_BYTES:
        raise ValueError(f"{path}: not a flight recorder's dump (longer than {_MAX_BYTES} bytes)")
    try:
        dump = orjson.loads(content)
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(dump, dict) or dump.get("format") != FORMAT:
        raise ValueError(f"{path}: not a flight recorder's dump")
    if dump.get("version") != VERSION:
        raise ValueError(f"{path}: version {dump.get('version')} of the format; this program reads {VERSION}")
    if missing := {"config", "steps", "events", "reqs", "compositions", "samplings"} - dump.keys():
        raise ValueError(f"{path}: not a whole dump ({', '.join(sorted(missing))} missing)")
    return dump


def dump_json(recorder: FlightRecorder, reason: str, pause: Callable[[], object] = lambda: None) -> bytes:
    """The recorder's steps, the configuration, and the requests that are alive, as JSON. ``reason`` says why the dump
    is made. May be called from any thread. ``pause`` is called about once for each millisecond of encoding, so that it
    can let other threads run; with large batches there is much to encode."""
    steps, events = recorder.snapshot()
    reqs = [_req(req) for req in list(recorder.reqs.values())]
    table = _Tables()
    memory = recorder.memory
    head = {
        "format": FORMAT,
        "version": VERSION,
        **_origin(reason),
        "pid": os.getpid(),
        "config": recorder.config.public_dict(),
        "step_costs": recorder.step_costs,
        "num_pages": memory.pages.size,
        "num_rows": memory.rows.size,
        "prompts_recorded": recorder.config.server_args.flight_recorder_prompts,
        "wrapped": recorder.wrapped,
    }
    encoded: list[bytes] = []
    num_bytes = 0  # since the last pause
    for step in steps:
        encoded.append(_json(_step(step, table)))
        num_bytes += len(encoded[-1])
        if num_bytes >= _PAUSE_BYTES:
            num_bytes = 0
            pause()
    tail = {
        "events": [_event(event) for event in events],
        "reqs": reqs,
        "compositions": table.compositions,
        "samplings": table.samplings,
    }
    return b"".join((_json(head)[:-1], b',"steps":[', b",".join(encoded), b"],", _json(tail)[1:]))


def dump_of_last(
    recorder: FlightRecorder, reason: str, last: int, pause: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """The last ``last`` steps in the form of :func:`read_dump`, with those fields only that a trace needs. Arrays are
    numpy arrays. ``pause`` as for :func:`dump_json`."""
    steps, events = recorder.snapshot(last)
    table = _Tables()
    records: list[dict[str, object]] = []
    for step in steps:
        records.append(_step(step, table))
        if len(records) % _PAUSE_STEPS == 0:
            pause()
    return {
        **_origin(reason),
        "wrapped": recorder.wrapped or len(records) == last,
        "steps": records,
        "events": [_event(event) for event in events],
        "compositions": {str(number): facts for number, facts in table.compositions.items()},
    }


def _origin(reason: str) -> dict[str, object]:
    created = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return {"reason": reason, "created": created, "server_version": __version__}


def _json(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def write_dump(recorder: FlightRecorder, reason: str, pause: Callable[[], object] = lambda: None) -> Path:
    """Write :func:`dump_json` to a new file in the configured folder, readable by its owner only, and return its path.
    Raises OSError if it cannot be written."""
    folder = Path(recorder.config.flight_recorder_dir)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid not in (os.getuid(), 0):
        raise PermissionError(f"{folder} belongs to another user: name a folder of your own with --flight-recorder-dir")
    stamp = f"{os.getpid()}-{time.strftime('%Y%m%d-%H%M%S')}-{next(_NUMBERS)}"
    path = folder / f"flight-{stamp}.json"
    data = dump_json(recorder, reason, pause)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    return path


def dump_and_log(recorder: FlightRecorder | None, reason: str) -> None:
    """Like :func:`write_dump`, for use while the process fails: logs the path, and logs any error instead of raising
    it. Does nothing if the recorder is None or disabled."""
    if recorder is None or not recorder.enabled:
        return
    try:
        path = write_dump(recorder, reason)
    except Exception as error:  # the reason for the dump must not be hidden by the dump's own failure
        logger.error("flight recorder: no dump could be written (%s: %s)", type(error).__name__, error)
    else:
        logger.error("flight recorder: %s; the last steps are in %s", reason, path)


def dump_on_signal(recorder: FlightRecorder) -> None:
    """From now on write a dump whenever the process gets ``DUMP_SIGNAL``, even if the scheduler's thread hangs. A
    daemon thread waits for the signal, which must be blocked in every thread of the process (see ``prepare_child``)."""

    def watch() -> None:
        while True:
            signal.sigwait((DUMP_SIGNAL,))
            if recorder.enabled:
                dump_and_log(recorder, DUMP_SIGNAL.name)
            else:
                logger.warning("%s", OFF)

    threading.Thread(target=watch, name="flight-recorder", daemon=True).start()


class _Tables:
    """Values that many steps share, each written once: requests of decode batches, and their sampling parameters."""

    def __init__(self) -> None:
        self.compositions: dict[int, dict[str, object]] = {}
        self.samplings: list[dict[str, object]] = []
        self._numbers: dict[int, int] = {}  # index by id(); the steps keep these objects alive

    def composition(self, batch: StepBatch, rids: Sequence[str]) -> int:
        """The number under which a decode batch's requests, rows and sampling parameters are written."""
        if batch.composition not in self.compositions:
            self.compositions[batch.composition] = {
                "rids": rids,
                "rows": batch.rows,
                "sampling": [self.sampling(sampling) for sampling in batch.sampling],
            }
        return batch.composition

    def sampling(self, sampling: ReqSampling) -> int:
        """The index under which a request's sampling parameters are written."""
        number = self._numbers.get(id(sampling))
        if number is None:
            number = self._numbers[id(sampling)] = len(self.samplings)
            facts = {field.name: getattr(sampling, field.name) for field in dataclasses.fields(sampling)}
            params = {name: getattr(sampling.params, name) for name in _PARAMS}
            bias = [list(pair) for pair in (sampling.params.logit_bias or {}).items()]
            self.samplings.append({**facts, "params": {**params, "logit_bias": bias}})
        return number


def _step(step: StepRecord, tables: _Tables) -> dict[str, object]:
    batch = step.batch
    record: dict[str, object] = {
        "done": step.done,
        "passed": step.passed,
        "in_flight": step.in_flight,
        "after": _after(step.after),
        "events": [_event(event) for event in step.events],
        "page_writes": _page_writes(batch.page_writes),
        "tokens": step.tokens[0] if step.tokens else None,
        "counts": step.tokens[1] if len(step.tokens) > 1 else None,
    }
    if batch.is_decode:
        composition = tables.composition(batch, step.rids)
        told = {"composition": composition, "seq_lens": batch.seq_lens, "draft_depth": batch.depth._asdict()}
        return {**record, "mode": "decode", **told}
    sampled = iter(batch.sampling)
    samplings = [tables.sampling(next(sampled)) if samples else None for samples in batch.samples.tolist()]
    chunks = *batch.chunks, *[None] * batch.num_decodes
    columns = zip(step.rids, batch.rows.tolist(), batch.starts.tolist(), samplings, chunks, strict=True)
    return {**record, "mode": "extend", "seqs": [_seq(*facts) for facts in columns]}


def _seq(rid: str, row: int, start: int, sampling: int | None, chunk: Chunk | None) -> dict[str, object]:
    if chunk is None:  # it decodes: its token and its slot are known on the device only
        return {"rid": rid, "row": row, "prefix_len": start, "num_tokens": 1, "out_slots": (), "sampling": sampling}
    known = len(chunk.token_ids) == 0 or int(chunk.token_ids[0]) != REDACTED
    history = None
    if chunk.history is not None:
        prompt, output = chunk.history
        history = [prompt if known else len(prompt), output]
    return {
        "rid": rid,
        "row": row,
        "prefix_len": start,
        "num_tokens": len(chunk.token_ids),
        "token_ids": chunk.token_ids if known else None,
        "out_slots": chunk.out_slots,
        "sampling": sampling,
        "scored": [chunk.scored.start, chunk.scored.stop],
        "top_logprobs": chunk.top_logprobs,
        "token_ids_logprob": chunk.token_ids_logprob,
        "following": list(chunk.following),
        "history": history,
        "embeds": chunk.embeds,
    }


def _page_writes(writes: PageWrites) -> dict[str, object] | None:
    if not len(writes):
        return None
    return {"rows": writes.rows, "columns": writes.columns, "pages": writes.pages}


_KINDS = {Leaving: "leave", CompletionsEvent: "completions", Retirement: "retire_pages"}


def _event(event: Event) -> dict[str, object]:
    facts: dict[str, object] = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    if not isinstance(event, CompletionsEvent):
        facts["after"] = _after(event.after)
    if isinstance(event, Leaving):
        facts["pages"] = list(event.pages)
    return {"event": _KINDS[type(event)], **facts}


def _after(serials: Serials) -> dict[str, int]:
    return dict(serials)


def _req(req: Req) -> dict[str, object]:
    return {
        "rid": req.rid,
        "row": req.row,
        "pages": list(req.pages),
        "num_prompt_tokens": len(req.prompt_ids),
        "num_output_tokens": len(req.output_ids),
        "allocated_len": req.allocated_len,
        "committed_len": req.committed_len,
        "num_retractions": req.num_retractions,
    }
