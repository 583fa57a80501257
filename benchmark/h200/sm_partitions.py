"""Splits a GPU's multiprocessors (SMs) into two partitions, each with a stream whose kernels run there: green contexts.

By the driver's calls, which split once and use both parts: ``torch.cuda.green_contexts`` splits the whole GPU anew for
each context, so that two of them may share SMs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch

_SM = 1  # CU_DEV_RESOURCE_TYPE_SM
_OWN_STREAM = _NON_BLOCKING = 1  # CU_GREEN_CTX_DEFAULT_STREAM, CU_STREAM_NON_BLOCKING


class _Resource(ctypes.Structure):
    """``CUdevResource`` of SMs, of CUDA 12.4 and later."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("pad", ctypes.c_ubyte * 92),
        ("num_sms", ctypes.c_uint),
        ("rest", ctypes.c_ubyte * 44),
    )


@dataclass
class Partition:
    """A stream whose kernels run on ``num_sms`` SMs of their own."""

    num_sms: int
    stream: torch.cuda.Stream
    seen: dict[str, list[int]] = field(default_factory=dict)


def num_sms() -> int:
    """SMs of the current device."""
    return _whole().num_sms


def split(num: int) -> tuple[Partition, Partition]:
    """At least ``num`` SMs of the current device, and the others."""
    whole, first, rest, num_groups = _whole(), _Resource(), _Resource(), ctypes.c_uint(1)
    _call(
        "cuDevSmResourceSplitByCount", ctypes.byref(first), ctypes.byref(num_groups), ctypes.byref(whole),
        ctypes.byref(rest), 0, ctypes.c_uint(num),
    )  # fmt: skip
    assert num_groups.value == 1
    return _partition(first), _partition(rest)


def _whole() -> _Resource:
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    whole = _Resource()
    _call("cuDeviceGetDevResource", torch.cuda.current_device(), ctypes.byref(whole), _SM)
    return whole


def _partition(resource: _Resource) -> Partition:
    description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuDevResourceGenerateDesc", ctypes.byref(description), ctypes.byref(resource), 1)
    _call("cuGreenCtxCreate", ctypes.byref(context), description, torch.cuda.current_device(), _OWN_STREAM)
    _call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, _NON_BLOCKING, 0)
    return Partition(resource.num_sms, torch.cuda.ExternalStream(stream.value))


def _call(name: str, *args: object) -> None:
    error = getattr(ctypes.CDLL("libcuda.so.1"), name)(*args)
    assert error == 0, f"{name}: CUDA error {error}"
