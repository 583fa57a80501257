#!/usr/bin/env python3
"""Trains a built-in demo model, on one GPU in minutes, and writes the directory that the package ships.

    python scripts/train_demo_model.py --output-dir demo_out --max-seconds 400
    python scripts/train_demo_model.py --output-dir moe_out --model demo-moe --max-seconds 400
    python scripts/train_demo_model.py --output-dir tools_out --model demo-tools --max-seconds 400
    python scripts/train_demo_model.py --output-dir demo_out --resume demo_out/checkpoint --max-steps 20000

The data of every step is a function of the seed and the step number. With --max-steps and --decay-steps every run is
the same (except for the GPU's rounding). With --max-seconds the learning rate starts to decay when the time requires
it; this step is printed and kept in the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

import torch
from tokenizers import Tokenizer

from demo_training.data import Feed, start, text_batches, to_device
from demo_training.evaluate import Row, accuracy, make_rows, make_tool_rows
from demo_training.export import check_export, export
from demo_training.model import MOE_SHAPE, TOOLS_SHAPE, DemoModel, Shape
from demo_training.optimizer import Optimizer
from fenceline_demo import tools
from fenceline_demo.corpus import ROW_LENGTHS, TOOLS, Curriculum, Ids, Mask
from fenceline_demo.evaluation import CATEGORIES
from fenceline_demo.tokenizer import CHAT_TEMPLATE, VOCAB_SIZE, build_tokenizer, build_tools_tokenizer


@dataclass(frozen=True, slots=True)
class Kind:
    """A demo model, and the part of the corpus that it learns; without skills it is the whole corpus."""

    shape: Shape
    lengths: tuple[int, int, int, int] = ROW_LENGTHS
    skills: tuple[str, ...] = ()
    tokenizer: Callable[[], Tokenizer] = build_tokenizer
    chat_template: str = CHAT_TEMPLATE

    def rows(self, tokenizer: Tokenizer, count: int) -> list[Row]:
        """Held-out prompts with their answers."""
        if self.skills == TOOLS:
            return make_tool_rows(tokenizer, 1_000_000, count)
        return make_rows(tokenizer, 1_000_000, count, self.lengths[-1], self.skills or CATEGORIES)


MODELS = {
    "demo": Kind(Shape(vocab_size=VOCAB_SIZE)),
    "demo-moe": Kind(MOE_SHAPE, (128, 256, 512, 1024), ("add", "sub", "mul", "copy", "long_copy")),
    "demo-tools": Kind(TOOLS_SHAPE, (192, 256, 512, 1024), TOOLS, build_tools_tokenizer, tools.CHAT_TEMPLATE),
}


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run, which the checkpoint keeps. decay_start and end_step are None until they are known."""

    step: int = 0
    warm_from: int = 0
    decay_start: int | None = None
    end_step: int | None = None


def lr_scale(progress: Progress, warmup: int) -> float:
    """Warm-up, then constant, then linear decay to zero (WSD)."""
    scale = min(1.0, (progress.step - progress.warm_from + 1) / warmup)
    if progress.decay_start is not None and progress.end_step is not None:
        left = progress.end_step - progress.step
        scale *= min(1.0, left / max(progress.end_step - progress.decay_start, 1))
    return scale


def plan_decay(progress: Progress, args: argparse.Namespace, started: float, first_step: int) -> Progress:
    """Sets the first and last step of the decay, from --max-steps, or from the time that is left once it must
    start."""
    if progress.decay_start is not None:
        return progress
    if args.max_steps is not None:
        end = args.max_steps
        return replace(progress, decay_start=end - (args.decay_steps or end // 3), end_step=end)
    elapsed, done = time.monotonic() - started, progress.step - first_step
    if done == 0 or elapsed < args.max_seconds * (1 - args.decay_fraction):
        return progress
    steps = int(done / elapsed * (args.max_seconds - elapsed))
    print(f"decay starts at step {progress.step} and ends at {progress.step + steps}", flush=True)
    return replace(progress, decay_start=progress.step, end_step=progress.step + steps)


def save_checkpoint(directory: Path, model: DemoModel, optimizer: Optimizer, progress: Progress) -> None:
    """Writes weights, optimizer state and progress as three files."""
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), directory / "model.pt")
    torch.save(optimizer.state_dict(), directory / "optimizer.pt")
    (directory / "progress.json").write_text(json.dumps(asdict(progress)) + "\n")


def load_checkpoint(
    directory: Path, model: DemoModel, optimizer: Optimizer, device: torch.device, new_schedule: bool
) -> Progress:
    """Restores a run; `new_schedule` warms up again and forgets the decay that was planned."""
    model.load_state_dict(torch.load(directory / "model.pt", map_location=device))
    optimizer.load_state_dict(torch.load(directory / "optimizer.pt", map_location=device))
    progress = Progress(**json.loads((directory / "progress.json").read_text()))
    return Progress(step=progress.step, warm_from=progress.step) if new_schedule else progress


class Trainer:
    """The training loop: a batch in each step, and regularly a log line, an evaluation and a checkpoint."""

    def __init__(self, args: argparse.Namespace, tokenizer: Tokenizer, rows: list[Row]) -> None:
        self.args, self.tokenizer, self.rows = args, tokenizer, rows
        self.device = torch.device(args.device)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        compiled = self.device.type == "cuda" and not args.no_compile
        torch.manual_seed(args.seed)
        self.model = DemoModel(MODELS[args.model].shape, dtype, compiled).to(self.device)
        self.optimizer = Optimizer(
            self.model.matrices(), self.model.others(), args.muon_lr, args.adam_lr, dtype, compiled
        )

    def run(self, progress: Progress, batches: Iterator[tuple[Ids, Mask]]) -> Progress:
        """Trains from `progress` to the end of the schedule."""
        args, first, started = self.args, progress.step, time.monotonic()
        last_log = started
        while True:
            progress = plan_decay(progress, args, started, first)
            if progress.end_step is not None and progress.step >= progress.end_step:
                return progress
            ids, mask = next(batches)
            batch = to_device(ids, mask, self.device, args.rest_weight)
            loss, hits = self.model(batch.ids, batch.targets, batch.weights)
            loss.backward()
            self.optimizer.step(lr_scale(progress, args.warmup_steps))
            progress = replace(progress, step=progress.step + 1)
            if progress.step % args.log_every == 0:
                right = (hits & batch.is_answer).sum() / batch.is_answer.sum()
                now = time.monotonic()
                rate = args.log_every * args.tokens_per_step / (now - last_log)
                last_log = now
                print(
                    f"step {progress.step} row {ids.shape[1] - 1} loss {loss.item():.4f} "
                    f"answer tokens {right.item():.4f} lr {lr_scale(progress, args.warmup_steps):.3f} "
                    f"{rate / 1e6:.2f} Mtok/s {now - started:.0f} s",
                    flush=True,
                )
            if progress.step % args.eval_every == 0:
                self.evaluate(progress)
                save_checkpoint(args.output_dir / "checkpoint", self.model, self.optimizer, progress)

    def evaluate(self, progress: Progress) -> None:
        """Prints held-out accuracy per category."""
        figures = accuracy(self.model, self.tokenizer, self.rows, self.args.tokens_per_step, self.device)
        words = " ".join(f"{name} {value:.3f}" for name, value in figures.items())
        print(f"held-out at step {progress.step}: {words}", flush=True)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="demo", help="which of those that ship")
    parser.add_argument("--output-dir", type=Path, required=True, help="export, checkpoint and log go here")
    parser.add_argument("--resume", type=Path, help="checkpoint directory to continue from")
    parser.add_argument("--new-schedule", action="store_true", help="with --resume: warm up again")
    parser.add_argument("--max-seconds", type=float, default=400.0, help="training time when no --max-steps")
    parser.add_argument("--max-steps", type=int, help="last step (instead of --max-seconds)")
    parser.add_argument("--decay-steps", type=int, help="length of the decay (default: a third of --max-steps)")
    parser.add_argument("--decay-fraction", type=float, default=0.4, help="of --max-seconds, spent decaying")
    parser.add_argument("--tokens-per-step", type=int, default=65536)
    parser.add_argument("--curriculum-steps", type=int, default=2000, help="steps until all row lengths mix")
    parser.add_argument("--warmup-steps", type=int, default=150)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--rest-weight", type=float, default=0.03, help="loss weight outside answers")
    parser.add_argument("--num-workers", type=int, default=12)
    parser.add_argument("--num-eval-items", type=int, default=1200)
    parser.add_argument("--eval-every", type=int, default=1000)
    parser.add_argument("--log-every", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    return parser.parse_args(argv)


def main() -> None:
    """Trains, evaluates, checkpoints, exports, and checks the export against transformers."""
    args = parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    kind = MODELS[args.model]
    tokenizer = kind.tokenizer()
    tokenizer_file = args.output_dir / "training_tokenizer.json"
    tokenizer.save(str(tokenizer_file))
    trainer = Trainer(args, tokenizer, kind.rows(tokenizer, args.num_eval_items))
    progress = Progress()
    if args.resume is not None:
        progress = load_checkpoint(args.resume, trainer.model, trainer.optimizer, trainer.device, args.new_schedule)
    curriculum = Curriculum(args.seed, args.curriculum_steps, kind.lengths, kind.skills)
    make = partial(text_batches, str(tokenizer_file), curriculum, args.tokens_per_step)
    with start(Feed(make, progress.step, args.num_workers)) as batches:
        progress = trainer.run(progress, batches)
    trainer.evaluate(progress)
    save_checkpoint(args.output_dir / "checkpoint", trainer.model, trainer.optimizer, progress)
    export(trainer.model, tokenizer, args.output_dir / "export", kind.chat_template)
    difference = check_export(trainer.model, tokenizer, args.output_dir / "export")
    print(f"export differs from transformers by at most {difference:.2e} in its logits")
    if difference > 1e-2:
        sys.exit("the export does not match the trained model")


if __name__ == "__main__":
    main()
