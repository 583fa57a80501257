"""--cuda-coredump-dir: the folder, the driver's variables, and what the scheduler's process says of them."""

from __future__ import annotations

import dataclasses
import logging
import os
import struct
from pathlib import Path

import pytest

from fenceline.config.core_dumps import (
    core_dump_dir,
    core_dump_environment,
    core_dumps_of_this_process,
    is_complete,
    wait_for_core_dumps,
)
from fenceline.config.engine_config import EngineConfig
from fenceline.config.errors import ConfigError
from fenceline.config.server_args import ServerArgs, resolve
from fenceline.managers.scheduler_process import enable_core_dumps, log_core_dumps


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    values = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    monkeypatch.setattr(os, "environ", values)
    return values


def config(folder: Path | None, device: str) -> EngineConfig:
    wanted = None if folder is None else str(folder)
    resolved = resolve(ServerArgs(model_path="demo", device="cpu", cuda_coredump_dir=wanted))
    return dataclasses.replace(resolved, device=device)


def test_folder_is_made_and_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert core_dump_dir(None) is None
    assert core_dump_dir("dumps/gpu") == str(tmp_path / "dumps" / "gpu")
    assert not list((tmp_path / "dumps" / "gpu").iterdir())
    monkeypatch.setenv("HOME", str(tmp_path))
    assert core_dump_dir("~/mine") == str(tmp_path / "mine")


def test_folder_that_cannot_be_written_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        core_dump_dir(str(tmp_path / "file" / "below"))
    assert str(caught.value).startswith(f"--cuda-coredump-dir {tmp_path}/file/below: cannot be written (")
    assert str(caught.value).endswith("name another folder")
    assert "\n" not in str(caught.value)


def test_variables_are_set_before_cuda_starts(
    tmp_path: Path, environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        enable_core_dumps(config(tmp_path, "cuda"))
    pattern = str(tmp_path / "cuda-%h-%p-%t.nvcudmp")
    assert environment["CUDA_ENABLE_COREDUMP_ON_EXCEPTION"] == "1"
    assert environment["CUDA_COREDUMP_FILE"] == pattern
    flags = environment["CUDA_COREDUMP_GENERATION_FLAGS"].split(",")
    assert "skip_global_memory" in flags  # the KV pool
    assert "skip_abort" in flags  # the flight recorder writes its file afterwards
    assert f"the driver dumps the GPU to {pattern}" in caplog.text


def test_variables_of_the_environment_win(tmp_path: Path, environment: dict[str, str]) -> None:
    environment["CUDA_COREDUMP_GENERATION_FLAGS"] = "skip_abort"
    enable_core_dumps(config(tmp_path, "cuda"))
    assert environment["CUDA_COREDUMP_GENERATION_FLAGS"] == "skip_abort"
    assert environment["CUDA_ENABLE_COREDUMP_ON_EXCEPTION"] == "1"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_the_flag_or_a_gpu_nothing_is_set(
    tmp_path: Path, environment: dict[str, str], caplog: pytest.LogCaptureFixture, device: str
) -> None:
    enable_core_dumps(config(None, device))
    assert not caplog.records
    enable_core_dumps(config(tmp_path, "cpu"))
    assert "there will be no core dumps" in caplog.text
    assert not [name for name in environment if name.startswith("CUDA_")]


def test_dumps_of_this_process_are_found(tmp_path: Path) -> None:
    pattern = Path(core_dump_environment(str(tmp_path))["CUDA_COREDUMP_FILE"]).name
    names = [
        pattern.replace("%h", "host-1").replace("%p", str(pid)).replace("%t", str(seconds))
        for pid, seconds in ((os.getpid(), 1000), (os.getpid(), 999), (os.getpid() + 1, 998))
    ]
    for age, name in enumerate(names):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (age, age))
    assert core_dumps_of_this_process(str(tmp_path)) == [str(tmp_path / name) for name in names[:2]]


def dump(folder: Path, pid: int | None = None) -> Path:
    return folder / f"cuda-host-{os.getpid() if pid is None else pid}-1000.nvcudmp"


def elf(num_sections: int, data: int) -> bytes:
    """A dump's outline: header, ``data`` bytes, section headers."""
    header = bytearray(64)
    header[:5] = b"\x7fELF\x02"
    struct.pack_into("<Q", header, 0x28, 64 + data)
    struct.pack_into("<HH", header, 0x3A, 64, num_sections)
    return bytes(header) + b"d" * data + b"s" * 64 * num_sections


@pytest.mark.parametrize("sections", [1, 358])
def test_every_beginning_of_a_dump_is_incomplete(tmp_path: Path, sections: int) -> None:
    whole = elf(sections, 300)
    for length in [*range(0, 400, 13), len(whole) - 1]:
        dump(tmp_path).write_bytes(whole[:length])
        assert not is_complete(str(dump(tmp_path))), length
    dump(tmp_path).write_bytes(whole)
    assert is_complete(str(dump(tmp_path)))
    dump(tmp_path).write_bytes(bytes(64))  # a header that is still to be written
    assert not is_complete(str(dump(tmp_path)))


class Driver:
    """Writes a piece of its dump in every tenth of a second for which somebody waits."""

    def __init__(self, path: Path, pieces: list[bytes]) -> None:
        self.path, self.pieces, self.now = path, pieces, 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.pieces:
            piece = self.pieces.pop(0)
            if piece:
                with self.path.open("ab") as file:
                    file.write(piece)


def test_the_process_waits_until_the_driver_has_written_all(tmp_path: Path) -> None:
    whole = elf(5, 1000)
    dump(tmp_path, os.getpid() + 1).write_bytes(b"another's")
    quiet = [b""] * 8  # the GPU's state is collected first; later a slow disk
    driver = Driver(
        dump(tmp_path), [*quiet, whole[:700], *quiet, whole[700:-1], *quiet, whole[-1:], b"never"]
    )
    assert wait_for_core_dumps(str(tmp_path), 1.0, driver.clock, driver.sleep) == [str(dump(tmp_path))]
    assert dump(tmp_path).read_bytes() == whole
    assert wait_for_core_dumps(str(tmp_path), 1.0, driver.clock, pytest.fail) == [str(dump(tmp_path))]


@pytest.mark.parametrize("begun", [b"", elf(5, 1000)[:700]])
def test_it_does_not_wait_for_ever(tmp_path: Path, begun: bytes) -> None:
    driver = Driver(dump(tmp_path), [begun])
    found = wait_for_core_dumps(str(tmp_path), 1.0, driver.clock, driver.sleep)
    assert found == ([str(dump(tmp_path))] if begun else [])
    assert 0.9 < driver.now < 1.3


def test_what_is_said_of_dumps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cuda, reason = config(tmp_path, "cuda"), "AcceleratorError: CUDA error: an illegal memory access"
    dump(tmp_path).write_bytes(elf(5, 100))
    log_core_dumps(cuda, "ValueError: the checkpoint lacks a tensor")
    log_core_dumps(config(None, "cuda"), reason)
    assert not caplog.records
    log_core_dumps(cuda, reason)
    assert f"cuda-gdb -ex 'target cudacore {dump(tmp_path)}'" in caplog.text
    dump(tmp_path).write_bytes(elf(5, 100)[:-1])
    log_core_dumps(cuda, reason, patience_s=0.0)
    assert f"{dump(tmp_path)} is only begun" in caplog.text
