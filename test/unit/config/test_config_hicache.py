"""HiCache's flags: what they resolve to, which go together, and what is refused with the remedy."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from model_files import make_model_dir

from fenceline.config import ConfigError, private_files
from fenceline.config.engine_config import EngineConfig, resolve
from fenceline.config.hicache import GB, HiCacheConfig, HiCacheStorageConfig, hicache_config, storage_key
from fenceline.config.server_args import ServerArgs, parse_args

# The launch command of the public reproduction of sglang#20611, module renamed.
REPRODUCTION = (
    "--model-path any-model --enable-hierarchical-cache --mem-fraction-static 0.40 --hicache-io-backend kernel"
    " --attention-backend fa3 --port 8000"
)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_model_dir(tmp_path)


def resolved(model_dir: Path, flags: str, gpu: bool = False) -> EngineConfig:
    args = parse_args(["--model-path", str(model_dir), *shlex.split(flags)])
    return resolve(args, cuda_probe=lambda: gpu)


def refusal(model_dir: Path, flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(model_dir, flags)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_without_the_switch_there_is_none(model_dir: Path) -> None:
    config = resolved(model_dir, "--retract-policy recompute --hicache-storage-backend none")
    assert config.hicache is None
    assert config.public_dict()["hicache"] is None


def test_defaults(model_dir: Path) -> None:
    assert resolved(model_dir, "--enable-hierarchical-cache").hicache == HiCacheConfig(
        host_bytes=None, io_backend="direct", storage=None, load_back_threshold=10
    )


def test_given_values_are_kept_and_travel_between_processes(model_dir: Path, tmp_path: Path) -> None:
    where = tmp_path / "new" / "pages"
    config = resolved(
        model_dir,
        "--enable-hierarchical-cache --hicache-ratio 0.5 --hicache-size 0.25 --hicache-write-policy write_back"
        " --hicache-io-backend kernel --hicache-mem-layout page_first --retract-policy offload"
        f" --hicache-storage-backend file --hicache-storage-dir {where} --hicache-storage-size 0.5"
        " --hicache-storage-prefetch-policy timeout --hicache-storage-prefetch-timeout 2.5",
    )
    assert config.hicache == HiCacheConfig(
        host_bytes=GB // 4,
        io_backend="kernel",
        storage=HiCacheStorageConfig(
            directory=str(where), max_bytes=GB // 2, prefetch_timeout_s=2.5, prefetch_threshold=256
        ),
    )
    args = config.server_args
    assert (args.hicache_ratio, args.hicache_write_policy) == (0.5, "write_back")
    assert (args.hicache_mem_layout, args.retract_policy) == ("page_first", "offload")
    assert args.hicache_storage_prefetch_policy == "timeout"
    assert where.stat().st_mode & 0o777 == 0o700
    assert list(where.iterdir()) == []
    assert pickle.loads(pickle.dumps(config)) == config
    shown = json.loads(json.dumps(config.public_dict()))["hicache"]
    assert shown["storage"]["directory"] == str(where)
    assert dataclasses.asdict(config.hicache) == shown


def test_storage_defaults(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    flags = "--enable-hierarchical-cache --hicache-storage-backend file"
    config = resolved(model_dir, flags)
    assert config.hicache is not None
    storage = config.hicache.storage
    assert storage is not None
    assert storage.directory == str(tmp_path / f"fenceline-hicache-{os.getuid()}")
    assert storage.max_bytes == min(64 * GB, shutil.disk_usage(tmp_path).total // 2)
    assert (config.server_args.hicache_storage_prefetch_policy, storage.prefetch_timeout_s) == ("best_effort", None)
    waiting = resolved(model_dir, flags + " --hicache-storage-prefetch-policy timeout").hicache
    assert waiting is not None
    assert waiting.storage is not None
    assert waiting.storage.prefetch_timeout_s == 1.0


@pytest.mark.parametrize(
    ("prefill", "decode", "has_kernels", "wanted", "chosen"),
    [
        ("triton", "triton", True, None, "kernel"),  # pages of one token
        ("torch", "flashinfer", True, None, "kernel"),
        ("triton", "triton", False, None, "direct"),
        ("flashinfer", "flashinfer", True, None, "direct"),
        ("fa3", "triton", True, None, "direct"),
        ("triton", "fa3", True, None, "direct"),
        ("auto", "triton", True, None, "direct"),
        ("triton", "auto", True, None, "direct"),
        ("fa3", "fa3", True, "kernel", "kernel"),
        ("triton", "triton", True, "direct", "direct"),
    ],
)
def test_io_backend_on_a_gpu(prefill: str, decode: str, has_kernels: bool, wanted: str | None, chosen: str) -> None:
    args = ServerArgs(enable_hierarchical_cache=True, hicache_io_backend=wanted)
    config = hicache_config(args, "cuda", (prefill, decode), lambda: has_kernels)
    assert config is not None
    assert config.io_backend == chosen


def test_large_pages_go_by_the_copy_engine() -> None:
    """It keeps up with the SMs there and takes nothing from whoever computes beside it."""
    for page_size, chosen in ((1, "kernel"), (16, "direct"), (64, "direct")):
        args = ServerArgs(enable_hierarchical_cache=True, page_size=page_size)
        config = hicache_config(args, "cuda", ("triton", "triton"), lambda: True)
        assert config is not None
        assert config.io_backend == chosen


def test_copy_kernels_that_are_not_installed_are_refused() -> None:
    args = ServerArgs(enable_hierarchical_cache=True, hicache_io_backend="kernel")
    with pytest.raises(ConfigError, match="fenceline_kernel is not installed; install sgl-kernel/ or use"):
        hicache_config(args, "cuda", ("triton", "triton"), lambda: False)
    off_gpu = hicache_config(args, "cpu", ("torch", "torch"), lambda: False)
    assert off_gpu is not None
    assert off_gpu.io_backend == "kernel"


def test_the_public_reproduction_is_taken_as_it_is(model_dir: Path) -> None:
    command = REPRODUCTION.replace("any-model", str(model_dir))
    config = resolve(parse_args(shlex.split(command)), cuda_probe=lambda: True)
    assert config.hicache is not None
    assert config.hicache.io_backend == "kernel"
    assert config.prefill_attention_backend == config.decode_attention_backend == "fa3"


ON = "--enable-hierarchical-cache"
FILE = ON + " --hicache-storage-backend file"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (ON + " --disable-radix-cache", "--disable-radix-cache keeps none: drop one of them"),
        ("--hicache-ratio 3", "--hicache-ratio 3.0: needs --enable-hierarchical-cache; add it or leave"),
        ("--hicache-size 1", "--hicache-size 1.0: needs --enable-hierarchical-cache"),
        ("--hicache-write-policy write_back", "--hicache-write-policy write_back: needs --enable-hierarchical"),
        ("--hicache-io-backend direct", "--hicache-io-backend direct: needs --enable-hierarchical-cache"),
        ("--hicache-mem-layout page_first", "--hicache-mem-layout page_first: needs --enable-hierarchical-cache"),
        ("--retract-policy offload", "--retract-policy offload: needs --enable-hierarchical-cache; add it or"),
        ("--hicache-storage-backend file", "--hicache-storage-backend file: needs --enable-hierarchical-cache"),
        ("--hicache-storage-dir /tmp", "--hicache-storage-dir /tmp: needs --enable-hierarchical-cache"),
        (ON + " --hicache-ratio 0", "--hicache-ratio 0: must be above 0"),
        (ON + " --hicache-ratio -1", "--hicache-ratio -1: must be above 0"),
        (ON + " --hicache-ratio nan", "--hicache-ratio nan: expected a number"),
        (ON + " --hicache-size -1", "--hicache-size -1: give a number of GB, or 0 to go by --hicache-ratio"),
        (ON + " --hicache-size 10000000", "GB of memory in all; give less"),
        (ON + " --hicache-write-policy write_around", "choose one of write_through, write_through_selective"),
        (ON + " --hicache-io-backend kernel_ascend", "not available, use --hicache-io-backend kernel or"),
        (ON + " --hicache-mem-layout page_head", "not available, use --hicache-mem-layout page_first"),
        (ON + " --hicache-storage-backend mooncake", "not available, use --hicache-storage-backend file"),
        (ON + " --hicache-storage-backend-extra-config {}", "not available, use --hicache-storage-dir"),
        (ON + " --hicache-storage-dir /tmp", "--hicache-storage-dir /tmp: needs --hicache-storage-backend"),
        (ON + " --hicache-storage-size 1", "--hicache-storage-size 1.0: needs --hicache-storage-backend file"),
        (ON + " --hicache-storage-prefetch-policy timeout", "timeout: needs --hicache-storage-backend file; add"),
        (ON + " --hicache-storage-prefetch-timeout 1", "timeout 1.0: needs --hicache-storage-backend file"),
        (FILE + " --hicache-storage-prefetch-policy never", "choose one of best_effort, wait_complete, timeo"),
        (FILE + " --hicache-storage-prefetch-timeout 1", "is for --hicache-storage-prefetch-policy timeout: add"),
        (
            FILE + " --hicache-storage-prefetch-policy timeout --hicache-storage-prefetch-timeout 0",
            "--hicache-storage-prefetch-timeout 0.0: give a number of seconds > 0",
        ),
        (FILE + " --hicache-storage-size 0", "--hicache-storage-size 0.0: must be above 0; leave"),
        (FILE + " --hicache-storage-size -2", "--hicache-storage-size -2.0: must be above 0; leave"),
        (FILE + " --hicache-storage-dir=", "--hicache-storage-dir is empty: name a directory or leave"),
    ],
)
def test_impossible_values_and_pairs_are_refused_with_the_remedy(model_dir: Path, flags: str, message: str) -> None:
    assert message in refusal(model_dir, flags)


def test_a_storage_larger_than_its_disk_is_refused(model_dir: Path, tmp_path: Path) -> None:
    message = refusal(model_dir, FILE + f" --hicache-storage-dir {tmp_path} --hicache-storage-size 1000000000")
    assert message.startswith(f"--hicache-storage-size 1e+09: the file system of {tmp_path} has ")
    assert message.endswith("GB in all; give less, or name another --hicache-storage-dir")


def test_a_storage_directory_that_cannot_be_used_is_refused(model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    message = refusal(model_dir, FILE + f" --hicache-storage-dir {file}")
    assert message == f"--hicache-storage-dir {file}: is a file; name a directory"
    message = refusal(model_dir, FILE + f" --hicache-storage-dir {file}/below")
    assert message == f"--hicache-storage-dir {file}/below: cannot be written (Not a directory); name another directory"
    with pytest.raises(ConfigError, match="cannot be written .*null (byte|character)"):
        resolve(ServerArgs(model_path=str(model_dir), enable_hierarchical_cache=True,
                           hicache_storage_backend="file", hicache_storage_dir="a\0b"))  # fmt: skip


def test_a_storage_directory_that_is_not_writable_is_refused(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A directory without write permission stops nobody who is root, as tests in containers are.
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    message = refusal(model_dir, FILE + f" --hicache-storage-dir {tmp_path}")
    assert message == f"--hicache-storage-dir {tmp_path}: cannot be written (Permission denied); name another directory"


def test_a_storage_directory_of_others_is_refused(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of all the default one: anybody may have made it, as its name in the temporary folder is known."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    default = tmp_path / f"fenceline-hicache-{os.getuid()}"
    where = tmp_path / "somewhere"
    where.mkdir()
    default.symlink_to(where)
    assert refusal(model_dir, FILE) == (
        f"--hicache-storage-dir {default}: is a symbolic link; name the directory itself, {where}"
    )
    default.unlink()
    default.mkdir()
    default.chmod(0o777)
    assert refusal(model_dir, FILE) == (
        f"--hicache-storage-dir {default}: may be written to by other users (mode 777); run chmod go-w {default}, or "
        "name another directory"
    )
    monkeypatch.setattr(private_files.os, "geteuid", lambda: os.getuid() + 1)
    assert refusal(model_dir, FILE) == (
        f"--hicache-storage-dir {default}: belongs to user {os.getuid()}; name a directory of the user who runs the "
        "server"
    )
    assert list(default.iterdir()) == []


def test_the_storage_key_is_read_from_where_the_flag_says(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "0123456789abcdef" * 2
    file = tmp_path / "key"
    file.write_text(secret + "\n")
    file.chmod(0o600)
    monkeypatch.setenv("PAGES_KEY", secret)
    keys = set()
    for source in (f"file:{file}", "env:PAGES_KEY"):
        config = resolved(model_dir, FILE + f" --hicache-storage-dir {tmp_path}/s --hicache-storage-key {source}")
        assert config.hicache is not None and config.hicache.storage is not None
        assert config.server_args.hicache_storage_key == source
        assert secret not in json.dumps(config.public_dict(), default=str) + repr(config)
        keys.add(storage_key(source))
    assert len(keys) == 1 and len(keys.pop()) == 32
    monkeypatch.setenv("PAGES_KEY", secret.upper())
    assert storage_key("env:PAGES_KEY") != storage_key(f"file:{file}")


@pytest.mark.parametrize("flags", [FILE, "--device cpu"])
def test_a_storage_key_on_the_command_line_is_not_repeated(model_dir: Path, flags: str) -> None:
    for given in ("hunter2-hunter2-hunter2", "env:", "pass:hunter2"):
        message = refusal(model_dir, f"{flags} --hicache-storage-key {given}")
        assert message.startswith("--hicache-storage-key: give file:PATH or env:NAME")
        assert "hunter2" not in message


def test_a_storage_key_that_is_none_is_refused(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    flags = FILE + f" --hicache-storage-dir {tmp_path}/s --hicache-storage-key"
    assert "cannot be read (No such file" in refusal(model_dir, f"{flags} file:{file}")
    file.write_text("short\n")
    file.chmod(0o600)
    assert "5 bytes there; a key has at least 16" in refusal(model_dir, f"{flags} file:{file}")
    file.write_text("long enough for a key")
    file.chmod(0o644)
    assert refusal(model_dir, f"{flags} file:{file}") == (
        f"--hicache-storage-key file:{file}: every user can read it; run chmod 600 {file}"
    )
    file.unlink()
    os.mkfifo(file)
    assert "is no regular file" in refusal(model_dir, f"{flags} file:{file}")
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    assert "0 bytes there" in refusal(model_dir, f"{flags} env:NO_SUCH_KEY")
    assert not (tmp_path / "s").exists(), "nothing is made for a command that is refused"


def test_a_directory_is_made_only_for_a_right_command(model_dir: Path, tmp_path: Path) -> None:
    where = tmp_path / "pages"
    refusal(model_dir, FILE + f" --hicache-storage-dir {where} --hicache-ratio 0")
    assert not where.exists()
