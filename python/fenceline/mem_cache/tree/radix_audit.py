"""What must always hold for the nodes of a radix tree and the pages they own. Slow: for tests and audits."""

from __future__ import annotations

import numpy as np

from fenceline.mem_cache.tree.radix_node import Int32Array, TreeNode
from fenceline.memory_order.lease import LeasePool


def check_node(node: TreeNode, root: TreeNode, page_size: int) -> None:
    """AssertionError naming what is wrong with ``node``, which is below ``root``, or between it and its parent."""
    name, parent = f"node {node.id}", node.parent
    assert parent is not None, f"{name}: in the tree without a parent"
    assert parent.children.get(node.edge) is node, f"{name}: its parent does not know it by its edge"
    assert node.num_pages > 0, f"{name}: holds no page"
    assert node.tokens.size == node.num_pages * page_size, f"{name}: tokens and pages disagree in length"
    assert node.num_device_pages == (node.num_pages if node.on_device else 0), f"{name}: partly on the device"
    assert parent.on_device or not node.on_device, f"{name}: on the device below a node that is not"
    assert node.num_device_children == sum(child.on_device for child in node.children.values()), (
        f"{name}: miscounts its children on the device"
    )
    assert node.keys is None or len(node.keys) == node.num_pages, f"{name}: not one key for each page"
    assert node.edge.endswith(node.tokens[:page_size].tobytes()), (
        f"{name}: edge is not its first page's tokens"
    )
    assert parent is root or len(node.edge) == 4 * page_size, f"{name}: namespace below the first level"
    assert node.lock_ref >= sum(child.lock_ref for child in node.children.values()), (
        f"{name}: fewer locks than the nodes below it"
    )
    assert parent is root or node.last_access <= parent.last_access, f"{name}: newer than its parent"


def check_owned(pages: Int32Array, pool: LeasePool) -> None:
    """AssertionError unless ``pages`` (ascending) are all different and all leased from ``pool``."""
    again = np.unique(pages[1:][pages[1:] == pages[:-1]])
    assert again.size == 0, f"{pool.name} held twice: {again.tolist()}"
    lost = np.setdiff1d(pages, np.asarray(pool.owned(), dtype=np.int32))
    assert lost.size == 0, f"the tree holds {pool.name} that the pool has free or never had: {lost.tolist()}"
