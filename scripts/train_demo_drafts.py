#!/usr/bin/env python3
"""Trains the demo model's drafts, an EAGLE-3 head and a two-layer MTP, in minutes on a CPU or a GPU.

    OMP_NUM_THREADS=1 python scripts/train_demo_drafts.py --output-dir draft_out
    python scripts/train_demo_drafts.py --output-dir draft_out --drafts nextn --steps 2000 --device cuda

The data of every step is a function of the seed and the step number. It has only trained items, with all categories
equally often, and in all but a few cases their answers are the target's own. Afterwards the script prints the mean
accept length on held-out items: the number of tokens per verification by the target, with greedy decoding and chains of
three tokens (MTP: two).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from demo_training.drafts import MTP, Draft, Eagle3, States, target_states
from demo_training.evaluate import Row, make_rows
from demo_training.export import load_weights
from demo_training.model import DemoModel, Shape
from demo_training.optimizer import Optimizer
from fenceline.config.model_files import demo_model_path
from fenceline_demo.corpus import encode_document
from fenceline_demo.documents import (
    END_OF_TEXT,
    MAKERS,
    Document,
    chat,
    few_shot,
    ledger_document,
    short_document,
    train_item,
)
from fenceline_demo.tokenizer import FastEncoder

DRAFTS: dict[str, type[Eagle3] | type[MTP]] = {"eagle3": Eagle3, "nextn": MTP}
STEP_WEIGHT = 0.8  # the loss weight of a chain's step, relative to the preceding step


def make_document(rng: random.Random, max_tokens: int) -> Document:
    """A document of trained items, mostly of one category, with many answers for its length."""
    kind = rng.random()
    if kind < 0.25 and max_tokens > 300:
        return ledger_document(rng, max_tokens)
    if kind < 0.4:
        return short_document(rng)
    category = rng.choice(list(MAKERS))
    most = 3 if category == "long_copy" else 8
    items = [train_item(rng, category) for _ in range(rng.randrange(2, most + 1))]
    return chat([(item.question, item.answer) for item in items]) if rng.random() < 0.25 else few_shot(items)


def make_batch(seed: int, step: int, num_rows: int, length: int, encoder: FastEncoder) -> tuple[Tensor, Tensor]:
    """The rows of a step: ids and the mask of answers, [num_rows, length] int64 and bool."""
    rng = random.Random(f"drafts:{seed}:{step}")
    separator = encoder.encode(END_OF_TEXT)
    rows = []
    for _ in range(num_rows):
        ids: list[int] = []
        mask: list[int] = []
        while len(ids) < length:
            new_ids, new_mask = encode_document(make_document(rng, length - len(ids)), encoder)
            ids += new_ids + separator
            mask += new_mask + [0]
        rows.append((ids[:length], mask[:length]))
    return torch.tensor([ids for ids, _ in rows]), torch.tensor([mask for _, mask in rows]).bool()


def answer_rows(mask: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Rows [B, M] at which chains begin, and [B, M] bool: which of them are not padding. The token that such a row
    reads and the first token that it predicts belong to the same answer. (An answer's first token comes from the
    prefill.)"""
    length = mask.shape[1]
    wanted = mask[:, 1 : length - steps] & mask[:, 2 : length - steps + 1]
    most = int(wanted.sum(1).max())
    order = (~wanted).long().argsort(dim=1, stable=True)[:, :most]
    return order, wanted.gather(1, order)


def chain_loss(draft: Draft, target: DemoModel, states: States, mask: Tensor) -> tuple[Tensor, list[float]]:
    """The loss over the answers, which mask [B, length] bool marks, and how often each step is right."""
    ids = states.ids
    rows, live = answer_rows(mask, draft.steps)
    loss, right = torch.zeros((), device=ids.device), []
    for step, logits in enumerate(draft.chains(states, rows, target)):
        labels = ids.gather(1, rows + 2 + step)
        weights = (live & mask.gather(1, rows + 2 + step)).float()
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(weights)
        loss = loss + STEP_WEIGHT**step * (losses * weights).sum() / weights.sum()
        right.append(float(((logits.argmax(-1) == labels) * weights).sum() / weights.sum()))
    return loss, right


def row_length(seed: int, step: int) -> int:
    """The length of a step's rows: mostly short; long rows teach recall over many tokens."""
    return random.Random(f"length:{seed}:{step}").choices((512, 1024, 2048), (0.8, 0.1, 0.1))[0]


def train(drafts: Sequence[Draft], target: DemoModel, encoder: FastEncoder, args: argparse.Namespace) -> None:
    """Run all steps, with all drafts on the same rows. The learning rate warms up, stays constant, and decays to zero
    over the second half."""
    optimizers = [
        Optimizer(draft.matrices(), draft.others(), args.muon_lr, args.adam_lr, torch.float32, compiled=False)
        for draft in drafts
    ]
    started = time.monotonic()
    for step in range(args.steps):
        length = row_length(args.seed, step)
        num_rows = max(args.tokens_per_step // length, 1)
        ids, mask = make_batch(args.seed, step, num_rows, length, encoder)
        ids, mask = ids.to(args.device), mask.to(args.device)
        states = target_states(target, ids)
        for draft, optimizer in zip(drafts, optimizers, strict=True):
            loss, right = chain_loss(draft, target, states, mask)
            loss.backward()
            optimizer.step(min(1.0, (step + 1) / 20, (args.steps - step) / (args.steps / 2)))
            if (step + 1) % args.log_every == 0:
                shares = " ".join(f"{share:.3f}" for share in right)
                print(
                    f"step {step + 1} row {length} {draft.published}: loss {loss.item():.3f} right {shares}"
                    f" {time.monotonic() - started:.0f} s",
                    flush=True,
                )


@torch.no_grad()
def accept_lengths(draft: Draft, target: DemoModel, rows: Sequence[Row]) -> dict[str, tuple[int, int]]:
    """(tokens, verifications) by category, over rows that the target answers right, because for these its greedy tokens
    are the answer's tokens. The first token comes from the prompt's prefill. Each verification then yields the accepted
    tokens and one of the target's own."""
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    device = target.embed.device
    for row in rows:
        # Rows near the end predict tokens past it; these comparisons are not counted.
        padded = F.pad(torch.tensor([row.ids], device=device), (0, draft.steps))
        states = target_states(target, padded)
        greedy = F.linear(states.normed[0, row.start - 1 : len(row.ids) - 1], target.embed).argmax(-1)
        if not torch.equal(greedy, padded[0, row.start : len(row.ids)]):
            continue
        asked = torch.arange(row.start - 1, len(row.ids) - 1, device=device)[None]
        chains = draft.chains(states, asked, target)
        hits = torch.stack([chain.argmax(-1)[0] == padded[0, asked[0] + 2 + step] for step, chain in enumerate(chains)])
        accepted = hits.long().cumprod(0).sum(0).tolist()
        tokens, verifications = found[row.label]
        at = row.start + 1  # the number of tokens so far
        while at < len(row.ids):
            at = min(at + accepted[at - 2 - (row.start - 1)] + 1, len(row.ids))
            verifications += 1
        found[row.label] = tokens + len(row.ids) - row.start - 1, verifications
    return found


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--drafts", nargs="+", choices=list(DRAFTS), default=list(DRAFTS))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--num-eval-items", type=int, default=120)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return parser.parse_args(argv)


def main() -> None:
    """Trains each draft, writes it, and prints how many of its tokens are accepted."""
    args = parse_args()
    directory = Path(demo_model_path())
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    target = DemoModel(Shape(), torch.float32, compiled=False).requires_grad_(False)
    load_weights(target, directory)
    rows = make_rows(tokenizer, seed=2_000_000, num_items=args.num_eval_items)
    torch.manual_seed(args.seed)
    drafts = [DRAFTS[name](target) for name in args.drafts]  # the same weights at first on any device
    for module in (target, *drafts):
        module.to(args.device)
    train(drafts, target, FastEncoder(tokenizer), args)
    for draft in drafts:
        draft.save(args.output_dir / draft.published)
        with torch.no_grad():
            for param in draft.parameters():
                param.copy_(param.bfloat16())  # as they are saved
        report(draft, accept_lengths(draft, target, rows))


def report(draft: Draft, found: dict[str, tuple[int, int]]) -> None:
    """Prints what `accept_lengths` has found, by category and over all tokens."""
    for label, (tokens, verifications) in found.items():
        print(f"{draft.published} {label}: {tokens / max(verifications, 1):.2f} tokens a verification")
    tokens, verifications = map(sum, zip(*found.values(), strict=True))
    print(f"{draft.published}: mean accept length {tokens / verifications:.3f} ({tokens} tokens)", flush=True)


if __name__ == "__main__":
    main()
