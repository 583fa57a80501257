"""Flags of SGLang and other servers that this server does not have (yet). Each is refused with one line that says what
to do.

The commit that makes a flag work removes it here. ``neutral`` values ask for what happens anyway and are accepted;
``ANY`` means that all values are neutral. ``ELSEWHERE`` names what to use instead of flags of vLLM, Text Generation
Inference and llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ANY = ("*",)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a flag is refused and what to do: ``remedy`` follows "--flag value: not available, "."""

    remedy: str
    neutral: tuple[str, ...] = ()


def complaints(given: Sequence[tuple[str, Sequence[str]]], refused: Mapping[str, Refusal]) -> str | None:
    """One line that refuses ``given``, flags with their words; None if every use is neutral."""
    by_remedy: dict[str, list[str]] = {}
    for option, words in given:
        refusal, value = refused[option], " ".join(words)
        if refusal.neutral != ANY and value.lower() not in (*refusal.neutral, "false"):
            by_remedy.setdefault(refusal.remedy, []).append(f"{option} {value}".rstrip())
    if not by_remedy:
        return None
    return "; ".join(f"{', '.join(flags)}: not available, {remedy}" for remedy, flags in by_remedy.items())


def _same(options: str, refusal: Refusal) -> dict[str, Refusal]:
    return dict.fromkeys(options.split(), refusal)


_PARALLEL = "this server runs one model on one host: leave it out, split the model with --tp-size or start more servers"
_LORA = "merge the adapter into the model and pass the merged directory as --model-path"
_TLS = "put a TLS proxy in front of the server and leave it out"

REFUSED: Mapping[str, Refusal] = {
    **_same(
        "--pp --pp-size --pipeline-parallel-size --moe-dense-tp-size --attn-cp-size",
        Refusal(_PARALLEL, ("1",)),
    ),
    **_same("--base-gpu-id", Refusal(_PARALLEL, ("0",))),
    **_same("--nccl-port --enable-dp-attention", Refusal(_PARALLEL)),
    "--hicache-storage-backend-extra-config": Refusal(
        "each setting has its flag: use --hicache-storage-dir, --hicache-storage-size and"
        " --hicache-storage-prefetch-timeout"
    ),
    "--speculative-attention-mode": Refusal(
        "drafts are verified by the decode backend, which reads a few rows of each request: leave it out",
        ("decode",),
    ),
    **_same(
        "--speculative-accept-threshold-single --speculative-accept-threshold-acc",
        Refusal(
            "a draft counts where the model draws it too, so that no answer changes: leave it out",
            ("1.0", "1"),
        ),
    ),
    **_same(
        "--speculative-draft-model-quantization --speculative-draft-load-format --speculative-moe-runner-backend"
        " --speculative-moe-a2a-backend",
        Refusal("a draft has its checkpoint's format and the model's kernels: leave it out"),
    ),
    **_same(
        "--speculative-ngram-min-match-window-size --speculative-ngram-max-match-window-size"
        " --speculative-ngram-min-bfs-breadth --speculative-ngram-max-bfs-breadth --speculative-ngram-match-type"
        " --speculative-ngram-branch-length --speculative-ngram-capacity",
        Refusal(
            "there is no look-up of earlier text: leave it out, use --speculative-algorithm STANDALONE or EAGLE3"
        ),
    ),
    "--speculative-adaptive-config": Refusal(
        "--speculative-adaptive chooses by what it measures, none to --speculative-num-steps: leave it out"
    ),
    "--dense-as-sparse": Refusal("there is no sparse attention: leave it out"),
    **_same("--enable-lora --lora-paths --max-loras-per-batch", Refusal(_LORA)),
    **_same("--ssl-keyfile --ssl-certfile", Refusal(_TLS)),
    "--enable-mixed-chunk": Refusal(
        "a step is either prefill or decode: leave it out; a smaller --chunked-prefill-size shortens the pauses of"
        " decode"
    ),
    "--enable-torch-compile": Refusal("models run as written: leave it out"),
    "--is-embedding": Refusal("only text generation is served: leave it out"),
    "--enable-multimodal": Refusal("only text models are served: leave it out"),
    "--disaggregation-mode": Refusal("prefill and decode share one process: leave it out", ("null", "none")),
    "--cpu-offload-gb": Refusal("weights stay on --device: leave it out", ("0",)),
    "--num-continuous-decode-steps": Refusal("every step is scheduled: leave it out", ("1",)),
    "--radix-eviction-policy": Refusal("eviction is least recently used: leave it out", ("lru",)),
    "--tokenizer-worker-num": Refusal("one process tokenizes: leave it out", ("1",)),
    # These ask for what happens anyway.
    "--enable-piecewise-cuda-graph": Refusal("", ANY),
    "--disable-custom-all-reduce": Refusal("", ANY),
    "--sleep-on-idle": Refusal("", ANY),
    "--disable-hicache-numa-detect": Refusal("", ANY),
    "--skip-server-warmup": Refusal("", ANY),
    "--enable-multi-layer-eagle": Refusal("", ANY),
}

_GRAPHS = "graphs do not depend on the length: leave it out"
_PREFIXES = "prefixes are shared anyway: leave it out"

# Flags of vLLM, then of Text Generation Inference and llama.cpp, that neither SGLang nor this server has.
ELSEWHERE: Mapping[str, str] = {
    "--max-model-len": "use --context-length",
    "--gpu-memory-utilization": "use --mem-fraction-static",
    "--enforce-eager": "use --disable-cuda-graph",
    "--max-num-seqs": "use --max-running-requests",
    "--max-num-batched-tokens": "use --chunked-prefill-size",
    "--block-size": "use --page-size",
    "--swap-space": "use --enable-hierarchical-cache with --hicache-size",
    "--kv-offloading-size": "use --enable-hierarchical-cache with --hicache-size",
    "--num-gpu-blocks-override": "use --max-total-tokens, which counts tokens and not blocks",
    "--enable-prefix-caching": _PREFIXES,
    "--no-enable-prefix-caching": "use --disable-radix-cache",
    "--enable-chunked-prefill": "long prompts are split anyway: leave it out, or set --chunked-prefill-size",
    "--no-enable-chunked-prefill": "use --chunked-prefill-size -1",
    "--async-scheduling": "steps overlap anyway: leave it out",
    "--scheduling-policy": "use --schedule-policy",
    "--preemption-mode": "use --retract-policy",
    "--tokenizer": "use --tokenizer-path",
    "--seed": "use --random-seed",
    "--hf-overrides": "use --json-model-override-args",
    "--rope-scaling": "use --json-model-override-args",
    "--rope-theta": "use --json-model-override-args",
    "--generation-config": "use --sampling-defaults model or --sampling-defaults openai",
    "--cuda-graph-sizes": "use --cuda-graph-bs",
    "--cudagraph-capture-sizes": "use --cuda-graph-bs",
    "--max-seq-len-to-capture": _GRAPHS,
    "--uvicorn-log-level": "use --log-level-http",
    "--enable-log-requests": "use --log-requests",
    "--disable-log-requests": "requests are logged with --log-requests alone: leave it out",
    "--disable-log-stats": "use a larger --decode-log-interval",
    "--distributed-executor-backend": "use --tp-size",
    "--speculative-config": "use --speculative-algorithm and --speculative-draft-model-path",
    "--lora-modules": _LORA,
    "--model-id": "use --model-path",
    "--hostname": "use --host",
    "--num-shard": "use --tp-size",
    "--quantize": "use --quantization",
    "--max-input-length": "use --context-length",
    "--max-input-tokens": "use --context-length",
    "--max-concurrent-requests": "use --max-queued-requests",
    "--max-batch-prefill-tokens": "use --max-prefill-tokens",
    "--max-batch-total-tokens": "use --max-total-tokens",
    "--cuda-memory-fraction": "use --mem-fraction-static",
    "--ctx-size": "use --context-length",
    "--n-gpu-layers": "the whole model runs on one device: use --device cuda",
    "--parallel": "use --max-running-requests",
    "--batch-size": "use --chunked-prefill-size",
}
