"""Attention backends by the name that --attention-backend gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from fenceline.layers.attention.base import AttentionBackend
from fenceline.layers.attention.torch_backend import TorchAttentionBackend
from fenceline.mem_cache.kv_pool import KVPool

ATTENTION_BACKENDS: Mapping[str, Callable[[KVPool], AttentionBackend]] = MappingProxyType(
    {"torch": TorchAttentionBackend}
)


def make_attention_backend(name: str, kv_pool: KVPool) -> AttentionBackend:
    """The backend called ``name`` over ``kv_pool``. Raises ``ValueError`` naming the known ones."""
    if name not in ATTENTION_BACKENDS:
        known = ", ".join(sorted(ATTENTION_BACKENDS))
        raise ValueError(f"--attention-backend {name} is unknown; use {known}")
    return ATTENTION_BACKENDS[name](kv_pool)
