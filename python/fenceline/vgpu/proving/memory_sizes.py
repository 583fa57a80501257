"""The memory that the engine allocates at its start and names: which there is, and the number and width of its rows.

More memory than is needed changes no answer, and less may show in none of a run's steps. So the sizes are computed here
again, from the configuration alone.
"""

from __future__ import annotations

import math

import torch

from fenceline.config.draft_config import SpeculativeAlgorithm
from fenceline.config.engine_config import EngineConfig
from fenceline.memory_order import Device
from fenceline.vgpu.proving.events import around

Size = tuple[int, int]  # rows, and elements of a row

_DECODE = (
    "plan_rows", "plan_seq_lens", "temperatures", "noise_scales", "seed_keys", "num_steps", "seq_lens", "positions",
    "out_slots", "input_ids", "next_tokens",
)  # fmt: skip
_SPECULATIVE = (
    "plan_rows", "may_accept", "temperatures", "noise_scales", "seed_keys", "lens", "seq_lens", "draft_lens",
    "draft_ids", "draft_positions", "draft_slots", "is_bad", "counts", "num_bad",
)  # fmt: skip
_OF_NODES = ("input_ids", "positions", "out_slots", "drawn")
_RINGS = (
    "input_ring",
    "result_ring",
    "mask_table",
    "plan_ring",
    "host_pool",
)  # bytes without rows, or rows of the host


class MemorySizes:
    """Notes what ``device`` is told to name. Made before the engine."""

    def __init__(self, device: Device) -> None:
        self._sizes: dict[str, Size] = {}
        self._row_bytes: dict[str, tuple[int | None, int]] = {}  # said, and right
        around(device, "name_memory", before=self._named)

    def _named(self, tensor: torch.Tensor, name: str, row_bytes: int | None = None) -> None:
        if not name.startswith(_RINGS):
            num_rows = len(tensor)
            self._sizes[name] = num_rows, tensor.numel() // num_rows
            self._row_bytes[name] = row_bytes, tensor.nbytes // num_rows

    def compare(self, config: EngineConfig, num_pages: int) -> str:
        """The first size that is not right, "" if all are. ``num_pages``: of the KV cache, the sink included."""
        right = _shared(config, num_pages) | (
            _decode(config) if config.speculative is None else _drafts(config)
        )
        # Rows of prefill's graphs, one for each token of the largest, have what the model keeps between two pieces.
        prefill = {name: size for name, size in self._sizes.items() if name.startswith("prefill.")}
        most = max(config.piecewise_cuda_graph_tokens, default=0)
        wrong = [name for name, (num_rows, _) in prefill.items() if num_rows != most]
        if wrong:
            return f"memory: {wrong[0]} has {prefill[wrong[0]][0]} rows, {most} are right"
        own = {name: size for name, size in self._sizes.items() if name not in prefill}
        if own != right:
            name = next(
                name for name in sorted(own.keys() | right.keys()) if own.get(name) != right.get(name)
            )
            return f"memory: {name} has (rows, elements) {own.get(name)}, {right.get(name)} are right"
        for name, (said, nbytes) in self._row_bytes.items():
            if said != nbytes:
                return f"memory: rows of {name} are said to have {said} bytes, they have {nbytes}"
        return ""


def _shared(config: EngineConfig, num_pages: int) -> dict[str, Size]:
    """The KV cache, and the state of requests; each with the sink."""
    page_size, num_rows = config.server_args.page_size, config.max_running_requests + 1
    num_slots = 1 if config.speculative is None else config.speculative.largest.num_slots
    # A last step may write its slots behind the longest request; one page more is never used.
    longest = config.model.context_length + num_slots - 1
    sizes = {
        "req_pool.page_table": (num_rows, math.ceil(longest / page_size) + 1),
        "req_pool.last_tokens": (num_rows, 1),
    }
    if config.refuses_grammars is None:
        sizes["token_masks"] = num_rows, math.ceil(config.model.vocab_size / 32)
    models = [config.model] if config.speculative is None else [config.model, config.speculative.draft.model]
    layer = 0
    for model in models:
        for _ in range(model.num_layers):
            size = num_pages * page_size, model.num_kv_heads * model.head_dim
            sizes |= {f"kv_pool.layer{layer}.k": size, f"kv_pool.layer{layer}.v": size}
            layer += 1
    return sizes


def _decode(config: EngineConfig) -> dict[str, Size]:
    sizes = {f"decode.{name}": (config.max_running_requests, 1) for name in _DECODE}
    if config.cuda_graph_bs:
        sizes["decode.logits"] = config.cuda_graph_bs[-1], config.model.vocab_size
    return sizes


def _drafts(config: EngineConfig) -> dict[str, Size]:
    """What speculation needs: state by request and row, and the hidden states and logits of all rows of a step."""
    assert config.speculative is not None, "it speculates"
    draft, shape, topk = config.speculative.draft, config.speculative.largest, config.speculative.topk
    most, width = config.max_running_requests, config.model.hidden_size
    is_whole = draft.algorithm is SpeculativeAlgorithm.STANDALONE
    # A draft of several layers (NEXTN) has one for each step.
    num_layers = draft.model.num_layers if draft.algorithm is SpeculativeAlgorithm.NEXTN else 1
    kept = 0 if is_whole else draft.model.hidden_size
    fields = dict.fromkeys(_SPECULATIVE, 1) | dict.fromkeys(_OF_NODES, shape.num_nodes)
    if topk > 1:
        fields |= {"parents": shape.num_nodes, "ancestors": shape.num_nodes, "draft_nodes": shape.num_nodes}
        fields |= {
            "draft_ancestors": topk,
            "path_lens": 1,
            "path": shape.num_tokens,
            "path_tokens": shape.num_tokens,
        }
    sizes = {f"speculative.{name}": (most, num) for name, num in fields.items()}
    state = {
        "lens": 1,
        "drafts": num_layers,
        "previous": 1,
        "is_behind": 1,
        "hidden": max(num_layers - 1, 1) * kept,
    }
    sizes |= {f"draft_state.{name}": (most + 1, num) for name, num in state.items()}
    sizes["speculative.target_hidden"] = most * shape.num_nodes, width
    if draft.aux_layers:
        sizes["speculative.target_aux"] = most * shape.num_nodes, len(draft.aux_layers) * width
    if config.cuda_graph_bs:
        num_rows = config.cuda_graph_bs[-1] * shape.num_nodes
        sizes["speculative.target_logits"] = num_rows, config.model.vocab_size
    return sizes
