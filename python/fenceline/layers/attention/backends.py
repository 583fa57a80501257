"""The attention backends by name. ``auto`` chooses the one that is fastest on this GPU. It measures them once at start,
with the shapes of the model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from fenceline.layers.attention.base import PLAIN, AttentionBackend, LayerRules, plan_extend, plan_mixed
from fenceline.layers.attention.cpu_backend import CpuAttentionBackend
from fenceline.layers.attention.fixed_order import FixedOrderAttentionBackend
from fenceline.layers.attention.reference import ReferenceAttentionBackend
from fenceline.layers.forward_batch import (
    AttentionInputs,
    AttentionPlan,
    BlockQueries,
    ForwardMode,
    GraphDecodeInputs,
    IndexQueries,
    VerifyInputs,
)
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.memory_order import Device

_AUTO = "auto"
_ANYWHERE = "torch"
_READ_FP8 = ("triton", _ANYWHERE)  # these can read a KV cache in FP8
_READ_LATENTS = ("triton", _ANYWHERE)  # and these one row that holds both keys and values
_SELECT = ("triton", _ANYWHERE)  # and these attend to the tokens that an indexer selects
# Tried in this order; flashinfer last, because it may have to be compiled first.
_CANDIDATES = ("triton", "fa3", "flashinfer")

logger = logging.getLogger(__name__)
# A backend that plans on the host needs a plan and a copy in every decode step, which kernel times do not contain.
# Therefore one without a plan step is taken unless its kernels are slower by more than this factor.
_PLAN_STEP_CREDIT = 1.1
_PLAN_STEP = frozenset({"flashinfer"})
# Why a backend that is not compiled is not measured.
_COLD = {
    ForwardMode.EXTEND: "being compiled for the next start (choose it by name to wait for it)",
    ForwardMode.DECODE: "not compiled (choose it by name to compile it)",
}
_NUM_CALLS = (8, 32)  # minimum and maximum of the attention calls in a measured step, one for each layer
_NUM_ROUNDS = 4


class BackendsByKind(AttentionBackend):
    """For models whose layers attend in different ways: each kind of layers has its own backend, and its own plan."""

    def __init__(self, parts: Sequence[tuple[Sequence[int], AttentionBackend]]) -> None:
        """``parts``: each backend with the layers in which it attends, as indices in the pool."""
        self.backends = tuple(backend for _, backend in parts)
        self.one_plan = any(backend.one_plan for backend in self.backends)
        self._index = {layer: index for index, (layers, _) in enumerate(parts) for layer in layers}

    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        return _Plans([backend.plan(inputs) for backend in self.backends], self._index)

    def persistent(self, mode: ForwardMode) -> bool:
        return any(backend.persistent(mode) for backend in self.backends)

    def is_compiled(self, mode: ForwardMode) -> bool:
        return all(backend.is_compiled(mode) for backend in self.backends)

    def begin_to_compile(self) -> None:
        for backend in self.backends:
            backend.begin_to_compile()

    def warm_up(self) -> None:
        for backend in self.backends:
            backend.warm_up()

    def plan_graph(self, inputs: GraphDecodeInputs) -> AttentionPlan | None:
        return self._of_all([backend.plan_graph(inputs) for backend in self.backends])

    def plan_verify(self, inputs: VerifyInputs) -> AttentionPlan | None:
        return self._of_all([backend.plan_verify(inputs) for backend in self.backends])

    def _of_all(self, plans: Sequence[AttentionPlan | None]) -> AttentionPlan | None:
        made = [plan for plan in plans if plan is not None]
        return _Plans(made, self._index) if len(made) == len(plans) else None

    def before_replay(self, bucket: int, seq_lens_cpu: npt.NDArray[np.int64]) -> None:
        for backend in self.backends:
            backend.before_replay(bucket, seq_lens_cpu)


class _WholeImages(AttentionBackend):
    """The backend of prefill steps ``usual``, and torch for those in which tokens of an image attend to one another,
    which no other backend computes."""

    def __init__(self, usual: AttentionBackend, torch_backend: AttentionBackend) -> None:
        self._usual, self._torch = usual, torch_backend
        self.one_plan = usual.one_plan

    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        return (self._torch if inputs.whole else self._usual).plan(inputs)

    def persistent(self, mode: ForwardMode) -> bool:
        return self._usual.persistent(mode)

    def is_compiled(self, mode: ForwardMode) -> bool:
        return self._usual.is_compiled(mode)

    def begin_to_compile(self) -> None:
        self._usual.begin_to_compile()

    def warm_up(self) -> None:
        self._usual.warm_up()


class _Plans(AttentionPlan):
    def __init__(self, plans: Sequence[AttentionPlan], index: Mapping[int, int]) -> None:
        self._plans, self._index = plans, index

    def prepare(self) -> None:
        for plan in self._plans:
            plan.prepare()

    def forward(self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        return self._plans[self._index[layer_id]].forward(layer_id, q, k, v, scale)

    def forward_into(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        self._plans[self._index[layer_id]].forward_into(layer_id, q, k, v, scale, out)

    def select(self, layer_id: int, index: IndexQueries) -> Sequence[torch.Tensor]:
        return self._plans[self._index[layer_id]].select(layer_id, index)

    def select_blocks(self, layer_id: int, wanted: BlockQueries) -> Sequence[torch.Tensor]:
        return self._plans[self._index[layer_id]].select_blocks(layer_id, wanted)

    def forward_selected(
        self,
        layer_id: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        tokens: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        return self._plans[self._index[layer_id]].forward_selected(layer_id, q, k, v, scale, tokens)


@dataclass(frozen=True, slots=True)
class AttentionSetting:
    """What a backend is made for: the KV pool, its device, this rank's number of query heads and the longest sequence.
    ``layers``: the layers of the pool in which the backend attends (None: all); their heads have the same number and
    size. ``rules``: those of the layers that have any. ``agreed`` takes the name that this rank has chosen by
    measurement and returns the name that all ranks use. ``fixed_order``: a query's result may depend on its sequence
    alone; on a GPU only ``triton`` can do that. ``sees_whole``: tokens of an image attend to one another."""

    kv_pool: KVPool
    device: Device
    num_heads: int
    context_length: int
    layers: Sequence[int] | None = None
    rules: Mapping[int, LayerRules] = field(default_factory=dict)
    agreed: Callable[[str], str] = str
    fixed_order: bool = False
    sees_whole: bool = False

    @property
    def own_layers(self) -> Sequence[int]:
        """The layers of the pool that the backend attends in."""
        return range(self.kv_pool.num_layers) if self.layers is None else self.layers

    @property
    def by_kind(self) -> list[AttentionSetting]:
        """One setting for each kind of layers, which have the same window and attend to the same rows in the pool."""
        parts: dict[tuple[object, ...], list[int]] = {}
        for layer in self.own_layers:
            rules = self.rules.get(layer, PLAIN)
            kind = rules.window, *(row for row in self.kv_pool.layout.layers[layer] if row.name in rules.rows)
            parts.setdefault(kind, []).append(layer)
        return [
            replace(self, layers=layers, rules={i: self.rules[i] for i in layers if i in self.rules})
            for layers in parts.values()
        ]


@dataclass(frozen=True, slots=True)
class MeasuredBatch:
    """Requests of ``num_tokens`` each. In EXTEND all of them are new except a prefix, in DECODE only the last is. The
    whole pages of the first ``shared_len`` tokens are the same for all requests."""

    num_requests: int
    num_tokens: int
    prefix_len: int = 0
    shared_len: int = 0


BATCHES: Mapping[ForwardMode, MeasuredBatch] = {
    ForwardMode.EXTEND: MeasuredBatch(4, 1024),
    ForwardMode.DECODE: MeasuredBatch(32, 1024),
}


def _make_fa3(setting: AttentionSetting) -> AttentionBackend:
    from fenceline.layers.attention.fa3_backend import Fa3AttentionBackend

    return Fa3AttentionBackend(setting.kv_pool, rules=setting.rules)


def _make_flashinfer(setting: AttentionSetting) -> AttentionBackend:
    from fenceline.layers.attention.flashinfer_backend import FlashInferAttentionBackend

    return FlashInferAttentionBackend(
        setting.kv_pool, setting.device, setting.num_heads, layers=setting.own_layers, rules=setting.rules
    )


def _make_torch(setting: AttentionSetting) -> AttentionBackend:
    if setting.kv_pool.device.type != "cpu":
        return ReferenceAttentionBackend(setting.kv_pool, setting.rules)
    kind = FixedOrderAttentionBackend if setting.fixed_order else CpuAttentionBackend
    return kind(setting.kv_pool, setting.rules)


def _make_triton(setting: AttentionSetting) -> AttentionBackend:
    try:
        from fenceline.layers.attention.triton_backend import TritonAttentionBackend
    except ImportError as error:
        raise ValueError(
            f"--attention-backend triton: Triton is not installed ({error}): pip install 'fenceline[cuda]', or use "
            "--attention-backend torch"
        ) from error
    longest = setting.context_length if setting.fixed_order else None
    return TritonAttentionBackend(setting.kv_pool, setting.own_layers[0], setting.rules, setting.num_heads, longest)


ATTENTION_BACKENDS: Mapping[str, Callable[[AttentionSetting], AttentionBackend]] = MappingProxyType(
    {"fa3": _make_fa3, "flashinfer": _make_flashinfer, "torch": _make_torch, "triton": _make_triton}
)


_registered: dict[str, Callable[[AttentionSetting], AttentionBackend]] = {}


def register_attention_backend(name: str, factory: Callable[[AttentionSetting], AttentionBackend]) -> None:
    """Make another backend available by name, on any device; ``auto`` does not try it. The virtual GPU has such."""
    _registered[name] = factory


@dataclass(frozen=True, slots=True)
class AttentionBackends:
    """The backends for prefill and for decode; the same object if their names are equal. ``apart``: in a step with
    prompts, the rows that decode are planned and computed apart, as in decode steps, which a backend for prefill does
    worse, above all after long contexts. Not if both are one backend that has one plan in a step, and not in layers
    that select tokens: there each query of a prefill step is computed as in decode anyway."""

    prefill: AttentionBackend
    decode: AttentionBackend
    prefill_name: str
    decode_name: str
    apart: bool = True

    def plan_extend(self, inputs: AttentionInputs, num_decodes: int, least: int | None) -> AttentionPlan:
        """The plan of an EXTEND step whose last ``num_decodes`` requests decode; ``least``: see :func:`plan_extend`."""
        if num_decodes and self.apart:
            return plan_mixed(self.prefill, self.decode, inputs, num_decodes, least)
        return plan_extend(self.prefill, inputs, least)

    def persistent(self, mode: ForwardMode) -> bool:
        """Whether steps of that mode run persistent kernels: see ``AttentionBackend.persistent``."""
        return (self.prefill if mode is ForwardMode.EXTEND else self.decode).persistent(mode)


def make_attention_backends(prefill: str, decode: str, setting: AttentionSetting) -> AttentionBackends:
    """The backends named ``prefill`` and ``decode``; for ``auto`` the fastest of those that are installed. Call it at
    start, before any step, because ``auto`` measures on the device and reads the pool. Raises ValueError with the
    remedy for a name that is unknown or cannot run here."""
    prefill = _chosen(prefill, ForwardMode.EXTEND, setting)
    decode = _chosen(decode, ForwardMode.DECODE, setting)
    backend = _make(prefill, setting)
    backend.begin_to_compile()  # if a flag chose it; graphs are captured meanwhile
    sees_whole = setting.sees_whole and prefill != _ANYWHERE
    selects = any(rules.selects for rules in setting.rules.values())
    return AttentionBackends(
        prefill=_WholeImages(backend, _make(_ANYWHERE, setting)) if sees_whole else backend,
        decode=backend if decode == prefill else _make(decode, setting),
        prefill_name=prefill,
        decode_name=decode,
        apart=not selects and (decode != prefill or not backend.one_plan),
    )


def _check_known(name: str) -> None:
    if name not in ATTENTION_BACKENDS:
        known = ", ".join(sorted(ATTENTION_BACKENDS))
        raise ValueError(f"--attention-backend {name} is unknown; use {known}")


def _make(name: str, setting: AttentionSetting) -> AttentionBackend:
    """The backend, or one for each kind of layers."""
    backends = [(part.own_layers, _make_one(name, part)) for part in setting.by_kind]
    return backends[0][1] if len(backends) == 1 else BackendsByKind(backends)


def _make_one(name: str, setting: AttentionSetting) -> AttentionBackend:
    if name in _registered:
        return _registered[name](setting)
    _check_known(name)
    pool, first = setting.kv_pool, setting.own_layers[0]
    rules = setting.rules.get(first, PLAIN)
    if name not in _READ_LATENTS and rules.shared:
        raise ValueError(f"--attention-backend {name} does not compute latent attention: use triton or torch")
    if name not in _SELECT and rules.selects:
        raise ValueError(f"--attention-backend {name} does not attend to selected tokens: use triton or torch")
    if name not in _READ_FP8 and pool.row(first, rules.rows[0]).dtype != pool.dtype:
        raise ValueError(
            f"--attention-backend {name} does not read --kv-cache-dtype fp8_e4m3: use --attention-backend triton or"
            " torch"
        )
    if name != _ANYWHERE and setting.device.kind != "cuda":
        raise ValueError(f"--attention-backend {name} needs an NVIDIA GPU: use --attention-backend torch")
    return ATTENTION_BACKENDS[name](setting)


def _chosen(name: str, mode: ForwardMode, setting: AttentionSetting) -> str:
    if name != _AUTO:
        return name
    if setting.device.kind != "cuda":
        return _ANYWHERE
    times_us: dict[str, float] = {}
    notes: list[str] = []
    for candidate in _CANDIDATES:
        result = _try(candidate, mode, setting, compile_cold=not times_us)
        if isinstance(result, str):
            notes.append(f"{candidate} {result}")
        else:
            times_us[candidate] = result
            notes.append(f"{candidate} {result:.1f} us")
    chosen = setting.agreed(choose(times_us, mode) if times_us else _ANYWHERE)
    batch = BATCHES[mode]
    logger.info(
        "Attention of %s steps: %s (%d requests of %d tokens, one layer: %s)",
        "prefill" if mode is ForwardMode.EXTEND else "decode",
        chosen,
        batch.num_requests,
        batch.num_tokens,
        "; ".join(notes),
    )
    return chosen


def _try(name: str, mode: ForwardMode, setting: AttentionSetting, compile_cold: bool) -> float | str:
    """Microseconds that one layer takes, or the reason why the backend cannot run here. No server waits a minute and a
    half for FlashInfer's kernels while another backend works: those of prefill are compiled in the background, once on
    each machine, for the next start. ``compile_cold``: no other backend works."""
    try:
        backend = _make(name, setting)
    except ValueError as error:
        return f"not usable ({error})"
    try:
        if not backend.is_compiled(mode):
            if mode is ForwardMode.EXTEND:
                backend.begin_to_compile()
            if not compile_cold:
                return _COLD[mode]
            logger.info("Compiling FlashInfer's kernels, about a minute and a half, once on this machine")
        return measure_us(backend, setting, mode)
    except Exception as error:  # a candidate that fails, for whatever reason, must not stop the others
        logger.warning("Attention backend %s cannot be used", name, exc_info=True)
        return f"failed ({type(error).__name__})"


def choose(times_us: Mapping[str, float], mode: ForwardMode) -> str:
    """The fastest of the measured backends. For decode, a backend without a plan step is preferred if it takes at most
    _PLAN_STEP_CREDIT times as long."""
    best = min(times_us, key=lambda name: times_us[name])
    free = {name: us for name, us in times_us.items() if name not in _PLAN_STEP}
    if mode is ForwardMode.DECODE and free:
        best_free = min(free, key=lambda name: free[name])
        if free[best_free] <= times_us[best] * _PLAN_STEP_CREDIT:
            return best_free
    return best


def measure_us(
    backend: AttentionBackend, setting: AttentionSetting, mode: ForwardMode, batch: MeasuredBatch | None = None
) -> float:
    """Microseconds of one layer's attention, as in a graph's replay, over a pool that is not in use yet. Compiles what
    the backend needs. The pool is only read. Blocks until the device is done."""
    device = setting.device
    device.synchronize()  # the pool was written on the default stream
    with device.forward.active():
        step, num_calls = _step(backend, setting, mode, batch or BATCHES[mode])
        step()
    device.synchronize()
    graph = device.capture("attention measurement", device.make_graph_pool("attention measurement"), step)
    graph.register()
    graph.allow_replay()
    best = float("inf")
    for _ in range(_NUM_ROUNDS):
        begin = time.perf_counter()
        graph.replay()
        device.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best / num_calls * 1e6


def _step(
    backend: AttentionBackend, setting: AttentionSetting, mode: ForwardMode, batch: MeasuredBatch
) -> tuple[Callable[[], None], int]:
    """A function that submits a step's attention calls, one for each layer, and how many calls it submits."""
    pool = setting.kv_pool
    seq_len = min(batch.num_tokens, setting.context_length)
    query_len = seq_len - min(batch.prefix_len, seq_len - 1) if mode is ForwardMode.EXTEND else 1
    num_queries = batch.num_requests * query_len
    layers = setting.own_layers
    keys = pool.row(layers[0], setting.rules.get(layers[0], PLAIN).rows[0])
    num_kv_heads, head_dim = keys.shape[1:]
    num_heads = setting.num_heads
    qkv = torch.randn(num_queries, num_heads + 2 * num_kv_heads, head_dim, device=keys.device).to(pool.dtype)
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    plan = _plan(backend, setting, mode, batch, seq_len, query_len)
    num_calls = min(max(len(layers), _NUM_CALLS[0]), _NUM_CALLS[1])

    def step() -> None:
        plan.prepare()
        for call in range(num_calls):
            plan.forward(layers[call % len(layers)], q, k, v, head_dim**-0.5)

    return step, num_calls


def _plan(
    backend: AttentionBackend,
    setting: AttentionSetting,
    mode: ForwardMode,
    batch: MeasuredBatch,
    seq_len: int,
    query_len: int,
) -> AttentionPlan:
    pool, num_requests = setting.kv_pool, batch.num_requests
    torch_device = pool.device
    columns = -(-setting.context_length // pool.page_size)
    # The pages are distinct if the pool has enough of them, so that no request finds another's keys in the L2 cache.
    pages = torch.arange(num_requests * columns, device=torch_device) % (pool.num_pages - 1) + 1
    page_table = pages.view(num_requests, columns).int()
    num_shared = batch.shared_len // pool.page_size
    page_table[:, :num_shared] = page_table[:1, :num_shared]
    rows = torch.arange(num_requests, device=torch_device)
    seq_lens = torch.full((num_requests,), seq_len, dtype=torch.int64, device=torch_device)
    lens_cpu = np.full(num_requests, seq_len, dtype=np.int64)
    if mode is ForwardMode.DECODE:
        graph_plan = backend.plan_graph(GraphDecodeInputs(page_table, rows, seq_lens, setting.context_length))
        if graph_plan is not None:
            backend.before_replay(num_requests, lens_cpu)
            return graph_plan
    extend = mode is ForwardMode.EXTEND
    starts = torch.arange(num_requests + 1, dtype=torch.int32, device=torch_device) * query_len
    return backend.plan(
        AttentionInputs(
            mode=mode,
            page_table=page_table,
            rows=rows,
            seq_lens=seq_lens,
            seq_lens_cpu=lens_cpu,
            query_lens_cpu=np.full_like(lens_cpu, query_len),
            query_starts=starts if extend else None,
        )
    )
