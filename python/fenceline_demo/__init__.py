"""The demo model's data: what it was trained on, and the held-out items that it is tested with.

Nothing here imports torch: training, the evaluation client and the tests share this package.

    items       one question with its answer, and the hash that splits training from held-out items
    generators  make questions of each kind, and small talk; ledger makes questions about a long text
    documents   items laid out as few-shot text, chat conversations or GSM8K-like problems
    tokenizer   the byte-level BPE tokenizer, its chat template, a fast encoder for the corpus
    corpus      training rows: token ids and loss mask, a function of (seed, step)
    evaluation  held-out prompts, scores of answers, runs compared; client asks a server
"""

from __future__ import annotations
