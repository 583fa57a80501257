"""Files and folders that belong to this user alone, opened so that another user's entry is never used in their place.

Every user can write to a temporary folder. Whoever guesses a name there can put a symbolic link, a FIFO or a folder of
their own in its place first. So nothing is judged by its path: an entry is opened without following a link and without
waiting for the other end of a pipe, and what was opened is judged by its descriptor. In a folder that is ours and that
others cannot write to, every name is ours from then on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import stat
from collections.abc import Callable

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
    """A name is taken by what is not ours, or what others may change. ``strerror`` says what it is."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(errno.EPERM, what, path)


def open_file(path: str, flags: int, dir_fd: int | None = None) -> int:
    """A descriptor of the regular file at ``path`` (relative to ``dir_fd``); ``O_CREAT`` makes one for us alone.

    Raises :class:`ForeignEntryError` for anything else of that name, and ``OSError``."""
    return _open(path, flags, dir_fd, foreign_file)


def open_folder(path: str, dir_fd: int | None = None) -> int:
    """A descriptor of the folder at ``path`` (relative to ``dir_fd``), to look names up in.

    Raises :class:`ForeignEntryError` for anything else of that name, and ``OSError``."""
    return _open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd, foreign_folder)


def make_folder(path: str, dir_fd: int | None = None) -> int:
    """The same; where nothing has the name, a folder for us alone is made."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700, dir_fd=dir_fd)
    return open_folder(path, dir_fd)


def make_private_folder(path: str) -> int:
    """The same for an absolute path; missing folders above it are made as the user's settings have them."""
    above = os.path.dirname(path)
    try:
        os.makedirs(above, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), above) from None
    return make_folder(path)


def why_unusable(path: str, error: OSError) -> str:
    """What keeps :func:`make_private_folder` from its folder, and the remedy, in one line."""
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
    """What an entry is if it is not a regular file that we alone can write to, under this one name."""
    if not stat.S_ISREG(status.st_mode):
        return _kind(status)
    # Writing to it would change the file behind the other name too, as with a symbolic link.
    return "has a second name (a hard link)" if status.st_nlink > 1 else _shared(status)


def foreign_folder(status: os.stat_result) -> str | None:
    """What an entry is if it is not a directory that we alone can write to."""
    return _shared(status) if stat.S_ISDIR(status.st_mode) else _kind(status)


def _kind(status: os.stat_result) -> str:
    return "is " + next((name for test, name in _KINDS if test(status.st_mode)), "a device")


def _shared(status: os.stat_result) -> str | None:
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}"
    if status.st_mode & _WRITABLE_BY_OTHERS:
        return f"may be written to by other users (mode {stat.S_IMODE(status.st_mode):03o})"
    return None


def _open(
    path: str, flags: int, dir_fd: int | None, objection: Callable[[os.stat_result], str | None]
) -> int:
    try:
        fd = os.open(path, flags | _NOTHING_FOREIGN, 0o600, dir_fd=dir_fd)
    except FileNotFoundError:
        raise
    except OSError as error:  # say what could not be opened: a link, a socket, another user's file
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
