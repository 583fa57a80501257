"""KVPool: the device memory of all keys and values, one pair of tensors per layer, addressed by slot."""

from __future__ import annotations

import math

import numpy as np
import torch


class KVPool:
    """K and V of every layer for ``num_pages * page_size`` token slots.

    Slot ``s`` is token ``s % page_size`` of page ``s // page_size``. Page 0 is the reserved sink: padding
    may write it, nobody reads it. A page is a page of *all* layers, so one page id names the same tokens
    in each of them. Ownership of pages is the page allocator's; this class only holds the bytes.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert num_pages >= 2, "the sink page alone can hold nothing"
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_layers = num_layers
        shape = (num_pages * page_size, num_kv_heads, head_dim)
        # Zeros: the sink is read by masked-out lanes of padded gathers, where NaN * 0 would still be NaN.
        self._k: list[torch.Tensor]
        self._v: list[torch.Tensor]
        if device.type == "cuda":
            # Evenly apart, so that the copy engine takes a page of all layers in one copy.
            layers = torch.zeros((num_layers, 2, *shape), dtype=dtype, device=device)
            self._k, self._v = list(layers[:, 0]), list(layers[:, 1])
        else:
            self._k = [_zeros(shape, dtype, device) for _ in range(num_layers)]
            self._v = [_zeros(shape, dtype, device) for _ in range(num_layers)]

    @staticmethod
    def bytes_per_page(
        page_size: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes that one page takes over all layers, K and V."""
        return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(t.nbytes for t in (*self._k, *self._v))

    def k(self, layer: int) -> torch.Tensor:
        """Keys of one layer, [num_slots, num_kv_heads, head_dim]."""
        return self._k[layer]

    def v(self, layer: int) -> torch.Tensor:
        """Values of one layer, [num_slots, num_kv_heads, head_dim]."""
        return self._v[layer]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On the CPU the system gives memory to a page when it is first written: a pool of gigabytes costs
    neither time at the start nor memory before it is used, as torch.zeros, which writes it all, would."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)
