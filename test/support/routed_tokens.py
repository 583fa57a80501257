"""Where a router might send tokens."""

from __future__ import annotations

import torch

from fenceline.layers.kernels.base import Routing


def routed(num_tokens: int, top_k: int, hit: list[int], num_experts: int, num_padded: int = 0) -> Routing:
    """Random experts among ``hit``; the last ``num_padded`` tokens go to none."""
    ids = torch.stack([torch.tensor(hit)[torch.randperm(len(hit))[:top_k]] for _ in range(num_tokens)])
    ids[num_tokens - num_padded :] = num_experts
    return Routing.group(ids, torch.rand(num_tokens, top_k), num_experts)
