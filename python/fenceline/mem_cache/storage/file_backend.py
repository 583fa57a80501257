"""FileBackend: a directory of page files on a local disk, shared by all servers that name it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fenceline.config.private_files import ForeignEntryError
from fenceline.mem_cache.page_hash import PageFingerprint, PageKey
from fenceline.mem_cache.storage import page_file
from fenceline.mem_cache.storage.backend import PageParts, Reason, StorageError, StorageStats
from fenceline.mem_cache.storage.directory import Cleaner, StorageDirectory, TempFile

# A page's time of last use is its file's mtime. Pages of one call get times this far apart, and the first page the
# latest: a prefix then loses its last pages first, since a page is of no use without those before it.
_STEP_NS = 1000
_START_TIMEOUT_S = 30.0  # another server may be making room
_OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FileBackend:
    """The ``StorageBackend`` that keeps each page in a file (see ``page_file`` and ``directory`` for the layout). A
    page appears under its name complete or not at all, even if its writer dies; a page that cannot be verified is a
    miss and is removed. The files of all models in the directory together never exceed ``max_bytes`` (of the server
    that writes). Threads and processes may use a directory at the same time; the backend starts no thread itself."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        fingerprint: PageFingerprint,
        max_bytes: int,
        *,
        secret: bytes | None = None,
        fsync: bool = False,
        clean_to: float = 0.9,
        lock_timeout_s: float = 1.0,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """``secret``: the storage key, by which each page is authenticated; servers with another one, or none, keep
        pages of their own beside these. ``fsync``: a page is on the disk before it appears; without it the system
        decides when to write the page, and one that a power failure has damaged is a miss because of its checksum.
        ``clean_to``: the share of ``max_bytes`` down to which pages are evicted. ``clock``: wall-clock time in ns.
        Scans the directory. Raises ``ValueError`` if it cannot be used."""
        self._page_nbytes = fingerprint.page_nbytes
        self._file_nbytes = page_file.header_nbytes(secret) + fingerprint.page_nbytes
        if max_bytes < self._file_nbytes:
            raise ValueError(
                f"a storage of {max_bytes} bytes cannot hold one page of {self._file_nbytes}: make it larger"
            )
        assert 0.0 < clean_to <= 1.0, f"clean_to is a share, got {clean_to}"
        self._secret = secret
        self._model = _folder_of(fingerprint, secret)
        self._fsync = fsync
        self._clock = clock
        self._stats = StorageStats()
        self._stats_lock = threading.Lock()
        try:
            self._directory = StorageDirectory(Path(root), lock_timeout_s, self._note)
            self._cleaner = Cleaner(self._directory, max_bytes, int(max_bytes * clean_to))
            self._open(fingerprint)
        except ForeignEntryError as error:
            raise ValueError(
                f"cannot use the storage directory {os.fspath(root)}: {error.filename} {error.strerror}; name one that"
                " this user alone may write"
            ) from error
        except OSError as error:
            raise ValueError(
                f"cannot use the storage directory {os.fspath(root)}: {error}; name one that this user may write"
            ) from error
        except StorageError as error:
            raise ValueError(f"cannot use the storage directory: {error}; end it or name another one") from error

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page's payload."""
        return self._page_nbytes

    def tell_removed(self, tell: Callable[[Sequence[PageKey]], None], beside: Sequence[FileBackend] = ()) -> None:
        """Have ``tell`` called with the keys of pages that a call removes, in the caller's thread, before the call
        returns; also with those that the backends ``beside`` this one remove to make room."""
        model = self._model
        for backend in (self, *beside):
            backend._directory.on_removed = lambda paths: tell(StorageDirectory.keys_of(model, paths))

    def stats(self) -> StorageStats:
        """Counts since this object was made."""
        total = StorageStats()
        with self._stats_lock:
            total.add(self._stats)
        return total

    # --- the calls -----------------------------------------------------------------------------------

    def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        """See ``StorageBackend``. One system call a page."""
        now = self._clock()
        return [self._directory.touch(self._path(key), now - i * _STEP_NS) for i, key in enumerate(keys)]

    def get(self, keys: Sequence[PageKey], pages: Sequence[PageParts]) -> list[bool]:
        """See ``StorageBackend``. The bytes are read from the disk straight into the parts."""
        now, stats = self._clock(), StorageStats()
        found = [
            self._get_page(key, page, now - i * _STEP_NS, stats)
            for i, (key, page) in enumerate(zip(keys, pages, strict=True))
        ]
        num_hits = sum(found)
        stats.hits, stats.misses = num_hits, len(found) - num_hits
        stats.read_bytes = num_hits * self._page_nbytes
        self._add(stats)
        return found

    def set(self, keys: Sequence[PageKey], pages: Sequence[PageParts]) -> list[bool]:
        """See ``StorageBackend``. The first page for which there is no room ends the call: there is no room for those
        after it either, and a prefix could not use them."""
        now, stats = self._clock(), StorageStats()
        keep_since = now - len(keys) * _STEP_NS
        stored = [False] * len(keys)
        for i, (key, page) in enumerate(zip(keys, pages, strict=True)):
            parts = page_file.views(page, self._page_nbytes)
            try:
                self._set_page(key, parts, now - i * _STEP_NS, keep_since, stats)
                stored[i] = True
            except (StorageError, OSError) as error:
                reason = _reason(error)
                no_room = reason in (Reason.FULL, Reason.NO_SPACE)
                stats.errors[reason] += len(keys) - i if no_room else 1
                if no_room:
                    break
        stats.unwritten = len(keys) - sum(stored)
        self._add(stats)
        return stored

    def clear(self) -> int:
        """See ``StorageBackend``. Other servers of this model lose their pages too."""
        removed: list[str] = []
        try:
            with self._directory.locked() as usage:
                for page in self._directory.pages_of(self._model):
                    with contextlib.suppress(FileNotFoundError):  # another process has removed it
                        self._directory.unlink(page.path)
                        removed.append(page.path)
                usage.write(self._directory.scan()[0])
        except (OSError, StorageError) as error:
            self._note(_reason(error))
        self._directory.on_removed(removed)
        return len(removed)

    # --- one page ------------------------------------------------------------------------------------

    def _get_page(self, key: PageKey, page: PageParts, used_ns: int, stats: StorageStats) -> bool:
        parts = page_file.views(page, self._page_nbytes)
        path = self._path(key)
        try:
            fd = self._directory.open(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            stats.errors[_reason(error)] += 1
            return False
        try:
            page_file.read_page(fd, key, parts, self._secret)
            self._touch(fd, used_ns)
        except (StorageError, OSError) as error:
            stats.errors[_reason(error)] += 1
            # A damaged file is removed. One that the system could not read may be sound.
            if isinstance(error, StorageError):
                self._remove(path)
                self._directory.on_removed([path])
            return False
        finally:
            os.close(fd)
        return True

    def _set_page(
        self, key: PageKey, parts: Sequence[memoryview], used_ns: int, keep_since_ns: int, stats: StorageStats
    ) -> None:
        path = self._path(key)
        if self._directory.holds(path) and self._directory.touch(path, used_ns):
            stats.duplicates += 1
            return
        temp = self._reserve(keep_since_ns, stats)
        try:
            page_file.write_page(temp.fd, key, parts, self._secret)
            if self._fsync:
                os.fsync(temp.fd)
            os.utime(temp.fd, ns=(used_ns, used_ns))
            self._directory.publish(temp.path, path)
        except BaseException:
            self._remove(temp.path)
            raise
        finally:
            os.close(temp.fd)
        stats.writes += 1
        stats.written_bytes += self._page_nbytes

    def _reserve(self, keep_since_ns: int, stats: StorageStats) -> TempFile:
        """A temporary file for one page, its bytes counted. Raises ``StorageError``, ``OSError``."""
        if self._directory.num_free_bytes() < self._file_nbytes:
            raise StorageError(Reason.NO_SPACE, "the disk is full")
        with self._directory.locked() as usage:
            if not self._cleaner.make_room(usage, self._file_nbytes, self._clock(), keep_since_ns, stats):
                raise StorageError(Reason.FULL, "every page is newer than this call")
            used = usage.used
            assert used is not None, "make_room has written the number"
            usage.write(used + self._file_nbytes)
            try:
                return self._directory.make_temp(self._file_nbytes)
            except OSError:
                usage.write(used)
                raise

    def _remove(self, path: str) -> None:
        """Remove an unusable file, if it is still there, and subtract its bytes from the bytes in use."""
        try:
            with self._directory.locked() as usage:
                # Somebody may have changed the file's length: never subtract more than was counted.
                usage.subtract(min(self._directory.unlink(path), self._file_nbytes))
        except (OSError, StorageError):
            # It cannot be removed now. The file stays and is counted; the next read or scan tries again.
            pass

    def _touch(self, fd: int, used_ns: int) -> None:
        with contextlib.suppress(OSError):  # a directory that we may only read
            os.utime(fd, ns=(used_ns, used_ns))

    def _add(self, stats: StorageStats) -> None:
        """Add the counts of one call. Several threads call this."""
        with self._stats_lock:
            self._stats.add(stats)

    def _note(self, reason: Reason) -> None:
        stats = StorageStats()
        stats.errors[reason] += 1
        self._add(stats)

    def _path(self, key: PageKey) -> str:
        return self._directory.page_path(self._model, key)

    def _open(self, fingerprint: PageFingerprint) -> None:
        """Correct the number of bytes in use, whatever happened to the last server, and check that we may write."""
        stats = StorageStats()
        with self._directory.locked(_START_TIMEOUT_S) as usage:
            self._cleaner.clean(usage, 0, self._clock(), None, stats)
            temp = self._directory.make_temp(0)
            try:
                os.write(temp.fd, fingerprint.describe().encode() + b"\n")
                # Tells people what the hexadecimal directory is.
                self._directory.publish(temp.path, f"{self._model}/fingerprint.json")
            except OSError as error:
                self._directory.unlink(temp.path)
                if _reason(error) is not Reason.NO_SPACE:  # on a full disk the pages can still be read
                    raise
            finally:
                os.close(temp.fd)
        self._add(stats)


def _folder_of(fingerprint: PageFingerprint, secret: bytes | None) -> str:
    """The folder of a fingerprint's pages. Each storage key has a folder of its own, because servers with different
    keys would remove each other's pages as damaged."""
    if secret is None:
        return fingerprint.directory_name()
    return hmac.new(secret, b"folder" + fingerprint.root_key(), hashlib.sha256).hexdigest()[:32]


def _reason(error: OSError | StorageError) -> Reason:
    if isinstance(error, StorageError):
        return error.reason
    if isinstance(error, ForeignEntryError):
        return Reason.FOREIGN
    return Reason.NO_SPACE if error.errno in _OUT_OF_SPACE else Reason.IO
