"""Which attention kernels run, and which sizes of decode and prefill steps are captured as CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fenceline.config.errors import ConfigError

if TYPE_CHECKING:
    from fenceline.config.server_args import ServerArgs

_ON_ANY_DEVICE = "torch"
_MAX_BS = 256
# (up to this batch size, one bucket every so many): small batches are where a padded row costs most.
_BUCKET_STEPS = ((64, 8), (256, 16), (512, 32))
_STEP_BEYOND = 64
# Prefill sizes in tokens. Up to the last, a small model's launches take the CPU longer than its kernels take the GPU.
_PREFILL_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048)
_PREFILL_STEP_BEYOND = 512


def attention_backends(args: ServerArgs, device: str) -> tuple[str, str]:
    """The backends of prefill and decode: a name, or ``auto`` for what measures best on this GPU.

    Raises ConfigError for kernels that ``device`` cannot run.
    """
    both = args.attention_backend or "auto"
    if device == "cuda":
        return args.prefill_attention_backend or both, args.decode_attention_backend or both
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        wanted = getattr(args, name)
        if wanted not in (None, "auto", _ON_ANY_DEVICE):
            raise ConfigError(
                f"--{name.replace('_', '-')} {wanted}: needs a CUDA GPU and this is {device}; leave it out"
            )
    return _ON_ANY_DEVICE, _ON_ANY_DEVICE


def cuda_graph_bs(args: ServerArgs, device: str, max_running_requests: int) -> tuple[int, ...]:
    """The decode batch sizes to capture, ascending; empty for no graphs.

    Raises ConfigError for sizes that no batch reaches, and where --debug-cuda-graph would have nothing to compare.
    """
    buckets = _buckets(args, device, max_running_requests)
    if args.debug_cuda_graph and not buckets:
        raise ConfigError(
            f"--debug-cuda-graph: no graphs are captured on {device} by default; add --cuda-graph-bs 1 2 4 8"
        )
    return buckets


def _buckets(args: ServerArgs, device: str, max_running_requests: int) -> tuple[int, ...]:
    if args.disable_cuda_graph:
        return ()
    if args.cuda_graph_bs is not None:
        if max(args.cuda_graph_bs) > max_running_requests:
            raise ConfigError(
                f"--cuda-graph-bs {max(args.cuda_graph_bs)}: no batch has more than {max_running_requests} requests; "
                "drop it or raise --max-running-requests"
            )
        return tuple(sorted(set(args.cuda_graph_bs)))
    if device != "cuda":
        return ()
    largest = min(args.cuda_graph_max_bs or _MAX_BS, max_running_requests)
    if args.disable_cuda_graph_padding:
        return tuple(range(1, largest + 1))
    return default_buckets(largest)


def piecewise_cuda_graph_tokens(args: ServerArgs, device: str, chunk: int | None) -> tuple[int, ...]:
    """The prefill sizes to capture in pieces, in tokens, ascending; empty for none. ``chunk``: the most of a step."""
    if args.disable_cuda_graph or args.disable_piecewise_cuda_graph:
        return ()
    if args.piecewise_cuda_graph_tokens is not None:
        return tuple(sorted(set(args.piecewise_cuda_graph_tokens)))
    if device != "cuda":
        return ()
    largest = args.piecewise_cuda_graph_max_tokens or min(_PREFILL_TOKENS[-1], chunk or _PREFILL_TOKENS[-1])
    beyond = range(_PREFILL_TOKENS[-1] + _PREFILL_STEP_BEYOND, largest, _PREFILL_STEP_BEYOND)
    return (*(size for size in (*_PREFILL_TOKENS, *beyond) if size < largest), largest)


def default_buckets(largest: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then every 8th to 64, every 16th to 256, every 32nd to 512, every 64th; ``largest`` last."""
    buckets, size = [1, 2, 4], 8
    while size < largest:
        buckets.append(size)
        size += next((step for end, step in _BUCKET_STEPS if size < end), _STEP_BEYOND)
    return (*(size for size in buckets if size < largest), largest)
