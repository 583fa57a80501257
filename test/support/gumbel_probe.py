"""A Triton kernel that shows the noise which ``sample_tokens`` draws with; import it where Triton is."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fenceline.layers.kernels.triton.sample import _gumbel, _row_keys


def kernel_noise(seed_keys: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[B, vocab_size] float32 for seed_keys and positions [B] int64; vocab_size a power of two."""
    out = torch.empty(len(positions), vocab_size, device=positions.device)
    _noise_kernel[(len(positions),)](seed_keys, positions, out, BLOCK=vocab_size)
    return out


@triton.jit
def _noise_kernel(seed_keys, positions, out, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    key_a, key_b = _row_keys(tl.load(seed_keys + row), tl.load(positions + row))
    ids = tl.arange(0, BLOCK)
    tl.store(out + row * BLOCK + ids, _gumbel(ids, key_a, key_b))
