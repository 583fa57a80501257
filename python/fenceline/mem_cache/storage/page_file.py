"""One page in one file: a header of 64 bytes, then the payload.

==========  ===================================================================
bytes       little-endian
==========  ===================================================================
0 .. 8      magic
8 .. 12     version of the format, 1
12 .. 16    bytes of the header, 64
16 .. 48    the page's key
48 .. 56    bytes of the payload
56 .. 60    CRC-32 of the payload
60 .. 64    CRC-32 of the 60 bytes before
==========  ===================================================================

A CRC-32 finds every error within 32 consecutive bits, so no damaged byte passes; arbitrary damage passes with a chance
of one in 2^32. It is the fastest sum that the standard library has (3.6 GB/s where SHA-1 makes 1.6 and BLAKE2b 0.6).
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence

from fenceline.mem_cache.storage.base import PageParts, Reason, StorageError
from fenceline.mem_cache.storage.page_hash import KEY_NBYTES, PageKey

MAGIC = b"\x89FLPAGE\n"
VERSION = 1
HEADER_NBYTES = 64
_FIELDS = struct.Struct("<8sII32sQI")
_SUM = struct.Struct("<I")
# The least that a system must take in one vectored call is 16, Linux and macOS take 1024.
_MAX_PARTS = 1024


def views(page: PageParts, page_nbytes: int) -> list[memoryview]:
    """The parts of a page as flat views. They must be contiguous and make up ``page_nbytes`` in all."""
    flat = [(part if isinstance(part, memoryview) else part.data).cast("B") for part in page]
    total = sum(view.nbytes for view in flat)
    assert total == page_nbytes, f"a page has {page_nbytes} bytes, its parts have {total}"
    return flat


def write_page(fd: int, key: PageKey, parts: Sequence[memoryview]) -> None:
    """Write a whole page file from where ``fd`` stands. Raises ``OSError``."""
    crc = nbytes = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
        nbytes += part.nbytes
    rest: Sequence[memoryview] = [memoryview(_header(key, nbytes, crc)), *parts]
    while rest:
        rest = _after(rest, os.writev(fd, rest[:_MAX_PARTS]))


def read_page(fd: int, key: PageKey, parts: Sequence[memoryview]) -> None:
    """Read the payload into ``parts`` and verify it. Raises ``StorageError`` for a damaged file, ``OSError``."""
    nbytes = sum(part.nbytes for part in parts)
    size = os.fstat(fd).st_size
    if size != HEADER_NBYTES + nbytes:
        raise StorageError(Reason.LENGTH, f"{size} bytes instead of {HEADER_NBYTES + nbytes}")
    header = bytearray(HEADER_NBYTES)
    rest: Sequence[memoryview] = [memoryview(header), *parts]
    offset = 0
    while rest:
        num_read = os.preadv(fd, rest[:_MAX_PARTS], offset)
        if num_read == 0:  # somebody shortened it since
            raise StorageError(Reason.LENGTH, f"ends after {offset} bytes")
        offset += num_read
        rest = _after(rest, num_read)
    _verify(bytes(header), key, parts)


def _header(key: PageKey, nbytes: int, crc: int) -> bytes:
    assert len(key) == KEY_NBYTES, f"a key has {KEY_NBYTES} bytes, this one {len(key)}"
    fields = _FIELDS.pack(MAGIC, VERSION, HEADER_NBYTES, key, nbytes, crc)
    return fields + _SUM.pack(zlib.crc32(fields))


def _verify(header: bytes, key: PageKey, parts: Sequence[memoryview]) -> None:
    fields = header[: _FIELDS.size]
    magic, version, header_nbytes, name, nbytes, crc = _FIELDS.unpack(fields)
    if _SUM.unpack(header[_FIELDS.size :])[0] != zlib.crc32(fields):
        raise StorageError(Reason.HEADER, "the header's checksum is wrong")
    if (magic, version, header_nbytes) != (MAGIC, VERSION, HEADER_NBYTES):
        raise StorageError(Reason.HEADER, f"not a page file of version {VERSION}")
    if name != key:
        raise StorageError(Reason.KEY, f"holds page {name.hex()}")
    if nbytes != sum(part.nbytes for part in parts):
        raise StorageError(Reason.LENGTH, f"its header says {nbytes} bytes")
    actual = 0
    for part in parts:
        actual = zlib.crc32(part, actual)
    if actual != crc:
        raise StorageError(Reason.CHECKSUM, "the payload's checksum is wrong")


def _after(parts: Sequence[memoryview], nbytes: int) -> Sequence[memoryview]:
    """What is left of ``parts`` behind the first ``nbytes``; a call may move fewer bytes than asked for."""
    for i, part in enumerate(parts):
        if nbytes < part.nbytes:
            return [part[nbytes:], *parts[i + 1 :]]
        nbytes -= part.nbytes
    return []
