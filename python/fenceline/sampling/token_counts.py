"""Which tokens each penalised request has seen: the table behind repetition, frequency and presence penalties."""

from __future__ import annotations

import torch

# One int16 per (row, token): bit 14 says "in the prompt", the bits below count outputs and stop at their maximum.
# Zero means never seen.
_IN_PROMPT = 1 << 14
_MAX_COUNT = _IN_PROMPT - 1


class TokenCounts:
    """Owns a [num_rows, V] int16 table (2 * num_rows * V bytes). All methods run on the current stream, in program
    order with the sampler; none synchronises with the host."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._table = torch.zeros((num_rows, vocab_size), dtype=torch.int16, device=device)

    def begin(self, row: int, prompt_ids: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Forget what ``row`` held and count the given tokens (1-D int64, on the table's device)."""
        counts = torch.zeros(self._table.shape[1], dtype=torch.int32, device=self._table.device)
        counts.scatter_add_(0, output_ids, torch.ones_like(output_ids, dtype=torch.int32))
        counts.clamp_(max=_MAX_COUNT)
        entry = self._table[row]
        entry.zero_().index_fill_(0, prompt_ids, _IN_PROMPT)
        entry.add_(counts.to(torch.int16))

    def add(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Count one output token of each of the distinct ``rows``; both [P] int64."""
        entries = self._table[rows, token_ids]
        room = (entries & _MAX_COUNT) < _MAX_COUNT
        self._table[rows, token_ids] = entries + room

    def apply(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        repetition: torch.Tensor,
        frequency: torch.Tensor,
        presence: torch.Tensor,
    ) -> torch.Tensor:
        """Penalised copy of ``logits`` [P, V] float32 for request rows ``rows`` [P]; penalties are [P] float32.

        Repetition first, on every token of prompt or output: a positive logit is divided, a negative multiplied
        (Keskar et al. 2019, as in transformers). Then, on output tokens, ``frequency * count + presence`` is taken
        off (OpenAI's formula). Neutral penalties change no bit.
        """
        entries = self._table.index_select(0, rows)
        factor = repetition[:, None]
        repeated = torch.where(logits < 0, logits * factor, logits / factor)
        logits = torch.where(entries > 0, repeated, logits)
        counts = entries.bitwise_and_(_MAX_COUNT)
        logits -= counts * frequency[:, None]
        logits -= (counts > 0) * presence[:, None]
        return logits
