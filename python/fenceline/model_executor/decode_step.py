"""A decode step over an arena: the one function that eager steps run and that graphs capture.

The arena holds the batch. Its PLAN fields are written when the batch changes; every step derives its INPUT fields from
them and from how many steps have run since, so that in steady decode the host submits nothing but the step. Padded
requests have row 0: they read and write the sink alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from fenceline.layers.forward_batch import AttentionPlan, ForwardBatch, ForwardMode
from fenceline.mem_cache.kv_pool import KVPool, ReqPool
from fenceline.memory_order import Arena, ArenaField, Device, Role
from fenceline.memory_order.guards import SINK
from fenceline.model_executor.kernels.decode_prologue import decode_prologue
from fenceline.model_executor.step import DecodeBatch
from fenceline.models.decoder import CausalLM
from fenceline.sampling.kernels.sample import sample_tokens

Arrays = dict[str, npt.NDArray[np.generic]]
_PLAN = ("plan_rows", "plan_seq_lens", "temperatures", "noise_scales", "seed_keys")


def plan_arrays(batch: DecodeBatch, sampling: Mapping[str, npt.NDArray[np.generic]]) -> Arrays:
    """What the PLAN fields hold for ``batch``, [B] each. ``sampling``: its ``sampling_arrays``; greedy where absent."""
    num = len(batch.rows)
    return {
        "plan_rows": batch.rows,
        "plan_seq_lens": batch.seq_lens,
        "temperatures": sampling.get("temperatures", np.ones(num, np.float32)),
        "noise_scales": sampling.get(
            "noise_scales",
            np.ones(num, np.float32) if "seed_keys" in sampling else np.zeros(num, np.float32),
        ),
        "seed_keys": sampling.get("seed_keys", np.zeros(num, np.int64)),
    }


class DecodeStep:
    """Decode for up to ``max_batch`` requests. Everything is submitted to the current stream, FORWARD."""

    def __init__(
        self,
        device: Device,
        model: CausalLM,
        kv_pool: KVPool,
        req_pool: ReqPool,
        max_batch: int,
    ) -> None:
        self.model = model
        self._kv_pool = kv_pool
        self._req_pool = req_pool
        i64, f32 = torch.int64, torch.float32
        self.arena = Arena(
            device,
            "decode",
            max_batch,
            (
                ArenaField("plan_rows", i64, Role.PLAN, pad=SINK),
                ArenaField("plan_seq_lens", i64, Role.PLAN, pad=1),  # as of the first step after the fill
                ArenaField("temperatures", f32, Role.PLAN, pad=1.0),
                ArenaField("noise_scales", f32, Role.PLAN, pad=0.0),
                ArenaField("seed_keys", i64, Role.PLAN, pad=0),
                ArenaField("num_steps", i64, Role.INPUT, pad=0),  # since the fill
                ArenaField("seq_lens", i64, Role.INPUT, pad=1),  # with the token that the step computes
                ArenaField("positions", i64, Role.INPUT, pad=0),
                ArenaField("out_slots", i64, Role.INPUT, pad=0),
                ArenaField("input_ids", i64, Role.INPUT, pad=0),
                ArenaField("next_tokens", i64, Role.OUTPUT, pad=0),
            ),
        )
        self.seq_lens = self.arena.derived("seq_lens", "plan_seq_lens")

    @property
    def rows(self) -> torch.Tensor:
        """[max_batch] int64, each request's row."""
        return self.arena["plan_rows"]

    def fill(self, views: Mapping[str, torch.Tensor], num_live: int) -> None:
        """Take in a new batch: ``views`` hold its ``plan_arrays`` on the device."""
        self.arena.fill({name: views[name] for name in _PLAN}, num_live)

    def derive_inputs(self, size: int) -> None:
        """Write the INPUT fields of the first ``size`` requests for the step that is to run."""
        arena, pool = self.arena, self._req_pool
        decode_prologue(
            self.rows[:size],
            arena["plan_seq_lens"][:size],
            arena["num_steps"][:size],
            pool.page_table,
            pool.last_tokens,
            self._kv_pool.page_size,
            self.seq_lens[:size],
            arena["positions"][:size],
            arena["out_slots"][:size],
            arena["input_ids"][:size],
        )

    def forward(self, size: int, attn: AttentionPlan, logits_out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [size, vocab_size] in the model's dtype, after ``derive_inputs(size)``."""
        arena = self.arena
        batch = ForwardBatch(
            mode=ForwardMode.DECODE,
            input_ids=arena["input_ids"][:size],
            positions=arena["positions"][:size],
            out_slots=arena["out_slots"][:size],
            logits_index=None,
            attn=attn,
            kv_pool=self._kv_pool,
            logits_out=logits_out,
        )
        return self.model.forward(batch)

    def sample(self, size: int, logits: torch.Tensor) -> None:
        """Draw the next tokens of requests that need nothing but a temperature, keep them as the rows' last tokens,
        and count the step. Others' tokens are drawn again by the Sampler, from the same logits."""
        arena = self.arena
        sample_tokens(
            logits,
            arena["temperatures"][:size],
            arena["noise_scales"][:size],
            arena["seed_keys"][:size],
            positions=self.seq_lens[:size],
            thresholds=None,
            rows=self.rows[:size],
            last_tokens=self._req_pool.last_tokens,
            next_tokens=arena["next_tokens"][:size],
            steps=arena["num_steps"][:size],
        )

    def count_step(self, size: int) -> None:
        """Count a step whose tokens the Sampler has drawn without ``sample``."""
        self.arena["num_steps"][:size].add_(1)

    def addresses(self) -> Sequence[int]:
        """Where the memory lies that captured graphs have baked in beside the weights."""
        pool = self._kv_pool
        tensors = (self._req_pool.page_table, self._req_pool.last_tokens, pool.k(0), pool.v(0), self.rows)
        return [tensor.data_ptr() for tensor in tensors]
