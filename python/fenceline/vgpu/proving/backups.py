"""Whether the pages that the write policy promises to copy to the host are copied in the step that it says.

How often a page has been inserted is counted here, by its tokens and without the tree's own counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fenceline.mem_cache.hicache import HiCache
from fenceline.mem_cache.tree.radix_cache import TreeNode
from fenceline.scheduler.request_memory import RequestMemory
from fenceline.vgpu.proving.events import around

# By policy: how many insertions of a page are enough. Lookups count too, so it may be copied sooner.
_ENOUGH = {"write_through": 1, "write_through_selective": 2}


class Backups:
    """After the backups of each step that inserts something, looks for pages on the paths of what was inserted that
    have no copy on the host, although there was room. ``wrong``: what it has found."""

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
            if nums and max(nums) >= self._enough and len(self.wrong) < 5:
                self.wrong.append(
                    f"{self._tree.write_policy}: pages {part.pages.tolist()} have been inserted {max(nums)} times, and"
                    " are not copied to the host, which has room"
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
