"""Code of the storage tests: a page's bytes are a function of its key, so that every hit can be checked."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fenceline.mem_cache.page_hash import PageFingerprint, PageKey
from fenceline.mem_cache.storage.directory import StorageDirectory
from fenceline.mem_cache.storage.file_backend import FileBackend
from fenceline.mem_cache.storage.page_file import HEADER_NBYTES

Page = list[NDArray[np.uint8]]


def fingerprint(page_nbytes: int, model_id: str = "tiny", tp_rank: int = 0) -> PageFingerprint:
    """The fingerprint of a model whose pages have ``page_nbytes`` bytes."""
    return PageFingerprint(model_id, "a layout", page_nbytes, tp_rank=tp_rank, tp_size=2)


def key(number: int) -> PageKey:
    """One key for each number."""
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def content(name: PageKey, page_nbytes: int) -> NDArray[np.uint8]:
    """The bytes that belong to a key."""
    return np.frombuffer(hashlib.shake_128(name).digest(page_nbytes), dtype=np.uint8)


def contents(names: Sequence[PageKey], page_nbytes: int) -> list[Page]:
    """Pages of one part each, with the bytes that belong to their keys."""
    return [[content(name, page_nbytes)] for name in names]


def empty(num_pages: int, page_nbytes: int) -> list[Page]:
    """Pages to read into."""
    return [[np.zeros(page_nbytes, dtype=np.uint8)] for _ in range(num_pages)]


def read_checked(backend: FileBackend, names: Sequence[PageKey]) -> list[bool]:
    """``get``, with a check of the bytes of every hit."""
    pages = empty(len(names), backend.page_nbytes)
    found = backend.get(names, pages)
    for name, hit, page in zip(names, found, pages, strict=True):
        assert not hit or np.array_equal(page[0], content(name, backend.page_nbytes)), f"wrong: {name.hex()}"
    return found


def page_files(root: Path) -> list[Path]:
    """All pages in a storage directory."""
    return sorted(root.glob("*/*/*.page"))


def temp_files(root: Path) -> list[Path]:
    """All unfinished files in a storage directory."""
    return sorted((root / "tmp").iterdir())


def path_of(root: Path, backend_fingerprint: PageFingerprint, name: PageKey) -> Path:
    """The path of a key's page."""
    return root / backend_fingerprint.directory_name() / name.hex()[:2] / f"{name.hex()}.page"


def usage_of(root: Path) -> tuple[int, int]:
    """Bytes in files, and bytes counted in ``usage``. Removes files of dead writers."""
    directory = StorageDirectory(root, lock_timeout_s=30.0)
    with directory.locked() as usage:
        used = usage.used
        actual, _ = directory.scan()
    assert used is not None, "the number of bytes in use is lost"
    return actual, used


def check_usage(root: Path, max_bytes: int) -> int:
    """Check that the files do not exceed the bytes counted, and these not the bound. Returns the bytes in files."""
    actual, used = usage_of(root)
    assert actual <= used, f"{actual} bytes in files, {used} counted"
    assert used <= max_bytes, f"{used} bytes counted, {max_bytes} allowed"
    return actual


def flip(path: Path, position: int, mask: int) -> None:
    """Change the bits of ``mask`` in one byte of a file, keeping its times."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[position] ^= mask
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def file_nbytes(page_nbytes: int) -> int:
    """Bytes of a page's file."""
    return HEADER_NBYTES + page_nbytes
