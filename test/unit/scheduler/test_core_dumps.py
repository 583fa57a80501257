"""--cuda-coredump-dir: the folder, the driver's variables, and what the scheduler's process says of them."""

from __future__ import annotations

import dataclasses
import logging
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from fenceline.config import ConfigError
from fenceline.config.engine_config import EngineConfig, core_dump_dir, resolve
from fenceline.config.server_args import ServerArgs
from fenceline.ipc.io_struct import TOKENIZER_DECODER, FatalError, PortArgs
from fenceline.ipc.mailbox import Inbox, make_ports, remove_ports
from fenceline.memory_order import Device, open_device
from fenceline.scheduler import process as scheduler_process
from fenceline.scheduler.core_dumps import PATIENCE_S, CoreDumps, core_dump_environment, is_complete
from fenceline.scheduler.process import Watchdog, enable_core_dumps, log_core_dumps, run_scheduler_process


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    values = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    monkeypatch.setattr(os, "environ", values)
    before = os.umask(0o022)
    yield values
    os.umask(before)


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


def test_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        core_dump_dir(str(tmp_path / "file" / "below"))
    assert str(caught.value).startswith(f"--cuda-coredump-dir {tmp_path}/file/below: cannot be written (")
    assert str(caught.value).endswith("name another directory")
    assert "\n" not in str(caught.value)


def test_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    """The driver's names can be guessed, and it writes where a link leads."""
    folder = tmp_path / "dumps"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="may be written to by other users .*; run chmod go-w"):
        core_dump_dir(str(folder))
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigError, match=f"is a symbolic link; name the directory itself, {folder}"):
        core_dump_dir(str(tmp_path / "link"))
    made = core_dump_dir(str(tmp_path / "made"))
    assert made is not None and Path(made).stat().st_mode & 0o077 == 0


def test_variables_are_set_before_cuda_starts(
    tmp_path: Path, environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert enable_core_dumps(config(tmp_path, "cuda")) is not None
    pattern = str(tmp_path / "cuda-%h-%p-%t.nvcudmp")
    assert environment["CUDA_ENABLE_COREDUMP_ON_EXCEPTION"] == "1"
    assert environment["CUDA_COREDUMP_FILE"] == pattern
    flags = environment["CUDA_COREDUMP_GENERATION_FLAGS"].split(",")
    assert "skip_global_memory" in flags  # the KV pool
    assert "skip_abort" in flags  # the flight recorder writes its file afterwards
    assert f"the driver dumps the GPU to {pattern}" in caplog.text
    dump = tmp_path / "dump"  # as the driver makes it
    dump.write_bytes(b"")
    assert stat.S_IMODE(dump.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("CUDA_COREDUMP_FILE", "/elsewhere/core", "the server will not wait until a dump is complete"),
        ("CUDA_ENABLE_COREDUMP_ON_EXCEPTION", "0", "turns the core dumps off"),
    ],
)
def test_dumps_that_are_off_or_elsewhere_are_not_waited_for(
    tmp_path: Path, environment: dict[str, str], caplog: pytest.LogCaptureFixture, name: str, value: str, words: str
) -> None:
    environment[name] = value
    assert enable_core_dumps(config(tmp_path, "cuda")) is None
    assert environment[name] == value
    assert words in caplog.text
    log_core_dumps(None, cast(Device, FailedDevice()))
    assert len(caplog.records) == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_the_flag_or_a_gpu_nothing_is_set(
    tmp_path: Path, environment: dict[str, str], caplog: pytest.LogCaptureFixture, device: str
) -> None:
    assert enable_core_dumps(config(None, device)) is None
    assert not caplog.records
    assert enable_core_dumps(config(tmp_path, "cpu")) is None
    assert "there will be no core dumps" in caplog.text
    assert not [name for name in environment if name.startswith("CUDA_")]


def dump(folder: Path, pid: int | None = None, seconds: int = 1000) -> Path:
    pattern = Path(core_dump_environment(str(folder))["CUDA_COREDUMP_FILE"]).name
    number = str(os.getpid() if pid is None else pid)
    return folder / pattern.replace("%h", "host-1").replace("%p", number).replace("%t", str(seconds))


def test_dumps_of_this_process_are_found(tmp_path: Path) -> None:
    earlier = dump(tmp_path, seconds=990)  # another container's, whose process had the same number
    earlier.write_bytes(elf(5, 100))
    dumps = CoreDumps(str(tmp_path))
    assert dumps.found() == {}
    mine = [dump(tmp_path, seconds=seconds) for seconds in (1000, 1001)]
    for path in (mine[1], mine[0], dump(tmp_path, os.getpid() + 1)):
        path.write_text("begun")
    (tmp_path / f"cuda-host-{os.getpid()}-9-1000.nvcudmp").write_text("the host's name is host-PID")
    dump(tmp_path, seconds=1002).symlink_to(tmp_path / "gone")  # removed after the folder was read
    assert list(dumps.found().items()) == [(str(path), 5) for path in mine]


def elf(num_sections: int, data: int) -> bytes:
    """A dump's outline: header, ``data`` bytes, section headers."""
    header = bytearray(64)
    header[:5] = b"\x7fELF\x02"
    many = num_sections >= 0xFF00  # e_shnum has no room for it
    struct.pack_into("<Q", header, 0x28, 64 + data)
    struct.pack_into("<HH", header, 0x3A, 64, 0 if many else num_sections)
    first = struct.pack("<32x Q 24x", num_sections if many else 0)
    return bytes(header) + b"d" * data + first + b"s" * 64 * (num_sections - 1)


@pytest.mark.parametrize("sections", [1, 358, 0xFF00, 205_212])
def test_every_beginning_of_a_dump_is_incomplete(tmp_path: Path, sections: int) -> None:
    whole = elf(sections, 300)
    for length in [*range(0, 427, 13), len(whole) - 64, len(whole) - 1]:
        dump(tmp_path).write_bytes(whole[:length])
        assert not is_complete(str(dump(tmp_path))), length
    dump(tmp_path).write_bytes(whole)
    assert is_complete(str(dump(tmp_path)))


def test_what_is_no_dump_is_incomplete(tmp_path: Path) -> None:
    path = dump(tmp_path)
    assert not is_complete(str(path))
    path.write_bytes(bytes(64))  # a header that is still to be written
    assert not is_complete(str(path))
    path.write_bytes(b"?" + elf(5, 100)[1:])
    assert not is_complete(str(path))
    many = elf(0xFF00, 100)
    path.write_bytes(many[:164] + bytes(len(many) - 164))  # headers that are still to be written
    assert not is_complete(str(path))
    path.unlink()
    path.mkdir()
    assert not is_complete(str(path))


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


def wait(folder: Path, driver: Driver, may_come: bool = True, limit_s: float = 60.0) -> list[str]:
    return CoreDumps(str(folder)).wait(lambda: may_come, 1.0, limit_s, driver.clock, driver.sleep)


def test_the_process_waits_until_the_driver_has_written_all(tmp_path: Path) -> None:
    whole = elf(5, 1000)
    dump(tmp_path, os.getpid() + 1).write_bytes(b"another's")
    quiet = [b""] * 8  # the GPU's state is collected first; later a slow disk
    driver = Driver(dump(tmp_path), [*quiet, whole[:700], *quiet, whole[700:-1], *quiet, whole[-1:], b"never"])
    assert wait(tmp_path, driver) == [str(dump(tmp_path))]
    assert dump(tmp_path).read_bytes() == whole


@pytest.mark.parametrize("begun", [b"", elf(5, 1000)[:700]])
def test_it_does_not_wait_for_ever(tmp_path: Path, begun: bytes) -> None:
    driver = Driver(dump(tmp_path), [begun])
    assert wait(tmp_path, driver) == ([str(dump(tmp_path))] if begun else [])
    assert 0.9 < driver.now < 1.3


class FailedDevice:
    """Fails as a kernel's fault does where a library's own words tell of it."""

    def synchronize(self) -> None:
        raise RuntimeError("arena_fill: an illegal memory access was encountered")


def test_what_is_said_of_dumps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dumps = CoreDumps(str(tmp_path))
    dump(tmp_path).write_bytes(elf(5, 100))
    log_core_dumps(dumps, None)
    assert f"cuda-gdb -ex 'target cudacore {dump(tmp_path)}'" in caplog.text
    dump(tmp_path).write_bytes(elf(5, 100)[:-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CoreDumps, "wait", lambda self, may_come: list(self.found()))
        log_core_dumps(dumps, None)
    assert f"{dump(tmp_path)} is incomplete" in caplog.text


@pytest.mark.timeout(PATIENCE_S - 1)
@pytest.mark.parametrize("opened", [True, False])
def test_a_sound_device_keeps_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture, opened: bool) -> None:
    """Out of memory, a checkpoint that lacks a tensor, no device."""
    log_core_dumps(CoreDumps(str(tmp_path)), open_device("cpu") if opened else None)
    assert not caplog.records


class HungDevice:
    def __init__(self) -> None:
        self.end = threading.Event()

    def synchronize(self) -> None:
        self.end.wait()


def test_a_device_in_error_or_silent_may_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hung = HungDevice()
    asked: list[bool] = []

    def wait(self: CoreDumps, may_come: Callable[[], bool]) -> list[str]:
        for thread in threading.enumerate():
            if thread.name == "device-check" and device is not hung:
                thread.join(30.0)
        asked.append(may_come())
        return []

    monkeypatch.setattr(CoreDumps, "wait", wait)
    for device in (FailedDevice(), open_device("cpu"), hung):
        log_core_dumps(CoreDumps(str(tmp_path)), cast(Device, device))
    hung.end.set()
    assert asked == [True, False, True]


@pytest.fixture
def ports() -> Iterator[PortArgs]:
    made = make_ports()
    yield made
    remove_ports(made)


def test_the_end_is_told_whatever_goes_wrong_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ports: PortArgs
) -> None:
    watchdogs: list[Watchdog] = []

    class Kept(Watchdog):
        def __init__(self, timeout_s: float, on_hang: Callable[[str], None]) -> None:
            super().__init__(0.0, on_hang)
            watchdogs.append(self)

    def fail(kind: str, index: int | None) -> Device:
        watchdogs[0].busy()
        raise RuntimeError("no device")

    def fail_again(dumps: CoreDumps | None, device: Device | None) -> None:
        assert watchdogs[0]._busy_since is None, "it would end the process in the middle of the dump"
        raise FileNotFoundError("somebody cleaned up")

    monkeypatch.setattr(scheduler_process, "prepare_child", lambda *args: None)
    monkeypatch.setattr(scheduler_process, "Watchdog", Kept)
    monkeypatch.setattr(scheduler_process, "open_device", fail)
    monkeypatch.setattr(scheduler_process, "log_core_dumps", fail_again)
    inbox = Inbox(ports.tokenizer, TOKENIZER_DECODER)
    try:
        with pytest.raises(FileNotFoundError, match="somebody cleaned up"):
            run_scheduler_process(config(tmp_path, "cpu"), ports)
        assert inbox.wait(10_000)
        assert inbox.receive() == [FatalError(source="scheduler", message="RuntimeError: no device")]
    finally:
        inbox.close()
