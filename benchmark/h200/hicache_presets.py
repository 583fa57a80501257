"""The sizes of the HiCache soak: for one H200, or for any machine, to see whether it works.

The presets of the demo model speculate with its EAGLE-3 head and have a storage tier. Their prompts are text of its
corpus, so that drafts are accepted as with real requests. No faults are planted with them, because a trained model
attends to few of a prompt's pages, so a wrong page may change nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from hicache_client import random_ids
from shapes import num_plain_tokens
from tokenizers import Tokenizer

from fenceline.config.model_files import DEMOS, demo_model_path
from fenceline_demo.corpus import encode_document
from fenceline_demo.documents import short_document
from fenceline_demo.tokenizer import FastEncoder

SEED = "7"  # of the dummy weights, the same for all servers of a run
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
    ``host_gb``: the host tiers of the soak's server and of that one. ``speculation``: of the soak's server alone, so
    that the one which checks decodes plainly. ``storage_gb``: of the soak's server; None: no third tier."""

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
    speculation: Sequence[str] = ()
    storage_gb: float | None = None

    def soak_tiers(self, storage_dir: str) -> list[str]:
        """The HiCache flags of the soak's server. The pages of its third tier, if it has one, are in
        ``storage_dir``."""
        tiers = [*self.tiers, "--hicache-size", str(self.host_gb[0])]
        if self.storage_gb is None:
            return tiers
        storage = ["--hicache-storage-backend", "file", "--hicache-storage-dir", storage_dir]
        return [*tiers, *storage, "--hicache-storage-size", str(self.storage_gb), *_PREFETCH]

    def fault_tiers(self) -> list[str]:
        """The HiCache flags of the server with planted faults."""
        return [*self.tiers, "--hicache-size", str(self.host_gb[1])]

    def ids(self, rng: random.Random, num: int) -> list[int]:
        """``num`` tokens of a prompt."""
        if self.shape not in DEMOS:
            return random_ids(rng, num, num_plain_tokens(self.shape))
        ids: list[int] = []
        while len(ids) < num:
            ids += encode_document(short_document(rng), _encoder(self.shape))[0]
        return ids[:num]


@cache
def _encoder(shape: str) -> FastEncoder:
    return FastEncoder(Tokenizer.from_file(f"{demo_model_path(shape)}/tokenizer.json"))


_TIERS = ("--enable-hierarchical-cache", "--hicache-write-policy", "write_through", "--hicache-io-backend", "kernel")

# A request waits for the part of its prompt that is in storage, but with a time limit.
_PREFETCH = ("--hicache-storage-prefetch-policy", "timeout", "--hicache-storage-prefetch-timeout", "1")
_EAGLE3 = ("--speculative-algorithm", "EAGLE3")
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
    # Prefixes are looked for in storage where it may have at least 256 tokens more than the host.
    "demo": Preset(
        shape="demo",
        lengths=Lengths((384, 1024), (32, 96), (32, 96), 1792),
        concurrency=64,
        population=256,
        model=("--load-format", "auto", "--page-size", "16"),
        tiers=_TIERS,
        tight=("--max-total-tokens", "98304", "--max-running-requests", "64"),
        quiet=("--max-total-tokens", "262144", "--max-running-requests", "64"),
        fault=(),
        host_gb=(0.35, 0.0),
        num_calibrations=96,
        num_controls=0,
        speculation=_EAGLE3,
        storage_gb=1.0,
    ),
    "demo-cpu": Preset(
        shape="demo",
        lengths=Lengths((272, 320), (16, 32), (8, 16), 416),
        concurrency=2,
        population=6,
        model=("--load-format", "auto", "--page-size", "16", "--device", "cpu"),
        tiers=_TIERS,
        tight=("--max-total-tokens", "1024", "--max-running-requests", "2", "--cuda-graph-bs", "1", "2"),
        quiet=("--max-total-tokens", "16384"),
        fault=(),
        host_gb=(0.0075, 0.0),
        num_calibrations=4,
        num_controls=0,
        speculation=_EAGLE3,
        storage_gb=0.04,
    ),
}
