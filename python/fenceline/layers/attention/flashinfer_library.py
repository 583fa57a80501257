"""FlashInfer's compiled kernels, called with memory that we own.

FlashInfer's wrapper classes are not used, for two reasons. Each has a pinned buffer that ``plan()`` rewrites even if
the last copy from it has not run yet (F12), and they copy index arrays from the host that are already on the device.

The wrappers call modules with two functions, and this file calls these directly. ``plan`` reads lengths on the host,
writes its result to a pinned buffer and submits one cudaMemcpyAsync of it to an integer workspace on the current stream
(flashinfer/attention/scheduler.cuh: DecodePlan, PrefillPlan, PrefillSM90Plan); nothing else in it is asynchronous.
``run`` launches the kernels.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fenceline.memory_order import Device

REMEDY = "install the extra with pip install 'fenceline[cuda]', or use --attention-backend triton"
_VERSIONS = ("0.6.", "0.7.")  # versions whose plan and run functions have the signatures used here
_HEAD_DIMS = (64, 128, 256)
_NHD, _NON_CAUSAL, _CAUSAL, _NO_POSITIONS, _WHOLE_WINDOW = 0, 0, 1, 0, -1  # values of FlashInfer's enums
# Programmatic dependent launch lets a kernel begin before the preceding one has ended. Then a wait inside the kernel
# orders its reads and not the stream, but this code relies on the order of the stream.
_DEPENDENT_LAUNCH = False

_LOWEST_PRIORITY = 19  # of the system's scheduler, see nice(1)

logger = logging.getLogger(__name__)

# What ``plan`` returns and ``run`` takes: offsets into the integer workspace, and sizes of the launch.
PlanInfo = Sequence[int]
Lens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the kernels are compiled and planned for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    window: int | None = None  # see LayerRules
    soft_cap: float = 0.0

    @property
    def window_left(self) -> int:
        """The window as FlashInfer counts it: how many tokens before its own a query attends to; -1: all."""
        return _WHOLE_WINDOW if self.window is None else self.window - 1

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Workspace:
    """``floats`` for partial results and ``ints`` for the plan, both uint8 on the device. A plan is written to
    ``pinned``, which is no smaller than ``ints``, and copied to ``ints`` from there."""

    floats: torch.Tensor
    ints: torch.Tensor
    pinned: torch.Tensor


@dataclass(frozen=True, slots=True)
class Pages:
    """A batch's pages on the device, all int32; see ``page_gather.gather_page_indices``."""

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_lens: torch.Tensor


def load_library() -> None:
    """Import FlashInfer. Raises ValueError with the remedy if it is missing or its version is not supported."""
    try:
        installed = version("flashinfer-python")
        import_module("flashinfer")
    except (PackageNotFoundError, ImportError) as error:
        raise ValueError(f"--attention-backend flashinfer: it is not installed ({error}): {REMEDY}") from error
    if not installed.startswith(_VERSIONS):
        raise ValueError(
            f"--attention-backend flashinfer: version {installed} is installed, 0.6 or 0.7 is needed: {REMEDY}"
        )


def check_shape(shape: AttentionShape) -> None:
    """Raise ValueError with the remedy if FlashInfer has no kernels for ``shape``."""
    if shape.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"--attention-backend flashinfer needs bfloat16 or float16, not {shape.dtype}: use --dtype bfloat16 or "
            "--attention-backend triton"
        )
    if shape.head_dim not in _HEAD_DIMS:
        raise ValueError(
            f"--attention-backend flashinfer has no kernels for heads of {shape.head_dim}: "
            "use --attention-backend triton"
        )


class Module(Protocol):
    """A module of kernels, which may have to be compiled first."""

    @property
    def is_compiled(self) -> bool:
        """Whether it can be used without compiling it. This call may write its sources to the cache."""

    @property
    def functions(self) -> Any:
        """Its ``plan`` and ``run`` functions. May compile them first, for a minute and a half."""

    def begin_to_compile(self) -> None:
        """Compile it in the background unless it is compiled. ``functions`` waits for that, and raises its errors."""


class Library(Protocol):
    """What the backend needs of FlashInfer. The virtual GPU, which cannot run its kernels, has another."""

    plan_bytes: int  # the largest size of a batch's plan
    plan_slots: int  # how many plans may be in use or being copied at the same time

    @property
    def split_args(self) -> tuple[object, ...]:
        """The last arguments of fa2's plan: it decides how keys are split."""

    def check(self, device: Device, shape: AttentionShape) -> None:
        """Raise ValueError with the remedy if there are no kernels for ``shape`` on ``device``."""

    def num_sms(self, device: torch.device) -> int:
        """Multiprocessors of ``device``."""

    def prefill_generation(self, device: torch.device, dtype: torch.dtype) -> str:
        """Which prefill kernels ``device`` uses: fa2 or fa3."""

    def prefill_module(self, shape: AttentionShape, generation: str) -> Module:
        """The kernels for any number of queries for each request."""

    def decode_module(self, shape: AttentionShape) -> Module:
        """The kernels for one query for each request, on CUDA cores."""


class _CompiledModule:
    """A module of the installed package. It is compiled when it is first needed and kept in ~/.cache/flashinfer."""

    def __init__(self, module: str, generate: Sequence[str], get: str, args: tuple[object, ...]) -> None:
        self._module, self._generate, self._get, self._args = module, generate, get, args
        self._functions: Any = None

    @property
    def is_compiled(self) -> bool:
        return self._functions is not None or bool(self._spec().is_compiled)

    @property
    def functions(self) -> Any:
        if self._functions is None:
            self._functions = getattr(import_module(self._module), self._get)(*self._args)
        return self._functions

    def begin_to_compile(self) -> None:
        """See ``Module``. The compilers have the lowest priority, since steps may be computed meanwhile. FlashInfer
        locks the module, so that of several processes one compiles it."""
        if not self.is_compiled:
            spec = self._spec()
            logger.info("Compiling FlashInfer's module %s in the background", spec.name)
            threading.Thread(target=self._compile, args=(spec,), name="compile", daemon=True).start()

    def _compile(self, spec: Any) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)  # Linux: of this thread alone
        try:
            spec.build(verbose=False, need_lock=True)
        except Exception as error:  # whoever asks for the functions gets it as well, and says what to do
            logger.info("FlashInfer's module %s does not compile", spec.name)
            logger.debug("", exc_info=error)
        else:
            logger.info("FlashInfer's module %s is compiled", spec.name)

    def _spec(self) -> Any:
        generators = import_module("flashinfer.jit.attention.modules")
        name = next(name for name in self._generate if hasattr(generators, name))
        return getattr(generators, name)(*self._args)


class InstalledLibrary:
    """The package ``flashinfer-python``."""

    plan_bytes = 8 << 20  # as in FlashInfer's own wrappers
    plan_slots = 2  # one plan is copied while the preceding step still reads another

    @property
    def split_args(self) -> tuple[object, ...]:
        """See ``Library``. The compiled function has no defaults, and later versions have more arguments."""
        release = tuple(map(int, re.findall(r"\d+", version("flashinfer-python"))[:3]))
        args: tuple[object, ...] = (-1, False, 0)  # no size of a split, splits allowed, no other kernel beside it
        if release >= (0, 6, 16):
            args += (0,)  # lengths of queries may differ,
        if release >= (0, 7, 3):
            args += (False,)  # and do not stay what they are
        return args

    def check(self, device: Device, shape: AttentionShape) -> None:
        check_shape(shape)
        if device.kind != "cuda":
            raise ValueError("--attention-backend flashinfer needs an NVIDIA GPU: use --attention-backend torch")
        load_library()

    def num_sms(self, device: torch.device) -> int:
        count: int = torch.cuda.get_device_properties(device).multi_processor_count
        return count

    def prefill_generation(self, device: torch.device, dtype: torch.dtype) -> str:
        """``fa3`` where FlashInfer has it for this GPU, else ``fa2``."""
        determine: Callable[..., str] = import_module("flashinfer.utils").determine_attention_backend
        return determine(device, _NO_POSITIONS, False, False, dtype, dtype)

    def prefill_module(self, shape: AttentionShape, generation: str) -> Module:
        args = (generation, *_module_args(shape), False)  # no products of q and k in half precision
        generate = ["gen_batch_prefill_module"]
        if generation == "fa2":  # from 0.7.2 on what FlashInfer itself loads is another module than the public one
            generate.insert(0, "_gen_batch_prefill_primary_module")
        return _CompiledModule("flashinfer.prefill", generate, "get_batch_prefill_module", args)

    def decode_module(self, shape: AttentionShape) -> Module:
        generate, get = ["gen_batch_decode_module"], "get_batch_decode_module"
        return _CompiledModule("flashinfer.decode", generate, get, _module_args(shape))


def _module_args(shape: AttentionShape) -> tuple[object, ...]:
    dims = (shape.head_dim, shape.head_dim)
    dtypes = (shape.dtype, shape.dtype, shape.dtype, torch.int32)
    return (*dtypes, *dims, _NO_POSITIONS, shape.window is not None, shape.soft_cap > 0)


class PrefillKernels:
    """Attention of any number of queries for each request, on tensor cores: ``fa3`` on Hopper, else ``fa2``."""

    def __init__(self, shape: AttentionShape, generation: str, library: Library) -> None:
        self.shape, self.generation = shape, generation
        self._module = library.prefill_module(shape, generation)
        self._split_args = library.split_args

    @property
    def is_compiled(self) -> bool:
        """Whether using it costs no compilation."""
        return self._module.is_compiled

    @property
    def functions(self) -> Any:
        """The module's functions. The first call on a machine compiles them, for a minute and a half."""
        return self._module.functions

    def begin_to_compile(self) -> None:
        self._module.begin_to_compile()

    def plan(
        self,
        space: Workspace,
        query_lens: Lens,
        seq_lens: Lens,
        *,
        paged: bool,
        causal: bool = True,
        graph: bool = False,
    ) -> PlanInfo:
        """Plan on the host and submit the copy to ``space.ints`` to the current stream. ``graph``: the launch and the
        plan's layout then depend on nothing but the number of requests."""
        shape = self.shape
        page_size = shape.page_size if paged else 1
        starts = _starts(query_lens)
        args: list[object] = [space.floats, space.ints, space.pinned]
        args += [starts, _starts(-(-seq_lens // page_size)), _ints(seq_lens)]
        args += [int(starts[-1]), len(seq_lens), shape.num_heads, shape.num_kv_heads, page_size, graph]
        args += [shape.head_dim, shape.head_dim, causal, shape.window_left]
        if self.generation == "fa2":
            args += self._split_args
        info: PlanInfo = self._module.functions.plan(*args)
        return info

    def run_paged(
        self,
        space: Workspace,
        info: PlanInfo,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        query_starts: torch.Tensor,
        pages: Pages,
        scale: float,
        *,
        causal: bool = True,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [T, num_heads, head_dim] against pages [num_pages, page_size, num_kv_heads, head_dim] → ``out``."""
        out = _output(q) if out is None else out
        self._module.functions.paged_run(
            float_workspace_buffer=space.floats,
            int_workspace_buffer=space.ints,
            plan_info_vec=info,
            q=q,
            paged_k_cache=k_pages,
            paged_v_cache=v_pages,
            qo_indptr=query_starts,
            paged_kv_indptr=pages.indptr,
            paged_kv_indices=pages.indices,
            paged_kv_last_page_len=pages.last_page_lens,
            o=out,
            scale_q=None,
            scale_k=None,
            scale_v=None,
            workspace_size=space.floats.numel(),
            **_common(self.shape, scale, causal),
        )
        return out

    def run_ragged(
        self,
        space: Workspace,
        info: PlanInfo,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        starts: torch.Tensor,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q against this step's own k, v [T, num_kv_heads, head_dim], for requests without a prefix; see run_paged."""
        out = _output(q) if out is None else out
        self._module.functions.ragged_run(
            float_workspace_buffer=space.floats,
            int_workspace_buffer=space.ints,
            plan_info_vec=info,
            q=q,
            k=k,
            v=v,
            qo_indptr=starts,
            kv_indptr=starts,
            o=out,
            **_common(self.shape, scale, True),
        )
        return out


class DecodeKernels:
    """Attention of one query for each request on CUDA cores. For small groups of query heads this is faster than on
    tensor cores, whose tiles would be mostly padding."""

    def __init__(self, shape: AttentionShape, library: Library) -> None:
        self.shape = shape
        self._module = library.decode_module(shape)

    @property
    def is_compiled(self) -> bool:
        """Whether using it costs no compilation."""
        return self._module.is_compiled

    def plan(self, space: Workspace, seq_lens: Lens, *, graph: bool) -> PlanInfo:
        shape = self.shape
        empty = torch.empty(0, dtype=shape.dtype)
        args: list[object] = [space.floats, space.ints, space.pinned]
        args += [_starts(-(-seq_lens // shape.page_size)), len(seq_lens)]
        args += [shape.num_heads, shape.num_kv_heads, shape.page_size, graph]
        args += [shape.window_left, shape.soft_cap]
        args += [shape.head_dim, shape.head_dim, empty, empty]
        info: PlanInfo = self._module.functions.plan(*args)
        return info

    def run(
        self,
        space: Workspace,
        info: PlanInfo,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        pages: Pages,
        scale: float,
    ) -> torch.Tensor:
        """q [B, num_heads, head_dim] against pages [num_pages, page_size, num_kv_heads, head_dim]."""
        out = _output(q)
        self._module.functions.run(
            float_workspace_buffer=space.floats,
            int_workspace_buffer=space.ints,
            plan_info_vec=info,
            q=q,
            paged_k_cache=k_pages,
            paged_v_cache=v_pages,
            paged_kv_indptr=pages.indptr,
            paged_kv_indices=pages.indices,
            paged_kv_last_page_len=pages.last_page_lens,
            o=out,
            maybe_lse=None,
            kv_layout_code=_NHD,
            window_left=self.shape.window_left,
            enable_pdl=_DEPENDENT_LAUNCH,
            alibi_slopes=None,
            logits_soft_cap=self.shape.soft_cap,
            sm_scale=scale,
            rope_scale=1.0,
            rope_theta=1e4,
        )
        return out


@cache  # callers must not change the result
def _common(shape: AttentionShape, scale: float, causal: bool) -> dict[str, object]:
    return {
        "maybe_lse": None,
        "mask_mode": _CAUSAL if causal else _NON_CAUSAL,
        "layout": _NHD,
        "window_left": shape.window_left,
        "enable_pdl": _DEPENDENT_LAUNCH,
        "maybe_custom_mask": None,
        "maybe_mask_indptr": None,
        "maybe_alibi_slopes": None,
        "maybe_prefix_len_ptr": None,
        "maybe_token_pos_in_items_ptr": None,
        "maybe_max_item_len_ptr": None,
        "logits_soft_cap": shape.soft_cap,
        "sm_scale": scale,
        "rope_scale": 1.0,
        "rope_theta": 1e4,
        "token_pos_in_items_len": 0,
    }


def _output(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape)


def _ints(values: Sequence[int] | Lens) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int32))


def _starts(lens: Lens) -> torch.Tensor:
    """Lengths [n] → [n + 1] int32 on the host: where each begins, then the sum."""
    starts = np.zeros(len(lens) + 1, dtype=np.int32)
    np.cumsum(lens, out=starts[1:])
    return torch.from_numpy(starts)
