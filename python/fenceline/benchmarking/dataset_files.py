"""Datasets read from a file on disk: ShareGPT's layout and custom JSON or JSONL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fenceline.benchmarking.args import BenchArgs
from fenceline.benchmarking.records import BenchRequest, Content, Turn
from fenceline.benchmarking.tokenizer import Tokenizer, count_tokens

_USER_ROLES = ("human", "user")
_DEFAULT_OUTPUT_LEN = 256  # of a custom line that names none


def requests_from_file(args: BenchArgs, tokenizer: Tokenizer, rng: np.random.Generator) -> list[BenchRequest]:
    """Single-turn requests: the first question of each record, up to --num-prompts of them in random order.

    Raises:
        ValueError: unreadable file, or no usable record.
    """
    return _collect(args, tokenizer, rng, max_turns=1)


def conversations_from_file(
    args: BenchArgs, tokenizer: Tokenizer, rng: np.random.Generator
) -> list[BenchRequest]:
    """Conversations: the first --multi-turn-num-turns questions of each record that has at least two.

    Raises:
        ValueError: unreadable file, or no usable record.
    """
    return _collect(args, tokenizer, rng, max_turns=args.multi_turn_num_turns)


def _collect(
    args: BenchArgs, tokenizer: Tokenizer, rng: np.random.Generator, max_turns: int
) -> list[BenchRequest]:
    records = read_records(args.dataset_path)
    min_turns = 2 if args.dataset_name == "multi-turn" and max_turns > 1 else 1
    requests: list[BenchRequest] = []
    for i in rng.permutation(len(records)):
        turns = _turns(records[i], args, tokenizer, max_turns)
        if len(turns) >= min_turns and _fits(turns, args):
            requests.append(BenchRequest(tuple(turns)))
        if len(requests) == args.num_prompts:
            break
    if not requests:
        raise ValueError(
            f"{args.dataset_path} holds no usable record: each needs 'conversations' with a question and an answer, "
            "or 'prompt' (text or token ids)"
        )
    return requests


def read_records(path: str) -> list[dict[str, Any]]:
    """The JSON objects of a file that is one JSON array or has one object per line.

    Raises:
        ValueError: unreadable or malformed.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            records = json.loads(text)
        else:
            records = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"--dataset-path {path}: {error}") from error
    if not all(isinstance(record, dict) for record in records):
        raise ValueError(f"--dataset-path {path}: every record must be a JSON object")
    return list(records)


def _turns(record: dict[str, Any], args: BenchArgs, tokenizer: Tokenizer, max_turns: int) -> list[Turn]:
    """The record's user turns, fewer if it is short or malformed."""
    if "prompt" in record or "text" in record or "input_ids" in record:
        return _prompt_turn(record, args, tokenizer)
    pairs = _question_answer_pairs(record.get("conversations", record.get("conversation", [])))
    turns = []
    for question, answer in pairs[:max_turns]:
        text = question + args.prompt_suffix
        num_answer = len(tokenizer.encode(answer, add_special_tokens=False))
        if count_tokens(tokenizer, text) < 2 or num_answer < 2:  # nothing to measure, as in SGLang
            break
        turns.append(_turn(text, args.sharegpt_output_len or num_answer, args, tokenizer))
    return turns


def _turn(text: str, output_len: int, args: BenchArgs, tokenizer: Tokenizer) -> Turn:
    content: Content = tokenizer.encode(text) if args.tokenize_prompt else text
    return Turn(content, count_tokens(tokenizer, text), output_len)


def _prompt_turn(record: dict[str, Any], args: BenchArgs, tokenizer: Tokenizer) -> list[Turn]:
    prompt = record.get("prompt", record.get("text", record.get("input_ids")))
    lens = (record.get(key) for key in ("output_len", "output_tokens", "max_new_tokens", "max_tokens"))
    named = next((n for n in lens if isinstance(n, int) and n > 0), _DEFAULT_OUTPUT_LEN)
    output_len = args.sharegpt_output_len or named
    if isinstance(prompt, str) and prompt:
        return [_turn(prompt + args.prompt_suffix, output_len, args, tokenizer)]
    if isinstance(prompt, list) and prompt and all(isinstance(i, int) for i in prompt):
        return [Turn(list(prompt), len(prompt), output_len)]
    return []


def _question_answer_pairs(messages: object) -> list[tuple[str, str]]:
    """(question, answer) of each exchange; what precedes the first question (a system text) is left out."""
    if not isinstance(messages, list):
        return []
    texts: list[tuple[str, str]] = []
    for message in messages:
        value = message.get("value", message.get("content")) if isinstance(message, dict) else None
        if not isinstance(value, str):
            return []
        texts.append((str(message.get("from", message.get("role", ""))), value))
    named = any(role for role, _ in texts)
    while named and texts and texts[0][0] not in _USER_ROLES:
        texts.pop(0)
    return [(texts[i][1], texts[i + 1][1]) for i in range(0, len(texts) - 1, 2)]


def _fits(turns: list[Turn], args: BenchArgs) -> bool:
    if args.sharegpt_context_len is None:
        return True
    return sum(turn.prompt_len + turn.output_len for turn in turns) <= args.sharegpt_context_len
