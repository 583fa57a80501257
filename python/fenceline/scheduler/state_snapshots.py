"""StateSnapshots: which states of recurrent layers are kept for other requests, and which requests begin with them.

A state exists at multiples of ``grid`` tokens. Its snapshot belongs to the request whose step makes it until the tree
has the pages before it, and then to their node. Copies to and from rows are made on FORWARD in the order of the calls
here, so that a snapshot may be given back and leased again in the turn in which a request begins with it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import numpy as np

from fenceline.mem_cache.hicache import HiCache
from fenceline.mem_cache.transfer import Ticket
from fenceline.mem_cache.tree.radix_cache import MatchResult, RadixCache, TreeNode
from fenceline.memory_order import Points
from fenceline.model_executor.step import Worker
from fenceline.scheduler.req import Req


class StateSnapshots:
    """The snapshots that requests own, and copies of states. One thread, the scheduler's, calls it."""

    def __init__(
        self,
        tree: RadixCache,
        grid: int = 0,
        worker: Worker | None = None,
        same_state: Callable[[int, int], bool] = operator.eq,
        tiers: HiCache | None = None,
    ) -> None:
        """``grid``: tokens between two states, a multiple of the page size; 0: the model has none. ``worker``
        makes the copies. ``same_state`` compares the numbers of two states of a request, in steps of ``grid``.
        ``tiers``: the tree's lower tiers, if there are any."""
        assert grid % tree.page_size == 0 and (tree.states is not None) == (grid > 0)
        self.grid = grid
        self._tree = tree
        self._worker = worker
        self._same_state = same_state
        self._tiers = tiers
        self._loading: list[tuple[Req, TreeNode]] = []  # requests that begin with the node's state, in the next load

    def begin(self, req: Req, match: MatchResult, after: Points) -> None:
        """``req`` has got its row, accessible after ``after``, and begins with the state of its ``match``."""
        if match.state:
            done = self._copy_state(match.state, req.row, after)
            self._tree.read_state(match.node, done)
        elif match.loads_state:
            assert self._tiers is not None, "only a host tier has host states"
            self._tiers.begin_load_state(match.host_node, req.row, after)
            self._loading.append((req, match.host_node))

    def loads_started(self, tickets: Sequence[Ticket]) -> None:
        """The loads have been submitted, as ``tickets``: their states are copied to snapshots too, for others."""
        loading, self._loading = self._loading, []
        for req, node in loading:
            leased = None if node.state else self._tree.lease_state()
            if leased is not None:
                after = leased[1].join(tickets[0].state_points)
                self._tree.set_state(node, leased[0], self._copy_state(req.row, leased[0], after))

    def fork(self, req: Req, match: MatchResult) -> int:
        """The last point of the grid up to which ``req`` and an earlier request have the same tokens, if no state is
        kept there: one of its chunks ends there and leaves one, for all who begin as they do. Otherwise 0.

        A prompt that ends at a point of the grid leaves a state too far on for itself, because a token has to be
        computed. It is cut one block earlier for the other samples that wait for it, and for others from the third
        request on: to cut each such prompt would be a step more for all whose length is a round number."""
        if not self.grid or self._tree.disabled:
            return 0
        num_same = match.num_known // self.grid * self.grid
        if req.samples is not None and req.num_tokens == len(req.prompt_ids) and req.num_tokens % self.grid == 0:
            num_same = req.num_tokens - self.grid
        num_found = match.num_tokens + match.num_host_tokens
        return num_same if num_found < num_same < req.num_tokens // self.grid * self.grid else 0

    def take(self, req: Req, num_tokens: int) -> tuple[int, Points] | None:
        """The slot to which a step copies the state of ``req`` behind its layers as it brings it to ``num_tokens``,
        and the Points after which it may: that at the last point of the grid, for requests that have these tokens too.
        None if it makes no copy."""
        if not self.grid or self._tree.disabled:
            return None
        position = num_tokens // self.grid * self.grid
        if position <= req.snapshot_len:
            return None
        leased = self._tree.lease_state()
        if leased is None and req.snapshots:  # of a long prompt: the latest ones are worth more than the first
            leased = req.snapshots.pop(0)[1], Points.none()
        if leased is not None:
            req.snapshot_len = position
            req.snapshots.append((position, leased[0]))
        return leased

    def take_last(self, req: Req, num_tokens: int) -> None:
        """Copy the state of ``req``, which has left, if its pages are shared up to there: up to its first
        ``num_tokens``; unless a step in flight may bring it further. (Of a request that decodes, one step may be in
        flight: of one token, or one that absorbs those accepted before it.)"""
        if not self.grid:
            return
        first, last = req.verified or (req.committed_len, max(req.allocated_len, req.committed_len + 1))
        if first // self.grid * self.grid <= num_tokens and self._same_state(last // self.grid, first // self.grid):
            taken = self.take(req, first)
            if taken is not None:
                req.last_flight = req.last_flight.join(self._copy_state(req.row, *taken))

    def give(self, req: Req, num_tokens: int) -> None:
        """Hand the snapshots of the first ``num_tokens`` of ``req``, whose pages the tree has, to the tree."""
        if not req.snapshots:
            return
        tokens = req.key_ids()
        while req.snapshots and req.snapshots[0][0] <= num_tokens:
            position, slot = req.snapshots.pop(0)
            length = position + self._tree.lookahead
            self._tree.give_state(tokens[:length], slot, req.last_flight, req.source.extra_key)

    def drop(self, req: Req) -> None:
        """Give back the snapshots of ``req``, which leaves: those of steps that have not been published."""
        for _, slot in req.snapshots:
            self._tree.retire_state(slot, req.last_flight)
        req.snapshots.clear()

    def check_memory(self) -> None:
        """Raises ``RuntimeError`` unless every leased snapshot is in the tree."""
        states = self._tree.states
        if states is not None and states.num_leased != self._tree.num_states:
            lost = np.setdiff1d(states.owned(), self._tree.all_states()).tolist()
            raise RuntimeError(f"snapshots of states that nobody has while idle: {lost[:8]}")

    def _copy_state(self, source: int, slot: int, after: Points) -> Points:
        assert self._worker is not None, "the model has states"
        return Points.of(self._worker.copy_state(source, slot, after))
