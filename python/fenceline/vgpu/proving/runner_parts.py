"""Parts of the model runner and of the sampler, asked with random values at the end of a run.

Runs use them in few ways: few prompts of one step are scored, the vocabulary of a rank has no padding, graphs never
move, results of a lost rank never arrive, and no draft is simulated. So steps are described to them at random, and what
is right is computed here from the requests alone, token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from random import Random
from typing import Any, NoReturn

import numpy as np
import torch

from fenceline.memory_order import Graph, GraphPool, Points
from fenceline.memory_order.device import CpuDevice
from fenceline.model_executor.extend_runner import _extend_arrays
from fenceline.model_executor.graph_runner import GraphRunner, GraphStats
from fenceline.model_executor.step import Chunk, ForwardResult, PageWrites, StepBatch
from fenceline.sampling import gumbel
from fenceline.sampling.kernels.sample import combine_pieces
from fenceline.sampling.rank_sampler import RankSampler
from fenceline.sampling.sampling_batch import ReqSampling
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.vgpu.proving.oracle import TOLERANCE, Query, scores_of, uniform

_NUM_BATCHES = 3


def compare_runner_parts(random: Random) -> str:
    """What is wrong with the first of them, "" if nothing is."""
    for part in (_scored_prompts, _pieces, _numbers, *[_ranks] * _NUM_BATCHES, _graphs, _results):
        for wrong in part(random):
            return f"runner: {wrong}"
    return ""


# --- the inputs of prefill steps


def _scored_prompts(random: Random) -> Iterator[str]:
    """The logprob of a prompt's token comes from the row of the token before it, and each row's logits are computed
    once for it. Of a request that samples, the row of its last token comes first."""
    for _ in range(_NUM_BATCHES):
        seqs = [_seq(random, row) for row in range(1, random.randint(2, 5))]
        rows_of, starts, chunks, sampling = (list(column) for column in zip(*seqs, strict=True))
        none, after = PageWrites.none(), Points.none()
        arrays = _extend_arrays(StepBatch.of_chunks(rows_of, starts, chunks, sampling, none, after))
        tokens, ends, rows, targets, whose = 0, [], [], [], []
        for number, (_, _, seq, samples) in enumerate(seqs):
            text = [*seq.token_ids.tolist(), *seq.following[:1]]
            for offset in range(1, len(text)):
                if offset - 1 in seq.scored:
                    rows.append(tokens + offset - 1)
                    targets.append(text[offset])
                    whose.append(number)
            tokens += len(seq.token_ids)
            if samples is not None:
                ends.append(tokens - 1)
        right: dict[str, Any] = {"logits_index": [*ends, *rows]}
        if rows:
            right["prompt_targets"] = targets
            if any(chunk.token_ids_logprob for chunk in chunks):
                right["prompt_named_rows"] = whose
        names = ("logits_index", "prompt_targets", "prompt_named_rows")
        got = {name: arrays[name].tolist() for name in names if name in arrays}
        if got != right:
            yield f"a step of {seqs} is given {got}, {right} is right"


def _seq(random: Random, row: int) -> tuple[int, int, Chunk, ReqSampling | None]:
    prefix, num = random.randrange(4), random.randint(1, 4)
    samples = random.random() < 0.6
    following = () if samples else tuple(random.randrange(100) for _ in range(random.randint(1, 2)))
    wanted = None if random.random() < 0.4 else random.randint(prefix + 1, prefix + num + 1)
    sampling = ReqSampling(SamplingParams(temperature=0.0), 0, row, prefix + num, ()) if samples else None
    num_targets = num if following else num - 1
    chunk = Chunk(
        token_ids=np.array([random.randrange(100) for _ in range(num)], np.int64),
        out_slots=np.arange(num, dtype=np.int64),
        scored=range(0) if wanted is None else range(wanted - 1 - prefix, num_targets),
        token_ids_logprob=(1, 2) if random.random() < 0.3 else (),
        following=following,
    )
    return row, prefix, chunk, sampling


# --- draws


def _pieces(random: Random) -> Iterator[str]:
    """Pieces of rows hold as many elements as they may, or a row; no two of them would fit into one."""
    most = gumbel.CHUNK_ELEMENTS
    for _ in range(_NUM_BATCHES):
        num_rows = random.randrange(9)
        num_columns = random.choice((1, most // 3 + random.randrange(3), most - 1, most, most + 1))
        lens = [piece.stop - piece.start for piece in gumbel.row_chunks(num_rows, num_columns)]
        rows = [row for piece in gumbel.row_chunks(num_rows, num_columns) for row in range(num_rows)[piece]]
        is_large = any(num > 1 and num * num_columns > most for num in lens)
        if (
            rows != [*range(num_rows)]
            or is_large
            or any((one + other) * num_columns <= most for one, other in pairwise(lens))
        ):
            yield f"{num_rows} rows of {num_columns} columns are split into {lens}, of at most {most} elements"


def _numbers(random: Random) -> Iterator[str]:
    """Numbers from 0 to 1 follow from seed and position alone."""
    seeds = [random.getrandbits(63) for _ in range(8)]
    positions = [random.randrange(1 << 20) for _ in seeds]
    got = gumbel.uniform(torch.from_numpy(gumbel.mix_seeds(seeds)), torch.tensor(positions)).tolist()
    right = [uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    if got != right:
        yield f"the numbers of seeds {seeds} at {positions} are {got}, not {right}"


class _Part:
    """Columns ``first_row`` and following of a head for ``vocab_size`` tokens, and the ranks' shard of it: an
    all-gather gives ``maxima``, those of all ranks' columns."""

    def __init__(self, vocab_size: int, first_row: int, num_columns: int, maxima: torch.Tensor) -> None:
        self.vocab_size, self.first_row = vocab_size, first_row
        self.weight = torch.empty(num_columns, 0)
        self.shard = self
        self._maxima = maxima

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._maxima


def _ranks(random: Random) -> Iterator[str]:
    """Ranks that have parts of the vocabulary, the last of which may be padding, draw together what one would draw
    alone, also for several places of each request; and a token in any case."""
    num_ranks, num_reqs, each = random.choice((2, 3)), random.randint(1, 3), random.choice((1, 2, 3))
    vocab_size, ahead = random.randint(2 * num_ranks, 20), random.randrange(3)
    width = -(-vocab_size // num_ranks)
    generator = np.random.default_rng(random.getrandbits(32))
    num_rows = num_reqs * each
    logits = np.full((num_rows, num_ranks * width), -np.inf, np.float32)
    logits[:, :vocab_size] = generator.normal(0, 2, (num_rows, vocab_size))
    broken = random.randrange(num_rows) if random.random() < 0.3 else -1
    if broken >= 0:
        logits[broken] = np.nan if vocab_size == num_ranks * width else logits[broken]
        logits[broken, vocab_size:] = np.nan
    temperatures = [random.choice((0.6, 1.0, 1.4)) for _ in range(num_reqs)]
    is_greedy = [random.random() < 0.3 for _ in range(num_reqs)]
    seeds = [random.getrandbits(63) for _ in range(num_reqs)]
    positions = [random.randrange(50) for _ in range(num_rows)]
    plain = random.random() < 0.2  # all are greedy, and nothing is given
    given = torch.from_numpy(logits)
    maxima = given.view(num_rows, num_ranks, width).amax(-1)
    found = []
    for rank in range(num_ranks):
        head: Any = _Part(vocab_size, rank * width, width, maxima)
        found.append(
            RankSampler(head, num_reqs, torch.device("cpu"))._best(
                given[:, rank * width : (rank + 1) * width],
                None if plain else torch.tensor(temperatures),
                None if plain else torch.tensor([0.0 if greedy else 1.0 for greedy in is_greedy]),
                None if plain else torch.from_numpy(gumbel.mix_seeds(seeds)),
                torch.tensor(positions),
                each,
                ahead,
            )
        )
    scores, ids = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    tokens = torch.empty(num_rows, dtype=torch.int64)
    combine_pieces(scores, ids, None, None, tokens)
    for row, token in enumerate(tokens.tolist()):
        greedy = plain or is_greedy[row // each]
        query = Query((), seeds[row // each], temperature=0.0 if greedy else temperatures[row // each])
        own = scores_of(logits[row, :vocab_size].astype(np.float64), query, positions[row] + ahead)
        is_right = 0 <= token < vocab_size and (row == broken or own[token] >= own.max() - TOLERANCE)
        if not is_right:
            yield (
                f"{num_ranks} ranks draw {token} of {vocab_size} tokens in row {row} of {num_rows}, {each} a request"
            )


# --- graphs and results


class _Captured(Graph):
    """A graph of nothing."""

    def _replay(self) -> None: ...


class _Steps(GraphRunner):
    """A runner whose memory is at ``place``."""

    place = 0

    def addresses(self) -> Sequence[int]:
        return [self.place]


def _graphs(random: Random) -> Iterator[str]:
    """Sizes for which nothing could be captured are not used; a step runs in the smallest one that holds it, as long as
    the memory is where it was; and the counts of the warm-up are forgotten."""
    sizes = sorted(random.sample(range(1, 9), random.randint(1, 4)))
    kept = [size for size in sizes if random.random() < 0.7]
    device, padding = CpuDevice(), random.random() < 0.6
    runner = _Steps(device, "contract", "steps", sizes, padding)

    def capture(pool: GraphPool, size: int) -> Sequence[Graph]:
        return [_Captured(f"contract[{size}]", pool)] if size in kept else []

    runner._capture_sizes(capture, show_progress=False)
    if [*runner.sizes] != kept:
        yield f"{runner.sizes} of the sizes {sizes} are used, {kept} are captured"
        return
    right = GraphStats(replays_by_size={str(size): 0 for size in kept})
    for _ in range(6):
        num, runner.place = random.randint(1, 9), random.choice((0, 0, 1))
        fitting = [size for size in kept if size == num or (padding and size > num)]
        size = runner.graph_size(num)
        expected = min(fitting) if fitting and runner.place == 0 else None
        if size != expected:
            yield f"a step of {num} runs in {size} of {kept}, not in {expected}"
            return
        right.eligible_steps += 1
        if size is not None:
            runner.stats.count_replay(size)
            right.replays += 1
            right.replays_by_size[str(size)] += 1
            continue
        larger = any(one > num for one in kept)
        reason = "address" if fitting else "padding" if larger else "size"
        right.fallbacks[reason] = right.fallbacks.get(reason, 0) + 1
    stats = runner.stats
    right.capture_s, right.capture_bytes = stats.capture_s, stats.capture_bytes
    if stats != right:
        yield f"{stats} is counted, {right} has happened"
    stats.repairs["arena"] = random.randint(1, 3)
    stats.restart()
    begun = GraphStats(0, 0, {str(size): 0 for size in kept}, {}, {}, stats.capture_s, stats.capture_bytes)
    if stats != begun:
        yield f"counts begin again with {stats}"


class _Lost(Exception):
    pass


class _Arrived:
    """Results that have arrived."""

    produced = None

    def wait(self) -> dict[str, Any]:
        return {"next_tokens": np.array([3])}


def _results(random: Random) -> Iterator[str]:
    """Results that are not valid, because another rank is lost, are not returned."""

    def fails() -> NoReturn:
        raise _Lost

    for check in (None, fails):
        lease: Any = _Arrived()
        wait: Callable[[], object] = ForwardResult(lease, check).wait
        try:
            wait()
            is_taken = True
        except _Lost:
            is_taken = False
        if is_taken == (check is not None):
            yield f"results are {'' if is_taken else 'not '}taken"
