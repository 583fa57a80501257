"""The format of a page file: whatever happens to a file, it is the right page or a miss."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_cases import (
    content,
    contents,
    empty,
    file_nbytes,
    fingerprint,
    flip,
    key,
    page_files,
    path_of,
    read_checked,
)

from fenceline.mem_cache.storage import page_file
from fenceline.mem_cache.storage.backend import Reason
from fenceline.mem_cache.storage.file_backend import FileBackend

SMALL = 96
ROOMY = 1 << 24


def small_backend(root: Path) -> FileBackend:
    return FileBackend(root, fingerprint(SMALL), ROOMY)


def store_one(backend: FileBackend, root: Path) -> Path:
    """Page 0 in a backend that does not have it."""
    assert backend.set([key(0)], contents([key(0)], backend.page_nbytes)) == [True]
    return path_of(root, fingerprint(backend.page_nbytes), key(0))


def assert_miss_and_gone(backend: FileBackend, path: Path, reason: Reason) -> None:
    before = backend.stats()
    assert read_checked(backend, [key(0)]) == [False]
    after = backend.stats()
    assert not path.exists(), "a damaged file stays"
    assert after.errors.get(reason, 0) == before.errors.get(reason, 0) + 1, (reason, after.errors)
    assert (after.hits, after.misses) == (before.hits, before.misses + 1)


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    backend = small_backend(tmp_path)
    random = np.random.default_rng(0)
    for position in range(file_nbytes(SMALL)):
        for mask in {1 << int(random.integers(8)), 0xFF, int(random.integers(1, 256))}:
            path = store_one(backend, tmp_path)
            flip(path, position, mask)
            reason = Reason.HEADER if position < page_file.HEADER_NBYTES else Reason.CHECKSUM
            assert_miss_and_gone(backend, path, reason)


def test_every_truncation_is_found(tmp_path: Path) -> None:
    backend = small_backend(tmp_path)
    for length in range(file_nbytes(SMALL)):
        path = store_one(backend, tmp_path)
        os.truncate(path, length)
        assert_miss_and_gone(backend, path, Reason.LENGTH)


def test_blocks_that_never_reached_the_disk_are_found(tmp_path: Path) -> None:
    """After a power failure a file can have its length and zeros in place of its bytes."""
    backend = FileBackend(tmp_path, fingerprint(16384), ROOMY)
    for start, end in ((0, 4096), (0, file_nbytes(16384)), (4096, 8192), (12288, file_nbytes(16384))):
        path = store_one(backend, tmp_path)
        data = bytearray(path.read_bytes())
        data[start:end] = bytes(end - start)
        path.write_bytes(data)
        assert read_checked(backend, [key(0)]) == [False]
        assert not path.exists()


def test_surplus_bytes_are_found(tmp_path: Path) -> None:
    backend = small_backend(tmp_path)
    path = store_one(backend, tmp_path)
    path.write_bytes(path.read_bytes() + b"\0")
    assert_miss_and_gone(backend, path, Reason.LENGTH)


@settings(max_examples=40)
@given(data=st.data())
def test_random_damage_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    root = tmp_path_factory.mktemp("damage")
    size = data.draw(st.integers(1, 20_000))
    backend = FileBackend(root, fingerprint(size), ROOMY)
    path = store_one(backend, root)
    sound = path.read_bytes()
    damaged = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(sound) - 1))
        patch = data.draw(st.binary(min_size=1, max_size=64))
        damaged[start : start + len(patch)] = patch
    path.write_bytes(damaged)
    assert read_checked(backend, [key(0)]) == [bytes(damaged) == sound]


def test_a_page_under_a_wrong_name_is_found(tmp_path: Path) -> None:
    backend = small_backend(tmp_path)
    backend.set([key(1)], contents([key(1)], SMALL))
    wrong = path_of(tmp_path, fingerprint(SMALL), key(0))
    wrong.parent.mkdir(exist_ok=True)
    path_of(tmp_path, fingerprint(SMALL), key(1)).rename(wrong)
    assert_miss_and_gone(backend, wrong, Reason.KEY)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [(0, b"another!", Reason.HEADER), (1, 2, Reason.HEADER), (2, 72, Reason.HEADER), (4, 95, Reason.LENGTH)],
)
def test_a_sound_header_of_another_format_is_found(
    tmp_path: Path, field: int, value: bytes | int, reason: Reason
) -> None:
    """Its checksum is right: something that we, or somebody else, may write one day."""
    backend = small_backend(tmp_path)
    path = store_one(backend, tmp_path)
    data = path.read_bytes()
    fields = list(page_file._FIELDS.unpack(data[:60]))
    fields[field] = value
    header = page_file._FIELDS.pack(*fields)
    path.write_bytes(header + zlib.crc32(header).to_bytes(4, "little") + data[64:])
    assert_miss_and_gone(backend, path, reason)


def test_a_page_that_changes_while_it_is_written_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = small_backend(tmp_path)
    page = [content(key(0), SMALL).copy()]
    writev = os.writev

    def racing(fd: int, parts: list[memoryview]) -> int:
        page[0][7] ^= 1
        return writev(fd, parts)

    monkeypatch.setattr(os, "writev", racing)
    assert backend.set([key(0)], [page]) == [True]
    assert_miss_and_gone(backend, path_of(tmp_path, fingerprint(SMALL), key(0)), Reason.CHECKSUM)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 700), min_size=1, max_size=12), st.integers(1, 400), st.data())
def test_parts_and_short_calls(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], most: int, data: st.DataObject
) -> None:
    """Any cut of a page, written and read by calls that move fewer bytes than asked for."""
    root, total = tmp_path_factory.mktemp("parts"), sum(sizes)
    backend = FileBackend(root, fingerprint(total), ROOMY)
    whole = content(key(0), total)
    written = np.split(whole, np.cumsum(sizes)[:-1])
    cut = data.draw(st.integers(1, total))
    read = [np.zeros(cut, np.uint8), memoryview(bytearray(total - cut))]
    with pytest.MonkeyPatch.context() as patch:
        writev, preadv = os.writev, os.preadv
        patch.setattr(os, "writev", lambda fd, parts: writev(fd, [parts[0][:most]]))
        patch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][:most]], at))
        assert backend.set([key(0)], [written]) == [True]
        assert backend.get([key(0)], [[part for part in read if len(part)]]) == [True]
    assert b"".join(bytes(part) for part in read) == whole.tobytes()


def test_more_parts_than_one_call_takes(tmp_path: Path) -> None:
    num_parts = 2500
    backend = FileBackend(tmp_path, fingerprint(4 * num_parts), ROOMY)
    page = list(content(key(0), 4 * num_parts).reshape(num_parts, 4))
    back = [np.zeros(4, np.uint8) for _ in range(num_parts)]
    assert backend.set([key(0)], [page]) == [True]
    assert backend.get([key(0)], [back]) == [True]
    assert np.array_equal(np.stack(back), np.stack(page))


def test_parts_must_make_up_a_page(tmp_path: Path) -> None:
    backend = small_backend(tmp_path)
    with pytest.raises(AssertionError, match="a page has 96 bytes"):
        backend.set([key(0)], empty(1, SMALL - 1))
    with pytest.raises(TypeError, match="contiguous"):
        backend.get([key(0)], [[np.zeros(2 * SMALL, np.uint8)[::2]]])
    assert page_files(tmp_path) == []


# --- with a storage key ----------------------------------------------------------------------------------

SECRET, OTHER = b"s" * 32, b"t" * 32


def keyed_backend(root: Path, secret: bytes | None) -> FileBackend:
    return FileBackend(root, fingerprint(SMALL), ROOMY, secret=secret)


def test_with_a_key_every_changed_byte_is_found(tmp_path: Path) -> None:
    backend = keyed_backend(tmp_path, SECRET)
    for position in range(page_file.header_nbytes(SECRET) + SMALL):
        assert backend.set([key(0)], contents([key(0)], SMALL)) == [True]
        (path,) = page_files(tmp_path)
        flip(path, position, 0x10)
        assert_miss_and_gone(backend, path, Reason.HEADER if position < 64 else Reason.MAC)


def test_with_a_key_nobody_else_can_write_a_page(tmp_path: Path) -> None:
    """Whoever may write to the disk can compute every checksum, but not the page's code without the key."""
    backend, other = keyed_backend(tmp_path, SECRET), keyed_backend(tmp_path, OTHER)
    wrong = [[content(key(1), SMALL)]]
    other.set([key(0)], wrong)
    (planted,) = page_files(tmp_path)
    backend.set([key(0)], contents([key(0)], SMALL))
    (path,) = (file for file in page_files(tmp_path) if file != planted)
    planted.replace(path)
    assert_miss_and_gone(backend, path, Reason.MAC)
    plain = keyed_backend(tmp_path, None)
    plain.set([key(0)], wrong)
    (unsigned,) = page_files(tmp_path)
    path.parent.mkdir(exist_ok=True)
    unsigned.replace(path)
    assert_miss_and_gone(backend, path, Reason.LENGTH)


def test_a_page_under_another_name_is_found_with_a_key_too(tmp_path: Path) -> None:
    """The code covers the name: sound pages cannot be exchanged, not even with a repaired header."""
    backend = keyed_backend(tmp_path, SECRET)
    backend.set([key(0), key(1)], contents([key(0), key(1)], SMALL))
    first, second = (next(tmp_path.glob(f"*/*/{key(n).hex()}.page")) for n in (0, 1))
    data = bytearray(second.read_bytes())
    data[16:48] = key(0)
    data[60:64] = zlib.crc32(data[:60]).to_bytes(4, "little")
    first.write_bytes(data)
    assert_miss_and_gone(backend, first, Reason.MAC)


def test_servers_with_and_without_keys_miss_each_other(tmp_path: Path) -> None:
    backends = [keyed_backend(tmp_path, secret) for secret in (None, SECRET, OTHER)]
    for number, backend in enumerate(backends):
        assert read_checked(backend, [key(0)]) == [False]
        assert backend.set([key(0)], contents([key(0)], SMALL)) == [True]
        assert len(page_files(tmp_path)) == number + 1
    for backend in backends:
        assert read_checked(backend, [key(0)]) == [True]
        assert backend.stats().errors == {}
    again = keyed_backend(tmp_path, SECRET)
    assert read_checked(again, [key(0)]) == [True]
