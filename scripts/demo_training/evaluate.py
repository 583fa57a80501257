"""Held-out accuracy by teacher forcing: an answer is right if each of its tokens is the most likely one.

Exactly in this case greedy decoding generates the answer, so one forward pass is enough.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer

from fenceline_demo.corpus import ROW_LENGTHS
from fenceline_demo.documents import END_OF_TEXT, chat
from fenceline_demo.evaluation import CATEGORIES, EvalItem, held_out_items
from fenceline_demo.tokenizer import FastEncoder
from fenceline_demo.tools import CALCULATOR, ToolTurn, held_out_questions, tool_chat

from .data import to_device
from .model import DemoModel


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt with its answer; the answer's tokens are ids[start:]."""

    label: str
    ids: list[int]
    start: int


def make_rows(
    tokenizer: Tokenizer,
    seed: int,
    num_items: int,
    max_length: int = ROW_LENGTHS[-1],
    categories: tuple[str, ...] = CATEGORIES,
) -> list[Row]:
    """Held-out items of at most `max_length` tokens, in few-shot layout and (with the label 'chat') as a chat
    message."""
    encoder = FastEncoder(tokenizer)
    rows = []
    for item in held_out_items(seed, num_items, categories):
        rows.append(_row(encoder, item.item.category, item.prompt(), f" {item.item.answer}\n"))
    for item in held_out_items(seed + 1, num_items // 4, categories):
        rows.append(_chat_row(encoder, item))
    return [row for row in rows if len(row.ids) <= max_length + 1]


def make_tool_rows(tokenizer: Tokenizer, seed: int, num_items: int) -> list[Row]:
    """Held-out questions for a calculator: their calls (label 'call'), and the answers after its result ('answer')."""
    encoder, rows = FastEncoder(tokenizer), []
    for i, asked in enumerate(held_out_questions(seed, num_items)):
        result = str(7 * i + 1000 * (i % 7))
        turn = ToolTurn(
            asked.question, (CALCULATOR.call(asked.expression),), (result,), asked.answer.replace("RESULT", result)
        )
        system, question, (call, _), _, returned, (answer, _), _ = tool_chat([CALCULATOR], [turn])
        prompt = system[0] + question[0]
        rows.append(_row(encoder, "call", prompt, call))
        rows.append(_row(encoder, "answer", f"{prompt}{call}\n{returned[0]}", answer))
    return rows


def _row(encoder: FastEncoder, label: str, prompt: str, answer: str) -> Row:
    ids = encoder.encode(prompt)
    return Row(label, ids + encoder.encode(answer), len(ids))


def _chat_row(encoder: FastEncoder, item: EvalItem) -> Row:
    (prompt, _), (answer, _), _ = chat([(item.messages()[0]["content"], item.item.answer)])
    return _row(encoder, "chat", prompt, answer)


@torch.no_grad()
def accuracy(
    model: DemoModel, tokenizer: Tokenizer, rows: list[Row], tokens_per_step: int, device: torch.device
) -> dict[str, float]:
    """The fraction of rows with right answers by label: first the categories in their order, then the other labels."""
    hits: dict[str, list[bool]] = defaultdict(list)
    pad = tokenizer.token_to_id(END_OF_TEXT)
    by_length: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_length[next(n for n in ROW_LENGTHS if len(row.ids) <= n + 1)].append(row)
    for length, group in by_length.items():
        size = max(tokens_per_step // length, 1)
        for first in range(0, len(group), size):
            part = group[first : first + size]
            ids = np.full((size, length + 1), pad, dtype=np.uint16)
            mask = np.zeros((size, length + 1), dtype=np.uint8)
            for i, row in enumerate(part):
                ids[i, : len(row.ids)] = row.ids
                mask[i, row.start : len(row.ids)] = 1
            batch = to_device(ids, mask, device, 0.0)
            _, right = model(batch.ids, batch.targets, batch.weights)
            ok = (right | ~batch.is_answer).all(-1).tolist()
            for row, good in zip(part, ok, strict=False):
                hits[row.label].append(good)
    return {
        label: sum(hits[label]) / len(hits[label]) for label in (*CATEGORIES, "chat", "call", "answer") if hits[label]
    }
