"""Points, edges and the staging rings: the rules that the rest relies on."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from recording_device import RecordingDevice

import edges_page
from fenceline.memory_order import InputRing, LeaseError, MaskTable, Points, ResultRing, open_device
from fenceline.memory_order.edges import COPY_AFTER_FORWARD, RING_EDGES, STAGING_REUSE, Edge, StreamName

ROOT = Path(__file__).parents[3]


def test_points_keep_the_latest_of_each_stream() -> None:
    device = RecordingDevice()
    forward = [device.forward.record() for _ in range(3)]
    copy = device.copy.record()
    joined = Points.of(forward[0], copy).join(Points.of(forward[2])).join(Points.of(forward[1]))
    assert set(joined) == {forward[2], copy}
    assert joined == Points.of(copy, forward[2]), "order does not matter"
    assert not joined.passed


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=12), st.integers(-1, 9))
def test_joining_in_any_order_gives_the_same(picks: list[tuple[bool, int]], passed: int) -> None:
    device = RecordingDevice()
    points = [(device.forward.record(), device.copy.record()) for _ in range(10)]
    chosen = [points[i][side] for side, i in picks]
    one, other = Points.none(), Points.none()
    for point in chosen:
        one = one.join(Points.of(point))
    for point in reversed(chosen):
        other = Points.of(point).join(other)
    assert one == other == Points.of(*chosen)
    if passed >= 0:
        device.forward.note_passed(points[passed][0])
        device.copy.note_passed(points[passed][1])
    assert Points.of(*chosen).passed == all(i <= passed for _, i in picks)


def test_a_wait_needs_an_edge_declared_between_these_streams() -> None:
    device = RecordingDevice()
    point = device.forward.record()
    device.copy.wait(point, COPY_AFTER_FORWARD)
    assert device.copy.waits == [point]
    with pytest.raises(AssertionError, match="does not join schedule ← forward"):
        device.schedule.wait(point, COPY_AFTER_FORWARD)
    with pytest.raises(AssertionError, match="does not join copy ← schedule"):
        device.copy.wait(device.schedule.record(), COPY_AFTER_FORWARD)
    with pytest.raises(AssertionError, match="does not join host ← forward"):
        device.forward.synchronize(point, COPY_AFTER_FORWARD)


def test_waits_that_order_nothing_new_cost_nothing() -> None:
    device = RecordingDevice()
    own = device.copy.record()
    device.copy.wait(own, COPY_AFTER_FORWARD)  # program order
    done = device.forward.record()
    device.forward.note_passed(done)
    device.copy.wait(done, COPY_AFTER_FORWARD)  # already passed
    assert device.copy.waits == []


@pytest.mark.parametrize("edge", RING_EDGES, ids=lambda edge: edge.name)
def test_severing_cuts_one_edge_alone(edge: Edge) -> None:
    """Two uploads through one slot and a download: every edge is applied, unless it is severed."""

    def applied(device: RecordingDevice) -> dict[str, int]:
        inputs, results = InputRing(device, depth=1), ResultRing(device, depth=1)
        for value in range(2):
            views = inputs.upload({"x": np.array([value])})
        results.download(views).wait()
        ResultRing(device, depth=1, small_by_forward=True).download(views).wait()
        return {
            "forward_after_schedule": len(device.forward.waits),
            "schedule_after_forward": len(device.schedule.waits),
            "copy_after_forward": len(device.copy.waits),
            "host_after_copy": len(device.copy.blocked),
            "host_after_forward": len(device.forward.blocked),
            "staging_reuse": len(device.schedule.blocked),
        }

    intact, cut = applied(RecordingDevice()), applied(RecordingDevice(frozenset({edge.name})))
    assert intact[edge.name] > 0 and cut[edge.name] == 0
    # Waiting for the pinned slot shows that the copy has run, so without it FORWARD has more to wait for.
    assert all(cut[name] >= intact[name] for name in intact if name != edge.name)


def test_unknown_edge_cannot_be_severed() -> None:
    with pytest.raises(ValueError, match="no such edge or guard"):
        open_device("cpu", severed=frozenset({"forward_after_lunch"}))


def test_upload_keeps_the_values_of_the_moment() -> None:
    ring = InputRing(open_device("cpu"))
    array = np.arange(6, dtype=np.int64).reshape(2, 3)
    others = {
        "f": np.array([1.5, 2.5], dtype=np.float32),
        "none": np.zeros(0, dtype=np.int32),
        "b": np.array([True]),
        "back": np.arange(4, dtype=np.int64)[::-1],
    }
    views = ring.upload({"a": array, **others})
    array[:] = -1
    for _ in range(4):  # the slots are used again and again
        ring.upload({"a": array})
    assert views["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert views["f"].tolist() == [1.5, 2.5] and views["b"].tolist() == [True]
    assert views["none"].shape == (0,) and views["none"].dtype == torch.int32
    assert views["back"].tolist() == [3, 2, 1, 0]


def test_rings_grow() -> None:
    device = open_device("cpu")
    big = np.arange(1 << 16, dtype=np.int64)
    views = InputRing(device).upload({"big": big})
    values = ResultRing(device).download({"big": views["big"] * 2}).wait()
    np.testing.assert_array_equal(values["big"], big * 2)


def test_pinned_slot_is_not_rewritten_before_its_copy_ran() -> None:
    """F12: the host blocks on the copy of the step that used the slot before, and on no later one."""
    device = RecordingDevice()
    ring = InputRing(device, depth=2)
    for value in range(3):
        ring.upload({"x": np.array([value])})
    assert [point.serial for point in device.schedule.blocked] == [1]


_MASKED_STEPS = st.lists(st.tuples(st.integers(1, 80), st.integers(0, 80), st.integers(1, 80)), max_size=5)


@given(st.integers(1, 32) | st.integers(1 << 14, 1 << 17), _MASKED_STEPS)
@example(32 * 1000, [(3, 3, 2), (16, 16, 16), (32, 32, 32), (80, 80, 79), (4, 80, 1)])
def test_masks_are_filled_where_they_are_uploaded_from(vocab_size: int, steps: list[tuple[int, int, int]]) -> None:
    """Steps (requests, padding, masks) that may need a larger slot than those before, or exactly the rows of one; no
    row has a mask of an earlier step."""
    device, num_words = open_device("cpu"), -(-vocab_size // 32)
    table = MaskTable(device, 160, vocab_size)
    for number, (num_reqs, num_padded, num_masks) in enumerate(steps, 1):
        rows = sorted(Random(number).sample(range(num_reqs), min(num_masks, num_reqs)))
        num_rows = num_reqs + num_padded
        masks = table.begin(np.array(rows), num_reqs, num_rows)
        assert masks.shape == (len(rows), num_words)
        masks[:] = 1000 * number + np.array(rows)[:, None]
        uploaded = table.upload()
        table.drawn(device.forward.record())
        expected = np.full((num_rows, num_words), -1)
        expected[rows] = 1000 * number + np.array(rows)[:, None]
        np.testing.assert_array_equal(uploaded.numpy(), expected)


def test_results_are_taken_once_and_the_ring_is_two_deep() -> None:
    device = open_device("cpu")
    ring = ResultRing(device)
    leases = [ring.download({"x": torch.tensor([i])}) for i in range(2)]
    with pytest.raises(LeaseError, match="publish the earlier step"):
        ring.download({"x": torch.tensor([2])})
    assert leases[0].wait()["x"].tolist() == [0]
    with pytest.raises(LeaseError, match="already taken"):
        leases[0].wait()
    ring.download({"x": torch.tensor([2])})
    assert leases[1].wait()["x"].tolist() == [1]


def test_a_result_tells_that_its_step_has_passed() -> None:
    device = RecordingDevice()
    lease = ResultRing(device).download({"x": torch.tensor([1])})
    assert not lease.produced.passed
    lease.wait()
    assert lease.produced.passed


def test_edges_page_is_fresh() -> None:
    assert (ROOT / "docs" / "internals" / "edges.md").read_text() == edges_page.render(), (
        "run: python scripts/edges_page.py"
    )


def test_staging_reuse_is_the_hosts_edge() -> None:
    assert STAGING_REUSE.waiter is StreamName.HOST


@pytest.mark.parametrize("kind", ["cpu", "recording"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_small_results_that_forward_writes_arrive(kind: str, dtype: torch.dtype) -> None:
    device = RecordingDevice() if kind == "recording" else open_device("cpu")
    ring = ResultRing(device, small_by_forward=True)
    wide = torch.arange(15, dtype=dtype).view(5, 3)
    for tensors in (
        {"a": wide},
        {"a": wide.t()},  # not contiguous
        {"a": wide[:, 0]},
        {"a": wide[:0]},
        {"a": wide, "b": torch.ones(3), "c": wide[:1]},
        {"a": torch.arange(3000, dtype=dtype)},  # too large: through COPY
    ):
        values = ring.download(tensors).wait()
        assert values.keys() == tensors.keys()
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(values[name], tensor.numpy())
