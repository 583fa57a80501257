"""FlashAttention-3 as an attention backend: ``flash_attn_with_kvcache`` of the sglang-kernel package.

There is no plan step on the host: the kernels read lengths and page tables from device memory and divide the work
there, so a graph's replay needs nothing from the host. Queries are the last tokens of their sequences, which is how
FlashAttention aligns its causal mask (bottom right), for prefill and decode alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol

import torch

from fenceline.layers.attention.base import NO_RULES, PLAIN, AttentionBackend, LayerRules
from fenceline.layers.forward_batch import AttentionInputs, AttentionPlan, ForwardMode, GraphDecodeInputs
from fenceline.mem_cache.kv_pool import KVPool

_REMEDY = "pip install sglang-kernel, or use --attention-backend flashinfer or triton"
_TABLE_ALIGN = 16  # columns; aligned rows of the table can be read several ids at a time


class FlashAttention(Protocol):
    """The part of flash_attn_with_kvcache's signature that this backend uses."""

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        cache_seqlens: torch.Tensor,
        page_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
    ) -> torch.Tensor: ...


def load_flash_attention() -> FlashAttention:
    """flash_attn_with_kvcache from sglang-kernel (formerly sgl-kernel). Raises ValueError with the remedy if it is
    missing or does not support this GPU."""
    try:
        module = import_module("sgl_kernel.flash_attn")
    except ImportError as error:
        raise ValueError(f"--attention-backend fa3: FlashAttention-3 is not installed ({error}): {_REMEDY}") from error
    if not module.is_fa3_supported():
        raise ValueError(
            "--attention-backend fa3: the installed sglang-kernel has no FlashAttention-3 for this GPU and CUDA: "
            "use --attention-backend flashinfer or triton"
        )
    attend: FlashAttention = module.flash_attn_with_kvcache
    return attend


class Fa3AttentionBackend(AttentionBackend):
    """Plans over one KV pool. Keeps no state between batches. ``attend``: the function to call; None: that of the
    installed package. Raises ValueError with the remedy if the package is missing, for an unsupported dtype of the
    pool, and for layers with sinks."""

    def __init__(
        self, kv_pool: KVPool, attend: FlashAttention | None = None, rules: Mapping[int, LayerRules] = NO_RULES
    ) -> None:
        if any(rule.sinks is not None for rule in rules.values()):
            raise ValueError("--attention-backend fa3 does not support attention sinks: use --attention-backend triton")
        dtype = kv_pool.row(0, "k").dtype
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"--attention-backend fa3 needs bfloat16 or float16, not {dtype}: use --dtype bfloat16 or "
                "--attention-backend triton"
            )
        self.kv_pool = kv_pool
        self.rules = rules
        self.attend = load_flash_attention() if attend is None else attend

    def persistent(self, mode: ForwardMode) -> bool:
        """The kernels for both modes launch one block for each SM, and each block computes tile after tile."""
        return True

    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        """Gathers the batch's page table on the current stream. No host synchronisation."""
        assert len(inputs.seq_lens_cpu) > 0, "an empty batch has nothing to attend to"
        assert bool((inputs.seq_lens_cpu >= inputs.query_lens_cpu).all()), "seq_lens include this step's tokens"
        if inputs.mode is ForwardMode.DECODE:
            starts = _one_each(inputs.rows)
        else:
            assert not inputs.whole, "images that are seen whole are torch's"
            assert inputs.query_starts is not None, "EXTEND says where each request's queries start"
            starts = inputs.query_starts
        plan = _Plan(
            self,
            (inputs.page_table, inputs.rows, inputs.seq_lens),
            starts,
            int(inputs.query_lens_cpu.max()),
            int(inputs.seq_lens_cpu.max()),
        )
        plan.prepare()
        return plan

    def plan_graph(self, inputs: GraphDecodeInputs) -> AttentionPlan | None:
        """See ``AttentionBackend.plan_graph``: the graph gathers rows and lengths itself."""
        tensors = (inputs.page_table, inputs.rows, inputs.seq_lens)
        return _Plan(self, tensors, _one_each(inputs.rows), 1, inputs.max_seq_len)


class _Plan(AttentionPlan):
    """The batch's rows of the page table and its lengths. ``prepare`` writes them to memory that the plan keeps."""

    def __init__(
        self,
        backend: Fa3AttentionBackend,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        starts: torch.Tensor,
        max_query_len: int,
        max_seq_len: int,
    ) -> None:
        self.backend, self.starts, self.max_query_len = backend, starts, max_query_len
        self._page_table, self._rows, self._seq_lens = inputs
        page_size, size = backend.kv_pool.page_size, len(self._rows)
        columns = -(-max_seq_len // page_size)
        columns = -(-columns // _TABLE_ALIGN) * _TABLE_ALIGN
        # Zeros, so that entries that have not been written name the sink page.
        self.table = torch.zeros((size, columns), dtype=torch.int32, device=starts.device)
        self.seq_lens = torch.ones(size, dtype=torch.int32, device=starts.device)

    def prepare(self) -> None:
        from fenceline.layers.kernels.triton.page_gather import gather_page_rows

        page_size = self.backend.kv_pool.page_size
        gather_page_rows(self._page_table, self._rows, self._seq_lens, page_size, self.table, self.seq_lens)

    def forward(self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        pool, rules = self.backend.kv_pool, self.backend.rules.get(layer_id, PLAIN)
        shape = (pool.num_pages, pool.page_size, *pool.row(layer_id, "k").shape[1:])
        return self.backend.attend(
            q,
            pool.row(layer_id, "k").view(shape),
            pool.row(layer_id, "v").view(shape),
            cache_seqlens=self.seq_lens,
            page_table=self.table,
            cu_seqlens_q=self.starts,
            max_seqlen_q=self.max_query_len,
            softmax_scale=scale,
            causal=True,
            window_size=(-1 if rules.window is None else rules.window - 1, -1 if rules.window is None else 0),
            softcap=rules.soft_cap,
        )


def _one_each(rows: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)
