"""StateSnapshots: which states of recurrent layers are kept for other requests, and which requests begin with them.

A state exists at multiples of ``grid`` tokens. Its snapshot belongs to the request whose step makes it until the tree
has the pages before it, and then to their node. All copies are made in the order of the calls here, on FORWARD, so that
a snapshot may be given back and leased again in the turn in which a request begins with it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fenceline.mem_cache.tree.radix_cache import MatchResult, RadixCache
from fenceline.memory_order import Points
from fenceline.model_executor.step import StepBatch
from fenceline.scheduler.req import Req

I32 = npt.NDArray[np.int32]


class StateSnapshots:
    """The snapshots that requests own, and the copies that steps make. One thread, the scheduler's, calls it."""

    def __init__(self, tree: RadixCache, grid: int = 0, same_state: Callable[[int, int], bool] = operator.eq) -> None:
        """``grid``: tokens between two states, a multiple of the page size; 0: the model has none. ``same_state``
        compares the numbers of two states of a request, in steps of ``grid``."""
        assert grid % tree.page_size == 0 and (tree.states is not None) == (grid > 0)
        self.grid = grid
        self.copies: list[tuple[int, int]] = []  # see StateCopies.before: that no step has made yet
        self._tree = tree
        self._same_state = same_state
        if tree.states is not None:
            tree.states.observers += (self._given_back,)

    def begin(self, req: Req, match: MatchResult) -> None:
        """``req`` has got its row, and begins with the state of its ``match``."""
        if match.state:
            self.copies.append((match.state, req.row))

    def fork(self, req: Req, match: MatchResult) -> int:
        """The last point of the grid up to which ``req`` and an earlier request have the same tokens, if no state is
        kept there: one of its chunks ends there and leaves one, for all who begin as they do. Otherwise 0."""
        if not self.grid:
            return 0
        num_same = match.num_known // self.grid * self.grid
        return num_same if match.num_tokens < num_same < req.num_tokens // self.grid * self.grid else 0

    def take(self, req: Req, num_tokens: int) -> Sequence[tuple[int, int]]:
        """The copies, at most one, that a step makes after its layers because it brings ``req`` to ``num_tokens``: of
        the state at the last point of the grid, for requests that have these tokens too."""
        if not self.grid or self._tree.disabled:
            return ()
        position = num_tokens // self.grid * self.grid
        if position <= req.snapshot_len:
            return ()
        slot = self._tree.lease_state()
        if not slot and req.snapshots:  # of a long prompt: the latest ones are worth more than the first
            slot = req.snapshots.pop(0)[1]
        if not slot:
            return ()
        req.snapshot_len = position
        req.snapshots.append((position, slot))
        return ((req.row, slot),)

    def take_last(self, req: Req, num_tokens: int) -> None:
        """Have the next step copy the state of ``req``, which has left, at the last point of the grid in its first
        ``num_tokens``; unless a step in flight may bring it beyond that point. (Of a request that decodes, one step of
        one token may be in flight.)"""
        if not self.grid:
            return
        end = max(req.allocated_len, req.committed_len + 1)
        if self._same_state(end // self.grid, req.committed_len // self.grid):
            self.copies += self.take(req, num_tokens)

    def give(self, req: Req, num_tokens: int) -> None:
        """Hand the snapshots of the first ``num_tokens`` of ``req``, whose pages the tree has, to the tree."""
        if not req.snapshots:
            return
        tokens = req.key_ids()
        while req.snapshots and req.snapshots[0][0] <= num_tokens:
            position, slot = req.snapshots.pop(0)
            self._tree.give_state(tokens[:position], slot, req.source.extra_key)

    def drop(self, req: Req) -> None:
        """Give back the snapshots of ``req``, which leaves: those of steps that have not been published."""
        for _, slot in req.snapshots:
            self._tree.retire_state(slot)
        req.snapshots.clear()

    def with_copies(self, batch: StepBatch) -> StepBatch:
        """``batch`` with the copies that it makes before its layers."""
        if not self.copies:
            return batch
        before, self.copies = tuple(self.copies), []
        return replace(batch, state_copies=batch.state_copies._replace(before=before))

    def check_memory(self) -> None:
        """Raises ``RuntimeError`` unless every leased snapshot is in the tree."""
        states = self._tree.states
        if states is not None and states.num_leased != self._tree.num_states:
            lost = np.setdiff1d(states.owned(), self._tree.all_states()).tolist()
            raise RuntimeError(f"snapshots of states that nobody has while idle: {lost[:8]}")

    def _given_back(self, slots: I32, _after: Points) -> None:
        """The next step does not make the copies to these, but for those with which a request begins."""
        read = {source for source, _ in self.copies}
        self.copies = [copy for copy in self.copies if copy[1] not in slots or copy[1] in read]
