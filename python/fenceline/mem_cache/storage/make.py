"""From the configuration to a running storage tier; which pages two servers may share."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fenceline.config.engine_config import EngineConfig
from fenceline.config.hicache import HiCacheStorageConfig, storage_key
from fenceline.mem_cache.host.host_pool import HostPool
from fenceline.mem_cache.page_hash import PageFingerprint, PageKey
from fenceline.mem_cache.storage.controller import StorageController
from fenceline.mem_cache.storage.file_backend import FileBackend
from fenceline.mem_cache.storage.page_file import header_nbytes
from fenceline.memory_order import Device


@dataclass(frozen=True, slots=True)
class Storage:
    """A running storage: its controller, and what the keys of a namespace's pages start from."""

    controller: StorageController
    root_key: Callable[[str], PageKey]


def make_storage(
    device: Device, host_pool: HostPool, config: EngineConfig, clock: Callable[[], float] = time.monotonic
) -> Storage | None:
    """The storage that ``config`` asks for, its threads running; None if it asks for none. The caller closes it.

    ``clock``: seconds, of timeouts; a run that is to be repeated gives one that counts its steps.

    Raises ``ValueError`` with the remedy for a directory that cannot be used or holds not even one page.
    """
    storage = None if config.hicache is None else config.hicache.storage
    if storage is None:
        return None
    fingerprint = page_fingerprint(config, host_pool)
    controller = StorageController(
        device,
        host_pool,
        _backend(storage, config.server_args.hicache_storage_key, fingerprint),
        config.server_args.hicache_storage_prefetch_policy,
        storage.prefetch_timeout_s,
        clock=clock,
    )
    return Storage(controller, fingerprint.root_key)


def _backend(storage: HiCacheStorageConfig, key: str | None, fingerprint: PageFingerprint) -> FileBackend:
    secret = None if key is None else storage_key(key)
    file_nbytes = header_nbytes(secret) + fingerprint.page_nbytes
    if storage.max_bytes < file_nbytes:
        raise ValueError(
            f"--hicache-storage-size of {storage.max_bytes / 1e9:g} GB holds not even one page of {file_nbytes} bytes: "
            f"give at least {file_nbytes / 1e9:.6f}"
        )
    try:
        return FileBackend(storage.directory, fingerprint, storage.max_bytes, secret=secret)
    except ValueError as error:
        raise ValueError(f"--hicache-storage-dir: {error}") from error


def page_fingerprint(config: EngineConfig, host_pool: HostPool) -> PageFingerprint:
    """Of the pages that a server with this configuration makes."""
    return PageFingerprint(
        model_id=model_id(config),
        layout=host_pool.layout.describe(),
        page_nbytes=host_pool.page_nbytes,
    )


def model_id(config: EngineConfig) -> str:
    """The model's directory and a digest of whatever else the KV of its tokens depends on: the model's configuration
    as resolved (a longer context may scale its positions), the label of the weights, and of each weight file its name,
    size and time of the last change (those of what a link points to); the seed where weights are random.

    The files are not read: that would take as long as a start. So a copy of a model elsewhere, or one that was merely
    touched, finds none of the old pages; a file overwritten in place with its size and time kept is not noticed.
    """
    directory = Path(config.model.model_path).resolve()
    weights: object = config.random_seed
    if config.server_args.load_format != "dummy":
        files = sorted(directory.glob("*.safetensors"))
        weights = [(file.name, (status := file.stat()).st_size, status.st_mtime_ns) for file in files]
    model = dataclasses.asdict(config.model)
    del model["model_path"]
    facts = [
        model,
        config.model.dtype,
        config.server_args.load_format,
        config.server_args.weight_version,
        weights,
    ]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return f"{directory} {digest[:32]}"
