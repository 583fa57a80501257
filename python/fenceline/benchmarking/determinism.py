"""--check-determinism: sends a sample of the answered prompts again, one at a time, and compares the answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fenceline.benchmarking.client import Client
from fenceline.benchmarking.records import Reply, RequestOutput


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of a replay. ``unit`` says whether ``position`` counts tokens or characters."""

    index: int
    turn: int
    unit: str
    position: int
    in_run: str
    in_replay: str


@dataclass(frozen=True, slots=True)
class DeterminismResult:
    """The result of the check. ``failed`` counts replays without an answer; ``first`` is the first difference in the
    order of requests, and ``first_error`` the reason of the first failure."""

    checked: int
    differ: int
    failed: int
    first: Difference | None = None
    first_error: str = ""


async def check_determinism(
    client: Client, outputs: list[RequestOutput], num_samples: int, seed: int
) -> DeterminismResult:
    """Send ``num_samples`` of the successful requests again, one at a time, with the same prompts and seeds."""
    good = [output for output in outputs if output.reply.success]
    rng = np.random.default_rng([seed, 2])
    chosen = sorted(rng.choice(len(good), size=min(num_samples, len(good)), replace=False).tolist())
    differences: list[Difference] = []
    errors: list[str] = []
    for i in chosen:
        replay = await client.send(good[i].call)
        if not replay.success:
            errors.append(replay.error)
        elif (difference := compare(good[i], replay)) is not None:
            differences.append(difference)
    return DeterminismResult(
        checked=len(chosen),
        differ=len(differences),
        failed=len(errors),
        first=differences[0] if differences else None,
        first_error=errors[0] if errors else "",
    )


def compare(output: RequestOutput, replay: Reply) -> Difference | None:
    """The first difference in token ids, or in text if the server gives no ids. None if there is no difference."""
    reply = output.reply
    if reply.output_ids is not None and replay.output_ids is not None:
        return _first_difference(output, "token", reply.output_ids, replay.output_ids)
    if reply.text == replay.text:
        return None
    return _first_difference(output, "character", list(reply.text), list(replay.text))


def _first_difference(
    output: RequestOutput, unit: str, left: list[int] | list[str], right: list[int] | list[str]
) -> Difference | None:
    if left == right:
        return None
    pairs = zip(left, right, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
    return Difference(output.index, output.turn, unit, position, _excerpt(left, position), _excerpt(right, position))


def _excerpt(items: list[int] | list[str], position: int, num: int = 8) -> str:
    """The items from ``position`` on, or a note that the output ended before it."""
    part = items[position : position + num]
    if not part:
        return f"(ended after {len(items)})"
    return repr("".join(str(c) for c in part)) if isinstance(part[0], str) else str(part)
