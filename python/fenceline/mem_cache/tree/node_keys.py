"""The storage keys of a node's pages: computed when first asked for, then kept on the node."""

from __future__ import annotations

from collections.abc import Callable

from fenceline.mem_cache.storage.page_hash import PageKey, page_keys
from fenceline.mem_cache.tree.radix_node import TreeNode


def keys_of(node: TreeNode, root_key: Callable[[str], PageKey], page_size: int) -> list[PageKey]:
    """The keys of ``node``'s pages, in token order; none for the root or a node that has left the tree.

    ``root_key`` gives the parent of a namespace's first page (``PageFingerprint.root_key``).
    """
    before: PageKey | None = None
    for part in node.path():
        if part.keys is None:
            before = root_key(_namespace(part, page_size)) if before is None else before
            part.keys = page_keys(before, part.tokens, page_size)
        before = part.keys[-1]
    return list(node.keys or ())


def _namespace(node: TreeNode, page_size: int) -> str:
    """The ``extra_key`` of a node of the first level: what its edge has before the first page's tokens."""
    return node.edge[: -4 * page_size].decode("utf-8", "surrogatepass")
