"""DecodeRunner: brings a DecodeBatch into the arena where it changed, and runs its step, by a graph where it can."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fenceline.layers.attention.base import AttentionBackend
from fenceline.layers.forward_batch import AttentionInputs, ForwardMode
from fenceline.mem_cache.kv_pool import ReqPool
from fenceline.memory_order import Device, comparison
from fenceline.memory_order.guards import SAME_COMPOSITION
from fenceline.model_executor.cuda_graph_runner import CudaGraphRunner
from fenceline.model_executor.decode_step import Arrays, DecodeStep, plan_arrays
from fenceline.model_executor.step import DecodeBatch
from fenceline.sampling.sampling_batch import SamplingBatch, sampling_arrays

Views = Mapping[str, torch.Tensor]
Sample = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, SamplingBatch], dict[str, torch.Tensor]]


class RepairError(AssertionError):
    """The arena did not hold the batch that was to run. Raised where repairs are not tolerated: in tests."""


@dataclass(slots=True)
class _Filled:
    """The batch that the arena holds."""

    composition: int
    num_reqs: int
    first_seq_lens: npt.NDArray[np.int64]  # at the first step after the fill
    sampling: SamplingBatch
    num_steps: int = 0

    def holds(self, batch: DecodeBatch) -> bool:
        """Whether the device's lengths, advanced step by step, are the batch's."""
        return np.array_equal(self.first_seq_lens + self.num_steps, batch.seq_lens)


class DecodeRunner:
    """One device's decode steps. All methods are called with FORWARD current, but for ``arrays``."""

    def __init__(
        self,
        device: Device,
        step: DecodeStep,
        attention: AttentionBackend,
        req_pool: ReqPool,
        graphs: CudaGraphRunner | None,
        sample: Sample,
    ) -> None:
        """``sample``: the Sampler with all its features; logits float32, positions, rows, parameters → results."""
        self.graphs = graphs
        self._device = device
        self._same = comparison(device, SAME_COMPOSITION)
        self._step = step
        self._attention = attention
        self._req_pool = req_pool
        self._sample = sample
        self._filled: _Filled | None = None

    def arrays(self, batch: DecodeBatch) -> Arrays:
        """What has to be uploaded before :meth:`run`: nothing if the requests are those of the step before."""
        filled = self._filled
        if filled is not None and self._same(filled.composition, batch.composition):
            if filled.holds(batch):
                return {}
            self._count_repair(batch, filled)
        sampling = sampling_arrays(batch.sampling)
        return sampling | plan_arrays(batch, sampling)

    def run(self, batch: DecodeBatch, views: Views) -> dict[str, torch.Tensor]:
        """Submit the step. Returns the results, good until the next step is submitted."""
        if "plan_rows" in views:
            self._fill(batch, views)
        filled = self._filled
        assert filled is not None, "the first batch fills the arena"
        size = self._size_for(batch, filled)
        if size is None:
            results = self._run_eager(batch, filled)
        else:
            results = self._replay(size, batch, filled)
        filled.num_steps += 1
        return results

    def _fill(self, batch: DecodeBatch, views: Views) -> None:
        num_reqs = len(batch.rows)
        self._step.fill(views, num_reqs)
        self._filled = _Filled(
            composition=batch.composition,
            num_reqs=num_reqs,
            first_seq_lens=batch.seq_lens.copy(),
            sampling=SamplingBatch.from_views(batch.sampling, views),
        )

    def _count_repair(self, batch: DecodeBatch, filled: _Filled) -> None:
        if not self._device.tolerates_repairs:
            raise RepairError(
                f"the arena's lengths are {filled.first_seq_lens + filled.num_steps}, the batch's {batch.seq_lens}"
            )
        if self.graphs is not None:
            repairs = self.graphs.stats.repairs
            repairs["arena"] = repairs.get("arena", 0) + 1

    def _size_for(self, batch: DecodeBatch, filled: _Filled) -> int | None:
        graphs = self.graphs
        if graphs is None:
            return None
        graphs.stats.eligible_steps += 1
        size = graphs.size_for(filled.num_reqs)
        return size if size is not None and graphs.fits() else None

    def _replay(self, size: int, batch: DecodeBatch, filled: _Filled) -> dict[str, torch.Tensor]:
        assert self.graphs is not None
        outputs = self.graphs.replay(size, batch.seq_lens)
        num_reqs = filled.num_reqs
        if filled.sampling.is_plain:
            return {"next_tokens": outputs.take("next_tokens", num_reqs)}
        positions = outputs.take("seq_lens", num_reqs)
        return self._sample(
            self.graphs.logits(num_reqs).float(), positions, self._step.rows[:num_reqs], filled.sampling
        )

    def _run_eager(self, batch: DecodeBatch, filled: _Filled) -> dict[str, torch.Tensor]:
        step, size = self._step, filled.num_reqs
        step.derive_inputs(size)
        rows, seq_lens = step.rows[:size], step.seq_lens[:size]
        inputs = AttentionInputs(
            mode=ForwardMode.DECODE,
            page_table=self._req_pool.page_table,
            rows=rows,
            seq_lens=seq_lens,
            seq_lens_cpu=batch.seq_lens,
            query_lens_cpu=np.ones(size, dtype=np.int64),
        )
        logits = step.forward(size, self._attention.plan(inputs))
        step.count_step(size)
        return self._sample(logits.float(), seq_lens, rows, filled.sampling)
