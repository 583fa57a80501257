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
    """Why a flag is refused and what to do: ``remedy`` follows "--flag value: not available, ".

    ``neutral`` values ask for what happens anyway and are accepted; ``ANY`` means that all are. A ``hint`` can change
    neither answers nor security nor promises about memory: it is accepted with a warning.
    """

    remedy: str
    neutral: tuple[str, ...] = ()
    hint: bool = False

    def accepts(self, value: str) -> bool:
        """Whether ``value`` asks for what happens anyway."""
        return self.neutral == ANY or value.lower() in (*self.neutral, "false")


def find(option: str) -> tuple[str, Refusal] | None:
    """The flag that ``option`` is, in full, with its entry; None if no other server's is known by that name.

    An entry that ends in ``*`` stands for all flags that begin so. ``--flag.key`` sets a key of ``--flag`` in vLLM.
    """
    name = option.split(".")[0]
    if name in REFUSED:
        return name, REFUSED[name]
    return next(((name, refusal) for start, refusal in _BEGINNINGS.items() if name.startswith(start)), None)


def _table(*entries: tuple[str, Refusal]) -> dict[str, Refusal]:
    return {option: refusal for options, refusal in entries for option in options.split()}


REFUSED: Mapping[str, Refusal] = _table(
    # Settings that have another name here.
    ("--max-model-len --max-input-length --max-input-tokens --ctx-size", Refusal("use --context-length")),
    (
        "--gpu-memory-utilization --device-memory-utilization --cuda-memory-fraction",
        Refusal("use --mem-fraction-static"),
    ),
    (
        "--kv-cache-memory-bytes --num-gpu-blocks-override --max-batch-total-tokens",
        Refusal("use --max-total-tokens, which counts tokens"),
    ),
    ("--enforce-eager", Refusal("use --disable-cuda-graph")),
    (
        "--disable-decode-cuda-graph",
        Refusal("use --disable-cuda-graph, which leaves out those of prefill too"),
    ),
    (
        "--cuda-graph-config --cuda-graph-backend-decode --cuda-graph-backend-prefill",
        Refusal("use --cuda-graph-bs, --piecewise-cuda-graph-tokens, --disable-cuda-graph and their kin"),
    ),
    ("--cuda-graph-sizes --cudagraph-capture-sizes", Refusal("use --cuda-graph-bs")),
    ("--max-cudagraph-capture-size", Refusal("use --cuda-graph-max-bs")),
    ("--max-num-seqs --max-num-active-seqs --parallel", Refusal("use --max-running-requests")),
    (
        "--max-num-queued-reqs --max-num-queued-tokens --max-concurrent-requests",
        Refusal("use --max-queued-requests"),
    ),
    (
        "--max-num-batched-tokens --max-num-scheduled-tokens --batch-size",
        Refusal("use --chunked-prefill-size"),
    ),
    ("--no-enable-chunked-prefill", Refusal("use --chunked-prefill-size -1")),
    ("--max-batch-prefill-tokens", Refusal("use --max-prefill-tokens")),
    ("--block-size", Refusal("use --page-size")),
    ("--no-enable-prefix-caching", Refusal("use --disable-radix-cache")),
    ("--no-async-scheduling", Refusal("use --disable-overlap-schedule")),
    ("--scheduling-policy", Refusal("use --schedule-policy and --enable-priority-scheduling", ("fcfs",))),
    ("--preemption-mode", Refusal("use --retract-policy", ("recompute",))),
    ("--swap-space", Refusal("use --enable-hierarchical-cache with --hicache-size", ("0",))),
    (
        "--kv-offloading-size --kv-offloading-backend --enable-lmcache --lmcache-config-file --enable-flexkv"
        " --flexkv-config-file --radix-cache-backend --enable-unified-cache-external-linker",
        Refusal("use --enable-hierarchical-cache with --hicache-size"),
    ),
    (
        "--hicache-storage-backend-extra-config",
        Refusal("use --hicache-storage-dir, --hicache-storage-size and --hicache-storage-prefetch-timeout"),
    ),
    ("-tp --num-shard", Refusal("use --tp-size")),
    ("-dp", Refusal("use --dp-size")),
    ("-ep --enable-expert-parallel --enable-ep-moe", Refusal("use --ep-size with the value of --tp-size")),
    ("--master-addr --master-port", Refusal("use --dist-init-addr HOST:PORT")),
    ("--headless", Refusal("use --node-rank")),
    ("--base-gpu-id", Refusal("choose GPUs by CUDA_VISIBLE_DEVICES and leave it out", ("0",))),
    ("--gpu-id-step", Refusal("choose GPUs by CUDA_VISIBLE_DEVICES and leave it out", ("1",))),
    ("--device-ids", Refusal("choose GPUs by CUDA_VISIBLE_DEVICES and leave it out")),
    ("--n-gpu-layers", Refusal("the whole model runs on one kind of device: use --device cuda")),
    ("--model-id", Refusal("use --model-path")),
    ("--tokenizer", Refusal("use --tokenizer-path")),
    ("--seed", Refusal("use --random-seed")),
    ("-q --quantize", Refusal("use --quantization")),
    (
        "--torchao-config --quantize-and-serve --quantization-config",
        Refusal("use --quantization or a checkpoint that is quantised"),
    ),
    ("--hf-overrides --rope-scaling --rope-theta", Refusal("use --json-model-override-args")),
    ("--hf-token", Refusal("set HF_TOKEN in the environment and leave it out")),
    ("--generation-config", Refusal("use --sampling-defaults model or --sampling-defaults openai")),
    (
        "--override-generation-config --preferred-sampling-params",
        Refusal(
            "defaults are those of the model's generation_config.json (--sampling-defaults model): change them there,"
            " or send them with each request"
        ),
    ),
    (
        "--default-chat-template-kwargs",
        Refusal("send chat_template_kwargs with each request, or set its variables in a --chat-template"),
    ),
    ("--hf-chat-template-name", Refusal("write that template to a file and use --chat-template")),
    ("--enable-reasoning", Refusal("use --reasoning-parser")),
    (
        "--guided-decoding-backend --structured-outputs-config",
        Refusal("use --grammar-backend", ("xgrammar", "auto")),
    ),
    (
        "--constrained-json-disable-any-whitespace --constrained-json-max-whitespace-cnt",
        Refusal("use --constrained-json-whitespace-pattern"),
    ),
    ("--enable-prompt-tokens-details", Refusal("use --enable-cache-report")),
    ("--stream-output", Refusal("use --incremental-streaming-output")),
    ("--allowed-origins", Refusal("use --cors-allowed-origins")),
    ("--hostname", Refusal("use --host")),
    ("--uvicorn-log-level", Refusal("use --log-level-http")),
    ("--disable-uvicorn-access-log", Refusal("use --log-level-http warning")),
    ("--enable-log-requests", Refusal("use --log-requests")),
    ("--enable-log-outputs --max-log-len", Refusal("use --log-requests with --log-requests-level")),
    ("--disable-log-stats", Refusal("use a larger --decode-log-interval")),
    ("--metrics", Refusal("use --enable-metrics")),
    ("--crash-dump-folder", Refusal("use --flight-recorder-dir")),
    ("--profiler-config", Refusal("use --torch-profiler-dir")),
    (
        "--soft-watchdog-timeout --dist-timeout --distributed-timeout-seconds",
        Refusal("use --watchdog-timeout"),
    ),
    (
        "--speculative-config --speculative-model --num-speculative-tokens --spec-method --spec-model --spec-tokens",
        Refusal("use --speculative-algorithm, --speculative-draft-model-path and --speculative-num-steps"),
    ),
    # What is not here.
    (
        "-pp --pp --pp-size --pipeline-parallel-size --moe-dense-tp-size --attn-cp-size"
        " --attention-context-parallel-size --moe-dp-size --moe-data-parallel-size --dcp-size"
        " --decode-context-parallel-size --prefill-context-parallel-size"
        " --attn-dp-size --attention-data-parallel-size --dwdp-size",
        Refusal("a model is split by --tp-size and --ep-size alone: leave it out", ("1",)),
    ),
    (
        "--pp-max-micro-batch-size --pp-async-batch-depth --enable-dp-attention --enable-prefill-cp --cp-strategy"
        " --dcp-* --data-parallel-* --enable-elastic-ep --elastic-ep-*",
        Refusal("a model is split by --tp-size and --ep-size alone: leave it out"),
    ),
    (
        "--distributed-executor-backend",
        Refusal("each rank is a process of its own, on several hosts with --nnodes: leave it out", ("mp",)),
    ),
    (
        "--enable-lora* --lora-* --max-lora* --max-loaded-loras --max-cpu-loras --fully-sharded-loras",
        Refusal("merge the adapter into the model and pass the merged directory as --model-path"),
    ),
    ("--ssl-* --enable-ssl-refresh", Refusal("put a TLS proxy in front of the server and leave it out")),
    (
        "--fastapi-root-path --root-path --uds --middleware --grpc* --smg-* --enable-http2 --http2-*",
        Refusal("HTTP/1.1 at --host and --port is served, a proxy in front can do the rest: leave it out"),
    ),
    ("--disaggregation-mode", Refusal("prefill and decode share one server: leave it out", ("null", "none"))),
    (
        "--disaggregation-* --kv-transfer-config --num-reserved-decode-tokens --enable-pdmux --pdmux-config-path"
        " --sm-group-num",
        Refusal("prefill and decode share one server: leave it out"),
    ),
    (
        "--is-embedding --runner --task --convert --pooler-config --override-pooler-config --enable-mis"
        " --multi-item-scoring-delimiter --tokens-only --enable-scale-out",
        Refusal("only text generation is served: leave it out", ("auto", "generate", "none")),
    ),
    (
        "--enable-multimodal --mm-* --limit-mm-* --media-* --image-processor-backend --disable-fast-image-processor"
        " --keep-mm-feature-on-device --enable-prefix-mm-cache --allowed-media-domains --allowed-local-media-path"
        " --interleave-mm-strings --skip-mm-profiling --encoder-* --language-only --asr-* --video-* --enable-mm-*"
        " --enable-broadcast-mm-inputs-process --enable-precise-embedding-interpolation --trust-mm-content-hashes"
        " --trust-request-mm-kwargs",
        Refusal("only text models are served: leave it out"),
    ),
    (
        "--mamba-* --max-mamba-cache-size --linear-attn-* --gdn-* --kda-* --dsa-* --nsa-* --dsv4-*"
        " --enable-dsa-* --enable-nsa-* --enable-hisparse --hisparse-config"
        " --hierarchical-sparse-attention-extra-config --dense-as-sparse --enable-double-sparsity --ds-* --dllm-*"
        " --kt-*",
        Refusal("there is no sparse, linear or latent attention and no diffusion model: leave it out"),
    ),
    (
        "--swa-full-tokens-ratio",
        Refusal("layers with windows keep as many tokens as others: leave it out", ("1", "1.0")),
    ),
    (
        "--cpu-offload-* --offload-* --paged-experts-num-resident",
        Refusal("weights stay on --device: leave it out", ("0",)),
    ),
    (
        "--enable-memory-saver --enable-weights-cpu-backup --enable-draft-weights-cpu-backup --enable-sleep-mode"
        " --sleep-mode-* --delete-ckpt-after-loading",
        Refusal("memory and files are kept while the server runs: leave it out"),
    ),
    (
        "--model-impl --config-format --model-config-parser",
        Refusal(
            "models are those of docs/models.md, read from Hugging Face's files: leave it out",
            ("auto", "hf", "sglang", "vllm"),
        ),
    ),
    (
        "--custom-weight-loader --remote-instance-weight-loader-* --modelexpress-config --modelopt-* --decrypted-*"
        " --quantization-param-path --calculate-kv-scales --model-checksum --weight-cache-* --weight-transfer-config"
        " --checkpoint-engine-wait-weights-before-ready --rl-quant-profile --code-revision --tokenizer-revision"
        " --hf-config-path --ignore-patterns",
        Refusal(
            "weights and tokenizer are read from the files of --model-path and --tokenizer-path: leave it out"
        ),
    ),
    (
        "--worker-cls --worker-extension-cls --scheduler-cls --logits-processors --enable-custom-logit-processor"
        " --io-processor-plugin --tool-parser-plugin --reasoning-parser-plugin --forward-hooks --additional-config"
        " --msprobe-dump-config --custom-sigquit-handler",
        Refusal("no code is loaded into the server: leave it out"),
    ),
    (
        "--enable-return-* --return-* --enable-prompt-embeds --aux-output-config",
        Refusal("answers carry text, token ids and logprobs: leave it out"),
    ),
    ("--use-ray", Refusal("each rank is a process of its own: leave it out")),
    ("--enable-paged-experts", Refusal("weights stay on --device: leave it out")),
    ("--tool-server", Refusal("tools are run by the client: leave it out")),
    ("--chat-template-content-format", Refusal("it is read from the chat template: leave it out", ("auto",))),
    ("--trust-request-chat-template", Refusal("requests bring no chat templates: leave it out")),
    (
        "--stream-response-default-include-usage --enable-force-include-usage",
        Refusal("clients ask for it with stream_options: leave it out"),
    ),
    (
        "--logprobs-mode",
        Refusal("logprobs are those after penalties and temperature: leave it out", ("processed_logprobs",)),
    ),
    ("--max-logprobs", Refusal("the limit is fixed (docs/openai_api.md): leave it out")),
    ("--enable-fp32-lm-head", Refusal("use --dtype float32 for all of the model")),
    (
        "--enable-quant-communications --enable-tf32-matmul --deepep-dispatcher-output-dtype --rl-on-policy-target"
        " --flashinfer-mxfp4-moe-precision --triton-attention-split-tile-size",
        Refusal(
            "products and sums are those of --dtype and the checkpoint: leave it out", ("auto", "default")
        ),
    ),
    ("--disable-sliding-window", Refusal("windows are the model's: leave it out")),
    ("--response-role", Refusal("it is assistant: leave it out", ("assistant",))),
    (
        "--allow-credentials --allowed-methods --allowed-headers",
        Refusal("--cors-allowed-origins says all that is asked: leave it out"),
    ),
    ("--radix-eviction-policy", Refusal("eviction is least recently used: leave it out", ("lru",))),
    ("--radix-eviction-policy-config", Refusal("eviction is least recently used: leave it out")),
    (
        "--speculative-attention-mode",
        Refusal(
            "drafts are verified by the decode backend, which reads a few rows of each request: leave it out",
            ("decode",),
        ),
    ),
    (
        "--speculative-accept-threshold-single --speculative-accept-threshold-acc --speculative-use-rejection-sampling"
        " --speculative-use-block-verification",
        Refusal(
            "a draft counts where the model draws it too, so that no answer changes: leave it out",
            ("1.0", "1"),
        ),
    ),
    (
        "--speculative-draft-model-quantization --speculative-draft-load-format --speculative-draft-kv-cache-dtype",
        Refusal("a draft has its checkpoint's format and the model's kernels: leave it out"),
    ),
    (
        "--speculative-ngram-* --speculative-dflash-* --speculative-dspark-* --speculative-domino-*"
        " --decoupled-spec-* --uno-lora-path",
        Refusal("drafts come from a model: leave it out, use --speculative-algorithm STANDALONE or EAGLE3"),
    ),
    (
        "--speculative-adaptive-config",
        Refusal(
            "--speculative-adaptive chooses by what it measures, none to --speculative-num-steps: leave it out"
        ),
    ),
    (
        "--enable-trace --trace-modules --otlp-* --collect-detailed-traces --kv-events-config --load-publish-endpoint"
        " --enable-forward-pass-metrics --export-metrics-to-file* --log-config-file",
        Refusal(
            "figures are those of --enable-metrics, steps those of --flight-recorder-steps: leave it out"
        ),
    ),
    (
        "--tokenizer-metrics-* --extra-metric-labels",
        Refusal("give labels to the scrape job of Prometheus and leave it out"),
    ),
    (
        "--debug-tensor-dump-* --enable-nan-detection --crash-on-nan --kv-canary*",
        Refusal("use --memory-check or --debug-cuda-graph"),
    ),
    # These ask for what happens anyway.
    (
        "--enable-auto-tool-choice --enable-prefix-caching --enable-chunked-prefill --async-scheduling"
        " --disable-log-requests --language-model-only --enable-response-store --disable-hybrid-swa-memory"
        " --disable-hicache-numa-detect --sleep-on-idle --skip-server-warmup --enable-multi-layer-eagle"
        " --enable-piecewise-cuda-graph --disable-custom-all-reduce --triton-attention-reduce-in-fp32"
        " --exclude-tools-when-tool-choice-none --enable-request-id-headers --prefix-caching-hash-algo",
        Refusal("", ANY),
    ),
    # These can change nothing but speed, or figures that nobody relies on.
    (
        "--enable-torch-compile* --torch-compile-max-bs --compilation-config -O* -cc --optimization-level"
        " --performance-mode --kernel-config --enforce-piecewise-cuda-graph --piecewise-cuda-graph-compiler"
        " --max-seq-len-to-capture --cuda-graph-max-seq-len-prefill --enable-cudagraph-gc --enable-profile-cuda-graph"
        " --num-continuous-decode-steps --num-scheduler-steps --multi-step-stream-outputs --scheduler-recv-interval"
        " --enable-mixed-chunk --enable-dynamic-chunking --prefill-decode-interval* --enable-prefill-delayer"
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
        " --enable-dynamic-batch-tokenizer --dynamic-batch-tokenizer-* --batch-notify-size"
        " --disable-outlines-disk-cache --numa-node --numa-bind* --gc-threshold --gc-warning-threshold-secs"
        " --warmups --model-loader-extra-config --weight-loader-* --startup-weight-load-mode --safetensors-*"
        " --max-parallel-loading-workers --pt-load-map-location --use-tqdm-on-load --enable-layerwise-nvtx-marker"
        " --enable-layerwise-nvtx-tracing --show-time-cost --enable-request-time-stats-logging --enable-mfu-metrics"
        " --enable-metrics-for-all-schedulers --collect-tokens-histogram --bucket-* --prompt-tokens-buckets"
        " --generation-tokens-buckets --load-watch-interval --kv-cache-metrics --cudagraph-metrics"
        " --enable-expert-distribution-metrics --expert-balancedness-report-mode --file-storage-path",
        Refusal("", hint=True),
    ),
)
_BEGINNINGS = {name[:-1]: refusal for name, refusal in REFUSED.items() if name.endswith("*")}
