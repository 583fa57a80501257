"""Every family's logits against transformers' on a GPU, in float32, and the torch backend's promise not to wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from model_parity import CHECKPOINTS, PagedModel, check_parity, save_checkpoint

from fenceline.layers.forward_batch import AttentionInputs, ForwardMode

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def exact_matmul() -> Iterator[None]:
    """TF32 would cost three digits; both sides must round alike."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_equal_transformers_on_cuda(name: str, page_size: int, tmp_path: Path) -> None:
    reference = save_checkpoint(name, tmp_path).cuda()
    # Sums on a GPU are ordered by shape: small logits beside some of magnitude 10 differ by a little more than 1e-4.
    check_parity(tmp_path, reference, page_size, "cuda", atol=3e-4)


@pytest.mark.parametrize("mode", list(ForwardMode))
def test_plan_and_forward_never_wait_for_the_gpu(mode: ForwardMode, tmp_path: Path) -> None:
    save_checkpoint("qwen3", tmp_path)
    ours = PagedModel(tmp_path, 16, "cuda")
    lens = torch.tensor([150, 20, 3, 149])
    queries = torch.ones_like(lens) if mode is ForwardMode.DECODE else torch.tensor([100, 20, 1, 7])
    num_tokens = int(queries.sum())
    inputs = AttentionInputs(
        mode=mode,
        page_table=torch.from_numpy(ours.page_table).cuda(),
        rows=torch.arange(4).cuda(),
        seq_lens=lens.cuda(),
        seq_lens_cpu=lens.numpy(),
        query_lens_cpu=queries.numpy(),
    )
    q = torch.randn(num_tokens, 6, 20, device="cuda")
    kv = torch.randn(num_tokens, 2, 20, device="cuda")
    ours.backend.plan(inputs).forward(0, q, kv, kv, 0.2)  # first-use initialisation may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = ours.backend.plan(inputs).forward(1, q, kv, kv, 0.2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.shape == q.shape
