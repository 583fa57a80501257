"""The speed of the file storage backend: GB/s of set and get, microseconds per page and per call. No GPU, no model.

    python benchmark/bench_storage.py [--dir /data/tmp] [--page-kib 64,1024,8192] [--parts 1,64] [--total-mib 1024]

A Llama-3.1-8B page of 64 tokens has 8192 KiB. Pages are read immediately after they were written, so they come from the
system's page cache. The figures are those of the code, not of the disk (with ``--fsync``, ``set`` includes the disk).
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np

from fenceline.mem_cache.page_hash import PageFingerprint, page_keys
from fenceline.mem_cache.storage.file_backend import FileBackend

ROUNDS = 3
BATCH = 32


def best_of(rounds: list[float]) -> float:
    """The shortest time, which other load has disturbed least."""
    return min(rounds)


def measure_pages(root: Path, page_nbytes: int, num_parts: int, total_bytes: int, fsync: bool) -> str:
    """One row: set, get, exists of ``total_bytes`` in batches of ``BATCH`` pages."""
    fingerprint = PageFingerprint("bench", f"{num_parts} parts", page_nbytes)
    num_pages = max(BATCH, total_bytes // page_nbytes // BATCH * BATCH)
    backend = FileBackend(root, fingerprint, 2 * num_pages * page_nbytes + (1 << 20), fsync=fsync)
    host = np.random.default_rng(0).integers(0, 256, (BATCH, page_nbytes), dtype=np.uint8)
    pages = [np.array_split(row, num_parts) for row in host]
    keys = page_keys(fingerprint.root_key(), np.arange(64 * num_pages), 64)
    batches = [keys[i : i + BATCH] for i in range(0, num_pages, BATCH)]
    sets, gets, finds = [], [], []
    for _ in range(ROUNDS):
        backend.clear()
        started = time.perf_counter()
        assert all(all(backend.set(batch, pages)) for batch in batches)
        sets.append(time.perf_counter() - started)
        started = time.perf_counter()
        assert all(all(backend.exists(batch)) for batch in batches)
        finds.append(time.perf_counter() - started)
        started = time.perf_counter()
        assert all(all(backend.get(batch, pages)) for batch in batches)
        gets.append(time.perf_counter() - started)
    backend.clear()
    cells = [f"{page_nbytes >> 10:8d}", f"{num_parts:6d}", f"{num_pages:6d}"]
    for rounds in (sets, gets):
        seconds = best_of(rounds)
        cells += [f"{num_pages * page_nbytes / seconds / 1e9:8.2f}", f"{seconds / num_pages * 1e6:9.1f}"]
    cells.append(f"{best_of(finds) / num_pages * 1e6:9.2f}")
    return " ".join(cells)


def measure_sums(nbytes: int = 8 << 20) -> str:
    """GB/s of the standard library's checksums."""
    data = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    found = []
    for name, function in (
        ("crc32", zlib.crc32),
        ("adler32", zlib.adler32),
        ("sha1", lambda d: hashlib.sha1(d).digest()),
        ("sha256", lambda d: hashlib.sha256(d).digest()),
        ("blake2b", lambda d: hashlib.blake2b(d).digest()),
    ):
        rounds = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            function(data)
            rounds.append(time.perf_counter() - started)
        found.append(f"{name} {nbytes / best_of(rounds) / 1e9:.2f}")
    return ", ".join(found)


def measure_keys(num_pages: int = 4096) -> str:
    """Microseconds per key, for pages of one and of 64 tokens."""
    root = PageFingerprint("bench", "", 1).root_key()
    found = []
    for page_size in (1, 64):
        tokens = np.arange(num_pages * page_size, dtype=np.int32)
        started = time.perf_counter()
        page_keys(root, tokens, page_size)
        found.append(f"{(time.perf_counter() - started) / num_pages * 1e6:.2f} us (page of {page_size} tokens)")
    return ", ".join(found)


def measure_clean(root: Path, num_files: int) -> str:
    """Microseconds per file of a scan, for which a writer waits when the directory is full."""
    fingerprint = PageFingerprint("bench", "clean", 16)
    keys = page_keys(fingerprint.root_key(), np.arange(64 * num_files), 64)
    page = [np.zeros(16, np.uint8)]
    backend = FileBackend(root, fingerprint, 1 << 30)
    for key in keys:
        backend.set([key], [page])
    started = time.perf_counter()
    again = FileBackend(root, fingerprint, 1 << 30)  # scans all files
    seconds = time.perf_counter() - started
    again.clear()
    return f"{seconds / num_files * 1e6:.2f} us a file, {num_files} files"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=None, help="where the storage directory is made; the system's temporary")
    parser.add_argument("--page-kib", default="64,1024,8192")
    parser.add_argument("--parts", default="1,64")
    parser.add_argument("--total-mib", type=int, default=1024)
    parser.add_argument("--fsync", action="store_true")
    args = parser.parse_args()
    print(f"checksums, GB/s: {measure_sums()}")
    print(f"keys: {measure_keys()}")
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        print(f"scan: {measure_clean(Path(folder), 20_000)}")
        print("page KiB  parts  pages set GB/s   us/page get GB/s   us/page exists us")
        for page_kib in args.page_kib.split(","):
            for parts in args.parts.split(","):
                total = args.total_mib << 20
                print(measure_pages(Path(folder), int(page_kib) << 10, int(parts), total, args.fsync))


if __name__ == "__main__":
    main()
