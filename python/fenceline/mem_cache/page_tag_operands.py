"""Named operands of the kernels of ``page_tags``."""

from __future__ import annotations

from typing import NamedTuple

import torch

Tensor = torch.Tensor


class BegunTags(NamedTuple):
    """What changes when a step begins: the ``leases`` [N] of the entries (``rows``, ``columns``) of the page table, and
    of the pages ``retired[0]`` [M] the leases that have ended, ``retired[1]``. All int64."""

    expected: Tensor
    tags: Tensor
    rows: Tensor
    columns: Tensor
    leases: Tensor
    retired: Tensor


class Visit(NamedTuple):
    """Operands of ``visit_pages``: the fields of ``Visited``, whose ``ends`` are the starts before a layer, and of
    ``PageTags``."""

    rows: Tensor
    starts: Tensor
    ends: Tensor
    slots: Tensor
    query_starts: Tensor | None
    page_table: Tensor
    expected: Tensor
    tags: Tensor
    arrived: Tensor
    clock: Tensor
    findings: Tensor
    back: int
    page_size: int
    when: int
    layer: int


class MovedPages(NamedTuple):
    """Operands of the kernels of transfers: the fields of ``TransferPages``, and the tags that they read and write."""

    pages: Tensor
    host_pages: Tensor
    leases: Tensor
    known: Tensor
    sums: Tensor
    host: Tensor
    tags: Tensor
    arrived: Tensor
