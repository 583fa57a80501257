"""Checkpoint tensors into parameters: every slot once, nothing left over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from fenceline.layers.weight_slot import WeightSlots

_SHOWN_NAMES = 4


def fill_slots(
    slots: WeightSlots,
    weights: Iterable[tuple[str, torch.Tensor]],
    ignored: Sequence[str] = (),
    ignored_suffix: str | None = None,
) -> None:
    """Load each (name, tensor) pair into the slot of its name, as it comes.

    Raises ``ValueError`` for a tensor that has no slot (unless its name is in ``ignored`` or ends with
    ``ignored_suffix``), one that comes twice, one of the wrong shape, and slots that are left empty at the end.
    """
    missing = set(slots)
    unexpected = []
    for name, tensor in weights:
        if name not in slots:
            if name not in ignored and not (ignored_suffix and name.endswith(ignored_suffix)):
                unexpected.append(name)
            continue
        if name not in missing:
            raise ValueError(f"weight {name} comes twice; remove the extra safetensors file")
        slots[name].load(name, tensor)
        missing.discard(name)
    if unexpected:
        raise ValueError(
            f"the checkpoint holds weights that the model does not have: {_shorten(unexpected)}; "
            f"check config.json (architectures, num_hidden_layers, attention_bias, tie_word_embeddings)"
        )
    if missing:
        raise ValueError(
            f"the checkpoint lacks weights: {_shorten(sorted(missing))}; "
            f"check config.json (num_hidden_layers, tie_word_embeddings) or download the model again"
        )


def _shorten(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
