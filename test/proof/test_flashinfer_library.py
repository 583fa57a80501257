"""FlashInfer's backend with the proof's library: it attends by its plans alone, and a lost plan is seen."""

from __future__ import annotations

import re
from random import Random

import numpy as np
import pytest
import torch
from attention_cases import SCALE, Case

from fenceline.layers.attention.backends import BackendsByKind
from fenceline.layers.attention.flashinfer_backend import FlashInferAttentionBackend, _GraphDecodePlan
from fenceline.layers.attention.flashinfer_library import DecodeKernels, Lens, PrefillKernels, Workspace
from fenceline.layers.forward_batch import AttentionInputs, ForwardMode, GraphDecodeInputs
from fenceline.memory_order import Points, open_device
from fenceline.memory_order.access import reads
from fenceline.memory_order.edges import StreamName
from fenceline_proof import steps
from fenceline_proof.flashinfer_library import PlannedLibrary
from fenceline_proof.runs import HAPPENS_BEFORE, Trial, run
from fenceline_proof.workloads import WORKLOADS
from fenceline_sim.errors import FootprintError, TagError

torch.set_num_threads(1)


def make_backend(case: Case, tensor_cores: bool, slots: int = 2) -> FlashInferAttentionBackend:
    device = open_device("cpu")
    heads = case.queries[0].shape[1]
    library = PlannedLibrary(slots)
    return FlashInferAttentionBackend(case.pool, device, heads, tensor_cores=tensor_cores, library=library)


def check(case: Case, got: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), torch.cat(case.expected()), atol=1e-5, rtol=0)


def inputs_of(case: Case, mode: ForwardMode) -> AttentionInputs:
    starts = np.cumsum([0, *case.query_lens]).astype(np.int32)
    return AttentionInputs(
        mode=mode,
        page_table=case.page_table,
        rows=case.rows,
        seq_lens=torch.tensor(case.seq_lens),
        seq_lens_cpu=np.array(case.seq_lens, dtype=np.int64),
        query_lens_cpu=np.array(case.query_lens, dtype=np.int64),
        query_starts=torch.from_numpy(starts) if mode is ForwardMode.EXTEND else None,
    )


def attend(case: Case, mode: ForwardMode, backend: FlashInferAttentionBackend) -> torch.Tensor:
    plan = backend.plan(inputs_of(case, mode))
    step = (torch.cat(tensors) for tensors in (case.queries, case._last(case.keys), case._last(case.values)))
    return plan.forward(1, *step, SCALE)


BATCHES = [([1], [1]), ([9], [9]), ([40, 3, 17], [4, 3, 17]), ([64, 1, 33], [1, 1, 30]), ([5] * 9, [2] * 9)]


@pytest.mark.parametrize("page_size", [1, 4, 8])
@pytest.mark.parametrize(("seq_lens", "query_lens"), BATCHES)
def test_prefill_is_attention_by_definition(seq_lens: list[int], query_lens: list[int], page_size: int) -> None:
    """With prefixes page by page, without any from the step's own keys."""
    case = Case(seq_lens, query_lens, page_size, (4, 2), seed=3)
    check(case, attend(case, ForwardMode.EXTEND, make_backend(case, tensor_cores=False)))


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seq_lens", [[1], [64], [40, 3, 17], [9] * 11])
def test_decode_is_attention_by_definition(seq_lens: list[int], page_size: int, tensor_cores: bool) -> None:
    case = Case(seq_lens, [1] * len(seq_lens), page_size, (4, 2), seed=4)
    check(case, attend(case, ForwardMode.DECODE, make_backend(case, tensor_cores)))


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_a_captured_step_attends_by_the_last_plan(tensor_cores: bool) -> None:
    """Its plan is laid out alike for all lengths. With the plan of shorter requests keys are left out."""
    seq_lens = [40, 3, 17, 64]
    case = Case(seq_lens, [1] * 4, 4, (4, 2), seed=5)
    backend = make_backend(case, tensor_cores)
    given = inputs_of(case, ForwardMode.DECODE)
    plan = backend.plan_graph(GraphDecodeInputs(given.page_table, given.rows, given.seq_lens, 64))
    assert plan is not None
    q = torch.cat(case.queries)

    def replay() -> torch.Tensor:
        plan.prepare()
        return plan.forward(1, q, q[:, :2], q[:, :2], SCALE)

    backend.before_replay(4, np.array(seq_lens))
    check(case, replay())
    backend.before_replay(4, np.array([2, 1, 2, 3]))
    with pytest.raises(AssertionError):
        check(case, replay())
    backend.before_replay(4, np.array(seq_lens))
    check(case, replay())


def test_a_plan_is_in_pinned_memory_and_one_copy() -> None:
    """Whoever changes the copy changes what is attended to; the pinned memory is not read again."""
    case = Case([64], [1], 4, (4, 2), seed=6)
    for kernels in (
        DecodeKernels(make_backend(case, False).shape, PlannedLibrary(1)),
        PrefillKernels(make_backend(case, False).shape, "fa2", PlannedLibrary(1)),
    ):
        space = Workspace(*(torch.zeros(1 << 14, dtype=torch.uint8) for _ in range(3)))
        lens = np.array([64])
        if isinstance(kernels, DecodeKernels):
            info = kernels.plan(space, lens, graph=False)
        else:
            info = kernels.plan(space, np.ones_like(lens), lens, paged=True)
        assert torch.equal(space.ints, space.pinned) and space.ints.any()
        assert not space.ints[info[-1] :].any(), "nothing behind the plan's own length"


# --- in the proof ------------------------------------------------------------------------------------------


def test_the_engine_is_clean_with_planned_attention() -> None:
    for seed in range(4):
        found = run(Trial("flashinfer", seed))
        assert found.clean, found.report


def _decodes_in_graphs() -> list[int]:
    """Seeds of the workload whose runs have graphs and are not cut short."""
    make = WORKLOADS["flashinfer"].make
    return [seed for seed in range(30) if "cuda_graph_bs" in make(Random(seed)).flags][:3]


def test_a_replay_with_the_plan_of_an_earlier_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """before_replay plans, but the graph's own memory keeps the plan that it was captured with."""

    def forget(self: FlashInferAttentionBackend, bucket: int, seq_lens_cpu: Lens) -> None:
        lens = np.ones(bucket, dtype=np.int64)
        lens[: len(seq_lens_cpu)] = seq_lens_cpu
        self._plan_decode(lens, graph=True)

    monkeypatch.setattr(FlashInferAttentionBackend, "before_replay", forget)
    found = [run(Trial("flashinfer", seed)) for seed in _decodes_in_graphs()]
    # With the shorter lengths of the earlier plan the attention misses a request's last tokens: it goes on with the
    # next request's, and after the last one's there are none.
    missed = re.compile(
        r"decode step(: token \d+ of r\d+ is left out| reads it as token \d+ of r\d+)\n"
        r"  by flashinfer_paged in decode\["
    )
    assert all(one.checker == TagError.checker and missed.search(one.report) for one in found), found
    blind = [run(Trial("flashinfer", seed, detect=False)) for seed in _decodes_in_graphs()]
    assert any(not one.clean and one.checker != HAPPENS_BEFORE for one in blind), "tokens are wrong as well"


def test_each_window_has_a_plan_of_its_own_before_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose layers have different windows, the plans of all windows are made again."""
    make = WORKLOADS["windows"].make
    flags = {seed: make(Random(seed)).flags for seed in range(120)}
    planned = [seed for seed, has in flags.items() if str(has.get("attention_backend")).startswith("flashinfer")]
    seeds = [seed for seed in planned if "cuda_graph_bs" in flags[seed]][:6]
    assert all(run(Trial("windows", seed)).clean for seed in seeds)
    monkeypatch.setattr(BackendsByKind, "before_replay", lambda self, *args: self.backends[-1].before_replay(*args))
    found = [outcome for seed in seeds if not (outcome := run(Trial("windows", seed))).clean]
    assert any(one.checker == TagError.checker and "in decode[" in one.report for one in found), found


def test_a_graph_that_reads_what_plans_are_copied_to_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """F9: the ring's slot is free for the next plan as soon as the bucket has its own copy of this one. So it may be,
    but not if the graph reads the slot."""
    before, right = FlashInferAttentionBackend.before_replay, _GraphDecodePlan.__init__

    def give_back(self: FlashInferAttentionBackend, bucket: int, seq_lens_cpu: Lens) -> None:
        before(self, bucket, seq_lens_cpu)
        (slot,) = self._ring._slots
        self._device.declare(StreamName.FORWARD, "the bucket's own copy", reads, slot.device_memory)
        slot.device_after = Points.of(self._device.forward.record())
        self._ring.num_plans = 0  # so that the ring does not add the step

    def reads_slot(self, backend, inputs, space, *rest):  # type: ignore[no-untyped-def]
        (slot,) = backend._ring._slots
        right(self, backend, inputs, Workspace(space.floats, slot.device, slot.host), *rest)

    monkeypatch.setattr(FlashInferAttentionBackend, "before_replay", give_back)
    seeds = _decodes_in_graphs()
    assert all(run(Trial("flashinfer", seed)).clean for seed in seeds)
    monkeypatch.setattr(_GraphDecodePlan, "__init__", reads_slot)
    found = [run(Trial("flashinfer", seed)) for seed in seeds]
    undeclared = re.compile(r"reads plan_ring\.device\[0\], which is not declared")
    assert all(one.checker == FootprintError.checker and undeclared.search(one.report) for one in found), found
    # Without that check, which comes before the operation runs, the race itself is found.
    monkeypatch.setattr(steps, "Footprints", lambda *_: None)
    found = [run(Trial("flashinfer", seed)) for seed in seeds]
    named = [one for one in found if one.edges == ("schedule_after_forward",)]
    assert named and all(re.search(r"WAR on plan_ring\.device", one.report) for one in named), found
