"""Runs traces of steps (see ``step_traces``) on a ModelRunner with a small random model, and compares outcomes."""

from __future__ import annotations

import atexit
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from step_traces import VOCAB_SIZE, TraceShape

from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.layers.context import Shard, torch_context
from fenceline.memory_order import Device
from fenceline.model_executor.graph_runner import GraphStats
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import ForwardResult, HeldStep, LogprobValues, StepBatch, StepOutput
from fenceline.models.families import make_model

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 0,
    "bos_token_id": 1,
}


# The same with eight experts in each layer, of which a token goes to two.
EXPERTS = MODEL | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}


@lru_cache
def random_model_path(experts: bool = False) -> str:
    """A folder with the model, the same in every process; it is deleted when this process ends. The model's output
    depends on every preceding token: attention is sharp, and the head does not share the embedding's weights."""
    folder = Path(tempfile.mkdtemp(prefix="fenceline-random-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.json").write_text(json.dumps(EXPERTS if experts else MODEL))
    model = resolve(ServerArgs(model_path=str(folder), device="cpu", load_format="dummy")).model
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for name, slot in make_model(model, torch_context(Shard(), torch.float32)).weight_slots().items():
        noise = torch.randn(slot.full_shape, generator=generator)
        if len(slot.full_shape) == 1:
            weights[name] = noise * 0.1 + (3.0 if "q_norm" in name else 1.0)
        else:
            weights[name] = noise * (1.0 if "embed" in name else 2.0 * slot.full_shape[1] ** -0.5)
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def make_runner(
    device: Device,
    shape: TraceShape,
    sizes: tuple[int, ...] = (1, 2, 4, 8),
    context_length: int = 512,
    shard: Shard = Shard(),
    experts: bool = False,
    **flags: object,
) -> ModelRunner:
    """A runner whose memory is ``shape``'s, graphs for ``sizes`` (empty: none); ``flags`` are ServerArgs fields.
    ``shard``: of several ranks, which all make theirs together; ``experts``: of a mixture of experts."""
    if device.kind == "cuda":
        # Prefill in pieces is padded, so its products are rounded differently. It is only used if a test asks for it.
        pieces = {"disable_piecewise_cuda_graph": "piecewise_cuda_graph_tokens" not in flags}
        flags = {"attention_backend": "triton", "dtype": "bfloat16"} | pieces | flags
    args = ServerArgs(
        model_path=random_model_path(experts),
        device=device.kind,
        random_seed=1,
        log_level="error",
        tp_size=shard.size,
        page_size=shape.page_size,
        max_running_requests=shape.num_rows,
        max_total_tokens=shape.num_pages * shape.page_size,
        context_length=context_length,
        disable_cuda_graph=not sizes,
        cuda_graph_bs=sizes or None,
        **flags,  # type: ignore[arg-type]
    )
    runner = ModelRunner(resolve(args), device, show_progress=False, shard=shard)
    if runner.decode.has_graphs:
        assert runner.decode.sizes == sizes, "every size is captured"
    return runner


_compositions = count(1)


def play(
    runner: ModelRunner,
    batches: Sequence[StepBatch],
    after_launch: Callable[[StepBatch], None] = lambda batch: None,
    overlap: bool = True,
) -> list[StepOutput]:
    """Launch all steps, each (with ``overlap``, as the scheduler does) before the preceding one has been waited for."""
    outputs: list[StepOutput] = []
    flight: ForwardResult | None = None
    known: dict[int, int] = {}
    for batch in batches:
        if batch.is_decode:  # when a trace is played again, its batches count as new ones
            if batch.composition not in known:
                known[batch.composition] = next(_compositions)
            batch = dataclasses.replace(batch, composition=known[batch.composition])
        result = runner.launch(batch)
        after_launch(batch)
        if flight is not None:
            outputs.append(flight.wait())
        flight = result
        if not overlap:
            outputs.append(flight.wait())
            flight = None
    if flight is not None:
        outputs.append(flight.wait())
    return outputs


@dataclasses.dataclass(slots=True)
class Taken:
    """A step that was launched, and what was published of it; None of a step that waits for masks."""

    batch: StepBatch
    output: StepOutput | None = None


def record_steps(runner: ModelRunner) -> list[Taken]:
    """The steps that ``runner`` launches from now on."""
    taken: list[Taken] = []
    launch = runner.launch

    def launched(batch: StepBatch) -> ForwardResult | HeldStep:
        result, step = launch(batch), Taken(batch)
        if isinstance(result, ForwardResult):
            wait = result.wait

            def waited() -> StepOutput:
                step.output = wait()
                return step.output

            result.wait = waited  # type: ignore[method-assign]
        taken.append(step)
        return result

    runner.launch = launched  # type: ignore[method-assign]
    return taken


def first_difference(expected: Sequence[StepOutput], got: Sequence[StepOutput]) -> str:
    """A description of where the answers begin to differ in any bit; "" if they are equal."""
    assert len(expected) == len(got)
    for number, (one, other) in enumerate(zip(expected, got, strict=True)):
        if not np.array_equal(one.tokens, other.tokens):
            return f"step {number}: tokens {other.tokens.tolist()}, expected {one.tokens.tolist()}"
        for name in ("logprobs", "prompt_logprobs"):
            if not _same(getattr(one, name), getattr(other, name)):
                return f"step {number}: {name} differ"
    return ""


def same_tokens(expected: Sequence[StepOutput], got: Sequence[StepOutput]) -> str:
    """A description of where the tokens begin to differ, or logprobs by more than rounding; "" if nowhere."""
    for number, (one, other) in enumerate(zip(expected, got, strict=True)):
        if not np.array_equal(one.tokens, other.tokens):
            return f"step {number}: tokens {other.tokens.tolist()}, expected {one.tokens.tolist()}"
        for a, b in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
            if (a is None) != (b is None):
                return f"step {number}: one of them has no logprobs"
            if a is not None and b is not None and not np.allclose(a.chosen, b.chosen, rtol=1e-3, atol=1e-3):
                return f"step {number}: logprobs differ"
    return ""


def _same(a: LogprobValues | None, b: LogprobValues | None) -> bool:
    if a is None or b is None:
        return a is b
    return all(np.array_equal(x, y) for x, y in ((a.chosen, b.chosen), (a.top, b.top), (a.top_ids, b.top_ids)))


def live_memory(runner: ModelRunner) -> list[torch.Tensor]:
    """Host copies of all keys, values and last tokens except the sink's."""
    runner.device.synchronize()
    pool, size = runner.kv_pool, runner.kv_pool.page_size
    parts = [tensor[size:] for _, tensor in pool.tensors()]
    return [tensor.cpu().clone() for tensor in (*parts, runner.req_pool.last_tokens[1:])]


def clear(runner: ModelRunner) -> None:
    """Set all keys, values and last tokens to zero."""
    runner.device.synchronize()
    pool = runner.kv_pool
    for _, tensor in pool.tensors():
        tensor.zero_()
    runner.req_pool.last_tokens.zero_()
    runner.device.synchronize()


def same_memory(a: ModelRunner, b: ModelRunner) -> bool:
    """Whether both have, bit by bit, the same KV and last tokens."""
    return all(torch.equal(x, y) for x, y in zip(live_memory(a), live_memory(b), strict=True))


def check_same(expected: ModelRunner, got: ModelRunner, batches: Sequence[StepBatch]) -> list[StepOutput]:
    """Run ``batches`` on both, on the first one step at a time. All answers and all memory must be equal. Returns the
    answers."""
    for runner in (expected, got):
        clear(runner)
    answers = play(expected, batches, overlap=False)
    assert first_difference(answers, play(got, batches)) == ""
    assert same_memory(expected, got), "keys and values differ"
    return answers


def prefill_stats(runner: ModelRunner) -> GraphStats:
    """The counts of prefill steps in pieces, for a runner that has graphs for them."""
    stats = runner.prefill_graph_stats
    assert stats is not None
    return stats
