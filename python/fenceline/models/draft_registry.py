"""Makes the draft model for the algorithm that --speculative-algorithm names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from types import MappingProxyType

from fenceline.config.draft_config import DraftConfig, SpeculativeAlgorithm
from fenceline.layers.context import LayerContext
from fenceline.models.decoder import CausalLM
from fenceline.models.draft import DraftModel, StandaloneDraft
from fenceline.models.eagle import EagleDraft
from fenceline.models.eagle3 import Eagle3Draft
from fenceline.models.families import make_model
from fenceline.models.mtp import MTPDraft


def _standalone(config: DraftConfig, context: LayerContext, target: CausalLM, names: Set[str]) -> DraftModel:
    return StandaloneDraft(make_model(config.model, context, first_layer=target.num_layers))


_DRAFTS: Mapping[SpeculativeAlgorithm, Callable[[DraftConfig, LayerContext, CausalLM, Set[str]], DraftModel]] = (
    MappingProxyType(
        {
            SpeculativeAlgorithm.EAGLE: EagleDraft,
            SpeculativeAlgorithm.EAGLE3: Eagle3Draft,
            SpeculativeAlgorithm.NEXTN: MTPDraft,
            SpeculativeAlgorithm.STANDALONE: _standalone,
        }
    )
)


def make_draft_model(config: DraftConfig, context: LayerContext, target: CausalLM, names: Set[str]) -> DraftModel:
    """The draft of ``config.algorithm`` for ``target``, with uninitialised parameters on the default device. ``names``:
    the names of the tensors in its checkpoint."""
    return _DRAFTS[config.algorithm](config, context, target, names)
