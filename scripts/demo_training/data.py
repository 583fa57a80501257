"""Makes batches in worker processes and yields them in the order of their steps."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.queues import Queue

import torch
from tokenizers import Tokenizer
from torch import Tensor

from fenceline_demo.corpus import Curriculum, Ids, Mask, build_batch
from fenceline_demo.tokenizer import FastEncoder


@dataclass(frozen=True, slots=True)
class Feed:
    """What the workers are to make: batches of `tokens_per_step` tokens, for all steps from `first_step` on."""

    tokenizer_file: str
    curriculum: Curriculum
    tokens_per_step: int
    first_step: int
    num_workers: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's rows on the device: ids, targets int64 and weights fp32, [rows, length] each."""

    ids: Tensor
    targets: Tensor
    weights: Tensor
    is_answer: Tensor


def _work(feed: Feed, worker: int, queue: Queue[tuple[Ids, Mask]]) -> None:
    encoder = FastEncoder(Tokenizer.from_file(feed.tokenizer_file))
    step = feed.first_step + worker
    while True:
        curriculum = feed.curriculum
        length = curriculum.row_length(step)
        rows = max(feed.tokens_per_step // length, 1)
        queue.put(build_batch(curriculum.seed, step, rows, length, encoder, curriculum.skills))
        step += feed.num_workers


@contextmanager
def start(feed: Feed) -> Iterator[Iterator[tuple[Ids, Mask]]]:
    """Starts the workers; yields an endless iterator of their batches; ends them on exit.

    The batch of a step depends only on the seed and the step, not on the number of workers.
    """
    context = mp.get_context("spawn")
    queues = [context.Queue(maxsize=6) for _ in range(feed.num_workers)]
    workers = [context.Process(target=_work, args=(feed, i, queue), daemon=True) for i, queue in enumerate(queues)]
    for worker in workers:
        worker.start()

    def batches() -> Iterator[tuple[Ids, Mask]]:
        while True:
            for queue in queues:
                yield queue.get()

    try:
        yield batches()
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def to_device(ids: Ids, mask: Mask, device: torch.device, rest_weight: float) -> Batch:
    """Shifts ids and mask [rows, length + 1] into inputs and targets; tokens outside answers weigh less."""
    tokens = torch.from_numpy(ids.astype("int64")).to(device)
    is_answer = torch.from_numpy(mask).to(device)[:, 1:].bool()
    weights = torch.where(is_answer, 1.0, rest_weight)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), weights, is_answer)
