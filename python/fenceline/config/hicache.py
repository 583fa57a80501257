"""HiCache's configuration: which flags can be combined, and the settings that follow from them."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fenceline.config import ConfigError, require, user_path
from fenceline.config.flags import flags_of
from fenceline.config.private_files import make_private_folder, why_unusable
from fenceline.config.server_args import ServerArgs

IoBackend = Literal["kernel", "direct"]

GB = 10**9
_DEFAULT_STORAGE_BYTES = 64 * GB
_DEFAULT_PREFETCH_TIMEOUT_S = 1.0
_MOST_RATIO = 1e6
_MIN_SECRET_BYTES, _MAX_SECRET_BYTES = 16, 4096
# Attention backends that may run a persistent kernel in prefill or decode; ``auto`` may choose any of them.
_MAYBE_PERSISTENT_PREFILL = frozenset(("auto", "flashinfer", "fa3"))
_MAYBE_PERSISTENT_DECODE = frozenset(("auto", "fa3"))
# With at least this many tokens in a page the copy engine is as fast as a copy kernel on the SMs. It does not slow down
# other kernels, while a copy kernel makes a large product take 1.5 times (loads) to several times (backups) as long.
DIRECT_PAGE_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HiCacheStorageConfig:
    """The settings of the storage tier. ``directory`` is absolute, exists and was writable at start.
    ``prefetch_timeout_s`` is None unless --hicache-storage-prefetch-policy is ``timeout``. If a prompt has fewer than
    ``prefetch_threshold`` tokens beyond those on the host, storage is not searched (SGLang's number; the proof, whose
    prompts are short, uses another). The storage key is not part of the configuration, because configurations are
    logged and served: see :func:`storage_key`."""

    directory: str
    max_bytes: int
    prefetch_timeout_s: float | None
    prefetch_threshold: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class HiCacheConfig:
    """The settings of HiCache: the host tier of the prefix cache, and the storage tier below it. ``host_bytes`` is the
    host tier's size; None: --hicache-ratio times the device's KV cache. If fewer than ``load_back_threshold`` tokens of
    a prefix are on the host, they are computed and not loaded, because this takes less time (SGLang's number; the proof
    uses another). ``storage`` None: no third tier."""

    host_bytes: int | None
    io_backend: IoBackend
    storage: HiCacheStorageConfig | None
    load_back_threshold: int = 10


def check_hicache(args: ServerArgs) -> None:
    """Raise ConfigError for the first value or combination of HiCache's flags that cannot work."""
    # This check comes first, so that no other error message repeats a key that was given by mistake.
    _check_key_source(args.hicache_storage_key)
    _check_switches(args)
    _check_sizes(args)
    require(args.hicache_storage_dir != "", "--hicache-storage-dir is empty: name a directory or leave the flag out")
    timeout = args.hicache_storage_prefetch_timeout
    require(
        timeout is None or args.hicache_storage_prefetch_policy == "timeout",
        "--hicache-storage-prefetch-timeout is for --hicache-storage-prefetch-policy timeout: add it or leave the"
        " timeout out",
    )
    require(
        timeout is None or timeout > 0,
        f"--hicache-storage-prefetch-timeout {timeout}: give a number of seconds > 0, or use"
        " --hicache-storage-prefetch-policy best_effort",
    )


def _check_key_source(source: str | None) -> None:
    require(
        source is None or re.fullmatch(r"(file|env):.+", source, re.DOTALL) is not None,
        "--hicache-storage-key: give file:PATH or env:NAME, where the key is read from; a key on the command line would"
        " show in the list of processes",
    )


def storage_key(source: str) -> bytes:
    """The storage key, 32 bytes, derived from the secret at ``source``, which is ``file:PATH`` or ``env:NAME``. Raises
    ConfigError, one line, if there is no secret, if it is too short, or if other users can read the file."""
    kind, _, name = source.partition(":")
    secret = (_secret_in_file(name) if kind == "file" else os.environb.get(os.fsencode(name), b"")).strip()
    require(
        len(secret) >= _MIN_SECRET_BYTES,
        f"--hicache-storage-key {source}: {len(secret)} bytes there; a key has at least {_MIN_SECRET_BYTES}, for"
        " example from: openssl rand -hex 32",
    )
    return hashlib.sha256(b"fenceline storage key\0" + secret).digest()


def _secret_in_file(name: str) -> bytes:
    path = user_path(name)
    try:
        # Links are followed, because the operator names the file, and mounted secrets are links.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            what = "is no regular file; name one"
            require(stat.S_ISREG(status.st_mode), f"--hicache-storage-key file:{name}: {what}")
            what = f"every user can read it; run chmod 600 {shlex.quote(str(path))}"
            require(not status.st_mode & 0o006, f"--hicache-storage-key file:{name}: {what}")
            return os.read(fd, _MAX_SECRET_BYTES)
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(
            f"--hicache-storage-key file:{name}: cannot be read ({error.strerror}); name a file with the key"
        ) from error
    except ValueError as error:  # a name with a null byte; a ConfigError is one too
        raise (
            error
            if isinstance(error, ConfigError)
            else ConfigError(f"--hicache-storage-key: cannot be read ({error}); name a file with the key")
        ) from error


def _check_switches(args: ServerArgs) -> None:
    require(
        not (args.enable_hierarchical_cache and args.disable_radix_cache),
        "--enable-hierarchical-cache keeps more prefixes and --disable-radix-cache keeps none: drop one of them",
    )
    for flag in flags_of(type(args)).values():
        value = getattr(args, flag.name)
        if value == flag.default:
            continue
        of_hicache = flag.name.startswith("hicache_") or flag.name == "retract_policy"
        require(
            args.enable_hierarchical_cache or not of_hicache,
            f"{flag.option} {value}: needs --enable-hierarchical-cache; add it or leave this out",
        )
        require(
            args.hicache_storage_backend != "none" or not flag.name.startswith("hicache_storage_"),
            f"{flag.option} {value}: needs --hicache-storage-backend file; add it or leave this out",
        )


def _check_sizes(args: ServerArgs) -> None:
    ratio, size, storage = args.hicache_ratio, args.hicache_size, args.hicache_storage_size
    require(
        0 < ratio <= _MOST_RATIO,
        f"--hicache-ratio {ratio:g}: must be above 0 and at most {_MOST_RATIO:g}; 2.0 is usual, and --hicache-size"
        " gives the size in GB",
    )
    require(size >= 0, f"--hicache-size {size:g}: give a number of GB, or 0 to go by --hicache-ratio")
    require(
        storage is None or storage > 0,
        f"--hicache-storage-size {storage}: must be above 0; leave --hicache-storage-backend out for no storage",
    )


def hicache_config(
    args: ServerArgs, device: str, attention: tuple[str, str], has_kernels: Callable[[], bool] | None = None
) -> HiCacheConfig | None:
    """The configuration of HiCache; None without --enable-hierarchical-cache. Makes the directory of the storage.
    ``attention``: the attention backends of prefill and decode that were chosen. ``has_kernels`` says whether the
    kernel package is installed. Raises ConfigError for sizes that this machine does not have and for a directory that
    cannot be used."""
    if not args.enable_hierarchical_cache:
        return None
    return HiCacheConfig(
        host_bytes=_host_bytes(args.hicache_size),
        io_backend=_io_backend(args, device, attention, has_kernels or has_kernel_package),
        storage=_storage(args),
    )


def has_kernel_package() -> bool:
    return importlib.util.find_spec("fenceline_kernel") is not None


def machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _host_bytes(size_gb: float) -> int | None:
    if size_gb == 0:
        return None
    machine = machine_bytes()
    require(
        size_gb * GB <= machine,
        f"--hicache-size {size_gb:g}: this machine has {machine / GB:.1f} GB of memory in all; give less",
    )
    return int(size_gb * GB)


def _io_backend(
    args: ServerArgs, device: str, attention: tuple[str, str], has_kernels: Callable[[], bool]
) -> IoBackend:
    wanted = args.hicache_io_backend
    # On devices without SMs (cpu, the virtual GPU) the backend only decides which edges apply, so any is allowed.
    if device != "cuda":
        return "kernel" if wanted == "kernel" else "direct"
    if wanted == "kernel":
        require(
            has_kernels(),
            "--hicache-io-backend kernel: the package fenceline_kernel is not installed; install sgl-kernel/ or use"
            " --hicache-io-backend direct",
        )
        return "kernel"
    prefill, decode = attention
    persistent = prefill in _MAYBE_PERSISTENT_PREFILL or decode in _MAYBE_PERSISTENT_DECODE
    if wanted == "direct" or persistent or not has_kernels():
        return "direct"
    return "direct" if args.page_size >= DIRECT_PAGE_SIZE else "kernel"


def _storage(args: ServerArgs) -> HiCacheStorageConfig | None:
    if args.hicache_storage_backend == "none":
        return None
    if args.hicache_storage_key is not None:
        storage_key(args.hicache_storage_key)  # only a check; it is read again where it is used
    directory = _storage_directory(args.hicache_storage_dir)
    timeout_s = None
    if args.hicache_storage_prefetch_policy == "timeout":
        timeout_s = args.hicache_storage_prefetch_timeout or _DEFAULT_PREFETCH_TIMEOUT_S
    max_bytes = _storage_bytes(args.hicache_storage_size, directory)
    return HiCacheStorageConfig(directory=str(directory), max_bytes=max_bytes, prefetch_timeout_s=timeout_s)


def _storage_directory(wanted: str | None) -> Path:
    # The default directory has the user's id in its name, because pages are readable only by their owner. If another
    # user has made it already, the start is refused.
    default = Path(tempfile.gettempdir()) / f"fenceline-hicache-{os.getuid()}"
    path = default if wanted is None else user_path(wanted).absolute()
    name = f"--hicache-storage-dir {path if wanted is None else wanted}"
    try:
        os.close(make_private_folder(str(path)))
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(f"{name}: {why_unusable(str(path), error)}") from error
    except ValueError as error:  # a name with a null byte
        raise ConfigError(f"{name}: cannot be written ({error}); name another directory") from error
    return path


def _storage_bytes(size_gb: float | None, directory: Path) -> int:
    disk = shutil.disk_usage(directory).total
    if size_gb is None:
        return min(_DEFAULT_STORAGE_BYTES, disk // 2)
    require(
        size_gb * GB <= disk,
        f"--hicache-storage-size {size_gb:g}: the file system of {directory} has {disk / GB:.1f} GB in all; give less,"
        " or name another --hicache-storage-dir",
    )
    return int(size_gb * GB)
