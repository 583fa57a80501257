"""Flags of SGLang, vLLM, Text Generation Inference and llama.cpp that this server does not have (yet).

A start that gives some of them is refused with one line that names them all and says what to do, unless each asks for
what happens anyway or could change nothing but speed. The commit that makes a flag work removes it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ANY = ("*",)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a flag is refused and what to do: ``remedy`` follows "--flag value: not available, ". ``neutral`` values ask
    for what happens anyway and are accepted; ``ANY`` means that all are. A ``hint`` can change neither answers nor
    security nor promises about memory: it is accepted with a warning."""

    remedy: str
    neutral: tuple[str, ...] = ()
    hint: bool = False

    def accepts(self, value: str) -> bool:
        """Whether ``value`` asks for what happens anyway."""
        return self.neutral == ANY or value.lower() in (*self.neutral, "false")


def find(option: str) -> tuple[str, Refusal] | None:
    """The flag that ``option`` is, with its entry; None if no other server's is known by that name. An entry that ends
    in ``*`` stands for all flags that begin so. ``--flag.key`` sets a key of ``--flag`` in vLLM."""
    name = option.split(".")[0]
    if name in REFUSED:
        return name, REFUSED[name]
    return next(((name, refusal) for start, refusal in _BEGINNINGS.items() if name.startswith(start)), None)


# The flags of each remedy; --flag=a,b has the neutral values a and b.
_REMEDIES: Mapping[str, str] = {
    # Settings that have another name here.
    "use --context-length": "--max-model-len --max-input-length --max-input-tokens --ctx-size",
    "use --mem-fraction-static": ("--gpu-memory-utilization --device-memory-utilization --cuda-memory-fraction"),
    "use --max-total-tokens, which counts tokens": (
        "--kv-cache-memory-bytes --num-gpu-blocks-override --max-batch-total-tokens"
    ),
    "use --disable-cuda-graph": "--enforce-eager",
    "use --disable-cuda-graph, which leaves out those of prefill too": "--disable-decode-cuda-graph",
    "use --cuda-graph-bs, --piecewise-cuda-graph-tokens, --disable-cuda-graph and their kin": (
        "--cuda-graph-config --cuda-graph-backend-decode --cuda-graph-backend-prefill"
    ),
    "use --cuda-graph-bs": "--cuda-graph-sizes --cudagraph-capture-sizes",
    "use --cuda-graph-max-bs": "--max-cudagraph-capture-size",
    "use --max-running-requests": "--max-num-seqs --max-num-active-seqs --parallel",
    "use --max-queued-requests": "--max-num-queued-reqs --max-num-queued-tokens --max-concurrent-requests",
    "use --chunked-prefill-size": "--max-num-batched-tokens --max-num-scheduled-tokens --batch-size",
    "use --chunked-prefill-size -1": "--no-enable-chunked-prefill",
    "use --max-prefill-tokens": "--max-batch-prefill-tokens",
    "use --page-size": "--block-size",
    "use --disable-radix-cache": "--no-enable-prefix-caching",
    "use --disable-overlap-schedule": "--no-async-scheduling",
    "use --schedule-policy and --enable-priority-scheduling": "--scheduling-policy=fcfs",
    "use --retract-policy": "--preemption-mode=recompute",
    "use --enable-hierarchical-cache with --hicache-size": (
        "--swap-space=0 --kv-offloading-size --kv-offloading-backend --enable-lmcache --lmcache-config-file"
        " --enable-flexkv --flexkv-config-file --radix-cache-backend --enable-unified-cache-external-linker"
    ),
    "use --hicache-storage-dir, --hicache-storage-size and --hicache-storage-prefetch-timeout": (
        "--hicache-storage-backend-extra-config"
    ),
    "use --tp-size": "-tp --num-shard",
    "use --dp-size": "-dp",
    "use --ep-size with the value of --tp-size": "-ep --enable-expert-parallel --enable-ep-moe",
    "use --dist-init-addr HOST:PORT": "--master-addr --master-port",
    "use --node-rank": "--headless",
    "choose GPUs by CUDA_VISIBLE_DEVICES and leave it out": "--base-gpu-id=0 --gpu-id-step=1 --device-ids",
    "the whole model runs on one kind of device: use --device cuda": "--n-gpu-layers",
    "use --model-path": "--model-id",
    "use --tokenizer-path": "--tokenizer",
    "use --random-seed": "--seed",
    "use --quantization": "-q --quantize",
    "use --quantization or a checkpoint that is quantised": (
        "--torchao-config --quantize-and-serve --quantization-config"
    ),
    "use --json-model-override-args": "--hf-overrides --rope-scaling --rope-theta",
    "set HF_TOKEN in the environment and leave it out": "--hf-token",
    "use --sampling-defaults model or --sampling-defaults openai": "--generation-config",
    "change the model's generation_config.json (--sampling-defaults model) or send them with each request": (
        "--override-generation-config --preferred-sampling-params"
    ),
    "send chat_template_kwargs with each request, or set its variables in a --chat-template": (
        "--default-chat-template-kwargs"
    ),
    "write that template to a file and use --chat-template": "--hf-chat-template-name",
    "use --reasoning-parser": "--enable-reasoning",
    "use --grammar-backend": ("--guided-decoding-backend=xgrammar,auto --structured-outputs-config=xgrammar,auto"),
    "use --constrained-json-whitespace-pattern": (
        "--constrained-json-disable-any-whitespace --constrained-json-max-whitespace-cnt"
    ),
    "use --enable-cache-report": "--enable-prompt-tokens-details",
    "use --incremental-streaming-output": "--stream-output",
    "use --cors-allowed-origins": "--allowed-origins",
    "use --host": "--hostname",
    "use --log-level-http": "--uvicorn-log-level",
    "use --log-level-http warning": "--disable-uvicorn-access-log",
    "use --log-format": "--log-requests-format=text --json-output",
    "requests are logged to stderr like everything else: leave it out": "--log-requests-target",
    "use --log-requests": "--enable-log-requests",
    "use --log-requests with --log-requests-level": "--enable-log-outputs --max-log-len",
    "use a larger --decode-log-interval": "--disable-log-stats",
    "use --enable-metrics": "--metrics",
    "use --flight-recorder-dir": "--crash-dump-folder",
    "use --torch-profiler-dir": "--profiler-config",
    "use --watchdog-timeout": "--soft-watchdog-timeout --dist-timeout --distributed-timeout-seconds",
    "use --speculative-algorithm, --speculative-draft-model-path and --speculative-num-steps": (
        "--speculative-config --speculative-model --num-speculative-tokens --spec-method --spec-model --spec-tokens"
    ),
    # What is not here.
    "a model is split by --tp-size and --ep-size alone: leave it out": (
        "-pp=1 --pp=1 --pp-size=1 --pipeline-parallel-size=1 --moe-dense-tp-size=1 --attn-cp-size=1"
        " --attention-context-parallel-size=1 --moe-dp-size=1 --moe-data-parallel-size=1 --dcp-size=1"
        " --decode-context-parallel-size=1 --prefill-context-parallel-size=1 --attn-dp-size=1"
        " --attention-data-parallel-size=1 --dwdp-size=1 --pp-max-micro-batch-size --pp-async-batch-depth"
        " --enable-dp-attention --enable-prefill-cp --cp-strategy --dcp-* --data-parallel-* --enable-elastic-ep"
        " --elastic-ep-*"
    ),
    "each rank is a process of its own, on several hosts with --nnodes: leave it out": (
        "--distributed-executor-backend=mp --use-ray"
    ),
    "merge the adapter into the model and pass the merged directory as --model-path": (
        "--enable-lora* --lora-* --max-lora* --max-loaded-loras --max-cpu-loras --fully-sharded-loras"
    ),
    "put a TLS proxy in front of the server and leave it out": "--ssl-* --enable-ssl-refresh",
    "HTTP/1.1 at --host and --port is served, a proxy in front can do the rest: leave it out": (
        "--fastapi-root-path --root-path --uds --middleware --grpc* --smg-* --enable-http2 --http2-*"
    ),
    "prefill and decode share one server: leave it out": (
        "--disaggregation-mode=null,none --disaggregation-* --kv-transfer-config --num-reserved-decode-tokens"
    ),
    "on a GPU prefill and decode share steps, which gained more than SMs of their own: leave it out": (
        "--enable-pdmux --pdmux-config-path --sm-group-num"
    ),
    "use --is-embedding for embeddings": "--runner=auto,generate --task=auto,generate --convert=auto,none",
    "the last token is pooled, and its state normalised: leave it out": "--pooler-config --override-pooler-config",
    "each item is a prompt of its own: leave it out": "--enable-mis --multi-item-scoring-delimiter",
    "texts and tokens are served by one process: leave it out": "--tokens-only --enable-scale-out",
    "whether images are read is up to the model: leave it out": "--enable-multimodal --language-only",
    "images come in requests, or from --allowed-media-domains: leave it out": "--allowed-local-media-path",
    "images are decoded by Pillow in a process of their own: leave it out": (
        "--mm-* --limit-mm-* --media-* --image-processor-backend --disable-fast-image-processor"
        " --keep-mm-feature-on-device --enable-prefix-mm-cache"
        " --interleave-mm-strings --skip-mm-profiling --encoder-* --asr-* --video-* --enable-mm-*"
        " --enable-broadcast-mm-inputs-process --enable-precise-embedding-interpolation --trust-mm-content-hashes"
        " --trust-request-mm-kwargs"
    ),
    "sparse and linear attention have no such options, and there is no diffusion model: leave it out": (
        "--mamba-* --linear-attn-* --gdn-* --kda-* --dsa-* --nsa-* --dsv4-* --enable-dsa-*"
        " --enable-nsa-* --enable-hisparse --hisparse-config --hierarchical-sparse-attention-extra-config"
        " --dense-as-sparse --enable-double-sparsity --ds-* --dllm-* --kt-*"
    ),
    "layers with windows keep as many tokens as others: leave it out": "--swa-full-tokens-ratio=1,1.0",
    "weights stay on --device: leave it out": (
        "--cpu-offload-*=0 --offload-*=0 --paged-experts-num-resident --enable-paged-experts"
    ),
    "memory and files are kept while the server runs: leave it out": (
        "--enable-memory-saver --enable-weights-cpu-backup --enable-draft-weights-cpu-backup --enable-sleep-mode"
        " --sleep-mode-* --delete-ckpt-after-loading"
    ),
    "models are those of docs/use/models.md, read from Hugging Face's files: leave it out": (
        "--model-impl=auto,sglang,vllm --config-format=auto,hf --model-config-parser=auto,hf"
    ),
    "weights and tokenizer are read from the files of --model-path and --tokenizer-path: leave it out": (
        "--custom-weight-loader --remote-instance-weight-loader-* --modelexpress-config --modelopt-* --decrypted-*"
        " --quantization-param-path --calculate-kv-scales --model-checksum --weight-cache-* --weight-transfer-config"
        " --checkpoint-engine-wait-weights-before-ready --rl-quant-profile --code-revision --tokenizer-revision"
        " --hf-config-path --ignore-patterns"
    ),
    "no code is loaded into the server: leave it out": (
        "--worker-cls --worker-extension-cls --scheduler-cls --logits-processors --enable-custom-logit-processor"
        " --io-processor-plugin --tool-parser-plugin --reasoning-parser-plugin --forward-hooks --additional-config"
        " --msprobe-dump-config --custom-sigquit-handler"
    ),
    "answers carry text, token ids and logprobs: leave it out": (
        "--enable-return-* --return-* --enable-prompt-embeds --aux-output-config"
    ),
    "tools are run by the client: leave it out": "--tool-server",
    "it is read from the chat template: leave it out": "--chat-template-content-format=auto",
    "requests bring no chat templates: leave it out": "--trust-request-chat-template",
    "clients ask for it with stream_options: leave it out": (
        "--stream-response-default-include-usage --enable-force-include-usage"
    ),
    "logprobs are those after penalties and temperature: leave it out": "--logprobs-mode=processed_logprobs",
    "the limit is fixed (docs/use/openai_api.md): leave it out": "--max-logprobs",
    "use --dtype float32 for all of the model": "--enable-fp32-lm-head",
    "products and sums are those of --dtype and the checkpoint: leave it out": (
        "--enable-quant-communications --enable-tf32-matmul --deepep-dispatcher-output-dtype=auto"
        " --rl-on-policy-target --flashinfer-mxfp4-moe-precision=default --triton-attention-split-tile-size"
    ),
    "windows are the model's: leave it out": "--disable-sliding-window",
    "it is assistant: leave it out": "--response-role=assistant",
    "--cors-allowed-origins says all that is asked: leave it out": (
        "--allow-credentials --allowed-methods --allowed-headers"
    ),
    "eviction is least recently used: leave it out": ("--radix-eviction-policy=lru --radix-eviction-policy-config"),
    "drafts are verified by the decode backend, which reads a few rows of each request: leave it out": (
        "--speculative-attention-mode=decode"
    ),
    "a draft counts where the model draws it too, so that no answer changes: leave it out": (
        "--speculative-accept-threshold-single=1.0,1 --speculative-accept-threshold-acc=1.0,1"
        " --speculative-use-rejection-sampling --speculative-use-block-verification"
    ),
    "a draft has its checkpoint's format and the model's kernels: leave it out": (
        "--speculative-draft-model-quantization --speculative-draft-load-format --speculative-draft-kv-cache-dtype"
    ),
    "NGRAM looks tokens up in the request's own, without a trie: leave it out": "--speculative-ngram-*",
    "drafts come from a model or the request: leave it out, use --speculative-algorithm EAGLE3 or NGRAM": (
        "--speculative-dflash-* --speculative-dspark-* --speculative-domino-* --decoupled-spec-* --uno-lora-path"
    ),
    "--speculative-adaptive chooses by what it measures, none to --speculative-num-steps: leave it out": (
        "--speculative-adaptive-config"
    ),
    "figures are those of --enable-metrics, steps those of --flight-recorder-steps: leave it out": (
        "--trace-modules --collect-detailed-traces"
        " --load-publish-endpoint --enable-forward-pass-metrics --export-metrics-to-file* --log-config-file"
    ),
    "give labels to the scrape job of Prometheus and leave it out": ("--tokenizer-metrics-* --extra-metric-labels"),
    "use --memory-check or --debug-cuda-graph": (
        "--debug-tensor-dump-* --enable-nan-detection --crash-on-nan --kv-canary*"
    ),
}
_ANYWAY = (
    "--enable-auto-tool-choice --enable-prefix-caching --enable-chunked-prefill --async-scheduling"
    " --disable-log-requests --language-model-only --enable-response-store --disable-hybrid-swa-memory"
    " --disable-hicache-numa-detect --sleep-on-idle --skip-server-warmup --enable-multi-layer-eagle"
    " --enable-piecewise-cuda-graph --disable-custom-all-reduce --triton-attention-reduce-in-fp32"
    " --exclude-tools-when-tool-choice-none --enable-request-id-headers --prefix-caching-hash-algo"
)
_HINTS = (  # can change nothing but speed, or figures that nobody relies on
    "--enable-torch-compile* --torch-compile-max-bs --compilation-config -O* -cc --optimization-level"
    " --performance-mode --kernel-config --enforce-piecewise-cuda-graph --piecewise-cuda-graph-compiler"
    " --max-seq-len-to-capture --cuda-graph-max-seq-len-prefill --enable-cudagraph-gc --enable-profile-cuda-graph"
    " --num-continuous-decode-steps --num-scheduler-steps --multi-step-stream-outputs --scheduler-recv-interval"
    " --enable-dynamic-chunking --prefill-decode-interval* --enable-prefill-delayer"
    " --prefill-delayer-* --min-free-slots-delay --long-prefill-token-threshold --max-num-partial-prefills"
    " --max-long-partial-prefills --scheduler-delay-factor --use-v2-block-manager --disable-cascade-attn"
    " --disable-chunked-prefix-cache --disable-shared-experts-fusion --enforce-shared-experts-fusion"
    " --enable-two-batch-overlap --enable-single-batch-overlap --tbo-token-distribution-threshold --enable-dbo"
    " --dbo-* --enable-nccl-nvls --enable-symm-mem --enable-torch-symm-mem --enable-mscclpp --pre-warm-nccl"
    " --enable-p2p-check --nccl-port --enable-flashinfer-allreduce-fusion --enable-aiter-allreduce-fusion"
    " --flashinfer-allreduce-fusion-backend --enforce-disable-flashinfer-allreduce-fusion"
    " --enable-fused-moe-sum-all-reduce --enable-fused-qk-norm-rope --disable-flashinfer-autotune"
    " --enable-flashinfer-autotune --flashinfer-autotune-skip-ops --flashinfer-mla-disable-ragged"
    " --triton-attention-num-kv-splits --fp8-gemm-backend --fp8-gemm-runner-backend --bf16-gemm-backend"
    " --moe-runner-backend --moe-backend --moe-a2a-backend --all2all-backend --linear-backend --deepep-mode"
    " --deepep-config --enable-deepep-moe --speculative-moe-runner-backend --speculative-moe-a2a-backend"
    " --enable-eplb --eplb-* --ep-num-redundant-experts --ep-dispatch-algorithm --init-expert-location"
    " --disable-attn-tp-gather --enable-attn-tp-input-scattered --enable-tp-lm-head-all-to-all --boundary-reduction"
    " --disable-aiter-* --disable-flashinfer-cutlass-moe-fp4-allgather --fp4-gemm-backend --enable-waterfill"
    " --expert-placement-strategy --ubatch-size --prefill-schedule-interval --prefill-round-robin-balance"
    " --disable-hybrid-kv-cache-manager --disable-nccl-for-dp-synchronization --scheduler-reserve-full-isl"
    " --enable-dp-lm-head --tokenizer-worker-num --detokenizer-worker-num --tokenizer-backend --api-server-count"
    " --renderer-num-workers --enable-tokenizer-batch-encode --disable-tokenizer-batch-decode"
    " --enable-dynamic-batch-tokenizer --dynamic-batch-tokenizer-* --batch-notify-size --disable-outlines-disk-cache"
    " --numa-node --numa-bind* --gc-threshold --gc-warning-threshold-secs --warmups --model-loader-extra-config"
    " --weight-loader-* --startup-weight-load-mode --safetensors-* --max-parallel-loading-workers"
    " --pt-load-map-location --use-tqdm-on-load --enable-layerwise-nvtx-marker --enable-layerwise-nvtx-tracing"
    " --show-time-cost --enable-request-time-stats-logging --enable-mfu-metrics --enable-metrics-for-all-schedulers"
    " --collect-tokens-histogram --bucket-* --prompt-tokens-buckets --generation-tokens-buckets"
    " --load-watch-interval --kv-cache-metrics --cudagraph-metrics --enable-expert-distribution-metrics"
    " --expert-balancedness-report-mode --file-storage-path"
)


def _read() -> dict[str, Refusal]:
    found = {}
    for remedy, flags in _REMEDIES.items():
        for flag in flags.split():
            option, _, values = flag.partition("=")
            found[option] = Refusal(remedy, tuple(filter(None, values.split(","))))
    found |= dict.fromkeys(_ANYWAY.split(), Refusal("", ANY))
    return found | dict.fromkeys(_HINTS.split(), Refusal("", hint=True))


REFUSED: Mapping[str, Refusal] = _read()
_BEGINNINGS = {name[:-1]: refusal for name, refusal in REFUSED.items() if name.endswith("*")}
