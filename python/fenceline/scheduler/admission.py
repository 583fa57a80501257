"""Admission: whether a waiting request gets memory now, and which running ones are retracted for it.

There are four rules. The order of waiting requests is the queue's. A prefill step has a budget of tokens (``prefill``).
Memory has a budget, of which :func:`would_admit` keeps a reserve for bodies that hold little. A request of a higher
priority may have others retracted (:func:`preempted`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fenceline.mem_cache.tree.radix_cache import TreeNode
from fenceline.scheduler.req import Req
from fenceline.scheduler.request_memory import RequestMemory

# A request is not expected to need more new tokens than this when it is admitted, even if its limit is higher.
CLIP_NEW_TOKENS = 4096
# 1/16 of the memory and 1/32 of the rows are the reserve. A body may use it if it holds at most a quarter of it then.
# If a quarter is less than _LEAST_SMALL_TOKENS, there is no reserve.
_RESERVE_MEMORY, _RESERVE_ROWS, _NUM_SMALL = 16, 32, 4
_LEAST_SMALL_TOKENS = 256


@dataclass(slots=True)
class Holdings:
    """What running requests hold: the rows and the tokens (at their maximum lengths, in whole pages) of each HTTP body
    of several requests, and what is used of the reserve. ``num_spare``: slots after a request's last token that its
    last decode step writes. The reserve (``reserve_tokens`` of memory, ``reserve_rows``) is left to bodies that hold
    little. Without it, a short request would wait until one of the long ones ends that fill the memory, or one of the
    thousands of another body."""

    reserve_tokens: int = 0
    reserve_rows: int = 0
    page_size: int = 1
    num_spare: int = 0
    used_tokens: int = 0
    used_rows: int = 0
    rows: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, num_tokens: int, num_rows: int, page_size: int = 1, num_spare: int = 0) -> Holdings:
        """Nothing is held yet of a KV cache of ``num_tokens`` tokens and ``num_rows`` rows."""
        tokens = num_tokens // _RESERVE_MEMORY
        if tokens < _NUM_SMALL * _LEAST_SMALL_TOKENS:
            return cls(0, 0, page_size, num_spare)
        return cls(tokens, num_rows // _RESERVE_ROWS, page_size, num_spare)

    def admit(self, req: Req, in_reserve: bool) -> None:
        """Count a request that starts to run, ``in_reserve`` or not."""
        self._add(req, in_reserve, 1)

    def release(self, req: Req) -> None:
        """Count a request that has left."""
        self._add(req, req.in_reserve, -1)
        assert self.used_tokens >= 0 and self.used_rows >= 0, f"{req.rid} was not counted"

    def copy(self) -> Holdings:
        """A copy that changes by itself. Made in every prefill step, for which dataclasses.replace would be slow."""
        sizes = self.reserve_tokens, self.reserve_rows, self.page_size, self.num_spare
        return Holdings(*sizes, self.used_tokens, self.used_rows, self.rows.copy(), self.tokens.copy())

    def num_rows(self, req: Req) -> int:
        """The rows of the body of ``req``, which is admitted."""
        return self.rows.get(req.source.body, 1)

    def may_use_reserve(self, req: Req) -> bool:
        """Whether the reserve has room for ``req`` at its maximum length, and its body then holds little."""
        most = self._most_tokens(req)
        is_small = _NUM_SMALL * (self.tokens.get(req.source.body, 0) + most) <= self.reserve_tokens
        return is_small and self.used_tokens + most <= self.reserve_tokens

    @property
    def kept_tokens(self) -> int:
        """Tokens of memory that others may not take now."""
        return self.reserve_tokens - self.used_tokens

    @property
    def kept_rows(self) -> int:
        """Rows that others may not take now."""
        return max(self.reserve_rows - self.used_rows, 0)

    def _most_tokens(self, req: Req) -> int:
        """Tokens that the pages of ``req`` have room for at its maximum length."""
        return -(-(req.final_len + self.num_spare) // self.page_size) * self.page_size

    def _add(self, req: Req, in_reserve: bool, sign: int) -> None:
        num_tokens = sign * self._most_tokens(req)
        if in_reserve:
            self.used_tokens += num_tokens
            self.used_rows += sign
        body = req.source.body
        if body:
            self.rows[body] = self.rows.get(body, 0) + sign
            self.tokens[body] = self.tokens.get(body, 0) + num_tokens
            if not self.rows[body]:
                del self.rows[body], self.tokens[body]


class AdmissionState:
    """What admission decides by: memory as it is, or as it would be after retractions and admissions."""

    def __init__(self, memory: RequestMemory, holdings: Holdings, num_running: int, reserved_tokens: int) -> None:
        """``reserved_tokens``: what the ``num_running`` requests are expected to ask for yet."""
        self.memory = memory
        self.holdings = holdings.copy()
        self.num_pages = memory.num_available_pages
        self.num_rows = memory.rows.num_free
        self.num_running = num_running
        self.reserved_tokens = reserved_tokens
        # Whether a request is being passed that does not fit. Then only the reserve is left for those behind it.
        self.is_passing = False
        self._released: dict[TreeNode, int] = {}  # nodes, each as often as retracted requests unlock it
        self._pinned: set[TreeNode] = set()  # nodes that admitted requests lock

    def num_pages_for(self, req: Req) -> int:
        """The available pages that ``req`` would take: new ones, and those of its prefix that could be evicted now."""
        match = self.memory.match(req).match
        num_new = self.memory.num_pages_for(req.num_tokens) - len(match.pages)
        return num_new + sum(part.num_device_pages for part in self._evictable(match.host_node))

    def expected_tokens(self, req: Req) -> int:
        """Tokens that ``req`` is expected to ask for after it has been admitted."""
        return min(req.final_len - req.num_tokens + 1, CLIP_NEW_TOKENS) + self.holdings.num_spare

    def fits(self, num_pages: int, num_expected: int) -> bool:
        """Whether there is room beside the reserve and what running requests are expected to ask for."""
        size = self.memory.page_size
        left = (self.num_pages - num_pages) * size - self.reserved_tokens - self.holdings.kept_tokens
        return not self.is_passing and self.num_rows > self.holdings.kept_rows and num_expected <= left

    def may_be_passed(self, req: Req) -> bool:
        """Whether others may use the reserve while ``req`` waits. Not if it is so long that it needs the reserve too,
        because it might wait for ever."""
        size = self.memory.page_size
        num_tokens = self.memory.num_pages_for(req.num_tokens) * size + self.expected_tokens(req)
        left = self.memory.num_pages * size - self.holdings.reserve_tokens
        return self.holdings.kept_tokens > 0 and num_tokens <= left

    def admit(self, req: Req) -> bool:
        """Count the memory of ``req``, which would be admitted, as taken. Returns whether it is in the reserve."""
        num_pages, num_expected = self.num_pages_for(req), self.expected_tokens(req)
        in_reserve = self.num_running > 0 and not self.fits(num_pages, num_expected)
        self.num_pages -= num_pages
        self.num_rows -= 1
        assert self.num_pages >= 0 <= self.num_rows, f"{req.rid} has been promised memory that is not there"
        self.num_running += 1
        self.reserved_tokens += num_expected
        self._pinned.update(self.memory.match(req).match.host_node.path())
        self.holdings.admit(req, in_reserve)
        return in_reserve

    def retract(self, req: Req, num_expected: int) -> None:
        """Count what ``req`` holds, and the ``num_expected`` tokens that it was expected to ask for, as given back. No
        prefix may be matched afterwards that has not been before: that may split a node of these paths."""
        assert req.node is not None, f"{req.rid} does not run"
        path = req.node.path()
        for part in path:
            self._released[part] = self._released.get(part, 0) + 1
        self.num_pages += len(req.pages) - req.shared_len // self.memory.page_size
        self.num_pages += sum(part.num_device_pages for part in self._evictable(req.node))
        self.num_rows += 1
        self.num_running -= 1
        self.reserved_tokens -= num_expected
        self.holdings.release(req)

    def _evictable(self, end: TreeNode) -> list[TreeNode]:
        """The nodes of the path to ``end`` that nobody locks."""
        free = [part for part in end.path() if part.lock_ref == self._released.get(part, 0)]
        return [part for part in free if part not in self._pinned]


def would_admit(state: AdmissionState, req: Req) -> bool:
    """Whether ``req`` gets its memory: it is there, beside the reserve and what running requests are expected to ask
    for. A request that is alone may use everything, and one whose body holds little the reserve."""
    num_pages = state.num_pages_for(req)
    if num_pages > state.num_pages or state.num_rows == 0:
        return False
    if state.num_running == 0 or state.fits(num_pages, state.expected_tokens(req)):
        return True
    return state.holdings.may_use_reserve(req)


def loses_least(req: Req, holdings: Holdings) -> tuple[int, bool, int, int, int]:
    """Sort key for retraction; the smallest goes first: the lowest priority, those outside the reserve, the HTTP body
    that runs most requests, and then, as in SGLang, the fewest outputs and the longest prompt."""
    return -req.rank, req.in_reserve, -holdings.num_rows(req), len(req.output_ids), -len(req.prompt_ids)


def preempted(
    state: AdmissionState, wanted: Sequence[Req], running: Sequence[Req], expected: Sequence[int], threshold: int
) -> list[Req]:
    """The requests of ``running`` to retract so that those of ``wanted`` whose rank is better by more than
    ``threshold`` are admitted one after the other. As few as suffice are chosen, in the order of :func:`loses_least`,
    and none for a request that would not fit even then. ``expected``: tokens that each running one is expected to ask
    for. ``wanted`` is ordered by rank; ``state`` changes."""
    victims: list[Req] = []
    candidates = {
        req: num for req, num in zip(running, expected, strict=True) if wanted and req.rank - wanted[0].rank > threshold
    }
    for req in wanted:
        taken: list[Req] = []
        while not would_admit(state, req):
            # This is asked in every step while a request waits for memory, which mostly all of them together lack.
            most_pages = state.num_pages + sum(len(one.pages) for one in candidates)
            if not candidates or state.num_pages_for(req) > most_pages:
                return victims
            victim = min(candidates, key=lambda one: loses_least(one, state.holdings))
            if victim.rank - req.rank <= threshold:
                return victims
            state.retract(victim, candidates.pop(victim))
            taken.append(victim)
        state.admit(req)
        victims += taken
    return victims
