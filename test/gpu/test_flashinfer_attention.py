"""FlashInfer's kernels as our attention backend: agreement with the reference, replays, and plans that race no copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from attention_cases import SCALE, Case

from fenceline.layers.attention.base import PLAIN, AttentionBackend, LayerRules
from fenceline.layers.attention.flashinfer_backend import FlashInferAttentionBackend
from fenceline.layers.attention.reference import ReferenceAttentionBackend
from fenceline.layers.forward_batch import AttentionInputs, AttentionPlan, ForwardMode, GraphDecodeInputs
from fenceline.memory_order import Device, open_device

pytestmark = pytest.mark.gpu

TOLERANCE = 2e-2
EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE
groups = pytest.mark.parametrize("group", range(1, 9))
page_sizes = pytest.mark.parametrize("page_size", [1, 16, 64])
head_dims = pytest.mark.parametrize("head_dim", [64, 128])


@pytest.fixture(scope="module")
def device() -> Device:
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    return open_device("cuda")


@pytest.fixture(autouse=True)
def nothing_left_behind(device: Device) -> Iterator[None]:
    yield
    device.synchronize()


class Step(Case):
    """A batch on the GPU, its new q, k, v cut out of one tensor as a model has them."""

    def __init__(
        self,
        seq_lens: Sequence[int],
        query_lens: Sequence[int],
        page_size: int,
        group: int,
        head_dim: int = 128,
        seed: int = 0,
        num_kv_heads: int = 2,
        rules: LayerRules = PLAIN,
    ) -> None:
        heads = (group * num_kv_heads, num_kv_heads)
        sizes = list(seq_lens), list(query_lens), page_size, heads, seed, torch.bfloat16, head_dim, "cuda"
        super().__init__(*sizes, rules=rules)
        self.num_heads = heads[0]
        parts = [torch.cat(tensors) for tensors in (self.queries, self._last(self.keys), self._last(self.values))]
        width = [part.shape[1] for part in parts]
        self.q, self.k, self.v = torch.cat(parts, dim=1).cuda().split(width, dim=1)
        self.table = self.page_table.cuda()

    def inputs(self, mode: ForwardMode) -> AttentionInputs:
        starts = torch.tensor([0, *np.cumsum(self.query_lens)], dtype=torch.int32)
        return AttentionInputs(
            mode=mode,
            page_table=self.table,
            rows=self.rows.cuda(),
            seq_lens=torch.tensor(self.seq_lens).cuda(),
            seq_lens_cpu=np.array(self.seq_lens, dtype=np.int64),
            query_lens_cpu=np.array(self.query_lens, dtype=np.int64),
            query_starts=starts.cuda() if mode is EXTEND else None,
        )

    def attend(self, plan: AttentionPlan) -> torch.Tensor:
        return plan.forward(1, self.q, self.k, self.v, SCALE)

    def through(self, device: Device, backend: AttentionBackend, mode: ForwardMode) -> torch.Tensor:
        inputs = self.inputs(mode)
        device.synchronize()
        with device.forward.active():
            plan = backend.plan(inputs)
            output = self.attend(plan)
            given = torch.full_like(output, torch.nan)
            plan.forward_into(1, self.q, self.k, self.v, SCALE, given)
        device.synchronize()
        assert torch.equal(given, output)
        assert output.is_contiguous() and output.dtype == torch.bfloat16
        return output

    def check(self, mode: ForwardMode, device: Device, prefill: str | None = None) -> None:  # type: ignore[override]
        rules = self.rules_there()
        backend = FlashInferAttentionBackend(self.pool, device, self.num_heads, prefill, rules=rules)
        ours = self.through(device, backend, mode)
        agrees(ours, self.through(device, ReferenceAttentionBackend(self.pool, rules), mode))


def agrees(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours.float(), expected.float(), atol=TOLERANCE, rtol=TOLERANCE)


def boundaries(page_size: int) -> list[int]:
    """Length 1, and around every kind of end of a page."""
    return sorted({1, 2, page_size, page_size + 1, max(page_size - 1, 1), 2 * page_size, 3 * page_size + 1})


# --- agreement ---------------------------------------------------------------------------------------


@head_dims
@page_sizes
@groups
def test_decode_agrees(group: int, page_size: int, head_dim: int, device: Device) -> None:
    lens = [*boundaries(page_size), 700, 33, 1025, 127, 128, 129, 4000]
    Step(lens, [1] * len(lens), page_size, group, head_dim).check(DECODE, device)


@head_dims
@page_sizes
@groups
def test_extend_agrees(group: int, page_size: int, head_dim: int, device: Device) -> None:
    """Some with a prefix and some without, one of them a single token, one ending with each kind of page."""
    new = [*boundaries(page_size), 1, 300, 129, 1]
    prefixes = [*([0, 5, 64, 0, 191, 1, 16] * 2)[: len(boundaries(page_size))], 900, 0, 640, 0]
    lens = [prefix + tokens for prefix, tokens in zip(prefixes, new, strict=True)]
    step = Step(lens, new, page_size, group, head_dim)
    step.check(EXTEND, device)
    if torch.cuda.get_device_capability() == (9, 0):  # what larger steps run on
        step.check(EXTEND, device, prefill="fa3")


@head_dims
@page_sizes
@groups
def test_extend_without_prefixes_agrees(group: int, page_size: int, head_dim: int, device: Device) -> None:
    lens = [*boundaries(page_size), 300, 1, 129, 512]
    Step(lens, lens, page_size, group, head_dim).check(EXTEND, device)


@pytest.mark.parametrize("prefix", [0, 77])
@page_sizes
def test_the_other_prefill_kernels_agree(page_size: int, prefix: int, device: Device) -> None:
    """fa2 is what other GPUs than Hopper get."""
    new = [1, 300, 65, 129]
    Step([prefix + n for n in new], new, page_size, 4).check(EXTEND, device, prefill="fa2")


@head_dims
@page_sizes
@pytest.mark.parametrize("new", [[1], [64], [17, 128]])
def test_a_few_tokens_behind_long_prefixes_agree(new: list[int], page_size: int, head_dim: int, device: Device) -> None:
    """Too few queries for fa3 to fill the GPU: fa2 splits the keys."""
    Step([4000 + n for n in new], new, page_size, 4, head_dim).check(EXTEND, device)


@pytest.mark.parametrize("group", [1, 4])
def test_random_batches_agree(group: int, device: Device) -> None:
    random = np.random.default_rng(group)
    for seed in range(12):
        lens = random.integers(1, 900, size=random.integers(1, 20)).tolist()
        new = [int(random.integers(1, n + 1)) for n in lens]
        page_size = [1, 16, 64][seed % 3]
        Step(lens, new, page_size, group, seed=seed).check(EXTEND, device)
        Step(lens, [1] * len(lens), page_size, group, seed=seed).check(DECODE, device)


with_rules = pytest.mark.parametrize(
    "rules",
    [LayerRules(window=100), LayerRules(soft_cap=2.0), LayerRules(600, 2.0)],
    ids=["window", "soft cap", "both"],
)


@with_rules
@pytest.mark.parametrize("group", [2, 8])  # on CUDA cores, on tensor cores
def test_windows_and_soft_caps_agree(group: int, rules: LayerRules, device: Device) -> None:
    lens = [1, 99, 100, 101, 700, 33, 1025, 4000]
    Step(lens, [1] * len(lens), 16, group, rules=rules).check(DECODE, device)
    new = [1, 300, 129, 1, 40, 512]
    prefixes = [900, 0, 640, 0, 4000, 0]
    prefixed = Step([p + n for p, n in zip(prefixes, new, strict=True)], new, 16, group, rules=rules)
    whole = Step(new, new, 16, group, rules=rules)
    for step in (prefixed, whole):
        for prefill in ("fa2", "fa3") if torch.cuda.get_device_capability() == (9, 0) else ("fa2",):
            step.check(EXTEND, device, prefill)


def test_a_plan_is_spent_when_the_next_is_made(device: Device) -> None:
    step = Step([5, 70], [1, 1], 16, 4)
    backend = FlashInferAttentionBackend(step.pool, device, step.num_heads)
    with device.forward.active():
        first = backend.plan(step.inputs(DECODE))
        backend.plan(step.inputs(DECODE))
        with pytest.raises(AssertionError, match="given to a later plan"):
            step.attend(first)


# --- graphs ------------------------------------------------------------------------------------------


class Captured:
    """A bucket's decode step over ``step``'s requests, captured; each replay attends for some of them."""

    def __init__(self, step: Step, bucket: int, device: Device, backend: FlashInferAttentionBackend) -> None:
        self.step, self.bucket, self.device, self.backend = step, bucket, device, backend
        self.rows = torch.zeros(bucket, dtype=torch.int64, device="cuda")
        self.seq_lens = torch.ones(bucket, dtype=torch.int64, device="cuda")
        self.q = torch.zeros(bucket, *step.q.shape[1:], dtype=step.q.dtype, device="cuda")
        self.kv = torch.zeros(bucket, *step.k.shape[1:], dtype=step.q.dtype, device="cuda")
        self.table = step.table
        self.table[0] = 0  # row 0 is the sink, and is no request's: see its making
        device.synchronize()
        with device.forward.active():
            plan = backend.plan_graph(GraphDecodeInputs(self.table, self.rows, self.seq_lens, max(step.seq_lens) + 40))
            assert plan is not None
            self.plan = plan
            self.body()
        device.synchronize()
        self.graph = device.capture(f"bucket {bucket}", device.make_graph_pool("test"), self.body)
        self.graph.register()
        self.graph.allow_replay()

    def body(self) -> None:
        self.plan.prepare()
        self.output = self.plan.forward(1, self.q, self.kv, self.kv, SCALE)

    def fill(self, chosen: Sequence[int], lens: Sequence[int]) -> None:
        """Requests ``chosen`` of the step, as if they were ``lens`` long; the tail is padding."""
        self.rows.zero_()
        self.seq_lens.fill_(1)
        self.q.zero_()
        self.rows[: len(chosen)] = self.step.rows[list(chosen)].cuda()
        self.seq_lens[: len(chosen)] = torch.tensor(lens).cuda()
        self.q[: len(chosen)] = self.step.q[list(chosen)]

    def sources(self) -> list[torch.Tensor]:
        """Everything a plan is made from or made of, beside what the graph itself derives."""
        slots = [slot.device for slot in self.backend._ring._slots]
        return [self.table, self.rows, self.seq_lens, self.q, *slots, self.backend._buckets[self.bucket].ints]

    def expected(self, chosen: Sequence[int], lens: Sequence[int]) -> torch.Tensor:
        count = len(chosen)
        inputs = AttentionInputs(
            mode=DECODE,
            page_table=self.table,
            rows=self.rows[:count].clone(),
            seq_lens=self.seq_lens[:count].clone(),
            seq_lens_cpu=np.array(lens, dtype=np.int64),
            query_lens_cpu=np.ones(count, dtype=np.int64),
        )
        plan = ReferenceAttentionBackend(self.step.pool, self.step.rules_there()).plan(inputs)
        return plan.forward(1, self.q[:count], self.kv[:count], self.kv[:count], SCALE)


def graph_step(page_size: int, group: int, lens: Sequence[int], rules: LayerRules = PLAIN) -> Step:
    """Requests in rows other than 0: the last ``len(lens)`` of a step that has the sink's row too."""
    step = Step(lens, [1] * len(lens), page_size, group, rules=rules)
    if bool((step.rows == 0).any()):  # the row 0 request moves to a row that nobody has
        free = next(row for row in range(len(step.table)) if row not in step.rows.tolist())
        step.table[free] = step.table[0]
        step.rows[step.rows == 0] = free
    step.pool.row(1, "k")[:page_size] = 0
    step.pool.row(1, "v")[:page_size] = 0
    return step


@pytest.mark.parametrize("rules", [PLAIN, LayerRules(90, 2.0)], ids=["plain", "window"])
@pytest.mark.parametrize("group", [2, 4, 8])
@page_sizes
def test_replays_of_changing_batches_agree(page_size: int, group: int, rules: LayerRules, device: Device) -> None:
    """Random compositions and lengths; whatever is planned from is afterwards what it was, bit for bit (F9)."""
    step = graph_step(page_size, group, [900, 40, 129, 64, 65, 16, 1, 512, 300, 77], rules)
    there = step.rules_there()
    backend = FlashInferAttentionBackend(step.pool, device, step.num_heads, rules=there)
    captured = {bucket: Captured(step, bucket, device, backend) for bucket in (8, 4, 1)}
    random = np.random.default_rng(page_size + group)
    for _ in range(60):
        graph = captured[int(random.choice([1, 4, 8]))]
        chosen = random.permutation(len(step.seq_lens))[: random.integers(1, graph.bucket + 1)].tolist()
        lens = [int(random.integers(1, step.seq_lens[i] + 1)) for i in chosen]
        with device.forward.active():
            graph.fill(chosen, lens)
            backend.before_replay(graph.bucket, np.array(lens, dtype=np.int64))
            before = [tensor.clone() for tensor in graph.sources()]
            graph.graph.replay()
            assert all(torch.equal(*pair) for pair in zip(before, graph.sources(), strict=True)), (
                "a replay writes nothing that a plan is made from"
            )
            agrees(graph.output[: len(chosen)], graph.expected(chosen, lens))
            assert torch.isfinite(graph.output).all(), "padding attends to the sink"


def test_a_replay_without_its_plan_is_wrong(device: Device) -> None:
    """The guard before_replay is needed: with the plan of shorter requests the tail of longer ones is not read."""
    step = graph_step(16, 4, [1500, 1400, 1300, 1200])
    backend = FlashInferAttentionBackend(step.pool, device, step.num_heads)
    graph = Captured(step, 4, device, backend)
    chosen = [0, 1, 2, 3]
    with device.forward.active():
        graph.fill(chosen, step.seq_lens)
        graph.graph.replay()  # the bucket has the plan of its making, for lengths of 1
        wrong = graph.output.clone()
        backend.before_replay(4, np.array(step.seq_lens, dtype=np.int64))
        graph.graph.replay()
        expected = graph.expected(chosen, step.seq_lens)
        agrees(graph.output, expected)
        assert not torch.allclose(wrong.float(), expected.float(), atol=TOLERANCE, rtol=TOLERANCE)


# --- F12 ---------------------------------------------------------------------------------------------

SLEEP_CYCLES = 100_000_000  # of SCHEDULE, some 50 ms: copies of plans are far behind the host


def plans_ahead_of_their_copies(device: Device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Steps planned at once while no copy runs: (ours, the reference's) of each.

    All have 400 tokens, so that a kernel that goes by another step's plan is wrong and nothing worse.
    """
    lens = [[100, 300], [150, 250], [300, 100], [250, 150], [37, 363]]
    steps = [Step(new, new, 16, 4, seed=seed) for seed, new in enumerate(lens)]
    expected = [step.through(device, ReferenceAttentionBackend(step.pool), EXTEND) for step in steps]
    backend = FlashInferAttentionBackend(steps[0].pool, device, steps[0].num_heads)
    steps[0].through(device, backend, EXTEND)  # compiled and loaded
    inputs = [step.inputs(EXTEND) for step in steps]
    device.synchronize()
    with device.schedule.active():
        torch.cuda._sleep(SLEEP_CYCLES)
    outputs = []
    with device.forward.active():
        for step, batch in zip(steps, inputs, strict=True):
            outputs.append(step.attend(backend.plan(batch)))
    device.synchronize()
    return list(zip(outputs, expected, strict=True))


def test_plans_wait_for_the_copies_of_earlier_ones(device: Device) -> None:
    for ours, expected in plans_ahead_of_their_copies(device):
        agrees(ours, expected)


def test_without_the_wait_a_step_runs_on_another_steps_plan() -> None:
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    pairs = plans_ahead_of_their_copies(open_device("cuda", frozenset({"staging_reuse"})))
    wrong = [not torch.allclose(a.float(), b.float(), atol=TOLERANCE, rtol=TOLERANCE) for a, b in pairs]
    assert any(wrong), "the host wrote a plan over one that had yet to be copied"
