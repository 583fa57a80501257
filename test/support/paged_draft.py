"""A target and a draft over one pool of pages, with the steps that a draft's runner does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from model_parity import PagedModel

from fenceline.config.draft_config import SpeculativeAlgorithm, read_draft_config
from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import Shard, torch_context
from fenceline.layers.forward_batch import AuxHiddenStates, ForwardMode
from fenceline.models.decoder import CausalLM
from fenceline.models.draft import DraftModel
from fenceline.models.loader import load_draft_model


@dataclass(frozen=True)
class Rows:
    """Rows ``[start, start + len(ids))`` of the request in row ``row`` of the page table, with their inputs."""

    row: int
    start: int
    ids: torch.Tensor
    hidden: torch.Tensor


class PagedDraft(PagedModel):
    """A target and a draft over one pool of pages."""

    def __init__(
        self,
        directory: Path,
        page_size: int,
        algorithm: SpeculativeAlgorithm,
        draft_dir: Path | None,
        shard: Shard | None = None,
    ) -> None:
        context = torch_context(shard or Shard(), torch.float32)
        self.aux_layers: tuple[int, ...] = ()

        def make(target: CausalLM) -> tuple[DraftModel, ModelConfig]:
            config = read_draft_config(algorithm, None if draft_dir is None else str(draft_dir), target.config)
            self.aux_layers = config.aux_layers
            draft = load_draft_model(config, "auto", torch.device("cpu"), context, 0, progress=False, target=target)
            return draft, config.model

        super().__init__(directory, page_size, "cpu", context=context, make_draft=make)

    @torch.inference_mode()
    def target_step(self, work: Sequence[tuple[int, torch.Tensor, int, int]]) -> list[torch.Tensor]:
        """Run tokens of the target (see ``PagedModel.step``) → the draft's first hidden states for each request."""
        assert self.draft is not None
        num_tokens = sum(end - start for *_, start, end in work)
        aux = None
        if self.aux_layers:
            width = len(self.aux_layers) * self.config.hidden_size
            aux = AuxHiddenStates(self.aux_layers, torch.full((num_tokens, width), float("nan")))
        x = self.model.hidden_states(self.batch(work, ForwardMode.EXTEND, aux_hidden=aux))
        first = self.draft.hidden_states_from(x, aux and aux.out)
        return list(first.split([end - start for *_, start, end in work]))

    @torch.inference_mode()
    def draft_step(
        self, work: Sequence[Rows], mode: ForwardMode, step: int = 0
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """One step of the draft for several requests → (logits, next hidden states) of each."""
        assert self.draft is not None
        padded = [torch.cat((torch.zeros(rows.start, dtype=torch.int64), rows.ids)) for rows in work]
        spans = [(rows.row, ids, rows.start, len(ids)) for rows, ids in zip(work, padded, strict=True)]
        hidden = torch.cat([rows.hidden for rows in work])
        before = hidden.clone()
        logits, after = self.draft.forward(self.batch(spans, mode), hidden, step)
        assert torch.equal(hidden, before), "the hidden states that a draft is given are still needed"
        sizes = [len(rows.ids) for rows in work]
        return list(zip(logits.split(sizes), after.split(sizes), strict=True))
