"""ForwardResult: a launched step's outputs, leased until they are taken, and the Point when it is done."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fenceline.memory_order import Point, ResultLease

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LogprobValues:
    """Logprobs of N tokens: the tokens' own [N] and the best alternatives' [N, K] with their ids; ``named`` [N, W] are
    those of the tokens that each request names, where one does."""

    chosen: F32
    top: F32
    top_ids: I64
    named: F32 | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Host values of a step. ``next_tokens`` [S]: one for each request that sampled, in batch order.

    ``prompt_logprobs`` cover all wanted prompt positions of all requests, in batch order.
    """

    next_tokens: I64
    logprobs: LogprobValues | None
    prompt_logprobs: LogprobValues | None


class ForwardResult:
    """``done`` is the Point on FORWARD after which the step no longer touches any memory it was given."""

    def __init__(self, lease: ResultLease) -> None:
        self._lease = lease
        self.done: Point = lease.produced

    def arrived(self) -> bool:
        """Whether :meth:`wait` would not block; to be asked once a step."""
        return self._lease.arrived()

    def wait(self) -> StepOutput:
        """Block the host until the outputs are there. Raises LeaseError on a second call."""
        values = self._lease.wait()
        return StepOutput(
            next_tokens=np.asarray(values["next_tokens"], dtype=np.int64),
            logprobs=_logprobs(values, "out"),
            prompt_logprobs=_logprobs(values, "prompt"),
        )


def _logprobs(values: dict[str, npt.NDArray[np.generic]], prefix: str) -> LogprobValues | None:
    if f"{prefix}_chosen" not in values:
        return None
    named = values.get(f"{prefix}_named")
    return LogprobValues(
        chosen=np.asarray(values[f"{prefix}_chosen"], dtype=np.float32),
        top=np.asarray(values[f"{prefix}_top"], dtype=np.float32),
        top_ids=np.asarray(values[f"{prefix}_top_ids"], dtype=np.int64),
        named=None if named is None else np.asarray(named, dtype=np.float32),
    )
