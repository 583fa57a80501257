#!/usr/bin/env python3
"""Trains demo-vision, the demo model that reads pictures, for one GPU, and writes the directory that the package
ships.

    python scripts/train_demo_vision.py --output-dir vision_out --tower-steps 1000 --max-seconds 330
    python scripts/train_demo_vision.py --output-dir vision_out --device cpu --num-workers 1 --rows-per-step 24
    python scripts/train_demo_vision.py --output-dir vision_out --resume vision_out/checkpoint --max-steps 20000

The data of every step is a function of the seed and the step number. The second line is for one core of a CPU: 1,500
steps of the tower and 722 of all there, 17,000 conversations, led to 74 % of held-out answers. What it then lacked most
was which of several pictures a question is about.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

import torch
from tokenizers import Tokenizer

from demo_training.data import Feed, start
from demo_training.optimizer import Optimizer
from demo_training.vision import Tower, VisionModel, accuracy, pictures_to_device, to_device
from demo_training.vision_export import check_export, export
from fenceline.images.prepare import prepare
from fenceline_demo.picture_chat import (
    GRIDS,
    SETTINGS,
    PictureItem,
    PictureRows,
    Pictures,
    build_rows,
    by_size,
    conversation,
    draw,
    held_out_pictures,
)
from fenceline_demo.tokenizer import FastEncoder, build_vision_tokenizer
from train_demo_model import Progress, load_checkpoint, lr_scale, plan_decay, save_checkpoint

_FEWEST = 0.1  # of the curriculum, before which a picture shows one thing


def picture_batches(
    tokenizer_file: str, seed: int, num_rows: int, length: int, curriculum_steps: int
) -> Callable[[int], PictureRows]:
    """What makes a step's batch. Pictures become larger and fuller in the first ``curriculum_steps``; those of a step
    have one of two sizes."""
    encoder = FastEncoder(Tokenizer.from_file(tokenizer_file))

    def batch(step: int) -> PictureRows:
        rng = random.Random(f"pictures:train:{seed}:{step}")
        ease = min(max(step / curriculum_steps - _FEWEST, 0.0), 1.0)
        known = GRIDS[: 1 + round(ease * (len(GRIDS) - 1))]
        grids = rng.choice(known), rng.choice(known)
        rows = [conversation(rng, grids, rng.uniform(0.5, 1.0) * ease) for _ in range(num_rows)]
        return build_rows(rows, length, encoder)

    return batch


def tower_batches(seed: int, num_pictures: int) -> Callable[[int], Pictures]:
    """What makes a step's batch of pictures alone, of one size."""

    def batch(step: int) -> Pictures:
        rng = random.Random(f"pictures:tower:{seed}:{step}")
        grid = rng.choice(GRIDS)
        drawn = [draw(rng, grid, rng.uniform(0.5, 1.0)) for _ in range(num_pictures)]
        [pictures] = by_size((picture, prepare(picture.image, SETTINGS)) for picture in drawn).values()
        return pictures

    return batch


class Trainer:
    """The training loop: a batch in each step, and regularly a log line, an evaluation and a checkpoint."""

    def __init__(self, args: argparse.Namespace, encoder: FastEncoder, items: Sequence[PictureItem]) -> None:
        self.args, self.encoder, self.items = args, encoder, items
        self.device = torch.device(args.device)
        cuda = self.device.type == "cuda"
        self._dtype, self._compiled = (torch.bfloat16 if cuda else torch.float32), cuda and not args.no_compile
        if self._compiled:  # the optimizer's update has one variant for each shape of matrices
            torch._dynamo.config.recompile_limit = 64
        torch.manual_seed(args.seed)
        self.model = VisionModel(self._dtype, self._compiled).to(self.device)
        self.optimizer = self._optimizer(self.model)

    def _optimizer(self, part: VisionModel | Tower) -> Optimizer:
        args = self.args
        return Optimizer(part.matrices(), part.others(), args.muon_lr, args.adam_lr, self._dtype, self._compiled)

    def run_tower(self, batches: Iterator[Pictures]) -> None:
        """Teaches the tower alone what its pictures show and where, for --tower-steps."""
        args, tower, started = self.args, self.model.tower, time.monotonic()
        optimizer = self._optimizer(tower)
        for step in range(args.tower_steps):
            pixels, labels = pictures_to_device(next(batches), self.device)
            loss, right = tower.label_loss(tower(pixels), labels)
            loss.backward()
            left = (args.tower_steps - step) / args.tower_steps
            optimizer.step(min(1.0, (step + 1) / args.warmup_steps, 3 * left))
            if (step + 1) % args.log_every == 0:
                things = labels[:, 0] > 0
                print(
                    f"tower step {step + 1} loss {loss.item():.4f} labels {right.float().mean().item():.4f} "
                    f"of things {right[things].float().mean().item():.4f} {time.monotonic() - started:.0f} s",
                    flush=True,
                )

    def run(self, progress: Progress, batches: Iterator[PictureRows]) -> Progress:
        """Trains from `progress` to the end of the schedule. The tower rests until the rate decays: the text model
        learns faster from embeddings that stay what they are, and a step takes less time."""
        args, first, started = self.args, progress.step, time.monotonic()
        while True:
            progress = plan_decay(progress, args, started, first)
            if progress.end_step is not None and progress.step >= progress.end_step:
                return progress
            self.model.tower_rests = progress.decay_start is None or progress.step < progress.decay_start
            batch = to_device(next(batches), self.device)
            loss, hits = self.model(batch)
            loss.backward()
            self.optimizer.step(lr_scale(progress, args.warmup_steps))
            progress = replace(progress, step=progress.step + 1)
            if progress.step % args.log_every == 0:
                right = (hits * batch.weights).sum() / batch.weights.sum()
                elapsed = time.monotonic() - started
                print(
                    f"step {progress.step} loss {loss.item():.4f} answer tokens {right.item():.4f} "
                    f"lr {lr_scale(progress, args.warmup_steps):.3f} {elapsed:.0f} s",
                    flush=True,
                )
            if progress.step % args.eval_every == 0:
                self.evaluate(progress)
                save_checkpoint(args.output_dir / "checkpoint", self.model, self.optimizer, progress)

    def evaluate(self, progress: Progress) -> None:
        """Prints held-out accuracy per category, and over all."""
        figures = accuracy(self.model, self.encoder, self.items, self.args.rows_per_step, self.device)
        words = " ".join(f"{name} {value:.3f}" for name, value in figures.items())
        mean = sum(figures.values()) / max(len(figures), 1)
        print(f"held-out at step {progress.step}: {words} mean {mean:.4f}", flush=True)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True, help="export and checkpoint go here")
    parser.add_argument("--resume", type=Path, help="checkpoint directory to continue from")
    parser.add_argument("--new-schedule", action="store_true", help="with --resume: warm up again")
    parser.add_argument("--max-seconds", type=float, default=480.0, help="training time when no --max-steps")
    parser.add_argument("--max-steps", type=int, help="last step (instead of --max-seconds)")
    parser.add_argument("--decay-steps", type=int, help="length of the decay (default: a third of --max-steps)")
    parser.add_argument("--decay-fraction", type=float, default=0.4, help="of --max-seconds, spent decaying")
    parser.add_argument("--tower-steps", type=int, default=1500, help="first, of the tower alone; none with --resume")
    parser.add_argument("--pictures-per-step", type=int, default=256, help="in the steps of the tower alone")
    parser.add_argument("--rows-per-step", type=int, default=256, help="conversations")
    parser.add_argument("--row-length", type=int, default=160, help="tokens of a conversation")
    parser.add_argument("--curriculum-steps", type=int, default=600, help="steps until pictures are as full as any")
    parser.add_argument("--warmup-steps", type=int, default=50)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--num-workers", type=int, default=14)
    parser.add_argument("--num-eval-items", type=int, default=450)
    parser.add_argument("--eval-every", type=int, default=500)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    return parser.parse_args(argv)


def make_tokenizer() -> Tokenizer:
    """The model's tokenizer, from the texts of conversations; always the same."""
    rng = random.Random("tokenizer:pictures")
    talks = (conversation(rng, GRIDS[:1]) for _ in range(600))
    return build_vision_tokenizer("".join(text for text, _ in talk.document) for talk in talks)


def main() -> None:
    """Trains, evaluates, checkpoints, exports, and checks the export against transformers."""
    args = parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer_file = args.output_dir / "training_tokenizer.json"
    tokenizer.save(str(tokenizer_file))
    trainer = Trainer(args, FastEncoder(tokenizer), held_out_pictures(1_000_000, args.num_eval_items))
    progress = Progress()
    if args.resume is not None:
        progress = load_checkpoint(args.resume, trainer.model, trainer.optimizer, trainer.device, args.new_schedule)
    else:
        with start(Feed(partial(tower_batches, args.seed, args.pictures_per_step), 0, args.num_workers)) as batches:
            trainer.run_tower(batches)
        save_checkpoint(args.output_dir / "checkpoint", trainer.model, trainer.optimizer, progress)
    make = partial(
        picture_batches, str(tokenizer_file), args.seed, args.rows_per_step, args.row_length, args.curriculum_steps
    )
    with start(Feed(make, progress.step, args.num_workers)) as rows:
        progress = trainer.run(progress, rows)
    trainer.evaluate(progress)
    save_checkpoint(args.output_dir / "checkpoint", trainer.model, trainer.optimizer, progress)
    export(trainer.model, tokenizer, args.output_dir / "export")
    several = held_out_pictures(1, 6, ("several", "picture"))
    difference = check_export(trainer.model, tokenizer, args.output_dir / "export", several)
    print(f"export differs from transformers by at most {difference:.2e} in its logits")
    if difference > 1e-2:
        sys.exit("the export does not match the trained model")


if __name__ == "__main__":
    main()
