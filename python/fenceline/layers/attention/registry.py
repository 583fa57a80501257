"""Attention backends by the names that --attention-backend and its kin give, and what ``auto`` stands for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fenceline.layers.attention.base import AttentionBackend
from fenceline.layers.attention.choice import BATCHES, AttentionSetting, choose, measure_us
from fenceline.layers.attention.torch_backend import TorchAttentionBackend
from fenceline.layers.forward_batch import ForwardMode

_AUTO = "auto"
_REFERENCE = "torch"
# Tried in this order; flashinfer last, because it may have to compile for a minute.
_CANDIDATES = ("triton", "fa3", "flashinfer")

logger = logging.getLogger(__name__)


def _make_fa3(setting: AttentionSetting) -> AttentionBackend:
    from fenceline.layers.attention.fa3_backend import Fa3AttentionBackend

    return Fa3AttentionBackend(setting.kv_pool)


def _make_flashinfer(setting: AttentionSetting) -> AttentionBackend:
    from fenceline.layers.attention.flashinfer_backend import FlashInferAttentionBackend

    return FlashInferAttentionBackend(setting.kv_pool, setting.device, setting.num_heads)


def _make_torch(setting: AttentionSetting) -> AttentionBackend:
    return TorchAttentionBackend(setting.kv_pool)


def _make_triton(setting: AttentionSetting) -> AttentionBackend:
    try:
        from fenceline.layers.attention.triton_backend import TritonAttentionBackend
    except ImportError as error:
        raise ValueError(
            f"--attention-backend triton: Triton is not installed ({error}): pip install 'fenceline[cuda]', or use "
            "--attention-backend torch"
        ) from error
    return TritonAttentionBackend(setting.kv_pool)


ATTENTION_BACKENDS: Mapping[str, Callable[[AttentionSetting], AttentionBackend]] = MappingProxyType(
    {"fa3": _make_fa3, "flashinfer": _make_flashinfer, "torch": _make_torch, "triton": _make_triton}
)


_registered: dict[str, Callable[[AttentionSetting], AttentionBackend]] = {}


def register_attention_backend(name: str, factory: Callable[[AttentionSetting], AttentionBackend]) -> None:
    """Let configurations name another backend, one for any device; ``auto`` does not know it. For tests' devices."""
    _registered[name] = factory


@dataclass(frozen=True, slots=True)
class AttentionBackends:
    """The backends of both kinds of steps, one and the same object where the names are equal."""

    prefill: AttentionBackend
    decode: AttentionBackend
    prefill_name: str
    decode_name: str

    def persistent(self, mode: ForwardMode) -> bool:
        """Whether steps of that mode run persistent kernels: see ``AttentionBackend.persistent``."""
        return (self.prefill if mode is ForwardMode.EXTEND else self.decode).persistent(mode)


def make_attention_backends(prefill: str, decode: str, setting: AttentionSetting) -> AttentionBackends:
    """The backends called ``prefill`` and ``decode``, or for ``auto`` the fastest of those that are installed.

    To be called at start, before any step: ``auto`` measures on the device and reads the pool. Raises ValueError with
    the remedy for a name that is unknown or cannot run here.
    """
    prefill = _chosen(prefill, ForwardMode.EXTEND, setting)
    decode = _chosen(decode, ForwardMode.DECODE, setting)
    backend = _make(prefill, setting)
    return AttentionBackends(
        prefill=backend,
        decode=backend if decode == prefill else _make(decode, setting),
        prefill_name=prefill,
        decode_name=decode,
    )


def _check_known(name: str) -> None:
    if name not in ATTENTION_BACKENDS:
        known = ", ".join(sorted(ATTENTION_BACKENDS))
        raise ValueError(f"--attention-backend {name} is unknown; use {known}")


def _make(name: str, setting: AttentionSetting) -> AttentionBackend:
    if name in _registered:
        return _registered[name](setting)
    _check_known(name)
    if name != _REFERENCE and setting.device.kind != "cuda":
        raise ValueError(f"--attention-backend {name} needs an NVIDIA GPU: use --attention-backend torch")
    return ATTENTION_BACKENDS[name](setting)


def _chosen(name: str, mode: ForwardMode, setting: AttentionSetting) -> str:
    if name != _AUTO:
        return name
    if setting.device.kind != "cuda":
        return _REFERENCE
    times_us: dict[str, float] = {}
    notes: list[str] = []
    for candidate in _CANDIDATES:
        result = _try(candidate, mode, setting, compile_cold=not times_us or mode is ForwardMode.EXTEND)
        if isinstance(result, str):
            notes.append(f"{candidate} {result}")
        else:
            times_us[candidate] = result
            notes.append(f"{candidate} {result:.1f} us")
    chosen = choose(times_us, mode) if times_us else _REFERENCE
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
    """Microseconds of one layer, or why there are none. FlashInfer's prefill is worth a minute of compiling, once for
    each machine; its decode is not while there is another backend."""
    from fenceline.layers.attention.flashinfer_backend import FlashInferAttentionBackend

    try:
        backend = _make(name, setting)
    except ValueError as error:
        return f"not usable ({error})"
    try:
        if isinstance(backend, FlashInferAttentionBackend) and not backend.is_compiled(mode):
            if not compile_cold:
                return "not compiled yet (name it to have it)"
            logger.info("Compiling FlashInfer's kernels, about a minute, once on this machine")
        return measure_us(backend, setting, mode)
    except Exception as error:  # whatever keeps one candidate from running here must not keep the others
        logger.warning("Attention backend %s cannot be used", name, exc_info=True)
        return f"failed ({type(error).__name__})"
