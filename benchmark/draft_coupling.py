#!/usr/bin/env python3
"""Compares two ways to accept drafts of the demo model: draft and target draw with the same noise, as in this server,
or rejection sampling, which accepts as many drafts as is possible.

    OMP_NUM_THREADS=1 python benchmark/draft_coupling.py

At a place where the target draws from p and the draft from q, rejection sampling accepts with probability
sum_i min(p_i, q_i) = 1 - TV (Leviathan, Kalman, Matias, arXiv:2211.17192). With the same Gumbel noise both draw token
i with probability 1 / sum_j max(p_j / p_i, q_j / q_i); the sum of these is at most 1 - TV, at least (1 - TV) / (1 + TV)
(Daliri, Musco, Suresh, arXiv:2408.07978). Both are computed from the probabilities, nothing is drawn.

Chains begin at each token of held-out texts, and their preceding drafts are right. They are taken from answers, of
which the target is sure, and from all of the text, of which it mostly is not. It takes a minute on a CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from demo_training.drafts import MTP, Draft, Eagle3, target_states
from demo_training.evaluate import Row, make_rows
from demo_training.export import load_weights
from demo_training.model import DemoModel, Shape
from fenceline.config.model_files import demo_model_path

KINDS: Sequence[type[Eagle3] | type[MTP]] = (Eagle3, MTP)


def load_draft(draft: Draft, directory: Path) -> Draft:
    """``draft`` with the weights in ``directory``."""
    saved = load_file(directory / "model.safetensors")
    with torch.no_grad():
        for name, weight in draft.named().items():
            weight.copy_(saved[f"{name}.weight"])
    return draft.requires_grad_(False)


def acceptance(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities [n, vocabulary] of target and draft → [n] with rejection sampling, [n] with the same noise."""
    rejection = torch.minimum(p, q).sum(-1)
    coupled = []
    for target, draft in zip(p.double().clamp(min=1e-30), q.double().clamp(min=1e-30), strict=True):
        likely = (target > 1e-9) & (draft > 1e-9)  # both almost never draw any other token
        ratios = torch.maximum(target / target[likely, None], draft / draft[likely, None])
        coupled.append((1.0 / ratios.sum(-1)).sum())
    return rejection, torch.stack(coupled).float()


def places(
    draft: Draft, target: DemoModel, rows: Sequence[Row], whole: bool, most: int
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """The target's and the draft's logits [chains, vocabulary] for each step of up to ``most`` chains in each row: in
    its answer, or in the ``whole`` text."""
    for row in rows:
        states = target_states(target, torch.tensor([row.ids]))
        first, end = (1 if whole else row.start) - 1, len(row.ids) - 1 - draft.steps
        asked = torch.linspace(first, end - 1, min(most, end - first)).long() if end > first else None
        if asked is None:
            continue
        drafted = [logits[0] for logits in draft.chains(states, asked[None], target)]
        wanted = [F.linear(states.normed[0, asked + 1 + step], target.embed) for step in range(draft.steps)]
        yield wanted, drafted


def measure(draft: Draft, target: DemoModel, rows: Sequence[Row], args: argparse.Namespace) -> None:
    """Prints the draft's rows of the table."""
    for whole in (False, True):
        found = list(places(draft, target, rows, whole, args.chains))
        for temperature in args.temperatures:
            steps = []
            for step in range(draft.steps):
                p, q = ((torch.cat([pair[side][step] for pair in found]) / temperature).softmax(-1) for side in (0, 1))
                steps.append(acceptance(p, q))
            rejection, coupled = (torch.stack([pair[side] for pair in steps]) for side in (0, 1))
            least = rejection / (2 - rejection)  # (1 - TV) / (1 + TV)
            lengths = [float(1 + rates.cumprod(0).sum(0).mean()) for rates in (rejection, coupled)]
            print(
                f"| {draft.published} | {'text' if whole else 'answers'} | {temperature:g} | {rejection.mean():.3f}"
                f" | {coupled.mean():.3f} | {least.mean():.3f} | {lengths[0]:.2f} | {lengths[1]:.2f} |",
                flush=True,
            )


def main() -> None:
    """Prints the table for each draft of the demo model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-items", type=int, default=48, help="held-out items")
    parser.add_argument("--chains", type=int, default=8, help="of each item, at most")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0, 1.5])
    args = parser.parse_args()
    directory = Path(demo_model_path())
    target = DemoModel(Shape(), torch.float32, compiled=False).requires_grad_(False)
    load_weights(target, directory)
    rows = make_rows(Tokenizer.from_file(str(directory / "tokenizer.json")), seed=3_000_000, num_items=args.num_items)
    print("| draft | places | temperature | rejection sampling | same noise | at least | accept length | same noise |")
    print("|" + "---|" * 8)
    for kind in KINDS:
        if (directory / kind.published).is_dir():
            draft = load_draft(kind(target), directory / kind.published)
            measure(draft, target, rows, args)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
