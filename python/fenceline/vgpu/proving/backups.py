"""Whether the pages that the write policy promises to copy to the host are copied in the step that it says, and whether
a match that was found earlier still tells where its pages are.

How often a page has been inserted is counted here, by its tokens and without the tree's own counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fenceline.mem_cache.hicache import HiCache
from fenceline.mem_cache.transfer import PageMove, Ticket
from fenceline.mem_cache.tree.radix_cache import MatchResult, TreeNode
from fenceline.scheduler.request_memory import RequestMemory
from fenceline.vgpu.proving.events import around

# By policy: how many insertions of a page are enough. Lookups count too, so it may be copied sooner.
_ENOUGH = {"write_through": 1, "write_through_selective": 2}


class Backups:
    """After the backups of each step that inserts something, looks for pages on the paths of what was inserted that
    have no copy on the host, although there was room; under write_back, for pages that leave the device without one.
    ``wrong``: what it has found."""

    def __init__(self, memory: RequestMemory, tiers: HiCache) -> None:
        self.wrong: list[str] = []
        self._tree = tree = tiers.tree
        self._enough = _ENOUGH.get(tree.write_policy)
        self._num_insertions: Counter[tuple[str, bytes]] = Counter()
        self._inserted: list[TreeNode] = []
        self._host_is_short = False  # in this step: a page does not fit, or another one has left for it
        around(tiers, "inserted", before=self._inserts)
        around(tree, "_detach", before=self._forgets)
        around(tree, "reset", before=self._num_insertions.clear)
        around(tree, "evict_host", before=lambda *args: self._runs_short())
        around(tree._host, "alloc", after=lambda leased, *args: self._runs_short(leased is None))
        around(tree._host, "_evict_all", after=lambda num, _: self._runs_short(num > 0))
        around(memory, "write_backups", after=lambda _: self._compare())
        self._lacking: set[TreeNode] = set()  # of the nodes that are to be copied now, those without a copy
        self._spill_is_short = False
        around(tree, "evict", before=self._begin_spill)
        around(tree._host, "alloc", after=lambda leased, *args: self._note_spill(leased is None))
        around(tree, "_leave_device", before=self._leaves)
        around(tree, "begin_backup", before=self._begin_backup, after=self._end_backup)
        around(tree, "is_current", after=self._compare_match)

    def _begin_spill(self, num_pages: int) -> None:
        self._spill_is_short = False

    def _note_spill(self, is_short: bool) -> None:
        self._spill_is_short |= is_short

    def _leaves(self, node: TreeNode) -> None:
        """Under write_back no page leaves the device without a copy as long as the host has room."""
        if self._tree.write_policy == "write_back" and node.host_pages is None and not self._spill_is_short:
            self._note(f"pages {node.pages.tolist()} leave the device, and the host has room for a copy")

    def _begin_backup(self, nodes: Sequence[TreeNode], ticket: Ticket) -> None:
        self._lacking = {node for node in nodes if node.host_pages is None}

    def _end_backup(self, move: PageMove, nodes: Sequence[TreeNode], ticket: Ticket) -> None:
        """Pages are of no use without those in front of them, so none is copied if these do not fit."""
        for node in self._lacking:
            if (
                node.host_pages is not None
                and node.parent in self._lacking
                and node.parent.host_pages is None
            ):
                self._note(
                    f"host pages {node.host_pages.tolist()} are filled, and not those in front of them"
                )

    def _compare_match(self, said: bool, match: MatchResult) -> None:
        """A match is current while its pages are where it says, on the device and on the host."""
        path = match.host_node.path()
        pages = [page for part in path if part.on_device for page in part.pages.tolist()]
        num_on_host = sum(part.num_pages for part in path if not part.on_device) * self._tree.page_size
        is_there = not path or path[0].parent is self._tree.root
        right = is_there and pages == match.pages.tolist() and num_on_host == match.num_host_tokens
        if said and not right:
            self._note(f"a match of pages {match.pages.tolist()} is used, and they have moved")
        if right and not said and match.node.version == match.version:
            self._note(f"a match of pages {match.pages.tolist()} is looked up again, and they have not moved")

    def _note(self, text: str) -> None:
        if len(self.wrong) < 5:
            self.wrong.append(f"{self._tree.write_policy}: {text}")

    def _runs_short(self, is_short: bool = True) -> None:
        self._host_is_short |= is_short

    def _inserts(self, node: TreeNode) -> None:
        self._inserted.append(node)
        self._num_insertions.update(page for part in node.path() for page in self._pages(part))

    def _forgets(self, node: TreeNode) -> None:
        for page in self._pages(node):
            self._num_insertions.pop(page, None)

    def _compare(self) -> None:
        inserted, is_short = self._inserted, self._host_is_short
        self._inserted, self._host_is_short = [], False
        if is_short or self._enough is None:
            return
        for part in dict.fromkeys(part for node in inserted for part in node.path()):
            if not part.on_device or part.host_pages is not None:
                continue
            nums = [self._num_insertions[page] for page in self._pages(part)]
            if nums and max(nums) >= self._enough:
                self._note(
                    f"pages {part.pages.tolist()} have been inserted {max(nums)} times, and are not copied to the host,"
                    " which has room"
                )

    def _pages(self, node: TreeNode) -> Iterator[tuple[str, bytes]]:
        """The namespace of each page of ``node``, and all tokens to its end and its lookahead."""
        path, size, lookahead = node.path(), self._tree.page_size, self._tree.lookahead
        if not path:
            return
        namespace = self._tree.namespace(path[0])
        tokens = [token for part in path for token in part.tokens[: part.tokens.size - lookahead].tolist()]
        tokens += node.tokens[node.tokens.size - lookahead :].tolist()
        for upto in range(len(tokens), len(tokens) - node.tokens.size + lookahead, -size):
            yield namespace, bytes(str(tokens[:upto]), "ascii")
