"""The file backend against a dict, evictions and damage included, through two handles on one directory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from storage_cases import check_usage, contents, file_nbytes, fingerprint, flip, key, path_of, read_checked, temp_files

from fenceline.mem_cache.storage.file_backend import FileBackend

PAGE = 40
STEP_NS = 1000
BATCHES = st.lists(st.integers(0, 11), min_size=1, max_size=8, unique=True)
HANDLES = st.integers(0, 1)


class StorageMachine(RuleBasedStateMachine):
    """``model``: the pages that are there, by number, with the time of last use and whether they are sound."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name)
        self.now = 10**18
        self.model: dict[int, tuple[int, bool]] = {}

    @initialize(num_pages=st.integers(1, 7), low=st.sampled_from([0.3, 0.6, 1.0]))
    def open(self, num_pages: int, low: float) -> None:
        self.max_bytes = num_pages * file_nbytes(PAGE) + 17
        self.low_bytes = int(self.max_bytes * low)
        self.clean_to = low
        self.backends = [self.make(), self.make()]

    def make(self) -> FileBackend:
        return FileBackend(
            self.root,
            fingerprint(PAGE),
            self.max_bytes,
            clean_to=self.clean_to,
            clock=lambda: self.now,
            lock_timeout_s=30.0,
        )

    def tick(self) -> None:
        self.now += 10**6

    def touch(self, numbers: list[int]) -> list[bool]:
        found = [number in self.model for number in numbers]
        for i, number in enumerate(numbers):
            if number in self.model:
                self.model[number] = (self.now - i * STEP_NS, self.model[number][1])
        return found

    @rule(numbers=BATCHES, handle=HANDLES)
    def exists(self, numbers: list[int], handle: int) -> None:
        self.tick()
        assert self.backends[handle].exists([key(n) for n in numbers]) == self.touch(numbers)

    @rule(numbers=BATCHES, handle=HANDLES)
    def get(self, numbers: list[int], handle: int) -> None:
        self.tick()
        for number in numbers:
            if not self.model.get(number, (0, True))[1]:
                del self.model[number]
        assert read_checked(self.backends[handle], [key(n) for n in numbers]) == self.touch(numbers)

    @rule(numbers=BATCHES, handle=HANDLES)
    def set(self, numbers: list[int], handle: int) -> None:
        self.tick()
        names = [key(n) for n in numbers]
        stored = self.backends[handle].set(names, contents(names, PAGE))
        assert stored == self.expected_set(numbers)

    def expected_set(self, numbers: list[int]) -> list[bool]:
        keep_since = self.now - len(numbers) * STEP_NS
        for i, number in enumerate(numbers):
            if number not in self.model and not self.make_room(keep_since):
                return [True] * i + [False] * (len(numbers) - i)
            sound = self.model.get(number, (0, True))[1]
            self.model[number] = (self.now - i * STEP_NS, sound)
        return [True] * len(numbers)

    def make_room(self, keep_since: int) -> bool:
        def needed() -> int:
            return (len(self.model) + 1) * file_nbytes(PAGE)

        if needed() > self.max_bytes:
            order = sorted((used, n) for n, (used, _) in self.model.items() if used < keep_since)
            while order and needed() > max(self.low_bytes, file_nbytes(PAGE)):
                del self.model[order.pop(0)[1]]
        return needed() <= self.max_bytes

    @rule(data=st.data(), position=st.integers(0, file_nbytes(PAGE) - 1), mask=st.integers(1, 255))
    def damage(self, data: st.DataObject, position: int, mask: int) -> None:
        sound = [number for number, (_, is_sound) in self.model.items() if is_sound]
        if sound:
            number = data.draw(st.sampled_from(sound))
            flip(path_of(self.root, fingerprint(PAGE), key(number)), position, mask)
            self.model[number] = (self.model[number][0], False)

    @rule(handle=HANDLES)
    def reopen(self, handle: int) -> None:
        self.backends[handle] = self.make()

    @rule()
    def lose_the_books(self) -> None:
        (self.root / "usage").write_bytes(os.urandom(12))
        self.reopen(0)

    @rule(handle=HANDLES)
    def clear(self, handle: int) -> None:
        assert self.backends[handle].clear() == len(self.model)
        self.model.clear()

    @invariant()
    def usage_is_exact(self) -> None:
        if hasattr(self, "backends"):
            actual = check_usage(self.root, self.max_bytes)
            assert actual == len(self.model) * file_nbytes(PAGE)
            assert temp_files(self.root) == []
            for backend in self.backends:
                stats = backend.stats()
                assert stats.read_bytes == stats.hits * PAGE
                assert stats.written_bytes == stats.writes * PAGE

    def teardown(self) -> None:
        self.folder.cleanup()


def test_against_a_dict() -> None:
    run_machine(StorageMachine, settings=settings(max_examples=40, stateful_step_count=25))
