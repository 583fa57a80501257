"""Opens files and folders that belong only to this user, so that an entry made by another user is never used instead.

Every user can write to a temporary folder. A user who guesses a name there can make a symbolic link, a FIFO or a folder
with this name first. So checks of the path are not enough: an entry is opened without following a link and without
waiting for the other end of a pipe, and then its descriptor is checked. In a folder that belongs to us and to which
others cannot write, all entries are ours.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator

_NOTHING_FOREIGN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISREG, "a file"),
)


class ForeignEntryError(OSError):
    """An entry with this name is not ours, or others may change it. ``strerror`` says what it is."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(errno.EPERM, what, path)


def open_file(path: str, flags: int, dir_fd: int | None = None) -> int:
    """A descriptor of the regular file at ``path`` (relative to ``dir_fd``). With ``O_CREAT`` a missing file is made,
    which only this user can access. Raises :class:`ForeignEntryError` for anything else with that name, and
    ``OSError``."""
    return _open(path, flags, dir_fd, foreign_file)


def open_folder(path: str, dir_fd: int | None = None) -> int:
    """A descriptor of the folder at ``path`` (relative to ``dir_fd``), in which names can be looked up. Raises
    :class:`ForeignEntryError` for anything else with that name, and ``OSError``."""
    return _open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd, foreign_folder)


def make_folder(path: str, dir_fd: int | None = None) -> int:
    """Like :func:`open_folder`, but a missing folder is made, which only this user can access."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700, dir_fd=dir_fd)
    return open_folder(path, dir_fd)


def make_private_folder(path: str) -> int:
    """Like :func:`make_folder` for an absolute path. Missing parent folders are made with the user's default mode."""
    above = os.path.dirname(path)
    try:
        os.makedirs(above, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), above) from None
    return make_folder(path)


@contextlib.contextmanager
def new_file(path: str) -> Iterator[str]:
    """A path at which anything may write a file, a library too. At the end it becomes the file at ``path``, which only
    this user can access, whatever folder it is in; another file or link with that name is replaced. A pipe or a device
    is written to instead. Raises ``OSError``."""
    if os.path.exists(path) and not os.path.isfile(path):
        yield path
        return
    folder = tempfile.mkdtemp(prefix=".fenceline-", dir=os.path.dirname(path) or os.curdir)
    try:
        yield (inner := os.path.join(folder, os.path.basename(path)))
        os.chmod(inner, 0o600)
        os.replace(inner, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def why_unusable(path: str, error: OSError) -> str:
    """Why :func:`make_private_folder` has failed with ``error``, and the remedy, in one line."""
    what = error.strerror or str(error)
    if not isinstance(error, ForeignEntryError):
        return f"cannot be written ({what}); name another directory"
    if os.path.islink(path):
        return f"{what}; name the directory itself, {os.path.realpath(path)}"
    if not os.path.isdir(path):
        return f"{what}; name a directory"
    if os.stat(path).st_uid != os.geteuid():
        return f"{what}; name a directory of the user who runs the server"
    return f"{what}; run chmod go-w {shlex.quote(path)}, or name another directory"


def foreign_file(status: os.stat_result) -> str | None:
    """What is wrong with an entry; None if it is a regular file with one name to which only we can write."""
    if not stat.S_ISREG(status.st_mode):
        return _kind(status)
    # Writing to such a file would also change the file under its other name, as with a symbolic link.
    return "has a second name (a hard link)" if status.st_nlink > 1 else _shared(status)


def foreign_folder(status: os.stat_result) -> str | None:
    """What is wrong with an entry; None if it is a directory to which only we can write."""
    return _shared(status) if stat.S_ISDIR(status.st_mode) else _kind(status)


def _kind(status: os.stat_result) -> str:
    return "is " + next((name for test, name in _KINDS if test(status.st_mode)), "a device")


def _shared(status: os.stat_result) -> str | None:
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}"
    if status.st_mode & _WRITABLE_BY_OTHERS:
        return f"may be written to by other users (mode {stat.S_IMODE(status.st_mode):03o})"
    return None


def _open(path: str, flags: int, dir_fd: int | None, objection: Callable[[os.stat_result], str | None]) -> int:
    try:
        fd = os.open(path, flags | _NOTHING_FOREIGN, 0o600, dir_fd=dir_fd)
    except FileNotFoundError:
        raise
    except OSError as error:  # say what it is that could not be opened: a link, a socket, another user's file
        try:
            what = objection(os.stat(path, dir_fd=dir_fd, follow_symlinks=False))
        except OSError:
            raise error from None
        if what is None:
            raise
        raise ForeignEntryError(path, what) from error
    try:
        what = objection(os.fstat(fd))
        if what is not None:
            raise ForeignEntryError(path, what)
    except BaseException:
        os.close(fd)
        raise
    return fd
