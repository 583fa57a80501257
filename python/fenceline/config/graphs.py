"""Which attention kernels run, and which sizes of decode and prefill steps are captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fenceline.config.errors import ConfigError

if TYPE_CHECKING:
    from fenceline.config.model_config import ModelConfig
    from fenceline.config.server_args import ServerArgs

_ON_ANY_DEVICE = "torch"
_MAX_BS = 256
_MOST_GRAPHS = 512
# (up to this size, one every so many), and beyond: small batches are where a padded row costs most.
_BUCKET_STEPS = ((64, 8), (256, 16), (512, 32))
_STEP_BEYOND = 64
_PREFILL_STEPS = ((64, 16), (256, 32), (512, 64), (1024, 128), (2048, 256))
_PREFILL_STEP_BEYOND = 512
_SMALLEST_PREFILL = 16
_MAX_PREFILL_TOKENS = 2048
# Launching a layer takes the CPU about 0.2 ms; a token takes the GPU two operations a weight, at 6e14 a second (H200).
# From twice as many tokens on as are computed meanwhile, padding costs more than launching.
_WORTHWHILE_WEIGHT_TOKENS = 2 * 0.2e-3 * 6e14 / 2


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
    _check_number(buckets, "--cuda-graph-max-bs or name fewer sizes with --cuda-graph-bs")
    if args.debug_cuda_graph and not buckets:
        raise ConfigError(
            f"--debug-cuda-graph: no graphs are captured on {device} by default; add --cuda-graph-bs 1 2 4 8"
        )
    return buckets


def _check_number(sizes: tuple[int, ...], remedy: str) -> None:
    if len(sizes) > _MOST_GRAPHS:
        raise ConfigError(
            f"{len(sizes)} graphs, up to size {sizes[-1]}, would take minutes to capture, and much memory; lower"
            f" {remedy}"
        )


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
        _check_number(
            tuple(range(1, largest + 1)), "--cuda-graph-max-bs or drop --disable-cuda-graph-padding"
        )
        return tuple(range(1, largest + 1))
    return default_buckets(largest)


def piecewise_cuda_graph_tokens(
    args: ServerArgs, device: str, model: ModelConfig, max_step_tokens: int
) -> tuple[int, ...]:
    """The prefill sizes to capture in pieces, in tokens, ascending; empty for none. No step of prefill has more than
    ``max_step_tokens``.

    Raises ConfigError for sizes that no step reaches.
    """
    if args.disable_cuda_graph or args.disable_piecewise_cuda_graph:
        return ()
    if args.piecewise_cuda_graph_tokens is not None:
        largest = max(args.piecewise_cuda_graph_tokens)
        if largest > max_step_tokens:
            raise ConfigError(
                f"--piecewise-cuda-graph-tokens {largest}: no prefill step has more than {max_step_tokens} tokens; "
                "drop it or raise --chunked-prefill-size"
            )
        return tuple(sorted(set(args.piecewise_cuda_graph_tokens)))
    if device != "cuda":
        return ()
    if args.piecewise_cuda_graph_max_tokens is not None:
        sizes = _prefill_sizes(min(args.piecewise_cuda_graph_max_tokens, max_step_tokens))
        _check_number(sizes, "--piecewise-cuda-graph-max-tokens")
        return sizes
    worthwhile = int(_WORTHWHILE_WEIGHT_TOKENS / _layer_weights(model))
    sizes = _prefill_sizes(min(_MAX_PREFILL_TOKENS, max_step_tokens))
    return tuple(size for size in sizes if size <= max(worthwhile, sizes[0]))


def _prefill_sizes(largest: int) -> tuple[int, ...]:
    return _spread(_SMALLEST_PREFILL, _PREFILL_STEPS, _PREFILL_STEP_BEYOND, largest)


def _layer_weights(model: ModelConfig) -> int:
    """Of the products of one layer."""
    attention = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    return model.hidden_size * (attention + 3 * model.intermediate_size)


def default_buckets(largest: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then every 8th to 64, every 16th to 256, every 32nd to 512, every 64th; ``largest`` last."""
    return (
        *(size for size in (1, 2, 4) if size < largest),
        *_spread(8, _BUCKET_STEPS, _STEP_BEYOND, largest),
    )


def _spread(
    smallest: int, steps: Sequence[tuple[int, int]], step_beyond: int, largest: int
) -> tuple[int, ...]:
    sizes, size = [], smallest
    while size < largest:
        sizes.append(size)
        size += next((step for end, step in steps if size < end), step_beyond)
    return (*sizes, largest)
