"""FlashInfer's library for devices without its kernels: its two kinds of functions, ``plan`` and ``run``, in torch.

The attention backend is FlashInfer's own (``layers.attention.flashinfer_backend``) with all its memory and waits; only
the compiled functions are others. ``plan`` writes each request's numbers of queries and keys to the pinned buffer and
submits one copy of them on the current stream. ``run`` attends for the queries and to the keys that these numbers name
at the moment when it runs, and to no others. So a plan that has been overwritten, or not copied yet, gives wrong
values.

Importing this module makes two backends available on any device. :data:`FLASHINFER` decodes with the kernels for CUDA
cores and has room for one plan, so that each wait matters (two plans would leave so much time that the scheduler's own
order covers two of them); :data:`FLASHINFER_TENSOR_CORES` decodes with those for tensor cores and has room for two, as
on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fenceline.layers.attention.backends import AttentionSetting, register_attention_backend
from fenceline.layers.attention.flashinfer_backend import FlashInferAttentionBackend
from fenceline.layers.attention.flashinfer_library import AttentionShape, Module, PlanInfo
from fenceline.memory_order import Device
from fenceline.memory_order.kernel import KernelAccesses, declare_kernel, declared

FLASHINFER, FLASHINFER_TENSOR_CORES = "flashinfer_planned", "flashinfer_tensor_cores"
PLANNED = (FLASHINFER, FLASHINFER_TENSOR_CORES)  # both backends

_CAUSAL = 1  # its mask_mode

I64 = npt.NDArray[np.int64]


def _plan(ints: torch.Tensor, pinned: torch.Tensor, query_lens: I64, kv_lens: I64) -> PlanInfo:
    """Write the plan, int32 [requests, 2], to ``pinned`` and submit its copy to ``ints``; its bytes."""
    numbers = np.stack([query_lens, kv_lens], axis=1).astype(np.int32)
    assert numbers.nbytes <= min(ints.numel(), pinned.numel()), "the plan fits its memory"
    pinned.numpy()[: numbers.nbytes].view(np.int32)[:] = numbers.reshape(-1)
    ints[: numbers.nbytes].copy_(pinned[: numbers.nbytes], non_blocking=True)
    return [numbers.nbytes]


class _Rules(NamedTuple):
    """Which keys a query attends to, and how. ``window_left``: so many before its own; -1: all."""

    scale: float
    soft_cap: float
    window_left: int
    causal: bool


def _rules_of(args: dict[str, Any], causal: bool) -> _Rules:
    return _Rules(args["sm_scale"], args["logits_soft_cap"], args["window_left"], causal)


class _Request(NamedTuple):
    """What a plan names of a request: queries ``first`` .. ``stop - 1`` of the batch, of which number i is at position
    i + ``shift``, and the slots of its keys from position ``first_key`` on."""

    first: int
    stop: int
    shift: int
    first_key: int
    slots: I64


def _requests(plan: torch.Tensor, starts: Sequence[int], slots: Sequence[I64], window_left: int) -> list[_Request]:
    """Whatever ``plan`` holds, they have no queries and keys but their own. ``starts``: of the queries; ``slots``: of
    all keys of each request."""
    found = []
    numbers = plan.view(torch.int32).reshape(-1, 2).tolist()
    for (num_queries, num_keys), first, end, mine in zip(numbers, starts, starts[1:], slots, strict=False):
        first_key = 0 if window_left < 0 else max(len(mine) - (end - first) - window_left, 0)
        keys = mine[first_key : max(num_keys, first_key)]
        found.append(_Request(first, min(first + num_queries, end), len(mine) - end, first_key, keys))
    return found


def _paged_requests(
    plan: torch.Tensor, query_starts: torch.Tensor | None, indptr: torch.Tensor, indices: torch.Tensor,
    last_page_lens: torch.Tensor, page_size: int, window_left: int,
) -> list[_Request]:  # fmt: skip
    pages, starts = indices.numpy(), indptr.tolist()
    slots = []
    for start, stop, rest in zip(starts, starts[1:], last_page_lens.tolist(), strict=False):
        mine = pages[max(start, 0) : max(stop, 0)].astype(np.int64)
        of_pages = (mine[:, None] * page_size + np.arange(page_size)).reshape(-1)
        slots.append(of_pages[: max(len(of_pages) - page_size + rest, 0)])
    queries = range(len(slots) + 1) if query_starts is None else query_starts.tolist()
    return _requests(plan, queries, slots, window_left)


def _planned_slots(*operands: Any) -> I64:
    """The slots whose keys are attended to, request after request."""
    return np.concatenate([np.zeros(0, np.int64), *(request.slots for request in _paged_requests(*operands))])


@declare_kernel
def flashinfer_paged(
    op: KernelAccesses, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor,
    floats: torch.Tensor, *requests: Any,
) -> None:  # fmt: skip
    """``DecodeKernels.run`` and ``PrefillKernels.run_paged``: not launched programmatically, so nothing is early.
    Partial results are written to ``floats`` and read from there. ``requests``: the arguments of
    ``_paged_requests``."""
    for read in (q, *requests[:5]):
        op.read(read)
    for cache in (k_cache, v_cache):
        op.read_rows(cache, _planned_slots, *requests)
    op.write(floats)
    op.write(out)


# ``PrefillKernels.run_ragged``.
flashinfer_ragged = declared("flashinfer_ragged", "q k v out floats plan starts", "q k v plan starts -> floats out")


def _attend(
    requests: Sequence[_Request], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, rules: _Rules
) -> None:
    """q, out [T, num_heads, head_dim], k, v [slots, num_kv_heads, head_dim]. Rows that no plan names are zero."""
    out.zero_()
    for first, stop, shift, first_key, slots in requests:
        stop, at = min(stop, len(q)), torch.from_numpy(slots)
        if first >= stop or not len(at):
            continue
        keys, values = (x.index_select(0, at).float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[first:stop].float(), keys) * rules.scale
        if rules.soft_cap:
            scores = (scores / rules.soft_cap).tanh() * rules.soft_cap
        ago = torch.arange(first, stop)[:, None] + shift - first_key - torch.arange(len(at))
        beyond = (ago < 0) & rules.causal | (ago > rules.window_left) & (rules.window_left >= 0)
        weights = scores.masked_fill(beyond, float("-inf")).softmax(-1)
        weights = weights.masked_fill(beyond.all(-1, keepdim=True), 0)  # keys that an old plan does not name
        out[first:stop] = torch.einsum("hqk,khd->qhd", weights, values)


class _Prefill:
    """FlashInfer's fa2 prefill module, and its functions."""

    is_compiled = True

    def begin_to_compile(self) -> None:
        """See ``Module``."""

    @property
    def functions(self) -> Any:
        return self

    def plan(
        self, floats: torch.Tensor, ints: torch.Tensor, pinned: torch.Tensor, starts: torch.Tensor,
        kv_indptr: torch.Tensor, kv_lens: torch.Tensor, *unused: object,
    ) -> PlanInfo:  # fmt: skip
        return _plan(ints, pinned, np.diff(starts.numpy()), kv_lens.numpy())

    def paged_run(self, **args: Any) -> None:
        (nbytes,), (k_pages, v_pages) = args["plan_info_vec"], (args["paged_k_cache"], args["paged_v_cache"])
        rules = _rules_of(args, causal=args["mask_mode"] == _CAUSAL)

        def compute(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, _: torch.Tensor, *requests: Any
        ) -> None:
            _attend(_paged_requests(*requests), q, k, v, out, rules)

        memory = args["q"], k_pages.flatten(0, 1), v_pages.flatten(0, 1), args["o"], args["float_workspace_buffer"]
        pages = args["paged_kv_indptr"], args["paged_kv_indices"], args["paged_kv_last_page_len"]
        requests = args["int_workspace_buffer"][:nbytes], args["qo_indptr"], *pages, k_pages.shape[1]
        flashinfer_paged.launch(compute, *memory, *requests, rules.window_left)

    def ragged_run(self, **args: Any) -> None:
        (nbytes,), rules = args["plan_info_vec"], _rules_of(args, causal=True)

        def compute(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, _: torch.Tensor, *given: torch.Tensor
        ) -> None:
            plan, starts = given[0], given[1].tolist()
            slots = [np.arange(first, last) for first, last in zip(starts, starts[1:], strict=False)]
            _attend(_requests(plan, starts, slots, rules.window_left), q, k, v, out, rules)

        memory = args["q"], args["k"], args["v"], args["o"], args["float_workspace_buffer"]
        flashinfer_ragged.launch(compute, *memory, args["int_workspace_buffer"][:nbytes], args["qo_indptr"])


class _Decode(_Prefill):
    def plan(  # type: ignore[override]
        self, floats: torch.Tensor, ints: torch.Tensor, pinned: torch.Tensor, indptr: torch.Tensor, *sizes: Any
    ) -> PlanInfo:
        """See ``flashinfer_library.DecodeKernels.plan``. Of lengths it is told the pages alone."""
        num_pages, page_size = np.diff(indptr.numpy()), sizes[3]
        return _plan(ints, pinned, np.ones_like(num_pages), num_pages * page_size)

    def run(self, **args: Any) -> None:
        self.paged_run(**args, qo_indptr=None, mask_mode=None)


class PlannedLibrary:
    plan_bytes = 1 << 14
    split_args = ()

    def __init__(self, plan_slots: int) -> None:
        self.plan_slots = plan_slots

    def check(self, device: Device, shape: AttentionShape) -> None:
        """Everything can be computed."""

    def num_sms(self, device: torch.device) -> int:
        """See ``Library``: few, so that workspaces are small."""
        return 6

    def prefill_generation(self, device: torch.device, dtype: torch.dtype) -> str:
        return "fa2"

    def prefill_module(self, shape: AttentionShape, generation: str) -> Module:
        return _Prefill()

    def decode_module(self, shape: AttentionShape) -> Module:
        return _Decode()


def _make(setting: AttentionSetting, tensor_cores: bool) -> FlashInferAttentionBackend:
    library = PlannedLibrary(2 if tensor_cores else 1)
    given = setting.kv_pool, setting.device, setting.num_heads
    return FlashInferAttentionBackend(
        *given, tensor_cores=tensor_cores, library=library, layers=setting.own_layers, rules=setting.rules
    )


register_attention_backend(FLASHINFER, lambda setting: _make(setting, tensor_cores=False))
register_attention_backend(FLASHINFER_TENSOR_CORES, lambda setting: _make(setting, tensor_cores=True))
