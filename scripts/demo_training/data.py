"""Makes batches in worker processes and yields them in the order of their steps."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.queues import Queue
from typing import Generic, TypeVar

import torch
from tokenizers import Tokenizer
from torch import Tensor

from fenceline_demo.corpus import Curriculum, Ids, Mask, build_batch
from fenceline_demo.tokenizer import FastEncoder

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Feed(Generic[Made]):
    """What the workers are to make: the batches of all steps from `first_step` on. `make`, called in each worker,
    returns what makes a step's batch."""

    make: Callable[[], Callable[[int], Made]]
    first_step: int
    num_workers: int


def text_batches(
    tokenizer_file: str, curriculum: Curriculum, tokens_per_step: int
) -> Callable[[int], tuple[Ids, Mask]]:
    """What makes a step's batch, of `tokens_per_step` tokens, of the corpus."""
    encoder = FastEncoder(Tokenizer.from_file(tokenizer_file))

    def batch(step: int) -> tuple[Ids, Mask]:
        length = curriculum.row_length(step)
        return build_batch(curriculum.seed, step, max(tokens_per_step // length, 1), length, encoder, curriculum.skills)

    return batch


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's rows on the device: ids, targets int64 and weights fp32, [rows, length] each."""

    ids: Tensor
    targets: Tensor
    weights: Tensor
    is_answer: Tensor


def _work(feed: Feed[Made], worker: int, queue: Queue[Made]) -> None:
    batch, step = feed.make(), feed.first_step + worker
    while True:
        queue.put(batch(step))
        step += feed.num_workers


@contextmanager
def start(feed: Feed[Made]) -> Iterator[Iterator[Made]]:
    """Starts the workers; yields an endless iterator of their batches in the order of the steps, whatever the number of
    workers; ends them on exit."""
    context = mp.get_context("spawn")
    queues = [context.Queue(maxsize=6) for _ in range(feed.num_workers)]
    workers = [context.Process(target=_work, args=(feed, i, queue), daemon=True) for i, queue in enumerate(queues)]
    for worker in workers:
        worker.start()

    def batches() -> Iterator[Made]:
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
