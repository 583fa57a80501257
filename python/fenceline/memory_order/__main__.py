"""Prints the table of edges: ``python -m fenceline.memory_order > docs/internals/edges.md``."""

from fenceline.memory_order.edges import edges_markdown

print(edges_markdown(), end="")
