"""Sizes of the HiCache soak: for one H200, or for any machine to see whether it works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SEED = "7"  # of the dummy weights: every server of a run has the same
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens, drawn uniformly: a conversation's first prompt, each further message, each answer. A conversation ends
    before it would grow beyond ``longest``."""

    first: Range
    message: Range
    answer: Range
    longest: int


@dataclass(frozen=True, slots=True)
class Preset:
    """``concurrency`` conversations at a time of ``population`` that take turns. ``model``: flags of every server;
    ``tiers``: HiCache's; ``tight``: the soak's pool; ``quiet``: that of the server which checks; ``fault``: that of the
    server with planted faults, which holds all of its ``num_controls`` prompts on the host and few on the device.
    ``host_gb``: the host tiers of the soak's server and of that one."""

    shape: str
    lengths: Lengths
    concurrency: int
    population: int
    model: Sequence[str]
    tiers: Sequence[str]
    tight: Sequence[str]
    quiet: Sequence[str]
    fault: Sequence[str]
    host_gb: tuple[float, float]
    num_calibrations: int
    num_controls: int

    def soak_tiers(self) -> list[str]:
        """HiCache's flags of the soak's server."""
        return [*self.tiers, "--hicache-size", str(self.host_gb[0])]

    def fault_tiers(self) -> list[str]:
        """HiCache's flags of the server with planted faults."""
        return [*self.tiers, "--hicache-size", str(self.host_gb[1])]


_TIERS = (
    "--enable-hierarchical-cache",
    "--hicache-write-policy",
    "write_through",
    "--hicache-io-backend",
    "kernel",
)

_SHORT = ("--context-length", "512")

PRESETS = {
    # Qwen3-0.6B: 112 KiB of KV per token against 128 for an 8B at a tenth of its computation, so that per minute an
    # order of magnitude more pages are evicted, stored and loaded, and far more kernels start beside transfers.
    "h200": Preset(
        shape="0.6b",
        lengths=Lengths((256, 768), (64, 192), (32, 96), 2560),
        concurrency=64,
        population=192,
        model=("--random-seed", SEED, "--page-size", "64", "--prefill-attention-backend", "flashinfer"),
        tiers=_TIERS,
        tight=("--mem-fraction-static", "0.12", "--max-running-requests", "64"),
        quiet=("--max-total-tokens", "196608", "--max-running-requests", "64"),
        fault=("--max-total-tokens", "16384", "--max-running-requests", "8"),
        host_gb=(24.0, 16.0),
        num_calibrations=96,
        num_controls=48,
    ),
    "cpu": Preset(
        shape="tiny",
        lengths=Lengths((48, 96), (16, 48), (8, 16), 320),
        concurrency=8,
        population=24,
        model=("--random-seed", SEED, "--page-size", "16", "--device", "cpu", "--dtype", "bfloat16", *_SHORT),
        tiers=_TIERS,
        tight=("--max-total-tokens", "1536", "--cuda-graph-bs", "1", "2", "4", "8"),
        quiet=("--max-total-tokens", "32768"),
        fault=("--max-total-tokens", "768"),
        host_gb=(0.0022, 0.01),
        num_calibrations=8,
        num_controls=8,
    ),
}
