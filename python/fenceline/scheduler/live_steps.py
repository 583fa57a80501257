"""The flight recorder's last steps as counts, which the web page draws a few times a second while it is open.

The counts contain no request ids, tokens or page ids, so any client may see them, and their size does not depend on the
batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import orjson

from fenceline.memory_order.edges import StreamName, pages_edge
from fenceline.scheduler.flight_recorder import CompletionsEvent, Event, FlightRecorder, Leaving, Retirement, StepRecord


def live_steps(recorder: FlightRecorder, num_steps: int) -> bytes:
    """The last ``num_steps`` steps as a JSON object: ``steps``, oldest first, and the ``events`` since the last launch.

    Each step has

    * ``mode`` (extend or decode), ``reqs`` (the number of requests) and ``tokens`` (the number of tokens computed);
    * ``done``: the serial of the Point that ends the step, by which it is identified;
    * ``in_flight``: how many earlier steps were not published yet when it was launched;
    * ``published``: whether its own results have been published;
    * ``after``: the other streams whose pages it reuses, each with the name of the edge;
    * ``events`` between the launch before and this one, as counts: requests that ``left`` (by reason),
      ``retired_pages``, ``transfers`` that had ended (by kind), and ``storage`` jobs. Counts of 0 are left out.
    """
    steps, events = recorder.snapshot(num_steps)
    return orjson.dumps({"steps": [_step(step) for step in steps], "events": _counts(events)})


def _step(step: StepRecord) -> dict[str, object]:
    batch = step.batch
    return {
        "mode": "decode" if batch.is_decode else "extend",
        "reqs": len(step.rids),
        "tokens": len(step.rids) if batch.is_decode else batch.num_prompt_tokens,
        "done": step.done,
        "in_flight": step.in_flight,
        "published": bool(step.tokens),
        "after": [
            [stream, pages_edge(StreamName.FORWARD, StreamName(stream)).name]
            for stream, _ in step.after
            if stream != StreamName.FORWARD.value
        ],
        "events": _counts(step.events),
    }


def _counts(events: Sequence[Event]) -> dict[str, object]:
    left: Counter[str] = Counter()
    transfers: Counter[str] = Counter()
    retired_pages = storage = 0
    for event in events:
        match event:
            case Leaving():
                left[event.why] += 1
            case Retirement():
                retired_pages += len(event.pages)
            case CompletionsEvent():
                transfers.update(kind for kind, _, _ in event.transfers)
                storage += len(event.storage)
    counts = {"left": left, "retired_pages": retired_pages, "transfers": transfers, "storage": storage}
    return {name: count for name, count in counts.items() if count}
