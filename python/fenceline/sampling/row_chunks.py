"""Work on [rows, vocabulary] tensors in pieces of rows: temporaries stay bounded whatever the batch."""

from __future__ import annotations

import torch

# 16 MiB of float32: small beside any model, inside a large GPU's L2, and large enough that launches do not count.
CHUNK_ELEMENTS = 1 << 22


def row_chunks(num_rows: int, num_columns: int) -> list[slice]:
    """Slices that cut ``num_rows`` rows into pieces of at most ``CHUNK_ELEMENTS`` elements (at least one row)."""
    step = max(1, CHUNK_ELEMENTS // max(1, num_columns))
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def take_rows(values: torch.Tensor, index: torch.Tensor | None, rows: slice) -> torch.Tensor:
    """Rows ``index[rows]`` of ``values``, copied; with ``index`` None, rows ``rows``, a view."""
    return values[rows] if index is None else values.index_select(0, index[rows])
