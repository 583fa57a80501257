"""Concatenates embeddings and hidden states for the first product of a draft model, in one launch.

The reference with torch's operators is used on the CPU and the virtual GPU. The Triton kernel for CUDA is imported when
it is first used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from fenceline.layers.kernels.base import LayerKernels
from fenceline.memory_order.kernel import declared

_TORCH = LayerKernels()


class JoinNorms(NamedTuple):
    """The weights of the RMSNorms of embeddings [E] and of hidden states [H], and their eps."""

    embeddings: torch.Tensor
    hidden: torch.Tensor
    eps: float


def _reference(
    ids: torch.Tensor,
    table: torch.Tensor,
    hidden: torch.Tensor,
    embeddings_norm: torch.Tensor | None,
    hidden_norm: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
) -> None:
    embedded = F.embedding(ids, table)
    if embeddings_norm is not None and hidden_norm is not None:
        embedded = _TORCH.rms_norm(embedded, embeddings_norm, eps)
        hidden = _TORCH.rms_norm(hidden, hidden_norm, eps)
    torch.cat((embedded, hidden), dim=-1, out=out)


KERNEL = declared("embed_and_join", _reference, "embeddings_norm hidden_norm | > table[ids] hidden -> out")


def embed_and_join(
    ids: torch.Tensor, table: torch.Tensor, hidden: torch.Tensor, norms: JoinNorms | None = None
) -> torch.Tensor:
    """A new tensor [T, E + H]. Row t is ``table[ids[t]]``, then ``hidden[t]``, each normalised if ``norms`` is given.
    ``ids`` [T] int64, in [0, V) (not checked); ``table`` [V, E] and ``hidden`` [T, H] contiguous, of one dtype. On the
    current stream; on CUDA it is one launch. No host synchronisation; a graph may capture it."""
    out = hidden.new_empty(len(ids), table.shape[1] + hidden.shape[1])
    if ids.is_cuda:
        from fenceline.layers.kernels.triton.embed_join import launch

        launch(ids, table, hidden, norms, out, torch.cuda.get_device_capability(ids.device) >= (9, 0))
        return out

    weights, eps = ((None, None), 0.0) if norms is None else ((norms.embeddings, norms.hidden), norms.eps)
    KERNEL.run(ids, table, hidden, *weights, out, eps)
    return out
