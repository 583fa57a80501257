"""The demo model's data: what it was trained on, and the held-out items it is judged by.

Nothing here imports torch: training, the evaluation client and the tests share this package.

    items       one question with its answer, and the hash that splits training from held-out items
    arithmetic, sequences, stories, ledger, smalltalk    the generators, one per kind of question
    documents   items laid out as few-shot text, chat conversations or GSM8K-like problems
    tokenizer   the byte-level BPE tokenizer, its chat template, a fast encoder for the corpus
    corpus      training rows: token ids and loss mask, a function of (seed, step)
    heldout     prompts for evaluation; evaluation scores and compares answers, client asks a server
    gsm_file    a small file of GSM8K-shaped problems
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["demo_model_path"]


def demo_model_path() -> Path:
    """The directory of the built-in demo model (config, tokenizer, weights), as installed."""
    return Path(__file__).resolve().parent.parent / "demo_model"
