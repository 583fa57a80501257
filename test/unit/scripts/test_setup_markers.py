"""Tests for GPUs are skipped with a reason where there are too few; long ones run with --all."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import setup_env


@pytest.fixture
def conftest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("shared_conftest", setup_env.ROOT / "test" / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Item:
    """As much of a collected test as the hook looks at."""

    def __init__(self, *marks: str, path: str = "test_it.py") -> None:
        self.marks = marks
        self.path, self.nodeid = Path(path), f"{path}::test_it"
        self.added: list[str] = []

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.added.append(mark.kwargs["reason"])


class Config:
    """As much of the configuration as the hook looks at: whether --all is given, and who is told what is left out."""

    def __init__(self, runs_all: bool = True) -> None:
        self.runs_all = runs_all
        self.left_out: list[Item] = []
        self.hook = self

    def getoption(self, name: str) -> bool:
        assert name == "--all"
        return self.runs_all

    def pytest_deselected(self, items: list[Item]) -> None:
        self.left_out += items


@pytest.mark.parametrize(
    ("num_gpus", "reasons"),
    [
        (0, [[], ["needs 1 NVIDIA GPU(s), found 0"], ["needs 2 NVIDIA GPU(s), found 0"]]),
        (1, [[], [], ["needs 2 NVIDIA GPU(s), found 1"]]),
        (2, [[], [], []]),
    ],
)
def test_marked_tests_are_skipped_where_gpus_are_missing(
    conftest: ModuleType, monkeypatch: pytest.MonkeyPatch, num_gpus: int, reasons: list[list[str]]
) -> None:
    monkeypatch.setattr(conftest, "_num_gpus", lambda: num_gpus)
    items = [Item(), Item("gpu"), Item("multi_gpu")]
    conftest.pytest_collection_modifyitems(Config(), items)
    assert [item.added for item in items] == reasons


def test_nobody_asks_for_gpus_without_a_marked_test(conftest: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> int:
        raise AssertionError("imported torch to count GPUs")

    monkeypatch.setattr(conftest, "_num_gpus", ask)
    conftest.pytest_collection_modifyitems(Config(), [Item()])


@pytest.mark.parametrize("mark", ["slow", "long"])
def test_files_with_slow_tests_come_first_and_stay_in_order(conftest: ModuleType, mark: str) -> None:
    quick, slow, beside = Item(path="a.py"), Item(mark, path="b.py"), Item(path="b.py")
    items = [quick, beside, slow, last := Item(path="c.py")]
    some = [*items]
    conftest.pytest_collection_modifyitems(Config(True), items)
    assert items == [beside, slow, quick, last]
    conftest.pytest_collection_modifyitems(Config(False), some)
    assert [item for item in some if item is not slow] == [beside, quick, last]


def test_long_tests_run_with_all_alone(conftest: ModuleType) -> None:
    quick, long = Item(), Item("long")
    for runs_all, expected in ((True, [quick, long]), (False, [quick])):
        config, items = Config(runs_all), [quick, long]
        conftest.pytest_collection_modifyitems(config, items)
        assert items == expected and items + config.left_out == [quick, long]
