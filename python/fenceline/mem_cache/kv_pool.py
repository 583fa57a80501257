"""The cache on the device: the memory of all pages (KVPool), the rows of requests (ReqPool), and how many of both there
is room for."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import numpy as np
import torch

from fenceline.config.engine_config import EngineConfig
from fenceline.config.kv_layout import KVLayout, KVRow
from fenceline.memory_order import Device, LeasePool

# On a CPU the cache shares memory with everything else on the machine, so by default it is small.
_CPU_KV_BYTES = 4 << 30

logger = logging.getLogger(__name__)


class KVPool:
    """The rows of all layers for ``num_pages * page_size`` token slots.

    Slot ``s`` is token ``s % page_size`` of page ``s // page_size``, in every tensor of every layer: ``layout`` says
    which rows a slot has, and ``rows[layer]`` has their tensors by name. Page 0 is the reserved sink: padding may write
    it, and its values are never used. A page is a page of *all* layers, so one page id names the same tokens in each of
    them. Ownership of pages is the LeasePool's; this class only holds the bytes. They begin as zeros.

    ``dtype`` is the type that attention computes in. Rows of FP8 become it when they are read.
    """

    def __init__(
        self, num_pages: int, layout: KVLayout, device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        """``dtype``: that of the first row unless given."""
        assert num_pages >= 2, "the sink page alone can hold nothing"
        self.layout = layout
        self.num_pages = num_pages
        self.page_size = layout.page_size
        self.num_layers = layout.num_layers
        self.device = device
        self.dtype: torch.dtype = dtype or getattr(torch, layout.layers[0][0].dtype)
        self.rows: list[dict[str, torch.Tensor]] = []
        for layers in layout.alike:
            rows = layout.layers[layers.start]
            for tensors in _allocate(len(layers), rows, num_pages * layout.page_size, device):
                self.rows.append({row.name: tensor for row, tensor in zip(rows, tensors, strict=True)})
        # Each part of the layout as bytes, all pages: uint8 [num_pages, nbytes of the part], contiguous.
        self.parts = [
            self.row(part.layer, part.row.name).view(torch.uint8).view(num_pages, part.nbytes) for part in layout.parts
        ]

    @property
    def nbytes(self) -> int:
        return self.num_pages * self.layout.page_nbytes

    def row(self, layer: int, name: str) -> torch.Tensor:
        """The row ``name`` of one layer for all slots, [num_slots, *shape of the row]."""
        return self.rows[layer][name]

    def shares(self, layout: KVLayout) -> list[torch.Tensor]:
        """Each part divided into shares as large as the parts of ``layout`` (``KVLayout.share``): uint8 [num_pages,
        number of shares, nbytes of a share]."""
        sizes = zip(self.parts, layout.parts, strict=True)
        return [whole.view(self.num_pages, -1, share.nbytes) for whole, share in sizes]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor [num_slots, *shape of the row] in the order of the parts, with its name: ``layer3.k``."""
        for layer, rows in enumerate(self.rows):
            for name, tensor in rows.items():
                yield f"layer{layer}.{name}", tensor


class ReqPool:
    """``num_rows`` rows of device state, one for each running request: its page table and its last token. Row 0 is the
    sink, which only padding uses.

    All of it lives on the device and is only written on FORWARD, in program order with the steps that read it. That is
    what makes a row safe to hand to another request while its former owner's last step is still in flight (F13).

    ``page_table`` [num_rows, max_pages_per_req] int32 and ``last_tokens`` [num_rows] int64 are on the
    device. ``rows`` says who owns which row. ``position_deltas`` [num_rows] int64 says how far positions behind a
    prompt are from the tokens' places, where images may move them; None: nowhere. Every prefill step of a request
    writes its delta. ``tokens`` [num_rows, num_tokens] int32 are the tokens of each request, where drafts are looked up
    in them, and -1 for those of images; None: nowhere (``num_tokens`` 0).
    """

    def __init__(
        self,
        num_rows: int,
        max_pages_per_req: int,
        device: torch.device,
        moves_positions: bool = False,
        num_tokens: int = 0,
    ) -> None:
        self.num_rows = num_rows
        self.max_pages_per_req = max_pages_per_req
        self.rows = LeasePool("request rows", num_rows, reserved=1)
        # Zeros name the sink page, so an entry that has not been written never names live KV.
        self.page_table = torch.zeros((num_rows, max_pages_per_req), dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.position_deltas = torch.zeros_like(self.last_tokens) if moves_positions else None
        self.tokens = zeros((num_rows, num_tokens), torch.int32, device) if num_tokens else None

    def positions(self, places: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The positions of tokens behind the prompts of the first B of ``rows``, at ``places`` [B, ...] int64; these
        themselves where positions are never moved. A place before a request's first token is 0, and so is its
        position."""
        if self.position_deltas is None:
            return places
        deltas = self.position_deltas.index_select(0, rows[: len(places)])
        return (places + deltas.view(-1, *[1] * (places.dim() - 1))).clamp_(min=0)

    def write_pages(self, rows: torch.Tensor, columns: torch.Tensor, pages: torch.Tensor) -> None:
        """``page_table[rows, columns] = pages``; all [N], int64 but pages int32. Call on FORWARD only."""
        self.page_table.index_put_((rows, columns), pages)


class EmbeddingPool:
    """Embeddings of images: ``rows`` [num_rows, width], written and read on FORWARD alone. Row 0 is the sink, which
    tokens without an image name. The scheduler says which image has which rows (``scheduler/image_cache.py``)."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = zeros((num_rows, width), dtype, device)


def _allocate(
    num_layers: int, rows: tuple[KVRow, ...], num_slots: int, device: torch.device
) -> list[tuple[torch.Tensor, ...]]:
    """The tensors, [num_slots, *shape], of layers that are alike. Zeros: the sink is read by masked-out lanes of padded
    gathers, where NaN * 0 would still be NaN."""
    if device.type == "cuda" and len({(row.shape, row.dtype) for row in rows}) == 1:
        # In one tensor the layers are evenly spaced, so that the copy engine copies a page of all of them at once.
        shape = (num_layers, len(rows), num_slots, *rows[0].shape)
        return [tuple(layer) for layer in torch.zeros(shape, dtype=getattr(torch, rows[0].dtype), device=device)]
    return [
        tuple(zeros((num_slots, *row.shape), getattr(torch, row.dtype), device) for row in rows)
        for _ in range(num_layers)
    ]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On the CPU the system provides the memory of numpy's zeros when it is first written, so a pool of
    gigabytes takes no time at the start and no memory before it is used; torch.zeros would write all of it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)


def check_row_bytes(
    config: EngineConfig, device: Device, num_rows: int, max_pages_per_req: int, num_tokens: int
) -> None:
    """Raise ``ValueError`` with the remedy if there is not enough memory for a :class:`ReqPool` of this size, before it
    is allocated: 1 GiB by default on a large GPU."""
    free, _ = device.memory_info()
    nbytes = num_rows * (4 * (max_pages_per_req + num_tokens) + 8)
    if nbytes > free:
        raise ValueError(
            f"--max-running-requests {config.max_running_requests}: with --context-length"
            f" {config.model.context_length} their page tables take {nbytes / 1e9:.1f} GB, and"
            f" {free / 1e9:.1f} GB are free beside the weights; lower one of the two"
        )


def cache_budget(config: EngineConfig, device: Device, num_ranks: int = 1) -> int:
    """Bytes that ``--mem-fraction-static`` leaves for the cache beside what has been allocated. ``num_ranks``: see
    :func:`num_kv_pages`."""
    free, total = device.memory_info()
    if device.kind == "cpu":
        return min(int(free * config.mem_fraction_static), _CPU_KV_BYTES) // num_ranks
    return free - int(total * (1 - config.mem_fraction_static))


def num_kv_pages(config: EngineConfig, device: Device, layout: KVLayout, num_ranks: int = 1) -> int:
    """Number of pages of the KV pool, the sink page included. ``num_ranks``: how many ranks share the host's memory, if
    the device is the CPU. ``--max-total-tokens`` if given; else what ``--mem-fraction-static`` leaves beside weights
    and page tables (which are loaded by now), but no more than all running requests can use. Raises ``ValueError`` with
    the remedy when that is less than one request of two pages."""
    page_size, page_bytes = layout.page_size, layout.page_nbytes
    free, total = device.memory_info()
    if config.max_total_tokens is not None:
        num_pages = config.max_total_tokens // page_size
        if (num_pages + 1) * page_bytes > free:
            raise ValueError(
                f"--max-total-tokens {config.max_total_tokens}: the KV cache would take"
                f" {num_pages * page_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free beside the weights; give at"
                f" most {max(free // page_bytes - 1, 0) * page_size}, or leave it out"
            )
    else:
        budget = cache_budget(config, device, num_ranks)
        useful = config.max_running_requests * -(-config.model.context_length // page_size)
        num_pages = min(budget // page_bytes, useful)
    if num_pages < 2:
        raise ValueError(
            f"no room for the KV cache: {max(num_pages, 0)} pages of {page_bytes} bytes, {(total - free) / 2**30:.1f}"
            f" of {total / 2**30:.1f} GiB are in use; raise --mem-fraction-static or --max-total-tokens, use a smaller"
            " model, or end other programs"
        )
    logger.info(
        "Sized memory: %.2f of %.2f GiB are free beside the weights, the KV cache takes %.2f GiB (%d tokens)",
        free / 2**30, total / 2**30, num_pages * page_bytes / 2**30, num_pages * page_size,
    )  # fmt: skip
    return num_pages + 1
