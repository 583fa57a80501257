"""Training rows: token ids with a loss mask, a pure function of (seed, step)."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .documents import END_OF_TEXT, Document, ledger_document, short_document, skill_document
from .tokenizer import FastEncoder
from .tools import tools_document

Ids = npt.NDArray[np.uint16]
Mask = npt.NDArray[np.uint8]

ROW_LENGTHS = (512, 1024, 2048, 4096)
TOOLS = ("tools",)


@dataclass(frozen=True, slots=True)
class Curriculum:
    """What a step trains on: short rows first, all lengths after `warm_steps` steps.

    `skills`: the categories of questions for a model that learns a part of the corpus; empty: the whole corpus. If
    TOOLS is the only one, the model learns conversations with tools.
    """

    seed: int
    warm_steps: int
    lengths: tuple[int, int, int, int] = ROW_LENGTHS
    skills: tuple[str, ...] = ()

    def row_length(self, step: int) -> int:
        """The row length of `step`, one of `lengths`."""
        progress = step / max(self.warm_steps, 1)
        if progress < 0.4:
            weights = (1.0, 0.0, 0.0, 0.0)
        elif progress < 0.7:
            weights = (0.6, 0.4, 0.0, 0.0)
        elif progress < 1.0:
            weights = (0.5, 0.2, 0.3, 0.0)
        else:
            weights = (0.45, 0.1, 0.15, 0.3)
        return random.Random(f"length:{self.seed}:{step}").choices(self.lengths, weights)[0]


def encode_document(document: Document, encoder: FastEncoder) -> tuple[list[int], list[int]]:
    """Token ids of a document, and 1 for each token of an answer, 0 for the rest."""
    ids: list[int] = []
    mask: list[int] = []
    for text, is_answer in document:
        new = encoder.encode(text)
        ids += new
        mask += [int(is_answer)] * len(new)
    return ids, mask


def build_row(
    rng: random.Random, length: int, encoder: FastEncoder, skills: tuple[str, ...] = ()
) -> tuple[list[int], list[int]]:
    """One row of `length` tokens: at most one ledger, the rest short documents, cut at the end.

    With `skills` there is no ledger, and all questions are of these categories.
    """
    ids: list[int] = []
    mask: list[int] = []
    ledger_at = 2.0 if skills else rng.random() * 1.3  # as a fraction of the row's length; above 1: no ledger
    if ledger_at < 0.8 and rng.random() < 0.6:
        ledger_at = 0.0
    separator = encoder.encode(END_OF_TEXT)
    while len(ids) < length:
        if len(ids) >= ledger_at * length and length - len(ids) > 160:
            document = ledger_document(rng, length - len(ids))
            ledger_at = 2.0
        else:
            document = _short(rng, skills)
        new_ids, new_mask = encode_document(document, encoder)
        ids += new_ids + separator
        mask += new_mask + [0]
    return ids[:length], mask[:length]


def _short(rng: random.Random, skills: tuple[str, ...]) -> Document:
    if skills == TOOLS:
        return tools_document(rng)
    return skill_document(rng, skills) if skills else short_document(rng)


def build_batch(
    seed: int, step: int, rows: int, length: int, encoder: FastEncoder, skills: tuple[str, ...] = ()
) -> tuple[Ids, Mask]:
    """The batch of `step`: ids [rows, length + 1] uint16 and the loss mask of the same shape, uint8."""
    rng = random.Random(f"batch:{seed}:{step}")
    built = [build_row(rng, length + 1, encoder, skills) for _ in range(rows)]
    return (np.array([ids for ids, _ in built], dtype=np.uint16), np.array([mask for _, mask in built], dtype=np.uint8))
